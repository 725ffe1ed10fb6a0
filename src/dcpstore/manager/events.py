"""What happens to the checkpoints of a run: a line in the log each, and callbacks."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from dcpstore.text import printable, redact, size_text

logger = logging.getLogger(__name__)

EventKind: TypeAlias = Literal[
    "save_started",
    "staged",
    "sealed",
    "copied",
    "skipped",
    "deleted",
    "failed",
    "restored",
    "preempted",
]

_TEXTS: dict[str, str] = {
    "save_started": "a save began",
    "staged": "training may change the state",
    "sealed": "the checkpoint is safe",
    "copied": "the checkpoint is in the bucket, too",
    "skipped": "no save, as another one is under way",
    "deleted": "no policy keeps the checkpoint",
    "failed": "what was sealed before stays",
    "restored": "training goes on from here",
    "preempted": "the job was told to stop",
}
_LEVELS = {"failed": logging.ERROR, "preempted": logging.WARNING}
_MAX_ERROR_CHARS = 1000


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened. Its text is its line in the log.

    Args:
        kind: What.
        step: Of the checkpoint; None where there is none.
        url: Of the checkpoint or the run. Its secrets are in no text.
        seconds: How long it took, or since the save began; None where that says nothing.
        num_bytes: Stored, loaded or deleted; None if not known.
        error: Why it failed.
    """

    kind: EventKind
    step: int | None
    url: str
    seconds: float | None = None
    num_bytes: int | None = None
    error: BaseException | None = None

    def __str__(self) -> str:
        """Return one line: words for people, then ``key=value`` pairs in a fixed order.

        Pairs without a value are left out, and ``error`` is a JSON string.
        """
        text = _TEXTS[self.kind]
        if self.num_bytes is not None and self.seconds is not None:
            text += f" ({size_text(self.num_bytes)} in {self.seconds:.1f} s)"
        pairs: dict[str, Any] = {
            "event": self.kind,
            "step": self.step,
            "seconds": None if self.seconds is None else f"{self.seconds:.3f}",
            "bytes": self.num_bytes,
            "url": printable(redact(self.url)).replace(" ", "%20"),
            "error": None if self.error is None else _quoted(self.error),
        }
        ends = " ".join(f"{name}={value}" for name, value in pairs.items() if value is not None)
        return f"{text}: {ends}"


EventCallback: TypeAlias = Callable[[Event], object]
"""Called one event at a time, from any thread; must return soon."""


class Events:
    """Tell the log and callbacks what happens. Thread-safe.

    What happens to a checkpoint happens on all ranks alike, so that the coordinator alone tells
    of it. A callback that raises is logged, and neither training nor the other callbacks notice.

    Args:
        callbacks: Called in this order.
        is_coordinator: Whether this rank is the one that tells.
    """

    def __init__(self, callbacks: Sequence[EventCallback] = (), *, is_coordinator: bool) -> None:
        self._callbacks = tuple(callbacks)
        self._is_coordinator = is_coordinator
        self._lock = threading.RLock()

    def send(self, event: Event, *, is_own: bool = False) -> None:
        """Tell of an event.

        Args:
            event: What happened.
            is_own: Whether it happened on this rank alone, which then tells of it.
        """
        if not (self._is_coordinator or is_own):
            return
        with self._lock:
            logger.log(_LEVELS.get(event.kind, logging.INFO), "%s", event)
            for callback in self._callbacks:
                try:
                    callback(event)
                except Exception:
                    logger.exception("a callback failed on the event %r", event.kind)


class ScalarWriter(Protocol):
    """What ``torch.utils.tensorboard.SummaryWriter`` and others offer."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> object:
        """Write one number of a step."""
        ...


class TensorBoardEvents:
    """A callback that writes seconds and bytes of events as scalars of their step.

    ``dcpstore/sealed_seconds``, ``dcpstore/sealed_bytes`` and so on, and ``dcpstore/failed``, a 1
    for each failure. Events without a step are left out.

    Args:
        writer: Has ``add_scalar(tag, value, step)``, as a ``SummaryWriter``; stays the caller's.
        prefix: What tags begin with.
    """

    def __init__(self, writer: ScalarWriter, *, prefix: str = "dcpstore") -> None:
        self._writer = writer
        self._prefix = prefix

    def __call__(self, event: Event) -> None:
        """Write what the event has."""
        if event.step is None:
            return
        values = {
            f"{event.kind}_seconds": event.seconds,
            f"{event.kind}_bytes": event.num_bytes,
            "failed": 1 if event.kind == "failed" else None,
        }
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(f"{self._prefix}/{name}", value, event.step)


def _quoted(error: BaseException) -> str:
    text = printable(f"{type(error).__name__}: {error}", keep="\n")
    return json.dumps(text[:_MAX_ERROR_CHARS])
