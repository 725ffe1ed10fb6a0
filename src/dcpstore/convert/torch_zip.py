"""A ``torch.save`` file written front to back, byte for byte as torch's own writer lays it out.

::

    header name padding | contents | descriptor | header ... | directory | end records
                        ^ at a multiple of 64     crc32, sizes

Sizes and CRC32 of a member's contents follow in a descriptor, so that nothing need be known
before it is written. Where torch finds storages without reading their headers
(``torch.utils.serialization.config.load.calculate_storage_offsets``), it counts on exactly
this layout: zip64 fields where an offset or a size needs 64 bits, descriptors of 16 or 24
bytes, none behind an empty member.
"""

from __future__ import annotations

import hashlib
import struct
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import Buffer

from dcpstore.format.zipfmt import LOCAL_HEADER_BYTES, LOCAL_SIGNATURE, MAX32

__all__ = ["ALIGNMENT_BYTES", "ByteSink", "TorchZipWriter", "overhead_bytes"]

ALIGNMENT_BYTES = 64
"""Contents start at multiples of this, so that tensors can be mapped where they lie."""

_ROOT = "archive"
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_DESCRIPTOR, _DESCRIPTOR64 = struct.Struct("<4sIII"), struct.Struct("<4sIQQ")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")
_END = struct.Struct("<4sHHHHIIH")
_FIELD = struct.Struct("<HH")
_PADDING_ID = 0x4246  # "FB", as torch marks it
_UTF8, _STREAMED = 0x0800, 0x0008


class ByteSink(Protocol):
    """Where the file goes."""

    def write(self, data: Buffer) -> int:
        """Take bytes; they may be overwritten afterwards."""


@dataclass(frozen=True, slots=True)
class _Written:
    name: bytes
    header_offset: int
    size_bytes: int
    crc32: int


class TorchZipWriter:
    """Writes the members of one file, in order; `finish` ends it.

    Args:
        sink: Takes the bytes.
    """

    def __init__(self, sink: ByteSink) -> None:
        self._sink = sink
        self._offset = 0
        self._members: list[_Written] = []
        self._crc32 = 0

    @property
    def num_bytes(self) -> int:
        """Bytes written so far."""
        return self._offset

    def write_pickle(self, pickled: bytes) -> None:
        """Write the first members: the pickle, and the notes that follow it in torch's files."""
        self._write_whole("data.pkl", pickled)
        self._write_whole(".format_version", b"1")
        self._write_whole(".storage_alignment", str(ALIGNMENT_BYTES).encode())
        self._write_whole("byteorder", sys.byteorder.encode())

    @contextmanager
    def storage(self, key: str, num_bytes: int) -> Iterator[None]:
        """Write a storage: the block calls `write` until all its bytes are there.

        Raises:
            ValueError: If the block wrote another number of bytes.
        """
        with self._member(f"data/{key}", num_bytes):
            yield

    def write(self, data: Buffer, crc32: int | None = None) -> None:
        """Write bytes of the current storage.

        Args:
            data: Contiguous bytes.
            crc32: Checksum of the storage up to and with these bytes, where it is known.
        """
        self._crc32 = zlib.crc32(data, self._crc32) if crc32 is None else crc32
        self._put(data)

    @property
    def crc32(self) -> int:
        """Checksum of what was written of the current storage."""
        return self._crc32

    def finish(self) -> None:
        """Write the last members and the directory."""
        self._write_whole("version", b"3\n")
        self._write_whole(".data/serialization_id", self._serialization_id())
        start = self._offset
        for member in self._members:
            self._put(_central_header(member))
        num_bytes, count = self._offset - start, len(self._members)
        end64 = self._offset
        self._put(
            _END64.pack(b"PK\x06\x06", _END64.size - 12, 0x031E, 45, 0, 0, count, count,
                        num_bytes, start)
        )  # fmt: skip
        self._put(_LOCATOR64.pack(b"PK\x06\x07", 0, end64, 1))
        few = min(count, 0xFFFF)
        self._put(
            _END.pack(b"PK\x05\x06", 0, 0, few, few, min(num_bytes, MAX32), min(start, MAX32), 0)
        )

    def _write_whole(self, name: str, contents: bytes) -> None:
        with self._member(name, len(contents)):
            self.write(contents)

    @contextmanager
    def _member(self, name: str, num_bytes: int) -> Iterator[None]:
        header_offset, full_name = self._offset, f"{_ROOT}/{name}".encode()
        self._put(_local_header(full_name, header_offset, num_bytes))
        start, self._crc32 = self._offset, 0
        yield
        if self._offset - start != num_bytes:
            raise ValueError(f"{name} has {self._offset - start} bytes instead of {num_bytes}")
        member = _Written(full_name, header_offset, num_bytes, self._crc32)
        if num_bytes:
            self._put(_descriptor(member))
        self._members.append(member)

    def _put(self, data: Buffer) -> None:
        self._sink.write(data)
        self._offset += memoryview(data).nbytes

    def _serialization_id(self) -> bytes:
        """Return 40 digits that stand for names and contents, as torch's do."""
        names = hashlib.blake2b(b"\0".join(m.name for m in self._members), digest_size=8).digest()
        crcs = hashlib.blake2b(
            b"".join(m.crc32.to_bytes(4, "little") for m in self._members), digest_size=8
        ).digest()
        return b"".join(f"{int.from_bytes(part, 'little'):020d}".encode() for part in (names, crcs))


def overhead_bytes(num_storages: int) -> int:
    """Return an upper bound of what a file has besides its pickle and its storages."""
    return (num_storages + 8) * 400


def _extra64(offset: int, *sizes: int) -> bytes:
    """Return the field of those numbers that do not fit 32 bits.

    Args:
        offset: Of the member's header.
        sizes: What to write for its two sizes if they do not fit; empty if they do.
    """
    wide = [*sizes, *([offset] if offset >= MAX32 else [])]
    return _FIELD.pack(1, 8 * len(wide)) + struct.pack(f"<{len(wide)}Q", *wide) if wide else b""


def _local_header(name: bytes, offset: int, num_bytes: int) -> bytes:
    # The stored size is not known to a writer that streams, so torch writes 0 for it.
    extra = _extra64(offset, *((num_bytes, 0) if num_bytes >= MAX32 else ()))
    start = offset + LOCAL_HEADER_BYTES + len(name) + len(extra) + _FIELD.size
    gap = -start % ALIGNMENT_BYTES
    extra += _FIELD.pack(_PADDING_ID, gap) + b"Z" * gap
    flags = _UTF8 | (_STREAMED if num_bytes else 0)
    head = _LOCAL.pack(LOCAL_SIGNATURE, 0, flags, 0, 0, 0, 0, 0, 0, len(name), len(extra))
    return head + name + extra


def _descriptor(member: _Written) -> bytes:
    is_large = member.size_bytes >= MAX32 or member.header_offset >= MAX32
    form = _DESCRIPTOR64 if is_large else _DESCRIPTOR
    return form.pack(b"PK\x07\x08", member.crc32, member.size_bytes, member.size_bytes)


def _central_header(member: _Written) -> bytes:
    size = member.size_bytes
    extra = _extra64(member.header_offset, *((size, size) if size >= MAX32 else ()))
    short, where = min(size, MAX32), min(member.header_offset, MAX32)
    flags = _UTF8 | (_STREAMED if size else 0)
    head = _CENTRAL.pack(
        b"PK\x01\x02", 0, 0, flags, 0, 0, 0, member.crc32, short, short,
        len(member.name), len(extra), 0, 0, 0, 0, where,
    )  # fmt: skip
    return head + member.name + extra
