"""The coordinator's part: all ranks' packed plans become one checked global plan.

1. join the tables of keys            conflicting descriptions of a key end here
2. lay out all items
3. go through the items of a few keys at a time
     check bounds
     group the copies of each chunk   copies of different size, or two by one rank, end here
     check that chunks do not overlap and leave no gap
4. choose one writer per chunk        bytes balanced over ranks
5. pack each rank's decision

Linear in the items but for one sort of nearly sorted numbers. Measured in
``docs/planning-at-scale.md``.
"""

from __future__ import annotations

from collections.abc import Sequence

from dcpstore.errors import ConfigError
from dcpstore.planning.exchange.chunks import ChunkRecord, find_chunks
from dcpstore.planning.exchange.decisions import encode_decisions
from dcpstore.planning.exchange.global_plan import ChunkColumns, GlobalSavePlan
from dcpstore.planning.exchange.items import Items, read_items
from dcpstore.planning.exchange.pieces import pieces
from dcpstore.planning.exchange.table import KeyTable, join_tables
from dcpstore.planning.exchange.validate import Inspector
from dcpstore.planning.exchange.wire import PackedPlan, PartKind, PlanFlag
from dcpstore.planning.exchange.writers import Writers

__all__ = ["merge_save_plans"]


def merge_save_plans(
    packed: Sequence[bytes | PackedPlan],
    *,
    require_full: bool | None = None,
    with_hints: bool = False,
) -> GlobalSavePlan:
    """Choose who writes what and check that it makes a whole checkpoint.

    Coordinator only; pure: the same plans give the same answer in any process.

    Args:
        packed: Each rank's packed save plan, by rank of the group.
        require_full: Whether the chunks of a tensor must fill it. By default only if there
            is more than one rank, as in DCP.
        with_hints: Send each kept item's position in the metadata along.

    Raises:
        PlanError: If plans contradict each other, a chunk lies outside its tensor, is
            planned twice by one rank, or chunks overlap or leave a gap.
        ConfigError: If a plan refers to one of an earlier save, as DCP's own plan cache
            makes them, or is no save plan.
        CorruptError: If the bytes are damaged.
    """
    plans = [one if isinstance(one, PackedPlan) else PackedPlan.from_bytes(one) for one in packed]
    _check_usable(plans)
    table = join_tables(plans)
    items = read_items(plans, table)
    writers = Writers(len(items.start), len(plans), with_positions=with_hints)
    full = len(plans) > 1 if require_full is None else require_full
    chunks = _go_through(items, table, writers, require_full=full)
    layout = items.layout
    del items  # half of the memory
    chosen = writers.choose()
    digests = tuple(plan.digest for plan in plans)
    return GlobalSavePlan(
        rows=tuple(table.rows),
        paths=table.paths,
        chunks=chunks,
        digests=digests,
        decisions=encode_decisions(
            layout.to_ranks(chosen.is_kept),
            digests,
            None if chosen.positions is None else layout.to_ranks(chosen.positions),
        ),
        load_bytes=chosen.load_bytes,
        extras=_extras(plans),
    )


def _go_through(
    items: Items, table: KeyTable, writers: Writers, *, require_full: bool
) -> ChunkColumns:
    """Check all items and tell the writers of their chunks."""
    inspector, record = Inspector(items.boxes, table), ChunkRecord(items.boxes)
    inspector.check_keys()
    inspector.raise_problems()
    for piece in pieces(items, len(table.rows)):
        if not inspector.check_bounds(piece):
            continue
        chunks = find_chunks(piece, items.boxes, table)
        if not inspector.check_copies(chunks):
            continue
        inspector.check_chunks(chunks, require_full=require_full)
        record.add(chunks)
        writers.add(chunks, chunks.num_elements * table.item_bytes[chunks.key])
    inspector.raise_problems()
    return record.finish(len(table.rows))


def _check_usable(plans: Sequence[PackedPlan]) -> None:
    for rank, plan in enumerate(plans):
        if plan.has(PlanFlag.IS_UNUSABLE):
            raise ConfigError(
                f"rank {rank} sent no plan but a reference to one of an earlier save; turn off"
                " enable_plan_caching in its planner: packed plans are cached by content anyway"
            )


def _extras(plans: Sequence[PackedPlan]) -> dict[int, bytes]:
    found = {}
    for rank, plan in enumerate(plans):
        data = plan.first_of(PartKind.EXTRAS)
        if data is not None:
            found[rank] = bytes(data)
    return found
