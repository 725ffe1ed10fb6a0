"""What each rank does in the tests of `dcpstore.async_save` on processes."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from optimizer_forms import nested_by_tp, values
from rank_layouts import CASES, build, wipe
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

import dcpstore
from dcpstore import ObjectStoreReader, ObjectStoreWriter, Stager, WriteConfig
from dcpstore.store import open_store
from passing_on import PassesOn

WRITE = WriteConfig(inline_bytes=64, checksum_block_bytes=4096)


def same_bytes(state: dict[str, Any], folder: str, stager: Stager, planner: Any) -> None:
    """Save now and in the background; compare what is stored, byte by byte."""
    dcpstore.save(state, f"{folder}/now", config=WRITE, planner=planner())
    save = dcpstore.async_save(
        state, f"{folder}/later", config=WRITE, planner=planner(), stager=stager
    )
    wipe({key: value for key, value in state.items() if key != "unfinished"})
    save.result(60)
    now, later = stored(f"{folder}/now"), stored(f"{folder}/later")
    assert now == later, folder


def stored(folder: str) -> tuple[list[bytes], Any]:
    objects = sorted(Path(folder).glob("*.distcp"))
    metadata = ObjectStoreReader(folder).read_metadata()
    return [one.read_bytes() for one in objects], metadata.state_dict_metadata


def save_all_layouts(folder: str) -> None:
    stager = Stager()
    for planner in (dcpstore.SavePlanner, dcp.DefaultSavePlanner):
        for case in CASES:
            where = f"{folder}/{planner.__module__}/{case}"
            same_bytes(build(case, 0), where, stager, planner)


def save_an_unfinished_collective(folder: str) -> None:
    unfinished = all_reduce(torch.full((50,), 1.0 + dist.get_rank()), "sum", dist.group.WORLD)
    assert type(unfinished).__name__ == "AsyncCollectiveTensor"
    same_bytes({"unfinished": unfinished}, folder, Stager(), dcpstore.SavePlanner)


def save_a_partial_sum(folder: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    partial = DTensor.from_local(torch.full((4,), 1.0), mesh, [Partial()])
    staged = Stager().stage({"partial": partial})["partial"]
    assert staged.placements == partial.placements
    assert staged.to_local().tolist() == [1.0] * 4
    assert staged.to_local().data_ptr() != partial.to_local().data_ptr()
    save = dcpstore.async_save({"partial": partial}, folder)
    error = save.exception(60)  # DTensor itself refuses
    assert "partial placements" in str(error)


class Slow:
    """Opens stores whose puts wait for an event, on one rank."""

    def __init__(self, rank: int) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self._waits = dist.get_rank() == rank

    def __call__(self, *args: Any, **options: Any) -> Any:
        return SlowStore(open_store(*args, **options), self)

    def wait(self) -> None:
        self.reached.set()
        if self._waits:
            assert self.opened.wait(60)


class SlowStore(PassesOn):
    def __init__(self, inner: Any, slow: Slow) -> None:
        super().__init__(inner)
        self._slow = slow

    def put(self, key: str, data: Any, **options: Any) -> Any:
        self._slow.wait()
        return self._inner.put(key, data, **options)


def train_beside(folder: str) -> tuple[int, float]:
    """Run the trainer's collectives while a save cannot end; return how many, and the slowest."""
    slow = Slow(rank=1)
    writer = ObjectStoreWriter(folder, config=WRITE, store_opener=slow)
    dist.all_reduce(torch.ones(1))
    world: Any = dist.group.WORLD
    groups, before = list(_groups()), world._get_sequence_number_for_group()
    state = {f"own{dist.get_rank()}": torch.ones(1000)}
    save = dcpstore.async_save(state, storage_writer=writer)
    slowest_s = 0.0
    for step in range(100):
        total = torch.full((1000,), float(step))
        began_s = time.monotonic()
        dist.all_reduce(total)
        slowest_s = max(slowest_s, time.monotonic() - began_s)
        assert total[0] == step * dist.get_world_size()
    assert not save.done()
    slow.opened.set()
    save.result(60)
    assert list(_groups()) == groups, "no process group is made"
    return world._get_sequence_number_for_group() - before, slowest_s


def _groups() -> Iterator[Any]:
    return iter(dist.distributed_c10d._world.pg_map)


def save_in_order(folder: str) -> None:
    """Two saves at once, and a save that is waited for between them."""
    saves = []
    for step in range(2):
        state = {f"own{dist.get_rank()}": torch.full((100,), float(step))}
        saves.append(dcpstore.async_save(state, f"{folder}/{step}"))
        dcpstore.save(state, f"{folder}/now-{step}")
    for save in reversed(saves):
        save.result(60)
    for step in range(2):
        for name in (f"{step}", f"now-{step}"):
            found = {f"own{dist.get_rank()}": torch.zeros(100)}
            dcpstore.load(found, f"{folder}/{name}")
            assert next(iter(found.values()))[0] == step


def save_nested_shards(folder: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for by in ("rows", "columns"):
            state = {name: nested_by_tp(full, by) for name, full in values(2).items()}
            where = f"{folder}/{by}"
            dcpstore.save(state, f"{where}/now", config=WRITE)
            dcpstore.async_save(state, f"{where}/later", config=WRITE).result(60)
            assert stored(f"{where}/now") == stored(f"{where}/later")
