from __future__ import annotations

import pickle
import random
import threading
from contextlib import contextmanager

import pytest

from dcpstore.errors import AlreadyExistsError, StoreError
from dcpstore.store import AdaptiveLimiter, IfMatch, RetryingStore, RetryPolicy, open_store
from dcpstore.store.base import Location, Origin
from dcpstore.store.retry import TimeLimit, call_with_retries
from dcpstore.testing import FaultyStore, RecordingStore, StoreFault


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.now = 100.0
        self.slept = []

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


class Always:
    """A random source that always gives the same number."""

    def __init__(self, value):
        self.value = value

    def random(self):
        return self.value


@pytest.fixture
def fake_time():
    return FakeTime()


@pytest.fixture
def build(fake_time, tmp_path):
    def make(*faults, policy=None, jitter=1.0):
        faulty = FaultyStore(open_store(tmp_path, engine="fsspec").inner, faults)
        recorder = RecordingStore(faulty)
        store = RetryingStore(
            recorder,
            policy or RetryPolicy(),
            AdaptiveLimiter(clock=fake_time.clock, sleep=fake_time.sleep),
            clock=fake_time.clock,
            sleep=fake_time.sleep,
            rng=Always(jitter),
        )
        return store, recorder

    return make


def test_delays_double_up_to_a_ceiling():
    policy = RetryPolicy(base_delay_s=1, max_delay_s=5)
    assert [policy.delay_s(n, 1.0, None) for n in range(1, 6)] == [1, 2, 4, 5, 5]


def test_delays_are_fully_jittered():
    policy = RetryPolicy(base_delay_s=1, max_delay_s=8)
    rng = random.Random(1)
    drawn = [policy.delay_s(3, rng.random(), None) for _ in range(1000)]
    assert min(drawn) < 0.1
    assert max(drawn) > 3.9
    assert 1.8 < sum(drawn) / 1000 < 2.2


def test_retry_after_is_the_least_delay():
    policy = RetryPolicy(base_delay_s=1, max_delay_s=5)
    assert policy.delay_s(1, 0.5, 30) == 30
    assert policy.delay_s(3, 1.0, 2) == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_attempts": 0},
        {"base_delay_s": -1},
        {"total_deadline_s": -1},
        {"timeout_floor_s": 0},
        {"min_bytes_per_s": 0},
    ],
)
def test_a_policy_checks_itself(wrong):
    with pytest.raises(ValueError, match=r"max_attempts|negative|not positive"):
        RetryPolicy(**wrong)


def test_the_default_policy_rides_out_thirty_seconds_of_refusals():
    rng = random.Random(7)
    policy = RetryPolicy()
    spans = [
        sum(policy.delay_s(n, rng.random(), None) for n in range(1, policy.max_attempts))
        for _ in range(500)
    ]
    assert sum(span > 30 for span in spans) > 0.99 * len(spans)


def test_a_failure_is_repeated_until_it_passes(build, fake_time):
    store, recorder = build(StoreFault("error", "get", times=3))
    store.put("a", b"1")
    assert bytes(store.get("a").data) == b"1"
    assert recorder.counts["get"] == 4
    assert fake_time.slept == [0.2, 0.4, 0.8]


def test_attempts_are_bounded(build):
    store, recorder = build(StoreFault("error", times=None), policy=RetryPolicy(max_attempts=3))
    with pytest.raises(StoreError, match=r"gave up after 3 attempts over 0\.6 s") as caught:
        store.head("a")
    assert recorder.counts["head"] == 3
    assert isinstance(caught.value.__cause__, StoreError)
    assert caught.value.retryable
    assert caught.value.key == "a"


def test_a_last_attempt_cut_short_does_not_hide_what_the_store_answered():
    said = iter(["503 Slow Down", "no answer within 0.8 s", "no answer within 0.1 s"])

    def request(_left_s):
        raise StoreError(next(said), retryable=True)

    with pytest.raises(StoreError, match=r"^no answer.*gave up.*before: 503 Slow Down\)$"):
        call_with_retries(request, RetryPolicy(max_attempts=3), sleep=lambda _: None)


def test_time_is_bounded(build, fake_time):
    policy = RetryPolicy(max_attempts=100, base_delay_s=4, max_delay_s=4, total_deadline_s=10)
    store, recorder = build(StoreFault("error", times=None), policy=policy)
    with pytest.raises(StoreError, match=r"gave up after 3 attempts over 8\.0 s"):
        store.head("a")
    assert recorder.counts["head"] == 3
    assert fake_time.now == 108


# Time-outs and deadlines


def test_a_time_out_is_a_floor_and_the_bytes_at_the_least_rate():
    policy = RetryPolicy(total_deadline_s=1000, timeout_floor_s=20, min_bytes_per_s=1 << 20)
    assert policy.timeout_s() == 20
    assert policy.timeout_s(16 << 20) == 36
    assert policy.timeout_s(100 << 20) == 120


def test_two_tries_and_a_delay_fit_in_the_deadline_whatever_the_size():
    policy = RetryPolicy()
    assert policy.timeout_s(1 << 40) == 0.4 * policy.total_deadline_s
    assert 2 * policy.timeout_s(1 << 40) + policy.max_delay_s <= policy.total_deadline_s
    assert RetryPolicy(max_attempts=1, total_deadline_s=100).timeout_s(1 << 40) == 100
    assert RetryPolicy(total_deadline_s=20).timeout_s() == 8


def test_the_deadline_runs_from_the_first_place(fake_time):
    given = []

    @contextmanager
    def place():
        fake_time.now += 4
        yield

    def request(left_s):
        given.append(left_s)
        raise StoreError("no answer", retryable=True)

    policy = RetryPolicy(max_attempts=3, total_deadline_s=10, base_delay_s=0)
    with pytest.raises(StoreError, match="gave up after 3 attempts"):
        call_with_retries(
            request, policy, place=place, clock=fake_time.clock, sleep=fake_time.sleep
        )
    assert given == [10, 6, 2]


def test_a_time_out_is_cut_to_what_is_left():
    limit = TimeLimit(RetryPolicy(timeout_floor_s=20, total_deadline_s=180))
    assert limit.seconds() == 20
    assert limit.left_s() == 180
    assert 2 < limit.within(3).seconds() <= 3
    assert limit.within(100).seconds() == 20
    assert 0 < limit.within(-5).seconds() < 0.1


class Stalling:
    """A store that leaves every request without an answer until its time is over."""

    url = "stalling://"

    def __init__(self, fake_time, timeout_s, error=None):
        self.fake_time = fake_time
        self.timeout_s = timeout_s
        self.error = error or StoreError("no answer", retryable=True)
        self.times = []
        self.most_s = None

    def within(self, most_s):
        self.most_s = most_s
        return self

    def head(self, key):
        taken_s = min(self.timeout_s, self.most_s)
        self.times.append(taken_s)
        self.fake_time.now += taken_s
        raise self.error

    get = head

    def put(self, key, data, *, mode="overwrite"):
        return self.head(key)


def retrying(inner, fake_time, policy):
    return RetryingStore(
        inner,
        policy,
        AdaptiveLimiter(clock=fake_time.clock, sleep=fake_time.sleep),
        clock=fake_time.clock,
        sleep=fake_time.sleep,
        rng=Always(1.0),
    )


def test_the_last_try_has_what_is_left_of_the_deadline(fake_time):
    stalling = Stalling(fake_time, 8)
    policy = RetryPolicy(base_delay_s=1, max_delay_s=1, total_deadline_s=20)
    with pytest.raises(StoreError, match=r"gave up after 3 attempts over 20\.0 s"):
        retrying(stalling, fake_time, policy).head("a")
    assert stalling.times == [8, 8, 2]
    assert fake_time.now == 120


def test_a_put_under_a_condition_takes_no_longer_than_its_time_out(fake_time):
    stalling = Stalling(fake_time, 8)
    with pytest.raises(StoreError, match="no answer"):
        retrying(stalling, fake_time, RetryPolicy(total_deadline_s=20)).put("a", b"", mode="create")
    assert fake_time.now == 108


def unreachable():
    return StoreError("refused", retryable=True, unreachable=True)


def test_a_server_that_never_answered_is_given_up_within_five_seconds(fake_time):
    store = retrying(Stalling(fake_time, 0, unreachable()), fake_time, RetryPolicy())
    with pytest.raises(StoreError, match="refused") as caught:
        store.head("a")
    assert caught.value.unreachable
    assert 2 < fake_time.now - 100 <= 5


def test_a_server_that_answered_before_is_taken_to_restart(fake_time):
    stalling = Stalling(fake_time, 0, StoreError("404", denied=True))
    store = retrying(stalling, fake_time, RetryPolicy())
    with pytest.raises(StoreError, match="404"):
        store.head("a")
    stalling.error = unreachable()
    with pytest.raises(StoreError, match="refused"):
        store.head("a")
    assert fake_time.now - 100 > 100


def test_a_server_that_answered_another_store_of_this_process_is_taken_to_restart(fake_time):
    def store_in(bucket):
        stalling = Stalling(fake_time, 0, StoreError("404", denied=True))
        location = Location("s3", bucket, "run", f"s3://{bucket}/run")
        stalling.origin = Origin(location, {"endpoint_url": "http://of-this-test"})
        return stalling, retrying(stalling, fake_time, RetryPolicy())

    _, first = store_in("known")
    stranger, third = store_in("unknown")
    with pytest.raises(StoreError, match="404"):
        first.head("a")
    stalling, second = store_in("known")
    stalling.error = stranger.error = unreachable()
    with pytest.raises(StoreError, match="refused"):
        third.head("a")
    assert fake_time.now - 100 <= 5
    with pytest.raises(StoreError, match="refused"):
        second.head("a")
    assert fake_time.now - 100 > 100


def test_a_warning_tells_of_the_first_failure_and_then_now_and_again(fake_time, caplog):
    stalling = Stalling(fake_time, 0, StoreError("the server said 500", retryable=True))
    with pytest.raises(StoreError):
        retrying(stalling, fake_time, RetryPolicy(max_attempts=100)).head("a")
    assert caplog.messages[0] == "the server said 500; trying again for up to 180 s"
    assert 4 <= len(caplog.messages) <= 6 < len(stalling.times)


def test_a_put_outlasts_a_restart_although_this_process_has_not_looked(fake_time):
    store = retrying(Stalling(fake_time, 0, unreachable()), fake_time, RetryPolicy())
    with pytest.raises(StoreError, match="refused"):
        store.put("a", b"")
    assert fake_time.now - 100 > 100


def test_a_put_under_a_condition_is_not_repeated_where_its_client_found_nobody(fake_time):
    """aiohttp sends a put again over a new connection, and tells of the second one only."""
    stalling = Stalling(fake_time, 0, unreachable())
    with pytest.raises(StoreError, match="refused"):
        retrying(stalling, fake_time, RetryPolicy()).put("a", b"", mode="create")
    assert len(stalling.times) == 1


def test_retry_after_is_honoured_once_and_by_all(build, fake_time):
    store, _ = build(StoreFault("throttle", "get", retry_after_s=7.0), jitter=0.0)
    store.put("a", b"1")
    store.get("a")
    assert sum(fake_time.slept) == 7


def test_a_retry_after_beyond_the_deadline_gives_up_at_once(build, fake_time):
    store, _ = build(StoreFault("throttle", retry_after_s=1000.0))
    with pytest.raises(StoreError, match="gave up after 1 attempt ") as caught:
        store.get("a")
    assert caught.value.retry_after_s == 1000
    assert fake_time.slept == []


def test_what_is_denied_is_not_repeated(build):
    store, recorder = build(StoreFault("denied", times=None))
    with pytest.raises(StoreError):
        store.get("a")
    assert recorder.counts["get"] == 1


@pytest.mark.parametrize("mode", ["create", IfMatch("x")])
@pytest.mark.parametrize("kind", ["error", "lost_ack"])
def test_a_conditional_put_is_never_repeated_blindly(mode, kind, build):
    store, recorder = build(StoreFault(kind, "put", at=1))
    etag = store.put("old", b"1")
    mode = IfMatch(etag) if isinstance(mode, IfMatch) else mode
    with pytest.raises(StoreError) as caught:
        store.put("old" if mode != "create" else "new", b"2", mode=mode)
    assert caught.value.retryable
    assert recorder.counts["put"] == 2


def test_a_throttled_conditional_put_is_repeated(build):
    store, recorder = build(StoreFault("throttle", "put", times=2))
    store.put("a", b"1", mode="create")
    assert recorder.counts["put"] == 3
    with pytest.raises(AlreadyExistsError):
        store.put("a", b"2", mode="create")


def test_an_overwrite_is_repeated_after_a_lost_answer(build):
    store, recorder = build(StoreFault("lost_ack", "put"))
    store.put("a", b"1")
    assert recorder.counts["put"] == 2


def test_parts_are_never_replayed(build):
    store, recorder = build(StoreFault("error", "put_parts"))
    with pytest.raises(StoreError):
        store.put_parts("a", iter([b"1"]), part_bytes=5, max_concurrency=1)
    assert recorder.counts["put_parts"] == 1


def test_parts_may_come_from_requests_under_the_same_limit():
    store = open_store("memory://under-one-limit", limiter=AdaptiveLimiter(1))
    store.put("a", b"123")
    parts = (bytes(store.get("a").data) for _ in range(3))
    store.put_parts("b", parts, part_bytes=3, max_concurrency=2)
    assert bytes(store.get("b").data) == b"123" * 3


def test_deletes_are_repeated(build):
    store, recorder = build(StoreFault("lost_ack", "delete_many"))
    store.put("a", b"1")
    store.delete_many(["a"])
    assert recorder.counts["delete_many"] == 2
    assert list(store.list()) == []


def test_a_list_that_breaks_goes_on_without_repeating_itself(build):
    class Breaking:
        """Breaks off after every two objects, until it has been asked four times."""

        def __init__(self, inner):
            self.inner = inner
            self.times = 0

        def list(self, prefix=""):
            self.times += 1
            for number, info in enumerate(self.inner.list(prefix)):
                if number == 2 * self.times and self.times < 4:
                    raise StoreError("broke off", retryable=True)
                yield info

    store, _ = build()
    for number in range(7):
        store.put(f"k{number}", b"")
    breaking = Breaking(store)
    listing = RetryingStore(breaking, sleep=lambda s: None)
    assert [info.key for info in listing.list()] == [f"k{n}" for n in range(7)]
    assert breaking.times == 4


def test_a_retrying_store_pickles_with_its_policy():
    store = open_store("memory://x", retry=RetryPolicy(max_attempts=2), limiter=AdaptiveLimiter(5))
    copy = pickle.loads(pickle.dumps(store))
    assert copy._policy == RetryPolicy(max_attempts=2)
    assert copy.limiter.limit == 5


# The limiter


def test_a_throttle_halves_the_limit_once_per_window(fake_time):
    limiter = AdaptiveLimiter(64, window_s=1, clock=fake_time.clock, sleep=fake_time.sleep)
    limiter.note_throttle()
    limiter.note_throttle()
    assert limiter.limit == 32
    fake_time.now += 1
    limiter.note_throttle()
    assert limiter.limit == 16


def test_the_limit_has_a_floor(fake_time):
    limiter = AdaptiveLimiter(64, min_limit=3, clock=fake_time.clock)
    for _ in range(20):
        limiter.note_throttle()
        fake_time.now += 2
    assert limiter.limit == 3


def test_successes_raise_the_limit_by_one_per_round():
    limiter = AdaptiveLimiter(64)
    limiter.note_throttle()
    for _ in range(33):
        limiter.note_success()
    assert limiter.limit == 33
    for _ in range(10_000):
        limiter.note_success()
    assert limiter.limit == 64


def test_a_pause_holds_everybody_back(fake_time):
    limiter = AdaptiveLimiter(4, clock=fake_time.clock, sleep=fake_time.sleep)
    limiter.note_throttle(retry_after_s=5)
    limiter.note_throttle(retry_after_s=3)
    with limiter.slot():
        assert fake_time.now == 105
    assert fake_time.slept == [5]


def test_no_more_requests_are_in_flight_than_the_limit():
    limiter = AdaptiveLimiter(3)
    peak, inside, lock = 0, 0, threading.Lock()

    def work():
        nonlocal peak, inside
        for _ in range(50):
            with limiter.slot():
                with lock:
                    inside += 1
                    peak = max(peak, inside)
                with lock:
                    inside -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert peak <= 3
    assert limiter.num_active == 0


def test_a_place_is_given_back_after_an_error():
    limiter = AdaptiveLimiter(1)
    with pytest.raises(KeyError), limiter.slot():
        raise KeyError
    with limiter.slot():
        pass


@pytest.mark.parametrize("wrong", [(0, 1), (3, 4), (3, 0)])
def test_a_limiter_checks_itself(wrong):
    with pytest.raises(ValueError, match="min_limit"):
        AdaptiveLimiter(wrong[0], min_limit=wrong[1])


def test_a_storm_slows_all_stores_that_share_a_limiter(build, fake_time):
    store, _ = build(StoreFault("throttle", times=3))
    store.put("a", b"1")
    assert store.limiter.limit < 128
