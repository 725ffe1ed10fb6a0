"""``dcp.save`` of several ranks in one process: DCP's own order of calls, without a group."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from dcpstore import ObjectStoreWriter
from faults.states import PART_BYTES, State, blank, is_equal, load

_T = TypeVar("_T")


def rank_state(step: int, rank: int) -> State:
    """What one rank saves: tensors of its own, what all have, and on rank 0 a large tensor."""
    source = torch.Generator().manual_seed(1000 * step + rank)
    large = {"own.0.big": torch.full((PART_BYTES // 4 + 500,), float(step))} if rank == 0 else {}
    return {
        **large,
        f"own.{rank}.a": torch.randn(50, 60, generator=source),
        f"own.{rank}.b": torch.randn(50, 60, generator=source),
        "shared": torch.full((2000,), float(step)),
        "step": step,
    }


def whole_state(step: int, num_ranks: int) -> State:
    """What all ranks save together."""
    merged: State = {}
    for rank in range(num_ranks):
        merged.update(rank_state(step, rank))
    return merged


def loaded_rank_step(reader: Any, num_ranks: int) -> int:
    """Load everything and return the one step that all of it belongs to."""
    found = blank(whole_state(0, num_ranks))
    load(found, reader)
    step = found["step"]
    assert is_equal(found, whole_state(step, num_ranks)), f"not the whole of step {step}"
    return int(step)


def plan_on_ranks(writers: Sequence[Any], states: Sequence[State]) -> tuple[list[Any], Any, Any]:
    """Run the planning steps; return planners, plans and metadata. Rank 0 coordinates."""
    planners = [DefaultSavePlanner() for _ in writers]
    local = []
    for rank, (writer, planner, state) in enumerate(zip(writers, planners, states, strict=True)):
        planner.set_up_planner(state, writer.storage_meta(), rank == 0)
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        local.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(local)
    return planners, writers[0].prepare_global_plan(plans), metadata


def write_on_ranks(writers: Sequence[Any], planners: Sequence[Any], plans: Sequence[Any]) -> Any:
    """Let all ranks write at the same time; raise the first error after all have ended."""

    def write(rank: int) -> Any:
        planner = planners[rank]
        return writers[rank].write_data(planner.finish_plan(plans[rank]), planner).value()

    return _on_all(write, len(writers))


def save_on_ranks(writers: Sequence[Any], states: Sequence[State]) -> None:
    """One save."""
    planners, plans, metadata = plan_on_ranks(writers, states)
    results = write_on_ranks(writers, planners, plans)
    writers[0].finish(metadata, results)


def _on_all(call: Callable[[int], _T], num_ranks: int) -> list[_T]:
    with ThreadPoolExecutor(num_ranks) as executor:
        futures = [executor.submit(call, rank) for rank in range(num_ranks)]
    return [future.result() for future in futures]


def save_alone(url: str | os.PathLike[str], rank: int, **options: Any) -> None:
    """Save as one rank of ``use_collectives=False`` does; options are the writer's."""
    writer = ObjectStoreWriter(url, **options)
    writer.set_up_storage_writer(True, rank=rank, use_collectives=False)
    planner = DefaultSavePlanner()
    planner.set_up_planner({f"w{rank}": torch.ones(9)}, writer.storage_meta(), True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    (plan,) = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(planner.finish_plan(plan), planner).wait()])
