"""Bounds on fetched bytes in flight."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from time import monotonic

import numpy as np
import numpy.typing as npt

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

    def num_requests(self, most: int) -> int:
        """How many usual requests fill the link, at most ``most``; that if no answer has told."""
        if self._quickest_s is None:
            return most
        return min(most, self.size // self._request_bytes)

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

    def note(self, num_bytes: int, seconds: float) -> None:
        """Tell the window of an answer."""
        if self._window is not None:
            self._window.note(num_bytes, seconds)

    def _limit_bytes(self) -> int:
        return self._max_bytes if self._window is None else min(self._max_bytes, self._window.size)

    def release(self, num_bytes: int) -> None:
        """Give ``num_bytes`` back."""
        with self._changed:
            self._held_bytes -= num_bytes
            self._changed.notify_all()
