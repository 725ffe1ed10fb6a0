"""The table of keys that a plan's items refer to, in runs that ranks have in common.

Most keys are the same on all ranks, a few (a data loader's state) are not. The table is
therefore cut into runs by content, so that a key of one rank changes the name of the run
that it lies in and of no other::

    rank 0:  | model.* run A | model.* run B | optim.* run C | loader.rank_0 |
    rank 1:  | model.* run A | model.* run B | optim.* run C | loader.rank_1 |
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from dcpstore.errors import CorruptError

__all__ = ["KeyKind", "KeyRow", "Path", "cut_rows", "decode_rows", "encode_rows"]

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
