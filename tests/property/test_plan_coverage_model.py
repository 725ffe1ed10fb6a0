"""Flaws and holes of chunks, against a grid in which every element is counted."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from dcpstore import CorruptError
from dcpstore.plan.coverage import HoleMetadata, find_flaws, find_holes, with_holes

Box = tuple[tuple[int, ...], tuple[int, ...]]


@st.composite
def tilings(draw: st.DrawFn) -> TensorStorageMetadata:
    """Cut a tensor apart by straight lines, then lose, repeat, move or add chunks."""
    size = tuple(draw(st.lists(st.integers(0, 6), min_size=0, max_size=3)))
    boxes: list[Box] = [((0,) * len(size), size)]
    for _ in range(draw(st.integers(0, 6)) if size else 0):
        at, dim = draw(st.integers(0, len(boxes) - 1)), draw(st.integers(0, len(size) - 1))
        offsets, sizes = boxes.pop(at)
        cut = draw(st.integers(0, sizes[dim]))
        for start, count in ((0, cut), (cut, sizes[dim] - cut)):
            box_at = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])
            boxes.append((box_at, (*sizes[:dim], count, *sizes[dim + 1 :])))
    changes = draw(st.lists(st.sampled_from(["lose", "repeat", "add"]), max_size=3))
    for change in changes:
        if change == "add":
            box = [draw(st.tuples(st.integers(-1, n), st.integers(0, n + 1))) for n in size]
            boxes.append((tuple(one for one, _ in box), tuple(two for _, two in box)))
        elif boxes:
            at = draw(st.integers(0, len(boxes) - 1))
            if change == "lose":
                boxes.pop(at)
            else:
                boxes.append(boxes[at])
    chunks = [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        for offsets, sizes in draw(st.permutations(boxes))
    ]
    return TensorStorageMetadata(TensorProperties(), torch.Size(size), chunks)


def counted(tensor: TensorStorageMetadata, chunks: list[ChunkStorageMetadata]) -> np.ndarray | None:
    """Return how many chunks hold each element, each box once; None if one lies outside."""
    count = np.zeros(tuple(tensor.size), int)
    for offsets, sizes in {(tuple(one.offsets), tuple(one.sizes)) for one in chunks}:
        if 0 in sizes:
            continue
        ends = [at + n for at, n in zip(offsets, sizes, strict=True)]
        if min(offsets, default=0) < 0 or any(map(int.__gt__, ends, tensor.size)):
            return None
        count[tuple(map(slice, offsets, ends))] += 1
    return count


@given(st.lists(tilings(), max_size=4))
def test_flaws_are_those_of_the_grid(tensors: list[TensorStorageMetadata]) -> None:
    entries = {str(number): tensor for number, tensor in enumerate(tensors)}
    found = {flaw.fqn: flaw for flaw in find_flaws(entries)}
    for fqn, tensor in entries.items():
        count = counted(tensor, tensor.chunks)
        if count is None:
            assert not found[fqn].is_hole
            assert "outside" in found[fqn].text
        elif (count > 1).any():
            assert not found[fqn].is_hole
            assert "overlap" in found[fqn].text
        elif (count == 0).any():
            assert found[fqn].is_hole
            assert f"hold {int(count.sum())} of {count.size} " in found[fqn].text
        else:
            assert fqn not in found


@given(tilings())
def test_holes_are_exactly_what_no_chunk_holds(tensor: TensorStorageMetadata) -> None:
    count = counted(tensor, tensor.chunks)
    metadata = Metadata({"w": tensor}, storage_data={})
    if count is None or (count > 1).any():
        try:
            with_holes(metadata, "here")
        except CorruptError:
            return
        raise AssertionError("not refused")
    holes = find_holes(tensor)
    assert holes is not None
    assert all(0 not in hole.sizes for hole in holes)
    filled = counted(tensor, [*tensor.chunks, *holes])
    assert filled is not None
    assert (filled == 1).all()
    marked = with_holes(metadata, "here").state_dict_metadata["w"]
    assert [one for one in marked.chunks if isinstance(one, HoleMetadata)] == holes
