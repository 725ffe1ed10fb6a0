"""What stores refuse by its name or size, known before the first byte is sent.

======  ==========  ==========  =========  ==========  ===================================
scheme  parts       a part      a put      an object   a key
======  ==========  ==========  =========  ==========  ===================================
s3, gs  10,000      5 GiB       5 GiB      5 TiB       1,024 bytes of UTF-8
az      50,000      4,000 MiB   5,000 MiB  4.75 TiB    1,024 characters
file                                                   4,095 bytes, 252 between slashes
======  ==========  ==========  =========  ==========  ===================================

From "Amazon S3 multipart upload limits", "Cloud Storage quotas and limits", and "Scalability and
performance targets for Blob storage", whose 4.75 TiB hold for every version of Azure's service.
Linux takes names of 255 bytes; obstore uses three for the file that it writes before the rename.

Keys, bodies and streams of parts go through the checks of this module before an engine sends them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from typing_extensions import Buffer

from dcpstore.errors import ConfigError

Part: TypeAlias = Buffer | tuple[Buffer, ...]
"""A part of an upload: its bytes, or the pieces that lie one behind the other in it."""

_MIB = 1 << 20
_GIB = 1 << 30
_TIB = 1 << 40
_ALIGN = 4096


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """The most that a store takes; None where it sets no limit.

    Attributes:
        max_parts: Parts of one object.
        max_part_bytes: Size of a part, and of what is copied in one request.
        max_put_bytes: Size of an object that is put in one request.
        max_object_bytes: Size of an object.
        max_key_bytes: Length of a key in UTF-8, below the store's root.
        max_key_chars: Length of a key in characters, below the store's root.
        max_name_bytes: Length of what stands between two slashes of a key.
    """

    max_parts: int | None = None
    max_part_bytes: int | None = None
    max_put_bytes: int | None = None
    max_object_bytes: int | None = None
    max_key_bytes: int | None = None
    max_key_chars: int | None = None
    max_name_bytes: int | None = None

    def below(self, root: str) -> StoreLimits:
        """The same for keys below a root, whose length counts too."""
        key_bytes, key_chars = self.max_key_bytes, self.max_key_chars
        return replace(
            self,
            max_key_bytes=None if key_bytes is None else key_bytes - len(root.encode()),
            max_key_chars=None if key_chars is None else key_chars - len(root),
        )

    def check_key(self, key: str) -> None:
        """Refuse a key that is too long.

        Raises:
            ConfigError: Telling how long it may be.
        """
        found = _excess(self.max_key_bytes, len(key), key, "bytes") or (
            self.max_key_chars is not None
            and len(key) > self.max_key_chars
            and f"{len(key)} characters, and {max(0, self.max_key_chars)} are left below this URL"
        )
        if not found and self.max_name_bytes is not None and 4 * len(key) > self.max_name_bytes:
            names = key.split("/")
            longest = max(names, key=len)
            found = _excess(self.max_name_bytes, len(longest), longest, "bytes between slashes")
        if found:
            raise ConfigError(f"the key {key!r} is too long: it has {found}. Choose a shorter URL")

    def check_put(self, key: str, num_bytes: int) -> None:
        """Refuse an object that is too large for one request.

        Raises:
            ConfigError: If it is.
        """
        if self.max_put_bytes is not None and num_bytes > self.max_put_bytes:
            raise ConfigError(
                f"{key!r} has {num_bytes} bytes, and the store takes {self.max_put_bytes} in one"
                " request"
            )

    def check_part(self, number: int, part_bytes: int) -> None:
        """Refuse a part that no upload takes.

        Args:
            number: Counted from 0.
            part_bytes: Its size.

        Raises:
            ConfigError: If there are too many, or it is too large.
        """
        if self.max_parts is not None and number >= self.max_parts:
            raise ConfigError(
                f"the object has more than {self.max_parts} parts of {part_bytes} bytes, the most"
                " that the store takes. Raise part_bytes"
            )
        if self.max_part_bytes is not None and part_bytes > self.max_part_bytes:
            raise ConfigError(
                f"a part of {part_bytes} bytes is larger than the {self.max_part_bytes} bytes that"
                " the store takes. Lower part_bytes"
            )

    def part_bytes_for(self, object_bytes: int, usual_bytes: int) -> int:
        """Return the usual size of parts, or the least larger one in which an object fits.

        Raises:
            ConfigError: If it fits in none.
        """
        if self.max_object_bytes is not None and object_bytes > self.max_object_bytes:
            raise ConfigError(
                f"an object of about {object_bytes} bytes is larger than the"
                f" {self.max_object_bytes} bytes that the store takes"
            )
        if self.max_parts is None or object_bytes <= self.max_parts * usual_bytes:
            return usual_bytes
        least_bytes = -(-object_bytes // self.max_parts)
        part_bytes = -(-least_bytes // _ALIGN) * _ALIGN
        self.check_part(0, part_bytes)
        return part_bytes


def limits_of(scheme: str) -> StoreLimits:
    """Return the limits of the store behind a scheme; none where nothing is known."""
    return _KNOWN.get(scheme, NO_LIMITS)


def _excess(most: int | None, num_chars: int, text: str, unit: str) -> str:
    if most is None or 4 * num_chars <= most:  # a character has four bytes at most
        return ""
    num_bytes = len(text.encode())
    return f"{num_bytes} {unit}, and {max(0, most)} may be" if num_bytes > most else ""


NO_LIMITS = StoreLimits()
_S3 = StoreLimits(
    max_parts=10_000,
    max_part_bytes=5 * _GIB,
    max_put_bytes=5 * _GIB,
    max_object_bytes=5 * _TIB,
    max_key_bytes=1024,
)
_KNOWN = {
    "s3": _S3,
    "gs": _S3,
    "az": StoreLimits(
        max_parts=50_000,
        max_part_bytes=4000 * _MIB,
        max_put_bytes=5000 * _MIB,
        max_object_bytes=19 * _TIB // 4,
        max_key_chars=1024,
    ),
    "file": StoreLimits(max_key_bytes=4095, max_name_bytes=252),
}


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
