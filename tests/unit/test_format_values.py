"""The encoding of values: everything comes back as it was, and nothing hostile does harm."""

from __future__ import annotations

import collections
import datetime as dt
import io
import random
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
import value_examples as examples
from value_examples import CLASSES, ENCODED, OPENED, REFUSED, Color, Config, Point, same

from dcpstore import CorruptError, IncompatibleError
from dcpstore.format.values import (
    MAX_DEPTH,
    UnsupportedValueError,
    check_value,
    decode_value,
    encode_value,
    is_encoded,
    opens_as_saved,
)

START = b"DCPVALUE" + struct.pack("<I", 1)


def count(number: int) -> bytes:
    return struct.pack("<Q", number)


def through_torch(value: Any) -> Any:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


@pytest.mark.parametrize("value", OPENED, ids=lambda one: type(one).__name__)
def test_what_is_said_to_open_does_as_it_was(value: Any) -> None:
    assert opens_as_saved(value)
    assert same(through_torch(value), value)


@pytest.mark.parametrize("value", [*OPENED, *ENCODED], ids=lambda one: type(one).__name__)
def test_an_encoding_gives_back_the_value(value: Any) -> None:
    data = encode_value(value)
    assert is_encoded(data)
    again = decode_value(data, CLASSES)
    assert same(again, value)
    assert encode_value(again) == data


@pytest.mark.parametrize("value", ENCODED, ids=lambda one: type(one).__name__)
def test_what_torch_does_not_give_back_is_known(value: Any) -> None:
    assert not opens_as_saved(value)
    check_value(value)


@pytest.mark.parametrize("value", REFUSED, ids=lambda one: type(one).__name__)
def test_the_rest_is_refused(value: Any) -> None:
    assert not opens_as_saved(value)
    for use in (check_value, encode_value):
        with pytest.raises(UnsupportedValueError):
            use(value)


def test_a_refusal_says_where() -> None:
    with pytest.raises(UnsupportedValueError, match=r"Arbitrary at \[1\]\['a'\]\.nested\[0\]"):
        check_value((0, {"a": Config(0, None, [examples.Arbitrary()])}))


def test_what_contains_itself_is_refused() -> None:
    value: list[Any] = [b""]
    value.append(value)
    with pytest.raises(UnsupportedValueError) as caught:
        check_value(value)
    assert "contains itself" in caught.value.hint


def test_an_array_is_not_copied_to_be_checked() -> None:
    array = np.zeros(1 << 24, np.uint8)
    tracemalloc.start()
    check_value((array, array))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_equal_sets_have_equal_bytes() -> None:
    one = [f"{number:x}" for number in range(50)]
    assert encode_value(frozenset(one)) == encode_value(frozenset(reversed(one)))


# --- users' classes ------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [Color.BLUE, Color, [Color.RED], {"a": (0, {Color.RED})}, Config(0.0, Color.RED)],
)
def test_a_class_is_found_in_the_target(target: Any) -> None:
    assert decode_value(encode_value(Color.RED), target) is Color.RED


@pytest.mark.parametrize("target", [None, 1, [], Point(0, 0), int])
def test_without_its_class_in_the_target_an_instance_is_refused(target: Any) -> None:
    with pytest.raises(IncompatibleError, match=r"value_examples:Color.*put an instance"):
        decode_value(encode_value(Color.RED), target)


def test_no_module_is_imported_for_a_class() -> None:
    data = encode_value(Color.RED).replace(b"value_examples", b"antigravity_no")
    with pytest.raises(IncompatibleError, match="antigravity_no:Color"):
        decode_value(data, Color.RED)


def test_no_constructor_runs() -> None:
    saved = Config(1.0, Color.RED)
    saved.lr = 2.0
    assert decode_value(encode_value(saved), Config(0.0, Color.RED)).lr == 2.0


def test_a_class_that_changed_is_refused_by_its_fields() -> None:
    changed = collections.namedtuple("Point", ["x", "z"])
    changed.__module__, changed.__qualname__ = Point.__module__, Point.__qualname__
    with pytest.raises(IncompatibleError, match=r"saved with the fields .*'y'.*'z'"):
        decode_value(encode_value(Point(1, 2)), changed(0, 0))
    data = encode_value(Color.BLUE).replace(b"BLUE", b"PINK")
    with pytest.raises(IncompatibleError, match="has no member 'PINK'"):
        decode_value(data, Color)


def test_a_class_that_has_no_name_of_its_own_is_refused() -> None:
    local = collections.namedtuple("local", "x")
    with pytest.raises(UnsupportedValueError) as caught:
        check_value(local(1))
    assert "found by its name" in caught.value.hint


# --- hostile bytes ---------------------------------------------------------------------

_ARRAY = b"x\x0dnumpy.ndarrayt" + count(5)
_TEXT = b"s" + count(3) + b"|u1" + b"s" + count(1) + b"B"
HOSTILE = {
    "nothing": b"",
    "no tag": b"?",
    "cut short": b"i" + count(4) + b"ab",
    "a count without items": b"l" + count(1 << 62),
    "a count of pairs": b"m" + count(1 << 40) + b"NN",
    "more behind": b"NN",
    "nested": (b"l" + count(1)) * 1000 + b"N",
    "nested without end": (b"t" + count(1)) * 100_000,
    "a list as a key": b"m" + count(1) + b"l" + count(0) + b"N",
    "a key twice": b"m" + count(2) + b"NNNN",
    "an element twice": b"e" + count(2) + b"NN",
    "a deque beyond its maxlen": b"q" + count(2) + b"i" + count(1) + b"\x01" + b"NN",
    "bad text": b"s" + count(1) + b"\xff",
    "an unknown name": b"x\x02ost" + count(0),
    "a name with bad bytes": b"x\x02\xff\xfet" + count(0),
    "wrong arguments": b"x\x05ranget" + count(0),
    "an array larger than its bytes": _ARRAY
    + _TEXT
    + b"F"
    + b"t"
    + count(1)
    + b"i"
    + count(6)
    + b"\0\0\0\0\0\x7f"
    + b"b"
    + count(1)
    + b"a",
    "a negative shape": _ARRAY
    + _TEXT
    + b"Ft"
    + count(1)
    + b"i"
    + count(1)
    + b"\xff"
    + b"b"
    + count(0),
    "an array of objects": b"x\x0bnumpy.dtypet"
    + count(2)
    + b"s"
    + count(2)
    + b"|O"
    + b"s"
    + count(1)
    + b"O",
    "a factory of no name": b"D" + count(0) + b"s" + count(4) + b"eval",
    "a date that is none": b"x\x04datet" + count(3) + (b"i" + count(1) + b"\0") * 3,
    "a decimal without end": b"x\x07decimalt" + count(1) + b"s" + count(1 << 16) + b"9" * (1 << 16),
    "a zone outside its folder": b"x\x08zoneinfot" + count(1) + b"s" + count(9) + b"../passwd",
    "a torch name that is a function": b"x\x0atorch.namet" + count(1) + b"s" + count(4) + b"load",
    "an instance without a name": b"z" + b"N" * 3,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_refused(name: str) -> None:
    with pytest.raises((CorruptError, IncompatibleError)):
        decode_value(START + HOSTILE[name], CLASSES)


def test_a_newer_encoding_is_refused_as_such() -> None:
    with pytest.raises(IncompatibleError, match="encoding 2"):
        decode_value(b"DCPVALUE" + struct.pack("<I", 2))


@pytest.mark.parametrize("tag", [b"l", b"t", b"e", b"f", b"q", b"m", b"o", b"C"])
def test_a_decoded_value_takes_at_most_100_times_the_bytes(tag: bytes) -> None:
    empty = tag + count(0) + (b"N" if tag == b"q" else b"")
    data = START + b"l" + count(10_000) + empty * 10_000
    tracemalloc.start()
    kept = decode_value(data)
    assert tracemalloc.get_traced_memory()[0] < 100 * len(data)
    tracemalloc.stop()
    assert len(kept) == 10_000


def test_keys_chosen_to_collide_are_refused() -> None:
    step = (1 << 61) - 1  # the modulus of Python's hash of integers
    keys = {step * number: None for number in range(1, 1500)}
    with pytest.raises(CorruptError):
        decode_value(encode_value(keys))


def test_damaged_bytes_are_refused_or_another_value_but_no_raw_error() -> None:
    rng = random.Random(7)
    data = [encode_value(one) for one in ENCODED]
    outcomes = collections.Counter()
    for _ in range(4000):
        one = bytearray(rng.choice(data))
        for _ in range(rng.randint(1, 3)):
            one[rng.randrange(len(one))] = rng.choice([0, 1, 255, rng.randrange(256)])
        try:
            decode_value(one, CLASSES)
            outcomes["value"] += 1
        except (CorruptError, IncompatibleError):
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 100


def test_the_deepest_value_that_is_encoded_is_decoded() -> None:
    value: Any = dt.timedelta(1)
    for _ in range(MAX_DEPTH):
        value = [value]
    assert same(decode_value(encode_value(value)), value)
    with pytest.raises(UnsupportedValueError):
        encode_value([value])
