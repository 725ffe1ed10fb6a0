"""What of a checkpoint is converted (keys, names, dtypes), and what the conversion did."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from dcpstore.errors import ConfigError, IncompatibleError
from dcpstore.plan.rules import KeyRules, Rename
from dcpstore.text import count_text, names_text, size_text, table, times


@dataclass(frozen=True, slots=True)
class ConvertResult:
    """What a conversion did. The same on all ranks.

    Attributes:
        source: URL of what was read.
        target: URL of what was written.
        num_tensors: Tensors written, under their own name each.
        num_values: Values that are not tensors, written likewise.
        tensor_bytes: Bytes of the tensors' elements as written.
        objects: Every object written and its size in bytes, keys relative to the folder of
            ``target``.
        skipped: Key of the source, and why it was not written although nobody excluded it.
        cast: Key of the source, and the names of its old and its new dtype.
        fetched_bytes: Bytes asked of the source by all ranks.
        num_server_copies: How many of the objects the provider copied by itself.
        server_copied_bytes: Their size.
        seconds: Per phase, of the coordinator.
    """

    source: str
    target: str
    num_tensors: int
    num_values: int = 0
    tensor_bytes: int = 0
    objects: Mapping[str, int] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    cast: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    fetched_bytes: int = 0
    num_server_copies: int = 0
    server_copied_bytes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all objects written."""
        return sum(self.objects.values())

    def __str__(self) -> str:
        num_objects = count_text(len(self.objects), "object")
        rows = {
            "from": self.source,
            "tensors": f"{self.num_tensors} of {size_text(self.tensor_bytes)}",
            "values": str(self.num_values),
            "stored": f"{size_text(self.stored_bytes)} in {num_objects}",
            "fetched": size_text(self.fetched_bytes),
            **self._server_row(),
            "skipped": names_text(self.skipped),
            "cast": names_text(self.cast),
            **times(self.seconds),
        }
        return table(f"written to {self.target}", rows)

    def _server_row(self) -> dict[str, str]:
        if not self.num_server_copies:
            return {}
        count = count_text(self.num_server_copies, "object")
        return {"by server": f"{size_text(self.server_copied_bytes)} in {count}"}


DtypeRule: TypeAlias = "torch.dtype | Mapping[str, torch.dtype] | None"
"""A dtype for all tensors, or one per pattern of source keys (the first that matches)."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The user's choice; see `select`.

    Attributes:
        rules: Which keys, and their new names.
        dtypes: Pattern of source keys to dtype, in the order in which they are tried.
    """

    rules: KeyRules = field(default_factory=KeyRules)
    dtypes: tuple[tuple[str, torch.dtype], ...] = ()

    def names(self, fqns: Sequence[str]) -> dict[str, str]:
        """Return the new name of each key that takes part, in the order given.

        Raises:
            ConfigError: If two keys would get one name, if a pattern of ``keys`` matches
                nothing, or if nothing is left to convert.
            IncompatibleError: If a key of the source is empty and stays so.
        """
        for pattern in self.rules.include:
            if not any(fnmatch.fnmatchcase(fqn, pattern) for fqn in fqns):
                raise ConfigError(
                    f"keys: {pattern!r} matches none of the {len(fqns)} keys of the source, such"
                    f" as {', '.join(map(repr, fqns[:3]))}"
                )
        names = self.rules.stored_names(fqns)
        if fqns and not names:
            raise ConfigError(f"keys and exclude leave none of the {len(fqns)} keys of the source")
        for fqn, name in names.items():
            if not fqn and not name:
                raise IncompatibleError(
                    "a key of the source is empty, and a checkpoint's has a name: give it one, by"
                    " rename={'': 'name'}"
                )
            if not isinstance(name, str) or not name:
                raise ConfigError(f"rename gives {fqn!r} the name {name!r}; it must be text")
        return names

    def dtype_of(self, fqn: str, saved: torch.dtype) -> torch.dtype:
        """Return the dtype that a tensor of the source gets.

        A rule changes tensors of its own kind only: a floating-point dtype those of
        floating point, a complex one the complex ones, an integer one the integers.
        """
        for pattern, dtype in self.dtypes:
            if fnmatch.fnmatchcase(fqn, pattern):
                return dtype if _kind(dtype) == _kind(saved) else saved
        return saved


def select(
    keys: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Rename | None = None,
    dtype: DtypeRule = None,
) -> Selection:
    """Check and keep what a converter's caller chose; see `dcpstore.convert` for the arguments.

    Raises:
        ConfigError: If an argument is of a wrong type.
    """
    if isinstance(keys, str) or isinstance(exclude, str):
        raise ConfigError("keys and exclude are lists of patterns, such as ['model.*']")
    if rename is not None and not isinstance(rename, Mapping) and not callable(rename):
        raise ConfigError(f"rename is a map or a function, not {type(rename).__name__}")
    if dtype is None:
        dtypes: tuple[tuple[str, torch.dtype], ...] = ()
    elif isinstance(dtype, Mapping):
        dtypes = tuple(dtype.items())
    else:
        dtypes = (("*", dtype),)
    for pattern, value in dtypes:
        if not isinstance(value, torch.dtype):
            raise ConfigError(f"dtype: {pattern!r} is given {value!r}, which is no torch.dtype")
    return Selection(KeyRules(tuple(keys), tuple(exclude), rename), dtypes)


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "floating point"
    return "bool" if dtype == torch.bool else "integer"
