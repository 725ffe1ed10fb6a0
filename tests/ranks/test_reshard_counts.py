"""How many bytes and requests a change of layout takes, all ranks together, and no clock."""

from __future__ import annotations

import pytest
import torch
from parts import Shelf, by_columns, by_rows

FULL = torch.arange(512 * 1024, dtype=torch.int32).view(torch.float32).view(512, 1024)
NUM_TENSORS = 2
NEEDED_BYTES = NUM_TENSORS * FULL.nbytes


@pytest.mark.parametrize(("saved", "loaded"), [(4, 2), (2, 4)])
@pytest.mark.parametrize("cut", [by_rows, by_columns])
def test_another_number_of_ranks_fetches_each_byte_once(cut, saved, loaded):
    def make(rank: int, size: int) -> dict[str, torch.Tensor]:
        return {f"layer{n}": cut(FULL, rank, size) for n in range(NUM_TENSORS)}

    shelf = Shelf()
    shelf.save(saved, make)
    shelf.load(loaded, make).values()
    assert shelf.fetched_bytes == NEEDED_BYTES
    assert len(shelf.requests(verb="get_range")) <= 4 * NUM_TENSORS
    assert not shelf.requests(verb="list") + shelf.requests(verb="head")
    # The coordinator's alone: the metadata, with the manifest in them.
    assert [len(shelf.requests(rank, "get")) for rank in range(loaded)] == [1] + [0] * (loaded - 1)
