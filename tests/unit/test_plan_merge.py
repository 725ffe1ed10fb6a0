from __future__ import annotations

import dataclasses
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from dcpstore.errors import ConfigError, CorruptError, IncompatibleError
from dcpstore.plan.merge import PlanError, merge_save_plans
from dcpstore.plan.packed import (
    apply_decision,
    to_metadata,
    to_packed_plan,
)
from plan_items import shard, value, whole


def merge(*plans: list[WriteItem], **options: Any) -> list[SavePlan]:
    """Return each rank's plan as the coordinator decided."""
    local = [SavePlan(items) for items in plans]
    merged = merge_save_plans([to_packed_plan(plan) for plan in local], **options)
    return [
        apply_decision(plan, decision)
        for plan, decision in zip(local, merged.decisions, strict=True)
    ]


def fqns(plans: list[SavePlan]) -> list[list[str]]:
    return [[item.index.fqn for item in plan.items] for plan in plans]


def problem_of(*plans: list[WriteItem], **options: Any) -> tuple[str, str, tuple[int, ...], str]:
    with pytest.raises(PlanError) as caught:
        merge(*plans, **options)
    problem = caught.value.problems[0]
    assert problem.text in str(caught.value)
    assert repr(problem.fqn) in problem.text
    return problem.kind, problem.fqn, problem.ranks, problem.text


# --- merging ---------------------------------------------------------------------------


def test_each_replica_is_written_once_and_shards_stay() -> None:
    plans = merge(
        *([shard("w", (r, 0), (1, 4), (3, 4)), whole("n", (4,)), value("v")] for r in range(3))
    )
    kept = fqns(plans)
    assert all("w" in names for names in kept)
    assert sum(names.count("n") for names in kept) == 1
    assert sum(names.count("v") for names in kept) == 1


def test_items_in_any_order_and_number_per_rank_are_merged() -> None:
    plans = merge(
        [whole("b", (2,)), shard("a", (0,), (4,), (8,)), shard("a", (4,), (2,), (8,))],
        [shard("a", (6,), (2,), (8,)), whole("b", (2,)), value("own")],
        [],
    )
    assert sorted(itertools.chain.from_iterable(fqns(plans))) == ["a", "a", "a", "b", "own"]


def test_replicas_of_pipeline_stages_that_share_some_keys_are_merged() -> None:
    def rank(number: int) -> list[WriteItem]:
        stage = number // 5
        own = [shard(f"s{stage}.{n}", (number % 5,), (1,), (5,)) for n in range(40)]
        tied = [shard("embedding", (number % 5, 0), (1, 2), (5, 2))] if stage != 1 else []
        return [*tied, *own] if stage == 0 else [*own, *tied]

    plans = merge(*(rank(number) for number in range(15)))
    names = list(itertools.chain.from_iterable(fqns(plans)))
    assert len(names) == 3 * 40 * 5 + 5
    assert names.count("embedding") == 5


def test_an_empty_chunk_never_wins_over_a_full_one_at_its_offsets() -> None:
    plans = merge(
        [shard("w", (0,), (0,), (4,))],
        [shard("w", (0,), (4,), (4,))],
        [shard("w", (0,), (0,), (4,))],
        [shard("w", (0,), (4,), (4,))],
    )
    kept = [item for plan in plans for item in plan.items]
    assert [item.tensor_data.chunk.sizes[0] for item in kept if item.tensor_data] == [4]


def test_flattening_maps_are_joined_and_the_first_rank_wins() -> None:
    plans = [
        SavePlan([value("a")], planner_data={"a": ("a",), "b": ("b", 0)}),
        SavePlan([value("a")], planner_data={"b": ("b", "0"), "c": ("c",)}),
    ]
    merged = merge_save_plans([to_packed_plan(plan) for plan in plans])
    assert to_metadata(merged).planner_data == {"a": ("a",), "b": ("b", 0), "c": ("c",)}
    without = merge_save_plans([to_packed_plan(SavePlan([value("a")]))])
    assert to_metadata(without).planner_data is None


def test_a_decision_answers_one_plan_only() -> None:
    plan = SavePlan([value("a"), value("b")])
    packed = to_packed_plan(plan)
    (decision,) = merge_save_plans([packed]).decisions
    assert apply_decision(plan, decision, digest=packed.digest) == plan
    with pytest.raises(CorruptError, match="2 items"):
        apply_decision(SavePlan([value("a")]), decision)
    with pytest.raises(CorruptError):
        apply_decision(plan, decision, digest=bytes(16))
    for damaged in (decision[:10], b"\xff" + decision[1:]):
        with pytest.raises(CorruptError):
            apply_decision(plan, damaged, digest=packed.digest)


def test_a_decision_takes_a_few_bytes() -> None:
    items = [whole(f"n{n}", (8,)) for n in range(1000)]
    local = [SavePlan(items) for _ in range(8)]
    merged = merge_save_plans([to_packed_plan(plan) for plan in local])
    assert max(map(len, merged.decisions)) <= 16 + 125
    kept = [apply_decision(p, d) for p, d in zip(local, merged.decisions, strict=True)]
    assert sum(len(plan.items) for plan in kept) == 1000


def test_the_merge_does_not_depend_on_the_process() -> None:
    local = [[whole(f"n{n}", (n + 1,)) for n in range(50)] for _ in range(7)]
    packed = [to_packed_plan(SavePlan(items)) for items in local]
    assert merge_save_plans(packed).decisions == merge_save_plans(packed).decisions


# --- what is refused -------------------------------------------------------------------


def test_another_size_dtype_or_kind_names_key_and_ranks() -> None:
    kind, _, ranks, text = problem_of([whole("w", (4,))], [whole("w", (4,))], [whole("w", (5,))])
    assert (kind, ranks) == ("conflict", (0, 1, 2))
    assert "(4,) on ranks 0, 1 but" in text
    assert "(5,) on rank 2" in text
    _, _, _, text = problem_of([whole("w", (4,))], [whole("w", (4,), torch.float16)])
    assert "float32" in text
    assert "float16" in text
    _, _, _, text = problem_of([whole("w", (4,))], [value("w")])
    assert "a value on rank 1" in text


def test_a_key_of_many_items_is_named_once_if_ranks_describe_it_differently() -> None:
    def items(height: int) -> list[WriteItem]:
        return [shard("w", (row,), (1,), (height,)) for row in range(40)]

    with pytest.raises(PlanError) as caught:
        merge(items(40), items(41))
    assert len(caught.value.problems) == 1


def test_a_chunk_outside_its_tensor_names_chunk_and_rank() -> None:
    ok = shard("w", (0, 0), (4, 4), (8, 4))
    kind, _, ranks, text = problem_of([ok], [shard("w", (4, 0), (5, 4), (8, 4))])
    assert (kind, ranks) == ("bounds", (1,))
    assert "sizes (5, 4) at (4, 0)" in text
    assert problem_of([ok], [shard("w", (4, 1), (4, 4), (8, 4))])[0] == "bounds"
    assert problem_of([ok], [shard("w", (-4, 0), (4, 4), (8, 4))])[0] == "bounds"
    assert problem_of([ok], [shard("w", (4, 0), (4, -4), (8, 4))])[0] == "bounds"


def test_overlapping_chunks_are_named_with_their_ranks() -> None:
    kind, _, ranks, text = problem_of(
        [shard("w", (0,), (4,), (8,))], [shard("w", (3,), (5,), (8,))], [value("v")]
    )
    assert (kind, ranks) == ("overlap", (0, 1))
    assert "sizes (4,) at (0,) (rank 0)" in text
    assert "sizes (5,) at (3,) (rank 1)" in text


def test_an_overlap_behind_2_31_rows_is_found_where_the_volume_is_right() -> None:
    size, third = (3 << 30,), 1 << 30
    kind, _, _, text = problem_of(
        [shard("w", (0,), (third,), size), shard("w", (third,), (5 * third // 4,), size)],
        [shard("w", (7 * third // 4,), (3 * third // 4,), size)],
    )
    assert kind == "overlap", text


def test_a_gap_tells_how_much_is_missing() -> None:
    kind, _, ranks, text = problem_of(
        [shard("w", (0, 0), (4, 2), (8, 2))], [shard("w", (5, 0), (3, 2), (8, 2))]
    )
    assert (kind, ranks) == ("gap", (0, 1))
    assert "14 of 16 elements" in text


def test_a_gap_is_no_error_for_one_rank_as_in_dcp_unless_asked_for() -> None:
    part = [shard("w", (0,), (4,), (8,))]
    assert fqns(merge(part)) == [["w"]]
    assert problem_of(part, require_full=True)[0] == "gap"
    merge(part, [value("v")], require_full=False)


def test_copies_of_one_chunk_must_have_one_size() -> None:
    kind, _, ranks, text = problem_of(
        [shard("w", (0,), (4,), (8,))],
        [shard("w", (0,), (3,), (8,))],
        [shard("w", (4,), (4,), (8,))],
    )
    assert (kind, ranks) == ("conflict", (0, 1))
    assert "sizes (4,)" in text
    assert "sizes (3,)" in text
    box = shard("w", (0, 0, 0), (2, 1, 3), (2, 3, 3))
    other = shard("w", (0, 0, 0), (2, 3, 1), (2, 3, 3))
    assert problem_of([box], [other])[0] == "conflict"
    assert problem_of([box], [whole("w", (2, 3, 3))])[0] == "conflict"


def test_a_rank_that_plans_a_chunk_twice_is_named() -> None:
    one = shard("w", (0,), (8,), (8,))
    kind, _, ranks, _ = problem_of([value("v")], [one, one], [one])
    assert (kind, ranks) == ("duplicate", (1,))


def test_a_reference_to_an_earlier_plan_is_refused() -> None:
    if not any(field.name == "usable" for field in dataclasses.fields(SavePlan)):
        pytest.skip("this torch has no plan cache")
    packed = to_packed_plan(SavePlan([], usable=False))
    with pytest.raises(ConfigError, match="rank 1"):
        merge_save_plans([to_packed_plan(SavePlan([])), packed])


def test_many_problems_are_told_in_part_and_counted() -> None:
    items = [shard(f"w{n}", (0,), (9,), (8,)) for n in range(40)]
    with pytest.raises(PlanError, match="24 more") as caught:
        merge(items)
    assert len(caught.value.problems) == 16
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.problems == caught.value.problems
    assert str(again) == str(caught.value)


def test_impossible_sizes_are_refused_before_they_overflow() -> None:
    with pytest.raises(IncompatibleError, match="'w'"):
        merge([whole("w", (2**40, 2**40))])
    with pytest.raises(IncompatibleError, match="2\\*\\*62"):
        merge([whole("w", (2**60,)), *(whole(f"w{n}", (2**60,)) for n in range(8))])
