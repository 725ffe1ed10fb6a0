"""What a load asks for, and by whom; apart from the states, so that rows need no torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Place", "Want"]

_ALONE_RANKS, _ALONE_RANK = 8, 3  # whose shard one process asks for, of ranks that do not exist


@dataclass(frozen=True, slots=True)
class Want:
    """What a load asks for.

    Attributes:
        is_one: Load a single tensor, the fourth of 40, and not all.
        shard_dim: Save and load shards along this dimension, one per rank. A process that
            is alone saves the whole and loads the shard of rank 3 of 8.
    """

    is_one: bool = False
    shard_dim: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank this process is, of how many."""

    rank: int = 0
    num_ranks: int = 1

    def parts(self) -> tuple[int, int]:
        """Return into how many shards a load cuts, and which is this process's."""
        if self.num_ranks == 1:
            return _ALONE_RANKS, _ALONE_RANK
        return self.num_ranks, self.rank
