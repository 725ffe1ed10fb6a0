"""Plausible mistakes: the message names what failed and what to do, and nothing was changed."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dcpstore import ObjectStoreReader, ObjectStoreWriter
from dcpstore.config import ReadConfig, WriteConfig
from dcpstore.errors import (
    AlreadyExistsError,
    CheckpointError,
    ConfigError,
    CorruptError,
    IncompatibleError,
    NotFoundError,
    StoreError,
)
from dcpstore.format.seal import read_seal
from dcpstore.testing import Fault, MotoServer
from faults.places import APART, ENGINES, Place, new_place
from faults.states import failing, is_equal, load, loaded_step, save, state_at

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
BOTH = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture
def place(s3_server: MotoServer) -> Place:
    return new_place(s3_server)


def small_state() -> dict[str, Any]:
    return {
        "model": {"w": torch.arange(6000.0).reshape(60, 100), "b": torch.ones(2000)},
        "step": 5,
    }


@pytest.fixture
def saved(place: Place) -> Place:
    """A checkpoint of `small_state`."""
    save(small_state(), place.writer())
    return place


def targets() -> dict[str, Any]:
    return {"model": {"w": torch.full((60, 100), -1.0), "b": torch.full((2000,), -1.0)}, "step": -1}


def fails_unchanged(
    kind: type[Any], place: Place, call: Callable[..., Any], *args: Any, **options: Any
) -> str:
    """Call, check that no object changed, and return the error's message."""
    before = place.content()
    error = failing(kind, call, *args, **options)
    assert place.content() == before
    return str(error)


def load_fails_untouched(
    kind: type[Any], place: Place, found: dict[str, Any], reader: Any = None
) -> str:
    """Load and check that neither objects nor target tensors changed."""
    copies = {key: value.clone() for key, value in flat_tensors(found).items()}
    message = fails_unchanged(kind, place, load, found, reader or place.reader())
    assert is_equal(flat_tensors(found), copies)
    return message


def flat_tensors(state: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    found = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found.update(flat_tensors(value, f"{prefix}{key}."))
        elif isinstance(value, torch.Tensor):
            found[f"{prefix}{key}"] = value
    return found


def assert_says(message: str, *words: str) -> None:
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"


# URLs and options -------------------------------------------------------------------------


@pytest.mark.parametrize("make", [ObjectStoreWriter, ObjectStoreReader])
@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s4://bucket/run", ("s4://", "s3://")),
        ("s3:/bucket/run", ("'s3:/bucket/run'", "write s3://bucket/run", "pathlib.Path")),
        (Path("s3://bucket/run"), ("'s3:/bucket/run'", "write s3://bucket/run", "pathlib.Path")),
        ("gs:/bucket/run", ("write gs://bucket/run",)),
        ("s3://", ("names no bucket", "s3://bucket/prefix")),
        ("s3:///run", ("names no bucket",)),
        ("", ("empty", "s3://bucket/prefix")),
        ("simplecache::s3://bucket/run", ("chained",)),
    ],
)
def test_a_wrong_url_is_refused_when_the_storage_is_made(make, url, words) -> None:
    with pytest.raises(ConfigError) as caught:
        make(url)
    assert_says(caught.value.message, *words)


def test_a_local_checkpoint_id_for_a_remote_writer_is_refused(place: Place) -> None:
    message = fails_unchanged(
        ConfigError, place, save, small_state(), place.writer(), checkpoint_id="step-7"
    )
    assert_says(message, "'step-7'", "local path", f"{place.url}/step-7")


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"secert": SECRET}, ("'secert'",)),
        ({"endpoint": "http://x"}, ("'endpoint'",)),
        ({"client_kwargs": {"regoin_name": SECRET}}, ("regoin_name",)),
        ({"client_kwargs": SECRET}, ("client_kwargs",)),
        ({"config_kwargs": {"retires": SECRET}}, ("retires",)),
        ({"key": "a", "secret": SECRET, "banana": SECRET}, ("'banana'",)),
    ],
)
def test_an_unknown_storage_option_is_named_without_its_value(engine, option, words) -> None:
    def use(kind: Any, config: Any) -> None:
        storage = kind("s3://bucket/run", storage_options=option, config=config)
        storage._folder.open().get("x")

    for kind, config in (
        (ObjectStoreWriter, WriteConfig(engine=engine)),
        (ObjectStoreReader, ReadConfig(engine=engine, max_attempts=1)),
    ):
        error = failing(ConfigError, use, kind, config)
        assert_says(error.message, *words)
        assert SECRET not in everything_about(error)
        if "secert" in option and engine != "obstore":
            assert_says(error.message, "did you mean 'secret'?")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (lambda: WriteConfig(part_bytes=1 << 20), ("part_bytes=1048576", "5 MiB")),
        (lambda: WriteConfig(budget_bytes=1 << 20), ("budget_bytes", "two parts")),
        (lambda: WriteConfig(max_uploads=0), ("max_uploads=0", "at least 1")),
        (lambda: WriteConfig(checksum_block_bytes=5000), ("checksum_block_bytes", "power of two")),
        (lambda: ReadConfig(request_bytes=1 << 30), ("budget_bytes", "request_bytes")),
        (lambda: ReadConfig(casts="maybe"), ("casts='maybe'", "'widening'")),
        (lambda: ReadConfig(max_attempts=0), ("max_attempts=0",)),
    ],
)
def test_a_knob_out_of_range_says_what_it_may_be(config, words) -> None:
    with pytest.raises(ConfigError) as caught:
        config()
    assert_says(caught.value.message, *words)


def test_an_unknown_engine_is_refused(place: Place) -> None:
    error = failing(ConfigError, save, small_state(), place.writer(engine="boto"))
    assert_says(error.message, "'boto'", "'obstore'", "'fsspec'")


# Credentials, endpoints, buckets ----------------------------------------------------------


@BOTH
def test_no_credentials_says_where_to_give_them(engine: str, place: Place, monkeypatch) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    options = {"endpoint_url": place.server.endpoint_url}
    writer = ObjectStoreWriter(
        place.url, storage_options=options, config=WriteConfig(engine=engine, max_attempts=1)
    )
    message = fails_unchanged(StoreError, place, save, small_state(), writer)
    assert_says(message, place.url, "no credentials", "storage_options", "profile")
    reader = ObjectStoreReader(
        place.url, storage_options=options, config=ReadConfig(engine=engine, max_attempts=1)
    )
    said = str(failing(AssertionError, load, targets(), reader))
    assert_says(said, "no credentials", "storage_options")


@BOTH
@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied"])
def test_wrong_credentials_say_so(engine: str, place: Place, code: str) -> None:
    place.engine = engine
    place.server.add_fault(Fault("GetObject", status=403, code=code, times=-1))
    place.server.add_fault(Fault("PutObject", status=403, code=code, times=-1))
    error = failing(StoreError, save, small_state(), place.writer())
    assert error.denied
    assert_says(error.message, place.url, "access is denied", "credentials")
    said = str(failing(AssertionError, load, targets(), place.reader()))
    assert_says(said, place.url, ".metadata", "credentials")
    place.server.heal()
    assert place.names() == []


@BOTH
def test_an_endpoint_where_nobody_listens_fails_in_bounded_time(engine: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"key": "k", "secret": SECRET, "endpoint_url": f"http://127.0.0.1:{port}"}
    config = {"engine": engine, "max_attempts": 3, "retry_deadline_s": 60.0}
    began = time.monotonic()
    writer = ObjectStoreWriter(
        "s3://bucket/run", storage_options=options, config=WriteConfig(**config)
    )
    error = failing(StoreError, save, small_state(), writer)
    reader = ObjectStoreReader(
        "s3://bucket/run", storage_options=options, config=ReadConfig(**config)
    )
    said = failing(AssertionError, load, targets(), reader)
    assert time.monotonic() - began < 60
    for message in (error.message, str(said)):
        assert_says(message, "s3://bucket/run", ".metadata", "gave up after 3 attempts")
        assert SECRET not in message


@BOTH
def test_a_missing_bucket_is_named(engine: str, place: Place) -> None:
    place.engine = engine
    url = "s3://no-such-bucket/run"
    message = fails_unchanged(NotFoundError, place, save, small_state(), place.writer(url=url))
    assert_says(message, "no-such-bucket", "no such bucket", "Check the URL")
    said = str(failing(AssertionError, load, targets(), place.reader(url=url)))
    assert_says(said, "no-such-bucket", "Check the URL")
    assert not place.server.client("no-such-bucket").exists()


# Checkpoints there and not there ----------------------------------------------------------


def test_no_checkpoint_at_the_url_says_what_was_looked_for(saved: Place) -> None:
    reader = saved.reader(url=f"{saved.url}/step-8")
    said = load_fails_untouched(AssertionError, saved, targets(), reader)
    assert_says(said, f"no checkpoint at {saved.url}/step-8", ".metadata", "Check the URL")
    with pytest.raises(NotFoundError, match="no checkpoint at"):
        reader.read_metadata()


def test_a_checkpoint_that_is_there_is_not_overwritten_unasked(saved: Place) -> None:
    saved.server.clear_requests()
    message = fails_unchanged(AlreadyExistsError, saved, save, state_at(1), saved.writer())
    assert_says(message, saved.url, "overwrite=True", "Nothing was written")
    assert "PutObject" not in saved.server.counts()


# Targets that do not fit ------------------------------------------------------------------


def test_another_shape_is_named_with_both_shapes(saved: Place) -> None:
    found = targets()
    found["model"]["w"] = torch.full((60, 99), -1.0)
    saved.server.clear_requests()
    said = load_fails_untouched(Exception, saved, found)
    assert_says(said, "model.w", "[60, 100]", "[60, 99]")


def test_another_dtype_is_named_with_both_dtypes_and_the_way_out(saved: Place) -> None:
    found = targets()
    found["model"]["w"] = torch.full((60, 100), -1, dtype=torch.int64)
    said = load_fails_untouched(IncompatibleError, saved, found)
    assert_says(said, "'model.w'", "float32", "int64", "ReadConfig(casts='any')")
    assert_says(said, "nothing was loaded")


def test_every_target_that_does_not_fit_is_named_up_to_ten(place: Place) -> None:
    save({f"w{n:02d}": torch.ones(600) for n in range(14)}, place.writer())
    found = {f"w{n:02d}": torch.full((600,), -1, dtype=torch.int32) for n in range(14)}
    said = load_fails_untouched(IncompatibleError, place, found)
    assert_says(said, "14 target(s)", "'w00'", "'w09'", "and 4 more")


def test_a_missing_key_is_named(saved: Place) -> None:
    found = targets()
    found["model"]["head"] = torch.full((3,), -1.0)
    said = load_fails_untouched(Exception, saved, found)
    assert_says(said, "model.head")


def test_a_target_on_the_meta_device_is_named(saved: Place) -> None:
    found = {"model": {"w": torch.empty(60, 100, device="meta")}}
    with torch.device("cpu"):
        try:
            load(found, saved.reader())
        except BaseException as wrapped:
            said = str(wrapped)
            assert_says(said, "meta")
        else:  # DCP gave it memory first
            assert torch.equal(found["model"]["w"], small_state()["model"]["w"])


# Damage -----------------------------------------------------------------------------------


def data_key_of(place: Place, fqn: str) -> str:
    items = place.manifest().items
    return next(item.key for one, item in items.items() if one.fqn == fqn)


def test_a_changed_object_is_named_with_its_range(saved: Place) -> None:
    key = data_key_of(saved, "model.w")
    saved.client.flip_bit(f"{saved.name}/{key}", 2000)
    error = failing(CorruptError, load, targets(), saved.reader())
    assert (error.key, error.fqn) == (key, "model.w")
    assert_says(error.message, saved.url, key, "bytes [", "'model.w'", "CRC32C")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("left_bytes", [0, 1, 1000])
def test_a_truncated_object_is_named_with_its_length(
    saved: Place, left_bytes: int, engine: str
) -> None:
    key = data_key_of(saved, "model.w")
    saved.engine = engine
    saved.client.truncate(f"{saved.name}/{key}", left_bytes)
    error = failing(CorruptError, load, targets(), saved.reader())
    assert error.key == key
    assert_says(error.message, saved.url, key, f"ends at byte {left_bytes}", "truncated")


@BOTH
def test_a_deleted_object_is_named(saved: Place, engine: str) -> None:
    key = data_key_of(saved, "model.w")
    saved.engine = engine
    saved.client.delete(f"{saved.name}/{key}")
    error = failing(NotFoundError, load, targets(), saved.reader())
    assert_says(error.message, saved.url, key, "deleted", "another save", "Load again")


@pytest.fixture
def saved_apart(place: Place) -> Place:
    """A checkpoint of `small_state` whose manifest is an object of its own."""
    save(small_state(), place.writer(**APART))
    return place


def test_a_deleted_manifest_is_named(saved_apart: Place) -> None:
    saved = saved_apart
    (name,) = [name for name in saved.names() if name.startswith(".dcpstore-")]
    saved.client.delete(f"{saved.name}/{name}")
    said = load_fails_untouched(AssertionError, saved, targets())
    assert_says(said, saved.url, name, "gone")


@pytest.mark.parametrize("which", [".dcpstore-", ".metadata"])
def test_a_changed_manifest_or_metadata_is_named(saved_apart: Place, which: str) -> None:
    saved = saved_apart
    (name,) = [name for name in saved.names() if name.startswith(which)]
    saved.client.flip_bit(f"{saved.name}/{name}", 30)
    said = load_fails_untouched(AssertionError, saved, targets())
    assert_says(said, saved.url, name)


def test_a_changed_manifest_in_the_metadata_is_named_with_its_range(saved: Place) -> None:
    seal = read_seal(memoryview(saved.get(".metadata")))
    assert seal is not None
    start, end = seal.manifest_span
    saved.client.flip_bit(f"{saved.name}/.metadata", end - 1)
    said = load_fails_untouched(AssertionError, saved, targets())
    assert_says(said, saved.url, ".metadata", "manifest", f"bytes [{start}, {end})")


def test_metadata_that_is_something_else_is_named(saved: Place) -> None:
    for data in (b"", b"hello", b'{"a": 1}', pickle.dumps({"a": 1})):
        saved.put_all({".metadata": data})
        said = load_fails_untouched(AssertionError, saved, targets())
        assert_says(said, ".metadata")


def test_a_malicious_metadata_is_named_and_not_run(saved: Place, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    command = f"touch {canary}".encode()
    text = b"X" + len(command).to_bytes(4, "little") + command
    saved.put_all({".metadata": b"\x80\x02cos\nsystem\n(" + text + b"tR."})
    said = load_fails_untouched(AssertionError, saved, targets())
    assert_says(said, ".metadata", "os.system", "was not run", "allow_pickle=True")
    assert not canary.exists()


# Permissions ------------------------------------------------------------------------------


@BOTH
def test_without_permission_to_delete_a_save_succeeds_and_says_what_is_left(
    place: Place, engine: str, caplog: Any
) -> None:
    place.engine = engine
    save(state_at(1), place.writer())
    old = {name for name in place.names() if name != ".metadata"}
    for operation in ("DeleteObjects", "DeleteObject"):
        place.server.add_fault(Fault(operation, status=403, code="AccessDenied", times=-1))
    with caplog.at_level(logging.WARNING, "dcpstore"):
        save(state_at(2), place.writer(overwrite=True))
    assert loaded_step(place.reader(), state_at(0)) == 2
    assert old < set(place.names())
    assert_says(caplog.text, place.url, f"{len(old)} object(s)", "the overwritten checkpoint")
    assert_says(caplog.text, min(old), "delete them when you may")


def test_without_permission_to_delete_a_failed_save_says_what_is_left(
    place: Place, caplog: Any
) -> None:
    place.server.add_fault(Fault("DeleteObjects", status=403, code="AccessDenied", times=-1))
    place.server.add_fault(Fault("PutObject", status=403, skip=2, times=-1, code="AccessDenied"))
    with caplog.at_level(logging.WARNING, "dcpstore"):
        error = failing(StoreError, save, state_at(1), place.writer(object_bytes=1))
    assert error.denied
    left = place.data_keys()
    assert len(left) == 2
    assert_says(caplog.text, place.url, "this failed save")
    assert ".metadata" not in place.names()


@BOTH
def test_a_denied_put_of_an_object_is_named(place: Place, engine: str) -> None:
    place.engine = engine
    place.server.add_fault(Fault("PutObject", status=403, code="AccessDenied", times=-1))
    error = failing(StoreError, save, state_at(1), place.writer())
    assert_says(error.message, place.url, ".distcp", "access is denied", "policy")
    assert place.names() == []


def test_without_permission_to_list_a_first_save_and_a_load_work(place: Place) -> None:
    """S3 then answers 403 where it would answer 404."""
    fault = Fault("GetObject", status=403, code="AccessDenied", key=f"{place.name}/.metadata")
    place.server.add_fault(fault)
    save(state_at(1), place.writer())
    assert loaded_step(place.reader(), state_at(0)) == 1


# Secrets ----------------------------------------------------------------------------------


def everything_about(error: BaseException) -> str:
    """All that a log, a debugger or another rank would show of an error."""
    parts = [str(error), repr(error), repr(error.__dict__)]
    parts += traceback.format_exception(error)
    if isinstance(error, CheckpointError):
        parts.append(repr(pickle.loads(pickle.dumps(error))))
    return "\n".join(parts)


@pytest.mark.parametrize(
    "url",
    [
        f"s3://AKIA:{SECRET}@bucket/run",
        f"s3://AKIA:{SECRET.replace('/', '')}@bucket/run",
        f"s3:/AKIA:{SECRET.replace('/', '')}@bucket/run",
        f"s3:/AKIA:{SECRET}@bucket/run",
        f"s4://AKIA:{SECRET}@bucket/run",
        f"simplecache::s3://AKIA:{SECRET}@bucket/run",
        f"https://AKIA:{SECRET}@host/run",
        f"ftp://me:{SECRET.replace('/', '')}@host/run",
    ],
)
def test_a_secret_in_a_url_is_not_repeated(url: str) -> None:
    def use() -> str:
        storage = ObjectStoreReader(url)
        shown = f"{storage!r} {storage.checkpoint_id} {storage._folder.open()!r}"
        storage.close() if hasattr(storage, "close") else None
        return shown

    try:
        shown = use()
    except CheckpointError as error:
        shown = everything_about(error)
    for secret in (SECRET, SECRET.replace("/", ""), SECRET.split("/")[1]):
        assert secret not in shown


@BOTH
def test_secrets_appear_in_no_message_repr_log_or_object(
    s3_server: MotoServer, engine: str, caplog: Any
) -> None:
    place = new_place(s3_server, engine)
    options = {**s3_server.storage_options(), "secret": SECRET, "token": f"{SECRET}-token"}
    write = WriteConfig(engine=engine, max_attempts=1)
    read = ReadConfig(engine=engine, max_attempts=1)
    writer = ObjectStoreWriter(place.url, storage_options=options, config=write)
    reader = ObjectStoreReader(place.url, storage_options=options, config=read)
    shown: list[str] = []
    with caplog.at_level(logging.DEBUG, "dcpstore"):
        save(small_state(), writer)
        load(targets(), reader)
        for fault in (
            Fault(status=403, code="SignatureDoesNotMatch", times=-1),
            Fault(status=500, code="InternalError", times=-1),
            Fault(kind="drop", times=-1),
        ):
            s3_server.add_fault(fault)
            for call, storage in ((save, writer), (load, reader)):
                shown.append(everything_about(failing(Exception, call, targets(), storage)))
            s3_server.heal()
        for storage in (writer, reader):
            store = storage._folder.open()
            shown += [repr(storage), str(storage), repr(storage._folder), repr(store)]
            shown += [repr(vars(store)), storage.checkpoint_id]
            one = getattr(store, "inner", store)
            while getattr(one, "inner", None) is not None:
                one = one.inner
            shown += [repr(one), repr(getattr(one, "_clients", None))]
    shown += [record.getMessage() for record in caplog.records if "dcpstore" in record.name]
    shown += [repr(place.get(name)) for name in place.names()]
    for text in shown:
        assert SECRET not in text
    # The options do travel with a pickle, as a spawned process needs them.
    copy = pickle.loads(pickle.dumps(reader))
    found = targets()
    load(found, copy)
    assert is_equal(found, small_state())
