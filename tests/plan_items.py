"""Items of save plans, made by hand."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

Shape = tuple[int, ...]


def shard(
    fqn: str,
    offsets: Shape,
    sizes: Shape,
    size: Shape,
    *,
    dtype: torch.dtype = torch.float32,
    kind: WriteItemType = WriteItemType.SHARD,
    hint: int | None = None,
) -> WriteItem:
    """A chunk of a tensor."""
    chunk = metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    properties = metadata.TensorProperties(dtype=dtype)
    data = TensorWriteData(chunk, properties, torch.Size(size))
    return WriteItem(metadata.MetadataIndex(fqn, offsets, hint), kind, tensor_data=data)


def rows(fqn: str, start: int, length: int, size: int, dtype: torch.dtype) -> WriteItem:
    """A chunk of a tensor of one dimension."""
    return shard(fqn, (start,), (length,), (size,), dtype=dtype)


def whole(fqn: str, size: Shape, dtype: torch.dtype = torch.float32) -> WriteItem:
    """A whole tensor."""
    zeros = (0,) * len(size)
    return shard(fqn, zeros, size, size, dtype=dtype, kind=WriteItemType.TENSOR)


def value(fqn: str, num_bytes: int | None = None) -> WriteItem:
    """What is no tensor."""
    data = None if num_bytes is None else BytesIOWriteData(num_bytes)
    return WriteItem(metadata.MetadataIndex(fqn), WriteItemType.BYTE_IO, bytes_io_data=data)
