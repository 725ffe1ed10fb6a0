"""The coordinator's part: all ranks' packed plans become one checked global plan.

1. join the tables of keys            conflicting descriptions of a key end here
2. lay out all items, check bounds
3. group the copies of each chunk     copies of different size, or two by one rank, end here
4. choose one writer per chunk        bytes balanced over ranks
5. check that chunks do not overlap and leave no gap
6. pack each rank's decision

Linear in the items but for one sort of nearly sorted numbers. Measured in
``docs/planning-at-scale.md``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dcpstore.errors import ConfigError, CorruptError
from dcpstore.planning.exchange.balance import Replicated, choose_writers
from dcpstore.planning.exchange.chunks import Chunks, find_chunks, num_elements, out_of_bounds
from dcpstore.planning.exchange.columns import Ints
from dcpstore.planning.exchange.decisions import encode_decisions
from dcpstore.planning.exchange.global_plan import ChunkColumns, GlobalSavePlan
from dcpstore.planning.exchange.layout import Items, lay_out
from dcpstore.planning.exchange.table import KeyTable, join_tables
from dcpstore.planning.exchange.validate import Inspector
from dcpstore.planning.exchange.wire import PackedPlan, PartKind, PlanFlag, PlanKind

__all__ = ["RECORD_BYTES", "merge_save_plans"]

RECORD_BYTES = 1024  # what a ``torch.save`` record adds to its payload, for the balance


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
    _check_kinds(plans)
    table = join_tables(plans)
    items = lay_out(plans, table)
    inspector = Inspector(items, table)
    inspector.check_keys()
    if items.box_offsets.shape[1] >= table.step.shape[1] and len(items.box_at):
        raise CorruptError("a packed plan's box has more dimensions than any tensor")
    inspector.check_bounds(out_of_bounds(items, table))
    elements = num_elements(items, table)
    chunks = _without_empty_copies(find_chunks(items, table), items, table, elements)
    cost = elements * table.item_bytes[items.key] + RECORD_BYTES
    writer = _choose_writers(chunks, items, cost, len(plans), inspector, elements)
    columns = _columns(chunks, items, table)
    full = len(plans) > 1 if require_full is None else require_full
    inspector.check_chunks(columns, chunks, elements, require_full=full)
    is_kept = np.zeros(len(items.key), bool)
    is_kept[writer] = True
    hints = None
    if with_hints:
        by_item = np.zeros(len(items.key), np.int32)
        by_item[writer] = columns.positions()
        hints = items.layout.to_ranks(by_item)
    digests = tuple(plan.digest for plan in plans)
    payload_bytes = cost[writer] - RECORD_BYTES
    return GlobalSavePlan(
        rows=tuple(table.rows),
        paths=table.paths,
        chunks=columns,
        digests=digests,
        decisions=encode_decisions(items.layout.to_ranks(is_kept), digests, hints),
        load_bytes=_sums(items.rank[writer], payload_bytes, len(plans)),
        extras=_extras(plans),
    )


def _check_kinds(plans: Sequence[PackedPlan]) -> None:
    for rank, plan in enumerate(plans):
        if plan.kind != PlanKind.SAVE:
            raise ConfigError(f"rank {rank} sent a plan of kind {plan.kind}, not a save plan")
        if plan.flags & PlanFlag.IS_UNUSABLE:
            raise ConfigError(
                f"rank {rank} sent no plan but a reference to one of an earlier save; turn off"
                " enable_plan_caching in its planner: packed plans are cached by content anyway"
            )


def _without_empty_copies(chunks: Chunks, items: Items, table: KeyTable, elements: Ints) -> Chunks:
    """Drop empty chunks that share their offsets with a chunk that holds something.

    To write the empty one in its place would lose data.
    """
    empty = np.flatnonzero(elements == 0)
    empty = empty[~table.is_value[items.key[empty]]]
    if not len(empty) or not len(chunks.first) > 1:
        return chunks
    in_order = elements if chunks.order is None else elements[chunks.order]
    largest = np.maximum.reduceat(in_order, chunks.first[:-1])
    place_is_empty = np.zeros(len(in_order), bool)
    if chunks.order is None:
        place_is_empty[empty] = True
    else:
        is_empty = np.zeros(len(in_order), bool)
        is_empty[empty] = True
        place_is_empty = is_empty[chunks.order]
    places = np.flatnonzero(place_is_empty)
    group = np.searchsorted(chunks.first, places, "right") - 1
    places = places[largest[group] > 0]
    if not len(places):
        return chunks
    stays = np.ones(len(in_order), bool)
    stays[places] = False
    first = chunks.first - np.searchsorted(places, chunks.first, "left")
    return Chunks(chunks.items(np.flatnonzero(stays)), first)


def _choose_writers(
    chunks: Chunks,
    items: Items,
    cost: Ints,
    num_ranks: int,
    inspector: Inspector,
    elements: Ints,
) -> Ints:
    """Return the item that writes each chunk."""
    writer = np.array(chunks.items(chunks.first[:-1]))
    num_copies = chunks.num_copies
    lone = writer[num_copies == 1]
    load_bytes = _sums(items.rank[lone], cost[lone], num_ranks)
    classes, numbers, copies = [], [], []
    for count in np.unique(num_copies[num_copies > 1]).tolist():
        number = np.flatnonzero(num_copies == count)
        copy = chunks.items(chunks.first[number][:, None] + np.arange(count))
        ranks = items.rank[copy]
        if not (ranks[:, 1:] > ranks[:, :-1]).all():
            by_rank = np.argsort(ranks, axis=1, kind="stable")
            copy = np.take_along_axis(copy, by_rank, axis=1)
            ranks = np.take_along_axis(ranks, by_rank, axis=1)
        inspector.check_copies(copy, ranks, elements)
        classes.append(Replicated(ranks, cost[copy].max(axis=1)))
        numbers.append(number)
        copies.append(copy)
    inspector.raise_problems()
    for number, copy, column in zip(
        numbers, copies, choose_writers(classes, load_bytes), strict=True
    ):
        writer[number] = copy[np.arange(len(copy)), column]
    return writer


def _columns(chunks: Chunks, items: Items, table: KeyTable) -> ChunkColumns:
    """Return what the metadata says of each chunk, in the order of keys and offsets."""
    item = chunks.items(chunks.first[:-1])
    none = np.empty((0, items.box_sizes.shape[1]), np.int64)
    box_at, offsets, sizes = np.empty(0, np.int64), none, none
    box_row = items.box_row()
    if box_row is not None:
        row = box_row[item]
        box_at = np.flatnonzero(row >= 0)
        offsets, sizes = items.box_offsets[row[box_at]], items.box_sizes[row[box_at]]
    return ChunkColumns(
        key=items.key[item],
        start=_narrow(items.start[item]),
        length=_narrow(items.length[item]),
        first_of_key=np.searchsorted(items.key[item], np.arange(len(table.rows) + 1)),
        box_at=box_at,
        box_offsets=offsets,
        box_sizes=sizes,
    )


def _narrow(column: Ints) -> Ints:
    """Halve what a cached plan holds, where numbers fit."""
    fits = not len(column) or (int(column.min()) >= 0 and int(column.max()) < 2**32)
    return column.astype(np.uint32) if fits else column


def _sums(ranks: Ints, weights: Ints, num_ranks: int) -> Ints:
    # Exact up to 8 PiB per rank, where a double's mantissa ends.
    return np.bincount(ranks, weights, num_ranks).astype(np.int64)


def _extras(plans: Sequence[PackedPlan]) -> dict[int, bytes]:
    found = {}
    for rank, plan in enumerate(plans):
        part = plan.part(PartKind.EXTRAS)
        if part is not None:
            found[rank] = bytes(part.data)
    return found
