"""`DynamicMetaLoadPlanner`: load by keys and shapes where the storage tells neither."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from dcpstore.errors import ConfigError
from dcpstore.planners.load import LoadPlanner
from dcpstore.planners.nested import Flattened
from dcpstore.planners.rules import Rename, Strictness

__all__ = ["DynamicMetaLoadPlanner"]


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

    def _flatten(self, state_dict: dict[str, Any]) -> Flattened:
        if self.flatten_state_dict:
            return super()._flatten(state_dict)
        paths = {key: (key,) for key in state_dict}
        return Flattened(dict(state_dict), paths, dict(paths))

    def _merge_shards(self, flat: dict[str, Any]) -> dict[str, Any]:
        return super()._merge_shards(flat) if self.flatten_sharded_tensors else flat

    def _use_old_keys_if_saved_so(self, metadata: Metadata) -> None:
        if self.flatten_state_dict:
            super()._use_old_keys_if_saved_so(metadata)


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
