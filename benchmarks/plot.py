"""From results to one SVG: a group of bars per row, longer is slower, on a logarithmic scale."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.figures import Row, headline, mid, of
from benchmarks.systems import SYSTEMS

__all__ = ["page", "plot"]

_COLOURS = {
    "stock": "#9aa0a6",
    "stock-8": "#5f6368",
    "stock-hf": "#bdc1c6",
    "s3torch": "#f29900",
    "s3torch-4": "#f29900",
    "msc": "#76b900",
    "msc-8": "#76b900",
    "ours": "#1a73e8",
    "ours-fsspec": "#8ab4f8",
    "ours-once": "#c6dafc",
    "ours-8": "#aecbfa",
    "ours-128": "#669df6",
    "ours-shared": "#174ea6",
    "bare": "#202124",
    "bare-crc": "#3c4043",
    "floor-8": "#80868b",
    "floor-32": "#5f6368",
}
_LEFT, _WIDTH, _RIGHT = 190, 560, 90
_BAR, _GAP, _TOP = 11, 12, 64
_LEAST_S = 0.02


def plot(results: dict[str, Any]) -> str:
    """Return an SVG that needs nothing else."""
    rows = [row for row in results["rows"] if any(of(row, name) for name in SYSTEMS)]
    longest = max((s for row in rows for _, s in _bars(row)), default=1.0)
    most_s = 10 ** math.ceil(math.log10(max(longest, 10 * _LEAST_S)))
    marks, at = [], _TOP
    for row in rows:
        marks += _group(row, at, most_s)
        at += _BAR * len(_bars(row)) + _GAP
    width = _LEFT + _WIDTH + _RIGHT
    height = at + 20
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="10">'
    )
    paper = f'<rect width="{width}" height="{height}" fill="white"/>'
    return "\n".join([head, paper, *_legend(rows), *_axis(at, most_s), *marks, "</svg>\n"])


def page(results: dict[str, Any]) -> str:
    """Return the same as an HTML page that needs nothing else."""
    title = escape(f"dcpstore: {results['command']}, {results['machine']['date']}")
    return f'<!doctype html><meta charset="utf-8"><title>{title}</title>\n{plot(results)}'


def _bars(row: Row) -> list[tuple[str, float]]:
    found = ((name, of(row, name)) for name in SYSTEMS)
    return [(name, mid(runs, headline(row))) for name, runs in found if runs]


def _x(seconds: float, most_s: float) -> float:
    share = math.log(max(seconds, _LEAST_S) / _LEAST_S) / math.log(most_s / _LEAST_S)
    return _LEFT + _WIDTH * share


def _group(row: Row, top: int, most_s: float) -> Iterator[str]:
    bars = _bars(row)
    middle = top + _BAR * len(bars) / 2 + 4
    yield f'<text x="{_LEFT - 8}" y="{middle:.0f}" text-anchor="end">{escape(row["name"])}</text>'
    for number, (name, seconds) in enumerate(bars):
        y, end = top + number * _BAR, _x(seconds, most_s)
        yield (
            f'<rect x="{_LEFT}" y="{y}" width="{max(end - _LEFT, 1):.1f}" height="{_BAR - 1}"'
            f' fill="{_COLOURS[name]}"><title>{escape(SYSTEMS[name].label)}</title></rect>'
        )
        yield f'<text x="{end + 4:.1f}" y="{y + 9}" font-size="9">{seconds:.2f} s</text>'


def _axis(bottom: int, most_s: float) -> Iterator[str]:
    ticks = [10.0**power for power in range(-1, round(math.log10(most_s)) + 1)]
    for seconds in ticks:
        x = _x(seconds, most_s)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{bottom}" stroke="#dadce0"/>'
        yield f'<text x="{x:.1f}" y="{_TOP - 12}" text-anchor="middle">{seconds:g} s</text>'


def _legend(rows: list[Row]) -> Iterator[str]:
    shown = [name for name in SYSTEMS if any(of(row, name) for row in rows)]
    for number, name in enumerate(shown):
        x, y = 12 + number % 4 * 205, 8 + number // 4 * 16
        yield f'<rect x="{x}" y="{y}" width="10" height="10" fill="{_COLOURS[name]}"/>'
        yield f'<text x="{x + 15}" y="{y + 9}">{escape(SYSTEMS[name].label)}</text>'
