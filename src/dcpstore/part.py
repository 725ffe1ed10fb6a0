"""One part of an object on its way: pieces of memory, and whose payload they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dcpstore.budget import Bytes
from dcpstore.format.checksum import BlockChecksummer

__all__ = ["PartInMemory", "Slab"]


@dataclass(frozen=True, slots=True)
class Slab:
    """One piece of host memory, seen as numpy and as torch."""

    array: Bytes
    tensor: torch.Tensor


class PartInMemory:
    """A part on its way: pieces of memory, one behind the other.

    Bytes that are copied lie in the slab where they lie in the part, so that elements are
    aligned there as in the object.
    """

    def __init__(self, part_bytes: int) -> None:
        self.num_bytes = 0
        self.room_bytes = part_bytes
        self.slab: Slab | None = None
        self.lent: set[int] = set()  # which of the pieces belong to tensors
        self.events: dict[torch.device, torch.cuda.Event] = {}
        """Per CUDA device, the end of queued copies; it must come before a read."""
        self._pieces: list[Bytes] = []
        self._copied_from = 0
        self._checked: list[tuple[BlockChecksummer, Bytes]] = []

    def lend(self, array: Bytes, checksummer: BlockChecksummer | None) -> None:
        """Append bytes where they lie."""
        self._end_copied()
        self.lent.add(len(self._pieces))
        self._pieces.append(array)
        self._advance(array, checksummer)
        self._copied_from = self.num_bytes

    def copied(self, num_bytes: int, checksummer: BlockChecksummer | None) -> None:
        """Append bytes that were just written to the slab."""
        assert self.slab is not None
        array = self.slab.array[self.num_bytes : self.num_bytes + num_bytes]
        self._advance(array, checksummer)

    def _advance(self, array: Bytes, checksummer: BlockChecksummer | None) -> None:
        if checksummer is not None:
            self._checked.append((checksummer, array))
        self.num_bytes += len(array)
        self.room_bytes -= len(array)

    def _end_copied(self) -> None:
        if self._copied_from < self.num_bytes:
            assert self.slab is not None
            self._pieces.append(self.slab.array[self._copied_from : self.num_bytes])

    def seal(self) -> list[Bytes]:
        """Return the pieces; there will be no others."""
        self._end_copied()
        self._copied_from = self.num_bytes
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
