from __future__ import annotations

import threading

import numpy as np
import pytest

from dcpstore.budget import ByteBudget, Cancelled, SlabPool


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


def test_a_slab_returns_when_its_last_view_dies() -> None:
    made: list[np.ndarray] = []

    def make() -> np.ndarray:
        made.append(np.zeros(8, np.uint8))
        return made[-1]

    pool = SlabPool(1, make)
    slab = pool.acquire()
    lease = pool.lease(slab, slab)  # all of it
    view = memoryview(lease)[2:4]
    del lease
    with pytest.raises(Cancelled):
        pool.acquire(cancelled=lambda: True)  # the view keeps it
    del view
    assert pool.acquire() is slab
    assert len(made) == 1


def test_a_pool_makes_no_more_slabs_than_told() -> None:
    pool = SlabPool(2, lambda: np.zeros(1, np.uint8))
    pool.acquire()
    pool.acquire()
    with pytest.raises(Cancelled):
        pool.acquire(cancelled=lambda: True)


def test_a_part_without_a_slab_takes_a_place_and_makes_no_memory() -> None:
    pool = SlabPool(2, lambda: np.zeros(1, np.uint8))
    elsewhere = np.zeros(4, np.uint8)
    pool.acquire_place()
    pool.acquire_place()
    for wait in (pool.acquire_place, pool.acquire):
        with pytest.raises(Cancelled):
            wait(cancelled=lambda: True)
    lease = pool.lease(elsewhere)
    assert np.shares_memory(lease, elsewhere)
    del lease
    assert pool.num_made == 0
    pool.acquire()
    assert pool.num_made == 1
