"""The nested structure that a checkpoint was saved from, with stand-ins for its tensors.

Where `torch_save_to_dcp` made the checkpoint, the structure of its file is restored. Any
other checkpoint says as much as DCP keeps: paths of nested keys, if its planner kept them,
and that keys share a tensor, if they name the same bytes.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from dcpstore.convert.torch_layout import (
    LAYOUT_KEY,
    Layout,
    decode_layout,
    identities,
    open_structure,
)
from dcpstore.convert.torch_pickle import StorageViews, is_stand_in
from dcpstore.convert.torch_structure import Leaves, flatten
from dcpstore.errors import CorruptError, IncompatibleError
from dcpstore.format.tensors import load_record
from dcpstore.ranges import row_major_strides
from dcpstore.reading import Checkpoint
from dcpstore.torch_private import meta_storage, set_element, storage_identity

__all__ = ["StoredStructure", "open_stored"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredStructure:
    """What a checkpoint's keys are together.

    Attributes:
        value: The structure.
        leaves: Of it; the keys are the checkpoint's, and those of tensors without elements.
        num_bytes: Length of each stand-in's storage, by identity.
        members: Per key of a value or an opaque tensor, the storages that its record holds.
        extra: The storages that `archive` holds, in its order.
        archive: A ``torch.save`` record; empty if there is none.
        held: The stand-ins' storages, so that no identity is used again.
    """

    value: Any
    leaves: Leaves
    num_bytes: Mapping[int, int]
    members: Mapping[str, Sequence[int]] = field(default_factory=dict)
    extra: Sequence[int] = ()
    archive: bytes = b""
    held: Sequence[torch.UntypedStorage] = ()


def open_stored(checkpoint: Checkpoint, *, weights_only: bool) -> StoredStructure:
    """Rebuild a checkpoint's structure; reads its values, and no strided tensor.

    Args:
        checkpoint: The source.
        weights_only: Allow in its values what ``torch.load(weights_only=True)`` allows; if
            False run whatever they name.

    Raises:
        CorruptError: If a value is damaged or names something that is not allowed.
    """
    index = MetadataIndex(LAYOUT_KEY)
    if index in (checkpoint.metadata.storage_data or {}):
        data = checkpoint.read_item_bytes([index])[LAYOUT_KEY]
        layout = decode_layout(data, checkpoint.url)
        stored = _from_layout(layout, checkpoint.url, weights_only=weights_only)
        if _fits(stored, checkpoint):
            return stored
        logger.warning(
            "%s: its keys are not those of the torch.save file that it was made from; the"
            " structure of that file is not restored",
            checkpoint.url,
        )
    return _from_keys(checkpoint, weights_only=weights_only)


def _from_layout(layout: Layout, what: str, *, weights_only: bool) -> StoredStructure:
    value, storages = open_structure(layout.pickled, weights_only=weights_only, what=what)
    numbers = identities(storages)
    try:
        members = {fqn: [numbers[key] for key in keys] for fqn, keys in layout.members.items()}
        extra = [numbers[key] for key in layout.extra]
    except KeyError as error:
        raise CorruptError(f"{what}: the record of its torch.save file is damaged") from error
    return StoredStructure(
        value,
        flatten(value, what),
        {numbers[key]: one.nbytes() for key, one in storages.items()},
        members,
        extra,
        layout.archive,
        tuple(storages.values()),
    )


def _fits(stored: StoredStructure, checkpoint: Checkpoint) -> bool:
    """Tell whether the structure's leaves are the keys of the checkpoint."""
    entries = checkpoint.metadata.state_dict_metadata
    views = StorageViews(stored.num_bytes)
    if not entries.keys() <= stored.leaves.values.keys():
        return False
    return all(
        _is_leaf_of(value, entries.get(fqn), views) for fqn, value in stored.leaves.values.items()
    )


def _is_leaf_of(value: Any, entry: Any, views: StorageViews) -> bool:
    """Tell whether a leaf is what the checkpoint has under its key."""
    if value is None and entry is None:  # what was left out of a list
        return True
    if not isinstance(value, torch.Tensor):
        return entry is not None and not isinstance(entry, TensorStorageMetadata)
    if entry is None:  # a tensor without elements is in the structure only
        return not is_stand_in(value, views)
    if not isinstance(entry, TensorStorageMetadata):
        return False
    return bool((entry.size, entry.properties.dtype) == (value.size(), value.dtype))


# --- checkpoints of others --------------------------------------------------------------


def _from_keys(checkpoint: Checkpoint, *, weights_only: bool) -> StoredStructure:
    tensors, storages = _stand_ins(checkpoint)
    values = _read_values(checkpoint, weights_only=weights_only)
    paths = checkpoint.metadata.planner_data
    known = paths if isinstance(paths, Mapping) else {}
    flat: dict[str, Any] = {}
    places: dict[str, tuple[str | int, ...]] = {}
    nested: dict[str, Any] = {}
    for fqn in checkpoint.keys:
        flat[fqn] = tensors[fqn] if fqn in tensors else values[fqn]
        path = known.get(fqn)
        places[fqn] = tuple(path) if isinstance(path, Sequence) and path else (fqn,)
        try:
            set_element(nested, places[fqn], flat[fqn])
        except (AttributeError, IndexError, TypeError, KeyError) as error:
            raise IncompatibleError(
                f"{checkpoint.url}: {fqn!r} lies at {places[fqn]!r:.200} in the nested state dict,"
                " where another key has its value; leave one out with exclude="
            ) from error
    num_bytes = {storage_identity(one): one.nbytes() for one in storages}
    return StoredStructure(nested, Leaves(flat, places), num_bytes, held=storages)


def _stand_ins(
    checkpoint: Checkpoint,
) -> tuple[dict[str, torch.Tensor], list[torch.UntypedStorage]]:
    """Make a stand-in per tensor; keys that name the same stored bytes get one storage."""
    made: dict[Any, torch.UntypedStorage] = {}
    tensors: dict[str, torch.Tensor] = {}
    for fqn, entry in checkpoint.tensors.items():
        if checkpoint.is_opaque(fqn):
            tensors[fqn] = checkpoint.read_opaque(fqn)
            continue
        dtype = entry.properties.dtype
        num_bytes = prod(entry.size) * dtype.itemsize
        storage = made.setdefault(_stored_as(checkpoint, fqn, entry), meta_storage(num_bytes))
        stand_in = torch.empty(0, dtype=dtype, device="meta")
        stand_in.set_(storage, 0, entry.size, row_major_strides(tuple(entry.size)))
        tensors[fqn] = stand_in
    return tensors, list(made.values())


def _stored_as(checkpoint: Checkpoint, fqn: str, entry: TensorStorageMetadata) -> Any:
    """Return what is equal for keys that name the same bytes."""
    if 0 in entry.size or not entry.chunks:
        return fqn
    items = checkpoint.items_of(fqn)
    places = tuple((item.key, item.record, tuple(item.sizes)) for item in items)
    return tuple(entry.size), entry.properties.dtype, places


def _read_values(checkpoint: Checkpoint, *, weights_only: bool) -> dict[str, Any]:
    fqns = [fqn for fqn in checkpoint.keys if fqn not in checkpoint.tensors]
    found = {}
    for fqn, data in checkpoint.read_value_bytes(fqns).items():
        try:
            what = f"{checkpoint.url}: the value {fqn!r}"
            found[fqn] = load_record(data, what, allow_pickle=not weights_only, device="cpu")
        except pickle.UnpicklingError as error:
            raise CorruptError(
                f"{checkpoint.url}: the value {fqn!r} names more than plain data; it was not run."
                " If you trust the checkpoint, pass weights_only=False, or name its classes with"
                " torch.serialization.add_safe_globals, or leave it out with exclude=. Torch says: "
                + str(error).partition("\n")[0],
                fqn=fqn,
            ) from error
    return found
