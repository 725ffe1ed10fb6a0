"""What the engines have in common: a root and its limits, time-outs, and what an answer proves."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any, TypeVar

from typing_extensions import Self

from dcpstore.errors import CheckpointError, ConflictError, CorruptError, NotFoundError, StoreError
from dcpstore.store.base import IfMatch, ObjectInfo, Origin, PutMode
from dcpstore.store.error_map import Asked
from dcpstore.store.limits import StoreLimits, check_key, limits_of
from dcpstore.store.location import Location
from dcpstore.store.retry import RetryPolicy, TimeLimit

_T = TypeVar("_T")
_NUM_PARTS = re.compile(r'-(\d+)"?$')  # the end of a multipart object's ETag
_MOST_SKEW = timedelta(minutes=15)  # between clocks: S3 refuses requests that are further off


class Engine(ABC):
    """A `Store` that sends requests, each of them once. Picklable by its configuration.

    Args:
        location: The root.
        storage_options: fsspec's options.
        part_policy: How long a request may take, and how long the engine keeps trying to send a
            part of `put_parts`, and to copy.
        limits: The most that the store takes; None for what is known of the scheme.
    """

    def __init__(
        self,
        location: Location,
        storage_options: Mapping[str, Any] | None = None,
        *,
        part_policy: RetryPolicy | None = None,
        limits: StoreLimits | None = None,
    ) -> None:
        self._location = location
        self._options = dict(storage_options or {})
        self._part_policy = part_policy or RetryPolicy()
        self._time = TimeLimit(self._part_policy)
        self._given_limits = limits or limits_of(location.scheme)
        root = location.prefix.replace(os.sep, "/").rstrip("/")
        self._limits = self._given_limits.below(f"{root}/" if root else "")
        self._root = f"{root}/".lstrip("/")

    @property
    def url(self) -> str:
        """The root, without secrets."""
        return self._location.url

    @property
    def origin(self) -> Origin:
        """Where the objects lie, for a provider's own copies."""
        return Origin(self._location, self._options)

    def within(self, most_s: float) -> Self:
        """Return the same store for one request, which fails when so many seconds are over."""
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__, _time=self._time.within(most_s))
        return view

    @abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """Look an object up without its bytes."""

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        """Fetch bytes ``[start, end)``."""
        if end <= start:
            return memoryview(b"")
        asked = Asked(f"get [{start}, {end}) of", key, self.url)
        return check_length(
            asked,
            start,
            end,
            lambda: self._fetch_range(asked, self._path(key), start, end),
            lambda: self.head(key),
        )

    @abstractmethod
    def _fetch_range(self, asked: Asked, path: str, start: int, end: int) -> memoryview:
        """Fetch a range that is not empty; its length is checked afterwards."""

    def _path(self, key: str) -> str:
        self._limits.check_key(key)
        return self._root + check_key(key)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        made = partial(type(self), part_policy=self._part_policy, limits=self._given_limits)
        return made, (self._location, self._options)


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
    the form that its own answers give never matches. A mark that is truly stale is refused
    twice. Neither refusal proves that nothing was put, where a proxy sends requests again:
    the caller has to read back.
    """
    try:
        return send(mode)
    except ConflictError:
        if not isinstance(mode, IfMatch) or not mode.etag.startswith('"'):
            raise
        return send(IfMatch(mode.etag.strip('"')))


class Publication:
    """What became of an upload whose completion was not answered, or was refused when repeated.

    A repeated completion that finds no upload (404) may mean that the first one took effect, or
    that somebody aborted the upload. Which, the object tells: one of the upload's size and
    number of parts, stored since it began, is the upload's. Data objects have names that nobody
    else puts; the times keep a file that was to be replaced from being taken for the new one.
    """

    def __init__(self, now: Callable[[], datetime] = lambda: datetime.now(timezone.utc)) -> None:
        self._since = now() - _MOST_SKEW

    def settle(
        self,
        error: CheckpointError,
        head: Callable[[], ObjectInfo],
        num_bytes: int,
        num_parts: int,
    ) -> str | None:
        """Return the object's ETag if it is there; else raise what the completion raised."""
        if not isinstance(error, NotFoundError) and not getattr(error, "retryable", False):
            raise error
        try:
            found = head()
        except CheckpointError:
            raise error from None
        parts = _NUM_PARTS.search(found.etag or "")
        if (
            found.size_bytes != num_bytes
            or (parts is not None and int(parts[1]) != num_parts)
            or (found.modified is not None and found.modified < self._since)
        ):
            raise error
        return found.etag


def deletes_failed(cause: CheckpointError, num_left: int, num_keys: int) -> StoreError:
    """Say how many deletes failed; what `cause` says of retries holds for all."""
    message = f"up to {num_left} of {num_keys} deletes failed, first: {cause.message}"
    if not isinstance(cause, StoreError):
        return StoreError(message)
    return cause.said_as(message)
