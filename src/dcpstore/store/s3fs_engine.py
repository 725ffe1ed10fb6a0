"""S3 through s3fs: its sessions and credentials, S3's own verbs, none of its file layer.

s3fs's file layer creates buckets, caches listings, publishes truncated objects and
cannot put conditionally on older generations of botocore. Its ``call_s3`` does none
of that, so every verb here is one S3 operation, but for large objects: those are sent as
multipart uploads, and copied part by part.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from typing_extensions import Buffer

from dcpstore.errors import AlreadyExistsError, CheckpointError, NotFoundError
from dcpstore.store.base import (
    Capabilities,
    CopyMode,
    CopySource,
    Fetched,
    IfMatch,
    ObjectInfo,
    Part,
    PutMode,
    as_bytes_view,
    checked_parts,
)
from dcpstore.store.engine import (
    Answer,
    Asked,
    Engine,
    Publication,
    compare_etag,
    deletes_failed,
    from_answer,
    with_either_mark,
)
from dcpstore.store.fsspec_clients import FsspecClients, ask_fsspec, sync_within
from dcpstore.store.ranges import ByteRange, cut
from dcpstore.store.retry import Deadline, RetryPolicy, call_with_retries, copy_with_retries

_LOG = logging.getLogger("dcpstore.store")
_COPY_THREADS = 8
_DELETE_BATCH = 1000
_MODEL_NAMES = {"copy_object": "CopyObject", "complete_multipart_upload": "CompleteMultipartUpload"}


@dataclass(frozen=True, slots=True)
class _Target:
    """A key to write to, and how S3 is asked.

    Attributes:
        call: Sends one operation to the bucket: what was asked for, the operation's name, the
            deadline, how many bytes it moves, and its parameters but for the bucket; raises
            our errors.
        head: Looks the object up.
        policy: How long to repeat an operation.
        url: The store's root, for messages.
        key: The object, for messages.
        path: Its key in the bucket.
    """

    call: Callable[..., dict[str, Any]]
    head: Callable[[], ObjectInfo]
    policy: RetryPolicy
    url: str
    key: str
    path: str

    def repeat(self, verb: str, operation: str, num_bytes: int = 0, **more: Any) -> dict[str, Any]:
        """Send one operation on the object until it is answered."""
        asked, deadline = Asked(verb, self.key, self.url), Deadline(self.policy.total_deadline_s)
        return call_with_retries(
            lambda: self.call(asked, operation, deadline, num_bytes, Key=self.path, **more),
            self.policy,
            deadline=deadline,
        )

    def publish_copy(
        self, mode: CopyMode, operation: str, num_bytes: int, **more: Any
    ) -> dict[str, Any]:
        """Send the operation that makes a copy exist; an answer that was lost is an empty one.

        Raises:
            AlreadyExistsError: If ``mode="create"`` and the object exists.
        """
        asked = Asked("copy to", self.key, self.url).under(mode)
        deadline = Deadline(self.policy.total_deadline_s)

        def once() -> None:
            more.update(self._create_condition(asked, operation, deadline, mode))
            self.call(asked, operation, deadline, num_bytes, Key=self.path, **more)

        copy_with_retries(once, self.policy, deadline)
        return {}

    def _create_condition(
        self, asked: Asked, operation: str, deadline: Deadline, mode: CopyMode
    ) -> dict[str, str]:
        """Return the condition that S3 decides by; where botocore knows none, look now."""
        if mode == "overwrite":
            return {}
        if "IfNoneMatch" in parameters_of(_MODEL_NAMES[operation]):
            return {"IfNoneMatch": "*"}
        try:
            head = Asked("head", self.key, self.url)
            self.call(head, "head_object", deadline, 0, Key=self.path)
        except NotFoundError:
            return {}
        raise AlreadyExistsError(f"{asked}: the object exists already")


class _MultipartUpload:
    """One multipart upload: begun at once, then parts from any thread, then an end."""

    def __init__(self, target: _Target) -> None:
        self._target = target
        self._publication = Publication()
        begun = target.repeat("begin the upload of", "create_multipart_upload")
        self._upload_id = begun["UploadId"]

    def send_all(
        self, parts: Iterator[memoryview], max_concurrency: int
    ) -> tuple[list[dict[str, Any]], int]:
        """Send parts as places free up; return what S3 calls them, and how many bytes they have."""
        free = threading.Semaphore(max_concurrency)
        broken = threading.Event()
        futures: list[Future[dict[str, Any]]] = []
        num_bytes = 0

        def work(number: int, holder: list[memoryview]) -> dict[str, Any]:
            try:
                return self._send(number, holder[0])
            except BaseException:
                broken.set()
                raise
            finally:
                holder.clear()  # the future lives on; the part must not
                free.release()

        with ThreadPoolExecutor(max_concurrency, "dcpstore-part") as pool:
            while True:
                free.acquire()
                part = None if broken.is_set() else next(parts, None)
                if part is None:
                    break
                num_bytes += part.nbytes
                futures.append(pool.submit(work, len(futures) + 1, [part]))
                del part
        return [future.result() for future in futures], num_bytes

    def _send(self, number: int, part: memoryview) -> dict[str, Any]:
        """Send the part with a number, counted from 1."""
        verb = f"send part {number} of"
        more = {"UploadId": self._upload_id, "PartNumber": number, "Body": bytes(part)}
        answer = self._target.repeat(verb, "upload_part", part.nbytes, **more)
        return {"PartNumber": number, "ETag": answer["ETag"]}

    def copy(self, number: int, span: ByteRange, source: CopySource) -> dict[str, Any]:
        """Let S3 copy a part from a range of another object."""
        answer = self._target.repeat(
            f"copy part {number} of",
            "upload_part_copy",
            span.num_bytes,
            UploadId=self._upload_id,
            PartNumber=number,
            CopySource={"Bucket": source.bucket, "Key": source.path},
            CopySourceRange=f"bytes={span.start}-{span.end - 1}",
        )
        return {"PartNumber": number, "ETag": answer["CopyPartResult"]["ETag"]}

    def complete(
        self, publish: Callable[..., dict[str, Any]], parts: list[dict[str, Any]], num_bytes: int
    ) -> str | None:
        """Publish the object and return its ETag.

        Args:
            publish: Sends the operation; it takes longer the more bytes there are.
            parts: What `send_all` or `copy` returned, in order.
            num_bytes: Of the object.
        """
        more = {"UploadId": self._upload_id, "MultipartUpload": {"Parts": parts}}
        target = self._target
        try:
            answer = publish("complete_multipart_upload", num_bytes, **more)
        except CheckpointError as error:
            return self._publication.settle(
                error, lambda: call_with_retries(target.head, target.policy), num_bytes, len(parts)
            )
        return answer.get("ETag") or None

    def abort(self) -> None:
        """Drop the parts; logs where that fails."""
        try:
            self._target.repeat(
                "abort the upload of", "abort_multipart_upload", UploadId=self._upload_id
            )
        except NotFoundError:
            pass  # it is gone already
        except CheckpointError as error:
            _LOG.warning("an unfinished multipart upload may remain: %s", error)


@lru_cache
def parameters_of(operation: str) -> frozenset[str]:
    """Return what the installed botocore can say with an operation; older ones lack conditions."""
    return frozenset(_s3_model().operation_model(operation).input_shape.members)


@lru_cache(maxsize=1)
def _s3_model() -> Any:
    from botocore.session import Session

    return Session().get_service_model("s3")


class S3fsStore(Engine):
    """A `Store` on s3fs; arguments are those of `Engine`.

    In a forked child it opens a session of its own. Bodies of puts are copied once: aiobotocore
    takes nothing but ``bytes``.

    Raises:
        ConfigError: If s3fs is missing or an option is unknown to it.
    """

    copy_part_bytes = 512 * 2**20
    """Objects larger than this are copied in parts of this size, several beside one another. S3
    copies no more than 5 GiB in one request."""

    def _connect(self) -> None:
        self._clients = FsspecClients(self._location, self._options, _fixed_options(self._options))

    @property
    def capabilities(self) -> Capabilities:
        """What this store promises; old generations of botocore lack conditional puts."""
        known = parameters_of("PutObject")
        return Capabilities(
            atomic_create="IfNoneMatch" in known,
            compare_and_swap="IfMatch" in known,
            parallel_parts=True,
            acknowledges_puts=True,
            limits=self._limits,
        )

    def get(self, key: str) -> Fetched:
        """Fetch a whole object. Nobody knows its size before: it may take all the time there is."""
        answer, data = self._fetch(
            Asked("get", key, self.url), self._path(key), self._time.left_s()
        )
        return Fetched(data, answer.get("ETag") or None)

    def _fetch_range(self, asked: Asked, path: str, start: int, end: int) -> memoryview:
        span = f"bytes={start}-{end - 1}"
        return self._fetch(asked, path, self._time.reading_s(), Range=span)[1]

    def head(self, key: str) -> ObjectInfo:
        """Look an object up without its bytes."""
        found = self.send(Asked("head", key, self.url), "head_object", Key=self._path(key))
        return ObjectInfo(
            key, int(found["ContentLength"]), found.get("ETag") or None, found.get("LastModified")
        )

    def put(self, key: str, data: Buffer, *, mode: PutMode = "overwrite") -> str | None:
        """Store one object in one atomic request and return its ETag."""
        path, body = self._path(key), as_bytes_view(data)
        asked = Asked("put", key, self.url).under(mode)
        self._limits.check_put(key, body.nbytes)
        whole = bytes(body)

        def send(mode: PutMode) -> dict[str, Any]:
            more: dict[str, Any] = self._condition(asked, key, mode)
            most_s = self._time.seconds(body.nbytes)
            return self.send(asked, "put_object", most_s, Key=path, Body=whole, **more)

        return with_either_mark(mode, send).get("ETag") or None

    def put_parts(
        self, key: str, parts: Iterable[Part], *, part_bytes: int, max_concurrency: int
    ) -> str | None:
        """Store one large object from parts, several in flight, and return its ETag."""
        stream = checked_parts(parts, part_bytes, self._limits)
        held = [next(stream, memoryview(b""))]
        if held[0].nbytes < part_bytes:
            for _ in stream:  # raises: a part after a short one
                pass
            return self.put(key, held.pop())
        target = self._target(key)
        upload = _MultipartUpload(target)
        try:
            sent, num_bytes = upload.send_all(_chain(held, stream), max_concurrency)
            publish = partial(target.repeat, "complete the upload of")
            return upload.complete(publish, sent, num_bytes)
        except BaseException:
            upload.abort()
            raise

    def copy_from(self, source: CopySource, key: str, mode: CopyMode = "overwrite") -> None:
        """Let S3 copy an object, in parts if it is large."""
        size_bytes, target = source.size_bytes, self._target(key)
        publish = partial(target.publish_copy, mode)
        part_bytes = self._limits.part_bytes_for(size_bytes, self.copy_part_bytes)
        if size_bytes <= part_bytes:
            whole = {"Bucket": source.bucket, "Key": source.path}
            publish("copy_object", size_bytes, CopySource=whole)
            return
        spans = list(cut(ByteRange(0, size_bytes), part_bytes))
        upload = _MultipartUpload(target)
        try:
            with ThreadPoolExecutor(_COPY_THREADS, "dcpstore-copy") as pool:
                numbers = range(1, len(spans) + 1)
                # An error cancels those that have not begun.
                parts = list(pool.map(partial(upload.copy, source=source), numbers, spans))
            upload.complete(publish, parts, size_bytes)
        except BaseException:
            upload.abort()
            raise

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below the folder ``prefix``."""
        asked = Asked("list", prefix, self.url)
        more: dict[str, Any] = {}
        while True:
            page = self.send(asked, "list_objects_v2", Prefix=self._root + prefix, **more)
            for one in page.get("Contents", ()):
                key = one["Key"].removeprefix(self._root)
                yield ObjectInfo(key, one["Size"], one.get("ETag") or None, one["LastModified"])
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def delete_many(self, keys: Sequence[str]) -> None:
        """Delete objects; a missing one is no error."""
        failed: list[tuple[str, Mapping[str, Any]]] = []
        for first in range(0, len(keys), _DELETE_BATCH):
            batch = keys[first : first + _DELETE_BATCH]
            asked = Asked(f"delete {len(batch)} objects, first", batch[0], self.url)
            doomed = {"Objects": [{"Key": self._path(key)} for key in batch], "Quiet": True}
            answer = self.send(asked, "delete_objects", Delete=doomed)
            failed += [(one.get("Key", ""), one) for one in answer.get("Errors", ())]
        if failed:
            key, said = failed[0]
            raise deletes_failed(
                from_answer(
                    Asked("delete", key, self.url),
                    Answer(
                        status=403 if said.get("Code") == "AccessDenied" else 500,
                        code=said.get("Code"),
                        text=str(said.get("Message", "")),
                    ),
                ),
                len(failed),
                len(keys),
            )

    def close(self) -> None:
        """Drop the session; a later call opens a new one."""
        self._clients.close()

    def _target(self, key: str) -> _Target:
        def call(
            asked: Asked, operation: str, deadline: Deadline, num_bytes: int, **more: Any
        ) -> dict[str, Any]:
            most_s = self._time.within(deadline.left_s()).seconds(num_bytes)
            return self.send(asked, operation, most_s, **more)

        path = self._path(key)
        return _Target(call, lambda: self.head(key), self._part_policy, self.url, key, path)

    def _condition(self, asked: Asked, key: str, mode: PutMode) -> dict[str, str]:
        can = self.capabilities
        if isinstance(mode, IfMatch):
            if can.compare_and_swap:
                return {"IfMatch": mode.etag}
            compare_etag(asked, mode, lambda: self.head(key))
        elif mode == "create":
            if can.atomic_create:
                return {"IfNoneMatch": "*"}
            try:
                self.head(key)
            except NotFoundError:
                return {}
            raise AlreadyExistsError(f"{asked}: the object exists already")
        return {}

    def _fetch(
        self, asked: Asked, path: str, most_s: float, **more: Any
    ) -> tuple[dict[str, Any], memoryview]:
        def call() -> tuple[dict[str, Any], memoryview]:
            fs, pause_s = self._clients.get(), self._time.seconds()
            bucket = self._location.bucket
            answer, data = sync_within(
                most_s, fs, _get_object, fs, pause_s, Bucket=bucket, Key=path, **more
            )
            return answer, memoryview(data).toreadonly()

        return ask_fsspec(asked, call)

    def send(
        self, asked: Asked, operation: str, most_s: float | None = None, **more: Any
    ) -> dict[str, Any]:
        """Send one operation; without a time-out, it has that of a request without a body."""

        def call() -> dict[str, Any]:
            fs = self._clients.get()
            answer: dict[str, Any] = sync_within(
                self._time.seconds() if most_s is None else most_s,
                fs,
                fs._call_s3,  # noqa: SLF001 - its public form takes no time-out
                operation,
                Bucket=self._location.bucket,
                **more,
            )
            return answer

        return ask_fsspec(asked, call)


def _chain(held: list[memoryview], rest: Iterator[memoryview]) -> Iterator[memoryview]:
    yield held.pop()
    yield from rest


async def _get_object(fs: Any, pause_s: float, **more: Any) -> tuple[dict[str, Any], bytes]:
    # The body must be read on s3fs's own loop.
    asking = fs._call_s3("get_object", **more)  # noqa: SLF001
    try:
        answer = await asyncio.wait_for(asking, pause_s)
    except asyncio.TimeoutError:
        raise TimeoutError(f"no answer within {pause_s:.1f} s") from None
    async with answer["Body"] as body:
        return answer, await body.read()


def _fixed_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint store needs from botocore, under what the user says."""
    config: dict[str, Any] = dict(options.get("config_kwargs") or {})
    s3 = dict(config.get("s3") or {})
    # Hashing each body costs 0.9 CPU s/GiB over plain HTTP, and our CRC32C covers it.
    s3.setdefault("payload_signing_enabled", False)
    defaults: dict[str, Any] = {
        "retries": {"max_attempts": 0},  # ours are jittered, shared and bounded
        "max_pool_connections": 128,  # botocore's 10 would queue what we send at once
        "connect_timeout": 10,
        "read_timeout": 600,  # it also runs while a body is sent; ours counts the bytes
    }
    for name in ("request_checksum_calculation", "response_checksum_validation"):
        if name in _config_names():  # Ceph and others refuse checksum trailers
            defaults[name] = "when_required"
    return {"config_kwargs": {**defaults, **config, "s3": s3}}


@lru_cache(maxsize=1)
def _config_names() -> frozenset[str]:
    from botocore.config import Config

    return frozenset(Config.OPTION_DEFAULTS)
