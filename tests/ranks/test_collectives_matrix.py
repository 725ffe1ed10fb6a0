"""Who fails, where, and how; on ranks that are threads. Processes run the same cases."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import pytest

from dcpstore.errors import RankFailures
from dcpstore.ranks import all_gather, all_reduce
from dcpstore.ranks.group import RankGroup
from dcpstore.testing.ranks import ThreadRanks
from rank_time import RankTime, TimedRanks

SIZE = 4

# Where: in the function of each rank, pickling its value; on the coordinator unpickling it, in its
# function, pickling the result; on another rank unpickling that.
EVERYWHERE = ("map", "value_dump")
ON_COORDINATOR = ("value_load", "reduce", "result_dump")
ELSEWHERE = ("result_load",)

here = threading.local()


class Unpicklable(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class Picky(Exception):
    """Pickles, but does not unpickle."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)


@dataclass(frozen=True)
class Case:
    place: str
    kind: str
    who: tuple[int, ...]
    coordinator: int
    deadline_s: float = 20.0

    def __str__(self) -> str:
        return f"{self.place}-{self.kind}-{'+'.join(map(str, self.who))}-c{self.coordinator}"


class Hang(Protocol):
    """Ranks that hang until another one was told so: that does not wait for them, then."""

    def until_told(self) -> None:
        """Hang."""

    def tell(self) -> None:
        """End it: this rank was told."""


class ThreadHang:
    """Threads hang in a time that passes without them, and that stands still once told."""

    def __init__(self, clock: RankTime, who: tuple[int, ...]) -> None:
        self._clock = clock
        self._told = threading.Event()
        self._back = {rank: threading.Event() for rank in who}

    def until_told(self) -> None:
        with self._clock.away(here.rank):
            assert self._told.wait(60), "nobody was told"
        self._back[here.rank].set()

    def tell(self) -> None:
        if here.rank not in self._back:
            self._told.set()
            assert all(back.wait(60) for back in self._back.values())


def misbehave(case: Case) -> None:
    if case.kind == "raises":
        raise ValueError("boom")
    if case.kind == "unpicklable":
        raise Unpicklable("boom")
    if case.kind == "picky":
        raise Picky("boom", 403)
    if case.kind == "interrupt":
        raise KeyboardInterrupt("boom")
    if case.kind == "exit":
        raise SystemExit(3)
    if case.kind == "hang":
        here.hang.until_told()
    if case.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def reach(case: Case, place: str) -> None:
    if case.place == place and here.rank in case.who:
        misbehave(case)


class Trap:
    """A value that misbehaves where its case says."""

    def __init__(self, case: Case, stage: str) -> None:
        self.case = case
        self.stage = stage

    def __reduce__(self) -> tuple[object, ...]:
        reach(self.case, f"{self.stage}_dump")
        return spring, (self.case, self.stage)


def spring(case: Case, stage: str) -> Trap:
    reach(case, f"{stage}_load")
    return Trap(case, stage)


@dataclass(frozen=True)
class Outcome:
    """What one rank saw of a case, and of a good step after it."""

    raised: str
    failures: RankFailures | None
    took_s: float
    next_values: list[int] | None = None


def go_through(
    group: RankGroup,
    case: Case,
    hang: Hang | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    here.rank, here.hang = group.rank, hang

    def map_fn() -> Trap:
        reach(case, "map")
        return Trap(case, "value")

    def reduce_fn(values: list[Trap]) -> Trap:
        assert [value.stage for value in values] == ["value"] * group.size
        reach(case, "reduce")
        return Trap(case, "result")

    began = clock()
    raised, failures = "nothing", None
    try:
        group.deadline_s = case.deadline_s
        all_reduce(group, "try", map_fn, reduce_fn)
    except RankFailures as error:
        raised, failures = "RankFailures", error
    except BaseException as error:
        raised = type(error).__name__
    took_s = clock() - began
    if hang is not None:
        hang.tell()
    if case.kind == "kill":
        return Outcome(raised, failures, took_s)
    group.deadline_s = 20
    next_values = all_gather(group, "again", lambda: group.rank)
    return Outcome(raised, failures, took_s, next_values)


def check(case: Case, outcomes: dict[int, Outcome]) -> None:
    """Every surviving rank raised the same in time, and the group works again."""
    survivors = set(range(SIZE)) - (set(case.who) if case.kind == "kill" else set())
    assert set(outcomes) == survivors
    own = {"interrupt": "KeyboardInterrupt", "exit": "SystemExit"}.get(case.kind)
    seen = []
    for rank, outcome in outcomes.items():
        if own is not None and rank in case.who:
            assert outcome.raised == own
        else:
            assert outcome.raised == "RankFailures", (rank, outcome)
            assert outcome.failures is not None
            seen.append(outcome.failures)
        if case.kind == "kill":  # on a slow machine, too, long before a store's own timeout
            assert outcome.took_s < case.deadline_s + 15
        if case.kind in {"raises", "unpicklable", "picky", "interrupt", "exit"}:
            assert outcome.took_s < 0.5 * case.deadline_s, "an error does not wait for a deadline"
        if case.kind != "kill":
            assert outcome.next_values == list(range(SIZE))
    for failures in seen:
        assert failures.step == "try"
        assert failures.causes == seen[0].causes
        check_causes(case, failures)


def check_causes(case: Case, failures: RankFailures) -> None:
    assert set(failures.causes) == set(case.who), failures
    for rank in case.who:
        cause = failures.causes[rank]
        if case.kind in {"hang", "kill"}:
            expected = "did not decide" if case.place in ON_COORDINATOR else "did not answer"
            assert expected in cause
            continue
        shown = "SystemExit: 3" if case.kind == "exit" else "boom"
        assert shown in cause
        assert "misbehave" in failures.tracebacks[rank]
        if case.place in {"map", "reduce"}:
            pickles = case.kind not in {"unpicklable", "picky"}
            assert (rank in failures.exceptions) == pickles


def cases(kinds: Iterable[str], *, coordinators: Iterable[int] = (0, 2)) -> Iterator[Case]:
    for kind, coordinator in product(kinds, coordinators):
        deadline_s = {"hang": 1.5, "kill": 3.0}.get(kind, 20.0)
        others = tuple(rank for rank in range(SIZE) if rank != coordinator)
        for place in EVERYWHERE:
            for who in [*((rank,) for rank in range(SIZE)), others[:2], (coordinator, others[2])]:
                yield Case(place, kind, tuple(sorted(who)), coordinator, deadline_s)
        for place in ON_COORDINATOR:
            yield Case(place, kind, (coordinator,), coordinator, deadline_s)
        for place in ELSEWHERE:
            for who in [*((rank,) for rank in others), others[1:]]:
                yield Case(place, kind, who, coordinator, deadline_s)


ERRORS = ("raises", "unpicklable", "picky", "interrupt", "exit")


@pytest.mark.parametrize("coordinator", [0, 2])
@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_anywhere_is_the_same_error_everywhere(kind: str, coordinator: int) -> None:
    ranks = ThreadRanks(SIZE, coordinator=coordinator)
    some = list(cases([kind], coordinators=[coordinator]))
    assert len(some) == 19

    def go(group: RankGroup) -> list[Outcome]:
        return [go_through(group, case) for case in some]

    by_rank = ranks.run(go).values()
    for index, case in enumerate(some):
        check(case, {rank: outcomes[index] for rank, outcomes in enumerate(by_rank)})
    assert ranks.board.num_keys == 0


HANGS = list(cases(["hang"], coordinators=[1]))


@pytest.mark.parametrize("case", HANGS, ids=str)
def test_a_rank_that_hangs_anywhere_is_named_by_all_before_the_deadline(case: Case) -> None:
    clock = RankTime(SIZE)
    hang = ThreadHang(clock, case.who)
    ranks = TimedRanks(SIZE, clock, coordinator=case.coordinator)
    run = ranks.run(lambda group: go_through(group, case, hang, clock))
    outcomes = dict(enumerate(run.values()))
    check(case, outcomes)
    for rank in outcomes.keys() - set(case.who):
        assert 0 < outcomes[rank].took_s < case.deadline_s


def test_64_ranks_name_the_one_that_failed() -> None:
    case = Case("map", "raises", (37,), 5)

    def go(group: RankGroup) -> RankFailures:
        outcome = go_through(group, case)
        assert outcome.next_values == list(range(64))
        assert outcome.failures is not None
        return outcome.failures

    failures = ThreadRanks(64, coordinator=5).run(go).values()
    assert {str(one) for one in failures} == {
        "step 'try' failed on 1 rank(s):\n  rank 37: ValueError: boom"
    }
