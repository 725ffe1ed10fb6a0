"""Headers of safetensors files, as Hugging Face and DCP's Hugging Face writer make them.

A file starts with ``u64 header_bytes`` and a JSON header that gives dtype, shape and byte
range of each tensor, counted from the end of the header; the data are row-major. Format:
https://huggingface.co/docs/safetensors. DCP's writer adds, under ``DCP_SHARDING_INFO``,
where in the whole tensor each stored shard lies. No I/O.

::

    | u64 header_bytes | {"name": {"dtype", "shape", "data_offsets"}, ...} | data | data | ...
    0                  8                            header_bytes + 8, where offset 0 is
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from typing_extensions import Buffer

from dcpstore.errors import CorruptError
from dcpstore.format.dtypes import item_bytes
from dcpstore.store.base import ByteRange
from dcpstore.text import check_natural, collector_paused, parse_json

LENGTH_BYTES = 8
"""Bytes at the start of a file that give the length of its header."""

_MAX_HEADER_BYTES = 100 << 20  # the limit of the safetensors package
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
_FILE_DTYPES = {name: theirs for theirs, name in _DTYPES.items()}
_MAX_DIMS = 64  # what torch and numpy work with
_PAIRS = "F4"  # the header counts single elements, torch counts bytes of two


@dataclass(frozen=True, slots=True)
class TensorInFile:
    """A tensor, or a shard of one, in a safetensors file.

    Attributes:
        fqn: Its name.
        dtype: Name of its dtype in torch.
        sizes: Shape in elements.
        offsets: Where the shard lies in the whole tensor; zeros if it is whole.
        payload: Its bytes in the file.
    """

    fqn: str
    dtype: str
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    payload: ByteRange


def header_length(start: Buffer, key: str) -> int:
    """Return the header's length in bytes, from the file's first `LENGTH_BYTES`.

    Raises:
        CorruptError: If no safetensors file starts so.
    """
    if len(memoryview(start)) != LENGTH_BYTES:
        raise CorruptError(
            f"{key} is no safetensors file: it has fewer than {LENGTH_BYTES} bytes", key=key
        )
    (length,) = struct.unpack("<Q", start)
    if not 2 <= length <= _MAX_HEADER_BYTES:
        raise CorruptError(f"{key} is no safetensors file: header of {length} bytes", key=key)
    return int(length)


@dataclass(frozen=True, slots=True)
class FileHeader:
    """What the header of a file says.

    Attributes:
        tensors: In the order of the header.
        about: The texts under ``__metadata__``.
        end: Where the header ends and the data start.
    """

    tensors: Sequence[TensorInFile]
    about: Mapping[str, str]
    end: int


def parse_file(header: Buffer, key: str) -> FileHeader:
    """Return what the JSON header of a file says.

    Raises:
        CorruptError: If the header is no valid one: no JSON, a name twice, an unknown dtype,
            a number that is none, a shape that does not fit its bytes, or tensors that do not
            lie side by side.
    """
    try:
        fields = _mapping(parse_json(header), "the header")
        about = _mapping(fields.pop("__metadata__", None) or {}, "__metadata__")
        if not all(type(text) is str for text in about.values()):
            raise ValueError("__metadata__ holds something else than texts")
        shards = _mapping(parse_json(about.get("DCP_SHARDING_INFO", "{}")), "DCP_SHARDING_INFO")
        base = LENGTH_BYTES + len(memoryview(header))
        with collector_paused():
            tensors = [_tensor(fqn, one, shards.get(fqn), base, key) for fqn, one in fields.items()]
        _check_places(tensors, base, key)
        return FileHeader(tensors, about, base)
    except (ValueError, KeyError) as error:
        raise CorruptError(
            f"{key} has a damaged safetensors header: {error!s:.500}", key=key
        ) from error


def _check_places(tensors: Sequence[TensorInFile], start: int, key: str) -> None:
    """Check that the tensors lie side by side, as the format wants it."""
    at = start
    for one in sorted(tensors, key=lambda tensor: tensor.payload):
        problem = None
        if one.payload.start < at:
            problem = "overlaps the tensor before it"
        elif one.payload.start > at:
            problem = f"comes after {one.payload.start - at} bytes that belong to no tensor"
        if problem:
            raise CorruptError(
                f"{key}: {one.fqn!r:.500} at bytes [{one.payload.start}, {one.payload.end})"
                f" {problem}",
                key=key,
                start=one.payload.start,
                end=one.payload.end,
                fqn=one.fqn,
            )
        at = one.payload.end


def _mapping(value: object, what: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise ValueError(f"{what} is a {type(value).__name__}, not an object with names")
    return value


def _tensor(fqn: str, value: object, shard: object, base: int, key: str) -> TensorInFile:
    try:
        fields = _mapping(value, "what is said of it")
        name = fields["dtype"]
        dtype = _DTYPES.get(name) if type(name) is str else None
        if dtype is None:
            raise ValueError(f"it has the unknown dtype {name!r:.60}")
        start, end = _counts(fields["data_offsets"])
        sizes = _counts(fields["shape"])
        if name == _PAIRS:
            if not sizes or sizes[-1] % 2:
                raise ValueError(
                    f"F4 tensors hold pairs, and shape {sizes} has no even last dimension"
                )
            sizes = (*sizes[:-1], sizes[-1] // 2)
        num_bytes = _product(sizes) * item_bytes(dtype)
        offsets = (0,) * len(sizes)
        if shard is not None:
            offsets = _counts(_mapping(shard, "DCP_SHARDING_INFO")["saved_offsets"])
            if len(offsets) != len(sizes):
                raise ValueError(f"the shard at {offsets} has the shape {sizes}")
            _product(tuple(a + b for a, b in zip(offsets, sizes, strict=True)))
    except (ValueError, KeyError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise CorruptError(
            f"{key} has a damaged safetensors header: {fqn!r:.500}: {what}", key=key, fqn=fqn
        ) from error
    if end - start != num_bytes:
        raise CorruptError(
            f"{key}: {fqn!r} of shape {sizes} and dtype {dtype} cannot have {end - start} bytes",
            key=key,
            fqn=fqn,
        )
    return TensorInFile(fqn, dtype, sizes, offsets, ByteRange(base + start, base + end))


def _counts(values: object) -> tuple[int, ...]:
    if type(values) is not list or len(values) > _MAX_DIMS:
        raise ValueError(f"a list of at most {_MAX_DIMS} numbers is needed, not {values!r:.60}")
    return tuple(map(check_natural, values))


def _product(sizes: tuple[int, ...]) -> int:
    """Return the number of elements; dimensions besides 0 have to stay below 2**63, too."""
    check_natural(prod(max(size, 1) for size in sizes))
    return prod(sizes)


# --- writing -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileLayout:
    """A file to be: its first bytes, and where each tensor's payload lies.

    Attributes:
        header: The length, and the JSON padded to 8 bytes.
        tensors: In the order of their payloads, which lie side by side. Each payload starts
            at a multiple of its element size.
        size_bytes: Length of the file.
    """

    header: bytes
    tensors: tuple[TensorInFile, ...]
    size_bytes: int


def file_dtype(dtype: str) -> str | None:
    """Return the format's name of a torch dtype; None if the format has no such dtype."""
    return _FILE_DTYPES.get(dtype)


def plan_file(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], about: Mapping[str, str]
) -> FileLayout:
    """Lay a file out as the safetensors package does: large elements first, then by name.

    Args:
        tensors: Dtype (torch's name) and shape of each.
        about: Texts for ``__metadata__``.

    Raises:
        ValueError: If the format has no such dtype, or a name or header that long.
    """
    order = sorted(tensors, key=lambda name: (-item_bytes(tensors[name][0]), name))
    fields: dict[str, Any] = {"__metadata__": dict(about)} if about else {}
    spans, at = [], 0
    for name in order:
        dtype, sizes = tensors[name]
        theirs = file_dtype(dtype)
        if theirs is None or name == "__metadata__":
            raise ValueError(f"safetensors files hold no tensor {name!r} of dtype {dtype}")
        if theirs == _PAIRS:
            sizes = (*sizes[:-1], sizes[-1] * 2)
        end = at + prod(tensors[name][1]) * item_bytes(dtype)
        fields[name] = {"dtype": theirs, "shape": list(sizes), "data_offsets": [at, end]}
        spans.append(ByteRange(at, end))
        at = end
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(text)} bytes is more than safetensors readers take")
    base = LENGTH_BYTES + len(text)
    placed = tuple(
        TensorInFile(
            name,
            *tensors[name],
            (0,) * len(tensors[name][1]),
            ByteRange(base + span.start, base + span.end),
        )
        for name, span in zip(order, spans, strict=True)
    )
    return FileLayout(struct.pack("<Q", len(text)) + text, placed, base + at)
