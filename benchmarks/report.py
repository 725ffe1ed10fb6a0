"""From results to Markdown: one table that sums up, the targets, and a table per row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.figures import (
    Row,
    Runs,
    best_of_ours,
    best_other,
    has_failed,
    headline,
    mid,
    of,
    spread,
)
from benchmarks.scenarios import SCENARIOS
from benchmarks.systems import SYSTEMS
from benchmarks.targets import targets

__all__ = ["publish", "render", "renew", "to_json"]

MIB = 1 << 20
BEGIN, END = "<!-- begin: python -m benchmarks -->", "<!-- end -->"


def to_json(results: dict[str, Any]) -> str:
    """Return JSON with a line per measurement."""
    about = {name: value for name, value in results.items() if name != "rows"}
    text = json.dumps({**about, "rows": []}, indent=1).removesuffix('"rows": []\n}')
    rows = []
    for row in results["rows"]:
        head = json.dumps({**row, "runs": {}}).removesuffix('"runs": {}}')
        runs = [
            f"   {json.dumps(name)}: [\n    " + ",\n    ".join(map(json.dumps, one)) + "]"
            for name, one in row["runs"].items()
        ]
        rows.append(f'  {head}"runs": {{\n' + ",\n".join(runs) + "}}")
    return f'{text}"rows": [\n' + ",\n".join(rows) + "]\n}\n"


def publish(page: Path, results: dict[str, Any], plain: dict[str, Any] | None) -> None:
    """Replace what lies between the markers of a page.

    Args:
        page: Markdown.
        results: Of a run over https.
        plain: Of one over plain HTTP, shown beside it.
    """
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{render(results, plain)}\n{END}{after}")


def renew(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Put rows of a later run in the place of those before, and say which they are."""
    rows = {row["name"]: row for row in (*before["rows"], *now["rows"])}
    later = {name: now[name] for name in ("command", "machine", "scheme") if name in now}
    later["rows"] = [row["name"] for row in now["rows"]]
    return {
        **before,
        "rows": [rows[one.name] for one in SCENARIOS if one.name in rows],
        "renewed": [*before.get("renewed", []), later],
    }


def render(results: dict[str, Any], plain: dict[str, Any] | None = None) -> str:
    """Return the tables."""
    beside = {row["name"]: row for row in plain["rows"]} if plain else {}
    lines = [f"{_about(results)}.", *_about_renewed(results)]
    if plain:
        lines += ["", f"Beside it: {_about(plain)}.", *_about_renewed(plain)]
    lines += ["", *_summary(results["rows"], beside)]
    if not results["is_quick"]:
        lines += ["", *targets(results["rows"])]
    for row in results["rows"]:
        lines += ["", *_table(row)]
    if plain:
        lines += ["", "### All rows over plain HTTP", "", *_summary(plain["rows"], {})]
    return "\n".join(lines) + "\n"


_SCHEMES = {"http": "plain HTTP", "https": "https (TLS 1.3)"}


def _about(run: dict[str, Any]) -> str:
    machine = run["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return (
        f"`{run['command']}`, {machine['date']}, over {_SCHEMES[run.get('scheme', 'http')]}:"
        f" {machine['cores']} shared cores that serve"
        f" client and server alike (load average {machine['load_before']:.1f} before),"
        f" Python {machine['python']}, {versions}"
    )


def _about_renewed(results: dict[str, Any]) -> Iterator[str]:
    """Tell which rows are of later runs; each row is of one run, systems taking turns."""
    for run in results.get("renewed", []):
        yield ""
        yield f"{', '.join(f'`{name}`' for name in run['rows'])}: {_about(run)}."


# --- all rows -----------------------------------------------------------------------------


def _summary(rows: list[Row], beside: dict[str, Row]) -> Iterator[str]:
    yield (
        "Seconds, medians; of `train` the training time lost. Ahead: how many times faster"
        " dcpstore is than the best of stock and the peers."
        + (" The last two columns are over plain HTTP." if beside else "")
    )
    yield ""
    names = [
        name
        for name, system in SYSTEMS.items()
        if not system.is_variant and any(name in row["runs"] for row in rows)
    ]
    heads = ["row", *(SYSTEMS[name].label for name in names), "ahead"]
    heads += ["http: dcpstore", "ahead"] if beside else []
    yield f"| {' | '.join(heads)} |"
    yield "|" + " --- |" * len(heads)
    for row in rows:
        cells = [f"`{row['name']}`", *(_seconds(row, name) for name in names), _ahead(row)]
        if beside:
            other = beside.get(row["name"])
            found = other and best_of_ours(other)
            cells += [f"{found[1]:.2f}", _ahead(other)] if other and found else ["", ""]
        yield f"| {' | '.join(cells)} |"


def _seconds(row: Row, name: str) -> str:
    if name not in row["runs"]:
        return ""
    runs = of(row, name)
    return f"{mid(runs, headline(row)):.2f}" if runs else "fails"


def _ahead(row: Row) -> str:
    best, ours = best_other(row), best_of_ours(row)
    return f"{best[1] / max(ours[1], 1e-3):.1f}x" if best and ours else ""


# --- one row ------------------------------------------------------------------------------


def _table(row: Row) -> Iterator[str]:
    yield f"### {row['title']} (`{row['name']}`)"
    yield ""
    about = _about_link(row["link"]) if row["store"] == "s3" else "Nothing is delayed or counted."
    yield f"{about}{_about_ranks(row)}"
    yield ""
    heads = ["system", "wall s", "of stock", *_TRAIN_HEADS] if _is_train(row) else _HEADS
    heads = [*heads, _moved_head(row), "requests", "in flight", "server CPU s"]
    yield f"| {' | '.join(heads)} |"
    yield "|" + " --- |" * len(heads)
    for name, runs in row["runs"].items():
        if has_failed(runs):
            cells = [SYSTEMS[name].label, "fails", *[""] * (len(heads) - 2)]
        else:
            cells = _cells(row, name, runs)
        yield f"| {' | '.join(cells)} |"


_HEADS = ["system", "wall s", "of stock", "client CPU s", "extra peak MiB"]
_TRAIN_HEADS = [
    "training lost s",
    "blocked s",
    "of a warm copy",
    "steps slowed by s",
    "step ms, alone to beside",
    "slowest step ms",
    "client CPU s",
    "extra peak MiB",
]


def _is_train(row: Row) -> bool:
    return bool(row["action"] == "train")


def _about_link(link: dict[str, float]) -> str:
    if not link["latency_s"] and not link["bytes_per_s"]:
        text = "No latency, no cap."
    else:
        least, jitter = 1000 * link["latency_s"], 1000 * link["jitter_s"]
        text = f"First byte after {least:g}" + (f" to {least + jitter:g}" if jitter else "") + " ms"
        rate = link["bytes_per_s"] / 1e6
        text += f", {rate:g} MB/s per connection and direction." if rate else ", no cap."
    if link["slow_share"]:
        text += f" {link['slow_share']:.0%} of the answers {link['slow_s']:g} s later."
    if link["burst_s"]:
        text += f" 503 for {link['burst_s']:g} s out of every {link['burst_every_s']:g} s."
    return text


def _about_ranks(row: Row) -> str:
    if row["num_ranks"] == 1:
        return ""
    return f" {row['num_ranks']} ranks: the slowest's seconds, all CPU seconds, the largest peak."


def _moved_head(row: Row) -> str:
    return {
        "load": "MiB fetched (x needed)",
        "convert": "MiB fetched + sent",
    }.get(row["action"], "MiB sent")


def _cells(row: Row, name: str, runs: Runs) -> list[str]:
    stock = of(row, "stock")
    ratio = f"{mid(stock, 'wall_s') / mid(runs, 'wall_s'):.1f}x" if stock else ""
    requests = ", ".join(f"{count} {one}" for one, count in runs[-1]["requests"].items())
    return [
        SYSTEMS[name].label,
        spread(runs, "wall_s"),
        ratio,
        *(_train_cells(runs) if _is_train(row) else ()),
        spread(runs, "cpu_s"),
        f"{mid(runs, 'extra_bytes') / MIB:.0f}",
        _moved(row, runs),
        requests,
        f"{mid(runs, 'max_in_flight'):.0f}",
        f"{mid(runs, 'server_cpu_s'):.2f}",
    ]


def _train_cells(runs: Runs) -> list[str]:
    return [
        spread(runs, "lost_s"),
        f"{mid(runs, 'blocked_s'):.3f}",
        f"{mid(runs, 'blocked_s') / mid(runs, 'copy_s'):.2f}x",
        f"{mid(runs, 'slowed_s'):.2f}",
        f"{1000 * mid(runs, 'step_s'):.1f} to {1000 * mid(runs, 'beside_s'):.1f}",
        f"{1000 * mid(runs, 'worst_s'):.0f}",
    ]


def _moved(row: Row, runs: Runs) -> str:
    if not runs[-1]["is_counted"]:
        return "not counted"
    sent, out = mid(runs, "bytes_in") / MIB, mid(runs, "bytes_out") / MIB
    if row["action"] == "convert":
        return f"{out:.1f} + {sent:.1f}"
    if row["action"] != "load":
        return f"{sent:.1f}"
    return f"{out:.1f} ({out * MIB / mid(runs, 'needed_bytes'):.2f}x)"
