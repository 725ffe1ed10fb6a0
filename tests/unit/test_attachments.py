"""Files that were sealed with the tensors: read, verified, shown, copied, compared, deleted."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dcpstore
from dcpstore import CorruptError, NotFoundError, ReadConfig, WriteConfig
from dcpstore.audit.diff import compare_checkpoints
from dcpstore.audit.prune import Place, Rules, find_leftovers
from dcpstore.audit.verify import verify_checkpoint
from dcpstore.convert import dcp_to_dcp, dcp_to_torch_save, torch_save_to_dcp
from dcpstore.format.seal import Facts
from dcpstore.store import open_store
from dcpstore.testing import FaultyStore, RecordingStore, StoreFault
from dcpstore.testing.ranks import run_ranks

BLOCK = 4096
CONFIG = WriteConfig(checksum_block_bytes=BLOCK, inline_bytes=64)
STATE = {"w": torch.arange(3000.0), "step": 7}
FILES = {
    "rng-0.json": b'{"seed": 0}',
    "tokenizer/vocab.txt": bytes(range(256)) * 60,
    "empty": b"",
}
FACTS = Facts(100, "a" * 16, {"loss": 0.5, "worst": math.nan})
USER = {"tokens": 10**12}


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("attached") / "run"
    dcpstore.save(STATE, folder, config=CONFIG, attachments=FILES, facts=FACTS, user_metadata=USER)
    return folder


@pytest.fixture
def saved(golden: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(golden, tmp_path / "run"))


def place_of(folder: Path, name: str) -> tuple[Path, int]:
    with dcpstore.open_checkpoint(folder) as checkpoint:
        item = checkpoint.attached_items[name]
    return folder / item.key, item.payload.start


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# --- read ---------------------------------------------------------------------------------


def test_an_open_checkpoint_tells_all_that_was_sealed_with_it(golden: Path) -> None:
    with dcpstore.open_checkpoint(golden) as checkpoint:
        assert checkpoint.attachments == {name: len(data) for name, data in FILES.items()}
        for name, data in FILES.items():
            assert checkpoint.read_attachment(name) == data
            assert b"".join(checkpoint.attachment_pieces(name)) == data
        assert (checkpoint.step, checkpoint.facts.run) == (100, "a" * 16)
        assert repr(dict(checkpoint.metrics)) == "{'loss': 0.5, 'worst': nan}"
        assert checkpoint.user_metadata == USER
        assert not set(FILES) & set(checkpoint.keys)


def test_a_checkpoint_without_any_has_none(tmp_path: Path) -> None:
    dcpstore.save(STATE, tmp_path / "ours")
    with dcpstore.open_checkpoint(tmp_path / "ours") as checkpoint:
        assert checkpoint.attachments == checkpoint.metrics == checkpoint.user_metadata == {}
        assert checkpoint.step is None
    with pytest.raises(NotFoundError, match=r"no attachment 'a'; of attachments it has none"):
        dcpstore.read_attachment(tmp_path / "ours", "a")


def test_a_stock_checkpoint_has_none(tmp_path: Path) -> None:
    stock = Path(__file__).parents[1] / "compat" / "golden" / "torch-2.13.0"
    with dcpstore.open_checkpoint(stock) as checkpoint:
        assert checkpoint.attachments == checkpoint.metrics == checkpoint.user_metadata == {}
        assert checkpoint.step is None
    with pytest.raises(NotFoundError, match="no attachment"):
        dcpstore.read_attachment(stock, "a")


def test_a_name_that_is_not_there_is_told_with_those_that_are(golden: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no attachment 'rng\.json'.*rng-0\.json"):
        dcpstore.read_attachment(golden, "rng.json")


def test_no_torch_is_needed_to_read_one(golden: Path) -> None:
    script = (
        "import sys, dcpstore; data = dcpstore.read_attachment(*sys.argv[1:]);"
        "assert 'torch' not in sys.modules; print(len(data))"
    )
    command = [sys.executable, "-c", script, str(golden), "tokenizer/vocab.txt"]
    assert subprocess.check_output(command, text=True).strip() == "15360"


def test_a_large_one_is_read_in_several_verified_ranges(golden: Path) -> None:
    store = RecordingStore(open_store(golden))
    opener = {"store_opener": lambda *_, **__: store}
    config = ReadConfig(request_bytes=2 * BLOCK + 1, budget_bytes=1 << 20)
    name = "tokenizer/vocab.txt"
    assert dcpstore.read_attachment(golden, name, config=config, **opener) == FILES[name]
    assert store.counts == {"get": 1, "get_range": 2}


def test_bytes_that_are_not_those_that_were_saved_are_refused_unless_told(saved: Path) -> None:
    name = "tokenizer/vocab.txt"
    path, start = place_of(saved, name)
    flip(path, start + BLOCK + 5)
    with pytest.raises(CorruptError, match=r"attachment tokenizer/vocab\.txt") as caught:
        dcpstore.read_attachment(saved, name)
    span = (start + BLOCK, start + 2 * BLOCK)
    assert (caught.value.key, caught.value.start, caught.value.end) == (path.name, *span)
    unverified = dcpstore.read_attachment(saved, name, config=ReadConfig(verify=False))
    assert unverified != FILES[name]
    assert len(unverified) == len(FILES[name])


def test_a_range_that_was_damaged_on_the_way_is_fetched_again(
    golden: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = FaultyStore(open_store(golden), [StoreFault("flip", verb="get_range")])
    name, opener = "tokenizer/vocab.txt", {"store_opener": lambda *_, **__: store}
    assert dcpstore.read_attachment(golden, name, **opener) == FILES[name]
    assert "fetching it again" in caplog.text


# --- verify ---------------------------------------------------------------------------------


def test_a_sound_checkpoint_is_sound_and_every_byte_was_checked(golden: Path) -> None:
    found = verify_checkpoint(golden)
    assert found.is_sound
    assert found.num_attachments == 3
    stored = sum(path.stat().st_size for path in golden.glob("__*"))
    assert found.checked_bytes == stored
    assert "attachments           3" in found.summary()


@pytest.mark.parametrize("name", ["rng-0.json", "tokenizer/vocab.txt"])
def test_a_flipped_bit_is_found_wherever_it_is(saved: Path, name: str) -> None:
    path, start = place_of(saved, name)
    for at in (0, len(FILES[name]) // 2, len(FILES[name]) - 1):
        flip(path, start + at)
        (finding,) = verify_checkpoint(saved).findings
        assert (finding.kind, finding.fqn) == ("checksum", f"attachment {name}")
        assert finding.span is not None
        assert finding.span.start <= start + at < finding.span.end
        flip(path, start + at)
    assert verify_checkpoint(saved).is_sound


def test_a_lost_and_a_cut_object_tell_which_attachments_they_held(
    saved: Path, cli: Callable[..., Any]
) -> None:
    path, start = place_of(saved, "tokenizer/vocab.txt")
    whole = path.read_bytes()
    path.write_bytes(whole[: start + 5])
    found = verify_checkpoint(saved).findings
    assert {one.fqn for one in found} >= {"attachment tokenizer/vocab.txt"}
    path.unlink()
    code, out, _ = cli("verify", saved)
    assert code == 1
    assert "missing" in out


# --- show -----------------------------------------------------------------------------------


def test_show_lists_them(golden: Path, cli: Callable[..., Any]) -> None:
    code, out, _ = cli("show", golden)
    assert code == 0
    for line in (
        "tokenizer/vocab.txt     0  15.0 KiB",
        f"step 100, run {'a' * 16}, loss 0.5, worst nan",
        'user metadata {"tokens": 1000000000000}',
        "3 attachments with 15.0 KiB",
    ):
        assert line in out
    _, out, _ = cli("show", golden, "--shards", "--objects")
    path, start = place_of(golden, "rng-0.json")
    assert any(path.name in line and line.endswith(f"  {start}") for line in out.splitlines())
    _, out, _ = cli("show", golden, "--json")
    shown = json.loads(out, parse_constant=pytest.fail)
    assert shown["step"] == 100
    assert shown["metrics"] == {"loss": 0.5, "worst": "nan"}
    assert shown["user_metadata"] == USER
    assert [(one["name"], one["num_bytes"], one["rank"]) for one in shown["attachments"]] == [
        ("empty", 0, 0),
        ("rng-0.json", 11, 0),
        ("tokenizer/vocab.txt", 15360, 0),
    ]
    (held,) = shown["objects"]
    assert (held["num_items"], held["stored_bytes"]) == (5, held["num_bytes"])


def test_show_is_short_with_long_metadata(tmp_path: Path, cli: Callable[..., Any]) -> None:
    dcpstore.save(STATE, tmp_path, user_metadata={"a": "x" * 5000})
    _, out, _ = cli("show", tmp_path)
    assert max(map(len, out.splitlines())) < 500
    assert "--json shows all" in out


# --- copies ---------------------------------------------------------------------------------


def assert_carried(folder: Path | str) -> None:
    assert verify_checkpoint(folder).is_sound
    with dcpstore.open_checkpoint(folder) as checkpoint:
        found = {name: checkpoint.read_attachment(name) for name in checkpoint.attachments}
        assert found == FILES
        assert repr(checkpoint.facts) == repr(FACTS)
        assert checkpoint.user_metadata == USER


@pytest.mark.parametrize(
    "options",
    [{}, {"verify": False}, {"reencode": True}, {"dtype": torch.bfloat16}, {"keys": ["w"]}],
    ids=str,
)
def test_a_copy_carries_them(golden: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    result = dcp_to_dcp(golden, tmp_path / "there", **options)
    assert_carried(tmp_path / "there")
    assert sum(result.objects.values()) > 15360


@pytest.mark.parametrize("options", [{}, {"object_bytes": 8192}], ids=str)
def test_ranks_that_copy_together_carry_them_once(golden: Path, options: dict[str, Any]) -> None:
    url = f"memory://attachments/copied-{len(options)}"

    def work(group: Any) -> Any:
        return dcp_to_dcp(golden, url, process_group=group, **options)

    run_ranks(3, work, deadline_s=60).values()
    assert_carried(url)


def test_a_copy_of_a_damaged_one_seals_nothing(saved: Path, tmp_path: Path) -> None:
    path, start = place_of(saved, "tokenizer/vocab.txt")
    flip(path, start + 7)
    for number, options in enumerate(({}, {"reencode": True})):
        with pytest.raises(CorruptError):
            dcp_to_dcp(saved, tmp_path / f"there-{number}", **options)
        assert not [one for one in tmp_path.glob(f"there-{number}/**/*") if one.is_file()]


def test_forms_without_attachments_convert_as_ever(golden: Path, tmp_path: Path) -> None:
    dcp_to_torch_save(golden, tmp_path / "a.pt")
    torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "back")
    with dcpstore.open_checkpoint(tmp_path / "back") as checkpoint:
        assert checkpoint.attachments == {}
        assert torch.equal(checkpoint.read_tensor("w"), STATE["w"])


# --- diff -----------------------------------------------------------------------------------


def save_like(folder: Path, files: dict[str, bytes], **config: Any) -> Path:
    dcpstore.save(STATE, folder, attachments=files, config=WriteConfig(**config))
    return folder


@pytest.mark.parametrize("read_all", [False, True])
@pytest.mark.parametrize("block_bytes", [BLOCK, 8192])
def test_diff_tells_how_they_differ(
    golden: Path, tmp_path: Path, block_bytes: int, read_all: bool
) -> None:
    changed = bytearray(FILES["tokenizer/vocab.txt"])
    changed[-1] ^= 1
    files = {"tokenizer/vocab.txt": bytes(changed), "rng-0.json": FILES["rng-0.json"], "new": b"1"}
    other = save_like(tmp_path / "other", files, checksum_block_bytes=block_bytes)
    found = compare_checkpoints(golden, other, read_all=read_all)
    assert [(one.kind, one.fqn) for one in found.differences] == [
        ("only left", "attachment empty"),
        ("value", "attachment tokenizer/vocab.txt"),
        ("only right", "attachment new"),
    ]
    names = compare_checkpoints(golden, other, values=False).differences
    assert [one.kind for one in names] == ["only left", "only right"]


def test_diff_leaves_out_what_it_was_told_to(golden: Path, cli: Callable[..., Any]) -> None:
    here = golden.parent / "without"
    dcpstore.save(STATE, here, overwrite=True)
    assert cli("diff", golden, here)[0] == 1
    assert cli("diff", golden, here, "--exclude", "attachment *")[0] == 0
    assert cli("diff", golden, here, "--keys", "w")[0] == 0
    code, out, _ = cli("diff", golden, here, "--keys", "attachment rng*", "--json")
    assert code == 1
    assert [one["fqn"] for one in json.loads(out)["differences"]] == ["attachment rng-0.json"]


# --- deleting -------------------------------------------------------------------------------


def test_prune_knows_what_a_checkpoint_refers_to_and_what_a_dead_save_left(tmp_path: Path) -> None:
    def work(group: Any) -> Any:
        given = {"a-{rank}": b"%d" % group.rank * 5000, "same": b"x" * 5000}
        state = STATE if group.rank == 0 else {}
        return dcpstore.save(state, tmp_path, process_group=group, attachments=given)

    run_ranks(3, work, deadline_s=60).values()
    found = verify_checkpoint(tmp_path)
    assert found.is_sound
    # Two ranks' bytes of the name that three gave.
    assert found.notes == ("not checked: 9.8 KiB that no item refers to",)
    with Place(tmp_path) as place:
        assert not find_leftovers(place, Rules(older_than_s=0)).removable
    (tmp_path / ".metadata").unlink()
    with Place(tmp_path) as place:
        found = find_leftovers(place, Rules(older_than_s=0)).removable
    assert {one.key for one in found} == {path.name for path in tmp_path.iterdir()}
    assert len(found) == 3


def test_an_overwrite_sweeps_the_attachments_of_the_old_one(tmp_path: Path) -> None:
    config = WriteConfig(object_bytes=4096)
    dcpstore.save(STATE, tmp_path, config=config, attachments=FILES)
    before = {path.name for path in tmp_path.glob("__*")}
    assert len(before) > 1
    dcpstore.save(STATE, tmp_path, config=config, overwrite=True, attachments={"new": b"1"})
    assert not before & {path.name for path in tmp_path.iterdir()}
    assert verify_checkpoint(tmp_path).leftovers == ()
