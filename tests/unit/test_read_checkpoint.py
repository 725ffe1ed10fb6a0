"""Tensors, parts of tensors and values by name, without a state dict."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

import dcpstore
from dcpstore.errors import ConfigError, CorruptError, IncompatibleError, NotFoundError
from dcpstore.read.checkpoint import BoxRead, resolve_slices
from dcpstore.store import open_store
from dcpstore.testing import RecordingStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

BIG = torch.arange(400 * 300, dtype=torch.float32).reshape(400, 300)
STATE = {
    "model": {"w": BIG, "half": torch.randn(5, 4, 3).bfloat16(), "scalar": torch.tensor(7)},
    "step": 12,
    "name": "run",
    "empty": torch.empty(0, 3),
}


@pytest.fixture(params=["ours", "stock"])
def url(request, tmp_path) -> str:
    if request.param == "ours":
        dcpstore.save(STATE, tmp_path, config=dcpstore.WriteConfig(inline_bytes=0))
    else:
        dcp.save(STATE, checkpoint_id=tmp_path, no_dist=True)
    return str(tmp_path)


INDICES = [
    None,
    ...,
    3,
    -1,
    slice(2, 4),
    slice(-3, None),
    slice(4, 2),
    (0, 1, 2),
    (..., 0),
    (slice(None), -2),
    (1, ..., slice(0, 2)),
    (slice(0, 100), slice(1, -1), ...),
    [2],
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_an_index_means_what_it_means_to_torch(url, index) -> None:
    plain = ... if index is None else tuple(index) if isinstance(index, list) else index
    expected = STATE["model"]["half"][plain]
    found = dcpstore.read_tensor(url, "model.half", index)
    assert found.shape == expected.shape
    assert torch.equal(found, expected)


def test_every_small_slice_agrees_with_torch(tmp_path) -> None:
    whole = torch.arange(20).reshape(4, 5)
    ends = (None, -6, -1, 0, 1, 3, 9)
    for start, stop in itertools.product(ends, ends):
        chosen = resolve_slices((4, 5), (slice(start, stop), -2))
        (first, column), (count, _) = chosen.offsets, chosen.sizes
        assert torch.equal(whole[first : first + count, column], whole[start:stop, -2])


@pytest.mark.parametrize(
    ("index", "says"),
    [
        (slice(0, 4, 2), "step 2"),
        (slice(None, None, -1), "step -1"),
        (5, "outside its 5"),
        (-6, "outside its 5"),
        ((0, 0, 0, 0), "too many"),
        ((..., ...), "single"),
        (True, "bool"),
        ((None, 0), "NoneType"),
        (([0, 1],), "list"),
        (1.0, "float"),
    ],
    ids=str,
)
def test_an_index_that_cannot_be_read_says_why(index, says) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve_slices((5, 4, 3), index)


def test_scalars_empty_tensors_and_values_are_read(url) -> None:
    with dcpstore.open_checkpoint(url) as checkpoint:
        assert checkpoint.read_tensor("model.scalar").item() == 7
        assert checkpoint.read_tensor("empty").shape == (0, 3)
        assert checkpoint.read_tensor("model.w", slice(3, 3)).shape == (0, 300)
        assert checkpoint.read_value("step") == 12
        assert checkpoint.read_value("name") == "run"
        assert set(checkpoint.keys) == {
            "model.w",
            "model.half",
            "model.scalar",
            "step",
            "name",
            "empty",
        }


def test_many_tensors_are_read_into_what_the_caller_has(url) -> None:
    targets = {"model.w": torch.zeros(300, 400).T, "model.half": torch.zeros(5, 4, 3)}
    with dcpstore.open_checkpoint(url) as checkpoint:
        checkpoint.read_tensors(targets)
    assert torch.equal(targets["model.w"], BIG)
    assert torch.equal(targets["model.half"], STATE["model"]["half"].float())


def test_only_the_bytes_needed_are_fetched(url) -> None:
    with dcpstore.open_checkpoint(url) as checkpoint:
        checkpoint.locate(["model.w"])
        before = checkpoint.stats.fetched_bytes
        rows = checkpoint.read_tensor("model.w", slice(7, 9))
        fetched = checkpoint.stats.fetched_bytes - before
    assert torch.equal(rows, BIG[7:9])
    assert 2 * 300 * 4 <= fetched <= 256 * 1024 + 2 * 300 * 4  # a checksum block at most


def test_a_box_of_many_chunks_is_put_together(tmp_path) -> None:
    """A tensor in a grid of chunks, as a save of a planner that cuts it leaves it."""
    dcpstore.save({"w": BIG}, tmp_path, planner=dcpstore.SavePlanner(max_item_bytes=10_000))
    with dcpstore.open_checkpoint(tmp_path) as checkpoint:
        assert len(checkpoint.items_of("w")) > 40
        target = torch.zeros(60, 10)
        checkpoint.read_boxes([BoxRead("w", (100, 20), target)])
    assert torch.equal(target, BIG[100:160, 20:30])


def test_a_target_that_does_not_fit_changes_nothing(url) -> None:
    with dcpstore.open_checkpoint(url) as checkpoint:
        with pytest.raises(IncompatibleError, match="shape"):
            checkpoint.read_tensor("model.w", slice(0, 2), out=torch.zeros(3, 300))
        with pytest.raises(IncompatibleError, match="shape"):
            checkpoint.read_tensors({"model.w": torch.zeros(4)})
        narrow = torch.zeros(400, 300, dtype=torch.int8)
        with pytest.raises(IncompatibleError, match="int8"):
            checkpoint.read_tensors({"model.w": narrow})
    assert not narrow.any()


def test_a_key_that_is_not_there_names_similar_ones(url) -> None:
    with pytest.raises(NotFoundError, match=r"model\.halff.*'model\.half'"):
        dcpstore.read_tensor(url, "model.halff")


def test_tensors_and_values_are_told_apart(url) -> None:
    with dcpstore.open_checkpoint(url) as checkpoint:
        with pytest.raises(IncompatibleError, match="read_value"):
            checkpoint.read_tensor("step")
        with pytest.raises(IncompatibleError, match="read_tensor"):
            checkpoint.read_value("model.w")


class Odd:
    pass


def test_a_value_that_runs_code_is_opened_only_when_told(tmp_path) -> None:
    dcpstore.save({"odd": Odd()}, tmp_path, planner=dcpstore.SavePlanner(allow_pickle=True))
    with dcpstore.open_checkpoint(tmp_path) as checkpoint:
        with pytest.raises(CorruptError, match="allow_pickle=True"):
            checkpoint.read_value("odd")
        assert type(checkpoint.read_value("odd", allow_pickle=True)) is Odd


def test_elements_that_no_chunk_holds_are_an_error_and_not_garbage(url) -> None:
    with dcpstore.open_checkpoint(url) as checkpoint:
        entry = checkpoint.metadata.state_dict_metadata["model.w"]
        entry.chunks[:] = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([100, 300]))]
        assert torch.equal(checkpoint.read_tensor("model.w", slice(0, 100)), BIG[:100])
        with pytest.raises(CorruptError, match="holds 30000 of the 30300 elements"):
            checkpoint.read_tensor("model.w", slice(0, 101))


def test_chunks_that_overlap_are_an_error(url) -> None:
    with dcpstore.open_checkpoint(url) as checkpoint:
        entry = checkpoint.metadata.state_dict_metadata["model.w"]
        entry.chunks.append(ChunkStorageMetadata(torch.Size([50, 0]), torch.Size([350, 300])))
        with pytest.raises(CorruptError, match="overlap"):
            checkpoint.read_tensor("model.w")


def test_a_flipped_bit_is_found(tmp_path) -> None:
    dcpstore.save({"w": BIG}, tmp_path)
    (data,) = tmp_path.glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 4
    data.write_bytes(content)
    with pytest.raises(CorruptError, match="'w'"):
        dcpstore.read_tensor(tmp_path, "w")


@pytest.mark.parametrize(("most_bytes", "verbs"), [(1 << 20, ["get"]), (0, ["get", "get"])])
def test_the_store_is_asked_for_metadata_manifest_and_data_alone(
    tmp_path, most_bytes: int, verbs: list[str]
) -> None:
    config = dcpstore.WriteConfig(embed_manifest_bytes=most_bytes)
    dcpstore.save({"w": BIG}, tmp_path, config=config)
    stores = []

    def opener(*args, **options):
        stores.append(RecordingStore(open_store(*args, **options)))
        return stores[-1]

    with dcpstore.open_checkpoint(tmp_path, store_opener=opener) as checkpoint:
        checkpoint.read_tensor("w", 0)
    (store,) = stores
    assert [request.verb for request in store.requests] == [*verbs, "get_range"]
