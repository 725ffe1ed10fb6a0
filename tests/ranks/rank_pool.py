"""Processes that stay alive and play ranks: torch and ours are imported once, not per rank.

::

    test -- pipe per rank --> rank 0, 1, 2, ...     forked by one child that imported torch
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

__all__ = ["RankPool", "RanksFailed"]

GROUP_TIMEOUT_S = 100  # a machine that is busy with other tests is slow
# Meshes and wrappers that a call makes open gloo groups, which end with the default one and until
# then wake up a hundred times a second each.
CALLS_PER_GROUP = 4
# Else each rank imports it for itself, when an optimizer steps or a bucket is opened: seconds.
IMPORTED_ONCE = (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed._tools",
    "torch._dynamo",
    "numpy.ma",
    "dcpstore.ranks.torch_group",
    "dcpstore.saving",
    "dcpstore.loading",
    "dcpstore.optimizer",
    "dcpstore.read.torch_save",
    "obstore",
    "s3fs",
)


class RanksFailed(Exception):
    """A function raised on some rank; holds each rank's traceback."""


class RankPool:
    """Runs one function on every rank of a gloo group of any size up to ``num_ranks``.

    A group is kept for some calls, as long as they want the same size. After a failure the
    processes are started anew, since a peer may wait for ever. They end with the pool,
    and with the process that made it. Close it, or use it as a context manager.

    Args:
        num_ranks: Processes, started when the first call needs them.
        folder: For the rendezvous files.
    """

    def __init__(self, num_ranks: int, folder: Path) -> None:
        self._num_ranks = num_ranks
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._pipes: list[Connection] = []
        self._world_size = 0
        self._num_groups = 0
        self._num_calls = 0

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 100
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
        if world_size != self._world_size or self._num_calls == CALLS_PER_GROUP:
            self._world_size = world_size
            self._num_groups += 1
            self._num_calls = 0
        self._num_calls += 1
        file = self._folder / f"group-{os.getpid()}-{self._num_groups}"
        call = pickle.dumps((world_size, str(file), function, args))
        # Idle ranks hear it too: they leave the group they were in.
        for pipe in self._pipes:
            pipe.send_bytes(call)
        deadline_s = time.monotonic() + timeout_s
        answers = [_answer(pipe, deadline_s) for pipe in self._pipes]
        problems = [f"--- rank {r}\n{text}" for r, (text, _) in enumerate(answers) if text]
        if problems:
            self.close()
            raise RanksFailed("\n".join(problems))
        return [value for _, value in answers[:world_size]]

    def close(self) -> None:
        """End the processes. Idempotent; the next call starts others."""
        process, self._process = self._process, None
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._world_size = [], 0

    def _start(self) -> None:
        if self._process is not None:
            return
        both = [Pipe() for _ in range(self._num_ranks)]
        theirs = [end for _, end in both]
        self._pipes = [end for end, _ in both]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *(str(end.fileno()) for end in theirs)],
            pass_fds=[end.fileno() for end in theirs],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,  # ctrl-C is the test run's; one signal ends all
        )
        for end in theirs:
            end.close()


def _answer(pipe: Connection, deadline_s: float) -> tuple[str, Any]:
    try:
        if not pipe.poll(max(0.0, deadline_s - time.monotonic())):
            return "no answer in time", None
        answer: tuple[str, Any] = pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionError):
        return "the process ended", None
    return answer


def _fork_ranks(pipes: list[Connection]) -> None:
    """Become one process per rank. Nothing may have started a thread before."""
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    gc.freeze()  # no rank's collector goes through all that again
    import torch

    torch.set_num_threads(1)
    ranks = []
    for rank, pipe in enumerate(pipes):
        ranks.append(os.fork())
        if not ranks[-1]:
            for other in pipes:
                if other is not pipe:
                    other.close()
            _serve(rank, pipe)
            return
    for pipe in pipes:
        pipe.close()
    for pid in ranks:
        os.waitpid(pid, 0)


def _serve(rank: int, pipe: Connection) -> None:
    group = ""
    while True:
        try:
            call = pipe.recv_bytes()
        except (EOFError, ConnectionError):
            return  # the test run is over
        try:
            world_size, file, function, args = pickle.loads(call)
            if file != group:
                _join(rank, world_size, file)
                group = file
            value = function(*args) if rank < world_size else None
            answer = pickle.dumps(("", value))
        except BaseException:  # kept, and raised in the test's process
            answer = pickle.dumps((traceback.format_exc(), None))
        pipe.send_bytes(answer)


def _join(rank: int, world_size: int, file: str) -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
        # DTensor remembers results of its operators with the mesh they were on, and takes an
        # equal mesh for it, whose groups are gone.
        debug = importlib.import_module("torch.distributed.tensor.debug")
        debug._clear_sharding_prop_cache()
    if rank < world_size:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(file, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=GROUP_TIMEOUT_S),
        )


if __name__ == "__main__":
    _fork_ranks([Connection(int(fileno)) for fileno in sys.argv[1:]])
