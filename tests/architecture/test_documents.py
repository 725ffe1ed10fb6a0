"""The documents name modules, functions and files that are there."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

from .entered import ROOT, entered_by_a_save_and_a_load

TOP = Path(__file__).parents[2]
DOCUMENTS = sorted([*TOP.glob("*.md"), *TOP.glob("docs/**/*.md")])
ROOMS = "|".join(one.parent.name for one in ROOT.glob("*/__init__.py"))
DOTTED = re.compile(rf"`(?:dcpstore\.)?((?:{ROOMS})\.[\w.]+)`")
FILE = re.compile(r"`([\w/]+\.py)`")


def is_there(name: str) -> bool:
    try:
        pkgutil.resolve_name(f"dcpstore.{name}")
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda one: one.name)
def test_what_a_document_names_exists(document: Path):
    text = document.read_text()
    missing = [name for name in DOTTED.findall(text) if not is_there(name)]
    places = (TOP, ROOT, ROOT.parent)
    missing += [name for name in FILE.findall(text) if not any((p / name).exists() for p in places)]
    assert not missing


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_the_map_names_every_module_that_a_save_and_a_load_enter(tmp_path: Path):
    named = set(re.findall(r"[\w.]+", (TOP / "docs" / "architecture.md").read_text()))
    save, load = entered_by_a_save_and_a_load(tmp_path)
    assert not {*save, *load} - named
