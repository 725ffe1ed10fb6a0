"""The checkpoint that a converter reads, opened once on every rank and read in blocks.

A block is a whole small tensor, or a box of a large one: a run of rows, as a rule.

Blocks come in the order asked for, each in memory that is used again for the next but one,
and while the caller writes some, the next are being fetched::

    fetching thread    | blocks 0 1 2 -> memory A | 3 4 -> B | 5 -> A |
    caller                                        | 0 1 2    | 3 4    | 5

A block in memory is row-major and dense, so blocks of rows make up a tensor's payload. The ranks
take runs of neighbouring blocks, balanced by bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from math import prod
from typing import Literal, TypeAlias, TypeVar

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dcpstore.config import ReadConfig
from dcpstore.convert.options import Conversion
from dcpstore.format.dtypes import row_major_strides
from dcpstore.format.payload import bands
from dcpstore.plan.values import ValueRecord
from dcpstore.ranks import RankGroup, steps
from dcpstore.read.checkpoint import BoxRead, Checkpoint
from dcpstore.read.discovery import Discovered, discover
from dcpstore.read.pump import Pump
from dcpstore.store.base import ByteRange, Store
from dcpstore.store.folder import Folder
from dcpstore.store.ranges import group, join

T = TypeVar("T")


def own_run(work: Sequence[T], costs_bytes: Sequence[int], rank: int, num_ranks: int) -> list[T]:
    """Return what a rank does; all ranks' runs together are the whole list, in order."""
    costs = [cost + 1 for cost in costs_bytes]  # so that empty pieces are spread too
    total = sum(costs)
    begins = accumulate(costs, initial=0)  # one more than there is work
    return [one for one, at in zip(work, begins, strict=False) if at * num_ranks // total == rank]


Content: TypeAlias = "torch.Tensor | ValueRecord"

_ALIGN_BYTES = 16


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a checkpoint that is read and written in one piece.

    Attributes:
        fqn: Key in the source.
        kind: ``"box"`` of a tensor; ``"opaque"`` tensor, which is more than its elements;
            ``"value"``, as pickled and encoded.
        offsets: First element in each dimension of the whole tensor.
        sizes: Elements in each dimension.
        dtype: What the elements are converted to.
        num_bytes: Memory that it takes.
    """

    fqn: str
    kind: Literal["box", "opaque", "value"]
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    dtype: torch.dtype = torch.uint8
    num_bytes: int = 0


def plan_value(checkpoint: Checkpoint, fqn: str) -> Block:
    """Return the block of a value."""
    (item,) = checkpoint.items_of(fqn)
    return Block(fqn, "value", num_bytes=sum(form.record.num_bytes for form in item.forms))


def plan_blocks(
    checkpoint: Checkpoint, fqn: str, dtype: torch.dtype, block_bytes: int
) -> list[Block]:
    """Cut a tensor into blocks of at most ``block_bytes``, in the order of its payload.

    Where chunks can only be read as a whole (others' small records, records compressed by an
    extension), a block is all rows of some of them, however large. Others' records that are
    larger than a block are looked into, by one small request per chunk.

    Args:
        checkpoint: The source.
        fqn: A tensor's key.
        dtype: What the elements are converted to.
        block_bytes: Counted in ``dtype``.
    """
    entry = checkpoint.tensors[fqn]
    sizes = tuple(entry.size)
    if checkpoint.is_opaque(fqn):
        stored = sum(item.record.num_bytes for item in checkpoint.items_of(fqn))
        return [Block(fqn, "opaque", (0,) * len(sizes), sizes, dtype, stored)]
    whole = Block(fqn, "box", (0,) * len(sizes), sizes, dtype, prod(sizes) * dtype.itemsize)
    if whole.num_bytes <= block_bytes:
        return [whole]
    groups = _row_groups(entry)
    row_bytes = whole.num_bytes // sizes[0]
    if any((end - first) * row_bytes > block_bytes for first, end in groups):
        checkpoint.locate([fqn])
    items = checkpoint.items_of(fqn)
    if all(item.kind == "raw" for item in items):
        strides = items[0].strides or row_major_strides(sizes)
        boxes = bands(strides, whole.offsets, sizes, dtype.itemsize, max_bytes=block_bytes)
        return [_box(whole, *box) for box in boxes]
    return [
        _box(whole, (first, *whole.offsets[1:]), (end - first, *sizes[1:]))
        for (first, end), _ in group(
            groups, lambda one: one, max_bytes=lambda: block_bytes // row_bytes
        )
    ]


def _box(whole: Block, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Block:
    num_bytes = prod(sizes) * whole.dtype.itemsize
    return Block(whole.fqn, "box", offsets, sizes, whole.dtype, num_bytes)


def _row_groups(entry: TensorStorageMetadata) -> list[ByteRange]:
    """Return the smallest ranges of rows that no stored chunk crosses the ends of."""
    rows = [(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]) for chunk in entry.chunks]
    return join((ByteRange(first, end) for first, end in rows), max_gap_bytes=-1)


@contextmanager
def read_blocks(
    checkpoint: Checkpoint, blocks: Iterable[Block], block_bytes: int
) -> Iterator[Iterator[tuple[Block, Content]]]:
    """Give an iterator over each block with its content, in order.

    The content is valid until the next is asked for. One thread of this reads ahead; the
    checkpoint is its own inside the ``with`` block. The thread ends with that block and not with
    the iterator: an iterator that an error leaves behind is closed by the garbage collector, at
    a moment when CPython may hold the lock that joining a thread takes.

    Args:
        checkpoint: The source.
        blocks: What to read.
        block_bytes: Memory for the blocks read at a time; there are two such memories. A
            larger block has its own.
    """
    memories = [torch.empty(block_bytes, dtype=torch.uint8) for _ in range(2)]
    calls = (
        (1, partial(read_batch, checkpoint, batch, memories[number % 2]))
        for number, batch in enumerate(batches(blocks, block_bytes))
    )
    with Pump(1, "dcpstore-blocks") as pump:
        yield chain.from_iterable(pump.in_order(calls, 2))


def batches(blocks: Iterable[Block], block_bytes: int) -> Iterator[list[Block]]:
    """Yield as many blocks as fit ``block_bytes`` at a time, and larger ones alone."""
    batch: list[Block] = []
    held = 0
    for block in blocks:
        size = _aligned(block.num_bytes)
        if batch and held + size > block_bytes:
            yield batch
            batch, held = [], 0
        batch.append(block)
        held += size
    if batch:
        yield batch


def read_batch(
    checkpoint: Checkpoint, batch: Sequence[Block], memory: torch.Tensor
) -> list[tuple[Block, Content]]:
    """Read blocks at the same time, boxes into the given memory as far as they fit."""
    found: dict[int, Content] = {}
    reads, at = [], 0
    for number, block in enumerate(batch):
        if block.kind == "opaque":
            found[number] = checkpoint.read_opaque(block.fqn)
        if block.kind != "box":
            continue
        if at + block.num_bytes <= len(memory):
            flat = memory[at : at + block.num_bytes].view(block.dtype)
            target = flat.view(block.sizes)
        else:
            target = torch.empty(block.sizes, dtype=block.dtype)
        at += _aligned(block.num_bytes)
        found[number] = target
        reads.append(BoxRead(block.fqn, block.offsets, target))
    checkpoint.read_boxes(reads)
    values = checkpoint.read_value_records(b.fqn for b in batch if b.kind == "value")
    return [
        (block, values[block.fqn] if block.kind == "value" else found[number])
        for number, block in enumerate(batch)
    ]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def open_source(
    group: RankGroup,
    conversion: Conversion,
    find: Callable[[Store, ReadConfig], Discovered] = discover,
) -> Checkpoint:
    """Open a checkpoint on all ranks; the coordinator reads what tells about it. Collective.

    Raises:
        RankFailures: On every rank, if there is no checkpoint or any rank cannot open it.
    """
    config = conversion.shares.read_config()
    folder = Folder(conversion.source, conversion.source_options, config)
    try:
        found = steps.broadcast(group, "read metadata", lambda: find(folder.open(), config))
        return steps.each(group, "open metadata", lambda: Checkpoint(folder, found, config))
    except BaseException:
        folder.close()
        raise
