"""DCP's load plans from and to packed columns.

The coordinator does not merge load plans; packed, they are small to gather for the sharing
of reads, and their digests are the key under which a `PlanCache` finds what was shared.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from dcpstore.errors import ConfigError, CorruptError, IncompatibleError
from dcpstore.planning.exchange.columns import Ints, key_parts, pack_ints, unpack_ints
from dcpstore.planning.exchange.save_plans import extras_of
from dcpstore.planning.exchange.schema import KeyKind, KeyRow, decode_rows
from dcpstore.planning.exchange.wire import PackedPlan, Part, PartKind, PlanFlag, PlanKind

__all__ = ["pack_load_plan", "to_packed_load_plan", "unpack_load_plan"]

_TYPES = (LoadItemType.TENSOR, LoadItemType.BYTE_IO)
_NUM_COORDINATES = 5  # destination's offset and box, storage's offset and box, lengths
_NO_OFFSET = 255


def pack_load_plan(plan: LoadPlan) -> bytes:
    """Pack a rank's load plan.

    Raises:
        IncompatibleError: If the plan or an item is of a class derived from DCP's.
    """
    return to_packed_load_plan(plan).to_bytes()


def to_packed_load_plan(plan: LoadPlan) -> PackedPlan:
    """As `pack_load_plan`, with head and parts kept apart.

    Raises:
        IncompatibleError: As there.
    """
    for one in (plan, *plan.items):
        if type(one) not in (LoadPlan, ReadItem):
            raise IncompatibleError(f"{type(one).__name__} has fields that DCP's plan lacks")
    indexes = [item.dest_index for item in plan.items], [item.storage_index for item in plan.items]
    row_of: dict[str, int] = {}
    for index in itertools.chain(*indexes):
        row_of.setdefault(index.fqn, len(row_of))
    columns = [_ints(_TYPES.index(item.type) for item in plan.items)]
    for side in indexes:
        columns.append(_ints(row_of[index.fqn] for index in side))
        columns.append(_ints(0 if index.index is None else index.index + 1 for index in side))
    for coordinates in zip(*(_coordinates(item) for item in plan.items), strict=True):
        columns.append(_ints(_NO_OFFSET if c is None else len(c) for c in coordinates))
        columns.append(_ints(itertools.chain.from_iterable(c or () for c in coordinates)))
    rest = {"planner_data": plan.planner_data, "storage_data": plan.storage_data}
    rest = {name: value for name, value in rest.items() if value is not None}
    parts = [Part.of(PartKind.ROWS, pack_ints(*columns))]
    parts += key_parts([KeyRow(fqn, KeyKind.PATH) for fqn in row_of])
    if rest:
        parts.append(Part.of(PartKind.EXTRAS, pickle.dumps(rest)))
    return PackedPlan.of(PlanKind.LOAD, PlanFlag(0), len(plan.items), parts)


def unpack_load_plan(packed: bytes | PackedPlan) -> LoadPlan:
    """Rebuild the plan that was packed.

    Unpickles the extras, if there are any: only for plans of ranks of one's own job.

    Raises:
        ConfigError: If this is no load plan.
        CorruptError: If the bytes are damaged.
    """
    plan = packed if isinstance(packed, PackedPlan) else PackedPlan.from_bytes(packed)
    data = plan.first_of(PartKind.ROWS)
    if plan.kind != PlanKind.LOAD or data is None:
        raise ConfigError("these bytes are no load plan")
    fqns = [row.fqn for run in plan.bodies_of(PartKind.KEYS) for row in decode_rows(run)]
    extras = plan.first_of(PartKind.EXTRAS)
    rest = extras_of(extras) if extras else {}
    columns = unpack_ints(data)
    try:
        items = _items(columns, fqns) if plan.num_items else []
    except (IndexError, ValueError, TypeError) as error:
        raise CorruptError(f"a packed load plan is damaged: {error!r}") from error
    return LoadPlan(items, rest.get("storage_data"), rest.get("planner_data"))


def _coordinates(item: ReadItem) -> tuple[Sequence[int] | None, ...]:
    return (
        item.dest_index.offset,
        item.dest_offsets,
        item.storage_index.offset,
        item.storage_offsets,
        item.lengths,
    )


def _items(columns: Sequence[Ints], fqns: Sequence[str]) -> list[ReadItem]:
    kinds, dest_rows, dest_hints, rows, hints, *shapes = columns
    sizes = [_sizes(*shapes[2 * n : 2 * n + 2]) for n in range(_NUM_COORDINATES)]
    plain = (kinds, dest_rows, dest_hints, rows, hints)
    return [
        ReadItem(
            type=_TYPES[kind],
            dest_index=_index(fqns[dest_row], dest_offset, dest_hint),
            dest_offsets=dest_offsets,
            storage_index=_index(fqns[row], offset, hint),
            storage_offsets=offsets,
            lengths=lengths,
        )
        for (kind, dest_row, dest_hint, row, hint), (
            dest_offset,
            dest_offsets,
            offset,
            offsets,
            lengths,
        ) in zip(
            zip(*(column.tolist() for column in plain), strict=True),
            zip(*sizes, strict=True),
            strict=True,
        )
    ]


def _index(fqn: str, offset: torch.Size | None, hint: int) -> MetadataIndex:
    return MetadataIndex(fqn, offset, hint - 1 if hint else None)


def _sizes(num_dims: Ints, flat: Ints) -> list[Any]:
    counts = np.where(num_dims == _NO_OFFSET, 0, num_dims).astype(np.int64)
    values = flat.tolist()
    ends = np.cumsum(counts).tolist()
    return [
        None if dims == _NO_OFFSET else torch.Size(values[end - dims : end])
        for dims, end in zip(num_dims.tolist(), ends, strict=True)
    ]


def _ints(values: Iterable[int]) -> Ints:
    return np.array(list(values), np.int64)
