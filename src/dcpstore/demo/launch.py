"""Run one function on several processes, one per rank, and leave none behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import TypeVar

S = TypeVar("S")

STOP_GRACE_S = 5.0


class RanksError(Exception):
    """A rank ended badly or too late; what it said is on standard error."""


def run_ranks(
    function: Callable[[S, int], None],
    spec: S,
    num_ranks: int,
    *,
    timeout_s: float,
    imported_once: Sequence[str] = (),
) -> None:
    """Call ``function(spec, rank)`` on ``num_ranks`` new processes and wait for them.

    When one rank fails, the others are ended at once, since they would wait for it.

    Args:
        function: A module's own function, so that a spawned process can import it.
        spec: What every rank gets; must pickle.
        num_ranks: Number of processes.
        timeout_s: Seconds until the ranks count as hung.
        imported_once: Modules for the process that all ranks are forked from, which stays
            until this one ends: they are imported there and not on each rank.

    Raises:
        RanksError: If a rank exits with anything but 0 or the time is over.
    """
    context = multiprocessing.get_context("forkserver")
    if imported_once:
        context.set_forkserver_preload(list(imported_once))
    processes = [
        context.Process(
            target=_run_rank, args=(function, spec, rank), name=f"rank {rank}", daemon=True
        )
        for rank in range(num_ranks)
    ]
    try:
        with deaf_to_interrupts():
            for process in processes:
                process.start()
        _wait_for_all(processes, time.monotonic() + timeout_s)
    finally:
        _stop(processes)


@contextlib.contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Let processes started inside never hear ctrl-C; the caller hears it on leaving.

    A terminal sends ctrl-C to all processes at once, but the parent alone decides what ends.
    """
    # It would start with the first process and unblock the signal behind our back.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait_for_all(processes: Sequence[BaseProcess], deadline_s: float) -> None:
    running = list(processes)
    while running:
        remaining_s = deadline_s - time.monotonic()
        ended = wait([process.sentinel for process in running], timeout=max(0.0, remaining_s))
        if not ended:
            raise RanksError(f"{', '.join(p.name for p in running)} did not end in time")
        for process in [p for p in running if p.sentinel in ended]:
            process.join()
            if process.exitcode != 0:
                raise RanksError(f"{process.name} ended with exit code {process.exitcode}")
            running.remove(process)


def _stop(processes: Sequence[BaseProcess]) -> None:
    started = [process for process in processes if process.pid is not None]
    for process in started:
        process.terminate()
    deadline_s = time.monotonic() + STOP_GRACE_S
    for process in started:
        process.join(max(0.0, deadline_s - time.monotonic()))
        if process.exitcode is None:
            process.kill()
            process.join()


def _run_rank(function: Callable[[S, int], None], spec: S, rank: int) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    function(spec, rank)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
