"""What the sealed checkpoints of a folder refer to. Asked before anything is deleted.

The answer is either sure or an error: metadata that are damaged, refused or strange say nothing
of what they referred to.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import crc32c

from dcpstore.commit import Seal, read_seal
from dcpstore.errors import CheckpointError, CorruptError, NotFoundError, StoreError
from dcpstore.keys import METADATA_KEY, check_relative, metadata_key, save_id_of
from dcpstore.manifest import decode
from dcpstore.store.base import Store

__all__ = ["UnsureError", "referenced_keys"]

_MAX_REQUESTS = 32


class UnsureError(Exception):
    """It cannot be told what a folder's metadata refer to."""


def referenced_keys(store: Store, folder: str, ranks: Iterable[int]) -> frozenset[str]:
    """Return every key that a sealed checkpoint in a folder refers to, metadata included.

    Args:
        store: Rooted anywhere above.
        folder: Relative to the store's root; empty, or with a slash at its end.
        ranks: Whose own metadata (``use_collectives=False``) to look for.

    Raises:
        UnsureError: If any metadata object is there that cannot be read whole.
        StoreError: If the store fails for good.
    """
    names = [METADATA_KEY, *map(metadata_key, sorted(set(ranks)))]
    with ThreadPoolExecutor(_MAX_REQUESTS, "dcpstore-audit") as executor:
        found = executor.map(lambda name: _referred_by(store, folder, name), names)
        return frozenset().union(*found)


def _referred_by(store: Store, folder: str, name: str) -> frozenset[str]:
    key = folder + name
    try:
        keys = _read(store, folder, name)
    except NotFoundError:
        return frozenset()
    except StoreError as error:
        if error.retryable:
            raise
        raise UnsureError(f"{key} may not be read: {error}") from error
    except CheckpointError:
        # An overwrite may have replaced the metadata between the two requests.
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
    data = store.get(folder + name).data
    seal = read_seal(data)
    if seal is None:
        return _read_stock(data, name)
    manifest_key = check_relative(seal.manifest_key)
    try:
        manifest = decode(_checked(store.get(folder + manifest_key).data, seal))
    except NotFoundError as error:
        raise CorruptError(f"its manifest {manifest_key} is gone", key=manifest_key) from error
    objects = (one.key for one in manifest.objects)
    return {manifest_key, *objects, *(item.key for item in manifest.items.values())}


def _checked(data: memoryview, seal: Seal) -> memoryview:
    if len(data) != seal.manifest_bytes or crc32c.crc32c(data) != seal.manifest_crc32c:
        raise CorruptError("its manifest is not the one it was sealed with", key=seal.manifest_key)
    return data


def _read_stock(data: memoryview, name: str) -> set[str]:
    from torch.distributed.checkpoint.metadata import Metadata

    from dcpstore.metadata import stock_items
    from dcpstore.trust import load_metadata_pickle

    metadata = load_metadata_pickle(data, key=name)
    if not isinstance(metadata, Metadata):
        raise CorruptError(f"it holds a {type(metadata).__name__}, not DCP metadata", key=name)
    try:
        keys = {item.key for item in stock_items(metadata).values()}
    except (AttributeError, TypeError, ValueError) as error:
        raise CorruptError(f"it is damaged: {error!r}", key=name) from error
    if any(save_id_of(key) is not None for key in keys):
        raise CorruptError("it was written by dcpstore and has lost its footer", key=name)
    return keys
