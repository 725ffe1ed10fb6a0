"""Checkpoints of stock DCP writers load with ours: whole, in part and resharded."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from compat_states import QUIET, assert_same, full_state, load_by_dcp, pattern
from part_planner import PartPlanner
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

from dcpstore import ObjectStoreReader, ReadConfig
from dcpstore.store import open_store
from dcpstore.testing import MotoServer, RecordingStore

pytestmark = [
    *QUIET,
    # Stock writers say so of every stream that has no file descriptor.
    pytest.mark.filterwarnings("ignore:.*fsync:UserWarning"),
]

MIB = 1 << 20
LARGE = 512 << 10  # elements; its record of 2 MiB is looked into by its head
SHAPES = list(product((1, 4), (True, False), (False, True)))
IDS = [
    f"{threads}-threads-{'one-file' if one else 'file-per-item'}{'-zstd' if zstd else ''}"
    for threads, one, zstd in SHAPES
]


@pytest.fixture(scope="module")
def state():
    return full_state(large_elements=LARGE)


@pytest.fixture(scope="module")
def bucket(moto_server: MotoServer) -> str:
    moto_server.create_bucket("ours-reads-stock")
    return "s3://ours-reads-stock"


def shape(threads: int, one_file: bool, zstd: bool) -> dict[str, Any]:
    """What a stock writer is told."""
    return {
        "single_file_per_rank": one_file,
        "thread_count": threads,
        "sync_files": False,
        "_extensions": [ZStandard()] if zstd else None,
    }


@pytest.mark.parametrize(("threads", "one_file", "zstd"), SHAPES, ids=IDS)
def test_a_folder_of_the_file_system_writer_loads(
    tmp_path, state, threads: int, one_file: bool, zstd: bool
) -> None:
    writer = dcp.FileSystemWriter(tmp_path, **shape(threads, one_file, zstd))
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert len(list(tmp_path.glob("*.distcp"))) >= (threads if one_file else 30)
    loaded, stats = load_by_dcp(tmp_path, state)
    assert_same(loaded, state)
    assert stats.fetched_bytes <= 1.1 * stats.needed_bytes


@pytest.mark.parametrize(
    ("threads", "one_file", "zstd"),
    [(1, True, False), (4, True, True), (1, False, False)],
    ids=["one-file", "4-threads-zstd", "file-per-item"],
)
def test_a_bucket_of_the_fsspec_writer_loads(
    moto_server: MotoServer, bucket, state, request, threads: int, one_file: bool, zstd: bool
) -> None:
    options = moto_server.storage_options()
    url = f"{bucket}/{request.node.callspec.id}"
    writer = FsspecWriter(url, **shape(threads, one_file, zstd), **options)
    dcp.save(state, storage_writer=writer, no_dist=True)
    loaded, _ = load_by_dcp(url, state, storage_options=options)
    assert_same(loaded, state)


def test_metadata_of_a_rank_alone_is_found(tmp_path, state) -> None:
    writer = dcp.FileSystemWriter(tmp_path, sync_files=False)
    dcp.save(state, storage_writer=writer, no_dist=True, use_collectives=False)
    assert (tmp_path / "__0.metadata").exists()
    assert not (tmp_path / ".metadata").exists()
    assert_same(load_by_dcp(tmp_path, state)[0], state)


def test_a_partial_state_dict_fetches_only_its_keys(tmp_path, state) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path, sync_files=False), no_dist=True)
    part = {"above_inline": state["above_inline"], "step": 100}
    loaded, stats = load_by_dcp(tmp_path, part, config=ReadConfig(join_gap_bytes=0))
    assert_same(loaded, part)
    assert (stats.num_targets, stats.num_requests) == (2, 2)
    assert stats.fetched_bytes == stats.needed_bytes < 190_000


# --- reshards, and what they cost ------------------------------------------------------------

ROWS, COLUMNS = 48, 320 << 10  # half a row is 640 KiB, too wide a gap to fetch along


@pytest.fixture(scope="module", params=["dense", "transposed", "expanded", "view", "zstd"])
def wide(request, tmp_path_factory):
    """A tensor of 60 MiB (dense) or less, saved by stock in the layout that it has."""
    kind = request.param
    tensor = {
        "dense": lambda: pattern(torch.float32, (ROWS, COLUMNS)),
        "zstd": lambda: pattern(torch.int32, (ROWS, 4096)),
        "transposed": lambda: pattern(torch.float32, (8192, ROWS)).t(),
        "expanded": lambda: pattern(torch.float32, (1, 8192)).expand(ROWS, 8192),
        # Stock clones a view of a larger storage before it saves it.
        "view": lambda: pattern(torch.float32, (ROWS * 2, 16384))[::2, 1000:9192],
    }[kind]()
    folder = tmp_path_factory.mktemp(kind)
    extensions = [ZStandard()] if kind == "zstd" else None
    writer = dcp.FileSystemWriter(folder, sync_files=False, _extensions=extensions)
    dcp.save({"w": tensor, "other": pattern(torch.uint8, (3 * MIB,))}, storage_writer=writer)
    return kind, tensor, folder


def boxes(tensor: torch.Tensor) -> dict[str, tuple[slice, ...]]:
    rows, columns = tensor.shape
    return {
        "row slice": (slice(rows // 8, rows // 4), slice(None)),
        "column slice": (slice(None), slice(columns // 2, columns)),
        "inner box": (slice(5, rows - 7), slice(columns // 3 + 1, columns // 2)),
        "one element": (slice(rows - 1, rows), slice(columns - 1, columns)),
        "nothing": (slice(3, 3), slice(None)),
    }


@pytest.mark.parametrize("is_transposed", [False, True], ids=["plain", "transposed-target"])
@pytest.mark.parametrize(
    "box", ["row slice", "column slice", "inner box", "one element", "nothing"]
)
def test_a_box_of_a_stock_tensor_loads(wide, box: str, is_transposed: bool) -> None:
    kind, tensor, folder = wide
    where = boxes(tensor)[box]
    expected = tensor[where]
    rows, columns = expected.shape
    target = torch.ones((columns, rows), dtype=tensor.dtype).t() if is_transposed else None
    target = torch.ones(rows, columns, dtype=tensor.dtype) if target is None else target
    reader = ObjectStoreReader(folder)
    offsets = {"w": tuple(part.start or 0 for part in where)}
    dcp.load({"w": target}, storage_reader=reader, planner=PartPlanner(offsets), no_dist=True)
    assert_same(target, expected)
    if kind == "dense" and box != "one element":
        # Each part of a row is a request of its own; the head costs 8 KiB at most.
        needed = expected.numel() * expected.element_size()
        assert reader.last_read.needed_bytes == needed
        assert reader.last_read.fetched_bytes <= 1.1 * needed + 8192


def test_a_large_record_is_looked_into_and_a_small_one_fetched_whole(tmp_path) -> None:
    state = {
        "large": pattern(torch.float32, (LARGE,)),
        "small": pattern(torch.float32, (LARGE // 8,)),
    }
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path, sync_files=False), no_dist=True)
    opened: list[RecordingStore] = []

    def opener(url, **more):
        opened.append(RecordingStore(open_store(url, **more)))
        return opened[-1]

    target = {"large": torch.zeros(64), "small": torch.zeros(64)}
    reader = ObjectStoreReader(tmp_path, store_opener=opener)
    planner = PartPlanner({"large": (1000,), "small": (1000,)})
    dcp.load(target, storage_reader=reader, planner=planner, no_dist=True)
    assert_same(target, {key: value[1000:1064] for key, value in state.items()})
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    lengths = {index.fqn: info.length for index, info in metadata.storage_data.items()}
    ranges = sorted(one.end - one.start for one in opened[0].requests if one.verb == "get_range")
    assert ranges[0] == 256  # the elements wanted of the large one
    assert ranges[1] <= 8192  # its head
    assert ranges[2:] == [lengths["small"]]
    assert opened[0].counts["list"] == opened[0].counts["head"] == 0


@pytest.mark.parametrize(
    ("target_dtype", "casts"), [(torch.float64, "widening"), (torch.bfloat16, "any")]
)
def test_casts_of_stock_tensors_equal_torchs_own(tmp_path, target_dtype, casts: str) -> None:
    tensors = {"large": torch.randn(LARGE), "small": torch.randn(77), "odd": torch.randn(5, 9).t()}
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(tmp_path, sync_files=False), no_dist=True)
    target = {key: torch.zeros(value.shape, dtype=target_dtype) for key, value in tensors.items()}
    reader = ObjectStoreReader(tmp_path, config=ReadConfig(casts=casts))
    dcp.load(target, storage_reader=reader, no_dist=True)
    assert_same(target, {key: value.to(target_dtype) for key, value in tensors.items()})
