"""A store that fails as it is told to: by the number of a request, by verb, by key."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from dcpstore.errors import CheckpointError, StoreError
from dcpstore.store.base import Fetched, ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from typing_extensions import Buffer

    from dcpstore.store.base import Capabilities, Destination, FillsMemory, Part, PutMode, Store
    from dcpstore.store.server_copy import CopyMode, Origin, ServerCopies


_T = TypeVar("_T")
FaultKind = Literal[
    "error", "denied", "throttle", "lost_ack", "crash", "crash_after", "short", "long", "flip"
]


class Crashed(StoreError):
    """The process that used the store is dead, as far as the store can tell."""


@dataclass(frozen=True, slots=True)
class StoreFault:
    """What to do to some requests.

    Attributes:
        kind: ``error`` fails without doing anything, retryably; ``denied`` the same,
            for want of rights; ``throttle`` the same, asking to wait
            `retry_after_s`; ``lost_ack`` does what was asked and then fails;
            ``crash`` does nothing, and every later request fails too; ``crash_after``
            does what was asked first; ``short``, ``long`` and ``flip`` spoil the
            answer of a ``get`` or ``get_range``.
        verb: Which verb; None for any.
        key: A part of the key; empty for any.
        at: Take the requests that match from this one on, counted from 0.
        times: How many of them; None for all.
        num_bytes: How many bytes ``short`` cuts off or ``long`` adds.
        bit: Which bit of the answer ``flip`` turns.
        retry_after_s: For ``throttle``.
        after_parts: For a ``put_parts``: fail when so many parts have been taken; None
            before it begins.
    """

    kind: FaultKind
    verb: str | None = None
    key: str = ""
    at: int = 0
    times: int | None = 1
    num_bytes: int = 1
    bit: int = 0
    retry_after_s: float | None = None
    after_parts: int | None = None


class FaultyStore:
    """A `Store` that follows a script of faults. Thread-safe.

    Each fault counts the requests that match its verb and key; the first one whose
    turn it is takes the request, and those behind it do not count it. A script may be
    extended while the store is in use.

    Args:
        inner: The store that does the work.
        script: The faults.
        stale_keys: Keys that ``list`` does not show yet.
    """

    def __init__(
        self, inner: Store, script: Iterable[StoreFault] = (), *, stale_keys: Iterable[str] = ()
    ) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._script = list(script)
        self._num_seen = [0] * len(self._script)
        self._stale_keys = frozenset(stale_keys)
        self._is_dead = False
        self._num_requests = 0

    @property
    def inner(self) -> Store:
        """The store that does the work."""
        return self._inner

    @property
    def num_requests(self) -> int:
        """How many requests came, those that failed included."""
        return self._num_requests

    @property
    def is_dead(self) -> bool:
        """Whether a crash has happened."""
        return self._is_dead

    def add(self, fault: StoreFault) -> None:
        """Append a fault to the script."""
        with self._lock:
            self._script.append(fault)
            self._num_seen.append(0)

    def revive(self) -> None:
        """Forget the crash and the script."""
        with self._lock:
            self._script.clear()
            self._num_seen.clear()
            self._is_dead = False

    @property
    def url(self) -> str:
        """The root, without secrets."""
        return self._inner.url

    @property
    def capabilities(self) -> Capabilities:
        """What the inner store promises."""
        return self._inner.capabilities

    def get(self, key: str) -> Fetched:
        """Fetch a whole object."""

        def spoilt(fetched: Fetched, fault: StoreFault) -> Fetched:
            return Fetched(_spoil(fetched.data, fault), fetched.etag)

        return self._under("get", key, lambda: self._inner.get(key), spoilt)

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        """Fetch bytes ``[start, end)``.

        ``short`` and ``long`` answers are what an engine makes of them: a retryable error.
        """

        def spoilt(data: memoryview, fault: StoreFault) -> memoryview:
            if fault.kind == "flip":
                return _spoil(data, fault)
            raise _failure(fault, "get_range", key)

        return self._under("get_range", key, lambda: self._inner.get_range(key, start, end), spoilt)

    def fill(self, key: str, start: int, destination: Destination) -> None:
        """Fetch a range straight into the caller's memory; a ``get_range`` to the script."""

        def spoilt(_: None, fault: StoreFault) -> None:
            if fault.kind != "flip":
                raise _failure(fault, "get_range", key)
            at, mask = divmod(fault.bit % (8 * destination.num_bytes), 8)
            with destination.writing(lambda: None) as pieces:
                for piece in pieces:
                    if 0 <= at < len(piece):
                        piece[at] ^= 1 << mask
                    at -= len(piece)

        inner = cast("FillsMemory", self._inner)
        self._under("get_range", key, lambda: inner.fill(key, start, destination), spoilt)

    def head(self, key: str) -> ObjectInfo:
        """Look an object up without its bytes."""
        return self._under("head", key, lambda: self._inner.head(key))

    def put(self, key: str, data: Buffer, *, mode: PutMode = "overwrite") -> str | None:
        """Store one object in one atomic request and return its ETag."""
        return self._under("put", key, lambda: self._inner.put(key, data, mode=mode))

    def put_parts(
        self, key: str, parts: Iterable[Part], *, part_bytes: int, max_concurrency: int
    ) -> str | None:
        """Store one large object from parts, several in flight, and return its ETag."""
        fault = self._take("put_parts", key)

        def failing() -> Iterator[Part]:
            for number, part in enumerate(parts):
                self._check_alive("put_parts", key)
                if fault is not None and fault.after_parts == number:
                    raise self._failure(fault, "put_parts", key)
                yield part
                del part

        def call() -> str | None:
            return self._inner.put_parts(
                key, failing(), part_bytes=part_bytes, max_concurrency=max_concurrency
            )

        if fault is not None and fault.after_parts is not None:
            return call()
        return self._do(fault, "put_parts", key, call)

    def copy_from(
        self,
        origin: Origin,
        source_key: str,
        key: str,
        *,
        size_bytes: int,
        mode: CopyMode = "overwrite",
    ) -> None:
        """Let the provider copy an object; only of an inner store that can."""
        inner = cast("ServerCopies", self._inner)

        def call() -> None:
            inner.copy_from(origin, source_key, key, size_bytes=size_bytes, mode=mode)

        self._under("copy_from", key, call)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below the folder ``prefix``, but the stale ones."""
        found = self._under("list", prefix, lambda: self._inner.list(prefix))
        for info in found:
            self._check_alive("list", prefix)
            if info.key not in self._stale_keys:
                yield info

    def delete_many(self, keys: Sequence[str]) -> None:
        """Delete objects; a missing one is no error."""
        first = keys[0] if keys else ""
        self._under("delete_many", first, lambda: self._inner.delete_many(keys))

    def close(self) -> None:
        """Close the inner store."""
        self._inner.close()

    def _under(
        self,
        verb: str,
        key: str,
        call: Callable[[], _T],
        spoilt: Callable[[_T, StoreFault], _T] | None = None,
    ) -> _T:
        return self._do(self._take(verb, key), verb, key, call, spoilt)

    def _do(
        self,
        fault: StoreFault | None,
        verb: str,
        key: str,
        call: Callable[[], _T],
        spoilt: Callable[[_T, StoreFault], _T] | None = None,
    ) -> _T:
        if fault is None:
            return call()
        if fault.kind in ("short", "long", "flip"):
            answer = call()
            return spoilt(answer, fault) if spoilt is not None else answer
        if fault.kind in ("lost_ack", "crash_after"):
            with suppress(CheckpointError):  # a refusal is an answer too, and is lost
                call()
        raise self._failure(fault, verb, key)

    def _take(self, verb: str, key: str) -> StoreFault | None:
        with self._lock:
            self._num_requests += 1
            if self._is_dead:
                raise Crashed(f"{verb} {key!r}: the process has crashed", key=key)
            for number, fault in enumerate(self._script):
                if fault.verb not in (None, verb) or fault.key not in key:
                    continue
                seen = self._num_seen[number]
                self._num_seen[number] += 1
                if seen >= fault.at and (fault.times is None or seen < fault.at + fault.times):
                    return fault
        return None

    def _check_alive(self, verb: str, key: str) -> None:
        if self._is_dead:
            raise Crashed(f"{verb} {key!r}: the process has crashed", key=key)

    def _failure(self, fault: StoreFault, verb: str, key: str) -> StoreError:
        if fault.kind in ("crash", "crash_after"):
            with self._lock:
                self._is_dead = True
        return _failure(fault, verb, key)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._inner, tuple(self._script), tuple(self._stale_keys))


def _failure(fault: StoreFault, verb: str, key: str) -> StoreError:
    asked = f"{verb} {key!r}"
    if fault.kind in ("crash", "crash_after"):
        return Crashed(f"{asked}: the process crashes here (scripted)", key=key)
    if fault.kind == "denied":
        return StoreError(
            f"{asked} failed: access is denied (scripted)", key=key, denied=True, refused=True
        )
    if fault.kind == "throttle":
        return StoreError(
            f"{asked} failed: 503 SlowDown (scripted)",
            key=key,
            retryable=True,
            throttled=True,
            retry_after_s=fault.retry_after_s,
        )
    return StoreError(f"{asked} failed: {fault.kind} (scripted)", key=key, retryable=True)


def _spoil(data: memoryview, fault: StoreFault) -> memoryview:
    changed = bytearray(data)
    if fault.kind == "short":
        del changed[max(0, len(changed) - fault.num_bytes) :]
    elif fault.kind == "long":
        changed += b"\0" * fault.num_bytes
    elif changed:
        at = fault.bit // 8 % len(changed)
        changed[at] ^= 1 << (fault.bit % 8)
    return memoryview(changed).toreadonly()


def _rebuild(
    inner: Store, script: tuple[StoreFault, ...], stale_keys: tuple[str, ...]
) -> FaultyStore:
    return FaultyStore(inner, script, stale_keys=stale_keys)
