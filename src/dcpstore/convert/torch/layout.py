"""A ``torch.save`` file written front to back, byte for byte as torch's own writer lays it out.

::

    header name padding | contents | descriptor | header ... | directory | end records
                        ^ at a multiple of 64     crc32, sizes

Sizes and CRC32 of a member's contents follow in a descriptor, so that nothing need be known
before it is written. Where torch finds storages without reading their headers
(``torch.utils.serialization.config.load.calculate_storage_offsets``), it counts on exactly
this layout: zip64 fields where an offset or a size needs 64 bits, descriptors of 16 or 24
bytes, none behind an empty member.

What a checkpoint keeps of the ``torch.save`` file that it was made from.

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

import hashlib
import io
import json
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from typing_extensions import Buffer

from dcpstore.convert.torch.pickle import PickledStructure
from dcpstore.errors import CorruptError, IncompatibleError
from dcpstore.format.json_text import check_natural, parse_json
from dcpstore.format.zip import (
    LOCAL_HEADER_BYTES,
    LOCAL_SIGNATURE,
    MAX32,
    contents_offset,
    read_archive,
)
from dcpstore.read.torch_file import PickledStorage, Storages, unpickle
from dcpstore.torch_private import meta_storage, storage_identity

ALIGNMENT_BYTES = 64
"""Contents start at multiples of this, so that tensors can be mapped where they lie."""

_ROOT = "archive"
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_DESCRIPTOR, _DESCRIPTOR64 = struct.Struct("<4sIII"), struct.Struct("<4sIQQ")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")
_END = struct.Struct("<4sHHHHIIH")
_FIELD = struct.Struct("<HH")
_PADDING_ID = 0x4246  # "FB", as torch marks it
_UTF8, _STREAMED = 0x0800, 0x0008


class ByteSink(Protocol):
    """Where the file goes."""

    def write(self, data: Buffer) -> int:
        """Take bytes; they may be overwritten afterwards."""


@dataclass(frozen=True, slots=True)
class _Written:
    name: bytes
    header_offset: int
    size_bytes: int
    crc32: int


class TorchZipWriter:
    """Writes the members of one file, in order; `finish` ends it.

    Args:
        sink: Takes the bytes.
    """

    def __init__(self, sink: ByteSink) -> None:
        self._sink = sink
        self._offset = 0
        self._members: list[_Written] = []
        self._crc32 = 0

    @property
    def num_bytes(self) -> int:
        """Bytes written so far."""
        return self._offset

    def write_pickle(self, pickled: bytes) -> None:
        """Write the first members: the pickle, and the notes that follow it in torch's files."""
        self._write_whole("data.pkl", pickled)
        self._write_whole(".format_version", b"1")
        self._write_whole(".storage_alignment", str(ALIGNMENT_BYTES).encode())
        self._write_whole("byteorder", sys.byteorder.encode())

    @contextmanager
    def storage(self, key: str, num_bytes: int) -> Iterator[None]:
        """Write a storage: the block calls `write` until all its bytes are there.

        Raises:
            ValueError: If the block wrote another number of bytes.
        """
        with self._member(f"data/{key}", num_bytes):
            yield

    def write(self, data: Buffer, crc32: int | None = None) -> None:
        """Write bytes of the current storage.

        Args:
            data: Contiguous bytes.
            crc32: Checksum of the storage up to and with these bytes, where it is known.
        """
        self._crc32 = zlib.crc32(data, self._crc32) if crc32 is None else crc32
        self._put(data)

    @property
    def crc32(self) -> int:
        """Checksum of what was written of the current storage."""
        return self._crc32

    def finish(self) -> None:
        """Write the last members and the directory."""
        self._write_whole("version", b"3\n")
        self._write_whole(".data/serialization_id", self._serialization_id())
        start = self._offset
        for member in self._members:
            self._put(_central_header(member))
        num_bytes, count = self._offset - start, len(self._members)
        end64 = self._offset
        self._put(
            _END64.pack(b"PK\x06\x06", _END64.size - 12, 0x031E, 45, 0, 0, count, count,
                        num_bytes, start)
        )  # fmt: skip
        self._put(_LOCATOR64.pack(b"PK\x06\x07", 0, end64, 1))
        few = min(count, 0xFFFF)
        self._put(
            _END.pack(b"PK\x05\x06", 0, 0, few, few, min(num_bytes, MAX32), min(start, MAX32), 0)
        )

    def _write_whole(self, name: str, contents: bytes) -> None:
        with self._member(name, len(contents)):
            self.write(contents)

    @contextmanager
    def _member(self, name: str, num_bytes: int) -> Iterator[None]:
        header_offset, full_name = self._offset, f"{_ROOT}/{name}".encode()
        self._put(_local_header(full_name, header_offset, num_bytes))
        start, self._crc32 = self._offset, 0
        yield
        if self._offset - start != num_bytes:
            raise ValueError(f"{name} has {self._offset - start} bytes instead of {num_bytes}")
        member = _Written(full_name, header_offset, num_bytes, self._crc32)
        if num_bytes:
            self._put(_descriptor(member))
        self._members.append(member)

    def _put(self, data: Buffer) -> None:
        self._sink.write(data)
        self._offset += memoryview(data).nbytes

    def _serialization_id(self) -> bytes:
        """Return 40 digits that stand for names and contents, as torch's do."""
        names = hashlib.blake2b(b"\0".join(m.name for m in self._members), digest_size=8).digest()
        crcs = hashlib.blake2b(
            b"".join(m.crc32.to_bytes(4, "little") for m in self._members), digest_size=8
        ).digest()
        return b"".join(f"{int.from_bytes(part, 'little'):020d}".encode() for part in (names, crcs))


def overhead_bytes(num_storages: int) -> int:
    """Return an upper bound of what a file has besides its pickle and its storages."""
    return (num_storages + 8) * 400


def _extra64(offset: int, *sizes: int) -> bytes:
    """Return the field of those numbers that do not fit 32 bits.

    Args:
        offset: Of the member's header.
        sizes: What to write for its two sizes if they do not fit; empty if they do.
    """
    wide = [*sizes, *([offset] if offset >= MAX32 else [])]
    return _FIELD.pack(1, 8 * len(wide)) + struct.pack(f"<{len(wide)}Q", *wide) if wide else b""


def _local_header(name: bytes, offset: int, num_bytes: int) -> bytes:
    # The stored size is not known to a writer that streams, so torch writes 0 for it.
    extra = _extra64(offset, *((num_bytes, 0) if num_bytes >= MAX32 else ()))
    start = offset + LOCAL_HEADER_BYTES + len(name) + len(extra) + _FIELD.size
    gap = -start % ALIGNMENT_BYTES
    extra += _FIELD.pack(_PADDING_ID, gap) + b"Z" * gap
    flags = _UTF8 | (_STREAMED if num_bytes else 0)
    head = _LOCAL.pack(LOCAL_SIGNATURE, 0, flags, 0, 0, 0, 0, 0, 0, len(name), len(extra))
    return head + name + extra


def _descriptor(member: _Written) -> bytes:
    is_large = member.size_bytes >= MAX32 or member.header_offset >= MAX32
    form = _DESCRIPTOR64 if is_large else _DESCRIPTOR
    return form.pack(b"PK\x07\x08", member.crc32, member.size_bytes, member.size_bytes)


def _central_header(member: _Written) -> bytes:
    size = member.size_bytes
    extra = _extra64(member.header_offset, *((size, size) if size >= MAX32 else ()))
    short, where = min(size, MAX32), min(member.header_offset, MAX32)
    flags = _UTF8 | (_STREAMED if size else 0)
    head = _CENTRAL.pack(
        b"PK\x01\x02", 0, 0, flags, 0, 0, 0, member.crc32, short, short,
        len(member.name), len(extra), 0, 0, 0, 0, where,
    )  # fmt: skip
    return head + member.name + extra


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
    view = memoryview(data)

    def read_at(start: int, end: int) -> memoryview:
        return view[start:end]

    members = read_archive(read_at, len(view), what).members
    found: list[memoryview] = []
    while (member := members.get(f"data/{len(found)}")) is not None:
        start = contents_offset(member, view[member.header_offset :], what)
        found.append(view[start : start + member.size_bytes])
    return found


def identities(storages: Mapping[str, torch.UntypedStorage]) -> dict[str, int]:
    """Return the identity of each storage, by number."""
    return {key: storage_identity(one) for key, one in storages.items()}
