"""Two tiers of a run: the disks of its nodes, which only their own ranks see, and a bucket.

A step comes and goes in this order; see ``docs/design/016-two-tiers.md``:

1. (all ranks) `dcpstore.save` to the rank's own disk: its data objects lie there, and the metadata
   on the coordinator's disk alone
2. (all ranks) `spread_seal`: the metadata on every disk. The step is whole
3. (all ranks) `copy_up`, of every k-th step: each object by one rank that has it; sealed in the
   bucket by the coordinator
4. (each rank) `retire_local`: old steps leave the disk
5. (all ranks, after a restart) `dcpstore.manager.choice`: load the newest step that the disks of
   all ranks hold together, or that the bucket holds
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dcpstore.config import ReadConfig, WriteConfig
from dcpstore.convert.dcp.copy import CopyTask, Mirrored, MirrorOfOurs, Transfer, mirror
from dcpstore.convert.output import share_budget
from dcpstore.errors import CheckpointError, CorruptError
from dcpstore.format.manifest import DataObject
from dcpstore.format.seal import METADATA_KEY, get_manifest, read_seal, save_id_of
from dcpstore.manager.choice import listed_steps, opens
from dcpstore.ranks import RankGroup, steps
from dcpstore.read.checkpoint import Checkpoint
from dcpstore.read.discovery import discover
from dcpstore.report import Meter
from dcpstore.store.base import Store
from dcpstore.store.folder import Folder, parse_location
from dcpstore.store.retry import Call, WrappedStore
from dcpstore.write.commit import Proof, keys_named_in, probe, sweep
from dcpstore.write.writer import ObjectStoreWriter

T = TypeVar("T")

logger = logging.getLogger(__name__)

# What a save that was killed leaves of a file: ours, and obstore's.
_UNFINISHED = re.compile(r"\.dcpstore-tmp-.*|(__|\.).*#\d+", re.DOTALL)


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
        target.url, overwrite=overwrite, config=config, store_opener=opens(target)
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
        self._mirror = MirrorOfOurs(checkpoint, self._writer, checks_sizes=False)
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
    keys: dict[int, list[str]] = {number: [] for number in _folders_of(local)}
    for _, number, info in listed_steps(store):
        keys.setdefault(number, []).append(info.key)
    sealed = [one for one in keys if f"step-{one}/{METADATA_KEY}" in keys[one] and one <= newest]
    stay = {*sorted(sealed)[-num_kept:], *needed} if num_kept else set(needed)
    doomed = [one for one in keys if one < newest and one not in stay]
    return [one for one in sorted(doomed) if _retire(local, f"step-{one}", keys[one])]


def _folders_of(local: Folder) -> list[int]:
    """Return the steps that have a folder, which no listing shows if it holds no whole file."""
    place = parse_location(local.url)
    if place.scheme != "file":
        return []
    names = [path.name.removeprefix("step-") for path in Path(place.prefix).glob("step-*")]
    return [int(name) for name in names if name.isdecimal() and name == str(int(name))]


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
        folder = Path(place.prefix, name)
        with suppress(OSError):  # it holds something else, or another rank was faster
            for path in folder.iterdir():
                if _UNFINISHED.fullmatch(path.name):
                    path.unlink(missing_ok=True)
            folder.rmdir()
    return not refused
