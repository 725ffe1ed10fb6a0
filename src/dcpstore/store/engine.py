"""What the engines have in common: how foreign errors become ours, and a root with its limits.

obstore keeps an answer's status and body only inside the text of its error, s3fs
keeps a parsed one in ``__cause__`` and gcsfs an HTTP code as an attribute. All of
them are first read into an `Answer`, beside the client whose errors they are; one table, here,
then says what it means.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from typing_extensions import Buffer, Self

from dcpstore.errors import (
    AlreadyExistsError,
    CheckpointError,
    ConfigError,
    ConflictError,
    CorruptError,
    NotFoundError,
    StoreError,
)
from dcpstore.store.base import (
    Capabilities,
    IfMatch,
    Location,
    ObjectInfo,
    Origin,
    Part,
    PutMode,
    StoreLimits,
    Tail,
    as_bytes_view,
    chained,
    check_key,
    check_prefix,
    checked_pieces,
    joined,
    limits_of,
    num_bytes_of,
)
from dcpstore.store.retry import RetryPolicy, TimeLimit, call_with_retries
from dcpstore.text import printable, redact, without_secrets

_T = TypeVar("_T")
_NUM_PARTS = re.compile(r'-(\d+)"?$')  # the end of a multipart object's ETag
_MOST_SKEW = timedelta(minutes=15)  # between clocks: S3 refuses requests that are further off
_MAX_TEXT = 300
_DELETE_BATCH = 1000
_MAX_FOREIGN_TEXT = 2000
_RETRYABLE_CODES = frozenset(
    {"InternalError", "RequestTimeout", "ServiceUnavailable", "SlowDown", "OperationAborted"}
)
_THROTTLE_CODES = frozenset(
    {"SlowDown", "TooManyRequests", "Throttling", "ThrottlingException", "RequestLimitExceeded"}
    | {"ServerBusy", "ServiceUnavailable", "RequestThrottled", "BandwidthLimitExceeded"}
)
_EXPIRED_CODES = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired"})
# rustls's words, and those of Python's ssl.
_OTHER_NAME = re.compile(r"NotValidForName|mismatch|doesn't match")
_REGION_CODES = frozenset(
    {"PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed"}
    | {"IllegalLocationConstraintException"}
)
_MAY_RESOLVE_LATER = "Temporary failure in name resolution"
# Files are written under another name first, and these come before the rename.
NEVER_BEGAN = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
NO_CREDENTIALS = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"}
    | {"NoAuthTokenError", "SSOTokenLoadError", "UnauthorizedSSOTokenError", "ProfileNotFound"}
    | {"DefaultCredentialsError", "RefreshError", "TokenRetrievalError"}
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request wanted.

    Attributes:
        verb: In words, as a message shall show it.
        key: The key or the prefix.
        url: The store's root, without secrets.
        conditional: ``"create"`` or ``"match"`` for a put that may be refused for what
            is there; else None.
    """

    verb: str
    key: str
    url: str
    conditional: Literal["create", "match"] | None = None

    def under(self, mode: PutMode) -> Asked:
        """The same with the condition that a put mode sets."""
        if isinstance(mode, IfMatch):
            return replace(self, conditional="match")
        return replace(self, conditional="create") if mode == "create" else self

    def __str__(self) -> str:
        return f"{self.verb} {self.key!r} in {self.url}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said, as far as the engine lets us know.

    Attributes:
        status: HTTP status; None where no answer came.
        code: The store's own word for it, such as ``NoSuchBucket``.
        text: The message, trimmed and without secrets.
        retry_after_s: What a ``Retry-After`` header asked for.
        is_transport: Whether the connection failed rather than the request.
        no_credentials: Whether the request was never sent for want of credentials.
        never_began: Whether a file system refused before anything got its final name.
        unreachable: Whether there is no connection, or it was closed before an answer came: nobody
            listens, the name of the server is unknown, or it expects something else.
        untrusted: Whether there is no connection, because the certificate was refused.
        speaks: ``"http"`` or ``"https"`` where the server turned out to expect that, and the
            endpoint says the other.
    """

    status: int | None = None
    code: str | None = None
    text: str = ""
    retry_after_s: float | None = None
    is_transport: bool = False
    no_credentials: bool = False
    never_began: bool = False
    unreachable: bool = False
    untrusted: bool = False
    speaks: Literal["http", "https"] | None = None

    def __str__(self) -> str:
        said = " ".join(str(part) for part in (self.status, self.code) if part is not None)
        return f"{said}: {self.text}" if said and self.text else said or self.text


class WrongRegionError(ConfigError):
    """The bucket lies in another region than the one that requests are signed for."""


def from_answer(asked: Asked, answer: Answer) -> CheckpointError:
    """Say in our errors what an answer means."""
    refusal = _refusal(asked, answer)
    if refusal is not None:
        return refusal
    throttled = answer.status in (429, 503) or answer.code in _THROTTLE_CODES
    retryable = (
        throttled
        or answer.is_transport
        or answer.status == 408
        or answer.code in _RETRYABLE_CODES
        or (answer.status is not None and answer.status >= 500 and answer.status != 501)
    )
    return StoreError(
        f"{asked} failed: {answer or 'no reason given'}",
        key=asked.key,
        retryable=retryable,
        throttled=throttled,
        retry_after_s=answer.retry_after_s,
        refused=_did_nothing(answer),
        unreachable=answer.unreachable,
    )


def _did_nothing(answer: Answer) -> bool:
    """Tell whether an answer says for certain that the store did nothing, nor will do.

    No 5xx does: a proxy may answer one after the store acted. Neither does 408, nor its
    equivalent in S3, since they tell of the time only.
    """
    if answer.status is None:
        return answer.no_credentials or answer.never_began
    return 400 <= answer.status < 500 and answer.status != 408 and answer.code != "RequestTimeout"


def _refusal(asked: Asked, answer: Answer) -> CheckpointError | None:  # noqa: C901 - a table
    """Errors that another try would not change; None for all others."""
    if answer.code == "NoSuchBucket" or answer.code == "ContainerNotFound":
        return NotFoundError(
            f"{asked} failed: there is no such bucket ({answer}). Check the URL; "
            "dcpstore never creates a bucket"
        )
    if answer.code in _EXPIRED_CODES:
        return _denied(asked, answer, "the credentials have expired: renew them")
    if answer.no_credentials:
        return _denied(
            asked,
            answer,
            "no credentials: set storage_options (key and secret, profile, token or anon=True) "
            "or the environment's own",
        )
    if answer.untrusted:
        advice = (
            "Give that of its authority: on S3,"
            " storage_options={'client_kwargs': {'verify': 'ca.pem'}}"
        )
        if _OTHER_NAME.search(answer.text):
            advice = "It is for another name: write that one in endpoint_url"
        elif "expired" in answer.text.lower():
            advice = "The server needs a new one, or the clock here is wrong"
        message = f"{asked} failed: the server's certificate was refused ({answer}). {advice}"
        return StoreError(message, key=asked.key)
    if answer.speaks is not None:
        what = "does not speak TLS" if answer.speaks == "http" else "wants TLS"
        return ConfigError(
            f"{asked} failed: the server {what} ({answer}). Write {answer.speaks}:// in"
            " endpoint_url, or correct the port"
        )
    if answer.status in (401, 403):
        return _denied(
            asked,
            answer,
            "access is denied: check the credentials, the bucket's policy, and the key "
            "(S3 answers 403 for an absent key where ListBucket is not granted)",
        )
    if asked.conditional is not None and answer.status in (409, 412):
        return _lost_condition(asked, answer)
    if asked.conditional == "match" and answer.status == 404:
        return _lost_condition(asked, answer)
    if answer.code == "NoSuchUpload":
        return NotFoundError(
            f"{asked} failed: the upload is gone ({answer}). Somebody aborted it, or a rule of the "
            "bucket's did: nothing was stored. Try again"
        )
    if answer.status == 404:
        what = "object" if answer.code else "object or bucket"  # a HEAD's answer has no body
        return NotFoundError(f"{asked} failed: there is no such {what} ({answer}). Check the name")
    if answer.status == 501 and asked.conditional is not None:
        return ConfigError(
            f"{asked} failed: this store cannot put under such a condition ({answer}). "
            "Replace nothing there: save under a new name"
        )
    if answer.status in (301, 307) or answer.code in _REGION_CODES:
        return WrongRegionError(
            f"{asked} failed: the bucket lies in another region ({answer}). Set "
            "storage_options={'client_kwargs': {'region_name': ...}}"
        )
    return None


def _denied(asked: Asked, answer: Answer, advice: str) -> StoreError:
    said = f" ({answer})" if str(answer) else ""
    return StoreError(f"{asked} failed{said}: {advice}", key=asked.key, denied=True, refused=True)


def _lost_condition(asked: Asked, answer: Answer) -> CheckpointError:
    if asked.conditional == "create" and answer.status == 412:
        return AlreadyExistsError(f"{asked}: the object exists already ({answer})")
    return ConflictError(
        f"{asked}: another writer changed the object meanwhile ({answer}). Look at what is there"
    )


def from_throttle(asked: Asked, status: int, retry_after: str | None) -> CheckpointError:
    """Say that the store wants fewer requests, and how long it asked to wait."""
    return from_answer(
        asked, Answer(status, text="slow down", retry_after_s=seconds_in(retry_after))
    )


def from_transport(asked: Asked, error: BaseException) -> CheckpointError:
    """Map what made a connection fail before the whole answer was there."""
    name, text = type(error).__name__, trimmed(str(error))
    answer = Answer(text=f"{name}: {text}" if text else name, is_transport=True)
    return from_answer(asked, with_python_reason(answer, error))


def with_python_reason(answer: Answer, error: BaseException) -> Answer:
    """Add why there was no connection, which the causes of an error tell."""
    if not answer.is_transport:
        return answer
    is_late = False
    cause: BaseException | None = error
    for _ in range(8):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return replace(answer, text=trimmed(str(cause)), untrusted=True)
        if isinstance(cause, ssl.SSLError) and getattr(cause, "reason", None) in _NO_TLS:
            return replace(answer, text=trimmed(str(cause)), speaks="http")
        if isinstance(cause, socket.gaierror):
            return unresolved(answer, trimmed(cause.strerror or str(cause)))
        if isinstance(cause, ConnectionRefusedError) or getattr(cause, "errno", None) in (
            errno.EHOSTUNREACH,
            errno.ENETUNREACH,
        ):
            return replace(answer, text=no_connection(type(cause).__name__), unreachable=True)
        if cause is None:
            break
        is_late = is_late or "Timeout" in type(cause).__name__
        cause = cause.__cause__ or cause.__context__
    return replace(answer, unreachable=not is_late)


_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG"})


def unresolved(answer: Answer, said: str) -> Answer:
    """Add that the name of the server could not be resolved, and what the resolver said."""
    text = f"the name of the server could not be resolved ({said}): check the endpoint"
    # A resolver that is overloaded may answer later; one that knows no such name will not.
    return replace(answer, text=text, unreachable=_MAY_RESOLVE_LATER not in said)


def no_connection(kind: str) -> str:
    """Say why there is no connection, by the kind of the error."""
    what = "refused" if "Refused" in kind else "not possible: no route to the host"
    return f"the connection was {what}: check the endpoint, and whether the server runs"


class ForeignError(Exception):
    """What a client library raised: its type and its text, cleared of secrets.

    Stands in its place in a chain of exceptions, where tracebacks, logs and other ranks find it.
    """


def scrubbed(error: BaseException) -> ForeignError:
    """Return what an error may be chained as."""
    kind = type(error)
    text = without_secrets(str(error).partition("\n\nDebug source:")[0])[:_MAX_FOREIGN_TEXT]
    made = ForeignError(f"{kind.__module__}.{kind.__qualname__}: {printable(text, keep=chr(10))}")
    return made.with_traceback(error.__traceback__)


def seconds_in(value: object) -> float | None:
    """Read a ``Retry-After`` header."""
    try:
        return max(0.0, float(str(value)))
    except ValueError:
        return None  # an HTTP date or nothing: the backoff decides alone


def trimmed(text: str) -> str:
    """Return a message in one line of bounded length, without secrets."""
    flat = " ".join(redact(without_secrets(text)).split())
    return flat if len(flat) <= _MAX_TEXT else f"{flat[: _MAX_TEXT - 3]}..."


# --- the engines themselves --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartStream:
    """The parts of a large object, of which the first is a whole one. Holds none of them.

    Attributes:
        parts: The pieces of one part after the other.
        part_bytes: Size of every part but the last.
        max_concurrency: Most parts to send at a time.
    """

    parts: Iterator[tuple[memoryview, ...]]
    part_bytes: int
    max_concurrency: int


class Engine(ABC):
    """A `Store` that sends requests, each of them once. Picklable by its configuration.

    Args:
        location: The root.
        storage_options: fsspec's options.
        part_policy: How long a request may take, and how long the engine keeps trying to send a
            part of `put_parts`, and to copy.
        limits: The most that the store takes; None for what is known of the scheme.
        sync_local: Flush what is put into a local folder to the medium.
    """

    _foreign_errors: tuple[type[Exception], ...] = (Exception,)
    _map_error: Callable[[Asked, BaseException], CheckpointError]

    def __init__(
        self,
        location: Location,
        storage_options: Mapping[str, Any] | None = None,
        *,
        part_policy: RetryPolicy | None = None,
        limits: StoreLimits | None = None,
        sync_local: bool = True,
    ) -> None:
        self._location = location
        self._flushed: set[Path] | None = set() if sync_local else None
        self._options = dict(storage_options or {})
        self._part_policy = part_policy or RetryPolicy()
        self._time = TimeLimit(self._part_policy)
        self._given_limits = limits or self._usual_limits(location.scheme)
        root = location.prefix.replace(os.sep, "/").rstrip("/")
        self._limits = self._given_limits.below(f"{root}/" if root else "")
        self._root = f"{root}/".lstrip("/")
        self._connect()

    @abstractmethod
    def _connect(self) -> None:
        """Make what sends the requests, and send nothing."""

    @classmethod
    def _usual_limits(cls, scheme: str) -> StoreLimits:
        return limits_of(scheme)

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

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this store promises."""

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

    def get_tail(self, key: str, num_bytes: int) -> Tail:
        """Fetch the last bytes of an object, all if it is shorter, and learn how long it is.

        Servers refuse such a range of an empty object, and some any: those are asked twice.
        """
        if num_bytes <= 0:
            raise ConfigError(f"num_bytes={num_bytes} is not positive")
        path, asked = self._path(key), Asked(f"get the last {num_bytes} bytes of", key, self.url)
        try:
            tail = self._fetch_tail(asked, path, num_bytes)
        except StoreError as error:
            if error.retryable or error.denied:
                raise
            tail = None
        return tail or self._tail_of_range(asked, num_bytes)

    def _fetch_tail(self, asked: Asked, path: str, num_bytes: int) -> Tail | None:
        """Fetch the tail in one request; None where that cannot be."""
        del asked, path, num_bytes
        return None

    def _tail_of_range(self, asked: Asked, num_bytes: int) -> Tail:
        """Look how long the object is, and fetch its end. The mark is never too new."""
        found = self.head(asked.key)
        size_bytes = found.size_bytes
        try:
            data = self.get_range(asked.key, max(0, size_bytes - num_bytes), size_bytes)
        except CorruptError as error:
            raise StoreError(
                f"{asked} failed: the object was replaced meanwhile", key=asked.key, retryable=True
            ) from error
        return Tail(data, size_bytes, found.etag, found.modified)

    def folders(self, prefix: str = "") -> Sequence[str]:
        """Return the names of the folders right below the folder ``prefix``."""
        check_prefix(prefix)
        self._limits.check_key(prefix)
        return self._folders(Asked("list the folders of", prefix, self.url), self._root + prefix)

    @abstractmethod
    def _folders(self, asked: Asked, below: str) -> Sequence[str]:
        """List the folders below a path, which is empty or ends with a slash."""

    def put(self, key: str, data: Buffer, *, mode: PutMode = "overwrite") -> str | None:
        """Store one object in one atomic request and return its ETag."""
        path, body = self._path(key), as_bytes_view(data)
        asked = Asked("put", key, self.url).under(mode)
        self._limits.check_put(key, body.nbytes)
        if mode != "overwrite" and not self.capabilities.decides(mode):
            check_condition(asked, mode, lambda: self.head(key))
            mode = "overwrite"
        return with_either_mark(mode, lambda mode: self._put(asked, path, body, mode))

    @abstractmethod
    def _put(self, asked: Asked, path: str, body: memoryview, mode: PutMode) -> str | None:
        """Put under a condition that the store itself decides, or under none."""

    def put_parts(
        self, key: str, parts: Iterable[Part], *, part_bytes: int, max_concurrency: int
    ) -> str | None:
        """Store one large object from parts and return its ETag."""
        path = self._path(key)
        stream = checked_pieces(parts, part_bytes, self._limits)
        held = [next(stream, (memoryview(b""),))]
        if num_bytes_of(held[0]) < part_bytes:
            next(stream, None)  # raises: a part after a short one
            whole = joined(held.pop())
            return call_with_retries(
                lambda left_s: self.within(left_s).put(key, whole), self._part_policy
            )
        asked = Asked("put_parts", key, self.url)
        parts_left = PartStream(chained(held, stream), part_bytes, max_concurrency)
        return self._put_parts(asked, path, parts_left)

    @abstractmethod
    def _put_parts(self, asked: Asked, path: str, stream: PartStream) -> str | None:
        """Publish the object once all parts are there."""

    def delete_many(self, keys: Sequence[str]) -> None:
        """Delete objects; a missing one is no error."""
        paths = [self._path(key) for key in keys]
        failed: list[CheckpointError] = []
        for first in range(0, len(paths), _DELETE_BATCH):
            try:
                failed += self._delete(paths[first : first + _DELETE_BATCH])
            except StoreError as error:
                failed += [error] * (len(paths) - first)
                break
        if failed:
            raise deletes_failed(failed[0], len(failed), len(keys)) from failed[0]

    @abstractmethod
    def _delete(self, paths: Sequence[str]) -> Sequence[CheckpointError]:
        """Delete some objects; return why some of them stay, or raise why all may."""

    def _ask(self, asked: Asked, call: Callable[[], _T]) -> _T:
        """Call a client library and map what it raises, chained without secrets."""
        try:
            return call()
        except CheckpointError:
            raise
        except self._foreign_errors as error:
            mapped, cause = self._map_error(asked, error), scrubbed(error)
        # Not where the error is handled, which would chain it as the context.
        raise mapped from cause

    def _path(self, key: str) -> str:
        self._limits.check_key(key)
        return self._root + check_key(key)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        made = partial(
            type(self),
            part_policy=self._part_policy,
            limits=self._given_limits,
            sync_local=self._flushed is not None,
        )
        return made, (self._location, self._options)


_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")


def tail_in(asked: Asked, num_bytes: int, content_range: str, came: Tail) -> Tail | None:
    """Read the answer to a range from the end, perhaps the whole object; None if it is unclear.

    Args:
        asked: For messages.
        num_bytes: How many were asked for.
        content_range: The answer's header of that name; empty if it has none.
        came: What came, as if it were all of the object.
    """
    if not content_range:
        return replace(came, data=came.data[-num_bytes:])
    span = _CONTENT_RANGE.fullmatch(content_range)
    if span is None:
        return None
    return checked_tail(asked, num_bytes, int(span[1]), replace(came, size_bytes=int(span[2])))


def checked_tail(asked: Asked, num_bytes: int, start: int, tail: Tail) -> Tail:
    """Return what came from ``start`` on, if it is the end that was asked for.

    Raises:
        StoreError: (retryable) If it is not.
    """
    due_bytes = min(num_bytes, tail.size_bytes)
    if (start, len(tail.data)) != (tail.size_bytes - due_bytes, due_bytes):
        raise StoreError(
            f"{asked} failed: {len(tail.data)} bytes from {start} on came instead of the last"
            f" {due_bytes} of {tail.size_bytes}",
            key=asked.key,
            retryable=True,
        )
    return tail


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


def check_condition(asked: Asked, mode: PutMode, head: Callable[[], ObjectInfo]) -> None:
    """Check a condition before a put, where the store itself cannot. Not atomic.

    Raises:
        AlreadyExistsError: If the object to create is there.
        ConflictError: If the object to replace is another or absent.
    """
    try:
        found = head()
    except NotFoundError as error:
        if isinstance(mode, IfMatch):
            raise ConflictError(f"{asked}: the object is gone") from error
        return
    if not isinstance(mode, IfMatch):
        raise AlreadyExistsError(f"{asked}: the object exists already")
    if found.etag != mode.etag:
        raise ConflictError(
            f"{asked}: its ETag is {found.etag}, not {mode.etag}: another writer replaced it"
        )


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
    return cause.saying(message)
