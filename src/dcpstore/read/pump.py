"""The pump: concurrent ranged reads in bounded memory; and a load, which is its main user.

A `Pump` carries out calls in threads. Whoever gives it calls says how many bytes each holds, and
whether the calls run as soon as their bytes fit a budget (`Pump.run`) or ahead of a caller who
takes what they return in order (`Pump.in_order`). The first error stops the pump and is raised
in the caller's thread.

A `ReadJob` carries out a read plan: verified, copied at most once::

    caller     resolve, check, plan | submit requests under the byte budget     | commit targets
    workers                         | GET into the target, verify there         |
                                    | or GET into a slab, verify, copy, reuse   |
                                    | or GET, verify, collect a record          |

Only the workers touch the store and only the caller touches the planner.

Targets on a CUDA device get their bytes out of page-locked slabs, on a stream of the load's own.
A worker waits for what it queued before it gives its slab back, and before the planner hears of
the target.
"""

from __future__ import annotations

import io
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem
from typing_extensions import Self

from dcpstore.config import ReadConfig
from dcpstore.errors import CheckpointError, CorruptError, NotFoundError
from dcpstore.format.checksum import find_bad_block
from dcpstore.format.manifest import StoredItem
from dcpstore.format.payload import Slab, Slabs
from dcpstore.read.plan import MOST_LANDING_BYTES, Request, join_pieces, land, plan_pieces
from dcpstore.read.targets import (
    Piece,
    Target,
    copy_decoded,
    copy_inline,
    copy_piece,
    decode,
    decode_tensor,
    group_targets,
    is_worth_locating,
    locate,
    resolve_targets,
)
from dcpstore.report import Meter
from dcpstore.store.base import Destination, FillsMemory, HasSpares, Store
from dcpstore.store.budget import ByteBudget, Cancelled, FlightWindow, bytes_in_flight
from dcpstore.store.hedge import RangeHedge
from dcpstore.store.retry import read_twice_if_damaged
from dcpstore.text import collector_paused

T = TypeVar("T")
K = TypeVar("K")
Call: TypeAlias = tuple[int, Callable[[], T]]
"""How many bytes a call holds, and the call."""


class Pump:
    """Threads for calls that hold bytes. Use as a context manager, from one thread.

    Args:
        max_calls: Calls at a time.
        name: Of the threads.
    """

    def __init__(self, max_calls: int, name: str = "dcpstore-read") -> None:
        self._executor = ThreadPoolExecutor(max_calls, name)
        self._stopped = threading.Event()
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.stop()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def stop(self) -> None:
        """Begin no more of the calls that wait. Thread-safe."""
        self._stopped.set()

    def is_stopped(self) -> bool:
        """Whether a call failed, or somebody called `stop`."""
        return self._stopped.is_set()

    def begin(self, call: Callable[[], T]) -> Future[T]:
        """Make one call; its error is the future's alone. Any thread."""
        return self._executor.submit(call)

    def run(self, calls: Iterable[Call[object]], budget: ByteBudget) -> None:
        """Make calls, each as soon as the budget has room for it. Returns when all are done.

        Raises: What the first call to fail raised; those that had not begun were not made.
        """
        futures = []
        try:
            for num_bytes, call in calls:
                budget.acquire(num_bytes, cancelled=self.is_stopped)
                futures.append(self._executor.submit(self._make, call, num_bytes, budget))
        except Cancelled:
            pass
        wait(futures)
        if self._error is not None:
            raise self._error

    def _make(self, call: Callable[[], object], num_bytes: int, budget: ByteBudget) -> None:
        try:
            if not self.is_stopped():
                call()
        except BaseException as error:  # noqa: BLE001 - kept, and raised again by the caller
            if not self.is_stopped():
                self._error = error
            self.stop()
        finally:
            budget.release(num_bytes)

    def in_order(self, calls: Iterable[Call[T]], max_bytes: int) -> Iterator[T]:
        """Yield what calls return, in their order, and make the next ones meanwhile.

        Args:
            calls: Made ahead of the caller.
            max_bytes: Most bytes held by the calls ahead, and by what the caller works on. A
                call that holds more is made alone.
        """
        ahead: deque[tuple[int, Future[T]]] = deque()
        held_bytes = 0
        for num_bytes, call in calls:
            while ahead and held_bytes + num_bytes > max_bytes:
                yield ahead[0][1].result()
                held_bytes -= ahead.popleft()[0]
            ahead.append((num_bytes, self._executor.submit(call)))
            held_bytes += num_bytes
        while ahead:
            yield ahead[0][1].result()
            ahead.popleft()


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

    def count(self, num_bytes: int) -> None:
        """Count one request."""
        self.num_requests += 1
        self.fetched_bytes += num_bytes


def locate_records(
    store: Store, items: Mapping[K, StoredItem], pump: Pump, stats: ReadStats
) -> dict[K, StoredItem]:
    """Find out where the payloads of others' records start, one small GET each.

    Returns:
        The items, raw where the record is a plain tensor.
    """
    found = {}
    calls = ((1, partial(locate, store, item)) for item in items.values())
    for key, (item, sizes) in zip(items, pump.in_order(calls, len(items)), strict=True):
        found[key] = item
        for num_bytes in sizes:
            stats.count(num_bytes)
    return found


class CopyStreams:
    """One stream of copies for each CUDA device that has targets; none on a host without."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def are_used(self) -> bool:
        """Whether any target is on a CUDA device."""
        return bool(self._streams)

    def open(self, devices: Iterable[torch.device]) -> None:
        """Make streams that begin when all work is done that the caller queued so far."""
        for device in {one for one in devices if one.type == "cuda"} - self._streams.keys():
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._streams[device].wait_stream(torch.cuda.current_stream(device))

    @contextmanager
    def done_on_exit(self) -> Iterator[None]:
        """Queue copies on these streams, and wait for them in the end. Any thread."""
        if not self._streams:
            yield
            return
        with ExitStack() as stack:
            for stream in self._streams.values():
                stack.enter_context(torch.cuda.stream(stream))
            try:
                yield
            finally:  # also after an error: what is queued still reads the caller's memory
                for stream in self._streams.values():
                    end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                    end.record(stream)
                    end.synchronize()


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
        self._meter = meter
        # Two at a time fit: one travels between ranks while the next is fetched.
        self._request_bytes = min(config.request_bytes, config.budget_bytes // 2)
        in_flight_bytes = bytes_in_flight(config.budget_bytes)
        self._budget = ByteBudget(in_flight_bytes, FlightWindow(self._request_bytes))
        self._pump = Pump(config.max_requests)
        self._hedge: RangeHedge | None = None
        if config.hedge_share and not store.url.startswith(("file://", "memory://")):
            self._hedge = RangeHedge(
                store,
                max_requests=config.max_requests,
                max_share=config.hedge_share,
                budget=self._budget,
            )
        self._landings = FlightWindow(MOST_LANDING_BYTES)
        # What lands takes little memory: this bounds what is asked for at a time.
        self._flight = ByteBudget(config.max_requests * MOST_LANDING_BYTES, self._landings)
        self._streams = streams = CopyStreams()
        slab_bytes = self._request_bytes  # not of `self`, which the slabs would keep alive
        self._slabs = Slabs(
            max(1, min(config.max_requests, in_flight_bytes // slab_bytes)),
            lambda: Slab.make(slab_bytes, pin=streams.are_used),
            self._pump.is_stopped,
        )
        self.pieces: dict[str, list[Piece]] = {}
        """What is still to be fetched, by object."""
        self._done: queue.SimpleQueue[Target] = queue.SimpleQueue()
        self._num_touched = 0
        self._is_inference = torch.is_inference_mode_enabled()
        self.stats = ReadStats()

    def __enter__(self) -> ReadJob:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._pump.__exit__(kind, error, trace)
        if self._hedge is not None:
            self._hedge.close()
            self.stats.num_hedged = self._hedge.num_again
            self.stats.num_requests += self._hedge.num_again
            self.stats.fetched_bytes += self._hedge.again_bytes
        self.note_held(self._budget.peak_bytes)
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
            targets = resolve_targets(
                read_items, planner, self._items, self._metadata, self._config.casts
            )
            self.plan(targets, planner)

    def plan(self, targets: list[Target], planner: LoadPlanner) -> None:
        """Load what needs no request into checked targets, plan the rest."""
        self.stats.num_targets = len(targets)
        unknown = {
            (t.item.key, t.item.record): t.item for t in targets if is_worth_locating(t.item)
        }
        if unknown:
            located = locate_records(self._store, unknown, self._pump, self.stats)
            for target in targets:
                target.item = located.get((target.item.key, target.item.record), target.item)
        remote = group_targets(self._load_inline(targets, planner))
        self._streams.open(target.tensor.device for target in remote if target.tensor is not None)
        self.pieces = plan_pieces(
            remote,
            request_bytes=self._request_bytes,
            join_gap_bytes=self._config.join_gap_bytes,
            verify=self._config.verify,
        )
        needed_bytes = sum(one.needed_bytes for parts in self.pieces.values() for one in parts)
        self.stats.needed_bytes += needed_bytes
        if self._meter is not None:
            self._meter.expect(needed_bytes)
        for target in remote:
            if target.missing == 0:  # no elements, hence no request
                self._finish(target, planner)

    def _load_inline(self, targets: list[Target], planner: LoadPlanner) -> list[Target]:
        """Load what the manifest holds; return the targets that need requests."""
        remote = []
        for target in targets:
            item = target.item
            if item.inline is None:
                remote.append(target)
                continue
            if target.tensor is None:
                target.content = item.inline
            elif item.kind == "raw":
                copy_inline(item, item.inline, target)
            else:
                url = self._store.url
                copy_decoded(decode_tensor(item, item.inline, url, target.fqn), target)
            self._num_touched += 1
            self.stats.num_inline += 1
            self._finish(target, planner)
        return remote

    # --- shared with other ranks -----------------------------------------------------

    def note_held(self, num_bytes: int) -> None:
        """Count bytes that are held outside the budget's own book."""
        self.stats.peak_bytes = max(self.stats.peak_bytes, num_bytes)

    def fetch(self, request: Request, take: Callable[[memoryview], T]) -> Future[T]:
        """Begin to fetch a range for this rank and others.

        Args:
            request: With the pieces of this rank, which are delivered.
            take: Given the bytes, verified where this rank can tell.
        """

        def fetch_and_take() -> T:
            data = self._get_verified(request)
            self._deliver(request, data)
            return take(data)

        self.stats.count(request.range.num_bytes)
        return self._pump.begin(fetch_and_take)

    def deliver(self, contents: Iterable[tuple[Request, memoryview]]) -> Future[None]:
        """Begin to verify bytes that another rank fetched, and to copy them to their targets."""

        def check_and_deliver() -> None:
            for request, data in contents:
                self._deliver(request, self._received(request, data))

        return self._pump.begin(check_and_deliver)

    def _received(self, request: Request, data: memoryview) -> memoryview:
        """Return bytes that were received if they are right, else those of the second place."""
        try:
            self._check(request, data)
        except CorruptError as error:
            if not self._use_spare(request.key, error):
                raise
            return self._get_verified(request)
        return data

    def _use_spare(self, key: str, error: CorruptError) -> bool:
        return isinstance(self._store, HasSpares) and self._store.use_spare(key, error)

    def commit_complete(self, planner: LoadPlanner) -> None:
        """Tell the planner of every target that is complete. In the caller's thread."""
        while True:
            try:
                target = self._done.get_nowait()
            except queue.Empty:
                return
            self._finish(target, planner)

    # --- requests --------------------------------------------------------------------

    def fetch_rest(self, planner: LoadPlanner) -> None:
        """Fetch and deliver every piece that was not taken out, and commit what is complete."""
        joined = join_pieces(
            self.pieces,
            request_bytes=self._request_bytes,
            join_gap_bytes=self._config.join_gap_bytes,
        )
        self.pieces = {}
        requests: Iterable[Request] = joined
        if self._store.capabilities.fills_memory:
            requests = land(
                joined,
                num_in_flight=partial(self._landings.num_requests, self._config.max_requests),
                least_bytes=self._request_bytes,
            )
        self._pump.run(self._calls(requests, planner), self._budget)
        self.commit_complete(planner)

    def _calls(self, requests: Iterable[Request], planner: LoadPlanner) -> Iterator[Call[None]]:
        for request in requests:
            num_bytes = request.range.num_bytes
            serve = partial(self._serve, request)
            if request.memory:
                self._flight.acquire(num_bytes, cancelled=self._pump.is_stopped)
                serve = partial(self._land, request)
            self.stats.count(num_bytes)
            yield request.buffer_bytes, serve
            self.commit_complete(planner)

    def _serve(self, request: Request) -> None:
        if self._passes_a_slab(request):
            self._stage(request)
        else:
            self._deliver(request, self._get_verified(request))

    def _passes_a_slab(self, request: Request) -> bool:
        """Whether its bytes are copied to their targets and needed no longer."""
        return (
            self._store.capabilities.fills_memory
            and request.range.num_bytes <= self._request_bytes
            and all(piece.target.item.kind == "raw" for piece in request.pieces)
        )

    def _stage(self, request: Request) -> None:
        """Receive a request into a slab, check it there, and copy it to its targets."""
        slab = self._slabs.take()
        try:
            data = slab.array.data[: request.range.num_bytes]

            def fill() -> None:
                self._fill(request, Destination([data]), self._budget)
                self._check(request, data)

            self._read_twice(request, fill)
            self._deliver(request, data)
        finally:
            self._slabs.free.put(slab)

    def _land(self, request: Request) -> None:
        """Receive a request into its targets and check it there."""

        def fill() -> None:
            destination = request.destination()
            try:
                self._fill(request, destination, self._flight)
            finally:
                if destination.was_written:  # never write an unchanged count: others count too
                    self._num_touched += 1
            request.note_written()
            self._check(request)

        try:
            self._read_twice(request, fill)
        finally:
            self._flight.release(request.range.num_bytes)
        for piece in request.pieces:
            self._arrived(piece)

    def _fill(self, request: Request, destination: Destination, budget: ByteBudget) -> None:
        store = cast("FillsMemory", self._hedge or self._store)
        with self._asking(request, budget):
            store.fill(request.key, request.range.start, destination)

    def _get_verified(self, request: Request) -> memoryview:
        """Fetch a request's bytes and check them; a bad block gets one second chance."""

        def get() -> memoryview:
            with self._asking(request, self._budget):
                data = (self._hedge or self._store).get_range(request.key, *request.range)
            self._check(request, data)
            return data

        return self._read_twice(request, get)

    def _read_twice(self, request: Request, read: Callable[[], T]) -> T:
        """Read and check; what is damaged is read once more, from its second place if it has one.

        Raises:
            CorruptError: If the second answer is damaged, too.
        """

        def read_here() -> T:
            try:
                return read()
            except CorruptError as error:
                if self._use_spare(request.key, error):
                    return read()
                raise

        return read_twice_if_damaged(read_here)

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

    def _check(self, request: Request, data: memoryview | None = None) -> None:
        """Compare the blocks of all pieces with their checksums, where they have some.

        Args:
            request: What was fetched.
            data: Its bytes; None if they are where the request's targets are.

        Raises:
            CorruptError: Naming the first block that is wrong.
        """
        if not self._config.verify:
            return
        for number, piece in enumerate(request.pieces):
            item = piece.target.item
            if item.checksums is None:
                continue
            content = request.memory[number] if data is None else request.window(data, piece.fetch)
            first = (piece.fetch.start - item.payload.start) // item.block_bytes
            bad = find_bad_block(content, first, item.checksums, item.block_bytes)
            if bad is not None:
                start = item.payload.start + bad * item.block_bytes
                end = min(start + item.block_bytes, item.payload.end)
                fqn = piece.target.fqn
                raise CorruptError(
                    f"{self._store.url}: object {request.key}, bytes [{start}, {end}) of {fqn!r}"
                    " are not the bytes that were saved (CRC32C differs)",
                    key=request.key,
                    start=start,
                    end=end,
                    fqn=fqn,
                )

    def _deliver(self, request: Request, data: memoryview) -> None:
        """Copy a request's verified bytes to whoever wants them."""
        with torch.inference_mode(self._is_inference):
            with self._streams.done_on_exit():
                for piece in request.pieces:
                    if piece.target.item.kind == "raw":
                        self._num_touched += 1
                        copy_piece(piece, request.window(data, piece.fetch))
                    else:
                        piece.target.collect(piece.span, request.window(data, piece.span))
            for piece in request.pieces:
                self._arrived(piece)

    def _arrived(self, piece: Piece) -> None:
        """Count a piece that is where it belongs, and complete its target if it was the last."""
        target = piece.target
        if self._meter is not None:
            self._meter.advance(piece.needed_bytes)
        if target.is_complete_after_one_more():
            if target.item.kind != "raw":
                self._num_touched += 1
                decode(target, self._store.url, self._registry)
            self._done.put(target)

    def _finish(self, target: Target, planner: LoadPlanner) -> None:
        for one in (target, *target.twins):
            if one.tensor is None:
                planner.load_bytes(one.read_item, io.BytesIO(one.content or b""))
                one.content = None
            elif one.read_item.type != LoadItemType.BYTE_IO:
                planner.commit_tensor(one.read_item, one.tensor)
            one.tensor = None
