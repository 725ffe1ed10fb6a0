"""What DCP lets its users do with planners, writers and readers, in one process."""

from __future__ import annotations

import io
import pickle
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from compat_states import QUIET, assert_same, blank, full_state, pattern
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint._extension import StreamTransformExtension, ZStandard
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.planner import WriteItemType

from dcpstore import ConfigError, ObjectStoreReader, ObjectStoreWriter, ReadConfig, WriteConfig
from dcpstore.testing import MotoServer

pytestmark = QUIET

MIB = 1 << 20


@pytest.fixture(scope="module")
def bucket(moto_server: MotoServer) -> str:
    moto_server.create_bucket("dcp-protocol")
    return "s3://dcp-protocol"


def save(state: Any, writer: Any, **more: Any) -> Any:
    return dcp.save(state, storage_writer=writer, no_dist=True, **more)


def load(state: Any, reader: Any, **more: Any) -> Any:
    dcp.load(state, storage_reader=reader, no_dist=True, **more)
    return state


# --- planners of torch's planner docstrings ---------------------------------------------------


class RenameOnSave(DefaultSavePlanner):
    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        renamed = {"foo_" + key: value for key, value in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)


class RenameOnLoad(DefaultLoadPlanner):
    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
        self.original_state_dict = state_dict
        renamed = {"foo_" + key: value for key, value in state_dict.items()}
        self.state_dict, self.mappings = flatten_state_dict(renamed)
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def load_bytes(self, read_item, value):
        name = read_item.dest_index.fqn[4:]
        self.original_state_dict[name] = torch.load(value, weights_only=False)


class Half(DefaultSavePlanner):
    def create_local_plan(self):
        plan = super().create_local_plan()
        items = []
        for item in plan.items:
            if item.tensor_data is not None:
                properties = replace(item.tensor_data.properties, dtype=torch.float16)
                item = replace(item, tensor_data=replace(item.tensor_data, properties=properties))
            items.append(item)
        return replace(plan, items=items)

    def resolve_data(self, write_item):
        data = super().resolve_data(write_item)
        return data if write_item.type == WriteItemType.BYTE_IO else data.to(torch.float16)


class ExtraData(DefaultSavePlanner):
    def create_local_plan(self):
        return replace(super().create_local_plan(), planner_data="per-rank-data")

    def create_global_plan(self, all_plans):
        mappings = [replace(plan, planner_data=self.mappings) for plan in all_plans]
        global_plan, metadata = super().create_global_plan(mappings)
        return global_plan, replace(metadata, planner_data=[p.planner_data for p in all_plans])


class Materialize(DefaultLoadPlanner):
    """Resolves to memory of its own and hands it over when it is filled."""

    def resolve_tensor(self, read_item):
        return torch.empty_like(super().resolve_tensor(read_item), device="cpu")

    def commit_tensor(self, read_item, tensor):
        self.original_state_dict[read_item.dest_index.fqn] = tensor


VALUES = {"w": torch.arange(5000.0), "small": torch.arange(7.0), "step": 3}


def test_a_planner_may_rename_keys_both_ways(tmp_path) -> None:
    save(VALUES, ObjectStoreWriter(tmp_path), planner=RenameOnSave())
    assert set(ObjectStoreReader(tmp_path).read_metadata().state_dict_metadata) == {
        "foo_w",
        "foo_small",
        "foo_step",
    }
    assert_same(load(blank(VALUES), ObjectStoreReader(tmp_path), planner=RenameOnLoad()), VALUES)


def test_a_planner_may_cast_on_save(tmp_path) -> None:
    save(VALUES, ObjectStoreWriter(tmp_path), planner=Half())
    half = {key: v.half() if key != "step" else v for key, v in VALUES.items()}
    assert_same(load(blank(half), ObjectStoreReader(tmp_path)), half)
    assert_same(load(blank(half), dcp.FileSystemReader(tmp_path)), half)
    widened = {key: v.float() if key != "step" else v for key, v in half.items()}
    assert_same(load(blank(VALUES), ObjectStoreReader(tmp_path)), widened)


def test_a_planner_may_keep_data_of_its_own_in_the_metadata(tmp_path) -> None:
    save(VALUES, ObjectStoreWriter(tmp_path), planner=ExtraData())
    assert ObjectStoreReader(tmp_path).read_metadata().planner_data == ["per-rank-data"]
    assert_same(load(blank(VALUES), ObjectStoreReader(tmp_path)), VALUES)


def test_a_planner_may_bring_its_own_memory(tmp_path) -> None:
    values = {key: value for key, value in VALUES.items() if key != "step"}
    save(values, ObjectStoreWriter(tmp_path))
    target = blank(values)
    before = {key: value.data_ptr() for key, value in target.items()}
    assert_same(load(target, ObjectStoreReader(tmp_path), planner=Materialize()), values)
    assert not {value.data_ptr() for value in target.values()} & set(before.values())


def test_a_planner_without_flattening_saves_nested_values_whole(tmp_path) -> None:
    state = {"w": VALUES["w"], "nested": {"a": [1, 2], "b": "text"}}
    writer = ObjectStoreWriter(tmp_path)
    save(state, writer, planner=DefaultSavePlanner(flatten_state_dict=False))
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    target = {"w": torch.zeros(5000), "nested": None}
    assert_same(load(target, ObjectStoreReader(tmp_path), planner=planner), state)


def test_keys_that_the_checkpoint_lacks_may_be_left_alone(tmp_path) -> None:
    save(VALUES, ObjectStoreWriter(tmp_path))
    target = {**blank(VALUES), "new": torch.ones(3)}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    load(target, ObjectStoreReader(tmp_path), planner=planner)
    assert_same(target, {**VALUES, "new": torch.ones(3)})


def test_planner_methods_run_in_the_calling_thread_only(tmp_path) -> None:
    threads = set()

    class Watching(DefaultLoadPlanner):
        def resolve_tensor(self, read_item):
            threads.add(threading.get_ident())
            return super().resolve_tensor(read_item)

        def load_bytes(self, read_item, value):
            threads.add(threading.get_ident())
            assert isinstance(value, io.BytesIO)
            super().load_bytes(read_item, value)

        def commit_tensor(self, read_item, tensor):
            threads.add(threading.get_ident())

    state = full_state(large_elements=MIB)
    save(state, ObjectStoreWriter(tmp_path))
    assert_same(load(blank(state), ObjectStoreReader(tmp_path), planner=Watching()), state)
    assert threads == {threading.get_ident()}


# --- extensions -------------------------------------------------------------------------------


class Flipped(StreamTransformExtension):
    """Turns every bit around; has a version of its own, and is unknown to torch."""

    @staticmethod
    def registry_name() -> str:
        return "stream.flipped"

    @staticmethod
    def from_descriptor(version: str) -> Flipped:
        assert version == "3"
        return Flipped()

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/3"

    def transform_to(self, output):
        class Sink(io.RawIOBase):
            def writable(self):
                return True

            def write(self, data):
                output.write(bytes(byte ^ 255 for byte in bytes(data)))
                return len(data)

            def close(self):
                super().close()
                output.close()

        return Sink()

    def transform_from(self, input):  # noqa: A002 - torch's name
        return io.BytesIO(bytes(byte ^ 255 for byte in input.read()))


@pytest.fixture
def registry():
    from torch.distributed.checkpoint._extension import ExtensionRegistry

    made = ExtensionRegistry()
    made.extensions["stream.flipped"] = Flipped
    return made


def test_a_compressed_checkpoint_loads_with_ours_and_with_stock(tmp_path) -> None:
    state = full_state(large_elements=MIB // 2)
    config = WriteConfig(object_bytes=64 << 10, inline_bytes=64)
    save(state, ObjectStoreWriter(tmp_path, extensions=[ZStandard()], config=config))
    assert_same(load(blank(state), ObjectStoreReader(tmp_path)), state)
    assert_same(load(blank(state), dcp.FileSystemReader(tmp_path)), state)


def test_several_extensions_are_undone_by_ours_and_by_stock(tmp_path, registry) -> None:
    """Stock itself records two extensions in the order in which nobody can undo them."""
    state = {"w": torch.arange(3000.0).view(60, 50).t(), "step": 7}
    save(state, ObjectStoreWriter(tmp_path, extensions=[ZStandard(), Flipped()]))
    ours = ObjectStoreReader(tmp_path, extension_registry=registry)
    assert_same(load(blank(state), ours), state)
    stock = dcp.FileSystemReader(tmp_path, _extension_registry=registry)
    assert_same(load(blank(state), stock), state)


def test_an_extension_that_is_unknown_is_named(tmp_path) -> None:
    save({"w": torch.ones(9)}, ObjectStoreWriter(tmp_path, extensions=[Flipped()]))
    with pytest.raises(BaseException, match="flipped"):
        load({"w": torch.zeros(9)}, ObjectStoreReader(tmp_path))


# --- targets ----------------------------------------------------------------------------------


def test_loading_inside_inference_mode_works(tmp_path) -> None:
    state = full_state(large_elements=MIB)
    save(state, ObjectStoreWriter(tmp_path))
    with torch.inference_mode():
        assert_same(load(blank(state), ObjectStoreReader(tmp_path)), state)


def test_tensors_of_inference_mode_are_loaded_into_and_saved(tmp_path) -> None:
    state = full_state(large_elements=MIB)
    with torch.inference_mode():
        target = blank(state)
        made = {"w": torch.arange(9000.0) * 2, "small": torch.ones(2) * 3}
    save(state, ObjectStoreWriter(tmp_path / "a"))
    assert_same(load(target, ObjectStoreReader(tmp_path / "a")), state)
    save(made, ObjectStoreWriter(tmp_path / "b"))
    assert_same(load(blank(made), ObjectStoreReader(tmp_path / "b")), made)


def test_parameters_that_require_grad_are_filled_in_place(tmp_path) -> None:
    torch.manual_seed(0)
    source, model = torch.nn.Linear(300, 200), torch.nn.Linear(300, 200)
    save(source.state_dict(keep_vars=True), ObjectStoreWriter(tmp_path))
    state = model.state_dict(keep_vars=True)
    before = {name: value.data_ptr() for name, value in state.items()}
    load(state, ObjectStoreReader(tmp_path))
    assert {name: value.data_ptr() for name, value in model.named_parameters()} == before
    assert all(value.requires_grad and value.is_leaf for value in model.parameters())
    assert_same(dict(model.named_parameters()), dict(source.named_parameters()))
    model(torch.ones(1, 300)).sum().backward()  # autograd did not see the load


@pytest.mark.parametrize("num_rows", [9, 4000], ids=["small", "large"])
def test_targets_of_any_strides_are_filled_and_nothing_beside_them(tmp_path, num_rows) -> None:
    full = pattern(torch.int32, (num_rows, 6), seed=1)
    save(dict.fromkeys("abcd", full), ObjectStoreWriter(tmp_path))
    wide = torch.full((num_rows, 14), -1, dtype=torch.int32)
    target = {
        "a": torch.full((6, num_rows), -1, dtype=torch.int32).t(),
        "b": wide[:, 1:7],
        "c": torch.full((num_rows * 2, 12), -1, dtype=torch.int32)[::2, ::2],
        "d": wide[:, 8:],
    }
    load(dict(target), ObjectStoreReader(tmp_path))
    for name, value in target.items():
        assert torch.equal(value, full), name
    assert bool((wide[:, 0] == -1).all())
    assert bool((wide[:, 7] == -1).all())


# --- Stateful, values, async, reset, pickle ---------------------------------------------------


class Counter:
    """Stateful as torch means it: it has both methods."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.table = torch.full((600,), float(count))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "table": self.table}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self.table = state["table"]


def test_stateful_objects_are_asked_and_told(tmp_path) -> None:
    save({"counter": Counter(5), "plain": {"a": 1}}, ObjectStoreWriter(tmp_path))
    counter = Counter(0)
    load({"counter": counter, "plain": {"a": 0}}, ObjectStoreReader(tmp_path))
    assert counter.count == 5
    assert bool((counter.table == 5).all())


@pytest.mark.parametrize("size", [10, 100_000], ids=["inline", "stored"])
def test_python_values_of_any_size_come_back(tmp_path, size: int) -> None:
    state = {"text": "x" * size, "numbers": list(range(size // 10)), "set": {1, 2}, "none": None}
    save(state, ObjectStoreWriter(tmp_path))
    target = dict.fromkeys(state, 0) | {"numbers": [0] * (size // 10)}
    assert load(target, ObjectStoreReader(tmp_path)) == state


def test_async_save_keeps_the_values_of_the_call(tmp_path) -> None:
    state = {"w": torch.arange(100_000.0), "step": 1}
    expected = {"w": state["w"].clone(), "step": 1}
    future = dcp.async_save(state, storage_writer=ObjectStoreWriter(tmp_path), no_dist=True)
    state["w"].zero_()
    future.result(timeout=60)
    assert_same(load(blank(expected), ObjectStoreReader(tmp_path)), expected)


def test_checkpoint_id_moves_a_writer_and_a_reader_that_keep_their_options(
    moto_server: MotoServer, bucket: str
) -> None:
    options = moto_server.storage_options()
    writer = ObjectStoreWriter(f"{bucket}/none", storage_options=options)
    reader = ObjectStoreReader(f"{bucket}/none", storage_options=options)
    states = {f"{bucket}/step-{step}": {"w": torch.full((3,), float(step))} for step in range(3)}
    for url, state in states.items():
        save(state, writer, checkpoint_id=url)
    for url, state in states.items():
        assert_same(load(blank(state), reader, checkpoint_id=url), state)
    assert not moto_server.client("dcp-protocol").keys("none")
    with pytest.raises(ConfigError, match="local path"):
        save(state, writer, checkpoint_id="step-9")


def test_one_writer_saves_again_and_again_under_new_names(tmp_path) -> None:
    writer = ObjectStoreWriter(tmp_path, overwrite=True)
    seen: set[str] = set()
    for step in range(4):
        state = {"w": torch.full((9000,), float(step))}
        metadata = save(state, writer)
        made = {info.relative_path for info in metadata.storage_data.values()}
        assert not made & seen
        seen |= made
        assert_same(load(blank(state), ObjectStoreReader(tmp_path)), state)
        assert {path.name for path in tmp_path.glob("*.distcp")} == made


def test_settings_survive_pickling(moto_server: MotoServer, bucket: str) -> None:
    options = moto_server.storage_options()
    state = {"w": torch.arange(4000.0)}
    writer = ObjectStoreWriter(
        f"{bucket}/pickled",
        storage_options=options,
        overwrite=True,
        config=WriteConfig(inline_bytes=0),
        extensions=[ZStandard()],
    )
    reader = ObjectStoreReader(
        f"{bucket}/pickled", storage_options=options, config=ReadConfig(request_bytes=4096)
    )
    save(state, writer)
    for _ in range(2):
        writer, reader = pickle.loads(pickle.dumps((writer, reader)))
        metadata = save(state, writer)
        (info,) = metadata.storage_data.values()
        assert info.transform_descriptors == ["stream.zstd/1"]
        assert_same(load(blank(state), reader), state)


@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable:UserWarning")
def test_dcps_other_entry_points_take_our_reader(tmp_path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    state = {"model": {"a": torch.ones(3), "b": torch.zeros(2)}, "step": 4}
    save(state, ObjectStoreWriter(tmp_path))
    reader = ObjectStoreReader(tmp_path)
    assert_same(_load_state_dict_from_keys(storage_reader=reader), state)
    assert_same(
        _load_state_dict_from_keys({"model.a"}, storage_reader=reader),
        {"model": {"a": torch.ones(3)}},
    )
