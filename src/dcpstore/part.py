"""One part of an object on its way: pieces of memory, and whose payload they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dcpstore.budget import Bytes
from dcpstore.format.checksum import BlockChecksummer
from dcpstore.slabs import Slab

__all__ = ["PartInMemory"]

_ALIGNMENT = 64


@dataclass(slots=True)
class _Run:
    """Bytes copied one behind the other into one memory."""

    memory: Slab
    start: int
    end: int


class PartInMemory:
    """A part on its way: pieces of memory, one behind the other.

    Bytes that are copied lie in scratch while there is room, then in a slab: in the slab where
    they lie in the part, in scratch aligned alike, so that elements are aligned as in the object.

    Args:
        part_bytes: Room for so many.
    """

    def __init__(self, part_bytes: int) -> None:
        self.num_bytes = 0
        self.room_bytes = part_bytes
        self.slab: Slab | None = None
        self.scratch: Slab | None = None
        self.lent: set[int] = set()  # which of the pieces belong to tensors
        self.events: dict[torch.device, torch.cuda.Event] = {}
        """Per CUDA device, the end of queued copies; it must come before a read."""
        self._pieces: list[Bytes] = []
        self._scratch_bytes = 0
        self._run: _Run | None = None
        self._checked: list[tuple[BlockChecksummer, Bytes]] = []

    def lend(self, array: Bytes, checksummer: BlockChecksummer | None) -> None:
        """Append bytes where they lie."""
        self._end_run()
        self.lent.add(len(self._pieces))
        self._pieces.append(array)
        self._advance(array, checksummer)

    def place_of(self, num_bytes: int) -> tuple[Slab, int] | None:
        """Return in which memory, and where there, to copy the next bytes to.

        None if they do not fit: the part has no slab, and no scratch or too little of it.
        """
        if self.slab is not None:
            return self.slab, self.num_bytes
        if self.scratch is None:
            return None
        at = self._scratch_bytes + (self.num_bytes - self._scratch_bytes) % _ALIGNMENT
        return (self.scratch, at) if at + num_bytes <= len(self.scratch.array) else None

    def copied(
        self, memory: Slab, at: int, num_bytes: int, checksummer: BlockChecksummer | None
    ) -> None:
        """Append bytes that were just written where `place_of` said."""
        run = self._run
        if run is None or run.memory is not memory or run.end != at:
            self._end_run()
            self._run = run = _Run(memory, at, at)
        run.end = at + num_bytes
        if memory is self.scratch:
            self._scratch_bytes = run.end
        self._advance(memory.array[at : run.end], checksummer)

    def _advance(self, array: Bytes, checksummer: BlockChecksummer | None) -> None:
        if checksummer is not None:
            self._checked.append((checksummer, array))
        self.num_bytes += len(array)
        self.room_bytes -= len(array)

    def _end_run(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            self._pieces.append(run.memory.array[run.start : run.end])

    def seal(self) -> list[Bytes]:
        """Return the pieces; there will be no others."""
        self._end_run()
        return self._pieces

    def seal_copies(self) -> None:
        """Note where the copies that were queued so far end."""
        for device, event in self.events.items():
            event.record(torch.cuda.current_stream(device))

    def wait_and_check(self) -> None:
        """Wait for the queued copies, then checksum what is to be checksummed."""
        for event in self.events.values():
            event.synchronize()
        for checksummer, array in self._checked:
            checksummer.update(array.data)
