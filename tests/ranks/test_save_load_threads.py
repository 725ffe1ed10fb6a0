"""`dcpstore.save` on N threads and `dcpstore.load` on M, for N and M up to 64, in memory."""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from parts import Part, assert_state, state_of, wiped

import dcpstore
from dcpstore import ReadConfig, WriteConfig
from dcpstore.plan import SavePlanner
from dcpstore.store.folder import parse_location
from dcpstore.store.fsspec_clients import check_option_names
from dcpstore.testing.ranks import run_ranks

WRITE = WriteConfig(inline_bytes=64, object_bytes=4096, checksum_block_bytes=4096)
READ = ReadConfig(join_gap_bytes=64, request_bytes=4096, budget_bytes=16384, max_requests=4)


def save(size: int, url: str, coordinator: int = 0, **options: Any) -> list[Any]:
    def work(group: Any) -> Any:
        state = state_of(group.rank, size)
        return dcpstore.save(state, url, process_group=group, config=WRITE, **options)

    return run_ranks(size, work, coordinator=coordinator, deadline_s=60).values()


def load(size: int, url: str, variant: int, coordinator: int = 0, **options: Any) -> list[Any]:
    def work(group: Any) -> Any:
        state = wiped(state_of(group.rank, size, variant))
        result = dcpstore.load(state, url, process_group=group, config=READ, **options)
        assert_state(state, group.rank, size, variant)
        return result

    return run_ranks(size, work, coordinator=coordinator, deadline_s=60).values()


SIZES = (1, 2, 3, 8, 21, 64)


@pytest.fixture(scope="session")
def saved() -> dict[int, str]:
    """What N ranks saved, each another rank's work to coordinate."""
    urls = {size: f"memory://save-load-threads/{size}" for size in SIZES}
    for size, url in urls.items():
        results = save(size, url, coordinator=size // 2)
        assert len({result.save_id for result in results}) == 1
        assert results[0].num_keys == 8
    return urls


QUICK = {(1, 1), (1, 64), (64, 1), (2, 3), (3, 2), (8, 21), (21, 2), (21, 8)}
PAIRS = [
    pytest.param(*pair, marks=[] if pair in QUICK else [pytest.mark.campaign])
    for pair in product(SIZES, SIZES)
]


@pytest.mark.parametrize(("num_saved", "num_loaded"), PAIRS)
def test_any_number_of_ranks_loads_what_any_number_saved(
    saved: dict[int, str], num_saved: int, num_loaded: int
) -> None:
    variant = (num_saved + num_loaded) % 5
    results = load(num_loaded, saved[num_saved], variant, coordinator=num_loaded - 1)
    for result in results:
        assert len(result.loaded) == 8
        assert not result.missing
        assert not result.unexpected


@pytest.mark.parametrize("share", ["never", "always"])
def test_sharing_changes_nothing_that_is_loaded(saved: dict[int, str], share: str) -> None:
    for variant in range(5):
        load(6, saved[8], variant, share=share)


def test_tensors_cut_into_many_items_are_loaded_by_64_ranks() -> None:
    url = "memory://save-load-threads/cut"

    def work(group: Any) -> Any:
        planner = SavePlanner(max_item_bytes=600)
        return dcpstore.save(state_of(group.rank, 3), url, planner=planner, process_group=group)

    result = run_ranks(3, work).values()[0]
    assert result.num_items > 20 * result.num_keys
    load(64, url, 2)


def test_opening_a_store_compiles_nothing_in_which_threads_would_meet() -> None:
    compiled, is_watching = [], []

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if is_watching and event == "compile":
            compiled.append(args)

    sys.addaudithook(watch)  # for good, so it is told when to look
    for url in ("memory://compiled", "s3://compiled"):
        check_option_names(parse_location(url), {})  # imports its filesystem
        is_watching.append(True)
        check_option_names(parse_location(url), {})
        is_watching.clear()
    assert compiled == []


class PartSavePlanner(dcp.DefaultSavePlanner):
    """Torch's, which asks only DTensors for their shards."""

    def lookup_object(self, index: Any) -> Any:
        value = self.state_dict[index.fqn]
        is_part = isinstance(value, Part)
        return value.parts[tuple(index.offset)] if is_part else super().lookup_object(index)


class PartLoadPlanner(dcp.DefaultLoadPlanner):
    """As above."""

    def lookup_tensor(self, index: Any) -> Any:
        value = self.state_dict[index.fqn]
        is_part = isinstance(value, Part)
        return value.parts[tuple(index.offset)] if is_part else super().lookup_tensor(index)


@pytest.mark.parametrize(("num_saved", "num_loaded"), [(1, 5), (7, 2), (16, 16)])
def test_stock_planners_do_on_threads(num_saved: int, num_loaded: int) -> None:
    url = f"memory://save-load-threads/stock-{num_saved}"

    def saving(group: Any) -> Any:
        state = state_of(group.rank, num_saved)
        return dcpstore.save(state, url, planner=PartSavePlanner(), process_group=group)

    def loading(group: Any) -> Any:
        state = wiped(state_of(group.rank, num_loaded, 1))
        result = dcpstore.load(state, url, planner=PartLoadPlanner(), process_group=group)
        assert_state(state, group.rank, num_loaded, 1)
        return result

    run_ranks(num_saved, saving).values()
    for result in run_ranks(num_loaded, loading).values():
        assert not result.unexpected
    load(num_loaded, url, 3)
