"""What can be wrong with merged plans, and its story for people.

The checks are vectorised; only what fails is looked at one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum

import numpy as np

from dcpstore.planning.exchange.chunks import Chunks, out_of_bounds
from dcpstore.planning.exchange.columns import Ints
from dcpstore.planning.exchange.items import Boxes
from dcpstore.planning.exchange.overlap import find_overlaps
from dcpstore.planning.exchange.pieces import Piece
from dcpstore.planning.exchange.problems import MAX_SHOWN, PlanError, Problem, list_ranks
from dcpstore.planning.exchange.schema import KeyRow
from dcpstore.planning.exchange.table import KeyTable

__all__ = ["Inspector"]


class _Stage(IntEnum):
    """What fails in one stage makes nonsense of what the next ones would say."""

    KEYS = 0
    BOUNDS = 1
    COPIES = 2
    CHUNKS = 3


class Inspector:
    """Collects the problems of one merge; each ``check_`` says whether it found none.

    Args:
        boxes: All boxes.
        table: All keys.
    """

    def __init__(self, boxes: Boxes, table: KeyTable) -> None:
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
        return self._add(_Stage.KEYS, conflicts, lambda c: self._conflict(c.key, c.row, c.run))

    def check_bounds(self, piece: Piece) -> bool:
        """Look for chunks outside their tensors."""

        def tell(item: int) -> Problem:
            row, rank = self._row(piece, item), int(piece.rank[item])
            text = f"{row.fqn!r} of size {row.size}: rank {rank} plans {self._chunk(piece, item)}"
            return Problem("bounds", row.fqn, (rank,), f"{text}, which lies outside")

        bad = out_of_bounds(piece, self._boxes, self._table)
        return self._add(_Stage.BOUNDS, bad.tolist(), tell)

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
        if items.box is not None:
            sizes = self._inner_sizes(items)
            differs |= (sizes[one] != sizes[other]).any(axis=1)
        result: Ints = differs & ~self._table.is_value[items.key[one]]
        return result

    def check_chunks(self, chunks: Chunks, *, require_full: bool) -> bool:
        """Look for chunks that overlap, and for tensors that they do not fill."""
        overlapping, is_fine = self._check_overlaps(chunks)
        if not require_full or not len(chunks.key):
            return is_fine
        table = self._table
        first = np.flatnonzero(np.diff(chunks.key, prepend=-1))
        key = chunks.key[first]
        held = np.add.reduceat(chunks.num_elements, first)
        needed = table.rows_bound[key] * np.where(table.is_value[key], 0, table.inner[key])
        gaps = np.flatnonzero((held != needed) & ~table.is_value[key])
        ends = np.append(first[1:], len(chunks.key))
        return is_fine & self._add(
            _Stage.CHUNKS,
            [at for at in gaps.tolist() if int(key[at]) not in overlapping],
            lambda at: self._gap(chunks, slice(int(first[at]), int(ends[at])), int(held[at])),
        )

    def _check_overlaps(self, chunks: Chunks) -> tuple[set[int], bool]:
        """Return the keys whose chunks overlap, having told of them; and whether none do."""
        chunk = self._uncut(chunks)
        if not len(chunk):
            return set(), True
        starts, ends = self._extents(chunks, chunk)
        pairs = find_overlaps(chunks.key[chunk], starts, ends, max_found=MAX_SHOWN)
        pairs = chunk[pairs]
        by_place = np.argsort(chunks.items.at[chunks.first[pairs]], axis=1)
        pairs = np.take_along_axis(pairs, by_place, axis=1)
        is_fine = self._add(_Stage.CHUNKS, pairs.tolist(), lambda pair: self._overlap(chunks, pair))
        return set(chunks.key[pairs.ravel()].tolist()), is_fine

    def _uncut(self, chunks: Chunks) -> Ints:
        """Return the chunks of keys that cuts between rows do not take apart, empty ones left out.

        None where tensors are sharded by rows: chunks come in the order of their rows.
        """
        if not len(chunks.key):
            return np.empty(0, np.int64)
        end = chunks.start + chunks.length
        meets = (chunks.start[1:] < end[:-1]) & (chunks.key[1:] == chunks.key[:-1])
        if not meets.any():
            return np.empty(0, np.int64)
        is_uncut = np.zeros(len(self._table.rows), bool)
        is_uncut[chunks.key[1:][meets]] = True
        is_uncut &= ~self._table.is_value
        return np.flatnonzero(is_uncut[chunks.key] & (chunks.num_elements > 0))

    def _extents(self, chunks: Chunks, chosen: Ints) -> tuple[Ints, Ints]:
        """Return where chunks start and end in every dimension."""
        boxes, inner = self._boxes, self._table.inner_sizes[chunks.key[chosen]]
        starts = np.zeros((len(chosen), 1 + inner.shape[1]), np.int64)
        starts[:, 0] = chunks.start[chosen]
        ends = starts.copy()
        ends[:, 0] += chunks.length[chosen]
        ends[:, 1:] = inner
        if chunks.box is not None:
            at = np.flatnonzero(chunks.box[chosen] >= 0)
            row, dims = chunks.box[chosen[at]], slice(1, 1 + boxes.num_dims)
            starts[at, dims] = boxes.offsets[row]
            ends[at, dims] = boxes.offsets[row] + boxes.sizes[row]
        return starts, ends

    # --- the stories ----------------------------------------------------------------

    def _add(self, stage: _Stage, found: Iterable[object], tell: Callable[..., Problem]) -> bool:
        problems, none_before = self._problems[stage], True
        for one in found:
            none_before = False
            if len(problems) < MAX_SHOWN:
                problems.append(tell(one))
            else:
                self._num_more[stage] += 1
        return none_before

    def _row(self, items: Piece, item: int) -> KeyRow:
        return self._table.rows[int(items.key[item])]

    def _inner_sizes(self, items: Piece) -> Ints:
        """Return what items span in the dimensions after the first."""
        sizes = self._table.inner_sizes[items.key]
        if items.box is not None:
            at = np.flatnonzero(items.box >= 0)
            sizes[at, : self._boxes.num_dims] = self._boxes.sizes[items.box[at]]
        return sizes

    def _chunk(self, items: Piece, item: int) -> str:
        row, boxes = self._row(items, item), self._boxes
        if row.is_value:
            return "a value"
        offsets, sizes = [int(items.start[item])], [int(items.length[item])]
        box = -1 if items.box is None else int(items.box[item])
        inner = len(row.size) - 1
        if box >= 0:
            offsets += boxes.offsets[box].tolist()[:inner]
            sizes += boxes.sizes[box].tolist()[:inner]
        elif row.size:
            offsets += [0] * inner
            sizes += list(row.size[1:])
        else:
            return "the whole tensor"
        return f"a chunk of sizes {tuple(sizes)} at {tuple(offsets)}"

    def _conflict(self, key: int, row: KeyRow, run: int) -> Problem:
        table, known = self._table, self._table.rows[key]
        others = table.ranks_with_run(run)
        firsts = [
            rank
            for number, one in enumerate(table.runs)
            if number != run and key in one.keys
            for rank in table.ranks_with_run(number)
            if not any(c.key == key and c.run == number for c in table.conflicts)
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
        stories: dict[str, list[int]] = {}
        for item in copies.tolist():
            stories.setdefault(self._chunk(items, item), []).append(int(items.rank[item]))
        told = [f"{chunk} on {list_ranks(ranks)}" for chunk, ranks in stories.items()]
        row = self._row(items, int(copies[0]))
        ranks = tuple(sorted(ranks[0] for ranks in stories.values()))
        return Problem("conflict", row.fqn, ranks, f"{row.fqn!r}: {' but '.join(told[:4])}")

    def _overlap(self, chunks: Chunks, pair: list[int]) -> Problem:
        items = chunks.items
        one, other = chunks.first[pair].tolist()
        ranks = [int(items.rank[one]), int(items.rank[other])]
        row = self._row(items, one)
        text = (
            f"{row.fqn!r}: {self._chunk(items, one)} (rank {ranks[0]}) overlaps"
            f" {self._chunk(items, other)} (rank {ranks[1]})"
        )
        return Problem("overlap", row.fqn, tuple(sorted(set(ranks))), text)

    def _gap(self, chunks: Chunks, of_key: slice, held: int) -> Problem:
        key, first = int(chunks.key[of_key.start]), chunks.first[of_key]
        row = self._table.rows[key]
        ranks = sorted(set(chunks.items.rank[first].tolist()))
        needed = int(self._table.rows_bound[key] * self._table.inner[key])
        text = (
            f"{row.fqn!r} of size {row.size}: the {len(first)} chunks of {list_ranks(ranks)}"
            f" hold {held} of {needed} elements"
        )
        return Problem("gap", row.fqn, tuple(ranks[:8]), text)


def _describe(row: KeyRow) -> str:
    return "a value" if row.is_value else f"a {row.dtype} tensor of size {row.size}"
