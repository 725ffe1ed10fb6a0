"""An optimizer saved by N ranks in one layout, loaded by M ranks in another, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from optimizer_layouts import LAYOUTS, NEEDS_PAIRS, OPTIMIZERS, load_all, save_all
from rank_pool import RankPool

pytestmark = pytest.mark.xdist_group("ranks")

# FSDP1 flattens parameters, and what is cut by columns has no whole rows on a rank.
NO_ROWS = {"fsdp1", "fsdp1_hybrid", "fsdp1_tp", "fsdp2_columns", "fsdp2_tp"}


def layouts_of(num_ranks: int) -> list[str]:
    return [name for name in LAYOUTS if num_ranks % 2 == 0 or name not in NEEDS_PAIRS]


def savings(num_ranks: int) -> list[tuple[str, str]]:
    return [
        (layout, kind)
        for layout, kind in product(layouts_of(num_ranks), OPTIMIZERS)
        if kind != "rows" or layout not in NO_ROWS
    ]


def loadings(num_saved: int, num_loaded: int, url: str) -> list[tuple[str, str, str]]:
    """Return each layout with each of what was saved: layout, optimizer, URL."""
    return [
        (loaded, kind, f"{url}/{layout}-{kind}")
        for (layout, kind), loaded in product(savings(num_saved), layouts_of(num_loaded))
    ]


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory) -> dict[int, str]:
    """Where N ranks saved."""
    urls = {num_ranks: str(tmp_path_factory.mktemp(f"of{num_ranks}")) for num_ranks in (2, 3)}
    for num_ranks, url in urls.items():
        pool.run(num_ranks, save_all, some_savings(num_ranks), url, {})
    return urls


def some_savings(num_ranks: int) -> list[tuple[str, str]]:
    """Return all layouts of two ranks with all optimizers, and of others with the telling ones."""
    return [case for case in savings(num_ranks) if num_ranks == 2 or case[1] in ("adam", "rows")]


# The number of loading ranks changes slowest: a change costs a new process group.
@pytest.mark.parametrize("num_saved", [2, 3])
@pytest.mark.parametrize("num_loaded", [1, 2, 3, 4])
def test_every_layout_loads_what_another_one_saved(
    pool, saved, num_saved: int, num_loaded: int
) -> None:
    # Each saved one once, by one layout after the other; the campaign tries all pairs.
    layouts = layouts_of(num_loaded)
    cases = [
        (layouts[(number + num_saved) % len(layouts)], kind, f"{saved[num_saved]}/{layout}-{kind}")
        for number, (layout, kind) in enumerate(some_savings(num_saved))
    ]
    fetched = pool.run(num_loaded, load_all, cases, {})
    assert sum(fetched) > 0


@pytest.fixture(scope="module")
def pool_of_eight(tmp_path_factory) -> Iterator[RankPool]:
    with RankPool(8, tmp_path_factory.mktemp("eight")) as ranks:
        yield ranks


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_saved", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_loaded", [1, 2, 3, 4, 8])
def test_the_whole_matrix(pool_of_eight, tmp_path, num_saved: int, num_loaded: int) -> None:
    url = str(tmp_path)
    pool_of_eight.run(num_saved, save_all, savings(num_saved), url, {})
    cases = loadings(num_saved, num_loaded, url)
    fetched = pool_of_eight.run(num_loaded, load_all, cases, {}, timeout_s=1100)
    assert sum(fetched) > 0
