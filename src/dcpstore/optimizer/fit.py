"""Whether a saved optimizer fits the model that it is loaded for, by the metadata alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcpstore.errors import IncompatibleError
from dcpstore.optimizer.entries import Entry, paths_of
from dcpstore.optimizer.layout import sizes_of
from dcpstore.optimizer.names import Owner

__all__ = ["check_shapes"]

# What torch's optimizers keep in their parameter's shape.
_LIKE_PARAMETER = frozenset(
    {
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg"),
        *("grad_avg", "acc_delta", "sum", "prev", "step_size", "ax"),
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


def _lines(problems: Sequence[str]) -> str:
    shown = "\n".join(f"  {problem}" for problem in problems[:_MOST_NAMED])
    more = len(problems) - _MOST_NAMED
    return shown + (f"\n  and {more} more" if more > 0 else "")
