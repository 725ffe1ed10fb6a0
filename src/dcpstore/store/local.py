"""Local folders, as both engines see them."""

from __future__ import annotations

import os
import re

TEMPORARY = ".dcpstore-tmp-"
"""What the names begin with under which files are written."""
_UNFINISHED = re.compile(rf"{re.escape(TEMPORARY)}.*|.*#\d+", re.DOTALL)  # ours, and obstore's


def folders_in(path: str) -> list[str]:
    """Return the names of the folders in a folder below which there is a file.

    Deletes leave empty folders behind, which no store of objects has.
    """
    try:
        with os.scandir(path or "/") as found:
            return [one.name for one in found if one.is_dir() and _has_file(one.path)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _has_file(path: str) -> bool:
    return any(
        _UNFINISHED.fullmatch(name) is None
        for _, _, names in os.walk(path, followlinks=True)
        for name in names
    )
