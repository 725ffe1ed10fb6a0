"""Time that passes only while all ranks wait."""

from __future__ import annotations

import threading
import time

import pytest

from dcpstore.errors import RankFailures
from dcpstore.ranks import RankGroup
from dcpstore.ranks.steps import each
from rank_time import RankTime, TimedRanks

HOURS_S = 10_000.0


def test_a_rank_that_is_at_work_is_waited_for_however_long_it_takes() -> None:
    """In real time, the others' deadline would be long over."""
    clock = RankTime(3)

    def work(group: RankGroup) -> float:
        each(group, "slow", lambda: time.sleep(0.2) if group.rank == 1 else None)
        return clock()

    assert TimedRanks(3, clock, deadline_s=0.01).run(work).values() == [0, 0, 0]


@pytest.mark.parametrize("silent", [0, 2])
def test_time_jumps_to_the_deadline_once_all_others_wait(silent: int) -> None:
    clock, told = RankTime(3), threading.Event()
    raised: dict[int, RankFailures] = {}

    def hang() -> None:
        with clock.away(silent):
            assert told.wait(60)

    def work(group: RankGroup) -> None:
        try:
            each(group, "silent", hang if group.rank == silent else lambda: None)
        except RankFailures as error:
            raised[group.rank] = error
        if len(raised) == 2:
            told.set()

    TimedRanks(3, clock, deadline_s=HOURS_S).run(work, wait_s=60).values()
    assert 0.5 * HOURS_S < clock() <= HOURS_S
    assert [set(raised[rank].causes) for rank in range(3)] == [{silent}] * 3


def test_who_is_called_back_is_waited_for_before_it_wakes_up() -> None:
    clock, is_away, is_called = RankTime(2), threading.Event(), threading.Event()

    def come_late(group: RankGroup) -> None:
        with clock.away(1):
            is_away.set()
            assert is_called.wait(60)
            time.sleep(0.2)

    def call(group: RankGroup) -> None:
        assert is_away.wait(60)
        clock.come_back(1)
        is_called.set()

    def work(group: RankGroup) -> float:
        (come_late if group.rank == 1 else call)(group)
        each(group, "together", lambda: None)
        return clock()

    assert TimedRanks(2, clock).run(work, wait_s=60).values() == [0, 0]


def test_nobody_waits_for_a_rank_that_has_left() -> None:
    clock = RankTime(2)

    def work(group: RankGroup) -> None:
        if group.rank == 0:
            with pytest.raises(RankFailures, match="rank 1"):
                group.deadline_s = HOURS_S
                each(group, "alone", lambda: None)

    TimedRanks(2, clock).run(work, wait_s=60).values()
    assert clock() > 0.5 * HOURS_S


def test_a_transfer_that_nobody_takes_part_in_ends_in_the_ranks_time() -> None:
    clock, told = RankTime(2), threading.Event()

    def work(group: RankGroup) -> None:
        group.open_lanes()
        if group.rank == 1:
            with clock.away(1):
                assert told.wait(60)
            return
        pending = group.post_receive(bytearray(5), 1)
        with pytest.raises(TimeoutError):
            pending.wait(HOURS_S)
        told.set()

    TimedRanks(2, clock).run(work, wait_s=60).values()
    assert clock() == HOURS_S
