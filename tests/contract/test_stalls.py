"""A request that nobody answers costs one more try; and a request with all its tries has an end."""

from __future__ import annotations

import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcpstore import ObjectStoreReader, ObjectStoreWriter
from dcpstore.config import ReadConfig, WriteConfig
from dcpstore.errors import ConfigError, NotFoundError, StoreError
from dcpstore.store import RetryPolicy, open_store
from dcpstore.store.base import Destination
from dcpstore.testing.conformance import PART_BYTES

from .silent_server import Silence, SilentServer

ENGINES = ("obstore", "fsspec")
PATIENT = RetryPolicy(base_delay_s=0.01, timeout_floor_s=1.0, min_bytes_per_s=2**33)
HURRIED = RetryPolicy(base_delay_s=0.01, max_delay_s=0.1, total_deadline_s=2.0, timeout_floor_s=0.5)
SOON = RetryPolicy(unreachable_s=1.0)
LONG_AGO_S = 1e9

pytestmark = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture
def server() -> Iterator[SilentServer]:
    with SilentServer() as running:
        yield running


def opened(server, engine, policy=PATIENT):
    store = open_store("s3://b/run", storage_options=server.options, engine=engine, retry=policy)
    if engine == "fsspec":
        store.inner._clients.get().connect()  # it takes long, which is no request's fault
    return store


def parts():
    return [b"1" * PART_BYTES, b"2" * PART_BYTES, b"3"]


def put_parts(store):
    return store.put_parts("a", parts(), part_bytes=PART_BYTES, max_concurrency=2)


def filled(store):
    memory = bytearray(3)
    if not store.capabilities.fills_memory:
        return bytes(store.get_range("old", 1, 4))
    store.fill("old", 1, Destination([memoryview(memory)]))
    return bytes(memory)


CALLS = {
    "get": ("GetObject", lambda store: bytes(store.get("old").data), b"01234"),
    "get_range": ("GetObject", lambda store: bytes(store.get_range("old", 1, 4)), b"123"),
    "fill": ("GetObject", filled, b"123"),
    "head": ("HeadObject", lambda store: store.head("old").size_bytes, 5),
    "list": ("ListObjects", lambda store: list(store.list()), []),
    "delete_many": ("DeleteObjects", lambda store: store.delete_many(["old"]), None),
    "put": ("PutObject", lambda store: store.put("a", b"1" * 100) is None, False),
    "create": ("CreateMultipartUpload", lambda store: put_parts(store) is None, False),
    "part": ("UploadPart", lambda store: put_parts(store) is None, False),
    "complete": ("CompleteMultipartUpload", lambda store: put_parts(store) is None, False),
}


@pytest.mark.parametrize("call", CALLS)
def test_one_request_without_an_answer_costs_one_more_try(engine, call, server):
    operation, ask, expected = CALLS[call]
    store = opened(server, engine)
    store.put("old", b"01234")
    server.requests.clear()
    server.silences = [Silence(operation)]
    began = time.monotonic()
    assert ask(store) == expected
    assert time.monotonic() - began < 60
    usual = len(parts()) if operation == "UploadPart" else 1
    assert server.count(operation) > usual
    if operation in ("CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"):
        assert server.objects["run/a"] == b"".join(parts())
        assert server.count("AbortMultipartUpload") == 0


def test_an_upload_whose_completion_was_not_answered_is_found_by_what_is_there(engine, server):
    server.silences = [Silence("CompleteMultipartUpload", acts=True)]
    etag = put_parts(opened(server, engine))
    assert etag == server.etags["run/a"]
    assert server.objects["run/a"] == b"".join(parts())
    assert server.count("CompleteMultipartUpload") == 2
    assert server.count("HeadObject") == 1


def test_an_upload_that_somebody_aborted_is_not_taken_for_done(engine, server):
    store = opened(server, engine)
    server.silences = [Silence("CompleteMultipartUpload", acts=True)]
    server._keep = lambda *_: '""'  # the upload is gone, and no object came of it
    with pytest.raises(NotFoundError, match="the upload is gone"):
        put_parts(store)
    assert server.objects == {}


@pytest.mark.parametrize("difference", ["older", "other size", "other parts"])
def test_an_object_that_was_there_before_is_not_taken_for_the_upload(engine, difference, server):
    store = opened(server, engine)
    put_parts(store)
    server.modified["run/a"] = LONG_AGO_S if difference == "older" else time.time()
    if difference == "other size":
        server.objects["run/a"] += b"4"
    if difference == "other parts":
        server.etags["run/a"] = '"0123-7"'
    before = dict(server.objects)
    server.silences = [Silence("CompleteMultipartUpload", acts=True)]
    server._keep = lambda *_: '""'
    with pytest.raises(NotFoundError, match="the upload is gone"):
        put_parts(store)
    assert server.objects == before


@pytest.mark.parametrize("call", ["get", "put", "create", "part", "complete"])
def test_a_request_with_all_its_tries_ends_at_its_deadline(engine, call, server):
    operation, ask, _ = CALLS[call]
    opened(server, engine).put("old", b"01234")
    server.silences = [Silence(operation, times=-1)]
    began = time.monotonic()
    with pytest.raises(StoreError) as caught:
        ask(opened(server, engine, HURRIED))
    # The deadline is 2 s, and an upload is aborted after it; else it would be 60 s or 300 s.
    assert time.monotonic() - began < 20
    assert caught.value.retryable
    assert server.count(operation) > 1


def test_a_put_under_a_condition_is_sent_once_and_ends_with_its_time_out(engine, server):
    server.silences = [Silence("PutObject", times=-1)]
    began = time.monotonic()
    with pytest.raises(StoreError, match="answer") as caught:
        opened(server, engine, replace(HURRIED, timeout_floor_s=2.0)).put("a", b"1", mode="create")
    assert time.monotonic() - began < 20
    assert caught.value.retryable
    assert server.count("PutObject") == 1


def test_an_answer_that_trickles_ends_at_its_time_out(engine, server):
    store = opened(server, engine, HURRIED)
    store.put("old", b"0" * 100)
    server.trickles = True
    began = time.monotonic()
    with pytest.raises(StoreError) as caught:
        store.fill("old", 0, Destination([memoryview(bytearray(100))])) if (
            store.capabilities.fills_memory
        ) else store.get_range("old", 0, 100)
    assert time.monotonic() - began < 15  # 100 bytes would take 20 s
    assert caught.value.retryable
    assert server.count("GetObject") > 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "operation",
    [
        pytest.param("PutObject", marks=pytest.mark.campaign),
        "UploadPart",
        pytest.param("CompleteMultipartUpload", marks=pytest.mark.campaign),
    ],
)
def test_a_save_goes_on_after_a_request_without_an_answer(engine, operation, server):
    state = {"w": torch.arange(4_000_000.0), "step": torch.tensor(7)}
    config = {"engine": engine, "timeout_s": 1.5}
    options = {"storage_options": server.options}
    server.silences = [Silence(operation, acts=operation == "CompleteMultipartUpload")]
    writer = ObjectStoreWriter(
        "s3://b/run",
        config=WriteConfig(**config, part_bytes=5 * 2**20, min_bytes_per_s=2**33),
        **options,
    )
    began = time.monotonic()
    dcp.save(state, storage_writer=writer)
    assert time.monotonic() - began < 60
    assert server.silences[0].times == 0
    found = {"w": torch.zeros(4_000_000), "step": torch.tensor(0)}
    server.silences = [Silence("GetObject"), Silence("GetObject")]
    reader = ObjectStoreReader("s3://b/run", config=ReadConfig(**config), **options)
    dcp.load(found, storage_reader=reader)
    assert torch.equal(found["w"], state["w"])
    assert found["step"] == 7


# No connection -------------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_a_server_that_does_not_run_is_named_within_seconds(engine):
    options = {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{free_port()}"}
    store = open_store("s3://b/run", storage_options=options, engine=engine, retry=SOON)
    began = time.monotonic()
    with pytest.raises(StoreError, match="the connection was refused") as caught:
        store.get("a")
    assert caught.value.unreachable
    # A second of tries, and what a slow machine needs; else it would be 76 s and more.
    assert time.monotonic() - began < 30


def test_a_name_that_does_not_resolve_is_named(engine):
    options = {"key": "k", "secret": "s", "endpoint_url": "http://store.invalid"}
    retry = RetryPolicy(max_attempts=1)
    store = open_store("s3://b/run", storage_options=options, engine=engine, retry=retry)
    with pytest.raises(StoreError, match="could not be resolved"):
        store.get("a")


@contextmanager
def serving(context: ssl.SSLContext | None, said: bytes = b"") -> Iterator[int]:
    """Give the port of a server that says one thing to whoever connects, and closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, suppress(OSError):
                    if context is not None:
                        context.wrap_socket(connection, server_side=True).close()
                    else:
                        connection.recv(1 << 16)
                        connection.sendall(said)

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def refusal(engine, endpoint_url):
    """Return what a read says about a server, which it must do within seconds."""
    options = {"key": "k", "secret": "s", "endpoint_url": endpoint_url}
    store = open_store("s3://b/run", storage_options=options, engine=engine, retry=SOON)
    began = time.monotonic()
    with pytest.raises((StoreError, ConfigError)) as caught:
        store.get("a")
    assert time.monotonic() - began < 30  # a second of tries, and what a slow machine needs
    return caught.value


def test_a_certificate_that_is_refused_is_named_at_once(engine, authority):
    with serving(authority.server_context()) as port:
        error = refusal(engine, f"https://127.0.0.1:{port}")
    assert not error.retryable
    assert re.search(r"certificate was refused .*'verify'", str(error))


def test_a_server_without_tls_is_named_at_once(engine):
    with serving(None, b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n") as port:
        error = refusal(engine, f"https://127.0.0.1:{port}")
    assert isinstance(error, ConfigError)
    assert "does not speak TLS" in str(error)
    assert "Write http://" in str(error)


@pytest.mark.parametrize(
    "said",
    [
        "Client sent an HTTP request to an HTTPS server.",
        "<html><head><title>400 The plain HTTP request was sent to HTTPS port</title></head>",
    ],
)
def test_a_server_that_asks_for_tls_is_named_at_once(engine, said):
    answer = f"HTTP/1.1 400 Bad Request\r\nContent-Length: {len(said)}\r\n\r\n{said}"
    with serving(None, answer.encode()) as port:
        error = refusal(engine, f"http://127.0.0.1:{port}")
    if engine == "obstore":  # botocore drops what the server says
        assert isinstance(error, ConfigError)
        assert "wants TLS" in str(error)
        assert "Write https://" in str(error)
    else:
        assert "400: Bad Request" in str(error)


def test_a_server_that_closes_connections_without_a_word_is_named_within_seconds(
    engine, authority, caplog
):
    with serving(authority.server_context()) as port:  # as Python does on plain HTTP
        error = refusal(engine, f"http://127.0.0.1:{port}")
    assert error.unreachable
    assert "check the endpoint, its scheme and its port" in str(error)
    (warning,) = [one for one in caplog.messages if "trying again" in one]  # not one for each try
    assert "s3://b/run" in warning
