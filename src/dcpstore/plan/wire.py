"""Packed plans: a rank's save plan as columns on the wire, and a cache of them by content.

All integers are little-endian::

    head:   "DCPPLAN3"  u8 flags  u32 num_items  16-byte BLAKE2b of each part
    parts:  the rank's items, then runs of its table of keys, a row per item

A part is named by the hash of its bytes. Parts that are the same on many ranks (the runs of keys)
have the same name on all of them, so each travels and is decoded once. The digest of the head
names the whole plan.

Most keys are the same on all ranks, a few (a data loader's state) are not. The table of keys is
therefore cut into runs by content, so that a key of one rank changes the name of the run
that it lies in and of no other::

    rank 0:  | model.* run A | model.* run B | optim.* run C | loader.rank_0 |
    rank 1:  | model.* run A | model.* run B | optim.* run C | loader.rank_1 |

Almost every item is a run of whole rows of its tensor, so two numbers place it::

    start, length     first row and number of rows; a 0-d tensor has one row
                      (a value: whether its size is known, and that size in bytes)
    box               0, or for an item that does not fill all later dimensions the number of
                      the box that it fills there, counted from 1
    boxes             the distinct boxes: offsets and sizes in the later dimensions

Each column takes the narrowest integers that hold it; all columns are one zlib stream at level 1.

`PlanCache` finds the plans of earlier saves by content. A key of it is made of the names of all
ranks' packed plans, which are hashes of all that they
hold: item order, keys, sizes, dtypes, chunks, the flattening map, and their number.
What does not lie in the plans (writer, format, options) goes into the fingerprint. Nothing here
is global: whoever saves owns a cache::

    ranks                              coordinator
    digest (16 bytes)            --->  key = cache_key(digests, fingerprint)
                                       cache.find(key): a hit ends the exchange
    head (names of the parts)    --->  request = cache.request(heads)
                                 <---  request.wanted[rank], most often nothing
    those parts                  --->  cache.assemble(request, answers) -> merge_save_plans
                                       cache.put(key, plan) once the save is sealed;
                                       cache.invalidate(key) if it failed
"""

from __future__ import annotations

import json
import struct
import sys
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, IntFlag
from hashlib import blake2b
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from dcpstore.errors import CorruptError

Path: TypeAlias = tuple[str | int, ...]
Ints: TypeAlias = npt.NDArray[Any]
DIGEST_BYTES = 16
_MAGIC = b"DCPPLAN3"
_FIXED = struct.Struct("<8sBI")
_CUT_EVERY = 128  # rows, on average: a head of about ten names for a thousand keys
_MIN_ROWS = 16  # before a new first word of the key cuts as well
_MAX_ROWS = 1024
_NUM_COLUMNS = 4
_COLUMN = struct.Struct("<BI")  # width code, elements
_DTYPES = (np.dtype("u1"), np.dtype("<u2"), np.dtype("<i4"), np.dtype("<i8"))
_BOUNDS = (2**8, 2**16, 2**31, 2**63)
_MAX_ENTRIES = 2  # merged plans of a cache


class PlanFlag(IntFlag):
    """Facts about a plan that need no part of their own."""

    HAS_PATHS = 1  # planner_data is DCP's flattening map; it travels with the keys
    IS_UNUSABLE = 2  # DCP's own plan cache says: take the plan of last time


def content_digest(data: bytes | memoryview) -> bytes:
    """Return the name of some bytes."""
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """A plan as named parts.

    Attributes:
        flags: `PlanFlag` bits.
        num_items: Items of the plan.
        names: The hash of each part.
        head: What `read_head` reads: everything but the parts' bytes.
        bodies: The parts' bytes: items, then runs of the table of keys in order; nothing while
            only the head is known.
    """

    flags: int
    num_items: int
    names: tuple[bytes, ...]
    head: bytes = field(repr=False, compare=False)
    bodies: tuple[bytes, ...] = field(default=(), repr=False, compare=False)

    @classmethod
    def of(
        cls, num_items: int, items: bytes, keys: Iterable[bytes] = (), flags: int = 0
    ) -> PackedPlan:
        """Join parts to a plan."""
        bodies = (items, *keys)
        names = tuple(map(content_digest, bodies))
        head = _FIXED.pack(_MAGIC, flags, num_items) + b"".join(names)
        return cls(int(flags), num_items, names, head, bodies)

    def with_bodies(self, bodies: Iterable[bytes]) -> PackedPlan:
        """Return the plan with the bytes of its parts filled in."""
        return replace(self, bodies=tuple(bodies))

    @property
    def digest(self) -> bytes:
        """The name of the plan; equal for equal plans only."""
        return content_digest(self.head)

    def has(self, flag: PlanFlag) -> bool:
        """Tell whether a flag is set."""
        return bool(self.flags & flag.value)  # of plain integers: ten times as fast


def read_head(data: bytes) -> PackedPlan:
    """Read a plan's head; its parts are named but empty.

    Raises:
        CorruptError: If these are not the bytes of a head.
    """
    if data[:8] != _MAGIC or len(data) < _FIXED.size + DIGEST_BYTES:
        raise CorruptError("these bytes are not a packed plan: its first bytes are wrong")
    if (len(data) - _FIXED.size) % DIGEST_BYTES:
        raise CorruptError(f"a packed plan's head of {len(data)} bytes ends within a name")
    _, flags, num_items = _FIXED.unpack_from(data)
    starts = range(_FIXED.size, len(data), DIGEST_BYTES)
    names = tuple([data[start : start + DIGEST_BYTES] for start in starts])
    return PackedPlan(flags, num_items, names, data)


class KeyKind(IntEnum):
    """What lies under a key."""

    VALUE = 0  # anything that is not a tensor: BYTE_IO
    TENSOR = 1
    PATH = 2  # no item at all: a key of the flattening map only


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
    """

    fqn: str
    kind: KeyKind
    size: tuple[int, ...] = ()
    properties: str = ""
    item_bytes: int = 1
    path: Path | None = None

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
    last = ""
    for at, row in enumerate(rows):
        fqn, num_rows = row.fqn, at - first
        is_new_word = fqn.partition(".")[0] != last.partition(".")[0]
        is_marked = zlib.crc32(fqn.encode("utf-8", "surrogatepass")) % _CUT_EVERY == 0
        is_another, last = fqn != last, fqn
        if num_rows and (
            num_rows >= _MAX_ROWS
            or (num_rows >= _MIN_ROWS and is_new_word)
            or (is_marked and is_another)
        ):
            yield rows[first:at]
            first = at
    if first < len(rows):
        yield rows[first:]


def encode_rows(rows: Sequence[KeyRow]) -> bytes:
    """Turn a run of rows into bytes; equal rows into equal ones."""
    columns = [
        [row.fqn for row in rows],
        [int(row.kind) for row in rows],
        [row.size for row in rows],
        [row.properties for row in rows],
        [row.item_bytes for row in rows],
        [row.path for row in rows],
    ]
    return zlib.compress(json.dumps(columns, separators=(",", ":")).encode(), 6)


def decode_rows(data: bytes) -> list[KeyRow]:
    """Turn bytes into the rows they were made from.

    Raises:
        CorruptError: If these are not the bytes of such rows.
    """
    try:
        return [
            KeyRow(
                fqn,
                KeyKind(kind),
                tuple(size),
                sys.intern(properties),
                item_bytes,
                None if path is None else tuple(path),
            )
            for fqn, kind, size, properties, item_bytes, path in zip(
                *json.loads(zlib.decompress(data)), strict=True
            )
        ]
    except (zlib.error, ValueError, TypeError) as error:
        raise CorruptError(f"a packed plan's table of keys is damaged: {error!r}") from error


@dataclass(frozen=True, slots=True, eq=False)
class SaveColumns:
    """A rank's items, one element per item unless said otherwise.

    Attributes:
        start: First row of the chunk.
        length: Number of its rows.
        box: 0, or the number of its box.
        boxes: Boxes x 2 x later dimensions: their offsets, padded with 0, and sizes, padded
            with 1.
    """

    start: Ints
    length: Ints
    box: Ints
    boxes: Ints


def pack_columns(columns: SaveColumns, rows: Sequence[KeyRow], flags: int = 0) -> PackedPlan:
    """Join a rank's columns and its table of keys to a packed save plan."""
    keys = map(encode_rows, cut_rows(rows))
    return PackedPlan.of(len(columns.start), encode_columns(columns), keys, flags)


def encode_columns(columns: SaveColumns) -> bytes:
    """Turn columns into bytes, each as narrow as it goes; equal columns into equal bytes."""
    heads, raws = [], []
    for column in (columns.start, columns.length, columns.box, columns.boxes):
        code = 0
        if column.size:
            low, high = int(column.min()), int(column.max())
            code = 3 if low < 0 else next(c for c, bound in enumerate(_BOUNDS) if high < bound)
        heads.append(_COLUMN.pack(code, column.size))
        raws.append(column.astype(_DTYPES[code]).tobytes())
    return zlib.compress(b"".join([*heads, *raws]), 1)


def decode_columns(data: bytes, num_items: int) -> SaveColumns:
    """Turn bytes into columns; they are views of one buffer, in the integers of the wire.

    Raises:
        CorruptError: If these are not the bytes of the columns of so many items.
    """
    try:
        raw = zlib.decompress(data)
        at = _NUM_COLUMNS * _COLUMN.size
        found = []
        for code, count in _COLUMN.iter_unpack(raw[:at]):
            found.append(np.frombuffer(raw, _DTYPES[code], count, at))
            at += found[-1].nbytes
        start, length, box, boxes = found
        if at != len(raw) or not len(start) == len(length) == len(box) == num_items:
            raise ValueError(f"{at} of {len(raw)} bytes hold {len(start)} of {num_items} items")
        num_boxes = int(box.max(initial=0))
        shape = (num_boxes, 2, len(boxes) // (2 * num_boxes) if num_boxes else 0)
        return SaveColumns(start, length, box, boxes.reshape(shape))
    except (zlib.error, struct.error, ValueError, IndexError) as error:
        raise CorruptError(f"a packed plan's columns are damaged: {error!r}") from error


T = TypeVar("T")


def cache_key(digests: Sequence[bytes], fingerprint: str) -> bytes:
    """Name what the plans of all ranks lead to.

    Args:
        digests: ``PackedPlan.digest`` per rank of the group, save or load plans.
        fingerprint: Everything else that the result depends on: writer or reader, format
            version, group, options of the merge.
    """
    return content_digest(b"".join([fingerprint.encode(), b"\0", *digests]))


def parts_of(plan: PackedPlan, wanted: Sequence[int]) -> list[bytes]:
    """Return the parts that the coordinator asked a rank for."""
    return [plan.bodies[number] for number in wanted]


@dataclass(frozen=True, slots=True)
class PartRequest:
    """What the coordinator needs to see of the ranks' plans.

    Attributes:
        wanted: Per rank the numbers of the parts that it is to send; a part that several
            ranks have is asked of the first of them only.
    """

    plans: tuple[PackedPlan, ...] = field(repr=False)
    wanted: tuple[tuple[int, ...], ...]
    known: Mapping[bytes, bytes] = field(repr=False)


class PlanCache(Generic[T]):
    """What earlier saves (or loads) planned, by content. Thread-safe.

    The two merged plans that were used last are kept: one of 16 million chunks takes 0.3 GiB,
    and a job alternates between few layouts.

    Args:
        max_part_bytes: Bound on the packed parts kept for ranks whose plan is unchanged.
    """

    def __init__(self, *, max_part_bytes: int = 256 << 20) -> None:
        self._max_part_bytes = max_part_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, T] = OrderedDict()
        self._parts: OrderedDict[bytes, bytes] = OrderedDict()
        self._part_bytes = 0

    @property
    def part_bytes(self) -> int:
        """Bytes of the parts kept."""
        return self._part_bytes

    def find(self, key: bytes) -> T | None:
        """Return what a save with this key had planned; None if there was none."""
        with self._lock:
            return self._entries.get(key)

    def put(self, key: bytes, value: T) -> None:
        """Serve a plan from now on: its save succeeded."""
        with self._lock:
            self._entries[key] = value
            self._entries.move_to_end(key)
            while len(self._entries) > _MAX_ENTRIES:
                self._entries.popitem(last=False)

    def invalidate(self, key: bytes) -> None:
        """Forget a plan, because its save failed.

        Parts stay: they are only ever used under the hash of their content.
        """
        with self._lock:
            self._entries.pop(key, None)

    def request(self, heads: Sequence[bytes]) -> PartRequest:
        """Find out which parts of the ranks' plans are not here yet. Coordinator only.

        Args:
            heads: ``PackedPlan.head`` per rank.
        """
        plans = tuple(read_head(head) for head in heads)
        known: dict[bytes, bytes] = {}
        asked: set[bytes] = set()
        wanted = []
        with self._lock:
            for plan in plans:
                numbers = []
                for number, digest in enumerate(plan.names):
                    if digest in asked or digest in known:
                        continue
                    data = self._parts.get(digest)
                    if data is None:
                        asked.add(digest)
                        numbers.append(number)
                    else:
                        self._parts.move_to_end(digest)
                        known[digest] = data
                wanted.append(tuple(numbers))
        return PartRequest(plans, tuple(wanted), known)

    def assemble(
        self, request: PartRequest, answers: Sequence[Sequence[bytes]]
    ) -> list[PackedPlan]:
        """Put the ranks' plans together and keep their parts. Coordinator only.

        Args:
            request: What was asked.
            answers: Per rank, `parts_of` its plan.

        Raises:
            CorruptError: If a rank did not send what it was asked for.
        """
        data_of = dict(request.known)
        for rank, (plan, numbers, parts) in enumerate(
            zip(request.plans, request.wanted, answers, strict=True)
        ):
            sent = [content_digest(part) for part in parts]
            if sent != [plan.names[number] for number in numbers]:
                raise CorruptError(f"rank {rank} did not send the parts of its plan asked for")
            data_of.update(zip(sent, parts, strict=True))
        self._keep(data_of)
        return [
            plan.with_bodies([data_of[digest] for digest in plan.names]) for plan in request.plans
        ]

    def _keep(self, data_of: Mapping[bytes, bytes]) -> None:
        with self._lock:
            for digest, data in data_of.items():
                if digest not in self._parts:
                    self._part_bytes += len(data)
                    self._parts[digest] = data
            while self._part_bytes > self._max_part_bytes:
                _, data = self._parts.popitem(last=False)
                self._part_bytes -= len(data)
