"""Checkpoints are copied between stores, as they are or written anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from compat_states import QUIET, CtrlC, assert_same, blank, full_state, load, pattern, save

import dcpstore
from dcpstore import AlreadyExistsError, ConfigError, CorruptError, NotFoundError, RankFailures
from dcpstore.convert import dcp_to_dcp
from dcpstore.convert.dcp.copy import (
    CopyTask,
    MirrorOfOurs,
    MirrorOfStock,
    ObjectCheck,
    Transfer,
    _share_out,
    mirror,
    pass_ranges,
)
from dcpstore.convert.dcp.source import own_run
from dcpstore.convert.output import share_budget
from dcpstore.format.manifest import decode
from dcpstore.format.seal import METADATA_KEY
from dcpstore.ranks import SingleGroup
from dcpstore.report import Meter
from dcpstore.store import Store, open_store
from dcpstore.store.base import ByteRange
from dcpstore.testing import FaultyStore, RecordingStore, StoreFault
from dcpstore.testing.ranks import run_ranks

pytestmark = [
    *QUIET,
    # gcsfs hands aiohttp a whole part at once.
    pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning"),
]

MIB = 1 << 20


def objects(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.fixture
def state():
    return full_state(large_elements=3 * MIB)


@pytest.fixture
def places(tmp_path, s3_server, gcs_server):
    """A folder of the test's own on each kind of store, and the options that reach it."""
    s3_server.create_bucket("copies")
    return {
        "s3": (f"s3://copies/{tmp_path.name}", s3_server.storage_options()),
        "gs": (f"gs://contract/{tmp_path.name}", gcs_server.storage_options()),
        "file": (str(tmp_path / "there"), None),
    }


@pytest.mark.parametrize(("here", "there"), [("s3", "gs"), ("gs", "file"), ("file", "s3")])
def test_a_checkpoint_moves_from_provider_to_provider(places, state, here, there) -> None:
    (source, from_options), (target, to_options) = places[here], places[there]
    save(state, f"{source}/a", from_options)
    result = dcp_to_dcp(
        f"{source}/a", f"{target}/b", source_options=from_options, target_options=to_options
    )
    assert_same(load(state, f"{target}/b", to_options), state)
    before = open_store(f"{source}/a", storage_options=from_options)
    sizes = {one.size_bytes for one in before.list() if one.key.endswith(".distcp")}
    before.close()
    assert set(result.objects.values()) == sizes


def test_a_copy_has_the_same_bytes_under_names_of_its_own(tmp_path, state) -> None:
    save(state, tmp_path / "a")
    dcp_to_dcp(tmp_path / "a", tmp_path / "b")
    before, after = objects(tmp_path / "a"), objects(tmp_path / "b")
    assert before.keys() & after.keys() == {METADATA_KEY}
    data = [sorted(v for k, v in one.items() if k.endswith("distcp")) for one in (before, after)]
    assert data[0] == data[1]
    assert_same(load(state, tmp_path / "b"), state)
    stock = blank(state)
    dcp.load(stock, checkpoint_id=tmp_path / "b", no_dist=True)
    assert_same(stock, state)


def test_a_stock_checkpoint_is_copied_name_by_name(tmp_path, state) -> None:
    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    result = dcp_to_dcp(tmp_path / "a", tmp_path / "b")
    assert objects(tmp_path / "a") == objects(tmp_path / "b")
    assert set(result.objects) | {METADATA_KEY} == set(objects(tmp_path / "a"))


def save_by(writer: str, state: dict[str, Any], folder: Path) -> None:
    if writer == "ours":
        save(state, folder)
    else:
        dcp.save(state, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_a_checkpoint_written_anew_is_ours_and_the_same(tmp_path, state, writer) -> None:
    save_by(writer, state, tmp_path / "a")
    result = dcp_to_dcp(
        tmp_path / "a", tmp_path / "b", reencode=True, object_bytes=2 * MIB, budget_bytes=32 * MIB
    )
    assert len(result.objects) >= 5
    assert_same(load(state, tmp_path / "b"), state)
    with (
        dcpstore.open_checkpoint(tmp_path / "a") as one,
        dcpstore.open_checkpoint(tmp_path / "b") as other,
    ):
        assert one.metadata.planner_data == other.metadata.planner_data
        manifest = decode(other.discovered.manifest)
        assert all(item.checksums is not None for item in manifest.items.values())
    stock = blank(state)
    dcp.load(stock, checkpoint_id=tmp_path / "b", no_dist=True)
    assert_same(stock, state)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_tensors_that_are_more_than_their_elements_are_written_anew(tmp_path) -> None:
    quantized = torch.quantize_per_tensor(torch.randn(40), 0.1, 3, torch.qint8)
    save({"q": quantized, "t": torch.ones(3)}, tmp_path / "a")
    dcp_to_dcp(tmp_path / "a", tmp_path / "b", reencode=True, dtype=torch.float64)
    with dcpstore.open_checkpoint(tmp_path / "b") as checkpoint:
        found = checkpoint.read_tensor("q")
        assert checkpoint.read_tensor("t").dtype == torch.float64
    assert found.q_zero_point() == 3
    assert torch.equal(found.int_repr(), quantized.int_repr())


def test_keys_are_chosen_renamed_and_cast(tmp_path) -> None:
    model = {"a": torch.randn(40, 3), "b": torch.arange(5)}
    save({"model": model, "optim": {"m": torch.randn(3)}, "step": 3}, tmp_path / "a")
    result = dcp_to_dcp(
        tmp_path / "a",
        tmp_path / "b",
        exclude=["optim.*"],
        rename={"model.": "net."},
        dtype=torch.float16,
    )
    expected = {"net": {"a": model["a"].half(), "b": model["b"]}, "step": 3}
    assert_same(load(expected, tmp_path / "b"), expected)
    assert (result.num_tensors, result.num_values) == (2, 1)
    assert result.cast == {"model.a": ("float32", "float16")}


def test_a_checkpoint_that_exists_is_kept_unless_it_may_be_replaced(tmp_path, state) -> None:
    save({"old": torch.ones(3)}, tmp_path / "b")
    before = objects(tmp_path / "b")
    save(state, tmp_path / "a")
    for more in ({}, {"reencode": True}):
        with pytest.raises(AlreadyExistsError, match="overwrite"):
            dcp_to_dcp(tmp_path / "a", tmp_path / "b", **more)
    dcp.save(state, checkpoint_id=tmp_path / "s", no_dist=True)
    for overwrite in (False, True):
        with pytest.raises(AlreadyExistsError, match="reencode=True"):
            dcp_to_dcp(tmp_path / "s", tmp_path / "b", overwrite=overwrite)
    assert objects(tmp_path / "b") == before
    dcp_to_dcp(tmp_path / "a", tmp_path / "b", overwrite=True)
    assert_same(load(state, tmp_path / "b"), state)
    assert not objects(tmp_path / "b").keys() & (before.keys() - {METADATA_KEY})


def test_a_checkpoint_may_be_copied_onto_itself(tmp_path, state) -> None:
    save(state, tmp_path / "a")
    dcp_to_dcp(tmp_path / "a", tmp_path / "a", overwrite=True)
    assert_same(load(state, tmp_path / "a"), state)


@pytest.mark.parametrize("reencode", [False, True])
def test_ctrl_c_leaves_no_checkpoint_no_object_and_no_upload(s3_server, tmp_path, reencode) -> None:
    save({"w": pattern(torch.float32, (4000, 1000), seed=1)}, tmp_path / "a")
    client = s3_server.create_bucket(f"copy-stopped-{int(reencode)}")
    with pytest.raises(KeyboardInterrupt):
        dcp_to_dcp(
            tmp_path / "a",
            f"s3://copy-stopped-{int(reencode)}/b",
            reencode=reencode,
            target_options=s3_server.storage_options(),
            budget_bytes=32 * MIB,
            progress=CtrlC(),
        )
    assert client.keys() == []
    assert client.open_uploads() == []


@pytest.mark.parametrize("reencode", [False, True])
def test_a_damaged_source_is_named_and_nothing_is_sealed(tmp_path, state, reencode) -> None:
    save(state, tmp_path / "a")
    (data,) = (tmp_path / "a").glob("*.distcp")
    flip(data, data.stat().st_size // 2)
    with pytest.raises(CorruptError, match=data.name):
        dcp_to_dcp(tmp_path / "a", tmp_path / "b", reencode=reencode)
    assert not (tmp_path / "b").exists() or objects(tmp_path / "b") == {}


def test_a_cut_source_is_named_and_nothing_is_sealed(tmp_path, state) -> None:
    save(state, tmp_path / "a")
    (data,) = (tmp_path / "a").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-10])
    with pytest.raises(CorruptError, match=data.name):
        dcp_to_dcp(tmp_path / "a", tmp_path / "b")
    data.unlink()
    with pytest.raises(NotFoundError):
        dcp_to_dcp(tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "b").exists() or objects(tmp_path / "b") == {}


def copy_by(how: Any, checkpoint: dcpstore.Checkpoint, target: Store, *, verify: bool) -> None:
    shares = share_budget(32 * MIB)
    transfer = Transfer(checkpoint.store, target, shares, Meter("copy"), False, verify)
    mirror(SingleGroup(10), how, transfer)


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_a_copy_that_reads_back_differently_is_not_sealed(tmp_path, state, writer) -> None:
    save_by(writer, state, tmp_path / "a")
    inner = open_store(tmp_path / "b")
    target = FaultyStore(inner, [StoreFault("flip", "get_range", bit=99_999)])

    def copy(*, verify: bool) -> None:
        with dcpstore.open_checkpoint(tmp_path / "a") as checkpoint:
            how = MirrorOfStock(checkpoint, target)
            if writer == "ours":
                how = MirrorOfOurs(checkpoint, dcpstore.ObjectStoreWriter(tmp_path / "b"))
            copy_by(how, checkpoint, target, verify=verify)

    with pytest.raises(RankFailures, match="distcp"):
        copy(verify=True)
    assert list(inner.list()) == []
    copy(verify=False)
    assert_same(load(state, tmp_path / "b"), state)


def test_a_copy_whose_seal_was_not_answered_deletes_nothing(tmp_path, state) -> None:
    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    inner = open_store(tmp_path / "b")
    script = [
        StoreFault("lost_ack", "put", ".metadata"),
        StoreFault("denied", "get", ".metadata", at=1, times=None),
    ]
    target = FaultyStore(inner, script)
    with (
        dcpstore.open_checkpoint(tmp_path / "a") as checkpoint,
        pytest.raises(RankFailures, match="No object was deleted"),
    ):
        copy_by(MirrorOfStock(checkpoint, target), checkpoint, target, verify=False)
    assert_same(load(state, tmp_path / "b"), state)


def test_safetensors_files_are_for_another_converter(tmp_path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="safetensors_to_dcp"):
        dcp_to_dcp(tmp_path, tmp_path / "b")


def test_ranks_share_the_objects(tmp_path, state) -> None:
    cut = dcpstore.SavePlanner(max_item_bytes=2 * MIB)
    config = dcpstore.WriteConfig(object_bytes=2 * MIB)
    save(state, tmp_path / "a", config=config, planner=cut)

    def convert(group):
        target = tmp_path / "b", tmp_path / "c"
        return (
            dcp_to_dcp(tmp_path / "a", target[0], process_group=group),
            dcp_to_dcp(tmp_path / "a", target[1], process_group=group, object_bytes=2 * MIB),
        )

    for one, other in run_ranks(3, convert, wait_s=60).values():
        assert len(one.objects) > 3
        assert {key.split("_")[2] for key in other.objects} == {"0", "1", "2"}
    assert_same(load(state, tmp_path / "b"), state)
    assert_same(load(state, tmp_path / "c"), state)


def test_a_rank_that_fails_leaves_nothing_of_any(tmp_path, state) -> None:
    cut = dcpstore.SavePlanner(max_item_bytes=2 * MIB)
    config = dcpstore.WriteConfig(object_bytes=2 * MIB)
    save(state, tmp_path / "a", config=config, planner=cut)
    last = max((tmp_path / "a").glob("*.distcp"))
    flip(last, last.stat().st_size // 2)

    def convert(group):
        dcp_to_dcp(tmp_path / "a", tmp_path / "b", process_group=group)

    run = run_ranks(2, convert, wait_s=60)
    assert len(run.errors) == 2
    assert all(last.name in str(error) for error in run.errors.values())
    assert objects(tmp_path / "b") == {}


# --- parts -------------------------------------------------------------------------------


def test_every_piece_of_work_is_one_ranks() -> None:
    for costs in ([], [0, 0, 0], [5], [1, 100, 1, 1, 50], list(range(40))):
        runs = [own_run(list(range(len(costs))), costs, rank, 4) for rank in range(4)]
        assert [one for run in runs for one in run] == list(range(len(costs)))
    loads = [sum(own_run(list(range(100)), [7] * 100, rank, 4)) for rank in range(4)]
    assert len(loads) == 4


def test_objects_are_shared_out_evenly_among_the_ranks_that_have_them() -> None:
    tasks = [CopyTask(f"from{n}", f"to{n}", size) for n, size in enumerate([5, 1, 8, 2, 7, 1])]
    both, none = list(range(6)), []
    shares = _share_out(tasks, [both, none, both, [0]])
    assert sorted(number for share in shares for number in share) == both
    assert shares[1] == none
    sizes = [sum(tasks[number].size_bytes for number in share) for share in shares]
    assert sizes == [10, 0, 9, 5]
    with pytest.raises(dcpstore.NotFoundError, match="from3 with all its 2 bytes"):
        _share_out(tasks, [[0, 1, 2], [4, 5]])


def test_ranges_are_fetched_ahead_within_the_budget() -> None:
    inner = RecordingStore(open_store("memory://pass-through"))
    sizes = [0, 1, 5 * MIB, 3, 9 * MIB]
    for number, size in enumerate(sizes):
        inner.put(f"k{number}", bytes([number]) * size)
    config = dcpstore.ReadConfig(budget_bytes=16 * MIB, request_bytes=2 * MIB)
    ranges = [(f"k{n}", ByteRange(0, size)) for n, size in enumerate(sizes)]
    with pass_ranges(inner, ranges, config) as pieces:
        found = b"".join(pieces)
    assert found == b"".join(bytes([n]) * size for n, size in enumerate(sizes))
    ranged = [one for one in inner.requests if one.verb == "get_range"]
    for begun in ranged:
        beside = [one for one in ranged if one.begin_s <= begun.begin_s < one.end_s]
        assert sum(one.num_bytes for one in beside) <= 8 * MIB
    assert max(one.num_bytes for one in ranged) <= 2 * MIB


@pytest.mark.parametrize("piece_bytes", [1 << 12, 100_000, 1 << 24])
def test_a_check_finds_a_wrong_block_wherever_pieces_end(tmp_path, piece_bytes) -> None:
    save(full_state(large_elements=MIB), tmp_path)
    (path,) = tmp_path.glob("*.distcp")
    with dcpstore.open_checkpoint(tmp_path) as checkpoint:
        items = [i for i in checkpoint.metadata.storage_data.values() if i.checksums is not None]
    content = path.read_bytes()

    def check(data: bytes) -> None:
        one = ObjectCheck("here", path.name, items)
        for at in range(0, len(data), piece_bytes):
            one.update(memoryview(data)[at : at + piece_bytes])

    check(content)
    large = max(items, key=lambda item: item.payload.num_bytes)
    for at in (large.payload.start, large.payload.end - 1, large.payload.start + 300_000):
        bad = bytearray(content)
        bad[at] ^= 8
        with pytest.raises(CorruptError) as caught:
            check(bytes(bad))
        assert caught.value.start <= at < caught.value.end
