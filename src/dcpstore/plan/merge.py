"""The coordinator's part: all ranks' packed plans become one checked global plan.

1. join the tables of keys            conflicting descriptions of a key end here
2. lay out all items
3. go through the items of a few keys at a time
     check bounds
     group the copies of each chunk   copies of different size, or two by one rank, end here
     check that chunks do not overlap and leave no gap
4. choose one writer per chunk        bytes balanced over ranks
5. pack each rank's decision

Linear in the items but for one sort of nearly sorted numbers: every (key, offsets) has an address
(see `dcpstore.plan.table`), so the sort brings the copies of a chunk together; of a sharded job
they lie that way already. The checks are vectorised; only what fails is looked at one by one.
Measured in ``docs/planning-at-scale.md``.

Who writes what several ranks hold is the same answer for the same plans. The rule is "largest
first, to the least loaded" (LPT; Graham 1969), within each set of
ranks that holds the same chunks. Sets without a common rank do not interact, so they
advance together, one chunk each per vectorised step::

    hybrid sharding, 2 replicas of 3 shards      step 1       step 2
    set {0,3}: chunks 9 8 1                      9 -> 0       8 -> 3     ...
    set {1,4}: chunks 9 8 1                      9 -> 1       8 -> 4     ...
    set {2,5}: chunks 9 8 1                      9 -> 2       8 -> 5     ...

Chunks of about the same cost (within a factor of two) are dealt out together, the largest
first; of those, small sets go first: they have the least choice, and chunks that many
ranks hold then fill what is left uneven.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from dcpstore.errors import ConfigError, IncompatibleError
from dcpstore.plan.overlap import find_overlaps, stable_order
from dcpstore.plan.packed import ChunkColumns, GlobalSavePlan, encode_decisions
from dcpstore.plan.table import Items, KeyTable, Piece, pieces, read_items
from dcpstore.plan.wire import Ints, KeyRow, PackedPlan, PlanFlag
from dcpstore.text import listed


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """The chunks of some keys, in the order of keys and offsets.

    Attributes:
        items: Who plans them: the copies of a chunk behind each other, by place.
        first: Per chunk, its first copy among ``items``.
        num_copies: Per chunk, how many there are.
        copy: The first copy of each chunk.
        num_elements: Per chunk; a value counts its bytes where known.
    """

    items: Piece
    first: Ints
    num_copies: Ints
    copy: Piece
    num_elements: Ints


def out_of_bounds(piece: Piece, boxes: Ints, table: KeyTable) -> Ints:
    """Return the positions of the items whose chunk is not inside its tensor."""
    room = table.rows_bound[piece.key] - piece.length
    is_bad = (piece.start < 0) | (piece.length < 0) | (piece.start > room)
    boxed = np.flatnonzero(piece.box)
    offsets, sizes = boxes[piece.box[boxed]].swapaxes(0, 1)
    bound = table.inner_sizes[piece.key[boxed], : boxes.shape[2]]
    is_bad[boxed] |= ((offsets < 0) | (sizes < 0) | (offsets > bound - sizes)).any(axis=1)
    return np.flatnonzero(is_bad)


def find_chunks(piece: Piece, boxes: Ints, table: KeyTable) -> Chunks:
    """Group the items, which lie inside their tensors, by key and offsets."""
    address = table.base[piece.key] + piece.start * table.step[piece.key, 0]
    num_elements = piece.length * table.inner[piece.key]
    boxed = np.flatnonzero(piece.box)
    offsets, sizes = boxes[piece.box[boxed]].swapaxes(0, 1)
    step = table.step[piece.key[boxed], 1 : 1 + boxes.shape[2]]
    address[boxed] += (offsets * step).sum(axis=1)
    num_elements[boxed] = piece.length[boxed] * sizes.prod(axis=1)
    order = stable_order(address)
    if order is not None:
        piece, address, num_elements = piece.take(order), address[order], num_elements[order]
    is_first = np.ones(len(address), bool)
    np.not_equal(address[1:], address[:-1], out=is_first[1:])
    first = np.flatnonzero(is_first)
    # Where an empty chunk has the offsets of one that holds something, to write the empty one in
    # its place would lose data.
    is_empty = num_elements == 0
    if ((is_empty[1:] != is_empty[:-1]) & ~is_first[1:]).any():
        holds = ~np.logical_and.reduceat(is_empty, first) & ~table.is_value[piece.key[first]]
        stays = ~(is_empty & np.repeat(holds, np.diff(first, append=len(address))))
        piece, num_elements = piece.take(stays), num_elements[stays]
        first = np.flatnonzero(np.diff(np.cumsum(is_first)[stays], prepend=0))
    num_copies = np.diff(first, append=len(piece.at))
    return Chunks(piece, first, num_copies, piece.take(first), num_elements[first])


ProblemKind: TypeAlias = Literal["conflict", "bounds", "duplicate", "overlap", "gap"]
MAX_SHOWN = 16


@dataclass(frozen=True, slots=True)
class Problem:
    """One reason why plans do not make a checkpoint.

    Attributes:
        kind: What rule was broken.
        fqn: The key it is about.
        ranks: Ranks that planned it, ascending; the first few of them where they are many.
        text: What is wrong, key and ranks included.
    """

    kind: ProblemKind
    fqn: str
    ranks: tuple[int, ...]
    text: str


class PlanError(IncompatibleError):
    """The ranks' plans do not fit together; nothing was written.

    Args:
        problems: The first problems found.
        num_more: How many others there are.
    """

    def __init__(self, problems: Sequence[Problem], num_more: int = 0) -> None:
        self.problems = tuple(problems)
        lines = [f"  {problem.text}" for problem in self.problems]
        if num_more:
            lines.append(f"  ... and {num_more} more")
        super().__init__("the ranks' save plans do not fit together:\n" + "\n".join(lines))


def list_ranks(ranks: Sequence[int]) -> str:
    """Return ``"rank 3"`` or ``"ranks 0, 1, 2 and 13 more"``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(list(map(str, ranks)))}"


class _Stage(IntEnum):
    """What fails in one stage makes nonsense of what the next ones would say."""

    KEYS = 0
    BOUNDS = 1
    COPIES = 2
    CHUNKS = 3


class Inspector:
    """Collects the problems of one merge; ``check_`` methods say whether they found none.

    Args:
        boxes: All boxes.
        table: All keys.
    """

    def __init__(self, boxes: Ints, table: KeyTable) -> None:
        self._boxes = boxes
        self._table = table
        self._problems: dict[_Stage, list[Problem]] = {stage: [] for stage in _Stage}
        self._num_more = dict.fromkeys(_Stage, 0)

    def raise_problems(self) -> None:
        """Raise what the first stage that found something has found.

        Raises:
            PlanError: If anything was found.
        """
        for stage in _Stage:
            if self._problems[stage]:
                raise PlanError(self._problems[stage], self._num_more[stage])

    def check_keys(self) -> bool:
        """Look for keys that ranks describe differently."""
        conflicts = self._table.conflicts
        return self._add(_Stage.KEYS, conflicts, lambda place: self._conflict(*place))

    def check_bounds(self, piece: Piece) -> bool:
        """Look for chunks outside their tensors."""

        def describe(item: int) -> Problem:
            row, rank = self._row(piece, item), int(piece.rank[item])
            text = f"{row.fqn!r} of size {row.size}: rank {rank} plans {self._chunk(piece, item)}"
            return Problem("bounds", row.fqn, (rank,), f"{text}, which lies outside")

        bad = out_of_bounds(piece, self._boxes, self._table)
        return self._add(_Stage.BOUNDS, bad.tolist(), describe)

    def check_copies(self, chunks: Chunks) -> bool:
        """Look at the copies of each chunk: one per rank, and all of one size."""
        items = chunks.items
        again = np.ones(len(items.at), bool)  # is a further copy of the chunk before it
        again[chunks.first] = False
        again = np.flatnonzero(again)
        if not len(again):
            return True
        # Nearly always copies come by rank: then no two are of the same one.
        suspects = again[items.rank[again] <= items.rank[again - 1]]
        suspects = np.union1d(suspects, again[self._differ(items, again)])
        found: list[tuple[Callable[..., Problem], Ints]] = []
        number = np.unique(np.searchsorted(chunks.first, suspects, "right") - 1)
        for first, count in zip(
            chunks.first[number].tolist(), chunks.num_copies[number].tolist(), strict=True
        ):
            copies = first + np.argsort(items.rank[first : first + count], kind="stable")
            if bool((np.diff(items.rank[copies]) == 0).any()):
                found.append((self._duplicate, copies))
            elif bool(self._differ(items, copies[1:], copies[:-1]).any()):
                found.append((self._mismatch, copies))
        return self._add(_Stage.COPIES, found, lambda one: one[0](items, one[1]))

    def _differ(self, items: Piece, one: Ints, other: Ints | None = None) -> Ints:
        """Compare the sizes of items with those of others, by default the ones before them."""
        other = one - 1 if other is None else other
        differs = items.length[one] != items.length[other]
        if items.box.any():
            sizes = self._table.inner_sizes[items.key]
            boxed = np.flatnonzero(items.box)
            sizes[boxed, : self._boxes.shape[2]] = self._boxes[items.box[boxed], 1]
            differs |= (sizes[one] != sizes[other]).any(axis=1)
        result: Ints = differs & ~self._table.is_value[items.key[one]]
        return result

    def check_chunks(self, chunks: Chunks, *, require_full: bool) -> None:
        """Look for chunks that overlap, and for tensors that they do not fill."""
        overlapping = self._check_overlaps(chunks)
        if not require_full or not len(chunks.first):
            return
        table = self._table
        first = np.flatnonzero(np.diff(chunks.copy.key, prepend=-1))
        key = chunks.copy.key[first]
        held = np.add.reduceat(chunks.num_elements, first)
        needed = table.rows_bound[key] * np.where(table.is_value[key], 0, table.inner[key])
        gaps = np.flatnonzero((held != needed) & ~table.is_value[key])
        ends = np.append(first[1:], len(chunks.first))
        self._add(
            _Stage.CHUNKS,
            [at for at in gaps.tolist() if int(key[at]) not in overlapping],
            lambda at: self._gap(chunks, slice(int(first[at]), int(ends[at])), int(held[at])),
        )

    def _check_overlaps(self, chunks: Chunks) -> set[int]:
        """Note the chunks that overlap, and return their keys."""
        chunk = self._uncut(chunks)
        if not len(chunk):
            return set()
        copy = chunks.copy
        starts, ends = self._extents(copy.take(chunk))
        pairs = chunk[find_overlaps(copy.key[chunk], starts, ends, max_found=MAX_SHOWN)]
        pairs = np.take_along_axis(pairs, np.argsort(copy.at[pairs], axis=1), axis=1)
        self._add(_Stage.CHUNKS, pairs.tolist(), lambda pair: self._overlap(copy, *pair))
        return set(copy.key[pairs.ravel()].tolist())

    def _uncut(self, chunks: Chunks) -> Ints:
        """Return the chunks of keys that cuts between rows do not take apart, empty ones left out.

        None where tensors are sharded by rows: chunks come in the order of their rows.
        """
        copy = chunks.copy
        end = copy.start + copy.length.astype(np.int64)  # of two that may have 32 bits
        meets = (copy.start[1:] < end[:-1]) & (copy.key[1:] == copy.key[:-1])
        if not meets.any():
            return np.empty(0, np.int64)
        is_uncut = np.zeros(len(self._table.rows), bool)
        is_uncut[copy.key[1:][meets]] = True
        is_uncut &= ~self._table.is_value
        return np.flatnonzero(is_uncut[copy.key] & (chunks.num_elements > 0))

    def _extents(self, copy: Piece) -> tuple[Ints, Ints]:
        """Return where chunks start and end in every dimension."""
        inner = self._table.inner_sizes[copy.key]
        starts = np.zeros((len(copy.at), 1 + inner.shape[1]), np.int64)
        starts[:, 0] = copy.start
        ends = starts.copy()
        ends[:, 0] += copy.length
        ends[:, 1:] = inner
        boxed, dims = np.flatnonzero(copy.box), slice(1, 1 + self._boxes.shape[2])
        offsets, sizes = self._boxes[copy.box[boxed]].swapaxes(0, 1)
        starts[boxed, dims] = offsets
        ends[boxed, dims] = offsets + sizes
        return starts, ends

    # --- descriptions ---------------------------------------------------------------

    def _add(
        self, stage: _Stage, found: Iterable[object], describe: Callable[..., Problem]
    ) -> bool:
        problems, none_before = self._problems[stage], True
        for one in found:
            none_before = False
            if len(problems) < MAX_SHOWN:
                problems.append(describe(one))
            else:
                self._num_more[stage] += 1
        return none_before

    def _row(self, items: Piece, item: int) -> KeyRow:
        return self._table.rows[int(items.key[item])]

    def _chunk(self, items: Piece, item: int) -> str:
        row, box = self._row(items, item), int(items.box[item])
        if row.is_value:
            return "a value"
        if not row.size:
            return "the whole tensor"
        inner = row.size[1:]
        offsets, sizes = [0] * len(inner), list(inner)
        if box:
            offsets, sizes = self._boxes[box, :, : len(inner)].tolist()
        start, length = int(items.start[item]), int(items.length[item])
        return f"a chunk of sizes {(length, *sizes)} at {(start, *offsets)}"

    def _conflict(self, key: int, run: int) -> Problem:
        table, known = self._table, self._table.rows[key]
        row = table.conflicts[key, run]
        others = table.ranks_with_run(run)
        firsts = [
            rank
            for number, one in enumerate(table.runs)
            if number != run and key in one
            for rank in table.ranks_with_run(number)
            if (key, number) not in table.conflicts
        ]
        text = (
            f"{row.fqn!r} is {_describe(known)} on {list_ranks(sorted(firsts))}"
            f" but {_describe(row)} on {list_ranks(others)}"
        )
        return Problem("conflict", row.fqn, tuple(sorted({*firsts[:8], *others[:8]})), text)

    def _duplicate(self, items: Piece, copies: Ints) -> Problem:
        ranks = items.rank[copies]
        item = int(copies[np.flatnonzero(np.diff(ranks) == 0)[0]])
        rank, row = int(items.rank[item]), self._row(items, item)
        text = f"{row.fqn!r}: rank {rank} plans {self._chunk(items, item)} twice"
        return Problem("duplicate", row.fqn, (rank,), text)

    def _mismatch(self, items: Piece, copies: Ints) -> Problem:
        ranks_of: dict[str, list[int]] = {}
        for item in copies.tolist():
            ranks_of.setdefault(self._chunk(items, item), []).append(int(items.rank[item]))
        sizes = [f"{chunk} on {list_ranks(ranks)}" for chunk, ranks in ranks_of.items()]
        row = self._row(items, int(copies[0]))
        ranks = tuple(sorted(ranks[0] for ranks in ranks_of.values()))
        return Problem("conflict", row.fqn, ranks, f"{row.fqn!r}: {' but '.join(sizes[:4])}")

    def _overlap(self, copy: Piece, one: int, other: int) -> Problem:
        ranks = [int(copy.rank[one]), int(copy.rank[other])]
        row = self._row(copy, one)
        text = (
            f"{row.fqn!r}: {self._chunk(copy, one)} (rank {ranks[0]}) overlaps"
            f" {self._chunk(copy, other)} (rank {ranks[1]})"
        )
        return Problem("overlap", row.fqn, tuple(sorted(set(ranks))), text)

    def _gap(self, chunks: Chunks, of_key: slice, held: int) -> Problem:
        key, holders = int(chunks.copy.key[of_key.start]), chunks.copy.rank[of_key]
        row = self._table.rows[key]
        ranks = sorted(set(holders.tolist()))
        needed = int(self._table.rows_bound[key] * self._table.inner[key])
        text = (
            f"{row.fqn!r} of size {row.size}: the {len(holders)} chunks of {list_ranks(ranks)}"
            f" hold {held} of {needed} elements"
        )
        return Problem("gap", row.fqn, tuple(ranks[:8]), text)


def _describe(row: KeyRow) -> str:
    return "a value" if row.is_value else f"a {row.dtype} tensor of size {row.size}"


_MAX_LAYERS = 62  # bits of a word
_MAX_TIERS = 1024  # exponents of a double
RECORD_BYTES = 1024  # what a ``torch.save`` record adds to its payload, for the balance


class Replicated(NamedTuple):
    """Chunks that the same number of ranks hold.

    Attributes:
        at: Chunks x holders, the places of their items in the layout.
        ranks: The holders, ascending.
        cost_bytes: Per chunk what writing it costs.
    """

    at: Ints
    ranks: Ints
    cost_bytes: Ints


def choose_writers(classes: list[Replicated], load_bytes: Ints) -> list[Ints]:
    """Choose one holder of each replicated chunk.

    Args:
        classes: The chunks, by number of holders.
        load_bytes: Per rank what it writes in any case; what is chosen is added in place.

    Returns:
        Per class and chunk, the column of ``ranks`` that writes it.
    """
    schedules = [_schedule(one, len(load_bytes)) for one in classes]
    chosen = [np.zeros(len(one.cost_bytes), np.int64) for one in classes]
    steps = sorted(
        (
            (-tier, one.ranks.shape[1], number, step)
            for number, one in enumerate(classes)
            for step, (tier, _) in enumerate(schedules[number])
        ),
    )
    for _, _, number, step in steps:
        one, now = classes[number], schedules[number][step][1]
        ranks = one.ranks[now]
        column = load_bytes[ranks].argmin(axis=1)
        chosen[number][now] = column
        load_bytes[ranks[np.arange(len(now)), column]] += one.cost_bytes[now]
    return chosen


def _schedule(chunks: Replicated, num_ranks: int) -> list[tuple[int, Ints]]:
    """Cut the chunks into steps that touch no rank twice, each with the tier of its costs."""
    first_of_set, set_of = _distinct_sets(chunks.ranks, num_ranks)
    layer = _layers(chunks.ranks[first_of_set], num_ranks)[set_of]
    tier = np.frexp(chunks.cost_bytes.astype(np.float64))[1].astype(np.int64)
    # Largest first within a set, in the order of the chunks where they are equal.
    order = np.lexsort((-chunks.cost_bytes, set_of))
    turn = np.empty(len(order), np.int64)
    turn[order] = _positions_in_runs(set_of[order] * (_MAX_TIERS + 1) + tier[order])
    order = np.lexsort((turn, layer, -tier))
    is_first = np.ones(len(order), bool)
    is_first[1:] = False
    for column in (turn, layer, tier):
        is_first[1:] |= column[order[1:]] != column[order[:-1]]
    bounds = [*np.flatnonzero(is_first).tolist(), len(order)]
    return [(int(tier[order[low]]), order[low:high]) for low, high in pairwise(bounds)]


def _distinct_sets(ranks: Ints, num_ranks: int) -> tuple[Ints, Ints]:
    """Return one chunk of each distinct set of ranks, and each chunk's set."""
    spread = _mix(np.arange(num_ranks))
    if ranks.shape[1] > len(ranks):
        name = spread[ranks].sum(axis=1, dtype=np.uint64)
    else:
        name = np.zeros(len(ranks), np.uint64)
        for column in ranks.T:
            name += spread[column]
    _, first, inverse = np.unique(name, return_index=True, return_inverse=True)
    if not (ranks == ranks[first[inverse]]).all():  # two sets of one name: once in 2**64
        _, first, inverse = np.unique(ranks, axis=0, return_index=True, return_inverse=True)
    # Number the sets by their first chunk, so that no hash decides anything.
    by_first = np.argsort(first, kind="stable")
    number = np.empty(len(first), np.int64)
    number[by_first] = np.arange(len(first))
    return first[by_first], number[inverse.reshape(-1)]


def _mix(ranks: Ints) -> Ints:
    """Spread ranks over 64 bits (the finaliser of splitmix64)."""
    bits = ranks.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Ints = bits ^ (bits >> np.uint64(31))
    return mixed


def _layers(sets: Ints, num_ranks: int) -> Ints:
    """Give each set a layer so that no two sets of a layer have a rank in common."""
    used = np.zeros(num_ranks, np.int64)  # per rank, the layers that have a set with it
    layers = np.empty(len(sets), np.int64)
    next_lone = _MAX_LAYERS
    for number, ranks in enumerate(sets):
        taken = int(np.bitwise_or.reduce(used[ranks]))
        layer = (~taken & (taken + 1)).bit_length() - 1
        if layer < _MAX_LAYERS:
            used[ranks] |= 1 << layer
            layers[number] = layer
        else:  # more overlaps than bits: a layer of its own
            layers[number] = next_lone
            next_lone += 1
    return layers


def _positions_in_runs(values: Ints) -> Ints:
    """Return each element's position in its run of equal values."""
    positions = np.arange(len(values))
    is_first = np.ones(len(values), bool)
    is_first[1:] = values[1:] != values[:-1]
    result: Ints = positions - np.maximum.accumulate(np.where(is_first, positions, 0))
    return result


class Writers:
    """Collects chunks, then chooses a writer of each.

    Args:
        num_items: Items of all ranks.
        num_ranks: Ranks of the group.
    """

    def __init__(self, num_items: int, num_ranks: int) -> None:
        self._is_kept = np.zeros(num_items, bool)
        self._load_bytes = np.zeros(num_ranks, np.int64)  # records included
        self._num_records = np.zeros(num_ranks, np.int64)
        self._replicated: dict[int, list[Replicated]] = {}

    def add(self, chunks: Chunks, payload_bytes: Ints) -> None:
        """Take the chunks of further keys, all of each key at once."""
        num_copies = chunks.num_copies
        lone = num_copies == 1
        self._is_kept[chunks.copy.at[lone]] = True
        self._load(chunks.copy.rank[lone], payload_bytes[lone])
        counts = 2 + np.flatnonzero(np.bincount(num_copies)[2:])
        for count in counts.tolist():
            chosen = np.flatnonzero(num_copies == count)
            at, ranks = self._copies(chunks, chosen, count)
            replicated = Replicated(at, ranks, payload_bytes[chosen] + RECORD_BYTES)
            self._replicated.setdefault(count, []).append(replicated)

    def _copies(self, chunks: Chunks, chosen: Ints, count: int) -> tuple[Ints, Ints]:
        copies = chunks.first[chosen, None] + np.arange(count)
        at, ranks = chunks.items.at[copies], chunks.items.rank[copies]
        if not (ranks[:, 1:] > ranks[:, :-1]).all():
            by_rank = np.argsort(ranks, axis=1, kind="stable")
            at = np.take_along_axis(at, by_rank, axis=1)
            ranks = np.take_along_axis(ranks, by_rank, axis=1)
        return at, ranks

    def _load(self, ranks: Ints, payload_bytes: Ints) -> None:
        num_ranks = len(self._num_records)
        num_records = np.bincount(ranks, minlength=num_ranks)
        # Exact: a piece's sum stays below 2**53, where a double's mantissa ends, as long as
        # its chunks have 64 GiB on average.
        load_bytes = np.bincount(ranks, payload_bytes, num_ranks).astype(np.int64)
        self._num_records += num_records
        self._load_bytes += load_bytes + RECORD_BYTES * num_records

    def choose(self) -> tuple[Ints, Ints]:
        """Choose the writers of replicated chunks, the others being chosen already.

        Returns:
            Per item in the order of the layout, whether its rank writes it; and payload bytes
            per rank.
        """
        classes = [
            Replicated(*map(np.concatenate, zip(*self._replicated.pop(count), strict=True)))
            for count in sorted(self._replicated)
        ]
        for one, column in zip(classes, choose_writers(classes, self._load_bytes), strict=True):
            chosen = np.arange(len(column)), column
            self._is_kept[one.at[chosen]] = True
            self._num_records += np.bincount(one.ranks[chosen], minlength=len(self._num_records))
        return self._is_kept, self._load_bytes - RECORD_BYTES * self._num_records


def merge_save_plans(
    plans: Sequence[PackedPlan], *, require_full: bool | None = None
) -> GlobalSavePlan:
    """Choose who writes what and check that it makes a whole checkpoint.

    Coordinator only; pure: the same plans give the same answer in any process.

    Args:
        plans: Each rank's packed save plan, by rank of the group.
        require_full: Whether the chunks of a tensor must fill it. By default only if there
            is more than one rank, as in DCP.

    Raises:
        PlanError: If plans contradict each other, a chunk lies outside its tensor, is
            planned twice by one rank, or chunks overlap or leave a gap.
        ConfigError: If a plan refers to one of an earlier save, as DCP's own plan cache
            makes them, or is no save plan.
        CorruptError: If the bytes are damaged.
    """
    for rank, plan in enumerate(plans):
        if plan.has(PlanFlag.IS_UNUSABLE):
            raise ConfigError(
                f"rank {rank} sent no plan but a reference to one of an earlier save; turn off"
                " enable_plan_caching in its planner: packed plans are cached by content anyway"
            )
    table = KeyTable(plans)
    items = read_items(plans, table)
    writers = Writers(len(items.start), len(plans))
    full = len(plans) > 1 if require_full is None else require_full
    chunks = _go_through(items, table, writers, require_full=full)
    layout = items.layout
    del items  # half of the memory
    is_kept, load_bytes = writers.choose()
    return GlobalSavePlan(
        rows=tuple(table.rows),
        paths=table.paths,
        chunks=chunks,
        decisions=encode_decisions(layout.to_ranks(is_kept), [plan.digest for plan in plans]),
        load_bytes=load_bytes,
    )


def _go_through(
    items: Items, table: KeyTable, writers: Writers, *, require_full: bool
) -> ChunkColumns:
    """Check all items, and give the writers their chunks."""
    inspector = Inspector(items.boxes, table)
    inspector.check_keys()
    inspector.raise_problems()
    none = np.empty(0, np.int32)
    columns: list[tuple[Ints, ...]] = [(none, none, none, none.astype(np.uint8))]
    for piece in pieces(items, len(table.rows)):
        if not inspector.check_bounds(piece):
            continue
        chunks = find_chunks(piece, items.boxes, table)
        if not inspector.check_copies(chunks):
            continue
        inspector.check_chunks(chunks, require_full=require_full)
        copy = chunks.copy
        columns.append((copy.key, copy.start, copy.length, copy.box))
        writers.add(chunks, chunks.num_elements * table.item_bytes[copy.key])
    inspector.raise_problems()
    key, start, length, box = map(np.concatenate, zip(*columns, strict=True))
    first_of_key = np.searchsorted(key, np.arange(len(table.rows) + 1, dtype=np.int32))
    return ChunkColumns(key, start, length, box, items.boxes, first_of_key)
