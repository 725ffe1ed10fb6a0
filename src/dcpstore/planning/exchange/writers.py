"""Which of its copies writes each chunk, with all ranks' loads in view."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dcpstore.planning.exchange.balance import Replicated, choose_writers
from dcpstore.planning.exchange.chunks import Chunks
from dcpstore.planning.exchange.columns import Ints

__all__ = ["RECORD_BYTES", "ChosenWriters", "Writers"]

RECORD_BYTES = 1024  # what a ``torch.save`` record adds to its payload, for the balance


@dataclass(frozen=True, slots=True, eq=False)
class ChosenWriters:
    """Who writes what.

    Attributes:
        is_kept: Per item in the order of the layout, whether its rank writes it.
        positions: Per kept item, its chunk's position among those of the key; None if
            nobody asked.
        load_bytes: Payload bytes per rank.
    """

    is_kept: Ints
    positions: Ints | None
    load_bytes: Ints


@dataclass(frozen=True, slots=True, eq=False)
class _Replicas:
    """Chunks that the same number of ranks hold.

    Attributes:
        at: Chunks x copies, the items by rank.
        ranks: Their ranks.
        cost_bytes: Per chunk what writing it costs.
        position: Per chunk its position among those of its key.
    """

    at: Ints
    ranks: Ints
    cost_bytes: Ints
    position: Ints


class Writers:
    """Collects chunks, then chooses a writer of each.

    Args:
        num_items: Items of all ranks.
        num_ranks: Ranks of the group.
        with_positions: Whether to find out `ChosenWriters.positions`.
    """

    def __init__(self, num_items: int, num_ranks: int, *, with_positions: bool = False) -> None:
        self._is_kept = np.zeros(num_items, bool)
        self._positions = np.zeros(num_items, np.int32) if with_positions else None
        self._load_bytes = np.zeros(num_ranks, np.int64)  # records included
        self._num_records = np.zeros(num_ranks, np.int64)
        self._replicas: dict[int, list[_Replicas]] = {}

    def add(self, chunks: Chunks, payload_bytes: Ints) -> None:
        """Take the chunks of further keys, all of each key at once."""
        of_key = np.diff(chunks.key, prepend=-1) != 0
        number = np.arange(len(of_key))
        position = number - np.maximum.accumulate(np.where(of_key, number, 0))
        num_copies = chunks.num_copies
        lone = np.flatnonzero(num_copies == 1)
        self._keep(chunks.items.at[chunks.first[lone]], position[lone])
        self._load(chunks.items.rank[chunks.first[lone]], payload_bytes[lone])
        counts = 2 + np.flatnonzero(np.bincount(num_copies)[2:])
        for count in counts.tolist():
            chosen = np.flatnonzero(num_copies == count)
            replicas = _Replicas(
                *self._copies(chunks, chosen, count),
                payload_bytes[chosen] + RECORD_BYTES,
                position[chosen].astype(np.int32),
            )
            self._replicas.setdefault(count, []).append(replicas)

    def _copies(self, chunks: Chunks, chosen: Ints, count: int) -> tuple[Ints, Ints]:
        copies = chunks.first[chosen, None] + np.arange(count)
        at, ranks = chunks.items.at[copies], chunks.items.rank[copies]
        if not (ranks[:, 1:] > ranks[:, :-1]).all():
            by_rank = np.argsort(ranks, axis=1, kind="stable")
            at = np.take_along_axis(at, by_rank, axis=1)
            ranks = np.take_along_axis(ranks, by_rank, axis=1)
        return at, ranks

    def _keep(self, at: Ints, position: Ints) -> None:
        self._is_kept[at] = True
        if self._positions is not None:
            self._positions[at] = position

    def _load(self, ranks: Ints, payload_bytes: Ints) -> None:
        num_ranks = len(self._num_records)
        num_records = np.bincount(ranks, minlength=num_ranks)
        # Exact: a piece's sum stays below 2**53, where a double's mantissa ends, as long as
        # its chunks have 64 GiB on average.
        load_bytes = np.bincount(ranks, payload_bytes, num_ranks).astype(np.int64)
        self._num_records += num_records
        self._load_bytes += load_bytes + RECORD_BYTES * num_records

    def choose(self) -> ChosenWriters:
        """Choose the writers of replicated chunks, the others being chosen already."""
        classes = [_join(self._replicas.pop(count)) for count in sorted(self._replicas)]
        balanced = [Replicated(one.ranks, one.cost_bytes) for one in classes]
        for one, column in zip(classes, choose_writers(balanced, self._load_bytes), strict=True):
            chosen = np.arange(len(column)), column
            self._keep(one.at[chosen], one.position)
            self._num_records += np.bincount(one.ranks[chosen], minlength=len(self._num_records))
        payload_bytes = self._load_bytes - RECORD_BYTES * self._num_records
        return ChosenWriters(self._is_kept, self._positions, payload_bytes)


def _join(parts: list[_Replicas]) -> _Replicas:
    return _Replicas(
        np.concatenate([part.at for part in parts]),
        np.concatenate([part.ranks for part in parts]),
        np.concatenate([part.cost_bytes for part in parts]),
        np.concatenate([part.position for part in parts]),
    )
