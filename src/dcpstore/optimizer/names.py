"""Which tensor of the model a saved state belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from dcpstore.errors import ConfigError, IncompatibleError
from dcpstore.optimizer.entries import Entry
from dcpstore.optimizer.layout import is_tensor

__all__ = ["Owner", "Parameters"]

# Steps that wrappers put into names: DDP, torch.compile, FSDP1, activation checkpointing.
_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


@dataclass(frozen=True, slots=True, eq=False)
class Owner:
    """A parameter that has saved state.

    Attributes:
        name: In the model's state dict; None if only its number is known.
        tensor: What the model's state dict holds; None likewise, for state wanted whole.
        number: Of the parameter, where the checkpoint numbers them.
    """

    name: str | None
    tensor: Any
    number: int | None = None


class Parameters:
    """The tensors of a model's state dict by name, and by the name that a checkpoint has.

    Args:
        model_state_dict: Flat. What is no tensor is ignored.
        in_order: Names of the optimizer's parameters, for a checkpoint that numbers them.

    Raises:
        ConfigError: If a name of ``in_order`` is none of the model's.
    """

    def __init__(
        self, model_state_dict: Mapping[str, Any], in_order: Sequence[str] | None = None
    ) -> None:
        self.tensors = {name: one for name, one in model_state_dict.items() if is_tensor(one)}
        self._in_order = in_order
        self._by_plain_name: dict[str, str | None] = {}
        for name in self.tensors:
            plain = _plain(name)
            self._by_plain_name[plain] = None if plain in self._by_plain_name else name
        unknown = [name for name in in_order or () if self.find(name) is None]
        if unknown:
            raise ConfigError(
                f"parameter_names has {unknown[0]!r}, which is not in the model's state dict"
            )

    @property
    def common_device(self) -> torch.device:
        """Where all of the model is; the host if that is several places."""
        devices = {one.device for one in self.tensors.values() if isinstance(one, torch.Tensor)}
        return devices.pop() if len(devices) == 1 else torch.device("cpu")

    def find(self, saved: str) -> str | None:
        """Return the model's name for a saved one, which may have a wrapper more or less."""
        if saved in self.tensors:
            return saved
        return self._by_plain_name.get(_plain(saved))

    def match(self, entries: Iterable[Entry]) -> dict[str, Owner]:
        """Return the model's parameter for each owner that it has.

        Raises:
            IncompatibleError: If the model has none of them, or does not know their numbers.
        """
        named = {entry.owner: entry for entry in entries if entry.owner is not None}
        found: dict[str, Owner] = {}
        for owner, entry in named.items():
            name = self.find(owner)
            if name is not None:
                found[owner] = Owner(name, self.tensors[name])
            elif entry.is_numbered:
                found[owner] = self._numbered(int(owner))
        if named and self.tensors and not found:
            raise IncompatibleError(
                "the optimizer was saved for another model: it has state for"
                f" {_some(named)}, and the model's state dict has {_some(self.tensors)}."
                " Nothing was loaded"
            )
        return found

    def _numbered(self, number: int) -> Owner:
        names = self._in_order
        if names is not None:
            if number >= len(names):
                raise IncompatibleError(
                    f"the checkpoint has state for parameter {number}, and parameter_names has"
                    f" {len(names)} names. Nothing was loaded"
                )
            name = str(self.find(names[number]))
            return Owner(name, self.tensors[name], number)
        if any(isinstance(one, DTensor | ShardedTensor) for one in self.tensors.values()):
            raise IncompatibleError(
                "the checkpoint has the state of a plain optimizer.state_dict(), which numbers"
                " parameters, and the model is sharded. Say whose they are, in the optimizer's"
                " order: parameter_names=[name for name, _ in model.named_parameters()]"
            )
        return Owner(None, None, number)

    def without_state(self, owners: Iterable[Owner]) -> list[str]:
        """Return the tensors that could have a state, and for which none is saved.

        None where the checkpoint only numbers them and nobody named them.
        """
        has = {owner.name for owner in owners}
        if None in has:
            return []
        return [
            name
            for name, one in self.tensors.items()
            if name not in has and (one.dtype.is_floating_point or one.dtype.is_complex)
        ]


def _plain(name: str) -> str:
    return ".".join(step for step in name.split(".") if step not in _WRAPPERS)


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(map(repr, listed[:3])) + more
