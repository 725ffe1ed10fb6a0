"""The emulated distance between a client and the server: how long, how wide, in what weather."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Link", "Weather"]

_FIRST_BURST_S = 0.3  # so that a load of a second meets one too


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What every request meets; zeros are none of it.

    Attributes:
        latency_s: Least time from the last byte of a request to the first of its answer.
        jitter_s: Up to so much is added, evenly distributed.
        bytes_per_s: Of one connection, in each direction.
        slow_share: Share of requests that are slow besides.
        slow_s: By how much.
        burst_s: How long bursts of 503 last: every request is refused.
        burst_every_s: From the beginning of one burst to that of the next.
        seed: Of what is random.
    """

    latency_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float = 0.0
    slow_share: float = 0.0
    slow_s: float = 0.0
    burst_s: float = 0.0
    burst_every_s: float = 0.0
    seed: int = 0


class Weather:
    """What a link does from now on, request by request. Thread-safe.

    The same seed gives the same waits to the first, second, third ... request, whoever asks.

    Args:
        link: What it is like.
        clock: Monotonic seconds.
        sleep: Waits for seconds.
    """

    def __init__(
        self,
        link: Link,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.link = link
        self._clock, self._sleep = clock, sleep
        self._random = random.Random(link.seed)
        self._lock = threading.Lock()
        self._began_s = clock()

    def wait_s(self) -> float:
        """Draw how long the next request waits."""
        link = self.link
        with self._lock:
            jitter, luck = self._random.random(), self._random.random()
        return link.latency_s + jitter * link.jitter_s + (luck < link.slow_share) * link.slow_s

    def is_burst(self) -> bool:
        """Tell whether requests are refused at this moment."""
        link = self.link
        since_s = self._clock() - self._began_s - _FIRST_BURST_S
        return bool(link.burst_s) and since_s >= 0 and since_s % link.burst_every_s < link.burst_s

    def pace(self, began_s: float, num_bytes: int) -> None:
        """Wait until so many bytes may have passed since ``began_s`` of the clock."""
        rate = self.link.bytes_per_s
        if rate and (ahead_s := began_s + num_bytes / rate - self._clock()) > 0:
            self._sleep(ahead_s)
