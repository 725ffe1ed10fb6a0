"""`save`: the whole of DCP's save protocol, driven by us.

Call order, as the docstrings of DCP's ``SavePlanner`` and ``StorageWriter`` promise it:

1. (all ranks) ``writer.storage_meta``, ``planner.set_up_planner``, ``writer.set_up_storage_writer``
2. (all ranks) ``planner.create_local_plan``, ``writer.prepare_local_plan``
3. (coordinator) ``planner.create_global_plan``, ``writer.prepare_global_plan``
4. (all ranks) ``planner.finish_plan``, ``writer.write_data``; where the save may be given up, one
   more step finds that no rank did
5. (coordinator) ``writer.finish``
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.planner import SavePlanner as DcpSavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from dcpstore.config import WriteConfig
from dcpstore.errors import (
    AbandonedError,
    CheckpointError,
    CommitUnknownError,
    ConfigError,
    RankFailures,
)
from dcpstore.format.seal import Facts
from dcpstore.plan import SavePlanner
from dcpstore.ranks import RankGroup, steps
from dcpstore.ranks.agreement import Ranks, call_set_up, choose_storage, is_stateful, join_ranks
from dcpstore.ranks.transport import BoardLostError
from dcpstore.report import Meter, Phases, ProgressCallback, SaveResult, show_progress
from dcpstore.text import collector_paused
from dcpstore.write.attached import Attachment, take_out
from dcpstore.write.cutoff import Cutoff
from dcpstore.write.exchange import AgreedPlan, agree_on_save_plan
from dcpstore.write.job import WriteStats
from dcpstore.write.writer import ObjectStoreWriter

_WRITE = "write"
_AGREE = "agree to seal"
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
    total_deadline_s: float | None = None,
    cutoff: Cutoff | None = None,
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
        total_deadline_s: Most seconds that the whole save may take; the same on all ranks. What
            cannot be sealed by then is given up on all ranks: no part is begun and no seal, what
            was written is deleted, and the error names the deadline. A request that hangs then may
            hold its own rank up for longer, at most as long again.
        cutoff: Of a save that another thread may cancel; instead of ``total_deadline_s``.
        progress: As for `dcpstore.load`.
        attachments: Files to be sealed with the tensors; see `ObjectStoreWriter.attach`.
        metrics: Numbers to be sealed with the tensors; see `ObjectStoreWriter.attach`.
        user_metadata: What JSON can say, to be sealed with them.
        facts: Step and run, to be sealed with them; metrics that are given add to its own.

    Raises:
        RankFailures: On every rank of several, if any failed.
        AbandonedError: If the save was given up; of several ranks, in ``RankFailures``.
        CheckpointError: The cause itself, where there is but one rank.
        ConfigError: If the arguments do not fit together.
    """
    joining = join_ranks(process_group, coordinator_rank, deadline_s, action="save", url=url)
    with joining as group:
        if cutoff is None and total_deadline_s is not None:
            cutoff = Cutoff(total_deadline_s)
        if storage_writer is None:
            config = _within(cutoff, config)
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
        job = _SaveJob(group, writer, planner or SavePlanner(), attached, cutoff)
        showing = show_progress("save", progress, is_coordinator=group.is_coordinator)
        with showing as meter:
            try:
                return job.run(state_dict, meter)
            except RankFailures as failures:
                raise job.clean_up(failures) from failures.__cause__
            finally:
                job.close()


def _within(cutoff: Cutoff | None, config: WriteConfig | None) -> WriteConfig | None:
    """Bound what one request may take by what the whole save may take."""
    if cutoff is None or cutoff.total_s is None:
        return config
    config = config or WriteConfig()
    most_s = max(1.0, min(config.retry_deadline_s, cutoff.left_s()))
    return replace(config, retry_deadline_s=most_s)


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
        cutoff: Cutoff | None,
    ) -> None:
        self._group = group
        self._deadline_s = group.deadline_s
        self._cutoff = cutoff
        self._writer = writer
        self._planner = planner
        self._attached = attached
        self._phases = Phases()

    def run(self, state_dict: Mapping[str, Any], meter: Meter) -> SaveResult:
        if isinstance(self._writer, ObjectStoreWriter):
            self._writer.watch(meter, self._cutoff)
        self._limit_step()
        with self._phases.phase("plan"):
            agreed = agree_on_save_plan(
                self._group, self._planner, self._writer, lambda: self._plan(state_dict)
            )
        succeeded = False
        try:
            self._limit_step()
            with self._phases.phase("write"):
                written = steps.gather(self._group, _WRITE, lambda: self._write(agreed.plan))
            if self._cutoff is not None:
                self._limit_step()
                steps.each(self._group, _AGREE, self._cutoff.close)
                self._limit_step()
            result = steps.broadcast(self._group, _SEAL, lambda: self._seal(agreed, written or []))
            succeeded = True
        finally:
            agreed.settle(succeeded)
        return result

    def close(self) -> None:
        """Leave the group and the writer as they were."""
        self._group.deadline_s = self._deadline_s
        if isinstance(self._writer, ObjectStoreWriter):
            self._writer.watch(None)

    def _limit_step(self) -> None:
        """Let the next step take no longer than there is time."""
        if self._cutoff is not None:
            self._group.deadline_s = self._cutoff.step_deadline_s(self._deadline_s)

    def _go_on(self) -> None:
        if self._cutoff is not None:
            self._cutoff.check()

    @collector_paused()
    def _plan(self, state_dict: Mapping[str, Any]) -> SavePlan:
        self._go_on()
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
        self._go_on()
        results = self._writer.write_data(self._planner.finish_plan(plan), self._planner).wait()
        stats = getattr(self._writer, "last_write", None)
        return _Share(results, stats if isinstance(stats, WriteStats) else WriteStats())

    def clean_up(self, failures: RankFailures) -> RankFailures:
        """Delete what this rank wrote in a save that failed, if it is certain what became of it.

        Returns:
            The error to raise: it says if the checkpoint may be there all the same.
        """
        lost_board = isinstance(failures.__cause__, BoardLostError)
        if failures.step == _SEAL:
            error = failures.exceptions.get(self._group.coordinator)
            if isinstance(error, CheckpointError) and not isinstance(error, CommitUnknownError):
                # The coordinator knows that nothing was sealed, and deleted everything.
                return failures
        elif not (lost_board and failures.step in (_WRITE, _AGREE)):
            # All ranks agree that a step failed before which nobody seals.
            if isinstance(self._writer, ObjectStoreWriter):
                self._writer.sweep_unsealed(seal_begun=False)
            return self._saying_why(failures)
        url = str(getattr(self._writer, "checkpoint_id", ""))
        return failures.saying(
            f"{failures.message}\nThe checkpoint may be sealed all the same: `dcpstore show {url}`"
            " prints the id of the save that is there, and when it was made. Nothing was deleted"
        )

    def _saying_why(self, failures: RankFailures) -> RankFailures:
        """Name the deadline where ranks failed as they were silent until it."""
        if self._cutoff is None or not self._cutoff.is_late:
            return failures
        if any(isinstance(one, AbandonedError) for one in failures.exceptions.values()):
            return failures
        return failures.saying(f"{failures.message}\n{self._cutoff.lateness}")

    def _seal(self, agreed: AgreedPlan, shares: Sequence[_Share]) -> SaveResult:
        assert agreed.make_metadata is not None
        results = [share.results for share in shares]
        with self._phases.phase("seal"):
            try:
                with collector_paused():
                    metadata = agreed.make_metadata()
                self._go_on()
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
