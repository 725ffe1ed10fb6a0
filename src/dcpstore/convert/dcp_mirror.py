"""A checkpoint copied as it is: the bytes of its data objects do not change.

A checkpoint of ours goes through our own commit protocol, so its objects get fresh names and
the new metadata name them; a checkpoint by a stock writer keeps all names, and its
``.metadata`` is put last, as it was. All ranks:

1. (coordinator) look whether a checkpoint lies at the target, and plan the objects
2. copy a share of the objects each, by the provider or through this process
3. read each copy back, and compare it; see `dcpstore.convert.dcp_transfer`
4. (coordinator) seal
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

from torch.distributed.checkpoint.storage import WriteResult

from dcpstore.collectives import RankGroup, steps
from dcpstore.commit import Proof, probe, sweep
from dcpstore.convert.dcp_memory import Shares
from dcpstore.convert.dcp_objects import CopyTask
from dcpstore.convert.dcp_share import own_run
from dcpstore.convert.dcp_transfer import Copied, Transfer, copy_objects, verify_copies
from dcpstore.convert.output import MIN_OUTPUT_BYTES, Outputs, is_surely_unpublished
from dcpstore.errors import AlreadyExistsError, CorruptError, RankFailures
from dcpstore.keys import METADATA_KEY, data_key, save_id_of
from dcpstore.manifest import DataObject, StoredItem
from dcpstore.progress import Meter
from dcpstore.reading import Checkpoint
from dcpstore.store.base import Store
from dcpstore.write_job import Written
from dcpstore.writer import ObjectStoreWriter

__all__ = ["Mirror", "MirrorOfOurs", "MirrorOfStock", "Mirrored", "mirror"]

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
    """

    has_fresh_names = True

    def __init__(self, checkpoint: Checkpoint, writer: ObjectStoreWriter) -> None:
        self._checkpoint = checkpoint
        self._writer = writer
        self._new_keys: dict[str, str] = {}

    def plan(self) -> list[CopyTask]:
        """Look at the target, and say what to copy."""
        self._checkpoint.require_whole(self._checkpoint.keys)
        save_id = self._writer.storage_meta().save_id
        assert save_id is not None
        self._writer.set_up_storage_writer(True)
        self._writer.await_look()
        # It was within the limit of the checkpoint's own config when that was opened.
        manifest = self._checkpoint.discovered.decode_manifest(sys.maxsize)
        items = _by_object(manifest.items.values())
        ends: dict[str, int] = {}
        for form in chain.from_iterable(one.forms for one in manifest.items.values()):
            ends[form.key] = max(ends.get(form.key, 0), form.record.end)
        objects = sorted(manifest.objects, key=lambda stored: stored.key)
        self._new_keys = _fresh_names([stored.key for stored in objects], save_id)
        return [
            CopyTask(
                stored.key,
                self._new_keys[stored.key],
                # No record vouches for the size of an object that is longer than its records.
                stored.size_bytes
                if stored.size_bytes == ends.get(stored.key)
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
        self._writer.finish(replace(self._checkpoint.metadata), [results])


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
        outputs = Outputs(self._store, budget_bytes=MIN_OUTPUT_BYTES, largest_bytes=len(pickled))
        with outputs, outputs.write(METADATA_KEY) as stream:
            stream.write(pickled)


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
    source: Store,
    target: Store,
    *,
    shares: Shares,
    meter: Meter,
    overwrite: bool,
    verify: bool,
) -> Mirrored:
    """Copy a checkpoint. All ranks of the group.

    Args:
        group: The ranks.
        plan_and_seal: Used on the coordinator.
        source: Rooted at the source's folder.
        target: Rooted at the target's folder.
        shares: Of the memory.
        meter: Counts the bytes copied.
        overwrite: Replace objects that have the names of new ones.
        verify: Read every copy back; else only their sizes are compared.

    Raises:
        RankFailures: On every rank, if any failed. Nothing was sealed, unless the seal itself
            broke off.
    """
    tasks = steps.broadcast(group, "plan the copy", plan_and_seal.plan)
    own = own_run(tasks, [task.size_bytes for task in tasks], group.rank, group.size)
    fresh = plan_and_seal.has_fresh_names
    transfer = Transfer(source, target, shares, meter, fresh or overwrite, verify)
    done: list[Copied] = []
    may_be_sealed = False

    def seal(copied: Sequence[Copied]) -> Mirrored:
        plan_and_seal.seal({key: one for part in copied for key, one in part.stored.items()})
        return Mirrored(
            {task.key: task.size_bytes for task in tasks},
            sorted(key for part in copied for key in part.by_server),
            sum(part.fetched_bytes for part in copied),
        )

    try:
        steps.barrier(group, "copy", lambda: done.append(copy_objects(transfer, own)))
        steps.barrier(group, "verify", lambda: done.append(verify_copies(transfer, own, done[0])))
        copied = steps.gather(group, "gather", lambda: done[-1])
        may_be_sealed = True
        return steps.broadcast(group, _STEP_SEAL, lambda: seal(copied or ()))
    except BaseException as error:
        is_leftover = not may_be_sealed or is_surely_unpublished(error, group, _STEP_SEAL)
        if is_leftover and (fresh or not _sealed_by_another(error, group)):
            made = [task.key for task in own] if fresh else done[0].stored if done else ()
            doomed = made if fresh or not overwrite else ()
            sweep(target, doomed, Proof.NOT_BEGUN, why="this failed copy")
        raise


def _sealed_by_another(error: BaseException, group: RankGroup) -> bool:
    """Tell whether a checkpoint appeared meanwhile, whose objects may have the names of ours."""
    if not isinstance(error, RankFailures) or error.step != _STEP_SEAL:
        return False
    return isinstance(error.exceptions.get(group.coordinator), AlreadyExistsError)


def _by_object(items: Iterable[StoredItem]) -> dict[str, list[StoredItem]]:
    """Return the items that have checksums, by their object."""
    found: dict[str, list[StoredItem]] = {}
    for item in chain.from_iterable(one.forms for one in items):
        if item.checksums is not None:
            found.setdefault(item.key, []).append(item)
    return found


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
