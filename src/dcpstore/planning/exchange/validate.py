"""What can be wrong with merged plans, and its story for people.

The checks are vectorised; only what fails is looked at one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from dcpstore.planning.exchange.chunks import Chunks
from dcpstore.planning.exchange.columns import Ints
from dcpstore.planning.exchange.global_plan import ChunkColumns
from dcpstore.planning.exchange.items import Items
from dcpstore.planning.exchange.overlap import find_overlaps, find_uncut
from dcpstore.planning.exchange.problems import MAX_SHOWN, PlanError, Problem, list_ranks
from dcpstore.planning.exchange.schema import KeyRow
from dcpstore.planning.exchange.table import KeyTable

__all__ = ["Inspector"]

_BLOCK = 1 << 17  # chunks per step


class Inspector:
    """Collects problems of one merge; each ``check_`` looks at one stage.

    Args:
        items: All ranks' items.
        table: Their keys.
    """

    def __init__(self, items: Items, table: KeyTable) -> None:
        self._items = items
        self._table = table
        self._problems: list[Problem] = []
        self._num_more = 0

    def raise_problems(self) -> None:
        """Raise what was found so far.

        Raises:
            PlanError: If anything was found.
        """
        if self._problems:
            raise PlanError(self._problems, self._num_more)

    def check_keys(self) -> None:
        """Refuse keys that ranks describe differently.

        Raises:
            PlanError: If there are any.
        """
        self._add(self._table.conflicts, lambda one: self._conflict(one.key, one.row, one.run))
        self.raise_problems()

    def check_bounds(self, bad: Ints) -> None:
        """Refuse chunks outside their tensors.

        Raises:
            PlanError: If there are any.
        """

        def tell(item: int) -> Problem:
            row, rank = self._row(item), int(self._items.rank[item])
            text = f"{row.fqn!r} of size {row.size}: rank {rank} plans {self._chunk(item)}"
            return Problem("bounds", row.fqn, (rank,), f"{text}, which lies outside")

        self._add(bad.tolist(), tell)
        self.raise_problems()

    def check_copies(self, copies: Ints, ranks: Ints) -> None:
        """Look at the copies of chunks: one per rank, and all of one size.

        Args:
            copies: Items, chunks x copies, by rank.
            ranks: Their ranks.
        """
        twice = (ranks[:, 1:] == ranks[:, :-1]).any(axis=1)
        self._add(copies[twice].tolist(), self._duplicate)
        differs = self._differ(copies) & ~twice
        self._add(copies[differs].tolist(), self._mismatch)

    def _differ(self, copies: Ints) -> Ints:
        step = max(_BLOCK // copies.shape[1], 1)
        parts = [copies[low : low + step] for low in range(0, len(copies), step)]
        return np.concatenate([self._differ_in(part) for part in parts])

    def _differ_in(self, copies: Ints) -> Ints:
        items = self._items
        length = items.length[copies]
        differs = (length != length[:, :1]).any(axis=1)
        if items.box_row is not None:
            row = items.box_row[copies]
            is_box = row >= 0
            differs |= (is_box != is_box[:, :1]).any(axis=1)
            boxes = np.flatnonzero(is_box.all(axis=1))
            sizes = items.box_sizes[row[boxes]]
            differs[boxes] |= (sizes != sizes[:, :1]).any(axis=(1, 2))
        result: Ints = differs & ~self._table.is_value[items.key[copies[:, 0]]]
        return result

    def check_chunks(
        self, columns: ChunkColumns, chunks: Chunks, count: Ints, *, require_full: bool
    ) -> None:
        """Refuse chunks that overlap, and tensors that they do not fill.

        Raises:
            PlanError: If there are any.
        """
        table = self._table
        overlapping = self._check_overlaps(columns, chunks, count)
        if require_full:
            held = np.zeros(len(table.rows), np.int64)
            known = np.flatnonzero(np.diff(columns.first_of_key))
            held[known] = np.add.reduceat(count, columns.first_of_key[known])
            needed = table.rows_bound * np.where(table.is_value, 0, table.inner)
            gaps = np.flatnonzero((held != needed) & ~table.is_value).tolist()
            gaps = [key for key in gaps if key not in overlapping]
            self._add(gaps, lambda key: self._gap(key, int(held[key]), columns, chunks))
        self.raise_problems()

    def _check_overlaps(self, columns: ChunkColumns, chunks: Chunks, count: Ints) -> set[int]:
        """Return the keys whose chunks overlap, having told of them."""
        firsts = columns.first_of_key
        found, low = [], 0
        while low < len(count):  # whole keys at a time, about as much as a cache holds
            high = int(
                firsts[np.searchsorted(firsts, low + _BLOCK, "left").clip(max=len(firsts) - 1)]
            )
            found.append(low + self._uncut(columns, count, slice(low, high)))
            low = high
        chunk = np.concatenate(found) if found else np.empty(0, np.int64)
        if not len(chunk):
            return set()
        starts, ends = self._extents(columns, chunk)
        pairs = find_overlaps(columns.key[chunk], starts, ends, max_found=MAX_SHOWN)
        pairs = np.sort(chunks.items(chunks.first[chunk[pairs]]), axis=1)
        self._add(pairs.tolist(), self._overlap)
        return set(self._items.key[pairs.ravel()].tolist())

    def _uncut(self, columns: ChunkColumns, count: Ints, part: slice) -> Ints:
        """Return the chunks of a part that cuts between rows do not set apart."""
        key, start = columns.key[part], columns.start[part].astype(np.int64)
        end = start + columns.length[part]
        is_solid = (count[part] > 0) & ~self._table.is_value[key]
        if bool(is_solid.all()):
            return find_uncut(key, start, end)
        solid = np.flatnonzero(is_solid)
        uncut: Ints = solid[find_uncut(key[solid], start[solid], end[solid])]
        return uncut

    def _extents(self, columns: ChunkColumns, chunk: Ints) -> tuple[Ints, Ints]:
        """Return where chunks start and end in every dimension."""
        num_inner = columns.box_sizes.shape[1]
        starts = np.zeros((len(chunk), 1 + num_inner), np.int64)
        ends = np.zeros_like(starts)
        starts[:, 0] = columns.start[chunk]
        ends[:, 0] = starts[:, 0] + columns.length[chunk]
        row = np.searchsorted(columns.box_at, chunk)
        is_box = np.zeros(len(chunk), bool)
        known = row < len(columns.box_at)
        is_box[known] = columns.box_at[row[known]] == chunk[known]
        starts[is_box, 1:] = columns.box_offsets[row[is_box]]
        ends[is_box, 1:] = starts[is_box, 1:] + columns.box_sizes[row[is_box]]
        for dim in range(1, 1 + num_inner):
            bound = np.array(
                [row.size[dim] if len(row.size) > dim else 1 for row in self._table.rows]
            )
            ends[~is_box, dim] = bound[columns.key[chunk[~is_box]]]
        return starts, ends

    # --- the stories ----------------------------------------------------------------

    def _add(self, found: Iterable[object], tell: Callable[..., Problem]) -> None:
        for one in found:
            if len(self._problems) < MAX_SHOWN:
                self._problems.append(tell(one))
            else:
                self._num_more += 1

    def _row(self, item: int) -> KeyRow:
        return self._table.rows[int(self._items.key[item])]

    def _chunk(self, item: int) -> str:
        items, row = self._items, self._row(item)
        if row.is_value:
            return "a value"
        offsets, sizes = [int(items.start[item])], [int(items.length[item])]
        box = np.flatnonzero(items.box_at == item)
        inner = len(row.size) - 1
        if len(box):
            offsets += items.box_offsets[box[0]].tolist()[:inner]
            sizes += items.box_sizes[box[0]].tolist()[:inner]
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

    def _duplicate(self, copies: list[int]) -> Problem:
        ranks = self._items.rank[copies]
        item = next(one for one, a, b in zip(copies, ranks[:-1], ranks[1:], strict=False) if a == b)
        rank, row = int(self._items.rank[item]), self._row(item)
        text = f"{row.fqn!r}: rank {rank} plans {self._chunk(item)} twice"
        return Problem("duplicate", row.fqn, (rank,), text)

    def _mismatch(self, copies: list[int]) -> Problem:
        stories: dict[str, list[int]] = {}
        for item in copies:
            stories.setdefault(self._chunk(item), []).append(int(self._items.rank[item]))
        told = [f"{chunk} on {list_ranks(ranks)}" for chunk, ranks in stories.items()]
        row = self._row(copies[0])
        ranks = tuple(sorted(ranks[0] for ranks in stories.values()))
        return Problem("conflict", row.fqn, ranks, f"{row.fqn!r}: {' but '.join(told[:4])}")

    def _overlap(self, pair: list[int]) -> Problem:
        one, other = pair
        ranks = [int(self._items.rank[item]) for item in pair]
        row = self._row(one)
        text = (
            f"{row.fqn!r}: {self._chunk(one)} (rank {ranks[0]}) overlaps"
            f" {self._chunk(other)} (rank {ranks[1]})"
        )
        return Problem("overlap", row.fqn, tuple(sorted(set(ranks))), text)

    def _gap(self, key: int, held: int, columns: ChunkColumns, chunks: Chunks) -> Problem:
        row = self._table.rows[key]
        first, end = columns.first_of_key[key : key + 2].tolist()
        ranks = sorted(set(self._items.rank[chunks.items(chunks.first[first:end])].tolist()))
        needed = int(self._table.rows_bound[key] * self._table.inner[key])
        text = (
            f"{row.fqn!r} of size {row.size}: the {end - first} chunks of {list_ranks(ranks)}"
            f" hold {held} of {needed} elements"
        )
        return Problem("gap", row.fqn, tuple(ranks[:8]), text)


def _describe(row: KeyRow) -> str:
    return "a value" if row.is_value else f"a {row.dtype} tensor of size {row.size}"
