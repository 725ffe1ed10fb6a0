"""From results to Markdown: medians with their spread, and the ratios that matter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.systems import SYSTEMS

__all__ = ["publish", "render"]

MIB = 1 << 20
BEGIN, END = "<!-- begin: python -m benchmarks -->", "<!-- end -->"
Row = dict[str, Any]
Runs = list[dict[str, Any]]


def publish(page: Path, results: dict[str, Any]) -> None:
    """Replace what lies between the markers of a page."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{render(results)}\n{END}{after}")


def render(results: dict[str, Any]) -> str:
    """Return the tables."""
    machine = results["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    about = (
        f"`{results['command']}`, {machine['date']}: {machine['cores']} shared cores that serve"
        f" client and server alike, Python {machine['python']}, {versions};"
        f" {results['mb_per_s']:g} MB/s per connection and direction (0: no cap)."
    )
    lines = [about]
    if not results["is_quick"]:
        lines += ["", *_targets(results["rows"])]
    for row in results["rows"]:
        lines += ["", *_table(row)]
    return "\n".join(lines) + "\n"


# --- one row -----------------------------------------------------------------------------


def _table(row: Row) -> Iterator[str]:
    yield f"### {row['title']} (`{row['name']}`, {1000 * row['latency_s']:g} ms)"
    yield ""
    is_save = row["action"] == "save"
    moved = "MiB sent" if is_save else "MiB fetched (x needed)"
    yield (
        f"| system | wall s | of stock | client CPU s | extra peak MiB | {moved}"
        " | requests | in flight | server CPU s |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for name, runs in row["runs"].items():
        stock = row["runs"].get("stock")
        ratio = f"{_mid(stock, 'wall_s') / _mid(runs, 'wall_s'):.1f}x" if stock else ""
        cells = (
            SYSTEMS[name].label,
            _spread(runs, "wall_s"),
            ratio,
            _spread(runs, "cpu_s"),
            f"{_mid(runs, 'extra_bytes') / MIB:.0f}",
            _moved(runs, is_save),
            ", ".join(f"{count} {one}" for one, count in runs[-1]["requests"].items()),
            f"{_mid(runs, 'max_in_flight'):.0f}",
            f"{_mid(runs, 'server_cpu_s'):.2f}",
        )
        yield f"| {' | '.join(cells)} |"


def _moved(runs: Runs, is_save: bool) -> str:
    if is_save:
        return f"{_mid(runs, 'bytes_in') / MIB:.1f}"
    out, needed = _mid(runs, "bytes_out"), _mid(runs, "needed_bytes")
    return f"{out / MIB:.1f} ({out / needed:.2f}x)"


def _mid(runs: Runs, name: str) -> float:
    return float(median(run[name] for run in runs))


def _spread(runs: Runs, name: str) -> str:
    values = [run[name] for run in runs]
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


# --- targets -------------------------------------------------------------------------------


def _targets(rows: list[Row]) -> Iterator[str]:
    by_name = {row["name"]: row for row in rows}
    yield "| target (dcpstore on obstore) | measured | met |"
    yield "| --- | --- | --- |"
    for needs, text, judge in _TARGETS:
        row = by_name.get(needs[0])
        if row is None or any(name not in row["runs"] for name in needs[1:]):
            continue
        value, is_met = judge(row)
        yield f"| {text} | {value} | {'yes' if is_met else 'no'} |"


def _speedup(row: Row, least: float) -> tuple[str, bool]:
    ratio = _mid(row["runs"]["stock"], "wall_s") / _mid(row["runs"]["ours"], "wall_s")
    return f"{ratio:.1f}x", ratio >= least


def _of_bare(row: Row) -> tuple[str, bool]:
    ratio = _mid(row["runs"]["bare"], "wall_s") / _mid(row["runs"]["ours"], "wall_s")
    return f"{ratio:.2f}", ratio >= 0.9


def _cpu(row: Row) -> tuple[str, bool]:
    gib = row["num_bytes"] / 1024 / MIB
    ours, bare = (_mid(row["runs"][name], "cpu_s") / gib for name in ("ours", "bare"))
    return f"{ours:.2f} / {bare:.2f} s per GiB = {ours / bare:.2f}x", ours <= 1.3 * bare


def _peak(row: Row) -> tuple[str, bool]:
    extra = max(run["extra_bytes"] for run in row["runs"]["ours"])
    return f"{extra / MIB:.0f} MiB at most", extra <= 1.05 * 256 * MIB


def _fetched(row: Row, most: float) -> tuple[str, bool]:
    runs = row["runs"]["ours"]
    ratio = _mid(runs, "data_bytes_out") / _mid(runs, "needed_bytes")
    return f"{ratio:.3f}x", ratio <= most


def _in_flight(row: Row) -> tuple[str, bool]:
    count = _mid(row["runs"]["ours"], "max_in_flight")
    return f"{count:.0f}", count >= 16


def _asked(row: Row, *operations: str) -> tuple[str, bool]:
    counts = row["runs"]["ours"][-1]["requests"]
    total = sum(counts.get(one, 0) for one in operations)
    return str(total), total == 0


def _scalars(row: Row) -> tuple[str, bool]:
    wall = _mid(row["runs"]["ours"], "wall_s")
    gets = row["runs"]["ours"][-1]["requests"].get("GetObject data", 0)
    return f"{wall:.2f} s, {gets} data GETs", wall < 1 and not gets


_LISTS = ("ListObjects", "HeadObject", "HeadBucket")
_TARGETS: tuple[tuple[tuple[str, ...], str, Callable[[Row], tuple[str, bool]]], ...] = (
    (("save", "stock", "ours"), "save 1 GiB: >= 5x faster than stock", lambda r: _speedup(r, 5)),
    (("save", "bare", "ours"), "save: >= 0.9 of the bare engine's rate", _of_bare),
    (("save", "bare", "ours"), "save: client CPU <= 1.3 x the bare engine's", _cpu),
    (("save", "ours"), "save: extra peak memory <= 256 MiB + 5%", _peak),
    (
        ("save", "ours"),
        "save: no LIST, HEAD, COPY, DELETE",
        lambda r: _asked(r, *_LISTS, "CopyObject", "DeleteObject", "DeleteObjects"),
    ),
    (("load", "stock", "ours"), "load 1 GiB: faster than stock", lambda r: _speedup(r, 1)),
    (("load", "bare", "ours"), "load: client CPU <= 1.3 x the bare engine's", _cpu),
    (("load", "ours"), "load: extra peak memory <= 256 MiB + 5%", _peak),
    (("load", "ours"), "load: no LIST, no HEAD", lambda r: _asked(r, *_LISTS)),
    (("load-64x4", "stock", "ours"), "load 64 x 4 MiB: >= 10x faster", lambda r: _speedup(r, 10)),
    (("load-64x4", "ours"), "load 64 x 4 MiB: >= 16 requests in flight", _in_flight),
    (("load-shuffled", "ours"), "any order: fetched <= 1.02 x needed", lambda r: _fetched(r, 1.02)),
    (("reshard-rows", "ours"), "rows: fetched <= 1.05 x needed", lambda r: _fetched(r, 1.05)),
    (
        ("reshard-columns-long", "ours"),
        "columns, long runs: fetched <= 1.25 x needed",
        lambda r: _fetched(r, 1.25),
    ),
    (
        ("reshard-columns-short", "ours"),
        "columns, short runs: fetched <= 1.25 x needed",
        lambda r: _fetched(r, 1.25),
    ),
    (("load-scalars", "ours"), "20,000 scalars: < 1 s, no data GET", _scalars),
)
