"""A store that is as slow as a distant one."""

from __future__ import annotations

import threading
import time
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


_PAGE = 1000


class LatencyStore:
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
        self._inner = inner
        self._latency_s = latency_s
        self._bandwidth_bytes_s = bandwidth_bytes_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._line_free_at = 0.0

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

    def get(self, key: str) -> Fetched:
        """Fetch a whole object."""
        self._sleep(self._latency_s)
        fetched = self._inner.get(key)
        self._transfer(len(fetched.data))
        return fetched

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        """Fetch bytes ``[start, end)``."""
        if end > start:
            self._sleep(self._latency_s)
        data = self._inner.get_range(key, start, end)
        self._transfer(len(data))
        return data

    def fill(self, key: str, start: int, destination: Destination) -> None:
        """Fetch a range straight into memory of the caller's; only of an inner store that can."""
        self._sleep(self._latency_s)
        cast("FillsMemory", self._inner).fill(key, start, destination)
        self._transfer(destination.num_bytes)

    def head(self, key: str) -> ObjectInfo:
        """Look an object up without its bytes."""
        self._sleep(self._latency_s)
        return self._inner.head(key)

    def put(self, key: str, data: Buffer, *, mode: PutMode = "overwrite") -> str | None:
        """Store one object in one atomic request and return its ETag."""
        self._sleep(self._latency_s)
        self._transfer(as_bytes_view(data).nbytes)
        return self._inner.put(key, data, mode=mode)

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
        self._sleep(self._latency_s)
        inner.copy_from(origin, source_key, key, size_bytes=size_bytes, mode=mode)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below the folder ``prefix``."""
        self._sleep(self._latency_s)
        for number, info in enumerate(self._inner.list(prefix)):
            if number and number % _PAGE == 0:
                self._sleep(self._latency_s)
            yield info

    def delete_many(self, keys: Sequence[str]) -> None:
        """Delete objects; a missing one is no error."""
        self._sleep(self._latency_s)
        self._inner.delete_many(keys)

    def close(self) -> None:
        """Close the inner store."""
        self._inner.close()

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
        return _rebuild, (self._inner, self._latency_s, self._bandwidth_bytes_s)


def _rebuild(inner: Store, latency_s: float, bandwidth_bytes_s: float | None) -> LatencyStore:
    return LatencyStore(inner, latency_s=latency_s, bandwidth_bytes_s=bandwidth_bytes_s)
