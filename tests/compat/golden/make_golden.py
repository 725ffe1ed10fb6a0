"""Make a golden checkpoint; run once per version, the result is never changed.

``python tests/compat/golden/make_golden.py KIND`` writes a folder beside this script, saved by two
ranks, and ``expected.pt`` in it: the plain values. It refuses to touch a folder that exists.

=================  =======================================================================
kind               folder
=================  =======================================================================
``stock``          ``torch-<version>``
``stock-zstd``     ``torch-<version>-zstd``
``ours``           ``dcpstore-1``: the manifest is an object of its own
``ours-embedded``  ``dcpstore-1-embedded``: it lies in ``.metadata``
``ours-values``    ``dcpstore-2``: with values that need an encoding
``ours-attached``  ``dcpstore-2-attached``: with attachments, facts and users' metadata
=================  =======================================================================
"""

from __future__ import annotations

import collections
import datetime as dt
import http
import pathlib
import sys
import tempfile
import urllib.parse
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

HERE = Path(__file__).parent
NUM_RANKS = 2


def plain_values() -> dict[str, Any]:
    grid = torch.arange(35, dtype=torch.float32).reshape(5, 7) / 8
    return {
        "model": {
            "rows": grid,
            "columns": grid.neg(),
            "copies": grid[:2] * 3,
            "bf16": grid.bfloat16(),
        },
        "plain": {
            "transposed": grid.t(),
            "scalar": torch.tensor(2.5, dtype=torch.float64),
            "empty": torch.empty((0, 3), dtype=torch.int32),
            "flags": torch.tensor([True, False, True]),
            "complex": torch.tensor([1 + 2j, -3j]),
            "float8": grid[0].to(torch.float8_e4m3fn),
            "uint16": torch.arange(6).to(torch.uint16),
        },
        "groups": [{"lr": 0.5, "betas": (0.9, 0.99), "names": ["a", "b"]}],
        "step": 7,
        "nothing": None,
    }


def encoded_values() -> dict[str, Any]:
    """Values that a manifest of version 2 is for, of types that every Python has."""
    return {
        "array": np.arange(6, dtype=">i4").reshape(2, 3),
        "large": np.arange(5000.0) / 3,
        "rng": np.random.RandomState(0).get_state(),
        "when": (dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=dt.timezone.utc), dt.timedelta(1)),
        "path": pathlib.PurePosixPath("data/train"),
        "counts": (collections.Counter("aab"), frozenset({1, 2}), range(3), b""),
        "status": http.HTTPStatus.NOT_FOUND,
        "url": urllib.parse.SplitResult("s3", "bucket", "/run", "", ""),
    }


USER_METADATA = {"tokens": 10**12, "note": ["\u00e9", {"nothing": None}]}
METRICS = {"loss": 0.1, "perplexity": float("inf"), "none": float("nan")}
STEP, RUN = 100, "0123456789abcdef"


def attachments_of(rank: int) -> dict[str, bytes]:
    """Return small and large files, by the names that they have once they are sealed."""
    found = {f"rng-{rank}.json": b'{"seed": %d}' % rank, "tokenizer/vocab.txt": b"a b c\n" * 1000}
    if rank == 1:
        found |= {"empty": b"", "blocks.bin": bytes(range(256)) * 40}
    return found


def save_rank(rank: int, kind: str, folder: str, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    state = plain_values()
    if kind == "ours-values":
        state["values"] = encoded_values()
    for name, placement in [
        ("rows", Shard(0)),
        ("columns", Shard(1)),
        ("copies", Replicate()),
        ("bf16", Shard(0)),
    ]:
        state["model"][name] = distribute_tensor(state["model"][name], mesh, [placement])
    if kind.startswith("ours"):
        from dcpstore import ObjectStoreWriter, SavePlanner, WriteConfig

        config = WriteConfig(embed_manifest_bytes=0) if kind == "ours" else WriteConfig()
        if kind == "ours-attached":
            config = WriteConfig(checksum_block_bytes=4096)
        planner = SavePlanner() if kind == "ours-values" else None
        writer: Any = ObjectStoreWriter(Path(folder), config=config)
        if kind == "ours-attached":
            given = attachments_of(rank)
            given["rng-{rank}.json"] = given.pop(f"rng-{rank}.json")
            writer.attach(
                attachments=given, metrics=METRICS, user_metadata=USER_METADATA, step=STEP, run=RUN
            )
    else:
        writer, planner = dcp.FileSystemWriter(folder, **settings_of(kind)), None
    dcp.save(state, storage_writer=writer, planner=planner)
    dist.destroy_process_group()


def settings_of(kind: str) -> dict[str, Any]:
    if kind == "stock":
        return {}
    from torch.distributed.checkpoint._extension import ZStandard  # torch 2.6 has none

    return {"_extensions": [ZStandard()]}


def folder_of(kind: str) -> Path:
    ours = {
        "ours": "1",
        "ours-embedded": "1-embedded",
        "ours-values": "2",
        "ours-attached": "2-attached",
    }
    if kind in ours:
        return HERE / f"dcpstore-{ours[kind]}"
    version = str(torch.__version__).partition("+")[0]
    return HERE / f"torch-{version}{kind.removeprefix('stock')}"


def main(kind: str) -> None:
    folder = folder_of(kind)
    folder.mkdir()  # never over an older one
    # The metadata records where it was saved: the same place on every machine.
    saved = Path("/tmp/dcpstore-golden") / folder.name
    with tempfile.TemporaryDirectory() as place:
        mp.spawn(save_rank, (kind, str(saved), f"{place}/store"), nprocs=NUM_RANKS)
    for path in saved.iterdir():
        path.rename(folder / path.name)
    torch.save(plain_values(), folder / "expected.pt")
    print(folder.name, sum(path.stat().st_size for path in folder.iterdir()), "bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
