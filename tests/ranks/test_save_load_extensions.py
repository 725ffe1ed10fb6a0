"""The extension patterns of torch's planner docstrings, on our planners and on torch's."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from typing import Any

import pytest
import save_load_ranks
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import LoadPlanner as AnyLoadPlanner
from torch.distributed.checkpoint.planner import SavePlanner as AnySavePlanner
from torch.distributed.checkpoint.planner import WriteItemType

import dcpstore
from dcpstore import LoadPlanner, ObjectStoreReader, SavePlanner
from dcpstore.testing.ranks import run_ranks

SIZE = 3


class Recipes:
    """The patterns, each on top of a save or load planner of either kind."""

    def __init__(self, save: type[AnySavePlanner], load: type[AnyLoadPlanner]) -> None:
        class RenameOnSave(save):
            def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
                renamed = {"foo_" + key: value for key, value in state_dict.items()}
                super().set_up_planner(renamed, storage_meta, is_coordinator)

        class RenameOnLoad(load):
            def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
                renamed = {"foo_" + key: value for key, value in state_dict.items()}
                super().set_up_planner(renamed, metadata, is_coordinator)
                self.own_state_dict = state_dict

            def load_bytes(self, read_item, value):
                key = read_item.dest_index.fqn.removeprefix("foo_")
                self.own_state_dict[key] = torch.load(value, weights_only=True)

        class Half(save):
            def create_local_plan(self):
                plan = super().create_local_plan()
                return replace(plan, items=[self._half(item) for item in plan.items])

            def _half(self, item):
                data = item.tensor_data
                if data is None:
                    return item
                properties = replace(data.properties, dtype=torch.float16)
                return replace(item, tensor_data=replace(data, properties=properties))

            def resolve_data(self, write_item):
                data = super().resolve_data(write_item)
                return data if write_item.type == WriteItemType.BYTE_IO else data.half()

        class Spread(save):
            def create_global_plan(self, all_plans):
                dealt = zip_longest(*[iter(all_plans[0].items)] * len(all_plans))
                columns = zip(*dealt, strict=True)
                plans = [
                    replace(plan, items=[item for item in items if item is not None])
                    for plan, items in zip(all_plans, columns, strict=True)
                ]
                return super().create_global_plan(plans)

        class ExtraData(save):
            def create_local_plan(self):
                plan = super().create_local_plan()
                self.paths = plan.planner_data
                return replace(plan, planner_data=f"from rank {self.rank}")

            def create_global_plan(self, all_plans):
                told = [plan.planner_data for plan in all_plans]
                usual = [replace(plan, planner_data=self.paths) for plan in all_plans]
                plans, metadata = super().create_global_plan(usual)
                return plans, replace(metadata, planner_data=told)

        self.plain_save, self.plain_load = save, load
        self.rename_on_save, self.rename_on_load = RenameOnSave, RenameOnLoad
        self.half, self.spread, self.extra_data = Half, Spread, ExtraData


OURS = Recipes(SavePlanner, LoadPlanner)
STOCK = Recipes(dcp.DefaultSavePlanner, dcp.DefaultLoadPlanner)


@pytest.fixture(params=[OURS, STOCK], ids=["ours", "torch's"])
def recipes(request) -> Recipes:
    return request.param


@pytest.fixture
def url(request, tmp_path) -> str:
    return str(tmp_path / "checkpoint")


def values() -> dict[str, Any]:
    """What DDP holds."""
    source = torch.Generator().manual_seed(1)
    state: dict[str, Any] = {f"w{n}": torch.randn(40, 30, generator=source) for n in range(6)}
    return state | {"step": 7}


def save(url: str, make_planner: Any) -> list[Any]:
    def work(group: Any) -> Any:
        planner = make_planner()
        planner.rank = group.rank
        return dcpstore.save(values(), url, planner=planner, process_group=group)

    return run_ranks(SIZE, work).values()


def load(url: str, make_planner: Any, expected: dict[str, Any]) -> list[Any]:
    def work(group: Any) -> Any:
        state = {
            key: torch.full_like(value, -1) if isinstance(value, torch.Tensor) else None
            for key, value in expected.items()
        }
        result = dcpstore.load(state, url, planner=make_planner(), process_group=group)
        for key, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert state[key].dtype == value.dtype
                assert torch.equal(state[key], value), f"{key} on rank {group.rank}"
            else:
                assert state[key] == value
        return result

    return run_ranks(SIZE, work).values()


def test_a_prefix_is_added_on_save_and_on_load(recipes: Recipes, url: str) -> None:
    save(url, recipes.rename_on_save)
    saved = ObjectStoreReader(url).read_metadata().state_dict_metadata
    assert set(saved) == {"foo_" + key for key in values()}
    result = load(url, recipes.rename_on_load, values())[0]
    assert set(result.loaded) == set(saved)
    assert not result.unexpected


def test_tensors_are_saved_in_half_precision(recipes: Recipes, url: str) -> None:
    save(url, recipes.half)
    half = {k: v.half() if isinstance(v, torch.Tensor) else v for k, v in values().items()}
    load(url, recipes.plain_load, half)
    widened = {k: v.float() if isinstance(v, torch.Tensor) else v for k, v in half.items()}
    results = load(url, recipes.plain_load, widened)
    if recipes is OURS:
        assert results[1].cast["w0"] == (torch.float16, torch.float32)


def test_what_ddp_holds_is_written_by_all_ranks_in_turn(recipes: Recipes, url: str) -> None:
    save(url, recipes.spread)
    stored = ObjectStoreReader(url).read_metadata().storage_data
    writers = {item.key.removeprefix("__").partition("_")[0] for item in stored.values()}
    assert writers == {"0", "1", "2"}
    load(url, recipes.plain_load, values())


def test_data_of_each_rank_lands_in_the_metadata(recipes: Recipes, url: str) -> None:
    save(url, recipes.extra_data)
    told = ObjectStoreReader(url).read_metadata().planner_data
    assert told == ["from rank 0", "from rank 1", "from rank 2"]
    load(url, recipes.plain_load, values())


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("is_stock", [False, True], ids=["ours", "torch's"])
def test_meta_tensors_get_memory_and_values(pool, url: str, is_stock: bool) -> None:
    # On processes: torch's planner asks the process group where to put them.
    save(url, SavePlanner)
    pool.run(2, save_load_ranks.load_into_meta_tensors, url, values(), is_stock)


class Materialise(LoadPlanner):
    """Brings memory of its own and hands it over when it is filled, as in the docstring."""

    def resolve_tensor(self, read_item):
        return torch.empty_like(super().resolve_tensor(read_item))

    def commit_tensor(self, read_item, tensor):
        self.original_state_dict[read_item.dest_index.fqn] = tensor


def test_a_planner_brings_its_own_memory(url: str) -> None:
    save(url, SavePlanner)
    load(url, Materialise, values())
