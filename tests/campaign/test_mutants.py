"""What ``--mutants`` takes back is there to be taken back; running the campaign takes minutes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import dcpstore
from campaign.mutants import MUTANTS, Mutant, apply


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.name)
def test_a_repair_can_be_taken_back(mutant: Mutant, tmp_path: Path):
    copy = tmp_path / "dcpstore" / mutant.file
    copy.parent.mkdir(parents=True)
    shutil.copyfile(Path(dcpstore.__file__).parent / mutant.file, copy)
    apply(mutant, tmp_path)
    compile(copy.read_text(), mutant.file, "exec")
