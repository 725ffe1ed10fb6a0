"""Hyperparameters of the optimizer that is there, taken from those that were saved.

Groups are matched by the parameters in them, so a job may have them in another order, or cut
otherwise, as long as no group of it joins parameters that were saved with different values.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.optim import Optimizer

from dcpstore.errors import IncompatibleError
from dcpstore.optimizer.entries import Path
from dcpstore.optimizer.live_optimizer import NOT_OPTIONS, LiveGroup, listed
from dcpstore.optimizer.saved_state import SavedState, nest

__all__ = ["SavedOptions", "check_options", "with_saved_options"]

# Hyperparameters that torch's optimizers gained over time, and that say nothing of their kind.
_GAINED = frozenset(
    ["foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"]
)


@cache
def _kind_options() -> frozenset[str]:
    """Return the hyperparameters that tell torch's optimizers apart.

    Others are the caller's own, such as a group's name, or a scheduler's, such as
    ``initial_lr``; nothing follows from their being there or not.
    """
    kinds = [one for one in vars(torch.optim).values() if inspect.isclass(one)]
    names = {
        name
        for kind in kinds
        if issubclass(kind, Optimizer)
        for name in inspect.signature(kind).parameters
    }
    return frozenset(names - {"params"} - _GAINED)


def check_options(optimizer: Optimizer, saved: Collection[str]) -> None:
    """Compare the names of all saved hyperparameters with those that an optimizer needs.

    Raises:
        IncompatibleError: If some of those that tell optimizers apart were not saved.
    """
    lacking = (optimizer.defaults.keys() & _kind_options()) - set(saved)
    if saved and lacking:
        raise IncompatibleError(_another_kind(optimizer, "lacks", lacking))


def _another_kind(optimizer: Optimizer, verb: str, names: Iterable[str]) -> str:
    return (
        f"the checkpoint's optimizer is of another kind than {type(optimizer).__name__}: it"
        f" {verb} {listed(sorted(names))}. Make the optimizer that was saved, or begin with a"
        " new one"
    )


class SavedOptions:
    """Hyperparameters by the saved name of a parameter.

    Args:
        saved: Entries.
        values: What was loaded, by key of the checkpoint.
    """

    def __init__(self, saved: SavedState, values: Mapping[str, Any]) -> None:
        self._by_name: dict[str, Mapping[str, Any]] = {}
        groups: list[Mapping[str, Any]] = [
            nest({path: values[entry.fqn] for path, entry in entries.items()})
            for entries in saved.groups.values()
        ]
        if saved.whole_groups is not None:
            groups += values[saved.whole_groups.fqn]
        for group in groups:
            options = {name: value for name, value in group.items() if name not in NOT_OPTIONS}
            for name in group.get("params", ()):
                self._by_name[str(name)] = options
        for owner, entries in saved.options.items():
            paths: dict[Path, Any] = {path: values[entry.fqn] for path, entry in entries.items()}
            self._by_name[owner] = nest(paths)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def of(self, name: str) -> Mapping[str, Any]:
        """Return the hyperparameters that were saved for a parameter; none if it had none."""
        return self._by_name.get(name, {})


def with_saved_options(
    group: LiveGroup, names: Mapping[str, str], saved: SavedOptions
) -> LiveGroup:
    """Return a group with the values that were saved for its parameters.

    Args:
        group: Of the optimizer that is there.
        names: Saved name by parameter.
        saved: All hyperparameters saved.

    Raises:
        IncompatibleError: If they were saved with different values, or for an optimizer of
            another kind.
    """
    options: dict[str, Any] = {}
    first: dict[str, str] = {}
    seen: set[int] = set()
    for fqn in group.fqns:
        own = saved.of(names.get(fqn, ""))
        if id(own) in seen:
            continue
        seen.add(id(own))
        for name, value in own.items():
            if name in options and not _is_same(options[name], value):
                raise IncompatibleError(
                    f"parameter group {group.number} joins {first[name]!r}, saved with"
                    f" {name}={options[name]!r}, and {fqn!r}, saved with {name}={value!r}; make"
                    " the optimizer with the groups that it had"
                )
            options[name] = value
            first.setdefault(name, fqn)
    extra = (options.keys() & _kind_options()) - group.options.keys()
    if extra:
        raise IncompatibleError(_another_kind(group.optimizer, "has", extra))
    _check_decay(group, options)
    fitted = {name: _like(group.options.get(name), value) for name, value in options.items()}
    return replace(group, options={**group.options, **fitted})


def _check_decay(group: LiveGroup, options: Mapping[str, Any]) -> None:
    """Tell Adam from AdamW, which differ in this only: torch would turn one into the other."""
    name = "decoupled_weight_decay"
    own = group.options.get(name) if isinstance(group.optimizer, torch.optim.Adam) else None
    if name in options and own is not None and bool(options[name]) != bool(own):
        saved, kind = ("AdamW", "Adam") if options[name] else ("Adam", "AdamW")
        raise IncompatibleError(
            f"the checkpoint's optimizer is of another kind than {type(group.optimizer).__name__}:"
            f" it was saved with {name}={options[name]} as {saved} has it, and this one computes"
            f" as {kind}. Make the optimizer that was saved, or begin with a new one"
        )


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(one), torch.as_tensor(other)))
    return bool(one == other)


def _like(own: Any, saved: Any) -> Any:
    """Give a saved value the form it has here: a learning rate may be a tensor or a number."""
    if isinstance(own, torch.Tensor):
        return torch.as_tensor(saved, dtype=own.dtype, device=own.device)
    if isinstance(saved, torch.Tensor) and isinstance(own, int | float) and saved.numel() == 1:
        return saved.item()
    if isinstance(own, tuple) and isinstance(saved, Sequence) and not isinstance(saved, str):
        return tuple(saved)
    return saved
