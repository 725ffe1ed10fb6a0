"""What a ``torch.save`` file holds, by the keys of a flattened state dict.

The reading rank makes it from the file's structure; every rank is sent the part it needs to
plan and to check its targets. No tensor is read for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcpstore.errors import IncompatibleError
from dcpstore.format.archive import Member
from dcpstore.format.dtypes import dtype_from_name, dtype_name
from dcpstore.torch_file import TensorPlace, TorchFile
from dcpstore.torch_private import flatten_state_dict
from dcpstore.torch_save_reader.layout import Source

__all__ = ["Catalogue", "FileContent", "TensorEntry", "open_content"]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of the file.

    Attributes:
        source: Its number; keys that name the same elements share one.
        dtype: Name of its dtype.
        sizes: Its shape.
    """

    source: int
    dtype: str
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Catalogue:
    """What all ranks know of the file.

    Attributes:
        url: Of the file.
        tensors: By key.
        values: Keys of everything else.
        unreadable: Why a key that holds a tensor cannot be read, by key.
        paths: Way to each key in the nested state dict.
        sources: Where the tensors lie, by number; empty where only the reading rank reads.
        members: Where the storages of `sources` lie, by storage key.
    """

    url: str
    tensors: Mapping[str, TensorEntry]
    values: frozenset[str]
    unreadable: Mapping[str, str] = field(default_factory=dict)
    paths: Mapping[str, Any] = field(default_factory=dict)
    sources: tuple[Source, ...] = ()
    members: Mapping[str, Member] = field(default_factory=dict)

    def metadata(self) -> Metadata:
        """Return it as DCP's metadata: every tensor is one chunk."""
        entries: dict[str, Any] = {}
        for fqn in self.paths:
            entry = self.tensors.get(fqn)
            entries[fqn] = BytesStorageMetadata() if entry is None else _tensor_metadata(entry)
        return Metadata(entries, dict(self.paths), storage_meta=StorageMeta(self.url))

    def keys_like(self, fqn: str) -> list[str]:
        """Return a few keys of the file that a missing key may have meant."""
        last = fqn.rpartition(".")[2]
        near = [
            key
            for key in self.paths
            if key.endswith(f".{fqn}") or fqn.endswith(f".{key}") or key.startswith(f"{fqn}.")
        ]
        near += [key for key in self.paths if key.rpartition(".")[2] == last and key not in near]
        return (near or list(self.paths))[:3]


@dataclass(frozen=True, slots=True, eq=False)
class FileContent:
    """What the reading rank knows of the file besides.

    Attributes:
        file: Open.
        sources: Where each tensor lies, in the order of the file.
        members: Where the storages lie, by storage key.
        values: Everything that is no tensor, by key; tensors inside are stand-ins.
    """

    file: TorchFile
    sources: tuple[Source, ...]
    members: Mapping[str, Member]
    values: Mapping[str, Any]


def open_content(file: TorchFile, *, with_sources: bool) -> tuple[Catalogue, FileContent]:
    """Flatten what a file holds and find out where its tensors lie. Reading rank only; no I/O.

    Args:
        file: Just opened.
        with_sources: Whether all ranks are to know where the tensors lie.

    Raises:
        IncompatibleError: If it holds something else than a dictionary, or one whose keys
            cannot be told apart once flattened.
    """
    flat, paths = _flatten(file)
    places: dict[str, TensorPlace] = {}
    unreadable: dict[str, str] = {}
    values: dict[str, Any] = {}
    for fqn, value in flat.items():
        if not isinstance(value, torch.Tensor):
            values[fqn] = value
            continue
        place = file.place(value)
        if place is None:
            unreadable[fqn] = _describe(value)
        else:
            places[fqn] = place
    ordered = sorted(set(places.values()), key=lambda place: _position(file, place))
    numbers = {place: number for number, place in enumerate(ordered)}
    sources = tuple(Source(place) for place in ordered)
    members = {key: one.member for key, one in file.storages.items()}
    catalogue = Catalogue(
        file.url,
        {
            fqn: TensorEntry(numbers[place], dtype_name(place.dtype), place.sizes)
            for fqn, place in places.items()
        },
        frozenset(values),
        unreadable,
        paths,
        sources if with_sources else (),
        members if with_sources else {},
    )
    return catalogue, FileContent(file, sources, members, values)


def _flatten(file: TorchFile) -> tuple[dict[str, Any], dict[str, Any]]:
    if not isinstance(file.value, Mapping):
        kind = type(file.value).__name__
        raise IncompatibleError(
            f"{file.url} holds a {kind}, not a state dict: save a dictionary, such as"
            " module.state_dict(), with torch.save"
        )
    try:
        return flatten_state_dict(dict(file.value))
    except ValueError as error:
        raise IncompatibleError(
            f"{file.url}: two entries of its nested state dict have the same key once joined with"
            f" dots ({error}); rename one and save again"
        ) from error


def _position(file: TorchFile, place: TensorPlace) -> tuple[int, int]:
    return file.storages[place.storage_key].member.header_offset, place.span().start


def _describe(value: torch.Tensor) -> str:
    if value.layout != torch.strided:
        return f"a tensor of layout {str(value.layout).removeprefix('torch.')}"
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(value).__name__}, which wraps other tensors"
    return "a tensor that was on the meta device when it was saved, without elements"


def _tensor_metadata(entry: TensorEntry) -> TensorStorageMetadata:
    size = torch.Size(entry.sizes)
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype_from_name(entry.dtype)),
        size,
        [ChunkStorageMetadata(torch.Size([0] * len(size)), size)],
    )
