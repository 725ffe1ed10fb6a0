from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from benchmarks.planning import to_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    WriteItem,
    WriteItemType,
)

from dcpstore.errors import CorruptError, IncompatibleError
from dcpstore.plan.merge import merge_save_plans
from dcpstore.plan.packed import to_packed_plan
from dcpstore.plan.wire import PackedPlan, read_head
from plan_items import shard, value, whole


def everything() -> SavePlan:
    channels_last = TensorProperties(
        torch.float16, torch.strided, True, torch.channels_last, pin_memory=True
    )
    odd = shard("conv", (0, 8, 0, 0), (4, 8, 3, 3), (4, 16, 3, 3))
    assert odd.tensor_data is not None
    odd = dataclasses.replace(
        odd, tensor_data=dataclasses.replace(odd.tensor_data, properties=channels_last)
    )
    items = [
        shard("a.w", (4, 0), (2, 8), (16, 8)),
        shard("a.w", (6, 0), (2, 8), (16, 8)),
        shard("a.c", (0, 2), (16, 2), (16, 8), dtype=torch.bfloat16),
        odd,
        whole("a.n\u00efve \U0001f600 \ud800", (7,)),
        whole("step", ()),
        whole("none", (0,)),
        shard("huge", (2**40,), (2**33,), (2**41,)),
        value("config"),
        value("bytes", 2**35),
    ]
    return SavePlan(items, planner_data={"a.w": ("a", "w"), "x.0": ("x", 0), "step": ("step",)})


def test_all_that_plans_are_merged_by_is_packed() -> None:
    plan = everything()
    back = to_save_plan(to_packed_plan(plan))
    assert back == plan
    assert list(map(type, back.planner_data["x.0"])) == [str, int]


def test_an_empty_plan_comes_back() -> None:
    assert to_save_plan(to_packed_plan(SavePlan([]))) == SavePlan([])
    assert to_save_plan(to_packed_plan(SavePlan([], planner_data={}))).planner_data == {}


def test_packing_is_a_function_of_the_plan() -> None:
    assert to_packed_plan(everything()).digest == to_packed_plan(everything()).digest


def test_what_only_its_own_rank_needs_is_not_packed() -> None:
    one = shard("w", (0,), (4,), (4,))
    hinted = shard("w", (0,), (4,), (4,), hint=3)
    unindexed = dataclasses.replace(one, index=MetadataIndex("w"))
    plans = [SavePlan([item]) for item in (one, hinted, unindexed)]
    plans.append(SavePlan([one], storage_data={"rank": 3}))
    assert len({to_packed_plan(plan).digest for plan in plans}) == 1


@pytest.mark.parametrize(
    "data", [["mine", 1.5], {"a": ["list"]}, {1: ("a",)}, {"a": (1.5,)}, {"a": (True,)}]
)
def test_planner_data_that_are_no_flattening_map_are_not_packed(data: Any) -> None:
    with pytest.raises(IncompatibleError, match="planner data"):
        to_packed_plan(SavePlan([value("a")], planner_data=data))


def test_plans_and_items_of_derived_classes_are_refused() -> None:
    @dataclasses.dataclass(frozen=True)
    class MyPlan(SavePlan):
        mine: int = 0

    @dataclasses.dataclass(frozen=True)
    class MyItem(WriteItem):
        mine: int = 0

    with pytest.raises(IncompatibleError, match="MyPlan"):
        to_packed_plan(MyPlan([]))
    with pytest.raises(IncompatibleError, match="'a'"):
        to_packed_plan(SavePlan([MyItem(MetadataIndex("a"), WriteItemType.BYTE_IO)]))


def test_items_that_no_planner_makes_are_refused_by_name() -> None:
    good = shard("w", (0, 0), (1, 1), (4, 4))
    data = good.tensor_data
    assert data is not None
    flat = ChunkStorageMetadata(torch.Size((0,)), torch.Size((1,)))
    for bad in (
        dataclasses.replace(good, tensor_data=None),
        dataclasses.replace(good, type=WriteItemType.BYTE_IO),
        dataclasses.replace(good, index=MetadataIndex("w", (1, 1))),
        dataclasses.replace(good, tensor_data=dataclasses.replace(data, chunk=None)),
        dataclasses.replace(good, tensor_data=dataclasses.replace(data, chunk=flat)),
        WriteItem(MetadataIndex("w", (0,)), WriteItemType.BYTE_IO),
    ):
        with pytest.raises(IncompatibleError, match="'w'"):
            to_packed_plan(SavePlan([bad]))


def test_ranks_share_the_tables_of_keys_that_they_have_in_common() -> None:
    def rank(number: int) -> PackedPlan:
        keys = [shard(f"layers.{n}.w", (number, 0), (1, 4), (8, 4)) for n in range(300)]
        return to_packed_plan(SavePlan([*keys, value(f"loader.rank_{number}")]))

    first, second = rank(0), rank(1)
    names = [set(plan.names[1:]) for plan in (first, second)]
    assert len(names[0]) > 2
    assert len(names[0] - names[1]) == 1


@pytest.mark.parametrize("damage", ["cut", "magic", "long"])
def test_damaged_heads_are_refused(damage: str) -> None:
    data = bytearray(to_packed_plan(everything()).head)
    if damage == "cut":
        del data[-1:]
    elif damage == "magic":
        data[0] ^= 1
    else:
        data += b"\0"
    with pytest.raises(CorruptError):
        read_head(bytes(data))


@pytest.mark.parametrize("number", [0, 1])
def test_damaged_parts_are_refused(number: int) -> None:
    plan = to_packed_plan(everything())
    bodies = [bytearray(body) for body in plan.bodies]
    bodies[number][-5] ^= 255
    with pytest.raises(CorruptError):
        merge_save_plans([plan.with_bodies(map(bytes, bodies))])


def test_a_key_of_thousands_of_items_is_packed_and_merged() -> None:
    items = [shard("w", (row, 0), (1, 4), (3000, 8)) for row in range(3000)]
    other = [shard("w", (row, 4), (1, 4), (3000, 8)) for row in range(3000)]
    packed = [to_packed_plan(SavePlan(some)) for some in (items, other)]
    assert to_save_plan(packed[1]).items == other
    assert len(packed[0].names) <= 1 + 3
    assert len(merge_save_plans(packed).chunks.key) == 6000
