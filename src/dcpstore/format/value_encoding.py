"""Which values need an encoding, and the encoder. `dcpstore.format.values` has the form."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import io
import sys
import uuid
import zoneinfo
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from dcpstore.format.copying import payload_bytes
from dcpstore.format.dtypes import dtype_name
from dcpstore.format.tensors import is_plain
from dcpstore.format.values import (
    COMPLEX,
    DOUBLE,
    FACTORIES,
    MAGIC,
    MAX_DEPTH,
    MAX_INT_BYTES,
    MAX_NUMBER_BYTES,
    PATHS,
    SIZE,
    START,
    VERSION,
    class_name,
    is_named_tuple,
    make_dtype,
    type_name,
)

__all__ = ["UnsupportedValueError", "check_value", "encode_value", "opens_as_saved"]

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

    def add_items(self, tag: bytes, values: Sequence[Any]) -> None:
        self.parts += (tag, SIZE.pack(len(values)))
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

    def add_deque(self, value: collections.deque[Any]) -> None:
        self.parts += (b"q", SIZE.pack(len(value)))
        self.add(value.maxlen)
        for number, one in enumerate(value):
            self.add_step(number, one)

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

    def add_made(self, name: str, *arguments: Any) -> None:
        """Write what `_REBUILD` makes again of a name and arguments."""
        self.parts += (b"x", bytes([len(name)]), name.encode())
        self.parts += (b"t", SIZE.pack(len(arguments)))
        for one in arguments:
            if isinstance(one, memoryview):
                self.add_sized(b"b", one)
            else:
                self.add(one)

    def add_decimal(self, value: decimal.Decimal) -> None:
        text = str(value)
        if len(text) > MAX_NUMBER_BYTES:
            raise self.refuse(value, f"it has more than {MAX_NUMBER_BYTES} digits")
        self.add_made("decimal", text)

    def add_fraction(self, value: fractions.Fraction) -> None:
        parts = value.numerator, value.denominator
        if max(part.bit_length() for part in parts) > 8 * MAX_NUMBER_BYTES:
            raise self.refuse(value, f"it takes more than {MAX_NUMBER_BYTES} bytes")
        self.add_made("fraction", *parts)

    # --- of numpy and torch ----------------------------------------------------------------

    def add_array(self, value: np.ndarray[Any, Any]) -> None:
        dtype = self._dtype_of(value, value.dtype)
        is_fortran = value.flags.f_contiguous and not value.flags.c_contiguous
        ordered = value.T if is_fortran else value
        self.add_made("numpy.ndarray", *dtype, is_fortran, value.shape, _bytes_of(ordered))

    def _dtype_of(self, value: object, dtype: np.dtype[Any]) -> tuple[Any, str]:
        described = dtype.str if dtype.names is None else dtype.descr
        known = dtype.kind in "biufcmMSUV" and not dtype.hasobject and dtype.subdtype is None
        made = make_dtype(described, dtype.char) if known else None
        if made != dtype or made.type is not dtype.type:
            raise self.refuse(value, f"its dtype {dtype} holds objects or is not numpy's own")
        return described, dtype.char

    def add_scalar(self, value: np.generic) -> None:
        if type(value) is np.str_:
            self.add_made("numpy.str_", value[:])  # str() drops NULs at its end
            return
        if type(value) is np.bytes_:
            self.add_made("numpy.bytes_", bytes(value))
            return
        if type(value) is not value.dtype.type or not value.nbytes:
            raise self.refuse(value)
        content = memoryview(value.tobytes())
        self.add_made("numpy.scalar", *self._dtype_of(value, value.dtype), content)

    def add_tensor(self, value: torch.Tensor) -> None:
        if not is_plain(value) or value.device.type != "cpu" or vars(value):
            raise self.refuse(
                value,
                "beside values that need an encoding, only dense tensors on the CPU can be saved:"
                " give it a key of its own",
            )
        self.add_made(
            "torch.Parameter" if type(value) is torch.nn.Parameter else "torch.Tensor",
            dtype_name(value.dtype),
            tuple(value.shape),
            value.requires_grad,
            memoryview(payload_bytes(value.detach())),
        )

    # --- of users' classes -------------------------------------------------------------------

    def _add_instance(self, value: Any) -> None:
        kind = type(value)
        if issubclass(kind, np.generic):
            self.add_scalar(value)
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


def _bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    flat = np.ascontiguousarray(array).reshape(-1)
    return memoryview(flat.view(np.uint8).data) if flat.nbytes else memoryview(b"")


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


def _zone_name(zone: zoneinfo.ZoneInfo) -> str:
    return zone.key or ""


def _encoders() -> dict[type, Callable[[_Encoder, Any], None]]:
    encoders: dict[type, Callable[[_Encoder, Any], None]] = {
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
        collections.deque: _Encoder.add_deque,
        dict: lambda to, one: to.add_pairs(b"m", one),
        collections.OrderedDict: lambda to, one: to.add_pairs(b"o", one),
        collections.Counter: lambda to, one: to.add_pairs(b"C", one),
        collections.defaultdict: _Encoder.add_defaultdict,
        type(...): lambda to, _: to.add_made("ellipsis"),
        slice: lambda to, one: to.add_made("slice", one.start, one.stop, one.step),
        range: lambda to, one: to.add_made("range", one.start, one.stop, one.step),
        io.BytesIO: lambda to, one: to.add_made("io.BytesIO", one.getvalue(), one.tell()),
        decimal.Decimal: _Encoder.add_decimal,
        fractions.Fraction: _Encoder.add_fraction,
        uuid.UUID: lambda to, one: to.add_made("uuid", one.bytes),
        dt.date: lambda to, one: to.add_made("date", one.year, one.month, one.day),
        dt.time: lambda to, one: to.add_made("time", *_clock(one)),
        dt.datetime: lambda to, one: to.add_made(
            "datetime", one.year, one.month, one.day, *_clock(one)
        ),
        dt.timedelta: lambda to, one: to.add_made(
            "timedelta", one.days, one.seconds, one.microseconds
        ),
        dt.timezone: lambda to, one: to.add_made("timezone", *one.__getinitargs__()),
        zoneinfo.ZoneInfo: lambda to, one: to.add_made("zoneinfo", _zone_name(one)),
        np.ndarray: _Encoder.add_array,
        torch.Tensor: _Encoder.add_tensor,
        torch.nn.Parameter: _Encoder.add_tensor,
        torch.Size: lambda to, one: to.add_made("torch.Size", *one),
        torch.device: lambda to, one: to.add_made("torch.device", str(one)),
    }
    for kind in (torch.dtype, torch.layout):
        encoders[kind] = lambda to, one: to.add_made("torch.name", str(one).removeprefix("torch."))
    for path in PATHS.values():
        encoders[path] = lambda to, one: to.add_made("path", type(one).__name__, str(one))
    dtypes = {type(np.dtype(char)) for char in np.typecodes["All"]}
    for dtype in dtypes | {np.dtype}:
        encoders[dtype] = lambda to, one: to.add_made("numpy.dtype", *to._dtype_of(one, one))  # noqa: SLF001
    return encoders


def _clock(one: dt.time | dt.datetime) -> tuple[Any, ...]:
    return one.hour, one.minute, one.second, one.microsecond, one.tzinfo, one.fold


_ENCODERS = _encoders()
