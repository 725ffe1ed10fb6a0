"""Faults that pass are survived, faults that stay end in an error before the deadline."""

from __future__ import annotations

import logging
import random
import threading
import time
from typing import Any

import pytest
import torch

from dcpstore.config import ReadConfig, WriteConfig
from dcpstore.errors import CorruptError, StoreError
from dcpstore.store.retry import AdaptiveLimiter, RetryingStore, RetryPolicy
from dcpstore.testing import Fault, StoreFault
from faults.places import APART, Backend, Place
from faults.states import dies, failing, load, loaded_step, save, state_at


class VirtualTime:
    """A clock that sleeping moves forward, for any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now_s = 0.0
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self._now_s += seconds
            self.sleeps.append(seconds)
        time.sleep(0.0005)


class Storm:
    """A store that answers 503 to everything until a time, and counts what came meanwhile."""

    def __init__(self, inner: Any, clock: VirtualTime, until_s: float, after_s: float | None):
        self._inner = inner
        self._clock = clock
        self._until_s = until_s
        self._after_s = after_s
        self.num_refused = 0

    @property
    def url(self) -> str:
        return str(self._inner.url)

    @property
    def capabilities(self) -> Any:
        return self._inner.capabilities

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if self._clock() < self._until_s:
                self.num_refused += 1
                raise StoreError(
                    "503 SlowDown", retryable=True, throttled=True, retry_after_s=self._after_s
                )
            return getattr(self._inner, name)(*args, **options)

        return call


# Storms of 503 ------------------------------------------------------------------------------


@pytest.mark.parametrize("retry_after_s", [None, 5.0])
def test_half_a_minute_of_503_is_survived_by_a_save_and_by_a_load(retry_after_s) -> None:
    backend, clock = Backend(), VirtualTime()
    policy = RetryPolicy(
        max_attempts=WriteConfig().max_attempts, total_deadline_s=WriteConfig().retry_deadline_s
    )

    def stormy() -> tuple[Any, Storm]:
        storm = Storm(backend.shared, clock, clock() + 30, retry_after_s)
        limiter = AdaptiveLimiter(clock=clock, sleep=clock.sleep)
        store = RetryingStore(
            storm,  # type: ignore[arg-type]
            policy,
            limiter,
            clock=clock,
            sleep=clock.sleep,
            rng=random.Random(1),
        )
        return store, storm

    store, storm = stormy()
    save(state_at(1), backend.writer_on(store))
    assert 2 <= storm.num_refused < 30
    if retry_after_s is not None:
        assert all(sleep >= 0 for sleep in clock.sleeps)
        assert storm.num_refused <= 30 / retry_after_s + 4
    store, storm = stormy()
    reader = backend.reader()
    reader._folder._opener = lambda *_args, **_options: store
    assert loaded_step(reader, state_at(0)) == 1
    assert storm.num_refused >= 2


def test_a_few_503_with_retry_after_are_survived(any_place: Place) -> None:
    any_place.attempts = 10
    for operation in ("GetObject", "PutObject", "UploadPart", "CompleteMultipartUpload"):
        any_place.server.add_fault(Fault(operation, status=503, retry_after_s=0.05))
    save(state_at(1, is_multipart=True), any_place.writer())
    any_place.server.heal()
    any_place.server.add_fault(Fault("GetObject", status=503, retry_after_s=0.05, times=3))
    assert loaded_step(any_place.reader(), state_at(0, is_multipart=True)) == 1
    counts = any_place.server.counts()
    assert (counts["CreateBucket"], counts["ListObjects"]) == (0, 0)


def test_retry_after_is_honoured_where_the_engine_shows_it(make_place: Any) -> None:
    place = make_place("fsspec", attempts=5)
    save(state_at(1), place.writer())
    place.server.clear_requests()
    place.server.add_fault(Fault("GetObject", status=503, retry_after_s=0.5, times=2))
    assert loaded_step(place.reader(), state_at(0)) == 1
    first, second, third = place.server.requests()[:3]
    assert [first.status, second.status, third.status] == [503, 503, 200]
    # Without it, the first delay would be 0.2 s at most, and the second 0.4 s.
    assert second.start_s - first.end_s >= 0.45
    assert third.start_s - second.end_s >= 0.45


# Connections ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["drop", "error", "lost_ack"])
def test_broken_connections_and_server_errors_are_survived(any_place: Place, kind: str) -> None:
    any_place.attempts = 6
    for operation in ("GetObject", "PutObject", "UploadPart"):
        any_place.server.add_fault(Fault(operation, kind=kind, status=500, skip=1))
    save(state_at(1, is_multipart=True), any_place.writer())
    any_place.server.add_fault(Fault("GetObject", kind=kind, status=500, skip=1, times=2))
    assert loaded_step(any_place.reader(), state_at(0, is_multipart=True)) == 1
    assert any_place.open_uploads() == []


def test_a_lost_answer_to_the_end_of_a_multipart_upload_leaves_nothing_or_all(
    any_place: Place,
) -> None:
    any_place.attempts = 3
    fault = Fault("CompleteMultipartUpload", kind="lost_ack", status=500)
    any_place.server.add_fault(fault)
    if dies(save, state_at(1, is_multipart=True), any_place.writer()):
        assert any_place.names() == []
    else:
        assert loaded_step(any_place.reader(), state_at(0, is_multipart=True)) == 1
    assert any_place.open_uploads() == []


# Bodies --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("which", "kind"),
    [
        (".metadata", "drop"),
        *((".dcpstore-", kind) for kind in ("short", "long", "drop")),
        *((".distcp", kind) for kind in ("short", "long", "drop")),
    ],
)
def test_a_body_of_the_wrong_length_is_fetched_again(
    any_place: Place, which: str, kind: str
) -> None:
    any_place.attempts = 3
    save(state_at(1), any_place.writer(**APART))
    (key, *_) = [name for name in any_place.names() if which in name]
    any_place.server.add_fault(Fault("GetObject", kind=kind, key=f"{any_place.name}/{key}"))
    assert loaded_step(any_place.reader(), state_at(0)) == 1


@pytest.mark.parametrize("kind", ["short", "long"])
def test_metadata_whose_wrong_length_nothing_gives_away_is_refused(place: Place, kind: str) -> None:
    save(state_at(1), place.writer())
    place.server.add_fault(Fault("GetObject", kind=kind, key=f"{place.name}/.metadata", times=2))
    error = failing(AssertionError, load, state_at(0), place.reader())  # DCP's, quoting ours
    assert "has lost the footer" in str(error)
    assert ".metadata" in str(error)


@pytest.mark.parametrize("which", [".metadata", ".dcpstore-", ".distcp"])
def test_a_body_damaged_once_is_fetched_again_with_a_warning(
    any_place: Place, which: str, caplog: Any
) -> None:
    save(state_at(1), any_place.writer(**APART))
    (key, *_) = [name for name in any_place.names() if which in name]
    any_place.server.add_fault(Fault("GetObject", kind="flip", key=f"{any_place.name}/{key}"))
    with caplog.at_level(logging.WARNING, "dcpstore"):
        assert loaded_step(any_place.reader(), state_at(0)) == 1
    assert key in caplog.text
    assert "again" in caplog.text


def test_a_body_damaged_twice_is_corrupt_and_named(any_place: Place) -> None:
    save(state_at(1), any_place.writer())
    key = any_place.data_keys()[0]
    fault = Fault("GetObject", kind="flip", key=f"{any_place.name}/{key}", times=2)
    any_place.server.add_fault(fault)
    found = state_at(0)
    error = failing(CorruptError, load, found, any_place.reader(max_requests=1))
    assert error.key == key
    assert any_place.url in error.message
    assert loaded_step(any_place.reader(), state_at(0)) == 1


def test_what_a_failed_load_has_touched_is_said() -> None:
    backend = Backend()
    tensor = torch.randn(4, 3000)
    save({"a": tensor, "b": tensor + 1}, backend.writer())
    script = [StoreFault("flip", verb="get_range", at=1, times=None)]
    found = {"a": torch.zeros(4, 3000), "b": torch.zeros(4, 3000)}
    reader = backend.reader(script, max_requests=1, join_gap_bytes=0, request_bytes=64_000)
    error = failing(CorruptError, load, found, reader)
    assert "targets already hold loaded values" in error.message

    script = [StoreFault("flip", verb="get_range", times=None)]
    found = {"a": torch.zeros(4, 3000), "b": torch.zeros(4, 3000)}
    error = failing(CorruptError, load, found, backend.reader(script, max_requests=1))
    assert "targets already" not in error.message
    assert all(torch.equal(one, torch.zeros(4, 3000)) for one in found.values())


# Faults that stay ------------------------------------------------------------------------------


def test_a_storm_that_does_not_end_is_given_up_at_the_deadline(any_place: Place) -> None:
    any_place.attempts = 1000
    save(state_at(1), any_place.writer())
    any_place.server.add_fault(Fault("*", status=503, times=-1))
    for call, storage in (
        (save, any_place.writer(overwrite=True, retry_deadline_s=2.0)),
        (load, any_place.reader(retry_deadline_s=2.0)),
    ):
        began = time.monotonic()
        error = failing(Exception, call, state_at(0), storage)
        took_s = time.monotonic() - began
        assert took_s < 60  # the attempts would last for hours
        assert "gave up after" in str(error)
        assert "503" in str(error)


def test_attempts_are_bounded(any_place: Place) -> None:
    any_place.attempts = 3
    any_place.server.add_fault(Fault("GetObject", status=500, times=-1))
    error = failing(StoreError, save, state_at(1), any_place.writer())
    assert "gave up after 3 attempts" in error.message
    assert any_place.server.counts() == {"GetObject": 3}


def test_the_default_deadline_outlives_half_a_minute() -> None:
    assert WriteConfig().retry_deadline_s == ReadConfig().retry_deadline_s >= 60
    assert WriteConfig().max_attempts == ReadConfig().max_attempts >= 8
