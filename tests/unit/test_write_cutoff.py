"""When a save is given up: by a clock of the test's, and in the middle of an upload."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from dcpstore import AbandonedError, ConfigError, WriteConfig
from dcpstore.store.base import Capabilities, ObjectInfo
from dcpstore.write.cutoff import Cutoff
from dcpstore.write.upload import Uploads

MIB = 1 << 20
PART = 5 * MIB


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_time_is_over_a_little_before_the_deadline_and_the_error_names_it() -> None:
    clock = Clock()
    cutoff = Cutoff(20.0, clock)
    clock.now_s += 17.9
    cutoff.check()
    assert cutoff.left_s() == pytest.approx(2.1)
    clock.now_s += 0.2
    assert cutoff.is_over
    with pytest.raises(AbandonedError, match=r"total_deadline_s=20 .* Nothing was sealed"):
        cutoff.check()
    clock.now_s += 10
    assert cutoff.left_s() == 0


def test_what_is_left_for_the_seal_is_at_most_three_seconds() -> None:
    clock = Clock()
    cutoff = Cutoff(1000.0, clock)
    clock.now_s += 996.9
    assert not cutoff.is_late
    clock.now_s += 0.2
    assert cutoff.is_late


def test_a_step_is_over_when_the_save_must_be() -> None:
    """A step leaves its last fifth, or 10 s, to tell all ranks what became of it."""
    clock = Clock()
    cutoff = Cutoff(20.0, clock)
    assert cutoff.step_deadline_s(1800.0) == pytest.approx(25.0)
    assert cutoff.step_deadline_s(7.0) == 7.0
    assert Cutoff(200.0, clock).step_deadline_s(1800.0) == pytest.approx(210.0)
    clock.now_s += 50
    assert 0 < cutoff.step_deadline_s(1800.0) < 1
    assert Cutoff().step_deadline_s(1800.0) == 1800.0


def test_a_cancel_counts_until_the_window_closes() -> None:
    cutoff = Cutoff()
    cutoff.close()
    assert not cutoff.cancel()
    cutoff.check()
    cutoff = Cutoff()
    assert cutoff.cancel()
    assert cutoff.is_over
    with pytest.raises(AbandonedError, match="cancelled"):
        cutoff.close()
    assert not cutoff.cancel()
    cutoff = Cutoff()
    cutoff.end()
    assert not cutoff.cancel()


def test_the_window_does_not_close_once_time_is_over() -> None:
    clock = Clock()
    cutoff = Cutoff(5.0, clock)
    clock.now_s += 6
    with pytest.raises(AbandonedError, match="total_deadline_s=5"):
        cutoff.close()


def test_no_time_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be positive, not 0"):
        Cutoff(0)


class CancellingSink:
    """Cancels the save when it has taken a number of parts."""

    capabilities = Capabilities(atomic_create=True, compare_and_swap=True, acknowledges_puts=True)

    def __init__(self, cutoff: Cutoff, num_parts: int) -> None:
        self._cutoff = cutoff
        self._num_parts = num_parts
        self.num_taken = 0

    def head(self, key: str) -> ObjectInfo:
        raise AssertionError("puts are acknowledged")

    def put(self, key: str, data: Any) -> str:
        raise AssertionError("there are several parts")

    def put_parts(
        self, key: str, parts: Iterable[Any], *, part_bytes: int, max_concurrency: int
    ) -> str:
        for _ in parts:
            self.num_taken += 1
            if self.num_taken == self._num_parts:
                assert self._cutoff.cancel()
        return "etag"


def test_no_part_is_begun_once_the_save_is_cancelled() -> None:
    cutoff = Cutoff()
    sink = CancellingSink(cutoff, 3)
    config = WriteConfig(part_bytes=PART, budget_bytes=4 * PART, max_uploads=2)
    before = threading.active_count()
    with (
        pytest.raises(AbandonedError, match="cancelled"),
        Uploads(sink, config, pin=False, cutoff=cutoff) as uploads,
    ):
        stream = uploads.open("a")
        for _ in range(10):
            stream.write_tensor(torch.zeros(PART, dtype=torch.uint8))
        stream.finish()
    assert sink.num_taken == 3
    assert threading.active_count() == before


def test_a_cancel_after_the_last_part_does_not_spoil_the_upload() -> None:
    cutoff = Cutoff()
    sink = CancellingSink(cutoff, 2)
    config = WriteConfig(part_bytes=PART, budget_bytes=4 * PART, max_uploads=2)
    with Uploads(sink, config, pin=False, cutoff=cutoff) as uploads:
        stream = uploads.open("a")
        stream.write_tensor(torch.zeros(2 * PART, dtype=torch.uint8))
        stream.finish()
    assert uploads.objects["a"].size_bytes == 2 * PART
