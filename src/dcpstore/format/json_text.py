"""JSON that comes from a bucket: parsed within limits, and refused with a reason.

Python's parser takes what no writer makes: a name twice, ``NaN``, and 78 MB of ``[]`` that
become 2 GB of lists. What is larger than its text accounts for is refused before it is parsed.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from typing_extensions import Buffer

from dcpstore.text import collector_paused

_MOST_PER_CHARACTER = 24  # the header of a safetensors file takes 16 with the shortest names
_ALWAYS_ALLOWED_BYTES = 64 << 20
# What CPython takes for one: a list, a dict with a first entry, a string, one more place.
_SIZES = (("[", 64), ("{", 240), ('"', 32), (",", 32))
_MAX = (1 << 63) - 1
_MAX_DIGITS = 400  # more take noticeably quadratic time


def parse_json(text: str | Buffer) -> Any:
    """Return what JSON says, of bytes that may have been made to do harm.

    Takes at most 24 bytes of memory per character, or 64 MiB where that is more.

    Raises:
        ValueError: If it is no JSON by the standard in UTF-8, has a name twice in an object, is
            nested too deeply, or would take more memory than that.
    """
    if not isinstance(text, str):
        text = str(text, "utf-8")
    needed = len(text) + sum(size * text.count(mark) for mark, size in _SIZES)
    if needed > max(_ALWAYS_ALLOWED_BYTES, _MOST_PER_CHARACTER * len(text)):
        raise ValueError(f"{len(text)} bytes of JSON would take about {needed} bytes of memory")
    try:
        with collector_paused():
            return json.loads(
                text,
                object_pairs_hook=_each_once,
                parse_constant=_refuse_constant,
                parse_int=_short_int,
            )
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error


def check_natural(value: object) -> int:
    """Return a number if it is a whole one from 0 to 2**63 - 1, as sizes and offsets are.

    Raises:
        ValueError: If it is anything else; True and 1.0 are no numbers here.
    """
    if type(value) is not int or not 0 <= value <= _MAX:
        is_long = type(value) is int and value.bit_length() > 1000  # repr would be slow or refused
        text = f"{value:#x}" if is_long else repr(value)
        raise ValueError(f"{text[:40]} is no count from 0 to 2**63 - 1")
    return value


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"{name[:200]!r} is there twice")
            seen.add(name)
    return found


def _short_int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:  # which take quadratic time
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
