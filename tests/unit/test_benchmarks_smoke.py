from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from benchmarks.__main__ import main
from benchmarks.link import Link, Weather
from benchmarks.plot import page, plot
from benchmarks.report import render, renew, to_json
from benchmarks.tls import has_terminator


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A smoke run of few rows; one of them with several ranks."""
    output = tmp_path_factory.mktemp("bench") / "results.json"
    command = ["--quick", "--http", "--output", str(output)]
    command += ["--only", "save", "rows-4-2"]
    assert main([*command, "--systems", "stock", "ours", "ours-shared", "bare"]) == 0
    return json.loads(output.read_text())


@pytest.fixture(scope="module")
def rows(results: dict[str, Any]) -> dict[str, Any]:
    """Its runs per row and system."""
    return {row["name"]: row["runs"] for row in results["rows"]}


def test_the_benchmark_measures_every_system_at_the_server(rows: dict[str, Any]) -> None:
    assert set(rows["save"]) == {"stock", "ours", "bare"}
    for (save,) in rows["save"].values():
        assert save["bytes_in"] >= save["needed_bytes"]
        assert save["wall_s"] > 0.002
    for (load,) in rows["rows-4-2"].values():
        assert load["bytes_out"] >= load["needed_bytes"]


def test_the_benchmark_shows_what_a_load_asks_for(rows: dict[str, Any]) -> None:
    for system, num_readers in (("ours", 2), ("ours-shared", 1)):
        (load,) = rows["rows-4-2"][system]
        assert load["data_bytes_out"] < 1.6 * load["needed_bytes"]
        assert load["requests"]["GetObject index"] == num_readers


@pytest.mark.campaign  # a training loop takes long
def test_the_benchmark_tells_what_a_background_save_takes_from_training(tmp_path: Path) -> None:
    for train in measured(tmp_path, "train", "--systems", "stock", "ours").values():
        assert 0 < train["blocked_s"] <= train["wall_s"]
        assert train["copy_s"] > 0
        assert 0 < train["step_s"] <= train["worst_s"]
        assert train["bytes_in"] >= train["needed_bytes"]


def measured(folder: Path, name: str, *more: str) -> dict[str, Any]:
    """Return the last run of each system in one row."""
    output = folder / "results.json"
    assert main(["--quick", "--http", "--output", str(output), "--only", name, *more]) == 0
    (row,) = json.loads(output.read_text())["rows"]
    return {system: runs[-1] for system, runs in row["runs"].items()}


@pytest.mark.campaign  # where there is no nginx, CI would measure plain HTTP once more
@pytest.mark.skipif(not has_terminator(), reason="there is no nginx that takes TLS off")
def test_every_system_saves_and_loads_over_tls(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    assert main(["--quick", "--output", str(output), "--only", "save", "load"]) == 0
    found = json.loads(output.read_text())
    assert found["scheme"] == "https"
    assert not any("failed" in run for row in found["rows"] for (run,) in row["runs"].values())


def test_the_report_has_every_row_in_the_sum_and_a_table_of_its_own(
    results: dict[str, Any], rows: dict[str, Any]
) -> None:
    text = render({**results, "is_quick": False})
    assert all(f"| `{name}` |" in text and f"(`{name}`)" in text for name in rows)
    assert "save: no LIST, HEAD, COPY, DELETE | 0 | yes" in text


@pytest.mark.campaign  # it starts the ranks of a row once more
def test_rows_of_several_ranks_are_measured_more_than_once(tmp_path) -> None:
    output = tmp_path / "results.json"
    command = ["--quick", "--http", "--repeats", "2", "--output", str(output), "--only", "rows-4-2"]
    assert main([*command, "--systems", "ours"]) == 0
    (row,) = json.loads(output.read_text())["rows"]
    assert [run["needed_bytes"] > 0 for run in row["runs"]["ours"]] == [True, True]


def test_some_rows_are_renewed_and_the_report_says_so(results: dict[str, Any]) -> None:
    (row,) = (row for row in results["rows"] if row["name"] == "rows-4-2")
    command = "python -m benchmarks --only rows-4-2"
    later = {**results, "command": command, "rows": [{**row, "title": "again"}]}
    found = renew(results, later)
    assert [row["name"] for row in found["rows"]] == ["save", "rows-4-2"]
    text = render(found)
    assert f"`rows-4-2`: `{command}`" in text
    assert "### again (`rows-4-2`)" in text
    assert f"`{results['command']}`" in text
    assert json.loads(to_json(found)) == found


def test_the_report_and_the_plot_say_who_failed_and_go_on(results: dict[str, Any]) -> None:
    broken = json.loads(json.dumps(results))
    broken["rows"][0]["runs"]["stock"] = [{"failed": True}]
    text = render(broken)
    assert re.search(r"\| `save` \| fails \|", text)
    assert "| stock DCP | fails |" in text
    assert page(broken).endswith(plot(broken))
    assert len(ET.fromstring(plot(broken))) < len(ET.fromstring(plot(results)))


# --- the emulated distance ---------------------------------------------------------------


def test_the_same_seed_gives_the_same_waits_and_another_one_others() -> None:
    def waits(seed: int) -> list[float]:
        weather = Weather(Link(latency_s=0.02, jitter_s=0.03, seed=seed))
        return [weather.wait_s() for _ in range(100)]

    assert waits(1) == waits(1) != waits(2)
    assert 0.02 <= min(waits(1)) < 0.025 < 0.045 < max(waits(1)) <= 0.05


def test_a_slow_tail_meets_as_many_requests_as_it_says() -> None:
    weather = Weather(Link(slow_share=0.01, slow_s=1.0))
    slow = [weather.wait_s() == 1.0 for _ in range(10_000)]
    assert 60 < sum(slow) < 140


def test_bursts_begin_soon_and_come_again() -> None:
    now = [100.0]
    weather = Weather(Link(burst_s=0.4, burst_every_s=2.0), clock=lambda: now[0])
    refused = []
    for tenth in range(45):
        now[0] = 100.0 + tenth / 10 + 0.05
        refused.append(weather.is_burst())
    bursts = [0.3 <= t / 10 + 0.05 < 0.7 or 2.3 <= t / 10 + 0.05 < 2.7 for t in range(43)]
    assert refused[:43] == bursts


def test_a_paced_connection_waits_for_what_it_is_ahead() -> None:
    waited: list[float] = []
    weather = Weather(Link(bytes_per_s=100.0), clock=lambda: 5.0, sleep=waited.append)
    weather.pace(5.0, 200)
    weather.pace(1.0, 200)  # long since due
    assert waited == [2.0]
