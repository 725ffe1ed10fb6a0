"""Requests whose bytes are received straight into the memory of their targets.

That takes targets in host memory, of the dtype that is stored, where what the request brings
lies in one piece. What nobody wants goes to scratch memory: record headers between two items,
and the rest of a checksum block that is wanted in part::

    request        [rest][ item a      ][hdr][ item b                ]
    memory         [    ][ target of a ][   ][ target of b           ]

Such requests take little memory, so several that follow each other are made one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from dcpstore.format.copying import note_written, writable_payload
from dcpstore.format.dtypes import dtype_from_name
from dcpstore.planning.reads import Piece, Request
from dcpstore.ranges import ByteRange
from dcpstore.slots import Slot, part_of_target
from dcpstore.store.destination import Destination

__all__ = ["MOST_LANDING_BYTES", "Landing", "plan_landings"]

# The answer takes 0.16 s of a 100 MB/s connection, beside which a delay of 0.03 s counts little.
MOST_LANDING_BYTES = 16 << 20
"""Longest request that is received straight into its targets."""

_LEAST_PIECE_BYTES = 1 << 16  # on average; smaller ones cost less to copy
_MOST_GAP_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one piece goes.

    Attributes:
        part: Its elements of the target.
        memory: Theirs, and around it what takes the rest of the outermost checksum blocks.
    """

    part: torch.Tensor
    memory: tuple[memoryview, ...]


@dataclass(frozen=True, slots=True)
class Landing:
    """A request, and where its bytes go.

    Attributes:
        request: What to fetch.
        memory: For all of the request's bytes.
        places: Per piece of the request.
    """

    request: Request
    memory: tuple[memoryview, ...]
    places: tuple[_Place, ...]

    @property
    def scratch_bytes(self) -> int:
        """Memory that is not the targets' own."""
        return self.request.range.num_bytes - sum(p.span.num_bytes for p in self.request.pieces)

    def open(self) -> Destination:
        """Return what one fetch takes; it may be revoked."""
        return Destination(self.memory)

    @property
    def contents(self) -> Iterator[tuple[memoryview, ...]]:
        """The bytes of each piece."""
        return (place.memory for place in self.places)

    def note_written(self) -> None:
        """Tell autograd that the targets changed."""
        for place in self.places:
            note_written(place.part)


def plan_landings(
    requests: Sequence[Request],
    slots: Sequence[Slot],
    *,
    num_in_flight: Callable[[], int],
    least_bytes: int,
) -> Iterator[Request | Landing]:
    """Find the requests that can land, and join them. Keeps the order.

    Each is joined up to one connection's share of what is left, so that requests become
    shorter towards the end, and all connections end at about the same time.

    Args:
        requests: By object and offset.
        slots: The targets, by number.
        num_in_flight: How many the store is asked for at a time, as far as is known now.
        least_bytes: Do not join to less.
    """
    left_bytes = sum(request.range.num_bytes for request in requests)
    most_bytes = 0
    joined: list[tuple[Request, tuple[_Place, ...]]] = []
    for request in requests:
        places = _find_places(request, slots)
        if joined and not (places and _may_follow(joined, request, most_bytes)):
            yield _landing(joined)
            joined = []
        if not joined:
            share = left_bytes // num_in_flight()
            most_bytes = min(max(share, least_bytes), MOST_LANDING_BYTES)
        if places:
            joined.append((request, places))
        else:
            yield request
        left_bytes -= request.range.num_bytes
    if joined:
        yield _landing(joined)


def _may_follow(
    joined: Sequence[tuple[Request, tuple[_Place, ...]]], request: Request, most_bytes: int
) -> bool:
    first, last = joined[0][0], joined[-1][0]
    return (
        request.key == first.key
        and request.range.end - first.range.start <= most_bytes
        and 0 <= request.range.start - last.range.end <= _MOST_GAP_BYTES
    )


def _landing(joined: Sequence[tuple[Request, tuple[_Place, ...]]]) -> Landing:
    requests = [request for request, _ in joined]
    whole = ByteRange(requests[0].range.start, requests[-1].range.end)
    pieces = tuple(piece for request in requests for piece in request.pieces)
    places = tuple(place for _, found in joined for place in found)
    memory = []
    at = whole.start
    for piece, place in zip(pieces, places, strict=True):
        if piece.fetch.start > at:
            memory.append(_scratch(piece.fetch.start - at))
        memory.extend(place.memory)
        at = piece.fetch.end
    return Landing(Request(requests[0].key, whole, pieces), tuple(memory), places)


def _find_places(request: Request, slots: Sequence[Slot]) -> tuple[_Place, ...]:
    """Return the memory of all pieces; nothing if some need more than to be received."""
    if request.range.num_bytes < _LEAST_PIECE_BYTES * len(request.pieces):
        return ()
    places = []
    at = request.range.start
    for piece in request.pieces:
        place = _find_place(piece, slots[piece.slot])
        if place is None or not 0 <= piece.fetch.start - at <= _MOST_GAP_BYTES:
            return ()
        places.append(place)
        at = piece.fetch.end
    return tuple(places)


def _find_place(piece: Piece, slot: Slot) -> _Place | None:
    if piece.box is None:
        return None
    part = part_of_target(piece, slot)
    if part.dtype != dtype_from_name(slot.item.dtype):
        return None
    array = writable_payload(part)
    if array is None or array.nbytes != piece.span.num_bytes:
        return None
    before = piece.span.start - piece.fetch.start
    after = piece.fetch.end - piece.span.end
    return _Place(part, (_scratch(before), array.data, _scratch(after)))


def _scratch(num_bytes: int) -> memoryview:
    return memoryview(bytearray(num_bytes))
