"""Read the ``data.pkl`` of one tensor without running it.

``torch.save`` of a tensor pickles a call of ``torch._utils._rebuild_tensor_v2`` (or
``_v3``). This reader knows the opcodes and the names that such a call is made of and
builds a description of it. It imports nothing, calls nothing, and gives up at anything
else, so bytes from a bucket can be shown to it.

Find a tensor's payload in a ``torch.save`` record from the record's first bytes.

Records that others wrote are not in our manifest: their payload position, dtype and
shape stand in their head, in the order in which torch writes the archive::

    data.pkl [descriptor]  .format_version ...  byteorder ...  data/0 header | payload
    |<------------- head: about 700 bytes, 64-byte aligned --------------->|

Torch's writer streams: sizes are not in the local headers but in a descriptor behind
the contents, so members are walked by reading the pickle to its end and by looking for
descriptors that fit.

A tensor as a complete ``torch.save`` record whose payload position is known in advance.

A record is a zip archive of stored members. Everything but the payload depends only on
dtype, shape and position, so it is planned before any byte of the tensor is copied::

    object_offset                                    +payload_offset (64-byte aligned)
    |                                                |
    | data.pkl | version | byteorder | data/0 header | payload ... | directory | end |
    |<------------------ header --------------------->|<-- tensor ->|<--- trailer --->|

Stock ``torch.load`` reads it, alone or as a slice of a larger object. Zip's CRC32 of
the payload is left at 0: torch does not look at it, and the manifest's CRC32C guards
the bytes at ten times the speed.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias
from zlib import crc32

from dcpstore.format.dtypes import DTYPES, dtype_from_name, info_of, item_bytes
from dcpstore.format.zip import (
    LOCAL_HEADER_BYTES,
    LOCAL_SIGNATURE,
    MAX32,
    central_directory,
    local_header,
)
from dcpstore.format.zip import NewMember as Member
from dcpstore.store.ranges import row_major_strides

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer


class NotATensorError(Exception):
    """The pickle is something else than one plain tensor; the message says what."""


class TooShortError(Exception):
    """The bytes end before the pickle does.

    Args:
        needed_bytes: Length of the buffer that the next step needs.
    """

    def __init__(self, needed_bytes: int) -> None:
        super().__init__(needed_bytes)
        self.needed_bytes = needed_bytes


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A tensor as ``torch.save`` describes it.

    Attributes:
        dtype_name: As in `dcpstore.format.dtypes`.
        shape: Sizes.
        strides: In elements of the storage.
        storage_offset: First element of the tensor in its storage.
        storage_key: Name of the storage in the archive.
        storage_bytes: Length of the storage.
        end: Where the pickle ends in the buffer.
    """

    dtype_name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_offset: int
    storage_key: str
    storage_bytes: int
    end: int


@dataclass(frozen=True, slots=True)
class _Name:
    """A global that the pickle names; only ever compared."""

    path: str


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype_name: str | None
    key: str
    num_bytes: int


_HOOKS = object()
# The call of a tensor of 64 dimensions takes 1.5 KiB; a longer pickle is something else.
_MAX_PICKLE_BYTES = 4096
_STORAGE_DTYPES = {
    f"torch.{row.storage_class}": row for row in DTYPES.values() if row.storage_class
}
_NAMED_DTYPES = {
    f"torch.{row.name}": row for row in DTYPES.values() if row.is_plain and not row.storage_class
}
_UNTYPED = "torch.storage.UntypedStorage"
_CALLS = frozenset(
    (
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
        "torch._utils._rebuild_parameter",
        "collections.OrderedDict",
    )
)
_NAMES = _CALLS | _STORAGE_DTYPES.keys() | _NAMED_DTYPES.keys() | {_UNTYPED}


def read_tensor_pickle(data: memoryview, start: int) -> PickledTensor:
    """Read the pickle that starts at ``data[start]``.

    Args:
        data: Bytes of the record from its start; may end anywhere.
        start: Where the pickle starts.

    Raises:
        NotATensorError: If it is not a plain tensor or a parameter of one.
        TooShortError: If ``data`` ends before the pickle does.
    """
    window = bytes(data[start : start + _MAX_PICKLE_BYTES])
    try:
        return _Reader(window, start).run()
    except TooShortError as short:
        if short.needed_bytes > start + _MAX_PICKLE_BYTES:
            raise NotATensorError("a long pickle") from short
        raise


class _Reader:
    """A pickle machine of protocol 2 with the opcodes that a tensor needs."""

    __slots__ = ("_data", "_marks", "_memo", "_position", "_stack", "_start")

    def __init__(self, data: bytes, start: int) -> None:
        self._data = data
        self._start = start
        self._position = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> PickledTensor:
        if self._take(2) != b"\x80\x02":
            raise NotATensorError("a pickle of another protocol than 2")
        while True:
            opcode = self._take(1)
            if opcode == b".":
                return self._result()
            step = _STEPS.get(opcode)
            if step is None:
                raise NotATensorError(f"pickle opcode {opcode!r}")
            try:
                step(self)
            except (IndexError, KeyError, UnicodeDecodeError) as error:
                raise NotATensorError("a broken pickle") from error

    def _take(self, num_bytes: int) -> bytes:
        end = self._position + num_bytes
        if end > len(self._data):
            raise TooShortError(self._start + end)
        taken = self._data[self._position : end]
        self._position = end
        return taken

    def _line(self) -> str:
        end = self._data.find(b"\n", self._position)
        if end < 0:
            raise TooShortError(self._start + len(self._data) + 1)
        line = self._data[self._position : end]
        self._position = end + 1
        return line.decode("ascii")

    def _result(self) -> PickledTensor:
        if len(self._stack) != 1 or type(self._stack[0]) is not PickledTensor:
            raise NotATensorError("a pickle of something else than a tensor")
        made: PickledTensor = self._stack[0]
        return replace(made, end=self._start + self._position)

    # --- steps -------------------------------------------------------------------

    def name(self) -> None:
        path = f"{self._line()}.{self._line()}"
        if path not in _NAMES:
            raise NotATensorError(f"the global {path}")
        self._stack.append(_Name(path))

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def tuple_from_mark(self) -> None:
        self._fold(len(self._stack) - self._marks.pop())

    def _fold(self, count: int) -> None:
        cut = len(self._stack) - count
        if cut < 0:
            raise NotATensorError("a broken pickle")
        self._stack[cut:] = [tuple(self._stack[cut:])]

    def text(self) -> None:
        (length,) = struct.unpack("<I", self._take(4))
        self._stack.append(self._take(length).decode())

    def number(self, form: str, num_bytes: int) -> None:
        self._stack.append(struct.unpack(form, self._take(num_bytes))[0])

    def long(self) -> None:
        length = self._take(1)[0]
        self._stack.append(int.from_bytes(self._take(length), "little", signed=True))

    def put(self, num_bytes: int) -> None:
        self._memo[int.from_bytes(self._take(num_bytes), "little")] = self._stack[-1]

    def get(self, num_bytes: int) -> None:
        self._stack.append(self._memo[int.from_bytes(self._take(num_bytes), "little")])

    def storage(self) -> None:
        self._stack.append(_storage(self._stack.pop()))

    def call(self) -> None:
        arguments = self._stack.pop()
        target = self._stack.pop()
        self._stack.append(_called(target, arguments))


_STEPS: dict[bytes, Callable[[_Reader], None]] = {
    b"c": _Reader.name,
    b"(": _Reader.mark,
    b"t": _Reader.tuple_from_mark,
    b")": lambda reader: reader._fold(0),  # noqa: SLF001 -- the table is part of the class
    b"\x85": lambda reader: reader._fold(1),  # noqa: SLF001
    b"\x86": lambda reader: reader._fold(2),  # noqa: SLF001
    b"\x87": lambda reader: reader._fold(3),  # noqa: SLF001
    b"X": _Reader.text,
    b"K": lambda reader: reader.number("<B", 1),
    b"M": lambda reader: reader.number("<H", 2),
    b"J": lambda reader: reader.number("<i", 4),
    b"\x8a": _Reader.long,
    b"\x88": lambda reader: reader._stack.append(True),  # noqa: SLF001
    b"\x89": lambda reader: reader._stack.append(False),  # noqa: SLF001
    b"q": lambda reader: reader.put(1),
    b"r": lambda reader: reader.put(4),
    b"h": lambda reader: reader.get(1),
    b"j": lambda reader: reader.get(4),
    b"Q": _Reader.storage,
    b"R": _Reader.call,
}


def _storage(persistent_id: Any) -> _Storage:
    match persistent_id:
        case ("storage", _Name(path=path), str() as key, str(), int() as count) if count >= 0:
            if path == _UNTYPED:
                return _Storage(None, key, count)
            if path in _STORAGE_DTYPES:
                row = _STORAGE_DTYPES[path]
                return _Storage(row.name, key, count * row.item_bytes)
    raise NotATensorError("a persistent id that is no storage")


def _called(target: Any, arguments: Any) -> Any:
    """Return what a call would make, as a description."""
    name = target.path if isinstance(target, _Name) else ""
    match name.rpartition(".")[2], arguments:
        case "OrderedDict", ():
            return _HOOKS
        case "_rebuild_parameter", (PickledTensor() as tensor, bool(), hooks) if hooks is _HOOKS:
            return tensor
        case (
            "_rebuild_tensor_v2",
            (_Storage(dtype_name=str() as dtype) as storage, offset, shape, strides, bool(), hooks),
        ) if hooks is _HOOKS:
            return _described(dtype, storage, offset, shape, strides)
        case (
            "_rebuild_tensor_v3",
            (
                _Storage(dtype_name=None) as storage,
                offset,
                shape,
                strides,
                bool(),
                hooks,
                _Name(path=path),
            ),
        ) if hooks is _HOOKS and path in _NAMED_DTYPES:
            return _described(_NAMED_DTYPES[path].name, storage, offset, shape, strides)
    raise NotATensorError(f"a call of {name or 'no global'} with unusual arguments")


def _described(
    dtype_name: str, storage: _Storage, offset: Any, shape: Any, strides: Any
) -> PickledTensor:
    if not (_are_sizes(shape) and _are_sizes(strides) and _are_sizes((offset,))):
        raise NotATensorError("a shape that is none")
    if len(shape) != len(strides):
        raise NotATensorError("a shape with too few or too many strides")
    return PickledTensor(dtype_name, shape, strides, offset, storage.key, storage.num_bytes, 0)


def _are_sizes(values: Any) -> bool:
    return type(values) is tuple and all(type(v) is int and 0 <= v < 1 << 63 for v in values)


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


ALIGNMENT_BYTES = 64
"""Payloads start at a multiple of this in their object, as torch's own writer aligns them."""

# The name of the archive's root folder is free; a short one saves 6 x 8 bytes per record.
_ROOT = b"r/"


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """The bytes around a tensor's payload.

    Attributes:
        header: Bytes before the payload.
        payload_bytes: Length of the payload: the elements in row-major order.
        trailer: Bytes after the payload.
    """

    header: bytes
    payload_bytes: int
    trailer: bytes

    @property
    def payload_offset(self) -> int:
        """Where the payload starts, counted from the record's first byte."""
        return len(self.header)

    @property
    def record_bytes(self) -> int:
        """Length of the whole record."""
        return len(self.header) + self.payload_bytes + len(self.trailer)


def plan_record(
    dtype: torch.dtype,
    shape: Sequence[int],
    *,
    object_offset: int = 0,
    force_zip64: bool = False,
) -> RecordLayout:
    """Plan the record of a contiguous CPU tensor.

    Thread-safe. Layouts are cached and shared: 20,000 small tensors of a few shapes cost
    20,000 dictionary look-ups.

    Args:
        dtype: A plain dtype (see `dcpstore.format.dtypes`).
        shape: Sizes of the tensor; ``()`` for a scalar.
        object_offset: Where the record will start in its object, for alignment.
        force_zip64: Write 64-bit sizes even if 32 bits would do.

    Raises:
        ValueError: If the dtype is not plain or a size is negative.
    """
    return _plan(dtype, tuple(shape), object_offset % ALIGNMENT_BYTES, force_zip64)


@lru_cache(maxsize=4096)
def _plan(
    dtype: torch.dtype, shape: tuple[int, ...], phase: int, force_zip64: bool
) -> RecordLayout:
    front, members, payload_bytes = _front(dtype, shape)
    is_zip64 = force_zip64 or payload_bytes >= MAX32
    data = Member(_ROOT + b"data/0", payload_bytes, 0, len(front), is_zip64)
    header = front + local_header(data, ALIGNMENT_BYTES, phase)
    offset = len(header) + payload_bytes
    trailer = central_directory([*members, data], offset, force_zip64=is_zip64)
    return RecordLayout(header, payload_bytes, trailer)


@lru_cache(maxsize=1024)
def _front(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, list[Member], int]:
    """Return the members before the payload: their bytes, their list, and the payload's length."""
    info = info_of(dtype)
    if not info.is_plain:
        raise ValueError(f"a tensor of dtype {info.name} has no plain record")
    if any(size < 0 for size in shape):
        raise ValueError(f"a shape has no negative sizes, got {shape}")
    contents = (
        (b"data.pkl", _pickle(dtype, shape)),
        (b"version", b"3\n"),
        (b"byteorder", sys.byteorder.encode()),
    )
    front = b""
    members = []
    for name, content in contents:
        member = Member(_ROOT + name, len(content), crc32(content), len(front))
        members.append(member)
        front += local_header(member) + content
    return front, members, prod(shape) * info.item_bytes


def _pickle(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """Emit what ``torch.save`` pickles for a contiguous tensor, in protocol 2 without memo.

    ``_rebuild_tensor_v2(storage, 0, size, stride, False, OrderedDict())``, where the storage
    is the persistent id ``('storage', <class>, '0', 'cpu', numel)``. Dtypes without a
    storage class take ``_rebuild_tensor_v3`` with the dtype as seventh argument and an
    ``UntypedStorage`` counted in bytes.
    """
    info = info_of(dtype)
    numel = prod(shape)
    if info.storage_class is None:
        rebuild, last = b"_rebuild_tensor_v3", _global(b"torch", info.name.encode())
        storage, count = _global(b"torch.storage", b"UntypedStorage"), numel * info.item_bytes
    else:
        rebuild, last = b"_rebuild_tensor_v2", b""
        storage, count = _global(b"torch", info.storage_class.encode()), numel
    persistent = b"(" + _text(b"storage") + storage + _text(b"0") + _text(b"cpu") + _int(count)
    strides = _tuple(row_major_strides(shape))
    hooks = _global(b"collections", b"OrderedDict") + b")R"
    arguments = persistent + b"tQ" + _int(0) + _tuple(shape) + strides + b"\x89" + hooks + last
    return b"\x80\x02" + _global(b"torch._utils", rebuild) + b"(" + arguments + b"tR."


def _global(module: bytes, name: bytes) -> bytes:
    return b"c" + module + b"\n" + name + b"\n"


def _text(text: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text


def _int(value: int) -> bytes:
    if value < 1 << 8:
        return struct.pack("<cB", b"K", value)
    if value < 1 << 16:
        return struct.pack("<cH", b"M", value)
    if value < 1 << 31:
        return struct.pack("<ci", b"J", value)
    digits = value.to_bytes(value.bit_length() // 8 + 1, "little")
    return b"\x8a" + bytes([len(digits)]) + digits


def _tuple(values: tuple[int, ...]) -> bytes:
    if not values:
        return b")"
    items = b"".join(map(_int, values))
    short = {1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(values))
    return items + short if short else b"(" + items + b"t"
