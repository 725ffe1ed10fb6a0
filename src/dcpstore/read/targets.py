"""Where loaded bytes go: resolved and checked before the first data request.

Wants in progress: from fetched bytes to the elements of a target.

Requests whose bytes are received straight into the memory of their targets.

That takes targets in host memory, of the dtype that is stored, where what the request brings
lies in one piece. What nobody wants goes to scratch memory: record headers between two items,
and the rest of a checksum block that is wanted in part::

    request        [rest][ item a      ][hdr][ item b                ]
    memory         [    ][ target of a ][   ][ target of b           ]

Such requests take little memory, so several that follow each other are made one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from dcpstore.errors import CorruptError, IncompatibleError
from dcpstore.format.boxes import num_elements
from dcpstore.format.copying import copy_box_in, note_written, set_payload, writable_payload
from dcpstore.format.dtypes import dtype_from_name, dtype_name, item_bytes
from dcpstore.format.manifest import StoredItem
from dcpstore.format.record import HeadAnswer, NeedMoreBytes
from dcpstore.format.tensors import copy_opaque_in, is_freed, is_plain
from dcpstore.plan.coverage import refuse_lacks
from dcpstore.read.plan import Piece, Request, Want
from dcpstore.store.base import Destination
from dcpstore.store.ranges import ByteRange, row_major_strides

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


@dataclass(slots=True, eq=False)
class Slot:
    """One target, or all targets that need the same whole record.

    Attributes:
        item: What is stored.
        targets: Who wants it.
        missing: Pieces still to come. Changed by one thread at a time, under the lock.
        loaded: The bytes of a value, ready for the planner.
    """

    item: StoredItem
    targets: list[Target]
    missing: int = 0
    loaded: bytes | None = None
    _content: memoryview | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def want(self, number: int) -> Want:
        """Return what to plan for.

        Raises:
            CorruptError: If the box to read is not inside the stored chunk.
        """
        item = self.item
        if item.kind != "raw":
            return Want(number, item)
        (target,) = self.targets
        assert target.tensor is not None
        offsets = tuple(target.read_item.storage_offsets)
        sizes = tuple(target.read_item.lengths)
        _check_inside(item, offsets, sizes, target.fqn)
        return Want(
            number, item, offsets, sizes, item_bytes(item.dtype), target.tensor.is_contiguous()
        )

    def is_complete_after_one_more(self) -> bool:
        """Count one piece as there. True for whoever brings the last one."""
        with self._lock:
            self.missing -= 1
            return self.missing == 0

    def collect(self, piece: Piece, data: memoryview) -> None:
        """Take a part of the whole record; without a copy if it is all of it."""
        if piece.span == self.item.record:
            self._content = data
            return
        with self._lock:
            if self._content is None:
                self._content = memoryview(bytearray(self.item.record.num_bytes))
        start = piece.span.start - self.item.record.start
        self._content[start : start + len(data)] = data

    def take_content(self) -> memoryview:
        """Return the collected record and let go of it."""
        content, self._content = self._content, None
        assert content is not None
        return content


def make_slots(targets: Sequence[Target]) -> list[Slot]:
    """Return a slot per target, but one for all that need the same whole record."""
    slots: list[Slot] = []
    whole: dict[tuple[str, ByteRange], Slot] = {}
    for target in targets:
        place = (target.item.key, target.item.record)
        is_tensor_record = target.item.kind == "record"
        if is_tensor_record and place in whole:
            whole[place].targets.append(target)
            continue
        slot = Slot(target.item, [target])
        slots.append(slot)
        if is_tensor_record:
            whole[place] = slot
    return slots


def as_raw(item: StoredItem, head: HeadAnswer) -> StoredItem:
    """Return a record as a raw item if its head says that it is a dense tensor; else as it is."""
    if isinstance(head, NeedMoreBytes) or head.tensor is None or not head.is_plain:
        return item
    tensor = head.tensor
    start = item.record.start + tensor.payload_offset
    return replace(
        item,
        kind="raw",
        payload=ByteRange(start, start + tensor.payload_bytes),
        dtype=dtype_name(tensor.dtype),
        sizes=tensor.shape,
    )


def needed_bytes(piece: Piece, item: StoredItem) -> int:
    """Return how many of a piece's bytes were asked for, holes and whole blocks left out."""
    if piece.box is None:
        return piece.span.num_bytes
    return num_elements(piece.box.sizes) * item_bytes(item.dtype)


def window(data: memoryview, request: Request, wanted: ByteRange) -> memoryview:
    """Return the bytes of an object's range out of a request's answer."""
    start = wanted.start - request.range.start
    return data[start : start + wanted.num_bytes]


def part_of_target(piece: Piece, slot: Slot) -> torch.Tensor:
    """Return the elements of the target that a piece of a raw item brings."""
    (target,) = slot.targets
    box, item = piece.box, slot.item
    assert box is not None
    assert target.tensor is not None
    offsets = target.read_item.storage_offsets
    if piece.is_flat:
        strides = row_major_strides(item.sizes)
        first = sum(o * s for o, s in zip(offsets, strides, strict=True))
        return target.tensor.view(-1).narrow(0, box.offsets[0] - first, box.sizes[0])
    part = target.tensor
    for dim, (start, offset, size) in enumerate(zip(box.offsets, offsets, box.sizes, strict=True)):
        part = part.narrow(dim, start - offset, size)
    return part


def copy_piece(piece: Piece, data: memoryview, slot: Slot) -> None:
    """Copy a piece into its target.

    Args:
        piece: A part of a raw item.
        data: The bytes of its ``fetch`` range, or only those that are its own.
        slot: Its target.
    """
    box, item = piece.box, slot.item
    assert box is not None
    if len(data) < piece.fetch.num_bytes:
        strides, nowhere = row_major_strides(box.sizes), (0,) * len(box.sizes)
        part = part_of_target(piece, slot)
        copy_box_in(data, 0, dtype_from_name(item.dtype), strides, nowhere, box.sizes, part)
        return
    copy_box_in(
        data,
        piece.fetch.start - item.payload.start,
        dtype_from_name(item.dtype),
        (1,) if piece.is_flat else row_major_strides(item.sizes),
        box.offsets,
        box.sizes,
        part_of_target(piece, slot),
    )


def copy_inline(item: StoredItem, payload: bytes, target: Target) -> None:
    """Copy a target's box out of the payload of a chunk that the manifest holds."""
    assert target.tensor is not None
    is_whole = tuple(target.read_item.lengths) == item.sizes == tuple(target.tensor.shape)
    is_exact = is_whole and target.tensor.dtype == dtype_from_name(item.dtype)
    is_first = not any(target.read_item.storage_offsets)
    if not (is_exact and is_first and set_payload(target.tensor, payload)):
        copy_box(item, memoryview(payload), target)


def copy_box(item: StoredItem, payload: memoryview, target: Target) -> None:
    """Copy a target's box out of the whole payload of its chunk."""
    assert target.tensor is not None
    offsets = tuple(target.read_item.storage_offsets)
    sizes = tuple(target.read_item.lengths)
    _check_inside(item, offsets, sizes, target.fqn)
    dtype = dtype_from_name(item.dtype)
    copy_box_in(payload, 0, dtype, row_major_strides(item.sizes), offsets, sizes, target.tensor)


def copy_decoded(tensor: torch.Tensor, target: Target) -> None:
    """Copy a target's box out of a chunk that was decoded as a whole."""
    assert target.tensor is not None
    offsets = tuple(target.read_item.storage_offsets)
    sizes = tuple(target.read_item.lengths)
    _check_box(tuple(tensor.shape), target.item, offsets, sizes, target.fqn)
    try:
        if tuple(tensor.shape) != sizes:  # sparse ones, and their like, are only read whole
            for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                tensor = tensor.narrow(dim, offset, size)
        copy_opaque_in(tensor, target.tensor)
    except (NotImplementedError, RuntimeError) as error:
        raise IncompatibleError(
            f"{target.fqn!r}: a tensor of layout {tensor.layout} and dtype {tensor.dtype} cannot"
            f" be copied into one of layout {target.tensor.layout} and dtype"
            f" {target.tensor.dtype}: {str(error).partition(chr(10))[0]}"
        ) from error


def _check_inside(
    item: StoredItem, offsets: tuple[int, ...], sizes: tuple[int, ...], fqn: str
) -> None:
    _check_box(item.sizes, item, offsets, sizes, fqn)


def _check_box(
    chunk: tuple[int, ...],
    item: StoredItem,
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    fqn: str,
) -> None:
    fits = len(chunk) == len(sizes) and all(
        offset >= 0 and offset + size <= stored
        for offset, size, stored in zip(offsets, sizes, chunk, strict=True)
    )
    if not fits:
        raise CorruptError(
            f"{fqn!r}: the metadata promises elements {offsets} + {sizes} of a chunk, and the"
            f" chunk stored in {item.key} has shape {chunk}",
            key=item.key,
            start=item.record.start,
            end=item.record.end,
            fqn=fqn,
        )


# The answer takes 0.16 s of a 100 MB/s connection, beside which a delay of 0.03 s counts little.
MOST_LANDING_BYTES = 16 << 20
"""Longest request that is received straight into its targets."""

_LEAST_PIECE_BYTES = 1 << 16  # on average; smaller ones cost less to copy
_MOST_GAP_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one piece goes.

    Attributes:
        part: Its elements of the target.
        memory: Theirs, and around it what takes the rest of the outermost checksum blocks.
    """

    part: torch.Tensor
    memory: tuple[memoryview, ...]


@dataclass(frozen=True, slots=True)
class Landing:
    """A request, and where its bytes go.

    Attributes:
        request: What to fetch.
        memory: For all of the request's bytes.
        places: Per piece of the request.
    """

    request: Request
    memory: tuple[memoryview, ...]
    places: tuple[_Place, ...]

    @property
    def scratch_bytes(self) -> int:
        """Memory that is not the targets' own."""
        return self.request.range.num_bytes - sum(p.span.num_bytes for p in self.request.pieces)

    def open(self) -> Destination:
        """Return what one fetch takes; it may be revoked."""
        return Destination(self.memory)

    @property
    def contents(self) -> Iterator[tuple[memoryview, ...]]:
        """The bytes of each piece."""
        return (place.memory for place in self.places)

    def note_written(self) -> None:
        """Tell autograd that the targets changed."""
        for place in self.places:
            note_written(place.part)


def plan_landings(
    requests: Sequence[Request],
    slots: Sequence[Slot],
    *,
    num_in_flight: Callable[[], int],
    least_bytes: int,
) -> Iterator[Request | Landing]:
    """Find the requests that can land, and join them. Keeps the order.

    Each is joined up to one connection's share of what is left, so that requests become
    shorter towards the end, and all connections end at about the same time.

    Args:
        requests: By object and offset.
        slots: The targets, by number.
        num_in_flight: How many the store is asked for at a time, as far as is known now.
        least_bytes: Do not join to less.
    """
    left_bytes = sum(request.range.num_bytes for request in requests)
    most_bytes = 0
    joined: list[tuple[Request, tuple[_Place, ...]]] = []
    for request in requests:
        places = _find_places(request, slots)
        if joined and not (places and _may_follow(joined, request, most_bytes)):
            yield _landing(joined)
            joined = []
        if not joined:
            share = left_bytes // num_in_flight()
            most_bytes = min(max(share, least_bytes), MOST_LANDING_BYTES)
        if places:
            joined.append((request, places))
        else:
            yield request
        left_bytes -= request.range.num_bytes
    if joined:
        yield _landing(joined)


def _may_follow(
    joined: Sequence[tuple[Request, tuple[_Place, ...]]], request: Request, most_bytes: int
) -> bool:
    first, last = joined[0][0], joined[-1][0]
    return (
        request.key == first.key
        and request.range.end - first.range.start <= most_bytes
        and 0 <= request.range.start - last.range.end <= _MOST_GAP_BYTES
    )


def _landing(joined: Sequence[tuple[Request, tuple[_Place, ...]]]) -> Landing:
    requests = [request for request, _ in joined]
    whole = ByteRange(requests[0].range.start, requests[-1].range.end)
    pieces = tuple(piece for request in requests for piece in request.pieces)
    places = tuple(place for _, found in joined for place in found)
    memory = []
    at = whole.start
    for piece, place in zip(pieces, places, strict=True):
        if piece.fetch.start > at:
            memory.append(_scratch(piece.fetch.start - at))
        memory.extend(place.memory)
        at = piece.fetch.end
    return Landing(Request(requests[0].key, whole, pieces), tuple(memory), places)


def _find_places(request: Request, slots: Sequence[Slot]) -> tuple[_Place, ...]:
    """Return the memory of all pieces; nothing if some need more than to be received."""
    if request.range.num_bytes < _LEAST_PIECE_BYTES * len(request.pieces):
        return ()
    places = []
    at = request.range.start
    for piece in request.pieces:
        place = _find_place(piece, slots[piece.slot])
        if place is None or not 0 <= piece.fetch.start - at <= _MOST_GAP_BYTES:
            return ()
        places.append(place)
        at = piece.fetch.end
    return tuple(places)


def _find_place(piece: Piece, slot: Slot) -> _Place | None:
    if piece.box is None:
        return None
    part = part_of_target(piece, slot)
    if part.dtype != dtype_from_name(slot.item.dtype):
        return None
    array = writable_payload(part)
    if array is None or array.nbytes != piece.span.num_bytes:
        return None
    before = piece.span.start - piece.fetch.start
    after = piece.fetch.end - piece.span.end
    return _Place(part, (_scratch(before), array.data, _scratch(after)))


def _scratch(num_bytes: int) -> memoryview:
    return memoryview(bytearray(num_bytes))
