"""One optimizer in every layout, with the values that it has in a process alone.

The net is linear, its weights and inputs are small whole numbers, and every rank has the same
data. So gradients are exact in any order of sums, and after a step each layout holds the very
bits that the plain optimizer does. `load_all` compares with those, by DTensor's and ShardedTensor's
own idea of where an element is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Placed
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import dcpstore

__all__ = ["LAYOUTS", "NEEDS_PAIRS", "OPTIMIZERS", "load_all", "save_all"]

CPU = torch.device("cpu")
# Next to nothing lies in the manifest, so that what is compared was read from objects.
WRITE = dcpstore.WriteConfig(inline_bytes=8, object_bytes=2048, checksum_block_bytes=4096)
STEPPED = 1


class Net(nn.Module):
    """Rows that divide by little, a parameter of one element, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 12)
        self.mid = nn.Linear(12, 8)
        self.down = nn.Linear(8, 5, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in self.parameters():
                whole = torch.randint(-2, 4, parameter.shape, generator=generator)
                parameter.copy_(whole.float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.mid(self.up(x))) * self.scale + self.frozen


class RowMean(torch.optim.Optimizer):
    """Keeps a number per row, a count on the host, a word, and nothing of its parameter's shape."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.25})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, grad = self.state[parameter], parameter.grad
                rows = grad.abs().amax(dim=1) if grad.dim() > 1 else grad.abs()
                state["rows"] = rows
                if grad.dim() > 1:
                    state["columns"] = whole_of(grad).abs().amax(dim=0, keepdim=True)
                state["step"] = state.get("step", 0) + 1
                state["kind"] = "rows"
                parameter.add_(grad, alpha=-group["lr"])


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda params: torch.optim.Adam(params, lr=0.5),
    "amsgrad": lambda params: torch.optim.AdamW(params, lr=0.5, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.5),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.5),
    "rows": RowMean,
}


def trained(model: nn.Module, kind: str, num_steps: int) -> torch.optim.Optimizer:
    """Make the optimizer and take steps, each from the same gradients."""
    optimizer = OPTIMIZERS[kind]([p for p in model.parameters() if p.requires_grad])
    for _ in range(num_steps):
        x = torch.arange(-9, 9).reshape(3, 6).float()
        model(x).sum().backward()
        optimizer.step()
    return optimizer


def grid() -> tuple[int, int]:
    size = dist.get_world_size()
    return (size // 2, 2) if size % 2 == 0 else (size, 1)


def plain() -> nn.Module:
    return Net()


def replicated() -> nn.Module:
    return nn.parallel.DistributedDataParallel(Net())


def fsdp1() -> nn.Module:
    model = FullyShardedDataParallel(Net(), device_id=CPU, use_orig_params=True)
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    return model


def fsdp1_hybrid() -> nn.Module:
    mesh = init_device_mesh("cpu", grid(), mesh_dim_names=("replicate", "shard"))
    model = FullyShardedDataParallel(
        Net(),
        device_id=CPU,
        use_orig_params=True,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=mesh,
    )
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    return model


def tensor_parallel(mesh: Any) -> nn.Module:
    return parallelize_module(Net(), mesh, {"up": ColwiseParallel(), "mid": RowwiseParallel()})


def fsdp1_tp() -> nn.Module:
    # FSDP1 does not work over tensor parallelism where it has but one rank itself.
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    model = FullyShardedDataParallel(
        tensor_parallel(mesh["tp"]), device_id=CPU, use_orig_params=True, device_mesh=mesh["dp"]
    )
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    return model


def fsdp2() -> nn.Module:
    model = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.mid, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp2_columns() -> nn.Module:
    size = dist.get_world_size()

    def by_columns(parameter: nn.Parameter) -> Placed:
        is_even = parameter.dim() > 1 and parameter.size(1) % size == 0
        return Placed(int(is_even))  # FSDP2 cuts uneven parameters by rows only

    mesh = init_device_mesh("cpu", (size,))
    return fully_shard(Net(), mesh=mesh, shard_placement_fn=by_columns)


def fsdp2_hybrid() -> nn.Module:
    mesh = init_device_mesh("cpu", grid(), mesh_dim_names=("replicate", "shard"))
    return fully_shard(Net(), mesh=mesh)


def fsdp2_tp() -> nn.Module:
    """Parameters that both shard by rows are strided: the slice is cut once more."""
    mesh = init_device_mesh("cpu", grid(), mesh_dim_names=("dp", "tp"))
    return fully_shard(tensor_parallel(mesh["tp"]), mesh=mesh["dp"])


LAYOUTS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "ddp": replicated,
    "fsdp1": fsdp1,
    "fsdp1_hybrid": fsdp1_hybrid,
    "fsdp1_tp": fsdp1_tp,
    "fsdp2": fsdp2,
    "fsdp2_columns": fsdp2_columns,
    "fsdp2_hybrid": fsdp2_hybrid,
    "fsdp2_tp": fsdp2_tp,
}
NEEDS_PAIRS = {"fsdp1_hybrid", "fsdp1_tp", "fsdp2_hybrid", "fsdp2_tp"}


def build(layout: str) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LAYOUTS[layout]()


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    if isinstance(model, FullyShardedDataParallel):
        state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        return model.state_dict(), state
    return get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)


def save_all(cases: list[tuple[str, str]], url: str, options: dict[str, Any]) -> None:
    """Save each layout with each optimizer, after a step, to a folder of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for layout, kind in cases:
            model = build(layout)
            optimizer = trained(model, kind, STEPPED)
            weights, state = states_of(model, optimizer)
            saved = {"model": weights, "optimizer": state}
            dcpstore.save(saved, f"{url}/{layout}-{kind}", storage_options=options, config=WRITE)


@cache
def oracle(kind: str) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Return the whole state and the shapes that a process alone has."""
    model = Net()
    optimizer = trained(model, kind, STEPPED)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = {names[id(p)]: dict(values) for p, values in optimizer.state.items()}
    return state, {name: tuple(p.shape) for name, p in model.named_parameters()}


def load_all(cases: list[tuple[str, str, str]], options: dict[str, Any]) -> int:
    """Load each (layout, optimizer, url) for a model that never took a step; count the bytes."""
    fetched = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # One model per layout: a mesh costs gloo groups, which stay until the default one ends.
        for layout, same in groupby(sorted(cases), key=itemgetter(0)):
            weights = build(layout).state_dict()
            for _, kind, url in same:
                fetched += load_one(weights, kind, url, options, layout)
    return fetched


def load_one(
    weights: dict[str, Any], kind: str, url: str, options: dict[str, Any], layout: str
) -> int:
    state = dcpstore.load_sharded_optimizer_state_dict(
        weights, "optimizer", url, storage_options=options
    )
    try:
        check(state, weights, kind)
    except AssertionError as error:
        raise AssertionError(f"{url} as {layout}: {error}") from error
    return state.result.rank.fetched_bytes


def check(loaded: Any, weights: dict[str, Any], kind: str) -> None:
    """Compare with the process alone: the keys, the layouts and the bits."""
    expected, shapes = oracle(kind)
    state = loaded["optimizer"]["state"]
    assert state.keys() == expected.keys()
    got_none = {f"optimizer.state.{name}" for name in shapes.keys() - expected.keys()}
    assert {name.replace("state.module.", "state.") for name in loaded.result.missing} == got_none
    assert not loaded.result.unexpected
    for parameter, values in expected.items():
        held = weights.get(parameter, weights.get(f"module.{parameter}"))
        assert state[parameter].keys() == values.keys(), parameter
        for name, whole in values.items():
            check_value(f"{parameter}.{name}", state[parameter][name], whole, held)
    (group,) = loaded["optimizer"]["param_groups"]
    defaults = OPTIMIZERS[kind]([torch.zeros(1)]).defaults
    assert {name: group[name] for name in defaults} == defaults
    assert sorted(group["params"]) == sorted(shapes.keys() - {"frozen"})


def check_value(name: str, got: Any, whole: Any, held: Any) -> None:
    if not isinstance(whole, torch.Tensor):
        assert got == whole, name
        return
    is_like_parameter = tuple(whole.shape) == tuple(held.size()) and whole.dim() > 0
    if is_like_parameter:
        assert same_layout(got, held), name
    elif name.endswith(".rows") and isinstance(held, DTensor):
        kept = [p if getattr(p, "dim", None) == 0 else Replicate() for p in held.placements]
        assert list(got.placements) == kept, f"{name}: a value per row lies with its row"
    if isinstance(got, ShardedTensor):
        for shard in got.local_shards():
            part = whole
            box = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
            for dim, (offset, size) in enumerate(box):
                part = part.narrow(dim, offset, size)
            assert torch.equal(shard.tensor, part), name
    else:
        value = got.full_tensor() if isinstance(got, DTensor) else got
        assert value.dtype == whole.dtype
        assert torch.equal(value, whole), name


def same_layout(got: Any, held: Any) -> bool:
    if isinstance(held, ShardedTensor):
        return isinstance(got, ShardedTensor) and got.metadata().shards_metadata == (
            held.metadata().shards_metadata
        )
    if isinstance(held, DTensor):
        return (
            isinstance(got, DTensor)
            and got.placements == held.placements
            and got.device_mesh == held.device_mesh
            and got.to_local().shape == held.to_local().shape
        )
    return type(got) is torch.Tensor and got.shape == held.shape
