"""A packed plan on the wire: a head that names its parts by content, then the parts.

All integers are little-endian::

    head:   "DCPPLAN2"  u8 flags  u16 num_parts  u32 num_items
            num_parts x ( u8 kind  u32 stored_bytes  16-byte BLAKE2b of the stored bytes )
    parts:  stored bytes of each part, in that order

Parts that are the same on many ranks (the tables of keys) have the same name on all of
them, so each travels and is decoded once. The digest of the head names the whole plan.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum, IntFlag
from hashlib import blake2b
from typing import TypeAlias

from dcpstore.errors import CorruptError

__all__ = [
    "DIGEST_BYTES",
    "PackedPlan",
    "Part",
    "PartKind",
    "PartName",
    "PlanFlag",
    "content_digest",
    "read_head",
]

DIGEST_BYTES = 16
PartName: TypeAlias = tuple[int, int, bytes]  # kind, stored bytes, digest
_MAGIC = b"DCPPLAN2"
_FIXED = struct.Struct("<8sBHI")
_ENTRY = struct.Struct("<BI16s")


class PlanFlag(IntFlag):
    """Facts about a plan that need no part of their own."""

    HAS_PATHS = 1  # planner_data is DCP's flattening map; it travels with the keys
    HAS_ROW_NUMBERS = 4  # items do not follow the table of keys one by one
    IS_UNUSABLE = 2  # DCP's own plan cache says: take the plan of last time


class PartKind(IntEnum):
    """What a part holds."""

    ROWS = 1  # the rank's items, as columns
    KEYS = 2  # a run of the table of keys; any number of them, in order
    EXTRAS = 3  # pickled planner_data and storage_data that fit no column


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
        bodies: The parts' bytes; or the whole plan's as a single element; or nothing.
    """

    flags: int
    num_items: int
    names: tuple[PartName, ...]
    head: bytes = field(repr=False, compare=False)
    bodies: tuple[bytes | memoryview, ...] = field(default=(), repr=False, compare=False)
    is_whole: bool = field(default=False, repr=False, compare=False)

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

    @classmethod
    def from_bytes(cls, data: bytes) -> PackedPlan:
        """Read a whole plan; it keeps ``data``.

        Raises:
            CorruptError: If these are not the bytes of a plan, or not all of them.
        """
        flags, num_items, names, head = _parse_head(data)
        num_bytes = len(head) + sum([num_bytes for _, num_bytes, _ in names])
        if num_bytes != len(data):
            raise CorruptError(f"a packed plan has {len(data)} bytes, its head says {num_bytes}")
        return cls(flags, num_items, names, head, (data,), is_whole=True)

    def with_bodies(self, bodies: Iterable[bytes | memoryview]) -> PackedPlan:
        """Return the plan with the bytes of its parts filled in."""
        return replace(self, bodies=tuple(bodies), is_whole=False)

    def to_bytes(self) -> bytes:
        """Return head and parts."""
        return bytes(self.bodies[0]) if self.is_whole else b"".join([self.head, *self.bodies])

    @property
    def digest(self) -> bytes:
        """The name of the plan; equal for equal plans only."""
        return content_digest(self.head)

    def body(self, number: int) -> bytes | memoryview:
        """Return the bytes of a part."""
        if not self.is_whole:
            return self.bodies[number]
        at = len(self.head) + sum([num_bytes for _, num_bytes, _ in self.names[:number]])
        return memoryview(self.bodies[0])[at : at + self.names[number][1]]

    def bodies_of(self, kind: PartKind) -> Iterator[bytes | memoryview]:
        """Yield the bytes of the parts of a kind, in order."""
        for number, (part_kind, _, _) in enumerate(self.names):
            if part_kind == kind:
                yield self.body(number)

    def has(self, flag: PlanFlag) -> bool:
        """Tell whether a flag is set."""
        return bool(self.flags & flag.value)  # of plain integers: ten times as fast

    def first_of(self, kind: PartKind) -> bytes | memoryview | None:
        """Return the bytes of the first part of a kind; None if there is none."""
        return next(self.bodies_of(kind), None)


def read_head(data: bytes) -> PackedPlan:
    """Read a plan's head; its parts are named but empty.

    Raises:
        CorruptError: If these bytes do not begin with the head of a plan.
    """
    return PackedPlan(*_parse_head(data))


def _parse_head(data: bytes) -> tuple[int, int, tuple[PartName, ...], bytes]:
    if len(data) < _FIXED.size or data[:8] != _MAGIC:
        raise CorruptError("these bytes are not a packed plan: its first bytes are wrong")
    _, flags, num_parts, num_items = _FIXED.unpack_from(data)
    end = _FIXED.size + num_parts * _ENTRY.size
    if len(data) < end:
        raise CorruptError(f"a packed plan's head has {end} bytes; only {len(data)} are here")
    head = data[:end]
    return flags, num_items, tuple(_ENTRY.iter_unpack(head[_FIXED.size :])), head
