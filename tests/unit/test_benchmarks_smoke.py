from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What a smoke run prints, and its runs per row and system."""
    output = tmp_path_factory.mktemp("bench") / "results.json"
    rows = ["save", "reshard-rows", "load-scalars"]
    command = [sys.executable, "-m", "benchmarks", "--quick", "--output", str(output)]
    command += ["--only", *rows, "--systems", "stock", "ours", "bare"]
    done = subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE)
    results = json.loads(output.read_text())
    return done.stdout, {row["name"]: row["runs"] for row in results["rows"]}


def test_the_benchmark_measures_every_system_at_the_server(
    outcome: tuple[str, dict[str, Any]],
) -> None:
    _, rows = outcome
    assert set(rows["save"]) == {"stock", "ours", "bare"}
    for (save,) in rows["save"].values():
        assert save["bytes_in"] >= save["needed_bytes"]
        assert save["wall_s"] > 0.002
    for (load,) in rows["reshard-rows"].values():
        assert load["bytes_out"] >= load["needed_bytes"]


def test_the_benchmark_shows_what_a_load_asks_for(outcome: tuple[str, dict[str, Any]]) -> None:
    _, rows = outcome
    (rowwise,), (scalars,) = rows["reshard-rows"]["ours"], rows["load-scalars"]["ours"]
    assert rowwise["data_bytes_out"] < 1.6 * rowwise["needed_bytes"]
    assert set(scalars["requests"]) == {"GetObject index"}


def test_the_benchmark_prints_a_table_per_row(outcome: tuple[str, dict[str, Any]]) -> None:
    text, rows = outcome
    assert all(f"(`{name}`" in text for name in rows)
    assert "dcpstore (obstore)" in text
