"""`dcpstore.save` on N ranks and `dcpstore.load` on M: every layout, every planner and storage."""

from __future__ import annotations

from itertools import permutations, product
from pathlib import Path

import pytest
import save_load_ranks as ranks

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """Gives the folder of what N ranks saved in some way."""
    folder = tmp_path_factory.mktemp("matrix")
    done: set[str] = set()

    def saved(way: str, num_ranks: int) -> str:
        url = f"{folder}/{way}-{num_ranks}"
        if url not in done:
            pool.run(num_ranks, ranks.save_all_cases, way, url, timeout_s=90)
            done.add(url)
        return url

    return saved


# Each number of ranks saves, and each loads, by ours in every run; the campaign tries all.
QUICK = {way: {(1, 3), (4, 4)} for way in ranks.WAYS}
QUICK["ours"] |= {(2, 4), (3, 2), (4, 1)}
PAIRS = [
    pytest.param(way, saved, loaded, marks=[] if is_quick else [pytest.mark.campaign])
    # The number of loading ranks changes slowest: a change costs a new process group.
    for loaded, saved, way in product(range(1, 5), range(1, 5), ranks.WAYS)
    for is_quick in [(saved, loaded) in QUICK[way]]
]


@pytest.mark.parametrize(("way", "num_saved", "num_loaded"), PAIRS)
def test_what_n_ranks_saved_m_ranks_load_to_the_last_bit(
    pool, saved, way: str, num_saved: int, num_loaded: int
) -> None:
    variant = int(num_saved != num_loaded or num_saved % 2 == 1)
    folder = saved(way, num_saved)
    pool.run(num_loaded, ranks.load_all_cases, way, folder, variant, timeout_s=90)


@pytest.mark.parametrize(("saver", "loader"), list(permutations(ranks.WAYS, 2)))
def test_each_way_reads_what_the_others_saved(pool, saved, saver: str, loader: str) -> None:
    pool.run(2, ranks.load_all_cases, loader, saved(saver, 4), 1, timeout_s=90)


def test_stock_dcp_and_dcpstore_load_each_others_checkpoints(pool, tmp_path: Path) -> None:
    pool.run(3, ranks.save_and_load_beside_stock, str(tmp_path))


@pytest.mark.parametrize("coordinator_rank", [0, 1])
def test_a_group_without_global_rank_0_saves_and_loads(
    pool, tmp_path: Path, coordinator_rank: int
) -> None:
    pool.run(4, ranks.save_and_load_in_groups, [[1, 3]], coordinator_rank, str(tmp_path))


def test_two_groups_save_and_load_at_the_same_time(pool, tmp_path: Path) -> None:
    pool.run(4, ranks.save_and_load_in_groups, [[0, 2], [3, 1]], 1, str(tmp_path))


@pytest.mark.parametrize("coordinator_rank", [1, 2, 3])
def test_any_rank_may_coordinate(pool, tmp_path: Path, coordinator_rank: int) -> None:
    pool.run(4, ranks.save_and_load_in_groups, [[0, 1, 2, 3]], coordinator_rank, str(tmp_path))
