from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from benchmarks.planning import SHAPES, Job, to_save_plan
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from dcpstore.plan.merge import Replicated, choose_writers, merge_save_plans
from dcpstore.plan.packed import apply_decision, to_packed_plan
from plan_items import rows


def item(fqn: str, start: int, length: int, size: int) -> WriteItem:
    return rows(fqn, start, length, size, torch.uint8)


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
    merged = merge_save_plans([to_packed_plan(plan) for plan in plans])
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
    merged = merge_save_plans([to_packed_plan(plan) for plan in plans])
    assert merged.load_bytes.tolist() == [1 << 20] * 4


def test_thousands_of_scalars_are_dealt_out_evenly() -> None:
    plans = [SavePlan([item(f"s{n}", 0, 4, 4) for n in range(1000)])] * 8
    merged = merge_save_plans([to_packed_plan(plan) for plan in plans])
    kept = [apply_decision(p, d) for p, d in zip(plans, merged.decisions, strict=True)]
    assert [len(plan.items) for plan in kept] == [125] * 8


def test_more_overlapping_sets_than_layers_are_dealt_out_too() -> None:
    pairs = [(a, b) for a in range(90) for b in range(a + 1, 90)]
    load = np.zeros(90, np.int64)
    ranks = np.array(pairs)
    (chosen,) = choose_writers([Replicated(ranks, ranks, np.full(len(pairs), 100))], load)
    assert load.sum() == 100 * len(pairs)
    assert load.max() <= 1.35 * load.mean()
    counted = np.bincount(ranks[np.arange(len(pairs)), chosen], minlength=90)
    assert (counted * 100 == load).all()


# --- the benchmark's plans -------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_generated_plans_are_what_packing_dcps_own_objects_gives(shape: str) -> None:
    job = Job(shape, 16)
    packed = list(job.packed())
    assert len(packed) == 16
    for one in (packed[0], packed[11]):
        plan = to_save_plan(one)
        assert len(plan.items) == 1002
        assert to_packed_plan(plan) == one
    merge_save_plans(packed)
