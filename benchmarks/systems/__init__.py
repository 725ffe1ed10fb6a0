"""What is measured: stock DCP, its peers, ours on both engines, the bare engine as the limit."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

from benchmarks.systems.bare import bare
from benchmarks.systems.base import System
from benchmarks.systems.ours import ours, ours_shared
from benchmarks.systems.peers import multi_storage_client, s3_connector
from benchmarks.systems.stock import stock

__all__ = ["SYSTEMS", "System", "is_installed"]

# Threads, targets and clients of the peers are those that were quickest here, of 1 to 16
# threads, 10 and 50 Gbit/s, boto3 and Rust, with and without a cache; one setting for saves and
# another for loads where that served them better.
SYSTEMS = {
    "stock": stock("stock DCP", "stock"),
    "stock-8": stock("stock DCP, 8 threads", "stock-8", threads=8),
    "s3torch": s3_connector("s3torchconnector", "s3torch", threads=1, gbps=50),
    "s3torch-4": s3_connector("s3torchconnector, 4 threads", "s3torch-4", threads=4, gbps=50),
    "msc": multi_storage_client(
        "multi-storage-client", "msc", threads=1, is_rust=False, is_cached=True
    ),
    "msc-8": multi_storage_client(
        "multi-storage-client, Rust, 8 threads", "msc-8", threads=8, is_rust=True, is_cached=False
    ),
    "ours": ours("dcpstore (obstore)", "ours", engine="obstore"),
    "ours-fsspec": ours("dcpstore (fsspec)", "ours", engine="fsspec"),
    "ours-once": ours("dcpstore, never asking twice", "ours", engine="obstore", hedge_share=0.0),
    "ours-shared": ours_shared("dcpstore.save, .load", "ours-shared"),
    "bare": bare("bare obstore", "bare"),
    "bare-crc": bare("bare obstore, and CRC32C", "bare-crc", checks=True),
}


def is_installed(system: System) -> bool:
    """Tell whether all that it is made of is here."""
    for name in system.needs:
        try:
            distribution(name)
        except PackageNotFoundError:
            return False
    return True
