"""The bare engine: obstore moves as many bytes and does nothing else. The limit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.systems.base import StateDict, System

__all__ = ["bare", "open_bare", "save_as_one"]


def bare(label: str, layout: str, *, checks: bool = False) -> System:
    """Return obstore's put and ranged gets, sized and concurrent as dcpstore's.

    Args:
        label: For the table.
        layout: Its own.
        checks: Whether a save also takes the CRC32C of what it puts, block by block: the least
            that a save whose bytes can be verified costs.
    """
    save = partial(save_as_one, checks=checks)
    return System(
        label=label, layout=layout, save=save, load=_load, is_bare=True, is_variant=checks
    )


def open_bare(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    """Return obstore's client with the settings that ours uses, and the folder in its bucket."""
    from obstore.store import S3Store

    bucket, _, folder = url.removeprefix("s3://").partition("/")
    authority = os.environ.get("AWS_CA_BUNDLE")
    trust = {"root_certificate": Path(authority).read_bytes()} if authority else {}
    store = S3Store(
        bucket,
        config={
            "access_key_id": options["key"],
            "secret_access_key": options["secret"],
            "endpoint": options["endpoint_url"],
            "region": "us-east-1",
            "unsigned_payload": True,
        },
        client_options={"allow_http": True, "timeout": "15min", **trust},
    )
    return store, folder


def save_as_one(state: StateDict, url: str, options: dict[str, Any], *, checks: bool) -> None:
    """Put a tensor's own memory as one object, with the part size and concurrency of ours."""
    import obstore
    import torch

    from dcpstore import WriteConfig
    from dcpstore.format.checksum import BlockChecksummer
    from dcpstore.write.job import plan_part_bytes

    config = WriteConfig()
    (payload,) = (memoryview(tensor.view(torch.uint8).numpy().data) for tensor in state.values())
    part_bytes = plan_part_bytes(
        len(payload), 1, max_parts=config.max_uploads, most_bytes=config.part_bytes
    )
    checksummer = BlockChecksummer(config.checksum_block_bytes)

    def parts() -> Iterator[memoryview]:
        for start in range(0, len(payload), part_bytes):
            part = payload[start : start + part_bytes]
            if checks:
                checksummer.update(part)
            yield part

    store, folder = open_bare(url, options)
    obstore.put(
        store,
        f"{folder}/all",
        parts(),
        use_multipart=True,
        chunk_size=part_bytes,
        max_concurrency=config.max_uploads,
    )


def _load(state: StateDict, url: str, options: dict[str, Any]) -> None:
    """Get as many bytes in ranges, with the request size and concurrency of ours; drop them."""
    import obstore

    from dcpstore import ReadConfig

    config = ReadConfig()
    store, folder = open_bare(url, options)
    total = sum(tensor.nbytes for tensor in state.values())

    def get(start: int) -> int:
        end = min(total, start + config.request_bytes)
        return len(obstore.get_range(store, f"{folder}/all", start=start, end=end))

    with ThreadPoolExecutor(config.max_requests) as executor:
        assert sum(executor.map(get, range(0, total, config.request_bytes))) == total
