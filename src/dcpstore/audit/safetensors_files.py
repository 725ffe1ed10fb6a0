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
from dcpstore.read.safetensors import (
    INDEX_FILE,
    find_files,
    flaws_of_file,
    flaws_of_index,
    read_header,
)
from dcpstore.store.base import ObjectInfo, Store
from dcpstore.store.ranges import ByteRange


class FileContents:
    """A folder of safetensors files without DCP metadata, as its index or a listing tells.

    Raises:
        CorruptError: If its index is damaged.
    """

    def __init__(self, store: Store) -> None:
        found = find_files(store)
        self._keys = found.keys
        self._weight_map = found.weight_map
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
        for flaw in flaws_of_index(self._weight_map, self._files):
            yield Finding(*flaw)

    def notes(self) -> Iterator[str]:
        """Yield what was not checked and why."""
        yield (
            "not checked: the values. The safetensors format has no checksums; headers, sizes and"
            " index were compared"
        )


def _check_file(
    store: Store, key: str, info: ObjectInfo
) -> tuple[Sequence[TensorInFile] | None, list[Finding]]:
    """Read the header of a file and compare it with the file's size."""
    try:
        header = read_header(store, key)
    except (CorruptError, NotFoundError) as error:
        return None, [Finding("metadata", str(error), key, span=ByteRange(0, info.size_bytes))]
    except StoreError as error:
        if error.retryable:
            raise
        return None, [Finding("unreadable", str(error), key)]
    found = [Finding(*flaw) for flaw in flaws_of_file(key, header, info.size_bytes)]
    return header.tensors, found


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
