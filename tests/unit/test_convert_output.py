"""Files of a conversion appear whole under their names, or not at all."""

from __future__ import annotations

import pytest
import torch

from dcpstore.convert.output import MIN_OUTPUT_BYTES, Outputs, part_bytes_for, reject_existing
from dcpstore.errors import AlreadyExistsError, CommitUnknownError, ConfigError, StoreError
from dcpstore.store import open_store
from dcpstore.store.base import limits_of
from dcpstore.store.folder import file_location
from dcpstore.testing import FaultyStore, LatencyStore, StoreFault

MIB = 1 << 20
BUDGET = 20 * MIB  # parts of 5 MiB, four of them


@pytest.fixture(params=["s3", "file", "memory"])
def store(request, tmp_path, s3_server):
    if request.param == "s3":
        s3_server.create_bucket("outputs")
        url = f"s3://outputs/{tmp_path.name}"
        opened = open_store(url, storage_options=s3_server.storage_options())
    elif request.param == "memory":
        opened = open_store(f"memory://{tmp_path.name}/f")
    else:
        opened = open_store(tmp_path / "f")
    yield opened
    opened.close()


def outputs(store, **more) -> Outputs:
    return Outputs(store, **{"budget_bytes": BUDGET, "largest_bytes": 100 * MIB, **more})


def exists(store, key="model.bin") -> bool:
    return any(info.key == key for info in store.list())


@pytest.mark.parametrize("num_bytes", [0, 10, 5 * MIB, 5 * MIB + 1, 23 * MIB + 7])
def test_a_file_of_any_size_is_what_was_written(store, num_bytes) -> None:
    content = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    with outputs(store) as out, out.write("model.bin") as stream:
        stream.write(content[: num_bytes // 3].numpy().data)
        stream.write_tensor(content[num_bytes // 3 :])
    assert bytes(store.get("model.bin").data) == content.numpy().tobytes()
    assert out.objects == {"model.bin": num_bytes}


@pytest.mark.parametrize("num_bytes", [10, 12 * MIB])
def test_an_error_while_writing_leaves_nothing(store, num_bytes) -> None:
    def write() -> None:
        with outputs(store) as out, out.write("model.bin") as stream:
            stream.write(bytes(num_bytes))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert not exists(store)


def test_an_interrupted_upload_is_aborted(s3_server) -> None:
    client = s3_server.create_bucket("output-abort")
    store = open_store("s3://output-abort", storage_options=s3_server.storage_options())
    with pytest.raises(KeyboardInterrupt), outputs(store) as out, out.write("m") as stream:
        stream.write(bytes(12 * MIB))
        raise KeyboardInterrupt
    assert client.keys() == []
    assert client.open_uploads() == []


def test_files_published_before_the_failure_are_taken_back(store) -> None:
    def write() -> None:
        with outputs(store) as out:
            with out.write("first.bin") as stream:
                stream.write(b"done")
            with out.write("second.bin") as stream:
                stream.write(b"half")
                raise ValueError

    with pytest.raises(ValueError):
        write()
    assert list(store.list()) == []


@pytest.mark.parametrize("num_bytes", [10, 12 * MIB])
def test_a_file_that_exists_is_kept_unless_told_otherwise(store, num_bytes) -> None:
    store.put("model.bin", b"theirs")
    reject_existing(store, "other")
    with pytest.raises(AlreadyExistsError, match="overwrite=True"):
        reject_existing(store, "model.bin")

    def write(**more) -> None:
        with outputs(store, **more) as out, out.write("model.bin") as stream:
            stream.write(bytes(num_bytes))

    with pytest.raises(AlreadyExistsError, match="overwrite=True"):
        write()
    assert bytes(store.get("model.bin").data) == b"theirs"
    write(overwrite=True)
    assert bytes(store.get("model.bin").data) == bytes(num_bytes)


def test_a_file_that_appears_during_a_long_upload_is_kept(store) -> None:
    def write() -> None:
        with outputs(store) as out, out.write("model.bin") as stream:
            stream.write(bytes(12 * MIB))
            store.put("model.bin", b"theirs")

    with pytest.raises(AlreadyExistsError):
        write()
    assert bytes(store.get("model.bin").data) == b"theirs"


def test_a_failed_overwrite_leaves_the_old_file(store) -> None:
    store.put("model.bin", b"old")

    def write() -> None:
        with outputs(store, overwrite=True) as out, out.write("model.bin") as stream:
            stream.write(bytes(12 * MIB))
            raise ValueError

    with pytest.raises(ValueError):
        write()
    assert bytes(store.get("model.bin").data) == b"old"


def test_a_create_whose_answer_was_lost_is_settled_by_looking(tmp_path) -> None:
    inner = open_store(f"memory://{tmp_path.name}")
    store = FaultyStore(inner, [StoreFault("lost_ack", "put")])
    with outputs(store) as out, out.write("model.bin") as stream:
        stream.write(b"once")
    assert bytes(inner.get("model.bin").data) == b"once"


def test_a_create_of_unknown_outcome_says_so_and_deletes_nothing(tmp_path) -> None:
    inner = open_store(tmp_path)
    script = [StoreFault("lost_ack", "put"), StoreFault("denied", "get", times=None)]
    out = outputs(FaultyStore(inner, script))
    with pytest.raises(CommitUnknownError) as caught, out, out.write("model.bin") as stream:
        stream.write(b"x" * 100)
    assert not caught.value.refused
    assert exists(inner)


def test_a_file_whose_creation_was_only_read_back_is_not_taken_back(tmp_path) -> None:
    """Somebody else may have put the same bytes."""
    inner = open_store(tmp_path)
    inner.put("model.bin", b"x" * 100)
    out = outputs(FaultyStore(inner, [StoreFault("error", "put")]))

    def write() -> None:
        with out:
            with out.write("model.bin") as stream:
                stream.write(b"x" * 100)
            with out.write("other.bin") as stream:
                raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError):
        write()
    assert exists(inner)


def test_a_part_that_fails_for_good_is_an_error_and_no_object(tmp_path) -> None:
    inner = open_store(f"memory://{tmp_path.name}")
    store = FaultyStore(inner, [StoreFault("denied", "put_parts", after_parts=3)])

    def write() -> None:
        with outputs(store) as out, out.write("model.bin") as stream:
            stream.write(bytes(40 * MIB))

    with pytest.raises(StoreError):
        write()
    assert list(inner.list()) == []


def test_memory_stays_within_the_budget(tmp_path) -> None:
    """However fast the caller writes, as many bytes are on their way as the budget says."""
    inner = LatencyStore(open_store(f"memory://{tmp_path.name}"), latency_s=0.01)
    with outputs(inner) as out, out.write("model.bin") as stream:
        for _ in range(30):
            stream.write(bytes(2 * MIB))
    assert out.peak_bytes <= BUDGET
    assert out.objects == {"model.bin": 60 * MIB}


def test_parts_grow_with_the_file_so_that_ten_thousand_are_enough() -> None:
    s3 = limits_of("s3")
    assert part_bytes_for(1, 256 * MIB, s3) == 16 * MIB
    assert part_bytes_for(1 << 40, 256 * MIB, s3) * 10_000 >= 1 << 40
    assert part_bytes_for(1, MIN_OUTPUT_BYTES, s3) == 5 * MIB
    with pytest.raises(ConfigError, match="budget_bytes"):
        part_bytes_for(1 << 40, 64 * MIB, s3)
    with pytest.raises(ConfigError, match="budget_bytes"):
        part_bytes_for(1, MIN_OUTPUT_BYTES - 1, s3)


@pytest.mark.parametrize(
    ("url", "folder", "key"),
    [
        ("s3://bucket/run/model.pt", "s3://bucket/run", "model.pt"),
        ("s3://bucket/model.pt", "s3://bucket", "model.pt"),
        ("gcs://bucket/a/b", "gs://bucket/a", "b"),
        ("memory://model.pt", "memory://", "model.pt"),
        (
            "abfs://box@account.dfs.core.windows.net/a/b",
            "abfs://box@account.dfs.core.windows.net/a",
            "b",
        ),
        ("/model.pt", "file:///", "model.pt"),
        ("/data/x/model.pt", "file:///data/x", "model.pt"),
    ],
)
def test_the_url_of_a_file_is_a_folder_and_a_key(url, folder, key) -> None:
    assert file_location(url) == (folder, key)
    if folder.startswith(("file", "memory")):
        open_store(folder).close()


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/", "memory://", "/"])
def test_a_url_that_names_no_file_is_an_error(url) -> None:
    with pytest.raises(ConfigError, match="names no file"):
        file_location(url)


def test_a_tensor_whose_memory_is_filled_again_is_written_as_it_was(tmp_path) -> None:
    inner = LatencyStore(open_store(f"memory://{tmp_path.name}"), latency_s=0.05)
    scratch = torch.zeros(6 * MIB, dtype=torch.uint8)
    with outputs(inner) as out, out.write("model.bin") as stream:
        for value in range(3):
            stream.write_tensor(scratch.fill_(value))
    found = torch.frombuffer(bytearray(inner.get("model.bin").data), dtype=torch.uint8)
    assert [part.unique().tolist() for part in found.split(6 * MIB)] == [[0], [1], [2]]
