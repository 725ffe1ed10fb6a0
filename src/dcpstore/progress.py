"""Progress of a save or a load: a callback per piece of work, or a bar on a terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Meter", "Progress", "ProgressCallback", "show_progress"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far this rank is.

    Attributes:
        action: ``"save"`` or ``"load"``.
        done_bytes: Bytes handed to the store, or delivered to their targets.
        total_bytes: What `done_bytes` will be in the end; an estimate while saving.
    """

    action: str
    done_bytes: int
    total_bytes: int


ProgressCallback: TypeAlias = Callable[[Progress], None]
"""Called on every rank, from any thread but one at a time; must be quick."""


class Meter:
    """Counts bytes and tells whoever listens. Thread-safe.

    Args:
        action: For `Progress`.
        listener: Told after each change; None for nobody.
    """

    def __init__(self, action: str, listener: ProgressCallback | None = None) -> None:
        self._action = action
        self._listener = listener
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._total_bytes = 0

    def expect(self, num_bytes: int) -> None:
        """Add to what there is to do."""
        self._change(0, num_bytes)

    def advance(self, num_bytes: int) -> None:
        """Add to what is done."""
        self._change(num_bytes, 0)

    def _change(self, done: int, expected: int) -> None:
        if self._listener is None:
            return
        with self._lock:
            self._done_bytes += done
            self._total_bytes += expected
            self._listener(Progress(self._action, self._done_bytes, self._total_bytes))


@contextmanager
def show_progress(
    action: str, progress: ProgressCallback | bool | None, *, is_coordinator: bool
) -> Iterator[Meter]:
    """Make the meter that a caller's ``progress`` argument asks for.

    Args:
        action: For `Progress`.
        progress: A callback; True for a bar on the coordinator; False for nothing; None for
            a bar on the coordinator if its standard error is a terminal.
        is_coordinator: Whether this rank is the one that shows a bar.
    """
    if callable(progress):
        yield Meter(action, progress)
        return
    wants_bar = sys.stderr.isatty() if progress is None else progress
    if not (wants_bar and is_coordinator):
        yield Meter(action)
        return
    from tqdm.auto import tqdm

    with tqdm(desc=action, unit="B", unit_scale=True, unit_divisor=1024, leave=False) as bar:

        def show(state: Progress) -> None:
            bar.total = max(state.total_bytes, state.done_bytes)
            bar.update(state.done_bytes - bar.n)

        yield Meter(action, show)
