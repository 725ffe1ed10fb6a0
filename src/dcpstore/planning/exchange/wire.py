"""A packed plan on the wire: a head that names its parts by content, then the parts.

All integers are little-endian::

    head:   "DCPPLAN1"  u8 kind  u8 flags  u16 num_parts  u32 num_items
            num_parts x ( u8 kind  u32 stored_bytes  16-byte BLAKE2b of the stored bytes )
    parts:  stored bytes of each part, in that order

Parts that are the same on many ranks (the tables of keys) have the same name on all of
them, so each travels and is decoded once. The digest of the head names the whole plan.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from hashlib import blake2b

from dcpstore.errors import CorruptError

__all__ = [
    "DIGEST_BYTES",
    "PackedPlan",
    "Part",
    "PartKind",
    "PlanFlag",
    "PlanKind",
    "content_digest",
    "read_head",
]

DIGEST_BYTES = 16
_MAGIC = b"DCPPLAN1"
_FIXED = struct.Struct("<8sBBHI")
_ENTRY = struct.Struct("<BI16s")


class PlanKind(IntEnum):
    """Which of DCP's plans this is."""

    SAVE = 1
    LOAD = 2


class PlanFlag(IntFlag):
    """Facts about a plan that need no part of their own."""

    HAS_PATHS = 1  # planner_data is DCP's flattening map; it travels with the keys
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
    """Some bytes of a plan and their name; ``data`` is empty in a head without its parts."""

    kind: int
    num_bytes: int
    digest: bytes
    data: bytes | memoryview = field(repr=False, compare=False)

    @classmethod
    def of(cls, kind: PartKind, data: bytes) -> Part:
        """Name some bytes."""
        return cls(int(kind), len(data), content_digest(data), data)


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """A plan as named parts.

    Attributes:
        kind: Save or load.
        flags: `PlanFlag` bits.
        num_items: Items of the plan.
        parts: Its parts, tables of keys in order.
        head: What `read_head` reads: everything but the parts' bytes.
    """

    kind: int
    flags: int
    num_items: int
    parts: tuple[Part, ...]
    head: bytes = field(repr=False, compare=False)

    @classmethod
    def of(
        cls, kind: PlanKind, flags: PlanFlag, num_items: int, parts: Iterable[Part]
    ) -> PackedPlan:
        """Join parts to a plan."""
        parts = tuple(parts)
        head = _FIXED.pack(_MAGIC, kind, flags, len(parts), num_items) + b"".join(
            _ENTRY.pack(part.kind, part.num_bytes, part.digest) for part in parts
        )
        return cls(int(kind), int(flags), num_items, parts, head)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> PackedPlan:
        """Read a whole plan; its parts are views of ``data``.

        Raises:
            CorruptError: If these are not the bytes of a plan, or not all of them.
        """
        plan, at = _read_head(data)
        view = memoryview(data)
        bodies = []
        for part in plan.parts:
            bodies.append(view[at : at + part.num_bytes])
            at += part.num_bytes
        if at != len(data):
            raise CorruptError(f"a packed plan has {len(data)} bytes, its head says {at}")
        return plan.with_bodies(bodies)

    def with_bodies(self, bodies: Sequence[bytes | memoryview]) -> PackedPlan:
        """Return the plan with the bytes of its parts filled in."""
        parts = tuple(
            Part(part.kind, part.num_bytes, part.digest, body)
            for part, body in zip(self.parts, bodies, strict=True)
        )
        return PackedPlan(self.kind, self.flags, self.num_items, parts, self.head)

    def to_bytes(self) -> bytes:
        """Return head and parts."""
        return b"".join([self.head, *(part.data for part in self.parts)])

    @property
    def digest(self) -> bytes:
        """The name of the plan; equal for equal plans only."""
        return content_digest(self.head)

    def part(self, kind: PartKind) -> Part | None:
        """Return the first part of a kind."""
        return next((part for part in self.parts if part.kind == kind), None)


def read_head(data: bytes | memoryview) -> PackedPlan:
    """Read a plan's head; its parts are named but empty.

    Raises:
        CorruptError: If these bytes do not begin with the head of a plan.
    """
    return _read_head(data)[0]


def _read_head(data: bytes | memoryview) -> tuple[PackedPlan, int]:
    if len(data) < _FIXED.size or bytes(data[:8]) != _MAGIC:
        raise CorruptError("these bytes are not a packed plan: its first bytes are wrong")
    _, kind, flags, num_parts, num_items = _FIXED.unpack_from(data)
    end = _FIXED.size + num_parts * _ENTRY.size
    if len(data) < end:
        raise CorruptError(f"a packed plan's head has {end} bytes; only {len(data)} are here")
    table = data[_FIXED.size : end]
    parts = tuple(Part(*entry, b"") for entry in _ENTRY.iter_unpack(table))
    return PackedPlan(kind, flags, num_items, parts, bytes(data[:end])), end
