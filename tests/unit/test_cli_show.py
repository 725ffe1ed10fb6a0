"""``dcpstore show``: choosing, ordering and adding up keys, and the page. No torch needed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dcpstore.audit.describe import (
    MAX_LANES,
    Described,
    Description,
    Shard,
    build_outline,
    collect,
    describe,
    render_plot,
    select,
    sort_entries,
    sum_up,
)
from dcpstore.config import ReadConfig
from dcpstore.format.manifest import DataObject, Entry, ItemId, Manifest, StoredItem, encode
from dcpstore.format.seal import data_key
from dcpstore.store import open_store
from dcpstore.store.base import ByteRange
from dcpstore.testing import RecordingStore
from dcpstore.write.commit import Sealer

SAVE = "0123456789abcdef"


def tensor(key: str, sizes: tuple[int, ...], *ranks: int, dtype: str = "float32") -> Described:
    """A tensor of which each rank holds an equal part of the first dimension."""
    rows = sizes[0] // len(ranks) if sizes else 1
    num_bytes = 4 * rows
    for size in sizes[1:]:
        num_bytes *= size
    shards = tuple(
        Shard(
            object_key=data_key(rank, 0, SAVE),
            start=100 * number,
            stored_bytes=num_bytes + 600,
            num_bytes=num_bytes,
            offsets=(rows * number, *(0 for _ in sizes[1:])) if sizes else (),
            sizes=(rows, *sizes[1:]) if sizes else (),
        )
        for number, rank in enumerate(ranks)
    )
    return Described(key, dtype, sizes, shards=shards)


def value(key: str) -> Described:
    shard = Shard(data_key(0, 0, SAVE), 0, 50, 50)
    return Described(key, "", (), shards=(shard,))


def described(*entries: Described) -> Description:
    return Description("s3://b/run/step-1", "dcpstore", entries, collect(entries), SAVE)


ENTRIES = (
    tensor("model.layers.10.w", (8, 4), 0, 1),
    tensor("model.layers.9.w", (4, 4), 0, dtype="int32"),
    tensor("model.norm", (2,), 1),
    value("step"),
)


def keys(entries: object) -> list[str]:
    return [entry.key for entry in entries]


def test_patterns_choose_keys_and_exclude_is_stronger() -> None:
    assert keys(select(ENTRIES)) == keys(ENTRIES)
    assert keys(select(ENTRIES, ["model.layers.*", "step"])) == [
        "model.layers.10.w",
        "model.layers.9.w",
        "step",
    ]
    assert keys(select(ENTRIES, ["model.*"], ["*.9.*", "*norm"])) == ["model.layers.10.w"]


@pytest.mark.parametrize(
    ("order", "first"),
    [
        ("key", ["model.layers.9.w", "model.layers.10.w", "model.norm", "step"]),
        ("bytes", ["model.layers.10.w", "model.layers.9.w", "step", "model.norm"]),
        ("shards", ["model.layers.10.w", "model.layers.9.w", "model.norm", "step"]),
        ("dtype", ["step", "model.layers.10.w", "model.norm", "model.layers.9.w"]),
        ("shape", ["step", "model.norm", "model.layers.9.w", "model.layers.10.w"]),
    ],
)
def test_keys_are_ordered_as_asked_and_by_name_where_that_leaves_a_choice(order, first) -> None:
    assert keys(sort_entries(ENTRIES, order)) == first
    assert keys(sort_entries(ENTRIES, order, is_reversed=True)) == first[::-1]


def test_totals_add_up_elements_bytes_and_dtypes() -> None:
    totals = sum_up(ENTRIES)
    assert (totals.num_tensors, totals.num_values, totals.num_shards) == (3, 1, 5)
    assert totals.num_elements == 32 + 16 + 2
    assert totals.num_bytes == 4 * (32 + 16 + 2) + 50
    assert totals.stored_bytes == 4 * (32 + 16 + 2) + 4 * 600 + 50
    assert totals.num_bytes_by_dtype == {"float32": 136, "int32": 64}


def test_an_outline_joins_prefixes_that_do_not_fork() -> None:
    root = build_outline(ENTRIES)
    (model,) = root.branches
    (layers,) = model.branches
    assert [one.name for one in layers.branches] == ["9", "10"]
    assert keys(model.entries) == ["model.norm"]
    assert keys(root.entries) == ["step"]
    joined = build_outline([tensor("a.b.c.x", (2,), 0), tensor("a.b.c.y", (2,), 0)])
    assert [(one.name, one.prefix) for one in joined.branches] == [("a.b.c", "a.b.c")]


def test_every_branch_adds_up_what_lies_below_it() -> None:
    def check(branch) -> list[str]:
        below = [key for one in branch.branches for key in check(one)] + keys(branch.entries)
        chosen = [entry for entry in ENTRIES if entry.key in below]
        assert branch.totals == sum_up(chosen)
        assert all(key.startswith(branch.prefix) for key in below)
        return below

    assert sorted(check(build_outline(ENTRIES))) == sorted(keys(ENTRIES))


# --- a checkpoint of ours, by its manifest alone ------------------------------------------


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A checkpoint with metadata and no data: two shards, a scalar, a value, an extra item."""
    objects = [data_key(0, 0, SAVE), data_key(1, 0, SAVE)]
    properties = json.dumps(
        {
            "dtype": "bfloat16",
            "layout": "strided",
            "memory_format": "contiguous_format",
            "requires_grad": False,
            "pin_memory": False,
        }
    )

    def item(rank: int, start: int, length: int, kind: str = "raw", sizes=()) -> StoredItem:
        record = ByteRange(start, start + length)
        return StoredItem(objects[rank], record, kind, record, "bfloat16", sizes)

    manifest = Manifest(
        save_id=SAVE,
        entries=(
            Entry("model.w", properties, (6, 4)),
            Entry("model.scale", properties, ()),
            Entry("step", None),
            Entry("planner.note", None, in_state_dict=False),
        ),
        items={
            ItemId("model.w", (0, 0)): item(0, 0, 32, sizes=(4, 4)),
            ItemId("model.w", (4, 0)): item(1, 0, 16, sizes=(2, 4)),
            ItemId("model.scale", ()): item(0, 64, 2),
            ItemId("step", None): item(0, 128, 40, "bytes"),
            ItemId("planner.note", None): item(1, 64, 30, "bytes"),
        },
        objects=(DataObject(objects[0], 168), DataObject(objects[1], 94)),
        info={"torch": "2.9.1"},
    )
    store = open_store(tmp_path / "step-1")
    Sealer(store, ".metadata", None).put_sealed(SAVE, b"no pickle", encode(manifest))
    return tmp_path / "step-1"


def test_the_document_tells_shapes_bytes_shards_and_objects(cli, ours: Path) -> None:
    code, out, err = cli("show", ours, "--json", "--shards")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert document["schema"] == "dcpstore.show/1"
    assert (document["layout"], document["save_id"]) == ("dcpstore", SAVE)
    assert document["info"] == {"torch": "2.9.1"}
    entries = {entry["key"]: entry for entry in document["entries"]}
    weight = entries["model.w"]
    assert (weight["kind"], weight["dtype"], weight["shape"]) == ("tensor", "bfloat16", [6, 4])
    assert (weight["num_shards"], weight["num_bytes"]) == (2, 48)
    assert weight["shards"][1] == {
        "offsets": [4, 0],
        "sizes": [2, 4],
        "rank": 1,
        "object": data_key(1, 0, SAVE),
        "start": 0,
        "stored_bytes": 16,
    }
    assert entries["model.scale"]["shape"] == []
    assert (entries["step"]["kind"], entries["step"]["num_bytes"]) == ("value", 40)
    assert entries["planner.note"]["in_state_dict"] is False
    assert [(one["rank"], one["num_items"], one["num_bytes"]) for one in document["objects"]] == [
        (0, 3, 168),
        (1, 2, 94),
    ]
    assert document["totals"]["num_bytes_by_dtype"] == {"bfloat16": 50}


def test_metadata_are_all_that_is_read(ours: Path) -> None:
    store = RecordingStore(open_store(ours))
    describe(store, ReadConfig())
    assert store.counts == {"get": 1}


def test_people_see_a_table_and_sums(cli, ours: Path) -> None:
    lines = cli("show", ours)[1].splitlines()
    assert lines[0] == f"file://{ours}  dcpstore  save {SAVE}  torch 2.9.1"
    assert lines[2].split() == ["KEY", "DTYPE", "SHAPE", "SHARDS", "BYTES"]
    assert lines[4].split() == ["model.w", "bfloat16", "[6,", "4]", "2", "48", "B"]
    assert lines[-3:] == [
        "2 tensors with 25 elements, 2 values: 120 B in 5 shards",
        "bfloat16 50 B",
        "2 objects by 2 ranks with 120 B",
    ]


def test_a_tree_stops_at_its_depth(cli, ours: Path) -> None:
    out = cli("show", ours, "--tree", "--depth", "1")[1]
    assert re.search(r"^model\. +3 +50 B +2 keys$", out, re.MULTILINE)
    assert "scale" not in out
    full = cli("show", ours, "--tree")[1]
    assert re.search(r"^  w +2 +48 B +bfloat16 \[6, 4\]$", full, re.MULTILINE)
    tree = json.loads(cli("show", ours, "--tree", "--depth", "1", "--json")[1])["tree"]
    assert [one["prefix"] for one in tree["branches"]] == ["model", "planner"]
    assert "keys" not in tree["branches"][0]


def test_shards_and_objects_have_tables_of_their_own(cli, ours: Path) -> None:
    out = cli("show", ours, "--shards", "--objects", "--keys", "model.w")[1]
    assert re.search(
        rf"^model\.w +\[4, 0\] +\[2, 4\] +1 +{data_key(1, 0, SAVE)}", out, re.MULTILINE
    )
    assert re.search(rf"^{data_key(0, 0, SAVE)} +0 +3 +74 B +168 B$", out, re.MULTILINE)


def test_a_choice_is_named_beside_the_whole(cli, ours: Path) -> None:
    out = cli("show", ours, "--exclude", "model.*")[1]
    assert "(shown: 2 of 4 keys)" in out
    assert (
        cli("show", ours, "--sort", "bytes", "--limit", "1")[1]
        .splitlines()[3]
        .startswith("model.w ")
    )


def test_a_choice_of_nothing_is_not_found(cli, ours: Path) -> None:
    code, out, err = cli("show", ours, "--keys", "nothing.*")
    assert (code, out) == (3, "")
    assert "none of the 4 keys" in err


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", f".dcpstore-{SAVE}"])
def test_the_url_of_an_object_leads_to_that_of_the_folder(cli, name: str) -> None:
    code, _, err = cli("show", f"memory://run/step-1/{name}")
    assert code == 2
    assert err.endswith("write memory://run/step-1\n")


# --- the page -----------------------------------------------------------------------------


def data_of(page: str) -> dict:
    (text,) = re.findall(r"^const DATA = (.*);$", page, re.MULTILINE)
    return json.loads(text)


def test_a_page_holds_every_key_and_the_bytes_of_every_rank() -> None:
    data = data_of(render_plot(described(*ENTRIES), ENTRIES))
    assert (data["unit"], data["lanes"]) == ("rank", ["0", "1"])
    assert [row[0] for row in data["rows"]] == keys(ENTRIES)
    assert data["rows"][0][3:] == [128, 2, [0, 64, 1, 64]]
    assert data["rows"][3][2:] == ["-", 50, 1, [0, 50]]
    assert [one[1:] for one in data["objects"]] == [[0, 3, 64 + 600 + 664 + 50], [1, 2, 664 + 608]]


def test_a_page_reaches_for_nothing_outside_itself() -> None:
    page = render_plot(described(*ENTRIES), ENTRIES)
    assert "default-src 'none'" in page
    assert not re.findall(r"(?:src|href)\s*=|https?://|url\(|@import|fetch\(|XMLHttp", page)


def test_a_key_cannot_break_out_of_the_page() -> None:
    evil = "</script><script>alert(1)</script><!--"
    page = render_plot(described(tensor(evil, (2,), 0)), [tensor(evil, (2,), 0)])
    assert evil not in page
    assert page.count("</script>") == 1
    assert data_of(page)["rows"][0][0] == evil


def test_without_ranks_in_the_names_the_lanes_are_objects() -> None:
    shard = Shard("model-00001-of-00002.safetensors", 8, 40, 40, (0,), (10,))
    entry = Described("w", "float32", (10,), shards=(shard,))
    data = data_of(render_plot(described(entry), [entry]))
    assert (data["unit"], data["lanes"]) == ("object", [shard.object_key])


def test_many_ranks_are_joined_and_no_byte_is_lost() -> None:
    ranks = range(300)
    entry = tensor("w", (600,), *ranks)
    data = data_of(render_plot(described(entry), [entry]))
    cells = data["rows"][0][5]
    assert len(data["lanes"]) <= MAX_LANES
    assert (data["lanes"][0], data["lanes"][-1]) == ("0 to 2", "297 to 299")
    assert sum(cells[1::2]) == 2400


def test_the_page_is_written_whole_or_not_at_all(cli, ours: Path, tmp_path: Path) -> None:
    page = tmp_path / "spread.html"
    code, _, err = cli("show", ours, "--plot", page)
    assert code == 0
    assert err == f"wrote {page}\n"
    assert data_of(page.read_text())["num_keys"] == 4
    code, out, err = cli("show", ours, "--plot", tmp_path / "nowhere" / "spread.html")
    assert (code, out) == (5, "")
    assert "No such file" in err
    (tmp_path / "a-folder").mkdir()
    assert cli("show", ours, "--plot", tmp_path / "a-folder")[0] == 5
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a-folder", "spread.html", "step-1"]
