"""An S3 server to run as a process of its own: moto behind a log, a latency and faults.

``python -m dcpstore.testing.s3_server`` prints its port and serves until its standard
input closes, so it never outlives the process that started it. Under ``/_dcpstore/``
it answers to `dcpstore.testing.servers.MotoServer`, on no bucket's account.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import threading
import time
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from dcpstore.testing.servers import Fault, LoggedRequest, serve_until_orphaned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


_CONTROL = "/_dcpstore/"


def classify(method: str, key: str, query: dict[str, list[str]], is_copy: bool) -> str:
    """Name a request as S3's documentation does."""
    if not key:
        if method == "GET":
            return "ListMultipartUploads" if "uploads" in query else "ListObjects"
        names = {"PUT": "CreateBucket", "HEAD": "HeadBucket", "DELETE": "DeleteBucket"}
        return names.get(method, "DeleteObjects" if "delete" in query else method)
    if method == "POST":
        return "CreateMultipartUpload" if "uploads" in query else "CompleteMultipartUpload"
    if "uploadId" in query:
        part = "UploadPartCopy" if is_copy else "UploadPart"
        return {"PUT": part, "DELETE": "AbortMultipartUpload"}.get(method, "ListParts")
    put = "CopyObject" if is_copy else "PutObject"
    names = {"GET": "GetObject", "HEAD": "HeadObject", "PUT": put, "DELETE": "DeleteObject"}
    return names.get(method, method)


class Recorder:
    """WSGI middleware: delays requests, injects faults and keeps a log. Thread-safe."""

    def __init__(self, app: Callable[..., Iterable[bytes]], latency_s: float) -> None:
        self._app = app
        self._latency_s = latency_s
        self._lock = threading.Lock()
        # moto looks for the object and then stores it: without this, two creates may both win.
        self._writing = threading.Lock()
        self._log: list[LoggedRequest] = []
        self._faults: list[Fault] = []
        self._num_in_flight = 0

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """Serve one request."""
        path = environ["PATH_INFO"].encode("latin-1").decode("utf-8", "replace")
        if path.startswith(_CONTROL):
            return self._control(path.removeprefix(_CONTROL), environ, start_response)
        bucket, _, key = path.lstrip("/").partition("/")
        query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
        is_copy = "HTTP_X_AMZ_COPY_SOURCE" in environ
        operation = classify(environ["REQUEST_METHOD"], key, query, is_copy)
        with self._lock:
            self._num_in_flight += 1
            num_in_flight = self._num_in_flight
            fault = next((f for f in self._faults if f.takes(operation, key)), None)
        began = time.monotonic()
        try:
            if self._latency_s:
                time.sleep(self._latency_s)
            body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            environ["wsgi.input"] = io.BytesIO(body)
            status, headers, answer = self._serve(environ, fault)
        finally:
            with self._lock:
                self._num_in_flight -= 1
        entry = LoggedRequest(
            operation=operation,
            bucket=bucket,
            key=key,
            range=environ.get("HTTP_RANGE"),
            status=int(status.split()[0]),
            num_bytes_in=len(body),
            num_bytes_out=0 if environ["REQUEST_METHOD"] == "HEAD" else len(answer),
            start_s=began,
            end_s=time.monotonic(),
            num_in_flight=num_in_flight,
            is_conditional="HTTP_IF_MATCH" in environ or "HTTP_IF_NONE_MATCH" in environ,
        )
        with self._lock:
            self._log.append(entry)
        start_response(status, headers)
        if fault is not None and fault.kind == "drop":
            return _dropping(answer)
        return [answer]

    def _serve(
        self, environ: dict[str, Any], fault: Fault | None
    ) -> tuple[str, list[tuple[str, str]], bytes]:
        if fault is not None and fault.kind == "error":
            return _error(fault, environ)
        answered: list[Any] = []

        def remember(status: str, headers: list[tuple[str, str]], _info: Any = None) -> None:
            answered[:] = [status, headers]

        is_write = environ["REQUEST_METHOD"] in ("PUT", "POST", "DELETE")
        try:
            with self._writing if is_write else nullcontext():
                body = b"".join(self._app(environ, remember))
        except Exception:  # noqa: BLE001 - moto fails so on a part of an upload just aborted
            return _error(Fault(status=500, code="InternalError"), environ)
        status, headers = answered
        if fault is None:
            return status, headers, body
        if fault.kind == "lost_ack":
            return _error(fault, environ)
        return status, *_spoil(headers, body, fault)

    def _control(
        self, what: str, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        given = json.loads(body) if body else {}
        answer: object = {}
        with self._lock:
            if what == "log":
                answer = [asdict(entry) for entry in self._log]
            elif what == "clear":
                self._log.clear()
            elif what == "fault":
                self._faults.append(Fault(**given))
            elif what == "heal":
                self._faults.clear()
            elif what == "latency":
                self._latency_s = float(given["latency_s"])
        text = json.dumps(answer).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(text)))]
        start_response("200 OK", headers)
        return [text]


def _error(fault: Fault, environ: dict[str, Any]) -> tuple[str, list[tuple[str, str]], bytes]:
    body = (
        f"<?xml version='1.0' encoding='utf-8'?><Error><Code>{fault.code}</Code>"
        f"<Message>scripted {fault.code}</Message></Error>"
    ).encode()
    headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
    if fault.retry_after_s is not None:
        headers.append(("Retry-After", f"{fault.retry_after_s:g}"))
    if environ["REQUEST_METHOD"] == "HEAD":
        body = b""
    return f"{fault.status} {fault.code}", headers, body


def _spoil(
    headers: list[tuple[str, str]], body: bytes, fault: Fault
) -> tuple[list[tuple[str, str]], bytes]:
    if fault.kind == "short":
        body = body[: max(0, len(body) - fault.num_bytes)]
    elif fault.kind == "long":
        body += b"\0" * fault.num_bytes
    elif fault.kind == "flip" and body:
        body = bytes([body[0] ^ 1]) + body[1:]
    kept = [(k, v) for k, v in headers if k.lower() != "content-length"]
    return [*kept, ("Content-Length", str(len(body)))], body


def _dropping(answer: bytes) -> Iterable[bytes]:
    yield answer[: len(answer) // 2]
    raise ConnectionAbortedError("scripted drop")


def _build(latency_s: float) -> Any:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class QuietHandler(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, *args: Any, **kwargs: Any) -> None:
            """Keep silent: tests read the log through the control path."""

        def log_error(self, *args: Any) -> None:
            """Keep silent."""

    app = Recorder(DomainDispatcherApplication(create_backend_app), latency_s)
    return make_server("127.0.0.1", 0, app, threaded=True, request_handler=QuietHandler)


def main(arguments: list[str] | None = None) -> None:
    """Serve until standard input closes."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--latency-s", type=float, default=0.0)
    options = parser.parse_args(arguments)
    # moto would ask the network for instance metadata and account names otherwise.
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "test")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "test")
    serve_until_orphaned(_build(options.latency_s))


if __name__ == "__main__":
    main()
