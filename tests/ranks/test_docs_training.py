"""The code of docs/training.md runs as it stands; it saves on 2 ranks, resumes on 4 and on 1."""

from __future__ import annotations

import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dcpstore import CheckpointManager, EverySteps, Latest
from dcpstore.store import open_store
from dcpstore.testing import RecordingStore

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
THE_LOOP = 0


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def run_block(number: int, folder: str, names: dict[str, Any]) -> None:
    code = blocks()[number].replace("s3://bucket", folder).replace("/nvme", f"{folder}/nvme")
    exec(compile(code, f"{PAGE.name}, block {number}", "exec"), names)


def run_page(folder: str) -> None:
    names: dict[str, Any] = {}
    for number in range(len(blocks())):
        run_block(number, folder, names)
    logging.getLogger("dcpstore").setLevel(logging.NOTSET)


def run_loop(url: str, num_steps: int, starts_at: int | None) -> list[torch.Tensor]:
    """Train up to a step on this rank; return the weights, whole."""
    names: dict[str, Any] = {}
    code = blocks()[THE_LOOP].replace("s3://bucket/run", url).rpartition("\n\n\n")[0]
    exec(compile(code, f"{PAGE.name}, block {THE_LOOP}", "exec"), names)
    start, app = names["train"](url, num_steps)
    assert start == starts_at
    return [one.full_tensor() for one in app.model.parameters()]


def test_every_block_of_the_page_runs(pool: Any, tmp_path: Path) -> None:
    assert len(blocks()) == 9
    pool.run(1, run_page, str(tmp_path))


def test_what_the_page_saves_on_two_ranks_goes_on_on_four_and_on_one(
    pool: Any, tmp_path: Path
) -> None:
    url = str(tmp_path / "run")
    pool.run(2, run_loop, url, 25, None)
    pool.run(4, run_loop, url, 45, 20)
    resumed = pool.run(1, run_loop, url, 60, 40)[0]
    unbroken = pool.run(1, run_loop, str(tmp_path / "other"), 60, None)[0]
    for one, other in zip(resumed, unbroken, strict=True):
        torch.testing.assert_close(one, other)


def count_requests(url: str) -> list[dict[str, int]]:
    """Return how many requests of each verb this rank makes: save, restore, save and remove."""
    stores: list[RecordingStore] = []

    def opener(*args: Any, **options: Any) -> Any:
        stores.append(RecordingStore(open_store(*args, **options)))
        return stores[-1]

    def take() -> dict[str, int]:
        counts: Counter[str] = sum((one.counts for one in stores), Counter())
        for one in stores:
            one.clear()
        return dict(counts)

    state = {"w": torch.full((5000,), float(dist.get_rank())), "step": 0}
    counted = []
    with CheckpointManager(url, save=EverySteps(1), store_opener=opener) as manager:
        counted.append(take())
        for step in (1, 2, 3):
            manager.step(step, state)
            manager.wait()
            counted[1:] = [take()]
        manager.restore(state)
        counted.append(take())
    with CheckpointManager(url, keep=Latest(2), store_opener=opener) as manager:
        for step in (4, 5):
            take()
            manager.save(step, state)
            manager.wait()
        counted.append(take())
    return counted


def test_a_run_costs_the_requests_that_the_page_states(pool: Any, tmp_path: Path) -> None:
    coordinator, _, _, other = pool.run(4, count_requests, str(tmp_path / "run"))
    made, saved, restored, removed = coordinator
    assert made == {"get": 1, "put": 1}
    assert saved == {"get": 1, "put": 2 + 1}
    assert restored.pop("get_range", 1) >= 1
    assert restored == {"folders": 1, "get_tail": 1, "put": 1, "get": 1}
    looked = {"list": 3, "get": 1, "get_tail": 1}  # one of the three is of folders
    gone = {"get": 1, "get_tail": 1, "list": 1, "put": 1, "delete_many": 3}
    for_all = {"list": 1, "get_tail": 1}
    removed["list"] += removed.pop("folders")
    expected = sum(map(Counter, (saved, looked, gone, for_all)), Counter())
    assert removed == dict(expected)
    assert other[0] == {}
    assert other[1] in ({}, {"put": 1}), "what is replicated is saved by one rank"
    assert other[2].keys() <= {"get_range"}
