"""Groups of the ranks of a torch process group. The one torch module that others import.

The board lies on the c10d store that every torch job already has. It never blocks in the store:
c10d's own ``wait`` holds the client's lock until it returns, cannot be interrupted, and writes to
stderr when it times out. Asking costs about 25 us, and the pauses between questions grow with the
time waited, so that they stay under a tenth of it.

Lanes have a c10d backend of their own: gloo, or NCCL where torch was built without it. A wait on
gloo that times out closes every connection of that rank's backend. That is why the backend is
never the trainer's, and it is also what makes a failure safe: nothing arrives any more in a
buffer that its owner has given up.

A rank that closes its lanes first lets its sends end, within moments. gloo tells a receiver that
the connection is gone only between messages: one that has the beginning of a message would wait
for the rest until its time is over.

What is kept between groups, and why: a connection to the job's store, a count of the groups
opened (it names each one's keys), and lanes, which take a connection between every two ranks.
They are kept per process group, for as long as that lives, in a weak-keyed table: the only
mutable state of this package that outlives a call.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from typing_extensions import Buffer

from dcpstore.errors import ConfigError
from dcpstore.ranks.exchange import BoardGroup
from dcpstore.ranks.group import RankGroup, SingleGroup
from dcpstore.ranks.transport import BoardLostError, LaneMaker, Lanes, Pending, Seat
from dcpstore.torch_private import (
    make_backend,
    prefixed_store,
    private_store_client,
    process_group_store,
    store_endpoint,
)

if TYPE_CHECKING:
    from dcpstore.torch_private import Store


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


_UNUSED_TAG = 2**31 - 1
_LAST_SENDS_S = 2.0  # a peer that is well takes what was sent; others shall not cost more


class TorchLanes:
    """Lanes from this rank to the others by a c10d backend.

    Args:
        name: See `Lanes.name`.
        backend: Has ``send`` and ``recv``; used by these lanes alone.
        device: Where the backend wants its tensors, if not on the CPU: then each transfer
            has a tensor of its size there, on this rank's own device.
    """

    def __init__(self, name: str, backend: Any, device: torch.device | None = None) -> None:
        self._name = name
        self._backend = backend
        self._device = device
        self._num_posted: dict[tuple[str, int], int] = defaultdict(int)
        self._sending: set[Any] = set()
        self._is_healthy = True

    @property
    def name(self) -> str:
        """The same on all ranks that these lanes connect."""
        return self._name

    @property
    def is_healthy(self) -> bool:
        """Whether they are open and every transfer so far went well."""
        return self._is_healthy

    def send(self, data: Buffer, to: int) -> Pending:
        """Begin to send."""
        host = _as_tensor(data)
        tensor = host if self._device is None else host.to(self._device, copy=True)
        work = self._post(lambda: self._backend.send([tensor], to, self._next_tag("to", to)))
        self._sending.add(work)
        return _TorchPending(self, work, (data, host, tensor))

    def receive(self, into: Buffer, source: int) -> Pending:
        """Begin to receive.

        Raises:
            ValueError: If `into` is read-only.
        """
        if memoryview(into).readonly:
            raise ValueError("bytes are received into a writable buffer")
        host = _as_tensor(into)
        tensor = host if self._device is None else torch.empty_like(host, device=self._device)
        tag = self._next_tag("from", source)
        work = self._post(lambda: self._backend.recv([tensor], source, tag))
        return _TorchPending(self, work, (into, host, tensor), fills=host)

    def close(self) -> None:
        """Close them; transfers on their way fail. Idempotent."""
        self._is_healthy = False
        backend, self._backend = self._backend, None
        if backend is None:
            return
        if self._device is None:
            self._end_sends()
        if hasattr(backend, "abort"):  # not in torch 2.6
            backend.abort()
        if self._device is None:
            _disconnect(backend)

    def note_done(self, work: Any) -> None:
        """Forget a transfer that ended well."""
        self._sending.discard(work)

    def _end_sends(self) -> None:
        ends = time.monotonic() + _LAST_SENDS_S
        while self._sending:
            work = self._sending.pop()
            # Its peer is gone, or too slow; a wait that times out ends the others, too.
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(seconds=max(ends - time.monotonic(), 0.001)))

    def _post(self, begin: Callable[[], Any]) -> Any:
        if self._backend is None:
            raise ConnectionError("the lanes of this rank are closed")
        try:
            return begin()
        except RuntimeError as error:  # what gloo and NCCL raise
            self.close()
            raise ConnectionError(_first_line(error)) from error

    def _next_tag(self, direction: str, peer: int) -> int:
        # gloo matches by tag, so that two transfers can never be taken for each other.
        tag = self._num_posted[direction, peer]
        self._num_posted[direction, peer] = tag + 1
        return tag % _UNUSED_TAG


class _TorchPending:
    """One transfer; keeps its buffers until they are done with."""

    def __init__(
        self,
        lanes: TorchLanes,
        work: Any,
        buffers: tuple[object, torch.Tensor, torch.Tensor],
        *,
        fills: torch.Tensor | None = None,
    ) -> None:
        self._lanes = lanes
        self._work = work
        self._buffers: tuple[object, torch.Tensor, torch.Tensor] | None = buffers
        self._fills = fills

    def wait(self, timeout_s: float) -> None:
        """Wait until the transfer is done."""
        if self._buffers is None:
            return
        tensor = self._buffers[2]
        ends = time.monotonic() + timeout_s
        try:
            self._work.wait(timedelta(seconds=max(timeout_s, 0.001)))
            if tensor.is_cuda:
                _wait_for_device(self._work, ends)
            if self._fills is not None and self._fills is not tensor:
                self._fills.copy_(tensor)
        except (RuntimeError, TimeoutError) as error:
            self._lanes.close()
            message = _first_line(error)
            if time.monotonic() >= ends:
                raise TimeoutError(f"not done after {timeout_s:g} s: {message}") from error
            raise ConnectionError(message) from error
        self._lanes.note_done(self._work)
        self._buffers = self._fills = self._work = None


def _disconnect(backend: Any) -> None:
    """Close gloo's connections, which its abort leaves open once one of them has failed.

    The others would wait on theirs until their time is over. A wait that times out closes all.
    """
    byte = torch.empty(1, dtype=torch.uint8)
    for peer in range(backend.size()):
        if peer != backend.rank():
            with contextlib.suppress(RuntimeError):
                backend.recv([byte], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))


def _wait_for_device(work: Any, ends: float) -> None:
    """NCCL's own wait only queues behind the transfer; this one sees it done."""
    pause_s = 5e-5
    while not work.is_completed():
        if time.monotonic() >= ends:
            raise TimeoutError("the device has not finished the transfer")
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.005)


def _as_tensor(data: Buffer) -> torch.Tensor:
    """View contiguous bytes as a tensor; the caller keeps `data` alive.

    Torch warns of read-only memory, once per process and not silenced thread-safely, so that
    is viewed by its address. It is only ever sent.
    """
    view = memoryview(data).cast("B")
    if not view.readonly:
        return torch.frombuffer(view, dtype=torch.uint8)
    address = np.frombuffer(view, dtype=np.uint8).ctypes.data
    return torch.frombuffer((ctypes.c_ubyte * view.nbytes).from_address(address), dtype=torch.uint8)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


# How long to wait for a key that was there a moment ago; see `StoreBoard`.
_CLIENT_TIMEOUT_S = 5.0

# A store answers some 40,000 questions a second. All ranks together may ask a third of that.
_PAUSE_PER_RANK_S = 60e-6
_MIN_LONGEST_PAUSE_S = 0.02


@dataclass(slots=True)
class _Kept:
    """What one process group's ranks keep between groups."""

    store: Store
    num_opened: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    lanes: dict[str, Lanes] = field(default_factory=dict)


_kept_by_group: WeakKeyDictionary[dist.ProcessGroup, _Kept] = WeakKeyDictionary()
_kept_lock = threading.Lock()


def open_torch_group(
    process_group: dist.ProcessGroup | None,
    coordinator_rank: int,
    deadline_s: float,
    purpose: str,
    subject: str,
) -> RankGroup:
    """All ranks: open a group of the ranks of a process group; see `open_group`.

    Raises:
        ConfigError: As `open_group` says.
    """
    seat = open_torch_seat(process_group, coordinator_rank, purpose)
    if seat is None:
        return SingleGroup(deadline_s)
    with _kept_lock:
        kept = _keep(_ranks_of(process_group))
        lanes = kept.lanes.pop(purpose, None)

    def give_back(lanes: Lanes) -> None:
        with _kept_lock:
            surplus = kept.lanes.pop(purpose, None)
            kept.lanes[purpose] = lanes
        if surplus is not None:
            surplus.close()

    return BoardGroup(
        seat.board,
        rank=seat.rank,
        size=seat.size,
        coordinator=seat.coordinator,
        deadline_s=deadline_s,
        namespace=seat.namespace,
        lane_maker=_lane_maker(kept, seat.rank, seat.size),
        lanes=lanes,
        subject=subject,
        give_back=give_back,
    )


def open_torch_seat(
    process_group: dist.ProcessGroup | None, coordinator_rank: int, purpose: str
) -> Seat | None:
    """All ranks: take a seat at a new board of the ranks of a process group; see `open_seat`.

    Raises:
        ConfigError: As `open_seat` says.
    """
    ranks = _ranks_of(process_group)
    rank, size = dist.get_rank(ranks), dist.get_world_size(ranks)
    if not 0 <= coordinator_rank < size:
        raise ConfigError(f"coordinator {coordinator_rank} is no rank of a group of {size}")
    if size == 1:
        return None
    if dist.get_backend(ranks) == "fake":
        raise ConfigError(
            "a fake process group carries nothing; dcpstore.testing.ranks runs ranks as threads"
        )
    with _kept_lock:
        kept = _keep(ranks)
        namespace = f"{purpose}/{kept.num_opened[purpose]}"
        kept.num_opened[purpose] += 1
    board = StoreBoard(
        prefixed_store(namespace, kept.store),
        host_rank=_store_host(ranks, coordinator_rank),
        host=store_endpoint(kept.store),
        max_pause_s=max(_MIN_LONGEST_PAUSE_S, size * _PAUSE_PER_RANK_S),
    )
    return Seat(board, rank, size, coordinator_rank, namespace)


def _ranks_of(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    ranks = process_group if process_group is not None else dist.group.WORLD
    if not isinstance(ranks, dist.ProcessGroup):  # new_group gives others a placeholder
        raise ConfigError("this process is not in the process group given")
    return ranks


def _keep(ranks: dist.ProcessGroup) -> _Kept:
    """Return what is kept for a process group. Called with the lock held."""
    kept = _kept_by_group.get(ranks)
    if kept is None:
        client = private_store_client(process_group_store(ranks), _CLIENT_TIMEOUT_S)
        # Names alone do not tell groups apart: split_group gives all its parts one name.
        members = ",".join(map(str, dist.get_process_group_ranks(ranks)))
        digest = hashlib.sha256(members.encode()).hexdigest()[:16]
        kept = _Kept(prefixed_store(f"dcpstore/{digest}", client))
        _kept_by_group[ranks] = kept
    return kept


def _store_host(ranks: dist.ProcessGroup, otherwise: int) -> int:
    """Return whom to name when the store is gone: global rank 0, which holds it by default.

    Not where the launcher holds it or rank 0 is in another group: then `otherwise`.
    """
    members = dist.get_process_group_ranks(ranks)
    is_launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return members.index(0) if 0 in members and not is_launchers else otherwise


def _lane_maker(kept: _Kept, rank: int, size: int) -> LaneMaker | None:
    """Return what opens lanes here; the same kind on every rank, as it depends on the build."""
    if dist.is_gloo_available():
        kind, device = "gloo", None
    elif dist.is_nccl_available() and torch.cuda.is_available():
        kind, device = "nccl", torch.device("cuda", torch.cuda.current_device())
    else:
        return None

    def make(name: str, timeout_s: float) -> Lanes:
        # A client of its own: the backend's constructor blocks in it until all have come.
        client = private_store_client(kept.store, timeout_s)
        store = prefixed_store(name, client)
        return TorchLanes(name, make_backend(kind, store, rank, size, timeout_s), device)

    return make
