"""`verify_checkpoint`: what it finds, and that it finds nothing where nothing is."""

from __future__ import annotations

import shutil
import zipfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard

import dcpstore
from dcpstore import NotFoundError, ReadConfig, StoreError, WriteConfig
from dcpstore.audit.scan import Finding, in_order
from dcpstore.audit.verify import Verification, verify_checkpoint
from dcpstore.format.manifest import decode
from dcpstore.format.seal import read_seal
from dcpstore.format.zip import append_crc32
from dcpstore.read.discovery import discover
from dcpstore.store import open_store
from dcpstore.store.base import ByteRange
from dcpstore.testing import FaultyStore, RecordingStore, StoreFault
from faults.ranks import save_alone

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")]

GOLDEN = Path(__file__).parents[1] / "compat" / "golden"
MIB = 1 << 20
BLOCK = 4096
SMALL = WriteConfig(checksum_block_bytes=BLOCK, object_bytes=64 << 10, inline_bytes=64)


def state() -> dict[str, Any]:
    noise = torch.Generator().manual_seed(7)
    return {
        "large": torch.randn(50, 1000, generator=noise),
        "half": torch.randn(33, 3, generator=noise).bfloat16(),
        "step": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "args": {"name": "run", "lr": 0.5},
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Checkpoints of each kind; tests damage copies."""
    root = tmp_path_factory.mktemp("saved")
    dcpstore.save(state(), root / "ours", config=SMALL)
    dcpstore.save(state(), root / "ours-apart", config=replace(SMALL, embed_manifest_bytes=0))
    for name, options in (
        ("stock", {}),
        ("stock-threads", {"thread_count": 3}),
        ("stock-zstd", {"_extensions": [ZStandard()]}),
    ):
        writer = dcp.FileSystemWriter(root / name, sync_files=False, **options)
        dcp.save(state(), storage_writer=writer, no_dist=True)
    return root


@pytest.fixture
def copy_of(saved: Path, tmp_path: Path):
    def copy(name: str) -> Path:
        return Path(shutil.copytree(saved / name, tmp_path / name))

    return copy


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << (at % 8)
    path.write_bytes(data)


def data_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.distcp"))


def manifest_of(folder: Path) -> Any:
    manifest = discover(open_store(folder), ReadConfig()).manifest
    assert manifest is not None
    return decode(manifest)


def only(found: Verification) -> Finding:
    assert len(found.findings) == 1, str(found)
    return found.findings[0]


# --- sound checkpoints ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["ours", "ours-apart"])
def test_every_byte_of_a_checkpoint_of_ours_is_read_once_and_checked(saved, name):
    found = verify_checkpoint(saved / name)
    stored = sum(path.stat().st_size for path in data_files(saved / name))
    assert found.is_sound
    assert (found.layout, found.num_objects) == ("dcpstore", len(data_files(saved / name)))
    assert found.fetched_bytes == found.checked_bytes == stored
    assert (found.num_keys, found.leftovers, found.others) == (6, (), ())


@pytest.mark.parametrize("request_bytes", [4 * MIB, 3000], ids=["whole", "in-parts"])
@pytest.mark.parametrize("name", ["stock", "stock-threads"])
def test_a_stock_checkpoint_is_compared_with_the_crc_of_its_records(saved, name, request_bytes):
    found = verify_checkpoint(saved / name, config=ReadConfig(request_bytes=request_bytes))
    assert found.is_sound, str(found)
    assert (found.layout, found.num_items) == ("dcp", 6)
    payload_bytes = 50 * 1000 * 4 + 33 * 3 * 2 + 8
    assert payload_bytes < found.checked_bytes < payload_bytes + 6 * 1200
    assert any("zip CRC32" in note for note in found.notes)


def test_what_an_extension_transformed_is_named_as_not_checked(saved):
    found = verify_checkpoint(saved / "stock-zstd")
    assert found.is_sound
    assert found.checked_bytes == 0
    assert any("6 records that a stream extension transformed" in note for note in found.notes)


def test_records_saved_without_crc_are_named_as_not_checked(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save({"w": torch.ones(1000)}, checkpoint_id=tmp_path, no_dist=True)
    finally:
        torch.serialization.set_crc32_options(True)
    found = verify_checkpoint(tmp_path)
    assert found.is_sound
    assert found.checked_bytes == 0
    assert any("4.1 KiB that have no checksum" in note for note in found.notes), found.notes


def test_a_checkpoint_of_ours_with_extensions_is_checked_whole(tmp_path):
    writer = dcpstore.ObjectStoreWriter(tmp_path, extensions=[ZStandard()])
    dcp.save(state(), storage_writer=writer, no_dist=True)
    assert verify_checkpoint(tmp_path).is_sound
    (data,) = data_files(tmp_path)
    flip(data, 1000)
    assert only(verify_checkpoint(tmp_path)).kind == "checksum"


@pytest.mark.parametrize("folder", sorted(p.parent.name for p in GOLDEN.glob("*/.metadata")))
def test_checkpoints_kept_from_earlier_versions_are_sound(folder):
    found = verify_checkpoint(GOLDEN / folder)
    assert found.is_sound, str(found)
    assert found.layout == ("dcpstore" if folder.startswith("dcpstore") else "dcp")


# --- damaged bytes -------------------------------------------------------------------


@pytest.mark.parametrize("request_bytes", [4 * MIB, 4096], ids=["joined", "block-by-block"])
def test_a_flipped_byte_anywhere_in_data_of_ours_is_found_with_key_and_range(
    copy_of, request_bytes
):
    folder = copy_of("ours")
    config = ReadConfig(request_bytes=request_bytes)
    items = manifest_of(folder).items
    for path in data_files(folder):
        for at in range(0, path.stat().st_size, 7919):
            flip(path, at)
            finding = only(verify_checkpoint(folder, config=config))
            flip(path, at)
            (owner,) = [
                one
                for one, item in items.items()
                if item.key == path.name and at in range(*item.record)
            ]
            assert finding.key == path.name
            assert finding.fqn is not None
            assert finding.fqn.startswith(owner.fqn)
            assert finding.span is not None
            assert finding.span.start <= at < finding.span.end
            assert finding.span.num_bytes <= max(BLOCK, 700)
            assert finding.kind in ("checksum", "framing")


@pytest.mark.parametrize(
    ("name", "key"), [("ours", ".metadata"), ("ours-apart", ".metadata"), ("ours-apart", None)]
)
def test_a_flipped_byte_anywhere_in_the_metadata_of_ours_is_found(copy_of, name, key):
    folder = copy_of(name)
    path = folder / key if key is not None else next(folder.glob(".dcpstore-*"))
    size = path.stat().st_size
    for at in (*range(0, size, 97), *range(size - 300, size, 7), *range(size - 24, size)):
        flip(path, at)
        finding = only(verify_checkpoint(folder))
        flip(path, at)
        assert finding.kind == "metadata", f"byte {at} of {size}"
        if name == "ours":
            assert finding.key == ".metadata"
            assert finding.span is None or finding.span.start <= at < finding.span.end


@pytest.mark.parametrize("name", ["ours", "ours-apart"])
def test_a_footer_of_another_save_is_a_finding(copy_of, name):
    folder = copy_of(name)
    path = folder / ".metadata"
    whole = path.read_bytes()
    seal = read_seal(memoryview(whole))
    assert seal is not None
    at = whole.index(seal.save_id.encode(), seal.manifest_span.end)
    path.write_bytes(whole[:at] + b"0" * 16 + whole[at + 16 :])
    finding = only(verify_checkpoint(folder))
    assert finding.span == ByteRange(seal.manifest_span.end, len(whole))
    assert "footer" in finding.message


@pytest.mark.parametrize("request_bytes", [4 * MIB, 3000], ids=["whole", "in-parts"])
def test_a_flipped_byte_in_any_content_of_a_stock_record_is_found(copy_of, request_bytes):
    folder = copy_of("stock-threads")
    config = ReadConfig(request_bytes=request_bytes)
    for path in data_files(folder):
        data = path.read_bytes()
        ends = [at + 22 for at in range(len(data)) if data.startswith(b"PK\x05\x06", at)]
        for start, end in zip([0, *ends], ends, strict=False):
            for info in zipfile.ZipFile(BytesIO(data[start:end])).infolist():
                at = start + info.header_offset + 30 + len(info.filename)
                at += int.from_bytes(
                    data[at - len(info.filename) - 2 : at - len(info.filename)], "little"
                )
                if info.file_size == 0:
                    continue
                at += info.file_size // 2
                flip(path, at)
                found = verify_checkpoint(folder, config=config)
                flip(path, at)
                finding = next(one for one in found.findings if one.kind == "checksum")
                assert finding.key == path.name
                assert finding.span is not None
                assert finding.span.start <= at < finding.span.end


def test_a_damaged_directory_of_a_stock_record_is_found(copy_of):
    folder = copy_of("stock")
    (path,) = data_files(folder)
    data = path.read_bytes()
    for mark, kind in (
        (b"PK\x05\x06", "framing"),
        (b"PK\x01\x02", "framing"),
        (b"PK\x07\x08", "framing"),
    ):
        flip(path, data.index(mark) + 1)
        finding = only(verify_checkpoint(folder))
        path.write_bytes(data)
        assert (finding.kind, finding.key) == (kind, path.name)


def test_all_findings_are_listed_and_bad_neighbours_are_one(copy_of):
    folder = copy_of("ours")
    path = max(data_files(folder), key=lambda one: one.stat().st_size)
    (item,) = [one for one in manifest_of(folder).items.values() if one.record.num_bytes > 100_000]
    data = bytearray(path.read_bytes())
    for block in (2, 3, 4, 9):
        data[item.payload.start + block * BLOCK + 5] ^= 1
    path.write_bytes(data)
    found = verify_checkpoint(folder, config=ReadConfig(request_bytes=2 * BLOCK))
    start = item.payload.start
    assert [one.span for one in found.findings] == [
        ByteRange(start + 2 * BLOCK, start + 5 * BLOCK),
        ByteRange(start + 9 * BLOCK, start + 10 * BLOCK),
    ]
    assert "DAMAGED, 2 findings" in found.summary()
    assert f"{path.name}, bytes [{start + 2 * BLOCK}, " in "".join(map(str, found.findings))


# --- objects -------------------------------------------------------------------------


def test_a_truncated_object_of_ours_names_each_item_that_lost_bytes(copy_of):
    folder = copy_of("ours")
    path = max(data_files(folder), key=lambda one: one.stat().st_size)
    whole = path.read_bytes()
    for size in (len(whole) - 1, 100_000, 90, 0):
        path.write_bytes(whole[:size])
        found = verify_checkpoint(folder)
        assert {one.kind for one in found.findings} == {"truncated"}
        assert {one.key for one in found.findings} == {path.name}
        assert max(one.span.end for one in found.findings if one.span) == len(whole)
        lost = {
            one.fqn
            for one, item in manifest_of(folder).items.items()
            if item.key == path.name and item.record.end > size
        }
        assert {one.fqn for one in found.findings} == lost


def test_a_truncated_stock_object_is_found(copy_of):
    folder = copy_of("stock")
    (path,) = data_files(folder)
    path.write_bytes(path.read_bytes()[:-30])
    found = verify_checkpoint(folder)
    assert [one.kind for one in found.findings] == ["truncated"]


def test_bytes_appended_to_an_object_are_found(copy_of):
    folder = copy_of("ours")
    path = data_files(folder)[0]
    path.write_bytes(path.read_bytes() + b"more")
    finding = only(verify_checkpoint(folder))
    assert (finding.kind, finding.key) == ("resized", path.name)


def test_a_missing_object_is_found_and_the_others_are_still_checked(copy_of):
    folder = copy_of("ours")
    gone, damaged = data_files(folder)[:2]
    gone.unlink()
    flip(damaged, 3000)
    found = verify_checkpoint(folder)
    assert {(one.kind, one.key) for one in found.findings} == {
        ("missing", gone.name),
        ("checksum", damaged.name),
    }


def test_objects_of_other_saves_are_leftovers_and_no_findings(copy_of):
    folder = copy_of("ours")
    (folder / "__0_0.0123456789abcdef.distcp").write_bytes(b"12345")
    (folder / "notes.txt").write_bytes(b"1")
    found = verify_checkpoint(folder)
    assert found.is_sound
    assert [one.key for one in found.leftovers] == ["__0_0.0123456789abcdef.distcp"]
    assert [one.key for one in found.others] == ["notes.txt"]
    assert "leftovers" in found.summary()


def test_a_copy_by_another_tool_is_sound_and_said_to_have_other_marks(copy_of):
    folder = copy_of("ours")
    found = verify_checkpoint(folder)  # a copy has other inodes and times, hence other marks
    assert found.is_sound
    assert any("with another ETag" in note for note in found.notes)


def test_a_lost_manifest_is_a_finding(copy_of):
    folder = copy_of("ours-apart")
    next(folder.glob(".dcpstore-*")).unlink()
    finding = only(verify_checkpoint(folder))
    assert finding.kind == "metadata"
    assert (finding.key or "").startswith(".dcpstore-")


def test_a_pickle_that_runs_code_is_a_finding_and_is_not_run(tmp_path):
    (tmp_path / ".metadata").write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    finding = only(verify_checkpoint(tmp_path))
    assert (finding.kind, finding.key) == ("metadata", ".metadata")


def test_an_empty_prefix_has_nothing_to_verify(tmp_path):
    with pytest.raises(NotFoundError, match="no checkpoint"):
        verify_checkpoint(tmp_path)


def test_ranks_that_sealed_alone_are_verified_together(tmp_path):
    for rank in (0, 1):
        save_alone(tmp_path, rank)
    assert sorted(path.name for path in tmp_path.glob("*.metadata")) == [
        "__0.metadata",
        "__1.metadata",
    ]
    found = verify_checkpoint(tmp_path)
    assert found.is_sound
    assert (found.num_keys, found.num_objects) == (2, 2)
    flip(data_files(tmp_path)[1], 330)
    assert (only(verify_checkpoint(tmp_path)).key or "").startswith("__1_")


# --- safetensors ---------------------------------------------------------------------


@pytest.fixture
def files(tmp_path) -> Path:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(3), "b": torch.ones(4)}, tmp_path / "one.safetensors")
    save_file({"c": torch.ones(5)}, tmp_path / "two.safetensors")
    index = (
        '{"weight_map": {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}}'
    )
    (tmp_path / "model.safetensors.index.json").write_text(index)
    return tmp_path


def test_a_safetensors_folder_is_compared_with_its_headers_and_index(files):
    found = verify_checkpoint(files)
    assert found.is_sound
    assert (found.layout, found.num_keys) == ("safetensors", 3)
    assert any("not checked: the values" in note for note in found.notes)


def test_everything_wrong_with_a_safetensors_folder_is_listed(files):
    path = files / "two.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    index = files / "model.safetensors.index.json"
    index.write_text(
        index.read_text().replace('"b": "one.safetensors", ', "").replace('"c"', '"d"')
    )
    found = verify_checkpoint(files)
    assert {(one.kind, one.fqn) for one in found.findings} == {
        ("truncated", "c"),
        ("missing", "d"),
        ("metadata", "b"),
        ("metadata", "c"),
    }


def test_a_safetensors_file_that_is_gone_or_damaged_is_found(files):
    (files / "one.safetensors").unlink()
    flip(files / "two.safetensors", 9)
    found = verify_checkpoint(files)
    assert {(one.kind, one.key) for one in found.findings} == {
        ("missing", "one.safetensors"),
        ("metadata", "two.safetensors"),
    }


# --- the store -----------------------------------------------------------------------


def opener(folder: Path, *script: StoreFault) -> tuple[Any, RecordingStore]:
    """A store that follows a script, and what records the requests that reach it."""
    recorder = RecordingStore(FaultyStore(open_store(folder), script))
    return (lambda *_args, **_options: recorder), recorder


@pytest.mark.parametrize(("name", "num_more"), [("ours", 1), ("ours-apart", 2)])
def test_where_listing_is_refused_each_object_is_looked_up(saved, name, num_more):
    make, recorder = opener(saved / name, StoreFault("denied", "list", times=None))
    found = verify_checkpoint(saved / name, store_opener=make)
    assert found.is_sound
    assert recorder.counts["head"] == found.num_objects + num_more
    assert any("does not let these credentials list" in note for note in found.notes)


def test_an_object_that_may_not_be_read_is_a_finding_and_the_rest_is_checked(copy_of):
    folder = copy_of("ours")
    refused, damaged = data_files(folder)[:2]
    flip(damaged, 3000)
    make, _ = opener(folder, StoreFault("denied", "get_range", key=refused.name, times=None))
    found = verify_checkpoint(folder, store_opener=make)
    assert {(one.kind, one.key) for one in found.findings} == {
        ("unreadable", refused.name),
        ("checksum", damaged.name),
    }


def test_a_store_that_is_down_ends_the_verification(saved):
    make, _ = opener(saved / "ours", StoreFault("error", "get_range", at=1, times=None))
    with pytest.raises(StoreError, match="scripted"):
        verify_checkpoint(saved / "ours", store_opener=make, config=ReadConfig(request_bytes=8192))


@pytest.mark.parametrize("name", ["ours", "stock"])
@pytest.mark.parametrize("request_bytes", [4 * MIB, 3000], ids=["whole", "in-parts"])
def test_a_bit_that_flips_on_the_way_is_no_finding(saved, name, request_bytes):
    config = ReadConfig(request_bytes=request_bytes)
    num_requests = verify_checkpoint(saved / name, config=config).num_requests
    num_again = 0
    for at in range(min(num_requests, 4)):
        make, recorder = opener(saved / name, StoreFault("flip", "get_range", at=at, bit=800_009))
        found = verify_checkpoint(saved / name, store_opener=make, config=config)
        assert found.is_sound, str(found)
        num_again += recorder.counts["get_range"] > num_requests
    assert num_again, "some of the flips were in bytes that matter, which were fetched again"


def test_an_overwrite_meanwhile_is_a_conflict_and_no_finding(tmp_path):
    dcpstore.save(state(), tmp_path / "c", config=SMALL)

    class Overwriting(RecordingStore):
        def get_range(self, key: str, start: int, end: int) -> memoryview:
            if not self.counts["get_range"]:
                dcpstore.save(state(), tmp_path / "c", config=SMALL, overwrite=True)
            return super().get_range(key, start, end)

    store = Overwriting(open_store(tmp_path / "c"))
    with pytest.raises(dcpstore.ConflictError, match="verify again"):
        verify_checkpoint(
            tmp_path / "c",
            store_opener=lambda *_a, **_o: store,
            config=ReadConfig(max_requests=1),
        )


def test_memory_stays_within_the_budget_and_requests_in_flight(tmp_path):
    dcpstore.save({"w": torch.zeros(8 * MIB)}, tmp_path)
    make, recorder = opener(tmp_path)
    config = ReadConfig(budget_bytes=8 * MIB, request_bytes=MIB, max_requests=3)
    found = verify_checkpoint(tmp_path, store_opener=make, config=config)
    assert found.is_sound
    assert found.peak_bytes <= 4 * MIB
    assert recorder.peak_in_flight <= 3
    assert max(one.num_bytes for one in recorder.requests if one.verb == "get_range") <= MIB


def test_progress_tells_every_byte(saved):
    seen: list[Any] = []
    found = verify_checkpoint(saved / "ours", progress=seen.append)
    assert seen[-1].action == "verify"
    assert seen[-1].done_bytes == seen[-1].total_bytes == found.fetched_bytes


# --- parts ---------------------------------------------------------------------------


def test_checksums_of_parts_add_up_to_the_checksum_of_the_whole():
    import zlib

    data = bytes(range(256)) * 33
    for cut in (0, 1, 2, 31, 4096, len(data) - 1, len(data)):
        first, second = data[:cut], data[cut:]
        joint = append_crc32(zlib.crc32(first), zlib.crc32(second), len(second))
        assert joint == zlib.crc32(data), cut


def test_findings_come_in_the_order_of_their_places():
    late, early = Finding("missing", "gone", "b"), Finding("missing", "gone", "a")
    assert in_order([late, early, late]) == (early, late)


def test_chunks_that_do_not_fill_their_tensor_are_found(tmp_path):
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    dcp.save({"w": torch.ones(6, 4)}, checkpoint_id=tmp_path, no_dist=True)
    import pickle

    path = tmp_path / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    entry = metadata.state_dict_metadata["w"]
    assert isinstance(entry, TensorStorageMetadata)
    entry.size = torch.Size([8, 4])
    path.write_bytes(pickle.dumps(metadata))
    finding = only(verify_checkpoint(tmp_path))
    assert (finding.kind, finding.fqn) == ("incomplete", "w")
    assert "24 of 32" in finding.message


def test_a_record_of_another_shape_than_the_metadata_say_is_found(tmp_path):
    dcp.save({"w": torch.ones(6, 4)}, checkpoint_id=tmp_path / "a", no_dist=True)
    dcp.save({"w": torch.ones(4, 6)}, checkpoint_id=tmp_path / "b", no_dist=True)
    (one,) = data_files(tmp_path / "a")
    one.write_bytes((tmp_path / "b" / one.name).read_bytes())
    finding = only(verify_checkpoint(tmp_path / "a"))
    assert (finding.kind, finding.key, finding.fqn) == ("mismatch", one.name, "w")
    assert "[4, 6]" in finding.message


def test_data_newer_than_stock_metadata_is_pointed_out(copy_of):
    import os

    folder = copy_of("stock")
    (path,) = data_files(folder)
    os.utime(folder / ".metadata", (1000, 1000))
    os.utime(path, (2000, 2000))
    found = verify_checkpoint(folder)
    assert found.is_sound
    assert any("newer than the metadata" in note for note in found.notes)
