"""What a group of ranks can do for a checkpoint: exchange values, and carry bytes.

Ranks are ranks of the group, from 0 to size - 1, and never the job's global ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, TypeAlias, TypeVar

from typing_extensions import Buffer, Self

__all__ = ["Blob", "Pending", "RankGroup"]

T = TypeVar("T")

Blob: TypeAlias = "bytes | bytearray"


class Pending(Protocol):
    """A transfer of bytes on its way. The buffer belongs to it until `wait` returned."""

    def wait(self, timeout_s: float) -> None:
        """Wait until the transfer is done.

        After an error the buffer's contents are undefined, and the lanes are closed, so
        that nothing arrives in it later.

        Raises:
            TimeoutError: If it is not done after `timeout_s`.
            ConnectionError: If the other rank or the network is gone.
        """
        ...


class RankGroup(Protocol):
    """The ranks that save or load one checkpoint together.

    One thread per rank uses a group at a time; two threads that work at once open a group
    each. All ranks call the same verbs in the same order. Whatever goes wrong on any rank
    in a step, every rank raises the same `RankFailures` before its own deadline, counted from
    the moment it entered the step. Exceptions that are no `Exception`, such as
    `KeyboardInterrupt`, are reported to the others and raised as themselves where they occurred.

    Leaving it as a context manager with an error tells the others at their next step, which
    then fails at once rather than at its deadline.
    """

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def coordinator(self) -> int:
        """The rank that reduces."""
        ...

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank is the one that reduces."""
        ...

    @property
    def deadline_s(self) -> float:
        """Seconds a step may take where its caller says nothing else."""
        ...

    def exchange(
        self,
        step: str,
        produce: Callable[[], Blob],
        combine: Callable[[list[Blob]], Sequence[Blob]],
        consume: Callable[[Blob], T],
        *,
        deadline_s: float | None = None,
    ) -> T:
        """Run one step; `dcpstore.collectives.steps` has the convenient forms of it.

        Args:
            step: Names the step in errors. Ranks in different steps are told so.
            produce: Every rank: makes this rank's blob.
            combine: Coordinator only: turns the blobs, by rank, into one blob for all ranks
                or into one per rank.
            consume: Every rank: turns the blob from the coordinator into the result.
            deadline_s: Seconds the step may take, from this rank's entry.

        Raises:
            RankFailures: On every rank alike, if any rank failed or did not answer.
        """
        ...

    def broadcast(self, value: T | None) -> T:
        """All ranks: return the coordinator's value. What others pass is ignored."""
        ...

    def gather(self, value: T) -> list[T] | None:
        """All ranks: return the values by rank on the coordinator, None elsewhere."""
        ...

    def all_gather(self, value: T) -> list[T]:
        """All ranks: return the values by rank."""
        ...

    def scatter(self, values: Sequence[T] | None) -> T:
        """All ranks: return this rank's part of the coordinator's `values`."""
        ...

    def open_lanes(self) -> None:
        """All ranks: make ready to carry bytes. Where they are open already, one short step.

        Raises:
            RankFailures: On every rank, if one could not connect.
        """
        ...

    def post_send(self, data: Buffer, to: int) -> Pending:
        """Begin to send contiguous host bytes to another rank, without a copy where possible.

        Sends and receives between two ranks match in the order they are posted, per direction,
        and both sides state the same size. Not collective; needs `open_lanes`.

        Raises:
            ConfigError: If lanes are not open, or `to` is no other rank of the group.
        """
        ...

    def post_receive(self, into: Buffer, source: int) -> Pending:
        """Begin to receive into contiguous, writable host bytes; see `post_send`."""
        ...

    def close(self) -> None:
        """Give back what the group holds. Not collective, idempotent; waits for nobody."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
