"""The numbers that dcpstore is built to, and whether a run shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.figures import Row, best_other, mid, of

__all__ = ["targets"]

MIB = 1 << 20
_BUDGET_BYTES = 256 * MIB
Judged = tuple[str, bool]


def targets(rows: list[Row]) -> Iterator[str]:
    """Yield a table of every target that the rows tell of."""
    by_name = {row["name"]: row for row in rows}
    yield "| target (dcpstore on obstore) | measured | met |"
    yield "| --- | --- | --- |"
    for (name, *systems), text, judge in _TARGETS:
        row = by_name.get(name)
        if row is None or any(of(row, one) is None for one in systems):
            continue
        value, is_met = judge(row)
        yield f"| {text} | {value} | {'yes' if is_met else 'no'} |"


def _mid(row: Row, system: str, figure: str) -> float:
    runs = of(row, system)
    assert runs is not None
    return mid(runs, figure)


def _speedup(row: Row, least: float) -> Judged:
    ratio = _mid(row, "stock", "wall_s") / _mid(row, "ours", "wall_s")
    return f"{ratio:.1f}x", ratio >= least


def _over_peers(row: Row, least: float) -> Judged:
    best = best_other(row, peers_only=True)
    if best is None:
        return "no peer was measured", False
    ratio = best[1] / _mid(row, "ours", "wall_s")
    return f"{ratio:.1f}x ({best[0]})", ratio >= least


def _of_bare(row: Row, most: float) -> Judged:
    ratio = _mid(row, "ours", "wall_s") / _mid(row, "bare", "wall_s")
    return f"{ratio:.2f}x", ratio <= most


def _cpu(row: Row, limit: str = "bare") -> Judged:
    gib = row["num_bytes"] / 1024 / MIB
    ours, bare = (_mid(row, name, "cpu_s") / gib for name in ("ours", limit))
    return f"{ours:.2f} / {bare:.2f} s per GiB = {ours / bare:.2f}x", ours <= 1.3 * bare


def _peak(row: Row) -> Judged:
    extra = max(run["extra_bytes"] for run in row["runs"]["ours"])
    return f"{extra / MIB:.0f} MiB at most", extra <= 1.05 * _BUDGET_BYTES


def _fetched(row: Row, most: float, system: str = "ours") -> Judged:
    ratio = _mid(row, system, "data_bytes_out") / _mid(row, system, "needed_bytes")
    return f"{ratio:.3f}x", ratio <= most


def _in_flight(row: Row) -> Judged:
    count = _mid(row, "ours", "max_in_flight")
    return f"{count:.0f}", count >= 16


def _asked(row: Row, *operations: str) -> Judged:
    counts = row["runs"]["ours"][-1]["requests"]
    total = sum(counts.get(one, 0) for one in operations)
    return str(total), total == 0


def _scalars(row: Row, system: str) -> Judged:
    wall = _mid(row, system, "wall_s")
    gets = row["runs"][system][-1]["requests"].get("GetObject data", 0)
    return f"{wall:.2f} s, {gets} data GETs", wall < 1 and not gets


def _lost(row: Row) -> Judged:
    ours = _mid(row, "ours", "lost_s")
    best = best_other(row)
    assert best is not None
    return f"{ours:.2f} s, {best[1]:.2f} s ({best[0]})", ours <= best[1]


_LISTS = ("ListObjects", "HeadObject", "HeadBucket")
_REMOVALS = ("CopyObject", "DeleteObject", "DeleteObjects")
_TARGETS: tuple[tuple[tuple[str, ...], str, Callable[[Row], Judged]], ...] = (
    (("save", "stock", "ours"), "save 1 GiB: >= 5x faster than stock", lambda r: _speedup(r, 5)),
    (("save", "ours"), "save: >= 1.5x faster than the best peer", lambda r: _over_peers(r, 1.5)),
    (("save", "ours"), "save: extra peak memory <= 256 MiB + 5%", _peak),
    (
        ("save", "ours"),
        "save: no LIST, HEAD, COPY, DELETE",
        lambda r: _asked(r, *_LISTS, *_REMOVALS),
    ),
    (("load", "stock", "ours"), "load 1 GiB: >= 10x faster than stock", lambda r: _speedup(r, 10)),
    (("load", "ours"), "load: >= 1.5x faster than the best peer", lambda r: _over_peers(r, 1.5)),
    (("load", "ours"), "load: extra peak memory <= 256 MiB + 5%", _peak),
    (("load", "ours"), "load: no LIST, no HEAD", lambda r: _asked(r, *_LISTS)),
    (
        ("save-fast", "bare", "ours"),
        "save, near: <= 1.1x of bare's time",
        lambda r: _of_bare(r, 1.1),
    ),
    (("save-fast", "bare", "ours"), "save, near: client CPU <= 1.3x of bare's", _cpu),
    (
        ("save-fast", "bare-crc", "ours"),
        "save, near: client CPU <= 1.3x of bare's with CRC32C",
        lambda r: _cpu(r, "bare-crc"),
    ),
    (
        ("load-fast", "bare", "ours"),
        "load, near: <= 1.1x of bare's time",
        lambda r: _of_bare(r, 1.1),
    ),
    (("load-fast", "bare", "ours"), "load, near: client CPU <= 1.3x of bare's", _cpu),
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
    *(
        (
            (f"{shape}-{ranks}", "ours-shared"),
            f"{shape} {ranks.replace('-', ' to ')} ranks: fetched <= 1.05 x needed",
            lambda r: _fetched(r, 1.05, "ours-shared"),
        )
        for shape in ("rows", "columns")
        for ranks in ("4-2", "2-4")
    ),
    (
        ("load-replicated", "ours-shared"),
        "8 ranks that want the same: fetched <= 1.02 x unique",
        lambda r: _fetched(r, 1.02, "ours-shared"),
    ),
    (("train", "ours"), "background save: no more training lost than by others", _lost),
    (
        ("load-scalars", "ours-shared"),
        "20,000 scalars, dcpstore.load: < 1 s, no data GET",
        lambda r: _scalars(r, "ours-shared"),
    ),
    (
        ("load-scalars", "ours"),
        "20,000 scalars, dcp.load: < 1 s, no data GET",
        lambda r: _scalars(r, "ours"),
    ),
)
