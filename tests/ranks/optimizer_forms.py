"""What ranks do in the tests of the forms that saved optimizers have."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel.fsdp import DTensorExtensions

import dcpstore

# Values lie in the manifest, and tensors do not.
WRITE = dcpstore.WriteConfig(inline_bytes=4096, checksum_block_bytes=4096)
READ = dcpstore.ReadConfig(join_gap_bytes=64)
GROUP = [{"lr": 0.5, "betas": (0.5, 0.75), "params": ["up.weight", "up.bias"]}]
WEIGHT = torch.arange(1601.0 * 150).reshape(1601, 150)
BIAS = torch.arange(1601.0)


def values(scale: float) -> dict[str, torch.Tensor]:
    return {"up.weight": WEIGHT * scale, "up.bias": BIAS * scale}


# --- FSDP1 over tensor parallelism, with ShardedTensors in ShardedTensors ------------------------


def nested_by_tp(full: torch.Tensor, by: str) -> Any:
    """Make of a whole tensor what FSDP1 does of a parameter that is a ShardedTensor already."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    tp, dp = mesh["tp"], mesh["dp"]
    dim = 1 if full.dim() > 1 and by == "columns" else 0
    parts = torch.tensor_split(full, tp.size(), dim)
    offsets = [0] * full.dim()
    offsets[dim] = sum(part.shape[dim] for part in parts[: tp.get_local_rank()])
    mine = parts[tp.get_local_rank()].contiguous()
    shard = LocalShard.from_tensor_and_offsets(mine, offsets, dist.get_rank())
    held = init_from_local_shards([shard], full.shape, process_group=tp.get_group())
    return DTensorExtensions(None).chunk_tensor(
        held, dp.get_local_rank(), dp.size(), 1, dp.get_group()
    )


def save_nested(by: str, url: str) -> None:
    """Save an optimizer as FSDP1 over tensor parallelism has it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {
            name: {
                "exp_avg": nested_by_tp(values(2)[name], by),
                "exp_avg_sq": nested_by_tp(values(3)[name], by),
                "step": torch.tensor(4.0),
            }
            for name in values(1)
        }
        optimizer = {"state": state, "param_groups": GROUP}
        dcpstore.save({"optimizer": optimizer}, url, config=WRITE)


def load_nested(by: str, url: str, planner: Any) -> tuple[int, int]:
    """Load for a model of nested tensors and check each shard; return bytes needed and fetched."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights = {name: nested_by_tp(full, by) for name, full in values(1).items()}
        state = dcpstore.load_sharded_optimizer_state_dict(
            weights, "optimizer", url, planner=planner, share="never", config=READ
        )
        assert state["optimizer"]["param_groups"] == GROUP
        for name, outer in weights.items():
            got = state["optimizer"]["state"][name]
            assert got["step"] == 4
            for key, scale in (("exp_avg", 2), ("exp_avg_sq", 3)):
                _check_inner(got[key], outer, values(scale)[name])
    return state.result.rank.needed_bytes, state.result.rank.fetched_bytes


def _check_inner(got: Any, outer: Any, full: torch.Tensor) -> None:
    """The inner tensor has the sizes of the TP slice, and the elements at the slice's offset."""
    (slice_,) = outer.local_shards()
    assert isinstance(got, ShardedTensor)
    assert got.metadata() == slice_.tensor.metadata()
    for shard in got.local_shards():
        part = full
        for dim, (start, inner, size) in enumerate(
            zip(
                slice_.metadata.shard_offsets,
                shard.metadata.shard_offsets,
                shard.metadata.shard_sizes,
                strict=True,
            )
        ):
            part = part.narrow(dim, start + inner, size)
        assert torch.equal(shard.tensor, part)


class CountingPlanner(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__()
        self.num_resolved = 0

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        self.num_resolved += 1
        return super().resolve_tensor(read_item)


def load_nested_with_planners(by: str, url: str) -> int:
    load_nested(by, url, dcpstore.LoadPlanner())
    planner = CountingPlanner()
    load_nested(by, url, planner)
    return planner.num_resolved


# --- other forms -------------------------------------------------------------------------------


def load_numbered(url: str) -> str:
    """Load what a plain optimizer.state_dict() left, into FSDP2 and on into the optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    told = ""
    try:
        dcpstore.load_sharded_optimizer_state_dict(model.state_dict(), "optim", url)
    except dcpstore.RankFailures as error:
        told = str(error)
    names = [name for name, _ in model.named_parameters()]
    state = dcpstore.load_sharded_optimizer_state_dict(
        model.state_dict(), "optim", url, parameter_names=names
    )
    assert set(state["optim"]["state"]) == set(range(4))
    optimizer = torch.optim.Adam(model.parameters(), lr=9.0)
    optimizer.load_state_dict(state["optim"])
    for number, parameter in enumerate(model.parameters()):
        loaded = optimizer.state[parameter]["exp_avg"]
        assert isinstance(loaded, DTensor)
        assert torch.equal(loaded.full_tensor(), torch.full(parameter.shape, number + 1.0))
    assert not state.result.missing
    return told


def load_scalars(url: str) -> None:
    """A parameter without a dimension has state like itself; a count has none of a layout."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    scalar = distribute_tensor(torch.tensor(1.0), mesh, [Replicate()], src_data_rank=None)
    state = dcpstore.load_sharded_optimizer_state_dict({"scalar": scalar}, "optim", url)
    got = state["optim"]["state"]["scalar"]
    assert isinstance(got["exp_avg"], DTensor)
    assert got["exp_avg"].to_local() == 0.25
    assert type(got["step"]) is torch.Tensor
    assert got["step"] == 3


def load_for_two_equal_meshes(url: str) -> None:
    """DTensor remembers what it made for an equal mesh, whose groups may be gone by now."""
    for _ in range(2):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        weight = distribute_tensor(WEIGHT, mesh, [Shard(0)], src_data_rank=None)
        state = dcpstore.load_sharded_optimizer_state_dict({"up.weight": weight}, "optimizer", url)
        got = state["optimizer"]["state"]["up.weight"]["exp_avg"]
        assert got.device_mesh is mesh
        assert torch.equal(got.full_tensor(), WEIGHT * 2)


def load_counted(url: str, options: dict[str, Any]) -> Any:
    """Load on every rank, for a model sharded by rows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = {
        name: distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
        for name, full in values(1).items()
    }
    before = copy.deepcopy(weights)
    state = dcpstore.load_sharded_optimizer_state_dict(
        weights, "optimizer", url, storage_options=options, config=READ
    )
    for name, weight in before.items():
        assert torch.equal(weight.to_local(), weights[name].to_local()), "the model was changed"
    return state.result
