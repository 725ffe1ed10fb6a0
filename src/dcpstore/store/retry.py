"""Retries: jittered, bounded in number and time, and never of what may have happened.

What is repeated, and when:

===================================  ====================================================
get, get_range, fill, head,          on any retryable error
delete_many
put, overwrite                       on any retryable error: the same bytes land twice
put, create or IfMatch               only when throttled: then the store did nothing. A
                                     lost answer is settled by the caller, who can read
                                     back what is there
put_parts                            never: the parts are gone. The engine repeats parts
copy_from                            never: the engine repeats it, and parts singly
list                                 from the start, skipping what was yielded already
===================================  ====================================================
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from dcpstore.errors import StoreError
from dcpstore.store.limiter import AdaptiveLimiter

if TYPE_CHECKING:
    from dcpstore.store.base import (
        Buffer,
        Capabilities,
        Fetched,
        ObjectInfo,
        Part,
        PutMode,
        Store,
    )
    from dcpstore.store.destination import Destination, FillsMemory
    from dcpstore.store.server_copy import CopyMode, Origin, ServerCopies

__all__ = ["RetryPolicy", "RetryingStore", "call_with_retries"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long to keep trying.

    Attributes:
        max_attempts: Requests per call, the first included; 1 means no retry.
        base_delay_s: Upper end of the first random delay; it doubles from there.
        max_delay_s: No random delay is longer. A ``Retry-After`` may be.
        total_deadline_s: No retry starts later than this after the call. The defaults
            ride out a 30 s storm of 503s: 16 attempts with full jitter wait 90 s on
            average, and less than 30 s in one call of a thousand.
    """

    max_attempts: int = 16
    base_delay_s: float = 0.2
    max_delay_s: float = 20.0
    total_deadline_s: float = 180.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts={self.max_attempts} is less than 1")
        if min(self.base_delay_s, self.max_delay_s, self.total_deadline_s) < 0:
            raise ValueError(f"a negative time in {self}")

    def delay_s(self, num_failures: int, random_unit: float, retry_after_s: float | None) -> float:
        """Delay before the next attempt: full jitter, but no less than asked for.

        Args:
            num_failures: How many attempts have failed, at least 1.
            random_unit: A random number in [0, 1).
            retry_after_s: What the store asked for, if it did.
        """
        ceiling = min(self.max_delay_s, self.base_delay_s * 2.0 ** (num_failures - 1))
        return max(retry_after_s or 0.0, random_unit * ceiling)


class RetryingStore:
    """A `Store` that repeats failed requests of another and slows down when throttled.

    Args:
        inner: The store that sends each request once.
        policy: How long to keep trying.
        limiter: Shared among stores that the same server throttles; None for one's own.
        clock: Monotonic seconds.
        sleep: Called between attempts, holding no place in the limiter.
        rng: Source of the jitter.
    """

    def __init__(
        self,
        inner: Store,
        policy: RetryPolicy | None = None,
        limiter: AdaptiveLimiter | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self._inner = inner
        self._policy = policy or RetryPolicy()
        self._limiter = limiter or AdaptiveLimiter()
        self._clock = clock
        self._sleep = sleep
        self._rng = rng or random.Random()

    @property
    def inner(self) -> Store:
        """The store that sends the requests."""
        return self._inner

    @property
    def limiter(self) -> AdaptiveLimiter:
        """The limit on concurrent requests."""
        return self._limiter

    @property
    def url(self) -> str:
        """The root, without secrets."""
        return self._inner.url

    @property
    def capabilities(self) -> Capabilities:
        """What the inner store promises."""
        return self._inner.capabilities

    def get(self, key: str) -> Fetched:
        """Fetch a whole object."""
        return self._repeat(lambda: self._inner.get(key))

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        """Fetch bytes ``[start, end)``."""
        return self._repeat(lambda: self._inner.get_range(key, start, end))

    def fill(self, key: str, start: int, destination: Destination) -> None:
        """Fetch a range straight into memory of the caller's."""
        inner = cast("FillsMemory", self._inner)  # who asks has seen that it can
        self._repeat(lambda: inner.fill(key, start, destination))

    def head(self, key: str) -> ObjectInfo:
        """Look an object up without its bytes."""
        return self._repeat(lambda: self._inner.head(key))

    def put(self, key: str, data: Buffer, *, mode: PutMode = "overwrite") -> str | None:
        """Store one object; a conditional put is repeated only after a throttle."""
        may_repeat = _if_retryable if mode == "overwrite" else _if_throttled
        return self._repeat(lambda: self._inner.put(key, data, mode=mode), may_repeat)

    def put_parts(
        self, key: str, parts: Iterable[Part], *, part_bytes: int, max_concurrency: int
    ) -> str | None:
        """Store one large object from parts; only its engine can repeat one.

        It takes no place in the limiter: its parts may come from requests that need one.
        """
        self._limiter.wait_for_pause()
        return self._noting(
            lambda: self._inner.put_parts(
                key, parts, part_bytes=part_bytes, max_concurrency=max_concurrency
            )
        )

    def copy_from(
        self,
        origin: Origin,
        source_key: str,
        key: str,
        *,
        size_bytes: int,
        mode: CopyMode = "overwrite",
    ) -> None:
        """Let the provider copy an object; see `dcpstore.store.server_copy`."""
        inner = cast("ServerCopies", self._inner)  # who asks has seen that it copies
        self._limiter.wait_for_pause()
        self._noting(
            lambda: inner.copy_from(origin, source_key, key, size_bytes=size_bytes, mode=mode)
        )

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below the folder ``prefix``, each key once."""
        yielded: set[str] = set()
        pages: list[Iterator[ObjectInfo]] = []

        def step() -> ObjectInfo | None:
            try:
                if not pages:
                    pages.append(iter(self._inner.list(prefix)))
                return next((one for one in pages[0] if one.key not in yielded), None)
            except StoreError:
                pages.clear()
                raise

        while (found := self._repeat(step)) is not None:
            yielded.add(found.key)
            yield found

    def delete_many(self, keys: Sequence[str]) -> None:
        """Delete objects; a missing one is no error."""
        self._repeat(lambda: self._inner.delete_many(keys))

    def close(self) -> None:
        """Close the inner store."""
        self._inner.close()

    def _repeat(
        self, request: Callable[[], _T], may_repeat: Callable[[StoreError], bool] | None = None
    ) -> _T:
        def limited() -> _T:
            with self._limiter.slot():
                return self._noting(request)

        return call_with_retries(
            limited,
            self._policy,
            may_repeat=may_repeat or _if_retryable,
            clock=self._clock,
            sleep=self._sleep,
            rng=self._rng,
        )

    def _noting(self, request: Callable[[], _T]) -> _T:
        try:
            answer = request()
        except StoreError as error:
            if error.throttled:
                self._limiter.note_throttle(error.retry_after_s)
            raise
        self._limiter.note_success()
        return answer

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._inner, self._policy, self._limiter)


def call_with_retries(
    request: Callable[[], _T],
    policy: RetryPolicy,
    *,
    may_repeat: Callable[[StoreError], bool] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    rng: random.Random | None = None,
) -> _T:
    """Call until it succeeds, must not be repeated, or the policy gives up.

    Args:
        request: Raises `StoreError` for what another try may change.
        policy: How long to keep trying.
        may_repeat: Which errors to repeat after; None for the retryable ones.
        clock: Monotonic seconds.
        sleep: Called between attempts.
        rng: Source of the jitter.

    Raises:
        StoreError: The last one, with the number of attempts and the time they took.
    """
    may_repeat = may_repeat or _if_retryable
    rng = rng or random.Random()
    began = clock()
    num_failures = 0
    while True:
        try:
            return request()
        except StoreError as error:
            num_failures += 1
            if not may_repeat(error):
                raise
            spent_s = clock() - began
            delay_s = policy.delay_s(num_failures, rng.random(), error.retry_after_s)
            if num_failures >= policy.max_attempts or spent_s + delay_s > policy.total_deadline_s:
                raise _given_up(error, num_failures, spent_s) from error
        sleep(delay_s)


def _if_retryable(error: StoreError) -> bool:
    return error.retryable


def _if_throttled(error: StoreError) -> bool:
    return error.throttled


def _given_up(error: StoreError, num_attempts: int, spent_s: float) -> StoreError:
    tries = "1 attempt" if num_attempts == 1 else f"{num_attempts} attempts"
    return StoreError(
        f"{error.message} (gave up after {tries} over {spent_s:.1f} s)",
        key=error.key,
        retryable=error.retryable,
        throttled=error.throttled,
        retry_after_s=error.retry_after_s,
        denied=error.denied,
    )
