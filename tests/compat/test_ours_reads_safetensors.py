"""Hugging Face folders load with ours, whoever wrote them."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from compat_states import DTYPES, QUIET, assert_same, load_by_dcp, pattern
from part_planner import PartPlanner
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException

from dcpstore import CorruptError, NotFoundError, ObjectStoreReader
from dcpstore.testing import MotoServer

pytestmark = [
    *QUIET,
    pytest.mark.filterwarnings("ignore:.*fsync:UserWarning"),
    # What HuggingFaceStorageWriter itself stumbles over.
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]

UNSAFE = ("complex64", "complex128", "complex32")
UNSAFE += ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
SAFE_DTYPES = tuple(dtype for dtype in DTYPES if str(dtype).removeprefix("torch.") not in UNSAFE)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    found = {
        f"model.{str(dtype)[6:]}": pattern(dtype, (5, 7), seed=number)
        for number, dtype in enumerate(SAFE_DTYPES)
    }
    found["scalar"] = torch.tensor(2.5)
    found["empty"] = torch.empty((0, 3))
    found["large"] = pattern(torch.float32, (400, 2000), seed=77)
    return found


def split(tensors):
    names = sorted(tensors)
    return [{name: tensors[name] for name in names[part::3]} for part in range(3)]


def write_sharded_folder(folder, tensors) -> None:
    weight_map = {}
    for number, part in enumerate(split(tensors), 1):
        name = f"model-{number:05}-of-00003.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, name))
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_one_file_loads(tmp_path, tensors) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    loaded, stats = load_by_dcp(tmp_path, tensors)
    assert_same(loaded, tensors)
    assert stats.fetched_bytes <= 1.01 * stats.needed_bytes


def test_files_under_an_index_load(tmp_path, tensors) -> None:
    write_sharded_folder(tmp_path, tensors)
    # Not named by the index, hence not part of the checkpoint.
    save_file({"large": torch.zeros(3)}, tmp_path / "adapter.safetensors")
    assert_same(load_by_dcp(tmp_path, tensors)[0], tensors)


def test_a_bucket_loads_and_only_the_files_needed_are_touched(
    tmp_path, moto_server: MotoServer, tensors
) -> None:
    client = moto_server.create_bucket("safetensors")
    write_sharded_folder(tmp_path, tensors)
    for path in tmp_path.iterdir():
        client.put(f"hub/{path.name}", path.read_bytes())
    options = moto_server.storage_options()
    assert_same(load_by_dcp("s3://safetensors/hub", tensors, storage_options=options)[0], tensors)
    part = {"large": tensors["large"]}
    loaded, stats = load_by_dcp("s3://safetensors/hub", part, storage_options=options)
    assert_same(loaded, part)
    assert stats.fetched_bytes == stats.needed_bytes == 400 * 2000 * 4


@pytest.mark.parametrize("where", [(slice(50, 100), slice(None)), (slice(None), slice(3, 500))])
def test_a_slice_of_a_tensor_loads(tmp_path, tensors, where) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    expected = tensors["large"][where]
    target = {"large": torch.zeros(expected.shape)}
    offsets = {"large": tuple(part.start or 0 for part in where)}
    reader = ObjectStoreReader(tmp_path)
    dcp.load(target, storage_reader=reader, planner=PartPlanner(offsets), no_dist=True)
    assert_same(target["large"], expected)


def test_shards_that_name_their_place_are_joined(tmp_path) -> None:
    """What DCP's Hugging Face writer leaves when ranks save their shards."""
    whole = pattern(torch.bfloat16, (11, 6), seed=1)
    grid = pattern(torch.float32, (5, 9), seed=2)
    for number, (rows, columns) in enumerate([((0, 4), (0, 5)), ((4, 11), (5, 9))], 1):
        shards = {
            "whole": whole[rows[0] : rows[1]].contiguous(),
            "grid": grid[:, columns[0] : columns[1]].contiguous(),
        }
        places = {
            "whole": {"saved_offsets": [rows[0], 0]},
            "grid": {"saved_offsets": [0, columns[0]]},
        }
        about = {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}
        name = f"shard-{number:05}-model-00001-of-00001.safetensors"
        save_file(shards, tmp_path / name, metadata=about)
    expected = {"whole": whole, "grid": grid}
    assert_same(load_by_dcp(tmp_path, expected)[0], expected)
    target = {"whole": torch.zeros((5, 6), dtype=torch.bfloat16), "grid": torch.zeros(3, 4)}
    planner = PartPlanner({"whole": (2, 0), "grid": (1, 3)})
    dcp.load(target, storage_reader=ObjectStoreReader(tmp_path), planner=planner, no_dist=True)
    assert_same(target, {"whole": whole[2:7], "grid": grid[1:4, 3:7]})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"fqn_to_index_mapping": {"a": 1, "b": 2, "c": 2}},
        {"save_distributed": True},
        {"save_distributed": True, "fqn_to_index_mapping": {"a": 1, "b": 2, "c": 2}},
        {"save_distributed": True, "enable_consolidation": True},
        {"thread_count": 4, "fqn_to_index_mapping": {"a": 1, "b": 2, "c": 3}},
    ],
    ids=["one-file", "mapped", "sharded", "sharded-mapped", "consolidated", "4-threads"],
)
def test_folders_of_dcps_own_hugging_face_writer_load(tmp_path, settings) -> None:
    state = {
        "a": pattern(torch.float32, (6, 5), seed=1).nan_to_num(),
        "b": pattern(torch.bfloat16, (7,), seed=2),
        "c": pattern(torch.float16, (2, 2, 2), seed=3),  # consolidation fails on integers
    }
    writer = HuggingFaceStorageWriter(str(tmp_path), **settings)
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert_same(load_by_dcp(tmp_path, state)[0], state)


def test_a_key_that_is_missing_changes_nothing(tmp_path, tensors) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    target = {"large": torch.ones(400, 2000), "unknown": torch.ones(1)}
    with pytest.raises(CheckpointException, match="unknown"):
        dcp.load(target, storage_reader=ObjectStoreReader(tmp_path), no_dist=True)
    assert bool((target["large"] == 1).all())


def test_a_cut_file_is_found_out(tmp_path) -> None:
    save_file({"w": torch.ones(1000)}, tmp_path / "model.safetensors")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointException, match=r"model\.safetensors") as caught:
        dcp.load({"w": torch.zeros(1000)}, storage_reader=ObjectStoreReader(tmp_path), no_dist=True)
    (cause,) = caught.value.failures.values()
    assert isinstance(cause[0], CorruptError), cause


def test_an_empty_folder_is_no_checkpoint(tmp_path) -> None:
    with pytest.raises(NotFoundError, match="safetensors"):
        ObjectStoreReader(tmp_path).read_metadata()
