"""Nodes with a disk each, of which their own ranks alone know, and a bucket that all know."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from parts import assert_state, state_of, wiped

import dcpstore
from dcpstore import ReadConfig, WriteConfig
from dcpstore.manager.choice import Choice, choose
from dcpstore.manager.tiers import copy_up, spread_seal
from dcpstore.ranks import RankGroup
from dcpstore.store import Store, open_store
from dcpstore.store.folder import Folder
from dcpstore.testing import FaultyStore, RecordingStore, StoreFault
from dcpstore.testing.ranks import RankRun, run_ranks

WRITE = WriteConfig(inline_bytes=64, object_bytes=4096, checksum_block_bytes=4096)
READ = ReadConfig(join_gap_bytes=64, request_bytes=4096, budget_bytes=16384, max_requests=4)
StateMaker = Callable[[int, int], dict[str, Any]]


class Cluster:
    """Nodes of two ranks with a disk each, and a bucket.

    Attributes:
        stores: Every store of the bucket that was opened; they record the requests.
        faults: What happens to requests to the bucket.
        opener: Opens the bucket.
    """

    def __init__(self, root: Path, ranks_per_node: int = 2) -> None:
        self.root = root
        self.ranks_per_node = ranks_per_node
        self.stores: list[RecordingStore] = []
        self.faults: list[StoreFault] = []
        self.opener: Callable[..., Store] = open_store
        self.bucket = Folder(root / "bucket", None, WRITE, self._open)

    def _open(self, url: str, **options: Any) -> Store:
        self.stores.append(RecordingStore(FaultyStore(self.opener(url, **options), self.faults)))
        return self.stores[-1]

    def node(self, number: int) -> Path:
        return self.root / f"node{number}"

    def disk(self, rank: int) -> Folder:
        return Folder(self.node(rank // self.ranks_per_node), None, WRITE)

    def fetched_bytes(self) -> int:
        """Data bytes that were read from the bucket."""
        return sum(
            request.num_bytes
            for store in self.stores
            for request in store.requests
            if request.verb == "get_range" and "distcp" in request.key
        )

    def save(
        self,
        size: int,
        step: int,
        make: StateMaker = state_of,
        *,
        coordinator: int = 0,
        spreads: bool = True,
        config: WriteConfig = WRITE,
    ) -> None:
        def work(group: RankGroup) -> None:
            self.save_as(group, step, make, config)
            if spreads:
                spread_seal(group, self.disk(group.rank).below(f"step-{step}"))

        run_ranks(size, work, coordinator=coordinator).values()

    def save_as(
        self,
        group: RankGroup,
        step: int,
        make: StateMaker,
        config: WriteConfig = WRITE,
        **sealed: Any,
    ) -> None:
        """Save as one rank to its own disk."""
        url = self.disk(group.rank).below(f"step-{step}").url
        state = make(group.rank, group.size)
        options = {"process_group": group, "config": config, "overwrite": True}
        dcpstore.save(state, url, **options, **sealed)

    def copy(self, size: int, step: int, **options: Any) -> RankRun[Any]:
        return run_ranks(size, lambda group: self.copy_as(group, step, **options))

    def copy_as(self, group: RankGroup, step: int, **options: Any) -> Any:
        """Copy as one rank from its own disk."""
        name = f"step-{step}"
        disk, bucket = self.disk(group.rank).below(name), self.bucket.below(name)
        return copy_up(group, disk, bucket, **options)

    def newest(self) -> tuple[int, str] | None:
        sealed = [path.parent.name for path in Path(self.root, "bucket").glob("*/.metadata")]
        numbers = sorted(int(name.removeprefix("step-")) for name in sealed)
        return (numbers[-1], f"step-{numbers[-1]}") if numbers else None

    def choose(self, group: RankGroup, **options: Any) -> Choice | None:
        return choose(group, self.disk(group.rank), self.bucket, self.newest, **options)

    def restore(
        self,
        size: int,
        check: Callable[[RankGroup, Choice], Any] | None = None,
        *,
        coordinator: int = 0,
    ) -> list[tuple[int, bool, Any]]:
        """Choose and load on every rank; returns step, whether it is local, and the result."""
        for store in self.stores:
            store.clear()

        def work(group: RankGroup) -> tuple[int, bool, Any]:
            choice = self.choose(group)
            assert choice is not None
            if check is not None:
                return choice.step, choice.is_local, check(group, choice)
            return choice.step, choice.is_local, load(group, choice, size)

        return run_ranks(size, work, coordinator=coordinator).values()


def load(group: RankGroup, choice: Choice, size: int) -> Any:
    state = wiped(state_of(group.rank, size, variant=1))
    reader = choice.reader(READ)
    result = dcpstore.load(state, storage_reader=reader, process_group=group)
    assert_state(state, group.rank, size, variant=1)
    return result
