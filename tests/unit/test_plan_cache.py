from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch.distributed.checkpoint.planner import SavePlan

from dcpstore.errors import CorruptError
from dcpstore.plan.merge import merge_save_plans
from dcpstore.plan.packed import GlobalSavePlan, to_packed_plan
from dcpstore.plan.wire import PackedPlan, PlanCache, cache_key, parts_of
from plan_items import rows

PRINT = "writer 1; format 1"


def plans(
    num_ranks: int = 4,
    *,
    size: int = 64,
    dtype: torch.dtype = torch.float32,
    prefix: str = "model",
) -> list[SavePlan]:
    length = size // num_ranks
    return [
        SavePlan(
            [rows(f"{prefix}.{n}", rank * length, length, size, dtype) for n in range(40)],
            planner_data={f"{prefix}.{n}": (prefix, n) for n in range(40)},
        )
        for rank in range(num_ranks)
    ]


def key_of(local: list[SavePlan], fingerprint: str = PRINT) -> bytes:
    return cache_key([to_packed_plan(plan).digest for plan in local], fingerprint)


def exchange(
    cache: PlanCache[GlobalSavePlan], packed: list[PackedPlan]
) -> tuple[list[PackedPlan], tuple[tuple[int, ...], ...]]:
    """Run the part of the protocol that carries plans; return what arrived and was asked."""
    request = cache.request([plan.head for plan in packed])
    answers = [parts_of(one, wanted) for one, wanted in zip(packed, request.wanted, strict=True)]
    return cache.assemble(request, answers), request.wanted


def swap_ranks(local: list[SavePlan]) -> list[SavePlan]:
    return [local[1], local[0], *local[2:]]


def swap_items(local: list[SavePlan]) -> list[SavePlan]:
    return [dataclasses.replace(plan, items=plan.items[::-1]) for plan in local]


def with_path(local: list[SavePlan]) -> list[SavePlan]:
    moved = local[2].planner_data | {"model.3": ("model", "3")}  # the key, no longer its number
    return [*local[:2], dataclasses.replace(local[2], planner_data=moved), local[3]]


def with_properties(local: list[SavePlan]) -> list[SavePlan]:
    first = local[0].items[0]
    assert first.tensor_data is not None
    properties = dataclasses.replace(first.tensor_data.properties, requires_grad=True)
    data = dataclasses.replace(first.tensor_data, properties=properties)
    items = [dataclasses.replace(first, tensor_data=data), *local[0].items[1:]]
    return [dataclasses.replace(local[0], items=items), *local[1:]]


CHANGES: dict[str, Callable[[], list[SavePlan]]] = {
    "world size": lambda: plans(2),
    "one rank more that plans nothing": lambda: [*plans(), SavePlan([])],
    "layout": lambda: swap_ranks(plans()),
    "shape": lambda: plans(size=128),
    "dtype": lambda: plans(dtype=torch.bfloat16),
    "key renamed": lambda: plans(prefix="Model"),
    "order of items": lambda: swap_items(plans()),
    "path in the nested state": lambda: with_path(plans()),
    "no flattening map": lambda: [dataclasses.replace(p, planner_data=None) for p in plans()],
    "tensor properties": lambda: with_properties(plans()),
    "item left out": lambda: [SavePlan(p.items[1:], None, p.planner_data) for p in plans()],
}


def test_the_same_plans_hit_and_give_the_same_answer() -> None:
    cache: PlanCache[GlobalSavePlan] = PlanCache()
    merged = merge_save_plans([to_packed_plan(plan) for plan in plans()])
    cache.put(key_of(plans()), merged)
    assert cache.find(key_of(plans())) is merged


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_never_hits(change: str) -> None:
    cache: PlanCache[str] = PlanCache()
    cache.put(key_of(plans()), "first")
    assert cache.find(key_of(CHANGES[change]())) is None


def test_another_writer_or_format_never_hits() -> None:
    cache: PlanCache[str] = PlanCache()
    cache.put(key_of(plans()), "first")
    assert cache.find(key_of(plans(), "writer 2; format 1")) is None
    assert cache.find(key_of(plans(), "")) is None


def test_no_two_changes_share_a_key() -> None:
    keys = [key_of(change()) for change in CHANGES.values()]
    assert len(set(keys)) == len(keys)


def test_a_failed_save_invalidates() -> None:
    cache: PlanCache[str] = PlanCache()
    first, second = key_of(plans()), key_of(plans(2))
    for key in (first, second):
        cache.put(key, "plan")
    cache.invalidate(first)
    assert cache.find(first) is None
    assert cache.find(second) == "plan"


def test_the_least_recently_used_entry_goes_first() -> None:
    cache: PlanCache[int] = PlanCache()
    keys = [key_of(plans(), f"writer {n}") for n in range(3)]
    for number in (0, 1, 0, 2):
        cache.put(keys[number], number)
    assert [cache.find(key) for key in keys] == [0, None, 2]


def test_two_caches_share_nothing() -> None:
    one: PlanCache[str] = PlanCache()
    other: PlanCache[str] = PlanCache()
    one.put(key_of(plans()), "plan")
    assert other.find(key_of(plans())) is None


def test_a_part_that_many_ranks_have_is_asked_of_one_only() -> None:
    packed = [to_packed_plan(plan) for plan in plans(8)]
    arrived, wanted = exchange(PlanCache(), packed)
    assert [plan.bodies for plan in arrived] == [plan.bodies for plan in packed]
    assert wanted[0] == tuple(range(len(packed[0].names)))
    assert all(numbers == (0,) for numbers in wanted[1:])
    assert merge_save_plans(arrived).decisions == merge_save_plans(packed).decisions


def test_a_rank_whose_plan_is_unchanged_sends_its_head_only() -> None:
    cache: PlanCache[GlobalSavePlan] = PlanCache()
    first = plans(8)
    exchange(cache, [to_packed_plan(plan) for plan in first])
    changed = [*first[:5], with_properties([first[5]])[0], *first[6:]]
    packed = [to_packed_plan(plan) for plan in changed]
    arrived, wanted = exchange(cache, packed)
    assert [rank for rank, numbers in enumerate(wanted) if numbers] == [5]
    assert wanted[5][0] > 0  # a run of keys
    assert [plan.bodies for plan in arrived] == [plan.bodies for plan in packed]


def test_parts_are_kept_up_to_the_bound_and_asked_for_again() -> None:
    cache: PlanCache[GlobalSavePlan] = PlanCache(max_part_bytes=200)
    packed = [to_packed_plan(plan) for plan in plans(8)]
    for _ in range(2):
        arrived, wanted = exchange(cache, packed)
        assert cache.part_bytes <= 200
        assert [plan.digest for plan in arrived] == [plan.digest for plan in packed]
        assert any(wanted)


def test_a_rank_that_sends_something_else_is_named() -> None:
    cache: PlanCache[GlobalSavePlan] = PlanCache()
    packed = [to_packed_plan(plan) for plan in plans(2)]
    request = cache.request([plan.head for plan in packed])
    answers = [parts_of(one, wanted) for one, wanted in zip(packed, request.wanted, strict=True)]
    with pytest.raises(CorruptError, match="rank 1"):
        cache.assemble(request, [answers[0], [b"else"]])
    with pytest.raises(CorruptError, match="rank 0"):
        cache.assemble(request, [[], answers[1]])
    assert cache.part_bytes == 0
