"""What state an optimizer makes: one step of a shadow of it, on parameters without memory.

Most optimizers make their state in their first step. To learn its names, shapes, dtypes and
layouts without a training step, a shadow steps: the optimizer's class and settings, over
parameters on the meta device (DTensors keep their mesh and placements). The real parameters,
gradients, state, hooks and counters are not touched.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["Probe", "probe_optimizer"]

# Ways to compute a step that need a device; the plain way makes the same state. Where the
# state must lie (a step counter on the device, say) is settled by `Optimizer.load_state_dict`.
_PLAIN = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}


@dataclass(frozen=True, slots=True)
class Probe:
    """What state an optimizer makes for each trainable parameter.

    Attributes:
        states: By the ``id`` of the real parameter; tensors on the meta device.
        error: Why the optimizer could not be asked; ``states`` is empty then.
    """

    states: Mapping[int, Mapping[Any, Any]]
    error: Exception | None = None


def probe_optimizer(
    optimizer: Optimizer, options: Sequence[Mapping[str, Any]] | None = None
) -> Probe:
    """Ask an optimizer what state it makes. Changes nothing of it.

    Args:
        optimizer: Any optimizer; one whose step needs a closure or looks at values on the host
            cannot be asked.
        options: Hyperparameters per group to ask with; None for the optimizer's own.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    try:
        with torch.random.fork_rng(devices=[]):
            shadows = {id(param): _shadow_of(param) for param in params}
            shadow = _shadow_optimizer(optimizer, shadows, options)
            with torch.no_grad():
                _plain_step(optimizer)(shadow)
    except Exception as error:  # noqa: BLE001 - an optimizer's own; kept, raised when it matters
        return Probe({}, error)
    made = {number: shadow.state.get(one) for number, one in shadows.items()}
    return Probe({number: state for number, state in made.items() if state})


def _shadow_of(param: torch.Tensor) -> torch.nn.Parameter:
    empty = torch.empty_like(param.detach(), device="meta")
    shadow = torch.nn.Parameter(empty, requires_grad=param.requires_grad)
    if param.requires_grad:
        shadow.grad = torch.zeros_like(empty)
    return shadow


def _shadow_optimizer(
    optimizer: Optimizer,
    shadows: Mapping[int, torch.nn.Parameter],
    options: Sequence[Mapping[str, Any]] | None,
) -> Optimizer:
    """Copy an optimizer; whatever it holds refers to the shadow parameters."""
    shadow: Optimizer = object.__new__(type(optimizer))
    memo: dict[int, Any] = dict(shadows)
    for name, value in vars(optimizer).items():
        if name.startswith("_optimizer_") and isinstance(value, OrderedDict):
            vars(shadow)[name] = OrderedDict()  # hooks are the user's, not the step's
        elif name == "state":
            vars(shadow)[name] = defaultdict(dict)
        elif not callable(value):  # a learning rate scheduler wraps `step` on the instance
            vars(shadow)[name] = copy.deepcopy(value, memo)
    for number, group in enumerate(shadow.param_groups):
        if options is not None:
            group.update(options[number])
        group.update({name: value for name, value in _PLAIN.items() if name in group})
    return shadow


def _plain_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """Return the step without what torch wraps round it: global hooks and the profiler."""
    step: Callable[[Optimizer], Any] = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
