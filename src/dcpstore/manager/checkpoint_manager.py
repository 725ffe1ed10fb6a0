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
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult
from typing_extensions import Self

from dcpstore.config import ReadConfig, WriteConfig
from dcpstore.errors import (
    AbandonedError,
    CheckpointError,
    ConfigError,
    NotFoundError,
)
from dcpstore.loading import load
from dcpstore.manager.agreement import Decision, open_agreement
from dcpstore.manager.background import AsyncSave, begin
from dcpstore.manager.events import Event, EventCallback, Events
from dcpstore.manager.finding import Finder, Which, causes, from_coordinator, is_damage
from dcpstore.manager.local_tier import LocalTier, TierHooks
from dcpstore.manager.policies import KeepPolicy, Moment, OnPreemption, SavePolicy
from dcpstore.manager.preemption import Preemption
from dcpstore.manager.retention import plan, retire
from dcpstore.manager.run import Run, SealedStep
from dcpstore.manager.staging import Frozen, Stager
from dcpstore.plan import LoadPlanner, SavePlanner
from dcpstore.plan.rules import Strictness
from dcpstore.ranks import RankGroup, open_group
from dcpstore.ranks.agreement import join_ranks
from dcpstore.read.attachments import read_attachment
from dcpstore.report import SaveResult
from dcpstore.saving import save
from dcpstore.store import open_store
from dcpstore.store.base import Store
from dcpstore.store.folder import Folder
from dcpstore.write.cutoff import Cutoff
from dcpstore.write.writer import ObjectStoreWriter

logger = logging.getLogger(__name__)

_FAILED = "to raise the failure of the save of step "
_T = TypeVar("_T")

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

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Renew the claim, then seal."""
        try:
            self._renew()
        except BaseException:
            self.discard(results)
            raise
        super().finish(metadata, results)


@dataclass(slots=True)
class _Flight:
    """A save under way.

    Attributes:
        step: Its step.
        url: Where it goes to.
        began_s: When it began, by the manager's clock.
        handle: What it is waited for by; None for a moment.
        is_given_up: Whether this job cancelled it, so that its failure is no news.
    """

    step: int
    url: str
    began_s: float
    handle: AsyncSave | None = None
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
            it is skipped, or it replaces it. To skip, the ranks agree, which takes a few
            milliseconds at a step that is due.
        frozen: Keys, or what tells them, of tensors that training never changes. They are not
            copied before they are saved. See `dcpstore.async_save`.
        local: Folder of the run on a disk of each node, such as ``/nvme/run``: steps are saved
            there first, and copied to ``url`` in the background. ``{rank}`` in it is replaced
            by the rank's number. A restart takes the newest step that the disks of all ranks hold
            together, or that lies at ``url``. None to save to ``url`` at once.
        copy_every: Which of the steps that are saved to ``local`` are copied: every so many-th.
        keep_local: How many steps stay on the disks.
        copy_bytes_per_s: How fast each rank copies at most; None for no limit.
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
        frozen: Frozen = (),
        local: str | os.PathLike[str] | None = None,
        copy_every: int = 1,
        keep_local: int = 2,
        copy_bytes_per_s: float | None = None,
        takeover: bool = True,
        on_event: EventCallback | Sequence[EventCallback] = (),
        coordinator_rank: int = 0,
        deadline_s: float = 1800.0,
        store_opener: Callable[..., Store] = open_store,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if when_busy not in ("wait", "skip", "replace"):
            raise ConfigError(f"when_busy={when_busy!r} must be 'wait', 'skip' or 'replace'")
        if copy_every < 1 or keep_local < 1:
            raise ConfigError(f"{copy_every=} and {keep_local=} must be at least 1")
        self._policies: list[SavePolicy] = _as_list(save)
        self._keep: list[KeepPolicy] = _as_list(keep)
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
        self._last_seconds = 0.0
        self._resumed: int | None = None
        self._run_id: str | None = None
        self._is_first = True
        self._why_end: str | None = None
        self._has_begun = False
        self._is_alone = False  # some rank is silent, so none waits for it to raise a failure
        self._is_asked = False
        self._is_over = False
        self.is_stopping = False
        """Whether the job was told to stop: its last step is sealed, or was given up."""
        self.restored: SealedStep | None = None
        """The step that `restore` found last; None before it, and where there was none."""
        self._janitor = ThreadPoolExecutor(1, "dcpstore-retire")
        self._group = open_group(
            process_group, coordinator_rank, deadline_s, purpose="manager", subject=self._run.url
        )
        self._events = Events(_as_list(on_event), is_coordinator=self._group.is_coordinator)
        self._agreement = open_agreement(
            process_group, coordinator_rank, on_given_up=self._note_given_up
        )
        self._preemption: Preemption | None = None
        end = next((one for one in self._policies if isinstance(one, OnPreemption)), None)
        self._end = end
        self._tier: LocalTier | None = None
        try:
            if end is not None:
                self._preemption = Preemption(self._hear_of_end, end.signals, end.notice)
            if local is not None:
                self._tier = self._open_tier(
                    os.fspath(local).replace("{rank}", str(self._group.rank)),
                    copy_every=copy_every,
                    num_kept=keep_local,
                    max_bytes_per_s=copy_bytes_per_s,
                )
            disk = None if self._tier is None else self._tier.disk
            self._finder = Finder(self._run, self._group, disk, self._keep, read, self._events)
            if self._policies:
                self._claim()
        except BaseException:
            self.close()
            raise

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

        Without a save it costs a few microseconds and no message. With one, it returns once the
        state is staged: training may go on and change it.

        Args:
            step: Number of completed steps.
            state: What to save, or a function that makes it, called if a save is due.
            metrics: Sealed with the step, such as ``{"val_loss": 0.31}``; the coordinator's count.
            attachments: Named bytes or files of this rank that are sealed with the step.
            user_metadata: Facts in JSON that are sealed with the step; the coordinator's count.

        Returns:
            Whether a save of this step was begun or made.

        Raises:
            RankFailures: If this save, or one in the background before it, failed. Several ranks
                raise it at the same step, which they agree on: about a second later.
            Preempted: If the job was told to stop, once this step is sealed or given up.
        """
        sealed = {"metrics": metrics, "attachments": attachments, "user_metadata": user_metadata}
        decided = self._agreement.at(step)
        if decided is None:
            self._raise_failure()
        else:
            self._is_asked = False
            if decided.is_end:
                return self._save_and_end(step, state, sealed, decided)
            self._raise_agreed_failure(decided)
        at = Moment(
            step,
            self._last_step,
            self._clock() - self._last_began_s,
            is_first=self._is_first,
        )
        self._is_first = False
        is_due = (decided is not None and _asks_for_save(decided)) or any(
            one.is_due(at) for one in self._policies if _is_plain(one)
        )
        begun = is_due and step != self._last_step and self._begin(step, state, sealed)
        if begun and not self._background:
            self._land()
        elif not begun:
            self._ask_if_due(at)
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
            AbandonedError: If a save that was under way, and goes on, left it no time.
        """
        cutoff = Cutoff(deadline_s)
        may_wait = deadline_s is not None and self._has_begun
        if may_wait and not self._ask("wait for a save", lambda: self._ends_before(cutoff)):
            raise AbandonedError(cutoff.lateness)
        self._land()
        sealed = {"metrics": metrics, "attachments": attachments, "user_metadata": user_metadata}
        self._launch(step, state, sealed, cutoff)
        result = self._land()
        assert result is not None
        return result

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way, as this rank knows."""
        flight = self._flight
        return flight is not None and flight.handle is not None and not flight.handle.done()

    def wait(self) -> None:
        """Return once no save, no copy and no removal is under way. All ranks.

        Raises:
            RankFailures: If the save failed.
        """
        self._land()
        if self._tier is not None:
            self._tier.wait()
        self._janitor.submit(lambda: None).result()

    # --- finding and loading -------------------------------------------------------------

    def restore(
        self,
        state: MutableMapping[str, Any],
        step: Which = "latest",
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
            NotFoundError: If ``step`` is a number that the run has no sealed checkpoint of, or the
                best one where no sealed step has the metric.
            CorruptError: If the checkpoint is damaged.
            RankFailures: The same, where there are several ranks.
        """
        self._land()
        passed: dict[int, CheckpointError] = {}
        may_pass = on_damaged == "older"
        while True:
            found, reader = self._finder.choose(step, passed, may_pass=may_pass)
            if found is None:
                return None
            began_s = self._clock()
            try:
                result = load(
                    state,
                    storage_reader=reader,
                    planner=planner or LoadPlanner(strict=strict),
                    process_group=self._process_group,
                    coordinator_rank=self._coordinator,
                    deadline_s=self._deadline_s,
                )
            except CheckpointError as error:
                if not may_pass or not is_damage(error):
                    raise
                self._events.send(Event("failed", found.step, found.url, error=error))
                passed[found.step] = error
                continue
            break
        self._last_step = self._resumed = found.step
        self._last_began_s = self._clock()
        self.restored = found
        if self._run_id is not None:  # so that nobody else removes it either
            self._ask("renew the claim", lambda: self._run.renew(found.step, found.step))
        seconds, num_bytes = self._clock() - began_s, result.job.needed_bytes
        self._events.send(Event("restored", found.step, found.url, seconds, num_bytes))
        return found.step

    def latest(self) -> SealedStep | None:
        """Return the newest sealed step; None if there is none. Any rank."""
        return self._run.newest()

    def best(self) -> SealedStep | None:
        """Return the best step by the first `Best` of ``keep``; None if none has its metric.

        Raises:
            ConfigError: If there is no such policy.
        """
        return self._finder.best()

    def steps(self) -> list[SealedStep]:
        """Return all sealed steps, the newest first. Any rank; one small request per step."""
        return self._run.all()

    def read_attachment(self, name: str, step: int | None = None) -> bytes:
        """Return an attachment of the restored step, or of another. Any rank.

        Of a step that was restored from ``local`` all ranks call it, each with a name of its
        choice: another node's disk may hold it.

        Args:
            name: As it was given; ``{rank}`` in it stands for this rank.
            step: Of a sealed step; None for the one that was restored.

        Raises:
            NotFoundError: If there is no such step, or it has no such attachment.
        """
        found = self.restored if step is None else self._finder.find(step)
        if found is None:
            raise NotFoundError(f"{self._run.url}: no step was restored: give the number of one")
        name = name.replace("{rank}", str(self._group.rank))
        if step is None and self._finder.is_on_disks:
            return self._finder.read_attached(name)
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
        """Wait for the save, copies and removals under way, and give the run back. All ranks.

        Raises:
            RankFailures: If the save or a copy failed.
        """
        if self._is_over:
            return
        self._is_over = True
        try:
            self._land()
            if self._tier is not None:
                self._tier.wait()
        finally:
            if self._tier is not None:
                self._tier.close()
            self._janitor.shutdown(wait=True)
            if self._preemption is not None:
                self._preemption.close()
            self._agreement.close()
            if self._group.is_coordinator and self._run_id is not None:
                self._run.release()
            self._group.close()
            self._run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            logger.warning("%s: %r", self._run.url, failure)

    # --- how -----------------------------------------------------------------------------

    def _begin(self, step: int, state: State, sealed: Mapping[str, Any]) -> bool:
        """Begin a save that is due, unless another is under way and this one is to be skipped."""
        flight = self._flight
        # Whether a save is over is not known on all ranks at one step; that one was begun is.
        if self._when_busy == "skip" and self._has_begun:
            if self._ask("is a save under way", lambda: self.is_saving):
                self._events.send(Event("skipped", step, self._run.url_of(step)))
                return False
        elif self._when_busy == "replace" and flight is not None and flight.handle is not None:
            flight.is_given_up = flight.handle.cancel()
        self._land(may_be_given_up=self._when_busy == "replace")
        self._launch(step, state, sealed, Cutoff())
        return True

    def _launch(
        self,
        step: int,
        state: State,
        sealed: Mapping[str, Any],
        cutoff: Cutoff,
        *,
        is_last: bool = False,
    ) -> None:
        self._claim()
        self._has_begun = True
        writer = self._writer(step)
        url = writer.checkpoint_id
        flight = _Flight(step, url, self._clock())
        self._last_step, self._last_began_s = step, flight.began_s
        self._events.send(Event("save_started", step, url))

        def work(group: RankGroup, staged: dict[str, Any], cutoff: Cutoff) -> SaveResult:
            try:
                result = save(
                    staged,
                    storage_writer=writer,
                    planner=self._planner,
                    process_group=group,
                    cutoff=cutoff,
                    progress=False,
                )
                if self._tier is not None:
                    self._tier.note_saved(group, step, copies=is_last)
            except BaseException as error:
                self._note_failure(flight, error)
                raise
            self._note_seal(flight, result)
            return result

        joining = join_ranks(
            self._process_group,
            self._coordinator,
            self._deadline_s,
            action="save",
            url=self._run.url_of(step),  # disks may have other names on other ranks
        )
        try:
            try:
                writer.attach(step=step, run=self._run_id, **sealed)
                made = state() if callable(state) else state
            except BaseException:
                with joining:  # so that the other ranks hear of it, rather than wait for this one
                    raise
            flight.handle = begin(made, work, url, joining, cutoff, self._stager, self._frozen)
        except BaseException as error:
            self._note_failure(flight, error)
            raise
        self._flight = flight
        self._events.send(Event("staged", step, url, self._clock() - flight.began_s))

    def _note_seal(self, flight: _Flight, result: SaveResult) -> None:
        """Tell that a step is sealed, and see to the old ones. In the save's thread."""
        self._last_seconds = self._clock() - flight.began_s
        if self._resumed is not None and flight.step > self._resumed:
            self._resumed = None
        self._run.forget(flight.step)
        self._events.send(
            Event("sealed", flight.step, flight.url, self._last_seconds, result.stored_bytes)
        )
        if self._tier is None:
            self._retire_soon()

    def _retire_soon(self) -> None:
        if self._keep and self._group.is_coordinator:
            self._janitor.submit(self._retire)

    def _note_failure(self, flight: _Flight, error: BaseException) -> None:
        seconds = self._clock() - flight.began_s
        if not flight.is_given_up:
            self._events.send(Event("failed", flight.step, flight.url, seconds, error=error))
            # Ranks hear of it at different steps, and all are to raise it at the same.
            if not self._agreement.request(f"{_FAILED}{flight.step}"):
                self._is_alone = True

    def _land(self, *, may_be_given_up: bool = False) -> SaveResult | None:
        """Wait for the save under way, if there is one, and raise its failure."""
        flight = self._flight
        if flight is None or flight.handle is None:
            return None
        try:
            return flight.handle.result()
        except CheckpointError as error:
            if may_be_given_up and _is_abandoned(error):
                return None
            raise
        finally:
            if flight.handle.done():  # else the wait was interrupted, and `close` goes on with it
                self._flight = None

    def _ends_before(self, cutoff: Cutoff) -> bool:
        flight = self._flight
        if flight is None or flight.handle is None:
            return True
        return bool(wait([flight.handle.upload_completion], cutoff.left_s()).done)

    def _raise_failure(self) -> None:
        """Raise a failure of the background, if no other rank is to raise it at this step."""
        handle = None if self._flight is None else self._flight.handle
        is_over = handle is not None and handle.done()
        if is_over and (self._group.size == 1 or self._is_alone):
            self._land()
        if self._tier is not None:
            self._tier.raise_failure()

    def _raise_agreed_failure(self, decided: Decision) -> None:
        flight = self._flight
        if flight is not None and f"{_FAILED}{flight.step}" in _asked(decided):
            self._land()

    def _ask_if_due(self, at: Moment) -> None:
        """Let the ranks agree on a step, if a policy says so that only the coordinator asks."""
        if self._is_asked or not self._group.is_coordinator:
            return
        for policy in self._policies:
            if not _is_plain(policy) and policy.is_due(at):
                self._is_asked = self._agreement.request(f"{policy} is due")
                return

    def _hear_of_end(self, why: str) -> None:
        """Ask that all ranks stop. In a thread of the preemption's, or the agreement's."""
        self._why_end = why
        self._agreement.request(why, is_end=True)

    def _note_given_up(self, why: str, is_end: bool) -> None:
        """Ask again later. In the agreement's thread."""
        self._is_asked = False
        if is_end and self._why_end is not None:
            self._hear_of_end(self._why_end)
        self._is_alone = self._is_alone or _FAILED in why

    def _save_and_end(
        self, step: int, state: State, sealed: Mapping[str, Any], decided: Decision
    ) -> bool:
        """Save before the job is stopped, or let the save under way end if only that is in time."""
        assert self._end is not None
        self._events.send(Event("preempted", step, self._run.url_of(step)))
        deadline_s = self._end.deadline_s

        def choose() -> tuple[bool, float]:
            left_s = deadline_s - max(0.0, time.monotonic() - decided.since_s)
            # A save takes about as long as the last one.
            waits = self.is_saving and left_s < self._last_seconds
            return waits, max(left_s, 1.0)

        waits, left_s = self._ask("save before the end", choose)
        cutoff = Cutoff(left_s)  # from now on: the end of the save under way takes time, too
        flight = self._flight
        if not waits and flight is not None and flight.handle is not None:
            flight.is_given_up = flight.handle.cancel()
        is_saved = False
        try:
            self._land(may_be_given_up=True)
        except CheckpointError as error:  # its event told of it
            logger.warning("%s: the save under way failed: %s", self._run.url, error)
        try:
            if not waits and step != self._last_step:
                self._launch(step, state, sealed, cutoff, is_last=True)
                self._land()
                is_saved = True
        except CheckpointError as error:
            logger.warning("%s: step %d is not saved: %s", self._run.url, step, error)
        self.is_stopping = True
        if self._end.then == "exit":
            raise Preempted
        return is_saved

    def _writer(self, step: int) -> ObjectStoreWriter:
        if self._tier is not None:
            folder, config = self._tier.folder(step), self._write
            return ObjectStoreWriter(
                folder.url, overwrite=True, config=config, store_opener=self._opener
            )
        return _RunWriter(
            self._run.url_of(step),
            lambda: self._run.renew(step, self._resumed),
            storage_options=self._options,
            config=self._write,
            store_opener=self._opener,
        )

    def _open_tier(self, path: str, **settings: Any) -> LocalTier:
        group = open_group(
            self._process_group,
            self._coordinator,
            self._deadline_s,
            purpose="copies",
            subject=self._run.url,
        )
        disk = Folder(path, None, self._write or WriteConfig(), self._opener)

        def copied(step: int, url: str, seconds: float, num_bytes: int) -> None:
            self._run.forget(step)
            self._events.send(Event("copied", step, url, seconds, num_bytes))
            self._retire_soon()

        def failed(step: int, url: str, seconds: float, error: BaseException) -> None:
            self._events.send(Event("failed", step, url, seconds, error=error))

        hooks = TierHooks(
            before_seal=lambda step: self._run.renew(step, self._resumed),
            copied=copied,
            failed=failed,
        )
        return LocalTier(disk, self._run.place, group, self._write, hooks=hooks, **settings)

    def _retire(self) -> None:
        """Remove the steps that no policy keeps. On the coordinator, in a thread of its own."""
        protected = {}
        if self._resumed is not None:
            protected[self._resumed] = "this job resumed from it, and sealed no newer step"
        flight = self._flight
        if flight is not None:
            protected[flight.step] = "it is being saved"
        try:
            verdicts = plan(self._run, self._keep, protected=protected)
            for gone in retire(self._run, verdicts):
                if not gone.why_not:
                    self._events.send(
                        Event("deleted", gone.step, gone.url, num_bytes=gone.num_bytes)
                    )
        except CheckpointError as error:
            logger.warning("%s: old steps stay for now: %s", self._run.url, error)
        except Exception:  # a policy may be the user's own, and nobody waits for this thread
            logger.exception("%s: old steps stay, as they could not be judged", self._run.url)

    def _claim(self) -> None:
        if self._run_id is None:
            self._run_id = self._ask(
                "claim the run", lambda: self._run.claim(takeover=self._takeover)
            )

    def _ask(self, step: str, work: Callable[[], _T]) -> _T:
        return from_coordinator(self._group, step, work)


def _asked(decided: Decision) -> list[str]:
    """Return what ranks asked for, without their numbers."""
    return [one.partition(": ")[2] for one in decided.why.split("; ")]


def _asks_for_save(decided: Decision) -> bool:
    return not all(one.startswith(_FAILED) for one in _asked(decided))


def _as_list(given: _T | Sequence[_T]) -> list[_T]:
    return list(given) if isinstance(given, list | tuple) else [cast("_T", given)]


def _is_plain(policy: SavePolicy) -> bool:
    """Tell whether every rank can ask a policy, as it depends on the step alone."""
    return bool(getattr(policy, "depends_on_step_alone", False))


def _is_abandoned(error: CheckpointError) -> bool:
    return any(isinstance(one, AbandonedError) for one in causes(error))
