"""Groups of gloo processes: 1 to 4 ranks, forked from a server that has imported torch."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_collectives_matrix import ERRORS, SIZE, Case, Outcome, cases, check, go_through

from dcpstore.errors import ConfigError, RankFailures
from dcpstore.ranks import (
    RankGroup,
    SingleGroup,
    all_gather,
    all_reduce,
    broadcast,
    each,
    gather,
    open_group,
    reduce_scatter,
    torch_group,
)
from dcpstore.ranks.torch_group import StoreBoard, TorchLanes
from dcpstore.ranks.transport import Lanes
from dcpstore.torch_private import make_backend

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["torch.distributed", "dcpstore.ranks.torch_group"])


def _rank_main(
    answer: Connection, rank: int, size: int, where: str, fn: Callable[[], object]
) -> None:
    faulthandler.dump_traceback_later(100, exit=True)
    torch.set_num_threads(1)
    try:
        if where.startswith("file:"):
            store: Any = dist.FileStore(where[5:], size)
        elif where.startswith("rank0:"):
            port = int(where[6:])
            store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timedelta(seconds=30))
        else:
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # as torchrun does
            store = dist.TCPStore("127.0.0.1", int(where), wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        result: object = fn()
    except BaseException:
        result = traceback.format_exc()
    answer.send(result)
    answer.recv()  # stay, so that nobody's exit looks like a failure to the others
    os._exit(0)


def run_processes(
    size: int, fn: Callable[[], object], *, where: str | None = None
) -> dict[int, Any]:
    """Run ``fn()`` on as many ranks; returns the results of those that were not killed."""
    launcher = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = where or str(launcher.port)
    pipes = [_server.Pipe() for _ in range(size)]
    processes = [
        _server.Process(target=_rank_main, args=(theirs, rank, size, where, fn), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    results: dict[int, Any] = {}
    for rank, (ours, _) in enumerate(pipes):
        try:
            results[rank] = ours.recv()
        except EOFError:
            processes[rank].join(10)
            assert processes[rank].exitcode == -signal.SIGKILL
    for ours, _ in pipes:
        try:
            ours.send(None)
        except BrokenPipeError:
            continue
    for process in processes:
        process.join(10)
    errors = [result for result in results.values() if isinstance(result, str)]
    assert not errors, "\n".join(errors)
    return results


# --- what the ranks do ----------------------------------------------------------------


def use_every_step() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = list(range(size))
    with open_group(None, size - 1, 30) as group:
        assert (group.rank, group.size, group.coordinator) == (rank, size, size - 1)
        assert isinstance(group, SingleGroup) == (size == 1)
        assert each(group, "each", lambda: rank) == rank
        assert all_gather(group, "all", lambda: rank) == everyone
        assert broadcast(group, "one", lambda: rank) == size - 1
        assert gather(group, "to one", lambda: rank) == (everyone if group.is_coordinator else None)
        assert reduce_scatter(group, "parts", lambda: rank, list) == rank
        large = all_gather(group, "large", lambda: bytes([rank]) * 2_000_000)
        assert [one[-1] for one in large] == everyone
        trade(group)
    with open_group(None, 0, 30) as group:
        trade(group)  # on the lanes that the first group left
        with pytest.raises(RankFailures) as bad:
            all_reduce(group, "bad", lambda: 1 // 0, sum)
        assert set(bad.value.causes) == set(everyone)
        assert all_reduce(group, "good", lambda: rank, sum) == sum(everyone)
    value = torch.ones(1)
    dist.all_reduce(value)  # the trainer's own group is none the worse
    assert value.item() == size
    assert len(dist.distributed_c10d._world.pg_map) == 1


def trade(group: RankGroup) -> None:
    group.open_lanes()
    for peer in range(group.size):
        if peer != group.rank:
            source, target = torch.full((70_001,), group.rank, dtype=torch.uint8), bytearray(70_001)
            pendings = [
                group.post_receive(target, peer),
                group.post_send(source.numpy(), peer) if peer % 2 else
                group.post_send(bytes(source.numpy()), peer),
            ]  # fmt: skip
            for pending in pendings:
                pending.wait(20)
                pending.wait(0)
            assert target == bytes([peer]) * 70_001


class ProcessHang:
    """Processes hang until another one has said in their store that it was told."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._store = dist.PrefixStore(str(case), dist.distributed_c10d._get_default_store())

    def until_told(self) -> None:
        self._store.wait(["told"], timedelta(seconds=60))

    def tell(self) -> None:
        if dist.get_rank() not in self._case.who:
            self._store.set("told", b"")


def go_through_cases(some: list[Case]) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for coordinator in sorted({case.coordinator for case in some}):
        with open_group(None, coordinator, 20) as group:
            group.deadline_s = 60
            each(group, "all ranks have started", lambda: None)
            outcomes += [
                go_through(group, case, ProcessHang(case) if case.kind == "hang" else None)
                for case in some
                if case.coordinator == coordinator
            ]
    return outcomes


def use_subgroups() -> None:
    rank = dist.get_rank()
    pair = dist.new_group([1, 3])
    overlapping = dist.new_group([3, 2, 1])
    if rank not in (1, 3):
        with pytest.raises(ConfigError, match="not in the process group"):
            open_group(pair)
    else:
        with open_group(pair, 1, 20) as group:
            assert (group.rank, group.size, group.is_coordinator) == (rank // 2, 2, rank == 3)
            assert all_gather(group, "x", lambda: rank) == [1, 3]
            large = all_gather(group, "x", lambda: bytes([rank]) * 10**6)
            assert [one[0] for one in large] == [1, 3]
            with pytest.raises(RankFailures) as caught:
                each(group, "x", lambda: 1 // (3 - rank))
            assert set(caught.value.causes) == {1}
        with pytest.raises(ConfigError, match="coordinator 2"):
            open_group(pair, 2)
    if rank > 0:
        with open_group(overlapping, 2, 20) as group, open_group(overlapping, 0, 20) as other:
            order = dist.get_process_group_ranks(overlapping)
            assert all_gather(group, "x", lambda: rank) == order
            assert all_gather(other, "x", lambda: rank) == order
            assert broadcast(group, "x", lambda: rank) == order[2]


def lose_the_store(rank_to_die: int) -> tuple[list[int], str, float]:
    with open_group(None, 1, 30) as group:
        each(group, "fine", lambda: None)
        began = time.monotonic()

        def die() -> None:
            if group.rank == rank_to_die:
                time.sleep(0.5)  # until the others, too, are past the first step
                os.kill(os.getpid(), signal.SIGKILL)

        with pytest.raises(RankFailures) as caught:
            each(group, "write", die)
        return list(caught.value.causes), caught.value.causes[0], time.monotonic() - began


def fail_one_after_another() -> tuple[dict[int, str], float]:
    """Rank 1 fails; rank 0, which waits for it, does; rank 2 waits for rank 0."""
    with open_group(None, 0, 30) as group:
        group.open_lanes()
        data = bytearray(1000)
        began = time.monotonic()

        def share() -> None:
            if group.rank == 1:
                time.sleep(0.3)  # until the others wait
                raise ArithmeticError("scripted")
            group.post_receive(data, {0: 1, 2: 0}[group.rank]).wait(20)

        with pytest.raises(RankFailures) as caught:
            each(group, "share", share)
        return caught.value.causes, time.monotonic() - began


def hang_in_a_transfer() -> dict[int, str]:
    with open_group(None, 0, 20) as group:
        group.open_lanes()
        late = bytearray(1000)
        hang = ProcessHang(Case("share", "hang", (2,), 0))

        def share() -> None:
            if group.rank == 2:
                hang.until_told()
                group.post_send(bytes([1] * 1000), 0).wait(1)
            if group.rank == 0:
                group.post_receive(late, 2).wait(60)

        group.deadline_s = 2
        with pytest.raises(RankFailures) as caught:
            each(group, "share", share)
        group.deadline_s = 20
        hang.tell()
        assert late == bytes(1000)
        trade(group)  # on new lanes, once the late rank is back
        assert late == bytes(1000)
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == 3
    return caught.value.causes


def carry_through_device_tensors() -> None:
    """The path of a job without gloo: every transfer through a tensor on the rank's device."""
    group = open_group(None, 0, 20)
    made: list[Lanes] = []
    ours = dist.PrefixStore("device", dist.distributed_c10d._get_default_store())

    def make(name: str, timeout_s: float) -> Lanes:
        backend = make_backend("gloo", dist.PrefixStore(name, ours), group.rank, 3, timeout_s)
        made.append(TorchLanes(name, backend, torch.device("cpu")))
        return made[-1]

    group._bulk._maker = make  # type: ignore[attr-defined]
    with group:
        trade(group)
        large = all_gather(group, "x", lambda: bytes([group.rank]) * 10**6)
        assert [one[0] for one in large] == [0, 1, 2]
        assert len(made) == 1


def post_large_values_without_lanes() -> int:
    torch_group._lane_maker = lambda *_: None  # type: ignore[assignment]
    store = dist.distributed_c10d._world.pg_map[dist.group.WORLD][1]
    before = store.num_keys()
    with open_group(None, 0, 20) as group:
        for _ in range(2):
            back = all_reduce(group, "x", lambda: bytes([group.rank]) * 9_000_000, lambda v: v[1])
            assert back == bytes([1]) * 9_000_000
        with pytest.raises(ConfigError, match="no way to carry bytes"):
            group.open_lanes()
    dist.barrier()
    return int(store.num_keys()) - before


# --- the tests -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.campaign), 3, 4])
def test_every_step_and_transfer_works_and_the_trainers_group_is_untouched(size: int) -> None:
    run_processes(size, use_every_step)


def test_other_stores_carry_steps_too(tmp_path: Path) -> None:
    run_processes(2, use_every_step, where=f"file:{tmp_path / 'store'}")


def test_subgroups_have_their_own_ranks() -> None:
    run_processes(4, use_subgroups)


def test_an_error_anywhere_is_the_same_error_everywhere() -> None:
    some = sorted(cases(ERRORS), key=lambda case: case.coordinator)
    assert len(some) == 190
    by_rank = run_processes(SIZE, partial(go_through_cases, some))
    for index, case in enumerate(some):
        check(case, {rank: outcomes[index] for rank, outcomes in by_rank.items()})


# Deadlines that four processes on two busy cores can keep.
LOST = [replace(case, deadline_s=4.0) for case in cases(["kill", "hang"])]
KILLED = [
    Case("map", "kill", (2, 3), 2, 3.0),
    Case("result_load", "kill", (1,), 2, 3.0),
]
HUNG = [
    Case("map", "hang", (1, 2), 2, 2.0),
    Case("result_load", "hang", (1,), 2, 2.0),
]


@pytest.mark.parametrize("case", KILLED, ids=str)
def test_a_rank_that_is_killed_is_named_by_all(case: Case) -> None:
    by_rank = run_processes(SIZE, partial(go_through_cases, [case]))
    check(case, {rank: outcomes[0] for rank, outcomes in by_rank.items()})


def test_a_rank_that_hangs_is_named_by_all() -> None:
    by_rank = run_processes(SIZE, partial(go_through_cases, HUNG))
    for index, case in enumerate(HUNG):
        check(case, {rank: outcomes[index] for rank, outcomes in by_rank.items()})


@pytest.mark.campaign
@pytest.mark.parametrize("case", LOST, ids=str)
def test_any_rank_killed_or_hanging_anywhere_is_named_by_all(case: Case) -> None:
    by_rank = run_processes(SIZE, partial(go_through_cases, [case]))
    check(case, {rank: outcomes[0] for rank, outcomes in by_rank.items()})


def test_losing_the_store_names_who_held_it() -> None:
    probe = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = probe.port
    del probe
    results = run_processes(3, partial(lose_the_store, 0), where=f"rank0:{port}")
    assert set(results) == {1, 2}
    for ranks, cause, took_s in results.values():
        assert ranks == [0]
        assert f"127.0.0.1:{port}" in cause
        assert took_s < 20, "they waited for the deadline"


def test_a_failure_is_told_at_once_to_those_who_wait_for_whoever_waits() -> None:
    results = run_processes(3, fail_one_after_another)
    for causes, took_s in results.values():
        assert set(causes) == {0, 1, 2}
        assert "scripted" in causes[1]
        assert took_s < 20, "they waited for the deadline"


def test_a_transfer_from_a_hung_rank_fails_in_time_and_writes_nothing_later() -> None:
    results = run_processes(3, hang_in_a_transfer)
    assert results[0] == results[1] == results[2]
    assert set(results[0]) == {0, 2}
    assert "receiving from rank 2" in results[0][0]
    assert "did not answer" in results[0][2]


def test_bytes_go_through_device_tensors_where_there_is_no_gloo() -> None:
    run_processes(3, carry_through_device_tensors)


def test_without_lanes_large_values_are_posted_in_chunks() -> None:
    grown = run_processes(2, post_large_values_without_lanes)
    assert max(grown.values()) <= 1


def test_a_fake_process_group_is_refused() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        with pytest.raises(ConfigError, match="carries nothing"):
            open_group()
    finally:
        dist.destroy_process_group()


def test_a_board_waits_without_blocking_its_store() -> None:
    store = dist.HashStore()
    now, pauses = [0.0], []

    def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        now[0] += pause_s

    board = StoreBoard(store, host_rank=0, host="here", clock=lambda: now[0], sleep=sleep)
    assert not board.wait(["a"], 10)
    assert sum(pauses) == pytest.approx(10)
    assert max(pauses) <= 0.02
    assert pauses[0] < 0.0001
    board.post("b", b"x")
    assert board.wait(["b"], 0)
    assert not board.wait(["a"], 10, unless="b")
    assert board.settle("d", b"first") == board.settle("d", b"second") == b"first"
    assert board.fetch(["a", "b", "d"]) == {"b": b"x", "d": b"first"}
    board.drop(["b", "missing"])
    assert board.fetch(["b"]) == {}
