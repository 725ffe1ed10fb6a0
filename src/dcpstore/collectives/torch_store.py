"""A board on the c10d store that every torch job already has.

It never blocks in the store: c10d's own ``wait`` holds the client's lock until it returns,
cannot be interrupted, and writes to stderr when it times out. Asking costs about 25 us, and
the pauses between questions grow with the time waited, so that they stay under a tenth of it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dcpstore.collectives.board import BoardLostError

if TYPE_CHECKING:
    from dcpstore.torch_private import Store

__all__ = ["StoreBoard"]

# libuv's server closes the connection of whoever sends more than 8 MiB in one message.
_CHUNK_BYTES = 4 * 1024 * 1024
_KEYS_PER_CALL = 256

_WHOLE = b"\0"
_CHUNKED = b"\1"
_NOT_THERE = "\2"


class StoreBoard:
    """A namespace of a c10d store as a board.

    Args:
        store: The namespace. Best on a client of its own: others may block theirs.
        host_rank: The rank to name if the store is lost.
        host: Who holds the store, for that error.
        max_pause_s: Longest pause between two questions.
        clock: Seconds that only grow.
        sleep: Pauses the calling thread.
    """

    def __init__(
        self,
        store: Store,
        *,
        host_rank: int,
        host: str,
        max_pause_s: float = 0.02,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store: Any = store  # typed to hold str; bytes pass through unchanged
        self._host_rank = host_rank
        self._host = host
        self._max_pause_s = max_pause_s
        self._clock = clock
        self._sleep = sleep
        self._num_chunks: dict[str, int] = {}

    def post(self, key: str, data: bytes | bytearray) -> None:
        """Set a key that no other rank sets."""
        with self._mapped():
            self._store.set(key, self._envelope(key, data))

    def settle(self, key: str, data: bytes) -> bytes:
        """Set `key` unless it is set; returns what it holds now, the same on every rank."""
        with self._mapped():
            unset = ""
            settled: bytes = self._store.compare_set(key, unset, _WHOLE + data)
        return settled[1:]

    def wait(self, keys: Sequence[str], timeout_s: float, *, unless: str | None = None) -> bool:
        """Wait until all `keys` are set, or `unless` is. Whether all are."""
        started = self._clock()
        num_seen = 0
        with self._mapped():
            while True:
                while num_seen < len(keys):
                    if not self._store.check(list(keys[num_seen : num_seen + _KEYS_PER_CALL])):
                        break
                    num_seen += _KEYS_PER_CALL
                if num_seen >= len(keys):
                    return True
                if unless is not None and self._store.check([unless]):
                    return False
                waited = self._clock() - started
                if waited >= timeout_s:
                    return False
                self._sleep(min(max(waited / 10, 5e-5), self._max_pause_s, timeout_s - waited))

    def fetch(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the values of those `keys` that are set."""
        found: dict[str, bytes] = {}
        with self._mapped():
            for start in range(0, len(keys), _KEYS_PER_CALL):
                found |= self._get(list(keys[start : start + _KEYS_PER_CALL]))
            return {key: self._open(key, value) for key, value in found.items()}

    def drop(self, keys: Sequence[str]) -> None:
        """Forget `keys`. Those that are not set are passed over."""
        with self._mapped():
            for key in keys:
                for index in range(self._num_chunks.pop(key, 0)):
                    self._store.delete_key(f"{key}#{index}")
                self._store.delete_key(key)

    def count(self, key: str) -> int:
        """Add one to a counter and return it."""
        with self._mapped():
            return int(self._store.add(key, 1))

    def _get(self, keys: list[str]) -> dict[str, bytes]:
        if len(keys) > 1 and self._store.has_extended_api() and self._store.check(keys):
            # Were one dropped just now, this would wait for it in vain.
            with contextlib.suppress(dist.DistStoreError):
                return dict(zip(keys, self._store.multi_get(keys), strict=True))
        # The one read that does not wait for a key that is not there: to replace a value that
        # no key has by itself answers with what the key has, or else with that value.
        values = {key: self._store.compare_set(key, _NOT_THERE, _NOT_THERE) for key in keys}
        return {key: value for key, value in values.items() if value != _NOT_THERE.encode()}

    def _envelope(self, key: str, data: bytes | bytearray) -> bytes:
        if len(data) <= _CHUNK_BYTES:
            return _WHOLE + data
        starts = range(0, len(data), _CHUNK_BYTES)
        for index, start in enumerate(starts):
            self._store.set(f"{key}#{index}", bytes(data[start : start + _CHUNK_BYTES]))
        self._num_chunks[key] = len(starts)
        return _CHUNKED + str(len(starts)).encode()

    def _open(self, key: str, value: bytes) -> bytes:
        if value[:1] == _WHOLE:
            return value[1:]
        self._num_chunks[key] = int(value[1:])
        chunks = range(self._num_chunks[key])
        return b"".join(self._store.get(f"{key}#{index}") for index in chunks)

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # what c10d's errors have in common in all releases
            first_line = str(error).partition("\n")[0]
            raise BoardLostError(
                self._host_rank,
                f"the job's store, through which ranks answer, was lost: its host "
                f"({self._host}) is gone or out of reach ({first_line})",
            ) from error
