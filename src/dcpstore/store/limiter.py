"""One limit on concurrent requests, shared by all who may be throttled together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["AdaptiveLimiter"]


class AdaptiveLimiter:
    """Additive increase, multiplicative decrease, and a pause when told to wait.

    A throttled answer halves the limit, at most once per window, because the requests
    in flight were all sent under the old one. Every success raises it by
    ``1 / limit``, that is by one per round of requests. Thread-safe. Pickles by its
    settings: a copy in another process starts afresh.

    Args:
        max_limit: The limit at the start and for ever after.
        min_limit: The least number of concurrent requests.
        window_s: Time in which further throttles do not halve again.
        clock: Monotonic seconds.
        sleep: Called outside any lock while a pause lasts.
    """

    def __init__(
        self,
        max_limit: int = 128,
        *,
        min_limit: int = 1,
        window_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not 1 <= min_limit <= max_limit:
            raise ValueError(f"min_limit={min_limit}, max_limit={max_limit}: need 1 <= min <= max")
        self._max_limit = max_limit
        self._min_limit = min_limit
        self._window_s = window_s
        self._clock = clock
        self._sleep = sleep
        self._free = threading.Condition()
        self._limit = float(max_limit)
        self._num_active = 0
        self._halved_at: float | None = None
        self._paused_until = 0.0

    @property
    def limit(self) -> int:
        """How many requests may be in flight now."""
        return int(self._limit)

    @property
    def num_active(self) -> int:
        """How many requests are in flight now."""
        return self._num_active

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold one request's place; blocks while the limit or a pause forbids more."""
        self.wait_for_pause()
        with self._free:
            self._free.wait_for(lambda: self._num_active < int(self._limit))
            self._num_active += 1
        try:
            yield
        finally:
            with self._free:
                self._num_active -= 1
                self._free.notify()

    def note_success(self) -> None:
        """Tell that a request was served."""
        with self._free:
            before = int(self._limit)
            self._limit = min(float(self._max_limit), self._limit + 1.0 / self._limit)
            if int(self._limit) > before:
                self._free.notify()

    def note_throttle(self, retry_after_s: float | None = None) -> None:
        """Tell that a request was throttled, and how long the store asked to wait."""
        with self._free:
            now = self._clock()
            if self._halved_at is None or now - self._halved_at >= self._window_s:
                self._limit = max(float(self._min_limit), self._limit / 2)
                self._halved_at = now
            if retry_after_s is not None:
                self._paused_until = max(self._paused_until, now + retry_after_s)

    def wait_for_pause(self) -> None:
        """Block while a pause lasts, without taking a place."""
        while True:
            with self._free:
                left_s = self._paused_until - self._clock()
            if left_s <= 0:
                return
            self._sleep(left_s)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(limit={self.limit}, max_limit={self._max_limit})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._max_limit, self._min_limit, self._window_s)


def _rebuild(max_limit: int, min_limit: int, window_s: float) -> AdaptiveLimiter:
    return AdaptiveLimiter(max_limit, min_limit=min_limit, window_s=window_s)
