"""A process that dies at any one request leaves the old checkpoint or the new one, whole.

Two kinds of death at request k: before the store did what was asked, and after it did but
before the answer came. Afterwards the store answers nothing more, so no clean-up runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from dcpstore.testing import Fault, FaultyStore, StoreFault
from faults.places import APART, ENGINES, HERE, Backend, Place
from faults.ranks import loaded_rank_step, rank_state, save_on_ranks
from faults.states import dies, failing, load, loaded_step, save, state_at

KINDS = ("crash", "crash_after")
START, NEW, NEXT = 1, 2, 3
"""Steps: what was there, what the save that dies writes, what the next save writes."""


def stock_objects(folder: Path, step: int, **more: Any) -> dict[str, bytes]:
    """A checkpoint by torch's own writer, object by object."""
    save(state_at(step, **more), dcp.FileSystemWriter(folder))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: Any) -> dict[str, bytes]:
    return stock_objects(tmp_path_factory.mktemp("stock"), START, is_multipart=True)


def assert_nothing_to_load(reader: Any, step_like: Any) -> None:
    error = failing(AssertionError, load, step_like, reader)  # DCP's own, quoting ours
    assert "no checkpoint at" in str(error)


def deaths(kind: Any, first: int = 0) -> Iterator[StoreFault]:
    """One fault per request that can be the last one; the caller stops when none is."""
    for k in range(first, 60):
        yield StoreFault(kind, at=k)
    pytest.fail("the save never got through")


# One rank, store verbs --------------------------------------------------------------------


LAYOUTS = {"here": HERE, "apart": APART}
STARTS = [
    *[(start, "here") for start in ("nothing", "stock", "ours here", "ours apart")],
    *[(start, "apart") for start in ("nothing", "ours here")],
]
"""What lies there, and where the new manifest goes; both layouts replace each other."""


def prepared(start: str, stock: dict[str, bytes]) -> Backend:
    backend = Backend()
    if start.startswith("ours"):
        layout = LAYOUTS.get(start.removeprefix("ours "), HERE)
        save(state_at(START, is_multipart=True), backend.writer(**layout))
    elif start == "stock":
        for key, data in stock.items():
            backend.shared.put(key, data)
    return backend


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("start", "new"), STARTS)
def test_one_rank_dies_at_any_request(
    start: str, new: str, kind: str, stock: dict[str, bytes]
) -> None:
    like = state_at(0, is_multipart=True)
    seen: list[int | None] = []
    for fault in deaths(kind):
        backend = prepared(start, stock)
        store = FaultyStore(backend.shared, [fault])
        writer = backend.writer_on(store, overwrite=True, **LAYOUTS[new])
        has_died = dies(save, state_at(NEW, is_multipart=True), writer)

        if start == "nothing" and ".metadata" not in backend.names():
            assert has_died
            assert_nothing_to_load(backend.reader(), state_at(0))
            seen.append(None)
        else:
            seen.append(loaded_step(backend.reader(), like))
            assert seen[-1] in ((NEW,) if start == "nothing" else (START, NEW))
            assert seen[-1] == NEW or has_died
        save(state_at(NEXT), backend.writer(overwrite=True))
        assert loaded_step(backend.reader(), state_at(0)) == NEXT
        if not store.is_dead:
            break
    # Once the new one is there it stays, however much later the process dies.
    assert seen == sorted(seen, key=lambda step: step == NEW)
    assert seen[-1] == NEW
    assert seen[0] != NEW
    assert len(seen) >= (8 if new == "here" else 9)


@pytest.mark.parametrize("start", ["nothing", "ours"])
def test_one_rank_dies_between_the_parts_of_a_large_object(start: str) -> None:
    for after_parts in range(2):
        backend = prepared(start, {})
        fault = StoreFault("crash", verb="put_parts", after_parts=after_parts)
        store = FaultyStore(backend.shared, [fault])
        assert dies(
            save, state_at(NEW, is_multipart=True), backend.writer_on(store, overwrite=True)
        )
        assert store.is_dead
        if start == "ours":
            assert loaded_step(backend.reader(), state_at(0, is_multipart=True)) == START
        else:
            assert_nothing_to_load(backend.reader(), state_at(0))
        save(state_at(NEXT), backend.writer(overwrite=True))
        assert loaded_step(backend.reader(), state_at(0)) == NEXT


# Two ranks ---------------------------------------------------------------------------------


def rank_states(step: int) -> list[Any]:
    return [rank_state(step, 0), rank_state(step, 1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("who", [0, 1, "both"])
@pytest.mark.parametrize("is_overwrite", [False, True])
def test_one_of_two_ranks_or_the_whole_job_dies_at_any_request(
    kind: str, who: int | str, is_overwrite: bool
) -> None:
    seen: list[int | None] = []
    for fault in deaths(kind):
        backend = Backend()
        if is_overwrite:
            healthy = [backend.writer(object_bytes=1) for _ in range(2)]
            save_on_ranks(healthy, rank_states(START))
        # A job that dies as a whole shares one count of requests.
        dying = FaultyStore(backend.shared, [fault])
        stores = [dying if who in (rank, "both") else backend.shared for rank in range(2)]
        writers = [backend.writer_on(store, overwrite=is_overwrite) for store in stores]
        has_died = dies(save_on_ranks, writers, rank_states(NEW))

        if ".metadata" in backend.names():
            seen.append(loaded_rank_step(backend.reader(), 2))
            assert seen[-1] in ((START, NEW) if is_overwrite else (NEW,))
        else:
            assert not is_overwrite
            seen.append(None)
        assert seen[-1] == NEW or has_died
        again = [backend.writer(overwrite=True) for _ in range(2)]
        save_on_ranks(again, rank_states(NEXT))
        assert loaded_rank_step(backend.reader(), 2) == NEXT
        if not dying.is_dead:
            break
    assert seen == sorted(seen, key=lambda step: step == NEW)
    assert seen[-1] == NEW
    assert len(seen) >= (3 if who == 1 else 6)


def test_what_healthy_ranks_wrote_beside_a_dead_one_can_be_swept() -> None:
    backend = Backend()
    save_on_ranks([backend.writer() for _ in range(2)], rank_states(START))
    before = backend.content()
    dead = FaultyStore(backend.shared, [StoreFault("crash", verb="put")])
    writers = [backend.writer(overwrite=True), backend.writer_on(dead, overwrite=True)]
    assert dies(save_on_ranks, writers, rank_states(NEW))
    assert len(backend.names()) > len(before)
    assert writers[0].sweep_unsealed() == ()
    assert backend.content() == before
    assert writers[0].sweep_unsealed() == ()


# One rank, the requests that S3 sees --------------------------------------------------------


def die_at(place: Place, k: int, kind: str) -> None:
    """Let the server refuse everything from request k on; `crash_after` serves k first."""
    if kind == "crash_after":
        place.server.add_fault(Fault(kind="lost_ack", skip=k, status=500))
    place.server.add_fault(Fault(skip=k, times=-1, status=500, code="InternalError"))


def s3_cases() -> Iterator[Any]:
    """One case in every run; each takes 10 to 40 s, so the others are for the campaign."""
    for engine in ENGINES:
        for start in ("ours", "nothing", "stock"):
            for kind in KINDS:
                is_first = (engine, start, kind) == ("obstore", "ours", "crash_after")
                marks = () if is_first else pytest.mark.campaign
                yield pytest.param(engine, start, kind, marks=marks)


@pytest.mark.parametrize(("engine", "start", "kind"), list(s3_cases()))
def test_s3_stops_answering_at_any_request(
    make_place: Callable[..., Place],
    engine: str,
    start: str,
    kind: str,
    stock: dict[str, bytes],
) -> None:
    place, like = make_place(engine), state_at(0, is_multipart=True)
    seen: list[int | None] = []
    for k in range(60):
        if start == "nothing":
            place = make_place(engine)
        elif start == "stock":
            for key in place.names():
                place.client.delete(f"{place.name}/{key}")
            place.put_all(stock)
        elif k == 0:
            save(state_at(START, is_multipart=True), place.writer())
        before = place.names()
        place.server.clear_requests()
        die_at(place, k, kind)
        has_died = dies(save, state_at(NEW, is_multipart=True), place.writer(overwrite=True))
        place.server.heal()
        is_through = len(place.server.requests()) <= k

        if start == "nothing" and ".metadata" not in place.names():
            assert has_died
            seen.append(None)
        else:
            seen.append(loaded_step(place.reader(), like))
            old = START if start == "stock" or k == 0 else NEXT
            assert seen[-1] in ((NEW,) if start == "nothing" else (old, NEW))
            assert seen[-1] == NEW or has_died
        if seen[-1] != NEW:
            assert set(before) <= set(place.names())
        save(state_at(NEXT, is_multipart=True), place.writer(overwrite=True))
        if is_through:
            break
    else:
        pytest.fail("the save never got through")
    assert seen == sorted(seen, key=lambda step: step == NEW)
    assert seen[0] != NEW
    assert len(seen) >= 8


def test_an_orphaned_multipart_upload_of_a_dead_process_is_all_that_it_costs(
    place: Place,
) -> None:
    place.server.add_fault(Fault("UploadPart", skip=1, times=-1, status=500))
    place.server.add_fault(Fault("AbortMultipartUpload", times=-1, status=500))
    place.server.add_fault(Fault("DeleteObjects", times=-1, status=500))
    assert dies(save, state_at(NEW, is_multipart=True), place.writer())
    place.server.heal()
    assert len(place.open_uploads()) == 1
    assert ".metadata" not in place.names()
    save(state_at(NEXT), place.writer())
    assert loaded_step(place.reader(), state_at(0)) == NEXT
