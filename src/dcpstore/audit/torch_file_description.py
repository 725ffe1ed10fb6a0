"""What a ``torch.save`` file holds, told from its directory and its pickle; no tensor is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from dcpstore.audit.describe import Described, DescribedObject, Description, Shard, natural_order
from dcpstore.config import ReadConfig
from dcpstore.read.torch_file import TorchFile, open_torch_file
from dcpstore.torch_private import flatten_state_dict

_ROOT = "root"


def describe_torch_file(
    url: str, *, storage_options: Mapping[str, Any] | None = None, config: ReadConfig | None = None
) -> Description:
    """Describe a ``torch.save`` file. Only what ``weights_only=True`` allows is unpickled.

    Keys are those that DCP would give the saved state dict.

    Raises:
        NotFoundError: If there is no such file.
        CorruptError: If it is damaged or names more than data.
        IncompatibleError: If it has the form of torch before 1.6, or another.
    """
    with open_torch_file(url, storage_options=storage_options, config=config) as file:
        state = file.value if isinstance(file.value, Mapping) else {_ROOT: file.value}
        flat, _ = flatten_state_dict(dict(state))
        name = file.url.rsplit("/", 1)[-1]
        entries = [_describe(file, name, str(key), value) for key, value in flat.items()]
        entries.sort(key=lambda entry: natural_order(entry.key))
        return Description(
            url=file.url,
            layout="torch_file",
            entries=tuple(entries),
            objects=(
                DescribedObject(
                    name, None, len(file.storages), _stored_bytes(file), file.size_bytes
                ),
            ),
            remarks=_sharing(file, flat.values()),
        )


def _describe(file: TorchFile, name: str, key: str, value: object) -> Described:
    if not isinstance(value, torch.Tensor):
        return Described(key, "", (), is_tensor=False, shards=())
    shards: tuple[Shard, ...] = ()
    place = file.place(value)
    if place is not None:
        storage, span = file.storages[place.storage_key], place.span()
        shards = (
            Shard(
                object_key=name,
                start=storage.member.header_offset,
                stored_bytes=storage.num_bytes,
                num_bytes=span.num_bytes,
                offsets=(0,) * value.dim(),
                sizes=tuple(value.shape),
            ),
        )
    dtype = str(value.dtype).removeprefix("torch.")
    return Described(key, dtype, tuple(value.shape), is_tensor=True, shards=shards)


def _stored_bytes(file: TorchFile) -> int:
    return sum(storage.num_bytes for storage in file.storages.values())


def _sharing(file: TorchFile, values: Any) -> tuple[str, ...]:
    keys = [file.storage_key(value) for value in values if isinstance(value, torch.Tensor)]
    counts = Counter(key for key in keys if key is not None)
    num_sharing = sum(count for count in counts.values() if count > 1)
    if not num_sharing:
        return ()
    return (f"{num_sharing} tensors share storage with others: their stored bytes count twice",)
