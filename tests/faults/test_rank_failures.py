"""Whatever goes wrong on whichever ranks of a save or load, all ranks know, and in time.

Ranks are threads here, and their time passes only while all of them wait: how fast the machine
is decides nothing. `test_rank_failures_processes` runs a part of it on processes.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from dcpstore import RankFailures, StoreError
from dcpstore.ranks import each
from faults.failing_ranks import (
    LOAD_PHASES,
    NUM_RANKS,
    OF_COORDINATOR,
    SAVE_PHASES,
    Bomb,
    BombGroup,
    Interrupted,
    Job,
    Kind,
)
from faults.places import Backend
from rank_time import RankTime, TimedRanks

PHASES = SAVE_PHASES + LOAD_PHASES
DEADLINE_S = 60.0
PROMPT_S = 1.0
"""Within this, ranks that do not wait for a silent one must have raised: a coordinator that is
interrupted waits so long for the others' answers."""


@dataclass
class Outcome:
    """What became of one save or load with failing ranks.

    Attributes:
        errors: What each rank raised.
        seconds: Until each rank raised, of the ranks' time.
        left: The objects of the failed save that were there when all ranks had raised.
        is_sealed: Whether a checkpoint was there then.
    """

    errors: list[BaseException | None] = field(default_factory=lambda: [None] * NUM_RANKS)
    seconds: list[float] = field(default_factory=lambda: [0.0] * NUM_RANKS)
    left: list[str] = field(default_factory=list)
    is_sealed: bool = False


def fail(phase: str, failing: tuple[int, ...], kind: Kind, coordinator: int) -> Outcome:
    """Fail once, then save and load well on the same group."""
    backend, clock, outcome = Backend(), RankTime(NUM_RANKS), Outcome()
    bomb = Bomb(phase, failing, kind, away=clock.away)

    def release() -> None:
        clock.come_back(*failing)
        bomb.release.set()

    everyone = range(NUM_RANKS)
    all_raised = threading.Barrier(NUM_RANKS, action=lambda: clock.come_back(*everyone))
    survivors_raised = threading.Barrier(NUM_RANKS - len(failing), action=release)

    def disarm() -> None:
        bomb.is_armed = False
        outcome.left = [name for name in backend.names() if name not in before]
        outcome.is_sealed = ".metadata" in outcome.left

    def work(group: Any) -> None:
        rank = group.rank
        job = Job(BombGroup(group, bomb), rank, "memory://backend", opener, bomb, clock=clock)
        if phase in LOAD_PHASES:
            bomb_away = Job(group, rank, job.url, opener, Bomb("", (), "error"))
            bomb_away.save(0)
            each(group, "saved", lambda: None)
            if group.is_coordinator:
                before.update(backend.names())
        outcome.errors[rank], outcome.seconds[rank] = job.fail()
        if kind == "hang" and rank not in failing:
            with clock.away(rank):
                survivors_raised.wait(100)
        for then in (disarm, lambda: None):
            with clock.away(rank):
                is_one = all_raised.wait(100) == 0
            if is_one:
                then()
        if outcome.is_sealed:
            job.load(1)
        job.save(2)
        job.load(2)

    def opener(*_args: Any, **_options: Any) -> Any:
        return backend.shared

    before: set[str] = set()
    ranks = TimedRanks(NUM_RANKS, clock, coordinator=coordinator, deadline_s=DEADLINE_S)
    ranks.run(work, wait_s=110).values()
    return outcome


def check(
    outcome: Outcome, phase: str, failing: tuple[int, ...], kind: Kind, within_s: float
) -> None:
    """All ranks raised in time and named who failed; nothing is left of a failed save."""
    for rank, error in enumerate(outcome.errors):
        if kind == "interrupt" and rank in failing:
            assert isinstance(error, Interrupted), f"rank {rank} raised {error!r}"
            continue
        assert isinstance(error, RankFailures), f"rank {rank} raised {error!r}"
        check_names(error, failing, kind)
        if rank not in failing:
            assert outcome.seconds[rank] <= within_s
    told = [error.causes for error in outcome.errors if isinstance(error, RankFailures)]
    assert all(causes == told[0] for causes in told), "ranks were told different things"
    for error in outcome.errors:
        if isinstance(error, RankFailures):
            is_unknown = phase == "finish" and kind != "denied"
            assert ("may be sealed all the same" in str(error)) == is_unknown
    if kind == "denied" or phase != "finish":
        assert outcome.left == []
    elif kind != "hang":
        # The seal broke off, and nobody can tell whether it still arrives: all may stay.
        assert not outcome.is_sealed
    # One that hung in the put and woke up seals a checkpoint, whole; `fail` has loaded it.


def check_names(error: RankFailures, failing: tuple[int, ...], kind: Kind) -> None:
    """The error names the ranks that failed, and why."""
    second_hand = {rank: text for rank, text in error.causes.items() if rank not in failing}
    for text in second_hand.values():
        # Who waited for bytes of a failing rank fails too, and says for whom it waited. So
        # does who waited for that one.
        assert "receiving from rank" in text or "sending to rank" in text, text
    assert set(failing) <= error.causes.keys(), error
    for rank in failing:
        cause = error.causes[rank]
        if kind == "hang":
            # A rank that is gone may have taken the job's TCPStore with it.
            assert re.search("hangs|not answer|in time|store.* was lost", cause), cause
            continue
        assert f"scripted failure of rank {rank}" in cause
        assert "failing_ranks.py" in error.tracebacks[rank]
        kept = error.exceptions.get(rank)
        if kind == "unpicklable":
            assert kept is None
            assert "Unpicklable" in cause
        elif kind == "denied":
            assert isinstance(kept, StoreError)
            assert kept.denied
        else:
            assert type(kept) is (ArithmeticError if kind == "error" else Interrupted)


def sets_of(phase: str) -> list[tuple[tuple[int, ...], int]]:
    """Which ranks fail, and which one coordinates."""
    if phase in OF_COORDINATOR:
        return [((rank,), rank) for rank in range(NUM_RANKS)]
    singles = [((rank,), 0) for rank in range(NUM_RANKS)]
    return [*singles, ((2,), 2), ((1, 2), 0), ((0, 3), 0)]


KINDS: tuple[Kind, ...] = ("error", "unpicklable", "interrupt", "denied")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phase", PHASES)
def test_a_failing_rank_fails_all_ranks_and_leaves_nothing(phase: str, kind: Kind) -> None:
    # Every phase and every set of ranks meets every kind; the campaign has all triples.
    sets = sets_of(phase)
    turn = PHASES.index(phase) + 2 * KINDS.index(kind)
    check_all(phase, kind, [sets[turn % len(sets)]])


@pytest.mark.campaign
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phase", PHASES)
def test_any_failing_ranks_fail_all_ranks_in_any_way(phase: str, kind: Kind) -> None:
    check_all(phase, kind, sets_of(phase))


def check_all(phase: str, kind: Kind, sets: Sequence[tuple[tuple[int, ...], int]]) -> None:
    for failing, coordinator in sets:
        print(f"{failing} fail, {coordinator} coordinates")
        check(fail(phase, failing, kind, coordinator), phase, failing, kind, PROMPT_S)


@pytest.mark.parametrize("num_sets", [1, pytest.param(7, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("phase", PHASES)
def test_a_hanging_rank_fails_all_ranks_by_the_deadline(phase: str, num_sets: int) -> None:
    for failing, coordinator in sets_of(phase)[-num_sets:]:
        print(f"{failing} hang, {coordinator} coordinates")
        outcome = fail(phase, failing, "hang", coordinator)
        check(outcome, phase, failing, "hang", DEADLINE_S)
        survivors = [rank for rank in range(NUM_RANKS) if rank not in failing]
        assert any(outcome.seconds[rank] > PROMPT_S for rank in survivors), "nobody waited"
