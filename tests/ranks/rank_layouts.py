"""States in every layout that training uses, built from plain values on any number of ranks.

A case has plain values (the oracle), and makes of them a state for the current process
group. `check_state` compares what was loaded with the values, shard by shard and whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from dcpstore import ObjectStoreReader, ObjectStoreWriter, ReadConfig, WriteConfig

__all__ = [
    "CASES",
    "load_and_check_all",
    "load_case_from_folder",
    "load_cases_with_stock",
    "save_case_as_safetensors",
    "save_cases",
    "save_cases_with_stock",
]

# Everything above 64 bytes is a data object's; objects and blocks are small.
WRITE = WriteConfig(inline_bytes=64, object_bytes=4096, checksum_block_bytes=4096)
READ = ReadConfig(join_gap_bytes=64, request_bytes=8192)


def values(sizes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(len(sizes))
    return {name: torch.randn(size, generator=generator).to(dtype) for name, size in sizes.items()}


ONE_D = values({"odd": (13, 4), "wide": (4, 13), "few": (3,), "one": (1, 5), "cube": (6, 5, 7)})
ONE_D["bf16"] = ONE_D["odd"].bfloat16()
ONE_D["int"] = torch.arange(29)
TP = values({"up": (12, 7), "down": (7, 12), "norm": (7,), "bias": (12,)})
TWO_D = values(
    {"both": (9, 11), "twice": (17, 3), "copied": (5, 8), "back": (8, 5), "last": (3, 9)}
)
REPLICATED = values({"w": (33, 9), "b": (9,)})
SHARDED = values({"rows": (14, 6), "columns": (5, 9)})


def dtensor(full: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    return distribute_tensor(full.clone(), mesh, placements, src_data_rank=None)


def placed(
    oracle: Mapping[str, torch.Tensor],
    mesh: DeviceMesh,
    layouts: Mapping[str, list[list[Placement]]],
    variant: int,
) -> dict[str, Any]:
    """Give each tensor its layout: one to save with and another one to load into."""
    return {
        name: dtensor(full, mesh, layouts[name][variant % len(layouts[name])])
        for name, full in oracle.items()
    }


def one_d(oracle: Any, variant: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layouts = {name: [[Shard(0)]] for name in oracle}
    layouts["wide"] = [[Shard(1)]]
    layouts["cube"] = [[Shard(2)], [Shard(1)]]
    return placed(oracle, mesh, layouts, variant)


def tensor_parallel(oracle: Any, variant: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    layouts = {
        "up": [[Shard(0)], [Shard(1)]],
        "down": [[Shard(1)], [Replicate()]],
        "norm": [[Replicate()], [Shard(0)]],
        "bias": [[Shard(0)], [Replicate()]],
    }
    return placed(oracle, mesh, layouts, variant)


def grid() -> tuple[int, int]:
    size = dist.get_world_size()
    return (2, size // 2) if size % 2 == 0 else (1, size)


def two_d(oracle: Any, variant: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", grid(), mesh_dim_names=("dp", "tp"))
    layouts: dict[str, list[list[Placement]]] = {
        "both": [[Shard(0), Shard(1)], [Shard(1), Shard(0)]],
        "twice": [[Shard(0), Shard(0)], [Replicate(), Shard(0)]],
        "copied": [[Replicate(), Shard(1)], [Shard(0), Replicate()]],
        "back": [[Shard(1), Replicate()], [Shard(1), Shard(1)]],
        "last": [[Replicate(), Replicate()], [Shard(1), Shard(0)]],
    }
    return placed(oracle, mesh, layouts, variant)


def replicated(oracle: Any, variant: int) -> dict[str, Any]:
    del variant
    return {
        "model": {name: full.clone() for name, full in oracle.items()},
        "step": 5,
        "groups": [{"lr": 0.25, "name": "all"}],
    }


def sharded_tensors(oracle: Any, variant: int) -> dict[str, Any]:
    from torch.distributed._shard.sharded_tensor import Shard as LocalShard
    from torch.distributed._shard.sharded_tensor import init_from_local_shards

    rank, size = dist.get_rank(), dist.get_world_size()
    state = {}
    for name, full in oracle.items():
        dim = int(name == "columns") ^ (variant % 2)
        parts = torch.tensor_split(full, size, dim)
        offsets = [0] * full.dim()
        offsets[dim] = sum(part.shape[dim] for part in parts[:rank])
        mine = LocalShard.from_tensor_and_offsets(parts[rank].clone(), offsets, rank)
        state[name] = init_from_local_shards([mine], full.shape)
    return state


class Small(nn.Module):
    """Layers whose sizes divide by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 12)
        self.norm = nn.LayerNorm(12)
        self.down = nn.Linear(12, 5, bias=False)
        self.register_buffer("table", torch.randn(11, 3))


def small_model() -> Small:
    torch.manual_seed(3)
    return Small()


MODEL = {name: value.clone() for name, value in small_model().state_dict().items()}


def fsdp(oracle: Any, variant: int) -> dict[str, Any]:
    del oracle, variant
    model = small_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return dict(get_model_state_dict(model))


def hybrid_fsdp(oracle: Any, variant: int) -> dict[str, Any]:
    del oracle, variant
    model = small_model()
    mesh = init_device_mesh("cpu", grid(), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    return dict(get_model_state_dict(model))


def fsdp_and_tp(oracle: Any, variant: int) -> dict[str, Any]:
    del oracle
    model = small_model()
    sizes = grid() if variant % 2 == 0 else grid()[::-1]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return dict(get_model_state_dict(model))


Builder = Callable[[Any, int], dict[str, Any]]
CASES: dict[str, tuple[Builder, dict[str, torch.Tensor]]] = {
    "dtensor_1d": (one_d, ONE_D),
    "tensor_parallel": (tensor_parallel, TP),
    "dtensor_2d": (two_d, TWO_D),
    "fsdp2": (fsdp, MODEL),
    "hybrid_fsdp2": (hybrid_fsdp, MODEL),
    "fsdp2_and_tp": (fsdp_and_tp, MODEL),
    "replicated": (replicated, REPLICATED),
    "sharded_tensor": (sharded_tensors, SHARDED),
}


def build(case: str, variant: int) -> dict[str, Any]:
    builder, oracle = CASES[case]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return builder(oracle, variant)


def locals_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, DTensor):
        return [value.to_local()]
    if hasattr(value, "local_shards"):
        return [shard.tensor for shard in value.local_shards()]
    return [value.detach()]


def wipe(state: dict[str, Any]) -> None:
    """Overwrite all that a load must restore."""
    for key, value in state.items():
        if isinstance(value, dict):
            wipe(value)
        elif isinstance(value, int):
            state[key] = -1
        elif isinstance(value, list):
            state[key] = [{"lr": -1.0, "name": "wiped"}]
        else:
            for local in locals_of(value):
                with torch.no_grad():
                    local.fill_(-1)


def check_state(case: str, state: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare with a state built from the values, this rank's parts to the last bit."""
    for key, value in expected.items():
        if isinstance(value, dict):
            check_state(case, state[key], value)
        elif isinstance(value, torch.Tensor) or hasattr(value, "local_shards"):
            for got, want in zip(locals_of(state[key]), locals_of(value), strict=True):
                assert torch.equal(got, want), f"{case}: {key} differs on rank {dist.get_rank()}"
        else:
            assert state[key] == value, f"{case}: {key} is {state[key]!r}"


def check_whole(case: str, state: dict[str, Any]) -> None:
    """Compare what the ranks hold together with the plain values, not by our layout code."""
    for key, full in CASES[case][1].items():
        value = state.get(key, state.get("model", {}).get(key))
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if isinstance(value, torch.Tensor) and not hasattr(value, "local_shards"):
            assert torch.equal(value, full), f"{case}: {key} differs"


def save_cases(url: str, options: dict[str, Any]) -> None:
    """Save every case to a folder of its own."""
    for case in CASES:
        writer = ObjectStoreWriter(f"{url}/{case}", storage_options=options, config=WRITE)
        dcp.save(build(case, 0), storage_writer=writer)


def load_and_check_all(url: str, options: dict[str, Any], variant: int) -> dict[str, int]:
    """Load each case in another layout and compare; return the bytes that this rank fetched."""
    fetched = {}
    for case in CASES:
        reader = ObjectStoreReader(f"{url}/{case}", storage_options=options, config=READ)
        load_with(reader, case, variant)
        assert reader.last_read is not None
        fetched[case] = reader.last_read.fetched_bytes
    return fetched


def load_with(reader: Any, case: str, variant: int) -> None:
    state = build(case, variant)
    wipe(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=reader)
    check_state(case, state, build(case, variant))
    check_whole(case, state)


def save_cases_with_stock(url: str, options: dict[str, Any]) -> None:
    """Save every case as stock does, in another shape of files each."""
    for number, case in enumerate(CASES):
        writer = FsspecWriter(
            f"{url}/{case}",
            single_file_per_rank=number % 2 == 0,
            thread_count=1 + number % 4,
            sync_files=False,
            _extensions=[ZStandard()] if number % 3 == 0 else None,
            **options,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(build(case, 0), storage_writer=writer)


def load_cases_with_stock(url: str, options: dict[str, Any]) -> None:
    for case in CASES:
        load_with(FsspecReader(f"{url}/{case}", **options), case, 1)


def save_case_as_safetensors(case: str, folder: str) -> None:
    """Let every rank save its shards as Hugging Face files."""
    writer = HuggingFaceStorageWriter(folder, save_distributed=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(build(case, 0), storage_writer=writer)


def load_case_from_folder(case: str, folder: str) -> None:
    load_with(ObjectStoreReader(folder), case, 1)
