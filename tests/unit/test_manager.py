"""`CheckpointManager` with one rank: what a training loop may rely on."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from dcpstore import (
    AbandonedError,
    AtSteps,
    Best,
    CheckpointError,
    CheckpointManager,
    ConfigError,
    ConflictError,
    CorruptError,
    EverySeconds,
    EverySteps,
    First,
    Latest,
    NotFoundError,
    OnPreemption,
    StoreError,
    WriteConfig,
)
from dcpstore.store import open_store
from passing_on import PassesOn

WRITE = WriteConfig(inline_bytes=64)
WAIT_S = 20.0


@dataclass
class Place:
    """A run in memory, whose puts of tensors may have to wait or fail.

    Attributes:
        url: Of the run.
        key: A part of the keys of the puts that wait.
        opened: Lets them go on.
        reached: Set when one waits.
        error: What they fail with then.
        put: Keys that were put, in order.
        told: Kind and step of each event, in order.
    """

    url: str
    key: str = ".distcp"
    opened: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    put: list[str] = field(default_factory=list)
    told: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.opened.set()

    def shut(self) -> None:
        """Let the next put wait."""
        self.opened.clear()
        self.reached.clear()

    def pass_by(self, key: str) -> None:
        self.put.append(key)
        if self.key in key:
            self.reached.set()
            assert self.opened.wait(WAIT_S)
            if self.error is not None:
                raise self.error

    def opener(self, url: Any, **options: Any) -> Any:
        return _PlaceStore(open_store(url, **options), self)

    def manager(self, **options: Any) -> CheckpointManager:
        def hear(event: Any) -> None:
            self.told.append((event.kind, event.step))

        options = {"write": WRITE, "store_opener": self.opener, "on_event": hear, **options}
        return CheckpointManager(self.url, **options)

    @property
    def files(self) -> Any:
        return fsspec.filesystem("memory")

    @property
    def path(self) -> str:
        return self.url.removeprefix("memory:/")

    def names(self, folder: str = "") -> list[str]:
        """Keys below the run, or a folder of it."""
        place = f"{self.path}/{folder}".rstrip("/")
        return sorted(key.removeprefix(f"{place}/") for key in self.files.find(place))

    def sealed(self) -> list[int]:
        """Steps that are sealed, by what lies there."""
        names = [one for one in self.names() if one.endswith("/.metadata")]
        return sorted(int(one.split("/")[0].removeprefix("step-")) for one in names)

    def damage(self, step: int, what: str = ".distcp") -> None:
        (name,) = [one for one in self.names(f"step-{step}") if what in one]
        key = f"{self.path}/step-{step}/{name}"
        data = bytearray(self.files.cat_file(key))
        for at in range(len(data) // 2, len(data)):
            data[at] ^= 0xFF
        self.files.pipe_file(key, bytes(data))

    def kinds(self, step: int) -> list[str]:
        """What was told of a step."""
        return [kind for kind, number in self.told if number == step]


class _PlaceStore(PassesOn):
    def __init__(self, inner: Any, place: Place) -> None:
        super().__init__(inner)
        self._place = place

    def put(self, key: str, data: Any, **options: Any) -> Any:
        self._place.pass_by(key)
        return self._inner.put(key, data, **options)

    def put_parts(self, key: str, parts: Any, **options: Any) -> Any:
        self._place.pass_by(key)
        return self._inner.put_parts(key, parts, **options)


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    return Place(f"memory://manager/{request.node.name}")


def state_of(value: float = 0.0) -> dict[str, Any]:
    return {"weights": torch.full((500,), float(value)), "step": int(value)}


def train(manager: CheckpointManager, first: int, last: int, **options: Any) -> list[int]:
    """Make steps, whose weights are their number; return those that were saved."""
    steps = range(first, last + 1)
    return [step for step in steps if manager.step(step, state_of(step), **options)]


def restored(manager: CheckpointManager, *args: Any, **options: Any) -> tuple[int | None, float]:
    """Restore; return the step and the value of all weights."""
    state = state_of()
    found = manager.restore(state, *args, **options)
    (value,) = set(state["weights"].tolist())
    assert state["step"] == int(value)
    return found, value


def wait_until(claim: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + WAIT_S
    while not claim():
        assert time.monotonic() < ends_s
        time.sleep(0.002)


# --- saving and resuming ------------------------------------------------------------------------


def test_where_there_is_nothing_restore_says_so_and_leaves_the_state(place: Place) -> None:
    with place.manager() as manager:
        assert restored(manager) == (None, 0.0)
        assert manager.latest() is None
        assert manager.steps() == []
        assert manager.restored is None
    assert place.names() == [], "who only looks claims nothing"


def test_a_run_is_resumed_from_its_newest_step(place: Place) -> None:
    with place.manager(save=EverySteps(2)) as manager:
        assert train(manager, 1, 5) == [2, 4]
    with place.manager(save=EverySteps(2)) as manager:
        assert restored(manager) == (4, 4.0)
        assert manager.restored is not None
        assert manager.restored.url == f"{place.url}/step-4"
        assert train(manager, 5, 8) == [6, 8]
    with place.manager() as manager:
        assert restored(manager) == (8, 8.0)
        assert [one.step for one in manager.steps()] == [8, 6, 4, 2]


def test_a_step_by_number_is_restored_and_one_that_is_not_there_is_an_error(place: Place) -> None:
    with place.manager(save=EverySteps(1)) as manager:
        train(manager, 1, 3)
    with place.manager() as manager:
        assert restored(manager, 2) == (2, 2.0)
        for on_damaged in ("raise", "older"):
            with pytest.raises(NotFoundError, match="no sealed step 7"):
                restored(manager, 7, on_damaged=on_damaged)


def test_a_step_of_the_run_can_be_loaded_without_a_manager(place: Place) -> None:
    import dcpstore

    with place.manager(save=EverySteps(1)) as manager:
        train(manager, 1, 1)
    state = state_of()
    dcpstore.load(state, f"{place.url}/step-1")
    assert state["weights"][0] == 1


def test_save_returns_once_the_step_is_sealed_whatever_is_due(place: Place) -> None:
    with place.manager() as manager:
        result = manager.save(7, state_of(7), metrics={"loss": 1.5})
        assert result.num_keys == 2
        assert place.sealed() == [7]
        latest = manager.latest()
        assert latest is not None
        assert latest.facts.metrics == {"loss": 1.5}


def test_in_the_foreground_a_step_is_sealed_when_step_returns(place: Place) -> None:
    with place.manager(save=EverySteps(1), background=False) as manager:
        for step in (1, 2, 3):
            assert manager.step(step, state_of(step))
            assert place.sealed()[-1] == step
            assert not manager.is_saving


# --- when a save is due -------------------------------------------------------------------------


def test_policies_save_at_their_steps_and_any_of_them_suffices(place: Place) -> None:
    with place.manager(save=[EverySteps(5), AtSteps(3, 8), First()]) as manager:
        assert train(manager, 1, 10) == [1, 3, 5, 8, 10]


def test_the_first_step_of_a_job_that_resumed_is_saved_too(place: Place) -> None:
    """`First` shows at once what cannot be saved; a job that resumed is a job."""
    for first in (1, 4):
        with place.manager(save=First()) as manager:
            restored(manager)
            assert train(manager, first, first + 2) == [first]
            manager.wait()


def test_time_is_due_once_per_interval(place: Place) -> None:
    clock = Clock()
    with place.manager(save=EverySeconds(60), clock=clock) as manager:
        saved = []
        for step in range(1, 31):
            clock.now_s += 10
            saved += train(manager, step, step)
            manager.wait()
    assert 4 <= len(saved) <= 5
    assert {b - a for a, b in itertools.pairwise(saved)} <= {6, 7}


def test_a_clock_that_jumps_makes_one_save_not_many(place: Place) -> None:
    clock = Clock()
    with place.manager(save=EverySeconds(60), clock=clock) as manager:
        train(manager, 1, 3)
        clock.now_s += 1e6
        saved = train(manager, 4, 20)
        assert len(saved) == 1
        clock.now_s += 61
        assert len(train(manager, 21, 30)) == 1


def test_a_state_is_made_only_when_it_is_due(place: Place) -> None:
    made = []

    def state(step: int) -> Callable[[], Any]:
        def make() -> Any:
            made.append(step)
            return state_of(step)

        return make

    with place.manager(save=EverySteps(3)) as manager:
        for step in range(1, 8):
            manager.step(step, state(step))
    assert made == [3, 6]
    with place.manager() as manager:
        assert restored(manager) == (6, 6.0)


def test_a_step_that_is_saved_already_is_not_saved_again(place: Place) -> None:
    with place.manager(save=EverySteps(2)) as manager:
        assert manager.step(2, state_of(2))
        assert not manager.step(2, state_of(2))
    with place.manager(save=EverySteps(2)) as manager:
        restored(manager)
        assert not manager.step(2, state_of(2))


def test_training_may_change_the_tensors_once_step_has_returned(place: Place) -> None:
    place.shut()
    state = state_of(1)
    with place.manager(save=EverySteps(1)) as manager:
        manager.step(1, state)
        state["weights"].fill_(99)
        place.opened.set()
    with place.manager() as manager:
        assert restored(manager) == (1, 1.0)


# --- failures are told: "saved" that meant "staged" (Lightning #21557, #21515) ------------------


def test_saved_does_not_mean_staged_lightning_21557(place: Place) -> None:
    place.shut()
    with place.manager(save=EverySteps(1)) as manager:
        assert manager.step(1, state_of(1))
        assert place.reached.wait(WAIT_S)
        assert place.kinds(1) == ["save_started", "staged"]
        assert manager.is_saving
        assert manager.latest() is None
        place.opened.set()
        manager.wait()
        assert place.kinds(1) == ["save_started", "staged", "sealed"]
        assert not manager.is_saving
        assert place.sealed() == [1]


def test_the_seal_itself_must_be_there_before_a_step_counts_lightning_21515(place: Place) -> None:
    place.key = ".metadata"
    place.shut()
    with place.manager(save=EverySteps(1)) as manager:
        manager.step(1, state_of(1))
        assert place.reached.wait(WAIT_S)
        assert "sealed" not in place.kinds(1)
        place.error = StoreError("no room", retryable=False)
        place.opened.set()
        with pytest.raises(CheckpointError, match="no room"):
            manager.wait()
        assert place.kinds(1) == ["save_started", "staged", "failed"]
        place.error = None
        assert manager.latest() is None


@pytest.mark.parametrize("call", ["step", "save", "wait", "restore", "close"])
def test_a_failed_save_in_the_background_is_raised_by_the_next_call(
    place: Place, call: str
) -> None:
    place.error = StoreError("no room", retryable=False)
    manager = place.manager(save=EverySteps(10))
    manager.step(10, state_of(10))
    wait_until(lambda: not manager.is_saving)
    place.error = None
    calls: dict[str, Callable[[], object]] = {
        "step": lambda: manager.step(11, state_of(11)),
        "save": lambda: manager.save(11, state_of(11)),
        "wait": manager.wait,
        "restore": lambda: manager.restore(state_of()),
        "close": manager.close,
    }
    with pytest.raises(StoreError, match="no room"):
        calls[call]()
    assert place.kinds(10) == ["save_started", "staged", "failed"]
    assert place.sealed() == []
    assert [one for one in place.names() if one.startswith("step-")] == [], "it was swept"
    manager.close()


def test_after_failures_the_same_manager_saves_again(place: Place) -> None:
    with place.manager(save=EverySteps(1)) as manager:
        for step in (1, 2, 3):
            place.error = StoreError("no room", retryable=False) if step < 3 else None
            manager.step(step, state_of(step))
            if step < 3:
                with pytest.raises(StoreError, match="no room"):
                    manager.wait()
        manager.wait()
        assert place.sealed() == [3]
        place.error = StoreError("no room", retryable=False)
        with pytest.raises(StoreError, match="no room"):
            manager.save(4, state_of(4))
        place.error = None
        manager.save(4, state_of(4))
    assert place.sealed() == [3, 4]


def test_a_state_that_cannot_be_made_raises_and_counts_as_failed(place: Place) -> None:
    def broken() -> Any:
        raise ValueError("no state")

    with place.manager(save=EverySteps(1)) as manager:
        with pytest.raises(ValueError, match="no state"):
            manager.step(1, broken)
        assert place.kinds(1)[-1] == "failed"
        manager.save(1, state_of(1))
    assert place.sealed() == [1]


def test_close_waits_for_the_save_and_is_idempotent(place: Place) -> None:
    place.shut()
    manager = place.manager(save=EverySteps(1))
    manager.step(1, state_of(1))
    threading.Timer(0.1, place.opened.set).start()
    manager.close()
    assert place.sealed() == [1]
    manager.close()


def test_ctrl_c_while_a_save_is_waited_for_does_not_lose_it(place: Place) -> None:
    place.shut()
    manager = place.manager(save=EverySteps(1), keep=Latest(1))
    manager.step(1, state_of(1))
    assert place.reached.wait(WAIT_S)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    threading.Timer(0.6, place.opened.set).start()
    with pytest.raises(KeyboardInterrupt), manager:
        manager.step(2, state_of(2))
    assert place.sealed() == [1]
    assert place.kinds(1) == ["save_started", "staged", "sealed"]


def fail_in_training(manager: CheckpointManager) -> None:
    with manager:
        manager.step(1, state_of(1))
        raise ArithmeticError("the loss is NaN")


@pytest.mark.parametrize("error", [None, StoreError("no room"), RuntimeError("a bug")])
def test_an_error_of_training_is_not_hidden_by_the_save(
    place: Place, error: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    place.error = error
    with pytest.raises(ArithmeticError, match="the loss is NaN"):
        fail_in_training(place.manager(save=EverySteps(1)))
    assert place.sealed() == ([] if error else [1])
    assert (str(error) in caplog.text) == (error is not None)


# --- a save that is due while another is under way ----------------------------------------------


def test_a_save_waits_for_the_one_under_way(place: Place) -> None:
    place.shut()
    with place.manager(save=EverySteps(1), when_busy="wait") as manager:
        manager.step(1, state_of(1))
        assert place.reached.wait(WAIT_S)
        threading.Timer(0.1, place.opened.set).start()
        assert manager.step(2, state_of(2))
        assert place.sealed()[0] == 1
    assert place.sealed() == [1, 2]


def test_a_save_is_skipped_while_one_is_under_way(place: Place) -> None:
    place.shut()
    with place.manager(save=EverySteps(1), when_busy="skip") as manager:
        manager.step(1, state_of(1))
        assert place.reached.wait(WAIT_S)
        made: list[int] = []
        assert not manager.step(2, lambda: made.append(2) or state_of(2))
        assert made == []
        assert place.kinds(2) == ["skipped"]
        place.opened.set()
        manager.wait()
        assert manager.step(3, state_of(3))
    assert place.sealed() == [1, 3]


def test_a_save_replaces_the_one_under_way_which_leaves_nothing(place: Place) -> None:
    place.shut()
    with place.manager(save=EverySteps(1), when_busy="replace") as manager:
        manager.step(1, state_of(1))
        assert place.reached.wait(WAIT_S)
        threading.Timer(0.1, place.opened.set).start()
        assert manager.step(2, state_of(2))
        manager.wait()
    assert place.sealed() == [2]
    assert place.names("step-1") == []
    assert "failed" not in place.kinds(1), "who gave it up need not be told"


def test_a_failure_is_not_taken_for_a_save_that_was_replaced(place: Place) -> None:
    place.error = StoreError("no room", retryable=False)
    with place.manager(save=EverySteps(1), when_busy="replace") as manager:
        manager.step(1, state_of(1))
        wait_until(lambda: not manager.is_saving)
        with pytest.raises(StoreError, match="no room"):
            manager.step(2, state_of(2))
        place.error = None
        assert manager.step(3, state_of(3))


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="when_busy"):
        CheckpointManager("memory://x", when_busy="later")  # type: ignore[arg-type]


# --- deadlines ----------------------------------------------------------------------------------


def test_a_save_that_cannot_meet_its_deadline_is_given_up_and_swept(place: Place) -> None:
    with place.manager() as manager:
        manager.save(1, state_of(1))
        place.shut()
        threading.Timer(0.5, place.opened.set).start()
        with pytest.raises(AbandonedError, match=r"0\.3"):
            manager.save(2, state_of(2), deadline_s=0.3)
        assert place.sealed() == [1]
        assert place.names("step-2") == []
        assert place.kinds(2)[-1] == "failed"
        assert restored(manager) == (1, 1.0)
        manager.save(3, state_of(3), deadline_s=10)
    assert place.sealed() == [1, 3]


def test_the_deadline_holds_although_another_save_is_under_way(place: Place) -> None:
    place.shut()
    with place.manager(save=EverySteps(1)) as manager:
        manager.step(1, state_of(1))
        assert place.reached.wait(WAIT_S)
        opens = threading.Timer(3, place.opened.set)
        opens.start()
        began_s = time.monotonic()
        with pytest.raises(AbandonedError):
            manager.save(2, state_of(2), deadline_s=0.3)
        assert time.monotonic() - began_s < 2
        place.opened.set()
        opens.cancel()
        manager.wait()
    assert place.sealed() == [1], "the save under way is not lost"


# --- damage -------------------------------------------------------------------------------------


def three_steps(place: Place) -> None:
    with place.manager(save=EverySteps(1)) as manager:
        for step in (1, 2, 3):
            manager.step(step, state_of(step), metrics={"loss": -step})


@pytest.mark.parametrize("what", [".distcp", ".metadata"])
def test_a_damaged_newest_step_is_an_error_or_passed_over_loudly(place: Place, what: str) -> None:
    three_steps(place)
    place.damage(3, what)
    with place.manager() as manager:
        with pytest.raises(CorruptError):
            manager.restore(state_of())
        place.told.clear()
        assert restored(manager, on_damaged="older") == (2, 2.0)
        assert place.told == [("failed", 3), ("restored", 2)]


@pytest.mark.parametrize("what", [".distcp", ".metadata"])
@pytest.mark.parametrize("step", ["latest", "best", 3])
@pytest.mark.parametrize("on_damaged", ["raise", "older"])
def test_where_every_step_is_damaged_restore_never_says_that_there_is_nothing(
    place: Place, what: str, step: Any, on_damaged: Any
) -> None:
    three_steps(place)
    for number in (1, 2, 3):
        place.damage(number, what)
    with (
        place.manager(keep=Best(1, "loss", "min")) as manager,
        # Metadata without their end are those of another writer, which have no metrics.
        pytest.raises(NotFoundError if (step, what) == ("best", ".metadata") else CorruptError),
    ):
        manager.restore(state_of(), step, on_damaged=on_damaged)


def test_a_damaged_best_step_is_passed_over_for_the_next_best(place: Place) -> None:
    three_steps(place)
    place.damage(3)
    with place.manager(keep=Best(1, "loss", "min")) as manager:
        with pytest.raises(CorruptError):
            manager.restore(state_of(), "best")
        assert restored(manager, "best", on_damaged="older") == (2, 2.0)


def test_a_step_that_vanished_between_the_look_and_the_load_is_no_fresh_run(place: Place) -> None:
    three_steps(place)
    (name,) = [one for one in place.names("step-3") if ".distcp" in one]
    place.files.rm(f"{place.path}/step-3/{name}")
    with place.manager() as manager:
        with pytest.raises(CheckpointError):
            manager.restore(state_of())
        assert restored(manager, on_damaged="older") == (2, 2.0)


def test_a_store_that_fails_is_no_damage(place: Place) -> None:
    three_steps(place)

    class Failing(PassesOn):
        def get_range(self, *_: Any, **__: Any) -> Any:
            raise StoreError("denied", retryable=False)

        fill = get = get_tail = get_range

    def opener(url: Any, **options: Any) -> Any:
        return Failing(open_store(url, **options))

    with place.manager(store_opener=opener, keep=Best(1, "loss", "min")) as manager:
        for step in ("latest", "best"):
            with pytest.raises(StoreError, match="denied"):
                manager.restore(state_of(), step, on_damaged="older")


def test_leftovers_of_a_killed_save_are_no_step(place: Place) -> None:
    three_steps(place)
    place.files.pipe_file(f"{place.path}/step-9/__0_0123456789abcdef.distcp", b"half")
    with place.manager(save=EverySteps(3)) as manager:
        assert restored(manager) == (3, 3.0)
        assert train(manager, 4, 9) == [6, 9]
    with place.manager() as manager:
        assert restored(manager) == (9, 9.0)


# --- metrics, attachments -----------------------------------------------------------------------


def test_attachments_and_facts_come_back_with_the_step_automodel_3261(
    place: Place, tmp_path: Path
) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(b"[1, 2]" * 1000)
    with place.manager(save=EverySteps(1)) as manager:
        beside = {"data-{rank}.json": json.dumps({"at": 7}).encode(), "tokenizer.json": file}
        manager.step(1, state_of(1), attachments=beside, user_metadata={"git": "abc"})
        manager.wait()
        file.unlink()
    shutil.rmtree(tmp_path)
    with place.manager() as manager:
        with pytest.raises(NotFoundError, match="no step was restored"):
            manager.read_attachment("data.json")
        assert restored(manager) == (1, 1.0)
        assert json.loads(manager.read_attachment("data-{rank}.json")) == {"at": 7}
        assert manager.read_attachment("tokenizer.json", 1) == b"[1, 2]" * 1000
        with pytest.raises(NotFoundError):
            manager.read_attachment("other")
        with pytest.raises(NotFoundError):
            manager.read_attachment("tokenizer.json", 5)
        assert manager.restored is not None


def test_the_best_step_is_restored_by_what_was_reported_after_the_seal(place: Place) -> None:
    with place.manager(save=EverySteps(1), keep=[Best(1, "val_loss", "min"), Latest(2)]) as manager:
        for step in (1, 2, 3, 4):
            manager.step(step, state_of(step), metrics={"loss": 1 / step})
            manager.wait()
            manager.report(step, {"val_loss": abs(step - 2) + 1.0})
        assert place.sealed() == [2, 3, 4]
        best = manager.best()
        assert best is not None
        assert best.step == 2
        assert best.facts.metrics == {"loss": 0.5}
        assert restored(manager, "best") == (2, 2.0)
        manager.report(4, {"val_loss": 0.0})
        assert restored(manager, "best") == (4, 4.0)


def test_where_no_step_has_the_metric_best_is_an_error_rather_than_a_fresh_run(
    place: Place,
) -> None:
    three_steps(place)
    with place.manager(keep=Best(1, "accuracy", "max")) as manager:
        assert manager.best() is None
        with pytest.raises(NotFoundError, match="accuracy"):
            manager.restore(state_of(), "best")
    with place.manager() as manager, pytest.raises(ConfigError, match="Best"):
        manager.restore(state_of(), "best")


def test_what_was_reported_of_a_removed_step_says_nothing_of_one_that_is_saved_anew(
    place: Place,
) -> None:
    with place.manager(save=EverySteps(1), keep=[Latest(1), Best(1, "loss", "min")]) as manager:
        train(manager, 1, 1)
        manager.wait()
        manager.report(1, {"loss": 0.5})
        train(manager, 2, 2, metrics={"loss": 0.1})
        manager.wait()
        assert place.sealed() == [2]
        assert [one for one in place.names(".dcpstore-run") if "step-1" in one] == []
        manager.step(1, state_of(1), metrics={"loss": 0.9})
        manager.wait()
        best = manager.best()
        assert best is not None
        assert best.step == 2


# --- what stays ---------------------------------------------------------------------------------


def test_old_steps_go_once_a_newer_one_is_sealed(place: Place) -> None:
    with place.manager(save=EverySteps(1), keep=[Latest(2), EverySteps(4)]) as manager:
        train(manager, 1, 9)
        manager.wait()
        assert place.sealed() == [4, 8, 9]
        assert {step for kind, step in place.told if kind == "deleted"} == {1, 2, 3, 5, 6, 7}
    folders = {one.split("/")[0] for one in place.names()}
    assert folders == {"step-4", "step-8", "step-9", ".dcpstore-run"}


def test_pinned_steps_stay_until_they_are_unpinned(place: Place) -> None:
    with place.manager(save=EverySteps(1), keep=Latest(1)) as manager:
        train(manager, 1, 1)
        manager.wait()
        manager.pin(1)
        train(manager, 2, 3)
        manager.wait()
        assert place.sealed() == [1, 3]
        manager.unpin(1)
        train(manager, 4, 4)
        manager.wait()
        assert place.sealed() == [4]
        with pytest.raises(NotFoundError):
            manager.pin(1)


def test_a_failed_save_removes_no_older_step(place: Place) -> None:
    with place.manager(save=EverySteps(1), keep=Latest(1)) as manager:
        train(manager, 1, 1)
        manager.wait()
        place.error = StoreError("no room", retryable=False)
        manager.step(2, state_of(2))
        with pytest.raises(StoreError):
            manager.wait()
        assert place.sealed() == [1]


def test_the_resumed_step_stays_until_a_newer_one_is_sealed_lightning_21813(place: Place) -> None:
    three_steps(place)
    with place.manager(save=EverySteps(2), keep=Latest(1)) as manager:
        assert restored(manager, 2) == (2, 2.0)
        place.shut()
        assert train(manager, 3, 4) == [4]
        assert place.reached.wait(WAIT_S)
        assert place.sealed() == [1, 2, 3], "none is sealed yet"
        place.opened.set()
        manager.wait()
        assert place.sealed() == [2, 4], "the claim, put before the seal, still names it"
        train(manager, 5, 6)
        manager.wait()
        assert place.sealed() == [6]


def test_a_job_that_went_back_keeps_its_start_and_what_it_saves_lightning_21813(
    place: Place,
) -> None:
    """The steps that it does not go on from have higher numbers than what it saves."""
    with place.manager(save=EverySteps(1)) as manager:
        train(manager, 1, 9)
    with place.manager(save=EverySteps(1), keep=Latest(2)) as manager:
        assert restored(manager, 3) == (3, 3.0)
        train(manager, 4, 4)
        manager.wait()
        assert 4 in place.sealed()
        manager._retire()
        assert 4 in place.sealed()
        train(manager, 5, 5)
        manager.wait()
        assert 5 in place.sealed()


def test_a_store_that_lets_nothing_go_is_a_warning_and_training_goes_on(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(PassesOn):
        def delete_many(self, keys: Any) -> Any:
            raise StoreError(f"denied: {list(keys)}", retryable=False)

    def opener(url: Any, **options: Any) -> Any:
        return Refusing(place.opener(url, **options))

    with place.manager(save=EverySteps(1), keep=Latest(1), store_opener=opener) as manager:
        assert train(manager, 1, 3) == [1, 2, 3]
        manager.wait()
    assert place.sealed() == [1, 2, 3]
    assert "step-1/.metadata" in caplog.text
    assert not [one for one in place.told if one[0] == "deleted"]


# --- two jobs -----------------------------------------------------------------------------------


def test_of_two_jobs_on_one_run_the_second_is_warned_and_the_first_seals_no_more(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    first = place.manager(save=EverySteps(1))
    train(first, 1, 1)
    first.wait()
    assert caplog.text == ""
    with place.manager(save=EverySteps(1)) as second:
        assert "this job takes it over" in caplog.text
        assert restored(second) == (1, 1.0)
        first.step(2, state_of(2))
        with pytest.raises(ConflictError, match="taken over"):
            first.wait()
        assert place.sealed() == [1]
        assert place.names("step-2") == []
        with pytest.raises(ConflictError, match="taken over"):
            first.save(3, state_of(3))
        assert train(second, 2, 3) == [2, 3]
        second.wait()
        first.close()
        assert place.sealed() == [1, 2, 3]
    caplog.clear()
    with place.manager(save=EverySteps(1)):
        assert caplog.text == "", "the second has ended well"


def test_a_job_that_must_not_take_over_is_refused_and_leaves_nothing_behind(place: Place) -> None:

    before = signal.getsignal(signal.SIGTERM), set(threading.enumerate())
    with place.manager(save=EverySteps(1)) as first:
        held = set(threading.enumerate())
        with pytest.raises(ConflictError, match="claimed by"):
            place.manager(save=[EverySteps(1), OnPreemption()], takeover=False)
        wait_until(lambda: set(threading.enumerate()) <= held)
        assert signal.getsignal(signal.SIGTERM) is before[0]
        assert train(first, 1, 1) == [1]
    assert place.sealed() == [1]
    with place.manager(save=EverySteps(1), takeover=False) as other:
        assert train(other, 2, 2) == [2]


@pytest.mark.parametrize("heard", ["2000-01-01T00:00:00+00:00", "2999-01-01T00:00:00+00:00", "?"])
def test_a_clock_that_jumps_lets_no_two_jobs_seal_beside_each_other(
    place: Place, heard: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = place.manager(save=EverySteps(1))
    train(first, 1, 1)
    first.wait()
    key = f"{place.path}/.dcpstore-run/claim.json"
    told = json.loads(place.files.cat_file(key))
    place.files.pipe_file(key, json.dumps({**told, "heard": heard}).encode())
    with place.manager(save=EverySteps(1)) as second:
        assert ("takes it over" in caplog.text) == (heard[:4] != "2000"), "silent for a day"
        first.step(2, state_of(2))
        with pytest.raises(ConflictError, match="taken over"):
            first.wait()
        assert train(second, 3, 3) == [3]
    first.close()
    assert place.sealed() == [1, 3]


def test_who_only_reads_a_run_disturbs_nobody(place: Place) -> None:
    with place.manager(save=EverySteps(1)) as first:
        train(first, 1, 1)
        first.wait()
        with place.manager(takeover=False) as reader:
            assert restored(reader) == (1, 1.0)
        assert train(first, 2, 2) == [2]
        first.wait()
    assert place.sealed() == [1, 2]


# --- told to stop -------------------------------------------------------------------------------


def stop(**options: Any) -> OnPreemption:
    return OnPreemption(signals=(), notice=lambda: True, **options)


def steps_until_the_end(manager: CheckpointManager, first: int) -> int:
    """Make steps until the manager ends the job; return the last one."""
    for step in range(first, 100_000):
        try:
            manager.step(step, state_of(step))
        except SystemExit as end:
            assert end.code == 143
            return step
        time.sleep(0.001)
    raise AssertionError("it went on")


def test_a_notice_saves_the_step_and_ends_the_job(place: Place) -> None:
    with place.manager(save=stop()) as manager:
        last = steps_until_the_end(manager, 1)
        assert manager.is_stopping
    assert place.sealed() == [last]
    assert place.kinds(last)[0] == "preempted"


def test_a_notice_may_leave_the_end_to_the_loop(place: Place) -> None:
    with place.manager(save=stop(then="continue")) as manager:
        step = 0
        while not manager.is_stopping:
            step += 1
            manager.step(step, state_of(step))
            time.sleep(0.001)
    assert place.sealed() == [step]


def test_the_last_step_is_saved_although_the_save_before_it_failed(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    told = threading.Event()
    policies = [EverySteps(10), OnPreemption(signals=(), notice=told.is_set)]
    with place.manager(save=policies) as manager:
        place.error = StoreError("no room", retryable=False)
        place.shut()
        manager.step(10, state_of(10))
        manager._agreement.request("told", is_end=True)
        assert place.reached.wait(WAIT_S)
        place.opened.set()
        wait_until(lambda: not manager.is_saving)
        place.error = None
        with pytest.raises(SystemExit):
            manager.step(11, state_of(11))
    assert place.sealed() == [11]
    assert "no room" in caplog.text


def test_a_last_save_that_cannot_meet_its_deadline_leaves_the_last_sealed_step(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    with place.manager(save=[AtSteps(1), OnPreemption(1.0, (), lambda: False)]) as manager:
        train(manager, 1, 1)
        manager.wait()
        manager._agreement.request("told", is_end=True)
        place.shut()
        threading.Timer(1.2, place.opened.set).start()
        with pytest.raises(SystemExit):
            manager.step(2, state_of(2))
    assert place.sealed() == [1]
    assert place.names("step-2") == []
    assert "step 2 is not saved" in caplog.text


def test_a_request_to_stop_that_was_given_up_is_made_again(place: Place) -> None:
    """Some rank was silent for a while; the machine goes away all the same."""
    with place.manager(save=OnPreemption(signals=(), notice=lambda: False)) as manager:
        manager.step(1, state_of(1))
        manager._hear_of_end("notice")
        manager._agreement._due.clear()
        manager._note_given_up("rank 0: notice", True)
        with pytest.raises(SystemExit):
            manager.step(2, state_of(2))
    assert place.sealed() == [2]


def test_a_policy_of_the_users_that_fails_is_logged_and_removes_nothing(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def keep(self, steps: Any) -> Any:
            raise TypeError("a policy with a mistake")

    with place.manager(save=EverySteps(1), keep=Broken()) as manager:
        train(manager, 1, 2)
        manager.wait()
    assert sorted(place.sealed()) == [1, 2]
    told = [one for one in caplog.records if "could not be judged" in one.message]
    assert told
    assert "a policy with a mistake" in str(told[0].exc_info)


# --- over a long run ----------------------------------------------------------------------------


def test_memory_threads_and_file_descriptors_are_flat_over_many_saves(tmp_path: Path) -> None:
    state = state_of(1)
    seen = []
    with CheckpointManager(
        tmp_path, save=EverySteps(1), keep=[Latest(2), Best(1, "loss", "min")]
    ) as manager:
        for step in range(1, 91):
            manager.step(step, state, metrics={"loss": 1 / step}, attachments={"a": b"1"})
            if step % 30 == 0:
                manager.wait()
                gc.collect()
                num_files = sum(1 for _ in Path("/proc/self/fd").iterdir())
                seen.append((len(gc.get_objects()), threading.active_count(), num_files))
        print(f"\nobjects, threads, file descriptors after each 30 saves: {seen}")
        _, second, third = seen
        assert third[0] - second[0] < 90
        assert third[1] <= second[1]
        assert third[2] <= second[2]
    assert sorted(one.name for one in tmp_path.iterdir() if one.name.startswith("step")) == [
        "step-89",
        "step-90",
    ]


def test_nothing_is_left_running_by_a_manager_that_is_closed(place: Place) -> None:
    before = set(threading.enumerate())
    for _ in range(3):
        with place.manager(save=[EverySteps(1), OnPreemption()], keep=Latest(1)) as manager:
            restored(manager)
            start = manager.restored.step if manager.restored else 0
            train(manager, start + 1, start + 3)
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_the_log_says_nothing_louder_than_a_line_of_news(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, "dcpstore"),
        place.manager(save=EverySteps(1), keep=Latest(1)) as manager,
    ):
        train(manager, 1, 5)
    assert caplog.text == ""
