"""A packed plan on the wire: a head that names its parts by content, then the parts.

All integers are little-endian::

    head:   "DCPPLAN2"  u8 flags  u16 num_parts  u32 num_items
            num_parts x ( u8 kind  u32 stored_bytes  16-byte BLAKE2b of the stored bytes )
    parts:  stored bytes of each part, in that order

Parts that are the same on many ranks (the tables of keys) have the same name on all of
them, so each travels and is decoded once. The digest of the head names the whole plan.

Plans of earlier saves, found by content.

A key is made of the names of all ranks' packed plans, which are hashes of all that they
hold: item order, keys, sizes, dtypes, chunks, planner and storage data, and their number.
Nothing can change and still hit. What does not lie in the plans (writer, format, options)
goes into the fingerprint. Nothing here is global: whoever saves owns a cache::

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

import struct
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, IntFlag
from hashlib import blake2b
from typing import Generic, TypeAlias, TypeVar

from dcpstore.errors import ConfigError, CorruptError

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
    return [bytes(plan.body(number)) for number in wanted]


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
