"""Other processes: forked from a server that has torch imported, so that they start at once."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import socket
import traceback
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcpstore import ObjectStoreReader, ObjectStoreWriter
from dcpstore.config import WriteConfig
from faults.places import SMALL
from faults.states import save, state_at

_context = multiprocessing.get_context("forkserver")
# Installed packages only: the fork server does not know where the tests lie. `dcpstore` itself
# imports late; what is not named here, each process would import anew.
_OURS = ("loading", "planners", "reader", "saving", "testing.ranks", "writer")
_context.set_forkserver_preload(
    [
        *(f"dcpstore.{module}" for module in _OURS),
        *("numpy", "obstore", "pytest", "s3fs", "torch.distributed.checkpoint"),
    ]
)


def start(target: Callable[..., None], *arguments: Any) -> Any:
    """Start a process."""
    process = _context.Process(target=_guarded, args=(target, *arguments), daemon=True)
    process.start()
    return process


def run(target: Callable[..., None], *arguments: Any, timeout_s: float = 60) -> None:
    """Run a function in a process of its own and wait for it."""
    process = start(target, *arguments)
    process.join(timeout_s)
    assert process.exitcode == 0, f"the other process ended with {process.exitcode}"


def run_ranks(num_ranks: int, target: Callable[..., None], *arguments: Any) -> None:
    """Run ``target(rank, *arguments)`` on ranks joined by gloo."""
    assert exit_codes(num_ranks, target, *arguments) == [0] * num_ranks


def exit_codes(num_ranks: int, target: Callable[..., None], *arguments: Any) -> list[int | None]:
    """Do what `run_ranks` does, where not every rank may end well; None is a rank that hung."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [start(_rank, rank, num_ranks, port, target, *arguments) for rank in range(num_ranks)]
    for process in ranks:
        process.join(90)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        if process.is_alive():
            process.kill()
    return codes


def _guarded(target: Callable[..., None], *arguments: Any) -> None:
    try:
        target(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _rank(rank: int, num_ranks: int, port: int, target: Callable[..., None], *rest: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks
    )
    target(rank, *rest)
    dist.barrier()
    dist.destroy_process_group()


def options(endpoint_url: str) -> dict[str, Any]:
    """Storage options for an embedded S3 that another process started."""
    return {
        "key": "test",
        "secret": "test",
        "endpoint_url": endpoint_url,
        "client_kwargs": {"region_name": "us-east-1"},
    }


def save_step(endpoint_url: str, url: str, step: int, overwrite: bool) -> None:
    """Save the state of a step."""
    writer = ObjectStoreWriter(
        url,
        storage_options=options(endpoint_url),
        overwrite=overwrite,
        config=WriteConfig(**SMALL),
    )
    save(state_at(step), writer)


def save_and_load(rank: int, endpoint_url: str, url: str, folder: Path) -> None:
    """On a rank: save, load, and have rank 0 write down what the server saw of each."""

    def state(fill: float) -> dict[str, Any]:
        return {
            f"own.{rank}": torch.full((50_000,), fill + rank),
            "shared": torch.full((100,), fill),
            "step": int(fill),
        }

    def take_log(name: str) -> None:
        dist.barrier()
        if rank == 0:
            logs[name] = _control(endpoint_url, "log")
            _control(endpoint_url, "clear")
        dist.barrier()

    logs: dict[str, Any] = {}
    take_log("before")
    dcp.save(state(8), storage_writer=ObjectStoreWriter(url, storage_options=options(endpoint_url)))
    take_log("save")
    found = state(0)
    reader = ObjectStoreReader(url, storage_options=options(endpoint_url))
    dcp.load(found, storage_reader=reader)
    take_log("load")
    assert all(
        bool((found[key] == value).all()) for key, value in state(8).items() if key != "step"
    )
    assert found["step"] == 8
    if rank == 0:
        (folder / "log.json").write_text(json.dumps(logs))


def _control(endpoint_url: str, what: str) -> Any:
    with urllib.request.urlopen(f"{endpoint_url}/_dcpstore/{what}", b"{}") as answer:
        return json.load(answer)


def save_for_ever(endpoint_url: str, url: str, engine: str, first_step: int, events: Any) -> None:
    """Save one step after another over the one before, saying what begins and what has ended."""
    writer = ObjectStoreWriter(
        url,
        storage_options=options(endpoint_url),
        overwrite=True,
        config=WriteConfig(**{**SMALL, "engine": engine}),
    )
    for step in itertools.count(first_step):
        state = state_at(step, is_multipart=True)
        events.send(("began", step))
        try:
            save(state, writer)
        except BaseException as error:
            events.send(("failed", f"{step}: {error}"))
            raise
        events.send(("ended", step))


def pipe() -> Any:
    """The two ends of a pipe between this process and another."""
    return _context.Pipe(duplex=False)
