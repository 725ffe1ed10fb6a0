"""Buffers and streams of parts, checked before an engine sends them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from dcpstore.errors import ConfigError

if TYPE_CHECKING:
    from dcpstore.store.base import Buffer

__all__ = ["as_bytes_view", "check_key", "checked_parts"]


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


def checked_parts(parts: Iterable[Buffer], part_bytes: int) -> Iterator[memoryview]:
    """Yield parts as flat bytes and hold none of them.

    Raises:
        ConfigError: If a part other than the last has another size than ``part_bytes``,
            or ``part_bytes`` is not positive.
    """
    if part_bytes <= 0:
        raise ConfigError(f"part_bytes={part_bytes} is not positive")
    short: int | None = None
    number = -1
    for part in parts:  # enumerate would hold each part until the next one is there
        number += 1
        view = as_bytes_view(part)
        del part
        if short is not None or view.nbytes > part_bytes:
            at = number if short is None else number - 1
            size = view.nbytes if short is None else short
            raise ConfigError(f"part {at} has {size} bytes; all but the last need {part_bytes}")
        if view.nbytes < part_bytes:
            short = view.nbytes
        yield view
        del view
