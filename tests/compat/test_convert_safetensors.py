"""Checkpoints become Hugging Face folders and come back, wherever they lie."""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from compat_states import QUIET, CtrlC, assert_same, blank, load, pattern, save
from safetensors import safe_open
from safetensors.torch import load_file, save_file, save_model
from torch.distributed.checkpoint.planner import SavePlan

import dcpstore
from dcpstore import AlreadyExistsError, ConfigError, CorruptError, IncompatibleError
from dcpstore.convert import dcp_to_safetensors, safetensors_to_dcp
from dcpstore.format.dtypes import dtype_from_name
from dcpstore.format.safetensors import file_dtype
from dcpstore.store import open_store
from dcpstore.testing.ranks import run_ranks

pytestmark = [
    *QUIET,
    # gcsfs hands aiohttp a whole part at once.
    pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning"),
]

MIB = 1 << 20
KNOWN = [
    dtype
    for name in (
        *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"),
        *("uint16", "uint32", "uint64", "bool", "complex64", "float8_e4m3fn", "float8_e5m2"),
        *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    )
    if (dtype := getattr(torch, name, None)) is not None
]
# safetensors.torch of some versions writes these and cannot read them back.
WRITTEN_ONLY = {"float8_e8m0fnu", "float4_e2m1fn_x2"}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def full_model() -> dict[str, torch.Tensor]:
    tensors = {
        f"dtype.{name_of(dtype)}": pattern(dtype, (5, 8), seed=number)
        for number, dtype in enumerate(KNOWN)
    }
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.empty(0, 3)
    tensors["table"] = pattern(torch.float32, (3000, 700), seed=77)  # more than a block of 4 MiB
    tensors["transposed"] = pattern(torch.float16, (40, 30), seed=5).t()
    tensors["one_long_row"] = pattern(torch.int32, (1, 1_500_000), seed=6)
    return tensors


@pytest.fixture(params=["s3", "gs", "file"])
def place(request, tmp_path):
    """A folder of the test's own, and the options that reach it."""
    if request.param == "s3":
        server = request.getfixturevalue("s3_server")
        server.create_bucket("convert")
        return f"s3://convert/{tmp_path.name}", server.storage_options()
    if request.param == "gs":
        server = request.getfixturevalue("gcs_server")
        return f"gs://contract/{tmp_path.name}", server.storage_options()
    return str(tmp_path / "remote"), None


def download(url: str, options, folder: Path) -> Path:
    folder.mkdir()
    store = open_store(url, storage_options=options)
    for info in store.list():
        (folder / info.key).write_bytes(store.get(info.key).data)
    store.close()
    return folder


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    """What the safetensors package finds by way of the index, or in the one file."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    found = {}
    for name, key in json.loads(index.read_text())["weight_map"].items():
        with safe_open(folder / key, "pt") as file:
            found[name] = file.get_tensor(name)
    return found


def write_file(path: Path, header: dict | bytes, data: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


# --- round trips -------------------------------------------------------------------------


def test_every_dtype_goes_to_files_and_back(place, tmp_path) -> None:
    url, options = place
    model = full_model()
    save({"model": model, "step": 7}, f"{url}/dcp", options)
    both = {"source_options": options, "target_options": options}
    result = dcp_to_safetensors(
        f"{url}/dcp",
        f"{url}/hf",
        rename={"model.": ""},
        max_shard_bytes=5 * MIB,
        budget_bytes=32 * MIB,
        **both,
    )
    assert result.skipped == {"step": "not a tensor"}
    assert len(result.objects) == 4
    folder = download(f"{url}/hf", options, tmp_path / "local")
    assert {path.name: path.stat().st_size for path in folder.iterdir()} == dict(result.objects)
    readable = {k: v for k, v in model.items() if k.rpartition(".")[2] not in WRITTEN_ONLY}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in model.values())
    assert set(index["weight_map"]) == set(model)
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found.update({k: file.get_tensor(k) for k in file.keys() if k in readable})  # noqa: SIM118
    assert_same(found, readable)

    back = safetensors_to_dcp(f"{url}/hf", f"{url}/back", budget_bytes=32 * MIB, **both)
    assert back.num_tensors == len(model)
    assert_same(load(model, f"{url}/back", options), model)


def test_stock_dcp_reads_what_came_from_files(tmp_path) -> None:
    model = full_model()
    model = {name: t for name, t in model.items() if not name.endswith("_x2")}  # stock cannot copy
    save(model, tmp_path / "dcp")
    dcp_to_safetensors(tmp_path / "dcp", tmp_path / "hf")
    safetensors_to_dcp(tmp_path / "hf" / "model.safetensors", tmp_path / "back")
    target = blank(model)
    dcp.load(target, checkpoint_id=tmp_path / "back", no_dist=True)
    assert_same(target, model)


def test_a_file_has_the_bytes_that_the_safetensors_package_writes(tmp_path) -> None:
    model = {k: v.contiguous() for k, v in full_model().items()}
    save(model, tmp_path / "dcp")
    dcp_to_safetensors(tmp_path / "dcp", tmp_path / "hf")
    save_file(model, tmp_path / "theirs", metadata={"format": "pt"})
    ours = load_header(tmp_path / "hf" / "model.safetensors")
    theirs = load_header(tmp_path / "theirs")
    assert ours == theirs


def load_header(path: Path) -> dict:
    """The header, each tensor with its bytes instead of their place."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0
    for name, entry in header.items():
        if name != "__metadata__":
            first, end = entry.pop("data_offsets")
            entry["bytes"] = content[8 + length + first : 8 + length + end]
            item = dtype_from_name("uint8").itemsize
            if prod(entry["shape"]):
                item = (end - first) // max(1, prod(entry["shape"]))
            assert (8 + length + first) % max(item, 1) == 0, "elements are aligned"
    return header


@pytest.mark.parametrize("writer", ["stock", "zstd"])
def test_checkpoints_by_other_writers_are_converted(tmp_path, writer) -> None:
    model = {"table": pattern(torch.float32, (3000, 700), seed=1), "b": torch.ones(3)}
    if writer == "stock":
        dcp.save(model, checkpoint_id=tmp_path / "dcp", no_dist=True)
    else:
        from torch.distributed.checkpoint import FileSystemWriter
        from torch.distributed.checkpoint._extension import ZStandard

        stock = FileSystemWriter(tmp_path / "dcp", _extensions=[ZStandard()])
        dcp.save(model, storage_writer=stock, no_dist=True)
    dcp_to_safetensors(tmp_path / "dcp", tmp_path / "hf", budget_bytes=32 * MIB)
    assert_same(load_folder(tmp_path / "hf"), model)


class ColumnsPlanner(dcpstore.SavePlanner):
    """Stores a tensor as chunks of a few columns, as tensor parallelism does."""

    def create_local_plan(self) -> SavePlan:
        from dataclasses import replace

        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

        items = []
        for item in super().create_local_plan().items:
            rows, columns = item.tensor_data.size
            for first in range(0, columns, 100):
                at = torch.Size([0, first])
                chunk = ChunkStorageMetadata(at, torch.Size([rows, min(100, columns - first)]))
                data = replace(item.tensor_data, chunk=chunk)
                items.append(
                    replace(item, index=MetadataIndex(item.index.fqn, at), tensor_data=data)
                )
        return SavePlan(items, planner_data=self.mappings)


def test_a_tensor_in_columns_is_assembled_by_rows(tmp_path) -> None:
    model = {"table": pattern(torch.float32, (3000, 730), seed=1)}
    save(model, tmp_path / "dcp", planner=ColumnsPlanner(max_item_bytes=None))
    with dcpstore.open_checkpoint(tmp_path / "dcp") as checkpoint:
        assert len(checkpoint.items_of("table")) == 8
    result = dcp_to_safetensors(tmp_path / "dcp", tmp_path / "hf", budget_bytes=32 * MIB)
    assert_same(load_folder(tmp_path / "hf"), model)
    # Three blocks of rows, each widened to whole checksum blocks in each of eight chunks.
    assert result.fetched_bytes <= 1.75 * model["table"].nbytes


# --- what is chosen ----------------------------------------------------------------------


@pytest.fixture
def small(tmp_path):
    state = {
        "model": {"a": torch.randn(40, 3), "b": torch.arange(5), "c": torch.randn(4).half()},
        "optim": {"m": torch.randn(40, 3)},
        "step": 3,
    }
    save(state, tmp_path / "dcp")
    return state, tmp_path / "dcp", tmp_path / "hf"


def test_keys_are_chosen_renamed_and_cast(small) -> None:
    state, source, target = small
    result = dcp_to_safetensors(
        source,
        target,
        keys=["model.*"],
        exclude=["*.c"],
        rename=lambda key: key.replace("model.", "net/"),
        dtype=torch.bfloat16,
    )
    expected = {"net/a": state["model"]["a"].bfloat16(), "net/b": state["model"]["b"]}
    assert_same(load_folder(target), expected)
    assert result.cast == {"model.a": ("float32", "bfloat16")}
    assert result.skipped == {}


def test_a_dtype_per_pattern_takes_the_first_that_matches(small) -> None:
    state, source, target = small
    dtypes = {"model.a": torch.float64, "*": torch.bfloat16, "model.c": torch.float32}
    dcp_to_safetensors(source, target, dtype=dtypes)
    found = load_folder(target)
    assert found["model.a"].dtype == torch.float64
    assert found["model.c"].dtype == torch.bfloat16
    assert found["model.b"].dtype == torch.int64
    assert_same(found["model.a"], state["model"]["a"].double())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"keys": ["modl.*"]}, "modl"),
        ({"keys": "model.*"}, "lists of patterns"),
        ({"exclude": ["*"]}, "leave none"),
        ({"keys": ["step"]}, "no tensor"),
        ({"rename": {"model.a": "x", "model.b": "x"}}, "'x'"),
        ({"dtype": "bfloat16"}, "torch.dtype"),
        ({"max_shard_bytes": 0}, "max_shard_bytes"),
        ({"budget_bytes": MIB}, "budget_bytes"),
        ({"values": "drop"}, "values"),
        ({"tied": {"model.a": "nothing"}}, "nothing"),
        ({"tied": {"model.a": "model.b"}}, "shape or dtype"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_are_refused_and_nothing_is_written(
    small, arguments, says
) -> None:
    _, source, target = small
    with pytest.raises(ConfigError, match=says):
        dcp_to_safetensors(source, target, **arguments)
    assert not target.exists()


def test_values_are_an_error_where_asked_for(small) -> None:
    _, source, target = small
    with pytest.raises(IncompatibleError, match="'step'"):
        dcp_to_safetensors(source, target, values="error")
    dcp_to_safetensors(source, target, exclude=["step"], values="error")


def test_a_dtype_that_the_format_lacks_is_an_error_or_converted(tmp_path) -> None:
    lacking = [torch.complex128, torch.complex32]
    state = {name_of(d): pattern(d, (3, 4), seed=1) for d in lacking} | {"a": torch.ones(2)}
    save(state, tmp_path / "dcp")
    assert all(file_dtype(name_of(d)) is None for d in lacking)
    with pytest.raises(IncompatibleError, match=r"complex128.*complex32.*torch\.complex64"):
        dcp_to_safetensors(tmp_path / "dcp", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    dcp_to_safetensors(tmp_path / "dcp", tmp_path / "hf", dtype=torch.complex64)
    found = load_folder(tmp_path / "hf")
    assert_same(found["complex128"], state["complex128"].to(torch.complex64))
    assert_same(found["a"], state["a"])


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_quantized_tensor_is_an_error_that_names_it(tmp_path) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    save({"q": quantized, "a": torch.ones(2)}, tmp_path / "dcp")
    with pytest.raises(IncompatibleError, match=r"'q'.*exclude"):
        dcp_to_safetensors(tmp_path / "dcp", tmp_path / "hf")


# --- tied tensors ------------------------------------------------------------------------


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 8)
        self.head = torch.nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight


def test_tied_tensors_are_written_once_as_the_safetensors_package_does(tmp_path) -> None:
    model = Tied()
    save(model.state_dict(), tmp_path / "dcp")
    result = dcp_to_safetensors(
        tmp_path / "dcp", tmp_path / "hf", tied={"head.weight": "embed.weight"}
    )
    save_model(model, str(tmp_path / "theirs.safetensors"), metadata={"format": "pt"})
    assert result.skipped == {"head.weight": "equals embed.weight"}
    path = tmp_path / "hf" / "model.safetensors"
    with safe_open(path, "pt") as ours, safe_open(tmp_path / "theirs.safetensors", "pt") as theirs:
        assert ours.metadata() == theirs.metadata()
        assert list(ours.keys()) == list(theirs.keys())
    safetensors_to_dcp(tmp_path / "hf", tmp_path / "back")
    assert_same(load(model.state_dict(), tmp_path / "back"), dict(model.state_dict()))


@pytest.mark.parametrize("rows", [10, 3000])
def test_tensors_that_are_not_equal_are_not_tied(tmp_path, rows) -> None:
    table = torch.zeros(rows, 700)
    other = table.clone()
    other[-1, -1] = -0.0  # equal to the eye, not to the bit
    save({"a": table, "b": other}, tmp_path / "dcp")
    with pytest.raises(IncompatibleError, match="values differ"):
        dcp_to_safetensors(
            tmp_path / "dcp", tmp_path / "hf", tied={"b": "a"}, budget_bytes=32 * MIB
        )
    assert not (tmp_path / "hf").exists()


# --- files that lie there ----------------------------------------------------------------


def test_files_that_exist_are_kept_unless_they_may_be_replaced(small) -> None:
    state, source, target = small
    dcp_to_safetensors(source, target, keys=["model.a"])
    before = (target / "model.safetensors").read_bytes()
    with pytest.raises(AlreadyExistsError, match="overwrite=True"):
        dcp_to_safetensors(source, target, max_shard_bytes=100)
    assert [path.name for path in target.iterdir()] == ["model.safetensors"]
    assert (target / "model.safetensors").read_bytes() == before
    assert state


@pytest.mark.parametrize("old", [100, 400, 10**9])
@pytest.mark.parametrize("new", [100, 400, 10**9])
def test_a_folder_is_replaced_with_nothing_left_of_the_old(small, old, new) -> None:
    state, source, target = small
    dcp_to_safetensors(source, target, keys=["optim.*", "model.a"], max_shard_bytes=old)
    result = dcp_to_safetensors(
        source, target, keys=["model.*"], max_shard_bytes=new, overwrite=True
    )
    assert {path.name for path in target.iterdir()} == set(result.objects)
    expected = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    assert_same(load_folder(target), expected)


def test_what_others_put_into_the_folder_stays(small) -> None:
    _, source, target = small
    target.mkdir()
    (target / "config.json").write_text("{}")
    dcp_to_safetensors(source, target, max_shard_bytes=100)
    dcp_to_safetensors(source, target, overwrite=True)
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors"]


# --- failures ----------------------------------------------------------------------------


@pytest.mark.parametrize("max_shard_bytes", [3 * MIB, 10**9])
def test_ctrl_c_leaves_no_file_and_no_upload(s3_server, tmp_path, max_shard_bytes) -> None:
    model = {f"layer{n}": pattern(torch.float32, (1000, 700), seed=n) for n in range(5)}
    save(model, tmp_path / "dcp")
    client = s3_server.create_bucket("interrupted")
    with pytest.raises(KeyboardInterrupt):
        dcp_to_safetensors(
            tmp_path / "dcp",
            "s3://interrupted/hf",
            target_options=s3_server.storage_options(),
            max_shard_bytes=max_shard_bytes,
            budget_bytes=32 * MIB,
            progress=CtrlC(),
        )
    assert client.keys() == []
    assert client.open_uploads() == []


def damage(folder: Path) -> None:
    """Flip a bit of the last tensor."""
    (data,) = folder.glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[-100_000] ^= 1
    data.write_bytes(content)


def test_a_damaged_source_leaves_no_file(tmp_path) -> None:
    model = {f"layer{n}": pattern(torch.float32, (1000, 700), seed=n) for n in range(5)}
    save(model, tmp_path / "dcp")
    damage(tmp_path / "dcp")
    with pytest.raises(CorruptError, match="layer4"):
        dcp_to_safetensors(
            tmp_path / "dcp", tmp_path / "hf", max_shard_bytes=3 * MIB, budget_bytes=32 * MIB
        )
    assert [*(tmp_path / "hf").iterdir()] == []


HEADERS = {
    "overlap": ({"a": ("F32", [2], [0, 8]), "b": ("F32", [2], [4, 12])}, 12, "overlaps"),
    "hole": ({"a": ("F32", [2], [0, 8]), "b": ("F32", [2], [16, 24])}, 24, "belong to no tensor"),
    "outside": ({"a": ("F32", [2], [0, 8]), "b": ("F32", [2], [8, 16])}, 12, "cut short"),
    "behind": ({"a": ("F32", [2], [0, 8])}, 12, "behind its last tensor"),
    "dtype": ({"a": ("F31", [2], [0, 8])}, 8, "unknown dtype 'F31'"),
    "size": ({"a": ("F32", [3], [0, 8])}, 8, "cannot have 8 bytes"),
    "negative": ({"a": ("F32", [-2], [0, 8])}, 8, "-2"),
    "reversed": ({"a": ("F32", [2], [8, 0])}, 8, "cannot have -8"),
    "text": ({"a": ("F32", ["2"], [0, 8])}, 8, "damaged"),
    "odd pairs": ({"a": ("F4", [3], [0, 2])}, 2, "F4"),
    "no json": (b"{]  ", 8, "damaged"),
    "no object": (b"[1]", 8, "damaged"),
    "deep": (b"[" * 100_000, 8, "damaged"),
    "twice": (
        b"{%b,%b}" % ((b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}',) * 2),
        1,
        "twice",
    ),
}
TAKEN_BY_THE_PACKAGE = {"twice"}  # the last one wins there


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_breaks_the_rules_is_refused(tmp_path, name) -> None:
    given, num_bytes, says = HEADERS[name]
    if isinstance(given, dict):
        fields = ("dtype", "shape", "data_offsets")
        given = {key: dict(zip(fields, entry, strict=True)) for key, entry in given.items()}
    path = tmp_path / "bad.safetensors"
    write_file(path, given, bytes(num_bytes))
    with pytest.raises(CorruptError, match=says):
        safetensors_to_dcp(path, tmp_path / "dcp")
    assert not (tmp_path / "dcp").exists()
    if name in TAKEN_BY_THE_PACKAGE:
        return
    with pytest.raises(Exception):  # noqa: B017 - the package has no base class
        load_file(path)


@pytest.mark.parametrize("length", [1 << 62, 200 << 20, 5000, 0])
def test_an_impossible_header_length_is_refused(tmp_path, length) -> None:
    path = tmp_path / "bad.safetensors"
    write_file(path, b"{}", b"", length=length)
    with pytest.raises(CorruptError, match="header of"):
        safetensors_to_dcp(path, tmp_path / "dcp")
    path.write_bytes(b"1234")
    with pytest.raises(CorruptError, match="4 bytes"):
        safetensors_to_dcp(path, tmp_path / "dcp")


def test_an_index_that_lies_is_refused(tmp_path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"a": torch.zeros(2), "b": torch.ones(2)}, tmp_path / "two.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"b": "one.safetensors"}}))
    with pytest.raises(CorruptError, match=r"'b' is in one\.safetensors"):
        safetensors_to_dcp(tmp_path, tmp_path / "dcp")
    both = {"a": "one.safetensors", "b": "two.safetensors"}
    index.write_text(json.dumps({"weight_map": both}))
    with pytest.raises(CorruptError, match="'a' is both"):
        safetensors_to_dcp(tmp_path, tmp_path / "dcp")
    index.write_text(json.dumps({"weight_map": {"a": "../one.safetensors"}}))
    with pytest.raises(CorruptError, match="outside"):
        safetensors_to_dcp(tmp_path, tmp_path / "dcp")


def test_what_is_absent_is_not_found(tmp_path) -> None:
    for name in ("nothing", "nothing/model.safetensors"):
        with pytest.raises(dcpstore.NotFoundError):
            safetensors_to_dcp(tmp_path / name, tmp_path / "dcp")
    with pytest.raises(dcpstore.NotFoundError):
        dcp_to_safetensors(tmp_path / "nothing", tmp_path / "hf")


# --- ranks -------------------------------------------------------------------------------


def test_ranks_share_the_files_and_the_way_back(tmp_path) -> None:
    model = {f"layer{n}": pattern(torch.float32, (300, 700), seed=n) for n in range(7)}
    save(model, tmp_path / "dcp")

    def convert(group):
        out = dcp_to_safetensors(
            tmp_path / "dcp",
            tmp_path / "hf",
            max_shard_bytes=2 * MIB,
            budget_bytes=32 * MIB,
            process_group=group,
        )
        return out, safetensors_to_dcp(
            tmp_path / "hf", tmp_path / "back", budget_bytes=32 * MIB, process_group=group
        )

    results = run_ranks(3, convert, wait_s=60).values()
    assert len(results[0][0].objects) == 5
    assert all(one[0].objects == results[0][0].objects for one in results)
    assert_same(load_folder(tmp_path / "hf"), model)
    ranks = {key.split("_")[2] for key in results[0][1].objects}
    assert ranks == {"0", "1", "2"}
    assert_same(load(model, tmp_path / "back"), model)


def test_a_rank_that_fails_takes_the_files_of_all_along(tmp_path) -> None:
    model = {f"layer{n}": pattern(torch.float32, (300, 700), seed=n) for n in range(6)}
    save(model, tmp_path / "dcp")
    damage(tmp_path / "dcp")

    def convert(group):
        dcp_to_safetensors(
            tmp_path / "dcp", tmp_path / "hf", max_shard_bytes=MIB, process_group=group
        )

    run = run_ranks(2, convert, wait_s=60)
    assert len(run.errors) == 2
    assert all("layer5" in str(error) for error in run.errors.values())
    assert [*(tmp_path / "hf").iterdir()] == []


def test_a_tensor_without_a_name_needs_one(tmp_path: Path) -> None:
    save_file({"": torch.ones(2), "b": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(dcpstore.IncompatibleError, match=r"a key of the source is empty.*rename="):
        safetensors_to_dcp(tmp_path, tmp_path / "out", progress=False)
    safetensors_to_dcp(tmp_path, tmp_path / "out", rename={"": "a"}, progress=False)
    assert sorted(dcpstore.open_checkpoint(tmp_path / "out").keys) == ["a", "b"]
