"""Keys of a checkpoint chosen, ordered, and summed up by prefix. Pure functions."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dcpstore.audit.description import Described
from dcpstore.audit.listing import natural_order

__all__ = ["Branch", "Order", "Totals", "build_outline", "select", "sort_entries", "sum_up"]

Order: TypeAlias = Literal["key", "bytes", "shards", "dtype", "shape"]


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over keys.

    Attributes:
        num_tensors: Keys that are tensors.
        num_values: Keys that are not.
        num_elements: Of the tensors.
        num_shards: Stored pieces of both.
        num_bytes: Of the tensors in memory and of the values as stored.
        stored_bytes: Of their records.
        by_dtype: Bytes in memory per dtype, the largest first.
    """

    num_tensors: int
    num_values: int
    num_elements: int
    num_shards: int
    num_bytes: int
    stored_bytes: int
    by_dtype: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Branch:
    """A prefix of keys, with all that lies below it.

    Attributes:
        name: The part that it adds to the prefix around it; several where nothing forks.
        prefix: The whole prefix.
        totals: Of all keys below it.
        branches: The prefixes right below it.
        entries: The keys right below it.
    """

    name: str
    prefix: str
    totals: Totals
    branches: tuple[Branch, ...]
    entries: tuple[Described, ...]


def select(
    entries: Iterable[Described], keys: Sequence[str] = (), exclude: Sequence[str] = ()
) -> tuple[Described, ...]:
    """Return the entries that patterns choose, as `dcpstore.planners.rules.KeyRules` does.

    Args:
        entries: Keys of a checkpoint.
        keys: Patterns of keys (``fnmatch``); all if empty.
        exclude: Patterns of keys to leave out; stronger than ``keys``.
    """
    return tuple(
        entry
        for entry in entries
        if (not keys or any(fnmatch.fnmatchcase(entry.key, pattern) for pattern in keys))
        and not any(fnmatch.fnmatchcase(entry.key, pattern) for pattern in exclude)
    )


def sort_entries(
    entries: Iterable[Described], order: Order, *, is_reversed: bool = False
) -> tuple[Described, ...]:
    """Order entries; by bytes and by shards the largest come first."""
    found = sorted(entries, key=lambda entry: natural_order(entry.key))
    if order == "bytes":
        found.sort(key=lambda entry: -entry.num_bytes)
    elif order == "shards":
        found.sort(key=lambda entry: -len(entry.shards))
    elif order == "dtype":
        found.sort(key=lambda entry: entry.dtype)
    elif order == "shape":
        found.sort(key=lambda entry: entry.sizes)
    return tuple(reversed(found) if is_reversed else found)


def sum_up(entries: Iterable[Described]) -> Totals:
    """Add entries up."""
    num_tensors = num_values = num_elements = num_shards = num_bytes = stored_bytes = 0
    by_dtype: dict[str, int] = {}
    for entry in entries:
        size_bytes = entry.num_bytes
        if entry.is_tensor:
            num_tensors += 1
            num_elements += entry.num_elements
            by_dtype[entry.dtype] = by_dtype.get(entry.dtype, 0) + size_bytes
        else:
            num_values += 1
        num_shards += len(entry.shards)
        num_bytes += size_bytes
        stored_bytes += entry.stored_bytes
    largest_first = tuple(sorted(by_dtype.items(), key=lambda pair: (-pair[1], pair[0])))
    return Totals(
        num_tensors, num_values, num_elements, num_shards, num_bytes, stored_bytes, largest_first
    )


def build_outline(entries: Sequence[Described]) -> Branch:
    """Arrange keys by the parts that their dots separate."""
    return _branch("", "", entries, 0)


def _branch(name: str, prefix: str, entries: Sequence[Described], depth: int) -> Branch:
    """Make the branch of a prefix of ``depth`` parts, and all below it."""
    groups: dict[str, list[Described]] = {}
    own: list[Described] = []
    for entry in entries:
        parts = entry.key.split(".", depth + 1)
        if len(parts) == depth + 1:
            own.append(entry)
        else:
            groups.setdefault(parts[depth], []).append(entry)
    if depth and not own and len(groups) == 1:
        ((part, found),) = groups.items()
        return _branch(f"{name}.{part}", f"{prefix}.{part}", found, depth + 1)
    branches = tuple(
        _branch(part, f"{prefix}.{part}" if depth else part, found, depth + 1)
        for part, found in sorted(groups.items(), key=lambda pair: natural_order(pair[0]))
    )
    return Branch(name, prefix, sum_up(entries), branches, tuple(own))
