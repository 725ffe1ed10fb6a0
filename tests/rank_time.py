"""A time for ranks that are threads, which passes only while every rank waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dcpstore.ranks.exchange import BoardGroup
from dcpstore.testing.ranks import ThreadRanks

_LOOK_S = 0.005  # real seconds until a waiting rank sees that its time is up


@dataclass(slots=True)
class _Wait:
    event: threading.Event
    until_s: float
    is_over: bool = False


class RankTime:
    """A clock that jumps to the next deadline once no rank is at work any more.

    A deadline is then met or missed by what ranks do and never by how fast the machine is,
    and to wait for one takes no time. Pass it to `TimedRanks`, of which each rank waits with its
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


class TimedRanks(ThreadRanks):
    """Ranks that are threads and wait for one another in a `RankTime`."""

    def __init__(self, size: int, clock: RankTime, **more: Any) -> None:
        super().__init__(size, wait=clock.wait, clock=clock, **more)
        self._time = clock

    @contextmanager
    def member(self, rank: int) -> Iterator[BoardGroup]:
        with self._time.at_work(rank), self.group(rank) as group:
            yield group
