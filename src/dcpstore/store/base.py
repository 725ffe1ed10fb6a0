"""The object store as verbs.

A `Store` is rooted at one URL (bucket and prefix); keys are relative to that
root, with ``/`` between their parts. Calls block and are thread-safe:
concurrency belongs to the executors above. A typical save and load call it so:

1. save, coordinator: ``get(".metadata")`` to see whether a checkpoint exists
2. save, every rank:  ``put`` or ``put_parts`` per data object
3. save, coordinator: ``put`` of a large manifest, then the conditional ``put`` of ``.metadata``
4. load, every rank:  ``get(".metadata")``, ``get`` of a large manifest
5. load, every rank:  ``get_range`` many times, from many threads

``list``, ``folders``, ``get_tail`` and ``delete_many`` serve clean-up and discovery, never a save
or a load.

A store may do more, which its caller has to ask for first: receive ranges straight into memory of
the caller's (`FillsMemory`), let the provider copy objects by itself (`ServerCopies`), and read an
object that is damaged from another place (`HasSpares`).

What a store refuses by its name or size is known before the first byte is sent:

======  ==========  ==========  =========  ==========  ===================================
scheme  parts       a part      a put      an object   a key
======  ==========  ==========  =========  ==========  ===================================
s3, gs  10,000      5 GiB       5 GiB      5 TiB       1,024 bytes of UTF-8
az      50,000      4,000 MiB   5,000 MiB  4.75 TiB    1,024 characters
file                                                   4,095 bytes, 255 between slashes
======  ==========  ==========  =========  ==========  ===================================

From "Amazon S3 multipart upload limits", "Cloud Storage quotas and limits", and "Scalability and
performance targets for Blob storage", whose 4.75 TiB hold for every version of Azure's service.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

from typing_extensions import Buffer

from dcpstore.errors import CheckpointError, ConfigError

_T = TypeVar("_T")
_MIB = 1 << 20
_GIB = 1 << 30
_TIB = 1 << 40
_ALIGN = 4096


Part: TypeAlias = Buffer | tuple[Buffer, ...]
"""A part of an upload: its bytes, or the pieces that lie one behind the other in it."""


# --- what a store takes ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """The most that a store takes; None where it sets no limit.

    Attributes:
        max_parts: Parts of one object.
        max_part_bytes: Size of a part, and of what is copied in one request.
        max_put_bytes: Size of an object that is put in one request.
        max_object_bytes: Size of an object.
        max_key_bytes: Length of a key in UTF-8, below the store's root.
        max_key_chars: Length of a key in characters, below the store's root.
        max_name_bytes: Length of what stands between two slashes of a key.
    """

    max_parts: int | None = None
    max_part_bytes: int | None = None
    max_put_bytes: int | None = None
    max_object_bytes: int | None = None
    max_key_bytes: int | None = None
    max_key_chars: int | None = None
    max_name_bytes: int | None = None

    def below(self, root: str) -> StoreLimits:
        """The same for keys below a root, whose length counts too."""
        key_bytes, key_chars = self.max_key_bytes, self.max_key_chars
        return replace(
            self,
            max_key_bytes=None if key_bytes is None else key_bytes - len(root.encode()),
            max_key_chars=None if key_chars is None else key_chars - len(root),
        )

    def check_key(self, key: str) -> None:
        """Refuse a key that is too long.

        Raises:
            ConfigError: Telling how long it may be.
        """
        longest = max(key.split("/"), key=_num_encoded)
        for most, size, unit in (
            (self.max_key_bytes, _num_encoded(key), "bytes"),
            (self.max_key_chars, len(key), "characters"),
            (self.max_name_bytes, _num_encoded(longest), "bytes between slashes"),
        ):
            if most is not None and size > most:
                raise ConfigError(
                    f"the key {key!r} is too long: it has {size} {unit}, and {max(0, most)} may be"
                    " below this URL. Choose a shorter one"
                )

    def check_put(self, key: str, num_bytes: int) -> None:
        """Refuse an object that is too large for one request.

        Raises:
            ConfigError: If it is.
        """
        if self.max_put_bytes is not None and num_bytes > self.max_put_bytes:
            raise ConfigError(
                f"{key!r} has {num_bytes} bytes, and the store takes {self.max_put_bytes} in one"
                " request"
            )

    def check_part(self, number: int, part_bytes: int) -> None:
        """Refuse a part that no upload takes.

        Args:
            number: Counted from 0.
            part_bytes: Its size.

        Raises:
            ConfigError: If there are too many, or it is too large.
        """
        if self.max_parts is not None and number >= self.max_parts:
            raise ConfigError(
                f"the object has more than {self.max_parts} parts of {part_bytes} bytes, the most"
                " that the store takes. Raise part_bytes"
            )
        if self.max_part_bytes is not None and part_bytes > self.max_part_bytes:
            raise ConfigError(
                f"a part of {part_bytes} bytes is larger than the {self.max_part_bytes} bytes that"
                " the store takes. Lower part_bytes"
            )

    def part_bytes_for(self, object_bytes: int, usual_bytes: int) -> int:
        """Return the usual size of parts, or the least larger one in which an object fits.

        Raises:
            ConfigError: If it fits in none.
        """
        if self.max_object_bytes is not None and object_bytes > self.max_object_bytes:
            raise ConfigError(
                f"an object of about {object_bytes} bytes is larger than the"
                f" {self.max_object_bytes} bytes that the store takes"
            )
        if self.max_parts is None or object_bytes <= self.max_parts * usual_bytes:
            return usual_bytes
        least_bytes = -(-object_bytes // self.max_parts)
        part_bytes = -(-least_bytes // _ALIGN) * _ALIGN
        self.check_part(0, part_bytes)
        return part_bytes


def limits_of(scheme: str) -> StoreLimits:
    """Return the limits of the store behind a scheme; none where nothing is known."""
    return _KNOWN.get(scheme, NO_LIMITS)


def _num_encoded(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


NO_LIMITS = StoreLimits()
_S3 = StoreLimits(
    max_parts=10_000,
    max_part_bytes=5 * _GIB,
    max_put_bytes=5 * _GIB,
    max_object_bytes=5 * _TIB,
    max_key_bytes=1024,
)
_KNOWN = {
    "s3": _S3,
    "gs": _S3,
    "az": StoreLimits(
        max_parts=50_000,
        max_part_bytes=4000 * _MIB,
        max_put_bytes=5000 * _MIB,
        max_object_bytes=19 * _TIB // 4,
        max_key_chars=1024,
    ),
    "file": StoreLimits(max_key_bytes=4095, max_name_bytes=255),
}


def as_bytes_view(data: Buffer) -> memoryview:
    """View any contiguous buffer as flat bytes, without a copy.

    Raises:
        ConfigError: If the buffer is not contiguous.
    """
    # The same object where it is flat already: its owner may watch for its release.
    view = data if isinstance(data, memoryview) else memoryview(data)
    if not view.c_contiguous:
        raise ConfigError("a body must be contiguous in memory")
    if view.nbytes == 0:
        return memoryview(b"")
    return view if view.ndim == 1 and view.format == "B" else view.cast("B")


def check_key(key: str) -> str:
    """Return the key if every engine can store it under that very name.

    Raises:
        ConfigError: If it is empty, starts or ends with ``/``, or has an empty, ``.``
            or ``..`` segment.
    """
    if not key or any(segment in ("", ".", "..") for segment in key.split("/")):
        raise ConfigError(
            f"{key!r} is not a key: it needs non-empty segments other than '.' and '..', "
            "joined by single slashes"
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return the prefix of a folder if it is one: empty, or a key and a ``/``.

    Raises:
        ConfigError: If it is not.
    """
    if prefix and not prefix.endswith("/"):
        raise ConfigError(f"{prefix!r} is not the prefix of a folder: it needs a '/' at its end")
    if prefix:
        check_key(prefix[:-1])
    return prefix


def pieces_of(part: Part) -> tuple[memoryview, ...]:
    """View the pieces of a part as flat bytes, without a copy."""
    pieces = part if isinstance(part, tuple) else (part,)
    return tuple(as_bytes_view(piece) for piece in pieces)


def joined(pieces: tuple[memoryview, ...]) -> memoryview:
    """Return the bytes of a part in one buffer; copies them if they lie in several."""
    return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))


def num_bytes_of(pieces: Iterable[memoryview]) -> int:
    """Return how long a part is."""
    return sum(piece.nbytes for piece in pieces)


def checked_pieces(
    parts: Iterable[Part], part_bytes: int, limits: StoreLimits
) -> Iterator[tuple[memoryview, ...]]:
    """Yield the pieces of each part as flat bytes and hold none of them.

    Raises:
        ConfigError: If a part other than the last has another size than ``part_bytes``,
            or ``part_bytes`` is not positive, or the store takes no such part.
    """
    if part_bytes <= 0:
        raise ConfigError(f"part_bytes={part_bytes} is not positive")
    short: int | None = None
    number = -1
    for part in parts:  # enumerate would hold each part until the next one is there
        number += 1
        limits.check_part(number, part_bytes)
        pieces = pieces_of(part)
        del part
        num_bytes = num_bytes_of(pieces)
        if short is not None or num_bytes > part_bytes:
            at = number if short is None else number - 1
            size = num_bytes if short is None else short
            raise ConfigError(f"part {at} has {size} bytes; all but the last need {part_bytes}")
        if num_bytes < part_bytes:
            short = num_bytes
        yield pieces
        del pieces


def chained(held: list[_T], rest: Iterator[_T]) -> Iterator[_T]:
    """Yield all and hold none of them: `itertools.chain` would hold the list to the end."""
    while held:
        yield held.pop(0)
    yield from rest


class ByteRange(NamedTuple):
    """Bytes ``[start, end)`` of an object or a payload."""

    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Length of the range in bytes."""
        return self.end - self.start


# --- the verbs ---------------------------------------------------------------------------


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
class Tail:
    """The end of an object.

    Attributes:
        data: Its last bytes (read-only to the caller).
        size_bytes: Length of the whole object.
        etag: As of `ObjectInfo`.
        modified: As of `ObjectInfo`.
    """

    data: memoryview
    size_bytes: int
    etag: str | None = None
    modified: datetime | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store can promise.

    Attributes:
        atomic_create: ``put(mode="create")`` is decided by the store in one step. Where
            False, the engine looks first and then puts, and two writers can both win.
        compare_and_swap: ``put(mode=IfMatch(...))`` is decided by the store in one
            step. Where False, the engine compares first and then puts.
        acknowledges_puts: A put returns the ETag that the store gave the object. Where
            False, the caller should ``head`` an object to be sure of it.
        gathers_parts: ``put_parts`` sends the pieces of a part from where they lie. Where
            False, it joins them first, in memory of its own.
        fills_memory: The store is one that `FillsMemory`.
        limits: The most that it takes. Keys and sizes beyond it are refused without a request.
    """

    atomic_create: bool
    compare_and_swap: bool
    acknowledges_puts: bool
    gathers_parts: bool = False
    fills_memory: bool = False
    limits: StoreLimits = NO_LIMITS

    def decides(self, mode: PutMode) -> bool:
        """Whether the store itself refuses a put whose condition no longer holds."""
        if mode == "overwrite":
            return False
        return self.atomic_create if mode == "create" else self.compare_and_swap


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

    def get_tail(self, key: str, num_bytes: int) -> Tail:
        """Fetch the last bytes of an object, all if it is shorter, and learn how long it is.

        One request where the store has ranges from the end, else a ``head`` and a ``get_range``.

        Raises:
            ConfigError: If ``num_bytes`` is not positive.
            NotFoundError: If there is no such object or bucket.
            StoreError: (retryable) if the answer is shorter or longer than asked for, or the
                object was replaced between two requests.
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

    def folders(self, prefix: str = "") -> Sequence[str]:
        """Return the names of the folders right below the folder ``prefix``, without slashes.

        A folder is what objects lie below, at any depth. ``prefix`` is empty or ends with ``/``.
        Follows pages; an absent folder has none. The order is the store's.

        Raises:
            ConfigError: If ``prefix`` is not that of a folder.
            NotFoundError: If there is no such bucket.
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

    def take(self, data: memoryview, start: int = 0) -> None:
        """Copy an answer, or a part of it, that came into other memory.

        Not while an engine writes.

        Args:
            data: Bytes.
            start: Where in the destination they belong.
        """
        self.was_written = True
        for piece in self._pieces:
            part = piece[max(start, 0) :][: len(data)]
            part[:] = data[: len(part)]
            data = data[len(part) :]
            start -= len(piece)


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
class Location:
    """A bucket and a prefix.

    Attributes:
        scheme: ``s3``, ``gs``, ``az``, ``file``, ``memory``, or another that fsspec knows.
        bucket: Bucket or container; empty for ``file`` and for other schemes.
        prefix: Key prefix without slashes at its ends; the absolute path for ``file``.
        url: The root as a user would write it, without secrets.
        account: The storage account where an Azure URL names one.
    """

    scheme: str
    bucket: str
    prefix: str
    url: str
    account: str | None = None


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
        bucket: Where it lies.
        path: Its key in the bucket.
        size_bytes: Length of the object.
    """

    bucket: str
    path: str
    size_bytes: int


@runtime_checkable
class HasSpares(Protocol):
    """A `Store` some of whose objects lie in a second place, too. Thread-safe."""

    def use_spare(self, key: str, error: CheckpointError) -> bool:
        """Read an object from its second place from now on, and warn of it.

        Args:
            key: The object.
            error: What is wrong with it in the first place.

        Returns:
            Whether it has a second place.
        """


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
        prefix = here.location.prefix
        path = f"{prefix}/{check_key(source_key)}" if prefix else check_key(source_key)
        target.copy_from(CopySource(here.location.bucket, path, size_bytes), key, mode)

    return copy


def _origin_of(store: Store) -> Origin | None:
    """Return where the engine under all wrappers keeps its objects."""
    while (inner := getattr(store, "inner", None)) is not None:
        store = inner
    found = getattr(store, "origin", None)
    return found if isinstance(found, Origin) else None
