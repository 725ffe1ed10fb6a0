"""What a power cut leaves of a local folder, by a record of what was flushed to the medium."""

from __future__ import annotations

import errno
import os
import pickle
import stat
from pathlib import Path

import pytest
import torch

import dcpstore
from dcpstore import WriteConfig
from dcpstore.errors import AlreadyExistsError, StoreError
from dcpstore.store import RetryPolicy, open_store

ONCE = RetryPolicy(max_attempts=1)
ENGINES = pytest.mark.parametrize("engine", ["obstore", "fsspec"])


class Medium:
    """Knows what `os.fsync` was called for, and so what is left when the power goes.

    Nothing else is on the medium for certain. What else may be there is the filesystem's choice:
    names may be written early, and the bytes that belong to them later.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.root = root
        self.events: list[str] = []
        self.failures: dict[str, int] = {}
        self.on_event = lambda: None
        self._files: dict[int, bytes] = {}
        self._names: dict[int, dict[str, tuple[int, bool]]] = {}
        self._held: list[int] = []  # so that no inode is used again
        fsync, replace, link = os.fsync, Path.replace, os.link

        def sync(number: int) -> None:
            found, path = os.fstat(number), Path(f"/proc/self/fd/{number}").readlink()
            is_folder = stat.S_ISDIR(found.st_mode)
            if failure := self.failures.get("folder" if is_folder else "file"):
                raise OSError(failure, os.strerror(failure))
            fsync(number)
            self._held.append(os.dup(number))
            if is_folder:
                with os.scandir(path) as entries:
                    self._names[found.st_ino] = {
                        one.name: (one.inode(), one.is_dir()) for one in entries
                    }
            else:
                self._files[found.st_ino] = path.read_bytes()
            self._note("sync", path)

        def rename(path: Path, target: Path) -> Path:
            made = replace(path, target)
            self._note("publish", target)
            return made

        def make_link(path: Path, target: Path) -> None:
            link(path, target)
            self._note("publish", target)

        monkeypatch.setattr(os, "fsync", sync)
        monkeypatch.setattr(Path, "replace", rename)
        monkeypatch.setattr(os, "link", make_link)

    def _note(self, what: str, path: Path) -> None:
        if path.is_relative_to(self.root):
            name = path.relative_to(self.root).as_posix()
            is_temporary = path.name.startswith(".dcpstore-tmp-")
            self.events.append(f"{what} {'the new file' if is_temporary else name}")
            self.on_event()

    def cut(self, target: Path, *, names_are_early: bool) -> Path:
        """Write down what is left of the root when the power goes now."""
        self._restore(self.root.stat().st_ino, self.root, target, names_are_early)
        return target

    def _restore(self, number: int, real: Path, target: Path, names_are_early: bool) -> None:
        target.mkdir()
        names = dict(self._names.get(number, {}))
        if names_are_early and real.is_dir():
            names = {one.name: (one.inode(), one.is_dir()) for one in os.scandir(real)}
        for name, (inode, is_folder) in names.items():
            if is_folder:
                self._restore(inode, real / name, target / name, names_are_early)
            else:
                (target / name).write_bytes(self._files.get(inode, b""))

    def close(self) -> None:
        for number in self._held:
            os.close(number)


@pytest.fixture
def medium(monkeypatch, tmp_path):
    (tmp_path / "disk").mkdir()
    made = Medium(monkeypatch, tmp_path / "disk")
    yield made
    monkeypatch.undo()
    made.close()


def state_of(number: int) -> dict[str, object]:
    return {**{f"w{i}": torch.full((3000,), float(number)) for i in range(4)}, "n": number}


def number_in(url: Path) -> int:
    """Load a checkpoint and tell which it is."""
    found = state_of(0)
    dcpstore.load(found, url, progress=False)
    expected = state_of(int(found["n"]))
    assert all(torch.equal(found[key], expected[key]) for key in expected if key != "n")
    return int(found["n"])


@ENGINES
def test_a_file_is_flushed_before_it_has_its_name_and_its_folders_after(engine, medium):
    store = open_store(medium.root / "run/step-1", engine=engine, retry=ONCE)
    store.put("a", b"1")
    assert medium.events == [
        "sync the new file",
        "publish run/step-1/a",
        "sync run/step-1",
        "sync run",
        "sync .",
    ]
    for write in (
        lambda: store.put("b", b"1", mode="create"),
        lambda: store.put_parts("b", [b"123", b"4"], part_bytes=3, max_concurrency=2),
    ):
        medium.events.clear()
        write()
        assert medium.events == ["sync the new file", "publish run/step-1/b", "sync run/step-1"]


@ENGINES
def test_a_folder_that_was_removed_is_flushed_anew(engine, medium):
    store = open_store(medium.root / "run", engine=engine, retry=ONCE)
    store.put("a", b"1")
    (medium.root / "run/a").unlink()
    (medium.root / "run").rmdir()
    medium.events.clear()
    store.put("a", b"1")
    assert medium.events[-2:] == ["sync run", "sync ."]


@ENGINES
@pytest.mark.parametrize("names_are_early", [False, True])
def test_a_save_that_returned_outlives_a_power_cut(engine, names_are_early, medium, tmp_path):
    config = WriteConfig(engine=engine, object_bytes=1 << 14, embed_manifest_bytes=0)
    dcpstore.save(state_of(1), medium.root / "run/step-1", config=config, progress=False)
    left = medium.cut(tmp_path / "left", names_are_early=names_are_early)
    assert number_in(left / "run/step-1") == 1


@pytest.mark.parametrize("names_are_early", [False, True])
def test_whenever_the_power_goes_the_old_checkpoint_or_the_new_one_is_whole(
    names_are_early, medium, tmp_path
):
    url = medium.root / "run/step-1"
    config = WriteConfig(object_bytes=1 << 14, max_uploads=1)  # one event after another
    dcpstore.save(state_of(1), url, config=config, progress=False)
    seen: list[int] = []

    def cut() -> None:
        left = medium.cut(tmp_path / f"left-{len(seen)}", names_are_early=names_are_early)
        seen.append(number_in(left / "run/step-1"))

    medium.on_event = cut
    dcpstore.save(state_of(2), url, config=config, overwrite=True, progress=False)
    medium.on_event = lambda: None
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (1, 2)


def test_without_flushing_a_power_cut_loses_a_save(medium, tmp_path):
    """The record itself can fail: this is what the other tests would see."""
    config = WriteConfig(sync_local=False)
    dcpstore.save(state_of(1), medium.root / "run", config=config, progress=False)
    assert not [one for one in medium.events if one.startswith("sync")]
    left = medium.cut(tmp_path / "left", names_are_early=True)
    assert (left / "run" / ".metadata").read_bytes() == b""


@ENGINES
def test_a_copy_in_another_process_flushes_as_its_original_does(engine, medium):
    for is_synced in (True, False):
        store = open_store(medium.root, engine=engine, sync_local=is_synced)
        pickle.loads(pickle.dumps(store)).put("a", b"1")
        assert ("sync the new file" in medium.events) is is_synced
        medium.events.clear()


@ENGINES
def test_a_file_that_cannot_be_flushed_is_not_published(engine, medium):
    store = open_store(medium.root, engine=engine, retry=ONCE)
    store.put("a", b"old")
    for number in (errno.ENOSPC, errno.EIO):
        medium.failures = {"file": number}
        for write in (
            lambda: store.put("a", b"new"),
            lambda: store.put_parts("a", [b"123", b"4"], part_bytes=3, max_concurrency=2),
        ):
            with pytest.raises(StoreError, match=os.strerror(number)) as caught:
                write()
            assert caught.value.retryable is (number == errno.EIO)
    medium.failures = {"file": errno.ENOSPC}
    with pytest.raises(StoreError) as caught:
        store.put("a", b"new")
    assert caught.value.refused
    assert (medium.root / "a").read_bytes() == b"old"
    assert [path.name for path in medium.root.iterdir()] == ["a"]


@ENGINES
def test_a_name_that_cannot_be_flushed_fails_the_put(engine, medium):
    store = open_store(medium.root, engine=engine, retry=ONCE)
    for number in (errno.ENOSPC, errno.EIO):
        medium.failures = {"folder": number}
        with pytest.raises(StoreError, match="could not be flushed") as caught:
            store.put("a", b"1")
        assert not caught.value.refused  # it may be there
        assert caught.value.retryable
    medium.failures = {}
    store.put("a", b"2", mode="overwrite")
    with pytest.raises(AlreadyExistsError):
        store.put("a", b"3", mode="create")


@ENGINES
def test_a_filesystem_that_flushes_no_folders_is_used_as_it_is(engine, medium, monkeypatch):
    store = open_store(medium.root, engine=engine, retry=ONCE)
    medium.failures = {"folder": errno.EINVAL}
    store.put("a", b"1")

    def refuse(path, flags, *more, **options):
        raise PermissionError(errno.EACCES, "closed to us", str(path))

    opening = os.open
    monkeypatch.setattr(
        os,
        "open",
        lambda path, flags, *more, **options: (
            refuse(path, flags) if Path(path).is_dir() else opening(path, flags, *more, **options)
        ),
    )
    open_store(medium.root, engine=engine, retry=ONCE).put("b", b"1")
    assert (medium.root / "b").read_bytes() == b"1"


@ENGINES
def test_a_put_tells_the_mark_of_its_own_file(engine, medium):
    """Another writer may replace it at once."""
    store = open_store(medium.root, engine=engine, retry=ONCE)
    seen: list[str | None] = []

    def other() -> None:
        if not seen and medium.events[-1].startswith("publish"):
            seen.append(store.get("a").etag)
            store.put("a", b"of another")

    medium.on_event = other
    assert store.put("a", b"mine") == seen[0]
    assert bytes(store.get("a").data) == b"of another"


@ENGINES
def test_a_file_that_is_being_written_is_not_listed(engine, medium):
    store = open_store(medium.root, engine=engine, retry=ONCE)
    listed: list[list[str]] = []

    def parts():
        yield b"123"
        listed.append([one.key for one in store.list()])
        yield b"4"

    store.put_parts("run/a", parts(), part_bytes=3, max_concurrency=1)
    assert listed == [[]]
    assert [one.key for one in store.list()] == ["run/a"]
