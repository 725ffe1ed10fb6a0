"""Overlaps among the chunks of many tensors at once, in a few sorts.

Chunks are cut apart by straight lines: sort a group of chunks by where they start in one
dimension, and cut wherever a chunk starts behind the end of all before it. Every sharding
over a mesh comes apart into single chunks after one pass per dimension::

    +---+---+        dimension 0 cuts        +---+---+       dimension 1 cuts
    | a | b |        {a b} from {c d}        | a | b |       a from b, c from d
    +---+---+                                +---+---+
    | c | d |                                | c | d |
    +---+---+

All groups of all tensors are sorted and cut together. What no line cuts (a pinwheel of
chunks, or a real overlap) is compared pair by pair, only among chunks whose extents meet
in one dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dcpstore.planning.exchange.columns import Ints

__all__ = ["find_overlaps", "stable_order"]

_PAIRS_PER_BLOCK = 1 << 20


def find_overlaps(group: Ints, starts: Ints, ends: Ints, *, max_found: int = 16) -> Ints:
    """Find pairs of chunks that have an element in common.

    Args:
        group: Tensor of each chunk, ascending; chunks of different tensors never overlap.
        starts: First element per chunk and dimension.
        ends: Behind the last element; every chunk holds at least one.
        max_found: Look no further after so many.

    Returns:
        Pairs of positions; at most ``max_found`` and none only if no two chunks overlap.
    """
    members = np.arange(len(group))
    group = _renumber(group)
    dim, num_uncut = 0, 0
    while len(members) and num_uncut < starts.shape[1]:
        num_groups = int(group[-1]) + 1
        line = _Line.of(group, starts[members, dim], ends[members, dim])
        pieces = line.cut()
        num_uncut = num_uncut + 1 if int(pieces[-1]) + 1 == num_groups else 0
        members, group = _drop_single(members[line.order], pieces)
        dim = (dim + 1) % starts.shape[1]
    found: list[tuple[int, int]] = []
    for one, other in _candidates(members, group, starts, ends):
        meets = ((starts[one] < ends[other]) & (starts[other] < ends[one])).all(axis=1)
        found.extend(zip(one[meets].tolist(), other[meets].tolist(), strict=True))
        if len(found) >= max_found:
            break
    return np.array(found[:max_found], np.int64).reshape(-1, 2)


@dataclass(frozen=True, slots=True, eq=False)
class _Line:
    """One dimension of all groups, laid out one group behind the other.

    Attributes:
        order: The chunks by group, then start.
        start, end: In that order, where they lie on the line. The groups' extents add up
            to at most the elements of their tensors, so nothing overflows.
    """

    order: Ints
    start: Ints
    end: Ints

    @classmethod
    def of(cls, group: Ints, start: Ints, end: Ints) -> _Line:
        firsts = np.flatnonzero(np.diff(group, prepend=-1))
        low = np.minimum.reduceat(start, firsts)
        extent = np.maximum.reduceat(end, firsts) - low
        shift = (np.cumsum(extent) - extent - low)[group]
        start, end = start + shift, end + shift
        order = stable_order(start)
        if order is None:
            return cls(np.arange(len(start)), start, end)
        return cls(order, start[order], end[order])

    def cut(self) -> Ints:
        """Number the pieces between the lines that no chunk crosses."""
        is_cut = np.ones(len(self.start), bool)
        is_cut[1:] = self.start[1:] >= np.maximum.accumulate(self.end)[:-1]
        pieces: Ints = np.cumsum(is_cut) - 1
        return pieces

    def num_candidates(self) -> Ints:
        """Return, per chunk, how many of the chunks behind it start before its end."""
        reach: Ints = np.searchsorted(self.start, self.end, "left")
        return reach - np.arange(1, len(self.start) + 1)


def stable_order(values: Ints) -> Ints | None:
    """Return the stable ascending order of some numbers; None if that is how they are."""
    if bool((values[1:] >= values[:-1]).all()):
        return None
    return np.argsort(values, kind="stable")


def _renumber(group: Ints) -> Ints:
    numbers: Ints = np.cumsum(np.diff(group, prepend=group[:1]) != 0)
    return numbers


def _drop_single(members: Ints, group: Ints) -> tuple[Ints, Ints]:
    """Forget the groups of one chunk: nothing is left for it to overlap with."""
    is_shared = np.zeros(len(group), bool)
    is_same = group[1:] == group[:-1]
    is_shared[1:] = is_same
    is_shared[:-1] |= is_same
    return members[is_shared], _renumber(group[is_shared])


def _candidates(
    members: Ints, group: Ints, starts: Ints, ends: Ints
) -> Iterator[tuple[Ints, Ints]]:
    """Yield pairs of chunks that meet in the dimension where fewest do, block by block."""
    if not len(members):
        return
    lines = [
        _Line.of(group, starts[members, dim], ends[members, dim]) for dim in range(starts.shape[1])
    ]
    counts, line = min(
        ((line.num_candidates(), line) for line in lines), key=lambda pair: int(pair[0].sum())
    )
    ends_of = np.cumsum(counts)
    low = 0
    while low < len(counts):
        before = int(ends_of[low - 1]) if low else 0
        high = int(np.searchsorted(ends_of, before + _PAIRS_PER_BLOCK, "right"))
        high = max(high, low + 1)
        one = np.repeat(np.arange(low, high), counts[low:high])
        first_pair = ends_of[low:high] - counts[low:high] - before
        other = one + 1 + np.arange(len(one)) - np.repeat(first_pair, counts[low:high])
        order = line.order
        yield members[order[one]], members[order[other]]
        low = high
