"""The distinct chunks of all plans, and who planned each.

Every (key, offsets) has an address (see `table`), so one sort brings the copies of a chunk
together. What is checked on the way: bounds, and that copies agree on their size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dcpstore.planning.exchange.columns import Ints
from dcpstore.planning.exchange.layout import Items
from dcpstore.planning.exchange.overlap import stable_order
from dcpstore.planning.exchange.table import KeyTable

__all__ = ["Chunks", "find_chunks", "num_elements", "out_of_bounds"]

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
    address = np.empty(len(items.key), np.int64)
    step = np.ascontiguousarray(table.step[:, 0]) if len(table.rows) else table.base
    for low in range(0, len(address), _BLOCK):
        part = slice(low, low + _BLOCK)
        key = items.key[part]
        address[part] = table.base[key] + items.start[part] * step[key]
    if len(items.box_at):
        inner = table.step[items.key[items.box_at], 1 : 1 + items.box_offsets.shape[1]]
        address[items.box_at] += (items.box_offsets * inner).sum(axis=1)
    order = stable_order(address)
    if order is not None:
        address = address[order]
    is_first = np.ones(len(address) + 1, bool)
    is_first[1:-1] = address[1:] != address[:-1]
    return Chunks(order, np.flatnonzero(is_first))


def num_elements(items: Items, table: KeyTable) -> Ints:
    """Return the elements of each item's chunk; a value counts its bytes where known."""
    counts = np.empty(len(items.key), np.int64)
    for low in range(0, len(counts), _BLOCK):
        part = slice(low, low + _BLOCK)
        counts[part] = items.length[part] * table.inner[items.key[part]]
    if len(items.box_at):
        counts[items.box_at] = items.length[items.box_at] * items.box_sizes.prod(axis=1)
    return counts


def _inner_sizes(table: KeyTable, num_dims: int) -> Ints:
    """Return, per key, the sizes after the first dimension, padded with 1."""
    sizes = [
        (*row.size[1 : 1 + num_dims], *(1,) * (num_dims - max(len(row.size) - 1, 0)))
        for row in table.rows
    ]
    return np.array(sizes, np.int64).reshape(len(table.rows), num_dims)
