"""Two tiers of a run: the disks of its nodes, which only their own ranks see, and a bucket.

A step comes and goes in this order; see ``docs/design/016-two-tiers.md``:

1. (all ranks) `dcpstore.save` to the rank's own disk: its data objects lie there, and the metadata
   on the coordinator's disk alone
2. (all ranks) `spread_seal`: the metadata on every disk. The step is whole
3. (all ranks) `copy_up`, of every k-th step: each object by one rank that has it; sealed in the
   bucket by the coordinator
4. (each rank) `retire_local`: old steps leave the disk
5. (all ranks, after a restart) `choose` the newest step that the disks of all ranks hold
   together, or that the bucket holds, and load it with ``choice.reader(config)``

What a rank wants of a step::

    on its own disk            read there
    on other disks alone       read by a rank that has it, and sent on
    on no disk                 read from the copy in the bucket
    damaged on a disk          read from the copy in the bucket, with a warning
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata

from dcpstore.config import ReadConfig, WriteConfig
from dcpstore.convert.dcp.copy import CopyTask, Mirrored, MirrorOfOurs, Transfer, mirror
from dcpstore.convert.output import share_budget
from dcpstore.errors import CheckpointError, CorruptError, NotFoundError, StoreError
from dcpstore.format.manifest import DataObject, StoredItem
from dcpstore.format.seal import METADATA_KEY, Seal, get_manifest, read_seal, save_id_of
from dcpstore.ranks import RankGroup, steps
from dcpstore.read.checkpoint import Checkpoint
from dcpstore.read.discovery import Discovered, discover
from dcpstore.read.reader import ObjectStoreReader
from dcpstore.report import Meter
from dcpstore.store.base import Destination, FillsMemory, Store
from dcpstore.store.folder import Folder, parse_location
from dcpstore.store.retry import Call, WrappedStore
from dcpstore.write.commit import Proof, keys_named_in, probe, sweep
from dcpstore.write.writer import ObjectStoreWriter

T = TypeVar("T")

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d+)")


# --- after a save ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sealed:
    """What makes a step exist: its metadata, and its manifest where that is an object."""

    save_id: str
    metadata: bytes
    manifest_key: str | None = None
    manifest: bytes = b""

    @staticmethod
    def read(store: Store) -> _Sealed:
        data = store.get(METADATA_KEY).data
        seal = read_seal(data)
        if seal is None:
            raise CorruptError(f"{store.url}: {METADATA_KEY} is not dcpstore's", key=METADATA_KEY)
        if seal.manifest_key is None:
            return _Sealed(seal.save_id, bytes(data))
        manifest = get_manifest(store, data, seal)
        return _Sealed(seal.save_id, bytes(data), seal.manifest_key, manifest)

    def put(self, store: Store) -> None:
        """Put it, unless it is there. What an earlier save left in its place is deleted."""
        found = probe(store, METADATA_KEY)
        if found is not None and found.data == self.metadata:
            return
        if self.manifest_key is not None:
            store.put(self.manifest_key, self.manifest)
        store.put(METADATA_KEY, self.metadata)
        if found is None:
            return
        try:
            named = keys_named_in(store, found.data, key=METADATA_KEY)
        except CheckpointError as error:
            logger.warning(
                "%s: cannot tell which objects the replaced step had; they stay until the step"
                " is retired (%s)",
                store.url,
                error,
            )
            return
        old = [key for key in named if save_id_of(key) != self.save_id]
        sweep(store, old, Proof.REPLACED, why="the replaced step")


def spread_seal(group: RankGroup, folder: Folder) -> None:
    """Put the metadata of a step that was just saved on every disk. Collective.

    Only then is the step whole: after a crash before, it does not count on the disks that have
    not got them. A step of another save in the same place is replaced, as the ranks have just
    saved this one.

    Args:
        group: The ranks that saved it, with the same coordinator.
        folder: The step's on this rank's disk.

    Raises:
        RankFailures: On every rank, if any could not read or put it.
    """
    sealed = steps.broadcast(group, "read the seal", lambda: _Sealed.read(folder.open()))
    steps.each(group, "seal on every disk", lambda: sealed.put(folder.open()))


# --- after a restart ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Where a step is loaded from. Made on every rank by `choose`.

    Attributes:
        step: Number of the step.
        folder: The step's: on this rank's disk, or in the bucket.
        is_local: Whether disks hold it, but for what `lost` says.
        lost: Of each object that no disk holds, the key of its copy in the bucket.
        readers: Key and ranks of each object on disks; on ranks other than the coordinator
            empty, and None where everything is in the bucket.
        found: The step's metadata; on the coordinator.
        bucket: The step's folder there, whether or not it exists; None without a bucket.
    """

    step: int
    folder: Folder
    is_local: bool
    lost: Mapping[str, str] = field(default_factory=dict)
    readers: Mapping[str, Sequence[int]] | None = None
    found: Discovered | None = None
    bucket: Folder | None = None

    def reader(self, config: ReadConfig | None = None) -> ObjectStoreReader:
        """Return what loads the step: ``dcpstore.load(..., storage_reader=choice.reader())``.

        The load's group has to have the ranks of `choose`, and the same coordinator.
        """
        config = config or ReadConfig()
        if self.is_local:
            return _TierReader(self, config)
        return ObjectStoreReader(self.folder.url, config=config, store_opener=_opens(self.folder))


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A step that some disk has the metadata of."""

    step: int
    save_id: str


def choose(
    group: RankGroup,
    local: Folder,
    bucket: Folder | None,
    newest: Callable[[], tuple[int, str] | None],
    *,
    step: int | None = None,
    accepts: Callable[[Seal], bool] = lambda _: True,
    config: ReadConfig | None = None,
) -> Choice | None:
    """Find the newest step that the ranks can load together. Collective.

    A step counts on a disk that has its metadata; and of the data objects that these name, those
    that are there in their right size. It is chosen if every object is on the disk of some
    rank, or in a copy of the step in the bucket; or if it lies in the bucket. Where it can be
    had from both, the disks serve it. How many ranks and nodes saved it does not matter.

    Args:
        group: The ranks that load.
        local: The run's folder on this rank's disk. It need not exist.
        bucket: The run's folder in the bucket; None if there is none.
        newest: Called on the coordinator: number and folder name of the newest step that is sealed
            in the bucket (of ``step``, where that is given); None if there is none.
        step: Look for this one alone.
        accepts: Tells from its footer whether a step on a disk is of this run.
        config: Of the reads of metadata.

    Returns:
        The same choice on every rank; None if there is nothing to load. What is there and
        cannot be loaded is told by a warning on the coordinator.

    Raises:
        RankFailures: On every rank, if any failed.
    """
    config = config or ReadConfig()
    disk = _Disk(local)

    def tell() -> tuple[dict[_Candidate, datetime | None], tuple[int, str] | None]:
        return disk.candidates(step, accepts), newest() if group.is_coordinator else None

    told = partial(_order, group.coordinator)
    candidates, in_bucket = steps.all_reduce(group, "tell the steps on the disks", tell, told)
    for candidate in candidates:
        folder = None if bucket is None else bucket.below(f"step-{candidate.step}")
        reach = _Reach(group, disk, candidate, folder, config)
        has_copy = in_bucket is not None and in_bucket[0] == candidate.step
        choice = reach.decide(may_be_copied=has_copy)
        if choice is not None:
            return choice
    if in_bucket is None or bucket is None:
        return None
    return Choice(in_bucket[0], bucket.below(in_bucket[1]), is_local=False)


def _order(
    coordinator: int,
    told: Sequence[tuple[Mapping[_Candidate, datetime | None], tuple[int, str] | None]],
) -> tuple[list[_Candidate], tuple[int, str] | None]:
    """Return the steps on disks that are not older than the bucket's newest, newest first."""
    in_bucket = told[coordinator][1]
    sealed_at: dict[_Candidate, float] = {}
    for here, _ in told:
        for one, at in here.items():
            sealed_at[one] = max(sealed_at.get(one, 0.0), at.timestamp() if at else 0.0)
    newer = [one for one in sealed_at if in_bucket is None or one.step >= in_bucket[0]]
    return sorted(newer, key=lambda one: (one.step, sealed_at[one]), reverse=True), in_bucket


class _Disk:
    """What lies of a run on this rank's disk, by one listing."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._sizes: dict[str, dict[str, int]] = {}

    def candidates(
        self, step: int | None, accepts: Callable[[Seal], bool]
    ) -> dict[_Candidate, datetime | None]:
        """Return the steps that have metadata here, and when these were put."""
        store, put_at = self.folder.open(), {}
        for name, info in _listed(store):
            self._sizes.setdefault(name, {})[info.key[len(name) + 1 :]] = info.size_bytes
            if info.key == f"{name}/{METADATA_KEY}":
                put_at[name] = info.modified
        found = {}
        for name, at in put_at.items():
            number = int(_STEP.fullmatch(name)[1])  # type: ignore[index]
            if step not in (None, number):
                continue
            try:
                seal = read_seal(store.get(f"{name}/{METADATA_KEY}").data)
            except CheckpointError as error:
                logger.warning("%s: %s does not count: %s", store.url, name, error)
                continue
            if seal is not None and accepts(seal):
                found[_Candidate(number, seal.save_id)] = at
        self.found = found
        return found

    def sizes(self, step: int) -> Mapping[str, int]:
        """Return key and size of every object of a step."""
        return self._sizes.get(f"step-{step}", {})


def _listed(store: Store) -> Iterator[tuple[str, Any]]:
    """Yield every object of a step in a run's folder, with the name of the step's folder."""
    with suppress(NotFoundError):  # no folder
        for info in store.list():
            name = info.key.partition("/")[0]
            if _STEP.fullmatch(name):
                yield name, info


@dataclass(slots=True)
class _Reach:
    """Finds out whether a step can be loaded from the disks, as one rank."""

    group: RankGroup
    disk: _Disk
    candidate: _Candidate
    bucket: Folder | None
    config: ReadConfig
    found: Discovered | None = None
    holders: list[list[int]] = field(default_factory=list)  # of each object; on the coordinator

    def decide(self, *, may_be_copied: bool) -> Choice | None:
        group, name = self.group, f"step-{self.candidate.step}"
        step = f"look for the objects of {name}"
        teller, num_lost = steps.all_reduce(group, step, self._look, self._weigh)
        if teller is None or (num_lost and not may_be_copied):
            if group.is_coordinator:
                logger.warning(
                    "%s: %s (save %s) cannot be loaded: no rank's disk has %s, and no copy of it is"
                    " in the bucket. An older step is looked for",
                    self.disk.folder.url,
                    name,
                    self.candidate.save_id,
                    "its metadata whole" if teller is None else f"{num_lost} of its objects",
                )
            return None
        if teller != group.coordinator:
            own = self.found if group.rank == teller else None
            told = steps.gather(group, "send the metadata to the coordinator", lambda: own)
            self.found = told[teller] if told is not None else None
        lost: dict[str, str] = {}
        if num_lost:
            found = steps.broadcast(group, "look for the copy in the bucket", self._find_lost)
            if found is None:
                return None
            lost = found
        return Choice(
            self.candidate.step,
            self.disk.folder.below(name),
            is_local=True,
            lost=lost,
            readers=self._readers() if group.is_coordinator else {},
            found=self.found if group.is_coordinator else None,
            bucket=self.bucket,
        )

    def _look(self) -> tuple[int, list[int]] | None:
        """Return how many objects there are and the numbers of those here, if this can be told."""
        if self.candidate not in self.disk.found:
            return None
        folder = self.disk.folder.below(f"step-{self.candidate.step}")
        try:
            self.found = discover(folder.open(), self.config)
            objects = self.found.decode_manifest(self.config.max_metadata_bytes).objects
        except CheckpointError as error:
            logger.warning("%s does not count: %s", folder.url, error)
            return None
        sizes = self.disk.sizes(self.candidate.step)
        here = [n for n, one in enumerate(objects) if sizes.get(one.key) == one.size_bytes]
        return len(objects), here

    def _weigh(self, told: Sequence[tuple[int, list[int]] | None]) -> tuple[int | None, int]:
        """Return who has the metadata, and how many objects no rank has. On the coordinator."""
        tellers = [rank for rank, one in enumerate(told) if one is not None]
        if not tellers:
            return None, 0
        self.holders = [[] for _ in range(max(one[0] for one in told if one is not None))]
        for rank, one in enumerate(told):
            for number in () if one is None else one[1]:
                self.holders[number].append(rank)
        coordinator = self.group.coordinator
        teller = coordinator if coordinator in tellers else tellers[0]
        return teller, sum(not ranks for ranks in self.holders)

    def _objects(self) -> Sequence[DataObject]:
        assert self.found is not None
        return self.found.decode_manifest(self.config.max_metadata_bytes).objects

    def _readers(self) -> dict[str, Sequence[int]]:
        objects = zip(self._objects(), self.holders, strict=True)
        return {one.key: ranks for one, ranks in objects if ranks}

    def _find_lost(self) -> dict[str, str] | None:
        """Return the copies of what no disk has; None if the bucket holds something else."""
        assert self.found is not None
        assert self.bucket is not None
        copies = _copies_in(self.bucket, self.found, self.config)
        objects = zip(self._objects(), self.holders, strict=True)
        lost = [one.key for one, ranks in objects if not ranks]
        if all(key in copies for key in lost):
            return {key: copies[key] for key in lost}
        logger.warning(
            "%s holds another save of the step than the disks, which lack %d of its objects: the"
            " step is loaded from the bucket alone",
            self.bucket.url,
            len(lost),
        )
        return None


def _copies_in(bucket: Folder, found: Discovered, config: ReadConfig) -> Mapping[str, str]:
    """Return the key in the bucket of every object of a step; none if it is not copied there.

    What lies there is a copy if it has the same items at the same places in its objects, with
    the same checksums, under whatever names.

    Args:
        bucket: The step's folder there.
        found: The step's metadata.
        config: Of the reads.
    """
    try:
        there = discover(bucket.open(), config)
    except NotFoundError:
        return {}
    if there.manifest is None:
        return {}
    most_bytes = config.max_metadata_bytes
    ours, theirs = found.decode_manifest(most_bytes), there.decode_manifest(most_bytes)
    if ours.items.keys() != theirs.items.keys():
        return {}
    copies: dict[str, str] = {}
    for one, item in ours.items.items():
        other = theirs.items[one]
        if len(item.forms) != len(other.forms):
            return {}
        for form, copy in zip(item.forms, other.forms, strict=True):
            if not _is_copy(form, copy) or copies.setdefault(form.key, copy.key) != copy.key:
                return {}
    return copies


def _is_copy(item: StoredItem, other: StoredItem) -> bool:
    if item.checksums is None or other.checksums is None:
        return False
    is_there = (item.record, item.payload, item.kind) == (other.record, other.payload, other.kind)
    return is_there and np.array_equal(item.checksums, other.checksums)


# --- reading from both ----------------------------------------------------------------------


class _TierStore(WrappedStore):
    """Reads each object on this rank's disk, or its copy in the bucket.

    Args:
        choice: Where the objects lie.
        config: Of the reads.
    """

    def __init__(self, choice: Choice, config: ReadConfig) -> None:
        super().__init__(choice.folder.open())
        self._choice = choice
        self._config = config
        self._lock = threading.Lock()
        self._copies = dict(choice.lost)
        self._all_copies: Mapping[str, str] | None = None
        self.found = choice.found

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        """Fetch bytes ``[start, end)``."""
        return self._read(key, lambda store, key: store.get_range(key, start, end))

    def fill(self, key: str, start: int, destination: Destination) -> None:
        """Fetch a range straight into memory of the caller's."""

        def fill(store: Store, key: str) -> None:
            if isinstance(store, FillsMemory) and store.capabilities.fills_memory:
                store.fill(key, start, destination)
            else:
                destination.take(store.get_range(key, start, start + destination.num_bytes))

        self._read(key, fill)

    def _read(self, key: str, request: Callable[[Store, str], T]) -> T:
        if key not in self._copies:
            try:
                return request(self.inner, key)
            except (NotFoundError, CorruptError, StoreError) as error:
                if not self.use_spare(key, error):
                    raise
        assert self._choice.bucket is not None
        return request(self._choice.bucket.open(), self._copies[key])

    def use_spare(self, key: str, error: CheckpointError) -> bool:
        """Read an object from the copy in the bucket from now on, if there is one there."""
        bucket = self._choice.bucket
        if key in self._copies:
            return True
        if bucket is None or self.found is None:
            return False
        with self._lock:  # also while it looks, so that one thread does
            if self._all_copies is None:
                self._all_copies = _copies_in(bucket, self.found, self._config)
            copy = self._all_copies.get(key)
            if copy is not None and key not in self._copies:
                logger.warning("%s; it is read from %s instead", error, bucket.url)
                self._copies[key] = copy
        return copy is not None


class _TierReader(ObjectStoreReader):
    """Reads a step that lies on the disks of several nodes."""

    def __init__(self, choice: Choice, config: ReadConfig) -> None:
        self._tiers = _TierStore(choice, config)
        self._found = choice.found
        super().__init__(
            choice.folder.url, config=config, store_opener=lambda *_, **__: self._tiers
        )
        self.readers = choice.readers

    def discover(self, *, rank: int | None = None) -> Discovered:
        """Return the metadata that were found when the step was chosen. On the coordinator."""
        del rank
        assert self._found is not None, "the coordinator of the load is that of the choice"
        return self._found

    def open_metadata(self, discovered: Discovered) -> Metadata:
        """Open what `discover` returned."""
        self._tiers.found = discovered
        return super().open_metadata(discovered)


def _opens(folder: Folder) -> Callable[..., Store]:
    return lambda *_, **__: folder.open()


# --- to the bucket --------------------------------------------------------------------------


def copy_up(
    group: RankGroup,
    source: Folder,
    target: Folder,
    *,
    config: WriteConfig | None = None,
    overwrite: bool = False,
    max_bytes_per_s: float | None = None,
    cancelled: threading.Event | None = None,
    before_seal: Callable[[], None] = lambda: None,
    meter: Meter | None = None,
) -> Mirrored:
    """Copy a step from the disks to the bucket. Collective.

    Each object is uploaded by one rank that has it, and compared with its checksums on the way. The
    copy has the same contents under fresh names, and is sealed last. If it fails or is cancelled
    before, nothing is sealed, and what was put is deleted.

    Args:
        group: Ranks on whose disks the step is whole.
        source: The step's folder on this rank's disk.
        target: The step's folder in the bucket.
        config: Its ``budget_bytes`` (at least 32 MiB) bounds the memory of each rank.
        overwrite: Replace a step that is there. It stays loadable until the copy is sealed.
        max_bytes_per_s: How fast each rank reads, and so uploads, at most; None for no limit.
        cancelled: Once it is set on any rank, the copy fails on all, unless it is being sealed.
        before_seal: Called on the coordinator; if it raises, nothing is sealed.
        meter: Counts the bytes of this rank.

    Raises:
        RankFailures: On every rank, if any failed. `CorruptError` is the cause where a disk holds
            other bytes than were saved, `NotFoundError` where none holds an object.
        ConfigError: If the budget is too small.
    """
    config = config or WriteConfig()
    shares = share_budget(config.budget_bytes)
    writer = ObjectStoreWriter(
        target.url, overwrite=overwrite, config=config, store_opener=_opens(target)
    )
    paced = _PacedStore(source.open(), max_bytes_per_s, cancelled or threading.Event())
    # What came from the disk was compared with its checksums, and the bucket's answers are counted.
    transfer = Transfer(paced, target.open(), shares, meter or Meter("copy"), overwrite, False)
    upload = _Upload(source, writer, shares.read_config())

    def held(tasks: Sequence[CopyTask]) -> list[int]:
        sizes = {info.key: info.size_bytes for info in source.open().list()}
        return [n for n, one in enumerate(tasks) if sizes.get(one.source_key) == one.size_bytes]

    return mirror(group, upload, transfer, held=held, before_seal=before_seal)


class _Upload:
    """How a step on disks is copied: as `MirrorOfOurs`, which the coordinator alone opens."""

    has_fresh_names = True

    def __init__(self, source: Folder, writer: ObjectStoreWriter, config: ReadConfig) -> None:
        self._source = source
        self._writer = writer
        self._config = config

    def plan(self) -> list[CopyTask]:
        """Open the step, look at the target, and say what to copy."""
        found = discover(self._source.open(), self._config)
        checkpoint = Checkpoint(self._source, found, self._config)
        self._mirror = MirrorOfOurs(checkpoint, self._writer)
        return self._mirror.plan()

    def seal(self, stored: Mapping[str, DataObject]) -> None:
        """Seal metadata that name the copies."""
        self._mirror.seal(stored)


class _PacedStore(WrappedStore):
    """Reads no faster than so many bytes per second, until it is cancelled. Thread-safe."""

    def __init__(
        self, inner: Store, max_bytes_per_s: float | None, cancelled: threading.Event
    ) -> None:
        super().__init__(inner)
        self._rate = max_bytes_per_s
        self._cancelled = cancelled
        self._lock = threading.Lock()
        self._free_at = 0.0

    def _pass(self, call: Call, request: Callable[[Store], T]) -> T:
        wait_s = 0.0
        if self._rate is not None and call.start is not None and call.end is not None:
            with self._lock:
                now = time.monotonic()
                begin = max(self._free_at, now)
                self._free_at = begin + (call.end - call.start) / self._rate
                wait_s = self._free_at - now
        if self._cancelled.wait(wait_s):
            raise CheckpointError(f"the copy of {self.url} was cancelled; nothing was sealed")
        return super()._pass(call, request)


# --- old steps ------------------------------------------------------------------------------


def retire_local(
    local: Folder, newest: int, num_kept: int, needed: Collection[int] = ()
) -> list[int]:
    """Delete old steps from this rank's disk. Each rank for itself; ranks may share a disk.

    The metadata go first, so that what a crash leaves does not count as a step; the next call
    deletes it. So are folders in which a save died. Files that dcpstore did not write stay.

    Args:
        local: The run's folder on the disk.
        newest: The step that `spread_seal` made whole last. What is newer is left alone: it
            may be being saved.
        num_kept: How many steps that have their metadata here stay, ``newest`` counted.
        needed: Steps that stay beside these, as a copy of them is under way.

    Returns:
        The steps that were deleted. A refusal is a warning.
    """
    store = local.open()
    keys: dict[int, list[str]] = {}
    for name, info in _listed(store):
        keys.setdefault(int(name.removeprefix("step-")), []).append(info.key)
    sealed = [one for one in keys if f"step-{one}/{METADATA_KEY}" in keys[one] and one <= newest]
    stay = {*sorted(sealed)[-num_kept:], *needed} if num_kept else set(needed)
    doomed = [one for one in keys if one < newest and one not in stay]
    return [one for one in sorted(doomed) if _retire(local, f"step-{one}", keys[one])]


def _retire(local: Folder, name: str, keys: Sequence[str]) -> bool:
    store, metadata = local.open(), f"{name}/{METADATA_KEY}"
    if metadata in keys:
        try:
            store.delete_many([metadata])
        except CheckpointError as error:
            logger.warning("%s: %s cannot be deleted and stays: %s", store.url, name, error)
            return False
    objects = [key for key in keys if save_id_of(key.rpartition("/")[2]) is not None]
    refused = sweep(store, objects, Proof.RETIRED, why="a retired step")
    place = parse_location(local.url)
    if place.scheme == "file":
        with suppress(OSError):  # it holds something else, or another rank was faster
            Path(place.prefix, name).rmdir()
    return not refused
