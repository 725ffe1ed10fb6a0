"""One table of keys for all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dcpstore.errors import CorruptError, IncompatibleError
from dcpstore.planning.exchange.columns import Ints
from dcpstore.planning.exchange.schema import KeyKind, KeyRow, Path, decode_rows
from dcpstore.planning.exchange.wire import PackedPlan, PartKind, PlanFlag, content_digest

__all__ = ["KeyConflict", "KeyTable", "Run", "join_tables"]

MAX_ELEMENTS = 2**61
_NO_BOUND = 2**62


@dataclass(frozen=True, slots=True)
class Run:
    """A run of table rows, as it came from one or more ranks.

    Attributes:
        keys: Per row that has items, its position in the joined table.
    """

    keys: Ints


@dataclass(frozen=True, slots=True)
class KeyConflict:
    """Two ranks describe one key differently."""

    key: int
    row: KeyRow
    run: int


@dataclass(frozen=True, slots=True, eq=False)
class KeyTable:
    """The keys of all ranks, in the order of their first appearance.

    Attributes:
        rows: A row per key, as the first rank that has it describes it.
        paths: The joined flattening map; None if no rank keeps one.
        runs: The distinct runs of all ranks.
        runs_of: Per rank, the positions of its runs.
        conflicts: Rows that contradict ``rows``.
        rows_bound: Per key, rows of the tensor (1 for 0-d ones; no bound for values).
        inner: Per key, elements in one row.
        inner_sizes: Per key, the sizes after the first dimension, padded with 1.
        item_bytes: Per key, the bytes of an element.
        is_value: Per key, whether it is a value and no tensor.
        base: Per key, where its addresses start; one more at the end. See `_addresses`.
        step: Per key, the address of offset 1 in each dimension, padded with 0.
    """

    rows: list[KeyRow]
    paths: dict[str, Path] | None
    runs: list[Run]
    runs_of: list[tuple[int, ...]]
    conflicts: list[KeyConflict]
    rows_bound: Ints = field(init=False)
    inner: Ints = field(init=False)
    inner_sizes: Ints = field(init=False)
    item_bytes: Ints = field(init=False)
    is_value: Ints = field(init=False)
    base: Ints = field(init=False)
    step: Ints = field(init=False)

    def __post_init__(self) -> None:
        rows = self.rows
        values = np.array([row.is_value for row in rows], bool)
        bound = np.array([row.size[0] if row.size else 1 for row in rows], np.int64)
        bound[values] = _NO_BOUND
        inner = np.array([math.prod(row.size[1:]) for row in rows], np.int64)
        object.__setattr__(self, "rows_bound", bound)
        object.__setattr__(self, "inner", inner)
        object.__setattr__(self, "item_bytes", np.array([r.item_bytes for r in rows], np.int64))
        object.__setattr__(self, "is_value", values)
        num_inner = max((len(row.size) for row in rows), default=1) - 1
        sizes = [(*row.size[1:], *(1,) * (num_inner - len(row.size[1:]))) for row in rows]
        by_key = np.array(sizes, np.int64).reshape(len(rows), max(num_inner, 0))
        object.__setattr__(self, "inner_sizes", by_key)
        step, extents = _addresses(rows)
        object.__setattr__(self, "step", step)
        object.__setattr__(self, "base", extents)

    def ranks_with_run(self, run: int) -> list[int]:
        """Return the ranks that a run came from."""
        return [rank for rank, runs in enumerate(self.runs_of) if run in runs]


def _addresses(rows: Sequence[KeyRow]) -> tuple[Ints, Ints]:
    """Give every (key, offsets) a number of its own, ordered by key, then offsets row-major.

    Offsets up to and including the size occur: an empty chunk lies behind the last row.
    """
    num_dims = max((len(row.size) for row in rows), default=0) or 1
    steps, bases, base = [], [], 0
    for row in rows:
        step, extent = [0] * num_dims, 1
        for dim in range(len(row.size) - 1, -1, -1):
            step[dim] = extent
            extent *= row.size[dim] + 1
        steps.append(step)
        bases.append(base)
        base += extent
    if base > _NO_BOUND:
        raise IncompatibleError(
            f"the plans' tensors have {base} elements together; at most 2**62 can be planned"
        )
    return np.array(steps, np.int64).reshape(len(rows), num_dims), np.array(
        [*bases, base], np.int64
    )


def join_tables(plans: Iterable[PackedPlan]) -> KeyTable:
    """Decode every distinct run of keys once and join them.

    Raises:
        CorruptError: If a run's bytes do not match its name.
        IncompatibleError: If sizes overflow 62 bits.
    """
    joiner = _Joiner()
    for plan in plans:
        joiner.add(plan)
    return KeyTable(
        joiner.rows,
        joiner.paths if joiner.has_paths else None,
        joiner.runs,
        joiner.runs_of,
        joiner.conflicts,
    )


class _Joiner:
    def __init__(self) -> None:
        self.rows: list[KeyRow] = []
        self.paths: dict[str, Path] = {}
        self.has_paths = False
        self.runs: list[Run] = []
        self.runs_of: list[tuple[int, ...]] = []
        self.conflicts: list[KeyConflict] = []
        self._key_of: dict[str, int] = {}
        self._run_of: dict[bytes, int] = {}

    def add(self, plan: PackedPlan) -> None:
        runs = []
        for number, (kind, _, digest) in enumerate(plan.names):
            if kind == PartKind.KEYS:
                run = self._run_of.get(digest)
                if run is None:
                    data = plan.body(number)
                    if content_digest(data) != digest:
                        raise CorruptError("a packed plan's table of keys was changed on its way")
                    run = self._run_of[digest] = len(self.runs)
                    self._decode(data)
                runs.append(run)
        self.runs_of.append(tuple(runs))
        self.has_paths = self.has_paths or plan.has(PlanFlag.HAS_PATHS)

    def _decode(self, data: bytes | memoryview) -> None:
        keys = []
        for row in decode_rows(data):
            if row.path is not None:
                self.paths.setdefault(row.fqn, row.path)
            if row.kind != KeyKind.PATH:
                keys.append(self._key(row))
        self.runs.append(Run(np.array(keys, np.int32)))

    def _key(self, row: KeyRow) -> int:
        known = self._key_of.setdefault(row.fqn, len(self.rows))
        if known == len(self.rows):
            _check_size(row)
            self.rows.append(row)
        elif not _agree(row, self.rows[known]):
            self.conflicts.append(KeyConflict(known, row, len(self.runs)))
        return known


def _agree(one: KeyRow, other: KeyRow) -> bool:
    return one.is_value == other.is_value and one.size == other.size and one.dtype == other.dtype


def _check_size(row: KeyRow) -> None:
    if math.prod(size + 1 for size in row.size) > MAX_ELEMENTS or min(row.size, default=0) < 0:
        raise IncompatibleError(f"{row.fqn!r} has the impossible size {row.size}")
