"""What checkpoint lies in a folder, and its metadata.

Looked for in this order, each with one request:

1. ``.metadata`` with our footer: the manifest tells everything; no pickle is opened. Small
   manifests lie in it, larger ones cost one more request
2. ``.metadata`` of a stock DCP writer: opened by an allow-listing unpickler
3. ``model.safetensors.index.json`` or ``model.safetensors``: a Hugging Face folder
4. any ``*.safetensors``: what DCP's Hugging Face writer leaves; found by listing

A rank's own ``__{rank}.metadata`` (``use_collectives=False``) is read when DCP asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from dcpstore.config import MAX_METADATA_BYTES, ReadConfig
from dcpstore.errors import CorruptError, NotFoundError, StoreError
from dcpstore.format.manifest import Manifest, decode, has_other_planner_data
from dcpstore.format.safetensors import TensorInFile
from dcpstore.format.seal import Seal, get_manifest, metadata_key, read_seal
from dcpstore.read.safetensors import INDEX_FILE, find_files, read_headers
from dcpstore.store.base import Store
from dcpstore.store.retry import read_twice_if_damaged
from dcpstore.text import collector_paused

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


_RANK_KEY = re.compile(r"__(\d+)\.metadata")


@dataclass(frozen=True, slots=True)
class Discovered:
    """A checkpoint's metadata as it lies in the store: small, and cheap to send to ranks.

    Attributes:
        url: Of the checkpoint.
        key: Of the metadata object, for messages.
        manifest: Bytes of the manifest; None for a checkpoint that is not ours.
        pickled: Bytes of the pickled metadata, where it must be opened.
        files: Tensors per safetensors file, where it is a Hugging Face folder.
        seal: The footer of a checkpoint of ours.
        metadata: What `open` returns, where nothing has to be decoded for it.
    """

    url: str
    key: str
    manifest: bytes | None = None
    pickled: bytes | None = None
    files: Mapping[str, Sequence[TensorInFile]] | None = None
    seal: Seal | None = None
    metadata: Metadata | None = None

    @property
    def manifest_key(self) -> str:
        """The object that the manifest lies in."""
        return (self.seal.manifest_key if self.seal is not None else None) or self.key

    def decode_manifest(self, max_bytes: int = MAX_METADATA_BYTES) -> Manifest:
        """Decode the manifest of a checkpoint of ours.

        Args:
            max_bytes: ``ReadConfig.max_metadata_bytes``.

        Raises:
            CorruptError: If it is damaged, or of another save than its footer.
            IncompatibleError: If a newer dcpstore wrote it, or it takes too much memory.
        """
        assert self.manifest is not None
        manifest = decode(self.manifest, key=self.manifest_key, max_bytes=max_bytes)
        if self.seal is not None and self.seal.save_id != manifest.save_id:
            raise CorruptError(
                f"{self.manifest_key}: the manifest is of save {manifest.save_id}, and the footer"
                f" of {self.key} of save {self.seal.save_id}",
                key=self.manifest_key,
            )
        return manifest

    def open(self, config: ReadConfig) -> Metadata:
        """Return the metadata, with `StoredItem` as storage data. Any rank; no I/O.

        Raises:
            CorruptError: If it is damaged, or a pickle that names more than data.
        """
        # Here, since what lies in a folder can be told without waiting for torch.
        from dcpstore.format.metadata import metadata_of_files, open_ours, open_stock

        if self.metadata is not None:
            return self.metadata
        if self.files is not None:
            return metadata_of_files(self.url, self.files)
        if self.manifest is not None:
            with collector_paused():
                manifest = self.decode_manifest(config.max_metadata_bytes)
                return open_ours(self.url, self.key, manifest, self.pickled, config)
        assert self.pickled is not None
        return open_stock(self.pickled, self.key, config)


def discover(store: Store, config: ReadConfig, *, rank: int | None = None) -> Discovered:
    """Read what tells everything about the checkpoint in a folder.

    Args:
        store: Rooted at the folder.
        config: Trust and concurrency.
        rank: Read this rank's own metadata instead of the checkpoint's.

    Raises:
        NotFoundError: If there is no checkpoint.
        CorruptError: If there is one that is damaged.
        StoreError: If the store refuses.
    """
    key = metadata_key(rank)
    try:
        return _read_sealed(store, key)
    except NotFoundError as error:
        files = None if rank is not None else read_headers(store, find_files(store), config)
        if not files:
            raise NotFoundError(
                f"no checkpoint at {store.url}: there is no {key}"
                + ("" if rank is not None else f", {INDEX_FILE} or *.safetensors")
                + ". Check the URL; a save that was interrupted leaves no .metadata"
                + _hint(store.url)
            ) from error
        tensors = {name: header.tensors for name, header in files.items()}
        return Discovered(store.url, key, files=tensors)
    except StoreError as error:
        if not error.denied:
            raise
        raise StoreError(
            f"{store.url}: the store refused to give {key}: {error}. Either the credentials do"
            " not allow reading it, or it does not exist (without permission to list, S3 answers"
            " 403 for a missing object)",
            key=key,
            denied=True,
        ) from error


def sealed_ranks(store: Store) -> list[int]:
    """Return the ranks that sealed checkpoints of their own (``use_collectives=False``).

    By one listing; none where the store refuses it.
    """
    try:
        matches = [_RANK_KEY.fullmatch(info.key) for info in store.list()]
    except NotFoundError:
        return []
    except StoreError as error:
        if not error.denied:
            raise
        return []
    return sorted(int(match[1]) for match in matches if match)


def _hint(url: str) -> str:
    """Say what loads a file, where the URL looks like one's."""
    if not url.rstrip("/").endswith((".pt", ".pth", ".bin", ".ckpt")):
        return ""
    return ". A torch.save file loads with storage_reader=dcpstore.BroadcastingTorchSaveReader(url)"


def _read_sealed(store: Store, key: str) -> Discovered:
    """Read metadata and manifest; what does not fit together gets one second chance.

    It may have been damaged on the way, or an overwrite swept a manifest that is an object of
    its own between the two requests: then the metadata is new.
    """
    return read_twice_if_damaged(partial(_read_once, store, key))


def _read_once(store: Store, key: str) -> Discovered:
    data = store.get(key).data
    try:
        seal = read_seal(data)
        if seal is None:
            return Discovered(store.url, key, pickled=bytes(data))
        manifest = get_manifest(store, data, seal)
    except CorruptError as error:
        raise CorruptError(
            f"{store.url}: {key}: {error}", key=error.key or key, start=error.start, end=error.end
        ) from error
    pickled = bytes(data[: seal.pickle_bytes]) if has_other_planner_data(manifest) else None
    return Discovered(store.url, key, manifest, pickled, seal=seal)
