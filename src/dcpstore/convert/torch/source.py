"""Tensors of a ``torch.save`` file, read ahead of whoever takes them, in bounded memory.

::

    threads    GET task 0 | GET task 1 | GET task 2 ...     a task: one range of the file
    caller                  take(0)      take(1) ...        in order; each tensor is let go of
                                                            when the next one is taken

A task fetches many small tensors that lie close together, or a part of a large one.
"""

from __future__ import annotations

import mmap
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from typing_extensions import Self

from dcpstore.errors import CorruptError
from dcpstore.format.payload import bands, copy_box_in
from dcpstore.format.zip import append_crc32
from dcpstore.read.pump import Call, Pump
from dcpstore.read.torch_file import TensorPlace, TorchFile
from dcpstore.report import Meter
from dcpstore.store.base import ByteRange
from dcpstore.store.ranges import group
from dcpstore.torch_private import narrow

_LEAST_MAPPED_BYTES = 1 << 20
_JOIN_GAP_BYTES = 64 << 10  # descriptor, header and padding lie between neighbours


@dataclass(frozen=True, slots=True)
class WantedBox:
    """A box of a tensor of the file.

    Attributes:
        place: Where the tensor lies.
        offsets: First element of the box in each dimension.
        sizes: Sizes of the box.
    """

    place: TensorPlace
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def span(self) -> ByteRange:
        """Bytes of the storage from its first to its last element."""
        return self.place.span(self.offsets, self.sizes)

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.sizes) * self.place.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Task:
    """One request: parts of boxes that lie close together.

    Attributes:
        parts: Number of the box, and a part of it.
        span_bytes: Bytes of the file that it reads.
        num_complete: How many boxes are there when this and all earlier tasks are done.
    """

    parts: Sequence[tuple[int, WantedBox]]
    span_bytes: int
    num_complete: int


def bands_of(box: WantedBox, max_bytes: int) -> Iterator[WantedBox]:
    """Cut a box into parts that neither have nor span more than ``max_bytes``."""
    place = box.place
    for part in bands(
        place.strides, box.offsets, box.sizes, place.dtype.itemsize, max_bytes=max_bytes
    ):
        yield WantedBox(place, *part)


def _tasks(boxes: Sequence[WantedBox], file: TorchFile, request_bytes: int) -> Iterator[_Task]:
    """Join what lies close together in the file, in the order of the boxes."""
    parts = [
        (number, part) for number, box in enumerate(boxes) for part in bands_of(box, request_bytes)
    ]

    def span_of(numbered: tuple[int, WantedBox]) -> ByteRange:
        _, part = numbered
        member = file.storages[part.place.storage_key].member
        return ByteRange(member.header_offset + part.span.start, member.names_end + part.span.end)

    num_taken = 0
    for span, joined in group(
        parts, span_of, max_gap_bytes=_JOIN_GAP_BYTES, max_bytes=lambda: request_bytes
    ):
        num_taken += len(joined)
        num_complete = parts[num_taken][0] if num_taken < len(parts) else len(boxes)
        yield _Task(joined, span.num_bytes, num_complete)


def _allocate(box: WantedBox) -> torch.Tensor:
    """Return a tensor for a box, whose memory the system gets back when it dies.

    The C allocator would keep much of it: it hands out blocks of MiBs from heaps of its own
    once one of that size was freed, and those stay as large as they ever were.
    """
    if box.num_bytes < _LEAST_MAPPED_BYTES:
        return torch.empty(box.sizes, dtype=box.place.dtype, device="cpu")
    memory = torch.frombuffer(mmap.mmap(-1, box.num_bytes), dtype=torch.uint8)
    return memory.view(box.place.dtype).view(box.sizes)


class ReadAhead:
    """Boxes of a file, fetched before they are asked for.

    Use as a context manager, from one thread.

    Args:
        file: The file.
        boxes: In the order in which they will be taken; best that of the file.
        budget_bytes: Memory for boxes and for bytes on their way to them.
        request_bytes: Longest range asked for at once.
        max_requests: Requests in flight.
        meter: Counts the bytes delivered.
    """

    def __init__(
        self,
        file: TorchFile,
        boxes: Sequence[WantedBox],
        *,
        budget_bytes: int,
        request_bytes: int = 4 << 20,
        max_requests: int = 16,
        meter: Meter | None = None,
    ) -> None:
        self._file = file
        self._boxes = boxes
        self._meter = meter
        request_bytes = min(request_bytes, max(1, budget_bytes // 4))
        num_requests = max(1, min(max_requests, budget_bytes // 2 // request_bytes))
        self._pump = Pump(num_requests, "dcpstore-read-torch")
        calls = map(self._call, _tasks(boxes, file, request_bytes))
        # A box counts from its last task on; one at a time has begun and not ended.
        largest_bytes = max((box.num_bytes for box in boxes), default=0)
        self._done = self._pump.in_order(calls, max(0, budget_bytes // 2 - largest_bytes))
        self._num_planned = 0
        self._num_complete = 0
        self._tensors: dict[int, torch.Tensor] = {}
        self._crcs: dict[str, dict[ByteRange, int]] = defaultdict(dict)
        self.fetched_bytes = 0
        """Bytes asked for so far."""
        self.peak_bytes = 0
        """Most bytes of boxes held at a time, the one taken last included."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._pump.__exit__(kind, error, trace)

    def take(self, number: int) -> torch.Tensor:
        """Return a box as a contiguous CPU tensor of its own; it is the caller's.

        Args:
            number: Of the box; never less than the one taken before.

        Raises:
            CorruptError: If the file is damaged.
            ConflictError: If it was replaced.
            StoreError: If the store refuses.
        """
        for earlier in [one for one in self._tensors if one < number]:
            del self._tensors[earlier]
        try:
            while number >= self._num_complete:
                self._num_complete = next(self._done, len(self._boxes))
        except CorruptError:
            self._file.check_unchanged()  # it may be another file by now, and that one whole
            raise
        return self._tensor(number)

    def check_crcs(self) -> None:
        """Compare the checksums of storages that were read whole with the file's.

        Raises:
            CorruptError: If a storage is not what was saved.
        """
        for key, parts in self._crcs.items():
            crc32 = position = 0
            longest = {span.start: span for span in sorted(parts)}
            while (span := longest.pop(position, None)) is not None:
                crc32, position = append_crc32(crc32, parts[span], span.num_bytes), span.end
            if position == self._file.storages[key].num_bytes:
                self._file.check_crc(key, crc32)

    # --- tasks -----------------------------------------------------------------------------

    def _call(self, task: _Task) -> Call[int]:
        for number in {number for number, _ in task.parts}:
            self._tensor(number)
        held_bytes = sum(self._boxes[number].num_bytes for number in self._tensors)
        self.peak_bytes = max(self.peak_bytes, held_bytes)
        self.fetched_bytes += task.span_bytes
        ended = range(self._num_planned, task.num_complete)
        self._num_planned = task.num_complete
        return sum(self._boxes[number].num_bytes for number in ended), partial(self._run, task)

    def _tensor(self, number: int) -> torch.Tensor:
        if number not in self._tensors:
            self._tensors[number] = _allocate(self._boxes[number])
        return self._tensors[number]

    def _run(self, task: _Task) -> int:
        ranges = [(part.place.storage_key, *part.span) for _, part in task.parts]
        for (number, part), data in zip(task.parts, self._file.read_ranges(ranges), strict=True):
            self._note_crc(part, data)
            self._deliver(number, part, data)
        return task.num_complete

    def _note_crc(self, part: WantedBox, data: memoryview) -> None:
        key = part.place.storage_key
        if self._file.has_crc(key):
            self._crcs[key][part.span] = zlib.crc32(data)

    def _deliver(self, number: int, part: WantedBox, data: memoryview) -> None:
        box, place = self._boxes[number], part.place
        inner = [offset - base for offset, base in zip(part.offsets, box.offsets, strict=True)]
        target = narrow(self._tensors[number], inner, part.sizes)
        start = part.span.start - place.storage_offset * place.dtype.itemsize
        copy_box_in(data, start, place.dtype, place.strides, part.offsets, part.sizes, target)
        if place.is_conj:
            target.imag.neg_()
        if place.is_neg:
            target.neg_()
        if self._meter is not None:
            self._meter.advance(part.num_bytes)
