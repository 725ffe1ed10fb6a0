"""Staging: a copy of a state dict in host memory, into buffers that every save uses again.

The state is walked, and copied as it is: containers, values, and for each plain tensor a view of
the buffer, where `Layout` puts it. Where the layout of the last copy has no place for some of its
tensors, or places for others, a new one is made of what the walk found, and the state is walked
again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from dcpstore.errors import ConfigError, IncompatibleError
from dcpstore.manager.layout import Buffer, Job, Layout, Sign, is_plain, sign_of
from dcpstore.ranks.agreement import is_stateful
from dcpstore.text import collector_paused
from dcpstore.torch_private import sharded_tensor_of, wait_async_collective

Frozen: TypeAlias = "Sequence[str] | Callable[[str], bool]"
"""What the loop does not change while a save reads it: names, each with all that is below it, or
a function of the flattened name."""

_UNCHANGEABLE = frozenset({int, float, str, bool, type(None), bytes, complex, torch.Size})


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
        self._host, self._pinned = Buffer(pin=False), Buffer(pin=True)
        self._layout = Layout({}, self._host, self._pinned)
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
        return self._begin(state, is_frozen)

    @collector_paused()
    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def _begin(self, state: dict[str, Any], is_frozen: Callable[[str], bool]) -> Staging:
        walk = _Walk(is_frozen, self._layout.places)
        staged = walk.copy(state)
        found = walk.found
        if walk.num_missed or len(found) < len(self._layout.places):
            del staged, walk
            self._layout = Layout({}, self._host, self._pinned)  # or it would hold a small buffer
            self._layout = Layout(found, self._host, self._pinned)
            walk = _Walk(is_frozen, self._layout.places, is_last=True)
            staged = walk.copy(state)
        jobs, events = self._layout.begin(found)
        return Staging(staged, jobs, events, self._num_threads, keeps=(state, found))


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
    jobs: list[Job]
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


def _as_function(frozen: Frozen) -> Callable[[str], bool]:
    if callable(frozen):
        return frozen
    if isinstance(frozen, str):
        raise ConfigError(f"frozen={frozen!r} must be a list of names, or a function of one")
    names = frozenset(frozen)
    below = tuple(f"{name}." for name in names)
    return lambda name: name in names or name.startswith(below)


class _Walk:
    """One way through a state: makes the copy, and notes its plain tensors.

    Args:
        is_frozen: Of a flattened name.
        places: The copies of plain tensors.
        is_last: Whether to copy what has no place at once; else it is only counted.
    """

    def __init__(
        self,
        is_frozen: Callable[[str], bool],
        places: Mapping[Sign, torch.Tensor],
        *,
        is_last: bool = False,
    ) -> None:
        self._is_frozen = is_frozen
        self._places = places
        self._is_last = is_last
        self._made: dict[int, Any] = {}
        self._kept: list[Any] = []  # or the numbers in `_made` would be those of others
        self._copied: dict[int, Any] = {}
        self.found: dict[Sign, tuple[torch.Tensor, str]] = {}
        self.num_missed = 0

    def copy(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the copy of a state dict."""
        return {key: self._enter(value, str(key)) for key, value in state.items()}

    def _enter(self, value: Any, name: str) -> Any:
        if type(value) in _UNCHANGEABLE or self._is_frozen(name):
            return value
        made = self._made.get(id(value))
        if made is None:
            self._kept.append(value)
            made = self._made[id(value)] = self._make(value, name)
        return made

    def _make(self, value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name)
        if isinstance(value, Mapping):
            return self._mapping(value, name)
        kind = type(value)
        if kind is list:
            made = self._made[id(value)] = []
            made.extend(self._enter(one, f"{name}.{n}") for n, one in enumerate(value))
            return made
        if kind is tuple or (isinstance(value, tuple) and hasattr(kind, "_make")):
            parts = [self._enter(one, f"{name}.{n}") for n, one in enumerate(value)]
            return tuple(parts) if kind is tuple else kind._make(parts)
        return self._value(value, name)

    def _mapping(self, value: Mapping[Any, Any], name: str) -> Any:
        if type(value) in (dict, OrderedDict):
            made: Any = type(value)()
        elif isinstance(value, MutableMapping):
            made = copy(value)  # a defaultdict, which keeps its default
        else:
            made = {}
        self._made[id(value)] = made
        for key, one in value.items():
            made[key] = self._enter(one, f"{name}.{key}")
        # What cannot be changed stays so: a save refuses it.
        return made if isinstance(value, MutableMapping) else MappingProxyType(made)

    def _value(self, value: Any, name: str) -> Any:
        try:
            if isinstance(value, torch.Tensor):
                value = value.detach().cpu()
            return deepcopy(value, self._copied)
        except Exception as error:
            raise IncompatibleError(
                f"{name!r}, a {type(value).__qualname__}, cannot be copied for a save in the"
                f" background ({type(error).__name__}: {error}). Leave it out, or pass its name in"
                " frozen if nothing changes it meanwhile"
            ) from error

    def _tensor(self, tensor: torch.Tensor, name: str) -> Any:
        if is_plain(tensor):
            return self._plain(tensor, name)
        if isinstance(tensor, ShardedTensor):
            shards = [self._part(shard.tensor, name) for shard in tensor.local_shards()]
            return sharded_tensor_of(tensor, shards)
        if tensor.is_meta:
            raise IncompatibleError(
                f"{name!r} is a meta tensor, which has no elements to save. Give it memory first"
            )
        plain = wait_async_collective(tensor)
        if is_plain(plain):
            return self._plain(plain, name)
        kind: Any = type(tensor)
        if hasattr(kind, "__tensor_unflatten__"):
            names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
            inner = {part: self._part(getattr(tensor, part), name) for part in names}
            return kind.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
        # Sparse and quantized ones, and classes of users, take memory of their own each time.
        made = self._value(tensor, name)
        return made.requires_grad_() if tensor.requires_grad else made

    def _part(self, value: Any, name: str) -> Any:
        """Return the copy of a part of a tensor; what is no tensor, such as a mesh, is shared."""
        if not isinstance(value, torch.Tensor):
            return value
        made = self._enter(value, name)
        return made.detach() if made.requires_grad else made

    def _plain(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        if not tensor.numel():
            return _empty_like(tensor)
        sign = sign_of(tensor)
        place = self._places.get(sign)
        if place is None and self._is_last:  # made for whoever asks, each time anew
            place = tensor.detach().cpu().clone().requires_grad_(tensor.requires_grad)
        else:
            self.found[sign] = tensor, name
            self.num_missed += place is None
        return tensor if place is None else place


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    shape, stride = tensor.shape, tensor.stride()
    made = torch.empty_strided(shape, stride, dtype=tensor.dtype, device="cpu")
    if type(tensor) is torch.nn.Parameter:
        return torch.nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)
