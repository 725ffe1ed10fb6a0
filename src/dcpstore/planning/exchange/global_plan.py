"""What the coordinator keeps of a merged plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dcpstore.planning.exchange.columns import Ints
from dcpstore.planning.exchange.decisions import Decision
from dcpstore.planning.exchange.schema import KeyRow, Path

__all__ = ["ChunkColumns", "GlobalSavePlan"]


@dataclass(frozen=True, slots=True, eq=False)
class ChunkColumns:
    """The chunks of the checkpoint, ordered by key and offsets.

    Attributes:
        key: Per chunk, its row in ``GlobalSavePlan.rows``.
        start, length: Its offset and size in the first dimension; of a value, whether its
            size is known and that size in bytes.
        first_of_key: Per key, its first chunk; one more at the end.
        box_at: Ascending positions of the chunks that do not fill all later dimensions.
        box_offsets, box_sizes: Where those lie in the later dimensions, padded with 0 and 1.
    """

    key: Ints
    start: Ints
    length: Ints
    first_of_key: Ints
    box_at: Ints
    box_offsets: Ints
    box_sizes: Ints

    @property
    def num_bytes(self) -> int:
        """Memory that the columns take."""
        return sum(
            column.nbytes
            for column in (
                self.key,
                self.start,
                self.length,
                self.first_of_key,
                self.box_at,
                self.box_offsets,
                self.box_sizes,
            )
        )

    def positions(self) -> Ints:
        """Return each chunk's position among those of its key."""
        counts = np.diff(self.first_of_key)
        result: Ints = np.arange(len(self.key)) - np.repeat(self.first_of_key[:-1], counts)
        return result

    def shapes_of(
        self, key: int, size: tuple[int, ...]
    ) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return offsets and sizes of a tensor's chunks."""
        first, end = self.first_of_key[key : key + 2].tolist()
        if not size:
            return [((), ())] * (end - first)
        inner = len(size) - 1
        zeros, full = (0,) * inner, size[1:]
        shapes = [
            ((start, *zeros), (length, *full))
            for start, length in zip(
                self.start[first:end].tolist(), self.length[first:end].tolist(), strict=True
            )
        ]
        low, high = np.searchsorted(self.box_at, (first, end)).tolist()
        for at, offsets, sizes in zip(
            self.box_at[low:high].tolist(),
            self.box_offsets[low:high, :inner].tolist(),
            self.box_sizes[low:high, :inner].tolist(),
            strict=True,
        ):
            (start, *_), (length, *_) = shapes[at - first]
            shapes[at - first] = ((start, *offsets), (length, *sizes))
        return shapes


@dataclass(frozen=True, slots=True, eq=False)
class GlobalSavePlan:
    """Who writes what, and the metadata that will describe it.

    Attributes:
        rows: The keys of the checkpoint, in the order of their first appearance over ranks.
        paths: The joined flattening map of DCP; None if no planner kept one.
        chunks: The distinct chunks.
        digests: Per rank, the name of the packed plan that was merged.
        decisions: Per rank, the bytes of its `Decision`, ready to be scattered.
        load_bytes: Per rank, the payload bytes it writes, values of unknown size left out.
        extras: Pickled planner and storage data of the ranks that sent some.
    """

    rows: tuple[KeyRow, ...]
    paths: Mapping[str, Path] | None
    chunks: ChunkColumns
    digests: tuple[bytes, ...]
    decisions: tuple[bytes, ...]
    load_bytes: Ints
    extras: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        """Ranks of the group."""
        return len(self.decisions)

    @property
    def num_bytes(self) -> int:
        """Memory that the plan takes, the table of keys left out."""
        return (
            self.chunks.num_bytes
            + sum(map(len, self.decisions))
            + sum(map(len, self.digests))
            + sum(map(len, self.extras.values()))
            + int(self.load_bytes.nbytes)
        )

    def decision(self, rank: int) -> Decision:
        """Return what one rank is told."""
        return Decision.from_bytes(self.decisions[rank])
