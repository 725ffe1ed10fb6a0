"""How each kind of fsspec filesystem publishes an object whole or not at all.

=========  ================================  ===========================================
kind       put                               put_parts
=========  ================================  ===========================================
local      temporary file, then rename, or   the same temporary file, part by part
           link for create
memory     one assignment under a lock       collected, then one assignment
Google     see `dcpstore.store.gcsfs_writer`
others     ``pipe_file``                     ``open(autocommit=False)``, then ``commit``
=========  ================================  ===========================================
"""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dcpstore.errors import AlreadyExistsError, ConflictError
from dcpstore.store.base import Capabilities, IfMatch, ObjectInfo
from dcpstore.store.fsspec_clients import run_within
from dcpstore.store.gcsfs_writer import GcsWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dcpstore.store.base import PutMode
    from dcpstore.store.retry import RetryPolicy, TimeLimit


TEMPORARY = ".dcpstore-tmp-"
_ETAG_NAMES = ("generation", "ETag", "etag", "e_tag", "version_id", "mtime", "modified", "created")
_MODIFIED_NAMES = ("LastModified", "updated", "last_modified", "mtime", "modified", "created")
# fsspec's memory filesystem is one per process, so its conditional puts need one lock
# per process to be decided in one step.
_MEMORY_LOCK = threading.Lock()


class Upload(Protocol):
    """One object on its way. One thread drives it."""

    def write(self, part: memoryview) -> None:
        """Send one part; it may be refilled when this returns."""

    def finish(self) -> str | None:
        """Publish the object and return its mark."""

    def abort(self) -> None:
        """Publish nothing; never raises."""


class Writer(Protocol):
    """A filesystem's way to publish."""

    @property
    def capabilities(self) -> Capabilities:
        """What this way can promise."""

    def put(
        self, fs: Any, path: str, body: memoryview, mode: PutMode, time: TimeLimit
    ) -> str | None:
        """Publish one object; foreign errors come as they are."""

    def open_upload(self, get_fs: Callable[[], Any], path: str, part_bytes: int) -> Upload:
        """Begin an object of many parts; no request is made before the first write."""


def writer_for(scheme: str, policy: RetryPolicy) -> Writer:
    """Return the way to publish on a scheme's filesystem.

    Args:
        scheme: Of the URL.
        policy: How long to keep trying to send a part.
    """
    if scheme == "file":
        return _LocalWriter()
    if scheme == "memory":
        return _MemoryWriter()
    if scheme == "gs":
        return GcsWriter(policy)
    return _StreamWriter()


def info_of(key: str, info: Mapping[str, Any]) -> ObjectInfo:
    """Read fsspec's description of an object."""
    mark = next((info[name] for name in _ETAG_NAMES if info.get(name)), None)
    when = next((info[name] for name in _MODIFIED_NAMES if info.get(name)), None)
    if isinstance(mark, datetime | float):  # memory's find and info differ in its type
        mark = _as_time(mark)
    etag = None if mark is None else str(mark)
    if "ino" in info:  # a local file: its time alone may be too coarse
        etag = f"{info['ino']:x}-{info.get('mtime', 0)}-{info['size']:x}"
    return ObjectInfo(key, int(info.get("size") or 0), etag, _as_time(when))


def _as_time(when: Any) -> datetime | None:
    if isinstance(when, int | float):
        return datetime.fromtimestamp(when, timezone.utc)
    if isinstance(when, str):
        try:
            when = datetime.fromisoformat(when.replace("Z", "+00:00"))
        except ValueError:
            return None
    if isinstance(when, datetime):
        return when if when.tzinfo is not None else when.replace(tzinfo=timezone.utc)
    return None


def _mark_at(fs: Any, path: str) -> str | None:
    return info_of(path, fs.info(path)).etag


def _compare(fs: Any, path: str, mode: IfMatch) -> None:
    try:
        found = _mark_at(fs, path)
    except FileNotFoundError as error:
        raise ConflictError(f"put {path!r}: the object is gone") from error
    if found != mode.etag:
        raise ConflictError(f"put {path!r}: its ETag is {found}, not {mode.etag}")


class _LocalWriter:
    """Temporary file beside the target, then one rename or link."""

    capabilities = Capabilities(
        atomic_create=True, compare_and_swap=False, parallel_parts=False, acknowledges_puts=True
    )

    def put(
        self, fs: Any, path: str, body: memoryview, mode: PutMode, time: TimeLimit
    ) -> str | None:
        del time  # nothing here can be given up in the middle
        upload = _LocalUpload(lambda: fs, path)
        try:
            upload.write(body)
            if isinstance(mode, IfMatch):
                _compare(fs, path, mode)
            return upload.finish(is_new=mode == "create")
        finally:
            upload.abort()

    def open_upload(self, get_fs: Callable[[], Any], path: str, part_bytes: int) -> Upload:
        del part_bytes
        return _LocalUpload(get_fs, path)


class _LocalUpload:
    def __init__(self, get_fs: Callable[[], Any], path: str) -> None:
        self._get_fs = get_fs
        self._target = Path(path)
        self._temporary = self._target.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
        self._file: Any = None

    def write(self, part: memoryview) -> None:
        if self._file is None:
            self._target.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._temporary.open("xb")
        self._file.write(part)

    def finish(self, *, is_new: bool = False) -> str | None:
        if self._file is None:
            self.write(memoryview(b""))
        self._file.close()
        if is_new:
            os.link(self._temporary, self._target)
            self._temporary.unlink()
        else:
            self._temporary.replace(self._target)
        return _mark_at(self._get_fs(), str(self._target))

    def abort(self) -> None:
        if self._file is not None:
            self._file.close()
            with contextlib.suppress(OSError):
                self._temporary.unlink(missing_ok=True)


class _MemoryWriter:
    """fsspec's memory filesystem; conditional puts are decided under one lock."""

    capabilities = Capabilities(
        atomic_create=True, compare_and_swap=True, parallel_parts=False, acknowledges_puts=True
    )

    def put(
        self, fs: Any, path: str, body: memoryview, mode: PutMode, time: TimeLimit | None = None
    ) -> str | None:
        del time
        with _MEMORY_LOCK:
            if mode == "create" and fs.isfile(path):
                raise AlreadyExistsError(f"put {path!r}: the object exists already")
            if isinstance(mode, IfMatch):
                _compare(fs, path, mode)
            fs.pipe_file(path, body)
            return _mark_at(fs, path)

    def open_upload(self, get_fs: Callable[[], Any], path: str, part_bytes: int) -> Upload:
        del part_bytes
        return _CollectedUpload(self, get_fs, path)


class _CollectedUpload:
    def __init__(self, writer: _MemoryWriter, get_fs: Callable[[], Any], path: str) -> None:
        self._writer = writer
        self._get_fs = get_fs
        self._path = path
        self._bytes = bytearray()

    def write(self, part: memoryview) -> None:
        self._bytes += part

    def finish(self) -> str | None:
        body = memoryview(self._bytes)
        return self._writer.put(self._get_fs(), self._path, body, "overwrite")

    def abort(self) -> None:
        self._bytes = bytearray()


class _StreamWriter:
    """Any other filesystem: looks first where the caller sets a condition."""

    capabilities = Capabilities(
        atomic_create=False, compare_and_swap=False, parallel_parts=False, acknowledges_puts=False
    )

    def put(
        self, fs: Any, path: str, body: memoryview, mode: PutMode, time: TimeLimit
    ) -> str | None:
        if mode == "create" and run_within(time.seconds(), fs, "exists", path):
            raise AlreadyExistsError(f"put {path!r}: the object exists already")
        if isinstance(mode, IfMatch):
            _compare(fs, path, mode)
        run_within(time.seconds(body.nbytes), fs, "pipe_file", path, bytes(body))
        return None

    def open_upload(self, get_fs: Callable[[], Any], path: str, part_bytes: int) -> Upload:
        return _StreamUpload(get_fs, path, part_bytes)


class _StreamUpload:
    """A file object that publishes when told to, not when closed."""

    def __init__(self, get_fs: Callable[[], Any], path: str, part_bytes: int) -> None:
        self._get_fs = get_fs
        self._path = path
        self._part_bytes = part_bytes
        self._file: Any = None

    def write(self, part: memoryview) -> None:
        if self._file is None:
            self._file = self._get_fs().open(
                self._path, "wb", block_size=self._part_bytes, autocommit=False
            )
        self._file.write(part)

    def finish(self) -> str | None:
        if self._file is None:
            self.write(memoryview(b""))
        self._file.close()
        self._file.commit()
        return None

    def abort(self) -> None:
        if self._file is None:
            return
        with contextlib.suppress(Exception):
            self._file.discard()
        # Closing would flush, and on some filesystems a flush at the end publishes.
        with contextlib.suppress(Exception):
            self._file.closed = True
