"""The distinct chunks of some keys, and who planned each.

Every (key, offsets) has an address (see `table`), so one sort brings the copies of a chunk
together; of a sharded job they lie that way already.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dcpstore.planning.exchange.columns import Ints
from dcpstore.planning.exchange.global_plan import ChunkColumns
from dcpstore.planning.exchange.items import Boxes
from dcpstore.planning.exchange.overlap import stable_order
from dcpstore.planning.exchange.pieces import Piece
from dcpstore.planning.exchange.table import KeyTable

__all__ = ["ChunkRecord", "Chunks", "find_chunks", "out_of_bounds"]


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """The chunks of some keys, in the order of keys and offsets.

    Attributes:
        items: Who plans them: the copies of a chunk behind each other, by place.
        first: Per chunk, its first copy among ``items``.
        num_copies: Per chunk, how many there are.
        key, start, length, box: What the first copy says of it; see `Piece`.
        num_elements: Per chunk; a value counts its bytes where known.
    """

    items: Piece
    first: Ints
    num_copies: Ints
    key: Ints
    start: Ints
    length: Ints
    box: Ints | None
    num_elements: Ints


def out_of_bounds(piece: Piece, boxes: Boxes, table: KeyTable) -> Ints:
    """Return the positions of the items whose chunk is not inside its tensor."""
    room = table.rows_bound[piece.key] - piece.length
    is_bad = (piece.start < 0) | (piece.length < 0) | (piece.start > room)
    if piece.box is not None:
        at = np.flatnonzero(piece.box >= 0)
        offsets, sizes = boxes.offsets[piece.box[at]], boxes.sizes[piece.box[at]]
        bound = table.inner_sizes[piece.key[at], : boxes.num_dims]
        is_bad[at] |= ((offsets < 0) | (sizes < 0) | (offsets > bound - sizes)).any(axis=1)
    return np.flatnonzero(is_bad)


def find_chunks(piece: Piece, boxes: Boxes, table: KeyTable) -> Chunks:
    """Group the items, which lie inside their tensors, by key and offsets."""
    address = table.base[piece.key] + piece.start * table.step[piece.key, 0]
    if piece.box is not None:
        at = np.flatnonzero(piece.box >= 0)
        inner = table.step[piece.key[at], 1 : 1 + boxes.num_dims]
        address[at] += (boxes.offsets[piece.box[at]] * inner).sum(axis=1)
    order = stable_order(address)
    if order is not None:
        piece, address = piece[order], address[order]
    is_first = np.ones(len(address), bool)
    np.not_equal(address[1:], address[:-1], out=is_first[1:])
    piece, is_first = _without_empty_copies(piece, is_first, boxes, table)
    first = np.flatnonzero(is_first)
    key, length = piece.key[first], piece.length[first]
    box = None if piece.box is None else piece.box[first]
    num_elements = length * table.inner[key]
    if box is not None:
        at = np.flatnonzero(box >= 0)
        num_elements[at] = length[at] * boxes.sizes[box[at]].prod(axis=1)
    num_copies = np.diff(first, append=len(is_first))
    return Chunks(piece, first, num_copies, key, piece.start[first], length, box, num_elements)


def _without_empty_copies(
    piece: Piece, is_first: Ints, boxes: Boxes, table: KeyTable
) -> tuple[Piece, Ints]:
    """Drop empty chunks that share their offsets with a chunk that holds something.

    To write the empty one in its place would lose data.

    Args:
        piece: Items, sorted by address.
        is_first: Whether an item is the first of its chunk.
        boxes: Which of them are boxes.
        table: Their keys.

    Returns:
        The same without them.
    """
    is_empty = piece.length == 0
    if piece.box is not None:
        at = np.flatnonzero(piece.box >= 0)
        is_empty[at] |= (boxes.sizes[piece.box[at]] == 0).any(axis=1)
    if not ((is_empty[1:] != is_empty[:-1]) & ~is_first[1:]).any():
        return piece, is_first
    first = np.flatnonzero(is_first)
    is_mixed = ~np.logical_and.reduceat(is_empty, first) & ~table.is_value[piece.key[first]]
    stays = ~(is_empty & np.repeat(is_mixed, np.diff(first, append=len(is_first))))
    chunk = np.cumsum(is_first)[stays]
    return piece[stays], np.diff(chunk, prepend=0) != 0


class ChunkRecord:
    """Keeps what the metadata says of chunks, piece after piece."""

    def __init__(self, boxes: Boxes) -> None:
        self._boxes = boxes
        self._columns: list[tuple[Ints, Ints, Ints]] = []
        self._box_at = [np.empty(0, np.int64)]
        self._box = [np.empty(0, np.int64)]
        self._num_chunks = 0

    def add(self, chunks: Chunks) -> None:
        """Keep the chunks of further keys."""
        self._columns.append((chunks.key, chunks.start, chunks.length))
        if chunks.box is not None:
            at = np.flatnonzero(chunks.box >= 0)
            self._box_at.append(self._num_chunks + at)
            self._box.append(chunks.box[at])
        self._num_chunks += len(chunks.key)

    def finish(self, num_keys: int) -> ChunkColumns:
        """Return all chunks; there are none of keys without items."""
        none = np.empty(0, np.int32)
        key, start, length = (
            (np.concatenate([none, *column]) for column in zip(*self._columns, strict=True))
            if self._columns
            else (none, none, none)
        )
        box = np.concatenate(self._box)
        return ChunkColumns(
            key=key,
            start=start,
            length=length,
            first_of_key=np.searchsorted(key, np.arange(num_keys + 1, dtype=np.int32)),
            box_at=np.concatenate(self._box_at),
            box_offsets=self._boxes.offsets[box],
            box_sizes=self._boxes.sizes[box],
        )
