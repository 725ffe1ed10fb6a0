"""All items of a few keys at a time, so few that a processor's cache holds their columns.

Whatever is asked of items is asked key by key: which of them are copies of one chunk,
whether chunks overlap, whether they fill their tensor. So the items go piece by piece
through all steps of the merge, and nothing of a piece outlives it but its chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dcpstore.planning.exchange.columns import Ints
from dcpstore.planning.exchange.items import Items
from dcpstore.planning.exchange.layout import Segment

__all__ = ["Piece", "pieces"]

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
        yield _join([part for part in parts if len(part.at)] or parts[:1])


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


def _join(parts: list[Piece]) -> Piece:
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
