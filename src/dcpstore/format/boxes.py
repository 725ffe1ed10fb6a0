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
import sys
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from dcpstore.store.ranges import ByteRange, row_major_strides

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""First element of a box in each dimension of its chunk, and its sizes."""


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


def bands(
    strides: Sequence[int],
    offsets: Sequence[int],
    sizes: Sequence[int],
    item_bytes: int,
    *,
    max_bytes: int,
    max_gap_bytes: int = sys.maxsize,
) -> Iterator[Box]:
    """Cut a box into sub-boxes that neither have nor span more than ``max_bytes``.

    They are cut along the dimension of the longest step, so that few bytes span each. Holes of
    more than ``max_gap_bytes`` between two elements are never spanned. A single element larger
    than ``max_bytes`` is its own sub-box. An empty box yields nothing.

    Args:
        strides: Of the chunk, in elements; they need not be row-major.
        offsets: First element of the box in each dimension.
        sizes: Elements of the box in each dimension.
        item_bytes: Bytes per element.
        max_bytes: No sub-box has or spans more.
        max_gap_bytes: Widest hole to span.
    """
    if 0 in sizes:
        return
    offsets, sizes = tuple(offsets), tuple(sizes)
    axes = [axis for axis, size in enumerate(sizes) if size > 1]
    axis = max(axes, key=lambda one: (strides[one], sizes[one]), default=None)
    if axis is None:
        yield offsets, sizes
        return
    row = _replace(sizes, axis, 1)
    rows_per_band = 0  # every row on its own, cut further within
    if not _has_wider_gap(strides, sizes, item_bytes, max_gap_bytes):
        rows_per_band = _rows_that_fit(
            span_of(strides, offsets, row, item_bytes).num_bytes,
            num_elements(row) * item_bytes,
            strides[axis] * item_bytes,
            max_bytes,
        )
    if rows_per_band >= sizes[axis]:
        yield offsets, sizes
        return
    count = max(rows_per_band, 1)
    for first in range(0, sizes[axis], count):
        part = _replace(sizes, axis, min(count, sizes[axis] - first))
        at = _replace(offsets, axis, offsets[axis] + first)
        if rows_per_band:
            yield at, part
        else:
            yield from bands(
                strides, at, part, item_bytes, max_bytes=max_bytes, max_gap_bytes=max_gap_bytes
            )


def _rows_that_fit(spanned_bytes: int, row_bytes: int, step_bytes: int, max_bytes: int) -> int:
    """Return how many rows neither span nor have more than ``max_bytes``; 0 if not even one."""
    if max(spanned_bytes, row_bytes) > max_bytes:
        return 0
    fitting = max_bytes // row_bytes
    if step_bytes:
        fitting = min(fitting, 1 + (max_bytes - spanned_bytes) // step_bytes)
    return fitting


def _has_wider_gap(
    strides: Sequence[int], sizes: Sequence[int], item_bytes: int, max_gap_bytes: int
) -> bool:
    """Tell whether a hole between two elements of a box is wider than allowed."""
    inner_elements = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1 and (stride - inner_elements) * item_bytes > max_gap_bytes:
            return True
        inner_elements += (size - 1) * stride
    return False


def _replace(values: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return (*values[:axis], value, *values[axis + 1 :])


def num_elements(sizes: Sequence[int]) -> int:
    """Return the number of elements of a box; 1 for a 0-d one."""
    return math.prod(sizes)
