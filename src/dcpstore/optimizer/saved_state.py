"""A saved optimizer's entries by parameter and by parameter group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcpstore.errors import ConfigError
from dcpstore.optimizer.entries import Entry, Path
from dcpstore.planners.rules import KeyRules, Rename

__all__ = ["SavedState", "nest", "state_key", "stored_names"]


@dataclass(frozen=True, slots=True)
class SavedState:
    """Entries of one optimizer.

    Attributes:
        state: By the parameter's saved name, and the path in its state: ``("exp_avg",)``.
        groups: By the number of the group, and the path in it: ``("lr",)``, ``("params",)``.
        options: By the parameter's saved name, and the path, in the form that was flattened.
        whole_groups: The entry that holds all groups in one value, as torch up to 2.3 saved
            them; None in all other forms.
        others: Entries that belong to none of these.
    """

    state: Mapping[str, Mapping[Path, Entry]]
    groups: Mapping[int, Mapping[Path, Entry]]
    options: Mapping[str, Mapping[Path, Entry]]
    whole_groups: Entry | None
    others: Sequence[Entry]

    @staticmethod
    def of(entries: Iterable[Entry], key: str, names: Collection[str]) -> SavedState:
        """Sort the entries of the optimizer under a key.

        Args:
            entries: As `find_entries` returned them.
            key: Of the optimizer.
            names: Names of parameters, to tell a parameter ``0.weight`` from group 0.
        """
        state: dict[str, dict[Path, Entry]] = defaultdict(dict)
        groups: dict[int, dict[Path, Entry]] = defaultdict(dict)
        options: dict[str, dict[Path, Entry]] = defaultdict(dict)
        whole_groups = None
        others = []
        for entry in entries:
            rest = _below(entry.path, key)
            if entry.owner is not None:
                inner = rest[2:] if len(rest) > 2 else (entry.name,)
                state[entry.owner][inner] = entry
            elif not entry.is_in_group:
                others.append(entry)
            elif not entry.name:
                whole_groups = entry
            elif len(rest) > 2:
                groups[int(rest[1])][rest[2:]] = entry
            else:
                owner = str(rest[-1]).partition(".")[2].removesuffix(f".{entry.name}")
                if owner.isdecimal() and owner not in names:
                    groups[int(owner)][entry.name,] = entry
                else:
                    options[owner][entry.name,] = entry
        return SavedState(state, groups, options, whole_groups, others)

    @property
    def is_numbered(self) -> bool:
        """Whether parameters are saved by number, as a plain ``optimizer.state_dict()`` does."""
        return bool(self.state) and all(name.isdecimal() for name in self.state)

    def hyperparameters(self) -> Iterable[Entry]:
        """Yield all entries of groups."""
        for one in (*self.groups.values(), *self.options.values()):
            yield from one.values()
        if self.whole_groups is not None:
            yield self.whole_groups


def _below(path: Path, key: str) -> Path:
    for num in range(len(path) + 1):
        if ".".join(map(str, path[:num])) == key:
            return path[num:]
    return path[-1:]  # flattened together with the key


def state_key(key: str, name: str) -> str:
    """Return how the checkpoint's keys of a parameter's state begin, without the last dot."""
    return ".".join(part for part in (key, "state", name) if part)


def stored_names(names: Mapping[str, Sequence[str]], rename: Rename | None) -> dict[str, list[str]]:
    """Return the names under which each parameter may be saved, the likeliest first.

    Args:
        names: Of each parameter, its aliases.
        rename: From the model's names to the checkpoint's.

    Raises:
        ConfigError: If two parameters would have one name.
    """
    rules = KeyRules(rename=rename)
    first = rules.stored_names(list(names))
    found = {}
    for fqn, aliases in names.items():
        found[fqn] = [first[fqn], *(rules.stored_name(alias) for alias in aliases)]
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
