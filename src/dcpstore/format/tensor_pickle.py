"""Read the ``data.pkl`` of one tensor without running it.

``torch.save`` of a tensor pickles a call of ``torch._utils._rebuild_tensor_v2`` (or
``_v3``). This reader knows the opcodes and the names that such a call is made of and
builds a description of it. It imports nothing, calls nothing, and gives up at anything
else, so bytes from a bucket can be shown to it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dcpstore.format.dtypes import DTYPES

__all__ = ["NotATensorError", "PickledTensor", "TooShortError", "read_tensor_pickle"]


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
