"""What the tests of an optimizer's companions do on every rank."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from rank_resume import RowAdagrad, check_same, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dcpstore

__all__ = [
    "keep_rows_with_fsdp1",
    "look_at_fresh_fsdp1",
    "restore_from_a_wrong_key",
    "resume_beside_idle_parameters",
    "save_just_thawed",
    "save_partial_sums",
]


class Halves(nn.Module):
    """One part is used, one never, one is frozen after a while; two names tie one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 6)
        self.idle = nn.Linear(6, 3)
        self.later_frozen = nn.Linear(6, 6, bias=False)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.used.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.later_frozen(self.used(x)))


class Untied(Halves):
    """FSDP1 with original parameters cannot gather the state of tied ones."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(6, 6, bias=False)


def wrap(layout: str) -> nn.Module:
    if layout == "fsdp2":
        return fully_shard(Halves(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model = Untied()  # a unit of FSDP1 gives all of its parameters gradients, so one is apart
    model.idle = FSDP(model.idle, use_orig_params=True, device_id=torch.device("cpu"))
    return FSDP(model, use_orig_params=True, device_id=torch.device("cpu"))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step * 10 + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=generator)).pow(2).sum().backward()
        optimizer.step()
    optimizer.zero_grad()


def resume_beside_idle_parameters(layout: str, url: str) -> tuple[str, ...]:
    """Break off, freeze, resume, thaw; the bits are the same. Return what got no state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = wrap(layout)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        train(model, optimizer, range(4))
        optimizer_state = dcpstore.optimizer_state(model, optimizer)
        dcpstore.save({"optim": optimizer_state}, url)
        torch.manual_seed(0)
        fresh = wrap(layout)
        with torch.no_grad():
            for got, want in zip(fresh.parameters(), model.parameters(), strict=True):
                got.copy_(want)
        into = torch.optim.Adam(fresh.parameters(), lr=0.5)
        if layout == "fsdp2":
            fresh.later_frozen.requires_grad_(False)
        result = dcpstore.restore_optimizer(fresh, into, url)
        assert not result.unexpected, result
        fresh.requires_grad_(True)
        for one, its in ((model, optimizer), (fresh, into)):
            train(one, its, range(4, 8))
        check_same(whole(fresh), whole(model))
        return result.missing


def look_at_fresh_fsdp1(use_orig_params: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FSDP(Untied(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        train(model, torch.optim.SGD(model.parameters(), lr=0.0), range(1))
        model(torch.ones(1, 6)).sum().backward()
        before = [param.detach().clone() for param in model.parameters()]
        gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        state = dcpstore.optimizer_state(model, optimizer)
        assert state["state"] == {}
        assert not optimizer.state
        for param, was, gradient in zip(model.parameters(), before, gradients, strict=True):
            assert torch.equal(param, was)
            assert (param.grad is None) == (gradient is None)
            assert gradient is None or torch.equal(param.grad, gradient)


def save_just_thawed() -> str:
    """Save when a parameter may train again and has not done so yet."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FSDP(Untied(), use_orig_params=True, device_id=torch.device("cpu"))
        model.module.later_frozen.requires_grad_(False)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        train(model, optimizer, range(2))
        model.requires_grad_(True)
        try:
            dcpstore.optimizer_state(model, optimizer)
        except dcpstore.IncompatibleError as error:
            return str(error)
        return ""


def keep_rows_with_fsdp1() -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FSDP(nn.Linear(6, 8, bias=False), use_orig_params=True, device_id="cpu")
        optimizer = RowAdagrad(model.parameters())
        model(torch.ones(1, 6)).sum().backward()
        optimizer.step()
        for param in model.parameters():
            if param.numel():
                optimizer.state[param]["sum"] = torch.zeros(3)
        try:
            dcpstore.optimizer_state(model, optimizer)
        except dcpstore.IncompatibleError as error:
            return str(error)
        return ""


class PartialSums(torch.optim.SGD):
    """Keeps a mean over columns that are sharded, as it comes."""

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            self.state[param]["rows"] = param.grad.sum(0)
        super().step(closure)


def save_partial_sums() -> str:
    model = fully_shard(nn.Linear(4, 4, bias=False), mesh=init_device_mesh("cpu", (2,)))
    optimizer = PartialSums(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert isinstance(optimizer.state[model.weight]["rows"], DTensor)
    try:
        dcpstore.optimizer_state(model, optimizer)
    except dcpstore.IncompatibleError as error:
        return str(error)
    return ""


def restore_from_a_wrong_key(url: str) -> str:
    model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.Adam(model.parameters())
    dcpstore.save({"optimizer": dcpstore.optimizer_state(model, optimizer)}, url)
    try:
        dcpstore.restore_optimizer(model, optimizer, url)
    except dcpstore.RankFailures as error:
        return str(error)
    return ""
