"""What each rank does in the round trips of an optimizer: train a step, save, begin anew, load."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor

import dcpstore

CPU = torch.device("cpu")
WRITE = dcpstore.WriteConfig(inline_bytes=8)  # what is compared was read from objects
Trainer = tuple[nn.Module, torch.optim.Optimizer]


class ThreeLayers(nn.Module):
    """Its dimensions are the number of ranks and multiples of it."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.net1 = nn.Sequential(nn.Linear(num_ranks, 2 * num_ranks), nn.ReLU())
        self.net2 = nn.Linear(2 * num_ranks, 3 * num_ranks)
        self.net3 = nn.Linear(3 * num_ranks, 4 * num_ranks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net3(self.net2(self.net1(x)))


class NotingPlanner(DefaultLoadPlanner):
    """A planner of a user's, by torch's own; it says what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def create_local_plan(self) -> LoadPlan:
        self.calls.append("create_local_plan")
        return super().create_local_plan()

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        self.calls.append("resolve_tensor")
        return super().resolve_tensor(read_item)


def planner_of(kind: str) -> Any:
    return {"none": lambda: None, "own": NotingPlanner, "ours": dcpstore.LoadPlanner}[kind]()


def quiet(function: Any, *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args)


def fsdp1(kinds: list[str], url: str, options: dict[str, Any]) -> dict[str, list[str]]:
    return quiet(_fsdp1, kinds, url, options)


def _fsdp1(kinds: list[str], url: str, options: dict[str, Any]) -> dict[str, list[str]]:
    """Return what each kind of planner was asked for, after every entry was compared."""
    model, optimizer = _wrapped(0)
    _one_step(model, optimizer)
    saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    both = {"model": model.state_dict(), "optim": saved}
    dcpstore.save(both, url, storage_options=options, config=WRITE)
    return _resume_all((model, optimizer), kinds, lambda p: _fsdp1_from(saved, p, url, options))


def _resume_all(
    trained: Trainer, kinds: list[str], resume: Callable[[Any], Trainer]
) -> dict[str, list[str]]:
    """Resume with a planner of each kind, and compare; return what was called of each."""
    planners = {kind: planner_of(kind) for kind in kinds}
    _go_on_alike(trained, [resume(planner) for planner in planners.values()])
    return {kind: getattr(planner, "calls", []) for kind, planner in planners.items()}


def _fsdp1_from(saved: dict[str, Any], planner: Any, url: str, options: dict[str, Any]) -> Trainer:
    model, optimizer = _wrapped(1)
    assert not optimizer.state, "nothing has run a step yet"
    weights = {"model": model.state_dict()}
    dcpstore.load(weights, url, storage_options=options)
    model.load_state_dict(weights["model"])
    state = dcpstore.load_sharded_optimizer_state_dict(
        model.state_dict(), "optim", url, planner=planner, storage_options=options
    )
    assert state["optim"]["param_groups"] == saved["param_groups"]
    flat = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state["optim"])
    optimizer.load_state_dict(flat)
    compare(state["optim"]["state"], saved["state"], ShardedTensor)
    again = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    compare(again["state"], saved["state"], ShardedTensor)
    return model, optimizer


def _wrapped(seed: int) -> tuple[FullyShardedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = FullyShardedDataParallel(
        ThreeLayers(dist.get_world_size()), device_id=CPU, use_orig_params=bool(seed % 2)
    )
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def fsdp2(kinds: list[str], url: str, options: dict[str, Any]) -> dict[str, list[str]]:
    return quiet(_fsdp2, kinds, url, options)


def _fsdp2(kinds: list[str], url: str, options: dict[str, Any]) -> dict[str, list[str]]:
    model, optimizer = _fully_sharded(0)
    _one_step(model, optimizer)
    saved = get_optimizer_state_dict(model, optimizer)
    weights = {"model": get_model_state_dict(model), "optim": saved}
    dcpstore.save(weights, url, storage_options=options, config=WRITE)
    return _resume_all((model, optimizer), kinds, lambda p: _fsdp2_from(saved, p, url, options))


def _fsdp2_from(saved: dict[str, Any], planner: Any, url: str, options: dict[str, Any]) -> Trainer:
    model, optimizer = _fully_sharded(1)
    assert not optimizer.state, "nothing has run a step yet"
    weights = {"model": get_model_state_dict(model)}
    dcpstore.load(weights, url, storage_options=options)
    set_model_state_dict(model, weights["model"])
    state = dcpstore.load_sharded_optimizer_state_dict(
        model.state_dict(), "optim", url, planner=planner, storage_options=options
    )
    assert state["optim"]["param_groups"] == saved["param_groups"]
    compare(state["optim"]["state"], saved["state"], DTensor)
    set_optimizer_state_dict(model, optimizer, state["optim"])
    compare(get_optimizer_state_dict(model, optimizer)["state"], saved["state"], DTensor)
    return model, optimizer


def _fully_sharded(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    size = dist.get_world_size()
    model = ThreeLayers(size)
    mesh = init_device_mesh("cpu", (size,))
    fully_shard(model.net2, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def _one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    size = dist.get_world_size()
    optimizer.zero_grad()
    x = torch.arange(8.0 * size).reshape(8, size) / (1 + dist.get_rank())
    model(x).square().mean().backward()
    optimizer.step()


def _go_on_alike(trained: Trainer, resumed: list[Trainer]) -> None:
    for model, optimizer in (trained, *resumed):
        _one_step(model, optimizer)
    expected = trained[0].state_dict()
    for model, _ in resumed:
        for a, b in zip(expected.values(), model.state_dict().values(), strict=True):
            _compare_tensors(b, a, type(a))


def compare(got: dict[str, Any], expected: dict[str, Any], kind: type) -> None:
    """Compare every entry: sharded tensor against sharded tensor, the rest by value."""
    assert got.keys() == expected.keys()
    for parameter, states in expected.items():
        assert got[parameter].keys() == states.keys()
        for name, value in states.items():
            is_counter = name == "step"
            assert isinstance(value, kind) != is_counter
            _compare_tensors(got[parameter][name], value, torch.Tensor if is_counter else kind)


def _compare_tensors(got: Any, expected: Any, kind: type) -> None:
    assert isinstance(got, kind), f"{type(got)} instead of {kind}"
    assert got.dtype == expected.dtype
    if isinstance(expected, ShardedTensor):
        assert got.metadata() == expected.metadata()
        shards = zip(got.local_shards(), expected.local_shards(), strict=True)
        for one, other in shards:
            assert one.metadata == other.metadata
            assert torch.equal(one.tensor, other.tensor)
    elif isinstance(expected, DTensor):
        assert got.placements == expected.placements
        assert got.device_mesh == expected.device_mesh
        assert torch.equal(got.to_local(), expected.to_local())
    else:
        assert torch.equal(got, expected)
