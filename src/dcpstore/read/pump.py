"""Whether fetched bytes are those that were saved.

Carry out a read plan: concurrent ranged GETs, verified, copied at most once.

::

    caller     resolve, check, plan | submit requests under the byte budget | commit targets
    workers                         | GET, verify blocks, copy into target  |
                                    | or GET into the target, verify there  |

Only the workers touch the store and only the caller touches the planner.
"""

from __future__ import annotations

import io
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from dcpstore.config import ReadConfig
from dcpstore.errors import CheckpointError, CorruptError, NotFoundError
from dcpstore.format.boxes import spacing
from dcpstore.format.checksum import find_bad_block
from dcpstore.format.dtypes import item_bytes
from dcpstore.format.manifest import StoredItem
from dcpstore.read.plan import Piece, Request, join_pieces, plan_pieces
from dcpstore.read.records import decode, decode_tensor, is_worth_placing, place
from dcpstore.read.targets import (
    MOST_LANDING_BYTES,
    Landing,
    Slot,
    Target,
    copy_decoded,
    copy_inline,
    copy_piece,
    make_slots,
    needed_bytes,
    plan_landings,
    resolve_targets,
    window,
)
from dcpstore.report import Meter
from dcpstore.store.base import FillsMemory, Store
from dcpstore.store.budget import ByteBudget, Cancelled, FlightWindow, bytes_in_flight
from dcpstore.store.hedge import RangeHedge
from dcpstore.text import collector_paused

T = TypeVar("T")
Content: TypeAlias = memoryview | tuple[memoryview, ...]
"""Bytes in one piece of memory, or in several behind each other."""


def find_corruption(
    url: str, request: Request, contents: Iterable[Content], slots: Sequence[Slot]
) -> CorruptError | None:
    """Check the pieces of a request block by block, where they have checksums.

    Args:
        url: Of the checkpoint, for the message.
        request: What was fetched.
        contents: The bytes of each piece's ``fetch`` range.
        slots: The targets, by number.

    Returns:
        An error that names the first block that is wrong; None if all are right.
    """
    for piece, content in zip(request.pieces, contents, strict=True):
        slot = slots[piece.slot]
        item = slot.item
        if item.checksums is None:
            continue
        first = (piece.fetch.start - item.payload.start) // item.block_bytes
        bad = find_bad_block(content, first, item.checksums, item.block_bytes)
        if bad is not None:
            start = item.payload.start + bad * item.block_bytes
            end = min(start + item.block_bytes, item.payload.end)
            fqn = slot.targets[0].fqn
            return CorruptError(
                f"{url}: object {request.key}, bytes [{start}, {end}) of {fqn!r} are not the"
                " bytes that were saved (CRC32C differs)",
                key=request.key,
                start=start,
                end=end,
                fqn=fqn,
            )
    return None


logger = logging.getLogger(__name__)


def _hedge(store: Store, config: ReadConfig, budget: ByteBudget) -> RangeHedge | None:
    is_distant = not store.url.startswith(("file://", "memory://"))
    if not (is_distant and config.hedge_share):
        return None
    return RangeHedge(
        store, max_requests=config.max_requests, max_share=config.hedge_share, budget=budget
    )


@dataclass(slots=True)
class ReadStats:
    """What one rank's load did.

    Attributes:
        num_targets: Read items satisfied.
        num_inline: How many of them came from the manifest, without a request.
        num_requests: Ranged GETs of data objects, retries not counted.
        num_hedged: How many of them asked again for a range whose answer was late.
        needed_bytes: Bytes of the elements wanted.
        fetched_bytes: Bytes asked for.
        received_bytes: Bytes that other ranks fetched and sent here.
        peak_bytes: Most fetched bytes held at a time.
    """

    num_targets: int = 0
    num_inline: int = 0
    num_requests: int = 0
    num_hedged: int = 0
    needed_bytes: int = 0
    fetched_bytes: int = 0
    received_bytes: int = 0
    peak_bytes: int = 0


class ReadJob:
    """One rank's part of one load.

    Args:
        store: Rooted at the checkpoint's folder.
        config: Sizes and bounds.
        metadata: Of the checkpoint.
        items: Where everything lies.
        registry: DCP's extension registry; None for torch's own.
        meter: Counts the bytes delivered.
    """

    def __init__(
        self,
        store: Store,
        config: ReadConfig,
        metadata: Metadata,
        items: Mapping[MetadataIndex, StoredItem],
        registry: Any = None,
        meter: Meter | None = None,
    ) -> None:
        self._store = store
        self._config = config
        self._metadata = metadata
        self._items = items
        self._registry = registry
        self._meter = meter or Meter("load")
        # Two at a time fit: one travels between ranks while the next is fetched.
        self._request_bytes = min(config.request_bytes, config.budget_bytes // 2)
        self._budget = ByteBudget(
            bytes_in_flight(config.budget_bytes), FlightWindow(self._request_bytes)
        )
        self._executor = ThreadPoolExecutor(config.max_requests, "dcpstore-read")
        self._hedge = _hedge(store, config, self._budget)
        self._landings = FlightWindow(MOST_LANDING_BYTES)
        # What lands takes little memory: this bounds what is asked for at a time.
        self._flight = ByteBudget(config.max_requests * MOST_LANDING_BYTES, self._landings)
        self._failed = threading.Event()
        self._error: BaseException | None = None
        self._slots: list[Slot] = []
        self.pieces: dict[str, list[Piece]] = {}
        """What is still to be fetched, by object."""
        self._done: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        self._num_touched = 0
        self._is_inference = torch.is_inference_mode_enabled()
        self.stats = ReadStats()

    def __enter__(self) -> ReadJob:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._failed.set()
        self._executor.shutdown(wait=True)
        if self._hedge is not None:
            self._hedge.close()
            self.stats.num_hedged = self._hedge.num_again
            self.stats.num_requests += self._hedge.num_again
            self.stats.fetched_bytes += self._hedge.again_bytes
        self.stats.peak_bytes = max(self.stats.peak_bytes, self._budget.peak_bytes)
        if self._num_touched and isinstance(error, CheckpointError):
            note = "targets already hold loaded values: load again, or do not use them"
            error.args = (f"{error.message}. Some of the {self.stats.num_targets} {note}",)

    def run(self, read_items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        """Load all items. Returns when every target holds its values."""
        self.prepare(read_items, planner)
        self.fetch_rest(planner)

    def prepare(self, read_items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        """Resolve and check the targets, load what needs no request, plan the rest.

        Raises:
            IncompatibleError: If a target does not fit; nothing was changed.
        """
        with collector_paused():
            self._prepare(read_items, planner)

    def _prepare(self, read_items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        targets = resolve_targets(
            read_items, planner, self._items, self._metadata, self._config.casts
        )
        self.stats.num_targets = len(targets)
        self._place_large_records(targets)
        self._slots = make_slots(self._load_inline(targets, planner))
        pieces = plan_pieces(
            (slot.want(number) for number, slot in enumerate(self._slots)),
            request_bytes=self._request_bytes,
            join_gap_bytes=self._config.join_gap_bytes,
            verify=self._config.verify,
        )
        self.pieces = pieces.by_key
        self.stats.needed_bytes += pieces.needed_bytes
        self._meter.expect(pieces.needed_bytes)
        for number, slot in enumerate(self._slots):
            slot.missing = pieces.per_slot[number]
            if slot.missing == 0:  # no elements, hence no request
                self._finish(slot, planner)

    # --- foreign records -----------------------------------------------------------

    def _place_large_records(self, targets: list[Target]) -> None:
        """Find out where the payload of large foreign records starts, one small GET each."""
        unknown = {(t.item.key, t.item.record): t.item for t in targets if is_worth_placing(t.item)}
        found = list(self._executor.map(partial(place, self._store), unknown.values()))
        placed = {place: item for place, (item, _) in zip(unknown, found, strict=True)}
        for target in targets:
            target.item = placed.get((target.item.key, target.item.record), target.item)
        self.stats.num_requests += sum(len(sizes) for _, sizes in found)
        self.stats.fetched_bytes += sum(sum(sizes) for _, sizes in found)

    # --- inline ----------------------------------------------------------------------

    def _load_inline(self, targets: list[Target], planner: LoadPlanner) -> list[Target]:
        """Load what the manifest holds; return the targets that need requests."""
        remote = []
        for target in targets:
            item = target.item
            if item.inline is None:
                remote.append(target)
                continue
            if target.tensor is None:
                planner.load_bytes(target.read_item, io.BytesIO(item.inline))
            elif item.kind == "raw":
                copy_inline(item, item.inline, target)
            else:
                url = self._store.url
                copy_decoded(decode_tensor(item, item.inline, url, target.fqn), target)
            self._num_touched += 1
            self.stats.num_inline += 1
            self._commit(target, planner)
        return remote

    # --- requests --------------------------------------------------------------------

    def spacing(self, piece: Piece) -> tuple[int, int]:
        """Return how many bytes of a piece's range are wanted every how many; most often all."""
        num_bytes, item = piece.fetch.num_bytes, self._slots[piece.slot].item
        if piece.box is None or piece.is_flat or item.checksums is not None:
            return num_bytes, num_bytes
        return spacing(item.sizes, piece.box.sizes, item_bytes(item.dtype)) or (
            num_bytes,
            num_bytes,
        )

    def note_held(self, num_bytes: int) -> None:
        """Count bytes that are held outside the budget's own book."""
        self.stats.peak_bytes = max(self.stats.peak_bytes, num_bytes)

    def fetch(self, request: Request, take: Callable[[memoryview], T]) -> Future[T]:
        """Begin to fetch a range for this rank and others.

        Args:
            request: With the pieces of this rank, which are delivered.
            take: Given the bytes, verified where this rank can tell.
        """
        self._count(request)
        return self._executor.submit(self._fetch, request, take)

    def _fetch(self, request: Request, take: Callable[[memoryview], T]) -> T:
        data = self._get_verified(request)
        self._deliver(request, data)
        return take(data)

    def deliver(self, contents: Iterable[tuple[Request, memoryview]]) -> Future[None]:
        """Begin to verify bytes that another rank fetched, and to copy them to their targets."""
        return self._executor.submit(self._deliver_all, contents)

    def _deliver_all(self, contents: Iterable[tuple[Request, memoryview]]) -> None:
        for request, data in contents:
            self._raise_if_bad(request, data)
            self._deliver(request, data)

    def fetch_rest(self, planner: LoadPlanner) -> None:
        """Fetch and deliver every piece that was not taken out, and commit what is complete."""
        requests = join_pieces(
            self.pieces,
            request_bytes=self._request_bytes,
            join_gap_bytes=self._config.join_gap_bytes,
        )
        self.pieces = {}
        futures = []
        try:
            for one in self._plan_landings(requests):
                futures.append(self._submit(one))
                self.commit_complete(planner)
        except Cancelled:
            pass
        wait(futures)
        if self._error is not None:
            raise self._error
        self.commit_complete(planner)

    def _plan_landings(self, requests: Sequence[Request]) -> Iterable[Request | Landing]:
        if not self._store.capabilities.fills_memory:
            return requests
        return plan_landings(
            requests,
            self._slots,
            num_in_flight=partial(self._landings.num_requests, self._config.max_requests),
            least_bytes=self._request_bytes,
        )

    def _submit(self, one: Request | Landing) -> Future[None]:
        """Begin a request as soon as there is room for it."""
        if isinstance(one, Landing):
            request, memory_bytes = one.request, one.scratch_bytes
            self._flight.acquire(request.range.num_bytes, cancelled=self._failed.is_set)
        else:
            request, memory_bytes = one, one.range.num_bytes
        self._count(request)
        self._budget.acquire(memory_bytes, cancelled=self._failed.is_set)
        return self._executor.submit(self._serve, one, memory_bytes)

    def _count(self, request: Request) -> None:
        self.stats.num_requests += 1
        self.stats.fetched_bytes += request.range.num_bytes

    def _serve(self, one: Request | Landing, memory_bytes: int) -> None:
        try:
            if not self._failed.is_set():
                if isinstance(one, Landing):
                    self._land(one)
                else:
                    self._deliver(one, self._get_verified(one))
        except BaseException as error:  # noqa: BLE001 - kept, and raised again by the caller
            if not self._failed.is_set():
                self._error = error
            self._failed.set()
        finally:
            self._budget.release(memory_bytes)
            if isinstance(one, Landing):
                self._flight.release(one.request.range.num_bytes)

    def _land(self, landing: Landing) -> None:
        """Receive a request into its targets and check it there."""
        error = self._fill(landing)
        if error is not None:
            self._warn_of(error)
            error = self._fill(landing)
        if error is not None:
            raise error
        for piece in landing.request.pieces:
            self._arrived(piece)

    def _fill(self, landing: Landing) -> CorruptError | None:
        request, destination = landing.request, landing.open()
        store = cast("FillsMemory", self._hedge or self._store)
        try:
            with self._asking(request, self._flight):
                store.fill(request.key, request.range.start, destination)
        finally:
            if destination.was_written:  # never write an unchanged count: others count too
                self._num_touched += 1
        landing.note_written()
        return self._find_corruption(request, landing.contents)

    def _get_verified(self, request: Request) -> memoryview:
        """Fetch a request's bytes and check them; a bad block gets one second chance."""
        data = self._get(request)
        error = self._find_corruption(request, _contents(request, data))
        if error is not None:
            self._warn_of(error)
            data = self._get(request)
            self._raise_if_bad(request, data)
        return data

    def _warn_of(self, error: CorruptError) -> None:
        logger.warning("%s; fetching it again in case it was damaged on the way", error)

    def _get(self, request: Request) -> memoryview:
        with self._asking(request, self._budget):
            return (self._hedge or self._store).get_range(request.key, *request.range)

    @contextmanager
    def _asking(self, request: Request, budget: ByteBudget) -> Iterator[None]:
        began = monotonic()
        try:
            yield
        except NotFoundError as error:
            raise NotFoundError(
                f"{error.message}. The checkpoint's metadata names it: it was deleted since, or"
                " another save replaced the checkpoint while this load ran. Load again"
            ) from error
        budget.note(request.range.num_bytes, monotonic() - began)

    def _raise_if_bad(self, request: Request, data: memoryview) -> None:
        error = self._find_corruption(request, _contents(request, data))
        if error is not None:
            raise error

    def _find_corruption(
        self, request: Request, contents: Iterable[Content]
    ) -> CorruptError | None:
        if not self._config.verify:
            return None
        return find_corruption(self._store.url, request, contents, self._slots)

    def _deliver(self, request: Request, data: memoryview) -> None:
        """Copy a request's verified bytes to whoever wants them."""
        with torch.inference_mode(self._is_inference):
            for piece in request.pieces:
                slot = self._slots[piece.slot]
                if piece.box is not None:
                    self._num_touched += 1
                    copy_piece(piece, window(data, request, piece.fetch), slot)
                else:
                    slot.collect(piece, window(data, request, piece.span))
                self._arrived(piece)

    def _arrived(self, piece: Piece) -> None:
        """Count a piece that is where it belongs, and complete its target if it was the last."""
        slot = self._slots[piece.slot]
        self._meter.advance(needed_bytes(piece, slot.item))
        if slot.is_complete_after_one_more():
            if piece.box is None:
                self._num_touched += 1
                decode(slot, self._store.url, self._registry)
            self._done.put(slot)

    # --- the caller's side ---------------------------------------------------------------

    def commit_complete(self, planner: LoadPlanner) -> None:
        """Tell the planner of every target that is complete. In the caller's thread."""
        while True:
            try:
                slot = self._done.get_nowait()
            except queue.Empty:
                return
            self._finish(slot, planner)

    def _finish(self, slot: Slot, planner: LoadPlanner) -> None:
        for target in slot.targets:
            if target.tensor is None:
                planner.load_bytes(target.read_item, io.BytesIO(slot.loaded or b""))
            self._commit(target, planner)

    def _commit(self, target: Target, planner: LoadPlanner) -> None:
        if target.read_item.type != LoadItemType.BYTE_IO and target.tensor is not None:
            planner.commit_tensor(target.read_item, target.tensor)
        target.tensor = None


def _contents(request: Request, data: memoryview) -> Iterator[memoryview]:
    return (window(data, request, piece.fetch) for piece in request.pieces)
