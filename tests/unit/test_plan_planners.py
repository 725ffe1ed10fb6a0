from __future__ import annotations

import dataclasses
import io
import pickle
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from dcpstore import ConfigError, CorruptError, IncompatibleError, ObjectStoreReader
from dcpstore.plan import LoadPlanner, SavePlanner, find_object
from dcpstore.write.writer import ObjectStoreWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(state: dict[str, Any], url: str, planner: Any = None) -> None:
    dcp.save(state, storage_writer=ObjectStoreWriter(url), planner=planner or SavePlanner())


def load(state: dict[str, Any], url: str, planner: Any = None) -> LoadPlanner:
    planner = planner or LoadPlanner()
    dcp.load(state, storage_reader=ObjectStoreReader(url), planner=planner)
    return planner


def example() -> dict[str, Any]:
    return {
        "model": {"w": torch.arange(24.0).reshape(6, 4), "b": torch.ones(3)},
        "optim": {"step": torch.tensor(7), "groups": [{"lr": 0.5, "betas": [0.9, 0.99]}]},
        "epoch": 3,
    }


def blank() -> dict[str, Any]:
    return {
        "model": {"w": torch.zeros(6, 4), "b": torch.zeros(3)},
        "optim": {"step": torch.tensor(0), "groups": [{"lr": 0.0, "betas": [0.0, 0.0]}]},
        "epoch": 0,
    }


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
    else:
        assert one == other


@pytest.mark.parametrize("save_stock", [True, False])
@pytest.mark.parametrize("load_stock", [True, False])
def test_our_planners_and_stock_ones_read_each_other(
    tmp_path: Path, save_stock: bool, load_stock: bool
) -> None:
    save(example(), str(tmp_path), dcp.DefaultSavePlanner() if save_stock else SavePlanner())
    state = blank()
    load(state, str(tmp_path), dcp.DefaultLoadPlanner() if load_stock else LoadPlanner())
    assert_same(state, example())


def test_a_huge_tensor_is_cut_into_items_and_comes_back_whole(tmp_path: Path) -> None:
    planner = SavePlanner(max_item_bytes=40)
    save(example(), str(tmp_path), planner)
    metadata = ObjectStoreReader(tmp_path).read_metadata()
    chunks = metadata.state_dict_metadata["model.w"].chunks
    assert [tuple(c.sizes) for c in chunks] == [(2, 4), (2, 4), (2, 4)]
    for load_planner in (LoadPlanner(), dcp.DefaultLoadPlanner()):
        state = blank()
        load(state, str(tmp_path), load_planner)
        assert_same(state, example())


def test_a_row_larger_than_an_item_is_cut_along_the_next_dimension(tmp_path: Path) -> None:
    save({"w": torch.arange(12.0).reshape(2, 6)}, str(tmp_path), SavePlanner(max_item_bytes=8))
    state = {"w": torch.zeros(2, 6)}
    load(state, str(tmp_path))
    assert torch.equal(state["w"], torch.arange(12.0).reshape(2, 6))


def test_keys_are_included_and_excluded_on_save_and_on_load(tmp_path: Path) -> None:
    save(example(), str(tmp_path), SavePlanner(include=["model.*", "epoch"], exclude=["*.b"]))
    saved = ObjectStoreReader(tmp_path).read_metadata().state_dict_metadata
    assert set(saved) == {"model.w", "epoch"}
    state = blank()
    load(state, str(tmp_path), LoadPlanner(include=["model.w"]))
    assert torch.equal(state["model"]["w"], example()["model"]["w"])
    assert state["epoch"] == 0


def test_keys_are_renamed_on_save_and_back_on_load(tmp_path: Path) -> None:
    rename = {"model.": "backbone.", "epoch": "meta.epoch"}
    save(example(), str(tmp_path), SavePlanner(rename=rename))
    saved = ObjectStoreReader(tmp_path).read_metadata().state_dict_metadata
    assert {"backbone.w", "backbone.b", "meta.epoch"} <= set(saved)
    state = blank()
    load(state, str(tmp_path), LoadPlanner(rename=rename))
    assert_same(state, example())


def test_a_rename_that_merges_two_keys_is_refused(tmp_path: Path) -> None:
    with pytest.raises(dcp.api.CheckpointException, match=r"maps both .*'model.w'.* and"):
        save(example(), str(tmp_path), SavePlanner(rename={"model.w": "x", "model.b": "x"}))
    assert not list(tmp_path.iterdir())


def test_missing_keys_are_named_before_anything_is_read(tmp_path: Path) -> None:
    save({"model": {"w": torch.ones(2)}, "old": 1}, str(tmp_path))
    state = {"model": {"w": torch.zeros(2), "new": torch.zeros(1)}}
    with pytest.raises(dcp.api.CheckpointException, match=r"'model.new' is not in the check"):
        load(state, str(tmp_path))
    assert torch.equal(state["model"]["w"], torch.zeros(2))


def test_strictness_is_per_prefix_and_the_report_names_every_key(tmp_path: Path) -> None:
    save({"model": {"w": torch.ones(2)}, "old": 1}, str(tmp_path))
    state = {"model": {"w": torch.zeros(2, dtype=torch.float64)}, "head": {"new": torch.zeros(1)}}
    planner = load(state, str(tmp_path), LoadPlanner(strict={"head.": False}))
    assert planner.report.loaded == ["model.w"]
    assert planner.report.missing == ["head.new"]
    assert planner.report.unexpected == ["old"]
    assert planner.report.cast == {"model.w": (torch.float32, torch.float64)}
    with pytest.raises(dcp.api.CheckpointException, match=r"head\.new"):
        load(state, str(tmp_path), LoadPlanner(strict={"model.": False}))


def test_shape_and_kind_are_compared_before_anything_is_read(tmp_path: Path) -> None:
    save({"a": torch.ones(2, 3), "b": torch.ones(1), "c": 5}, str(tmp_path))
    state = {"a": torch.zeros(3, 2), "b": 0, "c": torch.zeros(1)}
    with pytest.raises(dcp.api.CheckpointException) as caught:
        load(state, str(tmp_path))
    text = str(caught.value)
    assert "shape (2, 3), and the state dict has (3, 2)" in text
    assert "'b' is saved as a tensor" in text
    assert "'c' is saved as a value" in text


class Canary:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("sung",)


def test_a_value_that_would_run_code_is_refused_unless_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save({"value": Canary()}, str(tmp_path), SavePlanner(allow_pickle=True))
    with pytest.raises(dcp.api.CheckpointException, match="it was not"):
        load({"value": 0}, str(tmp_path))
    assert "sung" not in capsys.readouterr().out
    load({"value": 0}, str(tmp_path), LoadPlanner(allow_pickle=True))
    assert "sung" in capsys.readouterr().out


def test_meta_tensors_get_memory_and_values(tmp_path: Path) -> None:
    save({"w": torch.arange(4.0)}, str(tmp_path))
    state = {"w": torch.empty(4, device="meta")}
    load(state, str(tmp_path))
    assert torch.equal(state["w"], torch.arange(4.0))


def test_a_checkpoint_with_torch_2_3_keys_loads(tmp_path: Path) -> None:
    dcp.save(
        {"optim.groups": [1, 2]},
        storage_writer=ObjectStoreWriter(tmp_path),
        planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
    )
    state: dict[str, Any] = {"optim": {"groups": [0, 0]}}
    load(state, str(tmp_path))
    assert state == {"optim": {"groups": [1, 2]}}


# --- the patterns of torch's planner docstrings ----------------------------------------


class PrefixSavePlanner(SavePlanner):
    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        prefixed = {"foo_" + k: v for k, v in state_dict.items()}
        super().set_up_planner(prefixed, storage_meta, is_coordinator)


class PrefixLoadPlanner(LoadPlanner):
    def set_up_planner(
        self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        self.caller_state_dict = state_dict
        prefixed = {"foo_" + k: v for k, v in state_dict.items()}
        super().set_up_planner(prefixed, metadata, is_coordinator)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        super().load_bytes(read_item, value)
        fqn = read_item.dest_index.fqn
        self.caller_state_dict[fqn.removeprefix("foo_")] = self.state_dict[fqn]


def test_pattern_prefix_on_save_and_on_load(tmp_path: Path) -> None:
    save({"w": torch.ones(3), "n": 4}, str(tmp_path), PrefixSavePlanner())
    assert set(ObjectStoreReader(tmp_path).read_metadata().state_dict_metadata) == {
        "foo_w",
        "foo_n",
    }
    state = {"w": torch.zeros(3), "n": 0}
    load(state, str(tmp_path), PrefixLoadPlanner())
    assert_same(state, {"w": torch.ones(3), "n": 4})


class HalfPlanner(SavePlanner):
    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        return data if write_item.type == WriteItemType.BYTE_IO else data.to(torch.float16)


def test_pattern_cast_to_half_on_save(tmp_path: Path) -> None:
    save({"w": torch.arange(5.0)}, str(tmp_path), HalfPlanner())
    saved = ObjectStoreReader(tmp_path).read_metadata().state_dict_metadata["w"]
    assert saved.properties.dtype == torch.float16
    state = {"w": torch.zeros(5)}
    load(state, str(tmp_path))
    assert torch.equal(state["w"], torch.arange(5.0))


class SpreadPlanner(SavePlanner):
    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        iters = [iter(all_plans[0].items)] * len(all_plans)
        rows = zip(*zip_longest(*iters), strict=True)
        parts = [[item for item in row if item is not None] for row in rows]
        plans = [dataclasses.replace(p, items=i) for p, i in zip(all_plans, parts, strict=True)]
        return super().create_global_plan(plans)


def test_pattern_spread_a_replicated_state_over_ranks() -> None:
    state = {str(i): torch.ones(4) for i in range(7)}
    planners = [SpreadPlanner() for _ in range(3)]
    plans = []
    for rank, planner in enumerate(planners):
        planner.set_up_planner(state, None, rank == 0)
        plans.append(planner.create_local_plan())
    spread, metadata = planners[0].create_global_plan(plans)
    assert [len(plan.items) for plan in spread] == [3, 2, 2]
    assert set(metadata.state_dict_metadata) == set(state)


class ExtraDataPlanner(SavePlanner):
    def create_local_plan(self) -> SavePlan:
        return dataclasses.replace(super().create_local_plan(), planner_data="per-rank-data")

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        bare = [dataclasses.replace(plan, planner_data=None) for plan in all_plans]
        plans, metadata = super().create_global_plan(bare)
        merged = [plan.planner_data for plan in all_plans]
        return plans, dataclasses.replace(metadata, planner_data=merged)


def test_pattern_extra_data_is_merged_into_the_metadata(tmp_path: Path) -> None:
    save({"w": torch.ones(2)}, str(tmp_path), ExtraDataPlanner())
    assert ObjectStoreReader(tmp_path).read_metadata().planner_data == ["per-rank-data"]


# --- lookups ------------------------------------------------------------------------------


def test_a_value_and_a_tensor_are_found() -> None:
    state = {"n": 3, "w": torch.ones(2, 2)}
    assert find_object(state, MetadataIndex("n")) == 3
    assert find_object(state, MetadataIndex("w")) is state["w"]
    assert find_object(state, MetadataIndex("w", [0, 0])) is state["w"]


def test_a_part_of_a_tensor_is_found_by_offset_and_size() -> None:
    state = {"w": torch.arange(12).reshape(4, 3)}
    part = find_object(state, MetadataIndex("w", [2, 0]), [1, 3])
    assert part.tolist() == [[6, 7, 8]]


@pytest.mark.parametrize(
    ("index", "says"),
    [
        (MetadataIndex("model.wieght"), "similar: 'model.weight'"),
        (MetadataIndex("model.weight", [5, 0]), r"no chunk at \(5, 0\) .* it holds \(4, 3\) at"),
        (MetadataIndex("n", [0]), "is a int, so it has no chunk"),
    ],
)
def test_a_lookup_that_fails_names_what_there_is(index: MetadataIndex, says: str) -> None:
    state = {"model.weight": torch.zeros(4, 3), "n": 3}
    with pytest.raises(IncompatibleError, match=says):
        find_object(state, index)


class Blocks(torch.Tensor):
    """A tensor of DCP's checkpointable kind: two blocks of rows, held on this rank."""

    def __create_chunk_list__(self) -> list[Any]:
        half = self.shape[0] // 2
        chunk = dcp.metadata.ChunkStorageMetadata
        sizes = torch.Size([half, *self.shape[1:]])
        return [chunk(torch.Size([at, 0]), sizes) for at in (0, half)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        half = self.shape[0] // 2
        return self.as_subclass(torch.Tensor)[index.offset[0] : index.offset[0] + half]


def test_chunks_behind_checkpointable_hooks_are_found_by_hint_and_by_offset() -> None:
    state = {"w": torch.arange(8).reshape(4, 2).as_subclass(Blocks)}
    assert find_object(state, MetadataIndex("w", [2, 0], 1)).tolist() == [[4, 5], [6, 7]]
    assert find_object(state, MetadataIndex("w", [2, 0], 0)).tolist() == [[4, 5], [6, 7]]
    assert find_object(state, MetadataIndex("w", [3, 0]), [1, 2]).tolist() == [[6, 7]]
    with pytest.raises(IncompatibleError, match="is sharded and no offset was given"):
        find_object(state, MetadataIndex("w"))


def test_knobs_are_checked() -> None:
    with pytest.raises(ConfigError, match="max_item_bytes"):
        SavePlanner(max_item_bytes=0)


def test_errors_of_values_pickle() -> None:
    error = CorruptError("text", fqn="x")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.fqn) == ("text", "x")
