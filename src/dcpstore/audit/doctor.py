"""Whether a URL is fit for checkpoints: every request that a save or a load makes, tried alone.

All probes lie in a folder of their own below the URL, `.dcpstore-doctor-{16 hex digits}`, which
is emptied in the end; no checkpoint is touched. What is tried, in this order:

1. get what is absent: the store answers, the bucket is there, the credentials are known
2. put, get, ranged get, head: the bytes that come back are those that were put
3. create (If-None-Match) and compare-and-swap (If-Match): the store must refuse where the
   condition does not hold. Some servers ignore conditions, and say nothing
4. multipart upload, abort of one, list, delete
5. latency, throughput, and the difference of the clocks

A check that fails says what to grant or to change, in the words of each provider.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeAlias

from dcpstore.audit.prune import Place, delete_all
from dcpstore.config import ReadConfig, WriteConfig
from dcpstore.errors import (
    AlreadyExistsError,
    CheckpointError,
    ConfigError,
    ConflictError,
    NotFoundError,
    StoreError,
)
from dcpstore.format.seal import METADATA_KEY
from dcpstore.store import open_store
from dcpstore.store.base import IfMatch, PutMode, Store
from dcpstore.store.folder import parse_location
from dcpstore.store.uploads import OpenUploads, open_uploads_at
from dcpstore.text import size_text

Outcome: TypeAlias = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a probe concluded.

    Attributes:
        detail: What was seen.
        outcome: What it means for saves and loads.
        advice: What to do about it; empty if nothing.
    """

    detail: str
    outcome: Outcome = "ok"
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """A check that was made, or could not be.

    Attributes:
        name: What was tried.
        needed_for: Which operations need it.
        outcome: ``ok``; ``warning``: saves and loads work, something else does not; ``failed``:
            what needs it will fail or is not safe; ``skipped``: it could not be tried.
        detail: What was seen.
        advice: What to do about it; empty if nothing.
        elapsed_s: Seconds it took.
    """

    name: str
    needed_for: str
    outcome: Outcome
    detail: str = ""
    advice: str = ""
    elapsed_s: float = 0.0

    def lines(self) -> Iterator[str]:
        """Yield the line of a table, and one more for the advice."""
        yield f"{self.outcome:<8} {self.name:<26} {self.needed_for:<18} {self.detail}"
        if self.advice:
            yield f"{'':<8} -> {self.advice}"


Verb = str

_GRANTS: dict[str, dict[Verb, str]] = {
    "s3": {
        "get": "s3:GetObject",
        "put": "s3:PutObject",
        "list": "s3:ListBucket",
        "delete": "s3:DeleteObject",
        "uploads": "s3:ListBucketMultipartUploads and s3:AbortMultipartUpload",
    },
    "gs": {
        "get": "storage.objects.get",
        "put": "storage.objects.create",
        "list": "storage.objects.list",
        "delete": "storage.objects.delete",
    },
    "az": {
        "get": "the role Storage Blob Data Reader (or r in the SAS token)",
        "put": "the role Storage Blob Data Contributor (or c and w in the SAS token)",
        "list": "the role Storage Blob Data Reader (or l in the SAS token)",
        "delete": "the role Storage Blob Data Contributor (or d in the SAS token)",
    },
    "file": {
        "get": "read permission on the folder and its files",
        "put": "write permission on the folder",
        "list": "read permission on the folder",
        "delete": "write permission on the folder",
    },
}
# What to do where the store's answer has one of these words.
_ADVICE = {
    ("RequestTimeTooSkewed", "AccessDenied: Request has expired"): (
        "set this machine's clock (NTP): the store refuses requests of another time"
    ),
    ("ExpiredToken", "have expired"): "renew the credentials",
    ("InvalidAccessKeyId", "SignatureDoesNotMatch", "AuthFailure", "InvalidToken"): (
        "the store does not know this key: check key, secret, profile and endpoint"
    ),
    ("certificate was refused",): "correct the certificates, here or on the server",
}


def is_missing_bucket(error: CheckpointError) -> bool:
    """Tell a bucket that is not there from an object that is not."""
    return isinstance(error, NotFoundError) and "no such bucket" in error.message


def advice_on(error: CheckpointError, scheme: str, verb: Verb) -> str:
    """Say what to do about an error that a verb met."""
    if is_missing_bucket(error):
        return "create the bucket, or check its name; dcpstore never creates one"
    if isinstance(error, NotFoundError):
        return "give the URL of a checkpoint: there is none here"
    if isinstance(error, ConfigError):
        return "correct the URL or the storage options"
    for words, advice in _ADVICE.items():
        if any(word in error.message for word in words):
            return advice
    if isinstance(error, StoreError) and error.denied:
        grant = _GRANTS.get(scheme, {}).get(verb)
        return f"grant {grant}, or check the credentials" if grant else "check the credentials"
    if isinstance(error, StoreError) and error.throttled:
        return "the store asks for fewer requests: try again later, or with fewer ranks"
    if isinstance(error, StoreError) and error.retryable:
        return "check the endpoint, the network, proxies and TLS"
    return "see the store's answer"


_PART_BYTES = 5 << 20  # the least that S3 takes
_NUM_TIMED = 8
_NUM_RIVALS = 8
_TOLERATED_SKEW_S = 60.0
_CONTENT = bytes(range(256)) * 4
_CONDITIONS = (
    "two jobs that save to one URL at the same moment may both believe that theirs is the"
    " checkpoint. Let only one job write to a URL"
)


@dataclass(slots=True)
class Measured:
    """Numbers; None where nothing could be measured.

    Attributes:
        get_latency_s: Median seconds of a small ranged get.
        put_latency_s: Median seconds of a small put.
        upload_bytes_per_s: Of one multipart upload.
        download_bytes_per_s: Of ranged gets in parallel.
        clock_skew_s: By how much the store's clock is ahead of ours.
    """

    get_latency_s: float | None = None
    put_latency_s: float | None = None
    upload_bytes_per_s: float | None = None
    download_bytes_per_s: float | None = None
    clock_skew_s: float | None = None


class Probes:
    """What can be tried on one store. Keys lie in a folder of their own.

    Args:
        store: Rooted at the URL.
        uploads: Its open uploads; None where there is no list of them.
        folder: For the probes, without a slash at its end.
        probe_bytes: Size of the large object.
        config: Requests in flight and their size.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        store: Store,
        uploads: OpenUploads | None,
        folder: str,
        *,
        probe_bytes: int,
        config: ReadConfig,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._uploads = uploads
        self.folder = folder
        """Where the probes lie."""
        self._config = config
        self._clock = clock
        self._part_bytes = max(_PART_BYTES, min(WriteConfig().part_bytes, probe_bytes // 4))
        self._num_parts = probe_bytes // self._part_bytes
        self._part = b""
        self._put_keys: set[str] = set()
        self._put_at_s = (0.0, 0.0)
        self.readable_key = self._key("small")
        """What is fetched: an object that was put, or a checkpoint's metadata."""
        self._content = _CONTENT
        self.measured = Measured()

    def _key(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def _put(self, name: str, data: bytes, mode: PutMode = "overwrite") -> str | None:
        self._put_keys.add(self._key(name))  # before: an answer that is lost may be a success
        return self._store.put(self._key(name), data, mode=mode)

    # --- single requests -------------------------------------------------------------

    def reach(self) -> Verdict:
        """Get what is absent."""
        try:
            self._store.get(self._key("absent"))
        except NotFoundError as error:
            if is_missing_bucket(error):
                raise
            return Verdict("the store answers; what is absent is not found")
        except StoreError as error:
            if not error.denied:
                raise
            return Verdict(
                f"what is absent is refused: {error}",
                "warning",
                "either these credentials may not list, which saves and loads do not need (S3"
                " then answers 403 for an absent object), or they are wrong: see below",
            )
        return Verdict(
            "the store returned an object that was never put", "failed", "check the endpoint"
        )

    def put(self) -> Verdict:
        """Put a small object."""
        before_s = self._clock()
        etag = self._put("small", _CONTENT)
        self._put_at_s = (before_s, self._clock())
        if etag is None and self._store.capabilities.acknowledges_puts:
            return Verdict("stored, but the answer has no ETag", "warning")
        return Verdict(f"stored {len(_CONTENT)} bytes")

    def get(self) -> Verdict:
        """Get the object that was put, or the metadata of the checkpoint at the URL."""
        found = bytes(self._store.get(self.readable_key).data)
        if self.readable_key in self._put_keys:
            return _compare(found, _CONTENT, f"the {len(found)} bytes that were put")
        self._content = found
        return Verdict(f"{self.readable_key} of {len(found)} bytes")

    def get_range(self) -> Verdict:
        """Get a part of it."""
        start = len(self._content) // 10
        end = start + max(1, len(self._content) // 2)
        found = bytes(self._store.get_range(self.readable_key, start, end))
        return _compare(found, self._content[start:end], "exactly the bytes asked for")

    def head(self) -> Verdict:
        """Look it up without its bytes."""
        info = self._store.head(self._key("small"))
        if info.size_bytes != len(_CONTENT):
            return Verdict(f"its size is said to be {info.size_bytes}", "failed")
        return Verdict("size and time are reported")

    # --- conditions ------------------------------------------------------------------

    def create(self) -> Verdict:
        """Create twice, then eight times at once: one may succeed."""
        if not self._store.capabilities.atomic_create:
            return Verdict(
                "this store has no conditional put; dcpstore checks first and then puts",
                "warning",
                _CONDITIONS,
            )
        self._put("created", b"first", "create")
        if self._may_create("created", b"second"):
            return _unsafe(
                "a put that must not replace (If-None-Match) replaced: the condition is ignored"
            )
        if bytes(self._store.get(self._key("created")).data) != b"first":
            return _unsafe("a refused put changed the object")
        with ThreadPoolExecutor(_NUM_RIVALS, "dcpstore-doctor") as executor:
            num_winners = sum(
                executor.map(lambda _: self._may_create("race", b"1"), range(_NUM_RIVALS))
            )
        if num_winners != 1:
            return _unsafe(f"{num_winners} of {_NUM_RIVALS} creates at once succeeded")
        return Verdict(f"honoured; one of {_NUM_RIVALS} at once succeeds")

    def _may_create(self, name: str, data: bytes) -> bool:
        try:
            self._put(name, data, "create")
        except (AlreadyExistsError, ConflictError):
            return False
        return True

    def swap(self) -> Verdict:
        """Replace with the right mark, then with a stale one."""
        if not self._store.capabilities.compare_and_swap:
            return Verdict(
                "this store has no compare-and-swap; dcpstore compares and then puts",
                "warning",
                _CONDITIONS,
            )
        self._put("swapped", b"first")
        first = self._store.get(self._key("swapped")).etag
        if first is None:
            return _unsafe("the store gives objects no ETag")
        try:
            self._put("swapped", b"second", IfMatch(first))
        except ConflictError as error:
            return Verdict(
                f"a put with the object's own ETag (If-Match) is refused: {error}",
                "failed",
                "overwrites fail. Save each step to a URL of its own, or, if no other job writes"
                " there, with WriteConfig(require_conditional_put=False)",
            )
        try:
            self._put("swapped", b"third", IfMatch(first))
        except (ConflictError, AlreadyExistsError):
            return Verdict("honoured")
        return _unsafe("a put with a stale ETag (If-Match) replaced: the condition is ignored")

    # --- large objects ---------------------------------------------------------------

    def send_large(self) -> Verdict:
        """Put a large object in parts, several in flight."""
        self._part = os.urandom(self._part_bytes)
        self._put_keys.add(self._key("large"))
        began = time.monotonic()
        self._store.put_parts(
            self._key("large"),
            (self._part for _ in range(self._num_parts)),
            part_bytes=self._part_bytes,
            max_concurrency=WriteConfig().max_uploads,
        )
        elapsed_s = time.monotonic() - began
        self.measured.upload_bytes_per_s = self._part_bytes * self._num_parts / elapsed_s
        size_bytes = self._store.head(self._key("large")).size_bytes
        if size_bytes != self._part_bytes * self._num_parts:
            return Verdict(f"{size_bytes} bytes arrived of the parts that were sent", "failed")
        return Verdict(f"{self._num_parts} parts of {self._part_bytes >> 20} MiB became one object")

    def fetch_large(self) -> Verdict:
        """Get it back in ranges, many in flight."""
        step = self._config.request_bytes
        spans = [
            (number * self._part_bytes, start, min(start + step, self._part_bytes))
            for number in range(self._num_parts)
            for start in range(0, self._part_bytes, step)
        ]

        def is_right(span: tuple[int, int, int]) -> bool:
            base, start, end = span
            found = self._store.get_range(self._key("large"), base + start, base + end)
            return found == memoryview(self._part)[start:end]

        began = time.monotonic()
        with ThreadPoolExecutor(self._config.max_requests, "dcpstore-doctor") as executor:
            num_wrong = list(executor.map(is_right, spans)).count(False)
        elapsed_s = time.monotonic() - began
        self.measured.download_bytes_per_s = self._part_bytes * self._num_parts / elapsed_s
        if num_wrong:
            return Verdict(
                f"{num_wrong} of {len(spans)} ranges are not the bytes that were sent",
                "failed",
                "something between here and the store changes bytes: look for a proxy",
            )
        return Verdict(f"{len(spans)} ranges, {self._config.max_requests} in flight, all right")

    def abort(self) -> Verdict:
        """Let an upload fail half way, as a failed save does."""
        self._put_keys.add(self._key("aborted"))

        def parts() -> Iterator[bytes]:
            yield self._part
            yield self._part
            raise _Halfway

        with suppress(_Halfway):
            self._store.put_parts(
                self._key("aborted"),
                parts(),
                part_bytes=self._part_bytes,
                max_concurrency=2,
            )
        with suppress(NotFoundError):
            self._store.head(self._key("aborted"))
            return Verdict("an upload that failed half way was published", "failed")
        if self._uploads is None:
            return Verdict("nothing is published; whether parts remain cannot be listed here")
        try:
            num_open = sum(one.key.startswith(self.folder) for one in self._uploads.list())
        except StoreError as error:
            return Verdict(f"nothing is published; whether parts remain is unknown: {error}")
        if num_open:
            return Verdict(
                "the parts of an upload that failed half way stay",
                "warning",
                "they cost storage: grant s3:AbortMultipartUpload, or set a lifecycle rule that"
                " aborts incomplete multipart uploads",
            )
        return Verdict("nothing is published and no part stays")

    # --- what only tools need --------------------------------------------------------

    def list(self) -> Verdict:
        """List the probes."""
        found = {info.key for info in self._store.list(f"{self.folder}/")}
        if self._key("small") not in found:
            return Verdict(
                "an object that was just put is not listed",
                "warning",
                "listings lag behind here: `ls` and `prune` may not see what is new",
            )
        return Verdict(f"shows the {len(found)} probe(s)")

    def list_anything(self) -> Verdict:
        """List without having put anything."""
        first = next(iter(self._store.list()), None)
        return Verdict("allowed" + ("" if first else "; the folder is empty"))

    def list_uploads(self) -> Verdict:
        """List open uploads."""
        if self._uploads is None:
            return Verdict("this store has no list of them", "skipped")
        return Verdict(f"{sum(1 for _ in self._uploads.list())} open below the URL")

    def delete(self) -> Verdict:
        """Delete a probe and look for it."""
        self._put("deleted", b"1")
        self._store.delete_many([self._key("deleted")])
        try:
            self._store.head(self._key("deleted"))
        except NotFoundError:
            return Verdict("what is deleted is gone")
        return Verdict(
            "what was deleted is still there",
            "warning",
            "is the bucket versioned or under a retention lock? Old saves will stay and cost",
        )

    # --- numbers ---------------------------------------------------------------------

    def compare_clocks(self) -> Verdict:
        """Compare the time that the store gave an object with ours around the put."""
        modified = self._store.head(self._key("small")).modified
        if modified is None:
            return Verdict("the store tells no times", "skipped")
        before_s, after_s = self._put_at_s
        theirs_s = modified.timestamp()
        skew_s = min(0.0, theirs_s + 1.0 - before_s) + max(0.0, theirs_s - after_s)
        self.measured.clock_skew_s = skew_s
        if abs(skew_s) > _TOLERATED_SKEW_S:
            ahead = "ahead of" if skew_s > 0 else "behind"
            return Verdict(
                f"the store's clock is {abs(skew_s):.0f} s {ahead} this machine's",
                "warning",
                "set this machine's clock (NTP): stores refuse requests that are 15 minutes off,"
                " and ages that `ls` and `prune` show are wrong by as much",
            )
        return Verdict("the clocks agree to the second")

    def time_requests(self) -> Verdict:
        """Time small requests, one after another."""
        self.measured.get_latency_s = _median_s(
            lambda: self._store.get_range(self.readable_key, 0, 1)
        )
        if self.readable_key in self._put_keys:
            self.measured.put_latency_s = _median_s(lambda: self._put("timed", b"1"))
        told = f"get {self.measured.get_latency_s * 1e3:.1f} ms"
        if self.measured.put_latency_s is not None:
            told += f", put {self.measured.put_latency_s * 1e3:.1f} ms"
        return Verdict(f"{told} (median of {_NUM_TIMED})")

    # --- afterwards ------------------------------------------------------------------

    def clean_up(self) -> tuple[str, ...]:
        """Delete every probe; return the keys that may still be there."""
        if self._put_keys and self._uploads is not None:
            with suppress(CheckpointError):
                for one in self._uploads.list():
                    if one.key.startswith(f"{self.folder}/"):
                        self._uploads.abort(one)
        return tuple(delete_all(self._store, sorted(self._put_keys)))


def _unsafe(detail: str) -> Verdict:
    return Verdict(detail, "failed", _CONDITIONS)


class _Halfway(Exception):
    """The upload fails here, as it is meant to."""


def _compare(found: bytes, expected: bytes, what: str) -> Verdict:
    if found == expected:
        return Verdict(what)
    return Verdict(
        f"{len(found)} bytes came that are not those that were put",
        "failed",
        "something between here and the store changes bytes: look for a proxy",
    )


def _median_s(call: Callable[[], object]) -> float:
    times = []
    for _ in range(_NUM_TIMED):
        began = time.monotonic()
        call()
        times.append(time.monotonic() - began)
    return median(times)


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
        _Step("get .metadata", "load", "get", probes.get, (), is_optional),
        _Step("ranged get", "load", "get", probes.get_range, get, is_optional),
        _Step("list", "ls, verify", "list", probes.list_anything, is_optional=True),
        _Step("latency", "", "get", probes.time_requests, get, is_optional=True),
    )


def _examine(steps: Iterable[_Step], scheme: str) -> Iterator[Check]:
    """Make checks in their order; a store that does not answer ends them all.

    Args:
        steps: The checks.
        scheme: Of the URL, for the advice.
    """
    passed: set[str] = set()
    is_reachable = True
    for step in steps:
        began = time.monotonic()
        missing = [name for name in step.after if name not in passed]
        if not is_reachable:
            verdict = Verdict("the store does not answer", "skipped")
        elif missing:
            verdict = Verdict(f"needs {', '.join(missing)}", "skipped")
        else:
            try:
                verdict = step.call()
            except CheckpointError as error:
                outcome: Outcome = "warning" if step.is_optional else "failed"
                verdict = Verdict(error.message, outcome, advice_on(error, scheme, step.verb))
                is_down = isinstance(error, StoreError) and error.retryable
                is_reachable = not (is_down or step.name == "reach the store")
        if verdict.outcome in ("ok", "warning"):
            passed.add(step.name)
        elapsed_s = time.monotonic() - began
        yield Check(step.name, step.needed_for, **asdict(verdict), elapsed_s=elapsed_s)


def _examine_all(probes: Probes, scheme: str, *, read_only: bool) -> Iterator[Check]:
    steps = _steps(probes)
    if read_only:
        probes.readable_key = METADATA_KEY
        yield from _examine([steps[0], *_reading_steps(probes, is_optional=False)], scheme)
        return
    failed: set[str] = set()
    for check in _examine(steps, scheme):
        if check.outcome == "failed":
            failed.add(check.name)
        yield check
    if "put" in failed and "reach the store" not in failed:
        # These credentials may be meant for loading only: say whether they do.
        probes.readable_key = METADATA_KEY
        yield from _examine(_reading_steps(probes, is_optional=True), scheme)


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
    """Try every request that a save or a load makes. What goes wrong is reported, not raised.

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
    checks: list[Check] = []
    place = Place(
        url, storage_options, config, store_opener=store_opener, uploads_opener=uploads_opener
    )
    with place:
        probes = Probes(
            place.store,
            place.uploads,
            f".dcpstore-doctor-{secrets.token_hex(8)}",
            probe_bytes=probe_bytes,
            config=config,
            clock=clock,
        )
        try:
            for check in _examine_all(probes, place.scheme, read_only=read_only):
                checks.append(check)
                on_check(check)
        finally:
            left_behind = probes.clean_up()
            if place.scheme == "file":
                with suppress(OSError):  # it was never made, or holds what could not be deleted
                    Path(parse_location(url).prefix, probes.folder).rmdir()
    return Diagnosis(
        url=place.url,
        checks=tuple(checks),
        measured=probes.measured,
        left_behind=left_behind,
        elapsed_s=time.monotonic() - began,
    )
