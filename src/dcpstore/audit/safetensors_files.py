"""Checks of safetensors folders: structure only, since the format has no checksums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from dcpstore.audit.scan import Finding, Inventory, Scanner
from dcpstore.errors import CorruptError, NotFoundError, StoreError
from dcpstore.format.safetensors import TensorInFile
from dcpstore.plan.coverage import find_flaws
from dcpstore.read.discovery import INDEX_FILE, read_file_header, read_index, safetensors_files
from dcpstore.store.base import ObjectInfo, Store
from dcpstore.store.ranges import ByteRange


class FileContents:
    """A Hugging Face folder, as its index or a listing tells.

    Args:
        keys: Its safetensors files.
        weight_map: The index's map from tensor to file; None without an index.
    """

    def __init__(self, keys: Sequence[str], weight_map: Mapping[str, str] | None) -> None:
        self._keys = keys
        self._weight_map = weight_map
        self._files: dict[str, Sequence[TensorInFile]] = {}

    @property
    def layout(self) -> str:
        """Always the same."""
        return "safetensors"

    @property
    def num_keys(self) -> int:
        """Keys of the state dict."""
        return len({one.fqn for tensors in self._files.values() for one in tensors})

    @property
    def num_items(self) -> int:
        """Stored tensors and shards."""
        return sum(map(len, self._files.values()))

    @property
    def data_keys(self) -> frozenset[str]:
        """The files."""
        return frozenset(self._keys)

    @property
    def metadata_keys(self) -> frozenset[str]:
        """The index, if there is one."""
        return frozenset() if self._weight_map is None else frozenset([INDEX_FILE])

    @property
    def checked_bytes(self) -> int:
        """None: there is nothing to compare bytes with."""
        return 0

    def examine(self, store: Store, inventory: Inventory, scanner: Scanner) -> Iterator[Finding]:
        """Compare everything with the headers; yield what is wrong, in no order."""
        for key in self._keys:
            info = inventory.objects.get(key)
            if key in inventory.refused:
                yield Finding("unreadable", str(inventory.refused[key]), key)
            elif info is None:
                yield Finding("missing", "the index or the other files' names promise it", key)
        present = [key for key in self._keys if key in inventory.objects]
        with ThreadPoolExecutor(scanner.max_requests, "dcpstore-audit") as executor:
            checked = list(
                executor.map(lambda key: _check_file(store, key, inventory.objects[key]), present)
            )
        for key, (tensors, found) in zip(present, checked, strict=True):
            if tensors is not None:
                self._files[key] = tensors
            yield from found
        yield from _check_shards(self._files)
        if self._weight_map is not None:
            yield from _check_index(self._weight_map, self._files)

    def notes(self) -> Iterator[str]:
        """Yield what was not checked and why."""
        yield (
            "not checked: the values. The safetensors format has no checksums; headers, sizes and"
            " index were compared"
        )


def open_files(store: Store) -> FileContents:
    """Name the files of a folder that has no DCP metadata.

    Raises:
        CorruptError: If its index is damaged.
    """
    return FileContents(safetensors_files(store), read_index(store))


def _check_file(
    store: Store, key: str, info: ObjectInfo
) -> tuple[Sequence[TensorInFile] | None, list[Finding]]:
    """Read the header of a file and compare it with the file's size."""
    try:
        tensors = sorted(read_file_header(store, key), key=lambda one: one.payload)
    except (CorruptError, NotFoundError) as error:
        return None, [Finding("metadata", str(error), key, span=ByteRange(0, info.size_bytes))]
    except StoreError as error:
        if error.retryable:
            raise
        return None, [Finding("unreadable", str(error), key)]
    return tensors, list(_check_places(key, tensors, info.size_bytes))


def _check_places(key: str, tensors: Sequence[TensorInFile], size_bytes: int) -> Iterator[Finding]:
    """The format wants no byte behind the tensors, which lie side by side as their header says."""
    at = None
    for one in tensors:
        if one.payload.end > size_bytes:
            lost = ByteRange(max(one.payload.start, size_bytes), one.payload.end)
            yield Finding("truncated", f"the file ends at byte {size_bytes}", key, one.fqn, lost)
        at = max(at or 0, one.payload.end)
    if at is not None and at < size_bytes:
        extra = ByteRange(at, size_bytes)
        yield Finding("resized", "bytes behind the last tensor", key, span=extra)


def _check_index(
    weight_map: Mapping[str, str],
    files: Mapping[str, Iterable[TensorInFile]],
) -> Iterator[Finding]:
    """Compare a Hugging Face index with the files that could be read."""
    held = {name: {one.fqn for one in tensors} for name, tensors in files.items()}
    for fqn, name in weight_map.items():
        if name in held and fqn not in held[name]:
            yield Finding("missing", f"the index says it is in {name}", INDEX_FILE, fqn)
    for name, fqns in held.items():
        for fqn in sorted(fqns - weight_map.keys()):
            yield Finding("metadata", "the index does not name this tensor", name, fqn)


def _check_shards(files: Mapping[str, Iterable[TensorInFile]]) -> Iterator[Finding]:
    """Look for shards of DCP's writer that do not make up their tensor."""
    shards: dict[str, list[TensorInFile]] = {}
    for tensors in files.values():
        for one in tensors:
            shards.setdefault(one.fqn, []).append(one)
    entries: dict[str, TensorStorageMetadata] = {}
    for fqn, parts in shards.items():
        if len({len(one.sizes) for one in parts}) != 1:
            yield Finding("incomplete", "its shards have different ranks", fqn=fqn)
            continue
        chunks = [
            ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.sizes)) for one in parts
        ]
        size = np.max([np.add(one.offsets, one.sizes) for one in chunks], axis=0, initial=0)
        entries[fqn] = TensorStorageMetadata(TensorProperties(), torch.Size(size.tolist()), chunks)
    for flaw in find_flaws(entries):
        yield Finding("incomplete", flaw.text, fqn=flaw.fqn)
