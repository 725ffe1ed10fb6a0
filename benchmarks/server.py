"""A small S3 server for benchmarks: data in RAM, emulated distance, everything counted.

A thread per connection reads and writes raw sockets in large pieces, so a byte costs the
server about one copy each way, and its own CPU seconds are part of every result. It
answers what the measured clients ask: ranged GET, HEAD, PUT (``If-None-Match``,
``If-Match``), copy, multipart, list, delete. It checks no signature. ``python -m
benchmarks.server`` prints its port and serves until its standard input closes;
``--upstream URL`` lets it stand before a real server and only count and delay.

Emulated alike for every client (`benchmarks.link`): latency, from the last byte of a
request to the first of its answer; bandwidth per connection and direction, as bodies move
in paced pieces; slow answers; bursts of 503. Not emulated: connection set-up (TCP and TLS
handshakes) and congestion.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np

from benchmarks.bucket import Answer, Bucket, Request, refuse
from benchmarks.link import Link, Weather
from benchmarks.upstream import Upstream
from dcpstore.testing.s3_server import classify

_PIECE_BYTES = 256 << 10
_SOCKET_BUFFER_BYTES = 512 << 10  # larger ones would hide the paced bandwidth
_CONTROL = "/_bench/"


@dataclass(frozen=True, slots=True)
class Served:
    """One request, counted: body bytes only."""

    operation: str
    key: str
    status: int
    bytes_in: int
    bytes_out: int


class Server:
    """Accepts connections and counts. Thread-safe.

    Args:
        objects: Who answers.
    """

    def __init__(self, objects: Bucket | Upstream) -> None:
        self.objects = objects
        self._weather = Weather(Link())
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._served: list[Served] = []
        self._num_active = self._max_active = self._num_connections = 0
        self._cpu_from = _cpu_s()
        self._weather = Weather(self._weather.link)

    def control(self, what: str, given: dict[str, Any]) -> object:
        with self._lock:
            if what == "link":
                self._weather = Weather(Link(**given))
            elif what == "clear":
                self._clear()
            elif what == "report":
                return {
                    "served": [asdict(one) for one in self._served],
                    "max_in_flight": self._max_active,
                    "connections": self._num_connections,
                    "cpu_s": _cpu_s() - self._cpu_from,
                }
        if what == "forget":
            self.objects.forget(str(given["prefix"]))
        return {}

    def serve_forever(self, listener: socket.socket) -> None:
        while True:
            link, _ = listener.accept()
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._num_connections += 1
            threading.Thread(target=self._converse, args=(link,), daemon=True).start()

    def _converse(self, link: socket.socket) -> None:
        pending = bytearray()
        with link, contextlib.suppress(ConnectionError):
            while (head := _read_head(link, pending)) is not None:
                self._serve(link, head, pending)

    def _serve(self, link: socket.socket, head: list[str], pending: bytearray) -> None:
        method, target, _ = head[0].split(" ", 2)
        pairs = (line.split(":", 1) for line in head[1:])
        headers = {name.strip().lower(): value.strip() for name, value in pairs}
        url = urlsplit(target)
        path = unquote(url.path)
        if headers.get("expect", "").lower() == "100-continue":
            link.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if path.startswith(_CONTROL):
            given = json.loads(bytes(_read_body(link, headers, pending)) or b"{}")
            text = json.dumps(self.control(path.removeprefix(_CONTROL), given)).encode()
            _send(link, method, Answer(body=(memoryview(text),)))
            return
        weather = self._weather
        with self._lock:
            self._num_active += 1
            self._max_active = max(self._max_active, self._num_active)
        try:
            body = _read_body(link, headers, pending, weather)
            query = parse_qs(url.query, keep_blank_values=True)
            key = path.lstrip("/").partition("/")[2]
            time.sleep(weather.wait_s())
            answer = (
                refuse(503, "SlowDown")
                if weather.is_burst()
                else self.objects.answer(Request(method, key, query, headers, body, target))
            )
            # Counted before it is sent: a client that asks for the report sees its last answer.
            sent = 0 if method == "HEAD" else sum(map(len, answer.body))
            operation = classify(method, key, query, "x-amz-copy-source" in headers)
            with self._lock:
                self._served.append(Served(operation, key, answer.status, len(body), sent))
            _send(link, method, answer, weather)
        finally:
            with self._lock:
                self._num_active -= 1


def _cpu_s() -> float:
    spent = os.times()
    return spent.user + spent.system


def _read_head(link: socket.socket, pending: bytearray) -> list[str] | None:
    while (end := pending.find(b"\r\n\r\n")) < 0:
        piece = link.recv(64 << 10)
        if not piece:
            return None
        pending += piece
    head = pending[:end].decode("latin-1").split("\r\n")
    del pending[: end + 4]
    return head


def _read_body(
    link: socket.socket,
    headers: dict[str, str],
    pending: bytearray,
    weather: Weather | None = None,
) -> memoryview:
    pace = weather.pace if weather else _unpaced
    began = time.monotonic()
    if headers.get("transfer-encoding") == "chunked":
        body = _read_chunks(link, pending, lambda num_bytes: pace(began, num_bytes))
    else:
        body = _read_bytes(link, pending, int(headers.get("content-length", 0)), began, pace)
    if "aws-chunked" in headers.get("content-encoding", ""):
        return _unframed(body)
    return body.toreadonly()


def _unpaced(began_s: float, num_bytes: int) -> None:
    """Let bytes pass as they come."""


def _read_bytes(
    link: socket.socket,
    pending: bytearray,
    size: int,
    began: float = 0.0,
    pace: Callable[[float, int], None] = _unpaced,
) -> memoryview:
    # Not a bytearray: that is filled with zeros under the GIL, 10 ms for 16 MiB of fresh memory,
    # in which no other connection is served.
    body = memoryview(np.empty(size, np.uint8))
    at = min(len(pending), len(body))
    body[:at] = pending[:at]
    del pending[:at]
    while at < len(body):
        count = link.recv_into(body[at : at + _PIECE_BYTES], 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionAbortedError
        at += count
        pace(began, at)
    return body


def _read_chunks(
    link: socket.socket, pending: bytearray, arrived: Callable[[int], None]
) -> memoryview:
    """Read a body whose length is not told before."""
    parts, num_bytes = [], 0
    while True:
        while (end := pending.find(b"\r\n")) < 0:
            pending += _some(link)
        size = int(pending[:end].partition(b";")[0], 16)
        del pending[: end + 2]
        parts.append(_read_bytes(link, pending, size + 2)[:size])
        num_bytes += size
        arrived(num_bytes)
        if not size:
            return memoryview(b"".join(parts))


def _some(link: socket.socket) -> bytes:
    piece = link.recv(64 << 10)
    if not piece:
        raise ConnectionAbortedError
    return piece


def _unframed(body: memoryview) -> memoryview:
    """Take the frames and the checksum of botocore's bodies over https away. Checks nothing."""
    parts, at = [], 0
    while True:
        line = bytes(body[at : at + 128]).partition(b"\r\n")[0]
        size = int(line.partition(b";")[0], 16)
        if not size:
            return memoryview(b"".join(parts))
        at += len(line) + 2
        parts.append(body[at : at + size])
        at += size + 2


def _send(link: socket.socket, method: str, answer: Answer, weather: Weather | None = None) -> None:
    length = sum(map(len, answer.body)) if answer.length is None else answer.length
    headers = {"x-amz-request-id": "0", **answer.headers}
    if answer.status != 204:
        headers["Content-Length"] = str(length)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    link.sendall(f"HTTP/1.1 {answer.status} X\r\n{lines}\r\n".encode("latin-1"))
    if method == "HEAD":
        return
    began, at = time.monotonic(), 0
    for part in answer.body:
        for start in range(0, len(part), _PIECE_BYTES):
            piece = part[start : start + _PIECE_BYTES]
            link.sendall(piece)
            at += len(piece)
            if weather:
                weather.pace(began, at)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server")
    parser.add_argument("--upstream", help="endpoint of a real server")
    upstream = parser.parse_args().upstream
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
    server = Server(Upstream(upstream) if upstream else Bucket())
    threading.Thread(target=server.serve_forever, args=(listener,), daemon=True).start()
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
