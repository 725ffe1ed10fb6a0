"""Headers of safetensors files, as Hugging Face and DCP's Hugging Face writer make them.

A file starts with ``u64 header_bytes`` and a JSON header that gives dtype, shape and byte
range of each tensor, counted from the end of the header; the data are row-major. Format:
https://huggingface.co/docs/safetensors. DCP's writer adds, under ``DCP_SHARDING_INFO``,
where in the whole tensor each stored shard lies. No I/O.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from typing import Any

from typing_extensions import Buffer

from dcpstore.errors import CorruptError
from dcpstore.format.dtypes import item_bytes
from dcpstore.ranges import ByteRange

__all__ = ["LENGTH_BYTES", "TensorInFile", "header_length", "parse_header"]

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
    "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}


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
    (length,) = struct.unpack("<Q", start)
    if not 2 <= length <= _MAX_HEADER_BYTES:
        raise CorruptError(f"{key} is no safetensors file: header of {length} bytes", key=key)
    return int(length)


def parse_header(header: Buffer, key: str) -> list[TensorInFile]:
    """Return the tensors of a file, from its JSON header.

    Raises:
        CorruptError: If the header is no valid one.
    """
    try:
        fields: dict[str, Any] = json.loads(bytes(header))
        about = fields.pop("__metadata__", None) or {}
        shards = json.loads(about["DCP_SHARDING_INFO"]) if "DCP_SHARDING_INFO" in about else {}
        base = LENGTH_BYTES + len(memoryview(header))
        return [_tensor(fqn, one, shards.get(fqn), base, key) for fqn, one in fields.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptError(f"{key} has a damaged safetensors header: {error!r}", key=key) from error


def _tensor(
    fqn: str, fields: dict[str, Any], shard: dict[str, Any] | None, base: int, key: str
) -> TensorInFile:
    dtype = _DTYPES.get(fields["dtype"])
    if dtype is None:
        raise CorruptError(f"{key}: {fqn!r} has the unknown dtype {fields['dtype']!r}", key=key)
    sizes = tuple(int(size) for size in fields["shape"])
    start, end = fields["data_offsets"]
    if end - start != prod(sizes) * item_bytes(dtype):
        raise CorruptError(
            f"{key}: {fqn!r} of shape {sizes} and dtype {dtype} cannot have {end - start} bytes",
            key=key,
            fqn=fqn,
        )
    offsets = tuple(shard["saved_offsets"]) if shard else (0,) * len(sizes)
    return TensorInFile(fqn, dtype, sizes, offsets, ByteRange(base + start, base + end))
