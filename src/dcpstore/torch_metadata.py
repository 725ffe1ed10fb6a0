"""Torch's ``Metadata`` of what `dcpstore.discovery` finds: ours, a stock pickle, or files.

Pure; no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcpstore.collector import collector_paused
from dcpstore.config import ReadConfig
from dcpstore.errors import CorruptError, IncompatibleError
from dcpstore.format.dtypes import dtype_from_name
from dcpstore.format.safetensors import TensorInFile
from dcpstore.keys import save_id_of
from dcpstore.manifest import Manifest, StoredItem
from dcpstore.metadata import metadata_from_manifest, stock_items
from dcpstore.trust import load_metadata_pickle

__all__ = ["metadata_of_files", "open_ours", "open_stock"]


def open_ours(
    url: str, key: str, manifest: Manifest, pickled: bytes | None, config: ReadConfig
) -> Metadata:
    """Make torch's metadata of ours; open the pickle only for planner's data that lie nowhere else.

    Raises:
        CorruptError: If the pickle is damaged or names more than data.
        IncompatibleError: If this torch lacks a dtype, layout or memory format that is named.
    """
    metadata = metadata_from_manifest(manifest)
    if pickled is not None:
        stock = _load(pickled, key, config)
        metadata.planner_data = stock.planner_data
    metadata.storage_meta = StorageMeta(checkpoint_id=url, save_id=manifest.save_id)
    return metadata


def open_stock(data: bytes, key: str, config: ReadConfig) -> Metadata:
    """Open the pickle of a stock DCP writer, with `StoredItem` as storage data.

    Raises:
        CorruptError: If it is damaged, names more than data, or was ours and lost its footer.
    """
    metadata = _load(data, key, config)
    with collector_paused():
        metadata.storage_data = items = stock_items(metadata)
    keys = {item.key for item in items.values()}
    if config.verify and any(map(save_id_of, keys)):
        raise CorruptError(
            f"{key} was written by dcpstore and has lost the footer that leads to its checksums:"
            " it was cut short, or another tool rewrote it. Save again, or load it unverified with"
            " ReadConfig(verify=False)",
            key=key,
        )
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    return metadata


def _load(data: bytes, key: str, config: ReadConfig) -> Metadata:
    metadata = load_metadata_pickle(
        data, key=key, allow_pickle=config.allow_pickle, max_bytes=config.max_metadata_bytes
    )
    if not isinstance(metadata, Metadata):
        raise CorruptError(f"{key} holds a {type(metadata).__name__}, not DCP metadata", key=key)
    return metadata


def metadata_of_files(url: str, files: Mapping[str, Sequence[TensorInFile]]) -> Metadata:
    """Make the metadata of a folder of safetensors files from their headers.

    Raises:
        IncompatibleError: If shards of one tensor differ in dtype or rank.
    """
    entries: dict[str, Any] = {}
    storage: dict[MetadataIndex, StoredItem] = {}
    for key, tensors in files.items():
        for tensor in tensors:
            _add_tensor(entries, storage, key, tensor)
    return Metadata(entries, storage_data=storage, storage_meta=StorageMeta(url))


def _add_tensor(
    entries: dict[str, Any],
    storage: dict[MetadataIndex, StoredItem],
    key: str,
    tensor: TensorInFile,
) -> None:
    dtype = dtype_from_name(tensor.dtype)
    chunk = ChunkStorageMetadata(torch.Size(tensor.offsets), torch.Size(tensor.sizes))
    ends = [offset + size for offset, size in zip(tensor.offsets, tensor.sizes, strict=True)]
    known = entries.get(tensor.fqn)
    if known is None:
        known = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(ends), [])
        entries[tensor.fqn] = known
    elif known.properties.dtype != dtype or len(known.size) != len(ends):
        raise IncompatibleError(
            f"{key}: {tensor.fqn!r} has another dtype or rank than its shards in other files"
        )
    known.size = torch.Size([max(a, b) for a, b in zip(known.size, ends, strict=True)])
    known.chunks.append(chunk)
    storage[MetadataIndex(tensor.fqn, tensor.offsets, len(known.chunks) - 1)] = StoredItem(
        key=key,
        record=tensor.payload,
        kind="raw",
        payload=tensor.payload,
        dtype=tensor.dtype,
        sizes=tensor.sizes,
    )
