"""The code of docs/planners.md runs as it stands, block after block."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "planners.md"


def test_every_block_of_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 8
    module = ModuleType("planners_page")  # so that its classes are found by their names
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names: dict[str, Any] = module.__dict__
    for number, block in enumerate(blocks):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
    assert torch.equal(names["target"]["model"]["w"], names["state"]["model"]["w"])
