"""Open the pickle of a ``torch.save`` file with stand-ins for its tensors.

A stand-in is a tensor on the meta device: dtype, shape, strides, flags and Python type are
those of the saved tensor, tensors that shared a storage share one, and there is no memory.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from dcpstore.errors import CorruptError, IncompatibleError
from dcpstore.format.dtypes import is_plain_dtype
from dcpstore.opcodes import BadPickleError, check_structure
from dcpstore.torch_private import named_storage_class, typed_storage, weights_only_unpickler

__all__ = ["PickledStorage", "Storages", "unpickle"]

_CONTAINERS = (dict, list, tuple, set)
_MAX_NESTING = 200  # whoever walks through it calls itself a few times per level
_MAX_PARTS = 1 << 16


@dataclass(frozen=True, slots=True)
class PickledStorage:
    """A storage as the pickle names it.

    Attributes:
        key: Its name in the archive.
        dtype: Of the tensors that were saved with it; uint8 where it has none.
        num_bytes: Its length.
        location: Where it was when it was saved, such as ``"cuda:0"``.
    """

    key: str
    dtype: torch.dtype
    num_bytes: int
    location: str


class Storages:
    """Makes the storages that a pickle names, one per key.

    Args:
        make: Allocates one.
        what: Name of the file, for messages.
    """

    def __init__(self, make: Callable[[PickledStorage], torch.UntypedStorage], what: str) -> None:
        self._make = make
        self._what = what
        self.pickled: dict[str, PickledStorage] = {}
        self.made: dict[str, torch.UntypedStorage] = {}

    def persistent_load(self, persistent_id: Any) -> Any:
        """Return the storage of a persistent id, as both unpicklers ask for it."""
        match persistent_id:
            case ("storage", kind, str() as key, str() as location, int() as count) if count >= 0:
                dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
                if isinstance(dtype, torch.dtype):
                    self._check_plain(dtype)
                    one = PickledStorage(key, dtype, count * dtype.itemsize, location)
                    return typed_storage(self._storage(one), dtype)
        kind = type(persistent_id).__name__
        raise CorruptError(f"{self._what} is damaged: it names a storage by a strange {kind}")

    def _check_plain(self, dtype: torch.dtype) -> None:
        if not is_plain_dtype(dtype):
            raise IncompatibleError(_no_stand_in(self._what, f"it is of {dtype}"))

    def _storage(self, one: PickledStorage) -> torch.UntypedStorage:
        known = self.pickled.setdefault(one.key, one)
        if known.num_bytes != one.num_bytes:
            raise CorruptError(
                f"{self._what} is damaged: storage {one.key} has {known.num_bytes} bytes and"
                f" {one.num_bytes} bytes"
            )
        if one.key not in self.made:
            self.made[one.key] = self._make(one)
        return self.made[one.key]


def unpickle(data: bytes, storages: Storages, *, weights_only: bool, what: str) -> Any:
    """Rebuild what was saved.

    Args:
        data: Contents of ``data.pkl``.
        storages: Makes the storages; afterwards holds those that the pickle named.
        weights_only: Allow what ``torch.load(weights_only=True)`` allows, including
            ``torch.serialization.add_safe_globals``; if False run whatever the bytes name.
        what: Name of the file, for messages.

    Raises:
        CorruptError: If the bytes are no pickle, or name something that is not allowed; it was
            not run.
        IncompatibleError: If a tensor has no stand-in: quantized and strided nested ones.
    """
    unpickler: Any = weights_only_unpickler(data) if weights_only else _Unpickler(io.BytesIO(data))
    unpickler.persistent_load = storages.persistent_load
    try:
        if not weights_only:
            return unpickler.load()
        check_structure(data)
        return _checked_size(unpickler.load(), limit=_MAX_PARTS + len(data))
    except (CorruptError, IncompatibleError):
        raise
    except BadPickleError as error:
        raise CorruptError(f"the pickle of {what} is damaged: {error}") from error
    except NotImplementedError as error:
        raise IncompatibleError(_no_stand_in(what, _first_line(error))) from error
    except pickle.UnpicklingError as error:
        raise CorruptError(_explain(error, what, weights_only=weights_only)) from error
    except Exception as error:
        text = f"{type(error).__name__}: {_first_line(error)[:200]}"
        raise CorruptError(f"the pickle of {what} cannot be opened: {text}") from error


def _checked_size(value: Any, *, limit: int) -> Any:
    """Return a structure; refuse one that never ends, or not soon, for those who walk through it.

    A list or dict that is used in several places counts as often, with what it holds.

    Raises:
        BadPickleError: If it contains itself, is nested too deeply, or has more than ``limit``
            parts.
    """
    sizes: dict[int, int] = {}
    open_ids: set[int] = set()
    path: list[tuple[Any, Iterator[Any]]] = []

    def enter(one: Any) -> None:
        if id(one) in open_ids:
            raise BadPickleError(f"it has a {type(one).__name__} that contains itself")
        if len(path) == _MAX_NESTING:
            raise BadPickleError(f"it is nested more than {_MAX_NESTING} times")
        open_ids.add(id(one))
        sizes[id(one)] = 1
        parts = chain(one, one.values()) if isinstance(one, dict) else one
        path.append((one, iter(parts)))

    if isinstance(value, _CONTAINERS):
        enter(value)
    while path:
        holder, parts = path[-1]
        for part in parts:
            sizes[id(holder)] += 1
            if isinstance(part, _CONTAINERS):
                if id(part) not in sizes or id(part) in open_ids:
                    enter(part)
                    break
                sizes[id(holder)] += sizes[id(part)]
        else:
            path.pop()
            open_ids.discard(id(holder))
            if path:
                sizes[id(path[-1][0])] += sizes[id(holder)]
        if sizes[id(holder)] > limit:
            raise BadPickleError("it shares its parts so often that it would never be read")
    return value


def _no_stand_in(what: str, reason: str) -> str:
    return (
        f"{what} holds a tensor that cannot be read by ranges, such as a quantized or a nested one;"
        " load it with torch.load, turn it into plain tensors (dequantize(), unbind()) and save it"
        f" again ({reason})"
    )


def _explain(error: Exception, what: str, *, weights_only: bool) -> str:
    if not weights_only:
        return f"the pickle of {what} is damaged: {_first_line(error)}"
    return (
        f"{what} names more than tensors and plain data; it was not run. If you trust the file,"
        " pass weights_only=False, or name its classes with"
        f" torch.serialization.add_safe_globals. Torch says: {_first_line(error)}"
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(". This could be")[0]


class _Unpickler(pickle.Unpickler):
    """Python's own, with the storage classes that torch only names."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name.endswith("Storage"):
            try:
                return named_storage_class(name)
            except KeyError:
                pass
        if module == "torch.tensor":  # where torch.Tensor was until 1.7
            module = "torch._tensor"
        return super().find_class(module, name)
