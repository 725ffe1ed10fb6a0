"""The manifest: where every byte of a checkpoint lies, and how to check it. No pickle.

On the wire (format version 1, all integers little-endian)::

    "DCPSTORE"  u32 version  u32 header_bytes  header (JSON)  column  column  ...  u32 crc32c

The header lists the columns (name, numpy dtype, number of elements, stored bytes); each
column is zlib-compressed. One row per stored item, so that a checkpoint of a million
chunks costs a few dozen bytes each and decodes by whole columns. The last four bytes are
the CRC32C of everything before them. See ``docs/design/002-manifest.md``.
"""

from __future__ import annotations

import itertools
import json
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import crc32c
import numpy as np
import numpy.typing as npt

from dcpstore.errors import CorruptError, IncompatibleError
from dcpstore.keys import check_relative
from dcpstore.ranges import ByteRange

__all__ = [
    "DataObject",
    "Entry",
    "ItemId",
    "ItemKind",
    "Manifest",
    "StoredItem",
    "decode",
    "encode",
    "has_other_planner_data",
]

FORMAT_VERSION = 1
_MAGIC = b"DCPSTORE"
_PREFIX = struct.Struct("<8sII")
_KINDS: tuple[ItemKind, ...]
_NO_INLINE = -1

ItemKind: TypeAlias = Literal["raw", "record", "bytes"]
Checksums: TypeAlias = npt.NDArray[np.uint32]
Path: TypeAlias = tuple[str | int, ...]

_KINDS = ("raw", "record", "bytes")


@dataclass(frozen=True, slots=True)
class ItemId:
    """What a stored item is: a chunk of a tensor at ``offsets``, or a value (offsets None)."""

    fqn: str
    offsets: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class DataObject:
    """An object that holds items.

    Attributes:
        key: Relative to the checkpoint's folder.
        size_bytes: Its length as acknowledged by the store.
        etag: The store's version mark, where it gives one.
    """

    key: str
    size_bytes: int
    etag: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StoredItem:
    """Where one item lies and how to read it.

    Attributes:
        key: The object, relative to the checkpoint's folder.
        record: The item's bytes in the object: for stock readers a ``torch.save`` record.
        kind: ``"raw"``: ``payload`` is the row-major elements of a chunk. ``"record"``: a
            ``torch.save`` record that must be looked into. ``"bytes"``: a value's bytes.
        payload: Bytes of the elements inside the object (raw only, else the record).
        dtype: Name of the stored dtype, such as ``"bfloat16"`` (raw only, else "").
        sizes: Shape of the stored chunk in elements (tensors of ours, else empty).
        transforms: Descriptors of DCP stream extensions, to undo in this order.
        checksums: One CRC32C per block of ``payload``; None where the writer left none.
        block_bytes: Bytes per block; the last block may be short.
        inline: The payload itself, where it is small enough to lie in the manifest.
    """

    key: str
    record: ByteRange
    kind: ItemKind
    payload: ByteRange
    dtype: str = ""
    sizes: tuple[int, ...] = ()
    transforms: tuple[str, ...] = ()
    checksums: Checksums | None = None
    block_bytes: int = 0
    inline: bytes | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of the state dict.

    Attributes:
        fqn: The flattened key.
        properties: Tensor properties in the text form of `dcpstore.metadata`; None for a
            value that is not a tensor.
        sizes: Shape of the whole tensor in elements.
        in_state_dict: False for an item that a planner stored beside the state dict.
    """

    fqn: str
    properties: str | None
    sizes: tuple[int, ...] = ()
    in_state_dict: bool = True


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything needed to read a checkpoint without opening a pickle.

    Attributes:
        save_id: The seal that makes this manifest valid names the same one.
        entries: The state dict's keys, in the order of torch's metadata.
        items: Stored items; chunks of a tensor in the order of its chunk list.
        objects: Data objects, in no particular order.
        planner_paths: DCP's map from flattened key to path in the nested state dict, where
            the planner kept one.
        has_other_planner_data: Whether the planner kept something else, which only the
            pickled ``.metadata`` holds.
        info: Facts for people: versions, time of the save.
    """

    save_id: str
    entries: tuple[Entry, ...]
    items: Mapping[ItemId, StoredItem]
    objects: tuple[DataObject, ...]
    planner_paths: Mapping[str, Path] | None = None
    has_other_planner_data: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


def encode(manifest: Manifest) -> bytes:
    """Turn a manifest into bytes."""
    table = _Strings()
    entry_of = {entry.fqn: row for row, entry in enumerate(manifest.entries)}
    object_of = {obj.key: row for row, obj in enumerate(manifest.objects)}
    ids, items = list(manifest.items.keys()), list(manifest.items.values())
    block_bytes = max((item.block_bytes for item in items), default=0)
    columns: dict[str, npt.NDArray[Any]] = {
        **_encode_texts("entry.fqn", [e.fqn for e in manifest.entries]),
        "entry.properties": _ints(
            (table.add(e.properties) if e.properties is not None else -1 for e in manifest.entries),
            np.int32,
        ),
        "entry.in_state_dict": _ints((e.in_state_dict for e in manifest.entries), np.uint8),
        **_encode_shapes("entry.sizes", [e.sizes for e in manifest.entries]),
        **_encode_texts("object.key", [o.key for o in manifest.objects]),
        "object.size": _ints((o.size_bytes for o in manifest.objects), np.uint64),
        **_encode_texts("object.etag", [o.etag or "" for o in manifest.objects]),
        "item.entry": _ints((entry_of[i.fqn] for i in ids), np.uint32),
        **_encode_shapes("item.offsets", [i.offsets or () for i in ids]),
        "item.has_offsets": _ints((i.offsets is not None for i in ids), np.uint8),
        "item.object": _ints((object_of[s.key] for s in items), np.uint32),
        "item.start": _ints((s.record.start for s in items), np.uint64),
        "item.length": _ints((s.record.num_bytes for s in items), np.uint64),
        "item.payload_offset": _ints((s.payload.start - s.record.start for s in items), np.uint32),
        "item.payload_length": _ints((s.payload.num_bytes for s in items), np.uint64),
        "item.kind": _ints((_KINDS.index(s.kind) for s in items), np.uint8),
        "item.dtype": _ints((table.add(s.dtype) for s in items), np.int32),
        **_encode_shapes("item.sizes", [s.sizes for s in items]),
        "item.transforms": _ints((table.add("\n".join(s.transforms)) for s in items), np.int32),
        "item.blocks": _ints(
            (_NO_INLINE if s.checksums is None else len(s.checksums) for s in items), np.int64
        ),
        "item.inline": _ints(
            (_NO_INLINE if s.inline is None else len(s.inline) for s in items), np.int64
        ),
        "checksums": _concatenate([s.checksums for s in items if s.checksums is not None]),
        "inline": np.frombuffer(b"".join(s.inline or b"" for s in items), np.uint8),
    }
    header: dict[str, Any] = {
        "save_id": manifest.save_id,
        "info": dict(manifest.info),
        "block_bytes": block_bytes,
        "has_other_planner_data": manifest.has_other_planner_data,
        "strings": table.values,
    }
    if manifest.planner_paths is not None:
        paths = json.dumps(list(manifest.planner_paths.items()), separators=(",", ":"))
        columns["planner_paths"] = np.frombuffer(paths.encode(), np.uint8)
    return _pack(header, columns)


def decode(data: bytes | memoryview) -> Manifest:
    """Turn bytes into the manifest they were made from.

    Raises:
        CorruptError: If the bytes are not whole.
        IncompatibleError: If a newer version of dcpstore wrote them.
    """
    header, columns = _unpack(memoryview(data))
    try:
        return _decode_columns(header, columns)
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise CorruptError(f"the manifest's columns do not fit together: {error!r}") from error


def has_other_planner_data(data: bytes | memoryview) -> bool:
    """Tell from an encoded manifest whether the planner's data are in the pickle only."""
    header, _ = _read_header(memoryview(data))
    return bool(header.get("has_other_planner_data"))


def _decode_columns(header: dict[str, Any], columns: dict[str, npt.NDArray[Any]]) -> Manifest:
    strings: list[str] = header["strings"]
    fqns = _decode_texts("entry.fqn", columns)
    entries = tuple(
        Entry(fqn, None if prop < 0 else strings[prop], sizes, bool(inside))
        for fqn, prop, sizes, inside in zip(
            fqns,
            columns["entry.properties"].tolist(),
            _decode_shapes("entry.sizes", columns),
            columns["entry.in_state_dict"].tolist(),
            strict=True,
        )
    )
    keys = [check_relative(key) for key in _decode_texts("object.key", columns)]
    objects = tuple(
        DataObject(key, size, etag or None)
        for key, size, etag in zip(
            keys,
            columns["object.size"].tolist(),
            _decode_texts("object.etag", columns),
            strict=True,
        )
    )
    paths = None
    if "planner_paths" in columns:
        paths = {fqn: tuple(path) for fqn, path in json.loads(columns["planner_paths"].tobytes())}
    return Manifest(
        save_id=header["save_id"],
        entries=entries,
        items=dict(_decode_items(header, columns, fqns, keys)),
        objects=objects,
        planner_paths=paths,
        has_other_planner_data=header["has_other_planner_data"],
        info=header["info"],
    )


def _decode_items(
    header: dict[str, Any],
    columns: dict[str, npt.NDArray[Any]],
    fqns: Sequence[str],
    keys: Sequence[str],
) -> Iterable[tuple[ItemId, StoredItem]]:
    strings: list[str] = header["strings"]
    transforms = [tuple(text.split("\n")) if text else () for text in strings]
    inline = columns["inline"].tobytes()
    checksums = columns["checksums"]
    block_bytes: int = header["block_bytes"]
    crc_at = inline_at = 0
    for row in zip(
        columns["item.entry"].tolist(),
        columns["item.has_offsets"].tolist(),
        _decode_shapes("item.offsets", columns),
        columns["item.object"].tolist(),
        columns["item.start"].tolist(),
        columns["item.length"].tolist(),
        columns["item.payload_offset"].tolist(),
        columns["item.payload_length"].tolist(),
        columns["item.kind"].tolist(),
        columns["item.dtype"].tolist(),
        _decode_shapes("item.sizes", columns),
        columns["item.transforms"].tolist(),
        columns["item.blocks"].tolist(),
        columns["item.inline"].tolist(),
        strict=True,
    ):
        entry, has_offsets, offsets, obj, start, length, payload, payload_length = row[:8]
        kind, dtype, sizes, transform, blocks, inline_bytes = row[8:]
        crcs = content = None
        if blocks != _NO_INLINE:
            crcs = checksums[crc_at : crc_at + blocks]
            crc_at += blocks
        if inline_bytes != _NO_INLINE:
            content = inline[inline_at : inline_at + inline_bytes]
            inline_at += inline_bytes
        yield (
            ItemId(fqns[entry], offsets if has_offsets else None),
            StoredItem(
                key=keys[obj],
                record=ByteRange(start, start + length),
                kind=_KINDS[kind],
                payload=ByteRange(start + payload, start + payload + payload_length),
                dtype=strings[dtype],
                sizes=sizes,
                transforms=transforms[transform],
                checksums=crcs,
                block_bytes=block_bytes,
                inline=content,
            ),
        )


class _Strings:
    """Numbers for strings that repeat."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}

    def add(self, text: str) -> int:
        return self._rows.setdefault(text, len(self._rows))

    @property
    def values(self) -> list[str]:
        return list(self._rows)


def _ints(values: Iterable[int], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.array(list(values), dtype=dtype)


def _concatenate(arrays: Sequence[Checksums]) -> Checksums:
    return np.concatenate(arrays) if arrays else np.empty(0, np.uint32)


def _encode_texts(name: str, texts: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    return {
        f"{name}.text": np.frombuffer(b"".join(encoded), np.uint8),
        f"{name}.length": _ints(map(len, encoded), np.uint32),
    }


def _decode_texts(name: str, columns: dict[str, npt.NDArray[Any]]) -> list[str]:
    text = columns[f"{name}.text"].tobytes()
    ends = list(itertools.accumulate(columns[f"{name}.length"].tolist(), initial=0))
    if ends[-1] != len(text):
        raise ValueError(f"{name}: lengths add up to {ends[-1]} of {len(text)} bytes")
    return [text[a:b].decode("utf-8", "surrogatepass") for a, b in itertools.pairwise(ends)]


def _encode_shapes(name: str, shapes: Sequence[tuple[int, ...]]) -> dict[str, npt.NDArray[Any]]:
    return {
        f"{name}.flat": _ints(itertools.chain.from_iterable(shapes), np.int64),
        f"{name}.ndim": _ints(map(len, shapes), np.uint8),
    }


def _decode_shapes(name: str, columns: dict[str, npt.NDArray[Any]]) -> list[tuple[int, ...]]:
    flat: list[int] = columns[f"{name}.flat"].tolist()
    ends = list(itertools.accumulate(columns[f"{name}.ndim"].tolist(), initial=0))
    if ends[-1] != len(flat):
        raise ValueError(f"{name}: dimensions add up to {ends[-1]} of {len(flat)}")
    return [tuple(flat[a:b]) for a, b in itertools.pairwise(ends)]


def _pack(header: dict[str, Any], columns: Mapping[str, npt.NDArray[Any]]) -> bytes:
    parts: list[bytes] = []
    described = []
    for name, column in columns.items():
        packed = zlib.compress(column.astype(column.dtype.newbyteorder("<")).tobytes(), 1)
        described.append([name, column.dtype.name, len(column), len(packed)])
        parts.append(packed)
    text = json.dumps({**header, "columns": described}, separators=(",", ":")).encode()
    body = b"".join([_PREFIX.pack(_MAGIC, FORMAT_VERSION, len(text)), text, *parts])
    return body + struct.pack("<I", crc32c.crc32c(body))


def _unpack(data: memoryview) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    header, at = _read_header(data)
    columns = {}
    for name, dtype, count, num_bytes in header["columns"]:
        raw = zlib.decompress(data[at : at + num_bytes])
        columns[name] = np.frombuffer(raw, np.dtype(dtype).newbyteorder("<"), count)
        at += num_bytes
    return header, columns


def _read_header(data: memoryview) -> tuple[dict[str, Any], int]:
    """Check the bytes; return the header and where the columns start."""
    if len(data) < _PREFIX.size + 4 or bytes(data[:8]) != _MAGIC:
        raise CorruptError("this is not a dcpstore manifest: its first bytes are wrong")
    _, version, header_bytes = _PREFIX.unpack_from(data)
    if version > FORMAT_VERSION:
        raise IncompatibleError(
            f"the manifest has format version {version}; this dcpstore reads up to"
            f" {FORMAT_VERSION}. Update dcpstore to load this checkpoint"
        )
    (expected,) = struct.unpack("<I", data[-4:])
    if crc32c.crc32c(data[:-4]) != expected:
        raise CorruptError("the manifest's checksum is wrong: the object was changed or cut short")
    at = _PREFIX.size + header_bytes
    return json.loads(bytes(data[_PREFIX.size : at])), at
