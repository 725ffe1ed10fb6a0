"""Which objects a checkpoint's metadata refer to. Asked before anything is deleted.

The answer is sure or an error: metadata that are damaged or strange say nothing of what they
referred to.
"""

from __future__ import annotations

from dcpstore.errors import CorruptError
from dcpstore.keys import save_id_of
from dcpstore.manifest import decode
from dcpstore.seal import get_manifest, read_seal
from dcpstore.store.base import Store

__all__ = ["keys_named_in"]


def keys_named_in(store: Store, data: memoryview, *, key: str, folder: str = "") -> set[str]:
    """Return the keys that a metadata object refers to, relative to its folder.

    Args:
        store: Rooted at the checkpoint's folder, or above it.
        data: The metadata object, by any writer.
        key: Its name in the folder, for messages.
        folder: The checkpoint's, below the store's root; empty, or with a slash at its end.

    Raises:
        CorruptError: If it is damaged, or its manifest is.
        CheckpointError: If its manifest cannot be read.
    """
    seal = read_seal(data)
    if seal is None:
        return _named_in_pickle(data, key)
    manifest = decode(get_manifest(store, data, seal, folder=folder), key=seal.manifest_key or key)
    named = {one.key for one in manifest.objects}
    named.update(form.key for item in manifest.items.values() for form in item.forms)
    return named if seal.manifest_key is None else {*named, seal.manifest_key}


def _named_in_pickle(data: memoryview, key: str) -> set[str]:
    # Here, since what refers to nothing but a manifest is read without waiting for torch.
    from torch.distributed.checkpoint.metadata import Metadata

    from dcpstore.metadata import stock_items
    from dcpstore.trust import load_metadata_pickle

    metadata = load_metadata_pickle(data, key=key)
    if not isinstance(metadata, Metadata):
        raise CorruptError(f"it holds a {type(metadata).__name__}, not DCP metadata", key=key)
    named = {item.key for item in stock_items(metadata).values()}
    if any(save_id_of(one) is not None for one in named):
        raise CorruptError("it was written by dcpstore and has lost its footer", key=key)
    return named
