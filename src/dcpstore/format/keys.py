"""Names of the objects of a checkpoint, relative to its folder.

See ``docs/design/001-bucket-layout.md``.
"""

from __future__ import annotations

import re
import secrets
from unicodedata import category

from dcpstore.errors import CorruptError

METADATA_KEY = ".metadata"
_MOST_NAME_BYTES = 1024  # of S3 and Google; Azure takes as many characters
_CONTROL = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
_SAVE_ID = re.compile(r"[0-9a-f]{16}")
_DATA_KEY = re.compile(r"__\d+_\d+\.([0-9a-f]{16})\.distcp")
_MANIFEST_KEY = re.compile(r"\.dcpstore-([0-9a-f]{16})")


def new_save_id() -> str:
    """Draw the mark of one rank's part in one save: 16 hex digits, never used twice."""
    return secrets.token_hex(8)


def is_save_id(value: object) -> bool:
    """Tell whether a value that was read is what `new_save_id` draws."""
    return isinstance(value, str) and _SAVE_ID.fullmatch(value) is not None


def data_key(rank: int, number: int, save_id: str) -> str:
    """Name the ``number``-th data object of a rank."""
    return f"__{rank}_{number}.{save_id}.distcp"


def manifest_key(save_id: str) -> str:
    """Name the manifest of a save, where it is an object of its own."""
    return f".dcpstore-{save_id}"


def metadata_key(rank: int | None = None) -> str:
    """Name torch's metadata: of the checkpoint, or of one rank (``use_collectives=False``)."""
    return METADATA_KEY if rank is None else f"__{rank}{METADATA_KEY}"


def save_id_of(key: str) -> str | None:
    """Return the save id in the name of one of our objects; None for any other name."""
    match = _DATA_KEY.fullmatch(key) or _MANIFEST_KEY.fullmatch(key)
    return match[1] if match else None


def check_relative(path: str) -> str:
    """Return ``path`` if it stays inside the checkpoint's folder.

    Raises:
        CorruptError: If it is absolute, climbs out with ``..``, is a URL, is longer than stores
            take, or has a control character, which no writer puts there and stores and file
            systems treat as they like.
    """
    if not path.isprintable() and any(category(char) in _CONTROL for char in path):
        raise CorruptError(
            f"the checkpoint's metadata names the object {path!r}, which has a control character;"
            " refusing to read it",
            key=path,
        )
    if len(path.encode("utf-8", "surrogatepass")) > _MOST_NAME_BYTES:
        raise CorruptError(
            f"the checkpoint's metadata names an object of {len(path)} characters,"
            f" {path[:80]!r}..., which no store takes; refusing to read it",
            key=path[:80],
        )
    parts = path.split("/")
    if not path or path.startswith("/") or "\\" in path or ".." in parts or ":" in parts[0]:
        raise CorruptError(
            f"the checkpoint's metadata names the object {path!r}, which lies outside the"
            " checkpoint's folder; refusing to read it",
            key=path,
        )
    return path
