"""Memory that a range of an object is received into, and who may write there now."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from dcpstore.errors import CheckpointError

__all__ = ["Destination", "FillsMemory", "Revoked"]


class Revoked(CheckpointError):
    """Whoever lent the memory wants nothing written there any more."""


class Destination:
    """Pieces of the caller's memory that a range's bytes go to, one piece behind the other.

    Engines write inside `writing`, and nowhere else. The caller may `revoke` the memory while
    a request is still under way, and use it as soon as that returns. Thread-safe.

    Args:
        pieces: Writable, contiguous bytes.
    """

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self._pieces = tuple(pieces)
        self.num_bytes = sum(map(len, self._pieces))
        """Bytes that all pieces take."""
        self.was_written = False
        """Whether anything was, or may have been, written."""
        self._changed = threading.Condition()
        self._writer: Callable[[], None] | None = None
        self._is_revoked = False

    def check(self) -> None:
        """Raise `Revoked` if the memory was taken back."""
        if self._is_revoked:
            raise Revoked("the answer would come too late: another one was taken")

    @contextmanager
    def writing(self, interrupt: Callable[[], None]) -> Iterator[tuple[memoryview, ...]]:
        """Hold the right to write to the pieces. One thread at a time.

        Args:
            interrupt: Makes the writer stop soon; called from another thread.

        Raises:
            Revoked: If the memory was taken back.
        """
        with self._changed:
            self.check()
            self._writer = interrupt
            self.was_written = True
        try:
            yield self._pieces
        finally:
            with self._changed:
                self._writer = None
                self._changed.notify_all()

    def revoke(self) -> None:
        """Take the memory back: once this returns, nobody writes there."""
        with self._changed:
            self._is_revoked = True
            if self._writer is not None:
                self._writer()
            self._changed.wait_for(lambda: self._writer is None)

    def take(self, data: memoryview) -> None:
        """Copy an answer that came into other memory. Not while an engine writes."""
        self.was_written = True
        at = 0
        for piece in self._pieces:
            piece[:] = data[at : at + len(piece)]
            at += len(piece)


@runtime_checkable
class FillsMemory(Protocol):
    """A `Store` that may receive ranges straight into memory of the caller's."""

    def fill(self, key: str, start: int, destination: Destination) -> None:
        """Fetch as many bytes from ``start`` on as the destination takes.

        After an error the destination may be written in part.

        Raises: as `Store.get_range`, and `Revoked`.
        """
