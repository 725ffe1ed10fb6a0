"""Boxes of saved tensors, read by ranged GETs into memory that is there."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcpstore.budget import ByteBudget, Cancelled
from dcpstore.config import ReadConfig
from dcpstore.fetch import ReadStats
from dcpstore.format.archive import Member, ReadAt, contents_offset
from dcpstore.format.dtypes import dtype_name
from dcpstore.manifest import StoredItem
from dcpstore.planning.reads import Piece, Pieces, Request, Want, join_pieces, plan_pieces
from dcpstore.ranges import ByteRange
from dcpstore.slots import Slot, copy_piece, window
from dcpstore.targets import Target
from dcpstore.torch_save_reader.layout import Source

T = TypeVar("T")

__all__ = ["FileBox", "Filler"]

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
        self._executor = ThreadPoolExecutor(config.max_requests, "dcpstore-fill")
        self._driver = ThreadPoolExecutor(1, "dcpstore-wave")
        self._starts: dict[str, int] = {}
        self._stop = threading.Event()
        self._error: BaseException | None = None

    def __enter__(self) -> Filler:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._stop.set()
        self._driver.shutdown(wait=True)
        self._executor.shutdown(wait=True)

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
        for key, header, data in zip(
            lost, headers, self._executor.map(lambda h: self._read_at(*h), headers), strict=True
        ):
            self._count(header)
            self._starts[key] = contents_offset(self._members[key], data, self._what)
        return {key: guess for key, guess in guesses.items() if guess is not None}

    def _plan(
        self, boxes: Sequence[FileBox], guesses: Mapping[str, int]
    ) -> tuple[list[_Filling], list[str], tuple[Request, ...]]:
        """Return what to fill, the storages whose headers to read along, and the requests."""
        starts = {**self._starts, **guesses}
        fillings = [_Filling(box, starts[box.source.place.storage_key]) for box in boxes]
        headers = list(guesses)
        wants = [one.slot.want(number) for number, one in enumerate(fillings)]
        pieces = self._cut(wants, self._request_bytes)
        looks = [
            Want(len(fillings) + number, _header_item(self._members[key]))
            for number, key in enumerate(headers)
        ]
        by_key = {
            _FILE: [
                *pieces.by_key.get(_FILE, ()),
                *self._cut(looks, _MAX_HEADER_BYTES).by_key.get(_FILE, ()),
            ]
        }
        for number, one in enumerate(fillings):
            one.slot.missing = pieces.per_slot[number]
        # So that a header travels with the first bytes behind it.
        room = max((guesses[key] - self._members[key].header_offset for key in headers), default=0)
        requests = join_pieces(
            by_key,
            request_bytes=self._request_bytes + room,
            join_gap_bytes=self._config.join_gap_bytes,
        )
        return fillings, headers, requests

    def _cut(self, wants: Sequence[Want], request_bytes: int) -> Pieces:
        return plan_pieces(
            wants,
            request_bytes=request_bytes,
            join_gap_bytes=self._config.join_gap_bytes,
            verify=False,
        )

    def _serve_all(
        self, fillings: Sequence[_Filling], headers: Sequence[str], requests: Sequence[Request]
    ) -> None:
        futures: list[Future[None]] = []
        try:
            for request in requests:
                self._count(request.range)
                self._budget.acquire(request.range.num_bytes, cancelled=self._stop.is_set)
                futures.append(self._executor.submit(self._serve, request, fillings, headers))
        except Cancelled:
            pass
        wait(futures)
        if self._error is not None:
            raise self._error

    def _serve(
        self, request: Request, fillings: Sequence[_Filling], headers: Sequence[str]
    ) -> None:
        try:
            if self._stop.is_set():
                return
            data = self._read_at(*request.range)
            for piece in request.pieces:
                if piece.slot >= len(fillings):
                    member = self._members[headers[piece.slot - len(fillings)]]
                    header = window(data, request, piece.span)
                    start = contents_offset(member, header, self._what)
                    self._starts[headers[piece.slot - len(fillings)]] = start
                    continue
                fillings[piece.slot].take(piece, window(data, request, piece.fetch))
        except BaseException as error:  # noqa: BLE001 - kept, and raised again by the caller
            if not self._stop.is_set():
                self._error = error
            self._stop.set()
        finally:
            self._budget.release(request.range.num_bytes)

    def _count(self, span: ByteRange) -> None:
        self._stats.num_requests += 1
        self._stats.fetched_bytes += span.num_bytes


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
        self.slot = Slot(stored, [Target(_read_item(offsets, tensor.shape), stored, tensor)])

    def take(self, piece: Piece, data: memoryview) -> None:
        """Take the bytes of a piece; with the last one the box is done. Any thread."""
        copy_piece(piece, data, self.slot)
        if self.slot.is_complete_after_one_more():
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


def _header_item(member: Member) -> StoredItem:
    return StoredItem(_FILE, _header(member), "bytes", _header(member))
