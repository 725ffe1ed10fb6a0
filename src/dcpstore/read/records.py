"""Records that must be looked into: by others' writers, opaque, or transformed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dcpstore.errors import CheckpointError, CorruptError
from dcpstore.format.manifest import StoredItem
from dcpstore.format.record import HEAD_BYTES, NeedMoreBytes, parse_record_head
from dcpstore.format.tensors import decode_opaque
from dcpstore.format.views import RangeView
from dcpstore.read.targets import Slot, as_raw, copy_box, copy_decoded
from dcpstore.store.base import Store
from dcpstore.torch_private import default_extension_registry

if TYPE_CHECKING:
    from typing_extensions import Buffer


# Below this, a foreign record is fetched whole and looked into afterwards; above it, a
# small request for its head saves fetching what is not needed.
_WHOLE_RECORD_BYTES = 1 << 20


def is_worth_placing(item: StoredItem) -> bool:
    """Tell whether to find out where an item's payload lies before fetching it."""
    return (
        item.kind == "record"
        and not item.transforms
        and item.checksums is None
        and item.record.num_bytes > _WHOLE_RECORD_BYTES
    )


def place(store: Store, item: StoredItem) -> tuple[StoredItem, list[int]]:
    """Look into a record's head, by one small request nearly always.

    Returns:
        The item, raw if it is a plain tensor, and the bytes of each request.
    """
    sizes = [HEAD_BYTES]
    while True:
        start = item.record.start
        head = store.get_range(item.key, start, start + sizes[-1])
        answer = parse_record_head(head, item.record.num_bytes)
        if not isinstance(answer, NeedMoreBytes):
            return as_raw(item, answer), sizes
        sizes.append(answer.num_bytes)


def decode(slot: Slot, url: str, registry: Any) -> None:
    """Turn a whole record, just collected, into its targets' values.

    Args:
        slot: Complete.
        url: Of the checkpoint, for messages.
        registry: DCP's extension registry; None for torch's own.

    Raises:
        CorruptError: If an extension cannot be undone.
    """
    content = slot.take_content()
    if slot.item.transforms:
        content = memoryview(_untransform(slot.item, content, url, registry))
    if slot.targets[0].tensor is None:
        slot.loaded = bytes(content)
        return
    raw = as_raw(slot.item, parse_record_head(content, len(content)))
    if raw.kind == "raw":
        start = raw.payload.start - raw.record.start
        for target in slot.targets:
            copy_box(raw, content[start : start + raw.payload.num_bytes], target)
    else:
        tensor = decode_tensor(slot.item, content, url, slot.targets[0].fqn)
        for target in slot.targets:
            copy_decoded(tensor, target)


def decode_tensor(item: StoredItem, content: Buffer, url: str, fqn: str) -> torch.Tensor:
    """Return the tensor of a record that is more than elements.

    Raises:
        CorruptError: If the record holds none, or names what torch does not hold safe.
    """
    try:
        return decode_opaque(content)
    except CheckpointError:
        raise
    except Exception as error:
        raise CorruptError(
            f"{url}: object {item.key}, bytes [{item.record.start}, {item.record.end}): the record"
            f" of {fqn!r} is no tensor that torch opens: {error!s:.500}",
            key=item.key,
            start=item.record.start,
            end=item.record.end,
            fqn=fqn,
        ) from error


def _untransform(item: StoredItem, content: memoryview, url: str, registry: Any) -> bytes:
    stream: Any = RangeView.over_buffer(content)
    extensions = registry or default_extension_registry()
    try:
        for extension in extensions.from_descriptor_list(item.transforms):
            stream = extension.transform_from(stream)
        return bytes(stream.read(-1))
    except Exception as error:
        raise CorruptError(
            f"{url}: object {item.key}, bytes [{item.record.start}, {item.record.end}): cannot"
            f" undo the extensions {item.transforms}: {error!r}",
            key=item.key,
            start=item.record.start,
            end=item.record.end,
        ) from error
