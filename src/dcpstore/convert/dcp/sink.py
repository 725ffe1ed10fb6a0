"""A checkpoint written from tensors that are read when their turn comes.

It is an ordinary save, sealed by the ordinary protocol. Only the planner differs: its plan
is made of metadata, and what an item holds is read, some items ahead, when the writer asks::

    read_blocks     | blocks 0 1 2 | 3 4 | 5 ...        bounded by the share for blocks
    resolve_data                   | 0 | 1 | 2 | 3      one item of the plan per block
    uploads                            | part 0 | part 1    bounded by the share for output
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from dcpstore.config import ReadConfig
from dcpstore.convert.dcp.source import (
    Block,
    Content,
    own_run,
    plan_blocks,
    plan_value,
    read_blocks,
)
from dcpstore.convert.output import Shares, fetched_by_all
from dcpstore.convert.selection import ConvertResult
from dcpstore.errors import ConflictError
from dcpstore.format.dtypes import dtype_name
from dcpstore.format.manifest import Path
from dcpstore.plan import SavePlanner
from dcpstore.ranks import RankGroup, steps
from dcpstore.read.checkpoint import Checkpoint
from dcpstore.read.discovery import discover
from dcpstore.report import Phases, ProgressCallback
from dcpstore.saving import save
from dcpstore.store.folder import Folder


@dataclass(frozen=True, slots=True)
class SinkEntry:
    """A key of the checkpoint to be written.

    Attributes:
        name: The key.
        fqn: Key in the source.
        path: Where it belongs in a nested state dict.
        properties: Of the tensor, with the dtype to be written; None for a value.
        sizes: Shape of the tensor.
    """

    name: str
    fqn: str
    path: Path
    properties: TensorProperties | None = None
    sizes: tuple[int, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor as written."""
        assert self.properties is not None, "a value has no dtype"
        return self.properties.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's elements; 0 for a value."""
        return 0 if self.properties is None else prod(self.sizes) * self.dtype.itemsize


def write_checkpoint(
    group: RankGroup,
    checkpoint: Checkpoint,
    entries: Sequence[SinkEntry],
    target: str | os.PathLike[str],
    *,
    shares: Shares,
    object_bytes: int,
    options: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: ProgressCallback | bool | None = None,
) -> ConvertResult:
    """Write and seal a checkpoint. All ranks of the group; each reads and writes a share.

    Args:
        group: The ranks.
        checkpoint: The source, open on every rank.
        entries: What to write; the same on all ranks.
        target: Folder of the new checkpoint.
        shares: Of the memory.
        object_bytes: Target size of data objects.
        options: fsspec's options for the target's protocol.
        overwrite: Replace a checkpoint that exists.
        progress: As for `save`.

    Raises:
        RankFailures: On every rank, if any failed. Nothing was sealed.
    """
    phases = Phases()
    block_bytes = min(shares.block_bytes, object_bytes)  # a block is an item, in one object
    with (
        phases.phase("write"),
        _BlockPlanner(checkpoint, entries, block_bytes, group) as planner,
    ):
        saved = save(
            {},
            target,
            planner=planner,
            process_group=group,
            storage_options=options,
            overwrite=overwrite,
            config=shares.write_config(object_bytes),
            deadline_s=group.deadline_s,
            progress=progress,
        )
    objects = _objects_of(group, target, options, saved.save_id)
    fetched_bytes = fetched_by_all(group, checkpoint.stats.fetched_bytes)
    tensors = [entry for entry in entries if entry.properties is not None]
    return ConvertResult(
        source=checkpoint.url,
        target=saved.url,
        num_tensors=len(tensors),
        num_values=len(entries) - len(tensors),
        tensor_bytes=sum(entry.num_bytes for entry in tensors),
        objects=objects,
        cast=casts_of(checkpoint, tensors),
        fetched_bytes=fetched_bytes,
        seconds=phases.seconds,
    )


def casts_of(checkpoint: Checkpoint, tensors: Iterable[SinkEntry]) -> dict[str, tuple[str, str]]:
    """Return the names of the old and the new dtype of each source key that is converted."""
    known = checkpoint.tensors
    return {
        one.fqn: (dtype_name(saved), dtype_name(one.dtype))
        for one in tensors
        if (saved := known[one.fqn].properties.dtype) != one.dtype
    }


def _objects_of(
    group: RankGroup,
    url: str | os.PathLike[str],
    options: Mapping[str, Any] | None,
    save_id: str | None,
) -> dict[str, int]:
    """Read back what was just sealed: key and size of each data object. Collective."""

    def look() -> dict[str, int]:
        config = ReadConfig()
        folder = Folder(url, options, config)
        try:
            found = discover(folder.open(), config)
        finally:
            folder.close()
        manifest = None if found.manifest is None else found.decode_manifest(sys.maxsize)
        if manifest is None or manifest.save_id != save_id:
            raise ConflictError(f"{folder.url} was replaced just after it was written")
        return {stored.key: stored.size_bytes for stored in manifest.objects}

    return steps.broadcast(group, "read back", look)


class StreamingPlanner(SavePlanner):
    """A planner whose items are read when they are resolved; it has no use for a state dict."""

    keeps_tensors = False  # the memory of a tensor that was taken counts no longer

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Learn this rank's role. All ranks."""
        del state_dict, storage_meta
        self.is_coordinator = is_coordinator


class _BlockPlanner(StreamingPlanner):
    """Plans a rank's share of a checkpoint's blocks."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        entries: Sequence[SinkEntry],
        block_bytes: int,
        group: RankGroup,
    ) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._entries = entries
        self._block_bytes = block_bytes
        self._rank, self._num_ranks = group.rank, group.size
        self._blocks: dict[tuple[str, tuple[int, ...] | None], Block] = {}
        self._contents: Iterator[tuple[Block, Content]] | None = None
        self._reading = ExitStack()

    def __enter__(self) -> _BlockPlanner:
        return self

    def __exit__(self, *_: object) -> None:
        self._reading.close()

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        if is_coordinator:
            self.mappings = {entry.name: entry.path for entry in self._entries}

    def create_local_plan(self) -> SavePlan:
        self._checkpoint.require_whole(entry.fqn for entry in self._entries)
        planned = [(entry, block) for entry in self._entries for block in self._plan(entry)]
        items = []
        costs = [block.num_bytes for _, block in planned]
        for entry, block in own_run(planned, costs, self._rank, self._num_ranks):
            item = _write_item(entry, block)
            items.append(item)
            self._blocks[_key(item)] = block
        return SavePlan(items, planner_data=self.mappings)

    def _plan(self, entry: SinkEntry) -> list[Block]:
        if entry.properties is None:
            return [plan_value(self._checkpoint, entry.fqn)]
        return plan_blocks(self._checkpoint, entry.fqn, entry.dtype, self._block_bytes)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        blocks = [self._blocks[_key(item)] for item in new_plan.items]
        contents = read_blocks(self._checkpoint, blocks, self._block_bytes)
        self._contents = self._reading.enter_context(contents)
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        assert self._contents is not None, "finish_plan comes first"
        block, content = next(self._contents)
        assert block is self._blocks[_key(write_item)], "items are resolved in the plan's order"
        return content


def _write_item(entry: SinkEntry, block: Block) -> WriteItem:
    if entry.properties is None:
        return WriteItem(MetadataIndex(entry.name), WriteItemType.BYTE_IO)
    chunk = ChunkStorageMetadata(torch.Size(block.offsets), torch.Size(block.sizes))
    return chunk_item(entry.name, chunk, replace(entry.properties), torch.Size(entry.sizes))


def chunk_item(
    name: str,
    chunk: ChunkStorageMetadata,
    properties: TensorProperties,
    size: torch.Size,
    kind: WriteItemType = WriteItemType.SHARD,
) -> WriteItem:
    """Return the item that writes a chunk of a tensor of some size."""
    data = TensorWriteData(chunk, properties, size)
    return WriteItem(MetadataIndex(name, chunk.offsets), kind, tensor_data=data)


def _key(item: WriteItem) -> tuple[str, tuple[int, ...] | None]:
    index = item.index
    return index.fqn, None if index.offset is None else tuple(index.offset)
