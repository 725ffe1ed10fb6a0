"""`load_sharded_optimizer_state_dict`: a saved optimizer in the layout that the model has now.

1. (coordinator) the metadata is read; every rank is sent it
2. (all ranks) it says what is saved of the optimizer. Shapes and kind are compared with what is
   there now, then memory is made for what this rank holds of the model, and for nothing else
3. (all ranks) `dcpstore.load` fills it: the planner plans, shared bytes are fetched once
4. (all ranks) the nested state dict is put together again, as it was saved
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader
from torch.optim import Optimizer
from typing_extensions import Unpack

from dcpstore.loading import LoadOptions, load_from
from dcpstore.optimizer.layout import (
    Entry,
    Owner,
    Parameters,
    Targets,
    find_entries,
    make_target,
    other_shapes,
    paths_of,
    sizes_of,
    state_key,
)
from dcpstore.optimizer.restoring import check_options
from dcpstore.report import LoadResult
from dcpstore.torch_private import set_element

# What torch's optimizers keep in their parameter's shape.
_LIKE_PARAMETER = frozenset(
    {
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg"),
        *("grad_avg", "acc_delta", "sum", "prev", "step_size", "ax"),
    }
)


def check_shapes(
    metadata: Metadata, entries: Collection[Entry], owners: Mapping[str, Owner]
) -> None:
    """Compare the saved shapes with the model's.

    A state may have another shape than its parameter. So what counts is the parameter's own
    shape if the checkpoint holds it too, and else the states that are known to follow it.

    Args:
        metadata: Of the checkpoint.
        entries: All of the optimizer.
        owners: The model's parameters by the owner that entries name.

    Raises:
        IncompatibleError: Naming each parameter that differs.
    """
    names = {name for owner in owners.values() if (name := owner.name) is not None}
    names.update(key for key, owner in owners.items() if owner.number is None)
    saved = _saved_parameters(metadata, {entry.fqn for entry in entries}, names)
    problems: dict[str, str] = {}
    for entry in entries:
        owner = owners.get(entry.owner or "")
        if owner is None or owner.name is None or entry.tensor is None:
            continue
        now, shape = sizes_of(owner.tensor), tuple(entry.tensor.size)
        shapes = saved[owner.name] or saved[str(entry.owner)]
        if shapes:
            if now not in shapes:
                problems[owner.name] = f"{owner.name!r} is saved with shape {shapes[0]}, now {now}"
        elif entry.name in _LIKE_PARAMETER and shape != now:
            problems[owner.name] = (
                f"{entry.fqn!r} is saved with shape {shape}, the parameter has {now}"
            )
    if problems:
        raise other_shapes(list(problems.values()))


def _saved_parameters(
    metadata: Metadata, of_optimizer: Collection[str], names: Collection[str]
) -> defaultdict[str, list[tuple[int, ...]]]:
    """Return the shapes of all saved tensors of these names outside the optimizer."""
    found: defaultdict[str, list[tuple[int, ...]]] = defaultdict(list)
    for fqn, path in paths_of(metadata).items():
        saved, name = metadata.state_dict_metadata[fqn], str(path[-1])
        is_parameter = name in names and fqn not in of_optimizer
        if is_parameter and isinstance(saved, TensorStorageMetadata):
            found[name].append(tuple(saved.size))
    return found


class _ShardedLoad:
    """One load of an optimizer's state. Made, and called, by all ranks.

    Args:
        parameters: Of the model. What is saved for others is not loaded.
        key: Of the saved optimizer.
        optimizer: To compare the saved one with.
    """

    def __init__(self, parameters: Parameters, key: str, optimizer: Optimizer | None) -> None:
        self._parameters = parameters
        self._key = key
        self._optimizer = optimizer
        self._owners: Mapping[str, Owner] = {}
        self._entries: list[Entry] = []
        self._unused: list[str] = []
        self._targets = Targets()

    def make_state(self, metadata: Metadata) -> dict[str, Any]:
        """Return what to load, by keys of the checkpoint; memory is allocated here."""
        entries = find_entries(metadata, self._key, self._parameters.tensors)
        if self._optimizer is not None:
            check_options(self._optimizer, {one.name for one in entries if one.is_in_group})
        self._owners = self._parameters.match(entries)
        check_shapes(metadata, entries, self._owners)
        device = self._parameters.common_device
        for entry in entries:
            owner = self._owners.get(entry.owner or "")
            if entry.owner is not None and owner is None:
                self._unused.append(entry.fqn)
                continue
            self._entries.append(entry)
            target = None
            if entry.tensor is not None:
                like = None if owner is None else owner.tensor
                target = make_target(entry.tensor, like, entry.name, device)
            self._targets.want(entry, target)
        return self._targets.wanted

    def finish(self, result: LoadResult) -> LoadedOptimizerState:
        """Return what was loaded, and what the load did for this optimizer alone."""
        skipped = self._targets.left_out(result.loaded)
        without_state = self._parameters.without_state(self._owners.values())
        own = replace(
            result,
            missing=(*result.missing, *(state_key(self._key, name) for name in without_state)),
            unexpected=tuple(sorted({*self._unused, *skipped})),
        )
        return LoadedOptimizerState(self._nested(skipped), own)

    def _nested(self, skipped: Collection[str]) -> dict[str, Any]:
        """Return the state dict as it was saved, of what was loaded.

        Numbers of parameters, which DCP stores as text, are numbers again; and where there
        are parameter groups there is a ``state``, which DCP drops if it is empty.
        """
        state: dict[str, Any] = {}
        for entry in self._entries:
            if entry.fqn not in skipped:
                set_element(state, entry.path, self._targets.value(entry))
        optimizer = _element(state, self._key)
        if optimizer is not None and "param_groups" in optimizer:
            saved = optimizer.setdefault("state", {})
            for key, owner in self._owners.items():
                if owner.number is not None and key in saved:
                    saved[owner.number] = saved.pop(key)
        return state


def _element(state: dict[str, Any], key: str) -> Any:
    """Return the dictionary at a dotted key; None where the state dict was saved flat."""
    found: Any = state
    while key and isinstance(found, dict):
        step = next((one for one in found if key == one or key.startswith(f"{one}.")), None)
        if step is None:
            return None
        found, key = found[step], key[len(step) + 1 :]
    return found if isinstance(found, dict) else None


class LoadedOptimizerState(dict[str, Any]):
    """A nested optimizer state dict as it was saved, and what its load did.

    Attributes:
        result: Of the load. ``unexpected`` has the saved entries of this optimizer that no
            parameter of the model has use for, or that the planner left out; ``missing`` has, as
            ``<optimizer_key>.state.<name>``, the tensors of the model that got no state.
    """

    def __init__(self, state: Mapping[str, Any], result: LoadResult) -> None:
        super().__init__(state)
        self.result = result


def load_sharded_optimizer_state_dict(
    model_state_dict: Mapping[str, Any],
    optimizer_key: str,
    source: str | os.PathLike[str] | StorageReader,
    *,
    optimizer: Optimizer | None = None,
    parameter_names: Sequence[str] | None = None,
    **options: Unpack[LoadOptions],
) -> LoadedOptimizerState:
    """Load a saved optimizer, each tensor sharded the way the model is now. Collective.

    The optimizer's own state may still be empty, and its former layout does not matter. The
    saved dtypes are kept. A rank allocates what it holds of each tensor; scalars lie on the
    host. With the result, go on as with torch's function of this name::

        state = dcpstore.load_sharded_optimizer_state_dict(model.state_dict(), "optimizer", url)
        # FSDP1
        optimizer.load_state_dict(
            FSDP.optim_state_dict_to_load(model, optimizer, state["optimizer"])
        )
        # FSDP2, tensor parallelism, DDP
        set_optimizer_state_dict(model, optimizer, state["optimizer"])

    Args:
        model_state_dict: The model's, flat, with the layout wanted; such as FSDP1's of type
            ``SHARDED_STATE_DICT``. Not changed.
        optimizer_key: Where the optimizer is in the saved state dict: ``"optimizer"``, or
            dotted if it is nested, ``"app.optim"``.
        source: Folder of the checkpoint, or any DCP storage reader.
        optimizer: Refuse a checkpoint of an optimizer of another kind than this one.
        parameter_names: Names of the optimizer's parameters in its order. For a checkpoint of
            a plain ``optimizer.state_dict()``, which numbers them, where the model is sharded.
        options: ``planner``, ``process_group``, ``storage_options``, ``config``, ``share``,
            ``coordinator_rank``, ``deadline_s`` and ``progress`` of `dcpstore.load`. A planner is
            given flattened keys, and values of the kinds that a model's state dict has. What it
            leaves out is not in the state returned.

    Returns:
        ``{optimizer_key: {"state": ..., "param_groups": ...}}``, nested as it was saved. Where
        FSDP1 nests ShardedTensors, the inner one. Its ``result`` is the `LoadResult`.

    Raises:
        RankFailures: On every rank of several, if any failed.
        NotFoundError: If the checkpoint has no such optimizer; names those it has.
        IncompatibleError: If the optimizer is of another kind, or the model of other shapes.
        CheckpointError: As `dcpstore.load` does.
    """
    parameters = Parameters(model_state_dict, parameter_names)
    loading = _ShardedLoad(parameters, optimizer_key, optimizer)
    result = load_from(source, loading.make_state, **options)
    return loading.finish(result)
