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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

from dcpstore.errors import CheckpointError, NotFoundError
from dcpstore.store.base import (
    ByteRange,
    Capabilities,
    CopyMode,
    CopySource,
    Fetched,
    IfMatch,
    ObjectInfo,
    PutMode,
    Tail,
    joined,
)
from dcpstore.store.engine import (
    Answer,
    Asked,
    Engine,
    PartStream,
    Publication,
    check_condition,
    from_answer,
    tail_in,
)
from dcpstore.store.fsspec_clients import FsspecClients, from_fsspec, sync_within
from dcpstore.store.ranges import cut
from dcpstore.store.retry import call_with_retries, copy_with_retries

_LOG = logging.getLogger("dcpstore.store")
_COPY_THREADS = 8
_MODEL_NAMES = {"copy_object": "CopyObject", "complete_multipart_upload": "CompleteMultipartUpload"}


class _MultipartUpload:
    """One multipart upload: begun at once, then parts from any thread, then an end.

    Args:
        store: Sends the requests.
        key: Of the object.
        path: Its key in the bucket.
    """

    def __init__(self, store: S3fsStore, key: str, path: str) -> None:
        self._store = store
        self._key = key
        self._path = path
        self._publication = Publication()
        begun = self._repeat("begin the upload of", "create_multipart_upload")
        self._upload_id = begun["UploadId"]

    def _repeat(self, verb: str, operation: str, num_bytes: int = 0, **more: Any) -> dict[str, Any]:
        asked = Asked(verb, self._key, self._store.url)
        return self._store.repeat(asked, operation, num_bytes, Key=self._path, **more)

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
        answer = self._repeat(verb, "upload_part", part.nbytes, **more)
        return {"PartNumber": number, "ETag": answer["ETag"]}

    def copy(self, number: int, span: ByteRange, source: CopySource) -> dict[str, Any]:
        """Let S3 copy a part from a range of another object."""
        answer = self._repeat(
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
        self,
        parts: list[dict[str, Any]],
        num_bytes: int,
        publish: Callable[..., dict[str, Any]] | None = None,
    ) -> str | None:
        """Publish the object and return its ETag.

        Args:
            parts: What `send_all` or `copy` returned, in order.
            num_bytes: Of the object.
            publish: Sends the operation; it takes longer the more bytes there are. None to repeat
                it until it is answered.
        """
        store = self._store
        asked = Asked("complete the upload of", self._key, store.url)
        more = {"UploadId": self._upload_id, "MultipartUpload": {"Parts": parts}}
        try:
            answer = (publish or partial(store.repeat, asked))(
                "complete_multipart_upload", num_bytes, Key=self._path, **more
            )
        except CheckpointError as error:
            return self._publication.settle(
                error, lambda: store.head_again(self._key), num_bytes, len(parts)
            )
        return answer.get("ETag") or None

    def abort(self) -> None:
        """Drop the parts; logs where that fails."""
        try:
            self._repeat("abort the upload of", "abort_multipart_upload", UploadId=self._upload_id)
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

    _map_error = staticmethod(from_fsspec)

    def _connect(self) -> None:
        self._clients = FsspecClients(self._location, self._options, _fixed_options(self._options))

    @property
    def capabilities(self) -> Capabilities:
        """What this store promises; old generations of botocore lack conditional puts."""
        known = parameters_of("PutObject")
        return Capabilities(
            atomic_create="IfNoneMatch" in known,
            compare_and_swap="IfMatch" in known,
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

    def _fetch_tail(self, asked: Asked, path: str, num_bytes: int) -> Tail | None:
        span = f"bytes=-{num_bytes}"
        answer, data = self._fetch(asked, path, self._time.reading_s(), Range=span)
        told = answer.get("ContentRange") or ""
        etag, modified = answer.get("ETag") or None, answer.get("LastModified")
        return tail_in(asked, num_bytes, told, Tail(data, len(data), etag, modified))

    def head(self, key: str) -> ObjectInfo:
        """Look an object up without its bytes."""
        found = self.send(Asked("head", key, self.url), "head_object", Key=self._path(key))
        return ObjectInfo(
            key, int(found["ContentLength"]), found.get("ETag") or None, found.get("LastModified")
        )

    def _put(self, asked: Asked, path: str, body: memoryview, mode: PutMode) -> str | None:
        more: dict[str, Any] = {}
        if mode != "overwrite":
            more = {"IfMatch": mode.etag} if isinstance(mode, IfMatch) else {"IfNoneMatch": "*"}
        most_s = self._time.seconds(body.nbytes)
        answer = self.send(asked, "put_object", most_s, Key=path, Body=bytes(body), **more)
        return answer.get("ETag") or None

    def _put_parts(self, asked: Asked, path: str, stream: PartStream) -> str | None:
        upload = _MultipartUpload(self, asked.key, path)
        try:
            sent, num_bytes = upload.send_all(map(joined, stream.parts), stream.max_concurrency)
            return upload.complete(sent, num_bytes)
        except BaseException:
            upload.abort()
            raise

    def copy_from(self, source: CopySource, key: str, mode: CopyMode = "overwrite") -> None:
        """Let S3 copy an object, in parts if it is large."""
        size_bytes, path = source.size_bytes, self._path(key)
        publish = partial(self._publish_copy, key, mode)
        part_bytes = self._limits.part_bytes_for(size_bytes, self.copy_part_bytes)
        if size_bytes <= part_bytes:
            whole = {"Bucket": source.bucket, "Key": source.path}
            publish("copy_object", size_bytes, Key=path, CopySource=whole)
            return
        spans = list(cut(ByteRange(0, size_bytes), part_bytes))
        upload = _MultipartUpload(self, key, path)
        try:
            with ThreadPoolExecutor(_COPY_THREADS, "dcpstore-copy") as pool:
                numbers = range(1, len(spans) + 1)
                # An error cancels those that have not begun.
                parts = list(pool.map(partial(upload.copy, source=source), numbers, spans))
            upload.complete(parts, size_bytes, publish)
        except BaseException:
            upload.abort()
            raise

    def _publish_copy(
        self, key: str, mode: CopyMode, operation: str, num_bytes: int, **more: Any
    ) -> dict[str, Any]:
        """Send the operation that makes a copy exist; an answer that was lost is an empty one.

        Raises:
            AlreadyExistsError: If ``mode="create"`` and the object exists.
        """
        asked = Asked("copy to", key, self.url).under(mode)
        is_decided = "IfNoneMatch" in parameters_of(_MODEL_NAMES[operation])
        if mode == "create" and is_decided:
            more["IfNoneMatch"] = "*"

        def once(left_s: float) -> None:
            time = self._time.within(left_s)
            if mode == "create" and not is_decided:
                check_condition(asked, mode, lambda: self.within(left_s).head(key))
            self.send(asked, operation, time.seconds(num_bytes), **more)

        copy_with_retries(once, self._part_policy)
        return {}

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below the folder ``prefix``."""
        asked = Asked("list", prefix, self.url)
        send = partial(self.send, asked, "list_objects_v2", Prefix=self._root + prefix)
        for page in pages_of(send, {"ContinuationToken": "NextContinuationToken"}):
            for one in page.get("Contents", ()):
                key = one["Key"].removeprefix(self._root)
                yield ObjectInfo(key, one["Size"], one.get("ETag") or None, one["LastModified"])

    def _folders(self, asked: Asked, below: str) -> Sequence[str]:
        send = partial(self.send, asked, "list_objects_v2", Prefix=below, Delimiter="/")
        return [
            one["Prefix"][len(below) : -1]
            for page in pages_of(send, {"ContinuationToken": "NextContinuationToken"})
            for one in page.get("CommonPrefixes", ())
        ]

    def _delete(self, paths: Sequence[str]) -> Sequence[CheckpointError]:
        asked = Asked(f"delete {len(paths)} objects, first", paths[0], self.url)
        doomed = {"Objects": [{"Key": path} for path in paths], "Quiet": True}
        return [
            from_answer(
                Asked("delete", one.get("Key", ""), self.url),
                Answer(
                    status=403 if one.get("Code") == "AccessDenied" else 500,
                    code=one.get("Code"),
                    text=str(one.get("Message", "")),
                ),
            )
            for one in self.send(asked, "delete_objects", Delete=doomed).get("Errors", ())
        ]

    def close(self) -> None:
        """Drop the session; a later call opens a new one."""
        self._clients.close()

    def head_again(self, key: str) -> ObjectInfo:
        """Look an object up until there is an answer."""
        return call_with_retries(lambda _: self.head(key), self._part_policy)

    def repeat(
        self, asked: Asked, operation: str, num_bytes: int = 0, **more: Any
    ) -> dict[str, Any]:
        """Send one operation, which moves so many bytes, until it is answered."""

        def once(left_s: float) -> dict[str, Any]:
            most_s = self._time.within(left_s).seconds(num_bytes)
            return self.send(asked, operation, most_s, **more)

        return call_with_retries(once, self._part_policy)

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

        return self._ask(asked, call)

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

        return self._ask(asked, call)


def pages_of(
    send: Callable[..., dict[str, Any]], marks: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """Yield the pages of a listing.

    Args:
        send: Asks for a page.
        marks: By the parameter that asks for the next page, where its value is in an answer.
    """
    more: dict[str, Any] = {}
    while True:
        page = send(**more)
        yield page
        if not page.get("IsTruncated"):
            return
        more = {name: page[told] for name, told in marks.items()}


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
