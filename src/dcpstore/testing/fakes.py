"""Stores around another store, for tests: one that fails by a script, a slow one, a recorder."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar, cast

from dcpstore.errors import CheckpointError, StoreError
from dcpstore.store.base import (
    Destination,
    Fetched,
    FillsMemory,
    ObjectInfo,
    Part,
    Store,
    Tail,
    num_bytes_of,
    pieces_of,
)
from dcpstore.store.retry import Call, WrappedStore

_T = TypeVar("_T")
_PAGE = 1000  # objects that one request of a list shows
FaultKind = Literal[
    "error", "denied", "throttle", "lost_ack", "crash", "crash_after", "short", "long", "flip"
]


class Crashed(StoreError):
    """The process that used the store is dead, as far as the store can tell."""


@dataclass(frozen=True, slots=True)
class StoreFault:
    """What to do to some requests.

    Attributes:
        kind: ``error`` fails without doing anything, retryably; ``denied`` the same,
            for want of rights; ``throttle`` the same, asking to wait
            `retry_after_s`; ``lost_ack`` does what was asked and then fails;
            ``crash`` does nothing, and every later request fails too; ``crash_after``
            does what was asked first; ``short``, ``long`` and ``flip`` spoil the
            answer of a ``get``, ``get_range`` or ``get_tail``.
        verb: Which verb; None for any.
        key: A part of the key; empty for any.
        at: Take the requests that match from this one on, counted from 0.
        times: How many of them; None for all.
        num_bytes: How many bytes ``short`` cuts off or ``long`` adds.
        bit: Which bit of the answer ``flip`` turns.
        retry_after_s: For ``throttle``.
        after_parts: For a ``put_parts``: fail when so many parts have been taken; None
            before it begins.
    """

    kind: FaultKind
    verb: str | None = None
    key: str = ""
    at: int = 0
    times: int | None = 1
    num_bytes: int = 1
    bit: int = 0
    retry_after_s: float | None = None
    after_parts: int | None = None


class FaultyStore(WrappedStore):
    """A `Store` that follows a script of faults. Thread-safe.

    Each fault counts the requests that match its verb and key; the first one whose
    turn it is takes the request, and those behind it do not count it. A script may be
    extended while the store is in use.

    Args:
        inner: The store that does the work.
        script: The faults.
        stale_keys: Keys that ``list`` does not show yet.
    """

    def __init__(
        self, inner: Store, script: Iterable[StoreFault] = (), *, stale_keys: Iterable[str] = ()
    ) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._script = list(script)
        self._num_seen = [0] * len(self._script)
        self._stale_keys = frozenset(stale_keys)
        self.is_dead = False
        """Whether a crash has happened."""
        self.num_requests = 0
        """How many requests came, those that failed included."""

    def add(self, fault: StoreFault) -> None:
        """Append a fault to the script."""
        with self._lock:
            self._script.append(fault)
            self._num_seen.append(0)

    def revive(self) -> None:
        """Forget the crash and the script."""
        with self._lock:
            self._script.clear()
            self._num_seen.clear()
            self.is_dead = False

    def fill(self, key: str, start: int, destination: Destination) -> None:
        """Fetch a range straight into the caller's memory; a ``get_range`` to the script."""

        def request(inner: Store) -> Destination:
            cast("FillsMemory", inner).fill(key, start, destination)
            return destination

        self._pass(Call("get_range", key), request)

    def put_parts(
        self, key: str, parts: Iterable[Part], *, part_bytes: int, max_concurrency: int
    ) -> str | None:
        """Store one large object from parts, several in flight, and return its ETag."""
        fault = self._take("put_parts", key)

        def failing() -> Iterator[Part]:
            for number, part in enumerate(parts):
                self._check_alive("put_parts", key)
                if fault is not None and fault.after_parts == number:
                    raise self._failure(fault, "put_parts", key)
                yield part
                del part

        def request(inner: Store) -> str | None:
            return inner.put_parts(
                key, failing(), part_bytes=part_bytes, max_concurrency=max_concurrency
            )

        if fault is not None and fault.after_parts is not None:
            return request(self._inner)
        return self._do(fault, Call("put_parts", key), request)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below the folder ``prefix``, but the stale ones."""
        for info in super().list(prefix):
            self._check_alive("list", prefix)
            if info.key not in self._stale_keys:
                yield info

    def _pass(self, call: Call, request: Callable[[Store], _T]) -> _T:
        return self._do(self._take(call.verb, call.key), call, request)

    def _do(self, fault: StoreFault | None, call: Call, request: Callable[[Store], _T]) -> _T:
        if fault is None:
            return request(self._inner)
        if fault.kind in ("short", "long", "flip"):
            return cast("_T", _spoilt(request(self._inner), call, fault))
        if fault.kind in ("lost_ack", "crash_after"):
            with suppress(CheckpointError):  # a refusal is an answer too, and is lost
                request(self._inner)
        raise self._failure(fault, call.verb, call.key)

    def _take(self, verb: str, key: str) -> StoreFault | None:
        with self._lock:
            self.num_requests += 1
            self._check_alive(verb, key)
            for number, fault in enumerate(self._script):
                if fault.verb not in (None, verb) or fault.key not in key:
                    continue
                seen = self._num_seen[number]
                self._num_seen[number] += 1
                if seen >= fault.at and (fault.times is None or seen < fault.at + fault.times):
                    return fault
        return None

    def _check_alive(self, verb: str, key: str) -> None:
        if self.is_dead:
            raise Crashed(f"{verb} {key!r}: the process has crashed", key=key)

    def _failure(self, fault: StoreFault, verb: str, key: str) -> StoreError:
        if fault.kind in ("crash", "crash_after"):
            with self._lock:
                self.is_dead = True
        return _failure(fault, verb, key)

    def __reduce__(self) -> tuple[Any, ...]:
        made = partial(type(self), stale_keys=self._stale_keys)
        return made, (self._inner, tuple(self._script))


def _failure(fault: StoreFault, verb: str, key: str) -> StoreError:
    asked = f"{verb} {key!r}"
    if fault.kind in ("crash", "crash_after"):
        return Crashed(f"{asked}: the process crashes here (scripted)", key=key)
    if fault.kind == "denied":
        return StoreError(
            f"{asked} failed: access is denied (scripted)", key=key, denied=True, refused=True
        )
    if fault.kind == "throttle":
        return StoreError(
            f"{asked} failed: 503 SlowDown (scripted)",
            key=key,
            retryable=True,
            throttled=True,
            retry_after_s=fault.retry_after_s,
        )
    return StoreError(f"{asked} failed: {fault.kind} (scripted)", key=key, retryable=True)


def _spoilt(answer: object, call: Call, fault: StoreFault) -> object:
    """Return a damaged answer of a get of any kind; others as they are.

    ``short`` and ``long`` ranges and tails are what an engine makes of them: a retryable error.
    """
    if isinstance(answer, Fetched):
        return Fetched(_spoil(answer.data, fault), answer.etag)
    if isinstance(answer, memoryview | Destination | Tail) and fault.kind != "flip":
        raise _failure(fault, call.verb, call.key)
    if isinstance(answer, Tail):
        return replace(answer, data=_spoil(answer.data, fault))
    if isinstance(answer, memoryview):
        return _spoil(answer, fault)
    if isinstance(answer, Destination):
        at, bit = divmod(fault.bit % (8 * answer.num_bytes), 8)
        with answer.writing(lambda: None) as pieces:
            for piece in pieces:
                if 0 <= at < len(piece):
                    piece[at] ^= 1 << bit
                at -= len(piece)
    return answer


def _spoil(data: memoryview, fault: StoreFault) -> memoryview:
    changed = bytearray(data)
    if fault.kind == "short":
        del changed[max(0, len(changed) - fault.num_bytes) :]
    elif fault.kind == "long":
        changed += b"\0" * fault.num_bytes
    elif changed:
        at = fault.bit // 8 % len(changed)
        changed[at] ^= 1 << (fault.bit % 8)
    return memoryview(changed).toreadonly()


class LatencyStore(WrappedStore):
    """A `Store` that waits before it passes a request on. Thread-safe.

    Each request waits `latency_s`; its body then takes its turn on one line of
    `bandwidth_bytes_s` that all requests share, so that concurrency hides latency
    but makes no bandwidth. Parts of ``put_parts`` wait one after another.

    Args:
        inner: The store that does the work.
        latency_s: Time before each request, and before each page of a list.
        bandwidth_bytes_s: Bytes per second of the shared line; None for no limit.
        clock: Monotonic seconds.
        sleep: Called outside any lock.
    """

    def __init__(
        self,
        inner: Store,
        *,
        latency_s: float = 0.0,
        bandwidth_bytes_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self._latency_s = latency_s
        self._bandwidth_bytes_s = bandwidth_bytes_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._line_free_at = 0.0

    def put_parts(
        self, key: str, parts: Iterable[Part], *, part_bytes: int, max_concurrency: int
    ) -> str | None:
        """Store one large object from parts, several in flight, and return its ETag."""

        def slowly() -> Iterator[Part]:
            for part in parts:
                self._sleep(self._latency_s / max_concurrency)
                self._transfer(num_bytes_of(pieces_of(part)))
                yield part
                del part

        return self._inner.put_parts(
            key, slowly(), part_bytes=part_bytes, max_concurrency=max_concurrency
        )

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below the folder ``prefix``."""
        for number, info in enumerate(super().list(prefix)):
            if number and number % _PAGE == 0:
                self._sleep(self._latency_s)
            yield info

    def _pass(self, call: Call, request: Callable[[Store], _T]) -> _T:
        if call.start is None or call.start != call.end:
            self._sleep(self._latency_s)
        if call.verb == "put":
            self._transfer(call.num_bytes)
        answer = request(self._inner)
        self._transfer(_answered_bytes(call, answer))
        return answer

    def _transfer(self, num_bytes: int) -> None:
        if self._bandwidth_bytes_s is None or not num_bytes:
            return
        with self._lock:
            now = self._clock()
            begin = max(now, self._line_free_at)
            self._line_free_at = begin + num_bytes / self._bandwidth_bytes_s
            wait_s = self._line_free_at - now
        self._sleep(wait_s)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r}, latency_s={self._latency_s})"

    def __reduce__(self) -> tuple[Any, ...]:
        made = partial(
            type(self), latency_s=self._latency_s, bandwidth_bytes_s=self._bandwidth_bytes_s
        )
        return made, (self._inner,)


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """One call of a verb.

    Attributes:
        verb: Name of the method; ``get_range`` for a ``fill``, which sends the same request.
        key: The key, the prefix, or the first of several keys.
        start: First byte asked for by ``get_range``; None for other verbs.
        end: End of the range (exclusive).
        num_bytes: Bytes of the body or of the answer; keys of a ``delete_many``,
            objects of a ``list``.
        num_in_flight: Calls under way when this one began, itself included.
        mode: ``overwrite``, ``create`` or ``match`` for a ``put`` or ``copy_from``; None for
            others.
        error: Name of the error's class; None for success.
        begin_s: When it began, on the recorder's clock.
        end_s: When it ended.
    """

    verb: str
    key: str
    start: int | None
    end: int | None
    num_bytes: int
    num_in_flight: int
    mode: str | None
    error: str | None
    begin_s: float
    end_s: float


class RecordingStore(WrappedStore):
    """A `Store` that passes everything on and keeps a list of requests. Thread-safe.

    Args:
        inner: The store that does the work.
        clock: Monotonic seconds.
    """

    def __init__(self, inner: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(inner)
        self._clock = clock
        self._lock = threading.Lock()
        self._requests: list[StoreRequest] = []
        self._num_in_flight = 0
        self.peak_in_flight = 0
        """The most requests that were under way at one time."""

    @property
    def requests(self) -> list[StoreRequest]:
        """A copy of the requests so far, in the order in which they ended."""
        with self._lock:
            return list(self._requests)

    @property
    def counts(self) -> Counter[str]:
        """How many requests of each verb were made."""
        return Counter(request.verb for request in self.requests)

    @property
    def num_bytes_fetched(self) -> int:
        """Bytes that ``get``, ``get_range`` and ``get_tail`` brought."""
        gets = ("get", "get_range", "get_tail")
        return sum(r.num_bytes for r in self.requests if r.verb in gets)

    @property
    def num_bytes_put(self) -> int:
        """Bytes that ``put`` and ``put_parts`` sent."""
        return sum(r.num_bytes for r in self.requests if r.verb in ("put", "put_parts"))

    def clear(self) -> None:
        """Forget the requests and the peak so far."""
        with self._lock:
            self._requests.clear()
            self.peak_in_flight = self._num_in_flight

    def put_parts(
        self, key: str, parts: Iterable[Part], *, part_bytes: int, max_concurrency: int
    ) -> str | None:
        """Store one large object from parts, several in flight, and return its ETag."""
        with self._record(Call("put_parts", key)) as call:

            def counting() -> Iterator[Part]:
                for part in parts:
                    call.num_bytes += num_bytes_of(pieces_of(part))
                    yield part
                    del part

            return self._inner.put_parts(
                key, counting(), part_bytes=part_bytes, max_concurrency=max_concurrency
            )

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below the folder ``prefix``."""
        with self._record(Call("list", prefix)) as call:
            for info in self._inner.list(prefix):
                call.num_bytes += 1
                yield info

    def _pass(self, call: Call, request: Callable[[Store], _T]) -> _T:
        with self._record(call):
            answer = request(self._inner)
            call.num_bytes += _answered_bytes(call, answer)
            return answer

    @contextmanager
    def _record(self, call: Call) -> Iterator[Call]:
        with self._lock:
            self._num_in_flight += 1
            num_in_flight = self._num_in_flight
            self.peak_in_flight = max(self.peak_in_flight, num_in_flight)
        begin_s = self._clock()
        failure: str | None = None
        try:
            yield call
        except BaseException as error:
            failure = type(error).__name__
            raise
        finally:
            end_s = self._clock()
            with self._lock:
                self._num_in_flight -= 1
                self._requests.append(
                    StoreRequest(
                        **asdict(call),
                        num_in_flight=num_in_flight,
                        error=failure,
                        begin_s=begin_s,
                        end_s=end_s,
                    )
                )


def _answered_bytes(call: Call, answer: object) -> int:
    """Return how many bytes the answer to a get of any kind brought."""
    if isinstance(answer, Fetched | Tail):
        return len(answer.data)
    return 0 if call.start is None or call.end is None else max(0, call.end - call.start)
