"""The control plane: a board that all ranks of a group post small values to.

A board decides. `Board.settle` is an atomic register: whichever rank calls it first fixes the
value for everybody, so that ranks agree on an outcome even where the coordinator is silent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

EventWait: TypeAlias = Callable[[threading.Event, float], bool]
"""Waits for an event, for so many seconds at most; whether it came."""


class BoardLostError(Exception):
    """The board itself is out of reach.

    Args:
        rank: The rank to name for it: the one believed to have held the board.
        message: What was lost, and who held it.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class Board(Protocol):
    """Keys and values shared by the ranks of one group, in a namespace of their own.

    No call but `wait` blocks for longer than a message takes. Every call may raise
    `BoardLostError`.
    """

    def post(self, key: str, data: bytes | bytearray) -> None:
        """Set a key that no other rank sets."""
        ...

    def settle(self, key: str, data: bytes) -> bytes:
        """Set `key` unless it is set. Returns what it holds now, the same on every rank."""
        ...

    def wait(self, keys: Sequence[str], timeout_s: float, *, unless: str | None = None) -> bool:
        """Wait until all `keys` are set, or `unless` is. Whether all are; can be interrupted."""
        ...

    def fetch(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the values of those `keys` that are set."""
        ...

    def drop(self, keys: Sequence[str]) -> None:
        """Forget `keys`. Those that are not set are passed over."""
        ...

    def count(self, key: str) -> int:
        """Add one to a counter and return it. Its key is dropped like any other."""
        ...


class _Waiter:
    """One thread that waits for keys."""

    def __init__(self, missing: set[str], unless: str | None) -> None:
        self.missing = missing
        self.unless = unless
        self.wake = threading.Event()

    def see(self, key: str) -> None:
        self.missing.discard(key)
        if not self.missing or key == self.unless:
            self.wake.set()


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
        self._waiters: dict[str, list[_Waiter]] = {}

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
            waiter = _Waiter({key for key in keys if key not in self._values}, unless)
            if not waiter.missing or unless in self._values:
                return not waiter.missing
            watched = [*waiter.missing, *([unless] if unless else [])]
            for key in watched:
                self._waiters.setdefault(key, []).append(waiter)
        try:
            self._wait(waiter.wake, max(timeout_s, 0))
        finally:
            with self._lock:
                self._forget(waiter, watched)
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
        for waiter in self._waiters.get(key, ()):
            waiter.see(key)

    def _forget(self, waiter: _Waiter, watched: list[str]) -> None:
        for key in watched:
            others = self._waiters[key]
            others.remove(waiter)
            if not others:
                del self._waiters[key]
