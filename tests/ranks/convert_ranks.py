"""What each process does in the tests of converters."""

from __future__ import annotations

from pathlib import Path

import torch

import dcpstore
from dcpstore.convert import dcp_to_dcp, dcp_to_safetensors, safetensors_to_dcp

__all__ = ["MODEL_KEYS", "convert_there_and_back", "model"]

MODEL_KEYS = 6
_BUDGET_BYTES = 32 << 20


def model() -> dict[str, torch.Tensor]:
    return {f"layer{n}": torch.arange(200_000.0).add(n) for n in range(MODEL_KEYS)}


def convert_there_and_back(folder: Path) -> list[dict[str, int]]:
    """Convert on the default group; return the objects of each step as this rank knows them."""
    results = (
        dcp_to_safetensors(
            folder / "dcp", folder / "hf", max_shard_bytes=1_000_000, budget_bytes=_BUDGET_BYTES
        ),
        safetensors_to_dcp(folder / "hf", folder / "back", budget_bytes=_BUDGET_BYTES),
        dcp_to_dcp(folder / "back", folder / "copy", budget_bytes=_BUDGET_BYTES),
    )
    return [dict(result.objects) for result in results]


def fail_on_one(folder: Path) -> str:
    """Convert a checkpoint of which one rank's part is damaged; return what was raised."""
    try:
        dcp_to_safetensors(folder / "dcp", folder / "hf", max_shard_bytes=1_000_000)
    except dcpstore.RankFailures as error:
        return str(error)
    return "nothing"
