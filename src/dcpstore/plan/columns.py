"""The table of keys that a plan's items refer to, in runs that ranks have in common.

Most keys are the same on all ranks, a few (a data loader's state) are not. The table is
therefore cut into runs by content, so that a key of one rank changes the name of the run
that it lies in and of no other::

    rank 0:  | model.* run A | model.* run B | optim.* run C | loader.rank_0 |
    rank 1:  | model.* run A | model.* run B | optim.* run C | loader.rank_1 |

The items of one rank's save plan as columns, and their bytes.

Almost every item is a run of whole rows of its tensor, so two numbers place it::

    start, length     first row and number of rows; a 0-d tensor has one row
                      (a value: whether its size is known, and that size in bytes)
    box_*             items that do not fill all later dimensions: where they lie in those

On the wire each column takes the narrowest integers that hold it; the whole is one zlib
stream at level 1.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dcpstore.errors import CorruptError
from dcpstore.plan.wire import PackedPlan, Part, PartKind, PlanFlag

Path: TypeAlias = tuple[str | int, ...]

_CUT_EVERY = 128  # rows, on average: a head of about ten names for a thousand keys
_MIN_ROWS = 16  # before a new first word of the key cuts as well
_MAX_ROWS = 1024


class KeyKind(IntEnum):
    """What lies under a key."""

    VALUE = 0  # anything that is not a tensor: BYTE_IO
    TENSOR = 1
    SHARD = 2
    PATH = 3  # no item at all: a key of the flattening map only


@dataclass(frozen=True, slots=True)
class KeyRow:
    """A key as the items of one rank describe it.

    Attributes:
        fqn: The flattened key.
        kind: What its items are.
        size: Shape of the whole tensor; empty for values.
        properties: The tensor's properties as text, its dtype's name first; empty for values.
        item_bytes: Bytes of one element; 1 for values.
        path: Where the key lies in the nested state dict; None if the planner keeps no map.
        has_offset: Whether the items' index carries the chunk's offsets.
    """

    fqn: str
    kind: KeyKind
    size: tuple[int, ...] = ()
    properties: str = ""
    item_bytes: int = 1
    path: Path | None = None
    has_offset: bool = True

    @property
    def dtype(self) -> str:
        """Name of the dtype; empty for values."""
        return self.properties.split(" ", 1)[0]

    @property
    def is_value(self) -> bool:
        """Whether this is no tensor."""
        return self.kind == KeyKind.VALUE


def cut_rows(rows: Sequence[KeyRow]) -> Iterator[Sequence[KeyRow]]:
    """Cut a table into runs at places that its content decides."""
    first = 0
    word = ""
    for at, row in enumerate(rows):
        last_word, word = word, row.fqn.partition(".")[0]
        num_rows = at - first
        if num_rows and (
            num_rows >= _MAX_ROWS
            or (num_rows >= _MIN_ROWS and word != last_word)
            or zlib.crc32(row.fqn.encode("utf-8", "surrogatepass")) % _CUT_EVERY == 0
        ):
            yield rows[first:at]
            first = at
    if first < len(rows):
        yield rows[first:]


def encode_rows(rows: Sequence[KeyRow]) -> bytes:
    """Turn a run of rows into bytes; equal rows into equal ones."""
    tensors = dict.fromkeys((row.properties, row.item_bytes, row.has_offset) for row in rows)
    number_of = {tensor: number for number, tensor in enumerate(tensors)}
    columns = {
        "tensors": list(number_of),
        "fqn": [row.fqn for row in rows],
        "kind": [int(row.kind) for row in rows],
        "size": [row.size for row in rows],
        "tensor": [number_of[row.properties, row.item_bytes, row.has_offset] for row in rows],
        "path": [row.path for row in rows],
    }
    return zlib.compress(json.dumps(columns, separators=(",", ":")).encode(), 6)


def decode_rows(data: bytes | memoryview) -> list[KeyRow]:
    """Turn bytes into the rows they were made from.

    Raises:
        CorruptError: If these are not the bytes of such rows.
    """
    try:
        columns = json.loads(zlib.decompress(data))
        tensors = columns["tensors"]
        return [
            KeyRow(
                fqn,
                KeyKind(kind),
                tuple(size),
                tensors[tensor][0],
                tensors[tensor][1],
                None if path is None else tuple(path),
                tensors[tensor][2],
            )
            for fqn, kind, size, tensor, path in zip(
                columns["fqn"],
                columns["kind"],
                columns["size"],
                columns["tensor"],
                columns["path"],
                strict=True,
            )
        ]
    except (zlib.error, ValueError, KeyError, IndexError, TypeError) as error:
        raise CorruptError(f"a packed plan's table of keys is damaged: {error!r}") from error


Ints: TypeAlias = npt.NDArray[Any]

_NUM_COLUMNS = struct.Struct("<B")
_COLUMN = struct.Struct("<BI")  # width code, elements
_DTYPES = (np.dtype("u1"), np.dtype("<u2"), np.dtype("<i4"), np.dtype("<i8"))
_BOUNDS = (2**8, 2**16, 2**31, 2**63)


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
    flags = PlanFlag(flags)
    if columns.row is not None:
        flags |= PlanFlag.HAS_ROW_NUMBERS
    parts = [Part.of(PartKind.ROWS, encode_columns(columns)), *keys]
    if extras is not None:
        parts.append(Part.of(PartKind.EXTRAS, extras))
    return PackedPlan.of(flags, columns.num_items, parts)


def encode_columns(columns: SaveColumns) -> bytes:
    """Turn columns into bytes; equal columns into equal ones."""
    none = np.empty(0, np.int64)
    return pack_ints(
        columns.start,
        columns.length,
        none if columns.row is None else columns.row,
        none if columns.hint is None else columns.hint + 1,  # 0 for none stays narrow
        columns.box_item,
        columns.box_offsets.ravel(),
        columns.box_sizes.ravel(),
    )


def decode_columns(data: bytes | memoryview, num_items: int) -> SaveColumns:
    """Turn bytes into columns; they are views of one buffer, in the integers of the wire.

    Raises:
        CorruptError: If these are not the bytes of the columns of so many items.
    """
    try:
        start, length, row, hint, box_item, offsets, sizes = unpack_ints(data)
        if len(start) != num_items or any(len(one) not in (0, num_items) for one in (row, hint)):
            raise ValueError(f"{len(start)} items, the head says {num_items}")
        num_boxes = len(box_item)
        shape = (num_boxes, len(offsets) // num_boxes if num_boxes else 0)
        return SaveColumns(
            start=start,
            length=length,
            row=row if len(row) else None,
            hint=hint.astype(np.int64) - 1 if len(hint) else None,
            box_item=box_item,
            box_offsets=offsets.reshape(shape),
            box_sizes=sizes.reshape(shape),
        )
    except ValueError as error:
        raise CorruptError(f"a packed plan's columns are damaged: {error}") from error


def pack_ints(*columns: Ints) -> bytes:
    """Pack columns of integers, each as narrow as it goes."""
    heads, raws = [_NUM_COLUMNS.pack(len(columns))], []
    for column in columns:
        code = 0
        if len(column):
            low, high = int(column.min()), int(column.max())
            code = 3 if low < 0 else next(c for c, bound in enumerate(_BOUNDS) if high < bound)
        heads.append(_COLUMN.pack(code, len(column)))
        raws.append(column.astype(_DTYPES[code]).tobytes())
    return zlib.compress(b"".join([*heads, *raws]), 1)


def unpack_ints(data: bytes | memoryview) -> list[Ints]:
    """Return the columns that `pack_ints` packed, as views of one buffer.

    Raises:
        CorruptError: If these are not the bytes of such columns.
    """
    try:
        raw = zlib.decompress(data)
        (count,) = _NUM_COLUMNS.unpack_from(raw)
        at = _NUM_COLUMNS.size + count * _COLUMN.size
        found = []
        for code, length in _COLUMN.iter_unpack(raw[_NUM_COLUMNS.size : at]):
            found.append(np.frombuffer(raw, _DTYPES[code], length, at))
            at += found[-1].nbytes
        if at != len(raw):
            raise ValueError(f"{len(raw)} bytes, expected {at}")
    except (zlib.error, struct.error, ValueError, IndexError) as error:
        raise CorruptError(f"a packed plan's columns are damaged: {error!r}") from error
    return found
