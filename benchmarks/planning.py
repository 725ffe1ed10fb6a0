"""Plan exchange at scale: generated plans of many ranks, merged by one coordinator.

    python -m benchmarks.planning                        every size, each in its own process
    python -m benchmarks.planning --ranks 1024           one size
    python -m benchmarks.planning --shape hybrid         another job than plain FSDP
    python -m benchmarks.planning --balance              who writes how much, by three rules

Plans are built as packed columns, as each rank's would arrive, without the
objects of DCP's plans (16 million of them at the largest size). The unit tests prove at
small sizes that packing DCP's own objects gives the same parts. Beside it, in the same run
and for the same plans, torch's ``dedup_save_plans`` + ``create_default_global_save_plan`` +
``_validate_global_plan`` with the pickling of the plans that DCP sends.

Every job has 1,000 tensors and two values:

    fsdp     600 sharded by rows over all ranks (uneven; most ranks get nothing of the small
             ones), 100 by rows and columns over ranks/8 x 8, 200 replicated norms, 100
             replicated scalars, one replicated value, one value of the rank's own
    hybrid   the 600 sharded over groups of 64 ranks and replicated over the groups
    ddp      everything replicated on all ranks
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from benchmarks.alone import HeldChunk, decide_locally, replica_ranks
from dcpstore.plan.merge import merge_save_plans
from dcpstore.plan.packed import GlobalSavePlan, properties_of
from dcpstore.plan.wire import (
    DIGEST_BYTES,
    Ints,
    KeyKind,
    KeyRow,
    PackedPlan,
    PlanCache,
    PlanFlag,
    SaveColumns,
    cache_key,
    cut_rows,
    decode_columns,
    decode_rows,
    encode_columns,
    encode_rows,
    pack_columns,
    parts_of,
    read_head,
)

SHAPES = ("fsdp", "hybrid", "ddp")
RANKS = (64, 256, 1_024, 4_096, 16_384)
MAX_RANKS_FOR_TORCH = 256
NUM_SHARDED, NUM_BOXES, NUM_NORMS, NUM_SCALARS = 600, 100, 200, 100
TENSOR_PARALLEL = 8
HYBRID_SHARDS = 64
_BF16 = ("bfloat16 strided contiguous_format 0 0", 2)
_U8 = "uint8 strided contiguous_format 0 0"
_F32 = ("float32 strided contiguous_format 0 0", 4)
_HEIGHTS = (4096, 1024, 1024, 4096, 14336, 14336, 4096, 128256)


@dataclass(frozen=True)
class Job:
    """A generated job: what every rank plans, as columns over tensors."""

    shape: str
    num_ranks: int

    def rows(self, rank: int) -> list[KeyRow]:
        """Return the table of keys of a rank; only the last one is its own."""
        rows = []
        for n in range(NUM_SHARDED):
            name = f"layers.{n // 6}.{('wq', 'wk', 'wv', 'wo', 'w1', 'w2')[n % 6]}.weight"
            rows.append(self._tensor("model", name, (_HEIGHTS[n % 8], 4096), _BF16))
        rows.extend(
            self._tensor("model", f"experts.{n}.weight", (5000, 2048), _BF16)
            for n in range(NUM_BOXES)
        )
        for n in range(NUM_NORMS):
            name = f"layers.{n // 2}.norm{n % 2}.weight"
            rows.append(self._tensor("model", name, (4096,), _F32))
        for n in range(NUM_SCALARS):
            name = f"state.layers.{n}.step"
            rows.append(self._tensor("optim", name, (), _F32))
        rows.append(KeyRow("sched.config", KeyKind.VALUE, path=("sched", "config")))
        rows.append(self.row_of_own(rank))
        return rows

    def _tensor(
        self, part: str, name: str, size: tuple[int, ...], dtype: tuple[str, int]
    ) -> KeyRow:
        return KeyRow(f"{part}.{name}", KeyKind.TENSOR, size, *dtype, path=(part, name))

    def columns(self, rank: int) -> SaveColumns:
        """Return what a rank plans."""
        heights = np.array([_HEIGHTS[n % 8] for n in range(NUM_SHARDED)], np.int64)
        boxes = np.full(NUM_BOXES, 5000, np.int64)
        num_boxes = NUM_BOXES
        if self.shape == "ddp":
            starts = [heights * 0, boxes * 0]
            lengths = [heights, boxes]
            num_boxes = 0
        else:
            shards = min(HYBRID_SHARDS, self.num_ranks)
            parts = (self.num_ranks, rank) if self.shape == "fsdp" else (shards, rank % shards)
            wide = (max(self.num_ranks // TENSOR_PARALLEL, 1), rank // TENSOR_PARALLEL)
            cuts = [_chunk(heights, *parts), _chunk(boxes, *wide)]
            starts, lengths = [cut[0] for cut in cuts], [cut[1] for cut in cuts]
        rest = NUM_NORMS + NUM_SCALARS + 2
        ones = [np.full(NUM_NORMS, 4096), np.ones(NUM_SCALARS), np.zeros(2)]
        columns = 2048 // TENSOR_PARALLEL
        return SaveColumns(
            start=np.concatenate([*starts, np.zeros(rest)]).astype(np.int64),
            length=np.concatenate([*lengths, *ones]).astype(np.int64),
            box=np.repeat([0, 1, 0], [NUM_SHARDED, num_boxes, NUM_BOXES - num_boxes + rest]),
            boxes=np.array([[[columns * (rank % TENSOR_PARALLEL)], [columns]]] * bool(num_boxes)),
        )

    def packed(self) -> Iterator[PackedPlan]:
        """Yield each rank's packed plan; the runs of keys that all share are packed once."""
        rows = self.rows(0)
        *runs, tail = cut_rows(rows)
        shared = [encode_rows(run) for run in runs]
        for rank in range(self.num_ranks):
            own = [encode_rows(run) for run in cut_rows([*tail[:-1], self.row_of_own(rank)])]
            items = encode_columns(self.columns(rank))
            yield PackedPlan.of(len(rows), items, [*shared, *own], PlanFlag.HAS_PATHS)

    def row_of_own(self, rank: int) -> KeyRow:
        """Return the key that no other rank has."""
        name = f"rank_{rank}"
        return KeyRow(f"loader.{name}", KeyKind.VALUE, path=("loader", name))


def _chunk(sizes: Ints, num_parts: int, number: int) -> tuple[Ints, Ints]:
    """Return offset and size of a part, as DTensor cuts: the last ones may be empty."""
    full = -(-sizes // num_parts)
    start = np.minimum(number * full, sizes)
    return start, np.minimum(full, sizes - start)


def measure(job: Job) -> dict[str, float]:
    """Merge a job's plans in this process, from the bytes of its ranks to their decisions."""
    arrived = list(job.packed())
    before_bytes = _peak_bytes()
    began, cpu = time.perf_counter(), _cpu_seconds()
    plans = [read_head(one.head).with_bodies(one.bodies) for one in arrived]
    plan = merge_save_plans(plans)
    report: dict[str, float] = {
        "seconds": time.perf_counter() - began,
        "user_seconds": _cpu_seconds()[0] - cpu[0],
        "kernel_seconds": _cpu_seconds()[1] - cpu[1],
        "up_bytes": sum(len(one.head) + sum(map(len, one.bodies)) for one in arrived),
        "down_bytes": sum(map(len, plan.decisions)),
        "before_bytes": before_bytes,
        "peak_bytes": _peak_bytes(),
        "items": sum(one.num_items for one in arrived),
        "chunks": len(plan.chunks.key),
        "max_load": float(plan.load_bytes.max() / plan.load_bytes.mean()),
        "plan_bytes": _bytes_of(plan),
    }
    return report | _measure_cache(arrived, plan)


def _bytes_of(plan: GlobalSavePlan) -> int:
    """Memory that a plan takes, the table of keys left out."""
    columns = (getattr(plan.chunks, field.name) for field in fields(plan.chunks))
    num_bytes = sum(column.nbytes for column in columns) + plan.load_bytes.nbytes
    return num_bytes + sum(map(len, plan.decisions))


def _measure_cache(ranks: list[PackedPlan], plan: GlobalSavePlan) -> dict[str, float]:
    """The same exchange by parts, then again unchanged, then with one rank changed."""
    cache: PlanCache[GlobalSavePlan] = PlanCache()
    heads, digests = [one.head for one in ranks], [one.digest for one in ranks]
    request = cache.request(heads)
    answers = [parts_of(one, w) for one, w in zip(ranks, request.wanted, strict=True)]
    cache.assemble(request, answers)
    key = cache_key(digests, "benchmark")
    cache.put(key, plan)
    began = time.perf_counter()
    found = cache.find(cache_key(digests, "benchmark"))
    assert found is plan
    assert all(found.decisions)
    cached_s = time.perf_counter() - began
    began = time.perf_counter()
    assert not any(cache.request(heads).wanted)
    return {
        "cached_seconds": cached_s,
        "request_seconds": time.perf_counter() - began,
        "up_parts_bytes": sum(map(len, heads)) + sum(len(p) for a in answers for p in a),
        "up_cached_bytes": DIGEST_BYTES * len(ranks),
        "part_bytes": cache.part_bytes,
    }


def to_save_plan(plan: PackedPlan) -> SavePlan:
    """Return the plan of DCP that was packed, or one that packs to the same bytes."""
    rows = [row for run in plan.bodies[1:] for row in decode_rows(run)]
    columns = decode_columns(plan.bodies[0], plan.num_items)
    places = zip(columns.start.tolist(), columns.length.tolist(), columns.box.tolist(), strict=True)
    items = []
    for row, (start, length, box) in zip(rows, places, strict=False):
        if row.is_value:
            size = BytesIOWriteData(length) if start else None
            index = MetadataIndex(row.fqn)
            items.append(WriteItem(index, WriteItemType.BYTE_IO, bytes_io_data=size))
            continue
        offsets, sizes = [start, *(0,) * (len(row.size) - 1)], [length, *row.size[1:]]
        if box:
            offsets[1:], sizes[1:] = columns.boxes[box - 1, :, : len(row.size) - 1].tolist()
        num_dims = len(row.size)
        chunk = ChunkStorageMetadata(torch.Size(offsets[:num_dims]), torch.Size(sizes[:num_dims]))
        kind = WriteItemType.TENSOR if chunk.sizes == row.size else WriteItemType.SHARD
        data = TensorWriteData(chunk, properties_of(row.properties), torch.Size(row.size))
        items.append(WriteItem(MetadataIndex(row.fqn, chunk.offsets), kind, tensor_data=data))
    has_paths = plan.has(PlanFlag.HAS_PATHS)
    paths = {row.fqn: row.path for row in rows if row.path is not None}
    return SavePlan(items, planner_data=paths if has_paths else None)


def measure_torch(job: Job) -> dict[str, float]:
    """Do what DCP's coordinator does with the same plans, pickles included."""
    from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
    from torch.distributed.checkpoint.default_planner import (
        _validate_global_plan,
        create_default_global_save_plan,
    )

    arrived = [pickle.dumps(to_save_plan(plan)) for plan in job.packed()]
    began, cpu = time.perf_counter(), _cpu_seconds()
    plans = [pickle.loads(one) for one in arrived]
    unpickled = time.perf_counter()
    deduped = dedup_save_plans(plans)
    global_plans, metadata = create_default_global_save_plan(deduped)
    problems = _validate_global_plan(global_plans, metadata)
    merged = time.perf_counter()
    sent = [pickle.dumps(one) for one in global_plans]
    if problems:
        print(f"torch finds problems: {problems[:1]}", file=sys.stderr)
    loads = np.array([sum(map(_item_bytes, plan.items)) for plan in global_plans], np.float64)
    return {
        "seconds": time.perf_counter() - began,
        "user_seconds": _cpu_seconds()[0] - cpu[0],
        "kernel_seconds": _cpu_seconds()[1] - cpu[1],
        "unpickle_seconds": unpickled - began,
        "merge_seconds": merged - unpickled,
        "up_bytes": sum(map(len, arrived)),
        "down_bytes": sum(map(len, sent)),
        "peak_bytes": _peak_bytes(),
        "max_load": float(loads.max() / loads.mean()),
    }


def balance(mesh: tuple[int, int], replicated: list[tuple[bool, bool]], seed: int = 0) -> None:
    """Print the most loaded rank's bytes by three rules, over max(mean, largest chunk).

    200 tensors of 4 KiB to 64 MiB on a mesh of two axes, each cut or replicated per axis.
    """
    from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans

    choice = np.random.default_rng(seed)
    num_ranks = mesh[0] * mesh[1]
    tensors = [
        (num_ranks * int(2 ** choice.uniform(12, 26) / num_ranks), replicated[kind])
        for kind in choice.integers(0, len(replicated), 200).tolist()
    ]
    ranks = np.arange(num_ranks).reshape(mesh)
    packed, alone = [], np.zeros(num_ranks)
    for rank in range(num_ranks):
        place = divmod(rank, mesh[1])
        held, rows = [], []
        for number, (size, same) in enumerate(tensors):
            parts = [1 if s else n for s, n in zip(same, mesh, strict=True)]
            at = [0 if s else p for s, p in zip(same, place, strict=True)]
            length = size // (parts[0] * parts[1])
            start = (at[0] * parts[1] + at[1]) * length
            holders = replica_ranks(ranks, same, place)
            held.append(HeldChunk(f"t{number}", (start,), length, holders))
            rows.append(KeyRow(f"t{number}", KeyKind.TENSOR, (size,), _U8))
        columns = SaveColumns(
            np.array([chunk.offsets[0] for chunk in held]),
            np.array([chunk.num_bytes for chunk in held]),
            np.zeros(len(held), np.int64),
            np.empty((0, 2, 0), np.int64),
        )
        packed.append(pack_columns(columns, rows))
        writes = decide_locally(held, rank)
        alone[rank] = sum(c.num_bytes for c, mine in zip(held, writes, strict=True) if mine)
    torchs = [
        sum(map(_item_bytes, plan.items))
        for plan in dedup_save_plans([to_save_plan(one) for one in packed])
    ]
    merged = merge_save_plans(packed).load_bytes
    least = max(
        merged.mean(),
        *(
            size // math.prod(n for s, n in zip(same, mesh, strict=True) if not s)
            for size, same in tensors
        ),
    )
    kinds = ", ".join("".join("R" if s else "S" for s in same) for same in replicated)
    print(
        f"| {mesh[0]} x {mesh[1]} | {kinds} | {merged.max() / least:.3f}"
        f" | {alone.max() / least:.3f} | {max(torchs) / least:.3f} |"
    )


def _print_balance() -> None:
    print("| mesh | placements | exchanged | alone | torch |\n| --- | --- | --- | --- | --- |")
    for mesh in ((4, 8), (16, 8)):
        balance(mesh, [(True, False)])
        balance(mesh, [(True, True)])
        balance(mesh, [(True, False), (False, False), (True, True)])
        balance(mesh, [(True, False), (False, True), (True, True), (False, False)])


def _item_bytes(item: object) -> int:
    data = item.tensor_data  # type: ignore[attr-defined]
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _cpu_seconds() -> tuple[float, float]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime, usage.ru_stime


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _in_process(shape: str, num_ranks: int, who: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.planning", "--child", shape, str(num_ranks), who]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    return result


def _print_row(shape: str, num_ranks: int, who: str, found: dict[str, float]) -> None:
    mib, gib = 1 << 20, 1 << 30
    cached = f"{found['cached_seconds']:.3f}" if "cached_seconds" in found else "-"
    parts = f"{found['up_parts_bytes'] / mib:.1f}" if "up_parts_bytes" in found else "-"
    print(
        f"| {shape} | {num_ranks:,} | {who} | {found['seconds']:.2f}"
        f" | {found['user_seconds']:.2f} + {found['kernel_seconds']:.2f} | {cached}"
        f" | {found['up_bytes'] / mib:.1f} | {parts} | {found['down_bytes'] / mib:.2f}"
        f" | {found['peak_bytes'] / gib:.2f} | {found['max_load']:.3f} |",
        flush=True,
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Merge generated plans of many ranks.")
    parser.add_argument("--ranks", type=int, nargs="*", default=list(RANKS))
    parser.add_argument("--shape", choices=SHAPES, nargs="*", default=["fsdp"])
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print everything measured")
    parser.add_argument("--balance", action="store_true", help="compare rules of balance")
    options = parser.parse_args(arguments)
    if options.balance:
        _print_balance()
        return
    if options.child:
        shape, num_ranks, who = options.child
        job = Job(shape, int(num_ranks))
        print(json.dumps(measure(job) if who == "dcpstore" else measure_torch(job)))
        return
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, numpy {np.__version__}\n")
    print(
        "| plans | ranks | coordinator | seconds | CPU s, user + kernel | cached s | up MiB"
        " | up by parts MiB | down MiB | peak RSS GiB | max/mean load |"
    )
    print("|" + " --- |" * 11)
    for shape in options.shape:
        for num_ranks in options.ranks:
            for who in ("dcpstore", "torch")[: 1 + (num_ranks <= MAX_RANKS_FOR_TORCH)]:
                found = _in_process(shape, num_ranks, who)
                _print_row(shape, num_ranks, who, found)
                if options.json:
                    print(json.dumps(found))


if __name__ == "__main__":
    main()
