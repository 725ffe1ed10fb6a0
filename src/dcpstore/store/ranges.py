"""Half-open byte ranges ``[start, end)``, how to join and cut them, and dense strides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class ByteRange(NamedTuple):
    """Bytes ``[start, end)`` of an object or a payload."""

    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Length of the range in bytes."""
        return self.end - self.start


def join(ranges: Iterable[ByteRange], *, max_gap_bytes: int = 0) -> list[ByteRange]:
    """Join ranges that overlap, touch, or lie at most ``max_gap_bytes`` apart.

    Returns:
        Disjoint ranges in ascending order. Empty ranges vanish.
    """
    joined: list[ByteRange] = []
    for one in sorted(r for r in ranges if r.end > r.start):
        if joined and one.start - joined[-1].end <= max_gap_bytes:
            joined[-1] = ByteRange(joined[-1].start, max(joined[-1].end, one.end))
        else:
            joined.append(one)
    return joined


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


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a dense row-major array, as torch gives them."""
    strides = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))
