"""Steps: a function per rank, a function on the coordinator, and each rank's part.

If any rank raises anywhere (in either function, or because a value does not pickle here or
unpickle there) or does not answer, every rank raises the same `RankFailures`; see `RankGroup`
for interrupts and deadlines. All ranks call the same steps in the same order. A failure
between two steps is not noticed before the next one, so whatever may fail belongs in a step.

Every step takes the group, the step's name for errors, and a function that runs on every rank
(in `broadcast`, on the coordinator). With one rank nothing is pickled and nothing waits; results
and the error's type are the same. The forms are those of DCP's ``_DistWrapper``, which users of
planners know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from dcpstore.ranks.group import RankGroup

T = TypeVar("T")
R = TypeVar("R")


def each(group: RankGroup, step: str, work: Callable[[], T]) -> T:
    """All ranks: run `work`; return what it returned here, once it is done on every rank."""
    made: list[T] = []
    group.exchange(step, lambda: made.append(work()), lambda _: [None])
    return made[0]


def broadcast(group: RankGroup, step: str, work: Callable[[], T]) -> T:
    """All ranks: the coordinator runs `work`, every rank gets what it returned."""
    made: list[T] = []

    def lead() -> None:
        if group.is_coordinator:
            made.append(work())

    return group.exchange(step, lead, lambda _: made)


def gather(group: RankGroup, step: str, work: Callable[[], T]) -> list[T] | None:
    """All ranks: run `work`; the coordinator gets all values by rank, others None."""
    gathered: list[T] = []

    def keep(values: list[T]) -> list[None]:
        gathered.extend(values)
        return [None]

    group.exchange(step, work, keep)
    return gathered if group.is_coordinator else None


def all_gather(group: RankGroup, step: str, work: Callable[[], T]) -> list[T]:
    """All ranks: run `work`; every rank gets all values by rank."""
    return group.exchange(step, work, lambda values: [values])


def all_reduce(
    group: RankGroup, step: str, work: Callable[[], T], reduce: Callable[[list[T]], R]
) -> R:
    """All ranks: run `work`; the coordinator reduces the values by rank; all get the result."""
    return group.exchange(step, work, lambda values: [reduce(values)])


def reduce_scatter(
    group: RankGroup, step: str, work: Callable[[], T], reduce: Callable[[list[T]], Sequence[R]]
) -> R:
    """All ranks: run `work`; the coordinator makes one part per rank of the values by rank."""

    def split(values: list[T]) -> Sequence[R]:
        parts = reduce(values)
        if len(parts) != group.size:
            raise ValueError(f"reduce made {len(parts)} parts for {group.size} ranks")
        return parts

    return group.exchange(step, work, split)
