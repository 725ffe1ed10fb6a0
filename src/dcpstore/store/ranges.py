"""How to join and cut byte ranges."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from dcpstore.store.base import ByteRange

T = TypeVar("T")


def group(
    items: Iterable[T],
    span_of: Callable[[T], ByteRange],
    *,
    max_gap_bytes: int = 0,
    max_bytes: Callable[[], int] = lambda: sys.maxsize,
    may_overlap: bool = True,
) -> Iterator[tuple[ByteRange, list[T]]]:
    """Put neighbours together: those that overlap, touch, or lie close to each other.

    Args:
        items: In any order; one that starts before its group does begins another.
        span_of: Says where an item lies.
        max_gap_bytes: Widest hole between an item and the group that it joins.
        max_bytes: Asked for each group how long it may become. A longer item is alone.
        may_overlap: Whether items that overlap may be in one group.

    Returns:
        What each group spans, and its items in their order.
    """
    found: list[T] = []
    start = end = most_bytes = 0
    for item in items:
        first, last = span_of(item)
        least = start if may_overlap else end
        is_near = found and least <= first <= end + max_gap_bytes
        if is_near and max(end, last) - start <= most_bytes:
            found.append(item)
            end = max(end, last)
            continue
        if found:
            yield ByteRange(start, end), found
        found, start, end, most_bytes = [item], first, last, max_bytes()
    if found:
        yield ByteRange(start, end), found


def join(ranges: Iterable[ByteRange], *, max_gap_bytes: int = 0) -> list[ByteRange]:
    """Join ranges that overlap, touch, or lie at most ``max_gap_bytes`` apart.

    Returns:
        Disjoint ranges in ascending order. Empty ranges vanish.
    """
    ordered = sorted(one for one in ranges if one.end > one.start)
    return [whole for whole, _ in group(ordered, lambda one: one, max_gap_bytes=max_gap_bytes)]


def cut(whole: ByteRange, max_bytes: int, *, align_bytes: int = 1) -> Iterator[ByteRange]:
    """Cut a range into pieces of at most ``max_bytes``.

    Inner cuts lie at multiples of ``align_bytes`` counted from byte 0, so that a
    checksum block that starts on such a multiple is never split.

    Raises:
        ValueError: If ``max_bytes`` is less than ``align_bytes``.
    """
    if max_bytes < align_bytes:
        raise ValueError(f"max_bytes={max_bytes} is less than align_bytes={align_bytes}")
    start = whole.start
    while start < whole.end:
        end = min(whole.end, (start + max_bytes) // align_bytes * align_bytes)
        yield ByteRange(start, max(end, start + 1))
        start = end


def round_out(inner: ByteRange, block_bytes: int, limit: int) -> ByteRange:
    """Widen a range to multiples of ``block_bytes``, but not past ``limit``."""
    start = inner.start // block_bytes * block_bytes
    end = -(-inner.end // block_bytes) * block_bytes
    return ByteRange(start, min(end, limit))
