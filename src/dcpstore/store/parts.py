"""Buffers and streams of parts, checked before an engine sends them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from dcpstore.errors import ConfigError
from dcpstore.store.limits import StoreLimits

if TYPE_CHECKING:
    from dcpstore.store.base import Buffer, Part

__all__ = [
    "as_bytes_view",
    "check_key",
    "checked_parts",
    "checked_pieces",
    "joined",
    "num_bytes_of",
    "pieces_of",
]


def as_bytes_view(data: Buffer) -> memoryview:
    """View any contiguous buffer as flat bytes, without a copy.

    Raises:
        ConfigError: If the buffer is not contiguous.
    """
    # The same object where it is flat already: its owner may watch for its release.
    view = data if isinstance(data, memoryview) else memoryview(data)
    if not view.c_contiguous:
        raise ConfigError("a body must be contiguous in memory")
    if view.nbytes == 0:
        return memoryview(b"")
    return view if view.ndim == 1 and view.format == "B" else view.cast("B")


def check_key(key: str) -> str:
    """Return the key if every engine can store it under that very name.

    Raises:
        ConfigError: If it is empty, starts or ends with ``/``, or has an empty, ``.``
            or ``..`` segment.
    """
    if not key or any(segment in ("", ".", "..") for segment in key.split("/")):
        raise ConfigError(
            f"{key!r} is not a key: it needs non-empty segments other than '.' and '..', "
            "joined by single slashes"
        )
    return key


def pieces_of(part: Part) -> tuple[memoryview, ...]:
    """View the pieces of a part as flat bytes, without a copy."""
    pieces = part if isinstance(part, tuple) else (part,)
    return tuple(as_bytes_view(piece) for piece in pieces)


def joined(pieces: tuple[memoryview, ...]) -> memoryview:
    """Return the bytes of a part in one buffer; copies them if they lie in several."""
    return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))


def num_bytes_of(pieces: Iterable[memoryview]) -> int:
    """Return how long a part is."""
    return sum(piece.nbytes for piece in pieces)


def checked_parts(
    parts: Iterable[Part], part_bytes: int, limits: StoreLimits
) -> Iterator[memoryview]:
    """Yield the bytes of each part in one buffer and hold none of them.

    Raises:
        ConfigError: As `checked_pieces`.
    """
    for pieces in checked_pieces(parts, part_bytes, limits):
        whole = joined(pieces)
        del pieces
        yield whole
        del whole


def checked_pieces(
    parts: Iterable[Part], part_bytes: int, limits: StoreLimits
) -> Iterator[tuple[memoryview, ...]]:
    """Yield the pieces of each part as flat bytes and hold none of them.

    Raises:
        ConfigError: If a part other than the last has another size than ``part_bytes``,
            or ``part_bytes`` is not positive, or the store takes no such part.
    """
    if part_bytes <= 0:
        raise ConfigError(f"part_bytes={part_bytes} is not positive")
    short: int | None = None
    number = -1
    for part in parts:  # enumerate would hold each part until the next one is there
        number += 1
        limits.check_part(number, part_bytes)
        pieces = pieces_of(part)
        del part
        num_bytes = num_bytes_of(pieces)
        if short is not None or num_bytes > part_bytes:
            at = number if short is None else number - 1
            size = num_bytes if short is None else short
            raise ConfigError(f"part {at} has {size} bytes; all but the last need {part_bytes}")
        if num_bytes < part_bytes:
            short = num_bytes
        yield pieces
        del pieces
