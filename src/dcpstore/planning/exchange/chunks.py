"""The distinct chunks of all plans, and who planned each.

Every (key, offsets) has an address (see `table`), so one sort brings the copies of a chunk
together. What is checked on the way: bounds, and that copies agree on their size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dcpstore.planning.exchange.columns import Ints
from dcpstore.planning.exchange.global_plan import ChunkColumns
from dcpstore.planning.exchange.items import Items
from dcpstore.planning.exchange.overlap import stable_order
from dcpstore.planning.exchange.table import KeyTable

__all__ = ["Chunks", "chunk_columns", "find_chunks", "num_elements", "out_of_bounds"]

_BLOCK = 1 << 17  # items per step: temporary columns of 1 MiB stay in the cache and the heap


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Items grouped by what they write.

    Attributes:
        order: Items by key, offsets, then position.
        first: Per chunk, where its copies begin in ``order``; one more at the end.
    """

    order: Ints
    first: Ints

    @property
    def num_copies(self) -> Ints:
        """How many items write each chunk."""
        return np.diff(self.first)

    def items(self, places: Ints) -> Ints:
        """Return the items at some places of ``order``."""
        found: Ints = self.order[places]
        return found


def out_of_bounds(items: Items, table: KeyTable) -> Ints:
    """Return the items whose chunk is not inside its tensor, boxes included."""
    found = []
    for low in range(0, len(items.key), _BLOCK):
        part = slice(low, low + _BLOCK)
        start, length = items.start[part], items.length[part]
        room = table.rows_bound[items.key[part]] - length
        found.append(low + np.flatnonzero((start < 0) | (length < 0) | (start > room)))
    bad = np.concatenate(found) if found else np.empty(0, np.int64)
    if len(items.box_at):
        bound = _inner_sizes(table, items.box_sizes.shape[1])[items.key[items.box_at]]
        offsets, sizes = items.box_offsets, items.box_sizes
        is_bad = ((offsets < 0) | (sizes < 0) | (offsets > bound - sizes)).any(axis=1)
        bad = np.union1d(bad, items.box_at[is_bad])
    return bad


def find_chunks(items: Items, table: KeyTable) -> Chunks:
    """Group the items, which lie inside their tensors, by key and offsets."""
    order = np.empty(len(items.key), np.int32 if len(items.key) < 2**31 else np.int64)
    firsts, at = [], 0
    for piece in _pieces(items, len(table.rows)):
        piece, address = _sort(piece, items, table)
        is_first = np.ones(len(piece), bool)
        np.not_equal(address[1:], address[:-1], out=is_first[1:])
        piece, first = _without_empty_copies(piece, np.flatnonzero(is_first), items, table)
        order[at : at + len(piece)] = piece
        firsts.append((first + at).astype(order.dtype))
        at += len(piece)
    return Chunks(order[:at], np.concatenate([*firsts, np.array([at], order.dtype)]))


def _pieces(items: Items, num_keys: int) -> Iterator[Ints]:
    """Yield the items key by key, so many keys at a time that a cache holds their columns."""
    segments = items.layout.segments
    first_loose = items.layout.first_loose
    loose_key = items.key[first_loose:]
    by_key = np.argsort(loose_key, kind="stable")
    loose_key = loose_key[by_key]
    counts = np.bincount(loose_key, minlength=num_keys)
    rows = [np.argsort(segment.keys, kind="stable") for segment in segments]
    for segment in segments:
        counts += len(segment.ranks) * np.bincount(segment.keys, minlength=num_keys)
    number = (np.cumsum(counts) - counts) // _BLOCK  # the piece that each key goes to
    keys = [*np.flatnonzero(np.diff(number, prepend=-1)).tolist(), num_keys]
    cuts = [
        np.searchsorted(segment.keys[order], keys).tolist()
        for segment, order in zip(segments, rows, strict=True)
    ]
    loose_cuts = np.searchsorted(loose_key, keys).tolist()
    for n in range(len(keys) - 1):
        found = [by_key[loose_cuts[n] : loose_cuts[n + 1]] + first_loose]
        for segment, order, cut in zip(segments, rows, cuts, strict=True):
            if cut[n] < cut[n + 1]:
                num_ranks = len(segment.ranks)
                row = order[cut[n] : cut[n + 1], None] * num_ranks
                found.append((segment.at + row + np.arange(num_ranks)).ravel())
        yield np.concatenate(found)


def _sort(piece: Ints, items: Items, table: KeyTable) -> tuple[Ints, Ints]:
    """Sort some items by their addresses; return both."""
    key = items.key[piece]
    address = table.base[key] + items.start[piece] * table.step[key, 0]
    if items.box_row is not None:
        row = items.box_row[piece]
        at = np.flatnonzero(row >= 0)
        inner = table.step[key[at], 1 : 1 + items.box_offsets.shape[1]]
        address[at] += (items.box_offsets[row[at]] * inner).sum(axis=1)
    order = stable_order(address)
    return (piece, address) if order is None else (piece[order], address[order])


def _without_empty_copies(
    piece: Ints, first: Ints, items: Items, table: KeyTable
) -> tuple[Ints, Ints]:
    """Drop empty chunks that share their offsets with a chunk that holds something.

    To write the empty one in its place would lose data.

    Args:
        piece: Items, sorted by address.
        first: Where the items of each chunk begin.
        items: All items.
        table: Their keys.

    Returns:
        The same without them.
    """
    is_empty = items.length[piece] == 0
    if items.box_row is not None:
        row = items.box_row[piece]
        at = np.flatnonzero(row >= 0)
        is_empty[at] |= (items.box_sizes[row[at]] == 0).any(axis=1)
    if not is_empty.any():
        return piece, first
    is_mixed = np.logical_or.reduceat(is_empty, first)
    is_mixed &= ~np.logical_and.reduceat(is_empty, first)
    is_mixed &= ~table.is_value[items.key[piece[first]]]
    if not is_mixed.any():
        return piece, first
    goes = is_empty & np.repeat(is_mixed, np.diff(first, append=len(piece)))
    dropped = np.flatnonzero(goes)
    return piece[~goes], first - np.searchsorted(dropped, first, "left")


def chunk_columns(chunks: Chunks, items: Items, table: KeyTable) -> ChunkColumns:
    """Return what the metadata says of each chunk, in the order of keys and offsets."""
    count = len(chunks.first) - 1
    key = np.empty(count, np.int32)
    start, length = np.empty(count, items.start.dtype), np.empty(count, items.length.dtype)
    found, boxes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for low in range(0, count, _BLOCK):
        part = slice(low, min(low + _BLOCK, count))
        item = chunks.items(chunks.first[part])
        key[part], start[part], length[part] = (
            items.key[item],
            items.start[item],
            items.length[item],
        )
        if items.box_row is not None:
            row = items.box_row[item]
            at = np.flatnonzero(row >= 0)
            found.append(low + at)
            boxes.append(row[at])
    box = np.concatenate(boxes)
    return ChunkColumns(
        key=key,
        start=start,
        length=length,
        first_of_key=np.searchsorted(key, np.arange(len(table.rows) + 1, dtype=np.int32)),
        box_at=np.concatenate(found),
        box_offsets=items.box_offsets[box],
        box_sizes=items.box_sizes[box],
    )


def num_elements(columns: ChunkColumns, table: KeyTable) -> Ints:
    """Return the elements of each chunk; a value counts its bytes where known."""
    counts = columns.length.astype(np.int64)
    for low in range(0, len(counts), _BLOCK):
        part = slice(low, low + _BLOCK)
        counts[part] *= table.inner[columns.key[part]]
    counts[columns.box_at] = columns.length[columns.box_at] * columns.box_sizes.prod(axis=1)
    return counts


def _inner_sizes(table: KeyTable, num_dims: int) -> Ints:
    """Return, per key, the sizes after the first dimension, padded with 1."""
    sizes = [
        (*row.size[1 : 1 + num_dims], *(1,) * (num_dims - max(len(row.size) - 1, 0)))
        for row in table.rows
    ]
    return np.array(sizes, np.int64).reshape(len(table.rows), num_dims)
