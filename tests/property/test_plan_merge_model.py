"""Plan exchange against torch's own global planning, and against brute force."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
from benchmarks.planning import to_save_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import (
    _validate_global_plan,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from dcpstore.plan.merge import PlanError, merge_save_plans
from dcpstore.plan.overlap import find_overlaps
from dcpstore.plan.packed import apply_decision, to_metadata, to_packed_plan
from plan_items import shard, value

Box = tuple[tuple[int, ...], tuple[int, ...]]

relaxed = settings(max_examples=120, deadline=None)
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64]


def cut(size: int, parts: int, number: int) -> tuple[int, int]:
    """Offset and size of a part, as DTensor cuts: the last ones may be empty."""
    full = -(-size // parts)
    start = min(full * number, size)
    return start, min(full, size - start)


@st.composite
def jobs(draw: st.DrawFn) -> list[SavePlan]:
    """What the ranks of a mesh plan: each tensor cut or replicated along each of its axes."""
    mesh = draw(st.sampled_from([(1,), (2,), (5,), (6,), (2, 3), (4, 2), (2, 2, 2)]))
    plans: list[list[WriteItem]] = [[] for _ in range(math.prod(mesh))]
    coordinates = list(itertools.product(*map(range, mesh)))
    for number in range(draw(st.integers(0, 6))):
        size = draw(st.lists(st.integers(0, 7), max_size=3).map(tuple))
        dtype = draw(st.sampled_from(DTYPES))
        dims: list[int | None] = [None]
        dims += range(len(size))
        # Which dimension each axis of the mesh cuts; no dimension twice.
        axes = [draw(st.sampled_from(dims)) for _ in mesh]
        axes = [d if d is None or d not in axes[:n] else None for n, d in enumerate(axes)]
        is_plain = all(dim is None for dim in axes) and draw(st.booleans())
        kind = WriteItemType.TENSOR if is_plain else WriteItemType.SHARD
        for plan, coordinate in zip(plans, coordinates, strict=True):
            offsets, sizes = [0] * len(size), list(size)
            for axis, dim in enumerate(axes):
                if dim is not None:
                    offsets[dim], sizes[dim] = cut(size[dim], mesh[axis], coordinate[axis])
            fqn = f"part{number % 3}.t{number}"
            item = shard(fqn, tuple(offsets), tuple(sizes), size, dtype=dtype, kind=kind)
            plan.append(item)
    for number in range(draw(st.integers(0, 3))):
        for rank, plan in enumerate(plans):
            fqn = f"v{number}" if draw(st.booleans()) else f"v{number}.rank{rank}"
            plan.append(value(fqn))
    return [
        SavePlan(items, planner_data={item.index.fqn: (item.index.fqn,) for item in items})
        for items in (
            draw(st.permutations(items)) if draw(st.booleans()) else items for items in plans
        )
    ]


def content(metadata: Metadata) -> dict[str, Any]:
    """What metadata says, the order of keys and chunks left out."""
    found: dict[str, Any] = {}
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            found[fqn] = None
        else:
            chunks = sorted((tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks)
            found[fqn] = (entry.size, entry.properties, chunks)
    return found


@relaxed
@given(jobs())
def test_plans_come_back_from_their_bytes(plans: list[SavePlan]) -> None:
    for plan in plans:
        packed = to_packed_plan(plan)
        back = to_save_plan(packed)
        assert back.planner_data == plan.planner_data
        assert [(i.index, i.tensor_data) for i in back.items] == [
            (i.index, i.tensor_data) for i in plan.items
        ]
        assert to_packed_plan(back) == packed


@relaxed
@given(jobs())
def test_the_metadata_is_what_torch_makes_of_the_same_plans(plans: list[SavePlan]) -> None:
    merged = merge_save_plans([to_packed_plan(plan) for plan in plans])
    _, expected = create_default_global_save_plan(dedup_save_plans(plans))
    metadata = to_metadata(merged)
    assert content(metadata) == content(expected)
    assert metadata.planner_data == {
        fqn: path for plan in plans for fqn, path in plan.planner_data.items()
    }


@relaxed
@given(jobs())
def test_every_chunk_is_written_by_one_rank_that_planned_it(plans: list[SavePlan]) -> None:
    merged = merge_save_plans([to_packed_plan(plan) for plan in plans])
    kept = [apply_decision(p, d) for p, d in zip(plans, merged.decisions, strict=True)]
    written = [item.index for plan in kept for item in plan.items]
    assert len(written) == len(set(written))
    assert set(written) == {item.index for plan in plans for item in plan.items}
    for plan, mine in zip(plans, kept, strict=True):
        assert all(item in plan.items for item in mine.items)
    loads = [
        sum(
            math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
            for item in plan.items
            if item.tensor_data is not None
        )
        for plan in kept
    ]
    assert merged.load_bytes.tolist() == loads
    # The same answer for the metadata as torch's own checks accept.
    assert not _validate_global_plan(kept, to_metadata(merged))


@st.composite
def box_lists(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor and non-empty boxes of it: a tiling, or one that was damaged, or any boxes."""
    size = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    boxes: list[Box] = [((0,) * len(size), size)]
    for _ in range(draw(st.integers(0, 8))):  # cut boxes anywhere: tilings of any form
        at = draw(st.integers(0, len(boxes) - 1))
        offsets, sizes = boxes[at]
        dim = draw(st.integers(0, len(size) - 1))
        if sizes[dim] > 1:
            first = draw(st.integers(1, sizes[dim] - 1))
            left, right = list(sizes), list(sizes)
            left[dim], right[dim] = first, sizes[dim] - first
            moved = list(offsets)
            moved[dim] += first
            boxes[at : at + 1] = [(offsets, tuple(left)), (tuple(moved), tuple(right))]
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(boxes) - 1))
        offsets, sizes = boxes[at]
        dim = draw(st.integers(0, len(size) - 1))
        change = draw(st.sampled_from([-1, 1]))
        where = list(offsets), list(sizes)
        where[draw(st.integers(0, 1))][dim] += change
        boxes[at] = tuple(where[0]), tuple(where[1])
    boxes = [box for box in boxes if min(box[1]) > 0]
    return size, draw(st.permutations(list({box[0]: box for box in boxes}.values())))


@relaxed
@given(box_lists(), st.integers(2, 5))
def test_what_torch_finds_wrong_is_refused_and_nothing_else(
    tensor: tuple[tuple[int, ...], list[Box]], num_ranks: int
) -> None:
    size, boxes = tensor
    items = [shard("w", *box, size) for box in boxes]
    plans = [SavePlan(items[rank::num_ranks]) for rank in range(num_ranks)]
    global_plans, metadata = create_default_global_save_plan(plans)
    problems = _validate_global_plan(global_plans, metadata)
    try:
        merge_save_plans([to_packed_plan(plan) for plan in plans])
    except PlanError as error:
        assert problems, error
    else:
        assert not problems or not boxes


@relaxed
@given(st.lists(box_lists(), max_size=4), st.sampled_from([0, 3, 1 << 20]))
def test_overlaps_are_those_that_brute_force_finds(
    tensors: list[tuple[tuple[int, ...], list[Box]]], max_pairs: int
) -> None:
    group, starts, ends, expected = [], [], [], set()
    for number, (_, boxes) in enumerate(tensors):
        for box in boxes:
            missing = 3 - len(box[0])
            group.append(number)
            starts.append((*box[0], *(0,) * missing))
            ends.append((*(o + s for o, s in zip(*box, strict=True)), *(1,) * missing))
    for a, b in itertools.combinations(range(len(group)), 2):
        if group[a] == group[b] and all(
            starts[a][d] < ends[b][d] and starts[b][d] < ends[a][d] for d in range(3)
        ):
            expected.add((a, b))
    found = find_overlaps(
        np.array(group, np.int64),
        np.array(starts, np.int64).reshape(-1, 3),
        np.array(ends, np.int64).reshape(-1, 3),
        max_found=10_000,
        max_pairs=max_pairs,
    )
    assert set(map(tuple, found.tolist())) == expected
    assert len(found) == len(expected)
