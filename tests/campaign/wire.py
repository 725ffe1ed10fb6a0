"""Runs schedules on the wire: thread ranks and real clients against the campaign's S3 server."""

from __future__ import annotations

import itertools
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import dcpstore
from campaign.judge import (
    Evidence,
    Report,
    Save,
    judge,
    rank_state,
    read_checkpoint,
    report_of,
    shapes_of,
)
from campaign.schedule import Fault, Schedule, parse
from campaign.server import BUCKET, Place, S3Server
from dcpstore import ObjectStoreReader, ObjectStoreWriter, ReadConfig, WriteConfig
from dcpstore.audit import prune as leftovers
from dcpstore.store import Store, open_store
from dcpstore.store.folder import parse_location
from dcpstore.store.options import BotocoreCredentials
from dcpstore.store.retry import AdaptiveLimiter, RetryingStore, RetryPolicy
from dcpstore.store.s3fs_engine import S3fsStore
from dcpstore.store.uploads import OpenUploads, S3Uploads
from dcpstore.testing.ranks import run_ranks

OLD, A, B = Save("O", 1), Save("A", 7), Save("B", 8)
DAY_S = 86400.0
HUNG_S = 60.0
RETRY = RetryPolicy(3, 0.001, 0.004, 10.0)
_PART_BYTES = 5 << 20


@dataclass(slots=True)
class Outcome:
    """What running a schedule showed.

    Attributes:
        schedule: What was run.
        problems: Broken promises.
        fired: Faults that met a request.
        log: Every request, and what became of each actor.
    """

    schedule: Schedule
    problems: list[str]
    fired: list[Fault]
    log: list[str] = field(default_factory=list)


_clients: dict[tuple[str, str, str], Any] = {}
_clients_lock = threading.Lock()


def client_of(endpoint_url: str, actor: str, engine: str) -> Any:
    """Return an actor's store of the whole bucket, made once in each process."""
    with _clients_lock:
        known = endpoint_url, actor, engine
        if known not in _clients:
            _clients[known] = _open(endpoint_url, {"key": actor, "secret": "secret"}, engine)
        return _clients[known]


def _open(endpoint_url: str, options: dict[str, Any], engine: Any) -> Any:
    more = {"endpoint_url": endpoint_url, "client_kwargs": {"region_name": "us-east-1"}}
    store: Any = open_store(
        f"s3://{BUCKET}", storage_options={**options, **more}, engine=engine, retry=RETRY
    )
    return store.inner


@dataclass(frozen=True, slots=True)
class Opener:
    """Opens an actor's store for a writer or a reader. Pickles.

    Attributes:
        endpoint_url: Of the server.
        actor: Who opens it.
        engine: ``obstore`` or ``fsspec``.
        renews: Whether its credentials are short-lived.
    """

    endpoint_url: str
    actor: str
    engine: str = "obstore"
    renews: bool = False

    def __call__(self, url: str, **_: Any) -> Store:
        """Open the store at a folder of the bucket."""
        if self.renews:
            client = _renewing(self.endpoint_url, self.actor)
        else:
            client = client_of(self.endpoint_url, self.actor, self.engine)
        inner = Rooted(client, url.rpartition("/")[2])
        return RetryingStore(inner, RETRY, AdaptiveLimiter(window_s=0.01))


class _ShortLived:
    """A botocore session whose credentials are others each time."""

    def __init__(self, actor: str) -> None:
        self._actor = actor
        self._number = itertools.count()

    def get_credentials(self) -> _ShortLived:
        return self

    def get_frozen_credentials(self) -> Any:
        key = f"{self._actor}.{next(self._number)}"
        return types.SimpleNamespace(access_key=key, secret_key="secret", token="token")


def _renewing(endpoint_url: str, actor: str) -> Any:
    """Return an obstore store that asks botocore's chain for credentials before they expire.

    The clock is behind, so what the chain gave is about to expire at once, and obstore asks
    again as often as it does then: every 100 ms.
    """
    store = _open(endpoint_url, {"key": actor, "secret": "secret"}, "obstore")
    session = _ShortLived(actor)
    settings = store._clients._settings
    for name in ("access_key_id", "secret_access_key"):
        settings.config.pop(name)
    settings.credential_provider = BotocoreCredentials(
        now=lambda: datetime.now(timezone.utc) - timedelta(minutes=8),
        session_factory=lambda _: session,
    )
    return store


class Rooted:
    """A folder of a store whose client many folders share: a client takes 8 ms to make."""

    def __init__(self, inner: Any, folder: str) -> None:
        self._inner = inner
        self._root = f"{folder}/"
        self.url = f"{inner.url}/{folder}"
        self.capabilities = inner.capabilities

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        call = getattr(self._inner, verb)
        return lambda key, *args, **options: call(self._root + key, *args, **options)

    def list(self, prefix: str = "") -> Any:
        for info in self._inner.list(self._root + prefix):
            yield type(info)(
                info.key.removeprefix(self._root), info.size_bytes, info.etag, info.modified
            )

    def folders(self, prefix: str = "") -> Sequence[str]:
        found: Sequence[str] = self._inner.folders(self._root + prefix)
        return found

    def delete_many(self, keys: Sequence[str]) -> None:
        self._inner.delete_many([self._root + key for key in keys])

    def close(self) -> None:
        pass


def nap(seconds: float) -> None:
    """Sleep, but not long: nobody here needs to be waited for."""
    time.sleep(min(seconds, 0.004))


def settings(schedule: Schedule) -> dict[str, Any]:
    """Return the fields of a `WriteConfig` under which small states are quick."""
    return {
        "part_bytes": _PART_BYTES,
        "budget_bytes": 4 * _PART_BYTES,
        "object_bytes": 1024 if "many" in schedule.flags else 8 << 20,
        "embed_manifest_bytes": 0 if "apart" in schedule.flags else 8 << 20,
        "max_attempts": RETRY.max_attempts,
    }


@dataclass(frozen=True, slots=True)
class Job:
    """One save, for processes that play its ranks. Pickles.

    Attributes:
        schedule: As text.
        endpoint_url: Of the server.
        url: Of the checkpoint.
        saver: ``A`` or ``B``.
        save: What is saved.
        overwrite: Whether it may replace what is there.
    """

    schedule: str
    endpoint_url: str
    url: str
    saver: str
    save: Save
    overwrite: bool

    def writer(self, rank: int) -> ObjectStoreWriter:
        """Make the writer of one rank."""
        schedule, actor = parse(self.schedule), f"{self.saver}{rank}"
        renews = "renew" in schedule.flags and self.saver == "A"
        return ObjectStoreWriter(
            self.url,
            storage_options={"key": actor, "secret": "secret", "endpoint_url": self.endpoint_url},
            overwrite=self.overwrite,
            config=WriteConfig(**settings(schedule)),
            store_opener=Opener(self.endpoint_url, actor, engine_of(schedule), renews),
            sleep=nap,
        )


class Savers(Protocol):
    """Plays the ranks of savers."""

    def save(self, job: Job) -> list[Report]:
        """Save on as many ranks as the schedule says."""

    def kill(self, actor: str) -> None:
        """End a rank as if its machine were lost."""


class Wire:
    """Runs schedules against one server. Thread-safe.

    Args:
        server: The server.
        savers: Processes that play the ranks of savers; None for threads.
    """

    def __init__(self, server: S3Server, savers: Savers | None = None) -> None:
        self.server = server
        self._savers = savers
        self._old_lock = threading.Lock()
        self._old: dict[Schedule, Mapping[str, bytes]] = {}

    def run(self, schedule: Schedule) -> Outcome:
        """Run one schedule and judge what it leaves."""
        place = self.server.open(schedule, self._savers.kill if self._savers else None)
        try:
            place.is_lame = True
            self._prepare(place, schedule)
            place.is_lame = False
            run = _Run(self, place, schedule, self._savers)
            run.run()
            self.server.call(lambda: place.do_late(all_of_them=True))
            place.is_lame = True
            return self._judge(place, schedule, run)
        finally:
            self.server.close(place)

    def _judge(self, place: Place, schedule: Schedule, run: _Run) -> Outcome:
        flags = schedule.flags
        evidence = Evidence(
            shapes=shapes_of(schedule.ranks, flags),
            old=OLD if schedule.has_old else None,
            reports=run.reports,
            objects=place.contents(),
            may_replace=schedule.has_old or "force" in flags,
            loads=run.loads,
            had_none=place.had_none,
        )
        reading = read_checkpoint(evidence.objects, evidence.shapes)
        if place.uploads or set(evidence.objects) - reading.referenced:
            self.prune(place, schedule, ahead_s=3 * DAY_S)
            evidence.pruned = place.contents()
            evidence.open_uploads = [one.key for one in place.uploads.values()]
        problems = judge(evidence)
        log = [*place.script.log, *(f"{r.actor}: {r.outcome} {r.text}" for r in run.reports)]
        log.append(f"in the end: {reading}")
        return Outcome(schedule, problems, list(place.script.fired), log)

    # What lies there before ------------------------------------------------------------------

    def _prepare(self, place: Place, schedule: Schedule) -> None:
        long_ago = time.time() - 3 * DAY_S
        if schedule.has_old:
            for key, data in self._old_objects(schedule).items():
                place.put(key, data, long_ago)
        if schedule.operation == "prune":
            for key in ("__0_0.00000000000000aa.distcp", ".dcpstore-00000000000000aa"):
                place.put(key, b"left by a saver that was killed", long_ago)

    def _old_objects(self, schedule: Schedule) -> Mapping[str, bytes]:
        flags = ("apart", "parts", "sharded", "fsdp")
        kept = tuple(flag for flag in schedule.flags if flag in flags)
        plain = Schedule("first_save", ranks=schedule.ranks, flags=kept)
        with self._old_lock:
            if plain not in self._old:
                place = self.server.open(plain)
                run = _Run(self, place, plain, None)
                run.save("O", OLD, overwrite=False)
                assert {one.outcome for one in run.reports} == {"ok"}, run.reports
                self._old[plain] = place.contents()
                self.server.close(place)
            return self._old[plain]

    # Pruning ---------------------------------------------------------------------------------

    def prune(self, place: Place, schedule: Schedule, *, ahead_s: float = 0.0) -> None:
        """Prune as ``dcpstore prune --yes`` does.

        Args:
            place: Where.
            schedule: Which engine it goes through.
            ahead_s: How far the clock is ahead.
        """
        at = leftovers.Place(
            place.url,
            self.server.options("P0"),
            store_opener=Opener(self.server.endpoint_url, "P0", engine_of(schedule)),
            uploads_opener=lambda *_, **__: self._uploads(place),
        )
        found = leftovers.find_leftovers(at, leftovers.Rules(), lambda: time.time() + ahead_s)
        pruned = leftovers.remove(at, found)
        for _, error in pruned.failed:
            raise error

    def _uploads(self, place: Place) -> OpenUploads:
        store: S3fsStore = client_of(self.server.endpoint_url, "P0", "fsspec")
        return S3Uploads(store, parse_location(place.url), RETRY)


def engine_of(schedule: Schedule) -> str:
    """Return the engine that a schedule's clients use."""
    return "fsspec" if schedule.transport == "s3fs" else "obstore"


class _Run:
    """One schedule under way: its actors and what they say."""

    def __init__(self, wire: Wire, place: Place, schedule: Schedule, savers: Savers | None) -> None:
        self._wire = wire
        self._savers = savers
        self._place = place
        self._schedule = schedule
        self.reports: list[Report] = []
        self.loads: list[tuple[str, Mapping[str, Any]]] = []

    def run(self) -> None:
        """Let all actors do their part.

        Raises:
            BaseException: What is wrong with the campaign itself.
        """
        other = self._schedule.other
        overwrite = self._schedule.has_old or "force" in self._schedule.flags
        with ThreadPoolExecutor(2) as executor:
            saver = executor.submit(self._be_saver, overwrite)
            beside = executor.submit(self._be_other, other, overwrite) if other else None
            saver.result()
            if beside is not None:
                beside.result()

    def _be_saver(self, overwrite: bool) -> None:
        try:
            self.save("A", A, overwrite)
        finally:
            self._place.met.set()

    def _be_other(self, other: str, overwrite: bool) -> None:
        """Begin when A has come to where they meet, or has ended."""
        self._place.met.wait()
        try:
            if other == "B":
                self.save("B", B, overwrite)
            elif other == "R":
                self._load()
            else:
                self._prune()
        finally:
            self._wire.server.call(self._place.end_other)

    def _prune(self) -> None:
        error = _error_of(lambda: self._wire.prune(self._place, self._schedule))
        self.reports.append(self._report("P0", error))

    def _report(self, actor: str, error: BaseException | None, save: Save | None = None) -> Report:
        if actor in self._place.script.dead:
            return Report(actor, "died", "", save)
        return report_of(actor, error, save)

    # Saving ----------------------------------------------------------------------------------

    def save(self, saver: str, save: Save, overwrite: bool) -> None:
        """Save on all ranks of a saver, and note what each says."""
        if self._savers is not None:
            self.reports += self._savers.save(self._job(saver, save, overwrite))
            return
        writers = [
            self._writer(f"{saver}{rank}", overwrite) for rank in range(self._schedule.ranks)
        ]
        by_rank = self._save_by_dcp if self._schedule.entry == "dcp" else self._save_by_us
        errors = by_rank(writers, save)
        reports = [
            self._report(f"{saver}{rank}", errors[rank], save) for rank in range(len(errors))
        ]
        self.reports += reports

    def _job(self, saver: str, save: Save, overwrite: bool) -> Job:
        server = self._wire.server
        text, url = str(self._schedule), self._place.url
        return Job(text, server.endpoint_url, url, saver, save, overwrite)

    def _writer(self, actor: str, overwrite: bool) -> ObjectStoreWriter:
        return self._job(actor[0], A, overwrite).writer(int(actor[1:]))

    def _state(self, save: Save, rank: int) -> dict[str, Any]:
        schedule = self._schedule
        return rank_state(save, rank, schedule.ranks, schedule.flags, whole=save == OLD)

    def _save_by_us(
        self, writers: Sequence[ObjectStoreWriter], save: Save
    ) -> list[BaseException | None]:
        if len(writers) == 1:
            state = self._state(save, 0)
            return [
                _error_of(lambda: dcpstore.save(state, storage_writer=writers[0], progress=False))
            ]
        run = run_ranks(
            len(writers),
            lambda group: dcpstore.save(
                self._state(save, group.rank),
                storage_writer=writers[group.rank],
                process_group=group,
                progress=False,
            ),
            wait_s=HUNG_S,
        )
        for rank in run.running:
            run.errors[rank] = TimeoutError(f"rank {rank} still runs")
        return [run.errors.get(rank) for rank in range(len(writers))]

    def _save_by_dcp(
        self, writers: Sequence[ObjectStoreWriter], save: Save
    ) -> list[BaseException | None]:
        states = [self._state(save, rank) for rank in range(len(writers))]
        if len(writers) == 1:
            error = _error_of(lambda: _dcp_save(states[0], writers[0]))
        else:
            error = _error_of(lambda: dcp_save_of_ranks(writers, states))
        if error is not None and "sweep" in self._schedule.flags:
            saver = "A" if save == A else "B"
            for rank, writer in enumerate(writers):
                if f"{saver}{rank}" not in self._place.script.dead:
                    writer.sweep_unsealed()
        return [error] * len(writers)

    # Loading ---------------------------------------------------------------------------------

    def _load(self) -> None:
        shapes = shapes_of(self._schedule.ranks, self._schedule.flags)
        state: dict[str, Any] = {
            key: torch.full(shape, -1.0, dtype=torch.float64) for key, shape in shapes.items()
        }
        state["code"] = -1
        reader = ObjectStoreReader(
            self._place.url,
            storage_options=self._wire.server.options("R0"),
            config=ReadConfig(max_attempts=RETRY.max_attempts),
            store_opener=Opener(self._wire.server.endpoint_url, "R0", engine_of(self._schedule)),
        )
        if self._schedule.entry == "dcp":
            error = _error_of(lambda: _dcp_load(state, reader))
        else:
            error = _error_of(lambda: dcpstore.load(state, storage_reader=reader, progress=False))
        self.reports.append(self._report("R0", error))
        if error is None:
            self.loads.append(("R0", state))


def _error_of(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except (Exception, CheckpointException) as error:
        return error
    return None


def _dcp_save(state: dict[str, Any], writer: Any) -> None:
    dcp.save(state, storage_writer=writer, no_dist=True)


def _dcp_load(state: dict[str, Any], reader: Any) -> None:
    dcp.load(state, storage_reader=reader, no_dist=True)


def dcp_save_of_ranks(
    writers: Sequence[ObjectStoreWriter], states: Sequence[dict[str, Any]]
) -> None:
    """Make the calls of ``dcp.save`` for ranks that are threads, which gloo cannot join.

    Raises:
        CheckpointException: As DCP does, on every rank, with what each rank raised.
    """
    planners = [DefaultSavePlanner() for _ in writers]

    def plan(rank: int) -> Any:
        planner, writer = planners[rank], writers[rank]
        planner.set_up_planner(states[rank], writer.storage_meta(), rank == 0)
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        return writer.prepare_local_plan(planner.create_local_plan())

    def write(rank: int) -> Any:
        planner = planners[rank]
        return writers[rank].write_data(planner.finish_plan(plans[rank]), planner).wait()

    def make_global_plan(_: int) -> Any:
        global_plan, metadata = planners[0].create_global_plan(local)
        return writers[0].prepare_global_plan(global_plan), metadata

    local = _on_ranks("plan", range(len(writers)), plan)
    ((plans, metadata),) = _on_ranks("plan", [0], make_global_plan)
    results = _on_ranks("write", range(len(writers)), write)
    _on_ranks("write", [0], lambda _: writers[0].finish(metadata, results))


def _on_ranks(step: str, ranks: Sequence[int], call: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(ranks)) as executor:
        futures = [executor.submit(call, rank) for rank in ranks]
    failures = {rank: future.exception() for rank, future in zip(ranks, futures, strict=True)}
    raised = {rank: (error, None) for rank, error in failures.items() if error is not None}
    if raised:
        raise CheckpointException(step, raised)  # type: ignore[arg-type]
    return [future.result() for future in futures]
