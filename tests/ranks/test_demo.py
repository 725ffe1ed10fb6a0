"""The demo as newcomers start it, with the smallest sizes."""

from __future__ import annotations

import subprocess
import sys

import pytest

ARGUMENTS = ["--save-ranks", "2", "--load-ranks", "1", "--steps", "4", "--width", "32"]


@pytest.mark.timeout(240)  # 12 s on two idle cores, a minute on two busy ones
def test_the_demo_restores_every_bit_and_repeats_the_losses() -> None:
    command = [sys.executable, "-m", "dcpstore", "demo", *ARGUMENTS, "--layers", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=220)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    passes = [line for line in lines if line.startswith("PASS")]
    assert len(passes) == 5, ended.stdout
    assert sum("state loaded" in line for line in passes) == 2
    assert any(".metadata" in line for line in lines)
    assert not [line for line in lines if line.startswith("FAIL")]
