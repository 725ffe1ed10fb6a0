"""Where the members of a ``torch.save`` record lie, and whether its two directories agree.

A zip archive says everything twice: in the header before each member, with a descriptor
behind it, and in the directory at its end::

    | header | contents | descriptor | header | contents | descriptor | directory | end |

Only the contents have a checksum, so header and descriptor are compared with the directory.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dcpstore.format.zipfmt import LOCAL_HEADER_BYTES, LOCAL_SIGNATURE, MAX32
from dcpstore.ranges import ByteRange
from dcpstore.views import RangeView

__all__ = ["Member", "NotZipError", "SparseBytes", "read_layout"]

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_DESCRIPTOR = b"PK\x07\x08"
_IS_STREAMED = 0x0008
_READ_AHEAD_BYTES = 4096
_TAIL_BYTES = 16 << 10
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    NotImplementedError,
    ValueError,
    struct.error,
    OverflowError,
    IndexError,
    OSError,
)


class NotZipError(Exception):
    """These bytes are no zip archive, or one whose directory is damaged."""


@dataclass(frozen=True, slots=True)
class Member:
    """A stored file of an archive.

    Attributes:
        name: Path inside the archive.
        contents: Its bytes, counted from the archive's start.
        crc32: Of the contents; 0 where the writer computed none.
        complaint: What does not fit between header, descriptor and directory; or empty.
        frame: The bytes that `complaint` is about.
    """

    name: str
    contents: ByteRange
    crc32: int
    complaint: str
    frame: ByteRange


class SparseBytes:
    """A record of which only the parts that are looked at are fetched. One thread at a time.

    Args:
        fetch: Fetches bytes ``[start, end)`` of the record.
        num_bytes: Length of the record.
    """

    def __init__(self, fetch: Callable[[int, int], memoryview], num_bytes: int) -> None:
        self._fetch = fetch
        self.num_bytes = num_bytes
        self._parts: list[tuple[int, memoryview]] = []

    def prefetch(self, start: int, end: int) -> None:
        """Fetch bytes ``[start, end)``, as far as there are any."""
        start, end = max(start, 0), min(end, self.num_bytes)
        self._parts.append((start, self._fetch(start, end)))

    def read(self, start: int, num_bytes: int) -> memoryview:
        """Return bytes from ``start`` on; fewer only at the record's end."""
        end = min(start + num_bytes, self.num_bytes)
        for at, part in self._parts:
            if at <= start and end <= at + len(part):
                return part[start - at : end - at]
        self.prefetch(start, max(end, start + _READ_AHEAD_BYTES))
        at, part = self._parts[-1]
        return part[start - at : end - at]


def read_layout(data: SparseBytes) -> list[Member]:
    """Return the members of an archive in the order of their contents.

    Raises:
        NotZipError: If there is no directory that can be read.
    """
    data.prefetch(data.num_bytes - _TAIL_BYTES, data.num_bytes)
    view = RangeView.over_reader(data.read, 0, data.num_bytes)
    try:
        with zipfile.ZipFile(view) as archive:
            infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
            ends = [info.header_offset for info in infos[1:]] + [archive.start_dir]
        return [_member(data, info, end) for info, end in zip(infos, ends, strict=True)]
    except _ZIP_ERRORS as error:
        raise NotZipError(str(error) or type(error).__name__) from error


def _member(data: SparseBytes, info: zipfile.ZipInfo, end: int) -> Member:
    """Read a member's header; ``end`` is where the next one, or the directory, starts."""
    start = info.header_offset
    fixed = _LOCAL.unpack(data.read(start, LOCAL_HEADER_BYTES))
    name_bytes, extra_bytes = fixed[9:]
    name = bytes(data.read(start + LOCAL_HEADER_BYTES, name_bytes))
    contents_at = start + LOCAL_HEADER_BYTES + name_bytes + extra_bytes
    contents = ByteRange(contents_at, contents_at + info.compress_size)
    complaints = list(_compare_header(info, fixed, name))
    if contents.end > end:
        complaints.append("its contents reach into what follows them")
        # Whatever these lengths are, the contents are not there: judge what can be theirs.
        contents = ByteRange(min(contents_at, end), end)
    elif info.flag_bits & _IS_STREAMED:
        complaints += _compare_descriptor(info, bytes(data.read(contents.end, end - contents.end)))
    frame = ByteRange(start, max(contents.start, start))
    return Member(info.filename, contents, info.CRC, "; ".join(complaints), frame)


def _compare_header(info: zipfile.ZipInfo, fixed: tuple[Any, ...], name: bytes) -> Iterator[str]:
    signature, _, flags, method, _, _, crc, stored, size = fixed[:9]
    if signature != LOCAL_SIGNATURE:
        yield "no header where the directory says one is"
        return
    if (flags, method) != (info.flag_bits, info.compress_type):
        yield "flags or method differ from the directory"
    if name.decode("utf-8", "replace") != info.orig_filename:
        yield "its name differs from the directory"
    if info.compress_type != zipfile.ZIP_STORED:
        yield "compressed, which torch.save never does"
    streamed = bool(info.flag_bits & _IS_STREAMED)
    for field, said in ((crc, info.CRC), (stored, info.compress_size), (size, info.file_size)):
        if field != said and not (streamed and field == 0) and field != MAX32:
            yield f"its header says {field}, the directory {said}"


def _compare_descriptor(info: zipfile.ZipInfo, found: bytes) -> Iterator[str]:
    body = found.removeprefix(_DESCRIPTOR)
    layouts = {12: "<III", 20: "<IQQ"}
    if len(body) not in layouts or (len(found) == len(body) and info.CRC):
        yield "what follows its contents is no descriptor"
        return
    said = (info.CRC, info.compress_size, info.file_size)
    if struct.unpack(layouts[len(body)], body) != said:
        yield "its descriptor differs from the directory"
