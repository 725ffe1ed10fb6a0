from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
import torch
from test_plan_exchange import shard, value, whole
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
from dcpstore.plan.packed import _extras_of, pack_save_plan, to_packed_plan, unpack_save_plan
from dcpstore.plan.wire import PackedPlan, PartKind


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
        shard("a.w", (6, 0), (2, 8), (16, 8), hint=3),
        shard("a.c", (0, 2), (16, 2), (16, 8), dtype=torch.bfloat16),
        odd,
        whole("a.n\u00efve \U0001f600 \ud800", (7,)),
        whole("step", ()),
        whole("none", (0,)),
        shard("huge", (2**40,), (2**33,), (2**41,)),
        value("config"),
        value("bytes", 2**35),
        WriteItem(
            MetadataIndex("unindexed"),
            WriteItemType.TENSOR,
            tensor_data=whole("unindexed", (3,)).tensor_data,
        ),
    ]
    return SavePlan(items, planner_data={"a.w": ("a", "w"), "x.0": ("x", 0), "step": ("step",)})


def test_a_packed_plan_comes_back_equal_in_every_field() -> None:
    plan = everything()
    back = unpack_save_plan(pack_save_plan(plan))
    assert back == plan
    assert [item.index.index for item in back.items] == [item.index.index for item in plan.items]
    assert list(map(type, back.planner_data["x.0"])) == [str, int]


def test_an_empty_plan_comes_back() -> None:
    assert unpack_save_plan(pack_save_plan(SavePlan([]))) == SavePlan([])
    assert unpack_save_plan(pack_save_plan(SavePlan([], planner_data={}))).planner_data == {}


def test_packing_is_a_function_of_the_plan() -> None:
    assert pack_save_plan(everything()) == pack_save_plan(everything())


def test_a_flattening_map_is_not_pickled_and_other_planner_data_is() -> None:
    assert to_packed_plan(everything()).first_of(PartKind.EXTRAS) is None
    custom = SavePlan([value("a")], storage_data={"rank": 3}, planner_data=["mine", 1.5])
    packed = to_packed_plan(custom)
    assert unpack_save_plan(packed) == custom
    extras = packed.first_of(PartKind.EXTRAS)
    assert extras is not None
    assert _extras_of(extras) == {"planner_data": ["mine", 1.5], "storage_data": {"rank": 3}}


@pytest.mark.parametrize("data", [{"a": ["list"]}, {1: ("a",)}, {"a": (1.5,)}, {"a": (True,)}])
def test_a_map_that_columns_cannot_hold_travels_pickled(data: Any) -> None:
    back = unpack_save_plan(pack_save_plan(SavePlan([value("a")], planner_data=data)))
    assert back.planner_data == data
    assert pickle.dumps(back.planner_data) == pickle.dumps(data)


class Trap:
    """Fails whoever unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def test_the_coordinator_passes_pickled_data_on_unopened() -> None:
    trapped = to_packed_plan(SavePlan([value("a")], storage_data=Trap()))
    merged = merge_save_plans([to_packed_plan(SavePlan([value("a")])), trapped])
    assert list(merged.extras) == [1]
    with pytest.raises(ValueError, match="no number"):
        _extras_of(merged.extras[1])


def test_plans_and_items_of_derived_classes_are_refused() -> None:
    @dataclasses.dataclass(frozen=True)
    class MyPlan(SavePlan):
        mine: int = 0

    @dataclasses.dataclass(frozen=True)
    class MyItem(WriteItem):
        mine: int = 0

    with pytest.raises(IncompatibleError, match="MyPlan"):
        pack_save_plan(MyPlan([]))
    with pytest.raises(IncompatibleError, match="'a'"):
        pack_save_plan(SavePlan([MyItem(MetadataIndex("a"), WriteItemType.BYTE_IO)]))


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
            pack_save_plan(SavePlan([bad]))


def test_ranks_share_the_tables_of_keys_that_they_have_in_common() -> None:
    def rank(number: int) -> PackedPlan:
        keys = [shard(f"layers.{n}.w", (number, 0), (1, 4), (8, 4)) for n in range(300)]
        return to_packed_plan(SavePlan([*keys, value(f"loader.rank_{number}")]))

    first, second = rank(0), rank(1)
    names = [{name for name in plan.names if name[0] == PartKind.KEYS} for plan in (first, second)]
    assert len(names[0]) > 2
    assert len(names[0] - names[1]) == 1


@pytest.mark.parametrize("damage", ["cut", "magic", "flip", "long"])
def test_damaged_plans_are_refused(damage: str) -> None:
    data = bytearray(pack_save_plan(everything()))
    if damage == "cut":
        del data[-1:]
    elif damage == "magic":
        data[0] ^= 1
    elif damage == "flip":
        data[-5] ^= 255
    else:
        data += b"\0"
    with pytest.raises(CorruptError):
        merge_save_plans([bytes(data)])
