"""Several hundred manifests that were changed and sealed again with checksums that are right.

Whatever a manifest says, reading it ends in a result or in an error of ours that names its place.
"""

from __future__ import annotations

import io
import json
import shutil
import struct
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hostile_manifests import Change, changed, every_change, reseal

import dcpstore
from dcpstore.cli.output import ExitCode
from dcpstore.config import ReadConfig
from dcpstore.convert.torch.structure import _PREFIX, Layout, decode_layout, encode_layout
from dcpstore.errors import CheckpointError, CorruptError, IncompatibleError
from dcpstore.format.manifest import decode
from dcpstore.format.seal import Facts
from dcpstore.read.discovery import discover
from dcpstore.store import open_store

GOLDEN = Path(__file__).parents[1] / "compat" / "golden" / "dcpstore-1-embedded"
ATTACHED = GOLDEN.with_name("dcpstore-2-attached")
HOSTILE = "a\x1b[2Jb\u202ec\nd\ud800"
"""A key that clears the screen, turns the direction of writing around, and is no UTF-8."""


def manifest_of(folder: Path) -> bytes:
    found = discover(open_store(folder), ReadConfig()).manifest
    assert found is not None
    return found


CHANGES = list(every_change(manifest_of(GOLDEN)))
CHANGES_ATTACHED = [
    (what, change)
    for what, change in every_change(manifest_of(ATTACHED))
    if what.startswith(
        ("attachment", "object", "checksums", "inline", "info", "no ", "needs", "blocks")
    )
]


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "bad"))


def commands(bad: Path) -> list[tuple[object, ...]]:
    there = bad.parent / "there"
    return [
        ("show", bad, "--shards"),
        ("show", bad, "--tree", "--json"),
        ("ls", bad.parent),
        ("verify", bad),
        ("convert", bad, there / "a.pt"),
        ("convert", bad, there / "hf", "--to", "safetensors"),
        ("convert", bad, there / "dcp", "--to", "dcp"),
        ("copy", bad, there / "copy"),
        ("diff", bad, GOLDEN),
        ("prune", bad.parent),
    ]


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    with dcpstore.open_checkpoint(folder) as checkpoint:
        return {
            fqn: torch.zeros(tuple(entry.size), dtype=entry.properties.dtype)
            for fqn, entry in checkpoint.tensors.items()
            if not checkpoint.is_opaque(fqn)
        }


@pytest.mark.parametrize(
    ("folder", "changes", "least"),
    [(GOLDEN, CHANGES, 1000), (ATTACHED, CHANGES_ATTACHED, 300)],
    ids=["values", "attachments"],
)
def test_there_are_enough_changes_and_the_gate_refuses_most_with_their_place(
    folder: Path, changes: list[tuple[str, Change]], least: int
) -> None:
    data = manifest_of(folder)
    refused = 0
    for what, change in changes:
        try:
            decode(changed(data, change), key="place")
        except (CorruptError, IncompatibleError) as error:
            refused += 1
            assert str(error).startswith("place: the "), what
    assert len(changes) > least
    assert refused > len(changes) // 2


@pytest.mark.parametrize("part", range(8))
def test_every_command_ends_in_a_result_or_an_error_of_ours(bad: Path, cli, part: int) -> None:
    """Of what the gate lets pass one in eight, of the rest one in twenty."""
    data, state = manifest_of(GOLDEN), state_of(GOLDEN)
    passing = 0
    for number, (what, change) in enumerate(CHANGES[part::8]):
        with suppress(CheckpointError):
            decode(changed(data, change))
            passing += 1
            if passing % 8:
                continue
            number = 0
        if number % 20:
            continue
        shutil.copy(GOLDEN / ".metadata", bad / ".metadata")
        reseal(bad, change)
        for command in commands(bad):
            shutil.rmtree(bad.parent / "there", ignore_errors=True)
            code, out, err = cli(*command)
            assert code != ExitCode.INTERNAL, (what, command, err)
            assert (out + err).replace("\n", "").isprintable(), (what, command)
        with suppress(CheckpointError):
            dcpstore.load({fqn: tensor.clone() for fqn, tensor in state.items()}, bad)
        with suppress(CheckpointError), dcpstore.open_checkpoint(bad) as checkpoint:
            for fqn in checkpoint.tensors:
                checkpoint.read_tensor(fqn)


def test_every_command_ends_so_for_attachments_too(tmp_path: Path, cli) -> None:
    """Of what the gate lets pass one in six, and each that is about an attachment alone."""
    bad = Path(shutil.copytree(ATTACHED, tmp_path / "bad"))
    data = manifest_of(ATTACHED)
    passing = 0
    for what, change in CHANGES_ATTACHED:
        try:
            decode(changed(data, change))
        except CheckpointError:
            continue
        passing += 1
        if passing % 6 and not what.startswith("attachment"):
            continue
        shutil.copy(ATTACHED / ".metadata", bad / ".metadata")
        reseal(bad, change)
        for command in (("show", bad, "--json"), ("verify", bad), ("diff", bad, ATTACHED)):
            code, out, err = cli(*command)
            assert code != ExitCode.INTERNAL, (what, command, err)
            assert (out + err).replace("\n", "").isprintable(), (what, command)
        with suppress(CheckpointError), dcpstore.open_checkpoint(bad) as checkpoint:
            for name in checkpoint.attachments:
                with suppress(CheckpointError):
                    checkpoint.read_attachment(name)
    assert passing > 20


# --- keys that do harm to a terminal ------------------------------------------------------


@pytest.fixture
def named(tmp_path: Path) -> Path:
    """A folder with a checkpoint whose keys are hostile, and a file with such a name."""
    state = {HOSTILE: torch.arange(6.0), "args": {HOSTILE: "x"}, "other": torch.ones(2)}
    dcpstore.save(
        state,
        tmp_path / "run",
        metrics={HOSTILE: 1.0},
        user_metadata={HOSTILE: HOSTILE},
        facts=Facts(1, HOSTILE),
    )
    (tmp_path / "run" / "__0_9.\x1b[2J\u202e.distcp").write_bytes(b"left over")
    return tmp_path


@pytest.mark.parametrize("json_flag", [(), ("--json",)], ids=["text", "json"])
def test_no_output_holds_what_does_not_print(named: Path, cli, json_flag: tuple[str, ...]) -> None:
    run = named / "run"
    other = named / "other"
    dcpstore.save({HOSTILE: torch.zeros(6), "other": torch.zeros(2)}, other)
    there = named / "there"
    for command in (
        ("ls", named),
        ("show", run),
        ("show", run, "--shards", "--objects"),
        ("show", run, "--tree"),
        ("verify", run),
        ("diff", run, other),
        ("convert", run, there / "a.pt"),
        ("convert", run, there / "hf", "--to", "safetensors"),
        ("copy", run, there / "copy"),
        ("prune", named, "--older-than", "0"),
    ):
        code, out, err = cli(*command, *json_flag)
        text = out + err
        assert text.replace("\n", "").isprintable(), command
        text.encode()
        if json_flag and code == ExitCode.OK:
            json.loads(out)
        if command[0] in ("show", "diff") and "--tree" not in command:
            assert "\\u001b[2J" in out if json_flag else "\\x1b[2J" in out, command
            assert "\\nd" in out, command


def test_no_error_of_a_load_holds_what_does_not_print(named: Path, caplog) -> None:
    run = named / "run"
    for target in ({HOSTILE: torch.zeros(7)}, {HOSTILE + "?": torch.zeros(6)}):
        with pytest.raises(CheckpointError) as caught:
            dcpstore.load(target, run)
        assert str(caught.value).replace("\n", "").isprintable()
        assert "\\x1b[2J" in str(caught.value)
    for data in run.glob("__0_0.*"):
        content = bytearray(data.read_bytes())
        content[:] = bytes(len(content))
        data.write_bytes(bytes(content))
    reseal(run, _without_inline)
    with pytest.raises(CorruptError) as caught:
        dcpstore.load({HOSTILE: torch.zeros(6)}, run)
    texts = [str(caught.value), *(record.getMessage() for record in caplog.records)]
    assert any("\\x1b[2J" in text for text in texts)
    assert all(text.replace("\n", "").isprintable() for text in texts)


def _without_inline(_: object, columns) -> None:
    columns["item.inline"][:] = -1
    columns["inline"] = columns["inline"][:0]


def test_an_object_whose_name_has_control_characters_is_refused(bad: Path, cli) -> None:
    def rename(_: object, columns) -> None:
        columns["object.key.text"][:4] = list(b"\x1b[2J")

    reseal(bad, rename)
    with pytest.raises(CorruptError, match="control character"):
        dcpstore.load(state_of(GOLDEN), bad)
    code, _, err = cli("show", bad)
    assert code == ExitCode.FINDING
    assert err.replace("\n", "").isprintable()


def test_a_message_is_written_as_json_and_as_text_without_what_does_not_print() -> None:
    from dcpstore.cli.output import Output

    for as_json in (False, True):
        out, err = io.StringIO(), io.StringIO()
        output = Output(out, err, as_json=as_json)
        output.result("s", {"key": HOSTILE}, [HOSTILE])
        output.warning(HOSTILE)
        output.error(CorruptError(HOSTILE, key=HOSTILE, fqn=HOSTILE), ExitCode.FINDING)
        text = out.getvalue() + err.getvalue()
        assert text.replace("\n", "").isprintable()
        assert text.count("\n") == (3 if as_json else 5)


@pytest.mark.parametrize(
    "fields",
    [
        "[" * 100_000,
        '{"pickle_bytes":1e999,"members":{},"extra":[]}',
        '{"pickle_bytes":-1,"members":{},"extra":[]}',
        '{"pickle_bytes":99,"members":{},"extra":[]}',
        '{"pickle_bytes":NaN,"members":{},"extra":[]}',
        '{"pickle_bytes":0,"members":{"a":1},"extra":[]}',
        '{"pickle_bytes":0,"members":[],"extra":[]}',
        "[]",
    ],
)
def test_a_hostile_record_of_a_torch_save_file_is_refused(fields: str) -> None:
    whole = encode_layout(Layout(b"", {}, (), b""))
    text = fields.encode()
    data = whole[: _PREFIX.size - 4] + struct.pack("<I", len(text)) + text
    assert _PREFIX.unpack_from(data)[2] == len(text)
    with pytest.raises(CorruptError, match=r"here: the record of its torch\.save file"):
        decode_layout(data, "here")
