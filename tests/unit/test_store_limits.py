"""What a store refuses by its size is refused before the first byte; small limits show it."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException

import dcpstore
from dcpstore import ObjectStoreReader, ObjectStoreWriter, SavePlanner
from dcpstore.config import WriteConfig
from dcpstore.convert.output import Outputs
from dcpstore.errors import ConfigError
from dcpstore.store import open_store
from dcpstore.store.base import NO_LIMITS, ByteRange, CopySource, StoreLimits, limits_of
from dcpstore.store.engine import Asked
from dcpstore.store.folder import parse_location
from dcpstore.store.fsspec_engine import FsspecStore
from dcpstore.store.obstore_engine import ObstoreStore
from dcpstore.store.ranges import join
from dcpstore.store.retry import RetryPolicy
from dcpstore.store.s3fs_engine import S3fsStore
from dcpstore.testing import RecordingStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
MIB = 1 << 20
TIB = 1 << 40
NOWHERE = {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:9"}


# Keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "key", "fits"),
    [
        ("s3", "k" * 1024, True),
        ("s3", "k" * 1025, False),
        ("s3", "\u00fc" * 512, True),
        ("s3", "\u00fc" * 512 + "k", False),
        ("gs", "k" * 1025, False),
        ("az", "\u00fc" * 1024, True),
        ("az", "\u00fc" * 1025, False),
        ("file", "a/" + "n" * 255, True),
        ("file", "a/" + "n" * 256, False),
        ("file", "/".join(["n" * 252] * 16), True),
        ("file", "\U0001f600" * 63, True),
        ("file", "\U0001f600" * 64, False),
        ("file", "/".join(["n" * 252] * 17), False),
        ("memory", "k" * 9999, True),
    ],
)
def test_a_key_is_as_long_as_its_store_takes(scheme: str, key: str, fits: bool) -> None:
    if fits:
        limits_of(scheme).check_key(key)
        return
    with pytest.raises(ConfigError, match="too long"):
        limits_of(scheme).check_key(key)


def test_the_root_counts() -> None:
    limits = limits_of("s3").below("run/")
    limits.check_key("k" * 1020)
    with pytest.raises(ConfigError, match="1021 bytes, and 1020 may be"):
        limits.check_key("k" * 1021)


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_a_long_key_is_refused_before_any_request(engine: Any) -> None:
    store = open_store("s3://b/run", storage_options=NOWHERE, engine=engine)
    key = "k" * 1021
    for call in (
        lambda: store.put(key, b"1"),
        lambda: store.get(key),
        lambda: store.head(key),
        lambda: store.delete_many([key]),
        lambda: store.put_parts(key, [b"1" * 5 * MIB] * 2, part_bytes=5 * MIB, max_concurrency=1),
    ):
        with pytest.raises(ConfigError, match="1021 bytes, and 1020 may be"):
            call()


# Parts and objects ---------------------------------------------------------------------------

SMALL = StoreLimits(max_parts=3, max_part_bytes=40, max_put_bytes=50, max_object_bytes=100)


def engines() -> dict[str, Any]:
    memory, s3 = parse_location("memory://limited"), parse_location("s3://b/run")
    return {
        "obstore": ObstoreStore(memory, limits=SMALL),
        "fsspec": FsspecStore(memory, limits=SMALL),
        "s3fs": S3fsStore(s3, NOWHERE, limits=SMALL, part_policy=RetryPolicy(1)),
    }


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_a_stream_of_too_many_parts_is_refused_and_leaves_nothing(engine: str) -> None:
    store = engines()[engine]
    with pytest.raises(ConfigError, match="more than 3 parts"):
        store.put_parts("a", [b"1" * 10] * 4, part_bytes=10, max_concurrency=2)
    assert list(store.list()) == []
    store.put_parts("a", [b"1" * 10] * 3, part_bytes=10, max_concurrency=2)
    assert store.head("a").size_bytes == 30
    store.delete_many(["a"])


@pytest.mark.parametrize("engine", ["obstore", "fsspec", "s3fs"])
def test_what_is_too_large_for_one_request_is_refused_without_one(engine: str) -> None:
    store = engines()[engine]
    with pytest.raises(ConfigError, match="51 bytes, and the store takes 50"):
        store.put("a", b"1" * 51)
    with pytest.raises(ConfigError, match="a part of 41 bytes"):
        store.put_parts("a", [b"1" * 41] * 2, part_bytes=41, max_concurrency=1)


@pytest.mark.parametrize("engine", ["obstore", "fsspec", "s3fs"])
def test_limits_travel_with_a_store(engine: str) -> None:
    store = engines()[engine]
    assert pickle.loads(pickle.dumps(store)).capabilities.limits == store.capabilities.limits
    assert store.capabilities.limits.max_parts == 3


def test_parts_grow_as_far_as_the_store_takes_them() -> None:
    limits = limits_of("s3")
    assert limits.part_bytes_for(156 << 30, 16 * MIB) == 16 * MIB
    assert limits.part_bytes_for(200 << 30, 16 * MIB) * 10_000 >= 200 << 30
    assert limits.part_bytes_for(5 * TIB, 16 * MIB) < 600 * MIB
    with pytest.raises(ConfigError, match="larger than the 5497558138880 bytes"):
        limits.part_bytes_for(5 * TIB + 1, 16 * MIB)
    assert limits_of("az").part_bytes_for(4 * TIB, 16 * MIB) * 50_000 >= 4 * TIB
    assert NO_LIMITS.part_bytes_for(9 * TIB, 16 * MIB) == 16 * MIB
    # gcsfs sends one chunk behind another, in any number.
    gs = FsspecStore(parse_location("gs://b/run"), {"token": "anon"})
    assert gs.capabilities.limits.max_parts is None


def test_a_copy_by_the_provider_takes_no_more_parts_than_there_may_be() -> None:
    ranges = []

    class Copying(S3fsStore):
        copy_part_bytes = 10_000

        def send(
            self, asked: Asked, operation: str, most_s: float | None = None, **more: Any
        ) -> dict[str, Any]:
            if operation == "upload_part_copy":
                start, _, last = more["CopySourceRange"].removeprefix("bytes=").partition("-")
                ranges.append(ByteRange(int(start), int(last) + 1))
            return {"UploadId": "u", "CopyPartResult": {"ETag": "e"}}

    limits = StoreLimits(max_parts=3, max_part_bytes=1 << 20)
    store = Copying(parse_location("s3://b"), limits=limits)
    store.copy_from(CopySource("b", "old", 100_000), "k")
    assert join(ranges) == [ByteRange(0, 100_000)]
    assert len(ranges) == 3
    assert max(one.num_bytes for one in ranges) <= 1 << 20


# Saves and conversions -----------------------------------------------------------------------


class Limited(RecordingStore):
    """A store with limits of its own, that notes the sizes of parts."""

    def __init__(self, limits: StoreLimits) -> None:
        super().__init__(FsspecStore(parse_location("memory://saves"), limits=limits))
        self.part_bytes: list[int] = []

    def put_parts(self, key: str, parts: Any, *, part_bytes: int, max_concurrency: int) -> Any:
        self.part_bytes.append(part_bytes)
        return super().put_parts(key, parts, part_bytes=part_bytes, max_concurrency=max_concurrency)


@pytest.fixture
def limited() -> Any:
    made: list[Limited] = []

    def make(**limits: int) -> Limited:
        made.append(Limited(StoreLimits(**limits)))
        return made[0]

    yield make
    for store in made:
        store.delete_many([found.key for found in store.list()])


def save(store: Limited, state: dict[str, Any], planner: Any, **config: Any) -> None:
    writer = ObjectStoreWriter(
        "memory://saves", config=WriteConfig(**config), store_opener=lambda *_a, **_o: store
    )
    dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)


def test_parts_of_a_save_grow_so_that_a_large_tensor_fits(limited: Any) -> None:
    store = limited(max_parts=3)
    state = {"small": torch.ones(5), "large": torch.arange(6 * MIB, dtype=torch.int32)}
    save(store, state, DefaultSavePlanner(), part_bytes=5 * MIB)
    assert store.part_bytes
    assert all(24 * MIB <= 3 * part_bytes < 36 * MIB for part_bytes in store.part_bytes)
    found = {"small": torch.zeros(5), "large": torch.zeros(6 * MIB, dtype=torch.int32)}
    dcp.load(found, storage_reader=ObjectStoreReader("memory://saves"), no_dist=True)
    assert all(torch.equal(found[key], state[key]) for key in state)


def test_an_attachment_that_fits_nowhere_is_refused_by_its_name(
    limited: Any, tmp_path: Path
) -> None:
    store = limited(max_object_bytes=50 * MIB)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(60 * MIB)
    writer = ObjectStoreWriter("memory://saves", store_opener=lambda *_a, **_o: store)
    given = {"huge.bin": tmp_path / "large"}
    with pytest.raises(
        ConfigError, match=r"'huge\.bin' cannot be saved .*an attachment as several"
    ):
        dcpstore.save({"small": torch.ones(5)}, storage_writer=writer, attachments=given)
    assert "put" not in store.counts


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_parts": 3}, "budget_bytes must hold two"),
        ({"max_parts": 9, "max_part_bytes": 6 * MIB}, "a part of .* is larger than the"),
        ({"max_object_bytes": 50 * MIB}, "an object of about .* is larger than the"),
    ],
)
def test_a_tensor_that_fits_nowhere_is_refused_before_the_first_byte(
    limited: Any, limits: dict[str, int], words: str
) -> None:
    store = limited(**limits)
    state = {"small": torch.ones(5), "model.large": torch.zeros(60 * MIB, dtype=torch.uint8)}
    config = {"part_bytes": 5 * MIB, "budget_bytes": 20 * MIB, "object_bytes": 10 * MIB}
    with pytest.raises(CheckpointException) as caught:
        save(store, state, DefaultSavePlanner(), **config)
    message = str(caught.value)
    assert "'model.large' cannot be saved" in message
    assert "SavePlanner(max_item_bytes" in message
    assert re.search(words, message)
    assert not [one for one in store.requests if one.verb in ("put", "put_parts")]
    save(store, state, SavePlanner(max_item_bytes=10 * MIB), **config)


def test_a_save_whose_keys_are_too_long_is_refused_before_the_first_byte(limited: Any) -> None:
    store = limited(max_key_bytes=30)
    with pytest.raises(CheckpointException, match="too long"):
        save(store, {"a": torch.ones(5)}, DefaultSavePlanner())
    assert {one.verb for one in store.requests} <= {"get"}


def test_a_conversion_chooses_parts_that_its_store_takes(limited: Any) -> None:
    store = limited(max_parts=4, max_object_bytes=90 * MIB)
    outputs = Outputs(store, budget_bytes=64 * MIB, largest_bytes=80 * MIB)
    with outputs, outputs.write("a.bin") as stream:
        for _ in range(80):
            stream.write(bytes(MIB))
    assert store.part_bytes == [20 * MIB]
    with pytest.raises(ConfigError, match="larger than the"):
        Outputs(store, budget_bytes=64 * MIB, largest_bytes=91 * MIB)
