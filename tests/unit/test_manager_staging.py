"""A staged state is equal, tied as the state is, and its own; every save uses its memory again."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.testing._internal.two_tensor import TwoTensor

import dcpstore
from dcpstore import ConfigError, IncompatibleError, ObjectStoreReader, Stager

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantiz:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]

Point = namedtuple("Point", "x y")
MIB = 1 << 20


class Model:
    """Follows DCP's ``Stateful`` protocol."""

    def __init__(self) -> None:
        self.weight = torch.ones(5)
        self.threads: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        self.threads.append(threading.current_thread().name)
        return {"weight": self.weight}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("nothing is loaded here")


def plain() -> dict[str, Any]:
    numbers = torch.arange(240.0)
    return {
        "contiguous": numbers.clone(),
        "transposed": numbers.clone().reshape(12, 20).T,
        "every other": numbers.clone()[::2],
        "one column of many": numbers.clone().reshape(4, 60)[:, 7],
        "expanded": torch.tensor([3.0]).expand(5, 4),
        "in the middle": numbers.clone()[17:31],
        "no dimension": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "narrow": torch.arange(7, dtype=torch.int8),
        "truth": torch.tensor([True, False]),
        "half": numbers.bfloat16(),
        "conjugated": torch.view_as_complex(numbers.clone().reshape(-1, 2)).conj(),
        "negated": torch.view_as_complex(numbers.clone().reshape(-1, 2)).conj().imag,
        "a column, conjugated": torch.ones(3, 40, dtype=torch.complex64)[:, 3].conj() * 1j,
        "parameter": torch.nn.Parameter(numbers.clone()),
        "frozen parameter": torch.nn.Parameter(numbers.clone(), requires_grad=False),
        "with history": torch.nn.Parameter(numbers.clone()) * 2,
    }


def nested() -> dict[str, Any]:
    layer = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    return {
        "model": layer.state_dict(),
        "list": [torch.ones(2), {"deep": [torch.zeros(3)]}],
        "numbers": [1, 2, 3],
        "pair": (1, "two"),
        "of steps": {1: torch.ones(1), "two": 2},
        "array": np.arange(3),
        "values": {"lr": 0.1, "name": "adam", "none": None, "flag": True, "blob": b"xyz"},
        "ordered": OrderedDict(b=torch.ones(1), a=1),
    }


def opaque() -> dict[str, Any]:
    return {
        "sparse": torch.eye(5).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.rand(6), 0.1, 3, torch.qint8),
        "wrapper": TwoTensor(torch.ones(4), torch.zeros(4)),
    }


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": plain,
    "nested": nested,
    "opaque": opaque,
}


def stored(url: str) -> tuple[list[bytes], Any]:
    """What a checkpoint consists of: the bytes of its objects, and what it says of its keys."""
    memory = fsspec.filesystem("memory")
    folder = url.removeprefix("memory:/")
    objects = sorted(name for name in memory.find(folder) if name.endswith(".distcp"))
    metadata = ObjectStoreReader(url).read_metadata()
    return [memory.cat(name) for name in objects], metadata.state_dict_metadata


PLANNERS: dict[str, Callable[[], Any]] = {
    "ours": dcpstore.SavePlanner,
    "torch's": dcp.DefaultSavePlanner,
}


@pytest.fixture
def _wrapper_is_safe() -> Iterator[None]:
    """Only then does a save of ours take it."""
    with torch.serialization.safe_globals([TwoTensor, getattr, torch.device]):
        yield


@pytest.mark.usefixtures("_wrapper_is_safe")
@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_staged_state_gives_the_bytes_that_the_state_gives(kind: str, planner: str) -> None:
    folder, make = f"memory://staging/{kind}-{planner}", PLANNERS[planner]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        state = KINDS[kind]()
    dcpstore.save(state, f"{folder}/now", planner=make())
    save = dcpstore.async_save(state, f"{folder}/later", planner=make())
    for value in tensors_in(state):
        if type(value) is torch.Tensor and value.layout == torch.strided and not value.is_nested:
            scribble(value)
    save.result(20)
    assert stored(f"{folder}/now") == stored(f"{folder}/later")


def scribble(tensor: torch.Tensor) -> None:
    """Overwrite all memory of a tensor."""
    if tensor.is_quantized:
        return
    flat = torch.empty(0, dtype=torch.uint8)
    flat.set_(tensor.untyped_storage(), 0, (tensor.untyped_storage().nbytes(),)).fill_(0xA5)


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for one in value for t in tensors_in(one)] if isinstance(value, list | tuple) else []


def test_what_shares_memory_is_copied_once_and_stays_tied() -> None:
    base = torch.arange(1000.0)
    tied = torch.nn.Parameter(base)
    column = torch.arange(4000.0).reshape(40, 100)[:, 3]
    state = {
        "embedding": tied,
        "head": tied,
        "view": base[10:20],
        "overlapping": base[15:40].view(5, 5),
        "as bytes": base.view(torch.uint8),
        "column": column,
        "same column": column.view(40),
    }
    stager = Stager()
    staged = stager.stage(state)
    assert stager.num_bytes < 1.2 * (base.nbytes + column.nbytes)
    assert staged["embedding"] is staged["head"]
    staged["embedding"].data[17] = -1
    assert staged["view"][7] == -1
    assert staged["overlapping"][0, 2] == -1
    assert staged["as bytes"][4 * 17 : 4 * 18].view(torch.float32) == -1
    staged["column"][2] = -1
    assert staged["same column"][2] == -1
    assert base[17] == 17
    assert column[2] == 203


def test_parts_of_one_storage_between_which_much_lies_are_copied_alone() -> None:
    storage = torch.arange(float(MIB))
    stager = Stager()
    staged = stager.stage({"first": storage[:10], "last": storage[-10:], "step": storage[::1000]})
    assert stager.num_bytes < 10_000
    assert torch.equal(staged["first"], storage[:10])
    assert torch.equal(staged["last"], storage[-10:])
    assert torch.equal(staged["step"], storage[::1000])


def test_a_wrapper_is_made_anew_of_copies() -> None:
    one, other = torch.ones(4), torch.zeros(4)
    staged = Stager().stage({"wrapper": TwoTensor(one, other), "part": one})
    one.fill_(9)
    other.fill_(9)
    assert type(staged["wrapper"]) is TwoTensor
    assert staged["wrapper"].a.tolist() == [1, 1, 1, 1]
    assert staged["wrapper"].b.tolist() == [0, 0, 0, 0]
    staged["part"].fill_(5)
    assert staged["wrapper"].a.tolist() == [5, 5, 5, 5], "what was tied is"


def test_containers_and_values_are_the_copys_own() -> None:
    inner = [1, 2]
    state = {
        "dict": {"values": inner, "again": inner},
        "set": {1, 2},
        "array": np.zeros(3),
        "default": defaultdict(list, a=[torch.ones(1)]),
        "point": Point(torch.ones(1), 2),
        "tuple": (torch.ones(1), [3]),
        "fixed": MappingProxyType({"a": torch.ones(1)}),
    }
    staged = Stager().stage(state)
    inner.append(3)
    state["set"].add(3)
    state["array"][:] = 1
    state["default"]["a"][0].fill_(9)
    state["default"]["b"].append(1)
    state["point"].x.fill_(9)
    state["tuple"][1].append(4)
    assert staged["dict"] == {"values": [1, 2], "again": [1, 2]}
    assert staged["dict"]["values"] is staged["dict"]["again"]
    assert staged["set"] == {1, 2}
    assert staged["array"].tolist() == [0, 0, 0]
    assert staged["default"] == {"a": [torch.ones(1)]}
    assert staged["default"].default_factory is list
    assert staged["point"] == (torch.ones(1), 2)
    assert type(staged["point"]) is Point
    assert staged["tuple"] == (torch.ones(1), [3])
    assert isinstance(staged["fixed"], MappingProxyType)


def test_a_state_that_contains_itself_does_not_hang_the_copy() -> None:
    state: dict[str, Any] = {"a": {"weight": torch.ones(2)}}
    state["a"]["self"] = state["a"]
    staged = Stager().stage(state)
    assert staged["a"]["self"] is staged["a"]


def test_stateful_values_are_asked_by_the_calling_thread() -> None:
    model = Model()
    save = dcpstore.async_save({"model": model}, "memory://staging/stateful", wait_staged=False)
    save.result(20)
    assert model.threads == [threading.current_thread().name]


def test_frozen_names_and_all_below_them_are_handed_on() -> None:
    state = {
        "model": {"a": torch.ones(2), "ab": torch.ones(2), "b": {"c": torch.ones(2), "l": [0]}}
    }
    staged = Stager().stage(state, ["model.a", "model.b"])
    assert staged["model"]["a"] is state["model"]["a"]
    assert staged["model"]["b"] is state["model"]["b"]
    assert staged["model"]["ab"] is not state["model"]["ab"]
    staged = Stager().stage(state, lambda name: name.endswith(".c"))
    assert staged["model"]["b"]["c"] is state["model"]["b"]["c"]
    assert staged["model"]["a"] is not state["model"]["a"]
    assert staged["model"]["b"]["l"] is not state["model"]["b"]["l"]


def test_memory_is_used_again_and_grows_with_the_state() -> None:
    stager = Stager()
    staged = stager.stage({"w": torch.ones(1000)})
    first = staged["w"].data_ptr()
    num_bytes = stager.num_bytes
    del staged
    assert stager.stage({"w": torch.ones(500, dtype=torch.float64)})["w"].data_ptr() == first
    assert stager.num_bytes == num_bytes
    staged = stager.stage({"w": torch.full((3000,), 2.0), "x": torch.ones(10)})
    assert staged["w"].sum() == 6000
    assert 12_040 <= stager.num_bytes < 12_200
    assert stager.stage({"w": torch.ones(7)})["w"].sum() == 7


@pytest.mark.parametrize("num_threads", [1, 4])
def test_large_tensors_are_copied_in_slices(num_threads: int) -> None:
    state = {str(n): torch.arange(n * MIB // 4 + n, dtype=torch.int32) for n in (1, 20, 3)}
    state["strided"] = torch.arange(4 * MIB, dtype=torch.int32).reshape(2048, 2048)[:, ::2]
    staged = Stager(num_threads).stage(state)
    for name, tensor in state.items():
        assert torch.equal(staged[name], tensor), name
        assert staged[name].data_ptr() != tensor.data_ptr()


def test_what_was_made_in_inference_mode_is_staged_in_it_and_out_of_it() -> None:
    with torch.inference_mode():
        state = {"w": torch.ones(10), "column": torch.ones(100, 100)[:, 1]}
        inside = Stager().stage(state)
    outside = Stager().stage(state)
    for staged in (inside, outside):
        assert staged["w"].sum() == 10
        assert staged["column"].sum() == 100
        staged["w"].requires_grad_()


def test_the_default_device_of_the_caller_is_not_that_of_the_copy() -> None:
    tensor = torch.ones(100)
    with torch.device("meta"):
        staged = Stager().stage({"w": tensor, "empty": tensor[:0], "column": tensor[::50]})
    assert {one.device.type for one in staged.values()} == {"cpu"}
    assert staged["w"].sum() == 100


def test_a_freed_tensor_is_an_error_that_names_it() -> None:
    weight = torch.ones(10)
    weight.untyped_storage().resize_(0)
    with pytest.raises(IncompatibleError, match=r"memory of 'model\.weight' was freed"):
        Stager().stage({"model": {"weight": weight}})


def test_a_meta_tensor_is_an_error_that_names_it() -> None:
    with pytest.raises(IncompatibleError, match=r"'model\.0' is a meta tensor"):
        Stager().stage({"model": [torch.empty(3, device="meta")]})


class Uncopyable:
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("one of a kind")


def test_a_value_that_cannot_be_copied_is_an_error_that_names_it() -> None:
    value = Uncopyable()
    with pytest.raises(IncompatibleError, match=r"'a\.b', a Uncopyable, .*one of a kind"):
        Stager().stage({"a": {"b": value}})
    assert Stager().stage({"a": {"b": value}}, ["a.b"])["a"]["b"] is value


def test_a_single_name_for_frozen_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be a list of names"):
        Stager().stage({}, "model")
    with pytest.raises(ConfigError, match="num_threads=0"):
        Stager(0)


class Remaking:
    """Gives new tensors each time, as the ``state_dict()`` of a model does, in the same memory."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(30, 20)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.model.state_dict())

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("nothing is loaded here")


def test_the_layout_stays_while_tensors_lie_where_they_lay_and_is_made_anew_else() -> None:
    stager, remaking = Stager(), Remaking()
    state: dict[str, Any] = {"model": remaking, "extra": torch.ones(100)}
    staged = stager.stage(state)
    again = stager.stage(state)
    assert again["model"]["weight"] is staged["model"]["weight"], "nothing was laid out again"
    with torch.no_grad():
        remaking.model.weight.fill_(5)
    assert stager.stage(state)["model"]["weight"].sum() == 3000
    state["extra"] = torch.full((100,), 2.0)
    assert stager.stage(state)["extra"].sum() == 200
    del state["extra"]
    fewer = stager.stage(state)
    assert fewer.keys() == {"model"}
    assert fewer["model"]["weight"].sum() == 3000
    state["other shape"] = remaking.model.weight.detach()[:, :7]
    assert stager.stage(state)["other shape"].sum() == 700


def test_the_stager_keeps_no_tensor_of_the_loop() -> None:
    stager, column = Stager(), torch.ones(100, 100)[:, 3]
    state = {"weight": torch.ones(10), "column": column}
    stager.stage(state)
    alive = [weakref.ref(tensor) for tensor in state.values()]
    state.clear()
    del column
    assert [one() for one in alive] == [None, None]


class Derived(torch.Tensor):
    """A wrapper that computes one of its parts each time it is asked for it."""

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Derived:
        made: Derived = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        raise NotImplementedError(function)

    @property
    def twice(self) -> torch.Tensor:
        return self.held * 2

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["held", "twice"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, _: Any, size: Any, stride: Any) -> Derived:
        made = Derived(inner["held"])
        made.given_twice = inner["twice"]
        return made


def test_parts_that_are_made_when_asked_for_are_copied_each_time() -> None:
    stager, held = Stager(), torch.ones(50)
    for value in (1.0, 2.0, 3.0):
        held.fill_(value)
        staged = stager.stage({"derived": Derived(held)})
        held.fill_(0)
        assert staged["derived"].held.sum() == 50 * value
        assert staged["derived"].given_twice.sum() == 100 * value
