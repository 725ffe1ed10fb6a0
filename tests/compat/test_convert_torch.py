"""``torch.save`` files become checkpoints and come back, wherever they lie."""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from compat_states import QUIET
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as stock_dcp_to_torch_save
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch_states import assert_same_file, shared, torch_state

import dcpstore
from dcpstore import errors
from dcpstore.convert import dcp_to_torch_save, torch_save_to_dcp
from dcpstore.convert.torch.structure import (
    LAYOUT_KEY,
    Layout,
    encode_layout,
)
from dcpstore.format.zip import TorchZipWriter
from dcpstore.plan import SavePlanner
from dcpstore.read.torch_file import Storages, open_torch_file, unpickle
from dcpstore.store import open_store
from dcpstore.testing import GcsServer, MotoServer
from dcpstore.testing.ranks import run_ranks

pytestmark = [
    *QUIET,
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    # gcsfs hands aiohttp a whole part at once.
    pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning"),
]

MIB = 1 << 20
SMALL = 32 * MIB  # the smallest budget: blocks of 4 MiB


@dataclass(frozen=True)
class Site:
    """A place for files and checkpoints, and how to reach it."""

    url: str
    options: dict[str, Any] | None = None

    def at(self, name: str) -> str:
        return f"{self.url}/{name}"

    def put(self, name: str, value: Any) -> str:
        stream = io.BytesIO()
        torch.save(value, stream)
        open_store(self.url, storage_options=self.options).put(name, stream.getvalue())
        return self.at(name)

    def get(self, name: str) -> bytes:
        return bytes(open_store(self.url, storage_options=self.options).get(name).data)

    def names(self, folder: str = "") -> list[str]:
        store = open_store(self.url, storage_options=self.options)
        return sorted(one.key for one in store.list(f"{folder}/" if folder else ""))

    def to_dcp(self, source: str, target: str, **more: Any) -> dcpstore.convert.ConvertResult:
        return torch_save_to_dcp(
            self.at(source),
            self.at(target),
            source_options=self.options,
            target_options=self.options,
            progress=False,
            **more,
        )

    def to_file(self, source: str, target: str, **more: Any) -> dcpstore.convert.ConvertResult:
        return dcp_to_torch_save(
            self.at(source),
            self.at(target),
            source_options=self.options,
            target_options=self.options,
            progress=False,
            **more,
        )

    def load(self, name: str, **more: Any) -> Any:
        return torch.load(io.BytesIO(self.get(name)), weights_only=True, **more)


@pytest.fixture
def local(tmp_path: Path) -> Site:
    return Site(f"file://{tmp_path}")


@pytest.fixture
def s3(s3_server: MotoServer, request: Any) -> Site:
    s3_server.create_bucket("convert-torch")
    name = re.sub(r"\W", "-", request.node.name)
    return Site(f"s3://convert-torch/{name}", s3_server.storage_options())


@pytest.fixture
def gs(gcs_server: GcsServer, request: Any) -> Site:
    name = re.sub(r"\W", "-", request.node.name)
    return Site(f"gs://contract/{name}", gcs_server.storage_options())


# --- there and back ---------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["local", "s3", "gs"])
def test_a_file_comes_back_from_a_checkpoint_as_it_was(where: str, request: Any) -> None:
    site: Site = request.getfixturevalue(where)
    state = torch_state()
    site.put("a.pt", state)
    there = site.to_dcp("a.pt", "step-1")
    back = site.to_file("step-1", "b.pt")
    assert dict(there.skipped) == {"meta": "a tensor on the meta device, which has no elements"}
    assert there.num_tensors == back.num_tensors > 40
    assert back.objects == {"b.pt": len(site.get("b.pt"))}
    found = site.load("b.pt")
    assert_same_file(found, site.load("a.pt"))
    assert shared(found) == shared(site.load("a.pt"))
    assert any(".views[1]" in group for group in shared(found))


def test_a_file_goes_from_one_provider_by_another_to_local_disk(
    s3: Site, gs: Site, local: Site
) -> None:
    s3.put("a.pt", torch_state())
    torch_save_to_dcp(
        s3.at("a.pt"), gs.at("ckpt"), source_options=s3.options, target_options=gs.options
    )
    dcp_to_torch_save(gs.at("ckpt"), local.at("b.pt"), source_options=gs.options)
    assert_same_file(local.load("b.pt"), s3.load("a.pt"))


def test_the_file_needs_torch_alone_and_can_be_mapped(local: Site, tmp_path: Path) -> None:
    local.put("a.pt", torch_state())
    local.to_dcp("a.pt", "ckpt")
    local.to_file("ckpt", "b.pt")
    assert torch.serialization.get_unsafe_globals_in_checkpoint(tmp_path / "b.pt") == []
    mapped = torch.load(tmp_path / "b.pt", mmap=True, weights_only=True)
    assert_same_file(mapped, local.load("a.pt"))
    with zipfile.ZipFile(tmp_path / "b.pt") as archive:
        assert archive.testzip() is None
    with open_torch_file(tmp_path / "b.pt") as file:
        assert {file.start_of(key) % 64 for key in file.storages} == {0}


def test_torch_finds_storages_where_it_computes_them(local: Site, monkeypatch: Any) -> None:
    local.put("a.pt", torch_state())
    local.to_dcp("a.pt", "ckpt")
    local.to_file("ckpt", "b.pt")
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")  # torch compares both itself
    assert_same_file(local.load("b.pt"), local.load("a.pt"))


def test_the_file_is_byte_for_byte_what_torch_writes_but_for_its_serial_number(
    local: Site,
) -> None:
    state = {
        "w": torch.arange(1000.0),
        "n": {"f": torch.arange(7).to(torch.float8_e5m2), "e": torch.empty(0)},
        "p": torch.nn.Parameter(torch.ones(3, 2)),
        "lr": 0.5,
    }
    local.put("a.pt", state)
    local.to_dcp("a.pt", "ckpt")
    local.to_file("ckpt", "b.pt")
    wanted, found = np.frombuffer(local.get("a.pt"), "u1"), np.frombuffer(local.get("b.pt"), "u1")
    assert len(found) == len(wanted)
    with zipfile.ZipFile(io.BytesIO(local.get("a.pt"))) as archive:
        serial = archive.getinfo("archive/.data/serialization_id").header_offset
        directory = archive.start_dir
    differing = np.flatnonzero(found != wanted)
    # Its 40 digits and their checksum, which the directory repeats.
    assert differing.min() > serial
    assert len(differing[differing >= directory]) <= 4


class _Headers:
    """Keeps the small writes of a file and skips the large ones."""

    def __init__(self) -> None:
        self.small: dict[int, bytes] = {}
        self.size_bytes = 0

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if view.nbytes < MIB:
            self.small[self.size_bytes] = bytes(view)
        self.size_bytes += view.nbytes
        return view.nbytes


def test_beyond_4_gib_headers_and_directory_are_those_of_torch(tmp_path: Path) -> None:
    sizes = [(5 << 30), 12, (5 << 30), 0, 7]
    with torch.serialization.skip_data():  # the file is a hole between headers
        value = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        torch.save(value, tmp_path / "archive.pt")
    with zipfile.ZipFile(tmp_path / "archive.pt") as archive:
        pickled = archive.read("archive/data.pkl")
    sink = _Headers()
    writer = TorchZipWriter(sink)
    writer.write_pickle(pickled)
    for number, size in enumerate(sizes):
        with writer.storage(str(number), size):
            writer.write(np.zeros(size, np.uint8), crc32=0)  # of which no page is touched
    writer.finish()
    assert sink.size_bytes == (tmp_path / "archive.pt").stat().st_size
    with (tmp_path / "archive.pt").open("rb") as file:
        for at, written in sink.small.items():
            file.seek(at)
            wanted = file.read(len(written))
            if b"serialization_id" in written or re.fullmatch(rb"\d{40}", written):
                continue
            if written[:4] == b"PK\x07\x08" and file.tell() > sink.size_bytes - 3000:
                continue  # behind the serial number
            assert written == wanted, at


# --- beside stock -------------------------------------------------------------------------------


def test_stock_converts_what_ours_made(local: Site, tmp_path: Path) -> None:
    state = {
        "m": {"w": torch.randn(1200, 900), "t": torch.ones(3).half()},
        "l": [{"s": 3}],
        "n": None,
    }
    state["tied"] = state["m"]["w"]
    local.put("a.pt", state)
    local.to_dcp("a.pt", "ckpt", budget_bytes=SMALL)
    stock_dcp_to_torch_save(tmp_path / "ckpt", tmp_path / "stock.pt")
    assert_same_file(torch.load(tmp_path / "stock.pt", weights_only=True), state)


def test_ours_converts_what_stock_made_as_stock_does(local: Site, tmp_path: Path) -> None:
    state = {
        "m": {"w": torch.randn(1200, 900), "t": torch.ones(3).half().t()},
        "l": [torch.ones(2), {"s": 3, "e": []}],
        "v": (1, torch.arange(3)),
        "o": {0: {"step": torch.tensor(1.0)}},
    }
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "ckpt"), no_dist=True)
    local.to_file("ckpt", "b.pt", budget_bytes=SMALL)
    stock_dcp_to_torch_save(tmp_path / "ckpt", tmp_path / "stock.pt")
    wanted = torch.load(tmp_path / "stock.pt", weights_only=True)
    assert_same_file(local.load("b.pt"), wanted)


def test_dcp_loads_a_large_tensor_that_was_cut_into_chunks(local: Site, tmp_path: Path) -> None:
    wide, tall = torch.randn(700, 5000), torch.randn(900, 3000).t()
    local.put("a.pt", {"wide": wide, "tall": tall})
    result = local.to_dcp("a.pt", "ckpt", budget_bytes=SMALL)
    reader = dcp.FileSystemReader(tmp_path / "ckpt")
    chunks = reader.read_metadata().state_dict_metadata["tall"].chunks
    assert len(chunks) > 2
    assert {chunk.sizes[0] for chunk in chunks} == {3000}  # across its rows, as it lies in the file
    assert result.fetched_bytes < 1.01 * len(local.get("a.pt"))
    target = {"wide": torch.zeros_like(wide), "tall": torch.zeros(3000, 900)}
    dcp.load(target, storage_reader=reader, no_dist=True)
    assert torch.equal(target["wide"], wide)
    assert torch.equal(target["tall"], tall)
    local.to_file("ckpt", "b.pt", budget_bytes=SMALL)
    assert_same_file(local.load("b.pt"), {"wide": wide, "tall": tall})
    assert local.load("b.pt")["tall"].stride() == tall.stride()


def test_tied_tensors_are_stored_once_and_load_under_both_names(
    local: Site, tmp_path: Path
) -> None:
    weight = torch.randn(1000, 700)
    local.put("a.pt", {"embed": weight, "head": weight, "half": weight[:500]})
    result = local.to_dcp("a.pt", "ckpt")
    assert result.stored_bytes < 1.6 * weight.nbytes
    assert (result.num_tensors, result.tensor_bytes) == (3, int(2.5 * weight.nbytes))
    target = {"embed": torch.zeros(1000, 700), "head": torch.zeros(1000, 700)}
    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path / "ckpt"), no_dist=True)
    assert torch.equal(target["embed"], weight)
    assert torch.equal(target["head"], weight)
    dcpstore.load(target, local.at("ckpt"))
    local.to_file("ckpt", "b.pt")
    assert shared(local.load("b.pt")) == [[".embed", ".head", ".half"]]
    assert len(local.get("b.pt")) < 1.01 * weight.nbytes


def test_keys_that_name_the_same_bytes_are_tied_in_the_file(local: Site, tmp_path: Path) -> None:
    """Where only the metadata tells: two keys, one place in one object."""
    weight = torch.randn(100, 70)
    writer = dcp.FileSystemWriter(tmp_path / "ckpt")
    dcp.save({"embed": weight, "x": weight + 1}, storage_writer=writer, no_dist=True)
    metadata = dcp.FileSystemReader(tmp_path / "ckpt").read_metadata()
    index_of = {index.fqn: index for index in metadata.storage_data}
    metadata.storage_data[index_of["x"]] = metadata.storage_data[index_of["embed"]]
    (tmp_path / "ckpt" / ".metadata").write_bytes(pickle.dumps(metadata))
    local.to_file("ckpt", "b.pt")
    assert shared(local.load("b.pt")) == [[".embed", ".x"]]
    assert torch.equal(local.load("b.pt")["x"], weight)


# --- what is chosen -----------------------------------------------------------------------------

CHOICE: dict[str, Any] = {
    "keys": ["views.*", "ordered.*", "tuple", "lonely.*"],
    "exclude": ["views.2", "lonely.[cn]o*", "*.negated"],
    "rename": {"ordered.": "net.0.", "tuple": "kept"},
    "dtype": torch.bfloat16,
}


@pytest.mark.parametrize("when", ["there", "back"])
def test_keys_names_and_dtypes_are_chosen_either_way(when: str, local: Site) -> None:
    state = torch_state()
    local.put("a.pt", state)
    there = local.to_dcp("a.pt", "ckpt", **(CHOICE if when == "there" else {}))
    back = local.to_file("ckpt", "b.pt", **(CHOICE if when == "back" else {}))
    result = there if when == "there" else back
    found = local.load("b.pt")
    assert set(found) == {"views", "lonely", "kept", "net"}
    assert found["views"][2] is None
    assert torch.equal(found["views"][1], state["views"][1].bfloat16())
    assert torch.equal(found["lonely"]["permuted"], state["lonely"]["permuted"].bfloat16())
    assert torch.equal(found["net"]["0"]["w"], state["ordered"]["w"].bfloat16())
    assert set(found["lonely"]) == {"permuted", "expanded", "slice"}
    assert found["kept"][3]["k"][0].dtype == torch.float32  # values are left as they are
    assert [".views[0]", ".views[1]", ".views[3].tied"] in shared(found)
    assert result.cast["views.0"] == ("float32", "bfloat16")


def test_a_pattern_that_matches_nothing_and_a_name_in_use_are_errors(local: Site) -> None:
    local.put("a.pt", {"a": torch.ones(2), "b": {"c": torch.ones(2)}, "n": 1})
    local.to_dcp("a.pt", "ckpt")
    with pytest.raises(errors.ConfigError, match="'nothing' matches none"):
        local.to_dcp("a.pt", "other", keys=["nothing"])
    with pytest.raises(errors.ConfigError, match=r"'a' and 'b.c'|'b.c' and 'a'"):
        local.to_dcp("a.pt", "other", rename={"b.c": "a"})
    with pytest.raises(errors.ConfigError, match="leads through 'a', which is no dictionary"):
        local.to_file("ckpt", "b.pt", rename={"b.c": "a.c"})
    assert local.names("other") == []
    assert "b.pt" not in local.names()


# --- what is refused, and what is left then -----------------------------------------------------


def test_a_target_that_exists_stays_unless_it_is_to_be_replaced(local: Site) -> None:
    local.put("a.pt", {"w": torch.ones(2)})
    local.to_dcp("a.pt", "ckpt")
    local.to_file("ckpt", "b.pt")
    before = local.get("b.pt"), local.names("ckpt")
    local.put("new.pt", {"w": torch.zeros(3)})
    with pytest.raises(errors.AlreadyExistsError):
        local.to_dcp("new.pt", "ckpt")
    with pytest.raises(errors.AlreadyExistsError, match=r"already holds b.pt"):
        local.to_file("ckpt", "b.pt")
    assert (local.get("b.pt"), local.names("ckpt")) == before
    local.to_dcp("new.pt", "ckpt", overwrite=True)
    local.to_file("ckpt", "b.pt", overwrite=True)
    assert torch.equal(local.load("b.pt")["w"], torch.zeros(3))
    assert len(local.names("ckpt")) == 2


def test_the_source_and_its_parts_are_no_targets(local: Site) -> None:
    local.put("a.pt", {"w": torch.ones(2)})
    local.to_dcp("a.pt", "ckpt")
    with pytest.raises(errors.ConfigError, match="source and target are both"):
        local.to_dcp("a.pt", "a.pt", overwrite=True)
    for name in ("ckpt", "ckpt/.metadata", local.names("ckpt")[-1]):
        with pytest.raises(errors.ConfigError, match="is the source or a part of it"):
            local.to_file("ckpt", name, overwrite=True)
    local.to_file("ckpt", "ckpt/model.pt")  # beside them is fine


def test_sources_that_are_none_are_told_apart(local: Site) -> None:
    local.put("a.pt", {"w": torch.ones(2)})
    local.put("list.pt", [torch.ones(2)])
    local.put("odd.pt", {"a": {"b": 1}, "a.b": 2})
    local.to_dcp("a.pt", "ckpt")
    with pytest.raises(errors.NotFoundError):
        local.to_dcp("absent.pt", "x")
    with pytest.raises(errors.IncompatibleError, match="is a folder"):
        local.to_dcp("ckpt", "x")
    with pytest.raises(errors.IncompatibleError, match=r"holds a list.*save a dictionary"):
        local.to_dcp("list.pt", "x")
    with pytest.raises(errors.IncompatibleError, match="two entries that DCP gives one key"):
        local.to_dcp("odd.pt", "x")
    with pytest.raises(errors.NotFoundError):
        local.to_file("absent", "x.pt")
    with pytest.raises(errors.CheckpointError):
        local.to_file("a.pt", "x.pt")
    assert local.names("x") == []


def test_an_empty_dictionary_comes_back(local: Site) -> None:
    local.put("a.pt", {})
    local.to_dcp("a.pt", "ckpt")
    local.to_file("ckpt", "b.pt")
    assert local.load("b.pt") == {}


def test_a_damaged_file_makes_no_checkpoint(s3: Site, s3_server: MotoServer) -> None:
    s3.put("a.pt", {"w": torch.ones(3 * MIB), "v": torch.zeros(9)})
    bucket = s3_server.client("convert-torch")
    prefix = s3.url.removeprefix("s3://convert-torch/")
    bucket.flip_bit(f"{prefix}/a.pt", 7 * MIB)
    with pytest.raises(errors.CorruptError, match="storage 0 is not what was saved") as failure:
        s3.to_dcp("a.pt", "ckpt", budget_bytes=SMALL)
    assert failure.value.start < 7 * MIB < failure.value.end
    assert s3.names("ckpt") == []
    assert bucket.open_uploads() == []


def test_a_damaged_checkpoint_makes_no_file(s3: Site, s3_server: MotoServer) -> None:
    s3.put("a.pt", {"w": torch.randn(6 * MIB), "v": torch.zeros(9)})
    s3.to_dcp("a.pt", "ckpt")
    bucket = s3_server.client("convert-torch")
    prefix = s3.url.removeprefix("s3://convert-torch/")
    (data,) = [name for name in s3.names("ckpt") if name.endswith(".distcp")]
    bucket.flip_bit(f"{prefix}/{data}", 20 * MIB)
    with pytest.raises(errors.CorruptError, match="are not the bytes that were saved"):
        s3.to_file("ckpt", "b.pt", budget_bytes=SMALL)
    assert "b.pt" not in s3.names()
    assert bucket.open_uploads() == []


def test_a_file_replaced_meanwhile_makes_no_checkpoint(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3 * MIB)}, tmp_path / "a.pt")
    replaced: list[bool] = []

    def replace(_: object) -> None:
        if not replaced:
            replaced.append(True)
            torch.save({"w": torch.ones(3 * MIB) * 2}, tmp_path / "new.pt")
            (tmp_path / "new.pt").replace(tmp_path / "a.pt")

    with pytest.raises(errors.ConflictError, match="was replaced while it was read"):
        torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "ckpt", progress=replace)
    assert not (tmp_path / "ckpt" / ".metadata").exists()
    assert list((tmp_path / "ckpt").glob("*.distcp")) == []


# --- trust ----------------------------------------------------------------------------------------


class Config:
    """A class of the caller's."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.table = torch.arange(width)


def test_a_callers_class_needs_an_explicit_word_both_ways(local: Site) -> None:
    local.put("a.pt", {"w": torch.ones(2), "config": Config(5)})
    with pytest.raises(errors.CorruptError, match=r"not run.*weights_only=False"):
        local.to_dcp("a.pt", "ckpt")
    local.to_dcp("a.pt", "ckpt", weights_only=False)
    with pytest.raises(errors.CorruptError, match=r"not run.*weights_only=False"):
        local.to_file("ckpt", "b.pt")
    local.to_file("ckpt", "b.pt", weights_only=False)
    found = torch.load(io.BytesIO(local.get("b.pt")), weights_only=False)
    assert found["config"].width == 5
    assert torch.equal(found["config"].table, torch.arange(5))
    with torch.serialization.safe_globals([Config]):
        local.to_file("ckpt", "c.pt")


def test_a_value_of_a_stock_checkpoint_is_not_run(local: Site, tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "config": Config(5)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "ckpt"), no_dist=True)
    with pytest.raises(
        errors.CorruptError, match="'config' names more than plain data; it was not run"
    ):
        local.to_file("ckpt", "b.pt")
    local.to_file("ckpt", "b.pt", weights_only=False)


def test_a_structure_that_names_code_is_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    evil = f"cposix\nsystem\n(S'touch {mark}'\ntR.".encode()
    with pytest.raises(errors.CorruptError, match="not run"):
        unpickle(evil, Storages("x"), weights_only=True, what="x")
    assert not mark.exists()


class _WithLayout(SavePlanner):
    """Stores a structure that is not that of the state dict."""

    layout = b""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        item = WriteItem(MetadataIndex(LAYOUT_KEY), WriteItemType.BYTE_IO)
        return SavePlan([*plan.items, item], planner_data=plan.planner_data)

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        del metadata.state_dict_metadata[LAYOUT_KEY]
        return plans, metadata

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == LAYOUT_KEY:
            return io.BytesIO(self.layout)
        return super().resolve_data(write_item)


def pickle_of(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    with zipfile.ZipFile(stream) as archive:
        return archive.read("archive/data.pkl")


@pytest.mark.parametrize(
    "other",
    [
        {"w": torch.ones(3)},
        {"w": torch.ones(2), "v": torch.ones(1)},
        {"w": torch.ones(2).int()},
        {},
    ],
    ids=["shape", "more keys", "dtype", "fewer keys"],
)
def test_a_structure_of_other_keys_is_left_aside(other: Any, local: Site, caplog: Any) -> None:
    planner = _WithLayout()
    planner.layout = encode_layout(Layout(pickle_of(other), {}))
    dcpstore.save({"w": torch.ones(2)}, local.at("ckpt"), planner=planner)
    local.to_file("ckpt", "b.pt")
    assert_same_file(local.load("b.pt"), {"w": torch.ones(2)})
    assert "its keys are not those of the torch.save file" in caplog.text


@pytest.mark.parametrize(
    "layout", [b"", b"DCPTORCH\x01\x00\x00\x00\xff\x00\x00\x00{", b"other" * 9]
)
def test_a_damaged_structure_is_an_error(layout: bytes, local: Site) -> None:
    planner = _WithLayout()
    planner.layout = layout
    dcpstore.save({"w": torch.ones(2)}, local.at("ckpt"), planner=planner)
    with pytest.raises(errors.CorruptError, match=r"record of its torch.save file is damaged"):
        local.to_file("ckpt", "b.pt")


def test_a_structure_of_a_newer_version_says_so(local: Site) -> None:
    planner = _WithLayout()
    planner.layout = b"DCPTORCH\x02\x00\x00\x00\x02\x00\x00\x00{}"
    dcpstore.save({"w": torch.ones(2)}, local.at("ckpt"), planner=planner)
    with pytest.raises(
        errors.IncompatibleError, match="has version 2; this dcpstore reads version 1"
    ):
        local.to_file("ckpt", "b.pt")


# --- ranks and memory -----------------------------------------------------------------------------


def test_ranks_share_the_way_there_and_wait_on_the_way_back(local: Site) -> None:
    state = {f"layer.{n}": torch.full((300, 1000), float(n)) for n in range(9)}
    state["tied"], state["step"] = state["layer.0"], 3
    local.put("a.pt", state)
    there = run_ranks(3, lambda group: local.to_dcp("a.pt", "ckpt", process_group=group)).values()
    writers = {name.split("/")[-1][:3] for name in local.names("ckpt") if name.endswith(".distcp")}
    assert writers == {"__0", "__1", "__2"}
    assert there[0].objects == there[1].objects == there[2].objects
    assert there[0].fetched_bytes < 1.02 * len(local.get("a.pt"))
    back = run_ranks(2, lambda group: local.to_file("ckpt", "b.pt", process_group=group)).values()
    assert back[0] == back[1]
    assert_same_file(local.load("b.pt"), state)


def test_all_ranks_hear_of_one_that_met_damage(local: Site, tmp_path: Path) -> None:
    local.put("a.pt", {f"layer.{n}": torch.full((300, 1000), float(n)) for n in range(6)})
    data = bytearray((tmp_path / "a.pt").read_bytes())
    data[len(data) - 100_000] ^= 1  # the last rank's
    (tmp_path / "a.pt").write_bytes(data)
    run = run_ranks(3, lambda group: local.to_dcp("a.pt", "ckpt", process_group=group))
    assert set(run.errors) == {0, 1, 2}
    for error in run.errors.values():
        assert isinstance(error, errors.RankFailures)
        assert list(error.causes) == [2]
    assert local.names("ckpt") == []


def test_progress_counts_every_byte_up_to_the_end(local: Site) -> None:
    local.put("a.pt", {"w": torch.ones(MIB)})
    seen: list[Any] = []
    torch_save_to_dcp(local.at("a.pt"), local.at("ckpt"), progress=seen.append)
    assert {one.action for one in seen} == {"convert"}
    assert seen[-1].done_bytes >= 4 * MIB
    seen.clear()
    dcp_to_torch_save(local.at("ckpt"), local.at("b.pt"), progress=seen.append)
    assert {one.action for one in seen} == {"convert"}
    assert seen[-1].done_bytes == len(local.get("b.pt"))


@pytest.mark.parametrize("convert", [torch_save_to_dcp, dcp_to_torch_save])
def test_a_budget_that_is_too_small_is_an_error(
    convert: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(errors.ConfigError, match="budget_bytes=1000 is too small"):
        convert(tmp_path / "a", tmp_path / "b", budget_bytes=1000)


@pytest.mark.parametrize("name", dcpstore.convert.__all__[1:])
def test_a_keyword_that_no_converter_has_is_an_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'key'"):
        getattr(dcpstore.convert, name)(tmp_path / "a", tmp_path / "b", key=["w"])


@pytest.mark.campaign
def test_three_gibibytes_convert_within_budget_and_largest_tensor(tmp_path: Path) -> None:
    from benchmarks.convert import CONVERSIONS, measure, prepare
    from benchmarks.convert import Site as Place

    place = Place.under(tmp_path)
    prepare(place, 3 << 30)
    for name in CONVERSIONS:
        if "ours" in name:
            one = measure(name, place)
            assert one.extra_mib <= one.bound_mib, one
