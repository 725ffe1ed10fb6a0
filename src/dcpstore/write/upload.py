"""From tensors to objects: slabs are filled, checksummed and uploaded, all at the same time.

One thread (the caller's) makes parts; one thread per object in flight checksums and
uploads them; the store keeps several parts of an object in flight. What has to be copied
goes into slabs, or into scratch where it is little. Both go back to the pool when the store
drops them, so memory stays at the pool's size::

    caller    make part 0 | make part 1 | make part 2 | ...        (one copy per byte)
    object 0              | crc 0, put 0 ........... free slab 0
                                        | crc 1, put 1 ........... free slab 1

Contiguous host tensors are not copied but for what is too small to be worth a piece of its
own: the store reads their own memory. Where it gathers parts from pieces::

    object    [header][ tensor of 40 MiB                 ][header][ ...
    parts     [copied][lent][ lent         ][ lent      ][copied][ ...

and where it does not, only parts that lie in a tensor as a whole are lent.
"""

from __future__ import annotations

import io
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from time import monotonic, sleep
from typing import Any, Protocol

import torch
from typing_extensions import Buffer

from dcpstore.config import WriteConfig
from dcpstore.errors import CorruptError
from dcpstore.format.checksum import BlockChecksummer
from dcpstore.format.manifest import DataObject
from dcpstore.format.payload import Slab, Slabs, copy_bytes_out, host_payload, take
from dcpstore.report import Meter
from dcpstore.store.base import Capabilities, ObjectInfo, Part, chained, joined
from dcpstore.store.budget import Bytes, Cancelled
from dcpstore.write.cutoff import Cutoff

_LEAST_SLABS_TO_CUT = 3  # as an upload begins once it has two parts, and both may need a slab


class SlabPool:
    """A bounded number of parts in flight, and the memory for what they copy.

    Each part in flight holds a place. One that copies much takes a slab, made on first use
    and recycled. One that copies little takes a piece of scratch instead: all of those are
    one slab, cut into as many pieces as there are places. So many more parts may be in flight
    than there is memory for, as long as most of their bytes lie elsewhere::

        places   0  1  2  3  4  5  6  7  ...      num_places, no memory
        slabs    |    0    |    1    |    2    |  num_slabs of the budget
        scratch  |0|1|2|3|4|5|6|7|..              the last of them, if any is asked for

    A part is handed on as *leases*: a numpy view of each of its pieces, whose deaths give
    back all that it took. Whoever holds the last reference, be it a thread of the store's
    engine, thereby decides when that memory may be filled again.

    One thread takes; any thread may give back.

    Args:
        num_places: Most parts in flight.
        num_slabs: Most slabs that exist.
        slab_bytes: Size of one.
        make_slab: Allocates one.
        cancelled: Ends a wait: whoever takes then raises `Cancelled`.
    """

    def __init__(
        self,
        num_places: int,
        num_slabs: int,
        slab_bytes: int,
        make_slab: Callable[[int], Slab],
        cancelled: Callable[[], bool],
    ) -> None:
        # SimpleQueue.put is reentrant, hence safe in the finalizer of a lease.
        self._places: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._scratch: queue.SimpleQueue[Slab] | None = None
        self._slab_bytes = slab_bytes
        self._slabs = Slabs(num_slabs, partial(make_slab, slab_bytes), cancelled)
        self._cancelled = cancelled
        can_cut = num_slabs >= _LEAST_SLABS_TO_CUT
        self._scratch_bytes = slab_bytes // num_places // 4096 * 4096 if can_cut else 0
        for _ in range(num_places):
            self._places.put(None)

    @property
    def peak_bytes(self) -> int:
        """Size of the slabs that exist."""
        return self._slabs.num_made * self._slab_bytes

    def acquire_place(self) -> None:
        """Take a place, waiting for one if need be."""
        take(self._places, self._cancelled)

    def acquire_slab(self) -> Slab:
        """Take a slab for a part that has a place, waiting for one if need be."""
        return self._slabs.take()

    def acquire_scratch(self) -> Slab | None:
        """Take scratch for a part that has a place; None if there is too little memory to cut.

        Waits for a slab the first time, for nothing later.
        """
        if not self._scratch_bytes:
            return None
        if self._scratch is None:
            slab = self.acquire_slab()
            self._scratch = queue.SimpleQueue()
            for piece in slab.cut(self._scratch_bytes):
                self._scratch.put(piece)
        return self._scratch.get_nowait()  # there is one for every place

    def lease(
        self, pieces: Sequence[Bytes], slab: Slab | None = None, scratch: Slab | None = None
    ) -> list[Bytes]:
        """Return views of the pieces of a part; the last to die gives back what it took."""
        back: list[tuple[queue.SimpleQueue[Any], Slab | None]] = [(self._places, None)]
        if slab is not None:
            back.append((self._slabs.free, slab))
        if scratch is not None and self._scratch is not None:
            back.append((self._scratch, scratch))
        leases = [piece[:] for piece in pieces]
        alive = list(range(len(leases)))
        for lease in leases:
            weakref.finalize(lease, _give_back, alive, back).atexit = False
        return leases


def _give_back(
    alive: list[int], back: Sequence[tuple[queue.SimpleQueue[Any], Slab | None]]
) -> None:
    """Give back what a part took when its last lease dies.

    Not a method: the interpreter keeps what a finalizer refers to, and from the pool there is a
    way to the save and to the error that it failed with, whose traceback may hold the lease.
    """
    # Finalizers run in any thread: who pops the bottom of the list is the last one.
    if alive.pop() == 0:
        for free, taken in reversed(back):
            free.put(taken)


_ALIGNMENT = 64


class PartInMemory:
    """A part on its way: pieces of memory, one behind the other.

    Bytes that are copied lie in scratch while there is room, then in a slab: in the slab where
    they lie in the part, in scratch aligned alike, so that elements are aligned as in the object.

    Args:
        part_bytes: Room for so many.
    """

    def __init__(self, part_bytes: int) -> None:
        self.num_bytes = 0
        self.room_bytes = part_bytes
        self.slab: Slab | None = None
        self.scratch: Slab | None = None
        self.lent: set[int] = set()  # which of the pieces belong to tensors
        self.events: dict[torch.device, torch.cuda.Event] = {}
        """Per CUDA device, the end of queued copies; it must come before a read."""
        self._pieces: list[tuple[Bytes, int, int]] = []  # memory, and begin and end there
        self._scratch_bytes = 0
        self._checked: list[tuple[BlockChecksummer, Bytes]] = []

    def lend(self, array: Bytes, checksummer: BlockChecksummer | None) -> None:
        """Append bytes where they lie."""
        self.lent.add(len(self._pieces))
        self._pieces.append((array, 0, len(array)))
        self._advance(array, checksummer)

    def place_of(self, num_bytes: int) -> tuple[Slab, int] | None:
        """Return in which memory, and where there, to copy the next bytes to.

        None if they do not fit: the part has no slab, and no scratch or too little of it.
        """
        if self.slab is not None:
            return self.slab, self.num_bytes
        if self.scratch is None:
            return None
        at = self._scratch_bytes + (self.num_bytes - self._scratch_bytes) % _ALIGNMENT
        return (self.scratch, at) if at + num_bytes <= len(self.scratch.array) else None

    def copied(
        self, memory: Slab, at: int, num_bytes: int, checksummer: BlockChecksummer | None
    ) -> None:
        """Append bytes that were just written where `place_of` said."""
        begin, end = at, at + num_bytes
        if self._pieces and self._pieces[-1][0] is memory.array and self._pieces[-1][2] == at:
            _, begin, _ = self._pieces.pop()  # goes on where the last copy ended
        self._pieces.append((memory.array, begin, end))
        if memory is self.scratch:
            self._scratch_bytes = end
        self._advance(memory.array[at:end], checksummer)

    def _advance(self, array: Bytes, checksummer: BlockChecksummer | None) -> None:
        if checksummer is not None:
            self._checked.append((checksummer, array))
        self.num_bytes += len(array)
        self.room_bytes -= len(array)

    def seal(self) -> list[Bytes]:
        """Return the pieces; there will be no others."""
        return [array[begin:end] for array, begin, end in self._pieces]

    def seal_copies(self) -> None:
        """Note where the copies that were queued so far end."""
        for device, event in self.events.items():
            event.record(torch.cuda.current_stream(device))

    def wait_and_check(self) -> None:
        """Wait for the queued copies, then checksum what is to be checksummed."""
        for event in self.events.values():
            event.synchronize()
        for checksummer, array in self._checked:
            checksummer.update(array.data)


_LET_GO_S = 2.0
_LEAST_LENT_BYTES = 1 << 16  # a piece of its own costs about as much as to copy so many


class ObjectSink(Protocol):
    """What uploads ask of a store; see `Store`."""

    @property
    def capabilities(self) -> Capabilities:
        """What it promises."""

    def head(self, key: str) -> ObjectInfo:
        """Look an object up."""

    def put(self, key: str, data: Buffer) -> str | None:
        """Store one object and return its ETag."""

    def put_parts(
        self, key: str, parts: Iterable[Part], *, part_bytes: int, max_concurrency: int
    ) -> str | None:
        """Store one large object from parts and return its ETag."""


class ObjectStream(io.RawIOBase):
    """The bytes of one object, written front to back. One thread at a time.

    Bytes written between `begin_checked` and `end_checked` feed that checksummer, later
    and in another thread: its result is there once the upload has ended.
    """

    def __init__(self, uploads: Uploads, key: str) -> None:
        self._uploads = uploads
        self.key = key
        self.parts: queue.SimpleQueue[PartInMemory | None] = queue.SimpleQueue()
        self._part: PartInMemory | None = None
        self._done_bytes = 0
        self._checksummer: BlockChecksummer | None = None

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self._done_bytes + (self._part.num_bytes if self._part else 0)

    def begin_checked(self, checksummer: BlockChecksummer) -> None:
        """From here on, checksum what is written."""
        self._checksummer = checksummer

    def end_checked(self) -> None:
        """Stop checksumming."""
        self._checksummer = None

    def write(self, data: Buffer) -> int:
        """Copy bytes into the object."""
        view = memoryview(data).cast("B")
        at = 0
        while at < len(view):
            part = self._open_part()
            count = min(part.room_bytes, len(view) - at)
            memory, to = self._place_of(part, count)
            memory.array[to : to + count] = view[at : at + count]
            part.copied(memory, to, count, self._checksummer)
            at += count
        return len(view)

    def write_tensor(self, tensor: torch.Tensor) -> None:
        """Put a plain tensor's payload into the object, with at most one copy per byte.

        The payload must start at a multiple of the element size in the object, so that no
        element is split between two slabs. Unless the uploads were told to lend nothing, the
        tensor must not change before they end.
        """
        total = tensor.numel() * tensor.element_size()
        least = self._uploads.least_lent_bytes
        lender = host_payload(tensor) if least is not None and total >= least else None
        start = 0
        while start < total:
            part = self._open_part()
            end = min(total, start + part.room_bytes)
            if lender is not None and least is not None and end - start >= least:
                part.lend(lender[start:end], self._checksummer)
                self._uploads.has_lent = True
            else:
                self._copy(tensor, start, end, part)
            start = end

    def _copy(self, tensor: torch.Tensor, start: int, end: int, part: PartInMemory) -> None:
        is_queued = tensor.device.type == "cuda"
        memory, to = self._place_of(part, end - start)
        out = memory.tensor[to : to + end - start]
        copy_bytes_out(tensor, start, end, out, non_blocking=is_queued)
        if is_queued and tensor.device not in part.events:
            part.events[tensor.device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        part.copied(memory, to, end - start, self._checksummer)

    def finish(self) -> None:
        """Hand on what is left; the object is complete."""
        self._emit()
        self.parts.put(None)

    def _open_part(self) -> PartInMemory:
        """Return the part that the next byte goes to; there is room for it."""
        if self._part is not None and not self._part.room_bytes:
            self._emit()
        if self._part is None:
            self._uploads.take_place()
            self._part = PartInMemory(self._uploads.part_bytes)
        return self._part

    def _place_of(self, part: PartInMemory, num_bytes: int) -> tuple[Slab, int]:
        """Return where the part's next bytes are to be copied to."""
        if part.slab is None and part.scratch is None:
            part.scratch = self._uploads.take_scratch()
        place = part.place_of(num_bytes)
        if place is None:
            part.slab = self._uploads.pool.acquire_slab()
            place = part.slab, part.num_bytes
        return place

    def _emit(self) -> None:
        if self._part is None:
            return
        self._part.seal_copies()
        self._done_bytes += self._part.num_bytes
        self.parts.put(self._part)
        self._part = None


class Uploads:
    """All uploads of one rank's save, under one pool of slabs.

    Use as a context manager: leaving it with an error aborts what is in flight, leaving
    it without one waits for everything. `objects` is complete only after that.

    Args:
        store: Rooted at the checkpoint's folder.
        config: Sizes and bounds.
        part_bytes: Size of every part but an object's last; None for the config's.
        pin: Allocate page-locked slabs, for copies from a CUDA device.
        meter: Counts the bytes handed to the store; None where nobody watches.
        lends: Whether the store may read tensors' own memory until the uploads end; not for
            callers that fill the same memory again.
        cutoff: Once it is over, no part is begun; None for never.
    """

    def __init__(
        self,
        store: ObjectSink,
        config: WriteConfig,
        *,
        part_bytes: int | None = None,
        pin: bool,
        meter: Meter | None = None,
        lends: bool = True,
        cutoff: Cutoff | None = None,
    ) -> None:
        self._store = store
        self._cutoff = cutoff
        self.part_bytes = config.part_bytes if part_bytes is None else part_bytes
        """Size of every part but an object's last."""
        least_bytes = _LEAST_LENT_BYTES if store.capabilities.gathers_parts else self.part_bytes
        self.least_lent_bytes = min(least_bytes, self.part_bytes) if lends else None
        """Fewest bytes of a tensor that are worth to be sent from where they lie."""
        self.has_lent = False
        """Whether any were: then parts are expected to copy little."""
        self._meter = meter
        self._config = config
        self._executor = ThreadPoolExecutor(config.max_uploads, "dcpstore-upload")
        self._failed = threading.Event()
        num_slabs = config.budget_bytes // self.part_bytes
        # An upload begins once it has two parts.
        num_places = max(2, config.max_uploads)
        if not store.capabilities.gathers_parts:
            num_places = min(num_places, num_slabs)  # it copies what it is lent
        self.pool = SlabPool(
            num_places, num_slabs, self.part_bytes, partial(Slab.make, pin=pin), self._must_stop
        )
        """Memory for what is copied."""
        self._open: ObjectStream | None = None
        self._lent: list[weakref.ref[Bytes]] = []
        self._futures: dict[str, Future[DataObject]] = {}
        self.objects: dict[str, DataObject] = {}
        self.num_requests = 0

    def __enter__(self) -> Uploads:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._wait()
            else:
                self._abort(error)
        finally:
            self._executor.shutdown(wait=True)
            if error is not None:
                self._await_lent()

    def open(self, key: str) -> ObjectStream:
        """Begin the next object. The one before must be finished."""
        stream = ObjectStream(self, key)
        self._open = stream
        self._futures[key] = self._executor.submit(self._upload, stream)
        return stream

    def take_place(self) -> None:
        """Take a place for a part, waiting for one.

        Raises:
            Cancelled: If an upload failed meanwhile, or the cutoff is over.
        """
        if self._must_stop():
            raise Cancelled
        self.pool.acquire_place()

    def take_scratch(self) -> Slab | None:
        """Take memory for the little that a part with a place copies; None if it needs a slab."""
        if not self.has_lent or not self._store.capabilities.gathers_parts:
            return None
        return self.pool.acquire_scratch()

    def _must_stop(self) -> bool:
        return self._failed.is_set() or (self._cutoff is not None and self._cutoff.is_over)

    def _wait(self) -> None:
        self._raise_cause()
        for key, future in self._futures.items():
            self.objects[key] = stored = future.result()
            num_parts = max(1, -(-stored.size_bytes // self.part_bytes))
            self.num_requests += num_parts + 2 if num_parts > 1 else 1

    def _abort(self, error: BaseException) -> None:
        self._failed.set()
        if self._open is not None:
            self._open.parts.put(None)
        if isinstance(error, Cancelled):
            self._raise_cause()

    def _await_lent(self) -> None:
        """Give requests that broke off a moment to let go of the tensors that they read."""
        end = monotonic() + _LET_GO_S
        while any(lease() is not None for lease in self._lent) and monotonic() < end:
            sleep(_LET_GO_S / 100)

    def _raise_cause(self) -> None:
        """Wait for all uploads; raise what made the first one fail, not what that cancelled."""
        failures = [error for future in self._futures.values() if (error := future.exception())]
        for error in failures:
            if not isinstance(error, Cancelled):
                raise error
        if self._cutoff is not None and (failures or self._failed.is_set()):
            self._cutoff.check()

    def _upload(self, stream: ObjectStream) -> DataObject:
        try:
            return self._put(stream)
        except BaseException:
            self._failed.set()
            raise

    def _put(self, stream: ObjectStream) -> DataObject:
        parts = self._leases(stream)
        first = next(parts, ())
        second = next(parts, None)
        if second is None:
            etag = self._store.put(stream.key, joined(first) if first else b"")
        else:
            rest = map(_unwrapped, chained([first, second], parts))
            del first, second  # or they would hold their memory until the upload ends
            etag = self._store.put_parts(
                stream.key,
                rest,
                part_bytes=self.part_bytes,
                max_concurrency=self._config.max_uploads,
            )
        num_bytes = stream.tell()  # the caller has finished it: all its parts were taken
        self._confirm(stream.key, num_bytes)
        return DataObject(stream.key, num_bytes, etag)

    def _leases(self, stream: ObjectStream) -> Iterator[tuple[memoryview, ...]]:
        while (part := stream.parts.get()) is not None:
            if self._must_stop():
                raise Cancelled
            part.wait_and_check()
            num_bytes = part.num_bytes
            leases = self.pool.lease(part.seal(), part.slab, part.scratch)
            self._lent.extend(weakref.ref(leases[number]) for number in part.lent)
            views = tuple(lease.data for lease in leases)
            del leases, part
            yield views
            del views
            if self._meter is not None:
                self._meter.advance(num_bytes)
        if self._failed.is_set():
            raise Cancelled

    def _confirm(self, key: str, num_bytes: int) -> None:
        """Ask for the object's size where the store does not acknowledge a put."""
        if self._store.capabilities.acknowledges_puts:
            return
        stored = self._store.head(key).size_bytes
        if stored != num_bytes:
            raise CorruptError(
                f"{key} has {stored} bytes in the store after {num_bytes} were put", key=key
            )


def _unwrapped(pieces: tuple[memoryview, ...]) -> Part:
    """Return a part as stores that gather nothing know it, where that is possible."""
    return pieces[0] if len(pieces) == 1 else pieces
