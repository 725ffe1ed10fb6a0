"""Converters beside stock, on local disk: ``python -m benchmarks.convert [--gib N]``.

Each conversion runs in a fresh process, all in one run. Its extra memory is the peak of its
resident set while it converts, less what the process held just before; the bound is the
budget and the largest tensor, and 5%. Stock converts the same state on the same disk.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

MIB = 1 << 20
LARGEST_BYTES = 256 * MIB
BUDGET_BYTES = 256 * MIB


@dataclass(frozen=True)
class Measured:
    """One conversion."""

    name: str
    seconds: float
    cpu_seconds: float
    extra_mib: float
    bound_mib: float | None
    written_gib: float


@dataclass(frozen=True)
class Site:
    """Where the sources lie and where a conversion writes."""

    ours: Path
    stock: Path
    file: Path
    hf: Path
    out: Path

    @staticmethod
    def under(folder: Path) -> Site:
        return Site(
            folder / "ours", folder / "stock", folder / "model.pt", folder / "hf", folder / "out"
        )


def make_state(num_bytes: int) -> dict[str, Any]:
    """Return a state of about ``num_bytes``: large matrices, many of usual size, scalars, ties."""
    generator = torch.Generator().manual_seed(0)

    def matrix(size_bytes: int) -> torch.Tensor:
        return torch.randint(
            -(2**31), 2**31, (size_bytes // 4096, 1024), dtype=torch.int32, generator=generator
        ).view(torch.float32)

    large = max(1, num_bytes // 3 // LARGEST_BYTES)
    usual = (num_bytes - large * LARGEST_BYTES) // (16 * MIB)
    state: dict[str, Any] = {
        "embed": {f"table.{n}": matrix(LARGEST_BYTES) for n in range(large)},
        "layers": [{"weight": matrix(16 * MIB)} for _ in range(usual)],
        "optim": {n: {"step": torch.tensor(float(n)), "m": torch.ones(64)} for n in range(1000)},
        "step": 7,
    }
    state["head"] = state["embed"]["table.0"]
    return state


# --- conversions --------------------------------------------------------------------------


def ours_from_dcp(site: Site) -> None:
    from dcpstore.convert import dcp_to_torch_save

    dcp_to_torch_save(site.ours, site.out / "model.pt", budget_bytes=BUDGET_BYTES, progress=False)


def ours_from_stock_dcp(site: Site) -> None:
    ours_from_dcp(replace(site, ours=site.stock))


def stock_from_dcp(site: Site) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(site.stock, site.out / "model.pt")


def ours_to_dcp(site: Site) -> None:
    from dcpstore.convert import torch_save_to_dcp

    torch_save_to_dcp(site.file, site.out / "dcp", budget_bytes=BUDGET_BYTES, progress=False)


def stock_to_dcp(site: Site) -> None:
    from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

    torch_save_to_dcp(site.file, site.out / "dcp")


def ours_to_safetensors(site: Site) -> None:
    from dcpstore.convert import dcp_to_safetensors

    tensors = ["embed.*", "layers.*"]
    dcp_to_safetensors(
        site.ours, site.out / "st", keys=tensors, budget_bytes=BUDGET_BYTES, progress=False
    )


def ours_from_stock_to_safetensors(site: Site) -> None:
    ours_to_safetensors(replace(site, ours=site.stock))


def ours_from_safetensors(site: Site) -> None:
    from dcpstore.convert import safetensors_to_dcp

    safetensors_to_dcp(site.hf, site.out / "dcp", budget_bytes=BUDGET_BYTES, progress=False)


def ours_copied(site: Site) -> None:
    from dcpstore.convert import dcp_to_dcp

    dcp_to_dcp(site.ours, site.out / "dcp", budget_bytes=BUDGET_BYTES, progress=False)


def stock_written_anew(site: Site) -> None:
    from dcpstore.convert import dcp_to_dcp

    dcp_to_dcp(
        site.stock, site.out / "dcp", reencode=True, budget_bytes=BUDGET_BYTES, progress=False
    )


CONVERSIONS: dict[str, Callable[[Site], None]] = {
    "dcp to pt, ours": ours_from_dcp,
    "dcp (stock) to pt, ours": ours_from_stock_dcp,
    "dcp (stock) to pt, stock": stock_from_dcp,
    "pt to dcp, ours": ours_to_dcp,
    "pt to dcp, stock": stock_to_dcp,
    "dcp to safetensors, ours": ours_to_safetensors,
    "dcp (stock) to safetensors, ours": ours_from_stock_to_safetensors,
    "safetensors to dcp, ours": ours_from_safetensors,
    "dcp copied, ours": ours_copied,
    "dcp (stock) to dcp, ours": stock_written_anew,
}


# --- measuring ----------------------------------------------------------------------------


def _resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def _run(name: str, site: Site, answer: Any) -> None:
    with tempfile.TemporaryDirectory(dir=site.out) as folder:
        # Import what the conversion imports, and start what it starts, before measuring.
        tiny = Site.under(Path(folder))
        tiny.out.mkdir()
        _write_sources(tiny, {"embed": {"t": torch.ones(4)}, "layers": [torch.ones(4)]})
        CONVERSIONS[name](tiny)
    before = _resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    start, cpu = time.perf_counter(), time.process_time()
    CONVERSIONS[name](site)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    extra = _resident_bytes("VmHWM") - before
    written = sum(one.stat().st_size for one in site.out.rglob("*") if one.is_file())
    bound = (BUDGET_BYTES + LARGEST_BYTES) * 1.05 / MIB if "ours" in name else None
    answer.put(Measured(name, seconds, cpu_seconds, extra / MIB, bound, written / (1 << 30)))


def _in_a_process(target: Callable[..., None], *arguments: Any) -> None:
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{target.__name__} failed")


def measure(name: str, site: Site) -> Measured:
    """Run one conversion in a process of its own."""
    site.out.mkdir()
    answer = multiprocessing.get_context("spawn").SimpleQueue()
    try:
        _in_a_process(_run, name, site, answer)
    finally:
        shutil.rmtree(site.out)
    measured: Measured = answer.get()
    return measured


def prepare(site: Site, num_bytes: int) -> None:
    """Write the state as a file and as checkpoints, in a process whose memory goes away."""
    _in_a_process(_make_sources, site, num_bytes)


def _make_sources(site: Site, num_bytes: int) -> None:
    _write_sources(site, make_state(num_bytes))


def _write_sources(site: Site, state: dict[str, Any]) -> None:
    import torch.distributed.checkpoint as dcp

    import dcpstore

    torch.save(state, site.file)
    dcpstore.save(state, site.ours, progress=False)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(site.stock), no_dist=True)
    ours_to_safetensors(replace(site, out=site.hf.parent))
    (site.hf.parent / "st").rename(site.hf)


def main() -> None:
    """Measure and print a table and, with --json, a line per conversion."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=3.0, help="size of the state")
    parser.add_argument("--only", nargs="*", default=list(CONVERSIONS), choices=list(CONVERSIONS))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="dcpstore-convert-"))
    site = Site.under(folder)
    try:
        prepare(site, int(arguments.gib * (1 << 30)))
        cores = len(os.sched_getaffinity(0))
        print(f"# {' '.join(sys.argv)}; {cores} cores, torch {torch.__version__}")
        print(f"{'':34}{'s':>8}{'CPU s':>8}{'extra MiB':>11}{'bound MiB':>11}{'GiB':>7}")
        for name in arguments.only:
            one = measure(name, site)
            bound = "-" if one.bound_mib is None else f"{one.bound_mib:.0f}"
            print(
                f"{name:34}{one.seconds:8.2f}{one.cpu_seconds:8.2f}{one.extra_mib:11.0f}"
                f"{bound:>11}{one.written_gib:7.2f}",
                flush=True,
            )
            if arguments.json:
                print(json.dumps(asdict(one)))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
