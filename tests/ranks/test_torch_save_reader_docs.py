"""The code of docs/torch-save.md runs as it stands, block after block."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "torch-save.md"


def test_every_block_of_the_page_runs(tmp_path: Path) -> None:
    text = PAGE.read_text().replace("/tmp/example", str(tmp_path))
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 6
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        for number, block in enumerate(blocks):
            exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
