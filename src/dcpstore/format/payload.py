"""The payload of a plain tensor: its elements in row-major order, as bytes.

A chunk of a tensor is stored as its payload. A box of it (``offsets``, ``sizes``) is a set of
runs of consecutive bytes; `bands` cuts the box into sub-boxes whose runs lie close together,
each small enough for one request::

    chunk 4 x 8, box [1:4, 2:5]        bytes of the chunk, row by row
    . . . . . . . .                    ................
    . . # # # . . .                    ..###.....###.....###...
    . . # # # . . .                      |-- span of the box --|
    . . # # # . . .

Copies touch each byte once and make no large temporary. Out of a tensor, any run of its payload
is copied without making the tensor contiguous first, as bands over the outer dimensions::

    shape (4, 6), elements [4, 19)      row 0  ....####   a part of a row
                                        row 1  ########   whole rows: one copy_
                                        row 2  ########
                                        row 3  #.......   a part of a row

Into a tensor, the box of a chunk is a strided view of the fetched bytes, so one
``copy_`` lays it down, whatever the strides, device or dtype of the target. All heavy
work happens inside numpy and ``copy_``, which release the GIL. Functions are thread-safe for
disjoint targets.
"""

from __future__ import annotations

import ctypes
import math
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.graph import increment_version

from dcpstore.format.dtypes import is_plain_dtype, is_row_major
from dcpstore.store.base import ByteRange
from dcpstore.store.budget import Bytes, Cancelled
from dcpstore.torch_private import wait_async_collective

if TYPE_CHECKING:
    from typing_extensions import Buffer


_SCRATCH_BYTES = 1 << 20

# `nn.Buffer` is a marked `torch.Tensor`, so it needs no entry.
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether dtype, shape and row-major payload bytes say all that there is to save.

    True for strided tensors and parameters on any device that holds data, with any
    strides, conjugate and negative bits included. False for quantized, sparse, nested and
    meta tensors, for subclasses, and for dtypes without a record; `dcpstore.format.tensors`
    saves those. Call `to_plain` first: an unfinished collective is not plain.
    """
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
        and not tensor.is_nested
        and is_plain_dtype(tensor.dtype)
    )


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor's storage was resized to nothing, as FSDP frees parameters."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def to_plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's data: waited for, detached, unwrapped from its parameter.

    Shares memory with ``tensor``. Waits for a pending functional collective, as the bytes
    of its result do not exist before.
    """
    return wait_async_collective(tensor).detach()


# --- boxes of a chunk ---------------------------------------------------------------

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""First element of a box in each dimension of its chunk, and its sizes."""


def is_one_run(chunk_sizes: Sequence[int], box_sizes: Sequence[int]) -> bool:
    """Tell whether a box is one run of consecutive elements of its chunk."""
    ragged = False  # seen, from the inside out, a dimension that the box does not fill
    for chunk_size, box_size in zip(reversed(chunk_sizes), reversed(box_sizes), strict=True):
        if ragged and box_size > 1:
            return False
        ragged = ragged or box_size != chunk_size
    return True


def span_of(
    strides: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], item_bytes: int
) -> ByteRange:
    """Return the bytes from the first to the last element of a non-empty box."""
    first = sum(o * s for o, s in zip(offsets, strides, strict=True))
    last = first + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    return ByteRange(first * item_bytes, (last + 1) * item_bytes)


def spacing(
    strides: Sequence[int], sizes: Sequence[int], item_bytes: int
) -> tuple[int, int] | None:
    """Return how many bytes of a box's span are its own every how many; the same if all are.

    Args:
        strides: Of the chunk, in elements; they need not be row-major.
        sizes: Elements of the box in each dimension.
        item_bytes: Bytes per element.

    Returns:
        None if its runs do not all lie equally far apart, or overlap.
    """
    levels = [(1, 1)]  # from the inside out: so many, so far apart, in elements
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        count, step = levels[-1]
        if size > 1 and stride == count * step:
            levels[-1] = (count * size, step)
        elif size > 1:
            levels.append((size, stride))
    run = levels[0][0]
    step = levels[1][1] if len(levels) == 2 else run
    if len(levels) > 2 or step < run:
        return None
    return run * item_bytes, step * item_bytes


def bands(
    strides: Sequence[int],
    offsets: Sequence[int],
    sizes: Sequence[int],
    item_bytes: int,
    *,
    max_bytes: int,
    max_gap_bytes: int = sys.maxsize,
) -> Iterator[Box]:
    """Cut a box into sub-boxes that neither have nor span more than ``max_bytes``.

    They are cut along the dimension of the longest step, so that few bytes span each. Holes of
    more than ``max_gap_bytes`` between two elements are never spanned. A single element larger
    than ``max_bytes`` is its own sub-box. An empty box yields nothing.

    Args:
        strides: Of the chunk, in elements; they need not be row-major.
        offsets: First element of the box in each dimension.
        sizes: Elements of the box in each dimension.
        item_bytes: Bytes per element.
        max_bytes: No sub-box has or spans more.
        max_gap_bytes: Widest hole to span.
    """
    if 0 in sizes:
        return
    offsets, sizes = tuple(offsets), tuple(sizes)
    axes = [axis for axis, size in enumerate(sizes) if size > 1]
    axis = max(axes, key=lambda one: (strides[one], sizes[one]), default=None)
    if axis is None:
        yield offsets, sizes
        return
    row = _replace(sizes, axis, 1)
    rows_per_band = 0  # every row on its own, cut further within
    if not _has_wider_gap(strides, sizes, item_bytes, max_gap_bytes):
        rows_per_band = _rows_that_fit(
            span_of(strides, offsets, row, item_bytes).num_bytes,
            num_elements(row) * item_bytes,
            strides[axis] * item_bytes,
            max_bytes,
        )
    if rows_per_band >= sizes[axis]:
        yield offsets, sizes
        return
    count = max(rows_per_band, 1)
    for first in range(0, sizes[axis], count):
        part = _replace(sizes, axis, min(count, sizes[axis] - first))
        at = _replace(offsets, axis, offsets[axis] + first)
        if rows_per_band:
            yield at, part
        else:
            yield from bands(
                strides, at, part, item_bytes, max_bytes=max_bytes, max_gap_bytes=max_gap_bytes
            )


def _rows_that_fit(spanned_bytes: int, row_bytes: int, step_bytes: int, max_bytes: int) -> int:
    """Return how many rows neither span nor have more than ``max_bytes``; 0 if not even one."""
    if max(spanned_bytes, row_bytes) > max_bytes:
        return 0
    fitting = max_bytes // row_bytes
    if step_bytes:
        # As many for a narrow box as for a wide one: other ranks may have the columns beside it.
        fitting = min(fitting, max(max_bytes // max(step_bytes, spanned_bytes), 1))
    return fitting


def _has_wider_gap(
    strides: Sequence[int], sizes: Sequence[int], item_bytes: int, max_gap_bytes: int
) -> bool:
    """Tell whether a hole between two elements of a box is wider than allowed."""
    inner_elements = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1 and (stride - inner_elements) * item_bytes > max_gap_bytes:
            return True
        inner_elements += (size - 1) * stride
    return False


def _replace(values: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return (*values[:axis], value, *values[axis + 1 :])


def num_elements(sizes: Sequence[int]) -> int:
    """Return the number of elements of a box; 1 for a 0-d one."""
    return math.prod(sizes)


# --- a tensor's own memory ---------------------------------------------------------


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's payload as a flat uint8 tensor that shares its memory.

    Raises:
        ValueError: If the tensor's memory is not its payload: not contiguous, or with a
            conjugate or negative bit.
    """
    if not _is_payload(tensor):
        raise ValueError("only a contiguous tensor without lazy bits is its own payload")
    # By way of each element's bytes: a typed view minds the strides of dimensions of size 0 and 1.
    return _each_byte(tensor.detach()).view(-1)


@dataclass(frozen=True, slots=True)
class _Memory:
    """Memory for numpy, and its owner, whom numpy keeps alive."""

    owner: object
    __array_interface__: dict[str, object]


def host_payload(tensor: torch.Tensor) -> npt.NDArray[np.uint8] | None:
    """Return a host tensor's own memory, read-only, if it is its payload; else None.

    The array keeps the tensor alive, and leaves its storage resizable.

    Raises:
        ValueError: If the tensor's storage was resized to less than the tensor.
    """
    array = writable_payload(tensor)
    if array is not None:
        array.flags.writeable = False
    return array


def writable_payload(tensor: torch.Tensor) -> npt.NDArray[np.uint8] | None:
    """Return a host tensor's own memory to be overwritten, if it is its payload; else None.

    Who writes there tells autograd by `note_written`.
    """
    tensor = tensor.detach()
    if tensor.device.type != "cpu" or not _is_payload(tensor):
        return None
    return _array_over(as_bytes(tensor))


def note_written(tensor: torch.Tensor) -> None:
    """Tell autograd's check of saved tensors that a tensor changed, as ``copy_`` does."""
    if not tensor.is_inference():
        increment_version(tensor)


def _array_over(flat: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return the memory of a flat uint8 host tensor.

    ``Tensor.numpy`` forbids to resize the storage ever after; FSDP frees memory that way.
    """
    if flat.numel() + flat.storage_offset() > flat.untyped_storage().nbytes():
        raise ValueError("the tensor's memory was freed: its storage is smaller than the tensor")
    place = {"data": (flat.data_ptr(), False), "shape": (flat.numel(),), "typestr": "|u1"}
    return np.asarray(_Memory(flat, {**place, "version": 3}))


def _is_payload(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _may_write(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Allow in-place writes to a tensor that was made in inference mode.

    The mode belongs to a thread: where the caller of a save or load is in it, the threads
    that do the copies are not.
    """
    return torch.inference_mode() if tensor.is_inference() else nullcontext()


def _each_byte(tensor: torch.Tensor) -> torch.Tensor:
    """Return a uint8 view with one more dimension: the bytes of each element.

    Unlike a typed view it needs no alignment. Lazy bits are not applied.
    """
    return tensor.unsqueeze(-1).view(torch.uint8)


def _copy_on_host(source: npt.NDArray[np.uint8], out: torch.Tensor) -> None:
    """Copy flat bytes by numpy, which takes one thread and releases the GIL.

    Torch would wake a team of OpenMP threads for every call, from every thread that
    copies; they spin while uploads and downloads want the cores. For 1 GiB in parts of
    16 MiB on two busy cores: 0.16 instead of 0.3 to 0.4 CPU s.
    """
    np.copyto(_array_over(out), source)
    note_written(out)


# --- small tensors -----------------------------------------------------------------


def payload_bytes(tensor: torch.Tensor) -> bytes:
    """Return a small plain tensor's payload."""
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes and tensor.device.type == "cpu" and _is_payload(tensor):
        # A tenth of the time that views in torch and numpy take.
        return ctypes.string_at(tensor.data_ptr(), num_bytes)
    out = torch.empty(num_bytes, dtype=torch.uint8)
    copy_bytes_out(tensor, 0, num_bytes, out)
    return out.numpy().tobytes()


def set_payload(tensor: torch.Tensor, payload: bytes) -> bool:
    """Overwrite a small host tensor with its whole payload, if its memory is its payload.

    Args:
        tensor: Of the payload's dtype and shape.
        payload: Exactly the tensor's bytes.

    Returns:
        Whether it was done; `copy_box_in` does it for any tensor.
    """
    num_bytes = tensor.numel() * tensor.element_size()
    if tensor.device.type != "cpu" or not _is_payload(tensor) or len(payload) != num_bytes:
        return False
    ctypes.memmove(tensor.data_ptr(), payload, num_bytes)
    note_written(tensor)
    return True


# --- out of a tensor ---------------------------------------------------------------


def copy_bytes_out(
    tensor: torch.Tensor,
    start: int,
    end: int,
    out: torch.Tensor,
    *,
    non_blocking: bool = False,
) -> None:
    """Copy payload bytes ``[start, end)`` of a tensor into ``out``.

    Args:
        tensor: Plain tensor (see `to_plain`), any strides and device.
            A non-contiguous run on another device is gathered there first: a temporary of
            at most ``end - start`` bytes of device memory.
        start: First payload byte; a multiple of the element size.
        end: End of the run; a multiple of the element size.
        out: Flat contiguous uint8 CPU tensor of ``end - start`` bytes, owned by the caller.
            Fastest if its address is a multiple of the element size.
        non_blocking: Queue the copy on the current stream. The caller synchronises before
            it reads ``out``; asynchronous only if ``out`` is pinned.

    Raises:
        ValueError: If the run is not one of whole elements of the tensor, or ``out`` does
            not fit it.
    """
    source = tensor.detach()
    item = source.element_size()
    if not 0 <= start <= end <= source.numel() * item or start % item or end % item:
        raise ValueError(
            f"bytes [{start}, {end}) are no run of whole elements of a payload of "
            f"{source.numel()} x {item} bytes"
        )
    if out.dtype != torch.uint8 or out.shape != (end - start,) or not out.is_contiguous():
        raise ValueError(f"out must be {end - start} contiguous uint8 bytes in one dimension")
    if start == end:
        return
    is_flat = _is_payload(source)
    if is_flat and source.device.type == out.device.type == "cpu":
        _copy_on_host(_array_over(as_bytes(source))[start:end], out)
        return
    with _may_write(out):
        if is_flat:
            out.copy_(as_bytes(source)[start:end], non_blocking=non_blocking)
        else:
            _copy_run_out(source, start // item, end // item, out, non_blocking)


def _copy_run_out(
    source: torch.Tensor, first: int, last: int, out: torch.Tensor, non_blocking: bool
) -> None:
    """Copy elements ``[first, last)`` of ``source`` into the flat bytes ``out``."""
    if source.dim() == 0 or last - first == source.numel():
        _copy_whole_out(source, out, non_blocking)
        return
    item = source.element_size()
    row = source.numel() // source.shape[0]
    for rows, begin, stop in _bands(first, last, row):
        low = max(first, begin)
        part = out[(low - first) * item : (min(last, stop) - first) * item]
        if begin < first or stop > last:
            inner = source[rows.start]
            _copy_run_out(inner, low - begin, min(last, stop) - begin, part, non_blocking)
        else:
            _copy_whole_out(source[rows], part, non_blocking)


def _bands(first: int, last: int, row: int) -> list[tuple[slice, int, int]]:
    """Cut elements ``[first, last)`` into a part of a row, whole rows, and a part of a row.

    Returns:
        Per band its rows, and the elements that these rows hold.
    """
    head, tail = -(-first // row), last // row
    if head > tail:
        return [(slice(tail, head), tail * row, head * row)]
    cuts = ((head - 1, head, first % row), (head, tail, tail - head), (tail, tail + 1, last % row))
    return [(slice(a, b), a * row, b * row) for a, b, is_wanted in cuts if is_wanted]


def _copy_whole_out(source: torch.Tensor, out: torch.Tensor, non_blocking: bool) -> None:
    if source.device.type != "cpu":
        # Torch applies lazy bits on the host after it queued the copy: too early when
        # non-blocking. Resolving on the device is ordered by the stream.
        source = source.resolve_conj().resolve_neg()
    item = source.element_size()
    if out.data_ptr() % item == 0 and out.storage_offset() % item == 0:
        out.view(source.dtype).view(source.shape).copy_(source, non_blocking=non_blocking)
        return
    out = out.view(*source.shape, item)
    for piece, index in _pieces(source) if source.is_conj() or source.is_neg() else [(source, ())]:
        resolved = piece.resolve_conj().resolve_neg()
        out[index].copy_(_each_byte(resolved), non_blocking=non_blocking)


def _pieces(
    whole: torch.Tensor, index: tuple[int | slice, ...] = ()
) -> list[tuple[torch.Tensor, tuple[int | slice, ...]]]:
    """Cut a tensor into views of at most the scratch size, each with its index in the whole."""
    if whole.numel() * whole.element_size() <= _SCRATCH_BYTES:
        return [(whole, index)]
    row_bytes = whole.numel() // whole.shape[0] * whole.element_size()
    step = _SCRATCH_BYTES // row_bytes
    if step == 0:
        return [p for i in range(whole.shape[0]) for p in _pieces(whole[i], (*index, i))]
    cuts = [slice(i, i + step) for i in range(0, whole.shape[0], step)]
    return [(whole[cut], (*index, cut)) for cut in cuts]


# --- into a tensor -----------------------------------------------------------------


def _tensor_over(array: npt.NDArray[np.uint8]) -> torch.Tensor:
    """Return a flat uint8 tensor over an array's memory, read-only or not, without a copy.

    Torch warns of read-only buffers, once per process and not silenced thread-safely. We
    only read.
    """
    if not array.flags.writeable:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        array = np.asarray(_Memory(array, interface))
    return torch.from_numpy(array)


def copy_box_in(
    source: Buffer,
    source_start: int,
    dtype: torch.dtype,
    chunk_strides: Sequence[int],
    box_offsets: Sequence[int],
    box_sizes: Sequence[int],
    target: torch.Tensor,
    *,
    non_blocking: bool = False,
) -> None:
    """Copy a box of a chunk, out of fetched payload bytes, into a target tensor.

    Args:
        source: Payload bytes of the chunk, from ``source_start`` on; read-only will do, any
            address will do. Borrowed for the call.
        source_start: Position of ``source`` in the chunk's payload, in bytes.
        dtype: Of the chunk.
        chunk_strides: Of the chunk, in elements; row-major for a stored payload.
        box_offsets: First element of the box in the chunk, per dimension.
        box_sizes: Sizes of the box; equal to the target's shape.
        target: Already narrowed to the box: any strides and device. Another dtype than the
            chunk's is cast as ``copy_`` does; whether that is wanted, the caller decides.
        non_blocking: Queue the copy to another device on its current stream, and cast and
            lay out there, in a temporary as large as the source. The caller keeps the source
            until the stream is done; asynchronous only if the source is page-locked.

    Raises:
        ValueError: If the box's bytes are not all in ``source``, or shapes do not match.
    """
    target = target.detach()
    if target.shape != torch.Size(box_sizes):
        raise ValueError(f"the target has shape {tuple(target.shape)}, the box {tuple(box_sizes)}")
    if not target.numel():
        return
    low, high = span_of(chunk_strides, box_offsets, box_sizes, dtype.itemsize)
    held = np.frombuffer(memoryview(source), dtype=np.uint8)
    if low < source_start or high > source_start + held.size:
        raise ValueError(
            f"the box needs payload bytes [{low}, {high}), "
            f"the source holds [{source_start}, {source_start + held.size})"
        )
    held = held[low - source_start : high - source_start]
    is_exact = target.dtype == dtype and not target.is_conj() and not target.is_neg()
    is_flat = is_exact and target.is_contiguous() and is_row_major(box_sizes, chunk_strides)
    if is_flat and target.device.type == "cpu":
        _copy_on_host(held, as_bytes(target))
        return
    data = _tensor_over(held)
    with _may_write(target):
        if is_flat:
            as_bytes(target).copy_(data, non_blocking=non_blocking)
            return
        if non_blocking:
            data = data.to(target.device, non_blocking=True)
        _copy_strided_in(data, dtype, chunk_strides, target, is_exact=is_exact)


def _copy_strided_in(
    data: torch.Tensor,
    dtype: torch.dtype,
    strides: Sequence[int],
    target: torch.Tensor,
    *,
    is_exact: bool,
) -> None:
    """Copy the box that starts at byte 0 of ``data``."""
    item = dtype.itemsize
    if data.data_ptr() % item == 0:
        target.copy_(data.view(dtype).as_strided(target.shape, tuple(strides)))
        return
    box = data.as_strided((*target.shape, item), (*(s * item for s in strides), 1))
    if is_exact:
        _each_byte(target).copy_(box)
        return
    for piece, index in _pieces(target):
        scratch = torch.empty(piece.shape, dtype=dtype, device=data.device)
        _each_byte(scratch).copy_(box[index])
        piece.copy_(scratch)


# --- slabs: host memory that is used again --------------------------------------------

_T = TypeVar("_T")

_POLL_S = 0.02  # how often a blocked wait looks whether the operation was cancelled


@dataclass(frozen=True, slots=True)
class Slab:
    """One piece of host memory, seen as numpy and as torch."""

    array: Bytes
    tensor: torch.Tensor

    @classmethod
    def make(cls, num_bytes: int, *, pin: bool) -> Slab:
        """Allocate one, page-locked if a device copies from it or to it."""
        tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pin)
        return cls(tensor.numpy(), tensor)

    def cut(self, piece_bytes: int) -> list[Slab]:
        """Return as many pieces of that size as it holds."""
        ends = range(piece_bytes, len(self.array) + 1, piece_bytes)
        return [
            Slab(self.array[end - piece_bytes : end], self.tensor[end - piece_bytes : end])
            for end in ends
        ]


class Slabs:
    """A bounded number of slabs, each made on first use. Thread-safe.

    Args:
        num_slabs: Most that exist.
        make: Allocates one.
        cancelled: Ends a wait: whoever takes a slab then raises `Cancelled`.
    """

    def __init__(
        self, num_slabs: int, make: Callable[[], Slab], cancelled: Callable[[], bool]
    ) -> None:
        self.free: queue.SimpleQueue[Slab] = queue.SimpleQueue()
        """Put a slab here to give it back."""
        self._num_slabs = num_slabs
        self._make = make
        self._cancelled = cancelled
        self._num_made = 0
        self._lock = threading.Lock()

    @property
    def num_made(self) -> int:
        """How many exist."""
        return self._num_made

    def take(self) -> Slab:
        """Take a slab, waiting for one if need be."""
        with self._lock:
            makes_one = self.free.empty() and self._num_made < self._num_slabs
            self._num_made += makes_one
        return self._make() if makes_one else take(self.free, self._cancelled)


def take(free: queue.SimpleQueue[_T], cancelled: Callable[[], bool]) -> _T:
    """Take what is free, waiting for it if need be.

    Raises:
        Cancelled: If ``cancelled()`` is true while nothing is free.
    """
    while True:
        try:
            return free.get_nowait()
        except queue.Empty:
            if cancelled():
                raise Cancelled from None
        try:
            return free.get(timeout=_POLL_S)
        except queue.Empty:
            continue
