"""`examples/train_fsdp2.py`: killed, told to stop, and restarted on other numbers of ranks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from faults.train_jobs import MOMENTS, Kill, Launcher

KILLED = -9
NUM_KILLS = 20


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    with Launcher(tmp_path_factory.mktemp("train") / "log") as launcher:
        yield launcher


def sealed(run: Path) -> list[int]:
    """The steps that are there whole."""
    found = (one.parent.name for one in run.glob("step-*/.metadata"))
    return sorted(int(one.removeprefix("step-")) for one in found)


def check_equal(cli: Callable[..., tuple[int, str, str]], one: Path, other: Path) -> None:
    # Python's own generator is seeded by each process, and nothing of the example asks it.
    code, out, err = cli("diff", "--exclude", "attachment rng", one, other)
    assert code == 0, out + err


def test_the_example_killed_and_restarted_on_another_number_of_ranks_ends_with_the_same_weights(
    launcher: Launcher, tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    assert launcher.run(1, tmp_path / "whole", 30) == [0], launcher.log.read_text()
    run = tmp_path / "killed"
    kill = Kill("uploading", rank=1, number=2, is_after=False)
    assert launcher.run(2, run, 30, kill) == [KILLED, KILLED], launcher.log.read_text()
    assert sealed(run) == [10]
    assert launcher.run(1, run, 30) == [0], launcher.log.read_text()
    assert sealed(run) == [10, 20, 30]
    check_equal(cli, tmp_path / "whole" / "step-30", run / "step-30")


def test_sigterm_to_one_rank_of_four_saves_one_step_on_all_and_ends_with_143_spd_677(
    launcher: Launcher, tmp_path: Path
) -> None:
    ended = launcher.run(4, tmp_path, 100_000, sigterm=2)
    assert ended == [143] * 4, launcher.log.read_text()
    assert launcher.log.read_text().count("the former handler") == 1
    last = sealed(tmp_path)[-1]
    goal = last // 10 * 10 + 10
    assert launcher.run(2, tmp_path, goal) == [0, 0], launcher.log.read_text()
    assert sealed(tmp_path)[-2:] == [last, goal]


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [1])
def test_the_example_killed_at_random_20_times_ends_with_the_weights_of_the_uninterrupted_run(
    launcher: Launcher, tmp_path: Path, seed: int, cli: Callable[..., tuple[int, str, str]]
) -> None:
    chance, run = random.Random(seed), tmp_path / "killed"
    num_ranks, num_kills, newest, lives = 4, 0, 0, []
    began_s = time.monotonic()
    while num_kills < NUM_KILLS:
        moment = MOMENTS[len(lives) % len(MOMENTS)]
        is_of_all = moment in ("staging", "uploading", "at any time")
        kill = Kill(
            moment,
            rank=chance.randrange(num_ranks) if is_of_all else 0,
            number=chance.randint(5, 40) if moment == "at any time" else chance.randint(1, 4),
            is_after=chance.random() < 0.5,
            others_s=chance.choice([0.0, 0.3]),
        )
        goal = newest + 70
        ended = launcher.run(num_ranks, run, goal, kill)
        assert set(ended) in ({0}, {KILLED}), launcher.log.read_text()[-5000:]
        found = sealed(run)
        lives.append((num_ranks, kill, found[-1:], ended[0]))
        print(f"\n{num_ranks} ranks, {kill}: ended {ended[0]}, sealed {found}", end="")
        assert found[-1:] >= [newest][: bool(newest)], "a sealed step was lost"
        newest = max([0, *found])
        num_kills += ended[0] == KILLED
        num_ranks = chance.choice([one for one in (1, 2, 4) if one != num_ranks])
    goal = newest + 40
    assert launcher.run(num_ranks, run, goal) == [0] * num_ranks, launcher.log.read_text()[-5000:]
    killed_s = time.monotonic() - began_s
    assert launcher.run(1, tmp_path / "whole", goal) == [0]
    assert sealed(run)[-1] == sealed(tmp_path / "whole")[-1] == goal
    check_equal(cli, tmp_path / "whole" / f"step-{goal}", run / f"step-{goal}")
    print(f"\n{num_kills} kills in {len(lives)} lives, {goal} steps, {killed_s:.0f} s: equal")
