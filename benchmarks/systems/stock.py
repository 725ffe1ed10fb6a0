"""Stock DCP: torch's own fsspec writer and reader."""

from __future__ import annotations

import tempfile
from typing import Any

from benchmarks.systems.base import Convert, StateDict, System, of_dcp, quietly

__all__ = ["stock", "stock_hugging_face"]


def stock(label: str, layout: str, *, threads: int = 1) -> System:
    """Return torch's writer with ``thread_count=threads`` (a file per thread), and its reader."""

    def writer(url: str, options: dict[str, Any]) -> Any:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        return FsspecWriter(url, thread_count=threads, **options)

    converters: dict[str, Convert] = {"pt": _to_pt, "safetensors": _to_safetensors}
    return of_dcp(label, layout, writer=writer, reader=_reader, converters=converters)


def stock_hugging_face(label: str, layout: str) -> System:
    """Return torch's Hugging Face writer and reader, which know local folders only, and s3fs."""
    return System(label=label, layout=layout, save=_save_hf, load=_load_hf)


def _save_hf(state: StateDict, url: str, options: dict[str, Any]) -> None:
    import fsspec
    import torch.distributed.checkpoint as dcp

    with tempfile.TemporaryDirectory() as folder:
        writer = dcp.HuggingFaceStorageWriter(folder)
        quietly(lambda: dcp.save(state, storage_writer=writer, no_dist=True))
        remote, path = fsspec.url_to_fs(url, **options)
        remote.put(f"{folder}/", f"{path}/", recursive=True)


def _load_hf(state: StateDict, url: str, options: dict[str, Any]) -> None:
    import fsspec
    import torch.distributed.checkpoint as dcp

    with tempfile.TemporaryDirectory() as folder:
        remote, path = fsspec.url_to_fs(url, **options)
        remote.get(f"{path}/", f"{folder}/", recursive=True)
        reader = dcp.HuggingFaceStorageReader(folder)
        quietly(lambda: dcp.load(state, storage_reader=reader, no_dist=True))


def _reader(url: str, options: dict[str, Any]) -> Any:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    return FsspecReader(url, **options)


def _whole_state(url: str, options: dict[str, Any]) -> dict[str, Any]:
    """Do what ``dcp_to_torch_save`` does, from a URL rather than a local folder."""
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    quietly(
        lambda: _load_state_dict(
            state, storage_reader=_reader(url, options), planner=planner, no_dist=True
        )
    )
    return state


def _to_pt(source: str, folder: str, options: dict[str, Any]) -> str:
    import fsspec
    import torch

    state = _whole_state(source, options)
    with fsspec.open(f"{folder}/state.pt", "wb", **options) as stream:
        torch.save(state, stream)
    return f"{folder}/state.pt"


def _to_safetensors(source: str, folder: str, options: dict[str, Any]) -> str:
    import fsspec
    from safetensors.torch import save

    data = save(_whole_state(source, options))
    with fsspec.open(f"{folder}/model.safetensors", "wb", **options) as stream:
        stream.write(data)
    return f"{folder}/model.safetensors"
