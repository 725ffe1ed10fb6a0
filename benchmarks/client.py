"""Measurements, each in a process of its own: ``python -m benchmarks.client``.

Reads a job per line and answers with a line of JSON (``null`` for a failure). This process
does nothing but import; it forks for each job, so that no job pays for the imports and
none sees what another one left. In the child the state, the targets and one tiny save and
load come first; then the clocks and counters are reset and one call is measured.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
import traceback
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec.asyn  # noqa: F401 - imported before the fork
import obstore.store  # noqa: F401
import s3fs  # noqa: F401
import torch
import torch.distributed.checkpoint._fsspec_filesystem
import torch.distributed.tensor

import dcpstore  # noqa: F401
from benchmarks.states import Want, check, make_state, make_targets, needed_bytes
from benchmarks.systems import BUCKET, SYSTEMS, storage_options


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to measure.

    Attributes:
        endpoint_url: The server.
        action: ``seed`` (an unmeasured save), ``save`` or ``load``.
        system: A name in `SYSTEMS`.
        kind: Of the state, see `benchmarks.states`.
        num_bytes: Size of the state.
        want: What a load asks for.
        folder: Where the checkpoint is, or goes to.
    """

    endpoint_url: str
    action: str
    system: str
    kind: str
    num_bytes: int
    want: Want
    folder: str


def control(endpoint_url: str, what: str, **given: object) -> Any:
    """Talk to the server out of band."""
    request = urllib.request.Request(
        f"{endpoint_url}/_bench/{what}", json.dumps(given).encode(), method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def measure(job: Job) -> dict[str, Any]:
    """Warm up, measure one call, check its result."""
    system, options = SYSTEMS[job.system], storage_options(job.endpoint_url)
    url = f"s3://{BUCKET}/{job.folder}"
    tiny = {"weight": torch.zeros(1 << 18)}
    if job.action == "seed":
        system.save(_state(job), url, options)
        return {}
    if job.action == "save":
        state = _state(job)
        system.save(tiny, f"{url}-warm", options)
        return _measured(job, lambda: system.save(state, url, options), needed_bytes(state))
    targets = make_targets(job.kind, job.num_bytes, job.want)
    system.save(tiny, f"{url}-warm-{os.getpid()}", options)
    system.load(tiny, f"{url}-warm-{os.getpid()}", options)
    result = _measured(job, lambda: system.load(targets, url, options), needed_bytes(targets))
    if system.layout != "bare":
        check(targets, job.kind, job.num_bytes, job.want)
    return result


def _state(job: Job) -> dict[str, torch.Tensor]:
    """Return what to save; for the bare engine in one piece, as it knows no tensors."""
    state = make_state(job.kind, job.num_bytes)
    if job.system != "bare":
        return state
    return {"all": torch.cat([state.pop(name).view(-1) for name in list(state)])}


def _measured(job: Job, call: Any, num_bytes: int) -> dict[str, Any]:
    control(job.endpoint_url, "clear")
    baseline = _reset_peak()
    spent, began = os.times(), time.perf_counter()
    call()
    wall_s, after = time.perf_counter() - began, os.times()
    peak = _status_bytes("VmHWM")
    report = control(job.endpoint_url, "report")
    return {
        "wall_s": wall_s,
        "cpu_s": after.user + after.system - spent.user - spent.system,
        "extra_bytes": peak - baseline,
        "needed_bytes": num_bytes,
        "server": report,
    }


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


def _measure_in_child(line: str) -> bool:
    given = json.loads(line)
    job = Job(**{**given, "want": Want(**given["want"])})
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    status = 1
    try:
        print(json.dumps(measure(job)), flush=True)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def main() -> None:
    for line in sys.stdin:
        if not _measure_in_child(line):
            print("null", flush=True)


if __name__ == "__main__":
    main()
