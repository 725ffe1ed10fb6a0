"""Values that are no tensors, as bytes that name no code.

``torch.save`` pickles a value, and ``torch.load(weights_only=True)`` opens few of the types that
Python has. What it does not open is written once more in this form, which every load opens::

    "DCPVALUE"  u32 version  node

A node is a tag of one byte and what belongs to it; all integers are little-endian::

    N T F    None, True, False              i        u64 n, n bytes, two's complement
    d c      one or two doubles             s b y    u64 n, n bytes: str (UTF-8), bytes, bytearray
    l t q    u64 n, n nodes: list, tuple,   e f      u64 n, n nodes: set, frozenset
             deque (maxlen comes first)
    m o C D  u64 n, n pairs of nodes: dict, OrderedDict, Counter, defaultdict (factory first)
    x        u8 n, n bytes: a name in `_CALLS`; then a tuple: its arguments
    z        str node "module:qualname", "enum", "tuple" or "fields", and a node: an instance

Nothing is shared, so nothing contains itself. A decoder checks every count against the bytes
that are left, and every array's size against its bytes, before it makes anything: what it makes
takes at most 100 times the memory of the bytes. Instances of users' classes are only made of
classes that the caller hands in. ``docs/design/012-manifest-version-2.md`` has the whole format.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import io
import math
import pathlib
import struct
import sys
import uuid
import zoneinfo
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch

from dcpstore.errors import CorruptError, IncompatibleError
from dcpstore.format.dtypes import dtype_from_name, dtype_name
from dcpstore.format.payload import is_plain, payload_bytes

MAX_DEPTH = 64
"""Of containers in each other, when encoding; a decoder allows what that may come to."""

MAGIC = b"DCPVALUE"
VERSION = 1
START = struct.Struct("<8sI")
SIZE = struct.Struct("<Q")
DOUBLE = struct.Struct("<d")
COMPLEX = struct.Struct("<dd")
MAX_INT_BYTES = 1 << 20
MAX_NUMBER_BYTES = 1 << 12
_MIN_CHECKED_HASHES = 1000

Classes: TypeAlias = Mapping[str, type]


def type_name(kind: type) -> str:
    """Return the name of a class for people."""
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def class_name(kind: type) -> str:
    """Return the name under which instances of a class are saved."""
    return f"{kind.__module__}:{kind.__qualname__}"


def is_named_tuple(kind: type) -> bool:
    """Tell whether a class is one of named tuples."""
    return issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple)


def make_dtype(described: Any, char: str) -> np.dtype[Any]:
    """Make a dtype again: of types of one size, such as long and long long, the one named."""
    dtype = np.lib.format.descr_to_dtype(described)
    if dtype.hasobject:
        raise ValueError("an array of objects")
    if dtype.names is not None or dtype.char == char:
        return dtype
    try:
        named = np.dtype(char)
    except TypeError:
        return dtype
    return named if named == dtype else dtype


FACTORIES: dict[str, Any] = {
    "": None,
    **{one.__name__: one for one in (bool, bytes, dict, float, int, list, set, str, tuple)},
}
# --- decoding ----------------------------------------------------------------------------


def is_encoded(data: Any) -> bool:
    """Tell the bytes of an encoding from those of a ``torch.save`` record."""
    return bytes(data[: len(MAGIC)]) == MAGIC


def decode_value(data: Any, target: object = None) -> Any:
    """Return the value of an encoding.

    Args:
        data: The bytes, from wherever they come.
        target: What the value will replace: instances of users' classes are made only of
            classes that are found in it, by name. No module is imported.

    Raises:
        CorruptError: If the bytes are no encoding.
        IncompatibleError: If it has a newer form, or needs a class that the target has not.
    """
    view = memoryview(data).cast("B")
    if len(view) < START.size or not is_encoded(view):
        raise CorruptError("an encoded value has the wrong first bytes")
    _, version = START.unpack_from(view)
    if version != VERSION:
        raise IncompatibleError(
            f"the value has encoding {version}; this dcpstore knows {VERSION}. Update dcpstore"
        )
    decoder = _Decoder(view, target)
    try:
        value = decoder.node(0)
    except (CorruptError, IncompatibleError):
        raise
    except (
        *(ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError),
        *(struct.error, decimal.DecimalException, SyntaxError),
    ) as error:
        raise CorruptError(
            f"an encoded value is damaged near byte {decoder.at} of {len(view)}:"
            f" {type(error).__name__}"
        ) from error
    if decoder.at != len(view):
        raise CorruptError(f"an encoded value has {len(view) - decoder.at} bytes too many")
    return value


def classes_in(target: object, depth: int = 0) -> dict[str, type]:
    """Return the users' classes whose instances a value holds, or that are it, by name."""
    if isinstance(target, type):
        return {class_name(target): target}
    kind = type(target)
    inside: Iterable[object] = ()
    found: dict[str, type] = {}
    if isinstance(target, enum.Enum):
        found[class_name(kind)] = kind
    elif dataclasses.is_dataclass(kind):
        found[class_name(kind)] = kind
        inside = [getattr(target, one.name, None) for one in dataclasses.fields(kind)]
    elif isinstance(target, Mapping):
        inside = [*target.keys(), *target.values()]
    elif isinstance(target, list | tuple | set | frozenset | collections.deque):
        if is_named_tuple(kind):
            found[class_name(kind)] = kind
        inside = target
    if depth < MAX_DEPTH:
        for one in inside:
            if type(one) not in _PLAIN:
                found.update(classes_in(one, depth + 1))
    return found


_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes, np.ndarray, torch.Tensor))


class _Decoder:
    """Reads nodes, one after another. Every count is checked before anything is made."""

    def __init__(self, view: memoryview, target: object) -> None:
        self._view = view
        self._target = target
        self._classes: Classes | None = None
        self.at = START.size

    def _take(self, num_bytes: int) -> memoryview:
        end = self.at + num_bytes
        if end > len(self._view):
            raise ValueError("cut short")
        taken = self._view[self.at : end]
        self.at = end
        return taken

    def _count(self, bytes_each: int = 1) -> int:
        (count,) = SIZE.unpack(self._take(SIZE.size))
        if count * bytes_each > len(self._view) - self.at:
            raise ValueError("a count is larger than the bytes that are left")
        return int(count)

    def node(self, depth: int) -> Any:
        if depth > MAX_DEPTH + 8:
            raise ValueError("nested too deeply")
        tag = bytes(self._take(1))
        simple = _SIMPLE.get(tag, self)
        if simple is not self:
            return simple
        if tag in b"isby":
            return self._sized(tag, self._take(self._count()))
        if tag == b"d":
            return DOUBLE.unpack(self._take(8))[0]
        if tag == b"c":
            return complex(*COMPLEX.unpack(self._take(16)))
        if tag in b"ltefq":
            return self._items(tag, depth)
        if tag in b"moCD":
            return self._pairs(tag, depth)
        if tag == b"x":
            return self._made(depth)
        if tag == b"z":
            return self._instance(depth)
        raise ValueError("an unknown tag")

    def _sized(self, tag: bytes, content: memoryview) -> Any:
        if tag == b"i":
            if len(content) > MAX_INT_BYTES:
                raise ValueError("an integer that is too long")
            return int.from_bytes(content, "little", signed=True)
        if tag == b"s":
            return str(content, "utf-8", "surrogatepass")
        return bytes(content) if tag == b"b" else bytearray(content)

    def _items(self, tag: bytes, depth: int) -> Any:
        count = self._count()
        if tag == b"q":
            longest = self.node(depth + 1)
            if longest is not None and (type(longest) is not int or count > longest):
                raise ValueError("a deque is longer than its maxlen")
        found = [self.node(depth + 1) for _ in range(count)]
        if tag == b"q":
            return collections.deque(found, longest)
        if tag in b"ef":
            _check_hashes(found)
        made = {b"l": list, b"t": tuple, b"e": set, b"f": frozenset}[tag](found)
        if len(made) != count:
            raise ValueError("a set holds an element twice")
        return made

    def _pairs(self, tag: bytes, depth: int) -> Any:
        count = self._count(2)
        factory = FACTORIES[self.node(depth + 1)] if tag == b"D" else None
        pairs = [(self.node(depth + 1), self.node(depth + 1)) for _ in range(count)]
        _check_hashes([key for key, _ in pairs])
        if tag == b"C":
            made: Any = collections.Counter()
            dict.update(made, pairs)
        elif tag == b"D":
            made = collections.defaultdict(factory, pairs)
        else:
            made = dict(pairs) if tag == b"m" else collections.OrderedDict(pairs)
        if len(made) != count:
            raise ValueError("a dictionary has a key twice")
        return made

    def _made(self, depth: int) -> Any:
        name = str(self._take(self._take(1)[0]), "ascii")
        arguments = self.node(depth + 1)
        if type(arguments) is not tuple:
            raise ValueError("no tuple of arguments")
        return _MAKE[name](*arguments)

    def _instance(self, depth: int) -> Any:
        name, form = self.node(depth + 1), self.node(depth + 1)
        content = self.node(depth + 1)
        if self._classes is None:
            self._classes = classes_in(self._target)
        kind: Any = self._classes.get(name)
        if kind is None:
            raise IncompatibleError(
                f"the checkpoint holds an instance of {name!r:.200} and the state dict has"
                f" {type_name(type(self._target))} there. Classes are taken from the state dict"
                " alone: put an instance of that class, or the class itself, at this key before"
                " loading, or load with LoadPlanner(allow_pickle=True) if you trust the checkpoint"
            )
        if form == "enum" and issubclass(kind, enum.Enum):
            return self._member(kind, content)
        names, values = content if form == "tuple" else (list(content), content)
        if form == "tuple" and is_named_tuple(kind) and len(values) == len(names):
            _check_fields(name, names, list(kind._fields))
            return tuple.__new__(kind, values)
        if form == "fields" and isinstance(kind, type) and dataclasses.is_dataclass(kind):
            _check_fields(name, names, [one.name for one in dataclasses.fields(kind)])
            made = object.__new__(kind)
            for field, value in values.items():
                object.__setattr__(made, field, value)
            return made
        raise IncompatibleError(
            f"the class {name!r} was saved as {form!r}, and the class of that name in the state"
            " dict is none"
        )

    def _member(self, kind: type[enum.Enum], content: Any) -> Any:
        try:
            return kind[content] if type(content) is str else kind(content[0])
        except (KeyError, ValueError) as error:
            raise IncompatibleError(
                f"{type_name(kind)} has no member {str(content)[:100]!r}, which the checkpoint"
                " holds"
            ) from error


def _check_fields(name: str, saved: list[Any], held: list[str]) -> None:
    if sorted(map(str, saved)) != sorted(held):
        raise IncompatibleError(
            f"{name!r} was saved with the fields {str(saved)[:500]}, and the class in the state"
            f" dict has {held}"
        )


def _check_hashes(keys: Sequence[Any]) -> None:
    """Refuse keys chosen to have one hash, over which a dictionary takes hours."""
    if len(keys) > _MIN_CHECKED_HASHES and len(set(map(hash, keys))) * 8 < len(keys):
        raise ValueError("keys whose hashes are the same")


_SIMPLE: dict[bytes, Any] = {b"N": None, b"T": True, b"F": False}
PATHS = {
    kind.__name__: kind
    for kind in (
        *(pathlib.PurePosixPath, pathlib.PosixPath),
        *(pathlib.PureWindowsPath, pathlib.WindowsPath),
    )
}


class _Call(NamedTuple):
    """How instances of some types are made again: by a call.

    Attributes:
        name: In the encoding.
        kinds: The types.
        arguments: Returns those of the call: values that have an encoding, or a memoryview.
            Raises ValueError with a hint for people if an instance has no encoding.
        make: What is called.
    """

    name: str
    kinds: tuple[type, ...]
    arguments: Callable[[Any], Iterable[Any]]
    make: Callable[..., Any]


def _bytes_io(content: bytes, position: int) -> io.BytesIO:
    made = io.BytesIO(content)
    made.seek(position)
    return made


def _short_text(text: str) -> str:
    if len(text) > MAX_NUMBER_BYTES:
        raise ValueError(f"it has more than {MAX_NUMBER_BYTES} digits")
    return text


def _short_ints(*parts: int) -> tuple[int, ...]:
    if max(part.bit_length() for part in parts) > 8 * MAX_NUMBER_BYTES:
        raise ValueError(f"it takes more than {MAX_NUMBER_BYTES} bytes")
    return parts


def _clock(one: dt.time | dt.datetime) -> tuple[Any, ...]:
    return one.hour, one.minute, one.second, one.microsecond, one.tzinfo, one.fold


def _time(*fields: Any) -> dt.time:
    return dt.time(*fields[:-1], fold=fields[-1])


def _datetime(*fields: Any) -> dt.datetime:
    return dt.datetime(*fields[:-1], fold=fields[-1])


def _zone(key: str) -> zoneinfo.ZoneInfo:
    try:
        return zoneinfo.ZoneInfo(key)
    except zoneinfo.ZoneInfoNotFoundError as error:
        raise IncompatibleError(
            f"this machine has no data of the time zone {key[:100]!r}, which the checkpoint names;"
            " install tzdata"
        ) from error


def _path(kind: str, text: str) -> pathlib.PurePath:
    made = PATHS[kind]
    try:
        return made(text)
    except NotImplementedError as error:
        raise IncompatibleError(f"a {kind} cannot be made on this system") from error


# --- of numpy and torch ------------------------------------------------------------------


def _dtype_parts(dtype: np.dtype[Any]) -> tuple[Any, str]:
    described = dtype.str if dtype.names is None else dtype.descr
    known = dtype.kind in "biufcmMSUV" and not dtype.hasobject and dtype.subdtype is None
    made = make_dtype(described, dtype.char) if known else None
    if made != dtype or made.type is not dtype.type:
        raise ValueError(f"its dtype {dtype} holds objects or is not numpy's own")
    return described, dtype.char


def _array_parts(value: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    dtype = _dtype_parts(value.dtype)
    is_fortran = value.flags.f_contiguous and not value.flags.c_contiguous
    flat = np.ascontiguousarray(value.T if is_fortran else value).reshape(-1)
    content = memoryview(flat.view(np.uint8).data if flat.nbytes else b"")
    return *dtype, is_fortran, value.shape, content


def _array(
    described: Any, char: str, is_fortran: bool, shape: tuple[int, ...], content: bytes
) -> np.ndarray[Any, Any]:
    dtype = make_dtype(described, char)
    if len(shape) > 32 or any(type(one) is not int or one < 0 for one in shape):
        raise ValueError("an impossible shape")
    if math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError("an array's shape does not fit its bytes")
    if not content:
        return np.empty(shape, dtype, order="F" if is_fortran else "C")
    flat = np.frombuffer(content, dtype)
    made: np.ndarray[Any, Any] = flat.reshape(shape[::-1] if is_fortran else shape)
    own: np.ndarray[Any, Any] = np.array(made.T, order="F") if is_fortran else made.copy()
    return own


def _scalar_parts(value: np.generic) -> tuple[Any, ...]:
    if type(value) is not value.dtype.type or not value.nbytes:
        raise ValueError
    return *_dtype_parts(value.dtype), memoryview(value.tobytes())


def _scalar(described: Any, char: str, content: bytes) -> Any:
    (made,) = np.frombuffer(content, make_dtype(described, char), 1).copy()
    return made


def _torch_name(name: str) -> Any:
    made = getattr(torch, name)
    if not isinstance(made, torch.dtype | torch.layout):
        raise TypeError("no name of a kind that is saved")
    return made


def _tensor_parts(value: torch.Tensor) -> tuple[Any, ...]:
    if not is_plain(value) or value.device.type != "cpu" or vars(value):
        raise ValueError(
            "beside values that need an encoding, only dense tensors on the CPU can be saved:"
            " give it a key of its own"
        )
    content = memoryview(payload_bytes(value.detach()))
    return dtype_name(value.dtype), tuple(value.shape), value.requires_grad, content


def _tensor(name: str, shape: tuple[int, ...], requires_grad: bool, content: bytes) -> torch.Tensor:
    flat = _array("|u1", "B", is_fortran=False, shape=(len(content),), content=content)
    dtype = dtype_from_name(name)
    if any(type(one) is not int or one < 0 for one in shape) or not (content or 0 in shape):
        raise ValueError("an impossible shape")
    if content:
        return torch.from_numpy(flat).view(dtype).reshape(shape).requires_grad_(requires_grad)
    return torch.empty(shape, dtype=dtype, requires_grad=requires_grad)


def _parameter(*fields: Any) -> torch.nn.Parameter:
    tensor = _tensor(*fields)
    return torch.nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)


_SCALAR = _Call("numpy.scalar", (), _scalar_parts, _scalar)
_CALLS = (
    _Call("ellipsis", (type(...),), lambda _: (), lambda: ...),
    _Call("slice", (slice,), lambda one: (one.start, one.stop, one.step), slice),
    _Call("range", (range,), lambda one: (one.start, one.stop, one.step), range),
    _Call("io.BytesIO", (io.BytesIO,), lambda one: (one.getvalue(), one.tell()), _bytes_io),
    _Call(
        "decimal",
        (decimal.Decimal,),
        lambda one: (_short_text(str(one)),),
        lambda text: decimal.Decimal(_short_text(text)),
    ),
    _Call(
        "fraction",
        (fractions.Fraction,),
        lambda one: _short_ints(one.numerator, one.denominator),
        lambda *parts: fractions.Fraction(*_short_ints(*parts)),
    ),
    _Call("uuid", (uuid.UUID,), lambda one: (one.bytes,), lambda data: uuid.UUID(bytes=data)),
    _Call("date", (dt.date,), lambda one: (one.year, one.month, one.day), dt.date),
    _Call("time", (dt.time,), _clock, _time),
    _Call(
        "datetime",
        (dt.datetime,),
        lambda one: (one.year, one.month, one.day, *_clock(one)),
        _datetime,
    ),
    _Call(
        "timedelta",
        (dt.timedelta,),
        lambda one: (one.days, one.seconds, one.microseconds),
        dt.timedelta,
    ),
    _Call("timezone", (dt.timezone,), lambda one: one.__getinitargs__(), dt.timezone),
    _Call("zoneinfo", (zoneinfo.ZoneInfo,), lambda one: (one.key or "",), _zone),
    _Call("path", (*PATHS.values(),), lambda one: (type(one).__name__, str(one)), _path),
    _Call("numpy.ndarray", (np.ndarray,), _array_parts, _array),
    _SCALAR,
    # A slice of it, since str() drops NULs at its end.
    _Call("numpy.str_", (np.str_,), lambda one: (one[:],), np.str_),
    _Call("numpy.bytes_", (np.bytes_,), lambda one: (bytes(one),), np.bytes_),
    _Call(
        "numpy.dtype",
        (np.dtype, *{type(np.dtype(char)) for char in np.typecodes["All"]}),
        _dtype_parts,
        make_dtype,
    ),
    _Call("torch.Tensor", (torch.Tensor,), _tensor_parts, _tensor),
    _Call("torch.Parameter", (torch.nn.Parameter,), _tensor_parts, _parameter),
    _Call("torch.Size", (torch.Size,), tuple, lambda *sizes: torch.Size(sizes)),
    _Call("torch.device", (torch.device,), lambda one: (str(one),), torch.device),
    _Call(
        "torch.name",
        (torch.dtype, torch.layout),
        lambda one: (str(one).removeprefix("torch."),),
        _torch_name,
    ),
)
_MAKE = {one.name: one.make for one in _CALLS}


_MAX_NODES = 1 << 24
_MAX_LONG1_BYTES = 255  # torch's restricted unpickler knows no longer integers


class UnsupportedValueError(Exception):
    """A value that has no form without pickle.

    Args:
        value: It.
        trail: Steps to it from the value that was to be saved.
        hint: What to do.
    """

    def __init__(self, value: object, trail: Sequence[object], hint: str = "") -> None:
        self.type_name = type_name(type(value))
        self.trail = tuple(trail)
        self.hint = hint
        where = "".join(s if type(s) is _Attribute else f"[{s!r}]" for s in self.trail)
        super().__init__(f"{self.type_name}{f' at {where}' if where else ''}")


class _Attribute(str):
    """A step to an attribute, among steps that are keys and numbers."""

    __slots__ = ()


# --- what torch.load opens ---------------------------------------------------------------

_ATOMS = frozenset((type(None), bool, float, str, complex, torch.dtype, torch.device, torch.Size))


def opens_as_saved(value: object) -> bool:
    """Tell whether ``torch.load(weights_only=True)`` gives a value back, equal and of its type.

    Of any torch from 2.6 on. False is always safe: such a value is encoded.
    """
    return _opens(value, set(), 0)


def _opens(value: object, seen: set[int], depth: int) -> bool:
    kind = type(value)
    if kind in _ATOMS:
        return True
    if kind is int:
        return _is_short(cast("int", value))
    if kind is bytes:
        return bool(value)  # an empty one is pickled as a call of a name that torch refuses
    if kind is bytearray:
        return True
    if depth >= MAX_DEPTH:
        return False
    if id(value) in seen:
        return True  # checked where it was met first
    seen.add(id(value))
    if kind in (list, tuple, set):
        return _all_open(cast("Iterable[object]", value), seen, depth)
    if kind in (dict, collections.OrderedDict):
        pairs = cast("dict[object, object]", value)
        plain = kind is dict or not vars(value)
        return plain and _all_open([*pairs, *pairs.values()], seen, depth)
    if kind in (torch.Tensor, torch.nn.Parameter):
        tensor = cast("torch.Tensor", value)
        return is_plain(tensor) and not vars(tensor)
    return False


def _all_open(values: Iterable[object], seen: set[int], depth: int) -> bool:
    kinds = set(map(type, values)) - _ATOMS
    if int in kinds:
        kinds.remove(int)
        whole = [one for one in values if type(one) is int]
        if not (_is_short(min(whole)) and _is_short(max(whole))):
            return False
    return not kinds or all(_opens(one, seen, depth + 1) for one in values)


def _is_short(value: int) -> bool:
    return value.bit_length() < 8 * _MAX_LONG1_BYTES


# --- encoding ----------------------------------------------------------------------------


def encode_value(value: object) -> bytes:
    """Return a value's encoding.

    Raises:
        UnsupportedValueError: If it is, or holds, something that has none.
    """
    encoder = _Encoder()
    encoder.add(value)
    return b"".join([START.pack(MAGIC, VERSION), *encoder.parts])


def check_value(value: object) -> None:
    """Raise what `encode_value` would raise, without copying arrays and tensors."""
    _Encoder().add(value)


class _Encoder:
    """Collects the parts of an encoding."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self._trail: list[object] = []
        self._num_nodes = 0

    def add(self, value: Any) -> None:
        encode = _ENCODERS.get(type(value))
        if encode is not None:
            encode(self, value)
        else:
            self._add_instance(value)

    def refuse(self, value: object, hint: str = "") -> UnsupportedValueError:
        return UnsupportedValueError(value, self._trail, hint)

    def add_step(self, step: object, value: Any) -> None:
        if len(self._trail) >= MAX_DEPTH:
            hint = f"it is nested more than {MAX_DEPTH} deep, or contains itself"
            raise UnsupportedValueError(value, (), hint)
        self._num_nodes += 1
        if self._num_nodes > _MAX_NODES:
            raise UnsupportedValueError(value, (), f"it has more than {_MAX_NODES} parts")
        self._trail.append(step)
        self.add(value)
        self._trail.pop()

    def add_sized(self, tag: bytes, content: Any) -> None:
        self.parts += (tag, SIZE.pack(len(content)), content)

    def add_int(self, value: int) -> None:
        num_bytes = value.bit_length() // 8 + 1
        if num_bytes > MAX_INT_BYTES:
            raise self.refuse(value, f"it takes more than {MAX_INT_BYTES} bytes")
        self.add_sized(b"i", value.to_bytes(num_bytes, "little", signed=True))

    def add_items(self, tag: bytes, values: Sequence[Any], *first: int | None) -> None:
        self.parts += (tag, SIZE.pack(len(values)))
        for one in first:
            self.add(one)
        for number, one in enumerate(values):
            self.add_step(number, one)

    def add_set(self, tag: bytes, values: Iterable[Any]) -> None:
        """Write the elements in the order of their bytes, so that equal sets are equal bytes."""
        encoded = []
        for one in values:
            parts, self.parts = self.parts, []
            self.add_step(one, one)
            encoded.append(b"".join(self.parts))
            self.parts = parts
        self.parts += (tag, SIZE.pack(len(encoded)), *sorted(encoded))

    def add_pairs(self, tag: bytes, value: Mapping[Any, Any], *first: str) -> None:
        if getattr(value, "__dict__", None):
            raise self.refuse(value, "it has attributes of its own, which would be lost")
        self.parts += (tag, SIZE.pack(len(value)))
        for one in first:
            self.add(one)
        for key, one in value.items():
            self.add_step(key, key)
            self.add_step(key, one)

    def add_defaultdict(self, value: collections.defaultdict[Any, Any]) -> None:
        factory = value.default_factory
        name = next((name for name, one in FACTORIES.items() if one is factory), None)
        if name is None:
            raise self.refuse(value, f"its default_factory must be one of {sorted(FACTORIES)}")
        self.add_pairs(b"D", value, name)

    def add_call(self, call: _Call, value: Any) -> None:
        """Write the call that makes a value again."""
        try:
            arguments = tuple(call.arguments(value))
        except ValueError as error:
            raise self.refuse(value, str(error)) from error
        self.parts += (b"x", bytes([len(call.name)]), call.name.encode())
        self.parts += (b"t", SIZE.pack(len(arguments)))
        for one in arguments:
            if isinstance(one, memoryview):
                self.add_sized(b"b", one)
            else:
                self.add(one)

    # --- of users' classes -------------------------------------------------------------------

    def _add_instance(self, value: Any) -> None:
        kind = type(value)
        if issubclass(kind, np.generic):
            self.add_call(_SCALAR, value)
            return
        if isinstance(value, enum.Enum):
            member = value.name if value.name in kind.__members__ else None
            content: Any = member if member is not None else (value.value,)
            self._add_of_class("enum", value, content)
        elif is_named_tuple(kind):
            self._add_of_class("tuple", value, (list(kind._fields), tuple(value)))
        elif dataclasses.is_dataclass(kind) and not issubclass(kind, _BUILT_IN):
            self._add_of_class("fields", value, self._fields_of(value))
        else:
            raise self.refuse(value, _HINTS.get(kind.__name__, ""))

    def _fields_of(self, value: Any) -> dict[str, Any]:
        names = [one.name for one in dataclasses.fields(value)]
        others = sorted(set(getattr(value, "__dict__", ())) - set(names))
        if others or not all(hasattr(value, name) for name in names):
            raise self.refuse(value, f"it does not hold its fields and nothing else: {others}")
        return {name: getattr(value, name) for name in names}

    def _add_of_class(self, form: str, value: object, content: object) -> None:
        kind = type(value)
        found: Any = sys.modules.get(kind.__module__)
        for name in kind.__qualname__.split("."):
            found = getattr(found, name, None)
        if found is not kind:
            raise self.refuse(value, "its class must be found by its name in its module")
        self.parts.append(b"z")
        self.add(class_name(kind))
        self.add(form)
        if form != "fields":
            self.add_step(_Attribute(f".{form}"), content)
            return
        fields = cast("dict[str, Any]", content)
        self.parts += (b"m", SIZE.pack(len(fields)))
        for name, one in fields.items():
            self.add(name)
            self.add_step(_Attribute(f".{name}"), one)


_BUILT_IN = (
    *(bool, bytes, bytearray, complex, dict, float, frozenset, int, list, set, str, tuple),
    *(BaseException, torch.nn.Module, torch.Tensor, np.ndarray),
)
_HINTS = {
    "Generator": "save its state: get_state() of torch's, bit_generator.state of numpy's",
    "RandomState": "save get_state() of it",
    "Random": "save getstate() of it",
    "function": "save its name",
    "module": "save its name",
    "type": "save its name",
    "matrix": "save numpy.asarray(...) of it",
    "MaskedArray": "save its data and its mask",
    "mappingproxy": "save dict(...) of it",
}


_ENCODERS: dict[type, Callable[[_Encoder, Any], None]] = {
    type(None): lambda to, _: to.parts.append(b"N"),
    bool: lambda to, one: to.parts.append(b"T" if one else b"F"),
    int: _Encoder.add_int,
    float: lambda to, one: to.parts.append(b"d" + DOUBLE.pack(one)),
    complex: lambda to, one: to.parts.append(b"c" + COMPLEX.pack(one.real, one.imag)),
    str: lambda to, one: to.add_sized(b"s", one.encode("utf-8", "surrogatepass")),
    bytes: lambda to, one: to.add_sized(b"b", one),
    bytearray: lambda to, one: to.add_sized(b"y", bytes(one)),
    list: lambda to, one: to.add_items(b"l", one),
    tuple: lambda to, one: to.add_items(b"t", one),
    set: lambda to, one: to.add_set(b"e", one),
    frozenset: lambda to, one: to.add_set(b"f", one),
    collections.deque: lambda to, one: to.add_items(b"q", one, one.maxlen),
    dict: lambda to, one: to.add_pairs(b"m", one),
    collections.OrderedDict: lambda to, one: to.add_pairs(b"o", one),
    collections.Counter: lambda to, one: to.add_pairs(b"C", one),
    collections.defaultdict: _Encoder.add_defaultdict,
    **{
        kind: lambda to, one, call=call: to.add_call(call, one)  # type: ignore[misc]
        for call in _CALLS
        for kind in call.kinds
    },
}
