"""Checks of stock checkpoints: the zip CRC32 of every member of every record.

A small record is judged in one piece. Of a large one the directory is read first, by a few
small requests; then its members are summed in parts, by any thread, in any order.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from dcpstore.audit.crc32 import append_crc32
from dcpstore.audit.findings import Finding
from dcpstore.audit.scan import loss_of
from dcpstore.audit.zip_layout import Member, NotZipError, SparseBytes, read_layout
from dcpstore.errors import CorruptError, NotFoundError, StoreError
from dcpstore.format.head import HEAD_BYTES, NeedMoreBytes, ParsedHead, parse_record_head
from dcpstore.ranges import ByteRange, cut
from dcpstore.store.base import Store

__all__ = ["Coverage", "Expected", "LargeMember", "MemberPiece", "RecordPiece", "open_large"]

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
