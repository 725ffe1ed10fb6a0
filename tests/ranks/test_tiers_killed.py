"""A job on two nodes that is killed with signal 9 between and in the stages of two tiers."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from parts import state_of
from tier_cluster import Cluster

from dcpstore import RankFailures
from dcpstore.manager.tiers import spread_seal
from dcpstore.ranks import RankGroup, open_group
from dcpstore.store import Store, open_store
from dcpstore.store.retry import Call, WrappedStore
from faults.processes import exit_codes

NUM_RANKS = 4


class Deadly(WrappedStore):
    """Kills the process once a data object is stored."""

    def _pass(self, call: Call, request: Any) -> Any:
        answer = request(self.inner)
        if call.verb.startswith("put") and call.key.endswith(".distcp"):
            die()
        return answer


def open_deadly(url: str, **options: Any) -> Store:
    return Deadly(open_store(url, **options))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(rank: int, root: Path, dies: str, dying: tuple[int, ...]) -> None:
    """Save and copy step 10, then step 20, on which some ranks die."""
    with open_group(deadline_s=60) as group:
        try:
            for step in (10, 20):
                save_and_copy(group, root, step, dies if step == 20 and rank in dying else "")
        except RankFailures:
            if rank in dying:  # another one was faster
                die()
            (root / f"survived-{rank}").touch()


def save_and_copy(group: RankGroup, root: Path, step: int, dies: str) -> None:
    cluster = Cluster(root)
    cluster.save_as(group, step, state_of)
    if dies == "before the spread":
        die()
    spread_seal(group, cluster.disk(group.rank).below(f"step-{step}"))
    if dies == "before the copy":
        die()
    if dies == "in the copy":
        cluster.opener = open_deadly
    if step == 20:
        group.deadline_s = 4
    cluster.copy_as(group, step)


_long = partial(pytest.param, marks=pytest.mark.campaign)


@pytest.mark.parametrize(
    ("dies", "dying", "expected"),
    [
        _long("before the spread", range(NUM_RANKS), (10, True)),
        _long("before the copy", range(NUM_RANKS), (20, True)),
        _long("in the copy", range(NUM_RANKS), (20, True)),
        ("in the copy", (2, 3), (20, True)),
    ],
)
def test_a_killed_job_leaves_whole_steps_and_none_that_is_half_sealed(
    tmp_path: Path, dies: str, dying: tuple[int, ...], expected: tuple[int, bool]
):
    codes = exit_codes(NUM_RANKS, train, tmp_path, dies, tuple(dying))
    assert [code == -9 for code in codes] == [rank in dying for rank in range(NUM_RANKS)]
    survived = {int(path.name[-1]) for path in tmp_path.glob("survived-*")}
    assert survived == set(range(NUM_RANKS)) - set(dying)
    cluster = Cluster(tmp_path)
    assert cluster.newest() == (10, "step-10"), "nothing of step 20 is sealed in the bucket"
    for size in (NUM_RANKS, 3):
        results = cluster.restore(size)
        assert {(step, local) for step, local, _ in results} == {expected}
        assert cluster.fetched_bytes() == 0
    if len(dying) < NUM_RANKS:
        names = {path.name[:4] for path in (tmp_path / "bucket/step-20").glob("*.distcp")}
        assert names.isdisjoint({"__0_", "__1_"}), "the ranks that live sweep what they put"
    cluster.copy(NUM_RANKS, 20).values()
    assert cluster.newest() == (20, "step-20")
