"""The peers: what else plugs an object store into DCP. They come with ``pip install .[bench]``.

Neither takes an endpoint and keys as arguments of its DCP classes, so each is told by the
environment or a file of its own process, before its first call.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.systems.base import System, of_dcp

__all__ = ["multi_storage_client", "s3_connector"]

_REGION = "us-east-1"
# More than its defaults of 8 requests of 32 MiB, which leave most of the link unused.
_TUNED = {"max_concurrency": 32, "multipart_chunksize": 8 << 20, "multipart_threshold": 16 << 20}


def s3_connector(
    label: str, layout: str, *, threads: int, gbps: float = 10.0, part_mib: int = 8
) -> System:
    """Return AWS's connector; its reader is the DCP-optimised one, its default.

    Args:
        label: For the table.
        layout: Whose checkpoints it loads.
        threads: Of the writer, and so files.
        gbps: The client's target, from which it derives its number of connections.
        part_mib: Size of its requests.
    """

    def config(options: dict[str, Any]) -> Any:
        from s3torchconnector import S3ClientConfig

        os.environ.update(
            AWS_ACCESS_KEY_ID=options["key"],
            AWS_SECRET_ACCESS_KEY=options["secret"],
            AWS_ENDPOINT_URL=options["endpoint_url"],
            AWS_EC2_METADATA_DISABLED="true",
        )
        return S3ClientConfig(
            force_path_style=True, throughput_target_gbps=gbps, part_size=part_mib << 20
        )

    def writer(url: str, options: dict[str, Any]) -> Any:
        from s3torchconnector.dcp import S3StorageWriter

        return S3StorageWriter(_REGION, url, s3client_config=config(options), thread_count=threads)

    def reader(url: str, options: dict[str, Any]) -> Any:
        from s3torchconnector.dcp import S3StorageReader

        return S3StorageReader(_REGION, url, s3client_config=config(options))

    return of_dcp(label, layout, writer=writer, reader=reader, needs=("s3torchconnector",))


def multi_storage_client(
    label: str, layout: str, *, threads: int, is_rust: bool, is_cached: bool
) -> System:
    """Return NVIDIA's client.

    Args:
        label: For the table.
        layout: Whose checkpoints it loads.
        threads: Of the writer, and so files; and of the reader, to fetch those files.
        is_rust: Whether the bytes move through its Rust client or through boto3.
        is_cached: Whether files go to its cache on disk. Without one, the threads of the
            reader fetch files that are then fetched again.
    """

    def msc_url(url: str, options: dict[str, Any]) -> str:
        bucket, _, folder = url.removeprefix("s3://").partition("/")
        if "MSC_CONFIG" not in os.environ:
            os.environ["MSC_CONFIG"] = _write_config(bucket, options, is_rust, is_cached)
        return f"msc://bench/{folder}"

    def writer(url: str, options: dict[str, Any]) -> Any:
        from multistorageclient.contrib.torch.filesystem import MultiStorageFileSystemWriter

        return MultiStorageFileSystemWriter(msc_url(url, options), thread_count=threads)

    def reader(url: str, options: dict[str, Any]) -> Any:
        from multistorageclient.contrib.torch.filesystem import MultiStorageFileSystemReader

        return MultiStorageFileSystemReader(msc_url(url, options), thread_count=threads)

    return of_dcp(label, layout, writer=writer, reader=reader, needs=("multi-storage-client",))


def _write_config(bucket: str, options: dict[str, Any], is_rust: bool, is_cached: bool) -> str:
    """Write the client's configuration into a file and return its path."""
    provider: dict[str, Any] = {
        "base_path": bucket,
        "region_name": _REGION,
        "endpoint_url": options["endpoint_url"],
        **_TUNED,
    }
    if is_rust:
        provider["rust_client"] = {"allow_http": True}
    keys = {"access_key": options["key"], "secret_key": options["secret"]}
    profile: dict[str, Any] = {
        "storage_provider": {"type": "s3", "options": provider},
        "credentials_provider": {"type": "S3Credentials", "options": keys},
    }
    folder = Path(tempfile.mkdtemp())
    config: dict[str, Any] = {"profiles": {"bench": profile}}
    if is_cached:
        profile["caching_enabled"] = True
        config["cache"] = {"size": "20G", "location": str(folder.parent / "msc-cache")}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder / "config.json")
