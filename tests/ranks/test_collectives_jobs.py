"""Groups as a job uses them: for thousands of steps, beside a trainer, and how fast."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from test_collectives_gloo import run_processes

from dcpstore.errors import RankFailures
from dcpstore.ranks import all_gather, broadcast, each, open_group, reduce_scatter


def take_many_steps(num_steps: int) -> int:
    """Returns by how many keys the store grew from the 50th step to the last."""
    store = dist.distributed_c10d._world.pg_map[dist.group.WORLD][1]
    before = 0
    for i in range(num_steps):
        if i % 10 == 0:
            group = open_group(None, 0, 20, purpose=f"save{i % 3}")
        if i == 50:
            dist.barrier()
            before = store.num_keys()
            dist.barrier()
        if i % 50 == 49:
            with pytest.raises(RankFailures):
                each(group, "bad", lambda: 1 // dist.get_rank())
        assert all_gather(group, "step", dist.get_rank) == [0, 1]
        if i % 10 == 9:
            group.close()
    dist.barrier()
    return int(store.num_keys()) - before


def save_beside_a_trainer() -> None:
    """Steps in a thread, the trainer's collectives in another: neither waits for the other."""
    errors: list[BaseException] = []

    def save() -> None:
        try:
            for number in range(20):
                with open_group(None, 0, 20, purpose="save") as group:
                    large = all_gather(group, "plan", lambda n=number: bytes([n]) * 300_000)
                    assert large[0][0] == number
                    each(group, "write", lambda: None)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=save)
    thread.start()
    value = torch.ones(1)
    rounds = 0
    while rounds < 200:
        dist.all_reduce(value.clone())
        dist.barrier()
        rounds += 1
    thread.join(60)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


def leave_one_out() -> int:
    """Rank 1 misses the save of a; then all save b. Returns at which attempt that went well."""
    if dist.get_rank() != 1:
        with open_group(None, 0, 10, subject="a") as group, pytest.raises(RankFailures) as caught:
            each(group, "write", lambda: None)
        assert "in step 'write of b', rank 0 in 'write of a'" in caught.value.causes[1]
    for attempt in range(3):
        try:
            with open_group(None, 0, 10, subject="b") as group:
                each(group, "write", lambda: None)
        except RankFailures as error:
            assert set(error.causes) == {1}
            continue
        return attempt
    raise AssertionError("the ranks never agreed again")


def time_steps(size_bytes: int) -> dict[str, float]:
    """Milliseconds per step, the median: on the board, by lane, and torch's own collectives."""
    rank, size, data = dist.get_rank(), dist.get_world_size(), bytes(size_bytes)
    gathered: list[object] = [None] * size

    def torch_reduce_scatter() -> None:
        dist.gather_object(data, gathered if rank == 0 else None, 0)
        dist.scatter_object_list([None], gathered, 0)

    found: dict[str, float] = {}
    for way, bulk_bytes in (("board", 1 << 40), ("lanes", 4)):
        with open_group(None, 0, 60, purpose=way) as group:
            group._bulk._bulk_bytes = bulk_bytes  # type: ignore[attr-defined]
            found[f"barrier, {way}"] = _median_ms(lambda g=group: each(g, "x", lambda: None))
            found[f"broadcast, {way}"] = _median_ms(lambda g=group: broadcast(g, "x", lambda: data))
            found[f"reduce_scatter, {way}"] = _median_ms(
                lambda g=group: reduce_scatter(g, "x", lambda: data, lambda values: values)
            )
    found["gather and scatter, torch"] = _median_ms(torch_reduce_scatter)
    found["broadcast, torch"] = _median_ms(lambda: dist.broadcast_object_list([data], 0))
    return found


def _median_ms(fn: Callable[[], None]) -> float:
    taken = []
    for _ in range(20):
        began = time.perf_counter()
        fn()
        taken.append(1000 * (time.perf_counter() - began))
    return statistics.median(taken)


def test_a_rank_that_missed_a_group_catches_up_by_failing_once() -> None:
    assert run_processes(3, leave_one_out) == {0: 0, 1: 1, 2: 0}


def test_300_steps_in_30_groups_do_not_grow_the_store() -> None:
    grown = run_processes(2, partial(take_many_steps, 300))
    assert max(grown.values()) <= 4


@pytest.mark.campaign
def test_10000_steps_in_1000_groups_do_not_grow_the_store() -> None:
    grown = run_processes(2, partial(take_many_steps, 10_000))
    assert max(grown.values()) <= 4


def test_saves_in_a_thread_do_not_meet_the_trainers_collectives() -> None:
    run_processes(2, save_beside_a_trainer)


@pytest.mark.campaign
@pytest.mark.parametrize("size", [2, 4])
def test_how_long_a_step_takes(size: int, capsys: pytest.CaptureFixture[str]) -> None:
    for kib in (0, 64, 256, 1024, 4096):
        timed = run_processes(size, partial(time_steps, kib * 1024))[0]
        with capsys.disabled():
            columns = "  ".join(f"{name} {ms:.2f}" for name, ms in timed.items())
            print(f"\n{size} ranks, {kib} KiB, ms per step: {columns}")
