"""Wants in progress: from fetched bytes to the elements of a target."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from dcpstore.errors import CorruptError, IncompatibleError
from dcpstore.format.copying import copy_box_in, set_payload
from dcpstore.format.dtypes import dtype_from_name, dtype_name, item_bytes
from dcpstore.format.head import HeadAnswer, NeedMoreBytes
from dcpstore.format.tensors import copy_opaque_in
from dcpstore.manifest import StoredItem
from dcpstore.planning.boxes import num_elements
from dcpstore.planning.reads import Piece, Request, Want
from dcpstore.ranges import ByteRange, row_major_strides
from dcpstore.targets import Target

__all__ = [
    "Slot",
    "as_raw",
    "copy_box",
    "copy_decoded",
    "copy_inline",
    "copy_piece",
    "make_slots",
    "needed_bytes",
    "part_of_target",
    "window",
]


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
    """Copy a piece, given the bytes of its ``fetch`` range, into its target."""
    box, item = piece.box, slot.item
    assert box is not None
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
