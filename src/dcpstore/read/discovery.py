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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from dcpstore.config import MAX_METADATA_BYTES, ReadConfig
from dcpstore.errors import CorruptError, NotFoundError, StoreError
from dcpstore.format.json_text import parse_json
from dcpstore.format.keys import check_relative, metadata_key
from dcpstore.format.manifest import Manifest, decode, has_other_planner_data
from dcpstore.format.safetensors import LENGTH_BYTES, TensorInFile, header_length, parse_header
from dcpstore.format.seal import Seal, get_manifest, read_seal
from dcpstore.store.base import Store
from dcpstore.store.retry import read_twice_if_damaged
from dcpstore.text import collector_paused

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


_SINGLE_FILE = "model.safetensors"
_NUMBERED = re.compile(
    r"(?:shard-\d+-)?(?P<name>.+)-(?P<number>\d{1,9})-of-(?P<total>\d{1,9})\.safetensors"
)
INDEX_FILE = "model.safetensors.index.json"
"""The key of a Hugging Face folder's index."""


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
    """

    url: str
    key: str
    manifest: bytes | None = None
    pickled: bytes | None = None
    files: Mapping[str, Sequence[TensorInFile]] | None = None
    seal: Seal | None = None

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
        files = None if rank is not None else _read_safetensors(store, config)
        if files is None:
            raise NotFoundError(
                f"no checkpoint at {store.url}: there is no {key}"
                + ("" if rank is not None else f", {INDEX_FILE} or *.safetensors")
                + ". Check the URL; a save that was interrupted leaves no .metadata"
                + _hint(store.url)
            ) from error
        return Discovered(store.url, key, files=files)
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


def _read_safetensors(store: Store, config: ReadConfig) -> dict[str, list[TensorInFile]] | None:
    files = safetensors_files(store)
    if not files:
        return None

    def read(key: str) -> list[TensorInFile]:
        with promised(store, key):
            return read_file_header(store, key)

    with ThreadPoolExecutor(min(config.max_requests, len(files))) as executor:
        return dict(zip(files, executor.map(read, files), strict=True))


@contextmanager
def promised(store: Store, key: str) -> Iterator[None]:
    """Read a file that `safetensors_files` named.

    Raises:
        CorruptError: If it is not there.
    """
    try:
        yield
    except NotFoundError as error:
        raise CorruptError(
            f"{store.url}: {key} is missing, which {INDEX_FILE} or the names of other files"
            " promise; nothing was loaded. Copy it there. To use what the others hold, put an index"
            " that names only them",
            key=key,
        ) from error


def safetensors_files(store: Store) -> Sequence[str]:
    """Name the files of a Hugging Face folder; none if it is no such folder.

    Those that its index names, whether they are there or not; without an index those that are
    there, and the first that their names say is missing.

    Raises:
        CorruptError: If its index is damaged, or names a file outside the folder.
    """
    weight_map = read_index(store)
    if weight_map is not None:
        return sorted(set(weight_map.values()))
    try:
        store.get_range(_SINGLE_FILE, 0, LENGTH_BYTES)
    except NotFoundError:
        pass
    else:
        return [_SINGLE_FILE]
    try:
        names = (info.key for info in store.list())
        found = [name for name in names if name.endswith(".safetensors") and "/" not in name]
        return sorted([*found, *_missing(found)])
    except NotFoundError:
        return []
    except StoreError as error:
        if error.denied:
            return []
        raise


def read_index(store: Store) -> Mapping[str, str] | None:
    """Return a Hugging Face folder's map from tensor to file; None where it has no index.

    Raises:
        CorruptError: If it is damaged, or names a file outside the folder.
    """
    try:
        data = store.get(INDEX_FILE).data
    except NotFoundError:
        return None
    try:
        index = parse_json(data)
        weight_map = index.get("weight_map") if type(index) is dict else None
        if type(weight_map) is not dict:
            raise ValueError("it has no weight_map from names to files")
        for fqn, name in weight_map.items():
            if type(name) is not str:
                raise ValueError(f"the file of {fqn!r:.200} is {name!r:.60}")
    except ValueError as error:
        raise CorruptError(f"{INDEX_FILE} is damaged: {error!s:.500}", key=INDEX_FILE) from error
    for name in set(weight_map.values()):
        check_relative(name)
    return weight_map


def _missing(names: Sequence[str]) -> Iterator[str]:
    """Yield the first file that is missing of each ``model-00002-of-00003.safetensors``.

    A file that each rank wrote its part of (``shard-00001-model-...``) is there if one part is:
    which ranks had one is not written down.
    """
    found: dict[tuple[str, str], set[int]] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match:
            found.setdefault((match["name"], match["total"]), set()).add(int(match["number"]))
    for (name, total), numbers in found.items():
        first = next(number for number in count(1) if number not in numbers)
        if first <= int(total):
            yield f"{name}-{first:0{len(total)}}-of-{total}.safetensors"


def read_file_header(store: Store, key: str) -> list[TensorInFile]:
    """Read the header of one safetensors file.

    Raises:
        CorruptError: If it is damaged.
    """
    length = header_length(store.get_range(key, 0, LENGTH_BYTES), key)
    return parse_header(store.get_range(key, LENGTH_BYTES, LENGTH_BYTES + length), key)
