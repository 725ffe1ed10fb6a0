"""The object store as verbs.

A `Store` is rooted at one URL (bucket and prefix); keys are relative to that
root, with ``/`` between their parts. Calls block and are thread-safe:
concurrency belongs to the executors above. A typical save and load call it so:

1. save, coordinator: ``get(".metadata")`` to see whether a checkpoint exists
2. save, every rank:  ``put`` or ``put_parts`` per data object
3. save, coordinator: ``put`` of a large manifest, then the conditional ``put`` of ``.metadata``
4. load, every rank:  ``get(".metadata")``, ``get`` of a large manifest
5. load, every rank:  ``get_range`` many times, from many threads

``list`` and ``delete_many`` serve clean-up and discovery, never a save or a load.

A store may do more, which its caller has to ask for first: receive ranges straight into memory of
the caller's (`FillsMemory`), and let the provider copy objects by itself (`ServerCopies`).
`WrappedStore` is what retries, and the fakes of `dcpstore.testing`, are made of.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, cast, runtime_checkable

from typing_extensions import Buffer

from dcpstore.errors import CheckpointError
from dcpstore.store.limits import NO_LIMITS, Part, StoreLimits, as_bytes_view, check_key
from dcpstore.store.location import Location

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class IfMatch:
    """Put only if the object's current ETag is this one (compare-and-swap)."""

    etag: str


PutMode: TypeAlias = Literal["overwrite", "create"] | IfMatch


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store knows about an object without its bytes.

    Attributes:
        key: Relative to the store's root.
        size_bytes: Length of the object.
        etag: The store's version mark, as the store writes it; None where it has none.
        modified: Time of the last put, timezone-aware; None where unknown.
    """

    key: str
    size_bytes: int
    etag: str | None = None
    modified: datetime | None = None


@dataclass(frozen=True, slots=True)
class Fetched:
    """A whole object: its bytes (read-only to the caller) and its ETag."""

    data: memoryview
    etag: str | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store can promise.

    Attributes:
        atomic_create: ``put(mode="create")`` is decided by the store in one step. Where
            False, the engine looks first and then puts, and two writers can both win.
        compare_and_swap: ``put(mode=IfMatch(...))`` is decided by the store in one
            step. Where False, the engine compares first and then puts.
        parallel_parts: ``put_parts`` sends several parts of one object at a time.
        acknowledges_puts: A put returns the ETag that the store gave the object. Where
            False, the caller should ``head`` an object to be sure of it.
        gathers_parts: ``put_parts`` sends the pieces of a part from where they lie. Where
            False, it joins them first, in memory of its own.
        fills_memory: The store is one that `FillsMemory`.
        limits: The most that it takes. Keys and sizes beyond it are refused without a request.
    """

    atomic_create: bool
    compare_and_swap: bool
    parallel_parts: bool
    acknowledges_puts: bool
    gathers_parts: bool = False
    fills_memory: bool = False
    limits: StoreLimits = NO_LIMITS


@runtime_checkable
class Store(Protocol):
    """An object store rooted at one URL. All methods block and are thread-safe.

    Raises (all methods): `StoreError` for refusals and failures, with ``retryable``,
    ``throttled`` and ``denied`` set; `ConfigError` in a forked child that cannot go on.
    """

    @property
    def url(self) -> str:
        """The root, without secrets."""

    @property
    def capabilities(self) -> Capabilities:
        """What this store promises."""

    def get(self, key: str) -> Fetched:
        """Fetch a whole object.

        Raises:
            NotFoundError: If there is no such object or bucket.
        """

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        """Fetch bytes ``[start, end)``; the answer has exactly that length.

        An empty range returns an empty view without a request.

        Raises:
            NotFoundError: If there is no such object or bucket.
            CorruptError: If the object ends before ``end``.
            StoreError: (retryable) if the answer is shorter or longer than asked for.
        """

    def head(self, key: str) -> ObjectInfo:
        """Look an object up without its bytes.

        Raises:
            NotFoundError: If there is no such object or bucket.
        """

    def put(self, key: str, data: Buffer, *, mode: PutMode = "overwrite") -> str | None:
        """Store one object in one atomic request and return its ETag.

        ``data`` (contiguous bytes) is not kept after the call. Never creates a bucket.

        Raises:
            AlreadyExistsError: If ``mode="create"`` and the object exists.
            ConflictError: If ``mode=IfMatch(...)`` and the object is another or absent.
            NotFoundError: If there is no such bucket.
        """

    def put_parts(
        self, key: str, parts: Iterable[Part], *, part_bytes: int, max_concurrency: int
    ) -> str | None:
        """Store one large object from parts, several in flight, and return its ETag.

        ``parts`` is iterated in the calling thread. Every part but the last has
        exactly ``part_bytes`` (at least 5 MiB on S3). A part is released (the last
        reference to each of its pieces dropped) as soon as it is stored, so the caller may
        refill its memory then. If iteration or a part fails, the upload is aborted, nothing is
        published under ``key``, and the first error is raised.
        """

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object whose key starts with the folder ``prefix``, at any depth.

        ``prefix`` is empty or ends with ``/``. Follows pages. The order is the store's.
        """

    def delete_many(self, keys: Sequence[str]) -> None:
        """Delete objects; a missing one is no error.

        Raises:
            StoreError: Naming how many deletes failed and the first cause.
        """

    def close(self) -> None:
        """Release clients and connections. Idempotent."""


class Revoked(CheckpointError):
    """Whoever lent the memory wants nothing written there any more."""


class Destination:
    """Pieces of the caller's memory that a range's bytes go to, one piece behind the other.

    Engines write inside `writing`, and nowhere else. The caller may `revoke` the memory while
    a request is still under way, and use it as soon as that returns. Thread-safe.

    Args:
        pieces: Writable, contiguous bytes.
    """

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self._pieces = tuple(pieces)
        self.num_bytes = sum(map(len, self._pieces))
        """Bytes that all pieces take."""
        self.was_written = False
        """Whether anything was, or may have been, written."""
        self._changed = threading.Condition()
        self._writer: Callable[[], None] | None = None
        self._is_revoked = False

    def check(self) -> None:
        """Raise `Revoked` if the memory was taken back."""
        if self._is_revoked:
            raise Revoked("the answer would come too late: another one was taken")

    @contextmanager
    def writing(self, interrupt: Callable[[], None]) -> Iterator[tuple[memoryview, ...]]:
        """Hold the right to write to the pieces. One thread at a time.

        Args:
            interrupt: Makes the writer stop soon; called from another thread.

        Raises:
            Revoked: If the memory was taken back.
        """
        with self._changed:
            self.check()
            self._writer = interrupt
            self.was_written = True
        try:
            yield self._pieces
        finally:
            with self._changed:
                self._writer = None
                self._changed.notify_all()

    def revoke(self) -> None:
        """Take the memory back: once this returns, nobody writes there."""
        with self._changed:
            self._is_revoked = True
            if self._writer is not None:
                self._writer()
            self._changed.wait_for(lambda: self._writer is None)

    def take(self, data: memoryview) -> None:
        """Copy an answer that came into other memory. Not while an engine writes."""
        self.was_written = True
        at = 0
        for piece in self._pieces:
            piece[:] = data[at : at + len(piece)]
            at += len(piece)


@runtime_checkable
class FillsMemory(Protocol):
    """A `Store` that may receive ranges straight into memory of the caller's."""

    def fill(self, key: str, start: int, destination: Destination) -> None:
        """Fetch as many bytes from ``start`` on as the destination takes.

        After an error the destination may be written in part.

        Raises: as `Store.get_range`, and `Revoked`.
        """


# --- copies by the provider --------------------------------------------------------------

CopyMode: TypeAlias = Literal["overwrite", "create"]
_COPYING_SCHEMES = frozenset({"s3", "gs"})


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a store's objects lie, and what reaches them.

    Attributes:
        location: The root.
        options: fsspec's options, as given by the user.
    """

    location: Location
    options: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class CopySource:
    """An object to copy, of any store of the same provider.

    Attributes:
        origin: Where it lies.
        key: Relative to the root there.
        size_bytes: Length of the object.
    """

    origin: Origin
    key: str
    size_bytes: int

    @property
    def bucket(self) -> str:
        """Its bucket."""
        return self.origin.location.bucket

    @property
    def path(self) -> str:
        """Its key in the bucket."""
        prefix, key = self.origin.location.prefix, check_key(self.key)
        return f"{prefix}/{key}" if prefix else key


@runtime_checkable
class ServerCopies(Protocol):
    """A `Store` whose provider may copy objects, so that no byte passes through this process.

    S3 and Google copy between buckets that the same credentials reach at the same endpoint. Both
    engines of a URL do it through s3fs or gcsfs, since obstore copies within one bucket only, takes
    no condition on S3, and stops at S3's limit of 5 GiB. Azure's copies may go on after the answer,
    and nobody here waits for them: they pass through the process, as folders and memory do.
    """

    def copy_from(self, source: CopySource, key: str, mode: CopyMode = "overwrite") -> None:
        """Copy one object of another store of the provider; whole under its key, or not at all.

        Failures that may pass are repeated by the engine, parts of a large object singly.

        Raises:
            AlreadyExistsError: If ``mode="create"`` and the object exists.
            StoreError: If the provider refused or failed; ``retryable`` tells which.
            ConfigError: If the engine that copies does not take the options.
        """


def server_copier(source: Store, target: Store) -> Callable[..., None] | None:
    """Return what copies from one store to another by the provider alone, if it can.

    It takes the key of the source, that of the copy, ``size_bytes`` and perhaps a ``mode``, and
    raises as `ServerCopies.copy_from` does.

    Whether it may, the provider tells when asked: a refusal is a `StoreError`.

    Args:
        source: Rooted at the bucket and prefix to copy from.
        target: To copy to. Retries and wrappers of its own apply.
    """
    here, there = _origin_of(source), _origin_of(target)
    if here is None or there is None or not isinstance(target, ServerCopies):
        return None
    scheme = here.location.scheme
    if scheme not in _COPYING_SCHEMES or scheme != there.location.scheme:
        return None
    if dict(here.options) != dict(there.options):
        return None

    def copy(source_key: str, key: str, *, size_bytes: int, mode: CopyMode = "overwrite") -> None:
        target.copy_from(CopySource(here, source_key, size_bytes), key, mode)

    return copy


def _origin_of(store: Store) -> Origin | None:
    """Return where the engine under all wrappers keeps its objects."""
    while (inner := getattr(store, "inner", None)) is not None:
        store = inner
    found = getattr(store, "origin", None)
    return found if isinstance(found, Origin) else None


# --- stores around stores ----------------------------------------------------------------


@dataclass(slots=True)
class Call:
    """One call of a verb, as a `WrappedStore` passes it on.

    Attributes:
        verb: Name of the method; ``get_range`` for a ``fill``, which sends the same request.
        key: The key, the prefix, or the first of several keys.
        start: First byte asked for by ``get_range``; None for other verbs.
        end: End of the range (exclusive).
        num_bytes: Of the body of a ``put``; keys of a ``delete_many``.
        mode: ``overwrite``, ``create`` or ``match`` for a ``put`` or ``copy_from``; None for
            others.
    """

    verb: str
    key: str
    start: int | None = None
    end: int | None = None
    num_bytes: int = 0
    mode: str | None = None


class WrappedStore:
    """A `Store` that passes every call on to another one, all of them through `_pass`.

    Args:
        inner: The store that does the work.
    """

    def __init__(self, inner: Store) -> None:
        self._inner = inner

    @property
    def inner(self) -> Store:
        """The store that does the work."""
        return self._inner

    @property
    def url(self) -> str:
        """The root, without secrets."""
        return self._inner.url

    @property
    def capabilities(self) -> Capabilities:
        """What the inner store promises."""
        return self._inner.capabilities

    def _pass(self, call: Call, request: Callable[[Store], _T]) -> _T:
        """Let the inner store do what is asked; for subclasses to do something about it.

        Args:
            call: What is asked.
            request: Asks it of a store, and returns the answer.
        """
        del call
        return request(self._inner)

    def get(self, key: str) -> Fetched:
        """Fetch a whole object."""
        return self._pass(Call("get", key), lambda inner: inner.get(key))

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        """Fetch bytes ``[start, end)``."""
        call = Call("get_range", key, start, end)
        return self._pass(call, lambda inner: inner.get_range(key, start, end))

    def fill(self, key: str, start: int, destination: Destination) -> None:
        """Fetch a range straight into memory of the caller's; only of an inner store that can."""
        call = Call("get_range", key, start, start + destination.num_bytes)
        self._pass(call, lambda inner: cast("FillsMemory", inner).fill(key, start, destination))

    def head(self, key: str) -> ObjectInfo:
        """Look an object up without its bytes."""
        return self._pass(Call("head", key), lambda inner: inner.head(key))

    def put(self, key: str, data: Buffer, *, mode: PutMode = "overwrite") -> str | None:
        """Store one object in one atomic request and return its ETag."""
        call = Call("put", key, num_bytes=as_bytes_view(data).nbytes)
        call.mode = mode if isinstance(mode, str) else "match"
        return self._pass(call, lambda inner: inner.put(key, data, mode=mode))

    def put_parts(
        self, key: str, parts: Iterable[Part], *, part_bytes: int, max_concurrency: int
    ) -> str | None:
        """Store one large object from parts, several in flight, and return its ETag."""
        call = Call("put_parts", key)
        sizes = {"part_bytes": part_bytes, "max_concurrency": max_concurrency}
        return self._pass(call, lambda inner: inner.put_parts(key, parts, **sizes))

    def copy_from(self, source: CopySource, key: str, mode: CopyMode = "overwrite") -> None:
        """Let the provider copy an object; only of an inner store that can."""
        call = Call("copy_from", key, mode=mode)
        self._pass(call, lambda inner: cast("ServerCopies", inner).copy_from(source, key, mode))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below the folder ``prefix``."""
        yield from self._pass(Call("list", prefix), lambda inner: inner.list(prefix))

    def delete_many(self, keys: Sequence[str]) -> None:
        """Delete objects; a missing one is no error."""
        call = Call("delete_many", keys[0] if keys else "", num_bytes=len(keys))
        self._pass(call, lambda inner: inner.delete_many(keys))

    def close(self) -> None:
        """Close the inner store."""
        self._inner.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._inner,)
