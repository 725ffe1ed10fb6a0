"""What only some engines can get wrong: folders, temporary files, sharing."""

from __future__ import annotations

import os
import pickle

import pytest

from dcpstore.errors import NotFoundError
from dcpstore.store import IfMatch, open_store
from dcpstore.testing import conformance

LOCAL = ("obstore-local", "fsspec-local")


def files_below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("engine", LOCAL)
def test_reading_makes_no_folder(engine, open_engine, tmp_path):
    store = open_engine(engine, "absent")
    with pytest.raises(NotFoundError):
        store.get("a")
    assert list(store.list()) == []
    store.delete_many(["a"])
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("engine", LOCAL)
def test_no_temporary_file_stays(engine, open_engine, tmp_path):
    store = open_engine(engine, "place")
    store.put("a/b", b"1")
    store.put("a/b", b"2", mode=IfMatch(store.get("a/b").etag))
    store.put("c", b"1", mode="create")
    with pytest.raises(Exception):  # noqa: B017 - whatever it is, nothing may stay
        store.put("c", b"2", mode="create")

    def failing():
        yield b"123"
        raise KeyError

    with pytest.raises(KeyError):
        store.put_parts("d", failing(), part_bytes=3, max_concurrency=1)
    store.put_parts("e", [b"123", b"4"], part_bytes=3, max_concurrency=1)
    assert files_below(tmp_path / "place") == ["a/b", "c", "e"]


@pytest.mark.parametrize("engine", LOCAL)
def test_a_local_store_sees_what_others_wrote(engine, open_engine, tmp_path):
    store = open_engine(engine, "place")
    assert list(store.list()) == []
    (tmp_path / "place").mkdir(exist_ok=True)
    (tmp_path / "place" / "new").write_bytes(b"12")
    assert [info.key for info in store.list()] == ["new"]
    (tmp_path / "place" / "new").write_bytes(b"345")
    assert bytes(store.get("new").data) == b"345"


def test_both_local_engines_read_each_other(open_engine):
    for key in conformance.ODD_KEYS:
        open_engine("obstore-local", "place").put(key, b"o")
        assert bytes(open_engine("fsspec-local", "place").get(key).data) == b"o"
        open_engine("fsspec-local", "place").put(key, b"f")
        assert bytes(open_engine("obstore-local", "place").get(key).data) == b"f"


def test_a_relative_root_survives_a_change_of_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = open_store("runs")
    os.chdir("/")
    store.put("a", b"1")
    assert (tmp_path / "runs" / "a").read_bytes() == b"1"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
@pytest.mark.parametrize("engine", LOCAL)
def test_a_folder_without_rights_is_denied(engine, open_engine, tmp_path):
    (tmp_path / "shut").mkdir(mode=0o500)
    with pytest.raises(Exception, match="denied"):
        open_engine(engine, "shut").put("a", b"1")


def test_memory_is_one_for_the_process_under_fsspec_only():
    open_store("memory://shared/x").put("a", b"1")
    again = open_store("memory://shared/x")
    assert bytes(again.get("a").data) == b"1"
    assert bytes(pickle.loads(pickle.dumps(again)).get("a").data) == b"1"
    assert [info.key for info in open_store("memory://shared").list()] == ["x/a"]
    private = open_store("memory://shared/x", engine="obstore")
    with pytest.raises(NotFoundError):
        private.get("a")


@pytest.mark.parametrize("engine", ["obstore-memory", "fsspec-memory"])
def test_memory_does_not_keep_the_callers_buffers(engine, open_engine):
    store = open_engine(engine)
    slab = bytearray(b"first")
    store.put("a", slab)

    def parts():
        for text in (b"one", b"two", b"x"):
            slab[:3] = b"..."
            slab[: len(text)] = text
            yield memoryview(slab)[: len(text)]

    if engine == "fsspec-memory":
        store.put_parts("b", parts(), part_bytes=3, max_concurrency=1)
        assert bytes(store.get("b").data) == b"onetwox"
    slab[:] = b"other"
    assert bytes(store.get("a").data) == b"first"


def test_a_filesystem_that_only_fsspec_knows_is_served(tmp_path):
    import fsspec
    from fsspec.implementations.dirfs import DirFileSystem
    from fsspec.implementations.local import LocalFileSystem

    class Elsewhere(DirFileSystem):
        protocol = "elsewhere"

        def __init__(self, **options):
            options.pop("use_listings_cache", None)
            super().__init__(path=str(tmp_path), fs=LocalFileSystem(auto_mkdir=True))

    fsspec.register_implementation("elsewhere", Elsewhere, clobber=True)
    for check in (
        conformance.a_put_can_be_read_back,
        conformance.ranges_are_exact_at_every_edge,
        conformance.a_range_past_the_end_is_corruption,
        conformance.a_create_succeeds_once,
        conformance.compare_and_swap_needs_the_right_mark,
        conformance.a_failing_stream_publishes_nothing,
        conformance.parts_become_one_object,
        conformance.deletes_forgive_what_is_absent,
    ):
        check(open_store("elsewhere://place"))
