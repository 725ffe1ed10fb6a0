"""Clocks and counters around one call: wall, CPU, memory here; requests at the server."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.job import Site, control
from benchmarks.want import Place

__all__ = ["measured", "merged"]

NOBODY = {"served": [], "max_in_flight": 0, "connections": 0, "cpu_s": 0.0}


def measured(site: Site, place: Place, call: Callable[[], object]) -> dict[str, Any]:
    """Call once and tell what it took. With several ranks all of them call; collective."""
    _meet(place)
    if place.rank == 0:
        control(site, "clear")
    baseline = _reset_peak()
    _meet(place)
    spent, began = os.times(), time.perf_counter()
    call()
    wall_s, after = time.perf_counter() - began, os.times()
    peak = _status_bytes("VmHWM")
    _meet(place)
    result = {
        "wall_s": wall_s,
        "cpu_s": after.user + after.system - spent.user - spent.system,
        "extra_bytes": peak - baseline,
    }
    if place.rank == 0:
        result["server"] = control(site, "report") or NOBODY
    return result


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Sum up the ranks of one measurement: the slowest, all CPU and bytes, the largest peak.

    Of training beside a save, what the rank tells that lost most by it.
    """
    return {
        **max(results, key=lambda one: one.get("lost_s", 0.0)),
        "server": results[0]["server"],
        "wall_s": max(one["wall_s"] for one in results),
        "cpu_s": sum(one["cpu_s"] for one in results),
        "extra_bytes": max(one["extra_bytes"] for one in results),
    }


def _meet(place: Place) -> None:
    if place.num_ranks > 1:
        dist.barrier()


def _reset_peak() -> int:
    """Give free memory back to the system, forget the peak, and return what is in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {name}")
