"""What each rank does in the tests of DCP's ways to save and load."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    _save_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dcpstore import (
    ObjectStoreReader,
    ObjectStoreWriter,
    WriteConfig,
    open_checkpoint,
    read_attachment,
)

WRITE = WriteConfig(inline_bytes=16, object_bytes=2048)


def plain(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "sharded": torch.randn((11, 6), generator=generator),
        "copied": torch.randn((9, 9), generator=generator),
        "int": torch.randint(0, 99, (40,), generator=generator),
    }


def make(seed: int, mesh: DeviceMesh | None = None) -> dict[str, Any]:
    """A sharded tensor, replicated ones and a value; ``seed`` tells states apart."""
    state: dict[str, Any] = plain(seed)
    if mesh is None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state["sharded"] = distribute_tensor(state["sharded"], mesh, [Shard(0)], src_data_rank=None)
    state["step"] = seed
    return state


def local(value: Any) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def assert_equal(state: dict[str, Any], expected: dict[str, Any]) -> None:
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(local(state[key]), local(value)), key
        else:
            assert state[key] == value, key


def load(url: str, options: Any, seed: int, mesh: DeviceMesh | None = None, **more: Any) -> None:
    """Load and compare with the state of ``seed``."""
    state = make(-1, mesh)
    dcp.load(state, storage_reader=ObjectStoreReader(url, storage_options=options), **more)
    assert_equal(state, make(seed, mesh))


def writer_of(url: str, options: Any, **more: Any) -> ObjectStoreWriter:
    return ObjectStoreWriter(url, storage_options=options, config=WRITE, **more)


def save_coordinated_by(rank: int, url: str, options: Any) -> None:
    _save_state_dict(make(1), writer_of(url, options), coordinator_rank=rank)
    state = make(-1)
    reader = ObjectStoreReader(url, storage_options=options)
    _load_state_dict(state, reader, coordinator_rank=rank)
    assert_equal(state, make(1))


def groups_of_this_rank(
    groups: list[list[int]],
) -> Iterator[tuple[int, dist.ProcessGroup, DeviceMesh]]:
    """Make all groups; yield the number of each that this rank is in, the group and its mesh."""
    made = [dist.new_group(ranks) for ranks in groups]
    for number, (ranks, group) in enumerate(zip(groups, made, strict=True)):
        if dist.get_rank() in ranks:
            yield number, group, DeviceMesh.from_group(group, "cpu")


def save_in_groups(groups: list[list[int]], url: str, options: Any) -> None:
    """Every group saves and loads a checkpoint of its own, at the same time."""
    for number, group, mesh in groups_of_this_rank(groups):
        writer = writer_of(f"{url}/{number}", options)
        dcp.save(make(number, mesh), storage_writer=writer, process_group=group)
        load(f"{url}/{number}", options, number, mesh, process_group=group)
    dist.barrier()


def save_without_collectives(url: str, options: Any) -> list[str]:
    """Each rank saves what is its own under names that all share; return this rank's keys."""
    rank = dist.get_rank()
    state = {"own": torch.full((50,), float(rank)), "step": rank, "name": f"rank {rank}"}
    writer = writer_of(url, options)
    writer.attach(attachments={"rng": b"%d" % rank}, metrics={"loss": rank})
    metadata = dcp.save(state, storage_writer=writer, use_collectives=False)
    target = {"own": torch.zeros(50), "step": -1, "name": ""}
    dcp.load(target, storage_reader=ObjectStoreReader(url, storage_options=options))
    assert_equal(target, state)
    assert target["name"] == f"rank {rank}"
    reader = ObjectStoreReader(url, storage_options=options)
    found = reader.discover(rank=rank)
    assert found.decode_manifest().attachments["rng"].inline == b"%d" % rank
    assert found.seal.facts.metrics == {"loss": rank}
    return sorted({info.relative_path for info in metadata.storage_data.values()})


def save_again_without_collectives(url: str, options: Any) -> None:
    state = {"own": torch.full((50,), 10.0 + dist.get_rank())}
    writer = writer_of(url, options, overwrite=True)
    dcp.save(state, storage_writer=writer, use_collectives=False)
    target = {"own": torch.zeros(50)}
    dcp.load(target, storage_reader=ObjectStoreReader(url, storage_options=options))
    assert_equal(target, state)


def save_with_cached_plans(url: str, options: Any, has_one_writer: bool) -> None:
    """Three saves to three URLs, one over the first of them, one of another shape."""
    writer = writer_of(f"{url}/start", options, overwrite=True)
    try:
        for seed, place in enumerate(("a", "b", "c", "a", "b"), 1):
            here = f"{url}/{place}"
            planner = DefaultSavePlanner(enable_plan_caching=True)
            if has_one_writer:
                dcp.save(make(seed), checkpoint_id=here, storage_writer=writer, planner=planner)
            else:
                other = writer_of(here, options, overwrite=True)
                dcp.save(make(seed), storage_writer=other, planner=planner)
        assert SavePlanner._cached_final_save_plan, "the plans were not cached"
        for seed, place in ((4, "a"), (5, "b"), (3, "c")):
            load(f"{url}/{place}", options, seed)
        changed = {"sharded": make(6)["copied"], "more": torch.arange(7)}
        planner = DefaultSavePlanner(enable_plan_caching=True)
        target = {"sharded": torch.zeros(9, 9), "more": torch.zeros(7, dtype=torch.int64)}
        dcp.save(changed, storage_writer=writer_of(f"{url}/d", options), planner=planner)
        reader = ObjectStoreReader(f"{url}/d", storage_options=options)
        dcp.load(target, storage_reader=reader)
        assert_equal(target, changed)
    finally:
        for name in vars(SavePlanner):
            if name.startswith("_cached_"):
                getattr(SavePlanner, name).clear()


def save_async(kind: str, url: str, options: Any) -> None:
    """Save twice in the background, changing every value at once after each call."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # where the processes of async_save meet
    writer = writer_of(url, options)
    for seed in (1, 2):
        state = make(seed)
        data = bytearray(b"%d" % seed)
        writer.attach(attachments={"rng-{rank}": data}, step=seed)
        data[:] = b"changed"
        future = dcp.async_save(
            state,
            checkpoint_id=f"{url}/{seed}",
            storage_writer=writer,
            async_checkpointer_type=AsyncCheckpointerType(kind),
        )
        for value in state.values():
            if isinstance(value, torch.Tensor):
                local(value).fill_(77)
        future.result(timeout=100)
        dist.barrier()
    for seed in (1, 2):
        load(f"{url}/{seed}", options, seed)
        name = f"rng-{dist.get_rank()}"
        found = read_attachment(f"{url}/{seed}", name, storage_options=options)
        assert found == b"%d" % seed


def save_with_attachments(url: str, options: Any) -> None:
    """What all ranks attach is sealed; what they do not agree on fails on the coordinator."""
    rank = dist.get_rank()
    state = {"own": torch.arange(5.0)} if rank == 1 else {}
    writer = writer_of(f"{url}/good", options)
    writer.attach(
        attachments={"rng-{rank}": b"%d" % rank * 3000, "same": b"same", f"only {rank}": b""},
        metrics={"rank": rank, f"of {rank}": 1.0},
    )
    dcp.save(state, storage_writer=writer)
    with open_checkpoint(f"{url}/good", storage_options=options) as checkpoint:
        for other in range(dist.get_world_size()):
            assert checkpoint.read_attachment(f"rng-{other}") == b"%d" % other * 3000
            assert checkpoint.read_attachment(f"only {other}") == b""
            assert checkpoint.metrics[f"of {other}"] == 1.0
        assert checkpoint.read_attachment("same") == b"same"
        assert checkpoint.metrics["rank"] == 0.0
    writer = writer_of(f"{url}/bad", options)
    writer.attach(attachments={"rng": b"%d" % rank})
    try:
        dcp.save(state, storage_writer=writer)
    except CheckpointException as error:
        assert "different bytes as 'rng'" in str(error)
    else:
        raise AssertionError("what was attached twice was sealed")


def save_unfinished_collective(url: str, options: Any) -> None:
    size = dist.get_world_size()
    gathered = funcol.all_gather_tensor(
        torch.full((3, 2), float(dist.get_rank())), 0, dist.group.WORLD
    )
    assert type(gathered).__name__ == "AsyncCollectiveTensor"
    dcp.save({"w": gathered}, storage_writer=writer_of(url, options))
    target = {"w": torch.full((3 * size, 2), -1.0)}
    dcp.load(target, storage_reader=ObjectStoreReader(url, storage_options=options))
    assert torch.equal(
        target["w"], torch.arange(size).float().repeat_interleave(3)[:, None].expand(-1, 2)
    )


def save_with(writer: ObjectStoreWriter, values: dict[str, torch.Tensor]) -> None:
    """Use a writer that came pickled from another process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(values, storage_writer=writer, no_dist=True)


def load_with(reader: ObjectStoreReader, values: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Use a reader that came pickled from another process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(values, storage_reader=reader, no_dist=True)
    return values


def save_balanced(url: str, options: Any) -> list[int]:
    """Save with the load-balancing planner of torch's planner docstring."""
    metadata = dcp.save(
        plain(3), storage_writer=writer_of(url, options), planner=BalancingPlanner()
    )
    target = {key: torch.zeros_like(value) for key, value in plain(3).items()}
    dcp.load(target, storage_reader=ObjectStoreReader(url, storage_options=options))
    assert_equal(target, plain(3))
    paths = {info.relative_path for info in metadata.storage_data.values()}
    return sorted({int(path.removeprefix("__").partition("_")[0]) for path in paths})


class BalancingPlanner(DefaultSavePlanner):
    """Deals rank 0's items out to all ranks."""

    def create_global_plan(self, all_plans):
        from dataclasses import replace

        size = len(all_plans)
        dealt = [
            replace(plan, items=all_plans[0].items[rank::size])
            for rank, plan in enumerate(all_plans)
        ]
        return super().create_global_plan(dealt)


def save_adam(url: str, options: Any) -> dict[str, Any] | None:
    """Train a little under FSDP2, save model and optimizer; rank 0 returns the whole state."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    model, optimizer = train(steps=3, seed=0)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments}, storage_writer=writer_of(url, options))
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return whole_state(model, optimizer, whole)


def load_adam(url: str, options: Any) -> dict[str, Any] | None:
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_state_dict,
        set_state_dict,
    )

    model, optimizer = train(steps=0, seed=1)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": moments}
    dcp.load(state, storage_reader=ObjectStoreReader(url, storage_options=options))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
    )
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return whole_state(model, optimizer, whole)


def whole_state(model: Any, optimizer: Any, how: Any) -> dict[str, Any] | None:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer, options=how)
    return {"model": weights, "optim": moments} if dist.get_rank() == 0 else None


def train(steps: int, seed: int) -> tuple[Any, Any]:
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 13), nn.GELU(), nn.Linear(13, 3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * (seed + 1), amsgrad=True)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
    return model, optimizer
