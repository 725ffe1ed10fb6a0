"""The models answer as the stores do that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from campaign.models import (
    AzureModel,
    Died,
    FileModel,
    GcsModel,
    S3Model,
    World,
    fsspec_model,
    open_model,
)
from campaign.schedule import ACTED, LATE, REFUSED, VERBS, Fault, Schedule
from dcpstore.errors import CheckpointError, NotFoundError, StoreError
from dcpstore.store import Store
from dcpstore.store.folder import parse_location
from dcpstore.store.fsspec_engine import FsspecStore
from dcpstore.store.obstore_engine import ObstoreStore
from dcpstore.store.s3fs_engine import S3fsStore
from dcpstore.testing import conformance

MODELS: dict[str, Callable[[], Store]] = {
    "s3": S3Model,
    "s3, bare ETags": lambda: S3Model(is_bare=True),
    "gcs": GcsModel,
    "azure": AzureModel,
    "file": FileModel,
    "file through fsspec": lambda: FileModel(is_fsspec=True),
    "fsspec": lambda: fsspec_model(World(), "A0"),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_a_model_does_what_every_store_must(name: str, check: Callable[[Store], None]) -> None:
    check(MODELS[name]())


@pytest.mark.parametrize(
    ("model", "engine"),
    [
        (S3Model(), ObstoreStore(parse_location("s3://bucket/run"), {"anon": True})),
        (S3Model(is_s3fs=True), S3fsStore(parse_location("s3://bucket/run"))),
        (GcsModel(), ObstoreStore(parse_location("gs://bucket/run"), {"token": "anon"})),
        (AzureModel(), ObstoreStore(parse_location("az://box/run"), {"account_name": "mine"})),
        (FileModel(), ObstoreStore(parse_location("/run"))),
        (FileModel(is_fsspec=True), FsspecStore(parse_location("/run"))),
    ],
    ids=["s3", "s3fs", "gcs", "azure", "file", "file through fsspec"],
)
def test_a_model_promises_what_the_engine_does(model: Store, engine: Store) -> None:
    """Receiving into the caller's memory is a short cut that changes no semantics.

    Models hold little, and have no limits.
    """
    ours = model.capabilities
    promised = replace(engine.capabilities, fills_memory=ours.fills_memory, limits=ours.limits)
    assert ours == promised


def put_under(transport: str, kind: str) -> tuple[World, BaseException | None]:
    """Put one object under a fault, and settle what is late."""
    fault = Fault(kind, "A0", "data", 0)
    schedule = Schedule("first_save", transport=transport, faults=(fault,))
    world = World(schedule)
    raised: BaseException | None = None
    try:
        open_model(world, schedule, "A0").put("__0_0.0.distcp", b"data")
    except BaseException as error:
        raised = error
    assert world.script.fired[fault] == 1
    return world, raised


@pytest.mark.parametrize("transport", VERBS)
def test_what_is_refused_or_broken_off_is_not_done(transport: str) -> None:
    for kind in (*REFUSED, "cut-request", "stall", "killed"):
        world, raised = put_under(transport, kind)
        world.settle()
        assert not world.objects, kind
        assert isinstance(raised, Died if kind == "killed" else CheckpointError), kind


@pytest.mark.parametrize("transport", VERBS)
def test_what_acts_is_done_whatever_is_answered(transport: str) -> None:
    for kind in (*ACTED, "stall-did", "cut-answer", "killed-did"):
        world, raised = put_under(transport, kind)
        assert len(world.objects) == 1, kind
        assert isinstance(raised, Died if kind == "killed-did" else CheckpointError), kind


@pytest.mark.parametrize("transport", [one for one in VERBS if one != "sim-file"])
def test_what_acts_late_is_not_there_before(transport: str) -> None:
    for kind in LATE:
        world, raised = put_under(transport, kind)
        assert not world.objects, kind
        assert isinstance(raised, StoreError), kind
        assert raised.retryable, kind
        world.settle()
        assert len(world.objects) == 1, kind


def test_a_file_that_is_to_be_renamed_late_is_gone_once_its_writer_gave_up() -> None:
    world, raised = put_under("sim-file", "late-end")
    assert isinstance(raised, StoreError)
    world.settle()
    assert not world.objects
    assert not world.unfinished


def test_a_killed_writer_leaves_its_temporary_file() -> None:
    world, raised = put_under("sim-file", "killed")
    assert isinstance(raised, Died)
    assert len(world.unfinished) == 1


@pytest.mark.parametrize("transport", VERBS)
def test_a_store_that_stalls_lets_time_pass(transport: str) -> None:
    world = World()
    assert put_under(transport, "stall")[0].clock() > world.clock() + 60


@pytest.mark.parametrize("transport", VERBS)
def test_what_exists_may_be_answered_404_once(transport: str) -> None:
    schedule = Schedule("reader", transport=transport, faults=(Fault("absent", "R0", "any", 0),))
    store = open_model(world := World(schedule), schedule, "R0")
    world.keep("object", b"data", "1")
    with pytest.raises(NotFoundError):
        store.get("object")
    assert store.get("object").data == b"data"


@pytest.mark.parametrize("transport", VERBS)
@pytest.mark.parametrize("number", [0, 1])
def test_an_answer_that_is_cut_is_short_or_an_error(number: int, transport: str) -> None:
    fault = Fault("cut-answer", "R0", "get", number)
    schedule = Schedule("reader", transport=transport, faults=(fault,))
    store = open_model(world := World(schedule), schedule, "R0")
    world.keep("object", b"data", "1")
    for _ in range(number):
        assert store.get("object").data == b"data"
    looks_whole = transport == "sim-fsspec" or (number == 0 and transport != "sim-file")
    if looks_whole:
        assert store.get("object").data == b"da"
    else:
        with pytest.raises(StoreError):
            store.get("object")
    assert world.script.fired[fault] == 1


def test_whoever_may_not_list_is_denied_what_is_absent() -> None:
    with pytest.raises(StoreError) as caught:
        S3Model(denies_absence=True).get("object")
    assert caught.value.denied
