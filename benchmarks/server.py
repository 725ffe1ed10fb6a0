"""A small S3 server for benchmarks: data in RAM, emulated distance, everything counted.

A thread per connection reads and writes raw sockets in large pieces, so a byte costs the
server about one copy each way, and its own CPU seconds are part of every result. It
answers what s3fs and obstore ask: ranged GET, HEAD, PUT (``If-None-Match``,
``If-Match``), copy, multipart, list, delete. It checks no signature. ``python -m
benchmarks.server`` prints its port and serves until its standard input closes.

Emulated alike for every client: latency, from the last byte of a request to the first of
its answer; and bandwidth per connection and direction, as bodies move in paced pieces. Not
emulated: connection set-up (TCP and TLS handshakes), congestion, jitter.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from dcpstore.testing.s3_server import classify

_PIECE_BYTES = 256 << 10
_SOCKET_BUFFER_BYTES = 512 << 10  # larger ones would hide the paced bandwidth
_CONTROL = "/_bench/"


@dataclass(slots=True)
class Link:
    """The emulated distance. Zero is none."""

    latency_s: float = 0.0
    bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Served:
    """One request, counted: body bytes only."""

    operation: str
    key: str
    status: int
    bytes_in: int
    bytes_out: int


@dataclass(frozen=True, slots=True)
class StoredObject:
    """Bytes in the pieces they came in."""

    parts: tuple[memoryview, ...]
    etag: str

    @property
    def size(self) -> int:
        return sum(map(len, self.parts))

    def slices(self, start: int, end: int) -> Iterator[memoryview]:
        for part in self.parts:
            if start < len(part) and end > 0:
                yield part[max(start, 0) : end]
            start, end = start - len(part), end - len(part)


@dataclass(slots=True)
class Request:
    """What came over one connection."""

    method: str
    key: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: memoryview

    def first(self, name: str) -> str:
        return self.query.get(name, [""])[0]


@dataclass(slots=True)
class Answer:
    """What goes back; ``length`` is that of the body even where none is sent (HEAD)."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: tuple[memoryview, ...] = ()
    length: int | None = None


def _xml(text: str, status: int = 200) -> Answer:
    body = f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode()
    return Answer(status, {"Content-Type": "application/xml"}, (memoryview(body),))


def _refuse(status: int, code: str) -> Answer:
    return _xml(f"<Error><Code>{code}</Code><Message>{code}</Message></Error>", status)


class Bucket:
    """All objects and open uploads. Every bucket name leads here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, StoredObject] = {}
        self._uploads: dict[str, dict[int, tuple[memoryview, str]]] = {}
        self._numbers = itertools.count(1)

    def answer(self, request: Request) -> Answer:
        if request.key:
            return getattr(self, f"_{request.method.lower()}")(request)
        if request.method == "POST" and "delete" in request.query:
            return self._delete_many(request)
        if request.method == "GET" and "location" not in request.query:
            return self._list(request)
        return Answer()  # every bucket is there

    def forget(self, prefix: str) -> None:
        with self._lock:
            for key in [key for key in self._objects if key.startswith(prefix)]:
                del self._objects[key]

    def _mark(self) -> str:
        # Not the MD5: it costs 1.5 CPU s per GiB, and no client here looks at it.
        return f'"{next(self._numbers):032x}"'

    def _get(self, request: Request) -> Answer:
        answer = self._head(request)
        if answer.status >= 300:
            return answer
        start, end = 0, answer.length or 0
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
        found = self._objects[request.key]
        if asked:
            if int(asked[1]) >= end:
                return _refuse(416, "InvalidRange")
            size, start = end, int(asked[1])
            end = min(size, int(asked[2]) + 1) if asked[2] else size
            answer.status = 206
            answer.headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        answer.body, answer.length = tuple(found.slices(start, end)), end - start
        return answer

    def _head(self, request: Request) -> Answer:
        found = self._objects.get(request.key)
        if found is None:
            return _refuse(404, "NoSuchKey")
        headers = {
            "ETag": found.etag,
            "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        return Answer(200, headers, length=found.size)

    def _put(self, request: Request) -> Answer:
        source = request.headers.get("x-amz-copy-source")
        if "uploadId" in request.query:
            with self._lock:
                etag = self._mark()
                parts = self._uploads[request.first("uploadId")]
                parts[int(request.first("partNumber"))] = (request.body, etag)
            return Answer(headers={"ETag": etag})
        if source:
            copied = self._objects[unquote(source).lstrip("/").partition("/")[2]]
            return self._store(request, copied.parts) or _xml(
                f"<CopyObjectResult><ETag>{escape(copied.etag)}</ETag></CopyObjectResult>"
            )
        refusal = self._store(request, (request.body,))
        return refusal or Answer(headers={"ETag": self._objects[request.key].etag})

    def _store(self, request: Request, parts: tuple[memoryview, ...]) -> Answer | None:
        with self._lock:
            found = self._objects.get(request.key)
            wanted = request.headers.get("if-match")
            if request.headers.get("if-none-match") == "*" and found is not None:
                return _refuse(412, "PreconditionFailed")
            if wanted is not None and (found is None or found.etag.strip('"') != wanted.strip('"')):
                return _refuse(412, "PreconditionFailed")
            self._objects[request.key] = StoredObject(parts, self._mark())
        return None

    def _post(self, request: Request) -> Answer:
        with self._lock:
            if "uploads" in request.query:
                upload = f"u{next(self._numbers)}"
                self._uploads[upload] = {}
                return _xml(
                    f"<InitiateMultipartUploadResult><Bucket>b</Bucket><Key>{escape(request.key)}"
                    f"</Key><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
                )
            sent = self._uploads.pop(request.first("uploadId"))
        numbers = re.findall(r"<PartNumber>(\d+)</PartNumber>", bytes(request.body).decode())
        refusal = self._store(request, tuple(sent[int(number)][0] for number in numbers))
        etag = self._objects[request.key].etag
        return refusal or _xml(
            f"<CompleteMultipartUploadResult><Bucket>b</Bucket><Key>{escape(request.key)}</Key>"
            f"<ETag>{escape(etag)}</ETag></CompleteMultipartUploadResult>"
        )

    def _delete(self, request: Request) -> Answer:
        with self._lock:
            self._uploads.pop(request.first("uploadId"), None)
            if "uploadId" not in request.query:
                self._objects.pop(request.key, None)
        return Answer(204)

    def _delete_many(self, request: Request) -> Answer:
        with self._lock:
            for key in re.findall(r"<Key>(.*?)</Key>", bytes(request.body).decode()):
                self._objects.pop(key, None)
        return _xml("<DeleteResult></DeleteResult>")

    def _list(self, request: Request) -> Answer:
        prefix, delimiter = request.first("prefix"), request.first("delimiter")
        with self._lock:
            found = {k: v.size for k, v in sorted(self._objects.items()) if k.startswith(prefix)}
        folders = {
            prefix + key[len(prefix) :].partition(delimiter)[0] + delimiter
            for key in found
            if delimiter and delimiter in key[len(prefix) :]
        }
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size><ETag>&quot;x&quot;</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key, size in found.items()
            if not any(key.startswith(folder) for folder in folders)
        ) + "".join(
            f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
            for folder in sorted(folders)
        )
        return _xml(
            f"<ListBucketResult><Name>b</Name><Prefix>{escape(prefix)}</Prefix>"
            f"<KeyCount>{len(found)}</KeyCount><IsTruncated>false</IsTruncated>{rows}"
            "</ListBucketResult>"
        )


class Server:
    """Accepts connections and counts. Thread-safe."""

    def __init__(self) -> None:
        self.bucket = Bucket()
        self.link = Link()
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._served: list[Served] = []
        self._num_active = self._max_active = self._num_connections = 0
        self._cpu_from = _cpu_s()

    def control(self, what: str, given: dict[str, object]) -> object:
        with self._lock:
            if what == "link":
                self.link = Link(**given)  # type: ignore[arg-type]
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
            self.bucket.forget(str(given["prefix"]))
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
        is_control = path.startswith(_CONTROL)
        rate = 0.0 if is_control else self.link.bytes_per_s
        if headers.get("expect", "").lower() == "100-continue":
            link.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if is_control:
            body = _read_body(link, headers, pending, rate)
            given = json.loads(bytes(body) or b"{}")
            text = json.dumps(self.control(path.removeprefix(_CONTROL), given)).encode()
            _send(link, method, Answer(body=(memoryview(text),)), 0.0)
            return
        with self._lock:
            self._num_active += 1
            self._max_active = max(self._max_active, self._num_active)
        try:
            body = _read_body(link, headers, pending, rate)
            query = parse_qs(url.query, keep_blank_values=True)
            key = path.lstrip("/").partition("/")[2]
            if self.link.latency_s:
                time.sleep(self.link.latency_s)
            answer = self.bucket.answer(Request(method, key, query, headers, body))
            # Counted before it is sent: a client that asks for the report sees its last answer.
            sent = 0 if method == "HEAD" else sum(map(len, answer.body))
            operation = classify(method, key, query, "x-amz-copy-source" in headers)
            with self._lock:
                self._served.append(Served(operation, key, answer.status, len(body), sent))
            _send(link, method, answer, rate)
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
    link: socket.socket, headers: dict[str, str], pending: bytearray, rate: float
) -> memoryview:
    if headers.get("transfer-encoding") or "aws-chunked" in headers.get("content-encoding", ""):
        raise ConnectionAbortedError("chunked bodies are not spoken here")
    body = memoryview(bytearray(int(headers.get("content-length", 0))))
    at = min(len(pending), len(body))
    body[:at] = pending[:at]
    del pending[:at]
    began = time.monotonic()
    while at < len(body):
        count = link.recv_into(body[at : at + _PIECE_BYTES], 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionAbortedError
        at += count
        _pace(began, at, rate)
    return body.toreadonly()


def _send(link: socket.socket, method: str, answer: Answer, rate: float) -> None:
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
            _pace(began, at, rate)


def _pace(began: float, num_bytes: int, rate: float) -> None:
    if rate and (ahead_s := began + num_bytes / rate - time.monotonic()) > 0:
        time.sleep(ahead_s)


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
    threading.Thread(target=Server().serve_forever, args=(listener,), daemon=True).start()
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
