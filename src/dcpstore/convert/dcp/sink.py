"""A checkpoint written from tensors that are read when their turn comes.

It is an ordinary save, sealed by the ordinary protocol. Only the planner differs: its plan
is made of metadata, and what an item holds is read, some items ahead, when the writer asks::

    read_blocks     | blocks 0 1 2 | 3 4 | 5 ...        bounded by the share for blocks
    resolve_data                   | 0 | 1 | 2 | 3      one item of the plan per block
    uploads                            | part 0 | part 1    bounded by the share for output
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
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
from torch.distributed.checkpoint.planner import SavePlanner as DcpSavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import Buffer

from dcpstore.convert.dcp.source import (
    Block,
    Content,
    own_run,
    plan_blocks,
    plan_value,
    read_blocks,
)
from dcpstore.convert.options import Conversion
from dcpstore.convert.output import fetched_by_all
from dcpstore.convert.selection import ConvertResult
from dcpstore.format.dtypes import dtype_name
from dcpstore.format.manifest import Path
from dcpstore.plan import SavePlanner
from dcpstore.ranks import RankGroup, steps
from dcpstore.read.checkpoint import Checkpoint
from dcpstore.report import Meter, Progress
from dcpstore.saving import save
from dcpstore.write.attached import objects_of, take_out
from dcpstore.write.source import ByteSource
from dcpstore.write.writer import ObjectStoreWriter


@dataclass(frozen=True, slots=True)
class SinkEntry:
    """A key of the checkpoint to be written.

    Attributes:
        name: The key.
        fqn: Key in the source.
        path: Where it belongs in a nested state dict; None for an item beside the state dict.
        properties: Of the tensor, with the dtype to be written; None for a value.
        sizes: Shape of the tensor.
        same_as: Name of another entry, which is written, of the same elements; None to write it.
        position: Entries are read and written in ascending order of it.
    """

    name: str
    fqn: str
    path: Path | None
    properties: TensorProperties | None = None
    sizes: tuple[int, ...] = ()
    same_as: str | None = None
    position: int = 0

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
    conversion: Conversion,
    checkpoint: Checkpoint,
    entries: Sequence[SinkEntry],
    *,
    object_bytes: int,
    splits_tensors: bool = True,
    check: Callable[[], None] = lambda: None,
) -> ConvertResult:
    """Write and seal a checkpoint. All ranks of the group; each reads and writes a share.

    Args:
        group: The ranks.
        conversion: Where to, and the options.
        checkpoint: The source, open on every rank.
        entries: What to write; the same on all ranks.
        object_bytes: Target size of data objects.
        splits_tensors: Whether ranks may share a tensor; else one reads all of it.
        check: Called on every rank when its share is written, before anything is sealed.

    Raises:
        RankFailures: On every rank, if any failed. Nothing was sealed.
    """
    # A block is an item, in one object.
    block_bytes = min(conversion.shares.block_bytes, object_bytes)
    writer = _Writer(
        conversion.target,
        storage_options=conversion.target_options,
        overwrite=conversion.overwrite,
        config=conversion.shares.write_config(object_bytes),
    )
    writer.entries, writer.check = entries, check
    names = list(checkpoint.attached_items)
    sizes = [item.payload.num_bytes for item in checkpoint.attached_items.values()]
    own = own_run(names, sizes, group.rank, group.size)
    writer.attach(
        attachments={name: _InCheckpoint(checkpoint, name) for name in own},
        metrics=checkpoint.metrics,
        user_metadata=checkpoint.user_metadata,
        step=checkpoint.step,
        run=checkpoint.facts.run,
    )
    planner = _BlockPlanner(checkpoint, entries, block_bytes, group, splits_tensors=splits_tensors)
    with planner, conversion.show_progress(group) as meter:
        saved = save(
            {},
            planner=planner,
            process_group=group,
            storage_writer=writer,
            deadline_s=group.deadline_s,
            progress=_Forward(meter),
        )
    objects = steps.broadcast(group, "report", lambda: writer.objects)
    fetched_bytes = fetched_by_all(group, checkpoint.stats.fetched_bytes)
    tensors = [entry for entry in entries if entry.properties is not None]
    values = [entry for entry in entries if entry.properties is None and entry.path is not None]
    return ConvertResult(
        source=checkpoint.url,
        target=saved.url,
        num_tensors=len(tensors),
        num_values=len(values),
        tensor_bytes=sum(entry.num_bytes for entry in tensors),
        objects=objects,
        cast=casts_of(checkpoint, tensors),
        fetched_bytes=fetched_bytes,
        seconds=saved.seconds,
    )


def casts_of(checkpoint: Checkpoint, tensors: Iterable[SinkEntry]) -> dict[str, tuple[str, str]]:
    """Return the names of the old and the new dtype of each source key that is converted."""
    known = checkpoint.tensors
    return {
        one.fqn: (dtype_name(saved), dtype_name(one.dtype))
        for one in tensors
        if (saved := known[one.fqn].properties.dtype) != one.dtype
    }


@dataclass(slots=True)
class _Forward:
    """Tells a meter of a conversion what a save says of its progress."""

    meter: Meter
    done_bytes: int = 0
    total_bytes: int = 0

    def __call__(self, state: Progress) -> None:
        self.meter.expect(state.total_bytes - self.total_bytes)
        self.meter.advance(state.done_bytes - self.done_bytes)
        self.done_bytes, self.total_bytes = state.done_bytes, state.total_bytes


class _Writer(ObjectStoreWriter):
    """Checks before it seals, and seals keys that share their bytes with another key."""

    entries: Sequence[SinkEntry] = ()
    check: Callable[[], None]
    objects: Mapping[str, int]
    """Size of each data object; on the coordinator, when the checkpoint is sealed."""

    def write_data(self, plan: SavePlan, planner: DcpSavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items, and say where the keys that share theirs lie."""
        results = super().write_data(plan, planner).wait()
        written, _ = take_out(results)
        self.check()
        sharing: dict[str, list[str]] = defaultdict(list)
        for entry in self.entries:
            if entry.same_as is not None:
                sharing[entry.same_as].append(entry.name)
        shared = [
            WriteResult(replace(one.index, fqn=name), 0, one.storage_data)
            for one in written
            for name in sharing.get(one.index.fqn, ())
        ]
        future: Future[list[WriteResult]] = Future()
        future.set_result([*results, *shared])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Seal the checkpoint. Coordinator only."""
        known = metadata.state_dict_metadata
        paths = {entry.name: entry.path for entry in self.entries if entry.path is not None}
        metadata.state_dict_metadata = {
            entry.name: known[entry.same_as or entry.name]
            for entry in self.entries
            if entry.name in paths
        }
        metadata.planner_data = paths
        super().finish(metadata, results)
        written = objects_of(chain.from_iterable(results))
        self.objects = {one.key: one.size_bytes for one in written}


@dataclass(frozen=True, slots=True)
class _InCheckpoint(ByteSource):
    """An attachment of the source, which passes through this process in bounded memory."""

    checkpoint: Checkpoint
    name: str

    def __str__(self) -> str:
        return f"the attachment {self.name!r} of {self.checkpoint.url}"

    @property
    def num_bytes(self) -> int:
        return self.checkpoint.attachments[self.name]

    def pieces(self) -> Generator[Buffer, None, None]:
        yield from self.checkpoint.attachment_pieces(self.name)


class _BlockPlanner(SavePlanner):
    """Plans a rank's share of a checkpoint's blocks, which are read when they are resolved."""

    keeps_tensors = False  # the memory of a block is used again

    def __init__(
        self,
        checkpoint: Checkpoint,
        entries: Sequence[SinkEntry],
        block_bytes: int,
        group: RankGroup,
        *,
        splits_tensors: bool,
    ) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._entries = [entry for entry in entries if entry.same_as is None]
        self._block_bytes = block_bytes
        self._rank, self._num_ranks = group.rank, group.size
        self._splits_tensors = splits_tensors
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
        del state_dict, storage_meta, is_coordinator  # what to write is known

    def create_local_plan(self) -> SavePlan:
        self._checkpoint.require_whole(entry.fqn for entry in self._entries)
        ordered = sorted(self._entries, key=lambda entry: entry.position)
        planned = [[(entry, block) for block in self._plan(entry)] for entry in ordered]
        if self._splits_tensors:
            planned = [[one] for one in chain.from_iterable(planned)]
        costs = [sum(block.num_bytes for _, block in one) for one in planned]
        own = own_run(planned, costs, self._rank, self._num_ranks)
        items = []
        for entry, block in chain.from_iterable(own):
            item = _write_item(entry, block)
            items.append(item)
            self._blocks[_key(item)] = block
        return SavePlan(items)

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
    data = TensorWriteData(chunk, replace(entry.properties), torch.Size(entry.sizes))
    index = MetadataIndex(entry.name, chunk.offsets)
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def _key(item: WriteItem) -> tuple[str, tuple[int, ...] | None]:
    index = item.index
    return index.fqn, None if index.offset is None else tuple(index.offset)
