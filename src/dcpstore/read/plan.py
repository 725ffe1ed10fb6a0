"""Which byte ranges a load asks for, and what each answer is good for.

Boxes of chunks become pieces (one sub-box, one span of bytes, widened to whole checksum
blocks), and pieces that lie close together in an object become one request::

    object   |....[piece][piece]......[piece].................[piece]....|
    request       [      one ranged GET     ]                 [ GET ]
                                 gap <= join_gap_bytes    a wider gap stays unread
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dcpstore.format.boxes import Box, bands, is_one_run, num_elements, runs
from dcpstore.format.manifest import StoredItem
from dcpstore.store.ranges import ByteRange, cut, round_out


@dataclass(frozen=True, slots=True)
class Want:
    """A box of a stored item that somebody needs.

    Attributes:
        slot: The caller's number for it.
        item: Where the bytes lie. If not raw, the whole record is wanted.
        offsets: First element of the box in the chunk (raw only).
        sizes: Elements of the box (raw only).
        item_bytes: Bytes per element (raw only).
        dense_target: Whether the target is contiguous, so that a run of elements of the
            chunk is a run of elements of the target.
    """

    slot: int
    item: StoredItem
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    item_bytes: int = 1
    dense_target: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a want, answered by one request.

    Attributes:
        slot: The want's number.
        box: The sub-box in the chunk, its span counted from the payload's start. None: all
            of the record, or a part of it at ``span``.
        is_flat: Whether the box counts elements of the flattened chunk.
        span: Bytes needed, counted from the start of the object.
        fetch: Bytes fetched: the span widened to whole checksum blocks.
    """

    slot: int
    box: Box | None
    is_flat: bool
    span: ByteRange
    fetch: ByteRange


@dataclass(frozen=True, slots=True)
class Request:
    """One ranged GET."""

    key: str
    range: ByteRange
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Pieces:
    """All pieces of a load, not yet joined.

    Attributes:
        by_key: Per object.
        per_slot: Number of pieces per slot; a slot is complete when all of its pieces are.
        needed_bytes: Bytes of the elements wanted.
    """

    by_key: dict[str, list[Piece]]
    per_slot: dict[int, int]
    needed_bytes: int


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """All requests of a load.

    Attributes:
        requests: In the order of object and offset.
        num_pieces: Pieces per slot; a slot is complete when all of its pieces are.
        needed_bytes: Bytes of the elements wanted.
        fetched_bytes: Bytes asked for; the rest is read amplification.
    """

    requests: tuple[Request, ...]
    num_pieces: dict[int, int]
    needed_bytes: int
    fetched_bytes: int

    def __str__(self) -> str:
        ratio = self.fetched_bytes / self.needed_bytes if self.needed_bytes else 1.0
        return (
            f"{len(self.requests)} requests, {self.fetched_bytes} bytes for"
            f" {self.needed_bytes} needed ({ratio:.3f}x)"
        )


def plan_reads(
    wants: Iterable[Want], *, request_bytes: int, join_gap_bytes: int, verify: bool = True
) -> ReadPlan:
    """Plan the requests that satisfy ``wants``.

    Args:
        wants: Boxes of stored items. An empty box costs nothing and has no piece.
        request_bytes: Longest request, unless one checksum block is longer.
        join_gap_bytes: Widest hole worth fetching along.
        verify: Widen to whole checksum blocks, so that everything fetched can be checked.
    """
    pieces = plan_pieces(
        wants, request_bytes=request_bytes, join_gap_bytes=join_gap_bytes, verify=verify
    )
    requests = join_pieces(
        pieces.by_key, request_bytes=request_bytes, join_gap_bytes=join_gap_bytes
    )
    fetched = sum(request.range.num_bytes for request in requests)
    return ReadPlan(requests, pieces.per_slot, pieces.needed_bytes, fetched)


def plan_pieces(
    wants: Iterable[Want], *, request_bytes: int, join_gap_bytes: int, verify: bool = True
) -> Pieces:
    """Cut ``wants`` into pieces; see `plan_reads`.

    A piece of a whole item depends on the item and the sizes alone, so ranks that want the
    same items get the same ranges.
    """
    by_key: dict[str, list[Piece]] = {}
    per_slot: dict[int, int] = {}
    needed = 0
    for want in wants:
        pieces = list(_cut_want(want, request_bytes, join_gap_bytes, verify))
        per_slot[want.slot] = len(pieces)
        by_key.setdefault(want.item.key, []).extend(pieces)
        needed += _needed_bytes(want)
    return Pieces(by_key, per_slot, needed)


def join_pieces(
    by_key: Mapping[str, Sequence[Piece]], *, request_bytes: int, join_gap_bytes: int
) -> tuple[Request, ...]:
    """Join pieces that lie close together into requests; see `plan_reads`."""
    return tuple(
        request
        for key in sorted(by_key)
        for request in _join(key, by_key[key], request_bytes, join_gap_bytes)
    )


def _needed_bytes(want: Want) -> int:
    if want.item.kind == "raw":
        return num_elements(want.sizes) * want.item_bytes
    return want.item.record.num_bytes


def _cut_want(want: Want, request_bytes: int, join_gap_bytes: int, verify: bool) -> Iterator[Piece]:
    item = want.item
    block_bytes = item.block_bytes if verify and item.checksums is not None else 1
    if item.kind != "raw":
        for part in cut(
            _size_of(item.record), max(request_bytes, block_bytes), align_bytes=block_bytes
        ):
            span = ByteRange(item.record.start + part.start, item.record.start + part.end)
            yield Piece(want.slot, None, False, span, span)
        return
    if 0 in want.sizes:
        return
    flat = want.dense_target and is_one_run(item.sizes, want.sizes)
    for box in _boxes(want, flat, request_bytes, join_gap_bytes, block_bytes):
        start = item.payload.start
        fetch = round_out(box.span, block_bytes, item.payload.num_bytes)
        yield Piece(
            want.slot,
            box,
            flat,
            ByteRange(start + box.span.start, start + box.span.end),
            ByteRange(start + fetch.start, start + fetch.end),
        )


def _boxes(
    want: Want, flat: bool, request_bytes: int, join_gap_bytes: int, block_bytes: int
) -> Iterator[Box]:
    if flat:
        return runs(
            want.item.sizes,
            want.offsets,
            want.sizes,
            want.item_bytes,
            max_bytes=request_bytes,
            align_bytes=max(block_bytes, want.item_bytes),
        )
    return bands(
        want.item.sizes,
        want.offsets,
        want.sizes,
        want.item_bytes,
        max_bytes=request_bytes,
        max_gap_bytes=join_gap_bytes,
    )


def _size_of(whole: ByteRange) -> ByteRange:
    return ByteRange(0, whole.num_bytes)


def _join(
    key: str, pieces: Sequence[Piece], request_bytes: int, join_gap_bytes: int
) -> Iterator[Request]:
    ordered = sorted(pieces, key=lambda piece: piece.fetch)
    group: list[Piece] = []
    start = end = 0
    for piece in ordered:
        fits = max(end, piece.fetch.end) - start <= request_bytes
        if group and fits and piece.fetch.start - end <= join_gap_bytes:
            group.append(piece)
            end = max(end, piece.fetch.end)
            continue
        if group:
            yield Request(key, ByteRange(start, end), tuple(group))
        group, (start, end) = [piece], piece.fetch
    if group:
        yield Request(key, ByteRange(start, end), tuple(group))
