"""What is measured: stock DCP, ours on both engines, and the bare engine as the limit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

BUCKET = "bench"
StateDict = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class System:
    """One way to save and to load.

    Attributes:
        label: For the table.
        layout: Whose checkpoints it loads: ``stock`` or ``ours``.
        save: Called with the state, a folder's URL and storage options.
        load: Likewise, with the targets.
    """

    label: str
    layout: str
    save: Callable[[StateDict, str, dict[str, Any]], object]
    load: Callable[[StateDict, str, dict[str, Any]], object]


def storage_options(endpoint_url: str) -> dict[str, Any]:
    """fsspec's options for the benchmark's server, the same for all systems."""
    return {
        "key": "test",
        "secret": "test",
        "endpoint_url": endpoint_url,
        "client_kwargs": {"region_name": "us-east-1"},
    }


def _stock_save(threads: int) -> Callable[..., object]:
    def save(state: StateDict, url: str, options: dict[str, Any]) -> None:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        writer = FsspecWriter(url, thread_count=threads, **options)
        _quietly(lambda: dcp.save(state, storage_writer=writer, no_dist=True))

    return save


def _stock_load(state: StateDict, url: str, options: dict[str, Any]) -> None:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    _quietly(lambda: dcp.load(state, storage_reader=FsspecReader(url, **options), no_dist=True))


def _our_save(engine: Any) -> Callable[..., object]:
    def save(state: StateDict, url: str, options: dict[str, Any]) -> None:
        import dcpstore

        config = dcpstore.WriteConfig(engine=engine)
        writer = dcpstore.ObjectStoreWriter(url, storage_options=options, config=config)
        _quietly(lambda: dcp.save(state, storage_writer=writer, no_dist=True))

    return save


def _our_load(engine: Any) -> Callable[..., object]:
    def load(state: StateDict, url: str, options: dict[str, Any]) -> None:
        import dcpstore

        config = dcpstore.ReadConfig(engine=engine)
        reader = dcpstore.ObjectStoreReader(url, storage_options=options, config=config)
        _quietly(lambda: dcp.load(state, storage_reader=reader, no_dist=True))

    return load


def _quietly(call: Callable[[], object]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch on no_dist, in every run
        call()


# --- the bare engine -----------------------------------------------------------------


def _bare_store(options: dict[str, Any]) -> Any:
    """obstore's client with the settings that ours uses."""
    from obstore.store import S3Store

    return S3Store(
        BUCKET,
        config={
            "access_key_id": options["key"],
            "secret_access_key": options["secret"],
            "endpoint": options["endpoint_url"],
            "region": "us-east-1",
            "unsigned_payload": True,
        },
        client_options={"allow_http": True, "timeout": "15min"},
    )


def _key(url: str, name: str) -> str:
    return f"{url.removeprefix(f's3://{BUCKET}/')}/{name}"


def _bare_save(state: StateDict, url: str, options: dict[str, Any]) -> None:
    """Put a tensor's own memory as one object, with the part size and concurrency of ours."""
    import obstore

    from dcpstore import WriteConfig

    config = WriteConfig()
    (payload,) = (memoryview(tensor.view(torch.uint8).numpy().data) for tensor in state.values())
    starts = range(0, len(payload), config.part_bytes)
    obstore.put(
        _bare_store(options),
        _key(url, "all"),
        iter([payload[start : start + config.part_bytes] for start in starts]),
        use_multipart=True,
        chunk_size=config.part_bytes,
        max_concurrency=config.budget_bytes // config.part_bytes,
    )


def _bare_load(state: StateDict, url: str, options: dict[str, Any]) -> None:
    """Get as many bytes in ranges, with the request size and concurrency of ours; drop them."""
    import obstore

    from dcpstore import ReadConfig

    config = ReadConfig()
    store, key = _bare_store(options), _key(url, "all")
    total = sum(tensor.nbytes for tensor in state.values())

    def get(start: int) -> int:
        end = min(total, start + config.request_bytes)
        return len(obstore.get_range(store, key, start=start, end=end))

    with ThreadPoolExecutor(config.max_requests) as executor:
        assert sum(executor.map(get, range(0, total, config.request_bytes))) == total


SYSTEMS = {
    "stock": System("stock DCP (s3fs)", "stock", _stock_save(1), _stock_load),
    "stock-8": System("stock DCP (s3fs), 8 threads", "stock", _stock_save(8), _stock_load),
    "ours": System("dcpstore (obstore)", "ours", _our_save("obstore"), _our_load("obstore")),
    "ours-fsspec": System("dcpstore (s3fs)", "ours", _our_save("fsspec"), _our_load("fsspec")),
    "bare": System("bare obstore", "bare", _bare_save, _bare_load),
}
