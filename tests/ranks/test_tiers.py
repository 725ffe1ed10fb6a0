"""Saved to the disks of nodes, copied to a bucket, restored from both: ranks as threads."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from parts import assert_state, by_rows, state_of, wiped
from tier_cluster import READ, WRITE, Cluster, load

import dcpstore
from dcpstore import CheckpointError, CorruptError, RankFailures, WriteConfig
from dcpstore.format.seal import Seal
from dcpstore.manager.choice import Choice, read_attached
from dcpstore.manager.tiers import retire_local, spread_seal
from dcpstore.ranks import RankGroup
from dcpstore.store import Store, open_store
from dcpstore.store.folder import Folder
from dcpstore.testing import FaultyStore, StoreFault
from dcpstore.testing.ranks import run_ranks

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def objects_on(node: Path, step: int) -> list[Path]:
    return sorted(node.glob(f"step-{step}/*.distcp"))


# --- after a save -----------------------------------------------------------------------------


def test_data_stay_on_each_node_and_metadata_come_to_all(cluster: Cluster):
    cluster.save(6, 100, spreads=False)
    assert [cluster.node(n).joinpath("step-100/.metadata").exists() for n in range(3)] == [
        True,
        False,
        False,
    ]
    cluster.save(6, 100)
    metadata = {cluster.node(n).joinpath("step-100/.metadata").read_bytes() for n in range(3)}
    assert len(metadata) == 1
    for node in range(3):
        ranks = {path.name[:4] for path in objects_on(cluster.node(node), 100)}
        assert ranks <= {f"__{2 * node}_", f"__{2 * node + 1}_"}


def test_a_manifest_that_is_an_object_comes_to_all_disks_too(cluster: Cluster):
    config = WriteConfig(inline_bytes=64, embed_manifest_bytes=0)
    cluster.save(4, 1, config=config)
    names = [[p.name for p in cluster.node(n).glob("step-1/.dcpstore-*")] for n in range(2)]
    assert len(names[0]) == 1
    assert names[0] == names[1]
    assert {(step, local) for step, local, _ in cluster.restore(4, coordinator=3)} == {(1, True)}


def test_a_step_that_is_saved_again_replaces_the_other_on_every_disk(cluster: Cluster):
    cluster.save(4, 5)
    old = {path.name for node in range(2) for path in objects_on(cluster.node(node), 5)}
    cluster.save(4, 5)
    for node in range(2):
        assert old.isdisjoint(path.name for path in objects_on(cluster.node(node), 5))
    assert {step for step, *_ in cluster.restore(4)} == {5}


def test_a_node_without_a_disk_fails_the_spread_on_all(cluster: Cluster):
    cluster.save(4, 5, spreads=False)
    cluster.node(1).joinpath("step-5").mkdir(parents=True, exist_ok=True)
    shutil.rmtree(cluster.node(1))
    cluster.node(1).write_text("no folder")

    def work(group: RankGroup) -> None:
        spread_seal(group, cluster.disk(group.rank).below("step-5"))

    run = run_ranks(4, work)
    assert set(run.errors) == {0, 1, 2, 3}
    for error in run.errors.values():
        assert isinstance(error, RankFailures)
        assert set(error.causes) <= {2, 3}


# --- restored from the disks --------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_disks_that_hold_all_serve_any_number_of_ranks_and_the_bucket_nothing(
    cluster: Cluster, size: int
):
    cluster.save(4, 10)
    cluster.copy(4, 10).values()
    cluster.save(4, 20)
    cluster.ranks_per_node = 2 if size > 2 else 1  # two nodes, or one that mounts only its own
    if size <= 2:
        for path in objects_on(cluster.node(1), 20):
            shutil.copy(path, cluster.node(0) / "step-20")
    results = cluster.restore(size)
    assert {(step, local) for step, local, _ in results} == {(20, True)}
    assert cluster.fetched_bytes() == 0


def test_ranks_read_what_lies_on_their_disk_and_are_sent_the_rest(cluster: Cluster):
    def make(rank: int, size: int) -> dict[str, Any]:
        return {"w": by_rows(torch.arange(64.0 * 256).view(64, 256), rank, size)}

    def swapped(group: RankGroup, choice: Choice) -> Any:
        state = make(group.size - 1 - group.rank, 4)
        for part in state["w"].parts.values():
            part.fill_(-1)
        result = dcpstore.load(state, storage_reader=choice.reader(READ), process_group=group)
        for offsets, part in state["w"].parts.items():
            assert torch.equal(
                part, torch.arange(64.0 * 256).view(64, 256)[offsets[0] :][: len(part)]
            )
        return result

    def same(group: RankGroup, choice: Choice) -> Any:
        state = make(group.rank, 4)
        return dcpstore.load(state, storage_reader=choice.reader(READ), process_group=group)

    cluster.save(4, 1, make)
    for _, _, result in cluster.restore(4, same):
        assert result.job.received_bytes == 0
        assert "not shared" in result.sharing
    for _, _, result in cluster.restore(4, swapped):
        assert result.job.received_bytes >= 64 * 256 * 4
        assert "ranks that alone can read them" in result.sharing
    assert cluster.fetched_bytes() == 0


def test_the_policy_never_does_not_keep_ranks_from_being_sent_what_they_cannot_read(
    cluster: Cluster,
):
    cluster.save(4, 1)

    def check(group: RankGroup, choice: Choice) -> Any:
        state = wiped(state_of(group.rank, 4, 1))
        reader = choice.reader(READ)
        dcpstore.load(state, storage_reader=reader, process_group=group, share="never")
        assert_state(state, group.rank, 4, 1)

    cluster.restore(4, check)


@pytest.mark.parametrize("coordinator", [0, 3])
def test_a_coordinator_without_a_disk_is_sent_the_metadata(cluster: Cluster, coordinator: int):
    cluster.ranks_per_node = 1
    cluster.save(3, 1)
    cluster.save(3, 2)

    def moved(group: RankGroup, choice: Choice) -> Any:
        return load(group, choice, 4)

    # Rank 0 of the new job is on a new node, which has nothing.
    for node in (2, 1, 0):
        cluster.node(node).rename(cluster.node(node + 1))
    results = cluster.restore(4, moved, coordinator=coordinator)
    assert {(step, local) for step, local, _ in results} == {(2, True)}


# --- a lost disk ----------------------------------------------------------------------------


def test_a_lost_disk_is_made_up_for_by_the_copy_of_the_same_step(cluster: Cluster, caplog):
    cluster.save(4, 10)
    cluster.copy(4, 10).values()
    shutil.rmtree(cluster.node(1))
    results = cluster.restore(4)
    assert {(step, local) for step, local, _ in results} == {(10, True)}
    assert cluster.fetched_bytes() > 0
    keys = {request.key for store in cluster.stores for request in store.requests}
    assert not any(key.startswith(("__0_", "__1_")) for key in keys), "it lies on a disk"


def test_without_a_copy_of_the_newest_step_the_older_one_in_the_bucket_is_loaded(
    cluster: Cluster, caplog
):
    cluster.save(4, 10)
    cluster.copy(4, 10).values()
    cluster.save(4, 20)
    shutil.rmtree(cluster.node(1))
    with caplog.at_level(logging.WARNING):
        results = cluster.restore(4)
    assert {step for step, *_ in results} == {10}
    assert "step-20" in caplog.text
    assert "cannot be loaded" in caplog.text


def test_replicated_tensors_whose_only_saver_lost_its_disk_come_from_the_bucket(cluster: Cluster):
    def replicated(_rank: int, _size: int) -> dict[str, Any]:
        return {f"w{n}": torch.full((2000,), float(n)) for n in range(4)}

    cluster.save(4, 10, replicated)
    savers = {node for node in range(2) if objects_on(cluster.node(node), 10)}
    cluster.copy(4, 10).values()
    for node in savers:
        for path in objects_on(cluster.node(node), 10):
            path.unlink()

    def check(group: RankGroup, choice: Choice) -> Any:
        state = {key: torch.zeros_like(value) for key, value in replicated(0, 4).items()}
        reader = choice.reader(READ)
        dcpstore.load(state, storage_reader=reader, process_group=group, share="always")
        assert all(torch.equal(state[key], value) for key, value in replicated(0, 4).items())

    results = cluster.restore(4, check)
    assert {(step, local) for step, local, _ in results} == {(10, True)}
    assert cluster.fetched_bytes() <= 1.1 * 4 * 2000 * 4, "each byte is fetched once, and shared"


def test_nothing_to_load_is_none_and_lost_steps_without_a_copy_are_told(cluster: Cluster, caplog):
    assert run_ranks(2, cluster.choose).values() == [None, None]
    cluster.save(4, 10)
    shutil.rmtree(cluster.node(0))
    with caplog.at_level(logging.WARNING):
        assert run_ranks(4, cluster.choose).values() == [None] * 4
    assert "step-10" in caplog.text


def test_another_save_of_the_step_in_the_bucket_is_not_mixed_with_the_disks(
    cluster: Cluster, caplog
):
    def other(rank: int, size: int) -> dict[str, Any]:
        return {"w": by_rows(torch.arange(6400.0).view(64, 100) + 1, rank, size)}

    def make(rank: int, size: int) -> dict[str, Any]:
        return {"w": by_rows(torch.arange(6400.0).view(64, 100), rank, size)}

    cluster.save(4, 10, other)
    cluster.copy(4, 10).values()
    cluster.save(4, 10, make)
    shutil.rmtree(cluster.node(1))

    def check(group: RankGroup, choice: Choice) -> Any:
        state = {"w": torch.zeros(64, 100)}
        dcpstore.load(state, storage_reader=choice.reader(READ), process_group=group)
        assert torch.equal(state["w"], torch.arange(6400.0).view(64, 100) + 1)

    with caplog.at_level(logging.WARNING):
        results = cluster.restore(4, check)
    assert {(step, local) for step, local, _ in results} == {(10, False)}
    assert "another save" in caplog.text


# --- a torn step ----------------------------------------------------------------------------


def test_a_step_whose_seal_was_not_spread_does_not_count(cluster: Cluster):
    cluster.save(4, 10)
    cluster.save(4, 20, spreads=False)
    results = cluster.restore(4)
    assert {(step, local) for step, local, _ in results} == {(10, True)}


def test_a_node_that_died_before_its_objects_were_written_leaves_the_step_before(
    cluster: Cluster,
):
    cluster.save(4, 10)

    def work(group: RankGroup) -> None:
        if group.rank == 3:
            raise RuntimeError("this node died")
        cluster.save_as(group, 20, state_of)

    assert len(run_ranks(4, work).errors) == 4
    results = cluster.restore(4)
    assert {(step, local) for step, local, _ in results} == {(10, True)}


def test_an_object_that_was_cut_short_does_not_count(cluster: Cluster):
    cluster.save(4, 10)
    cluster.save(4, 20)
    path = objects_on(cluster.node(1), 20)[0]
    path.write_bytes(path.read_bytes()[:-1])
    assert {step for step, *_ in cluster.restore(4)} == {10}


def test_damaged_metadata_do_not_count_and_those_of_another_disk_do(cluster: Cluster, caplog):
    cluster.save(4, 10)
    path = cluster.node(0) / "step-10/.metadata"
    path.write_bytes(path.read_bytes()[:-40] + bytes(40))
    with caplog.at_level(logging.WARNING):
        assert run_ranks(4, cluster.choose).values() == [None] * 4
    shutil.copy(cluster.node(1) / "step-10/.metadata", path)
    assert {step for step, *_ in cluster.restore(4)} == {10}


def test_a_step_of_another_run_is_passed_over(cluster: Cluster):
    cluster.save(2, 10)
    cluster.save(2, 20)
    ids = {}

    def accepts(seal: Seal) -> bool:
        return seal.save_id == ids[10]

    def note(seal: Seal) -> bool:
        ids[len(ids)] = seal.save_id
        return True

    (first,) = {c.step for c in run_ranks(1, lambda g: cluster.choose(g, accepts=note)).values()}
    assert first == 20
    metadata = (cluster.node(0) / "step-10/.metadata").read_bytes()
    ids[10] = next(one for one in ids.values() if one.encode() in metadata)
    chosen = run_ranks(2, lambda group: cluster.choose(group, accepts=accepts)).values()
    assert [choice.step for choice in chosen] == [10, 10]


def test_a_step_that_is_asked_for_is_the_only_one_looked_for(cluster: Cluster):
    cluster.save(2, 10)
    cluster.save(2, 20)
    for step in (10, 20):
        chosen = run_ranks(2, lambda group, step=step: cluster.choose(group, step=step)).values()
        assert [choice.step for choice in chosen] == [step, step]
    assert run_ranks(2, lambda group: cluster.choose(group, step=15)).values() == [None, None]


# --- damaged bytes --------------------------------------------------------------------------


def flip_a_byte_of_each(paths: list[Path]) -> None:
    for path in paths:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def test_damaged_objects_are_read_from_the_copy_with_a_warning(cluster: Cluster, caplog):
    cluster.save(4, 10)
    cluster.copy(4, 10).values()
    flip_a_byte_of_each(objects_on(cluster.node(1), 10))
    with caplog.at_level(logging.WARNING):
        results = cluster.restore(4)
    assert {(step, local) for step, local, _ in results} == {(10, True)}
    assert cluster.fetched_bytes() > 0
    assert "CRC32C differs" in caplog.text
    assert "is read from" in caplog.text


def test_an_object_that_vanished_meanwhile_is_read_from_the_copy(cluster: Cluster, caplog):
    cluster.save(2, 10)
    cluster.copy(2, 10).values()

    def check(group: RankGroup, choice: Choice) -> Any:
        for path in objects_on(cluster.node(0), 10):
            path.unlink(missing_ok=True)
        return load(group, choice, 2)

    with caplog.at_level(logging.WARNING):
        cluster.restore(2, check)
    assert "is read from" in caplog.text


def test_damaged_objects_without_a_copy_are_corrupt(cluster: Cluster):
    cluster.save(4, 10)
    flip_a_byte_of_each(objects_on(cluster.node(1), 10))

    def work(group: RankGroup) -> Any:
        choice = cluster.choose(group)
        assert choice is not None
        return load(group, choice, 4)

    run = run_ranks(4, work)
    assert set(run.errors) == {0, 1, 2, 3}
    for error in run.errors.values():
        assert isinstance(error, RankFailures)
        assert any(isinstance(one, CorruptError) for one in error.exceptions.values())


# --- attachments ----------------------------------------------------------------------------


def file_of(rank: int) -> bytes:
    return bytes([rank]) * (100 if rank else 20_000)  # rank 0's is no part of the manifest


def save_with_files(cluster: Cluster, step: int) -> None:
    def work(group: RankGroup) -> None:
        files = {"rng-{rank}": file_of(group.rank), "common": b"same"}
        cluster.save_as(group, step, state_of, attachments=files)
        spread_seal(group, cluster.disk(group.rank).below(f"step-{step}"))

    run_ranks(4, work).values()


def read_files(cluster: Cluster, size: int = 4) -> None:
    """Each rank reads the next one's file, one that all want, and one that nobody saved."""

    def check(group: RankGroup, choice: Choice) -> Any:
        wanted = (group.rank + 1) % 4
        found = read_attached(group, choice, [f"rng-{wanted}", "common", "none"])
        assert found == {f"rng-{wanted}": file_of(wanted), "common": b"same"}

    cluster.restore(size, check)


@pytest.mark.parametrize("size", [3, 4])
def test_attachments_come_from_the_disk_that_holds_them(cluster: Cluster, size: int):
    save_with_files(cluster, 10)
    read_files(cluster, size)
    assert cluster.fetched_bytes() == 0


def test_attachments_of_a_damaged_or_lost_disk_come_from_the_bucket(cluster: Cluster, caplog):
    save_with_files(cluster, 10)
    cluster.copy(4, 10).values()
    objects = objects_on(cluster.node(0), 10)
    (large,) = [path for path in objects if file_of(0) in path.read_bytes()]
    flip_a_byte_of_each([large])
    with caplog.at_level(logging.WARNING):
        read_files(cluster)
    assert "is read from" in caplog.text
    assert cluster.fetched_bytes() >= len(file_of(0))
    for node in range(2):
        shutil.rmtree(cluster.node(node))
        read_files(cluster)


def test_a_damaged_attachment_without_a_copy_is_corrupt(cluster: Cluster):
    save_with_files(cluster, 10)
    flip_a_byte_of_each(objects_on(cluster.node(0), 10))
    with pytest.raises(RankFailures, match="CRC32C"):
        read_files(cluster)


# --- to the bucket --------------------------------------------------------------------------


def test_each_object_is_uploaded_once_by_a_rank_that_has_it(cluster: Cluster):
    cluster.save(4, 10)
    copied = cluster.copy(4, 10).values()[0]
    asked = [request for store in cluster.stores for request in store.requests]
    put = sorted((r for r in asked if r.verb.startswith("put")), key=lambda r: r.begin_s)
    data = [request for request in put if "distcp" in request.key]
    assert sorted(request.key for request in data) == sorted(copied.objects)
    on_disks = sum(
        path.stat().st_size for n in range(2) for path in objects_on(cluster.node(n), 10)
    )
    assert sum(copied.objects.values()) == on_disks
    assert put[-1].key == ".metadata"
    state = wiped(state_of(0, 1))
    dcpstore.load(state, str(cluster.root / "bucket/step-10"))
    assert_state(state, 0, 1)


def test_nothing_is_sealed_where_the_claim_was_lost(cluster: Cluster):
    def renew() -> None:
        raise dcpstore.ConflictError("another job saves to this run")

    cluster.save(4, 10)
    run = cluster.copy(4, 10, before_seal=renew)
    assert len(run.errors) == 4
    assert all("another job" in str(error) for error in run.errors.values())
    assert cluster.newest() is None
    assert not list((cluster.root / "bucket").rglob("*.distcp")), "what was put is swept"


@pytest.mark.parametrize("at", [0, 3])
def test_a_copy_that_fails_on_one_rank_leaves_nothing_and_can_be_made_again(
    cluster: Cluster, at: int
):
    cluster.save(4, 10)
    cluster.faults.append(StoreFault("denied", verb="put", at=at, times=1))
    assert len(cluster.copy(4, 10).errors) == 4
    assert cluster.newest() is None
    assert not list((cluster.root / "bucket").rglob("*.distcp"))
    cluster.faults.clear()
    cluster.copy(4, 10).values()
    assert cluster.newest() == (10, "step-10")


def test_a_damaged_disk_is_not_copied(cluster: Cluster):
    cluster.save(4, 10)
    flip_a_byte_of_each(objects_on(cluster.node(1), 10))
    run = cluster.copy(4, 10)
    assert all("CRC32C" in str(error) for error in run.errors.values())
    assert cluster.newest() is None


def test_a_lost_disk_fails_the_copy_and_names_an_object(cluster: Cluster):
    cluster.save(4, 10)
    for path in objects_on(cluster.node(1), 10):
        path.unlink()
    run = cluster.copy(4, 10)
    assert all("no rank has the object" in str(error) for error in run.errors.values())


def test_a_copy_that_is_cancelled_on_one_rank_ends_on_all_and_leaves_nothing(cluster: Cluster):
    def big(rank: int, _size: int) -> dict[str, Any]:
        return {f"w{rank}": torch.zeros(1 << 18)}

    cluster.save(4, 10, big)
    cancelled = threading.Event()
    timer = threading.Timer(0.3, cancelled.set)
    timer.start()
    began = time.monotonic()

    def work(group: RankGroup) -> Any:
        if group.rank != 3:
            return cluster.copy_as(group, 10)
        return cluster.copy_as(group, 10, max_bytes_per_s=1.0, cancelled=cancelled)

    run = run_ranks(4, work)
    timer.join()
    assert time.monotonic() - began < 20
    assert all("was cancelled" in str(error) for error in run.errors.values())
    assert len(run.errors) == 4
    assert not list((cluster.root / "bucket").rglob("*.*")), "not even data"


def test_a_copy_is_no_faster_than_it_may_be(cluster: Cluster):
    cluster.save(1, 10, lambda *_: {"w": torch.zeros(MIB // 4)})
    began = time.monotonic()
    cluster.copy(1, 10, max_bytes_per_s=4 * MIB).values()
    assert 0.2 < time.monotonic() - began < 5


def test_a_copy_holds_no_more_than_its_budget(cluster: Cluster):
    cluster.save(1, 10)
    with pytest.raises(CheckpointError, match="budget_bytes"):
        cluster.copy(1, 10, config=WriteConfig(budget_bytes=10 * MIB, part_bytes=5 * MIB)).values()


# --- old steps ------------------------------------------------------------------------------


def steps_on(node: Path) -> list[str]:
    return sorted(path.name for path in node.iterdir())


def test_old_steps_leave_the_disk_and_needed_ones_stay(cluster: Cluster):
    for step in (10, 20, 30, 40):
        cluster.save(2, step)
    assert retire_local(cluster.disk(0), 40, 2, needed=[10]) == [20]
    assert steps_on(cluster.node(0)) == ["step-10", "step-30", "step-40"]
    assert retire_local(cluster.disk(0), 40, 2) == [10]
    assert steps_on(cluster.node(0)) == ["step-30", "step-40"]
    assert retire_local(cluster.disk(0), 40, 2) == []


def test_what_dead_saves_and_half_deleted_steps_left_goes_and_what_may_be_saved_now_stays(
    cluster: Cluster,
):
    for step in (10, 20, 30, 50):
        cluster.save(2, step)
    (cluster.node(0) / "step-10/.metadata").unlink()
    (cluster.node(0) / "step-50/.metadata").unlink()
    assert retire_local(cluster.disk(0), 30, 2) == [10]
    assert steps_on(cluster.node(0)) == ["step-20", "step-30", "step-50"]


def test_unfinished_files_of_a_killed_save_go(cluster: Cluster):
    for step in (10, 20):
        cluster.save(2, step)
    names = ["step-10/.dcpstore-tmp-1", "step-5/__0_0.0123456789abcdef.distcp#1"]
    for name in names:
        (cluster.node(0) / name).parent.mkdir(exist_ok=True)
        (cluster.node(0) / name).write_bytes(b"half")
    assert retire_local(cluster.disk(0), 20, 1) == [5, 10]
    assert steps_on(cluster.node(0)) == ["step-20"]


def test_files_of_others_stay(cluster: Cluster):
    for step in (10, 20):
        cluster.save(2, step)
    (cluster.node(0) / "step-10/notes.txt").write_text("mine")
    (cluster.node(0) / "other").mkdir()
    assert retire_local(cluster.disk(0), 20, 1) == [10]
    assert steps_on(cluster.node(0)) == ["other", "step-10", "step-20"]
    assert steps_on(cluster.node(0) / "step-10") == ["notes.txt"]


def test_metadata_that_cannot_be_deleted_keep_the_step(cluster: Cluster, caplog):
    for step in (10, 20):
        cluster.save(2, step)
    script = [StoreFault("denied", verb="delete_many", times=None)]

    def opener(url: str, **options: Any) -> Store:
        return FaultyStore(open_store(url, **options), script)

    folder = Folder(cluster.node(0), None, WRITE, opener)
    with caplog.at_level(logging.WARNING):
        assert retire_local(folder, 20, 1) == []
    assert "step-10" in caplog.text
    assert objects_on(cluster.node(0), 10)
