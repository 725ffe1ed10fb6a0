"""Ranks without processes: DCP's steps driven by hand on states that hold boxes of tensors.

The planners are torch's own, and plans travel between ranks as pickles, as in a real job.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

__all__ = ["Box", "Pieces", "load_on_ranks", "save_on_ranks"]


@dataclass(frozen=True)
class Box:
    """Where a piece lies in the whole tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, full: torch.Tensor) -> torch.Tensor:
        """Return the piece as a view."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            # An empty piece may lie at the very end.
            full = full.narrow(dim, min(offset, full.shape[dim]), size)
        return full


class Pieces:
    """What one rank holds of a tensor; DCP asks it as it asks a DTensor.

    Args:
        size: Shape of the whole tensor.
        pieces: The tensors that this rank holds, by box.
    """

    def __init__(self, size: tuple[int, ...], pieces: dict[Box, torch.Tensor]) -> None:
        self._size = torch.Size(size)
        self.pieces = pieces

    def size(self) -> torch.Size:
        return self._size

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)),
                    properties=TensorProperties.create_from_tensor(tensor),
                    size=self._size,
                ),
            )
            for box, tensor in self.pieces.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box in self.pieces
        ]

    def find(self, offset: Sequence[int]) -> torch.Tensor:
        (found,) = [t for box, t in self.pieces.items() if box.offsets == tuple(offset)]
        return found


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return value.find(index.offset) if isinstance(value, Pieces) else value


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False) -> None:
        # Torch's looks into values only to give meta tensors memory; it knows no pieces.
        self.flatten_state_dict = False
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].find(index.offset)


def _sent(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def save_on_ranks(
    states: Sequence[dict[str, Any]],
    make_writer: Callable[[], StorageWriter],
    *,
    coordinator: int = 0,
) -> None:
    """Save one state per rank."""
    writers = [make_writer() for _ in states]
    planners = [_SavePlanner() for _ in states]
    plans = []
    for rank, (state, writer, planner) in enumerate(zip(states, writers, planners, strict=True)):
        is_coordinator = rank == coordinator
        planner.set_up_planner(state, writer.storage_meta(), is_coordinator)
        writer.set_up_storage_writer(is_coordinator, rank=rank, use_collectives=True)
        plans.append(_sent(writer.prepare_local_plan(planner.create_local_plan())))
    plans, metadata = planners[coordinator].create_global_plan(plans)
    plans = writers[coordinator].prepare_global_plan(plans)
    results = [
        _sent(writer.write_data(planner.finish_plan(_sent(plan)), planner).value())
        for plan, writer, planner in zip(plans, writers, planners, strict=True)
    ]
    writers[coordinator].finish(metadata, results)


def load_on_ranks(
    states: Sequence[dict[str, Any]], make_reader: Callable[[], StorageReader]
) -> list[StorageReader]:
    """Load into one state per rank; return the readers."""
    readers = [make_reader() for _ in states]
    for rank, (state, reader) in enumerate(zip(states, readers, strict=True)):
        planner = _LoadPlanner()
        metadata = reader.read_metadata()
        planner.set_up_planner(state, metadata, rank == 0)
        reader.set_up_storage_reader(metadata, rank == 0, rank=rank, use_collectives=True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        (plan,) = reader.prepare_global_plan(planner.create_global_plan([_sent(plan)]))
        reader.read_data(planner.finish_plan(plan), planner).wait()
    return readers
