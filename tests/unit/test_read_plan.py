from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcpstore.format.dtypes import row_major_strides
from dcpstore.format.manifest import StoredItem
from dcpstore.format.payload import bands, is_one_run, span_of
from dcpstore.read.plan import Request, join_pieces, plan_pieces
from dcpstore.read.targets import Target
from dcpstore.store.base import ByteRange
from dcpstore.write.job import plan_objects, plan_part_bytes

KIB, MIB = 1 << 10, 1 << 20


def stored(
    sizes: tuple[int, ...],
    item_bytes: int = 4,
    *,
    start: int = 0,
    block_bytes: int = 256 * KIB,
    key: str = "object",
    checked: bool = True,
) -> StoredItem:
    num_bytes = prod(sizes) * item_bytes
    blocks = -(-num_bytes // block_bytes)
    return StoredItem(
        key=key,
        record=ByteRange(start, start + num_bytes + 600),
        kind="raw",
        payload=ByteRange(start + 320, start + 320 + num_bytes),
        dtype="float32",
        sizes=sizes,
        checksums=np.zeros(blocks, np.uint32) if checked else None,
        block_bytes=block_bytes,
    )


@dataclass
class Plan:
    requests: list[Request]
    needed_bytes: int

    @property
    def fetched_bytes(self) -> int:
        return sum(request.range.num_bytes for request in self.requests)


def target(
    item: StoredItem, offsets: tuple[int, ...], sizes: tuple[int, ...], *, dense: bool = True
) -> Target:
    """A box of an item, and memory on no device for it."""
    index, at = MetadataIndex("w"), torch.Size(offsets)
    read_item = ReadItem(LoadItemType.TENSOR, index, at, index, at, torch.Size(sizes))
    memory = torch.empty(sizes if dense else (*sizes, 2), device="meta")
    return Target(read_item, item, memory if dense else memory[..., 0])


def plan(*targets: Target, request_bytes: int = 8 * MIB, gap: int = 512 * KIB) -> Plan:
    bounds = {"request_bytes": request_bytes, "join_gap_bytes": gap}
    pieces = plan_pieces(targets, **bounds)
    needed = sum(piece.needed_bytes for parts in pieces.values() for piece in parts)
    return Plan(join_pieces(pieces, **bounds), needed)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    chunk = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
    offsets = tuple(draw(st.integers(0, size - 1)) for size in chunk)
    sizes = tuple(draw(st.integers(0, c - o)) for c, o in zip(chunk, offsets, strict=True))
    return chunk, offsets, sizes


def elements(chunk: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> list[int]:
    strides = row_major_strides(chunk)
    spaces = [range(o, o + n) for o, n in zip(offsets, sizes, strict=True)]
    return [
        sum(i * s for i, s in zip(index, strides, strict=True))
        for index in itertools.product(*spaces)
    ]


@given(boxes(), st.integers(1, 200), st.integers(0, 60), st.sampled_from([1, 2, 8]))
def test_bands_cover_each_element_once_within_their_span_and_span_no_wide_hole(
    box: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
    max_bytes: int,
    max_gap: int,
    item_bytes: int,
) -> None:
    chunk, offsets, sizes = box
    found: list[int] = []
    strides = row_major_strides(chunk)
    for band in bands(
        strides, offsets, sizes, item_bytes, max_bytes=max_bytes, max_gap_bytes=max_gap
    ):
        inside = elements(chunk, *band)
        span = span_of(strides, *band, item_bytes)
        assert span.start == inside[0] * item_bytes
        assert span.end == (inside[-1] + 1) * item_bytes
        assert span.num_bytes <= max_bytes or len(inside) == 1
        holes = [b - a - 1 for a, b in itertools.pairwise(inside)]
        assert max(holes, default=0) * item_bytes <= max_gap
        found += inside
    assert sorted(found) == elements(chunk, offsets, sizes)


@given(boxes())
def test_a_box_is_one_run_exactly_if_its_elements_are_consecutive(
    box: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
) -> None:
    chunk, offsets, sizes = box
    inside = elements(chunk, offsets, sizes)
    if inside:
        consecutive = inside == list(range(inside[0], inside[0] + len(inside)))
        assert is_one_run(chunk, sizes) == consecutive


def test_runs_are_cut_at_block_edges() -> None:
    item = stored((100, 100), block_bytes=4096)
    done = plan(target(item, (10, 0), (50, 100)), request_bytes=8192, gap=-1)
    pieces = [piece for request in done.requests for piece in request.pieces]
    assert pieces[0].span.start == 320 + 4000
    assert pieces[-1].span.end == 320 + 24000
    assert all((piece.span.end - 320) % 4096 == 0 for piece in pieces[:-1])


def test_a_full_load_fetches_each_byte_once_in_requests_of_the_given_size() -> None:
    item = stored((4096, 4096))
    done = plan(target(item, (0, 0), (4096, 4096)))
    assert done.fetched_bytes == done.needed_bytes == 64 * MIB
    assert len(done.requests) == 8


def test_an_eighth_of_the_rows_costs_an_eighth_of_the_bytes() -> None:
    item = stored((8192, 4096))
    done = plan(target(item, (1000, 0), (1024, 4096)))
    assert done.needed_bytes == 16 * MIB
    assert done.fetched_bytes <= 1.05 * done.needed_bytes


def test_columns_with_long_runs_are_fetched_run_by_run() -> None:
    item = stored((32, 1 << 20))  # rows of 4 MiB, of which 1 MiB is wanted
    done = plan(target(item, (0, 1 << 18), (32, 1 << 18)))
    assert len(done.requests) == 32
    assert done.fetched_bytes <= 1.25 * done.needed_bytes


def test_columns_with_short_runs_are_fetched_with_their_gaps() -> None:
    item = stored((4096, 4096))  # runs of 4 KiB, gaps of 12 KiB: one request beats 512
    done = plan(target(item, (0, 1024), (4096, 1024)))
    assert len(done.requests) == 8
    assert done.fetched_bytes <= 4.1 * done.needed_bytes


def test_small_neighbours_share_a_request_in_any_order() -> None:
    wants = [target(stored((64,), start=1000 * i), (0,), (64,)) for i in reversed(range(100))]
    done = plan(*wants)
    assert len(done.requests) == 1
    assert {piece.target for piece in done.requests[0].pieces} == set(wants)


def test_a_gap_wider_than_allowed_is_not_read() -> None:
    near, far = stored((64,), start=0), stored((64,), start=10 * MIB)
    wants = [target(x, (0,), (64,)) for i, x in enumerate((near, far))]
    assert len(plan(*wants).requests) == 2
    assert len(plan(*wants, gap=16 * MIB, request_bytes=16 * MIB).requests) == 1


def test_without_checksums_nothing_is_widened() -> None:
    item = stored((1000,), checked=False)
    done = plan(target(item, (10,), (5,)))
    assert done.requests[0].range == ByteRange(320 + 40, 320 + 60)


def test_with_checksums_a_slice_is_widened_to_whole_blocks() -> None:
    item = stored((4096,), block_bytes=4 * KIB)
    done = plan(target(item, (1500,), (5,)))
    assert done.requests[0].range == ByteRange(320 + 4 * KIB, 320 + 8 * KIB)


def test_an_empty_box_costs_no_request() -> None:
    empty = target(stored((0, 4)), (0, 0), (0, 4))
    done = plan(empty)
    assert done.requests == []
    assert empty.missing == 0


@given(
    box=boxes(),
    dense=st.booleans(),
    request_bytes=st.integers(64, 300),
    gap=st.integers(0, 100),
    block=st.sampled_from([16, 64]),
)
def test_every_piece_lies_inside_its_request_and_pieces_cover_the_box(
    box: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
    dense: bool,
    request_bytes: int,
    gap: int,
    block: int,
) -> None:
    chunk, offsets, sizes = box
    item = stored(chunk, block_bytes=block)
    wanted = target(item, offsets, sizes, dense=dense)
    done = plan(wanted, request_bytes=request_bytes, gap=gap)
    found: list[int] = []
    for request in done.requests:
        for piece in request.pieces:
            assert request.range.start <= piece.fetch.start
            assert piece.fetch.end <= request.range.end
            assert piece.fetch.start <= piece.span.start
            assert piece.span.end <= piece.fetch.end <= item.payload.end
            assert (piece.fetch.start - item.payload.start) % block == 0
            first, end = ((at - item.payload.start) // 4 for at in piece.span)
            found += range(first, end) if piece.box is None else elements(chunk, *piece.box)
    assert sorted(found) == elements(chunk, offsets, sizes)
    assert wanted.missing == sum(len(request.pieces) for request in done.requests)


@given(st.lists(st.integers(0, 100), max_size=50), st.integers(1, 120))
def test_objects_keep_order_and_stay_near_their_size(sizes: list[int], target: int) -> None:
    objects = plan_objects(sizes, target)
    assert [position for one in objects for position in one] == list(range(len(sizes)))
    for one in objects:
        assert one
        assert sum(sizes[position] for position in one) <= target or len(one) == 1


def test_an_oversized_item_gets_an_object_alone() -> None:
    assert plan_objects([10, 500, 10, 10], 100) == [[0], [1], [2, 3]]


@pytest.mark.parametrize(
    ("total_mib", "num_objects", "part_mib"),
    [(1, 1, 8), (343, 2, 12), (512, 1, 9), (1024, 5, 12), (10 << 10, 41, 16), (100 << 10, 400, 16)],
)
def test_parts_are_as_large_as_lets_all_connections_end_together(
    total_mib: int, num_objects: int, part_mib: int
) -> None:
    mib = 1 << 20
    found = plan_part_bytes(total_mib * mib, num_objects, max_parts=32, most_bytes=16 * mib)
    assert found == part_mib * mib
    num_parts = -(-total_mib // part_mib) + num_objects
    of_largest = -(-total_mib // 16) + num_objects
    assert -(-num_parts // 32) * part_mib <= -(-of_largest // 32) * 16


@given(
    total=st.integers(0, 1 << 40),
    num_objects=st.integers(0, 5000),
    max_parts=st.integers(1, 100),
    most=st.integers(5 << 8, 64 << 8).map(lambda pages: pages * 4096),
)
def test_parts_are_never_larger_than_told_nor_tiny(
    total: int, num_objects: int, max_parts: int, most: int
) -> None:
    found = plan_part_bytes(total, num_objects, max_parts=max_parts, most_bytes=most)
    assert min(most, 8 << 20) <= found <= most
    assert found % 4096 == 0


def test_a_request_is_never_smaller_than_a_block() -> None:
    item = stored((1 << 20,))
    done = plan(target(item, (0,), (1 << 20,)), request_bytes=100 * KIB)
    assert {request.range.num_bytes for request in done.requests} == {256 * KIB}
