"""What is sealed with a checkpoint beside its tensors: metrics, a step, users' metadata.

Every rank may give some. Each tells the coordinator by one more result of ``write_data``, since
that list is the only way to it under plain ``dcp.save``; `take_out` takes it out again before
anything else looks at the results. Where ranks give different values under one name, the
coordinator's counts, then that of the lowest rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from dcpstore.errors import ConfigError
from dcpstore.format.seal import Facts
from dcpstore.text import parse_json

_MOST_JSON_BYTES = 256 << 10
_MOST_LEVELS = 64


@dataclass(frozen=True, slots=True)
class Attached:
    """What one rank gives to be sealed, or all of them together.

    Attributes:
        facts: Step, run and metrics.
        user_metadata: JSON values by name.
        is_coordinator: Whether the rank that gives it is.
    """

    facts: Facts = field(default_factory=Facts)
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    is_coordinator: bool = False

    def __bool__(self) -> bool:
        return bool(self.facts or self.user_metadata)

    def as_result(self) -> WriteResult:
        """Return it as what `take_out` looks for among the results of ``write_data``."""
        return WriteResult(MetadataIndex(""), 0, self)


def attach(
    *,
    metrics: Mapping[str, float] | None = None,
    user_metadata: Mapping[str, Any] | None = None,
    step: int | None = None,
    run: str | None = None,
) -> Attached:
    """Check what a caller gives, and copy it.

    Raises:
        ConfigError: If something is of the wrong type or too large.
    """
    try:
        numbers = {name: _as_metric(name, value) for name, value in (metrics or {}).items()}
        facts = Facts(step, run, numbers)
    except ValueError as error:
        raise ConfigError(f"the metrics cannot be sealed: {error}") from error
    return Attached(facts, _as_json(user_metadata or {}))


def take_out(results: Iterable[WriteResult]) -> tuple[list[WriteResult], list[Attached]]:
    """Separate what was written from what was given to be sealed with it.

    Args:
        results: Of one rank, or of all in their order.
    """
    written: list[WriteResult] = []
    given: list[Attached] = []
    for one in results:
        if isinstance(one.storage_data, Attached):
            given.append(one.storage_data)
        else:
            written.append(one)
    return written, given


def merge(given: Iterable[Attached]) -> Attached:
    """Join what ranks gave, in their order.

    Raises:
        ConfigError: If it is too large.
    """
    given = sorted(given, key=lambda one: not one.is_coordinator)
    metrics: dict[str, float] = {}
    user_metadata: dict[str, Any] = {}
    for one in reversed(given):
        metrics.update(one.facts.metrics)
        user_metadata.update(one.user_metadata)
    steps = [one.facts.step for one in given if one.facts.step is not None]
    runs = [one.facts.run for one in given if one.facts.run is not None]
    try:
        facts = Facts(next(iter(steps), None), next(iter(runs), None), metrics)
    except ValueError as error:
        raise ConfigError(f"the metrics of all ranks together cannot be sealed: {error}") from error
    return Attached(facts, _as_json(user_metadata))


def _as_metric(name: object, value: object) -> float:
    """Return a number as a float; tensors and arrays of one element are numbers too."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise ValueError(f"{name!r:.60} is a {type(value).__name__}, not a number")
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{name!r:.60} is no single number: {error}") from error


def _as_json(user_metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of what JSON can say.

    Raises:
        ConfigError: If it says more than JSON can, or more than a reader of ours takes.
    """
    try:
        text = json.dumps(dict(user_metadata), allow_nan=False)
        if len(text) > _MOST_JSON_BYTES:
            raise ValueError(
                f"it takes {len(text)} bytes, and {_MOST_JSON_BYTES} is the most: make it an"
                " attachment"
            )
        copied: dict[str, Any] = parse_json(text)
        if _num_levels(copied) > _MOST_LEVELS:
            raise ValueError(f"it is nested in more than {_MOST_LEVELS} levels")
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"user_metadata must be what JSON can say (text, finite numbers, lists, dicts with"
            f" keys of text, True, False, None): {error}"
        ) from error
    return copied


def _num_levels(value: object) -> int:
    if isinstance(value, dict):
        value = [*value.values()]
    return 1 + max(map(_num_levels, value), default=0) if isinstance(value, list) else 0
