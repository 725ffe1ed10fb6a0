"""The agreement on a step, under random schedules and alone.

Threads play the ranks, and one of them runs at a time: at every request to the board, every wait
and between the steps, a seeded choice says which goes on. Time passes by the waits alone.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from dcpstore.errors import ConfigError, RankFailures
from dcpstore.manager.agreement import Decision, StepAgreement, open_agreement
from dcpstore.ranks import BoardLostError, Seat
from dcpstore.testing.ranks import MemoryBoard
from passing_on import PassesOn

FOREVER_S = 1e9


class Schedule:
    """Lets one thread go on at a time, chosen by a seed; and is their clock."""

    def __init__(self, seed: int, num_threads: int) -> None:
        self._random = random.Random(seed)
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._turns: dict[str, threading.Semaphore] = {}
        self._waits: dict[str, tuple[threading.Event, float] | None] = {}
        self._pauses: set[str] = set()
        self.now_s = 0.0
        self.bias = 0.5  # how often a step waits for a background thread to go on
        self.num_held_waits = 0

    def clock(self) -> float:
        return self.now_s

    def point(self) -> None:
        """Somebody else may come first."""
        self._yield(None)

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        if threading.current_thread().name.startswith("rank-"):
            self.num_held_waits += 1
        if timeout_s < 1:
            self._pauses.add(threading.current_thread().name)
        self._yield((event, self.now_s + max(timeout_s, 0)))
        self._pauses.discard(threading.current_thread().name)
        return event.is_set()

    def leave(self) -> None:
        """The calling thread ends."""
        with self._lock:
            del self._waits[threading.current_thread().name]
            del self._turns[threading.current_thread().name]
        self._choose()

    def begin(self) -> None:
        """Once all threads have come to their first point, let one of them go on."""
        ends_s = time.monotonic() + 30
        while len(self._turns) < self._num_threads:
            assert time.monotonic() < ends_s
            time.sleep(1e-4)
        self._choose()

    def _yield(self, wait: tuple[threading.Event, float] | None) -> None:
        name = threading.current_thread().name
        is_new = name not in self._turns
        with self._lock:
            self._waits[name] = wait
            turn = self._turns.setdefault(name, threading.Semaphore(0))
        if not is_new:
            self._choose()
        assert turn.acquire(timeout=30)

    def _choose(self) -> None:
        with self._lock:
            if not self._waits:
                return
            names = sorted(self._waits)
            ready = [name for name in names if self._is_ready(name)]
            late = [name for name in names if name not in ready]
            # A pause may be over at any moment; a long wait, when nobody else can go on.
            short = [name for name in late if name in self._pauses]
            if not ready or (short and self._random.random() < 0.3):
                name = self._random.choice(short) if short else min(late, key=self._until_s)
                self.now_s = max(self.now_s, self._until_s(name))
            else:
                ours = [name for name in ready if name.startswith("dcpstore-")]
                is_ours = ours and self._random.random() < self.bias
                name = self._random.choice(ours if is_ours else ready)
            self._waits[name] = None
            self._turns[name].release()

    def _is_ready(self, name: str) -> bool:
        wait = self._waits[name]
        return wait is None or wait[0].is_set() or wait[1] <= self.now_s

    def _until_s(self, name: str) -> float:
        wait = self._waits[name]
        return FOREVER_S if wait is None else wait[1]


class PointedBoard(PassesOn):
    """Somebody else may come before each request to the board."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(MemoryBoard())
        self._schedule = schedule

    def __getattr__(self, name: str) -> Any:
        def at_a_point(*args: Any) -> Any:
            self._schedule.point()
            return getattr(self._inner, name)(*args)

        return at_a_point if name != "num_keys" else self._inner.num_keys


class ScheduledRanks:
    """The agreements of some ranks in a random schedule."""

    def __init__(self, seed: int, size: int, **more: Any) -> None:
        self.size = size
        self.random = random.Random(seed)
        self.schedule = Schedule(seed, 2 * size)
        self.board = PointedBoard(self.schedule)
        self.given_up: list[list[tuple[str, bool]]] = [[] for _ in range(size)]
        coordinator = self.random.randrange(size)
        options = {"deadline_s": FOREVER_S, "idle_pause_s": 0.5, "open_pause_s": 0.01, **more}
        self.agreements = [
            StepAgreement(
                Seat(self.board, rank, size, coordinator),  # type: ignore[arg-type]
                clock=self.schedule.clock,
                wait=self.schedule.wait,
                on_given_up=lambda *told, rank=rank: self.given_up[rank].append(told),
                **options,
            )
            for rank in range(size)
        ]
        for one in self.agreements:  # so that the schedule may know when its thread ended
            ended = one._ended.set
            one._ended.set = lambda ended=ended: (ended(), self.schedule.leave())  # type: ignore[method-assign]

    def run(self, work: Callable[[int, StepAgreement], Any]) -> list[Any]:
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def be(rank: int) -> None:
            self.schedule.point()
            try:
                results[rank] = work(rank, self.agreements[rank])
            except BaseException as error:
                errors.append(error)
            finally:
                self.agreements[rank].close()
                self.schedule.leave()

        threads = [
            threading.Thread(target=be, args=(rank,), name=f"rank-{rank}", daemon=True)
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        self.schedule.begin()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        if errors:
            raise errors[0]
        return results


def numbers(seed: int) -> list[int]:
    """What steps are called: one after another, with gaps, or going back once."""
    chance = random.Random(seed)
    if chance.random() < 0.4:
        return list(range(1, 13))
    return [*range(3, 30, 3), 41, 42, 45] if chance.random() < 0.5 else [*range(1, 8), *range(4, 9)]


def decide_in_schedule(seed: int) -> int:
    """How many decisions were made, the same on all ranks."""
    ranks = ScheduledRanks(seed, random.Random(seed).choice([2, 3, 3, 4]))
    calls = numbers(seed)
    ranks.schedule.bias = ranks.random.choice([0.3, 0.6, 0.9])
    asks = {(ranks.random.randrange(ranks.size), ranks.random.choice(calls)) for _ in range(3)}

    def train(rank: int, agreement: StepAgreement) -> list[tuple[int, Decision]]:
        made = []
        for index, step in enumerate(calls):
            if (rank, step) in asks:
                agreement.request(f"at {step}/{index}", is_end=step % 2 == 0)
            ranks.schedule.point()
            decision = agreement.at(step)
            if decision is not None:
                made.append((index, decision))
        return made

    made = ranks.run(train)
    told = [[(i, d.step, d.why, d.is_end, d.asked_at) for i, d in one] for one in made]
    assert all(one == told[0] for one in told), seed
    whys = [why for _, d in made[0] for why in d.why.split("; ")]
    assert len(set(whys)) == len(whys), seed
    assert all(d.is_end == any(int(w.split()[-1].split("/")[0]) % 2 == 0
               for w in d.why.split("; ")) for _, d in made[0])  # fmt: skip
    assert ranks.board.num_keys == 0, seed
    assert not any(ranks.given_up)
    return len(made[0])


@pytest.mark.parametrize(
    "part", [*range(4), *(pytest.param(part, marks=pytest.mark.campaign) for part in range(4, 100))]
)
def test_all_ranks_get_the_same_decisions_at_the_same_steps(part: int) -> None:
    assert sum(map(decide_in_schedule, range(part * 200, part * 200 + 200))) > 200


@pytest.mark.parametrize("seed", range(10))
def test_nobody_waits_without_a_request(seed: int) -> None:
    ranks = ScheduledRanks(seed, 3)
    num_waits: list[int] = []

    def train(rank: int, agreement: StepAgreement) -> None:
        for step in range(10):
            ranks.schedule.point()
            assert agreement.at(step) is None
        num_waits.append(ranks.schedule.num_held_waits)  # until the first of them closes

    ranks.run(train)
    assert num_waits[0] == 0


@pytest.mark.parametrize("seed", range(10))
def test_a_step_waits_only_while_a_decision_is_made(seed: int) -> None:
    """What `test_nobody_waits_without_a_request` counts is what a wait would be."""
    ranks = ScheduledRanks(seed, 3)

    def train(rank: int, agreement: StepAgreement) -> int:
        agreement.request("now")
        for step in range(10):
            ranks.schedule.point()
            agreement.at(step)
        return ranks.schedule.num_held_waits

    assert min(ranks.run(train)) > 0


@pytest.mark.parametrize("seed", range(5))
def test_a_request_is_given_up_on_all_ranks_if_one_is_silent(seed: int, caplog) -> None:
    """The silent one holds up nobody, and comes to know of it when it is back."""
    ranks = ScheduledRanks(seed, 3, deadline_s=5.0)
    silent = (ranks.agreements[0]._round.seat.coordinator + 1) % 3
    hung, back = threading.Event(), threading.Event()
    post = ranks.board._inner.post

    def hang(key: str, data: bytes) -> None:
        if key == f"0/r/{silent}":
            hung.set()
            ranks.schedule.wait(back, FOREVER_S)
        post(key, data)

    ranks.board._inner.post = hang
    caplog.clear()

    def train(rank: int, agreement: StepAgreement) -> list[str]:
        made = []
        for step in range(300):
            if rank == 0 and step in (0, 200):
                agreement.request(f"at {step}")
            if rank == 0 and step == 150:
                assert hung.is_set()
                back.set()
            ranks.schedule.wait(threading.Event(), 0.1)
            made.append(agreement.at(step))
        return [one.why for one in made if one is not None]

    assert ranks.run(train) == [["rank 0: at 200"]] * 3, seed
    assert ranks.given_up == [[("rank 0: at 0", False)]] * 3
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"did not answer in time. Ranks {silent} hang" in record.message


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("kind", "is_held"), [("g", False), ("a", True), ("d", True)])
def test_no_rank_waits_for_ever_for_one_that_dies(
    seed: int, kind: str, is_held: bool, caplog
) -> None:
    """A coordinator that never says go or never decides, a rank that dies after it was ready."""
    ranks = ScheduledRanks(seed, 3, deadline_s=5.0)
    coordinator = ranks.agreements[0]._round.seat.coordinator
    dead = coordinator if kind in "gd" else (coordinator + 1) % 3
    name = f"dcpstore-agreement-{dead}"

    def die(verb: Callable[..., Any]) -> Callable[..., Any]:
        def maybe(key: str, data: bytes) -> Any:
            if key.startswith(f"0/{kind}") and threading.current_thread().name == name:
                ranks.schedule.wait(threading.Event(), FOREVER_S)
            return verb(key, data)

        return maybe

    for verb in ("post", "settle"):
        setattr(ranks.board._inner, verb, die(getattr(ranks.board._inner, verb)))
    caplog.clear()

    def train(rank: int, agreement: StepAgreement) -> list[Decision | None]:
        if rank == dead:
            ranks.schedule.wait(threading.Event(), 1000)
            return []
        agreement.request("now", is_end=True)
        made = []
        for step in range(100):
            ranks.schedule.wait(threading.Event(), 0.2)
            made.append(agreement.at(step))
        return made

    for rank, made in enumerate(ranks.run(train)):
        assert made == [] if rank == dead else made == [None] * 100
        assert rank == dead or [end for _, end in ranks.given_up[rank]] == [True]
    assert f"Ranks {dead} hang" in caplog.records[0].message
    assert (ranks.schedule.num_held_waits > 2 * 99) or not is_held


def differing(steps_of: dict[int, list[int]]) -> list[str]:
    """What each rank raises if the ranks make these steps while one asks."""
    ranks = ScheduledRanks(1, len(steps_of), idle_pause_s=0.01)
    coordinator = ranks.agreements[0]._round.seat.coordinator
    assert coordinator == 0
    here = [0] * len(steps_of)

    def train(rank: int, agreement: StepAgreement) -> str:
        for step in steps_of[rank]:
            agreement.at(step)
        here[rank] = 1
        while not all(here):
            ranks.schedule.point()
        agreement.request("now")
        while not (agreement._is_held or agreement._due or agreement._error):
            ranks.schedule.wait(threading.Event(), 0.1)
        try:
            return "decided" if agreement.at(100) is not None else "nothing"
        except RankFailures as error:
            return str(error)

    return ranks.run(train)


def test_ranks_that_make_other_steps_are_named_on_all_ranks() -> None:
    one, other, third = differing({0: [4, 5, 6, 7], 1: [4, 5, 6], 2: [4, 6, 7]})
    assert one == other == third
    assert "rank 2: made the steps 4, 6, 7, the coordinator 4, 5, 6, 7" in one
    assert "rank 1" not in one
    (one, _) = differing({0: [4, 5, 6, 7], 1: [14, 15]})
    assert "rank 1: made the steps 14, 15" in one
    assert differing({0: [4, 5], 1: [], 2: [4]}) == ["decided"] * 3
    assert differing({0: [4, 5, 1, 2], 1: [4, 5, 1]}) == ["decided"] * 2
    assert "rank 1: made the steps (none)" not in differing({0: [1], 1: []})[0]


class LostBoard(MemoryBoard):
    def __init__(self) -> None:
        super().__init__()
        self.lost = threading.Event()
        self.lost_at = ""

    def _check(self, *keys: str) -> None:
        if self.lost.is_set() or any(self.lost_at and key.endswith(self.lost_at) for key in keys):
            raise BoardLostError(1, "the job's store is gone")

    def fetch(self, keys):
        self._check(*keys)
        return super().fetch(keys)

    def settle(self, key, data):
        self._check(key)
        return super().settle(key, data)


def lost_agreement(board: LostBoard, **more: Any) -> StepAgreement:
    seat = Seat(board, rank=0, size=2, coordinator=0)
    return StepAgreement(seat, idle_pause_s=0.01, **more)


def until(is_true: Callable[[], Any]) -> None:
    ends_s = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < ends_s
        time.sleep(0.002)


def test_training_goes_on_if_the_store_is_lost_while_nobody_asks(caplog) -> None:
    board = LostBoard()
    with lost_agreement(board) as agreement, caplog.at_level(logging.INFO):
        assert agreement.at(1) is None
        board.lost.set()
        until(lambda: not agreement.request("now"))
        assert agreement.at(2) is None
    assert "no step to save is agreed on any more" in caplog.text


def test_a_rank_that_was_to_be_told_raises_if_the_store_is_lost() -> None:
    """The others may save at a step that this rank does not know."""
    board = LostBoard()
    with lost_agreement(board) as agreement:
        board.post("0/r/1", b"")
        board.lost_at = "d"
        agreement.request("now")
        until(lambda: agreement._ended.is_set())
        with pytest.raises(RankFailures, match="rank 1: the job's store is gone"):
            agreement.at(1)
        assert agreement.at(2) is None


def test_what_goes_wrong_in_the_thread_is_raised_by_the_next_step() -> None:
    board = LostBoard()

    def fail(*_: object) -> None:
        raise ArithmeticError("scripted")

    with lost_agreement(board, deadline_s=0.01, on_given_up=fail) as agreement:
        agreement.request("now")
        until(lambda: agreement._ended.is_set())
        with pytest.raises(ArithmeticError, match="scripted"):
            agreement.at(1)
        assert agreement.at(1) is None


def test_once_a_rank_has_closed_nobody_listens_and_nobody_waits() -> None:
    board = MemoryBoard()
    one, other = (
        StepAgreement(Seat(board, rank, 2, 0), idle_pause_s=0.01, deadline_s=FOREVER_S)
        for rank in range(2)
    )
    assert one.request("now")
    one.close()
    one.close()
    until(lambda: not other.request("too late"))
    assert other.at(1) is other.at(2) is None
    other.close()
    assert board.num_keys == 0
    assert not one.request("too late")
    assert not any(thread.name.startswith("dcpstore-agr") for thread in threading.enumerate())


@pytest.mark.parametrize("seed", range(5))
def test_deadlines_count_from_no_later_than_the_request(seed: int) -> None:
    """By each rank's own clock; the wall clock that jumps between is only told."""
    ranks = ScheduledRanks(seed, 3)
    asked_s: list[float] = []

    def train(rank: int, agreement: StepAgreement) -> list[Decision]:
        made = []
        for step in range(200):
            if step == 10 and rank == 1:
                asked_s.append(ranks.schedule.clock())
                agreement.request("notice")
            ranks.schedule.wait(threading.Event(), 0.1)
            made.append(agreement.at(step))
        return [one for one in made if one is not None]

    for (decision,) in ranks.run(train):
        assert asked_s[0] - 5 < decision.since_s <= asked_s[0]
        assert abs(decision.asked_at - time.time()) < 60


def test_one_rank_alone_decides_at_its_next_step_and_starts_no_thread() -> None:
    num_threads = threading.active_count()
    with open_agreement() as agreement:
        assert threading.active_count() == num_threads
        assert agreement.at(1) is None
        began_s = time.monotonic()
        assert agreement.request("a time is due")
        assert agreement.request("SIGTERM", is_end=True)
        decision = agreement.at(2)
        assert decision is not None
        assert (decision.step, decision.is_end) == (2, True)
        assert decision.why == "rank 0: a time is due; rank 0: SIGTERM"
        assert began_s <= decision.since_s <= time.monotonic()
        assert agreement.at(3) is None
    assert not agreement.request("too late")
    with pytest.raises(ConfigError, match="deadline_s must be positive"):
        open_agreement(deadline_s=0)
    with pytest.raises(ConfigError, match="coordinator 1 is no rank"):
        open_agreement(coordinator_rank=1)
