"""``torch.save`` files as the source of distributed loads.

::

    store --ranged GETs--> reading rank --waves of messages--> each rank: its part of each tensor

Modules in the order of the work: `catalogue` (what the file holds), `targets` (what this rank
wants), `waves` (what travels together), `fill` (reads it), `trade` (carries it), `deliver`.

What travels together: waves of messages, planned from the boxes that all ranks want. Pure.

A tensor is cut into bands along its slowest dimensions, so that the parts of a band that
several ranks want are read by one request and sent in one wave::

    saved tensor          ranks 0 to 3 hold columns      messages of the first wave
    0 0 1 1 2 2 3 3  --.
    0 0 1 1 2 2 3 3    |  band: read once           ->   0: its 3 x 2   1: its 3 x 2   2: ...
    0 0 1 1 2 2 3 3  --'
    0 0 1 1 2 2 3 3       the next band             ->   the next wave

What the same ranks want goes into one message, down a tree: to W ranks the root sends
log2(W) times, and every rank receives each of its bytes once.

Where a saved tensor lies in its file, as a row-major chunk that its boxes are boxes of.

Most tensors are views that a larger row-major chunk explains: dense ones, slices, and what a
transpose or a permute made of these::

    saved: shape (4, 3), strides (1, 6)     the chunk: 3 rows of 6, dimensions 1 and 0
                                            # # # # . .
                                            # # # # . .
                                            # # # # . .

What no such chunk explains (every n-th element, expanded, overlapping) is read as one run,
from a box's first to its last element, and picked apart in memory.

What a ``torch.save`` file holds, by the keys of a flattened state dict.

The reading rank makes it from the file's structure; every rank is sent the part it needs to
plan and to check its targets. No tensor is read for it.

Where this rank's part goes, and whether it fits what the file holds. No I/O.

Put what arrives into this rank's targets, and tell the planner of complete ones.

Boxes of saved tensors, read by ranged GETs into memory that is there.

Carry waves from the rank that reads to the ranks that want them.

One step of the group per wave, and one more; reading goes on in threads meanwhile::

    root     step 0: wave 0 read?    step 1: send 0, wave 1 read?    step 2: send 1, ...
    others   step 0: -               step 1: receive 0, take         step 2: receive 1, ...
    threads  read 0 ...............  read 1 .......................  read 2 ...

A wave is sent only after a step in which every rank was well: that the file cannot be read
is known to all ranks before anybody waits for its bytes.

Values of the file that are no tensors, as the bytes that planners open.

One rank's part of one load from a ``torch.save`` file.

`BroadcastingTorchSaveReader`: a ``torch.save`` file as the source of a distributed load.

DCP calls it in this order; the steps are those of a group of ranks that the reader opens, or
of the group that `dcpstore.load` works in:

0. (all ranks) ``reset``, if the caller gave a checkpoint_id
1. (all ranks) ``read_metadata``. Step: the reading rank opens the file (its zip directory and
   its pickle, a few requests), and every rank is sent keys, shapes and dtypes
2. (all ranks) ``set_up_storage_reader``, ``prepare_local_plan``
3. (DCP's coordinator) ``prepare_global_plan``
4. (all ranks) ``read_data``. Step: every rank checks its targets and says which boxes it
   wants, and the reading rank plans waves. Then a step per wave, and one to finish
"""

from __future__ import annotations

import io
import itertools
import math
import os
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
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
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future as TorchFuture

from dcpstore.config import ReadConfig
from dcpstore.errors import ConfigError, IncompatibleError
from dcpstore.format.dtypes import dtype_from_name, dtype_name, item_bytes
from dcpstore.format.manifest import StoredItem
from dcpstore.format.payload import copy_box_in, num_elements
from dcpstore.format.zip import Member, ReadAt, contents_offset
from dcpstore.ranks import Pending, RankGroup, SingleGroup, steps
from dcpstore.ranks.agreement import Ranks, join_ranks, plain_cause_of_one
from dcpstore.ranks.transport import tree_children, tree_parent
from dcpstore.read.plan import Request, join_pieces, plan_pieces
from dcpstore.read.pump import Pump, ReadStats
from dcpstore.read.targets import Piece, Target, copy_piece, resolve_targets
from dcpstore.read.torch_file import TensorPlace, TorchFile, open_torch_file
from dcpstore.report import Meter
from dcpstore.store import open_store
from dcpstore.store.base import Store
from dcpstore.store.budget import ByteBudget
from dcpstore.store.folder import Folder, file_location
from dcpstore.store.ranges import ByteRange, row_major_strides
from dcpstore.text import redact
from dcpstore.torch_private import flatten_state_dict

_Rows = npt.NDArray[np.int64]


class WaveWant(NamedTuple):
    """A box of a saved tensor, or the bytes of a value, that one rank wants.

    Attributes:
        item: The rank's own number for it.
        source: Number of what is saved.
        offsets: First element in each dimension.
        sizes: Elements in each dimension.
    """

    item: int
    source: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Extent:
    """What must be known of a saved tensor to cut it.

    Attributes:
        sizes: Elements in each dimension.
        item_bytes: Bytes per element.
        axes: Dimensions, from the one whose steps are longest in the file to the shortest.
        weight: Bytes held per byte wanted, while a part is made.
    """

    sizes: tuple[int, ...]
    item_bytes: int
    axes: tuple[int, ...]
    weight: int = 1


@dataclass(frozen=True, slots=True)
class Part:
    """A box that goes to some ranks, packed row-major.

    Attributes:
        source: Number of what is saved.
        offsets: First element in each dimension.
        sizes: Elements in each dimension.
        start: Its first byte in the message; a multiple of the element's size.
        num_bytes: Its length.
        takers: Rank and that rank's item, for each that wants it.
    """

    source: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    num_bytes: int
    takers: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Message:
    """Parts that the same ranks want.

    Attributes:
        ranks: Who wants it, ascending.
        parts: In the order of their starts.
        num_bytes: Length of all parts; there is nothing between them.
    """

    ranks: tuple[int, ...]
    parts: tuple[Part, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Wave:
    """Messages that are held in memory together."""

    messages: tuple[Message, ...]

    @property
    def num_bytes(self) -> int:
        """Length of all messages."""
        return sum(message.num_bytes for message in self.messages)


class Portion(NamedTuple):
    """A part as its taker sees it; attributes as those of `Part` and `WaveWant`."""

    item: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    num_bytes: int


class Leg(NamedTuple):
    """What one rank does with one message.

    Attributes:
        message: Number of the message in its wave.
        num_bytes: Its length.
        source: Whom it comes from; None for the root, which has it.
        forwards: Whom to send it to.
        portions: What this rank takes out of it.
    """

    message: int
    num_bytes: int
    source: int | None
    forwards: tuple[int, ...]
    portions: tuple[Portion, ...]


def plan_waves(
    extents: Mapping[int, Extent], wants: Sequence[Sequence[WaveWant]], *, wave_bytes: int
) -> list[Wave]:
    """Cut what all ranks want into waves.

    Args:
        extents: Of every source wanted; sources are numbered in the order to read them.
        wants: By rank. Boxes without elements take no part.
        wave_bytes: Most bytes held for a wave, unless one element is larger.
    """
    by_source: dict[int, dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]]] = {}
    for rank, own in enumerate(wants):
        for want in own:
            boxes = by_source.setdefault(want.source, {})
            boxes.setdefault((want.offsets, want.sizes), []).append((rank, want.item))
    waves: list[Wave] = []
    held: list[Part] = []
    held_bytes = 0
    for source in sorted(by_source):
        boxes = by_source[source]
        for parts in _bands(source, extents[source], boxes, wave_bytes):
            num_bytes = sum(part.num_bytes for part in parts) * extents[source].weight
            if held and held_bytes + num_bytes > wave_bytes:
                waves.append(_pack(held, extents))
                held, held_bytes = [], 0
            held += parts
            held_bytes += num_bytes
    if held:
        waves.append(_pack(held, extents))
    return waves


def _bands(
    source: int,
    extent: Extent,
    boxes: Mapping[tuple[tuple[int, ...], tuple[int, ...]], Sequence[tuple[int, int]]],
    wave_bytes: int,
) -> Iterator[list[Part]]:
    """Cut the boxes of one source into lists of parts, each for one wave at most."""
    element_bytes = extent.item_bytes * extent.weight
    if sum(math.prod(sizes) for _, sizes in boxes) * element_bytes <= wave_bytes:
        yield [
            Part(source, offsets, sizes, 0, math.prod(sizes) * extent.item_bytes, tuple(takers))
            for (offsets, sizes), takers in boxes.items()
            if 0 not in sizes
        ]
        return
    num_dims = len(extent.sizes)
    starts = np.array([offsets for offsets, _ in boxes], np.int64).reshape(len(boxes), num_dims)
    sizes = np.array([sizes for _, sizes in boxes], np.int64).reshape(len(boxes), num_dims)
    takers_of = [tuple(takers) for takers in boxes.values()]
    whole = np.zeros(num_dims, np.int64), np.array(extent.sizes, np.int64)
    for low, high in _cut(*whole, starts, starts + sizes, extent, wave_bytes):
        first = np.maximum(starts, low)
        counts = np.minimum(starts + sizes, high) - first
        yield [
            Part(
                source,
                tuple(first[number].tolist()),
                tuple(counts[number].tolist()),
                0,
                int(counts[number].prod()) * extent.item_bytes,
                takers_of[number],
            )
            for number in np.flatnonzero((counts > 0).all(axis=1)).tolist()
        ]


def _cut(
    low: _Rows, high: _Rows, starts: _Rows, ends: _Rows, extent: Extent, wave_bytes: int
) -> Iterator[tuple[_Rows, _Rows]]:
    """Cut the region ``[low, high)`` until what ranks want of each piece fits a wave."""
    counts = np.minimum(ends, high) - np.maximum(starts, low)
    wanted = (counts > 0).all(axis=1)
    num_bytes = int(counts[wanted].prod(axis=1).sum()) * extent.item_bytes * extent.weight
    if not num_bytes:
        return
    axis = next((a for a in extent.axes if high[a] - low[a] > 1), None)
    if num_bytes <= wave_bytes or axis is None:
        yield low, high
        return
    step = max(int(high[axis] - low[axis]) * wave_bytes // num_bytes, 1)
    # Ranks that do not touch this region touch none of its pieces.
    starts, ends = starts[wanted], ends[wanted]
    for at in range(int(low[axis]), int(high[axis]), step):
        inner_low, inner_high = low.copy(), high.copy()
        inner_low[axis], inner_high[axis] = at, min(at + step, int(high[axis]))
        yield from _cut(inner_low, inner_high, starts, ends, extent, wave_bytes)


def _pack(parts: Sequence[Part], extents: Mapping[int, Extent]) -> Wave:
    """Put the parts that the same ranks want into one message."""
    by_ranks: dict[tuple[int, ...], list[Part]] = {}
    for part in parts:
        ranks = tuple(sorted({rank for rank, _ in part.takers}))
        by_ranks.setdefault(ranks, []).append(part)
    return Wave(tuple(_message(ranks, own, extents) for ranks, own in by_ranks.items()))


def _message(
    ranks: tuple[int, ...], parts: Sequence[Part], extents: Mapping[int, Extent]
) -> Message:
    # Element sizes are powers of two: with the largest first, every part starts at a multiple
    # of its own element's size, and nothing lies between two parts.
    ordered = sorted(parts, key=lambda part: -extents[part.source].item_bytes)
    placed, at = [], 0
    for part in ordered:
        placed.append(Part(part.source, part.offsets, part.sizes, at, part.num_bytes, part.takers))
        at += part.num_bytes
    return Message(ranks, tuple(placed), at)


def route(waves: Sequence[Wave], num_ranks: int, root: int) -> list[list[list[Leg]]]:
    """Say who sends what to whom.

    Between any two ranks, sends and receives come in the order of the messages.

    Args:
        waves: As planned.
        num_ranks: Size of the group.
        root: The rank that reads, and has every message.

    Returns:
        By rank and wave, the legs in the order of the wave's messages.
    """
    legs: list[list[list[Leg]]] = [[[] for _ in waves] for _ in range(num_ranks)]
    for number, wave in enumerate(waves):
        for index, message in enumerate(wave.messages):
            portions = _portions(message)
            members = [root, *(rank for rank in message.ranks if rank != root)]
            for place, rank in enumerate(members):
                forwards = [members[child] for child in tree_children(place, 0, len(members))]
                parent = members[tree_parent(place, 0, len(members))] if place else None
                own = tuple(portions.get(rank, ()))
                legs[rank][number].append(
                    Leg(index, message.num_bytes, parent, tuple(forwards), own)
                )
    return legs


def _portions(message: Message) -> dict[int, list[Portion]]:
    portions: dict[int, list[Portion]] = {}
    for part in message.parts:
        for rank, item in part.takers:
            portions.setdefault(rank, []).append(
                Portion(item, part.offsets, part.sizes, part.start, part.num_bytes)
            )
    return portions


@dataclass(frozen=True, slots=True)
class Chunk:
    """A row-major chunk of a storage that a tensor is a box of, starting with its first element.

    Attributes:
        sizes: Of the chunk.
        dims: The tensor's dimension per dimension of the chunk.
    """

    sizes: tuple[int, ...]
    dims: tuple[int, ...]

    def order(self, values: Sequence[int]) -> tuple[int, ...]:
        """Bring offsets or sizes of the tensor into the chunk's order."""
        return tuple(values[dim] for dim in self.dims)


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the file; keys that name the same elements share one.

    Attributes:
        place: Where its elements lie in which storage.
        chunk: The chunk around it; None if there is none.
    """

    place: TensorPlace
    chunk: Chunk | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunk", chunk_around(self.place))

    @property
    def extent(self) -> Extent:
        """What must be known of it to cut it."""
        place = self.place
        if self.chunk is not None:
            return Extent(place.sizes, place.dtype.itemsize, self.chunk.dims)
        num_elements = place.span().num_bytes // place.dtype.itemsize
        # While it is picked apart, the run lies in memory beside what is wanted of it.
        weight = 1 + math.ceil(num_elements / max(math.prod(place.sizes), 1))
        return Extent(place.sizes, place.dtype.itemsize, tuple(range(len(place.sizes))), weight)


def chunk_around(place: TensorPlace) -> Chunk | None:
    """Return the row-major chunk that a tensor is a box of; None if there is none."""
    sizes, strides = place.sizes, place.strides
    # A dimension of one element has no step, so that it may stand anywhere.
    ones = [dim for dim, size in enumerate(sizes) if size == 1]
    dims = sorted((d for d, size in enumerate(sizes) if size != 1), key=lambda d: -strides[d])
    if not dims:
        return Chunk((1,) * len(ones), tuple(ones))
    if strides[dims[-1]] != 1:
        return None
    chunk_sizes = [sizes[dims[0]]]
    for outer, inner in itertools.pairwise(dims):
        row, rest = divmod(strides[outer], strides[inner])
        if rest or row < sizes[inner]:
            return None
        chunk_sizes.append(row)
    return Chunk((1,) * len(ones) + tuple(chunk_sizes), (*ones, *dims))


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of the file.

    Attributes:
        source: Its number; keys that name the same elements share one.
        dtype: Name of its dtype.
        sizes: Its shape.
    """

    source: int
    dtype: str
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Catalogue:
    """What all ranks know of the file.

    Attributes:
        url: Of the file.
        tensors: By key.
        values: Keys of everything else.
        unreadable: Why a key that holds a tensor cannot be read, by key.
        paths: Way to each key in the nested state dict.
        sources: Where the tensors lie, by number; empty where only the reading rank reads.
        members: Where the storages of `sources` lie, by storage key.
    """

    url: str
    tensors: Mapping[str, TensorEntry]
    values: frozenset[str]
    unreadable: Mapping[str, str] = field(default_factory=dict)
    paths: Mapping[str, Any] = field(default_factory=dict)
    sources: tuple[Source, ...] = ()
    members: Mapping[str, Member] = field(default_factory=dict)

    def metadata(self) -> Metadata:
        """Return it as DCP's metadata: every tensor is one chunk."""
        entries: dict[str, Any] = {}
        for fqn in self.paths:
            entry = self.tensors.get(fqn)
            entries[fqn] = BytesStorageMetadata() if entry is None else _tensor_metadata(entry)
        return Metadata(entries, dict(self.paths), storage_meta=StorageMeta(self.url))

    def keys_like(self, fqn: str) -> list[str]:
        """Return a few keys of the file that a missing key may have meant."""
        last = fqn.rpartition(".")[2]
        near = [
            key
            for key in self.paths
            if key.endswith(f".{fqn}") or fqn.endswith(f".{key}") or key.startswith(f"{fqn}.")
        ]
        near += [key for key in self.paths if key.rpartition(".")[2] == last and key not in near]
        return (near or list(self.paths))[:3]


@dataclass(frozen=True, slots=True, eq=False)
class FileContent:
    """What the reading rank knows of the file besides.

    Attributes:
        file: Open.
        sources: Where each tensor lies, in the order of the file.
        members: Where the storages lie, by storage key.
        values: Everything that is no tensor, by key; tensors inside are stand-ins.
    """

    file: TorchFile
    sources: tuple[Source, ...]
    members: Mapping[str, Member]
    values: Mapping[str, Any]


def open_content(file: TorchFile, *, with_sources: bool) -> tuple[Catalogue, FileContent]:
    """Flatten what a file holds and find out where its tensors lie. Reading rank only; no I/O.

    Args:
        file: Just opened.
        with_sources: Whether all ranks are to know where the tensors lie.

    Raises:
        IncompatibleError: If it holds something else than a dictionary, or one whose keys
            cannot be told apart once flattened.
    """
    flat, paths = _flatten(file)
    places: dict[str, TensorPlace] = {}
    unreadable: dict[str, str] = {}
    values: dict[str, Any] = {}
    for fqn, value in flat.items():
        if not isinstance(value, torch.Tensor):
            values[fqn] = value
            continue
        place = file.place(value)
        if place is None:
            unreadable[fqn] = _describe(value)
        else:
            places[fqn] = place
    ordered = sorted(set(places.values()), key=lambda place: _position(file, place))
    numbers = {place: number for number, place in enumerate(ordered)}
    sources = tuple(Source(place) for place in ordered)
    members = {key: one.member for key, one in file.storages.items()}
    catalogue = Catalogue(
        file.url,
        {
            fqn: TensorEntry(numbers[place], dtype_name(place.dtype), place.sizes)
            for fqn, place in places.items()
        },
        frozenset(values),
        unreadable,
        paths,
        sources if with_sources else (),
        members if with_sources else {},
    )
    return catalogue, FileContent(file, sources, members, values)


def _flatten(file: TorchFile) -> tuple[dict[str, Any], dict[str, Any]]:
    if not isinstance(file.value, Mapping):
        kind = type(file.value).__name__
        raise IncompatibleError(
            f"{file.url} holds a {kind}, not a state dict: save a dictionary, such as"
            " module.state_dict(), with torch.save"
        )
    try:
        return flatten_state_dict(dict(file.value))
    except ValueError as error:
        raise IncompatibleError(
            f"{file.url}: two entries of its nested state dict have the same key once joined with"
            f" dots ({error}); rename one and save again"
        ) from error


def _position(file: TorchFile, place: TensorPlace) -> tuple[int, int]:
    return file.storages[place.storage_key].member.header_offset, place.span().start


def _describe(value: torch.Tensor) -> str:
    if value.layout != torch.strided:
        return f"a tensor of layout {str(value.layout).removeprefix('torch.')}"
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(value).__name__}, which wraps other tensors"
    return "a tensor that was on the meta device when it was saved, without elements"


def _tensor_metadata(entry: TensorEntry) -> TensorStorageMetadata:
    size = torch.Size(entry.sizes)
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype_from_name(entry.dtype)),
        size,
        [ChunkStorageMetadata(torch.Size([0] * len(size)), size)],
    )


_MOST_NAMED = 10
_NOWHERE = ByteRange(0, 0)


@dataclass(frozen=True, slots=True)
class OwnPart:
    """What one rank wants of the file.

    Attributes:
        targets: By item number.
        wants: Boxes of tensors; those without elements are left out.
        values: Key of the file per item number, for values.
    """

    targets: Sequence[Target]
    wants: Sequence[WaveWant]
    values: dict[int, str]


def resolve_own_part(
    read_items: Sequence[ReadItem],
    planner: LoadPlanner,
    catalogue: Catalogue,
    config: ReadConfig,
) -> OwnPart:
    """Ask the planner for every target, and check them all against the file. All ranks.

    Raises:
        IncompatibleError: Naming each key that the file lacks, or whose kind, shape or dtype
            does not fit. No target was changed.
    """
    problems: dict[str, str] = {}
    for read_item in read_items:
        problem = _mismatch(read_item, planner, catalogue)
        if problem:
            problems.setdefault(read_item.storage_index.fqn, problem)
    if problems:
        raise IncompatibleError(_explain(problems, catalogue))
    items = {item.storage_index: _stored_item(item, catalogue) for item in read_items}
    targets = resolve_targets(
        read_items, planner, items, Metadata(state_dict_metadata={}), config.casts
    )
    wants = [_want(number, target, catalogue) for number, target in enumerate(targets)]
    return OwnPart(
        targets,
        [want for want in wants if want is not None and num_elements(want.sizes)],
        {n: target.fqn for n, target in enumerate(targets) if target.tensor is None},
    )


def _explain(problems: Mapping[str, str], catalogue: Catalogue) -> str:
    shown = []
    for fqn, problem in itertools.islice(problems.items(), _MOST_NAMED):
        is_missing = fqn not in catalogue.paths
        near = ", ".join(map(repr, catalogue.keys_like(fqn))) if is_missing else ""
        shown.append(f"  {problem}" + (f"; it has {near}" if near else ""))
    if len(problems) > _MOST_NAMED:
        shown.append(f"  and {len(problems) - _MOST_NAMED} more")
    return "\n".join([f"{catalogue.url} does not fit the state dict; nothing was loaded:", *shown])


def _mismatch(read_item: ReadItem, planner: LoadPlanner, catalogue: Catalogue) -> str | None:
    fqn = read_item.storage_index.fqn
    wants_value = read_item.type == LoadItemType.BYTE_IO
    if fqn in catalogue.unreadable:
        return (
            f"{fqn!r} is {catalogue.unreadable[fqn]} in the file, of which no part can be read;"
            " load the file with torch.load"
        )
    entry = catalogue.tensors.get(fqn)
    if entry is None and fqn not in catalogue.values:
        return f"{fqn!r} is not in the file"
    if (entry is None) != wants_value:
        saved, wanted = ("a value", "a tensor") if entry is None else ("a tensor", "a value")
        return f"{fqn!r} is saved as {saved}, and the state dict has {wanted}"
    if entry is None:
        return None
    wanted_sizes = _whole_sizes(read_item, planner)
    if wanted_sizes is not None and wanted_sizes != entry.sizes:
        return f"{fqn!r} is saved with shape {entry.sizes}, and the state dict has {wanted_sizes}"
    return _out_of_bounds(read_item, entry)


def _whole_sizes(read_item: ReadItem, planner: LoadPlanner) -> tuple[int, ...] | None:
    """Return the shape that the planner takes the whole tensor for, if it tells.

    Planners that make up the metadata know nothing of the file's shapes: without this, a
    target that is smaller than the saved tensor would be given a part of it.
    """
    known: Any = getattr(planner, "metadata", None)
    entries = getattr(known, "state_dict_metadata", None) or {}
    entry = entries.get(read_item.storage_index.fqn)
    return tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None


def _box(read_item: ReadItem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets in the whole tensor and sizes of what an item reads.

    A planner may have made up chunks; its offsets count from the chunk that it names.
    """
    sizes, inner = tuple(read_item.lengths), tuple(read_item.storage_offsets)
    index: MetadataIndex = read_item.storage_index
    outer = tuple(index.offset) if index.offset is not None else (0,) * len(inner)
    return tuple(a + b for a, b in zip(outer, inner, strict=True)), sizes


def _out_of_bounds(read_item: ReadItem, entry: TensorEntry) -> str | None:
    num_dims = {len(read_item.lengths), len(read_item.storage_offsets), len(entry.sizes)}
    if read_item.storage_index.offset is not None:
        num_dims.add(len(read_item.storage_index.offset))
    if len(num_dims) == 1:
        offsets, sizes = _box(read_item)
        rows = zip(offsets, sizes, entry.sizes, strict=True)
        if all(offset >= 0 and offset + size <= saved for offset, size, saved in rows):
            return None
    return (
        f"{read_item.storage_index.fqn!r} is saved with shape {entry.sizes}, and the plan reads"
        f" {tuple(read_item.lengths)} at {tuple(read_item.storage_offsets)} of its chunk at"
        f" {tuple(read_item.storage_index.offset or ())}"
    )


def _stored_item(read_item: ReadItem, catalogue: Catalogue) -> StoredItem:
    entry = catalogue.tensors.get(read_item.storage_index.fqn)
    if entry is None:
        return StoredItem(catalogue.url, _NOWHERE, "bytes", _NOWHERE)
    return StoredItem(
        catalogue.url, _NOWHERE, "raw", _NOWHERE, dtype=entry.dtype, sizes=entry.sizes
    )


def _want(number: int, target: Target, catalogue: Catalogue) -> WaveWant | None:
    if target.tensor is None:
        return None
    entry = catalogue.tensors[target.fqn]
    return WaveWant(number, entry.source, *_box(target.read_item))


class Delivery:
    """This rank's targets on their way to complete. One thread.

    Args:
        own: The targets.
        planner: Told of complete ones.
        value_bytes: Length of each value, by item number.
        meter: Counts the bytes delivered.
    """

    def __init__(
        self, own: OwnPart, planner: LoadPlanner, value_bytes: dict[int, int], meter: Meter
    ) -> None:
        self._own = own
        self._planner = planner
        self._meter = meter
        self._boxes = {want.item: want for want in own.wants}
        self._values = {item: bytearray(size) for item, size in value_bytes.items()}
        self._missing = {want.item: num_elements(want.sizes) for want in own.wants} | value_bytes
        self.num_bytes = sum(value_bytes.values()) + sum(
            target.tensor.numel() * item_bytes(target.item.dtype)
            for target in own.targets
            if target.tensor is not None
        )
        """Bytes that this rank wants."""
        meter.expect(self.num_bytes)

    def commit_empty(self) -> None:
        """Commit the targets without elements, for which nothing arrives."""
        for item in range(len(self._own.targets)):
            if item not in self._missing:
                self.commit(item)

    def take(self, portion: Portion, data: memoryview) -> None:
        """Take a portion; with its last one a target is complete."""
        item = portion.item
        if item in self._values:
            start = portion.offsets[0]
            self._values[item][start : start + data.nbytes] = data
        else:
            self._copy(portion, data)
        self._meter.advance(data.nbytes)
        self._missing[item] -= num_elements(portion.sizes)
        if not self._missing[item]:
            self.commit(item)

    def commit(self, item: int) -> None:
        """Tell the planner that a target is complete."""
        target = self._own.targets[item]
        if target.tensor is None:
            stream = io.BytesIO(self._values.pop(item))
            self._planner.load_bytes(target.read_item, stream)
        else:
            self._planner.commit_tensor(target.read_item, target.tensor)
            target.tensor = None

    def _copy(self, portion: Portion, data: memoryview) -> None:
        target = self._own.targets[portion.item]
        part = target.tensor
        assert part is not None
        first = self._boxes[portion.item].offsets
        for dim, (offset, base, size) in enumerate(
            zip(portion.offsets, first, portion.sizes, strict=True)
        ):
            part = part.narrow(dim, offset - base, size)
        copy_box_in(
            data,
            0,
            dtype_from_name(target.item.dtype),
            row_major_strides(portion.sizes),
            (0,) * len(portion.sizes),
            portion.sizes,
            part,
        )


T = TypeVar("T")


_FILE = "file"  # there is but one object to read
_MAX_HEADER_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, eq=False)
class FileBox:
    """A box to read.

    Attributes:
        source: The saved tensor.
        offsets: First element in each dimension.
        out: Where it goes, shaped as the box: any strides, device and dtype.
    """

    source: Source
    offsets: tuple[int, ...]
    out: torch.Tensor


class Filler:
    """Reads boxes, many requests at a time. Use as a context manager.

    Args:
        read_at: Reads bytes ``[start, end)`` of the file, from any thread.
        members: The file of the archive that each storage is, by storage key.
        config: Sizes and bounds.
        budget_bytes: Most bytes asked for at a time.
        what: Name of the file, for messages.
        stats: Counts requests and bytes.
    """

    def __init__(
        self,
        read_at: ReadAt,
        members: Mapping[str, Member],
        config: ReadConfig,
        *,
        budget_bytes: int,
        what: str,
        stats: ReadStats,
    ) -> None:
        self._read_at = read_at
        self._members = members
        self._config = config
        self._request_bytes = max(1, min(config.request_bytes, budget_bytes))
        self._budget = ByteBudget(budget_bytes)
        self._what = what
        self._stats = stats
        self._pump = Pump(config.max_requests, "dcpstore-fill")
        self._driver = ThreadPoolExecutor(1, "dcpstore-wave")
        self._starts: dict[str, int] = {}

    def __enter__(self) -> Filler:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._pump.stop()
        self._driver.shutdown(wait=True)
        self._pump.__exit__(kind, error, trace)

    @property
    def peak_bytes(self) -> int:
        """Most bytes asked for at a time."""
        return self._budget.peak_bytes

    def begin(self, make: Callable[[], T]) -> Future[T]:
        """Run a function that calls `fill`, in a thread of its own; one at a time."""
        return self._driver.submit(make)

    def fill(self, boxes: Sequence[FileBox]) -> None:
        """Read boxes. Returns when all are there.

        One call at a time. After an error, what was to be filled holds
        anything, and no further call succeeds.

        Raises:
            CorruptError: If the file is not laid out as its directory says.
            NotFoundError: If the file was deleted meanwhile.
            StoreError: If the store refuses.
        """
        while True:
            guesses = self._guess_starts(boxes)
            self._serve_all(*self._plan(boxes, guesses))
            if all(self._starts[key] == start for key, start in guesses.items()):
                return
            # Another writer's padding misled the guess, and now it is known.

    def _guess_starts(self, boxes: Iterable[FileBox]) -> dict[str, int]:
        """Return where storages start that nobody looked at, as torch's writer places them.

        Where it cannot have placed one, its header is read instead, one small request each.
        """
        keys = {box.source.place.storage_key for box in boxes} - self._starts.keys()
        guesses = {key: self._members[key].expected_offset(1) for key in sorted(keys)}
        lost = [key for key, guess in guesses.items() if guess is None]
        headers = [_header(self._members[key]) for key in lost]
        calls = ((1, partial(self._read_at, *header)) for header in headers)
        found = self._pump.in_order(calls, len(headers))
        for key, header, data in zip(lost, headers, found, strict=True):
            self._stats.count(header.num_bytes)
            self._starts[key] = contents_offset(self._members[key], data, self._what)
        return {key: guess for key, guess in guesses.items() if guess is not None}

    def _plan(
        self, boxes: Sequence[FileBox], guesses: Mapping[str, int]
    ) -> tuple[dict[Target, _Filling | str], list[Request]]:
        """Return the requests, and what to fill or the storage whose header to read, per target."""
        starts = {**self._starts, **guesses}
        fillings = [_Filling(box, starts[box.source.place.storage_key]) for box in boxes]
        headers = {_header_target(self._members[key]): key for key in guesses}
        bounds: Any = {"join_gap_bytes": self._config.join_gap_bytes, "verify": False}
        filled = plan_pieces(
            [one.target for one in fillings], request_bytes=self._request_bytes, **bounds
        )
        looks = plan_pieces(headers, request_bytes=_MAX_HEADER_BYTES, **bounds)
        # So that a header travels with the first bytes behind it.
        room = max((guesses[key] - self._members[key].header_offset for key in guesses), default=0)
        requests = join_pieces(
            {_FILE: [*filled.get(_FILE, ()), *looks.get(_FILE, ())]},
            request_bytes=self._request_bytes + room,
            join_gap_bytes=self._config.join_gap_bytes,
        )
        return {**{one.target: one for one in fillings}, **headers}, requests

    def _serve_all(
        self, users: Mapping[Target, _Filling | str], requests: Sequence[Request]
    ) -> None:
        for request in requests:
            self._stats.count(request.range.num_bytes)
        calls = [
            (request.range.num_bytes, partial(self._serve, request, users)) for request in requests
        ]
        self._pump.run(calls, self._budget)

    def _serve(self, request: Request, users: Mapping[Target, _Filling | str]) -> None:
        data = self._read_at(*request.range)
        for piece in request.pieces:
            user = users[piece.target]
            if isinstance(user, _Filling):
                user.take(piece, request.window(data, piece.fetch))
            else:
                header = request.window(data, piece.span)
                self._starts[user] = contents_offset(self._members[user], header, self._what)


class _Filling:
    """A box on its way.

    Args:
        box: As asked.
        storage_start: Where its storage starts in the file.
    """

    def __init__(self, box: FileBox, storage_start: int) -> None:
        self._box = box
        place, chunk = box.source.place, box.source.chunk
        item = place.dtype.itemsize
        if chunk is None:
            span = place.span(box.offsets, box.out.shape)
            start = storage_start + span.start
            sizes: tuple[int, ...] = (span.num_bytes // item,)
            offsets: tuple[int, ...] = (0,)
            self._run: torch.Tensor | None = torch.empty(sizes, dtype=place.dtype, device="cpu")
            tensor = self._run
        else:
            start = storage_start + place.storage_offset * item
            sizes, offsets = chunk.sizes, chunk.order(box.offsets)
            self._run = None
            tensor = box.out.permute(chunk.dims)
        payload = ByteRange(start, start + math.prod(sizes) * item)
        stored = StoredItem(
            _FILE, payload, "raw", payload, dtype=dtype_name(place.dtype), sizes=sizes
        )
        self.target = Target(_read_item(offsets, tensor.shape), stored, tensor)

    def take(self, piece: Piece, data: memoryview) -> None:
        """Take the bytes of a piece; with the last one the box is done. Any thread."""
        copy_piece(piece, data)
        if self.target.is_complete_after_one_more():
            self._finish()

    def _finish(self) -> None:
        place, out = self._box.source.place, self._box.out
        with torch.inference_mode(out.is_inference()):
            if self._run is not None:
                out.copy_(self._run.as_strided(tuple(out.shape), place.strides))
                self._run = None
            if place.is_conj:
                out.copy_(out.conj().resolve_conj())
            if place.is_neg:
                out.neg_()


def _read_item(offsets: Sequence[int], sizes: Sequence[int]) -> ReadItem:
    index, at = MetadataIndex(_FILE), torch.Size(offsets)
    return ReadItem(LoadItemType.TENSOR, index, at, index, at, torch.Size(sizes))


def _header(member: Member) -> ByteRange:
    return ByteRange(member.header_offset, member.names_end)


def _header_target(member: Member) -> Target:
    item = StoredItem(_FILE, _header(member), "bytes", _header(member))
    return Target(_read_item((), ()), item)


Messages: TypeAlias = Sequence[memoryview]
"""The bytes of a wave's messages, by number."""

Begin: TypeAlias = Callable[[int], "Future[Messages]"]
"""Begins to read a wave, by number."""

Take: TypeAlias = Callable[[Portion, memoryview], None]
"""Takes a portion's bytes, valid for the call. In the thread that calls `carry`."""


def carry(
    group: RankGroup,
    waves: Sequence[Sequence[Leg]],
    take: Take,
    begin: Begin | None,
    stats: ReadStats,
) -> None:
    """Carry all waves. All ranks.

    Args:
        group: The ranks that load together; lanes are open where a message leaves its rank.
        waves: This rank's legs, by wave.
        take: Takes what this rank wants.
        begin: On the rank that reads; None on the others.
        stats: Counts bytes received, and those held outside the budget of requests.

    Raises:
        RankFailures: On every rank, if any failed to read, to carry or to take.
    """
    messages: Messages = ()
    reading = begin(0) if begin is not None and waves else None
    for number in range(len(waves) + 1):
        read: list[memoryview] = []
        work = partial(_trade_and_read, group, take, stats)
        legs = waves[number - 1] if number else ()
        steps.each(group, _name(number), partial(work, legs, messages, reading, read))
        messages = read
        is_last = number + 1 >= len(waves)
        reading = None if begin is None or is_last else begin(number + 1)


def _name(number: int) -> str:
    return f"read wave {number}" if not number else f"carry wave {number - 1}, read wave {number}"


def _trade_and_read(
    group: RankGroup,
    take: Take,
    stats: ReadStats,
    legs: Sequence[Leg],
    messages: Messages,
    reading: Future[Messages] | None,
    read: list[memoryview],
) -> None:
    """Carry one wave, then wait until the next is read."""
    _trade(group, legs, messages, take, stats)
    if reading is not None:
        read += reading.result()
    held = sum(message.nbytes for message in (*messages, *read))
    stats.peak_bytes = max(stats.peak_bytes, held)


def _trade(
    group: RankGroup, legs: Sequence[Leg], messages: Messages, take: Take, stats: ReadStats
) -> None:
    """Send and receive the messages of a wave, pass them on, and take this rank's portions.

    Between two ranks, sends and receives match in the order in which they are posted: both
    sides post in the order of the messages.
    """
    receives: list[tuple[memoryview, Pending | None]] = []
    sends: list[Pending] = []
    for leg in legs:
        if leg.source is None:
            receives.append((messages[leg.message], None))
            sends += [group.post_send(messages[leg.message], to) for to in leg.forwards]
        else:
            into = np.empty(leg.num_bytes, np.uint8).data
            receives.append((into, group.post_receive(into, leg.source)))
    stats.peak_bytes = max(stats.peak_bytes, sum(data.nbytes for data, _ in receives))
    for leg, (data, pending) in zip(legs, receives, strict=True):
        if pending is not None:
            pending.wait(group.deadline_s)
            stats.received_bytes += leg.num_bytes
            sends += [group.post_send(data, to) for to in leg.forwards]
        for portion in leg.portions:
            take(portion, data[portion.start : portion.start + portion.num_bytes])
    for sent in sends:
        sent.wait(group.deadline_s)


_SCALARS = (bool, int, float, complex, str, bytes, type(None))


def pickle_value(file: TorchFile, value: Any) -> bytes:
    """Return a value as ``torch.save`` writes it; tensors inside are read whole.

    Args:
        file: Where the value comes from.
        value: As the file's structure has it: tensors are stand-ins.

    Raises:
        IncompatibleError: If a tensor inside has no bytes in the file.
        CorruptError: As `TorchFile.read_box`.
    """
    if type(value) not in _SCALARS:
        value = _with_tensors(value, file.read_box)
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _with_tensors(value: Any, read: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy with memory behind every tensor; the value itself if it has none."""
    stand_ins: list[torch.Tensor] = []
    stream = io.BytesIO()
    pickler = _Pickler(stream, stand_ins)
    pickler.dump(value)
    if not stand_ins:
        return value
    stream.seek(0)
    return _Unpickler(stream, [read(one) for one in stand_ins]).load()


class _Pickler(pickle.Pickler):
    """Puts tensors aside."""

    def __init__(self, stream: io.BytesIO, stand_ins: list[torch.Tensor]) -> None:
        super().__init__(stream, protocol=5)
        self._stand_ins = stand_ins
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        number = self._numbers.setdefault(id(value), len(self._stand_ins))
        if number == len(self._stand_ins):
            self._stand_ins.append(value)
        return number


class _Unpickler(pickle.Unpickler):
    """Puts tensors back. What it reads was pickled by this process just now."""

    def __init__(self, stream: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(stream)
        self._tensors = tensors

    def persistent_load(self, number: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._tensors[number]
        return tensor


# Of the budget, a quarter is the wave on its way, a quarter the next one, and a quarter what
# is asked for; the rest is the engine's, which allocates each answer anew (see `fetch`).
_WAVE_SHARE = 4
_REQUEST_SHARE = 4
_DIRECT_REQUEST_SHARE = 2


@dataclass(frozen=True, slots=True)
class Access:
    """How ranks reach the file.

    Attributes:
        open_file: Opens it; called on the reading rank.
        open_reads: Opens a way to read its bytes, to be closed by the stack; called on every
            rank that reads.
    """

    open_file: Callable[[], TorchFile]
    open_reads: Callable[[ExitStack], ReadAt]


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a rank wants of the reading rank: boxes, and keys of values by item."""

    wants: Sequence[WaveWant]
    values: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class _Orders:
    """What a rank is to do: its legs by wave, and how long its values are by item."""

    waves: Sequence[Sequence[Leg]]
    value_bytes: dict[int, int]
    needs_lanes: bool


class LoadJob:
    """Opens the file for all ranks, then fills their targets. Close it in any case.

    Every method but `close` is collective.

    Args:
        group: The ranks that load together; its coordinator is the rank that reads.
        access: How they reach the file.
        config: Sizes, bounds and casts.
        is_direct: Whether every rank reads its own tensors.
    """

    def __init__(
        self, group: RankGroup, access: Access, config: ReadConfig, *, is_direct: bool
    ) -> None:
        self._group = group
        self._access = access
        self._config = config
        self._is_direct = is_direct
        self._wave_bytes = max(config.budget_bytes // _WAVE_SHARE, 1)
        self._stack = ExitStack()
        self._catalogue: Catalogue
        self._content: FileContent | None = None
        self._plan: list[Wave] = []
        self._blobs: list[bytes] = []
        self.stats = ReadStats()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._stack.close()

    def open(self) -> Catalogue:
        """Open the file on the reading rank; return what it holds, on every rank.

        Raises:
            RankFailures: On every rank, if the file cannot be opened.
        """

        def look() -> Catalogue:
            file = self._stack.enter_context(self._access.open_file())
            catalogue, self._content = open_content(file, with_sources=self._is_direct)
            return catalogue

        self._catalogue = steps.broadcast(self._group, "open the torch.save file", look)
        return self._catalogue

    def read(self, finish_plan: Callable[[], LoadPlan], planner: LoadPlanner, meter: Meter) -> None:
        """Fill this rank's targets.

        Args:
            finish_plan: Returns this rank's plan; part of the first step.
            planner: Resolves targets, and is told of complete ones.
            meter: Counts the bytes delivered.

        Raises:
            RankFailures: On every rank, if any failed.
        """
        own, orders = self._agree(finish_plan, planner)
        if orders.needs_lanes:
            self._group.open_lanes()
        delivery = Delivery(own, planner, orders.value_bytes, meter)
        self.stats.num_targets, self.stats.needed_bytes = len(own.targets), delivery.num_bytes
        with ExitStack() as stack:
            filler = self._open_filler(stack)
            begin = None if self._content is None else partial(self._begin, filler)
            carry(self._group, orders.waves, delivery.take, begin, self.stats)
            steps.each(self._group, "finish", partial(self._finish, own, delivery, filler))
            if filler is not None:
                self.stats.peak_bytes += filler.peak_bytes

    # --- what to carry -----------------------------------------------------------------

    def _agree(
        self, finish_plan: Callable[[], LoadPlan], planner: LoadPlanner
    ) -> tuple[OwnPart, _Orders]:
        resolved: list[OwnPart] = []

        def ask() -> _Asked:
            items = finish_plan().items
            resolved.append(resolve_own_part(items, planner, self._catalogue, self._config))
            return _Asked(() if self._is_direct else resolved[0].wants, resolved[0].values)

        orders = steps.reduce_scatter(self._group, "plan what to read", ask, self._order)
        return resolved[0], orders

    def _order(self, asked: Sequence[_Asked]) -> list[_Orders]:
        """Plan the waves. Reading rank only."""
        content = self._content
        assert content is not None, "the coordinator of the group is the rank that reads"
        wanted = {want.source for one in asked for want in one.wants}
        extents = {number: content.sources[number].extent for number in wanted}
        first = len(content.sources)
        numbers = self._pickle_values({key for one in asked for key in one.values.values()})
        extents |= {
            first + number: Extent((len(blob),), 1, (0,)) for number, blob in enumerate(self._blobs)
        }
        value_bytes = [
            {item: len(self._blobs[numbers[key]]) for item, key in one.values.items()}
            for one in asked
        ]
        wants = [
            [*one.wants]
            + [
                WaveWant(item, first + numbers[key], (0,), (lengths[item],))
                for item, key in one.values.items()
            ]
            for one, lengths in zip(asked, value_bytes, strict=True)
        ]
        self._plan = plan_waves(extents, wants, wave_bytes=self._wave_bytes)
        legs = route(self._plan, self._group.size, self._group.rank)
        needs_lanes = any(leg.source is not None for own in legs for wave in own for leg in wave)
        return [
            _Orders(waves, lengths, needs_lanes)
            for waves, lengths in zip(legs, value_bytes, strict=True)
        ]

    def _pickle_values(self, keys: Collection[str]) -> dict[str, int]:
        """Pickle values, equal plain ones once; return the number of its bytes by key."""
        assert self._content is not None
        numbers: dict[str, int] = {}
        same: dict[str, int] = {}
        for key in sorted(keys):
            value = self._content.values[key]
            # 20,000 parameters have 20,000 step counters, and few numbers in them.
            name = repr(value) if type(value) in (bool, int, float, type(None)) else None
            if name in same:
                numbers[key] = same[name]
                continue
            numbers[key] = len(self._blobs)
            self._blobs.append(pickle_value(self._content.file, value))
            if name is not None:
                same[name] = numbers[key]
        return numbers

    # --- bytes -------------------------------------------------------------------------

    def _open_filler(self, stack: ExitStack) -> Filler | None:
        """Return what reads on this rank; None where another rank reads for it."""
        if self._content is None and not self._is_direct:
            return None
        share = _DIRECT_REQUEST_SHARE if self._is_direct else _REQUEST_SHARE
        filler = Filler(
            self._access.open_reads(stack),
            self._content.members if self._content is not None else self._catalogue.members,
            self._config,
            budget_bytes=self._config.budget_bytes // share,
            what=self._catalogue.url,
            stats=self.stats,
        )
        return stack.enter_context(filler)

    def _begin(self, filler: Filler | None, number: int) -> Future[Messages]:
        assert filler is not None
        return filler.begin(partial(self._fill, filler, number))

    def _fill(self, filler: Filler, number: int) -> Messages:
        """Read one wave into its messages."""
        assert self._content is not None
        sources = self._content.sources
        messages: list[memoryview] = []
        boxes: list[FileBox] = []
        for message in self._plan[number].messages:
            data = np.empty(message.num_bytes, np.uint8)
            messages.append(data.data)
            for part in message.parts:
                out = data[part.start : part.start + part.num_bytes]
                if part.source < len(sources):
                    source = sources[part.source]
                    boxes.append(FileBox(source, part.offsets, _tensor(out, source, part.sizes)))
                else:
                    blob = self._blobs[part.source - len(sources)]
                    at = part.offsets[0]
                    out[:] = np.frombuffer(blob, np.uint8)[at : at + part.num_bytes]
        filler.fill(boxes)
        return messages

    def _finish(self, own: OwnPart, delivery: Delivery, filler: Filler | None) -> None:
        """Read what this rank reads for itself, and look whether the file is still the same."""
        delivery.commit_empty()
        if self._is_direct and filler is not None:
            for wants in _batches(own, self._wave_bytes):
                filler.fill([self._own_box(want, own) for want in wants])
                for want in wants:
                    delivery.commit(want.item)
        if self._content is not None:
            self._content.file.check_unchanged()

    def _own_box(self, want: WaveWant, own: OwnPart) -> FileBox:
        tensor = own.targets[want.item].tensor
        assert tensor is not None
        return FileBox(self._catalogue.sources[want.source], want.offsets, tensor)


def _batches(own: OwnPart, batch_bytes: int) -> Iterator[list[WaveWant]]:
    """Cut a rank's boxes into lists of about so many bytes, in the order of the file."""
    batch: list[WaveWant] = []
    num_bytes = 0
    for want in sorted(own.wants, key=lambda want: (want.source, want.offsets)):
        batch.append(want)
        num_bytes += num_elements(want.sizes) * item_bytes(own.targets[want.item].item.dtype)
        if num_bytes >= batch_bytes:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _tensor(data: npt.NDArray[np.uint8], source: Source, sizes: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(data).view(source.place.dtype).view(sizes)


class BroadcastingTorchSaveReader(StorageReader):
    """Load a ``torch.save`` file from an object store into any sharded state dict.

    A DCP ``StorageReader`` for ``dcp.load`` and `dcpstore.load`, with any planner: those of
    dcpstore and torch's `DynamicMetaLoadPlanner` alike. One rank reads, by ranged GETs of what
    any rank wants, and sends every other rank the part of each tensor that it holds, over
    connections of its own beside the process group. Values that are no tensors are sent to
    the ranks whose state dict has their key. No rank holds more than the budget beside its
    targets: tensors travel in pieces.

    Keys, kinds, shapes and dtypes are checked on all ranks before any tensor is read, so a
    mismatch changes nothing; whatever fails on one rank is raised on all of them. One object
    serves many loads, one at a time. Needs permission to get.

    Args:
        checkpoint_id: The file: a URL such as ``s3://bucket/model.pt``, or a local path. May
            be given to the load instead.
        coordinator_rank: The rank that reads, as a rank of the group. Any, also where DCP's
            own coordinator is another. `dcpstore.load` plans on this rank, too.
        storage_options: fsspec's options for the URL's protocol.
        config: Sizes, bounds, retries and casts. ``allow_pickle`` opens files that
            ``torch.load(weights_only=True)`` refuses, and runs the code they name.
        process_group: The ranks that load together; None for all, or for this process alone
            where torch.distributed is not initialised. The same group that ``dcp.load`` is
            given, which does not tell its reader. `dcpstore.load` brings its own.
        no_dist: Load in this process alone; pass it where ``dcp.load`` is passed it.
        direct: Every rank reads its own parts of tensors from the store, and only keys, shapes
            and values travel. Faster where ranks have bandwidth of their own to the store and
            each holds a part; replicated tensors are then read by every rank.
        deadline_s: Most seconds that one step (opening, a wave) may take.
        store_opener: Opens the store; tests pass one that injects faults.

    Raises:
        ConfigError: If the URL cannot be that of a file.
    """

    def __init__(
        self,
        checkpoint_id: str | os.PathLike[str] | None = None,
        coordinator_rank: int = 0,
        *,
        storage_options: Mapping[str, Any] | None = None,
        config: ReadConfig | None = None,
        process_group: Ranks = None,
        no_dist: bool = False,
        direct: bool = False,
        deadline_s: float = 600.0,
        store_opener: Callable[..., Store] = open_store,
    ) -> None:
        super().__init__()
        self.coordinator_rank = coordinator_rank
        self._options = dict(storage_options or {})
        self._config = config or ReadConfig()
        self._ranks: Ranks = SingleGroup(deadline_s) if no_dist else process_group
        self._is_direct = direct
        self._deadline_s = deadline_s
        self._opener = store_opener
        self._url: str | os.PathLike[str] | None = None
        self._lent: RankGroup | None = None
        self._group: RankGroup | None = None
        self._job: LoadJob | None = None
        self._stack = ExitStack()
        self.last_read: ReadStats | None = None
        """What this rank's last load did; None before it."""
        self.reset(checkpoint_id)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.checkpoint_id!r})"

    @property
    def checkpoint_id(self) -> str | None:
        """The file that the next load reads."""
        return None if self._url is None else redact(os.fspath(self._url))

    @property
    def config(self) -> ReadConfig:
        """Sizes, bounds, casts and trust."""
        return self._config

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether a URL or path can be that of a file that is served."""
        try:
            file_location(checkpoint_id)
        except ConfigError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for another load, from another file if one is given; options stay.

        Raises:
            ConfigError: If the URL cannot be that of a file.
        """
        self._end()
        if checkpoint_id is not None:
            file_location(checkpoint_id)
            self._url = checkpoint_id

    def join(self, group: RankGroup) -> None:
        """Take part in the steps of an open group in the next load. All ranks, before it.

        Args:
            group: Its coordinator reads. Stays open.

        Raises:
            ConfigError: If the coordinator is not ``coordinator_rank``.
        """
        if group.coordinator != self.coordinator_rank:
            raise ConfigError(
                f"the reader's coordinator_rank is {self.coordinator_rank}, and the group that"
                f" loads has {group.coordinator}; let them agree"
            )
        self._lent = group

    def read_metadata(self) -> Metadata:
        """Open the file on the reading rank; return what it holds, on every rank. Collective.

        Raises:
            ConfigError: If no file was named.
            RankFailures: On every rank of several, if the file cannot be opened. Where there is
                but one rank: the cause itself, as `open_torch_file` says.
        """
        self._end()
        url = self._url
        if url is None:
            raise ConfigError(
                "no file was named: pass checkpoint_id to the reader or to the load, such as"
                " s3://bucket/model.pt"
            )
        lent, self._lent = self._lent, None
        ranks = self._ranks if lent is None else lent
        with ExitStack() as stack:
            group = stack.enter_context(
                join_ranks(
                    ranks, self.coordinator_rank, self._deadline_s, action="torch.save", url=url
                )
            )
            access = Access(partial(self._open_file, url), partial(self._open_reads, url))
            job = LoadJob(group, access, self._config, is_direct=self._is_direct)
            stack.callback(job.close)
            with plain_cause_of_one(group):
                catalogue = job.open()
            self._group, self._job, self._stack = group, job, stack.pop_all()
        return catalogue.metadata()

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: what the file holds is known, and a planner may have changed its view."""
        del metadata, is_coordinator, args, kwargs

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans. DCP's coordinator only."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> TorchFuture[None]:
        """Fill this rank's targets. Returns when all are there. Collective.

        Planner methods are called in the calling thread only.

        Raises:
            RankFailures: On every rank of several, if any failed.
            IncompatibleError: Where there is but one rank, like all below: if a key is not in
                the file, or its kind, shape or dtype does not fit; nothing was changed.
            ConflictError: If the file was replaced meanwhile.
            CorruptError: If the file is damaged.
            StoreError: If the store refuses.
        """
        self.read_planned(lambda: plan, planner, Meter("load"))
        future: TorchFuture[None] = TorchFuture()
        future.set_result(None)
        return future

    def read_planned(
        self, finish_plan: Callable[[], LoadPlan], planner: LoadPlanner, meter: Meter
    ) -> ReadStats:
        """Do what `read_data` does, with a plan that is made in the first step. Collective.

        Args:
            finish_plan: Returns this rank's plan; if it raises, every rank is told.
            planner: Resolves targets, and is told of complete ones.
            meter: Counts the bytes delivered.

        Raises: as `read_data`.
        """
        group, job = self._group, self._job
        if group is None or job is None:
            raise ConfigError("read_metadata comes before read_data, once for every load")
        stack, self._stack = self._stack, ExitStack()
        self._group = self._job = None
        self.last_read = job.stats
        with stack, plain_cause_of_one(group):
            job.read(finish_plan, planner, meter)
        return job.stats

    def _end(self) -> None:
        """Leave the group of a load that did not come to its end."""
        stack, self._stack = self._stack, ExitStack()
        self._group = self._job = None
        stack.close()

    def _open_file(self, url: str | os.PathLike[str]) -> TorchFile:
        return open_torch_file(
            url,
            storage_options=self._options,
            weights_only=not self._config.allow_pickle,
            config=self._config,
            opener=self._opener,
        )

    def _open_reads(self, url: str | os.PathLike[str], stack: ExitStack) -> ReadAt:
        parent, key = file_location(url)
        folder = Folder(parent, self._options, self._config, self._opener)
        stack.callback(folder.close)
        return partial(folder.open().get_range, key)
