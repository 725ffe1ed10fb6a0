"""What is sealed beside the tensors, by one rank and by several that are threads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcpstore
from dcpstore import ConfigError, ObjectStoreWriter, RankFailures
from dcpstore.format.seal import Facts, read_tail
from dcpstore.read.discovery import discover
from dcpstore.store import open_store
from dcpstore.testing.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

STATE = {"model": {"w": torch.arange(6.0)}, "step": 7}


def facts_at(url: str) -> Facts | None:
    """Read step, run and metrics as whoever looks at many checkpoints does."""
    data = open_store(url).get(".metadata").data
    seal = read_tail(data[-(64 << 10) :], len(data))
    assert seal is not None
    return seal.facts


def info_at(url: str) -> Any:
    return discover(open_store(url), dcpstore.ReadConfig()).decode_manifest().info


def save_on(size: int, url: str, given: Any, coordinator: int = 0) -> list[Any]:
    """Save on so many ranks, each with the keywords that ``given(rank)`` returns."""

    def work(group: Any) -> Any:
        return dcpstore.save(STATE, url, process_group=group, **given(group.rank))

    return run_ranks(size, work, coordinator=coordinator, deadline_s=60).values()


def test_metrics_a_step_and_users_metadata_come_back() -> None:
    url = "memory://attached/one"
    dcpstore.save(
        STATE,
        url,
        metrics={"loss": torch.tensor(0.5), "num": 3, "worst": math.inf},
        user_metadata={"tokens": 10**12, "note": ["a", {"b": None}]},
        facts=Facts(100, "a" * 16, {"lr": 0.1}),
    )
    metrics = {"lr": 0.1, "loss": 0.5, "num": 3.0, "worst": math.inf}
    assert facts_at(url) == Facts(100, "a" * 16, metrics)
    assert info_at(url)["user_metadata"] == {"tokens": 10**12, "note": ["a", {"b": None}]}


def test_a_plain_dcp_save_seals_what_was_attached_to_its_writer_once(tmp_path: Any) -> None:
    writer = ObjectStoreWriter(tmp_path / "0")
    writer.attach(metrics={"loss": 1.0}, step=1, user_metadata={"a": 1})
    for number in (1, 2):
        url = str(tmp_path / str(number))
        dcp.save(dict(STATE), checkpoint_id=url, storage_writer=writer, no_dist=True)
    assert facts_at(str(tmp_path / "1")) == Facts(1, None, {"loss": 1.0})
    assert info_at(str(tmp_path / "1"))["user_metadata"] == {"a": 1}
    assert facts_at(str(tmp_path / "2")) is None
    assert "user_metadata" not in info_at(str(tmp_path / "2"))


def test_the_coordinators_value_counts_and_then_the_lowest_ranks() -> None:
    url = "memory://attached/ranks"
    save_on(
        4,
        url,
        lambda rank: {
            "metrics": {
                "loss": float(rank),
                f"of {rank}": 1.0,
                **({"late": 3.0} if rank == 3 else {}),
            },
            "user_metadata": {"rank": rank} if rank != 2 else {},
            "facts": Facts(step=10 + rank) if rank in (1, 3) else None,
        },
        coordinator=2,
    )
    facts = facts_at(url)
    assert facts == Facts(
        11, None, {"loss": 2.0, "late": 3.0, **{f"of {rank}": 1.0 for rank in range(4)}}
    )
    assert info_at(url)["user_metadata"] == {"rank": 0}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"metrics": {"loss": "0.1"}}, "not a number"),
        ({"metrics": {"loss": torch.zeros(2)}}, "no single number"),
        ({"metrics": {"loss": 10**400}}, "no single number"),
        ({"metrics": {1: 0.1}}, "not a float"),
        ({"metrics": {str(n): 0.1 for n in range(4096)}}, "is the most"),
        ({"user_metadata": {"a": math.nan}}, "JSON"),
        ({"user_metadata": {"a": torch.zeros(1)}}, "JSON"),
        ({"user_metadata": {"a": "x" * (256 << 10)}}, "make it an attachment"),
        ({"user_metadata": {"a": eval("[" * 80 + "]" * 80)}}, "64 levels"),
    ],
)
def test_what_cannot_be_sealed_is_refused_on_all_ranks_before_anything_is_written(
    given: dict[str, Any], message: str
) -> None:
    url = "memory://attached/refused"
    with pytest.raises(ConfigError, match=message):
        dcpstore.save(STATE, url, **given)
    for failure in save_on_and_fail(url, given):
        assert isinstance(failure.exceptions[1], ConfigError)
        assert failure.step == "plan"
    assert not list(open_store(url).list())


def save_on_and_fail(url: str, given: dict[str, Any]) -> list[RankFailures]:
    def work(group: Any) -> Any:
        with pytest.raises(RankFailures) as caught:
            dcpstore.save(STATE, url, process_group=group, **(given if group.rank == 1 else {}))
        return caught.value

    return run_ranks(2, work, deadline_s=60).values()


def test_metrics_of_ranks_that_are_too_many_together_seal_nothing() -> None:
    url = "memory://attached/together"

    def work(group: Any) -> Any:
        metrics = {f"a metric of rank {group.rank}: {n}": 0.1 for n in range(300)}
        with pytest.raises(RankFailures) as caught:
            dcpstore.save(STATE, url, process_group=group, metrics=metrics)
        return caught.value

    for failure in run_ranks(2, work, deadline_s=60).values():
        assert "all ranks together" in str(failure)
    assert not list(open_store(url).list())


def test_what_is_given_twice_or_to_a_foreign_writer_is_refused(tmp_path: Any) -> None:
    writer = ObjectStoreWriter(tmp_path / "a")
    writer.attach(step=1)
    with pytest.raises(ConfigError, match="attached to your storage_writer already"):
        dcpstore.save(STATE, storage_writer=writer, metrics={"loss": 1.0})
    foreign = dcp.FileSystemWriter(tmp_path / "b")
    with pytest.raises(ConfigError, match="FileSystemWriter"):
        dcpstore.save(STATE, storage_writer=foreign, metrics={"loss": 1.0})


def test_stock_dcp_loads_a_checkpoint_with_facts(tmp_path: Any) -> None:
    dcpstore.save(STATE, tmp_path, metrics={"loss": 1.0}, user_metadata={"a": 1})
    state = {"model": {"w": torch.zeros(6)}, "step": 0}
    dcp.load(state, checkpoint_id=str(tmp_path), no_dist=True)
    assert torch.equal(state["model"]["w"], STATE["model"]["w"])
    assert state["step"] == 7
