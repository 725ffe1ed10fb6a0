"""Staging: a copy of a state dict in host memory, into buffers that every save uses again.

The state is walked twice. The first walk finds plain tensors; what they occupy of their storages
is joined to *spans*. Each span is copied once, as bytes, whatever views of it there are::

    storage A     |##### weight #####|......|## bias ##|     and a tied weight, the same bytes
    storage B     |#### a view ####|
                     |#### another ####|
    buffer        |# weight #|# bias #|# both views of B #|

The second walk builds the copy: views of the buffer, strided and tied as the tensors are.

Memory that nobody has written to costs several times as much to copy to, since the system has to
find and clear it. So the buffer stays, as large as the largest state so far.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from dcpstore.errors import ConfigError, IncompatibleError
from dcpstore.format.payload import PLAIN_TYPES, copy_bytes_out
from dcpstore.ranks.agreement import is_stateful
from dcpstore.store.budget import Bytes
from dcpstore.text import collector_paused
from dcpstore.torch_private import (
    set_lazy_bits,
    sharded_tensor_of,
    storage_identity,
    wait_async_collective,
)

Frozen: TypeAlias = "Sequence[str] | Callable[[str], bool]"
"""What the loop does not change while a save reads it: names, each with all that is below it, or
a function of the flattened name."""

_JOB_BYTES = 8 << 20  # what a thread copies at a time
_ALIGNMENT = 64
_ITEM = 16  # a multiple of every element's size
_WASTE = 2  # views that span more than this times their elements are gathered
_UNCHANGEABLE = frozenset({int, float, str, bool, type(None), bytes, complex, torch.Size})

_Job: TypeAlias = Callable[[], None]


class Stager:
    """Copies state dicts into host memory that it keeps, outside the budget of a save.

    One copy at a time: the next `stage` overwrites the last one. Pass one stager to all
    `dcpstore.async_save` of a loop: a save waits until the one before has let go of its copy. With
    two stagers in turn two saves may be under way, in twice the memory.

    What is on a CUDA device is copied into page-locked memory on a stream of its own, and the
    current stream waits for that, so that what is queued later may change the tensors. (Written
    for devices, and never run on one.)

    Args:
        num_threads: Threads that copy on the host.
    """

    def __init__(self, num_threads: int = 4) -> None:
        if num_threads < 1:
            raise ConfigError(f"num_threads={num_threads} must be at least 1")
        self._num_threads = num_threads
        self._host, self._pinned = _Buffer(pin=False), _Buffer(pin=True)
        self.in_use = threading.Lock()
        """Held while a save reads the last copy."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that it keeps: those of the largest state so far."""
        return self._host.num_bytes + self._pinned.num_bytes

    def stage(self, state_dict: Mapping[str, Any], frozen: Frozen = ()) -> dict[str, Any]:
        """Return a copy, whole when this returns and good until the next call.

        Args:
            state_dict: Nested; its ``Stateful`` values are asked for their state.
            frozen: What to hand on as it is, not copied.

        Raises:
            IncompatibleError: For a tensor without memory (meta, or freed by FSDP), and for a
                value that cannot be copied.
        """
        staging = self.begin(state_dict, frozen)
        staging.finish()
        return staging.state

    @collector_paused()
    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def begin(self, state_dict: Mapping[str, Any], frozen: Frozen = ()) -> Staging:
        """Lay the copy out and queue what devices copy; `Staging.finish` does the rest.

        Values other than tensors are copied when this returns. For arguments and errors see
        `stage`.
        """
        is_frozen = _as_function(frozen)
        state = {
            key: value.state_dict() if is_stateful(value) and not is_frozen(str(key)) else value
            for key, value in state_dict.items()
        }
        finder = _Finder(is_frozen)
        finder.find(state)
        places, jobs, events = self._place(finder.spans())
        staged = _Builder(is_frozen, places).build_all(state)
        return Staging(staged, jobs, events, self._num_threads, keeps=state)

    def _place(
        self, spans: Sequence[_Span]
    ) -> tuple[dict[int, torch.Tensor], list[_Job], list[torch.cuda.Event]]:
        """Give every span its place in a buffer; list or queue the copies."""
        on_cuda = [span for span in spans if span.device.type == "cuda"]
        others = [span for span in spans if span.device.type != "cuda"]
        places: dict[int, torch.Tensor] = {}
        copies: list[tuple[int, int, int]] = []
        jobs: list[_Job] = []
        for span, memory in zip(others, self._host.cut(others), strict=True):
            target = torch.from_numpy(memory)
            places.update(span.views(target))
            if span.is_gathered or span.device.type != "cpu":
                jobs.append(partial(span.copy_to, target))
            else:
                copies.append((target.data_ptr(), span.address, span.num_bytes))
        jobs.extend(partial(_copy_all, some) for some in _in_portions(copies))
        targets = list(map(torch.from_numpy, self._pinned.cut(on_cuda)))
        for span, target in zip(on_cuda, targets, strict=True):
            places.update(span.views(target))
        return places, jobs, _queue_on_devices(on_cuda, targets)


@dataclass(slots=True)
class Staging:
    """A copy on its way.

    Attributes:
        state: The copy; its tensors hold nothing of use before `finish` has returned.
        jobs: What is left to be copied on the host.
        events: The ends of what devices copy.
        num_threads: That copy.
        keeps: What the copies read, so that it is not freed meanwhile.
    """

    state: dict[str, Any]
    jobs: list[_Job]
    events: list[torch.cuda.Event]
    num_threads: int
    keeps: Any

    def finish(self) -> None:
        """Copy; from then on the loop may change its tensors. Any thread; idempotent."""
        jobs, self.jobs = deque(self.jobs), []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                while not errors:
                    jobs.popleft()()
            except IndexError:
                return
            except BaseException as error:  # noqa: BLE001 - of a helper thread, raised below
                errors.append(error)

        num_helpers = min(self.num_threads, len(jobs)) - 1
        helpers = [
            threading.Thread(target=work, name="dcpstore-stage", daemon=True)
            for _ in range(num_helpers)
        ]
        for helper in helpers:
            helper.start()
        work()
        for helper in helpers:
            helper.join()
        for event in self.events:
            event.synchronize()
        self.events, self.keeps = [], None
        for error in errors:
            raise error


class _Buffer:
    """Memory that grows to the largest state, and stays.

    Args:
        pin: Allocate it page-locked.
    """

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._memory: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self._memory is None else self._memory.numel()

    def cut(self, spans: Iterable[_Span]) -> Iterator[Bytes]:
        """Return a piece for each span; each becomes a storage of its own."""
        sizes = [span.num_bytes for span in spans]
        starts, end = [], 0
        for size in sizes:
            starts.append(end)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        if end > self.num_bytes:
            self._memory = None  # before there is another, so that both are never there at once
            self._memory = torch.empty(end, dtype=torch.uint8, device="cpu", pin_memory=self._pin)
        array = np.empty(0, np.uint8) if self._memory is None else self._memory.numpy()
        return (array[start : start + size] for start, size in zip(starts, sizes, strict=True))


def _in_portions(copies: Sequence[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Cut copies (to, from, bytes) and pack them, so that all threads have the same to do."""
    portion: list[tuple[int, int, int]] = []
    room_bytes = _JOB_BYTES
    for to, source, num_bytes in copies:
        at = 0
        while at < num_bytes:
            count = min(room_bytes, num_bytes - at)
            portion.append((to + at, source + at, count))
            at, room_bytes = at + count, room_bytes - count
            if not room_bytes:
                yield portion
                portion, room_bytes = [], _JOB_BYTES
    if portion:
        yield portion


def _copy_all(copies: Sequence[tuple[int, int, int]]) -> None:
    for to, source, num_bytes in copies:
        ctypes.memmove(to, source, num_bytes)  # lets other threads run meanwhile


def _queue_on_devices(
    spans: Sequence[_Span], targets: Sequence[torch.Tensor]
) -> list[torch.cuda.Event]:
    """Copy from CUDA devices on streams beside the current ones. Never run on a device so far."""
    streams: dict[torch.device, torch.cuda.Stream] = {}
    for span, target in zip(spans, targets, strict=True):
        if span.device not in streams:
            streams[span.device] = torch.cuda.Stream(span.device)  # type: ignore[no-untyped-call]
            streams[span.device].wait_stream(torch.cuda.current_stream(span.device))
        with torch.cuda.stream(streams[span.device]):
            span.copy_to(target, non_blocking=True)
    events = []
    for device, stream in streams.items():
        events.append(stream.record_event())
        torch.cuda.current_stream(device).wait_stream(stream)
    return events


# --- what is to be copied -------------------------------------------------------------


@dataclass(slots=True)
class _Seen:
    """A plain tensor, and which bytes of its storage it spans.

    Attributes:
        tensor: It has elements.
        identity: ``id`` of the tensor in the state: the same, or what it was waited for by.
        start: First byte in the storage.
        end: End (exclusive).
    """

    tensor: torch.Tensor
    identity: int
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def view(self) -> tuple[object, ...]:
        """What tells it from other views of the storage."""
        one = self.tensor
        return self.start, one.dtype, one.shape, one.stride(), one.is_conj(), one.is_neg()


@dataclass(slots=True)
class _Span:
    """Bytes of one storage that are copied once.

    Attributes:
        device: Where they are.
        start: First byte in the storage; a multiple of every element's size.
        end: End (exclusive).
        seen: The tensors that lie there.
        is_gathered: Whether only the elements are copied, and not what lies between them: its
            tensors are all the same view.
    """

    device: torch.device
    start: int
    end: int
    seen: list[_Seen] = field(default_factory=list)
    is_gathered: bool = False

    @property
    def num_bytes(self) -> int:
        return self.seen[0].num_bytes if self.is_gathered else self.end - self.start

    @property
    def address(self) -> int:
        return self.seen[0].tensor.untyped_storage().data_ptr() + self.start

    def views(self, target: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the copies of its tensors, by the identity of the tensor."""
        storage = target.untyped_storage()
        for one in self.seen:
            tensor = one.tensor
            staged = torch.empty(0, dtype=tensor.dtype, device="cpu")
            if self.is_gathered:
                yield one.identity, staged.set_(storage, 0, tensor.shape)  # type: ignore[call-overload]
                continue
            first = (one.start - self.start) // tensor.element_size()
            staged.set_(storage, first, tensor.shape, tensor.stride())
            if tensor.is_conj() or tensor.is_neg():
                staged = set_lazy_bits(staged, conj=tensor.is_conj(), neg=tensor.is_neg())
            yield one.identity, staged

    def copy_to(self, target: torch.Tensor, *, non_blocking: bool = False) -> None:
        """Copy its bytes by torch."""
        tensor = self.seen[0].tensor
        if not self.is_gathered:
            flat = torch.empty(0, dtype=torch.uint8, device=self.device)
            size = (self.end - self.start,)
            tensor = flat.set_(tensor.untyped_storage(), self.start, size)  # type: ignore[call-overload]
        copy_bytes_out(tensor, 0, len(target), target, non_blocking=non_blocking)

    def gathered(self) -> Iterator[_Span]:
        """Yield itself, or a span per view where most of it belongs to none."""
        if self.end - self.start <= _WASTE * sum(one.num_bytes for one in self.seen) + _ITEM:
            yield self
            return
        views: dict[tuple[object, ...], list[_Seen]] = {}
        for one in self.seen:
            views.setdefault(one.view, []).append(one)
        for same in views.values():
            yield _Span(self.device, same[0].start, same[0].end, same, is_gathered=True)


def _as_function(frozen: Frozen) -> Callable[[str], bool]:
    if callable(frozen):
        return frozen
    if isinstance(frozen, str):
        raise ConfigError(f"frozen={frozen!r} must be a list of names, or a function of one")
    names = frozenset(frozen)
    below = tuple(f"{name}." for name in names)
    return lambda name: name in names or name.startswith(below)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's storage holds all its elements."""
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
    )


def _parts_of(tensor: torch.Tensor) -> tuple[list[str], Any] | None:
    """Return the names of the tensors that a wrapper is made of, and what it wants besides.

    None for what is no wrapper. Since torch 2.13 there are things beside tensors among them.
    """
    kind: Any = type(tensor)
    if kind in PLAIN_TYPES or not hasattr(kind, "__tensor_unflatten__"):
        return None
    names, context = kind.__tensor_flatten__(tensor)
    return list(names), context


class _Finder:
    """The first walk: finds plain tensors.

    Args:
        is_frozen: Of a flattened name.
    """

    def __init__(self, is_frozen: Callable[[str], bool]) -> None:
        self._is_frozen = is_frozen
        self._visited: dict[int, Any] = {}
        self._seen: dict[tuple[torch.device, int], list[_Seen]] = {}

    def find(self, state: Mapping[str, Any]) -> None:
        """Walk a state dict."""
        for key, value in state.items():
            self._visit(value, str(key))

    def _visit(self, value: Any, name: str) -> None:
        kind = type(value)
        if kind in _UNCHANGEABLE or id(value) in self._visited or self._is_frozen(name):
            return
        self._visited[id(value)] = value
        if isinstance(value, torch.Tensor):
            self._visit_tensor(value, name)
        elif isinstance(value, Mapping):
            for key, one in value.items():
                self._visit(one, f"{name}.{key}")
        elif isinstance(value, list | tuple):
            for number, one in enumerate(value):
                self._visit(one, f"{name}.{number}")

    def _visit_tensor(self, tensor: torch.Tensor, name: str) -> None:
        if isinstance(tensor, ShardedTensor):
            for shard in tensor.local_shards():
                self._visit(shard.tensor, name)
            return
        if tensor.is_meta:
            raise IncompatibleError(
                f"{name!r} is a meta tensor, which has no elements to save. Give it memory first"
            )
        plain = wait_async_collective(tensor)
        if _is_plain(plain):
            self._note(plain, id(tensor), name)
        elif (parts := _parts_of(tensor)) is not None:
            for part in map(partial(getattr, tensor), parts[0]):
                if isinstance(part, torch.Tensor):
                    self._visit(part, name)

    def _note(self, tensor: torch.Tensor, identity: int, name: str) -> None:
        num_elements = tensor.numel()
        if not num_elements:
            return
        item = tensor.element_size()
        start = int(tensor.storage_offset()) * item
        if tensor.is_contiguous():
            end = start + num_elements * item
        else:
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            end = start + (1 + sum(int(size - 1) * int(stride) for size, stride in steps)) * item
        if end > tensor.untyped_storage().nbytes():
            raise IncompatibleError(
                f"the memory of {name!r} was freed: its storage is smaller than the tensor. With"
                " FSDP, save the sharded state dict, not parameters outside forward"
            )
        where = (tensor.device, storage_identity(tensor))
        self._seen.setdefault(where, []).append(_Seen(tensor, identity, start, end))

    def spans(self) -> list[_Span]:
        """Return what was found, as bytes to copy."""
        spans: list[_Span] = []
        for (device, _), seen in self._seen.items():
            joined: list[_Span] = []
            for one in sorted(seen, key=lambda one: one.start) if len(seen) > 1 else seen:
                if not joined or one.start > joined[-1].end:
                    joined.append(_Span(device, one.start // _ITEM * _ITEM, one.end))
                joined[-1].end = max(joined[-1].end, one.end)
                joined[-1].seen.append(one)
            spans.extend(part for span in joined for part in span.gathered())
        return spans


# --- the copy of the state ------------------------------------------------------------


class _Builder:
    """The second walk: builds the copy, with views of the buffers for tensors.

    Args:
        is_frozen: Of a flattened name.
        places: What to put for plain tensors, by the identity of the tensor.
    """

    def __init__(
        self, is_frozen: Callable[[str], bool], places: Mapping[int, torch.Tensor]
    ) -> None:
        self._is_frozen = is_frozen
        self._places = places
        self._built: dict[int, Any] = {}
        self._copied: dict[int, Any] = {}

    def build_all(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the copy of a state dict."""
        return {key: self._build(value, str(key)) for key, value in state.items()}

    def _build(self, value: Any, name: str) -> Any:
        if type(value) in _UNCHANGEABLE or self._is_frozen(name):
            return value
        if id(value) not in self._built:
            self._built[id(value)] = self._make(value, name)
        return self._built[id(value)]

    def _make(self, value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name)
        if isinstance(value, Mapping):
            return self._mapping(value, name)
        kind = type(value)
        if kind is list:
            made = self._built[id(value)] = []
            made.extend(self._build(one, f"{name}.{n}") for n, one in enumerate(value))
            return made
        if kind is tuple or (isinstance(value, tuple) and hasattr(kind, "_make")):
            parts = [self._build(one, f"{name}.{n}") for n, one in enumerate(value)]
            return tuple(parts) if kind is tuple else kind._make(parts)
        return self._copy(value, name)

    def _mapping(self, value: Mapping[Any, Any], name: str) -> Any:
        if type(value) in (dict, OrderedDict):
            made: Any = type(value)()
        elif isinstance(value, MutableMapping):
            made = copy(value)  # a defaultdict, which keeps its default
        else:
            made = {}
        self._built[id(value)] = made
        for key, one in value.items():
            made[key] = self._build(one, f"{name}.{key}")
        # What cannot be changed stays so: a save refuses it.
        return made if isinstance(value, MutableMapping) else MappingProxyType(made)

    def _copy(self, value: Any, name: str, how: Callable[[], Any] | None = None) -> Any:
        try:
            return deepcopy(value, self._copied) if how is None else how()
        except Exception as error:
            raise IncompatibleError(
                f"{name!r}, a {type(value).__qualname__}, cannot be copied for a save in the"
                f" background ({type(error).__name__}: {error}). Leave it out, or pass its name in"
                " frozen if nothing changes it meanwhile"
            ) from error

    def _tensor(self, tensor: torch.Tensor, name: str) -> Any:
        if isinstance(tensor, ShardedTensor):
            return sharded_tensor_of(
                tensor, [self._detached(shard.tensor, name) for shard in tensor.local_shards()]
            )
        parts = _parts_of(tensor)
        if id(tensor) not in self._places and parts is not None:
            names, context = parts
            inner = {part: self._detached(getattr(tensor, part), name) for part in names}
            kind: Any = type(tensor)
            return kind.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
        staged = self._detached(tensor, name)
        if isinstance(tensor, torch.nn.Parameter) and type(staged) is torch.Tensor:
            return torch.nn.Parameter(staged, tensor.requires_grad)
        return staged.requires_grad_() if tensor.requires_grad else staged

    def _detached(self, value: Any, name: str) -> Any:
        """Return the copy of a tensor, or of a part of one; what is none stays as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in self._places:
            return self._places[id(value)]
        if isinstance(value, ShardedTensor) or _parts_of(value) is not None:
            return self._build(value, name)
        if _is_plain(value) and not value.numel():
            shape, stride = value.shape, value.stride()
            return torch.empty_strided(shape, stride, dtype=value.dtype, device="cpu")
        # Sparse, quantized and nested ones, and classes of users, take memory of their own.
        return self._copy(value, name, lambda: deepcopy(value.detach().cpu(), self._copied))
