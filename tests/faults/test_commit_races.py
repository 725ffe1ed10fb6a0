"""Lost answers, other writers, stores without preconditions and zombies, through a whole save."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch

from dcpstore.errors import (
    AlreadyExistsError,
    CheckpointError,
    CommitUnknownError,
    ConfigError,
    ConflictError,
    IncompatibleError,
    StoreError,
)
from dcpstore.store.base import IfMatch
from dcpstore.testing import Fault, FaultyStore, StoreFault
from faults.places import APART, HERE, Backend, Place, save_ids
from faults.ranks import (
    loaded_rank_step,
    plan_on_ranks,
    rank_state,
    save_on_ranks,
    write_on_ranks,
)
from faults.states import failing, loaded_step, save, state_at
from passing_on import PassesOn

both_layouts = pytest.mark.parametrize("layout", [HERE, APART], ids=["here", "apart"])


class Hooked(PassesOn):
    """A store that calls a hook before every put of the metadata."""

    def __init__(self, inner: Any, hook: Any) -> None:
        super().__init__(inner)
        self._hook = hook

    def put(self, key: str, data: Any, *, mode: Any = "overwrite") -> Any:
        if key == ".metadata":
            self._hook(mode)
        return self._inner.put(key, data, mode=mode)


# Lost answers ------------------------------------------------------------------------------


@pytest.mark.parametrize("is_overwrite", [False, True])
@pytest.mark.parametrize(("kind", "layout"), [("lost_ack", HERE), ("drop", APART)])
def test_a_lost_answer_to_the_seal_is_settled_by_reading_back(
    any_place: Place, kind: str, layout: dict[str, int], is_overwrite: bool
) -> None:
    if is_overwrite:
        save(state_at(1), any_place.writer())
    key = f"{any_place.name}/.metadata"
    any_place.server.add_fault(Fault("PutObject", kind=kind, key=key, status=500))
    save(state_at(2), any_place.writer(overwrite=is_overwrite, **layout))
    assert loaded_step(any_place.reader(), state_at(0)) == 2
    assert len(save_ids(any_place.names())) == 1


@both_layouts
@pytest.mark.parametrize("is_overwrite", [False, True])
def test_an_outcome_that_cannot_be_found_out_deletes_nothing(
    is_overwrite: bool, layout: dict[str, int]
) -> None:
    backend = Backend()
    if is_overwrite:
        save(state_at(1), backend.writer())
    script = [
        StoreFault("lost_ack", verb="put", key=".metadata"),
        StoreFault("error", verb="get", at=1, times=None),
    ]
    writer = backend.writer(script, overwrite=is_overwrite, **layout)
    failing(CommitUnknownError, save, state_at(2), writer)
    assert loaded_step(backend.reader(), state_at(0)) == 2
    save(state_at(3), backend.writer(overwrite=True))
    assert loaded_step(backend.reader(), state_at(0)) == 3


def test_a_503_that_hid_the_seal_deletes_nothing(place: Place) -> None:
    key = f"{place.name}/.metadata"
    place.server.add_fault(Fault("PutObject", kind="lost_ack", key=key, status=503))
    place.server.add_fault(Fault("GetObject", skip=1, times=-1, key=key, status=503))
    failing(CommitUnknownError, save, state_at(2), place.writer())
    place.server.heal()
    assert loaded_step(place.reader(), state_at(0)) == 2


# Other writers -----------------------------------------------------------------------------


@both_layouts
@pytest.mark.parametrize("is_overwrite", [False, True])
def test_who_is_overtaken_before_the_seal_loses_and_sweeps_its_own(
    is_overwrite: bool, layout: dict[str, int]
) -> None:
    backend = Backend()
    if is_overwrite:
        save(state_at(1), backend.writer())
    after_theirs: dict[str, bytes] = {}

    def overtake(mode: object) -> None:
        if not after_theirs:
            ours = set(backend.names())
            save(state_at(3), backend.writer(overwrite=is_overwrite))
            after_theirs.update(backend.content())
            loser.update(ours & set(after_theirs) - {".metadata"})

    loser: set[str] = set()
    hooked = Hooked(backend.shared, overtake)
    writer = backend.writer_on(hooked, overwrite=is_overwrite, **layout)
    kind = ConflictError if is_overwrite else AlreadyExistsError
    error = failing(kind, save, state_at(2), writer)
    assert "memory://backend" in error.message
    assert loaded_step(backend.reader(), state_at(0)) == 3
    assert loser
    expected = {key: data for key, data in after_theirs.items() if key not in loser}
    assert backend.content() == expected


def contend(place: Place, num_savers: int, **options: Any) -> dict[int, Any]:
    """Save many steps at once, in both layouts; return the error of each, or None."""
    barrier = threading.Barrier(num_savers)
    outcomes: dict[int, Any] = {}

    def save_one(step: int) -> None:
        try:
            writer = place.writer(**options, **(HERE, APART)[step % 2])
            barrier.wait()
            save(state_at(step), writer)
            outcomes[step] = None
        except BaseException as error:
            outcomes[step] = error.failures[0][0]

    threads = [threading.Thread(target=save_one, args=(step,)) for step in range(num_savers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_of_many_first_saves_at_once_one_wins_and_the_others_leave_nothing(place: Place) -> None:
    outcomes = contend(place, 5)
    (winner,) = [step for step, error in outcomes.items() if error is None]
    assert all(isinstance(e, AlreadyExistsError) for e in outcomes.values() if e is not None)
    assert loaded_step(place.reader(), state_at(0)) == winner
    assert len(save_ids(place.names())) == 1


def test_of_many_overwrites_at_once_every_outcome_is_whole(place: Place) -> None:
    save(state_at(9), place.writer())
    outcomes = contend(place, 4, overwrite=True)
    winners = [step for step, error in outcomes.items() if error is None]
    assert winners
    assert all(isinstance(e, ConflictError) for e in outcomes.values() if e is not None)
    assert loaded_step(place.reader(), state_at(0)) in winners
    assert len(save_ids(place.names())) == 1


@both_layouts
def test_a_zombie_coordinator_loses_to_the_save_that_replaced_it(layout: dict[str, int]) -> None:
    backend = Backend()
    zombie = [backend.writer(overwrite=True, **layout) for _ in range(2)]
    states = [rank_state(1, rank) for rank in range(2)]
    planners, plans, metadata = plan_on_ranks(zombie, states)
    results = write_on_ranks(zombie, planners, plans)
    # ... and here the whole job stands still, while its successor starts and saves.
    save(state_at(2), backend.writer(overwrite=True))
    save(state_at(3), backend.writer(overwrite=True))
    failing(AlreadyExistsError, zombie[0].finish, metadata, results)

    assert loaded_step(backend.reader(), state_at(0)) == 3
    assert len(save_ids(backend.names())) == 1


def test_a_zombie_overwrite_loses_even_to_a_checkpoint_with_the_same_values() -> None:
    backend = Backend()
    save(state_at(1), backend.writer())
    zombie = [backend.writer(overwrite=True)]
    planners, plans, metadata = plan_on_ranks(zombie, [rank_state(2, 0)])
    results = write_on_ranks(zombie, planners, plans)
    save(state_at(1), backend.writer(overwrite=True))
    failing(ConflictError, zombie[0].finish, metadata, results)
    assert loaded_step(backend.reader(), state_at(0)) == 1


# Stores without preconditions -----------------------------------------------------------------


def ceph(mode: object) -> None:
    """RGW before Reef compares a quoted ETag with an unquoted one, so none ever matches."""
    if isinstance(mode, IfMatch):
        raise ConflictError("put '.metadata': 412 PreconditionFailed (scripted)")


def swift(mode: object) -> None:
    """Swift's S3 layer has no conditional put."""
    if mode != "overwrite":
        raise ConfigError("put '.metadata' failed: 501 NotImplemented (scripted)")


@pytest.mark.parametrize("quirk", [ceph, swift])
def test_a_store_without_preconditions_gets_advice_and_keeps_the_old_one(quirk: Any) -> None:
    backend = Backend()
    save(state_at(1), backend.writer())
    before = backend.content()
    writer = backend.writer_on(Hooked(backend.shared, quirk), overwrite=True)
    error = failing(StoreError, save, state_at(2), writer)
    assert "WriteConfig(require_conditional_put=False)" in error.message
    assert "If no other job writes to this URL" in error.message
    assert backend.content() == before


@pytest.mark.parametrize("quirk", [ceph, swift])
def test_a_store_without_preconditions_is_compared_first_on_request(quirk: Any) -> None:
    backend = Backend()
    quirky = Hooked(backend.shared, quirk)
    for step, layout in ((1, HERE), (2, APART), (3, HERE)):
        writer = backend.writer_on(quirky, overwrite=True, require_conditional_put=False, **layout)
        save(state_at(step), writer)
        assert loaded_step(backend.reader(), state_at(0)) == step
    assert len(save_ids(backend.names())) == 1
    writer = backend.writer_on(quirky, require_conditional_put=False)
    failing(AlreadyExistsError, save, state_at(4), writer)


@pytest.mark.parametrize("status", [501, 412])
def test_an_s3_server_without_if_match_gets_advice_or_is_compared_first(
    any_place: Place, status: int
) -> None:
    save(state_at(1), any_place.writer())
    before = any_place.content()
    code = {501: "NotImplemented", 412: "PreconditionFailed"}[status]
    key = f"{any_place.name}/.metadata"
    any_place.server.add_fault(Fault("PutObject", key=key, status=status, code=code, times=-1))
    # What s3fs is answered may be the answer of a second attempt, which aiohttp sent by itself.
    is_certain = any_place.engine == "obstore" or status == 501
    expected = StoreError if is_certain else CommitUnknownError
    error = failing(expected, save, state_at(2), any_place.writer(overwrite=True))
    assert "WriteConfig(require_conditional_put=False)" in error.message
    assert loaded_step(any_place.reader(), state_at(0)) == 1
    if is_certain:
        assert any_place.content() == before

    any_place.server.heal()
    any_place.server.clear_requests()
    fault = Fault("PutObject", key=key, status=status, code=code, times=3 if status == 412 else 1)
    any_place.server.add_fault(fault)
    save(state_at(2), any_place.writer(overwrite=True, require_conditional_put=False))
    assert loaded_step(any_place.reader(), state_at(0)) == 2


# Failures in `finish` --------------------------------------------------------------------------


def test_planner_data_that_cannot_be_pickled_leaves_no_object() -> None:
    backend = Backend()
    writers = [backend.writer()]
    planners, plans, metadata = plan_on_ranks(writers, [rank_state(1, 0)])
    results = write_on_ranks(writers, planners, plans)
    assert backend.names() != []
    metadata.planner_data = lambda: None
    failing(Exception, writers[0].finish, metadata, results)
    assert backend.names() == []


def test_a_planned_item_that_nobody_wrote_is_named_and_nothing_is_sealed() -> None:
    backend = Backend()
    writers = [backend.writer() for _ in range(2)]
    planners, plans, metadata = plan_on_ranks(writers, [rank_state(1, 0), rank_state(1, 1)])
    results = write_on_ranks(writers, planners, plans)
    lost = results[1].pop(0)
    error = failing(IncompatibleError, writers[0].finish, metadata, results)
    assert repr(lost.index.fqn) in error.message
    assert ".metadata" not in backend.names()


def test_the_sweep_never_deletes_what_was_just_sealed(caplog: Any) -> None:
    """Even if the old metadata, made by whomever, claims the new objects as its own."""
    import pickle

    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    backend = Backend()
    places = {
        MetadataIndex(name): _StorageInfo(name, 0, 1) for name in (".metadata", "__0_0.distcp")
    }
    backend.shared.put("__0_0.distcp", b"x")
    backend.shared.put(".metadata", pickle.dumps(Metadata({}, storage_data=places)))
    with caplog.at_level(logging.WARNING):
        save(state_at(2), backend.writer(overwrite=True))
    assert loaded_step(backend.reader(), state_at(0)) == 2
    assert "__0_0.distcp" not in backend.names()


def sealed_by_two_ranks(backend: Backend, layout: dict[str, int]) -> Any:
    """Save on two ranks; return rank 1's writer, which DCP never tells that all went well."""
    writers = [backend.writer(**layout) for _ in range(2)]
    save_on_ranks(writers, [rank_state(1, rank) for rank in range(2)])
    return writers[1]


@both_layouts
def test_sweeping_after_a_save_that_was_sealed_after_all_deletes_nothing(
    layout: dict[str, int],
) -> None:
    backend = Backend()
    writer = sealed_by_two_ranks(backend, layout)
    before = backend.content()
    assert writer.sweep_unsealed() == ()
    assert backend.content() == before


@pytest.mark.parametrize("kind", ["error", "denied"])
@pytest.mark.parametrize(
    ("key", "layout"), [(".metadata", HERE), (".metadata", APART), (".dcpstore-", APART)]
)
def test_sweeping_deletes_nothing_while_it_cannot_tell_what_is_sealed(
    key: str, layout: dict[str, int], kind: Any
) -> None:
    backend = Backend()
    writer = sealed_by_two_ranks(backend, layout)
    before = backend.content()
    store = FaultyStore(backend.shared, [StoreFault(kind, verb="get", key=key, times=None)])
    writer._folder._store = store
    left = writer.sweep_unsealed()
    assert backend.content() == before
    assert set(left) <= set(before)
    assert left
    store.revive()
    assert writer.sweep_unsealed() == ()
    assert backend.content() == before


def test_two_ranks_that_store_different_values_under_one_key_are_refused() -> None:
    backend = Backend()
    writers = [backend.writer() for _ in range(2)]
    states = [{"w": torch.full((3000,), float(rank))} for rank in range(2)]
    planners, plans, metadata = plan_on_ranks(writers, states)
    # A planner that keeps both copies, as one for rank-local state would.
    plans = [
        type(plan)(plans[0].items or plans[1].items, storage_data=plan.storage_data)
        for plan in plans
    ]
    results = write_on_ranks(writers, planners, plans)
    error = failing(IncompatibleError, writers[0].finish, metadata, results)
    assert "'w'" in error.message
    assert isinstance(error, CheckpointError)
    assert backend.names() == []


# Sweeping on a rank that does not know what became of the seal -------------------------------


def written_by_two_ranks(backend: Backend, **options: Any) -> tuple[list[Any], Any]:
    """Let two ranks write; return the writers, and what seals the save."""
    writers = [backend.writer(**options) for _ in range(2)]
    planners, plans, metadata = plan_on_ranks(writers, [rank_state(2, rank) for rank in range(2)])
    results = write_on_ranks(writers, planners, plans)
    return writers, lambda: writers[0].finish(metadata, results)


@pytest.mark.parametrize("is_overwrite", [False, True])
def test_a_rank_that_does_not_coordinate_keeps_its_objects_while_a_seal_may_be_under_way(
    is_overwrite: bool,
) -> None:
    backend = Backend()
    if is_overwrite:
        save_on_ranks([backend.writer() for _ in range(2)], [rank_state(1, r) for r in range(2)])
    writers, seal = written_by_two_ranks(backend, overwrite=is_overwrite)
    before = backend.content()
    assert set(writers[1].sweep_unsealed()) < set(before)
    assert backend.content() == before
    seal()
    assert loaded_rank_step(backend.reader(), 2) == 2
    assert writers[1].sweep_unsealed() == ()
    assert loaded_rank_step(backend.reader(), 2) == 2


def test_a_rank_sweeps_once_another_checkpoint_forbids_the_late_create() -> None:
    backend = Backend()
    writers, seal = written_by_two_ranks(backend)
    save_on_ranks([backend.writer() for _ in range(2)], [rank_state(3, r) for r in range(2)])
    assert writers[1].sweep_unsealed() == ()
    failing(AlreadyExistsError, seal)
    assert len(save_ids(backend.names())) == 2  # each rank draws its own
    assert loaded_rank_step(backend.reader(), 2) == 3


def test_a_rank_that_is_told_that_no_seal_was_begun_sweeps() -> None:
    backend = Backend()
    writers, _ = written_by_two_ranks(backend)
    for writer in writers:
        assert writer.sweep_unsealed(seal_begun=False) == ()
    assert backend.names() == []


def test_the_coordinator_sweeps_if_it_was_never_asked_to_seal() -> None:
    backend = Backend()
    writers, _ = written_by_two_ranks(backend)
    before = set(backend.names())
    assert writers[0].sweep_unsealed() == ()
    assert set(backend.names()) == {name for name in before if name.startswith("__1_")}


def test_a_coordinator_whose_seal_went_unanswered_sweeps_nothing_until_it_is_superseded() -> None:
    backend = Backend()
    script = [StoreFault("error", verb="put", key=".metadata", times=None)]
    writer = backend.writer(script)
    failing(CommitUnknownError, save, state_at(2), writer)
    before = backend.content()
    assert before
    assert set(writer.sweep_unsealed()) == set(before)
    assert backend.content() == before
    save(state_at(3), backend.writer())
    assert writer.sweep_unsealed() == ()
    assert set(backend.names()).isdisjoint(before)
    assert loaded_step(backend.reader(), state_at(0)) == 3
