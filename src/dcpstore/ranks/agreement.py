"""What every save, load and conversion begins with: its ranks, and its reader or writer.

And calls into planners, readers and writers that others wrote.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from dcpstore.errors import ConfigError, RankFailures
from dcpstore.ranks import RankGroup, open_group
from dcpstore.text import redact

Url: TypeAlias = "str | os.PathLike[str]"

Ranks: TypeAlias = "dist.ProcessGroup | RankGroup | None"
"""The ranks that work together: a process group, an open rank group, or None for all."""

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, dict, list, int, float, str})


def is_stateful(value: object) -> bool:
    """Tell whether a value follows DCP's ``Stateful`` protocol."""
    # Asking the protocol takes 15 us, and a state may hold 100,000 plain tensors.
    return type(value) not in _PLAIN and isinstance(value, Stateful)


@contextmanager
def join_ranks(
    ranks: Ranks,
    coordinator_rank: int,
    deadline_s: float,
    *,
    action: str,
    url: Url | None,
) -> Iterator[RankGroup]:
    """Open a group for one save, load or conversion; one that is open stays the caller's.

    The action and the URL tell groups apart, so that a rank that missed one does not join
    the next by mistake. Where there is but one rank, what went wrong is raised rather than that
    a rank failed.
    """
    if ranks is not None and not isinstance(ranks, dist.ProcessGroup):
        with plain_cause_of_one(ranks):
            yield ranks
        return
    subject = "" if url is None else redact(os.fspath(url))
    with (
        open_group(
            ranks, coordinator_rank, deadline_s=deadline_s, purpose=action, subject=subject
        ) as group,
        plain_cause_of_one(group),
    ):
        yield group


Storage = TypeVar("Storage", bound="StorageReader | StorageWriter")


def choose_storage(
    action: Literal["load", "save"],
    url: Url | None,
    given: Storage | None,
    make: Callable[..., Storage],
    options: Mapping[str, Any],
) -> Storage:
    """Return the storage reader or writer that the caller gave, set to the URL, or a new one.

    Args:
        action: What it is for.
        url: Where the checkpoint is.
        given: By the caller.
        make: Makes one for the URL, with the options.
        options: By name; None or False where the caller passed none.

    Raises:
        ConfigError: If there is neither a URL nor one given, or options for one given.
    """
    role = "reader" if action == "load" else "writer"
    if given is None:
        if url is None:
            raise ConfigError(f"{action} needs a url or a storage_{role}")
        return make(url, **options)
    if any(value is not None and value is not False for value in options.values()):
        *others, last = options
        raise ConfigError(
            f"{', '.join(others)} and {last} belong to the {role} that {action} would make; give"
            f" them to your storage_{role} instead"
        )
    if url is not None:
        given.reset(url)
    return given


def call_set_up(function: Callable[..., Any], *args: Any, **optional: Any) -> Any:
    """Call a set-up method with those optional arguments that it takes.

    DCP's protocol gained arguments over time (``storage_meta``, ``rank``,
    ``use_collectives``); older implementations do not know them.
    """
    parameters = inspect.signature(function).parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        optional = {name: value for name, value in optional.items() if name in parameters}
    return function(*args, **optional)


@contextmanager
def plain_cause_of_one(group: RankGroup) -> Iterator[None]:
    """Where there is but one rank, raise what went wrong rather than that a rank failed."""
    try:
        yield
    except RankFailures as failures:
        if group.size == 1 and failures.__cause__ is not None:
            raise failures.__cause__ from failures.__cause__.__cause__
        raise
