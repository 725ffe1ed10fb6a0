"""How the ranks of a job agree: steps that succeed or fail on all of them alike.

Importing this needs no torch, and neither does `open_group` in a process that never
imported ``torch.distributed``. The protocol is in `dcpstore.ranks.exchange`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from dcpstore.errors import ConfigError
from dcpstore.ranks.group import RankGroup, SingleGroup
from dcpstore.ranks.steps import all_gather, all_reduce, broadcast, each, gather, reduce_scatter
from dcpstore.ranks.transport import Board, BoardLostError, Pending, Seat

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "Board",
    "BoardLostError",
    "Pending",
    "RankGroup",
    "Seat",
    "SingleGroup",
    "all_gather",
    "all_reduce",
    "broadcast",
    "each",
    "gather",
    "open_group",
    "open_seat",
    "reduce_scatter",
]


def open_group(
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    deadline_s: float = 600.0,
    *,
    purpose: str = "checkpoint",
    subject: str = "",
) -> RankGroup:
    """All ranks of the process group: open a group for steps. Waits for nobody.

    Nothing is sent over `process_group` itself, then or later: neither a hung rank nor a
    concurrent collective of the trainer can meet ours. Open it before anything that may
    fail on one rank alone, and close it, best as a context manager.

    Args:
        process_group: The ranks; the default group where None. Without an initialised one,
            and in a group of one rank, there is nobody to wait for: a `SingleGroup`.
        coordinator_rank: The rank that reduces, as a rank of `process_group`.
        deadline_s: Seconds a step may take where its caller says nothing else, from the
            moment this rank enters it.
        purpose: Groups for different purposes never mix. Groups for one purpose must be opened
            in the same order on all ranks; several may be open at once.
        subject: What is saved or loaded, such as its URL without secrets. Should a rank have
            missed a group, its steps for another subject fail, rather than join in.

    Raises:
        ConfigError: If this process is not in `process_group`, the coordinator is not, or the
            group's backend carries nothing (``fake``).
    """
    if process_group is None and not _has_default_group():
        if coordinator_rank != 0:
            raise ConfigError(f"coordinator {coordinator_rank} is no rank of a group of 1")
        return SingleGroup(deadline_s)
    from dcpstore.ranks.torch_group import open_torch_group

    return open_torch_group(process_group, coordinator_rank, deadline_s, purpose, subject)


def open_seat(
    process_group: ProcessGroup | None = None, coordinator_rank: int = 0, *, purpose: str
) -> Seat | None:
    """All ranks: take a seat at a new board, for what is no group of steps. Waits for nobody.

    As with groups, nothing is sent over `process_group`, and boards for one purpose must be
    opened in the same order on all ranks. Whoever opened it drops the keys that it sets.

    Returns:
        The seat; None where there is no other rank to talk to.

    Raises:
        ConfigError: As `open_group` says.
    """
    if process_group is None and not _has_default_group():
        if coordinator_rank != 0:
            raise ConfigError(f"coordinator {coordinator_rank} is no rank of a group of 1")
        return None
    from dcpstore.ranks.torch_group import open_torch_seat

    return open_torch_seat(process_group, coordinator_rank, purpose)


def _has_default_group() -> bool:
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()
