"""A little S3 on raw sockets that leaves requests without an answer, as it is told to."""

from __future__ import annotations

import hashlib
import re
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class Silence:
    """What to leave unanswered.

    Attributes:
        operation: Which requests.
        acts: Whether to do first what they ask for.
        times: How many of them; -1 for all.
    """

    operation: str
    acts: bool = False
    times: int = 1


@dataclass
class SilentServer:
    """Keeps one bucket in memory. Use as a context manager."""

    objects: dict[str, bytes] = field(default_factory=dict)
    etags: dict[str, str] = field(default_factory=dict)
    modified: dict[str, float] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    silences: list[Silence] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    trickles: bool = False

    def __enter__(self) -> SilentServer:
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        # Closing alone leaves a thread in accept.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def options(self) -> dict[str, object]:
        return {"key": "k", "secret": "s", "endpoint_url": self.endpoint_url}

    def count(self, operation: str) -> int:
        return self.requests.count(operation)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        # A client that gave up may reset its connection.
        with suppress(ConnectionError), connection, connection.makefile("rb") as stream:
            while line := stream.readline():
                method, target, _ = line.decode().split()
                headers = {}
                while header := stream.readline().strip():
                    name, _, value = header.decode().partition(":")
                    headers[name.lower()] = value.strip()
                if "expect" in headers:
                    connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                body = stream.read(int(headers.get("content-length", "0")))
                url = urlsplit(target)
                query = parse_qs(url.query, keep_blank_values=True)
                key = unquote(url.path).partition("/b/")[2]
                operation = _operation(method, key, query)
                with self._lock:
                    self.requests.append(operation)
                    silence = self._take(operation)
                    if silence is not None and not silence.acts:
                        answer = None
                    else:
                        answer = self._act(operation, key, query, headers, body)
                if silence is not None or answer is None:
                    self._over.wait()
                    return
                try:
                    self._send(connection, _written(method, *answer))
                except OSError:
                    return

    def _send(self, connection: socket.socket, data: bytes) -> None:
        head, end, body = data.partition(b"\r\n\r\n")
        if not self.trickles:
            connection.sendall(data)
            return
        connection.sendall(head + end)
        for number in range(len(body)):
            self._over.wait(0.2)
            connection.sendall(body[number : number + 1])

    def _take(self, operation: str) -> Silence | None:
        for one in self.silences:
            if one.operation == operation and one.times:
                one.times -= 1
                return one
        return None

    def _act(self, operation, key, query, headers, body):
        if operation == "PutObject":
            if headers.get("if-none-match") == "*" and key in self.objects:
                return 412, {}, _error("PreconditionFailed")
            return 200, {"ETag": self._keep(key, body, hashlib.md5(body).hexdigest())}, b""
        if operation == "CreateMultipartUpload":
            upload_id = f"u{len(self.uploads)}"
            self.uploads[upload_id] = {}
            return 200, {}, _xml("InitiateMultipartUploadResult", UploadId=upload_id, Key=key)
        if operation in ("GetObject", "HeadObject"):
            return self._get(key, headers)
        if operation == "DeleteObjects":
            keys = re.findall(rb"<Key>([^<]*)</Key>", body)
            gone = b"".join(b"<Deleted><Key>%s</Key></Deleted>" % one for one in keys)
            return 200, {}, _xml("DeleteResult").replace(b"></", b">" + gone + b"</")
        if operation == "ListObjects":
            return 200, {}, _xml("ListBucketResult", IsTruncated="false", KeyCount="0")
        (upload_id,) = query["uploadId"]
        if upload_id not in self.uploads:
            return 404, {}, _error("NoSuchUpload")
        if operation == "UploadPart":
            self.uploads[upload_id][int(query["partNumber"][0])] = body
            return 200, {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}, b""
        parts = self.uploads.pop(upload_id)
        if operation == "AbortMultipartUpload":
            return 204, {}, b""
        whole = b"".join(parts[number] for number in sorted(parts))
        etag = self._keep(key, whole, f"{hashlib.md5(whole).hexdigest()}-{len(parts)}")
        return 200, {}, _xml("CompleteMultipartUploadResult", Key=key, ETag=etag)

    def _keep(self, key: str, body: bytes, mark: str) -> str:
        self.objects[key] = body
        self.modified.pop(key, None)
        self.etags[key] = f'"{mark}"'
        return self.etags[key]

    def _get(self, key, headers):
        if key not in self.objects:
            return 404, {}, _error("NoSuchKey")
        body = self.objects[key]
        said = {
            "ETag": self.etags[key],
            "Last-Modified": formatdate(self.modified.get(key), usegmt=True),
        }
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("range", ""))
        if span is None:
            return 200, said, body
        start, end = int(span[1]), min(int(span[2]) + 1, len(body))
        said["Content-Range"] = f"bytes {start}-{end - 1}/{len(body)}"
        return 206, said, body[start:end]


def _operation(method: str, key: str, query: dict[str, list[str]]) -> str:
    if "uploads" in query:
        return "CreateMultipartUpload"
    if "uploadId" in query:
        return {
            "PUT": "UploadPart",
            "POST": "CompleteMultipartUpload",
            "DELETE": "AbortMultipartUpload",
        }[method]
    if method == "POST":
        return "DeleteObjects"
    if not key:
        return "ListObjects"
    return {"GET": "GetObject", "HEAD": "HeadObject", "PUT": "PutObject"}[method]


def _xml(name: str, **fields: str) -> bytes:
    inner = "".join(f"<{tag}>{value}</{tag}>" for tag, value in fields.items())
    return f'<?xml version="1.0"?><{name}>{inner}</{name}>'.encode()


def _error(code: str) -> bytes:
    return _xml("Error", Code=code, Message="refused")


def _written(method: str, status: int, headers: dict[str, str], body: bytes) -> bytes:
    lines = [f"HTTP/1.1 {status} said", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    head = "\r\n".join(lines).encode() + b"\r\n\r\n"
    return head if method == "HEAD" else head + body
