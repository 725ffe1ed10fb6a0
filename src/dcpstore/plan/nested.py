"""Nested state dicts: the flattened names are DCP's, the paths keep the real keys.

DCP joins the steps to a leaf with dots, after ``str`` of every key, and forgets what the keys
were: ``{"x": {1: 2}}`` becomes ``x.1``, to be put back as ``{"x": {"1": 2}}``. Here the name is
the same and the path is ``("x", 1)``, so that a loaded value replaces the one it belongs to::

    state dict                     name            path               DCP's path
    {"x": {1: 2}}                  "x.1"           ("x", 1)           ("x", "1")
    {"x": [{"y": 3}]}              "x.0.y"         ("x", 0, "y")      ("x", 0, "y")
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from dcpstore.errors import IncompatibleError
from dcpstore.torch_private import flatten_sharded_tensors, materialise_meta_tensors
from dcpstore.torch_private import set_element as set_element_and_make_containers

TypedPath: TypeAlias = tuple[Any, ...]

_KEY_TYPES = frozenset((str, int, bool, float, type(None), bytes))


@dataclass(slots=True)
class Flattened:
    """A state dict without its nesting.

    Attributes:
        values: Leaves by flattened name.
        paths: Per name, the steps to the leaf: keys as they are, and numbers in lists.
        dcp_paths: The same steps as DCP keeps them: every key as text.
    """

    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, TypedPath] = field(default_factory=dict)
    dcp_paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)


def flatten(
    state_dict: Mapping[Any, Any], *, as_torch_2_3: bool = False, check_keys: bool = False
) -> Flattened:
    """Flatten nested mappings, and the lists that hold tensors or mappings.

    Args:
        state_dict: Nested.
        as_torch_2_3: Flatten as torch up to 2.3 did: only what holds tensors.
        check_keys: Refuse what could not be loaded again: keys that are neither str, int,
            bool, float, None, bytes nor tuples of these, and mappings that cannot be changed.

    Raises:
        IncompatibleError: If two leaves would get one name, if the state dict contains itself,
            or for a key that ``check_keys`` refuses.
    """
    walk = _Walk(as_torch_2_3=as_torch_2_3, check_keys=check_keys)
    try:
        walk.enter_mapping(state_dict)
    except RecursionError as error:
        raise IncompatibleError(
            f"the state dict is nested too deeply, or contains itself, at {text_of(walk.path[:4])}"
        ) from error
    return walk.found


def text_of(path: TypedPath) -> str:
    """Write a path as Python would reach it: ``x[1]['y']``."""
    if not path:
        return "the state dict"
    first = path[0] if type(path[0]) is str and path[0].isidentifier() else f"[{path[0]!r}]"
    return first + "".join(f"[{step!r}]" for step in path[1:])


class _Walk:
    """The way through a state dict: the steps to where it is now, as keys and as DCP keeps them."""

    def __init__(self, *, as_torch_2_3: bool, check_keys: bool) -> None:
        self._leaves_whole = _holds_no_tensor if as_torch_2_3 else _is_leaf
        self._check_keys = check_keys
        self._steps: list[Any] = []
        self._dcp_steps: list[str | int] = []
        self.found = Flattened()

    @property
    def path(self) -> TypedPath:
        """The steps to where the walk is."""
        return tuple(self._steps)

    def enter_mapping(self, mapping: Mapping[Any, Any]) -> None:
        if self._check_keys and not isinstance(mapping, MutableMapping):
            raise IncompatibleError(
                f"{text_of(self.path)} is a {type(mapping).__name__}, which a load could not fill"
                " again; save dict(...) of it"
            )
        for key, value in mapping.items():
            if self._check_keys and type(key) is not str and not _is_allowed(key):
                raise IncompatibleError(
                    f"{text_of(self.path)} has the key {key!r} of type {type(key).__name__}; keys"
                    " may be str, int, bool, float, None, bytes and tuples of these. Rename it"
                )
            self._step(key, str(key), value)

    def _step(self, step: Any, dcp_step: str | int, value: Any) -> None:
        self._steps.append(step)
        self._dcp_steps.append(dcp_step)
        if type(value) in _PLAIN or self._leaves_whole(value):
            self._keep(value)
        elif isinstance(value, Mapping):
            self.enter_mapping(value)
        else:
            for number, one in enumerate(value):
                self._step(number, number, one)
        self._steps.pop()
        self._dcp_steps.pop()

    def _keep(self, value: Any) -> None:
        found = self.found
        name, path = ".".join(map(str, self._dcp_steps)), tuple(self._steps)
        if name in found.values:
            raise IncompatibleError(
                f"{text_of(found.paths[name])} and {text_of(path)} would both be stored as"
                f" {name!r}: DCP joins keys with dots, as text. Rename one of them"
            )
        found.values[name] = value
        found.paths[name] = path
        found.dcp_paths[name] = tuple(self._dcp_steps)


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, int, float, str, bool, type(None)))


def _is_allowed(key: object) -> bool:
    if type(key) is tuple:
        return all(map(_is_allowed, key))
    return type(key) in _KEY_TYPES


def _is_leaf(value: Any) -> bool:
    """Tell whether a value stays whole: what is no mapping, and lists without any or tensors."""
    if isinstance(value, Mapping):
        return False
    return not isinstance(value, list) or all(map(_is_leaf_in_list, value))


def _is_leaf_in_list(value: Any) -> bool:
    return type(value) in _SCALARS or (not isinstance(value, torch.Tensor) and _is_leaf(value))


_SCALARS = frozenset((int, float, str, bool, type(None)))


def _holds_no_tensor(value: Any) -> bool:
    inside = value.values() if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping | list):
        return True
    return not any(isinstance(one, torch.Tensor) or not _holds_no_tensor(one) for one in inside)


def set_element(root: Any, path: TypedPath, value: Any) -> None:
    """Put a value where a path of `flatten` leads.

    A path of torch's own flattening, of a planner that extends ours, leads through keys that
    are text; what is not there is made, as torch does.
    """
    container = root
    try:
        for step in path[:-1]:
            container = container[step]
        container[path[-1]] = value
    except (KeyError, IndexError):
        set_element_and_make_containers(root, path, value)


def give_memory(state_dict: Any, flat: Flattened) -> None:
    """Give meta tensors memory on the default device, in the flattened and the nested form."""
    made = {
        name: value
        for name, value in flat.values.items()
        if isinstance(value, torch.Tensor)
        and not isinstance(value, ShardedTensor)
        and value.is_meta
    }
    if not made:
        return
    materialise_meta_tensors(made)
    flat.values.update(made)
    for name, value in made.items():
        set_element(state_dict, flat.paths[name], value)


def merge_nested_shards(flat: dict[str, Any]) -> dict[str, Any]:
    """Flatten the ShardedTensors of FSDP1 over tensor parallelism, where there are any."""
    if any(isinstance(value, ShardedTensor) for value in flat.values()):
        return flatten_sharded_tensors(flat)
    return flat
