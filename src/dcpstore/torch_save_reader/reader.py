"""`BroadcastingTorchSaveReader`: a ``torch.save`` file as the source of a distributed load.

DCP calls it in this order; the steps are those of a group of ranks that the reader opens, or
of the group that `dcpstore.load` works in:

0. (all ranks) ``reset``, if the caller gave a checkpoint_id
1. (all ranks) ``read_metadata``. Step: the reading rank opens the file (its zip directory and
   its pickle, a few requests), and every rank is sent keys, shapes and dtypes
2. (all ranks) ``set_up_storage_reader``, ``prepare_local_plan``
3. (DCP's coordinator) ``prepare_global_plan``
4. (all ranks) ``read_data``. Step: every rank checks its targets and says which boxes it
   wants, and the reading rank plans waves. Then a step per wave, and one to finish
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future as TorchFuture

from dcpstore.collectives import RankGroup, SingleGroup
from dcpstore.config import ReadConfig
from dcpstore.errors import ConfigError
from dcpstore.fetch import ReadStats
from dcpstore.folder import Folder
from dcpstore.format.archive import ReadAt
from dcpstore.progress import Meter
from dcpstore.protocol import Ranks, join_ranks, plain_cause_of_one
from dcpstore.store.base import Store
from dcpstore.store.location import file_location, redact
from dcpstore.store.opening import open_store
from dcpstore.torch_file import TorchFile, open_torch_file
from dcpstore.torch_save_reader.job import Access, LoadJob

__all__ = ["BroadcastingTorchSaveReader"]


class BroadcastingTorchSaveReader(StorageReader):
    """Load a ``torch.save`` file from an object store into any sharded state dict.

    A DCP ``StorageReader`` for ``dcp.load`` and `dcpstore.load`, with any planner: those of
    dcpstore and torch's `DynamicMetaLoadPlanner` alike. One rank reads, by ranged GETs of what
    any rank wants, and sends every other rank the part of each tensor that it holds, over
    connections of its own beside the process group. Values that are no tensors are sent to
    the ranks whose state dict has their key. No rank holds more than the budget beside its
    targets: tensors travel in pieces.

    Keys, kinds, shapes and dtypes are checked on all ranks before any tensor is read, so a
    mismatch changes nothing; whatever fails on one rank is raised on all of them. One object
    serves many loads, one at a time. Needs permission to get.

    Args:
        checkpoint_id: The file: a URL such as ``s3://bucket/model.pt``, or a local path. May
            be given to the load instead.
        coordinator_rank: The rank that reads, as a rank of the group. Any, also where DCP's
            own coordinator is another. `dcpstore.load` plans on this rank, too.
        storage_options: fsspec's options for the URL's protocol.
        config: Sizes, bounds, retries and casts. ``allow_pickle`` opens files that
            ``torch.load(weights_only=True)`` refuses, and runs the code they name.
        process_group: The ranks that load together; None for all, or for this process alone
            where torch.distributed is not initialised. The same group that ``dcp.load`` is
            given, which does not tell its reader. `dcpstore.load` brings its own.
        no_dist: Load in this process alone; pass it where ``dcp.load`` is passed it.
        direct: Every rank reads its own parts of tensors from the store, and only keys, shapes
            and values travel. Faster where ranks have bandwidth of their own to the store and
            each holds a part; replicated tensors are then read by every rank.
        deadline_s: Most seconds that one step (opening, a wave) may take.
        store_opener: Opens the store; tests pass one that injects faults.

    Raises:
        ConfigError: If the URL cannot be that of a file.
    """

    def __init__(
        self,
        checkpoint_id: str | os.PathLike[str] | None = None,
        coordinator_rank: int = 0,
        *,
        storage_options: Mapping[str, Any] | None = None,
        config: ReadConfig | None = None,
        process_group: Ranks = None,
        no_dist: bool = False,
        direct: bool = False,
        deadline_s: float = 600.0,
        store_opener: Callable[..., Store] = open_store,
    ) -> None:
        super().__init__()
        self.coordinator_rank = coordinator_rank
        self._options = dict(storage_options or {})
        self._config = config or ReadConfig()
        self._ranks: Ranks = SingleGroup(deadline_s) if no_dist else process_group
        self._is_direct = direct
        self._deadline_s = deadline_s
        self._opener = store_opener
        self._url: str | os.PathLike[str] | None = None
        self._lent: RankGroup | None = None
        self._group: RankGroup | None = None
        self._job: LoadJob | None = None
        self._stack = ExitStack()
        self.last_read: ReadStats | None = None
        """What this rank's last load did; None before it."""
        self.reset(checkpoint_id)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.checkpoint_id!r})"

    @property
    def checkpoint_id(self) -> str | None:
        """The file that the next load reads."""
        return None if self._url is None else redact(os.fspath(self._url))

    @property
    def config(self) -> ReadConfig:
        """Sizes, bounds, casts and trust."""
        return self._config

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether a URL or path can be that of a file that is served."""
        try:
            file_location(checkpoint_id)
        except ConfigError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for another load, from another file if one is given; options stay.

        Raises:
            ConfigError: If the URL cannot be that of a file.
        """
        self._end()
        if checkpoint_id is not None:
            file_location(checkpoint_id)
            self._url = checkpoint_id

    def join(self, group: RankGroup) -> None:
        """Take part in the steps of an open group in the next load. All ranks, before it.

        Args:
            group: Its coordinator reads. Stays open.

        Raises:
            ConfigError: If the coordinator is not ``coordinator_rank``.
        """
        if group.coordinator != self.coordinator_rank:
            raise ConfigError(
                f"the reader's coordinator_rank is {self.coordinator_rank}, and the group that"
                f" loads has {group.coordinator}; let them agree"
            )
        self._lent = group

    def read_metadata(self) -> Metadata:
        """Open the file on the reading rank; return what it holds, on every rank. Collective.

        Raises:
            ConfigError: If no file was named.
            RankFailures: On every rank of several, if the file cannot be opened. Where there is
                but one rank: the cause itself, as `open_torch_file` says.
        """
        self._end()
        url = self._url
        if url is None:
            raise ConfigError(
                "no file was named: pass checkpoint_id to the reader or to the load, such as"
                " s3://bucket/model.pt"
            )
        lent, self._lent = self._lent, None
        ranks = self._ranks if lent is None else lent
        with ExitStack() as stack:
            group = stack.enter_context(
                join_ranks(
                    ranks, self.coordinator_rank, self._deadline_s, action="torch.save", url=url
                )
            )
            access = Access(partial(self._open_file, url), partial(self._open_reads, url))
            job = LoadJob(group, access, self._config, is_direct=self._is_direct)
            stack.callback(job.close)
            with plain_cause_of_one(group):
                catalogue = job.open()
            self._group, self._job, self._stack = group, job, stack.pop_all()
        return catalogue.metadata()

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: what the file holds is known, and a planner may have changed its view."""
        del metadata, is_coordinator, args, kwargs

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans. DCP's coordinator only."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> TorchFuture[None]:
        """Fill this rank's targets. Returns when all are there. Collective.

        Planner methods are called in the calling thread only.

        Raises:
            RankFailures: On every rank of several, if any failed.
            IncompatibleError: Where there is but one rank, like all below: if a key is not in
                the file, or its kind, shape or dtype does not fit; nothing was changed.
            ConflictError: If the file was replaced meanwhile.
            CorruptError: If the file is damaged.
            StoreError: If the store refuses.
        """
        self.read_planned(lambda: plan, planner, Meter("load"))
        future: TorchFuture[None] = TorchFuture()
        future.set_result(None)
        return future

    def read_planned(
        self, finish_plan: Callable[[], LoadPlan], planner: LoadPlanner, meter: Meter
    ) -> ReadStats:
        """Do what `read_data` does, with a plan that is made in the first step. Collective.

        Args:
            finish_plan: Returns this rank's plan; if it raises, every rank is told.
            planner: Resolves targets, and is told of complete ones.
            meter: Counts the bytes delivered.

        Raises: as `read_data`.
        """
        group, job = self._group, self._job
        if group is None or job is None:
            raise ConfigError("read_metadata comes before read_data, once for every load")
        stack, self._stack = self._stack, ExitStack()
        self._group = self._job = None
        self.last_read = job.stats
        with stack, plain_cause_of_one(group):
            job.read(finish_plan, planner, meter)
        return job.stats

    def _end(self) -> None:
        """Leave the group of a load that did not come to its end."""
        stack, self._stack = self._stack, ExitStack()
        self._group = self._job = None
        stack.close()

    def _open_file(self, url: str | os.PathLike[str]) -> TorchFile:
        return open_torch_file(
            url,
            storage_options=self._options,
            weights_only=not self._config.allow_pickle,
            config=self._config,
            opener=self._opener,
        )

    def _open_reads(self, url: str | os.PathLike[str], stack: ExitStack) -> ReadAt:
        parent, key = file_location(url)
        folder = Folder(parent, self._options, self._config, self._opener)
        stack.callback(folder.close)
        return partial(folder.open().get_range, key)
