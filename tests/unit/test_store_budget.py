from __future__ import annotations

import threading

import pytest

from dcpstore.store.budget import ByteBudget, Cancelled, FlightWindow

MIB = 1 << 20


def test_a_budget_blocks_until_bytes_come_back() -> None:
    budget = ByteBudget(100)
    budget.acquire(80)
    got = threading.Event()

    def take() -> None:
        budget.acquire(30)
        got.set()

    thread = threading.Thread(target=take)
    thread.start()
    assert not got.wait(0.1)
    budget.release(80)
    thread.join(5)
    assert got.is_set()
    assert budget.peak_bytes == 80


def test_more_than_the_whole_budget_passes_alone() -> None:
    budget = ByteBudget(10)
    budget.acquire(50)
    assert budget.peak_bytes == 50


def test_a_cancelled_wait_ends() -> None:
    budget = ByteBudget(10)
    budget.acquire(10)
    with pytest.raises(Cancelled):
        budget.acquire(1, cancelled=lambda: True)


class Clock:
    """Time that passes when told."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_few_bytes_are_in_flight_until_it_is_known_how_far_the_store_is() -> None:
    clock = Clock()
    window = FlightWindow(MIB, clock)
    assert window.size == 8 * MIB
    clock.now += 0.01
    assert window.size == 8 * MIB
    clock.now += 0.02  # a near store would have answered
    assert window.size > 1e15


@pytest.mark.parametrize(("answer_s", "expected"), [(0.001, 8 * MIB), (0.004, 16e6), (0.05, 2e8)])
def test_as_much_is_in_flight_as_fills_a_link_of_the_quickest_answers_delay(
    answer_s: float, expected: float
) -> None:
    window = FlightWindow(MIB, Clock())
    window.note(MIB, 3 * answer_s)
    window.note(MIB, answer_s)
    window.note(MIB, 2 * answer_s)
    window.note(MIB // 4, answer_s / 100)  # small answers are quick everywhere
    assert window.size == expected


def test_a_budget_waits_for_its_window() -> None:
    clock = Clock()
    budget = ByteBudget(100 * MIB, FlightWindow(MIB, clock))
    budget.acquire(8 * MIB)
    with pytest.raises(Cancelled):
        budget.acquire(1, cancelled=lambda: True)
    assert budget.try_acquire(MIB), "what does not wait is bound by the budget alone"
    clock.now += 1
    budget.acquire(91 * MIB)
    with pytest.raises(Cancelled):
        budget.acquire(1, cancelled=lambda: True)


def test_nothing_is_acquired_that_does_not_fit() -> None:
    budget = ByteBudget(10)
    assert budget.try_acquire(8)
    assert not budget.try_acquire(3)
    assert budget.try_acquire(2)
    budget.release(10)
    assert budget.try_acquire(10)
