"""What a checkpoint keeps of the ``torch.save`` file that it was made from.

DCP stores tensors and values by flattened key. That two tensors share a storage, that a key
was a number, that a dictionary was an ``OrderedDict`` or empty: it has no place for that. So a
checkpoint made by `torch_save_to_dcp` has one more item, beside the state dict, where
neither ``dcp.load`` nor a list of keys meets it::

    "DCPTORCH"  u32 version  u32 header_bytes  header (JSON)  pickle  archive

The pickle is the ``data.pkl`` that torch would write for the structure, storages by number. The
header says which storages are found in which value's own record; the archive holds those
that are found nowhere else, such as of a tensor that is an attribute of another one.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcpstore.convert.torch.pickle import PickledStructure
from dcpstore.errors import CorruptError, IncompatibleError
from dcpstore.format.zip import TorchZipWriter, read_members
from dcpstore.read.torch_file import PickledStorage, Storages, unpickle
from dcpstore.text import check_natural, parse_json
from dcpstore.torch_private import meta_storage

LAYOUT_KEY = ".dcpstore.torch_save"
"""The item's key; it is not one of the state dict's."""

_MAGIC = b"DCPTORCH"
_VERSION = 1
_PREFIX = struct.Struct("<8sII")


@dataclass(frozen=True, slots=True)
class Layout:
    """A file's structure, as a checkpoint keeps it.

    Attributes:
        pickled: The ``data.pkl`` of the structure.
        members: Per key of a value or an opaque tensor, the structure's storages that its own
            record holds, in the order in which it holds them.
        extra: The storages that the archive holds, likewise.
        archive: A ``torch.save`` record of those; empty if there are none.
    """

    pickled: bytes
    members: Mapping[str, Sequence[str]]
    extra: Sequence[str] = ()
    archive: bytes = b""


def encode_layout(layout: Layout) -> bytes:
    """Turn a layout into bytes."""
    fields = {
        "members": {fqn: list(keys) for fqn, keys in layout.members.items() if keys},
        "extra": list(layout.extra),
        "pickle_bytes": len(layout.pickled),
    }
    header = json.dumps(fields, separators=(",", ":")).encode()
    prefix = _PREFIX.pack(_MAGIC, _VERSION, len(header))
    return b"".join([prefix, header, layout.pickled, layout.archive])


def decode_layout(data: bytes, what: str) -> Layout:
    """Turn bytes into the layout they were made from.

    Raises:
        CorruptError: If they are damaged.
        IncompatibleError: If a newer dcpstore wrote them.
    """
    try:
        magic, version, header_bytes = _PREFIX.unpack_from(data)
        if magic != _MAGIC:
            raise ValueError(f"it starts with {magic!r}")
        if version > _VERSION:
            raise IncompatibleError(
                f"{what}: the record of its torch.save file has version {version}; this dcpstore"
                f" reads version {_VERSION}. Convert with a newer one"
            )
        start = _PREFIX.size + header_bytes
        fields = parse_json(data[_PREFIX.size : start])
        end = start + check_natural(fields["pickle_bytes"])
        if end > len(data):
            raise ValueError(f"its pickle ends at byte {end} of {len(data)}")
        members = {str(fqn): tuple(map(str, keys)) for fqn, keys in fields["members"].items()}
        return Layout(data[start:end], members, tuple(map(str, fields["extra"])), data[end:])
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptError(
            f"{what}: the record of its torch.save file is damaged: {error!r}"
        ) from error


def open_structure(
    pickled: bytes, *, weights_only: bool, what: str
) -> tuple[Any, dict[str, torch.UntypedStorage]]:
    """Rebuild a structure with stand-ins for its tensors.

    Args:
        pickled: A ``data.pkl``.
        weights_only: As for `unpickle`.
        what: Where it comes from, for messages.

    Returns:
        The structure, and the stand-ins' storages by number.

    Raises:
        CorruptError: If it names something that is not allowed, or a tensor that reaches past
            its storage.
    """

    def make(one: PickledStorage) -> torch.UntypedStorage:
        return meta_storage(one.num_bytes)

    storages = Storages(make, what)
    value = unpickle(pickled, storages, weights_only=weights_only, what=what)
    if any(made.nbytes() != storages.pickled[key].num_bytes for key, made in storages.made.items()):
        raise CorruptError(f"{what} is damaged: a tensor reaches past its storage")
    return value, storages.made


# --- records --------------------------------------------------------------------------


def write_record(pickled: PickledStructure, read: Callable[[int], memoryview]) -> bytes:
    """Return the ``torch.save`` record of a pickled value, with its storages. All in memory.

    Args:
        pickled: The value.
        read: Returns the bytes of a stand-in storage, by identity.
    """
    stream = io.BytesIO()
    writer = TorchZipWriter(stream)
    writer.write_pickle(pickled.data)
    for key, identity in pickled.storages.items():
        held = pickled.held.get(identity)
        data = read(identity) if held is None else storage_bytes(held)
        with writer.storage(key, data.nbytes):
            writer.write(data)
    writer.finish()
    return stream.getvalue()


def storage_bytes(storage: torch.UntypedStorage) -> memoryview:
    """Return the bytes of a real storage."""
    flat = torch.empty(0, dtype=torch.uint8, device="cpu")
    held: Any = storage
    flat.set_(held if storage.device.type == "cpu" else held.cpu())
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def read_record(data: bytes, what: str) -> list[memoryview]:
    """Return the storages that a ``torch.save`` record holds, by number. Runs nothing.

    Raises:
        CorruptError: If it is damaged.
        IncompatibleError: If it is no ``torch.save`` record.
    """
    members = read_members(memoryview(data), what)
    found: list[memoryview] = []
    while (storage := members.get(f"data/{len(found)}")) is not None:
        found.append(storage)
    return found
