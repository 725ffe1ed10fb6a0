"""DCP's save plans from and to packed columns, and torch's metadata from a merged plan.

What the coordinator sends back says which of its items a rank keeps. On the wire
(little-endian)::

    u8 version  u8 flags  u32 num_items  u32 mask_bytes  16-byte digest of the answered plan
    mask: plain or zlib bits, one per item, first item in the highest bit; none if all are kept
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntFlag
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
    key_parts,
    pack_columns,
)

_VERSION = 1
_PREFIX = struct.Struct(f"<BBII{DIGEST_BYTES}s")


class _Mask(IntFlag):
    ALL = 1
    DEFLATED = 2


def encode_decisions(is_kept: Sequence[Ints], digests: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return the bytes of each rank's decision; equal masks are packed once.

    Args:
        is_kept: Per rank and item of its plan, whether this rank writes it.
        digests: Per rank, the name of its packed plan.
    """
    masks: dict[bytes, tuple[_Mask, bytes]] = {}
    encoded = []
    for kept, digest in zip(is_kept, digests, strict=True):
        bits = kept.tobytes()
        if bits not in masks:
            masks[bits] = _encode_mask(kept)
        flags, mask = masks[bits]
        encoded.append(_PREFIX.pack(_VERSION, flags, len(kept), len(mask), digest) + mask)
    return tuple(encoded)


def decode_decision(data: bytes | memoryview) -> tuple[Ints, bytes]:
    """Return which items of its plan a rank keeps, and the name of the plan that this answers.

    Raises:
        CorruptError: If these are not the bytes of a decision.
    """
    try:
        version, flags, num_items, mask_bytes, digest = _PREFIX.unpack_from(data)
        if version != _VERSION:
            raise CorruptError(f"a decision has version {version}, expected {_VERSION}")
        mask = data[_PREFIX.size : _PREFIX.size + mask_bytes]
        if flags & _Mask.ALL:
            return np.ones(num_items, bool), digest
        bits = zlib.decompress(mask) if flags & _Mask.DEFLATED else mask
        if len(bits) != (num_items + 7) // 8:
            raise ValueError(f"{len(bits)} bytes for {num_items} items")
    except (struct.error, zlib.error, ValueError) as error:
        raise CorruptError(f"a decision is damaged: {error!r}") from error
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=num_items).astype(bool), digest


def _encode_mask(is_kept: Ints) -> tuple[_Mask, bytes]:
    if bool(is_kept.all()):
        return _Mask.ALL, b""
    mask = np.packbits(is_kept).tobytes()
    deflated = zlib.compress(mask, 6)
    return (_Mask.DEFLATED, deflated) if len(deflated) < len(mask) else (_Mask(0), mask)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkColumns:
    """The chunks of the checkpoint, ordered by key and offsets.

    Attributes:
        key: Per chunk, its row in ``GlobalSavePlan.rows``.
        start, length: Its offset and size in the first dimension; of a value, whether its
            size is known and that size in bytes.
        first_of_key: Per key, its first chunk; one more at the end.
        box_at: Ascending positions of the chunks that do not fill all later dimensions.
        box_offsets, box_sizes: Where those lie in the later dimensions, padded with 0 and 1.
    """

    key: Ints
    start: Ints
    length: Ints
    first_of_key: Ints
    box_at: Ints
    box_offsets: Ints
    box_sizes: Ints

    def shapes_of(
        self, key: int, size: tuple[int, ...]
    ) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return offsets and sizes of a tensor's chunks."""
        first, end = self.first_of_key[key : key + 2].tolist()
        if not size:
            return [((), ())] * (end - first)
        inner = len(size) - 1
        zeros, full = (0,) * inner, size[1:]
        shapes = [
            ((start, *zeros), (length, *full))
            for start, length in zip(
                self.start[first:end].tolist(), self.length[first:end].tolist(), strict=True
            )
        ]
        low, high = np.searchsorted(self.box_at, (first, end)).tolist()
        for at, offsets, sizes in zip(
            self.box_at[low:high].tolist(),
            self.box_offsets[low:high, :inner].tolist(),
            self.box_sizes[low:high, :inner].tolist(),
            strict=True,
        ):
            (start, *_), (length, *_) = shapes[at - first]
            shapes[at - first] = ((start, *offsets), (length, *sizes))
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
    return pack_columns(collector.columns(), key_parts(collector.all_rows()), flags)


def apply_decision(plan: SavePlan, decision: bytes, *, digest: bytes | None = None) -> SavePlan:
    """Keep the items of a rank's own plan that it was chosen to write.

    Args:
        plan: The rank's local plan, as it was packed.
        decision: What the coordinator answered.
        digest: Name of the packed plan, to make sure that the answer is to this plan.

    Raises:
        CorruptError: If the decision answers another plan.
    """
    is_kept, answered = decode_decision(decision)
    if len(is_kept) != len(plan.items) or digest not in (None, answered):
        raise CorruptError(
            f"the coordinator's decision on {len(is_kept)} items does not answer this"
            f" rank's plan of {len(plan.items)} items"
        )
    return replace(plan, items=[plan.items[at] for at in np.flatnonzero(is_kept).tolist()])


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
    """Turns items into rows of the table of keys and columns."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = paths
        self._row_of: dict[KeyRow, int] = {}
        self._rows: list[int] = []
        self._start: list[int] = []
        self._length: list[int] = []
        self._boxes: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
        self._texts: dict[Any, tuple[str, int]] = {}

    def add(self, item: WriteItem) -> None:
        data, fqn = item.tensor_data, item.index.fqn
        if type(item) is not WriteItem or (data is None) != (item.type == WriteItemType.BYTE_IO):
            raise IncompatibleError(f"the planned item of {fqn!r} is none that DCP makes: {item}")
        if data is None:
            if item.index.offset is not None:
                raise IncompatibleError(f"the planned value {fqn!r} has an offset: {item}")
            nbytes = None if item.bytes_io_data is None else item.bytes_io_data.nbytes
            row = KeyRow(fqn, KeyKind.VALUE, path=self._paths.get(fqn))
            self._append(row, 0 if nbytes is None else 1, nbytes or 0)
            return
        size = tuple(data.size)
        offsets, sizes = _shape(item, data)
        row = KeyRow(
            fqn, KeyKind.TENSOR, size, *self._text(data.properties), path=self._paths.get(fqn)
        )
        if any(offsets[1:]) or sizes[1:] != size[1:]:
            self._boxes.append((len(self._start), offsets[1:], sizes[1:]))
        self._append(row, offsets[0] if size else 0, sizes[0] if size else 1)

    def _append(self, row: KeyRow, start: int, length: int) -> None:
        self._rows.append(self._row_of.setdefault(row, len(self._row_of)))
        self._start.append(start)
        self._length.append(length)

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
