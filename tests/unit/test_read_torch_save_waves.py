"""What a torch.save file's readers send together: bounded waves that cover every want once."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpstore.read.torch_save import Extent, Wave, plan_waves, route
from dcpstore.read.torch_save import WaveWant as Want


def extent(*sizes: int, item_bytes: int = 4, axes: tuple[int, ...] | None = None) -> Extent:
    return Extent(sizes, item_bytes, axes or tuple(range(len(sizes))))


def columns(rank: int, num_ranks: int, sizes: tuple[int, int]) -> Want:
    width = sizes[1] // num_ranks
    return Want(0, 0, (0, rank * width), (sizes[0], width))


def cells(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> set[tuple[int, ...]]:
    return set(product(*(range(o, o + n) for o, n in zip(offsets, sizes, strict=True))))


def test_the_columns_of_all_ranks_travel_band_by_band() -> None:
    wants = [[columns(rank, 4, (64, 32))] for rank in range(4)]
    waves = plan_waves({0: extent(64, 32)}, wants, wave_bytes=16 * 32 * 4)
    assert len(waves) == 4
    for number, wave in enumerate(waves):
        assert [message.ranks for message in wave.messages] == [(0,), (1,), (2,), (3,)]
        for message in wave.messages:
            (part,) = message.parts
            assert part.offsets[0] == 16 * number
            assert part.sizes == (16, 8)


def test_what_lies_column_by_column_in_the_file_is_cut_into_bands_of_columns() -> None:
    wants = [[Want(0, 0, (0, 0), (64, 32))]]
    waves = plan_waves({0: extent(64, 32, axes=(1, 0))}, wants, wave_bytes=2048)
    assert {part.sizes for wave in waves for m in wave.messages for part in m.parts} == {(64, 8)}


def test_what_several_ranks_want_travels_in_one_message() -> None:
    wants = [[Want(5, 0, (0,), (100,)), Want(6, 1, (), ())] for _ in range(3)]
    (wave,) = plan_waves({0: extent(100), 1: extent()}, wants, wave_bytes=10_000)
    (message,) = wave.messages
    assert message.ranks == (0, 1, 2)
    assert message.num_bytes == wave.num_bytes == 404
    assert message.parts[0].takers == ((0, 5), (1, 5), (2, 5))


def test_every_part_lies_at_a_multiple_of_its_element_and_nothing_between() -> None:
    extents = {0: extent(3, item_bytes=1), 1: extent(3, item_bytes=8), 2: extent(3, item_bytes=2)}
    wants = [[Want(n, n, (0,), (3,)) for n in extents]]
    (wave,) = plan_waves(extents, wants, wave_bytes=10_000)
    (message,) = wave.messages
    assert [(part.source, part.start) for part in message.parts] == [(1, 0), (2, 24), (0, 30)]
    assert message.num_bytes == 33


def test_a_tensor_that_needs_room_to_be_picked_apart_gets_smaller_waves() -> None:
    wants = [[Want(0, 0, (0,), (1000,))]]
    light = plan_waves({0: extent(1000)}, wants, wave_bytes=1000)
    heavy = plan_waves({0: Extent((1000,), 4, (0,), weight=3)}, wants, wave_bytes=1000)
    assert (len(light), len(heavy)) == (4, 13)


def test_a_message_goes_down_a_tree_to_those_who_want_it() -> None:
    wants = [[Want(0, 0, (0,), (8,))] if rank != 3 else [] for rank in range(8)]
    waves = plan_waves({0: extent(8)}, wants, wave_bytes=100)
    legs = [own[0] for own in route(waves, 8, 2)]
    assert legs[3] == [], "a rank that wants nothing carries nothing"
    assert legs[2][0].source is None
    assert len(legs[2][0].forwards) == 3, "the root sends to seven members by three messages"
    received = sorted(to for own in legs for leg in own for to in leg.forwards)
    assert received == [0, 1, 4, 5, 6, 7], "everybody receives once"
    for rank, own in enumerate(legs):
        for leg in own:
            assert leg.source is None or rank in legs[leg.source][0].forwards
            assert [portion.item for portion in leg.portions] == [0]


def test_the_root_carries_what_it_does_not_want_itself() -> None:
    waves = plan_waves({0: extent(8)}, [[], [Want(7, 0, (2,), (3,))]], wave_bytes=100)
    (root,), (leaf,) = (own[0] for own in route(waves, 2, 0))
    assert (root.source, root.forwards, root.portions) == (None, (1,), ())
    assert leaf.portions[0][:3] == (7, (2,), (3,))


boxes = st.integers(1, 3).flatmap(
    lambda dims: st.tuples(
        st.lists(st.integers(1, 7), min_size=dims, max_size=dims),
        st.permutations(range(dims)),
        st.lists(
            st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=dims, max_size=dims),
            min_size=1,
            max_size=6,
        ),
    )
)


@settings(max_examples=60, deadline=None)
@given(boxes, st.integers(1, 200), st.integers(1, 3))
def test_every_rank_gets_every_element_it_wants_once_within_the_bound(
    drawn, wave_bytes: int, num_ranks: int
) -> None:
    sizes, axes, rows = drawn
    wants: list[list[Want]] = [[] for _ in range(num_ranks)]
    for number, row in enumerate(rows):
        offsets = tuple(int(low * (n - 1)) for (low, _), n in zip(row, sizes, strict=True))
        lengths = tuple(
            1 + int(high * (n - o - 1)) for (_, high), n, o in zip(row, sizes, offsets, strict=True)
        )
        wants[number % num_ranks].append(Want(number, 0, offsets, lengths))
    waves = plan_waves({0: Extent(tuple(sizes), 2, tuple(axes))}, wants, wave_bytes=wave_bytes)
    most_at_one_place = max(_depths(wants, sizes)) * 2
    assert all(wave.num_bytes <= max(wave_bytes, most_at_one_place) for wave in waves)
    _check_covered(waves, wants, num_ranks)


def _depths(wants: list[list[Want]], sizes: list[int]) -> list[int]:
    """Return how many distinct boxes lie over each element."""
    depth = np.zeros(sizes, int)
    for offsets, lengths in {want[2:] for own in wants for want in own}:
        depth[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))] += 1
    return depth.flatten().tolist()


def _check_covered(waves: list[Wave], wants: list[list[Want]], num_ranks: int) -> None:
    got: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for rank, own in enumerate(route(waves, num_ranks, 0)):
        for number, legs in enumerate(own):
            for leg in legs:
                assert leg.num_bytes == waves[number].messages[leg.message].num_bytes
                for portion in leg.portions:
                    assert portion.num_bytes == math.prod(portion.sizes) * 2
                    got.setdefault((rank, portion.item), []).extend(
                        cells(portion.offsets, portion.sizes)
                    )
    for rank, own in enumerate(wants):
        for want in own:
            assert sorted(got[rank, want.item]) == sorted(cells(want.offsets, want.sizes))


def test_planning_for_many_ranks_and_bands_is_quick_enough() -> None:
    num_ranks, rows = 256, 1 << 16
    wants = [
        [Want(0, 0, (rank * rows // num_ranks, 0), (rows // num_ranks, 1024))]
        for rank in range(num_ranks)
    ]
    waves = plan_waves({0: extent(rows, 1024)}, wants, wave_bytes=1 << 20)
    assert len(waves) == 256
    assert sum(len(legs) for own in route(waves, num_ranks, 0) for legs in own) <= 3 * num_ranks


@pytest.mark.parametrize("sizes", [(0, 3), (4, 0)])
def test_nothing_is_planned_for_nothing(sizes: tuple[int, int]) -> None:
    assert plan_waves({0: extent(*sizes)}, [[Want(0, 0, (0, 0), sizes)]], wave_bytes=10) == []
