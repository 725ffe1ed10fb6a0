"""`LoadPlanner`: what each rank reads, and what fits nowhere.

`DynamicMetaLoadPlanner` loads by keys and shapes where the storage tells neither.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner import LoadPlanner as DcpLoadPlanner

from dcpstore.errors import ConfigError, IncompatibleError
from dcpstore.plan.nested import Flattened, flatten, give_memory, merge_nested_shards, set_element
from dcpstore.plan.rules import KeyRules, Rename, Strictness, find_object, is_strict
from dcpstore.plan.values import open_record
from dcpstore.plan.wire import PlanCache
from dcpstore.text import collector_paused, indented
from dcpstore.torch_private import create_read_items, is_in_mesh, narrow

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(slots=True)
class KeyReport:
    """What became of each key, in the checkpoint's names.

    Attributes:
        loaded: Keys read.
        missing: Keys of the state dict that the checkpoint lacks, left as they were.
        unexpected: Keys of the checkpoint that the state dict lacks, not read.
        cast: Keys whose dtype changed on the way: saved and target dtype.
    """

    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    cast: dict[str, tuple[torch.dtype, torch.dtype]] = field(default_factory=dict)


class LoadPlanner(DcpLoadPlanner):
    """Plan a load: match keys, rename, check shapes, read only what is held here.

    Extend it as DCP's docstrings show: override `set_up_planner`, `create_local_plan`,
    `load_bytes`, `resolve_tensor`, `commit_tensor`, `lookup_tensor` or `transform_tensor`.
    Works with ``dcp.load`` and ``dcpstore.load``. After `create_local_plan`, `report` says
    what became of each key.

    Args:
        strict: Whether a key of the state dict that the checkpoint lacks is an error: for
            all keys, or per prefix.
        include: Patterns of flattened keys to load; all if empty. Others stay as they are.
        exclude: Patterns of keys not to load.
        rename: From the state dict's key to the checkpoint's.
        allow_pickle: Open values with plain pickle, which runs code that lies in the bucket.
    """

    flatten_state_dict = True
    flatten_sharded_tensors = True

    def __init__(
        self,
        *,
        strict: Strictness = True,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        rename: Rename | None = None,
        allow_pickle: bool = False,
    ) -> None:
        self._strict = strict
        self._rules = KeyRules(include, exclude, rename)
        self._allow_pickle = allow_pickle
        self.original_state_dict: dict[str, Any] = {}
        self.state_dict: dict[str, Any] = {}
        self.mappings: dict[str, Any] = {}
        self.metadata: Metadata | None = None
        self.is_coordinator = False
        self.report = KeyReport()
        self.plan_cache: PlanCache[Any] = PlanCache()
        """Who fetched what for whom in earlier loads; used by ``dcpstore.load``."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state dict, flattened; meta tensors get memory. All ranks.

        Raises:
            IncompatibleError: If two of its values have one flattened name.
        """
        self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        self.report = KeyReport()
        if self.flatten_state_dict:
            flat = flatten(state_dict)
        else:
            flat = Flattened(dict(state_dict), {key: (key,) for key in state_dict})
        give_memory(state_dict, flat)
        self._take(flat)
        if metadata is not None and self.flatten_state_dict:
            self._use_old_keys_if_saved_so(metadata)

    def _take(self, flat: Flattened) -> None:
        self.state_dict, self.mappings = flat.values, flat.paths
        if self.flatten_sharded_tensors:
            self.state_dict = merge_nested_shards(flat.values)

    def _use_old_keys_if_saved_so(self, metadata: Metadata) -> None:
        """Take torch 2.3's flattening, which kept lists whole, if the checkpoint has its keys."""
        saved = metadata.state_dict_metadata.keys()
        if self.state_dict.keys() <= saved:
            return
        old = flatten(self.original_state_dict, as_torch_2_3=True)
        if (old.values.keys() - self.state_dict.keys()) & saved:
            self._take(old)

    def create_local_plan(self) -> LoadPlan:
        """Match keys and shapes and plan the boxes that this rank holds. All ranks.

        Raises:
            IncompatibleError: Naming every key that is missing although it must not be, or
                whose shape or kind differs. Nothing was read.
        """
        metadata = self.metadata
        assert metadata is not None, "set_up_planner was given no metadata"
        with collector_paused():
            return self._match(metadata.state_dict_metadata)

    def _match(self, saved: Mapping[str, Any]) -> LoadPlan:
        names = self._rules.stored_names(list(self.state_dict))
        items: list[ReadItem] = []
        problems: list[str] = []
        for fqn, name in names.items():
            entry, value = saved.get(name), self.state_dict[fqn]
            if entry is None:
                self.report.missing.append(name)
                if is_strict(self._strict, fqn):
                    problems.append(f"{name!r} is not in the checkpoint")
                continue
            problem = _mismatch(name, entry, value)
            if problem:
                problems.append(problem)
                continue
            self.report.loaded.append(name)
            if isinstance(entry, TensorStorageMetadata) and value.dtype != entry.properties.dtype:
                self.report.cast[name] = (entry.properties.dtype, value.dtype)
            whole = _whole_item(entry, value, fqn, name)
            if whole is not None:
                items.append(whole)
            elif is_in_mesh(value):
                items += _stored_as(create_read_items(fqn, entry, value), fqn, name)
        self.report.unexpected = sorted(saved.keys() - set(names.values()))
        if problems:
            raise IncompatibleError(self._explain(problems))
        return LoadPlan(items)

    def _explain(self, problems: Sequence[str]) -> str:
        unexpected = self.report.unexpected
        also = (
            f"\nthe checkpoint has {len(unexpected)} key(s) that the state dict lacks, such as"
            f" {', '.join(map(repr, unexpected[:5]))}"
            if unexpected
            else ""
        )
        return (
            "the checkpoint does not fit the state dict; nothing was loaded:"
            f"{indented(problems)}{also}"
            "\nPass strict=False (or per prefix) to leave missing keys as they are, or rename="
        )

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans; who shares bytes with whom is the loader's business."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return this rank's part of the global plan. All ranks."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value into the state dict.

        Raises:
            CorruptError: If it names code to run and ``allow_pickle`` is False.
            IncompatibleError: If it is an instance of a class that the state dict does not hold
                at its key.
        """
        fqn, name = read_item.dest_index.fqn, read_item.storage_index.fqn
        target = self.state_dict.get(fqn)
        loaded = open_record(name, value, target, allow_pickle=self._allow_pickle)
        self.state_dict[fqn] = loaded
        set_element(self.original_state_dict, self.mappings[fqn], loaded)

    @property
    def reads_encoded_values(self) -> bool:
        """Whether `load_bytes` may be given encodings of values instead of ``torch.save`` bytes.

        True unless a subclass has its own `load_bytes`, which by DCP's contract gets
        ``torch.save`` bytes. One that hands everything on to this class's may say True.
        """
        is_ours = type(self).load_bytes is LoadPlanner.load_bytes
        return is_ours and not self._allow_pickle

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return where the item's elements go."""
        return self.transform_tensor(read_item, self.lookup_tensor(read_item.dest_index))

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: `resolve_tensor` gave memory of the state dict."""

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the local shard behind an index."""
        tensor: torch.Tensor = find_object(self.state_dict, index)
        return tensor

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        """Narrow a shard to the box that the item fills."""
        return narrow(tensor, read_item.dest_offsets, read_item.lengths)


def _whole_item(entry: Any, value: Any, fqn: str, name: str) -> ReadItem | None:
    """Return the item of a plain tensor that is stored as one chunk; None for others.

    What DCP's `create_read_items` would return, in a tenth of the time: scalars by the ten
    thousand are such tensors.
    """
    if type(value) not in _PLAIN or not isinstance(entry, TensorStorageMetadata):
        return None
    if len(entry.chunks) != 1 or entry.chunks[0].sizes != value.shape or not value.numel():
        return None
    zeros = entry.chunks[0].offsets
    if any(zeros):
        return None
    index = MetadataIndex(fqn, zeros, 0)
    stored = index if fqn == name else MetadataIndex(name, zeros, 0)
    return ReadItem(LoadItemType.TENSOR, index, zeros, stored, zeros, value.shape)


def _stored_as(items: Sequence[ReadItem], fqn: str, name: str) -> list[ReadItem]:
    if fqn == name:
        return list(items)
    return [
        replace(
            item,
            storage_index=MetadataIndex(name, item.storage_index.offset, item.storage_index.index),
        )
        for item in items
    ]


def _mismatch(name: str, entry: Any, value: Any) -> str | None:
    is_tensor = isinstance(entry, TensorStorageMetadata)
    wants_tensor = isinstance(value, torch.Tensor) or hasattr(value, "local_shards")
    if is_tensor != wants_tensor:
        saved = "a tensor" if is_tensor else "a value"
        return f"{name!r} is saved as {saved}, and the state dict has a {type(value).__name__}"
    if is_tensor and tuple(entry.size) != tuple(value.size()):
        return (
            f"{name!r} is saved with shape {tuple(entry.size)}, and the state dict has"
            f" {tuple(value.size())}"
        )
    return None


class DynamicMetaLoadPlanner(LoadPlanner):
    """Plan a load from a storage that has no metadata, such as a ``torch.save`` file.

    Where the reader knows what is saved, as `dcpstore.BroadcastingTorchSaveReader` does, this
    is `dcpstore.LoadPlanner`: missing keys and wrong shapes are known before anything is read.
    Where it returns no metadata or none with any key, as torch's reader of the same name does,
    the state dict's own keys and shapes are taken for those that are saved, and what does
    not fit is for the reader to find out.

    Takes the arguments of torch's class of this name, and those of `LoadPlanner`. Unlike it,
    plans values that are no tensors, too. Extend it like `LoadPlanner`.

    Args:
        flatten_state_dict: Whether keys of nested dictionaries and lists are joined with dots.
            False: only top-level keys count, and a nested dictionary is one value.
        flatten_sharded_tensors: Flatten nested ShardedTensors; False leaves them.
        allow_partial_load: Leave keys of the state dict that are not saved as they are; the
            same as ``strict=False``.
        strict: See `LoadPlanner`.
        include: See `LoadPlanner`.
        exclude: See `LoadPlanner`.
        rename: See `LoadPlanner`.
        allow_pickle: See `LoadPlanner`.

    Raises:
        ConfigError: If ``allow_partial_load`` and ``strict`` contradict each other.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
        *,
        strict: Strictness | None = None,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        rename: Rename | None = None,
        allow_pickle: bool = False,
    ) -> None:
        if allow_partial_load and strict not in (None, False):
            raise ConfigError(
                f"allow_partial_load=True leaves missing keys as they are, and strict={strict!r}"
                " makes some of them an error; pass one of the two"
            )
        super().__init__(
            strict=not allow_partial_load if strict is None else strict,
            include=include,
            exclude=exclude,
            rename=rename,
            allow_pickle=allow_pickle,
        )
        self.flatten_state_dict = flatten_state_dict
        self.flatten_sharded_tensors = flatten_sharded_tensors
        self.allow_partial_load = allow_partial_load

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state dict; make metadata from it if the reader has none. All ranks."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        if metadata is None or not metadata.state_dict_metadata:
            names = self._rules.stored_names(list(self.state_dict))
            entries = {name: _as_if_saved(self.state_dict[fqn]) for fqn, name in names.items()}
            self.metadata = Metadata(state_dict_metadata=entries)


def _as_if_saved(value: Any) -> STORAGE_TYPES:
    """Return the metadata of a value that is saved whole, as one chunk.

    One chunk, and not those of this rank: then offsets count from the tensor's start, which
    is what readers take them for.
    """
    if not isinstance(value, torch.Tensor) and not hasattr(value, "local_shards"):
        return BytesStorageMetadata()
    size = value.size()
    whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=value.dtype), size, [whole])
