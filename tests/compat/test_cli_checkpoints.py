"""``dcpstore ls`` and ``show`` on checkpoints of every writer, whole, damaged and refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from compat_states import QUIET, full_state
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemWriter

import dcpstore
from dcpstore.audit.describe import describe
from dcpstore.store import open_store
from dcpstore.testing import Fault, MotoServer

pytestmark = [*QUIET, pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")]

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("dcpstore-1", "dcpstore-1-embedded", "torch-2.6.0", "torch-2.13.0", "torch-2.13.0-zstd")


def shown(cli, url: object, *more: object) -> dict[str, Any]:
    code, out, err = cli("show", url, "--json", *more)
    assert (code, err) == (0, "")
    return json.loads(out)


def shapes(document: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    return {
        entry["key"]: (entry["dtype"], entry["shape"], entry["num_bytes"])
        for entry in document["entries"]
        if entry["kind"] == "tensor"
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One state in every form: ours, stock, safetensors, and a file of torch.save."""
    folder = tmp_path_factory.mktemp("saved")
    state = full_state()
    dcpstore.save(state, folder / "ours")
    dcp.save(state, storage_writer=FileSystemWriter(folder / "stock"), no_dist=True)
    torch.save(state, folder / "state.pt")
    flat = {"a.weight": torch.ones(3, 4), "a.bias": torch.ones(4, dtype=torch.bfloat16)}
    (folder / "hf").mkdir()
    save_file(flat, folder / "hf" / "model.safetensors")
    return folder


# --- whole --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_golden_checkpoints_are_listed_and_shown(cli, name: str) -> None:
    (listed,) = json.loads(cli("ls", GOLDEN / name, "--json")[1])["checkpoints"]
    document = shown(cli, GOLDEN / name)
    assert listed["layout"] == document["layout"] == name.split("-")[0].replace("torch", "dcp")
    assert listed["sealed"] is True
    assert (document["totals"]["num_tensors"], document["totals"]["num_values"]) == (11, 5)
    assert [one["rank"] for one in document["objects"]] == [0, 1]
    rows = next(one for one in document["entries"] if one["key"] == "model.rows")
    assert (rows["shape"], rows["num_shards"], rows["num_bytes"]) == ([5, 7], 2, 140)


def test_a_state_is_shown_alike_whoever_saved_it(cli, saved: Path) -> None:
    ours, stock = shown(cli, saved / "ours"), shown(cli, saved / "stock")
    file = shown(cli, saved / "state.pt")
    assert shapes(ours) == shapes(stock) == shapes(file)
    assert len(shapes(ours)) > 30
    kinds = [[(one["key"], one["kind"]) for one in d["entries"]] for d in (ours, stock, file)]
    assert kinds[0] == kinds[1] == kinds[2]
    assert [one["layout"] for one in (ours, stock, file)] == ["dcpstore", "dcp", "torch_file"]


def test_a_stock_tensor_counts_its_elements_and_not_its_record(cli, saved: Path) -> None:
    stock = describe(open_store(saved / "stock"), dcpstore.ReadConfig())
    (shard,) = next(one for one in stock.entries if one.key == "dtypes.float32").shards
    assert shard.num_bytes == 140
    entries = {one["key"]: one for one in shown(cli, saved / "stock")["entries"]}
    assert entries["dtypes.float32"]["num_bytes"] == 140
    assert entries["dtypes.float32"]["stored_bytes"] > 1000


def test_tied_tensors_of_a_file_are_pointed_out(cli, tmp_path: Path) -> None:
    weight = torch.ones(4)
    torch.save({"a": weight, "b": weight, "c": torch.ones(2)}, tmp_path / "tied.pt")
    document = shown(cli, tmp_path / "tied.pt")
    assert document["remarks"] == [
        "2 tensors share storage with others: their stored bytes count twice"
    ]
    assert document["objects"][0]["stored_bytes"] == 24


def test_a_file_that_is_no_dictionary_has_a_root(cli, tmp_path: Path) -> None:
    torch.save(torch.ones(3, 4), tmp_path / "one.pt")
    assert list(shapes(shown(cli, tmp_path / "one.pt"))) == ["root"]


@pytest.mark.parametrize("name", ["hf", "hf/model.safetensors"])
def test_safetensors_are_shown_by_folder_and_by_file(cli, saved: Path, name: str) -> None:
    document = shown(cli, saved / name)
    assert document["layout"] == "safetensors"
    assert shapes(document) == {
        "a.bias": ("bfloat16", [4], 8),
        "a.weight": ("float32", [3, 4], 48),
    }
    assert document["objects"][0]["key"] == "model.safetensors"


def test_what_each_rank_sealed_for_itself_is_shown_together(cli, tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path)
    dcp.save({"a": torch.ones(2)}, storage_writer=writer, no_dist=True)
    for rank in (0, 1):
        shutil.copy(tmp_path / ".metadata", tmp_path / f"__{rank}.metadata")
    (tmp_path / ".metadata").unlink()
    document = shown(cli, tmp_path)
    assert [one["key"] for one in document["entries"]] == ["a", "a"]
    assert document["remarks"] == [
        "sealed by 2 ranks, each for itself: keys may come once per rank"
    ]


# --- damaged ------------------------------------------------------------------------------


@pytest.fixture
def copies(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copies"))


def damaged(cli, url: object) -> str:
    code, out, err = cli("show", url)
    assert (code, out) == (1, "")
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize("name", ["ours", "stock"])
def test_metadata_cut_short_are_a_finding(cli, copies: Path, name: str) -> None:
    path = copies / name / ".metadata"
    path.write_bytes(path.read_bytes()[:-30])
    assert ".metadata" in damaged(cli, copies / name)


def test_a_flipped_bit_in_a_manifest_apart_is_a_finding(cli, copies: Path) -> None:
    config = dcpstore.WriteConfig(embed_manifest_bytes=0)
    dcpstore.save({"w": torch.ones(3)}, copies / "ours", overwrite=True, config=config)
    (path,) = (copies / "ours").glob(".dcpstore-*")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert path.name in damaged(cli, copies / "ours")


def test_a_safetensors_file_cut_short_is_a_finding(cli, copies: Path) -> None:
    path = copies / "hf" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:20])
    assert "model.safetensors" in damaged(cli, copies / "hf")


def test_a_torch_file_cut_short_is_a_finding(cli, copies: Path) -> None:
    path = copies / "state.pt"
    path.write_bytes(path.read_bytes()[:-500])
    assert "state.pt" in damaged(cli, path)


def test_a_checkpoint_that_lost_its_seal_is_listed_and_not_found(cli, copies: Path) -> None:
    (copies / "ours" / ".metadata").unlink()
    (one,) = json.loads(cli("ls", copies / "ours", "--json")[1])["checkpoints"]
    assert (one["layout"], one["sealed"]) == ("dcpstore", False)
    code, _, err = cli("show", copies / "ours")
    assert code == 3
    assert "an interrupted" in err or "interrupted leaves no .metadata" in err


@pytest.mark.parametrize("command", ["ls", "show"])
def test_an_empty_folder_holds_no_checkpoint(cli, tmp_path: Path, command: str) -> None:
    code, out, err = cli(command, tmp_path)
    assert (code, out) == (3, "")
    assert str(tmp_path) in err


# --- refused ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bucket(moto_server: MotoServer, saved: Path) -> str:
    client = moto_server.create_bucket("cli-checkpoints")
    for path in (saved / "ours").iterdir():
        client.put(f"run/step-1/{path.name}", path.read_bytes())
    client.put("files/state.pt", (saved / "state.pt").read_bytes())
    return "s3://cli-checkpoints"


@pytest.fixture
def s3_options(s3_server: MotoServer, tmp_path: Path) -> list[str]:
    path = tmp_path / "options.json"
    path.write_text(json.dumps(s3_server.storage_options()))
    return ["--storage-option", f"@{path}", "--retry-seconds", "1"]


def refuse(server: MotoServer, *operations: str) -> None:
    for operation in operations:
        server.add_fault(Fault(operation, status=403, code="AccessDenied", times=-1))


def test_a_bucket_is_listed_by_one_request(cli, s3_server, bucket: str, s3_options) -> None:
    code, out, _ = cli("ls", f"{bucket}/run", "--json", *s3_options)
    (one,) = json.loads(out)["checkpoints"]
    assert code == 0
    assert (one["url"], one["step"], one["sealed"]) == (f"{bucket}/run/step-1", 1, True)
    assert s3_server.counts() == {"ListObjects": 1}


def test_a_bucket_is_shown_by_one_request(cli, s3_server, bucket: str, s3_options) -> None:
    assert shown(cli, f"{bucket}/run/step-1", *s3_options)["layout"] == "dcpstore"
    assert s3_server.counts() == {"GetObject": 1}
    assert shown(cli, f"{bucket}/files/state.pt", *s3_options)["layout"] == "torch_file"


def test_rights_to_get_alone_show_a_checkpoint(cli, s3_server, bucket: str, s3_options) -> None:
    refuse(s3_server, "ListObjects", "DeleteObject", "DeleteObjects", "PutObject", "HeadObject")
    assert shown(cli, f"{bucket}/run/step-1", *s3_options)["totals"]["num_tensors"] > 30
    code, out, _ = cli("ls", f"{bucket}/run/step-1", "--json", *s3_options)
    (one,) = json.loads(out)["checkpoints"]
    assert (code, one["layout"], one["sealed"], one["num_bytes"]) == (0, "dcpstore", True, None)


def test_a_bucket_that_refuses_to_list_a_run_is_denied(
    cli, s3_server, bucket: str, s3_options
) -> None:
    refuse(s3_server, "ListObjects")
    code, out, err = cli("ls", f"{bucket}/run", *s3_options)
    assert (code, out) == (4, "")
    assert "s3:ListBucket" in err
    assert err.count("\n") == 1


def test_a_bucket_that_refuses_to_read_is_denied(cli, s3_server, bucket: str, s3_options) -> None:
    refuse(s3_server, "GetObject", "HeadObject")
    assert cli("show", f"{bucket}/run/step-1", *s3_options)[0] == 4
    assert cli("show", f"{bucket}/files/state.pt", *s3_options)[0] == 4


def test_a_bucket_that_does_not_exist_is_not_found(cli, s3_server, s3_options) -> None:
    for command in ("ls", "show"):
        code, out, err = cli(command, "s3://cli-no-such-bucket/run", *s3_options)
        assert (code, out) == (3, "")
        assert "cli-no-such-bucket" in err


def test_secrets_do_not_show_when_a_store_cannot_be_reached(cli) -> None:
    options = ["--storage-option=key=AKIAEXAMPLE", "--storage-option=secret=hunter2hunter2"]
    code, out, err = cli(
        "ls",
        "s3://bucket/run",
        *options,
        "--endpoint-url=http://127.0.0.1:9",
        "--retry-seconds=0.2",
        "--debug",
    )
    assert (code, out) == (5, "")
    assert "Traceback" in err
    assert "hunter2" not in err
    assert "AKIAEXAMPLE" not in err
