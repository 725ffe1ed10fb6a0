"""Read once, share: carry out a `SharePlan` over a group of ranks.

::

    wave 0   fetch own bundles | step: all fetched? | send and receive | deliver
    wave 1     (fetched while wave 0 travels)       | step: all fetched? | send ...

Every wave is two steps of the group, so a rank whose fetch or transfer fails is known to
all ranks before anybody waits for its bytes. Received bytes are verified like fetched ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from torch.distributed.checkpoint.planner import LoadPlanner

from dcpstore.collectives import RankGroup, steps
from dcpstore.config import ReadConfig
from dcpstore.fetch import ReadJob
from dcpstore.planning.reads import Request
from dcpstore.planning.sharing import Bundle, SharePlan, plan_sharing

__all__ = ["SharePolicy", "Sharing", "fetch_shared", "plan_shares"]

SharePolicy = Literal["auto", "always", "never"]

_LEAST_SAVED_BYTES = 1 << 20  # below this the extra steps cost more than the requests saved


@dataclass(frozen=True, slots=True)
class Sharing:
    """What was decided about sharing, and why.

    Attributes:
        plan: This rank's part; None if nothing is shared.
        reason: In words.
    """

    plan: SharePlan | None
    reason: str


def plan_shares(
    group: RankGroup,
    job: ReadJob,
    object_numbers: Mapping[str, int],
    config: ReadConfig,
    policy: SharePolicy,
) -> Sharing:
    """Agree on who fetches what for whom. All ranks; one step of the group.

    Args:
        group: The ranks that load together.
        job: This rank's load, prepared.
        object_numbers: Number per object key, the same on all ranks.
        config: Sizes and bounds.
        policy: ``"auto"`` shares where it saves at least 1 MiB of requests.
    """
    if policy == "never":
        return Sharing(None, "not shared: share='never'")
    if group.size == 1:
        return Sharing(None, "not shared: one rank")

    def reduce(units: Sequence[bytes]) -> list[Sharing]:
        plan = plan_sharing(
            [np.frombuffer(one, np.int64).reshape(-1, 3) for one in units],
            request_bytes=min(config.request_bytes, config.budget_bytes // 2),
            join_gap_bytes=config.join_gap_bytes,
            # Half, as the next wave is fetched while this one travels.
            wave_bytes=config.budget_bytes // 2,
        )
        return _decide(plan, policy, group.size)

    return steps.reduce_scatter(
        group, "plan sharing", lambda: job.units(object_numbers).tobytes(), reduce
    )


def _decide(plan: SharePlan, policy: SharePolicy, num_ranks: int) -> list[Sharing]:
    saved = plan.wanted_bytes - plan.unique_bytes
    amounts = (
        f"{num_ranks} ranks want {plan.wanted_bytes} bytes, {plan.unique_bytes} of them unique"
    )
    if not plan.bundles:
        return [
            Sharing(None, f"not shared: no two ranks want the same bytes ({amounts})")
        ] * num_ranks
    if policy == "auto" and saved < _LEAST_SAVED_BYTES:
        reason = (
            f"not shared: it would save {saved} bytes, less than {_LEAST_SAVED_BYTES} ({amounts})"
        )
        return [Sharing(None, reason)] * num_ranks
    reason = f"shared: {amounts}; each was fetched once"
    return [Sharing(plan.of_rank(rank), reason) for rank in range(num_ranks)]


def fetch_shared(
    group: RankGroup,
    job: ReadJob,
    plan: SharePlan,
    keys: Sequence[str],
    planner: LoadPlanner,
) -> None:
    """Fetch this rank's bundles, trade them with the others', and deliver them. All ranks.

    Args:
        group: The ranks that load together.
        job: This rank's load; bundles take their pieces out of it.
        plan: This rank's part.
        keys: Object key per number.
        planner: Told of complete targets.

    Raises:
        RankFailures: On every rank, if any rank failed to fetch or to transfer.
    """
    waves: list[list[_Share]] = [[] for _ in range(plan.num_waves)]
    for bundle in plan.bundles:
        waves[bundle.wave].append(_Share(bundle, job.take(keys[bundle.object], bundle.range)))
    group.open_lanes()
    _begin(job, group.rank, waves[0] if waves else [])
    for number, wave in enumerate(waves):
        ahead = waves[number + 1] if number + 1 < len(waves) else []
        job.note_held(
            sum(share.bundle.range.num_bytes for share in wave)
            + sum(s.bundle.range.num_bytes for s in ahead if s.bundle.fetcher == group.rank)
        )
        steps.barrier(group, f"fetch to share, wave {number}", partial(_finish, wave))
        _begin(job, group.rank, ahead)
        steps.barrier(group, f"share, wave {number}", partial(_trade, group, job, wave))
        job.commit_complete(planner)


@dataclass(slots=True)
class _Share:
    """A bundle on this rank, and the local pieces it brings."""

    bundle: Bundle
    request: Request
    fetching: Future[memoryview] | None = None
    data: memoryview | None = None


def _begin(job: ReadJob, rank: int, wave: Sequence[_Share]) -> None:
    for share in wave:
        if share.bundle.fetcher == rank:
            share.fetching = job.fetch(share.request)


def _finish(wave: Sequence[_Share]) -> None:
    for share in wave:
        if share.fetching is not None:
            share.data, share.fetching = share.fetching.result(), None


def _trade(group: RankGroup, job: ReadJob, wave: Sequence[_Share]) -> None:
    """Send what this rank fetched, receive what others did, and deliver both."""
    receives = []
    for share in wave:
        if share.data is None:
            share.data = memoryview(bytearray(share.bundle.range.num_bytes))
            receives.append((share, group.post_receive(share.data, share.bundle.fetcher)))
    mine = [share for share in wave if share.bundle.fetcher == group.rank]
    sends = [
        group.post_send(share.data, to)
        for share in mine
        if share.data is not None
        for to in share.bundle.ranks
        if to != group.rank
    ]
    delivering = [job.deliver(s.request, s.data) for s in mine if s.data is not None]
    for share, pending in receives:
        pending.wait(group.deadline_s)
        job.stats.received_bytes += share.bundle.range.num_bytes
        if share.data is not None:
            delivering.append(job.deliver(share.request, share.data))
    for pending in sends:
        pending.wait(group.deadline_s)
    for one in delivering:
        one.result()
    for share in wave:
        share.data = None
