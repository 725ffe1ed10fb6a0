"""The general engine: local folders, memory, Google, and any other fsspec filesystem.

S3 has an engine of its own over s3fs, `dcpstore.store.s3fs_engine`. Requests of filesystems that
work on an event loop (Google's, Azure's, HTTP's) have time-outs of ours; others have their own.

How each kind of filesystem publishes an object whole or not at all:

=========  ================================  ===========================================
kind       put                               put_parts
=========  ================================  ===========================================
local      temporary file, flushed, then     the same temporary file, part by part
           rename, or link for create
memory     one assignment under a lock       collected, then one assignment
Google     one request under a precondition  a resumable upload
others     ``pipe_file``                     ``open(autocommit=False)``, then ``commit``
=========  ================================  ===========================================

gcsfs's own ``pipe_file`` can create but not compare, and tells no generation; its
file object can do neither. One multipart/related request does all three. Its file object also
loses an upload with one lost connection, so objects of many parts are sent here: a resumable
upload tells how far it came, and goes on from there.
"""

from __future__ import annotations

import contextlib
import io
import json
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dcpstore.errors import CheckpointError, NotFoundError, StoreError
from dcpstore.store.base import (
    Capabilities,
    CopyMode,
    CopySource,
    Fetched,
    IfMatch,
    Location,
    ObjectInfo,
    PutMode,
    StoreLimits,
    Tail,
    joined,
    limits_of,
)
from dcpstore.store.engine import Asked, Engine, PartStream, check_condition, tail_in
from dcpstore.store.fsspec_clients import FsspecClients, from_fsspec, run_within, sync_within
from dcpstore.store.local import TEMPORARY, LocalFile, folders_in
from dcpstore.store.retry import (
    RetryPolicy,
    TimeLimit,
    call_with_retries,
    copy_with_retries,
)
from dcpstore.store.s3fs_engine import S3fsStore

_DELETE_THREADS = 8
_ETAG_NAMES = ("generation", "ETag", "etag", "e_tag", "version_id", "mtime", "modified", "created")
_MODIFIED_NAMES = ("LastModified", "updated", "last_modified", "mtime", "modified", "created")
# fsspec's memory filesystem is one per process, so its conditional puts need one lock
# per process to be decided in one step.
_MEMORY_LOCK = threading.Lock()
_BLOCK = 2**18  # a resumable upload takes multiples of this
_INCOMPLETE = 308
_LONG_BYTES = 1 << 40  # of a copy that Google makes: the longest time-out


def open_fsspec(
    location: Location, options: Mapping[str, Any], policy: RetryPolicy, *, sync_local: bool = True
) -> FsspecStore | S3fsStore:
    """Open the engine over fsspec for a location."""
    kind = S3fsStore if location.scheme == "s3" else FsspecStore
    return kind(location, options, part_policy=policy, sync_local=sync_local)


class FsspecStore(Engine):
    """A `Store` on any fsspec filesystem; arguments are those of `Engine`.

    In a forked child it opens a filesystem of its own.

    Raises:
        ConfigError: If the filesystem's package is missing or an option is unknown.
    """

    _map_error = staticmethod(from_fsspec)

    def _connect(self) -> None:
        self._clients = FsspecClients(self._location, self._options)
        self._kind = _UPLOADS.get(self._location.scheme, _Upload)
        root = "/".join(part for part in (self._location.bucket, self._location.prefix) if part)
        self._root = root.rstrip("/") + "/" if root else ""

    @classmethod
    def _usual_limits(cls, scheme: str) -> StoreLimits:
        # What is sent one behind another has no number of parts.
        return replace(limits_of(scheme), max_parts=None)

    @property
    def capabilities(self) -> Capabilities:
        """What this store promises."""
        return replace(self._kind.capabilities, limits=self._limits)

    def get(self, key: str) -> Fetched:
        """Fetch a whole object. The mark is asked for first, so it is never too new."""
        path = self._path(key)

        def call() -> Fetched:
            fs = self._clients.get()
            found = info_of(key, run_within(self._time.seconds(), fs, "info", path))
            most_s = self._time.reading_s()
            return Fetched(_view(run_within(most_s, fs, "cat_file", path)), found.etag)

        return self._ask(Asked("get", key, self.url), call)

    def _fetch_range(self, asked: Asked, path: str, start: int, end: int) -> memoryview:
        def call() -> memoryview:
            fs, most_s = self._clients.get(), self._time.reading_s()
            return _view(run_within(most_s, fs, "cat_file", path, start=start, end=end))

        return self._ask(asked, call)

    def head(self, key: str) -> ObjectInfo:
        """Look an object up without its bytes."""
        path = self._path(key)

        def call() -> ObjectInfo:
            found = run_within(self._time.seconds(), self._clients.get(), "info", path)
            if found.get("type") == "directory":
                raise FileNotFoundError(f"{key} is a folder")
            return info_of(key, found)

        return self._ask(Asked("head", key, self.url), call)

    def _put(self, asked: Asked, path: str, body: memoryview, mode: PutMode) -> str | None:
        def call() -> str | None:
            return self._upload(path, body.nbytes).put(body, mode, self._time)

        if self._location.scheme != "memory":
            return self._ask(asked, call)
        with _MEMORY_LOCK:  # makes one step of two
            if mode != "overwrite":
                check_condition(asked, mode, lambda: self.head(asked.key))
            return self._ask(asked, call)

    def _put_parts(self, asked: Asked, path: str, stream: PartStream) -> str | None:
        upload = self._ask(asked, lambda: self._upload(path, stream.part_bytes))
        try:
            # Only the upload's own errors are mapped; the caller's come through.
            for part in map(joined, stream.parts):  # a file object takes one at a time
                self._ask(asked, lambda part=part: upload.write(part))  # type: ignore[misc]
                del part
            return self._ask(asked, upload.finish)
        except BaseException:
            upload.abort()
            raise

    def _upload(self, path: str, part_bytes: int) -> _Upload:
        return self._kind(self._clients.get(), path, part_bytes, self._part_policy, self._flushed)

    def copy_from(self, source: CopySource, key: str, mode: CopyMode = "overwrite") -> None:
        """Let Google copy an object, however large; nobody else is asked to."""
        asked = Asked("copy to", key, self.url).under(mode)
        paths = f"{source.bucket}/{source.path}", self._path(key)

        def call(_: float) -> None:
            self._ask(asked, lambda: rewrite(self._clients.get(), *paths, mode, self._part_policy))

        copy_with_retries(call, self._part_policy)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below the folder ``prefix``."""
        asked = Asked("list", prefix, self.url)
        below = (self._root + prefix).rstrip("/")

        def call() -> dict[str, dict[str, Any]]:
            fs = self._clients.get()
            try:
                most_s = self._time.left_s()  # it may be many requests
                found: dict[str, dict[str, Any]] = run_within(
                    most_s, fs, "find", below, detail=True
                )
            except FileNotFoundError:
                if self._location.bucket:
                    raise
                return {}  # a folder that nobody has made yet is empty
            return found

        root = self._clients.get()._strip_protocol(self._root or "/")  # noqa: SLF001 - fsspec's own API for implementers and callers alike
        cut = len(root.rstrip("/")) + 1 if root else 0
        for path, info in self._ask(asked, call).items():
            key = path[cut:]
            if info.get("type") != "directory" and key and TEMPORARY not in key:
                yield info_of(key, info)

    def _fetch_tail(self, asked: Asked, path: str, num_bytes: int) -> Tail | None:
        if self._location.scheme != "gs":
            return None

        def call() -> Tail | None:
            fs, most_s = self._clients.get(), self._time.reading_s()
            headers, data = get_end(most_s, fs, path, num_bytes)
            if "x-goog-generation" not in headers:
                return None
            told, mark = headers.get("Content-Range", ""), headers["x-goog-generation"]
            when = headers.get("Last-Modified")
            modified = None if when is None else parsedate_to_datetime(when)
            return tail_in(asked, num_bytes, told, Tail(_view(data), len(data), mark, modified))

        return self._ask(asked, call)

    def _folders(self, asked: Asked, below: str) -> Sequence[str]:
        def call() -> Sequence[str]:
            fs, scheme = self._clients.get(), self._location.scheme
            if scheme == "file":
                return folders_in(Path(below))
            if scheme == "memory":  # its own listing stops at an object that is a folder, too
                root = fs._strip_protocol(below).rstrip("/") + "/"  # noqa: SLF001 - as in `list`
                rest = [path[len(root) :] for path in list(fs.store) if path.startswith(root)]
                return sorted({name.partition("/")[0] for name in rest if "/" in name})
            if scheme == "gs":
                return prefixes_of(self._time.left_s(), fs, below)
            return self._folders_by_fsspec(fs, below.rstrip("/"))

        return self._ask(asked, call)

    def _folders_by_fsspec(self, fs: Any, below: str) -> Sequence[str]:
        try:
            found = run_within(self._time.left_s(), fs, "ls", below, detail=True)
        except FileNotFoundError:
            # An absent folder is empty, but an absent bucket is none.
            if self._location.bucket:
                run_within(self._time.left_s(), fs, "find", below, maxdepth=1)
            return []
        paths = (info["name"].rstrip("/") for info in found if info.get("type") == "directory")
        return sorted({path.rpartition("/")[2] for path in paths if path != below.rstrip("/")})

    def _delete(self, paths: Sequence[str]) -> Sequence[CheckpointError]:
        with ThreadPoolExecutor(_DELETE_THREADS, "dcpstore-delete") as pool:
            return [error for error in pool.map(self._delete_one, paths) if error is not None]

    def close(self) -> None:
        """Drop the filesystem; a later call opens a new one."""
        self._clients.close()

    def _delete_one(self, path: str) -> StoreError | None:
        fs, asked = self._clients.get(), Asked("delete", path, self.url)
        try:
            self._ask(asked, lambda: run_within(self._time.seconds(), fs, "rm_file", path))
        except NotFoundError:
            return None
        except StoreError as error:
            return error
        return None


def _view(data: Any) -> memoryview:
    if isinstance(data, BaseException):
        raise data  # some bulk calls of fsspec hand errors back as values
    return memoryview(data).toreadonly()


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


class _Upload:
    """One object on its way into a filesystem that nothing else is known of. One thread drives it.

    A stream is a file object that publishes when told to, not when closed. Subclasses know better
    ways.

    Args:
        fs: The filesystem.
        path: Of the object there.
        part_bytes: Size of every part but the last.
        policy: How long to keep trying to send a part.
        flushed: As of `LocalFile`.
    """

    capabilities = Capabilities(
        atomic_create=False, compare_and_swap=False, acknowledges_puts=False
    )

    def __init__(
        self, fs: Any, path: str, part_bytes: int, policy: RetryPolicy, flushed: set[Path] | None
    ) -> None:
        self._fs = fs
        self._path = path
        self._part_bytes = part_bytes
        self._policy = policy
        self._flushed = flushed
        self._file: Any = None

    def put(self, body: memoryview, mode: PutMode, time: TimeLimit) -> str | None:
        """Publish all of the object at once and return its mark; foreign errors come as they are.

        Nothing is written or finished then. The condition is one that this kind decides.
        """
        del mode
        run_within(time.seconds(body.nbytes), self._fs, "pipe_file", self._path, bytes(body))
        return None

    def write(self, part: memoryview) -> None:
        """Send one part; it may be refilled when this returns. The first one begins the upload."""
        if self._file is None:
            self._file = self._fs.open(
                self._path, "wb", block_size=self._part_bytes, autocommit=False
            )
        self._file.write(part)

    def finish(self) -> str | None:
        """Publish the object, at least one part of which was sent, and return its mark."""
        self._file.close()
        self._file.commit()
        return None

    def abort(self) -> None:
        """Publish nothing; never raises."""
        if self._file is None:
            return
        with contextlib.suppress(Exception):
            self._file.discard()
        # Closing would flush, and on some filesystems a flush at the end publishes.
        with contextlib.suppress(Exception):
            self._file.closed = True

    def _mark(self, path: str) -> str | None:
        return info_of(path, self._fs.info(path)).etag


class _LocalUpload(_Upload):
    """Temporary file beside the target, flushed, then one rename or link."""

    capabilities = Capabilities(atomic_create=True, compare_and_swap=False, acknowledges_puts=True)

    def put(self, body: memoryview, mode: PutMode, time: TimeLimit) -> str | None:
        del time  # nothing here can be given up in the middle
        try:
            self.write(body)
            return self.finish(is_new=mode == "create")
        finally:
            self.abort()

    def write(self, part: memoryview) -> None:
        if self._file is None:
            self._file = LocalFile(Path(self._path), self._flushed)
        self._file.write(part)

    def finish(self, *, is_new: bool = False) -> str | None:
        mark: str | None = self._file.publish(self._mark, is_new=is_new)
        return mark

    def abort(self) -> None:
        if self._file is not None:
            self._file.drop()


class _MemoryUpload(_Upload):
    """fsspec's memory filesystem; its store decides conditional puts under one lock."""

    capabilities = Capabilities(atomic_create=True, compare_and_swap=True, acknowledges_puts=True)

    def put(self, body: memoryview, mode: PutMode, time: TimeLimit) -> str | None:
        del mode, time
        self._fs.pipe_file(self._path, body)
        return self._mark(self._path)

    def write(self, part: memoryview) -> None:
        if self._file is None:
            self._file = bytearray()
        self._file += part

    def finish(self) -> str | None:
        with _MEMORY_LOCK:
            self._fs.pipe_file(self._path, self._file)
            return self._mark(self._path)

    def abort(self) -> None:
        self._file = None


class _GcsUpload(_Upload):
    """Google: a put is one request; a resumable upload appears with its last chunk, or never.

    1. POST begins a session
    2. POST of ``bytes a-b/*`` per chunk, of whole blocks; 308 tells how far Google has them
    3. POST of ``bytes a-b/total`` ends it; the answer is the object

    After a lost answer, PUT of ``bytes */*`` asks how far Google has got, and the chunk goes on
    from there.
    """

    capabilities = Capabilities(atomic_create=True, compare_and_swap=True, acknowledges_puts=True)

    def __init__(
        self, fs: Any, path: str, part_bytes: int, policy: RetryPolicy, flushed: set[Path] | None
    ) -> None:
        super().__init__(fs, path, part_bytes, policy, flushed)
        self._bucket, _, self._key = path.partition("/")
        self._session: str | None = None
        self._stored_bytes = 0
        self._tail = b""

    def put(self, body: memoryview, mode: PutMode, time: TimeLimit) -> str | None:
        fs = self._fs
        boundary = uuid.uuid4().hex
        conditions: dict[str, str] = {}
        if isinstance(mode, IfMatch):
            conditions["ifGenerationMatch"] = mode.etag
        elif mode == "create":
            conditions["ifGenerationMatch"] = "0"
        _, _, contents = _request_once(
            time.seconds(body.nbytes),
            fs,
            "POST",
            f"{fs._location}/upload/storage/v1/b/{self._bucket}/o",  # noqa: SLF001 - as its own uploads do
            uploadType="multipart",
            headers={"Content-Type": f'multipart/related; boundary="{boundary}"'},
            data=_related(boundary, self._key, body),
            **conditions,
        )
        return _generation_in(contents)

    def write(self, part: memoryview) -> None:
        num_bytes = len(self._tail) + part.nbytes
        rest_bytes = num_bytes % _BLOCK
        if rest_bytes == num_bytes:
            self._tail += part
            return
        cut = part.nbytes - rest_bytes
        body = b"".join((self._tail, part[:cut]))
        self._tail = bytes(part[cut:])
        self._send(body, "*")

    def finish(self) -> str | None:
        body, self._tail = self._tail, b""
        contents = self._send(body, str(self._stored_bytes + len(body)))
        return _generation_in(contents)

    def abort(self) -> None:
        # A session that is not cancelled is never seen by anybody and goes by itself after a
        # week, so one try is enough.
        if self._session is not None:
            with contextlib.suppress(Exception):
                _request_once(self._policy.timeout_s(), self._fs, "DELETE", self._session)

    def _send(self, body: bytes, total: str) -> bytes:
        """Send what Google has not got yet, until it has all; return what it says in the end."""
        session = self._session or self._begin()
        self._session = session
        begin, end = self._stored_bytes, self._stored_bytes + len(body)
        is_unanswered = False

        def once(left_s: float) -> bytes:
            nonlocal is_unanswered
            time = TimeLimit(self._policy).within(left_s)
            said = b""
            if is_unanswered:
                said = self._ask("PUT", session, time, "*/*", b"")
            while not said and (total != "*" or self._stored_bytes < end):
                first, rest = self._stored_bytes, body[self._stored_bytes - begin :]
                span = f"{first}-{end - 1}" if rest else "*"
                is_unanswered = True
                said = self._ask("POST", session, time, f"{span}/{total}", rest)
                is_unanswered = False
                if not (said or self._stored_bytes > first):
                    raise self._failure("Google accepted no byte of it", retryable=True)
            return said

        return call_with_retries(once, self._policy)

    def _begin(self) -> str:
        path = f"{self._fs._location}/upload/storage/v1/b/{quote(self._bucket)}/o"  # noqa: SLF001 - as above
        more = {
            "uploadType": "resumable",
            "json": {"name": self._key},
            "headers": {"X-Upload-Content-Type": "application/octet-stream"},
        }

        def once(left_s: float) -> tuple[int, Mapping[str, str], bytes]:
            time = TimeLimit(self._policy).within(left_s)
            return self._request("POST", path, time, 0, more)

        answer = call_with_retries(once, self._policy)
        return str(answer[1]["Location"])

    def _ask(self, method: str, session: str, time: TimeLimit, span: str, body: bytes) -> bytes:
        """Send bytes or a question; note how far Google is; return what it says at the end."""
        sent = {
            "Content-Range": f"bytes {span}",
            "Content-Length": str(len(body)),
            "Content-Type": "application/octet-stream",
        }
        more = {"headers": sent, "data": io.BytesIO(body)}
        status, headers, contents = self._request(method, session, time, len(body), more)
        if status != _INCOMPLETE:
            return contents
        stored_bytes = int(headers["Range"].rpartition("-")[2]) + 1 if "Range" in headers else 0
        if stored_bytes < self._stored_bytes:
            raise self._failure(f"only {stored_bytes} bytes of it are left", retryable=False)
        self._stored_bytes = stored_bytes
        return b""

    def _request(
        self, method: str, path: str, time: TimeLimit, num_bytes: int, more: dict[str, Any]
    ) -> tuple[int, Mapping[str, str], bytes]:
        try:
            return _request_once(time.seconds(num_bytes), self._fs, method, path, **more)
        except Exception as error:
            raise from_fsspec(
                Asked("put_parts", self._key, f"gs://{self._bucket}"), error
            ) from error

    def _failure(self, what: str, *, retryable: bool) -> StoreError:
        place = f"{self._key!r} in gs://{self._bucket}"
        return StoreError(f"put_parts {place} failed: {what}", key=self._key, retryable=retryable)


def _generation_in(contents: bytes) -> str | None:
    generation = json.loads(contents).get("generation")
    return str(generation) if generation else None


def rewrite(fs: Any, source_path: str, path: str, mode: PutMode, policy: RetryPolicy) -> None:
    """Copy an object by Google's servers; each call goes on where the one before stopped.

    Args:
        fs: gcsfs's filesystem.
        source_path: Bucket and key.
        path: Bucket and key of the copy, which appears when it is whole.
        mode: ``"create"`` refuses to replace.
        policy: How long one of its calls may take.
    """
    (source_bucket, _, source_key), (bucket, _, key) = (
        source_path.partition("/"),
        path.partition("/"),
    )
    more = {"ifGenerationMatch": "0"} if mode == "create" else {}
    answer: dict[str, Any] = {"done": False}
    while not answer["done"]:
        _, _, contents = _request_once(
            policy.timeout_s(_LONG_BYTES),
            fs,
            "POST",
            "b/{}/o/{}/rewriteTo/b/{}/o/{}",
            *(source_bucket, source_key, bucket, key),
            headers={"Content-Type": "application/json"},
            **more,
        )
        answer = json.loads(contents)
        more["rewriteToken"] = answer.get("rewriteToken", "")


def get_end(most_s: float, fs: Any, path: str, num_bytes: int) -> tuple[Mapping[str, str], bytes]:
    """Fetch the last bytes of an object of Google's; return headers and contents."""
    _, headers, contents = _request_once(
        most_s, fs, "GET", fs.url(path), headers={"Range": f"bytes=-{num_bytes}"}
    )
    return headers, contents


def prefixes_of(most_s: float, fs: Any, below: str) -> list[str]:
    """List the names that Google finds between a prefix and the next slash, page by page."""
    bucket, _, prefix = below.partition("/")
    more: dict[str, str] = {"prefix": prefix} if prefix else {}
    found: list[str] = []
    while True:
        _, _, contents = _request_once(most_s, fs, "GET", "b/{}/o", bucket, delimiter="/", **more)
        page = json.loads(contents)
        found += [name[len(prefix) : -1] for name in page.get("prefixes", ())]
        if not page.get("nextPageToken"):
            return found
        more["pageToken"] = page["nextPageToken"]


def _request_once(
    most_s: float, fs: Any, method: str, path: str, *arguments: str, **more: Any
) -> tuple[int, Mapping[str, str], bytes]:
    """Send one request without gcsfs's own repetitions; return status, headers and contents.

    It would repeat a conditional put whose answer was lost, and then report as a
    conflict what was its own success.
    """
    request = type(fs)._request  # noqa: SLF001 - the only way past its retries
    once = getattr(request, "__wrapped__", request)
    status, headers, _, contents = sync_within(
        most_s, fs, once, fs, method, path, *arguments, **more
    )
    return status, headers, contents


def _related(boundary: str, key: str, body: memoryview) -> io.BytesIO:
    head = (
        f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n"
        f"{json.dumps({'name': key})}\r\n"
        f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
    )
    return io.BytesIO(b"".join((head.encode(), body, f"\r\n--{boundary}--".encode())))


_UPLOADS = {"file": _LocalUpload, "memory": _MemoryUpload, "gs": _GcsUpload}
