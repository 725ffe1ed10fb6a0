"""A rank's share of a list of work: a run of neighbours, balanced by bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar

__all__ = ["own_run"]

T = TypeVar("T")


def own_run(work: Sequence[T], costs_bytes: Sequence[int], rank: int, num_ranks: int) -> list[T]:
    """Return what a rank does; all ranks' runs together are the whole list, in order."""
    costs = [cost + 1 for cost in costs_bytes]  # so that empty pieces are spread too
    total = sum(costs)
    begins = accumulate(costs, initial=0)  # one more than there is work
    return [one for one, at in zip(work, begins, strict=False) if at * num_ranks // total == rank]
