"""What travels together: waves of messages, planned from the boxes that all ranks want. Pure.

A tensor is cut into bands along its slowest dimensions, so that the parts of a band that
several ranks want are read by one request and sent in one wave::

    saved tensor          ranks 0 to 3 hold columns      messages of the first wave
    0 0 1 1 2 2 3 3  --.
    0 0 1 1 2 2 3 3    |  band: read once           ->   0: its 3 x 2   1: its 3 x 2   2: ...
    0 0 1 1 2 2 3 3  --'
    0 0 1 1 2 2 3 3       the next band             ->   the next wave

What the same ranks want goes into one message, down a tree: to W ranks the root sends
log2(W) times, and every rank receives each of its bytes once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dcpstore.collectives.bulk import tree_children, tree_parent

__all__ = ["Extent", "Leg", "Message", "Part", "Portion", "Want", "Wave", "plan_waves", "route"]

_Rows = npt.NDArray[np.int64]


class Want(NamedTuple):
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
    """A part as its taker sees it; attributes as those of `Part` and `Want`."""

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
    extents: Mapping[int, Extent], wants: Sequence[Sequence[Want]], *, wave_bytes: int
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
