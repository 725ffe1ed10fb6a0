"""Medians and ratios of one row's runs, for tables, targets and plots alike."""

from __future__ import annotations

from statistics import median
from typing import Any

__all__ = [
    "OTHERS",
    "Row",
    "Runs",
    "best_of_ours",
    "best_other",
    "has_failed",
    "headline",
    "mid",
    "of",
    "spread",
]

Row = dict[str, Any]
Runs = list[dict[str, Any]]

_STOCK = ("stock", "stock-8", "stock-hf")
_PEERS = ("s3torch", "s3torch-4", "msc", "msc-8")
OTHERS = (*_STOCK, *_PEERS)  # what one would use instead


def has_failed(runs: Runs) -> bool:
    """Tell whether a system could not do it."""
    return not runs or any("failed" in run for run in runs)


def of(row: Row, system: str) -> Runs | None:
    """Return a system's runs; None if it was not measured or could not do it."""
    runs = row["runs"].get(system)
    return None if runs is None or has_failed(runs) else runs


def mid(runs: Runs, name: str) -> float:
    """Return the median of a figure."""
    return float(median(run[name] for run in runs))


def spread(runs: Runs, name: str) -> str:
    """Return the median with the least and the most."""
    values = [run[name] for run in runs]
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def headline(row: Row) -> str:
    """Name the figure that a row is about."""
    return "lost_s" if row["action"] == "train" else "wall_s"


def best_other(row: Row, *, peers_only: bool = False) -> tuple[str, float] | None:
    """Return the quickest of stock and the peers, and its median; None if there is none."""
    names = _PEERS if peers_only else OTHERS
    found = [(mid(runs, headline(row)), name) for name in names if (runs := of(row, name))]
    if not found:
        return None
    seconds, name = min(found)
    return name, seconds


def best_of_ours(row: Row) -> tuple[str, float] | None:
    """Return what the row shows of dcpstore: its own load where it is measured."""
    for name in ("ours-managed", "ours-shared", "ours", "ours-fsspec"):
        if runs := of(row, name):
            return name, mid(runs, headline(row))
    return None
