"""Whether fetched bytes are those that were saved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from dcpstore.errors import CorruptError
from dcpstore.format.checksum import find_bad_block
from dcpstore.planning.reads import Request
from dcpstore.slots import Slot

__all__ = ["Content", "find_corruption"]

Content: TypeAlias = memoryview | tuple[memoryview, ...]
"""Bytes in one piece of memory, or in several behind each other."""


def find_corruption(
    url: str, request: Request, contents: Iterable[Content], slots: Sequence[Slot]
) -> CorruptError | None:
    """Check the pieces of a request block by block, where they have checksums.

    Args:
        url: Of the checkpoint, for the message.
        request: What was fetched.
        contents: The bytes of each piece's ``fetch`` range.
        slots: The targets, by number.

    Returns:
        An error that names the first block that is wrong; None if all are right.
    """
    for piece, content in zip(request.pieces, contents, strict=True):
        slot = slots[piece.slot]
        item = slot.item
        if item.checksums is None:
            continue
        first = (piece.fetch.start - item.payload.start) // item.block_bytes
        bad = find_bad_block(content, first, item.checksums, item.block_bytes)
        if bad is not None:
            start = item.payload.start + bad * item.block_bytes
            end = min(start + item.block_bytes, item.payload.end)
            fqn = slot.targets[0].fqn
            return CorruptError(
                f"{url}: object {request.key}, bytes [{start}, {end}) of {fqn!r} are not the"
                " bytes that were saved (CRC32C differs)",
                key=request.key,
                start=start,
                end=end,
                fqn=fqn,
            )
    return None
