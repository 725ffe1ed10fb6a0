"""Ask again for a range whose answer is late, and take whichever answer comes first.

Of many requests a few are slow for reasons of the store's own, and a load waits for the last
one. A second request usually meets a server that is well (Dean and Barroso, "The Tail at
Scale", CACM 2013). How late is late follows from the answers so far, and second requests
are a bounded share of all, so a store that is slow as a whole is not asked twice as much.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from time import monotonic
from typing import Any, TypeVar, cast

from dcpstore.store.base import Destination, FillsMemory, Store
from dcpstore.store.budget import ByteBudget

_A = TypeVar("_A")
_B = TypeVar("_B")
_LEAST_DELAY_S = 0.3  # below this a second request is not worth its price
_NUM_KNOWN = 16  # answers to judge by, at least
_MAX_IN_FLIGHT = 4  # pairs at a time, each of which keeps a thread more


class RangeHedge:
    """Ranges of a store, asked for twice where the first answer is late. Thread-safe.

    Late is twice the time in which nine of ten answers came.

    Args:
        store: To ask.
        max_requests: Calls of `get_range` at a time.
        max_share: Most second requests, as a share of all.
        least_delay_s: Never ask again sooner.
        budget: Memory for second answers; where it has no room, none is asked for.
    """

    def __init__(
        self,
        store: Store,
        *,
        max_requests: int,
        max_share: float,
        least_delay_s: float = _LEAST_DELAY_S,
        budget: ByteBudget | None = None,
    ) -> None:
        self._budget = budget
        self._store = store
        self._max_share = max_share
        self._least_delay_s = least_delay_s
        self._executor = ThreadPoolExecutor(max_requests + _MAX_IN_FLIGHT, "dcpstore-hedge")
        self._lock = threading.Lock()
        self._seconds: deque[float] = deque(maxlen=256)
        self._num_asked = 0
        self._num_in_flight = 0
        self.num_again = 0
        """Second requests so far."""
        self.again_bytes = 0
        """What they asked for."""

    def close(self) -> None:
        """Take no more requests. Does not wait for answers that nobody needs any more."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        """Fetch bytes ``[start, end)``, as the store does. Raises: as there."""
        ask = partial(self._store.get_range, key, start, end)
        return self._race(ask, ask, end - start)

    def fill(self, key: str, start: int, destination: Destination) -> None:
        """Fetch a range into memory of the caller's, as the store does. Raises: as there.

        A second answer comes into other memory, so that nobody writes where another does.
        """
        store = cast("FillsMemory", self._store)  # who asks has seen that it can
        num_bytes = destination.num_bytes
        data = self._race(
            partial(store.fill, key, start, destination),
            partial(self._store.get_range, key, start, start + num_bytes),
            num_bytes,
        )
        if data is not None:
            destination.revoke()
            destination.take(data)

    def _race(self, ask: Callable[[], _A], ask_again: Callable[[], _B], num_bytes: int) -> _A | _B:
        """Return whichever answer comes first; if one fails, the other."""
        with self._lock:
            self._num_asked += 1
            late_s = self._late_s()
        first = self._executor.submit(self._timed, ask)
        wait([first], late_s)
        if first.done() or not self._may_ask_again(num_bytes):
            return first.result()
        second = self._executor.submit(self._timed, ask_again)
        both: set[Future[Any]] = {first, second}
        running = set(both)
        for one in both:
            one.add_done_callback(partial(self._forget, running, num_bytes))
        done, _ = wait(both, return_when=FIRST_COMPLETED)
        good = [one for one in done if one.exception() is None] or list(both - done) or [first]
        answer: _A | _B = good[0].result()
        return answer

    def _timed(self, ask: Callable[[], _A]) -> _A:
        began = monotonic()
        answer = ask()
        with self._lock:
            self._seconds.append(monotonic() - began)
        return answer

    def _late_s(self) -> float | None:
        if len(self._seconds) < _NUM_KNOWN:
            return None
        usual = sorted(self._seconds)[len(self._seconds) * 9 // 10]
        return max(2 * usual, self._least_delay_s)

    def _may_ask_again(self, num_bytes: int) -> bool:
        with self._lock:
            share = (self.num_again + 1) / self._num_asked
            if self._num_in_flight >= _MAX_IN_FLIGHT or share > self._max_share:
                return False
            if self._budget is not None and not self._budget.try_acquire(num_bytes):
                return False
            self.num_again += 1
            self.again_bytes += num_bytes
            self._num_in_flight += 1
            return True

    def _forget(self, running: set[Future[Any]], num_bytes: int, ended: Future[Any]) -> None:
        """Count a pair as in flight until both have ended: a slow one keeps its thread."""
        with self._lock:
            running.discard(ended)
            if not running:
                self._num_in_flight -= 1
                if self._budget is not None:
                    self._budget.release(num_bytes)
