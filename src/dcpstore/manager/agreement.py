"""At which step all ranks save, where only one of them knows that they should.

A time is due on the coordinator; SIGTERM reaches one rank of thousands; a cloud gives notice to
one host. Ranks are not at the same step at the same moment, so each would save another one. Here
they agree on a step, without a collective and without a request on any step's way: each rank has a
thread that does it, and `StepAgreement.at` takes a lock and compares.

Calls in order; ``k`` counts requests, and keys are on a board of the agreement's own:

1. A rank that has a request settles ``k/q``. Every rank looks for that key, with long pauses.
2. A rank that finds it posts ``k/r/{rank}``: it is ready, and looks with short pauses from now on.
   Its steps go on, so a rank that hangs holds up nobody here.
3. The coordinator waits for all of these and settles ``k/g``: go.
4. A rank that reads it takes its lock, notes the last step for which `at` returned, and holds its
   steps: `at` waits from then on. It posts the note at ``k/a/{rank}``, with its own requests.
5. The coordinator waits for all of these and settles ``k/d``: the last of the noted steps.
6. A rank that reads it lets its steps go on. `at` returns the decision at the first step after the
   one in ``k/d``.

No rank has passed that step: it made no step between its note and ``k/d``, and its note is not
later than the last. ``q``, ``g`` and ``d`` are registers, which the first to settle fixes for all.
So a rank that waits in vain settles ``g`` or ``d`` itself, with who was silent, and every rank
gives the request up alike. A rank that closes ends the agreement in whichever of them is open.

``docs/design/015-which-step.md`` has what it costs.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from typing_extensions import Self

from dcpstore.errors import ConfigError, RankFailures
from dcpstore.ranks import Board, BoardLostError, Seat, open_seat
from dcpstore.text import listed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

EventWait: TypeAlias = Callable[[threading.Event, float], bool]
"""Waits for an event, for so many seconds at most; whether it came."""

_STEP = "agree on a step to save"

# All ranks together ask the store at most 8,000 times a second for a request, a fifth of what it
# answers; while one is open, for a second or two, twice that.
_IDLE_PAUSE_S = 0.5
_IDLE_PAUSE_PER_RANK_S = 120e-6
_LEAST_PAUSE_S = 0.0005
_OPEN_PAUSE_S = 0.005
_OPEN_PAUSE_PER_RANK_S = 60e-6

_LEAVE_S = 5.0
_LONG_S = 60.0
_NUM_REMEMBERED = 8

_Position: TypeAlias = "tuple[int, int]"
"""How often the steps went back, and the step: grows from call to call of `at`."""

_START: _Position = (-1, sys.maxsize)


@dataclass(frozen=True, slots=True)
class Decision:
    """All ranks save now.

    Args:
        step: The step that `at` was called with.
        why: Who asked for it, and why.
        is_end: Whether training is to end after it.
        asked_at: Seconds since the epoch when it was first asked for, by that rank's clock.
        since_s: The same by this rank's own monotonic clock, for deadlines: no later than that
            moment, and earlier by no more than a pause between two questions.
    """

    step: int
    why: str
    is_end: bool
    asked_at: float
    since_s: float


@dataclass(frozen=True, slots=True)
class _Ask:
    """A request of one rank."""

    rank: int
    why: str
    is_end: bool
    asked_at: float
    asked_s: float  # by the clock of that rank


@dataclass(frozen=True, slots=True)
class _Note:
    """What a rank posts when it holds: its last steps, the latest at the end, and its requests."""

    recent: Sequence[_Position]
    asks: Sequence[_Ask]
    waited_s: float = 0.0  # from the first of these requests until ``k/q`` was there


@dataclass(frozen=True, slots=True)
class _Word:
    """What a register says."""

    kind: Literal["asked", "go", "decided", "differ", "silent", "ended"]
    by: int
    asks: Sequence[_Ask] = ()
    waited_s: float = 0.0  # the longest of all notes
    after: _Position = _START
    ranks: Mapping[int, str] = field(default_factory=dict)  # those to name, and why

    def encode(self) -> bytes:
        return pickle.dumps(self, protocol=5)

    @staticmethod
    def decode(data: bytes) -> _Word:
        word: _Word = pickle.loads(data)  # noqa: S301 - sent by a rank of this job
        return word


@dataclass(frozen=True, slots=True)
class _Due:
    """What was decided and is still to be told."""

    after: _Position
    asks: Sequence[_Ask]
    since_s: float


class _Closed(Exception):
    """This rank closes, whatever it waits for."""


def open_agreement(
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    *,
    deadline_s: float = 10.0,
    on_given_up: Callable[[str, bool], object] | None = None,
) -> StepAgreement:
    """All ranks: make the agreement of the ranks of a process group. Waits for nobody.

    Args:
        process_group: The ranks; None for all. Nothing is sent over it.
        coordinator_rank: The rank that decides.
        deadline_s: See `StepAgreement`.
        on_given_up: See `StepAgreement`.

    Raises:
        ConfigError: As `dcpstore.ranks.open_seat` says, and if there is no time at all.
    """
    seat = open_seat(process_group, coordinator_rank, purpose="agreement")
    return StepAgreement(seat, deadline_s=deadline_s, on_given_up=on_given_up)


class StepAgreement:
    """Tell all ranks the same step at which to save. One per rank.

    All ranks make it, call `at` after the same steps, and close it. `request` may be called on
    any rank and in any thread. Closing one of them ends it for all: then nothing is decided any
    more, and nobody waits. With one rank there is no board and no thread, and a request is
    decided at the next step.

    Without a request, `at` takes about 0.5 us and the ranks together send the job's store
    `size / idle_pause_s` questions a second. A request is decided about one `idle_pause_s` later.
    Meanwhile a step is held up only from a rank's note to the decision, about two pauses of
    `open_pause_s`: at most 6 ms were measured with 2 to 4 ranks, 2 s are to be expected with
    16,384. If a rank dies at this very moment, it is `deadline_s`.

    Should ranks be found to have made different steps, every rank's next `at` raises.

    Args:
        seat: Where the ranks meet; None where there is but one. See `open_agreement`.
        deadline_s: Seconds in which all ranks must answer; then a request is given up on all
            of them, and a warning names those that did not. Other ranks give the coordinator
            two idle pauses more.
        on_given_up: Called on every rank, in the agreement's thread, with the text of a request
            that was given up and whether it was to end training.
        idle_pause_s: Seconds between two questions for a request; None for 0.5, and so many more
            in a large job that all ranks together ask 8,000 times a second.
        open_pause_s: The longest pause while a request is open; None for 5 ms or 60 us per rank.
        clock: Seconds that only grow.
        wait: How a thread waits.

    Raises:
        ConfigError: If there is no time at all.
    """

    def __init__(
        self,
        seat: Seat | None,
        *,
        deadline_s: float = 10.0,
        on_given_up: Callable[[str, bool], object] | None = None,
        idle_pause_s: float | None = None,
        open_pause_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: EventWait = threading.Event.wait,
    ) -> None:
        if deadline_s <= 0:
            raise ConfigError(f"deadline_s must be positive, not {deadline_s}")
        self._on_given_up = on_given_up
        self._clock = clock
        self._wait = wait
        # What `at` and the thread share, under the lock.
        self._lock = threading.Lock()
        self._recent: deque[_Position] = deque([_START], maxlen=_NUM_REMEMBERED)
        self._is_held = False
        self._due: list[_Due] = []
        self._asked: dict[str, _Ask] = {}
        self._error: BaseException | None = None
        self._is_closing = False
        self._is_over = False
        self._free = threading.Event()
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._round: _Round | None = None
        if seat is None:
            return
        self._round = _Round(
            self,
            seat,
            clock,
            deadline_s,
            idle_pause_s or max(_IDLE_PAUSE_S, seat.size * _IDLE_PAUSE_PER_RANK_S),
            open_pause_s or max(_OPEN_PAUSE_S, seat.size * _OPEN_PAUSE_PER_RANK_S),
        )
        name = f"dcpstore-agreement-{seat.rank}"
        threading.Thread(target=self._listen, name=name, daemon=True).start()

    # --- what training calls ---------------------------------------------------------------

    def at(self, step: int) -> Decision | None:
        """Say that a step is complete. All ranks, with the same numbers in the same order.

        Numbers may leave gaps and go back, as after a restore, if they do so on all ranks.

        Returns:
            The decision if all ranks save now, on each of them once; None otherwise.

        Raises:
            RankFailures: If ranks made different steps, naming those that differ from the
                coordinator; or if the job's store was lost while this rank was to be told.
        """
        while True:
            with self._lock:
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
                if not self._is_held:
                    return self._pass(step)
            self._wait(self._free, _LONG_S)

    def request(self, why: str, *, is_end: bool = False) -> bool:
        """Ask that all ranks save soon. Any rank and thread; sends nothing itself.

        Requests that meet become one decision, which ends training if any of them is to. Not to
        be called by a signal's handler, which may interrupt `at`; see
        `dcpstore.manager.preemption`.

        Args:
            why: For people; asked twice before it was heard, it counts once.
            is_end: Whether training is to end after the save.

        Returns:
            Whether anybody listens: False once any rank has closed, or the store was lost.
        """
        now_s = self._clock()
        rank = 0 if self._round is None else self._round.seat.rank
        ask = _Ask(rank, why, is_end, time.time(), now_s)
        with self._lock:
            if self._is_closing or self._is_over:
                return False
            if self._round is None:
                self._due.append(_Due(_START, (ask,), now_s))
            else:
                known = self._asked.setdefault(why, ask)
                if is_end and not known.is_end:
                    self._asked[why] = replace(known, is_end=True)
        self._wake.set()
        return True

    def close(self) -> None:
        """End the agreement for all ranks. Idempotent; takes moments, and waits for nobody."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
        if self._round is None:
            return
        self._wake.set()
        if self._wait(self._ended, _LEAVE_S):  # if not, the store hangs
            with contextlib.suppress(BoardLostError):
                self._round.leave(is_over=self._is_over)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pass(self, step: int) -> Decision | None:
        turn, last = self._recent[-1]
        position = (turn + (step <= last), step)
        self._recent.append(position)
        if not self._due:
            return None
        due = [one for one in self._due if one.after < position]
        if not due:
            return None
        self._due = [one for one in self._due if one not in due]
        asks = [ask for one in due for ask in one.asks]
        return Decision(
            step,
            _why(asks),
            any(ask.is_end for ask in asks),
            min(ask.asked_at for ask in asks),
            min(one.since_s for one in due),
        )

    # --- what the thread calls -------------------------------------------------------------

    def hold(self) -> _Note:
        """Let no further step pass. Returns what this rank has to say."""
        with self._lock:
            self._is_held = True
            self._free.clear()
            asks = tuple(self._asked.values())
            self._asked.clear()
            return _Note(tuple(self._recent), asks)

    def release(self, due: _Due | None = None, error: BaseException | None = None) -> None:
        """Let steps pass again."""
        with self._lock:
            if due is not None:
                self._due.append(due)
            if error is not None:
                self._error = error
            self._is_held = False
            self._free.set()

    def asks(self, *, forget: bool = False) -> tuple[_Ask, ...]:
        """Return this rank's requests that no note has told yet.

        Raises:
            _Closed: If this rank closes.
        """
        with self._lock:
            if self._is_closing:
                raise _Closed
            found = tuple(self._asked.values())
            if forget:
                self._asked.clear()
            return found

    def give_up(self, asks: Sequence[_Ask]) -> None:
        """Forget the requests of a round in which somebody was silent."""
        every = list(dict.fromkeys((*asks, *self.asks(forget=True))))
        self.release()
        if self._on_given_up is not None:
            self._on_given_up(_why(every), any(ask.is_end for ask in every))

    def pause(self, seconds: float) -> None:
        """Wait, but not after a new request, nor after `close`."""
        self._wait(self._wake, seconds)
        self._wake.clear()
        with self._lock:
            if self._is_closing:
                raise _Closed

    def _listen(self) -> None:
        """Go through one request after another. The thread."""
        assert self._round is not None
        error: BaseException | None = None
        try:
            while self._round.go_through():
                pass
            self._is_over = True
        except _Closed:
            pass
        except BoardLostError as lost:
            self._is_over = True
            if self._is_held:
                error = RankFailures(_STEP, {lost.rank: str(lost)})
            logger.info("no step to save is agreed on any more: %s", lost)
        except BaseException as bug:  # noqa: BLE001 - a thread's boundary: raised by `at`
            self._is_over = True
            error = bug
        finally:
            self.release(error=error)
            self._ended.set()


class _Round:
    """One rank's way through the requests, one at a time. Used by the agreement's thread.

    Args:
        agreement: Whose steps are held.
        seat: Where the ranks meet.
        clock: See `StepAgreement`.
        deadline_s: As above.
        idle_pause_s: As above.
        open_pause_s: As above.
    """

    def __init__(
        self,
        agreement: StepAgreement,
        seat: Seat,
        clock: Callable[[], float],
        deadline_s: float,
        idle_pause_s: float,
        open_pause_s: float,
    ) -> None:
        self._agreement = agreement
        self.seat = seat
        self._board: Board = seat.board
        self._clock = clock
        self._deadline_s = deadline_s
        self._idle_pause_s = idle_pause_s
        self._is_coordinator = seat.rank == seat.coordinator
        # The coordinator alone may ask as often as it likes.
        all_ask_s = 0 if self._is_coordinator else seat.size * _OPEN_PAUSE_PER_RANK_S
        self._least_pause_s = min(max(_LEAST_PAUSE_S, all_ask_s), open_pause_s)
        self._open_pause_s = min(_OPEN_PAUSE_S, open_pause_s) if not all_ask_s else open_pause_s
        self._number = 0
        self._open = [0]  # requests whose registers somebody may still want
        self._own_keys: list[str] = []
        self._quiet_s = clock()  # when there was no request last
        self._end_s = 0.0

    def go_through(self) -> bool:
        """Wait for a request and answer it. Whether there may be others."""
        asked = self._next()
        if asked.kind == "ended":
            return False
        seen_s = self._clock()
        more_s = 0 if self._is_coordinator else 2 * self._idle_pause_s
        self._end_s = seen_s + self._deadline_s + more_s
        word = self._answer("r", "g", b"", asked, lambda _: _Word("go", self.seat.rank))
        if word.kind == "go":
            self._end_s = max(self._end_s, self._clock() + 0.1 * self._deadline_s + more_s)
            note = self._agreement.hold()
            waited_s = max([0.0, *(seen_s - ask.asked_s for ask in note.asks)])
            data = pickle.dumps(replace(note, waited_s=waited_s), protocol=5)
            word = self._answer("a", "d", data, asked, self._decide)
        self._take(word, asked)
        self._forget_own()
        if word.kind in ("decided", "differ"):
            # All ranks noted this request, so they are done with those before it.
            if self._is_coordinator:
                self._drop(self._open[:-1])
            self._open = self._open[-1:]
        self._number += 1
        self._open.append(self._number)
        return word.kind != "ended"

    def leave(self, *, is_over: bool) -> None:
        """End the agreement, in the register that is open; the last rank clears the board."""
        end = _Word("ended", self.seat.rank).encode()
        while not is_over:
            for kind in "qgd":
                word = _Word.decode(self._board.settle(self._key(kind), end))
                if word.kind == "ended":
                    is_over = True
                if word.kind not in ("asked", "go"):
                    break
            self._number += 1
            self._open.append(self._number)
        self._forget_own()
        if self._board.count("closed") == self.seat.size:
            self._drop(self._open)
            self._board.drop(["closed"])

    def _next(self) -> _Word:
        while True:
            asks = self._agreement.asks()
            now_s = self._clock()
            if asks:
                word = _Word("asked", self.seat.rank, asks)
                return _Word.decode(self._board.settle(self._key("q"), word.encode()))
            found = self._board.fetch([self._key("q")])
            if found:
                return _Word.decode(found[self._key("q")])
            self._quiet_s = now_s
            self._agreement.pause(self._idle_pause_s)

    def _answer(
        self,
        kind: str,
        register: str,
        data: bytes,
        asked: _Word,
        decide: Callable[[Mapping[int, bytes]], _Word],
    ) -> _Word:
        """Post this rank's answer, decide if it is the coordinator, and return what was decided."""
        self._own_keys.append(self._key(kind, self.seat.rank))
        self._board.post(self._own_keys[-1], data)
        key, ranks = self._key(register), range(self.seat.size)
        if not self._is_coordinator:
            found: dict[str, bytes] = {}
            if self._until(lambda: bool(found.update(self._board.fetch([key])) or found)):
                return _Word.decode(found[key])
            silent = {self.seat.coordinator: "the coordinator did not decide in time"}
            return self._give_up(key, asked, silent)
        keys = [self._key(kind, rank) for rank in ranks]
        self._until(lambda: self._board.wait(keys, 0) or bool(self._board.fetch([key])))
        posted = self._board.fetch(keys)
        if len(posted) < len(keys):
            silent = {r: "did not answer in time" for r in ranks if keys[r] not in posted}
            return self._give_up(key, asked, silent)
        word = decide({rank: posted[keys[rank]] for rank in ranks})
        return _Word.decode(self._board.settle(key, word.encode()))

    def _decide(self, posted: Mapping[int, bytes]) -> _Word:
        notes: dict[int, _Note] = {
            rank: pickle.loads(data)  # noqa: S301 - sent by a rank of this job
            for rank, data in posted.items()
        }
        ours = notes[self.seat.coordinator].recent
        texts = {
            rank: f"made the steps {_steps(note.recent)}, the coordinator {_steps(ours)}: every"
            " rank must say the same steps in the same order"
            for rank, note in notes.items()
            if _differ(ours, note.recent)
        }
        if texts:
            return _Word("differ", self.seat.rank, ranks=texts)
        asks = sorted((a for note in notes.values() for a in note.asks), key=lambda a: a.asked_at)
        after = max(note.recent[-1] for note in notes.values())
        waited_s = max(note.waited_s for note in notes.values())
        return _Word("decided", self.seat.rank, asks, waited_s, after)

    def _take(self, word: _Word, asked: _Word) -> None:
        """Do what was decided."""
        if word.kind == "decided":
            since_s = self._quiet_s - word.waited_s
            self._agreement.release(_Due(word.after, word.asks, since_s))
        elif word.kind == "differ":
            self._agreement.release(error=RankFailures(_STEP, word.ranks))
        elif word.kind == "silent":
            self._agreement.give_up(asked.asks)

    def _give_up(self, key: str, asked: _Word, silent: Mapping[int, str]) -> _Word:
        own = _Word("silent", self.seat.rank, ranks=silent)
        word = _Word.decode(self._board.settle(key, own.encode()))
        if word == own:
            logger.warning(
                "no rank saves although it was asked for (%s): %s. Ranks %s hang, were killed, or"
                " do not train any more",
                _why(asked.asks),
                listed(list(dict.fromkeys(silent.values()))),
                listed(list(map(str, silent)), 16),
            )
        return word

    def _until(self, is_there: Callable[[], bool]) -> bool:
        """Ask until something is there or the time is over; the pauses grow with the time."""
        began_s = self._clock()
        while not is_there():
            now_s = self._clock()
            if now_s >= self._end_s:
                return False
            pause_s = min(max((now_s - began_s) / 10, self._least_pause_s), self._open_pause_s)
            self._agreement.pause(min(pause_s, self._end_s - now_s))
        return True

    def _forget_own(self) -> None:
        self._board.drop(self._own_keys)
        self._own_keys.clear()

    def _key(self, kind: str, rank: int | None = None) -> str:
        key = f"{self._number}/{kind}"
        return key if rank is None else f"{key}/{rank}"

    def _drop(self, numbers: Sequence[int]) -> None:
        self._board.drop([f"{number}/{kind}" for number in numbers for kind in "qgd"])


def _why(asks: Sequence[_Ask]) -> str:
    return "; ".join(dict.fromkeys(f"rank {ask.rank}: {ask.why}" for ask in asks))


def _differ(ours: Sequence[_Position], theirs: Sequence[_Position]) -> bool:
    """Tell whether two ranks made different steps, of those that both still know."""
    start, end = max(ours[0], theirs[0]), min(ours[-1], theirs[-1])
    return [one for one in ours if start <= one <= end] != [
        one for one in theirs if start <= one <= end
    ]


def _steps(recent: Sequence[_Position]) -> str:
    return listed([str(step) for turn, step in recent if turn >= 0][-4:]) or "(none)"
