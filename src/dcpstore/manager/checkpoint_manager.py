"""`CheckpointManager`: the checkpoints of one training run, from its first step to its last.

Every rank has one, made and called alike::

    restore(state)          the newest sealed step, into the state
    step(number, state)     after every step: begins a save if one is due
    close()                 waits for it

Who does what:

- **Every rank** asks the policies that depend on the number of the step alone, so that all
  agree without a word. What one rank alone knows, a time that is due or a signal, goes through
  `dcpstore.manager.agreement`, which names the step at which all of them save.
- **A save** is `dcpstore.async_save`: over a group of ranks of its own, in a thread of its own.
- **The coordinator** claims the run, renews the claim before each seal, so that a job which lost
  the run to another one seals nothing any more, and retires old steps after each seal, in a thread
  of its own.

See ``docs/training.md`` for its use, and ``docs/design/014-runs.md`` for what lies in the bucket.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch.distributed as dist
from typing_extensions import Self

from dcpstore.config import ReadConfig, WriteConfig
from dcpstore.errors import (
    CheckpointError,
    ConfigError,
    CorruptError,
    NotFoundError,
    RankFailures,
)
from dcpstore.loading import load
from dcpstore.manager.agreement import StepAgreement
from dcpstore.manager.background import AsyncSave, async_save
from dcpstore.manager.events import Event, Events
from dcpstore.manager.policies import KeepPolicy, Moment, OnPreemption, SavePolicy, decide
from dcpstore.manager.preemption import Preemption
from dcpstore.manager.retention import retire
from dcpstore.manager.run import Run, SealedStep
from dcpstore.manager.staging import Stager
from dcpstore.plan import LoadPlanner, SavePlanner
from dcpstore.plan.rules import Strictness
from dcpstore.ranks import open_group, steps
from dcpstore.read.attachments import read_attachment
from dcpstore.report import SaveResult
from dcpstore.store.base import Store
from dcpstore.write.writer import ObjectStoreWriter

logger = logging.getLogger(__name__)

State: TypeAlias = "Mapping[str, Any] | Callable[[], Mapping[str, Any]]"
"""What to save: a state dict as `dcpstore.save` takes it, or what makes one if a save is due."""


class Preempted(SystemExit):
    """Ends a process whose job was told to stop, once its last step is safe; exit code 143."""

    def __init__(self) -> None:
        super().__init__(143)


class _RunWriter(ObjectStoreWriter):
    """Renews the run's claim before the seal, so that a job that lost it seals nothing."""

    def __init__(self, url: str, renew: Callable[[], object], **options: Any) -> None:
        super().__init__(url, overwrite=True, **options)
        self._renew = renew

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        try:
            self._renew()
        except BaseException:
            self.discard(results)
            raise
        super().finish(metadata, results)


@dataclass(slots=True)
class _Flight:
    """A save in the background."""

    step: int
    handle: AsyncSave
    is_given_up: bool = False


class CheckpointManager:
    """Save, keep, remove and find the checkpoints of a training run. One per rank.

    ```python
    with CheckpointManager("s3://bucket/run", save=EverySteps(500), keep=Latest(3)) as manager:
        start = manager.restore(state) or 0
        for step in range(start, num_steps):
            ...
            manager.step(step + 1, state)
    ```

    All ranks make it and call `step`, `save`, `restore` and `close` alike; the other methods send
    requests of their own and may be called on any rank, at any time. A step is the number of
    completed steps. Checkpoints lie at ``{url}/step-{n}``; any other reader may load them.

    Args:
        url: Folder of the run: ``s3://bucket/run``, ``gs://...``, ``az://...`` or a local path.
        save: When `step` saves: any of these policies. Without one only `save` does.
        keep: Which steps stay when a newer one was sealed: whatever any of these policies keeps.
            Without one, all. The newest, pinned ones, the one that was restored until a newer one
            is sealed, and those of another run stay in any case.
        process_group: The ranks; None for all. Nothing is ever sent over it.
        storage_options: fsspec's options for the URL's protocol.
        write: Sizes, bounds and retries of saves.
        read: The same of loads, and which casts they allow.
        planner: Of saves; kept, so that unchanged plans are made and sent once.
        background: Whether `step` returns as soon as the state is staged.
        when_busy: What becomes of a save that is due while another is under way: it waits for it,
            it is skipped, or it replaces it. To skip costs a step over the ranks' board.
        frozen: Keys, or what tells them, of tensors that training never changes. They are not
            copied before they are saved. See `dcpstore.async_save`.
        takeover: Whether to save to a run that another job seems to be saving to. That job is
            told at its next save, which seals nothing; False raises here instead.
        on_event: Called with each `dcpstore.manager.events.Event`, which is also logged.
        coordinator_rank: The rank that looks, seals and removes.
        deadline_s: Most seconds that a step of a save or a load may take on any rank.
        store_opener: Opens stores; tests pass one that injects faults.
        clock: Monotonic seconds.

    Raises:
        ConfigError: If an argument cannot be honoured.
        ConflictError: If another job holds the run and ``takeover=False``.
        StoreError: If the run cannot be claimed.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        save: SavePolicy | Sequence[SavePolicy] = (),
        keep: KeepPolicy | Sequence[KeepPolicy] = (),
        process_group: dist.ProcessGroup | None = None,
        storage_options: Mapping[str, Any] | None = None,
        write: WriteConfig | None = None,
        read: ReadConfig | None = None,
        planner: SavePlanner | None = None,
        background: bool = True,
        when_busy: Literal["wait", "skip", "replace"] = "wait",
        frozen: Sequence[str] | Callable[[str], bool] = (),
        takeover: bool = True,
        on_event: Callable[[Event], None] | Sequence[Callable[[Event], None]] = (),
        coordinator_rank: int = 0,
        deadline_s: float = 1800.0,
        store_opener: Callable[..., Store] = open_store,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if when_busy not in ("wait", "skip", "replace"):
            raise ConfigError(f"when_busy={when_busy!r} must be 'wait', 'skip' or 'replace'")
        self._policies = _as_list(save)
        self._keep = _as_list(keep)
        self._process_group = process_group
        self._options = dict(storage_options or {})
        self._write = write
        self._read = read
        self._planner = planner or SavePlanner()
        self._background = background
        self._when_busy = when_busy
        self._frozen = frozen
        self._takeover = takeover
        self._coordinator = coordinator_rank
        self._deadline_s = deadline_s
        self._opener = store_opener
        self._clock = clock
        self._run = Run(url, storage_options, read, store_opener=store_opener)
        self._stager = Stager()
        self._flight: _Flight | None = None
        self._last_step: int | None = None
        self._last_began_s = clock()
        self._resumed: int | None = None
        self._claimed: str | None = None
        self._is_over = False
        self.restored: SealedStep | None = None
        """The step that `restore` found last; None before it, and where there was none."""
        self._janitor = ThreadPoolExecutor(1, "dcpstore-retire")
        self._group = open_group(
            process_group, coordinator_rank, deadline_s, purpose="manager", subject=self._run.url
        )
        self._events = Events(_as_list(on_event), is_coordinator=self._group.is_coordinator)

    # --- saving ------------------------------------------------------------------------

    def step(
        self,
        step: int,
        state: State,
        *,
        metrics: Mapping[str, float] | None = None,
        attachments: Mapping[str, bytes | os.PathLike[str]] | None = None,
        user_metadata: Mapping[str, Any] | None = None,
    ) -> bool:
        """Say that a step is complete, and save if that is due. All ranks, after every step.

        Without a save it costs a microsecond and no message. With one, it returns once the state
        is staged: training may go on and change it.

        Args:
            step: Number of completed steps.
            state: What to save, or a function that makes it, called if a save is due.
            metrics: Sealed with the step, such as ``{"val_loss": 0.31}``; the coordinator's count.
            attachments: Named bytes or files of this rank that are sealed with the step.
            user_metadata: Facts in JSON that are sealed with the step; the coordinator's count.

        Returns:
            Whether a save of this step was begun or made.

        Raises:
            RankFailures: If this save, or one in the background before it, failed.
            Preempted: If the job was told to stop, once this step is sealed or given up.
        """
        self._raise_failure()
        sealed = {"metrics": metrics, "attachments": attachments, "user_metadata": user_metadata}
        decided = self._agreement.at(step)
        if decided is not None:
            self._is_asked = False
            if decided.is_end:
                self._save_before_the_end(step, state, sealed, decided)
                return True
        at = self._moment(step)
        is_due = decided is not None or any(
            policy.is_due(at) for policy in self._policies if policy.depends_on_step_alone
        )
        begun = is_due and step != self._last_step and self._begin(step, state, sealed) is not None
        self._ask_for_time(at)
        if begun and not self._background:
            self.wait()
        return begun

    def save(
        self,
        step: int,
        state: State,
        *,
        deadline_s: float | None = None,
        metrics: Mapping[str, float] | None = None,
        attachments: Mapping[str, bytes | os.PathLike[str]] | None = None,
        user_metadata: Mapping[str, Any] | None = None,
    ) -> SaveResult:
        """Save a step now, whatever is due, and return once it is sealed. All ranks.

        Waits for a save that is under way. The other arguments are those of `step`.

        Args:
            step: Number of completed steps.
            state: What to save, or a function that makes it.
            deadline_s: Most seconds in all: sealed by then, or given up on all ranks; None for
                no more than the deadline of each step.
            metrics: As of `step`.
            attachments: As of `step`.
            user_metadata: As of `step`.

        Raises:
            RankFailures: If it failed, or was given up; the last sealed step stays.
        """
        end_s = None if deadline_s is None else self._clock() + deadline_s
        self._land()
        left_s = None if end_s is None else max(end_s - self._clock(), 0.001)
        sealed = {"metrics": metrics, "attachments": attachments, "user_metadata": user_metadata}
        self._launch(step, state, sealed, deadline_s=left_s)
        result = self._land()
        assert result is not None
        return result

    def wait(self) -> None:
        """Return once no save and no removal is under way. All ranks.

        Raises:
            RankFailures: If the save failed.
        """
        self._land()
        self._janitor.submit(int).result()

    # --- finding and loading -------------------------------------------------------------

    def restore(
        self,
        state: MutableMapping[str, Any],
        step: int | Literal["latest", "best"] = "latest",
        *,
        strict: Strictness = True,
        planner: LoadPlanner | None = None,
        on_damaged: Literal["raise", "older"] = "raise",
    ) -> int | None:
        """Load a step into the state, in place. All ranks; all load the same step.

        The coordinator looks for it: one listing of the run's folders and one small request per
        step that it looks at, the newest first.

        Args:
            state: As `dcpstore.load` takes it: any layout, any number of ranks.
            step: A step's number; the newest sealed one; or the best one by the first `Best` of
                ``keep``.
            strict: As of `dcpstore.load`.
            planner: As of `dcpstore.load`.
            on_damaged: What to do if the step cannot be read whole: raise, or take the one before
                it, with an error in the log. Never nothing at all: where no step is whole, the
                first error is raised.

        Returns:
            The number of the step; None if the run has none, so that training begins.

        Raises:
            NotFoundError: If ``step`` is a number that the run has no sealed checkpoint of.
            CorruptError: If the checkpoint is damaged.
            RankFailures: The same, where there are several ranks.
        """
        self._land()
        passed: dict[int, CheckpointError] = {}
        while True:
            found = steps.broadcast(
                self._group,
                "find the step to restore",
                lambda: self._find(step, passed, may_pass=on_damaged == "older"),
            )
            if found is None:
                if passed:
                    raise next(iter(passed.values()))
                return None
            began_s = self._clock()
            try:
                result = load(
                    state,
                    found.url,
                    planner=planner,
                    process_group=self._process_group,
                    strict=strict,
                    storage_options=self._options,
                    config=self._read,
                    coordinator_rank=self._coordinator,
                    deadline_s=self._deadline_s,
                )
            except CheckpointError as error:
                if on_damaged != "older" or not _is_damage(error):
                    raise
                self._events.send("failed", found.step, found.url, error=error)
                passed[found.step] = error
                continue
            break
        self._last_step = self._resumed = found.step
        self._last_began_s = self._clock()
        self.restored = found
        self._events.send(
            "restored",
            found.step,
            found.url,
            seconds=self._clock() - began_s,
            num_bytes=result.job.needed_bytes,
        )
        return found.step

    def latest(self) -> SealedStep | None:
        """Return the newest sealed step; None if there is none. Any rank."""
        return self._run.newest()

    def best(self) -> SealedStep | None:
        """Return the best step by the first `Best` of ``keep``; None if none has its metric.

        Raises:
            ConfigError: If there is no such policy.
        """
        policy = next((one for one in self._keep if isinstance(one, Best)), None)
        if policy is None:
            raise ConfigError(
                "the best step is that of a policy: give keep=[Best(1, 'val_loss', 'min')]"
            )
        best = policy.ranked(self._run.facts())
        return None if not best else self._run.look(best[0].folder)

    def steps(self) -> list[SealedStep]:
        """Return all sealed steps, the newest first. Any rank; one small request per step."""
        return self._run.all()

    def read_attachment(self, name: str, step: int | None = None) -> bytes:
        """Return an attachment of the restored step, or of another. Any rank.

        Args:
            name: As it was given; ``{rank}`` in it stands for this rank.
            step: Of a sealed step; None for the one that was restored.

        Raises:
            NotFoundError: If there is no such step, or it has no such attachment.
        """
        found = self.restored if step is None else self._step(step)
        if found is None:
            raise NotFoundError(f"{self._run.url}: no step was restored: give the number of one")
        name = name.replace("{rank}", str(self._group.rank))
        return read_attachment(found.url, name, storage_options=self._options, config=self._read)

    # --- what is known beside the checkpoints --------------------------------------------

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to a step that is sealed. Any rank; the coordinator puts them."""
        if self._group.is_coordinator:
            self._run.report(step, metrics)

    def pin(self, step: int) -> None:
        """Keep a step whatever the policies say, until it is unpinned. Any rank.

        Raises:
            NotFoundError: If there is no such step.
            ConflictError: If it is being removed at this moment.
        """
        self._run.pin(step)

    def unpin(self, step: int) -> None:
        """Leave a step to the policies again. Any rank."""
        self._run.unpin(step)

    # --- ending --------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the save and the removals under way, and give the run back. All ranks.

        Raises:
            RankFailures: If the save failed.
        """
        if self._is_over:
            return
        self._is_over = True
        try:
            self._land()
        finally:
            self._janitor.shutdown(wait=True)
            if self._preemption is not None:
                self._preemption.close()
            self._agreement.close()
            if self._group.is_coordinator and self._claimed is not None:
                self._run.release()
            self._group.close()
            self._run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            logger.error("%s: %s", self._run.url, failure)

    # --- how -----------------------------------------------------------------------------

    def _begin(self, step: int, state: State, sealed: Mapping[str, Any]) -> AsyncSave | None:
        """Begin a save that is due, unless another one is under way and the policy is to skip."""
        if self._flight is not None and self._when_busy != "wait":
            flight = self._flight
            if self._when_busy == "replace":
                flight.is_given_up = flight.handle.cancel()
            elif steps.broadcast(
                self._group, "is a save under way", lambda: not flight.handle.done()
            ):
                self._events.send("skipped", step, self._run.url_of(step))
                return None
        self._land()
        return self._launch(step, state, sealed)

    def _launch(
        self, step: int, state: State, sealed: Mapping[str, Any], deadline_s: float | None = None
    ) -> AsyncSave:
        self._claim()
        url = self._run.url_of(step)
        writer = _RunWriter(
            url,
            lambda: self._run.renew(step, self._resumed),
            storage_options=self._options,
            config=self._write,
            store_opener=self._opener,
        )
        writer.attach(step=step, run=self._claimed, **sealed)
        self._events.send("save_started", step, url)
        self._last_step, self._last_began_s = step, self._clock()
        handle = async_save(
            state() if callable(state) else state,
            storage_writer=writer,
            planner=self._planner,
            process_group=self._process_group,
            coordinator_rank=self._coordinator,
            deadline_s=self._deadline_s,
            total_deadline_s=deadline_s,
            stager=self._stager,
            frozen=self._frozen,
        )
        self._events.send("staged", step, url, seconds=self._clock() - self._last_began_s)
        self._flight = flight = _Flight(step, handle)
        handle.upload_completion.add_done_callback(lambda _: self._note_end(flight, url))
        return handle

    def _note_end(self, flight: _Flight, url: str) -> None:
        """Tell what became of a save. In its thread."""
        error = flight.handle.exception()
        seconds = self._clock() - self._last_began_s
        if error is not None:
            self._events.send("failed", flight.step, url, seconds=seconds, error=error)
            return
        stored_bytes = flight.handle.result().stored_bytes
        self._events.send("sealed", flight.step, url, seconds=seconds, num_bytes=stored_bytes)
        if self._group.is_coordinator and self._keep:
            self._janitor.submit(self._retire)

    def _land(self) -> SaveResult | None:
        """Wait for the save under way, if there is one."""
        flight, self._flight = self._flight, None
        if flight is None:
            return None
        try:
            return flight.handle.result()
        except RankFailures:
            if flight.is_given_up:
                return None
            raise

    def _raise_failure(self) -> None:
        if self._flight is not None and self._flight.handle.done():
            self._land()

    def _retire(self) -> None:
        """Remove the steps that no policy keeps. On the coordinator, in a thread of its own."""
        protected = {}
        if self._resumed is not None:
            protected[self._resumed] = "this job resumed from it"
        ...

    def _claim(self) -> None:
        if self._claimed is None:
            self._claimed = steps.broadcast(
                self._group, "claim the run", lambda: self._run.claim(takeover=self._takeover)
            )
