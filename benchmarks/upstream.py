"""A real S3 server behind the benchmark's own, which then counts and delays and stores nothing."""

from __future__ import annotations

import http.client
import threading
from urllib.parse import urlsplit

from benchmarks.bucket import Answer, Request

__all__ = ["Upstream"]

_ONE_HOP = ("connection", "keep-alive", "transfer-encoding", "expect")


class Upstream:
    """Passes every request on as it came, signature and all, whole bodies at a time.

    Args:
        endpoint_url: Of the real server, plain HTTP. It has to accept the ``Host`` that
            the client signed, which is that of the benchmark's server.
    """

    def __init__(self, endpoint_url: str) -> None:
        self._host = urlsplit(endpoint_url).netloc
        self._thread = threading.local()

    def answer(self, request: Request) -> Answer:
        """Ask the real server; thread-safe, with a connection per thread."""
        link = getattr(self._thread, "link", None)
        if link is None:
            link = self._thread.link = http.client.HTTPConnection(self._host, timeout=600)
        link.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
        for name, value in request.headers.items():
            if name not in _ONE_HOP:
                link.putheader(name, value)
        link.endheaders(request.body if len(request.body) else None)
        found = link.getresponse()
        body = found.read()
        headers = {
            name: value
            for name, value in found.getheaders()
            if name.lower() not in (*_ONE_HOP, "content-length")
        }
        length = int(found.getheader("Content-Length", len(body)))
        return Answer(found.status, headers, (memoryview(body),), length)

    def forget(self, prefix: str) -> None:
        """Do nothing: only who holds the secret can delete."""
