from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpstore.format.payload import bands, span_of
from dcpstore.read.sharing import Bundle, SharePlan, plan_sharing

MIB = 1 << 20


def rows(*units: tuple[int, int, int]) -> np.ndarray:
    """Ranges of which every byte is wanted."""
    wide = [(obj, start, end, end - start, end - start) for obj, start, end in units]
    return np.array(wide, dtype=np.int64).reshape(-1, 5)


def ranks_of(bundle: Bundle) -> tuple[int, ...]:
    (message,) = bundle.messages
    return message.ranks


def plan(
    units: list[np.ndarray], request_bytes: int = 8 * MIB, gap: int = 0, wave_bytes: int = 128 * MIB
) -> SharePlan:
    return plan_sharing(
        units, request_bytes=request_bytes, join_gap_bytes=gap, wave_bytes=wave_bytes
    )


def test_replicas_fetch_each_byte_once_in_equal_shares() -> None:
    whole = rows(*((0, n * MIB, (n + 1) * MIB) for n in range(64)))
    done = plan([whole] * 8)
    assert done.unique_bytes == 64 * MIB
    assert done.wanted_bytes == 8 * 64 * MIB
    fetched = Counter()
    for bundle in done.bundles:
        fetched[bundle.fetcher] += bundle.range.num_bytes
    assert fetched == dict.fromkeys(range(8), 8 * MIB)
    assert all(ranks_of(bundle) == tuple(range(8)) for bundle in done.bundles)


def test_what_one_rank_wants_is_not_shared() -> None:
    done = plan([rows((0, 0, 10)), rows((0, 10, 20)), rows((1, 0, 10))])
    assert done.bundles == ()
    assert done.num_waves == 0


def test_neighbours_that_the_same_ranks_want_travel_together() -> None:
    both = rows((0, 0, 10), (0, 10, 20), (0, 25, 30), (1, 0, 5))
    done = plan([both, both, rows((0, 10, 20))], gap=5)
    spans = {(b.object, *b.range, ranks_of(b)) for b in done.bundles}
    assert spans == {
        (0, 0, 10, (0, 1)),
        (0, 10, 20, (0, 1, 2)),
        (0, 25, 30, (0, 1)),
        (1, 0, 5, (0, 1)),
    }
    done = plan([both, both], gap=5)
    assert {(b.object, *b.range) for b in done.bundles} == {(0, 0, 30), (1, 0, 5)}


def test_replica_groups_do_not_wait_for_each_others_waves() -> None:
    groups = [rows(*((g, n * 10, n * 10 + 10) for n in range(20))) for g in range(4)]
    units = [groups[rank % 4] for rank in range(8)]
    done = plan(units, request_bytes=10, wave_bytes=100)
    assert done.num_waves == 2
    for rank in range(8):
        for wave in range(2):
            own = [b for b in done.of_rank(rank).bundles if b.wave == wave]
            assert sum(b.range.num_bytes for b in own) <= 100


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(1, 5)), max_size=15),
        min_size=1,
        max_size=6,
    ),
    st.integers(5, 40),
    st.integers(0, 4),
    st.integers(40, 100),
)
def test_every_shared_unit_reaches_every_rank_that_wants_it(
    wanted: list[list[tuple[int, int, int]]], request_bytes: int, gap: int, wave_bytes: int
) -> None:
    units = [rows(*((o, s * 5, s * 5 + n) for o, s, n in one)) for one in wanted]
    done = plan(units, request_bytes, gap, wave_bytes)
    wants: dict[tuple[int, int, int], set[int]] = {}
    for rank, one in enumerate(units):
        for unit in (tuple(row[:3]) for row in one.tolist()):
            wants.setdefault(unit, set()).add(rank)
    for (obj, start, end), ranks in wants.items():
        holding = [
            b
            for b in done.bundles
            if b.object == obj
            and b.range.start <= start
            and end <= b.range.end
            and set(ranks_of(b)) == ranks
        ]
        assert len(holding) == (1 if len(ranks) > 1 else 0)
    assert all(b.fetcher in ranks_of(b) for b in done.bundles)
    assert all(b.range.num_bytes <= request_bytes for b in done.bundles)
    messages = [message for b in done.bundles for message in b.messages]
    assert [message.number for message in messages] == list(range(len(messages)))
    assert all(b.wave < done.num_waves for b in done.bundles)


# --- one rank fetches for all -------------------------------------------------------------------


def columns(first: int, width: int, num_rows: int, row_bytes: int, band_bytes: int) -> np.ndarray:
    """Cut columns of a matrix of bytes as a read plan does, into bands of whole rows."""
    strides, box = (row_bytes, 1), ((0, first), (num_rows, width))
    cut = bands(strides, *box, 1, max_bytes=band_bytes, max_gap_bytes=row_bytes)
    spans = [span_of(strides, *one, 1) for one in cut]
    return np.array([(0, *span, width, row_bytes) for span in spans], dtype=np.int64)


def test_columns_of_all_ranks_are_fetched_once_and_sent_without_holes() -> None:
    units = [columns(rank * 8, 8, 64, 32, 512) for rank in range(4)]
    done = plan_sharing(
        units, request_bytes=512, join_gap_bytes=0, wave_bytes=512, readers={0: (2,)}
    )
    assert [(b.wave, *b.range, b.fetcher) for b in done.bundles] == [
        (wave, wave * 512, (wave + 1) * 512, 2) for wave in range(4)
    ]
    for bundle in done.bundles:
        assert sorted(message.ranks for message in bundle.messages) == [(0,), (1,), (2,), (3,)]
        assert [message.num_bytes for message in bundle.messages] == [16 * 8] * 4


@pytest.mark.parametrize("widths", [(3, 3, 3, 1), (16, 7, 1, 1), (1, 30, 1, 1)])
def test_columns_of_uneven_width_are_fetched_once_too(widths: tuple[int, ...]) -> None:
    firsts = [sum(widths[:rank]) for rank in range(4)]
    whole = sum(widths)
    units = [columns(*one, 1000, whole, 700) for one in zip(firsts, widths, strict=True)]
    done = plan_sharing(
        units, request_bytes=700, join_gap_bytes=0, wave_bytes=1400, readers={0: (0,)}
    )
    assert sum(bundle.range.num_bytes for bundle in done.bundles) == 1000 * whole
    assert all(bundle.range.num_bytes <= 700 for bundle in done.bundles)


def test_what_the_same_ranks_want_of_a_bundle_is_one_message() -> None:
    many = rows(*((0, n * 10, n * 10 + 7) for n in range(100)))
    (bundle,) = plan_sharing(
        [many, many[::2], many],
        request_bytes=MIB,
        join_gap_bytes=5,
        wave_bytes=MIB,
        readers={0: (1,)},
    ).bundles
    assert {m.ranks: m.num_bytes for m in bundle.messages} == {(0, 1, 2): 350, (0, 2): 350}


def test_the_fetcher_fetches_what_one_other_rank_wants_alone() -> None:
    plan = plan_sharing(
        [rows(), rows((1, 3, 9))],
        request_bytes=MIB,
        join_gap_bytes=0,
        wave_bytes=MIB,
        readers={1: (0,)},
    )
    for rank in range(2):
        (bundle,) = plan.of_rank(rank).bundles
        assert (bundle.fetcher, bundle.object, *bundle.range) == (0, 1, 3, 9)
        assert [message.ranks for message in bundle.messages] == [(1,)]


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), max_size=12),
        min_size=1,
        max_size=5,
    ),
    st.integers(30, 60),
    st.integers(0, 10),
)
def test_one_fetcher_reads_no_byte_twice_where_a_wave_has_room(
    wanted: list[list[tuple[int, int]]], request_bytes: int, gap: int
) -> None:
    units = [rows(*((0, start, start + size) for start, size in one)) for one in wanted]
    done = plan_sharing(
        units, request_bytes=request_bytes, join_gap_bytes=gap, wave_bytes=100, readers={0: (0,)}
    )
    spans = sorted(bundle.range for bundle in done.bundles)
    assert all(a.end <= b.start for a, b in itertools.pairwise(spans))
    got = {
        (rank, *unit[1:3])
        for bundle in done.bundles
        for message in bundle.messages
        for rank in message.ranks
        for unit in message.units.tolist()
    }
    all_wanted = {(n, a, a + size) for n, one in enumerate(wanted) for a, size in one}
    assert {one for one in all_wanted if one[0]} <= got <= all_wanted
    for _, start, end in all_wanted - got:  # left to the fetcher itself
        assert all(end <= span.start or span.end <= start for span in spans)


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(1, 30)), max_size=12),
        min_size=4,
        max_size=6,
    ),
    st.integers(0, 10),
)
def test_every_rank_gets_what_it_wants_by_itself_or_from_one_that_can_read_it(
    wanted: list[list[tuple[int, int, int]]], gap: int
) -> None:
    readers = {0: (1,), 1: (0, 1), 2: (2, 3)}
    units = [rows(*((o, a, a + size) for o, a, size in one)) for one in wanted]
    done = plan_sharing(
        units, request_bytes=40, join_gap_bytes=gap, wave_bytes=100, readers=readers
    )
    assert all(b.fetcher in readers.get(b.object, ranks_of_all(b)) for b in done.bundles)
    got = {
        (rank, *unit[:3])
        for bundle in done.bundles
        for message in bundle.messages
        for rank in message.ranks
        for unit in message.units.tolist()
    }
    for rank, one in enumerate(wanted):
        for number, start, size in one:
            is_sent = (rank, number, start, start + size) in got
            assert is_sent or rank in readers.get(number, (rank,))


def ranks_of_all(bundle: Bundle) -> set[int]:
    return {rank for message in bundle.messages for rank in message.ranks}


def test_what_every_rank_that_wants_it_can_read_is_left_to_them() -> None:
    both = rows((0, 0, 10))
    bounds = {"request_bytes": 10, "join_gap_bytes": 0, "wave_bytes": 100}
    assert plan_sharing([both, both], **bounds, readers={0: (0, 1)}).bundles == ()
    (bundle,) = plan_sharing([both, both, both], **bounds, readers={0: (0, 1)}).bundles
    assert bundle.messages[0].ranks == (0, 1, 2)


def test_ranks_that_can_read_an_object_take_turns_to_fetch_of_it_for_the_others() -> None:
    many = rows(*((0, n * 10, n * 10 + 10) for n in range(8)))
    bounds = {"request_bytes": 10, "join_gap_bytes": 0, "wave_bytes": 100}
    done = plan_sharing([rows(), rows(), many], **bounds, readers={0: (0, 1)})
    assert Counter(bundle.fetcher for bundle in done.bundles) == {0: 4, 1: 4}


def test_ranks_that_are_sent_different_objects_of_a_disk_do_not_wait_for_each_other() -> None:
    units = [rows(), *(rows(*((r, n * 10, n * 10 + 10) for n in range(20))) for r in range(3))]
    bounds = {"request_bytes": 10, "join_gap_bytes": 0, "wave_bytes": 100}
    readers = dict.fromkeys(range(3), (0, 4, 5))
    done = plan_sharing([*units, rows(), rows()], **bounds, readers=readers)
    assert done.num_waves == 2


def test_planning_for_many_ranks_and_bundles_is_quick_enough() -> None:
    units = [
        rows(*((0, (n * 256 + rank) * MIB, (n * 256 + rank + 1) * MIB) for n in range(64)))
        for rank in range(256)
    ]
    done = plan_sharing(
        units, request_bytes=4 * MIB, join_gap_bytes=0, wave_bytes=64 * MIB, readers={0: (3,)}
    )
    assert (len(done.bundles), done.num_waves) == (4096, 256)
    assert all(len(bundle.messages) == 4 for bundle in done.bundles)
