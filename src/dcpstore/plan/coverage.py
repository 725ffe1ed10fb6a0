"""Whether the stored chunks of tensors fill them, each element once.

DCP plans a read for every chunk that meets a wanted box, and none for elements that lie in no
chunk: a load would leave there what was in the target before. So the chunks of all tensors are
looked at together, as columns, before anything is read. A checkpoint that was saved whole has
neither holes nor overlaps; one that is put together from several files, one that lost some, or
the part that a rank saved alone may have::

    tensor 8 x 4        chunks at (0, 0) of 4 x 4, and at (6, 0) of 2 x 4
    +---------+
    |  chunk  |         24 of 32 elements are in a chunk, and no two chunks overlap:
    |---------|         8 elements are in none
    |  hole   |         the hole is the box at (4, 0) of 2 x 4
    |---------|
    |  chunk  |
    +---------+

A load is given the holes as chunks that are stored nowhere (`with_holes`): then any planner plans
a read wherever a wanted box touches one, and the load refuses it before its first request. What
touches no hole can be loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcpstore.errors import CorruptError
from dcpstore.plan.overlap import find_overlaps
from dcpstore.plan.wire import Ints
from dcpstore.text import indented

_MOST_SLABS = 8192  # looked into for the holes of one tensor, about 50 us each
_MOST_ROWS = 1 << 22  # looked at in these, about 100 ns each
_MOST_ELEMENTS = 1 << 62  # of all tensors together, so that no sum overflows


class Flaw(NamedTuple):
    """What is wrong with the chunks of one tensor.

    Attributes:
        fqn: The tensor's key.
        is_hole: Whether elements are in no chunk, which harms only who wants these; otherwise
            chunks contradict each other or their tensor.
        text: What is wrong, for people; the key left out.
    """

    fqn: str
    is_hole: bool
    text: str


class HoleMetadata(ChunkStorageMetadata):
    """A box of a tensor that no chunk touches, in the place of a chunk; stored nowhere."""


_Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


def find_flaws(entries: Mapping[str, Any]) -> list[Flaw]:
    """Find the tensors whose chunks do not fill them, each element once.

    Chunks without elements count for nothing. A box that is named twice counts once.
    Tensors of a single whole chunk, which most are, cost a comparison; all others are sorted
    together.

    Args:
        entries: Of a state dict's metadata, by key; values have no chunks and are passed over.
    """
    by_dims: dict[int, list[tuple[str, TensorStorageMetadata]]] = {}
    for fqn, tensor in entries.items():
        if not isinstance(tensor, TensorStorageMetadata):
            continue
        chunks = tensor.chunks
        if len(chunks) == 1 and chunks[0].sizes == tensor.size and not any(chunks[0].offsets):
            continue
        by_dims.setdefault(len(tensor.size), []).append((fqn, tensor))
    return [flaw for num_dims, some in by_dims.items() for flaw in _look(some, num_dims)]


def _look(tensors: Sequence[tuple[str, TensorStorageMetadata]], num_dims: int) -> Iterator[Flaw]:
    """Look at tensors that have the same number of dimensions."""
    sound: list[tuple[str, TensorStorageMetadata]] = []
    total = 0
    for fqn, tensor in tensors:
        chunks = tensor.chunks
        num_elements = prod(tensor.size)
        if min(tensor.size, default=0) < 0 or total + num_elements > _MOST_ELEMENTS:
            yield Flaw(fqn, False, f"its size {tuple(tensor.size)} is impossible")
        elif _other_dims(chunks, num_dims):
            yield Flaw(fqn, False, "a chunk has another number of dimensions than the tensor")
        elif num_dims == 0 or not chunks:
            if num_elements and not chunks:
                yield Flaw(fqn, True, _held(0, num_elements))
        else:
            total += num_elements
            sound.append((fqn, tensor))
    if sound:
        yield from _compare(sound, num_dims)


def _other_dims(chunks: Sequence[ChunkStorageMetadata], num_dims: int) -> bool:
    found = {*map(len, [one.offsets for one in chunks]), *map(len, [one.sizes for one in chunks])}
    return bool(found - {num_dims})


def _held(held: int, num_elements: int) -> str:
    return f"its chunks hold {held} of {num_elements} elements"


def _compare(tensors: Sequence[tuple[str, TensorStorageMetadata]], num_dims: int) -> Iterator[Flaw]:
    """Compare chunks with their tensors and with each other."""
    number = np.repeat(np.arange(len(tensors)), [len(tensor.chunks) for _, tensor in tensors])
    starts, lengths = _columns((tensor.chunks for _, tensor in tensors), num_dims)
    limits = np.array([tensor.size for _, tensor in tensors], np.int64)[number]
    holds = (lengths != 0).all(axis=1)
    outside = ((starts < 0) | (lengths < 0) | (lengths > limits - starts)).any(axis=1) & holds
    flawed = np.zeros(len(tensors), bool)
    for at in np.flatnonzero(outside).tolist():
        if not flawed[number[at]]:
            flawed[number[at]] = True
            fqn, tensor = tensors[number[at]]
            chunk = _place_text(starts[at], lengths[at])
            yield Flaw(fqn, False, f"the chunk {chunk} lies outside its size {tuple(tensor.size)}")
    if flawed.any() or not holds.all():
        chosen = holds & ~flawed[number]
        number, starts, lengths = number[chosen], starts[chosen], lengths[chosen]
    ends = starts + lengths
    pairs = find_overlaps(number, starts, ends)
    if len(pairs):  # perhaps the same box twice
        chosen = _distinct(number, starts, ends)
        number, starts, lengths, ends = (
            column[chosen] for column in (number, starts, lengths, ends)
        )
        pairs = find_overlaps(number, starts, ends)
    for one, other in pairs.tolist():
        if not flawed[number[one]]:
            flawed[number[one]] = True
            boxes = (_place_text(starts[at], lengths[at]) for at in (one, other))
            yield Flaw(tensors[number[one]][0], False, f"its chunks {' and '.join(boxes)} overlap")
    held = np.zeros(len(tensors), np.int64)
    first = np.flatnonzero(np.diff(number, prepend=-1))
    if len(first):
        held[number[first]] = np.add.reduceat(lengths.prod(axis=1), first)
    for at, (fqn, tensor) in enumerate(tensors):
        if not flawed[at] and held[at] != prod(tensor.size):
            yield Flaw(fqn, True, _held(int(held[at]), prod(tensor.size)))


def _columns(chunks: Iterable[Sequence[ChunkStorageMetadata]], num_dims: int) -> tuple[Ints, Ints]:
    """Return offsets and sizes, a row per chunk."""
    every = list(chain.from_iterable(chunks))
    shape, count = (len(every), num_dims), len(every) * num_dims
    offsets = np.fromiter(chain.from_iterable([one.offsets for one in every]), np.int64, count)
    sizes = np.fromiter(chain.from_iterable([one.sizes for one in every]), np.int64, count)
    return offsets.reshape(shape), sizes.reshape(shape)


def _place_text(offsets: Ints, sizes: Ints) -> str:
    return f"at {tuple(offsets.tolist())} of shape {tuple(sizes.tolist())}"


def _distinct(number: Ints, starts: Ints, ends: Ints) -> Ints:
    """Return the position of one chunk of each box, ascending."""
    order = np.lexsort((*ends.T, *starts.T, number))
    is_new = np.ones(len(order), bool)
    is_new[1:] = number[order[1:]] != number[order[:-1]]
    for column in (starts, ends):
        is_new[1:] |= (column[order[1:]] != column[order[:-1]]).any(axis=1)
    positions: Ints = np.sort(order[is_new])
    return positions


def find_holes(tensor: TensorStorageMetadata) -> list[HoleMetadata] | None:
    """Return boxes that hold exactly the elements that are in no chunk; None if too many.

    Args:
        tensor: Its chunks do not overlap, but for boxes that are named twice.
    """
    starts, lengths = _columns([tensor.chunks], len(tensor.size))
    holds = (lengths != 0).all(axis=1)
    starts, ends = starts[holds], (starts + lengths)[holds]
    chosen = _distinct(np.zeros(len(starts), np.int64), starts, ends)
    try:
        found = _Holes().beside(tuple(tensor.size), starts[chosen], ends[chosen])
    except _TooManyError:
        return None
    return [HoleMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in found]


class _TooManyError(Exception):
    """It would take too long, or too many boxes."""


class _Holes:
    """One search; ends early where it would take long."""

    def __init__(self) -> None:
        self._num_slabs = 0
        self._num_rows = 0

    def beside(self, sizes: tuple[int, ...], starts: Ints, ends: Ints) -> list[_Box]:
        """Cut a box into slabs between the edges of its chunks; look into those with holes."""
        if not len(starts):
            return [((0,) * len(sizes), sizes)] if 0 not in sizes else []
        if not sizes:
            return []
        if len(starts) == 1:
            return _around(sizes, starts[0].tolist(), ends[0].tolist())
        order = np.argsort(starts[:, 0], kind="stable")
        starts, ends = starts[order], ends[order]
        first, last = starts[:, 0], ends[:, 0]
        edges = np.unique(np.concatenate([[0, sizes[0]], first, last]))
        section = (ends - starts)[:, 1:].prod(axis=1)  # elements of a chunk in one row
        change = np.zeros(len(edges), np.int64)
        np.add.at(change, np.searchsorted(edges, first), section)
        np.subtract.at(change, np.searchsorted(edges, last), section)
        has_hole = np.cumsum(change)[:-1] != prod(sizes[1:])
        longest = int((last - first).max())
        slabs: list[tuple[int, int, list[_Box]]] = []
        for at in np.flatnonzero(has_hole).tolist():
            low, high = edges[at : at + 2].tolist()
            near, behind = np.searchsorted(first, [low - longest, low], "right").tolist()
            rows = near + np.flatnonzero(last[near:behind] > low)
            self._count(behind - near)
            inner = self.beside(sizes[1:], starts[rows, 1:], ends[rows, 1:])
            if slabs and slabs[-1][1:] == (low, inner):
                slabs[-1] = (slabs[-1][0], high, inner)
            else:
                slabs.append((low, high, inner))
        return [
            ((low, *offsets), (high - low, *counts))
            for low, high, inner in slabs
            for offsets, counts in inner
        ]

    def _count(self, num_rows: int) -> None:
        self._num_slabs += 1
        self._num_rows += num_rows
        if self._num_slabs > _MOST_SLABS or self._num_rows > _MOST_ROWS:
            raise _TooManyError


def _around(sizes: tuple[int, ...], start: Sequence[int], end: Sequence[int]) -> list[_Box]:
    """Return the boxes around a single chunk."""
    if not sizes:
        return []
    behind = (0,) * (len(sizes) - 1)
    found = [
        ((start[0], *at), (end[0] - start[0], *counts))
        for at, counts in _around(sizes[1:], start[1:], end[1:])
    ]
    if start[0] > 0:
        found.insert(0, ((0, *behind), (start[0], *sizes[1:])))
    if end[0] < sizes[0]:
        found.append(((end[0], *behind), (sizes[0] - end[0], *sizes[1:])))
    return found


# --- what a load does about them -------------------------------------------------------


def with_holes(metadata: Metadata, where: str) -> Metadata:
    """Return the metadata with a `HoleMetadata` for whatever no chunk holds.

    Args:
        metadata: Not changed; returned as it is if its chunks fill their tensors.
        where: The checkpoint, for messages.

    Raises:
        CorruptError: If chunks of a tensor overlap or lie outside it, or if holes are so many
            that they are not worth telling apart.
    """
    flaws = find_flaws(metadata.state_dict_metadata)
    if not flaws:
        return metadata
    entries = dict(metadata.state_dict_metadata)
    storage = metadata.storage_data
    placed = dict(storage) if isinstance(storage, Mapping) else storage
    refused = [flaw for flaw in flaws if not flaw.is_hole]
    for flaw in flaws:
        if flaw.is_hole:
            entry: Any = entries[flaw.fqn]
            holes = find_holes(entry)
            if holes is None:
                refused.append(flaw)
                continue
            entries[flaw.fqn] = replace(entry, chunks=[*entry.chunks, *holes])
            if isinstance(placed, dict):
                for hole in holes:  # a chunk without elements may begin where it does
                    placed.pop(MetadataIndex(flaw.fqn, hole.offsets), None)
    refuse_flaws(refused, where)
    return replace(metadata, state_dict_metadata=entries, storage_data=placed)


def refuse_flaws(flaws: Sequence[Flaw], where: str) -> None:
    """Raise what is wrong with the chunks of tensors.

    Raises:
        CorruptError: If anything is.
    """
    if flaws:
        raise CorruptError(
            f"{where}: stored chunks do not make up their tensors; nothing was read:"
            + indented([f"{flaw.fqn!r}: {flaw.text}" for flaw in flaws]),
            fqn=flaws[0].fqn,
        )


def refuse_lacks(items: Iterable[ReadItem], metadata: Metadata) -> None:
    """Raise where planned reads want a part of a `HoleMetadata`.

    Raises:
        CorruptError: Naming each hole, and how much of the tensor is missing.
    """
    lacks = [lack for item in items if (lack := _describe_lack(item, metadata)) is not None]
    if lacks:
        raise CorruptError(
            "the checkpoint does not hold everything that is wanted; nothing was loaded:"
            f"{indented(lacks)}\nLook for files that were lost or not copied. Where ranks saved"
            " their parts each for itself, a rank can load only what it saved"
        )


def _describe_lack(item: ReadItem, metadata: Metadata) -> str | None:
    index = item.storage_index
    entry = metadata.state_dict_metadata.get(index.fqn)
    if item.type == LoadItemType.BYTE_IO or not isinstance(entry, TensorStorageMetadata):
        return None
    number = index.index
    if number is None or not 0 <= number < len(entry.chunks):
        return None
    hole = entry.chunks[number]
    if not isinstance(hole, HoleMetadata):
        return None
    lost = sum(prod(chunk.sizes) for chunk in entry.chunks if isinstance(chunk, HoleMetadata))
    return (
        f"{index.fqn!r}: no stored chunk holds the elements at {tuple(hole.offsets)} of shape"
        f" {tuple(hole.sizes)}; {lost} of its {prod(entry.size)} elements are missing"
    )
