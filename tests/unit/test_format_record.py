from __future__ import annotations

import io
import math
import zipfile

import pytest
import torch

from dcpstore.format import dtypes
from dcpstore.format.record import plan_record
from dcpstore.format.zip import ALIGNMENT_BYTES

SHAPES = [(), (0,), (1,), (3,), (2, 3, 5), (0, 7), (1, 300, 2), (1, 1, 1, 2, 1)]
NAMES = [n for n, row in dtypes.DTYPES.items() if row.is_plain and hasattr(torch, n)]

# torch warns once per process that complex32 is young.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def filled(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A contiguous tensor of any dtype whose bytes are all different where they may be."""
    dtype = dtypes.dtype_from_name(name)
    numel = math.prod(shape)
    count = numel * dtypes.item_bytes(dtype)
    raw = (torch.arange(count) % (2 if name == "bool" else 251)).to(torch.uint8)
    return raw.view(dtype).reshape(shape) if numel else torch.empty(shape, dtype=dtype)


def payload(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def record(tensor: torch.Tensor, **options: object) -> bytes:
    layout = plan_record(tensor.dtype, tensor.shape, **options)
    data = payload(tensor)
    assert len(data) == layout.payload_bytes
    whole = layout.header + data + layout.trailer
    assert len(whole) == layout.record_bytes
    return whole


@pytest.mark.parametrize("force_zip64", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_torch_load_reads_the_same_tensor(name: str, force_zip64: bool) -> None:
    for shape in SHAPES:
        saved = filled(name, shape)
        stream = io.BytesIO(record(saved, force_zip64=force_zip64))
        loaded = torch.load(stream, map_location="cpu", weights_only=True)
        assert loaded.dtype == saved.dtype
        assert loaded.shape == saved.shape
        assert loaded.stride() == saved.stride()
        assert payload(loaded) == payload(saved)


@pytest.mark.parametrize("object_offset", [0, 1, 63, 64, 1000, 2**33 + 5])
def test_payload_is_aligned_in_the_object(object_offset: int) -> None:
    for num in range(70):
        layout = plan_record(torch.uint8, (num,), object_offset=object_offset)
        assert (object_offset + layout.payload_offset) % ALIGNMENT_BYTES == 0
        object_offset += layout.record_bytes


def test_a_record_adds_less_than_700_bytes() -> None:
    worst = 0
    for name in NAMES:
        for offset in range(ALIGNMENT_BYTES):
            shape = (100_000, 70_000, 1, 3)
            layout = plan_record(dtypes.dtype_from_name(name), shape, object_offset=offset)
            is_zip64 = layout.payload_bytes >= 2**32
            worst = max(worst, layout.record_bytes - layout.payload_bytes - 96 * is_zip64)
    assert worst < 700


def test_a_record_alone_in_a_file_can_be_mapped(tmp_path) -> None:
    for force_zip64 in (False, True):
        path = tmp_path / f"{force_zip64}.pt"
        saved = filled("float32", (4, 5))
        path.write_bytes(record(saved, force_zip64=force_zip64))
        assert torch.equal(torch.load(path, mmap=True, weights_only=True), saved)


def test_python_reads_the_small_members_of_the_archive() -> None:
    for force_zip64 in (False, True):
        archive = zipfile.ZipFile(
            io.BytesIO(record(filled("int64", (3,)), force_zip64=force_zip64))
        )
        assert archive.namelist() == ["r/data.pkl", "r/version", "r/byteorder", "r/data/0"]
        assert archive.read("r/version") == b"3\n"
        assert archive.getinfo("r/data/0").file_size == 24


def test_sizes_beyond_32_bits_are_planned_with_zip64() -> None:
    small = plan_record(torch.uint8, (2**32 - 2,))
    large = plan_record(torch.uint8, (2**32 - 1,))
    assert b"PK\x06\x06" in large.trailer
    assert b"PK\x06\x06" in small.trailer  # the directory starts beyond 4 GiB
    assert b"PK\x06\x06" not in plan_record(torch.uint8, (2**32 - 4096,)).trailer


def test_the_same_tensor_always_gives_the_same_bytes() -> None:
    assert record(filled("int8", (3,))) == record(filled("int8", (3,)))
    assert plan_record(torch.int8, (3,)) is plan_record(torch.int8, [3], object_offset=64)


@pytest.mark.parametrize("name", ["qint8", "uint4", "int1"])
def test_a_dtype_without_a_plain_record_is_refused(name: str) -> None:
    if not hasattr(torch, name):
        pytest.skip(f"this torch has no {name}")
    with pytest.raises(ValueError, match="no plain record"):
        plan_record(dtypes.dtype_from_name(name), (2,))


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        plan_record(torch.int8, (2, -1))
