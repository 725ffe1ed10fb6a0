"""Tensors that ranks hold parts of, for ranks that are threads: DTensor needs processes."""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

import dcpstore
from dcpstore import (
    LoadPlanner,
    LoadResult,
    ObjectStoreReader,
    ObjectStoreWriter,
    ReadConfig,
    WriteConfig,
)
from dcpstore.ranks import RankGroup
from dcpstore.store import Store, open_store
from dcpstore.testing import FaultyStore, RecordingStore, StoreFault, StoreRequest
from dcpstore.testing.ranks import RankRun, run_ranks
from passing_on import PassesOn

Offsets = tuple[int, ...]
StateMaker = Callable[[int, int], dict[str, Any]]


class Part(torch.Tensor):
    """What one rank holds of a tensor, behind DCP's checkpointable hooks.

    Args:
        full: The whole tensor; the parts are copies.
        boxes: Offsets and sizes of the parts.
    """

    parts: dict[Offsets, torch.Tensor]

    @staticmethod
    def __new__(cls, full: torch.Tensor, boxes: list[tuple[Offsets, Offsets]]) -> Part:
        part: Part = torch.Tensor._make_wrapper_subclass(cls, full.size(), dtype=full.dtype)
        part.parts = {}
        for offsets, sizes in boxes:
            where = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            part.parts[offsets] = full[where].clone()
        return part

    def __repr__(self) -> str:
        return f"Part({tuple(self.shape)}, {sorted(self.parts)})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{function} on parts")

    def _chunks(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(o), t.size()) for o, t in self.parts.items()]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._chunks()

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.parts[tuple(index.offset)]


def tensors_of(value: Any) -> list[torch.Tensor]:
    """What a rank holds of a value."""
    return list(value.parts.values()) if isinstance(value, Part) else [value]


def cuts(length: int, pieces: int) -> list[tuple[int, int]]:
    """Cut a length into uneven pieces, some of them empty: (start, size) of each."""
    edges = [length * i * i // (pieces * pieces) for i in range(pieces + 1)]
    return [(a, b - a) for a, b in pairwise(edges)]


def by_rows(full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    start, rows = cuts(len(full), size)[rank]
    return Part(full, [((start, 0), (rows, full.shape[1]))] if rows else [])


def by_columns(full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    start, columns = cuts(full.shape[1], size)[size - 1 - rank]
    return Part(full, [((0, start), (len(full), columns))] if columns else [])


def by_turns(full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Every so many rows: several parts on each rank."""
    width = full.shape[1]
    return Part(full, [((row, 0), (1, width)) for row in range(rank, len(full), size)])


def in_grid(full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Rows by half of the ranks, each copied on two: what HSDP does."""
    return by_rows(full, rank // 2, (size + 1) // 2)


def everywhere(full: torch.Tensor, _rank: int, _size: int) -> torch.Tensor:
    return full.clone()


LAYOUTS: dict[str, Callable[[torch.Tensor, int, int], torch.Tensor]] = {
    "rows": by_rows,
    "columns": by_columns,
    "turns": by_turns,
    "grid": in_grid,
    "copies": everywhere,
}


def oracle(rows: int = 67, columns: int = 50) -> dict[str, torch.Tensor]:
    """The plain values, a tensor per layout."""
    source = torch.Generator().manual_seed(5)
    return {name: torch.randn(rows, columns, generator=source) for name in LAYOUTS}


def state_of(rank: int, size: int, variant: int = 0) -> dict[str, Any]:
    """A state in which each tensor has a layout; another ``variant`` deals them out anew."""
    layouts = list(LAYOUTS.values())
    state: dict[str, Any] = {
        name: layouts[(number + variant) % len(layouts)](full, rank, size)
        for number, (name, full) in enumerate(oracle().items())
    }
    return {"model": state, "step": 7, "groups": [{"lr": 0.5, "betas": [0.9, 0.99]}]}


def wiped(state: dict[str, Any]) -> dict[str, Any]:
    """The same with other values."""
    for value in state["model"].values():
        for tensor in tensors_of(value):
            tensor.fill_(-1)
    return {**state, "step": -1, "groups": [{"lr": -1.0, "betas": [0.0, 0.0]}]}


def assert_state(state: dict[str, Any], rank: int, size: int, variant: int = 0) -> None:
    """Compare with the plain values, to the last bit."""
    expected = state_of(rank, size, variant)
    for key, value in expected["model"].items():
        pairs = zip(tensors_of(state["model"][key]), tensors_of(value), strict=True)
        for got, want in pairs:
            assert torch.equal(got, want), f"{key} differs on rank {rank}"
    assert (state["step"], state["groups"]) == (expected["step"], expected["groups"])


class CountingGroup(PassesOn):
    """A group that notes the bytes which its rank sends to the coordinator, per step."""

    def __init__(self, group: RankGroup) -> None:
        super().__init__(group)
        self.sent_bytes: Counter[str] = Counter()

    def exchange(self, step: str, work: Callable[[], Any], reduce: Callable[..., Any]) -> Any:
        def noted() -> Any:
            value = work()
            self.sent_bytes[step] += len(pickle.dumps(value, protocol=5))
            return value

        return self._inner.exchange(step, noted, reduce)


class Shelf:
    """A store that ranks share, and what each of them asked of it."""

    def __init__(self) -> None:
        self.shared = open_store("memory://shelf", engine="obstore")
        self.sent_bytes: dict[int, Counter[str]] = {}
        """Per rank, what it sent to the coordinator in each step of the last load."""
        self._stores: dict[int, list[RecordingStore]] = defaultdict(list)

    def opener(self, rank: int, faults: Iterable[StoreFault] = ()) -> Callable[..., Store]:
        """What to give a rank's writer or reader as ``store_opener``."""

        def open_one(*_args: Any, **_options: Any) -> Store:
            store = RecordingStore(FaultyStore(self.shared, faults))
            self._stores[rank].append(store)
            return store

        return open_one

    def requests(self, rank: int | None = None, verb: str | None = None) -> list[StoreRequest]:
        """What a rank asked, or all of them."""
        ranks = list(self._stores) if rank is None else [rank]
        stores = [store for one in ranks for store in self._stores[one]]
        return [r for store in stores for r in store.requests if verb in (None, r.verb)]

    @property
    def fetched_bytes(self) -> int:
        """Bytes of data objects that all ranks fetched."""
        return sum(request.num_bytes for request in self.requests(verb="get_range"))

    def clear(self) -> None:
        """Forget what was asked."""
        self._stores.clear()

    def save(self, size: int, make: StateMaker) -> None:
        """Save what ``make`` gives for each rank, and forget what was asked."""

        def work(group: RankGroup) -> None:
            dcpstore.save(
                make(group.rank, size),
                storage_writer=ObjectStoreWriter(
                    "memory://shelf",
                    overwrite=True,
                    store_opener=self.opener(group.rank),
                    config=WriteConfig(
                        object_bytes=1 << 18, checksum_block_bytes=4096, inline_bytes=64
                    ),
                ),
                process_group=group,
            )

        run_ranks(size, work).values()
        self.clear()

    def load(
        self,
        size: int,
        make: StateMaker,
        *,
        share: Any = "auto",
        faults: Mapping[int, Sequence[StoreFault]] | None = None,
        deadline_s: float = 30,
        planners: Sequence[LoadPlanner] | None = None,
        **config: Any,
    ) -> RankRun[LoadResult]:
        """Load into what ``make`` gives for each rank, wiped, and compare."""

        def work(group: RankGroup) -> LoadResult:
            state = make(group.rank, size)
            for value in state.values():
                for tensor in tensors_of(value):
                    tensor.fill_(-1)
            script = (faults or {}).get(group.rank, ())
            reader = ObjectStoreReader(
                "memory://shelf",
                store_opener=self.opener(group.rank, script),
                config=ReadConfig(**config),
            )
            counting = CountingGroup(group)
            self.sent_bytes[group.rank] = counting.sent_bytes
            result = dcpstore.load(
                state,
                storage_reader=reader,
                share=share,
                process_group=counting,  # type: ignore[arg-type]
                planner=planners[group.rank] if planners else None,
            )
            for key, value in make(group.rank, size).items():
                for got, want in zip(tensors_of(state[key]), tensors_of(value), strict=True):
                    assert torch.equal(got, want), f"{key} differs on rank {group.rank}"
            return result

        return run_ranks(size, work, deadline_s=deadline_s)
