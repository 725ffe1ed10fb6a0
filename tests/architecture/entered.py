"""Which modules of ours a load and a save enter, in the order in which they do.

Counted with ``sys.setprofile`` on all threads, in a process where all are imported. Reader and
writer are constructed before; ``docs/architecture.md`` tells what the modules do.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import dcpstore

ROOT = Path(dcpstore.__file__).parent


def modules_entered(action: Callable[[], object]) -> list[str]:
    """Run the action and list the modules of ours whose functions it called."""
    files: dict[str, None] = {}
    ours = f"{ROOT}/"

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ours):
            files.setdefault(frame.f_code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    modules = (Path(file).relative_to(ROOT).with_suffix("") for file in files)
    return [".".join(module.parts) for module in modules]


def entered_by_a_save_and_a_load(folder: Path) -> tuple[list[str], list[str]]:
    """Save and load a small state in a local folder, the second time under watch."""
    _save(folder / "first")()
    _load(folder / "first")()
    return modules_entered(_save(folder / "second")), modules_entered(_load(folder / "second"))


def _state(step: int) -> dict[str, Any]:
    model = {"weight": torch.full((64, 64), float(step)), "bias": torch.ones(64).bfloat16() * step}
    return {"model": model, "step": step}


def _save(url: Path) -> Callable[[], object]:
    writer = dcpstore.ObjectStoreWriter(url)
    return lambda: dcp.save(_state(7), storage_writer=writer, no_dist=True)


def _load(url: Path) -> Callable[[], object]:
    reader = dcpstore.ObjectStoreReader(url)
    state = _state(0)

    def load() -> None:
        dcp.load(state, storage_reader=reader, no_dist=True)
        assert torch.equal(state["model"]["weight"], torch.full((64, 64), 7.0))

    return load


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        save, load = entered_by_a_save_and_a_load(Path(folder))
    for name, modules in (("dcp.load", load), ("dcp.save", save)):
        print(f"{name} enters {len(modules)} modules:")
        print("\n".join(f"  {module}" for module in modules))
