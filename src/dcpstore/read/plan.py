"""Which byte ranges a load asks for, and what each answer is good for.

Targets are cut into pieces (one sub-box, one span of bytes, widened to whole checksum blocks),
and pieces that lie close together in an object become one request::

    object   |....[piece][piece]......[piece].................[piece]....|
    request       [      one ranged GET     ]                 [ GET ]
                                 gap <= join_gap_bytes    a wider gap stays unread

The answer is received straight into the targets where these lie in host memory and have the
dtype that is stored. What nobody wants goes to scratch memory: record headers between two items,
and the rest of a checksum block that is wanted in part::

    request        [rest][ item a      ][hdr][ item b                ]
    memory         [    ][ target of a ][   ][ target of b           ]

Such requests take little memory, so several that follow each other are made one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import attrgetter

from dcpstore.format.dtypes import dtype_from_name, item_bytes
from dcpstore.format.payload import Box, bands, is_one_run, note_written, span_of, writable_payload
from dcpstore.read.targets import Piece, Target, check_inside, part_of_target
from dcpstore.store.base import ByteRange, Destination
from dcpstore.store.ranges import cut, group, round_out

# The answer takes 0.16 s of a 100 MB/s connection, beside which a delay of 0.03 s counts little.
MOST_LANDING_BYTES = 16 << 20
"""Longest request that is received straight into its targets."""

_LEAST_PIECE_BYTES = 1 << 16  # on average; smaller ones cost less to copy
_MOST_GAP_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Request:
    """One ranged GET.

    Attributes:
        key: The object.
        range: Bytes of it.
        pieces: What the bytes are good for, in ascending order.
        memory: Where the bytes of each piece's ``fetch`` are received, one part behind the
            other; none where they are received into a buffer and copied from there.
    """

    key: str
    range: ByteRange
    pieces: tuple[Piece, ...]
    memory: tuple[tuple[memoryview, ...], ...] = ()

    @property
    def buffer_bytes(self) -> int:
        """Memory that it takes besides the targets' own."""
        if not self.memory:
            return self.range.num_bytes
        return self.range.num_bytes - sum(piece.span.num_bytes for piece in self.pieces)

    def window(self, data: memoryview, wanted: ByteRange) -> memoryview:
        """Return the bytes of a range of the object out of the answer."""
        start = wanted.start - self.range.start
        return data[start : start + wanted.num_bytes]

    def destination(self) -> Destination:
        """Return `memory` and what lies between, for one fetch; it may be revoked."""
        parts = []
        at = self.range.start
        for piece, own in zip(self.pieces, self.memory, strict=True):
            parts += [_scratch(piece.fetch.start - at), *own]
            at = piece.fetch.end
        return Destination([part for part in parts if part])

    def note_written(self) -> None:
        """Tell autograd that the targets changed."""
        for piece in self.pieces:
            assert piece.target.tensor is not None
            note_written(piece.target.tensor)


def plan_pieces(
    targets: Iterable[Target], *, request_bytes: int, join_gap_bytes: int, verify: bool = True
) -> dict[str, list[Piece]]:
    """Cut what targets want into pieces, and note with each target how many it waits for.

    A piece of a whole item depends on the item and the sizes alone, so ranks that want the
    same items get the same ranges.

    Args:
        targets: Checked; an empty one costs nothing and has no piece.
        request_bytes: Longest request, unless one checksum block is longer.
        join_gap_bytes: Widest hole worth fetching along.
        verify: Widen to whole checksum blocks, so that everything fetched can be checked.

    Returns:
        The pieces of each object.

    Raises:
        CorruptError: If the box to read is not inside the stored chunk.
    """
    by_key: dict[str, list[Piece]] = {}
    for target in targets:
        item = target.item
        block_bytes = item.block_bytes if verify and item.checksums is not None else 1
        whole = item.payload if item.kind == "raw" else item.record
        pieces = [
            Piece(
                target,
                _moved(span, whole.start),
                _moved(round_out(span, block_bytes, whole.num_bytes), whole.start),
                box,
            )
            for span, box in _cut(target, request_bytes, join_gap_bytes, block_bytes)
        ]
        target.missing = len(pieces)
        by_key.setdefault(item.key, []).extend(pieces)
    return by_key


def _cut(
    target: Target, request_bytes: int, join_gap_bytes: int, block_bytes: int
) -> Iterator[tuple[ByteRange, Box | None]]:
    """Yield bytes of the record or payload, and which box they bring if not all are wanted."""
    item, (offsets, sizes) = target.item, target.box
    run, align = ByteRange(0, item.record.num_bytes), block_bytes
    if item.kind == "raw":
        assert target.tensor is not None
        check_inside(item.sizes, target)
        if 0 in sizes:
            return
        strides, element_bytes = item.element_strides, item_bytes(item.dtype)
        is_run = item.strides is None and is_one_run(item.sizes, sizes)
        if not (is_run and target.tensor.is_contiguous()):
            # What was expanded is read once.
            sizes = tuple(
                1 if stride == 0 else size for size, stride in zip(sizes, strides, strict=True)
            )
            bounds = {"max_bytes": request_bytes, "max_gap_bytes": join_gap_bytes}
            for box in bands(strides, offsets, sizes, element_bytes, **bounds):
                yield span_of(strides, *box, element_bytes), box
            return
        run = span_of(strides, offsets, sizes, element_bytes)
        align = max(block_bytes, element_bytes)
    for span in cut(run, max(request_bytes, align), align_bytes=align):
        yield span, None


def _moved(span: ByteRange, by: int) -> ByteRange:
    return ByteRange(span.start + by, span.end + by)


def join_pieces(
    by_key: Mapping[str, Sequence[Piece]], *, request_bytes: int, join_gap_bytes: int
) -> list[Request]:
    """Join pieces that lie close together into requests, by object and offset."""
    fetch_of = attrgetter("fetch")
    return [
        Request(key, span, tuple(pieces))
        for key in sorted(by_key)
        for span, pieces in group(
            sorted(by_key[key], key=fetch_of),
            fetch_of,
            max_gap_bytes=join_gap_bytes,
            max_bytes=lambda: request_bytes,
        )
    ]


# --- received straight into the targets -----------------------------------------------


def land(
    requests: Sequence[Request], *, num_in_flight: Callable[[], int], least_bytes: int
) -> Iterator[Request]:
    """Give requests the memory of their targets where they can have it, and join these.

    Each is joined up to one connection's share of what is left, so that requests become
    shorter towards the end, and all connections end at about the same time.

    Args:
        requests: By object and offset.
        num_in_flight: How many the store is asked for at a time, as far as is known now.
        least_bytes: Do not join to less.

    Returns:
        All requests, in their order.
    """
    left_bytes = sum(request.range.num_bytes for request in requests)

    def share_bytes() -> int:
        return min(max(left_bytes // num_in_flight(), least_bytes), MOST_LANDING_BYTES)

    placed = map(_with_memory, requests)
    for (key, lands), run in groupby(placed, lambda one: (one.key, bool(one.memory))):
        if not lands:
            for request in run:
                yield request
                left_bytes -= request.range.num_bytes
            continue
        joined = group(
            run,
            attrgetter("range"),
            max_gap_bytes=_MOST_GAP_BYTES,
            max_bytes=share_bytes,
            may_overlap=False,
        )
        for span, parts in joined:
            pieces = chain.from_iterable(part.pieces for part in parts)
            memory = chain.from_iterable(part.memory for part in parts)
            yield Request(key, span, tuple(pieces), tuple(memory))
            left_bytes -= sum(part.range.num_bytes for part in parts)


def _with_memory(request: Request) -> Request:
    """Add the memory of all targets; none if some need more than to be received."""
    if request.range.num_bytes < _LEAST_PIECE_BYTES * len(request.pieces):
        return request
    memory = []
    at = request.range.start
    for piece in request.pieces:
        own = _memory_of(piece)
        if not own or not 0 <= piece.fetch.start - at <= _MOST_GAP_BYTES:
            return request
        memory.append(own)
        at = piece.fetch.end
    return Request(request.key, request.range, request.pieces, tuple(memory))


def _memory_of(piece: Piece) -> tuple[memoryview, ...]:
    """Return where the bytes of a piece go, and scratch memory around it; none if they cannot."""
    if piece.target.item.kind != "raw" or piece.target.item.strides is not None:
        return ()
    part = part_of_target(piece)
    if part.dtype != dtype_from_name(piece.target.item.dtype):
        return ()
    array = writable_payload(part)
    if array is None or array.nbytes != piece.span.num_bytes:
        return ()
    before = _scratch(piece.span.start - piece.fetch.start)
    return before, array.data, _scratch(piece.fetch.end - piece.span.end)


def _scratch(num_bytes: int) -> memoryview:
    return memoryview(bytearray(num_bytes))
