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
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from dcpstore.errors import CorruptError, IncompatibleError
from dcpstore.plan.wire import (
    Ints,
    KeyKind,
    KeyRow,
    PackedPlan,
    Path,
    PlanFlag,
    decode_columns,
    decode_rows,
)

MAX_ELEMENTS = 2**61
_NO_BOUND = 2**62


class KeyTable:
    """The keys of all ranks, in the order of their first appearance.

    Every distinct run of keys is decoded once.

    Args:
        plans: Of all ranks.

    Attributes:
        rows: A row per key, as the first rank that has it describes it.
        paths: The joined flattening map; None if no rank keeps one.
        runs: Of each distinct run of rows, the key of each item, by position in ``rows``.
        runs_of: Per rank, the positions of its runs.
        conflicts: Rows that contradict ``rows``, by key and run.
        rows_bound: Per key, rows of the tensor (1 for 0-d ones; no bound for values).
        inner: Per key, elements in one row.
        inner_sizes: Per key, the sizes after the first dimension, padded with 1.
        item_bytes: Per key, the bytes of an element.
        is_value: Per key, whether it is a value and no tensor.
        base: Per key, where its addresses start; one more at the end. See `_addresses`.
        step: Per key, the address of offset 1 in each dimension, padded with 0.

    Raises:
        CorruptError: If the bytes of a run are damaged.
        IncompatibleError: If sizes overflow 62 bits.
    """

    def __init__(self, plans: Iterable[PackedPlan]) -> None:
        self.rows: list[KeyRow] = []
        self.paths: dict[str, Path] | None = None
        self.runs: list[Ints] = []
        self.runs_of: list[tuple[int, ...]] = []
        self.conflicts: dict[tuple[int, int], KeyRow] = {}
        self._join(plans)
        rows = self.rows
        self.is_value: Ints = np.array([row.is_value for row in rows], bool)
        self.rows_bound: Ints = np.array([row.size[0] if row.size else 1 for row in rows], np.int64)
        self.rows_bound[self.is_value] = _NO_BOUND
        self.inner: Ints = np.array([math.prod(row.size[1:]) for row in rows], np.int64)
        self.item_bytes: Ints = np.array([row.item_bytes for row in rows], np.int64)
        num_inner = max((len(row.size) for row in rows if row.size), default=1) - 1
        sizes = [(*row.size[1:], *(1,) * (num_inner - len(row.size[1:]))) for row in rows]
        self.inner_sizes: Ints = np.array(sizes, np.int64).reshape(len(rows), num_inner)
        self.step, self.base = _addresses(rows)

    def ranks_with_run(self, run: int) -> list[int]:
        """Return the ranks that a run came from."""
        return [rank for rank, runs in enumerate(self.runs_of) if run in runs]

    def _join(self, plans: Iterable[PackedPlan]) -> None:
        paths: dict[str, Path] = {}
        key_of: dict[str, int] = {}
        run_of: dict[bytes, int] = {}
        for plan in plans:
            for digest, data in zip(plan.names[1:], plan.bodies[1:], strict=True):
                if digest in run_of:
                    continue
                run_of[digest] = len(self.runs)
                rows = decode_rows(data)
                for row in rows:
                    if row.path is not None:
                        paths.setdefault(row.fqn, row.path)
                keys = [self._key(row, key_of) for row in rows if row.kind != KeyKind.PATH]
                self.runs.append(np.array(keys, np.int32))
            self.runs_of.append(tuple([run_of[digest] for digest in plan.names[1:]]))
            if plan.has(PlanFlag.HAS_PATHS):
                self.paths = paths

    def _key(self, row: KeyRow, key_of: dict[str, int]) -> int:
        known = key_of.setdefault(row.fqn, len(self.rows))
        if known == len(self.rows):
            _check_size(row)
            self.rows.append(row)
        elif not _agree(row, self.rows[known]):
            self.conflicts[known, len(self.runs)] = row
        return known


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

    def matrix(self, column: Ints) -> Ints:
        """Return the matrix of a column of all items; a view."""
        return column[self.at : self.end].reshape(len(self.keys), len(self.ranks))


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where each rank's items lie among all of them.

    Attributes:
        num_items: Items per rank.
        segments: The matrices, without gaps from 0 on.
        loose: Per rank that has some, its runs of items behind the segments.
        loose_key: Key of each item behind the segments.
        loose_rank: Its rank.
    """

    num_items: Ints
    segments: tuple[Segment, ...]
    loose: Mapping[int, Sequence[LooseRun]]
    loose_key: Ints
    loose_rank: Ints

    @property
    def place_type(self) -> type[np.signedinteger[Any]]:
        """Integers that hold any place; half the memory where 32 bits do."""
        return np.int32 if int(self.num_items.sum()) < 2**31 else np.int64

    @property
    def first_loose(self) -> int:
        """Position behind the last segment."""
        return self.segments[-1].end if self.segments else 0

    def put(self, column: Ints, low: int, values: Sequence[Ints]) -> None:
        """Write what consecutive ranks, the first of which is ``low``, say of their items.

        Args:
            column: Of all items.
            low: A rank.
            values: Per rank, in the order of its plan.
        """
        for segment in self.segments:
            first, end = np.searchsorted(segment.ranks, (low, low + len(values))).tolist()
            count = len(segment.keys)
            block = np.empty((end - first, count), column.dtype)
            ranks, items = segment.ranks[first:end].tolist(), segment.first_item[first:end].tolist()
            for row, rank, item in zip(block, ranks, items, strict=True):
                row[:] = values[rank - low][item : item + count]
            segment.matrix(column)[:, first:end] = block.T
        for rank, value in enumerate(values, low):
            for item, at, keys in self.loose.get(rank, ()):
                column[at : at + len(keys)] = value[item : item + len(keys)]

    def to_ranks(self, values: Ints) -> list[Ints]:
        """Split a column of all items into one per rank, in the order of its plan."""
        ends = np.cumsum(self.num_items)
        flat = np.empty(len(values), values.dtype)
        firsts = ends - self.num_items
        for segment in self.segments:
            matrix = np.ascontiguousarray(segment.matrix(values).T)
            places = (firsts[segment.ranks] + segment.first_item).tolist()
            for row, place in zip(matrix, places, strict=True):
                flat[place : place + len(row)] = row
        for rank, runs in self.loose.items():
            for item, at, keys in runs:
                place = int(firsts[rank]) + item
                flat[place : place + len(keys)] = values[at : at + len(keys)]
        return np.split(flat, ends[:-1])


@dataclass(slots=True)
class _Chain:
    """The keys of runs that always come together, and where each rank has them."""

    keys: Ints
    ranks: list[int] = field(default_factory=list)
    first_item: list[int] = field(default_factory=list)


def lay_out(num_items: Sequence[int], table: KeyTable) -> Layout:
    """Decide where each rank's items go.

    Args:
        num_items: Items per rank.
        table: Their keys.

    Raises:
        CorruptError: If the numbers of items and keys do not fit together.
    """
    rank_type = np.min_scalar_type(len(num_items))
    segments, at = [], 0
    few: list[_Chain] = []
    for chain in _chains(num_items, table):
        if len(chain.ranks) < _MIN_RANKS:
            few.append(chain)
        elif len(chain.keys):
            by_rank = np.argsort(chain.ranks, kind="stable")
            ranks = np.array(chain.ranks, rank_type)[by_rank]
            first_item = np.array(chain.first_item)[by_rank]
            segments.append(Segment(chain.keys, ranks, first_item, at))
            at = segments[-1].end
    loose: dict[int, list[LooseRun]] = {}
    loose_keys, loose_ranks = [np.empty(0, np.int32)], [np.empty(0, rank_type)]
    for chain in few:
        for rank, item in zip(chain.ranks, chain.first_item, strict=True):
            loose.setdefault(rank, []).append((item, at, chain.keys))
            loose_keys.append(chain.keys)
            loose_ranks.append(np.full(len(chain.keys), rank, rank_type))
            at += len(chain.keys)
    return Layout(
        num_items=np.array(num_items, np.int64),
        segments=tuple(segments),
        loose=loose,
        loose_key=np.concatenate(loose_keys),
        loose_rank=np.concatenate(loose_ranks),
    )


def _chains(num_items: Sequence[int], table: KeyTable) -> Iterable[_Chain]:
    """Find the runs that ranks share, joined where they are always neighbours."""
    ranks_of: dict[tuple[int, ...], list[int]] = {}
    for rank, runs in enumerate(table.runs_of):
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


_RANKS_PER_BLOCK = 64  # 64 x 1,000 x 4 bytes stay in the cache


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """The items of all ranks, in the order of ``layout``.

    Attributes:
        start, length: As in `SaveColumns`.
        box: Row among the boxes; 0 for an item that is none.
        boxes: Of all ranks, as in `SaveColumns`; row 0 stands for none.
    """

    layout: Layout
    start: Ints
    length: Ints
    box: Ints
    boxes: Ints


def read_items(plans: Sequence[PackedPlan], table: KeyTable) -> Items:
    """Decode all ranks' columns and put them in one order.

    Raises:
        CorruptError: If a plan's columns and table of keys do not fit together.
    """
    layout = lay_out([plan.num_items for plan in plans], table)
    total = int(layout.num_items.sum())
    start, length = np.empty(total, np.int32), np.empty(total, np.int32)
    box = np.zeros(total, np.uint8)
    boxes: list[Ints] = []  # distinct ones: the ranks of a row of the mesh have the same
    first_of: dict[object, int] = {}
    num_boxes = 0
    for low in range(0, len(plans), _RANKS_PER_BLOCK):
        block = [
            decode_columns(plan.bodies[0], plan.num_items)
            for plan in plans[low : low + _RANKS_PER_BLOCK]
        ]
        if any(max(one.start.itemsize, one.length.itemsize) > 4 for one in block):
            start = start.astype(np.int64, copy=False)
            length = length.astype(np.int64, copy=False)
        layout.put(start, low, [one.start for one in block])
        layout.put(length, low, [one.length for one in block])
        if not any(len(one.boxes) for one in block):
            continue
        rows = []
        for one in block:
            name = one.boxes.dtype, one.boxes.shape, one.boxes.tobytes()
            if name not in first_of:
                first_of[name] = num_boxes
                boxes.append(one.boxes)
                num_boxes += len(one.boxes)
            rows.append(one.box + first_of[name] * (one.box != 0))
        box = box.astype(np.promote_types(box.dtype, np.min_scalar_type(num_boxes)), copy=False)
        layout.put(box, low, rows)
    joined = _join_boxes(boxes, num_boxes)
    if joined.shape[2] >= table.step.shape[1] and num_boxes:
        raise CorruptError("a packed plan's box has more dimensions than any tensor")
    return Items(layout, start, length, box, joined)


def _join_boxes(boxes: Sequence[Ints], num_boxes: int) -> Ints:
    num_dims = max((one.shape[2] for one in boxes), default=0)
    joined = np.zeros((1 + num_boxes, 2, num_dims), np.int64)
    joined[:, 1] = 1
    at = 1
    for one in boxes:
        joined[at : at + len(one), :, : one.shape[2]] = one
        at += len(one)
    return joined


_ITEMS_PER_PIECE = 1 << 15  # a column of 64-bit integers takes 256 KiB


class Piece(NamedTuple):
    """All items of some keys, one element of each column per item.

    Attributes:
        at: Their places in the layout.
        key: Row of the joined table.
        rank: Who planned it.
        start, length: As in `SaveColumns`.
        box: Row among the boxes; 0 for an item that is none.
    """

    at: Ints
    key: Ints
    rank: Ints
    start: Ints
    length: Ints
    box: Ints

    def take(self, chosen: Ints) -> Piece:
        """Return some of the items, chosen by positions or by a mask."""
        return Piece(*(column[chosen] for column in self))


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
        parts = [part for part in parts if len(part.at)] or parts[:1]
        yield parts[0] if len(parts) == 1 else Piece(*map(np.concatenate, zip(*parts, strict=True)))


def _of_loose(items: Items, chosen: Ints) -> Piece:
    layout = items.layout
    at = (layout.first_loose + chosen).astype(layout.place_type)
    key, rank = layout.loose_key[chosen], layout.loose_rank[chosen]
    return Piece(at, key, rank, items.start[at], items.length[at], items.box[at])


def _of_segment(items: Items, segment: Segment, rows: Ints) -> Piece:
    num_ranks, place_type = len(segment.ranks), items.layout.place_type
    first = (segment.at + rows * num_ranks).astype(place_type)
    return Piece(
        (first[:, None] + np.arange(num_ranks, dtype=place_type)).ravel(),
        np.repeat(segment.keys[rows], num_ranks),
        np.tile(segment.ranks, len(rows)),
        segment.matrix(items.start)[rows].ravel(),
        segment.matrix(items.length)[rows].ravel(),
        segment.matrix(items.box)[rows].ravel(),
    )
