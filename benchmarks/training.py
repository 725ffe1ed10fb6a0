"""A training loop beside which a checkpoint is saved: what the save takes from it."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

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
    """Save once in the background; return the call to measure, a second save, and what it fills.

    A training job saves again and again, so what is made once and kept is nobody's cost here.

    ``blocked_s`` is how long the call that begins the save took, ``copy_s`` how long one thread
    copies the state into memory that was used before. ``step_s`` and ``beside_s`` are the median
    step alone and while the save ran; ``slowed_s`` is the time over the median alone of every step
    beside, and ``lost_s`` all the training time lost: blocked and slowed.
    """
    loop, found = _Loop(), dict[str, float]()
    alone = [loop.step() for _ in range(_STEPS_ALONE)]
    found["step_s"] = step_s = median(alone[_STEPS_ALONE // 2 :])
    found["copy_s"] = _copy_s(state)
    assert system.background is not None
    begin = system.background(url, options)
    quietly(lambda: begin(state, 1)[1]())

    def run() -> None:
        began = time.perf_counter()
        is_done, finish = begin(state, 2)
        found["blocked_s"] = blocked_s = time.perf_counter() - began
        beside = []
        while not is_done():
            beside.append(loop.step())
        finish()
        found["beside_s"] = median(beside) if beside else step_s
        found["worst_s"] = max(beside, default=step_s)
        found["slowed_s"] = sum(beside) - step_s * len(beside)
        found["lost_s"] = blocked_s + found["slowed_s"]

    return lambda: quietly(run), found


def _copy_s(state: dict[str, Any]) -> float:
    """Return the median time of copies into memory that was written to before."""
    copies = [one.clone() for one in state.values()]
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for copy, one in zip(copies, state.values(), strict=True):
            copy.copy_(one)
        times.append(time.perf_counter() - began)
    return median(times)
