"""Runs schedules on modelled stores, with a clock that no real time moves.

Savers are `dcp.save` (``dcp``, one rank), DCP's order of calls driven rank by rank (``dcp``,
several), or `dcpstore.save` (``dcpstore``; ranks are threads). Between them and the model lie the
retries, with the model's clock. A killed rank falls silent: it posts nothing to the others, who
wait for their deadline, in a time of their own. See `campaign.models` for what a fault is where.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import dcpstore
from campaign import judge
from campaign.models import URLS, Died, ModelUploads, Raw, World, open_model
from campaign.schedule import Fault, Schedule
from dcpstore.audit.prune import Place, Rules, find_leftovers, remove
from dcpstore.ranks.exchange import BoardGroup
from dcpstore.ranks.transport import BoardLostError
from dcpstore.store import Store
from dcpstore.store.retry import AdaptiveLimiter, RetryingStore, RetryPolicy
from dcpstore.testing.ranks import MemoryBoard, MemoryLanes, MemoryWires
from rank_time import RankTime

DAY_S = 86400.0
_SOMETIMES = 0.12
_JOIN_S = 120.0  # real time: whoever takes longer hangs
_ORPHANS = ("__0_0.00000000deadbeef.distcp", ".dcpstore-00000000deadbeef")


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a schedule.

    Attributes:
        schedule: What was run.
        problems: Broken promises, in words.
        fired: The faults that happened.
        reports: What each actor said.
        log: Every request, and the fault that it met.
    """

    schedule: Schedule
    problems: list[str]
    fired: list[Fault]
    reports: list[judge.Report]
    log: list[str]


def run_verbs(schedule: Schedule) -> Result:
    """Run one schedule on its model and judge what it leaves."""
    return _Run(schedule).run()


class _Run:
    """One schedule, from an empty or an old folder to the verdict."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.shapes = judge.shapes_of(schedule.ranks, schedule.flags)
        letters = ("A", *([schedule.other] if schedule.other else ()))
        self.world = World(schedule, letters)
        self.reports: list[judge.Report] = []
        self.loads: list[tuple[str, Mapping[str, Any]]] = []
        self.may_replace = schedule.has_old or "force" in schedule.flags
        self.old = judge.Save("O", 1) if schedule.has_old else None
        self._random = random.Random(str(schedule))

    def run(self) -> Result:
        schedule, world = self.schedule, self.world
        self._furnish()
        actors: dict[str, Callable[[], None]] = {"A": lambda: self._save("A")}
        if schedule.other is not None:
            actors[schedule.other] = {
                "B": lambda: self._save("B"),
                "R": lambda: self._load("R0"),
                "P": lambda: self._prune("P0"),
            }[schedule.other]
        self._together(actors)
        world.settle()
        if ".metadata" in world.objects and not world.was_overtaken and self._is_chosen():
            self._load("Y0")
        objects = _bytes_of(world.objects)
        evidence = judge.Evidence(
            shapes=self.shapes,
            old=self.old,
            reports=self.reports,
            objects=objects,
            may_replace=self.may_replace,
            loads=self.loads,
            had_none=world.was_without,
        )
        problems = self._problems_of_others(objects)
        if schedule.operation == "prune" or self._is_chosen():
            problems += self._prune_last(evidence)
        problems += judge.judge(evidence)
        if not problems and self._is_chosen():
            problems += self._save_again()
        if schedule.transport == "sim-fsspec":
            unpromised = self._unpromised(objects)
            problems = [one for one in problems if not one.startswith(unpromised)]
        return Result(schedule, problems, list(world.script.fired), self.reports, world.script.log)

    def _unpromised(self, objects: Mapping[str, bytes]) -> tuple[str, ...]:
        """Return the promises that a filesystem without preconditions does not let us keep.

        It looks first and puts then, so two that create at one moment may both return. And a put
        that acts when another save has replaced its checkpoint and swept it is not kept away.
        Whoever swept its own objects, though, has to answer for it.
        """
        if not self.world.was_overtaken:
            return ("(5)",)
        needed = judge.read_checkpoint(objects, self.shapes).referenced
        by = {self.world.dropped_by.get(key) for key in needed - set(objects)}
        return ("(5)",) if self.world.history[-1] in by else ("(1)", "(2)", "(3)", "(5)", "(8)")

    def _is_chosen(self) -> bool:
        """Decide whether to do what costs as much again as the schedule itself."""
        return self._random.random() < _SOMETIMES

    def _furnish(self) -> None:
        schedule, world = self.schedule, self.world
        if self.old is not None:
            flags = tuple(flag for flag in schedule.flags if flag in ("apart", "many"))
            for key, raw in _old_objects(schedule.transport, schedule.ranks, flags).items():
                world.keep(key, raw.data, raw.mark)
            world.history.clear()
            world.num_made = 1000  # the old objects' marks come from another world's numbers
        if schedule.operation == "prune":
            for key in _ORPHANS:
                world.keep(key, b"what a killed save left", "0")
        if schedule.transport == "sim-fsspec" and "bare-etag" in schedule.flags:
            world.objects = {
                key: Raw(raw.data, "", raw.modified_s) for key, raw in world.objects.items()
            }
        world.sleep(3 * DAY_S)

    def _together(self, actors: Mapping[str, Callable[[], None]]) -> None:
        def work(letter: str, act: Callable[[], None]) -> None:
            try:
                act()
            finally:
                self.world.end(letter)

        if len(actors) == 1:
            work("A", actors["A"])
            return
        threads = {
            letter: threading.Thread(target=work, args=(letter, act), daemon=True)
            for letter, act in actors.items()
        }
        for thread in threads.values():
            thread.start()
        for letter, thread in threads.items():
            thread.join(_JOIN_S)
            if thread.is_alive():
                self.reports.append(judge.Report(f"{letter}0", "hung", "it waits and waits"))

    # Savers ---------------------------------------------------------------------------------

    def _save(self, letter: str) -> None:
        save = judge.Save(letter, 2)
        if self.schedule.entry == "dcpstore":
            self._save_by_dcpstore(letter, save)
        elif self.schedule.ranks == 1:
            self._save_by_dcp(letter, save)
        else:
            self._save_rank_by_rank(letter, save)

    def _save_by_dcp(self, letter: str, save: judge.Save) -> None:
        actor, writer = f"{letter}0", self._writer(f"{letter}0")
        error: BaseException | None = None
        try:
            dcp.save(self._state(save, 0), storage_writer=writer, no_dist=True)
        except BaseException as raised:
            error = raised
            self._sweep_unsealed([writer])
        self._report(actor, error, save)

    def _save_rank_by_rank(self, letter: str, save: judge.Save) -> None:
        """Call planners and writers in DCP's order; the calls of each step rank after rank."""
        ranks = range(self.schedule.ranks)
        writers = [self._writer(f"{letter}{rank}") for rank in ranks]
        planners = [DefaultSavePlanner() for _ in ranks]
        errors: dict[int, BaseException] = {}
        rank = 0
        try:
            local = []
            for rank in ranks:
                planner, writer = planners[rank], writers[rank]
                planner.set_up_planner(self._state(save, rank), writer.storage_meta(), rank == 0)
                writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
                local.append(writer.prepare_local_plan(planner.create_local_plan()))
            rank = 0
            plans, metadata = planners[0].create_global_plan(local)
            plans = writers[0].prepare_global_plan(plans)
            results = []
            for rank in ranks:
                try:
                    plan = planners[rank].finish_plan(plans[rank])
                    results.append(writers[rank].write_data(plan, planners[rank]).value())
                except BaseException as error:
                    errors[rank] = error
            if not errors:
                rank = 0
                writers[0].finish(metadata, results)
        except BaseException as error:
            errors[rank] = error
        if errors:
            self._sweep_unsealed(writers)
        for rank, error in errors.items():
            self._report(f"{letter}{rank}", error, save)
        if not errors:
            self._report(f"{letter}0", None, save)

    def _sweep_unsealed(self, writers: list[dcpstore.ObjectStoreWriter]) -> None:
        """Do on each rank what the documentation says to do after a save that failed."""
        if "sweep" not in self.schedule.flags:
            return
        for writer in writers:
            try:
                writer.sweep_unsealed()
            except Died:
                continue

    def _save_by_dcpstore(self, letter: str, save: judge.Save) -> None:
        ranks = self.schedule.ranks

        def one(rank: int, group: Any = None) -> None:
            actor, error = f"{letter}{rank}", None
            try:
                dcpstore.save(
                    self._state(save, rank),
                    storage_writer=self._writer(actor),
                    process_group=group,
                    progress=False,
                )
            except BaseException as raised:
                error = raised
            self._report(actor, error, save)

        if ranks == 1:
            one(0)
            return
        team = _Team(ranks, lambda rank: f"{letter}{rank}" in self.world.script.dead)
        for rank in team.run(one):
            self.reports.append(
                judge.Report(f"{letter}{rank}", "hung", "it waits for others", save)
            )

    def _state(self, save: judge.Save, rank: int) -> dict[str, Any]:
        return judge.rank_state(save, rank, self.schedule.ranks, self.schedule.flags)

    def _writer(self, actor: str) -> dcpstore.ObjectStoreWriter:
        return dcpstore.ObjectStoreWriter(
            URLS[self.schedule.transport],
            overwrite=self.may_replace,
            config=_config(self.schedule.flags),
            store_opener=self._opener(actor),
            sleep=self.world.sleep,
            clock=self.world.clock,
        )

    def _opener(self, actor: str, schedule: Schedule | None = None) -> Callable[..., Store]:
        world = self.world

        def opener(*_: Any, retry: RetryPolicy | None = None, **__: Any) -> Store:
            return RetryingStore(
                open_model(world, schedule or self.schedule, actor),
                retry,
                AdaptiveLimiter(clock=world.clock, sleep=world.sleep),
                clock=world.clock,
                sleep=world.sleep,
                rng=random.Random(actor),
            )

        return opener

    def _report(
        self, actor: str, error: BaseException | None, save: judge.Save | None = None
    ) -> None:
        if actor in self.world.script.dead:
            self.reports.append(judge.Report(actor, "died", "", save))
        else:
            self.reports.append(judge.report_of(actor, error, save))

    # The others -----------------------------------------------------------------------------

    def _load(self, actor: str) -> None:
        state: dict[str, Any] = {
            key: torch.zeros(shape, dtype=torch.float64) for key, shape in self.shapes.items()
        }
        state["code"] = 0
        reader = dcpstore.ObjectStoreReader(
            URLS[self.schedule.transport], store_opener=self._opener(actor)
        )
        try:
            if self.schedule.entry == "dcp":
                dcp.load(state, storage_reader=reader, no_dist=True)
            else:
                dcpstore.load(state, storage_reader=reader, progress=False)
        except BaseException as error:
            self._report(actor, error)
        else:
            self.loads.append((actor, state))
            self._report(actor, None)

    def _prune(self, actor: str) -> None:
        """Prune beside the save, or, where the two do not meet, two days after it."""
        if self.schedule.meet is None:
            self.world.settle()
            self.world.sleep(2 * DAY_S)
        try:
            self._prune_as(actor, self.schedule)
        except BaseException as error:
            self._report(actor, error)
        else:
            self._report(actor, None)

    def _prune_as(self, actor: str, schedule: Schedule) -> None:
        uploads = ModelUploads(self.world) if schedule.transport == "sim-file" else None
        place = Place(
            URLS[schedule.transport],
            store_opener=self._opener(actor, schedule),
            uploads_opener=lambda *_, **__: uploads,
        )
        with place as at:
            remove(at, find_leftovers(at, Rules(), self.world.clock))

    def _prune_last(self, evidence: judge.Evidence) -> list[str]:
        """Prune when everything is two days old, without faults."""
        self.world.sleep(2 * DAY_S)
        try:
            self._prune_as("Z0", Schedule("prune", transport=self.schedule.transport))
        except Exception as error:
            return [f"(8) the last prune failed: {error!r}"]
        evidence.pruned = _bytes_of(self.world.objects)
        evidence.open_uploads = sorted(self.world.unfinished)
        return []

    def _save_again(self) -> list[str]:
        """Save over what is there: a fault of before stands in nobody's way."""
        flags = tuple(flag for flag in self.schedule.flags if flag not in ("force", "old"))
        self.schedule = Schedule("overwrite", "dcpstore", 1, self.schedule.transport, flags=flags)
        self.may_replace = True
        before, self.reports = self.reports, []
        self._save("Y")
        said, self.reports = self.reports, before
        problems = [f"(9) {one.actor} failed afterwards: {one.text}" for one in said if one.text]
        reading = judge.read_checkpoint(_bytes_of(self.world.objects), judge.shapes_of(1))
        if reading.save != judge.Save("Y", 2):
            problems.append(f"(9) a save of afterwards returned, and {reading} lies there")
        return problems

    def _problems_of_others(self, objects: Mapping[str, bytes]) -> list[str]:
        """Return what reader and prune did that they should not; see also `judge`."""
        problems: list[str] = []
        disturbed = {fault.actor for fault in self.world.script.fired}
        for one in self.reports:
            if one.save is not None or one.outcome in ("ok", "died"):
                continue
            if one.actor == "Y0":
                problems.append(f"(9) what lies there does not load: {one.text}")
            if one.outcome == "raw" and "metadata is None" not in one.text:  # DCP's own words
                problems.append(f"{one.actor} raised what is no error of dcpstore: {one.text}")
            if one.actor not in disturbed and "CorruptError" in one.text:
                problems.append(f"(6) {one.actor} calls corrupt what is not: {one.text}")
            if one.actor not in disturbed and self.old and not self.world.history:
                problems.append(f"(6) {one.actor} failed though nothing changed: {one.text}")
        return problems


def _config(flags: tuple[str, ...]) -> dcpstore.WriteConfig:
    knobs: dict[str, Any] = {}
    if "apart" in flags:
        knobs["embed_manifest_bytes"] = 0
    if "many" in flags:
        knobs["object_bytes"] = 3000
    return dcpstore.WriteConfig(**knobs)


@lru_cache(maxsize=64)
def _old_objects(transport: str, ranks: int, flags: tuple[str, ...]) -> dict[str, Raw]:
    """Save what was there before, by the same engine, once per form."""
    run = _Run(Schedule("first_save", "dcp", ranks, transport, flags=tuple(sorted(flags))))
    save = run._save_by_dcp if ranks == 1 else run._save_rank_by_rank
    save("O", judge.Save("O", 1))
    assert {one.outcome for one in run.reports} == {"ok"}, run.reports
    return run.world.objects


def _bytes_of(objects: Mapping[str, Raw]) -> dict[str, bytes]:
    return {key: raw.data for key, raw in objects.items()}


class _Team:
    """Ranks that are threads, of which one that is dead says nothing to the others.

    Args:
        num_ranks: How many.
        is_dead: Whether a rank is.
    """

    def __init__(self, num_ranks: int, is_dead: Callable[[int], bool]) -> None:
        self._num_ranks = num_ranks
        self._is_dead = is_dead
        self._time = RankTime(num_ranks)
        self._board = MemoryBoard(self._time.wait)
        self._wires = MemoryWires(self._time.wait)

    def run(self, act: Callable[[int, Any], None]) -> list[int]:
        """Let all ranks act; return those that do not end."""

        def work(rank: int) -> None:
            group = BoardGroup(
                _Mortal(self._board, lambda: self._is_dead(rank)),
                rank=rank,
                size=self._num_ranks,
                coordinator=0,
                deadline_s=1800.0,
                namespace="campaign",
                lane_maker=lambda name, _: MemoryLanes(name, rank, self._wires),
                clock=self._time,
            )
            with self._time.at_work(rank):
                try:
                    with group:
                        act(rank, group)
                except BaseException:
                    if not self._is_dead(rank):
                        raise

        threads = [
            threading.Thread(target=work, args=(rank,), daemon=True)
            for rank in range(self._num_ranks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_JOIN_S)
        return [rank for rank, thread in enumerate(threads) if thread.is_alive()]


class _Mortal:
    """A board as one rank sees it: when the rank is dead, it posts and hears nothing."""

    def __init__(self, board: MemoryBoard, is_dead: Callable[[], bool]) -> None:
        self._board = board
        self._is_dead = is_dead

    def __getattr__(self, name: str) -> Any:
        if self._is_dead():
            raise BoardLostError(0, "this rank is dead")
        return getattr(self._board, name)
