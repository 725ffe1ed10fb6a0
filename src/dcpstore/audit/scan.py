"""What an audit finds, and one pass over pieces of objects that finds it.

`take_inventory` tells what lies in a folder: by one listing, or object by object where listing is
refused. A `Scanner` reads many pieces of many objects once, in bounded memory, and looks into
each::

    caller     plans pieces, joins neighbours, takes budget | submits
    workers                                                 | GET, look into each piece

A piece that looks wrong is fetched once more, in case it was damaged on the way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Literal, TypeAlias

from dcpstore.config import ReadConfig
from dcpstore.errors import CheckpointError, ConfigError, CorruptError, NotFoundError, StoreError
from dcpstore.read.pump import Pump
from dcpstore.report import Meter
from dcpstore.store.base import ByteRange, ObjectInfo, Store
from dcpstore.store.budget import ByteBudget, bytes_in_flight
from dcpstore.store.ranges import group
from dcpstore.text import printable

FindingKind: TypeAlias = Literal[
    "missing",
    "truncated",
    "resized",
    "checksum",
    "framing",
    "metadata",
    "incomplete",
    "mismatch",
    "unreadable",
]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a stored checkpoint.

    Attributes:
        kind: ``missing``: an object is gone. ``truncated``: an object ends before bytes that
            the metadata names. ``resized``: an object is longer than it was. ``checksum``:
            bytes are not those that were saved. ``framing``: the bytes around a tensor's
            elements are damaged; stock torch needs them. ``metadata``: the metadata are
            damaged. ``incomplete``: stored chunks do not make up their tensor.
            ``mismatch``: what an object holds is not what the metadata say.
            ``unreadable``: the store refuses to give an object.
        message: What was found, and what was expected.
        key: The object, relative to the checkpoint's folder.
        fqn: The state dict's key, where one is concerned.
        span: Bytes of the object; None where no bytes are concerned.
    """

    kind: FindingKind
    message: str
    key: str | None = None
    fqn: str | None = None
    span: ByteRange | None = None

    def __str__(self) -> str:
        where = [self.key or "the checkpoint"]
        if self.span is not None:
            where.append(f"bytes [{self.span.start}, {self.span.end})")
        if self.fqn is not None:
            where.append(repr(self.fqn))
        return printable(f"{self.kind}: {', '.join(where)}: {self.message}", keep="\n")


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort by object and place; findings that say the same of adjacent bytes become one."""
    merged: list[Finding] = []
    for one in sorted(set(findings), key=_place):
        joined = _joined(merged[-1], one) if merged else None
        if joined is None:
            merged.append(one)
        else:
            merged[-1] = joined
    return tuple(merged)


def _place(one: Finding) -> tuple[str, int, int, str, str, str]:
    start, end = one.span or (-1, -1)
    return one.key or "", start, end, one.fqn or "", one.kind, one.message


def _joined(before: Finding, one: Finding) -> Finding | None:
    """Return one finding for two that say the same of adjacent bytes; None for any other two."""
    if before.span is None or one.span is None or before.span.end != one.span.start:
        return None
    if replace(before, span=one.span) != one:
        return None
    return replace(one, span=ByteRange(before.span.start, one.span.end))


@dataclass(frozen=True, slots=True)
class Inventory:
    """The objects of a folder.

    Attributes:
        objects: By key, at any depth; only those asked for if not `is_listed`.
        refused: Objects that the store refuses to tell of, with its reason.
        is_listed: Whether the store let us list.
    """

    objects: Mapping[str, ObjectInfo]
    refused: Mapping[str, CheckpointError]
    is_listed: bool


def take_inventory(store: Store, needed: Iterable[str], *, max_requests: int) -> Inventory:
    """Look up what is in a folder.

    A listing may be old where a store is lax, so a needed object that it lacks is looked up
    by itself.

    Args:
        store: Rooted at the folder.
        needed: Keys that must be looked up even where listing is refused.
        max_requests: Requests in flight.

    Raises:
        StoreError: If the store fails otherwise than by a refusal.
    """
    found: dict[str, ObjectInfo] = {}
    is_listed = True
    try:
        found.update((info.key, info) for info in store.list())
    except StoreError as error:
        if not error.denied:
            raise
        is_listed = False
    refused: dict[str, CheckpointError] = {}

    def look_up(key: str) -> None:
        try:
            found[key] = store.head(key)
        except NotFoundError:
            pass
        except (ConfigError, StoreError) as error:  # ConfigError: no store has such a key
            if isinstance(error, StoreError) and error.retryable:
                raise
            refused[key] = error

    with ThreadPoolExecutor(max_requests, "dcpstore-audit") as executor:
        list(executor.map(look_up, sorted(set(needed) - found.keys())))
    return Inventory(found, refused, is_listed)


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of an object that can be judged by themselves.

    Attributes:
        key: The object.
        span: Its bytes in the object.
        inspect: Judges the bytes of `span`. Called by any thread, twice if it finds something.
    """

    key: str
    span: ByteRange
    inspect: Callable[[memoryview], Iterable[Finding]]


class Scanner:
    """One pass over pieces of objects.

    Args:
        store: Rooted at the checkpoint's folder.
        config: Bounds of requests and memory.
        meter: Counts the bytes looked at.
    """

    def __init__(self, store: Store, config: ReadConfig, meter: Meter) -> None:
        self._store = store
        self._config = config
        self._meter = meter
        self._budget = ByteBudget(bytes_in_flight(config.budget_bytes))
        self._lock = threading.Lock()
        self._findings: list[Finding] = []
        self._lost_keys: set[str] = set()
        self.max_requests = config.max_requests
        """Requests in flight."""
        self.num_requests = 0
        """Ranged GETs so far, retries not counted."""
        self.fetched_bytes = 0
        """Bytes asked for so far."""

    @property
    def peak_bytes(self) -> int:
        """Most fetched bytes held at a time."""
        return self._budget.peak_bytes

    def run(self, pieces: Iterable[Piece]) -> list[Finding]:
        """Look into all pieces; return what was found, in no order.

        Pieces that follow each other in an object are fetched together, up to
        ``request_bytes``.

        Raises:
            StoreError: If the store fails for good in a way that concerns no single object.
        """
        self._findings = []
        joined = (
            (span.num_bytes, partial(self._serve, key, span, found))
            for key, run in groupby(pieces, attrgetter("key"))
            for span, found in group(
                run, attrgetter("span"), max_bytes=lambda: self._config.request_bytes
            )
        )
        with Pump(self.max_requests, "dcpstore-audit") as pump:
            pump.run(joined, self._budget)
        return self._findings

    def _serve(self, key: str, span: ByteRange, pieces: Sequence[Piece]) -> None:
        try:
            if key in self._lost_keys:
                return
            found = self._look(key, span, pieces)
            if found:  # maybe it was damaged on the way
                found = self._look(key, span, pieces)
            with self._lock:
                self._findings.extend(found)
        except (CorruptError, NotFoundError, StoreError) as error:
            self._give_up(key, span, error)
        finally:
            self._meter.advance(span.num_bytes)

    def _look(self, key: str, span: ByteRange, pieces: Sequence[Piece]) -> list[Finding]:
        with self._lock:
            self.num_requests += 1
            self.fetched_bytes += span.num_bytes
        data = self._store.get_range(key, *span)
        found: list[Finding] = []
        for piece in pieces:
            found += piece.inspect(data[piece.span.start - span.start :][: piece.span.num_bytes])
        return found

    def _give_up(self, key: str, span: ByteRange, error: CheckpointError) -> None:
        """Note that an object is lost; but a store that is down concerns all objects."""
        if isinstance(error, StoreError) and error.retryable:
            raise error
        with self._lock:
            if key not in self._lost_keys:
                self._lost_keys.add(key)
                self._findings.append(loss_of(key, span, error))


def loss_of(key: str, span: ByteRange, error: CheckpointError) -> Finding:
    """Return the finding that an object, or bytes of it, could not be read."""
    if isinstance(error, NotFoundError):
        return Finding("missing", f"it was deleted during the check: {error}", key)
    if isinstance(error, CorruptError):
        return Finding("truncated", str(error), key, span=span)
    return Finding("unreadable", str(error), key, span=span)
