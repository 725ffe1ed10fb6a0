"""What a group of ranks is built on: a board that decides, and lanes that carry bytes.

`Board.settle` is an atomic register: whichever rank calls it first fixes the value for
everybody, so that ranks agree on an outcome even where the coordinator is silent.

Lanes belong to one group and to nobody else: neither a rank that hangs nor a transfer that
times out touches a collective of the trainer. A transfer that fails closes the lanes of its
rank, and with them whatever was still on its way; the group opens new ones when next needed.
A value for all ranks goes down a binomial tree, so that no rank sends it more than log2(size)
times::

    coordinator 0 -> 4, 2, 1      4 -> 6, 5      2 -> 3      6 -> 7      (8 ranks)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from typing_extensions import Buffer


class BoardLostError(Exception):
    """The board itself is out of reach.

    Args:
        rank: The rank to name for it: the one believed to have held the board.
        message: What was lost, and who held it.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class Board(Protocol):
    """Keys and values shared by the ranks of one group, in a namespace of their own.

    No call but `wait` blocks for longer than a message takes. Every call may raise
    `BoardLostError`.
    """

    def post(self, key: str, data: bytes | bytearray) -> None:
        """Set a key that no other rank sets."""
        ...

    def settle(self, key: str, data: bytes) -> bytes:
        """Set `key` unless it is set. Returns what it holds now, the same on every rank."""
        ...

    def wait(self, keys: Sequence[str], timeout_s: float, *, unless: str | None = None) -> bool:
        """Wait until all `keys` are set, or `unless` is. Whether all are; can be interrupted."""
        ...

    def fetch(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the values of those `keys` that are set."""
        ...

    def drop(self, keys: Sequence[str]) -> None:
        """Forget `keys`. Those that are not set are passed over."""
        ...

    def count(self, key: str) -> int:
        """Add one to a counter and return it. Its key is dropped like any other."""
        ...


@dataclass(frozen=True, slots=True)
class Seat:
    """One rank's place at a board.

    Args:
        board: Shared by these ranks, for one purpose alone.
        rank: This rank.
        size: Number of ranks.
        coordinator: The rank that decides.
        namespace: Tells the board from others that the same ranks share.
    """

    board: Board
    rank: int
    size: int
    coordinator: int
    namespace: str = ""


class Pending(Protocol):
    """A transfer of bytes on its way. The buffer belongs to it until `wait` returned."""

    def wait(self, timeout_s: float) -> None:
        """Wait until the transfer is done.

        After an error the buffer's contents are undefined, and the lanes are closed, so
        that nothing arrives in it later.

        Raises:
            TimeoutError: If it is not done after `timeout_s`.
            ConnectionError: If the other rank or the network is gone.
        """
        ...


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
