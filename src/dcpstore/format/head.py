"""Find a tensor's payload in a ``torch.save`` record from the record's first bytes.

Records that others wrote are not in our manifest: their payload position, dtype and
shape stand in their head, in the order in which torch writes the archive::

    data.pkl [descriptor]  .format_version ...  byteorder ...  data/0 header | payload
    |<------------- head: about 700 bytes, 64-byte aligned --------------->|

Torch's writer streams: sizes are not in the local headers but in a descriptor behind
the contents, so members are walked by reading the pickle to its end and by looking for
descriptors that fit.
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from dcpstore.format.dtypes import dtype_from_name, item_bytes
from dcpstore.format.tensor_pickle import (
    NotATensorError,
    PickledTensor,
    TooShortError,
    read_tensor_pickle,
)
from dcpstore.format.zipfmt import LOCAL_HEADER_BYTES, LOCAL_SIGNATURE, MAX32
from dcpstore.ranges import row_major_strides

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer

__all__ = [
    "HEAD_BYTES",
    "HeadAnswer",
    "NeedMoreBytes",
    "ParsedHead",
    "StoredTensor",
    "parse_record_head",
]

HEAD_BYTES = 1024
"""A first read of this many bytes holds the head of any record that stock DCP writes."""

_DESCRIPTOR = b"PK\x07\x08"
_DESCRIPTOR_BYTES = 16
# Members before the payload hold a few characters; a longer one is not torch's.
_MAX_MEMBER_BYTES = 4096
_MAX_MEMBERS = 16


@dataclass(frozen=True, slots=True)
class NeedMoreBytes:
    """The head is longer than what was given.

    Attributes:
        num_bytes: Give at least this many bytes of the record, counted from its start.
    """

    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a record keeps its tensor, and how.

    Attributes:
        dtype: Of the tensor; always a plain one.
        shape: Sizes of the tensor.
        strides: In elements, as it lies in the payload.
        storage_offset: First element of the tensor in the payload.
        payload_offset: Where the payload starts in the record.
        payload_bytes: Length of the payload: the whole storage that the tensor views.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_offset: int
    payload_offset: int
    payload_bytes: int

    @property
    def is_dense(self) -> bool:
        """Whether the payload is the tensor's elements in row-major order and nothing else."""
        numel = prod(self.shape)
        if numel == 0:
            return True
        wanted = row_major_strides(self.shape)
        return (
            self.storage_offset == 0
            and self.payload_bytes == numel * item_bytes(self.dtype)
            and all(
                size == 1 or stride == want
                for size, stride, want in zip(self.shape, self.strides, wanted, strict=True)
            )
        )


@dataclass(frozen=True, slots=True)
class ParsedHead:
    """What the head of a record says.

    Attributes:
        tensor: The stored tensor; None if only ``torch.load`` can tell (see `reason`).
        head_bytes: How many bytes of the record were looked at.
        reason: Why the record is opaque; empty if it is not.
    """

    tensor: StoredTensor | None
    head_bytes: int
    reason: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether the byte range of any run of elements is computable."""
        return self.tensor is not None and self.tensor.is_dense


HeadAnswer: TypeAlias = ParsedHead | NeedMoreBytes


def parse_record_head(head: Buffer, record_bytes: int) -> HeadAnswer:
    """Read the head of a ``torch.save`` record. Runs nothing that stands in it.

    Args:
        head: First bytes of the record; borrowed for the call. `HEAD_BYTES` do nearly always.
        record_bytes: Length of the whole record.

    Returns:
        What the head says, or how many bytes to give instead. Records of other things
        than one tensor, of other byte orders, and broken ones come back opaque: hand
        them to ``torch.load`` whole.
    """
    data = memoryview(head).cast("B")
    try:
        return _parse(data, record_bytes)
    except TooShortError as short:
        if short.needed_bytes <= record_bytes:
            wanted = max(short.needed_bytes, 2 * len(data), HEAD_BYTES)
            return NeedMoreBytes(min(wanted, record_bytes))
        return ParsedHead(None, len(data), "the record ends inside its head")
    except NotATensorError as other:
        return ParsedHead(None, len(data), f"not one plain tensor: {other}")


def _parse(data: memoryview, record_bytes: int) -> ParsedHead:
    first = _read_local_header(data, 0)
    root, slash, name = first.name.rpartition("data.pkl")
    if slash != "data.pkl" or name or not root.endswith("/"):
        raise NotATensorError(f"an archive that starts with {first.name!r}")
    tensor = read_tensor_pickle(data, first.contents)
    position = _skip_descriptor(data, first, tensor.end)
    byteorder = "little"
    for _ in range(_MAX_MEMBERS):
        member = _read_local_header(data, position)
        if member.name == f"{root}data/{tensor.storage_key}":
            if byteorder != sys.byteorder:
                raise NotATensorError(f"a {byteorder}-endian storage")
            return _placed(tensor, member, record_bytes)
        end = _end_of_contents(data, member)
        if member.name == f"{root}byteorder":
            byteorder = bytes(data[member.contents : end]).decode("ascii", "replace")
        position = _skip_descriptor(data, member, end)
    raise NotATensorError("an archive with many members before the storage")


def _placed(tensor: PickledTensor, member: _LocalHeader, record_bytes: int) -> ParsedHead:
    """Join the pickle's tensor and the position of its storage, and check both."""
    stored = StoredTensor(
        _known_dtype(tensor.dtype_name),
        tensor.shape,
        tensor.strides,
        tensor.storage_offset,
        member.contents,
        tensor.storage_bytes,
    )
    if member.contents + tensor.storage_bytes > record_bytes:
        raise NotATensorError("a storage that is longer than the record")
    if not member.is_streamed and member.size_bytes != tensor.storage_bytes:
        raise NotATensorError("a storage of another size than the tensor says")
    if prod(tensor.shape):
        steps = zip(tensor.shape, tensor.strides, strict=True)
        last = tensor.storage_offset + sum((size - 1) * stride for size, stride in steps)
        if (last + 1) * item_bytes(tensor.dtype_name) > tensor.storage_bytes:
            raise NotATensorError("a tensor that reaches past its storage")
    return ParsedHead(stored, member.contents)


def _known_dtype(name: str) -> torch.dtype:
    try:
        return dtype_from_name(name)
    except ValueError as error:
        raise NotATensorError(str(error)) from error


# --- zip ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _LocalHeader:
    name: str
    contents: int
    size_bytes: int
    is_streamed: bool


def _read_local_header(data: memoryview, position: int) -> _LocalHeader:
    names = position + LOCAL_HEADER_BYTES
    _require(data, names)
    fields = struct.unpack_from("<4sHHHHHIIIHH", data, position)
    signature, flags, method = fields[0], fields[2], fields[3]
    stored_bytes, size_bytes, name_bytes, extra_bytes = fields[7:]
    if signature != LOCAL_SIGNATURE:
        raise NotATensorError("no zip archive")
    if method != 0 or flags & ~0x0808:
        raise NotATensorError("an archive with compressed or encrypted members")
    extra = names + name_bytes
    contents = extra + extra_bytes
    _require(data, contents)
    if MAX32 in (stored_bytes, size_bytes):
        size_bytes = _zip64_size(data[extra:contents])
    name = bytes(data[names:extra]).decode("utf-8", "replace")
    return _LocalHeader(name, contents, size_bytes, bool(flags & 0x0008))


def _zip64_size(extra: memoryview) -> int:
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        if kind == 1 and length >= 8 and position + 12 <= len(extra):
            return int(struct.unpack_from("<Q", extra, position + 4)[0])
        position += 4 + length
    raise NotATensorError("a zip64 member without its size")


def _end_of_contents(data: memoryview, member: _LocalHeader) -> int:
    """Return where a small member's contents end."""
    if not member.is_streamed:
        if member.size_bytes > _MAX_MEMBER_BYTES:
            raise NotATensorError(f"a long member {member.name!r} before the storage")
        _require(data, member.contents + member.size_bytes)
        return member.contents + member.size_bytes
    window = bytes(data[member.contents : member.contents + _MAX_MEMBER_BYTES])
    found = window.find(_DESCRIPTOR)
    while found >= 0:
        end = member.contents + found
        _require(data, end + _DESCRIPTOR_BYTES)
        if struct.unpack_from("<II", data, end + 8) == (found, found):
            return end
        found = window.find(_DESCRIPTOR, found + 1)
    if len(window) == _MAX_MEMBER_BYTES:
        raise NotATensorError(f"a long member {member.name!r} before the storage")
    raise TooShortError(len(data) + 1)


def _skip_descriptor(data: memoryview, member: _LocalHeader, end: int) -> int:
    """Return where the next member starts, given where this one's contents end."""
    size_bytes = end - member.contents
    if not member.is_streamed:
        if member.size_bytes != size_bytes:
            raise NotATensorError(f"a member {member.name!r} of a wrong size")
        return end
    _require(data, end + _DESCRIPTOR_BYTES)
    if bytes(data[end : end + 4]) != _DESCRIPTOR:
        raise NotATensorError(f"a member {member.name!r} without a descriptor")
    if struct.unpack_from("<II", data, end + 8) != (size_bytes, size_bytes):
        raise NotATensorError(f"a member {member.name!r} of a wrong size")
    return end + _DESCRIPTOR_BYTES


def _require(data: memoryview, num_bytes: int) -> None:
    if num_bytes > len(data):
        raise TooShortError(num_bytes)
