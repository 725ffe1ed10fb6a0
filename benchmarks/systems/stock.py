"""Stock DCP: torch's own fsspec writer and reader."""

from __future__ import annotations

from typing import Any

from benchmarks.systems.base import Convert, System, of_dcp, quietly

__all__ = ["stock"]


def stock(label: str, layout: str, *, threads: int = 1) -> System:
    """Return torch's writer with ``thread_count=threads`` (a file per thread), and its reader."""

    def writer(url: str, options: dict[str, Any]) -> Any:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        return FsspecWriter(url, thread_count=threads, **options)

    converters: dict[str, Convert] = {"pt": _to_pt, "safetensors": _to_safetensors}
    return of_dcp(label, layout, writer=writer, reader=_reader, converters=converters)


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
