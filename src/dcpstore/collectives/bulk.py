"""Values that are too large for the board, carried over lanes.

Only after all ranks are known to be well, and with sizes known up front. A value for all
ranks goes down a binomial tree, so that no rank sends it more than log2(size) times:

    coordinator 0 -> 4, 2, 1      4 -> 6, 5      2 -> 3      6 -> 7      (8 ranks)
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from dcpstore.collectives.group import Blob
from dcpstore.collectives.lanes import LaneMaker, Lanes
from dcpstore.collectives.messages import Answer, Decision, LaneOrder

__all__ = ["BULK_BYTES", "Bulk", "tree_children", "tree_parent"]

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
