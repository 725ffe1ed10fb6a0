"""The bytes of objects, front to back, and the checks that they pass.

Ranges of all objects are fetched ahead, across the ends of objects, so that many small
ones cost no more waiting than a large one::

    requests   | a[0:4M] a[4M:8M] b[0:1M] c[0:4M] ... |   in flight, bounded by the budget
    caller     | a[0:4M] -> part of a | a[4M:8M] -> ...    in order, checksummed on the way
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from dcpstore.config import ReadConfig
from dcpstore.errors import CorruptError
from dcpstore.format.checksum import BlockChecksummer, crc32c
from dcpstore.manifest import StoredItem
from dcpstore.ranges import ByteRange, cut, join
from dcpstore.store.base import Store

__all__ = ["CopyTask", "ObjectCheck", "pass_ranges", "pass_through"]

_JOIN_BYTES = 1 << 20  # reading as much for nothing costs less than a request


@dataclass(frozen=True, slots=True, eq=False)
class CopyTask:
    """One object to copy.

    Attributes:
        source_key: Its key in the source.
        key: Its key in the target.
        size_bytes: Its length.
        items: What lies in it, as far as the manifest has checksums.
    """

    source_key: str
    key: str
    size_bytes: int
    items: tuple[StoredItem, ...] = ()

    def unproven(self) -> list[ByteRange]:
        """Return the ranges that hold every byte of which no item has a checksum."""
        proven = join(item.payload for item in self.items)
        edges = [0, *(edge for span in proven for edge in span), self.size_bytes]
        gaps = map(ByteRange, edges[::2], edges[1::2])
        return join(gaps, max_gap_bytes=_JOIN_BYTES)


@dataclass(slots=True)
class _Running:
    item: StoredItem
    checksummer: BlockChecksummer


@dataclass(slots=True)
class ObjectCheck:
    """Checks the bytes of one object as they pass, front to back.

    Attributes:
        where: The object's URL, for messages.
        key: The object.
        items: Its items that have checksums.
        spans: Which bytes `crc32c` is of, in ascending order; all of them where None.
        crc32c: Of the bytes so far.
    """

    where: str
    key: str
    items: Sequence[StoredItem]
    spans: Sequence[ByteRange] | None = None
    crc32c: int = 0
    _at: int = 0
    _waiting: deque[StoredItem] = field(default_factory=deque)
    _running: list[_Running] = field(default_factory=list)

    def __post_init__(self) -> None:
        held = [item for item in self.items if item.payload.num_bytes]
        self._waiting.extend(sorted(held, key=lambda item: item.payload))

    def update(self, data: memoryview) -> None:
        """Take the next bytes.

        Raises:
            CorruptError: If an item that ended in them is not what was saved.
        """
        end = self._at + len(data)
        for start, stop in [(self._at, end)] if self.spans is None else self.spans:
            if start < end and stop > self._at:
                first, last = max(start, self._at), min(stop, end)
                self.crc32c = crc32c(data[first - self._at : last - self._at], self.crc32c)
        while self._waiting and self._waiting[0].payload.start < end:
            item = self._waiting.popleft()
            self._running.append(_Running(item, BlockChecksummer(item.block_bytes)))
        for running in self._running:
            span = running.item.payload
            first, last = max(span.start, self._at), min(span.end, end)
            running.checksummer.update(data[first - self._at : last - self._at])
            if span.end <= end:
                self._compare(running)
        self._running = [one for one in self._running if one.item.payload.end > end]
        self._at = end

    def _compare(self, running: _Running) -> None:
        item, found = running.item, running.checksummer.finish()
        assert item.checksums is not None
        if np.array_equal(found, item.checksums):
            return
        bad = int(np.argmax(found != item.checksums)) if len(found) == len(item.checksums) else 0
        start = item.payload.start + bad * item.block_bytes
        end = min(start + item.block_bytes, item.payload.end)
        raise CorruptError(
            f"{self.where}: object {self.key}, bytes [{start}, {end}) are not the bytes that were"
            " saved (CRC32C differs)",
            key=self.key,
            start=start,
            end=end,
        )


@contextmanager
def pass_through(
    store: Store, objects: Iterable[tuple[str, int]], config: ReadConfig
) -> Iterator[Iterator[tuple[str, memoryview]]]:
    """Give an iterator over the bytes of objects, each front to back, fetched ahead.

    Args:
        store: Where they lie.
        objects: Key and size of each; an empty one yields one empty piece.
        config: Half of its budget is asked for at a time.

    Raises:
        NotFoundError: If an object is gone.
        CorruptError: If one is shorter than its size.
    """
    ranges = ((key, ByteRange(0, size_bytes)) for key, size_bytes in objects)
    with pass_ranges(store, ranges, config) as pieces:
        yield pieces


@contextmanager
def pass_ranges(
    store: Store, ranges: Iterable[tuple[str, ByteRange]], config: ReadConfig
) -> Iterator[Iterator[tuple[str, memoryview]]]:
    """As `pass_through`, of ranges of objects."""
    max_ahead = max(1, min(config.max_requests, config.budget_bytes // 2 // config.request_bytes))
    executor = ThreadPoolExecutor(max_ahead, "dcpstore-pass")
    try:
        fetches = (
            (key, executor.submit(store.get_range, key, *span))
            for key, span in _requests(ranges, config.request_bytes)
        )
        yield _in_order(fetches, max_ahead)
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _in_order(
    fetches: Iterator[tuple[str, Future[memoryview]]], max_ahead: int
) -> Iterator[tuple[str, memoryview]]:
    """Yield what was fetched; with what the caller works on, ``max_ahead`` pieces are held."""
    ahead = deque(islice(fetches, max_ahead))
    while ahead:
        key, future = ahead.popleft()
        yield key, future.result()
        del future
        ahead.extend(islice(fetches, 1))


def _requests(
    ranges: Iterable[tuple[str, ByteRange]], request_bytes: int
) -> Iterator[tuple[str, ByteRange]]:
    for key, whole in ranges:
        for span in list(cut(whole, request_bytes)) or [whole]:
            yield key, span
