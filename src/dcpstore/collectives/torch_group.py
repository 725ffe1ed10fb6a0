"""Groups of the ranks of a torch process group. The one torch module that others import.

What is kept between groups, and why: a connection to the job's store, a count of the groups
opened (it names each one's keys), and lanes, which take a connection between every two ranks.
They are kept per process group, for as long as that lives, in a weak-keyed table: the only
mutable state of this package that outlives a call.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from dcpstore.collectives.group import RankGroup
from dcpstore.collectives.lanes import LaneMaker, Lanes
from dcpstore.collectives.torch_lanes import TorchLanes
from dcpstore.collectives.torch_store import StoreBoard
from dcpstore.collectives.verbs import BoardGroup, SingleGroup
from dcpstore.errors import ConfigError
from dcpstore.torch_private import (
    make_backend,
    prefixed_store,
    private_store_client,
    process_group_store,
    store_endpoint,
)

if TYPE_CHECKING:
    from dcpstore.torch_private import Store

__all__ = ["open_torch_group"]

# How long to wait for a key that was there a moment ago; see `StoreBoard`.
_CLIENT_TIMEOUT_S = 5.0

# A store answers some 40,000 questions a second. All ranks together may ask a third of that.
_PAUSE_PER_RANK_S = 60e-6
_MIN_LONGEST_PAUSE_S = 0.02


@dataclass(slots=True)
class _Kept:
    """What one process group's ranks keep between groups."""

    store: Store
    num_opened: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    lanes: dict[str, Lanes] = field(default_factory=dict)


_kept_by_group: WeakKeyDictionary[dist.ProcessGroup, _Kept] = WeakKeyDictionary()
_kept_lock = threading.Lock()


def open_torch_group(
    process_group: dist.ProcessGroup | None,
    coordinator_rank: int,
    deadline_s: float,
    purpose: str,
    subject: str,
) -> RankGroup:
    """All ranks: open a group of the ranks of a process group; see `open_group`.

    Raises:
        ConfigError: As `open_group` says.
    """
    ranks = process_group if process_group is not None else dist.group.WORLD
    if not isinstance(ranks, dist.ProcessGroup):  # new_group gives others a placeholder
        raise ConfigError("this process is not in the process group given")
    rank, size = dist.get_rank(ranks), dist.get_world_size(ranks)
    if not 0 <= coordinator_rank < size:
        raise ConfigError(f"coordinator {coordinator_rank} is no rank of a group of {size}")
    if size == 1:
        return SingleGroup(deadline_s)
    if dist.get_backend(ranks) == "fake":
        raise ConfigError(
            "a fake process group carries nothing; dcpstore.testing.ranks runs ranks as threads"
        )
    with _kept_lock:
        kept = _keep(ranks)
        namespace = f"{purpose}/{kept.num_opened[purpose]}"
        kept.num_opened[purpose] += 1
        lanes = kept.lanes.pop(purpose, None)

    def give_back(lanes: Lanes) -> None:
        with _kept_lock:
            surplus = kept.lanes.pop(purpose, None)
            kept.lanes[purpose] = lanes
        if surplus is not None:
            surplus.close()

    return BoardGroup(
        StoreBoard(
            prefixed_store(namespace, kept.store),
            host_rank=_store_host(ranks, coordinator_rank),
            host=store_endpoint(kept.store),
            max_pause_s=max(_MIN_LONGEST_PAUSE_S, size * _PAUSE_PER_RANK_S),
        ),
        rank=rank,
        size=size,
        coordinator=coordinator_rank,
        deadline_s=deadline_s,
        namespace=namespace,
        lane_maker=_lane_maker(kept, rank, size),
        lanes=lanes,
        subject=subject,
        give_back=give_back,
    )


def _keep(ranks: dist.ProcessGroup) -> _Kept:
    """Return what is kept for a process group. Called with the lock held."""
    kept = _kept_by_group.get(ranks)
    if kept is None:
        client = private_store_client(process_group_store(ranks), _CLIENT_TIMEOUT_S)
        # Names alone do not tell groups apart: split_group gives all its parts one name.
        members = ",".join(map(str, dist.get_process_group_ranks(ranks)))
        digest = hashlib.sha256(members.encode()).hexdigest()[:16]
        kept = _Kept(prefixed_store(f"dcpstore/{digest}", client))
        _kept_by_group[ranks] = kept
    return kept


def _store_host(ranks: dist.ProcessGroup, otherwise: int) -> int:
    """Return whom to name when the store is gone: global rank 0, which holds it by default.

    Not where the launcher holds it or rank 0 is in another group: then `otherwise`.
    """
    members = dist.get_process_group_ranks(ranks)
    is_launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return members.index(0) if 0 in members and not is_launchers else otherwise


def _lane_maker(kept: _Kept, rank: int, size: int) -> LaneMaker | None:
    """Return what opens lanes here; the same kind on every rank, as it depends on the build."""
    if dist.is_gloo_available():
        kind, device = "gloo", None
    elif dist.is_nccl_available() and torch.cuda.is_available():
        kind, device = "nccl", torch.device("cuda", torch.cuda.current_device())
    else:
        return None

    def make(name: str, timeout_s: float) -> Lanes:
        # A client of its own: the backend's constructor blocks in it until all have come.
        client = private_store_client(kept.store, timeout_s)
        store = prefixed_store(name, client)
        return TorchLanes(name, make_backend(kind, store, rank, size, timeout_s), device)

    return make
