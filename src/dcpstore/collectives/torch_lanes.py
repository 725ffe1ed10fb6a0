"""Lanes on a c10d backend of their own: gloo, or NCCL where torch was built without it.

A wait on gloo that times out closes every connection of that rank's backend. That is why the
backend is never the trainer's, and it is also what makes a failure safe: nothing arrives any
more in a buffer that its owner has given up.

A rank that closes its lanes first lets its sends end, within moments. gloo tells a receiver that
the connection is gone only between messages: one that has the beginning of a message would wait
for the rest until its time is over.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from typing_extensions import Buffer

from dcpstore.collectives.group import Pending

__all__ = ["TorchLanes"]

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
