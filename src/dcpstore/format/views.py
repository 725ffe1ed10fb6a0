"""A window on bytes that behaves like a small read-only file.

Torch and zip readers want a file; what we have is a buffer or a range of an object::

    object   ........[====== window ======]........
                     0       tell()       size_bytes

Reads never leave the window, whatever the caller asks for.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from typing_extensions import Buffer


ReadAt: TypeAlias = "Callable[[int, int], Buffer]"
"""Read ``(offset, num_bytes)`` of an object; fewer bytes come back only at its end."""


class RangeView(io.RawIOBase):
    """A bounded, seekable, read-only file over bytes ``[start, end)`` of something else.

    Make one with `over_buffer` or `over_reader`. Positions count from the window's start.
    As with `io.BytesIO` a seek may go beyond the end, where reads are empty.

    Not thread-safe: the cursor belongs to one thread. Make a view per thread; views over
    the same buffer, or over a ``read_at`` that is thread-safe, do not disturb each other.

    Closing a view drops its reference to the buffer or reader and does not close them.

    Args:
        read_at: Reads bytes by their position in the underlying object.
        start: First byte of the window, 0 or more.
        end: End of the window, at least ``start``.

    Raises:
        ValueError: If ``[start, end)`` is no range.
    """

    def __init__(self, read_at: ReadAt, start: int, end: int) -> None:
        super().__init__()
        self._read_at: ReadAt | None = None
        if not 0 <= start <= end:
            raise ValueError(f"[{start}, {end}) is not a byte range")
        self._read_at = read_at
        self._start = start
        self._size_bytes = end - start
        self._cursor = 0

    @classmethod
    def over_buffer(cls, buffer: Buffer, start: int = 0, end: int | None = None) -> RangeView:
        """Return a view of ``buffer[start:end]``, without a copy.

        The buffer must not change its size while the view is open.

        Args:
            buffer: Contiguous bytes; the view keeps a reference until it is closed.
            start: First byte of the window.
            end: End of the window; the buffer's end if None.

        Raises:
            ValueError: If ``[start, end)`` is not inside the buffer.
        """
        whole = memoryview(buffer).cast("B")
        end = len(whole) if end is None else end
        if end > len(whole):
            raise ValueError(f"[{start}, {end}) reaches past the buffer's {len(whole)} bytes")
        return cls(lambda offset, size: whole[offset : offset + size], start, end)

    @classmethod
    def over_reader(cls, read_at: ReadAt, start: int, end: int) -> RangeView:
        """Return a view of bytes ``[start, end)`` of what ``read_at`` reads.

        Each read of the view is one call of ``read_at``: wrap the view in
        `io.BufferedReader` where small reads are expected and calls are dear. Its errors
        pass through unchanged.

        Args:
            read_at: Called with an offset and a number of bytes, never zero and never
                outside the window; may return less than asked for.
            start: First byte of the window.
            end: End of the window.

        Raises:
            ValueError: If ``[start, end)`` is no range.
        """
        return cls(read_at, start, end)

    @property
    def size_bytes(self) -> int:
        """Length of the window."""
        return self._size_bytes

    def _reader(self) -> ReadAt:
        if self._read_at is None:
            raise ValueError("I/O operation on closed file.")
        return self._read_at

    def _take(self, size: int) -> Buffer:
        """Read at most ``size`` bytes at the cursor, in one call, and move the cursor."""
        read_at = self._reader()
        size = min(size, self._size_bytes - self._cursor)
        if size <= 0:
            return b""
        data = memoryview(read_at(self._start + self._cursor, size)).cast("B")[:size]
        self._cursor += len(data)
        return data

    def readable(self) -> bool:
        """Return True: a view is there to be read."""
        self._reader()
        return True

    def seekable(self) -> bool:
        """Return True."""
        self._reader()
        return True

    def tell(self) -> int:
        """Return the cursor, counted from the window's start."""
        self._reader()
        return self._cursor

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move the cursor and return it.

        Raises:
            ValueError: If it would come before the window's start, if ``whence`` is
                unknown, or if the view is closed.
        """
        self._reader()
        bases = {os.SEEK_SET: 0, os.SEEK_CUR: self._cursor, os.SEEK_END: self._size_bytes}
        if whence not in bases:
            raise ValueError(f"invalid whence ({whence}, should be 0, 1 or 2)")
        position = bases[whence] + offset
        if position < 0:
            raise ValueError(f"negative seek position {position}")
        self._cursor = position
        return position

    def readinto(self, buffer: Buffer, /) -> int:
        """Fill a writable buffer from the cursor and return the number of bytes.

        Returns:
            0 at the window's end; less than the buffer's length if the reader gave less.
        """
        target = memoryview(buffer).cast("B")
        data = memoryview(self._take(len(target)))
        target[: len(data)] = data
        return len(data)

    def read(self, size: int | None = -1, /) -> bytes:
        """Return up to ``size`` bytes from the cursor; all the rest if negative or None.

        A short answer of the reader is made up by asking again, so that like on
        `io.BytesIO` fewer bytes than asked for come back only at the end of the window
        or of the object behind it.
        """
        left = self._size_bytes - self._cursor
        wanted = left if size is None or size < 0 else min(size, left)
        data = bytes(self._take(wanted))
        if len(data) >= wanted or not data:
            return data
        pieces = [data]
        got = len(data)
        while got < wanted:
            piece = bytes(self._take(wanted - got))
            if not piece:
                break
            pieces.append(piece)
            got += len(piece)
        return b"".join(pieces)

    def readall(self) -> bytes:
        """Return all bytes from the cursor to the window's end."""
        return self.read(-1)

    def write(self, data: Buffer, /) -> int:  # noqa: ARG002 -- the base's signature
        """Refuse: a view is read-only.

        Raises:
            io.UnsupportedOperation: Always.
        """
        raise io.UnsupportedOperation("not writable")

    def truncate(self, size: int | None = None, /) -> int:  # noqa: ARG002 -- likewise
        """Refuse: a view is read-only.

        Raises:
            io.UnsupportedOperation: Always.
        """
        raise io.UnsupportedOperation("not writable")

    def close(self) -> None:
        """Drop the buffer or reader. Safe to call again."""
        self._read_at = None
        super().close()
