"""Where this rank's part goes, and whether it fits what the file holds. No I/O."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from dcpstore.config import ReadConfig
from dcpstore.errors import IncompatibleError
from dcpstore.manifest import StoredItem
from dcpstore.planning.boxes import num_elements
from dcpstore.ranges import ByteRange
from dcpstore.targets import Target, resolve_targets
from dcpstore.torch_save_reader.catalogue import Catalogue, TensorEntry
from dcpstore.torch_save_reader.waves import Want

__all__ = ["OwnPart", "resolve_own_part"]

_MOST_NAMED = 10
_NOWHERE = ByteRange(0, 0)


@dataclass(frozen=True, slots=True)
class OwnPart:
    """What one rank wants of the file.

    Attributes:
        targets: By item number.
        wants: Boxes of tensors; those without elements are left out.
        values: Key of the file per item number, for values.
    """

    targets: Sequence[Target]
    wants: Sequence[Want]
    values: dict[int, str]


def resolve_own_part(
    read_items: Sequence[ReadItem],
    planner: LoadPlanner,
    catalogue: Catalogue,
    config: ReadConfig,
) -> OwnPart:
    """Ask the planner for every target, and check them all against the file. All ranks.

    Raises:
        IncompatibleError: Naming each key that the file lacks, or whose kind, shape or dtype
            does not fit. No target was changed.
    """
    problems: dict[str, str] = {}
    for read_item in read_items:
        problem = _mismatch(read_item, planner, catalogue)
        if problem:
            problems.setdefault(read_item.storage_index.fqn, problem)
    if problems:
        raise IncompatibleError(_explain(problems, catalogue))
    items = {item.storage_index: _stored_item(item, catalogue) for item in read_items}
    targets = resolve_targets(
        read_items, planner, items, Metadata(state_dict_metadata={}), config.casts
    )
    wants = [_want(number, target, catalogue) for number, target in enumerate(targets)]
    return OwnPart(
        targets,
        [want for want in wants if want is not None and num_elements(want.sizes)],
        {n: target.fqn for n, target in enumerate(targets) if target.tensor is None},
    )


def _explain(problems: Mapping[str, str], catalogue: Catalogue) -> str:
    shown = []
    for fqn, problem in itertools.islice(problems.items(), _MOST_NAMED):
        is_missing = fqn not in catalogue.paths
        near = ", ".join(map(repr, catalogue.keys_like(fqn))) if is_missing else ""
        shown.append(f"  {problem}" + (f"; it has {near}" if near else ""))
    if len(problems) > _MOST_NAMED:
        shown.append(f"  and {len(problems) - _MOST_NAMED} more")
    return "\n".join([f"{catalogue.url} does not fit the state dict; nothing was loaded:", *shown])


def _mismatch(read_item: ReadItem, planner: LoadPlanner, catalogue: Catalogue) -> str | None:
    fqn = read_item.storage_index.fqn
    wants_value = read_item.type == LoadItemType.BYTE_IO
    if fqn in catalogue.unreadable:
        return (
            f"{fqn!r} is {catalogue.unreadable[fqn]} in the file, of which no part can be read;"
            " load the file with torch.load"
        )
    entry = catalogue.tensors.get(fqn)
    if entry is None and fqn not in catalogue.values:
        return f"{fqn!r} is not in the file"
    if (entry is None) != wants_value:
        saved, wanted = ("a value", "a tensor") if entry is None else ("a tensor", "a value")
        return f"{fqn!r} is saved as {saved}, and the state dict has {wanted}"
    if entry is None:
        return None
    wanted_sizes = _whole_sizes(read_item, planner)
    if wanted_sizes is not None and wanted_sizes != entry.sizes:
        return f"{fqn!r} is saved with shape {entry.sizes}, and the state dict has {wanted_sizes}"
    return _out_of_bounds(read_item, entry)


def _whole_sizes(read_item: ReadItem, planner: LoadPlanner) -> tuple[int, ...] | None:
    """Return the shape that the planner takes the whole tensor for, if it tells.

    Planners that make up the metadata know nothing of the file's shapes: without this, a
    target that is smaller than the saved tensor would be given a part of it.
    """
    known: Any = getattr(planner, "metadata", None)
    entries = getattr(known, "state_dict_metadata", None) or {}
    entry = entries.get(read_item.storage_index.fqn)
    return tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None


def _box(read_item: ReadItem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets in the whole tensor and sizes of what an item reads.

    A planner may have made up chunks; its offsets count from the chunk that it names.
    """
    sizes, inner = tuple(read_item.lengths), tuple(read_item.storage_offsets)
    index: MetadataIndex = read_item.storage_index
    outer = tuple(index.offset) if index.offset is not None else (0,) * len(inner)
    return tuple(a + b for a, b in zip(outer, inner, strict=True)), sizes


def _out_of_bounds(read_item: ReadItem, entry: TensorEntry) -> str | None:
    num_dims = {len(read_item.lengths), len(read_item.storage_offsets), len(entry.sizes)}
    if read_item.storage_index.offset is not None:
        num_dims.add(len(read_item.storage_index.offset))
    if len(num_dims) == 1:
        offsets, sizes = _box(read_item)
        rows = zip(offsets, sizes, entry.sizes, strict=True)
        if all(offset >= 0 and offset + size <= saved for offset, size, saved in rows):
            return None
    return (
        f"{read_item.storage_index.fqn!r} is saved with shape {entry.sizes}, and the plan reads"
        f" {tuple(read_item.lengths)} at {tuple(read_item.storage_offsets)} of its chunk at"
        f" {tuple(read_item.storage_index.offset or ())}"
    )


def _stored_item(read_item: ReadItem, catalogue: Catalogue) -> StoredItem:
    entry = catalogue.tensors.get(read_item.storage_index.fqn)
    if entry is None:
        return StoredItem(catalogue.url, _NOWHERE, "bytes", _NOWHERE)
    return StoredItem(
        catalogue.url, _NOWHERE, "raw", _NOWHERE, dtype=entry.dtype, sizes=entry.sizes
    )


def _want(number: int, target: Target, catalogue: Catalogue) -> Want | None:
    if target.tensor is None:
        return None
    entry = catalogue.tensors[target.fqn]
    return Want(number, entry.source, *_box(target.read_item))
