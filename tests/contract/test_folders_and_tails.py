"""What folders and tails ask of servers: how many requests, in pages, and where ranges are odd."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from dcpstore.errors import NotFoundError, StoreError
from dcpstore.store import open_store
from dcpstore.testing import Fault

from .conftest import ONCE, S3_ENGINES

DATA = b"0123456789"
NUM_FOLDERS, PAGE = 1100, 1000


@pytest.mark.parametrize("engine", S3_ENGINES)
def test_a_tail_costs_one_request_and_folders_one_whatever_lies_in_them(
    engine, open_engine, moto_server
):
    store = open_engine(engine, retry=ONCE)
    for number in range(30):
        store.put(f"run/step-{number % 3}/{number}", DATA)
    moto_server.clear_requests()
    assert bytes(store.get_tail("run/step-0/0", 4).data) == DATA[-4:]
    assert moto_server.counts() == {"GetObject": 1}
    moto_server.clear_requests()
    assert sorted(store.folders("run/")) == ["step-0", "step-1", "step-2"]
    assert moto_server.counts() == {"ListObjects": 1}


@pytest.mark.parametrize("engine", S3_ENGINES)
def test_a_tail_that_cannot_be_a_range_costs_one_more(engine, open_engine, moto_server):
    store = open_engine(engine, retry=ONCE)
    store.put("empty", b"")
    moto_server.clear_requests()
    assert store.get_tail("empty", 4).size_bytes == 0
    assert sum(moto_server.counts().values()) <= 2


@pytest.mark.parametrize("engine", S3_ENGINES)
@pytest.mark.parametrize(
    ("operation", "call"),
    [
        ("GetObject", lambda store: store.get_tail("a", 4).size_bytes),
        ("ListObjects", lambda store: len(store.folders())),
    ],
)
def test_faults_are_mapped_and_repeated(engine, operation, call, open_engine, moto_server):
    place = f"faults-{engine}-{operation}"
    open_engine(engine, place).put("a", DATA)
    expected = call(open_engine(engine, place))
    moto_server.add_fault(Fault(operation, times=2))
    assert call(open_engine(engine, place)) == expected
    moto_server.add_fault(Fault(operation, status=403, code="AccessDenied"))
    with pytest.raises(StoreError) as caught:
        call(open_engine(engine, place))
    assert caught.value.denied


def test_a_wrong_bucket_is_not_found(moto_server, gcs_server):
    for scheme, engine, server in (
        ("s3", "obstore", moto_server),
        ("s3", "fsspec", moto_server),
        ("gs", "fsspec", gcs_server),
    ):
        options = server.storage_options()
        store = open_store(f"{scheme}://mistyped/run", storage_options=options, engine=engine)
        for call in (lambda store: store.folders(), lambda store: store.get_tail("a", 1)):
            with pytest.raises(NotFoundError):
                call(store)


# --- servers of a few lines --------------------------------------------------------------


class Serving(BaseHTTPRequestHandler):
    """One object, and a folder of many; `ranges` tells what it makes of a range.

    ``end`` is as S3 and Google do it, ``start`` knows no ranges from the end, ``none`` no ranges
    at all, and ``wrong`` answers with another range.
    """

    protocol_version = "HTTP/1.1"
    server: Server

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        common = {
            "Content-Length": str(len(body)),
            "ETag": '"mark"',
            "Last-Modified": "Mon, 02 Jan 2023 00:00:00 GMT",
            "x-ms-blob-type": "BlockBlob",
            "x-goog-generation": "7",
        }
        for name, value in {**common, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.server.seen.append("HEAD")
        self.answer(200, DATA)

    def do_GET(self) -> None:
        query = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        if "delimiter" in query:
            return self.list(query)
        asked = self.headers.get("Range") or self.headers.get("x-ms-range") or ""
        self.server.seen.append(f"GET {asked}".strip())
        how = self.server.ranges
        found = re.fullmatch(r"bytes=(\d*)-(\d*)", asked)
        if found is None or how == "none":
            return self.answer(200, DATA)
        first, last = found.groups()
        if not first:
            if how == "start":
                return self.answer(416, b"")
            first, last = str(max(0, len(DATA) - int(last))), str(len(DATA) - 1)
        if how == "wrong":
            first, last = "0", "3"
        body = DATA[int(first) : int(last) + 1]
        span = f"bytes {first}-{int(first) + len(body) - 1}/{len(DATA)}"
        return self.answer(206, body, Content_Range=span)

    def list(self, query: dict[str, str]) -> None:
        token = query.get("continuation-token") or query.get("pageToken") or "0"
        self.server.seen.append(f"LIST {token}")
        first, more = int(token), min(NUM_FOLDERS, int(token) + PAGE)
        names = [f"{query['prefix']}step-{number}/" for number in range(first, more)]
        if "pageToken" in query or "list-type" not in query:
            page = {"prefixes": names, **({"nextPageToken": str(more)} if first == 0 else {})}
            return self.answer(200, json.dumps(page).encode(), Content_Type="application/json")
        said = "".join(f"<CommonPrefixes><Prefix>{one}</Prefix></CommonPrefixes>" for one in names)
        if first == 0:
            said += f"<NextContinuationToken>{more}</NextContinuationToken>"
        said += f"<IsTruncated>{str(first == 0).lower()}</IsTruncated>"
        said = f"<ListBucketResult>{said}</ListBucketResult>"
        return self.answer(200, said.encode(), Content_Type="application/xml")

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Serving)
        self.seen: list[str] = []
        self.ranges = "end"


@pytest.fixture
def server():
    with Server() as made:
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        yield made
        made.shutdown()


def open_at(server, scheme, engine):
    url = f"http://127.0.0.1:{server.server_port}"
    options = {
        "s3": {"key": "a", "secret": "b", "endpoint_url": url},
        "gs": {"endpoint_url": url, "token": "anon"},
        "az": {"account_name": "a", "account_key": "a2V5", "endpoint_url": url},
    }[scheme]
    return open_store(f"{scheme}://bucket/run", storage_options=options, engine=engine, retry=ONCE)


PLACES = (("s3", "obstore"), ("s3", "fsspec"), ("gs", "fsspec"))


@pytest.mark.parametrize(("scheme", "engine"), PLACES)
def test_more_folders_than_a_page_shows_are_all_there(scheme, engine, server):
    found = open_at(server, scheme, engine).folders("a/")
    assert sorted(found) == sorted(f"step-{number}" for number in range(NUM_FOLDERS))
    assert server.seen == ["LIST 0", f"LIST {PAGE}"]


@pytest.mark.parametrize(
    ("scheme", "engine", "ranges", "requests"),
    [
        ("s3", "obstore", "end", ["GET bytes=-4"]),
        ("s3", "fsspec", "end", ["GET bytes=-4"]),
        ("gs", "fsspec", "end", ["GET bytes=-4"]),
        ("az", "obstore", "end", ["HEAD", "GET bytes=6-9"]),
        ("s3", "obstore", "start", ["GET bytes=-4", "HEAD", "GET bytes=6-9"]),
        ("s3", "fsspec", "start", ["GET bytes=-4", "HEAD", "GET bytes=6-9"]),
        ("s3", "fsspec", "none", ["GET bytes=-4"]),
    ],
)
def test_a_tail_is_asked_for_in_the_way_the_server_knows(scheme, engine, ranges, requests, server):
    server.ranges = ranges
    tail = open_at(server, scheme, engine).get_tail("a", 4)
    assert (bytes(tail.data), tail.size_bytes) == (DATA[-4:], len(DATA))
    assert tail.etag == ("7" if scheme == "gs" else '"mark"')
    assert server.seen == requests


@pytest.mark.parametrize(("scheme", "engine"), PLACES)
def test_a_range_that_is_not_the_end_is_an_error_that_may_pass(scheme, engine, server):
    server.ranges = "wrong"
    with pytest.raises(StoreError, match=r"last 4 of 10|Requested 6\.\.10") as caught:
        open_at(server, scheme, engine).get_tail("a", 4)
    assert caught.value.retryable or engine == "obstore"  # which finds out by itself


def test_an_object_that_is_replaced_between_two_requests_is_asked_for_again(tmp_path, monkeypatch):
    store = open_store(tmp_path, engine="fsspec", retry=ONCE).inner
    store.put("a", DATA)
    head = type(store).head

    def look(self, key):
        found = head(self, key)
        store.put("a", b"short")
        return found

    monkeypatch.setattr(type(store), "head", look)
    with pytest.raises(StoreError, match="replaced meanwhile") as caught:
        store.get_tail("a", 4)
    assert caught.value.retryable


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_a_local_folder_is_one_only_if_a_finished_file_is_in_it(engine, tmp_path):
    store = open_store(tmp_path, engine=engine)
    store.put("step-1/a", DATA)
    (tmp_path / "empty" / "nested").mkdir(parents=True)
    (tmp_path / "unfinished").mkdir()
    for name in (".dcpstore-tmp-0123", "object#3"):
        (tmp_path / "unfinished" / name).write_bytes(DATA)
    (tmp_path / "link").symlink_to(tmp_path / "step-1", target_is_directory=True)
    assert sorted(store.folders()) == ["link", "step-1"]
    assert {one.key.partition("/")[0] for one in store.list()} >= {"step-1"}
