from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dcpstore.errors import NotFoundError, StoreError
from dcpstore.store import open_store
from dcpstore.testing import Crashed, FaultyStore, LatencyStore, RecordingStore, StoreFault


@pytest.fixture
def plain(tmp_path):
    return open_store(tmp_path).inner


def test_the_k_th_request_fails_and_no_other(plain):
    store = FaultyStore(plain, [StoreFault("error", at=2)])
    store.put("a", b"1")
    store.put("b", b"1")
    with pytest.raises(StoreError, match="scripted"):
        store.put("c", b"1")
    store.put("d", b"1")
    assert sorted(info.key for info in store.list()) == ["a", "b", "d"]


def test_a_fault_may_be_for_one_verb_and_key(plain):
    store = FaultyStore(plain, [StoreFault("denied", "put", key=".metadata")])
    store.put("data", b"1")
    with pytest.raises(StoreError) as caught:
        store.put(".metadata", b"1")
    assert caught.value.denied
    store.put(".metadata", b"1")


def test_after_a_crash_nothing_answers(plain):
    store = FaultyStore(plain, [StoreFault("crash", "put", at=1)])
    store.put("a", b"1")
    for call in (
        lambda: store.put("b", b"1"),
        lambda: store.get("a"),
        lambda: list(store.list()),
        lambda: store.delete_many(["a"]),
    ):
        with pytest.raises(Crashed):
            call()
    assert store.is_dead
    assert [info.key for info in plain.list()] == ["a"]
    store.revive()
    assert bytes(store.get("a").data) == b"1"


def test_a_crash_may_come_after_the_deed(plain):
    store = FaultyStore(plain, [StoreFault("crash_after", "put")])
    with pytest.raises(Crashed):
        store.put("a", b"1")
    assert bytes(plain.get("a").data) == b"1"


@pytest.mark.parametrize("theirs", [None, b"theirs"], ids=["the deed", "a refusal"])
def test_a_lost_answer_follows_the_deed_and_a_lost_refusal_is_lost_too(plain, theirs):
    if theirs is not None:
        plain.put("a", theirs)
    store = FaultyStore(plain, [StoreFault("lost_ack", "put")])
    with pytest.raises(StoreError) as caught:
        store.put("a", b"ours", mode="create")
    assert caught.value.retryable
    assert bytes(store.get("a").data) == (theirs or b"ours")


def test_a_throttle_asks_to_wait(plain):
    store = FaultyStore(plain, [StoreFault("throttle", retry_after_s=3, times=None)])
    for _ in range(5):
        with pytest.raises(StoreError) as caught:
            store.get("a")
        assert (caught.value.throttled, caught.value.retry_after_s) == (True, 3)


def test_answers_are_spoilt(plain):
    plain.put("a", b"\0\0\0\0")
    script = [StoreFault("flip", "get", bit=9), StoreFault("short", "get", num_bytes=3)]
    store = FaultyStore(plain, [*script, StoreFault("long", "get", num_bytes=2)])
    assert [bytes(store.get("a").data) for _ in range(4)] == [
        b"\0\2\0\0",
        b"\0",
        b"\0" * 6,
        b"\0" * 4,
    ]
    store = FaultyStore(
        plain, [StoreFault("flip", "get_range", bit=0), StoreFault("short", "get_range")]
    )
    assert bytes(store.get_range("a", 1, 3)) == b"\1\0"
    with pytest.raises(StoreError) as caught:
        store.get_range("a", 1, 3)
    assert caught.value.retryable


def test_a_stream_of_parts_fails_in_the_middle(plain):
    store = FaultyStore(plain, [StoreFault("error", "put_parts", after_parts=2)])
    taken = []

    def parts():
        for number in range(4):
            taken.append(number)
            yield b"123"

    with pytest.raises(StoreError, match="scripted"):
        store.put_parts("a", parts(), part_bytes=3, max_concurrency=1)
    assert taken == [0, 1, 2]
    with pytest.raises(NotFoundError):
        plain.head("a")


def test_a_crash_elsewhere_stops_a_stream_of_parts(plain):
    store = FaultyStore(plain, [StoreFault("crash", "head")])

    def parts():
        yield b"123"
        with pytest.raises(Crashed):
            store.head("other")
        yield b"123"

    with pytest.raises(Crashed):
        store.put_parts("a", parts(), part_bytes=3, max_concurrency=1)


def test_a_stale_list_hides_keys(plain):
    store = FaultyStore(plain, stale_keys=["b"])
    store.put("a", b"1")
    store.put("b", b"1")
    assert [info.key for info in store.list()] == ["a"]
    assert bytes(store.get("b").data) == b"1"


def test_faults_are_counted_once_among_threads(plain):
    store = FaultyStore(plain, [StoreFault("error", at=10, times=5)])
    failures = []

    def work(number):
        try:
            store.put(f"k{number}", b"1")
        except StoreError:
            failures.append(number)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(40)))
    assert len(failures) == 5
    assert store.num_requests == 40


def test_a_script_pickles():
    store = FaultyStore(open_store("memory://pickled"), [StoreFault("error")], stale_keys=["a"])
    with pytest.raises(StoreError):
        pickle.loads(pickle.dumps(store)).head("a")
    error = Crashed("gone", key="a")
    assert isinstance(pickle.loads(pickle.dumps(error)), Crashed)


def test_latency_is_waited_for_by_each_request_at_once(plain):
    all_wait, waits = threading.Barrier(8), []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        all_wait.wait(60)

    slow = LatencyStore(plain, latency_s=0.1, sleep=sleep)
    plain.put("a", b"12345678")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: slow.get_range("a", n, n + 1), range(8)))
    assert waits == [0.1] * 8


def test_bandwidth_is_shared(plain):
    now, slept = [0.0], []
    slow = LatencyStore(plain, bandwidth_bytes_s=100, clock=lambda: now[0], sleep=slept.append)
    slow.put("a", b"x" * 100)
    slow.put("b", b"x" * 50)
    assert [s for s in slept if s] == [1.0, 1.5]
    now[0] = 10.0
    slept.clear()
    slow.get("a")
    assert [s for s in slept if s] == [1.0]


def test_every_verb_is_delayed(plain):
    slept = []
    slow = LatencyStore(plain, latency_s=0.5, sleep=slept.append)
    slow.put("a", b"1")
    slow.get("a")
    slow.get_range("a", 0, 1)
    slow.get_range("a", 1, 1)
    slow.head("a")
    list(slow.list())
    slow.put_parts("b", [b"12", b"3"], part_bytes=2, max_concurrency=2)
    slow.delete_many(["a"])
    assert slept == [0.5] * 5 + [0.25] * 2 + [0.5]


def test_a_server_lives_with_its_context():
    from dcpstore.testing import MotoServer

    server = MotoServer(latency_s=0.05)
    with server:
        client = server.create_bucket("one")
        client.put("a b/ü", b"12345")
        client.flip_bit("a b/ü", 1)
        assert client.get("a b/ü") == b"1\x33345"
        client.truncate("a b/ü", 2)
        assert client.get("a b/ü") == b"1\x33"
        assert client.keys() == ["a b/ü"]
        server.set_latency(0.5)
        threads = [threading.Thread(target=client.get, args=("a b/ü",)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert max(request.num_in_flight for request in server.requests()) > 1
        assert min(request.end_s - request.start_s for request in server.requests()) >= 0.05
        assert server.counts()["GetObject"] == 12
        server.clear_requests()
        assert server.requests() == []
    server.close()
    with pytest.raises(OSError, match="refused"):
        client.get("a b/ü")


def test_folders_and_tails_pass_through_every_fake(plain):
    plain.put("run/a", b"0123456789")
    recorder = RecordingStore(FaultyStore(LatencyStore(plain)))
    assert recorder.folders() == ["run"]
    assert bytes(recorder.get_tail("run/a", 3).data) == b"789"
    assert recorder.counts == {"folders": 1, "get_tail": 1}
    assert recorder.num_bytes_fetched == 3


def test_a_tail_may_be_spoilt(plain):
    plain.put("a", b"0123456789")
    store = FaultyStore(plain, [StoreFault("flip", "get_tail"), StoreFault("short", "get_tail")])
    flipped = store.get_tail("a", 3)
    assert (bytes(flipped.data), flipped.size_bytes) == (b"689", 10)
    with pytest.raises(StoreError) as caught:
        store.get_tail("a", 3)
    assert caught.value.retryable
    assert bytes(store.get_tail("a", 3).data) == b"789"
