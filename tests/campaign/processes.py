"""Ranks that are processes joined by gloo: started once, kept for many schedules, killed for some.

::

    campaign -- pipe per rank --> rank 0 .. 3     saver A: the first ranks; saver B: from rank 2 on

A fault that kills an actor kills its process with SIGKILL before the server answers. Afterwards,
and after any failure that may have left the ranks in different collectives, the next schedule
gets new processes; they are forked from a server that has torch imported.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import dcpstore
from campaign.judge import Report, Save, rank_state, report_of, shapes_of, tensor_of
from campaign.schedule import Schedule, parse
from campaign.wire import Job

NUM_RANKS = 4
DEADLINE_S = 5.0  # of a step of dcpstore.save: how long ranks wait for one that was killed
_GROUP_S = 12.0  # of a step of dcp.save: gloo tells only those that had to do with a lost rank
_STEP_S = 60.0  # then a rank counts as hung
_START_S = 120.0
_FIRST_OF_B = 2
_context = multiprocessing.get_context("forkserver")
# Installed packages only: the fork server does not know where the campaign lies.
_context.set_forkserver_preload(
    [
        *("dcpstore.saving", "dcpstore.testing.ranks", "dcpstore.audit.prune", "obstore"),
        *("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor"),
        *("numpy", "s3fs", "crc32c"),
    ]
)


def members_of(job: Job) -> tuple[int, ...]:
    """Return the processes that play a saver's ranks."""
    first = _FIRST_OF_B if job.saver == "B" else 0
    return tuple(range(first, first + parse(job.schedule).ranks))


_GROUPS = ((0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (2,), (2, 3))


class ProcessRanks:
    """Plays the ranks of savers with processes. A context manager; see `campaign.wire.Savers`."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._store: Any = None
        self._killed: set[int] = set()
        self._is_spoilt = False
        self.num_started = 0

    def __enter__(self) -> ProcessRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes. Idempotent; the next save starts others."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(1)
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._store = [], [], None

    def renew(self) -> None:
        """Start processes anew if the last schedule left them in doubt. Between schedules only."""
        if self._is_spoilt or self._killed:
            self.close()
        self._is_spoilt = False
        self._killed = set()
        if not self._processes:
            self._start()

    def _start(self) -> None:
        self.num_started += 1
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(NUM_RANKS):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(rank, self._store.port, theirs))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        for pipe in self._pipes:
            if not pipe.poll(_START_S) or pipe.recv() != "ready":
                raise RuntimeError("a rank did not start")

    def kill(self, actor: str) -> None:
        """End a rank as if its machine were lost."""
        if actor[0] not in "AB":
            return
        rank = int(actor[1:]) + (_FIRST_OF_B if actor[0] == "B" else 0)
        self._killed.add(rank)
        os.kill(self._processes[rank].pid, signal.SIGKILL)

    def save(self, job: Job) -> list[Report]:
        """Save on as many ranks as the schedule says."""
        ranks = members_of(job)
        for rank in ranks:
            self._pipes[rank].send(job)
        until = time.monotonic() + _STEP_S
        return [self._report(job, number, rank, until) for number, rank in enumerate(ranks)]

    def _report(self, job: Job, number: int, rank: int, until: float) -> Report:
        actor, pipe = f"{job.saver}{number}", self._pipes[rank]
        try:
            if pipe.poll(max(0.0, until - time.monotonic())):
                report: Report
                report, is_spoilt = pipe.recv()
                self._is_spoilt |= is_spoilt
                return report
        except (EOFError, ConnectionError):
            if rank in self._killed:
                return Report(actor, "died", "", job.save)
            self._is_spoilt = True
            return Report(actor, "hung", "the process ended", job.save)
        self._is_spoilt = True
        return Report(actor, "hung", f"no answer in {_STEP_S} s", job.save)


# In the ranks ------------------------------------------------------------------------------------


def _serve(rank: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=30)
    )
    timeout = timedelta(seconds=_GROUP_S)
    groups = {members: dist.new_group(list(members), timeout) for members in _GROUPS}
    pipe.send("ready")
    while True:
        try:
            job: Job | None = pipe.recv()
        except (EOFError, ConnectionError):
            job = None
        if job is None:  # the campaign is over
            for helper in multiprocessing.active_children():
                helper.kill()
            os._exit(0)
        group = groups[members_of(job)]
        try:
            answer = _save(job, group)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        pipe.send(answer)


def _save(job: Job, group: Any) -> tuple[Report, bool]:
    """Return what this rank says, and whether ranks may be in different collectives now."""
    rank = dist.get_rank(group)
    schedule = parse(job.schedule)
    writer = job.writer(rank)
    state = _state(job.save, rank, schedule, group)
    save = _save_by_us if schedule.entry == "dcpstore" else _save_by_dcp
    error: BaseException | None = None
    try:
        save(schedule, state, writer, group)
    except (Exception, CheckpointException) as raised:
        error = raised
        if schedule.entry == "dcp" and "sweep" in schedule.flags:
            writer.sweep_unsealed()
    report = report_of(f"{job.saver}{rank}", error, job.save)
    if report.outcome != "raw":
        return report, False
    # Under dcp.save gloo itself raises where a peer is gone, and promises nothing.
    return (replace(report, outcome="unknown") if schedule.entry == "dcp" else report), True


def _save_by_us(schedule: Schedule, state: Any, writer: Any, group: Any) -> None:
    dcpstore.save(
        state, storage_writer=writer, process_group=group, deadline_s=DEADLINE_S, progress=False
    )


def _save_by_dcp(schedule: Schedule, state: Any, writer: Any, group: Any) -> None:
    if not {"async", "process"} & set(schedule.flags):
        dcp.save(state, storage_writer=writer, process_group=group)
        return
    kind = AsyncCheckpointerType.THREAD
    if "process" in schedule.flags:
        kind = AsyncCheckpointerType.PROCESS
    done: Any = dcp.async_save(
        state, storage_writer=writer, process_group=group, async_checkpointer_type=kind
    )
    done.result(_STEP_S)


def _state(save: Save, rank: int, schedule: Schedule, group: Any) -> dict[str, Any]:
    flags = schedule.flags
    state = rank_state(save, rank, schedule.ranks, flags)
    shapes = shapes_of(schedule.ranks, flags)
    if "split" in shapes:
        whole = tensor_of(save, "split", shapes["split"])
        mesh = DeviceMesh.from_group(group, "cpu")
        local = whole.chunk(schedule.ranks)[rank].clone()
        state["split"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    if "fsdp.weight" in shapes:
        state["fsdp"] = _fsdp_state(save, shapes["fsdp.weight"], group)
    return state


def _fsdp_state(save: Save, shape: tuple[int, ...], group: Any) -> dict[str, Any]:
    """Return the state dict of an FSDP2 module whose weight is a save's."""
    from torch.distributed.fsdp import fully_shard

    module = torch.nn.Linear(shape[1], shape[0], bias=False, dtype=torch.float64)
    with torch.no_grad():
        module.weight.copy_(tensor_of(save, "fsdp.weight", shape))
    fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu"))
    return dict(module.state_dict())
