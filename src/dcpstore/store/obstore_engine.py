"""The Rust engine: S3, Google, Azure, local folders and memory, through obstore's own verbs.

Calls release the GIL and block the calling thread. Bodies of puts are sent from the
caller's memory without a copy; answers are Rust memory seen through a memoryview. obstore's store
objects are made late, one per purpose and time-out, and never cross a fork.

An engine gathers the body of an answer in memory of its own and hands it out, and then it is copied
again. Two short cuts let the kernel copy ranges straight into their place: objects of a local
folder are files, and see `dcpstore.store.http_ranges`. Where the answer is not just what was asked
for, the engine asks in its own way and knows what its errors mean.
"""

from __future__ import annotations

import logging
import math
import os
import re
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from io import FileIO
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import obstore
import obstore.exceptions
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, S3Store

from dcpstore.errors import CheckpointError, ConfigError, NotFoundError
from dcpstore.store.base import (
    Capabilities,
    CopyMode,
    CopySource,
    Destination,
    Fetched,
    IfMatch,
    Location,
    ObjectInfo,
    PutMode,
    Tail,
    num_bytes_of,
)
from dcpstore.store.engine import (
    NEVER_BEGAN,
    NO_CREDENTIALS,
    Answer,
    Asked,
    Engine,
    PartStream,
    Publication,
    WrongRegionError,
    check_length,
    checked_tail,
    from_answer,
    no_connection,
    trimmed,
    unresolved,
)
from dcpstore.store.http_ranges import HttpRanges, open_ranges, region_of
from dcpstore.store.local import TEMPORARY, LocalFile, folders_in
from dcpstore.store.options import ObstoreSettings, translate
from dcpstore.store.retry import RetryPolicy, call_with_retries
from dcpstore.text import redact

if TYPE_CHECKING:
    from dcpstore.store.fsspec_engine import FsspecStore
    from dcpstore.store.s3fs_engine import S3fsStore

logger = logging.getLogger(__name__)

Purpose = Literal["read", "put", "parts"]
_CONNECT_S = 10.0
_MOST_CLIENTS = 16  # one takes 5 ms to make, and keeps connections of its own
_BACKOFF_SHARE = 0.1  # of the deadline: the longest delay before a part is sent again
# The processes that started obstore's Rust runtime. There is one per process, it does
# not survive a fork, and nothing but this module can know that it was started: the one
# piece of process-global state of the package.
_runtime_pids: set[int] = set()


class ObstoreClients:
    """Opens obstore's stores for one location on first use. Thread-safe.

    Args:
        location: The root.
        settings: Translated options.
        part_policy: For the requests that only obstore itself can repeat, and for how long an
            answer may pause.
    """

    def __init__(
        self, location: Location, settings: ObstoreSettings, part_policy: RetryPolicy
    ) -> None:
        self._location = location
        self._settings = settings
        self._part_policy = part_policy
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[Purpose, float], Any] = OrderedDict()
        self._memory: MemoryStore | None = None
        self._region_lock = threading.Lock()
        self._is_region_known = False
        self.ranges = self._open_ranges()
        """What receives ranges without obstore; None where only obstore can ask for them."""

    def _open_ranges(self) -> HttpRanges | None:
        if not self._location.bucket:  # that is, on no server
            return None
        return open_ranges(self._location, self._settings, self._part_policy.timeout_floor_s)

    def get(self, purpose: Purpose, timeout_s: float) -> Any:
        """Return the store for a purpose; the one for ``"parts"`` repeats its requests.

        obstore takes time-outs for all requests of a client only. So there is one for each
        time-out, to two digits; the few that are usual are kept, with their connections.

        Args:
            purpose: What for.
            timeout_s: Of one request, from its beginning to the end of its answer.

        Raises:
            ConfigError: In a forked child, before anything touches the Rust runtime.
        """
        self._refuse_after_fork()
        kind = purpose, _two_digits(timeout_s)
        with self._lock:
            if kind not in self._open:
                _runtime_pids.add(os.getpid())
                self._open[kind] = self._make(*kind)
                if len(self._open) > _MOST_CLIENTS:
                    self._open.popitem(last=False)
            self._open.move_to_end(kind)
            return self._open[kind]

    def close(self) -> None:
        """Drop the clients; a later `get` opens new ones. Memory is kept."""
        with self._lock:
            self._open.clear()
        if self.ranges is not None:
            self.ranges.close()

    def follow_region(self) -> bool:
        """Ask, once, in which region the bucket lies, and sign for that; whether it is known."""
        location, config = self._location, self._settings.config
        with self._region_lock:
            if not self._is_region_known and (found := region_of(location, self._settings)):
                logger.warning(
                    "%s: the bucket lies in %s, not in %s. Set the region to spare two requests",
                    *(location.url, found, config["region"]),
                )
                config["region"] = found
                self.close()
                self.ranges = self._open_ranges()
                self._is_region_known = True
            return self._is_region_known

    def _refuse_after_fork(self) -> None:
        if not _runtime_pids - {os.getpid()}:
            return
        raise ConfigError(
            f"the obstore engine cannot be used in a forked process ({self._location.url}): "
            "its runtime does not survive a fork. Start the process with multiprocessing's "
            "'spawn' or 'forkserver', or open the store with engine='fsspec'"
        )

    def _make(self, purpose: Purpose, timeout_s: float) -> Any:
        scheme, settings = self._location.scheme, self._settings
        if scheme == "file":
            return LocalStore()
        if scheme == "memory":
            self._memory = self._memory or MemoryStore()
            return self._memory
        makers: dict[str, Any] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
        more: dict[str, Any] = {}
        if settings.credential_provider is not None:
            more["credential_provider"] = settings.credential_provider
        try:
            return makers[scheme](
                self._location.bucket,
                config=settings.config,
                client_options=self._client_options(purpose, timeout_s),
                retry_config=_retry_config(
                    self._part_policy if purpose == "parts" else RetryPolicy(1), timeout_s
                ),
                **more,
            )
        except (BaseError, TypeError, ValueError) as error:
            raise ConfigError(
                f"cannot open {self._location.url}: {redact(str(error)).splitlines()[0]}"
            ) from None  # the original text may carry configuration values

    def _client_options(self, purpose: Purpose, timeout_s: float) -> dict[str, Any]:
        """Return what bounds one request.

        The read timeout notices an answer that pauses. Puts have none, as it also runs while a
        body is being sent (measured: one of 1 s breaks off an upload of 4 s that never pauses).
        """
        pause_s = min(self._part_policy.timeout_floor_s, timeout_s)
        options = {
            "connect_timeout": _duration(min(_CONNECT_S, timeout_s)),
            "timeout": _duration(timeout_s),
            "read_timeout": _duration(pause_s),
            **self._settings.client_options,
        }
        if purpose != "read" or not _has_read_timeout():
            del options["read_timeout"]
        return options


def _has_read_timeout() -> bool:
    """Tell whether this obstore knows the option: since 0.10."""
    major, minor = obstore.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (0, 10)


def _two_digits(seconds: float) -> float:
    """Round down, so that what is cut to the time that is left shares clients too."""
    unit = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    return float(f"{math.floor(seconds / unit + 1e-6) * unit:.6g}")


def _duration(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms"


def _retry_config(policy: RetryPolicy, timeout_s: float) -> dict[str, Any]:
    """Return how obstore repeats, so that the last try ends before the deadline.

    obstore compares its ``retry_timeout`` when a try has failed. Then it waits, and then the
    next try takes no longer than its time-out.
    """
    longest_s = min(policy.max_delay_s, _BACKOFF_SHARE * policy.total_deadline_s)
    backoff = {
        "init_backoff": timedelta(seconds=min(policy.base_delay_s, longest_s)),
        "max_backoff": timedelta(seconds=longest_s),
        "base": 2,
    }
    begins_s = max(0.0, policy.total_deadline_s - timeout_s - longest_s)
    return {
        "max_retries": policy.max_attempts - 1,
        "retry_timeout": timedelta(seconds=begins_s),
        "backoff": backoff,
    }


_DRAIN_S = 60.0
_MIB = 1 << 20
_LONG_READ_BYTES = 64 * _MIB
_STEP_BYTES = 4 * _MIB
_T = TypeVar("_T")


class ObstoreStore(Engine):
    """A `Store` on obstore; arguments are those of `Engine`.

    A pickled copy opens its own connections. ``memory://`` is private to the object: a pickled
    copy starts empty.

    Raises:
        NotHonoured: If an option has no meaning for obstore.
    """

    _foreign_errors = (BaseError, OSError, ValueError)

    def _map_error(self, asked: Asked, error: BaseException) -> CheckpointError:
        if isinstance(error, OSError) and error.errno is not None:  # of Python, not of obstore
            from dcpstore.store.fsspec_clients import from_fsspec

            return from_fsspec(asked, error)
        return from_obstore(asked, error)

    def _connect(self) -> None:
        location, policy = self._location, self._part_policy
        settings = translate(location, self._options)
        self._clients = ObstoreClients(location, settings, policy)
        self._copier: S3fsStore | FsspecStore | None = None

    @property
    def capabilities(self) -> Capabilities:
        """What this store promises."""
        return Capabilities(
            atomic_create=True,
            compare_and_swap=self._location.scheme != "file",
            acknowledges_puts=True,
            gathers_parts=True,
            fills_memory=self._location.scheme == "file"
            or (self._clients.ranges is not None and self._clients.ranges.is_of_use),
            limits=self._limits,
        )

    def get(self, key: str) -> Fetched:
        """Fetch a whole object. For a long one a second request is sent, with more time."""
        path = self._path(key)

        def call() -> Fetched:
            answer = obstore.get(self._client(), path)
            if answer.meta["size"] > _LONG_READ_BYTES and self._location.bucket:
                answer = obstore.get(self._clients.get("read", self._time.left_s()), path)
            etag = self._mark(answer.meta)
            return Fetched(memoryview(answer.bytes()), etag)

        return self._ask_again_elsewhere(Asked("get", key, self.url), call)

    def _fetch_range(self, asked: Asked, path: str, start: int, end: int) -> memoryview:
        memory = np.empty(end - start, np.uint8).data
        if self._receive(asked, path, start, Destination([memory])):
            return memory.toreadonly()
        del memory
        return self._fetch_by_engine(asked, path, start, end)

    def _fetch_by_engine(self, asked: Asked, path: str, start: int, end: int) -> memoryview:
        return self._ask_again_elsewhere(
            asked,
            lambda: memoryview(obstore.get_range(self._client(), path, start=start, end=end)),
        )

    def _receive(self, asked: Asked, path: str, start: int, destination: Destination) -> bool:
        """Receive a range over a connection of our own; False if the engine has to ask."""
        ranges = self._clients.ranges
        if ranges is None:
            return False
        fetch = partial(ranges.fetch, self._client(), path, asked, start, destination)
        return self._ask(asked, lambda: fetch(self._time.reading_s()))

    def fill(self, key: str, start: int, destination: Destination) -> None:
        """Fetch a range straight into memory of the caller's."""
        num_bytes, path = destination.num_bytes, self._path(key)
        if not num_bytes:
            return
        asked = Asked(f"get [{start}, {start + num_bytes}) of", key, self.url)
        if self._location.scheme == "file":
            if _read_file(f"/{path}", start, destination):
                return
        elif self._receive(asked, path, start, destination):
            return
        # In steps: what is received in place may be longer than what there is memory for.
        for at in range(0, num_bytes, _STEP_BYTES):
            first, end = start + at, start + min(num_bytes, at + _STEP_BYTES)
            fetch = partial(self._fetch_by_engine, asked, path, first, end)
            data = check_length(asked, first, end, fetch, lambda: self.head(key))
            with destination.writing(lambda: None):
                destination.take(data, at)

    def _fetch_tail(self, asked: Asked, path: str, num_bytes: int) -> Tail | None:
        if self._location.scheme == "az":  # it knows no ranges from the end
            return None

        def call() -> Tail:
            answer = obstore.get(self._client(), path, options={"range": {"suffix": num_bytes}})
            found = self._info(answer.meta)
            data = memoryview(answer.bytes())
            tail = Tail(data, found.size_bytes, found.etag, found.modified)
            return checked_tail(asked, num_bytes, answer.range[0], tail)

        return self._ask_again_elsewhere(asked, call)

    def head(self, key: str) -> ObjectInfo:
        """Look an object up without its bytes."""
        path = self._path(key)
        asked = Asked("head", key, self.url)
        meta = self._ask_again_elsewhere(asked, lambda: obstore.head(self._client(), path))
        return self._info(meta)

    def _put(self, asked: Asked, path: str, body: memoryview, mode: PutMode) -> str | None:
        if self._location.scheme == "file":
            return self._write_file(asked, path, iter([(body,)]), is_new=mode == "create")
        theirs, sent = self._theirs(mode), self._body(body)

        def call() -> Any:
            store = self._client("put", sent.nbytes)
            return obstore.put(store, path, sent, mode=theirs, use_multipart=False)

        return self._mark(self._ask_again_elsewhere(asked, call))

    def _put_parts(self, asked: Asked, path: str, stream: PartStream) -> str | None:
        if self._location.scheme == "file":
            return self._write_file(asked, path, stream.parts)
        source = _Source(stream, self._body, waits=bool(self._location.bucket))
        publication = Publication()
        try:
            result = self._ask(
                asked,
                lambda: obstore.put(
                    self._client("parts", stream.part_bytes),
                    path,
                    source,
                    use_multipart=True,
                    chunk_size=stream.part_bytes,
                    max_concurrency=stream.max_concurrency,
                ),
            )
        except CheckpointError as error:
            if source.error is not None:
                raise source.error from None
            if not was_completing(error.__cause__):
                raise
            return publication.settle(
                error,
                lambda: call_with_retries(lambda _: self.head(asked.key), self._part_policy),
                source.num_bytes,
                source.num_parts,
            )
        return self._mark(result)

    def _write_file(
        self,
        asked: Asked,
        path: str,
        parts: Iterator[tuple[memoryview, ...]],
        *,
        is_new: bool = False,
    ) -> str | None:
        def look(path: str) -> str | None:
            return self._mark(obstore.head(self._client(), path.lstrip("/")))

        file = self._ask(asked, lambda: LocalFile(Path("/", path), self._flushed))
        try:
            # Only the file's own errors are mapped; the caller's come through.
            for pieces in parts:
                self._ask(asked, partial(file.write, *pieces))
                del pieces
            return self._ask(asked, lambda: file.publish(look, is_new=is_new))
        finally:
            file.drop()

    def copy_from(self, source: CopySource, key: str, mode: CopyMode = "overwrite") -> None:
        """Let the provider copy an object; the fsspec engine asks it."""
        from dcpstore.store.fsspec_engine import open_fsspec

        if self._copier is None:
            self._copier = open_fsspec(self._location, self._options, self._part_policy)
        self._copier.copy_from(source, key, mode)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below the folder ``prefix``."""
        asked = Asked("list", prefix, self.url)
        below = (self._root + prefix).rstrip("/") or None

        def begin() -> tuple[Any, Any]:
            stream = iter(obstore.list(self._client(), prefix=below))
            return stream, next(stream, None)

        stream, chunk = self._ask_again_elsewhere(asked, begin)
        while chunk is not None:
            for meta in chunk:
                if TEMPORARY not in meta["path"]:
                    yield self._info(meta)
            chunk = self._ask(asked, lambda: next(stream, None))

    def _folders(self, asked: Asked, below: str) -> Sequence[str]:
        if self._location.scheme == "file":
            return self._ask(asked, lambda: folders_in(Path("/", below)))

        def call() -> list[str]:
            found = obstore.list_with_delimiter(self._client(), prefix=below.rstrip("/") or None)
            return [path.rpartition("/")[2] for path in found["common_prefixes"]]

        return self._ask_again_elsewhere(asked, call)

    def close(self) -> None:
        """Drop the clients; a later call opens new ones."""
        self._clients.close()
        copier, self._copier = self._copier, None
        if copier is not None:
            copier.close()

    def _delete(self, paths: Sequence[str]) -> Sequence[CheckpointError]:
        asked = Asked(f"delete {len(paths)} objects, first", paths[0], self.url)
        try:
            self._ask_again_elsewhere(asked, lambda: obstore.delete(self._client(), list(paths)))
        except NotFoundError:
            if self._location.scheme == "s3":
                raise  # S3 knows no missing object here: it is the bucket
            if len(paths) > 1:
                for path in paths:
                    self._delete([path])
        return ()

    def _ask_again_elsewhere(self, asked: Asked, call: Callable[[], _T]) -> _T:
        """Ask; once more if the bucket lies in another region. Only what can be asked again.

        An upload in parts cannot: obstore may have taken some of them already.
        """
        try:
            return self._ask(asked, call)
        except WrongRegionError as error:
            if not self._clients.follow_region():
                raise
            was_refused = error.refused
        try:
            return self._ask(asked, call)
        except CheckpointError as error:
            error.refused = error.refused and was_refused  # what holds for both attempts
            raise

    def _client(self, purpose: Purpose = "read", num_bytes: int = 0) -> Any:
        """Return the client for a request that moves so many bytes.

        Sizes are rounded up to powers of two: each time-out is a client, with connections of
        its own. Reads notice a silent server by the pause, so one time-out does for all.
        """
        if purpose == "read":
            return self._clients.get(purpose, self._time.reading_s())
        size = max(_MIB, 1 << max(0, num_bytes - 1).bit_length())
        return self._clients.get(purpose, self._time.seconds(size))

    def _body(self, view: memoryview) -> memoryview:
        """Memory keeps the very buffers it is given, but they are the caller's to refill."""
        return memoryview(bytes(view)) if self._location.scheme == "memory" else view

    def _mark(self, meta: Mapping[str, Any]) -> str | None:
        """Google's conditional puts compare generations, so there that is the mark."""
        name = "version" if self._location.scheme == "gs" else "e_tag"
        mark = meta.get(name) or meta.get("e_tag")
        return str(mark) if mark else None

    def _theirs(self, mode: PutMode) -> Any:
        if not isinstance(mode, IfMatch):
            return mode
        return {"version" if self._location.scheme == "gs" else "e_tag": mode.etag}

    def _info(self, meta: Mapping[str, Any]) -> ObjectInfo:
        key = str(meta["path"]).removeprefix(self._root)
        return ObjectInfo(key, int(meta["size"]), self._mark(meta), meta["last_modified"])


class _Source:
    """The pieces of the parts as obstore's iterator; keeps what their iteration raised.

    obstore makes parts of ``part_bytes`` from whatever pieces it is given, each of which it
    reads where it lies. It aborts the upload as soon as an exception leaves here. A part that
    is still being sent then may land after the abort, and S3 would keep it forever, so the
    exception waits until obstore has dropped every piece. A short last part is not waited
    for: obstore keeps it, unsent, until it is told that there is no other.
    """

    def __init__(
        self, stream: PartStream, body: Callable[[memoryview], memoryview], *, waits: bool
    ) -> None:
        self._waits = waits
        self._part_bytes = stream.part_bytes
        self._body = body
        self._parts = stream.parts
        self._pieces: deque[memoryview] = deque()
        self._sent: list[weakref.ref[memoryview]] = []
        self.error: Exception | None = None
        self.num_bytes = 0
        self.num_parts = 0

    def __iter__(self) -> Iterator[memoryview]:
        return self

    def __next__(self) -> memoryview:
        while not self._pieces:
            self._take_part()
        return self._body(self._pieces.popleft())

    def _take_part(self) -> None:
        try:
            part = next(self._parts)
        except StopIteration:
            raise
        except Exception as error:
            self.error = error
            if self._waits:
                self._wait_for_parts()
            raise
        self._sent = [one for one in self._sent if one() is not None]
        num_bytes = num_bytes_of(part)
        self.num_bytes += num_bytes
        self.num_parts += 1
        if num_bytes == self._part_bytes:
            self._sent.extend(map(weakref.ref, part))
        self._pieces.extend(part)

    def _wait_for_parts(self) -> None:
        until = monotonic() + _DRAIN_S
        while monotonic() < until and any(one() is not None for one in self._sent):
            sleep(0.005)


def _read_file(path: str, start: int, into: Destination) -> bool:
    """Read a range of a file into its destination; False if it is not there as a whole."""
    try:
        with Path(path).open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size < start + into.num_bytes:
                return False
            file.seek(start)
            with into.writing(lambda: None) as pieces:
                return all(_read_exactly(file, piece) for piece in pieces)
    except OSError:
        return False


def _read_exactly(file: FileIO, piece: memoryview) -> bool:
    at = 0
    while at < len(piece):
        count = file.readinto(piece[at:])
        if not count:
            return False
        at += count
    return True


# --- what its errors say ------------------------------------------------------------------

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]+)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]+)</Message>")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_COMPLETING = re.compile(
    r"performing (?:(?:POST|DELETE) \S*[?&]uploadId=|PUT \S*[?&]comp=blocklist)"
)
# What obstore shows of the reason why no connection came about, in the text for debugging.
_REFUSED = re.compile(r"kind: (ConnectionRefused|HostUnreachable|NetworkUnreachable)")
_UNRESOLVED = re.compile(r'"dns error".{0,200}?error: "([^"]*)"', re.DOTALL)
_BAD_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*((?:\w+[\s(]*)+)")
_NO_TLS = re.compile(r"InvalidMessage\(\s*InvalidContentType")
_CLOSED = re.compile(r"IncompleteMessage|kind: (?:ConnectionReset|BrokenPipe|UnexpectedEof)")
# What servers answer on a port for https: nginx, Go's (MinIO), Apache.
_WANTS_TLS = re.compile(
    r"HTTP request (?:was sent )?to (?:an )?HTTPS|plain HTTP to an SSL", re.IGNORECASE
)
_TIMED_OUT = re.compile(r"HttpError \{\s*kind: Timeout")
_TRANSPORT = re.compile(
    r"error sending request|connect|timed? ?out|reset|broken pipe|incomplete|closed before|"
    r"end of file|\beof\b|body error|decoding|error reading a body|dns",
    re.IGNORECASE,
)


def from_obstore(asked: Asked, error: BaseException) -> CheckpointError:
    """Map an error of obstore (or of the Python callbacks it calls)."""
    text, _, debug = str(error).partition("\n\nDebug source:")
    name = type(error).__name__
    if name in ("UnknownConfigurationKeyError", "NotSupportedError", "InvalidPathError"):
        return ConfigError(f"{asked}: {trimmed(text)}")
    if isinstance(error, ValueError):
        return ConfigError(f"{asked}: the key or an option is not valid: {trimmed(text)}")
    return from_answer(asked, _with_obstore_reason(_read_obstore(name, error, text), debug))


def was_completing(error: BaseException | None) -> bool:
    """Tell whether an error of obstore may have come when all parts of an upload were there.

    That is, of the request that completes it, or of the one that obstore aborts it with then:
    obstore shows the last error only.
    """
    return _COMPLETING.search(str(error)) is not None


def _read_obstore(name: str, error: BaseException, text: str) -> Answer:
    status = _STATUS.search(text)
    code = _CODE.search(text)
    message = _MESSAGE.search(text)
    os_error = _OS_ERROR.search(text)
    known = {
        "AlreadyExistsError": 412,
        "PreconditionError": 412,
        "PermissionDeniedError": 403,
        "UnauthenticatedError": 401,
    }.get(name)
    if known is None and isinstance(error, FileNotFoundError):
        known = 404
    if known is None and "without LOCATION" in text:
        known = 301
    number = known or (int(status.group(1)) if status else None)
    return Answer(
        status=number,
        code=code.group(1) if code else None,
        text=trimmed(message.group(1) if message else _first_sentence(text)),
        is_transport=number is None and _TRANSPORT.search(text) is not None,
        never_began=os_error is not None and int(os_error.group(1)) in NEVER_BEGAN,
        no_credentials=any(word in text for word in NO_CREDENTIALS),
        speaks="https" if number == 400 and _WANTS_TLS.search(text) else None,
    )


def _with_obstore_reason(answer: Answer, debug: str) -> Answer:
    """Add why there was no connection, or no answer."""
    if not answer.is_transport:
        return answer
    if found := _BAD_CERTIFICATE.search(debug):
        said = " ".join(re.findall(r"\w+", found[1]))
        return replace(answer, text=said, untrusted=True)
    if found := _UNRESOLVED.search(debug):
        return unresolved(answer, trimmed(found[1]))
    if found := _REFUSED.search(debug):
        return replace(answer, text=no_connection(found[1]), unreachable=True)
    if _TIMED_OUT.search(debug):
        return replace(answer, text="no answer in time")
    if _NO_TLS.search(debug):
        return replace(answer, text="it answered something else", speaks="http")
    if _CLOSED.search(debug):
        return replace(answer, text="the connection was closed without an answer", unreachable=True)
    return replace(answer, unreachable=True)


def _first_sentence(text: str) -> str:
    """Drop the location and the address that obstore writes in front of the reason."""
    return text.rsplit(" - ", 1)[-1] if " - " in text else text
