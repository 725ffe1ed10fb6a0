"""How near `verify` comes to a bare download: ``python -m benchmarks.verify_rate``.

The same data objects are read by `verify_checkpoint` and by obstore alone, in ranges of the
same size and with as many in flight, in turn in one process, from `benchmarks.server` over an
emulated link. A checkpoint of ours has a CRC32C per block, one of stock DCP zip's CRC32.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

import dcpstore
from benchmarks.gauge import measured
from benchmarks.link import Link
from benchmarks.processes import Server
from benchmarks.scenarios import LINKS
from benchmarks.systems.bare import open_bare
from benchmarks.want import Place
from dcpstore import ReadConfig
from dcpstore.audit.verify import verify_checkpoint
from dcpstore.store import open_store

MIB = 1 << 20
_TENSOR_BYTES = 32 * MIB


def _state(num_bytes: int) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    count = max(1, num_bytes // _TENSOR_BYTES)
    elements = num_bytes // count // 4
    return {f"layers.{n}.weight": torch.randn(elements, generator=source) for n in range(count)}


def _save(kind: str, url: str, options: dict[str, Any], num_bytes: int) -> None:
    if kind == "ours":
        dcpstore.save(_state(num_bytes), url, storage_options=options)
    else:
        writer = FsspecWriter(url, **options)
        dcp.save(_state(num_bytes), storage_writer=writer, no_dist=True)


def _download(url: str, options: dict[str, Any]) -> int:
    """Get every data object in ranges with obstore alone and drop the bytes."""
    import obstore

    config = ReadConfig()
    store, folder = open_bare(url, options)
    sizes = {
        info.key: info.size_bytes
        for info in open_store(url, storage_options=options).list()
        if info.key.endswith(".distcp")
    }
    spans = [
        (f"{folder}/{key}", start, min(start + config.request_bytes, size))
        for key, size in sorted(sizes.items())
        for start in range(0, size, config.request_bytes)
    ]

    def get(span: tuple[str, int, int]) -> int:
        key, start, end = span
        return len(obstore.get_range(store, key, start=start, end=end))

    with ThreadPoolExecutor(config.max_requests) as executor:
        return sum(executor.map(get, spans))


def _verify(url: str, options: dict[str, Any]) -> int:
    found = verify_checkpoint(url, storage_options=options)
    assert found.is_sound, str(found)
    return found.fetched_bytes


def _line(name: str, runs: list[dict[str, Any]], num_bytes: int) -> str:
    wall_s = statistics.median(run["wall_s"] for run in runs)
    cpu_s = statistics.median(run["cpu_s"] for run in runs)
    extra = max(run["extra_bytes"] for run in runs)
    return (
        f"  {name:<9} {wall_s:6.2f} s  {num_bytes / wall_s / MIB:7.0f} MiB/s"
        f"  {cpu_s * (1 << 30) / num_bytes:5.2f} CPU s/GiB  peak +{extra / MIB:.0f} MiB"
    )


def _compare(server: Server, kind: str, num_bytes: int, repeats: int) -> float:
    """Measure both in turn, print a table, and return the ratio of their rates."""
    site = server.site
    url, options = f"{site.url}/verify-{kind}", site.options
    _save(kind, url, options, num_bytes)
    calls: dict[str, Callable[[], int]] = {
        "download": lambda: _download(url, options),
        "verify": lambda: _verify(url, options),
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in calls}
    read = {name: call() for name, call in calls.items()}  # to warm up
    for _ in range(repeats):
        for name, call in calls.items():
            runs[name].append(measured(site, Place(), call))
    print(f"{kind}: {read['download'] / MIB:.0f} MiB in data objects")
    for name, found in runs.items():
        print(_line(name, found, read[name]))
    pairs = zip(runs["download"], runs["verify"], strict=True)
    ratio = statistics.median(one["wall_s"] / other["wall_s"] for one, other in pairs)
    print(f"  rate of verify / rate of download: {ratio:.2f} (median of {repeats} pairs)")
    server.forget(f"verify-{kind}")
    return ratio


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of each checkpoint")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--link", choices=list(LINKS), default="cloud")
    given = parser.parse_args(arguments)
    link: Link = LINKS[given.link]
    print(f"link {given.link}: {link}")
    with Server("bench", "test", "test", None) as server:
        server.set_link(link)
        for kind in ("ours", "stock"):
            _compare(server, kind, given.mib * MIB, given.repeats)


if __name__ == "__main__":
    main()
