"""Times and tables of the command line. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone

from dcpstore.text import printable

__all__ = ["format_age", "format_time", "table"]

_AGES = ((365 * 86400, "y"), (86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def format_age(when: datetime | None, now: datetime) -> str:
    """Return how long ago something was, such as ``3 d``; a dash where unknown."""
    if when is None:
        return "-"
    seconds = (now - when).total_seconds()
    for unit_s, unit in _AGES:
        if seconds >= unit_s:
            return f"{int(seconds // unit_s)} {unit}"
    return "now"


def format_time(when: datetime | None) -> str | None:
    """Return a time in ISO 8601 and UTC, for documents."""
    if when is None:
        return None
    return when.astimezone(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")


def table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()
) -> Iterator[str]:
    """Yield the lines of a table with aligned columns.

    Args:
        header: Titles of the columns.
        rows: Their cells.
        right: Columns aligned to the right.
    """
    lines = [list(header), *(list(map(printable, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    to_right = frozenset(right)
    for line in lines:
        cells = (
            cell.rjust(width) if number in to_right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()
