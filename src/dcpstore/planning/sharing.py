"""Which rank fetches the bytes that several ranks want, and who gets them from it.

Ranks that hold the same data (DDP, HSDP, replicated optimizer scalars, TP-replicated norms)
plan the same fetch ranges, since a range follows from the item and its checksum blocks
alone. A range that one rank wants stays that rank's business; one that several want is
fetched by one of them and sent to the others::

    wanted by  0 1 2 3     0 1     2 3       0
               [ bundle ][bundle][bundle]  [own]
    fetched by      2        0       3       0

Bundles are grouped in waves: in one wave no rank holds more than a given number of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dcpstore.ranges import ByteRange

__all__ = ["Bundle", "SharePlan", "Units", "plan_sharing"]

Units = npt.NDArray[np.int64]
"""Fetch ranges of one rank: rows of (object number, start, end)."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """A range of an object that one rank fetches for several.

    Attributes:
        number: The same on all ranks; bundles between two ranks travel in this order.
        wave: When.
        object: Number of the object.
        range: Bytes of the object.
        fetcher: The rank that fetches it.
        ranks: All ranks that want it, the fetcher included, ascending.
    """

    number: int
    wave: int
    object: int
    range: ByteRange
    fetcher: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SharePlan:
    """What ranks fetch for each other.

    Attributes:
        bundles: In the order of their numbers.
        num_waves: Waves in all; every rank takes part in each.
        unique_bytes: Bytes of all fetch ranges, each counted once.
        wanted_bytes: The same, counted once per rank that wants them.
    """

    bundles: tuple[Bundle, ...]
    num_waves: int
    unique_bytes: int
    wanted_bytes: int

    def of_rank(self, rank: int) -> SharePlan:
        """Return the part that concerns one rank."""
        own = tuple(bundle for bundle in self.bundles if rank in bundle.ranks)
        return SharePlan(own, self.num_waves, self.unique_bytes, self.wanted_bytes)

    def fetched_bytes(self, num_ranks: int) -> list[int]:
        """Return how many shared bytes each rank fetches."""
        loads = [0] * num_ranks
        for bundle in self.bundles:
            loads[bundle.fetcher] += bundle.range.num_bytes
        return loads


def plan_sharing(
    units: Sequence[Units], *, request_bytes: int, join_gap_bytes: int, wave_bytes: int
) -> SharePlan:
    """Plan who fetches what for whom.

    Args:
        units: Fetch ranges per rank. Duplicates within a rank count once.
        request_bytes: Longest bundle, unless one unit is longer.
        join_gap_bytes: Widest hole worth fetching and sending along.
        wave_bytes: Most bytes of one wave that a rank holds.
    """
    unique, sets = _wanting_ranks(units)
    lengths = unique[:, 2] - unique[:, 1]
    counts = np.array([len(ranks) for ranks in sets], dtype=np.int64)
    shared: dict[tuple[int, ...], list[int]] = {}
    for row, ranks in enumerate(sets):
        if len(ranks) > 1:
            shared.setdefault(ranks, []).append(row)
    drafts = [
        draft
        for ranks, rows in shared.items()
        for draft in _bundle(unique[rows], ranks, request_bytes, join_gap_bytes)
    ]
    waves = _number_waves(drafts, len(units), wave_bytes)
    loads = np.zeros(len(units), dtype=np.int64)
    bundles = []
    for number, (wave, obj, span, ranks) in enumerate(waves):
        members = np.asarray(ranks)
        fetcher = int(members[np.argmin(loads[members])])
        loads[fetcher] += span.num_bytes
        bundles.append(Bundle(number, wave, obj, span, fetcher, ranks))
    return SharePlan(
        tuple(bundles),
        1 + max((bundle.wave for bundle in bundles), default=-1),
        int(lengths.sum()),
        int((lengths * counts).sum()),
    )


def _wanting_ranks(units: Sequence[Units]) -> tuple[Units, list[tuple[int, ...]]]:
    """Return the distinct units in order and, for each, the ranks that want it."""
    distinct = [np.unique(one.reshape(-1, 3), axis=0) for one in units]
    ranks = np.repeat(np.arange(len(units)), [len(one) for one in distinct])
    unique, inverse = np.unique(np.concatenate(distinct), axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)  # numpy 2.0 alone shapes it otherwise
    order = np.argsort(inverse, kind="stable")
    ends = np.cumsum(np.bincount(inverse, minlength=len(unique)))
    members = ranks[order]
    edges = np.concatenate([[0], ends]).astype(np.int64)
    sets = [tuple(members[a:b].tolist()) for a, b in pairwise(edges)]
    return unique, sets


_Draft: TypeAlias = "tuple[int, ByteRange, tuple[int, ...]]"


def _bundle(
    units: Units, ranks: tuple[int, ...], request_bytes: int, join_gap_bytes: int
) -> list[_Draft]:
    """Join neighbouring units that the same ranks want."""
    joined: list[list[int]] = []
    for obj, start, end in units.tolist():
        last = joined[-1] if joined else None
        if (
            last is not None
            and last[0] == obj
            and start - last[2] <= join_gap_bytes
            and max(end, last[2]) - last[1] <= request_bytes
        ):
            last[2] = max(end, last[2])
        else:
            joined.append([obj, start, end])
    return [(obj, ByteRange(start, end), ranks) for obj, start, end in joined]


def _number_waves(
    drafts: Sequence[_Draft], num_ranks: int, wave_bytes: int
) -> list[tuple[int, int, ByteRange, tuple[int, ...]]]:
    """Put each bundle into the first wave in which all its ranks have room for it.

    Bundles of the same ranks stay in order. One that is larger than a wave gets one alone.
    """
    held: list[npt.NDArray[np.int64]] = []  # per wave: bytes per rank
    first_wave: dict[tuple[int, ...], int] = {}
    numbered = []
    for obj, span, ranks in sorted(drafts, key=lambda draft: draft[:2]):
        members = np.asarray(ranks)
        wave = first_wave.get(ranks, 0)
        while wave < len(held):
            fullest = int(held[wave][members].max())
            if fullest == 0 or fullest + span.num_bytes <= wave_bytes:
                break
            wave += 1
        else:
            held.append(np.zeros(num_ranks, dtype=np.int64))
        held[wave][members] += span.num_bytes
        first_wave[ranks] = wave
        numbered.append((wave, obj, span, ranks))
    return sorted(numbered)
