"""From flattened entries to what a load fills, and back to the nested state dict."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dcpstore.optimizer.entries import Entry
from dcpstore.optimizer.layout import Target, has_elements, make_target
from dcpstore.optimizer.names import Owner
from dcpstore.report import LoadResult
from dcpstore.torch_private import set_element

__all__ = ["Assembly"]

_VALUE = "not loaded yet"  # anything that is no tensor, so that planners plan a value


class Assembly:
    """What one rank loads of an optimizer. Allocates it.

    Args:
        entries: All that is saved of the optimizer.
        owners: The model's parameters by the owner that entries name. What belongs to others
            is not loaded.
        device: For tensors whose parameter is not known.

    Attributes:
        owners: As given.
        wanted: Flattened, for `dcpstore.load`: tensors to fill, and places for values.
    """

    def __init__(
        self, entries: Sequence[Entry], owners: Mapping[str, Owner], device: torch.device
    ) -> None:
        self.owners = owners
        self._entries = [one for one in entries if one.owner is None or one.owner in owners]
        self._unused = [one.fqn for one in entries if one.owner not in (None, *owners)]
        self._skipped: set[str] = set()
        self._targets = {
            one.fqn: target
            for one in self._entries
            if (target := self._target(one, device)) is not None
        }
        self.wanted: dict[str, Any] = {one.fqn: _VALUE for one in self._entries if not one.tensor}
        for fqn, target in self._targets.items():
            if target.loaded is not None:
                self.wanted[fqn] = target.loaded

    def _target(self, entry: Entry, device: torch.device) -> Target | None:
        if entry.tensor is None:
            return None
        owner = self.owners.get(entry.owner or "")
        tensor = None if owner is None else owner.tensor
        return make_target(entry.tensor, tensor, entry.name, device)

    def settle(self, loaded: Collection[str]) -> None:
        """Tell which keys were loaded: a planner may leave some out, whose memory has no values.

        A planner that is not ours plans nothing for a key of which this rank holds no element.
        """
        self._skipped = {
            fqn
            for fqn in self.wanted.keys() - set(loaded)
            if fqn not in self._targets or has_elements(self._targets[fqn].loaded)
        }

    def nested(self, optimizer_key: str) -> dict[str, Any]:
        """Return the state dict as it was saved, of what was loaded.

        Numbers of parameters, which DCP stores as text, are numbers again; and where there
        are parameter groups there is a ``state``, which DCP drops if it is empty.
        """
        state: dict[str, Any] = {}
        for entry in self._entries:
            if entry.fqn not in self._skipped:
                set_element(state, entry.path, self._value(entry))
        optimizer = _element(state, optimizer_key)
        if optimizer is not None and "param_groups" in optimizer:
            saved = optimizer.setdefault("state", {})
            for key, owner in self.owners.items():
                if owner.number is not None and key in saved:
                    saved[owner.number] = saved.pop(key)
        return state

    def _value(self, entry: Entry) -> Any:
        target = self._targets.get(entry.fqn)
        if target is not None and target.returned is not target.loaded:
            return target.returned
        return self.wanted[entry.fqn]

    def result(
        self, result: LoadResult, optimizer_key: str, without_state: Sequence[str]
    ) -> LoadResult:
        """Return what the load did, told of this optimizer alone."""
        below = f"{optimizer_key}.state." if optimizer_key else "state."
        return replace(
            result,
            missing=(*result.missing, *(below + name for name in without_state)),
            unexpected=tuple(sorted({*self._unused, *self._skipped})),
        )


def _element(state: dict[str, Any], key: str) -> Any:
    """Return the dictionary at a dotted key; None where the state dict was saved flat."""
    found: Any = state
    while key and isinstance(found, dict):
        step = next((one for one in found if key == one or key.startswith(f"{one}.")), None)
        if step is None:
            return None
        found, key = found[step], key[len(step) + 1 :]
    return found if isinstance(found, dict) else None
