"""Steps: a function per rank, a function on the coordinator, and each rank's part.

If any rank raises anywhere (in either function, or because a value does not pickle here or
unpickle there) or does not answer, every rank raises the same `RankFailures`; see `RankGroup`
for interrupts and deadlines. All ranks call the same steps in the same order. What a rank
does between two steps, nobody hears of until the next: whatever may fail belongs into one.

Every step takes the group, the step's name for errors, and a function that runs on every rank
(in `broadcast`, on the coordinator). With one rank nothing is pickled and nothing waits; results
and the error's type are the same. The forms are those of DCP's ``_DistWrapper``, which users of
planners know.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from dcpstore.errors import CheckpointError
from dcpstore.ranks.group import Blob, RankGroup

T = TypeVar("T")
R = TypeVar("R")


def each(group: RankGroup, step: str, work: Callable[[], T]) -> T:
    """All ranks: run `work`; return what it returned here, once it is done on every rank."""
    made: list[T] = []

    def produce() -> bytes:
        made.append(work())
        return b""

    return group.exchange(step, produce, lambda _: [b""], lambda _: made[0])


def broadcast(group: RankGroup, step: str, work: Callable[[], T]) -> T:
    """All ranks: the coordinator runs `work`, every rank gets what it returned."""
    value = _Values(group, work)
    shared: T = group.exchange(
        step,
        value.dump_own if group.is_coordinator else bytes,
        lambda blobs: [blobs[group.rank]],
        lambda blob: value.own if group.is_coordinator else _load(blob, "the value"),
    )
    return shared


def gather(group: RankGroup, step: str, work: Callable[[], T]) -> list[T] | None:
    """All ranks: run `work`; the coordinator gets all values by rank, others None."""
    gathered: list[T] = []
    values = _Values(group, work)

    def keep(blobs: list[Blob]) -> list[Blob]:
        gathered.extend(values.load_all(blobs))
        return [b""]

    return group.exchange(
        step, values.dump_own, keep, lambda _: gathered if group.is_coordinator else None
    )


def all_gather(group: RankGroup, step: str, work: Callable[[], T]) -> list[T]:
    """All ranks: run `work`; every rank gets all values by rank."""
    values = _Values(group, work)
    return group.exchange(
        step,
        values.dump_own,
        lambda blobs: [pickle.dumps(blobs, protocol=5)],
        lambda blob: values.load_all(_load(blob, "the values")),
    )


def all_reduce(
    group: RankGroup, step: str, work: Callable[[], T], reduce: Callable[[list[T]], R]
) -> R:
    """All ranks: run `work`; the coordinator reduces the values by rank; all get the result."""
    return _reduce(group, step, work, lambda values: [reduce(values)])


def reduce_scatter(
    group: RankGroup, step: str, work: Callable[[], T], reduce: Callable[[list[T]], Sequence[R]]
) -> R:
    """All ranks: run `work`; the coordinator makes one part per rank of the values by rank."""

    def split(values: list[T]) -> Sequence[R]:
        parts = reduce(values)
        if len(parts) != group.size:
            raise ValueError(f"reduce made {len(parts)} parts for {group.size} ranks")
        return parts

    return _reduce(group, step, work, split)


def _reduce(
    group: RankGroup, step: str, work: Callable[[], T], reduce: Callable[[list[T]], Sequence[R]]
) -> R:
    """Run a step whose reduction makes one result for all ranks, or one part per rank."""
    results: list[R] = []
    values = _Values(group, work)

    def combine(blobs: list[Blob]) -> list[Blob]:
        results.extend(reduce(values.load_all(blobs)))
        if group.size == 1:
            return [b""]
        if len(results) == 1:
            return [_dump(results[0], "the result")]
        return [
            b"" if rank == group.rank else _dump(part, f"the part of rank {rank}")
            for rank, part in enumerate(results)
        ]

    def consume(blob: Blob) -> R:
        if not group.is_coordinator:
            part: R = _load(blob, "its part of the result")
            return part
        return results[0 if len(results) == 1 else group.rank]

    return group.exchange(step, values.dump_own, combine, consume)


class _Values:
    """This rank's value, and everybody's once it is unpickled."""

    own: Any

    def __init__(self, group: RankGroup, make: Callable[[], Any]) -> None:
        self._group = group
        self._make = make

    def dump_own(self) -> bytes:
        self.own = self._make()
        return b"" if self._group.size == 1 else _dump(self.own, "its value")

    def load_all(self, blobs: Sequence[Blob]) -> list[Any]:
        return [
            self.own if rank == self._group.rank else _load(blob, f"the value of rank {rank}")
            for rank, blob in enumerate(blobs)
        ]


def _dump(value: object, what: str) -> bytes:
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{what}, a {type(value).__qualname__}, does not pickle: {cause}"
        ) from error


def _load(blob: Blob, what: str) -> Any:
    try:
        return pickle.loads(blob)  # noqa: S301 - sent by a rank of this job
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{what} does not unpickle here: {cause}") from error
