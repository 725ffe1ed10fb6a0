"""Agree on who writes what: save plans over a group of ranks.

With our planner and writer, plans travel as packed columns, and by name if the coordinator
knows them::

    step "plan"        up: digest and head of each rank's plan (some 300 bytes)
                       down: the decision, if an earlier save had the same plans; else which
                       parts of the plan to send
    step "merge plans" up: those parts, each from one rank; down: the decision, a bit per item

With any other planner or writer, or a plan of a form that cannot be packed, plans travel as
DCP sends them: the objects, through ``create_global_plan`` and ``prepare_global_plan``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.planner import SavePlanner as DcpSavePlanner
from torch.distributed.checkpoint.storage import StorageWriter

from dcpstore.errors import IncompatibleError
from dcpstore.plan import SavePlanner
from dcpstore.plan.merge import merge_save_plans
from dcpstore.plan.packed import GlobalSavePlan, apply_decision, to_metadata, to_packed_plan
from dcpstore.plan.wire import PackedPlan, PartRequest, PlanCache, cache_key, parts_of
from dcpstore.ranks import RankGroup, steps
from dcpstore.write.writer import ObjectStoreWriter


def _keep_nothing(succeeded: bool) -> None:
    del succeeded


@dataclass(frozen=True, slots=True)
class AgreedPlan:
    """A save plan that all ranks agreed on, as one rank knows it.

    Attributes:
        plan: This rank's part, before ``finish_plan``.
        make_metadata: Builds the metadata of the coming checkpoint; coordinator only.
        sent_bytes: Bytes of plans that all ranks sent; on the coordinator, else 0. Not known
            (0) where plans travel as objects.
        is_cached: Whether an earlier save had the same plans; on the coordinator.
        settle: To be told whether the save succeeded; coordinator only.
    """

    plan: SavePlan
    make_metadata: Callable[[], Metadata] | None = None
    sent_bytes: int = 0
    is_cached: bool = False
    settle: Callable[[bool], None] = _keep_nothing


def agree_on_save_plan(
    group: RankGroup,
    planner: DcpSavePlanner,
    writer: StorageWriter,
    make_plan: Callable[[], SavePlan],
) -> AgreedPlan:
    """Plan a save. All ranks; one to three steps of the group.

    Args:
        group: The ranks.
        planner: As on all ranks.
        writer: As on all ranks.
        make_plan: Makes this rank's local plan, writer's preparations included.

    Raises:
        RankFailures: On every rank, if any could not plan, or the plans do not fit together.
    """
    if _can_pack(planner, writer):
        assert isinstance(planner, SavePlanner)
        assert isinstance(writer, ObjectStoreWriter)
        return _PackedExchange(group, planner, writer, make_plan).run()
    return _exchange_objects(group, planner, writer, make_plan)


def _can_pack(planner: DcpSavePlanner, writer: StorageWriter) -> bool:
    """Tell whether the coordinator's part is ours, and not an extension's."""
    return (
        isinstance(planner, SavePlanner)
        and type(planner).create_global_plan is SavePlanner.create_global_plan
        and isinstance(writer, ObjectStoreWriter)
        and type(writer).prepare_global_plan is ObjectStoreWriter.prepare_global_plan
    )


def _exchange_objects(
    group: RankGroup,
    planner: DcpSavePlanner,
    writer: StorageWriter,
    make_plan: Callable[[], SavePlan],
) -> AgreedPlan:
    metadata: list[Metadata] = []

    def reduce(plans: list[SavePlan]) -> list[SavePlan]:
        plans, made = planner.create_global_plan(plans)
        metadata.append(made)
        return writer.prepare_global_plan(plans)

    plan = steps.reduce_scatter(group, "plan", make_plan, reduce)
    return AgreedPlan(plan, (lambda: metadata[0]) if metadata else None)


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the coordinator tells a rank in the first step.

    Attributes:
        decision: The end of it, if an earlier save had the same plans.
        wanted: Else: numbers of the parts to send.
        as_objects: Or: whether to send the plan as it is.
    """

    decision: bytes | None = None
    wanted: tuple[int, ...] = ()
    as_objects: bool = False


class _PackedExchange:
    """One rank's way through an exchange of packed plans."""

    def __init__(
        self,
        group: RankGroup,
        planner: SavePlanner,
        writer: ObjectStoreWriter,
        make_plan: Callable[[], SavePlan],
    ) -> None:
        self._group = group
        self._planner = planner
        self._writer = writer
        self._make_plan = make_plan
        self._cache: PlanCache[GlobalSavePlan] = planner.plan_cache
        self._plan = SavePlan([])
        self._packed: PackedPlan | None = None
        self._key = b""
        self._global: GlobalSavePlan | None = None
        self._request: PartRequest | None = None
        self._sent_bytes = 0

    def run(self) -> AgreedPlan:
        answer = steps.reduce_scatter(self._group, "plan", self._pack, self._look_up)
        if answer.as_objects:
            return _exchange_objects(self._group, self._planner, self._writer, lambda: self._plan)
        decision, is_cached = answer.decision, answer.decision is not None
        if decision is None:
            decision = steps.reduce_scatter(
                self._group, "merge plans", lambda: self._parts(answer.wanted), self._merge
            )
        assert self._packed is not None
        plan = apply_decision(self._plan, decision, digest=self._packed.digest)
        made = self._global
        if made is None:
            return AgreedPlan(plan)
        return AgreedPlan(
            plan, lambda: to_metadata(made), self._sent_bytes, is_cached, self._settle
        )

    def _pack(self) -> bytes | None:
        """Return the head of this rank's plan; None if it cannot be packed."""
        self._plan = self._make_plan()
        try:
            self._packed = to_packed_plan(self._plan)
        except IncompatibleError:
            return None
        return self._packed.head

    def _look_up(self, heads: Sequence[bytes | None]) -> list[_Answer]:
        known = [head for head in heads if head is not None]
        if len(known) < len(heads):
            return [_Answer(as_objects=True)] * len(heads)
        self._writer.await_look()
        self._sent_bytes += sum(map(len, known))
        self._request = self._cache.request(known)
        digests = [plan.digest for plan in self._request.plans]
        self._key = cache_key(digests, f"save, {self._group.size} ranks")
        self._global = self._cache.find(self._key)
        if self._global is not None:
            return [_Answer(decision=one) for one in self._global.decisions]
        return [_Answer(wanted=wanted) for wanted in self._request.wanted]

    def _parts(self, wanted: tuple[int, ...]) -> list[bytes]:
        assert self._packed is not None
        return parts_of(self._packed, wanted)

    def _merge(self, answers: Sequence[Sequence[bytes]]) -> Sequence[bytes]:
        assert self._request is not None
        self._sent_bytes += sum(len(part) for parts in answers for part in parts)
        plans = self._cache.assemble(self._request, answers)
        self._global = merge_save_plans(plans)
        self._cache.put(self._key, self._global)
        return self._global.decisions

    def _settle(self, succeeded: bool) -> None:
        if succeeded:
            self._cache.confirm(self._key)
        else:
            self._cache.invalidate(self._key)
