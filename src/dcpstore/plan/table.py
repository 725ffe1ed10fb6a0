"""All ranks' keys in one table, and all their items in one order.

Plans arrive rank by rank. Items are laid out by table row first and by rank second. Ranks of a
sharded job hold chunk r of every tensor, so in this order their chunks come sorted by
(key, offset) or nearly so, and the sort that finds replicas and overlaps is close to one pass::

    rank 0: w0 v0 b0        segment (ranks 0..2 x rows w, v, b):   w0 w1 w2 v0 v1 v2 b0 b1 b2
    rank 1: w1 v1 b1   ->   loose (what few ranks have):           x2
    rank 2: w2 v2 b2 x2

Key and rank of an item follow from its place; to store them would double the memory. Ranks are
decoded a few at a time and written into place at once, so that their own columns never pile up::

    64 ranks x 1,000 rows, decoded          1,000 rows x 16,384 ranks
    r0: w v b ..                            w: .. | r0 r1 r2 .. | ..
    r1: w v b ..     -- transposed -->      v: .. | r0 r1 r2 .. | ..
    r2: w v b ..                            b: .. | r0 r1 r2 .. | ..

Whatever is asked of items is asked key by key: which of them are copies of one chunk,
whether chunks overlap, whether they fill their tensor. So the items go through all steps of the
merge in pieces of a few keys at a time, so few that a processor's cache holds their columns, and
nothing of a piece outlives it but its chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from dcpstore.errors import CorruptError, IncompatibleError
from dcpstore.plan.wire import (
    Ints,
    KeyKind,
    KeyRow,
    PackedPlan,
    PartKind,
    Path,
    PlanFlag,
    SaveColumns,
    content_digest,
    decode_columns,
    decode_rows,
)

MAX_ELEMENTS = 2**61
_NO_BOUND = 2**62


@dataclass(frozen=True, slots=True)
class KeyConflict:
    """Two ranks describe one key differently."""

    key: int
    row: KeyRow
    run: int


@dataclass(frozen=True, slots=True, eq=False)
class KeyTable:
    """The keys of all ranks, in the order of their first appearance.

    Attributes:
        rows: A row per key, as the first rank that has it describes it.
        paths: The joined flattening map; None if no rank keeps one.
        runs: Of each distinct run of rows, the keys that have items, by position in ``rows``.
        runs_of: Per rank, the positions of its runs.
        conflicts: Rows that contradict ``rows``.
        rows_bound: Per key, rows of the tensor (1 for 0-d ones; no bound for values).
        inner: Per key, elements in one row.
        inner_sizes: Per key, the sizes after the first dimension, padded with 1.
        item_bytes: Per key, the bytes of an element.
        is_value: Per key, whether it is a value and no tensor.
        base: Per key, where its addresses start; one more at the end. See `_addresses`.
        step: Per key, the address of offset 1 in each dimension, padded with 0.
    """

    rows: list[KeyRow]
    paths: dict[str, Path] | None
    runs: list[Ints]
    runs_of: list[tuple[int, ...]]
    conflicts: list[KeyConflict]
    rows_bound: Ints = field(init=False)
    inner: Ints = field(init=False)
    inner_sizes: Ints = field(init=False)
    item_bytes: Ints = field(init=False)
    is_value: Ints = field(init=False)
    base: Ints = field(init=False)
    step: Ints = field(init=False)

    def __post_init__(self) -> None:
        rows = self.rows
        values = np.array([row.is_value for row in rows], bool)
        bound = np.array([row.size[0] if row.size else 1 for row in rows], np.int64)
        bound[values] = _NO_BOUND
        inner = np.array([math.prod(row.size[1:]) for row in rows], np.int64)
        object.__setattr__(self, "rows_bound", bound)
        object.__setattr__(self, "inner", inner)
        object.__setattr__(self, "item_bytes", np.array([r.item_bytes for r in rows], np.int64))
        object.__setattr__(self, "is_value", values)
        num_inner = max((len(row.size) for row in rows), default=1) - 1
        sizes = [(*row.size[1:], *(1,) * (num_inner - len(row.size[1:]))) for row in rows]
        by_key = np.array(sizes, np.int64).reshape(len(rows), max(num_inner, 0))
        object.__setattr__(self, "inner_sizes", by_key)
        step, extents = _addresses(rows)
        object.__setattr__(self, "step", step)
        object.__setattr__(self, "base", extents)

    def ranks_with_run(self, run: int) -> list[int]:
        """Return the ranks that a run came from."""
        return [rank for rank, runs in enumerate(self.runs_of) if run in runs]


def _addresses(rows: Sequence[KeyRow]) -> tuple[Ints, Ints]:
    """Give every (key, offsets) a number of its own, ordered by key, then offsets row-major.

    Offsets up to and including the size occur: an empty chunk lies behind the last row.
    """
    num_dims = max((len(row.size) for row in rows), default=0) or 1
    steps, bases, base = [], [], 0
    for row in rows:
        step, extent = [0] * num_dims, 1
        for dim in range(len(row.size) - 1, -1, -1):
            step[dim] = extent
            extent *= row.size[dim] + 1
        steps.append(step)
        bases.append(base)
        base += extent
    if base > _NO_BOUND:
        raise IncompatibleError(
            f"the plans' tensors have {base} elements together; at most 2**62 can be planned"
        )
    return np.array(steps, np.int64).reshape(len(rows), num_dims), np.array(
        [*bases, base], np.int64
    )


def join_tables(plans: Iterable[PackedPlan]) -> KeyTable:
    """Decode every distinct run of keys once and join them.

    Raises:
        CorruptError: If a run's bytes do not match its name.
        IncompatibleError: If sizes overflow 62 bits.
    """
    joiner = _Joiner()
    for plan in plans:
        joiner.add(plan)
    return KeyTable(
        joiner.rows,
        joiner.paths if joiner.has_paths else None,
        joiner.runs,
        joiner.runs_of,
        joiner.conflicts,
    )


class _Joiner:
    def __init__(self) -> None:
        self.rows: list[KeyRow] = []
        self.paths: dict[str, Path] = {}
        self.has_paths = False
        self.runs: list[Ints] = []
        self.runs_of: list[tuple[int, ...]] = []
        self.conflicts: list[KeyConflict] = []
        self._key_of: dict[str, int] = {}
        self._run_of: dict[bytes, int] = {}

    def add(self, plan: PackedPlan) -> None:
        runs = []
        for (kind, _, digest), data in zip(plan.names, plan.bodies, strict=True):
            if kind == PartKind.KEYS:
                run = self._run_of.get(digest)
                if run is None:
                    if content_digest(data) != digest:
                        raise CorruptError("a packed plan's table of keys was changed on its way")
                    run = self._run_of[digest] = len(self.runs)
                    self._decode(data)
                runs.append(run)
        self.runs_of.append(tuple(runs))
        self.has_paths = self.has_paths or plan.has(PlanFlag.HAS_PATHS)

    def _decode(self, data: bytes | memoryview) -> None:
        keys = []
        for row in decode_rows(data):
            if row.path is not None:
                self.paths.setdefault(row.fqn, row.path)
            if row.kind != KeyKind.PATH:
                keys.append(self._key(row))
        self.runs.append(np.array(keys, np.int32))

    def _key(self, row: KeyRow) -> int:
        known = self._key_of.setdefault(row.fqn, len(self.rows))
        if known == len(self.rows):
            _check_size(row)
            self.rows.append(row)
        elif not _agree(row, self.rows[known]):
            self.conflicts.append(KeyConflict(known, row, len(self.runs)))
        return known


def _agree(one: KeyRow, other: KeyRow) -> bool:
    return one.is_value == other.is_value and one.size == other.size and one.dtype == other.dtype


def _check_size(row: KeyRow) -> None:
    if math.prod(size + 1 for size in row.size) > MAX_ELEMENTS or min(row.size, default=0) < 0:
        raise IncompatibleError(f"{row.fqn!r} has the impossible size {row.size}")


LooseRun: TypeAlias = tuple[int, int, Ints]  # first item in the rank's plan, position, keys

_MIN_RANKS = 4  # below, a matrix of its own costs more than it saves


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
        loose: Per rank that has some, its runs of items behind the segments.
        loose_key: Key of each item behind the segments.
        loose_rank: Its rank.
        loose_item: Its position in that rank's plan.
    """

    num_items: Ints
    segments: tuple[Segment, ...]
    loose: Mapping[int, Sequence[LooseRun]]
    loose_key: Ints
    loose_rank: Ints
    loose_item: Ints

    @property
    def place_type(self) -> type[np.signedinteger[Any]]:
        """Integers that hold any place; half the memory where 32 bits do."""
        return np.int32 if int(self.num_items.sum()) < 2**31 else np.int64

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


@dataclass(slots=True)
class _Chain:
    """The keys of runs that always come together, and where each rank has them."""

    keys: Ints
    ranks: list[int] = field(default_factory=list)
    first_item: list[int] = field(default_factory=list)


def lay_out(num_items: Sequence[int], table: KeyTable, row_numbers: Mapping[int, Ints]) -> Layout:
    """Decide where each rank's items go.

    Args:
        num_items: Items per rank.
        table: Their keys.
        row_numbers: Per rank whose items do not follow its table, each item's row in it.

    Raises:
        CorruptError: If the numbers of items and keys do not fit together.
    """
    rank_type = np.min_scalar_type(len(num_items))
    segments, loose, at = [], list[tuple[int, int, Ints]](), 0  # rank, first item, keys
    for chain in _chains(num_items, table, row_numbers):
        if len(chain.ranks) < _MIN_RANKS:
            places = zip(chain.ranks, chain.first_item, strict=True)
            loose.extend((rank, first, chain.keys) for rank, first in places)
        elif len(chain.keys):
            by_rank = np.argsort(chain.ranks, kind="stable")
            ranks = np.array(chain.ranks, rank_type)[by_rank]
            first_item = np.array(chain.first_item)[by_rank]
            segments.append(Segment(chain.keys, ranks, first_item, at))
            at = segments[-1].end
    for rank, numbers in row_numbers.items():
        loose.append((rank, 0, _keys_of(table, rank, numbers)))
    runs_of: dict[int, list[LooseRun]] = {}
    for rank, first, keys in loose:
        runs_of.setdefault(rank, []).append((first, at, keys))
        at += len(keys)
    lengths = [len(keys) for _, _, keys in loose]
    return Layout(
        num_items=np.array(num_items, np.int64),
        segments=tuple(segments),
        loose=runs_of,
        loose_key=_concatenate([keys for _, _, keys in loose]),
        loose_rank=np.repeat(np.array([rank for rank, _, _ in loose], rank_type), lengths),
        loose_item=_concatenate([np.arange(i, i + len(keys)) for _, i, keys in loose]),
    )


def _chains(
    num_items: Sequence[int], table: KeyTable, row_numbers: Mapping[int, Ints]
) -> Iterable[_Chain]:
    """Find the runs that ranks share, joined where they are always neighbours."""
    ranks_of: dict[tuple[int, ...], list[int]] = {}
    for rank, runs in enumerate(table.runs_of):
        if rank not in row_numbers:
            ranks_of.setdefault(runs, []).append(rank)
    joined = _joinable(ranks_of)
    chains: dict[int, _Chain] = {}
    for runs, ranks in ranks_of.items():
        item = 0
        for chain_runs in _split(runs, joined):
            chain = chains.get(chain_runs[0])
            if chain is None:
                keys = np.concatenate([table.runs[run] for run in chain_runs])
                chain = chains[chain_runs[0]] = _Chain(keys)
            chain.ranks.extend(ranks)
            chain.first_item.extend([item] * len(ranks))
            item += len(chain.keys)
        for rank in ranks:
            if num_items[rank] != item:
                raise CorruptError(f"rank {rank} packed {num_items[rank]} items but {item} keys")
    return chains.values()


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


def _keys_of(table: KeyTable, rank: int, row_numbers: Ints) -> Ints:
    """Return the keys of a rank whose items do not follow its table row by row."""
    keys = _concatenate([table.runs[run] for run in table.runs_of[rank]])
    if len(row_numbers) and int(row_numbers.max()) >= len(keys):
        raise CorruptError(f"rank {rank}'s packed plan refers to a key that its table lacks")
    result: Ints = keys[row_numbers]
    return result


def _concatenate(arrays: Sequence[Ints]) -> Ints:
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)


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
        item = _join_columns([item[:, None] for item, _, _ in self._boxes], 1)[:, 0]
        offsets = _join_columns([_widen(one, num_dims, 0) for _, one, _ in self._boxes], num_dims)
        sizes = _join_columns([_widen(one, num_dims, 1) for _, _, one in self._boxes], num_dims)
        self._boxes.clear()
        at = _places(self._layout, item, self._num_boxes)
        order = np.argsort(at, kind="stable")
        at = at[order]
        if bool((at[1:] == at[:-1]).any()):
            raise CorruptError("a packed plan places two boxes in one item")
        boxes = Boxes(at, offsets[order], sizes[order])
        return Items(self._layout, self._start, self._length, boxes)


def _join_columns(blocks: Sequence[Ints], num_dims: int) -> Ints:
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


_ITEMS_PER_PIECE = 1 << 15  # a column of 64-bit integers takes 256 KiB


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """All items of some keys, one element of each column per item.

    Attributes:
        at: Their places in the layout.
        key: Row of the joined table.
        rank: Who planned it.
        start, length: As in `SaveColumns`.
        box: Row among the boxes or -1; None if there are none here.
    """

    at: Ints
    key: Ints
    rank: Ints
    start: Ints
    length: Ints
    box: Ints | None

    def __getitem__(self, chosen: Ints) -> Piece:
        """Return some of the items, chosen by positions or by a mask."""
        return Piece(
            self.at[chosen],
            self.key[chosen],
            self.rank[chosen],
            self.start[chosen],
            self.length[chosen],
            None if self.box is None else self.box[chosen],
        )


def pieces(items: Items, num_keys: int) -> Iterator[Piece]:
    """Yield the items of all keys in the order of keys, whole keys at a time."""
    layout = items.layout
    by_key = np.argsort(layout.loose_key, kind="stable")
    loose_key = layout.loose_key[by_key]
    rows = [np.argsort(segment.keys, kind="stable") for segment in layout.segments]
    counts = np.bincount(loose_key, minlength=num_keys)
    for segment in layout.segments:
        counts += len(segment.ranks) * np.bincount(segment.keys, minlength=num_keys)
    number = (np.cumsum(counts) - counts) // _ITEMS_PER_PIECE  # the piece that a key goes to
    keys = [*np.flatnonzero(np.diff(number, prepend=-1)).tolist(), num_keys]
    loose_cuts = np.searchsorted(loose_key, keys).tolist()
    cuts = [
        np.searchsorted(segment.keys[order], keys).tolist()
        for segment, order in zip(layout.segments, rows, strict=True)
    ]
    for n in range(len(keys) - 1):
        parts = [_of_loose(items, by_key[loose_cuts[n] : loose_cuts[n + 1]])]
        parts.extend(
            _of_segment(items, segment, order[cut[n] : cut[n + 1]])
            for segment, order, cut in zip(layout.segments, rows, cuts, strict=True)
        )
        yield _join_pieces([part for part in parts if len(part.at)] or parts[:1])


def _of_loose(items: Items, chosen: Ints) -> Piece:
    layout = items.layout
    at = (layout.first_loose + chosen).astype(layout.place_type)
    return Piece(
        at,
        layout.loose_key[chosen],
        layout.loose_rank[chosen],
        items.start[at],
        items.length[at],
        items.boxes.rows_of(at),
    )


def _of_segment(items: Items, segment: Segment, rows: Ints) -> Piece:
    num_ranks, place_type = len(segment.ranks), items.layout.place_type
    matrix, place = (len(segment.keys), num_ranks), slice(segment.at, segment.end)
    first = (segment.at + rows * num_ranks).astype(place_type)
    at = (first[:, None] + np.arange(num_ranks, dtype=place_type)).ravel()
    return Piece(
        at,
        np.repeat(segment.keys[rows], num_ranks),
        np.tile(segment.ranks, len(rows)),
        items.start[place].reshape(matrix)[rows].ravel(),
        items.length[place].reshape(matrix)[rows].ravel(),
        items.boxes.rows_of(at),
    )


def _join_pieces(parts: list[Piece]) -> Piece:
    if len(parts) == 1:
        return parts[0]
    box = None
    if any(part.box is not None for part in parts):
        box = np.concatenate(
            [np.full(len(one.at), -1) if one.box is None else one.box for one in parts]
        )
    return Piece(
        np.concatenate([part.at for part in parts]),
        np.concatenate([part.key for part in parts]),
        np.concatenate([part.rank for part in parts]),
        np.concatenate([part.start for part in parts]),
        np.concatenate([part.length for part in parts]),
        box,
    )
