"""`optimizer_state` and `restore_optimizer`: an optimizer into a checkpoint and out of it.

A restore takes these steps:

1. (all ranks) `Restoring`: what the optimizers hold, and what state they would make
2. (all ranks) `make_state`: what is saved, fitted to it; memory for what this rank holds
3. the load fills it
4. (all ranks) `finish`: hyperparameters and what got no state are checked, then the optimizers
   are given everything at once

Groups are matched by the parameters in them, so a job may have them in another order, or cut
otherwise, as long as no group of it joins parameters that were saved with different values.
"""

from __future__ import annotations

import inspect
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import StorageReader
from torch.optim import Optimizer
from typing_extensions import Unpack

from dcpstore.errors import ConfigError, IncompatibleError
from dcpstore.loading import LoadOptions, load_from
from dcpstore.optimizer.layout import (
    Entry,
    Path,
    Target,
    Targets,
    find_entries,
    is_tensor,
    listed,
    make_target,
    other_shapes,
    state_key,
)
from dcpstore.optimizer.live import (
    NOT_OPTIONS,
    ExpectedState,
    LiveGroup,
    LiveOptimizer,
    LiveParam,
    at_path,
)
from dcpstore.plan.rules import KeyRules, Rename, Strictness, is_strict
from dcpstore.report import LoadResult


def stored_names(names: Mapping[str, Sequence[str]], rename: Rename | None) -> dict[str, list[str]]:
    """Return the names under which each parameter may be saved, the likeliest first.

    Args:
        names: Of each parameter, its aliases.
        rename: From the model's names to the checkpoint's.

    Raises:
        ConfigError: If two parameters would have one name.
    """
    rules = KeyRules(rename=rename)
    found = {
        fqn: [rules.stored_name(name) for name in (fqn, *aliases)] for fqn, aliases in names.items()
    }
    owners: dict[str, str] = {}
    for fqn, stored in found.items():
        for name in stored:
            if owners.setdefault(name, fqn) != fqn:
                raise ConfigError(f"rename maps both {owners[name]!r} and {fqn!r} to {name!r}")
    return found


def nest(values: Mapping[Path, Any], template: Any = None) -> dict[Any, Any]:
    """Put values at their paths: numbers are positions of a list, the rest keys of a dict.

    Args:
        values: By path.
        template: What the optimizer itself makes, if known: its keys may be other than text.
    """
    below: dict[Any, dict[Path, Any]] = defaultdict(dict)
    nested: dict[Any, Any] = {}
    keys = {str(key): key for key in template} if isinstance(template, Mapping) else {}
    for path, value in values.items():
        if len(path) == 1:
            nested[keys.get(str(path[0]), path[0])] = value
        else:
            below[path[0]][path[1:]] = value
    for step, inner in below.items():
        key = keys.get(str(step), step)
        made = nest(inner, template.get(key) if isinstance(template, Mapping) else None)
        is_list = all(isinstance(path[0], int) for path in inner)
        nested[key] = [made[number] for number in sorted(made)] if is_list else made
    return nested


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
        saved: Entries of parameter groups.
        values: What was loaded, by key of the checkpoint.
    """

    def __init__(self, saved: Iterable[Entry], values: Mapping[str, Any]) -> None:
        self._by_name: dict[str, Mapping[str, Any]] = {}
        groups: list[Mapping[str, Any]] = []
        parts: dict[int | str, dict[Path, Any]] = defaultdict(dict)
        for entry in saved:
            if entry.group is None:
                groups += values[entry.fqn]
            else:
                parts[entry.group][entry.inner] = values[entry.fqn]
        for number, paths in parts.items():
            if isinstance(number, str):
                self._by_name[number] = nest(paths)
            else:
                groups.append(nest(paths))
        for group in groups:
            options = {name: value for name, value in group.items() if name not in NOT_OPTIONS}
            for name in group.get("params", ()):
                self._by_name[str(name)] = options

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


class Restoring:
    """What is known of a restore on its way. Made, and called, by all ranks.

    Args:
        live: The optimizers.
        key: Of the saved optimizer.
        rename: From the model's parameter names to the checkpoint's.
        strict: Whether a parameter that the checkpoint does not know is an error.
    """

    def __init__(
        self, live: LiveOptimizer, key: str, rename: Rename | None, strict: Strictness
    ) -> None:
        self._live = live
        self._key = key
        self._strict = strict
        held = live.state_dict()
        self._groups = live.groups(held)
        self._params = live.params(self._groups, held["state"])
        self._names = stored_names(
            {fqn: param.aliases for fqn, param in self._params.items()}, rename
        )
        lacks_state = any(one.is_trainable and not one.state for one in self._params.values())
        self._expected = self._probe(self._groups) if lacks_state else ExpectedState({}, ())
        self._fitted: dict[str, list[Entry]] = {}
        self._stored: dict[str, str] = {}
        self._targets = Targets()
        self._saved: dict[str, list[Entry]] = defaultdict(list)  # state by the parameter's name
        self._saved_options: list[Entry] = []
        self._entries: list[Entry] = []

    def _probe(self, groups: Sequence[LiveGroup]) -> ExpectedState:
        return ExpectedState.of(groups, is_flat=self._live.is_fsdp1)

    # --- before the data is read ---

    def make_state(self, metadata: Metadata) -> dict[str, Any]:
        """Return what to load, by keys of the checkpoint; memory is allocated here.

        Raises:
            NotFoundError: If there is no such optimizer; names those there are.
            IncompatibleError: If it is of another kind, or its state of other shapes.
        """
        names = {name for stored in self._names.values() for name in stored}
        self._entries = find_entries(metadata, self._key, names)
        for entry in self._entries:
            if entry.owner is not None:
                self._saved[entry.owner].append(entry)
            elif entry.is_in_group:
                self._saved_options.append(entry)
        options = {entry.name for entry in self._saved_options if entry.name}
        for optimizer in self._live.optimizers:
            check_options(optimizer, options)
        is_numbered = all(name.isdecimal() for name in self._saved)  # a plain state_dict() does
        if self._saved and is_numbered and not names & self._saved.keys():
            self._names = {fqn: [str(number)] for number, fqn in enumerate(self._params)}
        problems: list[str] = []
        for fqn, param in self._params.items():
            if self._live.is_fsdp1 and not param.is_trainable:
                continue  # torch drops it on the way to FSDP1's flat parameters; it is reported
            stored = next((one for one in self._names[fqn] if one in self._saved), None)
            if stored is not None:
                self._stored[fqn] = stored
                self._check_state_names(fqn, stored)
                self._fitted[fqn] = self._fit(param, self._saved[stored], problems)
        if problems:
            raise other_shapes(problems)
        for entry in self._saved_options:
            tensor = entry.tensor
            target = None if tensor is None else make_target(tensor, None, entry.name)
            self._targets.want(entry, target)
        return self._targets.wanted

    def _check_state_names(self, fqn: str, stored: str) -> None:
        own = self._expected.of_param(self._params[fqn])
        has = {str(name) for name in own} - {"step"}
        saved = {entry.name for entry in self._saved[stored]} - {"step"}
        if has and saved and not has & saved:
            kinds = listed(self._kinds())
            raise IncompatibleError(
                f"the checkpoint's optimizer is of another kind than {kinds}: for {fqn!r} it has"
                f" {listed(sorted(saved))}, and this one keeps {listed(sorted(has))}; nothing was"
                " loaded. Make the optimizer that was saved, or begin with a new one"
            )

    def _fit(self, param: LiveParam, entries: Iterable[Entry], problems: list[str]) -> list[Entry]:
        """Want the entries of a parameter's state that have its shapes; return these."""
        fitted = []
        for entry in entries:
            target = None
            if entry.tensor is not None:
                like = at_path(self._expected.of_param(param), entry.inner)
                sizes = self._sizes(param, like)
                saved = tuple(entry.tensor.size)
                is_number = not saved and self._live.is_fsdp1
                if sizes is not None and sizes != saved and not is_number:
                    problems.append(
                        f"{entry.fqn!r} is saved with shape {saved}, here it has {sizes}"
                    )
                    continue
                if is_tensor(like) and not self._live.is_fsdp1 and tuple(like.size()) == saved:
                    value = like if param.state else _real(like, param.value)
                    target = Target(value, value)
                else:
                    target = make_target(entry.tensor, param.value, entry.name)
            self._targets.want(entry, target)
            fitted.append(entry)
        return fitted

    def _sizes(self, param: LiveParam, like: Any) -> tuple[int, ...] | None:
        """Return the shape that a state must have; None if any will do."""
        if self._live.is_fsdp1:  # keeps nothing but numbers and the parameter's shape
            return tuple(param.value.size())
        return tuple(like.size()) if is_tensor(like) else None

    # --- when it is read ---

    def finish(self, result: LoadResult) -> LoadResult:
        """Give the optimizers what was loaded; return what the load did, of these alone.

        Raises:
            IncompatibleError: If a parameter is unknown to the checkpoint, or groups or state
                do not fit.
        """
        options = SavedOptions(self._saved_options, self._targets.wanted)
        unknown = self._unknown(options)
        groups = [with_saved_options(group, self._stored, options) for group in self._groups]
        state = {fqn: self._state(fqn) for fqn in self._fitted}
        for fqn in unknown:
            if self._params[fqn].state:
                state[fqn] = dict(self._params[fqn].state)
        missing = self._missing(groups, state, unknown)
        self._live.load(state, groups)
        return replace(result, missing=tuple(missing), unexpected=tuple(sorted(self._unconsumed())))

    def _unknown(self, options: SavedOptions) -> list[str]:
        """Return parameters of which the checkpoint knows nothing, and learn the others' names."""
        unknown = []
        for fqn, names in self._names.items():
            stored = next((name for name in names if name in options), None)
            if stored is not None:
                self._stored.setdefault(fqn, stored)
            elif fqn not in self._stored:
                unknown.append(fqn)
        refused = [fqn for fqn in unknown if is_strict(self._strict, fqn)]
        if refused:
            unused = sorted(self._saved.keys() - set(self._stored.values()))
            also = f"; it has state of {listed(unused)}, which the model lacks" if unused else ""
            raise IncompatibleError(
                f"the saved optimizer knows nothing of {listed(refused)}{also}. Pass rename= if"
                " parameters have other names now, or strict=False to leave these as they are"
            )
        return unknown

    def _state(self, fqn: str) -> dict[Any, Any]:
        values = {entry.inner: self._targets.value(entry) for entry in self._fitted[fqn]}
        return nest(values, self._expected.of_param(self._params[fqn]))

    def _missing(
        self,
        groups: Sequence[LiveGroup],
        state: Mapping[str, Mapping[Any, Any]],
        unknown: Sequence[str],
    ) -> list[str]:
        """Return what the optimizers keep with these hyperparameters and was not saved."""
        trainable = [fqn for fqn, param in self._params.items() if param.is_trainable]
        if not any(fqn in unknown or self._lacks(fqn, state) for fqn in trainable):
            return list(self._state_keys(unknown))
        expected = self._probe(groups)
        for fqn in trainable:
            lacking = _names(expected.states.get(fqn)) - _names(state.get(fqn))
            if lacking and fqn in self._fitted:
                raise IncompatibleError(
                    f"the checkpoint has no {listed(sorted(lacking))} of {self._stored[fqn]!r},"
                    f" which {listed(self._kinds())} needs beside what was saved"
                )
        without = {fqn for fqn in trainable if fqn not in state and expected.has_state(fqn)}
        return list(self._state_keys(fqn for fqn in self._params if fqn in {*unknown, *without}))

    def _lacks(self, fqn: str, state: Mapping[str, Mapping[Any, Any]]) -> bool:
        own = _names(self._expected.of_param(self._params[fqn]))
        return fqn not in state or bool(own - _names(state[fqn]))

    def _state_keys(self, fqns: Iterable[str]) -> Iterable[str]:
        for fqn in fqns:
            yield state_key(self._key, self._stored.get(fqn, self._names[fqn][0]))

    def _kinds(self) -> Sequence[str]:
        return sorted({type(one).__name__ for one in self._live.optimizers})

    def _unconsumed(self) -> set[str]:
        used = {entry.fqn for entries in self._fitted.values() for entry in entries}
        return {entry.fqn for entry in self._entries if not entry.is_in_group} - used


def _names(state: Mapping[Any, Any] | None) -> set[str]:
    return {str(name) for name in state or ()}


def _real(like: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Allocate what a tensor of the probe stands for, on the parameter's device."""
    device = param.device if like.device.type == "meta" else like.device
    return torch.empty_like(like, device=device, requires_grad=False)


def optimizer_state(model: nn.Module, optimizer: Optimizer | Iterable[Optimizer]) -> dict[str, Any]:
    """Return an optimizer's state by parameter names, to be saved. All ranks; collective.

    It has the form of torch's ``get_optimizer_state_dict``, so code that reads that reads this.
    Unlike torch's it changes nothing: an optimizer that has not stepped yet is saved without
    state, where torch takes a step to make it some.

    ::

        dcpstore.save(
            {
                "model": get_model_state_dict(model),
                "optim": dcpstore.optimizer_state(model, optimizer),
            },
            "s3://bucket/run/step-100",
        )

    Args:
        model: As it is trained: FSDP1, FSDP2, tensor parallel, DDP, any mix, or none of them.
        optimizer: Of the model's parameters, or several, whose parameters are disjoint.

    Returns:
        ``{"state": {name: {...}}, "param_groups": [...]}``. Its tensors are the optimizer's
        own where the layout allows: save them before the next step.

    Raises:
        ConfigError: If the optimizer has parameters that are not the model's, or keeps state
            that belongs to none.
        IncompatibleError: If state would not come back: partial sums, or with FSDP1 a tensor
            that has not its parameter's shape.
    """
    live = LiveOptimizer(model, optimizer)
    live.check_can_be_saved()
    return live.state_dict()


def restore_optimizer(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    source: str | os.PathLike[str] | StorageReader,
    *,
    key: str = "optim",
    rename: Rename | None = None,
    strict: Strictness = True,
    **options: Unpack[LoadOptions],
) -> LoadResult:
    """Restore an optimizer from a checkpoint, on any number of ranks. All ranks; collective.

    State and hyperparameters become what they were when they were saved, sharded the way the
    model is now. The optimizer may be fresh: no step is taken to make it state, and no
    parameter, gradient, random number or counter changes. Each tensor is allocated once, as
    what this rank holds of it; an optimizer that has state already is filled in place.

    What was saved for no parameter of these optimizers is in ``unexpected`` of the result, and
    each parameter that got no state although the optimizer keeps some is in ``missing`` (as
    ``optim.state.<name>``); it may never have had a gradient. FSDP1 takes no state for frozen
    parameters, so theirs is in ``unexpected``; elsewhere it is restored.

    Restore after the model was sharded, and after learning rate schedulers were made: a new
    scheduler sets the learning rate.

    Args:
        model: As it is trained.
        optimizer: One, or several that were saved together. Some of those will do, too.
        source: Folder of the checkpoint, or any DCP storage reader.
        key: Where the optimizer is in the saved state dict; dotted if nested, empty if it is
            all that was saved.
        rename: From a parameter's name in the model to that in the checkpoint: a map of names
            and of prefixes that end with ``.``, or a function.
        strict: Whether a parameter that the saved optimizer did not have is an error, for all
            or per prefix of names. If not, its state stays as it is.
        options: ``planner``, ``process_group``, ``storage_options``, ``config``, ``share``,
            ``coordinator_rank``, ``deadline_s`` and ``progress`` of `dcpstore.load`. A planner is
            given the flat keys of the checkpoint.

    Returns:
        What the load did: ``loaded``, ``missing`` and ``unexpected`` are of this optimizer.

    Raises:
        RankFailures: On every rank of several, if any failed.
        NotFoundError: If the checkpoint has no such optimizer; names those it has.
        IncompatibleError: If the optimizer is of another kind, the model of other shapes, a
            parameter unknown, or groups join what was saved apart. A fresh optimizer is
            unchanged then; one with state may hold some of the checkpoint's.
        CheckpointError: As `dcpstore.load` does.
    """
    restoring = Restoring(LiveOptimizer(model, optimizer), key, rename, strict)
    result = load_from(source, restoring.make_state, **options)
    return restoring.finish(result)
