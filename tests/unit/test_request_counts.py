"""What the benchmark's scenarios ask of the store: requests, bytes and copies, and no clock.

A slower machine changes none of these numbers; a lost optimisation changes them at once.
"""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from benchmarks.scenarios import SCENARIOS, Scenario
from benchmarks.states import make_state, make_targets, needed_bytes
from benchmarks.want import Place, Want

from dcpstore import ObjectStoreReader, ObjectStoreWriter, ReadConfig, WriteConfig
from dcpstore.store import Store, open_store
from dcpstore.testing import RecordingStore
from passing_on import PassesOn

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

MIB = 1 << 20
URL = "memory://shelf"
ALONE = Place()
ROWS = {s.name: s for s in SCENARIOS if s.num_ranks == s.saved_ranks == 1 and s.link == "cloud"}
SIZES = {"experts": 4 * MIB, "scalars": 8000}


@dataclass(slots=True)
class Shelf:
    """A store in memory, and what writers and readers ask of it."""

    config: WriteConfig = field(default_factory=WriteConfig)
    shared: Store = field(default_factory=lambda: open_store(URL, engine="obstore"))
    opened: list[RecordingStore] = field(default_factory=list)

    def opener(self, *_: Any, **__: Any) -> Store:
        self.opened.append(RecordingStore(self.shared))
        return self.opened[-1]

    def save(self, state: dict[str, Any]) -> None:
        writer = ObjectStoreWriter(URL, config=self.config, store_opener=self.opener)
        dcp.save(state, storage_writer=writer, no_dist=True)

    def load(self, targets: dict[str, Any]) -> None:
        reader = ObjectStoreReader(URL, store_opener=self.opener)
        dcp.load(targets, storage_reader=reader, no_dist=True)

    def forget(self) -> None:
        self.opened.clear()

    @property
    def counts(self) -> dict[str, int]:
        return dict(sum((store.counts for store in self.opened), Counter[str]()))

    def moved_bytes(self, *verbs: str) -> int:
        requests = [one for store in self.opened for one in store.requests]
        return sum(one.num_bytes for one in requests if one.verb in verbs)


@pytest.fixture(autouse=True)
def _no_group_outlives_a_test() -> Iterator[None]:
    """Shards of ranks that do not exist come with a group that does not exist either."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def size_of(row: Scenario) -> int:
    return SIZES.get(row.kind, row.quick_bytes)


# Per row: objects, by puts in parts and puts in one piece beside the one that seals; and the
# most bytes beside the tensors' own, in all and per tensor (a record's head, its row in the
# manifest and in the metadata).
SAVES = {
    "save": (1, 0, 4096, 512),
    "save-model": (0, 1, 8192, 1024),
    "save-huge": (1, 0, 4096, 512),
    "save-experts": (0, 1, 8192, 1024),
    "save-scalars": (0, 1, 8192, 1024),
}


@pytest.mark.parametrize("name", SAVES)
def test_a_save_looks_once_sends_each_byte_once_and_seals_with_one_put(name: str) -> None:
    row, shelf = ROWS[name], Shelf()
    num_large, num_small, spare_bytes, spare_each = SAVES[name]
    state = make_state(row.kind, size_of(row), row.want, ALONE)
    shelf.save(state)
    expected = {"get": 1, "put_parts": num_large, "put": num_small + 1}
    assert shelf.counts == {verb: count for verb, count in expected.items() if count}
    sent = shelf.moved_bytes("put", "put_parts")
    assert sent <= needed_bytes(state) + spare_bytes + spare_each * len(state)


# Per row: ranged GETs, and bytes fetched per byte needed.
LOADS = {
    "load": (6, 1.0),
    "load-model": (1, 1.01),
    "load-64x4": (2, 1.0),
    "load-shuffled": (2, 1.0),
    "load-huge": (4, 1.0),
    "load-experts": (2, 1.09),
    "load-scalars": (0, 0.0),
    "load-one": (1, 1.0),
    "reshard-rows": (1, 1.0),
    "reshard-columns-long": (1, 1.13),
    "reshard-columns-short": (1, 8.0),
}


@pytest.mark.parametrize("name", LOADS)
def test_a_load_gets_the_metadata_once_and_little_more_than_it_needs(name: str) -> None:
    row, shelf = ROWS[name], Shelf()
    num_ranges, most = LOADS[name]
    shelf.save(make_state(row.kind, size_of(row), row.want, ALONE))
    shelf.forget()
    targets = make_targets(row.kind, size_of(row), row.want, ALONE)
    shelf.load(targets)
    expected = {"get": 1, "get_range": num_ranges}
    assert shelf.counts == {verb: count for verb, count in expected.items() if count}
    assert shelf.moved_bytes("get_range") <= most * needed_bytes(targets)


@pytest.mark.parametrize("most_bytes", [0, 100])
def test_a_large_manifest_costs_one_request_more_per_save_and_load(most_bytes: int) -> None:
    row, shelf = ROWS["load-one"], Shelf(WriteConfig(embed_manifest_bytes=most_bytes))
    shelf.save(make_state(row.kind, size_of(row), row.want, ALONE))
    assert (shelf.counts["get"], shelf.counts["put"]) == (1, 2)
    shelf.forget()
    shelf.load(make_targets(row.kind, size_of(row), row.want, ALONE))
    assert (shelf.counts["get"], shelf.counts["get_range"]) == (2, 1)


def test_every_row_of_one_process_over_the_cloud_is_counted_here() -> None:
    counted = {*SAVES, *LOADS}
    assert counted == {name for name, row in ROWS.items() if row.action in ("save", "load")}


# --- copies -------------------------------------------------------------------------------


class LendingWatch(PassesOn):
    """A store that looks where the bytes of an upload lie: in the state, or in a copy of it."""

    def __init__(self, inner: Store, state: dict[str, torch.Tensor]) -> None:
        super().__init__(inner)
        self._places = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in state.values()]
        self.lent_bytes = self.copied_bytes = 0

    def put_parts(self, key: str, parts: Iterable[Any], **sizes: int) -> str | None:
        return self._inner.put_parts(key, self._watched(parts), **sizes)

    def _watched(self, parts: Iterable[Any]) -> Iterator[Any]:
        for part in parts:
            for piece in part if isinstance(part, tuple) else (part,):
                array = np.frombuffer(memoryview(piece), dtype=np.uint8)
                address = array.__array_interface__["data"][0]
                if any(low <= address < high for low, high in self._places):
                    self.lent_bytes += array.nbytes
                else:
                    self.copied_bytes += array.nbytes
            yield part


def test_a_save_copies_of_large_tensors_only_ends_that_a_part_cuts_off() -> None:
    state = make_state("mixed", 40 * MIB, Want(), ALONE)
    watch = LendingWatch(Shelf().shared, state)
    config = WriteConfig(part_bytes=5 * MIB, budget_bytes=20 * MIB)
    writer = ObjectStoreWriter(URL, config=config, store_opener=lambda *_, **__: watch)
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert watch.lent_bytes + watch.copied_bytes >= sum(one.nbytes for one in state.values())
    assert 0 < watch.copied_bytes <= 2048 * len(state) + (1 << 16)  # and headers, trailers


class TracedAnswers(PassesOn):
    """A store whose answers are Python's own bytes, which tracemalloc sees."""

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        return memoryview(bytes(self._inner.get_range(key, start, end)))


@pytest.mark.parametrize("kind", ["even", "one"])
def test_a_load_makes_no_copy_of_what_it_fetched_but_into_the_target(kind: str) -> None:
    shelf = Shelf()
    shelf.save(make_state(kind, 16 * MIB, Want(), ALONE))
    targets = make_targets(kind, 16 * MIB, Want(), ALONE)
    config = ReadConfig(budget_bytes=8 * MIB, request_bytes=4 * MIB, max_requests=1)
    store = TracedAnswers(shelf.shared)
    reader = ObjectStoreReader(URL, config=config, store_opener=lambda *_, **__: store)
    tracemalloc.start()
    dcp.load(targets, storage_reader=reader, no_dist=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * MIB  # one answer at a time and no second one made of it
