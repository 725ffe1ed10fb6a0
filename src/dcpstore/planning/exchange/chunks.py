"""The distinct chunks of all plans, and who planned each.

Every (key, offsets) has an address (see `table`), so one sort brings the copies of a chunk
together. What is checked on the way: bounds, and that copies agree on their size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dcpstore.planning.exchange.columns import Ints
from dcpstore.planning.exchange.global_plan import ChunkColumns
from dcpstore.planning.exchange.layout import Items
from dcpstore.planning.exchange.overlap import stable_order
from dcpstore.planning.exchange.table import KeyTable

__all__ = ["Chunks", "chunk_columns", "find_chunks", "num_elements", "out_of_bounds"]

_BLOCK = 1 << 20  # items per step, so that temporary columns stay small


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Items grouped by what they write.

    Attributes:
        order: Items by key, offsets, then position; None if that is their order.
        first: Per chunk, where its copies begin in ``order``; one more at the end.
    """

    order: Ints | None
    first: Ints

    @property
    def num_copies(self) -> Ints:
        """How many items write each chunk."""
        return np.diff(self.first)

    def items(self, places: Ints) -> Ints:
        """Return the items at some places of ``order``."""
        return places if self.order is None else self.order[places]


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
    address = _addresses(items, table)
    order = stable_order(address)
    if order is not None:
        address = address[order]
    is_first = np.ones(len(address) + 1, bool)
    np.not_equal(address[1:], address[:-1], out=is_first[1:-1])
    chunks = Chunks(order, np.flatnonzero(is_first))
    return _without_empty_copies(chunks, _is_empty(items, table))


def _addresses(items: Items, table: KeyTable) -> Ints:
    """Return the number that stands for each item's key and offsets."""
    address = np.empty(len(items.key), np.int64)
    for segment in items.layout.segments:
        part = slice(segment.at, segment.end)
        shape = (len(segment.keys), len(segment.ranks))
        out = address[part].reshape(shape)
        step = table.step[segment.keys, 0][:, None]
        np.multiply(items.start[part].reshape(shape), step, out=out)
        out += table.base[segment.keys][:, None]
    loose = slice(items.layout.first_loose, None)
    key = items.key[loose]
    address[loose] = table.base[key] + items.start[loose] * table.step[key, 0]
    if len(items.box_at):
        inner = table.step[items.key[items.box_at], 1 : 1 + items.box_offsets.shape[1]]
        address[items.box_at] += (items.box_offsets * inner).sum(axis=1)
    return address


def chunk_columns(chunks: Chunks, items: Items, table: KeyTable) -> ChunkColumns:
    """Return what the metadata says of each chunk, in the order of keys and offsets."""
    item = chunks.items(chunks.first[:-1])
    key = items.key[item]
    box_at, boxes = np.empty(0, np.int64), np.empty(0, np.int64)
    if items.box_row is not None:
        row = items.box_row[item]
        box_at = np.flatnonzero(row >= 0)
        boxes = row[box_at]
    return ChunkColumns(
        key=key,
        start=items.start[item],
        length=items.length[item],
        first_of_key=np.searchsorted(key, np.arange(len(table.rows) + 1, dtype=np.int32)),
        box_at=box_at,
        box_offsets=items.box_offsets[boxes],
        box_sizes=items.box_sizes[boxes],
    )


def num_elements(columns: ChunkColumns, table: KeyTable) -> Ints:
    """Return the elements of each chunk; a value counts its bytes where known."""
    counts = table.inner[columns.key]
    counts *= columns.length
    counts[columns.box_at] = columns.length[columns.box_at] * columns.box_sizes.prod(axis=1)
    result: Ints = counts
    return result


def _is_empty(items: Items, table: KeyTable) -> Ints:
    """Tell which items are chunks without an element."""
    empty = items.length == 0
    empty[items.box_at[(items.box_sizes == 0).any(axis=1)]] = True
    found = np.flatnonzero(empty)
    empty[found[table.is_value[items.key[found]]]] = False
    # A row of a tensor of size (5, 0) holds nothing either, but then no chunk of it does.
    result: Ints = empty
    return result


def _without_empty_copies(chunks: Chunks, is_empty: Ints) -> Chunks:
    """Drop empty chunks that share their offsets with a chunk that holds something.

    To write the empty one in its place would lose data.
    """
    if not is_empty.any():
        return chunks
    if chunks.order is not None:
        is_empty = is_empty[chunks.order]
    firsts = chunks.first[:-1]
    is_mixed = np.logical_or.reduceat(is_empty, firsts)
    is_mixed &= ~np.logical_and.reduceat(is_empty, firsts)
    if not is_mixed.any():
        return chunks
    goes = is_empty & np.repeat(is_mixed, chunks.num_copies)
    places = np.flatnonzero(goes)
    first = chunks.first - np.searchsorted(places, chunks.first, "left")
    return Chunks(chunks.items(np.flatnonzero(~goes)), first)


def _inner_sizes(table: KeyTable, num_dims: int) -> Ints:
    """Return, per key, the sizes after the first dimension, padded with 1."""
    sizes = [
        (*row.size[1 : 1 + num_dims], *(1,) * (num_dims - max(len(row.size) - 1, 0)))
        for row in table.rows
    ]
    return np.array(sizes, np.int64).reshape(len(table.rows), num_dims)
