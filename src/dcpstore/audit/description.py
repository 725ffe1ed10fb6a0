"""What a checkpoint holds and where it lies, told from its metadata alone.

Of ours and of safetensors files without torch; a stock checkpoint's pickle needs it. One GET
for a checkpoint with DCP's metadata (two if its manifest is an object of its own), two per file
for safetensors; no data is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, Literal, TypeAlias

from dcpstore.audit.listing import natural_order
from dcpstore.collector import collector_paused
from dcpstore.config import ReadConfig
from dcpstore.discovery import Discovered, discover, read_file_header
from dcpstore.errors import NotFoundError, StoreError
from dcpstore.format.dtypes import DTYPES
from dcpstore.format.safetensors import TensorInFile
from dcpstore.manifest import ItemId, Manifest, StoredItem
from dcpstore.store.base import Store
from dcpstore.text import count_text

__all__ = [
    "Described",
    "DescribedObject",
    "Description",
    "Shard",
    "collect",
    "describe",
    "describe_file",
    "iter_shards",
]

FileLayout: TypeAlias = Literal["dcpstore", "dcp", "safetensors", "torch_file"]

_RANK_OF = re.compile(r"(?:.*/)?__(\d+)_\d+\.")
_RANK_SEAL = re.compile(r"__(\d+)\.metadata")


@dataclass(frozen=True, slots=True)
class Shard:
    """One stored piece of a key.

    Attributes:
        object_key: The object that holds it.
        start: First byte of its record there.
        stored_bytes: Length of its record, headers included.
        num_bytes: Of its elements; the record's where that is not known.
        offsets: First element in the whole tensor, per dimension; empty for a value.
        sizes: Its shape in elements; empty for a value.
    """

    object_key: str
    start: int
    stored_bytes: int
    num_bytes: int
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()

    @property
    def rank(self) -> int | None:
        """The rank that wrote it, where the object's name tells."""
        return _rank_of(self.object_key)


@dataclass(frozen=True, slots=True)
class Described:
    """One key of the checkpoint.

    Attributes:
        key: Its flattened name.
        dtype: Name of its dtype; empty for a value.
        sizes: Shape of the whole tensor in elements; empty for a value.
        is_tensor: Whether it is a tensor, and not any other value.
        shards: Its stored pieces.
        is_in_state_dict: False for an item that a planner stored beside the state dict.
    """

    key: str
    dtype: str
    sizes: tuple[int, ...]
    is_tensor: bool
    shards: tuple[Shard, ...]
    is_in_state_dict: bool = True

    @property
    def num_elements(self) -> int:
        """Elements of the tensor; 0 for a value."""
        return prod(self.sizes) if self.is_tensor else 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's elements in memory; of a value, as stored."""
        row = DTYPES.get(self.dtype)
        if self.is_tensor and row is not None:
            return prod(self.sizes) * row.item_bytes
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def stored_bytes(self) -> int:
        """Bytes of its records, headers included."""
        return sum(shard.stored_bytes for shard in self.shards)


@dataclass(frozen=True, slots=True)
class DescribedObject:
    """A data object.

    Attributes:
        key: Relative to the checkpoint's folder.
        rank: That wrote it, where the name tells.
        num_items: Records in it.
        stored_bytes: Of these records.
        size_bytes: Of the object, where the metadata tell.
    """

    key: str
    rank: int | None
    num_items: int
    stored_bytes: int
    size_bytes: int | None


@dataclass(frozen=True, slots=True)
class Description:
    """A checkpoint.

    Attributes:
        url: Of its folder or file.
        layout: Who wrote it.
        entries: Its keys, in their natural order.
        objects: Its data objects, by rank and name.
        save_id: Of the save, where it is ours.
        info: What the writer left for people.
        remarks: What a reader should know.
    """

    url: str
    layout: FileLayout
    entries: tuple[Described, ...]
    objects: tuple[DescribedObject, ...]
    save_id: str | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


def describe(store: Store, config: ReadConfig) -> Description:
    """Describe the checkpoint in a folder.

    Raises:
        NotFoundError: If there is none.
        CorruptError: If its metadata are damaged, or a pickle that names more than data.
        IncompatibleError: If a newer dcpstore wrote it.
        StoreError: If the store refuses.
    """
    try:
        found = discover(store, config)
    except NotFoundError as error:
        sealed = [discover(store, config, rank=rank) for rank in _sealed_ranks(store)]
        if not sealed:
            raise NotFoundError(f"{error}. `dcpstore ls` shows what lies below a URL") from error
        with collector_paused():
            return _merge(store.url, [_describe(one, config) for one in sealed])
    with collector_paused():
        return _describe(found, config)


def describe_file(store: Store, name: str) -> Description:
    """Describe one safetensors file of a folder, whatever else lies there.

    Raises:
        NotFoundError: If there is no such file.
        CorruptError: If it is none, or damaged.
    """
    found = {name: read_file_header(store, name)}
    return _of_files(f"{store.url.rstrip('/')}/{name}", found)


def collect(
    entries: Iterable[Described], sizes: Mapping[str, int | None] | None = None
) -> tuple[DescribedObject, ...]:
    """Count what each object holds.

    Args:
        entries: Keys with their shards.
        sizes: Objects that are known, with their size; also those that hold nothing.
    """
    known = dict(sizes or {})
    counts: dict[str, list[int]] = {key: [0, 0] for key in known}
    for entry in entries:
        for shard in entry.shards:
            count = counts.setdefault(shard.object_key, [0, 0])
            count[0] += 1
            count[1] += shard.stored_bytes
    objects = (
        DescribedObject(key, _rank_of(key), num_items, stored_bytes, known.get(key))
        for key, (num_items, stored_bytes) in counts.items()
    )
    return tuple(sorted(objects, key=lambda one: natural_order(one.key)))


def _describe(discovered: Discovered, config: ReadConfig) -> Description:
    if discovered.manifest is not None:
        return _of_manifest(discovered.url, discovered.decode_manifest(config.max_metadata_bytes))
    if discovered.files is not None:
        return _of_files(discovered.url, discovered.files)
    return _of_metadata(discovered.url, discovered.open(config))


def _of_manifest(url: str, manifest: Manifest) -> Description:
    shards = _shards_by_key(manifest.items)
    entries = [
        Described(
            key=entry.fqn,
            dtype=_dtype_in(entry.properties) if entry.properties is not None else "",
            sizes=entry.sizes,
            is_tensor=entry.properties is not None,
            shards=tuple(shards.get(entry.fqn, ())),
            is_in_state_dict=entry.in_state_dict,
        )
        for entry in manifest.entries
    ]
    sizes = {one.key: one.size_bytes for one in manifest.objects}
    return _finish(url, "dcpstore", entries, sizes, save_id=manifest.save_id, info=manifest.info)


def _of_metadata(url: str, metadata: Any) -> Description:
    """Describe what torch's ``Metadata`` names; its classes are not imported here."""
    items = {
        ItemId(index.fqn, None if index.offset is None else tuple(index.offset)): item
        for index, item in metadata.storage_data.items()
    }
    chunk_sizes = {
        ItemId(fqn, tuple(chunk.offsets)): tuple(chunk.sizes)
        for fqn, entry in metadata.state_dict_metadata.items()
        for chunk in getattr(entry, "chunks", ())
    }
    dtypes = {
        fqn: str(entry.properties.dtype).removeprefix("torch.")
        for fqn, entry in metadata.state_dict_metadata.items()
        if hasattr(entry, "chunks")
    }
    shards = _shards_by_key(items, chunk_sizes, dtypes)
    entries = [
        Described(
            key=fqn,
            dtype=dtypes.get(fqn, ""),
            sizes=tuple(entry.size) if fqn in dtypes else (),
            is_tensor=fqn in dtypes,
            shards=tuple(shards.get(fqn, ())),
        )
        for fqn, entry in metadata.state_dict_metadata.items()
    ]
    return _finish(url, "dcp", entries)


def _of_files(url: str, files: Mapping[str, Iterable[TensorInFile]]) -> Description:
    pieces: dict[str, list[tuple[str, TensorInFile]]] = {}
    for name, tensors in files.items():
        for tensor in tensors:
            pieces.setdefault(tensor.fqn, []).append((name, tensor))
    entries = []
    for key, found in pieces.items():
        ends = ([o + n for o, n in zip(t.offsets, t.sizes, strict=True)] for _, t in found)
        entries.append(
            Described(
                key=key,
                dtype=found[0][1].dtype,
                sizes=tuple(map(max, *ends)) if len(found) > 1 else found[0][1].sizes,
                is_tensor=True,
                shards=tuple(_shard_of_file(name, tensor) for name, tensor in found),
            )
        )
    return _finish(url, "safetensors", entries, dict.fromkeys(files))


def _shard_of_file(name: str, tensor: TensorInFile) -> Shard:
    num_bytes = tensor.payload.num_bytes
    return Shard(name, tensor.payload.start, num_bytes, num_bytes, tensor.offsets, tensor.sizes)


def _shards_by_key(
    items: Mapping[ItemId, StoredItem],
    chunk_sizes: Mapping[ItemId, tuple[int, ...]] | None = None,
    dtypes: Mapping[str, str] | None = None,
) -> dict[str, list[Shard]]:
    found: dict[str, list[Shard]] = {}
    for one, item in items.items():
        sizes = (chunk_sizes or {}).get(one, item.sizes)
        num_bytes = item.payload.num_bytes
        row = DTYPES.get((dtypes or {}).get(one.fqn, ""))
        if row is not None:
            num_bytes = prod(sizes) * row.item_bytes
        found.setdefault(one.fqn, []).append(
            Shard(
                object_key=item.key,
                start=item.record.start,
                stored_bytes=item.record.num_bytes,
                num_bytes=num_bytes,
                offsets=one.offsets or (),
                sizes=sizes,
            )
        )
    return found


def _finish(
    url: str,
    layout: FileLayout,
    entries: list[Described],
    sizes: Mapping[str, int | None] | None = None,
    *,
    save_id: str | None = None,
    info: Mapping[str, Any] | None = None,
) -> Description:
    entries.sort(key=lambda entry: natural_order(entry.key))
    return Description(
        url, layout, tuple(entries), collect(entries, sizes), save_id, dict(info or {})
    )


def _merge(url: str, parts: list[Description]) -> Description:
    """Join what ranks sealed each for itself (``use_collectives=False``)."""
    entries = [entry for part in parts for entry in part.entries]
    sizes = {one.key: one.size_bytes for part in parts for one in part.objects}
    joined = _finish(url, parts[0].layout, entries, sizes)
    remark = (
        f"sealed by {count_text(len(parts), 'rank')}, each for itself: keys may come once per rank"
    )
    return Description(joined.url, joined.layout, joined.entries, joined.objects, remarks=(remark,))


def _sealed_ranks(store: Store) -> list[int]:
    try:
        matches = [_RANK_SEAL.fullmatch(info.key) for info in store.list()]
    except NotFoundError:
        return []
    except StoreError as error:
        if not error.denied:
            raise
        return []
    return sorted(int(match[1]) for match in matches if match)


@lru_cache(maxsize=64)  # thousands of tensors share a few texts
def _dtype_in(properties: str) -> str:
    return str(json.loads(properties)["dtype"])


@lru_cache(maxsize=4096)
def _rank_of(object_key: str) -> int | None:
    match = _RANK_OF.match(object_key)
    return int(match[1]) if match else None


def iter_shards(entries: Iterable[Described]) -> Iterator[tuple[Described, Shard]]:
    """Yield every stored piece with its key."""
    for entry in entries:
        for shard in entry.shards:
            yield entry, shard
