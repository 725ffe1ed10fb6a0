"""Ranges of objects behind an S3 endpoint that speaks plain HTTP, received where they belong.

They are fetched by signed URLs over connections of our own, which takes 0.6 of the CPU seconds and
no memory (`python -m benchmarks --only load-fast --systems ours ours-tls`). Only over plain HTTP:
of TLS, Python receives 16 KiB at a time, which costs more than it saves.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import threading
import weakref
from collections.abc import Iterator, Mapping
from datetime import timedelta
from time import monotonic
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import obstore
from typing_extensions import Buffer

from dcpstore.store.base import Destination
from dcpstore.store.engine import Asked, from_throttle, from_transport, scrubbed
from dcpstore.store.options import ObstoreSettings

_THROTTLED = frozenset({429, 503})
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/")
_MOST_REASON_BYTES = 1 << 16
_MOST_IDLE = 64
_LEAST_S = 0.05
_SIGNED_FOR = timedelta(minutes=15)
_MOST_DETOURS = 3
# With these, a signed URL and nothing else is a complete request.
_KNOWN_CONFIG = frozenset(
    {"access_key_id", "secret_access_key", "session_token", "endpoint", "aws_endpoint_url_s3"}
    | {"region", "unsigned_payload", "skip_signature"}
    | {"server_side_encryption", "sse_kms_key_id", "sse_bucket_key_enabled"}  # only of puts
)
_KNOWN_CLIENT_OPTIONS = frozenset({"allow_http", "connect_timeout", "read_timeout"})


class HttpRanges:
    """Ranged GETs of signed URLs, over connections that are kept. Thread-safe.

    Args:
        client_options: obstore's, of which the time-outs are read.
        pause_s: How long a server may be silent, where the options do not say.
    """

    def __init__(self, client_options: Mapping[str, Any], pause_s: float) -> None:
        given = {"connect_timeout": "10s", "read_timeout": f"{pause_s}s", **client_options}
        self._connect_timeout_s = _seconds(given["connect_timeout"])
        self._read_timeout_s = _seconds(given["read_timeout"])
        self._num_detours = 0
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        weakref.finalize(self, _close_all, self._idle).atexit = False

    def fetch(
        self, client: Any, path: str, asked: Asked, start: int, into: Destination, most_s: float
    ) -> bool:
        """Receive a range of an object into its destination.

        Args:
            client: obstore's, which signs the URL.
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
        if self._num_detours >= _MOST_DETOURS:  # a server that refuses signed URLs
            return False
        url = obstore.sign(client, "GET", path, _SIGNED_FOR)
        was_range = self._fetch(url, asked, start, into, monotonic() + most_s)
        self._num_detours = 0 if was_range else self._num_detours + 1
        return was_range

    def _fetch(
        self, url: str, asked: Asked, start: int, destination: Destination, until_s: float
    ) -> bool:
        destination.check()
        parts = urlsplit(url)
        span = (start, start + destination.num_bytes)
        failure: Exception | None = None
        try:
            target = f"{parts.path}?{parts.query}"
            connection, response = self._ask(parts.netloc, target, span, until_s)
            with connection.closed_on_error(response):
                is_range = _is_range(response, *span)
                if is_range:
                    connection.receive(response, destination)
                else:
                    connection.skip(response)
        except (OSError, http.client.HTTPException) as error:
            failure = error
        if failure is not None:
            raise from_transport(asked, failure) from scrubbed(failure)
        self._keep(connection)
        if response.status in _THROTTLED:
            raise from_throttle(asked, response.status, response.getheader("Retry-After"))
        return is_range

    def close(self) -> None:
        """Close the connections that nobody uses."""
        with self._lock:
            _close_all(self._idle)

    def _ask(
        self, place: str, target: str, span: tuple[int, int], until_s: float
    ) -> tuple[_Connection, http.client.HTTPResponse]:
        """Send the request; once more if the server had closed a connection that was kept."""
        headers = {"Range": f"bytes={span[0]}-{span[1] - 1}"}
        while True:
            connection = self._take(place, until_s)
            try:
                connection.request("GET", target, headers=headers)
                return connection, connection.getresponse()
            except BaseException as error:
                connection.close()
                if not (connection.was_kept and isinstance(error, ConnectionError)):
                    raise

    def _take(self, place: str, until_s: float) -> _Connection:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        left_s = max(_LEAST_S, until_s - monotonic())
        if connection is None:
            connection = _Connection(place, timeout=min(self._connect_timeout_s, left_s))
            connection.connect()
        connection.limit(min(self._read_timeout_s, left_s), until_s)
        return connection

    def _keep(self, connection: _Connection) -> None:
        if connection.sock is not None:  # or the server asked to close it
            connection.was_kept = True
            with self._lock:
                if len(self._idle) < _MOST_IDLE:
                    self._idle.append(connection)
                    return
        connection.close()


class _Socket(socket.socket):
    """Has an end besides a time-out, which a server that sends a byte now and then never meets."""

    until_s = float("inf")

    def recv_into(self, buffer: Buffer, nbytes: int = 0, flags: int = 0) -> int:
        """Receive what has come, unless the time is over."""
        if monotonic() > self.until_s:
            raise TimeoutError("the answer took too long")
        return super().recv_into(buffer, nbytes, flags)


class _Connection(http.client.HTTPConnection):
    """A connection that is closed on errors and can be interrupted."""

    was_kept = False
    _own: _Socket | None = None

    def connect(self) -> None:
        """Connect."""
        super().connect()
        self.sock = _Socket(fileno=self.sock.detach())
        self._own = self.sock  # an answer that ends with the connection takes `sock` away

    def limit(self, pause_s: float, until_s: float) -> None:
        """Set how long the next request may be silent, and when its answer must have come."""
        assert self._own is not None
        self._own.settimeout(pause_s)
        self._own.until_s = until_s

    def interrupt(self) -> None:
        """Make whoever receives stop. From any thread."""
        if self._own is not None:
            with contextlib.suppress(OSError):
                self._own.shutdown(socket.SHUT_RDWR)

    def receive(self, response: http.client.HTTPResponse, destination: Destination) -> None:
        """Receive a body into its destination."""
        with destination.writing(self.interrupt) as pieces:
            for piece in pieces:
                count = response.readinto(piece)
                if count < len(piece):
                    raise http.client.IncompleteRead(b"", len(piece) - count)

    def skip(self, response: http.client.HTTPResponse) -> None:
        """Read a short body, so that the connection can be used again; break off a long one."""
        response.read(_MOST_REASON_BYTES)
        if not response.isclosed():
            self.close()

    @contextlib.contextmanager
    def closed_on_error(self, response: http.client.HTTPResponse) -> Iterator[None]:
        """Close it if what is done with it fails: nobody knows how much of the body is left."""
        try:
            yield
        except BaseException:
            response.close()
            self.close()
            raise


def _close_all(connections: list[_Connection]) -> None:
    while connections:
        connections.pop().close()


def _is_range(response: http.client.HTTPResponse, start: int, end: int) -> bool:
    said = _CONTENT_RANGE.match(response.getheader("Content-Range") or "")
    return (
        response.status == 206
        and said is not None
        and (int(said[1]), int(said[2])) == (start, end - 1)
        and response.length == end - start
        and response.getheader("Content-Encoding") is None
    )


def speaks_plain_http(settings: ObstoreSettings) -> bool:
    """Tell whether a signed URL is all that a request needs, and is sent without TLS or a proxy."""
    endpoint = urlsplit(str(settings.config.get("endpoint") or ""))
    return (
        endpoint.scheme == "http"
        and _KNOWN_CONFIG.issuperset(settings.config)
        and not settings.config.get("skip_signature")
        and _KNOWN_CLIENT_OPTIONS.issuperset(settings.client_options)
        and (not {"http", "all"} & getproxies().keys() or bool(proxy_bypass(endpoint.netloc)))
    )


def _seconds(duration: str) -> float:
    if duration.endswith("ms"):
        return float(duration.removesuffix("ms")) / 1000
    return float(duration.removesuffix("s"))
