"""How gcsfs publishes an object: generations as marks, preconditions on every put.

gcsfs's own ``pipe_file`` can create but not compare, and tells no generation; its
file object can do neither. One multipart/related request does all three. Its file object also
loses an upload with one lost connection, so objects of many parts are sent here: a resumable
upload tells how far it came, and goes on from there.
"""

from __future__ import annotations

import contextlib
import io
import json
import uuid
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from dcpstore.errors import StoreError
from dcpstore.store.base import Capabilities, IfMatch
from dcpstore.store.error_map import Asked, from_fsspec
from dcpstore.store.fsspec_clients import sync_within
from dcpstore.store.retry import Deadline, RetryPolicy, TimeLimit, call_with_retries

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dcpstore.store.base import PutMode
    from dcpstore.store.fsspec_writers import Upload


_BLOCK = 2**18  # a resumable upload takes multiples of this
_INCOMPLETE = 308
_LONG_BYTES = 1 << 40  # of a copy that Google makes: the longest time-out


class GcsWriter:
    """Google through gcsfs.

    Args:
        policy: How long to keep trying to send a part of a resumable upload.
    """

    capabilities = Capabilities(
        atomic_create=True, compare_and_swap=True, parallel_parts=False, acknowledges_puts=True
    )

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy

    def put(
        self, fs: Any, path: str, body: memoryview, mode: PutMode, time: TimeLimit
    ) -> str | None:
        """Publish one object in one request."""
        bucket, _, key = path.partition("/")
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
            f"{fs._location}/upload/storage/v1/b/{bucket}/o",  # noqa: SLF001 - as its own uploads do
            uploadType="multipart",
            headers={"Content-Type": f'multipart/related; boundary="{boundary}"'},
            data=_related(boundary, key, body),
            **conditions,
        )
        generation = json.loads(contents).get("generation")
        return str(generation) if generation else None

    def open_upload(self, get_fs: Callable[[], Any], path: str, part_bytes: int) -> Upload:
        """Begin a resumable upload."""
        del part_bytes
        return _GcsUpload(get_fs, path, self._policy)


class _GcsUpload:
    """A resumable upload: its object appears with the last chunk, or never.

    1. POST begins a session
    2. POST of ``bytes a-b/*`` per chunk, of whole blocks; 308 tells how far Google has them
    3. POST of ``bytes a-b/total`` ends it; the answer is the object

    After a lost answer, PUT of ``bytes */*`` asks how far Google has got, and the chunk goes on
    from there.
    """

    def __init__(self, get_fs: Callable[[], Any], path: str, policy: RetryPolicy) -> None:
        self._get_fs = get_fs
        self._bucket, _, self._key = path.partition("/")
        self._policy = policy
        self._session: str | None = None
        self._stored_bytes = 0
        self._tail = b""

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
        generation = json.loads(contents).get("generation")
        return str(generation) if generation else None

    def abort(self) -> None:
        # A session that is not cancelled is never seen by anybody and goes by itself after a
        # week, so one try is enough.
        if self._session is not None:
            with contextlib.suppress(Exception):
                _request_once(self._policy.timeout_s(), self._get_fs(), "DELETE", self._session)

    def _send(self, body: bytes, total: str) -> bytes:
        """Send what Google has not got yet, until it has all; return what it says in the end."""
        session = self._session or self._begin()
        self._session = session
        begin, end = self._stored_bytes, self._stored_bytes + len(body)
        deadline = Deadline(self._policy.total_deadline_s)
        is_unanswered = False

        def once() -> bytes:
            nonlocal is_unanswered
            said = b""
            if is_unanswered:
                said = self._ask("PUT", session, deadline, "*/*", b"")
            while not said and (total != "*" or self._stored_bytes < end):
                first, rest = self._stored_bytes, body[self._stored_bytes - begin :]
                span = f"{first}-{end - 1}" if rest else "*"
                is_unanswered = True
                said = self._ask("POST", session, deadline, f"{span}/{total}", rest)
                is_unanswered = False
                if not (said or self._stored_bytes > first):
                    raise self._failure("Google took nothing of it", retryable=True)
            return said

        return call_with_retries(once, self._policy, deadline=deadline)

    def _begin(self) -> str:
        fs, deadline = self._get_fs(), Deadline(self._policy.total_deadline_s)
        path = f"{fs._location}/upload/storage/v1/b/{quote(self._bucket)}/o"  # noqa: SLF001 - as above
        more = {
            "uploadType": "resumable",
            "json": {"name": self._key},
            "headers": {"X-Upload-Content-Type": "application/octet-stream"},
        }
        answer = call_with_retries(
            lambda: self._request("POST", path, deadline, 0, more), self._policy, deadline=deadline
        )
        return str(answer[1]["Location"])

    def _ask(self, method: str, session: str, deadline: Deadline, span: str, body: bytes) -> bytes:
        """Send bytes or a question; note how far Google is; return what it says at the end."""
        sent = {
            "Content-Range": f"bytes {span}",
            "Content-Length": str(len(body)),
            "Content-Type": "application/octet-stream",
        }
        more = {"headers": sent, "data": io.BytesIO(body)}
        status, headers, contents = self._request(method, session, deadline, len(body), more)
        if status != _INCOMPLETE:
            return contents
        stored_bytes = int(headers["Range"].rpartition("-")[2]) + 1 if "Range" in headers else 0
        if stored_bytes < self._stored_bytes:
            raise self._failure(f"only {stored_bytes} bytes of it are left", retryable=False)
        self._stored_bytes = stored_bytes
        return b""

    def _request(
        self, method: str, path: str, deadline: Deadline, num_bytes: int, more: dict[str, Any]
    ) -> tuple[int, Mapping[str, str], bytes]:
        time = TimeLimit(self._policy).within(deadline.left_s())
        try:
            return _request_once(time.seconds(num_bytes), self._get_fs(), method, path, **more)
        except Exception as error:
            raise from_fsspec(
                Asked("put_parts", self._key, f"gs://{self._bucket}"), error
            ) from error

    def _failure(self, what: str, *, retryable: bool) -> StoreError:
        place = f"{self._key!r} in gs://{self._bucket}"
        return StoreError(f"put_parts {place} failed: {what}", key=self._key, retryable=retryable)


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
