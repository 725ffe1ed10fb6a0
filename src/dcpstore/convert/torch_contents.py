"""What the storages of a ``torch.save`` file are made of, given a checkpoint's tensors.

A storage in the file is as long as the tensors that view it need, and where they lie in it is
kept: views stay views, and tied tensors stay tied. Most storages are one tensor, row by row,
and stream through; those that are put together of several tensors, or in another order,
are assembled in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch

from dcpstore.convert.torch_pickle import StorageView, StorageViews
from dcpstore.errors import CorruptError
from dcpstore.ranges import row_major_strides
from dcpstore.torch_private import set_lazy_bits, storage_identity

__all__ = ["Assembled", "Content", "Member", "PlacedViews", "Rows", "plan_contents"]

_ALIGN_BYTES = 16  # the largest element


@dataclass(frozen=True, slots=True)
class Rows:
    """A storage that is one tensor's elements in row-major order.

    Attributes:
        fqn: Its key in the checkpoint.
        dtype: What its elements are converted to.
    """

    fqn: str
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Assembled:
    """A storage into which several tensors are laid, or one in another order.

    Attributes:
        parts: Key of each in the checkpoint, and a stand-in that lies as it does.
        base_bytes: Position of the storage's first byte in the stand-ins' storage.
    """

    parts: Sequence[tuple[str, torch.Tensor]]
    base_bytes: int

    def target(self, stand_in: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Return where a part lies in the storage's memory; what repeats itself, once."""
        out = torch.empty(0, dtype=stand_in.dtype, device="cpu")
        offset = int(stand_in.storage_offset()) - self.base_bytes // stand_in.dtype.itemsize
        steps = zip(stand_in.size(), stand_in.stride(), strict=True)
        sizes = [size if stride else 1 for size, stride in steps]
        out.set_(memory.untyped_storage(), offset, sizes, stand_in.stride())
        return set_lazy_bits(out, conj=stand_in.is_conj(), neg=stand_in.is_neg())


@dataclass(frozen=True, slots=True)
class Member:
    """A storage that a record holds as it is.

    Attributes:
        fqn: Key of the value or opaque tensor whose record it is; None for the layout's archive.
        number: Of the storage in the record.
    """

    fqn: str | None
    number: int


Content: TypeAlias = Rows | Assembled | Member


@dataclass(frozen=True, slots=True)
class _Placed:
    num_bytes: int
    base_bytes: int = 0
    is_compact: bool = False


class PlacedViews(StorageViews):
    """Where stand-ins will lie in the storages of the file.

    Args:
        placed: What becomes of each storage, by identity.
    """

    def __init__(self, placed: Mapping[int, _Placed]) -> None:
        super().__init__({identity: one.num_bytes for identity, one in placed.items()})
        self._placed = placed

    def view(self, tensor: torch.Tensor) -> StorageView:
        """Return how a stand-in will lie in its storage."""
        placed = self._placed[storage_identity(tensor)]
        if 0 in tensor.size():
            return StorageView(0, tuple(tensor.stride()))
        if placed.is_compact:
            return StorageView(0, row_major_strides(tuple(tensor.size())))
        item = tensor.dtype.itemsize
        offset = int(tensor.storage_offset()) - placed.base_bytes // item
        low, high = _span(tensor)
        if low < placed.base_bytes or high > placed.base_bytes + placed.num_bytes:
            raise CorruptError("the checkpoint's torch.save structure names elements that it lacks")
        return StorageView(offset, tuple(tensor.stride()))


def plan_contents(
    tensors: Mapping[str, torch.Tensor],
    whole: Mapping[int, Member],
    num_bytes: Mapping[int, int],
) -> tuple[PlacedViews, dict[int, Content]]:
    """Decide how long each storage is and what it is made of. Pure.

    Args:
        tensors: Stand-in of each strided tensor, by key in the checkpoint.
        whole: Storages that a record holds as they are.
        num_bytes: Length of each stand-in's storage, by identity.
    """
    viewed: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for fqn, tensor in tensors.items():
        viewed.setdefault(storage_identity(tensor), []).append((fqn, tensor))
    placed: dict[int, _Placed] = {}
    contents: dict[int, Content] = {}
    for identity, length in num_bytes.items():
        if identity in whole:
            placed[identity], contents[identity] = _Placed(length), whole[identity]
        else:
            views = [one for one in viewed.get(identity, ()) if 0 not in one[1].size()]
            placed[identity], contents[identity] = _plan(views)
    return PlacedViews(placed), contents


def _plan(views: Sequence[tuple[str, torch.Tensor]]) -> tuple[_Placed, Content]:
    if not views:
        return _Placed(0), Assembled((), 0)
    spans = [_span(tensor) for _, tensor in views]
    low, high = min(low for low, _ in spans), max(high for _, high in spans)
    if len({tensor.dtype.itemsize for _, tensor in views}) > 1:
        low = low // _ALIGN_BYTES * _ALIGN_BYTES
    placed = _Placed(high - low, low)
    for (fqn, tensor), span in zip(views, spans, strict=True):
        if span == (low, high) and _is_row_major(tensor):
            return placed, Rows(fqn, tensor.dtype)
    fqn, tensor = views[0]
    has_holes = high - low > prod(tensor.size()) * tensor.dtype.itemsize
    if has_holes and all(_is_same(tensor, other) for _, other in views) and not _is_lazy(tensor):
        return _Placed(prod(tensor.size()) * tensor.dtype.itemsize, 0, True), Rows(
            fqn, tensor.dtype
        )
    return placed, Assembled(tuple(views), low)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes of its storage from a tensor's first to its last element."""
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in steps)
    return first * tensor.dtype.itemsize, (last + 1) * tensor.dtype.itemsize


def _is_lazy(tensor: torch.Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


def _is_row_major(tensor: torch.Tensor) -> bool:
    return not _is_lazy(tensor) and tensor.is_contiguous()


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.size(), one.stride(), one.storage_offset()) == (
        other.dtype,
        other.size(),
        other.stride(),
        other.storage_offset(),
    )
