"""One restore of the optimizers of a job, from what is saved to what is there.

1. (all ranks) `Restoring`: what the optimizers hold, and what state they would make
2. (all ranks) `make_state`: what is saved, fitted to it; memory for what this rank holds
3. the load fills it
4. (all ranks) `finish`: hyperparameters and what got no state are checked, then the optimizers
   are given everything at once
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import Metadata

from dcpstore.errors import IncompatibleError
from dcpstore.optimizer.entries import Entry, Path, find_entries
from dcpstore.optimizer.expected_state import ExpectedState, at_path
from dcpstore.optimizer.layout import make_target
from dcpstore.optimizer.live_optimizer import LiveGroup, LiveOptimizer, LiveParam, listed
from dcpstore.optimizer.restore_groups import SavedOptions, check_options, with_saved_options
from dcpstore.optimizer.saved_state import SavedState, nest, state_key, stored_names
from dcpstore.planners.rules import Rename, Strictness, is_strict
from dcpstore.report import LoadResult

__all__ = ["Restoring"]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a saved entry of a parameter goes.

    Attributes:
        entry: Saved.
        path: In the parameter's state.
        value: The tensor to fill; None for a value.
    """

    entry: Entry
    path: Path
    value: Any


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
        self._places: dict[str, list[_Place]] = {}
        self._stored: dict[str, str] = {}
        self._wanted: dict[str, Any] = {}
        self._saved: SavedState

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
        entries = find_entries(metadata, self._key, names)
        self._saved = SavedState.of(entries, self._key, names)
        options = {entry.name for entry in self._saved.hyperparameters() if entry.name}
        for optimizer in self._live.optimizers:
            check_options(optimizer, options)
        if self._saved.is_numbered and not names & self._saved.state.keys():
            self._names = {fqn: [str(number)] for number, fqn in enumerate(self._params)}
        problems: list[str] = []
        for fqn, param in self._params.items():
            if self._live.is_fsdp1 and not param.is_trainable:
                continue  # torch drops it on the way to FSDP1's flat parameters; it is reported
            stored = next((one for one in self._names[fqn] if one in self._saved.state), None)
            if stored is not None:
                self._stored[fqn] = stored
                self._check_state_names(fqn, stored)
                self._places[fqn] = self._place(param, self._saved.state[stored], problems)
        if problems:
            raise IncompatibleError(
                "the optimizer was saved for a model of other shapes; nothing was loaded:\n  "
                + "\n  ".join(problems[:10])
                + (f"\n  and {len(problems) - 10} more" if len(problems) > 10 else "")
            )
        for entry in self._saved.hyperparameters():
            tensor = entry.tensor
            self._wanted[entry.fqn] = None
            if tensor is not None:
                self._wanted[entry.fqn] = torch.empty(tensor.size, dtype=tensor.properties.dtype)
        return self._wanted

    def _check_state_names(self, fqn: str, stored: str) -> None:
        own = self._expected.of_param(self._params[fqn])
        has = {str(name) for name in own} - {"step"}
        saved = {str(path[0]) for path in self._saved.state[stored]} - {"step"}
        if has and saved and not has & saved:
            kinds = listed(dict.fromkeys(type(one).__name__ for one in self._live.optimizers))
            raise IncompatibleError(
                f"the checkpoint's optimizer is of another kind than {kinds}: for {fqn!r} it has"
                f" {listed(sorted(saved))}, and this one keeps {listed(sorted(has))}; nothing was"
                " loaded. Make the optimizer that was saved, or begin with a new one"
            )

    def _place(
        self, param: LiveParam, entries: Mapping[Path, Entry], problems: list[str]
    ) -> list[_Place]:
        places = []
        for path, entry in entries.items():
            value = None
            if entry.tensor is not None:
                like = at_path(self._expected.of_param(param), path)
                sizes = self._sizes(param, like)
                saved = tuple(entry.tensor.size)
                is_number = not saved and self._live.is_fsdp1
                if sizes is not None and sizes != saved and not is_number:
                    problems.append(
                        f"{entry.fqn!r} is saved with shape {saved}, here it has {sizes}"
                    )
                    continue
                value = self._allocate(param, entry, like)
            else:
                self._wanted[entry.fqn] = None
            places.append(_Place(entry, path, value))
        return places

    def _sizes(self, param: LiveParam, like: Any) -> tuple[int, ...] | None:
        """Return the shape that a state must have; None if any will do."""
        if self._live.is_fsdp1:  # keeps nothing but numbers and the parameter's shape
            return tuple(param.value.size())
        return tuple(like.size()) if _is_tensor(like) else None

    def _allocate(self, param: LiveParam, entry: Entry, like: Any) -> Any:
        assert entry.tensor is not None
        if _is_tensor(like) and not self._live.is_fsdp1 and tuple(like.size()) == entry.tensor.size:
            value = like if param.state else _real(like, param.value)
            self._wanted[entry.fqn] = value
            return value
        target = make_target(entry.tensor, param.value, entry.name)
        if target.loaded is not None:
            self._wanted[entry.fqn] = target.loaded
        return target.returned

    # --- when it is read ---

    def finish(self, result: LoadResult) -> LoadResult:
        """Give the optimizers what was loaded; return what the load did, of these alone.

        Raises:
            IncompatibleError: If a parameter is unknown to the checkpoint, or groups or state
                do not fit.
        """
        options = SavedOptions(self._saved, self._wanted)
        unknown = self._unknown(options)
        groups = [with_saved_options(group, self._stored, options) for group in self._groups]
        state = {fqn: self._state(fqn) for fqn in self._places}
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
            unused = sorted(self._saved.state.keys() - set(self._stored.values()))
            also = f"; it has state of {listed(unused)}, which the model lacks" if unused else ""
            raise IncompatibleError(
                f"the saved optimizer knows nothing of {listed(refused)}{also}. Pass rename= if"
                " parameters have other names now, or strict=False to leave these as they are"
            )
        return unknown

    def _state(self, fqn: str) -> dict[Any, Any]:
        values = {
            place.path: self._wanted[place.entry.fqn] if place.value is None else place.value
            for place in self._places[fqn]
        }
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
            if lacking and fqn in self._places:
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
        own = {entry.fqn for one in self._saved.state.values() for entry in one.values()}
        used = {place.entry.fqn for places in self._places.values() for place in places}
        return (own - used) | {entry.fqn for entry in self._saved.others}


def _names(state: Mapping[Any, Any] | None) -> set[str]:
    return {str(name) for name in state or ()}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor | ShardedTensor)


def _real(like: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Allocate what a tensor of the probe stands for, on the parameter's device."""
    device = param.device if like.device.type == "meta" else like.device
    return torch.empty_like(like, device=device, requires_grad=False)
