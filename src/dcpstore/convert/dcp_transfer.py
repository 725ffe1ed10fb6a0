"""One rank's share of a copy: moved by the provider or through this process, then proven.

By the provider no byte passes here. What proves such a copy are the checksums of the
checkpoint itself: the copy is read back and every block compared. Bytes of which there is no
checksum (the framing of records; all of a stock checkpoint) are compared with the source's::

    source   .....[framing]...............[framing]....    read: the framing alone
    copy     [item          ][framing][item        ][..    read: all, against the manifest
                                                           and against the framing

Where the provider refuses, once, the rest passes through this process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from dcpstore.commit import Proof, sweep
from dcpstore.convert.dcp_memory import Shares
from dcpstore.convert.dcp_objects import CopyTask, ObjectCheck, pass_ranges, pass_through
from dcpstore.convert.output import Outputs, reject_existing
from dcpstore.errors import (
    AlreadyExistsError,
    CheckpointError,
    ConflictError,
    CorruptError,
    StoreError,
)
from dcpstore.format.checksum import crc32c
from dcpstore.manifest import DataObject
from dcpstore.progress import Meter
from dcpstore.ranges import ByteRange
from dcpstore.store.base import Store
from dcpstore.store.server_copy import ServerCopy, server_copier

__all__ = ["Copied", "Transfer", "copy_objects", "verify_copies"]

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

    def __init__(self, transfer: Transfer, copy: ServerCopy) -> None:
        self._transfer = transfer
        self._copy = copy
        self._refusal = threading.Lock()  # held for ever by whoever meets the first
        self.made: dict[str, DataObject | None] = {}

    def copy(self, task: CopyTask) -> None:
        if self._refusal.locked():
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
        if self._refusal.acquire(blocking=False):
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
    objects = ((task.source_key, task.size_bytes) for task in tasks)
    config = transfer.shares.read_config()
    crcs = {}
    with pass_through(transfer.source, objects, config) as pieces, outputs:
        for task in tasks:
            check = ObjectCheck(transfer.source.url, task.source_key, task.items)
            with outputs.write(task.key) as stream:
                for data in _next_bytes(pieces, task.size_bytes):
                    check.update(data)
                    stream.write(data)
            crcs[task.key] = check.crc32c
    return outputs.stored, crcs


def _next_bytes(pieces: Iterator[tuple[str, memoryview]], num_bytes: int) -> Iterator[memoryview]:
    """Yield the pieces of the next object or range."""
    at = 0
    while at < num_bytes:
        _, data = next(pieces)
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
    objects = ((task.key, task.size_bytes) for task in tasks)
    with pass_through(transfer.target, objects, transfer.shares.read_config()) as pieces:
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
