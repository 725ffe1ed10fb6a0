"""Ranges over TLS while connections break, stall and change keys: right bytes, or an error."""

from __future__ import annotations

import contextlib
import datetime as dt
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import trustme

import dcpstore
from dcpstore.errors import StoreError
from dcpstore.store import RetryPolicy, Store, open_store
from dcpstore.store.base import Destination
from tls_server import Conversation, Terminator

DATA = bytes(range(256)) * 4096
ONCE = RetryPolicy(max_attempts=1)
AGAIN = RetryPolicy(max_attempts=3, base_delay_s=0.01, max_delay_s=0.02)
PAUSE_S = 0.5
Answer = Callable[[Conversation, int, int], bool]
"""Answers a request for a range; returns whether to go on with the connection."""


class Server:
    """Answers ranges of the data; the first as it is told, all others as it should."""

    def __init__(self, context: ssl.SSLContext, first: Answer) -> None:
        self.context = context
        self._first: list[Answer] = [first]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_requests = self.num_connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                raw, _ = self._listener.accept()
                self.num_connections += 1
                threading.Thread(target=self._converse, args=(raw,), daemon=True).start()

    def _converse(self, raw: socket.socket) -> None:
        with raw, contextlib.suppress(OSError):
            conversation = Conversation(raw, self.context)
            while True:
                _, start, end = conversation.read_request()
                self.num_requests += 1
                answer = self._first.pop() if self._first else rightly
                if not answer(conversation, start, end):
                    return

    def close(self) -> None:
        self._listener.close()


def head(start: int, end: int, length: int | None = None) -> bytes:
    return (
        f"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes {start}-{end - 1}/{len(DATA)}\r\n"
        'ETag: "1"\r\nLast-Modified: Sat, 21 Nov 2026 10:00:00 GMT\r\n'
        f"Content-Length: {end - start if length is None else length}\r\n\r\n"
    ).encode()


def rightly(to: Conversation, start: int, end: int) -> bool:
    to.send(head(start, end) + DATA[start:end])
    return True


def cut_in_a_record(to: Conversation, start: int, end: int) -> bool:
    to.raw.sendall(to.sealed(head(start, end) + DATA[start:end])[:-100])
    return False


def reset_in_a_record(to: Conversation, start: int, end: int) -> bool:
    to.raw.sendall(to.sealed(head(start, end) + DATA[start:end])[:-100])
    time.sleep(0.05)
    to.reset()
    return False


def closed_without_goodbye(to: Conversation, start: int, end: int) -> bool:
    to.send(head(start, end) + DATA[start : (start + end) // 2])
    return False


def closed_with_goodbye(to: Conversation, start: int, end: int) -> bool:
    to.send(head(start, end) + DATA[start : (start + end) // 2])
    to.say_goodbye()
    return False


def closed_before_the_body(to: Conversation, start: int, end: int) -> bool:
    to.send(head(start, end))
    return False


def closed_in_the_head(to: Conversation, start: int, end: int) -> bool:
    to.send(head(start, end)[:40])
    return False


def damaged(to: Conversation, start: int, end: int) -> bool:
    records = bytearray(to.sealed(head(start, end) + DATA[start:end]))
    records[len(records) // 2] ^= 1
    to.raw.sendall(records)
    return True


def silent_in_the_body(to: Conversation, start: int, end: int) -> bool:
    to.send(head(start, end) + DATA[start : (start + end) // 2])
    time.sleep(4 * PAUSE_S)
    return False


def silent_in_a_record(to: Conversation, start: int, end: int) -> bool:
    to.raw.sendall(to.sealed(head(start, end) + DATA[start:end])[:-100])
    time.sleep(4 * PAUSE_S)
    return False


def silent(to: Conversation, start: int, end: int) -> bool:
    time.sleep(4 * PAUSE_S)
    return False


def shorter_than_it_says(to: Conversation, start: int, end: int) -> bool:
    to.send(head(start, end) + DATA[start : end - 1])
    return False


BROKEN = [
    *(cut_in_a_record, reset_in_a_record, closed_without_goodbye, closed_with_goodbye),
    *(closed_before_the_body, closed_in_the_head, damaged, silent_in_the_body),
    *(silent_in_a_record, silent, shorter_than_it_says),
]


@pytest.fixture
def serve(authority) -> Iterator[Callable[..., tuple[Server, Store]]]:
    servers = []

    def start(
        first: Answer = rightly, context: ssl.SSLContext | None = None, retry: RetryPolicy = ONCE
    ) -> tuple[Server, Store]:
        server = Server(context or authority.server_context(), first)
        servers.append(server)
        return server, opened(server.url, authority, retry)

    yield start
    for server in servers:
        server.close()


def opened(url: str, authority: Any, retry: RetryPolicy) -> Store:
    options = {
        "key": "k",
        "secret": "s",
        "endpoint_url": url,
        "config_kwargs": {"read_timeout": PAUSE_S},
        **authority.options,
    }
    return open_store("s3://b/c", storage_options=options, retry=retry)


def fill(store: Store, start: int = 5, end: int = 300_005) -> bytes:
    memory = bytearray(end - start)
    store.fill("a", start, Destination([memoryview(memory)]))
    return bytes(memory)


def ranged(store: Store, start: int = 5, end: int = 300_005) -> bytes:
    return bytes(store.get_range("a", start, end))


@pytest.mark.parametrize("read", [fill, ranged])
@pytest.mark.parametrize("broken", BROKEN)
def test_an_answer_that_breaks_is_got_again(broken, read, serve) -> None:
    server, store = serve(broken, retry=AGAIN)
    began = time.monotonic()
    assert read(store) == DATA[5:300_005]
    assert server.num_requests == 2
    assert time.monotonic() - began < 3 * PAUSE_S


@pytest.mark.parametrize("broken", BROKEN)
def test_an_answer_that_breaks_is_never_taken_for_whole(broken, serve) -> None:
    server, store = serve(broken)
    with pytest.raises(StoreError) as caught:
        fill(store)
    assert caught.value.retryable
    assert server.num_requests == 1


def test_what_comes_behind_the_body_is_no_part_of_the_next_answer(serve) -> None:
    def longer_than_it_says(to: Conversation, start: int, end: int) -> bool:
        to.send(head(start, end) + DATA[start:end] + b"x" * 1000)
        return True

    server, store = serve(longer_than_it_says, retry=AGAIN)
    assert [fill(store), fill(store, 7, 9)] == [DATA[5:300_005], DATA[7:9]]
    assert server.num_connections == 2


def test_a_server_that_trickles_ends_with_the_time_of_the_answer(serve) -> None:
    def trickling(to: Conversation, start: int, end: int) -> bool:
        to.send(head(start, end))
        for at in range(start, end):
            to.send(DATA[at : at + 1])
            time.sleep(PAUSE_S / 10)
        return False

    _, store = serve(trickling, retry=RetryPolicy(max_attempts=1, total_deadline_s=1.0))
    began = time.monotonic()
    with pytest.raises(StoreError, match="took too long"):
        fill(store)
    assert time.monotonic() - began < 3


def test_a_connection_is_kept_and_a_later_one_resumes_its_session(serve) -> None:
    server, store = serve()
    for start in range(5):
        assert fill(store, start, start + 9) == DATA[start : start + 9]
    assert (server.num_connections, server.context.session_stats()["hits"]) == (1, 0)
    store.close()
    assert fill(store) == DATA[5:300_005]
    assert (server.num_connections, server.context.session_stats()["hits"]) == (2, 1)


# --- whom to trust ------------------------------------------------------------------------


def unknown(authority) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    return context


def of_another_name(authority) -> ssl.SSLContext:
    return authority.server_context("example.org")


def expired(authority) -> ssl.SSLContext:
    return authority.server_context(
        not_before=dt.datetime(2020, 1, 1), not_after=dt.datetime(2020, 2, 1)
    )


@pytest.mark.parametrize("context", [unknown, of_another_name, expired])
@pytest.mark.parametrize("read", [fill, ranged])
def test_a_server_that_cannot_be_trusted_is_sent_nothing(context, read, authority, serve) -> None:
    server, store = serve(context=context(authority), retry=RetryPolicy())
    began = time.monotonic()
    with pytest.raises(StoreError, match="certificate was refused") as caught:
        read(store)
    assert not caught.value.retryable
    assert (server.num_requests, time.monotonic() - began < 5) == (0, True)


@pytest.mark.parametrize("context", [unknown, expired])
def test_a_certificate_that_goes_bad_while_a_load_runs_is_refused(
    context, authority, serve
) -> None:
    server, store = serve(retry=RetryPolicy())
    assert fill(store) == DATA[5:300_005]
    server.context = context(authority)  # of new connections; the old one goes on
    assert fill(store) == DATA[5:300_005]
    store.close()
    store.inner._clients.ranges._trust._sessions.clear()  # else it would be resumed, unseen
    with pytest.raises(StoreError, match="certificate was refused"):
        fill(store)


def test_verification_can_be_switched_off(authority, serve) -> None:
    server, _ = serve(context=unknown(authority))
    options = {
        "key": "k",
        "secret": "s",
        "endpoint_url": server.url,
        "client_kwargs": {"verify": False},
    }
    store = open_store("s3://b/c", storage_options=options, retry=ONCE)
    assert fill(store) == ranged(store) == DATA[5:300_005]


# --- keys and tickets in the middle of a body -----------------------------------------------


def converse(listener: socket.socket, api: Any, authority: Any, told: list[str]) -> None:
    """Answer one request, and in its body send what Python's ssl cannot be made to send."""
    chain, key = api.X509CertChain(), authority.issue()
    chain.parsePemList(b"".join(one.bytes() for one in key.cert_chain_pems).decode())
    private = api.parsePEMKey(key.private_key_pem.bytes().decode(), private=True)
    settings = api.HandshakeSettings()
    settings.minVersion = settings.maxVersion = (3, 4)
    settings.ticketKeys = [bytearray(32)]
    settings.ticket_count = 1
    raw, _ = listener.accept()
    with raw:
        tls = api.TLSConnection(raw)
        tls.handshakeServer(certChain=chain, privateKey=private, settings=settings)
        request = b""
        while not request.endswith(b"\r\n\r\n"):
            request += tls.read(max=4096, min=1)
        tls.write(head(5, 300_005))
        for number, at in enumerate(range(5, 300_005, 10_000)):
            tls.write(DATA[at : min(at + 10_000, 300_005)])
            if number % 10 == 3:
                for _ in tls.send_keyupdate_request(1):
                    pass
                told.append("keys")
            if number % 10 == 6:
                for _ in tls._serverSendTickets(settings):
                    pass
                told.append("tickets")
        with contextlib.suppress(api.TLSAbruptCloseError):
            tls.read(max=1, min=1)  # the client's new keys, until it closes


@pytest.mark.filterwarnings("ignore:The asyncore module")  # tlslite's, unless there is none
def test_keys_and_tickets_that_come_in_the_body_are_no_part_of_it(authority) -> None:
    from tlslite import api

    told: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(
            target=converse, args=(listener, api, authority, told), daemon=True
        )
        thread.start()
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        store = opened(url, authority, RetryPolicy(max_attempts=1, timeout_floor_s=10))
        assert fill(store) == DATA[5:300_005]
        store.close()
        thread.join(10)
    assert told.count("keys") == 3
    assert told.count("tickets") == 3


# --- a whole checkpoint ---------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_a_checkpoint_is_saved_and_loaded_over_tls(engine, moto_server, authority) -> None:
    moto_server.create_bucket("over-tls")
    state = {"model": {"w": torch.randn(700, 1000), "b": torch.randn(11)}, "step": 3}
    with Terminator(authority.server_context(), moto_server.endpoint_url) as server:
        options = {**moto_server.storage_options(), **authority.options}
        options["endpoint_url"] = server.url
        where: Any = {"url": f"s3://over-tls/{engine}", "storage_options": options}
        dcpstore.save(state, config=dcpstore.WriteConfig(engine=engine), progress=False, **where)
        found = {"model": {"w": torch.zeros(700, 1000), "b": torch.zeros(11)}, "step": 0}
        dcpstore.load(found, config=dcpstore.ReadConfig(engine=engine), progress=False, **where)
    assert torch.equal(found["model"]["w"], state["model"]["w"])
    assert torch.equal(found["model"]["b"], state["model"]["b"])
    assert found["step"] == 3
