"""Checks of stock checkpoints: the zip records that hold their tensors and values.

Only the contents of a zip member have a checksum (CRC32), so what the header before a member and
the descriptor behind it say is compared with the directory.

A small record is judged in one piece. Of a large one the directory is read first, by a few
small requests; then its members are summed in parts, by any thread, in any order.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from dcpstore.audit.scan import Finding, Piece, Scanner, loss_of
from dcpstore.config import ReadConfig
from dcpstore.errors import CorruptError, IncompatibleError, NotFoundError, StoreError
from dcpstore.format.dtypes import dtype_name
from dcpstore.format.zip import (
    DESCRIPTOR_SIGNATURE,
    END_BYTES,
    END_SIGNATURE,
    LOCAL_SIGNATURE,
    MAX32,
    STREAMED_FLAG,
    LocalHeader,
    Member,
    append_crc32,
    read_directory,
    read_local_header,
)
from dcpstore.read.targets import find_tensor
from dcpstore.store.base import ByteRange, Store
from dcpstore.store.ranges import cut

_READ_AHEAD_BYTES = 4096


class _SparseBytes:
    """A record of which only the parts that are looked at are fetched. One thread at a time.

    Args:
        fetch: Fetches bytes ``[start, end)`` of the record.
        num_bytes: Length of the record.
    """

    def __init__(self, fetch: Callable[[int, int], memoryview], num_bytes: int) -> None:
        self._fetch = fetch
        self.num_bytes = num_bytes
        self._parts: list[tuple[int, memoryview]] = []

    def read(self, start: int, end: int) -> memoryview:
        """Return bytes ``[start, end)``; fewer only at the record's end."""
        end = min(end, self.num_bytes)
        for at, part in self._parts:
            if at <= start and end <= at + len(part):
                return part[start - at : end - at]
        part = self._fetch(start, min(max(end, start + _READ_AHEAD_BYTES), self.num_bytes))
        self._parts.append((start, part))
        return part[: end - start]


@dataclass(frozen=True, slots=True)
class _Place:
    """A member of a record.

    Attributes:
        name: Its path in the archive.
        crc32: Of its contents; 0 where the writer computed none.
        contents: Its bytes, counted from the record's start.
        complaint: What does not fit between header, descriptor and directory; or empty.
        frame: The bytes that `complaint` is about.
    """

    name: str
    crc32: int
    contents: ByteRange
    complaint: str
    frame: ByteRange


def _place(data: _SparseBytes, member: Member) -> _Place:
    """Read a member's header and its descriptor, and compare them with the directory."""
    name = member.name.decode("utf-8", "replace")
    start, end = member.header_offset, member.next_offset
    try:
        header = read_local_header(data.read(start, start + _READ_AHEAD_BYTES), 0)
    except ValueError:
        header = 0
    if isinstance(header, int):
        problem = "no header where the directory says one is"
        return _Place(name, 0, ByteRange(end, end), problem, ByteRange(start, end))
    at = start + header.contents
    contents = ByteRange(at, at + member.stored_bytes)
    complaints = list(_compare_header(member, header))
    if contents.end > end:
        complaints.append("its contents reach into what follows them")
        # Whatever these lengths are, the contents are not there: judge what can be theirs.
        contents = ByteRange(min(at, end), end)
    elif member.flags & STREAMED_FLAG:
        found = bytes(data.read(contents.end, end))
        complaints += _compare_descriptor(member, found)
    return _Place(name, member.crc32, contents, "; ".join(complaints), ByteRange(start, at))


def _compare_header(member: Member, header: LocalHeader) -> Iterator[str]:
    if (header.flags, header.method) != (member.flags, member.method):
        yield "flags or method differ from the directory"
    if header.name != member.name:
        yield "its name differs from the directory"
    if member.method != 0:
        yield "compressed, which torch.save never does"
    streamed = bool(member.flags & STREAMED_FLAG)
    for found, said in (
        (header.crc32, member.crc32),
        (header.stored_bytes, member.stored_bytes),
        (header.size_bytes, member.size_bytes),
    ):
        if found != said and not (streamed and found == 0) and found != MAX32:
            yield f"its header says {found}, the directory {said}"


def _compare_descriptor(member: Member, found: bytes) -> Iterator[str]:
    body = found.removeprefix(DESCRIPTOR_SIGNATURE)
    layouts = {12: "<III", 20: "<IQQ"}
    if len(body) not in layouts or (len(found) == len(body) and member.crc32):
        yield "what follows its contents is no descriptor"
        return
    said = (member.crc32, member.stored_bytes, member.size_bytes)
    if struct.unpack(layouts[len(body)], body) != said:
        yield "its descriptor differs from the directory"


@dataclass(frozen=True, slots=True)
class Expected:
    """What the metadata say of a record.

    Attributes:
        key: The object.
        record: Bytes of the object.
        name: Of the item, for people.
        dtype: Name of the tensor's dtype; empty for a value.
        sizes: Shape of the chunk; None for a value.
    """

    key: str
    record: ByteRange
    name: str
    dtype: str = ""
    sizes: tuple[int, ...] | None = None

    def finding(self, kind: str, message: str, inner: ByteRange) -> Finding:
        """Make a finding about bytes counted from the record's start."""
        start = self.record.start
        span = ByteRange(start + inner.start, start + inner.end)
        return Finding(kind, message, self.key, self.name, span)  # type: ignore[arg-type]


@dataclass(slots=True)
class Coverage:
    """How many bytes had a checksum. Shared by all records; thread-safe."""

    checked_bytes: int = 0
    unchecked_bytes: int = 0
    num_opaque: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, *, checked: int = 0, unchecked: int = 0, opaque: int = 0) -> None:
        """Add to the counts."""
        with self._lock:
            self.checked_bytes += checked
            self.unchecked_bytes += unchecked
            self.num_opaque += opaque


def _judge_layout(expected: Expected, data: _SparseBytes) -> tuple[list[_Place], list[Finding]]:
    """Read the members; return them and what is wrong apart from their contents."""
    try:
        directory = read_directory(data.read, data.num_bytes, "it")
        members = [_place(data, one) for one in directory]
    except (CorruptError, IncompatibleError) as error:
        if expected.sizes is None and not _looks_like_zip(data):
            return [], []
        message = f"no torch.save record that can be read: {error}"
        return [], [expected.finding("framing", message, ByteRange(0, data.num_bytes))]
    found = [
        expected.finding("framing", f"member {one.name!r}: {one.complaint}", one.frame)
        for one in members
        if one.complaint
    ]
    return members, found + list(_judge_head(expected, data))


def _looks_like_zip(data: _SparseBytes) -> bool:
    end = max(0, data.num_bytes - END_BYTES)
    return data.read(0, 4) == LOCAL_SIGNATURE or data.read(end, end + 4) == END_SIGNATURE


def _judge_head(expected: Expected, data: _SparseBytes) -> Iterator[Finding]:
    """Compare dtype and shape in the record with what the metadata say."""
    if expected.sizes is None:
        return
    found = find_tensor(data.read, data.num_bytes)
    if found is None:
        return
    dtype, sizes = dtype_name(found.place.dtype), found.place.sizes
    if (dtype, sizes) != (expected.dtype, expected.sizes):
        yield expected.finding(
            "mismatch",
            f"it holds {dtype} of shape {list(sizes)}, the metadata say"
            f" {expected.dtype} of shape {list(expected.sizes)}",
            ByteRange(0, found.storage.start),
        )


def _judge_contents(expected: Expected, member: _Place, crc32: int) -> Iterator[Finding]:
    if crc32 != member.crc32:
        message = f"not the bytes that were saved (CRC32 of {member.name!r} differs)"
        yield expected.finding("checksum", message, member.contents)


class _LargeMember:
    """A member that is summed in parts. Thread-safe."""

    def __init__(self, expected: Expected, member: _Place) -> None:
        self._expected = expected
        self._member = member
        self._sums: dict[int, tuple[int, int]] = {}

    def pieces(self, request_bytes: int) -> Iterator[Piece]:
        """Yield the parts to sum."""
        at = self._expected.record.start
        for part in cut(self._member.contents, request_bytes):
            span = ByteRange(at + part.start, at + part.end)
            yield Piece(self._expected.key, span, partial(self._sum, part.start))

    def _sum(self, start: int, data: memoryview) -> tuple[Finding, ...]:
        """Sum the part that starts at byte ``start`` of the record; see `verdict`."""
        self._sums[start] = (zlib.crc32(data), len(data))
        return ()

    def verdict(self) -> Iterator[Finding]:
        """Yield a finding if all parts came and are not what was saved."""
        if sum(size for _, size in self._sums.values()) != self._member.contents.num_bytes:
            return  # the object is lost, which is a finding of its own
        total = 0
        for _, (crc32, size) in sorted(self._sums.items()):
            total = append_crc32(total, crc32, size)
        yield from _judge_contents(self._expected, self._member, total)


class ZipScan:
    """Plans the pieces of zip records and collects the verdicts on large members.

    Args:
        store: Rooted at the checkpoint's folder.
        config: Size and number of requests.
        coverage: Counts what has a checksum.
    """

    def __init__(self, store: Store, config: ReadConfig, coverage: Coverage) -> None:
        self._store = store
        self._config = config
        self._coverage = coverage
        self._members: list[_LargeMember] = []
        self._findings: list[Finding] = []

    def pieces(self, records: Iterable[Expected]) -> Iterator[Piece]:
        """Yield what to read: small records whole, then the members of the large ones."""
        large = []
        for expected in records:
            if expected.record.num_bytes <= self._config.request_bytes:
                yield Piece(expected.key, expected.record, partial(self._inspect, expected))
            else:
                large.append(expected)
        yield from self._large_pieces(iter(large))

    def _inspect(self, expected: Expected, data: memoryview) -> list[Finding]:
        """Judge a whole record; return a finding per damaged member."""
        record = _SparseBytes(lambda start, end: data[start:end], len(data))
        members, found = _judge_layout(expected, record)
        for one in members:
            if one.crc32:
                crc32 = zlib.crc32(data[one.contents.start : one.contents.end])
                found += _judge_contents(expected, one, crc32)
        if not found:
            self._count(members)
        return found

    def _count(self, members: list[_Place]) -> None:
        checked = sum(one.contents.num_bytes for one in members if one.crc32)
        unchecked = sum(one.contents.num_bytes for one in members if not one.crc32)
        self._coverage.count(checked=checked, unchecked=unchecked, opaque=not members)

    def _large_pieces(self, records: Iterator[Expected]) -> Iterator[Piece]:
        """Open a batch of large records at a time, while the scan reads the batch before."""
        num_at_once = self._config.max_requests
        while batch := list(islice(records, num_at_once)):
            with ThreadPoolExecutor(num_at_once, "dcpstore-audit") as executor:
                opened = list(executor.map(self._open_twice_if_damaged, batch))
            for expected, (members, found) in zip(batch, opened, strict=True):
                self._findings += found
                if not found:
                    self._count(members)
                for one in members:
                    if one.crc32:
                        member = _LargeMember(expected, one)
                        self._members.append(member)
                        yield from member.pieces(self._config.request_bytes)

    def _open_twice_if_damaged(self, expected: Expected) -> tuple[list[_Place], list[Finding]]:
        members, found = self._open(expected)
        return self._open(expected) if found else (members, found)

    def _open(self, expected: Expected) -> tuple[list[_Place], list[Finding]]:
        """Read the directory of a large record; return its members and what is wrong with them.

        Raises:
            StoreError: If the store fails for good.
        """
        at = expected.record.start
        data = _SparseBytes(
            lambda start, end: self._store.get_range(expected.key, at + start, at + end),
            expected.record.num_bytes,
        )
        try:
            return _judge_layout(expected, data)
        except (CorruptError, NotFoundError, StoreError) as error:
            if isinstance(error, StoreError) and error.retryable:
                raise
            return [], [loss_of(expected.key, expected.record, error)]

    def verdicts(self, scanner: Scanner) -> Iterator[Finding]:
        """Yield what is wrong with large records, after all their pieces were read."""
        yield from self._findings
        bad = [member for member in self._members if any(member.verdict())]
        again = (p for member in bad for p in member.pieces(self._config.request_bytes))
        yield from scanner.run(again)
        for member in bad:
            yield from member.verdict()
