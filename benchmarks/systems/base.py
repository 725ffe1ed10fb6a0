"""What a measured system is: something that saves, loads, and perhaps writes in the background.

Torch and the systems themselves are imported by the processes that measure, and not by the
one that only names them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Begin", "Convert", "StateDict", "System", "of_dcp", "quietly"]

StateDict = dict[str, Any]
Options = dict[str, Any]
Convert = Callable[[str, str, Options], str]
Begin = Callable[[StateDict, int], tuple[Callable[[], bool], Callable[[], object]]]
"""Begins to save a step in the background; returns what tells whether it is done, and what waits
for it and raises its failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One way to save and to load.

    Attributes:
        label: For the table.
        layout: Whose checkpoints it loads: those that the system of this name saved.
        save: Called with the state, a folder's URL and fsspec's options for it.
        load: Likewise, with the targets.
        background: Makes what saves in the background, of a run's URL and options. What it keeps
            from one save to the next is its own matter.
        converters: By kind of target (``pt``, ``safetensors``): called with the URL of a
            checkpoint, a folder to write into and the options of both; the URL of the file
            that was written is returned.
        is_variant: Whether it shows what one setting does, in the tables of some rows only.
        is_bare: Whether it knows nothing of tensors and moves bytes only.
        needs: Distributions that it is made of and that are not installed with dcpstore.
        is_here: Whether there is all else that it needs.
    """

    label: str
    layout: str
    save: Callable[[StateDict, str, Options], object]
    load: Callable[[StateDict, str, Options], object]
    background: Callable[[str, Options], Begin] | None = None
    converters: Mapping[str, Convert] = field(default_factory=dict)
    is_variant: bool = False
    is_bare: bool = False
    needs: tuple[str, ...] = ()
    is_here: Callable[[], bool] = lambda: True

    @property
    def lacking(self) -> str:
        """What is not here, for a message."""
        return ", ".join(self.needs) or "a C compiler with OpenSSL's headers"


def of_dcp(
    label: str,
    layout: str,
    *,
    writer: Callable[[str, Options], Any],
    reader: Callable[[str, Options], Any],
    converters: Mapping[str, Convert] | None = None,
    needs: tuple[str, ...] = (),
) -> System:
    """Return the system that a DCP writer and a DCP reader make."""

    def save(state: StateDict, url: str, options: Options) -> None:
        import torch.distributed.checkpoint as dcp

        storage_writer = writer(url, options)
        quietly(lambda: dcp.save(state, storage_writer=storage_writer, no_dist=_is_alone()))

    def load(state: StateDict, url: str, options: Options) -> None:
        import torch.distributed.checkpoint as dcp

        storage_reader = reader(url, options)
        quietly(lambda: dcp.load(state, storage_reader=storage_reader, no_dist=_is_alone()))

    def background(url: str, options: Options) -> Begin:
        import torch.distributed.checkpoint as dcp

        def begin(state: StateDict, step: int) -> tuple[Callable[[], bool], Callable[[], object]]:
            storage_writer = writer(f"{url}/step-{step}", options)
            future: Any = dcp.async_save(state, storage_writer=storage_writer, no_dist=_is_alone())
            return future.done, future.result

        return begin

    return System(
        label=label,
        layout=layout,
        save=save,
        load=load,
        background=background,
        converters=converters or {},
        needs=needs,
    )


def quietly(call: Callable[[], object]) -> None:
    """Call without torch's warnings on ``no_dist`` and the like, which come with every run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call()


def _is_alone() -> bool:
    """Tell whether the ranks of this process's group, if any, exist only in its mesh."""
    import torch.distributed as dist

    return not dist.is_initialized() or dist.get_backend() == "fake"
