"""When two tensors or two values are the same: to the last bit.

A NaN equals the same NaN, and zero differs from minus zero: what matters is whether a load of
one checkpoint gives the bytes that a load of the other gives.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dcpstore.format.tensors import encode_opaque
from dcpstore.manifest import StoredItem

__all__ = ["are_same", "compare_stored", "different_elements"]


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


def different_elements(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the positions at which two tensors of one shape and dtype differ, flattened."""
    return _different(_bytes_of(left), _bytes_of(right), left.element_size())


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _different(left: torch.Tensor, right: torch.Tensor, item_bytes: int) -> torch.Tensor:
    if torch.equal(left, right):
        return torch.empty(0, dtype=torch.int64)
    per_element = (left != right).view(-1, item_bytes).any(dim=1)
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
    return different_elements(left, right).numel() == 0
