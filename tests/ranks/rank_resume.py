"""Training that is broken off and resumed, in every layout and with every kind of optimizer.

The gradients are whole numbers that do not depend on the parameters: the model is a sum of
linear maps, and all ranks see the same whole-numbered batch. So their mean over ranks is exact
on any power of two of ranks, and what 20 steps make of the parameters is the same to the last
bit on any number of ranks and in any layout.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import dcpstore

__all__ = ["KINDS", "LAYOUTS", "resume_in_one_world", "restore_and_train", "train_and_save"]


class Sum(nn.Module):
    """A sum of linear maps of one input; sizes divide by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(6, 3, bias=False)
        self.scale = nn.Parameter(torch.randn(5, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).sum() + self.down(x).sum() + nn.functional.linear(x, self.scale).sum()


class RowAdagrad(torch.optim.Optimizer):
    """Adagrad with one sum per row of a parameter: state of another shape than it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                squares = param.grad.pow(2)
                rows = squares.flatten(1).sum(1) if param.dim() > 1 else squares
                if isinstance(rows, DTensor):  # a sum over columns that others hold is partial
                    rows = rows.redistribute(
                        placements=[Replicate() if p.is_partial() else p for p in rows.placements]
                    )
                state["sum"] = rows if "sum" not in state else state["sum"] + rows
                scale = state["sum"].sqrt().add(1e-6)
                if param.dim() > 1:
                    scale = scale.unsqueeze(1)
                param.sub_(group["lr"] * (param.grad / scale))


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "amsgrad": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True),
    "rows": RowAdagrad,
}


def plain(model: Sum) -> nn.Module:
    return model


def ddp(model: Sum) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp1(model: Sum) -> nn.Module:
    return FSDP(model, device_id=torch.device("cpu"))


def fsdp1_original(model: Sum) -> nn.Module:
    model.up = FSDP(model.up, use_orig_params=True, device_id=torch.device("cpu"))
    return FSDP(model, use_orig_params=True, device_id=torch.device("cpu"))


def fsdp1_hybrid(model: Sum) -> nn.Module:
    mesh = init_device_mesh("cpu", grid(), mesh_dim_names=("replicate", "shard"))
    return FSDP(
        model,
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


def fsdp2(model: Sum) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.up, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp2_hybrid(model: Sum) -> nn.Module:
    mesh = init_device_mesh("cpu", grid(), mesh_dim_names=("replicate", "shard"))
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: Sum) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return in_tensor_parallel(model, mesh)


def fsdp2_and_tp(model: Sum) -> nn.Module:
    mesh = init_device_mesh("cpu", grid()[::-1], mesh_dim_names=("dp", "tp"))
    in_tensor_parallel(model, mesh["tp"])
    return fully_shard(model, mesh=mesh["dp"])


def in_tensor_parallel(model: Sum, mesh: Any) -> nn.Module:
    plan = {
        "up": ColwiseParallel(output_layouts=Replicate()),
        "down": RowwiseParallel(input_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, plan)


def grid() -> tuple[int, int]:
    size = dist.get_world_size()
    return (2, size // 2) if size % 2 == 0 else (1, size)


LAYOUTS: dict[str, Callable[[Sum], nn.Module]] = {
    "plain": plain,
    "ddp": ddp,
    "fsdp1": fsdp1,
    "fsdp1_original": fsdp1_original,
    "fsdp1_hybrid": fsdp1_hybrid,
    "fsdp2": fsdp2,
    "fsdp2_hybrid": fsdp2_hybrid,
    "tensor_parallel": tensor_parallel,
    "fsdp2_and_tp": fsdp2_and_tp,
}


def make(layout: str, kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = LAYOUTS[layout](Sum())
    return model, KINDS[kind](model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randint(-3, 4, (4, 6), generator=generator).float()
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
    optimizer.zero_grad()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter whole."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: value.detach().clone() for name, value in state.items()}


def save(model: nn.Module, optimizer: torch.optim.Optimizer, url: str) -> None:
    state = {
        "model": get_model_state_dict(model),
        "optim": dcpstore.optimizer_state(model, optimizer),
    }
    dcpstore.save(state, url)


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, url: str) -> Any:
    state = {"model": get_model_state_dict(model)}
    dcpstore.load(state, url)
    set_model_state_dict(model, state["model"])
    return dcpstore.restore_optimizer(model, optimizer, url)


def trained_and_saved(layout: str, kind: str, url: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Train ten steps and save."""
    model, optimizer = make(layout, kind, seed=0)
    train(model, optimizer, range(10))
    save(model, optimizer, url)
    return model, optimizer


def resume_in_one_world(layout: str, kind: str, url: str) -> None:
    """Train 20 steps, and 10, save, restore into something fresh, 10; the bits are the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        through, optimizer = trained_and_saved(layout, kind, url)
        train(through, optimizer, range(10, 20))
        resumed, fresh = make(layout, kind, seed=1)
        result = restore(resumed, fresh, url)
        assert not result.missing, result
        assert not result.unexpected, result
        train(resumed, fresh, range(10, 20))
        check_same(whole(resumed), whole(through))


def check_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), f"{name} differs by {(got[name] - value).abs().max()}"


def train_and_save(layout: str, kind: str, url: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained_and_saved(layout, kind, url)


def restore_and_train(layout: str, kind: str, url: str) -> dict[str, torch.Tensor]:
    """Return the parameters after ten more steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = make(layout, kind, seed=1)
        restore(model, optimizer, url)
        train(model, optimizer, range(10, 20))
        return whole(model)


def train_through(kind: str) -> dict[str, torch.Tensor]:
    """Return the parameters after twenty steps of the plain model."""
    model, optimizer = make("plain", kind, seed=0)
    train(model, optimizer, range(20))
    return whole(model)
