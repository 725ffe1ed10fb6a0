"""Faults and races while steps of a run are removed: a step is whole, or it is not there."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from dcpstore.audit.verify import verify_checkpoint
from dcpstore.errors import CheckpointError, ConflictError, NotFoundError
from dcpstore.format.seal import data_key, new_save_id, save_id_of
from dcpstore.manager.policies import Latest
from dcpstore.manager.retention import plan, retire
from dcpstore.manager.run import DELETING, METRICS, PINS, RECORDS, Run
from dcpstore.store.retry import Call, WrappedStore
from dcpstore.testing import FaultyStore, StoreFault
from faults.places import Backend
from faults.ranks import rank_state, save_on_ranks
from faults.states import loaded_step, save, state_at

Content = Mapping[str, bytes]
RUN = "5eed" * 4
CLAIM = {"run": RUN, "owner": "me", "host": "here", "pid": 1, "resumed": 80, "released": True}
TIMES = {"since": "2026-01-01T00:00:00+00:00", "heard": "2026-01-01T00:00:00+00:00"}
GOING = ("step-20", "step-30")
HOUR_S, DAY_S = 3600.0, 86400.0
KINDS = ("error", "denied", "crash", "crash_after", "lost_ack")


def saved(step: int, run: str | None = RUN, *, num_ranks: int = 1) -> dict[str, bytes]:
    """The objects of a small checkpoint."""
    backend = Backend()
    writers = [backend.writer() for _ in range(num_ranks)]
    writers[0].attach(step=step, run=run, metrics={"loss": 1.0 / step})
    if num_ranks == 1:
        save(state_at(step), writers[0])
    else:
        save_on_ranks(writers, [rank_state(step, rank) for rank in range(num_ranks)])
    return backend.content()


def under(folder: str, objects: Content) -> dict[str, bytes]:
    return {f"{folder}/{key}": data for key, data in objects.items()}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: Any) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("stock")
    save(state_at(60), dcp.FileSystemWriter(folder))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def start(stock: dict[str, bytes]) -> dict[str, bytes]:
    """A run of which steps 20 and 30 may go, and all others have a reason to stay."""
    damaged = saved(70)
    damaged[".metadata"] = damaged[".metadata"][:-40] + b"?" * 20 + damaged[".metadata"][-20:]
    return {
        **under("step-10", saved(10)),  # pinned
        **under("step-20", saved(20, num_ranks=2)),
        **under("step-30", saved(30)),
        **under("step-40", saved(40)),  # a save is under way
        f"step-40/{data_key(0, 0, new_save_id())}": b"half of it",
        **under("step-50", saved(50, "another")),
        **under("step-60", stock),
        **under("step-70", damaged),
        **under("step-80", saved(80)),  # resumed from
        **under("step-90", saved(90)),
        **under("step-100", saved(100)),
        f"step-110/{data_key(0, 0, new_save_id())}": b"not sealed yet",
        f"{PINS}step-10/0": b"",
        f"{METRICS}step-20.json": b'{"metrics": {}}',
        RECORDS + "claim.json": json.dumps({**CLAIM, **TIMES}).encode(),
    }


def backend_of(content: Content) -> Backend:
    backend = Backend()
    for key, data in content.items():
        backend.shared.put(key, data)
    return backend


def run_on(store: Any) -> Run:
    return Run("memory://run", store_opener=lambda *_args, **_options: store)


def retire_on(store: Any, *, later_s: float = 0.0, **options: Any) -> Any:
    run = run_on(store)
    verdicts = plan(run, Latest(2), **options)
    return retire(run, verdicts, clock=lambda: time.time() + later_s)


def in_folder(content: Content, folder: str) -> dict[str, bytes]:
    return {k: data for k, data in content.items() if k.startswith(f"{folder}/")}


def without(content: Content, *folders: str) -> dict[str, bytes]:
    gone = tuple(f"{name}/" for name in folders) + tuple(f"{METRICS}{name}." for name in folders)
    return {key: data for key, data in content.items() if not key.startswith(gone)}


def assert_loads(content: Content, folder: str) -> None:
    """Open a step, read and check all of it."""
    inside = in_folder(content, folder)
    backend = backend_of({key.removeprefix(f"{folder}/"): inside[key] for key in inside})
    found = verify_checkpoint("memory://x", store_opener=lambda *_args, **_options: backend.shared)
    assert not found.findings
    if folder != "step-20":  # saved by two ranks
        step = int(folder.removeprefix("step-"))
        assert loaded_step(backend.reader(), state_at(0)) == step


# A fault at every request ------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_any_request_leaves_each_step_whole_or_not_there(
    kind: Any, start: dict[str, bytes]
) -> None:
    stays = sorted({key.partition("/")[0] for key in start if key.startswith("step-")} - {*GOING})
    names = [f"step-{step}" for step in (10, 40, 50, 60, 80, 90, 100)]
    for k in range(80):
        backend = backend_of(start)
        store = FaultyStore(backend.shared, [StoreFault(kind, at=k)])
        run = run_on(store)
        with suppress(CheckpointError):
            retire(run, plan(run, Latest(2)))
        is_through = store.num_requests <= k
        store.revive()

        content = backend.content()
        for folder in stays:
            assert in_folder(content, folder) == in_folder(start, folder), (k, folder)
        whole = [name for name in GOING if in_folder(content, name) == in_folder(start, name)]
        # By one that looks for the first time, and by the one that was removing.
        for one in (run_on(backend.shared), run):
            assert {found.folder for found in one.all()} == {*names, *whole}, k
        assert run.newest().folder == "step-100"  # type: ignore[union-attr]

        retire_on(backend.shared, later_s=2 * HOUR_S)
        assert backend.content() == without(start, *GOING), k
        if is_through:
            break
    else:
        pytest.fail("the removal never got through")
    assert k >= 25
    for name in names:
        assert_loads(start, name)
    for name in GOING:
        assert_loads(start, name)


def test_what_a_dead_removal_left_of_many_ranks_goes_with_the_next(start: dict[str, bytes]) -> None:
    # Each rank's objects carry an id of their own, not that of the seal.
    ids = {save_id_of(key.rpartition("/")[2]) for key in in_folder(start, "step-20")} - {None}
    assert len(ids) == 2
    backend = backend_of(start)
    dead = FaultyStore(
        backend.shared, [StoreFault("crash", verb="delete_many", key="metrics/step-20")]
    )
    retire_on(dead)
    assert dead.is_dead
    assert any(key.startswith(DELETING) for key in backend.names())
    retire_on(backend.shared)
    assert not in_folder(backend.content(), "step-20")


def test_the_next_removal_spares_what_a_later_save_of_the_same_names_puts(
    stock: dict[str, bytes],
) -> None:
    # torch's writer takes the same names each time.
    content = {**under("step-1", stock), **under("step-2", saved(2)), **under("step-3", saved(3))}
    backend = backend_of(content)
    script = [StoreFault("crash", verb="delete_many", key="metrics/step-1")]
    dead = FaultyStore(backend.shared, script)
    retire_on(dead, others=True)
    assert dead.is_dead
    assert "step-1/.metadata" not in backend.names()
    later = {key: data for key, data in under("step-1", stock).items() if "metadata" not in key}
    for key, data in later.items():
        backend.shared.put(key, data)
    retire_on(backend.shared, others=True)
    assert in_folder(backend.content(), "step-1") == later


@pytest.mark.parametrize("later_s", [-1e9, -DAY_S, 0.0, DAY_S / 2, 30 * DAY_S, 1e9])
def test_a_clock_that_jumps_deletes_nothing_that_is_protected(
    later_s: float, start: dict[str, bytes]
) -> None:
    backend = backend_of(start)
    retire_on(backend.shared, later_s=later_s)
    content = backend.content()
    for step in (10, 50, 60, 70, 80, 90, 100, 110):
        assert in_folder(content, f"step-{step}") == in_folder(start, f"step-{step}")


def test_objects_of_another_save_keep_the_step_for_a_day_as_in_slime_2290(
    start: dict[str, bytes],
) -> None:
    backend = backend_of(start)
    later_s = DAY_S - 60
    (kept,) = [one for one in retire_on(backend.shared, later_s=later_s) if one.why_not]
    assert kept.folder == "step-40"
    assert "a save may be under way" in kept.why_not
    assert in_folder(backend.content(), "step-40") == in_folder(start, "step-40")

    retire_on(backend.shared, later_s=DAY_S + 60)
    left = in_folder(backend.content(), "step-40")
    assert list(left.values()) == [b"half of it"]  # that is prune's
    assert "step-40" not in {one.folder for one in run_on(backend.shared).all()}
    retire_on(backend.shared, later_s=DAY_S + 60)
    assert in_folder(backend.content(), "step-40") == left


def test_a_save_of_torch_s_writer_under_way_keeps_the_step(start: dict[str, bytes]) -> None:
    backend = backend_of({**start, "step-20/__0_0.distcp": b"half"})
    retire_on(backend.shared)
    assert in_folder(backend.content(), "step-20").items() > in_folder(start, "step-20").items()


def test_the_step_that_the_run_resumed_from_is_not_lost_as_in_lightning_21813(
    start: dict[str, bytes],
) -> None:
    backend = backend_of(start)
    verdicts = {one.folder: one for one in plan(run_on(backend.shared), Latest(1))}
    assert "resumed from" in verdicts["step-80"].why
    assert not verdicts["step-90"].stays
    with pytest.raises(CheckpointError):  # nor if nobody may look at the claim
        denied = StoreFault("denied", verb="get", key="claim.json", times=None)
        plan(run_on(FaultyStore(backend.shared, [denied])), Latest(1))


def test_pins_pin_as_in_torchtitan_4420(start: dict[str, bytes]) -> None:
    backend = backend_of(start)
    run = run_on(backend.shared)
    run.pin(20)
    run.pin(20)
    retire_on(backend.shared)
    assert in_folder(backend.content(), "step-20") == in_folder(start, "step-20")
    run.unpin(20)
    assert run.pins() == {"step-10"}
    retire_on(backend.shared)
    assert not in_folder(backend.content(), "step-20")


def test_a_removal_that_broke_off_keeps_pins_away_for_an_hour(start: dict[str, bytes]) -> None:
    backend = backend_of(start)
    retire_on(FaultyStore(backend.shared, [StoreFault("crash", verb="list", key=PINS)]))
    run = run_on(backend.shared)
    with pytest.raises(ConflictError, match="an hour later"):
        run.pin(20)
    assert run.pins() == {"step-10"}
    retire(run, [], clock=time.time)
    with pytest.raises(ConflictError):
        run.pin(20)
    retire(run, [], clock=lambda: time.time() + HOUR_S + 60)
    run.pin(20)
    retire_on(backend.shared)
    assert in_folder(backend.content(), "step-20") == in_folder(start, "step-20")


def test_pins_that_cannot_be_listed_keep_all(start: dict[str, bytes]) -> None:
    backend = backend_of(start)
    denied = StoreFault("denied", verb="list", key=PINS, times=None)
    results = retire_on(FaultyStore(backend.shared, [denied]))
    assert all(one.why_not for one in results)
    assert backend.content() == start


def test_a_note_that_is_damaged_or_climbs_out_deletes_nothing(
    start: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    names = [b"", b"[]", b'{"keys": 3}', b'{"keys": ["../step-90/.metadata"]}', b'{"keys": [1]}']
    for number, text in enumerate(names):
        backend = backend_of({**start, f"{DELETING}step-{number}/x": text})
        retire(run_on(backend.shared), [], clock=lambda: time.time() + 2 * HOUR_S)
        assert in_folder(backend.content(), "step-90") == in_folder(start, "step-90")
        assert f"what is left of step-{number} stays" in caplog.text


def test_steps_of_others_stay_unless_told(start: dict[str, bytes]) -> None:
    backend = backend_of(start)
    gone = retire_on(backend.shared, others=True)
    assert {one.folder for one in gone if not one.why_not} == {*GOING, "step-50", "step-60"}
    # The damaged one says nothing of its objects.
    assert in_folder(backend.content(), "step-70") == in_folder(start, "step-70")


def test_a_step_that_is_saved_again_while_it_goes_stays(start: dict[str, bytes]) -> None:
    class SavesAgain(WrappedStore):
        def _pass(self, call: Call, request: Callable[..., Any]) -> Any:
            if call.verb == "list" and call.key == PINS:
                for key, data in again.items():
                    self._inner.put(key, data)
            return request(self._inner)

    again = under("step-20", saved(20))
    backend = backend_of(start)
    retire_on(SavesAgain(backend.shared))
    content = backend.content()
    assert in_folder(content, "step-20").items() >= again.items()
    assert not in_folder(content, "step-30")
    assert not any(key.startswith(DELETING) for key in content)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_the_newest_step_that_is_left_stays_although_a_newer_one_was_seen(
    is_damaged: bool, start: dict[str, bytes]
) -> None:
    # Else whoever takes a step back by hand, beside a job, loses all others to the job.
    backend = backend_of({**in_folder(start, "step-20"), **in_folder(start, "step-30")})
    for key, data in under("step-120", saved(120)).items():
        backend.shared.put(key, data)
    run = run_on(backend.shared)
    assert [one.step for one in run.all()] == [120, 30, 20]
    if is_damaged:
        damaged = start["step-70/.metadata"]
        backend.shared.put("step-120/.metadata", damaged)
    else:
        backend.shared.delete_many(["step-120/.metadata"])
    before = backend.content()
    told = retire(run, plan(run, Latest(1), others=True))
    assert [one.step for one in told if "step-120 was to stay" in one.why_not] == [30, 20]
    assert backend.content() == before
    told = retire(run, plan(run, Latest(1), others=True))
    assert [(one.step, one.why_not) for one in told] == [(20, "")]
    assert_loads(backend.content(), "step-30")


@pytest.mark.parametrize("is_sealed", [True, False])
def test_what_is_saved_after_a_removal_was_cut_at_any_request_stays(
    is_sealed: bool, start: dict[str, bytes]
) -> None:
    content = {key: start[key] for key in start if key.startswith(("step-20", "step-100"))}
    again = under("step-20", saved(20))
    if not is_sealed:
        del again["step-20/.metadata"]
    for at in itertools.count():
        backend = backend_of(content)
        dead = FaultyStore(backend.shared, [StoreFault("crash_after", at=at)])
        with suppress(CheckpointError):
            retire(run := run_on(dead), plan(run, Latest(1), others=True))
        for key, data in again.items():
            backend.shared.put(key, data)
        # A seal that was there before is of the first save; the policy spares the second one.
        retire(run := run_on(backend.shared), plan(run, Latest(1 + is_sealed), others=True))
        assert again.items() <= in_folder(backend.content(), "step-20").items(), at
        if not dead.is_dead:
            break
    assert at > 10


def test_a_refused_delete_is_told_and_costs_nothing(
    start: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    backend = backend_of(start)
    denied = StoreFault("denied", verb="delete_many", times=None)
    for _ in range(3):
        results = retire_on(FaultyStore(backend.shared, [denied]))
        assert all("could not be deleted" in one.why_not for one in results if one.step != 40)
    assert "step-20/.metadata" in caplog.text
    assert in_folder(backend.content(), "step-20") == in_folder(start, "step-20")


def test_an_outage_decides_nothing(start: dict[str, bytes]) -> None:
    # A step that cannot be seen would change what the policies keep of the others.
    backend = backend_of(start)
    failing = StoreFault("error", verb="get_tail", key="step-90", times=None)
    with pytest.raises(CheckpointError):
        plan(run_on(FaultyStore(backend.shared, [failing])), Latest(2))


def test_reported_metrics_are_of_one_save_alone(start: dict[str, bytes]) -> None:
    backend = backend_of(start)
    run = run_on(backend.shared)
    run.report(90, {"val": 0.1})
    assert {one.step for one in run.facts() if "val" in one.metrics} == {90}
    for key in in_folder(start, "step-90"):
        backend.shared.delete_many([key])
    for key, data in under("step-90", saved(90)).items():
        backend.shared.put(key, data)
    assert not any("val" in one.metrics for one in run_on(backend.shared).facts())


# Races -------------------------------------------------------------------------------------


class Turns:
    """Lets the requests of several actors through in one order.

    Args:
        order: Whose turn it is; an actor that has ended is passed over.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self._order = list(order)
        self._ended: set[int] = set()
        self._changed = threading.Condition()
        self.taken: list[int] = []

    def wait(self, who: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._next() in (who, None), 20)
            if self._order:
                self._order.pop(0)
            self.taken.append(who)
            self._changed.notify_all()

    def end(self, who: int) -> None:
        with self._changed:
            self._ended.add(who)
            self._changed.notify_all()

    def _next(self) -> int | None:
        while self._order and self._order[0] in self._ended:
            self._order.pop(0)
        return self._order[0] if self._order else None


class InTurn(WrappedStore):
    """A store of one actor."""

    def __init__(self, inner: Any, turns: Turns, who: int) -> None:
        super().__init__(inner)
        self._turns, self._who = turns, who

    def _pass(self, call: Call, request: Callable[..., Any]) -> Any:
        self._turns.wait(self._who)
        return request(self._inner)


def race(
    inner: Any, order: Sequence[int], actors: Sequence[Callable[[Run], Any]]
) -> tuple[list[Any], list[int]]:
    """Let actors run side by side; what each returned or raised, and the order of requests."""
    turns, outcomes = Turns(order), [None] * len(actors)

    def act(who: int) -> None:
        try:
            outcomes[who] = actors[who](run_on(InTurn(inner, turns, who)))
        except CheckpointError as error:
            outcomes[who] = error
        finally:
            turns.end(who)

    threads = [threading.Thread(target=act, args=(who,)) for who in range(len(actors))]
    for one in threads:
        one.start()
    for one in threads:
        one.join(30)
        assert not one.is_alive()
    return outcomes, turns.taken


def merges(first: int, second: int) -> Iterator[list[int]]:
    """All orders of so many requests of two actors."""
    for places in itertools.combinations(range(first + second), first):
        yield [0 if at in places else 1 for at in range(first + second)]


def small(start: dict[str, bytes]) -> dict[str, bytes]:
    folders = ("step-20", "step-90", "step-100")
    claim = RECORDS + "claim.json"
    return {key: data for key, data in start.items() if key.startswith(folders) or key == claim}


def planned(run: Run) -> Any:
    def act(own: Run) -> Any:
        for one in run.all():
            own._seen[one.folder] = one  # it has planned before the race
        return retire(own, verdicts)

    verdicts = plan(run, Latest(2))
    return act


def pin_20(run: Run) -> None:
    run.pin(20)


def assert_pinned_or_told(outcome: Any, backend: Backend, content: Content) -> None:
    if outcome is None:
        assert in_folder(backend.content(), "step-20") == in_folder(content, "step-20")
        assert "step-20" in run_on(backend.shared).pins()
        # And the next removal, too, leaves it.
        retire_on(backend.shared, later_s=2 * HOUR_S)
        assert in_folder(backend.content(), "step-20") == in_folder(content, "step-20")
    else:
        assert isinstance(outcome, ConflictError | NotFoundError), outcome


def test_a_pin_that_races_with_a_removal_pins_or_says_so(start: dict[str, bytes]) -> None:
    content = small(start)
    outcomes = set()
    pins, removes = 6, 10
    every = list(merges(pins, removes))
    chosen = [every[0], every[-1], *random.Random(7).sample(every, 150)]
    for order in chosen:
        backend = backend_of(content)
        (pinned, _), taken = race(backend.shared, order, [pin_20, planned(run_on(backend.shared))])
        assert taken.count(0) <= pins
        assert taken.count(1) <= removes, taken
        assert_pinned_or_told(pinned, backend, content)
        outcomes.add(type(pinned))
    assert {type(None), ConflictError, NotFoundError} == outcomes


def test_two_pins_and_two_removals_at_once(start: dict[str, bytes]) -> None:
    content = small(start)
    rng = random.Random(11)
    for _ in range(150):
        backend = backend_of(content)
        order = [0] * 6 + [1] * 6 + [2] * 10 + [3] * 10
        rng.shuffle(order)
        removal = planned(run_on(backend.shared))
        (one, other, *removed), _ = race(backend.shared, order, [pin_20, pin_20, removal, removal])
        assert_pinned_or_told(one, backend, content)
        assert_pinned_or_told(other, backend, content)
        assert not any(isinstance(outcome, BaseException) for outcome in removed)
        retire_on(backend.shared, later_s=2 * HOUR_S)
        names = backend.names()
        assert not any(key.startswith(DELETING) for key in names)
        if one is not None and other is not None:
            assert not any(key.startswith(PINS) for key in names)


def test_two_claims_at_the_same_moment_have_one_winner() -> None:
    for order in merges(4, 4):
        backend = Backend()
        outcomes, _ = race(backend.shared, order, [lambda run: run.claim()] * 2)
        claim = run_on(backend.shared).claimed()
        assert claim is not None
        # Who comes later takes over, or is refused; the id is that of the first for ever.
        ids = {one for one in outcomes if isinstance(one, str)}
        assert ids == {claim.run}
        assert all(isinstance(one, str | ConflictError) for one in outcomes)
