"""What a group of ranks can do for a checkpoint: exchange values, and carry bytes.

Ranks are ranks of the group, from 0 to size - 1, and never the job's global ranks.

Here, too, is what ranks tell each other about a step: each its own answer, the coordinator the
decision. Pickle carries them: ranks of one job trust each other, as they do in torch's own
object collectives.
"""

from __future__ import annotations

import pickle
import traceback
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from typing_extensions import Buffer, Self

from dcpstore.errors import ConfigError, RankFailures
from dcpstore.ranks.transport import Pending

T = TypeVar("T")
R = TypeVar("R")

Blob: TypeAlias = "bytes | bytearray"


class RankGroup(ABC):
    """The ranks that save or load one checkpoint together.

    One thread per rank uses a group at a time; two threads that work at once open a group
    each. All ranks call the same verbs in the same order. Whatever goes wrong on any rank
    in a step, every rank raises the same `RankFailures` before its own deadline, counted from
    the moment it entered the step. Exceptions that are no `Exception`, such as
    `KeyboardInterrupt`, are reported to the others and raised as themselves where they occurred.

    Leaving it as a context manager with an error tells the others at their next step, which
    then fails at once rather than at its deadline.

    Args:
        rank: This rank.
        size: Number of ranks.
        coordinator: The rank that reduces.
        deadline_s: Seconds a step may take. It may be changed between two steps.

    Raises:
        ConfigError: If the coordinator is no rank of the group, or there is no time at all.
    """

    def __init__(self, rank: int, size: int, coordinator: int, deadline_s: float) -> None:
        if not 0 <= coordinator < size:
            raise ConfigError(f"coordinator {coordinator} is no rank of a group of {size}")
        if deadline_s <= 0:
            raise ConfigError(f"deadline_s must be positive, not {deadline_s}")
        self.rank = rank
        self.size = size
        self.coordinator = coordinator
        self.deadline_s = deadline_s

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank is the one that reduces."""
        return self.rank == self.coordinator

    @abstractmethod
    def exchange(
        self, step: str, work: Callable[[], T], reduce: Callable[[list[T]], Sequence[R]]
    ) -> R:
        """All ranks: run one step; `dcpstore.ranks.steps` has the convenient forms of it.

        Args:
            step: Names the step in errors. Ranks in different steps are told so.
            work: Every rank: makes this rank's value.
            reduce: Coordinator only: turns the values, by rank, into one result for all ranks
                or into one per rank.

        Raises:
            RankFailures: On every rank alike, if any rank failed or did not answer.
        """

    @abstractmethod
    def open_lanes(self) -> None:
        """All ranks: make ready to carry bytes. Where they are open already, one short step.

        Raises:
            RankFailures: On every rank, if one could not connect.
        """

    @abstractmethod
    def post_send(self, data: Buffer, to: int) -> Pending:
        """Begin to send contiguous host bytes to another rank, without a copy where possible.

        Sends and receives between two ranks match in the order they are posted, per direction,
        and both sides state the same size. Not collective; needs `open_lanes`.

        Raises:
            ConfigError: If lanes are not open, or `to` is no other rank of the group.
        """

    @abstractmethod
    def post_receive(self, into: Buffer, source: int) -> Pending:
        """Begin to receive into contiguous, writable host bytes; see `post_send`."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the group holds. Not collective, idempotent; waits for nobody."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()

    def no_peer(self, peer: int) -> ConfigError:
        """Return the error of a transfer with no other rank of the group."""
        return ConfigError(f"rank {peer} is no other rank of this group of {self.size}")


class SingleGroup(RankGroup):
    """The group of one rank: what there is without a process group.

    Args:
        deadline_s: Only reported; nothing here waits.
    """

    def __init__(self, deadline_s: float = 600.0) -> None:
        super().__init__(0, 1, 0, deadline_s)

    def exchange(
        self, step: str, work: Callable[[], T], reduce: Callable[[list[T]], Sequence[R]]
    ) -> R:
        """Run both functions; nothing is pickled, and nothing bounds their time."""
        try:
            return reduce([work()])[0]
        except Exception as error:
            raise Decision.failed({0: describe(error)}).error(step) from error

    def open_lanes(self) -> None:
        """Do nothing: there is no other rank."""

    def post_send(self, data: Buffer, to: int) -> Pending:
        """Raise `ConfigError`: there is no other rank."""
        del data
        raise self.no_peer(to)

    def post_receive(self, into: Buffer, source: int) -> Pending:
        """Raise `ConfigError`: there is no other rank."""
        del into
        raise self.no_peer(source)

    def close(self) -> None:
        """Do nothing."""


_MAX_TEXT = 4096
_MAX_TRACEBACK = 16384
_MAX_PICKLED_BYTES = 16384

# A decision goes to every rank. Beyond so many failing ranks it keeps texts only, so that
# 16,384 of them do not send each other gigabytes of tracebacks.
_MAX_DETAILED = 64
_MAX_BRIEF_TEXT = 240


@dataclass(frozen=True, slots=True)
class Cause:
    """Why one rank failed.

    Args:
        text: Type and message of the exception, or what became of the rank.
        traceback: Of the exception, where it was raised; empty for a silent rank.
        pickled: The exception, if it pickles and unpickles.
    """

    text: str
    traceback: str = ""
    pickled: bytes | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What one rank posts in a step.

    Args:
        step: The step it believes to be in.
        cause: Why it failed; None if it did not.
        blob: Its value, where that is small; None on the coordinator and where it is large.
        bulk_bytes: Size of its value, where that is too large to post.
        lanes: Name of the healthy lanes it holds; empty if none.
    """

    step: str
    cause: Cause | None = None
    blob: Blob | None = None
    bulk_bytes: int = 0
    lanes: str = ""

    def encode(self) -> bytes:
        """Return the answer as bytes."""
        return pickle.dumps(self, protocol=5)

    @staticmethod
    def decode(data: bytes) -> Answer:
        """Return the answer that `encode` made."""
        answer: Answer = pickle.loads(data)  # noqa: S301 - sent by a rank of this job
        return answer


@dataclass(frozen=True, slots=True)
class Decision:
    """What holds for all ranks: the step goes on, or failed.

    Args:
        failures: Cause per failing rank. Empty: all is well.
        is_complete: Whether every rank is known to have answered, so that none can want
            anything of an earlier step.
        lanes: Name of the lanes to use from here on; empty if none.
        bulk_bytes: Sizes of the parts that travel by lane: none, one for all, or one per rank.
        is_shared: Whether all ranks get the same part.
    """

    failures: Mapping[int, Cause] = field(default_factory=dict)
    is_complete: bool = False
    lanes: str = ""
    bulk_bytes: tuple[int, ...] = ()
    is_shared: bool = True

    @property
    def is_failed(self) -> bool:
        """Whether the step failed."""
        return bool(self.failures)

    def encode(self) -> bytes:
        """Return the decision as bytes; compressed, since failing ranks fail alike."""
        return zlib.compress(pickle.dumps(self, protocol=5), 1)

    @staticmethod
    def decode(data: bytes) -> Decision:
        """Return the decision that `encode` made."""
        decision: Decision = pickle.loads(zlib.decompress(data))  # noqa: S301 - as in Answer
        return decision

    def error(self, step: str) -> RankFailures:
        """Return the error that every rank raises."""
        return RankFailures(
            step,
            {rank: cause.text for rank, cause in self.failures.items()},
            tracebacks={r: c.traceback for r, c in self.failures.items() if c.traceback},
            pickled={r: c.pickled for r, c in self.failures.items() if c.pickled is not None},
        )

    @staticmethod
    def failed(failures: Mapping[int, Cause], *, is_complete: bool = False) -> Decision:
        """Make the decision that a step failed; of very many failures, most are shortened."""
        kept = dict(sorted(failures.items()))
        for rank in list(kept)[_MAX_DETAILED:]:
            kept[rank] = Cause(kept[rank].text[:_MAX_BRIEF_TEXT])
        return Decision(kept, is_complete)


def describe(error: BaseException, *, during: str = "") -> Cause:
    """Make the cause of an exception that was raised on this rank.

    Args:
        error: Anything, whether or not it pickles or even prints.
        during: What the rank was doing, where its traceback would not show.
    """
    try:
        message = str(error)
    except Exception as unprintable:  # noqa: BLE001 - the report must not fail
        message = f"<no text: {type(unprintable).__name__}>"
    name = type(error).__qualname__
    text = f"{name}: {message}" if message else name
    return Cause(_cut(during + text, _MAX_TEXT), _trace(error), _pickle(error))


def _trace(error: BaseException) -> str:
    try:
        lines = traceback.format_exception(type(error), error, error.__traceback__)
    except Exception:  # noqa: BLE001 - as above; an exception's own methods run here
        lines = traceback.format_tb(error.__traceback__)
    return _cut("".join(lines), _MAX_TRACEBACK)


def _pickle(error: BaseException) -> bytes | None:
    """Pickle an exception; None unless it also unpickles, which many do not."""
    try:
        data = pickle.dumps(error, protocol=5)
        pickle.loads(data)  # noqa: S301 - made on the line above
    except Exception:  # noqa: BLE001 - any class may do anything here
        return None
    return data if len(data) <= _MAX_PICKLED_BYTES else None


def _cut(text: str, max_chars: int) -> str:
    """Keep head and tail: the one says where, the other what."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
