"""Ranks that fail at a chosen point of `dcpstore.save` and `dcpstore.load`, each in its way."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

import dcpstore
from dcpstore import ObjectStoreReader, ObjectStoreWriter, ReadConfig, StoreError, WriteConfig
from dcpstore.plan import LoadPlanner, SavePlanner
from dcpstore.ranks import RankGroup, open_group
from dcpstore.store import Store, open_store
from faults.places import SMALL
from passing_on import PassesOn

P = TypeVar("P")
Kind = Literal["error", "unpicklable", "interrupt", "denied", "hang", "killed"]
NUM_RANKS = 4
SAVE_PHASES = ("state", "local plan", "global plan", "finish plan", "resolve", "upload", "finish")
LOAD_PHASES = (
    "load state",
    "read metadata",
    "load plan",
    "global load plan",
    "finish load plan",
    "check targets",
    "read",
    "fetch to share",
    "share",
    "hand over",
)
OF_COORDINATOR = frozenset({"global plan", "finish", "read metadata", "global load plan"})
"""Phases that only the coordinator runs."""


class Unpicklable(Exception):
    """Like aiohttp's errors: it does not pickle."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class Interrupted(BaseException):
    """Like KeyboardInterrupt: no `Exception`."""


@dataclass
class Bomb:
    """What goes wrong, on which ranks, at which point; it goes off until it is disarmed.

    Attributes:
        phase: The point.
        ranks: The failing ranks.
        kind: How they fail.
        release: Ends a hang, where ranks are threads.
        away: Entered by a rank while it hangs.
    """

    phase: str
    ranks: Collection[int]
    kind: Kind
    release: threading.Event = field(default_factory=threading.Event)
    is_armed: bool = True
    away: Callable[[int], AbstractContextManager[None]] = lambda _rank: nullcontext()

    def at(self, phase: str, rank: int) -> None:
        """Go off, if this is the place."""
        if not self.is_armed or phase != self.phase or rank not in self.ranks:
            return
        text = f"scripted failure of rank {rank}"
        if self.kind == "error":
            raise ArithmeticError(text)
        if self.kind == "unpicklable":
            raise Unpicklable(text)
        if self.kind == "interrupt":
            raise Interrupted(text)
        if self.kind == "denied":
            raise StoreError(f"403: {text}", key="somewhere", denied=True, refused=True)
        if self.kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        with self.away(rank):
            self.release.wait(100)


class BombStore(PassesOn):
    """A store that asks a bomb before each request."""

    def __init__(self, inner: Store, bomb: Bomb, rank: int) -> None:
        super().__init__(inner)
        self._bomb, self._rank = bomb, rank

    def put(self, key: str, data: Any, **options: Any) -> Any:
        if key.endswith(".distcp"):
            self._bomb.at("upload", self._rank)
        elif key == ".metadata":
            self._bomb.at("finish", self._rank)
        return self._inner.put(key, data, **options)

    def get(self, key: str) -> Any:
        if key == ".metadata":
            self._bomb.at("read metadata", self._rank)
        return self._inner.get(key)

    def get_range(self, key: str, start: int, end: int) -> Any:
        self._bomb.at("read", self._rank)
        self._bomb.at("fetch to share", self._rank)
        return self._inner.get_range(key, start, end)


def bomb_planner(planner: type[P], phases: Mapping[str, str], bomb: Bomb, rank: int) -> P:
    """Make a planner of ours that asks a bomb before some of its methods.

    Args:
        planner: Its class.
        phases: What the bomb is asked, by the method's name.
        bomb: Fails in one of them.
        rank: Of the planner.
    """

    def asking(method: str, phase: str) -> Callable[..., Any]:
        def ask_and_call(self: Any, *args: Any) -> Any:
            bomb.at(phase, rank)
            return getattr(planner, method)(self, *args)

        return ask_and_call

    methods = {method: asking(method, phase) for method, phase in phases.items()}
    made: P = type(f"Bomb{planner.__name__}", (planner,), methods)()
    return made


SAVE_BOMBS = {
    "create_local_plan": "local plan",
    "create_global_plan": "global plan",
    "finish_plan": "finish plan",
    "resolve_data": "resolve",
}
LOAD_BOMBS = {
    "create_local_plan": "load plan",
    "create_global_plan": "global load plan",
    "finish_plan": "finish load plan",
    "resolve_tensor": "check targets",
}


class BombState:
    """A Stateful whose state is one tensor."""

    def __init__(self, bomb: Bomb, rank: int, fill: float) -> None:
        self._at = lambda phase: bomb.at(phase, rank)
        self.value = torch.full((10,), fill)

    def state_dict(self) -> dict[str, Any]:
        self._at("state")
        self._at("load state")
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at("hand over")
        self.value = state["value"]


class BombGroup(PassesOn):
    """A group that asks a bomb before it receives bytes of another rank."""

    def __init__(self, inner: RankGroup, bomb: Bomb) -> None:
        super().__init__(inner)
        self._bomb = bomb

    def post_receive(self, into: Any, source: int) -> Any:
        self._bomb.at("share", self._inner.rank)
        return self._inner.post_receive(into, source)


WRITE = WriteConfig(**{**SMALL, "inline_bytes": 64, "checksum_block_bytes": 4096})
READ = ReadConfig(request_bytes=16384, join_gap_bytes=64, budget_bytes=1 << 20)


def state_of(rank: int, fill: float, bomb: Bomb) -> dict[str, Any]:
    """What one rank holds: a tensor of its own, one that all have, a value, a Stateful."""
    return {
        "own": {str(rank): torch.full((3000,), fill + rank)},
        "shared": torch.full((40_000,), fill),
        "step": int(fill),
        "extra": BombState(bomb, rank, fill),
    }


def is_state(state: dict[str, Any], rank: int, fill: float) -> bool:
    """Whether a state holds what `state_of` makes."""
    return (
        bool((state["own"][str(rank)] == fill + rank).all())
        and bool((state["shared"] == fill).all())
        and state["step"] == fill
        and bool((state["extra"].value == fill).all())
    )


@dataclass
class Job:
    """One rank's saves and loads, with a bomb wherever it can be placed.

    Attributes:
        group: The ranks: an open group, or None for the default process group.
        rank: This rank.
        url: Folder of the checkpoint.
        opener: Opens the store behind the bomb.
        bomb: What goes wrong.
        options: More for `dcpstore.save` and `dcpstore.load`.
        clock: What `fail` counts seconds by.
    """

    group: Any
    rank: int
    url: str
    opener: Callable[..., Store]
    bomb: Bomb
    options: dict[str, Any] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic

    def _open(self, *args: Any, **options: Any) -> Any:
        return BombStore(self.opener(*args, **options), self.bomb, self.rank)

    def save(self, fill: float) -> Any:
        return dcpstore.save(
            state_of(self.rank, fill, self.bomb),
            storage_writer=ObjectStoreWriter(
                self.url, overwrite=True, config=WRITE, store_opener=self._open
            ),
            planner=bomb_planner(SavePlanner, SAVE_BOMBS, self.bomb, self.rank),
            process_group=self.group,
            **self.options,
        )

    def load(self, fill: float) -> Any:
        """Load, and compare with what was saved with ``fill``."""
        state = state_of(self.rank, -1, self.bomb)
        never = self.bomb.phase == "read" and self.bomb.is_armed
        result = dcpstore.load(
            state,
            storage_reader=ObjectStoreReader(self.url, config=READ, store_opener=self._open),
            planner=bomb_planner(LoadPlanner, LOAD_BOMBS, self.bomb, self.rank),
            process_group=self.group,
            share="never" if never else "always",
            **self.options,
        )
        assert is_state(state, self.rank, fill), f"rank {self.rank} loaded something else"
        return result

    def fail(self) -> tuple[BaseException | None, float]:
        """Save or load with the bomb; return what was raised, and the seconds until then."""
        began_s = self.clock()
        try:
            if self.bomb.phase in SAVE_PHASES:
                self.save(1)
            else:
                self.load(0)
        except BaseException as error:
            return error, self.clock() - began_s
        return None, self.clock() - began_s


@dataclass(frozen=True)
class Scenario:
    """One failing save or load of processes.

    Attributes:
        phase: Where it fails.
        ranks: On which ranks.
        kind: How.
        coordinator: Who coordinates.
    """

    phase: str
    ranks: tuple[int, ...]
    kind: Kind
    coordinator: int = 0


def play(
    rank: int,
    port: int,
    folder: Path,
    scenarios: list[Scenario],
    deadline_s: float,
    reports: Any,
) -> None:
    """Be one gloo rank; send what each scenario raised here, and after how many seconds."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=NUM_RANKS
    )
    for number, scenario in enumerate(scenarios):
        _play_one(scenario, rank, folder / str(number), deadline_s, reports)
    if scenarios[-1].kind in ("hang", "killed"):
        time.sleep(100)  # a rank that leaves would itself be noticed; the test ends all
    dist.destroy_process_group()


def _play_one(scenario: Scenario, rank: int, folder: Path, deadline_s: float, reports: Any) -> None:
    bomb = Bomb(scenario.phase, scenario.ranks, scenario.kind)
    options = {"coordinator_rank": scenario.coordinator, "deadline_s": deadline_s}
    with ExitStack() as stack:
        group: Any = None
        if scenario.phase == "share":
            opened = open_group(None, scenario.coordinator, deadline_s)
            group, options = BombGroup(stack.enter_context(opened), bomb), {}
        job = Job(group, rank, str(folder), open_store, bomb, options)
        if scenario.phase in LOAD_PHASES:
            bomb.is_armed = False
            job.save(0)
            bomb.is_armed = True
        error, seconds = job.fail()
        reports.send((error, seconds))
        if scenario.kind in ("hang", "killed"):
            return
        dist.barrier()
        left = sorted(path.name for path in folder.glob("*"))
        dist.barrier()
        bomb.is_armed = False
        job.save(2)
        job.load(2)
        reports.send(left)
