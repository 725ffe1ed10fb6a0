"""``dcpstore ls``: which checkpoints lie below a URL, told by one LIST."""

from __future__ import annotations

import json
import os
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from dcpstore.audit.listing import list_checkpoints
from dcpstore.cli.output import format_age, table
from dcpstore.errors import StoreError
from dcpstore.format.seal import data_key, manifest_key
from dcpstore.store import open_store
from dcpstore.testing import FaultyStore, RecordingStore, StoreFault
from dcpstore.write.commit import Sealer

SAVE = "0123456789abcdef"


def put(folder: Path, *names: str, size: int = 10) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a checkpoint of every kind."""
    ours = (data_key(0, 0, SAVE), data_key(1, 0, "f" * 16), manifest_key(SAVE), ".metadata")
    put(tmp_path, *(f"step-9/{name}" for name in ours))
    put(tmp_path, "step-10/__0_0.distcp", "step-10/.metadata")
    put(tmp_path, f"step-11/{data_key(0, 0, SAVE)}")
    put(tmp_path, "step-12/__0_0.distcp", "step-12/__1_0.distcp")
    put(tmp_path, "step-13/__0.metadata", "step-13/__1.metadata", "step-13/__0_0.distcp")
    put(tmp_path, "step-14/.metadata", size=0)
    put(tmp_path, "export/model-00001-of-00002.safetensors", "export/config.json")
    put(tmp_path, "export/tokenizer/vocab.txt", "train.log", "logs/step-5/events")
    return tmp_path


def listed(cli, url: object) -> dict[str, dict]:
    code, out, err = cli("ls", url, "--json")
    assert (code, err) == (0, "")
    return {one["name"]: one for one in json.loads(out)["checkpoints"]}


def test_checkpoints_of_every_kind_are_told_apart_by_their_names(cli, run: Path) -> None:
    found = listed(cli, run)
    assert {name: (one["layout"], one["sealed"], one["step"]) for name, one in found.items()} == {
        "export": ("safetensors", None, None),
        "step-9": ("dcpstore", True, 9),
        "step-10": ("dcp", True, 10),
        "step-11": ("dcpstore", False, 11),
        "step-12": ("dcp", False, 12),
        "step-13": ("dcp", True, 13),
        "step-14": ("dcp", False, 14),
    }


def test_steps_come_in_the_order_of_their_numbers(cli, run: Path) -> None:
    assert list(listed(cli, run)) == ["export", *(f"step-{step}" for step in range(9, 15))]


def test_sizes_and_counts_are_those_of_all_objects_below_a_checkpoint(cli, run: Path) -> None:
    found = listed(cli, run)
    assert (found["step-9"]["num_objects"], found["step-9"]["num_bytes"]) == (4, 40)
    assert (found["export"]["num_objects"], found["export"]["num_bytes"]) == (3, 30)


def test_what_is_odd_is_remarked(cli, run: Path) -> None:
    found = listed(cli, run)
    assert found["step-13"]["remark"] == "sealed by 2 ranks, each for itself"
    assert found["step-14"]["remark"] == "its .metadata is empty"
    assert found["step-9"]["remark"] == ""


def test_objects_of_no_checkpoint_are_counted(cli, run: Path) -> None:
    document = json.loads(cli("ls", run, "--json")[1])
    assert document["num_other_objects"] == 2
    assert document["schema"] == "dcpstore.ls/1"


def test_the_urls_listed_can_be_listed_again(cli, run: Path) -> None:
    for name, one in listed(cli, run).items():
        again = listed(cli, one["url"])
        assert list(again) == [""]
        assert again[""]["url"] == one["url"]
        assert again[""]["step"] == one["step"], name


def test_the_age_is_that_of_the_seal(cli, run: Path) -> None:
    old = 1_700_000_000
    os.utime(run / "step-9" / ".metadata", (old, old))
    one = listed(cli, run)["step-9"]
    assert one["modified"] == "2023-11-14T22:13:20Z"
    assert one["age_s"] > 10_000_000


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-100/pytorch_model_fsdp_0", 100),
        ("2024/epoch-3", 3),
        ("run-7/final", 7),
        ("epoch=1-step=100-v2.ckpt", 100),
    ],
)
def test_the_step_is_that_of_the_folder_named_for_one(cli, tmp_path: Path, name, step) -> None:
    put(tmp_path, f"{name}/.metadata")
    assert listed(cli, tmp_path)[name]["step"] == step


def test_people_see_an_aligned_table_and_a_sum_on_standard_error(cli, run: Path) -> None:
    code, out, err = cli("ls", run)
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split() == ["CHECKPOINT", "LAYOUT", "SEALED", "SIZE", "OBJECTS", "AGE"]
    assert lines[2].split()[:6] == ["step-9", "dcpstore", "yes", "40", "B", "4"]
    assert err == f"7 checkpoints at file://{run}, 3 not sealed; 2 other objects\n"


def test_quiet_leaves_the_sum_out(cli, run: Path) -> None:
    assert cli("ls", run, "--quiet")[2] == ""


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((), "nothing lies at"),
        (("notes.txt", "logs/a", "logs/b"), "2 more belong to none"),
    ],
)
def test_no_checkpoint_is_not_found(cli, tmp_path: Path, names, words: str) -> None:
    put(tmp_path, *names)
    code, out, err = cli("ls", tmp_path)
    assert (code, out) == (3, "")
    assert words in err


def test_a_folder_that_does_not_exist_is_not_found(cli, tmp_path: Path) -> None:
    code, _, err = cli("ls", tmp_path / "nowhere")
    assert code == 3
    assert "nothing lies at" in err


def test_one_listing_is_all_that_is_asked(run: Path) -> None:
    store = RecordingStore(open_store(run))
    list_checkpoints(store)
    assert store.counts == {"list": 1}


# --- a store that refuses -----------------------------------------------------------------


def refusing(url: Path, *verbs: str) -> FaultyStore:
    script = [StoreFault("denied", verb, times=None) for verb in verbs]
    return FaultyStore(open_store(url), script)


def test_without_the_right_to_list_one_checkpoint_can_still_be_looked_at(tmp_path: Path) -> None:
    Sealer(open_store(tmp_path), ".metadata", None).put_sealed(SAVE, b"pickle", b"manifest")
    listing = list_checkpoints(refusing(tmp_path, "list"))
    (one,) = listing.checkpoints
    assert listing.was_refused
    assert (one.name, one.layout, one.sealed, one.num_bytes) == ("", "dcpstore", True, None)
    assert one.remark == "the store refused to list"


def test_without_the_right_to_list_a_run_is_refused_with_what_to_do(tmp_path: Path) -> None:
    put(tmp_path, "step-1/.metadata")
    with pytest.raises(StoreError, match="Without it, give the URL of one checkpoint") as caught:
        list_checkpoints(refusing(tmp_path, "list"))
    assert caught.value.denied


def test_a_store_that_refuses_everything_is_denied_and_not_empty(tmp_path: Path) -> None:
    put(tmp_path, ".metadata")
    with pytest.raises(StoreError, match="permission to list") as caught:
        list_checkpoints(refusing(tmp_path, "list", "get"))
    assert caught.value.denied


def test_a_store_that_fails_is_not_taken_for_one_that_refuses(tmp_path: Path) -> None:
    store = FaultyStore(open_store(tmp_path), [StoreFault("error", "list", times=None)])
    with pytest.raises(StoreError) as caught:
        list_checkpoints(store)
    assert not caught.value.denied


# --- how it prints ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("age", "text"),
    [
        (timedelta(days=800), "2 y"),
        (timedelta(days=3, hours=23), "3 d"),
        (timedelta(minutes=59), "59 min"),
        (timedelta(seconds=-5), "now"),
        (None, "-"),
    ],
)
def test_ages_are_whole_numbers_of_the_largest_unit(age: timedelta | None, text: str) -> None:
    now = datetime(2026, 1, 1, tzinfo=timezone.utc)
    assert format_age(None if age is None else now - age, now) == text


def test_columns_are_as_wide_as_their_widest_cell_and_lines_end_with_it() -> None:
    assert list(table(("A", "B", "C"), [("x", "10", ""), ("long", "9", "y")], right=(1,))) == [
        "A      B  C",
        "x     10",
        "long   9  y",
    ]
