"""What the sealed checkpoints of a folder refer to. Asked before anything is deleted.

The answer is either sure or an error: metadata that are damaged, refused or strange say nothing
of what they referred to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor

from dcpstore.errors import CheckpointError, NotFoundError, StoreError
from dcpstore.keys import METADATA_KEY, metadata_key
from dcpstore.references import keys_named_in
from dcpstore.store.base import Store

__all__ = ["UnsureError", "referenced_keys"]

_MAX_REQUESTS = 32


class UnsureError(Exception):
    """It cannot be told what a folder's metadata refer to."""


def referenced_keys(
    store: Store, folder: str, ranks: Iterable[int], listed: Collection[str] = ()
) -> frozenset[str]:
    """Return every key that a sealed checkpoint in a folder refers to, metadata included.

    Args:
        store: Rooted anywhere above.
        folder: Relative to the store's root; empty, or with a slash at its end.
        ranks: Whose own metadata (``use_collectives=False``) to look for.
        listed: Keys of metadata that a listing showed: not to find one of them proves nothing.

    Raises:
        UnsureError: If any metadata object is there that cannot be read whole.
        StoreError: If the store fails for good.
    """
    names = [METADATA_KEY, *map(metadata_key, sorted(set(ranks)))]
    with ThreadPoolExecutor(_MAX_REQUESTS, "dcpstore-audit") as executor:
        found = executor.map(lambda name: _referred_by(store, folder, name, listed), names)
        return frozenset().union(*found)


def _referred_by(store: Store, folder: str, name: str, listed: Collection[str]) -> frozenset[str]:
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
        # An overwrite may have swept the manifest after the metadata was read.
        keys = _read_again(store, folder, name)
    return frozenset({key, *(folder + one for one in keys)})


def _read_again(store: Store, folder: str, name: str) -> set[str]:
    try:
        return _read(store, folder, name)
    except CheckpointError as error:
        if isinstance(error, StoreError) and error.retryable:
            raise
        raise UnsureError(f"{folder}{name} is there, but {error}") from error


def _read(store: Store, folder: str, name: str) -> set[str]:
    """Return the keys that one metadata object refers to, relative to its folder.

    Raises:
        NotFoundError: If there is no such metadata object.
        CorruptError: If it is damaged, or its manifest is gone.
    """
    return keys_named_in(store, store.get(folder + name).data, key=name, folder=folder)
