"""`ObjectStoreWriter`: DCP's storage writer on an object store.

DCP calls it in this order, once per save:

0. (all ranks) ``reset`` if the caller gave a checkpoint_id
1. (all ranks) ``storage_meta``, ``set_up_storage_writer``
2. (all ranks) ``prepare_local_plan``; the coordinator looks here whether a checkpoint exists
3. (coordinator) ``prepare_global_plan``
4. (all ranks) ``write_data``: data objects, each under a key that was never used before
5. (coordinator) ``finish``: check that everything is there, then seal, then sweep
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcpstore import keys
from dcpstore.commit import Found, Sealer, probe, sweep
from dcpstore.config import WriteConfig
from dcpstore.errors import (
    AlreadyExistsError,
    CheckpointError,
    CommitUnknownError,
    IncompatibleError,
)
from dcpstore.folder import Folder
from dcpstore.format.checksum import BlockChecksummer
from dcpstore.format.copying import copy_bytes_out
from dcpstore.format.dtypes import dtype_name
from dcpstore.format.record import plan_record
from dcpstore.format.tensors import encode_opaque, is_plain, to_plain
from dcpstore.manifest import DataObject, ItemId, Manifest, StoredItem, decode, encode
from dcpstore.metadata import (
    entries_of,
    expected_items,
    item_id,
    planner_paths_of,
    stock_items,
    stock_storage_data,
)
from dcpstore.planning.pack import plan_objects
from dcpstore.ranges import ByteRange
from dcpstore.store import open_store
from dcpstore.store.base import Store
from dcpstore.torch_private import dcp_format_version
from dcpstore.trust import load_metadata_pickle
from dcpstore.upload import ObjectStream, Uploads

__all__ = ["ObjectStoreWriter"]

logger = logging.getLogger(__name__)

_RECORD_OVERHEAD_BYTES = 700  # for packing only; the true size is known when it is written
_SCRATCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Written:
    """What a rank tells the coordinator about one item, in ``WriteResult.storage_data``."""

    item: StoredItem
    object: DataObject


@dataclass(slots=True)
class _Draft:
    """An item as written, before its checksums are known."""

    index: MetadataIndex
    item: StoredItem
    checksummer: BlockChecksummer


class ObjectStoreWriter(StorageWriter):
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

    Raises:
        ConfigError: If the URL or an option cannot be honoured.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        config: WriteConfig | None = None,
        extensions: Sequence[Any] = (),
        store_opener: Callable[..., Store] = open_store,
    ) -> None:
        super().__init__()
        self._config = config or WriteConfig()
        self._folder = Folder(url, storage_options, self._config, store_opener)
        self._overwrite = overwrite
        self._extensions = tuple(extensions)
        self._begin()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._folder.url!r}, overwrite={self._overwrite})"

    def _begin(self) -> None:
        self._save_id = keys.new_save_id()
        self._is_save_id_used = False
        self._is_coordinator = True
        self._rank: int | None = None
        self._use_collectives = True
        self._found: Found | None = None
        self._keys: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        return {
            "_config": self._config,
            "_folder": self._folder,
            "_overwrite": self._overwrite,
            "_extensions": self._extensions,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    @property
    def checkpoint_id(self) -> str:
        """The URL that the next save goes to."""
        return self._folder.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether a URL can be served."""
        return Folder.is_valid(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for another save, to another URL if one is given; options stay.

        Raises:
            ConfigError: If ``checkpoint_id`` is no URL although the writer's is one.
        """
        if checkpoint_id is not None:
            self._folder.move(checkpoint_id)
        self._begin()

    def storage_meta(self) -> StorageMeta:
        """Return the URL and the id of the coming save."""
        self._refresh_save_id()
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    def _refresh_save_id(self) -> None:
        if self._is_save_id_used:
            self._begin()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn this rank's role."""
        del args
        self._refresh_save_id()
        self._is_coordinator = is_coordinator
        self._rank = kwargs.get("rank")
        self._use_collectives = kwargs.get("use_collectives", True)

    @property
    def _metadata_key(self) -> str:
        return keys.metadata_key(None if self._use_collectives else self._rank or 0)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Look whether a checkpoint exists, before anything is written. Coordinator only.

        Raises:
            AlreadyExistsError: If one does and ``overwrite=False``.
        """
        if self._is_coordinator or not self._use_collectives:
            store = self._folder.open()
            self._found = probe(store, self._metadata_key)
            if not self._use_collectives and probe(store, keys.METADATA_KEY) is not None:
                raise AlreadyExistsError(
                    f"{self.checkpoint_id} holds a checkpoint that all ranks saved together;"
                    " a save with use_collectives=False cannot replace it. Save to another URL"
                    " or delete it first"
                )
            if self._found is not None and not self._overwrite:
                raise AlreadyExistsError(
                    f"{self.checkpoint_id} already holds a checkpoint. Save to another URL, or"
                    " pass overwrite=True to replace it. Nothing was written"
                )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank its number, for the names of its objects. Coordinator only."""
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
        store = self._folder.open()
        rank = plan.storage_data.rank if isinstance(plan.storage_data, _RankNumber) else None
        job = _WriteJob(store, self._config, self._extensions, planner, self._save_id)
        try:
            results = job.run(plan.items, self._rank if rank is None else rank)
        except BaseException:
            sweep(store, job.keys, why="this failed save")
            raise
        self._keys = job.keys
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
        flat = [result for rank_results in results for result in rank_results]
        made = {result.storage_data.object.key for result in flat}
        try:
            pickled, manifest = self._describe(metadata, flat)
            sealer = Sealer(
                store,
                self._metadata_key,
                self._found,
                require_conditional_put=self._config.require_conditional_put,
            )
            sealer.put_sealed(self._save_id, pickled, manifest)
        except CommitUnknownError:
            raise
        except CheckpointError:
            sweep(store, {*made, keys.manifest_key(self._save_id)}, why="this failed save")
            raise
        self._keys = []
        if self._found is not None and self._config.sweep:
            old = _referenced_keys(store, self._found, self._metadata_key)
            sweep(store, old - made, why="the overwritten checkpoint")

    def sweep_unsealed(self) -> Sequence[str]:
        """Delete what this rank wrote in a save that failed elsewhere. Any rank.

        DCP does not tell the other ranks' writers that a save failed, so their objects
        stay behind, unsealed and unreachable. Does nothing if the save was sealed after
        all.

        Returns:
            Keys that could not be deleted.
        """
        doomed, self._keys = self._keys, []
        if not doomed:
            return ()
        store = self._folder.open()
        found = probe(store, self._metadata_key)
        if found is not None:
            doomed = sorted(set(doomed) - _referenced_keys(store, found, self._metadata_key))
        return sweep(store, doomed, why="a failed save")

    def _describe(self, metadata: Metadata, results: Sequence[WriteResult]) -> tuple[bytes, bytes]:
        """Return the pickled metadata and the encoded manifest; ``metadata`` is completed."""
        by_index = _merge(results)
        by_id = {item_id(index): written for index, written in by_index.items()}
        _check_complete(metadata, by_id)
        ordered = {one: by_id[one].item for one in expected_items(metadata)}
        ordered.update({one: w.item for one, w in by_id.items() if one not in ordered})
        metadata.version = dcp_format_version()
        metadata.storage_data = stock_storage_data({i: w.item for i, w in by_index.items()})
        metadata.storage_meta = self._storage_meta_of_save()
        paths = planner_paths_of(metadata.planner_data)
        manifest = Manifest(
            save_id=self._save_id,
            entries=entries_of(metadata, ordered),
            items=ordered,
            objects=tuple({w.object.key: w.object for w in by_id.values()}.values()),
            planner_paths=paths,
            has_other_planner_data=metadata.planner_data is not None and paths is None,
            info={
                "torch": str(torch.__version__),
                "python": platform.python_version(),
                "ranks_metadata": self._metadata_key,
            },
        )
        return pickle.dumps(metadata), encode(manifest)

    def _storage_meta_of_save(self) -> StorageMeta:
        """Return the URL and the id of the save in progress."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)


@dataclass(frozen=True, slots=True)
class _RankNumber:
    rank: int


def _merge(results: Sequence[WriteResult]) -> dict[MetadataIndex, _Written]:
    """Return one result per item.

    Raises:
        IncompatibleError: If two ranks stored different bytes as the same item.
    """
    merged: dict[MetadataIndex, _Written] = {}
    for result in results:
        written: _Written = result.storage_data
        first = merged.setdefault(result.index, written)
        if first is not written and not _same_bytes(first.item, written.item):
            raise IncompatibleError(
                f"two ranks saved different values as {result.index.fqn!r} at offset"
                f" {result.index.offset}: only one could be loaded again. Give tensors that differ"
                " between ranks different keys, or shard them. Nothing was sealed"
            )
    return merged


def _same_bytes(one: StoredItem, other: StoredItem) -> bool:
    if one.checksums is None or other.checksums is None:
        return False
    return one.payload.num_bytes == other.payload.num_bytes and bool(
        (one.checksums == other.checksums).all()
    )


def _check_complete(metadata: Metadata, by_id: Mapping[ItemId, _Written]) -> None:
    missing = [one for one in expected_items(metadata) if one not in by_id]
    if missing:
        raise IncompatibleError(
            f"{len(missing)} item(s) of the save plan were not written, such as"
            f" {missing[0].fqn!r} at offset {missing[0].offsets}. Nothing was sealed"
        )


def _referenced_keys(store: Store, found: Found, metadata_key: str) -> set[str]:
    """Return the objects that a sealed checkpoint refers to; none if that cannot be read."""
    try:
        if found.seal is not None:
            manifest = decode(store.get(found.seal.manifest_key).data)
            return {*(obj.key for obj in manifest.objects), found.seal.manifest_key}
        metadata = load_metadata_pickle(found.data, key=metadata_key)
        return {item.key for item in stock_items(metadata).values()}
    except CheckpointError as error:
        logger.warning("%s: cannot tell which objects the checkpoint has (%s)", store.url, error)
        return set()


class _WriteJob:
    """One rank's part of one save."""

    def __init__(
        self,
        store: Store,
        config: WriteConfig,
        extensions: Sequence[Any],
        planner: SavePlanner,
        save_id: str,
    ) -> None:
        self._store = store
        self._config = config
        self._extensions = extensions
        self._planner = planner
        self._save_id = save_id
        self._inline_bytes = 0
        self.keys: list[str] = []

    def run(self, items: Sequence[WriteItem], rank: int | None) -> list[WriteResult]:
        """Write all items; return one result per item."""
        drafts: list[_Draft] = []
        sizes = [_expected_bytes(item) for item in items]
        uploads = Uploads(self._store, self._config, pin=torch.cuda.is_available())
        with uploads:
            for number, positions in enumerate(plan_objects(sizes, self._config.object_bytes)):
                key = keys.data_key(rank or 0, number, self._save_id)
                self.keys.append(key)
                stream = uploads.open(key)
                drafts.extend(self._write(stream, items[position]) for position in positions)
                stream.finish()
        return [self._result(draft, uploads.objects[draft.item.key]) for draft in drafts]

    def _result(self, draft: _Draft, stored: DataObject) -> WriteResult:
        item = replace(draft.item, checksums=draft.checksummer.finish())
        return WriteResult(draft.index, item.record.num_bytes, _Written(item, stored))

    def _write(self, stream: ObjectStream, write_item: WriteItem) -> _Draft:
        checksummer = BlockChecksummer(self._config.checksum_block_bytes)
        data = self._planner.resolve_data(write_item)
        if write_item.type == WriteItemType.BYTE_IO:
            item = self._write_value(stream, checksummer, data)
        else:
            item = self._write_tensor(stream, checksummer, _check_tensor(write_item, data))
        return _Draft(write_item.index, item, checksummer)

    def _write_value(
        self, stream: ObjectStream, checksummer: BlockChecksummer, data: object
    ) -> StoredItem:
        if not isinstance(data, io.BytesIO):
            raise IncompatibleError(
                "the planner's resolve_data gave"
                f" {type(data).__name__} for a value; DCP's contract is an io.BytesIO"
            )
        content = data.getbuffer()
        if self._extensions:
            return self._write_transformed(stream, checksummer, [content], "bytes", ())
        return self._write_whole(stream, checksummer, content, "bytes", ())

    def _write_tensor(
        self, stream: ObjectStream, checksummer: BlockChecksummer, tensor: torch.Tensor
    ) -> StoredItem:
        sizes = tuple(tensor.shape)
        plain = is_plain(tensor)
        if self._extensions:
            pieces = _record_pieces(tensor) if plain else [memoryview(encode_opaque(tensor))]
            return self._write_transformed(stream, checksummer, pieces, "record", sizes)
        if not plain:
            content = memoryview(encode_opaque(tensor))
            return self._write_whole(stream, checksummer, content, "record", sizes)
        start = stream.tell()
        layout = plan_record(tensor.dtype, sizes, object_offset=start)
        stream.write(layout.header)
        stream.begin_checked(checksummer)
        inline = None
        if self._may_inline(layout.payload_bytes):
            inline = _payload(tensor)
            stream.write(inline)
        else:
            stream.write_tensor(tensor)
        stream.end_checked()
        stream.write(layout.trailer)
        payload = start + layout.payload_offset
        return StoredItem(
            key=stream.key,
            record=ByteRange(start, stream.tell()),
            kind="raw",
            payload=ByteRange(payload, payload + layout.payload_bytes),
            dtype=dtype_name(tensor.dtype),
            sizes=sizes,
            block_bytes=self._config.checksum_block_bytes,
            inline=inline,
        )

    def _write_whole(
        self,
        stream: ObjectStream,
        checksummer: BlockChecksummer,
        content: memoryview,
        kind: Any,
        sizes: tuple[int, ...],
    ) -> StoredItem:
        start = stream.tell()
        stream.begin_checked(checksummer)
        stream.write(content)
        stream.end_checked()
        inline = bytes(content) if self._may_inline(len(content)) else None
        return self._whole_item(stream, start, kind, sizes, (), inline)

    def _write_transformed(
        self,
        stream: ObjectStream,
        checksummer: BlockChecksummer,
        pieces: Iterable[memoryview | bytes],
        kind: Any,
        sizes: tuple[int, ...],
    ) -> StoredItem:
        start = stream.tell()
        stream.begin_checked(checksummer)
        sink: Any = _KeepOpen(stream)
        for extension in self._extensions:
            sink = extension.transform_to(sink)
        for piece in pieces:
            sink.write(piece)
        sink.close()
        stream.end_checked()
        descriptors = tuple(one.get_descriptor() for one in reversed(self._extensions))
        return self._whole_item(stream, start, kind, sizes, descriptors, None)

    def _whole_item(
        self,
        stream: ObjectStream,
        start: int,
        kind: Any,
        sizes: tuple[int, ...],
        transforms: tuple[str, ...],
        inline: bytes | None,
    ) -> StoredItem:
        record = ByteRange(start, stream.tell())
        return StoredItem(
            key=stream.key,
            record=record,
            kind=kind,
            payload=record,
            sizes=sizes,
            transforms=transforms,
            block_bytes=self._config.checksum_block_bytes,
            inline=inline,
        )

    def _may_inline(self, num_bytes: int) -> bool:
        total = self._inline_bytes + num_bytes
        if num_bytes > self._config.inline_bytes or total > self._config.inline_rank_bytes:
            return False
        self._inline_bytes = total
        return True


class _KeepOpen(io.RawIOBase):
    """Lets a transform close its output without closing the object it is a part of."""

    def __init__(self, stream: ObjectStream) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._stream.write(data)


def _expected_bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        known = item.bytes_io_data
        return _RECORD_OVERHEAD_BYTES if known is None else known.nbytes
    elements = 1
    for size in item.tensor_data.chunk.sizes:
        elements *= size
    return _RECORD_OVERHEAD_BYTES + elements * item.tensor_data.properties.dtype.itemsize


def _check_tensor(item: WriteItem, data: object) -> torch.Tensor:
    if not isinstance(data, torch.Tensor):
        raise IncompatibleError(
            f"the planner's resolve_data gave {type(data).__name__} for the tensor"
            f" {item.index.fqn!r}"
        )
    planned = item.tensor_data
    if planned is not None and tuple(data.shape) != tuple(planned.chunk.sizes):
        raise IncompatibleError(
            f"{item.index.fqn!r} was planned as a chunk of shape {tuple(planned.chunk.sizes)} and"
            f" resolved to shape {tuple(data.shape)}"
        )
    return to_plain(data)


def _payload(tensor: torch.Tensor) -> bytes:
    num_bytes = tensor.numel() * tensor.element_size()
    out = torch.empty(num_bytes, dtype=torch.uint8)
    copy_bytes_out(tensor, 0, num_bytes, out)
    return out.numpy().tobytes()


def _record_pieces(tensor: torch.Tensor) -> Iterable[memoryview | bytes]:
    """Yield a plain tensor's record in pieces of bounded size, for a transform."""
    layout = plan_record(tensor.dtype, tuple(tensor.shape))
    yield layout.header
    scratch = torch.empty(_SCRATCH_BYTES, dtype=torch.uint8)
    for start in range(0, layout.payload_bytes, _SCRATCH_BYTES):
        end = min(start + _SCRATCH_BYTES, layout.payload_bytes)
        copy_bytes_out(tensor, start, end, scratch[: end - start])
        yield scratch.numpy().data[: end - start]
    yield layout.trailer
