"""Ranks as threads of one process: the same groups and steps, without torch or processes.

What differs from processes: memory is shared, so a transfer is one copy; and a thread cannot be
killed, so a rank that falls silent is one that waits for an event of the test's.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from typing_extensions import Buffer

from dcpstore.ranks.exchange import BULK_BYTES, BoardGroup
from dcpstore.ranks.group import RankGroup
from dcpstore.ranks.transport import Pending

EventWait: TypeAlias = Callable[[threading.Event, float], bool]
"""Waits for an event, for so many seconds at most; whether it came."""


@dataclass(slots=True, eq=False)
class _Waiter:
    """One thread that waits for keys."""

    missing: set[str]
    unless: str | None
    wake: threading.Event = field(default_factory=threading.Event)


class MemoryBoard:
    """A board in this process's memory, for ranks that are threads.

    Args:
        wait: How a rank waits for a key.
    """

    def __init__(self, wait: EventWait = threading.Event.wait) -> None:
        self._wait = wait
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._counts: dict[str, int] = {}
        self._waiters: list[_Waiter] = []

    @property
    def num_keys(self) -> int:
        """How many keys and counters are set."""
        with self._lock:
            return len(self._values) + len(self._counts)

    def post(self, key: str, data: bytes | bytearray) -> None:
        """Set a key that no other rank sets."""
        with self._lock:
            self._set(key, bytes(data))

    def settle(self, key: str, data: bytes) -> bytes:
        """Set `key` unless it is set; returns what it holds now."""
        with self._lock:
            if key not in self._values:
                self._set(key, data)
            return self._values[key]

    def wait(self, keys: Sequence[str], timeout_s: float, *, unless: str | None = None) -> bool:
        """Wait until all `keys` are set, or `unless` is. Whether all are."""
        with self._lock:
            waiter = _Waiter(set(keys) - self._values.keys(), unless)
            if not waiter.missing or unless in self._values:
                return not waiter.missing
            self._waiters.append(waiter)
        try:
            self._wait(waiter.wake, max(timeout_s, 0))
        finally:
            with self._lock:
                self._waiters.remove(waiter)
        return not waiter.missing

    def fetch(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the values of those `keys` that are set."""
        with self._lock:
            return {key: self._values[key] for key in keys if key in self._values}

    def drop(self, keys: Sequence[str]) -> None:
        """Forget `keys`."""
        with self._lock:
            for key in keys:
                self._values.pop(key, None)
                self._counts.pop(key, None)

    def count(self, key: str) -> int:
        """Add one to a counter and return it."""
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + 1
            return self._counts[key]

    def _set(self, key: str, data: bytes) -> None:
        self._values[key] = data
        for waiter in self._waiters:
            waiter.missing.discard(key)
            if not waiter.missing or key == waiter.unless:
                waiter.wake.set()


@dataclass(slots=True)
class _Slot:
    """The meeting of one send with its receive."""

    data: memoryview | None = None
    into: memoryview | None = None
    done: threading.Event = field(default_factory=threading.Event)
    error: str | None = None


class MemoryWires:
    """What the `MemoryLanes` of all ranks of a group share.

    Args:
        wait: How a rank waits for a transfer.
    """

    def __init__(self, wait: EventWait = threading.Event.wait) -> None:
        self.wait = wait
        self._lock = threading.Lock()
        self._slots: dict[tuple[str, int, int, int], _Slot] = {}
        self._closed: set[tuple[str, int]] = set()

    def meet(
        self,
        key: tuple[str, int, int, int],
        *,
        data: memoryview | None = None,
        into: memoryview | None = None,
    ) -> _Slot:
        """Add one side of a transfer; whoever comes second copies."""
        name, source, to, _ = key
        with self._lock:
            slot = self._slots.setdefault(key, _Slot())
            slot.data = slot.data if data is None else data
            slot.into = slot.into if into is None else into
            if (name, source) in self._closed or (name, to) in self._closed:
                slot.error = "the other rank closed its lanes"
            is_met = slot.data is not None and slot.into is not None
            if is_met or slot.error:
                self._slots.pop(key, None)
                self._finish(slot)
            return slot

    def hang_up(self, name: str, rank: int) -> None:
        """Fail all that `rank` has on its way, and all that others begin with it later."""
        with self._lock:
            self._closed.add((name, rank))
            for key in [k for k in self._slots if k[0] == name and rank in k[1:3]]:
                slot = self._slots.pop(key)
                slot.error = "the other rank closed its lanes"
                self._finish(slot)

    @staticmethod
    def _finish(slot: _Slot) -> None:
        if slot.error is None and slot.data is not None and slot.into is not None:
            if slot.data.nbytes == slot.into.nbytes:
                slot.into[:] = slot.data
            else:
                slot.error = f"{slot.data.nbytes} bytes were sent, {slot.into.nbytes} expected"
        slot.data = slot.into = None
        slot.done.set()


@dataclass(frozen=True, slots=True)
class _MemoryPending:
    _lanes: MemoryLanes
    _slot: _Slot
    _wait: EventWait

    def wait(self, timeout_s: float) -> None:
        if not self._wait(self._slot.done, max(timeout_s, 0)):
            self._lanes.close()
            raise TimeoutError(f"the other rank did not take part within {timeout_s:g} s")
        if self._slot.error is not None:
            self._lanes.close()
            raise ConnectionError(self._slot.error)


class MemoryLanes:
    """Lanes among ranks that are threads of one process: one copy, from buffer to buffer.

    Args:
        name: See `Lanes.name`.
        rank: This rank.
        wires: The same object on every rank.

    Attributes:
        name: The same on all ranks.
        is_healthy: Whether they are open and every transfer so far went well.
    """

    def __init__(self, name: str, rank: int, wires: MemoryWires) -> None:
        self.name = name
        self._rank = rank
        self._wires = wires
        self._num_posted: dict[tuple[int, int], int] = defaultdict(int)
        self.is_healthy = True

    def send(self, data: Buffer, to: int) -> Pending:
        """Begin to send."""
        key = self._next_key(self._rank, to)
        slot = self._wires.meet(key, data=memoryview(data).cast("B"))
        return _MemoryPending(self, slot, self._wires.wait)

    def receive(self, into: Buffer, source: int) -> Pending:
        """Begin to receive."""
        key = self._next_key(source, self._rank)
        slot = self._wires.meet(key, into=memoryview(into).cast("B"))
        return _MemoryPending(self, slot, self._wires.wait)

    def close(self) -> None:
        """Close them; transfers on their way fail. Idempotent."""
        if self.is_healthy:
            self.is_healthy = False
            self._wires.hang_up(self.name, self._rank)

    def _next_key(self, source: int, to: int) -> tuple[str, int, int, int]:
        posted = self._num_posted[source, to]
        self._num_posted[source, to] = posted + 1
        return self.name, source, to, posted


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
        wait: How a rank waits for another.
        clock: Monotonic seconds, by which a rank's wait is over.
    """

    def __init__(
        self,
        size: int,
        *,
        coordinator: int = 0,
        deadline_s: float = 30.0,
        bulk_bytes: int = BULK_BYTES,
        wait: EventWait = threading.Event.wait,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.board = MemoryBoard(wait)
        self._wires = MemoryWires(wait)
        self._clock = clock
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
            clock=self._clock,
        )

    def member(self, rank: int) -> AbstractContextManager[BoardGroup]:
        """Be a rank with this thread; gives its group, which is open meanwhile."""
        return self.group(rank)

    def run(self, fn: Callable[[RankGroup], T], *, wait_s: float | None = None) -> RankRun[T]:
        """Run ``fn(group)`` on every rank and wait for all.

        Args:
            fn: Gets the rank's group, open for as long as it runs.
            wait_s: Seconds to wait for the ranks; None waits for as long as it takes. Threads
                that still run then are left behind; they do not keep the process alive.
        """
        run: RankRun[T] = RankRun()

        def work(rank: int) -> None:
            try:
                with self.member(rank) as group:
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
