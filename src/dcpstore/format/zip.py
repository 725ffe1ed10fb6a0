"""The few zip structures that a ``torch.save`` record is made of (PKWARE APPNOTE 6.3.9).

Members are stored, never compressed. Sizes that do not fit 32 bits go to the zip64
extra field and to the zip64 end records.

What a file is that is no ``torch.save`` file, so that messages can name it.

The zip directory of a ``torch.save`` file, read by ranges.

The directory at the end of the file says where the header of each member lies, and not
where its contents do: headers are padded, so that contents start at multiples of 64::

    header name padding | contents | descriptor | header name padding | contents ...
    ^ header_offset                             ^ next_offset
                        ^ = next_offset - descriptor - size, where torch wrote the file

So the contents of 20,000 tensors are found without 20,000 reads; whoever reads the first
of a member's bytes reads its header with them, and checks it. Structures: PKWARE APPNOTE 6.3.9.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dcpstore.errors import CorruptError, IncompatibleError

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
class NewMember:
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


def _extra64(member: NewMember) -> bytes:
    if not member.is_zip64:
        return b""
    return _SIZES64.pack(1, 16, member.size_bytes, member.size_bytes)


def local_header(member: NewMember, alignment: int = 0, data_base: int = 0) -> bytes:
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


def _central_header(member: NewMember) -> bytes:
    extra = _extra64(member)
    size = MAX32 if member.is_zip64 else member.size_bytes
    version = _VERSION64 if member.is_zip64 else _VERSION
    fixed = _CENTRAL.pack(
        b"PK\x01\x02", version, version, 0, 0, 0, _DOS_DATE, member.crc32, size, size,
        len(member.name), len(extra), 0, 0, 0, 0, member.header_offset,
    )  # fmt: skip
    return fixed + member.name + extra


def central_directory(members: list[NewMember], offset: int, *, force_zip64: bool = False) -> bytes:
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


ReadAt = Callable[[int, int], memoryview]
"""Read bytes ``[start, end)`` of the file."""

_TAIL_BYTES = 64 << 10  # one read that holds the whole directory of about 800 tensors
_MAX_COMMENT_BYTES = 0xFFFF
_MAX_DIRECTORY_BYTES = 1 << 30  # of 10 million tensors
_CENTRAL_HEAD = struct.Struct("<4s4xHH4xIIIHHH8xI")
_CENTRAL_BYTES = 46
_END_HEAD = struct.Struct("<4s6xHIIH")
_LOCATOR64_HEAD = struct.Struct("<4s4xQ4x")
_END64_HEAD = struct.Struct("<4s28xQQQ")
_DESCRIPTOR_FLAG, _ENCRYPTED_FLAG = 0x0008, 0x0001
_DESCRIPTOR_BYTES, _DESCRIPTOR64_BYTES = 16, 24
# What a header may have between its name and the contents: torch's padding and a zip64 field.
_MAX_EXTRA_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Member:
    """One file of the archive.

    Attributes:
        name: Path inside the archive's root folder, such as ``"data/0"``.
        full_name: With the root folder, as its header spells it.
        header_offset: Where its local header starts in the file.
        next_offset: Where what follows it starts.
        size_bytes: Length of its contents.
        crc32: Of its contents, as the directory says; 0 where the writer computed none.
        has_descriptor: Whether sizes follow the contents, too.
    """

    name: str
    full_name: bytes
    header_offset: int
    next_offset: int
    size_bytes: int
    crc32: int
    has_descriptor: bool

    @property
    def names_end(self) -> int:
        """Where the fixed part of its header and its name end in the file."""
        return self.header_offset + LOCAL_HEADER_BYTES + len(self.full_name)

    def expected_offset(self, alignment: int) -> int | None:
        """Return where the contents start if torch wrote the file; None if it cannot have.

        Args:
            alignment: Multiple at which its writer lets contents start.
        """
        is_large = self.header_offset >= MAX32 or self.size_bytes >= MAX32
        descriptor_bytes = _DESCRIPTOR64_BYTES if is_large else _DESCRIPTOR_BYTES
        start = self.next_offset - self.size_bytes
        start -= descriptor_bytes if self.has_descriptor else 0
        is_near = self.names_end <= start <= self.names_end + _MAX_EXTRA_BYTES + alignment
        return start if is_near and start % alignment == 0 else None


@dataclass(frozen=True, slots=True)
class Archive:
    """The members of a ``torch.save`` file by name, in the order in which they lie there."""

    members: Mapping[str, Member]


def read_archive(read_at: ReadAt, size_bytes: int, what: str) -> Archive:
    """Read the directory: one request for most files, two for large ones.

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
    found = _find_directory(tail, tail_start)
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
    return Archive(_members(directory, start, num_members, what))


def pickle_of(record: memoryview, what: str) -> bytes:
    """Return the pickle of a ``torch.save`` record in memory, none of whose members is packed.

    Much quicker than `read_archive` for a record of a few hundred bytes, of which a checkpoint
    may have tens of thousands.

    Raises: as `read_archive`.
    """
    end = len(record) - _END_HEAD.size
    if 0 <= end < MAX32:
        signature, num_members, num_bytes, at, _ = _END_HEAD.unpack_from(record, end)
        if signature == b"PK\x05\x06" and at + num_bytes == end:
            found = _find_pickle(bytes(record[at:end]), num_members)
            if found is not None and found[1] + LOCAL_HEADER_BYTES <= at:
                name, where, size = found
                one = Member("data.pkl", name, where, at, size, 0, has_descriptor=False)
                start = contents_offset(one, record[where:], what)
                return bytes(record[start : start + size])
    archive = read_archive(lambda first, last: record[first:last], len(record), what)
    one = archive.members["data.pkl"]
    start = contents_offset(one, record[one.header_offset :], what)
    return bytes(record[start : start + one.size_bytes])


def _find_pickle(directory: bytes, num_members: int) -> tuple[bytes, int, int] | None:
    """Return name, place and length of the pickle; None where there is anything unusual."""
    names: list[bytes] = []
    root = directory[_CENTRAL_BYTES : directory.find(b"/") + 1]
    at, found = 0, None
    while at + _CENTRAL_BYTES <= len(directory):
        signature, flags, method, _, stored, size, name_bytes, extra, comment, where = (
            _CENTRAL_HEAD.unpack_from(directory, at)
        )
        name = directory[at + _CENTRAL_BYTES : at + _CENTRAL_BYTES + name_bytes]
        is_usual = signature == b"PK\x01\x02" and method == 0 and not flags & _ENCRYPTED_FLAG
        if not is_usual or stored != size or not name.startswith(root):
            return None
        if name.endswith(b"data.pkl") and len(name) == len(root) + 8:
            found = (name, where, size)
        names.append(name)
        at += _CENTRAL_BYTES + name_bytes + extra + comment
    is_whole = at == len(directory) and len(set(names)) == len(names) == num_members
    return found if is_whole else None


def contents_offset(member: Member, header: memoryview, what: str) -> int:
    """Return where a member's contents start in the file, from its local header.

    Args:
        member: The member.
        header: Bytes of the file from ``member.header_offset`` to ``member.names_end`` at least.
        what: Name of the file, for messages.

    Raises:
        CorruptError: If there is no header of that member.
    """
    name_bytes, extra_bytes = struct.unpack_from("<HH", header, LOCAL_HEADER_BYTES - 4)
    start = int(member.header_offset + LOCAL_HEADER_BYTES + name_bytes + extra_bytes)
    name = bytes(header[LOCAL_HEADER_BYTES : LOCAL_HEADER_BYTES + name_bytes])
    is_header = bytes(header[:4]) == LOCAL_SIGNATURE and name == member.full_name
    if not is_header or start + member.size_bytes > member.next_offset:
        raise CorruptError(
            f"{what} is damaged: the directory says that {member.name} lies at byte"
            f" {member.header_offset}, and it does not",
            start=member.header_offset,
            end=member.next_offset,
        )
    return start


def _find_directory(tail: memoryview, tail_start: int) -> tuple[int, int, int, int] | None:
    """Return start, length and number of members of the directory, and its latest end."""
    text = bytes(tail)
    at = text.rfind(b"PK\x05\x06")
    if at < 0 or at + _END_HEAD.size > len(text):
        return None
    _, num_members, num_bytes, start, _ = _END_HEAD.unpack_from(text, at)
    end = tail_start + at
    locator = at - _LOCATOR64_HEAD.size
    if locator >= 0 and text[locator : locator + 4] == b"PK\x06\x07":
        (_, at64) = _LOCATOR64_HEAD.unpack_from(text, locator)
        inside = at64 - tail_start
        if not 0 <= inside <= locator or text[inside : inside + 4] != b"PK\x06\x06":
            return None
        _, num_members, num_bytes, start = _END64_HEAD.unpack_from(text, inside)
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


def _members(directory: memoryview, start: int, num_members: int, what: str) -> dict[str, Member]:
    rows = []
    packed: list[str] = []
    at = 0
    for _ in range(num_members):
        if at + _CENTRAL_BYTES > len(directory):
            raise CorruptError(f"{what} is a damaged zip file: its directory ends early")
        fields = _CENTRAL_HEAD.unpack_from(directory, at)
        signature, flags, method, crc32, stored, size, name_bytes, extra_bytes, comment, where = (
            fields
        )
        if signature != b"PK\x01\x02":
            raise CorruptError(f"{what} is a damaged zip file: its directory has no entry at {at}")
        names = at + _CENTRAL_BYTES
        name = bytes(directory[names : names + name_bytes])
        extra = directory[names + name_bytes : names + name_bytes + extra_bytes]
        if MAX32 in (size, stored, where):
            size, stored, where = _with_64_bits(extra, size, stored, where, what)
        if method != 0 or flags & _ENCRYPTED_FLAG or stored != size:
            packed.append(name.decode("utf-8", "replace"))
        rows.append((where, name, size, crc32, bool(flags & _DESCRIPTOR_FLAG)))
        at = names + name_bytes + extra_bytes + comment
    rows.sort()
    root = _root(rows, what)
    if packed:
        raise IncompatibleError(
            f"{what}: its member {packed[0]!r} is compressed or encrypted, which torch.save never"
            " does, so no part of it can be read alone; pack the file again without compression"
        )
    return _placed(rows, root, start, what)


def _with_64_bits(
    extra: memoryview, size: int, stored: int, where: int, what: str
) -> tuple[int, int, int]:
    """Take the sizes that do not fit 32 bits from the zip64 field, which holds only those."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            field = bytes(extra[at + 4 : at + 4 + length])
            wide = [number for (number,) in struct.iter_unpack("<Q", field[: length // 8 * 8])]
            try:
                values = [wide.pop(0) if one == MAX32 else one for one in (size, stored, where)]
            except IndexError:
                break
            return values[0], values[1], values[2]
        at += 4 + length
    raise CorruptError(f"{what} is a damaged zip file: a member of more than 4 GiB has no size")


def _placed(
    rows: list[tuple[int, bytes, int, int, bool]], root: bytes, directory_start: int, what: str
) -> dict[str, Member]:
    """Turn the directory's entries into members by their names in the root folder."""
    members: dict[str, Member] = {}
    ends = [row[0] for row in rows[1:]] + [directory_start]
    for (where, name, size, crc32, has_descriptor), end in zip(rows, ends, strict=True):
        if where + LOCAL_HEADER_BYTES + len(name) + size > end:
            raise CorruptError(f"{what} is a damaged zip file: its members overlap")
        if not name.startswith(root):
            continue
        inner = name[len(root) :].decode("utf-8", "replace")
        if inner in members:
            raise CorruptError(f"{what} is a damaged zip file: it has two members {inner!r}")
        members[inner] = Member(inner, name, where, end, size, crc32, has_descriptor)
    if "data.pkl" not in members:
        raise CorruptError(f"{what} is a damaged zip file: the name of its pickle is not text")
    return members


def _root(rows: list[tuple[int, bytes, int, int, bool]], what: str) -> bytes:
    """Return the folder that holds ``data.pkl``, with its slash."""
    names = [row[1].decode("utf-8", "replace") for row in rows]
    pickles = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
    roots = {name.partition("/")[0] for name in itertools.islice(pickles, 2)}
    other = describe_archive(names)
    if other is not None or len(roots) != 1:
        raise IncompatibleError(
            f"{what} is no torch.save file: {other or 'a zip file without one data.pkl'}"
        )
    return roots.pop().encode() + b"/"
