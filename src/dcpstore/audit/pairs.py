"""The contents of two checkpoints, key by key: by checksum where that tells, else by reading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from dcpstore.audit.differences import Difference
from dcpstore.audit.sameness import are_same, compare_stored
from dcpstore.audit.side_by_side import Mismatch, compare_tensors, config_of_side, tensor_bytes
from dcpstore.config import ReadConfig
from dcpstore.errors import CorruptError, IncompatibleError
from dcpstore.manifest import StoredItem
from dcpstore.planners.values import ValueRecord
from dcpstore.progress import Meter
from dcpstore.reading import Checkpoint
from dcpstore.text import count_text

__all__ = ["Contents", "Sides", "compare_contents", "config_of_side"]

_VALUES_AT_ONCE = 64
_MAX_TEXT = 60


@dataclass(frozen=True, slots=True)
class Sides:
    """Two open checkpoints."""

    left: Checkpoint
    right: Checkpoint


@dataclass(slots=True)
class Contents:
    """What a comparison of contents found.

    Attributes:
        differences: By key.
        num_by_checksum: Keys that checksums decided.
        num_read: Keys that were read.
    """

    differences: dict[str, Difference] = field(default_factory=dict)
    num_by_checksum: int = 0
    num_read: int = 0


def compare_contents(
    sides: Sides, fqns: Sequence[str], config: ReadConfig, meter: Meter, *, read_all: bool
) -> Contents:
    """Compare the contents of keys whose metadata are the same.

    Args:
        sides: The checkpoints.
        fqns: The keys.
        config: Its byte budget bounds the memory of both sides together.
        meter: Counts the bytes compared by reading, of one side.
        read_all: Read even where checksums would tell.
    """
    contents = Contents()
    unknown = []
    for fqn in fqns:
        verdict = None if read_all else _decide(sides, fqn)
        if verdict is None:
            unknown.append(fqn)
            continue
        contents.num_by_checksum += 1
        if verdict:
            contents.differences[fqn] = Difference(fqn, "value", detail=verdict)
    contents.num_read = len(unknown)
    plain = [fqn for fqn in unknown if _is_plain(sides, fqn)]
    meter.expect(sum(tensor_bytes(sides.left, fqn) for fqn in plain))
    mismatches = compare_tensors(
        sides.left, sides.right, plain, meter, budget_bytes=config.budget_bytes
    )
    for fqn, mismatch in mismatches.items():
        contents.differences[fqn] = _of_tensor(sides, fqn, mismatch)
    for difference in _compare_values(sides, sorted(set(unknown) - set(plain))):
        contents.differences[difference.fqn] = difference
    return contents


def _is_plain(sides: Sides, fqn: str) -> bool:
    entry = sides.left.metadata.state_dict_metadata[fqn]
    if not isinstance(entry, TensorStorageMetadata):
        return False
    return not (sides.left.is_opaque(fqn) or sides.right.is_opaque(fqn))


# --- by checksum ---------------------------------------------------------------------


def _decide(sides: Sides, fqn: str) -> str | None:
    """Compare without a request: empty if equal, how they differ, or None if unknown."""
    left, right = _stored(sides.left, fqn), _stored(sides.right, fqn)
    if left.keys() != right.keys():
        return None
    verdicts = [compare_stored(left[place], right[place]) for place in left]
    if any(verdict is False for verdict in verdicts):
        num_different = sum(verdict is False for verdict in verdicts)
        return f"{num_different} of {count_text(len(verdicts), 'chunk')} differ by checksum"
    return "" if all(verdicts) else None


def _stored(
    checkpoint: Checkpoint, fqn: str
) -> Mapping[tuple[tuple[int, ...], tuple[int, ...]], StoredItem]:
    """Return the stored items of a key by their place in it; empty chunks left out.

    Raises:
        CorruptError: If the metadata do not say where one of them lies.
    """
    entry: Any = checkpoint.metadata.state_dict_metadata[fqn]
    if not isinstance(entry, TensorStorageMetadata):
        (item,) = checkpoint.items_of(fqn)
        return {((), ()): item}
    found = {}
    for chunk in entry.chunks:
        if 0 in chunk.sizes:
            continue
        item = checkpoint.metadata.storage_data.get(MetadataIndex(fqn, chunk.offsets))
        if item is None:
            raise CorruptError(
                f"{checkpoint.url}: the metadata do not say where {fqn!r} lies", fqn=fqn
            )
        found[tuple(chunk.offsets), tuple(chunk.sizes)] = item
    return found


# --- by reading ----------------------------------------------------------------------


def _of_tensor(sides: Sides, fqn: str, mismatch: Mismatch) -> Difference:
    entry: Any = sides.left.metadata.state_dict_metadata[fqn]
    total = prod(entry.size)
    detail = (
        f"{mismatch.num_elements:,} of {total:,} element(s) differ, first at"
        f" {list(mismatch.first)}: {mismatch.left} | {mismatch.right}"
    )
    return Difference(fqn, "value", mismatch.left, mismatch.right, detail)


def _compare_values(sides: Sides, fqns: Sequence[str]) -> Iterator[Difference]:
    """Compare what is no plain tensor: small as a rule, so that a few at a time fit."""
    tensors = sides.left.tensors
    for fqn in filter(tensors.__contains__, fqns):
        if not are_same(sides.left.read_opaque(fqn), sides.right.read_opaque(fqn)):
            yield Difference(fqn, "value", detail="their contents differ")
    rest = iter([fqn for fqn in fqns if fqn not in tensors])
    while batch := list(islice(rest, _VALUES_AT_ONCE)):
        left, right = (side.read_value_records(batch) for side in (sides.left, sides.right))
        for fqn in batch:
            if left[fqn].getvalue() != right[fqn].getvalue():
                difference = _compare_value(sides, fqn, left[fqn], right[fqn])
                if difference is not None:
                    yield difference


def _compare_value(
    sides: Sides, fqn: str, left: ValueRecord, right: ValueRecord
) -> Difference | None:
    """Open values whose bytes differ: equal ones may have been pickled in two ways."""
    has_encoding = left.encoded is not None or right.encoded is not None
    if has_encoding and left.encoded == right.encoded:
        return None
    try:
        one, other = sides.left.read_value(fqn), sides.right.read_value(fqn)
    except (CorruptError, IncompatibleError):
        return Difference(
            fqn,
            "value",
            detail="their bytes differ; they hold more than plain data, so they were not opened",
        )
    if not has_encoding and are_same(one, other):
        return None
    return Difference(fqn, "value", _short(one), _short(other))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."
