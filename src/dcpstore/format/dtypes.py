"""Every dtype that torch has, by name, and how ``torch.save`` records it.

The table is data, and torch is imported only when a dtype object is asked for,
so a process that only lists a bucket can size payloads without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class DtypeInfo:
    """What is known of one dtype.

    Attributes:
        name: As in ``torch.<name>``, such as ``"bfloat16"``.
        item_bytes: Size of one element in memory.
        storage_class: Legacy storage class that names the dtype in a ``torch.save``
            record; None where the record holds an ``UntypedStorage`` and the dtype itself.
        is_plain: Whether ``torch.save`` and ``torch.load(weights_only=True)`` carry a
            strided tensor of this dtype, so that raw bytes can stand for it.
    """

    name: str
    item_bytes: int
    storage_class: str | None = None
    is_plain: bool = True


def _table() -> dict[str, DtypeInfo]:
    named = (
        ("float64", 8, "DoubleStorage"),
        ("float32", 4, "FloatStorage"),
        ("float16", 2, "HalfStorage"),
        ("bfloat16", 2, "BFloat16Storage"),
        ("int64", 8, "LongStorage"),
        ("int32", 4, "IntStorage"),
        ("int16", 2, "ShortStorage"),
        ("int8", 1, "CharStorage"),
        ("uint8", 1, "ByteStorage"),
        ("bool", 1, "BoolStorage"),
        ("complex128", 16, "ComplexDoubleStorage"),
        ("complex64", 8, "ComplexFloatStorage"),
    )
    untyped = (
        ("complex32", 4),
        ("uint16", 2),
        ("uint32", 4),
        ("uint64", 8),
        ("float8_e5m2", 1),
        ("float8_e4m3fn", 1),
        ("float8_e5m2fnuz", 1),
        ("float8_e4m3fnuz", 1),
        ("float8_e8m0fnu", 1),
        ("float4_e2m1fn_x2", 1),
        ("bits8", 1),
        ("bits16", 2),
        ("bits1x8", 1),
        ("bits2x4", 1),
        ("bits4x2", 1),
    )
    # Quantized tensors carry scales beside their bytes; sub-byte integers exist only as
    # marks for tensor subclasses: torch.save has no record for a strided tensor of one.
    quantized = (("qint8", 1), ("quint8", 1), ("qint32", 4), ("quint4x2", 1), ("quint2x4", 1))
    sub_byte = tuple((f"{sign}int{bits}", 1) for sign in ("", "u") for bits in range(1, 8))
    rows = [DtypeInfo(name, size, storage) for name, size, storage in named]
    rows += [DtypeInfo(name, size) for name, size in untyped]
    rows += [DtypeInfo(name, size, is_plain=False) for name, size in quantized + sub_byte]
    return {row.name: row for row in rows}


DTYPES: Mapping[str, DtypeInfo] = MappingProxyType(_table())
"""Every known dtype by name, whether or not the installed torch has it."""


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module: ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


@cache
def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype object of a name.

    Raises:
        ValueError: If no torch has such a dtype, or the installed torch is too old for it.
    """
    import torch

    if name not in DTYPES:
        raise ValueError(f"{name!r} is not a dtype that dcpstore knows")
    dtype: torch.dtype | None = getattr(torch, name, None)
    if dtype is None:
        raise ValueError(f"torch {torch.__version__} has no dtype {name!r}; a newer torch does")
    return dtype


@cache
def info_of(dtype: torch.dtype) -> DtypeInfo:
    """Return the table's row for a dtype.

    Raises:
        ValueError: If the dtype is newer than this table.
    """
    name = dtype_name(dtype)
    if name not in DTYPES:
        raise ValueError(f"{name!r} is not a dtype that dcpstore knows")
    return DTYPES[name]


@cache
def is_plain_dtype(dtype: torch.dtype) -> bool:
    """Whether raw bytes of a strided tensor of this dtype can be saved and loaded."""
    row = DTYPES.get(dtype_name(dtype))
    return row is not None and row.is_plain


def item_bytes(dtype: torch.dtype | str) -> int:
    """Return the size of one element in bytes, of a dtype or of a dtype's name.

    Raises:
        ValueError: If the dtype is not in the table.
    """
    row = DTYPES.get(dtype) if isinstance(dtype, str) else info_of(dtype)
    if row is None:
        raise ValueError(f"{dtype!r} is not a dtype that dcpstore knows")
    return row.item_bytes


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a dense row-major array, as torch gives them."""
    strides = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def is_row_major(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Tell whether an array is dense and row-major; the strides of dimensions of 1 do not count."""
    wanted = row_major_strides(tuple(shape))
    rows = zip(shape, strides, wanted, strict=True)
    return 0 in shape or all(size == 1 or has == want for size, has, want in rows)
