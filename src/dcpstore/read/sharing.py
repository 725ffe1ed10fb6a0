"""Read once, send on: bytes that ranks fetch for each other.

Ranks that hold the same data (DDP, HSDP, replicated optimizer scalars, norms under tensor
parallelism) want the same units: ranges of objects that follow from the stored item and its
checksum blocks alone. What several ranks want is fetched by one of them::

    wanted by  0 1 2 3     0 1     2 3       0
               [ bundle ][bundle][bundle]  [own]
    fetched by      2        0       3       0

Not every rank may be able to read every object: a file that one rank reads for all, or objects on
the disk of a node. What a rank wants and cannot read, one that can fetches for it. A bundle then
holds what several sets of ranks want, such as the columns that each of them has of some rows.
What the same ranks want of a bundle is packed into one message, without what lies between::

    object     0 0 1 1 2 2 3 3      message to 0   0 0 0 0
               0 0 1 1 2 2 3 3      message to 1   1 1 1 1   ...

A message goes down a binomial tree: to W ranks its fetcher sends it log2(W) times. Bundles
travel in waves, which bound what a rank holds; one is fetched while the one before travels::

    step 0: wave 0 fetched?   step 1: wave 0 carried, wave 1 fetched?   step 2: wave 1 carried ...

A wave is carried only after a step in which all ranks were well, so nobody waits for bytes
that another rank could not fetch. What was received is verified like what was fetched.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Literal

import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.planner import LoadPlanner

from dcpstore.config import ReadConfig
from dcpstore.plan.agreement import Agreement
from dcpstore.plan.wire import PackedPlan, PlanCache
from dcpstore.ranks import Pending, RankGroup, steps
from dcpstore.ranks.transport import tree_children, tree_parent
from dcpstore.read.plan import Request
from dcpstore.read.pump import ReadJob
from dcpstore.read.targets import Piece
from dcpstore.store.base import ByteRange
from dcpstore.store.budget import bytes_in_flight
from dcpstore.store.ranges import group as group_ranges

SharePolicy = Literal["auto", "always", "never"]

_NOTHING = memoryview(b"")
_LEAST_SAVED_BYTES = 1 << 20  # below this the extra steps cost more than the requests saved

Units = npt.NDArray[np.int64]
"""What a rank wants, as rows of (object number, start, end, run, step): of bytes [start, end)
``run`` bytes every ``step`` bytes. Both are the whole length where every byte is wanted."""


@dataclass(frozen=True, slots=True)
class Message:
    """What the same ranks want of a bundle.

    Attributes:
        number: The same on all ranks.
        ranks: Who wants it, ascending.
        units: Packed one behind the other.
    """

    number: int
    ranks: tuple[int, ...]
    units: Units

    @property
    def num_bytes(self) -> int:
        """Its length."""
        return int(_packed_bytes(self.units).sum())


@dataclass(frozen=True, slots=True)
class Bundle:
    """A range of an object that one rank fetches for several.

    Attributes:
        wave: When.
        object: Number of the object.
        range: Bytes of the object.
        fetcher: The rank that fetches it.
        messages: What becomes of it.
    """

    wave: int
    object: int
    range: ByteRange
    fetcher: int
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class SharePlan:
    """What ranks fetch for each other.

    Attributes:
        bundles: In the order of their waves.
        num_waves: Waves in all; every rank takes part in each.
        unique_bytes: Bytes of all units, each counted once.
        wanted_bytes: The same, counted once per rank that wants them.
    """

    bundles: tuple[Bundle, ...]
    num_waves: int
    unique_bytes: int
    wanted_bytes: int

    def of_rank(self, rank: int) -> SharePlan:
        """Return the part that concerns one rank."""
        own = []
        for bundle in self.bundles:
            is_mine = bundle.fetcher == rank
            messages = tuple(m for m in bundle.messages if is_mine or rank in m.ranks)
            if messages:
                own.append(replace(bundle, messages=messages))
        return replace(self, bundles=tuple(own))


@dataclass(slots=True)
class _Draft:
    """A bundle to be.

    Attributes:
        object: As of `Bundle`.
        range: As of `Bundle`.
        rows: Of the units in it.
        able: The ranks that can fetch it.
        is_bound: Whether others cannot.
        ranks: All that hold some of it.
        fetcher: As of `Bundle`.
    """

    object: int
    range: ByteRange
    rows: list[int]
    able: tuple[int, ...]
    is_bound: bool
    ranks: tuple[int, ...] = ()
    fetcher: int = -1


def plan_sharing(
    units: Sequence[Units],
    *,
    request_bytes: int,
    join_gap_bytes: int,
    wave_bytes: int,
    readers: Mapping[int, tuple[int, ...]] | None = None,
) -> SharePlan:
    """Plan who fetches what for whom.

    Args:
        units: Per rank. Duplicates within a rank count once.
        request_bytes: Longest bundle, unless one unit is longer.
        join_gap_bytes: Widest hole worth fetching along.
        wave_bytes: Most bytes of one wave that a rank holds.
        readers: The ranks that can read an object, for each that not all can. They fetch it for
            the others, and each for itself what lies apart from all that others want. Of
            every other object what several want is fetched by one of them.
    """
    unique, sets = _wanting_ranks(units)
    readers = readers or {}
    places = unique.tolist()
    together: dict[tuple[tuple[int, ...], bool], list[int]] = {}
    for row, ranks in enumerate(sets):
        able = readers.get(places[row][0])
        if able is not None or len(ranks) > 1:
            together.setdefault((able or ranks, able is not None), []).append(row)
    drafts = [
        draft
        for able_and_bound, rows in together.items()
        for draft in _draft(
            places, rows, able_and_bound, join_gap_bytes, (wave_bytes, request_bytes)
        )
    ]
    drafts = _choose_fetchers(drafts, sets, len(units))
    numbers = itertools.count()
    bundles = []
    for wave, draft in _number_waves(drafts, len(units), wave_bytes):
        by_ranks: dict[tuple[int, ...], list[int]] = {}
        for row in draft.rows:
            by_ranks.setdefault(sets[row], []).append(row)
        messages = tuple(
            Message(next(numbers), ranks, unique[rows]) for ranks, rows in by_ranks.items()
        )
        bundles.append(Bundle(wave, draft.object, draft.range, draft.fetcher, messages))
    lengths = _packed_bytes(unique)
    return SharePlan(
        tuple(bundles),
        1 + max((bundle.wave for bundle in bundles), default=-1),
        int(lengths.sum()),
        int((lengths * np.array([len(ranks) for ranks in sets], dtype=np.int64)).sum()),
    )


def _choose_fetchers(
    drafts: Sequence[_Draft], sets: Sequence[tuple[int, ...]], num_ranks: int
) -> list[_Draft]:
    """Let of those that can fetch a bundle the one do it that has least to fetch.

    Returns:
        The bundles in the order of their objects, without those that nobody has to be sent.
    """
    loads = np.zeros(num_ranks, dtype=np.int64)
    chosen = []
    for draft in sorted(drafts, key=lambda draft: (draft.object, draft.range)):
        wanting = {rank for row in draft.rows for rank in sets[row]}
        if draft.is_bound and wanting.issubset(draft.able):
            continue
        members = np.asarray(draft.able)
        draft.fetcher = int(members[np.argmin(loads[members])])
        draft.ranks = tuple(sorted({draft.fetcher, *wanting}))
        loads[draft.fetcher] += draft.range.num_bytes
        chosen.append(draft)
    return chosen


def _packed_bytes(units: Units) -> npt.NDArray[np.int64]:
    """Return how many bytes are wanted of each unit."""
    _, start, end, run, step = units.T
    packed: npt.NDArray[np.int64] = ((end - start - run) // step + 1) * run
    return packed


def _wanting_ranks(units: Sequence[Units]) -> tuple[Units, list[tuple[int, ...]]]:
    """Return the distinct units in order and, for each, the ranks that want it."""
    distinct = [np.unique(one.reshape(-1, 5), axis=0) for one in units]
    ranks = np.repeat(np.arange(len(units)), [len(one) for one in distinct])
    unique, inverse = np.unique(np.concatenate(distinct), axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)  # numpy 2.0 alone shapes it otherwise
    order = np.argsort(inverse, kind="stable")
    ends = np.cumsum(np.bincount(inverse, minlength=len(unique)))
    members = ranks[order]
    edges = np.concatenate([[0], ends]).astype(np.int64)
    sets = [tuple(members[a:b].tolist()) for a, b in itertools.pairwise(edges)]
    return unique, sets


def _draft(
    places: Sequence[Sequence[int]],
    rows: Sequence[int],
    able_and_bound: tuple[tuple[int, ...], bool],
    join_gap_bytes: int,
    most_bytes: tuple[int, int],
) -> Iterator[_Draft]:
    """Join units that overlap, so that no byte is fetched twice, and then neighbours."""
    wave_bytes, request_bytes = most_bytes
    for number, members in itertools.groupby(rows, lambda row: places[row][0]):
        overlapping = group_ranges(
            members,
            lambda row: ByteRange(*places[row][1:3]),
            max_gap_bytes=-1,
            max_bytes=lambda: wave_bytes,
        )
        joined = group_ranges(
            overlapping,
            itemgetter(0),
            max_gap_bytes=join_gap_bytes,
            max_bytes=lambda: request_bytes,
        )
        for span, parts in joined:
            rows_of = [row for _, inside in parts for row in inside]
            yield _Draft(number, span, rows_of, *able_and_bound)


def _number_waves(
    drafts: Sequence[_Draft], num_ranks: int, wave_bytes: int
) -> list[tuple[int, _Draft]]:
    """Put each bundle into the first wave in which all its ranks have room for it.

    Bundles of the same ranks stay in order. One that is larger than a wave gets one alone.
    """
    held: list[npt.NDArray[np.int64]] = []  # per wave: bytes per rank
    first_wave: dict[tuple[int, ...], int] = {}
    numbered = []
    for draft in drafts:
        members = np.asarray(draft.ranks)
        num_bytes = draft.range.num_bytes
        wave = first_wave.get(draft.ranks, 0)
        while wave < len(held):
            fullest = int(held[wave][members].max())
            if fullest == 0 or fullest + num_bytes <= wave_bytes:
                break
            wave += 1
        else:
            held.append(np.zeros(num_ranks, dtype=np.int64))
        held[wave][members] += num_bytes
        first_wave[draft.ranks] = wave
        numbered.append((wave, draft))
    return sorted(numbered, key=lambda one: one[0])


# --- agreeing -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sharing:
    """What was decided about sharing, and why.

    Attributes:
        plan: This rank's part; None if nothing is shared.
        reason: In words.
    """

    plan: SharePlan | None
    reason: str


@dataclass(frozen=True, slots=True)
class Shares:
    """What was decided for each rank."""

    decisions: list[Sharing]


def read_shared(
    group: RankGroup,
    job: ReadJob,
    planner: LoadPlanner,
    config: ReadConfig,
    *,
    keys: Sequence[str],
    policy: SharePolicy,
    cache: PlanCache[Shares],
    readers: Mapping[str, Sequence[int]] | None = None,
) -> tuple[str, bool]:
    """Read what a job was prepared for, sharing what pays or has to be. All ranks.

    The ranks agree in the steps "plan sharing" and "merge wants" (see
    `dcpstore.plan.agreement`), carry the waves, and then read what is left, each for itself.

    Args:
        group: The ranks that load together.
        job: This rank's load.
        planner: Told of complete targets, in the calling thread.
        config: Sizes and bounds.
        keys: Of all objects, in the same order on all ranks.
        policy: Of what all ranks can read. ``"auto"`` shares where it saves at least 1 MiB of
            requests.
        cache: What earlier loads agreed on; used on the coordinator.
        readers: Key and ranks of each object that these ranks alone can read. The coordinator's
            count; None on every rank if all can read everything.

    Returns:
        What was shared and why, in words, and whether an earlier load wanted the same.

    Raises:
        RankFailures: On every rank, if any failed to fetch, to carry or to deliver.
    """
    if (policy == "never" and readers is None) or group.size == 1:
        steps.each(group, "read", lambda: job.fetch_rest(planner))
        return f"not shared: {'one rank' if group.size == 1 else 'share=' + repr(policy)}", False
    wants = _Wants(job, keys)
    wave_bytes = share_wave_bytes(config)
    known = readers or {}
    able = {n: tuple(known[key]) for n, key in enumerate(keys) if key in known}
    merge = partial(_merge, config, policy, able)
    fingerprint = f"share {policy} {wave_bytes} {config.request_bytes} {config.join_gap_bytes}"
    if able:
        fingerprint += f" {able}"
    agreement = Agreement(group, cache, fingerprint, merge)
    sharing = agreement.reach("plan sharing", "merge wants", wants.pack)
    succeeded = False
    try:
        if sharing.plan is not None:
            _Carrier(group, job, wants, sharing.plan).run(planner)
        steps.each(group, "read", lambda: job.fetch_rest(planner))
        succeeded = True
    finally:
        agreement.settle(succeeded)
    return sharing.reason, agreement.is_cached


def share_wave_bytes(config: ReadConfig) -> int:
    """Return what a wave may hold of the budget.

    Half of what may be in flight, as the next is fetched while this one travels.
    """
    return max(bytes_in_flight(config.budget_bytes) // 2, 1)


def _merge(
    config: ReadConfig,
    policy: SharePolicy,
    readers: Mapping[int, tuple[int, ...]],
    packed: Sequence[PackedPlan],
) -> Shares:
    wave_bytes = share_wave_bytes(config)
    plan = plan_sharing(
        [np.frombuffer(one.bodies[0], np.int64).reshape(-1, 5) for one in packed],
        request_bytes=min(config.request_bytes, wave_bytes),
        join_gap_bytes=config.join_gap_bytes,
        wave_bytes=wave_bytes,
        readers=readers,
    )
    bound = [bundle for bundle in plan.bundles if bundle.object in readers]
    free = [bundle for bundle in plan.bundles if bundle.object not in readers]
    saved = sum(m.num_bytes * (len(m.ranks) - 1) for one in free for m in one.messages)
    amounts = (
        f"{len(packed)} ranks want {plan.wanted_bytes} bytes, {plan.unique_bytes} of them unique"
    )
    if free and (policy == "always" or (policy == "auto" and saved >= _LEAST_SAVED_BYTES)):
        reason = f"shared: {amounts}; each was fetched once"
    else:
        why = f"it would save {saved} bytes, less than {_LEAST_SAVED_BYTES}"
        if not free:
            why = "no two ranks want the same bytes"
        elif policy == "never":
            why = f"share={policy!r}"
        reason = f"not shared: {why} ({amounts})"
        num_waves = 1 + max((bundle.wave for bundle in bound), default=-1)
        plan = replace(plan, bundles=tuple(bound), num_waves=num_waves)
    if bound:
        sent = sum(message.num_bytes for bundle in bound for message in bundle.messages)
        reason = f"{sent} bytes came from ranks that alone can read them; the rest {reason}"
    plans = [plan.of_rank(rank) if plan.bundles else None for rank in range(len(packed))]
    return Shares([Sharing(one, reason) for one in plans])


class _Wants:
    """The pieces of a job by the units that they wait for."""

    def __init__(self, job: ReadJob, keys: Sequence[str]) -> None:
        self._job = job
        self.keys = keys
        self._pieces: dict[tuple[int, ...], list[Piece]] = {}

    def pack(self) -> PackedPlan:
        """Return the units as a plan."""
        for number, key in enumerate(self.keys):
            for piece in self._job.pieces.get(key, ()):
                unit = (number, *piece.fetch, *piece.spacing)
                self._pieces.setdefault(unit, []).append(piece)
        rows = np.array(sorted(self._pieces), dtype=np.int64)
        return PackedPlan.of(len(rows), rows.tobytes())

    def take(self, units: Units) -> list[Request]:
        """Take the pieces of units out of what this rank fetches itself."""
        return [
            Request(self.keys[obj], ByteRange(start, end), tuple(pieces))
            for obj, start, end, run, step in units.tolist()
            for pieces in (self._pieces.pop((obj, start, end, run, step), ()),)
        ]

    def leave(self) -> None:
        """Leave what was not taken to the job."""
        pieces: dict[str, list[Piece]] = {}
        for unit, waiting in self._pieces.items():
            pieces.setdefault(self.keys[unit[0]], []).extend(waiting)
        self._job.pieces = pieces


# --- carrying -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Leg:
    """What this rank does with a message.

    Attributes:
        message: As planned.
        members: Its fetcher, then the other ranks that want it.
        place: This rank's among them.
        requests: Per unit its place in an object, and the pieces of this rank that want it.
        data: The bytes, where they are here.
    """

    message: Message
    members: tuple[int, ...]
    place: int
    requests: list[Request]
    data: memoryview = _NOTHING

    @property
    def parent(self) -> int:
        """Whom it comes from."""
        return self.members[tree_parent(self.place, 0, len(self.members))]

    @property
    def children(self) -> list[int]:
        """Whom it goes on to."""
        return [self.members[place] for place in tree_children(self.place, 0, len(self.members))]

    def contents(self) -> Iterator[tuple[Request, memoryview]]:
        """Take the message apart."""
        ends = np.cumsum(_packed_bytes(self.message.units)).tolist()
        for request, start, end in zip(self.requests, [0, *ends], ends, strict=False):
            yield request, self.data[start:end]


@dataclass(slots=True)
class _Wave:
    """A wave on this rank.

    Attributes:
        legs: Messages that reach or leave this rank.
        fetching: Bundles that it fetches.
        fetched_bytes: Length of these.
    """

    legs: list[_Leg] = field(default_factory=list)
    fetching: list[Future[None]] = field(default_factory=list)
    fetched_bytes: int = 0


class _Carrier:
    """One rank's way through the waves."""

    def __init__(self, group: RankGroup, job: ReadJob, wants: _Wants, plan: SharePlan) -> None:
        self._group = group
        self._job = job
        self._wants = wants
        self._num_waves = plan.num_waves
        self._bundles: list[list[Bundle]] = [[] for _ in range(plan.num_waves + 2)]
        for bundle in plan.bundles:
            self._bundles[bundle.wave].append(bundle)

    def run(self, planner: LoadPlanner) -> None:
        """Carry all waves. All ranks."""
        self._group.open_lanes()
        wave, ahead = _Wave(), self._begin(0)
        for number in range(self._num_waves + 1):
            carried = [f"share wave {number - 1}"] if number else []
            fetched = [f"fetch wave {number} to share"] if number < self._num_waves else []
            step = ", ".join(carried + fetched)
            steps.each(self._group, step, partial(self._carry_and_wait, wave, ahead, planner))
            wave, ahead = ahead, self._begin(number + 1)
        self._wants.leave()

    def _begin(self, number: int) -> _Wave:
        """Begin to fetch this rank's bundles of a wave."""
        wave = _Wave()
        for bundle in self._bundles[number]:
            legs = [self._leg(bundle, message) for message in bundle.messages]
            wave.legs.extend(leg for leg in legs if len(leg.members) > 1)
            if bundle.fetcher == self._group.rank:
                own = tuple(p for leg in legs for one in leg.requests for p in one.pieces)
                request = Request(self._wants.keys[bundle.object], bundle.range, own)
                wave.fetched_bytes += bundle.range.num_bytes
                wave.fetching.append(self._job.fetch(request, partial(_pack, legs, bundle.range)))
        return wave

    def _leg(self, bundle: Bundle, message: Message) -> _Leg:
        members = (bundle.fetcher, *(rank for rank in message.ranks if rank != bundle.fetcher))
        requests = self._wants.take(message.units)
        return _Leg(message, members, members.index(self._group.rank), requests)

    def _carry_and_wait(self, wave: _Wave, ahead: _Wave, planner: LoadPlanner) -> None:
        received_bytes = sum(leg.message.num_bytes for leg in wave.legs if leg.place)
        self._job.note_held(wave.fetched_bytes + received_bytes + ahead.fetched_bytes)
        self._carry(wave.legs)
        wave.legs.clear()
        self._job.commit_complete(planner)
        for one in ahead.fetching:
            one.result()

    def _carry(self, legs: Sequence[_Leg]) -> None:
        """Send what this rank fetched, receive what others did, pass it on and deliver it."""
        # Between two ranks, sends and receives match in the order in which they are posted. A
        # rank posts the sends of a message that came to it over so many ranks after those of
        # all that came over fewer, and its children expect them in that order.
        ordered = sorted(legs, key=lambda leg: (leg.place.bit_count(), leg.message.number))
        receives = [self._receive(leg) if leg.place else None for leg in ordered]
        sends: list[Pending] = []
        delivering: list[Future[None]] = []
        for leg, pending in zip(ordered, receives, strict=True):
            if pending is not None:
                pending.wait(self._group.deadline_s)
                self._job.stats.received_bytes += len(leg.data)
                delivering.append(self._job.deliver(leg.contents()))
            sends += [self._group.post_send(leg.data, to) for to in leg.children]
        for sent in sends:
            sent.wait(self._group.deadline_s)
        for one in delivering:
            one.result()

    def _receive(self, leg: _Leg) -> Pending:
        leg.data = np.empty(leg.message.num_bytes, np.uint8).data
        return self._group.post_receive(leg.data, leg.parent)


def _pack(legs: Iterable[_Leg], span: ByteRange, data: memoryview) -> None:
    """Give the messages that leave this rank their bytes, out of those of a bundle."""
    for leg in legs:
        if len(leg.members) == 1:
            continue
        units = leg.message.units[:, 1:] - (span.start, span.start, 0, 0)
        if len(units) == 1 and units[0, 2] == units[0, 3]:
            leg.data = data[units[0, 0] : units[0, 1]]
            continue
        source = np.frombuffer(data, np.uint8)
        out = np.empty(leg.message.num_bytes, np.uint8)
        at = 0
        for start, end, run, step in units.tolist():
            shape = ((end - start - run) // step + 1, run)
            part = out[at : at + shape[0] * run].reshape(shape)
            part[:] = np.lib.stride_tricks.as_strided(source[start:], shape, (step, 1))
            at += part.size
        leg.data = out.data
