"""Run the benchmark: ``python -m benchmarks [--quick] [--only NAME ...] [--publish]``."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.client import Job, control
from benchmarks.report import publish, render
from benchmarks.scenarios import SCENARIOS, Scenario
from benchmarks.systems import SYSTEMS

ROOT = Path(__file__).parent
RESULTS = ROOT / "results" / "latest.json"
PAGE = ROOT.parent / "docs" / "performance.md"


class Server:
    """`benchmarks.server` in a process of its own, for as long as the context lasts."""

    def __enter__(self) -> Server:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT.parent,
        )
        assert self._process.stdout is not None
        self.endpoint_url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def set_link(self, latency_s: float, bytes_per_s: float) -> None:
        control(self.endpoint_url, "link", latency_s=latency_s, bytes_per_s=bytes_per_s)

    def forget(self, folder: str) -> None:
        control(self.endpoint_url, "forget", prefix=folder)


class Client:
    """`benchmarks.client`, which forks a process per job, for as long as the context lasts."""

    def __enter__(self) -> Client:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.client"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT.parent,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(self, job: Job) -> dict[str, Any]:
        """Run one measurement in a fresh process.

        Raises:
            RuntimeError: If it failed; its traceback is on standard error.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()
        result = json.loads(self._process.stdout.readline())
        if result is None:
            raise RuntimeError(f"{job} failed")
        return dict(result)


def run_scenario(
    server: Server, client: Client, scenario: Scenario, *, repeats: int, bytes_per_s: float
) -> dict[str, list[dict[str, Any]]]:
    """Measure all systems of one row, in turn, ``repeats`` times."""

    def job(system: str, action: str, folder: str) -> Job:
        return Job(
            endpoint_url=server.endpoint_url,
            action=action,
            system=system,
            kind=scenario.kind,
            num_bytes=scenario.num_bytes,
            want=scenario.want,
            folder=folder,
        )

    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in scenario.systems}
    folders = {name: f"{scenario.name}-{SYSTEMS[name].layout}" for name in scenario.systems}
    if scenario.action == "load":
        server.set_link(0.0, 0.0)
        for folder in set(folders.values()):
            writer = next(name for name in scenario.systems if folders[name] == folder)
            client.run(job(writer, "seed", folder))
    server.set_link(scenario.latency_s, bytes_per_s)
    for _ in range(repeats):
        for name in scenario.systems:
            result = client.run(job(name, scenario.action, folders[name]))
            runs[name].append(_condensed(result))
            if scenario.action == "save":
                server.forget(folders[name])
            wall, cpu = result["wall_s"], result["cpu_s"]
            print(f"{scenario.name:22} {name:12} {wall:7.2f} s  CPU {cpu:6.2f} s", flush=True)
    server.forget(scenario.name)
    return runs


def _condensed(result: dict[str, Any]) -> dict[str, Any]:
    """Replace the server's list of requests by counts, as thousands of lines help nobody."""
    server = result.pop("server")
    served = server.pop("served")
    operations: dict[str, int] = {}
    for one in served:
        name = one["operation"]
        if name == "GetObject":
            name += " data" if ".distcp" in one["key"] or one["key"].endswith("/all") else " index"
        operations[name] = operations.get(name, 0) + 1
    return {
        **result,
        "bytes_in": sum(one["bytes_in"] for one in served),
        "bytes_out": sum(one["bytes_out"] for one in served),
        "data_bytes_out": sum(
            one["bytes_out"] for one in served if not one["key"].endswith(".metadata")
        ),
        "requests": dict(sorted(operations.items())),
        "max_in_flight": server["max_in_flight"],
        "connections": server["connections"],
        "server_cpu_s": server["cpu_s"],
    }


def _machine() -> dict[str, Any]:
    return {
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {
            name: version(name) for name in ("torch", "obstore", "s3fs", "fsspec", "numpy")
        },
    }


def _lines(results: dict[str, Any]) -> str:
    """Return JSON with a line per measurement."""
    text = json.dumps({**results, "rows": []}, indent=1).removesuffix('"rows": []\n}')
    rows = []
    for row in results["rows"]:
        head = json.dumps({**row, "runs": {}}).removesuffix('"runs": {}}')
        runs = [
            f"   {json.dumps(name)}: [\n    " + ",\n    ".join(map(json.dumps, one)) + "]"
            for name, one in row["runs"].items()
        ]
        rows.append(f'  {head}"runs": {{\n' + ",\n".join(runs) + "}}")
    return f'{text}"rows": [\n' + ",\n".join(rows) + "]\n}\n"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    names = [scenario.name for scenario in SCENARIOS]
    parser.add_argument("--only", nargs="+", choices=names, help="some rows (default: all)")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), help="some systems")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="times the size of all states")
    parser.add_argument("--mb-per-s", type=float, default=100.0, help="of one connection; 0: any")
    parser.add_argument("--latency-ms", type=float, help="instead of the latency of each row")
    parser.add_argument("--quick", action="store_true", help="tiny states, once: a smoke test")
    parser.add_argument("--output", type=Path, help="JSON to write")
    parser.add_argument(
        "--publish", action="store_true", help=f"write {RESULTS.name} and the tables in docs/"
    )
    return parser.parse_args(arguments)


def _chosen(given: argparse.Namespace) -> list[Scenario]:
    chosen = []
    for scenario in SCENARIOS:
        if given.only and scenario.name not in given.only:
            continue
        one = scenario.quick() if given.quick else scenario.scaled(given.scale)
        if given.latency_ms is not None:
            one = replace(one, latency_s=given.latency_ms / 1000)
        if given.systems:
            one = replace(one, systems=tuple(s for s in one.systems if s in given.systems))
        chosen.append(one)
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was chosen, write the JSON, print the tables."""
    given = _parse(arguments)
    rows = []
    with Server() as server, Client() as client:
        for scenario in _chosen(given):
            runs = run_scenario(
                server,
                client,
                scenario,
                repeats=1 if given.quick else given.repeats,
                bytes_per_s=given.mb_per_s * 1e6,
            )
            rows.append({**asdict(scenario), "runs": runs})
    words = sys.argv[1:] if arguments is None else arguments
    results = {
        "command": shlex.join(["python", "-m", "benchmarks", *words]),
        "machine": _machine(),
        "is_quick": given.quick,
        "mb_per_s": given.mb_per_s,
        "rows": rows,
    }
    print(render(results))
    if given.output:
        given.output.write_text(_lines(results))
    if given.publish:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(_lines(results))
        publish(PAGE, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
