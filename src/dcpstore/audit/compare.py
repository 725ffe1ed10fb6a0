"""How two checkpoints differ: keys, shapes, dtypes, and the values to the last bit.

1. read the metadata of both; compare keys, kinds, shapes and dtypes
2. compare values by checksum where both were cut into the same chunks: no data request
3. read the rest of both, side by side, in bounded memory

Equal CRC32C per block means equal bytes but for a chance of 2**-32 per block that differs by
accident; ``read_all`` leaves step 2 out. What is the same is said in `dcpstore.audit.sameness`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dcpstore.audit.differences import Difference, DifferenceKind
from dcpstore.audit.pairs import Contents, Sides, compare_contents, config_of_side
from dcpstore.config import ReadConfig
from dcpstore.format.dtypes import dtype_name
from dcpstore.planners.rules import KeyRules
from dcpstore.progress import ProgressCallback, show_progress
from dcpstore.reading import Checkpoint, open_checkpoint
from dcpstore.store.base import Store
from dcpstore.store.opening import open_store
from dcpstore.text import count_text, size_text, table

__all__ = ["Comparison", "compare_checkpoints"]

_MAX_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What `compare_checkpoints` found.

    Attributes:
        left: URL of one checkpoint.
        right: Of the other.
        differences: By key, in the order of the left one, then those of the right one alone.
        num_equal: Keys that are the same in both (without values, if these were left out).
        num_by_checksum: Keys whose contents were told apart or equal by checksums alone.
        num_read: Keys whose contents were read.
        with_values: Whether values were compared.
        fetched_bytes: Bytes of data asked of both stores.
        num_requests: Requests for data, retries not counted.
        elapsed_s: Seconds the whole took.
    """

    left: str
    right: str
    differences: tuple[Difference, ...]
    num_equal: int
    num_by_checksum: int
    num_read: int
    with_values: bool
    fetched_bytes: int
    num_requests: int
    elapsed_s: float

    @property
    def is_equal(self) -> bool:
        """Whether no difference was found."""
        return not self.differences

    def summary(self) -> str:
        """Describe everything but the differences, in a few lines."""
        told = (
            f"{self.num_by_checksum:,} by checksum, {self.num_read:,} by reading"
            if self.with_values
            else "not compared"
        )
        number = count_text(len(self.differences), "difference")
        return table(
            "equal" if self.is_equal else number,
            {
                "left": self.left,
                "right": self.right,
                "equal keys": f"{self.num_equal:,}",
                "values": told,
                "read": f"{size_text(self.fetched_bytes)} in"
                f" {count_text(self.num_requests, 'request')}, {self.elapsed_s:.1f} s",
            },
        )

    def __str__(self) -> str:
        lines = [self.summary(), *map(str, self.differences[:_MAX_SHOWN])]
        if len(self.differences) > _MAX_SHOWN:
            lines.append(f"and {len(self.differences) - _MAX_SHOWN:,} more, see `differences`")
        return "\n".join(lines)


def compare_checkpoints(
    left: str | os.PathLike[str],
    right: str | os.PathLike[str],
    *,
    left_options: Mapping[str, Any] | None = None,
    right_options: Mapping[str, Any] | None = None,
    config: ReadConfig | None = None,
    rules: KeyRules | None = None,
    values: bool = True,
    read_all: bool = False,
    progress: ProgressCallback | bool | None = False,
    store_opener: Callable[..., Store] = open_store,
) -> Comparison:
    """Compare two checkpoints by any writers. Changes nothing.

    Args:
        left: Folder of one checkpoint.
        right: Folder of the other.
        left_options: fsspec's options for the left one's protocol.
        right_options: For the right one's.
        config: Requests in flight per side, byte budget of both together, trust.
        rules: Which keys to compare; ``rename`` is not looked at.
        values: Compare contents too; else keys, kinds, shapes and dtypes only.
        read_all: Read contents even where checksums would tell.
        progress: As for `dcpstore.load`; counts the bytes compared by reading, of one side.
        store_opener: Opens the stores, for tests.

    Raises:
        NotFoundError: If there is no checkpoint on either side.
        CorruptError: If metadata or bytes that were read are damaged.
        StoreError: If a store refuses or fails.
    """
    config = config or ReadConfig()
    began = monotonic()
    open_side = partial(open_checkpoint, config=config_of_side(config), store_opener=store_opener)
    with (
        show_progress("diff", progress, is_coordinator=True) as meter,
        open_side(left, storage_options=left_options) as one,
        open_side(right, storage_options=right_options) as other,
    ):
        found, same = compare_metadata(one, other, rules or KeyRules())
        told = Contents()
        if values:
            told = compare_contents(Sides(one, other), same, config, meter, read_all=read_all)
        changed = {**found, **told.differences}
        return Comparison(
            left=one.url,
            right=other.url,
            differences=tuple(changed[fqn] for fqn in _ordered(one, other) if fqn in changed),
            num_equal=len(same) - len(told.differences),
            num_by_checksum=told.num_by_checksum,
            num_read=told.num_read,
            with_values=values,
            fetched_bytes=one.stats.fetched_bytes + other.stats.fetched_bytes,
            num_requests=one.stats.num_requests + other.stats.num_requests,
            elapsed_s=monotonic() - began,
        )


def _ordered(one: Checkpoint, other: Checkpoint) -> Iterator[str]:
    yield from one.keys
    left = set(one.keys)
    yield from (fqn for fqn in other.keys if fqn not in left)


def compare_metadata(
    one: Checkpoint, other: Checkpoint, rules: KeyRules
) -> tuple[dict[str, Difference], list[str]]:
    """Compare what the metadata tell; return the differences, and the keys without any."""
    found: dict[str, Difference] = {}
    same: list[str] = []
    for fqn in filter(rules.takes, _ordered(one, other)):
        difference = _compare_entries(
            fqn,
            one.metadata.state_dict_metadata.get(fqn),
            other.metadata.state_dict_metadata.get(fqn),
        )
        if difference is None:
            same.append(fqn)
        else:
            found[fqn] = difference
    return found, same


def _compare_entries(fqn: str, left: Any, right: Any) -> Difference | None:
    if left is None or right is None:
        kind: DifferenceKind = "only right" if left is None else "only left"
        return Difference(fqn, kind, _describe(left), _describe(right))
    is_tensor = isinstance(left, TensorStorageMetadata)
    if is_tensor != isinstance(right, TensorStorageMetadata):
        return Difference(fqn, "kind", _describe(left), _describe(right))
    if not is_tensor:
        return None
    if tuple(left.size) != tuple(right.size):
        return Difference(fqn, "shape", _describe(left), _describe(right))
    if left.properties.dtype != right.properties.dtype:
        return Difference(fqn, "dtype", _describe(left), _describe(right))
    return None


def _describe(entry: Any) -> str:
    if entry is None:
        return ""
    if isinstance(entry, TensorStorageMetadata):
        return f"{dtype_name(entry.properties.dtype)} {list(entry.size)}"
    return "a value"
