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
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from dcpstore import CheckpointError, CorruptError, ReadConfig
from dcpstore.convert.dcp.source import plan_blocks, read_blocks
from dcpstore.convert.torch.source import FileCheckpoint, FileView
from dcpstore.convert.torch.structure import Layout
from dcpstore.format.zip import append_crc32
from dcpstore.read.torch_file import TorchFile, open_torch_file
from dcpstore.read.torch_save import contents_of
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
@given(st.lists(tensors(), min_size=1, max_size=8), st.integers(16, 200), st.integers(16, 64))
def test_what_a_converter_reads_in_blocks_is_what_torch_loads(
    values: list[torch.Tensor], block_bytes: int, request_bytes: int
) -> None:
    file, _ = opened({str(number): value for number, value in enumerate(values)})
    contents, _ = contents_of(file)
    view = FileView(contents, {}, {}, Layout(b"", {}))
    config = ReadConfig(budget_bytes=4 * request_bytes, request_bytes=request_bytes)
    with FileCheckpoint(file, view, config) as checkpoint:
        blocks = [
            block
            for number, value in enumerate(values)
            for block in plan_blocks(checkpoint, str(number), value.dtype, block_bytes)
        ]
        seen = [torch.zeros(value.shape, dtype=torch.int32) for value in values]
        with read_blocks(checkpoint, blocks, block_bytes) as contents_of_blocks:
            for block, content in contents_of_blocks:
                assert block.num_bytes <= block_bytes
                box = zip(block.offsets, block.sizes, strict=True)
                index = tuple(slice(at, at + size) for at, size in box)
                assert torch.equal(bits(content), bits(values[int(block.fqn)][index]))
                seen[int(block.fqn)][index] += 1
        assert all(bool((one == 1).all()) for one in seen)
        checkpoint.check_crcs()


@QUICK
@given(st.lists(tensors(), min_size=1, max_size=4), st.integers(0, 400), st.integers(16, 64))
def test_a_flipped_bit_of_a_storage_that_is_read_whole_is_found(
    values: list[torch.Tensor], at: int, request_bytes: int
) -> None:
    dense = [one.clone(memory_format=torch.contiguous_format) for one in values]
    file, saved = opened({str(number): one for number, one in enumerate(dense)})
    with file:
        storages = [one for one in file.storages.values() if one.num_bytes]
        assume(storages)
        doomed = storages[at % len(storages)]
        damaged = bytearray(saved)
        damaged[file.start_of(doomed.key) + at % doomed.num_bytes] ^= 1
    file = opened_bytes(bytes(damaged))
    contents, _ = contents_of(file)
    config = ReadConfig(budget_bytes=4 * request_bytes, request_bytes=request_bytes)
    view = FileView(contents, {}, {}, Layout(b"", {}))
    with FileCheckpoint(file, view, config) as checkpoint:
        checkpoint.read_tensors({fqn: values[int(fqn)].clone() for fqn in contents.tensors})
        with pytest.raises(CorruptError, match=f"storage {doomed.key} is not what was saved"):
            checkpoint.check_crcs()


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
