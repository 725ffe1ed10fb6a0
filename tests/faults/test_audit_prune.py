"""`prune`: it removes what nothing refers to, and never anything else."""

from __future__ import annotations

import dataclasses
import io
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dcpstore
from dcpstore.audit.prune import Leftovers, Pruned, Rules, find_leftovers, remove
from dcpstore.audit.prune import Place as Found
from dcpstore.audit.verify import verify_checkpoint
from dcpstore.cli.main import main
from dcpstore.errors import ConfigError, NotFoundError, StoreError
from dcpstore.store import ObjectInfo, Store, open_store
from dcpstore.testing import Fault, FaultyStore, RecordingStore, StoreFault
from faults.places import APART, HERE, Place
from faults.ranks import save_alone
from faults.states import state_at

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")]

DAY_S = 86400.0
LATER = Rules()
NOW = Rules(older_than_s=0)
DATA, OTHER = "__0_0.0123456789abcdef.distcp", "__3_1.fedcba9876543210.distcp"
MANIFEST = ".dcpstore-0123456789abcdef"


def in_two_days() -> float:
    return time.time() + 2 * DAY_S


def shared_memory() -> Store:
    return open_store("memory://prune", engine="obstore")


def place_of(store: Store, uploads: Any = None) -> Found:
    return Found(
        "memory://prune",
        store_opener=lambda *_args, **_options: store,
        uploads_opener=lambda *_args, **_options: uploads,
    )


def find(store: Store, rules: Rules = LATER, clock: Any = in_two_days) -> Leftovers:
    return find_leftovers(place_of(store), rules, clock)


def removable(found: Leftovers) -> list[str]:
    return [one.key for one in found.removable]


def reasons(found: Leftovers) -> str:
    return "; ".join(kept.reason for kept in found.kept)


def keys_of(store: Store) -> set[str]:
    return {info.key for info in store.list()}


def save_into(
    store: Store, step: int, *, overwrite: bool = False, folder: str = "", **knobs: int
) -> None:
    """Save into a folder of a store in memory."""
    inner = Below(store, folder) if folder else store
    writer = dcpstore.ObjectStoreWriter(
        "memory://prune",
        overwrite=overwrite,
        config=dcpstore.WriteConfig(**knobs),
        store_opener=lambda *_a, **_o: inner,
    )
    dcp.save(state_at(step), storage_writer=writer, no_dist=True)


class Below:
    """The part of a store below a folder."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._folder = folder
        self.url = f"{store.url}/{folder}"
        self.capabilities = store.capabilities

    def __getattr__(self, verb: str) -> Any:
        method = getattr(self._store, verb)
        return lambda key, *args, **more: method(self._folder + key, *args, **more)

    def close(self) -> None:
        """The store stays open."""


# --- what is removed -----------------------------------------------------------------


@pytest.mark.parametrize("layout", [HERE, APART], ids=["here", "apart"])
def test_what_an_unsealed_save_left_is_removed_and_the_checkpoint_stays_whole(layout):
    store = shared_memory()
    save_into(store, 1, **layout)
    sealed = keys_of(store)
    for key in (DATA, OTHER, MANIFEST):
        store.put(key, b"1234")
    with place_of(store) as at:
        found = find_leftovers(at, LATER, in_two_days)
        assert sorted(removable(found)) == sorted([DATA, OTHER, MANIFEST])
        assert found.num_bytes == 12
        pruned = remove(at, found)
    assert len(pruned.removed) == 3
    assert pruned.removed_bytes == 12
    assert not pruned.failed
    assert keys_of(store) == sealed
    assert verify_checkpoint("memory://prune", store_opener=lambda *_a, **_o: store).is_sound


def test_looking_deletes_nothing():
    store = RecordingStore(shared_memory())
    store.put(DATA, b"1")
    assert removable(find(store)) == [DATA]
    assert store.counts["delete_many"] == 0
    assert keys_of(store) == {DATA}


def test_every_folder_of_a_run_is_judged_by_its_own_metadata():
    store = shared_memory()
    for step in (1, 2):
        save_into(store, step, folder=f"step-{step}/")
    store.put(f"step-1/{DATA}", b"1")
    store.put(f"step-3/{OTHER}", b"1")
    before = keys_of(store)
    with place_of(store) as at:
        remove(at, find_leftovers(at, LATER, in_two_days))
    assert before - keys_of(store) == {f"step-1/{DATA}", f"step-3/{OTHER}"}


def test_what_an_overwrite_could_not_sweep_is_removed():
    store = shared_memory()
    save_into(store, 1)
    old = keys_of(store) - {".metadata"}
    save_into(FaultyStore(store, [StoreFault("denied", "delete_many")]), 2, overwrite=True)
    assert old < keys_of(store)
    assert set(removable(find(store))) == old


def test_files_of_others_are_never_leftovers():
    store = shared_memory()
    names = ("model.safetensors", "log.txt", "__0_0.distcp", "x/__0_0.0123.distcp", ".metadata2")
    for key in names:
        store.put(key, b"1")
    assert not find(store).removable
    assert removable(find(store, Rules(include_stock=True))) == ["__0_0.distcp"]


def test_data_of_stock_writers_are_leftovers_on_request_where_nothing_refers_to_them(tmp_path):
    dcp.save(state_at(1), checkpoint_id=tmp_path / "sealed", no_dist=True)
    (tmp_path / "sealed" / "__7_0.distcp").write_bytes(b"1")
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "__0_0.distcp").write_bytes(b"1")
    with Found(tmp_path) as at:
        assert not find_leftovers(at, LATER, in_two_days).removable
        found = find_leftovers(at, Rules(include_stock=True), in_two_days)
    assert removable(found) == ["open/__0_0.distcp", "sealed/__7_0.distcp"]


def test_probes_that_the_doctor_could_not_delete_are_leftovers():
    store = shared_memory()
    store.put(".dcpstore-doctor-0123456789abcdef/small", b"1")
    store.put("run/.dcpstore-doctor-0123456789abcdef/large", b"1")
    assert {one.kind for one in find(store).removable} == {"probe"}
    assert len(find(store).removable) == 2


def test_an_empty_prefix_has_no_leftovers(tmp_path):
    with Found(tmp_path / "nothing") as at:
        found = find_leftovers(at)
    assert (found.removable, found.kept) == ((), ())


# --- what is kept --------------------------------------------------------------------


def test_a_folder_that_was_written_to_lately_is_left_alone():
    store = shared_memory()
    store.put(DATA, b"1")
    found = find(store, clock=time.time)
    assert not found.removable
    assert "a save may be running" in reasons(found)
    assert removable(find(store, NOW)) == [DATA]
    assert removable(find(store, Rules(older_than_s=3 * DAY_S))) == []


def test_one_young_object_keeps_all_others_of_its_folder():
    store = shared_memory()
    for key in ("a/" + DATA, "a/" + OTHER, "b/" + DATA):
        store.put(key, b"1")

    class Aged(RecordingStore):
        def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
            for info in super().list(prefix):
                assert info.modified is not None
                is_young = info.key == "a/" + OTHER
                age_s = 100 if is_young else 10 * DAY_S
                stamp = dataclasses.replace(
                    info,
                    modified=info.modified.fromtimestamp(time.time() - age_s, info.modified.tzinfo),
                )
                yield stamp

    assert removable(find(Aged(store), clock=time.time)) == ["b/" + DATA]


def test_an_object_of_unknown_age_is_kept():
    store = shared_memory()
    store.put(DATA, b"1")

    class Ageless(RecordingStore):
        def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
            for info in super().list(prefix):
                yield dataclasses.replace(info, modified=None)

    found = find(Ageless(store), NOW)
    assert not found.removable
    assert "how old" in reasons(found)


def damaged_copies(store: Store, key: str) -> Iterator[bytes]:
    whole = bytes(store.get(key).data)
    yield b""
    for size in range(0, len(whole), 101):
        yield whole[:size]
    for at in (*range(0, len(whole), 37), *range(max(0, len(whole) - 400), len(whole))):
        yield whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :]


@pytest.mark.parametrize(
    ("which", "layout"), [("metadata", HERE), ("metadata", APART), ("manifest", APART)]
)
def test_nothing_of_a_checkpoint_with_damaged_metadata_is_removable(which, layout):
    store = shared_memory()
    save_into(store, 1, **layout)
    sealed = keys_of(store)
    store.put(OTHER, b"1")
    key = ".metadata" if which == "metadata" else next(k for k in sealed if "dcpstore" in k)
    whole = bytes(store.get(key).data)
    for damaged in damaged_copies(store, key):
        store.put(key, damaged)
        found = find(store)
        assert not sealed & set(removable(found)), f"after {damaged[:40]!r}..."
        assert removable(found) == [OTHER] or "cannot be told" in reasons(found)
    store.put(key, whole)
    assert removable(find(store)) == [OTHER]


def assert_left_alone(store: Store, reason: str) -> None:
    found = find(store)
    assert not found.removable
    assert reason in reasons(found)


def test_a_checkpoint_whose_manifest_is_gone_is_left_alone():
    store = shared_memory()
    save_into(store, 1, **APART)
    store.delete_many([key for key in keys_of(store) if key.startswith(".dcpstore-")])
    assert_left_alone(store, "manifest")


def test_a_checkpoint_that_lost_its_footer_is_left_alone():
    store = shared_memory()
    save_into(store, 1)
    pickled = bytes(store.get(".metadata").data)
    store.put(".metadata", pickled[: pickled.rindex(b'{"save_id"')])
    assert_left_alone(store, "lost its footer")


def test_metadata_that_may_not_be_read_keep_their_folder():
    store = shared_memory()
    save_into(store, 1)
    store.put(OTHER, b"1")
    assert_left_alone(
        FaultyStore(store, [StoreFault("denied", "get", times=None)]), "may not be read"
    )


def test_metadata_that_a_listing_does_not_show_yet_count():
    store = shared_memory()
    save_into(store, 1)
    assert not find(FaultyStore(store, stale_keys=[".metadata"])).removable


def test_metadata_that_were_listed_and_are_then_not_found_keep_their_folder():
    store = shared_memory()
    save_into(store, 1)
    sealed = keys_of(store)

    class ForgetsOnce(FaultyStore):
        has_forgotten = False

        def get(self, key: str) -> Any:
            if key.endswith(".metadata") and not self.has_forgotten:
                self.has_forgotten = True
                raise NotFoundError("404 (scripted)")
            return super().get(key)

    with place_of(ForgetsOnce(store)) as at:
        found = find_leftovers(at, LATER, in_two_days)
        assert not found.removable
        assert "was listed, and then not found" in reasons(found)
        assert not remove(at, found).removed
    assert keys_of(store) == sealed


@pytest.mark.parametrize("stale", [(), ("__0.metadata", "__1.metadata")], ids=["fresh", "stale"])
def test_what_ranks_sealed_alone_is_kept(stale):
    store = shared_memory()
    for rank in (0, 1):
        save_alone("memory://prune", rank, store_opener=lambda *_a, **_o: store)
    store.put(OTHER, b"1")
    assert removable(find(FaultyStore(store, stale_keys=stale))) == [OTHER]


def test_objects_that_metadata_of_a_folder_above_refer_to_are_kept(tmp_path):
    import pickle

    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    ((index, info),) = metadata.storage_data.items()
    info.relative_path = "sub/__0_0.distcp"
    metadata.storage_data[index] = info
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    (tmp_path / "sub").mkdir()
    (tmp_path / "__0_0.distcp").rename(tmp_path / "sub" / "__0_0.distcp")
    with Found(tmp_path) as at:
        assert not find_leftovers(at, Rules(include_stock=True), in_two_days).removable


@pytest.mark.parametrize(("layout", "num_objects"), [(HERE, 1), (APART, 2)])
def test_what_was_sealed_after_the_look_is_not_deleted(layout, num_objects):
    store, elsewhere = shared_memory(), shared_memory()
    save_into(elsewhere, 1, **layout)
    for key in keys_of(elsewhere) - {".metadata"}:
        store.put(key, elsewhere.get(key).data)
    store.put(OTHER, b"1")
    with place_of(store) as at:
        found = find_leftovers(at, LATER, in_two_days)
        assert len(found.removable) == num_objects + 1
        store.put(".metadata", elsewhere.get(".metadata").data)
        pruned = remove(at, found)
    assert [one.key for one in pruned.removed] == [OTHER]
    assert verify_checkpoint("memory://prune", store_opener=lambda *_a, **_o: store).is_sound


def test_metadata_that_cannot_be_read_any_more_stop_the_deletion():
    store = shared_memory()
    store.put(DATA, b"1")
    faulty = FaultyStore(store)
    with place_of(faulty) as at:
        found = find_leftovers(at, LATER, in_two_days)
        faulty.add(StoreFault("denied", "get", times=None))
        pruned = remove(at, found)
    assert not pruned.removed
    assert "nothing was deleted" in str(pruned.failed[0][1])
    assert keys_of(store) == {DATA}


# --- saves that crash, and saves in flight ---------------------------------------------


@pytest.mark.parametrize("is_overwrite", [False, True])
def test_whatever_a_crashed_save_leaves_is_removed_once_it_is_old_enough(is_overwrite):
    has_removed = False
    for number in range(20):
        store = shared_memory()
        if is_overwrite:
            save_into(store, 1)
        dying = FaultyStore(store, [StoreFault("crash_after", at=number)])
        with suppress(CheckpointException):
            save_into(dying, 2, overwrite=is_overwrite, object_bytes=1)
        left = keys_of(store)
        assert not find(store, clock=time.time).removable, "it may still be running"
        with place_of(store) as at:
            pruned = remove(at, find_leftovers(at, LATER, in_two_days))
        assert not pruned.failed
        has_removed |= bool(pruned.removed)
        if ".metadata" in left:
            verified = verify_checkpoint("memory://prune", store_opener=lambda *_a, **_o: store)  # noqa: B023
            assert verified.is_sound
        else:
            assert keys_of(store) == set()
        assert find(store).removable == ()
        if not dying.is_dead:
            break
    assert has_removed
    assert not dying.is_dead, "every request of the save was tried"


@pytest.mark.parametrize("is_overwrite", [False, True])
def test_pruning_at_any_request_of_a_save_takes_nothing_that_it_needs(is_overwrite):
    """The save has run for most of a day, and somebody prunes before each of its requests."""

    class Pruning(FaultyStore):
        num_pruned = 0

        def _take(self, verb: str, key: str) -> Any:
            with place_of(store) as at:
                self.num_pruned += 1
                assert not remove(at, find_leftovers(at, LATER, almost_a_day_later)).removed
            return super()._take(verb, key)

    def almost_a_day_later() -> float:
        return time.time() + DAY_S - 60

    store = shared_memory()
    if is_overwrite:
        save_into(store, 1)
    pruning = Pruning(store)
    save_into(pruning, 2, overwrite=is_overwrite, object_bytes=1)
    assert pruning.num_pruned >= 3
    found = verify_checkpoint("memory://prune", store_opener=lambda *_a, **_o: store)
    assert found.is_sound
    assert not find(store).removable


# --- stores that refuse --------------------------------------------------------------


def test_a_store_that_refuses_to_list_says_what_to_grant():
    store = FaultyStore(shared_memory(), [StoreFault("denied", "list", times=None)])
    with pytest.raises(StoreError, match="s3:ListBucket; nothing was deleted") as caught:
        find(store)
    assert caught.value.denied


def test_an_age_below_zero_is_refused():
    for age in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match="at least 0"):
            Rules(older_than_s=age)


def fill(place: Place) -> set[str]:
    """A sealed checkpoint and leftovers beside it; returns what is sealed."""
    writer = place.writer()
    dcp.save(state_at(1), storage_writer=writer, no_dist=True)
    sealed = set(place.names())
    place.put_all({DATA: b"1", OTHER: b"22"})
    return sealed


def found_at(place: Place) -> Found:
    return Found(
        place.url, place.server.storage_options(), dcpstore.ReadConfig(engine=place.engine)
    )


def prune_place(place: Place) -> Pruned:
    with found_at(place) as at:
        return remove(at, find_leftovers(at, LATER, in_two_days))


def test_a_bucket_is_pruned_of_objects_and_open_uploads(any_place: Place):
    sealed = fill(any_place)
    any_place.client.request("POST", f"{any_place.name}/{DATA}", "uploads")
    any_place.client.request("POST", f"{any_place.name}/sub/out.safetensors", "uploads")
    any_place.client.request("POST", f"{any_place.name}2/{DATA}", "uploads")
    pruned = prune_place(any_place)
    assert sorted((one.kind, one.key) for one in pruned.removed) == [
        ("object", DATA),
        ("object", OTHER),
        ("upload", DATA),
        ("upload", "sub/out.safetensors"),
    ]
    assert set(any_place.names()) == sealed
    assert any_place.open_uploads() == []
    assert f"{any_place.name}2/{DATA}" in any_place.client.open_uploads()


def test_a_bucket_that_refuses_delete_loses_nothing_and_says_so(any_place: Place):
    fill(any_place)
    before = any_place.content()
    any_place.server.add_fault(Fault("DeleteObjects", status=403, code="AccessDenied", times=-1))
    any_place.server.add_fault(Fault("DeleteObject", status=403, code="AccessDenied", times=-1))
    pruned = prune_place(any_place)
    assert not pruned.removed
    assert [one.key for one, _ in pruned.failed] == [DATA, OTHER]
    assert "access is denied" in str(pruned.failed[0][1])
    assert any_place.content() == before


def test_uploads_that_may_not_be_aborted_are_told(place: Place):
    place.client.request("POST", f"{place.name}/{DATA}", "uploads")
    operation = "AbortMultipartUpload"
    place.server.add_fault(Fault(operation, status=403, code="AccessDenied", times=-1))
    pruned = prune_place(place)
    assert [one.kind for one, _ in pruned.failed] == ["upload"]
    assert place.open_uploads()


def test_where_uploads_may_not_be_listed_objects_are_pruned_all_the_same(place: Place):
    sealed = fill(place)
    operation = "ListMultipartUploads"
    place.server.add_fault(Fault(operation, status=403, code="AccessDenied", times=-1))
    pruned = prune_place(place)
    assert len(pruned.removed) == 2
    assert "s3:ListBucketMultipartUploads" in pruned.found.notes[0]
    assert set(place.names()) == sealed


def test_a_young_upload_keeps_its_folder(tmp_path):
    (tmp_path / DATA).write_bytes(b"1")
    (tmp_path / f"{OTHER}#1").write_bytes(b"1")
    (tmp_path / "notes#1").write_bytes(b"mine")
    import os

    os.utime(tmp_path / DATA, (1000, 1000))
    with Found(tmp_path) as at:
        assert not find_leftovers(at).removable
        os.utime(tmp_path / f"{OTHER}#1", (1000, 1000))
        pruned = remove(at, find_leftovers(at))
    assert sorted(one.kind for one in pruned.removed) == ["object", "upload"]
    assert [path.name for path in Path(tmp_path).iterdir()] == ["notes#1"]


# --- the command ---------------------------------------------------------------------


def run(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    return main(arguments, stdout=out, stderr=err), out.getvalue(), err.getvalue()


def test_the_command_shows_first_and_deletes_when_told(tmp_path):
    (tmp_path / DATA).write_bytes(b"12345")
    code, out, _ = run("prune", str(tmp_path))
    assert code == 0
    assert "a save may be running" in out
    code, out, _ = run("prune", str(tmp_path), "--older-than", "0")
    assert code == 0
    assert "1 leftover, 5 B; nothing was deleted; --yes deletes them" in out
    assert (tmp_path / DATA).exists()
    code, out, _ = run("prune", str(tmp_path), "--older-than", "0s", "--yes")
    assert code == 0
    assert "deleted 1 leftover" in out
    assert not list(tmp_path.iterdir())


def test_the_command_ends_with_a_code_of_its_own_where_delete_is_refused(place: Place):
    fill(place)
    place.server.add_fault(Fault("DeleteObjects", status=403, code="AccessDenied", times=-1))
    options = [
        f"{k}={v}" for k, v in place.server.storage_options().items() if k != "client_kwargs"
    ]
    options.append('client_kwargs={"region_name": "us-east-1"}')
    given = [word for option in options for word in ("--storage-option", option)]
    code, out, err = run("prune", place.url, "--older-than", "0", "--yes", *given)
    assert code == 4
    assert "STILL THERE" in out
    assert "access is denied" in err


@pytest.mark.parametrize("age", ["soon", "1w", "-3h", ""])
def test_an_age_that_is_none_is_a_usage_error(tmp_path, age):
    code, _, err = run("prune", str(tmp_path), f"--older-than={age}")
    assert code == 2
    assert "older-than" in err
