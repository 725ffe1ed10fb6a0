"""What a load wants, where it goes, and how fetched bytes get there.

A `Target` is a read item with the stored item it comes from and the memory it goes to; all are
checked before the first request. A `Piece` is a part of a target that one request brings::

    stored item    [block][block][block][block]     checksum blocks
    piece          ........[== span ==]........     bytes wanted
                   .......[== fetch ==]........     whole blocks around them

Where it is known which bytes are which elements (``kind="raw"``), each piece is copied into its
target as it arrives. Records that must be decoded as a whole are collected first: those of other
writers, compressed ones, tensors that are more than their elements, and values.
"""

from __future__ import annotations

import io
import re
import struct
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from dcpstore.errors import CheckpointError, CorruptError, IncompatibleError
from dcpstore.format.dtypes import dtype_from_name, dtype_name, item_bytes
from dcpstore.format.manifest import StoredItem
from dcpstore.format.opcodes import CutShortError, end_of_program
from dcpstore.format.payload import (
    PLAIN_TYPES,
    copy_box_in,
    is_freed,
    is_plain,
    num_elements,
    set_payload,
    spacing,
)
from dcpstore.format.tensors import copy_opaque_in, decode_opaque
from dcpstore.format.zip import (
    LOCAL_SIGNATURE,
    MAX32,
    STREAMED_FLAG,
    LocalHeader,
    ReadAt,
    read_local_header,
)
from dcpstore.plan.coverage import refuse_lacks
from dcpstore.read.torch_file import Storages, TensorPlace, is_strided, unpickle
from dcpstore.store.base import ByteRange, Store
from dcpstore.text import indented
from dcpstore.torch_private import default_extension_registry, narrow, storage_identity

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Below this, a foreign record is fetched whole and looked into afterwards; above it, a
# small request for its head saves fetching what is not needed.
_WHOLE_RECORD_BYTES = 1 << 20


@dataclass(slots=True, eq=False)
class Target:
    """One read item on its way from the plan to its memory.

    Attributes:
        read_item: As planned.
        item: The stored chunk or value it comes from.
        tensor: Where its elements go, narrowed to them; None for a value.
        twins: Other targets of the same record, which is fetched and decoded once for all.
        missing: Pieces still to come.
        content: The record, as far as it came; of a value, in the end what the planner opens.
    """

    read_item: ReadItem
    item: StoredItem
    tensor: torch.Tensor | None = None
    twins: Sequence[Target] = ()
    missing: int = 0
    content: memoryview | bytes | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def fqn(self) -> str:
        """The state-dict key."""
        return self.read_item.storage_index.fqn

    @property
    def box(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """First element and sizes of what it wants of its chunk."""
        return tuple(self.read_item.storage_offsets), tuple(self.read_item.lengths)

    def is_complete_after_one_more(self) -> bool:
        """Count one piece as there. True for whoever brings the last one. Any thread."""
        with self._lock:
            self.missing -= 1
            return self.missing == 0

    def collect(self, span: ByteRange, data: memoryview) -> None:
        """Take a part of the whole record; without a copy if it is all of it. Any thread."""
        record = self.item.record
        if span == record:
            self.content = data
            return
        with self._lock:
            if self.content is None:
                self.content = memoryview(bytearray(record.num_bytes))
            content = self.content
        assert isinstance(content, memoryview)
        content[span.start - record.start : span.end - record.start] = data


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of an object that serve one target.

    Attributes:
        target: Whom they serve.
        span: Bytes needed, counted from the start of the object.
        fetch: Bytes fetched: the span widened to whole checksum blocks.
        box: First element in the chunk and sizes of what is wanted of the span. None if all of
            it is: a run of elements in the target as in the chunk, or a part of a record.
    """

    target: Target
    span: ByteRange
    fetch: ByteRange
    box: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def needed_bytes(self) -> int:
        """How many of the bytes were asked for, holes and whole blocks left out."""
        if self.box is None:
            return self.span.num_bytes
        return num_elements(self.box[1]) * item_bytes(self.target.item.dtype)

    @property
    def spacing(self) -> tuple[int, int]:
        """How many bytes of `fetch` are wanted every how many; most often all of them."""
        item, num_bytes = self.target.item, self.fetch.num_bytes
        found = None
        if self.box is not None and item.checksums is None:
            found = spacing(item.element_strides, self.box[1], item_bytes(item.dtype))
        return found or (num_bytes, num_bytes)


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
    lock = threading.Lock()  # held for moments, so one is enough for all: there may be millions
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
        target = Target(read_item, item, _lock=lock)
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
        raise IncompatibleError(
            f"the checkpoint does not fit {len(problems)} target(s); nothing was loaded:"
            + indented(problems)
        )
    return targets


def _mismatch(target: Target, metadata: Metadata, casts: str) -> str | None:
    tensor, lengths = target.tensor, target.read_item.lengths
    assert tensor is not None
    if tensor.is_meta:
        return f"{target.fqn!r}: the target is on the meta device; give it memory before loading"
    if is_plain(tensor) and is_freed(tensor):
        return f"{target.fqn!r}: the target's memory was freed: its storage is empty"
    if tensor.shape != tuple(lengths):
        return (
            f"{target.fqn!r}: the plan reads shape {tuple(lengths)} and the target has shape"
            f" {tuple(tensor.shape)}"
        )
    layout: torch.layout = torch.strided
    saved: torch.dtype | None = None
    if target.item.kind == "raw":
        saved = dtype_from_name(target.item.dtype)
    elif isinstance(entry := metadata.state_dict_metadata.get(target.fqn), TensorStorageMetadata):
        layout, saved = entry.properties.layout, entry.properties.dtype
    if layout != tensor.layout:
        return f"{target.fqn!r}: saved as {layout}, and the target is {tensor.layout}"
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


def group_targets(targets: Sequence[Target]) -> list[Target]:
    """Return the targets to fetch for: one, with its twins, where several need one record."""
    firsts: list[Target] = []
    by_record: dict[tuple[str, ByteRange], Target] = {}
    for target in targets:
        if target.item.kind == "record":
            first = by_record.setdefault((target.item.key, target.item.record), target)
            if first is not target:
                first.twins = (*first.twins, target)
                continue
        firsts.append(target)
    return firsts


# --- records of which it is not known where their elements lie ------------------------


HEAD_BYTES = 1024
"""A first read of this many bytes holds the head of any record that stock DCP writes."""

# Torch can be told to align members to 32 KiB, and four precede the payload.
_MAX_HEAD_BYTES = 256 << 10
# The call of a tensor of 64 dimensions takes 1.5 KiB; a longer pickle is something else.
_MAX_PICKLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class TensorInRecord:
    """Where a record keeps its tensor.

    Attributes:
        place: In its storage.
        storage: The bytes of the record that are the storage.
    """

    place: TensorPlace
    storage: ByteRange


def find_tensor(read_at: ReadAt, record_bytes: int) -> TensorInRecord | None:
    """Find the tensor of a ``torch.save`` record, by one small read nearly always.

    Args:
        read_at: Reads the record.
        record_bytes: Its length.

    Returns:
        None if only ``torch.load`` can tell what the record holds: something else than one
        tensor, another byte order, or a broken record.
    """
    given = 0
    wanted = HEAD_BYTES
    while given < record_bytes:
        given = min(wanted, record_bytes)
        try:
            return _parse_head(memoryview(read_at(0, given)).cast("B"), record_bytes)
        except CutShortError as short:
            wanted = max(short.needed_bytes, 2 * given)
        except (ValueError, CorruptError, IncompatibleError):
            break
    return None


def _parse_head(data: memoryview, record_bytes: int) -> TensorInRecord:
    first = _read_header(data, 0)
    if not first.name.endswith(b"/data.pkl"):
        raise ValueError(f"an archive that starts with {first.name!r}")
    root = first.name.removesuffix(b"data.pkl")
    start = first.contents
    window = bytes(data[start : start + _MAX_PICKLE_BYTES])
    try:
        end = end_of_program(window)
    except CutShortError as error:
        if error.needed_bytes > _MAX_PICKLE_BYTES:
            raise ValueError("a long pickle") from error
        raise CutShortError(start + error.needed_bytes) from error
    place, num_bytes = _pickled_tensor(window[:end])
    key = place.storage_key.encode("utf-8", "replace")
    behind = start + end
    member = _find_member(data, behind, behind + _MAX_HEAD_BYTES, root + b"data/" + key)
    if member is None:
        if len(data) - behind >= _MAX_HEAD_BYTES:
            raise ValueError("no storage near its pickle")
        raise CutShortError(len(data) + 1)
    note = _find_member(data, behind, member.contents, root + b"byteorder")
    order = sys.byteorder.encode()
    if note is not None and data[note.contents : note.contents + len(order)] != order:
        raise ValueError("a storage of another byte order")
    storage = ByteRange(member.contents, member.contents + num_bytes)
    if storage.end > record_bytes:
        raise ValueError("a storage that is longer than the record")
    if not member.flags & STREAMED_FLAG and member.size_bytes not in (num_bytes, MAX32):
        raise ValueError("a storage of another size than the tensor says")
    return TensorInRecord(place, storage)


@lru_cache(maxsize=4096)  # tensors of the same shape and dtype have the same pickle
def _pickled_tensor(pickled: bytes) -> tuple[TensorPlace, int]:
    """Return where a pickle has its tensor, and how long its storage is."""
    storages = Storages("the record")
    tensor = unpickle(pickled, storages, weights_only=True, what="the record")
    if type(tensor) not in PLAIN_TYPES or vars(tensor) or not is_strided(tensor):
        raise ValueError("something else than one plain tensor")
    for key, made in storages.made.items():
        if storage_identity(made) == storage_identity(tensor):
            return TensorPlace.of(tensor, key), made.nbytes()
    raise ValueError("a tensor without a storage")


def _find_member(data: memoryview, start: int, end: int, name: bytes) -> LocalHeader | None:
    """Return the header of a member between two positions; None if it is not there.

    Members are not walked from one to the next: where torch streams, their sizes are behind
    their contents.
    """
    name_bytes = struct.pack("<H", len(name))
    parts = (re.escape(LOCAL_SIGNATURE), re.escape(name_bytes), re.escape(name))
    pattern = re.compile(b"%b.{22}%b..%b" % parts, re.DOTALL)
    found = pattern.search(data, start, end)
    return None if found is None else _read_header(data, found.start())


def _read_header(data: memoryview, position: int) -> LocalHeader:
    header = read_local_header(data, position)
    if isinstance(header, int):
        raise CutShortError(header)
    if header.method != 0 or header.flags & ~0x0808:
        raise ValueError("an archive with compressed or encrypted members")
    return header


def as_raw(item: StoredItem, found: TensorInRecord | None) -> StoredItem:
    """Return a record as a raw item if it holds a dense tensor; else as it is."""
    if found is None or not found.place.is_dense:
        return item
    place, span = found.place, found.place.span()
    start = item.record.start + found.storage.start
    return replace(
        item,
        kind="raw",
        payload=ByteRange(start + span.start, start + span.end),
        dtype=dtype_name(place.dtype),
        sizes=place.sizes,
    )


def is_worth_locating(item: StoredItem) -> bool:
    """Tell whether to find out where an item's payload lies before fetching it."""
    return can_be_located(item) and item.record.num_bytes > _WHOLE_RECORD_BYTES


def can_be_located(item: StoredItem) -> bool:
    """Tell whether an item is a record whose head may say where its elements lie."""
    return item.kind == "record" and not item.transforms and item.checksums is None


def locate(store: Store, item: StoredItem) -> tuple[StoredItem, list[int]]:
    """Look into a record's head, by one small request nearly always.

    Returns:
        The item, raw if it is a plain tensor, and the bytes of each request.
    """
    sizes = []

    def read_at(start: int, end: int) -> memoryview:
        sizes.append(end - start)
        return store.get_range(item.key, item.record.start + start, item.record.start + end)

    return as_raw(item, find_tensor(read_at, item.record.num_bytes)), sizes


# --- bytes into targets -----------------------------------------------------------------


def part_of_target(piece: Piece) -> torch.Tensor:
    """Return the elements of the target that a piece of a raw item brings."""
    tensor, item = piece.target.tensor, piece.target.item
    assert tensor is not None
    first = piece.target.read_item.storage_offsets
    if piece.box is None:
        flat, element_bytes = tensor.view(-1), item_bytes(item.dtype)
        count = piece.span.num_bytes // element_bytes
        if count == flat.shape[0]:
            return flat
        before = sum(o * s for o, s in zip(first, item.element_strides, strict=True))
        start = (piece.span.start - item.payload.start) // element_bytes - before
        return flat.narrow(0, start, count)
    offsets, sizes = piece.box
    return narrow(tensor, [a - b for a, b in zip(offsets, first, strict=True)], sizes)


def copy_piece(piece: Piece, data: memoryview) -> None:
    """Copy a piece into its target; queue the copy where the target is on a CUDA device.

    Args:
        piece: A part of a raw item.
        data: The bytes of its ``fetch`` range, or only those that are its own. Kept until the
            current stream of the target's device is done.
    """
    item, part = piece.target.item, part_of_target(piece)
    start = piece.fetch.start - item.payload.start
    dtype, box = dtype_from_name(item.dtype), piece.box
    is_queued = part.device.type == "cuda"
    if box is None:  # elements of the flattened chunk
        first = (piece.span.start - item.payload.start) // dtype.itemsize
        shape = part.shape
        copy_box_in(data, start, dtype, (1,), (first,), shape, part, non_blocking=is_queued)
        return
    strides = item.element_strides
    if len(data) < piece.fetch.num_bytes:  # runs of elements, without what lies between them
        run, step = (num_bytes // dtype.itemsize for num_bytes in piece.spacing)
        start, box = 0, ((0,) * len(box[1]), box[1])
        strides = tuple(one if one < step else one // step * run for one in strides)
    copy_box_in(data, start, dtype, strides, *box, part, non_blocking=is_queued)


def copy_inline(item: StoredItem, payload: bytes, target: Target) -> None:
    """Copy a target's box out of the payload of a chunk that the manifest holds."""
    assert target.tensor is not None
    offsets, sizes = target.box
    is_whole = sizes == item.sizes == tuple(target.tensor.shape) and not any(offsets)
    is_exact = is_whole and target.tensor.dtype == dtype_from_name(item.dtype)
    if not (is_exact and set_payload(target.tensor, payload)):
        copy_box(item, memoryview(payload), target)


def copy_box(item: StoredItem, payload: memoryview, target: Target) -> None:
    """Copy a target's box out of the whole payload of its chunk."""
    assert target.tensor is not None
    check_inside(item.sizes, target)
    dtype = dtype_from_name(item.dtype)
    copy_box_in(payload, 0, dtype, item.element_strides, *target.box, target.tensor)


def copy_decoded(tensor: torch.Tensor, target: Target) -> None:
    """Copy a target's box out of a chunk that was decoded as a whole."""
    assert target.tensor is not None
    offsets, sizes = target.box
    check_inside(tuple(tensor.shape), target)
    try:
        if tuple(tensor.shape) != sizes:  # sparse ones, and their like, are only read whole
            tensor = narrow(tensor, offsets, sizes)
        copy_opaque_in(tensor, target.tensor)
    except (NotImplementedError, RuntimeError) as error:
        raise IncompatibleError(
            f"{target.fqn!r}: a tensor of layout {tensor.layout} and dtype {tensor.dtype} cannot"
            f" be copied into one of layout {target.tensor.layout} and dtype"
            f" {target.tensor.dtype}: {str(error).partition(chr(10))[0]}"
        ) from error


def check_inside(chunk: tuple[int, ...], target: Target) -> None:
    """Check that a target's box lies in its chunk.

    Raises:
        CorruptError: If it does not: the metadata promise another chunk than is stored.
    """
    offsets, sizes = target.box
    fits = len(chunk) == len(sizes) and all(
        offset >= 0 and offset + size <= stored
        for offset, size, stored in zip(offsets, sizes, chunk, strict=True)
    )
    if not fits:
        raise _corrupt(
            f"{target.fqn!r}: the metadata promises elements {offsets} + {sizes} of a chunk, and"
            f" the chunk stored in {target.item.key} has shape {chunk}",
            target.item,
            target.fqn,
        )


def decode(target: Target, url: str, registry: Any) -> None:
    """Turn a whole record, just collected, into the values of its targets.

    Args:
        target: Complete.
        url: Of the checkpoint, for messages.
        registry: DCP's extension registry; None for torch's own.

    Raises:
        CorruptError: If an extension cannot be undone.
    """
    item = target.item
    content, target.content = target.content, None
    assert isinstance(content, memoryview)
    if item.transforms:
        content = memoryview(_untransform(item, content, url, registry))
    if target.tensor is None:
        target.content = bytes(content)
        return
    raw = as_raw(item, find_tensor(lambda start, end: content[start:end], len(content)))
    if raw.kind == "raw":
        start = raw.payload.start - raw.record.start
        for one in (target, *target.twins):
            copy_box(raw, content[start : start + raw.payload.num_bytes], one)
    else:
        tensor = decode_tensor(item, content, url, target.fqn)
        for one in (target, *target.twins):
            copy_decoded(tensor, one)


def decode_tensor(item: StoredItem, content: Buffer, url: str, fqn: str) -> torch.Tensor:
    """Return the tensor of a record that is more than elements.

    Raises:
        CorruptError: If the record holds none, or names what torch does not hold safe.
    """
    try:
        return decode_opaque(content)
    except CheckpointError:
        raise
    except Exception as error:
        raise _corrupt(
            f"{url}: object {item.key}, bytes [{item.record.start}, {item.record.end}): the record"
            f" of {fqn!r} is no tensor that torch opens: {error!s:.500}",
            item,
            fqn,
        ) from error


def _untransform(item: StoredItem, content: memoryview, url: str, registry: Any) -> bytes:
    stream: Any = io.BytesIO(content)
    extensions = registry or default_extension_registry()
    try:
        for extension in extensions.from_descriptor_list(item.transforms):
            stream = extension.transform_from(stream)
        return bytes(stream.read(-1))
    except Exception as error:
        raise _corrupt(
            f"{url}: object {item.key}, bytes [{item.record.start}, {item.record.end}): cannot"
            f" undo the extensions {item.transforms}: {error!r}",
            item,
        ) from error


def _corrupt(message: str, item: StoredItem, fqn: str | None = None) -> CorruptError:
    start, end = item.record
    return CorruptError(message, key=item.key, start=start, end=end, fqn=fqn)
