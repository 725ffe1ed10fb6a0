"""`dcp_to_dcp`: a checkpoint from one place to another, as it is or written anew.

As it is, the bytes of its data objects do not change. A checkpoint of ours goes through our own
commit protocol, so its objects get fresh names and the new metadata name them; a checkpoint by a
stock writer keeps all names, and its ``.metadata`` is put last, as it was. All ranks:

1. (coordinator) look whether a checkpoint lies at the target, and plan the objects
2. copy a share of the objects each, by the provider or through this process
3. read each copy back, and compare it
4. (coordinator) seal

Through this process, ranges of all objects are fetched ahead, across the ends of objects, so that
many small ones cost no more waiting than a large one::

    requests   | a[0:4M] a[4M:8M] b[0:1M] c[0:4M] ... |   in flight, bounded by the budget
    caller     | a[0:4M] -> part of a | a[4M:8M] -> ...    in order, checksummed on the way

By the provider no byte passes here. What proves such a copy are the checksums of the checkpoint
itself: the copy is read back and every block compared. Bytes of which there is no checksum (the
framing of records; all of a stock checkpoint) are compared with the source's::

    source   .....[framing]...............[framing]....    read: the framing alone
    copy     [item          ][framing][item        ][..    read: all, against the manifest
                                                           and against the framing

Where the provider refuses, once, the rest passes through this process. A checkpoint that changes
on the way is written anew (see `dcpstore.convert.dcp.sink`).
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, Protocol

import numpy as np
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult
from typing_extensions import Unpack

from dcpstore.config import ReadConfig, WriteConfig
from dcpstore.convert.dcp.sink import SinkEntry, write_checkpoint
from dcpstore.convert.dcp.source import open_source, own_run
from dcpstore.convert.options import Conversion, ConversionOptions
from dcpstore.convert.output import (
    Outputs,
    Shares,
    is_surely_unpublished,
    put_file,
    reject_existing,
)
from dcpstore.convert.selection import ConvertResult, Selection
from dcpstore.errors import (
    AlreadyExistsError,
    CheckpointError,
    ConfigError,
    ConflictError,
    CorruptError,
    NotFoundError,
    RankFailures,
    StoreError,
)
from dcpstore.format.checksum import BlockChecksummer, crc32c
from dcpstore.format.manifest import DataObject, Path, StoredItem
from dcpstore.format.metadata import planner_paths_of
from dcpstore.format.seal import METADATA_KEY, data_key, save_id_of
from dcpstore.ranks import RankGroup, steps
from dcpstore.read.checkpoint import Checkpoint
from dcpstore.read.pump import Pump
from dcpstore.report import Meter, Phases
from dcpstore.store.base import ByteRange, Store, server_copier
from dcpstore.store.budget import bytes_in_flight
from dcpstore.store.folder import Folder
from dcpstore.store.ranges import cut, join
from dcpstore.write.attached import Attached
from dcpstore.write.commit import Proof, probe, sweep
from dcpstore.write.job import Written
from dcpstore.write.writer import ObjectStoreWriter

_JOIN_BYTES = 1 << 20  # reading as much for nothing costs less than a request


@dataclass(frozen=True, slots=True, eq=False)
class CopyTask:
    """One object to copy.

    Attributes:
        source_key: Its key in the source.
        key: Its key in the target.
        size_bytes: Its length.
        items: What lies in it, as far as the manifest has checksums.
    """

    source_key: str
    key: str
    size_bytes: int
    items: tuple[StoredItem, ...] = ()

    def unproven(self) -> list[ByteRange]:
        """Return the ranges that hold every byte of which no item has a checksum."""
        proven = join(item.payload for item in self.items)
        edges = [0, *(edge for span in proven for edge in span), self.size_bytes]
        gaps = map(ByteRange, edges[::2], edges[1::2])
        return join(gaps, max_gap_bytes=_JOIN_BYTES)


@dataclass(slots=True)
class _Running:
    item: StoredItem
    checksummer: BlockChecksummer


@dataclass(slots=True)
class ObjectCheck:
    """Checks the bytes of one object as they pass, front to back.

    Attributes:
        where: The object's URL, for messages.
        key: The object.
        items: Its items that have checksums.
        spans: Which bytes `crc32c` is of, in ascending order; all of them where None.
        crc32c: Of the bytes so far.
    """

    where: str
    key: str
    items: Sequence[StoredItem]
    spans: Sequence[ByteRange] | None = None
    crc32c: int = 0
    _at: int = 0
    _waiting: deque[StoredItem] = field(default_factory=deque)
    _running: list[_Running] = field(default_factory=list)

    def __post_init__(self) -> None:
        held = [item for item in self.items if item.payload.num_bytes]
        self._waiting.extend(sorted(held, key=lambda item: item.payload))

    def update(self, data: memoryview) -> None:
        """Take the next bytes.

        Raises:
            CorruptError: If an item that ended in them is not what was saved.
        """
        end = self._at + len(data)
        for start, stop in [(self._at, end)] if self.spans is None else self.spans:
            if start < end and stop > self._at:
                first, last = max(start, self._at), min(stop, end)
                self.crc32c = crc32c(data[first - self._at : last - self._at], self.crc32c)
        while self._waiting and self._waiting[0].payload.start < end:
            item = self._waiting.popleft()
            self._running.append(_Running(item, BlockChecksummer(item.block_bytes)))
        for running in self._running:
            span = running.item.payload
            first, last = max(span.start, self._at), min(span.end, end)
            running.checksummer.update(data[first - self._at : last - self._at])
            if span.end <= end:
                self._compare(running)
        self._running = [one for one in self._running if one.item.payload.end > end]
        self._at = end

    def _compare(self, running: _Running) -> None:
        item, found = running.item, running.checksummer.finish()
        assert item.checksums is not None
        if np.array_equal(found, item.checksums):
            return
        bad = int(np.argmax(found != item.checksums)) if len(found) == len(item.checksums) else 0
        start = item.payload.start + bad * item.block_bytes
        end = min(start + item.block_bytes, item.payload.end)
        raise CorruptError(
            f"{self.where}: object {self.key}, bytes [{start}, {end}) are not the bytes that were"
            " saved (CRC32C differs)",
            key=self.key,
            start=start,
            end=end,
        )


@contextmanager
def pass_ranges(
    store: Store, ranges: Iterable[tuple[str, ByteRange]], config: ReadConfig
) -> Iterator[Iterator[memoryview]]:
    """Give an iterator over the bytes of ranges, each front to back, fetched ahead.

    Args:
        store: Where the objects lie.
        ranges: Key and range of each.
        config: Half of its budget is asked for at a time.

    Raises:
        NotFoundError: If an object is gone.
        CorruptError: If one is shorter than a range.
    """
    requests = (
        (span.num_bytes, partial(store.get_range, key, *span))
        for key, whole in ranges
        for span in cut(whole, config.request_bytes)
    )
    with Pump(config.max_requests, "dcpstore-pass") as pump:
        yield pump.in_order(requests, bytes_in_flight(config.budget_bytes))


logger = logging.getLogger(__name__)

_SERVER_COPIES = 8  # objects at a time


@dataclass(frozen=True, slots=True)
class Transfer:
    """Between what objects are copied, and how.

    Attributes:
        source: Rooted at the source's folder.
        target: Rooted at the target's folder.
        shares: Of the memory.
        meter: Counts the bytes copied.
        overwrite: Replace objects that exist.
        verify: Read every copy back; else only their sizes are compared.
    """

    source: Store
    target: Store
    shares: Shares
    meter: Meter
    overwrite: bool
    verify: bool


@dataclass(frozen=True, slots=True)
class Copied:
    """What one rank copied.

    Attributes:
        stored: Each object by its new key.
        crcs: CRC32C of the bytes that came from the source, of objects that passed here.
        by_server: Keys of the objects that did not.
        fetched_bytes: Bytes asked of the source.
    """

    stored: Mapping[str, DataObject]
    crcs: Mapping[str, int]
    by_server: frozenset[str]
    fetched_bytes: int


def copy_objects(transfer: Transfer, tasks: Sequence[CopyTask]) -> Copied:
    """Copy objects. After an error, none that this call created is left.

    Raises:
        AlreadyExistsError: If one is in the way and may not be replaced.
        CorruptError: If bytes that pass are not those that were saved.
        StoreError: If either store fails.
    """
    transfer.meter.expect(sum(task.size_bytes for task in tasks))
    by_server = _copy_by_server(transfer, tasks)
    rest = [task for task in tasks if task.key not in by_server]
    try:
        stored, crcs = _copy_through(transfer, rest)
    except BaseException:
        _take_back(transfer, by_server)
        raise
    return Copied(
        {**by_server, **stored},
        crcs,
        frozenset(by_server),
        sum(task.size_bytes for task in rest),
    )


def _copy_by_server(transfer: Transfer, tasks: Sequence[CopyTask]) -> dict[str, DataObject]:
    """Let the provider copy what it can and will; returns what it did."""
    copy = server_copier(transfer.source, transfer.target)
    if copy is None or not tasks:
        return {}
    copies = _ServerCopies(transfer, copy)
    try:
        with ThreadPoolExecutor(_SERVER_COPIES, "dcpstore-copy") as executor:
            list(executor.map(copies.copy, tasks))  # an error cancels those that have not begun
    except BaseException:
        _take_back(transfer, copies.made)
        raise
    return {key: one for key, one in copies.made.items() if one is not None}


class _ServerCopies:
    """Objects being copied by the provider, until it refuses. `copy` is thread-safe."""

    def __init__(self, transfer: Transfer, copy: Callable[..., None]) -> None:
        self._transfer = transfer
        self._copy = copy
        self._lock = threading.Lock()
        self._is_refused = False
        self.made: dict[str, DataObject | None] = {}

    def copy(self, task: CopyTask) -> None:
        if self._is_refused:
            return
        transfer = self._transfer
        if not transfer.overwrite:
            reject_existing(transfer.target, task.key)
        try:
            self._copy(
                task.source_key,
                task.key,
                size_bytes=task.size_bytes,
                mode="overwrite" if transfer.overwrite else "create",
            )
        except (AlreadyExistsError, ConflictError):
            raise
        except CheckpointError as error:
            if isinstance(error, StoreError) and error.retryable:
                raise
            self._note_refusal(error)
            return
        self.made[task.key] = None
        found = transfer.target.head(task.key)
        _check_size(transfer, task, found.size_bytes)
        self.made[task.key] = DataObject(task.key, found.size_bytes, found.etag)
        transfer.meter.advance(task.size_bytes)

    def _note_refusal(self, error: CheckpointError) -> None:
        with self._lock:
            is_first, self._is_refused = not self._is_refused, True
        if is_first:
            logger.warning(
                "%s: the provider does not copy by itself (%s). The bytes pass through this"
                " process",
                self._transfer.target.url,
                error,
            )


def _take_back(transfer: Transfer, keys: Mapping[str, object]) -> None:
    """Delete what was copied although the whole failed; what replaced an object stays."""
    if not transfer.overwrite:
        sweep(transfer.target, keys, Proof.NOT_BEGUN, why="this failed copy")


def _copy_through(
    transfer: Transfer, tasks: Sequence[CopyTask]
) -> tuple[Mapping[str, DataObject], dict[str, int]]:
    """Copy objects, one after another; their ranges are fetched ahead."""
    if not tasks:
        return {}, {}
    outputs = Outputs(
        transfer.target,
        budget_bytes=transfer.shares.output_bytes,
        largest_bytes=max(task.size_bytes for task in tasks),
        overwrite=transfer.overwrite,
        meter=transfer.meter,
    )
    objects = ((task.source_key, ByteRange(0, task.size_bytes)) for task in tasks)
    config = transfer.shares.read_config()
    crcs = {}
    with pass_ranges(transfer.source, objects, config) as pieces, outputs:
        for task in tasks:
            check = ObjectCheck(transfer.source.url, task.source_key, task.items)
            with outputs.write(task.key) as stream:
                for data in _next_bytes(pieces, task.size_bytes):
                    check.update(data)
                    stream.write(data)
            crcs[task.key] = check.crc32c
    return outputs.stored, crcs


def _next_bytes(pieces: Iterator[memoryview], num_bytes: int) -> Iterator[memoryview]:
    """Yield the pieces of the next object or range."""
    at = 0
    while at < num_bytes:
        data = next(pieces)
        at += len(data)
        yield data
        del data


def verify_copies(transfer: Transfer, tasks: Sequence[CopyTask], copied: Copied) -> Copied:
    """Compare copies with what they are of: read back, or by their sizes alone.

    Returns:
        The same, with what this read of the source.

    Raises:
        CorruptError: Naming the first object that differs.
    """
    if not transfer.verify:
        for task in tasks:
            _check_size(transfer, task, transfer.target.head(task.key).size_bytes)
        return copied
    spans = {task.key: task.unproven() for task in tasks if task.key in copied.by_server}
    expected = {**copied.crcs, **_crcs_of(transfer, tasks, spans)}
    objects = ((task.key, ByteRange(0, task.size_bytes)) for task in tasks)
    with pass_ranges(transfer.target, objects, transfer.shares.read_config()) as pieces:
        for task in tasks:
            check = ObjectCheck(transfer.target.url, task.key, task.items, spans.get(task.key))
            try:
                for data in _next_bytes(pieces, task.size_bytes):
                    check.update(data)
            except CorruptError as error:
                raise _blamed(transfer, task, error) from error
            if check.crc32c != expected[task.key]:
                raise CorruptError(
                    f"{transfer.target.url}: {task.key} was read back and is not what was sent",
                    key=task.key,
                )
    read = sum(span.num_bytes for some in spans.values() for span in some)
    return replace(copied, fetched_bytes=copied.fetched_bytes + read)


def _crcs_of(
    transfer: Transfer, tasks: Sequence[CopyTask], spans: Mapping[str, Sequence[ByteRange]]
) -> dict[str, int]:
    """Return the CRC32C of ranges of the source's objects, by the copies' keys."""
    ranges = ((task.source_key, span) for task in tasks for span in spans.get(task.key, ()))
    crcs = dict.fromkeys(spans, 0)
    with pass_ranges(transfer.source, ranges, transfer.shares.read_config()) as pieces:
        for key, some in spans.items():
            for data in _next_bytes(pieces, sum(span.num_bytes for span in some)):
                crcs[key] = crc32c(data, crcs[key])
    return crcs


def _blamed(transfer: Transfer, task: CopyTask, error: CorruptError) -> CorruptError:
    """Tell whether a block that is wrong in the copy is wrong in the source too."""
    if error.start is None or error.end is None:
        return error
    there = transfer.source.get_range(task.source_key, error.start, error.end)
    if there != transfer.target.get_range(task.key, error.start, error.end):
        return error
    return CorruptError(
        f"{transfer.source.url}: object {task.source_key}, bytes [{error.start}, {error.end}) are"
        " not the bytes that were saved (CRC32C differs), and were copied so",
        key=task.source_key,
        start=error.start,
        end=error.end,
    )


def _check_size(transfer: Transfer, task: CopyTask, found_bytes: int) -> None:
    if found_bytes != task.size_bytes:
        raise CorruptError(
            f"{transfer.target.url}: {task.key} has {found_bytes} bytes and its source"
            f" {task.size_bytes}",
            key=task.key,
        )


_STEP_SEAL = "seal"


class Mirror(Protocol):
    """How one kind of checkpoint is copied. The coordinator alone calls its methods."""

    has_fresh_names: bool
    """Whether no object of the copy can have the name of one that exists."""

    def plan(self) -> list[CopyTask]:
        """Look at the target, and say what to copy.

        Raises:
            AlreadyExistsError: If a checkpoint lies there that may not be replaced.
            CorruptError: If the source does not hold all of a tensor.
        """

    def seal(self, stored: Mapping[str, DataObject]) -> None:
        """Make the copy exist, given every object by its new key."""


class MirrorOfOurs:
    """Copies a checkpoint of ours, under fresh names, sealed by our own protocol.

    Args:
        checkpoint: The source.
        writer: Of the target.
        checks_sizes: Whether to look the sizes of objects up that no record vouches for; False if
            those who copy compare them.
    """

    has_fresh_names = True

    def __init__(
        self, checkpoint: Checkpoint, writer: ObjectStoreWriter, *, checks_sizes: bool = True
    ) -> None:
        self._checkpoint = checkpoint
        self._writer = writer
        self._checks_sizes = checks_sizes
        self._new_keys: dict[str, str] = {}

    def plan(self) -> list[CopyTask]:
        """Look at the target, and say what to copy."""
        self._checkpoint.require_whole(self._checkpoint.keys)
        save_id = self._writer.storage_meta().save_id
        assert save_id is not None
        self._writer.set_up_storage_writer(True)
        self._writer.await_probe()
        # It was within the limit of the checkpoint's own config when that was opened.
        manifest = self._checkpoint.discovered.decode_manifest(sys.maxsize)
        items: dict[str, list[StoredItem]] = {}
        ends: dict[str, int] = {}
        for _, form in manifest.stored:
            ends[form.key] = max(ends.get(form.key, 0), form.record.end)
            if form.checksums is not None:
                items.setdefault(form.key, []).append(form)
        objects = sorted(manifest.objects, key=lambda stored: stored.key)
        self._new_keys = _fresh_names([stored.key for stored in objects], save_id)
        return [
            CopyTask(
                stored.key,
                self._new_keys[stored.key],
                # No record vouches for the size of an object that is longer than its records.
                stored.size_bytes
                if stored.size_bytes == ends.get(stored.key) or not self._checks_sizes
                else _size_of(self._checkpoint.store, stored.key, stored.size_bytes),
                tuple(items.get(stored.key, ())),
            )
            for stored in objects
        ]

    def seal(self, stored: Mapping[str, DataObject]) -> None:
        """Seal a metadata that names the copies."""
        results = []
        for index, item in self._checkpoint.metadata.storage_data.items():
            moved = item.moved(self._new_keys)
            written = Written(moved, stored[moved.key])
            results.append(WriteResult(index, item.record.num_bytes, written))
        attached = {}
        for name, item in self._checkpoint.attached_items.items():
            moved = item.moved(self._new_keys)
            attached[name] = Written(moved, stored[moved.key])
        told = Attached(
            self._checkpoint.facts,
            self._checkpoint.user_metadata,
            attached,
            tuple(stored.values()) if attached else (),
        )
        self._writer.finish(replace(self._checkpoint.metadata), [[*results, told.as_result()]])


def _size_of(source: Store, key: str, end: int) -> int:
    size_bytes = source.head(key).size_bytes
    if size_bytes < end:
        raise CorruptError(
            f"{source.url}: object {key} has {size_bytes} bytes, and the metadata refer to {end}."
            " Nothing was written",
            key=key,
            start=size_bytes,
            end=end,
        )
    return size_bytes


class MirrorOfStock:
    """Copies a checkpoint by a stock writer, all names and bytes as they are.

    Args:
        checkpoint: The source.
        store: The target.
    """

    has_fresh_names = False

    def __init__(self, checkpoint: Checkpoint, store: Store) -> None:
        self._checkpoint = checkpoint
        self._store = store

    def plan(self) -> list[CopyTask]:
        """Look at the target, and say what to copy."""
        self._checkpoint.require_whole(self._checkpoint.keys)
        if probe(self._store, METADATA_KEY) is not None:
            raise AlreadyExistsError(
                f"{self._store.url} already holds a checkpoint. A checkpoint by another writer"
                " is copied under its own names, which might be those of what is there: copy it"
                " to another URL, or pass reencode=True with overwrite=True to replace it."
                " Nothing was written"
            )
        source = self._checkpoint.store
        ends: dict[str, int] = {}
        for item in self._checkpoint.metadata.storage_data.values():
            ends[item.key] = max(ends.get(item.key, 0), item.record.end)
        return [CopyTask(key, key, _size_of(source, key, end)) for key, end in sorted(ends.items())]

    def seal(self, stored: Mapping[str, DataObject]) -> None:
        """Put the metadata, as it was."""
        del stored
        pickled = self._checkpoint.discovered.pickled
        assert pickled is not None
        put_file(self._store, METADATA_KEY, pickled)


@dataclass(frozen=True, slots=True)
class Mirrored:
    """What was copied. The same on all ranks.

    Attributes:
        objects: Key and size of each object.
        by_server: Keys of those that the provider copied by itself.
        fetched_bytes: Bytes asked of the source by all ranks.
    """

    objects: Mapping[str, int]
    by_server: Sequence[str]
    fetched_bytes: int


def mirror(
    group: RankGroup,
    plan_and_seal: Mirror,
    transfer: Transfer,
    *,
    held: Callable[[Sequence[CopyTask]], Sequence[int]] | None = None,
    before_seal: Callable[[], None] | None = None,
) -> Mirrored:
    """Copy a checkpoint. All ranks of the group.

    Args:
        group: The ranks that copy.
        plan_and_seal: What is copied, and what becomes of it.
        transfer: From where to where.
        held: Returns the numbers of those objects that this rank can read; None if each rank can
            read all.
        before_seal: Called on the coordinator; the copy fails if it raises.

    Raises:
        RankFailures: On every rank, if any failed. Nothing was sealed, unless the seal itself
            broke off.
    """
    tasks = steps.broadcast(group, "plan the copy", plan_and_seal.plan)
    if held is None:
        own = own_run(tasks, [task.size_bytes for task in tasks], group.rank, group.size)
    else:
        share = steps.reduce_scatter(
            group, "share out the objects", lambda: held(tasks), partial(_share_out, tasks)
        )
        own = [tasks[number] for number in share]
    fresh = plan_and_seal.has_fresh_names
    transfer = replace(transfer, overwrite=fresh or transfer.overwrite)
    mine = [task.key for task in own] if fresh else []
    may_be_sealed = False

    def copy() -> Copied:
        copied = copy_objects(transfer, own)
        if not transfer.overwrite:
            mine.extend(copied.stored)
        return copied

    def seal(copied: Sequence[Copied]) -> Mirrored:
        plan_and_seal.seal({key: one for part in copied for key, one in part.stored.items()})
        return Mirrored(
            {task.key: task.size_bytes for task in tasks},
            sorted(key for part in copied for key in part.by_server),
            sum(part.fetched_bytes for part in copied),
        )

    try:
        written = steps.each(group, "copy", copy)
        copied = steps.gather(group, "verify", lambda: verify_copies(transfer, own, written))
        if before_seal is not None:
            steps.broadcast(group, "prepare to seal", before_seal)
        may_be_sealed = True
        return steps.broadcast(group, _STEP_SEAL, lambda: seal(copied or ()))
    except BaseException as error:
        is_leftover = not may_be_sealed or is_surely_unpublished(error, group, _STEP_SEAL)
        if is_leftover and (fresh or not _sealed_by_another(error, group)):
            sweep(transfer.target, mine, Proof.NOT_BEGUN, why="this failed copy")
        raise


def _share_out(tasks: Sequence[CopyTask], held: Sequence[Sequence[int]]) -> list[list[int]]:
    """Give each object to one of the ranks that can read it, balanced by bytes.

    Raises:
        NotFoundError: If none can.
    """
    able: list[list[int]] = [[] for _ in tasks]
    for rank, numbers in enumerate(held):
        for number in numbers:
            able[number].append(rank)
    shares: list[list[int]] = [[] for _ in held]
    loads = [0] * len(held)
    for number in sorted(range(len(tasks)), key=lambda one: -tasks[one].size_bytes):
        if not able[number]:
            raise NotFoundError(
                f"no rank has the object {tasks[number].source_key} with all its"
                f" {tasks[number].size_bytes} bytes. Nothing was copied"
            )
        rank = min(able[number], key=loads.__getitem__)
        loads[rank] += tasks[number].size_bytes
        shares[rank].append(number)
    return shares


def _sealed_by_another(error: BaseException, group: RankGroup) -> bool:
    """Tell whether a checkpoint appeared meanwhile, whose objects may have the names of ours."""
    if not isinstance(error, RankFailures) or error.step != _STEP_SEAL:
        return False
    return isinstance(error.exceptions.get(group.coordinator), AlreadyExistsError)


def _fresh_names(names: Sequence[str], save_id: str) -> dict[str, str]:
    """Return a name for each copy that no other save has: the same but for the save's id."""
    fresh = {
        name: data_key(*_rank_and_number(name, number), save_id)
        for number, name in enumerate(names)
    }
    if len(set(fresh.values())) < len(fresh):  # two saves' objects with the same numbers
        fresh = {name: data_key(0, number, save_id) for number, name in enumerate(names)}
    return fresh


def _rank_and_number(name: str, number: int) -> tuple[int, int]:
    """Return what the name of an object of ours counts, so that its copy says the same."""
    parts = name.split(".", 1)[0].split("_")
    if save_id_of(name) is None or len(parts) != 4:
        return 0, number
    return int(parts[2]), int(parts[3])


def dcp_to_dcp(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    object_bytes: int | None = None,
    reencode: bool = False,
    verify: bool = True,
    **options: Unpack[ConversionOptions],
) -> ConvertResult:
    """Copy a checkpoint to another folder, bucket or provider; change it on the way if asked to.

    ```python
    dcp_to_dcp("s3://run/step-100", "gs://archive/step-100")
    dcp_to_dcp("s3://run/step-100", "s3://run/weights", keys=["model.*"], dtype=torch.bfloat16)
    ```

    With nothing to change, data objects are copied byte by byte, by the provider alone where both
    URLs are S3's or Google's and have equal options, else through this process. Those of a
    checkpoint of ours get fresh names, and the copy is sealed as after `dcpstore.save`; a
    checkpoint by a stock writer keeps every name, and its ``.metadata`` is put last. Each copy is
    read back: blocks are compared with their checksums, bytes that have none with the source's.
    With any of ``keys``, ``exclude``, ``rename``, ``dtype``, ``object_bytes`` or ``reencode`` the
    checkpoint is written anew, in our own form, whoever wrote it. An interrupted copy leaves no
    checkpoint. All ranks of the group may call it together; each copies a share of the bytes.

    Arguments that are not listed are those of every converter: see `dcpstore.convert`.

    Args:
        source: Folder of a checkpoint, by ours or by stock DCP.
        target: Folder of the copy.
        object_bytes: Target size of data objects; 256 MiB where None.
        reencode: Write anew although nothing else changes: a stock checkpoint becomes one of
            ours, with checksums.
        verify: Read each object back after a copy byte by byte. Without, their sizes are
            compared; where the provider copies, no data is read at all.
        overwrite: Replace a checkpoint that exists; it stays loadable until the copy is sealed.
            A stock checkpoint replaces another only with ``reencode``.

    Raises:
        NotFoundError: If there is no checkpoint at ``source``.
        AlreadyExistsError: If ``target`` holds one that may not be replaced. Nothing was written.
        CorruptError: If stored bytes are not those that were saved, or a copy reads back
            differently. Nothing was sealed.
        ConfigError: If ``source`` holds safetensors files, or the arguments match no key.
        RankFailures: On every rank of several, if any failed.
    """
    conversion = Conversion(source, target, **options)
    selection = conversion.selection
    wanted = (conversion.keys, conversion.exclude, conversion.rename, selection.dtypes)
    changes = bool(reencode or object_bytes) or any(wanted)
    with conversion.join() as group, open_source(group, conversion) as checkpoint:
        if checkpoint.discovered.files is not None:
            raise ConfigError(f"{checkpoint.url} holds safetensors files: use safetensors_to_dcp")
        if changes:
            return write_checkpoint(
                group,
                conversion,
                checkpoint,
                _entries(checkpoint, selection),
                object_bytes=object_bytes or WriteConfig().object_bytes,
            )
        with (
            closing(Folder(target, conversion.target_options, WriteConfig())) as folder,
            conversion.show_progress(group, "copy") as meter,
        ):
            transfer = Transfer(
                checkpoint.store,
                folder.open(),
                conversion.shares,
                meter,
                conversion.overwrite,
                verify,
            )
            return _mirror(group, checkpoint, folder.url, transfer, conversion.target_options)


def _mirror(
    group: RankGroup,
    checkpoint: Checkpoint,
    target: str,
    transfer: Transfer,
    options: Mapping[str, Any] | None,
) -> ConvertResult:
    """Copy byte by byte. The objects of ours get fresh names, so none replaces another."""
    phases = Phases()
    how: Mirror = MirrorOfStock(checkpoint, transfer.target)
    if checkpoint.discovered.manifest is not None:
        writer = ObjectStoreWriter(
            target,
            storage_options=options,
            overwrite=transfer.overwrite,
            config=transfer.shares.write_config(transfer.shares.block_bytes),
        )
        how = MirrorOfOurs(checkpoint, writer)
    with phases.phase("copy"):
        copied = mirror(group, how, transfer)
    tensors = checkpoint.tensors.values()
    return ConvertResult(
        source=checkpoint.url,
        target=target,
        num_tensors=len(tensors),
        num_values=len(checkpoint.keys) - len(tensors),
        tensor_bytes=sum(prod(one.size) * one.properties.dtype.itemsize for one in tensors),
        objects=copied.objects,
        fetched_bytes=copied.fetched_bytes,
        num_server_copies=len(copied.by_server),
        server_copied_bytes=sum(copied.objects[key] for key in copied.by_server),
        seconds=phases.seconds,
    )


def _entries(checkpoint: Checkpoint, selection: Selection) -> list[SinkEntry]:
    """Return the keys to write, each at its place in the nested state dict."""
    known = planner_paths_of(checkpoint.metadata.planner_data) or {}
    entries = []
    for fqn, name in selection.names(checkpoint.keys).items():
        path: Path = known.get(fqn, (fqn,)) if name == fqn else tuple(name.split("."))
        entry = checkpoint.metadata.state_dict_metadata[fqn]
        if not isinstance(entry, TensorStorageMetadata):
            entries.append(SinkEntry(name, fqn, path))
            continue
        saved = entry.properties.dtype
        dtype = saved if checkpoint.is_opaque(fqn) else selection.dtype_of(fqn, saved)
        properties = replace(entry.properties, dtype=dtype)
        entries.append(SinkEntry(name, fqn, path, properties, tuple(entry.size)))
    return entries
