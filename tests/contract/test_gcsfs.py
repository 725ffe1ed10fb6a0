"""Google through gcsfs: preconditions against a bucket of a few lines, the rest emulated."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from dcpstore.errors import AlreadyExistsError, ConflictError, NotFoundError, StoreError
from dcpstore.store import IfMatch, RetryPolicy, open_store
from dcpstore.testing import conformance

from .conftest import ONCE


class Answering(BaseHTTPRequestHandler):
    """Answers in JSON and logs nothing."""

    protocol_version = "HTTP/1.1"

    def answer(self, status, said, **headers):
        text = b"" if said is None else json.dumps(said).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(text)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args):
        pass


class OneObject(Answering):
    """Google's JSON API for one object: multipart uploads, metadata, preconditions."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        state = self.server.state
        state["posts"] += 1
        if state["failures"]:
            return self.answer(state["failures"].pop(0), {})
        wanted = parse_qs(urlsplit(self.path).query).get("ifGenerationMatch")
        if wanted is not None and int(wanted[0]) != state["generation"]:
            return self.answer(412, {"error": {"code": 412, "message": "conditionNotMet"}})
        boundary = self.headers["Content-Type"].split('boundary="')[1].rstrip('"').encode()
        _, meta, media, end = body.split(b"--" + boundary)
        assert end == b"--"
        state["name"] = json.loads(meta.split(b"\r\n\r\n", 1)[1])["name"]
        state["data"] = media.split(b"\r\n\r\n", 1)[1].removesuffix(b"\r\n")
        state["generation"] += 1
        return self.answer(200, {"generation": str(state["generation"])})


@contextmanager
def serving(handler, **state):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.state = state
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def google():
    with serving(OneObject, generation=0, posts=0, failures=[]) as server:
        yield server


def open_google(server, retry=ONCE):
    options = {"endpoint_url": f"http://127.0.0.1:{server.server_port}", "token": "anon"}
    return open_store("gs://bucket/run", storage_options=options, retry=retry)


def test_a_create_is_decided_by_google(google):
    store = open_google(google)
    assert store.put("ü b", b"one\r\n--two", mode="create") == "1"
    assert (google.state["name"], google.state["data"]) == ("run/ü b", b"one\r\n--two")
    with pytest.raises(AlreadyExistsError):
        store.put("ü b", b"two", mode="create")
    assert google.state["generation"] == 1


def test_a_swap_compares_generations(google):
    store = open_google(google)
    first = store.put("a", b"one")
    second = store.put("a", b"two", mode=IfMatch(first))
    assert (first, second) == ("1", "2")
    with pytest.raises(ConflictError):
        store.put("a", b"three", mode=IfMatch(first))
    assert google.state["data"] == b"two"


def test_a_put_is_sent_once_per_attempt(google):
    """gcsfs's own repetitions would turn a lost answer into a conflict with itself."""
    google.state["failures"] = [503] * 9
    with pytest.raises(StoreError) as caught:
        open_google(google).put("a", b"1", mode="create")
    assert caught.value.throttled
    assert google.state["posts"] == 1
    google.state["failures"] = [500]
    with pytest.raises(StoreError):
        open_google(google, RetryPolicy(base_delay_s=0)).put("a", b"1", mode="create")
    assert google.state["posts"] == 2
    google.state["failures"] = [503, 500]
    open_google(google, RetryPolicy(base_delay_s=0)).put("a", b"1")
    assert google.state["posts"] == 5


def test_denied_is_denied(google):
    google.state["failures"] = [403]
    with pytest.raises(StoreError) as caught:
        open_google(google).put("a", b"1")
    assert caught.value.denied


def test_odd_keys_keep_their_names(open_engine):
    store = open_engine("gcsfs", retry=ONCE)
    for key in conformance.ODD_KEYS:
        if ";" in key:
            continue  # the emulator cuts the path there
        store.put(key, key.encode())
        assert bytes(store.get(key).data) == key.encode()
    assert len(list(store.list())) == len(conformance.ODD_KEYS) - 1


def test_a_wrong_bucket_is_not_found_and_not_created(gcs_server):
    options = gcs_server.storage_options()
    store = open_store("gs://mistyped/run", storage_options=options, retry=ONCE)
    for call in (lambda: store.put("a", b"1"), lambda: store.get("a"), lambda: store.head("a")):
        for _ in range(2):
            with pytest.raises(NotFoundError):
                call()


# Uploads of many parts -----------------------------------------------------------------------


class Sessions(Answering):
    """Google's resumable uploads, which leave requests without an answer as they are told to."""

    def do_POST(self):
        state = self.server.state
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "uploadType=resumable" in self.path:
            if self.is_silent("begin"):
                return None
            state["name"] = json.loads(body)["name"]
            return self.answer(200, {}, Location=f"http://{self.headers['Host']}/session")
        return self.take(body)

    def do_PUT(self):
        return self.take(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

    def do_DELETE(self):
        self.server.state["deleted"] = True
        self.answer(204, {})

    def take(self, body):
        state = self.server.state
        span, _, total = self.headers["Content-Range"].removeprefix("bytes ").partition("/")
        what = ("end" if total != "*" else "chunk") if body or total != "*" else "question"
        state["seen"].append(what)
        if self.is_silent(what):
            return None
        if body and not state["is_done"]:
            assert int(span.partition("-")[0]) == len(state["data"])  # nothing twice, nothing left
            taken = state["takes"].pop() if state["takes"] else len(body)
            state["data"] += body[:taken]
        state["is_done"] = state["is_done"] or total == str(len(state["data"]))
        if self.is_silent(f"{what} done"):
            return None
        if state["is_done"]:
            return self.answer(200, {"generation": "7"})
        end = {"Range": f"bytes=0-{len(state['data']) - 1}"} if state["data"] else {}
        return self.answer(308, None, **end)

    def is_silent(self, what):
        if what not in self.server.state["silent"]:
            return False
        self.server.state["silent"].remove(what)
        self.server.state["over"].wait()
        self.close_connection = True
        return True


@pytest.fixture
def sessions():
    over = threading.Event()
    empty = {"data": b"", "is_done": False, "seen": [], "silent": [], "takes": []}
    with serving(Sessions, **empty, over=over) as server:
        yield server
        over.set()


QUICK = RetryPolicy(base_delay_s=0.01, timeout_floor_s=1.0, min_bytes_per_s=2**33)
PART = 600_000  # no multiple of Google's 256 KiB


def upload(server, num_bytes):
    data = bytes(range(256)) * (num_bytes // 256 + 1)
    parts = [data[at : min(at + PART, num_bytes)] for at in range(0, num_bytes, PART)]
    store = open_google(server, QUICK)
    assert store.put_parts("a", parts, part_bytes=PART, max_concurrency=1) == "7"
    assert server.state["data"] == data[:num_bytes]
    assert server.state["name"] == "run/a"


@pytest.mark.parametrize("num_bytes", [PART, 2**20, 4 * PART + 1, 2**22])
def test_an_upload_of_any_size_arrives_whole(sessions, num_bytes):
    upload(sessions, num_bytes)


@pytest.mark.parametrize("what", ["begin", "chunk", "chunk done", "end", "end done", "question"])
def test_an_upload_goes_on_after_a_request_without_an_answer(sessions, what):
    sessions.state["silent"] = [what] if what != "question" else ["chunk", "question"]
    upload(sessions, 3 * PART)
    assert sessions.state["silent"] == []
    assert ("question" in sessions.state["seen"]) == (what != "begin")


def test_what_google_did_not_take_is_sent_again(sessions):
    sessions.state["takes"] = [2**18, 2**18]
    upload(sessions, 3 * PART)


def test_an_upload_that_google_has_lost_is_an_error(sessions):
    store = open_google(sessions, QUICK)

    def parts():
        yield b"1" * PART
        sessions.state["data"] = b""
        sessions.state["silent"] = ["chunk"]
        yield b"2" * PART

    with pytest.raises(StoreError, match="only 0 bytes of it are left"):
        store.put_parts("a", parts(), part_bytes=PART, max_concurrency=1)
    assert sessions.state["deleted"]
