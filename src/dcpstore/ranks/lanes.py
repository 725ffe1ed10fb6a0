"""The data plane: lanes that carry bytes from rank to rank.

Lanes belong to one group and to nobody else: neither a rank that hangs nor a transfer that
times out touches a collective of the trainer. A transfer that fails closes the lanes of its
rank, and with them whatever was still on its way; the group opens new ones when next needed.

Values that are too large for the board, carried over lanes.

Only after all ranks are known to be well, and with sizes known up front. A value for all
ranks goes down a binomial tree, so that no rank sends it more than log2(size) times:

    coordinator 0 -> 4, 2, 1      4 -> 6, 5      2 -> 3      6 -> 7      (8 ranks)
"""

from __future__ import annotations

import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from typing_extensions import Buffer

from dcpstore.ranks.board import EventWait
from dcpstore.ranks.group import Answer, Blob, Decision, LaneOrder, Pending


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


Remaining: TypeAlias = Callable[[], float]
"""Seconds left for a transfer."""

# Where lanes overtake the board: docs/design/007 has the measurement.
BULK_BYTES = 256 * 1024


class Bulk:
    """One rank's lanes, and the large values that travel on them.

    Lanes are opened by all ranks at once when the coordinator orders it, and kept for later
    steps. An order names them: a rank whose lanes broke meanwhile has none of that name.

    Args:
        rank: This rank.
        size: Number of ranks.
        coordinator: Where values go to and parts come from.
        namespace: Tells this group's lanes from those of others that these ranks form.
        maker: Opens lanes; None where there are none, and no value counts as large.
        lanes: Lanes that an earlier group of the same ranks left open.
        bulk_bytes: Values larger than this are large.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        coordinator: int,
        *,
        namespace: str = "",
        maker: LaneMaker | None = None,
        lanes: Lanes | None = None,
        bulk_bytes: int = BULK_BYTES,
    ) -> None:
        self._rank = rank
        self._size = size
        self._coordinator = coordinator
        self._namespace = namespace
        self._maker = maker
        self._lanes = lanes
        self._bulk_bytes = bulk_bytes

    @property
    def lanes(self) -> Lanes | None:
        """The lanes this rank holds open, if they are well."""
        return self._lanes if self._lanes is not None and self._lanes.is_healthy else None

    @property
    def held_name(self) -> str:
        """The name of `lanes`, empty if there are none."""
        return self.lanes.name if self.lanes is not None else ""

    def size_by_lane(self, blob: Blob) -> int:
        """Return how many bytes of `blob` go by lane: all, or 0 if it is to be posted."""
        is_large = self._maker is not None and len(blob) > self._bulk_bytes
        return len(blob) if is_large else 0

    def order(self, number: int, answers: Sequence[Answer]) -> LaneOrder:
        """Coordinator only: take the lanes that all ranks hold, or have them open new ones."""
        held = {answer.lanes for answer in answers}
        name = held.pop()
        is_fresh = bool(held) or not name
        if is_fresh:
            # The token keeps a job that makes its process groups anew on the same store from
            # finding the addresses of its earlier lanes.
            name = f"{self._namespace}/lanes/{number}-{secrets.token_hex(4)}"
        return LaneOrder(name, is_fresh)

    def take(self, order: LaneOrder, timeout_s: float) -> Lanes:
        """All ranks: return the lanes of an order, opened if it says so.

        Raises:
            ConnectionError: If they broke on this rank.
        """
        held = self.lanes
        if held is not None and held.name == order.name:
            return held
        if not order.is_fresh or self._maker is None:
            raise ConnectionError("the lanes of this rank broke in this step")
        if self._lanes is not None:
            self._lanes.close()
        self._lanes = self._maker(order.name, timeout_s)
        return self._lanes

    def push(self, order: LaneOrder, own: Blob, remaining_s: Remaining) -> None:
        """All ranks but the coordinator: send it this rank's value, if it is large."""
        lanes = self.take(order, remaining_s())
        if self.size_by_lane(own):
            _send_each(lanes, {self._coordinator: own}, remaining_s)

    def pull(
        self, order: LaneOrder, sizes_bytes: Mapping[int, int], remaining_s: Remaining
    ) -> dict[int, Blob]:
        """Coordinator only: receive the large values of those ranks that announced one."""
        return _receive_each(self.take(order, remaining_s()), sizes_bytes, remaining_s)

    def distribute(
        self, decision: Decision, parts: Sequence[Blob], remaining_s: Remaining
    ) -> Blob | None:
        """All ranks: carry the large parts. Returns this rank's, or None if it was posted.

        Args:
            decision: Says how large which parts are.
            parts: All of them, on the coordinator.
            remaining_s: Seconds left.
        """
        if decision.order is None:
            return None
        lanes = self.take(decision.order, remaining_s())
        sizes = decision.bulk_bytes
        is_root = self._rank == self._coordinator
        if decision.is_shared:
            if not sizes[0]:
                return None
            blob = parts[0] if is_root else bytearray(sizes[0])
            tree = (self._rank, self._coordinator, self._size)
            _share_down_tree(lanes, blob, tree, remaining_s)
            return blob
        if is_root:
            large = {r: parts[r] for r, n in enumerate(sizes) if n and r != self._rank}
            _send_each(lanes, large, remaining_s)
            return None
        if not sizes[self._rank]:
            return None
        from_root = {self._coordinator: sizes[self._rank]}
        return _receive_each(lanes, from_root, remaining_s)[self._coordinator]


def _receive_each(
    lanes: Lanes, sizes_bytes: Mapping[int, int], remaining_s: Remaining
) -> dict[int, Blob]:
    """Receive one blob from each of several ranks at once, each of the size given for it."""
    blobs: dict[int, Blob] = {rank: bytearray(size) for rank, size in sizes_bytes.items()}
    pendings = [lanes.receive(blob, rank) for rank, blob in blobs.items()]
    for pending in pendings:
        pending.wait(remaining_s())
    return blobs


def _send_each(lanes: Lanes, blobs: Mapping[int, Blob], remaining_s: Remaining) -> None:
    """Send one blob to each of several ranks."""
    pendings = [lanes.send(blob, rank) for rank, blob in blobs.items()]
    for pending in pendings:
        pending.wait(remaining_s())


def _share_down_tree(
    lanes: Lanes, blob: Blob, tree: tuple[int, int, int], remaining_s: Remaining
) -> None:
    """Fill `blob` with the root's, which is as large; `tree` is (rank, root, size)."""
    rank, root, _ = tree
    if rank != root:
        lanes.receive(blob, tree_parent(*tree)).wait(remaining_s())
    _send_each(lanes, dict.fromkeys(tree_children(*tree), blob), remaining_s)


def tree_parent(rank: int, root: int, size: int) -> int:
    """Return whom a rank other than the root receives from."""
    relative = (rank - root) % size
    return (relative - (relative & -relative) + root) % size


def tree_children(rank: int, root: int, size: int) -> list[int]:
    """Return whom a rank sends to, the largest subtree first."""
    relative = (rank - root) % size
    lowest = relative & -relative if relative else 1 << (size - 1).bit_length()
    steps = [1 << bit for bit in reversed(range(lowest.bit_length() - 1))]
    return [(relative + step + root) % size for step in steps if relative + step < size]
