"""The nested structure of a ``torch.save`` file, and its flattened keys in a checkpoint.

Keys are DCP's own (``model.layers.0.weight``), so that ``dcp.load`` finds them; the structure
says what they do not: types of containers, keys that are numbers, empty containers, and
which tensors share a storage.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from dcpstore.convert.torch_pickle import StorageViews, is_stand_in
from dcpstore.errors import ConfigError, IncompatibleError
from dcpstore.torch_private import flatten_state_dict, meta_storage, storage_identity

__all__ = ["Leaves", "Path", "Recast", "flatten", "rearrange"]

Path: TypeAlias = "tuple[str | int, ...]"


@dataclass(frozen=True, slots=True)
class Leaves:
    """A structure's leaves by flattened key.

    Attributes:
        values: Tensors and other values.
        paths: Where each lies; dictionary keys as text, positions in lists as numbers.
    """

    values: Mapping[str, Any]
    paths: Mapping[str, Path]


def flatten(value: Any, what: str) -> Leaves:
    """Flatten a structure as DCP flattens a state dict.

    Args:
        value: A dictionary.
        what: Where it comes from, for messages.

    Raises:
        IncompatibleError: If it is no dictionary, or two of its leaves have one key.
    """
    if not isinstance(value, MutableMapping):
        raise IncompatibleError(
            f"{what} holds a {type(value).__name__}, and a DCP checkpoint is made of a dictionary;"
            " save {'name': value} instead"
        )
    try:
        values, paths = flatten_state_dict(value)  # type: ignore[arg-type]
    except ValueError as error:
        raise IncompatibleError(
            f"{what} has two entries that DCP gives one key, such as {{'a': {{'b': 1}}, 'a.b': 2}}:"
            f" {error}"
        ) from error
    except RecursionError as error:
        raise IncompatibleError(f"{what} contains itself, which DCP cannot flatten") from error
    return Leaves(values, paths)


# --- selection ------------------------------------------------------------------------


def rearrange(
    value: Any,
    leaves: Leaves,
    names: Mapping[str, str],
    replaced: Mapping[str, Any],
    takes: Callable[[str], bool],
) -> Any:
    """Return a structure with some of the leaves, some under other names or with other values.

    Containers keep their types and attributes. A leaf with a new name goes where the name says,
    along new dictionaries. What is left out of a list leaves None in its place; containers
    of which nothing is left vanish. The structure itself is not changed.

    Args:
        value: The structure.
        leaves: Of it.
        names: New key of each leaf that stays.
        replaced: New value of some leaves, by old key.
        takes: Whether the key of a container that was empty before takes part.

    Raises:
        ConfigError: If a new name leads through a leaf.
    """
    if not replaced and list(names) == list(leaves.paths) and _are_same(names):
        return value
    kept = {
        leaves.paths[fqn]: replaced.get(fqn, leaves.values[fqn])
        for fqn, name in names.items()
        if fqn == name
    }
    copied = _Pruner(set(leaves.paths.values()), kept, takes).prune(value, ())
    copied = _emptied(value) if copied is _GONE else copied
    for fqn, name in names.items():
        if fqn != name:
            path = _renamed_path(leaves.paths[fqn], name)
            _insert(copied, path, replaced.get(fqn, leaves.values[fqn]), name)
    return copied


def _are_same(names: Mapping[str, str]) -> bool:
    return all(fqn == name for fqn, name in names.items())


_GONE: Any = object()


@dataclass(frozen=True, slots=True)
class _Pruner:
    """Copies containers with those leaves that stay."""

    leaf_paths: set[Path]
    kept: Mapping[Path, Any]
    takes: Callable[[str], bool]

    def prune(self, value: Any, path: Path) -> Any:
        if path in self.leaf_paths:
            return self.kept.get(path, _GONE)
        if not value:
            return copy.copy(value) if self.takes(".".join(map(str, path))) else _GONE
        if isinstance(value, Mapping):
            return self._prune_mapping(value, path)
        parts = [self.prune(one, (*path, number)) for number, one in enumerate(value)]
        if all(part is _GONE for part in parts):
            return _GONE
        copied = copy.copy(value)
        copied[:] = [None if part is _GONE else part for part in parts]
        return copied

    def _prune_mapping(self, value: Mapping[Any, Any], path: Path) -> Any:
        parts = {key: self.prune(one, (*path, str(key))) for key, one in value.items()}
        if all(part is _GONE for part in parts.values()):
            return _GONE
        copied = _emptied(value)
        copied.update((key, part) for key, part in parts.items() if part is not _GONE)
        return copied


def _emptied(value: Any) -> Any:
    """Return a dictionary of the same type and attributes with nothing in it."""
    copied = copy.copy(value)
    copied.clear()
    return copied


def _renamed_path(path: Path, name: str) -> Path:
    """Return where a new name lies: as in the old path as far as the two end alike."""
    tail: list[str | int] = []
    left = name
    for step in reversed(path):
        text = str(step)
        if left == text:
            return (text, *tail)
        if not left.endswith(f".{text}"):
            break
        tail.insert(0, text)
        left = left[: -len(text) - 1]
    return (*left.split("."), *tail)


def _insert(root: Any, path: Sequence[str | int], value: Any, name: str) -> None:
    at = root
    for step in path[:-1]:
        if isinstance(at, MutableMapping):
            at = at.setdefault(step, {})
        if not isinstance(at, MutableMapping):
            raise ConfigError(f"rename: {name!r} leads through {step!r}, which is no dictionary")
    if path[-1] in at:
        raise ConfigError(f"rename: {name!r} is there already")
    at[path[-1]] = value


# --- dtypes ---------------------------------------------------------------------------


class Recast:
    """Stand-ins of other dtypes; tensors that shared a storage share the new one.

    Args:
        views: Tells stand-ins.
    """

    def __init__(self, views: StorageViews) -> None:
        self._views = views
        self._storages: dict[tuple[int, torch.dtype], torch.UntypedStorage] = {}

    @property
    def num_bytes(self) -> dict[int, int]:
        """Length of each new storage, by identity."""
        return {storage_identity(one): one.nbytes() for one in self._storages.values()}

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a stand-in of another dtype, of the same class, strides and attributes."""
        if not is_stand_in(tensor, self._views):
            raise IncompatibleError(f"a tensor of layout {tensor.layout} cannot be cast here")
        old = storage_identity(tensor)
        storage = self._storages.get((old, dtype))
        if storage is None:
            numel = self._views.num_bytes(old) // tensor.dtype.itemsize
            storage = self._storages[old, dtype] = meta_storage(numel * dtype.itemsize)
        made = torch.empty(0, dtype=dtype, device="meta")
        made.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        if type(tensor) is torch.nn.Parameter:
            is_trained = tensor.requires_grad and (dtype.is_floating_point or dtype.is_complex)
            made = torch.nn.Parameter(made, is_trained)
        elif dtype.is_floating_point or dtype.is_complex:
            made.requires_grad_(tensor.requires_grad)
        made.__dict__.update(tensor.__dict__)
        return made
