"""Who writes what several ranks hold: bytes balanced, the same answer for the same plans.

The rule is "largest first, to the least loaded" (LPT; Graham 1969), within each set of
ranks that holds the same chunks. Sets without a common rank do not interact, so they
advance together, one chunk each per vectorised step::

    hybrid sharding, 2 replicas of 3 shards      step 1       step 2
    set {0,3}: chunks 9 8 1                      9 -> 0       8 -> 3     ...
    set {1,4}: chunks 9 8 1                      9 -> 1       8 -> 4     ...
    set {2,5}: chunks 9 8 1                      9 -> 2       8 -> 5     ...

Chunks of about the same cost (within a factor of two) are dealt out together, the largest
first; of those, small sets go first: they have the least choice, and chunks that many
ranks hold then fill what is left uneven.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dcpstore.planning.exchange.columns import Ints

__all__ = ["Replicated", "choose_writers"]

_MAX_LAYERS = 62  # bits of a word
_MAX_TIERS = 1024  # exponents of a double


@dataclass(frozen=True, slots=True, eq=False)
class Replicated:
    """Chunks that the same number of ranks hold.

    Attributes:
        ranks: Per chunk its holders, ascending; chunks x holders.
        cost_bytes: Per chunk what writing it costs.
    """

    ranks: Ints
    cost_bytes: Ints


def choose_writers(classes: list[Replicated], load_bytes: Ints) -> list[Ints]:
    """Choose one holder of each replicated chunk.

    Args:
        classes: The chunks, by number of holders.
        load_bytes: Per rank what it writes in any case; what is chosen is added in place.

    Returns:
        Per class and chunk, the column of ``ranks`` that writes it.
    """
    schedules = [_schedule(one, len(load_bytes)) for one in classes]
    chosen = [np.zeros(len(one.cost_bytes), np.int64) for one in classes]
    steps = sorted(
        (
            (-tier, one.ranks.shape[1], number, step)
            for number, one in enumerate(classes)
            for step, (tier, _) in enumerate(schedules[number])
        ),
    )
    for _, _, number, step in steps:
        one, now = classes[number], schedules[number][step][1]
        ranks = one.ranks[now]
        column = load_bytes[ranks].argmin(axis=1)
        chosen[number][now] = column
        load_bytes[ranks[np.arange(len(now)), column]] += one.cost_bytes[now]
    return chosen


def _schedule(chunks: Replicated, num_ranks: int) -> list[tuple[int, Ints]]:
    """Cut the chunks into steps that touch no rank twice, each with the tier of its costs."""
    first_of_set, set_of = _distinct_sets(chunks.ranks, num_ranks)
    layer = _layers(chunks.ranks[first_of_set], num_ranks)[set_of]
    tier = np.frexp(chunks.cost_bytes.astype(np.float64))[1].astype(np.int64)
    # Largest first within a set, in the order of the chunks where they are equal.
    order = np.lexsort((-chunks.cost_bytes, set_of))
    turn = np.empty(len(order), np.int64)
    turn[order] = _positions_in_runs(set_of[order] * (_MAX_TIERS + 1) + tier[order])
    order = np.lexsort((turn, layer, -tier))
    is_first = np.ones(len(order), bool)
    is_first[1:] = False
    for column in (turn, layer, tier):
        is_first[1:] |= column[order[1:]] != column[order[:-1]]
    bounds = [*np.flatnonzero(is_first).tolist(), len(order)]
    return [(int(tier[order[low]]), order[low:high]) for low, high in pairwise(bounds)]


def _distinct_sets(ranks: Ints, num_ranks: int) -> tuple[Ints, Ints]:
    """Return one chunk of each distinct set of ranks, and each chunk's set."""
    spread = _mix(np.arange(num_ranks))
    if ranks.shape[1] > len(ranks):
        name = spread[ranks].sum(axis=1, dtype=np.uint64)
    else:
        name = np.zeros(len(ranks), np.uint64)
        for column in ranks.T:
            name += spread[column]
    _, first, inverse = np.unique(name, return_index=True, return_inverse=True)
    if not (ranks == ranks[first[inverse]]).all():  # two sets of one name: once in 2**64
        _, first, inverse = np.unique(ranks, axis=0, return_index=True, return_inverse=True)
    # Number the sets by their first chunk, so that no hash decides anything.
    by_first = np.argsort(first, kind="stable")
    number = np.empty(len(first), np.int64)
    number[by_first] = np.arange(len(first))
    return first[by_first], number[inverse.reshape(-1)]


def _mix(ranks: Ints) -> Ints:
    """Spread ranks over 64 bits (the finaliser of splitmix64)."""
    bits = ranks.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Ints = bits ^ (bits >> np.uint64(31))
    return mixed


def _layers(sets: Ints, num_ranks: int) -> Ints:
    """Give each set a layer so that no two sets of a layer have a rank in common."""
    used = np.zeros(num_ranks, np.int64)  # per rank, the layers that have a set with it
    layers = np.empty(len(sets), np.int64)
    next_lone = _MAX_LAYERS
    for number, ranks in enumerate(sets):
        taken = int(np.bitwise_or.reduce(used[ranks]))
        layer = (~taken & (taken + 1)).bit_length() - 1
        if layer < _MAX_LAYERS:
            used[ranks] |= 1 << layer
            layers[number] = layer
        else:  # more overlaps than bits: a layer of its own
            layers[number] = next_lone
            next_lone += 1
    return layers


def _positions_in_runs(values: Ints) -> Ints:
    """Return each element's position in its run of equal values."""
    positions = np.arange(len(values))
    is_first = np.ones(len(values), bool)
    is_first[1:] = values[1:] != values[:-1]
    result: Ints = positions - np.maximum.accumulate(np.where(is_first, positions, 0))
    return result
