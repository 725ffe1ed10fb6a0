from __future__ import annotations

import threading

import numpy as np
import pytest

from dcpstore.budget import ByteBudget, Cancelled, FlightWindow, SlabPool

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


def full(pool: SlabPool[np.ndarray]) -> bool:
    try:
        pool.acquire_place(cancelled=lambda: True)
    except Cancelled:
        return True
    return False


def test_nothing_is_acquired_that_does_not_fit() -> None:
    budget = ByteBudget(10)
    assert budget.try_acquire(8)
    assert not budget.try_acquire(3)
    assert budget.try_acquire(2)
    budget.release(10)
    assert budget.try_acquire(10)


def test_place_and_slab_return_when_the_last_view_dies() -> None:
    made: list[np.ndarray] = []

    def make() -> np.ndarray:
        made.append(np.zeros(8, np.uint8))
        return made[-1]

    pool = SlabPool(1, make)
    pool.acquire_place()
    slab = pool.take_slab()
    (lease,) = pool.lease([slab], slab)  # all of it
    view = memoryview(lease)[2:4]
    del lease
    assert full(pool), "the view keeps it"
    del view
    pool.acquire_place()
    assert pool.take_slab() is slab
    assert len(made) == 1


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_part_in_pieces_keeps_its_place_until_the_last_one_dies(order) -> None:
    pool = SlabPool(1, lambda: np.zeros(8, np.uint8))
    elsewhere = np.zeros(4, np.uint8)
    pool.acquire_place()
    slab = pool.take_slab()
    leases = dict(enumerate(pool.lease([slab[:2], elsewhere, slab[2:]], slab)))
    assert np.shares_memory(leases[1], elsewhere)
    for number in order:
        assert full(pool)
        del leases[number]
    pool.acquire_place()
    assert pool.take_slab() is slab


def test_a_pool_has_no_more_places_than_told_and_makes_slabs_only_when_asked() -> None:
    pool = SlabPool(2, lambda: np.zeros(1, np.uint8))
    pool.acquire_place()
    pool.acquire_place()
    assert full(pool)
    assert pool.num_made == 0
    pool.take_slab()
    assert pool.num_made == 1
