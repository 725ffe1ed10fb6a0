"""Keys of a state dict that are no strings go back to where they came from."""

from __future__ import annotations

import collections
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

import dcpstore
from dcpstore import IncompatibleError, ObjectStoreReader, ObjectStoreWriter
from dcpstore.plan.nested import flatten

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

KEYS: list[Any] = [0, -1, True, 2.5, float("inf"), None, b"b", (1, "a"), (), "text"]


def nested(fill: int) -> dict[Any, Any]:
    return {
        "counts": {key: fill + number for number, key in enumerate(KEYS)},
        7: {3: torch.full((2,), float(fill)), "list": [{8: fill}, torch.tensor(fill)]},
    }


def load(state: Any, url: Path, **options: Any) -> Any:
    dcpstore.load(state, url, progress=False, **options)
    return state


def test_every_kind_of_key_is_put_back_as_it_was(tmp_path: Path) -> None:
    dcpstore.save(nested(5), tmp_path, progress=False)
    state = load(nested(0), tmp_path)
    assert state["counts"] == nested(5)["counts"]
    assert list(map(type, state["counts"])) == list(map(type, KEYS))
    assert state[7][3].tolist() == [5.0, 5.0]
    assert state[7]["list"][0] == {8: 5}
    assert state.keys() == {"counts", 7}


def test_the_kind_of_a_mapping_is_the_targets(tmp_path: Path) -> None:
    def make(fill: int) -> dict[str, Any]:
        return {
            "counter": collections.Counter({1: fill}),
            "ordered": collections.OrderedDict({2: fill}),
            "default": collections.defaultdict(list, {3: fill}),
        }

    dcpstore.save(make(9), tmp_path, progress=False)
    state = load(make(0), tmp_path)
    assert state == make(9)
    assert [type(one) for one in state.values()] == [type(one) for one in make(0).values()]


def test_a_scheduler_with_milestones_resumes_through_plain_dcp(tmp_path: Path) -> None:
    """Its milestones are a Counter of integers."""

    def make() -> Any:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4])

    saved = {"scheduler": make().state_dict()}
    dcp.save(saved, storage_writer=ObjectStoreWriter(tmp_path), planner=dcpstore.SavePlanner())
    state = {"scheduler": make().state_dict()}
    state["scheduler"]["milestones"].update([2, 4])
    planner = dcpstore.LoadPlanner()
    dcp.load(state, storage_reader=ObjectStoreReader(tmp_path), planner=planner)
    assert state == saved
    assert type(state["scheduler"]["milestones"]) is collections.Counter


def test_a_checkpoint_by_stock_planners_goes_to_the_right_keys(tmp_path: Path) -> None:
    dcp.save({"x": {1: 2, 3: 4}}, storage_writer=dcp.FileSystemWriter(tmp_path))
    assert load({"x": {1: 99, 3: 99}}, tmp_path) == {"x": {1: 2, 3: 4}}


@pytest.mark.parametrize(
    ("state", "first", "second"),
    [
        ({"x": {1: 0, "1": 0}}, "x[1]", "x['1']"),
        ({"a.b": 0, "a": {"b": 0}}, "['a.b']", "a['b']"),
        ({"x": {None: 0, "None": 0}}, "x[None]", "x['None']"),
        ({"x": {"0": 0, 0.0: [torch.ones(1)]}, "x.0": 0}, "x['0']", "['x.0']"),
    ],
)
def test_two_paths_with_one_name_are_refused_naming_both(
    state: Any, first: str, second: str, tmp_path: Path
) -> None:
    with pytest.raises(IncompatibleError) as saving:
        dcpstore.save(state, tmp_path / "a", progress=False)
    assert not list(tmp_path.iterdir())
    dcpstore.save({"other": 1}, tmp_path / "b", progress=False)
    with pytest.raises(IncompatibleError) as loading:
        load(state, tmp_path / "b")
    for error in (saving.value, loading.value):
        assert first in str(error)
        assert second in str(error)


class Number(int):
    pass


@pytest.mark.parametrize("key", [Number(3), frozenset(), (1, object()), torch.float32, int])
def test_other_kinds_of_keys_are_refused_by_path_and_type(key: Any, tmp_path: Path) -> None:
    with pytest.raises(
        IncompatibleError, match=r"x\[2\] has the key .* of type " + type(key).__name__
    ):
        dcpstore.save({"x": {2: {key: 0}}}, tmp_path, progress=False)
    assert not list(tmp_path.iterdir())


def test_a_mapping_that_a_load_could_not_fill_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IncompatibleError, match=r"x is a mappingproxy.*save dict"):
        dcpstore.save({"x": MappingProxyType({"a": 1})}, tmp_path, progress=False)


def test_a_state_dict_that_contains_itself_is_refused(tmp_path: Path) -> None:
    state: dict[str, Any] = {"x": 1}
    state["self"] = state
    with pytest.raises(IncompatibleError, match="contains itself"):
        dcpstore.save(state, tmp_path, progress=False)


def test_names_and_stored_paths_are_those_of_dcp() -> None:
    state = {
        **nested(1),
        "empty": {},
        "lists": [[], [1, 2], [{"a": [torch.ones(1), {}]}, (torch.ones(1),)]],
        "tuple": ({"a": 1}, torch.ones(1)),
    }
    values, paths = flatten_state_dict(state)
    ours = flatten(state)
    assert list(ours.values) == list(values)
    assert ours.dcp_paths == paths
    assert all(ours.values[name] is values[name] for name in values)


def test_target_values_of_any_type_stay_until_they_are_replaced(tmp_path: Path) -> None:
    """Torch's own way to give meta tensors memory drops what it does not know."""
    dcpstore.save({"w": torch.ones(2)}, tmp_path, progress=False)
    strange = object()
    target = {"w": torch.empty(2, device="meta"), "other": strange}
    load(target, tmp_path, strict={"other": False})
    assert target["other"] is strange
    assert target["w"].tolist() == [1, 1]
