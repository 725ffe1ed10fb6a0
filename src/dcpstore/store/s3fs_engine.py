"""What takes several requests of S3: multipart uploads, and copies of large objects.

S3 through s3fs: its sessions and credentials, S3's own verbs, none of its file layer.

s3fs's file layer creates buckets, caches listings, publishes truncated objects and
cannot put conditionally on older generations of botocore. Its ``call_s3`` does none
of that, so every verb here is one S3 operation.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from dcpstore.errors import AlreadyExistsError, CheckpointError, NotFoundError
from dcpstore.store.base import Capabilities, CopyMode, Fetched, IfMatch, ObjectInfo, Origin
from dcpstore.store.error_map import (
    Answer,
    Asked,
    Publication,
    check_length,
    compare_etag,
    deletes_failed,
    from_answer,
    with_either_mark,
)
from dcpstore.store.fsspec_clients import FsspecClients, ask_fsspec, sync_within
from dcpstore.store.limits import StoreLimits, as_bytes_view, check_key, checked_parts, limits_of
from dcpstore.store.ranges import ByteRange, cut
from dcpstore.store.retry import (
    Deadline,
    RetryPolicy,
    TimeLimit,
    call_with_retries,
    copy_with_retries,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from typing_extensions import Buffer

    from dcpstore.store.base import PutMode
    from dcpstore.store.limits import Part
    from dcpstore.store.location import Location


_LOG = logging.getLogger("dcpstore.store")
_COPY_THREADS = 8
_MODEL_NAMES = {"copy_object": "CopyObject", "complete_multipart_upload": "CompleteMultipartUpload"}


@dataclass(frozen=True, slots=True)
class S3Source:
    """An object to copy, of any bucket.

    Attributes:
        bucket: Its bucket.
        path: Its key in the bucket.
    """

    bucket: str
    path: str

    @property
    def parameter(self) -> dict[str, str]:
        """``CopySource`` as botocore takes and quotes it."""
        return {"Bucket": self.bucket, "Key": self.path}


@dataclass(frozen=True, slots=True)
class S3Target:
    """A key to write to, and how S3 is asked.

    Attributes:
        call: Sends one operation to the bucket: what was asked for, the operation's name, the
            deadline, how many bytes it moves, and its parameters but for the bucket; raises
            our errors.
        policy: How long to repeat it.
        url: The store's root, for messages.
        key: The object, for messages.
        path: Its key in the bucket.
    """

    call: Callable[..., dict[str, Any]]
    policy: RetryPolicy
    url: str
    key: str
    path: str

    def asked(self, verb: str) -> Asked:
        """Say what is wanted of the object."""
        return Asked(verb, self.key, self.url)

    def repeat(self, verb: str, operation: str, num_bytes: int = 0, **more: Any) -> dict[str, Any]:
        """Send one operation on the object until it is answered."""
        asked, deadline = self.asked(verb), self.deadline()
        return call_with_retries(
            lambda: self.call(asked, operation, deadline, num_bytes, Key=self.path, **more),
            self.policy,
            deadline=deadline,
        )

    def deadline(self) -> Deadline:
        """Return that of a request with all its tries."""
        return Deadline(self.policy.total_deadline_s)


class MultipartUpload:
    """One multipart upload: begun at once, then parts from any thread, then an end."""

    def __init__(self, target: S3Target) -> None:
        self._target = target
        self._publication = Publication()
        self._num_bytes = 0
        self._lock = threading.Lock()
        begun = target.repeat("begin the upload of", "create_multipart_upload")
        self._upload_id = begun["UploadId"]

    def send(self, number: int, part: memoryview) -> dict[str, Any]:
        """Send the part with a number, counted from 1."""
        verb = f"send part {number} of"
        more = {"UploadId": self._upload_id, "PartNumber": number, "Body": bytes(part)}
        answer = self._target.repeat(verb, "upload_part", part.nbytes, **more)
        with self._lock:
            self._num_bytes += part.nbytes
        return {"PartNumber": number, "ETag": answer["ETag"]}

    def copy(self, number: int, span: ByteRange, source: S3Source) -> dict[str, Any]:
        """Let S3 copy a part from a range of another object."""
        answer = self._target.repeat(
            f"copy part {number} of",
            "upload_part_copy",
            span.end - span.start,
            UploadId=self._upload_id,
            PartNumber=number,
            CopySource=source.parameter,
            CopySourceRange=f"bytes={span.start}-{span.end - 1}",
        )
        return {"PartNumber": number, "ETag": answer["CopyPartResult"]["ETag"]}

    def complete(self, sent: list[dict[str, Any]], head: Callable[[], ObjectInfo]) -> str | None:
        """Publish the object, given what `send` returned in order; returns its ETag.

        Args:
            sent: The parts.
            head: Looks the object up, where an answer was lost.
        """
        try:
            answer = self._target.repeat(
                "complete the upload of",
                "complete_multipart_upload",
                self._num_bytes,  # it takes longer the more parts there are
                UploadId=self._upload_id,
                MultipartUpload={"Parts": sent},
            )
        except CheckpointError as error:
            return self._settle(error, head, self._num_bytes, len(sent))
        return answer.get("ETag") or None

    def complete_copy(
        self,
        copied: list[dict[str, Any]],
        mode: CopyMode,
        head: Callable[[], ObjectInfo],
        num_bytes: int,
    ) -> None:
        """Publish the object, given what `copy` returned in order.

        Raises:
            AlreadyExistsError: If ``mode="create"`` and the object exists.
        """
        try:
            _copy(
                self._target,
                "complete_multipart_upload",
                mode,
                num_bytes,
                UploadId=self._upload_id,
                MultipartUpload={"Parts": copied},
            )
        except CheckpointError as error:
            self._settle(error, head, num_bytes, len(copied))

    def _settle(
        self,
        error: CheckpointError,
        head: Callable[[], ObjectInfo],
        num_bytes: int,
        num_parts: int,
    ) -> str | None:
        def look() -> ObjectInfo:
            return call_with_retries(head, self._target.policy)

        return self._publication.settle(error, look, num_bytes, num_parts)

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


def send_all(
    pool: ThreadPoolExecutor,
    send: Callable[[int, memoryview], dict[str, Any]],
    parts: Iterator[memoryview],
    max_concurrency: int,
) -> list[dict[str, Any]]:
    """Send parts as places free up; the pool's end then waits for those in flight."""
    free = threading.Semaphore(max_concurrency)
    broken = threading.Event()
    futures: list[Future[dict[str, Any]]] = []

    def work(number: int, holder: list[memoryview]) -> dict[str, Any]:
        try:
            return send(number, holder[0])
        except BaseException:
            broken.set()
            raise
        finally:
            holder.clear()  # the future lives on; the part must not
            free.release()

    number = 0
    while True:
        free.acquire()
        if broken.is_set():
            break
        part = next(parts, None)
        if part is None:
            break
        number += 1
        futures.append(pool.submit(work, number, [part]))
        del part
    return [future.result() for future in futures]


def copy_object(
    target: S3Target,
    source: S3Source,
    size_bytes: int,
    part_bytes: int,
    mode: CopyMode,
    head: Callable[[], ObjectInfo],
) -> None:
    """Let S3 copy an object: in one request, or in parts if it is larger than one.

    Args:
        target: To copy to.
        source: What to copy.
        size_bytes: Its size.
        part_bytes: Most bytes to copy in one request.
        mode: ``"create"`` refuses to replace.
        head: Looks the copy up, where an answer was lost.

    Raises:
        AlreadyExistsError: If ``mode="create"`` and the object exists.
    """
    if size_bytes <= part_bytes:
        _copy(target, "copy_object", mode, size_bytes, CopySource=source.parameter)
        return
    spans = list(cut(ByteRange(0, size_bytes), part_bytes))
    upload = MultipartUpload(target)
    try:
        with ThreadPoolExecutor(_COPY_THREADS, "dcpstore-copy") as pool:
            numbers = range(1, len(spans) + 1)
            copied = pool.map(upload.copy, numbers, spans, [source] * len(spans))
            parts = list(copied)  # an error cancels those that have not begun
        upload.complete_copy(parts, mode, head, size_bytes)
    except BaseException:
        upload.abort()
        raise


def _copy(
    target: S3Target, operation: str, mode: CopyMode, num_bytes: int = 0, **more: Any
) -> None:
    """Send what makes a copy exist."""
    asked, deadline = target.asked("copy to").under(mode), target.deadline()

    def once() -> None:
        known = mode == "overwrite"
        condition = {} if known else _create_condition(target, asked, operation, deadline)
        target.call(asked, operation, deadline, num_bytes, Key=target.path, **condition, **more)

    copy_with_retries(once, target.policy, deadline)


def _create_condition(
    target: S3Target, asked: Asked, operation: str, deadline: Deadline
) -> dict[str, str]:
    """Return the condition that S3 decides by; where botocore knows none, look now."""
    if "IfNoneMatch" in parameters_of(_MODEL_NAMES[operation]):
        return {"IfNoneMatch": "*"}
    try:
        target.call(target.asked("head"), "head_object", deadline, 0, Key=target.path)
    except NotFoundError:
        return {}
    raise AlreadyExistsError(f"{asked}: the object exists already")


@lru_cache
def parameters_of(operation: str) -> frozenset[str]:
    """Return what the installed botocore can say with an operation; older ones lack conditions."""
    return frozenset(_s3_model().operation_model(operation).input_shape.members)


@lru_cache(maxsize=1)
def _s3_model() -> Any:
    from botocore.session import Session

    return Session().get_service_model("s3")


_T = TypeVar("_T")
_DELETE_BATCH = 1000
_COPY_PART_BYTES = 512 * 2**20


class S3fsStore:
    """A `Store` on s3fs.

    Picklable by its configuration. In a forked child it opens a session of its own.
    Bodies of puts are copied once: aiobotocore takes nothing but ``bytes``.

    Args:
        location: The root.
        storage_options: s3fs's own options.
        part_policy: How long a request may take, and how long to keep trying to send one part
            of `put_parts`, and to copy.
        copy_part_bytes: Objects larger than this are copied in parts of this size, several
            beside one another. S3 copies no more than 5 GiB in one request.
        limits: The most that the store takes; None for what is known of the scheme.

    Raises:
        ConfigError: If s3fs is missing or an option is unknown to it.
    """

    def __init__(
        self,
        location: Location,
        storage_options: Mapping[str, Any] | None = None,
        *,
        part_policy: RetryPolicy | None = None,
        copy_part_bytes: int = _COPY_PART_BYTES,
        limits: StoreLimits | None = None,
    ) -> None:
        self._location = location
        self._options = dict(storage_options or {})
        self._part_policy = part_policy or RetryPolicy()
        self._time = TimeLimit(self._part_policy)
        self._copy_part_bytes = copy_part_bytes
        self._clients = FsspecClients(location, self._options, _fixed_options(self._options))
        self._root = f"{location.prefix}/" if location.prefix else ""
        self._given_limits = limits
        self._limits = (limits or limits_of(location.scheme)).below(self._root)

    @property
    def url(self) -> str:
        """The root, without secrets."""
        return self._location.url

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

    def within(self, most_s: float) -> S3fsStore:
        """Return the same store for one request, which fails when so many seconds are over."""
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__, _time=self._time.within(most_s))
        return view

    def get(self, key: str) -> Fetched:
        """Fetch a whole object. Nobody knows its size before: it may take all the time there is."""
        answer, data = self._fetch(Asked("get", key, self.url), key, self._time.left_s())
        return Fetched(data, answer.get("ETag") or None)

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        """Fetch bytes ``[start, end)``."""
        if end <= start:
            return memoryview(b"")
        asked = Asked(f"get [{start}, {end}) of", key, self.url)
        span = f"bytes={start}-{end - 1}"
        return check_length(
            asked,
            start,
            end,
            lambda: self._fetch(asked, key, self._time.reading_s(), Range=span)[1],
            lambda: self.head(key),
        )

    def head(self, key: str) -> ObjectInfo:
        """Look an object up without its bytes."""
        found = self._call(Asked("head", key, self.url), "head_object", Key=self._path(key))
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
            return self._call(asked, "put_object", most_s, Key=path, Body=whole, **more)

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
        upload = MultipartUpload(self._target(key))
        try:
            with ThreadPoolExecutor(max_concurrency, "dcpstore-part") as pool:
                sent = send_all(pool, upload.send, _chain(held, stream), max_concurrency)
            return upload.complete(sent, lambda: self.head(key))
        except BaseException:
            upload.abort()
            raise

    @property
    def origin(self) -> Origin:
        """Where the objects lie, for a provider's own copies."""
        return Origin(self._location, self._options)

    def copy_from(
        self,
        origin: Origin,
        source_key: str,
        key: str,
        *,
        size_bytes: int,
        mode: CopyMode = "overwrite",
    ) -> None:
        """Let S3 copy an object, in parts if it is large."""
        source = S3Source(origin.location.bucket, origin.path(source_key))
        target = self._target(key)
        part_bytes = self._limits.part_bytes_for(size_bytes, self._copy_part_bytes)
        copy_object(target, source, size_bytes, part_bytes, mode, lambda: self.head(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below the folder ``prefix``."""
        asked = Asked("list", prefix, self.url)
        more: dict[str, Any] = {}
        while True:
            page = self._call(asked, "list_objects_v2", Prefix=self._root + prefix, **more)
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
            answer = self._call(asked, "delete_objects", Delete=doomed)
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

    def _target(self, key: str) -> S3Target:
        def call(
            asked: Asked, operation: str, deadline: Deadline, num_bytes: int, **more: Any
        ) -> dict[str, Any]:
            most_s = self._time.within(deadline.left_s()).seconds(num_bytes)
            return self._call(asked, operation, most_s, **more)

        return S3Target(call, self._part_policy, self.url, key, self._path(key))

    def _condition(self, asked: Asked, key: str, mode: PutMode) -> dict[str, str]:
        can = self.capabilities
        if isinstance(mode, IfMatch):
            if can.compare_and_swap:
                return {"IfMatch": mode.etag}
            compare_etag(asked, mode, lambda: self.head(key))
        elif mode == "create":
            if can.atomic_create:
                return {"IfNoneMatch": "*"}
            self._reject_existing(asked, key)
        return {}

    def _reject_existing(self, asked: Asked, key: str) -> None:
        try:
            self.head(key)
        except NotFoundError:
            return
        raise AlreadyExistsError(f"{asked}: the object exists already")

    def _fetch(
        self, asked: Asked, key: str, most_s: float, **more: Any
    ) -> tuple[dict[str, Any], memoryview]:
        path = self._path(key)

        def call() -> tuple[dict[str, Any], memoryview]:
            fs, pause_s = self._clients.get(), self._time.seconds()
            bucket = self._location.bucket
            answer, data = sync_within(
                most_s, fs, _get_object, fs, pause_s, Bucket=bucket, Key=path, **more
            )
            return answer, memoryview(data).toreadonly()

        return ask_fsspec(asked, call)

    def _call(
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

    def _path(self, key: str) -> str:
        self._limits.check_key(key)
        return self._root + check_key(key)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        policy, part_bytes = self._part_policy, self._copy_part_bytes
        return _rebuild, (self._location, self._options, policy, part_bytes, self._given_limits)


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


def _rebuild(
    location: Location,
    options: dict[str, Any],
    part_policy: RetryPolicy,
    copy_part_bytes: int,
    limits: StoreLimits | None,
) -> S3fsStore:
    return S3fsStore(
        location,
        options,
        part_policy=part_policy,
        copy_part_bytes=copy_part_bytes,
        limits=limits,
    )
