"""A store that remembers what was asked of it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from dcpstore.store.limits import as_bytes_view, num_bytes_of, pieces_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from typing_extensions import Buffer

    from dcpstore.store.base import (
        Capabilities,
        Destination,
        Fetched,
        FillsMemory,
        ObjectInfo,
        Part,
        PutMode,
        Store,
    )
    from dcpstore.store.server_copy import CopyMode, Origin, ServerCopies


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


class _Open:
    """A call under way."""

    def __init__(self, verb: str, key: str) -> None:
        self.verb = verb
        self.key = key
        self.num_bytes = 0
        self.start: int | None = None
        self.end: int | None = None
        self.mode: str | None = None


class RecordingStore:
    """A `Store` that passes everything on and keeps a list of requests. Thread-safe.

    Args:
        inner: The store that does the work.
        clock: Monotonic seconds.
    """

    def __init__(self, inner: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._inner = inner
        self._clock = clock
        self._lock = threading.Lock()
        self._requests: list[StoreRequest] = []
        self._num_in_flight = 0
        self._peak_in_flight = 0

    @property
    def inner(self) -> Store:
        """The store that does the work."""
        return self._inner

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
    def peak_in_flight(self) -> int:
        """The most requests that were under way at one time."""
        return self._peak_in_flight

    @property
    def num_bytes_fetched(self) -> int:
        """Bytes that ``get`` and ``get_range`` brought."""
        return sum(r.num_bytes for r in self.requests if r.verb in ("get", "get_range"))

    @property
    def num_bytes_put(self) -> int:
        """Bytes that ``put`` and ``put_parts`` sent."""
        return sum(r.num_bytes for r in self.requests if r.verb in ("put", "put_parts"))

    def clear(self) -> None:
        """Forget the requests and the peak so far."""
        with self._lock:
            self._requests.clear()
            self._peak_in_flight = self._num_in_flight

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
        with self._record("get", key) as call:
            fetched = self._inner.get(key)
            call.num_bytes = len(fetched.data)
            return fetched

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        """Fetch bytes ``[start, end)``."""
        with self._record("get_range", key) as call:
            call.start, call.end = start, end
            data = self._inner.get_range(key, start, end)
            call.num_bytes = len(data)
            return data

    def fill(self, key: str, start: int, destination: Destination) -> None:
        """Fetch a range straight into the caller's memory: on the wire, a ``get_range``."""
        with self._record("get_range", key) as call:
            call.start, call.end = start, start + destination.num_bytes
            cast("FillsMemory", self._inner).fill(key, start, destination)
            call.num_bytes = destination.num_bytes

    def head(self, key: str) -> ObjectInfo:
        """Look an object up without its bytes."""
        with self._record("head", key):
            return self._inner.head(key)

    def put(self, key: str, data: Buffer, *, mode: PutMode = "overwrite") -> str | None:
        """Store one object in one atomic request and return its ETag."""
        with self._record("put", key) as call:
            call.num_bytes = as_bytes_view(data).nbytes
            call.mode = mode if isinstance(mode, str) else "match"
            return self._inner.put(key, data, mode=mode)

    def put_parts(
        self, key: str, parts: Iterable[Part], *, part_bytes: int, max_concurrency: int
    ) -> str | None:
        """Store one large object from parts, several in flight, and return its ETag."""
        with self._record("put_parts", key) as call:
            return self._inner.put_parts(
                key,
                _counting(parts, call),
                part_bytes=part_bytes,
                max_concurrency=max_concurrency,
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
        """Let the provider copy an object; only of an inner store that can."""
        inner = cast("ServerCopies", self._inner)
        with self._record("copy_from", key) as call:
            inner.copy_from(origin, source_key, key, size_bytes=size_bytes, mode=mode)
            call.mode = mode

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below the folder ``prefix``."""
        with self._record("list", prefix) as call:
            for info in self._inner.list(prefix):
                call.num_bytes += 1
                yield info

    def delete_many(self, keys: Sequence[str]) -> None:
        """Delete objects; a missing one is no error."""
        with self._record("delete_many", keys[0] if keys else "") as call:
            call.num_bytes = len(keys)
            self._inner.delete_many(keys)

    def close(self) -> None:
        """Close the inner store."""
        self._inner.close()

    @contextmanager
    def _record(self, verb: str, key: str) -> Iterator[_Open]:
        call = _Open(verb, key)
        with self._lock:
            self._num_in_flight += 1
            num_in_flight = self._num_in_flight
            self._peak_in_flight = max(self._peak_in_flight, num_in_flight)
        begin_s = self._clock()
        failure: str | None = None
        try:
            yield call
        except BaseException as error:
            failure = type(error).__name__
            raise
        finally:
            entry = StoreRequest(
                verb=call.verb,
                key=call.key,
                start=call.start,
                end=call.end,
                num_bytes=call.num_bytes,
                num_in_flight=num_in_flight,
                mode=call.mode,
                error=failure,
                begin_s=begin_s,
                end_s=self._clock(),
            )
            with self._lock:
                self._num_in_flight -= 1
                self._requests.append(entry)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._inner,)


def _counting(parts: Iterable[Part], call: _Open) -> Iterator[Part]:
    for part in parts:
        call.num_bytes += num_bytes_of(pieces_of(part))
        yield part
        del part
