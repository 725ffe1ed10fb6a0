"""Time for ranks that are threads: it passes only while every one of them waits.

Ranks as threads of one process: the same groups and steps, without torch or processes.

What differs from processes: memory is shared, so a transfer is one copy; and a thread cannot be
killed, so a rank that falls silent is one that waits for an event of the test's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dcpstore.ranks.board import MemoryBoard
from dcpstore.ranks.exchange import BoardGroup
from dcpstore.ranks.group import RankGroup
from dcpstore.ranks.lanes import BULK_BYTES, MemoryLanes, MemoryWires

_LOOK_S = 0.005  # real seconds until a waiting rank sees that its time is up


@dataclass(slots=True)
class _Wait:
    event: threading.Event
    until_s: float
    is_over: bool = False


class RankTime:
    """A clock that jumps to the next deadline once no rank is at work any more.

    A deadline is then met or missed by what ranks do and never by how fast the machine is,
    and to wait for one takes no time. Pass it to `ThreadRanks`, of which each rank waits with its
    own thread. Thread-safe.

    Args:
        num_ranks: Ranks that work or wait.
    """

    def __init__(self, num_ranks: int) -> None:
        self._lock = threading.Lock()
        self._now_s = 0.0
        self._at_work = set(range(num_ranks))
        self._waits: dict[int, _Wait] = {}
        self._rank = threading.local()

    def __call__(self) -> float:
        """Seconds since the start."""
        return self._now_s

    @contextmanager
    def at_work(self, rank: int) -> Iterator[None]:
        """Be a rank with this thread; afterwards nobody waits for the rank."""
        self._rank.number = rank
        try:
            yield
        finally:
            self._leave(rank)

    @contextmanager
    def away(self, rank: int) -> Iterator[None]:
        """Let time pass without a rank: it hangs, or waits for something but the group.

        If it is another rank that ends this, that one calls `come_back` first: the thread itself
        may wake up when time has passed already.
        """
        self._leave(rank)
        try:
            yield
        finally:
            self.come_back(rank)

    def come_back(self, *ranks: int) -> None:
        """Let no time pass without these ranks any more."""
        with self._lock:
            self._at_work.update(ranks)

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait as a rank. Whether the event came in time."""
        one, rank = _Wait(event, self._now_s + max(timeout_s, 0)), self._rank.number
        with self._lock:
            self._waits[rank] = one
            self._pass()
        try:
            while not event.wait(_LOOK_S) and not one.is_over:
                pass
        finally:
            with self._lock:
                del self._waits[rank]
        return event.is_set()

    def _leave(self, rank: int) -> None:
        with self._lock:
            self._at_work.discard(rank)
            self._pass()

    def _pass(self) -> None:
        """Jump, if nobody is at work. Who was woken and does not know yet is at work."""
        waits = [self._waits.get(rank) for rank in self._at_work]
        if any(one is None or one.is_over or one.event.is_set() for one in waits):
            return
        self._now_s = min([one.until_s for one in waits if one is not None], default=self._now_s)
        for one in waits:
            if one is not None and one.until_s <= self._now_s:
                one.is_over = True


T = TypeVar("T")


@dataclass(slots=True)
class RankRun(Generic[T]):
    """What became of each rank.

    Args:
        results: What it returned.
        errors: What it raised.
        running: Ranks that had not ended when the wait was over.
    """

    results: dict[int, T] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)
    running: list[int] = field(default_factory=list)

    def values(self) -> list[T]:
        """Return the results by rank.

        Raises:
            BaseException: The error of the lowest failing rank, if any failed.
            TimeoutError: If a rank still runs.
        """
        for _, error in sorted(self.errors.items()):
            raise error
        if self.running:
            raise TimeoutError(f"ranks {self.running} still run")
        return [self.results[rank] for rank in sorted(self.results)]


class ThreadRanks:
    """What ranks that are threads share; makes one group per rank.

    Args:
        size: Number of ranks.
        coordinator: The rank that reduces.
        deadline_s: Seconds a step may take.
        bulk_bytes: Values larger than this go by lane.
        rank_time: The time in which ranks wait for one another; None for the real one.
    """

    def __init__(
        self,
        size: int,
        *,
        coordinator: int = 0,
        deadline_s: float = 30.0,
        bulk_bytes: int = BULK_BYTES,
        rank_time: RankTime | None = None,
    ) -> None:
        wait = threading.Event.wait if rank_time is None else rank_time.wait
        self.board = MemoryBoard(wait)
        self._wires = MemoryWires(wait)
        self._time = rank_time
        self._size = size
        self._coordinator = coordinator
        self._deadline_s = deadline_s
        self._bulk_bytes = bulk_bytes

    def group(self, rank: int) -> BoardGroup:
        """Make the group of one rank. To be used by one thread at a time."""
        return BoardGroup(
            self.board,
            rank=rank,
            size=self._size,
            coordinator=self._coordinator,
            deadline_s=self._deadline_s,
            namespace="threads",
            lane_maker=lambda name, _: MemoryLanes(name, rank, self._wires),
            bulk_bytes=self._bulk_bytes,
            clock=self._time or time.monotonic,
        )

    def run(self, fn: Callable[[RankGroup], T], *, wait_s: float | None = None) -> RankRun[T]:
        """Run ``fn(group)`` on every rank and wait for all.

        Args:
            fn: Gets the rank's group, open for as long as it runs.
            wait_s: Seconds to wait for the ranks; None waits for as long as it takes. Threads
                that still run then are left behind; they do not keep the process alive.
        """
        run: RankRun[T] = RankRun()

        def work(rank: int) -> None:
            at_work = nullcontext() if self._time is None else self._time.at_work(rank)
            try:
                with at_work, self.group(rank) as group:
                    run.results[rank] = fn(group)
            except BaseException as error:  # noqa: BLE001 - a rank's boundary: kept for the test
                run.errors[rank] = error

        threads = [
            threading.Thread(target=work, args=(rank,), name=f"rank-{rank}", daemon=True)
            for rank in range(self._size)
        ]
        for thread in threads:
            thread.start()
        end = None if wait_s is None else time.monotonic() + wait_s
        for thread in threads:
            thread.join(None if end is None else max(end - time.monotonic(), 0))
        run.running = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        return run


def run_ranks(
    size: int,
    fn: Callable[[RankGroup], T],
    *,
    coordinator: int = 0,
    deadline_s: float = 30.0,
    wait_s: float | None = None,
) -> RankRun[T]:
    """Run ``fn(group)`` on as many threads as ranks; see `ThreadRanks`."""
    ranks = ThreadRanks(size, coordinator=coordinator, deadline_s=deadline_s)
    return ranks.run(fn, wait_s=wait_s)
