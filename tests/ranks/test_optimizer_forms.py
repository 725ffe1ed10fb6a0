"""The forms that saved optimizers have: by name, by number, flattened, nested, old, foreign."""

from __future__ import annotations

from typing import Any

import optimizer_forms as forms
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import dcpstore
from dcpstore.testing import MotoServer

pytestmark = pytest.mark.xdist_group("ranks")


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


def stepped(model: nn.Module, kind: Any = torch.optim.Adam, **more: Any) -> torch.optim.Optimizer:
    optimizer = kind(model.parameters(), lr=0.5, **more)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return optimizer


def load(model: nn.Module, key: str, source: Any, **more: Any) -> Any:
    return dcpstore.load_sharded_optimizer_state_dict(model.state_dict(), key, source, **more)


def assert_same(got: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert list(got) == list(expected) or set(got) == set(expected)
        for key, value in expected.items():
            assert_same(got[key], value)
    elif isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
    else:
        assert got == expected


@pytest.mark.parametrize("key", ["optim", "app.optim"])
def test_an_optimizer_alone_or_in_an_app_comes_back_as_it_was(tmp_path, key: str) -> None:
    model = net()
    saved = get_optimizer_state_dict(model, stepped(model))
    top = {"optim": saved} if key == "optim" else {"app": {"optim": saved, "step": 3}}
    dcpstore.save(top, str(tmp_path))
    loaded = load(net(), key, str(tmp_path))
    got = loaded["optim"] if key == "optim" else loaded["app"]["optim"]
    assert_same(got, saved)
    assert sorted(loaded) == [key.partition(".")[0]]
    assert loaded.result.unexpected == ()
    assert loaded.result.missing == ()
    assert len(loaded.result.loaded) == 4 * 3 + len(saved["param_groups"][0])


def test_an_optimizer_that_is_all_of_a_checkpoint_has_the_empty_key(tmp_path) -> None:
    model = net()
    saved = get_optimizer_state_dict(model, stepped(model))
    dcpstore.save(saved, str(tmp_path))
    assert_same(load(net(), "", str(tmp_path)), saved)


def test_a_flattened_optimizer_comes_back_flattened(tmp_path) -> None:
    model, flat = net(), StateDictOptions(flatten_optimizer_state_dict=True)
    optimizer = stepped(model)
    saved = get_optimizer_state_dict(model, optimizer, options=flat)
    dcpstore.save({"optim": saved}, str(tmp_path))
    again = net()
    got = load(again, "optim", str(tmp_path))
    assert_same(got["optim"], saved)
    other = torch.optim.Adam(again.parameters(), lr=9.0)
    set_optimizer_state_dict(again, other, got["optim"], options=flat)
    assert_same(other.state_dict(), optimizer.state_dict())
    with pytest.raises(dcpstore.NotFoundError, match="it has 'optim'"):
        load(again, "optimizer", str(tmp_path))


def test_a_flattened_state_may_have_a_dot_in_its_name(tmp_path) -> None:
    flat = {"state.0.weight.inner.mean": torch.ones(5, 3), "param_groups.0.weight.lr": 0.5}
    dcpstore.save({"optim": flat}, str(tmp_path))
    got = load(net(), "optim", str(tmp_path))
    assert_same(got["optim"], flat)
    assert got.result.unexpected == ()


def test_a_plain_optimizers_numbers_are_numbers_again(tmp_path) -> None:
    optimizer = stepped(net(), torch.optim.AdamW, amsgrad=True)
    dcpstore.save({"optim": optimizer.state_dict()}, str(tmp_path))
    got = load(net(), "optim", str(tmp_path))
    assert_same(got["optim"], optimizer.state_dict())
    other = torch.optim.AdamW(net().parameters(), lr=9.0)
    other.load_state_dict(got["optim"])
    assert_same(other.state_dict(), optimizer.state_dict())


def test_numbers_need_names_where_the_model_is_sharded(pool, tmp_path) -> None:
    optimizer = stepped(net())
    for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
        optimizer.state[parameter]["exp_avg"].fill_(number + 1)
    dcpstore.save({"optim": optimizer.state_dict()}, str(tmp_path))
    for told in pool.run(2, forms.load_numbered, str(tmp_path)):
        assert "parameter_names=[name for name, _ in model.named_parameters()]" in told


def test_an_optimizer_without_state_has_an_empty_one(tmp_path) -> None:
    model = net()
    saved = get_optimizer_state_dict(model, stepped(model, torch.optim.SGD))
    assert not saved["state"]
    dcpstore.save({"optim": saved}, str(tmp_path))
    got = load(net(), "optim", str(tmp_path))
    assert_same(got["optim"], saved)
    assert got.result.missing == tuple(f"optim.state.{name}" for name in model.state_dict())


def test_state_of_parameters_that_the_model_lacks_is_named_and_not_read(tmp_path) -> None:
    model = net()
    dcpstore.save({"optim": get_optimizer_state_dict(model, stepped(model))}, str(tmp_path))
    half = {name: one for name, one in model.state_dict().items() if name.startswith("0.")}
    half["new"] = torch.zeros(3)
    half["count"] = torch.zeros(3, dtype=torch.int64)
    got = dcpstore.load_sharded_optimizer_state_dict(half, "optim", str(tmp_path))
    assert set(got["optim"]["state"]) == {"0.weight", "0.bias"}
    assert got.result.missing == ("optim.state.new",)
    assert got.result.unexpected == tuple(
        sorted(
            f"optim.state.1.{parameter}.{name}"
            for parameter in ("weight", "bias")
            for name in ("step", "exp_avg", "exp_avg_sq")
        )
    )


class HalfPlanner(DefaultLoadPlanner):
    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        items = [item for item in plan.items if "exp_avg_sq" not in item.storage_index.fqn]
        return dcp.LoadPlan([item for item in items if "lr" not in item.storage_index.fqn])


@pytest.mark.parametrize(
    "planner", [dcpstore.LoadPlanner(exclude=["*.exp_avg_sq", "*.lr"]), HalfPlanner()]
)
def test_what_a_planner_leaves_out_is_no_state_and_is_named(tmp_path, planner: Any) -> None:
    model = net()
    saved = get_optimizer_state_dict(model, stepped(model))
    dcpstore.save({"optim": saved}, str(tmp_path))
    got = load(net(), "optim", str(tmp_path), planner=planner)
    for state in saved["state"].values():
        del state["exp_avg_sq"]
    del saved["param_groups"][0]["lr"]
    assert_same(got["optim"], saved)
    left_out = [f"optim.state.{name}.exp_avg_sq" for name in saved["state"]]
    assert got.result.unexpected == tuple(sorted(["optim.param_groups.0.lr", *left_out]))


def test_names_of_wrappers_do_not_matter(tmp_path) -> None:
    model = net()
    saved = get_optimizer_state_dict(model, stepped(model))
    dcpstore.save({"optim": saved}, str(tmp_path))
    wrapped = {f"_orig_mod.module.{name}": one for name, one in model.state_dict().items()}
    got = dcpstore.load_sharded_optimizer_state_dict(wrapped, "optim", str(tmp_path))
    assert_same(got["optim"], saved)
    assert got.result.missing == ()


def test_the_saved_dtype_is_kept_and_scalars_lie_on_the_host(tmp_path) -> None:
    model = net().bfloat16()
    state = {
        name: {"exp_avg": one.detach().float(), "step": torch.tensor(3.0), "words": ["a", 1]}
        for name, one in model.named_parameters()
    }
    groups = [{"lr": torch.tensor(0.5), "params": list(state)}]
    dcpstore.save({"optim": {"state": state, "param_groups": groups}}, str(tmp_path))
    got = load(model, "optim", str(tmp_path))
    assert_same(got["optim"]["state"], state)
    assert got["optim"]["param_groups"][0]["lr"] == 0.5


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_state_that_is_whole_in_one_value_comes_back(tmp_path) -> None:
    """As a planner with flatten_state_dict=False leaves it."""
    saved = {"state": {}, "param_groups": [{"lr": 0.5}]}
    dcp.save(
        {"optim": saved},
        storage_writer=FileSystemWriter(tmp_path),
        planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
        no_dist=True,
    )
    assert load(net(), "optim", str(tmp_path)) == {"optim": saved}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("planner", [None, DefaultLoadPlanner, dcpstore.LoadPlanner])
@pytest.mark.parametrize("opener", [FileSystemReader, dcpstore.ObjectStoreReader, str])
def test_any_reader_and_planner_will_do(tmp_path, opener: Any, planner: Any) -> None:
    model = net()
    saved = get_optimizer_state_dict(model, stepped(model))
    dcp.save({"optim": saved}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    got = load(net(), "optim", opener(tmp_path), planner=planner and planner())
    assert_same(got["optim"], saved)


def test_scalars_of_a_layout_are_told_from_counts(pool, tmp_path) -> None:
    state = {"scalar": {"exp_avg": torch.tensor(0.25), "step": torch.tensor(3.0)}}
    dcpstore.save({"optim": {"state": state, "param_groups": [{"lr": 1}]}}, str(tmp_path))
    pool.run(2, forms.load_scalars, str(tmp_path))


@pytest.mark.parametrize("by", ["rows", "columns"])
def test_shards_inside_a_tensor_parallel_slice_are_read_from_there(pool, tmp_path, by: str) -> None:
    url = str(tmp_path)
    pool.run(4, forms.save_nested, by, url)
    total = sum(one.numel() * 4 for scale in (2, 3) for one in forms.values(scale).values())
    for needed, fetched in pool.run(4, forms.load_nested, by, url, None):
        assert 0.2 * total < needed < 0.3 * total, "each rank reads its own quarter"
        assert fetched <= 1.05 * needed
    for num_resolved in pool.run(4, forms.load_nested_with_planners, by, url):
        assert num_resolved >= 6, "the caller's planner was not asked"


def test_a_plain_checkpoint_loads_into_tensor_parallel_slices(pool, tmp_path) -> None:
    state = {
        name: {
            "exp_avg": forms.values(2)[name],
            "exp_avg_sq": forms.values(3)[name],
            "step": torch.tensor(4.0),
        }
        for name in forms.values(1)
    }
    optimizer = {"state": state, "param_groups": forms.GROUP}
    dcpstore.save({"optimizer": optimizer}, str(tmp_path), config=forms.WRITE)
    pool.run(4, forms.load_nested, "columns", str(tmp_path), None)
    pool.run(2, forms.load_for_two_equal_meshes, str(tmp_path))


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_metadata_is_read_once_and_each_byte_once(
    pool, bucket: str, moto_server: MotoServer, num_ranks: int
) -> None:
    url, options = f"{bucket}/optimizer-counted/{num_ranks}", moto_server.storage_options()
    state = {
        name: {"exp_avg": forms.values(2)[name], "step": torch.tensor(4.0)}
        for name in forms.values(1)
    }
    saved = {"optimizer": {"state": state, "param_groups": forms.GROUP}, "model": forms.values(1)}
    dcpstore.save(saved, url, storage_options=options, config=forms.WRITE)
    moto_server.clear_requests()
    results = pool.run(num_ranks, forms.load_counted, url, options)
    requests = moto_server.requests()
    rest = [one.key for one in requests if not one.key.endswith(".distcp")]
    assert {one.operation for one in requests} == {"GetObject"}
    assert [key.rpartition("/")[2] for key in rest] == [".metadata"]
    needed = sum(one.numel() * 4 for one in forms.values(2).values())
    assert needed <= results[0].job.fetched_bytes <= 1.05 * needed
    assert not any("model" in key for key in results[0].unexpected)
