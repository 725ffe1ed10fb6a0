"""What a manager does, told to callbacks and to the log as it happens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

logger = logging.getLogger(__name__)

Kind: TypeAlias = Literal[
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


@dataclass(frozen=True, slots=True)
class Event:
    kind: Kind
    step: int
    url: str
    seconds: float | None = None
    num_bytes: int | None = None
    error: BaseException | None = None


Listener: TypeAlias = Callable[[Event], None]


class Events:
    def __init__(self, listeners: Sequence[Listener], *, is_coordinator: bool) -> None:
        self._listeners = listeners
        self._is_coordinator = is_coordinator

    def send(self, event: Event) -> None:
        if self._is_coordinator:
            logger.info("%s", event)
        for one in self._listeners:
            one(event)
