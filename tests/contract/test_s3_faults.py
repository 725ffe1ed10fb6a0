"""What the S3 engines make of a server that misbehaves."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from dcpstore.errors import (
    AlreadyExistsError,
    ConfigError,
    ConflictError,
    NotFoundError,
    StoreError,
)
from dcpstore.store import IfMatch, RetryPolicy, Store, open_store
from dcpstore.testing import Fault
from dcpstore.testing.conformance import PART_BYTES

from .conftest import ONCE, S3_ENGINES

pytestmark = pytest.mark.parametrize("engine", S3_ENGINES)
QUICK = RetryPolicy(max_attempts=4, base_delay_s=0.01, max_delay_s=0.02)
# The S3 engines repeat parts themselves; obstore's first delay is 0.2 s.


def keys_of(client, store):
    place = store.url.split("/", 3)[3]
    return [key.removeprefix(f"{place}/") for key in client.keys(f"{place}/")]


def put_two_parts(store):
    store.put_parts("a", [b"p" * PART_BYTES] * 2, part_bytes=PART_BYTES, max_concurrency=2)


@pytest.fixture
def client(s3_server, bucket):
    return s3_server.client(bucket)


def test_a_wrong_bucket_is_named_and_never_created(engine, s3_server):
    kind = "obstore" if engine == "obstore-s3" else "fsspec"
    options = s3_server.storage_options()
    store = open_store("s3://mistyped/run", storage_options=options, engine=kind)
    for call in (
        lambda: store.put("a", b"1"),
        lambda: store.put("a", b"1", mode="create"),
        lambda: put_two_parts(store),
        lambda: store.get("a"),
        lambda: store.get_range("a", 0, 1),
        lambda: list(store.list()),
        lambda: store.delete_many(["a"]),
    ):
        with pytest.raises(NotFoundError, match="no such bucket"):
            call()
    with pytest.raises(NotFoundError):
        store.head("a")
    assert not s3_server.client("mistyped").exists()
    assert not s3_server.counts()["CreateBucket"]


def every_verb(store: Store) -> tuple[Callable[[], object], ...]:
    """Calls of one request each."""
    return (
        lambda: store.put("a", b"12345"),
        lambda: store.get("a"),
        lambda: store.get_range("a", 1, 2),
        lambda: store.head("a"),
        lambda: list(store.list()),
        lambda: store.delete_many(["a"]),
    )


@pytest.mark.parametrize("code", ["AccessDenied", "SignatureDoesNotMatch", "InvalidAccessKeyId"])
def test_a_refusal_is_denied_and_not_repeated(engine, code, s3_server, open_engine):
    s3_server.add_fault(Fault(status=403, code=code, times=-1))
    store = open_engine(engine, retry=QUICK)
    for number, call in enumerate((*every_verb(store), lambda: put_two_parts(store))):
        s3_server.clear_requests()
        with pytest.raises(StoreError, match="denied") as caught:
            call()
        assert caught.value.denied
        assert not caught.value.retryable
        # Where a signed URL is refused, the engine asks in its own way, once.
        is_received = number == 2 and store.capabilities.fills_memory
        assert len(s3_server.requests()) == 1 + is_received


def test_expired_credentials_are_told_apart(engine, s3_server, open_engine):
    s3_server.add_fault(Fault(status=400, code="ExpiredToken"))
    with pytest.raises(StoreError, match="expired") as caught:
        open_engine(engine, retry=QUICK).get("a")
    assert caught.value.denied


@pytest.mark.parametrize(
    ("status", "code", "throttled"),
    [
        (503, "SlowDown", True),
        (429, "TooManyRequests", True),
        (500, "InternalError", False),
        (502, "BadGateway", False),
        (408, "RequestTimeout", False),
    ],
)
def test_a_passing_failure_is_ridden_out(engine, status, code, throttled, s3_server, open_engine):
    store = open_engine(engine, retry=QUICK)
    store.put("a", b"12345")
    once = open_engine(engine, store.url.rsplit("/", 1)[1], retry=ONCE)
    s3_server.add_fault(Fault(status=status, code=code))
    with pytest.raises(StoreError) as caught:
        once.get("a")
    assert caught.value.retryable
    assert caught.value.throttled is throttled
    for call in every_verb(store):
        s3_server.add_fault(Fault(status=status, code=code, times=2))
        s3_server.clear_requests()
        call()
        assert [r.status for r in s3_server.requests()][:2] == [status, status]
        assert len(s3_server.requests()) == 3


def test_giving_up_tells_attempts_and_time(engine, s3_server, open_engine):
    s3_server.add_fault(Fault(times=-1))
    with pytest.raises(StoreError, match=r"gave up after 4 attempts over \d+\.\d s") as caught:
        open_engine(engine, retry=QUICK).get("a")
    assert isinstance(caught.value.__cause__, StoreError)
    assert len(s3_server.requests()) == 4


def test_retry_after_reaches_the_error_where_the_engine_tells_it(engine, s3_server, open_engine):
    s3_server.add_fault(Fault(retry_after_s=7))
    with pytest.raises(StoreError) as caught:
        open_engine(engine, retry=ONCE).get("a")
    # obstore keeps no headers of a refusal
    assert caught.value.retry_after_s == (7 if engine == "s3fs" else None)


def test_a_conditional_put_is_repeated_after_a_throttle_only(engine, s3_server, open_engine):
    store = open_engine(engine, retry=QUICK)
    s3_server.add_fault(Fault(operation="PutObject", status=503, code="SlowDown"))
    store.put("a", b"1", mode="create")
    assert s3_server.counts()["PutObject"] == 2
    s3_server.clear_requests()
    s3_server.add_fault(
        Fault(operation="PutObject", kind="lost_ack", status=500, code="InternalError")
    )
    with pytest.raises(StoreError) as caught:
        store.put("b", b"1", mode="create")
    assert caught.value.retryable
    assert s3_server.counts()["PutObject"] == 1
    assert bytes(store.get("b").data) == b"1"


def test_a_lost_race_is_a_conflict(engine, s3_server, open_engine):
    store = open_engine(engine, retry=QUICK)
    s3_server.add_fault(Fault(operation="PutObject", status=409, code="ConditionalRequestConflict"))
    with pytest.raises((ConflictError, AlreadyExistsError)):
        store.put("a", b"1", mode="create")


def test_an_unquoted_mark_is_tried_where_a_quoted_one_is_refused(engine, s3_server, open_engine):
    """Ceph compares the ETag with the header as sent, quotes included."""
    store = open_engine(engine, retry=ONCE)
    etag = store.put("a", b"1")
    s3_server.add_fault(Fault(operation="PutObject", status=412, code="PreconditionFailed"))
    store.put("a", b"2", mode=IfMatch(etag))
    assert bytes(store.get("a").data) == b"2"
    assert s3_server.counts()["PutObject"] == 3


def test_a_store_without_conditional_puts_says_so(engine, s3_server, open_engine):
    s3_server.add_fault(Fault(operation="PutObject", status=501, code="NotImplemented", times=-1))
    with pytest.raises(ConfigError, match="condition"):
        open_engine(engine, retry=QUICK).put("a", b"1", mode=IfMatch('"0"'))


@pytest.mark.parametrize("kind", ["short", "long"])
def test_an_answer_of_a_wrong_length_is_repeated(engine, kind, s3_server, open_engine):
    data = bytes(range(200))
    place = "lengths"
    open_engine(engine, place, retry=ONCE).put("a", data)
    s3_server.add_fault(Fault(operation="GetObject", kind=kind, num_bytes=3, times=2))
    store = open_engine(engine, place, retry=ONCE)
    with pytest.raises(StoreError) as caught:
        store.get_range("a", 10, 110)
    assert caught.value.retryable
    s3_server.heal()
    s3_server.add_fault(Fault(operation="GetObject", kind=kind, num_bytes=3, times=2))
    assert bytes(open_engine(engine, place, retry=QUICK).get_range("a", 10, 110)) == data[10:110]


def test_a_connection_that_breaks_is_repeated(engine, s3_server, open_engine):
    data = bytes(range(256)) * 400
    store = open_engine(engine, retry=QUICK)
    store.put("a", data)
    for call in (lambda: store.get_range("a", 0, len(data)), lambda: store.get("a").data):
        s3_server.add_fault(Fault(operation="GetObject", kind="drop", times=2))
        assert bytes(call()) == data


def test_a_part_is_sent_again(engine, s3_server, open_engine, client):
    store = open_engine(engine, retry=QUICK)
    s3_server.add_fault(Fault(operation="UploadPart", status=503, code="SlowDown", times=2))
    parts = [bytes([n]) * PART_BYTES for n in range(3)]
    store.put_parts("a", iter(parts), part_bytes=PART_BYTES, max_concurrency=2)
    assert store.head("a").size_bytes == 3 * PART_BYTES
    assert s3_server.counts()["UploadPart"] == 5
    assert client.open_uploads() == []


@pytest.mark.parametrize("operation", ["UploadPart", "CompleteMultipartUpload"])
def test_a_server_that_fails_an_upload_keeps_nothing_of_it(
    engine, operation, s3_server, open_engine, client
):
    store = open_engine(engine, retry=RetryPolicy(max_attempts=2, base_delay_s=0.01))
    s3_server.add_fault(Fault(operation=operation, status=500, code="InternalError", times=-1))
    taken = []

    def parts():
        for number in range(6):
            taken.append(number)
            yield b"p" * PART_BYTES

    with pytest.raises(StoreError) as caught:
        store.put_parts("a", parts(), part_bytes=PART_BYTES, max_concurrency=2)
    assert caught.value.retryable
    s3_server.heal()
    assert keys_of(client, store) == []
    assert client.open_uploads() == []
    if operation == "UploadPart":
        assert len(taken) <= 4, "a broken upload takes no more parts"


def test_a_stream_that_fails_leaves_no_open_upload(engine, s3_server, open_engine, client):
    store = open_engine(engine, retry=ONCE)
    s3_server.set_latency(0.05)

    def parts():
        for _ in range(4):
            yield b"p" * PART_BYTES
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        store.put_parts("a", parts(), part_bytes=PART_BYTES, max_concurrency=3)
    requests = s3_server.requests()
    abort = next(r for r in requests if r.operation == "AbortMultipartUpload")
    assert all(r.end_s <= abort.start_s for r in requests if r.operation == "UploadPart")
    assert keys_of(client, store) == []
    assert client.open_uploads() == []


def test_parts_are_in_flight_together_and_released(engine, s3_server, open_engine):
    store = open_engine(engine, retry=ONCE)
    s3_server.set_latency(0.2)
    slabs = [bytearray(PART_BYTES) for _ in range(3)]
    free = threading.Semaphore(3)

    def parts():
        for number in range(6):
            view = memoryview(slabs[number % 3])
            weakref.finalize(view, free.release)
            assert free.acquire(timeout=60), "a stored part was not released"
            slabs[number % 3][:1] = bytes([number])
            yield view
            del view

    store.put_parts("a", parts(), part_bytes=PART_BYTES, max_concurrency=3)
    s3_server.set_latency(0)
    assert max(r.num_in_flight for r in s3_server.requests()) == 3
    firsts = [bytes(store.get_range("a", n * PART_BYTES, n * PART_BYTES + 1)) for n in range(6)]
    assert firsts == [bytes([n]) for n in range(6)]


def test_a_small_stream_is_one_put(engine, s3_server, open_engine):
    open_engine(engine).put_parts("a", [b"small"], part_bytes=PART_BYTES, max_concurrency=4)
    assert dict(s3_server.counts()) == {"PutObject": 1}


def test_requests_are_what_the_protocol_promises(engine, s3_server, open_engine):
    store = open_engine(engine)
    store.put("a", b"12345", mode="create")
    store.get("a")
    store.get_range("a", 1, 3)
    store.get_range("a", 3, 3)
    assert [(r.operation, r.range, r.is_conditional) for r in s3_server.requests()] == [
        ("PutObject", None, True),
        ("GetObject", None, False),
        ("GetObject", "bytes=1-2", False),
    ]


@pytest.fixture(scope="module")
def paged_keys(moto_server, bucket):
    """More keys than a page of a list holds."""
    names = [f"n/{number:04}" for number in range(1003)]
    client = moto_server.client(bucket)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: client.put(f"pages/{name}", b""), names))
    return names


def test_a_list_follows_pages_and_survives_a_failure_between_them(
    engine, paged_keys, s3_server, open_engine
):
    store = open_engine(engine, "pages", retry=QUICK)
    assert [info.key for info in store.list("n/")] == paged_keys
    assert s3_server.counts()["ListObjects"] == 2
    s3_server.add_fault(Fault(operation="ListObjects", skip=1))
    assert [info.key for info in store.list()] == paged_keys


def test_deletes_are_sent_a_thousand_at_a_time(engine, s3_server, open_engine):
    store = open_engine(engine, retry=QUICK)
    doomed = [f"{number:04}" for number in range(1003)]
    for key in (doomed[0], doomed[-1], "kept"):
        store.put(key, b"")
    store.delete_many(doomed)
    assert [info.key for info in store.list()] == ["kept"]
    counts = s3_server.counts()
    assert counts["DeleteObjects"] == 2 or counts["DeleteObject"] == len(doomed)


def test_many_ranges_are_in_flight_at_once(engine, s3_server, open_engine):
    store = open_engine(engine)
    store.put("a", bytes(64))
    store.get("a")
    s3_server.set_latency(1.0)  # all begin meanwhile, on a slow machine too
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(lambda n: store.get_range("a", n, n + 1), range(32)))
    # Far more than the ten of a default pool; a busy machine may not begin all within the second.
    assert max(r.num_in_flight for r in s3_server.requests()) >= 16


def test_a_bucket_elsewhere_asks_for_its_region(engine, s3_server, open_engine):
    s3_server.add_fault(
        Fault(operation="GetObject", status=301, code="PermanentRedirect", times=-1)
    )
    with pytest.raises(ConfigError, match="region"):
        open_engine(engine, retry=QUICK).get("a")


def test_a_silent_server_is_given_up_on_but_a_long_upload_is_not(engine, s3_server, open_engine):
    if engine == "s3fs":
        pytest.skip("botocore's own read timeout holds for both")
    options = {**s3_server.storage_options(), "config_kwargs": {"read_timeout": 0.4}}
    store = open_engine(engine, storage_options=options, retry=ONCE)
    s3_server.set_latency(1.0)
    store.put("a", b"1")
    with pytest.raises(StoreError) as caught:
        store.get("a")
    assert caught.value.retryable


def test_a_server_that_is_gone_is_worth_another_try(engine, s3_server, open_engine):
    options = {**s3_server.storage_options(), "endpoint_url": "http://127.0.0.1:9"}
    store = open_engine(engine, storage_options=options, retry=QUICK)
    for call in (lambda: store.get("a"), lambda: store.put("a", b"1"), lambda: list(store.list())):
        with pytest.raises(StoreError, match="gave up after 4 attempts") as caught:
            call()
        assert caught.value.retryable
