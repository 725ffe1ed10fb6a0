"""What takes several requests of S3: multipart uploads, and copies of large objects."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dcpstore.errors import AlreadyExistsError, CheckpointError, NotFoundError
from dcpstore.ranges import ByteRange, cut
from dcpstore.store.error_map import Asked
from dcpstore.store.retry import RetryPolicy, call_with_retries
from dcpstore.store.server_copy import CopyMode, copy_with_retries

__all__ = ["MultipartUpload", "S3Source", "S3Target", "copy_object", "parameters_of", "send_all"]

_LOG = logging.getLogger("dcpstore.store")
_MOST_PARTS = 10_000
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
        call: Sends one operation to the bucket: what was asked for, the operation's name, and
            its parameters but for the bucket; raises our errors.
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

    def repeat(self, verb: str, operation: str, **more: Any) -> dict[str, Any]:
        """Send one operation on the object until it is answered."""
        asked = self.asked(verb)
        return call_with_retries(
            lambda: self.call(asked, operation, Key=self.path, **more), self.policy
        )


class MultipartUpload:
    """One multipart upload: begun at once, then parts from any thread, then an end."""

    def __init__(self, target: S3Target) -> None:
        self._target = target
        begun = target.repeat("begin the upload of", "create_multipart_upload")
        self._upload_id = begun["UploadId"]

    def send(self, number: int, part: memoryview) -> dict[str, Any]:
        """Send the part with a number, counted from 1."""
        verb = f"send part {number} of"
        more = {"UploadId": self._upload_id, "PartNumber": number, "Body": bytes(part)}
        answer = self._target.repeat(verb, "upload_part", **more)
        return {"PartNumber": number, "ETag": answer["ETag"]}

    def copy(self, number: int, span: ByteRange, source: S3Source) -> dict[str, Any]:
        """Let S3 copy a part from a range of another object."""
        answer = self._target.repeat(
            f"copy part {number} of",
            "upload_part_copy",
            UploadId=self._upload_id,
            PartNumber=number,
            CopySource=source.parameter,
            CopySourceRange=f"bytes={span.start}-{span.end - 1}",
        )
        return {"PartNumber": number, "ETag": answer["CopyPartResult"]["ETag"]}

    def complete(self, sent: list[dict[str, Any]]) -> str | None:
        """Publish the object, given what `send` returned in order; returns its ETag."""
        answer = self._target.repeat(
            "complete the upload of",
            "complete_multipart_upload",
            UploadId=self._upload_id,
            MultipartUpload={"Parts": sent},
        )
        return answer.get("ETag") or None

    def complete_copy(self, copied: list[dict[str, Any]], mode: CopyMode) -> None:
        """Publish the object, given what `copy` returned in order.

        Raises:
            AlreadyExistsError: If ``mode="create"`` and the object exists.
        """
        _copy(
            self._target,
            "complete_multipart_upload",
            mode,
            UploadId=self._upload_id,
            MultipartUpload={"Parts": copied},
        )

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
    target: S3Target, source: S3Source, size_bytes: int, part_bytes: int, mode: CopyMode
) -> None:
    """Let S3 copy an object: in one request, or in parts if it is larger than one.

    Raises:
        AlreadyExistsError: If ``mode="create"`` and the object exists.
    """
    if size_bytes <= part_bytes:
        _copy(target, "copy_object", mode, CopySource=source.parameter)
        return
    part_bytes = max(part_bytes, -(-size_bytes // _MOST_PARTS))
    spans = list(cut(ByteRange(0, size_bytes), part_bytes))
    upload = MultipartUpload(target)
    try:
        with ThreadPoolExecutor(_COPY_THREADS, "dcpstore-copy") as pool:
            numbers = range(1, len(spans) + 1)
            copied = pool.map(upload.copy, numbers, spans, [source] * len(spans))
            parts = list(copied)  # an error cancels those that have not begun
        upload.complete_copy(parts, mode)
    except BaseException:
        upload.abort()
        raise


def _copy(target: S3Target, operation: str, mode: CopyMode, **more: Any) -> None:
    """Send what makes a copy exist."""
    asked = target.asked("copy to").under(mode)

    def once() -> None:
        condition = _create_condition(target, asked, operation) if mode == "create" else {}
        target.call(asked, operation, Key=target.path, **condition, **more)

    copy_with_retries(once, target.policy)


def _create_condition(target: S3Target, asked: Asked, operation: str) -> dict[str, str]:
    """Return the condition that S3 decides by; where botocore knows none, look now."""
    if "IfNoneMatch" in parameters_of(_MODEL_NAMES[operation]):
        return {"IfNoneMatch": "*"}
    try:
        target.call(target.asked("head"), "head_object", Key=target.path)
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
