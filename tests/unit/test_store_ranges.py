from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpstore.store.base import ByteRange
from dcpstore.store.ranges import cut, join, round_out

ranges = st.builds(lambda a, n: ByteRange(a, a + n), st.integers(0, 500), st.integers(0, 60))


@given(st.lists(ranges, max_size=20), st.integers(0, 40))
def test_joined_ranges_cover_the_same_bytes_and_leave_only_wide_gaps(
    given_ranges: list[ByteRange], max_gap: int
) -> None:
    joined = join(given_ranges, max_gap_bytes=max_gap)
    for one in given_ranges:
        assert one.num_bytes == 0 or any(j.start <= one.start and one.end <= j.end for j in joined)
    for left, right in itertools.pairwise(joined):
        assert right.start - left.end > max_gap
    ends = {r.end for r in given_ranges} | {r.start for r in given_ranges}
    assert all(j.start in ends and j.end in ends for j in joined)


@given(ranges, st.integers(1, 50), st.integers(1, 16))
def test_cut_pieces_are_bounded_aligned_and_whole(whole: ByteRange, most: int, align: int) -> None:
    if most < align:
        with pytest.raises(ValueError, match="less than align_bytes"):
            list(cut(whole, most, align_bytes=align))
        return
    pieces = list(cut(whole, most, align_bytes=align))
    assert sum(p.num_bytes for p in pieces) == whole.num_bytes
    for left, right in itertools.pairwise(pieces):
        assert left.end == right.start
        assert left.end % align == 0
    assert all(0 < p.num_bytes <= most for p in pieces)


@given(ranges, st.integers(1, 64), st.integers(0, 64))
def test_rounding_out_reaches_block_edges_but_not_past_the_end(
    inner: ByteRange, block: int, room: int
) -> None:
    limit = inner.end + room
    outer = round_out(inner, block, limit)
    assert outer.start <= inner.start <= inner.end <= outer.end <= limit
    assert outer.start % block == 0
    assert outer.end % block == 0 or outer.end == limit
