"""Schedules: what is done, and which request meets which fault. Drawn from a seed.

A schedule is one line of text that reads back to itself, so a failing one is repeated by
pasting it::

    overwrite dcpstore x2 s3 +apart | did-lost@A0:seal#0 no-403@A0:readback#0*2
    two_savers dcp x1 sim-gcs +old meet=3/99 | late-end@A0:seal#0

Requests are told apart by the actor that sends them (``A0`` is rank 0 of saver A; ``B`` is
another saver, ``R`` a reader, ``P`` whoever prunes), by their class, and by their number among
the requests of that class of that actor, so ranks that run at the same time do not change which
request a fault meets.
"""

from __future__ import annotations

import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

OPERATIONS = ("first_save", "overwrite", "two_savers", "reader", "prune")
ENTRIES = ("dcp", "dcpstore")
WIRE = ("s3", "s3fs")
GLOO = ("gloo",)
VERBS = ("sim-s3", "sim-gcs", "sim-azure", "sim-fsspec", "sim-file")
TRANSPORTS = (*WIRE, *GLOO, *VERBS)

_ANSWERS = ("403", "ExpiredToken", "412", "409", "429", "500", "503")
REFUSED = tuple(f"no-{one}" for one in (*_ANSWERS, "RequestTimeTooSkewed", "closed"))
"""Nothing is done, and this is answered."""
ACTED = tuple(f"did-{one}" for one in ("lost", *_ANSWERS))
"""It is done, and this is answered; ``lost`` closes the connection instead."""
LATE = (
    *("late-1", "late-3", "late-end"),
    *("late-3-500", "late-3-503", "late-end-500", "late-end-503"),
)
"""Done after so many more requests, or at the end, whoever gave it up. The answer is lost, or what
a proxy says that did not wait for it."""
OTHER = (
    "twice",  # done twice, as by a proxy; the second answer is given
    "cut-answer",  # done, and the answer ends early; see `Fault.looks_whole`
    "cut-request",  # the body that comes ends early: not done, connection closed
    "stall",  # not done, and no answer until the client gives up
    "stall-did",  # done, and no answer until the client gives up
    "absent",  # answered 404 once, although it exists
    "killed",  # the client dies before the request is done
    "killed-did",  # the client dies when it is done
)
KINDS = (*REFUSED, *ACTED, *LATE, *OTHER)
FAULT_CELLS = (*REFUSED, *ACTED, "late", *OTHER)
"""Rows of the table: as `KINDS`, with all of `LATE` in one."""

CLASSES = (
    "any",
    "get",  # a whole object, or a range of one
    "put",  # any object in one request
    "look",  # get of .metadata before this actor tried to seal
    "readback",  # get or head of .metadata after it
    "seal",  # put of .metadata
    "data",  # put of a data object, or the request that completes one sent in parts
    "manifest",  # put of a manifest
    "part",  # one part of a multipart upload
    "begin",  # that begins one
    "complete",
    "abort",
    "list",
    "delete",
    "head",
)
FLAGS = (
    "apart",  # the manifest is an object of its own
    "nolist",  # 403 for absence
    "parts",  # a tensor that needs a multipart upload
    "old",  # two_savers, reader, prune: a checkpoint was there
    "many",  # several data objects per rank
    "sharded",  # tensors that are split among the ranks
    "async",  # dcp.async_save
    "renew",  # credentials that expire in mid-save and are renewed
    "fsdp",  # state of an FSDP2 module
    "process",  # dcp.async_save in a process
    "bare-etag",  # the store compares ETags without their quotes, as Ceph 16 does
    "force",  # overwrite=True although nothing is there before
    "sweep",  # every rank calls sweep_unsealed() after a failed dcp.save
)

_FAULT = re.compile(r"([\w-]+)@([A-Z]\d+):([a-z]+)#(\d+)(?:\*(\d+))?")
_HEAD = re.compile(r"(\w+) (\w+) x(\d) ([\w-]+)")


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one request, or to some that follow one another.

    Attributes:
        kind: One of `KINDS`.
        actor: Who sends it, such as ``A0``.
        of: Its class, one of `CLASSES`.
        number: Which of that class, from 0.
        times: How many, from that one on.
    """

    kind: str
    actor: str
    of: str
    number: int
    times: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.of not in CLASSES or self.times < 1:
            raise ValueError(f"no such fault: {self}")

    @property
    def cell(self) -> str:
        """The row of the table."""
        return "late" if self.kind in LATE else self.kind

    @property
    def acts(self) -> bool:
        """Whether the store does what was asked, sooner or later."""
        return self.kind in (*ACTED, *LATE, "twice", "cut-answer", "stall-did", "killed-did")

    @property
    def looks_whole(self) -> bool:
        """Whether an answer that is cut says that it ends there, as if all had come."""
        return (self.number + self.times) % 2 == 1

    def fits(self, verb: str) -> bool:
        """Whether it can happen to such a request: what reads cannot act."""
        if self.kind == "absent":
            return verb in ("get", "head")
        if self.kind == "cut-request":
            return verb in ("put", "part", "complete", "delete")
        is_read = verb in ("get", "head", "list")
        return not (is_read and self.acts and self.kind not in ("cut-answer", "killed-did"))

    def __str__(self) -> str:
        many = f"*{self.times}" if self.times > 1 else ""
        return f"{self.kind}@{self.actor}:{self.of}#{self.number}{many}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """One run: what is done, by how many ranks, over which transport, under which faults.

    Attributes:
        operation: One of `OPERATIONS`. Saver ``A`` saves in each of them.
        entry: By which function: one of `ENTRIES`.
        ranks: Of each saver, 1 to 4.
        transport: One of `TRANSPORTS`.
        faults: What happens, in any order.
        flags: Some of `FLAGS`, sorted.
        meet: Where there is another actor: A's request with the first number waits until the
            other has sent as many requests as the second says, or is done. None: the other one
            begins when A has ended.
    """

    operation: str
    entry: str = "dcpstore"
    ranks: int = 1
    transport: str = "s3"
    faults: tuple[Fault, ...] = ()
    flags: tuple[str, ...] = ()
    meet: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        known = (
            self.operation in OPERATIONS
            and self.entry in ENTRIES
            and 1 <= self.ranks <= 4
            and self.transport in TRANSPORTS
            and set(self.flags) <= set(FLAGS)
            and list(self.flags) == sorted(set(self.flags))
        )
        if not known:
            raise ValueError(f"no such schedule: {self.operation} {self.entry} {self.flags}")

    @property
    def has_old(self) -> bool:
        """Whether a checkpoint lies there before anything begins."""
        return self.operation == "overwrite" or "old" in self.flags

    @property
    def other(self) -> str | None:
        """The actor beside A."""
        return {"two_savers": "B", "reader": "R", "prune": "P"}.get(self.operation)

    def __str__(self) -> str:
        head = f"{self.operation} {self.entry} x{self.ranks} {self.transport}"
        words = [head, *(f"+{flag}" for flag in self.flags)]
        if self.meet is not None:
            words.append(f"meet={self.meet[0]}/{self.meet[1]}")
        return " ".join([*words, "|", *map(str, self.faults)])


def parse(text: str) -> Schedule:
    """Read a schedule from its text.

    Raises:
        ValueError: If it is none.
    """
    front, bar, behind = text.strip().partition("|")
    head = _HEAD.match(front)
    if not bar or head is None:
        raise ValueError(f"not a schedule: {text!r}")
    words = front[head.end() :].split()
    meet: tuple[int, int] | None = None
    for word in words:
        if word.startswith("meet="):
            at, num = word.removeprefix("meet=").split("/")
            meet = (int(at), int(num))
        elif not word.startswith("+"):
            raise ValueError(f"what is {word!r} in {text!r}?")
    return Schedule(
        operation=head[1],
        entry=head[2],
        ranks=int(head[3]),
        transport=head[4],
        faults=tuple(_parse_fault(word) for word in behind.split()),
        flags=tuple(sorted(word[1:] for word in words if word.startswith("+"))),
        meet=meet,
    )


def _parse_fault(text: str) -> Fault:
    match = _FAULT.fullmatch(text)
    if match is None:
        raise ValueError(f"not a fault: {text!r}")
    return Fault(match[1], match[2], match[3], int(match[4]), int(match[5] or 1))


# Which request meets which fault ---------------------------------------------------------------


@dataclass
class Script:
    """Follows a schedule's faults while requests come. Thread-safe.

    Args:
        schedule: Whose faults are to happen.
    """

    schedule: Schedule
    fired: Counter[Fault] = field(default_factory=Counter)
    log: list[str] = field(default_factory=list)
    num_requests: Counter[str] = field(default_factory=Counter)
    dead: set[str] = field(default_factory=set)
    _seen: Counter[tuple[str, str]] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, actor: str, verb: str, key: str) -> Fault | None:
        """Note a request; return the fault that it meets.

        Args:
            actor: Who sends it.
            verb: ``get``, ``head``, ``put``, ``begin``, ``part``, ``complete``, ``abort``,
                ``list``, ``delete``.
            key: Relative to the checkpoint's folder; a ``delete`` may name any of its keys.
        """
        with self._lock:
            numbers = {}
            for of in self._classes(actor, verb, key):
                numbers[of] = self._seen[actor, of]
                self._seen[actor, of] += 1
            self.num_requests[actor] += 1
            found = None
            for fault in self.schedule.faults:
                number = numbers.get(fault.of, -1)
                is_its_turn = fault.number <= number < fault.number + fault.times
                if fault.actor == actor and is_its_turn and fault.fits(verb):
                    found = fault
                    break
            if actor in self.dead:
                found = None
            if found is not None:
                self.fired[found] += 1
                if found.kind.startswith("killed"):
                    self.dead.add(actor)
            self.log.append(f"{actor} {verb} {key}" + (f"  <- {found}" if found else ""))
            return found

    def _classes(self, actor: str, verb: str, key: str) -> Iterator[str]:
        name = key.rpartition("/")[2]
        yield "any"
        if verb == "put":
            yield "put"
        if verb in ("put", "complete"):
            if name.endswith(".metadata"):
                yield "seal"
            elif name.endswith(".distcp"):
                yield "data"
            elif name.startswith(".dcpstore-"):
                yield "manifest"
        if verb in ("get", "head") and name.endswith(".metadata"):
            yield "readback" if self._seen[actor, "seal"] else "look"
        if verb != "put":
            yield verb


# Drawing and shrinking -------------------------------------------------------------------------


def shrink(
    schedule: Schedule, fails: Callable[[Schedule], bool], *, max_runs: int = 60
) -> Schedule:
    """Return a smaller schedule that still fails: fewer faults, ranks, flags, repetitions.

    Args:
        schedule: Fails.
        fails: Runs one; whether it fails.
        max_runs: Most runs.
    """
    num_runs = 0
    is_smaller = True
    while is_smaller and num_runs < max_runs:
        is_smaller = False
        for smaller in _smaller(schedule):
            num_runs += 1
            if fails(smaller):
                schedule, is_smaller = smaller, True
                break
            if num_runs >= max_runs:
                break
    return schedule


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    for at in range(len(schedule.faults)):
        yield replace(schedule, faults=schedule.faults[:at] + schedule.faults[at + 1 :])
    if schedule.operation in ("two_savers", "reader", "prune"):
        operation = "overwrite" if schedule.has_old else "first_save"
        flags = tuple(flag for flag in schedule.flags if flag != "old")
        alone = tuple(fault for fault in schedule.faults if fault.actor[0] == "A")
        yield replace(schedule, operation=operation, flags=flags, faults=alone, meet=None)
    for ranks in range(1, schedule.ranks):
        faults = tuple(f for f in schedule.faults if int(f.actor[1:]) < ranks)
        yield replace(schedule, ranks=ranks, faults=faults)
    for flag in schedule.flags:
        yield replace(schedule, flags=tuple(one for one in schedule.flags if one != flag))
    if schedule.meet is not None:
        yield replace(schedule, meet=None)
    for at, fault in enumerate(schedule.faults):
        if fault.times > 1:
            fewer = replace(fault, times=fault.times - 1)
            yield replace(
                schedule, faults=(*schedule.faults[:at], fewer, *schedule.faults[at + 1 :])
            )


# Roughly how often a class of request is hit, and how many requests of it an actor sends.
_ACTING = frozenset((*ACTED, *LATE, "twice", "cut-request", "stall-did"))
_SAVER_TARGETS = {
    "seal": (6, 2),
    "readback": (4, 2),
    "look": (2, 1),
    "data": (3, 2),
    "manifest": (1, 1),
    "delete": (2, 1),
    "any": (2, 6),
}
_OTHER_TARGETS = {
    "R": {"look": (3, 1), "get": (4, 4), "any": (3, 5)},
    "P": {"list": (3, 2), "look": (3, 2), "delete": (4, 1), "any": (3, 6)},
}
# The put acts or may act, and what would tell is refused or wrong: the campaign's own aim.
_MAY_ACT = (*ACTED, *LATE, "twice", "stall-did", "cut-answer")
_TIMES = (1, 1, 1, 2, 3)
_BARRED = {
    "look": ("absent", "cut-answer"),
    "readback": (*REFUSED, "absent", "cut-answer", "stall"),
    "seal": ("no-403", "no-ExpiredToken", "no-RequestTimeTooSkewed", "no-412", "no-409"),
}


def draw(
    rng: random.Random,
    transport: str,
    *,
    operation: str | None = None,
    kind: str | None = None,
    entries: Sequence[str] = ENTRIES,
    max_ranks: int = 4,
    flags: Sequence[str] | Mapping[str, float] = ("apart", "many", "nolist", "bare-etag"),
) -> Schedule:
    """Draw one schedule.

    Args:
        rng: Source of all choices.
        transport: One of `TRANSPORTS`.
        operation: One of `OPERATIONS`; None for any.
        kind: A row of `FAULT_CELLS` that the first fault shall belong to; None for any.
        entries: To choose from.
        max_ranks: Most ranks of a saver.
        flags: To choose from, with the chance of each where it is not one in five; ``old`` is
            chosen by itself.
    """
    operation = operation or rng.choice(OPERATIONS)
    ranks = min(max_ranks, rng.choice((1, 1, 1, 2, 2, 3, 4)))
    chances = flags if isinstance(flags, Mapping) else dict.fromkeys(flags, 0.2)
    chosen = {flag for flag, chance in chances.items() if rng.random() < chance}
    if operation in ("two_savers", "reader", "prune") and rng.random() < 0.6:
        chosen.add("old")
    meet = None
    if operation in ("two_savers", "reader", "prune") and rng.random() < 0.8:
        meet = (rng.randrange(3 + 2 * ranks), rng.choice((1, 2, 3, 4, 6, 99, 99)))
    entry = rng.choice(list(entries))
    if transport in GLOO:
        entry, ranks = _fit_to_processes(operation, entry, ranks, chosen)
    schedule = Schedule(
        operation=operation,
        entry=entry,
        ranks=ranks,
        transport=transport,
        flags=tuple(sorted(chosen)),
        meet=meet,
    )
    faults: list[Fault] = []
    for fault in _draw_faults(rng, schedule, kind):
        if fault.kind == "absent":  # no promise covers a store that says it again and again
            if any(one.kind == "absent" and one.actor == fault.actor for one in faults):
                continue
            fault = replace(fault, times=1)
        faults.append(fault)
    return replace(schedule, faults=tuple(faults))


def _fit_to_processes(operation: str, entry: str, ranks: int, chosen: set[str]) -> tuple[str, int]:
    """Keep to what four processes can do; change the flags where they do not fit."""
    if operation == "two_savers":
        chosen -= {"process"}
        ranks = min(ranks, 2)
    if "process" in chosen:  # its helper keeps the size of its first group
        chosen -= {"async"}
        ranks = 2
    return "dcp" if chosen & {"async", "process"} else entry, ranks


def may_fire(fault: Fault, schedule: Schedule) -> bool:
    """Tell whether a request may come that meets a fault, as far as that shows before."""
    if fault.kind.startswith("killed") and "process" in schedule.flags:
        return False  # the helper sends the requests, and is not the rank that would be killed
    if fault.of == "manifest":
        return "apart" in schedule.flags
    if fault.actor[0] not in "AB":
        return True
    if fault.of == "delete":
        return schedule.has_old
    if fault.of == "data":
        return not fault.number or "many" in schedule.flags
    if fault.of in ("readback", "seal"):
        is_second = fault.of == "readback" or fault.number
        before = (one for one in schedule.faults if one.actor == fault.actor and one.of == "seal")
        return not is_second or any(
            one.number < fault.number + (fault.of != "seal") for one in before
        )
    return True


class Draws:
    """Draws schedules, most of them for the cell of operation and fault that has the fewest.

    Args:
        rng: Source of all choices.
        transports: To choose from, with the weight of each.
        flags: The flags of each transport, with the chance of each flag.
    """

    def __init__(
        self,
        rng: random.Random,
        transports: Mapping[str, float],
        flags: Mapping[str, Mapping[str, float]],
    ) -> None:
        self._rng = rng
        self._transports = transports
        self._flags = flags
        cells = [(operation, kind) for operation in OPERATIONS for kind in FAULT_CELLS]
        self._fired: Counter[tuple[str, str]] = Counter(dict.fromkeys(cells, 0))
        self._tried: Counter[tuple[str, str]] = Counter()

    def next(self) -> Schedule:
        """Draw one whose faults can all happen, as far as that shows before."""
        for _ in range(8):
            drawn = self._draw()
            if all(may_fire(fault, drawn) for fault in drawn.faults):
                break
        return drawn

    def _draw(self) -> Schedule:
        names = list(self._transports)
        transport = self._rng.choices(names, list(self._transports.values()))[0]
        operation, kind = None, None
        if self._rng.random() < 0.7:
            # What was tried counts a little, or a cell that nothing reaches would take all.
            operation, kind = min(
                self._rng.sample(list(self._fired), 20),
                key=lambda one: self._fired[one] + self._tried[one] / 8,
            )
            self._tried[operation, kind] += 1
        flags = self._flags[transport]
        return draw(self._rng, transport, operation=operation, kind=kind, flags=flags)

    def note(self, schedule: Schedule, fired: Iterable[Fault]) -> None:
        """Count what happened."""
        self._fired.update((schedule.operation, kind) for kind in {one.cell for one in fired})


def _draw_faults(rng: random.Random, schedule: Schedule, kind: str | None) -> Iterator[Fault]:
    if kind is None and rng.random() < 0.3:
        actor = _draw_saver(rng, schedule, coordinator=True)
        of = rng.choice(list(_BARRED))
        yield Fault(
            rng.choice(_MAY_ACT), actor, "seal", 0, 1 if of == "seal" else rng.choice(_TIMES)
        )
        yield Fault(rng.choice(_BARRED[of]), actor, of, int(of == "seal"), rng.choice(_TIMES))
        return
    yield _draw_fault(rng, schedule, kind)
    while rng.random() < 0.45:
        yield _draw_fault(rng, schedule, None)


def _draw_fault(rng: random.Random, schedule: Schedule, cell: str | None) -> Fault:
    kind = rng.choice(LATE) if cell == "late" else cell or rng.choice(KINDS)
    is_other = schedule.other in _OTHER_TARGETS and rng.random() < 0.4
    targets = _OTHER_TARGETS[schedule.other] if is_other and schedule.other else _SAVER_TARGETS
    if "parts" in schedule.flags and not is_other:
        targets = {**targets, "begin": (1, 1), "part": (3, 2), "complete": (2, 1), "abort": (1, 1)}
    targets = {of: how for of, how in targets.items() if _suits(kind, of)} or _SAVER_TARGETS
    of = rng.choices(list(targets), [weight for weight, _ in targets.values()])[0]
    if is_other:
        actor = f"{schedule.other}0"
    else:
        is_first = of not in ("any", "data")
        actor = _draw_saver(rng, schedule, coordinator=is_first)
    number = rng.randrange(targets[of][1])
    times = 1 if kind == "absent" or rng.random() < 0.75 else rng.choice((2, 3))
    return Fault(kind, actor, of, number, times)


def _suits(kind: str, of: str) -> bool:
    is_read = of in ("readback", "look", "get", "list")
    if kind == "absent":
        return is_read and of != "list"
    return not (is_read and kind in _ACTING)


def _draw_saver(rng: random.Random, schedule: Schedule, *, coordinator: bool) -> str:
    saver = "B" if schedule.other == "B" and rng.random() < 0.4 else "A"
    rank = 0 if coordinator else rng.randrange(schedule.ranks)
    return f"{saver}{rank}"
