"""Packed plans: a rank's save plan as columns on the wire, and a cache of them by content.

All integers are little-endian::

    head:   "DCPPLAN2"  u8 flags  u16 num_parts  u32 num_items
            num_parts x ( u8 kind  u32 stored_bytes  16-byte BLAKE2b of the stored bytes )
    parts:  stored bytes of each part, in that order

Parts that are the same on many ranks (the tables of keys) have the same name on all of
them, so each travels and is decoded once. The digest of the head names the whole plan.

Most keys are the same on all ranks, a few (a data loader's state) are not. The table of keys is
therefore cut into runs by content, so that a key of one rank changes the name of the run
that it lies in and of no other::

    rank 0:  | model.* run A | model.* run B | optim.* run C | loader.rank_0 |
    rank 1:  | model.* run A | model.* run B | optim.* run C | loader.rank_1 |

Almost every item is a run of whole rows of its tensor, so two numbers place it::

    start, length     first row and number of rows; a 0-d tensor has one row
                      (a value: whether its size is known, and that size in bytes)
    box_*             items that do not fill all later dimensions: where they lie in those

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
                                       cache.put(key, plan), then, once the save is sealed,
                                       cache.confirm(key); cache.invalidate(key) if it failed
"""

from __future__ import annotations

import json
import struct
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

from dcpstore.errors import ConfigError, CorruptError

Path: TypeAlias = tuple[str | int, ...]
Ints: TypeAlias = npt.NDArray[Any]
DIGEST_BYTES = 16
PartName: TypeAlias = tuple[int, int, bytes]  # kind, stored bytes, digest
_MAGIC = b"DCPPLAN2"
_FIXED = struct.Struct("<8sBHI")
_ENTRY = struct.Struct("<BI16s")
_CUT_EVERY = 128  # rows, on average: a head of about ten names for a thousand keys
_MIN_ROWS = 16  # before a new first word of the key cuts as well
_MAX_ROWS = 1024
_NUM_COLUMNS = struct.Struct("<B")
_COLUMN = struct.Struct("<BI")  # width code, elements
_DTYPES = (np.dtype("u1"), np.dtype("<u2"), np.dtype("<i4"), np.dtype("<i8"))
_BOUNDS = (2**8, 2**16, 2**31, 2**63)


class PlanFlag(IntFlag):
    """Facts about a plan that need no part of their own."""

    HAS_PATHS = 1  # planner_data is DCP's flattening map; it travels with the keys
    HAS_ROW_NUMBERS = 4  # items do not follow the table of keys one by one
    IS_UNUSABLE = 2  # DCP's own plan cache says: take the plan of last time


class PartKind(IntEnum):
    """What a part holds."""

    ROWS = 1  # the rank's items, as columns
    KEYS = 2  # a run of the table of keys; any number of them, in order


def content_digest(data: bytes | memoryview) -> bytes:
    """Return the name of some bytes."""
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Part:
    """Some bytes of a plan and their name."""

    name: PartName
    data: bytes | memoryview = field(repr=False)

    @classmethod
    def of(cls, kind: PartKind, data: bytes) -> Part:
        """Name some bytes."""
        return cls((int(kind), len(data), content_digest(data)), data)


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """A plan as named parts.

    Attributes:
        flags: `PlanFlag` bits.
        num_items: Items of the plan.
        names: Its parts, tables of keys in order; plain tuples, because a coordinator
            holds them by the hundred thousand.
        head: What `read_head` reads: everything but the parts' bytes.
        bodies: The parts' bytes; nothing while only the head is known.
    """

    flags: int
    num_items: int
    names: tuple[PartName, ...]
    head: bytes = field(repr=False, compare=False)
    bodies: tuple[bytes | memoryview, ...] = field(default=(), repr=False, compare=False)

    @classmethod
    def of(cls, flags: PlanFlag, num_items: int, parts: Iterable[Part]) -> PackedPlan:
        """Join parts to a plan."""
        parts = tuple(parts)
        names = tuple(part.name for part in parts)
        head = _FIXED.pack(_MAGIC, flags, len(parts), num_items) + b"".join(
            _ENTRY.pack(*part.name) for part in parts
        )
        bodies = tuple(part.data for part in parts)
        return cls(int(flags), num_items, names, head, bodies)

    def with_bodies(self, bodies: Iterable[bytes | memoryview]) -> PackedPlan:
        """Return the plan with the bytes of its parts filled in."""
        return replace(self, bodies=tuple(bodies))

    @property
    def digest(self) -> bytes:
        """The name of the plan; equal for equal plans only."""
        return content_digest(self.head)

    def bodies_of(self, kind: PartKind) -> Iterator[bytes | memoryview]:
        """Yield the bytes of the parts of a kind, in order."""
        for (part_kind, _, _), body in zip(self.names, self.bodies, strict=True):
            if part_kind == kind:
                yield body

    def has(self, flag: PlanFlag) -> bool:
        """Tell whether a flag is set."""
        return bool(self.flags & flag.value)  # of plain integers: ten times as fast

    def first_of(self, kind: PartKind) -> bytes | memoryview | None:
        """Return the bytes of the first part of a kind; None if there is none."""
        return next(self.bodies_of(kind), None)


def read_head(data: bytes) -> PackedPlan:
    """Read a plan's head; its parts are named but empty.

    Raises:
        CorruptError: If these are not the bytes of a head.
    """
    if len(data) < _FIXED.size or data[:8] != _MAGIC:
        raise CorruptError("these bytes are not a packed plan: its first bytes are wrong")
    _, flags, num_parts, num_items = _FIXED.unpack_from(data)
    end = _FIXED.size + num_parts * _ENTRY.size
    if len(data) != end:
        raise CorruptError(f"a packed plan's head has {end} bytes; {len(data)} are here")
    return PackedPlan(flags, num_items, tuple(_ENTRY.iter_unpack(data[_FIXED.size :])), data)


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
    tensors = dict.fromkeys((row.properties, row.item_bytes) for row in rows)
    number_of = {tensor: number for number, tensor in enumerate(tensors)}
    columns = {
        "tensors": list(number_of),
        "fqn": [row.fqn for row in rows],
        "kind": [int(row.kind) for row in rows],
        "size": [row.size for row in rows],
        "tensor": [number_of[row.properties, row.item_bytes] for row in rows],
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


@dataclass(frozen=True, slots=True, eq=False)
class SaveColumns:
    """A rank's items, one element per item unless said otherwise.

    Attributes:
        start: First row of the chunk.
        length: Number of its rows.
        row: The item's row in the table of keys; None where item i has row i.
        box_item: Ascending positions of the items that are boxes.
        box_offsets: Per box, its offsets in the dimensions after the first, padded with 0.
        box_sizes: Per box, its sizes there, padded with 1.
    """

    start: Ints
    length: Ints
    row: Ints | None
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


def pack_columns(columns: SaveColumns, keys: list[Part], flags: PlanFlag | int = 0) -> PackedPlan:
    """Join a rank's columns and its table of keys to a packed save plan."""
    flags = PlanFlag(flags)
    if columns.row is not None:
        flags |= PlanFlag.HAS_ROW_NUMBERS
    parts = [Part.of(PartKind.ROWS, encode_columns(columns)), *keys]
    return PackedPlan.of(flags, columns.num_items, parts)


def encode_columns(columns: SaveColumns) -> bytes:
    """Turn columns into bytes; equal columns into equal ones."""
    return pack_ints(
        columns.start,
        columns.length,
        np.empty(0, np.int64) if columns.row is None else columns.row,
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
        start, length, row, box_item, offsets, sizes = unpack_ints(data)
        if len(start) != num_items or len(row) not in (0, num_items):
            raise ValueError(f"{len(start)} items, the head says {num_items}")
        num_boxes = len(box_item)
        shape = (num_boxes, len(offsets) // num_boxes if num_boxes else 0)
        return SaveColumns(
            start=start,
            length=length,
            row=row if len(row) else None,
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


T = TypeVar("T")


def cache_key(digests: Sequence[bytes], fingerprint: str) -> bytes:
    """Name what the plans of all ranks lead to.

    Args:
        digests: ``PackedPlan.digest`` per rank of the group, save or load plans.
        fingerprint: Everything else that the result depends on: writer or reader, format
            version, group, options of the merge.

    Raises:
        ConfigError: If something else than a digest is among them.
    """
    if any(len(digest) != DIGEST_BYTES for digest in digests):
        raise ConfigError(f"a plan's digest has {DIGEST_BYTES} bytes")
    return content_digest(b"".join([fingerprint.encode(), b"\0", *digests]))


def parts_of(plan: PackedPlan, wanted: Sequence[int]) -> list[bytes]:
    """Return the parts that the coordinator asked a rank for."""
    return [bytes(plan.bodies[number]) for number in wanted]


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

    An entry is served only once the save that made it was confirmed.

    Args:
        max_entries: Merged plans kept; the least recently used goes first. A merged plan of
            16 million chunks takes 0.3 GiB, and a job alternates between few layouts.
        max_part_bytes: Bound on the packed parts kept for ranks whose plan is unchanged.
    """

    def __init__(self, *, max_entries: int = 2, max_part_bytes: int = 256 << 20) -> None:
        if max_entries < 1 or max_part_bytes < 0:
            raise ConfigError("a plan cache keeps at least one entry, and no negative bytes")
        self._max_entries = max_entries
        self._max_part_bytes = max_part_bytes
        self._lock = threading.Lock()
        self._pending: OrderedDict[bytes, T] = OrderedDict()
        self._entries: OrderedDict[bytes, T] = OrderedDict()
        self._parts: OrderedDict[bytes, bytes] = OrderedDict()
        self._part_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def part_bytes(self) -> int:
        """Bytes of the parts kept."""
        return self._part_bytes

    def find(self, key: bytes) -> T | None:
        """Return what a confirmed save with this key had planned; None if there was none."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key]

    def put(self, key: bytes, value: T) -> None:
        """Keep a plan for the time when its save is confirmed."""
        with self._lock:
            self._pending[key] = value
            self._pending.move_to_end(key)
            while len(self._pending) > self._max_entries:
                self._pending.popitem(last=False)

    def confirm(self, key: bytes) -> None:
        """Serve a plan from now on: its save succeeded. Unknown keys are ignored."""
        with self._lock:
            if key not in self._pending:
                return
            self._entries[key] = self._pending.pop(key)
            self._entries.move_to_end(key)
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)

    def invalidate(self, key: bytes | None = None) -> None:
        """Forget a plan, because its save failed; without a key, all of them.

        Parts stay: they are only ever used under the hash of their content.
        """
        with self._lock:
            for entries in (self._pending, self._entries):
                if key is None:
                    entries.clear()
                else:
                    entries.pop(key, None)

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
                for number, (_, _, digest) in enumerate(plan.names):
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
            if sent != [plan.names[number][2] for number in numbers]:
                raise CorruptError(f"rank {rank} did not send the parts of its plan asked for")
            data_of.update(zip(sent, parts, strict=True))
        self._keep(data_of)
        return [
            plan.with_bodies([data_of[digest] for _, _, digest in plan.names])
            for plan in request.plans
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
