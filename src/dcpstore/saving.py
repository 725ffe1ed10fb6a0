"""`save`: the whole of DCP's save protocol, driven by us.

Call order, as the docstrings of DCP's ``SavePlanner`` and ``StorageWriter`` promise it:

1. (all ranks) ``writer.storage_meta``, ``planner.set_up_planner``, ``writer.set_up_storage_writer``
2. (all ranks) ``planner.create_local_plan``, ``writer.prepare_local_plan``
3. (coordinator) ``planner.create_global_plan``, ``writer.prepare_global_plan``
4. (all ranks) ``planner.finish_plan``, ``writer.write_data``
5. (coordinator) ``writer.finish``
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.planner import SavePlanner as DcpSavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from dcpstore.config import WriteConfig
from dcpstore.errors import CheckpointError, CommitUnknownError, ConfigError, RankFailures
from dcpstore.format.seal import Facts
from dcpstore.plan import SavePlanner
from dcpstore.ranks import RankGroup, steps
from dcpstore.ranks.agreement import Ranks, call_set_up, choose_storage, is_stateful, join_ranks
from dcpstore.ranks.transport import BoardLostError
from dcpstore.report import Meter, Phases, ProgressCallback, SaveResult, show_progress
from dcpstore.text import collector_paused
from dcpstore.write.attached import Attachment, take_out
from dcpstore.write.exchange import AgreedPlan, agree_on_save_plan
from dcpstore.write.job import WriteStats
from dcpstore.write.writer import ObjectStoreWriter

_WRITE = "write"
_SEAL = "seal"


def save(
    state_dict: Mapping[str, Any],
    url: str | os.PathLike[str] | None = None,
    *,
    planner: DcpSavePlanner | None = None,
    process_group: Ranks = None,
    storage_options: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    config: WriteConfig | None = None,
    storage_writer: StorageWriter | None = None,
    coordinator_rank: int = 0,
    deadline_s: float = 1800.0,
    progress: ProgressCallback | bool | None = None,
    attachments: Mapping[str, Attachment] | None = None,
    metrics: Mapping[str, float] | None = None,
    user_metadata: Mapping[str, Any] | None = None,
    facts: Facts | None = None,
) -> SaveResult:
    """Save a state dict. All ranks of the group call it; collective.

    If any rank fails, every rank raises, before the deadline, naming each failing rank and
    its cause. If it failed before the last step, nothing is sealed, and every rank deletes what
    it wrote. In the last step (``seal``) the coordinator may have sealed the checkpoint although
    a rank fails, itself included: the error then says that it may be sealed, and nothing is
    deleted.

    Args:
        state_dict: Nested; its ``Stateful`` values are asked for their state.
        url: Folder of the checkpoint.
        planner: Any DCP save planner; None for `dcpstore.plan.SavePlanner`. One that is
            kept and passed again spares unchanged plans from being made and sent again.
        process_group: The ranks that save together; None for all, or for this process
            alone where torch.distributed is not initialised. An open `RankGroup` will do.
        storage_options: fsspec's options for the URL's protocol.
        overwrite: Replace a checkpoint that exists.
        config: Sizes, bounds and retries.
        storage_writer: Any DCP storage writer, instead of ``url`` and the options above.
        coordinator_rank: Rank of the group that plans and seals.
        deadline_s: Most seconds that one step (planning, writing) may take.
        progress: As for `dcpstore.load`.
        attachments: Files to be sealed with the tensors; see `ObjectStoreWriter.attach`.
        metrics: Numbers to be sealed with the tensors; see `ObjectStoreWriter.attach`.
        user_metadata: What JSON can say, to be sealed with them.
        facts: Step and run, to be sealed with them; metrics that are given add to its own.

    Raises:
        RankFailures: On every rank of several, if any failed.
        CheckpointError: The cause itself, where there is but one rank.
        ConfigError: If the arguments do not fit together.
    """
    joining = join_ranks(process_group, coordinator_rank, deadline_s, action="save", url=url)
    with joining as group:
        options = {"storage_options": storage_options, "overwrite": overwrite, "config": config}
        writer = choose_storage("save", url, storage_writer, ObjectStoreWriter, options)
        known = facts or Facts()
        attached = {
            "attachments": attachments,
            "metrics": {**known.metrics, **(metrics or {})},
            "user_metadata": user_metadata,
            "step": known.step,
            "run": known.run,
        }
        job = _SaveJob(group, writer, planner or SavePlanner(), attached)
        showing = show_progress("save", progress, is_coordinator=group.is_coordinator)
        with showing as meter:
            try:
                return job.run(state_dict, meter)
            except RankFailures as failures:
                job.clean_up(failures)
                raise


@dataclass(frozen=True, slots=True)
class _Share:
    """What one rank wrote."""

    results: list[WriteResult]
    stats: WriteStats


class _SaveJob:
    """One rank's way through a save."""

    def __init__(
        self,
        group: RankGroup,
        writer: StorageWriter,
        planner: DcpSavePlanner,
        attached: Mapping[str, Any],
    ) -> None:
        self._group = group
        self._writer = writer
        self._planner = planner
        self._attached = attached
        self._phases = Phases()

    def run(self, state_dict: Mapping[str, Any], meter: Meter) -> SaveResult:
        if isinstance(self._writer, ObjectStoreWriter):
            self._writer.watch(meter)
        with self._phases.phase("plan"):
            agreed = agree_on_save_plan(
                self._group, self._planner, self._writer, lambda: self._plan(state_dict)
            )
        succeeded = False
        try:
            with self._phases.phase("write"):
                written = steps.gather(self._group, _WRITE, lambda: self._write(agreed.plan))
            result = steps.broadcast(self._group, _SEAL, lambda: self._seal(agreed, written or []))
            succeeded = True
        finally:
            agreed.settle(succeeded)
        return result

    @collector_paused()
    def _plan(self, state_dict: Mapping[str, Any]) -> SavePlan:
        state = {
            key: value.state_dict() if is_stateful(value) else value
            for key, value in state_dict.items()
        }
        is_coordinator = self._group.is_coordinator
        call_set_up(
            self._planner.set_up_planner,
            state,
            storage_meta=self._writer.storage_meta(),
            is_coordinator=is_coordinator,
        )
        self._attach()  # right before the writer takes it, so that no failure keeps it there
        call_set_up(
            self._writer.set_up_storage_writer,
            is_coordinator,
            rank=self._group.rank,
            use_collectives=True,
        )
        return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def _attach(self) -> None:
        """Give the writer what is sealed beside the tensors."""
        given = {name: value for name, value in self._attached.items() if value not in (None, {})}
        if not given:
            return
        if not isinstance(self._writer, ObjectStoreWriter):
            raise ConfigError(
                f"{', '.join(given)} can be sealed by an ObjectStoreWriter, and storage_writer is"
                f" a {type(self._writer).__name__}"
            )
        if self._writer.has_attached:
            raise ConfigError(
                f"something is attached to your storage_writer already: give {', '.join(given)} to"
                " its attach() too"
            )
        self._writer.attach(**given)

    def _write(self, plan: SavePlan) -> _Share:
        results = self._writer.write_data(self._planner.finish_plan(plan), self._planner).wait()
        stats = getattr(self._writer, "last_write", None)
        return _Share(results, stats if isinstance(stats, WriteStats) else WriteStats())

    def clean_up(self, failures: RankFailures) -> None:
        """Delete what this rank wrote in a save that failed, if it is certain what became of it.

        Raises:
            RankFailures: The same, which says that the checkpoint may be there all the same.
        """
        lost_board = isinstance(failures.__cause__, BoardLostError)
        if failures.step == _SEAL:
            error = failures.exceptions.get(self._group.coordinator)
            if isinstance(error, CheckpointError) and not isinstance(error, CommitUnknownError):
                return  # the coordinator knows that nothing was sealed, and deleted everything
        elif not (lost_board and failures.step == _WRITE):
            # All ranks agree that a step failed before which nobody seals.
            if isinstance(self._writer, ObjectStoreWriter):
                self._writer.sweep_unsealed(seal_begun=False)
            return
        url = str(getattr(self._writer, "checkpoint_id", ""))
        raise failures.saying(
            f"{failures.message}\nThe checkpoint may be sealed all the same: `dcpstore show {url}`"
            " prints the id of the save that is there, and when it was made. Nothing was deleted"
        ) from failures.__cause__

    def _seal(self, agreed: AgreedPlan, shares: Sequence[_Share]) -> SaveResult:
        assert agreed.make_metadata is not None
        results = [share.results for share in shares]
        with self._phases.phase("seal"):
            try:
                with collector_paused():
                    metadata = agreed.make_metadata()
            except BaseException:
                if isinstance(self._writer, ObjectStoreWriter):
                    self._writer.discard(results)
                raise
            self._writer.finish(metadata, results)
        stats = [share.stats for share in shares]
        written, _ = take_out(chain.from_iterable(results))
        return SaveResult(
            url=str(getattr(self._writer, "checkpoint_id", "")),
            save_id=getattr(metadata.storage_meta, "save_id", None),
            num_keys=len(metadata.state_dict_metadata),
            num_items=len(written),
            num_objects=sum(one.num_objects for one in stats),
            num_requests=sum(one.num_requests for one in stats),
            stored_bytes=sum(one.size_in_bytes for one in chain.from_iterable(results)),
            peak_bytes=max(one.peak_bytes for one in stats),
            plan_bytes=agreed.sent_bytes,
            is_plan_cached=agreed.is_cached,
            seconds=dict(self._phases.seconds),
        )
