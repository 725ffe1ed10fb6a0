"""The folder of a training run: its steps, and what is known beside them. No torch.

::

    {run}/step-{n}/.metadata                       step n is sealed
    {run}/.dcpstore-run/claim.json                 which run it is, and which job saves to it now
    {run}/.dcpstore-run/pins/{folder}/{token}      a step that stays whatever the policies say
    {run}/.dcpstore-run/metrics/{folder}.json      metrics that were reported after the seal
    {run}/.dcpstore-run/deleting/{folder}/{token}  a step that is being removed

Each is an object of its own that one writer puts in one request, so that no two writers lose what
the other wrote; tokens tell writers apart, so that nobody takes back what another put. Folders
that other tools name after a step are steps too. See ``docs/design/014-runs.md``.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any, TypeAlias, TypeVar

from typing_extensions import Self

from dcpstore.config import ReadConfig
from dcpstore.errors import (
    AlreadyExistsError,
    CheckpointError,
    ConflictError,
    CorruptError,
    NotFoundError,
    StoreError,
)
from dcpstore.format.seal import METADATA_KEY, Facts, read_tail
from dcpstore.manager.policies import Layout, StepFacts, step_of_folder
from dcpstore.store import open_store
from dcpstore.store.base import Store
from dcpstore.store.folder import Folder
from dcpstore.store.retry import read_twice_if_damaged
from dcpstore.text import parse_json
from dcpstore.write.commit import ConditionalPut, Found, probe

logger = logging.getLogger(__name__)

RECORDS = ".dcpstore-run/"
"""The folder of what is known beside the steps."""

CLAIM_KEY = RECORDS + "claim.json"
PINS = RECORDS + "pins/"
METRICS = RECORDS + "metrics/"
DELETING = RECORDS + "deleting/"

_TAIL_BYTES = 64 << 10  # hold every footer
_MAX_REQUESTS = 16
_SILENT = timedelta(days=1)  # no job that is alive is not heard of for as long
# Where accelerate puts a model that it shards; its checkpoints have no metadata of their own.
_INNER_FOLDERS = ("", "pytorch_model_fsdp_0/")
_WEIGHTS = ("model.safetensors.index.json", "model.safetensors")
_T = TypeVar("_T")
_Reported: TypeAlias = "tuple[str | None, Mapping[str, float]]"  # of which save, and its metrics


def metrics_key(folder: str) -> str:
    """Name the metrics that were reported for a step after its seal."""
    return f"{METRICS}{folder}.json"


def _folder_in(key: str, below: str) -> str:
    return key.removeprefix(below).partition("/")[0]


@dataclass(frozen=True, slots=True)
class SealedStep:
    """A step that can be loaded.

    Attributes:
        step: Number of completed steps.
        folder: Its name below the run.
        url: Of the checkpoint.
        layout: Who wrote it.
        save_id: Of the save; None if another writer's.
        facts: Step, run and metrics that were sealed with it.
        saved_at: When it was sealed, by the store's clock; None where that does not tell.
        num_bytes: Length of its metadata.
    """

    step: int
    folder: str
    url: str
    layout: Layout
    save_id: str | None = None
    facts: Facts = field(default_factory=Facts)
    saved_at: datetime | None = None
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Which run a folder holds, and which job saves to it.

    Attributes:
        run: Id of the run, 16 hex digits; that of the first claim for ever.
        owner: Drawn by the job that holds it.
        host: Where that job's coordinator runs.
        pid: Its process there.
        since: When the job claimed the run.
        heard: When it was last heard of.
        step: Its last sealed step but one, or the one being sealed; None before the first.
        resumed: The step that it was restored from, until a newer one is sealed.
        released: Whether the job has ended well.
    """

    run: str
    owner: str
    host: str
    pid: int
    since: str
    heard: str
    step: int | None = None
    resumed: int | None = None
    released: bool = False

    def __post_init__(self) -> None:
        for name in ("run", "owner", "host", "since", "heard"):
            if type(getattr(self, name)) is not str:
                raise ValueError(f"{name} is no text")
        for name in ("step", "resumed"):
            if type(getattr(self, name)) not in (int, type(None)):
                raise ValueError(f"{name} is no number")
        if type(self.pid) is not int or type(self.released) is not bool:
            raise ValueError("pid or released is of another type")

    @property
    def is_held(self) -> bool:
        """Whether its job may still be alive, by this machine's clock."""
        if self.released:
            return False
        try:
            silent = datetime.now(timezone.utc) - datetime.fromisoformat(self.heard)
        except (ValueError, TypeError):
            return True
        return silent < _SILENT

    def __str__(self) -> str:
        return f"a job on {self.host} (process {self.pid}), which was last heard of at {self.heard}"


class Run:
    """The folder of a training run. A context manager; thread-safe.

    Args:
        url: Of the run.
        storage_options: fsspec's options for its protocol.
        config: Engine and retries.
        store_opener: Opens the store, for tests.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
        config: ReadConfig | None = None,
        *,
        store_opener: Callable[..., Store] = open_store,
    ) -> None:
        self._folder = Folder(url, storage_options, config or ReadConfig(), store_opener)
        self.url = self._folder.url.rstrip("/")
        self.token = secrets.token_hex(8)
        """Tells this one's claim and notes of removal from those of others."""
        self._seen: dict[str, SealedStep] = {}
        self._claim: Claim | None = None
        self._claim_there: Found | None = None  # as this job put it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the store. Idempotent."""
        self._folder.close()

    @property
    def store(self) -> Store:
        """Rooted at the run."""
        return self._folder.open()

    @property
    def place(self) -> Folder:
        """The run's folder, and how it is reached."""
        return self._folder

    # --- steps -------------------------------------------------------------------------

    def url_of(self, step: int) -> str:
        """Return where a step is saved to."""
        return f"{self.url}/step-{step}"

    def candidates(self) -> list[tuple[int, str]]:
        """List the folders that are named after a step, sealed or not, the newest first.

        One request per 1,000 folders.

        Returns:
            Pairs of step and folder.
        """
        names = ((step_of_folder(name), name) for name in self.store.folders())
        found = [(step, name) for step, name in names if step is not None]
        return sorted(found, key=lambda one: (-one[0], one[1]))

    def look(self, folder: str) -> SealedStep | None:
        """Look whether a folder holds a sealed step, by one small request as a rule.

        Raises:
            CorruptError: If its metadata are there and their end is damaged.
            StoreError: If the store fails.
        """
        step = step_of_folder(folder)
        if step is None:
            return None
        # Only there others put their checkpoints deeper, or without metadata.
        is_ours = folder.startswith("step")
        for inner in _INNER_FOLDERS[: 1 if is_ours else None]:
            try:
                return read_twice_if_damaged(partial(self._look_at, step, folder, inner))
            except NotFoundError:
                continue
        for name in () if is_ours else _WEIGHTS:
            try:
                found = self.store.head(f"{folder}/{name}")
            except NotFoundError:
                continue
            url = f"{self.url}/{folder}"
            return SealedStep(step, folder, url, "safetensors", saved_at=found.modified)
        return None

    def _look_at(self, step: int, folder: str, inner: str) -> SealedStep | None:
        key = f"{folder}/{inner}{METADATA_KEY}"
        tail = self.store.get_tail(key, _TAIL_BYTES)
        if not tail.size_bytes:
            return None
        try:
            seal = read_tail(tail.data, tail.size_bytes)
        except CorruptError as error:
            raise CorruptError(f"{self.url}/{key}: {error}", key=key) from error
        return SealedStep(
            step,
            folder,
            f"{self.url}/{folder}/{inner}".rstrip("/"),
            "dcp" if seal is None else "dcpstore",
            None if seal is None else seal.save_id,
            (None if seal is None else seal.facts) or Facts(),
            tail.modified,
            tail.size_bytes,
        )

    def newest(self) -> SealedStep | None:
        """Return the newest sealed step; None if there is none. A damaged one is an error."""
        found = (self.look(folder) for _, folder in self.candidates())
        return next((one for one in found if one is not None), None)

    def all(self) -> list[SealedStep]:
        """Return all sealed steps, the newest first; looks at each of them once.

        What cannot be read is left out with a warning: it is no step to resume from, and
        nothing removes it.

        Raises:
            StoreError: If the store fails, rather than refuses: who decides what stays must not
                miss a step because of an outage.
        """
        names = [folder for _, folder in self.candidates()]
        unknown = [name for name in names if name not in self._seen]
        looked = self._side_by_side(self._look_or_warn, unknown)
        known = {**self._seen, **{one.folder: one for one in looked if one is not None}}
        self._seen = {name: known[name] for name in names if name in known}
        return list(self._seen.values())

    def known(self, folder: str) -> SealedStep | None:
        """Return what `all` found in a folder; no request."""
        return self._seen.get(folder)

    def forget(self, step: int) -> None:
        """Look at a step again that was saved once more, or may be gone."""
        for folder in [name for name, one in self._seen.items() if one.step == step]:
            self._seen.pop(folder, None)

    def facts(self, records: Iterable[str] | None = None) -> list[StepFacts]:
        """Return what policies are asked about, the newest step first.

        Args:
            records: What `records` returned; None to ask for it.
        """
        reported = self._reported(self.records() if records is None else records)
        nothing: _Reported = None, {}
        return [
            StepFacts(
                one.step,
                one.folder,
                one.saved_at,
                {**one.facts.metrics, **(metrics if save_id == one.save_id else {})},
                one.facts.run,
                one.layout,
            )
            for one in self.all()
            for save_id, metrics in [reported.get(one.folder, nothing)]
        ]

    def _look_or_warn(self, folder: str) -> SealedStep | None:
        try:
            return self.look(folder)
        except CheckpointError as error:
            if isinstance(error, StoreError) and error.retryable:
                raise
            logger.warning("%s/%s cannot be read: %s", self.url, folder, error)
            return None

    def _side_by_side(self, call: Callable[[str], _T], names: Iterable[str]) -> list[_T]:
        with ThreadPoolExecutor(_MAX_REQUESTS, "dcpstore-run") as executor:
            return list(executor.map(call, names))

    # --- pins and metrics ----------------------------------------------------------------

    def records(self) -> list[str]:
        """Return the keys of what is known beside the steps. One LIST."""
        return [info.key for info in self.store.list(RECORDS)]

    def pins(self, records: Iterable[str] | None = None) -> set[str]:
        """Return the folders of the steps that are pinned.

        Args:
            records: What `records` returned; None to ask for it.
        """
        keys = (info.key for info in self.store.list(PINS)) if records is None else records
        return {_folder_in(key, PINS) for key in keys if key.startswith(PINS)}

    def pin(self, step: int) -> None:
        """Keep a step whatever the policies say.

        Raises:
            NotFoundError: If there is no sealed step of that number.
            ConflictError: If it is being removed at this moment.
        """
        for folder in [one.folder for one in self._sealed(step)]:
            # Of this call alone: what is taken back may not be the pin of another.
            pin = f"{PINS}{folder}/{secrets.token_hex(8)}"
            self.store.put(pin, b"")
            # Who removes a step puts a note first, and looks for pins then: one of both sees the
            # other.
            is_doomed = any(True for _ in self.store.list(f"{DELETING}{folder}/"))
            if not is_doomed and self.look(folder) is not None:
                continue
            self.store.delete_many([pin])
            raise ConflictError(
                f"{self.url}/{folder} is being removed at this moment. If it is still there in a"
                " minute, pin it again; where a removal broke off, `dcpstore retain --yes` an hour"
                " later clears it away"
            )

    def unpin(self, step: int) -> None:
        """Leave a step to the policies again; one that is not pinned is no error."""
        keys = [info.key for info in self.store.list(PINS)]
        doomed = [key for key in keys if step_of_folder(_folder_in(key, PINS)) == step]
        if doomed:
            self.store.delete_many(doomed)

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to a sealed step, or change some. One job at a time.

        Raises:
            NotFoundError: If there is no sealed step of that number.
        """
        for one in self._sealed(step):
            save_id, before = self._reported_of(one.folder)
            known = before if save_id == one.save_id else {}
            numbers = {name: float(value) for name, value in metrics.items()}
            facts = Facts(step, None, {**known, **numbers}).as_json()
            text = json.dumps({"save_id": one.save_id, **facts})
            self.store.put(metrics_key(one.folder), text.encode())

    def _reported(self, records: Iterable[str]) -> Mapping[str, _Reported]:
        """Return the metrics that were reported after the seal, by folder."""
        keys = (key.removeprefix(METRICS) for key in records if key.startswith(METRICS))
        folders = [key.removesuffix(".json") for key in keys]
        return dict(zip(folders, self._side_by_side(self._reported_of, folders), strict=True))

    def _reported_of(self, folder: str) -> _Reported:
        key = metrics_key(folder)
        try:
            told = parse_json(self.store.get(key).data)
            return told.get("save_id"), Facts.of_json(told).metrics
        except NotFoundError:
            return None, {}
        except (ValueError, TypeError, AttributeError) as error:
            logger.warning("%s/%s is damaged and counts for nothing: %r", self.url, key, error)
            return None, {}

    def _sealed(self, step: int) -> list[SealedStep]:
        named = [folder for number, folder in self.candidates() if number == step]
        found = [one for folder in named if (one := self.look(folder)) is not None]
        if not found:
            raise NotFoundError(
                f"{self.url} has no sealed step {step}: `dcpstore ls {self.url}` lists its steps"
            )
        return found

    # --- the claim -------------------------------------------------------------------------

    def claimed(self) -> Claim | None:
        """Return who saves to the run; None if no job ever claimed it.

        Raises:
            CorruptError: If the claim is damaged.
        """
        found = self._find_claim()
        return None if found is None else found[0]

    def has_lost(self, there: Claim | None) -> bool:
        """Tell whether this job claimed the run, and another holds it now.

        Args:
            there: What `claimed` returned.
        """
        return self._claim is not None and (there is None or there.owner != self.token)

    def run_id(self) -> str | None:
        """Return the run's id; None if no job ever claimed it."""
        claim = self._claim or self.claimed()
        return None if claim is None else claim.run

    def claim(self, *, takeover: bool = True) -> str:
        """Make this the job that saves to the run, and return the run's id.

        Args:
            takeover: Whether to do so where another job seems to be alive. That one is told when
                it renews its claim.

        Raises:
            ConflictError: If another job holds it and ``takeover=False``, or claims it just now.
        """
        found = self._find_claim()
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        mine = Claim(
            run=secrets.token_hex(8),
            owner=self.token,
            host=socket.gethostname(),
            pid=os.getpid(),
            since=now,
            heard=now,
        )
        if found is not None:
            other = found[0]
            mine = replace(mine, run=other.run, resumed=other.resumed)
            if other.is_held and other.owner != self.token:
                what = f"{self.url} is claimed by {other}"
                if not takeover:
                    raise ConflictError(
                        f"{what}. If it has ended, claim the run with takeover=True; two jobs that"
                        " save to one run need a URL each"
                    )
                logger.warning("%s; this job takes it over, and that one will save no more", what)
        self._put_claim(mine, None if found is None else found[1])
        return mine.run

    def renew(self, step: int, resumed: int | None = None) -> None:
        """Say that this job is alive and about to seal a step.

        Args:
            step: The step.
            resumed: The step that the job was restored from, if no newer one is sealed yet.

        Raises:
            ConflictError: If another job took the run over.
        """
        assert self._claim is not None
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        claim = replace(self._claim, heard=now, step=step, resumed=resumed)
        self._put_claim(claim, self._claim_there)

    def release(self) -> None:
        """Say that this job has ended well. Never raises for a store's refusal."""
        claim = self._claim
        if claim is None:
            return
        try:
            self._put_claim(replace(claim, released=True), self._claim_there)
        except CheckpointError as error:
            logger.warning("%s could not be given back: %s", self.url, error)
        self._claim = None

    def _find_claim(self) -> tuple[Claim, Found] | None:
        # A refusal is not absence: who mistook it would lose the run's id and what is protected.
        found = probe(self.store, CLAIM_KEY, denied_is_absent=False)
        if found is None:
            return None
        try:
            told = dict(parse_json(found.data))
            names = Claim.__dataclass_fields__.keys() & told.keys()
            return Claim(**{name: told[name] for name in names}), found
        except (ValueError, TypeError) as error:
            raise CorruptError(
                f"{self.url}/{CLAIM_KEY} is damaged: {error!r:.200}. Remove it if no job saves to"
                " the run; the run then gets another id, and its older steps stay until they are"
                " removed by `dcpstore retain --others`",
                key=CLAIM_KEY,
            ) from error

    def _put_claim(self, claim: Claim, before: Found | None) -> None:
        data = json.dumps(asdict(claim)).encode()
        try:
            etag = ConditionalPut(self.store, CLAIM_KEY, before).put(data)
        except (AlreadyExistsError, ConflictError) as error:
            found = self._find_claim()
            other = None if found is None else found[0]
            if found is not None and found[0].owner == self.token:
                # A put of this job that was not answered took effect after all.
                self._put_claim(replace(claim, run=found[0].run), found[1])
                return
            raise ConflictError(
                f"{self.url}: the run was taken over by {other or 'somebody'}. This job seals"
                " nothing there any more: end it, or let it save to another URL"
            ) from error
        self._claim, self._claim_there = claim, Found(memoryview(data), etag, None)
