"""What is measured: stock DCP, its peers, ours; and as limits the bare engine and a loop in C."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

from benchmarks.systems.bare import bare
from benchmarks.systems.base import System
from benchmarks.systems.floor import floor
from benchmarks.systems.ours import ours, ours_async, ours_managed, ours_shared
from benchmarks.systems.peers import multi_storage_client, s3_connector
from benchmarks.systems.stock import stock, stock_hugging_face

__all__ = ["SYSTEMS", "System", "is_installed"]

# Threads, targets and clients of the peers are those that were quickest here, of 1 to 16
# threads, 10 and 50 Gbit/s, boto3 and Rust, with and without a cache; one setting for saves and
# another for loads where that served them better.
SYSTEMS = {
    "stock": stock("stock DCP", "stock"),
    "stock-8": stock("stock DCP, 8 threads", "stock-8", threads=8),
    "stock-hf": stock_hugging_face("stock DCP, Hugging Face files", "stock-hf"),
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
    "ours-8": ours("dcpstore, 8 requests", "ours", engine="obstore", max_requests=8),
    "ours-128": ours("dcpstore, 128 requests", "ours", engine="obstore", max_requests=128),
    "ours-shared": ours_shared("dcpstore.save, .load", "ours-shared"),
    "ours-async": ours_async("dcpstore.async_save", "ours"),
    "ours-managed": ours_managed("dcpstore.CheckpointManager", "ours"),
    "bare": bare("bare obstore", "bare"),
    "bare-crc": bare("bare obstore, and CRC32C", "bare-crc", checks=True),
    "floor-8": floor("C, 8 connections, and CRC32C", num_connections=8),
    "floor-32": floor("C, 32 connections, and CRC32C", num_connections=32),
}


def is_installed(system: System) -> bool:
    """Tell whether all that it is made of is here."""
    for name in system.needs:
        try:
            distribution(name)
        except PackageNotFoundError:
            return False
    return system.is_here()
