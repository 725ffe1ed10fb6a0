"""The optimizers of a job as they are now: parameters by name, groups, state, and what is to come.

Torch's ``get_optimizer_state_dict`` and ``set_optimizer_state_dict`` know how to name the
parameters of every layout. But they take a training step with an optimizer that has no state
yet. They are given a `QuietOptimizer` in its place, which says that it has.

Most optimizers make their state in their first step. To learn its names, shapes, dtypes and
layouts without a training step, a shadow steps: the optimizer's class and settings, over
parameters on the meta device (DTensors keep their mesh and placements). The real parameters,
gradients, state, hooks and counters are not touched.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dcpstore.errors import ConfigError, IncompatibleError
from dcpstore.optimizer.layout import Path, listed
from dcpstore.torch_private import canonical_names

# Ways to compute a step that need a device; the plain way makes the same state. Where the
# state must lie (a step counter on the device, say) is settled by `Optimizer.load_state_dict`.
_PLAIN = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}


def probe_optimizer(
    optimizer: Optimizer, options: Sequence[Mapping[str, Any]]
) -> dict[int, Mapping[Any, Any]] | None:
    """Ask an optimizer what state it makes for each trainable parameter. Changes nothing of it.

    Args:
        optimizer: Any.
        options: Hyperparameters per group to ask with.

    Returns:
        State by the ``id`` of the real parameter, with tensors on the meta device; None if
        the optimizer's step needs a closure or looks at values on the host.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    try:
        with torch.random.fork_rng(devices=[]):
            shadows = {id(param): _shadow_of(param) for param in params}
            shadow = _shadow_optimizer(optimizer, shadows, options)
            with torch.no_grad():
                _plain_step(optimizer)(shadow)
    except Exception:  # noqa: BLE001 - the optimizer's own; what it would make stays unknown
        return None
    made = {number: shadow.state.get(one) for number, one in shadows.items()}
    return {number: state for number, state in made.items() if state}


def _shadow_of(param: torch.Tensor) -> torch.nn.Parameter:
    empty = torch.empty_like(param.detach(), device="meta")
    shadow = torch.nn.Parameter(empty, requires_grad=param.requires_grad)
    if param.requires_grad:
        shadow.grad = torch.zeros_like(empty)
    return shadow


def _shadow_optimizer(
    optimizer: Optimizer,
    shadows: Mapping[int, torch.nn.Parameter],
    options: Sequence[Mapping[str, Any]],
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
        group.update(options[number])
        group.update({name: value for name, value in _PLAIN.items() if name in group})
    return shadow


def _plain_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """Return the step without what torch wraps round it: global hooks and the profiler."""
    step: Callable[[Optimizer], Any] = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


NOT_OPTIONS = ("params", "param_names")
"""Entries of a parameter group that say which parameters it has."""


class _Present(defaultdict[Any, Any]):
    """State that counts as there although it may be empty."""

    def __bool__(self) -> bool:
        return True


class QuietOptimizer(Optimizer):
    """Stands for an optimizer in torch's functions, which then take no step with it.

    Args:
        optimizer: Whose groups and state these are.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # Not the base's: this holds nothing of its own.
        self._real = optimizer
        self.defaults = optimizer.defaults
        self.param_groups = optimizer.param_groups
        self.state = _Present(dict, optimizer.state)

    def state_dict(self) -> dict[str, Any]:
        """Return the real optimizer's."""
        return self._real.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the real optimizer its state."""
        self._real.load_state_dict(state_dict)


@dataclass(frozen=True, slots=True)
class LiveParam:
    """A parameter of an optimizer.

    Attributes:
        fqn: Its name in the model.
        aliases: Its other names, where the model ties parameters.
        value: Tells its whole shape and how it is sharded: the parameter itself, or what
            FSDP1 makes of it in a sharded state dict.
        is_trainable: Whether it requires a gradient.
        state: The state that the optimizer holds for it now; tensors are the optimizer's own,
            but for FSDP1.
    """

    fqn: str
    aliases: tuple[str, ...]
    value: Any
    is_trainable: bool
    state: Mapping[Any, Any]


@dataclass(frozen=True, slots=True)
class LiveGroup:
    """A parameter group.

    Attributes:
        optimizer: Which optimizer's.
        number: Position in that optimizer.
        fqns: Names of its parameters, in their order.
        options: Its hyperparameters.
    """

    optimizer: Optimizer
    number: int
    fqns: tuple[str, ...]
    options: Mapping[str, Any]


class LiveOptimizer:
    """One or several optimizers over one model, by the names of their parameters.

    Where the model is FSDP1, making one is a collective.

    Raises:
        ConfigError: If an optimizer has parameters that are not the model's, or state that
            belongs to no parameter.
    """

    def __init__(self, model: nn.Module, optimizers: Optimizer | Iterable[Optimizer]) -> None:
        self.model = model
        self.optimizers: tuple[Optimizer, ...] = (
            (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)
        )
        if not self.optimizers:
            raise ConfigError("no optimizer was given")
        self.is_fsdp1 = bool(FullyShardedDataParallel.fsdp_modules(model))
        known = {id(param) for param in model.parameters()}
        for optimizer in self.optimizers:
            _check_is_of_model(optimizer, known)
        self._quiet = [QuietOptimizer(optimizer) for optimizer in self.optimizers]

    def check_can_be_saved(self) -> None:
        """Refuse state that would not come back as it is.

        Raises:
            IncompatibleError: If a tensor holds partial sums, or FSDP1 cannot shard it.
        """
        for optimizer in self.optimizers:
            for param, state in optimizer.state.items():
                tensors = {n: one for n, one in state.items() if isinstance(one, torch.Tensor)}
                for name, value in tensors.items():
                    reason = _describe_unsavable(param, value, is_fsdp1=self.is_fsdp1)
                    if reason is not None:
                        kind = type(optimizer).__name__
                        raise IncompatibleError(f"the state {name!r} of the {kind} {reason}")

    def state_dict(self) -> dict[str, Any]:
        """Return the joint state by parameter names; tensors are not copied.

        Where the model is FSDP1, collective: each tensor is gathered and sharded anew.
        """
        joint: dict[str, Any] = {"state": {}, "param_groups": []}
        for quiet in self._quiet:
            one = self._state_dict_of(quiet)
            joint["state"].update({name: dict(own) for name, own in one["state"].items() if own})
            joint["param_groups"] += one["param_groups"]
        return joint

    def _state_dict_of(self, quiet: QuietOptimizer) -> Any:
        try:
            return get_optimizer_state_dict(self.model, (quiet,))
        except RuntimeError as error:
            if not self.is_fsdp1 or "is not in the optimizer state" not in str(error):
                raise
            raise IncompatibleError(
                "FSDP1 gathers the state of a unit only when all of its trainable parameters have"
                " some: one that just thawed needs a step first, one of another optimizer needs"
                f" a unit of its own; or use fully_shard (FSDP2). Torch says: {error}"
            ) from error

    def groups(self, state_dict: Mapping[str, Any]) -> list[LiveGroup]:
        """Return the groups of all optimizers, in the order of a joint state dict."""
        owners = [
            (one, number) for one in self.optimizers for number in range(len(one.param_groups))
        ]
        return [
            LiveGroup(
                optimizer,
                number,
                tuple(group["params"]),
                {name: value for name, value in group.items() if name not in NOT_OPTIONS},
            )
            for (optimizer, number), group in zip(owners, state_dict["param_groups"], strict=True)
        ]

    def params(
        self, groups: Sequence[LiveGroup], state: Mapping[str, Mapping[Any, Any]]
    ) -> dict[str, LiveParam]:
        """Return the parameters of all groups by name."""
        if self.is_fsdp1:
            return self._sharded_params(groups, state)
        aliases = self._aliases()
        found = {}
        for group in groups:
            held = group.optimizer.param_groups[group.number]["params"]
            for fqn, param in zip(group.fqns, held, strict=True):
                others = tuple(sorted(aliases[id(param)] - {fqn}))
                own = state.get(fqn, {})
                found[fqn] = LiveParam(fqn, others, param, param.requires_grad, own)
        return found

    def _sharded_params(
        self, groups: Sequence[LiveGroup], state: Mapping[str, Mapping[Any, Any]]
    ) -> dict[str, LiveParam]:
        values = get_model_state_dict(self.model)
        frozen = {
            name
            for raw, param in self.model.named_parameters()
            if not param.requires_grad
            for name in canonical_names(self.model, raw)
        }
        return {
            fqn: LiveParam(fqn, (), values[fqn], fqn not in frozen, state.get(fqn, {}))
            for group in groups
            for fqn in group.fqns
        }

    def _aliases(self) -> dict[int, set[str]]:
        names: dict[int, set[str]] = defaultdict(set)
        for raw, param in self.model.named_parameters(remove_duplicate=False):
            names[id(param)] |= canonical_names(self.model, raw)
        return names

    def load(self, state: Mapping[str, Mapping[Any, Any]], groups: Sequence[LiveGroup]) -> None:
        """Replace state and hyperparameters of every optimizer.

        Args:
            state: By parameter name. A parameter that is not in it has none afterwards.
            groups: As `groups` returned them, with the options to set.
        """
        for optimizer, quiet in zip(self.optimizers, self._quiet, strict=True):
            own = [group for group in groups if group.optimizer is optimizer]
            fqns = {fqn for group in own for fqn in group.fqns}
            state_dict: dict[str, Any] = {
                "state": {fqn: dict(one) for fqn, one in state.items() if fqn in fqns},
                "param_groups": [{**group.options, "params": list(group.fqns)} for group in own],
            }
            if self.is_fsdp1:
                options = StateDictOptions(strict=False)  # some never had a gradient
                set_optimizer_state_dict(self.model, (quiet,), state_dict, options=options)
            else:
                # What torch's function comes down to here, but for the state of frozen
                # parameters and groups without any, which it drops or refuses.
                optimizer.load_state_dict(state_dict)
                _keep_dtypes(optimizer, own, state)


def _keep_dtypes(
    optimizer: Optimizer, groups: Sequence[LiveGroup], state: Mapping[str, Mapping[Any, Any]]
) -> None:
    """Put back tensors that ``load_state_dict`` cast to the dtype of their parameter.

    It does so with all state but ``step``; an optimizer that keeps float32 state for bfloat16
    parameters would go on with less than was saved.
    """
    for group in groups:
        held = optimizer.param_groups[group.number]["params"]
        for fqn, param in zip(group.fqns, held, strict=True):
            for name, value in state.get(fqn, {}).items():
                now = optimizer.state[param].get(name)
                if name == "step" or not isinstance(value, torch.Tensor):
                    continue
                if isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                    optimizer.state[param][name] = value


def _check_is_of_model(optimizer: Optimizer, known: set[int]) -> None:
    kind = type(optimizer).__name__
    params = [param for group in optimizer.param_groups for param in group["params"]]
    strangers = [tuple(param.shape) for param in params if id(param) not in known]
    if strangers:
        raise ConfigError(
            f"{len(strangers)} parameter(s) of the {kind} are not the model's, with shapes"
            f" {listed(strangers)}; make the optimizer of the parameters of the model as it is"
            " now, after it was sharded or wrapped"
        )
    keyless = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
    if keyless:
        raise ConfigError(
            f"the {kind} keeps state under {listed(keyless)}, which is no parameter of the model,"
            " so it has no name to be saved under; save it beside the optimizer"
        )


def _describe_unsavable(param: torch.Tensor, value: Any, *, is_fsdp1: bool) -> str | None:
    """Say why a tensor of a parameter's state would not come back as it is."""
    if isinstance(value, DTensor) and any(one.is_partial() for one in value.placements):
        return (
            f"is a DTensor of partial sums {value.placements}, different on every rank; let the"
            " optimizer redistribute it (to Replicate or Shard) before it keeps it"
        )
    if is_fsdp1 and value.dim() > 0 and value.numel() != param.numel():
        return (
            f"has shape {tuple(value.shape)}, and FSDP1 can shard only numbers and what has its"
            f" parameter's shape, here {tuple(param.shape)}; use fully_shard (FSDP2)"
        )
    return None


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
        probes: dict[int, Mapping[int, Mapping[Any, Any]] | None] = {}
        for one in groups:
            own = [group.options for group in groups if group.optimizer is one.optimizer]
            if id(one.optimizer) not in probes:
                probes[id(one.optimizer)] = probe_optimizer(one.optimizer, own)
        states: dict[str, Mapping[Any, Any]] = {}
        unasked: list[str] = []
        for group in groups:
            probe = probes[id(group.optimizer)]
            held = group.optimizer.param_groups[group.number]["params"]
            made = [] if probe is None else [probe.get(id(param), {}) for param in held]
            if probe is None:
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
        """Tell whether a parameter would get state; assumed where its optimizer cannot say."""
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
