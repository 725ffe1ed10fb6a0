"""Checkpoints that lack a part of a tensor: every way to load them says so, and reads nothing."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from compat_states import QUIET
from part_planner import PartPlanner
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import dcpstore
from dcpstore import BroadcastingTorchSaveReader, CorruptError, ObjectStoreReader, RankFailures
from dcpstore.convert import dcp_to_dcp, dcp_to_safetensors, dcp_to_torch_save, safetensors_to_dcp
from dcpstore.plan import LoadPlanner, SavePlanner
from dcpstore.store import open_store
from dcpstore.testing import RecordingStore
from dcpstore.testing.ranks import run_ranks

pytestmark = [*QUIET, pytest.mark.filterwarnings("ignore:.*fsync:UserWarning")]

WHOLE = torch.arange(96.0).reshape(12, 8)
OTHER = torch.arange(5.0)
OLD = -1.0


class HolePlanner(SavePlanner):
    """Leaves chunks out, as a job of several ranks does that lost one.

    Args:
        lost: First element of each chunk to leave out, by key.
    """

    def __init__(self, lost: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(max_item_bytes=128)
        self._lost = lost

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        plan.items[:] = [
            item
            for item in plan.items
            if item.index.offset is None or self._lost.get(item.index.fqn) != item.index.offset
        ]
        return plan


def save_ours(folder: Path, state: Any, lost: Mapping[str, tuple[int, ...]]) -> None:
    dcpstore.save(state, folder, planner=HolePlanner(lost))


def save_stock(folder: Path, state: Any, lost: Mapping[str, tuple[int, ...]]) -> None:
    writer = dcp.FileSystemWriter(folder, sync_files=False)
    dcp.save(state, storage_writer=writer, planner=HolePlanner(lost), no_dist=True)


def save_shards(folder: Path, state: Any, lost: Mapping[str, tuple[int, ...]]) -> None:
    """Write what torch's Hugging Face writer leaves when three ranks save; some files get lost."""
    folder.mkdir(exist_ok=True)
    for number, first in enumerate(range(0, 12, 4), 1):
        if lost == {"w": (first, 0)}:
            continue
        shards = {"w": state["w"][first : first + 4].contiguous()}
        places = {"w": {"saved_offsets": [first, 0]}}
        if number == 1:
            shards["other"], places["other"] = state["other"], {"saved_offsets": [0]}
        about = {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}
        name = f"shard-{number:05}-model-00001-of-00001.safetensors"
        save_file(shards, folder / name, metadata=about)


SAVERS: dict[str, Callable[..., None]] = {
    "ours": save_ours,
    "stock": save_stock,
    "shards": save_shards,
}


@pytest.fixture(params=SAVERS)
def holed(request, tmp_path: Path) -> Path:
    """A checkpoint without rows 4 to 8 of ``w``."""
    SAVERS[request.param](tmp_path / "ckpt", {"w": WHOLE, "other": OTHER}, {"w": (4, 0)})
    return tmp_path / "ckpt"


@pytest.fixture(params=["ours", "stock"])
def holed_dcp(request, tmp_path: Path) -> Path:
    SAVERS[request.param](tmp_path / "ckpt", {"w": WHOLE, "other": OTHER}, {"w": (4, 0)})
    return tmp_path / "ckpt"


def old() -> dict[str, torch.Tensor]:
    return {"w": torch.full((12, 8), OLD), "other": torch.full((5,), OLD)}


def recording(stores: list[RecordingStore]) -> Callable[..., RecordingStore]:
    def opener(*args: Any, **kwargs: Any) -> RecordingStore:
        stores.append(RecordingStore(open_store(*args, **kwargs)))
        return stores[-1]

    return opener


def reads_of_data(stores: list[RecordingStore]) -> list[Any]:
    """Return what was asked for beside metadata, and headers of files, which start at byte 8."""
    return [
        one
        for store in stores
        for one in store.requests
        if one.verb == "get_range"
        and (one.key.endswith(".distcp") or (one.key.endswith(".safetensors") and one.start > 8))
    ]


def assert_names_the_hole(error: BaseException) -> None:
    assert isinstance(error, CorruptError), repr(error)
    said = str(error)
    assert "'w'" in said
    assert "at (4, 0) of shape (4, 8)" in said, said
    assert "32 of its 96 elements are missing" in said


def dcp_cause(error: CheckpointException) -> BaseException:
    return next(iter(error.failures.values()))[0]


# --- loads -------------------------------------------------------------------------------


def assert_refused_before_it_reads(
    holed: Path, load: Callable[[dict[str, Any], ObjectStoreReader], None]
) -> None:
    stores: list[RecordingStore] = []
    state = old()
    with pytest.raises(CorruptError) as caught:
        load(state, ObjectStoreReader(holed, store_opener=recording(stores)))
    assert_names_the_hole(caught.value)
    assert all(bool((value == OLD).all()) for value in state.values())
    assert not reads_of_data(stores)


@pytest.mark.parametrize("planner", [LoadPlanner, dcp.DefaultLoadPlanner])
def test_dcp_load_refuses_a_hole_before_it_reads(holed: Path, planner) -> None:
    def load(state: dict[str, Any], reader: ObjectStoreReader) -> None:
        try:
            dcp.load(state, storage_reader=reader, planner=planner(), no_dist=True)
        except CheckpointException as error:
            raise dcp_cause(error) from error

    assert_refused_before_it_reads(holed, load)


@pytest.mark.parametrize("planner", [LoadPlanner, dcp.DefaultLoadPlanner])
def test_dcpstore_load_refuses_a_hole_before_it_reads(holed: Path, planner) -> None:
    def load(state: dict[str, Any], reader: ObjectStoreReader) -> None:
        dcpstore.load(state, storage_reader=reader, planner=planner())

    assert_refused_before_it_reads(holed, load)


@pytest.mark.parametrize("planner", [LoadPlanner, dcp.DefaultLoadPlanner])
def test_dcpstore_load_refuses_a_hole_that_another_reader_tells_of(tmp_path: Path, planner) -> None:
    save_stock(tmp_path, {"w": WHOLE, "other": OTHER}, {"w": (4, 0)})
    state = old()
    with pytest.raises(CorruptError) as caught:
        dcpstore.load(state, storage_reader=dcp.FileSystemReader(tmp_path), planner=planner())
    assert_names_the_hole(caught.value)
    assert all(bool((value == OLD).all()) for value in state.values())


def test_ranks_that_would_share_are_all_told(holed: Path) -> None:
    stores: list[RecordingStore] = []

    def load(group: Any) -> dict[str, torch.Tensor]:
        state = old()
        reader = ObjectStoreReader(holed, store_opener=recording(stores))
        with pytest.raises(RankFailures) as caught:
            dcpstore.load(state, storage_reader=reader, process_group=group, share="always")
        for error in caught.value.exceptions.values():
            assert_names_the_hole(error)
        return state

    for state in run_ranks(3, load, deadline_s=60).values():
        assert all(bool((value == OLD).all()) for value in state.values())
    assert not reads_of_data(stores)


def test_keys_and_parts_that_the_hole_does_not_touch_load(holed: Path) -> None:
    other = {"other": torch.zeros(5)}
    stores: list[RecordingStore] = []
    dcpstore.load(other, storage_reader=ObjectStoreReader(holed, store_opener=recording(stores)))
    is_inline = any(".distcp" in path.name and path.name.count(".") > 1 for path in holed.iterdir())
    assert bool(reads_of_data(stores)) != is_inline
    assert torch.equal(other["other"], OTHER)
    dcp.load(other, storage_reader=ObjectStoreReader(holed), no_dist=True)
    for first, count in ((0, 4), (8, 4)):
        rows = {"w": torch.zeros(count, 8)}
        planner = PartPlanner({"w": (first, 0)})
        dcp.load(rows, storage_reader=ObjectStoreReader(holed), planner=planner, no_dist=True)
        assert torch.equal(rows["w"], WHOLE[first : first + count])
    rows = {"w": torch.zeros(5, 8)}
    with pytest.raises(CheckpointException, match=r"at \(4, 0\)"):
        planner = PartPlanner({"w": (7, 0)})
        dcp.load(rows, storage_reader=ObjectStoreReader(holed), planner=planner, no_dist=True)


def test_a_tensor_without_any_chunk_is_no_empty_one(tmp_path: Path) -> None:
    dcp.save({"w": WHOLE}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    saved = dcp.FileSystemReader(tmp_path).read_metadata()
    saved.state_dict_metadata["w"].chunks.clear()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(saved))
    for planner in (LoadPlanner(), dcp.DefaultLoadPlanner()):
        with pytest.raises(CorruptError, match="96 of its 96 elements are missing"):
            dcpstore.load({"w": torch.zeros(12, 8)}, tmp_path, planner=planner)


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_what_a_rank_saved_alone_loads_and_what_others_hold_does_not(tmp_path, kind: str) -> None:
    writer: Any = dcpstore.ObjectStoreWriter(tmp_path)
    if kind == "stock":
        writer = dcp.FileSystemWriter(tmp_path, sync_files=False)
    planner = HolePlanner({"w": (4, 0)})
    dcp.save(
        {"w": WHOLE}, storage_writer=writer, planner=planner, no_dist=True, use_collectives=False
    )
    assert not (tmp_path / ".metadata").exists()
    own = {"w": torch.zeros(4, 8)}
    reader = ObjectStoreReader(tmp_path)
    dcp.load(own, storage_reader=reader, planner=PartPlanner({"w": (8, 0)}), no_dist=True)
    assert torch.equal(own["w"], WHOLE[8:])
    with pytest.raises(CorruptError, match="can load only what it saved"):
        dcpstore.load({"w": torch.zeros(12, 8)}, tmp_path)


# --- the optimizer -----------------------------------------------------------------------


@pytest.fixture(params=["ours", "stock"])
def holed_optimizer(request, tmp_path: Path) -> Path:
    model = nn.Linear(8, 12, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    state = {"optim": get_optimizer_state_dict(model, optimizer)}
    lost = {"optim.state.weight.exp_avg": (4, 0)}
    SAVERS[request.param](tmp_path / "optim", state, lost)
    return tmp_path / "optim"


def test_an_optimizer_with_a_hole_is_refused(holed_optimizer: Path) -> None:
    model = nn.Linear(8, 12, bias=False)
    with pytest.raises(CorruptError, match=r"exp_avg': .* at \(4, 0\) of shape \(4, 8\)"):
        dcpstore.load_sharded_optimizer_state_dict(model.state_dict(), "optim", holed_optimizer)
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(CorruptError, match=r"exp_avg': .* at \(4, 0\) of shape \(4, 8\)"):
        dcpstore.restore_optimizer(model, optimizer, holed_optimizer)
    assert not optimizer.state


# --- converters and copies ---------------------------------------------------------------


CONVERTERS: dict[str, Callable[..., Any]] = {
    "torch": lambda source, to, **more: dcp_to_torch_save(source, to / "model.pt", **more),
    "safetensors": dcp_to_safetensors,
    "copy": dcp_to_dcp,
    "anew": lambda source, to, **more: dcp_to_dcp(source, to, reencode=True, **more),
}


@pytest.mark.parametrize("convert", CONVERTERS)
def test_no_converter_and_no_copy_takes_a_hole(holed_dcp: Path, tmp_path: Path, convert) -> None:
    with pytest.raises(CorruptError, match=r"'w': its chunks hold 64 of 96 elements"):
        CONVERTERS[convert](holed_dcp, tmp_path / "to")
    assert not [path for path in tmp_path.glob("to/**/*") if path.is_file()]
    CONVERTERS[convert](holed_dcp, tmp_path / "to", exclude=["w"])
    assert [path for path in tmp_path.glob("to/**/*") if path.is_file()]


def test_no_converter_takes_shards_with_a_hole(tmp_path: Path) -> None:
    save_shards(tmp_path / "ckpt", {"w": WHOLE, "other": OTHER}, {"w": (4, 0)})
    for convert in (safetensors_to_dcp, dcp_to_safetensors):
        with pytest.raises(CorruptError, match=r"'w': its chunks hold 64 of 96 elements"):
            convert(tmp_path / "ckpt", tmp_path / "to")
        assert not [path for path in tmp_path.glob("to/**/*") if path.is_file()]


# --- files of a Hugging Face folder ------------------------------------------------------


@pytest.mark.parametrize("with_index", [True, False])
def test_a_file_that_the_index_or_its_neighbours_promise_is_missed(
    tmp_path: Path, with_index: bool
) -> None:
    names = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    for number, name in enumerate(names):
        if number != 1:
            save_file({f"w{number}": OTHER}, tmp_path / name)
    if with_index:
        weight_map = {f"w{number}": name for number, name in enumerate(names)}
        (tmp_path / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": weight_map})
        )
    state = {"w0": torch.zeros(5), "w1": torch.full((5,), OLD), "w2": torch.zeros(5)}
    for load in (
        lambda: dcpstore.load(state, tmp_path, strict=False),
        lambda: safetensors_to_dcp(tmp_path, tmp_path / "to"),
        lambda: dcpstore.open_checkpoint(tmp_path),
    ):
        with pytest.raises(CorruptError, match=r"model-00002-of-00003\.safetensors is missing"):
            load()
    assert bool((state["w0"] == 0).all())
    with pytest.raises(CheckpointException, match=r"model-00002-of-00003\.safetensors is missing"):
        dcp.load(state, storage_reader=ObjectStoreReader(tmp_path), no_dist=True)


def test_parts_of_a_file_by_some_ranks_are_no_missing_file(tmp_path: Path) -> None:
    """A rank that holds nothing of a file writes none."""
    for name, key in (
        ("shard-00001-model-00001-of-00002.safetensors", "a"),
        ("shard-00003-model-00002-of-00002.safetensors", "b"),
    ):
        save_file({key: OTHER}, tmp_path / name)
    state = {"a": torch.zeros(5), "b": torch.zeros(5)}
    dcpstore.load(state, tmp_path)
    assert torch.equal(state["a"], OTHER)
    assert torch.equal(state["b"], OTHER)


def test_an_index_may_name_some_of_the_numbered_files(tmp_path: Path) -> None:
    save_file({"a": OTHER}, tmp_path / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    state = {"a": torch.zeros(5)}
    dcpstore.load(state, tmp_path)
    assert torch.equal(state["a"], OTHER)


def test_a_tensor_in_two_files_must_have_one_shape(tmp_path: Path) -> None:
    save_file({"w": WHOLE}, tmp_path / "one.safetensors")
    save_file({"w": WHOLE}, tmp_path / "two.safetensors")
    state = {"w": torch.zeros(12, 8)}
    dcpstore.load(state, tmp_path)
    assert torch.equal(state["w"], WHOLE)
    save_file({"w": WHOLE[:5].contiguous()}, tmp_path / "two.safetensors")
    for load in (dcpstore.load, lambda state, url: dcpstore.read_tensor(url, "w")):
        with pytest.raises(CorruptError, match="overlap"):
            load({"w": torch.zeros(12, 8)}, tmp_path)


# --- a torch.save file -------------------------------------------------------------------


@pytest.mark.parametrize("direct", [False, True])
def test_a_tensor_whose_storage_is_short_is_refused_before_it_is_read(
    tmp_path: Path, direct: bool
) -> None:
    """The file is as torch writes it, but for the shape that its pickle gives the tensor."""
    torch.save({"w": WHOLE}, tmp_path / "whole.pt")
    with (
        zipfile.ZipFile(tmp_path / "whole.pt") as whole,
        zipfile.ZipFile(tmp_path / "model.pt", "w") as longer,
    ):
        for name in whole.namelist():
            data = whole.read(name)
            if name.endswith("data.pkl"):
                assert data.count(b"K\x0cK\x08\x86") == 1  # (12, 8)
                data = data.replace(b"K\x0cK\x08\x86", b"K\x0dK\x08\x86")
            longer.writestr(name, data)
    stores: list[RecordingStore] = []
    reader = BroadcastingTorchSaveReader(
        tmp_path / "model.pt", direct=direct, store_opener=recording(stores)
    )
    state = {"w": torch.full((13, 8), OLD)}
    with pytest.raises(CorruptError, match="reaches past its storage"):
        dcpstore.load(state, storage_reader=reader)
    assert bool((state["w"] == OLD).all())
