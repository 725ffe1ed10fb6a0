"""`load`: the whole of DCP's load protocol, driven by us.

Call order, as the docstrings of DCP's ``LoadPlanner`` and ``StorageReader`` promise it:

1. (coordinator) read the metadata; every rank is sent it and opens it. With a reader that is
   not ours: (all ranks) ``reader.read_metadata``
2. (all ranks) ``planner.set_up_planner``, ``reader.set_up_storage_reader``,
   ``planner.create_local_plan``, ``reader.prepare_local_plan``
3. (coordinator) ``planner.create_global_plan``, ``reader.prepare_global_plan``; not where both
   are ours and would return the plans as they are
4. (all ranks) ``planner.finish_plan``, then read: what several ranks want is fetched by one of
   them and shared. With a reader that is not ours: ``reader.read_data``
5. (all ranks) ``Stateful`` values are given their state

Every call into a planner, a reader or a value of the caller's is part of a step, so that no
rank waits for one that failed in it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypedDict

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner import LoadPlanner as DcpLoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from typing_extensions import Unpack

from dcpstore.config import ReadConfig
from dcpstore.errors import ConfigError, NotFoundError
from dcpstore.plan import LoadPlanner
from dcpstore.plan.coverage import refuse_lacks, with_holes
from dcpstore.plan.load import KeyReport
from dcpstore.plan.rules import Strictness
from dcpstore.plan.wire import PlanCache
from dcpstore.ranks import RankGroup, steps
from dcpstore.ranks.agreement import Ranks, call_set_up, choose_storage, is_stateful, join_ranks
from dcpstore.read.discovery import Discovered
from dcpstore.read.pump import ReadJob, ReadStats
from dcpstore.read.reader import ObjectStoreReader
from dcpstore.read.sharing import SharePolicy, Shares, read_shared
from dcpstore.read.torch_save import BroadcastingTorchSaveReader
from dcpstore.report import LoadResult, Meter, Phases, ProgressCallback, Transfer, show_progress
from dcpstore.text import collector_paused


class LoadOptions(TypedDict, total=False):
    """Keywords of `load` that what loads an optimizer takes too."""

    planner: DcpLoadPlanner | None
    process_group: Ranks
    storage_options: Mapping[str, Any] | None
    config: ReadConfig | None
    share: SharePolicy
    coordinator_rank: int
    deadline_s: float
    progress: ProgressCallback | bool | None


StateMaker: TypeAlias = Callable[[Metadata], MutableMapping[str, Any]]
"""Makes the state dict once it is known what the checkpoint holds."""


def load(
    state_dict: MutableMapping[str, Any] | StateMaker,
    url: str | os.PathLike[str] | None = None,
    *,
    planner: DcpLoadPlanner | None = None,
    process_group: Ranks = None,
    strict: Strictness = True,
    storage_options: Mapping[str, Any] | None = None,
    config: ReadConfig | None = None,
    storage_reader: StorageReader | None = None,
    share: SharePolicy = "auto",
    coordinator_rank: int = 0,
    deadline_s: float = 1800.0,
    progress: ProgressCallback | bool | None = None,
) -> LoadResult:
    """Load into a state dict, in place. All ranks of the group call it; collective.

    Keys, shapes and dtypes are compared on all ranks before any data is read. If any rank
    fails, every rank raises, before the deadline, naming each failing rank and its cause.

    Args:
        state_dict: Nested; tensors are filled in place, values replaced, ``Stateful`` values
            given their loaded state. Or a function that makes it of the checkpoint's metadata,
            called once on every rank, as a part of the step that plans.
        url: Folder of the checkpoint.
        planner: Any DCP load planner; None for `dcpstore.plan.LoadPlanner`.
        process_group: The ranks that load together; None for all, or for this process
            alone where torch.distributed is not initialised. An open `RankGroup` will do.
        strict: Whether a key that the checkpoint lacks is an error: for all, or per prefix.
        storage_options: fsspec's options for the URL's protocol.
        config: Sizes, bounds, retries, casts and trust.
        storage_reader: Any DCP storage reader, instead of ``url`` and the options above.
        share: Whether ranks that want the same bytes fetch them once and share them: where
            it pays, always, or never.
        coordinator_rank: Rank of the group that reads the metadata and plans. With a
            `BroadcastingTorchSaveReader` its own counts instead.
        deadline_s: Most seconds that one step (planning, a wave of reads) may take.
        progress: A callback on every rank; True for a bar on the coordinator; None for one if
            standard error is a terminal.

    Raises:
        RankFailures: On every rank of several, if any failed.
        CheckpointError: The cause itself, where there is but one rank.
        ConfigError: If the arguments do not fit together.
    """
    if share not in ("auto", "always", "never"):
        raise ConfigError(f"share={share!r} must be 'auto', 'always' or 'never'")
    if planner is not None and strict is not True:
        raise ConfigError("strict belongs to the planner that load would make; tell your planner")
    make_state = state_dict if callable(state_dict) else lambda _: state_dict
    if isinstance(storage_reader, BroadcastingTorchSaveReader):
        coordinator_rank = storage_reader.coordinator_rank
    joining = join_ranks(process_group, coordinator_rank, deadline_s, action="load", url=url)
    with joining as group:
        options = {"storage_options": storage_options, "config": config}
        reader = choose_storage("load", url, storage_reader, ObjectStoreReader, options)
        with show_progress("load", progress, is_coordinator=group.is_coordinator) as meter:
            job = _LoadJob(group, reader, planner or LoadPlanner(strict=strict), share, meter)
            return job.run(make_state)


def load_from(
    source: str | os.PathLike[str] | StorageReader,
    make_state: StateMaker,
    **options: Unpack[LoadOptions],
) -> LoadResult:
    """Load from a folder, or with any DCP storage reader. Collective; see `load`."""
    if isinstance(source, StorageReader):
        return load(make_state, storage_reader=source, **options)
    return load(make_state, source, **options)


@dataclass(slots=True)
class _LoadJob:
    """One rank's way through a load."""

    _group: RankGroup
    _reader: StorageReader
    _planner: DcpLoadPlanner
    _policy: SharePolicy
    _meter: Meter
    _phases: Phases = field(default_factory=Phases)
    _sharing: str = "not shared: the reader is not dcpstore's"
    _is_plan_cached: bool = False
    _target: MutableMapping[str, Any] = field(default_factory=dict)
    _state: dict[str, Any] = field(default_factory=dict)
    _planned: set[str] = field(default_factory=set)
    _metadata: Metadata = field(init=False)

    @property
    def _url(self) -> str:
        return str(getattr(self._reader, "checkpoint_id", ""))

    def run(self, make_state: StateMaker) -> LoadResult:
        with self._phases.phase("metadata"):
            found, is_global = self._read_metadata()
        with self._phases.phase("plan"):
            plan = self._plan(make_state, found)
        with self._phases.phase("read"):
            if isinstance(self._reader, ObjectStoreReader):
                stats = self._read_ours(self._reader, plan, is_global)
            elif isinstance(self._reader, BroadcastingTorchSaveReader):
                stats = self._read_torch_save(self._reader, plan)
            else:
                stats = self._read_foreign(plan)
        return self._result(stats)

    def _read_metadata(self) -> tuple[Metadata | Discovered, bool]:
        """Return the metadata, opened or not, and whether it is that of all ranks together."""
        reader = self._reader
        if isinstance(reader, BroadcastingTorchSaveReader):
            reader.join(self._group)
            return reader.read_metadata(), True
        if not isinstance(reader, ObjectStoreReader):
            return steps.each(self._group, "read metadata", reader.read_metadata), True

        def look() -> Discovered | NotFoundError:
            try:
                return reader.discover()
            except NotFoundError as error:
                return error

        found = steps.broadcast(self._group, "read metadata", look)
        if isinstance(found, Discovered):
            return found, True

        def look_for_own() -> Discovered:
            # A save with use_collectives=False leaves the metadata of each rank.
            try:
                return reader.discover(rank=self._group.rank)
            except NotFoundError:
                raise found from None

        return steps.each(self._group, "read each rank's metadata", look_for_own), False

    def _plan(self, make_state: StateMaker, found: Metadata | Discovered) -> LoadPlan:
        @collector_paused()  # once, as it walks over every object when it is turned on again
        def locally() -> LoadPlan:
            is_coordinator = self._group.is_coordinator
            metadata = found
            if isinstance(self._reader, ObjectStoreReader) and isinstance(found, Discovered):
                metadata = self._reader.open_metadata(found)
            assert isinstance(metadata, Metadata)
            if not isinstance(self._reader, ObjectStoreReader):
                metadata = with_holes(metadata, self._url)
            self._metadata = metadata
            self._target = make_state(metadata)
            self._state = {
                key: value.state_dict() if is_stateful(value) else value
                for key, value in sorted(self._target.items(), key=lambda one: str(one[0]))
            }
            self._planner.set_up_planner(self._state, metadata, is_coordinator)
            call_set_up(
                self._reader.set_up_storage_reader,
                metadata,
                is_coordinator,
                rank=self._group.rank,
                use_collectives=True,
            )
            return self._reader.prepare_local_plan(self._planner.create_local_plan())

        def globally(plans: list[LoadPlan]) -> list[LoadPlan]:
            return self._reader.prepare_global_plan(self._planner.create_global_plan(plans))

        if self._needs_global_plan():
            return steps.reduce_scatter(self._group, "plan", locally, globally)
        return steps.each(self._group, "plan", locally)

    def _finish_plan(self, plan: LoadPlan) -> LoadPlan:
        finished = self._planner.finish_plan(plan)
        self._planned = {item.storage_index.fqn for item in finished.items}
        return finished

    def _needs_global_plan(self) -> bool:
        """Ours return the plans as they are, so sending them to the coordinator is for nothing."""
        return not (
            isinstance(self._reader, ObjectStoreReader)
            and type(self._reader).prepare_global_plan is ObjectStoreReader.prepare_global_plan
            and type(self._planner).create_global_plan is LoadPlanner.create_global_plan
        )

    def _read_ours(self, reader: ObjectStoreReader, plan: LoadPlan, is_global: bool) -> ReadStats:
        with ExitStack() as stack:

            def prepare() -> ReadJob:
                job = stack.enter_context(reader.open_job(self._meter))
                job.prepare(self._finish_plan(plan).items, self._planner)
                return job

            job = steps.each(self._group, "check targets", prepare)
            keys = sorted({item.key for item in self._metadata.storage_data.values()})
            cache: PlanCache[Shares] = PlanCache()
            if isinstance(self._planner, LoadPlanner):
                cache = self._planner.plan_cache
            self._sharing, self._is_plan_cached = read_shared(
                self._group,
                job,
                self._planner,
                reader.config,
                keys=keys,
                policy=self._policy if is_global else "never",
                cache=cache,
                readers=reader.readers,
            )
        return job.stats

    def _read_torch_save(self, reader: BroadcastingTorchSaveReader, plan: LoadPlan) -> ReadStats:
        stats, self._sharing = reader.read_planned(
            lambda: self._finish_plan(plan), self._planner, self._meter
        )
        return stats

    def _read_foreign(self, plan: LoadPlan) -> ReadStats:
        def check() -> LoadPlan:
            finished = self._finish_plan(plan)
            refuse_lacks(finished.items, self._metadata)
            return finished

        finished = steps.each(self._group, "check targets", check)
        steps.each(
            self._group, "read", lambda: self._reader.read_data(finished, self._planner).wait()
        )
        return ReadStats()

    def _result(self, stats: ReadStats) -> LoadResult:
        own = Transfer(
            stats.num_requests,
            stats.needed_bytes,
            stats.fetched_bytes,
            stats.received_bytes,
            stats.peak_bytes,
        )

        def hand_over() -> Transfer:
            for key, value in self._state.items():
                target = self._target[key]
                if is_stateful(target):
                    target.load_state_dict(value)
                else:
                    self._target[key] = value
            return own

        job = steps.all_reduce(self._group, "hand over", hand_over, Transfer.total)
        if isinstance(self._planner, LoadPlanner):
            keys = self._planner.report
        else:
            # A rank whose shard of a tensor is empty plans nothing for a key that it has.
            known = self._planned.union(getattr(self._planner, "state_dict", None) or ())
            unexpected = sorted(self._metadata.state_dict_metadata.keys() - known)
            keys = KeyReport(loaded=sorted(self._planned), unexpected=unexpected)
        return LoadResult(
            url=self._url,
            loaded=tuple(keys.loaded),
            missing=tuple(keys.missing),
            unexpected=tuple(keys.unexpected),
            cast=dict(keys.cast),
            rank=own,
            job=job,
            sharing=self._sharing,
            is_plan_cached=self._is_plan_cached,
            seconds=dict(self._phases.seconds),
        )
