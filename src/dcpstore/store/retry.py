"""Retries: jittered, bounded in number and time, and never of what may have happened.

Each try has a time-out, and the request with all its tries a deadline; see `RetryPolicy`. One
`AdaptiveLimiter` bounds the concurrent requests of all who may be throttled together.

What is repeated, and when:

===================================  ====================================================
get, get_range, fill, get_tail,      on any retryable error
head, folders, delete_many
put, overwrite                       on any retryable error: the same bytes land twice
put, create or IfMatch               only when throttled. Any other lost answer is settled by
                                     the caller, who can read back what is there
put_parts                            never: the parts are gone. The engine repeats parts
copy_from                            never: the engine repeats it, and parts singly
list                                 from the start, skipping what was yielded already
===================================  ====================================================

`WrappedStore` is what retries, and the fakes of `dcpstore.testing`, are made of.

An error that ends a call is marked as ``refused`` only if every attempt was: a repeated put
that the store denies says nothing of the first one, whose answer was a 503.
"""

from __future__ import annotations

import logging
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, cast

from typing_extensions import Buffer

from dcpstore.errors import AlreadyExistsError, CheckpointError, CorruptError, StoreError
from dcpstore.store.base import (
    Capabilities,
    CopyMode,
    CopySource,
    Destination,
    Fetched,
    FillsMemory,
    ObjectInfo,
    Origin,
    Part,
    PutMode,
    ServerCopies,
    Store,
    Tail,
    as_bytes_view,
)


class AdaptiveLimiter:
    """Additive increase, multiplicative decrease, and a pause when told to wait.

    A throttled answer halves the limit, at most once per window, because the requests
    in flight were all sent under the old one. Every success raises it by
    ``1 / limit``, that is by one per round of requests. Thread-safe. Pickles by its
    settings: a copy in another process starts afresh.

    Args:
        max_limit: The limit at the start and ever after.
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


logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_LONGEST_SHARE = 0.4  # of the deadline: two tries, and the waits between them, fit in
_LEAST_S = 0.05
_QUIET_S = 30.0  # between two warnings of one store


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long to keep trying.

    Attributes:
        max_attempts: Requests per call, the first included; 1 means no retry.
        base_delay_s: Upper end of the first random delay; it doubles from there.
        max_delay_s: No random delay is longer. A ``Retry-After`` may be.
        total_deadline_s: Most seconds for a request with all its tries: no retry starts
            later, and the last one's time-out is cut to what is left. The defaults
            ride out a 30 s storm of 503s: 16 attempts with full jitter wait 90 s on
            average, and less than 30 s in one call of a thousand.
        timeout_floor_s: Time-out of a request without a body, and how long an answer that
            has begun may pause.
        min_bytes_per_s: What a request's bytes add to its time-out: the slowest connection
            that is not taken for a dead one. 32 parts at 256 KiB/s are 8 MiB/s.
        unreachable_s: How long to keep looking where a server that has not answered this
            process before refuses or closes connections, or its name is unknown: most likely
            the address is wrong. One that has answered is taken to restart, and so it is by
            puts: somebody has looked before.
    """

    max_attempts: int = 16
    base_delay_s: float = 0.2
    max_delay_s: float = 20.0
    total_deadline_s: float = 180.0
    timeout_floor_s: float = 20.0
    min_bytes_per_s: float = 256 * 1024
    unreachable_s: float = 5.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts={self.max_attempts} is less than 1")
        if min(self.base_delay_s, self.max_delay_s, self.total_deadline_s, self.unreachable_s) < 0:
            raise ValueError(f"a negative time in {self}")
        if min(self.timeout_floor_s, self.min_bytes_per_s) <= 0:
            raise ValueError(f"a time-out or a rate that is not positive in {self}")

    def timeout_s(self, num_bytes: int = 0) -> float:
        """Time-out of one try that moves so many bytes: the floor, and the bytes at the least rate.

        It is no more than `longest_timeout_s`.
        """
        usual_s = self.timeout_floor_s + num_bytes / self.min_bytes_per_s
        return min(self.longest_timeout_s, usual_s)

    @property
    def longest_timeout_s(self) -> float:
        """Most seconds for one try; answers that begin in time have so many to come as a whole.

        Where there may be another try, two fifths of the deadline, so that a connection which
        goes silent costs a try and not the request.
        """
        share = _LONGEST_SHARE if self.max_attempts > 1 else 1.0
        return max(_LEAST_S, share * self.total_deadline_s)

    def delay_s(self, num_failures: int, random_unit: float, retry_after_s: float | None) -> float:
        """Delay before the next attempt: full jitter, but no less than asked for.

        Args:
            num_failures: How many attempts have failed, at least 1.
            random_unit: A random number in [0, 1).
            retry_after_s: What the store asked for, if it did.
        """
        ceiling = min(self.max_delay_s, self.base_delay_s * 2.0 ** (num_failures - 1))
        return max(retry_after_s or 0.0, random_unit * ceiling)


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """How long an engine's next requests may take.

    Attributes:
        policy: Where time-outs come from.
        until_s: Monotonic time by which they must have ended; None where nobody said.
    """

    policy: RetryPolicy
    until_s: float | None = None

    def within(self, most_s: float) -> TimeLimit:
        """The same, with an end so many seconds from now."""
        return replace(self, until_s=time.monotonic() + most_s)

    def left_s(self) -> float:
        """Time until the end; all of the policy's where nobody said."""
        if self.until_s is None:
            return max(_LEAST_S, self.policy.total_deadline_s)
        return max(_LEAST_S, self.until_s - time.monotonic())

    def reading_s(self) -> float:
        """Time-out of a read whose engine notices an answer that does not begin, or pauses."""
        return min(self.policy.longest_timeout_s, self.left_s())

    def seconds(self, num_bytes: int = 0) -> float:
        """Time-out of a request that begins now and moves so many bytes."""
        return min(self.policy.timeout_s(num_bytes), self.left_s())


@dataclass(slots=True)
class Call:
    """One call of a verb, as a `WrappedStore` passes it on.

    Attributes:
        verb: Name of the method; ``get_range`` for a ``fill``, which sends the same request.
        key: The key, the prefix, or the first of several keys.
        start: First byte asked for by ``get_range``; None for other verbs.
        end: End of the range (exclusive).
        num_bytes: Of the body of a ``put``; keys of a ``delete_many``.
        mode: ``overwrite``, ``create`` or ``match`` for a ``put`` or ``copy_from``; None for
            others.
    """

    verb: str
    key: str
    start: int | None = None
    end: int | None = None
    num_bytes: int = 0
    mode: str | None = None


class WrappedStore:
    """A `Store` that passes every call on to another one, all of them through `_pass`.

    Args:
        inner: The store that does the work.
    """

    def __init__(self, inner: Store) -> None:
        self._inner = inner

    @property
    def inner(self) -> Store:
        """The store that does the work."""
        return self._inner

    @property
    def url(self) -> str:
        """The root, without secrets."""
        return self._inner.url

    @property
    def capabilities(self) -> Capabilities:
        """What the inner store promises."""
        return self._inner.capabilities

    def _pass(self, call: Call, request: Callable[[Store], _T]) -> _T:
        """Let the inner store do what is asked; for subclasses to do something about it.

        Args:
            call: What is asked.
            request: Asks it of a store, and returns the answer.
        """
        del call
        return request(self._inner)

    def get(self, key: str) -> Fetched:
        """Fetch a whole object."""
        return self._pass(Call("get", key), lambda inner: inner.get(key))

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        """Fetch bytes ``[start, end)``."""
        call = Call("get_range", key, start, end)
        return self._pass(call, lambda inner: inner.get_range(key, start, end))

    def fill(self, key: str, start: int, destination: Destination) -> None:
        """Fetch a range straight into memory of the caller's; only of an inner store that can."""
        call = Call("get_range", key, start, start + destination.num_bytes)
        self._pass(call, lambda inner: cast("FillsMemory", inner).fill(key, start, destination))

    def get_tail(self, key: str, num_bytes: int) -> Tail:
        """Fetch the last bytes of an object, all if it is shorter, and learn how long it is."""
        return self._pass(Call("get_tail", key), lambda inner: inner.get_tail(key, num_bytes))

    def head(self, key: str) -> ObjectInfo:
        """Look an object up without its bytes."""
        return self._pass(Call("head", key), lambda inner: inner.head(key))

    def put(self, key: str, data: Buffer, *, mode: PutMode = "overwrite") -> str | None:
        """Store one object in one atomic request and return its ETag."""
        call = Call("put", key, num_bytes=as_bytes_view(data).nbytes)
        call.mode = mode if isinstance(mode, str) else "match"
        return self._pass(call, lambda inner: inner.put(key, data, mode=mode))

    def put_parts(
        self, key: str, parts: Iterable[Part], *, part_bytes: int, max_concurrency: int
    ) -> str | None:
        """Store one large object from parts, several in flight, and return its ETag."""
        call = Call("put_parts", key)
        sizes = {"part_bytes": part_bytes, "max_concurrency": max_concurrency}
        return self._pass(call, lambda inner: inner.put_parts(key, parts, **sizes))

    def copy_from(self, source: CopySource, key: str, mode: CopyMode = "overwrite") -> None:
        """Let the provider copy an object; only of an inner store that can."""
        call = Call("copy_from", key, mode=mode)
        self._pass(call, lambda inner: cast("ServerCopies", inner).copy_from(source, key, mode))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below the folder ``prefix``."""
        yield from self._pass(Call("list", prefix), lambda inner: inner.list(prefix))

    def folders(self, prefix: str = "") -> Sequence[str]:
        """Return the names of the folders right below the folder ``prefix``."""
        return self._pass(Call("folders", prefix), lambda inner: inner.folders(prefix))

    def delete_many(self, keys: Sequence[str]) -> None:
        """Delete objects; a missing one is no error."""
        call = Call("delete_many", keys[0] if keys else "", num_bytes=len(keys))
        self._pass(call, lambda inner: inner.delete_many(keys))

    def close(self) -> None:
        """Close the inner store."""
        self._inner.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._inner,)


class TimesOut(Protocol):
    """A `Store` that can be told how long a request may take."""

    def within(self, most_s: float) -> Store:
        """Return the same store for one request, which fails when so many seconds are over."""


# Where servers are that have answered this process: another store of the same place need not find
# out anew that the address is right.
_answered: set[object] = set()


def _place_of(inner: Store) -> object:
    """Return what tells a bucket on a server from others; None if that is not known."""
    origin = getattr(inner, "origin", None)
    if not isinstance(origin, Origin):
        return None
    location, options = origin.location, origin.options
    nested = options.get("client_kwargs")
    endpoint = nested.get("endpoint_url") if isinstance(nested, Mapping) else None
    return location.scheme, location.bucket, str(options.get("endpoint_url") or endpoint)


class RetryingStore(WrappedStore):
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
        super().__init__(inner)
        self._policy = policy or RetryPolicy()
        self._limiter = limiter or AdaptiveLimiter()
        self._clock = clock
        self._sleep = sleep
        self._rng = rng or random.Random()
        self._limits_time = hasattr(type(inner), "within")
        self._told_s: float | None = None
        self._place = _place_of(inner)
        self._has_answered = self._place in _answered

    @property
    def limiter(self) -> AdaptiveLimiter:
        """The limit on concurrent requests."""
        return self._limiter

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below the folder ``prefix``, each key once."""
        yielded: set[str] = set()
        pages: list[Iterator[ObjectInfo]] = []

        def step(_: Store) -> ObjectInfo | None:
            try:
                if not pages:  # each page has a time-out of its own
                    pages.append(iter(self._inner.list(prefix)))
                return next((one for one in pages[0] if one.key not in yielded), None)
            except StoreError:
                pages.clear()
                raise

        while (found := self._pass(Call("list", prefix), step)) is not None:
            yielded.add(found.key)
            yield found

    def _pass(self, call: Call, request: Callable[[Store], _T]) -> _T:
        if call.verb in ("put_parts", "copy_from"):
            return self._send_once(call, request)
        is_put = call.verb == "put"

        def send(left_s: float) -> _T:
            inner = self._inner
            if self._limits_time:
                inner = cast("TimesOut", inner).within(left_s)
            return self._noting(lambda: request(inner))

        return call_with_retries(
            send,
            self._policy,
            place=self._limiter.slot,
            only_if_throttled=is_put and call.mode != "overwrite",
            # Who puts has looked before, maybe in another process.
            has_answered=lambda: self._has_answered or is_put,
            warn=self._warn,
            clock=self._clock,
            sleep=self._sleep,
            rng=self._rng,
        )

    def _send_once(self, call: Call, request: Callable[[Store], _T]) -> _T:
        """Leave all repetition to the engine, and take no place in the limiter.

        Parts may come from requests that need a place.
        """
        self._limiter.wait_for_pause()
        try:
            return self._noting(lambda: request(self._inner))
        except CheckpointError as error:
            if call.verb == "put_parts":
                error.refused = False  # the engine does not tell what became of earlier attempts
            raise

    def _noting(self, request: Callable[[], _T]) -> _T:
        try:
            answer = request()
        except StoreError as error:
            if error.throttled:
                self._limiter.note_throttle(error.retry_after_s)
            if error.throttled or not error.retryable:
                self._note_answer()
            raise
        self._limiter.note_success()
        self._note_answer()
        return answer

    def _warn(self, error: StoreError, left_s: float) -> None:
        """Tell of a failure that is followed by another try; of many, now and again of one."""
        now_s = self._clock()
        if self._told_s is None or now_s - self._told_s >= _QUIET_S:
            self._told_s = now_s
            logger.warning("%s; trying again for up to %.0f s", error.message, left_s)

    def _note_answer(self) -> None:
        if not self._has_answered:
            self._has_answered = True
            if self._place is not None:
                _answered.add(self._place)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._inner, self._policy, self._limiter)


def call_with_retries(
    request: Callable[[float], _T],
    policy: RetryPolicy,
    *,
    place: Callable[[], AbstractContextManager[None]] = nullcontext,
    only_if_throttled: bool = False,
    has_answered: Callable[[], bool] = lambda: True,
    warn: Callable[[StoreError, float], None] = lambda *_: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    rng: random.Random | None = None,
) -> _T:
    """Call until it succeeds, must not be repeated, or the policy gives up.

    Args:
        request: Takes the seconds that are left for this try; raises `StoreError` for what another
            try may change.
        policy: How long to keep trying.
        place: Held during each try. The wait for the first one is not part of the deadline.
        only_if_throttled: Repeat after no other error, however retryable.
        has_answered: Whether the server is known to be one.
        warn: Told of each failure that another try follows, and how many seconds are left.
        clock: Monotonic seconds.
        sleep: Called between attempts.
        rng: Source of the jitter.

    Raises:
        StoreError: The last one, with the number of attempts and the time they took.
    """
    rng = rng or random.Random()
    began_s = 0.0
    num_failures = 0
    is_unanswered = False
    said: dict[str, str] = {}  # the last message of each sort
    while True:
        try:
            with place():
                now_s = clock()
                if not num_failures:
                    began_s = now_s
                return request(began_s + policy.total_deadline_s - now_s)
        except CheckpointError as error:
            is_unanswered = is_unanswered or not error.refused
            error.refused = not is_unanswered
            if not isinstance(error, StoreError):
                raise
            num_failures += 1
            if not (error.throttled if only_if_throttled else error.retryable):
                raise
            spent_s = clock() - began_s
            delay_s = policy.delay_s(num_failures, rng.random(), error.retry_after_s)
            most_s = policy.total_deadline_s
            is_unknown = error.unreachable and not has_answered()
            if is_unknown:
                most_s = min(most_s, policy.unreachable_s)
            if num_failures >= policy.max_attempts or spent_s + delay_s >= most_s:
                hint = _CHECK_ADDRESS if is_unknown else ""
                raise _given_up(error, said, num_failures, spent_s, hint) from error
            said[_sort_of(error)] = error.message
            warn(error, most_s - spent_s)
        sleep(delay_s)


def read_twice_if_damaged(read: Callable[[], _T]) -> _T:
    """Read and check, and once more if that fails, in case bytes were damaged on the way.

    Raises:
        CorruptError: If the second answer is damaged, too.
    """
    try:
        return read()
    except CorruptError as error:
        logger.warning("%s; fetching it again in case it was damaged on the way", error)
        return read()


def _sort_of(error: StoreError) -> str:
    return re.sub(r"[\d.]+", "#", error.message)


_CHECK_ADDRESS = (
    ". Nothing there has answered this process before: check the endpoint, its scheme and its port"
)


def _given_up(
    error: StoreError, said: dict[str, str], num_attempts: int, spent_s: float, hint: str
) -> StoreError:
    tries = "1 attempt" if num_attempts == 1 else f"{num_attempts} attempts"
    gave_up = f"gave up after {tries} over {spent_s:.1f} s"
    others = [message for sort, message in said.items() if sort != _sort_of(error)]
    if others:
        # The deadline may have cut the last attempts short: that says little about the store.
        gave_up += f"; an attempt before: {others[-1]}"
    return error.saying(f"{error.message} ({gave_up}){hint}")


def copy_with_retries(request: Callable[[float], None], policy: RetryPolicy) -> None:
    """Repeat a copy on any retryable error: the same bytes land twice.

    A copy that must create finds its own object where an answer was lost: that is a success.

    Args:
        request: Copies, in the seconds that it is given.
        policy: How long to keep trying.

    Raises:
        AlreadyExistsError: If the object was there at the first try.
    """
    maybe_done = False

    def once(left_s: float) -> None:
        nonlocal maybe_done
        try:
            request(left_s)
        except AlreadyExistsError:
            if not maybe_done:
                raise
        except StoreError as error:
            maybe_done = maybe_done or (error.retryable and not error.throttled)
            raise

    call_with_retries(once, policy)
