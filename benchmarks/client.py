"""Measurements, each in processes of its own: ``python -m benchmarks.client``.

Reads a job per line and answers with a line of JSON (``null`` for a failure). This process
does nothing but import; it forks for each job, and for each rank of it, so that no job
pays for the imports and none sees what another one left.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import fsspec.asyn  # noqa: F401 - imported before the fork
import obstore.store  # noqa: F401
import s3fs  # noqa: F401
import torch
import torch._dynamo  # the first DTensor wants it
import torch.distributed.checkpoint._fsspec_filesystem
import torch.distributed.tensor

import dcpstore  # noqa: F401
from benchmarks.actions import act
from benchmarks.gauge import merged
from benchmarks.job import Job
from benchmarks.want import Place


def measure(job: Job) -> dict[str, Any] | None:
    """Run the job in one child per rank; None if any failed."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        places = [Place(rank, job.num_ranks) for rank in range(job.num_ranks)]
        children = [_forked(lambda at=at: _join_and_act(job, at, folder)) for at in places]
        results = [_result_of(child) for child in children]
    if any(one is None for one in results):
        return None
    return merged(results) if results[0] else {}


def _join_and_act(job: Job, place: Place, folder: str) -> dict[str, Any]:
    tempfile.tempdir = folder  # also of the peers, which download into files
    if place.num_ranks > 1:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meeting",
            rank=place.rank,
            world_size=place.num_ranks,
            timeout=timedelta(minutes=5),
        )
    return act(job, place)


def _forked(call: Callable[[], object]) -> tuple[int, int]:
    """Call in a child; return its process and the pipe on which it answers."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child:
        os.close(write_end)
        return child, read_end
    status = 1
    try:
        signal.alarm(1800)
        with os.fdopen(write_end, "w") as stream:
            json.dump(call(), stream)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _result_of(child: tuple[int, int]) -> dict[str, Any] | None:
    process, read_end = child
    with os.fdopen(read_end) as stream:
        text = stream.read()
    status = os.waitpid(process, 0)[1]
    return json.loads(text) if status == 0 else None


def main() -> None:
    # Or gcsfs asks Google's control plane what kind of bucket the emulator's is.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    for line in sys.stdin:
        print(json.dumps(measure(Job.from_json(line))), flush=True)


if __name__ == "__main__":
    main()
