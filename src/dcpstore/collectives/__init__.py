"""How the ranks of a job agree: steps that succeed or fail on all of them alike.

Importing this needs no torch, and neither does `open_group` in a process that never
imported ``torch.distributed``. The protocol is in `dcpstore.collectives.exchange`.
"""

from __future__ import annotations

from dcpstore.collectives.group import Pending, RankGroup
from dcpstore.collectives.opening import open_group
from dcpstore.collectives.steps import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    gather,
    reduce_scatter,
)
from dcpstore.collectives.verbs import SingleGroup

__all__ = [
    "Pending",
    "RankGroup",
    "SingleGroup",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "gather",
    "open_group",
    "reduce_scatter",
]
