"""What each rank does with a manager whose steps come to its own disk first."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dcpstore import CheckpointManager, EverySteps, Latest

NUMBERS = torch.arange(4096.0).view(64, 64)


def state_at(step: int) -> dict[str, Any]:
    """A tensor in rows, one that all ranks have, and one of each rank's own."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "rows": distribute_tensor(NUMBERS + step, mesh, [Shard(0)]),
        "same": torch.full((100,), float(step)),
    }


def train_on_disks(bucket: str, local: str, steps: int, copy_every: int) -> tuple[Any, ...]:
    """Restore, check, train some steps; what was restored, from where, and what was told."""
    told: list[str] = []
    wiped = state_at(-7)
    with CheckpointManager(
        bucket,
        local=local,
        copy_every=copy_every,
        keep_local=2,
        save=EverySteps(1),
        keep=Latest(3),
        on_event=lambda event: told.append(event.kind),
    ) as manager:
        start = manager.restore(wiped)
        if start is not None:
            rows = wiped["rows"]
            assert isinstance(rows, DTensor)
            assert torch.equal(rows.full_tensor(), NUMBERS + start)
            assert torch.equal(wiped["same"], torch.full((100,), float(start)))
            assert manager.read_attachment("rank-0.txt") == f"0 at {start}".encode()
        for step in range((start or 0) + 1, (start or 0) + steps + 1):
            attached = {"rank-{rank}.txt": f"{dist.get_rank()} at {step}".encode()}
            manager.step(step, state_at(step), attachments=attached)
        manager.wait()
        dist.barrier()  # the coordinator has removed what it removes
        source = None if manager.restored is None else manager.restored.url
        return start, source, sorted(set(told)), [one.step for one in manager.steps()]
