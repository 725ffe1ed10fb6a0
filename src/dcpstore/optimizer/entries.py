"""What a checkpoint holds of an optimizer, and whose state each entry is.

DCP stores an optimizer's state dict under flattened keys, and the path that each had::

    optimizer.state.up.weight.exp_avg     ("optimizer", "state", "up.weight", "exp_avg")
    optimizer.param_groups.0.lr           ("optimizer", "param_groups", 0, "lr")

Three forms of it are in use: by parameter names (FSDP's and ``get_optimizer_state_dict``), by
numbers (``Optimizer.state_dict``), and flattened (``flatten_optimizer_state_dict=True``)::

    optimizer.state.0.exp_avg             ("optimizer", "state", "0", "exp_avg")
    optimizer.state.up.weight.exp_avg     ("optimizer", "state.up.weight.exp_avg")
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from dcpstore.errors import NotFoundError
from dcpstore.metadata import planner_paths_of

__all__ = ["Entry", "Path", "find_entries", "paths_of"]

Path: TypeAlias = "tuple[str | int, ...]"

_GROUPS, _STATE = "param_groups", "state"
_MOST_NAMED = 10


@dataclass(frozen=True, slots=True)
class Entry:
    """One saved tensor or value of an optimizer.

    Attributes:
        fqn: Its key in the checkpoint.
        path: Where it was in the nested state dict.
        owner: Parameter whose state it is, as saved; None for what belongs to no parameter.
        name: Of the state or hyperparameter: ``exp_avg``, ``lr``.
        is_in_group: Whether it is part of ``param_groups``.
        saved: Shape and dtype of a tensor, or that it is a value.
    """

    fqn: str
    path: Path
    owner: str | None
    name: str
    is_in_group: bool
    saved: TensorStorageMetadata | BytesStorageMetadata

    @property
    def tensor(self) -> TensorStorageMetadata | None:
        """Shape and dtype; None for a value."""
        return self.saved if isinstance(self.saved, TensorStorageMetadata) else None

    @property
    def is_numbered(self) -> bool:
        """Whether the owner may be the number of a parameter."""
        return self.owner is not None and self.owner.isdecimal() and len(self.path) > 2


def paths_of(metadata: Metadata) -> Mapping[str, Path]:
    """Return each key's path in the nested state dict; the key itself where nobody kept it."""
    kept = planner_paths_of(metadata.planner_data) or {}
    return {fqn: tuple(kept.get(fqn) or (fqn,)) for fqn in metadata.state_dict_metadata}


def find_entries(
    metadata: Metadata, optimizer_key: str, parameters: Collection[str]
) -> list[Entry]:
    """Return what is saved of the optimizer under a key.

    Args:
        metadata: Of the checkpoint.
        optimizer_key: Where the optimizer is in the saved state dict: dotted if it is nested, empty
            if it is all that was saved.
        parameters: Names of the model, to tell a flattened parameter from its state.

    Raises:
        NotFoundError: If there is no optimizer; names those that the checkpoint has.
    """
    paths = paths_of(metadata)
    entries = []
    for fqn, path in paths.items():
        rest = _below(fqn, path, optimizer_key)
        if rest is not None:
            entries.append(_entry(metadata, fqn, path, rest, parameters))
    is_one = any(
        entry.is_in_group or entry.owner is not None or entry.fqn == optimizer_key
        for entry in entries
    )
    if not is_one:
        raise NotFoundError(_no_optimizer(optimizer_key, paths, has_entries=bool(entries)))
    return entries


def _below(fqn: str, path: Path, key: str) -> Path | None:
    """Return the part of a path below the optimizer's key; None if it is elsewhere."""
    for num in range(len(path) + 1):
        if ".".join(map(str, path[:num])) == key:
            return path[num:]
    if len(path) == 1 and fqn.startswith(key + "."):
        return (fqn[len(key) + 1 :],)
    return None


def _entry(
    metadata: Metadata, fqn: str, path: Path, rest: Path, parameters: Collection[str]
) -> Entry:
    saved = metadata.state_dict_metadata[fqn]
    owner: str | None = None
    name, is_in_group = str(rest[-1]) if rest else "", False
    if len(rest) == 1 and name.startswith((f"{_STATE}.", f"{_GROUPS}.")):
        kind, _, text = name.partition(".")
        is_in_group = kind == _GROUPS
        owner, name = _split(text, parameters)
    elif rest and rest[0] == _GROUPS:
        is_in_group = True
        name = str(rest[2]) if len(rest) > 2 else ""
    elif len(rest) > 2 and rest[0] == _STATE:
        owner, name = str(rest[1]), str(rest[2])
    return Entry(fqn, path, None if is_in_group else owner, name, is_in_group, saved)


def _split(text: str, parameters: Collection[str]) -> tuple[str, str]:
    """Split ``up.weight.exp_avg`` where the parameter ends; at the last dot if none is known."""
    at = text.rfind(".")
    while at > 0:
        if text[:at] in parameters:
            return text[:at], text[at + 1 :]
        at = text.rfind(".", 0, at)
    owner, _, name = text.rpartition(".")
    return owner, name


def _no_optimizer(key: str, paths: Mapping[str, Path], *, has_entries: bool) -> str:
    present = _optimizers(paths.values())
    if present:
        what = f"has no optimizer under {key!r}; it has {_names(present)}"
        return f"the checkpoint {what}. Pass that as the key"
    tops = sorted({str(path[0]) for path in paths.values()})
    also = f" ({key!r} is there, but is none)" if has_entries else ""
    return (
        f"the checkpoint has no optimizer{also}; its keys begin with {_names(tops)}. Save it with"
        " the model, such as dcpstore.save({'model': ..., 'optimizer': ...}, url)"
    )


def _optimizers(paths: Iterable[Path]) -> list[str]:
    """Return where there are ``param_groups``, which every optimizer has."""
    found = set()
    for path in paths:
        for at, step in enumerate(path):
            before, mark, _ = f"{step}.".partition(f"{_GROUPS}.")
            if mark and (not before or before.endswith(".")):
                found.add(".".join(map(str, [*path[:at], *([before[:-1]] if before else [])])))
                break
    return sorted(found)


def _names(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:_MOST_NAMED]))
    more = len(names) - _MOST_NAMED
    return shown + (f" and {more} more" if more > 0 else "")
