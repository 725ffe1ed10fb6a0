"""What is found in the folder of a run, by how many requests, and who may save there."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from dcpstore.errors import (
    CheckpointError,
    CommitUnknownError,
    ConflictError,
    CorruptError,
    NotFoundError,
    StoreError,
)
from dcpstore.format.manifest import DataObject, Manifest, encode
from dcpstore.format.seal import Facts, data_key, make_metadata, new_save_id
from dcpstore.manager.policies import Best, Latest
from dcpstore.manager.retention import plan, retire
from dcpstore.manager.run import CLAIM_KEY, METRICS, PINS, Run
from dcpstore.store import Store, open_store
from dcpstore.testing import FaultyStore, RecordingStore, StoreFault

STOCK = b"\x80\x04N."
"""What another writer's metadata look like from their end: no footer."""


@pytest.fixture
def store() -> Store:
    return open_store("memory://run", engine="obstore")


def run_on(store: Any) -> Run:
    return Run("memory://run", store_opener=lambda *_args, **_options: store)


def sealed(
    step: int, run: str | None = None, metrics: Mapping[str, float] | None = None
) -> dict[str, bytes]:
    """The objects of a checkpoint with one data object."""
    save_id = new_save_id()
    key = data_key(0, 0, save_id)
    manifest = encode(Manifest(save_id, (), {}, (DataObject(key, 4),)))
    facts = Facts(step, run, metrics or {})
    _, data = make_metadata(save_id, b"", manifest, embed_manifest_bytes=1 << 20, facts=facts)
    return {key: b"data", ".metadata": data}


def put(store: Store, folder: str, objects: Mapping[str, bytes]) -> None:
    for key, data in objects.items():
        store.put(f"{folder}/{key}", data)


def put_steps(store: Store, *steps: int, run: str | None = None) -> None:
    for step in steps:
        put(store, f"step-{step}", sealed(step, run))


def told(store: Store, **change: Any) -> None:
    """Put a claim as another job left it."""
    now = datetime.now(timezone.utc).isoformat()
    claim = {"run": "5eed" * 4, "owner": "x", "host": "far", "pid": 7, "since": now, "heard": now}
    store.put(CLAIM_KEY, json.dumps({**claim, **change}).encode())


# Steps -------------------------------------------------------------------------------------


def test_an_empty_run_has_no_steps(store: Store) -> None:
    run = run_on(store)
    assert run.newest() is None
    assert run.all() == []
    assert run.candidates() == []
    assert run.pins() == set()
    assert run.claimed() is None
    assert plan(run, Latest(1)) == []


def test_the_newest_is_by_number_and_not_by_name(store: Store) -> None:
    put_steps(store, 9, 10, 100, 20)
    run = run_on(store)
    assert [one.step for one in run.all()] == [100, 20, 10, 9]
    newest = run.newest()
    assert newest is not None
    assert (newest.step, newest.url, newest.layout) == (100, "memory://run/step-100", "dcpstore")
    assert newest.facts.step == 100


LAYOUTS = {
    "torchtitan": ("step-7", {".metadata": STOCK}, "dcp", ""),
    "Lightning": ("epoch=1-step=7.ckpt", {".metadata": STOCK}, "dcp", ""),
    "Megatron": ("iter_0000007", {".metadata": STOCK}, "dcp", ""),
    "accelerate": (
        "checkpoint-7",
        {"pytorch_model_fsdp_0/.metadata": STOCK, "trainer_state.json": b"{}"},
        "dcp",
        "/pytorch_model_fsdp_0",
    ),
    "transformers": ("checkpoint-7", {"model.safetensors": b"x"}, "safetensors", ""),
    "transformers, sharded": (
        "checkpoint-7",
        {"model.safetensors.index.json": b"{}"},
        "safetensors",
        "",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_of_other_tools_are_found_in_buckets_as_verl_7641_did_not(
    store: Store, name: str
) -> None:
    folder, objects, layout, inner = LAYOUTS[name]
    put(store, folder, objects)
    put(store, "runs", {"events": b"x"})
    put(store, f"{folder}-old", {".metadata": STOCK})
    run = run_on(store)
    assert run.candidates() == [(7, folder)]
    found = run.newest()
    assert found is not None
    assert (found.step, found.layout, found.url) == (7, layout, f"memory://run/{folder}{inner}")
    assert run.all() == [found]
    (verdict,) = plan(run, Latest(1))
    assert "not written by dcpstore" in verdict.why


def test_a_newest_folder_that_is_not_sealed_is_passed_over(store: Store) -> None:
    put_steps(store, 1)
    put(store, "step-2", {data_key(0, 0, new_save_id()): b"half"})
    put(store, "step-3", {".metadata": b""})
    put(store, "checkpoint-4", {"optimizer.pt": b"x"})
    recorded = RecordingStore(store)
    newest = run_on(recorded).newest()
    assert newest is not None
    assert newest.step == 1
    assert recorded.counts["folders"] == 1


def damaged() -> dict[str, bytes]:
    objects = sealed(2)
    data = objects[".metadata"]
    return {**objects, ".metadata": data[:-30] + b"?" * 10 + data[-20:]}


def test_a_damaged_newest_step_is_an_error_and_no_step_among_all(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    put_steps(store, 1)
    put(store, "step-2", damaged())
    run = run_on(store)
    with pytest.raises(CorruptError, match=r"step-2/\.metadata"):
        run.newest()
    assert [one.step for one in run.all()] == [1]
    assert "step-2 cannot be read" in caplog.text


def test_a_refused_step_is_left_out_and_an_outage_is_an_error(store: Store) -> None:
    put_steps(store, 1, 2)
    refuses = FaultyStore(store, [StoreFault("denied", key="step-2/", times=None)])
    assert [one.step for one in run_on(refuses).all()] == [1]
    fails = FaultyStore(store, [StoreFault("error", key="step-2/", times=None)])
    with pytest.raises(StoreError):
        run_on(fails).all()


def test_each_step_is_looked_at_once(store: Store) -> None:
    steps = range(1, 2501)
    put_steps(store, *steps)
    recorded = RecordingStore(store)
    run = run_on(recorded)
    assert run.newest() is not None
    assert recorded.counts == {"folders": 1, "get_tail": 1}  # 3 pages on S3: see tests/contract
    assert len(run.all()) == 2500
    assert recorded.counts == {"folders": 2, "get_tail": 2501}
    assert len(run.all()) == 2500
    assert recorded.counts == {"folders": 3, "get_tail": 2501}


def test_a_step_that_others_removed_is_forgotten_when_it_cannot_be(store: Store) -> None:
    # What lies beside it keeps the folder, so that a listing shows it still.
    put(store, "checkpoint-1", {**sealed(1), "trainer_state.json": b"{}"})
    put_steps(store, 2)
    run = run_on(store)
    verdicts = plan(run, Latest(1))
    store.delete_many(["checkpoint-1/.metadata"])
    (result,) = retire(run, verdicts)
    assert "not there any more" in result.why_not
    assert [one.step for one in run.all()] == [2]


# Pins and metrics --------------------------------------------------------------------------


def test_pins_of_all_folders_of_a_step(store: Store) -> None:
    put_steps(store, 1, 2, 3)
    put(store, "checkpoint-1", sealed(1))
    run = run_on(store)
    run.pin(1)
    assert run.pins() == {"step-1", "checkpoint-1"}
    assert {one.step for one in plan(run, Latest(1)) if one.stays} == {1, 3}
    run.unpin(1)
    run.unpin(7)
    assert run.pins() == set()
    with pytest.raises(NotFoundError, match="no sealed step 7"):
        run.pin(7)
    assert not list(store.list(PINS))


def test_metrics_that_were_reported_after_the_seal_count_for_best(store: Store) -> None:
    for step, loss in ((1, 0.3), (2, 0.2), (3, math.nan), (4, 0.9)):
        put(store, f"step-{step}", sealed(step, None, {"loss": loss}))
    run = run_on(store)
    best = Best(1, "loss", "min")
    assert {one.step for one in plan(run, best) if one.stays} == {2, 4}
    run.report(1, {"loss": 0.1})
    run.report(1, {"accuracy": 0.9})
    assert {one.step for one in plan(run, best) if one.stays} == {1, 4}
    run.report(1, {"loss": math.nan})
    assert {one.step for one in plan(run, best) if one.stays} == {2, 4}
    (one,) = [one for one in run.facts() if one.step == 1]
    assert one.metrics["accuracy"] == 0.9


def test_damaged_metrics_count_for_nothing(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    put_steps(store, 1, 2)
    run = run_on(store)
    for text in (b"", b"\xff", b"[]", b'{"metrics": {"a": "b"}}', b'{"metrics": 3}', b"null"):
        store.put(f"{METRICS}step-1.json", text)
        assert [dict(one.metrics) for one in run.facts()] == [{}, {}]
    assert "counts for nothing" in caplog.text
    run.report(1, {"loss": 1})
    assert [dict(one.metrics) for one in run.facts()] == [{}, {"loss": 1.0}]


def test_metrics_go_with_their_step(store: Store) -> None:
    put_steps(store, 1, 2)
    run = run_on(store)
    run.report(1, {"loss": 0.1})
    retire(run, plan(run, Latest(1)))
    assert {info.key.partition("/")[0] for info in store.list()} == {"step-2"}


# The claim ---------------------------------------------------------------------------------


def test_the_second_job_is_told_at_once_and_the_first_when_it_renews(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = run_on(store), run_on(store), run_on(store)
    run = first.claim()
    first.renew(10)
    assert not caplog.records
    with pytest.raises(ConflictError, match=r"is claimed by a job on .* takeover=True"):
        second.claim(takeover=False)
    first.renew(20, resumed=10)
    assert second.claim() == run
    assert "takes it over" in caplog.text
    with pytest.raises(ConflictError, match="taken over by a job on"):
        first.renew(30)
    with pytest.raises(ConflictError):
        first.renew(40)
    claim = second.claimed()
    assert claim is not None
    assert claim.resumed == 10
    caplog.clear()
    second.renew(30)
    second.release()
    assert third.claim(takeover=False) == run
    assert not caplog.records


def test_a_job_that_lost_the_run_removes_nothing_there(store: Store) -> None:
    # Else it would remove what the other one is restored from.
    first, second = run_on(store), run_on(store)
    put_steps(store, 1, 2, run=first.claim())
    assert [one.stays for one in plan(first, Latest(1))] == [True, False]
    second.claim()
    with pytest.raises(ConflictError, match="removes nothing"):
        plan(first, Latest(1))
    assert [one.stays for one in plan(run_on(store), Latest(1))] == [True, False]
    second.renew(3, resumed=1)
    assert all(one.stays for one in plan(second, Latest(1)))


def test_a_job_that_lost_the_run_does_not_give_it_back(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = run_on(store), run_on(store)
    first.claim()
    second.claim()
    first.release()
    assert "could not be given back" in caplog.text
    claim = second.claimed()
    assert claim is not None
    assert not claim.released
    second.renew(1)


@pytest.mark.parametrize("kind", ["error", "lost_ack", "denied"])
@pytest.mark.parametrize("verb", ["put", "get"])
def test_an_outage_does_not_take_the_run_from_its_own_job(
    store: Store, kind: Any, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.uniform", lambda _least, _most: 0.0)  # no waits
    faulty = FaultyStore(store)
    run = run_on(faulty)
    run_id = run.claim()
    # The put takes effect, its answer is lost, and it cannot be read back.
    faulty.add(StoreFault("lost_ack" if verb == "get" else kind, verb="put", times=8))
    faulty.add(StoreFault(kind, verb="get", times=None))
    with pytest.raises(CheckpointError, match="claim"):
        run.renew(10)
    faulty.revive()
    run.renew(20)
    run.renew(30)
    claim = run.claimed()
    assert claim is not None
    assert (claim.step, claim.run) == (30, run_id)


def test_a_claim_whose_answer_was_lost_is_claimed_again_by_the_same_job(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.uniform", lambda _least, _most: 0.0)  # no waits
    script = [StoreFault("lost_ack", verb="put"), StoreFault("error", verb="get", at=1, times=None)]
    faulty = FaultyStore(store, script)
    run = run_on(faulty)
    with pytest.raises(CommitUnknownError):
        run.claim(takeover=False)
    faulty.revive()
    caplog.clear()
    there = run.claimed()
    assert there is not None
    assert run.claim(takeover=False) == there.run
    assert not caplog.records


def test_a_job_that_was_not_heard_of_for_a_day_is_no_other_job(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    long_ago = datetime.now(timezone.utc) - timedelta(days=2)
    told(store, heard=long_ago.isoformat(), resumed=5)
    assert run_on(store).claim(takeover=False) == "5eed" * 4
    assert not caplog.records


@pytest.mark.parametrize("heard", ["", "soon", "2026-01-01T00:00:00", "9999-01-01T00:00:00+00:00"])
def test_a_strange_time_is_taken_for_a_job_that_is_alive(store: Store, heard: str) -> None:
    told(store, heard=heard)
    with pytest.raises(ConflictError):
        run_on(store).claim(takeover=False)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b"\xff", b'{"run": 1}', b'{"run":"a"}']
)
def test_a_damaged_claim_is_an_error_that_says_what_to_do(store: Store, text: bytes) -> None:
    store.put(CLAIM_KEY, text)
    put_steps(store, 1, 2)
    run = run_on(store)
    for call in (run.claimed, run.claim, lambda: plan(run, Latest(1))):
        with pytest.raises(CorruptError, match=r"claim\.json is damaged.*Remove it if no job"):
            call()
    assert bytes(store.get(CLAIM_KEY).data) == text


def test_fields_of_later_releases_are_passed_over(store: Store) -> None:
    told(store, released=True, mood="good")
    claim = run_on(store).claimed()
    assert claim is not None
    assert claim.released


def test_a_refused_claim_is_not_a_run_without_one(store: Store) -> None:
    # Else steps that were saved for no run would be this run's, and the resumed one unprotected.
    told(store, resumed=1)
    put_steps(store, 1, 2)
    denied = FaultyStore(store, [StoreFault("denied", verb="get", key=CLAIM_KEY, times=None)])
    for call in (run_on(denied).claimed, run_on(denied).claim):
        with pytest.raises(StoreError):
            call()


def test_a_job_whose_store_refuses_the_release_ends_well(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.uniform", lambda _least, _most: 0.0)  # no waits
    faulty = FaultyStore(store)
    run = run_on(faulty)
    run.release()
    run.claim()
    faulty.add(StoreFault("denied", times=None))
    with caplog.at_level(logging.WARNING):
        run.release()
    assert "could not be given back" in caplog.text


# Requests of a removal ---------------------------------------------------------------------


def test_what_a_removal_costs(store: Store) -> None:
    put_steps(store, *range(1, 13))
    run = run_on(RecordingStore(store))
    recorded: Any = run.store
    run.all()
    recorded.clear()
    verdicts = plan(run, Latest(2))
    assert recorded.counts == {"get": 1, "list": 1, "folders": 1}
    recorded.clear()
    assert len(retire(run, verdicts)) == 10
    # Two lists and a look at the newest for all; per step its metadata, a list, a note, a look and
    # three deletes.
    assert recorded.counts == {"get": 10, "list": 12, "put": 10, "get_tail": 11, "delete_many": 30}
    recorded.clear()
    assert retire(run, plan(run, Latest(2))) == []
    assert recorded.counts == {"get": 1, "list": 2, "folders": 1}


def test_what_the_other_calls_cost(store: Store) -> None:
    put_steps(store, 1, 2)
    run = run_on(RecordingStore(store))
    recorded: Any = run.store
    counted = {}
    for name, call in {
        "claim": run.claim,
        "renew": lambda: run.renew(3),
        "release": run.release,
        "pin": lambda: run.pin(1),
        "unpin": lambda: run.unpin(1),
        "report": lambda: run.report(1, {"loss": 0.5}),
    }.items():
        recorded.clear()
        call()
        counted[name] = dict(recorded.counts)
    assert counted == {
        "claim": {"get": 1, "put": 1},
        "renew": {"put": 1},
        "release": {"put": 1},
        "pin": {"folders": 1, "get_tail": 2, "put": 1, "list": 1},
        "unpin": {"list": 1, "delete_many": 1},
        "report": {"folders": 1, "get_tail": 1, "get": 1, "put": 1},
    }
