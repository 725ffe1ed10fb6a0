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


# --- the whole matrix -------------------------------------------------------------------------

SIZES = (1, 2, 3, 4, 8)
CELLS = list(product(SIZES, SIZES))  # of saving and of loading ranks


def matrix_cases(num_saved: int, num_loaded: int) -> list[tuple[str, str, str]]:
    """Return every saved layout, every loading one, and an optimizer that changes by the cell."""
    turn, names = SIZES.index(num_saved) + 2 * SIZES.index(num_loaded), list(LAYOUTS)
    kinds: dict[str, list[str]] = {}
    for layout, kind in savings(num_saved):
        kinds.setdefault(layout, []).append(kind)
    pairs = product(kinds, layouts_of(num_loaded))
    return [
        (saved, loaded, kinds[saved][(turn + names.index(loaded)) % len(kinds[saved])])
        for saved, loaded in pairs
    ]


def test_the_matrix_has_every_pair_of_layouts_with_every_optimizer() -> None:
    met = set()
    for num_saved, num_loaded in CELLS:
        cases = matrix_cases(num_saved, num_loaded)
        pairs = [(saved, loaded) for saved, loaded, _ in cases]
        assert sorted(pairs) == sorted(product(layouts_of(num_saved), layouts_of(num_loaded)))
        met |= set(cases)
    assert met == {(saved, loaded, kind) for saved, kind in savings(8) for loaded in LAYOUTS}


@pytest.fixture(scope="module")
def pool_of_eight(tmp_path_factory) -> Iterator[RankPool]:
    with RankPool(8, tmp_path_factory.mktemp("eight")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def all_saved(pool_of_eight, tmp_path_factory) -> dict[int, str]:
    """Where N ranks saved every layout with every optimizer."""
    urls = {num_ranks: str(tmp_path_factory.mktemp(f"all{num_ranks}")) for num_ranks in SIZES}
    for num_ranks, url in urls.items():
        pool_of_eight.run(num_ranks, save_all, savings(num_ranks), url, {}, timeout_s=600)
    return urls


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_saved", SIZES)
@pytest.mark.parametrize("num_loaded", SIZES)
def test_the_whole_matrix(pool_of_eight, all_saved, num_saved: int, num_loaded: int) -> None:
    cases = [
        (loaded, kind, f"{all_saved[num_saved]}/{saved}-{kind}")
        for saved, loaded, kind in matrix_cases(num_saved, num_loaded)
    ]
    fetched = pool_of_eight.run(num_loaded, load_all, cases, {}, timeout_s=1100)
    assert sum(fetched) > 0
