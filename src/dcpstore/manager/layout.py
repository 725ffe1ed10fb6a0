"""Where the tensors of a state go in the memory of a `Stager`, and how they get there.

What tensors occupy of their storages is joined to *spans*. Each span is copied once, as bytes,
whatever views of it there are::

    storage A     |##### weight #####|......|## bias ##|     and a tied weight, the same bytes
    storage B     |#### a view ####|
                     |#### another ####|
    buffer        |# weight #|# bias #|# both views of B #|

Memory that nobody has written to costs several times as much to copy to, since the system has to
find and clear it. So a buffer stays, as large as the largest state so far. So does the layout, as
long as the state has the same tensors in the same places: to lay 20,000 tensors out takes as long
as to copy 1 GiB.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from dcpstore.errors import IncompatibleError
from dcpstore.format.payload import PLAIN_TYPES, copy_bytes_out
from dcpstore.store.budget import Bytes
from dcpstore.torch_private import set_lazy_bits, storage_identity

_JOB_BYTES = 8 << 20  # what a thread copies at a time
_ALIGNMENT = 64
_ITEM = 16  # a multiple of every element's size
_WASTE = 2  # views that span more than this times their elements are gathered

Job: TypeAlias = Callable[[], None]
"""One thread's share of a copy."""

Sign: TypeAlias = tuple[Any, ...]
"""What tells a plain tensor from others: where it lies, and what `make_view` wants to know."""

Found: TypeAlias = "Mapping[Sign, tuple[torch.Tensor, str]]"
"""The plain tensors of a state, and a name of each."""


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's storage holds all its elements."""
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.layout == torch.strided
        and not tensor.is_meta
        and not tensor.is_nested
        and not tensor.is_quantized
    )


def sign_of(tensor: torch.Tensor) -> Sign:
    """Return the sign of a plain tensor that has elements."""
    return (
        tensor.data_ptr(),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.requires_grad,
        type(tensor),
        None if tensor.is_cpu else tensor.device,
    )


def _make_view(sign: Sign, target: torch.Tensor, offset_bytes: int | None) -> torch.Tensor:
    """Make the copy of a tensor: a view of the bytes copied; of all, row by row, if gathered."""
    _, dtype, shape, stride, is_conj, is_neg, requires_grad, kind, _ = sign
    made = torch.empty(0, dtype=dtype, device="cpu")
    if offset_bytes is None:
        made.set_(target.untyped_storage(), 0, shape)  # type: ignore[call-overload]
    else:
        made.set_(target.untyped_storage(), offset_bytes // dtype.itemsize, shape, stride)
        made = set_lazy_bits(made, conj=is_conj, neg=is_neg)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(made, requires_grad)
    return made.requires_grad_(requires_grad)


class Buffer:
    """Memory that grows to the largest state, and stays.

    Args:
        pin: Allocate it page-locked.
    """

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._memory = np.empty(0, np.uint8)

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self._memory.size

    def cut(self, sizes_bytes: Sequence[int]) -> Iterator[Bytes]:
        """Return pieces of these sizes; of each, torch makes a storage of its own."""
        starts, end = [], 0
        for size in sizes_bytes:
            starts.append(end)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        if end > self.num_bytes:
            self._memory = np.empty(0, np.uint8)  # so that there are never two
            self._memory = self._make(end)
        memory = self._memory
        return (memory[at : at + size] for at, size in zip(starts, sizes_bytes, strict=True))

    def _make(self, num_bytes: int) -> Bytes:
        if self._pin:
            memory: Bytes = torch.empty(
                num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True
            ).numpy()
            return memory
        # Numpy asks the system for large pages, which torch does not.
        whole = np.empty(num_bytes + _ALIGNMENT, np.uint8)
        first = -whole.ctypes.data % _ALIGNMENT
        return whole[first : first + num_bytes]


@dataclass(frozen=True, slots=True)
class _Seen:
    """Which bytes of its storage a tensor spans, from ``start`` to ``end`` (exclusive)."""

    sign: Sign
    start: int
    end: int
    num_bytes: int


@dataclass(slots=True)
class _Span:
    """Bytes of one storage that are copied once.

    Attributes:
        start: First byte in the storage; a multiple of every element's size.
        end: End (exclusive).
        seen: The tensors that lie there.
        is_gathered: Whether only the elements are copied, and not what lies between them: its
            tensors are all the same view.
    """

    start: int
    end: int
    seen: list[_Seen] = field(default_factory=list)
    is_gathered: bool = False

    @property
    def num_bytes(self) -> int:
        return self.seen[0].num_bytes if self.is_gathered else self.end - self.start

    @property
    def device(self) -> torch.device | None:
        device: torch.device | None = self.seen[0].sign[-1]
        return device

    def views(self, target: torch.Tensor) -> Iterator[tuple[Sign, torch.Tensor]]:
        """Yield the copies of its tensors."""
        for one in self.seen:
            at = None if self.is_gathered else one.start - self.start
            yield one.sign, _make_view(one.sign, target, at)

    def copy(self, found: Found, target: torch.Tensor, *, non_blocking: bool = False) -> None:
        """Copy its bytes by torch."""
        tensor, _ = found[self.seen[0].sign]
        if not self.is_gathered:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            size = (self.num_bytes,)
            tensor = flat.set_(tensor.untyped_storage(), self.start, size)  # type: ignore[call-overload]
        copy_bytes_out(tensor, 0, len(target), target, non_blocking=non_blocking)

    def gathered(self) -> Iterator[_Span]:
        """Yield itself, or a span per view where most of it belongs to none."""
        if self.end - self.start <= _WASTE * sum(one.num_bytes for one in self.seen) + _ITEM:
            yield self
            return
        views: dict[Sign, list[_Seen]] = {}
        for one in self.seen:
            views.setdefault(one.sign[:6], []).append(one)
        for same in views.values():
            yield _Span(same[0].start, same[0].end, same, is_gathered=True)


class Layout:
    """A place for each tensor, and how it is copied there.

    Args:
        found: The tensors; the layout keeps none of them.
        host: Memory for what does not come from a CUDA device.
        pinned: Memory for what does.

    Raises:
        IncompatibleError: If the memory of a tensor was freed.
    """

    def __init__(self, found: Found, host: Buffer, pinned: Buffer) -> None:
        spans = list(_spans_of(found))
        self.places: dict[Sign, torch.Tensor] = {}
        """The copy of each tensor."""
        self._portions: list[list[tuple[int, int, int]]] = []
        self._by_torch: list[tuple[_Span, torch.Tensor]] = []
        self._on_cuda = self._put([one for one in spans if _is_cuda(one)], pinned)
        copies: list[tuple[int, int, int]] = []
        for span, target in self._put([one for one in spans if not _is_cuda(one)], host):
            if span.is_gathered or span.device is not None:
                self._by_torch.append((span, target))
            else:
                address = span.seen[0].sign[0] - span.seen[0].start + span.start
                copies.append((target.data_ptr(), address, span.num_bytes))
        self._portions = list(_in_portions(copies))

    def _put(self, spans: Sequence[_Span], buffer: Buffer) -> list[tuple[_Span, torch.Tensor]]:
        pieces = buffer.cut([span.num_bytes for span in spans])
        put = [(span, torch.from_numpy(piece)) for span, piece in zip(spans, pieces, strict=True)]
        for span, target in put:
            self.places.update(span.views(target))
        return put

    def begin(self, found: Found) -> tuple[list[Job], list[torch.cuda.Event]]:
        """Queue the copies that devices do; return the others, and the ends of the former.

        Args:
            found: The same tensors again: of the same signs.
        """
        jobs: list[Job] = [partial(_copy_all, portion) for portion in self._portions]
        jobs.extend(partial(span.copy, found, target) for span, target in self._by_torch)
        return jobs, _queue_on_devices(self._on_cuda, found)


def _is_cuda(span: _Span) -> bool:
    return span.device is not None and span.device.type == "cuda"


def _spans_of(found: Found) -> Iterator[_Span]:
    by_storage: dict[tuple[torch.device, int], list[_Seen]] = {}
    for sign, (tensor, name) in found.items():
        item = tensor.element_size()
        start = int(tensor.storage_offset()) * item
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        end = start + (1 + sum(int(size - 1) * int(stride) for size, stride in steps)) * item
        if end > tensor.untyped_storage().nbytes():
            raise IncompatibleError(
                f"the memory of {name!r} was freed: its storage is smaller than the tensor. With"
                " FSDP, save the sharded state dict, not parameters outside forward"
            )
        where = (tensor.device, storage_identity(tensor))
        seen = _Seen(sign, start, end, tensor.numel() * item)
        by_storage.setdefault(where, []).append(seen)
    for some in by_storage.values():
        joined: list[_Span] = []
        for one in sorted(some, key=lambda one: one.start):
            if not joined or one.start > joined[-1].end:
                joined.append(_Span(one.start // _ITEM * _ITEM, one.end))
            joined[-1].end = max(joined[-1].end, one.end)
            joined[-1].seen.append(one)
        for span in joined:
            yield from span.gathered()


def _in_portions(
    copies: Iterable[tuple[int, int, int]],
) -> Iterator[list[tuple[int, int, int]]]:
    """Cut copies (to, from, bytes) and pack them, so that all threads have the same to do."""
    portion: list[tuple[int, int, int]] = []
    room_bytes = _JOB_BYTES
    for to, source, num_bytes in copies:
        at = 0
        while at < num_bytes:
            count = min(room_bytes, num_bytes - at)
            portion.append((to + at, source + at, count))
            at, room_bytes = at + count, room_bytes - count
            if not room_bytes:
                yield portion
                portion, room_bytes = [], _JOB_BYTES
    if portion:
        yield portion


def _copy_all(copies: Sequence[tuple[int, int, int]]) -> None:
    for to, source, num_bytes in copies:
        ctypes.memmove(to, source, num_bytes)  # lets other threads run meanwhile


def _queue_on_devices(
    spans: Sequence[tuple[_Span, torch.Tensor]], found: Found
) -> list[torch.cuda.Event]:
    """Copy from CUDA devices on streams beside the current ones. Never run on a device so far."""
    streams: dict[torch.device, torch.cuda.Stream] = {}
    for span, target in spans:
        device = found[span.seen[0].sign][0].device
        if device not in streams:
            streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            streams[device].wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(streams[device]):
            span.copy(found, target, non_blocking=True)
    events = []
    for device, stream in streams.items():
        events.append(stream.record_event())
        torch.cuda.current_stream(device).wait_stream(stream)
    return events
