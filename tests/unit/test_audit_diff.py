"""`compare_checkpoints`: what differs, found by checksum or by reading."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

import dcpstore
from dcpstore import CorruptError, NotFoundError, ReadConfig, WriteConfig
from dcpstore.audit.diff import Comparison, are_same, compare_checkpoints
from dcpstore.cli.main import main
from dcpstore.plan.rules import KeyRules
from dcpstore.store import open_store
from dcpstore.testing import RecordingStore

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")]

MIB = 1 << 20


def state() -> dict[str, Any]:
    noise = torch.Generator().manual_seed(3)
    return {
        "w": torch.randn(40, 300, generator=noise),
        "half": torch.randn(9, 4, generator=noise).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "complex": torch.randn(5, generator=noise, dtype=torch.complex64),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "args": {"lr": 0.5, "name": "run"},
        "step": 7,
    }


class Chunked(dcpstore.SavePlanner):
    """Saves tensors of two dimensions cut into chunks of so many rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._rows = rows

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [piece for item in plan.items for piece in self._cut(item)]
        self.plan = SavePlan(items)
        return self.plan

    def _cut(self, item: WriteItem) -> list[WriteItem]:
        data = item.tensor_data
        if item.type is not WriteItemType.TENSOR or data is None or data.size.numel() < 36:
            return [item]
        pieces = []
        for start in range(0, data.size[0], self._rows):
            rows = min(self._rows, data.size[0] - start)
            offsets, sizes = torch.Size([start, 0]), torch.Size([rows, data.size[1]])
            chunk = ChunkStorageMetadata(offsets, sizes)
            pieces.append(
                WriteItem(
                    MetadataIndex(item.index.fqn, offsets),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(chunk, data.properties, data.size),
                )
            )
        return pieces

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = write_item.tensor_data
        if data is None or write_item.type is not WriteItemType.SHARD:
            return super().resolve_data(write_item)
        start, rows = data.chunk.offsets[0], data.chunk.sizes[0]
        return self.state_dict[write_item.index.fqn][start : start + rows]


def save_ours(state: dict[str, Any], folder: Path, rows: int | None = None, **config: Any) -> Path:
    planner = dcp.DefaultSavePlanner() if rows is None else Chunked(rows)
    writer = dcpstore.ObjectStoreWriter(folder, config=WriteConfig(**config))
    dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    return folder


def save_stock(state: dict[str, Any], folder: Path) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def save_files(state: dict[str, Any], folder: Path) -> Path:
    from safetensors.torch import save_file

    folder.mkdir()
    flat = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
    save_file(flat, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("diff")
    tensors = {k: v for k, v in state().items() if isinstance(v, torch.Tensor)}
    return {
        "ours": save_ours(state(), root / "ours"),
        "same": save_ours(state(), root / "same"),
        "chunked": save_ours(state(), root / "chunked", rows=7),
        "blocks": save_ours(state(), root / "blocks", checksum_block_bytes=4096),
        "stock": save_stock(state(), root / "stock"),
        "files": save_files(tensors, root / "files"),
        "tensors": save_ours(tensors, root / "tensors"),
    }


def only(found: Comparison) -> Any:
    assert len(found.differences) == 1, str(found)
    return found.differences[0]


# --- equal ---------------------------------------------------------------------------


def test_checkpoints_of_equal_layout_are_compared_without_a_data_request(saved):
    found = compare_checkpoints(saved["ours"], saved["same"])
    assert found.is_equal
    assert (found.num_equal, found.num_by_checksum, found.num_read) == (9, 9, 0)
    assert (found.num_requests, found.fetched_bytes) == (0, 0)
    assert "equal" in found.summary()


def test_all_values_are_read_when_asked(saved):
    found = compare_checkpoints(saved["ours"], saved["same"], read_all=True)
    assert found.is_equal
    assert (found.num_by_checksum, found.num_read) == (0, 9)
    assert found.fetched_bytes >= 2 * 40 * 300 * 4


@pytest.mark.parametrize("other", ["chunked", "blocks", "stock"])
def test_other_layouts_are_read_where_checksums_cannot_tell(saved, other):
    for left, right in ((saved["ours"], saved[other]), (saved[other], saved["ours"])):
        found = compare_checkpoints(left, right)
        assert found.is_equal, str(found)
        assert found.num_read >= 1
        assert found.num_by_checksum + found.num_read == found.num_equal == 9


def test_a_safetensors_folder_equals_the_checkpoint_it_was_made_of(saved):
    assert compare_checkpoints(saved["files"], saved["tensors"]).is_equal


def test_values_may_be_left_out(saved, tmp_path):
    other = save_ours({**state(), "w": torch.zeros(40, 300)}, tmp_path / "other")
    make, recorder = opener()
    found = compare_checkpoints(saved["stock"], other, values=False, store_opener=make)
    assert found.is_equal
    assert (found.num_read, found.num_by_checksum) == (0, 0)
    assert recorder[0].counts["get_range"] == recorder[1].counts["get_range"] == 0
    assert "not compared" in found.summary()


def opener() -> tuple[Any, list[RecordingStore]]:
    recorders: list[RecordingStore] = []

    def make(url: str, **options: Any) -> RecordingStore:
        recorders.append(RecordingStore(open_store(url, **options)))
        return recorders[-1]

    return make, recorders


# --- different -----------------------------------------------------------------------


def changed(state: dict[str, Any], fqn: str, at: tuple[int, ...], value: Any) -> dict[str, Any]:
    tensor = state[fqn].clone()
    tensor[at] = value
    return {**state, fqn: tensor}


def test_one_element_that_differs_is_found_by_checksum(saved, tmp_path):
    other = save_ours(changed(state(), "w", (17, 5), 9.0), tmp_path / "other")
    found = compare_checkpoints(saved["ours"], other)
    difference = only(found)
    assert (difference.fqn, difference.kind) == ("w", "value")
    assert "by checksum" in difference.detail
    assert (found.num_requests, found.num_equal) == (0, 8)


@pytest.mark.parametrize("writer", [save_stock, lambda s, f: save_ours(s, f, rows=3)])
def test_one_element_that_differs_is_found_by_reading_and_shown(saved, tmp_path, writer):
    before = float(state()["w"][17, 5])
    other = writer(changed(state(), "w", (17, 5), 9.0), tmp_path / "other")
    difference = only(compare_checkpoints(saved["ours"], other))
    assert (difference.fqn, difference.kind) == ("w", "value")
    assert "1 of 12,000 element(s) differ, first at [17, 5]" in difference.detail
    assert difference.detail.endswith(f"{before} | 9.0")


@pytest.mark.parametrize("fqn", ["half", "flags", "complex", "scalar"])
def test_every_dtype_is_compared_to_the_bit(saved, tmp_path, fqn):
    tensor = state()[fqn].clone().reshape(-1)
    raw = tensor.view(torch.uint8)
    raw[-1] ^= 1
    other = save_stock({**state(), fqn: tensor.reshape(state()[fqn].shape)}, tmp_path / "other")
    assert only(compare_checkpoints(saved["ours"], other)).fqn == fqn


@pytest.mark.parametrize("writer", [save_ours, save_stock])
def test_a_nan_equals_itself_and_zero_differs_from_minus_zero(tmp_path, writer):
    base = torch.tensor([float("nan"), 0.0, 1.0])
    writer({"w": base}, tmp_path / "a")
    writer({"w": base.clone()}, tmp_path / "b")
    writer({"w": torch.tensor([float("nan"), -0.0, 1.0])}, tmp_path / "c")
    assert compare_checkpoints(tmp_path / "a", tmp_path / "b", read_all=True).is_equal
    assert not compare_checkpoints(tmp_path / "a", tmp_path / "c").is_equal
    difference = only(compare_checkpoints(tmp_path / "a", tmp_path / "c", read_all=True))
    assert "first at [1]: 0.0 | -0.0" in difference.detail


def test_keys_kinds_shapes_and_dtypes_are_told_in_order(saved, tmp_path):
    other = state()
    other["w"] = torch.zeros(300, 40)
    other["half"] = other["half"].half()
    other["scalar"] = 2.5
    del other["flags"]
    other["more"] = torch.ones(2)
    found = compare_checkpoints(saved["ours"], save_ours(other, tmp_path / "other"))
    assert [(one.fqn, one.kind) for one in found.differences] == [
        ("w", "shape"),
        ("half", "dtype"),
        ("flags", "only left"),
        ("scalar", "kind"),
        ("more", "only right"),
    ]
    assert found.num_equal == 5
    said = "\n".join(map(str, found.differences))
    assert "float32 [40, 300] | float32 [300, 40]" in said
    assert "only right  'more': float32 [2]" in said


def test_values_that_are_no_tensors_are_compared_by_what_they_are(saved, tmp_path):
    other = save_stock({**state(), "step": 8, "args": {"lr": 0.5, "name": "other"}}, tmp_path / "o")
    found = compare_checkpoints(saved["ours"], other)
    assert [(one.fqn, one.left, one.right) for one in found.differences] == [
        ("args.name", "'run'", "'other'"),
        ("step", "7", "8"),
    ]


class Custom:
    """Not plain data."""


def test_values_that_are_more_than_data_are_not_opened(tmp_path):
    for name, number in (("a", 1), ("b", 1), ("c", 2)):
        value = Custom()
        value.number = number
        save_ours({"v": value}, tmp_path / name)
    assert compare_checkpoints(tmp_path / "a", tmp_path / "b").is_equal
    assert "were not opened" in only(compare_checkpoints(tmp_path / "a", tmp_path / "c")).detail


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_quantized_tensors_are_compared_whole(tmp_path):
    base = torch.tensor([0.1, 0.5, 0.9])
    for name, scale in (("a", 0.1), ("b", 0.1), ("c", 0.2)):
        quantized = torch.quantize_per_tensor(base, scale, 0, torch.qint8)
        save_ours({"q": quantized}, tmp_path / name)
    for read_all in (False, True):
        same = compare_checkpoints(tmp_path / "a", tmp_path / "b", read_all=read_all)
        assert same.is_equal
        assert (
            only(compare_checkpoints(tmp_path / "a", tmp_path / "c", read_all=read_all)).fqn == "q"
        )


def test_keys_are_chosen_by_patterns(saved, tmp_path):
    other = save_ours({**state(), "w": torch.zeros(40, 300), "step": 8}, tmp_path / "other")
    rules = KeyRules(exclude=["w"])
    assert only(compare_checkpoints(saved["ours"], other, rules=rules)).fqn == "step"
    rules = KeyRules(include=["w", "half"])
    assert only(compare_checkpoints(saved["ours"], other, rules=rules)).fqn == "w"


# --- bounds and failures -------------------------------------------------------------


def test_large_tensors_are_read_in_boxes_within_the_budget(tmp_path):
    big = {"w": torch.arange(4 * MIB, dtype=torch.float32).view(1024, 4096), "v": torch.ones(3)}
    save_ours(big, tmp_path / "a", rows=100)
    save_stock(changed(big, "w", (1023, 4095), -1.0), tmp_path / "b")
    make, recorders = opener()
    config = ReadConfig(budget_bytes=8 * MIB, request_bytes=MIB, max_requests=4)
    found = compare_checkpoints(tmp_path / "a", tmp_path / "b", config=config, store_opener=make)
    assert "first at [1023, 4095]" in only(found).detail
    # Eight boxes of a quarter of the budget; blocks of 256 KiB at their edges are read twice.
    assert found.fetched_bytes <= 2 * 16 * MIB + 8 * (256 << 10) + (64 << 10)
    heads = [r for r in recorders[1].requests if r.verb == "get_range" and r.num_bytes == 1024]
    assert len(heads) == 1, "where the elements of a stock record start is asked once"
    for recorder in recorders:
        assert recorder.peak_in_flight <= 4
        assert max(r.num_bytes for r in recorder.requests if r.verb == "get_range") <= MIB


def test_damaged_bytes_are_no_difference_but_an_error(saved, tmp_path):
    other = save_ours(state(), tmp_path / "other", checksum_block_bytes=4096)
    (path,) = other.glob("*.distcp")
    data = bytearray(path.read_bytes())
    data[20_000] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match="not the bytes that were saved"):
        compare_checkpoints(saved["ours"], other)


def test_an_empty_prefix_is_no_checkpoint(saved, tmp_path):
    for sides in ((saved["ours"], tmp_path), (tmp_path, saved["ours"])):
        with pytest.raises(NotFoundError, match="no checkpoint"):
            compare_checkpoints(*sides)


def test_progress_counts_what_is_read(saved):
    seen: list[Any] = []
    compare_checkpoints(saved["ours"], saved["stock"], progress=seen.append)
    assert seen[-1].action == "diff"
    assert seen[-1].done_bytes == seen[-1].total_bytes > 40 * 300 * 4


def test_sameness_of_values_looks_at_types_and_bits():
    nan = float("nan")
    same = [(nan, nan), ([1, (2.0, None)], [1, (2.0, None)]), ({"a": nan}, {"a": nan}), (b"", b"")]
    for left, right in same:
        assert are_same(left, right), (left, right)
    other = [(0.0, -0.0), (1, 1.0), (True, 1), ([1], (1,)), ({"a": 1}, {"b": 1}), ([1], [1, 2])]
    tensors = torch.ones(2), torch.ones(2).half()
    for left, right in [*other, tensors, (torch.ones(1), 1.0), (1j, complex(0, -1))]:
        assert not are_same(left, right), (left, right)


# --- the command ---------------------------------------------------------------------


def run(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    return main(arguments, stdout=out, stderr=err), out.getvalue(), err.getvalue()


def test_the_command_says_by_its_code_whether_they_differ(saved, tmp_path):
    code, out, _ = run("diff", str(saved["ours"]), str(saved["stock"]))
    assert (code, out.splitlines()[0]) == (0, "equal")
    other = save_ours({**state(), "step": 8}, tmp_path / "other")
    code, out, _ = run("diff", str(saved["ours"]), str(other), "--json")
    assert code == 1
    assert '"fqn": "step"' in out
    code, _, err = run("diff", str(saved["ours"]), str(tmp_path / "nothing"))
    assert code == 3
    assert "no checkpoint" in err
