"""The instructions of a pickle, found and judged without running one of them.

A pickle is a program for a small stack machine. Some programs of a few bytes keep the machine
busy forever or make it ask for all memory, without calling anything: a memo of 4 GB for one
index; a tuple of two references to a tuple of two references and so on, whose hash takes 2^n
steps; tuples nested so deeply that hashing them overflows the stack of the interpreter.

`without_hashing` is for pickled metadata, which may be large: it rewrites the program so that
dicts and sets are made as lists, and Python's fast unpickler hashes nothing. `check_structure`
is for the pickles of ``torch.save``, which torch's own unpickler opens: it follows the stack
and refuses keys that cost too much.

Opcodes: Python's ``pickletools``. Nothing here needs torch.
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet

import numpy as np
import numpy.typing as npt

MAX_EXPANSION = 32
"""What is unpickled may take this many times the memory of the pickle. Metadata of stock
writers take 10 to 20 times theirs."""

SET_MARK = ((),)
"""What tells the contents of a set from those of a dict, in which it is no key."""

_SLACK_BYTES = 32 << 20
_MAX_LONG_BYTES = 8  # of longer ones any number has the same hash
_STOP, _GLOBAL = ord("."), ord("c")
_Bytes = npt.NDArray[np.uint8]
_Positions = npt.NDArray[np.int64]


class BadPickleError(ValueError):
    """The program is cut off, has instructions of no use here, or would take too much."""


class CutShortError(BadPickleError):
    """The program has no end.

    Args:
        needed_bytes: Length of what the next instruction needs.
    """

    def __init__(self, needed_bytes: int) -> None:
        super().__init__("it ends early")
        self.needed_bytes = needed_bytes


# --- instructions ------------------------------------------------------------------------

# What pickled metadata are made of.
_METADATA_CODES = {
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1"),
    *("BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES"),
    *("SHORT_BINBYTES", "GLOBAL", "STACK_GLOBAL", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2"),
    *("TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS"),
    *("EMPTY_SET", "ADDITEMS", "FROZENSET", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT"),
    *("MEMOIZE", "REDUCE", "NEWOBJ", "BUILD"),
}
_CODES = {one.name: ord(one.code) for one in pickletools.opcodes}
_NAMES = {ord(one.code): one.name for one in pickletools.opcodes}


def _lengths_of(names: AbstractSet[str]) -> list[int]:
    """Return the length of each of these instructions by opcode; 0 for all others.

    Those that say themselves how long they are have the length of that number and of what
    precedes it, negated; -1 is for two lines of text.
    """
    lengths = [0] * 256
    for one in pickletools.opcodes:
        if one.name in names:
            num_bytes = 0 if one.arg is None else one.arg.n
            fixed = num_bytes if num_bytes < 0 else 1 + num_bytes
            lengths[ord(one.code)] = -5 if num_bytes in (-3, -4) else fixed
    return lengths


_LENGTHS = _lengths_of(_METADATA_CODES)

_REFERENCE_BYTES = 16  # a place on the stack and one in what holds it
# What an instruction leaves in memory, roughly, besides a text's letters.
_COSTS = np.zeros(256, np.int64)
for _name in _METADATA_CODES - {"PROTO", "FRAME", "STOP", "MARK", "APPEND", "APPENDS", "BUILD"}:
    _COSTS[_CODES[_name]] = _REFERENCE_BYTES
for _name in ("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", "FROZENSET", "NEWOBJ", "REDUCE"):
    _COSTS[_CODES[_name]] += 72
for _name in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
    _COSTS[_CODES[_name]] += 56
for _name in ("BININT", "BININT2", "LONG1", "BINFLOAT"):
    _COSTS[_CODES[_name]] += 32
for _name in ("BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES"):
    _COSTS[_CODES[_name]] += 56


def _end_of(data: bytes, at: int, length: int) -> int:
    """Return where an instruction of negative length ends."""
    if length == -1:  # two lines
        first = data.find(b"\n", at)
        second = data.find(b"\n", first + 1)
        return second + 1 if 0 <= first < second else len(data) + 1
    if at - length > len(data):
        return len(data) + 1
    return at - length + int.from_bytes(data[at + 1 : at - length], "little")


def end_of_program(data: bytes) -> int:
    """Return where a pickle of ``torch.save`` ends.

    Raises:
        CutShortError: If its end is not there.
        BadPickleError: If it is made of what torch's own unpickler does not take.
    """
    return _walk(data, 0, len(data) + 1, _TORCH_LENGTHS)[1]


def _walk(
    data: bytes, start: int, bound: int, lengths: Sequence[int] = _LENGTHS
) -> tuple[list[int], int]:
    """Return where instructions start, from one to the first at or behind ``bound``, or STOP."""
    found = []
    at, size = start, len(data)
    while at < bound:
        if at >= size:
            raise CutShortError(at + 1)
        code = data[at]
        length = lengths[code]
        if length == 0:
            name = _NAMES.get(code, f"{code:#04x}")
            raise BadPickleError(f"there is the opcode {name}, of no use here")
        found.append(at)
        if code == _STOP:
            return found, at + 1
        at = at + length if length > 0 else _end_of(data, at, length)
    if at > size:
        raise CutShortError(at)
    return found, at


# --- many instructions at once -------------------------------------------------------------
# Stock metadata make one object after the other, each by NEWOBJ. From those places on
# instructions are followed side by side; where two walks do not meet, one by one.

_OBJECT = re.compile(rb"\)\x81(?:\x94|q.|r....)\}(?:\x94|q.|r....)\(", re.DOTALL)
_BATCH_BYTES = 1 << 20
_FEW_WALKS = 64
_LENGTHS_ARRAY = np.array(_LENGTHS, np.int64)
_LENGTHS_ARRAY[[_STOP, _GLOBAL]] = 0  # rare: the walk one by one knows them


def _walk_beside(data: bytes, base: int, starts: _Positions, bound: int) -> _Positions | None:
    """Return where instructions start in ``[starts[0], bound)``; None if they do not meet.

    Args:
        data: The pickle.
        base: Where the first walk starts.
        starts: Where walks start; each ends where the next one starts.
        bound: Where the last one ends.
    """
    window = np.frombuffer(data, np.uint8, min(len(data), bound + 8) - base, base)
    ends = np.append(starts[1:], bound) - base
    at = starts - base
    is_start = np.zeros(bound - base, bool)
    while at.size > _FEW_WALKS:
        is_start[at] = True
        lengths = _LENGTHS_ARRAY[window[at]]
        if not lengths.all():
            return None
        for width in (1, 4):
            texts = np.flatnonzero(lengths == -1 - width)
            lengths[texts] = 1 + width + _numbers(window, at[texts], width)
        at = at + lengths
        if (at > ends).any():
            return None
        goes_on = at < ends
        at, ends = at[goes_on], ends[goes_on]
    for start, end in zip(at.tolist(), ends.tolist(), strict=True):
        found, reached = _walk(data, base + start, base + end)
        if reached != base + end:
            return None
        is_start[np.array(found, np.int64) - base] = True
    return np.flatnonzero(is_start) + base


def _batches(data: bytes) -> Iterator[tuple[int, int, _Positions]]:
    """Yield start and end of each part of the program and where its instructions start."""
    starts = np.array([found.start() for found in _OBJECT.finditer(data)], np.int64)
    at, size = 0, len(data)
    while at < size:
        low = int(np.searchsorted(starts, at, "right"))
        high = int(np.searchsorted(starts, at + _BATCH_BYTES, "left"))
        found: _Positions | None = None
        bound = end = min(at + _BATCH_BYTES, size) if high == low else int(starts[high - 1])
        if high - low > _FEW_WALKS:
            walks = np.append(np.array([at], np.int64), starts[low : high - 1])
            found = _walk_beside(data, at, walks, bound)
        if found is None:
            one_by_one, end = _walk(data, at, bound)
            found = np.array(one_by_one, np.int64)
        yield at, end, found
        if data[found[-1]] == _STOP:
            return
        at = end
    raise CutShortError(size)


def _numbers(window: _Bytes, at: _Positions, width: int) -> _Positions:
    """Return the little-endian numbers of so many bytes behind each of some opcodes."""
    found = np.zeros(at.size, np.int64)
    for byte in range(width):
        found |= np.take(window, at + 1 + byte, mode="clip").astype(np.int64) << 8 * byte
    return found


# --- what a program would cost, and the same program without hashing ------------------------

# Instructions of the same length that do what is wanted of metadata, or nothing.
_SAME_LENGTH = {"SETITEMS": b"e", "ADDITEMS": b"e", "FRAME": b"N0N0N0K\x000"}
# One byte becomes more: a persistent id for what is to be made, or a pair to add by BUILD.
_LONGER = {
    "EMPTY_DICT": b")Q",
    "EMPTY_SET": b")\x85\x85Q",
    "FROZENSET": b"t)\x85\x86Q",
    "SETITEM": b"\x86b",
}


def without_hashing(data: bytes, *, max_bytes: int) -> bytes:
    """Return a program that makes the same things and neither dicts nor sets.

    Where the original makes a dict, it calls ``persistent_load(())`` and puts keys and values
    in turn into what that returns, by ``extend``, or one pair of them by ``__setstate__``. For a
    set it calls ``persistent_load((SET_MARK,))`` and extends that by the members; for a frozenset
    ``persistent_load((members, SET_MARK))``. So nothing is hashed; and ``BUILD``, which sets
    attributes from dicts only, sets none.

    Args:
        data: The pickle; what follows it is ignored.
        max_bytes: Most memory that what it makes may take.

    Raises:
        BadPickleError: If it is cut off, has instructions that metadata have no use for, or would
            take more than ``max_bytes``, or than `MAX_EXPANSION` times its own length.
    """
    parts: list[bytes] = []
    num_done = cost = 0
    for start, end, at in _batches(data):
        window = np.frombuffer(data, np.uint8, min(end, len(data)) - start, start).copy()
        codes = np.frombuffer(data, np.uint8)[at]
        num_done += at.size
        cost += int(_COSTS[codes].sum()) + end - start
        allowed = min(max_bytes, MAX_EXPANSION * end + _SLACK_BYTES)
        if cost > allowed:
            raise BadPickleError(
                f"its first {end} bytes would take {cost} bytes of memory, and {allowed} are"
                " allowed (ReadConfig.max_metadata_bytes, and in proportion to what is stored)"
            )
        inside = at - start
        _check_numbers(window, inside, codes, num_done)
        for name, new in _SAME_LENGTH.items():
            for byte, value in enumerate(new):
                window[inside[codes == _CODES[name]] + byte] = value
        before, added = [], []
        for name, (first, *others) in _LONGER.items():
            where = inside[codes == _CODES[name]]
            window[where] = first
            before.append(np.repeat(where + 1, len(others)))
            added.append(np.tile(np.array(others, np.uint8), where.size))
        parts.append(np.insert(window, np.concatenate(before), np.concatenate(added)).tobytes())
    return b"".join(parts)


def _check_numbers(window: _Bytes, at: _Positions, codes: _Bytes, num_done: int) -> None:
    """Refuse places in the memo that no counting from 0 leads to, and integers of many digits."""
    for name, width in (("BINPUT", 1), ("LONG_BINPUT", 4)):
        places = _numbers(window, at[codes == _CODES[name]], width)
        if places.size and int(places.max()) >= num_done:
            raise BadPickleError(f"it needs a memo of {int(places.max())} entries")
    widths = _numbers(window, at[codes == _CODES["LONG1"]], 1)
    if widths.size and int(widths.max()) > _MAX_LONG_BYTES:
        raise BadPickleError(f"it has an integer of {int(widths.max())} bytes")


# --- the pickles of torch.save --------------------------------------------------------------
# What stands for a value on the stack is one number: how many values it is made of, counting
# what is shared as often as it is used; whether an integer is among them, or something that
# can change and was got from the memo; whether it is, or ends with, the name of the encoding of
# bytes; how deeply its tuples are nested.

_DEPTH, _INTEGER, _LATIN, _SHARED, _ONE, _SHIFT = 63, 64, 128, 256, 512, 9
_MAX_WORK = 1 << 20
# It is easy to make up many tuples of integers, or long integers, that have the same hash.
_MAX_TUPLE_KEYS, _MAX_LONGS = 10_000, 1_000
_LATIN_NAMES = (b"latin1", b"latin-1")
_ENCODE = "_codecs encode"
_PUSHES = {
    _CODES[name]: _ONE for name in ("NONE", "NEWTRUE", "NEWFALSE", "BINFLOAT", "EMPTY_TUPLE")
}
_PUSHES.update({_CODES[name]: 0 for name in ("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET")})
_PUSHES.update({_CODES[name]: _ONE | _INTEGER for name in ("BININT", "BININT1", "BININT2")})
# What torch's own unpickler takes.
_TORCH_LENGTHS = _lengths_of(
    {
        *("PROTO", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2"),
        *("LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING", "GLOBAL", "EMPTY_TUPLE", "TUPLE"),
        *("TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT"),
        *("SETITEM", "SETITEMS", "EMPTY_SET", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT"),
        *("REDUCE", "NEWOBJ", "BUILD", "BINPERSID"),
    }
)


def check_structure(data: bytes) -> None:
    """Refuse a pickle of ``torch.save`` that costs far more to open than it is long.

    For what ``torch.load(weights_only=True)`` opens next, which decides what may be called.

    Raises:
        BadPickleError: If a tuple is made of far more values than the pickle is long, or is
            nested too deeply to be hashed; if it asks for memory by a number; or is cut off.
    """
    machine = _Machine(data)
    steps, pushes, lengths = _STEPS, _PUSHES, _TORCH_LENGTHS
    at = 0
    try:
        while (code := data[at]) != _STOP:
            length = lengths[code]
            if length == 0:
                return  # torch's unpickler stops here, too, and says why
            end = at + length if length > 0 else _end_of(data, at, length)
            if end > len(data):
                raise CutShortError(end)
            if code in pushes:
                machine.stack.append(pushes[code])
            elif code in steps:
                steps[code](machine, at - length if length < -1 else at + 1, end)
            at = end
    except (IndexError, KeyError, UnicodeDecodeError) as error:
        text = f"{type(error).__name__}: {error}"
        raise BadPickleError(f"it ends early, or takes what is not there ({text})") from error


class _Machine:
    """The stack, and what was put aside. A step gets where its argument starts and ends."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.stack: list[int | str] = []
        self._marks: list[list[int | str]] = []
        self._memo: dict[int, int | str] = {}
        self._limit = _MAX_WORK + 16 * len(data)
        self._work = self._num_longs = 0

    def _worked(self, num_values: int) -> None:
        self._work += num_values
        if self._work > self._limit:
            raise BadPickleError("its keys are made of too many values")

    def mark(self, _: int, __: int) -> None:
        self._marks.append(self.stack)
        self.stack = []

    def to_mark(self, _: int, __: int) -> None:
        self.stack = self._marks.pop()

    def pop(self, _: int, __: int) -> None:
        self.stack.pop()

    def put(self, start: int, end: int) -> None:
        self._memo[int.from_bytes(self._data[start:end], "little")] = self.stack[-1]

    def get(self, start: int, end: int) -> None:
        place = int.from_bytes(self._data[start:end], "little")
        self.stack.append(self._memo[place] or _SHARED)

    def name(self, start: int, end: int) -> None:
        self.stack.append(self._data[start : end - 1].decode("utf-8").replace("\n", " "))

    def long(self, start: int, end: int) -> None:
        self._num_longs += end - start > _MAX_LONG_BYTES
        if self._num_longs > _MAX_LONGS:
            raise BadPickleError("it has very many integers of more than 64 bits")
        self.stack.append(_ONE | _INTEGER)

    def text(self, start: int, end: int) -> None:
        is_latin = self._data[start:end] in _LATIN_NAMES
        self.stack.append(_ONE | _LATIN if is_latin else _ONE)

    def tuple_of(self, number: int) -> None:
        if number > len(self.stack):
            raise IndexError("too few values for a tuple")
        made = _tuple_of(self.stack[-number:], self._limit)
        del self.stack[-number:]
        self.stack.append(made)

    def tuple_from_mark(self, _: int, __: int) -> None:
        made = _tuple_of(self.stack, self._limit)
        self.stack = self._marks.pop()
        self.stack.append(made)

    def call(self, _: int, __: int) -> None:
        arguments, called = self.stack.pop(), self.stack[-1]
        cost = _check_call(called, arguments)
        self._worked(cost)
        self.stack[-1] = cost << _SHIFT

    def persistent(self, _: int, __: int) -> None:
        self._worked(_weight(self.stack[-1]))
        self.stack[-1] = 0

    def set_item(self, _: int, __: int) -> None:
        self._worked(_weight(self.stack[-2]))
        del self.stack[-2:]

    def set_items(self, _: int, __: int) -> None:
        self._worked(sum(map(_weight, self.stack[::2])))
        self.stack = self._marks.pop()


_STEPS: dict[int, Callable[[_Machine, int, int], None]] = {
    _CODES[name]: step
    for name, step in {
        "MARK": _Machine.mark,
        "APPENDS": _Machine.to_mark,
        "APPEND": _Machine.pop,
        "BUILD": _Machine.pop,
        "BINPUT": _Machine.put,
        "LONG_BINPUT": _Machine.put,
        "BINGET": _Machine.get,
        "LONG_BINGET": _Machine.get,
        "GLOBAL": _Machine.name,
        "LONG1": _Machine.long,
        "BINUNICODE": _Machine.text,
        "SHORT_BINSTRING": _Machine.text,
        "TUPLE1": lambda machine, _, __: machine.tuple_of(1),
        "TUPLE2": lambda machine, _, __: machine.tuple_of(2),
        "TUPLE3": lambda machine, _, __: machine.tuple_of(3),
        "TUPLE": _Machine.tuple_from_mark,
        "REDUCE": _Machine.call,
        "NEWOBJ": _Machine.call,
        "BINPERSID": _Machine.persistent,
        "SETITEM": _Machine.set_item,
        "SETITEMS": _Machine.set_items,
    }.items()
}


def _weight(value: int | str) -> int:
    """Return what it costs to hash a value."""
    if isinstance(value, str):
        return 1
    # Tuples count so much that no more are allowed than may all have the same hash.
    return (value >> _SHIFT) + (_MAX_WORK // _MAX_TUPLE_KEYS if value & _DEPTH else 0)


def _tuple_of(values: list[int | str], limit: int) -> int:
    weight, flags, depth, one = 1, 0, 0, 0
    for value in values:
        one = _ONE if isinstance(value, str) else value
        weight += one >> _SHIFT
        flags |= one & (_INTEGER | _SHARED)
        depth = max(depth, one & _DEPTH)
    if weight > limit or depth == _DEPTH:
        raise BadPickleError(
            "it has a tuple that is nested too deeply, or shares its parts so often that it could"
            " not be read to its end"
        )
    return weight << _SHIFT | flags | one & _LATIN | depth + 1


def _check_call(called: int | str, arguments: int | str) -> int:
    """Return what it costs to look at the arguments of a call."""
    if not isinstance(called, str) or isinstance(arguments, str):
        raise BadPickleError("it calls what is no function")
    name = called.rpartition(" ")[2]
    if arguments & _INTEGER and (name == "bytearray" or name.endswith(("Tensor", "Storage"))):
        raise BadPickleError(f"it allocates memory by a number: {called.replace(' ', '.')}")
    if called == _ENCODE and not arguments & _LATIN:
        raise BadPickleError("it has bytes in an unusual encoding")
    if arguments & _SHARED and name in ("set", "frozenset", "Counter", "OrderedDict"):
        raise BadPickleError(f"it makes a {name} of a list that it uses elsewhere, too")
    return arguments >> _SHIFT
