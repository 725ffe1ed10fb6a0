"""What each rank allocates and fetches to load a sharded optimizer; beside it, torch's own loader.

``python -m benchmarks.optimizer_memory`` lets two forked gloo ranks save a model's Adam state
into the benchmark's own S3 server, and four load it for models of several layouts. Extra memory is
the peak of a rank's resident memory over what it held before; the model's own tensors are never
touched, so they have none. The bound is what the rank holds of the state, one saved item and the
read budget. Exits with 1 if a load of ours went over the bound, or fetched over 1.05 of the
bytes that the ranks need between them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import traceback
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharded_tensor import empty as empty_sharded
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.optimizer import (
    load_sharded_optimizer_state_dict as load_by_torch,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import dcpstore
from benchmarks import torch_save
from benchmarks.gauge import measured
from benchmarks.job import Site
from benchmarks.processes import Server
from benchmarks.want import Place

MIB = 1 << 20
ALLOWANCE_BYTES = 16 * MIB  # threads, connections, and what the allocator rounds up
STATES = ("exp_avg", "exp_avg_sq")
LAYOUTS = {
    "FSDP1": None,
    "FSDP2": [Shard(0)],
    "FSDP2 over TP": [Shard(0), Shard(1)],
    "HSDP": [Replicate(), Shard(0)],
}
NUM_SAVED = 2


@dataclass(frozen=True)
class Case(torch_save.Case):
    """One load to measure, within a budget."""

    budget_mib: int

    @property
    def sizes(self) -> tuple[int, int]:
        return self.tensor_mib * 64 - 1, 4096  # a row less than what divides


def model(case: Case) -> dict[str, Any]:
    """Return this rank's part of the model; its memory is promised and never touched."""
    placements = LAYOUTS[case.layout]
    names = [f"layer.{number}.weight" for number in range(case.num_tensors)]
    if placements is None:
        spec = ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(case.num_ranks)])
        return {name: empty_sharded(spec, case.sizes) for name in names}
    grid = (case.num_ranks,) if len(placements) == 1 else (2, case.num_ranks // 2)
    mesh = init_device_mesh("cpu", grid)
    return {
        name: torch.distributed.tensor.empty(case.sizes, device_mesh=mesh, placements=placements)
        for name in names
    }


def locals_of(value: Any) -> list[tuple[int, torch.Tensor]]:
    """Return the parts that this rank holds, each with its first row."""
    if isinstance(value, ShardedTensor):
        return [(one.metadata.shard_offsets[0], one.tensor) for one in value.local_shards()]
    (chunk,) = value.__create_chunk_list__()
    return [(chunk.offsets[0], value.to_local())]


def fill(value: Any, number: int) -> Any:
    """Make an element's row tell where it belongs."""
    for first, local in locals_of(value):
        local.copy_(torch.arange(first, first + len(local)).unsqueeze(1) + number)
    return value


def save(case: Case, site: Site) -> dict[str, Any]:
    state = {
        name: {
            **{one: fill(torch.empty_like(held), number) for one in STATES},
            "step": torch.tensor(1.0),
        }
        for number, (name, held) in enumerate(model(case).items())
    }
    groups = [{"lr": 0.5, "params": list(state)}]
    saved = {"optimizer": {"state": state, "param_groups": groups}}
    dcpstore.save(saved, f"{site.url}/optimizer", storage_options=site.options)
    return {}


def load(case: Case, site: Site, weights: dict[str, Any]) -> Any:
    url = f"{site.url}/optimizer"
    if case.system == "torch":
        return load_by_torch(weights, "optimizer", FsspecReader(url, **site.options))
    return dcpstore.load_sharded_optimizer_state_dict(
        weights,
        "optimizer",
        url,
        storage_options=site.options,
        config=dcpstore.ReadConfig(budget_bytes=case.budget_mib * MIB),
    )


def load_and_measure(case: Case, site: Site) -> dict[str, Any]:
    weights = model(case)
    reader = dcpstore.ObjectStoreReader(f"{site.url}/optimizer", storage_options=site.options)
    reader.read_metadata()  # whatever the first request imports and starts is there then
    kept: list[Any] = []
    place = Place(dist.get_rank(), case.num_ranks)
    result = measured(site, place, lambda: kept.append(load(case, site, weights)))
    held = 0
    for number, name in enumerate(weights):
        for state in STATES:
            for first, local in locals_of(kept[0]["optimizer"]["state"][name][state]):
                held += local.numel() * local.element_size()
                rows = torch.arange(first, first + len(local)) + number
                assert torch.equal(local[:, 0], rows.float()), f"{name}.{state} is wrong"
                assert torch.equal(local[:, -1], rows.float()), f"{name}.{state} is wrong"
    return {**result, "held": held}


def be_rank(case: Case, rank: int, site: Site, meeting: str, pipe: Any) -> None:
    try:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=case.num_ranks
        )
        act = save if case.system == "save" else load_and_measure
        pipe.send(act(case, site))
    except BaseException:
        pipe.send(traceback.format_exc())


def run(case: Case, site: Site) -> list[dict[str, Any]]:
    """Let forked ranks do it; return what each measured."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, ranks = [], []
        for rank in range(case.num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            args = (case, rank, site, f"{folder}/meeting", theirs)
            ranks.append(context.Process(target=be_rank, args=args))
            ranks[-1].start()
            theirs.close()
            pipes.append(ours)
        results = [pipe.recv() if pipe.poll(300) else "no answer in time" for pipe in pipes]
        for rank in ranks:
            rank.kill()
            rank.join()
    failed = [one for one in results if isinstance(one, str)]
    if failed:
        raise SystemExit(f"{case}\n{failed[0]}")
    return results


def unique_bytes(case: Case) -> int:
    rows, columns = case.sizes
    return rows * columns * 4 * len(STATES) * case.num_tensors


def show(case: Case, results: list[dict[str, Any]]) -> bool:
    """Print a row; tell whether the targets are met."""
    extra, held = (max(one[name] for one in results) for name in ("extra_bytes", "held"))
    item = case.sizes[0] * case.sizes[1] * 4 // NUM_SAVED
    bound = held + item + case.budget_mib * MIB + ALLOWANCE_BYTES
    served = results[0]["server"]["served"]
    fetched = sum(one["bytes_out"] for one in served if one["key"].endswith(".distcp"))
    ratio = fetched / unique_bytes(case)
    wall_s = max(one["wall_s"] for one in results)
    print(
        f"| {case.system} | {case.layout} | {case.budget_mib} | {held / MIB:.0f}"
        f" | {extra / MIB:.0f} | {bound / MIB:.0f} | {ratio:.3f} | {wall_s:.2f} |",
        flush=True,
    )
    return case.system == "torch" or (extra <= bound and ratio <= 1.05)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimizer_memory")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tensors", type=int, default=4, help="parameters, of two states each")
    parser.add_argument("--tensor-mib", type=int, default=64, help="size of each state")
    given = parser.parse_args()
    shape = (given.tensors, given.tensor_mib)
    cases = [
        Case("dcpstore", layout, given.ranks, *shape, budget_mib)
        for layout in LAYOUTS
        for budget_mib in (32, 256)
    ]
    cases.append(Case("torch", "FSDP1", given.ranks, *shape, 0))
    with Server("bench", "key", "secret", None) as server:
        seed = Case("save", "FSDP2", NUM_SAVED, *shape, 256)
        run(seed, server.site)
        print(f"{unique_bytes(seed) / MIB:.0f} MiB of state, {given.ranks} ranks; MiB per rank:\n")
        print("| system | layout | budget | held | extra peak | bound | fetched / needed | s |")
        print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
        met = [show(case, run(case, server.site)) for case in cases]
    sys.exit(0 if all(met) else 1)


if __name__ == "__main__":
    main()
