"""What `dcpstore.save` and `dcpstore.load` say they did, and what they raise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dcpstore
from dcpstore import (
    AlreadyExistsError,
    CheckpointError,
    ConfigError,
    CorruptError,
    IncompatibleError,
    LoadResult,
    NotFoundError,
    RankFailures,
    ReadConfig,
    WriteConfig,
)
from dcpstore.report import Transfer
from dcpstore.testing.ranks import run_ranks

SIZE = 4
ROWS = 9000  # of 4 bytes, so that each rank's own tensor is a request


def state_of(rank: int, fill: float = 1.0) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((70_000, 5), fill), f"own{rank}": torch.full((ROWS,), fill)},
        "step": int(fill),
    }


def save(url: str, **options: Any) -> list[dcpstore.SaveResult]:
    def work(group: Any) -> Any:
        config = WriteConfig(object_bytes=1 << 18)
        return dcpstore.save(
            state_of(group.rank), url, process_group=group, config=config, **options
        )

    return run_ranks(SIZE, work).values()


def load(url: str, make: Any = lambda rank: state_of(rank, 0.0), **options: Any) -> Any:
    def work(group: Any) -> LoadResult:
        return dcpstore.load(make(group.rank), url, process_group=group, **options)

    return run_ranks(SIZE, work)


@pytest.fixture
def url(tmp_path) -> str:
    return str(tmp_path / "checkpoint")


def test_a_save_says_what_it_stored_and_prints_as_a_short_table(url: str, tmp_path) -> None:
    results = save(url)
    for result in results:
        assert result == results[0]
    (result, *_) = results
    assert result.url == f"file://{url}"
    objects = list((tmp_path / "checkpoint").glob("*.distcp"))
    assert result.num_objects == len(objects) >= 4
    assert result.save_id is not None
    assert all(result.save_id in path.name or "__" in path.name for path in objects)
    assert result.num_keys == result.num_items == 2 + SIZE
    data_bytes = sum(path.stat().st_size for path in objects)
    assert 1_400_000 + SIZE * ROWS * 4 < result.stored_bytes <= data_bytes
    assert result.plan_bytes > 0
    assert not result.is_plan_cached
    assert {"plan", "write", "seal"} <= result.seconds.keys()
    assert all(seconds >= 0 for seconds in result.seconds.values())
    lines = str(result).splitlines()
    assert lines[0] == f"saved file://{url}"
    assert len(lines) < 15
    assert max(map(len, lines[1:])) < 80


def test_a_load_says_what_it_loaded_and_totals_are_the_sums_over_ranks(url: str) -> None:
    save(url)
    results = load(url, share="always").values()
    for rank, result in enumerate(results):
        assert result.url == f"file://{url}"
        assert sorted(result.loaded) == [f"model.own{rank}", "model.w", "step"]
        assert sorted(result.unexpected) == [f"model.own{r}" for r in range(SIZE) if r != rank]
        assert result.missing == ()
        assert result.cast == {}
        assert result.rank.needed_bytes == 1_400_000 + ROWS * 4
        assert result.job == Transfer.total([one.rank for one in results])
        assert {"metadata", "plan", "read"} <= result.seconds.keys()
    job = results[0].job
    assert job.needed_bytes == sum(result.rank.needed_bytes for result in results)
    assert job.num_requests == sum(result.rank.num_requests for result in results)
    assert job.fetched_bytes == sum(result.rank.fetched_bytes for result in results)
    assert job.received_bytes == sum(result.rank.received_bytes for result in results)
    assert job.peak_bytes == max(result.rank.peak_bytes for result in results)
    lines = str(results[0]).splitlines()
    assert lines[0] == f"loaded file://{url}"
    assert len(lines) < 18
    for word in ("missing", "unexpected", "cast", "needed", "fetched", "requests", "sharing"):
        assert any(line.strip().startswith(word) for line in lines), word


def test_casts_missing_and_unexpected_keys_are_named_per_rank(url: str) -> None:
    save(url)

    def other(rank: int) -> dict[str, Any]:
        model = {"w": torch.zeros((70_000, 5), dtype=torch.float64)}
        if rank == 2:
            model["new"] = torch.zeros(3)
        return {"model": model}

    results = load(url, other, strict={"model.new": False}).values()
    for rank, result in enumerate(results):
        assert result.loaded == ("model.w",)
        assert result.missing == (("model.new",) if rank == 2 else ())
        assert dict(result.cast) == {"model.w": (torch.float32, torch.float64)}
        assert "step" in result.unexpected
        assert "1: model.w" in str(result)


@pytest.mark.parametrize("strict", [True, {"model.": True}, {"": True, "optim.": False}])
def test_a_key_missing_on_one_rank_fails_all_before_anything_is_read(url: str, strict: Any) -> None:
    save(url)
    states: dict[int, dict[str, Any]] = {}

    def other(rank: int) -> dict[str, Any]:
        states[rank] = state_of(rank, 0.0)
        if rank == 1:
            states[rank]["model"]["new"] = torch.zeros(3)
        return states[rank]

    run = load(url, other, strict=strict)
    assert sorted(run.errors) == list(range(SIZE))
    for error in run.errors.values():
        assert isinstance(error, RankFailures)
        assert list(error.causes) == [1]
        assert isinstance(error.exceptions[1], IncompatibleError)
        assert "model.new" in str(error)
    assert all(int(state["model"]["w"].count_nonzero()) == 0 for state in states.values())


@pytest.mark.parametrize("strict", [False, {"": False}, {"model.": False}])
def test_a_missing_key_may_be_left_as_it_is(url: str, strict: Any) -> None:
    save(url)
    state = {"model": {"w": torch.zeros(70_000, 5), "new": torch.full((3,), 8.0)}}
    result = dcpstore.load(state, url, strict=strict)
    assert result.missing == ("model.new",)
    assert bool((state["model"]["w"] == 1).all())
    assert bool((state["model"]["new"] == 8).all())


class Counter:
    """A Stateful."""

    def __init__(self, count: int) -> None:
        self.state = {"count": count, "history": torch.arange(float(count))}
        self.num_loads = 0

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state
        self.num_loads += 1


@pytest.mark.parametrize("size", [1, 3])
def test_stateful_values_give_and_are_given_their_state(url: str, size: int) -> None:
    def saving(group: Any) -> None:
        dcpstore.save({"c": Counter(5), "model": torch.nn.Linear(3, 2)}, url, process_group=group)

    def loading(group: Any) -> None:
        counter, model = Counter(0), torch.nn.Linear(3, 2)
        counter.state["history"] = torch.zeros(5)
        weight = model.weight
        state = {"c": counter, "model": model}
        dcpstore.load(state, url, process_group=group)
        assert state["c"] is counter
        assert state["model"] is model
        assert model.weight is weight
        assert counter.num_loads == 1
        assert counter.state["count"] == 5
        assert torch.equal(counter.state["history"], torch.arange(5.0))

    torch.manual_seed(0)
    run_ranks(size, saving).values()
    run_ranks(size, loading).values()


# --- what is raised ---------------------------------------------------------------------------


def broken(url: str) -> None:
    """Flip a bit in the middle of every data object."""
    for path in Path(url).glob("*.distcp"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


MISTAKES: dict[str, tuple[type[CheckpointError], Any]] = {
    "a second save": (
        AlreadyExistsError,
        lambda url, **group: dcpstore.save(state_of(0), url, **group),
    ),
    "no checkpoint": (
        NotFoundError,
        lambda url, **group: dcpstore.load(state_of(0), url + "-none", **group),
    ),
    "another shape": (
        IncompatibleError,
        lambda url, **group: dcpstore.load({"model": {"w": torch.zeros(3)}}, url, **group),
    ),
    "a narrowing cast": (
        IncompatibleError,
        lambda url, **group: dcpstore.load(
            {"model": {"w": torch.zeros((70_000, 5), dtype=torch.float16)}}, url, **group
        ),
    ),
    "damage": (
        CorruptError,
        lambda url, **group: (broken(url), dcpstore.load(state_of(0, 0.0), url, **group)),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_process_raises_the_plain_error(url: str, mistake: str) -> None:
    kind, act = MISTAKES[mistake]
    dcpstore.save(state_of(0), url)
    with pytest.raises(kind) as caught:
        act(url)
    assert type(caught.value) is kind


@pytest.mark.parametrize("mistake", [name for name in MISTAKES if name != "damage"])
def test_several_ranks_raise_rank_failures_with_the_error_inside(url: str, mistake: str) -> None:
    kind, act = MISTAKES[mistake]
    dcpstore.save(state_of(0), url)
    run = run_ranks(2, lambda group: act(url, process_group=group))
    assert sorted(run.errors) == [0, 1]
    for error in run.errors.values():
        assert isinstance(error, RankFailures)
        assert error.exceptions
        assert all(type(one) is kind for one in error.exceptions.values())


@pytest.mark.parametrize(
    "call",
    [
        lambda url: dcpstore.save({}),
        lambda url: dcpstore.load({}),
        lambda url: dcpstore.load({}, url, share="maybe"),  # type: ignore[arg-type]
        lambda url: dcpstore.load({}, url, strict=False, planner=dcpstore.LoadPlanner()),
        lambda url: dcpstore.save({}, storage_writer=dcpstore.ObjectStoreWriter(url), config=W),
        lambda url: dcpstore.load({}, storage_reader=dcpstore.ObjectStoreReader(url), config=R),
        lambda url: dcpstore.save({}, url, coordinator_rank=1),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(url: str, call: Any) -> None:
    with pytest.raises(ConfigError):
        call(url)


W, R = WriteConfig(), ReadConfig()
