"""``kill -9`` of a rank while it saves in the background: the others hear of it in time."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcpstore
from dcpstore import ObjectStoreWriter, RankFailures
from dcpstore.store import open_store
from faults import processes
from passing_on import PassesOn

NUM_RANKS, DEADLINE_S = 3, 4.0


class DeadlyStore(PassesOn):
    """Kills its process when a certain object is put."""

    def __init__(self, inner: Any, key: str) -> None:
        super().__init__(inner)
        self._key = key

    def put(self, key: str, data: Any, **options: Any) -> Any:
        if self._key in key:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._inner.put(key, data, **options)


def save(rank: int, folder: str, coordinator: int, key: str, report: Any) -> None:
    writer = ObjectStoreWriter(
        folder, store_opener=lambda *args, **more: DeadlyStore(open_store(*args, **more), key)
    )
    state = {f"own{rank}": torch.ones(2000)}
    dist.barrier()
    began_s = time.monotonic()
    handle = dcpstore.async_save(
        state, storage_writer=writer, coordinator_rank=coordinator, deadline_s=DEADLINE_S
    )
    state[f"own{rank}"].fill_(7)
    error = handle.exception(60)
    assert isinstance(error, RankFailures)
    report.send((error.step, set(error.causes), time.monotonic() - began_s))
    while not Path(f"{folder}-over").exists():  # rank 0 stays, with the job's store
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("key", "coordinator", "dead", "step"),
    [
        ("__1_0", 0, 1, "write"),
        pytest.param("__2_0", 2, 2, "write", marks=pytest.mark.campaign),
        pytest.param(".metadata", 1, 1, "seal", marks=pytest.mark.campaign),
    ],
)
def test_the_others_fail_within_the_deadline(
    tmp_path: Path, key: str, coordinator: int, dead: int, step: str
) -> None:
    folder = tmp_path / "c"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes = [processes.pipe() for _ in range(NUM_RANKS)]
    ranks = [
        processes.start(
            processes._rank, rank, NUM_RANKS, port, save, str(folder), coordinator, key, theirs
        )
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for _, theirs in pipes:
        theirs.close()
    survivors = [rank for rank in range(NUM_RANKS) if rank != dead]
    for rank in survivors:
        ours = pipes[rank][0]
        assert ours.poll(60), f"rank {rank} did not hear of it"
        failed_step, causes, seconds = ours.recv()
        assert (failed_step, causes) == (step, {dead})
        assert seconds < DEADLINE_S + 1
    folder.with_name("c-over").touch()
    for process in ranks:
        process.join(30)
    assert ranks[dead].exitcode == -signal.SIGKILL
    names = [one.name for one in folder.iterdir()]
    left = {name.split("_")[2] for name in names if name.endswith(".distcp")}
    assert ".metadata" not in names
    if step == "write":
        assert left <= {str(dead)}, "what the others wrote is deleted"
    else:
        assert left == {"0", "1", "2"}, "it may be sealed: nothing is deleted"
