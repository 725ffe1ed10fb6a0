"""Local folders, as both engines see them: files that appear whole, and are on the medium then.

A file is written under another name, flushed to the medium, and published by one rename, or by a
link if it must be new. Then the folders are flushed that lead to it. So when a put returns, a
power cut loses nothing, as far as `os.fsync` does what it promises; and whenever the power goes,
there is the old file or the new one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")
TEMPORARY = ".dcpstore-tmp-"
"""What the names begin with under which files are written."""
_UNFINISHED = re.compile(rf"{re.escape(TEMPORARY)}.*|.*#\d+", re.DOTALL)  # ours, and obstore's


def folders_in(path: Path) -> list[str]:
    """Return the names of the folders in a folder below which there is a file.

    Deletes leave empty folders behind, which no store of objects has.
    """
    try:
        with os.scandir(path) as found:
            return [one.name for one in found if one.is_dir() and _has_file(one.path)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _has_file(path: str) -> bool:
    return any(
        _UNFINISHED.fullmatch(name) is None
        for _, _, names in os.walk(path, followlinks=True)
        for name in names
    )


class LocalFile:
    """A file on its way into a folder. One thread drives it.

    Args:
        path: Its name in the end.
        flushed: The folders that a power cut leaves where they are, for `LocalFile` to note, by
            one set for all files of a store; None to flush nothing.
    """

    def __init__(self, path: Path, flushed: set[Path] | None) -> None:
        self._path = path
        self._temporary = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
        self._flushed = flushed
        try:
            self._file = self._temporary.open("xb")
        except FileNotFoundError:
            if flushed is not None:
                flushed.discard(path.parent)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._temporary.open("xb")

    def write(self, *pieces: memoryview) -> None:
        """Write on; the pieces may be refilled when this returns."""
        for piece in pieces:
            self._file.write(piece)

    def publish(self, look: Callable[[str], _T], *, is_new: bool = False) -> _T:
        """Give the file its name; return what was seen of it before.

        Args:
            look: Takes a path.
            is_new: Fail if there is a file of that name.
        """
        with self._file:
            self._file.flush()
            if self._flushed is not None:
                os.fsync(self._file.fileno())
        seen = look(self._temporary.as_posix())
        if is_new:
            os.link(self._temporary, self._path)
            self._temporary.unlink()
        else:
            self._temporary.replace(self._path)
        if self._flushed is not None:
            _flush_names(self._path.parent, self._flushed)
        return seen

    def drop(self) -> None:
        """Remove what was not published; never raises."""
        with contextlib.suppress(OSError):
            self._file.close()
            self._temporary.unlink(missing_ok=True)


def _flush_names(folder: Path, flushed: set[Path]) -> None:
    """Flush the names in a folder, and once its own and those above, whoever made them."""
    try:
        _flush_folder(folder)
        if folder not in flushed:
            above = folder
            while not above.is_mount():
                above = above.parent
                _flush_folder(above)
            flushed.add(folder)
    except OSError as error:
        # Whatever it was: unlike an error before it, it does not say that nothing was done.
        raise OSError(errno.EIO, f"{folder} could not be flushed: {error}") from error


def _flush_folder(folder: Path) -> None:
    try:
        number = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return  # a folder above may be closed to us, and to Windows all are
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # no such thing on this filesystem
            raise
    finally:
        os.close(number)
