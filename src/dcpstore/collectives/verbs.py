"""The verbs that every group has, whatever carries its messages."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeVar

from typing_extensions import Buffer, Self

from dcpstore.collectives import steps
from dcpstore.collectives.board import Board, BoardLostError
from dcpstore.collectives.bulk import BULK_BYTES, Bulk
from dcpstore.collectives.exchange import Exchange
from dcpstore.collectives.group import Blob, Pending, RankGroup
from dcpstore.collectives.lanes import LaneMaker, Lanes
from dcpstore.errors import ConfigError

__all__ = ["BoardGroup", "SingleGroup"]

T = TypeVar("T")


class _Verbs(RankGroup):
    """Object verbs by way of `exchange`."""

    def __init__(self, rank: int, size: int, coordinator: int, deadline_s: float) -> None:
        if not 0 <= coordinator < size:
            raise ConfigError(f"coordinator {coordinator} is no rank of a group of {size}")
        if deadline_s <= 0:
            raise ConfigError(f"deadline_s must be positive, not {deadline_s}")
        self._rank = rank
        self._size = size
        self._coordinator = coordinator
        self._deadline_s = deadline_s

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._size

    @property
    def coordinator(self) -> int:
        """The rank that reduces."""
        return self._coordinator

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank is the one that reduces."""
        return self._rank == self._coordinator

    @property
    def deadline_s(self) -> float:
        """Seconds a step may take where its caller says nothing else."""
        return self._deadline_s

    def broadcast(self, value: T | None) -> T:
        """All ranks: return the coordinator's value."""
        result: T = steps.broadcast(self, "broadcast", lambda: value)  # type: ignore[assignment]
        return result

    def gather(self, value: T) -> list[T] | None:
        """All ranks: return the values by rank on the coordinator, None elsewhere."""
        return steps.gather(self, "gather", lambda: value)

    def all_gather(self, value: T) -> list[T]:
        """All ranks: return the values by rank."""
        return steps.all_gather(self, "all_gather", lambda: value)

    def scatter(self, values: Sequence[T] | None) -> T:
        """All ranks: return this rank's part of the coordinator's `values`."""

        def give_out(_: object) -> Sequence[T]:
            if values is None:
                raise ConfigError("the coordinator passes one value per rank to scatter")
            return values

        return steps.reduce_scatter(self, "scatter", lambda: None, give_out)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _no_peer(self, peer: int) -> ConfigError:
        return ConfigError(f"rank {peer} is no other rank of this group of {self._size}")


class SingleGroup(_Verbs):
    """The group of one rank: what there is without a process group.

    Args:
        deadline_s: Told to whoever asks; nothing here waits.
    """

    def __init__(self, deadline_s: float = 600.0) -> None:
        super().__init__(0, 1, 0, deadline_s)

    def exchange(
        self,
        step: str,
        produce: Callable[[], Blob],
        combine: Callable[[list[Blob]], Sequence[Blob]],
        consume: Callable[[Blob], T],
        *,
        deadline_s: float | None = None,
    ) -> T:
        """Run the three functions; `deadline_s` bounds nothing, as there is nobody to await."""
        del deadline_s
        return steps.alone(self, step, lambda: consume(combine([produce()])[0]))

    def open_lanes(self) -> None:
        """Do nothing: there is no other rank."""

    def post_send(self, data: Buffer, to: int) -> Pending:
        """Raise `ConfigError`: there is no other rank."""
        del data
        raise self._no_peer(to)

    def post_receive(self, into: Buffer, source: int) -> Pending:
        """Raise `ConfigError`: there is no other rank."""
        del into
        raise self._no_peer(source)

    def close(self) -> None:
        """Do nothing."""


class _Done:
    """A transfer of no bytes."""

    def wait(self, timeout_s: float) -> None:
        """Return at once."""


class _Bounded:
    """A transfer that a hung rank cannot keep from ending within the step it is part of."""

    def __init__(self, pending: Pending, what: str, exchange: Exchange) -> None:
        self._pending = pending
        self._what = what
        self._exchange = exchange

    def wait(self, timeout_s: float) -> None:
        """Wait until the transfer is done."""
        try:
            self._pending.wait(self._exchange.bound_s(timeout_s))
        except TimeoutError as error:
            raise TimeoutError(f"{self._what}: {error}") from error
        except ConnectionError as error:
            raise ConnectionError(f"{self._what}: {error}") from error


class BoardGroup(_Verbs):
    """A group of ranks that share a board.

    Args:
        board: Shared by these ranks, for this group alone.
        rank: This rank.
        size: Number of ranks.
        coordinator: The rank that reduces.
        deadline_s: Seconds a step may take where its caller says nothing else.
        namespace: Tells this group from others that the same ranks form.
        lane_maker: Opens lanes; None where there are none.
        lanes: Lanes that an earlier group of the same ranks left open; this one owns them now.
        bulk_bytes: Values larger than this go by lane.
        subject: See `open_group`.
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
        self._has_lanes = lane_maker is not None
        self._give_back = give_back
        self._bulk = Bulk(
            rank,
            size,
            coordinator,
            namespace=namespace,
            maker=lane_maker,
            lanes=lanes,
            bulk_bytes=bulk_bytes,
        )
        self._exchange = Exchange(
            board, rank, size, coordinator, bulk=self._bulk, subject=subject, clock=clock
        )
        self._is_closed = False

    def exchange(
        self,
        step: str,
        produce: Callable[[], Blob],
        combine: Callable[[list[Blob]], Sequence[Blob]],
        consume: Callable[[Blob], T],
        *,
        deadline_s: float | None = None,
    ) -> T:
        """Run one step; see `RankGroup.exchange`."""
        limit_s = self._limit_s(deadline_s)

        def produce_or_hang_up() -> Blob:
            try:
                return produce()
            except BaseException:
                # Others may be waiting for bytes that this rank will never send or take.
                if self._bulk.lanes is not None:
                    self._bulk.lanes.close()
                raise

        return self._exchange.run(step, produce_or_hang_up, combine, consume, limit_s)

    def open_lanes(self) -> None:
        """All ranks: make ready to carry bytes."""
        if not self._has_lanes:
            raise ConfigError("these ranks have no way to carry bytes but the board")
        self._exchange.run(
            "open lanes",
            bytes,
            lambda _: [b""],
            lambda _: None,
            self._limit_s(None),
            opens_lanes=True,
        )

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

    def _begin(self, begin: Callable[[], Pending], what: str) -> Pending:
        try:
            return _Bounded(begin(), what, self._exchange)
        except ConnectionError as error:
            raise ConnectionError(f"{what}: {error}") from error

    def close(self) -> None:
        """Give back what the group holds. Not collective, idempotent; waits for nobody."""
        self._close(None)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._bulk.lanes is not None:
            self._give_back(self._bulk.lanes)
        with contextlib.suppress(BoardLostError):  # nobody is left to tell; its keys are gone too
            self._exchange.leave(error)

    def _lanes_to(self, peer: int) -> Lanes:
        if not 0 <= peer < self._size or peer == self._rank:
            raise self._no_peer(peer)
        if self._bulk.lanes is None:
            raise ConfigError("no lanes are open: all ranks call open_lanes() first")
        return self._bulk.lanes

    def _limit_s(self, deadline_s: float | None) -> float:
        if self._is_closed:
            raise ConfigError("the group is closed")
        return self._deadline_s if deadline_s is None else deadline_s
