"""Steps: a function per rank, a function on the coordinator, and each rank's part.

If any rank raises anywhere (in either function, or because a value does not pickle here or
unpickle there) or does not answer, every rank raises the same `RankFailures`; see `RankGroup`
for interrupts and deadlines. All ranks call the same steps in the same order. What a rank
does between two steps, nobody hears of until the next: whatever may fail belongs into one.

With one rank nothing is pickled and nothing waits; results and the error's type are the same.
The forms are those of DCP's ``_DistWrapper``, which users of planners know.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from dcpstore.errors import CheckpointError
from dcpstore.ranks.group import Blob, Decision, RankGroup, describe

T = TypeVar("T")
R = TypeVar("R")


def reduce_scatter(
    group: RankGroup,
    step: str,
    map_fn: Callable[[], T],
    reduce_fn: Callable[[list[T]], Sequence[R]],
    *,
    deadline_s: float | None = None,
) -> R:
    """All ranks: run `map_fn`; the coordinator reduces; each rank gets its part.

    Args:
        group: The ranks.
        step: Names the step in errors.
        map_fn: Runs on every rank.
        reduce_fn: Runs on the coordinator with the values by rank; returns one part per rank.
        deadline_s: Seconds the step may take; the group's own where None.

    Raises:
        RankFailures: On every rank, if any rank failed or did not answer.
    """
    parts: list[R] = []

    def split(values: list[T]) -> list[Blob]:
        parts.extend(reduce_fn(values))
        if len(parts) != group.size:
            raise ValueError(f"reduce_fn made {len(parts)} parts for {group.size} ranks")
        return [
            b"" if rank == group.rank else _dump(part, f"the part of rank {rank}")
            for rank, part in enumerate(parts)
        ]

    if group.size == 1:
        return alone(group, step, lambda: _only(reduce_fn([map_fn()])))
    values = _Values(group, map_fn)
    return group.exchange(
        step,
        values.dump_own,
        lambda blobs: split(values.load_all(blobs)),
        lambda blob: parts[group.rank] if group.is_coordinator else _load(blob, "its part"),
        deadline_s=deadline_s,
    )


def all_reduce(
    group: RankGroup,
    step: str,
    map_fn: Callable[[], T],
    reduce_fn: Callable[[list[T]], R],
    *,
    deadline_s: float | None = None,
) -> R:
    """All ranks: run `map_fn`; the coordinator reduces; every rank gets the result.

    Arguments and errors are those of `reduce_scatter`.
    """
    results: list[R] = []

    def reduce(values: list[T]) -> list[Blob]:
        results.append(reduce_fn(values))
        return [_dump(results[0], "the result")]

    if group.size == 1:
        return alone(group, step, lambda: reduce_fn([map_fn()]))
    values = _Values(group, map_fn)
    return group.exchange(
        step,
        values.dump_own,
        lambda blobs: reduce(values.load_all(blobs)),
        lambda blob: results[0] if group.is_coordinator else _load(blob, "the result"),
        deadline_s=deadline_s,
    )


def all_gather(
    group: RankGroup, step: str, map_fn: Callable[[], T], *, deadline_s: float | None = None
) -> list[T]:
    """All ranks: run `map_fn`; every rank gets all values by rank.

    Arguments and errors are those of `reduce_scatter`.
    """
    if group.size == 1:
        return alone(group, step, lambda: [map_fn()])
    values = _Values(group, map_fn)
    return group.exchange(
        step,
        values.dump_own,
        lambda blobs: [pickle.dumps(blobs, protocol=5)],
        lambda blob: values.load_all(_load(blob, "the values")),
        deadline_s=deadline_s,
    )


def gather(
    group: RankGroup, step: str, map_fn: Callable[[], T], *, deadline_s: float | None = None
) -> list[T] | None:
    """All ranks: run `map_fn`; the coordinator gets all values by rank, others None.

    Arguments and errors are those of `reduce_scatter`.
    """
    gathered: list[T] = []

    def keep(values: list[T]) -> list[Blob]:
        gathered.extend(values)
        return [b""]

    if group.size == 1:
        return alone(group, step, lambda: [map_fn()])
    values = _Values(group, map_fn)
    return group.exchange(
        step,
        values.dump_own,
        lambda blobs: keep(values.load_all(blobs)),
        lambda _: gathered if group.is_coordinator else None,
        deadline_s=deadline_s,
    )


def broadcast(
    group: RankGroup, step: str, fn: Callable[[], T], *, deadline_s: float | None = None
) -> T:
    """All ranks: the coordinator runs `fn`, every rank gets what it returned.

    Arguments and errors are those of `reduce_scatter`.
    """
    if group.size == 1:
        return alone(group, step, fn)
    value = _Values(group, fn)
    shared: T = group.exchange(
        step,
        value.dump_own if group.is_coordinator else bytes,
        lambda blobs: [blobs[group.rank]],
        lambda blob: value.own if group.is_coordinator else _load(blob, "the value"),
        deadline_s=deadline_s,
    )
    return shared


def barrier(
    group: RankGroup,
    step: str,
    map_fn: Callable[[], object] = lambda: None,
    *,
    deadline_s: float | None = None,
) -> None:
    """All ranks: run `map_fn`, whose value is dropped; return once it is done on every rank.

    Arguments and errors are those of `reduce_scatter`.
    """

    def produce() -> bytes:
        map_fn()
        return b""

    if group.size == 1:
        alone(group, step, produce)
    else:
        group.exchange(step, produce, lambda _: [b""], lambda _: None, deadline_s=deadline_s)


class _Values:
    """This rank's value, and everybody's once it is unpickled."""

    own: Any

    def __init__(self, group: RankGroup, make: Callable[[], Any]) -> None:
        self._group = group
        self._make = make

    def dump_own(self) -> bytes:
        self.own = self._make()
        return _dump(self.own, "its value")

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


def _only(parts: Sequence[R]) -> R:
    if len(parts) != 1:
        raise ValueError(f"reduce_fn made {len(parts)} parts for 1 rank")
    return parts[0]


def alone(group: RankGroup, step: str, fn: Callable[[], R]) -> R:
    """Run a step of a group of one rank.

    Raises:
        RankFailures: If `fn` raises an ``Exception``.
    """
    try:
        return fn()
    except Exception as error:
        raise Decision.failed({group.rank: describe(error)}).error(step) from error
