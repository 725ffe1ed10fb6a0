"""Checkpoints kept from earlier versions still load. Folders here are added, never changed."""

from __future__ import annotations

import hashlib
import http
import sys
import urllib.parse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from compat_states import QUIET, assert_same, blank
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import dcpstore
from dcpstore import ObjectStoreReader

pytestmark = QUIET

GOLDEN = Path(__file__).with_name("golden")
DIGESTS = {
    line.split()[1]: line.split()[0] for line in (GOLDEN / "SHA256SUMS").read_text().splitlines()
}
FOLDERS = sorted(path.name for path in GOLDEN.iterdir() if (path / ".metadata").exists())


sys.path.insert(0, str(GOLDEN))

from make_golden import (  # noqa: E402 - a script beside the folders
    METRICS,
    RUN,
    STEP,
    USER_METADATA,
    attachments_of,
    encoded_values,
)


def expected_of(folder: str):
    return torch.load(GOLDEN / folder / "expected.pt", weights_only=True)


def test_there_are_golden_checkpoints_of_torch_and_of_ours() -> None:
    assert {name.partition("-")[0] for name in FOLDERS} == {"torch", "dcpstore"}


def test_there_are_golden_manifests_in_both_places() -> None:
    ours = [GOLDEN / name for name in FOLDERS if name.startswith("dcpstore")]
    assert {len(list(folder.glob(".dcpstore-*"))) for folder in ours} == {0, 1}


def test_no_golden_file_was_changed_or_lost() -> None:
    found = {
        f"{folder}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in FOLDERS
        for path in (GOLDEN / folder).iterdir()
    }
    assert found == DIGESTS


@pytest.mark.parametrize("folder", FOLDERS)
def test_ours_loads_it(folder: str) -> None:
    expected = expected_of(folder)
    target = blank(expected)
    dcp.load(target, storage_reader=ObjectStoreReader(GOLDEN / folder), no_dist=True)
    assert_same(target, expected)


@pytest.mark.parametrize("folder", FOLDERS)
def test_ours_rebuilds_it_from_nothing(folder: str) -> None:
    state: dict[str, object] = {}
    reader = ObjectStoreReader(GOLDEN / folder)
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    if folder == "dcpstore-2":
        # Of the pickle: it drops the fold of a time and the order of an array's bytes.
        got, expected = state.pop("values"), encoded_values()
        assert {name: type(one) for name, one in got.items()} == {
            name: type(one) for name, one in expected.items()
        }
    assert_same(state, expected_of(folder))


def assert_same_values(got: Any, expected: Any) -> None:
    """Compare types, and text that tells every bit of these values."""
    with np.printoptions(threshold=sys.maxsize, floatmode="unique"):
        for name, value in expected.items():
            assert type(got[name]) is type(value), name
            assert repr(got[name]) == repr(value), name


def test_version_2_gives_back_its_values_without_pickle() -> None:
    """Whoever holds the classes gets the instances; all others come of themselves."""
    expected = encoded_values()
    held = {"status": http.HTTPStatus, "url": urllib.parse.SplitResult}
    state = {"values": {name: held.get(name) for name in expected}}
    dcpstore.load(state, GOLDEN / "dcpstore-2", progress=False)
    assert_same_values(state["values"], expected)


def test_attachments_and_facts_come_back() -> None:
    folder = GOLDEN / "dcpstore-2-attached"
    expected = attachments_of(0) | attachments_of(1)
    with dcpstore.open_checkpoint(folder) as checkpoint:
        assert checkpoint.attachments == {name: len(one) for name, one in expected.items()}
        assert {name: checkpoint.read_attachment(name) for name in expected} == expected
        assert (checkpoint.step, checkpoint.facts.run) == (STEP, RUN)
        assert repr(dict(checkpoint.metrics)) == repr(METRICS)
        assert checkpoint.user_metadata == USER_METADATA
    assert dcpstore.read_attachment(folder, "blocks.bin") == expected["blocks.bin"]


@pytest.mark.parametrize("folder", [name for name in FOLDERS if name.startswith("dcpstore")])
def test_stock_torch_loads_ours(folder: str) -> None:
    expected = expected_of(folder)
    target = blank(expected)
    dcp.load(target, storage_reader=dcp.FileSystemReader(GOLDEN / folder), no_dist=True)
    assert_same(target, expected)
