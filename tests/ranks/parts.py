"""Tensors that ranks hold parts of, for ranks that are threads: DTensor needs processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dcpstore.testing import RecordingStore

Offsets = tuple[int, ...]


class Part(torch.Tensor):
    """What one rank holds of a tensor, behind DCP's checkpointable hooks.

    Args:
        full: The whole tensor; the parts are copies.
        boxes: Offsets and sizes of the parts.
    """

    parts: dict[Offsets, torch.Tensor]

    @staticmethod
    def __new__(cls, full: torch.Tensor, boxes: list[tuple[Offsets, Offsets]]) -> Part:
        part: Part = torch.Tensor._make_wrapper_subclass(cls, full.size(), dtype=full.dtype)
        part.parts = {}
        for offsets, sizes in boxes:
            where = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            part.parts[offsets] = full[where].clone()
        return part

    def __repr__(self) -> str:
        return f"Part({tuple(self.shape)}, {sorted(self.parts)})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{function} on parts")

    def _chunks(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(o), t.size()) for o, t in self.parts.items()]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._chunks()

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.parts[tuple(index.offset)]


def tensors_of(value: Any) -> list[torch.Tensor]:
    """What a rank holds of a value."""
    return list(value.parts.values()) if isinstance(value, Part) else [value]


def cuts(length: int, pieces: int) -> list[tuple[int, int]]:
    """Cut a length into uneven pieces, some of them empty: (start, size) of each."""
    edges = [length * i * i // (pieces * pieces) for i in range(pieces + 1)]
    return [(a, b - a) for a, b in pairwise(edges)]


def by_rows(full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    start, rows = cuts(len(full), size)[rank]
    return Part(full, [((start, 0), (rows, full.shape[1]))] if rows else [])


def by_columns(full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    start, columns = cuts(full.shape[1], size)[size - 1 - rank]
    return Part(full, [((0, start), (len(full), columns))] if columns else [])


def by_turns(full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Every so many rows: several parts on each rank."""
    width = full.shape[1]
    return Part(full, [((row, 0), (1, width)) for row in range(rank, len(full), size)])


def in_grid(full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Rows by half of the ranks, each copied on two: what HSDP does."""
    return by_rows(full, rank // 2, (size + 1) // 2)


def everywhere(full: torch.Tensor, _rank: int, _size: int) -> torch.Tensor:
    return full.clone()


LAYOUTS: dict[str, Callable[[torch.Tensor, int, int], torch.Tensor]] = {
    "rows": by_rows,
    "columns": by_columns,
    "turns": by_turns,
    "grid": in_grid,
    "copies": everywhere,
}


def oracle(rows: int = 67, columns: int = 50) -> dict[str, torch.Tensor]:
    """The plain values, a tensor per layout."""
    source = torch.Generator().manual_seed(5)
    return {name: torch.randn(rows, columns, generator=source) for name in LAYOUTS}


def state_of(rank: int, size: int, variant: int = 0) -> dict[str, Any]:
    """A state in which each tensor has a layout; another ``variant`` deals them out anew."""
    layouts = list(LAYOUTS.values())
    state: dict[str, Any] = {
        name: layouts[(number + variant) % len(layouts)](full, rank, size)
        for number, (name, full) in enumerate(oracle().items())
    }
    return {"model": state, "step": 7, "groups": [{"lr": 0.5, "betas": [0.9, 0.99]}]}


def wiped(state: dict[str, Any]) -> dict[str, Any]:
    """The same with other values."""
    for value in state["model"].values():
        for tensor in tensors_of(value):
            tensor.fill_(-1)
    return {**state, "step": -1, "groups": [{"lr": -1.0, "betas": [0.0, 0.0]}]}


def assert_state(state: dict[str, Any], rank: int, size: int, variant: int = 0) -> None:
    """Compare with the plain values, to the last bit."""
    expected = state_of(rank, size, variant)
    for key, value in expected["model"].items():
        pairs = zip(tensors_of(state["model"][key]), tensors_of(value), strict=True)
        for got, want in pairs:
            assert torch.equal(got, want), f"{key} differs on rank {rank}"
    assert (state["step"], state["groups"]) == (expected["step"], expected["groups"])


@dataclass
class Shelf:
    """One store that the ranks share, and what each asked of it.

    Attributes:
        shared: Holds the objects.
        stores: What each opening made, in order.
    """

    shared: Any
    stores: list[RecordingStore]

    def open(self, *_args: Any, **_options: Any) -> RecordingStore:
        """What to give a writer or reader as ``store_opener``."""
        store = RecordingStore(self.shared)
        self.stores.append(store)
        return store

    @property
    def requests(self) -> list[Any]:
        """All ranks' requests."""
        return [request for store in self.stores for request in store.requests]

    def clear(self) -> None:
        """Forget what was asked."""
        self.stores.clear()
