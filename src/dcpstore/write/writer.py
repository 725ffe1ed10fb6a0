"""`ObjectStoreWriter`: DCP's storage writer on an object store.

DCP calls it in this order, once per save:

0. (all ranks) ``reset`` if the caller gave a checkpoint_id
1. (all ranks) ``storage_meta``, ``set_up_storage_writer``; the coordinator begins to look whether
   a checkpoint exists
2. (all ranks) ``prepare_local_plan``
3. (coordinator) ``prepare_global_plan``; it must know the outcome here
4. (all ranks) ``write_data``: data objects, each under a key that was never used before
5. (coordinator) ``finish``: check that everything is there, then seal, then sweep
"""

from __future__ import annotations

import logging
import os
import pickle
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcpstore.config import WriteConfig
from dcpstore.errors import AlreadyExistsError, CheckpointError, IncompatibleError
from dcpstore.format.manifest import ItemId, Manifest, encode
from dcpstore.format.metadata import (
    entries_of,
    expected_items,
    item_id,
    planner_paths_of,
    stock_storage_data,
)
from dcpstore.format.seal import METADATA_KEY, metadata_key, new_save_id
from dcpstore.report import Meter
from dcpstore.store import open_store
from dcpstore.store.base import Store
from dcpstore.store.folder import Folder, InFolder
from dcpstore.text import collector_paused
from dcpstore.torch_private import dcp_format_version
from dcpstore.write.attached import (
    Attached,
    Attachment,
    Given,
    attach,
    merge,
    objects_of,
    same_bytes,
    take_out,
)
from dcpstore.write.commit import (
    Found,
    Proof,
    Sealer,
    keys_named_in,
    probe,
    prove_superseded,
    sweep,
)
from dcpstore.write.cutoff import Cutoff
from dcpstore.write.job import WriteJob, WriteStats, Written


class BackgroundProbe:
    """Finds out whether a checkpoint exists, in a thread of its own.

    One request's delay, which planning hides. Its outcome must be known before anything is
    written. One that nobody asks for its outcome ends by itself.

    Args:
        store: Rooted at the checkpoint's folder.
        metadata_key: Of the metadata to be sealed.
        overwrite: Whether a checkpoint may be there.
    """

    def __init__(self, store: Store, metadata_key: str, *, overwrite: bool) -> None:
        self._store = store
        self._metadata_key = metadata_key
        self._overwrite = overwrite
        executor = ThreadPoolExecutor(2, "dcpstore-probe")
        self._found = executor.submit(probe, store, metadata_key)
        is_of_all = metadata_key == METADATA_KEY
        self._of_all = None if is_of_all else executor.submit(probe, store, METADATA_KEY)
        executor.shutdown(wait=False)

    def found(self) -> Found | None:
        """Return the checkpoint to overwrite, or None where there is none. Waits.

        Raises:
            AlreadyExistsError: If one exists that may not be replaced.
            StoreError: If the store cannot be reached.
        """
        found = self._found.result()
        if self._of_all is not None and self._of_all.result() is not None:
            raise AlreadyExistsError(
                f"{self._store.url} holds a checkpoint that all ranks saved together;"
                " a save with use_collectives=False cannot replace it. Save to another URL"
                " or delete it first"
            )
        if found is not None and not self._overwrite:
            raise AlreadyExistsError(
                f"{self._store.url} already holds a checkpoint. Save to another URL, or"
                " pass overwrite=True to replace it. Nothing was written"
            )
        return found


logger = logging.getLogger(__name__)


class ObjectStoreWriter(InFolder, StorageWriter):
    """Write DCP checkpoints to an object store; a DCP ``StorageWriter``.

    Works with ``dcp.save``, ``dcp.async_save`` (thread and process), any planner, any
    coordinator rank and process group, with ``no_dist=True`` and
    ``use_collectives=False``. One object serves many saves, one at a time. Pickles by its
    settings. Needs permission to get and put; to delete only for cleaning up.

    A reader sees the old checkpoint or the new one, never a mix: all objects of a save
    have new names, and one conditional put of ``.metadata`` makes it exist.

    Args:
        url: Folder of the checkpoint: ``s3://bucket/run/step-100``, ``gs://...``,
            ``az://...``, anything fsspec knows, or a local path.
        storage_options: fsspec's options for that protocol (``endpoint_url``, ``key``,
            ``secret``, ``anon``, ``profile``, ...). Kept across ``reset`` and pickling.
        overwrite: Replace a checkpoint that exists. The old one stays loadable until the
            new one is sealed; then its objects are deleted.
        config: Sizes, bounds and retries.
        extensions: DCP stream transforms, such as compression, applied to every item.
        store_opener: Opens the store; tests pass one that injects faults.
        sleep: Waits between attempts to seal, in seconds.
        clock: Monotonic seconds, for the deadline of the seal.

    Raises:
        ConfigError: If the URL or an option cannot be honoured.
    """

    _pickled = ("_config", "_folder", "_overwrite", "_extensions", "_sleep", "_clock", "_attached")
    _meter: Meter | None = None
    _cutoff: Cutoff | None = None

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        config: WriteConfig | None = None,
        extensions: Sequence[Any] = (),
        store_opener: Callable[..., Store] = open_store,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._config = config or WriteConfig()
        self._folder = Folder(url, storage_options, self._config, store_opener)
        self._overwrite = overwrite
        self._extensions = tuple(extensions)
        self._sleep = sleep
        self._clock = clock
        self._attached: Given | None = None  # to the next save; kept across reset and pickling
        self._begin()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._folder.url!r}, overwrite={self._overwrite})"

    def _begin(self) -> None:
        self._save_id = new_save_id()
        self._is_save_id_used = False
        self._is_coordinator = True
        self._rank: int | None = None
        self._use_collectives = True
        self._probe: BackgroundProbe | None = None
        self._found: Found | None = None
        self._keys: list[str] = []
        self._is_seal_begun = False
        self._sealing: Given | None = None  # with this save
        self.last_write: WriteStats | None = None
        """What the last `write_data` of this rank did; None before it."""

    def watch(self, meter: Meter | None, cutoff: Cutoff | None = None) -> None:
        """Tell a meter of the bytes of coming saves, and end them early at a cutoff; or neither."""
        self._meter = meter
        self._cutoff = cutoff

    def attach(
        self,
        *,
        attachments: Mapping[str, Attachment] | None = None,
        metrics: Mapping[str, float] | None = None,
        user_metadata: Mapping[str, Any] | None = None,
        step: int | None = None,
        run: str | None = None,
    ) -> None:
        """Seal more than tensors with the next save; replaces what was attached to it before.

        Not while a save of this writer runs, as in the background of ``dcp.async_save``, which
        may not have taken what was attached to it; and again before each save that runs in
        another process, since this writer does not hear that its copy there has taken it. Any
        rank may attach. Where ranks give different metrics or metadata under one name, the
        coordinator's count, then those of the lowest rank.

        Args:
            attachments: Bytes, which are taken as they are now, or local files by their
                ``pathlib.Path``, which are read by the save. The name is a relative path;
                ``{rank}`` in it is replaced by the rank's number. Several ranks may attach the
                same bytes under one name; other bytes fail the save. They are stored as they
                are, whatever ``extensions`` do to tensors.
            metrics: Numbers by name, NaN and infinity too. With step and run at most 16 KiB.
            user_metadata: What JSON can say, at most 256 KiB.
            step: Number of completed steps.
            run: Id of the run that the save belongs to.

        Raises:
            ConfigError: If something is of the wrong type or too large, or a file is not there.
        """
        self._attached = attach(
            attachments=attachments,
            metrics=metrics,
            user_metadata=user_metadata,
            step=step,
            run=run,
        )

    @property
    def has_attached(self) -> bool:
        """Whether something is to be sealed with the next save."""
        return bool(self._attached)

    def storage_meta(self) -> StorageMeta:
        """Return the URL and the id of the coming save."""
        self._refresh_save_id()
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    def _refresh_save_id(self) -> None:
        if self._is_save_id_used:
            self._begin()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn this rank's role; the coordinator begins to look whether a checkpoint exists."""
        del args
        self._refresh_save_id()
        self._is_coordinator = is_coordinator
        self._rank = kwargs.get("rank")
        self._use_collectives = kwargs.get("use_collectives", True)
        self._sealing, self._attached = self._attached, None
        if is_coordinator or not self._use_collectives:
            store = self._folder.open()
            self._probe = BackgroundProbe(store, self._metadata_key, overwrite=self._overwrite)

    @property
    def _metadata_key(self) -> str:
        return metadata_key(None if self._use_collectives else self._rank or 0)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def await_probe(self) -> None:
        """Wait for what `set_up_storage_writer` began. No other rank may have begun to write.

        Does nothing on other ranks. `prepare_global_plan` calls it; who coordinates
        in another way has to.

        Raises:
            AlreadyExistsError: If a checkpoint exists and ``overwrite=False``.
        """
        if self._probe is not None:
            self._found = self._probe.found()

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank its number, for the names of its objects. Coordinator only.

        Raises:
            AlreadyExistsError: If a checkpoint exists and ``overwrite=False``.
        """
        self.await_probe()
        if not self._use_collectives:
            return plans  # this rank's plan alone, which is not rank 0's
        return [
            plan if plan.storage_data is not None else replace(plan, storage_data=_RankNumber(rank))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items. Returns when all of them are stored.

        Data is resolved lazily, one item at a time, in the calling thread. If anything
        fails, the objects this rank made are deleted and the first error is raised.
        """
        self._refresh_save_id()
        self._is_save_id_used = True
        self.await_probe()
        store = self._folder.open()
        rank = plan.storage_data.rank if isinstance(plan.storage_data, _RankNumber) else None
        settings = (self._config, self._extensions)
        watched = (self._meter, self._cutoff)
        job = WriteJob(store, *settings, planner, self._save_id, *watched)
        rank = self._rank if rank is None else rank
        given = self._sealing
        try:
            sources = {} if given is None else given.sources_of(rank or 0)
            results = job.run(plan.items, rank, sources)
        except BaseException:
            # The coordinator seals only once every rank has written.
            sweep(store, job.keys, Proof.NOT_BEGUN, why="this failed save")
            raise
        self._keys = job.keys
        self.last_write = job.stats
        if given:
            told = Attached(
                given.facts,
                given.user_metadata,
                job.attachments,
                is_coordinator=self._is_coordinator,
            )
            results.append(told.as_result())
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Check that every planned item was stored, then seal the checkpoint. Coordinator only.

        Raises:
            IncompatibleError: If an item of the plan has no result; nothing is sealed.
            AlreadyExistsError: If another save was sealed meanwhile.
            ConflictError: If the checkpoint to overwrite changed meanwhile.
            CommitUnknownError: If it cannot be found out whether the seal took place.
        """
        store = self._folder.open()
        sealer = Sealer(
            store,
            self._metadata_key,
            self._found,
            self._config,
            sleep=self._sleep,
            clock=self._clock,
        )
        made = _keys_of(results)
        try:
            with collector_paused():
                written, attached = list(chain.from_iterable(results)), Attached()
                if any(map(_is_attached, written)):
                    written, given = take_out(written)
                    attached = merge(given)
                pickled, manifest = self._describe(metadata, written, attached)
            self._is_seal_begun = True
            sealer.put_sealed(self._save_id, pickled, manifest, attached.facts)
        except BaseException:
            if sealer.proof is not None:
                sweep(store, {*made, *sealer.made}, sealer.proof, why="this failed save")
                self._keys = []
            raise
        self._keys = []
        if self._found is not None and self._config.sweep:
            self._sweep_old(store, self._found, keep={*made, *sealer.made, self._metadata_key})

    def discard(self, results: list[list[WriteResult]]) -> None:
        """Delete what all ranks wrote in a save that is given up before `finish`. Coordinator only.

        Args:
            results: What `finish` would have been given.
        """
        sweep(self._folder.open(), _keys_of(results), Proof.NOT_BEGUN, why="this failed save")

    def _sweep_old(self, store: Store, old: Found, *, keep: set[str]) -> None:
        try:
            doomed = keys_named_in(store, old.data, key=self._metadata_key) - keep
        except CheckpointError as error:
            logger.warning(
                "%s: cannot tell which objects the overwritten checkpoint had; they stay (%s)",
                store.url,
                error,
            )
        else:
            sweep(store, doomed, Proof.REPLACED, why="the overwritten checkpoint")

    def sweep_unsealed(self, *, seal_begun: bool = True) -> Sequence[str]:
        """Delete what this rank wrote in a save that failed elsewhere. Any rank.

        DCP does not tell the other ranks' writers that a save failed, so their objects
        stay behind. They are deleted if it is certain that no checkpoint refers to them, nor
        can come to: on the coordinator, if the save failed before `finish`; on any rank, if
        another checkpoint is there by now which the store does not let a late put of this save
        replace. Otherwise they stay, and ``dcpstore prune`` removes them once they are a day
        old. Does nothing if the save was sealed after all.

        Args:
            seal_begun: False if you know that no rank entered `finish`, as when `write_data`
                failed on one of them: then everything is deleted.

        Returns:
            Keys that stay.
        """
        if not self._keys:
            return ()
        store = self._folder.open()
        leads = self._is_coordinator or not self._use_collectives
        proof: Proof | None = None
        if not seal_begun or (leads and not self._is_seal_begun):
            proof = Proof.NOT_BEGUN
        else:
            try:
                now = probe(store, self._metadata_key, denied_is_absent=False)
                named = keys_named_in(store, now.data, key=self._metadata_key) if now else set()
            except CheckpointError as error:
                logger.warning(
                    "%s: cannot tell what is sealed; nothing deleted (%s)", store.url, error
                )
                return self._keys
            if not named.isdisjoint(self._keys):
                stay, self._keys = set(self._keys) - named, []
                return tuple(sorted(stay))
            # Without overwrite the coordinator can only create, whatever it found. With it, what
            # is to be replaced only the coordinator knows.
            if leads or not self._overwrite:
                proof = prove_superseded(store, self._found if leads else None, now)
        if proof is None:
            return self._keys
        doomed, self._keys = self._keys, []
        return sweep(store, doomed, proof, why="a failed save")

    def _describe(
        self, metadata: Metadata, results: Sequence[WriteResult], attached: Attached
    ) -> tuple[bytes, bytes]:
        """Return the pickled metadata and the encoded manifest; ``metadata`` is completed."""
        by_index = _merge(results)
        by_id = {item_id(index): written for index, written in by_index.items()}
        _check_complete(metadata, by_id)
        ordered = {one: by_id[one].item for one in expected_items(metadata)}
        ordered.update({one: w.item for one, w in by_id.items() if one not in ordered})
        objects = [*(w.object for w in by_id.values()), *attached.objects]
        metadata.version = dcp_format_version()
        metadata.storage_data = stock_storage_data({i: w.item for i, w in by_index.items()})
        metadata.storage_meta = StorageMeta(self.checkpoint_id, self._save_id)
        paths = planner_paths_of(metadata.planner_data)
        manifest = Manifest(
            save_id=self._save_id,
            entries=entries_of(metadata, ordered),
            items=ordered,
            objects=tuple({one.key: one for one in objects}.values()),
            planner_paths=paths,
            has_other_planner_data=metadata.planner_data is not None and paths is None,
            info={
                "torch": str(torch.__version__),
                "python": platform.python_version(),
                "ranks_metadata": self._metadata_key,
                **({"user_metadata": attached.user_metadata} if attached.user_metadata else {}),
            },
            attachments={name: w.item for name, w in sorted(attached.written.items())},
        )
        return pickle.dumps(metadata), encode(manifest)


@dataclass(frozen=True, slots=True)
class _RankNumber:
    rank: int


def _keys_of(results: Sequence[Sequence[WriteResult]]) -> set[str]:
    """Return the keys of all data objects that ranks wrote."""
    flat = list(chain.from_iterable(results))
    if any(map(_is_attached, flat)):
        return {one.key for one in objects_of(flat)}
    return {one.storage_data.object.key for one in flat}


def _is_attached(result: WriteResult) -> bool:
    return isinstance(result.storage_data, Attached)


def _merge(results: Sequence[WriteResult]) -> dict[MetadataIndex, Written]:
    """Return one result per item.

    Raises:
        IncompatibleError: If two ranks stored different bytes as the same item.
    """
    merged: dict[MetadataIndex, Written] = {}
    for result in results:
        written: Written = result.storage_data
        first = merged.setdefault(result.index, written)
        if first is not written and not same_bytes(first.item, written.item):
            raise IncompatibleError(
                f"two ranks saved different values as {result.index.fqn!r} at offset"
                f" {result.index.offset}: only one could be loaded again. Give tensors that differ"
                " between ranks different keys, or shard them. Nothing was sealed"
            )
    return merged


def _check_complete(metadata: Metadata, by_id: Mapping[ItemId, Written]) -> None:
    missing = [one for one in expected_items(metadata) if one not in by_id]
    if missing:
        raise IncompatibleError(
            f"{len(missing)} item(s) of the save plan were not written, such as"
            f" {missing[0].fqn!r} at offset {missing[0].offsets}. Nothing was sealed"
        )
