"""Read many pieces of many objects once, in bounded memory, and look into each.

::

    caller     plans pieces, joins neighbours, takes budget | submits
    workers                                                 | GET, look into each piece

A piece that looks wrong is fetched once more, in case it was damaged on the way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from dcpstore.audit.findings import Finding
from dcpstore.budget import ByteBudget, Cancelled, bytes_in_flight
from dcpstore.config import ReadConfig
from dcpstore.errors import CheckpointError, CorruptError, NotFoundError, StoreError
from dcpstore.progress import Meter
from dcpstore.ranges import ByteRange
from dcpstore.store.base import Store

__all__ = ["Piece", "ScanStats", "Scanner", "loss_of"]


class Piece(Protocol):
    """Bytes of an object that can be judged by themselves."""

    @property
    def key(self) -> str:
        """The object."""

    @property
    def span(self) -> ByteRange:
        """Its bytes in the object."""

    def inspect(self, data: memoryview) -> Iterable[Finding]:
        """Judge the bytes of `span`. Called by any thread, twice if it finds something."""


@dataclass(frozen=True, slots=True)
class ScanStats:
    """What a scan did.

    Attributes:
        num_requests: Ranged GETs, retries not counted.
        fetched_bytes: Bytes asked for.
        peak_bytes: Most fetched bytes held at a time.
    """

    num_requests: int
    fetched_bytes: int
    peak_bytes: int


class Scanner:
    """One pass over pieces of objects.

    Args:
        store: Rooted at the checkpoint's folder.
        config: Bounds of requests and memory.
        meter: Counts the bytes looked at.
    """

    def __init__(self, store: Store, config: ReadConfig, meter: Meter) -> None:
        self._store = store
        self._config = config
        self._meter = meter
        self._budget = ByteBudget(bytes_in_flight(config.budget_bytes))
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self._findings: list[Finding] = []
        self._lost_keys: set[str] = set()
        self._num_requests = 0
        self._fetched_bytes = 0

    @property
    def max_requests(self) -> int:
        """Requests in flight."""
        return self._config.max_requests

    @property
    def stats(self) -> ScanStats:
        """What was done so far."""
        return ScanStats(self._num_requests, self._fetched_bytes, self._budget.peak_bytes)

    def run(self, pieces: Iterable[Piece]) -> list[Finding]:
        """Look into all pieces; return what was found, in no order.

        Pieces that follow each other in an object are fetched together, up to
        ``request_bytes``.

        Raises:
            StoreError: If the store fails for good in a way that concerns no single object.
        """
        self._findings = []
        executor = ThreadPoolExecutor(self._config.max_requests, "dcpstore-audit")
        try:
            for window in _join(pieces, self._config.request_bytes):
                self._submit(executor, window)
        except Cancelled:
            pass
        except BaseException:
            self._stopped.set()
            raise
        finally:
            executor.shutdown(wait=True)
        if self._error is not None:
            raise self._error
        return self._findings

    def _submit(self, executor: ThreadPoolExecutor, window: list[Piece]) -> None:
        num_bytes = window[-1].span.end - window[0].span.start
        self._budget.acquire(num_bytes, cancelled=self._stopped.is_set)
        executor.submit(self._serve, window, num_bytes)

    def _serve(self, window: list[Piece], num_bytes: int) -> None:
        try:
            if not self._stopped.is_set() and window[0].key not in self._lost_keys:
                found = self._look(window) and self._look(window)
                with self._lock:
                    self._findings.extend(found)
        except (CorruptError, NotFoundError, StoreError) as error:
            self._give_up(window, error)
        except BaseException as error:  # noqa: BLE001 - kept, and raised again by the caller
            self._stop(error)
        finally:
            self._meter.advance(num_bytes)
            self._budget.release(num_bytes)

    def _look(self, window: list[Piece]) -> list[Finding]:
        start, end = window[0].span.start, window[-1].span.end
        with self._lock:
            self._num_requests += 1
            self._fetched_bytes += end - start
        data = self._store.get_range(window[0].key, start, end)
        found: list[Finding] = []
        for piece in window:
            found += piece.inspect(data[piece.span.start - start : piece.span.end - start])
        return found

    def _give_up(self, window: list[Piece], error: CheckpointError) -> None:
        """Note that an object is lost; but a store that is down concerns all objects."""
        if isinstance(error, StoreError) and error.retryable:
            self._stop(error)
            return
        key = window[0].key
        with self._lock:
            if key in self._lost_keys:
                return
            self._lost_keys.add(key)
            span = ByteRange(window[0].span.start, window[-1].span.end)
            self._findings.append(loss_of(key, span, error))

    def _stop(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
        self._stopped.set()


def loss_of(key: str, span: ByteRange, error: CheckpointError) -> Finding:
    """Return the finding that an object, or bytes of it, could not be read."""
    if isinstance(error, NotFoundError):
        return Finding("missing", f"it was deleted while it was looked at: {error}", key)
    if isinstance(error, CorruptError):
        return Finding("truncated", str(error), key, span=span)
    return Finding("unreadable", str(error), key, span=span)


def _join(pieces: Iterable[Piece], request_bytes: int) -> Iterator[list[Piece]]:
    """Put pieces that touch into one request, as long as it stays small enough."""
    window: list[Piece] = []
    for piece in pieces:
        if window and not _fits(window, piece, request_bytes):
            yield window
            window = []
        window.append(piece)
    if window:
        yield window


def _fits(window: list[Piece], piece: Piece, request_bytes: int) -> bool:
    first, last = window[0], window[-1]
    return (
        piece.key == first.key
        and piece.span.start == last.span.end
        and piece.span.end - first.span.start <= request_bytes
    )
