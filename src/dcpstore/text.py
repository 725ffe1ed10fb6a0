"""How results print: a title, aligned rows, sizes, counts, names and ages for people.

And how text that comes from a bucket does: without what a terminal takes for a command, and
without secrets.

Python's garbage collector, kept out of the way where many objects are made that stay.

It walks all objects again each time their number has grown by a quarter, and torch alone
brings a million. For 20,000 tensors that took a third of the CPU time of a load, and two
thirds of opening their metadata.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice

# Secret keys of AWS contain slashes, and a mangled URL has one slash only.
_USERINFO = re.compile(r"(?<=:/)(/?)[^/@:\s]+:[^@\s]*@")
_QUERY = re.compile(r"(https?://[^\s?\"']+)\?([^\s\"')]*)")
_AGES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


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


def size_text(num_bytes: float) -> str:
    """Write a number of bytes: ``"1.5 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def age_text(age_s: float | None) -> str:
    """Write an age in its largest unit: ``"3 d"``; a negative one lies in the future."""
    if age_s is None:
        return "unknown"
    if age_s < 0:
        return f"-{age_text(-age_s)}"
    for unit_s, unit in _AGES:
        if age_s >= unit_s:
            return f"{age_s / unit_s:.0f} {unit}"
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
