"""Pickles are judged before they are opened, and metadata come out as plain pickle makes them."""

from __future__ import annotations

import collections
import io
import pickle
import random
from pathlib import PurePosixPath
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as stock
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from dcpstore import CorruptError, IncompatibleError, ReadConfig
from dcpstore.format.metadata import open_stock
from dcpstore.format.opcodes import BadPickleError, check_structure, without_hashing
from dcpstore.format.stock import load_metadata_pickle
from dcpstore.format.tensors import load_record


def metadata(num_tensors: int, num_chunks: int, planner_data: Any = None) -> Metadata:
    entries: dict[str, Any] = {}
    places = {}
    for number in range(num_tensors):
        fqn = f"layers.{number}.weight"
        rows = [torch.Size([2 * row, 0]) for row in range(num_chunks)]
        chunks = [stock.ChunkStorageMetadata(row, torch.Size([2, 3])) for row in rows]
        properties = stock.TensorProperties(torch.bfloat16)
        shape = torch.Size([2 * num_chunks, 3])
        entries[fqn] = stock.TensorStorageMetadata(properties, shape, chunks)
        for hint, row in enumerate(rows):
            place = _StorageInfo(f"__{hint}_0.distcp", 12 * number, 12)
            places[MetadataIndex(fqn, row, hint)] = place
    return Metadata(entries, planner_data, places, stock.StorageMeta("/a/b", "id"))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(("tensors", "chunks"), [(0, 0), (1, 1), (3, 2), (40, 30), (2000, 1)])
def test_metadata_come_out_as_plain_pickle_makes_them(
    protocol: int, tensors: int, chunks: int
) -> None:
    value = metadata(tensors, chunks)
    data = pickle.dumps(value, protocol)
    found = load_metadata_pickle(data, key=".metadata")
    assert found == pickle.loads(data) == value
    assert type(found) is Metadata
    hints = {index: index.index for index in value.storage_data}
    for index, place in found.storage_data.items():
        assert type(index) is MetadataIndex
        assert type(index.offset) is torch.Size
        assert index.index == hints[index]
        assert type(place) is _StorageInfo
    for entry in found.state_dict_metadata.values():
        assert type(entry.size) is torch.Size
        assert all(type(chunk.offsets) is torch.Size for chunk in entry.chunks)


PLANNER_DATA = [
    {"a": ("b", 1)},
    {"a": {1, 2}, "b": frozenset({"x"}), "c": set(), "d": frozenset()},
    {"one": {2: None}},
    collections.OrderedDict([("a", 1), ("b", {"c": [1, (2.5, "x")]})]),
    collections.OrderedDict(a=1),
    [{}, [], (), "", {"k": {}}, {1.5: True, None: 2, "b": 3, False: 4}],
    {"size": torch.Size([2, 3]), "dtype": torch.float32, "layout": torch.strided},
    {"path": PurePosixPath("a/b")},
    7,
]


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("data", PLANNER_DATA, ids=repr)
def test_what_a_planner_keeps_comes_out_equal(protocol: int, data: Any) -> None:
    pickled = pickle.dumps(metadata(1, 1, data), protocol)
    found = load_metadata_pickle(pickled, key=".metadata").planner_data
    expected = {"path": "a/b"} if isinstance(data, dict) and "path" in data else data
    assert found == expected
    assert type(found) is type(expected)


def test_many_instructions_are_found_as_they_are_one_by_one() -> None:
    """Instructions in batches, side by side, against a plain walk by pickletools."""
    value = metadata(300, 40, {f"layers.{n}.weight": ("layers", n) for n in range(300)})
    for protocol in (2, 4):
        data = pickle.dumps(value, protocol)
        assert len(data) > 1 << 20  # more than one batch
        program = without_hashing(data, max_bytes=1 << 40)
        codes = collections.Counter(_codes(data))
        rewritten = collections.Counter(_codes(program))
        for name in ("EMPTY_DICT", "SETITEM", "SETITEMS", "FRAME"):
            assert rewritten[name] == 0
        assert rewritten["BINPERSID"] == codes["EMPTY_DICT"]
        assert rewritten["APPENDS"] == codes["APPENDS"] + codes["SETITEMS"]
        assert rewritten["NEWOBJ"] == codes["NEWOBJ"]


def _codes(data: bytes) -> list[str]:
    import pickletools

    return [code.name for code, _, _ in pickletools.genops(data)]


def test_instructions_that_only_look_like_an_object_do_not_mislead() -> None:
    """Bytes of an argument that are those of a new object: the walks do not meet, one does it."""
    trap = ")\x81\x94}\x94(" * 2000
    value = metadata(200, 40, {trap: ("x",), "b": (trap,)})
    value.state_dict_metadata[trap] = value.state_dict_metadata["layers.0.weight"]
    for protocol in (2, 4):
        found = load_metadata_pickle(pickle.dumps(value, protocol), key="x")
        assert found == value


def test_metadata_larger_than_allowed_are_refused_before_they_are_made() -> None:
    data = pickle.dumps(metadata(10, 100))
    assert open_stock(data, ".metadata", ReadConfig()).state_dict_metadata
    with pytest.raises(CorruptError, match="max_metadata_bytes"):
        open_stock(data, ".metadata", ReadConfig(max_metadata_bytes=100_000))


def test_what_is_refused_names_object_and_key() -> None:
    value = metadata(3, 2)
    value.state_dict_metadata["layers.1.weight"].chunks[1].sizes = torch.Size([3, 3])
    with pytest.raises(CorruptError, match=r"a chunk of 'layers\.1\.weight' reaches") as caught:
        load_metadata_pickle(pickle.dumps(value), key=".metadata")
    assert caught.value.key == ".metadata"
    assert caught.value.fqn == "layers.1.weight"


@pytest.mark.parametrize("number", [float("nan"), 1.5, -1, 1 << 62, "4", None, True])
def test_a_place_without_a_range_is_refused(number: Any) -> None:
    value = metadata(2, 1)
    value.storage_data[MetadataIndex("layers.1.weight", torch.Size([0, 0]))].offset = number
    with pytest.raises(CorruptError, match=r"the place of 'layers\.1\.weight'"):
        load_metadata_pickle(pickle.dumps(value), key=".metadata")


def test_no_class_is_changed_by_a_pickle_that_sets_attributes() -> None:
    name = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
    slots = b"\x80\x02" + name + b"N}X\x08\0\0\0__hash__Ns\x86b."
    state = b"\x80\x02" + name + b"}X\x08\0\0\0__hash__Nsb."
    for data in (slots, state):
        with pytest.raises(CorruptError):
            load_metadata_pickle(data, key=".metadata")
        assert hash(MetadataIndex("x")) == hash(MetadataIndex("x"))


# torch.save ---------------------------------------------------------------------------------


def record(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


@pytest.mark.parametrize(
    "value",
    [
        1,
        "text",
        {"a": [1, 2.5, None, "x", (1, (2, (3,))), b"bytes", bytearray(b"xx")]},
        {(1, "a"): 2},
        {1, 2, 3},
        [{1}, {1}],
        collections.Counter("abca"),
        collections.OrderedDict(a={"b": 1}),
        {"big": 2**100, "state": tuple(range(625))},
        complex(1, 2),
        torch.Size((2, 3)),
        random.Random(1).getstate(),
    ],
    ids=lambda one: repr(one)[:30],
)
def test_what_torch_saves_passes(value: Any) -> None:
    assert load_record(record(value), "x") == value


def test_tensors_of_every_kind_pass() -> None:
    plain = torch.arange(6.0)
    shared = load_record(record({"a": plain, "b": plain.view(2, 3)}), "x")
    assert shared["a"].data_ptr() == shared["b"].data_ptr()
    assert load_record(record(torch.nn.Parameter(plain)), "x").requires_grad
    assert load_record(record(torch.eye(3).to_sparse()), "x").is_sparse


@pytest.mark.parametrize(
    "program",
    [
        b"\x80\x02",
        b"\x80\x02K",
        b"\x80\x02X\xff\xff\0\0a.",
        b"\x80\x02h\1.",
        b"\x80\x02t.",
        b"\x80\x02NN\x87.",
        b"\x80\x02)R.",
        b"\x80\x02cos\nsystem",
    ],
)
def test_a_program_that_is_cut_off_is_refused(program: bytes) -> None:
    with pytest.raises(BadPickleError):
        check_structure(program)


def test_a_record_with_a_packed_member_is_refused() -> None:
    import zipfile

    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02N.")
        archive.writestr("archive/data/0", bytes(1 << 20))
    with pytest.raises(IncompatibleError, match="compressed"):
        load_record(stream.getvalue(), "the value 'x'")
