"""Groups and steps on ranks that are threads, and alone."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time

import pytest

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
)
from dcpstore.ranks.group import Cause, Decision, describe
from dcpstore.ranks.transport import tree_children, tree_parent
from dcpstore.testing.ranks import ThreadRanks, run_ranks
from rank_time import RankTime, TimedRanks

SIZES = [1, 2, 3, 4, 8, 64]


# --- results -----------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_steps_give_each_rank_its_part(size: int) -> None:
    ranks = ThreadRanks(size, coordinator=size // 2)

    def go(group: RankGroup) -> None:
        rank, everyone = group.rank, list(range(size))
        parts = reduce_scatter(group, "a", lambda: rank, lambda v: [10 * x for x in v])
        assert parts == 10 * rank
        assert all_reduce(group, "b", lambda: rank, sum) == sum(everyone)
        assert all_gather(group, "c", lambda: rank) == everyone
        assert gather(group, "d", lambda: rank) == (everyone if group.is_coordinator else None)
        assert broadcast(group, "e", lambda: rank) == group.coordinator
        each(group, "f", lambda: None)

    ranks.run(go).values()
    assert ranks.board.num_keys == 0


def test_without_a_process_group_there_is_one_rank() -> None:
    group = open_group(deadline_s=5)
    assert isinstance(group, SingleGroup)
    assert (group.rank, group.size, group.is_coordinator, group.deadline_s) == (0, 1, True, 5)
    with pytest.raises(ConfigError, match="coordinator 1"):
        open_group(coordinator_rank=1)


@pytest.mark.parametrize("size", [1, 3])
def test_one_rank_fails_like_many(size: int) -> None:
    def go(group: RankGroup) -> None:
        with pytest.raises(RankFailures, match="'plan' failed on 1 rank") as caught:
            all_reduce(group, "plan", lambda: 1, lambda v: v[9])
        assert isinstance(caught.value.exceptions[0], IndexError)
        if group.is_coordinator:
            assert isinstance(caught.value.__cause__, IndexError)
        with pytest.raises(RankFailures, match="parts for"):
            reduce_scatter(group, "plan", lambda: 1, lambda v: [*v, 1])
        assert group.exchange("x", bytes, lambda _: ["yes"]) == "yes"

    run_ranks(size, go).values()
    if size == 1:
        go(SingleGroup())


def test_a_single_rank_lets_interrupts_through() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        each(SingleGroup(), "x", interrupt)


def test_each_rank_gets_what_its_own_function_returned() -> None:
    unpicklable = [threading.Lock() for _ in range(3)]
    ranks = run_ranks(3, lambda group: each(group, "go", lambda: unpicklable[group.rank]))
    assert ranks.values() == unpicklable


def test_large_values_travel_by_lane_and_the_rest_on_the_board() -> None:
    ranks = ThreadRanks(5, coordinator=3, bulk_bytes=1000)

    def go(group: RankGroup) -> None:
        own = bytes([group.rank]) * (5000 if group.rank in (1, 4) else 10)
        for _ in range(3):
            back = reduce_scatter(group, "mixed", lambda: own, lambda v: v)
            assert back == own
            assert all_gather(group, "all", lambda: own)[4] == bytes([4]) * 5000
            assert broadcast(group, "down", lambda: own * 600) == bytes([3]) * 6000

    ranks.run(go).values()
    assert ranks.board.num_keys == 0


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 64, 100])
def test_the_tree_reaches_every_rank_once(size: int) -> None:
    for root in {0, size // 2, size - 1}:
        reached = [root]
        for rank in reached:
            children = tree_children(rank, root, size)
            assert all(tree_parent(child, root, size) == rank for child in children)
            reached.extend(children)
        assert sorted(reached) == list(range(size))
        assert len(tree_children(root, root, size)) <= (size - 1).bit_length()


# --- lanes -------------------------------------------------------------------------


def test_bytes_go_from_rank_to_rank_in_order() -> None:
    def go(group: RankGroup) -> None:
        group.open_lanes()
        others = [rank for rank in range(group.size) if rank != group.rank]
        buffers = {(rank, i): bytearray(8) for rank in others for i in range(3)}
        pendings = [group.post_receive(buf, rank) for (rank, _), buf in buffers.items()]
        for i in range(3):
            pendings += [group.post_send(bytes([group.rank, i] * 4), rank) for rank in others]
        pendings.append(group.post_send(b"", others[0]))
        pendings.append(group.post_receive(bytearray(), others[0]))
        for pending in pendings:
            pending.wait(10)
        for (rank, i), buffer in buffers.items():
            assert buffer == bytes([rank, i] * 4)

    run_ranks(4, go).values()


def test_lanes_must_be_open_and_lead_to_another_rank() -> None:
    def go(group: RankGroup) -> None:
        with pytest.raises(ConfigError, match="open_lanes"):
            group.post_send(b"x", 1 - group.rank)
        group.open_lanes()
        with pytest.raises(ConfigError, match="no other rank"):
            group.post_send(b"x", group.rank)
        with pytest.raises(ConfigError, match="no other rank"):
            group.post_receive(bytearray(1), 2)

    run_ranks(2, go).values()
    single = SingleGroup()
    single.open_lanes()
    with pytest.raises(ConfigError, match="no other rank"):
        single.post_send(b"x", 0)
    with pytest.raises(ConfigError, match="no other rank"):
        single.post_receive(bytearray(1), 1)


def test_sizes_that_differ_fail_on_both_ranks() -> None:
    def go(group: RankGroup) -> None:
        group.open_lanes()
        with pytest.raises(ConnectionError, match="3 bytes were sent, 4 expected"):
            if group.rank == 0:
                group.post_send(b"abc", 1).wait(10)
            else:
                group.post_receive(bytearray(4), 0).wait(10)

    run_ranks(2, go).values()


def test_a_failed_transfer_fails_its_step_and_the_next_step_opens_new_lanes() -> None:
    late = bytearray(4)

    def share(group: RankGroup) -> None:
        if group.rank == 1:
            raise PermissionError("403")
        group.post_receive(late, 1).wait(60)

    def go(group: RankGroup) -> None:
        group.deadline_s = 60
        group.open_lanes()
        began = time.monotonic()
        with pytest.raises(RankFailures) as caught:
            each(group, "share", lambda: share(group))
        assert time.monotonic() - began < 30
        assert set(caught.value.causes) == {0, 1, 2}
        assert "403" in caught.value.causes[1]
        assert "receiving from rank 1" in caught.value.causes[0]
        group.open_lanes()
        if group.rank == 1:
            group.post_send(b"good", 0).wait(10)
        if group.rank == 0:
            fresh = bytearray(4)
            group.post_receive(fresh, 1).wait(10)
            assert fresh == b"good"

    run_ranks(3, go).values()
    assert late == bytes(4)


# --- failures beyond the matrix ------------------------------------------------------


def test_ranks_in_different_steps_are_told() -> None:
    def go(group: RankGroup) -> None:
        with pytest.raises(RankFailures) as caught:
            each(group, "write" if group.rank else "plan", lambda: None)
        assert set(caught.value.causes) == {1, 2}
        assert "is in step 'write', rank 0 in 'plan'" in caught.value.causes[1]

    run_ranks(3, go).values()


def test_a_rank_that_leaves_with_an_error_fails_the_next_step_at_once() -> None:
    ranks = ThreadRanks(3)

    def go(group: RankGroup) -> None:
        each(group, "first", lambda: None)
        if group.rank == 2:
            raise OSError("disk gone")
        began = time.monotonic()
        with pytest.raises(RankFailures, match=r"rank 2: left the group.*OSError: disk gone"):
            each(group, "second", lambda: None)
        assert time.monotonic() - began < 10

    run = ranks.run(go)
    assert list(run.errors) == [2]
    assert ranks.board.num_keys == 0


def test_a_rank_interrupted_while_it_waits_fails_the_step_for_all() -> None:
    ranks = ThreadRanks(3, coordinator=1)
    waits = threading.Event()
    board_wait = ranks.board.wait

    def interrupted_wait(keys, timeout_s, *, unless=None):  # type: ignore[no-untyped-def]
        if threading.current_thread().name == "rank-2":
            waits.set()
            raise KeyboardInterrupt
        return board_wait(keys, timeout_s, unless=unless)

    ranks.board.wait = interrupted_wait  # type: ignore[method-assign]

    def go(group: RankGroup) -> None:
        each(group, "x", lambda: waits.wait(10) if group.rank == 0 else None)

    run = ranks.run(go)
    assert isinstance(run.errors[2], KeyboardInterrupt)
    for rank in (0, 1):
        assert isinstance(run.errors[rank], RankFailures)
        assert run.errors[rank].causes == {2: "KeyboardInterrupt"}


def test_a_nested_failure_in_the_reduce_reaches_every_rank() -> None:
    def reduce(_: list[int]) -> int:
        raise RankFailures("inner", {7: "far away"})

    def go(group: RankGroup) -> None:
        began = time.monotonic()
        with pytest.raises(RankFailures, match="far away") as caught:
            all_reduce(group, "outer", lambda: 1, reduce)
        assert caught.value.step == "outer"
        assert time.monotonic() - began < 10

    run_ranks(3, go).values()


def test_a_rank_that_comes_late_finds_the_decision_and_can_go_on() -> None:
    clock, told, is_back = RankTime(3), threading.Event(), threading.Event()

    def go(group: RankGroup) -> int:
        if group.rank == 1:
            with clock.away(1):
                assert told.wait(60)
            is_back.set()
        group.deadline_s = 0.6
        with pytest.raises(RankFailures, match="rank 1: did not answer"):
            each(group, "short", lambda: None)
        group.deadline_s = 30
        told.set()
        assert is_back.wait(60)
        return all_reduce(group, "long", lambda: 1, sum)

    assert TimedRanks(3, clock).run(go).values() == [3, 3, 3]


def test_1000_steps_leave_the_board_as_small_as_one() -> None:
    ranks = ThreadRanks(3)
    sizes: list[int] = []

    def go(group: RankGroup) -> None:
        for i in range(1000):
            if i % 100 == 99:
                with pytest.raises(RankFailures):
                    each(group, "bad", lambda: 1 // group.rank)
            all_gather(group, "step", lambda: bytes(100))
            if group.is_coordinator:
                sizes.append(ranks.board.num_keys)

    ranks.run(go).values()
    assert max(sizes) <= 20
    assert ranks.board.num_keys == 0


def test_a_closed_group_says_so() -> None:
    def go(group: RankGroup) -> None:
        group.close()
        group.close()
        with pytest.raises(ConfigError, match="closed"):
            each(group, "x", lambda: None)

    run_ranks(2, go).values()


@pytest.mark.parametrize(("coordinator", "deadline_s"), [(3, 1.0), (-1, 1.0), (0, 0.0)])
def test_impossible_groups_are_refused(coordinator: int, deadline_s: float) -> None:
    ranks = ThreadRanks(3, coordinator=coordinator, deadline_s=deadline_s)
    with pytest.raises(ConfigError):
        ranks.group(0)


def test_run_ranks_reports_ranks_that_do_not_end() -> None:
    release = threading.Event()
    run = run_ranks(2, lambda group: release.wait(30) if group.rank else 7, wait_s=0.3)
    release.set()
    assert run.running == [1]
    assert run.results[0] == 7
    with pytest.raises(TimeoutError, match=r"\[1\]"):
        run.values()


# --- the error ---------------------------------------------------------------------


def test_rank_failures_pickle_with_what_they_carry() -> None:
    error = Decision.failed({2: describe(ValueError("x")), 1: Cause("silent")}).error("write")
    back = pickle.loads(pickle.dumps(error))
    assert (back.step, back.causes, str(back)) == (error.step, error.causes, str(error))
    assert list(back.causes) == [1, 2]
    assert repr(back.exceptions[2]) == "ValueError('x')"
    assert "ValueError: x" in back.tracebacks[2]
    assert 1 not in back.exceptions
    assert 1 not in back.tracebacks


def test_very_many_failures_stay_small() -> None:
    cause = Cause("text " * 500, "trace " * 2000, bytes(4000))
    decision = Decision.failed(dict.fromkeys(range(16384), cause))
    assert len(decision.encode()) < 1_000_000
    error = decision.error("write")
    assert len(error.causes) == 16384
    assert len(str(error)) < 20_000


def test_an_exception_that_cannot_be_printed_is_still_told() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    cause = describe(Mute())
    assert "Mute: <no text: RuntimeError>" in cause.text
    assert "Mute" in cause.traceback


def test_collectives_start_without_torch() -> None:
    code = (
        "import sys, dcpstore.ranks as c, dcpstore.testing.ranks\n"
        "assert c.open_group().size == 1\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
