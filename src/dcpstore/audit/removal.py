"""Removing leftovers: `prune`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from dcpstore.audit.leftovers import Leftover, Leftovers, Place, References, Rules, find_in
from dcpstore.audit.references import UnsureError
from dcpstore.config import ReadConfig
from dcpstore.errors import CheckpointError, NotFoundError, StoreError
from dcpstore.store.base import Store
from dcpstore.store.uploads import OpenUploads
from dcpstore.text import count_text, size_text

__all__ = ["Pruned", "prune", "remove"]

_Failures: TypeAlias = "list[tuple[Leftover, CheckpointError]]"


@dataclass(frozen=True, slots=True)
class Pruned:
    """What `prune` did.

    Attributes:
        found: What there was.
        removed: What is gone.
        failed: What may still be there, with the reason.
    """

    found: Leftovers
    removed: tuple[Leftover, ...]
    failed: tuple[tuple[Leftover, CheckpointError], ...] = ()

    @property
    def removed_bytes(self) -> int:
        """Bytes of what was removed, where the store told them."""
        return sum(one.size_bytes or 0 for one in self.removed)

    def __str__(self) -> str:
        removed = f"removed {count_text(len(self.removed), 'leftover')}"
        lines = [f"{self.found.url}: {removed}, {size_text(self.removed_bytes)}"]
        lines += [f"  still there: {one.key}: {error}" for one, error in self.failed]
        return "\n".join(lines)


def prune(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    config: ReadConfig | None = None,
    rules: Rules | None = None,
    clock: Callable[[], float] = time.time,
) -> Pruned:
    """Remove what `find_leftovers` finds, for the same arguments.

    What the store refuses to delete stays and is told in the result; nothing else changes.

    Raises:
        ConfigError: If the URL or an option is wrong.
        NotFoundError: If there is no such bucket.
        StoreError: If the store refuses to list, or fails before anything was deleted.
    """
    with Place(url, storage_options, config) as at:
        return remove(at, find_in(at, rules or Rules(), clock))


def remove(at: Place, found: Leftovers) -> Pruned:
    """Remove leftovers that were found, folder by folder.

    The metadata of each folder are read once more right before: whatever was sealed since
    stays.
    """
    removed: list[Leftover] = []
    failed: _Failures = []
    for folder in sorted({one.folder for one in found.removable}):
        doomed = [one for one in found.removable if one.folder == folder]
        try:
            doomed = _still_unreferenced(at.store, folder, doomed)
        except (UnsureError, StoreError) as error:
            reason = StoreError(f"nothing was deleted in {folder or at.url}: {error}")
            failed += [(one, reason) for one in doomed]
            continue
        uploads = [one for one in doomed if one.upload is not None]
        objects = [one for one in doomed if one.upload is None]
        lost = _abort(at.uploads, uploads) + _delete(at.store, objects)
        failed += lost
        kept = {id(one) for one, _ in lost}
        removed += [one for one in doomed if id(one) not in kept]
    return Pruned(found, tuple(removed), tuple(failed))


def _still_unreferenced(store: Store, folder: str, doomed: list[Leftover]) -> list[Leftover]:
    ranks = {one.rank for one in doomed if one.rank is not None}
    referenced = References(store, {folder: ranks}).to(folder)
    return [one for one in doomed if one.upload or one.key not in referenced]


def _abort(uploads: OpenUploads | None, doomed: Sequence[Leftover]) -> _Failures:
    failed: _Failures = []
    for one in doomed:
        assert uploads is not None
        assert one.upload is not None
        try:
            uploads.abort(one.upload)
        except CheckpointError as error:
            failed.append((one, error))
    return failed


def _delete(store: Store, doomed: Sequence[Leftover]) -> _Failures:
    if not doomed:
        return []
    try:
        store.delete_many([one.key for one in doomed])
    except CheckpointError as error:
        return [(one, error) for one in doomed if _may_be_there(store, one.key)]
    return []


def _may_be_there(store: Store, key: str) -> bool:
    try:
        store.head(key)
    except NotFoundError:
        return False
    except CheckpointError:
        return True
    return True
