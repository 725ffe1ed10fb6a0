"""The data plane: lanes that carry bytes from rank to rank.

Lanes belong to one group and to nobody else: neither a rank that hangs nor a transfer that
times out touches a collective of the trainer. A transfer that fails closes the lanes of its
rank, and with them whatever was still on its way; the group opens new ones when next needed.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Protocol, TypeAlias

from typing_extensions import Buffer

from dcpstore.collectives.board import EventWait
from dcpstore.collectives.group import Pending

__all__ = ["LaneMaker", "Lanes", "MemoryLanes", "MemoryWires"]


class Lanes(Protocol):
    """An open way from this rank to every other rank of its group.

    Between two ranks, sends and receives match in the order they were posted, per direction.
    """

    @property
    def name(self) -> str:
        """The same on all ranks that these lanes connect, and on no others."""
        ...

    @property
    def is_healthy(self) -> bool:
        """Whether they are open and every transfer so far went well."""
        ...

    def send(self, data: Buffer, to: int) -> Pending:
        """Begin to send; `data` stays the caller's and must not change until waited for."""
        ...

    def receive(self, into: Buffer, source: int) -> Pending:
        """Begin to receive exactly as many bytes as `into` holds."""
        ...

    def close(self) -> None:
        """Close them; transfers on their way fail. Idempotent."""
        ...


LaneMaker: TypeAlias = Callable[[str, float], Lanes]
"""Opens lanes by name within seconds; all ranks of the group do so at once."""


class _Slot:
    """The meeting of one send with its receive."""

    def __init__(self) -> None:
        self.data: memoryview | None = None
        self.into: memoryview | None = None
        self.done = threading.Event()
        self.error: str | None = None


class MemoryWires:
    """What the `MemoryLanes` of all ranks of a group share.

    Args:
        wait: How a rank waits for a transfer.
    """

    def __init__(self, wait: EventWait = threading.Event.wait) -> None:
        self.wait = wait
        self._lock = threading.Lock()
        self._slots: dict[tuple[str, int, int, int], _Slot] = {}
        self._closed: set[tuple[str, int]] = set()

    def meet(
        self,
        key: tuple[str, int, int, int],
        *,
        data: memoryview | None = None,
        into: memoryview | None = None,
    ) -> _Slot:
        """Add one side of a transfer; whoever comes second copies."""
        name, source, to, _ = key
        with self._lock:
            slot = self._slots.setdefault(key, _Slot())
            slot.data = slot.data if data is None else data
            slot.into = slot.into if into is None else into
            if (name, source) in self._closed or (name, to) in self._closed:
                slot.error = "the other rank closed its lanes"
            is_met = slot.data is not None and slot.into is not None
            if is_met or slot.error:
                self._slots.pop(key, None)
                self._finish(slot)
            return slot

    def hang_up(self, name: str, rank: int) -> None:
        """Fail all that `rank` has on its way, and all that others begin with it later."""
        with self._lock:
            self._closed.add((name, rank))
            for key in [k for k in self._slots if k[0] == name and rank in k[1:3]]:
                slot = self._slots.pop(key)
                slot.error = "the other rank closed its lanes"
                self._finish(slot)

    @staticmethod
    def _finish(slot: _Slot) -> None:
        if slot.error is None and slot.data is not None and slot.into is not None:
            if slot.data.nbytes == slot.into.nbytes:
                slot.into[:] = slot.data
            else:
                slot.error = f"{slot.data.nbytes} bytes were sent, {slot.into.nbytes} expected"
        slot.data = slot.into = None
        slot.done.set()


class _MemoryPending:
    def __init__(self, lanes: MemoryLanes, slot: _Slot, wait: EventWait) -> None:
        self._lanes = lanes
        self._slot = slot
        self._wait = wait

    def wait(self, timeout_s: float) -> None:
        if not self._wait(self._slot.done, max(timeout_s, 0)):
            self._lanes.close()
            raise TimeoutError(f"the other rank did not take part within {timeout_s:g} s")
        if self._slot.error is not None:
            self._lanes.close()
            raise ConnectionError(self._slot.error)


class MemoryLanes:
    """Lanes among ranks that are threads of one process: one copy, from buffer to buffer.

    Args:
        name: See `Lanes.name`.
        rank: This rank.
        wires: The same object on every rank.
    """

    def __init__(self, name: str, rank: int, wires: MemoryWires) -> None:
        self._name = name
        self._rank = rank
        self._wires = wires
        self._num_posted: dict[tuple[int, int], int] = defaultdict(int)
        self._is_open = True

    @property
    def name(self) -> str:
        """The same on all ranks."""
        return self._name

    @property
    def is_healthy(self) -> bool:
        """Whether they are open and every transfer so far went well."""
        return self._is_open

    def send(self, data: Buffer, to: int) -> Pending:
        """Begin to send."""
        key = self._next_key(self._rank, to)
        slot = self._wires.meet(key, data=memoryview(data).cast("B"))
        return _MemoryPending(self, slot, self._wires.wait)

    def receive(self, into: Buffer, source: int) -> Pending:
        """Begin to receive."""
        key = self._next_key(source, self._rank)
        slot = self._wires.meet(key, into=memoryview(into).cast("B"))
        return _MemoryPending(self, slot, self._wires.wait)

    def close(self) -> None:
        """Close them; transfers on their way fail. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._wires.hang_up(self._name, self._rank)

    def _next_key(self, source: int, to: int) -> tuple[str, int, int, int]:
        posted = self._num_posted[source, to]
        self._num_posted[source, to] = posted + 1
        return self._name, source, to, posted
