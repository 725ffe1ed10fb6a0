"""Boxes of a chunk as byte spans.

A chunk is stored row-major. A box of it (``offsets``, ``sizes``) is a set of runs of
consecutive bytes; `bands` cuts the box into sub-boxes whose runs lie close together,
each small enough for one request::

    chunk 4 x 8, box [1:4, 2:5]        bytes of the chunk, row by row
    . . . . . . . .                    ................
    . . # # # . . .                    ..###.....###.....###...
    . . # # # . . .                      |-- span of the box --|
    . . # # # . . .
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dcpstore.store.ranges import ByteRange, cut, row_major_strides


@dataclass(frozen=True, slots=True)
class Box:
    """A sub-box of a chunk.

    Attributes:
        offsets: First element in each dimension of the chunk.
        sizes: Elements in each dimension.
        span: From its first to its last byte in the chunk's payload, holes included.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    span: ByteRange


def is_one_run(chunk_sizes: Sequence[int], box_sizes: Sequence[int]) -> bool:
    """Tell whether a box is one run of consecutive elements of its chunk."""
    ragged = False  # seen, from the inside out, a dimension that the box does not fill
    for chunk_size, box_size in zip(reversed(chunk_sizes), reversed(box_sizes), strict=True):
        if ragged and box_size > 1:
            return False
        ragged = ragged or box_size != chunk_size
    return True


def span_of(
    strides: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], item_bytes: int
) -> ByteRange:
    """Return the bytes from the first to the last element of a non-empty box."""
    first = sum(o * s for o, s in zip(offsets, strides, strict=True))
    last = first + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    return ByteRange(first * item_bytes, (last + 1) * item_bytes)


def spacing(
    chunk_sizes: Sequence[int], box_sizes: Sequence[int], item_bytes: int
) -> tuple[int, int] | None:
    """Return how many bytes of a box's span are its own every how many; the same if all are.

    Returns:
        None if its runs do not all lie equally far apart.
    """
    levels = [(1, 1)]  # from the inside out: so many, so far apart, in elements
    strides = row_major_strides(tuple(chunk_sizes))
    for size, stride in zip(reversed(box_sizes), reversed(strides), strict=True):
        count, step = levels[-1]
        if size > 1 and stride == count * step:
            levels[-1] = (count * size, step)
        elif size > 1:
            levels.append((size, stride))
    if len(levels) > 2:
        return None
    run = levels[0][0]
    return run * item_bytes, (levels[1][1] if len(levels) == 2 else run) * item_bytes


def runs(
    chunk_sizes: Sequence[int],
    offsets: Sequence[int],
    sizes: Sequence[int],
    item_bytes: int,
    *,
    max_bytes: int,
    align_bytes: int,
) -> Iterator[Box]:
    """Cut a box that is one run into one-dimensional boxes over the flattened chunk.

    Inner cuts lie at multiples of ``align_bytes`` of the payload.
    """
    whole = span_of(row_major_strides(tuple(chunk_sizes)), offsets, sizes, item_bytes)
    for piece in cut(whole, max(max_bytes, align_bytes), align_bytes=align_bytes):
        first = piece.start // item_bytes
        yield Box((first,), (piece.num_bytes // item_bytes,), piece)


def bands(
    chunk_sizes: Sequence[int],
    offsets: Sequence[int],
    sizes: Sequence[int],
    item_bytes: int,
    *,
    max_bytes: int,
    max_gap_bytes: int,
) -> Iterator[Box]:
    """Cut a box into sub-boxes whose span is at most ``max_bytes``.

    Holes of more than ``max_gap_bytes`` between two runs are never spanned. A single
    element larger than ``max_bytes`` is its own sub-box. An empty box yields nothing.
    """
    if 0 in sizes:
        return
    strides = row_major_strides(tuple(chunk_sizes))
    yield from _bands(strides, tuple(offsets), tuple(sizes), item_bytes, max_bytes, max_gap_bytes)


def _bands(
    strides: tuple[int, ...],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    item_bytes: int,
    max_bytes: int,
    max_gap_bytes: int,
) -> Iterator[Box]:
    axis = next((a for a, size in enumerate(sizes) if size > 1), None)
    span = span_of(strides, offsets, sizes, item_bytes)
    if axis is None:
        yield Box(offsets, sizes, span)
        return
    row = _replace(sizes, axis, 1)
    row_bytes = span_of(strides, offsets, row, item_bytes).num_bytes
    step_bytes = strides[axis] * item_bytes
    if step_bytes - row_bytes > max_gap_bytes or _has_gap(strides, row, item_bytes, max_gap_bytes):
        rows_per_band = 0  # holes inside: every row on its own, cut further within
    else:
        rows_per_band = 1 + (max_bytes - row_bytes) // step_bytes if row_bytes <= max_bytes else 0
    if rows_per_band >= sizes[axis]:
        yield Box(offsets, sizes, span)
        return
    count = max(rows_per_band, 1)
    for first in range(0, sizes[axis], count):
        part = _replace(sizes, axis, min(count, sizes[axis] - first))
        at = _replace(offsets, axis, offsets[axis] + first)
        if rows_per_band:
            yield Box(at, part, span_of(strides, at, part, item_bytes))
        else:
            yield from _bands(strides, at, part, item_bytes, max_bytes, max_gap_bytes)


def _has_gap(
    strides: tuple[int, ...], sizes: tuple[int, ...], item_bytes: int, max_gap_bytes: int
) -> bool:
    inner_elements = 1
    for stride, size in zip(reversed(strides), reversed(sizes), strict=True):
        if size > 1 and (stride - inner_elements) * item_bytes > max_gap_bytes:
            return True
        inner_elements += (size - 1) * stride
    return False


def _replace(values: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return (*values[:axis], value, *values[axis + 1 :])


def num_elements(sizes: Sequence[int]) -> int:
    """Return the number of elements of a box; 1 for a 0-d one."""
    return math.prod(sizes)
