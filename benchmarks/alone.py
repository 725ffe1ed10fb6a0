"""Who writes a replicated chunk, if each rank decided alone: the rule that was not taken.

Placements and mesh tell every holder of a chunk who else holds it, so all of a set of
holders could deal out the chunks that just they hold, without a message: largest first, to
the member that was dealt least so far. Ties go round by a hash of the set, so that the odd
chunk out of many sets does not always fall to the lowest rank. ``python -m
benchmarks.planning --balance`` sets it beside the exchange; record 008 says why that won.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import product

import numpy as np

from dcpstore.errors import ConfigError
from dcpstore.plan.wire import Ints

__all__ = ["HeldChunk", "decide_locally", "replica_ranks"]


@dataclass(frozen=True, slots=True)
class HeldChunk:
    """A chunk that a rank holds, and who else does.

    Attributes:
        fqn: The flattened key.
        offsets: Where the chunk lies in its tensor.
        num_bytes: Size of the chunk.
        holders: Global ranks that hold the same chunk, ascending, this rank among them.
    """

    fqn: str
    offsets: tuple[int, ...]
    num_bytes: int
    holders: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.holders or any(
            a >= b for a, b in zip(self.holders, self.holders[1:], strict=False)
        ):
            raise ConfigError(f"{self.fqn!r}: holders must ascend, got {self.holders}")


def decide_locally(chunks: Iterable[HeldChunk], rank: int) -> list[bool]:
    """Tell which of the chunks that a rank holds it writes.

    Called by every holder with all that it holds, in any order, the answers fit together:
    each chunk has one writer. No communication.

    Args:
        chunks: All chunks that this rank holds, the ones of its own included.
        rank: Its global rank.

    Returns:
        One answer per chunk, in the order given.

    Raises:
        ConfigError: If the rank is no holder of one of them, or two are the same.
    """
    chunks = list(chunks)
    sets: dict[tuple[int, ...], list[int]] = {}
    for at, chunk in enumerate(chunks):
        if rank not in chunk.holders:
            raise ConfigError(f"rank {rank} does not hold {chunk.fqn!r} at {chunk.offsets}")
        sets.setdefault(chunk.holders, []).append(at)
    if len({(chunk.fqn, chunk.offsets) for chunk in chunks}) < len(chunks):
        raise ConfigError("a rank was given the same chunk twice")
    writes = [False] * len(chunks)
    for holders, members in sets.items():
        members.sort(key=lambda at: (-chunks[at].num_bytes, chunks[at].fqn, chunks[at].offsets))
        first = _first_turn(holders)
        # (bytes dealt, turn): the turns begin at a place that depends on the set.
        dealt = [(0, turn) for turn in range(len(holders))]
        for at in members:
            num_bytes, turn = dealt[0]
            writes[at] = holders[(first + turn) % len(holders)] == rank
            heapq.heapreplace(dealt, (num_bytes + max(chunks[at].num_bytes, 1), turn))
    return writes


def replica_ranks(
    mesh: Ints, is_replicated: Sequence[bool], coordinate: Sequence[int]
) -> tuple[int, ...]:
    """Return the ranks that hold the same chunk as a place in a device mesh.

    Args:
        mesh: Global ranks by coordinate, as ``DeviceMesh.mesh``.
        is_replicated: Per mesh dimension, whether the placement there is ``Replicate``.
        coordinate: This rank's place, as ``DeviceMesh.get_coordinate``.

    Raises:
        ConfigError: If their dimensions differ.
    """
    if not mesh.ndim == len(is_replicated) == len(coordinate):
        raise ConfigError(
            f"a mesh of {mesh.ndim} dimensions needs as many placements and coordinates,"
            f" got {len(is_replicated)} and {len(coordinate)}"
        )
    places = [
        range(size) if same else (at,)
        for size, same, at in zip(mesh.shape, is_replicated, coordinate, strict=True)
    ]
    return tuple(sorted(int(mesh[place]) for place in product(*places)))


def _first_turn(holders: tuple[int, ...]) -> int:
    name = blake2b(np.array(holders, "<i8").tobytes(), digest_size=8).digest()
    return int.from_bytes(name, "little") % len(holders)
