"""What state the optimizers of a job keep for each parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcpstore.optimizer.entries import Path
from dcpstore.optimizer.live_optimizer import LiveGroup, LiveParam
from dcpstore.optimizer.live_probe import Probe, probe_optimizer

__all__ = ["ExpectedState", "at_path"]


@dataclass(frozen=True, slots=True)
class ExpectedState:
    """State that the optimizers would make.

    Attributes:
        states: By parameter.
        unasked: Parameters of optimizers that could not be asked.
    """

    states: Mapping[str, Mapping[Any, Any]]
    unasked: Sequence[str]

    @staticmethod
    def of(groups: Sequence[LiveGroup], *, is_flat: bool) -> ExpectedState:
        """Ask the optimizers of some groups, with the hyperparameters that the groups have.

        Args:
            groups: All of each optimizer.
            is_flat: Whether parameters are pieces of FSDP1's flat ones.
        """
        probes: dict[int, Probe] = {}
        for one in groups:
            own = [group.options for group in groups if group.optimizer is one.optimizer]
            if id(one.optimizer) not in probes:
                probes[id(one.optimizer)] = probe_optimizer(one.optimizer, own)
        states: dict[str, Mapping[Any, Any]] = {}
        unasked: list[str] = []
        for group in groups:
            probe = probes[id(group.optimizer)]
            held = group.optimizer.param_groups[group.number]["params"]
            made = [probe.states.get(id(param), {}) for param in held]
            if probe.error is not None:
                unasked += group.fqns
            elif is_flat:  # parameters are pieces of flat ones; all of a group are alike
                joint = {name: value for one in made for name, value in one.items()}
                states.update(dict.fromkeys(group.fqns, joint))
            else:
                states.update(zip(group.fqns, made, strict=True))
        return ExpectedState(states, unasked)

    def of_param(self, param: LiveParam) -> Mapping[Any, Any]:
        """Return the state that a parameter has, or else that it would get."""
        return param.state or self.states.get(param.fqn, {})

    def has_state(self, fqn: str) -> bool:
        """Tell whether a parameter would get state; of one that cannot be told it is assumed."""
        return bool(self.states.get(fqn)) or fqn in self.unasked


def at_path(state: Any, path: Path) -> Any:
    """Return what lies at a path of nested state; None if nothing does."""
    for step in path:
        if isinstance(state, Mapping):
            state = next((value for key, value in state.items() if str(key) == str(step)), None)
        elif isinstance(state, Sequence) and isinstance(step, int) and step < len(state):
            state = state[step]
        else:
            return None
    return state
