"""DCP's save plans from and to packed columns, and torch's metadata from a merged plan.

What the coordinator sends back says which of its items a rank keeps::

    16-byte digest of the answered plan
    one zlib stream: a byte per item, 1 if it is kept
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from dcpstore.errors import CorruptError, IncompatibleError
from dcpstore.plan.wire import (
    DIGEST_BYTES,
    Ints,
    KeyKind,
    KeyRow,
    PackedPlan,
    Path,
    PlanFlag,
    SaveColumns,
    pack_columns,
)


def encode_decisions(is_kept: Sequence[Ints], digests: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return the bytes of each rank's decision; equal masks are packed once.

    Args:
        is_kept: Per rank and item of its plan, whether this rank writes it.
        digests: Per rank, the name of its packed plan.
    """
    masks: dict[bytes, bytes] = {}
    encoded = []
    for kept, digest in zip(is_kept, digests, strict=True):
        mask = kept.tobytes()
        if mask not in masks:
            masks[mask] = zlib.compress(mask, 6)
        encoded.append(digest + masks[mask])
    return tuple(encoded)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkColumns:
    """The chunks of the checkpoint, ordered by key and offsets.

    Attributes:
        key: Per chunk, its row in ``GlobalSavePlan.rows``.
        start, length: Its offset and size in the first dimension; of a value, whether its
            size is known and that size in bytes.
        box: 0, or for a chunk that does not fill all later dimensions the row of its box.
        boxes: Boxes x 2 x later dimensions: their offsets, padded with 0, and sizes, padded
            with 1.
        first_of_key: Per key, its first chunk; one more at the end.
    """

    key: Ints
    start: Ints
    length: Ints
    box: Ints
    boxes: Ints
    first_of_key: Ints

    def shapes_of(
        self, key: int, size: tuple[int, ...]
    ) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return offsets and sizes of a tensor's chunks."""
        of_key = slice(*self.first_of_key[key : key + 2].tolist())
        box = self.box[of_key]
        if not size:
            return [((), ())] * len(box)
        inner = len(size) - 1
        zeros, full = (0,) * inner, size[1:]
        shapes = [
            ((start, *zeros), (length, *full))
            for start, length in zip(
                self.start[of_key].tolist(), self.length[of_key].tolist(), strict=True
            )
        ]
        boxed = np.flatnonzero(box)
        boxes = self.boxes[box[boxed], :, :inner].tolist()
        for at, (offsets, sizes) in zip(boxed.tolist(), boxes, strict=True):
            (start, *_), (length, *_) = shapes[at]
            shapes[at] = ((start, *offsets), (length, *sizes))
        return shapes


@dataclass(frozen=True, slots=True, eq=False)
class GlobalSavePlan:
    """Who writes what, and the metadata that will describe it.

    Attributes:
        rows: The keys of the checkpoint, in the order of their first appearance over ranks.
        paths: The joined flattening map of DCP; None if no planner kept one.
        chunks: The distinct chunks.
        decisions: Per rank, which of its items it keeps, ready to be scattered.
        load_bytes: Per rank, the payload bytes it writes, values of unknown size left out.
    """

    rows: tuple[KeyRow, ...]
    paths: Mapping[str, Path] | None
    chunks: ChunkColumns
    decisions: tuple[bytes, ...]
    load_bytes: Ints


def to_packed_plan(plan: SavePlan) -> PackedPlan:
    """Pack a rank's save plan, to be sent to the coordinator.

    It holds what the coordinator merges plans by: items, and DCP's flattening map.

    Raises:
        IncompatibleError: If the plan or an item is of a class derived from DCP's, an item has a
            form that DCP's planners do not make, or the planner data are another than the
            flattening map; send such a plan as it is.
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
    return pack_columns(collector.columns(), collector.all_rows(), flags)


def apply_decision(plan: SavePlan, decision: bytes, *, digest: bytes | None = None) -> SavePlan:
    """Keep the items of a rank's own plan that it was chosen to write.

    Args:
        plan: The rank's local plan, as it was packed.
        decision: What the coordinator answered.
        digest: Name of the packed plan, to make sure that the answer is to this plan.

    Raises:
        CorruptError: If the decision answers another plan, or is damaged.
    """
    try:
        mask = zlib.decompress(decision[DIGEST_BYTES:])
    except zlib.error as error:
        raise CorruptError(f"a decision is damaged: {error}") from error
    if len(mask) != len(plan.items) or digest not in (None, decision[:DIGEST_BYTES]):
        raise CorruptError(
            f"the coordinator's decision on {len(mask)} items does not answer this rank's plan"
            f" of {len(plan.items)} items"
        )
    return replace(plan, items=list(compress(plan.items, mask)))


def to_metadata(plan: GlobalSavePlan) -> Metadata:
    """Build torch's metadata of the coming checkpoint, storage data still missing.

    The same as DCP's default planner makes of the same plans, chunks in the order of their
    offsets.
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
            known[row.properties] = properties_of(row.properties)
        state_dict_metadata[row.fqn] = TensorStorageMetadata(
            replace(known[row.properties]), torch.Size(row.size), chunks
        )
    return Metadata(state_dict_metadata, None if plan.paths is None else dict(plan.paths))


class _Collector:
    """Turns items into columns, and into rows of the table of keys, one per item."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = paths
        self._rows: list[KeyRow] = []
        self._start: list[int] = []
        self._length: list[int] = []
        self._box: list[int] = []
        self._boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self._texts: dict[Any, tuple[str, int]] = {}

    def add(self, item: WriteItem) -> None:
        data, fqn = item.tensor_data, item.index.fqn
        if type(item) is not WriteItem or (data is None) != (item.type == WriteItemType.BYTE_IO):
            raise IncompatibleError(f"the planned item of {fqn!r} is none that DCP makes: {item}")
        path, box = self._paths.get(fqn), 0
        if data is None:
            if item.index.offset is not None:
                raise IncompatibleError(f"the planned value {fqn!r} has an offset: {item}")
            nbytes = None if item.bytes_io_data is None else item.bytes_io_data.nbytes
            row = KeyRow(fqn, KeyKind.VALUE, path=path)
            start, length = 0 if nbytes is None else 1, nbytes or 0
        else:
            size = tuple(data.size)
            offsets, sizes = _shape(item, data)
            row = KeyRow(fqn, KeyKind.TENSOR, size, *self._text(data.properties), path=path)
            if any(offsets[1:]) or sizes[1:] != size[1:]:
                box = self._boxes.setdefault((offsets[1:], sizes[1:]), len(self._boxes) + 1)
            start, length = (offsets[0], sizes[0]) if size else (0, 1)
        self._rows.append(row)
        self._start.append(start)
        self._length.append(length)
        self._box.append(box)

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
        """Return the table: a row per item, then the keys of the flattening map alone."""
        used = {row.fqn for row in self._rows}
        rest = [
            KeyRow(fqn, KeyKind.PATH, path=path)
            for fqn, path in self._paths.items()
            if fqn not in used
        ]
        return [*self._rows, *rest]

    def columns(self) -> SaveColumns:
        num_dims = max((len(sizes) for _, sizes in self._boxes), default=0)
        boxes = np.zeros((len(self._boxes), 2, num_dims), np.int64)
        boxes[:, 1] = 1
        for box, (offsets, sizes) in zip(boxes, self._boxes, strict=True):
            box[:, : len(sizes)] = offsets, sizes
        return SaveColumns(
            start=np.array(self._start, np.int64),
            length=np.array(self._length, np.int64),
            box=np.array(self._box, np.int64),
            boxes=boxes,
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
    """Return DCP's flattening map; None if there are no planner data.

    Raises:
        IncompatibleError: If they are anything else.
    """
    if planner_data is None:
        return None
    if type(planner_data) is not dict or not all(map(_is_step, planner_data.items())):
        raise IncompatibleError("the planner data are no map of keys to paths")
    return planner_data


def _is_step(entry: tuple[Any, Any]) -> bool:
    fqn, path = entry
    return (
        type(fqn) is str and type(path) is tuple and all(type(step) in (str, int) for step in path)
    )


def properties_of(text: str) -> TensorProperties:
    """Return the tensor properties of a row of the table of keys."""
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
