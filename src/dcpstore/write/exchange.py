"""Agree on who writes what: save plans over a group of ranks.

With our planner and writer, plans travel as packed columns (see `dcpstore.plan.agreement`)::

    step "plan"        up: head of each rank's plan (some 300 bytes)
    step "merge plans" up: parts that no earlier save had; down: the decision, a bit per item

With any other planner or writer, or a plan of a form that cannot be packed, plans travel as
DCP sends them: the objects, through ``create_global_plan`` and ``prepare_global_plan``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.planner import SavePlanner as DcpSavePlanner
from torch.distributed.checkpoint.storage import StorageWriter

from dcpstore.errors import IncompatibleError
from dcpstore.plan import SavePlanner
from dcpstore.plan.agreement import Agreement
from dcpstore.plan.merge import merge_save_plans
from dcpstore.plan.packed import GlobalSavePlan, apply_decision, to_metadata, to_packed_plan
from dcpstore.plan.wire import PackedPlan, PlanCache
from dcpstore.ranks import RankGroup, steps
from dcpstore.write.writer import ObjectStoreWriter


@dataclass(frozen=True, slots=True)
class AgreedPlan:
    """A save plan that all ranks agreed on, as one rank knows it.

    Attributes:
        plan: This rank's part, before ``finish_plan``.
        make_metadata: Builds the metadata of the coming checkpoint; coordinator only.
        sent_bytes: Bytes of plans that all ranks sent; on the coordinator, else 0. Not known
            (0) where plans travel as objects.
        is_cached: Whether an earlier save had the same plans; on the coordinator.
        settle: To be told whether the save succeeded; does something on
            the coordinator only.
    """

    plan: SavePlan
    make_metadata: Callable[[], Metadata] | None = None
    sent_bytes: int = 0
    is_cached: bool = False
    settle: Callable[[bool], None] = lambda _: None


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
    if not _can_pack(planner, writer):
        return _exchange_objects(group, planner, writer, make_plan)
    assert isinstance(planner, SavePlanner)
    assert isinstance(writer, ObjectStoreWriter)
    cache: PlanCache[GlobalSavePlan] = planner.plan_cache
    agreement = Agreement(group, cache, f"save, {group.size} ranks", merge_save_plans)
    plan, digest = SavePlan([]), b""

    def pack() -> PackedPlan | None:
        nonlocal plan, digest
        plan = make_plan()
        try:
            packed = to_packed_plan(plan)
        except IncompatibleError:
            return None
        if group.is_coordinator:
            writer.await_probe()
        digest = packed.digest
        return packed

    decision = agreement.reach("plan", "merge plans", pack)
    if decision is None:
        return _exchange_objects(group, planner, writer, lambda: plan)
    own = apply_decision(plan, decision, digest=digest)
    merged = agreement.merged
    return AgreedPlan(
        own,
        None if merged is None else lambda: to_metadata(merged),
        agreement.sent_bytes,
        agreement.is_cached,
        agreement.settle,
    )


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
