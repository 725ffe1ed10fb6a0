"""Checks of checkpoints of ours: CRC32C per block, and the bytes around the elements.

A record is cut into pieces that can be judged alone; inner cuts lie between blocks::

    | header |--- block 0 ---|--- block 1 ---|-- 2 --| trailer |
    |<------------ piece -------->|<--------- piece ---------->|

Header and trailer have no checksum. They follow from dtype, shape and position, so they are
made again and compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dcpstore.audit.findings import Finding
from dcpstore.format.checksum import find_bad_block
from dcpstore.format.dtypes import dtype_from_name
from dcpstore.format.record import RecordLayout, plan_record
from dcpstore.manifest import ItemId, StoredItem
from dcpstore.ranges import ByteRange

__all__ = ["BlockPiece", "check_inline", "cut_record", "name_of"]


def name_of(one: ItemId) -> str:
    """Name an item for people: the key, and where a chunk of it starts."""
    if not one.offsets or not any(one.offsets):
        return one.fqn
    return f"{one.fqn} at {list(one.offsets)}"


@dataclass(frozen=True, slots=True)
class BlockPiece:
    """Bytes of one record: any of its header and trailer, whole blocks of its payload.

    Attributes:
        one: Which item.
        item: Where it lies, with checksums.
        span: Bytes of the object.
    """

    one: ItemId
    item: StoredItem
    span: ByteRange

    @property
    def key(self) -> str:
        """The object."""
        return self.item.key

    def inspect(self, data: memoryview) -> Iterator[Finding]:
        """Yield a finding per run of bad blocks and per damaged side of the frame."""
        yield from self._inspect_blocks(data)
        if self.item.kind == "raw":
            yield from self._inspect_frame(data)

    def _inspect_blocks(self, data: memoryview) -> Iterator[Finding]:
        item, payload = self.item, self.item.payload
        assert item.checksums is not None
        at = max(self.span.start, payload.start)
        end = min(self.span.end, payload.end)
        while at < end:
            first = (at - payload.start) // item.block_bytes
            view = data[at - self.span.start : end - self.span.start]
            bad = find_bad_block(view, first, item.checksums, item.block_bytes)
            if bad is None:
                return
            start = payload.start + bad * item.block_bytes
            at = min(start + item.block_bytes, payload.end)
            yield Finding(
                "checksum",
                "not the bytes that were saved (CRC32C differs)",
                self.key,
                name_of(self.one),
                ByteRange(start, at),
            )

    def _inspect_frame(self, data: memoryview) -> Iterator[Finding]:
        layout = _layout(self.item)
        sides = (
            (ByteRange(self.item.record.start, self.item.payload.start), layout.header),
            (ByteRange(self.item.payload.end, self.item.record.end), layout.trailer),
        )
        for side, expected in sides:
            start, end = max(side.start, self.span.start), min(side.end, self.span.end)
            if start >= end:
                continue
            found = data[start - self.span.start : end - self.span.start]
            if found != expected[start - side.start : end - side.start]:
                yield Finding(
                    "framing",
                    "the bytes around the elements are damaged; dcpstore does not need them, but"
                    " stock torch does",
                    self.key,
                    name_of(self.one),
                    ByteRange(start, end),
                )


def _layout(item: StoredItem) -> RecordLayout:
    return plan_record(dtype_from_name(item.dtype), item.sizes, object_offset=item.record.start)


def cut_record(
    one: ItemId, item: StoredItem, *, size_bytes: int, request_bytes: int
) -> Iterator[BlockPiece]:
    """Yield the pieces of a record that lie in an object of ``size_bytes``.

    A record that the object's end cuts off loses the block that is cut in two.
    """
    start, limit = item.record.start, min(item.record.end, size_bytes)
    while start < limit:
        end = _cut_at(item, min(start + max(request_bytes, item.block_bytes), limit))
        if end <= start:
            if limit < item.record.end:
                return  # what is left of it is less than a block
            end = limit
        yield BlockPiece(one, item, ByteRange(start, end))
        start = end


def _cut_at(item: StoredItem, position: int) -> int:
    """Move a cut back to the nearest place that splits no block."""
    payload = item.payload
    if position <= payload.start or position >= payload.end:
        return position
    whole = (position - payload.start) // item.block_bytes * item.block_bytes
    return payload.start + whole


def check_inline(one: ItemId, item: StoredItem, manifest_key: str) -> Iterator[Finding]:
    """Yield a finding if the copy in the manifest is not what its checksums say."""
    if item.inline is None or item.checksums is None:
        return
    is_long = len(item.inline) != item.payload.num_bytes
    if is_long or find_bad_block(item.inline, 0, item.checksums, item.block_bytes) is not None:
        yield Finding(
            "mismatch",
            "the copy in the manifest is not the value that was saved",
            manifest_key,
            name_of(one),
        )
