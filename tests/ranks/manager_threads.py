"""A `CheckpointManager` per rank, where ranks are threads of one process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch

from dcpstore import CheckpointManager, WriteConfig
from dcpstore.manager import checkpoint_manager as module
from dcpstore.manager.agreement import StepAgreement
from dcpstore.ranks import RankGroup, Seat
from dcpstore.store import Store, open_store
from dcpstore.testing import RecordingStore
from dcpstore.testing.ranks import MemoryBoard, RankRun, ThreadRanks, run_ranks

T = TypeVar("T")
WRITE = WriteConfig(inline_bytes=64)


class Job:
    """Ranks that are threads, and what opens groups among them in place of torch's.

    Args:
        size: Number of ranks.
        url: Of the run.
        deadline_s: Of the groups.

    Attributes:
        stores: What was opened, by rank.
        num_groups: Groups that were opened, by purpose and rank.
    """

    def __init__(self, size: int, url: str, deadline_s: float = 20.0) -> None:
        self.size, self.url, self._deadline_s = size, url, deadline_s
        self._rank = threading.local()
        self._lock = threading.Lock()
        self._ranks: dict[tuple[str, int], ThreadRanks] = {}
        self._seats = MemoryBoard()
        self.stores: dict[int, list[RecordingStore]] = {rank: [] for rank in range(size)}
        self.num_groups: Counter[tuple[str, int]] = Counter()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Take the place of what opens groups."""
        patch.setattr(module, "open_group", lambda *_, purpose, **__: self._group(purpose))
        patch.setattr(module, "join_ranks", self._joining)
        patch.setattr(module, "load", self._load(module.load))
        patch.setattr(module, "open_agreement", self._agreement)

    def manager(self, rank: int, **options: Any) -> CheckpointManager:
        """Make the manager of the calling thread, which is a rank."""

        def opener(*args: Any, **more: Any) -> Store:
            store = RecordingStore(open_store(*args, **more))
            self.stores[rank].append(store)
            return store

        self._rank.number = rank
        options = {"write": WRITE, "store_opener": opener, **options}
        return CheckpointManager(self.url, **options)

    def run(self, fn: Callable[[CheckpointManager, int], T], **options: Any) -> RankRun[T]:
        """Run ``fn(manager, rank)`` on all ranks; an option that is a list has one per rank."""

        def work(group: RankGroup) -> T:
            own = {k: v[group.rank] if type(v) is list else v for k, v in options.items()}
            with self.manager(group.rank, **own) as manager:
                return fn(manager, group.rank)

        return run_ranks(self.size, work, wait_s=60)

    def take_counts(self) -> Counter[str]:
        """Return how many requests of each verb all ranks sent since the last call."""
        every = [store for stores in self.stores.values() for store in stores]
        found = sum((store.counts for store in every), Counter[str]())
        for store in every:
            store.clear()
        return found

    def _group(self, purpose: str) -> Any:
        rank = self._rank.number
        with self._lock:
            number = self.num_groups[purpose, rank]
            self.num_groups[purpose, rank] += 1
            ranks = self._ranks.setdefault(
                (purpose, number), ThreadRanks(self.size, deadline_s=self._deadline_s)
            )
        return ranks.group(rank)

    @contextmanager
    def _joining(self, *_: Any, action: str, **__: Any) -> Iterator[RankGroup]:
        with self._group(action) as group:
            yield group

    def _load(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def load_by_threads(*args: Any, **options: Any) -> Any:
            with self._group("load") as group:
                return load(*args, **{**options, "process_group": group})

        return load_by_threads

    def _agreement(self, *_: Any, **options: Any) -> StepAgreement:
        seat = Seat(self._seats, self._rank.number, self.size, 0)
        return StepAgreement(seat, idle_pause_s=0.02, **options)


def state_of(rank: int, value: float = 0.0) -> dict[str, Any]:
    """What one rank holds; another one of its own, and one that all share."""
    return {
        f"own{rank}": torch.full((300,), float(value) + rank),
        "shared": torch.full((50,), float(value)),
    }
