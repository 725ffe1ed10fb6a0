"""Torch's ``Metadata`` to and from what is stored: a manifest, a stock pickle, safetensors.

Pure; no I/O.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from operator import add
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcpstore.config import ReadConfig
from dcpstore.errors import CorruptError, IncompatibleError
from dcpstore.format.dtypes import dtype_from_name
from dcpstore.format.manifest import Entry, ItemId, Manifest, Path, StoredItem
from dcpstore.format.safetensors import TensorInFile
from dcpstore.format.seal import check_relative, save_id_of
from dcpstore.format.stock import load_metadata_pickle
from dcpstore.store.base import ByteRange
from dcpstore.text import collector_paused
from dcpstore.torch_private import make_storage_info


def item_id(index: MetadataIndex) -> ItemId:
    """Return the torch-free form of an index; its hint is dropped, as in comparisons."""
    return ItemId(index.fqn, None if index.offset is None else tuple(index.offset))


def expected_items(metadata: Metadata) -> Iterable[ItemId]:
    """Yield every item that a complete checkpoint of this metadata holds."""
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            for chunk in entry.chunks:
                yield ItemId(fqn, tuple(chunk.offsets))
        else:
            yield ItemId(fqn, None)


def entries_of(metadata: Metadata, items: Iterable[ItemId]) -> tuple[Entry, ...]:
    """Return the manifest's entries: the state dict's keys, then those only ``items`` name."""
    entries = []
    for fqn, value in metadata.state_dict_metadata.items():
        if isinstance(value, TensorStorageMetadata):
            entries.append(Entry(fqn, _properties_text(value.properties), tuple(value.size)))
        else:
            entries.append(Entry(fqn, None))
    known = set(metadata.state_dict_metadata)
    extra = dict.fromkeys(one.fqn for one in items if one.fqn not in known)
    return (*entries, *(Entry(fqn, None, in_state_dict=False) for fqn in extra))


def planner_paths_of(planner_data: Any) -> Mapping[str, Path] | None:
    """Return DCP's flattening map if ``planner_data`` is one; None if it is anything else."""
    if not isinstance(planner_data, Mapping):
        return None
    for fqn, path in planner_data.items():
        if not isinstance(fqn, str) or not isinstance(path, tuple):
            return None
        if not all(type(step) in (str, int) for step in path):
            return None
    return dict(planner_data)


def metadata_from_manifest(manifest: Manifest) -> Metadata:
    """Rebuild the ``Metadata`` of a checkpoint of ours, with `StoredItem` as storage data.

    Raises:
        IncompatibleError: If this torch lacks a dtype, layout or memory format that is named.
    """
    size_of = cache(torch.Size)  # scalars and layers share their shapes
    chunks: dict[str, list[ChunkStorageMetadata]] = {}
    storage: dict[MetadataIndex, StoredItem] = {}
    for one, item in manifest.items.items():
        hint = None
        if one.offsets is not None:
            known = chunks.setdefault(one.fqn, [])
            hint = len(known)
            known.append(ChunkStorageMetadata(size_of(one.offsets), size_of(item.sizes)))
        storage[MetadataIndex(one.fqn, one.offsets, hint)] = item
    state_dict_metadata: dict[str, Any] = {}
    for entry in manifest.entries:
        if entry.properties is not None:
            state_dict_metadata[entry.fqn] = TensorStorageMetadata(
                TensorProperties(**_property_fields(entry.properties)),
                size_of(entry.sizes),
                chunks.get(entry.fqn, []),
            )
        elif entry.in_state_dict:
            state_dict_metadata[entry.fqn] = BytesStorageMetadata()
    return Metadata(state_dict_metadata, manifest.planner_paths, storage)


def stock_storage_data(items: Mapping[MetadataIndex, StoredItem]) -> dict[MetadataIndex, object]:
    """Return the storage data that stock readers understand."""
    return {
        index: make_storage_info(
            item.key, item.record.start, item.record.num_bytes, item.transforms
        )
        for index, item in items.items()
    }


def stock_items(metadata: Metadata) -> dict[MetadataIndex, StoredItem]:
    """Turn the storage data of a checkpoint by a stock writer into stored items.

    Raises:
        CorruptError: If an entry has no place in an object, or one outside the folder.
    """
    if not isinstance(metadata.storage_data, Mapping):
        raise CorruptError(
            "the checkpoint's metadata does not say where its items lie"
            f" (storage_data is {type(metadata.storage_data).__name__})"
        )
    items: dict[MetadataIndex, StoredItem] = {}
    keys: dict[str, str] = {}
    entries = metadata.state_dict_metadata.items()
    try:
        tensors = {fqn for fqn, entry in entries if isinstance(entry, TensorStorageMetadata)}
        for index, info in metadata.storage_data.items():
            path = str(info.relative_path)
            record = ByteRange(int(info.offset), int(info.offset) + int(info.length))
            if record.start < 0 or record.end < record.start:
                raise CorruptError(f"{index.fqn!r} has the impossible range {record}", key=path)
            key = keys.get(path)
            if key is None:
                key = keys[path] = check_relative(path)
            items[index] = StoredItem(
                key=key,
                record=record,
                kind="record" if index.fqn in tensors else "bytes",
                payload=record,
                transforms=tuple(getattr(info, "transform_descriptors", None) or ()),
            )
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        # Only of metadata that came in by plain pickle: others were checked when they were opened.
        raise CorruptError(
            f"the checkpoint's metadata does not say where its items lie: {type(error).__name__}:"
            f" {str(error)[:200]}"
        ) from error
    return items


def _properties_text(properties: TensorProperties) -> str:
    return json.dumps(
        {
            "dtype": _name(properties.dtype),
            "layout": _name(properties.layout),
            "memory_format": _name(properties.memory_format),
            "requires_grad": bool(properties.requires_grad),
            "pin_memory": bool(properties.pin_memory),
        },
        separators=(",", ":"),
    )


@lru_cache(maxsize=64)  # thousands of tensors share a few texts
def _property_fields(text: str) -> Mapping[str, Any]:
    fields = json.loads(text)
    return {
        "dtype": _value(fields["dtype"], torch.dtype),
        "layout": _value(fields["layout"], torch.layout),
        "requires_grad": fields["requires_grad"],
        "memory_format": _value(fields["memory_format"], torch.memory_format),
        "pin_memory": fields["pin_memory"],
    }


def _name(value: object) -> str:
    return str(value).removeprefix("torch.")


def _value(name: str, kind: type) -> Any:
    value = getattr(torch, name, None)
    if not isinstance(value, kind):
        raise IncompatibleError(
            f"the manifest names torch.{name}, which this torch {torch.__version__} does not know"
            f" as a {kind.__name__}; load with the torch that saved it or a newer one"
        )
    return value


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
            dtype = dtype_from_name(tensor.dtype)
            ends = torch.Size(map(add, tensor.offsets, tensor.sizes))
            known = entries.get(tensor.fqn)
            if known is None:
                known = TensorStorageMetadata(TensorProperties(dtype=dtype), ends, [])
                entries[tensor.fqn] = known
            elif known.properties.dtype != dtype or len(known.size) != len(ends):
                raise IncompatibleError(
                    f"{key}: {tensor.fqn!r} has another dtype or rank than its shards in other"
                    " files"
                )
            known.size = torch.Size(map(max, known.size, ends))
            index = MetadataIndex(tensor.fqn, tensor.offsets, len(known.chunks))
            offsets, sizes = torch.Size(tensor.offsets), torch.Size(tensor.sizes)
            known.chunks.append(ChunkStorageMetadata(offsets, sizes))
            storage[index] = StoredItem(
                key=key,
                record=tensor.payload,
                kind="raw",
                payload=tensor.payload,
                dtype=tensor.dtype,
                sizes=tensor.sizes,
            )
    return Metadata(entries, storage_data=storage, storage_meta=StorageMeta(url))
