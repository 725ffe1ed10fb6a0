"""Second requests for late ranges: when they are sent, which answer counts, how many there are."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import dcpstore
from dcpstore import ObjectStoreReader, ObjectStoreWriter, ReadConfig, StoreError
from dcpstore.store import open_store
from dcpstore.store.budget import ByteBudget
from dcpstore.store.hedge import RangeHedge

DELAY_S = 0.01  # any time will do: slow answers wait for the test, not for a clock


class SlowStore:
    """Answers with the range's own bytes; the first request of a slow range waits.

    Args:
        slow: Starts of slow ranges.
        failing: Numbers of the requests of a range that fail, by its start.
    """

    def __init__(
        self, slow: tuple[int, ...] = (), failing: dict[int, tuple[int, ...]] | None = None
    ) -> None:
        self._slow = slow
        self._failing = failing or {}
        self._lock = threading.Lock()
        self.asked: Counter[int] = Counter()
        self.go_on = threading.Event()

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        with self._lock:
            number = self.asked[start]
            self.asked[start] += 1
        if number == 0 and start in self._slow:
            assert self.go_on.wait(30), "nobody let the slow answer go on"
        if number in self._failing.get(start, ()):
            raise StoreError(f"request {number} failed", key=key)
        return memoryview(bytes([start % 256]) * (end - start))


@contextmanager
def hedge(store: SlowStore, *, warm: int = 100, **options: Any) -> Iterator[RangeHedge]:
    """Open a hedge that has seen some answers."""
    settings: dict[str, Any] = {"max_requests": 8, "max_share": 0.05, "least_delay_s": DELAY_S}
    one = RangeHedge(store, **{**settings, **options})
    for _ in range(warm):
        one.get_range("k", 0, 1)
    store.asked.clear()
    try:
        yield one
    finally:
        store.go_on.set()
        one.close()


def test_a_late_range_is_asked_for_again_and_the_first_answer_counts() -> None:
    store = SlowStore(slow=(7,))
    with hedge(store) as one:
        assert bytes(one.get_range("k", 7, 10)) == b"\7\7\7"
        assert store.asked[7] == 2
        assert (one.num_again, one.again_bytes) == (1, 3)
        assert bytes(one.get_range("k", 8, 10)) == b"\x08\x08"
        assert store.asked[8] == 1


@pytest.mark.parametrize("options", [{"warm": 3}, {"max_share": 0.0}], ids=str)
def test_nobody_asks_twice_before_it_is_known_how_long_answers_take_or_for_a_share_of_zero(
    options: dict[str, Any],
) -> None:
    store = SlowStore(slow=(7,))
    with hedge(store, **options) as one:
        threading.Timer(10 * DELAY_S, store.go_on.set).start()
        one.get_range("k", 7, 10)
        assert store.asked[7] == 1


@pytest.mark.parametrize("failing", [(1,), (0,)], ids=["the second", "the first, later"])
def test_one_of_two_answers_is_enough(failing: tuple[int, ...]) -> None:
    store = SlowStore(slow=(7,), failing={7: failing})
    with hedge(store) as one:
        if failing == (1,):
            threading.Timer(20 * DELAY_S, store.go_on.set).start()
        assert bytes(one.get_range("k", 7, 8)) == b"\7"
        assert store.asked[7] == 2


def test_if_both_fail_the_range_fails() -> None:
    store = SlowStore(slow=(7,), failing={7: (0, 1)})
    with hedge(store) as one:
        threading.Timer(20 * DELAY_S, store.go_on.set).start()
        with pytest.raises(StoreError, match="request 0 failed"):
            one.get_range("k", 7, 8)


def test_second_requests_are_a_bounded_share_of_all() -> None:
    slow = tuple(range(1, 31))
    store = SlowStore(slow=slow)
    with hedge(store, warm=40, max_share=0.05, max_requests=40) as one:
        threads = [threading.Thread(target=one.get_range, args=("k", s, s + 1)) for s in slow]
        for thread in threads:
            thread.start()
        threading.Timer(20 * DELAY_S, store.go_on.set).start()
        for thread in threads:
            thread.join(30)
        assert 1 <= one.num_again <= 0.05 * (40 + len(slow))


def test_second_answers_have_their_place_in_the_budget_until_both_have_ended() -> None:
    store, budget = SlowStore(slow=(7, 8)), ByteBudget(5)
    with hedge(store, budget=budget, max_share=1.0) as one:
        budget.acquire(3)  # the first answer's, by whoever asks
        assert bytes(one.get_range("k", 7, 9)) == b"\7\7"
        assert not budget.try_acquire(1), "the slow answer may still come"
        threading.Timer(20 * DELAY_S, store.go_on.set).start()
        one.get_range("k", 8, 9)
        assert store.asked == {7: 2, 8: 1}, "asked again where the budget has no room"
    budget.acquire(2)  # waits until the slow answer of the first range has ended
    assert budget.peak_bytes == 5


def test_closing_does_not_wait_for_an_answer_that_nobody_needs() -> None:
    store = SlowStore(slow=(7,))
    with hedge(store) as one:
        one.get_range("k", 7, 8)
        one.close()
        assert not store.go_on.is_set(), "close waited for the slow answer"


class Distant:
    """A store that says that it is far away, and is slow once: in its last range."""

    url = "s3://bucket/far"

    def __init__(self, inner: Any, patience_s: float) -> None:
        self._inner = inner
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._again = threading.Event()
        self._slow: tuple[str, int] | None = None
        self.asked: Counter[tuple[str, int]] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        with self._lock:
            self.asked[key, start] += 1
            is_again = self.asked[key, start] > 1
            is_slow = len(self.asked) == 40 and not is_again
            if is_slow:
                self._slow = key, start
            if is_again and self._slow == (key, start):
                self._again.set()
        if is_slow:
            self._again.wait(self._patience_s)
        return self._inner.get_range(key, start, end)


@pytest.mark.parametrize("share", [0.2, 0.0])
def test_a_load_hedges_as_told_and_says_so(share: float) -> None:
    shared = open_store("memory://far", engine="obstore")
    state = {f"w{number:02}": torch.full((3000,), float(number)) for number in range(40)}
    writer = ObjectStoreWriter("memory://far", store_opener=lambda *_, **__: shared)
    dcpstore.save(state, storage_writer=writer)
    store = Distant(shared, 30 if share else 0.8)
    config = ReadConfig(request_bytes=12_000, join_gap_bytes=0, hedge_share=share, max_requests=4)
    reader = ObjectStoreReader("memory://far", config=config, store_opener=lambda *_, **__: store)
    target = {key: torch.zeros(3000) for key in state}
    result = dcpstore.load(target, storage_reader=reader)
    assert all(torch.equal(target[key], state[key]) for key in state)
    assert reader.last_read is not None
    num_hedged = sum(times - 1 for times in store.asked.values())
    # More than the slow one may be, where the machine itself paused for long.
    assert 1 <= num_hedged <= 8 if share else num_hedged == 0
    assert reader.last_read.num_hedged == num_hedged
    assert reader.last_read.num_requests == sum(store.asked.values()) == 40 + num_hedged
    assert result.job.fetched_bytes == 12_000 * (40 + num_hedged)
