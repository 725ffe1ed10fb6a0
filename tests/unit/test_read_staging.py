"""Loads whose bytes pass through slabs: when a slab may be used again, and how many there are."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from dcpstore import ObjectStoreReader, ObjectStoreWriter, ReadConfig
from dcpstore.format.payload import Slab
from dcpstore.read import pump, targets
from dcpstore.read.targets import Piece
from dcpstore.store import open_store
from dcpstore.store.base import Store
from dcpstore.testing import FaultyStore, StoreFault

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
MIB = 1 << 20
CONFIG: dict[str, Any] = {"request_bytes": MIB // 4, "budget_bytes": MIB, "casts": "any"}


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


@pytest.fixture
def url(tmp_path: Any) -> str:
    state = {"a": numbers(600, 700), "b": numbers(500, 900), "c": numbers(400, 400)}
    dcp.save(state, storage_writer=ObjectStoreWriter(str(tmp_path / "c")), no_dist=True)
    return str(tmp_path / "c")


def load(
    url: str,
    wrap: Callable[[Store], Store] = lambda inner: inner,
    planner: DefaultLoadPlanner | None = None,
) -> dict[str, torch.Tensor]:
    """Load into targets that take a copy each: another layout, another dtype, a gap per row."""
    state = {
        "a": torch.zeros(700, 600).T,
        "b": torch.zeros(500, 900, dtype=torch.float64),
        "c": torch.zeros(400, 500)[:, :400],
    }
    reader = ObjectStoreReader(
        url,
        config=ReadConfig(**CONFIG),
        store_opener=lambda *given, **more: wrap(open_store(*given, **more)),
    )
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    assert reader.last_read is not None
    assert reader.last_read.peak_bytes <= MIB
    return state


def is_right(state: dict[str, torch.Tensor]) -> bool:
    return (
        torch.equal(state["a"], numbers(600, 700))
        and torch.equal(state["b"], numbers(500, 900).double())
        and torch.equal(state["c"], numbers(400, 400))
    )


def test_few_slabs_serve_a_long_load(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def make(num_bytes: int, *, pin: bool) -> Slab:
        made.append((num_bytes, pin))
        return original(num_bytes, pin=pin)

    original = Slab.make
    monkeypatch.setattr(Slab, "make", make)
    assert is_right(load(url))
    assert 1 <= len(made) <= 2, "half the budget: an engine's own answers may take the rest"
    assert set(made) == {(MIB // 4, False)}, "nothing here copies to a device"


class Device:
    """Copies are queued, and take place when somebody waits for them, as on a CUDA stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queued: list[Callable[[], None]] = []
        self.num_copies = 0
        self.lock = threading.Lock()
        monkeypatch.setattr(pump, "copy_piece", self.queue)
        monkeypatch.setattr(pump.CopyStreams, "done_on_exit", self.done_on_exit)

    def queue(self, piece: Piece, data: memoryview) -> None:
        with self.lock:
            self.queued.append(partial(targets.copy_piece, piece, data))

    @contextmanager
    def done_on_exit(self) -> Iterator[None]:
        try:
            yield
        finally:
            with self.lock:  # one stream: whoever waits waits for what others queued before, too
                for copy in self.queued:
                    copy()
                    self.num_copies += 1
                self.queued = []


class SpoiledSlabs(pump.Slabs):
    """Overwrites what is given back, as the next answer would."""

    def take(self) -> Slab:
        slab = super().take()
        slab.array[:] = 0xEE
        return slab


class Listening(DefaultLoadPlanner):
    """Checks that each target that it is told of is complete."""

    num_told = 0

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        name = read_item.storage_index.fqn
        wanted = {"a": numbers(600, 700), "b": numbers(500, 900), "c": numbers(400, 400)}[name]
        assert torch.equal(tensor, wanted.to(tensor.dtype))
        self.num_told += 1


def test_a_slab_is_used_again_only_when_its_copies_are_done(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch)
    monkeypatch.setattr(pump, "Slabs", SpoiledSlabs)
    planner = Listening()
    assert is_right(load(url, planner=planner))
    assert planner.num_told == 3
    assert device.num_copies > 10


def test_an_answer_that_is_damaged_once_is_fetched_again(url: str) -> None:
    flip = StoreFault("flip", verb="get_range", bit=8000, times=1)
    assert is_right(load(url, lambda inner: FaultyStore(inner, [flip])))


def test_a_load_that_is_over_is_freed_without_the_collector(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer may turn the collector off; each load would keep its metadata and items."""
    jobs: list[weakref.ref[pump.ReadJob]] = []
    enter = pump.ReadJob.__enter__

    def entered(job: pump.ReadJob) -> pump.ReadJob:
        jobs.append(weakref.ref(job))
        return enter(job)

    monkeypatch.setattr(pump.ReadJob, "__enter__", entered)
    gc.disable()
    try:
        assert is_right(load(url))
        assert [job() for job in jobs] == [None]
    finally:
        gc.enable()
