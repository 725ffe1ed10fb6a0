"""A bucket in another region than the one that requests are signed for."""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

import dcpstore
from dcpstore.errors import ConfigError
from dcpstore.store import open_store
from dcpstore.testing import MotoServer

REGION = "eu-west-1"
MOVED = b"<Error><Code>PermanentRedirect</Code><Message>Elsewhere.</Message></Error>"
MALFORMED = (
    b"<Error><Code>AuthorizationHeaderMalformed</Code>"
    b"<Message>the region 'us-east-1' is wrong; expecting 'eu-west-1'</Message></Error>"
)
_SIGNED_FOR = re.compile(r"/\d{8}/([a-z0-9-]+)/s3/")


class _Elsewhere(BaseHTTPRequestHandler):
    """Passes on what is signed for its region; tells all others where the bucket lies."""

    protocol_version = "HTTP/1.1"
    server: _Server

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        signed = (self.headers.get("Authorization") or self.path.replace("%2F", "/")) + " "
        found = _SIGNED_FOR.search(signed)
        self.server.seen.append(found[1] if found else None)
        if found is None or found[1] != REGION:
            self._answer(*self.server.refusal)
            return
        upstream = http.client.HTTPConnection(self.server.upstream)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
        upstream.request(self.command, self.path, body, headers)
        answer = upstream.getresponse()
        told = dict(answer.getheaders())
        length = told.get("Content-Length") if self.command == "HEAD" else None
        self._answer(answer.status, answer.read(), told, length)
        upstream.close()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def _answer(
        self, status: int, body: bytes, headers: dict[str, str], length: str | None = None
    ) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Elsewhere)
        self.upstream = upstream
        self.seen: list[str | None] = []
        self.refusal: tuple[int, bytes, dict[str, str]] = (301, MOVED, _TELLING)


_TELLING = {"x-amz-bucket-region": REGION}


@pytest.fixture
def elsewhere(s3_server: MotoServer) -> Iterator[_Server]:
    s3_server.create_bucket("elsewhere")
    with _Server(urlsplit(s3_server.endpoint_url).netloc) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def options(server: _Server) -> dict[str, Any]:
    endpoint = f"http://127.0.0.1:{server.server_port}"
    return {"key": "a", "secret": "b", "endpoint_url": endpoint}


@pytest.mark.parametrize("refusal", [(301, MOVED), (400, MALFORMED)], ids=["301", "400"])
def test_requests_are_signed_for_the_region_that_the_server_names(
    refusal: tuple[int, bytes], elsewhere: _Server, caplog: Any, tmp_path: Any
) -> None:
    elsewhere.refusal = (*refusal, _TELLING)
    url, state = f"s3://elsewhere/{tmp_path.name}", {"w": torch.arange(200_000.0), "n": 3}
    dcpstore.save(state, url, storage_options=options(elsewhere))
    assert caplog.text.count("lies in eu-west-1, not in us-east-1") == 1
    elsewhere.seen.clear()
    target = {"w": torch.zeros(200_000), "n": 0}
    dcpstore.load(target, url, storage_options=options(elsewhere))
    assert torch.equal(target["w"], state["w"])
    assert target["n"] == 3
    # One request is refused, one asks where the bucket is; all others, ranges too, are right.
    assert elsewhere.seen[:2] == ["us-east-1", None]
    assert set(elsewhere.seen[2:]) == {REGION}


def test_ranges_are_received_directly_in_the_region_that_was_found(elsewhere: _Server) -> None:
    store = open_store("s3://elsewhere/direct", storage_options=options(elsewhere))
    store.put("a", b"abcdef")
    elsewhere.seen.clear()
    assert store.get_range("a", 2, 4) == b"cd"
    assert elsewhere.seen == [REGION]
    assert store.capabilities.fills_memory


def test_a_server_that_names_no_region_is_an_error_that_says_what_to_set(
    elsewhere: _Server,
) -> None:
    elsewhere.refusal = (301, MOVED, {})
    store = open_store("s3://elsewhere/unknown", storage_options=options(elsewhere))
    with pytest.raises(ConfigError, match=r"another region.*region_name"):
        store.put("a", b"abc")


def test_folders_and_tails_follow_the_region_too(elsewhere: _Server) -> None:
    where = {"storage_options": options(elsewhere)}
    open_store("s3://elsewhere/run", **where).put("step-1/a", b"abcdef")
    for ask in (
        lambda store: store.folders() == ["step-1"],
        lambda store: bytes(store.get_tail("step-1/a", 2).data) == b"ef",
    ):
        elsewhere.seen.clear()
        assert ask(open_store("s3://elsewhere/run", **where))
        assert elsewhere.seen == ["us-east-1", None, REGION]
