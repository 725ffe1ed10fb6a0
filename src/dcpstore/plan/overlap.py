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
in one dimension. If these are many, groups are cut in two through chunks first, after which
lines cut again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dcpstore.plan.wire import Ints

_PAIRS_PER_BLOCK = 1 << 20


def find_overlaps(
    group: Ints,
    starts: Ints,
    ends: Ints,
    *,
    max_found: int = 16,
    max_pairs: int = _PAIRS_PER_BLOCK,
) -> Ints:
    """Find pairs of chunks that have an element in common.

    Args:
        group: Tensor of each chunk, ascending; chunks of different tensors never overlap.
        starts: First element per chunk and dimension.
        ends: Behind the last element; every chunk holds at least one.
        max_found: Look no further after so many.
        max_pairs: Compare as many pairs rather than cut through chunks.

    Returns:
        Pairs of positions, the lower one first; at most ``max_found``, and none only if no two
        chunks overlap.
    """
    pieces = _Pieces(np.arange(len(group)), _renumber(group), starts, ends).cut_apart()
    while 2 * len(starts) > len(pieces.members) and pieces.num_candidates() > max_pairs:
        halves = pieces.halve()
        if halves is None:
            break
        pieces = halves.cut_apart()
    found: dict[tuple[int, int], None] = {}
    for one, other in pieces.candidates():
        meets = ((starts[one] < ends[other]) & (starts[other] < ends[one])).all(axis=1)
        pairs = np.sort(np.stack([one[meets], other[meets]], axis=1), axis=1)
        found.update(dict.fromkeys(map(tuple, pairs.tolist())))
        if len(found) >= max_found:
            break
    return np.array(list(found)[:max_found], np.int64).reshape(-1, 2)


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """Chunks, or parts of chunks, that may overlap others of their group.

    Attributes:
        members: The chunk of each.
        group: Ascending.
        low, high: Where the part lies; the parts of a chunk are in different groups.
    """

    members: Ints
    group: Ints
    low: Ints
    high: Ints

    def lines(self) -> list[_Line]:
        return [_Line.of(self.group, *sides) for sides in zip(self.low.T, self.high.T, strict=True)]

    def cut_apart(self) -> _Pieces:
        """Cut groups by straight lines that cross no piece, and forget pieces that are alone."""
        pieces, dim, num_uncut, num_dims = self, 0, 0, self.low.shape[1]
        while len(pieces.members) and num_uncut < num_dims:
            num_groups = int(pieces.group[-1]) + 1
            line = _Line.of(pieces.group, pieces.low[:, dim], pieces.high[:, dim])
            group = line.cut()
            num_uncut = num_uncut + 1 if int(group[-1]) + 1 == num_groups else 0
            is_shared = np.zeros(len(group), bool)
            is_same = group[1:] == group[:-1]
            is_shared[1:] = is_same
            is_shared[:-1] |= is_same
            kept = line.order[is_shared]
            pieces = _Pieces(
                pieces.members[kept],
                _renumber(group[is_shared]),
                pieces.low[kept],
                pieces.high[kept],
            )
            dim = (dim + 1) % num_dims
        return pieces

    def halve(self) -> _Pieces | None:
        """Cut each group in two, through pieces if need be: then lines cut that were blocked.

        Of the pieces that begin behind the first of their group, half lie on either side. The
        dimension that has most of them is taken, so a few rounds are enough.

        Returns:
            None if all pieces of each group begin at one place: then they overlap.
        """
        first = np.flatnonzero(np.diff(self.group, prepend=-1))
        is_later = self.low > np.minimum.reduceat(self.low, first)[self.group]
        dim = int(is_later.sum(axis=0).argmax())
        low, high = self.low[:, dim], self.high[:, dim]
        num_later = np.add.reduceat(is_later[:, dim], first, dtype=np.int64)
        if not num_later.any():
            return None
        end = np.append(first[1:], len(low))
        begun = low[np.lexsort((low, self.group))]
        middle = begun[end - np.maximum((num_later + 1) // 2, 1)]
        at = middle[self.group]
        sides = []
        for side, chosen in enumerate((low < at, high > at)):
            part_low, part_high = self.low[chosen].copy(), self.high[chosen].copy()
            bound = (part_high if side == 0 else part_low)[:, dim]
            (np.minimum if side == 0 else np.maximum)(bound, at[chosen], out=bound)
            sides.append((self.members[chosen], 2 * self.group[chosen] + side, part_low, part_high))
        members, group, low, high = map(np.concatenate, zip(*sides, strict=True))
        order = np.argsort(group, kind="stable")
        return _Pieces(members[order], _renumber(group[order]), low[order], high[order])

    def num_candidates(self) -> int:
        """Return how many pairs are left to compare."""
        return min((int(line.num_candidates().sum()) for line in self.lines()), default=0)

    def candidates(self) -> Iterator[tuple[Ints, Ints]]:
        """Yield pairs of chunks that meet in the dimension where fewest do, block by block."""
        if not len(self.members):
            return
        counts, line = min(
            ((line.num_candidates(), line) for line in self.lines()),
            key=lambda pair: int(pair[0].sum()),
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
            yield self.members[order[one]], self.members[order[other]]
            low = high


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
