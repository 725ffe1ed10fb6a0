"""The code of docs/optimizer.md runs as it stands; it saves on 4 ranks, resumes on 2 and 1."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "optimizer.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def run_blocks(numbers: list[int], url: str) -> dict[str, Any]:
    """Run some blocks on this rank; return the optimizer's state after the last of them, whole."""
    names: dict[str, Any] = {}
    for number in numbers:
        code = blocks()[number].replace("s3://bucket/run/step-10", url)
        exec(compile(code, f"{PAGE.name}, block {number}", "exec"), names)
    state = importlib.import_module("dcpstore").optimizer_state(names["model"], names["optimizer"])
    whole = {
        f"{name}.{key}": value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, one in state["state"].items()
        for key, value in one.items()
    }
    groups = [{**group, "params": tuple(group["params"])} for group in state["param_groups"]]
    return {"state": whole, "groups": groups}


def test_what_the_page_saves_on_four_ranks_it_restores_on_two_and_on_one(
    pool: Any, tmp_path: Path
) -> None:
    assert len(blocks()) == 8
    url = str(tmp_path / "step-10")
    saved = pool.run(4, run_blocks, [0, 1], url)[0]
    assert len(saved["state"]) == 12
    for num_ranks in (2, 1):
        for restored in pool.run(num_ranks, run_blocks, [0, 2], url):
            assert restored["groups"] == saved["groups"]
            assert restored["state"].keys() == saved["state"].keys()
            for name, value in saved["state"].items():
                assert torch.equal(restored["state"][name], value), name


def test_every_other_block_of_the_page_runs(pool: Any, tmp_path: Path) -> None:
    pool.run(1, run_page, str(tmp_path / "step-10"))


def run_page(url: str) -> None:
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks()):
        code = block.replace("s3://bucket/run/step-10", url)
        exec(compile(code, f"{PAGE.name}, block {number}", "exec"), names)
