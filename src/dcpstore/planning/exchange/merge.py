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
from dataclasses import dataclass

import numpy as np

from dcpstore.errors import ConfigError, CorruptError
from dcpstore.planning.exchange.balance import Replicated, choose_writers
from dcpstore.planning.exchange.chunks import (
    Chunks,
    chunk_columns,
    find_chunks,
    num_elements,
    out_of_bounds,
)
from dcpstore.planning.exchange.columns import Ints
from dcpstore.planning.exchange.decisions import encode_decisions
from dcpstore.planning.exchange.global_plan import GlobalSavePlan
from dcpstore.planning.exchange.items import Items, read_items
from dcpstore.planning.exchange.table import join_tables
from dcpstore.planning.exchange.validate import Inspector
from dcpstore.planning.exchange.wire import PackedPlan, PartKind, PlanFlag

__all__ = ["RECORD_BYTES", "merge_save_plans"]

RECORD_BYTES = 1024  # what a ``torch.save`` record adds to its payload, for the balance
_BLOCK = 1 << 17  # items per step: temporary columns of 1 MiB stay in the cache and the heap


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
    inspector = Inspector(items, table)
    inspector.check_keys()
    if items.box_offsets.shape[1] >= table.step.shape[1] and len(items.box_at):
        raise CorruptError("a packed plan's box has more dimensions than any tensor")
    inspector.check_bounds(out_of_bounds(items, table))
    chunks = find_chunks(items, table)
    columns = chunk_columns(chunks, items, table)
    elements = num_elements(columns, table)
    replicas = _find_replicas(chunks, items, inspector)
    full = len(plans) > 1 if require_full is None else require_full
    inspector.check_chunks(columns, chunks, elements, require_full=full)
    payload_bytes = _times(elements, table.item_bytes, columns.key)
    writer = _choose_writers(replicas, chunks, items, payload_bytes)
    is_kept = np.zeros(len(items.key), bool)
    is_kept[writer] = True
    hints = None
    if with_hints:
        by_item = np.zeros(len(items.key), np.int32)
        by_item[writer] = columns.positions()
        hints = items.layout.to_ranks(by_item)
    digests = tuple(plan.digest for plan in plans)
    return GlobalSavePlan(
        rows=tuple(table.rows),
        paths=table.paths,
        chunks=columns,
        digests=digests,
        decisions=encode_decisions(items.layout.to_ranks(is_kept), digests, hints),
        load_bytes=_sums(items.rank, writer, payload_bytes, len(plans)),
        extras=_extras(plans),
    )


def _check_usable(plans: Sequence[PackedPlan]) -> None:
    for rank, plan in enumerate(plans):
        if plan.flags & PlanFlag.IS_UNUSABLE:
            raise ConfigError(
                f"rank {rank} sent no plan but a reference to one of an earlier save; turn off"
                " enable_plan_caching in its planner: packed plans are cached by content anyway"
            )


@dataclass(frozen=True, slots=True, eq=False)
class _Replicas:
    """Chunks that the same number of ranks hold.

    Attributes:
        chunk: Which chunks.
        copies: Per chunk the items that would write it, by rank.
        ranks: Their ranks.
    """

    chunk: Ints
    copies: Ints
    ranks: Ints


def _find_replicas(chunks: Chunks, items: Items, inspector: Inspector) -> list[_Replicas]:
    """Find the chunks that several ranks hold, and check that they agree on them."""
    num_copies = chunks.num_copies
    replicated = np.flatnonzero(num_copies > 1)
    num_copies = num_copies[replicated]
    found = []
    for count in np.unique(num_copies).tolist():
        chunk = replicated[num_copies == count]
        found.append(_Replicas(chunk, *_copies(chunks, items, chunk, count)))
        inspector.check_copies(found[-1].copies, found[-1].ranks)
    inspector.raise_problems()
    return found


def _choose_writers(
    replicas: Sequence[_Replicas], chunks: Chunks, items: Items, payload_bytes: Ints
) -> Ints:
    """Return the item that writes each chunk."""
    num_ranks = len(items.layout.num_items)
    writer = chunks.items(chunks.first[:-1])
    load_bytes = _sums(items.rank, writer, payload_bytes, num_ranks, RECORD_BYTES)
    classes = []
    for one in replicas:
        cost = payload_bytes[one.chunk]
        load_bytes -= _sums(items.rank, writer[one.chunk], cost, num_ranks, RECORD_BYTES)
        classes.append(Replicated(one.ranks, cost + RECORD_BYTES))
    for one, column in zip(replicas, choose_writers(classes, load_bytes), strict=True):
        writer[one.chunk] = one.copies[np.arange(len(one.chunk)), column]
    return writer


def _copies(chunks: Chunks, items: Items, number: Ints, count: int) -> tuple[Ints, Ints]:
    """Return the items that write each of some chunks, and their ranks, by rank."""
    copy = np.empty((len(number), count), chunks.order.dtype)
    ranks = np.empty((len(number), count), np.int32)
    step = max(_BLOCK // count, 1)
    for low in range(0, len(number), step):
        part = slice(low, low + step)
        copy[part] = chunks.items(chunks.first[number[part], None] + np.arange(count))
        ranks[part] = items.rank[copy[part]]
        if not (ranks[part, 1:] > ranks[part, :-1]).all():
            by_rank = np.argsort(ranks[part], axis=1, kind="stable")
            copy[part] = np.take_along_axis(copy[part], by_rank, axis=1)
            ranks[part] = np.take_along_axis(ranks[part], by_rank, axis=1)
    return copy, ranks


def _times(values: Ints, per_key: Ints, key: Ints) -> Ints:
    """Multiply a column in place by what belongs to its keys."""
    for low in range(0, len(values), _BLOCK):
        part = slice(low, low + _BLOCK)
        values[part] *= per_key[key[part]]
    return values


def _sums(
    rank_of: Ints, items: Ints, num_bytes: Ints, num_ranks: int, extra_bytes: int = 0
) -> Ints:
    """Add up bytes, and some extra ones for each item, over the ranks that planned them."""
    sums = np.zeros(num_ranks, np.int64)
    for low in range(0, len(items), _BLOCK):
        part = slice(low, low + _BLOCK)
        # Exact: a block's sum stays below 2**53, where a double's mantissa ends, as long as
        # its chunks have 64 GiB on average.
        weights = num_bytes[part] + extra_bytes
        sums += np.bincount(rank_of[items[part]], weights, num_ranks).astype(np.int64)
    return sums


def _extras(plans: Sequence[PackedPlan]) -> dict[int, bytes]:
    found = {}
    for rank, plan in enumerate(plans):
        data = plan.first_of(PartKind.EXTRAS)
        if data is not None:
            found[rank] = bytes(data)
    return found
