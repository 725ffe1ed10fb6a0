"""The numbers that dcpstore is built to, and whether a run shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.figures import Row, best_other, has_failed, mid, of

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


def _wall(row: Row, limit: str, most: float) -> Judged:
    ratio = _mid(row, "ours", "wall_s") / _mid(row, limit, "wall_s")
    return f"{ratio:.2f}x", ratio <= most


def _cpu(row: Row, limit: str, most: float, system: str = "ours") -> Judged:
    gib = row["num_bytes"] / 1024 / MIB
    ours, other = (_mid(row, name, "cpu_s") / gib for name in (system, limit))
    return f"{ours:.2f} / {other:.2f} s per GiB = {ours / other:.2f}x", ours <= most * other


def _peak(row: Row, most_bytes: int) -> Judged:
    extra = max(run["extra_bytes"] for run in row["runs"]["ours"])
    return f"{extra / MIB:.0f} MiB at most", extra <= most_bytes


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


def _blocked(row: Row) -> Judged:
    ratio = _mid(row, "ours-managed", "blocked_s") / _mid(row, "ours-managed", "copy_s")
    return f"{ratio:.2f}x", ratio <= 1.3


def _slowed(row: Row) -> Judged:
    ours = _mid(row, "ours-managed", "slowed_s")
    names = [name for name in row["runs"] if not name.startswith("ours")]
    others = {name: _mid(row, name, "slowed_s") for name in names if not has_failed(of(row, name))}
    best = min(others, key=others.__getitem__)
    return f"{ours:.2f} s, {others[best]:.2f} s ({best})", ours <= 0.5 * others[best]


_LISTS = ("ListObjects", "HeadObject", "HeadBucket")
_REMOVALS = ("CopyObject", "DeleteObject", "DeleteObjects")
_Target = tuple[tuple[str, ...], str, Callable[[Row], Judged]]


def _of_a_load(name: str, where: str, floor: str) -> tuple[_Target, ...]:
    """Say how near a load of 1 GiB comes to a loop in C with as many connections."""
    return (
        (
            (name, "ours", floor),
            f"load, {where}: client CPU <= 1.3x of the floor's (C and CRC32C)",
            lambda r: _cpu(r, floor, 1.3),
        ),
        (
            (name, "ours", floor),
            f"load, {where}: <= 1.15x of the floor's time",
            lambda r: _wall(r, floor, 1.15),
        ),
        (
            (name, "ours", "ours-8"),
            f"load, {where}: client CPU of 32 requests <= 1.05x of 8",
            lambda r: _cpu(r, "ours-8", 1.05),
        ),
        (
            (name, "ours-128", "ours-8"),
            f"load, {where}: client CPU of 128 requests <= 1.05x of 8",
            lambda r: _cpu(r, "ours-8", 1.05, "ours-128"),
        ),
        ((name, "ours"), f"load, {where}: >= 1.5x faster than the best peer", _over_peers_by(1.5)),
        (
            (name, "ours"),
            f"load, {where}: extra peak memory <= 16 MiB",
            lambda r: _peak(r, 16 * MIB),
        ),
    )


def _over_peers_by(least: float) -> Callable[[Row], Judged]:
    return lambda row: _over_peers(row, least)


_TARGETS: tuple[_Target, ...] = (
    (("save", "stock", "ours"), "save 1 GiB: >= 5x faster than stock", lambda r: _speedup(r, 5)),
    (("save", "ours"), "save, far: >= 1.7x faster than the best peer", _over_peers_by(1.7)),
    (("save-fast", "ours"), "save, near: >= 1.7x faster than the best peer", _over_peers_by(1.7)),
    (
        ("save", "ours"),
        "save: extra peak memory <= 256 MiB + 5%",
        lambda r: _peak(r, int(1.05 * _BUDGET_BYTES)),
    ),
    (
        ("save", "ours"),
        "save: no LIST, HEAD, COPY, DELETE",
        lambda r: _asked(r, *_LISTS, *_REMOVALS),
    ),
    (
        ("save", "bare-crc", "ours"),
        "save, far: client CPU <= 1.2x of bare's with CRC32C",
        lambda r: _cpu(r, "bare-crc", 1.2),
    ),
    (
        ("save-fast", "bare-crc", "ours"),
        "save, near: client CPU <= 1.2x of bare's with CRC32C",
        lambda r: _cpu(r, "bare-crc", 1.2),
    ),
    (
        ("save-fast", "bare", "ours"),
        "save, near: <= 1.1x of bare's time",
        lambda r: _wall(r, "bare", 1.1),
    ),
    (("load", "stock", "ours"), "load 1 GiB: >= 10x faster than stock", lambda r: _speedup(r, 10)),
    (("load", "ours"), "load: no LIST, no HEAD", lambda r: _asked(r, *_LISTS)),
    *_of_a_load("load", "far", "floor-32"),
    *_of_a_load("load-fast", "near", "floor-8"),
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
    *(
        entry
        for name in ("train", "train-4")
        for entry in (
            ((name, "ours-managed"), f"{name}: blocked for <= 1.3 x a warm copy", _blocked),
            ((name, "ours-managed"), f"{name}: steps slowed by <= half of the best peer", _slowed),
        )
    ),
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
