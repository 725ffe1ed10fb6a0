"""CRC32, as zip files have it, of bytes whose parts were checksummed apart."""

from __future__ import annotations

from functools import cache

__all__ = ["combine"]

_POLYNOMIAL = 0xEDB88320  # CRC-32 of ISO 3309, bits reversed, as zlib has it


def combine(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC32 of two runs of bytes, one after the other.

    Appending zeros to the first run is a linear map of its checksum's 32 bits; the map for
    ``2**k`` zeros is the square of that for ``2**(k-1)``.

    Args:
        first: Checksum of the first run.
        second: Checksum of the second run.
        second_bytes: Length of the second run.
    """
    level = 0
    while second_bytes:
        if second_bytes & 1:
            first = _apply(_zeros(level), first)
        second_bytes >>= 1
        level += 1
    return first ^ second


@cache
def _zeros(level: int) -> tuple[int, ...]:
    """Return the map of ``2**level`` zero bytes: the image of each of the 32 bits."""
    if level:
        half = _zeros(level - 1)
        return tuple(_apply(half, row) for row in half)
    images = []
    for bit in range(32):
        value = 1 << bit
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        images.append(value)
    return tuple(images)


def _apply(images: tuple[int, ...], value: int) -> int:
    out = 0
    for image in images:
        if value & 1:
            out ^= image
        value >>= 1
    return out
