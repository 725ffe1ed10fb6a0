"""Memory for parts on their way to the store: places, slabs and scratch, all of them bounded."""

from __future__ import annotations

import queue
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from dcpstore.budget import Bytes, Cancelled

__all__ = ["Slab", "SlabPool"]

_T = TypeVar("_T")

_POLL_S = 0.02  # how often a blocked wait looks whether the operation was cancelled
_LEAST_SLABS_TO_CUT = 3  # as an upload begins once it has two parts, and both may need a slab


@dataclass(frozen=True, slots=True)
class Slab:
    """One piece of host memory, seen as numpy and as torch."""

    array: Bytes
    tensor: torch.Tensor

    def cut(self, piece_bytes: int) -> list[Slab]:
        """Return as many pieces of that size as it holds."""
        ends = range(piece_bytes, len(self.array) + 1, piece_bytes)
        return [
            Slab(self.array[end - piece_bytes : end], self.tensor[end - piece_bytes : end])
            for end in ends
        ]


class SlabPool:
    """A bounded number of parts in flight, and the memory for what they copy.

    Each part in flight holds a place. One that copies much takes a slab, made on first use
    and recycled. One that copies little takes a piece of scratch instead: all of those are
    one slab, cut into as many pieces as there are places. So many more parts may be in flight
    than there is memory for, as long as most of their bytes lie elsewhere::

        places   0  1  2  3  4  5  6  7  ...      num_places, no memory
        slabs    |    0    |    1    |    2    |  num_slabs of the budget
        scratch  |0|1|2|3|4|5|6|7|..              the last of them, if any is asked for

    A part is handed on as *leases*: a numpy view of each of its pieces, whose deaths give
    back all that it took. Whoever holds the last reference, be it a thread of the store's
    engine, thereby decides when that memory may be filled again.

    One thread takes; any thread may give back.

    Args:
        num_places: Most parts in flight.
        num_slabs: Most slabs that exist.
        slab_bytes: Size of one.
        make_slab: Allocates one.
    """

    def __init__(
        self, num_places: int, num_slabs: int, slab_bytes: int, make_slab: Callable[[int], Slab]
    ) -> None:
        # SimpleQueue.put is reentrant, hence safe in the finalizer of a lease.
        self._places: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[Slab] = queue.SimpleQueue()
        self._scratch: queue.SimpleQueue[Slab] | None = None
        self._num_slabs = num_slabs
        self._slab_bytes = slab_bytes
        self._make_slab = make_slab
        self._num_made = 0
        can_cut = num_slabs >= _LEAST_SLABS_TO_CUT
        self._scratch_bytes = slab_bytes // num_places // 4096 * 4096 if can_cut else 0
        for _ in range(num_places):
            self._places.put(None)

    @property
    def peak_bytes(self) -> int:
        """Size of the slabs that exist."""
        return self._num_made * self._slab_bytes

    def acquire_place(self, *, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Take a place, waiting for one if need be.

        Raises:
            Cancelled: If ``cancelled()`` turns true while waiting.
        """
        _take(self._places, cancelled)

    def acquire_slab(self, *, cancelled: Callable[[], bool] = lambda: False) -> Slab:
        """Take a slab for a part that has a place, waiting for one if need be.

        Raises:
            Cancelled: If ``cancelled()`` turns true while waiting.
        """
        if self._free.empty() and self._num_made < self._num_slabs:
            self._num_made += 1
            return self._make_slab(self._slab_bytes)
        return _take(self._free, cancelled)

    def acquire_scratch(self, *, cancelled: Callable[[], bool] = lambda: False) -> Slab | None:
        """Take scratch for a part that has a place; None if there is too little memory to cut.

        Waits for a slab the first time, for nothing later.

        Raises:
            Cancelled: If ``cancelled()`` turns true while waiting.
        """
        if not self._scratch_bytes:
            return None
        if self._scratch is None:
            slab = self.acquire_slab(cancelled=cancelled)
            self._scratch = queue.SimpleQueue()
            for piece in slab.cut(self._scratch_bytes):
                self._scratch.put(piece)
        return self._scratch.get_nowait()  # there is one for every place

    def lease(
        self, pieces: Sequence[Bytes], slab: Slab | None = None, scratch: Slab | None = None
    ) -> list[Bytes]:
        """Return views of the pieces of a part; the last to die gives back what it took."""
        leases = [piece[:] for piece in pieces]
        alive = list(range(len(leases)))
        for lease in leases:
            weakref.finalize(lease, self._end, alive, slab, scratch).atexit = False
        return leases

    def _end(self, alive: list[int], slab: Slab | None, scratch: Slab | None) -> None:
        # Finalizers run in any thread: who pops the bottom of the list is the last one.
        if alive.pop() == 0:
            if slab is not None:
                self._free.put(slab)
            if scratch is not None and self._scratch is not None:
                self._scratch.put(scratch)
            self._places.put(None)


def _take(free: queue.SimpleQueue[_T], cancelled: Callable[[], bool]) -> _T:
    while True:
        try:
            return free.get_nowait()
        except queue.Empty:
            if cancelled():
                raise Cancelled from None
        try:
            return free.get(timeout=_POLL_S)
        except queue.Empty:
            continue
