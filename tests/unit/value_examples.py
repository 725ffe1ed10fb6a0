"""Values of every kind that a save accepts, and a comparison of values to the last bit."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import io
import pathlib
import random
import struct
import uuid
import zoneinfo
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch


class Color(enum.Enum):
    RED = 1
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1


class Access(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


class Point(NamedTuple):
    x: float
    y: object


@dataclasses.dataclass
class Config:
    lr: float
    color: Color | None = None
    nested: Any = None

    def __post_init__(self) -> None:
        self.made = "not of a load"
        del self.made


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Frozen:
    value: Any


CLASSES = (Color, Level, Access, Point, Config, Frozen)


class Arbitrary:
    pass


ZONE = zoneinfo.ZoneInfo("Europe/Berlin")
MOMENT = dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=ZONE)
RECORDS = np.dtype([("a", ">i4"), ("b", "f8", (2,))])

# What torch.load(weights_only=True) of any torch gives back.
OPENED = [
    *(None, True, 0, -1, 2**63, -(2**300), 0.1, -0.0, float("nan"), float("-inf"), 1j, "", "ab"),
    *("\ud800", b"a\0b", bytearray(b""), bytearray(b"x"), torch.Size([2, 3]), torch.bfloat16),
    *(torch.device("cuda:1"), [], [1, [2.0]], (), (1, (2,)), {1: "a"}, {1, "b", 2.5}),
    (collections.OrderedDict(b=1, a=2), torch.tensor([1.0, float("nan")])),
    [{"lr": 0.1, 0: None}],
    random.Random(0).getstate(),
]
# What needs an encoding.
ENCODED = [
    *(b"", 2**2100, -(2**5000), frozenset({1, (2, "a")}), {frozenset(), 1}, ..., slice(1, None)),
    *(collections.deque([1, 2], 5), collections.deque(), (collections.Counter("aab"),)),
    *((collections.defaultdict(list, {1: [2]}),), (collections.OrderedDict(a={b""}),)),
    *(range(3, 9, 2), range(2**70), decimal.Decimal("1.50"), decimal.Decimal("-sNaN12")),
    *(fractions.Fraction(-1, 3), uuid.UUID(int=7), (b"", -0.0, complex("nan-0j"))),
    *(dt.date(1, 1, 1), dt.time(1, 2, 3, 4, dt.timezone.utc), dt.timedelta(-1, 5, 7), MOMENT),
    *(dt.timezone.utc, dt.timezone(dt.timedelta(hours=2), "x"), ZONE, dt.datetime.max),
    *(pathlib.PurePosixPath("/a/b"), pathlib.PureWindowsPath("c:\\x"), pathlib.Path("r")),
    *(np.arange(6).reshape(2, 3), np.asfortranarray(np.ones((2, 3), "f4")), np.array(3)),
    *(np.zeros((0, 3)), np.array(["a", "bc"]), np.array([b"x"]), np.zeros(2, RECORDS)),
    *(np.array(["2020-01-01"], "M8[ns]"), np.array([1], ">i4"), np.array([np.nan, -0.0], "f2")),
    *(np.longlong(3), np.int64(3), np.float32("nan"), np.bool_(True), np.str_("a\0")),
    *(np.bytes_(b"a\0"), np.datetime64("NaT"), np.timedelta64(3, "s"), np.longdouble(1.5)),
    *(np.dtype("f4"), RECORDS, np.zeros(1, RECORDS)[0], torch.strided),
    (b"", torch.arange(3.0), torch.nn.Parameter(torch.ones(0, 2)), torch.ones(1).bfloat16()),
    (b"", torch.float8_e4m3fn, torch.Size([1]), torch.device("cpu"), torch.tensor(True)),
    np.random.RandomState(0).get_state(),
    (np.random.default_rng(0).bit_generator.state, np.random.MT19937(0).state),
    *(Color.RED, Color.BLUE, Level.LOW, Access.READ | Access.WRITE, Access(0)),
    *(Point(1.5, (2, Point(0, None))), Config(0.1, Color.RED, [Frozen({1: b""})]), Frozen(())),
]
REFUSED = [
    *(Arbitrary(), [{"a": (1, Arbitrary())}], print, lambda: 1, np, int, np.array([object()])),
    *(torch.Generator(), np.random.default_rng(), np.ma.masked_array([1]), NotImplemented),
    *(type("Str", (str,), {})("a"), collections.UserDict, object, Config(Arbitrary())),
    np.zeros(1, np.dtype((np.record, [("a", "i4")]))),
]


_PARTS: dict[type, Any] = {
    complex: lambda one: (one.real, one.imag),
    decimal.Decimal: lambda one: (one.as_tuple().sign, repr(one)),
    io.BytesIO: lambda one: (one.getvalue(), one.tell()),
    dt.datetime: lambda one: (one.replace(tzinfo=None).isoformat(), one.fold, repr(one)),
}


def same(one: Any, other: Any) -> bool:
    """Compare types and every bit. Shares nothing with the code under test."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor | np.ndarray | np.generic):
        return same_array(one, other)
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    for kind, parts_of in _PARTS.items():
        if isinstance(one, kind):
            return same(parts_of(one), parts_of(other))
    if isinstance(one, Mapping):
        rest = getattr(one, "default_factory", None) is getattr(other, "default_factory", None)
        pairs, others = list(one.items()), list(other.items())
        return rest and len(pairs) == len(others) and all(map(same, pairs, others))
    if isinstance(one, collections.deque) and one.maxlen != other.maxlen:
        return False
    if isinstance(one, list | tuple | collections.deque):
        return len(one) == len(other) and all(map(same, one, other))
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        names = [field.name for field in dataclasses.fields(one)]
        return all(same(getattr(one, name), getattr(other, name)) for name in names)
    return bool(one == other) and repr_of(one) == repr_of(other)


def same_array(one: Any, other: Any) -> bool:
    """Compare arrays and tensors of one class."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if isinstance(one, torch.Tensor):
        return one.requires_grad == other.requires_grad and bits(one) == bits(other)
    return bool(one.dtype.char == other.dtype.char) and bool(one.tobytes() == other.tobytes())


def repr_of(value: Any) -> str:
    """Return a text that tells equal values apart that are not the same; sets have no order."""
    return "" if isinstance(value, set | frozenset) else repr(value)


def bits(tensor: torch.Tensor) -> bytes:
    """Return a dense tensor's elements."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
