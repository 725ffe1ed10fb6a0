"""Which keys take part, and under which name they are stored."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from dcpstore.errors import ConfigError

__all__ = ["KeyRules", "Rename", "Strictness"]

Rename: TypeAlias = Mapping[str, str] | Callable[[str], str]
"""From a key of the state dict to the key in the checkpoint: a map of keys and of prefixes
that end with ``.``, or a function."""

Strictness: TypeAlias = bool | Mapping[str, bool]
"""Whether every key of the state dict must be in the checkpoint: for all keys, or per prefix
(the longest that matches; ``""`` for the rest, True if not given)."""


@dataclass(frozen=True, slots=True)
class KeyRules:
    """Selection and renaming of flattened keys.

    Attributes:
        include: Patterns of keys to take part (``fnmatch``: ``*``, ``?``, ``[...]``); all if empty.
        exclude: Patterns of keys to leave out; stronger than ``include``.
        rename: From the state dict's key to the checkpoint's.
    """

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    rename: Rename | None = None

    def takes(self, fqn: str) -> bool:
        """Tell whether a key takes part."""
        if any(fnmatch.fnmatchcase(fqn, pattern) for pattern in self.exclude):
            return False
        return not self.include or any(fnmatch.fnmatchcase(fqn, p) for p in self.include)

    def stored_name(self, fqn: str) -> str:
        """Return the key under which a key of the state dict is stored."""
        if self.rename is None:
            return fqn
        if not isinstance(self.rename, Mapping):
            return self.rename(fqn)
        if fqn in self.rename:
            return self.rename[fqn]
        prefixes = [p for p in self.rename if p.endswith(".") and fqn.startswith(p)]
        if not prefixes:
            return fqn
        longest = max(prefixes, key=len)
        return self.rename[longest] + fqn[len(longest) :]

    def stored_names(self, fqns: Sequence[str]) -> dict[str, str]:
        """Return the stored name of each key that takes part.

        Raises:
            ConfigError: If two keys would be stored under one name.
        """
        names = {fqn: self.stored_name(fqn) for fqn in fqns if self.takes(fqn)}
        owners: dict[str, str] = {}
        for fqn, name in names.items():
            other = owners.setdefault(name, fqn)
            if other != fqn:
                raise ConfigError(f"rename maps both {other!r} and {fqn!r} to {name!r}")
        return names


def is_strict(strict: Strictness, fqn: str) -> bool:
    """Tell whether a key must be in the checkpoint."""
    if isinstance(strict, bool):
        return strict
    prefixes = [prefix for prefix in strict if fqn.startswith(prefix)]
    return strict[max(prefixes, key=len)] if prefixes else True
