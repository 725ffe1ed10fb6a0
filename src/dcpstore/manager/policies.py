"""When a run saves, and which of its checkpoints stay: pure functions of numbers and times.

A step is the number of completed steps. A list of policies means any of them:

1. at every step the manager makes a `Moment` and asks each `SavePolicy` whether a save is due
2. after a seal it makes one `StepFacts` per sealed step and calls `decide`, which asks each
   `KeepPolicy` what stays, and adds what no policy can give up: the newest step, protected
   ones, and those of others
3. it carries out the `Verdict` of each step

No request, clock or torch is in here, so that ``dcpstore retain`` and a manager decide alike.
"""

from __future__ import annotations

import math
import operator
import re
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

from dcpstore.errors import ConfigError

Layout: TypeAlias = Literal["dcpstore", "dcp", "safetensors"]

# "epoch=1-step=100-v1.ckpt" is Lightning's, "iter_0000100" Megatron's, "checkpoint-100" Hugging
# Face's, "step-100" torchtitan's and ours, "global_step100" DeepSpeed's. A number of more digits
# is no step. A suffix such as "-old" or ".tmp" names a copy of a step, which is none.
_STEP_FOLDER = re.compile(
    r"(?:(?:\w+=[^-=]+-)*step=|(?:(?:global_?)?step|checkpoint|ckpt|iter(?:ation)?)[-_]?)?"
    r"([0-9]{1,18})(?:-v[0-9]+)?(?:\.ckpt)?"
)


def step_of_folder(name: str) -> int | None:
    """Return the step that a folder is named for; None if it is named for none.

    ``step-100``, ``step_100``, ``checkpoint-100``, ``epoch=1-step=100.ckpt``, ``iter_0000100``,
    ``global_step100`` and ``100`` are. ``step-100-old`` and ``epoch-3`` are not.
    """
    match = _STEP_FOLDER.fullmatch(name)
    return int(match[1]) if match else None


# --- When to save ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moment:
    """A completed step, at which a save may be due.

    Attributes:
        step: Number of completed steps.
        last_step: Of the last save of this job; None before its first.
        seconds: Since that save began, or since the job started.
        is_preempted: Whether the job was told to stop.
        is_first: Whether it is the first step that this job completed.
    """

    step: int
    last_step: int | None = None
    seconds: float = 0.0
    is_preempted: bool = False
    is_first: bool = False


class SavePolicy(Protocol):
    """Tells when to save.

    A policy that looks at ``step`` and ``is_first`` alone may say so by a class attribute
    ``depends_on_step_alone = True``: every rank then decides for itself. Otherwise the
    coordinator asks it, and the ranks agree on the step.
    """

    def is_due(self, at: Moment) -> bool:
        """Tell whether to save now. Quick, free of side effects, and called at every step."""


# --- What to keep ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepFacts:
    """A sealed checkpoint of a run, as policies see it.

    Attributes:
        step: Number of completed steps. Two folders may be of the same step.
        folder: Its name below the run.
        saved_at: When it was sealed, in UTC; None where the store does not tell.
        metrics: Numbers by name, sealed with it or reported later.
        run: Id of the run that saved it; None if it was saved for none.
        layout: Who wrote it.
    """

    step: int
    folder: str
    saved_at: datetime | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    run: str | None = None
    layout: Layout = "dcpstore"


class KeepPolicy(Protocol):
    """Tells which steps stay."""

    def keep(self, steps: Sequence[StepFacts]) -> Mapping[int, str]:
        """Return the steps that stay, each with the reason, such as ``"among the latest 3"``.

        Args:
            steps: Sealed ones of the run, in any order.
        """


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a step stays, and why.

    Attributes:
        step: Number of completed steps.
        folder: Its name below the run.
        stays: Whether it stays.
        why: All reasons to keep it, or why it goes.
    """

    step: int
    folder: str
    stays: bool
    why: str


# --- Policies ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EverySteps:
    """Save at every n-th step; keep every n-th step.

    As a policy of keeping it means exact multiples. Where saves come at other steps
    (`EverySeconds`, `OnPreemption`), keep by `EverySeconds`.

    Args:
        n: Steps from one to the next.
        offset: The first one, if it is not ``n``: 100, 600, 1100, ... by ``EverySteps(500, 100)``.

    Raises:
        ConfigError: If a number is no such number.
    """

    n: int
    offset: int = 0
    depends_on_step_alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_count("EverySteps", "n", self.n)
        _check_count("EverySteps", "offset", self.offset, least=0)

    def is_due(self, at: Moment) -> bool:
        """Tell whether the step is one of them; step 0 never is."""
        return at.step > 0 and self._has(at.step)

    def keep(self, steps: Sequence[StepFacts]) -> Mapping[int, str]:
        """Keep those of them that were saved."""
        return {one.step: f"every {self.n} steps" for one in steps if self._has(one.step)}

    def _has(self, step: int) -> bool:
        return step >= self.offset and (step - self.offset) % self.n == 0


@dataclass(frozen=True, slots=True)
class EverySeconds:
    """Save when the last save began s seconds ago; keep one step for every s seconds.

    Of the oldest step on, a step is kept if it was saved s seconds or more after the one kept
    before it, so what is kept once is kept later, too. A clock that was set back meanwhile
    keeps more, not fewer. A step of unknown time is kept.

    Raises:
        ConfigError: If s is no positive number.
    """

    s: float
    depends_on_step_alone: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_seconds("EverySeconds", "s", self.s)

    def is_due(self, at: Moment) -> bool:
        """Tell whether that long has passed."""
        return at.seconds >= self.s

    def keep(self, steps: Sequence[StepFacts]) -> Mapping[int, str]:
        """Keep one for every s seconds."""
        kept = {}
        last: datetime | None = None
        for one in sorted(steps, key=lambda one: (one.step, one.folder)):
            if one.saved_at is None:
                kept[one.step] = "nobody knows when it was saved"
            elif last is None or abs((one.saved_at - last).total_seconds()) >= self.s:
                kept[one.step] = f"one for every {self.s:g} s"
                last = one.saved_at
        return kept


@dataclass(frozen=True, slots=True)
class OnPreemption:
    """Save once the job is told to stop, by a signal to any rank or by a notice.

    Args:
        deadline_s: Most seconds from then to the seal. A save that would take longer is given
            up cleanly, and the last sealed step stays the newest.
        signals: Names of the signals that tell it. Handlers that were there before are called,
            too.
        notice: Called every few seconds in a thread; returns True once the cloud has announced
            the end of this machine. None where only signals tell.
        then: What follows the save: ``"exit"`` ends the training loop, ``"continue"`` does not.

    Raises:
        ConfigError: If one of them cannot be.
    """

    deadline_s: float = 25.0
    signals: Sequence[str] = ("SIGTERM",)
    notice: Callable[[], bool] | None = None
    then: Literal["exit", "continue"] = "exit"
    depends_on_step_alone: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_seconds("OnPreemption", "deadline_s", self.deadline_s)
        if isinstance(self.signals, str):
            raise ConfigError(
                f"OnPreemption(signals={self.signals!r}) is one text;"
                f" give a tuple of names: signals=({self.signals!r},)"
            )
        for name in self.signals:
            if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
                raise ConfigError(
                    f"OnPreemption(signals=...): {name!r} is no signal that a process can hear"
                    " here; give names such as 'SIGTERM' or 'SIGUSR1'"
                )
        if self.notice is not None and not callable(self.notice):
            raise ConfigError("OnPreemption(notice=...) must be a function that returns a bool")
        if not self.signals and self.notice is None:
            raise ConfigError("OnPreemption without signals needs a notice; nothing would tell it")
        if self.then not in ("exit", "continue"):
            raise ConfigError(f"OnPreemption(then={self.then!r}) must be 'exit' or 'continue'")

    def is_due(self, at: Moment) -> bool:
        """Tell whether the job was told to stop."""
        return at.is_preempted


@dataclass(frozen=True, slots=True)
class First:
    """Save after the first step of a job: what cannot be saved shows at once."""

    depends_on_step_alone: ClassVar[bool] = True

    def is_due(self, at: Moment) -> bool:
        """Tell whether it is the first step."""
        return at.is_first


@dataclass(frozen=True, slots=True, init=False)
class AtSteps:
    """Save at these steps; keep them.

    Raises:
        ConfigError: If there are none, or one is no number of steps.
    """

    steps: tuple[int, ...]
    depends_on_step_alone: ClassVar[bool] = True

    def __init__(self, *steps: int) -> None:
        if not steps:
            raise ConfigError("AtSteps() has no steps; name them: AtSteps(100, 200)")
        for step in steps:
            _check_count("AtSteps", "step", step, least=0)
        object.__setattr__(self, "steps", tuple(sorted(set(steps))))

    def is_due(self, at: Moment) -> bool:
        """Tell whether the step is one of them."""
        return at.step in self.steps

    def keep(self, steps: Sequence[StepFacts]) -> Mapping[int, str]:
        """Keep those of them that were saved."""
        return {one.step: "named by its number" for one in steps if one.step in self.steps}


@dataclass(frozen=True, slots=True)
class Latest:
    """Keep the n steps with the highest numbers.

    Raises:
        ConfigError: If n is not 1 or more.
    """

    n: int

    def __post_init__(self) -> None:
        _check_count("Latest", "n", self.n)

    def keep(self, steps: Sequence[StepFacts]) -> Mapping[int, str]:
        """Keep the latest."""
        latest = sorted({one.step for one in steps}, reverse=True)[: self.n]
        return dict.fromkeys(latest, f"among the latest {self.n}")


@dataclass(frozen=True, slots=True)
class Best:
    """Keep the n steps that are best by a metric.

    A step without that metric, or with NaN, is not counted. Of equal ones the later is better.

    Args:
        n: How many.
        metric: Its name.
        mode: Whether the lowest (``"min"``, as of a loss) or the highest (``"max"``) is best.

    Raises:
        ConfigError: If one of them cannot be.
    """

    n: int
    metric: str
    mode: Literal["min", "max"]

    def __post_init__(self) -> None:
        _check_count("Best", "n", self.n)
        if not isinstance(self.metric, str) or not self.metric:
            raise ConfigError(f"Best(metric={self.metric!r}) must be the name of a metric")
        if self.mode not in ("min", "max"):
            raise ConfigError(
                f"Best(mode={self.mode!r}) must be 'min' if the lowest {self.metric} is best,"
                " or 'max' if the highest is"
            )

    def ranked(self, steps: Iterable[StepFacts]) -> list[StepFacts]:
        """Return all steps that have the metric, the best first."""
        sign = 1 if self.mode == "min" else -1
        known = (one for one in steps if not math.isnan(one.metrics.get(self.metric, math.nan)))
        return sorted(known, key=lambda one: (sign * one.metrics[self.metric], -one.step))

    def keep(self, steps: Sequence[StepFacts]) -> Mapping[int, str]:
        """Keep the best."""
        values: dict[int, float] = {}
        for one in self.ranked(steps):
            values.setdefault(one.step, one.metrics[self.metric])
        why = f"among the best {self.n} by {self.metric}"
        return {step: f"{why}: {value:g}" for step, value in islice(values.items(), self.n)}


# --- The decision ------------------------------------------------------------------------


def decide(
    steps: Iterable[StepFacts],
    keep: KeepPolicy | Sequence[KeepPolicy],
    *,
    protected: Mapping[int, str] | None = None,
    run: str | None = None,
    others: bool = False,
) -> list[Verdict]:
    """Decide which sealed steps of a folder stay.

    Whatever the policies say, these stay:

    - all, if there is no policy
    - the newest step: of all, of those with a seal, and of this run; and what this run saved
      last, which is another one if a run went back and goes on below its old steps
    - protected steps
    - steps of another run, of none, or not written by dcpstore, unless ``others``; policies do
      not count them either

    Args:
        steps: All that is sealed there, in any order; safetensors count as sealed.
        keep: Policies; a step stays if any of them keeps it.
        protected: Steps that must stay, each with the reason: pinned, resumed from, in flight.
        run: Id of this run; None for steps that were saved for no run.
        others: Whether policies decide about the steps of others, too.

    Returns:
        One verdict per folder, the newest step first.
    """
    found = sorted(steps, key=lambda one: (-one.step, one.folder))
    policies = list(keep) if isinstance(keep, Sequence) else [keep]
    foreign = {one.folder: why for one in found if (why := _why_foreign(one, run))}
    counted = [one for one in found if others or one.folder not in foreign]
    own = [one for one in found if one.folder not in foreign]
    reasons = [_newest(found, own), protected or {}, *(one.keep(counted) for one in policies)]
    if not policies:
        reasons.append(dict.fromkeys((one.step for one in found), "there is no policy"))
    verdicts = []
    for one in found:
        whys = [text for reason in reasons if (text := reason.get(one.step))]
        if one.folder in foreign and not others:
            whys.append(foreign[one.folder])
        verdicts.append(
            Verdict(one.step, one.folder, bool(whys), ", ".join(whys) or "no policy keeps it")
        )
    return verdicts


def _newest(found: Sequence[StepFacts], own: Sequence[StepFacts]) -> Mapping[int, str]:
    """Return the steps that somebody may resume from next, of steps with the newest first."""
    # Safetensors have no seal: the newest may be half of one.
    sealed = [one for one in found if one.layout != "safetensors"]
    timed = [(one.saved_at, one.step) for one in own if one.saved_at is not None]
    last = {max(timed)[1]: "saved last"} if timed else {}
    return last | {group[0].step: "newest" for group in (found, sealed, own) if group}


def _why_foreign(one: StepFacts, run: str | None) -> str:
    if one.layout != "dcpstore":
        return "not written by dcpstore"
    if one.run == run:
        return ""
    return "saved for no run" if one.run is None else f"of another run, {one.run}"


def _check_count(policy: str, name: str, value: Any, least: int = 1) -> None:
    try:
        is_right = not isinstance(value, bool) and operator.index(value) >= least
    except TypeError:
        is_right = False
    if not is_right:
        raise ConfigError(f"{policy}: {name}={value!r} must be a whole number of at least {least}")


def _check_seconds(policy: str, name: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 < value < math.inf):
        raise ConfigError(f"{policy}: {name}={value!r} must be a number of seconds above 0")
