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
from dcpstore.store.base import ObjectInfo
from dcpstore.store.error_map import Asked
from dcpstore.store.retry import Deadline, RetryPolicy, call_with_retries
from dcpstore.store.server_copy import CopyMode, copy_with_retries
from dcpstore.store.verdicts import Publication

__all__ = ["MultipartUpload", "S3Source", "S3Target", "copy_object", "parameters_of", "send_all"]

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
