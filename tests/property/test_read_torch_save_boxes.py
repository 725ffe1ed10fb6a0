"""Any box of any view in a ``torch.save`` file is read by ranges as torch would cut it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcpstore import ReadConfig
from dcpstore.read.plan import plan_pieces
from dcpstore.read.pump import ReadJob
from dcpstore.read.targets import Target, copy_piece
from dcpstore.read.torch_file import open_torch_file
from dcpstore.read.torch_save import Contents, FileSource, SavedFlags, contents_of


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


def target(key: str, part: tuple[slice, ...], out: torch.Tensor, contents: Contents) -> Target:
    index, offsets = MetadataIndex(key), torch.Size([one.start for one in part])
    read_item = ReadItem(LoadItemType.TENSOR, index, offsets, index, offsets, out.shape)
    return Target(read_item, contents.item(index), out)


class Commits(DefaultLoadPlanner):
    """A planner that is told of complete targets."""

    def __init__(self, keys: list[str]) -> None:
        super().__init__()
        self.keys = keys

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.keys.append(read_item.storage_index.fqn)


@settings(max_examples=80, deadline=None)
@given(st.data(), st.sampled_from([7, 64, 4096]), st.sampled_from([0, 16, 4096]))
def test_boxes_of_views_are_read_as_torch_cuts_them(
    tmp_path_factory: pytest.TempPathFactory, data: Any, request_bytes: int, gap_bytes: int
) -> None:
    tensors = {str(n): one for n, one in enumerate(data.draw(st.lists(view(), max_size=3)))}
    boxes = {key: data.draw(box(tuple(tensor.shape))) for key, tensor in tensors.items()}
    path = tmp_path_factory.getbasetemp() / "boxes.pt"
    torch.save(tensors, path)
    config = ReadConfig(request_bytes=request_bytes, join_gap_bytes=gap_bytes)
    wanted = {key: tensor[boxes[key]] for key, tensor in tensors.items()}
    outs = {key: torch.empty(part.shape, dtype=part.dtype) for key, part in wanted.items()}
    committed: list[str] = []
    with open_torch_file(path) as file:
        contents, _ = contents_of(file)
        targets = [target(key, boxes[key], out, contents) for key, out in outs.items()]
        planner: Any = SavedFlags(Commits(committed), contents)
        source: Any = FileSource(file.url, file)
        with ReadJob(source, config, Metadata({}), {}) as job:
            job.plan(targets, planner)
            job.fetch_rest(planner)
    assert sorted(committed) == sorted(tensors)
    for key, part in wanted.items():
        assert torch.equal(outs[key], part)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_boxes_of_views_are_copied_from_their_runs_alone(
    tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    tensor = data.draw(view())
    part = data.draw(box(tuple(tensor.shape)))
    path = tmp_path_factory.getbasetemp() / "runs.pt"
    torch.save({"t": tensor}, path)
    out = torch.empty(tensor[part].shape, dtype=tensor.dtype)
    with open_torch_file(path) as file:
        contents, _ = contents_of(file)
        wants = target("t", part, out, contents)
        source: Any = FileSource(file.url, file)
        for pieces in plan_pieces([wants], request_bytes=4096, join_gap_bytes=4096).values():
            for piece in pieces:
                run, step = piece.spacing
                fetched = torch.frombuffer(
                    bytearray(source.get_range("file", *piece.fetch)), dtype=torch.uint8
                )
                count = (len(fetched) - run) // step + 1
                runs = fetched.as_strided((count, run), (step, 1)).contiguous()
                copy_piece(piece, memoryview(runs.numpy().reshape(-1)))
    planner: Any = SavedFlags(Commits([]), contents)
    planner.commit_tensor(wants.read_item, out)
    assert torch.equal(out, tensor[part])
