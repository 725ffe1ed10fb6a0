"""Plans of earlier saves, found by content.

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

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dcpstore.errors import ConfigError, CorruptError
from dcpstore.planning.exchange.wire import DIGEST_BYTES, PackedPlan, content_digest, read_head

__all__ = ["PartRequest", "PlanCache", "cache_key", "parts_of"]

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
