"""The README's code runs as it stands, with its buckets served by emulators."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcpstore
from dcpstore.testing import GcsServer, MotoServer

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def run(block: str, names: dict[str, Any]) -> None:
    exec(compile(block, "README.md", "exec"), names)


def names_before() -> dict[str, Any]:
    state = {"model": torch.nn.Linear(512, 512).state_dict(), "step": 100}
    return {"dcp": dcp, "dcpstore": dcpstore, "torch": torch, "state": state}


def test_the_readme_shows_s3_gcs_and_minio() -> None:
    assert ["s3://my-bucket" in BLOCKS[0], "gs://" in BLOCKS[1], "9000" in BLOCKS[2]] == [True] * 3
    assert len(BLOCKS) == 4


def test_the_s3_example_runs(s3_server: MotoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.create_bucket("my-bucket")
    options = s3_server.storage_options()
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
    names: dict[str, Any] = {}
    run(BLOCKS[0], names)
    run(BLOCKS[3], names)
    assert "run/step-100/.metadata" in s3_server.client("my-bucket").keys("run/")


def test_the_minio_example_runs(s3_server: MotoServer) -> None:
    s3_server.create_bucket("checkpoints")
    block = BLOCKS[2].replace("http://127.0.0.1:9000", s3_server.endpoint_url)
    run(block, names_before())


def test_the_gcs_example_runs(gcs_server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_server.endpoint_url)
    run(BLOCKS[1].replace("my-bucket", "contract"), names_before())
