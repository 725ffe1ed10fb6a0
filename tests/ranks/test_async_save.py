"""`dcpstore.async_save` on threads as ranks: staged, durable, failed, cancelled, late."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver

import dcpstore
from dcpstore import (
    AbandonedError,
    AsyncSave,
    ConfigError,
    IncompatibleError,
    ObjectStoreWriter,
    RankFailures,
    SaveResult,
    Stager,
    StoreError,
    WriteConfig,
)
from dcpstore.ranks import each
from dcpstore.store import open_store
from dcpstore.testing.ranks import run_ranks
from dcpstore.torch_private import async_save_response
from dcpstore.write.cutoff import Cutoff
from passing_on import PassesOn

WRITE = WriteConfig(inline_bytes=64, checksum_block_bytes=4096)
WAIT_S = 20.0


@dataclass
class Gate:
    """A store's puts wait here, from a certain one on.

    Attributes:
        url: Of the folder.
        key: A part of the keys of those that wait.
        reached: Set when one waits.
        opened: Lets them go on.
        error: What they fail with then.
    """

    url: str
    key: str = ".distcp"
    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def pass_by(self, key: str) -> None:
        if self.key not in key:
            return
        self.reached.set()
        assert self.opened.wait(WAIT_S)
        if self.error is not None:
            raise self.error

    def writer(self, **options: Any) -> ObjectStoreWriter:
        return ObjectStoreWriter(
            self.url,
            config=WRITE,
            store_opener=lambda *args, **kwargs: GatedStore(open_store(*args, **kwargs), self),
            **options,
        )

    def names(self) -> list[str]:
        memory = fsspec.filesystem("memory")
        folder = self.url.removeprefix("memory:/")
        return [one.rpartition("/")[2] for one in memory.find(folder)]


class GatedStore(PassesOn):
    def __init__(self, inner: Any, gate: Gate) -> None:
        super().__init__(inner)
        self._gate = gate

    def put(self, key: str, data: Any, **options: Any) -> Any:
        self._gate.pass_by(key)
        return self._inner.put(key, data, **options)

    def put_parts(self, key: str, parts: Any, **options: Any) -> Any:
        self._gate.pass_by(key)
        return self._inner.put_parts(key, parts, **options)


@pytest.fixture
def gate(request: pytest.FixtureRequest) -> Gate:
    return Gate(f"memory://async-save/{request.node.name}")


def state_of(rank: int, value: float = 1.0) -> dict[str, Any]:
    return {f"own{rank}": torch.full((3000,), value + rank), "shared": torch.full((50,), value)}


async def wait_for(save: AsyncSave) -> SaveResult:
    return await save


def check(url: str, size: int, value: float = 1.0) -> None:
    for rank in range(size):
        found = state_of(rank, 0.0)
        dcpstore.load(found, url)
        for key, tensor in state_of(rank, value).items():
            assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("size", [1, 2])
def test_training_goes_on_while_the_save_does_and_changes_nothing_of_it(
    gate: Gate, size: int
) -> None:
    def work(group: Any) -> AsyncSave:
        state = state_of(group.rank)
        save = dcpstore.async_save(state, storage_writer=gate.writer(), process_group=group)
        assert save.staged()
        assert not save.done()
        for tensor in state.values():
            tensor.fill_(7)
        assert gate.reached.wait(WAIT_S)
        assert not save.done()
        gate.opened.set()
        assert save.result(WAIT_S).num_keys == size + 1
        assert save.done()
        assert save.exception() is None
        assert save.url == gate.url
        return save

    run_ranks(size, work).values()
    check(gate.url, size)


def test_a_save_without_ranks_is_awaitable_and_of_torchs_kind(gate: Gate) -> None:
    save = dcpstore.async_save(state_of(0), gate.url, config=WRITE)

    assert asyncio.run(wait_for(save)).num_keys == 2
    assert isinstance(save, async_save_response())
    assert save.staging_completion.result(0) is None
    assert save.upload_completion.result(0) == save.result()
    assert len({save, save}) == 1
    check(gate.url, 1)


def test_saves_one_after_another_use_one_stager_and_planner(gate: Gate) -> None:
    stager, planner, state = Stager(), dcpstore.SavePlanner(), state_of(0)
    saves = []
    for step in range(4):
        state["own0"].fill_(step + 1.0)
        state["shared"].fill_(step + 1.0)
        saves.append(
            dcpstore.async_save(state, f"{gate.url}/{step}", stager=stager, planner=planner)
        )
        if step:
            assert saves[-2].done(), "a save waits until the one before has let go of the memory"
    for step, save in enumerate(saves):
        assert save.result(WAIT_S).is_plan_cached == (step > 0)
        check(f"{gate.url}/{step}", 1, step + 1.0)
    assert stager.num_bytes < 13_000


def test_staging_may_go_on_beside_the_caller(gate: Gate) -> None:
    state = state_of(0)
    save = dcpstore.async_save(state, gate.url, wait_staged=False)
    save.wait_staged(WAIT_S)
    assert save.staged()
    state["own0"].fill_(9)
    save.result(WAIT_S)
    check(gate.url, 1)


class NotingPlanner(dcpstore.SavePlanner):
    """Notes which threads plan."""

    def __init__(self, threads: set[int]) -> None:
        super().__init__()
        self._threads = threads

    def set_up_planner(self, *args: Any, **options: Any) -> None:
        self._threads.add(threading.get_ident())
        super().set_up_planner(*args, **options)


class NotingStore(PassesOn):
    """Notes which threads make requests."""

    def __init__(self, inner: Any, threads: set[int]) -> None:
        super().__init__(inner)
        self._threads = threads

    def __getattr__(self, name: str) -> Any:
        self._threads.add(threading.get_ident())
        return super().__getattr__(name)


def test_the_calling_thread_neither_plans_nor_asks_the_store(gate: Gate) -> None:
    planning: set[int] = set()
    asking: set[int] = set()
    writer = ObjectStoreWriter(
        gate.url, store_opener=lambda *a, **more: NotingStore(open_store(*a, **more), asking)
    )
    planner = NotingPlanner(planning)
    dcpstore.async_save(state_of(0), storage_writer=writer, planner=planner).result(WAIT_S)
    assert len(planning) == 1
    assert asking
    assert threading.get_ident() not in planning | asking


def test_torch_without_a_class_for_it_gets_one_like_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(state_dict_saver, "AsyncSaveResponse")
    made = async_save_response()(staging_completion=1, upload_completion=2)
    assert (made.staging_completion, made.upload_completion) == (1, 2)


def test_what_is_frozen_is_saved_from_where_it_lies(gate: Gate) -> None:
    stager, state = Stager(), {"model": {"embedding": torch.ones(1000), "head": torch.ones(10)}}
    save = dcpstore.async_save(state, gate.url, stager=stager, frozen=["model.embedding"])
    save.result(WAIT_S)
    assert stager.num_bytes < 1000
    found = {"model": {"embedding": torch.zeros(1000), "head": torch.zeros(10)}}
    dcpstore.load(found, gate.url)
    assert found["model"]["embedding"].sum() == 1000


# --- failures ------------------------------------------------------------------------------


def test_an_error_in_the_background_is_raised_on_all_ranks_when_asked_for(gate: Gate) -> None:
    gate.opened.set()

    def work(group: Any) -> None:
        gate_of_rank = Gate(gate.url, opened=gate.opened)
        gate_of_rank.error = StoreError("no room", retryable=False) if group.rank else None
        save = dcpstore.async_save(
            state_of(group.rank), storage_writer=gate_of_rank.writer(), process_group=group
        )
        with pytest.raises(RankFailures) as caught:
            save.result(WAIT_S)
        assert set(caught.value.causes) == {1}
        assert save.exception(0) is caught.value
        with pytest.raises(RankFailures):
            asyncio.run(wait_for(save))

    run_ranks(2, work).values()
    assert gate.names() == []


def failing(gate: Gate) -> AsyncSave:
    gate.error = StoreError("no room", retryable=False)
    gate.opened.set()
    return dcpstore.async_save(state_of(0), storage_writer=gate.writer())


def errors_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR]


def wait_until(claim: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not claim():
        assert time.monotonic() < end_s
        time.sleep(0.005)
        gc.collect()


def test_an_error_that_nobody_asked_for_is_logged_with_the_url(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    failing(gate)
    wait_until(lambda: bool(errors_of(caplog)))
    (message,) = errors_of(caplog)
    assert gate.url in message
    assert "no room" in message


def test_an_error_that_somebody_asked_for_is_not_logged(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    save = failing(gate)
    assert isinstance(save.exception(WAIT_S), StoreError)
    del save
    gc.collect()
    assert errors_of(caplog) == []


def test_a_state_that_cannot_be_copied_raises_here_and_fails_the_others_at_once(
    gate: Gate,
) -> None:
    def work(group: Any) -> None:
        state = state_of(group.rank)
        if group.rank:
            state["bad"] = torch.empty(3, device="meta")
            with pytest.raises(IncompatibleError, match="'bad' is a meta tensor"), group:
                dcpstore.async_save(state, gate.url, process_group=group)
            return
        save = dcpstore.async_save(state, gate.url, process_group=group)
        with pytest.raises(RankFailures, match="meta tensor"):
            save.result(WAIT_S)

    run_ranks(2, work, deadline_s=60, wait_s=WAIT_S).values()
    assert gate.names() == []


# --- given up --------------------------------------------------------------------------------


def test_one_ranks_cancel_gives_the_save_up_on_all_and_leaves_nothing(gate: Gate) -> None:
    def work(group: Any) -> None:
        save = dcpstore.async_save(
            state_of(group.rank), storage_writer=gate.writer(), process_group=group
        )
        assert gate.reached.wait(WAIT_S)
        if group.rank:
            assert save.cancel()
            assert save.cancel()
            gate.opened.set()
        error = save.exception(WAIT_S)
        assert isinstance(error, RankFailures)
        assert set(error.causes) == {1}
        assert isinstance(error.exceptions[1], AbandonedError)
        assert "cancelled" in str(error)
        assert not save.cancel(), "it is over"

    run_ranks(2, work).values()
    assert gate.names() == []


def test_a_cancel_once_the_seal_has_begun_comes_too_late(gate: Gate) -> None:
    gate.key = ".metadata"

    def work(group: Any) -> None:
        save = dcpstore.async_save(
            state_of(group.rank), storage_writer=gate.writer(), process_group=group
        )
        assert gate.reached.wait(WAIT_S)
        assert not save.cancel()
        gate.opened.set()
        save.result(WAIT_S)

    run_ranks(2, work).values()
    check(gate.url, 2)


def test_a_cancel_of_a_single_process_is_the_error_itself(gate: Gate) -> None:
    save = dcpstore.async_save(state_of(0), storage_writer=gate.writer())
    assert gate.reached.wait(WAIT_S)
    assert save.cancel()
    gate.opened.set()
    with pytest.raises(AbandonedError, match="cancelled"):
        save.result(WAIT_S)
    assert gate.names() == []


@pytest.mark.parametrize("size", [1, 3])
def test_a_save_that_does_not_fit_into_its_deadline_is_given_up_on_all_ranks(
    gate: Gate, size: int
) -> None:
    """Rank 0's put takes longer than there is time; nobody begins the seal."""

    def work(group: Any) -> None:
        began_s = time.monotonic()
        writer = Gate(gate.url, key="__0_", opened=gate.opened, reached=gate.reached).writer()
        with pytest.raises((RankFailures, AbandonedError), match=r"total_deadline_s=0\.6"):
            dcpstore.save(
                state_of(group.rank),
                storage_writer=writer,
                process_group=group if size > 1 else None,
                total_deadline_s=0.6,
            )
        assert time.monotonic() - began_s < 5

    timer = threading.Timer(1.5, gate.opened.set)
    timer.start()
    run = run_ranks(size, work)
    timer.join()
    run.values()
    assert gate.names() == []


def test_a_save_within_its_deadline_is_sealed(gate: Gate) -> None:
    def work(group: Any) -> None:
        dcpstore.save(state_of(group.rank), gate.url, process_group=group, total_deadline_s=60)
        assert group.deadline_s == 30.0, "the group is as it was"
        each(group, "later", lambda: None)

    run_ranks(2, work).values()
    check(gate.url, 2)


def test_a_deadline_of_no_time_is_refused(gate: Gate) -> None:
    with pytest.raises(ConfigError, match="total_deadline_s must be positive"):
        dcpstore.save(state_of(0), gate.url, total_deadline_s=0)
    with pytest.raises(ConfigError, match="total_deadline_s must be positive"):
        dcpstore.async_save(state_of(0), gate.url, total_deadline_s=-1)


def test_a_stager_that_is_not_free_in_time_gives_the_save_up(gate: Gate) -> None:
    stager = Stager()
    first = dcpstore.async_save(state_of(0), storage_writer=gate.writer(), stager=stager)
    with pytest.raises(AbandonedError, match=r"total_deadline_s=0\.1"):
        dcpstore.async_save(state_of(0), f"{gate.url}/2", stager=stager, total_deadline_s=0.1)
    gate.opened.set()
    first.result(WAIT_S)
    dcpstore.async_save(state_of(0), f"{gate.url}/2", stager=stager).result(WAIT_S)


def test_a_rank_that_falls_silent_in_the_background_fails_the_others_in_time(gate: Gate) -> None:
    def work(group: Any) -> None:
        if group.rank == 1:  # it never comes
            gate.opened.wait(WAIT_S)
            return
        began_s = time.monotonic()
        save = dcpstore.async_save(state_of(group.rank), gate.url, process_group=group)
        error = save.exception(WAIT_S)
        gate.opened.set()
        assert isinstance(error, RankFailures)
        assert set(error.causes) == {1}
        assert time.monotonic() - began_s < 3

    run_ranks(2, work, deadline_s=1.0).values()
    assert gate.names() == []


def test_ranks_that_wait_for_one_that_hangs_are_told_of_the_deadline(gate: Gate) -> None:
    def work(group: Any) -> None:
        if group.rank == 1:  # it never comes
            gate.opened.wait(WAIT_S)
            return
        began_s = time.monotonic()
        with pytest.raises(RankFailures, match=r"(?s)did not answer.*total_deadline_s=1\.5"):
            dcpstore.save(state_of(group.rank), gate.url, process_group=group, total_deadline_s=1.5)
        assert 1 < time.monotonic() - began_s < 4
        gate.opened.set()

    run_ranks(2, work, deadline_s=60).values()
    assert gate.names() == []


def test_a_writer_that_was_in_a_save_given_up_serves_the_next(gate: Gate) -> None:
    gate.opened.set()
    writer = gate.writer()
    cutoff = Cutoff()
    assert cutoff.cancel()
    with pytest.raises(AbandonedError):
        dcpstore.save(state_of(0), storage_writer=writer, cutoff=cutoff)
    dcpstore.save(state_of(0), storage_writer=writer)
    check(gate.url, 1)


def test_many_saves_leave_neither_threads_nor_files_nor_handles_behind(gate: Gate) -> None:
    stager, planner, state = Stager(), dcpstore.SavePlanner(), state_of(0)

    def save_some(number: int) -> tuple[int, int, int]:
        for step in range(number):
            dcpstore.async_save(
                state, gate.url, stager=stager, planner=planner, overwrite=step > 0 or number > 3
            ).result(WAIT_S)
        wait_until(lambda: all("dcpstore" not in one.name for one in threading.enumerate()))
        gc.collect()
        handles = sum(type(one) is AsyncSave for one in gc.get_objects())
        return threading.active_count(), len(list(Path("/proc/self/fd").iterdir())), handles

    assert save_some(3) == save_some(20)
