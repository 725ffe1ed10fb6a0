"""Converters: from the checkpoint that is there to the file that the next tool wants, and back.

Torch is imported when a converter is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dcpstore.convert.selection import ConvertResult

if TYPE_CHECKING:
    from dcpstore.convert.dcp.copy import dcp_to_dcp
    from dcpstore.convert.safetensors.convert import dcp_to_safetensors, safetensors_to_dcp
    from dcpstore.convert.torch.from_dcp import dcp_to_torch_save
    from dcpstore.convert.torch.to_dcp import torch_save_to_dcp

__all__ = [
    "ConvertResult",
    "dcp_to_dcp",
    "dcp_to_safetensors",
    "dcp_to_torch_save",
    "safetensors_to_dcp",
    "torch_save_to_dcp",
]

_LAZY = {
    "dcp_to_dcp": "dcpstore.convert.dcp.copy",
    "dcp_to_torch_save": "dcpstore.convert.torch.from_dcp",
    "torch_save_to_dcp": "dcpstore.convert.torch.to_dcp",
    "dcp_to_safetensors": "dcpstore.convert.safetensors.convert",
    "safetensors_to_dcp": "dcpstore.convert.safetensors.convert",
}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
