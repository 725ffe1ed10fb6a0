"""The pool of places, slabs and scratch: what is bounded, and when it comes back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dcpstore.store.budget import Cancelled
from dcpstore.write.upload import Slab, SlabPool

KIB = 1 << 10


def make(num_bytes: int) -> Slab:
    tensor = torch.zeros(num_bytes, dtype=torch.uint8)
    return Slab(tensor.numpy(), tensor)


def pool_of(num_places: int, num_slabs: int, slab_bytes: int = 64 * KIB) -> SlabPool:
    return SlabPool(num_places, num_slabs, slab_bytes, make, cancelled=lambda: True)


def full(pool: SlabPool) -> bool:
    try:
        pool.acquire_place()
    except Cancelled:
        return True
    return False


def test_place_and_slab_return_when_the_last_view_dies() -> None:
    pool = pool_of(1, 1)
    pool.acquire_place()
    slab = pool.acquire_slab()
    (lease,) = pool.lease([slab.array], slab)  # all of it
    view = memoryview(lease)[2:4]
    del lease
    assert full(pool), "the view keeps it"
    del view
    pool.acquire_place()
    assert pool.acquire_slab() is slab
    assert pool.peak_bytes == 64 * KIB


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_part_in_pieces_keeps_what_it_took_until_the_last_one_dies(order) -> None:
    pool, elsewhere = pool_of(1, 3), np.zeros(4, np.uint8)
    pool.acquire_place()
    slab, scratch = pool.acquire_slab(), pool.acquire_scratch()
    pieces = [scratch.array[:2], elsewhere, slab.array[2:]]
    leases = dict(enumerate(pool.lease(pieces, slab, scratch)))
    assert np.shares_memory(leases[1], elsewhere)
    for number in order:
        assert full(pool)
        del leases[number]
    pool.acquire_place()
    assert pool.acquire_slab() is slab
    assert pool.acquire_scratch() is scratch


def test_a_pool_has_no_more_places_and_slabs_than_told_and_makes_slabs_only_when_asked() -> None:
    pool = pool_of(3, 1)
    for _ in range(3):
        pool.acquire_place()
    assert full(pool)
    assert pool.peak_bytes == 0
    pool.acquire_slab()
    assert pool.peak_bytes == 64 * KIB
    with pytest.raises(Cancelled):
        pool.acquire_slab()


def test_scratch_for_every_place_is_cut_from_one_of_the_slabs() -> None:
    pool = pool_of(8, 3)
    pieces = [pool.acquire_scratch() for _ in range(8)]
    assert [len(one.array) for one in pieces] == [8 * KIB] * 8
    for number, one in enumerate(pieces):
        one.tensor.fill_(number)
    assert [int(one.array.max()) for one in pieces] == list(range(8)), "pieces overlap"
    assert pool.peak_bytes == 64 * KIB
    for _ in range(2):
        pool.acquire_slab()
    with pytest.raises(Cancelled):
        pool.acquire_slab()
    assert pool.peak_bytes == 3 * 64 * KIB


@pytest.mark.parametrize(("num_places", "num_slabs"), [(2, 2), (17, 3)])
def test_there_is_no_scratch_where_little_memory_would_be_cut(num_places, num_slabs) -> None:
    pool = pool_of(num_places, num_slabs)
    assert pool.acquire_scratch() is None
    assert pool.peak_bytes == 0
