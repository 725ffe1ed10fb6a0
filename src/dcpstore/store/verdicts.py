"""What every engine must conclude in the same way from what a store answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from dcpstore.errors import (
    CheckpointError,
    ConflictError,
    CorruptError,
    NotFoundError,
    StoreError,
)
from dcpstore.store.base import IfMatch

if TYPE_CHECKING:
    from dcpstore.store.base import ObjectInfo, PutMode
    from dcpstore.store.error_map import Asked

__all__ = ["check_length", "compare_etag", "deletes_failed", "with_either_mark"]

_T = TypeVar("_T")


def check_length(
    asked: Asked,
    start: int,
    end: int,
    fetch: Callable[[], memoryview],
    head: Callable[[], ObjectInfo],
) -> memoryview:
    """Fetch a range and accept it only at its exact length.

    A short answer, or a refusal that neither another try nor other credentials would
    change (416), costs one `head`: it alone tells a truncated object from a broken
    answer.

    Raises:
        CorruptError: If the object ends before ``end``.
        StoreError: (retryable) If the answer has another length than the range.
    """
    try:
        data = fetch()
    except StoreError as error:
        if not (error.retryable or error.denied):
            _reject_truncated(asked, start, end, head, error)
        raise
    if len(data) == end - start:
        return data
    if len(data) < end - start:
        _reject_truncated(asked, start, end, head, None)
    raise StoreError(
        f"{asked} failed: {len(data)} bytes came instead of {end - start}",
        key=asked.key,
        retryable=True,
    )


def _reject_truncated(
    asked: Asked,
    start: int,
    end: int,
    head: Callable[[], ObjectInfo],
    cause: CheckpointError | None,
) -> None:
    size = head().size_bytes
    if size < end:
        raise CorruptError(
            f"{asked} failed: the object ends at byte {size}; it was truncated or replaced",
            key=asked.key,
            start=start,
            end=end,
        ) from cause


def compare_etag(asked: Asked, mode: IfMatch, head: Callable[[], ObjectInfo]) -> None:
    """Compare before a put, where the store itself cannot. Not atomic.

    Raises:
        ConflictError: If the object is another or absent.
    """
    try:
        found = head().etag
    except NotFoundError as error:
        raise ConflictError(f"{asked}: the object is gone") from error
    if found != mode.etag:
        raise ConflictError(f"{asked}: its ETag is {found}, not {mode.etag}: somebody replaced it")


def with_either_mark(mode: PutMode, send: Callable[[PutMode], _T]) -> _T:
    """Put; where a quoted ETag is refused, try the bare one before calling it a conflict.

    Ceph 16 compares the header as sent with an ETag that it keeps without quotes, so
    the form that its own answers give never matches. A refusal has changed nothing,
    and a mark that is truly stale is refused twice.
    """
    try:
        return send(mode)
    except ConflictError:
        if not isinstance(mode, IfMatch) or not mode.etag.startswith('"'):
            raise
        return send(IfMatch(mode.etag.strip('"')))


def deletes_failed(cause: CheckpointError, num_left: int, num_keys: int) -> StoreError:
    """Say how many deletes failed; what `cause` says of retries holds for all."""
    message = f"up to {num_left} of {num_keys} deletes failed, first: {cause.message}"
    if not isinstance(cause, StoreError):
        return StoreError(message)
    return StoreError(
        message,
        key=cause.key,
        retryable=cause.retryable,
        throttled=cause.throttled,
        retry_after_s=cause.retry_after_s,
        denied=cause.denied,
    )
