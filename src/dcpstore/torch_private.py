"""The one place that names torch's private symbols, one section per user.

What is private may move between releases: each entry says where it is used and what
happens when it is gone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = [
    "dcp_format_version",
    "default_extension_registry",
    "make_storage_info",
    "wait_async_collective",
]

# --- format.record ---------------------------------------------------------------


def wait_async_collective(tensor: torch.Tensor) -> torch.Tensor:
    """Return the finished tensor behind an ``AsyncCollectiveTensor``; others unchanged.

    The module is looked up rather than imported: where nobody imported it, there is no
    such tensor. Should the class move, the tensor is saved as an opaque one.
    """
    module = sys.modules.get("torch.distributed._functional_collectives")
    kind = getattr(module, "AsyncCollectiveTensor", None)
    if kind is None or not isinstance(tensor, kind):
        return tensor
    waited: torch.Tensor = tensor.wait()
    return waited


# --- metadata --------------------------------------------------------------------


def make_storage_info(
    relative_path: str, offset: int, length: int, transforms: Sequence[str]
) -> object:
    """Make the value that stock readers look for in ``Metadata.storage_data``.

    Part of the stored format since torch 2.0; without it stock readers could not load.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    info = _StorageInfo(relative_path, offset, length)
    if transforms:  # torch 2.6 has no such field
        info.transform_descriptors = list(transforms)
    return info


def dcp_format_version() -> str | None:
    """Return the version that stock writers put into ``Metadata.version`` (None before 2.7)."""
    from torch.distributed.checkpoint import filesystem

    return getattr(filesystem, "CURRENT_DCP_VERSION", None)


# --- fetch -------------------------------------------------------------------------


def default_extension_registry() -> Any:
    """Return DCP's registry of stream extensions (experimental in torch; there since 2.6)."""
    from torch.distributed.checkpoint._extension import ExtensionRegistry

    return ExtensionRegistry()
