"""How the ranks of a job agree: steps that succeed or fail on all of them alike.

Importing this needs no torch, and neither does `open_group` in a process that never
imported ``torch.distributed``. The protocol is in `dcpstore.ranks.exchange`.
"""

from __future__ import annotations

from dcpstore.ranks.exchange import SingleGroup
from dcpstore.ranks.group import Pending, RankGroup
from dcpstore.ranks.opening import open_group
from dcpstore.ranks.steps import all_gather, all_reduce, broadcast, each, gather, reduce_scatter

__all__ = [
    "Pending",
    "RankGroup",
    "SingleGroup",
    "all_gather",
    "all_reduce",
    "broadcast",
    "each",
    "gather",
    "open_group",
    "reduce_scatter",
]
