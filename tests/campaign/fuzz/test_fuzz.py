"""Hostile files are refused in time, in little memory, and with a class that callers know."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from campaign.fuzz.cli import NAMES, describe, jobs_of, main
from campaign.fuzz.hostile import FILES, HARMLESS, Hostile
from campaign.fuzz.runner import Child, Finding, Results, run, shrunk

REFUSALS = ("CorruptError", "IncompatibleError", "NotFoundError")


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    with Child() as started:
        yield started


@pytest.mark.parametrize("file", FILES, ids=lambda one: one.name)
def test_a_file_that_was_made_to_do_harm_is_refused(child: Child, file: Hostile) -> None:
    """Within 5 s of CPU and 256 MiB, or the child would say so, or be gone."""
    answer = child.ask(file.parser, "0", data=base64.b64encode(file.data).decode(), is_plain=True)
    expected = (*REFUSALS, "accepted") if file.name in HARMLESS else REFUSALS
    assert answer["outcome"] in expected, answer


def test_changed_files_are_read_or_refused() -> None:
    results = Results()
    run(jobs_of(7, 60 * len(NAMES)), results, workers=1, shrinks=3)
    assert not results.findings, "\n".join(map(describe, results.findings))
    for name in NAMES:
        assert sum(results.counts[name].values()) == 60
    refused = sum(counts[one] for counts in results.counts.values() for one in REFUSALS)
    accepted = sum(counts["accepted"] for counts in results.counts.values())
    assert refused > 60
    assert accepted > 60  # the changes leave something to be parsed


def test_the_parsers_are_those_that_the_command_names(child: Child) -> None:
    for name in NAMES:
        assert child.ask(name, "1:1")["outcome"] in (*REFUSALS, "accepted")


@pytest.mark.parametrize(
    "what",
    [
        "raises",
        *(pytest.param(x, marks=pytest.mark.campaign) for x in ("eats memory", "hangs", "dies")),
    ],
)
def test_the_children_see_what_they_are_for(what: str) -> None:
    """Each kind of failure is a finding, and the next input is parsed again."""
    with Child() as child:
        answer = child.ask("value", "0", plants=what)
        assert answer["outcome"] == "finding"
        expected = {"hangs": "CPU", "eats memory": "MiB", "raises": "KeyError", "dies": "ended"}
        assert expected[what] in answer["what"]
        assert child.ask("value", "1:2")["outcome"] in (*REFUSALS, "accepted")


def test_a_finding_is_cut_down_to_what_matters() -> None:
    class Fake:
        def ask(self, parser: str, seed: str, **others: str) -> dict[str, str]:
            if "wants_made" in others:
                return {"made": base64.b64encode(b"a" * 500 + b"BUG" + b"b" * 300).decode()}
            is_bad = b"BUG" in base64.b64decode(others["data"])
            return {"outcome": "finding", "what": "x"} if is_bad else {"outcome": "accepted"}

    assert shrunk(Fake(), Finding("value", "0", "x")) == b"BUG"


@pytest.mark.campaign
@pytest.mark.timeout(24 * 3600)
def test_a_hundred_thousand_changed_files_are_read_or_refused() -> None:
    seed = int(time.time())
    assert main(["--inputs", "100000", "--seed", str(seed), "--workers", "2"]) == 0


def test_the_module_runs_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--inputs", "3", "--seed", "5", "--workers", "1", "--parser", "record head"]) == 0
    assert "3 inputs from seed 5" in capsys.readouterr().out
