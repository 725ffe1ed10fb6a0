"""The protocol of one step: every rank gets its part, or every rank raises the same.

Calls in order; ``N`` counts the steps of a group, and keys are on the group's board:

1. Every rank runs `work` and posts its answer at ``N/u/{rank}``: its value, pickled, or why it
   has none. A value that is too large to post is only announced.
2. The coordinator waits for all answers, or until its deadline.
3. Where values were announced, the coordinator posts ``N/g``; those ranks send by lane.
4. The coordinator runs `reduce`, posts the results at ``N/p`` (one for all) or ``N/p/{rank}``,
   and settles ``N/d``: the step goes on, or failed, with the cause for each failing rank.
5. Every rank reads ``N/d``, takes its result, and posts at ``N/a/{rank}`` whether that went
   well.
6. The coordinator waits for all of these and settles ``N/e``, which every rank reads: only
   then does a rank return.

``N/d`` and ``N/e`` are registers that the first to settle fixes for all. So a rank whose
deadline passes does not guess: it proposes that whoever has not answered failed, or else the
coordinator, and all ranks read the same decision. So does a rank that is interrupted while it
waits. A rank that comes late finds the decision there and raises the same error.

Keys go when nobody can want them: those of a step once every rank has answered in a later one,
and those of the last step when ranks leave the group.

Values too large for the board go over lanes, only after all ranks are known to be well, and with
sizes known up front.
"""

from __future__ import annotations

import contextlib
import pickle
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from typing_extensions import Buffer

from dcpstore.errors import CheckpointError, ConfigError, RankFailures
from dcpstore.ranks.group import (
    Answer,
    Blob,
    Cause,
    Decision,
    RankGroup,
    describe,
)
from dcpstore.ranks.transport import (
    Board,
    BoardLostError,
    LaneMaker,
    Lanes,
    Pending,
    tree_children,
    tree_parent,
)

T = TypeVar("T")
R = TypeVar("R")

Remaining: TypeAlias = Callable[[], float]
"""Seconds left for a transfer."""

# Where lanes overtake the board: docs/design/007 has the measurement.
BULK_BYTES = 256 * 1024


class Bulk:
    """One rank's lanes, and the large values that travel on them.

    Lanes are opened by all ranks at once when the coordinator names new ones, and kept for later
    steps.

    Args:
        group: Whose coordinator values go to and parts come from.
        namespace: Tells the group's lanes from those of others that these ranks form.
        maker: Opens lanes; None where there are none, and no value counts as large.
        lanes: Lanes that an earlier group of the same ranks left open.
        bulk_bytes: Values larger than this are large.
    """

    def __init__(
        self,
        group: RankGroup,
        *,
        namespace: str,
        maker: LaneMaker | None,
        lanes: Lanes | None,
        bulk_bytes: int,
    ) -> None:
        self._group = group
        self._namespace = namespace
        self._maker = maker
        self._lanes = lanes
        self._bulk_bytes = bulk_bytes

    @property
    def lanes(self) -> Lanes | None:
        """The lanes this rank holds open, if they are well."""
        return self._lanes if self._lanes is not None and self._lanes.is_healthy else None

    @property
    def held_name(self) -> str:
        """The name of `lanes`, empty if there are none."""
        return self.lanes.name if self.lanes is not None else ""

    def size_by_lane(self, blob: Blob) -> int:
        """Return how many bytes of `blob` go by lane: all, or 0 if it is to be posted."""
        is_large = self._maker is not None and len(blob) > self._bulk_bytes
        return len(blob) if is_large else 0

    def choose(self, number: int, answers: Sequence[Answer]) -> str:
        """Coordinator only: name the lanes that all ranks hold, or new ones to open."""
        held = {answer.lanes for answer in answers}
        name = held.pop()
        if name and not held:
            return name
        # The token keeps a job that makes its process groups anew on the same store from
        # finding the addresses of its earlier lanes.
        return f"{self._namespace}/lanes/{number}-{secrets.token_hex(4)}"

    def take(self, name: str, timeout_s: float) -> Lanes:
        """All ranks: return the lanes of a name, opened if this rank has no such.

        Raises:
            ConnectionError: If they broke on this rank.
        """
        lanes = self._lanes
        if self._maker is not None and (lanes is None or lanes.name != name):
            if lanes is not None:
                lanes.close()
            lanes = self._lanes = self._maker(name, timeout_s)
        if lanes is None or not lanes.is_healthy:
            raise ConnectionError("the lanes of this rank broke in this step")
        return lanes

    def push(self, name: str, own: Blob, remaining_s: Remaining) -> None:
        """All ranks but the coordinator: send it this rank's value, if it is large."""
        lanes = self.take(name, remaining_s())
        if self.size_by_lane(own):
            _send_each(lanes, {self._group.coordinator: own}, remaining_s)

    def pull(
        self, name: str, sizes_bytes: Mapping[int, int], remaining_s: Remaining
    ) -> dict[int, Blob]:
        """Coordinator only: receive the large values of those ranks that announced one."""
        return _receive_each(self.take(name, remaining_s()), sizes_bytes, remaining_s)

    def distribute(
        self, decision: Decision, parts: Sequence[Blob], remaining_s: Remaining
    ) -> Blob | None:
        """All ranks: carry the large parts. Returns this rank's, or None if it was posted.

        Args:
            decision: Says how large which parts are.
            parts: All of them, on the coordinator.
            remaining_s: Seconds left.
        """
        if not decision.lanes:
            return None
        lanes = self.take(decision.lanes, remaining_s())
        sizes = decision.bulk_bytes
        rank, root = self._group.rank, self._group.coordinator
        own_size = sizes[0 if decision.is_shared else rank]
        if decision.is_shared and own_size:
            tree = (rank, root, self._group.size)
            if rank == root:
                blob = parts[0]
            else:
                (blob,) = _receive_each(lanes, {tree_parent(*tree): own_size}, remaining_s).values()
            _send_each(lanes, dict.fromkeys(tree_children(*tree), blob), remaining_s)
            return blob
        if rank == root:
            large = {r: parts[r] for r, size in enumerate(sizes) if size and r != rank}
            _send_each(lanes, large, remaining_s)
            return None
        return _receive_each(lanes, {root: own_size}, remaining_s)[root] if own_size else None


def _receive_each(
    lanes: Lanes, sizes_bytes: Mapping[int, int], remaining_s: Remaining
) -> dict[int, Blob]:
    """Receive one blob from each of several ranks at once, each of the size given for it."""
    blobs: dict[int, Blob] = {rank: bytearray(size) for rank, size in sizes_bytes.items()}
    pendings = [lanes.receive(blob, rank) for rank, blob in blobs.items()]
    for pending in pendings:
        pending.wait(remaining_s())
    return blobs


def _send_each(lanes: Lanes, blobs: Mapping[int, Blob], remaining_s: Remaining) -> None:
    """Send one blob to each of several ranks."""
    pendings = [lanes.send(blob, rank) for rank, blob in blobs.items()]
    for pending in pendings:
        pending.wait(remaining_s())


_SILENT = "did not answer in time: it hangs, was killed, or never came to this step"
_UNDECIDED = "has every rank's answer but did not decide in time: it hangs or was killed"


@dataclass(slots=True)
class _Call(Generic[T, R]):
    """One step as this rank goes through it.

    Attributes:
        name: The step's name.
        label: The same with the subject: what ranks compare.
        number: Its place in the group's sequence.
        work: See `RankGroup.exchange`.
        reduce: As above.
        clock: Seconds that only grow.
        deadline_s: Seconds from now until the step must be over.
        opens_lanes: Whether it leaves lanes open.
        values: This rank's value, once it is made.
        results: What `reduce` made: one for all ranks, or one per rank. On the coordinator.
        parts: The same, pickled; nothing for the coordinator itself where there is one per rank.
    """

    name: str
    label: str
    number: int
    work: Callable[[], T]
    reduce: Callable[[list[T]], Sequence[R]]
    clock: Callable[[], float]
    deadline_s: float
    opens_lanes: bool
    values: list[T] = field(default_factory=list)
    results: Sequence[R] = ()
    parts: Sequence[Blob] = ()
    entered: float = 0.0
    is_reported: bool = False  # the others know of whatever this rank raises

    def __post_init__(self) -> None:
        self.entered = self.clock()

    @property
    def grace_s(self) -> float:
        """How long to wait for others at least, for a rank that is itself late."""
        return min(0.1 * self.deadline_s, 1.0)

    def left_s(self, kind: str = "u") -> float:
        """Seconds left for answers of a kind; the second kind gets what the first leaves."""
        reserve = min(0.2 * self.deadline_s, 10.0) if kind == "u" else self.grace_s
        return max(self.entered + self.deadline_s - reserve - self.clock(), self.grace_s)

    def key(self, kind: str, rank: int | None = None) -> str:
        return f"{self.number}/{kind}" if rank is None else f"{self.number}/{kind}/{rank}"


_DECISION_OF = {"u": "d", "a": "e"}


class _Done:
    """A transfer of no bytes."""

    def wait(self, timeout_s: float) -> None:
        """Return at once."""


class _Bounded:
    """A transfer that a hung rank cannot keep from ending within the step it is part of."""

    def __init__(self, pending: Pending, what: str, group: BoardGroup) -> None:
        self._pending = pending
        self._what = what
        self._group = group

    def wait(self, timeout_s: float) -> None:
        """Wait until the transfer is done."""
        try:
            self._pending.wait(self._group.bound_s(timeout_s))
        except TimeoutError as error:
            raise TimeoutError(f"{self._what}: {error}") from error
        except ConnectionError as error:
            raise ConnectionError(f"{self._what}: {error}") from error


class BoardGroup(RankGroup):
    """A group of ranks that share a board. One thread at a time.

    Args:
        board: Shared by these ranks, for this group alone.
        rank: This rank.
        size: Number of ranks.
        coordinator: The rank that reduces.
        deadline_s: Seconds a step may take.
        namespace: Tells this group from others that the same ranks form.
        lane_maker: Opens lanes; None where there are none.
        lanes: Lanes that an earlier group of the same ranks left open; this one owns them now.
        bulk_bytes: Values larger than this go by lane.
        subject: What the steps are about; ranks with another subject are in another step.
        clock: Seconds that only grow.
        give_back: Takes the lanes when the group closes, if they are well.
    """

    def __init__(
        self,
        board: Board,
        *,
        rank: int,
        size: int,
        coordinator: int,
        deadline_s: float,
        namespace: str = "",
        lane_maker: LaneMaker | None = None,
        lanes: Lanes | None = None,
        bulk_bytes: int = BULK_BYTES,
        subject: str = "",
        clock: Callable[[], float] = time.monotonic,
        give_back: Callable[[Lanes], None] = lambda lanes: lanes.close(),
    ) -> None:
        super().__init__(rank, size, coordinator, deadline_s)
        self._board = board
        self._has_lanes = lane_maker is not None
        self._bulk = Bulk(
            self, namespace=namespace, maker=lane_maker, lanes=lanes, bulk_bytes=bulk_bytes
        )
        self._subject = subject
        self._clock = clock
        self._give_back = give_back
        self._number = 0
        self._own_keys: list[str] = []
        self._open_steps: list[int] = []  # whose decisions somebody may still want
        self._had_failure = False
        self._current: _Call[Any, Any] | None = None
        self._is_closed = False

    def exchange(
        self, step: str, work: Callable[[], T], reduce: Callable[[list[T]], Sequence[R]]
    ) -> R:
        """All ranks: run one step; see `RankGroup.exchange`, and the module for its calls."""
        return self._go_through(step, work, reduce)

    def open_lanes(self) -> None:
        """All ranks: make ready to carry bytes."""
        if not self._has_lanes:
            raise ConfigError("these ranks have no way to carry bytes but the board")
        self._go_through("open lanes", lambda: None, lambda _: [None], opens_lanes=True)

    def post_send(self, data: Buffer, to: int) -> Pending:
        """Begin to send contiguous host bytes to another rank."""
        lanes = self._lanes_to(to)
        if not memoryview(data).nbytes:
            return _Done()
        return self._begin(lambda: lanes.send(data, to), f"sending to rank {to}")

    def post_receive(self, into: Buffer, source: int) -> Pending:
        """Begin to receive into contiguous, writable host bytes."""
        lanes = self._lanes_to(source)
        if not memoryview(into).nbytes:
            return _Done()
        return self._begin(lambda: lanes.receive(into, source), f"receiving from rank {source}")

    def _lanes_to(self, peer: int) -> Lanes:
        if not 0 <= peer < self.size or peer == self.rank:
            raise self.no_peer(peer)
        if self._bulk.lanes is None:
            raise ConfigError("no lanes are open: all ranks call open_lanes() first")
        return self._bulk.lanes

    def _begin(self, begin: Callable[[], Pending], what: str) -> Pending:
        try:
            return _Bounded(begin(), what, self)
        except ConnectionError as error:
            raise ConnectionError(f"{what}: {error}") from error

    def bound_s(self, timeout_s: float) -> float:
        """Shorten a wait inside a step's function, so that its failure can still be told."""
        call = self._current
        return timeout_s if call is None else min(timeout_s, call.left_s() - call.grace_s)

    def close(self) -> None:
        """Give back what the group holds. Not collective, idempotent; waits for nobody."""
        self._close(None)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._bulk.lanes is not None:
            self._give_back(self._bulk.lanes)
        with contextlib.suppress(BoardLostError):  # nobody is left to tell; its keys are gone too
            self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        """End this rank's part; with an error, the others learn of it in their next step."""
        board = self._board
        if error is not None and not isinstance(error, RankFailures | BoardLostError):
            cause = describe(error, during="left the group before this step, with ")
            board.post(f"{self._number}/u/{self.rank}", Answer("", cause).encode())
            board.count("left")
        if not self._had_failure:  # or else somebody may still be reading who failed
            board.drop(self._own_keys)
        if board.count("closed") < self.size:
            return
        steps, ranks = [*self._open_steps, self._number], range(self.size)
        keys = [f"{number}/{kind}" for number in steps for kind in "degp"]
        if self._had_failure or board.count("left") > 1:
            keys += [f"{number}/{kind}/{r}" for number in steps for kind in "uap" for r in ranks]
        board.drop([*keys, "left", "closed"])

    # --- the calls of one step, in order -------------------------------------------

    def _go_through(
        self,
        step: str,
        work: Callable[[], T],
        reduce: Callable[[list[T]], Sequence[R]],
        *,
        opens_lanes: bool = False,
    ) -> R:
        if self._is_closed:
            raise ConfigError("the group is closed")
        label = f"{step} of {self._subject}" if self._subject else step
        functions = (work, reduce, self._clock)
        call = _Call(step, label, self._number, *functions, self.deadline_s, opens_lanes)
        self._number += 1
        self._open_steps.append(call.number)
        self._current = call
        try:
            return self._run(call)
        except BoardLostError as lost:
            raise RankFailures(step, {lost.rank: str(lost)}) from lost
        finally:
            self._current = None

    def _run(self, call: _Call[T, R]) -> R:
        try:
            blob, cause = self._produce(call)
            if self.is_coordinator:
                self._lead(call)
            decision = self._read_start(call, blob)
            self._forget_earlier(call, decision)
            self._stop_if_failed(call, decision, cause)
            result, cause = self._consume(call, decision)
            if self.is_coordinator:
                self._conclude(call)
            self._stop_if_failed(call, self._await(call, "a"), cause)
        except BoardLostError:
            raise
        except BaseException as error:
            self._had_failure = True
            if call.is_reported:
                raise
            decision = self._veto(call, error)
            if isinstance(error, Exception) and decision.is_failed:
                raise decision.error(call.name) from error
            raise
        return result[0]

    def _produce(self, call: _Call[T, R]) -> tuple[Blob, Exception | None]:
        """Call 1. Returns this rank's value, pickled, or the error that it answered with."""
        held = self._bulk.held_name
        try:
            call.values.append(call.work())
            blob = _dump(call.values[0], "its value")
        except BaseException as error:  # noqa: BLE001 - a rank's boundary: raised on every rank
            # Others may be waiting for bytes that this rank will never send or take.
            if self._bulk.lanes is not None:
                self._bulk.lanes.close()
            return b"", self._report(call, "u", error)
        size = self._bulk.size_by_lane(blob)
        if self.is_coordinator:
            answer = Answer(call.label, lanes=held)
        elif size:
            answer = Answer(call.label, bulk_bytes=size, lanes=held)
        else:
            answer = Answer(call.label, blob=blob, lanes=held)
        self._answer(call, "u", answer)
        return blob, None

    def _lead(self, call: _Call[T, R]) -> None:
        """Calls 2 to 4, on the coordinator; it may be that they end early."""
        answers, decision = self._collect(call, "u", call.left_s())
        if decision.is_failed:
            self._board.settle(call.key("d"), decision.encode())
            return
        lanes = self._bulk.choose(call.number, answers)
        blobs = {rank: a.blob for rank, a in enumerate(answers) if a.blob is not None}
        sizes = {rank: a.bulk_bytes for rank, a in enumerate(answers) if a.bulk_bytes}
        if sizes:
            self._board.post(call.key("g"), Decision(lanes=lanes).encode())
            blobs |= self._bulk.pull(lanes, sizes, call.left_s)
        values = [
            call.values[0] if rank == self.rank else _load(blobs[rank], f"the value of rank {rank}")
            for rank in range(self.size)
        ]
        call.results = call.reduce(values)
        if len(call.results) not in (1, self.size):
            raise ValueError(f"{len(call.results)} parts were made for {self.size} ranks")
        if len(call.results) == 1:
            call.parts = [_dump(call.results[0], "the result")]
        else:
            call.parts = [
                b"" if rank == self.rank else _dump(result, f"the part of rank {rank}")
                for rank, result in enumerate(call.results)
            ]
        self._hand_out(call, lanes)

    def _hand_out(self, call: _Call[T, R], lanes: str) -> None:
        """Post the small parts, then settle that the step goes on."""
        is_shared = len(call.parts) == 1
        sizes = tuple(self._bulk.size_by_lane(part) for part in call.parts)
        posted: list[str] = []
        for rank, part in enumerate(call.parts):
            if not sizes[rank] and (is_shared or rank != self.rank):
                self._board.post(key := call.key("p", None if is_shared else rank), part)
                posted.append(key)
        decision = Decision(
            is_complete=True,
            lanes=lanes if call.opens_lanes or any(sizes) else "",
            bulk_bytes=sizes,
            is_shared=is_shared,
        )
        settled = self._board.settle(call.key("d"), decision.encode())
        if Decision.decode(settled).is_failed:
            self._board.drop(posted)

    def _read_start(self, call: _Call[T, R], own: Blob) -> Decision:
        """Call 5's wait for the first decision, sending this rank's value if told to."""
        go = call.key("g")
        if not self.is_coordinator and not self._board.wait(
            [call.key("d")], call.left_s(), unless=go
        ):
            told = self._board.fetch([go]).get(go)
            if told is not None:
                self._bulk.push(Decision.decode(told).lanes, own, call.left_s)
        return self._await(call, "u")

    def _forget_earlier(self, call: _Call[T, R], decision: Decision) -> None:
        """Once every rank has answered in this step, none wants anything of earlier ones."""
        if not decision.is_complete:
            return
        earlier = [number for number in self._open_steps if number != call.number]
        self._open_steps = [call.number]
        self._board.drop(self._own_keys[:-1])
        self._own_keys = self._own_keys[-1:]
        if self.is_coordinator:
            self._board.drop([f"{number}/{kind}" for number in earlier for kind in "degp"])

    def _consume(
        self, call: _Call[T, R], decision: Decision
    ) -> tuple[Sequence[R], Exception | None]:
        """Call 5. Returns the result as all there is, or the error that this rank answered with."""
        try:
            result = self._take_part(call, decision)
        except BoardLostError:
            raise
        except BaseException as error:  # noqa: BLE001 - as in _produce
            return (), self._report(call, "a", error)
        self._answer(call, "a", Answer(call.label))
        return (result,), None

    def _take_part(self, call: _Call[T, R], decision: Decision) -> R:
        blob = self._bulk.distribute(decision, call.parts, lambda: call.left_s("a"))
        if self.is_coordinator:
            return call.results[0 if decision.is_shared else self.rank]
        if blob is None:
            key = call.key("p", None if decision.is_shared else self.rank)
            if not decision.is_shared:
                self._own_keys.append(key)
            blob = self._board.fetch([key])[key]
        result: R = _load(blob, "its part of the result")
        return result

    def _conclude(self, call: _Call[T, R]) -> None:
        """Call 6, on the coordinator."""
        _, decision = self._collect(call, "a", call.left_s("a"))
        self._board.settle(call.key("e"), decision.encode())

    # --- answers and decisions -----------------------------------------------------

    def _answer(self, call: _Call[T, R], kind: str, answer: Answer) -> None:
        self._own_keys.append(call.key(kind, self.rank))
        self._board.post(self._own_keys[-1], answer.encode())

    def _report(self, call: _Call[T, R], kind: str, error: BaseException) -> Exception:
        """Answer that this rank failed, and return why; what is no Exception is raised on.

        A coordinator that leaves so decides first, with what answers come in a moment: the
        others would have nobody to wait for.
        """
        self._answer(call, kind, Answer(call.label, describe(error)))
        if isinstance(error, Exception):
            return error
        call.is_reported = True
        if self.is_coordinator:
            _, decision = self._collect(call, kind, call.grace_s)
            heard = {r: c for r, c in decision.failures.items() if c.text != _SILENT}
            decision = Decision.failed(heard, is_complete=decision.is_complete)
            self._board.settle(call.key(_DECISION_OF[kind]), decision.encode())
        raise error

    def _collect(
        self, call: _Call[T, R], kind: str, timeout_s: float
    ) -> tuple[list[Answer], Decision]:
        """Wait for all answers, or for a decision without them; see `_judge`."""
        keys = [call.key(kind, rank) for rank in range(self.size)]
        self._board.wait(keys, timeout_s, unless=call.key(_DECISION_OF[kind]))
        return self._judge(call, kind)

    def _judge(self, call: _Call[T, R], kind: str) -> tuple[list[Answer], Decision]:
        """Read the answers and say what they come to. The answers are by rank if all is well."""
        posted = self._board.fetch(keys := [call.key(kind, rank) for rank in range(self.size)])
        answers: list[Answer] = []
        failures: dict[int, Cause] = {}
        for rank, key in enumerate(keys):
            if key not in posted:
                failures[rank] = Cause(_SILENT)
                continue
            answer = Answer.decode(posted[key])
            answers.append(answer)
            if answer.cause is not None:
                failures[rank] = answer.cause
            elif answer.step != call.label:
                text = f"is in step {answer.step!r}, rank {self.rank} in {call.label!r}"
                failures[rank] = Cause(f"{text}: ranks must run the same steps in one order")
        return answers, Decision.failed(failures, is_complete=len(answers) == self.size)

    def _await(self, call: _Call[T, R], kind: str) -> Decision:
        """Read a decision; if none comes in time, make one with what answers there are."""
        name = call.key(_DECISION_OF[kind])
        if self._board.wait([name], call.left_s(kind)):
            return Decision.decode(self._board.fetch([name])[name])
        _, decision = self._judge(call, kind)
        if decision.is_complete:
            failures = {self.coordinator: Cause(_UNDECIDED), **decision.failures}
            decision = Decision.failed(failures, is_complete=True)
        return Decision.decode(self._board.settle(name, decision.encode()))

    def _veto(self, call: _Call[T, R], error: BaseException) -> Decision:
        """Fail the step for everybody, in whichever of its decisions is still open."""
        decision = Decision()
        mine = Decision.failed({self.rank: describe(error)}).encode()
        for kind in "de":
            try:
                decision = Decision.decode(self._board.settle(call.key(kind), mine))
            except BoardLostError:
                break  # nobody left to tell; the error at hand goes on
            if decision.is_failed:
                break
        return decision

    def _stop_if_failed(
        self, call: _Call[T, R], decision: Decision, cause: Exception | None
    ) -> None:
        if decision.is_failed:
            call.is_reported = True
            raise decision.error(call.name) from cause


def _dump(value: object, what: str) -> bytes:
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{what}, a {type(value).__qualname__}, does not pickle: {cause}"
        ) from error


def _load(blob: Blob, what: str) -> Any:
    try:
        return pickle.loads(blob)  # noqa: S301 - sent by a rank of this job
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{what} does not unpickle here: {cause}") from error
