"""CRC32C per block of a payload, so that a ranged read is verifiable too.

A payload of ``n`` bytes has ``ceil(n / block_bytes)`` checksums; block ``i`` covers
payload bytes ``[i * block_bytes, (i + 1) * block_bytes)`` and the last may be short::

    payload   |--- block 0 ---|--- block 1 ---|-- 2 --|
    a slice                   |###############|#######|   verified with checksums[1:3]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import crc32c as _crc32c
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from typing_extensions import Buffer


Checksums: TypeAlias = npt.NDArray[np.uint32]


def _flat(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    if view.ndim == 1 and view.format == "B" and view.contiguous:
        return view
    return view.cast("B")


def crc32c(buffer: Buffer, value: int = 0) -> int:
    """Return the CRC32C (Castagnoli) of a buffer, carried on from ``value``.

    Releases the GIL while it runs over 32 KiB or more.

    Args:
        buffer: C-contiguous bytes; borrowed for the call.
        value: Checksum of the bytes before these; 0 at the start.
    """
    return int(_crc32c.crc32c(buffer, value))


def num_blocks(payload_bytes: int, block_bytes: int) -> int:
    """Return how many checksums a payload of ``payload_bytes`` has.

    Raises:
        ValueError: If ``block_bytes`` is not positive.
    """
    if block_bytes <= 0:
        raise ValueError(f"block_bytes must be positive, got {block_bytes}")
    return -(-payload_bytes // block_bytes)


class BlockChecksummer:
    """Checksum a payload that arrives in pieces, cut anywhere.

    One thread at a time. Buffers are borrowed for the call only.

    Args:
        block_bytes: Payload bytes per checksum.

    Raises:
        ValueError: If ``block_bytes`` is not positive.
    """

    __slots__ = ("_block_bytes", "_done", "_filled_bytes", "_value")

    def __init__(self, block_bytes: int) -> None:
        num_blocks(0, block_bytes)
        self._block_bytes = block_bytes
        self._done: list[int] = []
        self._filled_bytes = 0
        self._value = 0

    def update(self, buffer: Buffer) -> None:
        """Take the payload's next bytes."""
        view = _flat(buffer)
        start = 0
        while start < len(view):
            end = min(len(view), start + self._block_bytes - self._filled_bytes)
            self._value = crc32c(view[start:end], self._value)
            self._filled_bytes += end - start
            start = end
            if self._filled_bytes == self._block_bytes:
                self._close_block()

    def _close_block(self) -> None:
        self._done.append(self._value)
        self._filled_bytes = 0
        self._value = 0

    def finish(self) -> Checksums:
        """Close the last block and return all checksums; a new payload may follow.

        Returns:
            One uint32 per block; none for an empty payload. The caller owns the array.
        """
        if self._filled_bytes:
            self._close_block()
        checksums = np.array(self._done, dtype=np.uint32)
        self._done = []
        return checksums


def find_bad_block(
    buffer: Buffer | Sequence[memoryview],
    first_block: int,
    checksums: Checksums | Sequence[int],
    block_bytes: int,
) -> int | None:
    """Verify a slice of a payload that starts at a block and ends at one or at the payload's end.

    Args:
        buffer: The slice's bytes, in one buffer or in several behind each other; borrowed for
            the call.
        first_block: Block at which the slice starts.
        checksums: All checksums of the payload.
        block_bytes: Payload bytes per checksum.

    Returns:
        Number of the first block, counted in the payload, whose bytes are not those that
        were saved; None if all are right.

    Raises:
        ValueError: If the slice ends inside a block that is not the payload's last, or
            reaches past the last checksum.
    """
    views = [_flat(one) for one in (buffer if isinstance(buffer, (list, tuple)) else (buffer,))]
    num_bytes = sum(map(len, views))
    end_block = first_block + num_blocks(num_bytes, block_bytes)
    if first_block < 0 or end_block > len(checksums):
        raise ValueError(
            f"blocks [{first_block}, {end_block}) are outside the payload's {len(checksums)}"
        )
    if num_bytes % block_bytes and end_block < len(checksums):
        raise ValueError(f"the slice ends inside block {end_block - 1}, which is not the last")
    checksummer = BlockChecksummer(block_bytes)
    for view in views:
        checksummer.update(view)
    found = checksummer.finish()
    bad = np.flatnonzero(found != np.asarray(checksums[first_block:end_block], dtype=np.uint32))
    return first_block + int(bad[0]) if len(bad) else None
