"""How far a save or a load is, and what it did.

Progress goes to a callback, or to a bar on a terminal; results print as short tables.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, TextIO, TypeAlias

from dcpstore.text import names_text, size_text, table, times

if TYPE_CHECKING:  # the command line shows progress without torch
    import torch


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
    """Counts bytes and calls a listener. Thread-safe.

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
    with progress_bar(action) as show:
        yield Meter(action, show)


@contextmanager
def progress_bar(action: str, stream: TextIO | None = None) -> Iterator[ProgressCallback]:
    """Show a bar on a stream, or on standard error; yields what moves it."""
    from tqdm.auto import tqdm

    with tqdm(
        desc=action, unit="B", unit_scale=True, unit_divisor=1024, leave=False, file=stream
    ) as bar:

        def show(state: Progress) -> None:
            bar.total = max(state.total_bytes, state.done_bytes)
            bar.update(state.done_bytes - bar.n)

        yield show


class Phases:
    """Seconds per phase, in the order in which they began."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase; one that comes twice adds up."""
        start = monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + monotonic() - start


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes and requests of one rank, or of all ranks together.

    Attributes:
        num_requests: Requests for data objects, retries not counted.
        needed_bytes: Bytes of the elements wanted.
        fetched_bytes: Bytes asked of the store.
        received_bytes: Bytes that other ranks fetched and sent.
        peak_bytes: Most such bytes held at a time (the largest of all ranks).
    """

    num_requests: int = 0
    needed_bytes: int = 0
    fetched_bytes: int = 0
    received_bytes: int = 0
    peak_bytes: int = 0

    @staticmethod
    def total(parts: Sequence[Transfer]) -> Transfer:
        """Add up the transfers of all ranks."""
        return Transfer(
            sum(part.num_requests for part in parts),
            sum(part.needed_bytes for part in parts),
            sum(part.fetched_bytes for part in parts),
            sum(part.received_bytes for part in parts),
            max((part.peak_bytes for part in parts), default=0),
        )


@dataclass(frozen=True, slots=True)
class SaveResult:
    """What a save did. The same on all ranks.

    Attributes:
        url: Of the checkpoint.
        save_id: Of this save; None where another writer was given.
        num_keys: Keys of the checkpoint.
        num_items: Stored chunks and values.
        num_objects: Data objects of all ranks; 0 where another writer was given.
        num_requests: Requests for them, retries not counted; 0 likewise.
        stored_bytes: Bytes of all items as stored.
        peak_bytes: Memory that bytes on their way took, on the fullest rank; 0 likewise.
        plan_bytes: Bytes of plans that the ranks sent.
        is_plan_cached: Whether the global plan of an earlier save was used again.
        seconds: Per phase, of the coordinator.
    """

    url: str
    save_id: str | None
    num_keys: int
    num_items: int
    num_objects: int
    num_requests: int
    stored_bytes: int
    peak_bytes: int
    plan_bytes: int
    is_plan_cached: bool
    seconds: Mapping[str, float]

    def __str__(self) -> str:
        return table(
            f"saved {self.url}",
            {
                "keys, items, objects": f"{self.num_keys}, {self.num_items}, {self.num_objects}",
                "stored": f"{size_text(self.stored_bytes)} in {self.num_requests} requests",
                "peak memory": f"{size_text(self.peak_bytes)} on the fullest rank",
                "plans sent": size_text(self.plan_bytes)
                + (" (cached)" if self.is_plan_cached else ""),
                **times(self.seconds),
            },
        )


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a load did, on this rank and in the whole job.

    Attributes:
        url: Of the checkpoint.
        loaded: Keys read on this rank, in the checkpoint's names.
        missing: Keys of the state dict that the checkpoint lacks; they were left as they were.
        unexpected: Keys of the checkpoint that the state dict lacks; they were not read.
        cast: Saved and target dtype of keys where they differ.
        rank: This rank's bytes and requests.
        job: All ranks' together.
        sharing: Whether ranks fetched for each other, and why.
        is_plan_cached: Whether who fetches what was planned by an earlier load.
        seconds: Per phase, of this rank.
    """

    url: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    cast: Mapping[str, tuple[torch.dtype, torch.dtype]]
    rank: Transfer
    job: Transfer
    sharing: str
    is_plan_cached: bool = False
    seconds: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return table(
            f"loaded {self.url}",
            {
                "keys loaded": str(len(self.loaded)),
                "missing": names_text(self.missing),
                "unexpected": names_text(self.unexpected),
                "cast": names_text(tuple(self.cast)),
                "needed": _pair(self.rank.needed_bytes, self.job.needed_bytes),
                "fetched": _pair(self.rank.fetched_bytes, self.job.fetched_bytes),
                "from other ranks": _pair(self.rank.received_bytes, self.job.received_bytes),
                "requests": f"{self.rank.num_requests} here, {self.job.num_requests} in all",
                "peak memory": f"{size_text(self.job.peak_bytes)} on the fullest rank",
                "sharing": self.sharing + (" (plan cached)" if self.is_plan_cached else ""),
                **times(self.seconds),
            },
        )


def _pair(here: int, everywhere: int) -> str:
    return f"{size_text(here)} here, {size_text(everywhere)} in all"
