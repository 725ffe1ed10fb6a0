"""How two checkpoints differ: keys, shapes, dtypes, and the values to the last bit.

1. read the metadata of both; compare keys, kinds, shapes, dtypes, and names of attachments
2. compare values by checksum where both were cut into the same chunks: no data request
3. read the rest of both, side by side, in bounded memory

Equal CRC32C per block means equal bytes but for a chance of 2**-32 per block that differs by
accident; ``read_all`` leaves step 2 out. A NaN equals the same NaN, and zero differs from minus
zero: what matters is whether a load of one checkpoint gives the bytes that a load of the other
gives.

Tensors are cut into boxes of rows. As many boxes as fit a quarter of the budget are read of
either side at the same time; another half is for bytes on their way::

    budget   |-- left boxes --|-- right boxes --|---- requests of both sides ----|
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import prod
from time import monotonic
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from dcpstore.config import ReadConfig
from dcpstore.convert.dcp.source import Block, batches, plan_blocks, read_batch
from dcpstore.errors import CorruptError, IncompatibleError
from dcpstore.format.dtypes import dtype_name
from dcpstore.format.manifest import StoredItem, attachment_text
from dcpstore.format.tensors import encode_opaque
from dcpstore.plan.rules import KeyRules
from dcpstore.read.checkpoint import Checkpoint, open_checkpoint
from dcpstore.read.pump import Pump
from dcpstore.report import Meter, ProgressCallback, show_progress
from dcpstore.store import open_store
from dcpstore.store.base import Store
from dcpstore.text import count_text, size_text, table

DifferenceKind: TypeAlias = Literal["only left", "only right", "kind", "shape", "dtype", "value"]


@dataclass(frozen=True, slots=True)
class Difference:
    """A key that is not the same in both.

    Attributes:
        fqn: The key; of an attachment ``attachment`` and its name.
        kind: ``only left``, ``only right``; ``kind``: a tensor here and a value there;
            ``shape``, ``dtype``; or ``value``: the same in all of these, with other contents.
        left: What is on the left, for people; empty where nothing is.
        right: On the right.
        detail: How values differ.
    """

    fqn: str
    kind: DifferenceKind
    left: str = ""
    right: str = ""
    detail: str = ""

    def __str__(self) -> str:
        said = self.detail or " | ".join(filter(None, (self.left, self.right)))
        return f"{self.kind:<10}  {self.fqn!r}: {said}"


def compare_stored(left: StoredItem, right: StoredItem) -> bool | None:
    """Compare two stored items by what the metadata tell; no request.

    Returns:
        Whether the elements of two plain chunks, or the stored bytes of two other items, are
        the same; None if that cannot be told. Of other items only sameness is certain: equal
        values may be stored as different bytes, so that False is never returned for them.
    """
    is_plain = left.kind == "raw" == right.kind
    if left.kind != right.kind or left.transforms != right.transforms:
        return None
    if is_plain and (left.dtype, left.sizes) != (right.dtype, right.sizes):
        return None
    same = _compare_bytes(left, right)
    return same if is_plain or same else None


def _compare_bytes(left: StoredItem, right: StoredItem) -> bool | None:
    if left.payload.num_bytes != right.payload.num_bytes:
        return False
    if left.inline is not None and right.inline is not None:
        return left.inline == right.inline
    if left.checksums is None or right.checksums is None:
        return None
    if left.block_bytes != right.block_bytes and left.payload.num_bytes > min(
        left.block_bytes, right.block_bytes
    ):
        return None
    return bool(np.array_equal(left.checksums, right.checksums))


def _different_elements(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the positions at which two tensors of one shape and dtype differ, flattened."""
    one, other = (side.contiguous().reshape(-1).view(torch.uint8) for side in (left, right))
    if torch.equal(one, other):
        return torch.empty(0, dtype=torch.int64)
    per_element = (one != other).view(-1, left.element_size()).any(dim=1)
    return torch.nonzero(per_element).view(-1)


def are_same(left: Any, right: Any) -> bool:
    """Compare two values that a checkpoint held: types, structure, and every bit."""
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return _are_same_tensors(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, complex):
        return are_same((left.real, left.imag), (right.real, right.imag))
    if isinstance(left, Mapping):
        return list(left) == list(right) and all(are_same(left[k], right[k]) for k in left)
    if isinstance(left, Sequence) and not isinstance(left, str | bytes | bytearray):
        return len(left) == len(right) and all(map(are_same, left, right))
    return bool(left == right)


def _are_same_tensors(left: Any, right: Any) -> bool:
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return False
    if (left.dtype, left.shape, left.layout) != (right.dtype, right.shape, right.layout):
        return False
    if left.layout != torch.strided or left.is_quantized:
        return bool(encode_opaque(left) == encode_opaque(right))
    return _different_elements(left, right).numel() == 0


_PARTS_OF_BUDGET = 4


@dataclass(slots=True)
class _Mismatch:
    """How two tensors differ.

    Attributes:
        num_elements: How many elements differ.
        first: Index of the first of them in row-major order.
        left: Its value on the left, for people.
        right: On the right.
    """

    num_elements: int
    first: tuple[int, ...]
    left: str
    right: str


def _text(element: torch.Tensor) -> str:
    try:
        return str(element.item())
    except (RuntimeError, NotImplementedError):  # not every dtype has a Python number
        return "0x" + element.reshape(1).view(torch.uint8).numpy()[::-1].tobytes().hex()


_VALUES_AT_ONCE = 64
_MAX_TEXT = 60


class _Contents:
    """Compares the contents of keys whose metadata are the same.

    Args:
        left: One checkpoint.
        right: The other.
        meter: Counts the bytes compared by reading, of one side.
        budget_bytes: Memory of both sides together.
    """

    def __init__(
        self, left: Checkpoint, right: Checkpoint, meter: Meter, budget_bytes: int
    ) -> None:
        self._left = left
        self._right = right
        self._meter = meter
        self._batch_bytes = max(1, budget_bytes // _PARTS_OF_BUDGET)
        self.differences: dict[str, Difference] = {}
        self.num_by_checksum = 0
        self.num_read = 0

    def compare(self, fqns: Sequence[str], *, read_all: bool) -> None:
        """Compare keys, and note how they differ.

        Args:
            fqns: The keys.
            read_all: Read even where checksums would tell.
        """
        unknown = [fqn for fqn in fqns if read_all or not self._is_told_by_checksum(fqn)]
        self.num_by_checksum = len(fqns) - len(unknown)
        self.num_read = len(unknown)
        tensors = self._left.tensors
        plain = [
            fqn
            for fqn in unknown
            if fqn in tensors and not (self._left.is_opaque(fqn) or self._right.is_opaque(fqn))
        ]
        self._meter.expect(sum(self._num_bytes(fqn) for fqn in plain))
        for fqn, one in self._compare_tensors(plain).items():
            detail = (
                f"{one.num_elements:,} of {prod(tensors[fqn].size):,} element(s) differ, first at"
                f" {list(one.first)}: {one.left} | {one.right}"
            )
            self._note(Difference(fqn, "value", one.left, one.right, detail))
        self._compare_values(sorted(set(unknown) - set(plain)))

    def _note(self, difference: Difference) -> None:
        self.differences[difference.fqn] = difference

    def _num_bytes(self, fqn: str) -> int:
        entry = self._left.tensors[fqn]
        return prod(entry.size) * entry.properties.dtype.itemsize

    # --- by checksum -----------------------------------------------------------------

    def _is_told_by_checksum(self, fqn: str) -> bool:
        """Compare without a request; return whether that could tell."""
        left, right = _stored(self._left, fqn), _stored(self._right, fqn)
        if left.keys() != right.keys():
            return False
        verdicts = [compare_stored(left[place], right[place]) for place in left]
        num_different = verdicts.count(False)
        if num_different:
            detail = f"{num_different} of {count_text(len(verdicts), 'chunk')} differ by checksum"
            self._note(Difference(fqn, "value", detail=detail))
        return num_different > 0 or all(verdicts)

    # --- by reading ------------------------------------------------------------------

    def _compare_tensors(self, fqns: Sequence[str]) -> dict[str, _Mismatch]:
        """Read plain tensors from both sides; return how those differ that do."""
        found: dict[str, _Mismatch] = {}
        sides, limit = (self._left, self._right), self._batch_bytes
        memories = [torch.empty(limit, dtype=torch.uint8) for _ in sides]
        for side in sides:
            side.locate({fqn for fqn in fqns if self._num_bytes(fqn) > limit})
        tensors = self._left.tensors
        blocks = [
            block
            for fqn in fqns
            for block in plan_blocks(self._left, fqn, tensors[fqn].properties.dtype, limit)
        ]
        with Pump(2, "dcpstore-diff") as pump:
            for batch in batches(blocks, limit):
                calls = [
                    (1, partial(read_batch, side, batch, memory))
                    for side, memory in zip(sides, memories, strict=True)
                ]
                for (block, one), (_, other) in zip(*pump.in_order(calls, 2), strict=True):
                    assert isinstance(one, torch.Tensor)
                    assert isinstance(other, torch.Tensor)
                    _compare_blocks(found, block, one, other)
                    self._meter.advance(block.num_bytes)
        return found

    def _compare_values(self, fqns: Sequence[str]) -> None:
        """Compare what is no plain tensor: small as a rule, so that a few at a time fit."""
        left, right, tensors = self._left, self._right, self._left.tensors
        for fqn in filter(tensors.__contains__, fqns):
            if not are_same(left.read_opaque(fqn), right.read_opaque(fqn)):
                self._note(Difference(fqn, "value", detail="their contents differ"))
        rest = iter([fqn for fqn in fqns if fqn not in tensors])
        while batch := list(islice(rest, _VALUES_AT_ONCE)):
            ones, others = (side.read_value_records(batch) for side in (left, right))
            for fqn in batch:
                if ones[fqn].getvalue() != others[fqn].getvalue():
                    self._compare_value(fqn, ones[fqn].encoded, others[fqn].encoded)

    def _compare_value(self, fqn: str, left: bytes | None, right: bytes | None) -> None:
        """Open values whose bytes differ: equal ones may have been pickled in two ways."""
        has_encoding = left is not None or right is not None
        if has_encoding and left == right:
            return
        try:
            one, other = self._left.read_value(fqn), self._right.read_value(fqn)
        except (CorruptError, IncompatibleError):
            detail = "their bytes differ; they hold more than plain data, so they were not opened"
            self._note(Difference(fqn, "value", detail=detail))
            return
        if has_encoding or not are_same(one, other):
            self._note(Difference(fqn, "value", _short(one), _short(other)))


def _compare_attachments(
    one: Checkpoint, other: Checkpoint, rules: KeyRules, *, values: bool, read_all: bool
) -> Iterator[Difference]:
    """Yield how the files differ that were sealed with two checkpoints."""
    left, right = one.attached_items, other.attached_items
    for name in dict.fromkeys([*left, *right]):
        shown = attachment_text(name)
        if not rules.takes(shown):
            continue
        if name not in left or name not in right:
            texts = (_size_in(left, name), _size_in(right, name))
            yield Difference(shown, "only right" if name not in left else "only left", *texts)
        elif values:
            same = None if read_all else _compare_bytes(left[name], right[name])
            if same is None:
                same = _digest(one, name) == _digest(other, name)
            if not same:
                texts = (_size_in(left, name), _size_in(right, name))
                yield Difference(shown, "value", *texts, "their bytes differ")


def _size_in(items: Mapping[str, StoredItem], name: str) -> str:
    return size_text(items[name].payload.num_bytes) if name in items else ""


def _digest(checkpoint: Checkpoint, name: str) -> bytes:
    """Return what tells an attachment's bytes, read in bounded memory."""
    digest = hashlib.sha256()
    with closing(checkpoint.attachment_pieces(name)) as pieces:
        for piece in pieces:
            digest.update(piece)
    return digest.digest()


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


def _compare_blocks(
    found: dict[str, _Mismatch], block: Block, left: torch.Tensor, right: torch.Tensor
) -> None:
    places = _different_elements(left, right)
    if not places.numel():
        return
    if block.fqn in found:
        found[block.fqn].num_elements += places.numel()
        return
    inner = torch.unravel_index(places[0], block.sizes) if block.sizes else ()
    at = tuple(int(step) for step in inner)
    first = tuple(offset + step for offset, step in zip(block.offsets, at, strict=True))
    found[block.fqn] = _Mismatch(places.numel(), first, _text(left[at]), _text(right[at]))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What `compare_checkpoints` found.

    Attributes:
        left: URL of one checkpoint.
        right: Of the other.
        differences: By key, in the order of the left one, then those of the right one alone;
            those of attachments last.
        num_equal: Keys that are the same in both (without values, if these were left out).
        num_by_checksum: Keys whose contents were told apart or equal by checksums alone.
        num_read: Keys whose contents were read.
        values_compared: Whether values were compared.
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
    values_compared: bool
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
            if self.values_compared
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
    side_bytes = max(config.budget_bytes // _PARTS_OF_BUDGET, config.request_bytes)
    side_config = replace(config, budget_bytes=side_bytes, casts="exact")
    open_side = partial(open_checkpoint, config=side_config, store_opener=store_opener)
    with (
        show_progress("diff", progress, is_coordinator=True) as meter,
        open_side(left, storage_options=left_options) as one,
        open_side(right, storage_options=right_options) as other,
    ):
        rules = rules or KeyRules()
        found, same = _compare_metadata(one, other, rules)
        told = _Contents(one, other, meter, config.budget_bytes)
        if values:
            told.compare(same, read_all=read_all)
        changed = {**found, **told.differences}
        attached = _compare_attachments(one, other, rules, values=values, read_all=read_all)
        return Comparison(
            left=one.url,
            right=other.url,
            differences=(
                *(changed[fqn] for fqn in _ordered(one, other) if fqn in changed),
                *attached,
            ),
            num_equal=len(same) - len(told.differences),
            num_by_checksum=told.num_by_checksum,
            num_read=told.num_read,
            values_compared=values,
            fetched_bytes=one.stats.fetched_bytes + other.stats.fetched_bytes,
            num_requests=one.stats.num_requests + other.stats.num_requests,
            elapsed_s=monotonic() - began,
        )


def _ordered(one: Checkpoint, other: Checkpoint) -> Iterator[str]:
    yield from one.keys
    left = set(one.keys)
    yield from (fqn for fqn in other.keys if fqn not in left)


def _compare_metadata(
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
    is_tensor = isinstance(left, TensorStorageMetadata)
    kind: DifferenceKind
    if left is None or right is None:
        kind = "only right" if left is None else "only left"
    elif is_tensor != isinstance(right, TensorStorageMetadata):
        kind = "kind"
    elif is_tensor and tuple(left.size) != tuple(right.size):
        kind = "shape"
    elif is_tensor and left.properties.dtype != right.properties.dtype:
        kind = "dtype"
    else:
        return None
    return Difference(fqn, kind, _describe(left), _describe(right))


def _describe(entry: Any) -> str:
    if entry is None:
        return ""
    if isinstance(entry, TensorStorageMetadata):
        return f"{dtype_name(entry.properties.dtype)} {list(entry.size)}"
    return "a value"
