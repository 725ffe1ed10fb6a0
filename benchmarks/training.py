"""A training loop beside which a checkpoint is saved: what the save takes from it."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.systems import System
from benchmarks.systems.base import quietly

__all__ = ["train_beside"]

_STEPS_ALONE = 100
_BATCH, _WIDTH = 128, 512  # some 10 ms a step on one core


class _Loop:
    """A small network; one thread, so that a second core is free as in a job on GPUs."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        layers = [m for _ in range(3) for m in (torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.ReLU())]
        self._model = torch.nn.Sequential(*layers)
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._input = torch.randn(_BATCH, _WIDTH)

    def step(self) -> float:
        """Train once and return how long it took."""
        began = time.perf_counter()
        self._optimizer.zero_grad()
        self._model(self._input).square().mean().backward()
        self._optimizer.step()
        return time.perf_counter() - began


def train_beside(
    system: System, state: dict[str, Any], url: str, options: dict[str, Any]
) -> tuple[Callable[[], None], dict[str, float]]:
    """Return the call to measure, and the dictionary that it fills.

    ``blocked_s`` is how long the call of ``dcp.async_save`` took, ``step_s`` and
    ``beside_s`` the median step alone and while the save ran, ``lost_s`` the training time
    lost: blocked, and over the median alone in every step beside.
    """
    loop, found = _Loop(), dict[str, float]()
    alone = [loop.step() for _ in range(_STEPS_ALONE)]
    step_s = median(alone[_STEPS_ALONE // 2 :])
    assert system.writer is not None
    writer = system.writer(url, options)

    def run() -> None:
        began = time.perf_counter()
        future = dcp.async_save(state, storage_writer=writer, no_dist=True)
        blocked_s = time.perf_counter() - began
        beside = []
        while not future.done():  # type: ignore[union-attr]
            beside.append(loop.step())
        future.result()  # type: ignore[union-attr]
        found["blocked_s"], found["step_s"] = blocked_s, step_s
        found["beside_s"] = median(beside) if beside else step_s
        found["worst_s"] = max(beside, default=step_s)
        found["lost_s"] = blocked_s + sum(beside) - step_s * len(beside)

    return lambda: quietly(run), found
