"""What the coordinator sends back: which of its items a rank keeps.

On the wire (little-endian)::

    u8 version  u8 flags  u32 num_items  u32 mask_bytes  16-byte digest of the answered plan
    mask: plain or zlib bits, one per item, first item in the highest bit; none if all are kept
    hints, if asked for: zlib of one i4 per kept item

What the coordinator keeps of a merged plan.

DCP's save plans from and to packed columns; torch's metadata from a merged plan.
"""

from __future__ import annotations

import pickle
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntFlag
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
from dcpstore.plan.columns import (
    Ints,
    KeyKind,
    KeyRow,
    Path,
    SaveColumns,
    decode_columns,
    decode_rows,
    key_parts,
    pack_columns,
)
from dcpstore.plan.wire import DIGEST_BYTES, PackedPlan, PartKind, PlanFlag

_VERSION = 1
_PREFIX = struct.Struct(f"<BBII{DIGEST_BYTES}s")


class _Flag(IntFlag):
    ALL = 1
    DEFLATED = 2
    HINTS = 4


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """The part of its plan that a rank carries out.

    Attributes:
        is_kept: Per item of the rank's plan, whether this rank writes it.
        plan_digest: Name of the packed plan that this answers.
        hints: Per kept item, its position among the chunks of its tensor in the metadata
            (0 for values); None if the coordinator was not asked for it.
    """

    is_kept: Ints
    plan_digest: bytes
    hints: Ints | None = None

    @property
    def num_kept(self) -> int:
        """How many items this rank writes."""
        return int(np.count_nonzero(self.is_kept))

    def to_bytes(self) -> bytes:
        """Return the bytes to send."""
        flags, mask = _encode_mask(self.is_kept)
        return _join(flags, mask, len(self.is_kept), self.plan_digest, self.hints)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Decision:
        """Read what was sent.

        Raises:
            CorruptError: If these are not the bytes of a decision.
        """
        try:
            version, flags, num_items, mask_bytes, digest = _PREFIX.unpack_from(data)
            if version != _VERSION:
                raise CorruptError(f"a decision has version {version}, expected {_VERSION}")
            end = _PREFIX.size + mask_bytes
            is_kept = _mask(data[_PREFIX.size : end], flags, num_items)
            if not flags & _Flag.HINTS:
                return cls(is_kept, digest)
            hints = np.frombuffer(zlib.decompress(data[end:]), "<i4").astype(np.int64)
            if len(hints) != np.count_nonzero(is_kept):
                raise ValueError(f"{len(hints)} hints")
        except (struct.error, zlib.error, ValueError) as error:
            raise CorruptError(f"a decision is damaged: {error!r}") from error
        return cls(is_kept, digest, hints)


def encode_decisions(
    is_kept: Sequence[Ints], digests: Sequence[bytes], hints: Sequence[Ints] | None
) -> tuple[bytes, ...]:
    """Return the bytes of each rank's decision; equal masks are packed once.

    Args:
        is_kept: Per rank, as in `Decision`.
        digests: Per rank, the name of its packed plan.
        hints: Per rank and item (not only the kept ones), or None for none.
    """
    masks: dict[bytes, tuple[_Flag, bytes]] = {}
    encoded = []
    for rank, kept in enumerate(is_kept):
        bits = kept.tobytes()
        found = masks.get(bits)
        if found is None:
            found = masks[bits] = _encode_mask(kept)
        of_kept = None if hints is None else hints[rank][kept]
        encoded.append(_join(*found, len(kept), digests[rank], of_kept))
    return tuple(encoded)


def _encode_mask(is_kept: Ints) -> tuple[_Flag, bytes]:
    if bool(is_kept.all()):
        return _Flag.ALL, b""
    mask = np.packbits(is_kept).tobytes()
    deflated = zlib.compress(mask, 6)
    return (_Flag.DEFLATED, deflated) if len(deflated) < len(mask) else (_Flag(0), mask)


def _join(flags: _Flag, mask: bytes, num_items: int, digest: bytes, hints: Ints | None) -> bytes:
    tail = b""
    if hints is not None:
        flags |= _Flag.HINTS
        tail = zlib.compress(hints.astype("<i4").tobytes(), 1)
    return _PREFIX.pack(_VERSION, flags, num_items, len(mask), digest) + mask + tail


def _mask(data: bytes | memoryview, flags: int, num_items: int) -> Ints:
    if flags & _Flag.ALL:
        return np.ones(num_items, bool)
    bits = zlib.decompress(data) if flags & _Flag.DEFLATED else data
    if len(bits) != (num_items + 7) // 8:
        raise ValueError(f"{len(bits)} bytes for {num_items} items")
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=num_items).astype(bool)


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

    @property
    def num_bytes(self) -> int:
        """Memory that the columns take."""
        return sum(
            column.nbytes
            for column in (
                self.key,
                self.start,
                self.length,
                self.first_of_key,
                self.box_at,
                self.box_offsets,
                self.box_sizes,
            )
        )

    def positions(self) -> Ints:
        """Return each chunk's position among those of its key."""
        counts = np.diff(self.first_of_key)
        result: Ints = np.arange(len(self.key)) - np.repeat(self.first_of_key[:-1], counts)
        return result

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
        digests: Per rank, the name of the packed plan that was merged.
        decisions: Per rank, the bytes of its `Decision`, ready to be scattered.
        load_bytes: Per rank, the payload bytes it writes, values of unknown size left out.
        extras: Pickled planner and storage data of the ranks that sent some.
    """

    rows: tuple[KeyRow, ...]
    paths: Mapping[str, Path] | None
    chunks: ChunkColumns
    digests: tuple[bytes, ...]
    decisions: tuple[bytes, ...]
    load_bytes: Ints
    extras: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        """Ranks of the group."""
        return len(self.decisions)

    @property
    def num_bytes(self) -> int:
        """Memory that the plan takes, the table of keys left out."""
        return (
            self.chunks.num_bytes
            + sum(map(len, self.decisions))
            + sum(map(len, self.digests))
            + sum(map(len, self.extras.values()))
            + int(self.load_bytes.nbytes)
        )

    def decision(self, rank: int) -> Decision:
        """Return what one rank is told."""
        return Decision.from_bytes(self.decisions[rank])


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
