"""Files of torch.save against torch.load: whatever was saved, and however it was damaged."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcpstore import CheckpointError
from dcpstore.convert.torch.source import ReadAhead, WantedBox, bands_of
from dcpstore.format.zip import append_crc32
from dcpstore.read.torch_file import TorchFile, open_torch_file
from dcpstore.store import open_store

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")

QUICK = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.complex64, torch.float8_e4m3fn)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A view of some strides into a storage of some dtype."""
    sizes = draw(st.lists(st.integers(0, 5), max_size=3))
    strides = draw(st.lists(st.integers(0, 7), min_size=len(sizes), max_size=len(sizes)))
    offset = draw(st.integers(0, 9))
    reach = offset + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True) if n) + 1
    dtype = draw(st.sampled_from(DTYPES))
    held = torch.arange((reach + draw(st.integers(0, 3))) * dtype.itemsize) % 251
    return held.to(torch.uint8).view(dtype).as_strided(sizes, strides, offset)


def opened(value: Any) -> tuple[TorchFile, bytes]:
    stream = io.BytesIO()
    torch.save(value, stream)
    return opened_bytes(stream.getvalue()), stream.getvalue()


def opened_bytes(data: bytes) -> TorchFile:
    store = open_store("memory://torch-file-model")
    store.put("model.pt", data)
    return open_torch_file("memory://torch-file-model/model.pt")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().unsqueeze(-1).view(torch.uint8)


@QUICK
@given(st.lists(tensors(), max_size=6), st.data())
def test_any_box_of_any_tensor_is_what_torch_loads(values: list[torch.Tensor], data: Any) -> None:
    file, _ = opened(values)
    with file:
        for tensor, stand_in in zip(values, file.value, strict=True):
            offsets = [data.draw(st.integers(0, size)) for size in tensor.shape]
            sizes = [
                data.draw(st.integers(0, size - at))
                for size, at in zip(tensor.shape, offsets, strict=True)
            ]
            box = tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))
            found = file.read_box(stand_in, offsets, sizes)
            assert torch.equal(bits(found), bits(tensor[box]))


@QUICK
@given(tensors(), st.integers(1, 40))
def test_bands_part_a_box_and_none_spans_more_than_allowed(
    tensor: torch.Tensor, max_bytes: int
) -> None:
    file, _ = opened(tensor)
    with file:
        whole = WantedBox(file.place(file.value), (0,) * tensor.dim(), tuple(tensor.shape))
        seen = torch.zeros(tensor.shape, dtype=torch.int32)
        for part in bands_of(whole, max_bytes):
            box = zip(part.offsets, part.sizes, strict=True)
            seen[tuple(slice(a, a + n) for a, n in box)] += 1
            is_one = all(size == 1 for size in part.sizes)
            assert is_one or max(part.span.num_bytes, part.num_bytes) <= max_bytes
        assert bool((seen == 1).all())


@QUICK
@given(st.lists(tensors(), min_size=1, max_size=8), st.integers(4, 400), st.integers(4, 64))
def test_what_is_read_ahead_is_what_torch_loads(
    values: list[torch.Tensor], budget_bytes: int, request_bytes: int
) -> None:
    file, _ = opened(values)
    boxes = [
        part
        for stand_in in file.value
        for part in bands_of(
            WantedBox(file.place(stand_in), (0,) * stand_in.dim(), tuple(stand_in.shape)), 64
        )
    ]
    ahead = ReadAhead(file, boxes, budget_bytes=budget_bytes, request_bytes=request_bytes)
    with file, ahead:
        tensor_of = {
            (place.storage_key, place): value
            for value, place in zip(values, map(file.place, file.value), strict=True)
        }
        for number, box in enumerate(boxes):
            value = tensor_of[box.place.storage_key, box.place]
            index = tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
            assert torch.equal(bits(ahead.take(number)), bits(value[index]))
        ahead.check_crcs()


VALUE = {
    "a": torch.arange(40.0),
    "b": {"c": torch.arange(7), "d": [torch.ones(3, 3), "text", 5]},
    "e": torch.zeros(0),
}


@QUICK
@given(st.integers(0, 2200), st.integers(1, 255))
def test_a_flipped_byte_gives_an_error_of_ours_or_the_same_structure(at: int, flip: int) -> None:
    _, data = opened(VALUE)
    damaged = bytearray(data)
    damaged[at % len(data)] ^= flip
    try:
        with opened_bytes(bytes(damaged)) as file:
            places = [file.place(file.value["a"]), file.place(file.value["b"]["c"])]
            assert [place.sizes for place in places] == [(40,), (7,)]
            assert file.value["b"]["d"][1:] == ["text", 5]
            for key in file.storages:
                file.read_storage(key)
    except CheckpointError:
        pass


@QUICK
@given(st.integers(0, 2200))
def test_a_file_cut_anywhere_gives_an_error_of_ours(kept: int) -> None:
    _, data = opened(VALUE)
    with pytest.raises(CheckpointError):
        opened_bytes(data[: min(kept, len(data) - 1)])


@QUICK
@given(st.data())
def test_a_hostile_directory_gives_an_error_of_ours_or_members_inside_the_file(data: Any) -> None:
    _, saved = opened(VALUE)
    hostile = bytearray(saved)
    with zipfile.ZipFile(io.BytesIO(saved)) as archive:
        start = archive.start_dir
    at = data.draw(st.integers(start, len(saved) - 8))
    form, limit = data.draw(st.sampled_from([("<H", 1 << 16), ("<I", 1 << 32), ("<Q", 1 << 64)]))
    number = data.draw(st.integers(0, limit - 1))
    struct.pack_into(form, hostile, at, number)
    try:
        with opened_bytes(bytes(hostile)) as file:
            for storage in file.storages.values():
                assert storage.member.next_offset <= len(saved)
                file.read_storage(storage.key)
    except CheckpointError:
        pass


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=5))
def test_checksums_of_parts_combine_to_that_of_the_whole(parts: list[bytes]) -> None:
    crc32 = 0
    for part in parts:
        crc32 = append_crc32(crc32, zlib.crc32(part), len(part))
    assert crc32 == zlib.crc32(b"".join(parts))


def test_checksums_combine_over_long_runs() -> None:
    data = bytes(range(256)) * 5000
    cuts = [0, 1, 65_537, 700_001, len(data)]
    crc32 = 0
    for start, end in pairwise(cuts):
        crc32 = append_crc32(crc32, zlib.crc32(data[start:end]), end - start)
    assert crc32 == zlib.crc32(data)
