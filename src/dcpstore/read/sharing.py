"""Read once, share: carry out a `SharePlan` over a group of ranks.

::

    wave 0   fetch own bundles | step: all fetched? | send and receive | deliver
    wave 1     (fetched while wave 0 travels)       | step: all fetched? | send ...

Every wave is two steps of the group, so a rank whose fetch or transfer fails is known to
all ranks before anybody waits for its bytes. Received bytes are verified like fetched ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from torch.distributed.checkpoint.planner import LoadPlanner

from dcpstore.config import ReadConfig
from dcpstore.plan.wire import PlanCache, cache_key, content_digest
from dcpstore.ranks import RankGroup, steps
from dcpstore.read.plan import Bundle, Request, SharePlan, Units, plan_sharing
from dcpstore.read.pump import ReadJob
from dcpstore.store.budget import bytes_in_flight

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


def _keep_nothing(succeeded: bool) -> None:
    del succeeded


@dataclass(frozen=True, slots=True)
class AgreedShares:
    """What all ranks agreed to share, as one rank knows it.

    Attributes:
        sharing: This rank's part.
        is_cached: Whether an earlier load wanted the same.
        settle: To be told whether the load succeeded; does something on the coordinator only.
    """

    sharing: Sharing
    is_cached: bool = False
    settle: Callable[[bool], None] = _keep_nothing


def plan_shares(
    group: RankGroup,
    units: Callable[[], Units],
    config: ReadConfig,
    policy: SharePolicy,
    cache: PlanCache[list[Sharing]],
) -> AgreedShares:
    """Agree on who fetches what for whom. All ranks; at most two steps of the group.

    Wants travel by name first. Of ranks that want the same only one is asked to send them,
    and nobody is if an earlier load wanted the same::

        step "plan sharing"  up: digest of this rank's fetch ranges
                             down: its bundles, if they are known; else whether to send the ranges
        step "merge wants"   up: the ranges, from one rank of each kind; down: its bundles

    Args:
        group: The ranks that load together.
        units: Makes `ReadJob.units` of this rank.
        config: Sizes and bounds.
        policy: ``"auto"`` shares where it saves at least 1 MiB of requests.
        cache: What earlier loads agreed on; used on the coordinator.
    """
    if policy == "never":
        return AgreedShares(Sharing(None, "not shared: share='never'"))
    if group.size == 1:
        return AgreedShares(Sharing(None, "not shared: one rank"))
    return _ShareExchange(group, units, config, policy, cache).run()


class _ShareExchange:
    """One rank's way through an exchange of wants."""

    def __init__(
        self,
        group: RankGroup,
        units: Callable[[], Units],
        config: ReadConfig,
        policy: SharePolicy,
        cache: PlanCache[list[Sharing]],
    ) -> None:
        self._group = group
        self._make_units = units
        self._config = config
        self._policy = policy
        self._cache = cache
        self._units = b""
        self._digests: Sequence[bytes] = ()
        self._key = b""

    def run(self) -> AgreedShares:
        answer = steps.reduce_scatter(self._group, "plan sharing", self._name, self._look_up)
        is_cached = isinstance(answer, Sharing)
        if isinstance(answer, Sharing):
            sharing = answer
        else:
            sent = self._units if answer else None
            sharing = steps.reduce_scatter(self._group, "merge wants", lambda: sent, self._merge)
        settle = self._settle if self._group.is_coordinator else _keep_nothing
        return AgreedShares(sharing, is_cached, settle)

    def _name(self) -> bytes:
        self._units = self._make_units().tobytes()
        return content_digest(self._units)

    def _look_up(self, digests: Sequence[bytes]) -> Sequence[Sharing | bool]:
        """Return what was decided for the same wants before, or else who is to send theirs."""
        bounds = f"{_wave_bytes(self._config)} {_bundle_bytes(self._config)}"
        fingerprint = f"share {self._policy} {bounds} {self._config.join_gap_bytes}"
        self._digests = digests
        self._key = cache_key(digests, fingerprint)
        known = self._cache.find(self._key)
        if known is not None:
            return known
        first = {digest: rank for rank, digest in reversed([*enumerate(digests)])}
        return [first[digest] == rank for rank, digest in enumerate(digests)]

    def _merge(self, sent: Sequence[bytes | None]) -> list[Sharing]:
        units_of = {
            digest: np.frombuffer(one, np.int64).reshape(-1, 3)
            for digest, one in zip(self._digests, sent, strict=True)
            if one is not None
        }
        plan = plan_sharing(
            [units_of[digest] for digest in self._digests],
            request_bytes=_bundle_bytes(self._config),
            join_gap_bytes=self._config.join_gap_bytes,
            wave_bytes=_wave_bytes(self._config),
        )
        decided = _decide(plan, self._policy, self._group.size)
        self._cache.put(self._key, decided)
        return decided

    def _settle(self, succeeded: bool) -> None:
        if succeeded:
            self._cache.confirm(self._key)
        else:
            self._cache.invalidate(self._key)


def _wave_bytes(config: ReadConfig) -> int:
    """Return what a wave may hold of the budget.

    Half of what may be in flight, as the next is fetched while this one travels.
    """
    return bytes_in_flight(config.budget_bytes) // 2


def _bundle_bytes(config: ReadConfig) -> int:
    return min(config.request_bytes, _wave_bytes(config))


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
        steps.each(group, f"fetch to share, wave {number}", partial(_finish, wave))
        _begin(job, group.rank, ahead)
        steps.each(group, f"share, wave {number}", partial(_trade, group, job, wave))
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
