"""What is sealed with a checkpoint beside its tensors: files, metrics, a step, users' metadata.

Every rank may give some. Each tells the coordinator by one more result of ``write_data``, since
that list is the only way to it under plain ``dcp.save``; `take_out` takes it out again before
anything else looks at the results::

    rank     attach -> Given -> write_data: attachments are written -> Attached in the results
    finish   take_out -> merge -> manifest and footer

Where ranks give different metrics or metadata under one name, the coordinator's count, then those
of the lowest rank. Attachments of one name must have the same bytes on all ranks that give it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from dcpstore.errors import ConfigError, CorruptError, IncompatibleError
from dcpstore.format.manifest import DataObject, StoredItem
from dcpstore.format.seal import Facts, check_relative
from dcpstore.text import parse_json
from dcpstore.write.job import Written
from dcpstore.write.source import ByteSource, source_of

Attachment: TypeAlias = "bytes | bytearray | memoryview | os.PathLike[str] | ByteSource"
"""What may be attached: bytes, or the path of a local file, which is not a `str`."""

_MOST_JSON_BYTES = 256 << 10
_MOST_LEVELS = 64
_RANK = "{rank}"


@dataclass(frozen=True, slots=True)
class Given:
    """What a rank's caller wants to be sealed with the next save.

    Attributes:
        facts: Step, run and metrics.
        user_metadata: JSON values by name.
        sources: Attachments by name, which may have ``{rank}`` in it.
    """

    facts: Facts = field(default_factory=Facts)
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, ByteSource] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.facts or self.user_metadata or self.sources)

    def sources_of(self, rank: int) -> dict[str, ByteSource]:
        """Return the attachments by the names that they have on a rank.

        Raises:
            ConfigError: If two have the same name there.
        """
        named = {name.replace(_RANK, str(rank)): one for name, one in self.sources.items()}
        if len(named) != len(self.sources):
            raise ConfigError(
                f"two of the attachments {sorted(self.sources)} have the same name on rank {rank}"
            )
        return named


@dataclass(frozen=True, slots=True)
class Attached:
    """What one rank gave and wrote, or all of them together.

    Attributes:
        facts: Step, run and metrics.
        user_metadata: JSON values by name.
        written: Where the attachments lie, by name.
        objects: Every object that an attachment lies in, also where another rank's of the same
            name stands for it: what the manifest lists, whoever deletes knows.
        is_coordinator: Whether the rank that gave it is.
    """

    facts: Facts = field(default_factory=Facts)
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[str, Written] = field(default_factory=dict)
    objects: tuple[DataObject, ...] = ()
    is_coordinator: bool = False

    def as_result(self) -> WriteResult:
        """Return it as what `take_out` looks for among the results of ``write_data``."""
        num_bytes = sum(one.item.record.num_bytes for one in self.written.values())
        return WriteResult(MetadataIndex(""), num_bytes, self)


def attach(
    *,
    attachments: Mapping[str, Attachment] | None = None,
    metrics: Mapping[str, float] | None = None,
    user_metadata: Mapping[str, Any] | None = None,
    step: int | None = None,
    run: str | None = None,
) -> Given:
    """Check what a caller gives, and copy it; see `ObjectStoreWriter.attach`.

    Raises:
        ConfigError: If something is of the wrong type or too large, or a file is not there.
    """
    try:
        numbers = {name: _as_metric(name, value) for name, value in (metrics or {}).items()}
        facts = Facts(step, run, numbers)
    except ValueError as error:
        raise ConfigError(f"step, run and metrics cannot be sealed: {error}") from error
    sources = {
        _checked(name): source_of(name, given) for name, given in (attachments or {}).items()
    }
    return Given(facts, _as_json(user_metadata or {}), sources)


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


def objects_of(results: Iterable[WriteResult]) -> list[DataObject]:
    """Return every data object that results tell of, some of them several times."""
    written, given = take_out(results)
    found = [one.storage_data.object for one in written]
    return [*found, *(w.object for one in given for w in one.written.values())]


def merge(given: Iterable[Attached]) -> Attached:
    """Join what ranks gave, in their order.

    Raises:
        ConfigError: If it is too large.
        IncompatibleError: If two ranks gave different bytes under one name.
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
    written: dict[str, Written] = {}
    objects = {held.key: held for one in given for held in one.objects}
    for name, found in (pair for one in given for pair in one.written.items()):
        objects[found.object.key] = found.object
        first = written.setdefault(name, found)
        if first is not found and not same_bytes(first.item, found.item):
            raise IncompatibleError(
                f"two ranks attached different bytes as {name!r}: only one could be read again."
                " Write {rank} into the name, such as 'rng-{rank}.json': each rank's number takes"
                " its place. Nothing was sealed"
            )
    return Attached(facts, _as_json(user_metadata), written, tuple(objects.values()))


def same_bytes(one: StoredItem, other: StoredItem) -> bool:
    """Compare two stored items by their checksums; False where one has none."""
    if one.checksums is None or other.checksums is None:
        return False
    return one.payload.num_bytes == other.payload.num_bytes and bool(
        (one.checksums == other.checksums).all()
    )


def _checked(name: object) -> str:
    """Return an attachment's name if it can be one.

    Raises:
        ConfigError: If it is no relative path.
    """
    if type(name) is not str:
        raise ConfigError(f"an attachment's name is a str, and {name!r:.60} is none")
    try:
        # 20 digits are more than any rank has, so that every rank takes the name that one does.
        check_relative(name.replace(_RANK, "9" * 20))
    except CorruptError as error:
        raise ConfigError(
            f"the attachment {name!r:.200} needs a relative path of printable characters as its"
            " name, of at most 1,000 bytes"
        ) from error
    return name


def _as_metric(name: object, value: object) -> float:
    """Return a number as a float; tensors and arrays of one element are numbers too."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise ValueError(f"{name!r:.60} is a {type(value).__name__}, not a number")
    try:
        # Torch warns of a number that still has a gradient.
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{name!r:.60} is no single number: {error}") from error


def _as_json(user_metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of what JSON can say.

    Raises:
        ConfigError: If it says more than JSON can, or more than a reader of ours takes.
    """
    try:
        _check_json(dict(user_metadata), 0)
        text = json.dumps(dict(user_metadata), allow_nan=False)
        if len(text) > _MOST_JSON_BYTES:
            raise ValueError(
                f"it takes {len(text)} bytes, and {_MOST_JSON_BYTES} is the most: make it an"
                " attachment"
            )
        copied: dict[str, Any] = parse_json(text)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "user_metadata must be what JSON can say (text, finite numbers, lists, dicts with"
            f" keys of text, True, False, None): {error}"
        ) from error
    return copied


def _check_json(value: object, level: int) -> None:
    """Refuse keys that JSON would turn into text, and what a reader may not be able to open."""
    if level > _MOST_LEVELS:
        raise ValueError(f"it is nested in more than {_MOST_LEVELS} levels")
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r:.60} is a {type(key).__name__}")
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            _check_json(one, level + 1)
