"""`SavePlanner`: what each rank writes."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    create_default_global_save_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner import SavePlanner as DcpSavePlanner

from dcpstore.errors import ConfigError, IncompatibleError
from dcpstore.format.dtypes import is_plain_dtype
from dcpstore.plan.nested import flatten, merge_nested_shards
from dcpstore.plan.packed import GlobalSavePlan
from dcpstore.plan.rules import KeyRules, Rename, find_object
from dcpstore.plan.values import check_all, record_of
from dcpstore.plan.wire import PlanCache
from dcpstore.text import indented
from dcpstore.torch_private import dedup_save_plans, validate_global_plan


class SavePlanner(DcpSavePlanner):
    """Plan a save: flatten, select, rename, cut huge tensors, write replicas once.

    The keys of the checkpoint are those of DCP's ``DefaultSavePlanner``, so either's
    checkpoints load with the other's load planner. Extend it as DCP's docstrings show:
    override `set_up_planner`, `create_local_plan`, `create_global_plan`, `resolve_data`,
    `lookup_object` or `transform_object`. Works with ``dcp.save`` and ``dcpstore.save``.

    Args:
        include: Patterns of flattened keys to save (``"model.*"``); all if empty.
        exclude: Patterns of keys to leave out.
        rename: From the state dict's key to the checkpoint's: a map of keys and of
            prefixes that end with ``.``, or a function.
        max_item_bytes: Cut a larger chunk into several items along its outermost
            dimension, so that its parts upload and load at the same time. None never cuts.
        allow_pickle: Save values, too, that only plain pickle opens again: a load then needs
            ``LoadPlanner(allow_pickle=True)``, and runs what code the bucket holds.
    """

    keeps_tensors = True
    """Whether what `resolve_data` returned stays as it is until the save ends, so that it need
    not be copied. False for a planner that gives the same memory again and again."""

    def __init__(
        self,
        *,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        rename: Rename | None = None,
        max_item_bytes: int | None = 4 << 30,
        allow_pickle: bool = False,
    ) -> None:
        if max_item_bytes is not None and max_item_bytes < 1:
            raise ConfigError(f"max_item_bytes={max_item_bytes} must be at least 1, or None")
        self._rules = KeyRules(include, exclude, rename)
        self._max_item_bytes = max_item_bytes
        self._allow_pickle = allow_pickle
        self.state_dict: dict[str, Any] = {}
        self.mappings: dict[str, Any] = {}
        self.is_coordinator = False
        self.plan_cache: PlanCache[GlobalSavePlan] = PlanCache()
        """What earlier saves with this planner agreed on; used by ``dcpstore.save``."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state dict, flattened, selected and renamed. All ranks.

        Raises:
            IncompatibleError: If a key is not of a kind that a load puts back, or two values
                would have one name.
        """
        del storage_meta
        flat = flatten(state_dict, check_keys=True)
        names = self._rules.stored_names(list(flat.values))
        chosen = {name: flat.values[fqn] for fqn, name in names.items()}
        self.mappings = {
            name: flat.dcp_paths[fqn] if name == fqn else tuple(name.split("."))
            for fqn, name in names.items()
        }
        self.state_dict = merge_nested_shards(chosen)
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Plan what this rank holds. All ranks.

        Raises:
            IncompatibleError: If the state dict holds what a load could not give back: values that
                only plain pickle could save, unless ``allow_pickle``, or strange tensors.
        """
        if self._stores_values_itself():
            check_all(self.state_dict, allow_pickle=self._allow_pickle)
        plan = create_default_local_save_plan(self.state_dict, self.is_coordinator)
        items = [part for item in plan.items for part in self._cut(item)]
        return SavePlan(items, planner_data=self.mappings)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Give each replicated item to one rank, balanced by bytes. Coordinator only.

        Raises:
            IncompatibleError: If chunks of a tensor overlap, leave its bounds, or do not
                cover it.
        """
        plans = dedup_save_plans(all_plans)
        plans, metadata = create_default_global_save_plan(plans)
        merged: dict[str, Any] = {}
        for plan in plans:
            merged.update(plan.planner_data or {})
        metadata.planner_data = merged
        problems = validate_global_plan(plans, metadata)
        if problems:
            raise IncompatibleError(f"the ranks' tensors do not fit together:{indented(problems)}")
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return this rank's part of the global plan. All ranks."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return a tensor chunk, or a value's bytes. Called by the writer, one at a time."""
        sizes = None if write_item.tensor_data is None else write_item.tensor_data.chunk.sizes
        return self.transform_object(write_item, self.lookup_object(write_item.index, sizes))

    def lookup_object(self, index: MetadataIndex, sizes: Sequence[int] | None = None) -> Any:
        """Return what the state dict holds for an index."""
        return find_object(self.state_dict, index, sizes)

    def transform_object(self, write_item: WriteItem, value: Any) -> torch.Tensor | io.BytesIO:
        """Turn what was looked up into what is stored: values become ``torch.save`` bytes.

        Raises:
            IncompatibleError: If it is a value that a load could not give back.
        """
        if write_item.type != WriteItemType.BYTE_IO:
            tensor: torch.Tensor = value
            return tensor
        return record_of(write_item.index.fqn, value, allow_pickle=self._allow_pickle)

    def _stores_values_itself(self) -> bool:
        """Tell whether no extension of this class decides what is stored of a value."""
        kind = type(self)
        return (
            kind.resolve_data is SavePlanner.resolve_data
            and kind.lookup_object is SavePlanner.lookup_object
            and kind.transform_object is SavePlanner.transform_object
        )

    def _cut(self, item: WriteItem) -> Iterator[WriteItem]:
        data = item.tensor_data
        if data is None or self._max_item_bytes is None:
            yield item
            return
        sizes, properties = tuple(data.chunk.sizes), data.properties
        num_bytes = prod(sizes) * properties.dtype.itemsize
        axis = next((a for a, size in enumerate(sizes) if size > 1), None)
        if properties.layout != torch.strided or not is_plain_dtype(properties.dtype):
            axis = None  # it is only stored whole
        if num_bytes <= self._max_item_bytes or axis is None:
            yield item
            return
        row_bytes = num_bytes // sizes[axis]
        step = max(1, self._max_item_bytes // row_bytes)
        for first in range(0, sizes[axis], step):
            part = list(sizes)
            part[axis] = min(step, sizes[axis] - first)
            offsets = list(data.chunk.offsets)
            offsets[axis] += first
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(part))
            yield from self._cut(
                replace(
                    item,
                    index=MetadataIndex(item.index.fqn, offsets),
                    type=WriteItemType.SHARD,
                    tensor_data=replace(data, chunk=chunk),
                )
            )
