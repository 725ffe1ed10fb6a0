"""Whether a saved optimizer fits the model, and the optimizer, that it is loaded for.

All of it is answered from the metadata, before any data is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from dcpstore.errors import IncompatibleError
from dcpstore.optimizer.entries import Entry, paths_of
from dcpstore.optimizer.layout import sizes_of
from dcpstore.optimizer.names import Owner

__all__ = ["check_kind", "check_shapes"]

# What torch's optimizers keep in their parameter's shape.
_LIKE_PARAMETER = frozenset(
    {
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg"),
        *("grad_avg", "acc_delta", "sum", "prev", "step_size", "ax"),
    }
)
# What torch's schedulers add to a parameter group, and no optimizer asks for.
_OF_SCHEDULERS = frozenset(
    {
        *("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"),
        *("params", "param_names"),
    }
)
_MOST_NAMED = 10


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
        raise IncompatibleError(
            f"the optimizer was saved for a model of other shapes; nothing was loaded:\n"
            f"{_lines(list(problems.values()))}"
            "\nBuild the model as it was when it was saved, or begin with a new optimizer"
        )


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


def check_kind(entries: Iterable[Entry], optimizer: Optimizer) -> None:
    """Compare the saved hyperparameters with those that an optimizer has.

    A newer torch may add some, and schedulers do. Only where each has what the other lacks
    are they taken for optimizers of two kinds.

    Raises:
        IncompatibleError: Naming what each lacks.
    """
    saved = {entry.name for entry in entries if entry.is_in_group and entry.name}
    has: Mapping[str, Any] = optimizer.defaults
    lacking = sorted(has.keys() - saved)
    extra = sorted(saved - has.keys() - _OF_SCHEDULERS)
    if saved and lacking and extra:
        raise IncompatibleError(
            f"the checkpoint's optimizer is of another kind than {type(optimizer).__name__}: it"
            f" has {', '.join(extra)} and lacks {', '.join(lacking)}; nothing was loaded."
            " Make the optimizer that was saved, or begin with a new one"
        )


def _lines(problems: Sequence[str]) -> str:
    shown = "\n".join(f"  {problem}" for problem in problems[:_MOST_NAMED])
    more = len(problems) - _MOST_NAMED
    return shown + (f"\n  and {more} more" if more > 0 else "")
