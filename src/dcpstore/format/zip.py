"""The zip archives that ``torch.save`` makes: read by ranges, and written front to back.

Members are stored, never compressed. An archive says everything twice: in the header before each
member, with a descriptor behind it, and in the directory at its end::

    header name padding | contents | descriptor | header name padding | contents ... | directory
    ^ header_offset                             ^ next_offset
                        ^ = next_offset - descriptor - size, where torch wrote the file

The directory says where headers lie, and not where contents do: headers are padded, so that
contents start at multiples of 64. So the contents of 20,000 tensors are found without 20,000
reads; whoever reads the first of a member's bytes reads its header with them, and checks it.

Sizes that do not fit 32 bits go to the zip64 extra field and to the zip64 end records.
Structures: PKWARE APPNOTE 6.3.9.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

from typing_extensions import Buffer

from dcpstore.errors import CorruptError, IncompatibleError

ALIGNMENT_BYTES = 64
"""Contents start at multiples of this, as torch's own writer aligns them, so that tensors can be
mapped where they lie."""

LOCAL_HEADER_BYTES = 30
DESCRIPTOR_SIGNATURE = b"PK\x07\x08"
MAX32 = 0xFFFFFFFF
STREAMED_FLAG = 0x0008
_ENCRYPTED_FLAG, _UTF8_FLAG = 0x0001, 0x0800

LOCAL_SIGNATURE, _CENTRAL_SIGNATURE = b"PK\x03\x04", b"PK\x01\x02"
END_SIGNATURE, _END64_SIGNATURE = b"PK\x05\x06", b"PK\x06\x06"
_LOCATOR64_SIGNATURE = b"PK\x06\x07"
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
END_BYTES = _END.size
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")
_FIELD = struct.Struct("<HH")
_DESCRIPTOR, _DESCRIPTOR64 = struct.Struct("<4sIII"), struct.Struct("<4sIQQ")
_ZIP64_ID = 1
# Extra fields that readers do not know are skipped. This id is the one that torch's own
# writer uses for padding ("FB").
_PADDING_ID = 0x4246

# --- reading ---------------------------------------------------------------------------

ReadAt = Callable[[int, int], memoryview]
"""Read bytes ``[start, end)`` of the file."""

_TAIL_BYTES = 64 << 10  # one read that holds the whole directory of about 800 tensors
_MAX_COMMENT_BYTES = 0xFFFF
_MAX_DIRECTORY_BYTES = 1 << 30  # of 10 million tensors
# What a header may have between its name and the contents: torch's padding and a zip64 field.
_MAX_EXTRA_BYTES = 0xFFFF


@dataclass(frozen=True, slots=True)
class Member:
    """One file of an archive, as the directory tells it.

    Attributes:
        name: Path in the archive, as its header spells it.
        header_offset: Where its local header starts in the file.
        next_offset: Where what follows it starts.
        stored_bytes: Length of its contents as they lie there.
        size_bytes: Length of its contents; the same unless they are compressed.
        crc32: Of its contents; 0 where the writer computed none.
        flags: Of the header.
        method: 0 if it is not compressed.
    """

    name: bytes
    header_offset: int
    next_offset: int
    stored_bytes: int
    size_bytes: int
    crc32: int
    flags: int
    method: int

    @property
    def names_end(self) -> int:
        """Where the fixed part of its header and its name end in the file."""
        return self.header_offset + LOCAL_HEADER_BYTES + len(self.name)

    @property
    def is_plain(self) -> bool:
        """Whether its contents lie there as they are."""
        is_stored = self.method == 0 and self.stored_bytes == self.size_bytes
        return is_stored and not self.flags & _ENCRYPTED_FLAG

    @property
    def expected_offset(self) -> int | None:
        """Where the contents start if torch wrote the file; None if it cannot have."""
        is_large = self.header_offset >= MAX32 or self.size_bytes >= MAX32
        start = self.next_offset - self.size_bytes
        if self.flags & STREAMED_FLAG:
            start -= (_DESCRIPTOR64 if is_large else _DESCRIPTOR).size
        return start if self.names_end <= start <= self.names_end + _MAX_EXTRA_BYTES else None


@dataclass(frozen=True, slots=True)
class LocalHeader:
    """What the header before a member says.

    Attributes:
        name: Path in the archive.
        contents: Where the contents start.
        stored_bytes: Their length, `MAX32` where it stands in ``extra``; 0 for writers that
            stream, as are the next two.
        size_bytes: Likewise.
        crc32: Of the contents.
        flags: Bits that `Member.flags` repeats.
        method: 0 if it is not compressed.
        extra: The extra fields.
    """

    name: bytes
    contents: int
    stored_bytes: int
    size_bytes: int
    crc32: int
    flags: int
    method: int
    extra: memoryview


def read_local_header(data: memoryview, at: int) -> LocalHeader | int:
    """Read the header at ``data[at]``.

    Returns:
        The header, or the length that ``data`` must have to hold it.

    Raises:
        ValueError: If there is none.
    """
    names = at + LOCAL_HEADER_BYTES
    if names > len(data):
        return names
    signature, _, flags, method, _, _, crc32, stored, size, name_bytes, extra_bytes = (
        _LOCAL.unpack_from(data, at)
    )
    if signature != LOCAL_SIGNATURE:
        raise ValueError("no zip archive")
    extra = names + int(name_bytes)
    contents = extra + int(extra_bytes)
    if contents > len(data):
        return contents
    return LocalHeader(
        bytes(data[names:extra]), contents, stored, size, crc32, flags, method, data[extra:contents]
    )


def wide_numbers(extra: memoryview) -> list[int]:
    """Return the numbers in the zip64 field: those that do not fit 32 bits, in their order."""
    at = 0
    while at + _FIELD.size <= len(extra):
        kind, length = _FIELD.unpack_from(extra, at)
        at += _FIELD.size
        if kind == _ZIP64_ID:
            held = bytes(extra[at : at + length])
            return [one for (one,) in struct.iter_unpack("<Q", held[: len(held) // 8 * 8])]
        at += length
    return []


def read_directory(read_at: ReadAt, size_bytes: int, what: str) -> list[Member]:
    """Return the members of any zip archive, in the order in which they lie there.

    One request for most files, two for large ones.

    Args:
        read_at: Reads the file.
        size_bytes: Length of the file.
        what: Its name, for messages.

    Raises:
        IncompatibleError: If this is another kind of file; the message says which.
        CorruptError: If it was a zip file and is damaged, such as cut off.
    """
    tail_start = max(0, size_bytes - _TAIL_BYTES - _MAX_COMMENT_BYTES)
    tail = read_at(tail_start, size_bytes)
    found = _find_directory(bytes(tail), tail_start)
    if found is None:
        raise _no_zip(read_at, size_bytes, what)
    start, num_bytes, num_members, end = found
    if num_bytes > _MAX_DIRECTORY_BYTES or not 0 <= start <= start + num_bytes <= end:
        raise CorruptError(f"{what} is a damaged zip file: its directory cannot be at {start}")
    is_at_hand = start >= tail_start
    directory = (
        tail[start - tail_start : start - tail_start + num_bytes]
        if is_at_hand
        else read_at(start, start + num_bytes)
    )
    rows = sorted(_rows(directory, num_members, what))
    ends = [*(row[0] for row in rows), start][1:]
    return [
        Member(name, where, end, *numbers)
        for (where, name, *numbers), end in zip(rows, ends, strict=True)
    ]


def read_archive(read_at: ReadAt, size_bytes: int, what: str) -> Mapping[str, Member]:
    """Return the members of a ``torch.save`` file by their names in its root folder.

    Such as ``"data/0"``; otherwise as `read_directory`.

    Raises:
        IncompatibleError: If this is another kind of file; the message says which.
        CorruptError: If it was a zip file and is damaged, such as cut off.
    """
    rows = read_directory(read_at, size_bytes, what)
    root = _root([row.name.decode("utf-8", "replace") for row in rows], what)
    members: dict[str, Member] = {}
    for row in rows:
        if not row.is_plain:
            name = row.name.decode("utf-8", "replace")
            raise IncompatibleError(
                f"{what}: its member {name!r} is compressed or encrypted, which torch.save never"
                " does, so no part of it can be read alone; pack the file again without compression"
            )
        if row.names_end + row.size_bytes > row.next_offset:
            raise CorruptError(f"{what} is a damaged zip file: its members overlap")
        if not row.name.startswith(root):
            continue
        inner = row.name[len(root) :].decode("utf-8", "replace")
        if inner in members:
            raise CorruptError(f"{what} is a damaged zip file: it has two members {inner!r}")
        members[inner] = row
    if "data.pkl" not in members:
        raise CorruptError(f"{what} is a damaged zip file: the name of its pickle is not text")
    return members


def read_members(record: memoryview, what: str) -> Mapping[str, memoryview]:
    """Return the contents of a ``torch.save`` record in memory, otherwise as `read_archive`."""
    members = read_archive(lambda start, end: record[start:end], len(record), what)
    found = {}
    for name, one in members.items():
        start = contents_offset(one, record[one.header_offset :], what)
        found[name] = record[start : start + one.size_bytes]
    return found


def contents_offset(member: Member, header: memoryview, what: str) -> int:
    """Return where a member's contents start in the file, from its local header.

    Args:
        member: The member.
        header: Bytes of the file from ``member.header_offset`` to ``member.names_end`` at least.
        what: Name of the file, for messages.

    Raises:
        CorruptError: If there is no header of that member.
    """
    fixed = bytes(header[: LOCAL_HEADER_BYTES + len(member.name)])
    name_bytes, extra_bytes = struct.unpack_from("<HH", fixed, LOCAL_HEADER_BYTES - 4)
    start = int(member.header_offset + LOCAL_HEADER_BYTES + name_bytes + extra_bytes)
    name = fixed[LOCAL_HEADER_BYTES : LOCAL_HEADER_BYTES + name_bytes]
    is_header = fixed[:4] == LOCAL_SIGNATURE and name == member.name
    if not is_header or start + member.size_bytes > member.next_offset:
        raise CorruptError(
            f"{what} is damaged: the directory says that {member.name.decode('utf-8', 'replace')}"
            f" lies at byte {member.header_offset}, and it does not",
            start=member.header_offset,
            end=member.next_offset,
        )
    return start


def _find_directory(tail: bytes, tail_start: int) -> tuple[int, int, int, int] | None:
    """Return start, length and number of members of the directory, and its latest end."""
    at = tail.rfind(END_SIGNATURE)
    if at < 0 or at + _END.size > len(tail):
        return None
    *_, num_members, num_bytes, start, _ = _END.unpack_from(tail, at)
    end = tail_start + at
    locator = at - _LOCATOR64.size
    if locator >= 0 and tail[locator : locator + 4] == _LOCATOR64_SIGNATURE:
        _, _, at64, _ = _LOCATOR64.unpack_from(tail, locator)
        inside = at64 - tail_start
        if not 0 <= inside <= locator or tail[inside : inside + 4] != _END64_SIGNATURE:
            return None
        *_, num_members, num_bytes, start = _END64.unpack_from(tail, inside)
        end = at64
    return start, num_bytes, num_members, end


def _no_zip(read_at: ReadAt, size_bytes: int, what: str) -> Exception:
    head = bytes(read_at(0, min(size_bytes, 512)))
    if head[:4] == LOCAL_SIGNATURE:
        return CorruptError(
            f"{what} starts as a zip file and has no directory at its end: it is cut off, or was"
            f" not written to the end ({size_bytes} bytes are there)"
        )
    return IncompatibleError(f"{what} is no torch.save file: {describe_start(head, size_bytes)}")


_Row = tuple[int, bytes, int, int, int, int, int]


def _rows(directory: memoryview, num_members: int, what: str) -> Iterator[_Row]:
    """Yield offset, name, stored bytes, size, CRC32, flags and method of each member."""
    at = 0
    for _ in range(num_members):
        names = at + _CENTRAL.size
        if names > len(directory):
            raise CorruptError(f"{what} is a damaged zip file: its directory ends early")
        signature, _, _, flags, method, _, _, crc32, stored, size, name_bytes, *rest = (
            _CENTRAL.unpack_from(directory, at)
        )
        extra_bytes, comment_bytes, *_, where = rest
        if signature != _CENTRAL_SIGNATURE:
            raise CorruptError(f"{what} is a damaged zip file: its directory has no entry at {at}")
        at = names + name_bytes + extra_bytes
        if MAX32 in (size, stored, where):
            wide = wide_numbers(directory[names + name_bytes : at])
            try:
                size, stored, where = (
                    wide.pop(0) if one == MAX32 else one for one in (size, stored, where)
                )
            except IndexError as error:
                raise CorruptError(
                    f"{what} is a damaged zip file: a member of more than 4 GiB has no size"
                ) from error
        yield (
            where,
            bytes(directory[names : names + name_bytes]),
            stored,
            size,
            crc32,
            flags,
            method,
        )
        at += comment_bytes
    if at != len(directory):
        raise CorruptError(f"{what} is a damaged zip file: its directory has unknown entries")


def _root(names: Sequence[str], what: str) -> bytes:
    """Return the folder that holds ``data.pkl``, with its slash."""
    pickles = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
    roots = {name.partition("/")[0] for name in itertools.islice(pickles, 2)}
    other = describe_archive(names)
    if other is not None or len(roots) != 1:
        raise IncompatibleError(
            f"{what} is no torch.save file: {other or 'a zip file without one data.pkl'}"
        )
    return roots.pop().encode() + b"/"


# --- other kinds of files, for messages ----------------------------------------------------

# torch.save's own format before 1.6: a pickle of this number comes first.
_LEGACY_MAGIC = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_STARTS = (
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"\x1f\x8b", "a gzip file; unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd file; unpack it first"),
    (b"BZh", "a bzip2 file; unpack it first"),
    (b"\xfd7zXZ\x00", "an xz file; unpack it first"),
    (b"\x93NUMPY", "a NumPy array file"),
    (b"GGUF", "a GGUF file"),
    (b"DCPSTORE", "the manifest of a DCP checkpoint; give the URL of its folder"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file; run 'git lfs pull'"),
    (b"<", "text, such as an error page of a web server"),
)
_TAR_AT = 257


def describe_start(head: bytes, size_bytes: int) -> str:
    """Say what a file is, from its first bytes.

    Args:
        head: Up to 512 bytes.
        size_bytes: Length of the file.
    """
    if not size_bytes:
        return "it is empty"
    for start, meaning in _STARTS:
        if head.startswith(start):
            return f"it is {meaning}"
    if head[:2] == b"\x80\x02" and head[2:].startswith(_LEGACY_MAGIC):
        return (
            "it has the format of torch before 1.6 (a run of pickles, not a zip file), of which no"
            " part can be read alone; load it with torch.load and save it again with torch.save"
        )
    if head[_TAR_AT : _TAR_AT + 5] == b"ustar":
        return "it is a tar file, perhaps of torch before 0.1.10"
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "it is a plain pickle"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < size_bytes:
        return "it is a safetensors file"
    return f"it starts with {head[:8]!r}"


def describe_archive(names: Sequence[str]) -> str | None:
    """Say what a zip file is, from its members' names; None if it may be of ``torch.save``."""
    inner = {name.partition("/")[2] for name in names}
    if "constants.pkl" in inner or any(name.startswith("code/") for name in inner):
        return (
            "it is a TorchScript archive, which holds a program; load it with torch.jit.load and"
            " save its state_dict() with torch.save"
        )
    if "archive_format" in inner or any(name.startswith("models/") for name in inner):
        return "it is an archive of torch.export (.pt2)"
    if "data.pkl" in inner:
        return None
    if any(name.startswith(".data/") for name in inner):
        return "it is an archive of torch.package"
    if any(name.endswith(".npy") for name in names):
        return "it is an archive of NumPy arrays (.npz)"
    shown = ", ".join(map(repr, names[:4])) or "nothing"
    return f"it is a zip file that holds {shown} and no data.pkl"


# --- writing ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewMember:
    """One stored file of an archive that is written.

    Attributes:
        name: Path in the archive, with its root folder.
        size_bytes: Length of the contents.
        crc32: Zip's own checksum; 0 where nobody computes it.
        header_offset: Where its local header starts.
        is_zip64: Whether its sizes are written with 64 bits, even if 32 would do.
        version: Of the format that a reader must know.
        flags: Bits that say how it was written.
        date: When, in the form of DOS.
    """

    name: bytes
    size_bytes: int
    crc32: int
    header_offset: int
    is_zip64: bool = False
    version: int = 0
    flags: int = 0
    date: int = 0

    def extra64(self, stored_bytes: int) -> bytes:
        """Return the field of those numbers that do not fit 32 bits."""
        wide = [self.size_bytes, stored_bytes] if self.is_zip64 else []
        wide += [self.header_offset] if self.header_offset >= MAX32 else []
        return (
            _FIELD.pack(_ZIP64_ID, 8 * len(wide)) + struct.pack(f"<{len(wide)}Q", *wide)
            if wide
            else b""
        )

    def local_header(self, extra: bytes, crc32: int, size_bytes: int) -> bytes:
        """Return the header that precedes the contents, whose extra field says more."""
        fixed = _LOCAL.pack(
            LOCAL_SIGNATURE, self.version, self.flags, 0, 0, self.date, crc32,
            size_bytes, size_bytes, len(self.name), len(extra),
        )  # fmt: skip
        return fixed + self.name + extra

    def central_header(self) -> bytes:
        """Return its entry in the directory."""
        extra = self.extra64(self.size_bytes)
        size = MAX32 if self.is_zip64 else self.size_bytes
        fixed = _CENTRAL.pack(
            _CENTRAL_SIGNATURE, self.version, self.version, self.flags, 0, 0, self.date,
            self.crc32, size, size, len(self.name), len(extra), 0, 0, 0, 0,
            min(self.header_offset, MAX32),
        )  # fmt: skip
        return fixed + self.name + extra


def padding(offset: int, filler: bytes = b"\0") -> bytes:
    """Return an extra field at ``offset``, behind which contents may start."""
    gap = -(offset + _FIELD.size) % ALIGNMENT_BYTES
    return _FIELD.pack(_PADDING_ID, gap) + filler * gap


def end_records(
    num_members: int, start: int, num_bytes: int, start32: int, *, is_zip64: bool, made_by: int = 45
) -> bytes:
    """Return what follows the directory and closes an archive.

    Args:
        num_members: In the directory.
        start: Where the directory starts.
        num_bytes: Its length.
        start32: What to write for its start where there is room for 32 bits.
        is_zip64: Whether to write the zip64 records.
        made_by: Version that wrote it.
    """
    end64 = b""
    if is_zip64:
        end64 = _END64.pack(
            _END64_SIGNATURE, _END64.size - 12, made_by, 45, 0, 0,
            num_members, num_members, num_bytes, start,
        ) + _LOCATOR64.pack(_LOCATOR64_SIGNATURE, 0, start + num_bytes, 1)  # fmt: skip
    few = min(num_members, 0xFFFF)
    return end64 + _END.pack(END_SIGNATURE, 0, 0, few, few, min(num_bytes, MAX32), start32, 0)


class ByteSink(Protocol):
    """Where a file goes."""

    def write(self, data: Buffer) -> int:
        """Take bytes; they may be overwritten afterwards."""


class TorchZipWriter:
    """Writes a ``torch.save`` file front to back, byte for byte as torch's own writer lays it out.

    Sizes and CRC32 of a member's contents follow in a descriptor, so that nothing need be known
    before it is written. Where torch finds storages without reading their headers
    (``torch.utils.serialization.config.load.calculate_storage_offsets``), it counts on exactly
    this layout: zip64 fields where an offset or a size needs 64 bits, descriptors of 16 or 24
    bytes, none behind an empty member.

    Args:
        sink: Takes the bytes.
    """

    def __init__(self, sink: ByteSink) -> None:
        self._sink = sink
        self._members: list[NewMember] = []
        self.num_bytes = 0
        """Bytes written so far."""
        self.crc32 = 0
        """Checksum of what was written of the current storage."""

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
        self.crc32 = zlib.crc32(data, self.crc32) if crc32 is None else crc32
        self._put(data)

    def finish(self) -> None:
        """Write the last members and the directory."""
        self._write_whole("version", b"3\n")
        self._write_whole(".data/serialization_id", self._serialization_id())
        start = self.num_bytes
        for member in self._members:
            self._put(member.central_header())
        num_bytes, start32 = self.num_bytes - start, min(start, MAX32)
        count = len(self._members)
        self._put(end_records(count, start, num_bytes, start32, is_zip64=True, made_by=0x031E))

    def _write_whole(self, name: str, contents: bytes) -> None:
        with self._member(name, len(contents)):
            self.write(contents)

    @contextmanager
    def _member(self, name: str, num_bytes: int) -> Iterator[None]:
        flags = _UTF8_FLAG | (STREAMED_FLAG if num_bytes else 0)
        is_zip64 = num_bytes >= MAX32
        full_name = f"archive/{name}".encode()
        one = NewMember(full_name, num_bytes, 0, self.num_bytes, is_zip64, flags=flags)
        # The stored size is not known to a writer that streams, so torch writes 0 for it.
        extra = one.extra64(0)
        fixed_bytes = LOCAL_HEADER_BYTES + len(full_name) + len(extra)
        self._put(one.local_header(extra + padding(self.num_bytes + fixed_bytes, b"Z"), 0, 0))
        start, self.crc32 = self.num_bytes, 0
        yield
        if self.num_bytes - start != num_bytes:
            raise ValueError(f"{name} has {self.num_bytes - start} bytes instead of {num_bytes}")
        if num_bytes:
            is_large = is_zip64 or one.header_offset >= MAX32
            form = _DESCRIPTOR64 if is_large else _DESCRIPTOR
            self._put(form.pack(DESCRIPTOR_SIGNATURE, self.crc32, num_bytes, num_bytes))
        self._members.append(replace(one, crc32=self.crc32))

    def _put(self, data: Buffer) -> None:
        self._sink.write(data)
        self.num_bytes += memoryview(data).nbytes

    def _serialization_id(self) -> bytes:
        """Return 40 digits that stand for names and contents, as torch's do."""
        names = b"\0".join(one.name for one in self._members)
        crcs = b"".join(one.crc32.to_bytes(4, "little") for one in self._members)
        digests = (hashlib.blake2b(part, digest_size=8).digest() for part in (names, crcs))
        return b"".join(f"{int.from_bytes(one, 'little'):020d}".encode() for one in digests)


def overhead_bytes(num_storages: int) -> int:
    """Return an upper bound of what a file has besides its pickle and its storages."""
    return (num_storages + 8) * 400


# --- CRC32 -----------------------------------------------------------------------------
# A checksum is a polynomial over GF(2); to append n bytes is to multiply by x**(8*n).
# Idea: M. Adler's crc32_combine in zlib.

_POLYNOMIAL = 0xEDB88320  # of CRC32, bits reflected
_ONE = 1 << 31
_X_TO_THE_8 = 1 << 23


def append_crc32(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC32 of two runs of bytes, one after the other, from the CRC32 of each."""
    return _times(_shift(second_bytes), first) ^ second


@lru_cache(maxsize=256)
def _shift(num_bytes: int) -> int:
    """Return ``x**(8*num_bytes)`` modulo the polynomial."""
    power, square = _ONE, _X_TO_THE_8
    while num_bytes:
        if num_bytes & 1:
            power = _times(power, square)
        square = _times(square, square)
        num_bytes >>= 1
    return power


def _times(one: int, other: int) -> int:
    product, bit = 0, _ONE
    while bit:
        if one & bit:
            product ^= other
        other = (other >> 1) ^ _POLYNOMIAL if other & 1 else other >> 1
        bit >>= 1
    return product
