"""The manifest: where every byte of a checkpoint lies, and how to check it. No pickle.

On the wire (format versions 1 and 2, all integers little-endian)::

    "DCPSTORE"  u32 version  u32 header_bytes  header (JSON)  column  column  ...  u32 crc32c

The header lists the columns (name, numpy dtype, number of elements, stored bytes); each
column is zlib-compressed. One row per stored item, so that a checkpoint of a million
chunks costs a few dozen bytes each and decodes by whole columns. The last four bytes are
the CRC32C of everything before them. Version 2 adds what a reader must know to read it at all,
and names it in the header: a value's encoding is a row of its own, behind that of its record, and
attachments have columns of their own. It is written where there is either. See
``docs/design/002-manifest.md`` and ``012-manifest-version-2.md``.
"""

from __future__ import annotations

import itertools
import json
import re
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import crc32c
import numpy as np
import numpy.typing as npt

from dcpstore.config import MAX_METADATA_BYTES
from dcpstore.errors import CorruptError, IncompatibleError
from dcpstore.format.checksum import Checksums
from dcpstore.format.dtypes import DTYPES, row_major_strides
from dcpstore.format.seal import check_relative, is_save_id
from dcpstore.store.base import ByteRange
from dcpstore.text import check_natural, parse_json

FORMAT_VERSION = 2
"""The newest that is read."""

_VALUES, _ATTACHMENTS = "values", "attachments"
_KNOWN_NEEDS = frozenset((_VALUES, _ATTACHMENTS))
_MAGIC = b"DCPSTORE"
_PREFIX = struct.Struct("<8sII")
_NO_INLINE = -1

ItemKind: TypeAlias = Literal["raw", "record", "bytes", "value"]
Path: TypeAlias = tuple[str | int, ...]
_Columns: TypeAlias = Mapping[str, npt.NDArray[Any]]
_NameOf: TypeAlias = Callable[[int], str]
"""Returns the key that a row belongs to, for messages."""

_KINDS: tuple[ItemKind, ...] = ("raw", "record", "bytes", "value")

_MAX = (1 << 63) - 1
_PATHS = "planner_paths"


class _Column(NamedTuple):
    """What a reader knows of a column.

    Attributes:
        dtype: Of its elements.
        below: What its numbers count, and so may not reach: rows of a group, ``"string"``,
            ``"kind"`` or ``"truth"``; empty if 2**63 is their only limit.
        least: Their least value.
    """

    dtype: str
    below: str = ""
    least: int = 0


_COLUMNS = {
    "entry.fqn.text": _Column("uint8"),
    "entry.fqn.length": _Column("uint32"),
    "entry.properties": _Column("int32", "string", least=-1),
    "entry.in_state_dict": _Column("uint8", "truth"),
    "entry.sizes.flat": _Column("int64"),
    "entry.sizes.ndim": _Column("uint8"),
    "object.key.text": _Column("uint8"),
    "object.key.length": _Column("uint32"),
    "object.size": _Column("uint64"),
    "object.etag.text": _Column("uint8"),
    "object.etag.length": _Column("uint32"),
    "item.entry": _Column("uint32", "entry"),
    "item.offsets.flat": _Column("int64"),
    "item.offsets.ndim": _Column("uint8"),
    "item.has_offsets": _Column("uint8", "truth"),
    "item.object": _Column("uint32", "object"),
    "item.start": _Column("uint64"),
    "item.length": _Column("uint64"),
    "item.payload_offset": _Column("uint32"),
    "item.payload_length": _Column("uint64"),
    "item.kind": _Column("uint8", "kind"),
    "item.dtype": _Column("int32", "string"),
    "item.sizes.flat": _Column("int64"),
    "item.sizes.ndim": _Column("uint8"),
    "item.transforms": _Column("int32", "string"),
    "item.blocks": _Column("int64", least=_NO_INLINE),
    "item.inline": _Column("int64", least=_NO_INLINE),
    "checksums": _Column("uint32"),
    "inline": _Column("uint8"),
    _PATHS: _Column("uint8"),
    "attachment.name.text": _Column("uint8"),
    "attachment.name.length": _Column("uint32"),
    "attachment.object": _Column("uint32", "object"),
    "attachment.start": _Column("uint64"),
    "attachment.length": _Column("uint64"),
    "attachment.blocks": _Column("int64"),
    "attachment.inline": _Column("int64", least=_NO_INLINE),
}
"""In this order when written. All are there but for ``planner_paths`` and, where the header does
not say that they are needed, those of attachments. One row per entry, object, item or attachment,
but for ``.text``, ``.flat``, ``checksums``, ``inline`` and ``planner_paths``."""

_FIRST_OF = {
    "entry": "entry.fqn.length",
    "object": "object.key.length",
    "item": "item.entry",
    "attachment": "attachment.name.length",
}
# Measured with torch 2.13 on 200,000 items: 1.8 KB each in a manifest and torch's metadata.
_ROW_BYTES = {"entry": 1024, "object": 512, "item": 2048, "attachment": 2048}
_MIN_BLOCK_BYTES = 4096
_NAME = re.compile(r"\w{1,64}", re.ASCII)
# Columns of what is saved take 5 to 25 times as much as their stored bytes.
_MOST_PER_BYTE = 64
_ALWAYS_ALLOWED_BYTES = 4 << 20
# Lists of the flattening paths: a planner may have left out most of one, not nearly all.
_MOST_PLACES_PER_STEP = 16
_ALWAYS_ALLOWED_PLACES = 1 << 20


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
            ``"value"``: the encoding of a value (`dcpstore.format.values`).
        payload: Bytes of the elements inside the object (raw only, else the record).
        dtype: Name of the stored dtype, such as ``"bfloat16"`` (raw only, else "").
        sizes: Shape of the stored chunk in elements (tensors of ours, else empty).
        transforms: Descriptors of DCP stream extensions, to undo in this order.
        checksums: One CRC32C per block of ``payload``; None where the writer left none.
        block_bytes: Bytes per block; the last block may be short.
        inline: The payload itself, where it is small enough to lie in the manifest.
        encoded: Of a value's bytes: where the same value lies once more, without pickle; None
            if it needs no such form.
        strides: Steps between elements, in elements (raw only); None if they are row-major, as
            those of every checkpoint are. Tensors of ``torch.save`` files may have any.
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
    encoded: StoredItem | None = None
    strides: tuple[int, ...] | None = None

    @property
    def element_strides(self) -> tuple[int, ...]:
        """Steps between elements, in elements."""
        return row_major_strides(self.sizes) if self.strides is None else self.strides

    @property
    def forms(self) -> tuple[StoredItem, ...]:
        """Everything that is stored of the item: itself, and its encoding."""
        return (self,) if self.encoded is None else (self, self.encoded)

    def moved(self, new_keys: Mapping[str, str]) -> StoredItem:
        """Return the item as it lies in copies of its objects."""
        encoded = None if self.encoded is None else self.encoded.moved(new_keys)
        return replace(self, key=new_keys[self.key], encoded=encoded)


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of the state dict.

    Attributes:
        fqn: The flattened key.
        properties: Tensor properties in the text form of `dcpstore.format.metadata`; None for a
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
        info: Facts for people: versions, and under ``user_metadata`` what users gave.
        attachments: Where files lie that were sealed with the tensors, by their names.
    """

    save_id: str
    entries: tuple[Entry, ...]
    items: Mapping[ItemId, StoredItem]
    objects: tuple[DataObject, ...]
    planner_paths: Mapping[str, Path] | None = None
    has_other_planner_data: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    attachments: Mapping[str, StoredItem] = field(default_factory=dict)

    @property
    def stored(self) -> Iterator[tuple[ItemId, StoredItem]]:
        """Everything that is stored: each form of each item, and the attachments.

        Attachments come under a name for people, which is no key.
        """
        for one, item in self.items.items():
            for form in item.forms:
                yield one, form
        for name, item in self.attachments.items():
            yield ItemId(attachment_text(name), None), item


def attachment_text(name: str) -> str:
    """Name an attachment where keys are named too, for people."""
    return f"attachment {name}"


def encode(manifest: Manifest) -> bytes:
    """Turn a manifest into bytes."""
    strings: dict[str, int] = {}  # numbers for strings that repeat

    def number(text: str) -> int:
        return strings.setdefault(text, len(strings))

    entries, objects = manifest.entries, manifest.objects
    entry_of = {entry.fqn: row for row, entry in enumerate(entries)}
    object_of = {obj.key: row for row, obj in enumerate(objects)}
    rows = [(one, form) for one, item in manifest.items.items() for form in item.forms]
    ids, items = [one for one, _ in rows], [item for _, item in rows]
    attached = list(manifest.attachments.values())
    needs = [_VALUES] if len(rows) > len(manifest.items) else []
    needs += [_ATTACHMENTS] if attached else []
    inlines = [item.inline for item in items]
    values: dict[str, Iterable[Any]] = {
        **_encode_texts("entry.fqn", [e.fqn for e in entries]),
        "entry.properties": [-1 if e.properties is None else number(e.properties) for e in entries],
        "entry.in_state_dict": [e.in_state_dict for e in entries],
        **_encode_shapes("entry.sizes", [e.sizes for e in entries]),
        **_encode_texts("object.key", [o.key for o in objects]),
        "object.size": [o.size_bytes for o in objects],
        **_encode_texts("object.etag", [o.etag or "" for o in objects]),
        "item.entry": [entry_of[one.fqn] for one in ids],
        **_encode_shapes("item.offsets", [one.offsets or () for one in ids]),
        "item.has_offsets": [one.offsets is not None for one in ids],
        "item.object": [object_of[item.key] for item in items],
        "item.start": [item.record.start for item in items],
        "item.length": [item.record.num_bytes for item in items],
        "item.payload_offset": [item.payload.start - item.record.start for item in items],
        "item.payload_length": [item.payload.num_bytes for item in items],
        "item.kind": [_KINDS.index(item.kind) for item in items],
        "item.dtype": [number(item.dtype) for item in items],
        **_encode_shapes("item.sizes", [item.sizes for item in items]),
        "item.transforms": [number("\n".join(item.transforms)) for item in items],
        "item.blocks": [_length(item.checksums) for item in items],
        "item.inline": [_length(inline) for inline in inlines],
        "checksums": _joined_checksums([*items, *attached]),
        "inline": np.frombuffer(b"".join(i.inline or b"" for i in [*items, *attached]), np.uint8),
    }
    header: dict[str, Any] = {
        "save_id": manifest.save_id,
        "info": dict(manifest.info),
        "block_bytes": max((item.block_bytes for item in [*items, *attached]), default=0),
        "has_other_planner_data": manifest.has_other_planner_data,
        "strings": list(strings),
    }
    if manifest.planner_paths is not None:
        paths = json.dumps(list(manifest.planner_paths.items()), separators=(",", ":"))
        values[_PATHS] = np.frombuffer(paths.encode(), np.uint8)
    if attached:
        values |= {
            **_encode_texts("attachment.name", list(manifest.attachments)),
            "attachment.object": [object_of[item.key] for item in attached],
            "attachment.start": [item.payload.start for item in attached],
            "attachment.length": [item.payload.num_bytes for item in attached],
            "attachment.blocks": [_length(item.checksums) for item in attached],
            "attachment.inline": [_length(item.inline) for item in attached],
        }
    if needs:
        header["needs"] = needs
    return _pack(header, values, version=2 if needs else 1)


def decode(
    data: bytes | memoryview, *, key: str | None = None, max_bytes: int = MAX_METADATA_BYTES
) -> Manifest:
    """Turn bytes into the manifest they were made from. The one gate: what it returns is sound.

    A checksum shows that bytes are those that somebody sealed, not that they were sealed by a
    writer of ours. So everything is checked here, by whole columns, and nothing behind it needs
    to: types, counts, signs, ranges inside their objects, shapes inside their tensors, names.

    Args:
        data: An encoded manifest.
        key: The object that it lies in, for messages.
        max_bytes: ``ReadConfig.max_metadata_bytes``.

    Raises:
        CorruptError: If the bytes are not whole, or say what no checkpoint can be.
        IncompatibleError: If a newer version of dcpstore wrote them, or they take more memory
            than ``max_bytes``.
    """
    try:
        header, stored = _read_header(memoryview(data))
        return _build(header, _read_columns(header, stored, max_bytes))
    except CorruptError as error:
        if key is None:
            raise
        raise CorruptError(f"{key}: {error}", key=error.key or key, fqn=error.fqn) from error
    except IncompatibleError as error:
        raise IncompatibleError(f"{key or 'metadata'}: {error}") from error


def has_other_planner_data(data: bytes | memoryview) -> bool:
    """Tell from an encoded manifest whether the planner's data are in the pickle only."""
    header, _ = _read_header(memoryview(data))
    return header.has_other_planner_data


# --- decoding: the header and the columns -------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Header:
    """The JSON header; checks its own types."""

    save_id: str
    info: Mapping[str, Any]
    block_bytes: int
    has_other_planner_data: bool
    strings: list[str]
    columns: list[tuple[str, str, int, int]]
    needs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if type(self.needs) is not list or not all(type(one) is str for one in self.needs):
            raise ValueError("needs is no list of strings")
        if not is_save_id(self.save_id):
            raise ValueError(f"the save id {self.save_id!r:.60} is not 16 hex digits")
        if type(self.info) is not dict or type(self.has_other_planner_data) is not bool:
            raise ValueError("info is no object, or has_other_planner_data no truth value")
        if type(self.info.get("user_metadata", {})) is not dict:
            raise ValueError("user_metadata is no object")
        if type(self.strings) is not list or not all(type(one) is str for one in self.strings):
            raise ValueError("strings is no list of strings")
        block_bytes = check_natural(self.block_bytes)
        if block_bytes and (block_bytes < _MIN_BLOCK_BYTES or block_bytes & (block_bytes - 1)):
            raise ValueError(f"block_bytes={block_bytes} is no power of two of at least 4096")
        for name, dtype, count, num_bytes in self.columns:
            if type(name) is not str or type(dtype) is not str:
                raise ValueError(f"a column is named {name!r:.60} and of dtype {dtype!r:.60}")
            check_natural(count)
            check_natural(num_bytes)


def _read_header(data: memoryview) -> tuple[_Header, memoryview]:
    """Check the bytes; return the header, and the columns as they are stored."""
    if len(data) < _PREFIX.size + 4 or bytes(data[:8]) != _MAGIC:
        raise CorruptError("this is not a dcpstore manifest: its first bytes are wrong")
    _, version, header_bytes = _PREFIX.unpack_from(data)
    if version > FORMAT_VERSION:
        raise IncompatibleError(
            f"the manifest has format version {version}; this dcpstore reads up to"
            f" {FORMAT_VERSION}. Update dcpstore to load this checkpoint"
        )
    if version < 1:
        raise CorruptError(f"the manifest has format version {version}, which there never was")
    (expected,) = struct.unpack("<I", data[-4:])
    if crc32c.crc32c(data[:-4]) != expected:
        raise CorruptError("the manifest's checksum is wrong: the object was changed or cut short")
    start = _PREFIX.size + header_bytes
    try:
        if start > len(data) - 4:
            raise ValueError(f"it has {header_bytes} bytes, more than there are")
        fields = parse_json(data[_PREFIX.size : start])
        names = [name for name in _Header.__slots__ if name != "needs" or version > 1]
        header = _Header(**{name: fields[name] for name in names})
    except (KeyError, ValueError, TypeError) as error:
        raise CorruptError(f"the manifest's header is damaged: {error!r}") from error
    unknown = sorted(set(header.needs) - _KNOWN_NEEDS)
    if unknown:
        raise IncompatibleError(
            f"the manifest needs {unknown!r:.200}, which this dcpstore does not know. Update"
            " dcpstore to load this checkpoint"
        )
    return header, data[start:-4]


def _read_columns(header: _Header, stored: memoryview, max_bytes: int) -> _Columns:
    """Decompress the columns that are known, each to the length that the header tells.

    Unknown ones are passed over as they lie.
    """
    known = {
        name: column
        for name, column in _COLUMNS.items()
        if _ATTACHMENTS in header.needs or not name.startswith("attachment.")
    }
    found: dict[str, tuple[int, memoryview]] = {}
    names: set[str] = set()
    at = 0
    for name, dtype, count, num_bytes in header.columns:
        if name in names:
            raise _damaged(name, "it is there twice")
        names.add(name)
        if name in known:
            if dtype != known[name].dtype:
                raise _damaged(name, f"it is of dtype {dtype!r:.60}, not {known[name].dtype}")
            found[name] = (count, stored[at : at + num_bytes])
        at += num_bytes
    if at != len(stored):
        raise CorruptError(
            f"the manifest's columns take {at} bytes by its header, and {len(stored)} are there"
        )
    for name in known:
        if name not in found and name != _PATHS:
            raise _damaged(name, "it is not there")
    _check_counts({name: count for name, (count, _) in found.items()}, len(stored), max_bytes)
    return {name: _decompress(name, *found[name]) for name in known if name in found}


def _check_counts(counts: Mapping[str, int], stored_bytes: int, max_bytes: int) -> None:
    """Check that the columns fit each other and the limits, before one is decompressed."""
    rows = {group: counts[first] for group, first in _FIRST_OF.items() if first in counts}
    for name, count in counts.items():
        group = name.partition(".")[0]
        if not name.endswith((".text", ".flat")) and count != rows.get(group, count):
            raise _damaged(name, f"it has {count} rows, and {_FIRST_OF[group]} has {rows[group]}")
    plain_bytes = sum(n * np.dtype(_COLUMNS[name].dtype).itemsize for name, n in counts.items())
    if plain_bytes > _ALWAYS_ALLOWED_BYTES + _MOST_PER_BYTE * stored_bytes:
        raise CorruptError(
            f"the manifest's {stored_bytes} bytes of columns would take {plain_bytes}, which is"
            f" more than {_MOST_PER_BYTE} times as many"
        )
    memory_bytes = 8 * plain_bytes + sum(_ROW_BYTES[group] * n for group, n in rows.items())
    if memory_bytes > max_bytes:
        raise IncompatibleError(
            f"the manifest of {rows['item']} items would take about {memory_bytes} bytes of"
            f" memory, more than max_metadata_bytes={max_bytes}. If you trust the checkpoint,"
            " load it with a larger ReadConfig(max_metadata_bytes=...)"
        )


def _decompress(name: str, count: int, stored: memoryview) -> npt.NDArray[Any]:
    dtype = np.dtype(_COLUMNS[name].dtype).newbyteorder("<")
    num_bytes = count * dtype.itemsize
    stream = zlib.decompressobj()
    try:
        plain = stream.decompress(stored, num_bytes + 1)
    except zlib.error as error:
        raise _damaged(name, f"it does not decompress: {error}") from error
    if len(plain) != num_bytes or not stream.eof or stream.unused_data:
        raise _damaged(name, f"it does not decompress to the {num_bytes} bytes of its {count} rows")
    return np.frombuffer(plain, dtype)


def _damaged(column: str, what: str, *, fqn: str | None = None) -> CorruptError:
    of = "" if fqn is None else f" (of {fqn!r})"
    return CorruptError(f"the manifest's column {column} is damaged: {what}{of}", fqn=fqn)


# --- decoding: what the columns say -------------------------------------------------------


def _build(header: _Header, columns: _Columns) -> Manifest:
    fqns = _decode_texts("entry.fqn", columns)
    keys = _decode_texts("object.key", columns)
    names = _decode_texts("attachment.name", columns) if _ATTACHMENTS in header.needs else []
    for name, texts in (("entry.fqn", fqns), ("object.key", keys), ("attachment.name", names)):
        if len(set(texts)) != len(texts):
            raise _damaged(name, f"{_most_common(texts)!r} is there twice")
    for one in (*keys, *names):
        check_relative(one)

    def of(row: int) -> str:
        return fqns[int(columns["item.entry"][row])]

    _check_numbers(header, columns, fqns, of)
    if names:
        _check_range("attachment", columns, names.__getitem__)
    entry_sizes = _Shapes("entry.sizes", columns)
    entries = _entries(header, columns, fqns, entry_sizes)
    _check_encodings(columns, of)
    _check_spans(columns, of)
    _check_checksums(header, columns, of, names)
    _check_shapes(header, columns, entry_sizes, of)
    rows = _decode_items(header, columns, fqns, keys)
    items = _with_encodings(rows) if _VALUES in header.needs else dict(rows)
    num_encodings = int((columns["item.kind"] == _KINDS.index("value")).sum())
    if len(items) + num_encodings != len(columns["item.entry"]):
        # Made once more, and only here, to compare them.
        for found, item in _decode_items(header, columns, fqns, keys):
            if item.kind != "value" and not _may_be_same(item, items[found]):
                what = f"{found.offsets} is there twice with different contents"
                raise _damaged("item.offsets", what, fqn=found.fqn)
    return Manifest(
        save_id=header.save_id,
        entries=entries,
        items=items,
        objects=tuple(
            DataObject(one, size, etag or None)
            for one, size, etag in zip(
                keys,
                columns["object.size"].tolist(),
                _decode_texts("object.etag", columns),
                strict=True,
            )
        ),
        planner_paths=_decode_paths(columns[_PATHS]) if _PATHS in columns else None,
        has_other_planner_data=header.has_other_planner_data,
        info=header.info,
        attachments=_decode_attachments(header, columns, names, keys) if names else {},
    )


def _may_be_same(one: StoredItem, other: StoredItem) -> bool:
    """Compare what two items hold; their contents as far as both have checksums."""
    if (one.kind, one.dtype, one.sizes) != (other.kind, other.dtype, other.sizes):
        return False
    if one.checksums is None or other.checksums is None:
        return True
    return np.array_equal(one.checksums, other.checksums)


def _entries(
    header: _Header, columns: _Columns, fqns: Sequence[str], sizes: _Shapes
) -> tuple[Entry, ...]:
    properties, inside = columns["entry.properties"], columns["entry.in_state_dict"]
    has_shape = (properties >= 0) | (sizes.ndim == 0)
    of = fqns.__getitem__
    _require(has_shape, "entry.sizes", "what is no tensor has a shape", of)
    _require(sizes.num_elements() >= 0, "entry.sizes", "there are 2**63 elements or more", of)
    for number in set(properties[properties >= 0].tolist()):
        problem = _problem_of_properties(header.strings[number])
        if problem is not None:
            fqn = fqns[int(np.argmax(properties == number))]
            raise _damaged("entry.properties", problem, fqn=fqn)
    return tuple(
        Entry(fqn, None if prop < 0 else header.strings[prop], shape, bool(is_inside))
        for fqn, prop, shape, is_inside in zip(
            fqns, properties.tolist(), sizes.tuples(), inside.tolist(), strict=True
        )
    )


def _problem_of_properties(text: str) -> str | None:
    try:
        fields = parse_json(text)
        names = [fields[name] for name in ("dtype", "layout", "memory_format")]
        truths = [fields[name] for name in ("requires_grad", "pin_memory")]
    except (ValueError, KeyError, TypeError) as error:
        return f"the properties are damaged: {error!r}"
    if not all(type(name) is str and _NAME.fullmatch(name) for name in names):
        return f"dtype, layout and memory_format are {names!r:.200}"
    if not all(type(truth) is bool for truth in truths):
        return f"requires_grad and pin_memory are {truths!r:.200}"
    return None


def _check_numbers(
    header: _Header, columns: _Columns, fqns: Sequence[str], of_item: _NameOf
) -> None:
    """Check that each number is one that its column may hold."""
    limits = {
        "": 1 << 63,
        "entry": len(fqns),
        "kind": len(_KINDS) if _VALUES in header.needs else _KINDS.index("value"),
        "object": len(columns["object.size"]),
        "string": len(header.strings),
        "truth": 2,
    }
    for name, column in columns.items():
        _, below, least = _COLUMNS[name]
        group = name.partition(".")[0]
        of = {"entry": fqns.__getitem__, "item": of_item}.get(group)
        if name.endswith((".flat", ".text")) or name == "item.entry":
            of = None
        problem = f"there is no such {below}" if below else "it is negative or too large"
        _require((column >= least) & (column < limits[below]), name, problem, of)


def _check_encodings(columns: _Columns, of: _NameOf) -> None:
    """Check that the row of each encoding is behind that of its value's bytes."""
    kind, entry, has_offsets = (columns[f"item.{one}"] for one in ("kind", "entry", "has_offsets"))
    is_owner = (kind == _KINDS.index("bytes")) & (has_offsets == 0)
    is_behind = np.zeros(len(kind), bool)
    is_behind[1:] = is_owner[:-1] & (entry[:-1] == entry[1:]) & (has_offsets[1:] == 0)
    fits = (kind != _KINDS.index("value")) | is_behind
    _require(fits, "item.kind", "an encoding is not behind the bytes of its value", of)


def _check_range(group: str, columns: _Columns, of: _NameOf) -> None:
    """Check that items, or attachments, lie in their objects."""
    start, length = (columns[f"{group}.{name}"].astype(np.int64) for name in ("start", "length"))
    size = columns["object.size"].astype(np.int64)[columns[f"{group}.object"]]
    _require(start <= size, f"{group}.start", "it is beyond its object's end", of)
    problem = "the record ends beyond its object's end"
    _require(length <= size - start, f"{group}.length", problem, of)


def _check_spans(columns: _Columns, of: _NameOf) -> None:
    _check_range("item", columns, of)
    length, payload, offset = (
        columns[f"item.{name}"].astype(np.int64)
        for name in ("length", "payload_length", "payload_offset")
    )
    _require(offset <= length, "item.payload_offset", "it is beyond its record's end", of)
    is_inside = payload <= length - offset
    _require(is_inside, "item.payload_length", "the payload ends beyond its record's end", of)


def _check_checksums(header: _Header, columns: _Columns, of: _NameOf, names: Sequence[str]) -> None:
    """Check how many checksums and inline bytes each item and attachment has, and their sums."""
    totals = {"checksums": 0, "inline": 0}
    groups = [("item", "payload_length", of), ("attachment", "length", names.__getitem__)]
    for group, length, name_of in groups if names else groups[:1]:
        payload = columns[f"{group}.{length}"].astype(np.int64)
        blocks, inline = columns[f"{group}.blocks"], columns[f"{group}.inline"]
        if header.block_bytes == 0:
            problem = "there are blocks of no size"
            _require(blocks == _NO_INLINE, f"{group}.blocks", problem, name_of)
        else:
            expected = -(-payload // header.block_bytes)
            fits = (blocks == _NO_INLINE) | (blocks == expected)
            problem = "the payload has another number of blocks"
            _require(fits, f"{group}.blocks", problem, name_of)
        fits = (inline == _NO_INLINE) | (inline == payload)
        _require(fits, f"{group}.inline", "the payload has another length", name_of)
        for name, lengths in (("checksums", blocks), ("inline", inline)):
            # As floats: the sum of lengths that are each below 2**63 may be beyond it.
            totals[name] += int(lengths[lengths > 0].sum(dtype=np.float64))
    for name, total in totals.items():
        if total != len(columns[name]):
            raise _damaged(name, f"it has {len(columns[name])} rows, and {total} are referred to")


def _check_shapes(header: _Header, columns: _Columns, entry_sizes: _Shapes, of: _NameOf) -> None:
    """Check that chunks lie in their tensors, and that elements take the payload's bytes."""
    offsets, sizes = _Shapes("item.offsets", columns), _Shapes("item.sizes", columns)
    has_offsets = columns["item.has_offsets"] == 1
    _require(
        has_offsets | (offsets.ndim == 0), "item.offsets", "there are some for what has none", of
    )
    entry = columns["item.entry"]
    is_chunk = columns["entry.properties"][entry] >= 0
    _require(has_offsets | ~is_chunk, "item.has_offsets", "a chunk lies at no offsets", of)
    rows = np.flatnonzero(is_chunk)
    ndim = entry_sizes.ndim[entry[rows]]
    for name, shapes in (("item.offsets", offsets), ("item.sizes", sizes)):
        fits = np.ones(len(entry), bool)
        fits[rows] = shapes.ndim[rows] == ndim
        _require(fits, name, "the tensor has another number of dimensions", of)
    for dim in range(int(ndim.max(initial=0))):
        rows = rows[offsets.ndim[rows] > dim]
        limit = entry_sizes.at(entry[rows], dim)
        fits = np.ones(len(entry), bool)
        fits[rows] = (sizes.at(rows, dim) <= limit) & (
            offsets.at(rows, dim) <= limit - sizes.at(rows, dim)
        )
        _require(fits, "item.offsets", "the chunk lies outside its tensor", of)
    _check_elements(header, columns, sizes.num_elements(), of)


def _check_elements(
    header: _Header, columns: _Columns, num_elements: npt.NDArray[np.int64], of: _NameOf
) -> None:
    _require(num_elements >= 0, "item.sizes", "there are 2**63 elements or more", of)
    is_raw = columns["item.kind"] == _KINDS.index("raw")
    numbers = columns["item.dtype"]
    item_bytes = np.zeros(len(header.strings), np.int64)
    for number in set(numbers[is_raw].tolist()):
        row = DTYPES.get(header.strings[number])
        if row is None:
            raise IncompatibleError(
                f"the manifest's column item.dtype names {header.strings[number]!r:.60} (of"
                f" {of(int(np.argmax(is_raw & (numbers == number))))!r}), a dtype that this"
                " dcpstore does not know. Update dcpstore to load this checkpoint"
            )
        item_bytes[number] = row.item_bytes
    width = item_bytes[numbers]
    payload = columns["item.payload_length"].astype(np.int64)
    fits = ~is_raw | (
        (num_elements <= _MAX // np.maximum(width, 1)) & (num_elements * width == payload)
    )
    _require(fits, "item.payload_length", "elements of that shape and dtype take other bytes", of)
    is_plain = (
        ~is_raw
        | np.array([not text for text in header.strings] or [True])[columns["item.transforms"]]
    )
    _require(is_plain, "item.transforms", "plain elements have none", of)


def _decode_paths(column: npt.NDArray[Any]) -> dict[str, Path]:
    try:
        pairs = parse_json(column.tobytes())
        if type(pairs) is not list:
            raise ValueError("it is no list")
        paths: dict[str, Path] = {}
        for fqn, path in pairs:
            if type(fqn) is not str or type(path) is not list:
                raise ValueError(f"{fqn!r:.200} has the path {path!r:.200}")
            if not all(type(step) is str or type(step) is int for step in path):
                raise ValueError(f"{fqn!r:.200} has a path of other steps than names and numbers")
            if not path or type(path[0]) is not str:
                raise ValueError(f"{fqn!r:.200} has the path {path!r:.200} from no dictionary")
            paths[fqn] = tuple(path)
        if len(paths) != len(pairs):
            raise ValueError(f"{_most_common(fqn for fqn, _ in pairs)!r:.200} is there twice")
        _check_lists(paths)
    except (ValueError, TypeError) as error:
        raise _damaged(_PATHS, str(error)) from error
    return paths


def _check_lists(paths: Mapping[str, Path]) -> None:
    """Check that lists are about as long as they have places; torch fills up what is missing."""
    length_of: dict[Path, int] = {}
    num_steps = 0
    for fqn, path in paths.items():
        num_steps += len(path)
        for at, step in enumerate(path):
            if type(step) is int:
                if step < 0:
                    raise ValueError(f"{fqn!r:.200} lies at {step} in a list")
                length_of[path[:at]] = max(length_of.get(path[:at], 0), step + 1)
    if sum(length_of.values()) > _ALWAYS_ALLOWED_PLACES + _MOST_PLACES_PER_STEP * num_steps:
        longest = max(length_of, key=lambda place: length_of[place])
        raise ValueError(f"the list at {longest!r:.200} would have {length_of[longest]} places")


def _decode_items(
    header: _Header, columns: _Columns, fqns: Sequence[str], keys: Sequence[str]
) -> Iterable[tuple[ItemId, StoredItem]]:
    """Make the items of columns that were checked."""
    strings = header.strings
    transforms = {
        number: tuple(strings[number].split("\n")) if strings[number] else ()
        for number in set(columns["item.transforms"].tolist())
    }
    inline = columns["inline"].tobytes()
    checksums = columns["checksums"]
    crc_at = inline_at = 0
    names = (
        *("entry", "has_offsets", "object", "start", "length", "payload_offset"),
        *("payload_length", "kind", "dtype", "transforms", "blocks", "inline"),
    )
    for offsets, sizes, *row in zip(
        _Shapes("item.offsets", columns).tuples(),
        _Shapes("item.sizes", columns).tuples(),
        *(columns[f"item.{name}"].tolist() for name in names),
        strict=True,
    ):
        entry, has_offsets, obj, start, length, payload, payload_length = row[:7]
        kind, dtype, transform, blocks, inline_bytes = row[7:]
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
                block_bytes=header.block_bytes,
                inline=content,
            ),
        )


def _decode_attachments(
    header: _Header, columns: _Columns, names: Sequence[str], keys: Sequence[str]
) -> dict[str, StoredItem]:
    """Make the attachments of columns that were checked; what is theirs lies behind the items'."""
    fields = ("object", "start", "length", "blocks", "inline")
    rows = [columns[f"attachment.{name}"].tolist() for name in fields]
    crc_at = len(columns["checksums"]) - sum(rows[3])
    inline_at = len(columns["inline"]) - sum(max(one, 0) for one in rows[4])
    found: dict[str, StoredItem] = {}
    for name, obj, start, length, blocks, inline_bytes in zip(names, *rows, strict=True):
        content = None
        if inline_bytes != _NO_INLINE:
            content = columns["inline"][inline_at : inline_at + inline_bytes].tobytes()
            inline_at += inline_bytes
        span = ByteRange(start, start + length)
        found[name] = StoredItem(
            key=keys[obj],
            record=span,
            kind="bytes",
            payload=span,
            checksums=columns["checksums"][crc_at : crc_at + blocks],
            block_bytes=header.block_bytes,
            inline=content,
        )
        crc_at += blocks
    return found


class _Shapes:
    """A column of shapes or offsets, checked to be whole."""

    def __init__(self, name: str, columns: _Columns) -> None:
        self._flat = columns[f"{name}.flat"]
        self.ndim = columns[f"{name}.ndim"]
        self._ends = np.concatenate([[0], np.cumsum(self.ndim, dtype=np.int64)])
        if self._ends[-1] != len(self._flat):
            problem = f"its dimensions add up to {self._ends[-1]} of {len(self._flat)}"
            raise _damaged(f"{name}.ndim", problem)

    def at(self, rows: npt.NDArray[Any], dim: int) -> npt.NDArray[np.int64]:
        """Return one dimension of some rows, which must have it."""
        found: npt.NDArray[np.int64] = self._flat[self._ends[rows] + dim]
        return found

    def num_elements(self) -> npt.NDArray[np.int64]:
        """Return the product of each row; -1 where dimensions above 0 make 2**63 or more."""
        exact = np.ones(len(self.ndim), np.int64)
        rough = np.ones(len(self.ndim))
        is_empty = np.zeros(len(self.ndim), bool)
        rows = np.arange(len(self.ndim))
        for dim in range(int(self.ndim.max(initial=0))):
            rows = rows[self.ndim[rows] > dim]
            sizes = self.at(rows, dim)
            is_empty[rows] |= sizes == 0
            exact[rows] *= np.maximum(sizes, 1)
            rough[rows] *= np.maximum(sizes, 1)
        exact[is_empty] = 0
        exact[rough >= 2.0**63] = -1
        return exact

    def tuples(self) -> list[tuple[int, ...]]:
        """Return the rows."""
        flat = self._flat.tolist()
        return [tuple(flat[a:b]) for a, b in itertools.pairwise(self._ends.tolist())]


def _require(
    holds: npt.NDArray[np.bool_],
    column: str,
    problem: str,
    of: _NameOf | None = None,
) -> None:
    if holds.all():
        return
    row = int(np.argmin(holds))
    raise _damaged(column, f"row {row}: {problem}", fqn=None if of is None else of(row))


def _most_common(texts: Iterable[str]) -> str:
    return Counter(texts).most_common(1)[0][0]


def _with_encodings(rows: Iterable[tuple[ItemId, StoredItem]]) -> dict[ItemId, StoredItem]:
    """Return the items, each with its encoding, which is the row behind it."""
    items: dict[ItemId, StoredItem] = {}
    for one, item in rows:
        items[one] = replace(items[one], encoded=item) if item.kind == "value" else item
    return items


def _joined_checksums(items: Iterable[StoredItem]) -> npt.NDArray[np.uint32]:
    return np.concatenate(
        [np.empty(0, np.uint32), *(i.checksums for i in items if i.checksums is not None)]
    )


def _length(held: Sized | None) -> int:
    return _NO_INLINE if held is None else len(held)


def _encode_texts(name: str, texts: Sequence[str]) -> dict[str, Iterable[Any]]:
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    return {
        f"{name}.text": np.frombuffer(b"".join(encoded), np.uint8),
        f"{name}.length": [len(text) for text in encoded],
    }


def _decode_texts(name: str, columns: _Columns) -> list[str]:
    text = columns[f"{name}.text"].tobytes()
    ends = list(itertools.accumulate(columns[f"{name}.length"].tolist(), initial=0))
    if ends[-1] != len(text):
        raise _damaged(f"{name}.length", f"lengths add up to {ends[-1]} of {len(text)} bytes")
    try:
        return [text[a:b].decode("utf-8", "surrogatepass") for a, b in itertools.pairwise(ends)]
    except UnicodeDecodeError as error:
        raise _damaged(f"{name}.text", f"it is no UTF-8: {error}") from error


def _encode_shapes(name: str, shapes: Sequence[tuple[int, ...]]) -> dict[str, Iterable[Any]]:
    flat = [size for shape in shapes for size in shape]
    return {f"{name}.flat": flat, f"{name}.ndim": [len(shape) for shape in shapes]}


def _pack(header: dict[str, Any], values: Mapping[str, Iterable[Any]], *, version: int) -> bytes:
    parts: list[bytes] = []
    described = []
    for name, held in values.items():
        column = np.asarray(held, np.dtype(_COLUMNS[name].dtype).newbyteorder("<"))
        packed = zlib.compress(column.tobytes(), 1)
        described.append([name, _COLUMNS[name].dtype, len(column), len(packed)])
        parts.append(packed)
    text = json.dumps({**header, "columns": described}, separators=(",", ":")).encode()
    body = b"".join([_PREFIX.pack(_MAGIC, version, len(text)), text, *parts])
    return body + struct.pack("<I", crc32c.crc32c(body))
