"""The look whether a checkpoint exists: under way while planning, known before any put."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dcpstore
from dcpstore import AlreadyExistsError, ObjectStoreWriter, RankFailures
from dcpstore.plan import SavePlanner
from dcpstore.store import open_store
from dcpstore.testing import RecordingStore
from dcpstore.testing.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

URL = "memory://look"
STATE = {"w": torch.ones(100), "more": torch.ones(5 << 20)}


class HeldStore:
    """Ends no look before it is told to."""

    def __init__(self) -> None:
        self.inner = open_store(URL, engine="obstore")
        self.began, self.may_end = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def get(self, key: str) -> Any:
        self.began.set()
        assert self.may_end.wait(10), "nobody planned while the look was under way"
        return self.inner.get(key)


class Planner(SavePlanner):
    """Ends the look, once it began, when it plans."""

    def __init__(self, held: HeldStore) -> None:
        super().__init__()
        self._held = held

    def create_local_plan(self) -> Any:
        assert self._held.began.wait(10), "planning began without a look"
        self._held.may_end.set()
        return super().create_local_plan()


def writer_on(store: Any, **options: Any) -> ObjectStoreWriter:
    return ObjectStoreWriter(URL, store_opener=lambda *_a, **_o: store, **options)


@pytest.mark.parametrize("way", ["dcp.save", "dcpstore.save"])
def test_the_coordinator_looks_while_it_plans(way: str) -> None:
    held = HeldStore()
    recorder, planner = RecordingStore(held), Planner(held)
    if way == "dcp.save":
        dcp.save(STATE, storage_writer=writer_on(recorder), planner=planner, no_dist=True)
    else:
        dcpstore.save(STATE, storage_writer=writer_on(recorder), planner=planner)
    look, *others = recorder.requests
    assert (look.verb, look.key) == ("get", ".metadata")
    assert others[-1].key == ".metadata"
    assert all(one.begin_s >= look.end_s for one in others), "put before the outcome was known"


@pytest.mark.parametrize("planner", [SavePlanner, dcp.DefaultSavePlanner])
def test_no_rank_puts_anything_where_a_checkpoint_exists(planner: Any) -> None:
    store = open_store(URL, engine="obstore")
    dcpstore.save(STATE, storage_writer=writer_on(store))
    recorders = [RecordingStore(store) for _ in range(2)]

    def save(group: Any) -> None:
        writer = writer_on(recorders[group.rank])
        dcpstore.save(STATE, storage_writer=writer, planner=planner(), process_group=group)

    run = run_ranks(2, save)
    for error in run.errors.values():
        assert isinstance(error, RankFailures)
        assert isinstance(error.exceptions[0], AlreadyExistsError)
        assert list(error.exceptions) == [0]
        assert error.step == "plan"
    assert [dict(one.counts) for one in recorders] == [{"get": 1}, {}]


def test_plain_dcp_fails_alike_and_puts_nothing() -> None:
    store = open_store(URL, engine="obstore")
    dcpstore.save(STATE, storage_writer=writer_on(store))
    recorder = RecordingStore(store)
    with pytest.raises(CheckpointException, match="already holds a checkpoint") as caught:
        dcp.save(STATE, storage_writer=writer_on(recorder), no_dist=True)
    assert isinstance(caught.value.failures[0][0], AlreadyExistsError)
    assert dict(recorder.counts) == {"get": 1}


def test_who_skips_the_global_plan_is_stopped_before_the_first_put() -> None:
    store = open_store(URL, engine="obstore")
    dcpstore.save(STATE, storage_writer=writer_on(store))
    recorder = RecordingStore(store)
    writer, planner = writer_on(recorder), SavePlanner()
    planner.set_up_planner(STATE, is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, _ = planner.create_global_plan([planner.create_local_plan()])
    with pytest.raises(AlreadyExistsError):
        writer.write_data(planner.finish_plan(plans[0]), planner)
    assert dict(recorder.counts) == {"get": 1}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_rank_that_saves_for_itself_does_not_replace_what_all_saved(overwrite: bool) -> None:
    store = open_store(URL, engine="obstore")
    dcpstore.save(STATE, storage_writer=writer_on(store))
    writer = writer_on(store, overwrite=overwrite)
    writer.set_up_storage_writer(True, rank=1, use_collectives=False)
    with pytest.raises(AlreadyExistsError, match="all ranks saved together"):
        writer.await_probe()
