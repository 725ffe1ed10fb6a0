"""The general engine: local folders, memory, Google, and any other fsspec filesystem.

S3 has an engine of its own over s3fs, `dcpstore.store.s3fs_engine`. Requests of filesystems that
work on an event loop (Google's, Azure's, HTTP's) have time-outs of ours; others have their own.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from dcpstore.errors import NotFoundError, StoreError
from dcpstore.store.base import Capabilities, CopyMode, Fetched, ObjectInfo, Origin
from dcpstore.store.error_map import Asked, check_length, deletes_failed
from dcpstore.store.fsspec_clients import FsspecClients, ask_fsspec, run_within
from dcpstore.store.fsspec_writers import TEMPORARY, info_of, writer_for
from dcpstore.store.gcsfs_writer import rewrite
from dcpstore.store.limits import StoreLimits, as_bytes_view, check_key, checked_parts, limits_of
from dcpstore.store.retry import RetryPolicy, TimeLimit, copy_with_retries

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from typing_extensions import Buffer

    from dcpstore.store.base import PutMode
    from dcpstore.store.limits import Part
    from dcpstore.store.location import Location


_T = TypeVar("_T")
_DELETE_THREADS = 8


class FsspecStore:
    """A `Store` on any fsspec filesystem.

    Picklable by its configuration. In a forked child it opens a filesystem of its own.

    Args:
        location: The root.
        storage_options: The filesystem's own options.
        part_policy: How long a request may take, and how long to keep trying to send a part, and
            to `copy_from`.
        limits: The most that the store takes; None for what is known of the scheme.

    Raises:
        ConfigError: If the filesystem's package is missing or an option is unknown.
    """

    def __init__(
        self,
        location: Location,
        storage_options: Mapping[str, Any] | None = None,
        *,
        part_policy: RetryPolicy | None = None,
        limits: StoreLimits | None = None,
    ) -> None:
        self._location = location
        self._part_policy = part_policy or RetryPolicy()
        self._time = TimeLimit(self._part_policy)
        self._options = dict(storage_options or {})
        self._clients = FsspecClients(location, self._options)
        self._writer = writer_for(location.scheme, self._part_policy)
        root = "/".join(part for part in (location.bucket, location.prefix) if part)
        self._root = root.rstrip("/") + "/" if root else ""
        self._given_limits = limits
        if limits is None:  # what is sent one behind another has no number of parts
            limits = replace(limits_of(location.scheme), max_parts=None)
        prefix = location.prefix.rstrip("/")
        self._limits = limits.below(f"{prefix}/" if prefix else "")
        self._capabilities = replace(self._writer.capabilities, limits=self._limits)

    @property
    def url(self) -> str:
        """The root, without secrets."""
        return self._location.url

    @property
    def capabilities(self) -> Capabilities:
        """What this store promises."""
        return self._capabilities

    def within(self, most_s: float) -> FsspecStore:
        """Return the same store for one request, which fails when so many seconds are over."""
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__, _time=self._time.within(most_s))
        return view

    def get(self, key: str) -> Fetched:
        """Fetch a whole object. The mark is asked for first, so it is never too new."""
        path = self._path(key)

        def call() -> Fetched:
            fs = self._clients.get()
            found = info_of(key, run_within(self._time.seconds(), fs, "info", path))
            most_s = self._time.reading_s()
            return Fetched(_view(run_within(most_s, fs, "cat_file", path)), found.etag)

        return ask_fsspec(Asked("get", key, self.url), call)

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        """Fetch bytes ``[start, end)``."""
        if end <= start:
            return memoryview(b"")
        path = self._path(key)
        asked = Asked(f"get [{start}, {end}) of", key, self.url)

        def call() -> memoryview:
            fs, most_s = self._clients.get(), self._time.reading_s()
            return _view(run_within(most_s, fs, "cat_file", path, start=start, end=end))

        return check_length(
            asked, start, end, lambda: ask_fsspec(asked, call), lambda: self.head(key)
        )

    def head(self, key: str) -> ObjectInfo:
        """Look an object up without its bytes."""
        path = self._path(key)

        def call() -> ObjectInfo:
            found = run_within(self._time.seconds(), self._clients.get(), "info", path)
            if found.get("type") == "directory":
                raise FileNotFoundError(f"{key} is a folder")
            return info_of(key, found)

        return ask_fsspec(Asked("head", key, self.url), call)

    def put(self, key: str, data: Buffer, *, mode: PutMode = "overwrite") -> str | None:
        """Store one object in one atomic request and return its ETag."""
        path, body = self._path(key), as_bytes_view(data)
        asked = Asked("put", key, self.url).under(mode)
        self._limits.check_put(key, body.nbytes)
        fs = self._clients.get()
        return ask_fsspec(asked, lambda: self._writer.put(fs, path, body, mode, self._time))

    def put_parts(
        self, key: str, parts: Iterable[Part], *, part_bytes: int, max_concurrency: int
    ) -> str | None:
        """Store one large object from parts, one after another, and return its ETag."""
        del max_concurrency  # a file object takes one part at a time
        path = self._path(key)
        stream = checked_parts(parts, part_bytes, self._limits)
        upload = self._writer.open_upload(self._clients.get, path, part_bytes)
        asked = Asked("put_parts", key, self.url)
        try:
            # Only the upload's own errors are mapped; the caller's come through.
            for part in stream:
                ask_fsspec(asked, lambda part=part: upload.write(part))  # type: ignore[misc]
                del part
            return ask_fsspec(asked, upload.finish)
        except BaseException:
            upload.abort()
            raise

    @property
    def origin(self) -> Origin:
        """Where the objects lie, for a provider's own copies."""
        return Origin(self._location, self._options)

    def copy_from(
        self,
        origin: Origin,
        source_key: str,
        key: str,
        *,
        size_bytes: int,
        mode: CopyMode = "overwrite",
    ) -> None:
        """Let Google copy an object, however large; nobody else is asked to."""
        del size_bytes
        asked = Asked("copy to", key, self.url).under(mode)
        paths = f"{origin.location.bucket}/{origin.path(source_key)}", self._path(key)

        def call() -> None:
            ask_fsspec(asked, lambda: rewrite(self._clients.get(), *paths, mode, self._part_policy))

        copy_with_retries(call, self._part_policy)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below the folder ``prefix``."""
        asked = Asked("list", prefix, self.url)
        below = (self._root + prefix).rstrip("/")

        def call() -> dict[str, dict[str, Any]]:
            fs = self._clients.get()
            try:
                most_s = self._time.left_s()  # it may be many requests
                found: dict[str, dict[str, Any]] = run_within(
                    most_s, fs, "find", below, detail=True
                )
            except FileNotFoundError:
                if self._location.bucket:
                    raise
                return {}  # a folder that nobody has made yet is empty
            return found

        root = self._clients.get()._strip_protocol(self._root or "/")  # noqa: SLF001 - fsspec's own API for implementers and callers alike
        cut = len(root.rstrip("/")) + 1 if root else 0
        for path, info in ask_fsspec(asked, call).items():
            key = path[cut:]
            if info.get("type") != "directory" and key and TEMPORARY not in key:
                yield info_of(key, info)

    def delete_many(self, keys: Sequence[str]) -> None:
        """Delete objects; a missing one is no error."""
        with ThreadPoolExecutor(_DELETE_THREADS, "dcpstore-delete") as pool:
            failures = [f for f in pool.map(self._delete, keys) if f is not None]
        if failures:
            raise deletes_failed(failures[0], len(failures), len(keys)) from failures[0]

    def close(self) -> None:
        """Drop the filesystem; a later call opens a new one."""
        self._clients.close()

    def _delete(self, key: str) -> StoreError | None:
        fs, path = self._clients.get(), self._path(key)
        try:
            ask_fsspec(
                Asked("delete", key, self.url),
                lambda: run_within(self._time.seconds(), fs, "rm_file", path),
            )
        except NotFoundError:
            return None
        except StoreError as error:
            return error
        return None

    def _path(self, key: str) -> str:
        self._limits.check_key(key)
        return self._root + check_key(key)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._location, self._options, self._part_policy, self._given_limits)


def _view(data: Any) -> memoryview:
    if isinstance(data, BaseException):
        raise data  # some bulk calls of fsspec hand errors back as values
    return memoryview(data).toreadonly()


def _rebuild(
    location: Location,
    options: dict[str, Any],
    part_policy: RetryPolicy,
    limits: StoreLimits | None,
) -> FsspecStore:
    return FsspecStore(location, options, part_policy=part_policy, limits=limits)
