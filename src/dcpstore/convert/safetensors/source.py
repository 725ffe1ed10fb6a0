"""Safetensors files as a source, held to the format's own rules before a byte of data is read.

A file from a hub is untrusted: its header says which bytes are which tensor. What the
safetensors package refuses is refused here too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from dcpstore.config import ReadConfig
from dcpstore.errors import CorruptError, NotFoundError
from dcpstore.format.safetensors import (
    LENGTH_BYTES,
    FileHeader,
    TensorInFile,
    header_length,
    parse_file,
)
from dcpstore.read.discovery import INDEX_FILE, Discovered, promised, read_index, safetensors_files
from dcpstore.store.base import Store
from dcpstore.store.location import file_location


@dataclass(frozen=True, slots=True)
class FoundFiles:
    """The files of a source.

    Attributes:
        discovered: Their headers.
        aliases: Names that the files' metadata declares to equal another, as the safetensors
            package does for tied tensors that it stores once.
    """

    discovered: Discovered
    aliases: Mapping[str, str] = field(default_factory=dict)


def split_source(url: str | os.PathLike[str]) -> tuple[str | os.PathLike[str], str | None]:
    """Return the folder of a source, and the file's key if it is a single file."""
    if not os.fspath(url).endswith(".safetensors"):
        return url, None
    return file_location(url)


def find_files(store: Store, config: ReadConfig, key: str | None = None) -> FoundFiles:
    """Read and check all headers; a HEAD and two small GETs per file, many files at a time.

    Args:
        store: Rooted at the folder.
        config: Bounds the requests.
        key: Of a single file; None for a Hugging Face folder.

    Raises:
        NotFoundError: If there is no such file.
        CorruptError: If a header or the index is not what the format allows, or a file is
            missing that the index or the names of the others promise.
    """
    keys = safetensors_files(store) if key is None else [key]
    if not keys:
        raise NotFoundError(
            f"{store.url} holds no {INDEX_FILE} and no *.safetensors; name the folder of the files"
            " or one file that ends with .safetensors"
        )
    with ThreadPoolExecutor(min(config.max_requests, len(keys)), "dcpstore-look") as executor:
        read = partial(_read, store) if key is not None else partial(_read_promised, store)
        headers = dict(zip(keys, executor.map(read, keys), strict=True))
    if key is None:
        _check_index(store, headers)
    _check_once(store, headers)
    files = {name: header.tensors for name, header in headers.items()}
    return FoundFiles(Discovered(store.url, next(iter(keys)), files=files), _aliases(headers))


def _read_promised(store: Store, key: str) -> FileHeader:
    with promised(store, key):
        return _read(store, key)


def _read(store: Store, key: str) -> FileHeader:
    size_bytes = store.head(key).size_bytes
    if size_bytes < LENGTH_BYTES:
        raise CorruptError(
            f"{store.url}: {key} has {size_bytes} bytes, no safetensors file", key=key
        )
    length = header_length(store.get_range(key, 0, LENGTH_BYTES), key)
    if LENGTH_BYTES + length > size_bytes:
        raise CorruptError(
            f"{store.url}: {key} promises a header of {length} bytes and has {size_bytes} in all",
            key=key,
        )
    header = parse_file(store.get_range(key, LENGTH_BYTES, LENGTH_BYTES + length), key)
    _check_end(key, header.tensors, LENGTH_BYTES + length, size_bytes)
    return header


def _check_end(key: str, tensors: Sequence[TensorInFile], start: int, size_bytes: int) -> None:
    """Check that the tensors, which lie side by side, fill the file."""
    at = start
    for one in sorted(tensors, key=lambda tensor: tensor.payload):
        at = one.payload.end
        if at > size_bytes:
            raise CorruptError(
                f"{key}: {one.fqn!r} at bytes [{one.payload.start}, {at}) lies outside the file of"
                f" {size_bytes} bytes: it was cut short",
                key=key,
                start=one.payload.start,
                end=at,
                fqn=one.fqn,
            )
    if at != size_bytes:
        raise CorruptError(
            f"{key} has {size_bytes - at} bytes behind its last tensor",
            key=key,
            start=at,
            end=size_bytes,
        )


def _check_index(store: Store, headers: Mapping[str, FileHeader]) -> None:
    """Check that every tensor is in the file in which the index, if there is one, has it."""
    weight_map = read_index(store)
    if weight_map is None:
        return
    held = {key: {one.fqn for one in header.tensors} for key, header in headers.items()}
    for fqn, key in weight_map.items():
        if fqn not in held[key]:
            raise CorruptError(
                f"{INDEX_FILE} says that {fqn!r} is in {key}, which does not hold it",
                key=key,
                fqn=fqn,
            )


def _check_once(store: Store, headers: Mapping[str, FileHeader]) -> None:
    """Check that no tensor is in two files, unless they hold shards of it."""
    owner: dict[tuple[str, tuple[int, ...]], str] = {}
    for key, header in headers.items():
        for one in header.tensors:
            other = owner.setdefault((one.fqn, one.offsets), key)
            if other != key:
                raise CorruptError(
                    f"{store.url}: {one.fqn!r} is both in {other} and in {key}",
                    key=key,
                    fqn=one.fqn,
                )


def _aliases(headers: Mapping[str, FileHeader]) -> dict[str, str]:
    names = {one.fqn for header in headers.values() for one in header.tensors}
    return {
        alias: kept
        for header in headers.values()
        for alias, kept in header.about.items()
        if kept in names and alias not in names
    }
