"""Processes that stay alive and play ranks: importing torch once per process, not per test."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dcpstore.demo.launch import deaf_to_interrupts

__all__ = ["RankPool", "RanksFailed"]

GROUP_TIMEOUT_S = 40


class RanksFailed(Exception):
    """A function raised on some rank; holds each rank's traceback."""


class RankPool:
    """Runs one function on every rank of a gloo group of any size up to ``num_ranks``.

    A group is kept as long as the next call wants the same size. After a failure the
    processes are started anew, since a peer may wait for ever. Close it, or leave it as
    a context manager.

    Args:
        num_ranks: Processes, started when the first call needs them.
        folder: For the rendezvous files.
    """

    def __init__(self, num_ranks: int, folder: Path) -> None:
        self._num_ranks = num_ranks
        self._folder = folder
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._world_size = 0
        self._num_groups = 0

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60
    ) -> list[Any]:
        """Call ``function(*args)`` on each rank; return what each rank returned.

        Args:
            world_size: Size of the group that is the default one during the call.
            function: A module's own function.
            args: Pickled by value.
            timeout_s: Seconds until the ranks count as hung.

        Raises:
            RanksFailed: With the traceback of every rank that raised or hung.
        """
        self._start()
        if world_size != self._world_size:
            self._world_size = world_size
            self._num_groups += 1
        file = self._folder / f"group-{os.getpid()}-{self._num_groups}"
        call = pickle.dumps((world_size, str(file), function, args))
        # Idle ranks hear it too: they leave the group they were in.
        for pipe in self._pipes:
            pipe.send_bytes(call)
        deadline_s = time.monotonic() + timeout_s
        answers = [self._answer(pipe, deadline_s) for pipe in self._pipes]
        problems = [f"--- rank {r}\n{text}" for r, (text, _) in enumerate(answers) if text]
        if problems:
            self.close()
            raise RanksFailed("\n".join(problems))
        return [value for _, value in answers[:world_size]]

    def close(self) -> None:
        """End the processes. Idempotent; the next call starts others."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(5)
            if process.exitcode is None:
                process.kill()
                process.join()
        self._processes, self._pipes, self._world_size = [], [], 0

    def _start(self) -> None:
        if self._processes:
            return
        context = multiprocessing.get_context("spawn")
        with deaf_to_interrupts():
            for rank in range(self._num_ranks):
                ours, theirs = context.Pipe()
                # Not daemonic: async_save in process mode starts a child of its own.
                process = context.Process(target=_serve, args=(rank, theirs), name=f"rank {rank}")
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)

    def _answer(self, pipe: Connection, deadline_s: float) -> tuple[str, Any]:
        if not pipe.poll(max(0.0, deadline_s - time.monotonic())):
            return "no answer in time", None
        try:
            answer: tuple[str, Any] = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return "the process ended", None
        return answer


def _serve(rank: int, pipe: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(1)
    group = ""
    while True:
        try:
            world_size, file, function, args = pickle.loads(pipe.recv_bytes())
            if file != group:
                _join(rank, world_size, file)
                group = file
            value = function(*args) if rank < world_size else None
            answer = pickle.dumps(("", value))
        except EOFError:
            return
        except BaseException:  # kept, and raised in the test's process
            answer = pickle.dumps((traceback.format_exc(), None))
        pipe.send_bytes(answer)


def _join(rank: int, world_size: int, file: str) -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    if rank < world_size:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(file, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=GROUP_TIMEOUT_S),
        )


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
