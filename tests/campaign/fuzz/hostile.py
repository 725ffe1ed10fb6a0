"""Files that were made by hand to do harm, each with what they did.

`FILES` is the table: name, parser of `campaign.fuzz.parsers`, bytes. Append to it what is found.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

__all__ = ["FILES", "Hostile"]

_METADATA = b"ctorch.distributed.checkpoint.metadata\n"
# Each level refers to the one below twice: 2^n steps to hash, compare or print it.
_TUPLES = b")q\0" + b"h\0\x86q\0" * 40
_LISTS = b"(]q\0" + b"](h\0h\0eq\0" * 40 + b"t"


class Hostile(NamedTuple):
    """One file.

    Attributes:
        name: What it is, and what became of it before it was refused.
        parser: Name of the parser that it is for.
        data: The file.
    """

    name: str
    parser: str
    data: bytes


def _with_state(body: bytes) -> bytes:
    """Return the pickle of metadata with one field."""
    return b"\x80\x02" + _METADATA + b"Metadata\n)\x81}" + body + b"b."


def _field(name: str, value: bytes) -> bytes:
    return _text(name) + value + b"s"


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _built(kind: str, state: bytes, module: bytes = _METADATA) -> bytes:
    return module + kind.encode() + b"\n)\x81" + state + b"b"


def _stored(path: bytes, start: bytes = b"K\0", length: bytes = b"K\x04") -> bytes:
    """Return metadata of one value ``"x"`` with this place."""
    index = _built("MetadataIndex", b"}" + _field("fqn", _text("x")))
    place = _built(
        "_StorageInfo",
        b"}" + _field("relative_path", path) + _field("offset", start) + _field("length", length),
        b"ctorch.distributed.checkpoint.filesystem\n",
    )
    entry = b"}" + _field("x", _metadata_of_value())
    data = b"}" + index + place + b"s"
    return _with_state(_field("state_dict_metadata", entry) + _field("storage_data", data))


def _metadata_of_value() -> bytes:
    return _METADATA + b"BytesStorageMetadata\n)\x81"


def _tensor(**fields: bytes) -> bytes:
    """Return metadata of one tensor ``"x"``, some of whose fields are other values."""
    layout = b"ctorch.serialization\n_get_layout\n" + _text("torch.strided") + b"\x85R"
    form = _METADATA + b"_MEM_FORMAT_ENCODING\nK\0\x85R"
    state = b"(ctorch\nfloat32\n" + layout + b"\x89" + form + b"\x89t"
    good = {
        "properties": _built("TensorProperties", state),
        "size": _size(b"K\x02"),
        "chunks": b"]" + _chunk(_size(b"K\0"), _size(b"K\x02")) + b"a",
    }
    body = b"".join(_field(name, value) for name, value in {**good, **fields}.items())
    entry = b"}" + _field("x", _built("TensorStorageMetadata", b"}" + body))
    return _with_state(_field("state_dict_metadata", entry) + _field("storage_data", b"}"))


def _size(numbers: bytes) -> bytes:
    return b"ctorch\nSize\n(" + numbers + b"t\x85R"


def _chunk(offsets: bytes, sizes: bytes) -> bytes:
    return _built(
        "ChunkStorageMetadata", b"}" + _field("offsets", offsets) + _field("sizes", sizes)
    )


def _record(program: bytes, method: int = zipfile.ZIP_STORED, **members: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/version", b"3\n")
        for name, data in members.items():
            archive.writestr(f"archive/{name}", data)
    return stream.getvalue()


def _changed_classes() -> Iterator[Hostile]:
    """Yield a BUILD with a slot state on each name that metadata may have."""
    names = {
        "torch.distributed.checkpoint.metadata": (
            "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta"
            " TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING"
        ),
        "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
        "torch.distributed.checkpoint._hf_utils": "_HFStorageInfo",
        "torch.distributed._shard.sharded_tensor.metadata": "TensorProperties MEM_FORMAT_ENCODING",
        "torch": "Size float32 strided contiguous_format",
        "torch.serialization": "_get_layout",
        "collections": "OrderedDict",
        "builtins": "set frozenset",
        "pathlib": "Path PosixPath",
    }
    for module, found in names.items():
        for name in found.split():
            start = b"\x80\x02c" + f"{module}\n{name}\n".encode()
            for form, state in (("slots", b"N}" + _text("__hash__") + b"Ns\x86"),
                                ("state", b"}" + _text("__hash__") + b"Ns")):  # fmt: skip
                data = start + state + b"b."
                yield Hostile(f"{form} set on {module}.{name}", "stock metadata", data)


def _pickles() -> Iterator[tuple[str, bytes]]:
    yield "a memo of 4.3 GB", b"\x80\x02Nr\0\0\0\x10."
    yield "a memo of 8 GB, in digits", b"\x80\x02Np1073741824\n."
    yield "a key of nested tuples", b"\x80\x02}" + _TUPLES + b"Ns."
    yield (
        "a state_dict_metadata with such a key",
        _with_state(_field("state_dict_metadata", b"}" + _TUPLES + b"Ns")),
    )
    yield (
        "a planner's key of nested tuples",
        _with_state(
            _field("state_dict_metadata", b"}") + _field("planner_data", b"}" + _TUPLES + b"Ns")
        ),
    )
    yield (
        "a planner's value of nested lists",
        _with_state(_field("state_dict_metadata", b"}") + _field("planner_data", _LISTS)),
    )
    yield "a storage path of nested tuples", _stored(_TUPLES)
    yield "a storage path of nested lists", _stored(_LISTS)
    yield (
        "a storage entry of nested lists",
        _with_state(
            _field("state_dict_metadata", b"}")
            + _field("storage_data", b"}" + _TUPLES + _LISTS + b"s")
        ),
    )
    yield (
        "a version of nested tuples",
        _with_state(_field("state_dict_metadata", b"}") + _field("version", _TUPLES)),
    )
    yield "nested tuples for metadata", b"\x80\x02" + _TUPLES + b"."
    yield "100,000 nested tuples for a key", b"\x80\x02})" + b"\x85" * 100_000 + b"Ns."
    yield "a million nested lists", b"\x80\x02" + b"]" * 1_000_000 + b"a" * 999_999 + b"."
    yield "a list that contains itself", b"\x80\x02]q\0h\0a."
    yield (
        "a planner's dict that contains itself",
        _with_state(
            _field("state_dict_metadata", b"}")
            + _field("planner_data", b"}q\0" + _field("a", b"h\0"))
        ),
    )
    yield "bytearray of 8 GB", b"\x80\x05\x96" + struct.pack("<Q", 8 << 30) + b"."
    yield "bytes of 8 GB", b"\x80\x05\x8e" + struct.pack("<Q", 8 << 30) + b"."
    yield "a text of 4 GB", b"\x80\x02X\xff\xff\xff\xff."
    yield "a call of bytearray", b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\0\0\0\0\x02\x85R."
    yield "an integer of 3 MB", b"\x80\x02\x8b" + struct.pack("<i", 3 << 20) + b"\x7f" * (3 << 20)
    yield "an integer of 200,000 digits", b"\x80\x02L" + b"9" * 200_000 + b"L\n."
    colliding = b"".join(
        b"\x8a\x0c" + (n * ((1 << 61) - 1)).to_bytes(12, "little") for n in range(1, 60_000)
    )
    yield "a set of 60,000 integers with one hash", b"\x80\x04\x8f(" + colliding + b"\x90."
    yield (
        "a frame for each of 50,000 bytes",
        (b"\x80\x04" + (b"\x95" + struct.pack("<Q", 100) + b"N0") * 50_000 + b"N" * 200 + b"."),
    )
    yield "one shape of 100,000 sizes, 10,000 times", _with_state(
        _field("state_dict_metadata", b"}")
        + _field("planner_data", b"](" + b"K\1" * 0 + b"(" + b"K\1" * 100_000 + b"t\x85q\0"
                 + b"0" + b"ctorch\nSize\nh\0R" * 10_000 + b"e")
    )  # fmt: skip
    yield "2 MB of empty lists", b"\x80\x02(" + b"]" * (2 << 20) + b"t."
    yield "an offset that is not a number", _stored(_text("a"), b"G\x7f\xf8\0\0\0\0\0\0")
    yield "an offset of -1", _stored(_text("a"), b"J\xff\xff\xff\xff")
    yield "a length of 2^63", _stored(_text("a"), b"K\0", b"\x8a\x09\0\0\0\0\0\0\0\x80\0")
    yield "a length that is a text", _stored(_text("a"), b"K\0", _text("4"))
    yield "a path outside the folder", _stored(_text("../a"))
    yield "a path that is an integer", _stored(b"K\1")
    yield (
        "storage data that are an integer",
        _with_state(_field("state_dict_metadata", b"}") + _field("storage_data", b"K\1")),
    )
    yield (
        "a key that is no index",
        _with_state(
            _field("state_dict_metadata", b"}") + _field("storage_data", b"}" + _text("x") + b"Ns")
        ),
    )
    yield "properties that are None", _tensor(properties=b"N")
    yield "a size that is None", _tensor(size=b"N")
    yield (
        "a size of 2^62 by 2^62",
        _tensor(size=_size((b"\x8a\x08" + struct.pack("<q", 1 << 62)) * 2), chunks=b"]"),
    )
    yield "a negative size", _tensor(size=_size(b"J\xff\xff\xff\xff"), chunks=b"]")
    yield "chunks that are None", _tensor(chunks=b"N")
    yield "chunks that are texts", _tensor(chunks=b"]" + _text("x") + b"a")
    yield "a chunk past the end", _tensor(chunks=b"]" + _chunk(_size(b"K\2"), _size(b"K\2")) + b"a")
    yield "a chunk of another rank", _tensor(chunks=b"]" + _chunk(_size(b""), _size(b"")) + b"a")
    yield (
        "an entry that is None",
        _with_state(
            _field("state_dict_metadata", b"}" + _field("x", b"N")) + _field("storage_data", b"}")
        ),
    )
    yield (
        "a key that is an integer",
        _with_state(_field("state_dict_metadata", b"}K\1" + _metadata_of_value() + b"s")),
    )
    yield "metadata without fields", b"\x80\x02" + _METADATA + b"Metadata\n)\x81."
    yield "a text for metadata", pickle.dumps("metadata")


def _values() -> Iterator[tuple[str, bytes]]:
    """Yield records of ``torch.save``, which are values and whole files."""
    yield "bytearray of 8 GB", _record(b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\0\0\0\0\x02\x85R.")
    yield (
        "a storage of 8 GB",
        _record(b"\x80\x02ctorch.storage\nUntypedStorage\n\x8a\x05\0\0\0\0\x02\x85R."),
    )
    yield (
        "a tensor of 2^40 elements",
        _record(b"\x80\x02ctorch\nFloatTensor\n\x8a\x06\0\0\0\0\0\x01\x85R."),
    )
    yield "a deflated pickle of zeros", _record(b"\x80\x02" + b"N0" * (40 << 20) + b"N.", 8)
    yield (
        "a deflated storage",
        _record(b"\x80\x02N.", zipfile.ZIP_DEFLATED, **{"data/0": bytes(200 << 20)}),
    )
    yield "a key of nested tuples", _record(b"\x80\x02}" + _TUPLES + b"Ns.")
    yield "a set of nested tuples", _record(b"\x80\x02cbuiltins\nset\n](" + _TUPLES + b"e\x85R.")
    yield "nested tuples that are called", _record(b"\x80\x02" + _TUPLES + b")R.")
    yield "a storage named by nested tuples", _record(b"\x80\x02" + _TUPLES + b"Q.")
    yield "100,000 nested tuples for a key", _record(b"\x80\x02})" + b"\x85" * 100_000 + b"Ns.")
    yield "a list that contains itself", _record(b"\x80\x02]q\0h\0a.")
    yield "nested lists", _record(b"\x80\x02" + _LISTS + b".")
    yield "one list made into a set 20,000 times", _record(
        b"\x80\x02](" + b"J\1\1\1\1" * 20_000 + b"eq\0" + b"cbuiltins\nset\nq\1"
        + b"h\1h\0\x85R0" * 20_000 + b"N."
    )  # fmt: skip
    yield (
        "a text in punycode",
        _record(
            b"\x80\x02c_codecs\nencode\n"
            + _text("\u0101\u4e00" * 100_000)
            + _text("punycode")
            + b"\x86R."
        ),
    )
    yield (
        "5,000 integers with one hash",
        _record(
            b"\x80\x02}("
            + b"".join(
                b"\x8a\x0c" + (n * ((1 << 61) - 1)).to_bytes(12, "little") + b"N"
                for n in range(5000)
            )
            + b"u."
        ),
    )
    yield "a memo of 4.3 GB", _record(b"\x80\x02Nr\0\0\0\x10.")
    yield "a call of a command", _record(b"\x80\x02cos\nsystem\n" + _text("true") + b"\x85R.")


# Some values are harmless as such, and are then accepted: what they cost is what counts.
HARMLESS = frozenset(
    {
        "value: a list that contains itself",
        "value: nested lists",
        "value: a memo of 4.3 GB",
        "torch.save file: a memo of 4.3 GB",
    }
)


def _all() -> Iterator[Hostile]:
    yield from _changed_classes()
    for name, data in _pickles():
        yield Hostile(name, "stock metadata", data)
    for name, data in _values():
        for parser in ("value", "torch.save file"):
            yield Hostile(f"{parser}: {name}", parser, data)


FILES: tuple[Hostile, ...] = tuple(_all())
BY_NAME: Mapping[str, Any] = {one.name: one for one in FILES}
