"""Which tensor goes into which file of a Hugging Face folder. Pure.

The rule is Hugging Face's: tensors in their order, a new file where the next tensor would
make the file larger than the limit, a tensor larger than that in a file of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from dcpstore.discovery import INDEX_FILE
from dcpstore.errors import ConfigError, IncompatibleError
from dcpstore.format.dtypes import dtype_name
from dcpstore.format.safetensors import FileLayout, file_dtype, plan_file

__all__ = [
    "SINGLE_FILE",
    "FilePlan",
    "FolderPlan",
    "OutTensor",
    "check_formats",
    "plan_folder",
    "share_files",
]

SINGLE_FILE = "model.safetensors"
"""The key of the file where there is but one."""


@dataclass(frozen=True, slots=True)
class OutTensor:
    """A tensor to be written.

    Attributes:
        fqn: Key in the source.
        name: Name in the file.
        dtype: As written.
        sizes: Shape in elements.
    """

    fqn: str
    name: str
    dtype: torch.dtype
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.sizes) * self.dtype.itemsize

    def is_like(self, other: OutTensor) -> bool:
        """Tell whether another has the same dtype and shape."""
        return (self.dtype, self.sizes) == (other.dtype, other.sizes)


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file.

    Attributes:
        key: Its name in the folder.
        layout: Its header, and where each tensor lies.
        tensors: By name.
    """

    key: str
    layout: FileLayout
    tensors: Mapping[str, OutTensor]


@dataclass(frozen=True, slots=True)
class FolderPlan:
    """A Hugging Face folder.

    Attributes:
        files: In the order of their numbers.
        index: Content of the index; None for a single file.
    """

    files: tuple[FilePlan, ...]
    index: bytes | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of all files, the index included."""
        return (*(file.key for file in self.files), *([INDEX_FILE] if self.index else []))


@dataclass(slots=True)
class _Bin:
    tensors: list[OutTensor] = field(default_factory=list)
    num_bytes: int = 0


def check_formats(tensors: Iterable[OutTensor]) -> None:
    """Check that the format can hold every tensor.

    Raises:
        IncompatibleError: Naming the keys that it cannot, and what to do.
    """
    refused = [t for t in tensors if not _fits(t)]
    if refused:
        shown = ", ".join(f"{t.fqn!r} ({dtype_name(t.dtype)})" for t in refused[:5])
        more = f" and {len(refused) - 5} more" if len(refused) > 5 else ""
        raise IncompatibleError(
            f"safetensors files cannot hold {shown}{more}. Leave them out with exclude=[...], or"
            " convert them with dtype=: torch.complex64 for complex numbers, or a dtype per"
            " pattern of keys. Nothing was written"
        )


def _fits(tensor: OutTensor) -> bool:
    is_pair = tensor.dtype == getattr(torch, "float4_e2m1fn_x2", None)
    return file_dtype(dtype_name(tensor.dtype)) is not None and not (is_pair and not tensor.sizes)


def plan_folder(
    tensors: Sequence[OutTensor], max_shard_bytes: int, about: Mapping[str, str]
) -> FolderPlan:
    """Plan the files of a folder.

    Args:
        tensors: In the order of the state dict.
        max_shard_bytes: Most bytes of tensors in one file, unless one tensor is larger.
        about: Texts for the ``__metadata__`` of each file.

    Raises:
        ConfigError: If a file's header would be longer than readers take, or the limit is none.
    """
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes={max_shard_bytes} must be at least 1")
    bins = _fill(tensors, max_shard_bytes)
    count = len(bins)
    files = tuple(
        _plan_file(_file_name(number, count), one.tensors, about)
        for number, one in enumerate(bins, 1)
    )
    if count == 1:
        return FolderPlan(files)
    weight_map = {name: file.key for file in files for name in file.tensors}
    total = sum(one.num_bytes for one in bins)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {tensor.name: weight_map[tensor.name] for tensor in tensors},
    }
    return FolderPlan(files, json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n")


def _fill(tensors: Sequence[OutTensor], max_bytes: int) -> list[_Bin]:
    """Fill bins in order; a tensor larger than a bin does not end the one before it."""
    bins: list[_Bin] = []
    current = _Bin()
    for tensor in tensors:
        if tensor.num_bytes > max_bytes:
            bins.append(_Bin([tensor], tensor.num_bytes))
            continue
        if current.tensors and current.num_bytes + tensor.num_bytes > max_bytes:
            bins.append(current)
            current = _Bin()
        current.tensors.append(tensor)
        current.num_bytes += tensor.num_bytes
    if current.tensors or not bins:
        bins.append(current)
    return bins


def _file_name(number: int, count: int) -> str:
    return SINGLE_FILE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"


def _plan_file(key: str, tensors: Sequence[OutTensor], about: Mapping[str, str]) -> FilePlan:
    try:
        layout = plan_file({t.name: (dtype_name(t.dtype), t.sizes) for t in tensors}, about)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}. Lower max_shard_bytes") from error
    return FilePlan(key, layout, {tensor.name: tensor for tensor in tensors})


def share_files(files: Sequence[FilePlan], num_ranks: int) -> list[list[FilePlan]]:
    """Deal files out to ranks: the largest first, to the rank with the fewest bytes so far."""
    shares: list[list[FilePlan]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for file in sorted(files, key=lambda one: (-one.layout.size_bytes, one.key)):
        rank = loads.index(min(loads))
        shares[rank].append(file)
        loads[rank] += file.layout.size_bytes
    return shares
