from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from benchmarks.planning import SHAPES, Job
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from dcpstore.errors import ConfigError
from dcpstore.planning.exchange.balance import Replicated, choose_writers
from dcpstore.planning.exchange.local import HeldChunk, decide_locally, replica_ranks
from dcpstore.planning.exchange.merge import merge_save_plans
from dcpstore.planning.exchange.save_plans import (
    apply_decision,
    pack_save_plan,
    unpack_save_plan,
)


def item(fqn: str, start: int, length: int, size: int) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size((start,)), torch.Size((length,)))
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.uint8), torch.Size((size,)))
    return WriteItem(MetadataIndex(fqn, (start,)), WriteItemType.SHARD, tensor_data=data)


def loads(plans: list[SavePlan]) -> list[int]:
    return [
        sum(math.prod(item.tensor_data.chunk.sizes) for item in plan.items if item.tensor_data)
        for plan in plans
    ]


def random_mesh_job(seed: int) -> list[SavePlan]:
    """Tensors of very different sizes on a 4 x 4 mesh, each cut or replicated per axis."""
    choice = random.Random(seed)
    plans: list[list[WriteItem]] = [[] for _ in range(16)]
    for number in range(120):
        size = 16 * int(2 ** choice.uniform(8, 20))
        parts = choice.choice([(1, 1), (4, 1), (1, 4), (4, 4)])
        for rank, plan in enumerate(plans):
            at = (rank // 4 % parts[0]) * parts[1] + rank % 4 % parts[1]
            length = size // (parts[0] * parts[1])
            plan.append(item(f"t{number}", at * length, length, size))
    return [SavePlan(items) for items in plans]


@pytest.mark.parametrize("seed", range(10))
def test_the_most_loaded_rank_has_less_than_with_torchs_rule(seed: int) -> None:
    plans = random_mesh_job(seed)
    merged = merge_save_plans([pack_save_plan(plan) for plan in plans])
    ours = loads([apply_decision(p, d) for p, d in zip(plans, merged.decisions, strict=True)])
    theirs = loads(dedup_save_plans(plans))
    assert sum(ours) == sum(theirs)
    assert max(ours) <= 0.9 * max(theirs)


def test_replicated_tensors_fill_up_the_ranks_that_have_least_of_their_own() -> None:
    plans = [
        SavePlan(
            [
                *([item(f"own{rank}", 0, 1 << 20, 1 << 20)] if rank < 2 else []),
                *(item(f"shared{n}", 0, 1 << 18, 1 << 18) for n in range(8)),
            ]
        )
        for rank in range(4)
    ]
    merged = merge_save_plans([pack_save_plan(plan) for plan in plans])
    assert merged.load_bytes.tolist() == [1 << 20] * 4


def test_thousands_of_scalars_are_dealt_out_evenly() -> None:
    plans = [SavePlan([item(f"s{n}", 0, 4, 4) for n in range(1000)])] * 8
    merged = merge_save_plans([pack_save_plan(plan) for plan in plans])
    assert [merged.decision(rank).num_kept for rank in range(8)] == [125] * 8


def test_more_overlapping_sets_than_layers_are_dealt_out_too() -> None:
    pairs = [(a, b) for a in range(90) for b in range(a + 1, 90)]
    load = np.zeros(90, np.int64)
    (chosen,) = choose_writers([Replicated(np.array(pairs), np.full(len(pairs), 100))], load)
    assert load.sum() == 100 * len(pairs)
    assert load.max() <= 1.35 * load.mean()
    counted = np.bincount(np.array(pairs)[np.arange(len(pairs)), chosen], minlength=90)
    assert (counted * 100 == load).all()


# --- ranks that decide alone -----------------------------------------------------------


def local_loads(mesh: tuple[int, ...], tensors: list[tuple[int, tuple[bool, ...]]]) -> list[int]:
    """What each rank writes if all decide alone; tensors are (bytes, replicated axes)."""
    ranks = np.arange(math.prod(mesh)).reshape(mesh)
    result = []
    for rank in range(ranks.size):
        coordinate = tuple(int(one) for one in np.unravel_index(rank, mesh))
        chunks = []
        for number, (num_bytes, same) in enumerate(tensors):
            parts = math.prod(n for n, s in zip(mesh, same, strict=True) if not s)
            place = tuple(0 if s else c for s, c in zip(same, coordinate, strict=True))
            holders = replica_ranks(ranks, same, coordinate)
            chunks.append(HeldChunk(f"t{number}", place, num_bytes // parts, holders))
        writes = decide_locally(chunks, rank)
        result.append(sum(c.num_bytes for c, mine in zip(chunks, writes, strict=True) if mine))
    return result


def test_deciding_alone_balances_hybrid_sharding() -> None:
    choice = random.Random(1)
    tensors = [(64 * int(2 ** choice.uniform(10, 20)), (True, False)) for _ in range(300)]
    ours = local_loads((4, 8), tensors)
    assert max(ours) <= 1.01 * sum(ours) / len(ours)


def test_deciding_alone_is_off_by_no_more_than_the_largest_chunk_per_placement() -> None:
    choice = random.Random(2)
    kinds = [(True, False), (False, True), (True, True), (False, False)]
    tensors = [(64 * int(2 ** choice.uniform(6, 16)), choice.choice(kinds)) for _ in range(200)]
    ours = local_loads((4, 4), tensors)
    largest = dict.fromkeys(kinds, 0)
    for num_bytes, same in tensors:
        parts = math.prod(4 for s in same if not s)
        largest[same] = max(largest[same], num_bytes // parts)
    assert max(ours) - min(ours) <= sum(largest.values())


def test_the_odd_tensors_of_many_sets_do_not_all_fall_to_the_lowest_ranks() -> None:
    counts = [
        sum(
            decide_locally([HeldChunk("t", (group,), 8, (group, 64 + group))], group)[0]
            for group in range(64)
        )
    ]
    assert 16 <= counts[0] <= 48


def test_what_does_not_fit_together_is_refused() -> None:
    chunk = HeldChunk("t", (0,), 8, (1, 2))
    with pytest.raises(ConfigError, match="rank 3 does not hold 't'"):
        decide_locally([chunk], 3)
    with pytest.raises(ConfigError, match="twice"):
        decide_locally([chunk, chunk], 1)
    with pytest.raises(ConfigError, match="ascend"):
        HeldChunk("t", (0,), 8, (2, 1))
    with pytest.raises(ConfigError, match="2 dimensions"):
        replica_ranks(np.zeros((2, 2), np.int64), [True], [0])


# --- the benchmark's plans -------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_generated_plans_are_what_packing_dcps_own_objects_gives(shape: str) -> None:
    job = Job(shape, 16)
    packed = list(job.packed())
    assert len(packed) == 16
    for one in (packed[0], packed[11]):
        plan = unpack_save_plan(one)
        assert len(plan.items) == 1002
        assert pack_save_plan(plan) == one.to_bytes()
    merge_save_plans(packed)
