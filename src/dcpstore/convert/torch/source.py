"""A ``torch.save`` file as the checkpoint that a converter reads.

Boxes of its tensors, of any strides, go through the plan and the pump of loads from such files (see
`dcpstore.read.torch_save`). The file has a CRC32 of each storage as a whole: the checksums of the
parts that were read are kept, and combined when all has been read.
"""

from __future__ import annotations

import io
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcpstore.config import ReadConfig
from dcpstore.convert.torch.structure import (
    LAYOUT_KEY,
    Layout,
    PickledStructure,
    encode_layout,
    write_record,
)
from dcpstore.errors import CorruptError
from dcpstore.format.manifest import StoredItem
from dcpstore.format.zip import append_crc32
from dcpstore.plan.values import ValueRecord
from dcpstore.read.checkpoint import BoxRead, Checkpoint
from dcpstore.read.discovery import Discovered
from dcpstore.read.torch_file import TorchFile
from dcpstore.read.torch_save import Contents, FileSource, apply_flags
from dcpstore.store.base import ByteRange, Store


@dataclass(frozen=True, slots=True)
class FileView:
    """What a file holds, as it becomes a checkpoint, by key of the file.

    Attributes:
        contents: Where its tensors lie.
        opaques: Stand-ins of tensors that are more than their elements, such as sparse ones.
        records: Pickles of these and of the values, and of the layout's archive under `LAYOUT_KEY`.
        layout: The structure, for the way back; its archive is still empty.
    """

    contents: Contents
    opaques: Mapping[str, torch.Tensor]
    records: Mapping[str, PickledStructure]
    layout: Layout


class FileCheckpoint(Checkpoint):
    """An open ``torch.save`` file, read as a checkpoint in which every tensor is one chunk.

    Closing it closes the file.

    Args:
        file: The file.
        view: What it holds. Its layout is a value, too.
        config: Sizes, bounds and casts.
    """

    def __init__(self, file: TorchFile, view: FileView, config: ReadConfig) -> None:
        discovered = Discovered(file.url, "", metadata=_metadata_of(file, view))
        super().__init__(file.folder, discovered, config)
        self._file = file
        self._view = view
        self._source = _CheckedSource(file)

    @property
    def url(self) -> str:
        """The file, without secrets."""
        return self._file.url

    @property
    def store(self) -> Store:
        """The file, as a store of one object."""
        return cast("Store", self._source)

    def read_boxes(self, reads: Sequence[BoxRead]) -> None:
        """Read boxes of tensors; see `Checkpoint.read_boxes`.

        Raises:
            ConflictError: If the file was replaced, and its bytes are wrong for it.
        """
        try:
            super().read_boxes(reads)
        except CorruptError:
            self._file.check_unchanged()  # it may be another file by now, and that one whole
            raise
        for read in reads:
            _, place = self._view.contents.tensors[read.fqn]
            apply_flags(place, read.target)

    def read_opaque(self, fqn: str) -> torch.Tensor:
        """Read a tensor that is more than its elements."""
        tensor: torch.Tensor = torch.load(io.BytesIO(self._record(fqn)), weights_only=True)
        return tensor

    def read_value_records(self, fqns: Iterable[str]) -> dict[str, ValueRecord]:
        """Read values, pickled as ``torch.save`` does it, and the encoded layout."""
        return {fqn: ValueRecord(self._record(fqn)) for fqn in fqns}

    def check_crcs(self) -> None:
        """Compare the checksums of storages that were read whole with the file's.

        Raises:
            CorruptError: If a storage is not what was saved.
        """
        self._source.check_crcs()

    def _record(self, fqn: str) -> bytes:
        pickled = self._view.records[fqn]
        if fqn != LAYOUT_KEY:
            return write_record(pickled, self._read_storage)
        archive = write_record(pickled, self._read_storage) if pickled.storages else b""
        return encode_layout(replace(self._view.layout, archive=archive))

    def _read_storage(self, identity: int) -> memoryview:
        key = self._file.identities[identity]
        data = self._file.read_storage(key)
        self._file.check_crc(key, zlib.crc32(data))
        return data


def _metadata_of(file: TorchFile, view: FileView) -> Metadata:
    metadata = view.contents.metadata()
    entries: dict[str, Any] = metadata.state_dict_metadata
    entries[LAYOUT_KEY] = BytesStorageMetadata()
    for fqn, stand_in in view.opaques.items():
        properties = TensorProperties(dtype=stand_in.dtype, layout=stand_in.layout)
        chunk = ChunkStorageMetadata(torch.Size([0] * stand_in.dim()), stand_in.size())
        entries[fqn] = TensorStorageMetadata(properties, stand_in.size(), [chunk])
    metadata.storage_data = {}
    for fqn, entry in entries.items():
        is_tensor = isinstance(entry, TensorStorageMetadata)
        index = MetadataIndex(fqn, entry.chunks[0].offsets if is_tensor else None)
        metadata.storage_data[index] = view.contents.item(index)
        if fqn in view.records:
            record = ByteRange(0, _record_bytes(file, view.records[fqn]))
            metadata.storage_data[index] = StoredItem(fqn, record, "bytes", record)
    return metadata


def _record_bytes(file: TorchFile, pickled: PickledStructure) -> int:
    storages = (file.identities.get(one) for one in pickled.storages.values())
    sizes = (file.storages[key].num_bytes for key in storages if key is not None)
    return len(pickled.data) + sum(sizes)


class _CheckedSource(FileSource):
    """A file of which the CRC32s are kept of what was read. Thread-safe."""

    def __init__(self, file: TorchFile) -> None:
        super().__init__(file.url, file)
        self._checked = file
        self._crcs: dict[tuple[str, ByteRange], int] = {}

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        """Return bytes ``[start, end)`` of the file."""
        data = super().get_range(key, start, end)
        for at, storage in self._checked.storages_in(start, end):
            if self._checked.has_crc(storage):
                first = max(at, start)
                last = min(at + self._checked.storages[storage].num_bytes, end)
                crc32 = zlib.crc32(data[first - start : last - start])
                self._crcs[storage, ByteRange(first - at, last - at)] = crc32
        return data

    def check_crcs(self) -> None:
        """Compare; see `FileCheckpoint.check_crcs`."""
        by_storage: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
        for (storage, span), crc32 in sorted(self._crcs.items()):
            by_storage[storage][span.start] = span.end, crc32  # the longest comes last
        for storage, parts in by_storage.items():
            whole = position = 0
            while (part := parts.pop(position, None)) is not None:
                end, crc32 = part
                whole, position = append_crc32(whole, crc32, end - position), end
            if position == self._checked.storages[storage].num_bytes:
                self._checked.check_crc(storage, whole)
