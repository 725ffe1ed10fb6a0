"""What an audit found wrong: each finding with its object, key and byte range.

What lies in a folder: by one listing, or object by object where listing is refused.

Read many pieces of many objects once, in bounded memory, and look into each.

::

    caller     plans pieces, joins neighbours, takes budget | submits
    workers                                                 | GET, look into each piece

A piece that looks wrong is fetched once more, in case it was damaged on the way.

What a checkpoint of a kind must hold, and how its bytes can be judged.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeAlias

from dcpstore.config import ReadConfig
from dcpstore.errors import CheckpointError, ConfigError, CorruptError, NotFoundError, StoreError
from dcpstore.report import Meter
from dcpstore.store.base import ObjectInfo, Store
from dcpstore.store.budget import ByteBudget, Cancelled, bytes_in_flight
from dcpstore.store.ranges import ByteRange
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
        if merged and _continues(merged[-1], one):
            assert merged[-1].span is not None
            assert one.span is not None
            span = ByteRange(merged[-1].span.start, one.span.end)
            merged[-1] = replace(merged[-1], span=span)
        else:
            merged.append(one)
    return tuple(merged)


def _place(one: Finding) -> tuple[str, int, int, str, str, str]:
    start, end = one.span or (-1, -1)
    return one.key or "", start, end, one.fqn or "", one.kind, one.message


def _continues(before: Finding, one: Finding) -> bool:
    if before.span is None or one.span is None or before.span.end != one.span.start:
        return False
    return (before.kind, before.key, before.fqn, before.message) == (
        one.kind,
        one.key,
        one.fqn,
        one.message,
    )


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


class Piece(Protocol):
    """Bytes of an object that can be judged by themselves."""

    @property
    def key(self) -> str:
        """The object."""

    @property
    def span(self) -> ByteRange:
        """Its bytes in the object."""

    def inspect(self, data: memoryview) -> Iterable[Finding]:
        """Judge the bytes of `span`. Called by any thread, twice if it finds something."""


@dataclass(frozen=True, slots=True)
class ScanStats:
    """What a scan did.

    Attributes:
        num_requests: Ranged GETs, retries not counted.
        fetched_bytes: Bytes asked for.
        peak_bytes: Most fetched bytes held at a time.
    """

    num_requests: int
    fetched_bytes: int
    peak_bytes: int


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
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self._findings: list[Finding] = []
        self._lost_keys: set[str] = set()
        self._num_requests = 0
        self._fetched_bytes = 0

    @property
    def max_requests(self) -> int:
        """Requests in flight."""
        return self._config.max_requests

    @property
    def stats(self) -> ScanStats:
        """What was done so far."""
        return ScanStats(self._num_requests, self._fetched_bytes, self._budget.peak_bytes)

    def run(self, pieces: Iterable[Piece]) -> list[Finding]:
        """Look into all pieces; return what was found, in no order.

        Pieces that follow each other in an object are fetched together, up to
        ``request_bytes``.

        Raises:
            StoreError: If the store fails for good in a way that concerns no single object.
        """
        self._findings = []
        executor = ThreadPoolExecutor(self._config.max_requests, "dcpstore-audit")
        try:
            for window in _join(pieces, self._config.request_bytes):
                self._submit(executor, window)
        except Cancelled:
            pass
        except BaseException:
            self._stopped.set()
            raise
        finally:
            executor.shutdown(wait=True)
        if self._error is not None:
            raise self._error
        return self._findings

    def _submit(self, executor: ThreadPoolExecutor, window: list[Piece]) -> None:
        num_bytes = window[-1].span.end - window[0].span.start
        self._budget.acquire(num_bytes, cancelled=self._stopped.is_set)
        executor.submit(self._serve, window, num_bytes)

    def _serve(self, window: list[Piece], num_bytes: int) -> None:
        try:
            if not self._stopped.is_set() and window[0].key not in self._lost_keys:
                found = self._look(window) and self._look(window)
                with self._lock:
                    self._findings.extend(found)
        except (CorruptError, NotFoundError, StoreError) as error:
            self._give_up(window, error)
        except BaseException as error:  # noqa: BLE001 - kept, and raised again by the caller
            self._stop(error)
        finally:
            self._meter.advance(num_bytes)
            self._budget.release(num_bytes)

    def _look(self, window: list[Piece]) -> list[Finding]:
        start, end = window[0].span.start, window[-1].span.end
        with self._lock:
            self._num_requests += 1
            self._fetched_bytes += end - start
        data = self._store.get_range(window[0].key, start, end)
        found: list[Finding] = []
        for piece in window:
            found += piece.inspect(data[piece.span.start - start : piece.span.end - start])
        return found

    def _give_up(self, window: list[Piece], error: CheckpointError) -> None:
        """Note that an object is lost; but a store that is down concerns all objects."""
        if isinstance(error, StoreError) and error.retryable:
            self._stop(error)
            return
        key = window[0].key
        with self._lock:
            if key in self._lost_keys:
                return
            self._lost_keys.add(key)
            span = ByteRange(window[0].span.start, window[-1].span.end)
            self._findings.append(loss_of(key, span, error))

    def _stop(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
        self._stopped.set()


def loss_of(key: str, span: ByteRange, error: CheckpointError) -> Finding:
    """Return the finding that an object, or bytes of it, could not be read."""
    if isinstance(error, NotFoundError):
        return Finding("missing", f"it was deleted while it was looked at: {error}", key)
    if isinstance(error, CorruptError):
        return Finding("truncated", str(error), key, span=span)
    return Finding("unreadable", str(error), key, span=span)


def _join(pieces: Iterable[Piece], request_bytes: int) -> Iterator[list[Piece]]:
    """Put pieces that touch into one request, as long as it stays small enough."""
    window: list[Piece] = []
    for piece in pieces:
        if window and not _fits(window, piece, request_bytes):
            yield window
            window = []
        window.append(piece)
    if window:
        yield window


def _fits(window: list[Piece], piece: Piece, request_bytes: int) -> bool:
    first, last = window[0], window[-1]
    return (
        piece.key == first.key
        and piece.span.start == last.span.end
        and piece.span.end - first.span.start <= request_bytes
    )


class Contents(Protocol):
    """The contents of one folder, as its metadata tell them."""

    @property
    def layout(self) -> str:
        """``"dcpstore"``, ``"dcp"`` or ``"safetensors"``."""

    @property
    def num_keys(self) -> int:
        """Keys of the state dict."""

    @property
    def num_items(self) -> int:
        """Stored chunks and values."""

    @property
    def data_keys(self) -> frozenset[str]:
        """Objects that must be there, the metadata left out."""

    @property
    def metadata_keys(self) -> frozenset[str]:
        """Objects that hold the metadata."""

    @property
    def checked_bytes(self) -> int:
        """Bytes compared so far with a checksum or with what they must be."""

    def examine(self, store: Store, inventory: Inventory, scanner: Scanner) -> Iterator[Finding]:
        """Compare everything with the metadata; yield what is wrong, in no order."""

    def notes(self) -> Iterator[str]:
        """Yield what was not checked and why, and what is unusual."""
