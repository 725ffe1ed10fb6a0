"""Text: how results print, and how text that comes from a bucket is taken.

For people: a title, aligned rows, sizes, counts, names and ages. From a bucket: printed without
what a terminal takes for a command, and parsed as JSON within limits. Python's parser takes what
no writer makes: a name twice, ``NaN``, and 78 MB of ``[]`` that become 2 GB of lists. What is
larger than its text accounts for is refused before it is parsed.

`collector_paused` keeps Python's garbage collector out of the way where many objects are made
that stay. It walks all objects again each time their number has grown by a quarter, and torch
alone brings a million. For 20,000 tensors that took a third of the CPU time of a load, and two
thirds of opening their metadata.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NoReturn

from typing_extensions import Buffer

# Secret keys of AWS contain slashes, and a mangled URL has one slash only.
_USERINFO = re.compile(r"(?<=:/)(/?)[^/@:\s]+:[^@\s]*@")
_QUERY = re.compile(r"(https?://[^\s?\"']+)\?([^\s\"')]*)")
# A server's answer may repeat the request: its headers, its signature, its token.
_NAMED_SECRET = re.compile(
    r"((?:authorization|token|signature|secret|password|credential|api-?key|\bsig\b)[\w.-]*"
    r"[\"']?\s*(?:[:=]|\bis\b)\s*[\"']?)"
    r"((?:bearer|basic|sharedkey|aws4-hmac-sha256)\s+[^\r\n<>\"']+|[^\s\"',;&<>]+)",
    re.IGNORECASE,
)
_ELEMENT = re.compile(r"<([\w-]+)>([^<>]*)</\1>")
_HARMLESS_ELEMENTS = frozenset(
    {"Code", "Message", "RequestId", "HostId", "Resource", "Key", "BucketName", "Bucket", "Region"}
    | {"Condition", "Endpoint", "ServerTime", "RequestTime", "UploadId", "Method", "ArgumentName"}
)
_HARMLESS_PARAMETERS = frozenset(
    {"uploadId", "uploads", "partNumber", "comp", "restype", "list-type"}
)
_LONG = re.compile(r"[A-Za-z0-9+/=_-]{40,}")
_AGES = ((365 * 86400, "y"), (86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_MOST_PER_CHARACTER = 24  # the header of a safetensors file takes 16 with the shortest names
_ALWAYS_ALLOWED_BYTES = 64 << 20
# What CPython takes for one: a list, a dict with a first entry, a string, one more place.
_SIZES = (("[", 64), ("{", 240), ('"', 32), (",", 32))
_MAX = (1 << 63) - 1
_MAX_DIGITS = 400  # more take noticeably quadratic time


def printable(text: str, *, keep: str = "") -> str:
    r"""Escape what does not print, as `repr` does: ``"a\x1b[2J"``.

    A key or a message of a server may hold commands to a terminal (``ESC``), new lines that look
    like another message, marks that turn the direction of writing around, and halves of
    characters that no stream takes. What is escaped already stays as it is.

    Args:
        text: Where such a thing may be.
        keep: Characters to leave, such as the line ends of a message of several lines.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else repr(char)[1:-1] for char in text
    )


def redact(text: str, *, keep: Collection[str] = ()) -> str:
    """Blank out ``user:password@`` and the query strings of web addresses in a text.

    Args:
        text: A URL, or a message with some.
        keep: Parameters of queries to leave, which are no secrets.
    """

    def shortened(match: re.Match[str]) -> str:
        kept = [one for one in match[2].split("&") if one.partition("=")[0] in keep]
        return f"{match[1]}?{'&'.join([*kept, '...'])}"

    return _QUERY.sub(shortened, _USERINFO.sub(r"\1***@", text))


def without_secrets(text: str) -> str:
    """Blank out what may be a secret in a message: by its name, its place, or its look."""
    text = redact(text, keep=_HARMLESS_PARAMETERS)
    text = _ELEMENT.sub(_element_without_secrets, text)
    return _LONG.sub(_long_without_secrets, _NAMED_SECRET.sub(r"\1***", text))


def _element_without_secrets(match: re.Match[str]) -> str:
    return match[0] if match[1] in _HARMLESS_ELEMENTS else f"<{match[1]}>***</{match[1]}>"


def _long_without_secrets(match: re.Match[str]) -> str:
    """Keys, paths and digests are long, too; but their words are short, or of one case."""
    text = match[0]
    is_mixed = all(any(test(char) for char in text) for test in (str.isupper, str.islower))
    words = [word for word in re.split(r"[/_-]", text) if word]
    is_token = is_mixed and any(map(str.isdigit, text)) and len(text) > 20 * len(words)
    return "***" if is_token else text


def size_text(num_bytes: float) -> str:
    """Write a number of bytes: ``"1.5 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def age_text(age_s: float) -> str:
    """Write an age in whole numbers of its largest unit: ``"3 d"``; a negative one is ahead."""
    if age_s < 0:
        return f"-{age_text(-age_s)}"
    for unit_s, unit in _AGES:
        if age_s >= unit_s:
            return f"{age_s // unit_s:.0f} {unit}"
    return "0 s"


def count_text(number: int, noun: str) -> str:
    """Write a number with its noun: ``"1 object"``, ``"2 objects"``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def names_text(names: Collection[str], most: int = 3) -> str:
    """Write how many names there are, and the first of them: ``"5: a, b, c and 2 more"``."""
    if not names:
        return "none"
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{len(names)}: {', '.join(map(printable, islice(names, most)))}{more}"


def listed(texts: Sequence[str], most: int = 8) -> str:
    """Join texts for a message, the first few of them: ``"a, b and 3 more"``."""
    more = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {more} more" if more > 0 else "")


def indented(lines: Sequence[str], most: int = 10) -> str:
    """Put lines below a message, the first few of them, each behind a line end."""
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return "".join(f"\n  {line}" for line in [*lines[:most], *more])


def times(seconds: Mapping[str, float]) -> dict[str, str]:
    """Return one row for `table` per phase: ``{"plan time": "0.02 s"}``."""
    return {f"{name} time": f"{value:.2f} s" for name, value in seconds.items()}


def table(title: str, rows: Mapping[str, str]) -> str:
    """Write a title and one aligned line per row."""
    width = max(map(len, rows), default=0)
    lines = (f"  {name:<{width}}  {value}" for name, value in rows.items())
    return "\n".join(map(printable, (title, *lines)))


@contextmanager
def collector_paused() -> Iterator[None]:
    """Make objects without looking among them for garbage. For seconds, not for hours.

    Any thread, nested or not: whoever saw the collector on turns it on again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# --- JSON from a bucket ------------------------------------------------------------------


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
