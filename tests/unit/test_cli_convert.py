"""``dcpstore convert`` and ``copy``: which converter runs, and with what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dcpstore
from dcpstore.cli.convert import parse_size

STATE = {
    "model": {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5)},
    "optim": {"a": torch.zeros(3, 4)},
    "step": 7,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    dcpstore.save(STATE, folder / "step-1")
    torch.save(STATE, folder / "state.pt")
    return folder


def done(cli, *arguments: object) -> dict[str, Any]:
    code, out, err = cli(*arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_a_checkpoint_becomes_a_file_of_torch_save_and_one_again(
    cli, source: Path, tmp_path: Path
) -> None:
    document = done(cli, "convert", source / "step-1", tmp_path / "out.pt")
    assert (document["num_tensors"], document["num_values"]) == (3, 1)
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert loaded["step"] == 7
    assert torch.equal(loaded["model"]["a"], STATE["model"]["a"])
    done(cli, "convert", tmp_path / "out.pt", tmp_path / "again")
    assert cli("diff", source / "step-1", tmp_path / "again", "--quiet")[0] == 0


def test_a_checkpoint_becomes_safetensors_of_the_keys_names_and_dtype_asked_for(
    cli, source: Path, tmp_path: Path
) -> None:
    options = [
        "--keys",
        "model.*",
        "--exclude",
        "*.b",
        "--rename",
        "model.=",
        "--dtype",
        "bfloat16",
    ]
    document = done(
        cli, "convert", source / "step-1", tmp_path / "hf", "--to=safetensors", *options
    )
    assert document["schema"] == "dcpstore.convert/1"
    assert document["cast"] == {"model.a": ["float32", "bfloat16"]}
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert {key: value.dtype for key, value in found.items()} == {"a": torch.bfloat16}
    done(cli, "convert", tmp_path / "hf", tmp_path / "back")
    assert tuple(dcpstore.read_tensor(tmp_path / "back", "a").shape) == (3, 4)


def test_shards_of_safetensors_are_as_large_as_asked_for(cli, source: Path, tmp_path: Path) -> None:
    options = ["--to=safetensors", "--shard-size=50B"]
    document = done(cli, "convert", source / "step-1", tmp_path / "hf", *options)
    assert len(document["objects"]) > 2


def test_a_copy_is_equal_and_a_part_of_one_holds_what_was_chosen(
    cli, source: Path, tmp_path: Path
) -> None:
    assert done(cli, "copy", source / "step-1", tmp_path / "all")["schema"] == "dcpstore.copy/1"
    assert cli("diff", source / "step-1", tmp_path / "all", "--quiet")[0] == 0
    options = ["--keys=model.*", "--dtype=model.a=float16", "--object-size=1MiB"]
    done(cli, "copy", source / "step-1", tmp_path / "part", *options)
    assert dcpstore.read_tensor(tmp_path / "part", "model.a").dtype == torch.float16
    assert dcpstore.read_tensor(tmp_path / "part", "model.b").dtype == torch.float32


def test_a_target_that_exists_is_kept_unless_it_may_be_replaced(
    cli, source: Path, tmp_path: Path
) -> None:
    (tmp_path / "out.pt").write_bytes(b"precious")
    code, out, err = cli("convert", source / "step-1", tmp_path / "out.pt")
    assert (code, out) == (6, "")
    assert "give --overwrite" in err
    assert (tmp_path / "out.pt").read_bytes() == b"precious"
    done(cli, "convert", source / "step-1", tmp_path / "out.pt", "--overwrite")
    assert torch.load(tmp_path / "out.pt", weights_only=True)["step"] == 7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["convert", "step-1", "out"], "use `dcpstore copy`"),
        (["convert", "state.pt", "out", "--to=safetensors"], "no way from torch to safetensors"),
        (["convert", "step-1", "out", "--to=safetensors", "--allow-pickle"], "need none"),
        (["convert", "step-1", "out.pt", "--shard-size=1GB"], "does not apply"),
        (["copy", "step-1", "out", "--dtype=float17"], "float17"),
        (["copy", "step-1", "out", "--rename=x"], "write OLD=NEW"),
        (["copy", "step-1", "out", "--keys=nothing"], "nothing"),
        (["copy", "step-1", "out", "--budget=much"], "no size"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_anything_is_written(
    cli, source: Path, tmp_path: Path, arguments: list[str], words: str
) -> None:
    command, name, target, *options = arguments
    code, out, err = cli(command, source / name, tmp_path / target, *options)
    assert (code, out) == (2, "")
    assert words in err
    assert not list(tmp_path.iterdir())


def test_a_source_that_is_not_there_is_not_found(cli, tmp_path: Path) -> None:
    for command in ("convert", "copy"):
        assert cli(command, tmp_path / "nothing", tmp_path / "out.pt")[0] == 3
    assert cli("convert", tmp_path / "nothing.pt", tmp_path / "out")[0] == 3


def test_common_options_are_for_the_side_that_is_remote(
    cli, s3_server, source: Path, tmp_path: Path
) -> None:
    s3_server.create_bucket("cli-convert")
    path = tmp_path / "options.json"
    path.write_text(json.dumps(s3_server.storage_options()))
    url = "s3://cli-convert/step-1"
    done(cli, "copy", source / "step-1", url, "--storage-option", f"@{path}")
    done(cli, "copy", url, tmp_path / "back", "--source-storage-option", f"@{path}")
    assert cli("diff", source / "step-1", tmp_path / "back", "--quiet")[0] == 0


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("100", 100), ("256MiB", 256 << 20), ("5GB", 5 * 10**9), ("1.5k", 1500), ("2 Ti", 2 << 40)],
)
def test_sizes_count_in_1000s_or_in_1024s_as_they_say(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes
