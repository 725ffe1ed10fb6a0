"""Bounds on memory in flight: a counter of bytes for reads, a pool of slabs for writes."""

from __future__ import annotations

import math
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["ByteBudget", "Cancelled", "FlightWindow", "SlabPool", "bytes_in_flight"]

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]

_POLL_S = 0.02  # how often a blocked wait looks whether the operation was cancelled
_NEAR_S = 0.02  # a near store has answered by then
_LEAST_IN_FLIGHT = 8
_MOST_BYTES_PER_S = 4e9  # more than one process takes in


# An engine allocates every answer anew, and the C allocator keeps about as much again for
# threads that freed theirs: 256 MiB in flight grew the process by 390 to 420 MiB, half of
# that by 220 to 240 (python -m benchmarks --only load --systems ours).
_MEMORY_PER_BYTE = 2


def bytes_in_flight(budget_bytes: int) -> int:
    """Return how many fetched bytes may be held at a time, for all memory to fit a budget."""
    return budget_bytes // _MEMORY_PER_BYTE


class Cancelled(Exception):
    """The operation this wait belongs to has failed elsewhere."""


class FlightWindow:
    """How many bytes in flight are enough to fill any link: its rate times its delay.

    A distant store has to be asked for much at a time. Of a near one, whose answers take
    milliseconds, the same number of requests only takes fresh memory and makes threads wait for
    each other. The quickest answer tells which it is; before there is one, few are asked for,
    but not for long. Thread-safe.

    Args:
        request_bytes: Of a usual request; the answers of smaller ones tell nothing.
        clock: Monotonic seconds.
    """

    def __init__(self, request_bytes: int, clock: Callable[[], float] = monotonic) -> None:
        self._request_bytes = request_bytes
        self._clock = clock
        self._least_bytes = _LEAST_IN_FLIGHT * request_bytes
        self._began: float | None = None
        self._quickest_s: float | None = None

    def note(self, num_bytes: int, seconds: float) -> None:
        """Learn from an answer."""
        if 2 * num_bytes >= self._request_bytes:
            self._quickest_s = min(seconds, self._quickest_s or seconds)

    @property
    def size(self) -> int:
        """Bytes that it makes sense to have in flight now."""
        quickest_s = self._quickest_s
        if quickest_s is None:
            now = self._clock()
            if self._began is None:
                self._began = now
            quickest_s = 0.0 if now < self._began + _NEAR_S else math.inf
        return int(min(max(self._least_bytes, _MOST_BYTES_PER_S * quickest_s), sys.maxsize))


class ByteBudget:
    """A counter of bytes that blocks whoever would overdraw it.

    A request larger than the whole budget is let through when nothing else is in
    flight, so that progress never stops. Thread-safe.

    Args:
        max_bytes: Most bytes held at a time.
        window: Makes waiting requests wait for less than that.
    """

    def __init__(self, max_bytes: int, window: FlightWindow | None = None) -> None:
        self._max_bytes = max_bytes
        self._window = window
        self._held_bytes = 0
        self._peak_bytes = 0
        self._changed = threading.Condition()

    @property
    def peak_bytes(self) -> int:
        """Most bytes held at any time so far."""
        return self._peak_bytes

    def acquire(self, num_bytes: int, *, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Take ``num_bytes``, waiting until they fit.

        Raises:
            Cancelled: If ``cancelled()`` turns true while waiting.
        """
        with self._changed:
            while self._held_bytes and self._held_bytes + num_bytes > self._limit_bytes():
                if cancelled():
                    raise Cancelled
                self._changed.wait(_POLL_S)
            self._held_bytes += num_bytes
            self._peak_bytes = max(self._peak_bytes, self._held_bytes)

    def try_acquire(self, num_bytes: int) -> bool:
        """Take ``num_bytes`` if they fit now; tell whether they did."""
        with self._changed:
            if self._held_bytes + num_bytes > self._max_bytes:
                return False
            self._held_bytes += num_bytes
            self._peak_bytes = max(self._peak_bytes, self._held_bytes)
            return True

    def _limit_bytes(self) -> int:
        return self._max_bytes if self._window is None else min(self._max_bytes, self._window.size)

    def release(self, num_bytes: int) -> None:
        """Give ``num_bytes`` back."""
        with self._changed:
            self._held_bytes -= num_bytes
            self._changed.notify_all()


class SlabPool(Generic[T]):
    """A fixed number of places for parts in flight, and memory for those that need some.

    A part in flight takes a place, and a slab of the pool's memory, made on first use and
    recycled, unless all its bytes lie elsewhere. It is handed on as *leases*: a numpy view of
    each of its pieces, whose deaths give back place and slab. Whoever holds the last
    reference, be it a thread of the store's engine, thereby decides when that memory may be
    filled again.

    Args:
        num_slabs: Most parts in flight, hence most slabs that exist.
        make_slab: Allocates one slab.
    """

    def __init__(self, num_slabs: int, make_slab: Callable[[], T]) -> None:
        # SimpleQueue.put is reentrant, hence safe in the finalizer of a lease.
        self._places: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._make_slab = make_slab
        self.num_made = 0
        """Slabs that exist."""
        for _ in range(num_slabs):
            self._places.put(None)

    def acquire_place(self, *, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Take a place, waiting for one if need be.

        Raises:
            Cancelled: If ``cancelled()`` turns true while waiting.
        """
        while True:
            try:
                return self._places.get_nowait()
            except queue.Empty:
                if cancelled():
                    raise Cancelled from None
            try:
                return self._places.get(timeout=_POLL_S)
            except queue.Empty:
                continue

    def take_slab(self) -> T:
        """Take a slab, at most one for each place taken. One thread at a time."""
        try:
            return self._free.get_nowait()
        except queue.Empty:  # fewer slabs than places are in use, so there may be one more
            self.num_made += 1
            return self._make_slab()

    def lease(self, pieces: Sequence[Bytes], slab: T | None = None) -> list[Bytes]:
        """Return views of the pieces of a part; the last to die gives back place and slab."""
        leases = [piece[:] for piece in pieces]
        alive = list(range(len(leases)))
        for lease in leases:
            weakref.finalize(lease, self._end, alive, slab).atexit = False
        return leases

    def _end(self, alive: list[int], slab: T | None) -> None:
        # Finalizers run in any thread: who pops the bottom of the list is the last one.
        if alive.pop() == 0:
            if slab is not None:
                self._free.put(slab)
            self._places.put(None)
