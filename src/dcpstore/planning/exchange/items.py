"""Where all ranks' items begin and end, in the order of their layout.

Ranks are decoded a few at a time and written into place at once, so that their own
columns never pile up::

    64 ranks x 1,000 rows, decoded          1,000 rows x 16,384 ranks
    r0: w v b ..                            w: .. | r0 r1 r2 .. | ..
    r1: w v b ..     -- transposed -->      v: .. | r0 r1 r2 .. | ..
    r2: w v b ..                            b: .. | r0 r1 r2 .. | ..

Key and rank of an item follow from its place; to store them would double the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dcpstore.errors import CorruptError
from dcpstore.planning.exchange.columns import Ints, SaveColumns, decode_columns
from dcpstore.planning.exchange.layout import Layout, LooseRun, Segment, lay_out
from dcpstore.planning.exchange.table import KeyTable
from dcpstore.planning.exchange.wire import PackedPlan, PartKind, PlanFlag

__all__ = ["Boxes", "Items", "read_items"]

_RANKS_PER_BLOCK = 64  # 64 x 1,000 x 4 bytes stay in the cache


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """Items that do not fill all dimensions after the first of their tensor.

    Attributes:
        at: Their places in the layout, ascending.
        offsets: Boxes x later dimensions, padded with 0.
        sizes: The same, padded with 1.
    """

    at: Ints
    offsets: Ints
    sizes: Ints

    @property
    def num_dims(self) -> int:
        """Dimensions after the first."""
        return int(self.sizes.shape[1])

    def rows_of(self, at: Ints) -> Ints | None:
        """Return, per place, the row of the box there or -1; None if no place has one."""
        if not len(at) or not len(self.at):
            return None
        low, end = np.searchsorted(self.at, (at.min(), at.max() + 1)).tolist()
        if low == end:
            return None
        near = self.at[low:end]
        row = np.searchsorted(near, at).clip(max=end - low - 1)
        is_one = near[row] == at
        return np.where(is_one, low + row, -1) if bool(is_one.any()) else None


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """The items of all ranks, in the order of ``layout``.

    Attributes:
        start, length: As in `SaveColumns`.
        boxes: Those that are boxes.
    """

    layout: Layout
    start: Ints
    length: Ints
    boxes: Boxes


def read_items(plans: Sequence[PackedPlan], table: KeyTable) -> Items:
    """Decode all ranks' columns and put them in one order.

    Raises:
        CorruptError: If a plan's columns and table of keys do not fit together.
    """
    irregular = {
        rank: _decode(plan) for rank, plan in enumerate(plans) if plan.has(PlanFlag.HAS_ROW_NUMBERS)
    }
    layout = lay_out(
        [plan.num_items for plan in plans],
        table,
        {rank: one.row for rank, one in irregular.items() if one.row is not None},
    )
    filler = _Filler(layout)
    for low in range(0, len(plans), _RANKS_PER_BLOCK):
        high = min(low + _RANKS_PER_BLOCK, len(plans))
        filler.fill(low, [irregular.get(r) or _decode(plans[r]) for r in range(low, high)])
    items = filler.finish()
    if items.boxes.num_dims >= table.step.shape[1] and len(items.boxes.at):
        raise CorruptError("a packed plan's box has more dimensions than any tensor")
    return items


def _decode(plan: PackedPlan) -> SaveColumns:
    data = plan.first_of(PartKind.ROWS)
    if data is None:
        raise CorruptError("a packed save plan has no part that holds its items")
    columns = decode_columns(data, plan.num_items)
    if (columns.row is not None) != plan.has(PlanFlag.HAS_ROW_NUMBERS):
        raise CorruptError("a packed save plan's head and items do not fit together")
    return columns


class _Filler:
    """Writes the ranks' columns into place, block by block of ranks."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        total = int(layout.num_items.sum())
        self._start = np.empty(total, np.int32)
        self._length = np.empty(total, np.int32)
        self._boxes: list[tuple[Ints, Ints, Ints]] = []  # item of its rank, offsets, sizes
        self._num_boxes = np.zeros(len(layout.num_items), np.int64)

    def fill(self, low: int, columns: Sequence[SaveColumns]) -> None:
        """Write the columns of consecutive ranks, the first of which is ``low``."""
        if any(max(one.start.itemsize, one.length.itemsize) > 4 for one in columns):
            self._start = self._start.astype(np.int64, copy=False)
            self._length = self._length.astype(np.int64, copy=False)
        high = low + len(columns)
        for segment in self._layout.segments:
            first, end = np.searchsorted(segment.ranks, (low, high)).tolist()
            if first < end:
                of_ranks = [columns[rank - low] for rank in segment.ranks[first:end].tolist()]
                self._transpose(segment, first, of_ranks)
        for rank in range(low, high):
            one = columns[rank - low]
            for run in self._layout.loose.get(rank, ()):
                self._copy(run, one)
            self._num_boxes[rank] = len(one.box_item)
        self._keep_boxes([one for one in columns if len(one.box_item)])

    def _copy(self, run: LooseRun, columns: SaveColumns) -> None:
        first, at, keys = run
        end = at + len(keys)
        self._start[at:end] = columns.start[first : first + len(keys)]
        self._length[at:end] = columns.length[first : first + len(keys)]

    def _transpose(self, segment: Segment, first: int, columns: Sequence[SaveColumns]) -> None:
        count, num_ranks = len(segment.keys), len(segment.ranks)
        items = segment.first_item[first : first + len(columns)].tolist()
        place = slice(segment.at, segment.end)
        for out, sources in (
            (self._start, [one.start for one in columns]),
            (self._length, [one.length for one in columns]),
        ):
            block = np.empty((len(columns), count), out.dtype)
            for row, source, item in zip(block, sources, items, strict=True):
                row[:] = source[item : item + count]
            matrix = out[place].reshape(count, num_ranks)
            matrix[:, first : first + len(columns)] = block.T

    def _keep_boxes(self, columns: Sequence[SaveColumns]) -> None:
        if not columns:
            return
        num_dims = max(one.box_sizes.shape[1] for one in columns)
        item = np.concatenate([one.box_item for one in columns])
        offsets = np.concatenate([_widen(one.box_offsets, num_dims, 0) for one in columns])
        sizes = np.concatenate([_widen(one.box_sizes, num_dims, 1) for one in columns])
        self._boxes.append((item, offsets, sizes))

    def finish(self) -> Items:
        """Return the items of all ranks."""
        num_dims = max((sizes.shape[1] for _, _, sizes in self._boxes), default=0)
        item = _join([item[:, None] for item, _, _ in self._boxes], 1)[:, 0]
        offsets = _join([_widen(one, num_dims, 0) for _, one, _ in self._boxes], num_dims)
        sizes = _join([_widen(one, num_dims, 1) for _, _, one in self._boxes], num_dims)
        self._boxes.clear()
        at = _places(self._layout, item, self._num_boxes)
        order = np.argsort(at, kind="stable")
        at = at[order]
        if bool((at[1:] == at[:-1]).any()):
            raise CorruptError("a packed plan places two boxes in one item")
        boxes = Boxes(at, offsets[order], sizes[order])
        return Items(self._layout, self._start, self._length, boxes)


def _join(blocks: Sequence[Ints], num_dims: int) -> Ints:
    joined = np.concatenate(blocks) if blocks else np.empty((0, num_dims))
    return joined.astype(np.int64, copy=False)


def _widen(boxes: Ints, num_dims: int, padding: int) -> Ints:
    missing = num_dims - boxes.shape[1]
    return np.pad(boxes, ((0, 0), (0, missing)), constant_values=padding) if missing else boxes


def _places(layout: Layout, item: Ints, counts: Ints) -> Ints:
    """Turn items of ranks, ``counts`` of each rank one after the other, into places."""
    at = np.full(len(item), -1, np.int64)
    rank = np.repeat(np.arange(len(counts)), counts)
    if bool((item >= layout.num_items[rank]).any()):
        raise CorruptError("a packed plan places a box that is no item of it")
    first_box = np.cumsum(counts) - counts
    for segment in layout.segments:
        per_rank = counts[segment.ranks]
        boxes = _ranges(first_box[segment.ranks], per_rank)
        row = item[boxes] - np.repeat(segment.first_item, per_rank)
        column = np.repeat(np.arange(len(segment.ranks)), per_rank)
        inside = (row >= 0) & (row < len(segment.keys))
        at[boxes[inside]] = segment.at + row[inside] * len(segment.ranks) + column[inside]
    rest = np.flatnonzero(at < 0)
    if len(rest):
        step = int(layout.num_items.max()) + 1
        loose = layout.loose_rank.astype(np.int64) * step + layout.loose_item
        order = np.argsort(loose, kind="stable")
        found = np.searchsorted(loose[order], rank[rest] * step + item[rest])
        at[rest] = layout.first_loose + order[found]
    return at


def _ranges(first: Ints, counts: Ints) -> Ints:
    """Return first[0], first[0] + 1, ... counts[0] of them, then first[1], ..."""
    before = np.cumsum(counts) - counts
    result: Ints = np.arange(int(counts.sum())) + np.repeat(first - before, counts)
    return result
