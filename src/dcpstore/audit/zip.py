"""Zip's CRC32 of bytes that were summed in parts, by any thread, in any order.

A checksum is a polynomial over GF(2); to append ``n`` bytes is to multiply by ``x**(8*n)``.
Idea: M. Adler's ``crc32_combine`` in zlib, and its proof by polynomial arithmetic.

Where the members of a ``torch.save`` record lie, and whether its two directories agree.

A zip archive says everything twice: in the header before each member, with a descriptor
behind it, and in the directory at its end::

    | header | contents | descriptor | header | contents | descriptor | directory | end |

Only the contents have a checksum, so header and descriptor are compared with the directory.

Checks of stock checkpoints: the zip CRC32 of every member of every record.

A small record is judged in one piece. Of a large one the directory is read first, by a few
small requests; then its members are summed in parts, by any thread, in any order.

The pass over the zip records of a stock checkpoint.
"""

from __future__ import annotations

import struct
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import islice
from typing import Any

from dcpstore.audit.scan import Finding, Piece, Scanner, loss_of
from dcpstore.config import ReadConfig
from dcpstore.errors import CorruptError, NotFoundError, StoreError
from dcpstore.format.record import HEAD_BYTES, NeedMoreBytes, ParsedHead, parse_record_head
from dcpstore.format.views import RangeView
from dcpstore.format.zip import LOCAL_HEADER_BYTES, LOCAL_SIGNATURE, MAX32
from dcpstore.store.base import Store
from dcpstore.store.ranges import ByteRange, cut

_POLYNOMIAL = 0xEDB88320  # of CRC32, bits reflected
_ONE = 1 << 31
_X_TO_THE_8 = 1 << 23


def append_crc32(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC32 of two runs of bytes from the CRC32 of each.

    Args:
        first: Of the first run.
        second: Of the second run.
        second_bytes: Length of the second run.
    """
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
    for found, said in ((crc, info.CRC), (stored, info.compress_size), (size, info.file_size)):
        if found != said and not (streamed and found == 0) and found != MAX32:
            yield f"its header says {found}, the directory {said}"


def _compare_descriptor(info: zipfile.ZipInfo, found: bytes) -> Iterator[str]:
    body = found.removeprefix(_DESCRIPTOR)
    layouts = {12: "<III", 20: "<IQQ"}
    if len(body) not in layouts or (len(found) == len(body) and info.CRC):
        yield "what follows its contents is no descriptor"
        return
    said = (info.CRC, info.compress_size, info.file_size)
    if struct.unpack(layouts[len(body)], body) != said:
        yield "its descriptor differs from the directory"


_ZIP_START = b"PK\x03\x04"
_ZIP_END = b"PK\x05\x06"
_END_BYTES = 22


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


def _judge_layout(expected: Expected, data: SparseBytes) -> tuple[list[Member], list[Finding]]:
    """Read the members; return them and what is wrong apart from their contents."""
    whole = ByteRange(0, data.num_bytes)
    try:
        members = read_layout(data)
    except NotZipError as error:
        if expected.sizes is None and not _looks_like_zip(data):
            return [], []
        message = f"no torch.save record that can be read: {error}"
        return [], [expected.finding("framing", message, whole)]
    found = [
        expected.finding("framing", f"member {one.name!r}: {one.complaint}", one.frame)
        for one in members
        if one.complaint
    ]
    return members, found + list(_judge_head(expected, data))


def _looks_like_zip(data: SparseBytes) -> bool:
    end = max(0, data.num_bytes - _END_BYTES)
    starts = bytes(data.read(0, len(_ZIP_START))) == _ZIP_START
    return starts or bytes(data.read(end, len(_ZIP_END))) == _ZIP_END


def _judge_head(expected: Expected, data: SparseBytes) -> Iterator[Finding]:
    """Compare dtype and shape in the record with what the metadata say."""
    if expected.sizes is None:
        return
    num_bytes = HEAD_BYTES
    while isinstance(
        head := parse_record_head(data.read(0, num_bytes), data.num_bytes), NeedMoreBytes
    ):
        num_bytes = head.num_bytes
    assert isinstance(head, ParsedHead)
    if head.tensor is None:
        return
    dtype = str(head.tensor.dtype).removeprefix("torch.")
    if (dtype, head.tensor.shape) != (expected.dtype, expected.sizes):
        yield expected.finding(
            "mismatch",
            f"it holds {dtype} of shape {list(head.tensor.shape)}, the metadata say"
            f" {expected.dtype} of shape {list(expected.sizes)}",
            ByteRange(0, head.head_bytes),
        )


def _judge_contents(expected: Expected, member: Member, crc32: int) -> Iterator[Finding]:
    if crc32 != member.crc32:
        message = f"not the bytes that were saved (CRC32 of {member.name!r} differs)"
        yield expected.finding("checksum", message, member.contents)


@dataclass(frozen=True, slots=True)
class RecordPiece:
    """A whole record, to be judged at once."""

    expected: Expected
    coverage: Coverage

    @property
    def key(self) -> str:
        """The object."""
        return self.expected.key

    @property
    def span(self) -> ByteRange:
        """The record."""
        return self.expected.record

    def inspect(self, data: memoryview) -> Iterator[Finding]:
        """Yield a finding per damaged member."""
        sparse = SparseBytes(lambda start, end: data[start:end], len(data))
        members, found = _judge_layout(self.expected, sparse)
        for one in members:
            if one.crc32:
                crc32 = zlib.crc32(data[one.contents.start : one.contents.end])
                found += _judge_contents(self.expected, one, crc32)
        if not found:
            _count(self.coverage, members)
        yield from found


def _count(coverage: Coverage, members: list[Member]) -> None:
    checked = sum(one.contents.num_bytes for one in members if one.crc32)
    unchecked = sum(one.contents.num_bytes for one in members if not one.crc32)
    coverage.count(checked=checked, unchecked=unchecked, opaque=not members)


class LargeMember:
    """A member that is summed in parts. Thread-safe."""

    def __init__(self, expected: Expected, member: Member) -> None:
        self.expected = expected
        self.member = member
        self._sums: dict[int, tuple[int, int]] = {}

    def put(self, start: int, data: memoryview) -> None:
        """Take the part that starts at byte ``start`` of the record."""
        self._sums[start] = (zlib.crc32(data), len(data))

    def verdict(self) -> Iterator[Finding]:
        """Yield a finding if all parts came and are not what was saved."""
        if sum(size for _, size in self._sums.values()) != self.member.contents.num_bytes:
            return  # the object is lost, which is a finding of its own
        total = 0
        for _, (crc32, size) in sorted(self._sums.items()):
            total = append_crc32(total, crc32, size)
        yield from _judge_contents(self.expected, self.member, total)

    def pieces(self, request_bytes: int) -> Iterator[MemberPiece]:
        """Yield the parts to sum."""
        for part in cut(self.member.contents, request_bytes):
            yield MemberPiece(self, part)


@dataclass(frozen=True, slots=True)
class MemberPiece:
    """A part of a large member."""

    owner: LargeMember
    part: ByteRange

    @property
    def key(self) -> str:
        """The object."""
        return self.owner.expected.key

    @property
    def span(self) -> ByteRange:
        """Bytes of the object."""
        start = self.owner.expected.record.start
        return ByteRange(start + self.part.start, start + self.part.end)

    def inspect(self, data: memoryview) -> tuple[Finding, ...]:
        """Sum the part; the verdict falls when all parts are there."""
        self.owner.put(self.part.start, data)
        return ()


def open_large(
    store: Store, coverage: Coverage, expected: Expected
) -> tuple[list[LargeMember], list[Finding]]:
    """Read the directory of a large record, by a few small requests.

    Returns:
        The members that have a checksum, and what is wrong already.

    Raises:
        StoreError: If the store fails for good.
    """
    start = expected.record.start
    fetch = partial(_fetch, store, expected.key, start)
    data = SparseBytes(fetch, expected.record.num_bytes)
    try:
        members, found = _judge_layout(expected, data)
    except (CorruptError, NotFoundError, StoreError) as error:
        if isinstance(error, StoreError) and error.retryable:
            raise
        return [], [loss_of(expected.key, expected.record, error)]
    if not found:
        _count(coverage, members)
    return [LargeMember(expected, one) for one in members if one.crc32], found


def _fetch(store: Store, key: str, base: int, start: int, end: int) -> memoryview:
    return store.get_range(key, base + start, base + end)


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
        self._members: list[LargeMember] = []
        self._findings: list[Finding] = []

    def pieces(self, records: Iterable[Expected]) -> Iterator[Piece]:
        """Yield what to read: small records whole, then the members of the large ones."""
        large = []
        for expected in records:
            if expected.record.num_bytes <= self._config.request_bytes:
                yield RecordPiece(expected, self._coverage)
            else:
                large.append(expected)
        yield from self._large_pieces(iter(large))

    def _large_pieces(self, records: Iterator[Expected]) -> Iterator[Piece]:
        """Open a batch of large records at a time, while the scan reads the batch before."""
        num_at_once = self._config.max_requests
        while batch := list(islice(records, num_at_once)):
            with ThreadPoolExecutor(num_at_once, "dcpstore-audit") as executor:
                opened = list(executor.map(self._open, batch))
            for members, found in opened:
                self._findings += found
                self._members += members
                for member in members:
                    yield from member.pieces(self._config.request_bytes)

    def _open(self, expected: Expected) -> tuple[list[LargeMember], list[Finding]]:
        members, found = open_large(self._store, self._coverage, expected)
        if found:  # a second look, in case it was damaged on the way
            return open_large(self._store, self._coverage, expected)
        return members, found

    def verdicts(self, scanner: Scanner) -> Iterator[Finding]:
        """Yield what is wrong with large records, after all their pieces were read."""
        yield from self._findings
        bad = [member for member in self._members if any(member.verdict())]
        again = (p for member in bad for p in member.pieces(self._config.request_bytes))
        yield from scanner.run(again)
        for member in bad:
            yield from member.verdict()
