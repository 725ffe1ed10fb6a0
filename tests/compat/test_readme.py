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


def serve_my_bucket(server: MotoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.create_bucket("my-bucket")
    options = server.storage_options()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])


def sealed_in(folder: str, server: MotoServer) -> list[str]:
    keys = server.client("my-bucket").keys(f"{folder}/")
    return [key.split("/")[1] for key in keys if key.endswith("/.metadata")]


def test_the_readme_shows_a_run_and_s3_gcs_and_minio() -> None:
    shown = ["CheckpointManager", "s3://my-bucket", "gs://", "9000", "dcpstore.save"]
    assert [text in block for text, block in zip(shown, BLOCKS, strict=True)] == [True] * 5


def test_the_training_loop_runs_and_resumes(
    s3_server: MotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_my_bucket(s3_server, monkeypatch)
    names: dict[str, Any] = {}
    run(BLOCKS[0].replace("200", "120"), names)
    assert sealed_in("run", s3_server) == ["step-100", "step-50"]
    run(BLOCKS[0], names)
    assert names["start"] == 100
    assert sealed_in("run", s3_server) == ["step-100", "step-150", "step-200"]


def test_the_s3_example_runs(s3_server: MotoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_my_bucket(s3_server, monkeypatch)
    names: dict[str, Any] = {}
    run(BLOCKS[1], names)
    run(BLOCKS[4], names)
    assert sealed_in("dcp", s3_server) == ["step-100", "step-200"]


def test_the_minio_example_runs(s3_server: MotoServer) -> None:
    s3_server.create_bucket("checkpoints")
    block = BLOCKS[3].replace("http://127.0.0.1:9000", s3_server.endpoint_url)
    run(block, names_before())


def test_the_gcs_example_runs(gcs_server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_server.endpoint_url)
    run(BLOCKS[2].replace("my-bucket", "contract"), names_before())
