"""One rank's part of one load from a ``torch.save`` file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from dcpstore.collectives import RankGroup, steps
from dcpstore.config import ReadConfig
from dcpstore.fetch import ReadStats
from dcpstore.format.archive import ReadAt
from dcpstore.format.dtypes import item_bytes
from dcpstore.planning.boxes import num_elements
from dcpstore.progress import Meter
from dcpstore.torch_file import TorchFile
from dcpstore.torch_save_reader.catalogue import Catalogue, FileContent, open_content
from dcpstore.torch_save_reader.deliver import Delivery
from dcpstore.torch_save_reader.fill import FileBox, Filler
from dcpstore.torch_save_reader.layout import Source
from dcpstore.torch_save_reader.targets import OwnPart, resolve_own_part
from dcpstore.torch_save_reader.trade import Messages, carry
from dcpstore.torch_save_reader.values import pickle_value
from dcpstore.torch_save_reader.waves import Extent, Leg, Want, Wave, plan_waves, route

__all__ = ["Access", "LoadJob"]

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

    wants: Sequence[Want]
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
            steps.barrier(self._group, "finish", partial(self._finish, own, delivery, filler))
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
                Want(item, first + numbers[key], (0,), (lengths[item],))
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

    def _own_box(self, want: Want, own: OwnPart) -> FileBox:
        tensor = own.targets[want.item].tensor
        assert tensor is not None
        return FileBox(self._catalogue.sources[want.source], want.offsets, tensor)


def _batches(own: OwnPart, batch_bytes: int) -> Iterator[list[Want]]:
    """Cut a rank's boxes into lists of about so many bytes, in the order of the file."""
    batch: list[Want] = []
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
