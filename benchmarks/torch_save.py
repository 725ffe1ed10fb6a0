"""Load one large ``torch.save`` file on several ranks: time, memory and bytes of each rank.

``python -m benchmarks.torch_save`` saves a file of random tensors, puts it into the
benchmark's own S3 server, and lets forked gloo ranks load it by rows, by columns and whole.
Beside it, in the same run, stock DCP's reader of the same name loads the file from local disk,
which is all that it can do.

Extra memory is the peak of a rank's resident memory over what it held before the load, its
targets included: what the load itself needed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.format_utils as stock
import torch.distributed.tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dcpstore
from benchmarks.gauge import measured
from benchmarks.job import Site
from benchmarks.processes import Server
from benchmarks.states import Place
from dcpstore import ReadConfig
from dcpstore.store import open_store
from dcpstore.store.folder import file_location

MIB = 1 << 20
LAYOUTS = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "DTensor copies": [Replicate()],
    "plain": None,
}


@dataclass(frozen=True)
class Case:
    """One load to measure."""

    system: str
    layout: str
    num_ranks: int
    num_tensors: int
    tensor_mib: int


def full_sizes(case: Case) -> dict[str, tuple[int, int]]:
    return {f"layer.{n}.weight": (case.tensor_mib * 64, 4096) for n in range(case.num_tensors)}


def target(case: Case) -> dict[str, torch.Tensor]:
    """Return tensors whose memory is there already, this rank's part of each."""
    placements = LAYOUTS[case.layout]
    if placements is None:
        return {name: torch.full(size, -1.0) for name, size in full_sizes(case).items()}
    mesh = init_device_mesh("cpu", (case.num_ranks,))
    return {
        name: distribute_tensor(torch.zeros(1).expand(size), mesh, placements, src_data_rank=None)
        for name, size in full_sizes(case).items()
    }


def load(case: Case, path: Path, site: Site, state: dict[str, Any]) -> Any:
    if case.system == "stock, local disk":
        reader, planner = stock.BroadcastingTorchSaveReader(), stock.DynamicMetaLoadPlanner()
        dcp.load(state, checkpoint_id=path, storage_reader=reader, planner=planner)
        return None
    reader = dcpstore.BroadcastingTorchSaveReader(
        f"{site.url}/model.pt",
        storage_options=site.options,
        direct=case.system == "ours, each reads",
    )
    dcp.load(state, storage_reader=reader, planner=dcpstore.DynamicMetaLoadPlanner())
    return reader.last_read


def check(state: dict[str, Any]) -> None:
    for number, value in enumerate(state.values()):
        local = value.to_local() if hasattr(value, "to_local") else value
        assert local[0, 0] == number
        assert local[-1, -1] == number
        assert float(local.mean()) == number


def be_rank(case: Case, rank: int, path: Path, site: Site, meeting: str, pipe: Any) -> None:
    try:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=case.num_ranks
        )
        state = target(case)
        kept: list[Any] = []
        place = Place(rank, case.num_ranks)
        result = measured(site, place, lambda: kept.append(load(case, path, site, state)))
        check(state)
        read = kept[0]
        result["received"] = read.received_bytes if read else 0
        result["fetched"] = read.fetched_bytes if read else 0
        result["held"] = sum(
            (v.to_local() if hasattr(v, "to_local") else v).numel() * 4 for v in state.values()
        )
        pipe.send(result)
    except BaseException:
        pipe.send(traceback.format_exc())


def run(case: Case, path: Path, site: Site) -> list[dict[str, Any]] | str:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, ranks = [], []
        for rank in range(case.num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            args = (case, rank, path, site, f"{folder}/meeting", theirs)
            ranks.append(context.Process(target=be_rank, args=args))
            ranks[-1].start()
            theirs.close()
            pipes.append(ours)
        results = [_answer(pipe, 40 if case.system.startswith("stock") else 300) for pipe in pipes]
        for rank in ranks:
            rank.kill()
            rank.join()
    failed = [one for one in results if isinstance(one, str)]
    return failed[0].strip().splitlines()[-1] if failed else results


def _answer(pipe: Any, wait_s: float) -> Any:
    try:
        return pipe.recv() if pipe.poll(wait_s) else f"no answer within {wait_s:.0f} s"
    except EOFError:
        return "the process died"


def _in_child(call: Callable[..., object], *args: Any) -> None:
    """Call in a process of its own: the ranks are forked from one without threads."""
    child = multiprocessing.get_context("fork").Process(target=call, args=args)
    child.start()
    child.join()
    assert child.exitcode == 0


def put(path: Path, site: Site) -> None:
    """Put the file into the bucket, part by part."""

    def parts() -> Iterator[bytes]:
        with path.open("rb") as file:
            while part := file.read(64 * MIB):
                yield part

    folder, key = file_location(f"{site.url}/model.pt")
    store = open_store(folder, storage_options=site.options)
    store.put_parts(key, parts(), part_bytes=64 * MIB, max_concurrency=2)
    store.close()


def show(case: Case, outcome: list[dict[str, Any]] | str, out: Callable[[str], object]) -> None:
    name = f"| {case.system} | {case.layout} |"
    if isinstance(outcome, str):
        out(f"{name} fails: {outcome[:90]} | | | | |\n")
        return
    first, *rest = outcome
    shares = [f"{one['received'] / MIB:.0f} of {one['held'] / MIB:.0f}" for one in outcome]
    out(
        f"{name} {max(one['wall_s'] for one in outcome):.2f}"
        f" | {first['extra_bytes'] / MIB:.0f}"
        f" | {max((one['extra_bytes'] for one in rest), default=0) / MIB:.0f}"
        f" | {sum(one['fetched'] for one in outcome) / MIB:.0f}"
        f" | {', '.join(shares)} |\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.torch_save", description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tensors", type=int, default=6)
    parser.add_argument("--tensor-mib", type=int, default=256, help="size of each tensor")
    parser.add_argument("--folder", type=Path, help="where the file lies on local disk")
    given = parser.parse_args()
    out = sys.stdout.write
    with (
        tempfile.TemporaryDirectory(dir=given.folder) as folder,
        Server("bench", "key", "secret", None) as server,
    ):
        path = Path(folder) / "model.pt"
        sizes = full_sizes(Case("", "", given.ranks, given.tensors, given.tensor_mib))
        torch.save(
            {name: torch.full(size, float(n)) for n, (name, size) in enumerate(sizes.items())}, path
        )
        _in_child(put, path, server.site)
        mib, budget_mib = path.stat().st_size / MIB, ReadConfig().budget_bytes / MIB
        out(f"{mib:.0f} MiB in {given.tensors} tensors of {given.tensor_mib} MiB,")
        out(f" {given.ranks} ranks, default budget {budget_mib:.0f} MiB\n\n")
        out("| reader | targets | s | extra MiB, reading rank | extra MiB, others | fetched MiB |")
        out(" received of held MiB, by rank |\n| --- | --- | --- | --- | --- | --- | --- |\n")
        for layout in LAYOUTS:
            for system in ("ours", "ours, each reads", "stock, local disk"):
                case = Case(system, layout, given.ranks, given.tensors, given.tensor_mib)
                show(case, run(case, path, server.site), out)
                sys.stdout.flush()


if __name__ == "__main__":
    main()
