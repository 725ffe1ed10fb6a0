"""What one process does for a job: prepare, warm up, measure one call, check its result."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

import fsspec
import torch

from benchmarks.gauge import measured
from benchmarks.job import Job
from benchmarks.states import check, make_state, make_targets, needed_bytes
from benchmarks.systems import SYSTEMS
from benchmarks.training import train_beside
from benchmarks.want import Place

__all__ = ["act"]


def act(job: Job, place: Place) -> dict[str, Any]:
    """Do it. With several ranks all of them call; collective."""
    system, options = SYSTEMS[job.system], job.site.options
    if job.action == "forget":
        return _forget(job)
    if job.action == "seed":
        system.save(_state(job, place), job.url, options)
        return {}
    _warm_up(job)
    return _ACTIONS[job.action](job, place)


def _save(job: Job, place: Place) -> dict[str, Any]:
    state, options = _state(job, place), job.site.options
    found = measured(job.site, place, lambda: SYSTEMS[job.system].save(state, job.url, options))
    return {**found, "needed_bytes": needed_bytes(state)}


def _load(job: Job, place: Place) -> dict[str, Any]:
    system, options = SYSTEMS[job.system], job.site.options
    targets = make_targets(job.kind, job.num_bytes, job.want, place)
    found = measured(job.site, place, lambda: system.load(targets, job.url, options))
    if not system.is_bare:
        check(targets, job.kind, job.num_bytes, job.want, place)
    # Ranks that load the same need it once; shards add up to the state.
    parts = place.num_ranks if job.want.shard_dim is not None else 1
    return {**found, "needed_bytes": parts * needed_bytes(targets)}


def _train(job: Job, place: Place) -> dict[str, Any]:
    # Plain tensors under names of each rank's own: stock's copy of sharded ones fails on a host.
    part = make_state(job.kind, job.num_bytes // place.num_ranks, job.want, place)
    state = {f"rank{place.rank}.{name}": tensor for name, tensor in part.items()}
    options = job.site.options
    call, times = train_beside(SYSTEMS[job.system], state, job.url, options)
    found = measured(job.site, place, call)
    return {**found, "needed_bytes": needed_bytes(state), **times}


def _convert(job: Job, place: Place) -> dict[str, Any]:
    options, folder = job.site.options, f"{job.url}-as"
    convert, written = SYSTEMS[job.system].converters[job.target], []
    found = measured(job.site, place, lambda: written.append(convert(job.url, folder, options)))
    with fsspec.open(written[0], "rb", **options) as stream:
        loaded = _LOADERS[job.target](stream.read())
    check(loaded, job.kind, job.num_bytes, job.want, place)
    assert set(loaded) == set(make_state(job.kind, job.num_bytes, job.want, place))
    return {**found, "needed_bytes": needed_bytes(loaded)}


def _load_pt(data: bytes) -> dict[str, Any]:
    return dict(torch.load(io.BytesIO(data), weights_only=True))


def _load_safetensors(data: bytes) -> dict[str, Any]:
    from safetensors.torch import load

    return load(data)


_ACTIONS = {"save": _save, "load": _load, "train": _train, "convert": _convert}
_LOADERS = {"pt": _load_pt, "safetensors": _load_safetensors}


def _warm_up(job: Job) -> None:
    """Save and load one small tensor: imports, clients and connections are nobody's cost."""
    system, options = SYSTEMS[job.system], job.site.options
    tiny = {"weight": torch.zeros(1 << 18)}
    # All ranks of a measurement have one directory for temporary files, and no other has it.
    url = f"{job.url}-warm-{Path(tempfile.gettempdir()).name}"
    system.save(tiny, url, options)
    system.load(tiny, url, options)
    if job.target:
        system.converters[job.target](url, f"{url}-as", options)


def _state(job: Job, place: Place) -> dict[str, torch.Tensor]:
    """Return what to save; for the bare engine in one piece, as it knows no tensors."""
    state = make_state(job.kind, job.num_bytes, job.want, place)
    if not SYSTEMS[job.system].is_bare:
        return state
    names = list(state)
    return {"all": torch.cat([state.pop(name).view(-1).view(torch.uint8) for name in names])}


def _forget(job: Job) -> dict[str, Any]:
    fs, path = fsspec.core.url_to_fs(job.site.url, **job.site.options)
    for found in fs.ls(path):
        if found.rpartition("/")[2].startswith(job.folder):
            fs.rm(found, recursive=True)
    return {}
