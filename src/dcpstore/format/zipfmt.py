"""The few zip structures that a ``torch.save`` record is made of (PKWARE APPNOTE 6.3.9).

Members are stored, never compressed. Sizes that do not fit 32 bits go to the zip64
extra field and to the zip64 end records.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

__all__ = [
    "LOCAL_HEADER_BYTES",
    "LOCAL_SIGNATURE",
    "MAX32",
    "Member",
    "central_directory",
    "local_header",
    "padding_field",
]

LOCAL_SIGNATURE = b"PK\x03\x04"
LOCAL_HEADER_BYTES = 30
MAX32 = 0xFFFFFFFF

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")
_SIZES64 = struct.Struct("<HHQQ")
_FIELD = struct.Struct("<HH")

_VERSION = 20
_VERSION64 = 45
_DOS_DATE = (1 << 5) | 1  # 1980-01-01: the same tensor always gives the same bytes
# Extra fields that readers do not know are skipped. This id is the one that torch's own
# writer uses for padding ("FB").
_PADDING_ID = 0x4246


@dataclass(frozen=True, slots=True)
class Member:
    """One stored file of the archive.

    Attributes:
        name: Path inside the archive, with its root folder.
        size_bytes: Length of the contents.
        crc32: Zip's own checksum; 0 where nobody computes it.
        header_offset: Where its local header starts.
        is_zip64: Whether its sizes are written with 64 bits.
    """

    name: bytes
    size_bytes: int
    crc32: int
    header_offset: int
    is_zip64: bool = False


def padding_field(num_bytes: int) -> bytes:
    """Return an extra field of exactly ``num_bytes`` (0, or at least 4)."""
    if not num_bytes:
        return b""
    return _FIELD.pack(_PADDING_ID, num_bytes - _FIELD.size) + bytes(num_bytes - _FIELD.size)


def _extra64(member: Member) -> bytes:
    if not member.is_zip64:
        return b""
    return _SIZES64.pack(1, 16, member.size_bytes, member.size_bytes)


def local_header(member: Member, alignment: int = 0, data_base: int = 0) -> bytes:
    """Return the header that precedes a member's contents.

    Args:
        member: The member.
        alignment: If not 0, pad so that the contents start at a multiple of it.
        data_base: Position of byte 0 of the archive, for that alignment.
    """
    extra = _extra64(member)
    if alignment:
        fixed_bytes = LOCAL_HEADER_BYTES + len(member.name) + len(extra)
        gap = -(data_base + member.header_offset + fixed_bytes) % alignment
        extra += padding_field(gap if gap == 0 or gap >= _FIELD.size else gap + alignment)
    size = MAX32 if member.is_zip64 else member.size_bytes
    version = _VERSION64 if member.is_zip64 else _VERSION
    fixed = _LOCAL.pack(
        LOCAL_SIGNATURE, version, 0, 0, 0, _DOS_DATE, member.crc32, size, size,
        len(member.name), len(extra),
    )  # fmt: skip
    return fixed + member.name + extra


def _central_header(member: Member) -> bytes:
    extra = _extra64(member)
    size = MAX32 if member.is_zip64 else member.size_bytes
    version = _VERSION64 if member.is_zip64 else _VERSION
    fixed = _CENTRAL.pack(
        b"PK\x01\x02", version, version, 0, 0, 0, _DOS_DATE, member.crc32, size, size,
        len(member.name), len(extra), 0, 0, 0, 0, member.header_offset,
    )  # fmt: skip
    return fixed + member.name + extra


def central_directory(members: list[Member], offset: int, *, force_zip64: bool = False) -> bytes:
    """Return the directory and the end records that close an archive.

    Args:
        members: In the order of their headers; header offsets must fit 32 bits.
        offset: Where the directory starts in the archive.
        force_zip64: Write the zip64 end records even if 32 bits would do.
    """
    headers = b"".join(map(_central_header, members))
    end64 = b""
    if force_zip64 or offset + len(headers) >= MAX32:
        end64 = _END64.pack(
            b"PK\x06\x06", _END64.size - 12, _VERSION64, _VERSION64, 0, 0,
            len(members), len(members), len(headers), offset,
        )  # fmt: skip
        end64 += _LOCATOR64.pack(b"PK\x06\x07", 0, offset + len(headers), 1)
        offset = MAX32
    count = len(members)
    end = _END.pack(b"PK\x05\x06", 0, 0, count, count, len(headers), offset, 0)
    return headers + end64 + end
