"""`ObjectStoreReader`: DCP's storage reader on an object store.

DCP calls it in this order, once per load:

0. (all ranks) ``reset`` if the caller gave a checkpoint_id
1. (all ranks) ``read_metadata``: one GET of ``.metadata``, and one of a large manifest
2. (all ranks) ``set_up_storage_reader``, ``prepare_local_plan``
3. (coordinator) ``prepare_global_plan``
4. (all ranks) ``read_data``: ranged GETs of the bytes needed, straight into the targets
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcpstore.config import ReadConfig
from dcpstore.errors import CheckpointError, NotFoundError
from dcpstore.format.manifest import StoredItem
from dcpstore.format.metadata import stock_items
from dcpstore.plan.coverage import with_holes
from dcpstore.read.discovery import Discovered, discover
from dcpstore.read.pump import ReadJob, ReadStats
from dcpstore.report import Meter
from dcpstore.store import open_store
from dcpstore.store.base import Store
from dcpstore.store.folder import Folder, InFolder


class ObjectStoreReader(InFolder, StorageReader):
    """Read DCP checkpoints from an object store; a DCP ``StorageReader``.

    Loads what `ObjectStoreWriter` wrote, what stock DCP writers wrote (one or many files
    per rank, metadata per rank, stream extensions), and folders of safetensors files, into
    any layout, reading only the bytes that each rank needs. One object serves many
    loads, one at a time. Pickles by its settings. Needs permission to get.

    Before the first data request the shape and dtype of every target are checked, so a
    mismatch changes nothing. Checkpoints of ours are verified block by block.

    Args:
        url: Folder of the checkpoint: ``s3://bucket/run/step-100``, ``gs://...``,
            ``az://...``, anything fsspec knows, or a local path.
        storage_options: fsspec's options for that protocol (``endpoint_url``, ``key``,
            ``secret``, ``anon``, ``profile``, ...). Kept across ``reset`` and pickling.
        config: Sizes, bounds, retries, casts and trust.
        extension_registry: Where DCP stream extensions of a checkpoint are looked up;
            None for torch's own, which knows ``stream.zstd``.
        store_opener: Opens the store; tests pass one that injects faults.

    Raises:
        ConfigError: If the URL or an option cannot be honoured.
    """

    _pickled = ("_config", "_folder", "_registry")

    readers: Mapping[str, Sequence[int]] | None = None
    """Key and ranks of each object that not every rank can read; None if there are none."""

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        config: ReadConfig | None = None,
        extension_registry: Any = None,
        store_opener: Callable[..., Store] = open_store,
    ) -> None:
        super().__init__()
        self._config = config or ReadConfig()
        self._folder = Folder(url, storage_options, self._config, store_opener)
        self._registry = extension_registry
        self._begin()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._folder.url!r})"

    def _begin(self) -> None:
        self._load_id = str(uuid.uuid4())
        self._metadata: Metadata | None = None
        self._metadata_error: CheckpointError | None = None
        self._items: Mapping[MetadataIndex, StoredItem] = {}
        self.last_read: ReadStats | None = None
        """What the last `read_data` of this rank did; None before it."""

    @property
    def config(self) -> ReadConfig:
        """Sizes, bounds, casts and trust."""
        return self._config

    def discover(self, *, rank: int | None = None) -> Discovered:
        """Read what tells everything about the checkpoint, to be opened here or elsewhere.

        Raises: as `read_metadata`.
        """
        return discover(self._folder.open(), self._config, rank=rank)

    def open_metadata(self, discovered: Discovered) -> Metadata:
        """Open what `discover` read, on this or another rank. No I/O.

        Where the chunks of a tensor do not fill it, each hole stands there as a chunk that is
        stored nowhere, and a load that wants a part of it is refused before anything is read.

        Raises:
            CorruptError: If the metadata are damaged, or chunks overlap or lie outside.
        """
        metadata = with_holes(discovered.open(self._config), discovered.url)
        metadata.storage_meta.load_id = self._load_id  # type: ignore[union-attr]
        return metadata

    def open_job(self, meter: Meter | None = None) -> ReadJob:
        """Begin to read what `set_up_storage_reader` was told of. Use as a context manager."""
        assert self._metadata is not None, "set_up_storage_reader comes first"
        job = ReadJob(
            self._folder.open(), self._config, self._metadata, self._items, self._registry, meter
        )
        self.last_read = job.stats
        return job

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the checkpoint's metadata, or with ``rank=`` that rank's own.

        Raises:
            NotFoundError: If there is no checkpoint.
            CorruptError: If there is one that is damaged, or a pickle that names more than data.
            StoreError: If the store refuses.
        """
        del args
        rank = kwargs.get("rank")
        if rank is not None and self._metadata_error is not None:
            # DCP falls back to per-rank metadata after any error; this one is the cause.
            raise self._metadata_error
        try:
            return self.open_metadata(self.discover(rank=rank))
        except NotFoundError:
            raise
        except CheckpointError as error:
            self._metadata_error = error
            raise

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Learn where the items lie."""
        del is_coordinator, args, kwargs
        self._metadata = metadata
        data = metadata.storage_data
        is_ours = isinstance(data, Mapping) and all(
            isinstance(item, StoredItem) for item in data.values()
        )
        self._items = data if is_ours else stock_items(metadata)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan; ranges are planned in `read_data`, when targets are known."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans. Coordinator only."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items into their targets. Returns when all are there.

        Planner methods are called in the calling thread only.

        Raises:
            IncompatibleError: If a target's shape or dtype does not fit; nothing was changed.
            CorruptError: If stored bytes are wrong, naming object, key and range.
            NotFoundError: If an object is gone.
            StoreError: If the store refuses.
        """
        with self.open_job() as job:
            job.run(plan.items, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future
