"""A load planner that reads one box of each tensor: a reshard without process groups."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

__all__ = ["PartPlanner"]


class PartPlanner(DefaultLoadPlanner):
    """Load boxes of tensors; each target in the state dict has its box's shape.

    Args:
        offsets: First element of each key's box.
    """

    def __init__(self, offsets: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        self._offsets = offsets

    def create_local_plan(self) -> LoadPlan:
        items = []
        for fqn, target in self.state_dict.items():
            box = ChunkStorageMetadata(torch.Size(self._offsets[fqn]), target.shape)
            entry = self.metadata.state_dict_metadata[fqn]
            items += create_read_items_for_chunk_list(fqn, entry, [box])
        return LoadPlan(items)

    def lookup_tensor(self, index):
        return self.state_dict[index.fqn]
