"""The files that were sealed with a checkpoint, by name. Needs no torch.

1. `discover`: one GET of ``.metadata``, and one of a large manifest
2. ranged GETs of whole checksum blocks, verified; none for what lies in the manifest
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

from dcpstore.config import ReadConfig
from dcpstore.errors import CorruptError, NotFoundError
from dcpstore.format.checksum import find_bad_block
from dcpstore.format.manifest import StoredItem, attachment_text
from dcpstore.read.discovery import discover
from dcpstore.store import open_store
from dcpstore.store.base import ByteRange, Store
from dcpstore.store.folder import Folder
from dcpstore.store.retry import read_twice_if_damaged
from dcpstore.text import names_text


def read_attachment(
    url: str | os.PathLike[str],
    name: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    config: ReadConfig | None = None,
    store_opener: Callable[..., Store] = open_store,
) -> bytes:
    """Read a file that was sealed with a checkpoint. Needs no torch and no ranks.

    ```python
    state = json.loads(dcpstore.read_attachment("s3://bucket/run/step-100", "data-0.json"))
    ```

    Args:
        url: Folder of the checkpoint.
        name: Of the attachment; ``dcpstore show`` lists them.
        storage_options: fsspec's options for the URL's protocol.
        config: Requests in flight, retries, and whether to verify.
        store_opener: Opens the store, for tests.

    Raises:
        NotFoundError: If there is no checkpoint, or it has no such attachment.
        CorruptError: If stored bytes are not those that were saved.
        IncompatibleError: If a newer dcpstore wrote the checkpoint.
        StoreError: If the store refuses or fails.
    """
    config = config or ReadConfig()
    folder = Folder(url, storage_options, config, store_opener)
    try:
        store = folder.open()
        found = discover(store, config)
        attachments: Mapping[str, StoredItem] = {}
        if found.manifest is not None:
            attachments = found.decode_manifest(config.max_metadata_bytes).attachments
        item = find_attachment(attachments, name, store.url)
        return read_whole(list(fetches(store, name, item, config)), config)
    finally:
        folder.close()


def find_attachment(attachments: Mapping[str, StoredItem], name: str, url: str) -> StoredItem:
    """Return where an attachment lies.

    Raises:
        NotFoundError: If there is none of that name; tells which there are.
    """
    if name not in attachments:
        known = names_text(sorted(attachments))
        raise NotFoundError(f"{url}: no attachment {name!r}; of attachments it has {known}")
    return attachments[name]


def read_whole(calls: Sequence[Fetch], config: ReadConfig) -> bytes:
    """Read an attachment into memory, with many requests at a time; see `fetches`.

    Raises:
        CorruptError: If its bytes are not those that were saved.
        NotFoundError: If its object is gone.
    """
    if len(calls) <= 1:
        return b"".join(call() for _, call in calls)
    with ThreadPoolExecutor(config.max_requests, "dcpstore-read") as executor:
        return b"".join(executor.map(lambda one: one[1](), calls))


Fetch: TypeAlias = tuple[int, Callable[[], memoryview]]
"""How many bytes a call returns, and the call."""


def fetches(store: Store, name: str, item: StoredItem, config: ReadConfig) -> Iterator[Fetch]:
    """Yield calls that return an attachment's bytes, one piece after another, each verified.

    They may run at the same time.
    """
    if item.inline is not None:
        yield len(item.inline), partial(_check, name, item, item.payload, item.inline, config)
        return
    block_bytes = max(item.block_bytes, 1)
    step = max(config.request_bytes // block_bytes, 1) * block_bytes
    for start in range(item.payload.start, item.payload.end, step):
        span = ByteRange(start, min(start + step, item.payload.end))
        yield span.num_bytes, partial(_fetch, store, name, item, span, config)


def _fetch(
    store: Store, name: str, item: StoredItem, span: ByteRange, config: ReadConfig
) -> memoryview:
    def read() -> memoryview:
        return _check(name, item, span, store.get_range(item.key, *span), config)

    return read_twice_if_damaged(read)


def _check(
    name: str, item: StoredItem, span: ByteRange, data: bytes | memoryview, config: ReadConfig
) -> memoryview:
    """Return bytes once their blocks were compared with the checksums."""
    view = memoryview(data)
    if not config.verify or item.checksums is None or not len(view):
        return view
    first = (span.start - item.payload.start) // item.block_bytes
    bad = find_bad_block(view, first, item.checksums, item.block_bytes)
    if bad is None:
        return view
    start = item.payload.start + bad * item.block_bytes
    end = min(start + item.block_bytes, item.payload.end)
    raise CorruptError(
        f"{attachment_text(name)!r}: object {item.key}, bytes [{start}, {end}) are not the bytes"
        " that were saved (CRC32C differs)",
        key=item.key,
        start=start,
        end=end,
    )
