"""Any tensor's bytes, cut anywhere, against torch's own contiguous copy."""

from __future__ import annotations

import io
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpstore.format.checksum import BlockChecksummer, crc32c, find_bad_block, num_blocks
from dcpstore.format.payload import copy_box_in, copy_bytes_out
from dcpstore.format.record import plan_record
from dcpstore.format.zip import ALIGNMENT_BYTES
from dcpstore.read.targets import find_tensor

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.uint32,
    torch.float8_e4m3fn,
]
SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
relaxed = settings(max_examples=150, deadline=None)


def payload(tensor: torch.Tensor) -> bytes:
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return whole.unsqueeze(-1).view(torch.uint8).numpy().tobytes()


def noise(dtype: torch.dtype, numel: int, seed: int) -> torch.Tensor:
    top = 2 if dtype == torch.bool else 256
    raw = np.random.default_rng(seed).integers(0, top, numel * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype) if numel else torch.empty(0, dtype=dtype)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of any strides: permuted, stepped, cut, expanded, lazily conjugated or negated."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(SHAPES)
    tensor = noise(dtype, math.prod(shape), draw(st.integers(0, 99))).reshape(shape)
    for dim, size in enumerate(shape):
        if size and draw(st.booleans()):
            start = draw(st.integers(0, size - 1))
            stop, step = draw(st.integers(start, size)), draw(st.integers(1, 3))
            index = [slice(None)] * tensor.dim()
            index[dim] = slice(start, stop, step)
            tensor = tensor[tuple(index)]
    tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(draw(st.integers(0, 4)), *tensor.shape)
    if dtype.is_complex and draw(st.booleans()):
        tensor = tensor.conj()
        if draw(st.booleans()):
            tensor = tensor.imag
    return tensor


@relaxed
@given(tensor=tensors(), data=st.data())
def test_a_payload_copied_out_in_pieces_is_the_payload(
    tensor: torch.Tensor, data: st.DataObject
) -> None:
    item = tensor.element_size()
    cuts = data.draw(st.lists(st.integers(0, tensor.numel()), max_size=5))
    marks = [0, *sorted(cuts), tensor.numel()]
    got = b""
    for first, last in pairwise(marks):
        shift = data.draw(st.integers(0, 3))
        out = torch.zeros((last - first) * item + shift, dtype=torch.uint8)[shift:]
        copy_bytes_out(tensor, first * item, last * item, out)
        got += out.numpy().tobytes()
    assert got == payload(tensor)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[torch.Tensor, list[int], list[int]]:
    """A chunk and a box in it: offsets and sizes."""
    shape = draw(SHAPES)
    chunk = noise(draw(st.sampled_from(DTYPES)), math.prod(shape), 7).reshape(shape)
    offsets = [draw(st.integers(0, size)) for size in shape]
    sizes = [draw(st.integers(0, size - at)) for size, at in zip(shape, offsets, strict=True)]
    return chunk, offsets, sizes


@relaxed
@given(box=boxes(), data=st.data())
def test_a_box_lands_in_a_target_of_any_strides(box, data: st.DataObject) -> None:
    chunk, offsets, sizes = box
    wanted = chunk[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
    raw = payload(chunk)
    item = chunk.element_size()
    # Give no more of the payload than the box needs, at an address of any alignment.
    low = high = 0
    if wanted.numel():
        strides = chunk.stride()
        low = sum(o * s for o, s in zip(offsets, strides, strict=True)) * item
        last = [o + n - 1 for o, n in zip(offsets, sizes, strict=True)]
        high = (sum(o * s for o, s in zip(last, strides, strict=True)) + 1) * item
    shift = data.draw(st.integers(0, 9))
    source = memoryview(bytes(shift) + raw[low:high])[shift:]
    order = data.draw(st.permutations(range(len(sizes))))
    target = torch.zeros([sizes[d] for d in order], dtype=chunk.dtype)
    target = target.permute([order.index(d) for d in range(len(sizes))])
    copy_box_in(source, low, chunk.dtype, chunk.stride(), offsets, sizes, target)
    assert payload(target) == payload(wanted)


@relaxed
@given(
    shape=st.lists(st.integers(0, 20_000), max_size=4).map(tuple),
    dtype=st.sampled_from(DTYPES),
    object_offset=st.integers(0, 2**40),
    force_zip64=st.booleans(),
)
def test_any_layout_is_aligned_and_describes_itself(
    shape: tuple[int, ...], dtype: torch.dtype, object_offset: int, force_zip64: bool
) -> None:
    layout = plan_record(dtype, shape, object_offset=object_offset, force_zip64=force_zip64)
    assert (object_offset + layout.payload_offset) % ALIGNMENT_BYTES == 0
    stored = find_tensor(
        lambda start, end: memoryview(layout.header[start:end]), layout.record_bytes
    )
    assert stored is not None
    assert stored.place.is_dense
    assert (stored.place.dtype, stored.place.sizes) == (dtype, shape)
    assert stored.storage.start == layout.payload_offset
    assert stored.storage.num_bytes == layout.payload_bytes


@relaxed
@given(tensor=tensors(), object_offset=st.integers(0, 1000))
def test_torch_loads_the_record_of_any_tensor(tensor: torch.Tensor, object_offset: int) -> None:
    layout = plan_record(tensor.dtype, tensor.shape, object_offset=object_offset)
    record = layout.header + payload(tensor) + layout.trailer
    loaded = torch.load(io.BytesIO(record), weights_only=True)
    assert loaded.is_contiguous()
    assert loaded.shape == tensor.shape
    assert loaded.dtype == tensor.dtype
    assert payload(loaded) == payload(tensor)


@relaxed
@given(
    pieces=st.lists(st.binary(max_size=40), max_size=8),
    block_bytes=st.integers(1, 50),
    data=st.data(),
)
def test_checksums_do_not_depend_on_how_a_payload_arrives(
    pieces: list[bytes], block_bytes: int, data: st.DataObject
) -> None:
    whole = b"".join(pieces)
    summer = BlockChecksummer(block_bytes)
    for piece in pieces:
        summer.update(piece)
    sums = summer.finish()
    blocks = [whole[i : i + block_bytes] for i in range(0, len(whole), block_bytes)]
    assert sums.tolist() == [crc32c(block) for block in blocks]
    assert len(sums) == num_blocks(len(whole), block_bytes)
    first = data.draw(st.integers(0, len(blocks)))
    last = data.draw(st.integers(first, len(blocks)))
    part = bytearray(whole[first * block_bytes : last * block_bytes])
    assert find_bad_block(part, first, sums, block_bytes) is None
    if part:
        at = data.draw(st.integers(0, len(part) - 1))
        part[at] ^= 1 << data.draw(st.integers(0, 7))
        assert find_bad_block(part, first, sums, block_bytes) == first + at // block_bytes
