"""The house stays small enough to hold in the head; docs/architecture.md tells of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from .entered import ROOT, entered_by_a_save_and_a_load

MOST_ENTERED_BY_A_LOAD = 21
MOST_ENTERED_BY_A_SAVE = 20
MOST_AT_THE_TOP = 23


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_a_load_and_a_save_enter_few_modules(tmp_path: Path):
    save, load = entered_by_a_save_and_a_load(tmp_path)
    assert len(load) <= MOST_ENTERED_BY_A_LOAD, load
    assert len(save) <= MOST_ENTERED_BY_A_SAVE, save


def test_the_top_of_the_package_has_few_entries():
    top = [one.name for one in ROOT.iterdir() if one.name != "__pycache__"]
    assert len(top) <= MOST_AT_THE_TOP, top
