"""What saves left behind that no sealed checkpoint refers to, and how to remove it.

Nothing is deleted that may be part of a checkpoint, of a running save, or of anybody else:

1. list everything below the URL; pick what only a save can have left: data objects and
   manifests with a save id, probes of ``dcpstore doctor``, open uploads
2. per folder, read all metadata and take out what they refer to. The answer is either sure or an
   error: metadata that are damaged, refused or strange say nothing of what they referred to, so a
   folder whose metadata cannot be read whole is left alone
3. leave a folder alone while anything unsealed in it is younger than `older_than_s`: a save may
   be running. Ages are those of the store's clock; an object of unknown age is kept
4. before deleting in a folder, read its metadata again: whatever was sealed meanwhile stays
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, TypeAlias

from dcpstore.config import ReadConfig
from dcpstore.errors import CheckpointError, ConfigError, NotFoundError, StoreError
from dcpstore.format.seal import METADATA_KEY, metadata_key, rank_of, save_id_of
from dcpstore.store import open_store
from dcpstore.store.base import ObjectInfo, Store
from dcpstore.store.folder import Folder, parse_location
from dcpstore.store.uploads import OpenUpload, OpenUploads, open_uploads_at
from dcpstore.text import age_text
from dcpstore.write.commit import keys_named_in

_MAX_REQUESTS = 32


class UnsureError(Exception):
    """It cannot be told what a folder's metadata refer to."""


def _referred_by(store: Store, folder: str, name: str, listed: Collection[str]) -> frozenset[str]:
    """Return the keys that one metadata object refers to, its own included.

    Raises:
        UnsureError: If it is there and cannot be read whole.
        StoreError: If the store fails for good.
    """
    key = folder + name
    try:
        keys = _read(store, folder, name)
    except NotFoundError as error:
        if key in listed:
            raise UnsureError(f"{key} was listed, and then not found ({error})") from error
        return frozenset()
    except StoreError as error:
        if error.retryable:
            raise
        raise UnsureError(f"{key} may not be read: {error}") from error
    except CheckpointError:
        try:  # an overwrite may have swept the manifest after the metadata was read
            keys = _read(store, folder, name)
        except CheckpointError as error:
            if isinstance(error, StoreError) and error.retryable:
                raise
            raise UnsureError(f"{key} is there, but {error}") from error
    return frozenset({key, *(folder + one for one in keys)})


def _read(store: Store, folder: str, name: str) -> set[str]:
    """Return the keys that one metadata object refers to, relative to its folder.

    Raises:
        NotFoundError: If there is no such metadata object.
        CorruptError: If it is damaged, or its manifest is gone.
    """
    return keys_named_in(store, store.get(folder + name).data, key=name, folder=folder)


DEFAULT_AGE_S = 24 * 3600.0
"""Longer than any save runs, and than any clock is wrong that a store accepts requests from."""

PROBE_FOLDER = re.compile(r"\.dcpstore-doctor-[0-9a-f]{16}")
"""The folder that ``dcpstore doctor`` probes in, and empties."""

_STOCK_DATA = re.compile(r"__(\d+)_\d+\.distcp|\.metadata\.tmp")
# A local file that an engine was writing is told by its name alone, and may be somebody's own.
_WRITTEN = re.compile(r"\.dcpstore-.*|.*\.(?:metadata|distcp|safetensors|pt|pth|json)")

LeftoverKind: TypeAlias = Literal["object", "stock", "probe", "upload"]


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something that no sealed checkpoint refers to.

    Attributes:
        kind: ``object``: data or a manifest of a save of ours. ``stock``: data of a stock
            writer. ``probe``: of ``dcpstore doctor``. ``upload``: parts of an object that was
            never finished.
        key: Relative to the URL.
        modified: When it was last written, by the store's clock; None where unknown.
        size_bytes: None where the store does not tell.
        upload: The upload itself.
    """

    kind: LeftoverKind
    key: str
    modified: datetime | None
    size_bytes: int | None = None
    upload: OpenUpload | None = None

    @property
    def folder(self) -> str:
        """Where it lies: empty, or with a slash at its end."""
        return _split(self.key)[0]

    @property
    def rank(self) -> int | None:
        """The rank in its name; None if there is none."""
        return rank_of(self.key)


@dataclass(frozen=True, slots=True)
class Kept:
    """Leftovers of one folder that are not to be removed now, and why.

    Attributes:
        folder: Empty, or with a slash at its end.
        leftovers: What may be left over there.
        reason: Why it is kept.
    """

    folder: str
    leftovers: tuple[Leftover, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What may be removed below a URL, and what may not.

    Attributes:
        url: That was looked at.
        removable: What no checkpoint refers to and no save can still be writing.
        kept: What looks left over and is not to be removed, by folder.
        notes: What could not be looked at; for people.
    """

    url: str
    removable: tuple[Leftover, ...]
    kept: tuple[Kept, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of what is removable, where the store tells them."""
        return sum(one.size_bytes or 0 for one in self.removable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What counts as left over.

    Attributes:
        older_than_s: Leave a folder alone that anything unsealed was written to since.
        include_stock: Look for data objects of stock DCP too. Their names say nothing of the
            save they belong to, only that no metadata refer to them.
    """

    older_than_s: float = DEFAULT_AGE_S
    include_stock: bool = False

    def __post_init__(self) -> None:
        if not self.older_than_s >= 0:
            raise ConfigError(f"older_than_s={self.older_than_s!r} must be at least 0 seconds")


class Place:
    """The store at a URL and its open uploads. A context manager.

    Args:
        url: A checkpoint's folder, or one above many.
        storage_options: fsspec's options for its protocol.
        config: Engine and retries.
        store_opener: Opens the store, for tests.
        uploads_opener: Opens the list of uploads, for tests.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
        config: ReadConfig | None = None,
        *,
        store_opener: Callable[..., Store] = open_store,
        uploads_opener: Callable[..., OpenUploads | None] = open_uploads_at,
    ) -> None:
        config = config or ReadConfig()
        self._folder = Folder(url, storage_options, config, store_opener)
        self.url = self._folder.url
        self.scheme = parse_location(url).scheme
        self.store = self._folder.open()
        retry = self._folder.policy
        self.uploads = uploads_opener(url, storage_options=storage_options, retry=retry)

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *error: object) -> None:
        if self.uploads is not None:
            self.uploads.close()
        self._folder.close()


def find_leftovers(
    at: Place, rules: Rules | None = None, clock: Callable[[], float] = time.time
) -> Leftovers:
    """Look for what saves left. Changes nothing.

    Args:
        at: A checkpoint's folder, or one above many.
        rules: What counts as left over.
        clock: Seconds since the epoch, to tell the ages of objects by.

    Raises:
        NotFoundError: If there is no such bucket.
        StoreError: If the store refuses to list, or fails.
    """
    rules = rules or Rules()
    folders: dict[str, _Folder] = {}
    listed: set[str] = set()
    for info in _list(at.store):
        _sort_in(folders, info, rules)
        if info.key.endswith(METADATA_KEY):
            listed.add(info.key)
    notes = tuple(_sort_in_uploads(folders, at))
    ranks = {name: one.ranks for name, one in folders.items()}
    references = References(at.store, ranks, listed)
    now_s = clock()
    removable: list[Leftover] = []
    kept: list[Kept] = []
    for name, folder in sorted(folders.items()):
        if not folder.suspects:
            continue
        left, reason = _judge(references, name, folder.suspects)
        reason = reason or _why_too_young(left, rules, now_s)
        if not reason:
            removable += left
        elif left:
            kept.append(Kept(name, tuple(left), reason))
    return Leftovers(at.url, tuple(removable), tuple(kept), notes)


@dataclass(slots=True)
class _Folder:
    """What is known of one folder while leftovers are looked for."""

    suspects: list[Leftover] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)


def _list(store: Store) -> Iterator[ObjectInfo]:
    try:
        yield from store.list()
    except StoreError as error:
        if not error.denied:
            raise
        raise StoreError(
            f"{store.url}: leftovers can only be found by listing, and the store refuses to list:"
            f" {error}. On S3 grant s3:ListBucket; nothing was deleted",
            denied=True,
        ) from error


def _split(key: str) -> tuple[str, str]:
    """Return a key's folder, with a slash at its end or empty, and its name."""
    folder, slash, name = key.rpartition("/")
    return folder + slash, name


def _sort_in(folders: dict[str, _Folder], info: ObjectInfo, rules: Rules) -> None:
    name_of_folder, name = _split(info.key)
    kind = _kind_of(name_of_folder, name, rules)
    rank = rank_of(name)
    if kind is None and rank is None:
        return
    folder = folders.setdefault(name_of_folder, _Folder())
    if kind is not None:
        folder.suspects.append(Leftover(kind, info.key, info.modified, info.size_bytes))
    if rank is not None:
        folder.ranks.add(rank)


def _kind_of(folder: str, name: str, rules: Rules) -> LeftoverKind | None:
    if PROBE_FOLDER.fullmatch(folder.rstrip("/").rpartition("/")[2]):
        return "probe"
    if save_id_of(name) is not None:
        return "object"
    return "stock" if rules.include_stock and _STOCK_DATA.fullmatch(name) else None


def _sort_in_uploads(folders: dict[str, _Folder], at: Place) -> Iterator[str]:
    """Sort the open uploads in; yield why they could not be looked for."""
    if at.uploads is None:
        yield (
            "open uploads were not searched for: this store cannot list them. Google and Azure"
            " drop unfinished uploads after a week"
        )
        return
    try:
        for one in at.uploads.list():
            if at.scheme == "file" and not _WRITTEN.fullmatch(_split(one.key)[1]):
                continue
            folder = folders.setdefault(_split(one.key)[0], _Folder())
            folder.suspects.append(Leftover("upload", one.key, one.modified, one.size_bytes, one))
    except StoreError as error:
        if error.retryable:
            raise
        yield (
            f"open uploads were not searched for: {error}. On S3 grant"
            " s3:ListBucketMultipartUploads and s3:AbortMultipartUpload"
        )


class References:
    """What the metadata in each folder, and in those above it, refer to. Reads each once.

    Args:
        store: Rooted above all folders.
        ranks: Per folder, the ranks whose own metadata may lie there.
        listed: Keys of metadata that a listing showed: not to find one of them proves nothing.
    """

    def __init__(
        self, store: Store, ranks: Mapping[str, Iterable[int]], listed: Collection[str] = ()
    ) -> None:
        self._store = store
        self._ranks = ranks
        self._listed = listed
        self._known: dict[str, frozenset[str]] = {}

    def to(self, folder: str) -> frozenset[str]:
        """Return the keys in a folder that something refers to, and others.

        Raises:
            UnsureError: If any of the metadata cannot be read whole.
            StoreError: If the store fails for good.
        """
        found = self._read(folder)
        while folder:
            folder = _split(folder.rstrip("/"))[0]
            found |= self._read(folder)
        return found

    def _read(self, folder: str) -> frozenset[str]:
        if folder not in self._known:
            ranks = sorted(set(self._ranks.get(folder, ())))
            names = [METADATA_KEY, *map(metadata_key, ranks)]
            with ThreadPoolExecutor(_MAX_REQUESTS, "dcpstore-audit") as executor:
                found = executor.map(
                    lambda name: _referred_by(self._store, folder, name, self._listed), names
                )
                self._known[folder] = frozenset().union(*found)
        return self._known[folder]


def _judge(
    references: References, name: str, suspects: list[Leftover]
) -> tuple[list[Leftover], str]:
    """Return what no metadata refer to, and why that is not sure; empty if it is."""
    try:
        referenced = references.to(name)
    except UnsureError as error:
        return suspects, f"what checkpoints need there cannot be told: {error}"
    return [one for one in suspects if one.upload or one.key not in referenced], ""


def _why_too_young(left: Iterable[Leftover], rules: Rules, now_s: float) -> str:
    times = [one.modified for one in left]
    if any(time is None for time in times):
        return "the store does not tell how old they are"
    newest = max((time.timestamp() for time in times if time is not None), default=0.0)
    if newest > now_s - rules.older_than_s:
        return f"a save may be running: the newest is {age_text(now_s - newest)} old"
    return ""


_Failure: TypeAlias = "tuple[Leftover, CheckpointError]"


@dataclass(frozen=True, slots=True)
class Pruned:
    """What `remove` did.

    Attributes:
        found: What there was.
        removed: What is gone.
        failed: What may still be there, with the reason.
    """

    found: Leftovers
    removed: tuple[Leftover, ...]
    failed: tuple[_Failure, ...] = ()

    @property
    def removed_bytes(self) -> int:
        """Bytes of what was removed, where the store told them."""
        return sum(one.size_bytes or 0 for one in self.removed)


def remove(at: Place, found: Leftovers) -> Pruned:
    """Remove leftovers that were found, folder by folder.

    The metadata of each folder are read once more right before: whatever was sealed since
    stays. What the store refuses to delete stays too and is told in the result.
    """
    removed: list[Leftover] = []
    failed: list[_Failure] = []
    for folder in sorted({one.folder for one in found.removable}):
        doomed = [one for one in found.removable if one.folder == folder]
        try:
            doomed = _still_unreferenced(at.store, folder, doomed)
        except (UnsureError, StoreError) as error:
            reason = StoreError(f"nothing was deleted in {folder or at.url}: {error}")
            failed += [(one, reason) for one in doomed]
            continue
        lost = _abort(at.uploads, doomed) + _delete(at.store, doomed)
        failed += lost
        kept = {id(one) for one, _ in lost}
        removed += [one for one in doomed if id(one) not in kept]
    return Pruned(found, tuple(removed), tuple(failed))


def _still_unreferenced(store: Store, folder: str, doomed: list[Leftover]) -> list[Leftover]:
    ranks = {one.rank for one in doomed if one.rank is not None}
    referenced = References(store, {folder: ranks}).to(folder)
    return [one for one in doomed if one.upload or one.key not in referenced]


def _abort(uploads: OpenUploads | None, doomed: Sequence[Leftover]) -> list[_Failure]:
    failed = []
    for one in doomed:
        if uploads is not None and one.upload is not None:
            try:
                uploads.abort(one.upload)
            except CheckpointError as error:
                failed.append((one, error))
    return failed


def _delete(store: Store, doomed: Sequence[Leftover]) -> list[_Failure]:
    objects = {one.key: one for one in doomed if one.upload is None}
    return [(objects[key], error) for key, error in delete_all(store, list(objects)).items()]


def delete_all(store: Store, keys: Sequence[str]) -> dict[str, CheckpointError]:
    """Delete objects; return those that may still be there, each with the reason."""
    if not keys:
        return {}
    try:
        store.delete_many(keys)
    except CheckpointError as error:
        return {key: error for key in keys if _may_be_there(store, key)}
    return {}


def _may_be_there(store: Store, key: str) -> bool:
    try:
        store.head(key)
    except NotFoundError:
        return False
    except CheckpointError:
        return True
    return True
