"""All ranks' items in one order: by table row first, by rank second.

Plans arrive rank by rank. Ranks of a sharded job hold chunk r of every tensor, so in this
order their chunks come sorted by (key, offset) or nearly so, and the sort that finds
replicas and overlaps is close to one pass::

    rank 0: w0 v0 b0        segment (ranks 0..2 x rows w, v, b):   w0 w1 w2 v0 v1 v2 b0 b1 b2
    rank 1: w1 v1 b1   ->   loose (what few ranks have):           x2
    rank 2: w2 v2 b2 x2
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dcpstore.errors import CorruptError
from dcpstore.planning.exchange.columns import Ints, SaveColumns, decode_columns
from dcpstore.planning.exchange.table import KeyTable
from dcpstore.planning.exchange.wire import PackedPlan, PartKind

__all__ = ["Items", "Layout", "Segment", "lay_out"]

_MIN_RANKS = 4  # below, a matrix of its own costs more than it saves
_RANKS_PER_BLOCK = 64  # transposed at once: 64 x 1,000 x 8 bytes stay in the cache


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Rows that some ranks have in common; a matrix of ``len(keys)`` x ``len(ranks)`` items.

    Attributes:
        keys: Key of each row.
        ranks: The ranks, ascending.
        first_item: Per rank, the item that the first row is in its plan.
        at: Position of the matrix among all items.
    """

    keys: Ints
    ranks: Ints
    first_item: Ints
    at: int

    @property
    def end(self) -> int:
        """Position behind the matrix."""
        return self.at + len(self.keys) * len(self.ranks)


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where each rank's items lie among all of them.

    Attributes:
        num_items: Items per rank.
        segments: The matrices, without gaps from 0 on.
        loose_rank: Rank of each item behind the segments.
        loose_item: Its position in that rank's plan.
    """

    num_items: Ints
    segments: tuple[Segment, ...]
    loose_rank: Ints
    loose_item: Ints

    @property
    def first_loose(self) -> int:
        """Position behind the last segment."""
        return self.segments[-1].end if self.segments else 0

    def to_ranks(self, values: Ints) -> list[Ints]:
        """Split a column of all items into one per rank, in the order of its plan."""
        ends = np.cumsum(self.num_items)
        flat = np.empty(len(values), values.dtype)
        firsts = ends - self.num_items
        for segment in self.segments:
            count, num_ranks = len(segment.keys), len(segment.ranks)
            matrix = np.ascontiguousarray(
                values[segment.at : segment.end].reshape(count, num_ranks).T
            )
            places = (firsts[segment.ranks] + segment.first_item).tolist()
            for row, place in zip(matrix, places, strict=True):
                flat[place : place + count] = row
        flat[firsts[self.loose_rank] + self.loose_item] = values[self.first_loose :]
        return np.split(flat, ends[:-1])


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """The items of all ranks, in the order of ``layout``.

    Attributes:
        key: Row of the joined table.
        rank: Who planned it.
        start, length: As in `SaveColumns`.
        box_at: Positions of the boxes, in no order.
        box_offsets, box_sizes: As in `SaveColumns`, one row per element of ``box_at``.
        box_row: Per item, its row among the boxes or -1; None if there are no boxes.
    """

    layout: Layout
    key: Ints
    rank: Ints
    start: Ints
    length: Ints
    box_at: Ints
    box_offsets: Ints
    box_sizes: Ints
    box_row: Ints | None


@dataclass(slots=True)
class _Chain:
    """The keys of runs that always come together, and where each rank has them."""

    keys: Ints
    ranks: list[int] = field(default_factory=list)
    first_item: list[int] = field(default_factory=list)


def lay_out(plans: Sequence[PackedPlan], table: KeyTable) -> Items:
    """Decode all ranks' columns and put them in the common order.

    Raises:
        CorruptError: If a plan's columns and table of keys do not fit together.
    """
    columns = [_columns_of(plan) for plan in plans]
    chains, irregular = _chains(table, columns)
    segments, loose = [], list[tuple[int, int, Ints]]()  # rank, first item, keys
    at = 0
    for chain in chains:
        if not len(chain.keys):
            continue
        if len(chain.ranks) < _MIN_RANKS:
            loose.extend(
                (rank, first, chain.keys)
                for rank, first in zip(chain.ranks, chain.first_item, strict=True)
            )
            continue
        by_rank = np.argsort(chain.ranks, kind="stable")
        segment = Segment(
            chain.keys, np.array(chain.ranks)[by_rank], np.array(chain.first_item)[by_rank], at
        )
        segments.append(segment)
        at = segment.end
    loose.extend((rank, 0, _irregular_keys(table, rank, columns[rank])) for rank in irregular)
    layout = Layout(
        num_items=np.array([one.num_items for one in columns], np.int64),
        segments=tuple(segments),
        loose_rank=np.repeat(
            np.array([rank for rank, _, _ in loose], np.int64), [len(k) for _, _, k in loose]
        ),
        loose_item=_concatenate([np.arange(i, i + len(k)) for _, i, k in loose]),
    )
    return _fill(layout, columns, loose)


def _columns_of(plan: PackedPlan) -> SaveColumns:
    data = plan.first_of(PartKind.ROWS)
    if data is None:
        raise CorruptError("a packed save plan has no part that holds its items")
    return decode_columns(data, plan.num_items)


def _chains(table: KeyTable, columns: Sequence[SaveColumns]) -> tuple[list[_Chain], list[int]]:
    """Find the runs that ranks share, joined where they are always neighbours."""
    irregular = [rank for rank, one in enumerate(columns) if one.row is not None]
    ranks_of: dict[tuple[int, ...], list[int]] = {}
    for rank, (runs, one) in enumerate(zip(table.runs_of, columns, strict=True)):
        if one.row is None:
            ranks_of.setdefault(runs, []).append(rank)
    joined = _joinable(ranks_of)
    chains: dict[int, _Chain] = {}
    for runs, ranks in ranks_of.items():
        item = 0
        for chain_runs in _split(runs, joined):
            chain = chains.get(chain_runs[0])
            if chain is None:
                keys = np.concatenate([table.runs[run].keys for run in chain_runs])
                chain = chains[chain_runs[0]] = _Chain(keys)
            chain.ranks.extend(ranks)
            chain.first_item.extend([item] * len(ranks))
            item += len(chain.keys)
        for rank in ranks:
            if columns[rank].num_items != item:
                raise CorruptError(
                    f"rank {rank} packed {columns[rank].num_items} items but {item} keys"
                )
    return list(chains.values()), irregular


def _joinable(lists: Iterable[tuple[int, ...]]) -> set[tuple[int, int]]:
    """Return the pairs of runs that never occur but one after the other."""
    pairs: set[tuple[int, int]] = set()
    for runs in lists:
        pairs.update(zip((-1, *runs), (*runs, -1), strict=True))
    after: dict[int, set[int]] = {}
    before: dict[int, set[int]] = {}
    for one, other in pairs:
        after.setdefault(one, set()).add(other)
        before.setdefault(other, set()).add(one)
    return {
        (one, next(iter(others)))
        for one, others in after.items()
        if one >= 0 and len(others) == 1 and len(before[next(iter(others))]) == 1
    }


def _split(runs: tuple[int, ...], joined: set[tuple[int, int]]) -> Iterable[tuple[int, ...]]:
    first = 0
    for at in range(1, len(runs) + 1):
        if at == len(runs) or (runs[at - 1], runs[at]) not in joined:
            yield runs[first:at]
            first = at


def _irregular_keys(table: KeyTable, rank: int, columns: SaveColumns) -> Ints:
    """Return the keys of a rank whose items do not follow its table row by row."""
    keys = _concatenate([table.runs[run].keys for run in table.runs_of[rank]])
    assert columns.row is not None
    if len(columns.row) and int(columns.row.max()) >= len(keys):
        raise CorruptError(f"rank {rank}'s packed plan refers to a key that its table lacks")
    result: Ints = keys[columns.row]
    return result


def _fill(
    layout: Layout, columns: Sequence[SaveColumns], loose: Sequence[tuple[int, int, Ints]]
) -> Items:
    total = int(layout.num_items.sum())
    dtype = _common_dtype(columns)
    start, length = np.empty(total, dtype), np.empty(total, dtype)
    key, rank = np.empty(total, np.int32), np.empty(total, np.int32)
    for segment in layout.segments:
        part = slice(segment.at, segment.end)
        shape = (len(segment.keys), len(segment.ranks))
        _transpose([one.start for one in columns], segment, start[part].reshape(shape))
        _transpose([one.length for one in columns], segment, length[part].reshape(shape))
        key[part].reshape(shape)[:] = segment.keys[:, None]
        rank[part].reshape(shape)[:] = segment.ranks
    at = layout.first_loose
    rank[at:] = layout.loose_rank
    for owner, first, keys in loose:
        end = at + len(keys)
        start[at:end] = columns[owner].start[first : first + len(keys)]
        length[at:end] = columns[owner].length[first : first + len(keys)]
        key[at:end] = keys
        at = end
    box_at, box_offsets, box_sizes = _fill_boxes(layout, columns)
    box_row = None
    if len(box_at):
        box_row = np.full(total, -1, np.int32)
        box_row[box_at] = np.arange(len(box_at), dtype=np.int32)
    return Items(layout, key, rank, start, length, box_at, box_offsets, box_sizes, box_row)


def _common_dtype(columns: Sequence[SaveColumns]) -> type[np.signedinteger[Any]]:
    """Return the integers that hold all rows: 4 bytes where the wire says that they suffice."""
    widest = max(
        (one.dtype.itemsize for column in columns for one in (column.start, column.length)),
        default=0,
    )
    return np.int32 if widest <= 4 else np.int64


def _transpose(columns: Sequence[Ints], segment: Segment, out: Ints) -> None:
    count, num_ranks = out.shape
    block = np.empty((_RANKS_PER_BLOCK, count), out.dtype)
    ranks, firsts = segment.ranks.tolist(), segment.first_item.tolist()
    for low in range(0, num_ranks, _RANKS_PER_BLOCK):
        high = min(low + _RANKS_PER_BLOCK, num_ranks)
        for i in range(low, high):
            block[i - low] = columns[ranks[i]][firsts[i] : firsts[i] + count]
        out[:, low:high] = block[: high - low].T


def _fill_boxes(layout: Layout, columns: Sequence[SaveColumns]) -> tuple[Ints, Ints, Ints]:
    """Join the ranks' boxes, with their positions in the layout."""
    with_boxes = [one for one in columns if len(one.box_item)]
    num_dims = max((one.box_sizes.shape[1] for one in with_boxes), default=0)
    item = _concatenate([one.box_item for one in with_boxes]).astype(np.int64)
    offsets = _concatenate([_widen(one.box_offsets, num_dims, 0) for one in with_boxes])
    sizes = _concatenate([_widen(one.box_sizes, num_dims, 1) for one in with_boxes])
    at = np.full(len(item), -1, np.int64)
    if len(item):
        _place_boxes(layout, item, at, np.array([len(one.box_item) for one in columns]))
    shape = (len(item), num_dims)
    return (
        at,
        offsets.astype(np.int64, copy=False).reshape(shape),
        sizes.astype(np.int64, copy=False).reshape(shape),
    )


def _widen(boxes: Ints, num_dims: int, padding: int) -> Ints:
    missing = num_dims - boxes.shape[1]
    return np.pad(boxes, ((0, 0), (0, missing)), constant_values=padding) if missing else boxes


def _place_boxes(layout: Layout, item: Ints, at: Ints, counts: Ints) -> None:
    """Turn the boxes' (rank, item), sorted by rank, into positions in the layout."""
    rank = np.repeat(np.arange(len(counts)), counts)
    if (item >= layout.num_items[rank]).any():
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
        loose = layout.loose_rank * step + layout.loose_item
        order = np.argsort(loose, kind="stable")
        found = np.searchsorted(loose[order], rank[rest] * step + item[rest])
        at[rest] = layout.first_loose + order[found]


def _ranges(first: Ints, counts: Ints) -> Ints:
    """Return first[0], first[0] + 1, ... counts[0] of them, then first[1], ..."""
    before = np.cumsum(counts) - counts
    result: Ints = np.arange(int(counts.sum())) + np.repeat(first - before, counts)
    return result


def _concatenate(arrays: Sequence[Ints]) -> Ints:
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)
