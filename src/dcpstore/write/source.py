"""The bytes of an attachment before they are written: in memory, in a file, in a checkpoint."""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import Buffer

from dcpstore.errors import ConfigError

_PIECE_BYTES = 1 << 20


class ByteSource(ABC):
    """Bytes that are read when they are written. Its text names it in messages."""

    __slots__ = ()

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """How many there are; asked for right before they are read."""

    @abstractmethod
    def pieces(self) -> Generator[Buffer, None, None]:
        """Yield them, in pieces of bounded size; each is valid until the next is asked for."""


@dataclass(frozen=True, slots=True)
class InMemory(ByteSource):
    """Bytes of the caller's."""

    name: str
    data: bytes

    def __str__(self) -> str:
        return f"the attachment {self.name!r}"

    @property
    def num_bytes(self) -> int:
        """How many there are."""
        return len(self.data)

    def pieces(self) -> Generator[Buffer, None, None]:
        """Yield them; they are in memory anyway."""
        yield self.data


@dataclass(frozen=True, slots=True)
class InFile(ByteSource):
    """A local file, whose bytes pass through a mebibyte of memory."""

    name: str
    path: Path

    def __str__(self) -> str:
        return f"{self.path}, the attachment {self.name!r},"

    @property
    def num_bytes(self) -> int:
        """Its size now.

        Raises:
            ConfigError: If it is no regular file, or is not there.
        """
        try:
            found = self.path.stat()
        except OSError as error:
            raise ConfigError(f"{self} cannot be read: {error}") from error
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{self} is no regular file; attach files one by one")
        return found.st_size

    def pieces(self) -> Generator[Buffer, None, None]:
        """Yield what is in it until its end.

        Raises:
            ConfigError: If it cannot be read.
        """
        memory = memoryview(bytearray(_PIECE_BYTES))
        try:
            with self.path.open("rb", buffering=0) as file:
                while count := file.readinto(memory):
                    yield memory[:count]
        except OSError as error:
            raise ConfigError(f"{self} cannot be read: {error}") from error


def source_of(name: str, given: object) -> ByteSource:
    """Return an attachment as a caller gave it; what may change in memory is copied.

    Raises:
        ConfigError: If it is neither bytes nor a path, or no file is there.
    """
    if isinstance(given, bytes | bytearray | memoryview):
        return InMemory(name, bytes(given))
    if isinstance(given, os.PathLike):
        found = InFile(name, Path(os.fsdecode(given)).absolute())
        _ = found.num_bytes  # so that one that is not there is known before anything is planned
        return found
    if isinstance(given, ByteSource):
        return given
    raise ConfigError(
        f"the attachment {name!r} is a {type(given).__name__}: give bytes, or the pathlib.Path of"
        " a file (a str is taken for neither)"
    )
