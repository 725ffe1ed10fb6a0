"""The items of one rank's save plan as columns, and their bytes.

Almost every item is a run of whole rows of its tensor, so two numbers place it::

    start, length     first row and number of rows; a 0-d tensor has one row
                      (a value: whether its size is known, and that size in bytes)
    box_*             items that do not fill all later dimensions: where they lie in those

On the wire each column takes the narrowest integers that hold it; the whole is one zlib
stream at level 1.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dcpstore.errors import CorruptError
from dcpstore.planning.exchange.schema import KeyRow, cut_rows, encode_rows
from dcpstore.planning.exchange.wire import PackedPlan, Part, PartKind, PlanFlag, PlanKind

__all__ = ["Ints", "SaveColumns", "decode_columns", "encode_columns", "key_parts", "pack_columns"]

Ints: TypeAlias = npt.NDArray[Any]

_PREFIX = struct.Struct("<IHBBBBBBB")  # boxes, dimensions of a box, a width per column
_WIDTHS = (0, 1, 2, 4, 8)
_BOUNDS = (0, 2**8, 2**16, 2**31)
_DTYPES = (None, np.dtype("u1"), np.dtype("<u2"), np.dtype("<i4"), np.dtype("<i8"))


@dataclass(frozen=True, slots=True, eq=False)
class SaveColumns:
    """A rank's items, one element per item unless said otherwise.

    Attributes:
        start: First row of the chunk.
        length: Number of its rows.
        row: The item's row in the table of keys; None where item i has row i.
        hint: DCP's index hint, -1 for none; None where no item has one.
        box_item: Ascending positions of the items that are boxes.
        box_offsets: Per box, its offsets in the dimensions after the first, padded with 0.
        box_sizes: Per box, its sizes there, padded with 1.
    """

    start: Ints
    length: Ints
    row: Ints | None
    hint: Ints | None
    box_item: Ints
    box_offsets: Ints
    box_sizes: Ints

    def __post_init__(self) -> None:
        if len(self.start) != len(self.length) or self.box_offsets.shape != self.box_sizes.shape:
            raise ValueError("columns of one plan differ in length")

    @property
    def num_items(self) -> int:
        """Items of the plan."""
        return len(self.start)


def key_parts(rows: list[KeyRow]) -> list[Part]:
    """Pack a table of keys into parts that other ranks are likely to have too."""
    return [Part.of(PartKind.KEYS, encode_rows(run)) for run in cut_rows(rows)]


def pack_columns(
    columns: SaveColumns,
    keys: list[Part],
    *,
    flags: PlanFlag | int = 0,
    extras: bytes | None = None,
) -> PackedPlan:
    """Join a rank's columns and its table of keys to a packed save plan."""
    parts = [Part.of(PartKind.ROWS, encode_columns(columns)), *keys]
    if extras is not None:
        parts.append(Part.of(PartKind.EXTRAS, extras))
    return PackedPlan.of(PlanKind.SAVE, PlanFlag(flags), columns.num_items, parts)


def encode_columns(columns: SaveColumns) -> bytes:
    """Turn columns into bytes; equal columns into equal ones."""
    hint = None if columns.hint is None else columns.hint + 1  # 0 for none stays narrow
    stored = [
        _narrow(column)
        for column in (
            columns.start,
            columns.length,
            columns.row,
            hint,
            columns.box_item,
            columns.box_offsets.ravel(),
            columns.box_sizes.ravel(),
        )
    ]
    num_boxes, num_dims = columns.box_offsets.shape
    prefix = _PREFIX.pack(num_boxes, num_dims, *(width for width, _ in stored))
    return zlib.compress(b"".join([prefix, *(raw for _, raw in stored)]), 1)


def decode_columns(data: bytes | memoryview, num_items: int) -> SaveColumns:
    """Turn bytes into columns; they are views of one buffer, in the integers of the wire.

    Raises:
        CorruptError: If these are not the bytes of the columns of so many items.
    """
    try:
        raw = zlib.decompress(data)
        num_boxes, num_dims, *codes = _PREFIX.unpack_from(raw)
        counts = (num_items,) * 4 + (num_boxes,) + (num_boxes * num_dims,) * 2
        at = _PREFIX.size
        found: list[Ints | None] = []
        for code, count in zip(codes, counts, strict=True):
            dtype = _DTYPES[code]
            found.append(None if dtype is None else np.frombuffer(raw, dtype, count, at))
            at += _WIDTHS[code] * count
        if at != len(raw):
            raise ValueError(f"{len(raw)} bytes, expected {at}")
    except (zlib.error, struct.error, ValueError, IndexError) as error:
        raise CorruptError(f"a packed plan's columns are damaged: {error!r}") from error
    start, length, row, hint, box_item, box_offsets, box_sizes = found
    none = np.empty(0, np.int64)
    return SaveColumns(
        start=none if start is None else start,
        length=none if length is None else length,
        row=row,
        hint=None if hint is None else hint.astype(np.int64) - 1,
        box_item=none if box_item is None else box_item,
        box_offsets=_boxes(box_offsets, num_boxes, num_dims),
        box_sizes=_boxes(box_sizes, num_boxes, num_dims),
    )


def _boxes(flat: Ints | None, num_boxes: int, num_dims: int) -> Ints:
    values = np.empty(0, np.int64) if flat is None else flat
    return values.reshape(num_boxes, num_dims)


def _narrow(column: Ints | None) -> tuple[int, bytes]:
    if column is None or not len(column):
        return 0, b""
    low, high = int(column.min()), int(column.max())
    code = 4 if low < 0 else next((c for c in (1, 2, 3) if high < _BOUNDS[c]), 4)
    return code, column.astype(_DTYPES[code]).tobytes()
