"""Where loaded bytes go: resolved and checked before the first data request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from dcpstore.coverage import refuse_lacks
from dcpstore.errors import IncompatibleError
from dcpstore.format.dtypes import dtype_from_name, dtype_name
from dcpstore.format.tensors import is_freed, is_plain
from dcpstore.manifest import StoredItem

__all__ = ["Target", "keeps_every_value", "resolve_targets"]

_MOST_NAMED = 10


@dataclass(slots=True, eq=False)
class Target:
    """One read item of the plan.

    Attributes:
        read_item: As planned.
        item: The stored chunk or value it comes from.
        tensor: Where its elements go, narrowed to them; None for a value.
    """

    read_item: ReadItem
    item: StoredItem
    tensor: torch.Tensor | None = None

    @property
    def fqn(self) -> str:
        """The state-dict key."""
        return self.read_item.storage_index.fqn


def resolve_targets(
    read_items: Sequence[ReadItem],
    planner: LoadPlanner,
    items: Mapping[MetadataIndex, StoredItem],
    metadata: Metadata,
    casts: Literal["exact", "widening", "any"],
) -> list[Target]:
    """Ask the planner for every target and check that what is stored fits it.

    Raises:
        IncompatibleError: Naming each key whose shape or dtype does not fit, or that the
            checkpoint's metadata promises without a place. No target was changed.
        CorruptError: Naming what is wanted and lies in no stored chunk, likewise.
    """
    targets, problems, unplaced = [], [], []
    reads_encoded = getattr(planner, "reads_encoded_values", False)
    for read_item in read_items:
        index = read_item.storage_index
        item = items.get(index)
        if item is None:
            unplaced.append(read_item)
            problems.append(f"{index.fqn!r} at offset {index.offset} is planned but stored nowhere")
            continue
        if reads_encoded and item.encoded is not None:
            item = item.encoded
        target = Target(read_item, item)
        if read_item.type != LoadItemType.BYTE_IO:
            tensor = planner.resolve_tensor(read_item)
            # Of a sparse or quantized tensor more than elements is replaced, which its detached
            # twin would keep for itself.
            is_more = tensor.layout is not torch.strided or tensor.is_quantized
            target.tensor = tensor if is_more else tensor.detach()
            problem = _mismatch(target, metadata, casts)
            if problem:
                problems.append(problem)
        targets.append(target)
    refuse_lacks(unplaced, metadata)
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems[:_MOST_NAMED])
        more = len(problems) - _MOST_NAMED
        raise IncompatibleError(
            f"the checkpoint does not fit {len(problems)} target(s); nothing was loaded:\n{shown}"
            + (f"\n  and {more} more" if more > 0 else "")
        )
    return targets


def _mismatch(target: Target, metadata: Metadata, casts: str) -> str | None:
    tensor, lengths = target.tensor, target.read_item.lengths
    assert tensor is not None
    if tensor.is_meta:
        return f"{target.fqn!r}: the target is on the meta device; give it memory before loading"
    if is_plain(tensor) and is_freed(tensor):
        return f"{target.fqn!r}: the target's memory was freed: its storage is empty"
    if tuple(tensor.shape) != tuple(lengths):
        return (
            f"{target.fqn!r}: the plan reads shape {tuple(lengths)} and the target has shape"
            f" {tuple(tensor.shape)}"
        )
    layout = _saved_layout(target, metadata)
    if layout != tensor.layout:
        return f"{target.fqn!r}: saved as {layout}, and the target is {tensor.layout}"
    saved = _saved_dtype(target, metadata)
    if saved is None or saved == tensor.dtype or casts == "any":
        return None
    if casts == "widening" and keeps_every_value(saved, tensor.dtype):
        return None
    return (
        f"{target.fqn!r}: saved as {dtype_name(saved)}, the target is {dtype_name(tensor.dtype)},"
        " which cannot hold every such value. Load into the saved dtype, or allow the cast with"
        " ReadConfig(casts='any')"
        if casts == "widening"
        else f"{target.fqn!r}: saved as {dtype_name(saved)}, the target is"
        f" {dtype_name(tensor.dtype)}, and ReadConfig(casts='exact') allows no cast"
    )


def _saved_layout(target: Target, metadata: Metadata) -> torch.layout:
    if target.item.kind == "raw":
        return torch.strided
    entry = metadata.state_dict_metadata.get(target.fqn)
    return entry.properties.layout if isinstance(entry, TensorStorageMetadata) else torch.strided


def _saved_dtype(target: Target, metadata: Metadata) -> torch.dtype | None:
    if target.item.dtype:
        return dtype_from_name(target.item.dtype)
    entry = metadata.state_dict_metadata.get(target.fqn)
    return entry.properties.dtype if isinstance(entry, TensorStorageMetadata) else None


def keeps_every_value(source: torch.dtype, target: torch.dtype) -> bool:
    """Tell whether a cast keeps every value that ``source`` can hold."""
    if source == target:
        return True
    if target.is_complex:
        part = source.to_real() if source.is_complex else source
        return keeps_every_value(part, target.to_real())
    if source.is_complex or target == torch.bool:
        return False
    if source == torch.bool:
        return _is_number(target)
    if not (_is_number(source) and _is_number(target)):
        return False
    if source.is_floating_point:
        return target.is_floating_point and _float_in_float(source, target)
    low, high = torch.iinfo(source).min, torch.iinfo(source).max
    if target.is_floating_point:
        return max(high, -low) <= min(2 / torch.finfo(target).eps, torch.finfo(target).max)
    return torch.iinfo(target).min <= low and high <= torch.iinfo(target).max


def _is_number(dtype: torch.dtype) -> bool:
    try:
        torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    except TypeError:
        return False
    return True


def _float_in_float(source: torch.dtype, target: torch.dtype) -> bool:
    a, b = torch.finfo(source), torch.finfo(target)
    return b.eps <= a.eps and b.max >= a.max and b.tiny * b.eps <= a.tiny * a.eps
