"""Whether a URL is fit for checkpoints: every request that a save or a load makes, tried alone.

All probes lie in a folder of their own below the URL, `.dcpstore-doctor-{16 hex digits}`, which
is emptied in the end; no checkpoint is touched. What is tried, in this order:

1. get what is absent: the store answers, the bucket is there, the credentials are known
2. put, get, ranged get, head: the bytes that come back are those that were put
3. create (If-None-Match) and compare-and-swap (If-Match): the store must refuse where the
   condition does not hold. Some servers ignore conditions, and say nothing
4. multipart upload, abort of one, list, delete
5. latency, throughput, and the difference of the clocks
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcpstore.audit.checks import Check, Outcome, Verdict
from dcpstore.audit.leftovers import Place
from dcpstore.audit.permissions import advice_on
from dcpstore.audit.probes import Measured, Probes
from dcpstore.config import ReadConfig
from dcpstore.errors import CheckpointError, ConfigError, StoreError
from dcpstore.keys import METADATA_KEY
from dcpstore.store.base import Store
from dcpstore.store.location import parse_location
from dcpstore.store.opening import open_store
from dcpstore.store.uploads import OpenUploads, open_uploads_at
from dcpstore.text import size_text

__all__ = ["DEFAULT_PROBE_BYTES", "Diagnosis", "diagnose"]

DEFAULT_PROBE_BYTES = 64 << 20
"""Enough to tell the throughput of a slow link, little enough to send in half a minute."""

_MIN_PROBE_BYTES = 10 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What `diagnose` found.

    Attributes:
        url: That was tried.
        checks: In the order in which they were made.
        measured: Latency, throughput and clocks, as far as they could be measured.
        left_behind: Probes that could not be deleted, relative to the URL.
        elapsed_s: Seconds the whole took.
    """

    url: str
    checks: tuple[Check, ...]
    measured: Measured
    left_behind: tuple[str, ...] = ()
    elapsed_s: float = 0.0

    @property
    def is_healthy(self) -> bool:
        """Whether saves and loads will work as they should. Warnings do not count."""
        return not any(check.outcome == "failed" for check in self.checks)

    def __str__(self) -> str:
        return "\n".join(
            [*(line for check in self.checks for line in check.lines()), *self.summary()]
        )

    def summary(self) -> Iterator[str]:
        """Yield what follows the table of checks."""
        if self.measured.upload_bytes_per_s is not None:
            yield f"upload    {size_text(self.measured.upload_bytes_per_s)}/s"
        if self.measured.download_bytes_per_s is not None:
            yield f"download  {size_text(self.measured.download_bytes_per_s)}/s"
        if self.left_behind:
            yield (
                f"left behind, because it could not be deleted: {', '.join(self.left_behind)}."
                " It belongs to no checkpoint; delete it when you may"
            )
        outcomes = [check.outcome for check in self.checks]
        counts = f"{outcomes.count('failed')} failed, {outcomes.count('warning')} warning(s)"
        verdict = "fit for checkpoints" if self.is_healthy else "NOT FIT FOR CHECKPOINTS"
        yield f"{self.url}: {verdict} ({counts})"


@dataclass(frozen=True, slots=True)
class _Step:
    """A check to make.

    Attributes:
        name: What is tried.
        needed_for: Which operations need it.
        verb: Whose permission it takes.
        call: Tries it.
        after: Checks that must have gone well.
        is_optional: Whether saves and loads do without it.
    """

    name: str
    needed_for: str
    verb: str
    call: Callable[[], Verdict]
    after: tuple[str, ...] = ()
    is_optional: bool = False


def _steps(probes: Probes) -> Sequence[_Step]:
    put, parts = ("put",), ("multipart upload",)
    return (
        _Step("reach the store", "everything", "get", probes.reach),
        _Step("put", "save", "put", probes.put),
        _Step("get", "save, load", "get", probes.get, put),
        _Step("ranged get", "load", "get", probes.get_range, put),
        _Step("head", "verify, prune", "get", probes.head, put),
        _Step("create (If-None-Match)", "save", "put", probes.create, put),
        _Step("swap (If-Match)", "overwrite", "put", probes.swap, put),
        _Step("multipart upload", "save", "put", probes.send_large, put),
        _Step("ranged gets at once", "load", "get", probes.fetch_large, (*put, *parts)),
        _Step("abort an upload", "failed saves", "uploads", probes.abort, parts, is_optional=True),
        _Step("list", "ls, verify, prune", "list", probes.list, put, is_optional=True),
        _Step("delete", "sweep, prune", "delete", probes.delete, put, is_optional=True),
        _Step("list open uploads", "prune", "uploads", probes.list_uploads, is_optional=True),
        _Step("clocks", "prune, ages", "get", probes.compare_clocks, put, is_optional=True),
        _Step("latency", "", "get", probes.time_requests, put, is_optional=True),
    )


def _reading_steps(probes: Probes, *, is_optional: bool) -> Sequence[_Step]:
    get = ("get .metadata",)
    return (
        _Step("get .metadata", "load", "get", probes.get_readable, (), is_optional),
        _Step("ranged get", "load", "get", probes.get_readable_range, get, is_optional),
        _Step("list", "ls, verify", "list", probes.list_anything, is_optional=True),
        _Step("latency", "", "get", probes.time_requests, get, is_optional=True),
    )


class _Examination:
    """Makes checks and keeps what came of them.

    Args:
        scheme: Of the URL, for the advice.
        on_check: Told of each check.
    """

    def __init__(self, scheme: str, on_check: Callable[[Check], None]) -> None:
        self._scheme = scheme
        self._on_check = on_check
        self.checks: list[Check] = []

    def run(self, steps: Iterable[_Step]) -> None:
        """Make checks in their order; a store that does not answer ends them all."""
        is_reachable = True
        for step in steps:
            passed = {check.name for check in self.checks if check.outcome in ("ok", "warning")}
            missing = [name for name in step.after if name not in passed]
            if not is_reachable:
                self._note(
                    Check(step.name, step.needed_for, "skipped", "the store does not answer")
                )
            elif missing:
                detail = f"needs {', '.join(missing)}"
                self._note(Check(step.name, step.needed_for, "skipped", detail))
            else:
                is_reachable = self._try(step)

    def _try(self, step: _Step) -> bool:
        """Make one check; return whether there is any use in going on."""
        began = time.monotonic()
        may_go_on = True
        try:
            verdict = step.call()
        except CheckpointError as error:
            outcome: Outcome = "warning" if step.is_optional else "failed"
            advice = advice_on(error, self._scheme, step.verb)
            verdict = Verdict(error.message, outcome, advice)
            is_down = isinstance(error, StoreError) and error.retryable
            may_go_on = not (is_down or step.name == "reach the store")
        elapsed_s = time.monotonic() - began
        self._note(
            Check(
                step.name,
                step.needed_for,
                verdict.outcome,
                verdict.detail,
                verdict.advice,
                elapsed_s,
            )
        )
        return may_go_on

    def _note(self, check: Check) -> None:
        self.checks.append(check)
        self._on_check(check)

    def has_failed(self, name: str) -> bool:
        """Whether a check was made and failed."""
        return any(one.name == name and one.outcome == "failed" for one in self.checks)


def diagnose(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    config: ReadConfig | None = None,
    probe_bytes: int = DEFAULT_PROBE_BYTES,
    read_only: bool = False,
    on_check: Callable[[Check], None] = lambda _: None,
    clock: Callable[[], float] = time.time,
    store_opener: Callable[..., Store] = open_store,
    uploads_opener: Callable[..., OpenUploads | None] = open_uploads_at,
) -> Diagnosis:
    """Try every request that a save or a load makes. What goes wrong is told, not raised.

    Args:
        url: Where checkpoints are to lie.
        storage_options: fsspec's options for its protocol.
        config: Engine, retries, and the requests in flight for the throughput.
        probe_bytes: Size of the object that is sent and fetched for it; at least 10 MiB.
        read_only: Put nothing: try what a load needs, on the checkpoint at the URL.
        on_check: Told of each check as it ends.
        clock: Seconds since the epoch.
        store_opener: Opens the store, for tests.
        uploads_opener: Opens the list of uploads, for tests.

    Raises:
        ConfigError: If the URL, an option or ``probe_bytes`` is wrong; nothing was tried.
    """
    if probe_bytes < _MIN_PROBE_BYTES:
        raise ConfigError(f"probe_bytes={probe_bytes} is too small for two parts of 5 MiB")
    config = config or ReadConfig()
    began = time.monotonic()
    place = Place(
        url, storage_options, config, store_opener=store_opener, uploads_opener=uploads_opener
    )
    with place:
        examination = _Examination(place.scheme, on_check)
        probes = Probes(
            place.store,
            place.uploads,
            f".dcpstore-doctor-{secrets.token_hex(8)}",
            probe_bytes=probe_bytes,
            config=config,
            clock=clock,
        )
        left_behind: Sequence[str] = ()
        try:
            _examine(examination, probes, read_only=read_only)
        finally:
            left_behind = probes.clean_up()
            if place.scheme == "file":
                _remove_empty(parse_location(url).prefix, probes.folder)
    return Diagnosis(
        url=place.url,
        checks=tuple(examination.checks),
        measured=probes.measured,
        left_behind=tuple(left_behind),
        elapsed_s=time.monotonic() - began,
    )


def _remove_empty(root: str, folder: str) -> None:
    """Remove the folder of the probes, which only a local disk has."""
    with suppress(OSError):  # it was never made, or holds what could not be deleted
        Path(root, folder).rmdir()


def _examine(examination: _Examination, probes: Probes, *, read_only: bool) -> None:
    steps = _steps(probes)
    if read_only:
        probes.readable_key = METADATA_KEY
        examination.run([steps[0], *_reading_steps(probes, is_optional=False)])
        return
    examination.run(steps)
    if examination.has_failed("put") and not examination.has_failed("reach the store"):
        # These credentials may be meant for loading only: say whether they do.
        probes.readable_key = METADATA_KEY
        examination.run(_reading_steps(probes, is_optional=True))
