"""Any box of any view in a ``torch.save`` file is read by ranges as torch would cut it."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpstore import ReadConfig
from dcpstore.read.pump import ReadStats
from dcpstore.read.torch_file import open_torch_file
from dcpstore.read.torch_save import FileBox, Filler, Source


@st.composite
def view(draw: st.DrawFn) -> torch.Tensor:
    """Draw a tensor and a few views upon views of it."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    dtype = draw(st.sampled_from([torch.float32, torch.int16, torch.uint8, torch.complex64]))
    tensor = torch.arange(int(torch.Size(sizes).numel())).reshape(sizes).to(dtype)
    for _ in range(draw(st.integers(0, 3))):
        dim = draw(st.integers(0, tensor.dim() - 1))
        match draw(st.sampled_from(["permute", "narrow", "step", "expand", "unfold"])):
            case "permute":
                tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
            case "narrow":
                start = draw(st.integers(0, tensor.shape[dim] - 1))
                length = draw(st.integers(1, tensor.shape[dim] - start))
                tensor = tensor.narrow(dim, start, length)
            case "step":
                tensor = tensor[
                    (slice(None),) * dim + (slice(None, None, draw(st.integers(2, 3))),)
                ]
            case "expand":
                tensor = tensor.unsqueeze(dim).expand(*tensor.shape[:dim], 3, *tensor.shape[dim:])
            case "unfold":
                tensor = tensor.unfold(dim, draw(st.integers(1, tensor.shape[dim])), 1)
    return tensor


@st.composite
def box(draw: st.DrawFn, sizes: tuple[int, ...]) -> tuple[slice, ...]:
    starts = [draw(st.integers(0, size - 1)) for size in sizes]
    ends = [draw(st.integers(a + 1, size)) for a, size in zip(starts, sizes, strict=True)]
    return tuple(slice(a, b) for a, b in zip(starts, ends, strict=True))


@settings(max_examples=80, deadline=None)
@given(st.data(), st.sampled_from([7, 64, 4096]), st.sampled_from([0, 16, 4096]))
def test_boxes_of_views_are_read_as_torch_cuts_them(
    tmp_path_factory: pytest.TempPathFactory, data: Any, request_bytes: int, gap_bytes: int
) -> None:
    tensors = data.draw(st.lists(view(), min_size=1, max_size=3))
    boxes = [data.draw(box(tuple(tensor.shape))) for tensor in tensors]
    stream = io.BytesIO()
    torch.save(tensors, stream)
    path = tmp_path_factory.getbasetemp() / "boxes.pt"
    path.write_bytes(stream.getvalue())
    config = ReadConfig(request_bytes=request_bytes, join_gap_bytes=gap_bytes)
    wanted, filled = [], []
    with open_torch_file(path) as file:
        for stand_in, tensor, part in zip(file.value, tensors, boxes, strict=True):
            place = file.place(stand_in)
            assert place is not None
            wanted.append(tensor[part])
            out = torch.empty(wanted[-1].shape, dtype=tensor.dtype)
            filled.append(FileBox(Source(place), tuple(one.start for one in part), out))
        members = {key: one.member for key, one in file.storages.items()}
        read = memoryview(path.read_bytes())
        with Filler(
            lambda start, end: read[start:end],
            members,
            config,
            budget_bytes=1 << 16,
            what="file",
            stats=ReadStats(),
        ) as filler:
            filler.fill(filled)
    for one, expected in zip(filled, wanted, strict=True):
        assert torch.equal(one.out, expected)
