"""Records beyond 4 GiB, for real: sparse files, but every size and offset is above 32 bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from torch.distributed.checkpoint.utils import _ReaderView

from dcpstore.format.record import plan_record
from dcpstore.read.targets import HEAD_BYTES, find_tensor

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(600)]

ROWS, COLUMNS = 4, (1 << 28) + 3  # of float32: 4 GiB and 48 bytes
BEFORE = 1000


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory):
    """An object with a record at byte `BEFORE`, marked at its first and last element."""
    path = tmp_path_factory.mktemp("large") / "object"
    layout = plan_record(torch.float32, (ROWS, COLUMNS), object_offset=BEFORE)
    assert layout.payload_bytes > 2**32
    with path.open("wb") as file:
        file.seek(BEFORE)
        file.write(layout.header)
        file.write(torch.tensor([1.5]).numpy().tobytes())
        file.seek(BEFORE + layout.payload_offset + layout.payload_bytes - 4)
        file.write(torch.tensor([2.5]).numpy().tobytes())
        file.write(layout.trailer)
    yield path, layout
    path.unlink()


def assert_is_marked(tensor: torch.Tensor) -> None:
    assert tensor.shape == (ROWS, COLUMNS)
    assert tensor.dtype == torch.float32
    assert tensor[0, 0].item() == 1.5
    assert tensor[-1, -1].item() == 2.5
    assert not tensor[1].count_nonzero()


def test_torch_load_reads_it_out_of_an_object(large) -> None:
    path, layout = large
    with path.open("rb") as file:
        view = _ReaderView(file, BEFORE, layout.record_bytes)
        loaded = torch.load(view, map_location="cpu", weights_only=True)
    assert_is_marked(loaded)


def test_torch_load_maps_it_alone_in_a_file(large, tmp_path: Path) -> None:
    layout = plan_record(torch.float32, (ROWS, COLUMNS))
    path = tmp_path / "record.pt"
    with path.open("wb") as file:
        file.write(layout.header + torch.tensor([1.5]).numpy().tobytes())
        file.seek(layout.payload_offset + layout.payload_bytes - 4)
        file.write(torch.tensor([2.5]).numpy().tobytes() + layout.trailer)
    assert_is_marked(torch.load(path, mmap=True, weights_only=True))
    path.unlink()


def reader(file: BinaryIO, at: int) -> Callable[[int, int], memoryview]:
    def read_at(start: int, end: int) -> memoryview:
        assert (start, end) == (0, HEAD_BYTES)
        file.seek(at + start)
        return memoryview(file.read(end - start))

    return read_at


def test_its_head_is_read_like_any_other(large) -> None:
    path, layout = large
    with path.open("rb") as file:
        stored = find_tensor(reader(file, BEFORE), layout.record_bytes)
    assert stored is not None
    assert stored.place.is_dense
    assert stored.storage.num_bytes == layout.payload_bytes


def test_the_head_of_a_stock_record_of_that_size_is_read(tmp_path: Path) -> None:
    path = tmp_path / "stock.pt"
    with path.open("wb") as file:
        torch.save(torch.zeros(2**32 + 8, dtype=torch.uint8), file)
    with path.open("rb") as file:
        stored = find_tensor(reader(file, 0), path.stat().st_size)
        assert stored is not None
        assert stored.place.is_dense
        assert stored.storage.num_bytes == 2**32 + 8
    path.unlink()
