"""What a save accepts, its default load gives back equal, type included."""

from __future__ import annotations

import io
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard
from value_examples import CLASSES, ENCODED, OPENED, REFUSED, Color, Point, same

import dcpstore
from dcpstore import (
    CorruptError,
    IncompatibleError,
    LoadPlanner,
    ObjectStoreReader,
    ObjectStoreWriter,
    SavePlanner,
    WriteConfig,
)
from dcpstore.convert import dcp_to_dcp
from dcpstore.format.manifest import Manifest, decode, encode
from dcpstore.testing.ranks import run_ranks
from dcpstore.write.job import WriteJob

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

VALUES = [*OPENED, *ENCODED]


def state_of(values: list[Any]) -> dict[str, Any]:
    """Every value at a key of its own, inside a tuple so that DCP does not take it apart."""
    return {"values": {number: (value,) for number, value in enumerate(values)}}


def blank(values: list[Any]) -> dict[str, Any]:
    return {"values": dict.fromkeys(range(len(values)), CLASSES)}


def manifest_of(url: Path) -> tuple[int, Manifest]:
    found = ObjectStoreReader(url).discover()
    assert found.manifest is not None
    return found.manifest[8], decode(found.manifest)


def save(state: Any, url: Any, **options: Any) -> None:
    dcpstore.save(state, url, progress=False, **options)


def load(state: Any, url: Any, **options: Any) -> Any:
    dcpstore.load(state, url, progress=False, **options)
    return state


@pytest.mark.parametrize("inline_bytes", [0, 2048])
def test_every_accepted_value_comes_back(inline_bytes: int, tmp_path: Path) -> None:
    save(state_of(VALUES), tmp_path, config=WriteConfig(inline_bytes=inline_bytes))
    assert same(load(blank(VALUES), tmp_path), state_of(VALUES))


def test_every_accepted_value_comes_back_to_three_ranks(tmp_path: Path) -> None:
    def work(group: Any) -> Any:
        save(state_of(VALUES), tmp_path, process_group=group)
        return load(blank(VALUES), tmp_path, process_group=group)

    for loaded in run_ranks(3, work).values():
        assert same(loaded, state_of(VALUES))


def test_plain_dcp_with_our_planners_does_the_same(tmp_path: Path) -> None:
    values = ENCODED
    dcp.save(state_of(values), storage_writer=ObjectStoreWriter(tmp_path), planner=SavePlanner())
    state = blank(values)
    dcp.load(state, storage_reader=ObjectStoreReader(tmp_path), planner=LoadPlanner())
    assert same(state, state_of(values))


def test_stock_readers_see_what_they_always_saw(tmp_path: Path) -> None:
    saved = {"array": np.arange(5), "text": "a"}
    save(saved, tmp_path)
    for reader in (ObjectStoreReader(tmp_path), dcp.FileSystemReader(tmp_path)):
        state = {"array": None, "text": None}
        dcp.load(state, storage_reader=reader)
        assert same(state, saved)


def test_streams_are_transformed_with_their_encodings(tmp_path: Path) -> None:
    secret = np.zeros(5000, np.uint8)
    writer = ObjectStoreWriter(tmp_path, extensions=[ZStandard()])
    dcpstore.save({"a": secret}, storage_writer=writer, progress=False)
    (data,) = tmp_path.glob("*.distcp")
    assert data.stat().st_size < 1000
    assert same(load({"a": None}, tmp_path), {"a": secret})


# --- where it lies -------------------------------------------------------------------


def test_version_2_is_written_only_where_something_needs_it(tmp_path: Path) -> None:
    save(state_of(OPENED), tmp_path / "1")
    save({"w": torch.ones(2), "x": np.int64(1)}, tmp_path / "2")
    version, manifest = manifest_of(tmp_path / "1")
    assert version == 1
    assert all(item.encoded is None for item in manifest.items.values())
    version, manifest = manifest_of(tmp_path / "2")
    assert version == 2
    assert [item.encoded is not None for item in manifest.items.values()] == [False, True]


def test_a_manifest_with_encodings_is_what_was_encoded(tmp_path: Path) -> None:
    save({"x": np.zeros(3000), "y": np.int8(1), "z": 1}, tmp_path)
    _, manifest = manifest_of(tmp_path)
    again = decode(encode(manifest))
    for one, item in manifest.items.items():
        assert len(again.items[one].forms) == len(item.forms)
        for form, other in zip(item.forms, again.items[one].forms, strict=True):
            assert (form.key, form.record, form.kind) == (other.key, other.record, other.kind)
            assert form.inline == other.inline
            assert np.array_equal(form.checksums, other.checksums)
    assert manifest.items[next(iter(manifest.items))].forms[1].kind == "value"


def test_an_array_is_fetched_once(tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal(200_000)
    save({"a": array}, tmp_path)
    result = dcpstore.load({"a": None}, tmp_path, progress=False)
    assert result.rank.num_requests == 1
    assert array.nbytes <= result.rank.fetched_bytes < 1.01 * array.nbytes


def test_damage_in_an_encoding_is_found(tmp_path: Path, cli: Any) -> None:
    save({"a": np.zeros(5000)}, tmp_path)
    _, manifest = manifest_of(tmp_path)
    (item,) = manifest.items.values()
    path = tmp_path / item.encoded.key
    data = bytearray(path.read_bytes())
    data[item.encoded.record.start + 20_000] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match="CRC32C"):
        load({"a": None}, tmp_path)
    code, out, _ = cli("verify", tmp_path)
    assert code != 0
    assert "not the bytes that were saved" in out


def test_copies_keep_what_is_encoded(tmp_path: Path, cli: Any) -> None:
    saved = {"a": np.arange(3000.0), "b": (Color.RED, b"")}
    save(saved, tmp_path / "a")
    assert cli("copy", tmp_path / "a", tmp_path / "b")[0] == 0
    dcp_to_dcp(tmp_path / "a", tmp_path / "c", reencode=True, progress=False)
    for name in "bc":
        assert same(load({"a": None, "b": Color}, tmp_path / name), saved)
        assert cli("verify", tmp_path / name)[0] == 0
        assert cli("diff", tmp_path / "a", tmp_path / name)[0] == 0


def test_a_difference_in_an_encoded_value_is_told(tmp_path: Path, cli: Any) -> None:
    for name, last in (("a", 1.0), ("b", 2.0)):
        save({"same": np.arange(3), "array": np.array([0, last]), "c": Color.RED}, tmp_path / name)
    code, out, _ = cli("diff", tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert "array" in out
    assert "same" not in out.replace("the same", "")


def test_values_are_read_one_by_one(tmp_path: Path) -> None:
    save({"a": np.arange(3), "c": Color.RED}, tmp_path)
    with dcpstore.open_checkpoint(tmp_path) as checkpoint:
        assert same(checkpoint.read_value("a"), np.arange(3))
        assert checkpoint.read_value("c", target=Color) is Color.RED
        assert checkpoint.read_value("c", allow_pickle=True) is Color.RED
        with pytest.raises(IncompatibleError, match=r"'c'.*value_examples:Color"):
            checkpoint.read_value("c")


# --- what is refused -------------------------------------------------------------------


@pytest.mark.parametrize("value", [*REFUSED, threading.Lock()], ids=lambda one: type(one).__name__)
def test_what_is_not_accepted_is_refused_before_a_byte_is_written(
    value: Any, tmp_path: Path
) -> None:
    with pytest.raises(IncompatibleError) as caught:
        save({"w": torch.ones(2), "deep": {"er": (value,)}}, tmp_path)
    assert "'deep.er'" in str(caught.value)
    assert "allow_pickle=True" in str(caught.value)
    assert not list(tmp_path.iterdir())


def nested() -> Any:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


class Tagged(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (nested, "nested tensor"),
        (lambda: torch.ones(2, device="meta"), "meta tensor"),
        (lambda: torch.ones(2).to_mkldnn(), "mkldnn"),
        (lambda: torch.ones(2).as_subclass(Tagged), "Tagged"),
        (torch.nn.UninitializedParameter, "meta tensor"),
    ],
)
def test_a_tensor_that_torch_would_not_give_back_is_refused(
    make: Any, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(IncompatibleError, match=f"'x' is .*{reason}"):
        save({"x": make()}, tmp_path)
    assert not list(tmp_path.iterdir())


class Marked(torch.nn.Parameter):
    pass


def test_a_kind_of_parameter_is_filled_in_place(tmp_path: Path) -> None:
    save({"w": Marked(torch.ones(2))}, tmp_path)
    target = Marked(torch.zeros(2))
    assert load({"w": target}, tmp_path)["w"] is target
    assert target.tolist() == [1, 1]


def test_pickle_is_allowed_only_on_both_sides(tmp_path: Path) -> None:
    value = REFUSED[0]
    save({"x": value, "a": np.arange(3)}, tmp_path, planner=SavePlanner(allow_pickle=True))
    with pytest.raises(CorruptError, match="'x': its record names more than plain data"):
        load({"x": None, "a": None}, tmp_path)
    assert same(load({"a": None}, tmp_path), {"a": np.arange(3)})
    state = load({"x": None, "a": None}, tmp_path, planner=LoadPlanner(allow_pickle=True))
    assert type(state["x"]) is type(value)


def test_an_instance_needs_its_class_in_the_target(tmp_path: Path) -> None:
    save({"x": [Point(1, Color.RED)]}, tmp_path)
    with pytest.raises(IncompatibleError, match=r"'x'.*value_examples:Color.* NoneType there"):
        load({"x": None}, tmp_path)
    assert load({"x": [Point(0, Color.BLUE)]}, tmp_path) == {"x": [Point(1, Color.RED)]}
    pickled = load({"x": None}, tmp_path, planner=LoadPlanner(allow_pickle=True))
    assert pickled == {"x": [Point(1, Color.RED)]}


# --- planners that extend ours -----------------------------------------------------------


class Redacting(SavePlanner):
    def transform_object(self, write_item: Any, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            value = f"a {type(value).__name__}"
        return super().transform_object(write_item, value)


def test_an_extension_may_store_what_it_makes_of_a_value(tmp_path: Path) -> None:
    save({"x": REFUSED[0]}, tmp_path, planner=Redacting())
    assert load({"x": None}, tmp_path) == {"x": "a Arbitrary"}


class Own(LoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        self.original_state_dict[key] = torch.load(value, weights_only=False)


class Counting(LoadPlanner):
    reads_encoded_values = True
    seen = 0

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.seen += 1
        super().load_bytes(read_item, value)


@pytest.mark.parametrize("size", [3, 30_000])
def test_an_extension_reads_torchs_bytes_unless_it_says_otherwise(
    size: int, tmp_path: Path
) -> None:
    saved = {"a": np.arange(size)}
    save(saved, tmp_path)
    assert same(load({"a": None}, tmp_path, planner=Own()), saved)
    counting = Counting()
    assert same(load({"a": None}, tmp_path, planner=counting), saved)
    assert counting.seen == 1


# --- torch's planner -----------------------------------------------------------------------


def test_torchs_planner_is_warned_of_what_a_load_refuses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"fine": {"lr": 0.1, "b": b"bytes", "s": {1}}, "array": np.arange(3), "e": Color.RED}
    dcp.save(state, storage_writer=ObjectStoreWriter(tmp_path))
    (record,) = [one for one in caplog.records if one.name == WriteJob.__module__]
    assert record.levelno == logging.WARNING
    assert "'array' (numpy" in record.getMessage()
    assert "'e' (value_examples.Color)" in record.getMessage()
    assert "fine" not in record.getMessage()
    with pytest.raises(CorruptError, match="'array'"):
        load({"array": None}, tmp_path)


def test_no_warning_where_every_value_opens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = [one for one in OPENED if not isinstance(one, bytes)]
    dcp.save(state_of(values), storage_writer=ObjectStoreWriter(tmp_path / "a"))
    save(state_of(ENCODED), tmp_path / "b")
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
