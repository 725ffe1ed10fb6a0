"""Running a row: seed what is loaded, let the systems take turns, count what the server saw."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.job import Job
from benchmarks.link import Link
from benchmarks.processes import Client, GoogleServer, Server
from benchmarks.scenarios import Scenario
from benchmarks.systems import SYSTEMS

__all__ = ["Bench"]

Runs = dict[str, list[dict[str, Any]]]
_FAILED = {"failed": True}


class Bench:
    """A server and a client with which rows are measured.

    Args:
        server: Open.
        client: Open.
    """

    def __init__(self, server: Server | GoogleServer, client: Client) -> None:
        self._server, self._client = server, client

    def run(self, scenario: Scenario, link: Link, *, repeats: int) -> Runs:
        """Measure all systems of a row, in turn, ``repeats`` times.

        A system that fails is not tried again in this row; its run says so.
        """
        self._server.set_link(Link())
        writes = scenario.action in ("save", "train")
        broken = set() if writes else self._seed(scenario)
        runs: Runs = {name: [_FAILED] if name in broken else [] for name in scenario.systems}
        for repeat in range(repeats):
            for name in scenario.systems:
                if runs[name][-1:] == [_FAILED]:
                    continue
                self._server.set_link(replace(link, seed=repeat))
                folder = self._folder(scenario, name)
                found = self._client.run(_job(self._server, scenario, name, folder))
                self._server.set_link(Link())
                runs[name] = [*runs[name], _condensed(found)] if found else [_FAILED]
                _print_run(scenario, name, found)
                if writes or scenario.action == "convert":
                    self._forget(scenario, f"{folder}-as" if not writes else folder)
        self._forget(scenario, scenario.name)
        return runs

    def _folder(self, scenario: Scenario, system: str) -> str:
        return f"{scenario.name}-{SYSTEMS[system].layout}"

    def _seed(self, scenario: Scenario) -> set[str]:
        """Let each layout be saved once; return the systems that have nothing to load."""
        of_layout: dict[str, list[str]] = {}
        for name in scenario.systems:
            of_layout.setdefault(SYSTEMS[name].layout, []).append(name)
        broken: set[str] = set()
        for layout, readers in of_layout.items():
            writer = layout if layout in readers else readers[0]
            job = _job(self._server, scenario, writer, self._folder(scenario, writer))
            job = replace(job, action="seed", num_ranks=scenario.saved_ranks)
            if self._client.run(job) is None:
                broken.update(readers)
        return broken

    def _forget(self, scenario: Scenario, folder: str) -> None:
        self._server.forget(folder)
        if not self._server.forgets:
            job = _job(self._server, scenario, "stock", folder)
            self._client.run(replace(job, action="forget", num_ranks=1))


def _job(server: Server | GoogleServer, scenario: Scenario, system: str, folder: str) -> Job:
    return Job(
        site=server.site,
        action=scenario.action,
        system=system,
        kind=scenario.kind,
        num_bytes=scenario.num_bytes,
        want=scenario.want,
        num_ranks=scenario.num_ranks,
        folder=folder,
        target=scenario.target,
    )


def _print_run(scenario: Scenario, name: str, found: dict[str, Any] | None) -> None:
    text = f"{found['wall_s']:7.2f} s  CPU {found['cpu_s']:6.2f} s" if found else "failed"
    print(f"{scenario.name:22} {name:12} {text}", flush=True)


def _condensed(result: dict[str, Any]) -> dict[str, Any]:
    """Replace the server's list of requests by counts, as thousands of lines help nobody."""
    result = dict(result)
    server = result.pop("server")
    served = server["served"]
    operations: dict[str, int] = {}
    for one in served:
        name = one["operation"]
        if name == "GetObject":
            name += " data" if ".distcp" in one["key"] or one["key"].endswith("/all") else " index"
        if one["status"] == 503:
            name = "503"
        operations[name] = operations.get(name, 0) + 1
    return {
        **result,
        "is_counted": bool(served),
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
