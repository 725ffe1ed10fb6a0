"""Agree on what follows from the plans of all ranks.

Plans travel by name, and of equal parts only one rank sends the bytes::

    step 1   up: the head of each rank's plan (see `dcpstore.plan.wire`)
             down: this rank's decision, if the same plans were merged before; else which
             parts of its plan to send
    step 2   up: those parts; down: this rank's decision
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from dcpstore.plan.wire import PackedPlan, PartRequest, PlanCache, cache_key, parts_of
from dcpstore.ranks import RankGroup, steps


class Merged(Protocol):
    """What the coordinator makes of all plans."""

    @property
    def decisions(self) -> Sequence[Any]:
        """The answer to each rank."""


T = TypeVar("T", bound=Merged)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Numbers of the parts that a rank is to send."""

    parts: tuple[int, ...]


class Agreement(Generic[T]):
    """One rank's way to a common decision.

    Args:
        group: The ranks.
        cache: What was agreed on before; used on the coordinator.
        fingerprint: What the decision depends on beside the plans.
        merge: Decides; called on the coordinator, unless the cache knows.
    """

    def __init__(
        self,
        group: RankGroup,
        cache: PlanCache[T],
        fingerprint: str,
        merge: Callable[[list[PackedPlan]], T],
    ) -> None:
        self._group = group
        self._cache = cache
        self._fingerprint = fingerprint
        self._merge_plans = merge
        self._plan: PackedPlan | None = None
        self._request: PartRequest | None = None
        self._key = b""
        self.merged: T | None = None
        """What the coordinator made of all plans; None on the other ranks."""
        self.is_cached = False
        """Whether it was known from earlier plans."""
        self.sent_bytes = 0
        """Bytes of plans that all ranks sent; on the coordinator, else 0."""

    def reach(self, step: str, merge_step: str, make_plan: Callable[[], PackedPlan | None]) -> Any:
        """Return this rank's decision. All ranks; one or two steps of the group.

        Args:
            step: Names the first step.
            merge_step: Names the second one.
            make_plan: Makes this rank's plan; None if it cannot be packed.

        Returns:
            None if any rank could not pack its plan.

        Raises:
            RankFailures: On every rank, if any could not plan, or the plans do not fit together.
        """

        def head() -> bytes | None:
            self._plan = make_plan()
            return None if self._plan is None else self._plan.head

        answer = steps.reduce_scatter(self._group, step, head, self._look_up)
        if not isinstance(answer, _Wanted):
            self.is_cached = answer is not None
            return answer
        assert self._plan is not None
        sent = parts_of(self._plan, answer.parts)
        return steps.reduce_scatter(self._group, merge_step, lambda: sent, self._merge)

    def settle(self, succeeded: bool) -> None:
        """Keep the decision for later plans if what it was made for succeeded; else forget it."""
        if self.merged is None:
            return
        if succeeded:
            self._cache.put(self._key, self.merged)
        else:
            self._cache.invalidate(self._key)

    def _look_up(self, heads: Sequence[bytes | None]) -> Sequence[Any]:
        known = [head for head in heads if head is not None]
        if len(known) < len(heads):
            return [None] * len(heads)
        self.sent_bytes += sum(map(len, known))
        self._request = self._cache.request(known)
        self._key = cache_key([plan.digest for plan in self._request.plans], self._fingerprint)
        self.merged = self._cache.find(self._key)
        if self.merged is not None:
            return self.merged.decisions
        return [_Wanted(parts) for parts in self._request.wanted]

    def _merge(self, answers: Sequence[Sequence[bytes]]) -> Sequence[Any]:
        assert self._request is not None
        self.sent_bytes += sum(len(part) for parts in answers for part in parts)
        self.merged = self._merge_plans(self._cache.assemble(self._request, answers))
        return self.merged.decisions
