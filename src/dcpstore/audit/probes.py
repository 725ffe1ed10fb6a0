"""The requests of saves and loads, each tried alone on objects made for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

from dcpstore.audit.checks import Verdict
from dcpstore.audit.permissions import is_missing_bucket
from dcpstore.config import ReadConfig, WriteConfig
from dcpstore.errors import (
    AlreadyExistsError,
    CheckpointError,
    ConflictError,
    NotFoundError,
    StoreError,
)
from dcpstore.store.base import IfMatch, PutMode, Store
from dcpstore.store.uploads import OpenUploads

__all__ = ["Measured", "Probes"]

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
        """What the checks that only read look at."""
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
        return Verdict("the store gives an object that nobody put", "failed", "check the endpoint")

    def put(self) -> Verdict:
        """Put a small object."""
        before_s = self._clock()
        etag = self._put("small", _CONTENT)
        self._put_at_s = (before_s, self._clock())
        if etag is None and self._store.capabilities.acknowledges_puts:
            return Verdict("stored, but the answer has no ETag", "warning")
        return Verdict(f"stored {len(_CONTENT)} bytes")

    def get(self) -> Verdict:
        """Get the object that was put."""
        found = bytes(self._store.get(self._key("small")).data)
        return _compare(found, _CONTENT, f"the {len(found)} bytes that were put")

    def get_range(self) -> Verdict:
        """Get a part of it."""
        found = bytes(self._store.get_range(self._key("small"), 100, 613))
        return _compare(found, _CONTENT[100:613], "exactly the bytes asked for")

    def head(self) -> Verdict:
        """Look it up without its bytes."""
        info = self._store.head(self._key("small"))
        if info.size_bytes != len(_CONTENT):
            return Verdict(f"its size is said to be {info.size_bytes}", "failed")
        return Verdict("size and time are told")

    def get_readable(self) -> Verdict:
        """Get the metadata of the checkpoint at the URL, for who may not put."""
        found = self._store.get(self.readable_key)
        return Verdict(f"{self.readable_key} of {len(found.data)} bytes")

    def get_readable_range(self) -> Verdict:
        """Get a part of them."""
        whole = self._store.get(self.readable_key).data
        end = max(1, len(whole) // 2)
        found = bytes(self._store.get_range(self.readable_key, 0, end))
        return _compare(found, bytes(whole[:end]), "exactly the bytes asked for")

    # --- conditions ------------------------------------------------------------------

    def create(self) -> Verdict:
        """Create twice, then eight times at once: one may succeed."""
        if not self._store.capabilities.atomic_create:
            return Verdict(
                "this store has no conditional put; dcpstore looks first and then puts",
                "warning",
                _CONDITIONS,
            )
        self._put("created", b"first", "create")
        try:
            self._put("created", b"second", "create")
        except (AlreadyExistsError, ConflictError):
            pass
        else:
            return Verdict(
                "a put that must not replace (If-None-Match) replaced: the condition is ignored",
                "failed",
                _CONDITIONS,
            )
        if bytes(self._store.get(self._key("created")).data) != b"first":
            return Verdict("a refused put changed the object", "failed", _CONDITIONS)
        num_winners = self._race()
        if num_winners != 1:
            return Verdict(
                f"{num_winners} of {_NUM_RIVALS} creates at once succeeded", "failed", _CONDITIONS
            )
        return Verdict(f"honoured; one of {_NUM_RIVALS} at once succeeds")

    def _race(self) -> int:
        def create(number: int) -> bool:
            try:
                self._put("race", str(number).encode(), "create")
            except (AlreadyExistsError, ConflictError):
                return False
            return True

        with ThreadPoolExecutor(_NUM_RIVALS, "dcpstore-doctor") as executor:
            return sum(executor.map(create, range(_NUM_RIVALS)))

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
            return Verdict("the store gives objects no ETag", "failed", _CONDITIONS)
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
        return Verdict(
            "a put with a stale ETag (If-Match) replaced: the condition is ignored",
            "failed",
            _CONDITIONS,
        )

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
        with suppress(_Halfway):
            self._store.put_parts(
                self._key("aborted"),
                self._failing_parts(),
                part_bytes=self._part_bytes,
                max_concurrency=2,
            )
        with suppress(NotFoundError):
            self._store.head(self._key("aborted"))
            return Verdict("an upload that failed half way was published", "failed")
        if self._uploads is None:
            return Verdict("nothing is published; whether parts stay cannot be listed here")
        try:
            num_open = sum(one.key.startswith(self.folder) for one in self._uploads.list())
        except StoreError as error:
            return Verdict(f"nothing is published; whether parts stay is not told: {error}")
        if num_open:
            return Verdict(
                "the parts of an upload that failed half way stay",
                "warning",
                "they cost storage: grant s3:AbortMultipartUpload, or set a lifecycle rule that"
                " aborts incomplete multipart uploads",
            )
        return Verdict("nothing is published and no part stays")

    def _failing_parts(self) -> Iterator[bytes]:
        yield self._part
        yield self._part
        raise _Halfway

    # --- what only tools need --------------------------------------------------------

    def list(self) -> Verdict:
        """List the probes."""
        found = {info.key for info in self._store.list(f"{self.folder}/")}
        if self._key("small") not in found:
            return Verdict(
                "an object that was just put is not listed",
                "warning",
                "listings are late here: `ls` and `prune` may not see what is new",
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

    def clean_up(self) -> Sequence[str]:
        """Delete every probe; return the keys that may still be there."""
        doomed = sorted(self._put_keys)
        if not doomed:
            return ()
        if self._uploads is not None:
            with suppress(CheckpointError):
                for one in self._uploads.list():
                    if one.key.startswith(f"{self.folder}/"):
                        self._uploads.abort(one)
        try:
            self._store.delete_many(doomed)
        except CheckpointError:
            return tuple(key for key in doomed if self._may_be_there(key))
        return ()

    def _may_be_there(self, key: str) -> bool:
        try:
            self._store.head(key)
        except NotFoundError:
            return False
        except CheckpointError:
            return True
        return True


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
