"""What a checkpoint of each kind must hold, and how its bytes are judged.

*Ours*: CRC32C per block, and the bytes around the elements. A record is cut into pieces that can
be judged alone; inner cuts lie between blocks::

    | header |--- block 0 ---|--- block 1 ---|-- 2 --| trailer |
    |<------------ piece -------->|<--------- piece ---------->|

Header and trailer have no checksum. They follow from dtype, shape and position, so they are
made again and compared.

*Stock DCP*: the zip CRC32 of every record (`dcpstore.audit.zip`).

*Safetensors*: structure only, since the format has no checksums.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import chain
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcpstore.audit.scan import Finding, Inventory, Piece, Scanner
from dcpstore.audit.zip import Coverage, Expected, ZipScan
from dcpstore.config import ReadConfig
from dcpstore.errors import CorruptError, IncompatibleError, NotFoundError, StoreError
from dcpstore.format.checksum import find_bad_block
from dcpstore.format.dtypes import dtype_from_name, dtype_name
from dcpstore.format.manifest import DataObject, ItemId, Manifest, StoredItem
from dcpstore.format.metadata import (
    expected_items,
    item_id,
    metadata_from_manifest,
    metadata_of_files,
)
from dcpstore.format.record import plan_record
from dcpstore.format.safetensors import TensorInFile
from dcpstore.plan.coverage import find_flaws
from dcpstore.read.discovery import Discovered
from dcpstore.read.safetensors import (
    INDEX_FILE,
    find_files,
    flaws_of_file,
    flaws_of_index,
    read_header,
)
from dcpstore.store.base import ByteRange, ObjectInfo, Store
from dcpstore.store.ranges import join
from dcpstore.text import count_text, size_text


def _name_of(one: ItemId) -> str:
    """Name an item for people: the key, and where a chunk of it starts."""
    if not one.offsets or not any(one.offsets):
        return one.fqn
    return f"{one.fqn} at {list(one.offsets)}"


def _inspect_record(
    one: ItemId, item: StoredItem, span: ByteRange, data: memoryview
) -> Iterator[Finding]:
    """Yield a finding per run of bad blocks and per damaged side of the frame.

    Args:
        one: Which item.
        item: Where it lies, with checksums.
        span: Any of the record's header and trailer, and whole blocks of its payload.
        data: These bytes.
    """
    yield from _inspect_blocks(one, item, span, data)
    if item.kind == "raw":
        yield from _inspect_frame(one, item, span, data)


def _inspect_blocks(
    one: ItemId, item: StoredItem, span: ByteRange, data: memoryview
) -> Iterator[Finding]:
    payload = item.payload
    assert item.checksums is not None
    at = max(span.start, payload.start)
    end = min(span.end, payload.end)
    while at < end:
        first = (at - payload.start) // item.block_bytes
        view = data[at - span.start : end - span.start]
        bad = find_bad_block(view, first, item.checksums, item.block_bytes)
        if bad is None:
            return
        start = payload.start + bad * item.block_bytes
        at = min(start + item.block_bytes, payload.end)
        message = "not the bytes that were saved (CRC32C differs)"
        yield Finding("checksum", message, item.key, _name_of(one), ByteRange(start, at))


def _inspect_frame(
    one: ItemId, item: StoredItem, span: ByteRange, data: memoryview
) -> Iterator[Finding]:
    layout = plan_record(dtype_from_name(item.dtype), item.sizes, object_offset=item.record.start)
    sides = (
        (ByteRange(item.record.start, item.payload.start), layout.header),
        (ByteRange(item.payload.end, item.record.end), layout.trailer),
    )
    for side, expected in sides:
        start, end = max(side.start, span.start), min(side.end, span.end)
        if start >= end:
            continue
        found = data[start - span.start : end - span.start]
        if found != expected[start - side.start : end - side.start]:
            yield Finding(
                "framing",
                "the bytes around the elements are damaged; dcpstore does not need them, but"
                " stock torch does",
                item.key,
                _name_of(one),
                ByteRange(start, end),
            )


def _cut_record(
    one: ItemId, item: StoredItem, *, size_bytes: int, request_bytes: int
) -> Iterator[Piece]:
    """Yield the pieces of a record that lie in an object of ``size_bytes``.

    A record that the object's end cuts off loses the block that is cut in two.
    """
    start, limit = item.record.start, min(item.record.end, size_bytes)
    while start < limit:
        end = _cut_at(item, min(start + max(request_bytes, item.block_bytes), limit))
        if end <= start:
            if limit < item.record.end:
                return  # what is left of it is less than a block
            end = limit
        span = ByteRange(start, end)
        yield Piece(item.key, span, partial(_inspect_record, one, item, span))
        start = end


def _cut_at(item: StoredItem, position: int) -> int:
    """Move a cut back to the nearest place that splits no block."""
    payload = item.payload
    if position <= payload.start or position >= payload.end:
        return position
    whole = (position - payload.start) // item.block_bytes * item.block_bytes
    return payload.start + whole


def _check_inline(one: ItemId, item: StoredItem, manifest_key: str) -> Iterator[Finding]:
    """Yield a finding if the copy in the manifest is not what its checksums say."""
    if item.inline is None or item.checksums is None:
        return
    is_long = len(item.inline) != item.payload.num_bytes
    if is_long or find_bad_block(item.inline, 0, item.checksums, item.block_bytes) is not None:
        yield Finding(
            "mismatch",
            "the copy in the manifest is not the value that was saved",
            manifest_key,
            _name_of(one),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Sealed:
    """One metadata object and what it names.

    Attributes:
        key: The metadata object.
        metadata: Of the state dict.
        items: Where everything lies.
        manifest: Of a checkpoint of ours; None for a stock one.
        manifest_key: The object that the manifest lies in, where there is one.
    """

    key: str
    metadata: Metadata
    items: Mapping[ItemId, StoredItem]
    manifest: Manifest | None
    manifest_key: str

    @property
    def stored(self) -> Iterable[tuple[ItemId, StoredItem]]:
        """Everything that must lie in the folder."""
        return self.items.items() if self.manifest is None else self.manifest.stored


def open_sealed(discovered: Discovered, config: ReadConfig) -> Sealed:
    """Open metadata that were read.

    Raises:
        CorruptError: If they are damaged, or a pickle that names more than data.
        IncompatibleError: If a newer dcpstore wrote them.
    """
    if discovered.manifest is None:
        metadata, items = _open_stock(discovered, config)
        manifest = None
    else:
        manifest = discovered.decode_manifest(config.max_metadata_bytes)
        metadata, items = metadata_from_manifest(manifest), manifest.items
    return Sealed(discovered.key, metadata, items, manifest, discovered.manifest_key)


def _open_stock(
    discovered: Discovered, config: ReadConfig
) -> tuple[Metadata, Mapping[ItemId, StoredItem]]:
    """Unpickle; a damaged pickle may make objects that lack what they must have."""
    try:
        metadata = discovered.open(config)
        items = {item_id(index): item for index, item in metadata.storage_data.items()}
        for _ in chain(
            _shapes(metadata), expected_items(metadata), _compare_chunks(metadata, items)
        ):
            pass
    except (AttributeError, TypeError, ValueError, KeyError, OverflowError) as error:
        raise CorruptError(
            f"{discovered.key} holds damaged metadata: {error!r}", key=discovered.key
        ) from error
    return metadata, items


class SealedContents:
    """What the metadata of one folder name: usually one object, or one per rank.

    Args:
        seals: The metadata objects, opened.
        config: Size of requests.

    Attributes:
        layout: Ours if any of the metadata objects is.
        num_keys: Keys of the state dict.
        num_items: Stored chunks and values.
        num_attachments: Files that were sealed with them.
        data_keys: Objects that must be there, the metadata left out.
        metadata_keys: The metadata objects, and the manifests that are objects of their own.
    """

    def __init__(self, seals: Sequence[Sealed], config: ReadConfig) -> None:
        self._seals = seals
        self._config = config
        self._objects: dict[str, DataObject] = {}
        self._by_key: dict[str, list[tuple[ItemId, StoredItem]]] = {}
        for seal in seals:
            if seal.manifest is not None:
                self._objects.update((one.key, one) for one in seal.manifest.objects)
            for one, form in seal.stored:
                self._by_key.setdefault(form.key, []).append((one, form))
        for found in self._by_key.values():
            found.sort(key=lambda pair: pair[1].record)
        self._shapes = dict(chain.from_iterable(_shapes(seal.metadata) for seal in seals))
        self._coverage = Coverage()
        self._num_transformed = 0
        self._unclaimed_bytes = 0
        self._changed_marks: list[str] = []
        self._newer: list[str] = []
        self.layout = "dcpstore" if any(seal.manifest is not None for seal in seals) else "dcp"
        self.num_keys = len(set().union(*(seal.metadata.state_dict_metadata for seal in seals)))
        self.num_items = sum(len(seal.items) for seal in seals)
        self.num_attachments = sum(
            len(seal.manifest.attachments) for seal in seals if seal.manifest is not None
        )
        self.data_keys = frozenset(self._by_key.keys() | self._objects.keys())
        self.metadata_keys = frozenset(
            key for seal in seals for key in (seal.key, seal.manifest_key)
        )

    @property
    def checked_bytes(self) -> int:
        """Bytes compared so far with a checksum or with what they must be."""
        return self._coverage.checked_bytes

    def examine(self, store: Store, inventory: Inventory, scanner: Scanner) -> Iterator[Finding]:
        """Compare everything with the metadata; yield what is wrong, in no order."""
        for seal in self._seals:
            yield from _compare_chunks(seal.metadata, seal.items)
            if seal.manifest is not None:
                for one, form in seal.stored:
                    yield from _check_inline(one, form, seal.manifest_key)
        for key in sorted(self.data_keys):
            yield from self._compare_object(key, inventory)
        zips = ZipScan(store, self._config, self._coverage)
        yield from scanner.run(chain(self._blocks(inventory), zips.pieces(self._zips(inventory))))
        yield from zips.verdicts(scanner)

    # --- objects ---------------------------------------------------------------------

    def _compare_object(self, key: str, inventory: Inventory) -> Iterator[Finding]:
        info, expected = inventory.objects.get(key), self._objects.get(key)
        items = self._by_key.get(key, [])
        if info is None:
            yield _absence(key, items, inventory)
            return
        needed_bytes = max((item.record.end for _, item in items), default=0)
        size_bytes = max(needed_bytes, expected.size_bytes if expected else 0)
        if info.size_bytes < size_bytes:
            yield from _truncations(key, items, info.size_bytes, size_bytes)
        elif info.size_bytes > size_bytes:
            extra = ByteRange(size_bytes, info.size_bytes)
            if expected is not None:
                message = f"it has {info.size_bytes} bytes, {size_bytes} were saved"
                yield Finding("resized", message, key, span=extra)
            else:
                self._unclaimed_bytes += extra.num_bytes
        elif expected is not None:
            # Such as an attachment that another rank's of the same name stands for.
            claimed = join(item.record for _, item in items)
            self._unclaimed_bytes += size_bytes - sum(span.num_bytes for span in claimed)
        self._note_marks(key, inventory)

    def _note_marks(self, key: str, inventory: Inventory) -> None:
        """Another ETag or time means a copy or a replacement, which its bytes may survive."""
        info, expected = inventory.objects[key], self._objects.get(key)
        if expected is not None:
            if None not in (info.etag, expected.etag) and info.etag != expected.etag:
                self._changed_marks.append(key)
            return
        sealed_at = _time_of([seal.key for seal in self._seals], inventory)
        if sealed_at is not None and info.modified is not None and info.modified > sealed_at:
            self._newer.append(key)

    # --- bytes -----------------------------------------------------------------------

    def _blocks(self, inventory: Inventory) -> Iterator[Piece]:
        for one, item, size_bytes in self._present(inventory):
            if item.checksums is None:
                continue
            for piece in _cut_record(
                one, item, size_bytes=size_bytes, request_bytes=self._config.request_bytes
            ):
                self._coverage.count(checked=piece.span.num_bytes)
                yield piece

    def _zips(self, inventory: Inventory) -> Iterator[Expected]:
        for one, item, size_bytes in self._present(inventory):
            if item.checksums is not None:
                continue
            if item.transforms:
                self._num_transformed += 1
                self._coverage.count(unchecked=item.record.num_bytes)
            elif item.record.end <= size_bytes:
                dtype, sizes = self._shapes.get(one, ("", None))
                yield Expected(item.key, item.record, _name_of(one), dtype, sizes)

    def _present(self, inventory: Inventory) -> Iterator[tuple[ItemId, StoredItem, int]]:
        for key, items in sorted(self._by_key.items()):
            info = inventory.objects.get(key)
            if info is not None:
                for one, item in items:
                    yield one, item, info.size_bytes

    # --- notes -----------------------------------------------------------------------

    def notes(self) -> Iterator[str]:
        """Yield what was not checked and why, and what is unusual."""
        coverage = self._coverage
        if self.layout == "dcp":
            yield (
                "a stock checkpoint has no manifest: contents were compared with the zip CRC32 of"
                " each record, headers with the record's own directory. The metadata and padding"
                " inside records have no checksum"
            )
        if coverage.unchecked_bytes:
            yield f"not checked: {size_text(coverage.unchecked_bytes)} that have no checksum"
        if self._num_transformed:
            yield (
                f"not checked: {count_text(self._num_transformed, 'record')} that a stream"
                " extension transformed"
            )
        if coverage.num_opaque:
            yield f"not checked: {count_text(coverage.num_opaque, 'value')} in a form of its own"
        if self._unclaimed_bytes:
            yield f"not checked: {size_text(self._unclaimed_bytes)} that no item refers to"
        if self._changed_marks:
            yield (
                f"{count_text(len(self._changed_marks), 'object')} with another ETag than when"
                f" saved, such as {self._changed_marks[0]}: copied or put again since. The contents"
                " were compared as any other's"
            )
        if self._newer:
            yield (
                f"{count_text(len(self._newer), 'object')} newer than the metadata, such as"
                f" {self._newer[0]}. A stock save that was interrupted while it overwrote this"
                " checkpoint leaves such a mix of two steps, and so may a copy in another order"
            )


def _time_of(keys: Iterable[str], inventory: Inventory) -> datetime | None:
    """Return when the last of some objects was put, where that is known."""
    found = (inventory.objects.get(key) for key in keys)
    times = [info.modified for info in found if info is not None and info.modified is not None]
    return max(times, default=None)


def _absence(key: str, items: Sequence[tuple[ItemId, StoredItem]], inventory: Inventory) -> Finding:
    names = [_name_of(one) for one, _ in items]
    if key in inventory.refused:
        return Finding("unreadable", str(inventory.refused[key]), key)
    held = f"it held {count_text(len(names), 'item')}"
    shown = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
    return Finding("missing", f"{held}: {shown}" if names else "it held no item", key)


def _truncations(
    key: str, items: Sequence[tuple[ItemId, StoredItem]], size_bytes: int, expected_bytes: int
) -> Iterator[Finding]:
    message = f"the object ends at byte {size_bytes} of {expected_bytes}"
    at = size_bytes
    for one, item in items:
        if item.record.end > size_bytes:
            lost = ByteRange(max(item.record.start, size_bytes), item.record.end)
            at = max(at, lost.end)
            yield Finding("truncated", message, key, _name_of(one), lost)
    if at < expected_bytes:
        yield Finding("truncated", message, key, span=ByteRange(at, expected_bytes))


def _compare_chunks(metadata: Metadata, items: Mapping[ItemId, StoredItem]) -> Iterator[Finding]:
    """Look for chunks that are not stored, and for tensors that their chunks do not make up."""
    for one in expected_items(metadata):
        if one not in items:
            yield Finding("incomplete", "the metadata do not say where it lies", fqn=_name_of(one))
    for flaw in find_flaws(metadata.state_dict_metadata):
        yield Finding("incomplete", flaw.text, fqn=flaw.fqn)


def _shapes(metadata: Metadata) -> Iterator[tuple[ItemId, tuple[str, tuple[int, ...]]]]:
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            dtype = dtype_name(entry.properties.dtype)
            for chunk in entry.chunks:
                yield ItemId(fqn, tuple(chunk.offsets)), (dtype, tuple(chunk.sizes))


# --- safetensors -------------------------------------------------------------------------


class FileContents:
    """A folder of safetensors files without DCP metadata, as its index or a listing tells.

    Args:
        store: Rooted at the folder.

    Attributes:
        layout: Always the same.
        num_keys: Keys of the state dict; known once `examine` is done.
        num_items: Stored tensors and shards; known likewise.
        num_attachments: None, as the format has none.
        data_keys: The files.
        metadata_keys: The index, if there is one.
        checked_bytes: None: there is nothing to compare bytes with.

    Raises:
        CorruptError: If its index is damaged.
    """

    def __init__(self, store: Store) -> None:
        found = find_files(store)
        self._keys = found.keys
        self._weight_map = found.weight_map
        self.layout = "safetensors"
        self.num_keys = 0
        self.num_items = 0
        self.num_attachments = 0
        self.data_keys = frozenset(found.keys)
        self.metadata_keys = frozenset() if found.weight_map is None else frozenset([INDEX_FILE])
        self.checked_bytes = 0

    def examine(self, store: Store, inventory: Inventory, scanner: Scanner) -> Iterator[Finding]:
        """Compare everything with the headers; yield what is wrong, in no order."""
        for key in self._keys:
            info = inventory.objects.get(key)
            if key in inventory.refused:
                yield Finding("unreadable", str(inventory.refused[key]), key)
            elif info is None:
                yield Finding("missing", "the index or the other files' names promise it", key)
        present = [key for key in self._keys if key in inventory.objects]
        with ThreadPoolExecutor(scanner.max_requests, "dcpstore-audit") as executor:
            checked = list(
                executor.map(lambda key: _examine_file(store, key, inventory.objects[key]), present)
            )
        files: dict[str, Sequence[TensorInFile]] = {}
        for key, (tensors, found) in zip(present, checked, strict=True):
            if tensors is not None:
                files[key] = tensors
            yield from found
        self.num_keys = len({one.fqn for tensors in files.values() for one in tensors})
        self.num_items = sum(map(len, files.values()))
        yield from _compare_shards(files)
        for flaw in flaws_of_index(self._weight_map, files):
            yield Finding(*flaw)

    def notes(self) -> Iterator[str]:
        """Yield what was not checked and why."""
        yield (
            "not checked: the values. The safetensors format has no checksums; headers, sizes and"
            " index were compared"
        )


def _examine_file(
    store: Store, key: str, info: ObjectInfo
) -> tuple[Sequence[TensorInFile] | None, list[Finding]]:
    """Read the header of a file and compare it with the file's size."""
    try:
        header = read_header(store, key)
    except (CorruptError, NotFoundError) as error:
        return None, [Finding("metadata", str(error), key, span=ByteRange(0, info.size_bytes))]
    except StoreError as error:
        if error.retryable:
            raise
        return None, [Finding("unreadable", str(error), key)]
    found = [Finding(*flaw) for flaw in flaws_of_file(key, header, info.size_bytes)]
    return header.tensors, found


def _compare_shards(files: Mapping[str, Iterable[TensorInFile]]) -> Iterator[Finding]:
    """Look for shards of DCP's writer that do not make up their tensor."""
    shards: dict[str, list[TensorInFile]] = {}
    for tensors in files.values():
        for one in tensors:
            shards.setdefault(one.fqn, []).append(one)
    entries: dict[str, Any] = {}
    for fqn, parts in shards.items():
        try:
            entries.update(metadata_of_files("", {"": parts}).state_dict_metadata)
        except IncompatibleError:
            yield Finding("incomplete", "its shards have different ranks or dtypes", fqn=fqn)
    for flaw in find_flaws(entries):
        yield Finding("incomplete", flaw.text, fqn=flaw.fqn)
