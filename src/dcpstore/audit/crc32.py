"""Zip's CRC32 of bytes that were summed in parts, by any thread, in any order.

A checksum is a polynomial over GF(2); to append ``n`` bytes is to multiply by ``x**(8*n)``.
Idea: M. Adler's ``crc32_combine`` in zlib, and its proof by polynomial arithmetic.
"""

from __future__ import annotations

from functools import lru_cache

__all__ = ["append_crc32"]

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
