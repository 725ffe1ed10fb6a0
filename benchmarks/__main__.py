"""Run the benchmark: ``python -m benchmarks [--quick] [--only NAME ...] [--publish]``."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.link import Link
from benchmarks.plot import page, plot
from benchmarks.processes import Client, GoogleServer, Server
from benchmarks.report import publish, render, renew, to_json
from benchmarks.running import Bench
from benchmarks.scenarios import LINKS, SCENARIOS, Scenario
from benchmarks.systems import SYSTEMS, is_installed
from benchmarks.tls import has_terminator

ROOT = Path(__file__).parent
RESULTS = {scheme: ROOT / "results" / f"{scheme}.json" for scheme in ("https", "http")}
PAGE = ROOT.parent / "docs" / "performance.md"
PLOT = ROOT.parent / "docs" / "performance.svg"
_PACKAGES = (
    *("torch", "obstore", "s3fs", "fsspec", "numpy"),
    *("s3torchconnector", "multi-storage-client"),
)


def _machine() -> dict[str, Any]:
    return {
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    names = [scenario.name for scenario in SCENARIOS]
    parser.add_argument("--only", nargs="+", choices=names, help="some rows (default: all)")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), help="some systems")
    parser.add_argument("--repeats", type=int, help="3, or 1 if quick")
    parser.add_argument("--scale", type=float, default=1.0, help="times the size of all states")
    parser.add_argument("--link", choices=list(LINKS), help="instead of the link of each row")
    parser.add_argument("--mb-per-s", type=float, help="of one connection, instead; 0: any")
    parser.add_argument("--latency-ms", type=float, help="of each request, instead")
    parser.add_argument(
        "--endpoint", help="a real S3 server's; AWS_ACCESS_KEY_ID and ..._SECRET_... are used"
    )
    parser.add_argument("--http", action="store_true", help="without TLS")
    parser.add_argument("--bucket", default="bench", help="on that server; it has to exist")
    parser.add_argument("--quick", action="store_true", help="tiny states, once: a smoke test")
    parser.add_argument("--output", type=Path, help="JSON to write")
    parser.add_argument("--plot", type=Path, help="SVG or HTML to write")
    parser.add_argument(
        "--publish",
        action="store_true",
        help="write results/, and what docs/ shows of them; with --only renew some rows",
    )
    return parser.parse_args(arguments)


def _chosen(given: argparse.Namespace) -> list[Scenario]:
    here = {name for name, system in SYSTEMS.items() if is_installed(system)}
    for name in sorted(set(given.systems or SYSTEMS) - here):
        print(f"{name} is left out: {SYSTEMS[name].lacking} is not installed")
    chosen = []
    for scenario in SCENARIOS:
        if given.only and scenario.name not in given.only:
            continue
        one = scenario.quick() if given.quick else scenario.scaled(given.scale)
        wanted = [s for s in one.systems if s in here and s in (given.systems or SYSTEMS)]
        wanted = [s for s in wanted if not one.target or one.target in SYSTEMS[s].converters]
        chosen.append(replace(one, systems=tuple(wanted)))
    return chosen


def _link(given: argparse.Namespace, scenario: Scenario) -> Link:
    link = LINKS[given.link or scenario.link]
    if given.quick:
        link = replace(link, latency_s=0.002, jitter_s=0.0, slow_s=link.slow_s / 10)
    if given.latency_ms is not None:
        link = replace(link, latency_s=given.latency_ms / 1000, jitter_s=0.0)
    if given.mb_per_s is not None:
        link = replace(link, bytes_per_s=given.mb_per_s * 1e6)
    return link


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was chosen, write the JSON, print the tables."""
    given = _parse(arguments)
    machine, rows = _machine(), []
    key = os.environ.get("AWS_ACCESS_KEY_ID", "test") if given.endpoint else "test"
    secret = os.environ.get("AWS_SECRET_ACCESS_KEY", "test") if given.endpoint else "test"
    chosen = _chosen(given)
    is_secure = not given.http and has_terminator()
    if not (given.http or is_secure):
        print("plain HTTP: there is no nginx that takes TLS off (nginx-light, libnginx-mod-stream)")
    with ExitStack() as stack:
        near = Server(given.bucket, key, secret, given.endpoint, is_secure=is_secure)
        servers: dict[str, Server | GoogleServer] = {"s3": stack.enter_context(near)}
        client = stack.enter_context(Client(near.environment))
        if any(scenario.store == "gs" for scenario in chosen):
            servers["gs"] = stack.enter_context(GoogleServer())
        for scenario in chosen:
            link, bench = _link(given, scenario), Bench(servers[scenario.store], client)
            runs = bench.run(scenario, link, repeats=given.repeats or (1 if given.quick else 3))
            about = {**asdict(scenario), "link_name": scenario.link, "link": asdict(link)}
            rows.append({**about, "runs": runs})
    words = sys.argv[1:] if arguments is None else arguments
    results = {
        "command": shlex.join(["python", "-m", "benchmarks", *words]),
        "machine": machine,
        "is_quick": given.quick,
        "server": given.endpoint or "benchmarks.server",
        "scheme": "https" if is_secure else "http",
        "rows": rows,
    }
    print(render(results))
    if given.output:
        given.output.write_text(to_json(results))
    if given.plot:
        drawn = page(results) if given.plot.suffix == ".html" else plot(results)
        given.plot.write_text(drawn)
    if given.publish:
        _publish(results, renews=bool(given.only))
    return int(any(_has_failed(row) for row in rows))


def _publish(results: dict[str, Any], *, renews: bool) -> None:
    """Keep the results of their scheme, and show those of both."""
    file = RESULTS[results["scheme"]]
    if renews and file.exists():
        results = renew(json.loads(file.read_text()), results)
    file.parent.mkdir(exist_ok=True)
    file.write_text(to_json(results))
    kept = {name: json.loads(one.read_text()) for name, one in RESULTS.items() if one.exists()}
    shown = kept.get("https", results)
    publish(PAGE, shown, kept.get("http") if "https" in kept else None)
    PLOT.write_text(plot(shown))


def _has_failed(row: dict[str, Any]) -> bool:
    return any("failed" in run for runs in row["runs"].values() for run in runs)


if __name__ == "__main__":
    sys.exit(main())
