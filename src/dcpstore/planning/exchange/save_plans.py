"""DCP's save plans from and to packed columns; torch's metadata from a merged plan."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from dcpstore.errors import CorruptError, IncompatibleError
from dcpstore.planning.exchange.columns import (
    SaveColumns,
    decode_columns,
    key_parts,
    pack_columns,
)
from dcpstore.planning.exchange.decisions import Decision
from dcpstore.planning.exchange.global_plan import GlobalSavePlan
from dcpstore.planning.exchange.schema import KeyKind, KeyRow, Path, decode_rows
from dcpstore.planning.exchange.wire import PackedPlan, PartKind, PlanFlag

__all__ = [
    "apply_decision",
    "pack_save_plan",
    "to_metadata",
    "to_packed_plan",
    "unpack_save_plan",
]

_KIND_OF = {WriteItemType.TENSOR: KeyKind.TENSOR, WriteItemType.SHARD: KeyKind.SHARD}
_TYPE_OF = {
    KeyKind.VALUE: WriteItemType.BYTE_IO,
    KeyKind.TENSOR: WriteItemType.TENSOR,
    KeyKind.SHARD: WriteItemType.SHARD,
}
_HAS_USABLE = any(field.name == "usable" for field in fields(SavePlan))  # torch 2.8 on


def pack_save_plan(plan: SavePlan) -> bytes:
    """Pack a rank's save plan, to be sent to the coordinator.

    Every field of DCP's plan comes back from `unpack_save_plan`. DCP's flattening map
    travels with the keys; other planner data and the storage data are pickled into a part
    of their own, which the coordinator does not open to merge plans.

    Raises:
        IncompatibleError: If the plan or an item is of a class derived from DCP's, or an
            item has a form that DCP's planners do not make; send such a plan as it is.
    """
    return to_packed_plan(plan).to_bytes()


def to_packed_plan(plan: SavePlan) -> PackedPlan:
    """As `pack_save_plan`, with head and parts kept apart.

    Raises:
        IncompatibleError: As there.
    """
    if type(plan) is not SavePlan:
        raise IncompatibleError(f"a plan of type {type(plan).__name__} has fields of its own")
    paths = _paths(plan.planner_data)
    collector = _Collector(paths or {})
    for item in plan.items:
        collector.add(item)
    flags = PlanFlag(0) if paths is None else PlanFlag.HAS_PATHS
    if not getattr(plan, "usable", True):
        flags |= PlanFlag.IS_UNUSABLE
    rest = {"storage_data": plan.storage_data}
    if paths is None:
        rest["planner_data"] = plan.planner_data
    rest = {name: value for name, value in rest.items() if value is not None}
    extras = pickle.dumps(rest) if rest else None
    keys = key_parts(collector.all_rows())
    return pack_columns(collector.columns(), keys, flags=flags, extras=extras)


def unpack_save_plan(packed: bytes | PackedPlan) -> SavePlan:
    """Rebuild the plan that was packed.

    Unpickles the extras, if there are any: only for plans of ranks of one's own job.

    Raises:
        CorruptError: If the bytes are damaged.
    """
    plan = packed if isinstance(packed, PackedPlan) else PackedPlan.from_bytes(packed)
    data = plan.first_of(PartKind.ROWS)
    if data is None:
        raise CorruptError("the packed plan has no items part")
    columns = decode_columns(data, plan.num_items)
    rows = [row for run in plan.bodies_of(PartKind.KEYS) for row in decode_rows(run)]
    extras = plan.first_of(PartKind.EXTRAS)
    rest = _extras_of(extras) if extras else {}
    planner_data = rest.get("planner_data")
    if plan.has(PlanFlag.HAS_PATHS):
        planner_data = {row.fqn: row.path for row in rows if row.path is not None}
    items = _items(columns, rows)
    result = SavePlan(items, rest.get("storage_data"), planner_data)
    if plan.has(PlanFlag.IS_UNUSABLE) and _HAS_USABLE:
        result = replace(result, usable=False)
    return result


def _extras_of(data: bytes | memoryview) -> dict[str, Any]:
    """Unpickle what a rank's planner and storage writer put beside the items.

    As DCP does with whole plans: it runs what the bytes name, so only for bytes that a rank
    of one's own job sent.

    Returns:
        ``planner_data`` and ``storage_data``, where they are not None and no flattening map.
    """
    rest: dict[str, Any] = pickle.loads(data)  # noqa: S301 - from a rank of this very job
    return rest


def apply_decision(
    plan: SavePlan, decision: Decision | bytes, *, digest: bytes | None = None
) -> SavePlan:
    """Keep the items of a rank's own plan that it was chosen to write.

    Args:
        plan: The rank's local plan, as it was packed.
        decision: What the coordinator answered.
        digest: Name of the packed plan, to make sure that the answer is to this plan.

    Raises:
        CorruptError: If the decision answers another plan.
    """
    if not isinstance(decision, Decision):
        decision = Decision.from_bytes(decision)
    if len(decision.is_kept) != len(plan.items) or digest not in (None, decision.plan_digest):
        raise CorruptError(
            f"the coordinator's decision on {len(decision.is_kept)} items does not answer this"
            f" rank's plan of {len(plan.items)} items"
        )
    kept = [plan.items[at] for at in np.flatnonzero(decision.is_kept).tolist()]
    if decision.hints is not None:
        kept = [
            item if item.tensor_data is None else _with_hint(item, hint)
            for item, hint in zip(kept, decision.hints.tolist(), strict=True)
        ]
    return replace(plan, items=kept)


def to_metadata(plan: GlobalSavePlan) -> Metadata:
    """Build torch's metadata of the coming checkpoint, storage data still missing.

    The same as DCP's default planner makes of the same plans, chunks in the order of their
    offsets. Planner data other than the flattening map is in ``plan.extras``.
    """
    state_dict_metadata: dict[str, Any] = {}
    known: dict[str, TensorProperties] = {}
    for key, row in enumerate(plan.rows):
        if row.is_value:
            state_dict_metadata[row.fqn] = BytesStorageMetadata()
            continue
        chunks = [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in plan.chunks.shapes_of(key, row.size)
        ]
        if row.properties not in known:
            known[row.properties] = _properties(row.properties)
        state_dict_metadata[row.fqn] = TensorStorageMetadata(
            replace(known[row.properties]), torch.Size(row.size), chunks
        )
    return Metadata(state_dict_metadata, None if plan.paths is None else dict(plan.paths))


class _Collector:
    """Turns items into rows of the table of keys and columns."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = paths
        self._row_of: dict[KeyRow, int] = {}
        self._rows: list[int] = []
        self._start: list[int] = []
        self._length: list[int] = []
        self._hint: list[int] = []
        self._boxes: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
        self._texts: dict[Any, tuple[str, int]] = {}

    def add(self, item: WriteItem) -> None:
        data, fqn = item.tensor_data, item.index.fqn
        if type(item) is not WriteItem or (data is None) != (item.type == WriteItemType.BYTE_IO):
            raise IncompatibleError(f"the planned item of {fqn!r} is none that DCP makes: {item}")
        self._hint.append(-1 if item.index.index is None else item.index.index)
        if data is None:
            if item.index.offset is not None:
                raise IncompatibleError(f"the planned value {fqn!r} has an offset: {item}")
            nbytes = None if item.bytes_io_data is None else item.bytes_io_data.nbytes
            self._append(KeyRow(fqn, KeyKind.VALUE, path=self._paths.get(fqn)), nbytes)
            return
        size = tuple(data.size)
        offsets, sizes = _shape(item, data)
        text, item_bytes = self._text(data.properties)
        has_offset = item.index.offset is not None
        row = KeyRow(
            fqn, _KIND_OF[item.type], size, text, item_bytes, self._paths.get(fqn), has_offset
        )
        if any(offsets[1:]) or sizes[1:] != size[1:]:
            self._boxes.append((len(self._start), offsets[1:], sizes[1:]))
        self._rows.append(self._row_of.setdefault(row, len(self._row_of)))
        self._start.append(offsets[0] if size else 0)
        self._length.append(sizes[0] if size else 1)

    def _append(self, row: KeyRow, nbytes: int | None) -> None:
        self._rows.append(self._row_of.setdefault(row, len(self._row_of)))
        self._start.append(0 if nbytes is None else 1)
        self._length.append(nbytes or 0)

    def _text(self, properties: TensorProperties) -> tuple[str, int]:
        key = (
            properties.dtype,
            properties.layout,
            properties.memory_format,
            properties.requires_grad,
            properties.pin_memory,
        )
        if key not in self._texts:
            names = [str(one).removeprefix("torch.") for one in key[:3]]
            flags = [str(int(bool(one))) for one in key[3:]]
            self._texts[key] = " ".join(names + flags), properties.dtype.itemsize
        return self._texts[key]

    def all_rows(self) -> list[KeyRow]:
        """Return the table: keys with items, then those of the flattening map alone."""
        used = {row.fqn for row in self._row_of}
        rest = [
            KeyRow(fqn, KeyKind.PATH, path=path)
            for fqn, path in self._paths.items()
            if fqn not in used
        ]
        return [*self._row_of, *rest]

    def columns(self) -> SaveColumns:
        inner = max((len(sizes) for _, _, sizes in self._boxes), default=0)
        pad = [inner - len(sizes) for _, _, sizes in self._boxes]
        offsets = [(*one, *(0,) * n) for (_, one, _), n in zip(self._boxes, pad, strict=True)]
        sizes = [(*one, *(1,) * n) for (_, _, one), n in zip(self._boxes, pad, strict=True)]
        is_plain = self._rows == list(range(len(self._rows)))
        return SaveColumns(
            start=np.array(self._start, np.int64),
            length=np.array(self._length, np.int64),
            row=None if is_plain else np.array(self._rows, np.int64),
            hint=np.array(self._hint, np.int64) if any(h >= 0 for h in self._hint) else None,
            box_item=np.array([item for item, _, _ in self._boxes], np.int64),
            box_offsets=np.array(offsets, np.int64).reshape(len(offsets), inner),
            box_sizes=np.array(sizes, np.int64).reshape(len(sizes), inner),
        )


def _shape(item: WriteItem, data: TensorWriteData) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if data.chunk is None:
        raise IncompatibleError(f"the planned tensor {item.index.fqn!r} has no bounds: {item}")
    offsets, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    if len(offsets) != len(data.size) or len(sizes) != len(data.size):
        raise IncompatibleError(
            f"the planned chunk of {item.index.fqn!r} at {offsets} of sizes {sizes} has other"
            f" dimensions than its tensor of size {tuple(data.size)}"
        )
    if item.index.offset is not None and tuple(item.index.offset) != offsets:
        raise IncompatibleError(
            f"the planned chunk of {item.index.fqn!r} lies at {offsets} but its index says"
            f" {tuple(item.index.offset)}"
        )
    return offsets, sizes


def _paths(planner_data: Any) -> dict[str, Path] | None:
    """Return DCP's flattening map; None if the planner data is anything else."""
    if type(planner_data) is not dict:
        return None
    for fqn, path in planner_data.items():
        if type(fqn) is not str or type(path) is not tuple:
            return None
        if not all(type(step) in (str, int) for step in path):
            return None
    return planner_data


def _with_hint(item: WriteItem, hint: int) -> WriteItem:
    return replace(item, index=MetadataIndex(item.index.fqn, item.index.offset, hint))


def _items(columns: SaveColumns, rows: list[KeyRow]) -> list[WriteItem]:
    box_of = dict(
        zip(
            columns.box_item.tolist(),
            zip(columns.box_offsets.tolist(), columns.box_sizes.tolist(), strict=True),
            strict=True,
        )
    )
    number_of = range(columns.num_items) if columns.row is None else columns.row.tolist()
    hints = [-1] * columns.num_items if columns.hint is None else columns.hint.tolist()
    items = []
    for at, (number, hint, start, length) in enumerate(
        zip(number_of, hints, columns.start.tolist(), columns.length.tolist(), strict=True)
    ):
        row = rows[number]
        known_hint = None if hint < 0 else hint
        if row.is_value:
            size = BytesIOWriteData(length) if start else None
            index = MetadataIndex(row.fqn, None, known_hint)
            items.append(WriteItem(index, WriteItemType.BYTE_IO, bytes_io_data=size))
            continue
        inner = len(row.size) - 1
        offsets, sizes = (0,) * inner, row.size[1:]
        if at in box_of:
            offsets, sizes = (tuple(one[:inner]) for one in box_of[at])
        chunk = ChunkStorageMetadata(
            torch.Size((start, *offsets) if row.size else ()),
            torch.Size((length, *sizes) if row.size else ()),
        )
        data = TensorWriteData(chunk, _properties(row.properties), torch.Size(row.size))
        offset = chunk.offsets if row.has_offset else None
        index = MetadataIndex(row.fqn, offset, known_hint)
        items.append(WriteItem(index, _TYPE_OF[row.kind], tensor_data=data))
    return items


def _properties(text: str) -> TensorProperties:
    dtype, layout, memory_format, requires_grad, pin_memory = text.split(" ")
    return TensorProperties(
        dtype=_named(dtype, torch.dtype),
        layout=_named(layout, torch.layout),
        requires_grad=requires_grad == "1",
        memory_format=_named(memory_format, torch.memory_format),
        pin_memory=pin_memory == "1",
    )


def _named(name: str, kind: type) -> Any:
    value = getattr(torch, name, None)
    if not isinstance(value, kind):
        raise CorruptError(f"a packed plan names torch.{name}, which this torch does not know")
    return value
