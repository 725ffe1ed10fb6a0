"""A tensor as a complete ``torch.save`` record: read from its first bytes, and planned.

A record is a zip archive of stored members::

    object_offset                                    +payload_offset (64-byte aligned)
    |                                                |
    | data.pkl | version | byteorder | data/0 header | payload ... | directory | end |
    |<------------------ head ----------------------->|<-- tensor ->|<--- trailer --->|

Everything of ours but the payload depends only on dtype, shape and position, so `plan_record`
makes it before any byte of the tensor is copied. Stock ``torch.load`` reads it, alone or as a
slice of a larger object. Zip's CRC32 of the payload is left at 0: torch does not look at it, and
the manifest's CRC32C guards the bytes at ten times the speed.

Records that others wrote are not in our manifest: `find_tensor` finds their payload
position, dtype and shape in their head: the pickle, and the header of the storage that it names.

The pickle calls ``torch._utils._rebuild_tensor_v2`` (or ``_v3``). Only the instructions and the
names that such a call is made of are let through, and the names stand for functions that describe
the tensor: nothing of what lies in the bucket is imported or called.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any
from zlib import crc32

from dcpstore.format.dtypes import (
    DTYPES,
    DtypeInfo,
    dtype_from_name,
    info_of,
    is_row_major,
    item_bytes,
    row_major_strides,
)
from dcpstore.format.opcodes import BadPickleError, CutShortError, end_of_program, lengths_of
from dcpstore.format.zip import (
    ALIGNMENT_BYTES,
    LOCAL_HEADER_BYTES,
    LOCAL_SIGNATURE,
    MAX32,
    STREAMED_FLAG,
    LocalHeader,
    NewMember,
    ReadAt,
    end_records,
    padding,
    read_local_header,
    wide_numbers,
)

if TYPE_CHECKING:
    import torch


class _NotATensorError(Exception):
    """The record holds something else than one plain tensor; the message says what."""


class _TooShortError(Exception):
    """The bytes end before what is looked for does.

    Args:
        needed_bytes: Length of the buffer that the next step needs.
    """

    def __init__(self, needed_bytes: int) -> None:
        super().__init__(needed_bytes)
        self.needed_bytes = needed_bytes


# --- the pickle ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype_name: str | None
    key: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _PickledTensor:
    dtype_name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_offset: int
    storage: _Storage


_HOOKS = object()
# The call of a tensor of 64 dimensions takes 1.5 KiB; a longer pickle is something else.
_MAX_PICKLE_BYTES = 4096
# None of them hashes anything, or takes more memory than the bytes are long.
_LENGTHS = lengths_of(
    {
        *("PROTO", "STOP", "MARK", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1"),
        *("BINUNICODE", "GLOBAL", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
        *("BINGET", "BINPUT", "BINPERSID", "REDUCE"),
    }
)


def _rebuild_tensor(*arguments: Any) -> _PickledTensor:
    match arguments:
        case (_Storage(dtype_name=str() as dtype) as storage, *place, bool(), hooks):
            pass
        case (_Storage(dtype_name=None) as storage, *place, bool(), hooks, DtypeInfo(name=dtype)):
            pass
        case _:
            raise _NotATensorError("a tensor rebuilt from unusual arguments")
    if hooks is not _HOOKS or len(place) != 3:
        raise _NotATensorError("a tensor rebuilt from unusual arguments")
    offset, shape, strides = place
    if not (_are_sizes(shape) and _are_sizes(strides) and _are_sizes((offset,))):
        raise _NotATensorError("a shape that is none")
    if len(shape) != len(strides):
        raise _NotATensorError("a shape with too few or too many strides")
    return _PickledTensor(dtype, shape, strides, offset, storage)


def _rebuild_parameter(*arguments: Any) -> _PickledTensor:
    match arguments:
        case (_PickledTensor() as tensor, bool(), hooks) if hooks is _HOOKS:
            return tensor
    raise _NotATensorError("a call of _rebuild_parameter with unusual arguments")


def _are_sizes(values: Any) -> bool:
    return type(values) is tuple and all(type(v) is int and 0 <= v < 1 << 63 for v in values)


_UNTYPED = DtypeInfo("", 1)
_NAMES: dict[str, Any] = {
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "collections.OrderedDict": lambda: _HOOKS,
    "torch.storage.UntypedStorage": _UNTYPED,
    **{f"torch.{row.storage_class or row.name}": row for row in DTYPES.values() if row.is_plain},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        if path not in _NAMES:
            raise _NotATensorError(f"the global {path}")
        return _NAMES[path]

    def persistent_load(self, persistent_id: Any) -> _Storage:
        match persistent_id:
            case ("storage", DtypeInfo() as row, str() as key, str(), int() as count) if count >= 0:
                if row is _UNTYPED:
                    return _Storage(None, key, count)
                if row.storage_class:
                    return _Storage(row.name, key, count * row.item_bytes)
        raise _NotATensorError("a persistent id that is no storage")


def _read_pickle(data: memoryview, start: int) -> tuple[_PickledTensor, int]:
    """Read the pickle that starts at ``data[start]``; return also where it ends."""
    window = bytes(data[start : start + _MAX_PICKLE_BYTES])
    try:
        num_bytes = end_of_program(window, _LENGTHS)
        made = _Unpickler(io.BytesIO(window[:num_bytes])).load()
    except CutShortError as error:
        if error.needed_bytes > _MAX_PICKLE_BYTES:
            raise _NotATensorError("a long pickle") from error
        raise _TooShortError(start + error.needed_bytes) from error
    except _NotATensorError:
        raise
    except BadPickleError as error:
        raise _NotATensorError(f"in its pickle, {error}") from error
    except Exception as error:
        raise _NotATensorError("a broken pickle") from error
    if type(made) is not _PickledTensor:
        raise _NotATensorError("a pickle of something else than a tensor")
    return made, start + num_bytes


# --- the head --------------------------------------------------------------------------

HEAD_BYTES = 1024
"""A first read of this many bytes holds the head of any record that stock DCP writes."""

# Torch can be told to align members to 32 KiB, and four precede the payload.
_MAX_HEAD_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a record keeps its tensor, and how.

    Attributes:
        dtype: Of the tensor; always a plain one.
        shape: Sizes of the tensor.
        strides: In elements, as it lies in the payload.
        storage_offset: First element of the tensor in the payload.
        payload_offset: Where the payload starts in the record.
        payload_bytes: Length of the payload: the whole storage that the tensor views.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_offset: int
    payload_offset: int
    payload_bytes: int

    @property
    def is_dense(self) -> bool:
        """Whether the payload is the tensor's elements in row-major order and nothing else."""
        numel = prod(self.shape)
        if numel == 0:
            return True
        return (
            self.storage_offset == 0
            and self.payload_bytes == numel * item_bytes(self.dtype)
            and is_row_major(self.shape, self.strides)
        )


def find_tensor(read_at: ReadAt, record_bytes: int) -> StoredTensor | None:
    """Find the tensor of a ``torch.save`` record, by one small read nearly always.

    Runs nothing that stands in the record.

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
            return _parse(memoryview(read_at(0, given)).cast("B"), record_bytes)
        except _TooShortError as short:
            wanted = max(short.needed_bytes, 2 * given)
        except _NotATensorError:
            break
    return None


def _parse(data: memoryview, record_bytes: int) -> StoredTensor:
    first = _read_header(data, 0)
    if not first.name.endswith(b"/data.pkl"):
        raise _NotATensorError(f"an archive that starts with {first.name!r}")
    root = first.name.removesuffix(b"data.pkl")
    tensor, end = _read_pickle(data, first.contents)
    key = tensor.storage.key.encode("utf-8", "replace")
    member = _find_member(data, end, end + _MAX_HEAD_BYTES, root + b"data/" + key)
    if member is None:
        if len(data) - end >= _MAX_HEAD_BYTES:
            raise _NotATensorError("no storage near its pickle")
        raise _TooShortError(len(data) + 1)
    note = _find_member(data, end, member.contents, root + b"byteorder")
    order = sys.byteorder.encode()
    if note is not None and data[note.contents : note.contents + len(order)] != order:
        raise _NotATensorError("a storage of another byte order")
    return _placed(tensor, member, record_bytes)


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


def _placed(tensor: _PickledTensor, member: LocalHeader, record_bytes: int) -> StoredTensor:
    """Join the pickle's tensor and the position of its storage, and check both."""
    num_bytes = tensor.storage.num_bytes
    try:
        dtype = dtype_from_name(tensor.dtype_name)
    except ValueError as error:
        raise _NotATensorError(str(error)) from error
    if member.contents + num_bytes > record_bytes:
        raise _NotATensorError("a storage that is longer than the record")
    if not member.flags & STREAMED_FLAG and member.size_bytes != num_bytes:
        raise _NotATensorError("a storage of another size than the tensor says")
    if prod(tensor.shape):
        steps = zip(tensor.shape, tensor.strides, strict=True)
        last = tensor.storage_offset + sum((size - 1) * stride for size, stride in steps)
        if (last + 1) * item_bytes(dtype) > num_bytes:
            raise _NotATensorError("a tensor that reaches past its storage")
    return StoredTensor(
        dtype, tensor.shape, tensor.strides, tensor.storage_offset, member.contents, num_bytes
    )


def _read_header(data: memoryview, position: int) -> LocalHeader:
    try:
        header = read_local_header(data, position)
    except ValueError as error:
        raise _NotATensorError(str(error)) from error
    if isinstance(header, int):
        raise _TooShortError(header)
    if header.method != 0 or header.flags & ~0x0808:
        raise _NotATensorError("an archive with compressed or encrypted members")
    if MAX32 in (header.stored_bytes, header.size_bytes):
        sizes = wide_numbers(header.extra)
        if not sizes:
            raise _NotATensorError("a zip64 member without its size")
        header = replace(header, size_bytes=sizes[0])
    return header


# --- the plan --------------------------------------------------------------------------

# The name of the archive's root folder is free; a short one saves 6 x 8 bytes per record.
_ROOT = b"r/"
_VERSION, _VERSION64 = 20, 45
_DOS_DATE = (1 << 5) | 1  # 1980-01-01: the same tensor always gives the same bytes


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """The bytes around a tensor's payload.

    Attributes:
        header: Bytes before the payload.
        payload_bytes: Length of the payload: the elements in row-major order.
        trailer: Bytes after the payload.
    """

    header: bytes
    payload_bytes: int
    trailer: bytes

    @property
    def payload_offset(self) -> int:
        """Where the payload starts, counted from the record's first byte."""
        return len(self.header)

    @property
    def record_bytes(self) -> int:
        """Length of the whole record."""
        return len(self.header) + self.payload_bytes + len(self.trailer)


def plan_record(
    dtype: torch.dtype,
    shape: Sequence[int],
    *,
    object_offset: int = 0,
    force_zip64: bool = False,
) -> RecordLayout:
    """Plan the record of a contiguous CPU tensor.

    Thread-safe. Layouts are cached and shared: 20,000 small tensors of a few shapes cost
    20,000 dictionary look-ups.

    Args:
        dtype: A plain dtype (see `dcpstore.format.dtypes`).
        shape: Sizes of the tensor; ``()`` for a scalar.
        object_offset: Where the record will start in its object, for alignment.
        force_zip64: Write 64-bit sizes even if 32 bits would do.

    Raises:
        ValueError: If the dtype is not plain or a size is negative.
    """
    return _plan(dtype, tuple(shape), object_offset % ALIGNMENT_BYTES, force_zip64)


@lru_cache(maxsize=4096)
def _plan(
    dtype: torch.dtype, shape: tuple[int, ...], phase: int, force_zip64: bool
) -> RecordLayout:
    front, members, payload_bytes = _front(dtype, shape)
    is_zip64 = force_zip64 or payload_bytes >= MAX32
    data = _member(b"data/0", payload_bytes, 0, len(front), is_zip64=is_zip64)
    extra = data.extra64(payload_bytes)
    names_end = phase + len(front) + LOCAL_HEADER_BYTES + len(data.name) + len(extra)
    if names_end % ALIGNMENT_BYTES:
        extra += padding(names_end)
    header = front + data.local_header(extra, 0, MAX32 if is_zip64 else payload_bytes)
    start = len(header) + payload_bytes
    directory = b"".join(one.central_header() for one in (*members, data))
    is_zip64 = is_zip64 or start + len(directory) >= MAX32
    end = end_records(
        len(members) + 1, start, len(directory), MAX32 if is_zip64 else start, is_zip64=is_zip64
    )
    return RecordLayout(header, payload_bytes, directory + end)


def _member(name: bytes, num_bytes: int, crc: int, at: int, *, is_zip64: bool = False) -> NewMember:
    version = _VERSION64 if is_zip64 else _VERSION
    return NewMember(_ROOT + name, num_bytes, crc, at, is_zip64, version, date=_DOS_DATE)


@lru_cache(maxsize=1024)
def _front(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, list[NewMember], int]:
    """Return the members before the payload: their bytes, their list, and the payload's length."""
    info = info_of(dtype)
    if not info.is_plain:
        raise ValueError(f"a tensor of dtype {info.name} has no plain record")
    if any(size < 0 for size in shape):
        raise ValueError(f"a shape has no negative sizes, got {shape}")
    contents = (
        (b"data.pkl", _pickle(dtype, shape)),
        (b"version", b"3\n"),
        (b"byteorder", sys.byteorder.encode()),
    )
    front = b""
    members = []
    for name, content in contents:
        member = _member(name, len(content), crc32(content), len(front))
        members.append(member)
        front += member.local_header(b"", member.crc32, len(content)) + content
    return front, members, prod(shape) * info.item_bytes


def _pickle(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """Emit what ``torch.save`` pickles for a contiguous tensor, in protocol 2 without memo.

    ``_rebuild_tensor_v2(storage, 0, size, stride, False, OrderedDict())``, where the storage
    is the persistent id ``('storage', <class>, '0', 'cpu', numel)``. Dtypes without a
    storage class take ``_rebuild_tensor_v3`` with the dtype as seventh argument and an
    ``UntypedStorage`` counted in bytes.
    """
    info = info_of(dtype)
    numel = prod(shape)
    if info.storage_class is None:
        rebuild, last = b"_rebuild_tensor_v3", _global(b"torch", info.name.encode())
        storage, count = _global(b"torch.storage", b"UntypedStorage"), numel * info.item_bytes
    else:
        rebuild, last = b"_rebuild_tensor_v2", b""
        storage, count = _global(b"torch", info.storage_class.encode()), numel
    persistent = b"(" + _text(b"storage") + storage + _text(b"0") + _text(b"cpu") + _int(count)
    strides = _tuple(row_major_strides(shape))
    hooks = _global(b"collections", b"OrderedDict") + b")R"
    arguments = persistent + b"tQ" + _int(0) + _tuple(shape) + strides + b"\x89" + hooks + last
    return b"\x80\x02" + _global(b"torch._utils", rebuild) + b"(" + arguments + b"tR."


def _global(module: bytes, name: bytes) -> bytes:
    return b"c" + module + b"\n" + name + b"\n"


def _text(text: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text


def _int(value: int) -> bytes:
    if value < 1 << 8:
        return struct.pack("<cB", b"K", value)
    if value < 1 << 16:
        return struct.pack("<cH", b"M", value)
    if value < 1 << 31:
        return struct.pack("<ci", b"J", value)
    digits = value.to_bytes(value.bit_length() // 8 + 1, "little")
    return b"\x8a" + bytes([len(digits)]) + digits


def _tuple(values: tuple[int, ...]) -> bytes:
    if not values:
        return b")"
    items = b"".join(map(_int, values))
    short = {1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(values))
    return items + short if short else b"(" + items + b"t"
