"""Failing ranks that are processes joined by gloo: a part of the matrix, and ``kill -9``."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dcpstore import RankFailures
from faults import processes
from faults.failing_ranks import NUM_RANKS, SAVE_PHASES, Interrupted, Scenario, play
from faults.test_rank_failures import check_names

LONG_DEADLINE_S = 100.0
SURVIVED = [
    Scenario("local plan", (3,), "error"),
    Scenario("global plan", (2,), "unpicklable", coordinator=2),
    Scenario("resolve", (1, 2), "interrupt"),
    Scenario("upload", (0,), "denied"),
    Scenario("upload", (2,), "unpicklable", coordinator=1),
    Scenario("finish", (1,), "denied", coordinator=1),
    Scenario("finish", (0,), "interrupt"),
    Scenario("read metadata", (3,), "denied", coordinator=3),
    Scenario("load plan", (0, 3), "unpicklable"),
    Scenario("read", (2,), "denied"),
    Scenario("fetch to share", (1,), "denied"),
    Scenario("share", (1,), "error"),
    Scenario("share", (0,), "interrupt", coordinator=2),
    Scenario("hand over", (2,), "error"),
]
DEADLINE_S = 15.0  # of ranks that need a second, where a busy machine may make it several
DEADLY = [
    Scenario("local plan", (1,), "killed"),
    Scenario("share", (2,), "killed"),
    Scenario("upload", (1,), "hang"),
]
MORE_DEADLY = [
    Scenario("upload", (2,), "killed", coordinator=2),
    Scenario("upload", (2,), "killed"),
    Scenario("finish", (3,), "killed", coordinator=3),
    Scenario("share", (3,), "hang"),
    Scenario("global plan", (1,), "killed", coordinator=1),
    Scenario("resolve", (1, 2), "killed", coordinator=3),
    Scenario("upload", (0,), "killed"),  # takes the job's TCPStore with it
    Scenario("upload", (0,), "killed", coordinator=2),
    Scenario("finish", (0,), "killed"),
    Scenario("read metadata", (2,), "killed", coordinator=2),
    Scenario("read", (3,), "killed"),
    Scenario("fetch to share", (1,), "killed"),
    Scenario("hand over", (2,), "killed"),
    Scenario("local plan", (3,), "hang"),
    Scenario("global plan", (0,), "hang"),
    Scenario("finish", (2,), "hang", coordinator=2),
    Scenario("read metadata", (0,), "hang"),
    Scenario("read", (1, 2), "hang"),
    Scenario("fetch to share", (0,), "hang"),
]


class Job:
    """Four ranks that play scenarios."""

    def __init__(self, folder: Path, scenarios: list[Scenario], deadline_s: float) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        pipes = [processes.pipe() for _ in range(NUM_RANKS)]
        self.reports = [ours for ours, _ in pipes]
        self.ranks = [
            processes.start(play, rank, port, folder, scenarios, deadline_s, theirs)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for _, theirs in pipes:
            theirs.close()

    def hear(self, rank: int, timeout_s: float = 60) -> Any:
        """Return what a rank says next."""
        assert self.reports[rank].poll(timeout_s), f"rank {rank} says nothing"
        return self.reports[rank].recv()

    def end(self) -> list[int]:
        """End all ranks."""
        for rank in self.ranks:
            rank.kill()
            rank.join(10)
        return [rank.exitcode for rank in self.ranks]


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Future[str]]]:
    """What is wrong with the deadly scenarios, which mostly wait: they do so beside the rest."""
    folder = tmp_path_factory.mktemp("deadly")
    with ThreadPoolExecutor(len(DEADLY)) as executor:
        yield [
            executor.submit(survivors_raise, scenario, folder / str(number))
            for number, scenario in enumerate(DEADLY)
        ]


@pytest.mark.usefixtures("problems")
def test_ranks_that_survive_tell_each_other_and_go_on(tmp_path: Path) -> None:
    job = Job(tmp_path, SURVIVED, LONG_DEADLINE_S)
    try:
        for scenario in SURVIVED:
            said = [job.hear(rank) for rank in range(NUM_RANKS)]
            for rank, (error, seconds) in enumerate(said):
                if scenario.kind == "interrupt" and rank in scenario.ranks:
                    assert isinstance(error, Interrupted), scenario
                    continue
                assert isinstance(error, RankFailures), f"{scenario}: {error!r}"
                check_names(error, scenario.ranks, scenario.kind)
                assert seconds < LONG_DEADLINE_S / 2, scenario
            left = [job.hear(rank) for rank in range(NUM_RANKS)]
            if scenario.phase in SAVE_PHASES:
                assert ".metadata" not in left[0], scenario
                if scenario.kind != "interrupt":
                    assert left[0] == [], scenario
        for rank in job.ranks:
            rank.join(20)
    finally:
        codes = job.end()
    assert codes == [0] * NUM_RANKS


def survivors_raise(scenario: Scenario, folder: Path) -> str:
    """Run a scenario that some ranks do not survive; return what is wrong, if anything."""
    job = Job(folder, [scenario], DEADLINE_S)
    survivors = [rank for rank in range(NUM_RANKS) if rank not in scenario.ranks]
    try:
        for rank in survivors:
            error, seconds = job.hear(rank)
            if not isinstance(error, RankFailures):
                return f"{scenario}: rank {rank} raised {error!r}"
            if seconds > 2 * DEADLINE_S:
                return f"{scenario}: rank {rank} raised after {seconds:.1f} s"
            check_names(error, scenario.ranks, "hang")
        left = [path.name for path in (folder / "0").glob("*")]
        if scenario.phase in SAVE_PHASES and ".metadata" in left:
            return f"{scenario}: sealed"
        if scenario.phase in ("resolve", "upload") and 0 not in scenario.ranks:
            theirs = tuple(f"__{rank}_" for rank in scenario.ranks)
            kept = [name for name in left if not name.startswith(theirs)]
            return f"{scenario}: {kept} were left" if kept else ""
    except AssertionError as error:
        return f"{scenario}: {error}"
    finally:
        job.end()
    return ""


def test_survivors_of_a_killed_or_hanging_rank_raise_by_the_deadline(
    problems: list[Future[str]],
) -> None:
    assert not any(problem.result() for problem in problems), "\n".join(
        problem.result() for problem in problems
    )


@pytest.mark.campaign
def test_survivors_of_more_killed_and_hanging_ranks_raise_by_the_deadline(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as executor:
        problems = list(
            executor.map(
                lambda one: survivors_raise(one[1], tmp_path / str(one[0])),
                enumerate(MORE_DEADLY),
            )
        )
    assert not any(problems), "\n".join(filter(None, problems))
