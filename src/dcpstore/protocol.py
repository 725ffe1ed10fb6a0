"""Calls into planners, readers and writers that others wrote."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch.distributed as dist

from dcpstore.collectives import RankGroup, open_group, steps
from dcpstore.errors import RankFailures

__all__ = ["Ranks", "call_set_up", "join_ranks", "plain_cause_of_one", "run_on_all"]


Ranks: TypeAlias = "dist.ProcessGroup | RankGroup | None"
"""The ranks that work together: a process group, an open rank group, or None for all."""


@contextmanager
def join_ranks(ranks: Ranks, coordinator_rank: int, deadline_s: float) -> Iterator[RankGroup]:
    """Open a group for one save or load; one that is open already stays the caller's."""
    if ranks is not None and not isinstance(ranks, dist.ProcessGroup):
        yield ranks
        return
    with open_group(ranks, coordinator_rank, deadline_s=deadline_s) as group:
        yield group


def call_set_up(function: Callable[..., Any], *args: Any, **optional: Any) -> Any:
    """Call a set-up method with those optional arguments that it takes.

    DCP's protocol gained arguments over time (``storage_meta``, ``rank``,
    ``use_collectives``); older implementations do not know them.
    """
    parameters = inspect.signature(function).parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        optional = {name: value for name, value in optional.items() if name in parameters}
    return function(*args, **optional)


def run_on_all(group: RankGroup, step: str, fn: Callable[[], object]) -> None:
    """All ranks: run `fn` and return once it succeeded everywhere.

    Raises:
        RankFailures: On every rank, if it failed on any.
    """

    def run() -> None:
        fn()

    steps.all_reduce(group, step, run, lambda _: None)


@contextmanager
def plain_cause_of_one(group: RankGroup) -> Iterator[None]:
    """Where there is but one rank, raise what went wrong rather than that a rank failed."""
    try:
        yield
    except RankFailures as failures:
        if group.size == 1 and failures.__cause__ is not None:
            raise failures.__cause__ from failures.__cause__.__cause__
        raise
