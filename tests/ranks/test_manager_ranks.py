"""`CheckpointManager` on several ranks: all save, skip and restore alike, and at what cost."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import fsspec
import pytest
import torch
from manager_threads import Job, state_of

from dcpstore import (
    AbandonedError,
    AtSteps,
    Best,
    CheckpointManager,
    EverySeconds,
    EverySteps,
    Latest,
    NotFoundError,
    OnPreemption,
    RankFailures,
    StoreError,
)
from dcpstore.store import open_store
from passing_on import PassesOn

WAIT_S = 20.0

# Requests of all ranks together; each rank adds one put of its tensors to a save.
CLAIM = Counter(get=1, put=1)
# What was there; the claim and the seal.
SAVE = Counter(get=1, put=2)
# The run and its newest step; its claim, which is renewed.
RESTORE = Counter(folders=1, get_tail=1, get=1, put=1)
REPORT = Counter(folders=1, get_tail=1, get=1, put=1)
RETIRE = Counter(
    folders=1,
    get_tail=3,  # the new step; whether the newest is still there; the one that goes, once more
    get=4,  # the claim, the metadata of the one that goes, two reports of metrics
    list=4,  # records, notes of removals, the folder that goes, pins
    put=1,  # the note
    delete_many=3,  # metadata, what they named, the note
)


@pytest.fixture
def job(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Job:
    size = getattr(request, "param", 2)
    name = request.node.name.replace("[", "-").replace("]", "")
    made = Job(size, f"memory://manager-ranks/{name}")
    made.install(monkeypatch)
    return made


both = pytest.mark.parametrize("job", [2, 4], indirect=True)


def sealed(job: Job) -> list[int]:
    memory = fsspec.filesystem("memory")
    names = memory.find(job.url.removeprefix("memory:/"))
    steps = (name.split("/")[-2] for name in names if name.endswith("/.metadata"))
    return sorted(int(step.removeprefix("step-")) for step in steps)


def save_steps(manager: CheckpointManager, rank: int, *steps: int) -> None:
    for step in steps:
        manager.save(step, state_of(rank, step))


def restored(manager: CheckpointManager, rank: int, *args: Any, **more: Any) -> int | None:
    state = state_of(rank)
    step = manager.restore(state, *args, **more)
    for key, tensor in state_of(rank, step or 0).items():
        assert torch.equal(state[key], tensor)
    return step


# --- the same on all ranks ----------------------------------------------------------------------


@both
def test_all_ranks_save_and_resume(job: Job) -> None:
    def work(manager: CheckpointManager, rank: int) -> Any:
        found = [restored(manager, rank)]
        for step in range(1, 8):
            manager.step(step, state_of(rank, step))
        manager.wait()
        return [*found, restored(manager, rank), restored(manager, rank, 4)]

    assert job.run(work, save=EverySteps(2)).values() == [[None, 6, 4]] * job.size
    assert sealed(job) == [2, 4, 6]


@both
def test_all_ranks_restore_the_same_step_although_a_listing_differs(job: Job) -> None:
    """A store may list late; what the coordinator sees is taken by all."""
    job.run(lambda manager, rank: save_steps(manager, rank, 1, 2, 3)).values()

    class Late(PassesOn):
        def folders(self, *args: Any) -> list[str]:
            return [one for one in self._inner.folders(*args) if one != "step-3"]

    def late(*args: Any, **more: Any) -> Any:
        return Late(open_store(*args, **more))

    for is_late in ([False] * (job.size - 1) + [True], [True] + [False] * (job.size - 1)):
        openers = [late if one else open_store for one in is_late]
        found = job.run(restored, store_opener=openers).values()
        assert found == [2 if is_late[0] else 3] * job.size


@both
def test_a_step_that_one_rank_cannot_read_is_passed_over_by_all(job: Job) -> None:
    job.run(lambda manager, rank: save_steps(manager, rank, 1, 2)).values()
    memory = fsspec.filesystem("memory")
    (last,) = [
        name
        for name in memory.find(f"{job.url.removeprefix('memory:/')}/step-2")
        if f"__{job.size - 1}_" in name
    ]
    memory.pipe_file(last, b"\xff" * memory.size(last))

    def strict(manager: CheckpointManager, rank: int) -> int | None:
        with pytest.raises(RankFailures, match="CorruptError"):
            manager.restore(state_of(rank))
        return restored(manager, rank, on_damaged="older")

    assert job.run(strict).values() == [1] * job.size
    with pytest.raises(RankFailures, match="no sealed step 9"):
        job.run(lambda manager, rank: restored(manager, rank, 9)).values()


@both
def test_a_time_that_is_due_saves_at_one_step_on_all_ranks(job: Job) -> None:
    """Ranks are at different steps at the same moment, and only the coordinator's clock counts."""

    def work(manager: CheckpointManager, rank: int) -> list[int]:
        saved = []
        for step in range(1, 120):
            time.sleep(0.002 * (1 + rank % 2))
            if manager.step(step, state_of(rank, step)):
                saved.append(step)
        manager.wait()
        return saved

    found = job.run(work, save=EverySeconds(0.15)).values()
    assert found == [found[0]] * job.size
    assert 1 <= len(found[0]) <= 4
    assert sealed(job) == found[0]


@both
def test_whether_a_save_is_skipped_is_decided_alike_on_all_ranks(job: Job) -> None:
    """Ranks learn of the end of a save at different steps."""

    class Slow(PassesOn):
        def put(self, key: str, *args: Any, **more: Any) -> Any:
            time.sleep(0.01 if ".distcp" in key else 0)
            return self._inner.put(key, *args, **more)

    def slow(*args: Any, **more: Any) -> Any:
        return Slow(open_store(*args, **more))

    def work(manager: CheckpointManager, rank: int) -> list[int]:
        saved = []
        for step in range(1, 60):
            time.sleep(0.001 * (rank % 2))
            if manager.step(step, state_of(rank, step)):
                saved.append(step)
        manager.wait()
        return saved

    found = job.run(work, save=EverySteps(1), when_busy="skip", store_opener=slow).values()
    assert found == [found[0]] * job.size
    assert 2 <= len(found[0]) < 59
    assert sealed(job) == found[0]


def test_a_save_is_replaced_on_all_ranks(job: Job) -> None:
    opened = threading.Event()

    class Gated(PassesOn):
        def put(self, key: str, *args: Any, **more: Any) -> Any:
            assert ".distcp" not in key or opened.wait(WAIT_S)
            return self._inner.put(key, *args, **more)

    def gated(*args: Any, **more: Any) -> Any:
        return Gated(open_store(*args, **more))

    def work(manager: CheckpointManager, rank: int) -> None:
        manager.step(1, state_of(rank, 1))
        if not rank:
            threading.Timer(0.2, opened.set).start()
        assert manager.step(2, state_of(rank, 2))
        manager.wait()

    job.run(work, save=EverySteps(1), when_busy="replace", store_opener=gated).values()
    assert sealed(job) == [2]


# --- failures -----------------------------------------------------------------------------------


class Failing(PassesOn):
    """A store that takes no tensors of a step."""

    step = 3

    def put(self, key: str, *args: Any, **more: Any) -> Any:
        if ".distcp" in key and self._inner.url.rstrip("/").endswith(f"step-{self.step}"):
            raise StoreError("no room", retryable=False)
        return self._inner.put(key, *args, **more)


def failing(*args: Any, **more: Any) -> Any:
    return Failing(open_store(*args, **more))


@both
def test_a_failure_in_the_background_is_raised_at_one_step_on_all_ranks(job: Job) -> None:
    """A loop that catches it goes on, and so do the saves: no rank waits for another in vain."""

    def work(manager: CheckpointManager, rank: int) -> list[int]:
        raised = []
        for step in range(1, 100):
            time.sleep(0.003 * (1 + rank % 2))
            try:
                manager.step(step, state_of(rank, step))
            except RankFailures as error:
                assert "no room" in str(error)
                raised.append(step)
        manager.wait()
        return raised

    openers = [open_store] * (job.size - 1) + [failing]
    found = job.run(work, save=EverySteps(3), store_opener=openers).values()
    assert found == [found[0]] * job.size
    assert len(found[0]) == 1
    assert 3 < found[0][0] <= 6
    assert sealed(job) == [step for step in range(6, 100, 3) if step != found[0][0]]


@both
def test_a_failure_is_raised_soon_though_no_other_save_is_due(job: Job) -> None:
    def work(manager: CheckpointManager, rank: int) -> list[int]:
        raised = []
        for step in range(1, 100):
            time.sleep(0.002 * (1 + rank % 2))
            try:
                manager.step(step, state_of(rank, step))
            except RankFailures:
                raised.append(step)
        return raised

    openers = [open_store] * (job.size - 1) + [failing]
    found = job.run(work, save=AtSteps(3), store_opener=openers).values()
    assert found == [found[0]] * job.size
    assert len(found[0]) == 1
    assert 3 < found[0][0] < 99


def test_a_state_that_one_rank_cannot_make_fails_the_others_at_once(job: Job) -> None:
    def broken() -> Any:
        raise ValueError("no state")

    def work(manager: CheckpointManager, rank: int) -> None:
        if rank:
            with pytest.raises(ValueError, match="no state"):
                manager.step(1, broken)
        else:
            manager.step(1, state_of(rank, 1))
            with pytest.raises(RankFailures, match="no state"):
                manager.wait()

    began_s = time.monotonic()
    job.run(work, save=EverySteps(1)).values()
    assert time.monotonic() - began_s < 10
    assert sealed(job) == []


def test_a_deadline_is_kept_alike_beside_a_save_under_way(job: Job) -> None:
    opened = threading.Event()

    class Gated(PassesOn):
        def put(self, key: str, *args: Any, **more: Any) -> Any:
            assert ".distcp" not in key or opened.wait(WAIT_S)
            return self._inner.put(key, *args, **more)

    def gated(*args: Any, **more: Any) -> Any:
        return Gated(open_store(*args, **more))

    def work(manager: CheckpointManager, rank: int) -> None:
        manager.step(1, state_of(rank, 1))
        with pytest.raises(AbandonedError):
            manager.save(2, state_of(rank, 2), deadline_s=0.3)
        opened.set()
        manager.wait()
        manager.save(3, state_of(rank, 3), deadline_s=10)

    job.run(work, save=EverySteps(1), store_opener=gated).values()
    assert sealed(job) == [1, 3]


@both
def test_a_job_that_must_not_take_over_is_refused_on_all_ranks(job: Job) -> None:
    def work(manager: CheckpointManager, rank: int) -> None:
        manager.save(1, state_of(rank, 1))
        with pytest.raises(RankFailures, match="claimed by"):
            job.manager(rank, save=EverySteps(1), takeover=False)
        manager.save(2, state_of(rank, 2))

    job.run(work).values()
    assert sealed(job) == [1, 2]


@both
def test_a_notice_to_one_rank_saves_one_step_on_all(job: Job) -> None:
    def work(manager: CheckpointManager, rank: int) -> int:
        for step in range(1, 10_000):
            time.sleep(0.002 * (1 + rank % 2))
            try:
                manager.step(step, state_of(rank, step))
            except SystemExit as end:
                assert end.code == 143
                return step
        raise AssertionError("it went on")

    def policy(rank: int) -> OnPreemption:
        return OnPreemption(signals=(), notice=lambda: rank == job.size - 1)

    found = job.run(work, save=[policy(rank) for rank in range(job.size)]).values()
    assert found == [found[0]] * job.size
    assert sealed(job) == [found[0]]


# --- requests -------------------------------------------------------------------------------------


@both
def test_how_many_requests_a_save_a_restore_and_a_retention_send(job: Job) -> None:
    """The same whether two steps were saved before, or a hundred."""
    seen: dict[Any, Counter[str]] = {}
    barrier = threading.Barrier(job.size)

    def take(name: Any, manager: CheckpointManager, rank: int) -> None:
        manager.wait()
        barrier.wait(WAIT_S)
        if not rank:
            seen[name] = job.take_counts()
        barrier.wait(WAIT_S)

    def begin(manager: CheckpointManager, rank: int) -> None:
        take("claim", manager, rank)
        for step in (1, 2):
            save_steps(manager, rank, step)
            take(step, manager, rank)
        restored(manager, rank)
        take("restore", manager, rank)

    def keep_some(manager: CheckpointManager, rank: int) -> None:
        for step in range(3, 103):
            manager.save(step, state_of(rank, step), metrics={"loss": 1 / step})
            take(step, manager, rank)
            manager.report(step, {"val_loss": 1 / step})
            take(f"report {step}", manager, rank)

    job.run(begin, save=EverySteps(1)).values()
    save_of_all = Counter({**SAVE, "put": SAVE["put"] + job.size})
    assert seen["claim"] == CLAIM
    assert seen[1] == seen[2] == save_of_all
    assert seen["restore"] == RESTORE + Counter(get_range=2 * job.size - 1)
    keep = (Latest(2), Best(1, "val_loss", "min"))
    job.run(keep_some, save=EverySteps(1), keep=keep).values()
    for step in (10, 50, 102):
        print(f"\n{job.size} ranks, step {step}: {seen[step] - save_of_all}")
        assert seen[f"report {step}"] == REPORT
        assert seen[step] == save_of_all + RETIRE


def test_who_looks_for_a_step_of_a_run_that_has_none_is_told_so(job: Job) -> None:
    with pytest.raises(RankFailures, match="no sealed step 1") as caught:
        job.run(lambda manager, rank: restored(manager, rank, 1)).values()
    assert any(isinstance(one, NotFoundError) for one in caught.value.exceptions.values())
