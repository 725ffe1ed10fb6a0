"""A tensor as a complete ``torch.save`` record.

A record is a zip archive of stored members::

    object_offset                                    +payload_offset (64-byte aligned)
    |                                                |
    | data.pkl | version | byteorder | data/0 header | payload ... | directory | end |
    |<------------------ head ----------------------->|<-- tensor ->|<--- trailer --->|

Everything of ours but the payload depends only on dtype, shape and position, so `plan_record`
makes it before any byte of the tensor is copied. Stock ``torch.load`` reads it, alone or as a
slice of a larger object. Zip's CRC32 of the payload is left at 0: torch does not look at it, and
the manifest's CRC32C guards the bytes at ten times the speed.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING
from zlib import crc32

from dcpstore.format.dtypes import info_of, row_major_strides
from dcpstore.format.zip import (
    ALIGNMENT_BYTES,
    LOCAL_HEADER_BYTES,
    MAX32,
    NewMember,
    end_records,
    padding,
)

if TYPE_CHECKING:
    import torch


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
