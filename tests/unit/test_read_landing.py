"""Loads whose bytes are received straight into their targets, and those that cannot be."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcpstore import CorruptError, ObjectStoreReader, ObjectStoreWriter, ReadConfig, StoreError
from dcpstore.read.checkpoint import open_checkpoint
from dcpstore.read.pump import ReadStats
from dcpstore.store import open_store
from dcpstore.store.base import Destination, Store
from dcpstore.store.hedge import RangeHedge
from dcpstore.testing import FaultyStore, RecordingStore, StoreFault

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
KIB, MIB = 1 << 10, 1 << 20


def saved(tmp_path: Any, state: dict[str, torch.Tensor]) -> str:
    dcp.save(state, storage_writer=ObjectStoreWriter(str(tmp_path / "c")), no_dist=True)
    return str(tmp_path / "c")


def load(
    url: str,
    targets: dict[str, torch.Tensor],
    wrap: Callable[[Store], Store] = lambda inner: inner,
    **config: Any,
) -> ReadStats:
    reader = ObjectStoreReader(
        url,
        config=ReadConfig(**config),
        store_opener=lambda *given, **more: wrap(open_store(*given, **more)),
    )
    try:
        dcp.load(targets, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise error.failures[0][0] from None
    assert reader.last_read is not None
    return reader.last_read


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


TARGETS: dict[str, tuple[Callable[[], torch.Tensor], bool]] = {
    "whole": (lambda: torch.zeros(600, 700), True),
    "a view of a larger tensor": (lambda: torch.zeros(1000, 700)[300:900], True),
    "another layout": (lambda: torch.zeros(700, 600).T, False),
    "gaps between rows": (lambda: torch.zeros(600, 800)[:, :700], False),
    "another dtype": (lambda: torch.zeros(600, 700, dtype=torch.float64), False),
    "conjugated": (lambda: torch.zeros(600, 700, dtype=torch.complex64).conj(), False),
}


@pytest.mark.parametrize("name", TARGETS)
def test_bytes_pass_through_memory_only_where_they_do_not_lie_in_the_target_as_stored(
    name: str, tmp_path: Any
) -> None:
    make, lands = TARGETS[name]
    target = make()
    stored = numbers(600, 700)
    value = stored.to(torch.complex64) * (1 + 2j) if target.is_complex() else stored
    stats = load(saved(tmp_path, {"w": value}), {"w": target}, casts="any")
    torch.testing.assert_close(target, value.to(target.dtype), rtol=0, atol=0)
    assert (stats.peak_bytes == 0) is lands
    assert stats.peak_bytes in (0, stats.fetched_bytes)


def test_what_one_request_brings_for_several_targets_lands_in_each(tmp_path: Any) -> None:
    state = {f"w{i}": numbers(300, 1000 + i) + i for i in range(5)}
    targets = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    stats = load(saved(tmp_path, state), targets)
    assert all(torch.equal(targets[key], tensor) for key, tensor in state.items())
    assert stats.num_requests == 2
    assert stats.peak_bytes <= 5 * 1000  # the records' headers


def test_small_tensors_and_loads_from_elsewhere_take_memory_as_before(tmp_path: Any) -> None:
    state = {f"w{i}": numbers(1000) + i for i in range(50)}
    stats = load(saved(tmp_path, state), {key: torch.zeros(1000) for key in state})
    assert 0 < stats.peak_bytes <= 50 * 5000
    url = "memory://landing"
    dcp.save({"w": numbers(1000, 1000)}, storage_writer=ObjectStoreWriter(url), no_dist=True)
    assert load(url, {"w": torch.zeros(1000, 1000)}, engine="fsspec").peak_bytes > 0


def test_a_part_of_a_tensor_takes_memory_for_its_ends_only(tmp_path: Any) -> None:
    stored = numbers(4096, 1024)  # 4 KiB a row, 64 rows a block
    target = torch.zeros(2000, 1024)
    with open_checkpoint(saved(tmp_path, {"w": stored})) as checkpoint:
        checkpoint.read_tensor("w", slice(10, 2010), out=target)
        stats = checkpoint.stats
    assert torch.equal(target, stored[10:2010])
    # Whether both requests are under way at the same time is a matter of luck.
    assert 0 < stats.peak_bytes <= stats.fetched_bytes - stats.needed_bytes <= 512 * KIB


def test_requests_that_land_are_long_first_and_short_at_the_end(tmp_path: Any) -> None:
    state = {"w": numbers(40 * MIB // 4)}
    recorders: list[RecordingStore] = []

    def record(inner: Store) -> Store:
        recorders.append(RecordingStore(inner))
        return recorders[-1]

    target = {"w": torch.zeros(40 * MIB // 4)}
    url = saved(tmp_path, state)
    load(url, target, record, max_requests=2, request_bytes=MIB)
    assert torch.equal(target["w"], state["w"])
    requests = [one for one in recorders[-1].requests if one.verb == "get_range"]
    sizes = [one.num_bytes for one in sorted(requests, key=lambda one: one.start or 0)]
    assert sizes[0] == 16 * MIB
    assert sizes[-1] == MIB
    assert sizes == sorted(sizes, reverse=True)


def test_autograd_sees_that_a_target_changed(tmp_path: Any) -> None:
    url = saved(tmp_path, {"w": torch.ones(100_000)})
    weight = torch.full((100_000,), 3.0, requires_grad=True)
    loss = (weight * weight).sum()
    load(url, {"w": weight.detach()})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("times", [1, 2])
def test_a_bit_that_flipped_is_found_in_the_target(times: int, tmp_path: Any) -> None:
    state = {"w": numbers(600, 700)}
    url = saved(tmp_path, state)
    target = {"w": torch.zeros(600, 700)}
    flip = StoreFault("flip", verb="get_range", bit=8 * 300 * KIB, times=times)
    if times == 1:
        load(url, target, lambda inner: FaultyStore(inner, [flip]))
        assert torch.equal(target["w"], state["w"])
        return
    with pytest.raises(CorruptError, match="already hold loaded values") as caught:
        load(url, target, lambda inner: FaultyStore(inner, [flip]))
    assert caught.value.fqn == "w"
    assert caught.value.start <= 300 * KIB + 4096


def test_a_load_that_was_refused_says_that_nothing_was_changed(tmp_path: Any) -> None:
    url = saved(tmp_path, {"w": numbers(600, 700)})
    target = {"w": torch.zeros(600, 700)}
    denied = StoreFault("denied", verb="get_range", times=None)
    with pytest.raises(StoreError, match="denied") as caught:
        load(url, target, lambda inner: FaultyStore(inner, [denied]))
    assert "already hold" not in str(caught.value)
    assert not target["w"].any()


# --- second requests -----------------------------------------------------------------------


class LateStore:
    """Fills slowly when told to, until its memory is taken back; answers ranges at once."""

    def __init__(self) -> None:
        self.is_late = False
        self.late: list[threading.Event] = []

    def fill(self, key: str, start: int, destination: Destination) -> None:
        stop = threading.Event()
        with destination.writing(stop.set) as pieces:
            if self.is_late:
                self.late.append(stop)
                assert stop.wait(30), "nobody took the memory back"
            for piece in pieces:
                piece[:] = b"f" * len(piece)

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        return memoryview(b"g" * (end - start))


def test_a_late_answer_loses_the_memory_to_a_second_one() -> None:
    store = LateStore()
    hedge = RangeHedge(store, max_requests=4, max_share=0.5, least_delay_s=0.01)
    memory = bytearray(8)

    def fill() -> bytes:
        hedge.fill("k", 0, Destination([memoryview(memory)[:3], memoryview(memory)[3:]]))
        return bytes(memory)

    for _ in range(20):
        assert fill() == b"ffffffff"
    store.is_late = True
    assert fill() == b"gggggggg"
    assert (hedge.num_again, hedge.again_bytes, len(store.late)) == (1, 8, 1)
    hedge.close()
