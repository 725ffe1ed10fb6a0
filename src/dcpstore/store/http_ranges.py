"""Ranges of objects received where they belong, over connections of our own, with TLS or without.

An engine gathers an answer in memory of its own and hands it out, and then it is copied. Here the
bytes go straight from the connection to the caller's memory (measured: record 005). An object is
asked for by a URL that the engine signs, or with a token in a header; see `open_ranges`.

Python takes its lock again after every record of TLS (16 KiB), and threads that wait for the lock
make that dear. So only a few threads receive at a time, each whatever has come for it; all others
wait without it, each until a batch has come for its connection. `_Connection._receive` is all of
it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import socket
import ssl
import threading
import urllib.request
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from time import monotonic
from typing import Any
from urllib.error import HTTPError
from urllib.parse import SplitResult, quote, urlsplit
from urllib.request import HTTPSHandler, getproxies, proxy_bypass

import obstore

from dcpstore.store.base import Destination, Location
from dcpstore.store.engine import Asked, from_throttle, from_transport, scrubbed
from dcpstore.store.options import ObstoreSettings

logger = logging.getLogger(__name__)

_THROTTLED = frozenset({429, 503})
_STATUS = re.compile(rb"HTTP/1\.([01]) (\d{3})")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/")
_HEAD_BYTES = 16 << 10  # of an answer, at most; one record of TLS
_MOST_REASON_BYTES = 1 << 16
_MOST_IDLE = 256
_LEAST_S = 0.05
_MOST_DETOURS = 3
_MOST_TURNS = 4  # a guess: more than two cores have not been measured
_REGION_S = 10.0
_BATCH_BYTES = 256 << 10
_MOST_HELD_BYTES = 64 << 10  # of the body, but in OpenSSL's hands: a part of one record
_PORTS = {"http": 80, "https": 443}


class NoAnswer(Exception):
    """The connection ended before the answer did, or what came is not HTTP."""


class HttpRanges:
    """Ranged GETs over connections that are kept. Thread-safe.

    Args:
        requests: Say how an object is asked for.
        client_options: obstore's: time-outs, and whose certificates are trusted.
        pause_s: How long a server may be silent, where the options do not say.
    """

    def __init__(
        self, requests: Requests, client_options: Mapping[str, Any], pause_s: float
    ) -> None:
        given = {"connect_timeout": "10s", "read_timeout": f"{pause_s}s", **client_options}
        self._connect_timeout_s = _seconds(given["connect_timeout"])
        self._read_timeout_s = _seconds(given["read_timeout"])
        self._requests = requests
        self._trust = _trust_of(client_options)
        self._turns = threading.BoundedSemaphore(min(_MOST_TURNS, max(1, _num_cores() // 2)))
        self._num_detours = 0
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, str], list[_Connection]] = {}
        weakref.finalize(self, _close_all, self._idle).atexit = False

    def fetch(
        self, client: Any, path: str, asked: Asked, start: int, into: Destination, most_s: float
    ) -> bool:
        """Receive a range of an object into its destination.

        Args:
            client: obstore's, which signs URLs.
            path: Of the object, as obstore takes it.
            asked: What is fetched, for messages.
            start: First byte of the range in the object.
            into: Where it goes; its size tells the range's.
            most_s: For the answer as a whole.

        Returns:
            False if something else than the range came; nothing was written then.

        Raises:
            StoreError: (retryable) If no answer came, it broke off, or the store throttles.
            Revoked: If the destination was taken back.
        """
        if not self.is_of_use:
            return False
        until_s = monotonic() + most_s
        was_range, is_new = False, False
        while not (was_range or is_new):
            request, is_new = self._requests.of(client, path)
            was_range = request is not None and self._fetch(request, asked, start, into, until_s)
            if not was_range:
                self._requests.forget(path)  # what an earlier one was signed with may have expired
        self._num_detours = 0 if was_range else self._num_detours + 1
        return was_range

    @property
    def is_of_use(self) -> bool:
        """Whether the server gives ranges to such requests, as far as is known."""
        return self._num_detours < _MOST_DETOURS

    def _fetch(
        self, request: Request, asked: Asked, start: int, destination: Destination, until_s: float
    ) -> bool:
        destination.check()
        span = (start, start + destination.num_bytes)
        failure: Exception | None = None
        try:
            connection, answer = self._ask(request, span, until_s)
            with connection.closed_on_error():
                is_range = answer.is_range(*span)
                if is_range:
                    with destination.writing(connection.interrupt) as pieces:
                        connection.receive(pieces)
                else:
                    connection.skip(answer.num_bytes)
        except _Untrusted as refusal:
            logger.info(
                "%s: receiving by the engine alone: no TLS with %s (%s)",
                *(asked.url, request.url.netloc, refusal),
            )
            self._num_detours = _MOST_DETOURS  # the engine finds out what is wrong, if anything
            return False
        except (OSError, NoAnswer) as error:
            failure = error
        if failure is not None:
            raise from_transport(asked, failure) from scrubbed(failure)
        self._keep(request, connection, answer)
        if answer.status in _THROTTLED:
            raise from_throttle(asked, answer.status, answer.headers.get("retry-after"))
        return is_range

    def close(self) -> None:
        """Close the connections that nobody uses."""
        with self._lock:
            _close_all(self._idle)

    def _ask(
        self, request: Request, span: tuple[int, int], until_s: float
    ) -> tuple[_Connection, _Answer]:
        """Send the request; once more if the server had closed a connection that was kept."""
        text = request.text(*span)
        while True:
            connection = self._take(request, until_s)
            try:
                connection.send(text)
                return connection, connection.read_head()
            except BaseException as error:
                connection.close()
                is_stale = isinstance(error, (ConnectionError, ssl.SSLError, NoAnswer))
                if not (connection.was_kept and is_stale):
                    raise

    def _take(self, request: Request, until_s: float) -> _Connection:
        with self._lock:
            idle = self._idle.get(request.place)
            connection = idle.pop() if idle else None
        left_s = max(_LEAST_S, until_s - monotonic())
        if connection is None:
            connect_s = min(self._connect_timeout_s, left_s)
            connection = _Connection(request.url, self._trust, self._turns, connect_s)
        connection.limit(min(self._read_timeout_s, left_s), until_s)
        return connection

    def _keep(self, request: Request, connection: _Connection, answer: _Answer) -> None:
        if connection.is_open and answer.may_be_kept:
            if not connection.was_kept:  # it takes a copy of the certificates
                self._trust.remember(request.url, connection)
            connection.was_kept = True
            with self._lock:
                idle = self._idle.setdefault(request.place, [])
                if len(idle) < _MOST_IDLE:
                    idle.append(connection)
                    return
        connection.close()


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _close_all(idle: dict[tuple[str, str], list[_Connection]]) -> None:
    for connections in idle.values():
        while connections:
            connections.pop().close()


# --- a connection ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Answer:
    """The head of an answer."""

    status: int
    headers: Mapping[str, str]
    may_be_kept: bool

    @property
    def num_bytes(self) -> int | None:
        """Length of the body; None where it is not told."""
        length = self.headers.get("content-length", "")
        if not length.isdecimal() or "transfer-encoding" in self.headers:
            return None
        return int(length)

    def is_range(self, start: int, end: int) -> bool:
        """Whether the body is just that range."""
        said = _CONTENT_RANGE.match(self.headers.get("content-range", ""))
        return (
            self.status == 206
            and said is not None
            and (int(said[1]), int(said[2])) == (start, end - 1)
            and self.num_bytes == end - start
            and "content-encoding" not in self.headers
        )


class _Connection:
    """A connection to a server. Of one thread, but for `interrupt`.

    Args:
        url: Names the server.
        trust: Makes it a secure one, for https.
        turns: Taken while bytes are received.
        timeout_s: For the connection.

    Raises:
        OSError: If there is none.
        _Untrusted: If the server does not speak TLS, or its certificate is refused.
    """

    def __init__(
        self, url: SplitResult, trust: _Trust, turns: threading.Semaphore, timeout_s: float
    ) -> None:
        self.was_kept = False
        self.is_open = True
        self._turns = turns
        place = url.hostname or "", url.port or _PORTS[url.scheme]
        plain = socket.create_connection(place, timeout_s)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.socket = trust.secured(plain, url) if url.scheme == "https" else plain
        except BaseException:
            plain.close()
            raise
        self._poll = select.poll()
        self._pause_s = self._until_s = 0.0
        self._wakes_for = 1
        self._rest = memoryview(b"")  # bytes of the body that came with the head

    def limit(self, pause_s: float, until_s: float) -> None:
        """Set how long the next answer may pause, and by when it must have come."""
        self._pause_s, self._until_s = pause_s, until_s

    def send(self, text: bytes) -> None:
        """Send a request."""
        self.socket.settimeout(self._pause_s)
        self.socket.sendall(text)
        self.socket.settimeout(0)

    def read_head(self) -> _Answer:
        """Receive the head of an answer, and perhaps a little of its body."""
        while True:
            head = self._read_to_blank_line()
            lines = head.decode("latin-1").split("\r\n")
            found = _STATUS.match(head)
            if found is None:
                raise NoAnswer(f"this is not HTTP: {lines[0][:40]!r}")
            if (status := int(found[2])) >= 200:  # else it says that an answer will come
                break
        fields = (line.partition(":") for line in lines[1:])
        headers = {name.lower(): value.strip() for name, _, value in fields}
        is_last = headers.get("connection", "").lower() == "close" or found[1] == b"0"
        return _Answer(status, headers, may_be_kept=not is_last)

    def _read_to_blank_line(self) -> bytes:
        received = bytearray(self._rest)
        buffer = memoryview(bytearray(_HEAD_BYTES))
        while (end := received.find(b"\r\n\r\n")) < 0:
            if len(received) >= _HEAD_BYTES:
                raise NoAnswer("the head of the answer is too long")
            received += buffer[: self._receive(buffer, 0, most=1)]
        self._rest = memoryview(bytes(received[end + 4 :]))
        return bytes(received[:end])

    def receive(self, pieces: Sequence[memoryview]) -> None:
        """Receive a body into its pieces."""
        left_bytes = sum(map(len, pieces))
        for piece in pieces:
            at = min(len(self._rest), len(piece))
            piece[:at] = self._rest[:at]
            self._rest = self._rest[at:]
            if at < len(piece):
                self._receive(piece[at:], left_bytes - at)
            left_bytes -= len(piece)
        if self._rest:
            raise NoAnswer("more came than was asked for")

    def _receive(self, memory: memoryview, left_bytes: int, most: int | None = None) -> int:
        """Fill memory, or receive at most so many times; return how many bytes came.

        Args:
            memory: To be filled.
            left_bytes: That the server will send for certain, memory's among them.
            most: Records.
        """
        at = num_received = 0
        receive_into = self.socket.recv_into
        while True:
            events = select.POLLIN
            with self._turns:
                try:
                    while at < len(memory) and num_received != most:
                        # With the length, or a secure one makes a view to ask for it.
                        count = receive_into(memory[at:], len(memory) - at)
                        if not count:
                            raise NoAnswer("the connection was closed before the answer ended")
                        at += count
                        num_received += 1
                except (BlockingIOError, ssl.SSLWantReadError):
                    pass
                except ssl.SSLWantWriteError:  # new keys want to be acknowledged
                    events = select.POLLOUT
            if at == len(memory) or num_received == most:
                return at
            self._wait(events, left_bytes - at)

    def _wait(self, events: int, left_bytes: int) -> None:
        """Wait for the server, if it has much to send for a batch of it.

        Raises:
            TimeoutError: If it is silent for too long, or the time of the answer is over.
        """
        left_s = max(0.0, self._until_s - monotonic())
        self._poll.register(self.socket, events)
        self._wake_for(min(_BATCH_BYTES, left_bytes - _MOST_HELD_BYTES))
        if self._poll.poll(1000 * min(self._pause_s, left_s)):
            return
        if left_s < self._pause_s:
            raise TimeoutError("the answer took too long")
        self._wake_for(1)  # a slow server may have sent less than a batch
        if not self._poll.poll(0):
            raise TimeoutError("timed out")

    def _wake_for(self, num_bytes: int) -> None:
        """Let `poll` wake up when that much has come; for whatever comes if it is little."""
        num_bytes = max(1, num_bytes)
        if num_bytes != self._wakes_for:
            self._wakes_for = num_bytes
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    def skip(self, num_bytes: int | None) -> None:
        """Read a short body, so that the connection can be used again; break off a long one."""
        if num_bytes is None or num_bytes > _MOST_REASON_BYTES:
            self.close()
        else:
            self.receive([memoryview(bytearray(num_bytes))])

    def interrupt(self) -> None:
        """Make whoever receives stop. From any thread."""
        with contextlib.suppress(OSError):
            # Not the method of a secure one, which takes from the other thread what it uses.
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it, whatever is left of an answer."""
        self.is_open = False
        self.socket.close()

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close it if what is done with it fails: nobody knows how much of the body is left."""
        try:
            yield
        except BaseException:
            self.close()
            raise


class _Untrusted(Exception):
    """A connection is there, but TLS did not come about on it."""


def _trust_of(client_options: Mapping[str, Any]) -> _Trust:
    """Return what obstore's options trust, with the sessions of all stores that trust the same."""
    more = bytes(client_options.get("root_certificate") or b"")
    system = tuple(os.environ.get(name) for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"))
    return _kept_trust(more, not client_options.get("allow_invalid_certificates"), system)


@lru_cache(maxsize=16)
def _kept_trust(more: bytes, verifies: bool, _system: tuple[str | None, ...]) -> _Trust:
    return _Trust(more, verifies=verifies)


class _Trust:
    """Makes connections secure, and resumes sessions.

    Args:
        more: Certificates to trust besides the system's, in PEM.
        verifies: Whether to check certificates and names.
    """

    def __init__(self, more: bytes, *, verifies: bool) -> None:
        self._more = more
        self._verifies = verifies
        self._lock = threading.Lock()
        self._context: ssl.SSLContext | None = None
        self._sessions: dict[str, ssl.SSLSession] = {}

    def secured(self, plain: socket.socket, url: SplitResult) -> ssl.SSLSocket:
        """Shake hands.

        Raises:
            _Untrusted: If the server does not speak TLS, or its certificate is refused.
            OSError: If the connection broke off.
        """
        session = self._sessions.get(url.netloc)
        try:
            return self.context.wrap_socket(plain, server_hostname=url.hostname, session=session)
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            raise
        except ssl.SSLError as error:
            raise _Untrusted(str(error)) from error

    @property
    def context(self) -> ssl.SSLContext:
        """For connections."""
        with self._lock:  # the system's certificates take 20 ms to read
            self._context = self._context or self._made()
            return self._context

    def _made(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        if self._more:
            context.load_verify_locations(cadata=self._more.decode("ascii", "ignore"))
        if not self._verifies:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def remember(self, url: SplitResult, connection: _Connection) -> None:
        """Resume the session of a connection in later ones to the same server."""
        if isinstance(connection.socket, ssl.SSLSocket) and connection.socket.session:
            self._sessions[url.netloc] = connection.socket.session


# --- how an object is asked for ----------------------------------------------------------

_SIGNED_FOR = timedelta(minutes=15)
_KEPT_S = 300.0
_MOST_KEPT = 1024
_SAFE = "/-._~!$&'()*+,;=:@"  # in a path, by RFC 3986
_GOOGLE = "https://storage.googleapis.com"


@dataclass(frozen=True, slots=True)
class Request:
    """What fetches an object; a ``Range`` makes it complete. Its repr shows no secret.

    Attributes:
        url: Perhaps a signed one.
        headers: Perhaps with a token.
    """

    url: SplitResult = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)

    @property
    def place(self) -> tuple[str, str]:
        """Which connections serve it."""
        return self.url.scheme, self.url.netloc

    def text(self, start: int, end: int) -> bytes:
        """Return the request for a range as it is sent."""
        query = f"?{self.url.query}" if self.url.query else ""
        fields = {"Host": self.url.netloc, "Range": f"bytes={start}-{end - 1}", **self.headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"GET {self.url.path}{query} HTTP/1.1\r\n{lines}\r\n".encode("latin-1")


class Requests:
    """What to send for an object, kept for a while: some providers are asked for each signature.

    Args:
        make: Given obstore's client and a path.
    """

    def __init__(self, make: Callable[[Any, str], Request]) -> None:
        self._make = make
        self._kept: dict[str, tuple[float, Request]] = {}

    def of(self, client: Any, path: str) -> tuple[Request | None, bool]:
        """Return the request for an object, and whether it is new. Thread-safe.

        None if it cannot be made: then the engine says why, if it cannot either.
        """
        now_s = monotonic()
        until_s, request = self._kept.get(path, (0.0, None))
        if now_s < until_s:
            return request, False
        try:
            request = self._make(client, path)
        except Exception as error:  # noqa: BLE001 - a credential provider may raise anything
            logger.info("an object cannot be asked for directly: %s", scrubbed(error))
            return None, True
        if len(self._kept) >= _MOST_KEPT:
            self._kept = {}
        self._kept[path] = now_s + _KEPT_S, request
        return request, True

    def forget(self, path: str) -> None:
        """Make the next request for an object anew."""
        self._kept.pop(path, None)


# With these, what `_maker` returns makes complete requests.
_KNOWN_CONFIG = {
    "s3": frozenset(
        {"access_key_id", "secret_access_key", "session_token", "endpoint", "aws_endpoint_url_s3"}
        | {"region", "unsigned_payload", "skip_signature", "virtual_hosted_style_request"}
        | {"server_side_encryption", "sse_kms_key_id", "sse_bucket_key_enabled"}  # only of puts
    ),
    "gs": frozenset(
        {"base_url", "bearer_token", "service_account", "service_account_key", "skip_signature"}
    ),
    "az": frozenset(
        {"account_name", "account_key", "sas_key", "tenant_id", "client_id", "client_secret"}
        | {"endpoint", "skip_signature"}
    ),
}
_KNOWN_CLIENT_OPTIONS = frozenset(
    {"allow_http", "connect_timeout", "read_timeout"}
    | {"root_certificate", "allow_invalid_certificates"}
)


def open_ranges(location: Location, settings: ObstoreSettings, pause_s: float) -> HttpRanges | None:
    """Return what receives ranges of a store's objects; None where only the engine can ask.

    That is with settings that change a request in ways unknown here, and behind a proxy.
    """
    server = _server_of(location, settings.config)
    if (
        not _KNOWN_CONFIG[location.scheme].issuperset(settings.config)
        or not _KNOWN_CLIENT_OPTIONS.issuperset(settings.client_options)
        or _is_behind_proxy(server)
    ):
        return None
    make = _maker(location, settings, server)
    return HttpRanges(Requests(make), settings.client_options, pause_s)


def _maker(
    location: Location, settings: ObstoreSettings, server: str
) -> Callable[[Any, str], Request]:
    config, provider = settings.config, settings.credential_provider
    base = f"{server}/{location.bucket}"
    if config.get("skip_signature"):
        return _unsigned(base)
    if location.scheme == "az" and "sas_key" in config:  # which cannot sign another one
        return _unsigned(base, f"?{config['sas_key']}")
    if location.scheme == "gs" and "bearer_token" in config:
        return _unsigned(base, token=lambda: str(config["bearer_token"]))
    if location.scheme == "gs" and provider is not None:  # to sign would take a permission more
        return _unsigned(base, token=lambda: str(provider()["token"]))
    return _signed


def _signed(client: Any, path: str) -> Request:
    return Request(urlsplit(obstore.sign(client, "GET", path, _SIGNED_FOR)), {})


def _unsigned(
    base: str, query: str = "", token: Callable[[], str] | None = None
) -> Callable[[Any, str], Request]:
    """Return what asks for an object by its plain URL, with a query or a bearer's token."""

    def make(_: Any, path: str) -> Request:
        headers = {"Authorization": f"Bearer {token()}"} if token else {}
        return Request(urlsplit(f"{base}/{quote(path, safe=_SAFE)}{query}"), headers)

    return make


def region_of(location: Location, settings: ObstoreSettings) -> str | None:
    """Ask in which region a bucket of S3 lies; None if the server does not say."""
    server = _server_of(location, settings.config)
    is_named = settings.config.get("virtual_hosted_style_request") and "endpoint" in settings.config
    url = server if is_named else f"{server}/{location.bucket}"
    trust = _trust_of(settings.client_options)
    opener = urllib.request.build_opener(HTTPSHandler(context=trust.context))
    request = urllib.request.Request(url, method="HEAD")  # noqa: S310 - a server's, checked
    try:
        with opener.open(request, timeout=_REGION_S) as answer:
            headers = answer.headers
    except HTTPError as refusal:  # whoever may not read the bucket is told all the same
        headers = refusal.headers
    except OSError:
        return None
    found = headers.get("x-amz-bucket-region")
    return None if found is None else str(found)


def _server_of(location: Location, config: Mapping[str, Any]) -> str:
    given = config.get("endpoint") or config.get("base_url")
    usual = {
        "s3": f"https://s3.{config.get('region')}.amazonaws.com",
        "gs": _GOOGLE,
        "az": f"https://{config.get('account_name')}.blob.core.windows.net",
    }
    return str(given or usual[location.scheme]).rstrip("/")


def _is_behind_proxy(server: str) -> bool:
    url = urlsplit(server)
    return bool({url.scheme, "all"} & getproxies().keys()) and not proxy_bypass(url.netloc)


def _seconds(duration: str) -> float:
    if duration.endswith("ms"):
        return float(duration.removesuffix("ms")) / 1000
    return float(duration.removesuffix("s"))
