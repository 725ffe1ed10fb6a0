"""What each rank does in the tests of loads from a ``torch.save`` file."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_layouts import CASES, build, check_state, check_whole, locals_of, wipe
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint import format_utils as stock
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dcpstore
from dcpstore import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner, RankFailures, ReadConfig

# Many waves and many requests although everything is small.
READ = ReadConfig(budget_bytes=2048, request_bytes=300, join_gap_bytes=32)

PLANNERS = {
    "ours": DynamicMetaLoadPlanner,
    "plain": dcpstore.LoadPlanner,
    "torch's": stock.DynamicMetaLoadPlanner,
    "torch's default": DefaultLoadPlanner,
}


def file_state(case: str) -> dict[str, Any]:
    """Return what is saved for a case of `rank_layouts`: plain tensors, no ranks."""
    oracle = CASES[case][1]
    if case != "replicated":
        return dict(oracle)
    return {"model": dict(oracle), "step": 5, "groups": [{"lr": 0.25, "name": "all"}]}


def target(case: str, *, with_values: bool) -> dict[str, Any]:
    state = build(case, 1)
    wipe(state)
    if not with_values:
        state = {key: value for key, value in state.items() if key not in ("step", "groups")}
    return state


def num_bytes(state: dict[str, Any]) -> int:
    """Return the bytes of the tensors that this rank holds."""
    total = 0
    for value in state.values():
        if isinstance(value, dict):
            total += num_bytes(value)
        elif isinstance(value, torch.Tensor) or hasattr(value, "local_shards"):
            total += sum(local.numel() * local.element_size() for local in locals_of(value))
    return total


def check(case: str, state: dict[str, Any]) -> None:
    expected = {key: value for key, value in build(case, 1).items() if key in state}
    check_state(case, state, expected)
    check_whole(case, state)


def load_cases(
    url: str, options: Any, planner: str, coordinator: int, direct: bool, some: tuple[str, ...]
) -> dict[str, tuple[int, int, int]]:
    """Load some cases by ``dcp.load``; return bytes received, held and fetched by case."""
    counted = {}
    for case in some:
        state = target(case, with_values=planner != "torch's")
        reader = BroadcastingTorchSaveReader(
            coordinator_rank=coordinator, storage_options=options, config=READ, direct=direct
        )
        dcp.load(
            state,
            checkpoint_id=f"{url}/{case}.pt",
            storage_reader=reader,
            planner=PLANNERS[planner](),
        )
        check(case, state)
        assert reader.last_read is not None
        read = reader.last_read
        counted[case] = (read.received_bytes, num_bytes(state), read.fetched_bytes)
    return counted


def load_cases_by_ours(
    url: str, options: Any, coordinator: int, some: tuple[str, ...]
) -> dict[str, Any]:
    """Load some cases by ``dcpstore.load``; return this rank's results by case."""
    results = {}
    for case in some:
        state = target(case, with_values=True)
        reader = BroadcastingTorchSaveReader(
            coordinator_rank=coordinator, storage_options=options, config=READ
        )
        results[case] = dcpstore.load(state, f"{url}/{case}.pt", storage_reader=reader)
        check(case, state)
    return results


def load_in_groups(groups: list[list[int]], url: str, options: Any) -> list[int]:
    """Let groups load the same file at the same time, each read by its last rank."""
    made = [dist.new_group(ranks) for ranks in groups]
    received = []
    for ranks, group in zip(groups, made, strict=True):
        if dist.get_rank() not in ranks:
            continue
        mesh = DeviceMesh.from_group(group, "cpu")
        oracle = CASES["tensor_parallel"][1]
        state: dict[str, Any] = {
            name: distribute_tensor(torch.zeros_like(full), mesh, [Shard(0)], src_data_rank=None)
            for name, full in oracle.items()
        }
        reader = BroadcastingTorchSaveReader(
            f"{url}/tensor_parallel.pt",
            len(ranks) - 1,
            storage_options=options,
            process_group=group,
        )
        dcp.load(state, storage_reader=reader, process_group=group)
        again = {name: torch.zeros_like(full) for name, full in oracle.items()}
        dcpstore.load(again, storage_reader=reader, process_group=group)
        for name, full in oracle.items():
            assert torch.equal(state[name].full_tensor(), full), name
            assert torch.equal(again[name], full), name
        assert reader.last_read is not None
        received.append(reader.last_read.received_bytes)
    dist.barrier()
    return received


def sharded(sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.zeros(sizes, dtype=dtype), mesh, [Shard(0)], src_data_rank=None)


def failing_states(rank: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return by name a file and a state dict that do not fit, on some rank at least."""
    is_odd_one = rank == 2
    return {
        "missing key": ("good", {"up": sharded((12, 7)), "nose": sharded((4,))}),
        "wrong shape": ("good", {"up": sharded((6, 7))}),
        "wrong rank count": ("good", {"up": torch.zeros(84)}),
        "one rank's shape": ("good", {"up": torch.zeros(11 if is_odd_one else 12, 7)}),
        "one rank's key": ("good", {"nose" if is_odd_one else "norm": torch.zeros(7)}),
        "narrowing": ("good", {"up": sharded((12, 7), torch.float16)}),
        "tensor as value": ("good", {"up": 5}),
        "value as tensor": ("good", {"step": torch.zeros(3)}),
        "sparse": ("good", {"sparse": torch.zeros(3, 3)}),
        "no file": ("absent", {"up": sharded((12, 7))}),
        "text": ("text", {"up": sharded((12, 7))}),
        "cut off": ("cut", {"up": sharded((12, 7))}),
        "legacy": ("legacy", {"up": sharded((12, 7))}),
        "code": ("code", {"up": sharded((12, 7))}),
        "list": ("list", {"up": sharded((12, 7))}),
    }


def fail_everywhere(url: str, options: Any, driver: str) -> dict[str, str]:
    """Try every load that must fail; return what this rank was told by name.

    One group serves all, so a rank that was left behind in one load would spoil the next.
    """
    told = {}
    for name, (file, state) in failing_states(dist.get_rank()).items():
        reader = BroadcastingTorchSaveReader(
            f"{url}/{file}.pt", 1, storage_options=options, deadline_s=60
        )
        began = time.monotonic()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if driver == "dcpstore":
                    dcpstore.load(state, storage_reader=reader, deadline_s=60)
                else:
                    planner = stock.DynamicMetaLoadPlanner if driver == "torch's" else None
                    planner = planner or DynamicMetaLoadPlanner
                    dcp.load(state, storage_reader=reader, planner=planner())
        except (CheckpointException, RankFailures) as error:
            told[name] = str(error)
        assert time.monotonic() - began < 30, f"{name}: a rank waited for a deadline"
        for value in state.values():
            if isinstance(value, torch.Tensor):
                assert not locals_of(value)[0].any(), f"{name}: a target was changed"
    return told


def load_by_torchs_reader(path: str) -> list[str]:
    """Let torch's own reader, which knows no metadata, serve our planner."""
    oracle = CASES["tensor_parallel"][1]
    state = {name: torch.zeros_like(full) for name, full in oracle.items()}
    dcp.load(
        state,
        checkpoint_id=path,
        storage_reader=stock.BroadcastingTorchSaveReader(),
        planner=DynamicMetaLoadPlanner(),
    )
    return [name for name, full in oracle.items() if not torch.equal(state[name], full)]
