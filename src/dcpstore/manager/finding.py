"""Which step of a run is restored, and where from: its URL, or the disks of the ranks.

The coordinator looks and decides, so that all ranks load the same step even if their listings
differ. A step that cannot be read is passed over only where that was asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, TypeVar

from dcpstore.config import ReadConfig
from dcpstore.errors import (
    CheckpointError,
    ConfigError,
    CorruptError,
    NotFoundError,
    RankFailures,
)
from dcpstore.format.seal import Seal
from dcpstore.manager.choice import Choice, choose, opens, read_attached
from dcpstore.manager.events import Event, Events
from dcpstore.manager.policies import Best, KeepPolicy
from dcpstore.manager.run import Run, SealedStep
from dcpstore.ranks import RankGroup, steps
from dcpstore.ranks.agreement import plain_cause_of_one
from dcpstore.read.reader import ObjectStoreReader
from dcpstore.store.folder import Folder

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

Which: TypeAlias = "int | Literal['latest', 'best']"
"""A step's number, the newest sealed step, or the best one."""

Passed: TypeAlias = "dict[int, CheckpointError]"
"""Steps that could not be read, with why. The coordinator's counts."""


class Finder:
    """Finds steps of a run. One per rank.

    Args:
        run: The run.
        group: The ranks that restore together.
        disk: The run's folder on this rank's disk; None if steps lie at the run's URL alone.
        keep: Policies; the first `Best` tells which step is the best.
        config: Of readers and of the reads of metadata.
        events: Told of steps that are passed over.
    """

    def __init__(
        self,
        run: Run,
        group: RankGroup,
        disk: Folder | None,
        keep: Sequence[KeepPolicy],
        config: ReadConfig | None,
        events: Events,
    ) -> None:
        self._run = run
        self._group = group
        self._disk = disk
        self._keep = keep
        self._config = config
        self._events = events
        self._chosen: Choice | None = None

    def best(self) -> SealedStep | None:
        """Return the best step by the first `Best`; None if no step has its metric. Any rank.

        Raises:
            ConfigError: If there is no such policy.
        """
        best = self._best_policy().ranked(self._run.facts())
        return None if not best else self._run.look(best[0].folder)

    def find(
        self, step: Which, passed: Passed | None = None, *, may_pass: bool = False
    ) -> SealedStep | None:
        """Look for a step at the run's URL. Any rank.

        Args:
            step: Which.
            passed: Steps that could not be read, with why; they are not looked at again.
            may_pass: Whether to pass over a damaged step, and add it there.

        Returns:
            The step; None if the run has none.

        Raises:
            NotFoundError: If there is no such step.
            CheckpointError: If every step was passed over, why the first of them was.
        """
        passed = {} if passed is None else passed
        if step == "best":
            return self._best_or_next(passed, may_pass=may_pass)
        for number, folder in self._run.candidates():
            if number in passed or (step != "latest" and number != step):
                continue
            try:
                sealed = self._run.look(folder)
            except CorruptError as error:
                if not may_pass:
                    raise
                passed[number] = error
                self._events.send(Event("failed", number, f"{self._run.url}/{folder}", error=error))
                continue
            if sealed is not None:
                self._warn_of_newer(sealed, step)
                return sealed
        if passed:
            raise next(iter(passed.values()))
        if step != "latest":
            raise NotFoundError(
                f"{self._run.url} has no sealed step {step}: `dcpstore ls {self._run.url}` lists"
                " its steps"
            )
        return None

    def _best_or_next(self, passed: Passed, *, may_pass: bool) -> SealedStep | None:
        """Look for the best step; one that cannot be read might be it. On the coordinator."""
        policy = self._best_policy()
        facts = self._run.facts()
        for number, folder in self._run.candidates():
            if self._run.known(folder) is None and number not in passed:
                try:
                    self._run.look(folder)
                except CorruptError as error:
                    if not may_pass:
                        raise
                    passed[number] = error
                    url = f"{self._run.url}/{folder}"
                    self._events.send(Event("failed", number, url, error=error))
        for one in policy.ranked(facts):
            found = None if one.step in passed else self._run.look(one.folder)
            if found is not None:
                return found
        if passed:
            raise next(iter(passed.values()))
        if facts:
            raise NotFoundError(
                f"{self._run.url}: no sealed step has the metric {policy.metric!r}, so none is the"
                " best; restore the latest one, or report() the metric"
            )
        return None

    def _best_policy(self) -> Best:
        policy = next((one for one in self._keep if isinstance(one, Best)), None)
        if policy is None:
            raise ConfigError(
                "the best step is that of a policy: give keep=[Best(1, 'val_loss', 'min')]"
            )
        return policy

    def _warn_of_newer(self, found: SealedStep, step: Which) -> None:
        if step == "latest":
            return
        newer = sorted({one for one, _ in self._run.candidates() if one > found.step})
        if newer:
            logger.warning(
                "%s: step %d is restored, and %d newer step(s) stay, up to %d: a restart takes the"
                " newest. Remove those that were given up",
                *(self._run.url, found.step, len(newer), newer[-1]),
            )

    def choose(
        self, step: Which, passed: Passed, *, may_pass: bool
    ) -> tuple[SealedStep | None, ObjectStoreReader | None]:
        """Agree on the step to restore, and make what reads it. All ranks; see `find`."""
        self._chosen = None
        if self._disk is None or step == "best":
            found = from_coordinator(
                self._group,
                "find the step to restore",
                lambda: self.find(step, passed, may_pass=may_pass),
            )
            return found, None if found is None else self._reader(found)
        run_id = from_coordinator(self._group, "look which run it is", self._run.run_id)
        number = None if step == "latest" else step

        def newest() -> tuple[int, str] | None:
            try:
                found = self.find(step, passed, may_pass=may_pass)
            except NotFoundError:
                return None
            return None if found is None else (found.step, found.folder)

        with plain_cause_of_one(self._group):
            choice = choose(
                self._group,
                self._disk,
                self._run.place,
                newest,
                step=number,
                accepts=lambda seal: _is_of(seal, run_id) and _step_of(seal) not in passed,
                config=self._config,
            )
        if choice is None:
            if number is not None:
                raise NotFoundError(
                    f"step {number} lies neither at {self._run.url} nor, whole, on the ranks' disks"
                )

            def refuse() -> None:
                if passed:  # where the coordinator looked
                    raise next(iter(passed.values()))

            from_coordinator(self._group, "find no step to restore", refuse)
            return None, None
        self._chosen = choice if choice.is_local else None
        folder = choice.folder.url.rpartition("/")[2]
        found = SealedStep(choice.step, folder, choice.folder.url, "dcpstore")
        return found, choice.reader(self._config)

    def _reader(self, found: SealedStep) -> ObjectStoreReader:
        folder = self._run.place.below(found.url.removeprefix(f"{self._run.url}/"))
        return ObjectStoreReader(found.url, config=self._config, store_opener=opens(folder))

    @property
    def is_on_disks(self) -> bool:
        """Whether the step that was chosen last is read from disks."""
        return self._chosen is not None

    def read_attached(self, name: str) -> bytes:
        """Return an attachment of the step that was chosen. All ranks, each with its name.

        Raises:
            NotFoundError: If the step has no such attachment.
        """
        assert self._chosen is not None
        found = read_attached(self._group, self._chosen, [name], config=self._config)
        if name not in found:
            raise NotFoundError(f"step {self._chosen.step} has no attachment {name!r}")
        return found[name]


def _is_of(seal: Seal, run: str | None) -> bool:
    """Tell whether a step on a disk is of a run; any is, where the run is not known."""
    return run is None or seal.facts is None or seal.facts.run in (None, run)


def _step_of(seal: Seal) -> int | None:
    return None if seal.facts is None else seal.facts.step


def is_damage(error: CheckpointError) -> bool:
    """Tell whether what failed is a checkpoint that is damaged, or gone."""
    return any(isinstance(one, CorruptError | NotFoundError) for one in causes(error))


def causes(error: CheckpointError) -> list[BaseException]:
    """Return what went wrong on each failing rank, or where there is but one."""
    return list(error.exceptions.values()) if isinstance(error, RankFailures) else [error]


def from_coordinator(group: RankGroup, step: str, work: Callable[[], _T]) -> _T:
    """Return on all ranks what the coordinator finds; where there is one rank, raise as it is."""
    with plain_cause_of_one(group):
        return steps.broadcast(group, step, work)
