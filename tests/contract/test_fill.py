"""Ranges that are received straight into the caller's memory."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator

import pytest

from dcpstore.errors import CorruptError, NotFoundError, StoreError
from dcpstore.store import RetryPolicy, Store, open_store
from dcpstore.store.base import Destination, Revoked
from dcpstore.testing import Fault

from .conftest import ONCE

FILLING = ("obstore-local", "obstore-s3", "obstore-gcs")
DATA = bytes(range(256)) * 4096
QUICK = RetryPolicy(max_attempts=4, base_delay_s=0.01, max_delay_s=0.02)
SIGNED = "X-Amz-Signature"
PARTIAL = "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes"


def fill(store: Store, key: str, start: int, *sizes: int) -> bytes:
    """Fill pieces of some sizes; return them joined."""
    pieces = [bytearray(size) for size in sizes]
    store.fill(key, start, Destination([memoryview(piece) for piece in pieces]))
    return b"".join(pieces)


@pytest.mark.parametrize("engine", FILLING)
@pytest.mark.parametrize(
    ("start", "sizes"), [(0, (1,)), (7, (300_000, 1, 0, 65_536)), (len(DATA) - 9, (4, 5)), (3, ())]
)
def test_a_range_lands_in_all_pieces(engine, start, sizes, open_engine) -> None:
    store = open_engine(engine)
    store.put("a", DATA)
    assert store.capabilities.fills_memory
    assert fill(store, "a", start, *sizes) == DATA[start : start + sum(sizes)]


@pytest.mark.parametrize("engine", FILLING)
def test_what_is_not_there_is_told_as_for_any_range(engine, open_engine) -> None:
    store = open_engine(engine, retry=ONCE)
    store.put("a", DATA)
    with pytest.raises(NotFoundError, match="no such"):
        fill(store, "b", 0, 4)
    with pytest.raises(CorruptError, match="ends at byte 1048576") as caught:
        fill(store, "a", len(DATA) - 2, 4)
    assert (caught.value.start, caught.value.end) == (len(DATA) - 2, len(DATA) + 2)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_memory_is_filled_where_the_request_is_known_and_no_proxy_is_between(
    scheme, monkeypatch
) -> None:
    for name in ("all_proxy", "http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)

    def fills(url: str = "s3://b/c", **more: object) -> bool:
        given = {"key": "k", "secret": "s", "endpoint_url": f"{scheme}://127.0.0.1:1", **more}
        given = {name: value for name, value in given.items() if value is not None}
        return open_store(url, storage_options=given).capabilities.fills_memory

    keyless = {"key": None, "secret": None}
    assert fills()
    assert fills(anon=True, **keyless)
    assert not fills(requester_pays=True)
    assert fills("az://c/d", account_name="a", account_key="a2V5", **keyless)
    assert fills("az://c/d", account_name="a", sas_token="sv=1&sig=x", **keyless)
    assert not open_store("memory://a").capabilities.fills_memory
    monkeypatch.setenv(f"{scheme}_proxy", "http://127.0.0.1:9")
    assert not fills()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert fills()


@pytest.mark.parametrize(
    "fault",
    [
        Fault("GetObject", status=500, code="InternalError"),
        Fault("GetObject", "short"),
        Fault("GetObject", "long"),
        Fault("GetObject", "drop"),
    ],
    ids=lambda fault: fault.kind,
)
def test_an_answer_that_fails_is_got_again(fault, s3_server, open_engine) -> None:
    store = open_engine("obstore-s3", retry=QUICK)
    store.put("a", DATA)
    s3_server.add_fault(fault)
    assert fill(store, "a", 5, 200_000) == DATA[5:200_005]
    assert len([one for one in s3_server.requests() if one.operation == "GetObject"]) == 2


def test_a_store_that_asks_to_wait_is_heard(s3_server, open_engine) -> None:
    store = open_engine("obstore-s3", retry=ONCE)
    store.put("a", DATA)
    s3_server.add_fault(Fault("GetObject", status=503, retry_after_s=3))
    with pytest.raises(StoreError) as caught:
        fill(store, "a", 0, 10)
    assert (caught.value.throttled, caught.value.retry_after_s) == (True, 3.0)


def test_a_refusal_is_denied(s3_server, open_engine) -> None:
    store = open_engine("obstore-s3", retry=QUICK)
    store.put("a", DATA)
    s3_server.add_fault(Fault("GetObject", status=403, code="AccessDenied", times=-1))
    with pytest.raises(StoreError, match="denied") as caught:
        fill(store, "a", 0, 10)
    assert caught.value.denied


# --- a server that does odd things ----------------------------------------------------------

Answer = Callable[[socket.socket, int, int], bool]
"""Answers a signed request for a range; returns whether to go on with the connection."""


class OddServer:
    """Answers signed URLs oddly, and everything else as it should."""

    def __init__(self, odd: Answer, context: ssl.SSLContext | None = None) -> None:
        self._odd = odd
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.num_signed = self.num_connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = self._listener.accept()
                self.num_connections += 1
                threading.Thread(target=self._converse, args=(link,), daemon=True).start()

    def _converse(self, link: socket.socket) -> None:
        with link, contextlib.suppress(OSError):
            if self._context is not None:
                link = self._context.wrap_socket(link, server_side=True)
            with link:
                while self._answer(link):
                    pass

    def _answer(self, link: socket.socket) -> bool:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            piece = link.recv(1)
            if not piece:
                return False
            head += piece
        text = head.decode()
        found = re.search(r"(?i)range: bytes=(\d+)-(\d+)", text)
        assert found is not None
        start, end = int(found[1]), int(found[2]) + 1
        if SIGNED in text:
            self.num_signed += 1
            return self._odd(link, start, end)
        send(link, start, end)
        return True

    def close(self) -> None:
        self._listener.close()


def send(
    link: socket.socket, start: int, end: int, *, head: str = "", num_bytes: int | None = None
) -> None:
    """Answer with a range of the data, or with its first bytes only."""
    lines = head or f"{PARTIAL} {start}-{end - 1}/{len(DATA)}"
    mark = 'ETag: "1"\r\nLast-Modified: Sat, 21 Nov 2026 10:00:00 GMT'
    link.sendall(f"{lines}\r\n{mark}\r\nContent-Length: {end - start}\r\n\r\n".encode())
    link.sendall(DATA[start : end if num_bytes is None else start + num_bytes])


@pytest.fixture(params=["http", "https"])
def serve(request, authority) -> Iterator[Callable[..., tuple[OddServer, Store]]]:
    servers: list[OddServer] = []
    context = authority.server_context() if request.param == "https" else None

    def start(odd: Answer, **more: object) -> tuple[OddServer, Store]:
        server = OddServer(odd, context)
        servers.append(server)
        options = {
            "key": "k",
            "secret": "s",
            "endpoint_url": f"{request.param}://127.0.0.1:{server.port}",
            "config_kwargs": {"read_timeout": 0.5},
            **authority.options,
        }
        return server, open_store("s3://b/c", storage_options=options, **{"retry": ONCE, **more})

    yield start
    for server in servers:
        server.close()


def whole_object(link: socket.socket, start: int, end: int) -> bool:
    send(link, 0, len(DATA), head="HTTP/1.1 200 OK")
    return True


def another_range(link: socket.socket, start: int, end: int) -> bool:
    send(link, start + 1, end + 1)
    return True


def in_chunks(link: socket.socket, start: int, end: int) -> bool:
    head = f"{PARTIAL} {start}-{end - 1}/{len(DATA)}"
    link.sendall(f"{head}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
    link.sendall(f"{end - start:x}\r\n".encode() + DATA[start:end] + b"\r\n0\r\n\r\n")
    return True


def compressed(link: socket.socket, start: int, end: int) -> bool:
    head = f"{PARTIAL} {start}-{end - 1}/{len(DATA)}"
    send(link, 0, end - start, head=f"{head}\r\nContent-Encoding: gzip")
    return True


def elsewhere(link: socket.socket, start: int, end: int) -> bool:
    send(link, 0, 9, head="HTTP/1.1 307 Temporary Redirect\r\nLocation: http://127.0.0.1:1/")
    return True


def refused(link: socket.socket, start: int, end: int) -> bool:
    send(link, 0, 9, head="HTTP/1.1 403 Forbidden")
    return True


@pytest.mark.parametrize(
    "odd", [whole_object, another_range, in_chunks, compressed, elsewhere, refused]
)
def test_an_answer_that_is_not_the_range_is_not_taken(odd, serve) -> None:
    server, store = serve(odd)
    for number in range(5):
        assert fill(store, "a", number, 70_000) == DATA[number : number + 70_000]
    assert server.num_signed == 3  # a server that does not know signed URLs is not asked for ever


def test_connections_are_kept_and_a_stale_one_is_replaced(serve) -> None:
    def close_every_third(link: socket.socket, start: int, end: int) -> bool:
        send(link, start, end)
        return start % 3 != 2  # without a word: the client finds out when it asks next

    server, store = serve(close_every_third)
    for start in range(9):
        assert fill(store, "a", start, 1000) == DATA[start : start + 1000]
    assert (server.num_signed, server.num_connections) == (9, 3)


def test_a_server_that_closes_is_asked_over_a_new_connection(serve) -> None:
    def close(link: socket.socket, start: int, end: int) -> bool:
        head = f"{PARTIAL} {start}-{end - 1}/{len(DATA)}"
        send(link, start, end, head=f"{head}\r\nConnection: close")
        return False

    server, store = serve(close)
    assert [fill(store, "a", 1, 100_000) for _ in range(3)] == [DATA[1:100_001]] * 3
    assert server.num_connections == 3


def test_a_body_that_stops_is_a_failure_worth_another_try_and_gives_no_secret_away(serve) -> None:
    def half(link: socket.socket, start: int, end: int) -> bool:
        send(link, start, end, num_bytes=500)
        return start > 0 and not threading.Event().wait(5)

    _, store = serve(half)
    for start in (0, 1):  # one connection is closed, the other silent
        with pytest.raises(StoreError) as caught:
            head = f"[{start}, {start + 1000})"
            fill(store, "a", start, 1000)
        assert caught.value.retryable
        assert head in str(caught.value)
        assert SIGNED not in f"{caught.value} {caught.value.__cause__!r}"


def test_a_server_that_sends_less_than_a_batch_at_a_time_is_waited_for(serve) -> None:
    def slowly(link: socket.socket, start: int, end: int) -> bool:
        send(link, start, end, num_bytes=0)
        for at in range(start, end, 50_000):
            link.sendall(DATA[at : min(at + 50_000, end)])
            threading.Event().wait(0.35)  # the pause that is allowed is 0.5 s
        return True

    server, store = serve(slowly)
    assert fill(store, "a", 0, 199_999, 1) == DATA[:200_000]
    assert server.num_signed == 1


def test_memory_that_was_taken_back_is_not_written_any_more(serve) -> None:
    sent, go_on = threading.Event(), threading.Event()

    def slowly(link: socket.socket, start: int, end: int) -> bool:
        send(link, start, end, num_bytes=10)
        sent.set()
        go_on.wait(10)
        link.sendall(DATA[start + 10 : end])
        return True

    _, store = serve(slowly, retry=QUICK)
    memory = bytearray(5000)
    destination = Destination([memoryview(memory)])
    errors: list[BaseException] = []

    def run() -> None:
        try:
            store.fill("a", 0, destination)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert sent.wait(10)
    destination.revoke()  # returns although the body has not come
    memory[:] = bytes(5000)
    go_on.set()
    thread.join(10)
    assert [type(error) for error in errors] == [Revoked]
    assert memory == bytes(5000)
    with pytest.raises(Revoked):
        store.fill("a", 0, destination)
