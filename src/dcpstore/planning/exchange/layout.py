"""All ranks' items in one order: by table row first, by rank second.

Plans arrive rank by rank. Ranks of a sharded job hold chunk r of every tensor, so in this
order their chunks come sorted by (key, offset) or nearly so, and the sort that finds
replicas and overlaps is close to one pass::

    rank 0: w0 v0 b0        segment (ranks 0..2 x rows w, v, b):   w0 w1 w2 v0 v1 v2 b0 b1 b2
    rank 1: w1 v1 b1   ->   loose (what few ranks have):           x2
    rank 2: w2 v2 b2 x2
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from dcpstore.errors import CorruptError
from dcpstore.planning.exchange.columns import Ints
from dcpstore.planning.exchange.table import KeyTable

__all__ = ["Layout", "LooseRun", "Segment", "lay_out"]

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
                keys = np.concatenate([table.runs[run].keys for run in chain_runs])
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
    keys = _concatenate([table.runs[run].keys for run in table.runs_of[rank]])
    if len(row_numbers) and int(row_numbers.max()) >= len(keys):
        raise CorruptError(f"rank {rank}'s packed plan refers to a key that its table lacks")
    result: Ints = keys[row_numbers]
    return result


def _concatenate(arrays: Sequence[Ints]) -> Ints:
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)
