"""What each rank does in the tests of `dcpstore.save` and `dcpstore.load` on processes."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_layouts import CASES, READ, WRITE, build, check_state, check_whole, wipe
from rank_modes import assert_equal, groups_of_this_rank, make

import dcpstore
from dcpstore import LoadResult, ReadConfig, SaveResult, WriteConfig
from dcpstore.read.sharing import SharePolicy

WAYS = ("ours", "stock planners", "stock storage")
"""Who plans and who stores; `dcpstore.save` and `dcpstore.load` drive all of them."""


def save_case(way: str, state: dict[str, Any], folder: str) -> SaveResult:
    if way == "ours":
        return dcpstore.save(state, folder, config=WRITE)
    planner = dcp.DefaultSavePlanner()
    if way == "stock planners":
        return dcpstore.save(state, folder, config=WRITE, planner=planner)
    writer = dcp.FileSystemWriter(folder, sync_files=False)
    return dcpstore.save(state, planner=planner, storage_writer=writer)


def load_case(way: str, state: dict[str, Any], folder: str) -> LoadResult:
    if way == "ours":
        return dcpstore.load(state, folder, config=READ)
    planner = dcp.DefaultLoadPlanner()
    if way == "stock planners":
        return dcpstore.load(state, folder, config=READ, planner=planner, share="always")
    return dcpstore.load(state, planner=planner, storage_reader=dcp.FileSystemReader(folder))


def save_all_cases(way: str, folder: str) -> None:
    for case in CASES:
        result = save_case(way, build(case, 0), f"{folder}/{case}")
        assert result.num_items >= result.num_keys > 0


def load_all_cases(way: str, folder: str, variant: int) -> None:
    """Load every case in another layout than it was saved in, and compare every bit."""
    for case in CASES:
        state = build(case, variant)
        wipe(state)
        result = load_case(way, state, f"{folder}/{case}")
        assert not result.missing
        assert not result.unexpected
        check_state(case, state, build(case, variant))
        check_whole(case, state)


def save_and_load_in_groups(groups: list[list[int]], coordinator_rank: int, url: str) -> None:
    """Every group saves and loads a checkpoint of its own, at the same time."""
    for number, group, mesh in groups_of_this_rank(groups):
        options = {"process_group": group, "coordinator_rank": coordinator_rank}
        dcpstore.save(make(number, mesh), f"{url}/{number}", **options)
        state = make(-1, mesh)
        dcpstore.load(state, f"{url}/{number}", **options, share="always")
        assert_equal(state, make(number, mesh))
    dist.barrier()


def save_and_load_beside_stock(url: str) -> None:
    """What either way of saving left, the other way of loading reads."""
    dcpstore.save(make(1), f"{url}/ours")
    dcp.save(make(2), storage_writer=dcp.FileSystemWriter(f"{url}/stock", sync_files=False))
    state = make(-1)
    dcp.load(state, storage_reader=dcp.FileSystemReader(f"{url}/ours"))
    assert_equal(state, make(1))
    state = make(-1)
    dcpstore.load(state, f"{url}/stock")
    assert_equal(state, make(2))


def counted_state(kind: str) -> dict[str, Any]:
    """All of it the same on every rank, or none of it but a value, or some."""
    state: dict[str, Any] = {"step": 3}
    if kind != "own":
        state |= {"shared": torch.arange(400_000.0), "norm": torch.arange(3000.0)}
    if kind != "replicated":
        state[f"own.{dist.get_rank()}"] = torch.full((50_000,), float(dist.get_rank()))
    return state


def save_counted(kind: str, url: str, options: dict[str, Any]) -> SaveResult:
    config = WriteConfig(object_bytes=1 << 18)
    return dcpstore.save(counted_state(kind), url, storage_options=options, config=config)


def load_counted(
    kind: str, url: str, options: dict[str, Any], share: SharePolicy = "auto"
) -> LoadResult:
    state = counted_state(kind)
    wipe(state)
    config = ReadConfig(request_bytes=1 << 18)
    result = dcpstore.load(state, url, storage_options=options, config=config, share=share)
    assert_equal(state, counted_state(kind))
    return result


def load_into_meta_tensors(url: str, values: dict[str, Any], is_stock: bool) -> None:
    with torch.device("meta"):
        state: dict[str, Any] = {
            key: torch.empty(value.size())
            for key, value in values.items()
            if isinstance(value, torch.Tensor)
        }
    planner = dcp.DefaultLoadPlanner() if is_stock else dcpstore.LoadPlanner()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`_get_pg_default_device` will be")  # by torch itself
        dcpstore.load(state, url, planner=planner)
    for key, tensor in state.items():
        assert tensor.device.type == "cpu"
        assert torch.equal(tensor, values[key])
