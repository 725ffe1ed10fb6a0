"""What the field measured of saves (M4-M9, M13, M14, M18-M20, M22), repeated against ours."""

from __future__ import annotations

import json
import os
import pickle
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dcpstore.errors import AlreadyExistsError, NotFoundError, StoreError
from dcpstore.testing import Fault, MotoServer, StoreFault
from faults import processes
from faults.places import APART, Backend, Place, save_ids
from faults.states import (
    MIB,
    PART_BYTES,
    FailingPlanner,
    dies,
    failing,
    is_equal,
    load,
    loaded_step,
    save,
    state_at,
)


def assert_nothing_left(place: Place) -> None:
    assert place.names() == []
    assert place.open_uploads() == []


# M4-M6: a failed write -------------------------------------------------------------------


@pytest.mark.parametrize("object_bytes", [1, 256 * MIB])
def test_m4_an_error_in_the_third_item_leaves_no_object(
    any_place: Place, object_bytes: int
) -> None:
    state = {f"w{number}": torch.ones(MIB // 4) for number in range(8)}
    writer = any_place.writer(object_bytes=object_bytes)
    error = failing(ArithmeticError, save, state, writer, planner=FailingPlanner(2))
    assert "the device failed" in str(error)
    assert_nothing_left(any_place)


def test_m4_a_save_that_is_interrupted_at_the_keyboard_leaves_no_object() -> None:
    backend = Backend()
    planner = FailingPlanner(2, error=KeyboardInterrupt)
    failing(KeyboardInterrupt, save, state_at(1), backend.writer(object_bytes=1), planner=planner)
    assert backend.names() == []


def test_m5_an_error_after_a_multipart_upload_began_publishes_nothing(any_place: Place) -> None:
    state = {f"w{number}": torch.ones(PART_BYTES // 4) for number in range(4)}
    writer = any_place.writer(object_bytes=256 * MIB)
    planner = FailingPlanner(2, lambda: any_place.server.counts()["CreateMultipartUpload"])
    failing(ArithmeticError, save, state, writer, planner=planner)
    counts = any_place.server.counts()
    assert counts["CreateMultipartUpload"] == 1
    assert counts["AbortMultipartUpload"] == 1
    assert counts["CompleteMultipartUpload"] == 0
    assert_nothing_left(any_place)


@pytest.mark.parametrize("operation", ["CreateMultipartUpload", "UploadPart"])
def test_m5_a_refused_part_publishes_nothing(any_place: Place, operation: str) -> None:
    any_place.server.add_fault(Fault(operation, status=403, code="AccessDenied", times=-1))
    error = failing(StoreError, save, state_at(1, is_multipart=True), any_place.writer())
    assert error.denied
    assert_nothing_left(any_place)


@pytest.mark.parametrize("which", range(4))
def test_m6_an_upload_that_fails_in_a_background_thread_fails_the_save(
    any_place: Place, which: int
) -> None:
    any_place.server.add_fault(Fault("PutObject", status=403, code="AccessDenied", skip=which))
    error = failing(StoreError, save, state_at(1), any_place.writer(object_bytes=1))
    assert ".distcp" in error.message
    assert_nothing_left(any_place)


def test_m6_the_error_of_a_thread_is_raised_and_not_what_it_cancelled() -> None:
    backend = Backend()
    for which in range(6):
        fault = StoreFault("error", verb="put", key=".distcp", at=which)
        writer = backend.writer([fault], object_bytes=1, max_uploads=1)
        assert "scripted" in failing(StoreError, save, state_at(1), writer).message
        assert backend.names() == []


def test_m5_an_error_late_in_a_multipart_upload_is_raised_at_once(any_place: Place) -> None:
    """Even if the engine holds a short last part that it will never send."""
    state = {f"w{number}": torch.ones(PART_BYTES // 4) for number in range(4)}
    any_place.server.set_latency(0.1)
    planner = FailingPlanner(3, lambda: any_place.server.counts()["CreateMultipartUpload"])
    began = time.monotonic()
    failing(ArithmeticError, save, state, any_place.writer(), planner=planner)
    assert time.monotonic() - began < 30
    any_place.server.set_latency(0)
    assert_nothing_left(any_place)


def test_a_part_is_free_as_soon_as_it_is_stored(any_place: Place) -> None:
    store = any_place.writer()._folder.open()
    parts: list[weakref.ref[memoryview]] = []

    def give() -> Iterator[memoryview]:
        for number in range(3):
            deadline = time.monotonic() + 20
            while any(part() is not None for part in parts):
                assert time.monotonic() < deadline, f"part {number - 1} is still held"
                time.sleep(0.01)
            part = memoryview(bytes(PART_BYTES))
            parts.append(weakref.ref(part))
            yield part
            del part

    store.put_parts("x", give(), part_bytes=PART_BYTES, max_concurrency=4)
    assert len(any_place.get("x")) == 3 * PART_BYTES


def test_a_budget_of_two_parts_is_enough_for_any_object(any_place: Place) -> None:
    state = {"w": torch.ones(4 * PART_BYTES // 4), "v": torch.ones(2 * PART_BYTES // 4)}
    save(state, any_place.writer(budget_bytes=2 * PART_BYTES))
    found = {key: torch.zeros_like(value) for key, value in state.items()}
    load(found, any_place.reader())
    assert is_equal(found, state)


# M7: options -----------------------------------------------------------------------------


def test_m7_reset_to_another_url_keeps_every_option(any_place: Place) -> None:
    writer, reader = any_place.writer(), any_place.reader()
    options = any_place.server.storage_options()
    for step in (1, 2):
        url = f"{any_place.url}/step-{step}"
        save(state_at(step), writer, checkpoint_id=url)
        found = state_at(9)
        load(found, reader, checkpoint_id=url)
        assert found["step"] == step
    for one in (writer, reader, pickle.loads(pickle.dumps(writer))):
        one.reset(f"{any_place.url}/step-1")
        assert one._folder._options == options
        assert one.checkpoint_id == f"{any_place.url}/step-1"
    error = failing(AlreadyExistsError, save, state_at(3), writer)
    assert "overwrite=True" in error.message


# M8, M9: overwriting ---------------------------------------------------------------------


def test_m8_an_interrupted_overwrite_leaves_the_old_checkpoint_whole(any_place: Place) -> None:
    save(state_at(1), any_place.writer())
    before = any_place.content()
    for number in range(3):
        any_place.server.add_fault(Fault("PutObject", status=500, skip=number, times=-1))
        assert dies(save, state_at(2), any_place.writer(overwrite=True, object_bytes=1))
        any_place.server.heal()
        assert loaded_step(any_place.reader(), state_at(0)) == 1
        assert any_place.content() == before


def test_m9_an_overwrite_with_fewer_objects_leaves_no_orphan(any_place: Place) -> None:
    save(state_at(1, is_multipart=True), any_place.writer(object_bytes=1))
    assert len(any_place.data_keys()) > 5
    old = set(any_place.names())
    any_place.server.clear_requests()
    save(state_at(2), any_place.writer(overwrite=True, object_bytes=256 * MIB))

    assert len(any_place.data_keys()) == 1
    assert len(any_place.names()) == 2
    assert set(any_place.names()) & old == {".metadata"}
    counts = any_place.server.counts()
    assert counts["DeleteObjects"] + counts["DeleteObject"] == 1
    assert counts["CopyObject"] == 0
    assert counts["ListObjects"] == 3  # this test's own
    assert loaded_step(any_place.reader(), state_at(0)) == 2


# M13, M14: requests ----------------------------------------------------------------------

FORBIDDEN = {
    *("ListObjects", "ListMultipartUploads", "CopyObject", "UploadPartCopy", "DeleteObject"),
    *("DeleteObjects", "HeadObject", "HeadBucket", "CreateBucket"),
}


def test_m13_a_save_of_one_rank_gets_once_and_puts_each_object_once(any_place: Place) -> None:
    save(state_at(1, is_multipart=True), any_place.writer())
    requests = any_place.server.requests()
    assert Counter(request.operation for request in requests) == {
        "GetObject": 1,  # is there a checkpoint?
        "CreateMultipartUpload": 1,
        "UploadPart": 2,
        "CompleteMultipartUpload": 1,
        "PutObject": 5,  # 4 packed objects, .metadata
    }
    assert [request.key for request in requests if request.is_conditional] == [
        f"{any_place.name}/.metadata"
    ]
    assert requests[-1].key.endswith("/.metadata")


def test_m13_a_large_manifest_is_put_between_the_data_and_the_metadata(any_place: Place) -> None:
    save(state_at(1), any_place.writer(**APART))
    *data, manifest, metadata = [one.key.split("/")[-1] for one in any_place.server.requests()[1:]]
    assert all(key.endswith(".distcp") for key in data)
    assert manifest.startswith(".dcpstore-")
    assert metadata == ".metadata"


def test_m14_a_load_of_one_rank_gets_metadata_once_and_asks_nothing_else(any_place: Place) -> None:
    save(state_at(1, is_multipart=True), any_place.writer())
    any_place.server.clear_requests()
    loaded_step(any_place.reader(), state_at(0, is_multipart=True))
    requests = any_place.server.requests()
    names = Counter(request.key.split("/")[-1].split("-")[0] for request in requests)
    assert {request.operation for request in requests} == {"GetObject"}
    assert names[".metadata"] == 1
    assert len(requests) <= 1 + len(any_place.data_keys())


@pytest.fixture(scope="module")
def log_of_4_ranks(moto_server: MotoServer, tmp_path_factory: Any) -> dict[str, list[Any]]:
    """What the server was asked by a save and a load of 4 gloo ranks."""
    from faults.places import new_place

    moto_server.heal()
    place = new_place(moto_server)
    folder = tmp_path_factory.mktemp("ranks")
    processes.run_ranks(4, save_and_load_on_rank, place.server.endpoint_url, place.url, folder)
    return json.loads((folder / "log.json").read_text())


def save_and_load_on_rank(rank: int, endpoint_url: str, url: str, folder: Path) -> None:
    processes.save_and_load(rank, endpoint_url, url, folder)


def test_m13_a_save_of_4_ranks_lists_copies_deletes_and_creates_nothing(log_of_4_ranks) -> None:
    log = log_of_4_ranks["save"]
    counts = Counter(entry["operation"] for entry in log)
    assert not FORBIDDEN & counts.keys()
    assert counts["GetObject"] == 1
    written = {entry["key"] for entry in log if entry["operation"] == "PutObject"}
    assert len(written) == counts["PutObject"]
    assert sum(".distcp" in key for key in written) == 4
    assert counts == {"GetObject": 1, "PutObject": 5}


def test_m14_a_load_of_4_ranks_gets_metadata_once_per_rank(log_of_4_ranks) -> None:
    log = log_of_4_ranks["load"]
    assert {entry["operation"] for entry in log} == {"GetObject"}
    names = Counter(entry["key"].split("/")[-1].split("-")[0] for entry in log)
    assert names.pop(".metadata") == 4
    # Each rank opens its own object and nothing of rank 0's: its scalars come inline.
    assert sorted(names.values()) == [1, 1, 1, 1]


# M18-M20, M22 ----------------------------------------------------------------------------


def test_m18_m19_what_another_process_commits_is_seen_at_once(any_place: Place) -> None:
    def save_elsewhere(step: int, *, overwrite: bool) -> None:
        processes.run(
            processes.save_step, any_place.server.endpoint_url, any_place.url, step, overwrite
        )

    reader, other = any_place.reader(), any_place.writer()
    failing(AssertionError, load, state_at(0), reader)  # looked, and there was none
    save_elsewhere(1, overwrite=False)
    assert loaded_step(reader, state_at(0)) == 1  # M18
    assert "already holds" in failing(AlreadyExistsError, save, state_at(5), other).message
    save_elsewhere(2, overwrite=True)
    assert loaded_step(reader, state_at(0)) == 2  # M19
    save(state_at(3), any_place.writer(overwrite=True))
    save_elsewhere(4, overwrite=True)
    assert loaded_step(reader, state_at(0)) == 4
    assert len(save_ids(any_place.names())) == 1


def test_m20_a_mistyped_bucket_is_refused_and_not_created(any_place: Place) -> None:
    url = "s3://fualts/run/step-1"
    error = failing(NotFoundError, save, state_at(1), any_place.writer(url=url))
    for word in ("fualts", "no such bucket", "never creates"):
        assert word in error.message
    said = failing(AssertionError, load, state_at(0), any_place.reader(url=url))
    assert "fualts" in str(said)
    assert not any_place.server.client("fualts").exists()
    counts = any_place.server.counts()
    assert (counts["CreateBucket"], counts["HeadBucket"]) == (0, 0)


def test_m22_no_disk_is_flushed_for_an_object_store(any_place: Place, monkeypatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(os, "sync", lambda: calls.append("sync"))
    monkeypatch.setattr(os, "fsync", lambda _file: calls.append("fsync"))
    save(state_at(1, is_multipart=True), any_place.writer())
    save(state_at(2), any_place.writer(overwrite=True))
    assert loaded_step(any_place.reader(), state_at(0)) == 2
    assert calls == []
