"""One rank's part of one save: items and attachments, one after another, into packed objects.

Which of them go into which object, and in how large parts objects are sent, is planned before the
first byte is written.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from math import prod
from pickletools import genops
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from dcpstore.config import WriteConfig
from dcpstore.errors import CheckpointError, ConfigError, ConflictError, IncompatibleError
from dcpstore.format.checksum import BlockChecksummer
from dcpstore.format.dtypes import dtype_name
from dcpstore.format.manifest import DataObject, ItemKind, StoredItem
from dcpstore.format.payload import copy_bytes_out, is_freed, is_plain, payload_bytes, to_plain
from dcpstore.format.record import plan_record
from dcpstore.format.seal import data_key
from dcpstore.format.tensors import encode_opaque
from dcpstore.format.zip import read_members
from dcpstore.plan.values import ValueRecord
from dcpstore.report import Meter
from dcpstore.store.base import ByteRange, Store
from dcpstore.text import collector_paused
from dcpstore.torch_private import refused_globals
from dcpstore.write.cutoff import Cutoff
from dcpstore.write.source import ByteSource
from dcpstore.write.upload import ObjectStream, Uploads

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_RECORD_OVERHEAD_BYTES = 700  # for packing only; the true size is known when it is written
_SMALL_RECORD_BYTES = 1 << 16
_SCRATCH_BYTES = 1 << 20
_MARGIN = 64
_LEAST_PART_BYTES = 8 * _MIB  # 0.08 s of a 100 MB/s connection, about twice a request's delay


def plan_objects(sizes_bytes: Sequence[int], object_bytes: int) -> list[list[int]]:
    """Pack items, in their order, into objects of about ``object_bytes``.

    Order is kept, so that a load of the same layout reads each object from front to
    back. An item larger than ``object_bytes`` gets an object of its own, so that it does
    not hold up the seal of its neighbours.

    Args:
        sizes_bytes: Expected size of each item.
        object_bytes: Target size of an object.

    Returns:
        Positions of the items of each object. No object is empty.
    """
    objects: list[list[int]] = []
    room_bytes = -1
    for position, size in enumerate(sizes_bytes):
        if size <= room_bytes:
            objects[-1].append(position)
            room_bytes -= size
        else:
            objects.append([position])
            room_bytes = object_bytes - size
    return objects


def plan_part_bytes(total_bytes: int, num_objects: int, *, max_parts: int, most_bytes: int) -> int:
    """Choose the size of parts so that all connections end at about the same time.

    Parts go out in rounds of ``max_parts``. Where the last round is a part or two, the others
    wait for it: 1 GiB in 67 parts of 16 MiB takes three rounds of 32, and in parts of 12 MiB
    three shorter ones.

    Args:
        total_bytes: Of all objects.
        num_objects: Each of which may end with a short part.
        max_parts: Parts in flight.
        most_bytes: Size of a part where there are many.

    Returns:
        ``most_bytes``, or fewer whole MiB: as many as the same number of rounds takes.
    """
    least_bytes = min(_LEAST_PART_BYTES, most_bytes)
    num_rounds = -(-(total_bytes + num_objects * most_bytes) // (max_parts * most_bytes))
    num_parts = max(1, num_rounds * max_parts - num_objects)
    even_bytes = -(-total_bytes // num_parts // _MIB) * _MIB
    return min(most_bytes, max(least_bytes, even_bytes))


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank tells the coordinator about one item, in ``WriteResult.storage_data``.

    Or about one attachment.
    """

    item: StoredItem
    object: DataObject


_Stored: TypeAlias = tuple[StoredItem, BlockChecksummer]
"""An item as written; its checksums are known once its object is complete."""


@dataclass(slots=True)
class _Draft:
    """What was written of one item: its bytes, and perhaps an encoding beside them."""

    index: MetadataIndex
    stored: _Stored
    encoded: _Stored | None = None

    def finish(self) -> StoredItem:
        """Return the item with its checksums, once its object is complete."""
        item, checksummer = self.stored
        encoded = None
        if self.encoded is not None:
            encoded = replace(self.encoded[0], checksums=self.encoded[1].finish())
        return replace(item, checksums=checksummer.finish(), encoded=encoded)


@dataclass(slots=True)
class WriteStats:
    """What one rank's part of a save did.

    Attributes:
        num_objects: Data objects stored.
        num_requests: Puts, parts included and their beginning and end; retries not counted.
        stored_bytes: Bytes of the objects.
        peak_bytes: Memory that bytes on their way took.
    """

    num_objects: int = 0
    num_requests: int = 0
    stored_bytes: int = 0
    peak_bytes: int = 0


class WriteJob:
    """One rank's part of one save.

    Args:
        store: Rooted at the checkpoint's folder.
        config: Sizes and bounds.
        extensions: DCP stream transforms for every item.
        planner: Resolves items to data; called in the calling thread only.
        save_id: Part of every key.
        meter: Counts the bytes handed to the store; None where nobody watches.
        cutoff: Ends it early; None for never.
    """

    def __init__(
        self,
        store: Store,
        config: WriteConfig,
        extensions: Sequence[Any],
        planner: SavePlanner,
        save_id: str,
        meter: Meter | None = None,
        cutoff: Cutoff | None = None,
    ) -> None:
        self._store = store
        self._cutoff = cutoff
        self._config = config
        self._extensions = extensions
        self._planner = planner
        self._save_id = save_id
        self._meter = meter
        self._inline_bytes = 0
        self._refused: dict[str, list[str]] = {}
        self.keys: list[str] = []
        """Every key that this job may have put."""
        self.attachments: dict[str, Written] = {}
        """Where each attachment lies, by its name, once `run` returned."""
        self.stats = WriteStats()

    def run(
        self,
        items: Sequence[WriteItem],
        rank: int | None,
        attachments: Mapping[str, ByteSource] | None = None,
    ) -> list[WriteResult]:
        """Write all items, then the attachments by their names; return one result per item."""
        drafts: list[_Draft] = []
        attached: dict[str, _Stored] = {}
        sources = list((attachments or {}).items())
        sizes = [_expected_bytes(item) for item in items]
        sizes += [source.num_bytes for _, source in sources]
        names = [*(item.index.fqn for item in items), *(name for name, _ in sources)]
        objects = plan_objects(sizes, self._config.object_bytes)
        if objects:  # the last key is the longest
            last = data_key(rank or 0, len(objects) - 1, self._save_id)
            self._store.capabilities.limits.check_key(last)
        uploads = Uploads(
            self._store,
            self._config,
            part_bytes=self._part_bytes_for(names, sizes, objects),
            pin=torch.cuda.is_available(),
            meter=self._meter,
            lends=getattr(self._planner, "keeps_tensors", True),
            cutoff=self._cutoff,
        )
        if self._meter is not None:
            self._meter.expect(sum(sizes))
        with uploads:
            for number, positions in enumerate(objects):
                key = data_key(rank or 0, number, self._save_id)
                self.keys.append(key)
                stream = uploads.open(key)
                for at in positions:
                    if at < len(items):
                        drafts.append(self._write(stream, items[at]))
                    else:
                        name, source = sources[at - len(items)]
                        attached[name] = self._write_attachment(stream, source, sizes[at])
                stream.finish()
        self.stats = WriteStats(
            num_objects=len(uploads.objects),
            num_requests=uploads.num_requests,
            stored_bytes=sum(stored.size_bytes for stored in uploads.objects.values()),
            peak_bytes=uploads.pool.peak_bytes,
        )
        self._warn_of_refused()
        for name, (item, checksummer) in attached.items():
            whole = replace(item, checksums=checksummer.finish())
            self.attachments[name] = Written(whole, uploads.objects[item.key])
        with collector_paused():
            return [self._result(draft, uploads.objects) for draft in drafts]

    def _part_bytes_for(
        self, names: Sequence[str], sizes: Sequence[int], objects: Sequence[Sequence[int]]
    ) -> int:
        """Choose the size of parts: even, and as large as the largest object needs.

        Raises:
            ConfigError: If the store or the budget is too small for an item.
        """
        usual_bytes = plan_part_bytes(
            sum(sizes),
            len(objects),
            max_parts=self._config.max_uploads,
            most_bytes=self._config.part_bytes,
        )
        largest = max(objects, key=lambda one: sum(sizes[at] for at in one), default=())
        num_bytes = sum(sizes[at] for at in largest)
        num_bytes += num_bytes // _MARGIN  # the rest of the records, and what transforms add
        most_bytes = self._config.budget_bytes // 2
        try:
            part_bytes = self._store.capabilities.limits.part_bytes_for(num_bytes, usual_bytes)
            if part_bytes > most_bytes and part_bytes > usual_bytes:
                raise ConfigError(
                    f"it needs parts of {part_bytes} bytes, of which budget_bytes must hold two,"
                    f" and it is {self._config.budget_bytes}. Raise it"
                )
        except ConfigError as error:
            name = names[max(largest, key=sizes.__getitem__)]
            raise ConfigError(
                f"{name!r} cannot be saved at {self._store.url}: {error.message}; or save it in"
                " chunks: a tensor with dcpstore.SavePlanner(max_item_bytes=...) or in shards, an"
                " attachment as several"
            ) from error
        return part_bytes

    def _result(self, draft: _Draft, objects: Mapping[str, DataObject]) -> WriteResult:
        item = draft.finish()
        written = Written(item, objects[item.key])
        return WriteResult(draft.index, item.record.num_bytes, written)

    def _write(self, stream: ObjectStream, write_item: WriteItem) -> _Draft:
        data, index = self._planner.resolve_data(write_item), write_item.index
        if write_item.type != WriteItemType.BYTE_IO:
            return _Draft(index, self._write_tensor(stream, _check_tensor(write_item, data)))
        if not isinstance(data, io.BytesIO):
            raise IncompatibleError(
                "the planner's resolve_data gave"
                f" {type(data).__name__} for a value; DCP's contract is an io.BytesIO"
            )
        content = data.getbuffer()
        stored = self._write_pieces(stream, [content], "bytes")
        if not isinstance(data, ValueRecord):
            # Of another planner, whose values the default load may not open.
            if names := _refused_names(content):
                self._refused[index.fqn] = names
        elif data.encoded is not None:
            return _Draft(index, stored, self._write_pieces(stream, [data.encoded], "value"))
        return _Draft(index, stored)

    def _warn_of_refused(self) -> None:
        if not self._refused:
            return
        shown = ", ".join(
            f"{fqn!r} ({', '.join(names[:3])})" for fqn, names in list(self._refused.items())[:10]
        )
        more = f" and {len(self._refused) - 10} more" if len(self._refused) > 10 else ""
        logger.warning(
            "%s: the planner pickled values that a load opens only with allow_pickle=True:"
            " %s%s. Save with dcpstore.SavePlanner, which stores many of them without pickle and"
            " refuses the others before anything is written",
            self._store.url,
            shown,
            more,
        )

    def _write_tensor(self, stream: ObjectStream, tensor: torch.Tensor) -> _Stored:
        sizes = tuple(tensor.shape)
        if not is_plain(tensor):
            return self._write_pieces(stream, [encode_opaque(tensor)], "record", sizes)
        if self._extensions:
            return self._write_pieces(stream, _record_pieces(tensor), "record", sizes)
        start, checksummer = stream.tell(), BlockChecksummer(self._config.checksum_block_bytes)
        layout = plan_record(tensor.dtype, sizes, object_offset=start)
        stream.write(layout.header)
        stream.begin_checked(checksummer)
        inline = None
        if self._may_inline(layout.payload_bytes):
            inline = payload_bytes(tensor)
            stream.write(inline)
        else:
            stream.write_tensor(tensor)
        stream.end_checked()
        stream.write(layout.trailer)
        payload = start + layout.payload_offset
        item = StoredItem(
            key=stream.key,
            record=ByteRange(start, stream.tell()),
            kind="raw",
            payload=ByteRange(payload, payload + layout.payload_bytes),
            dtype=dtype_name(tensor.dtype),
            sizes=sizes,
            block_bytes=self._config.checksum_block_bytes,
            inline=inline,
        )
        return item, checksummer

    def _write_pieces(
        self,
        stream: ObjectStream,
        pieces: Iterable[memoryview | bytes],
        kind: ItemKind,
        sizes: tuple[int, ...] = (),
    ) -> _Stored:
        """Write what is only read as a whole, through the transforms if there are any.

        Args:
            stream: Of the object.
            pieces: Its bytes; a list where there are no transforms.
            kind: How they are to be read.
            sizes: Of a tensor.
        """
        start, checksummer = stream.tell(), BlockChecksummer(self._config.checksum_block_bytes)
        stream.begin_checked(checksummer)
        sink: Any = _KeepOpen(stream)
        for extension in self._extensions:
            sink = extension.transform_to(sink)
        for piece in pieces:
            sink.write(piece)
        sink.close()
        stream.end_checked()
        record = ByteRange(start, stream.tell())
        may_inline = not self._extensions and self._may_inline(record.num_bytes)
        item = StoredItem(
            key=stream.key,
            record=record,
            kind=kind,
            payload=record,
            sizes=sizes,
            # Readers undo them in this order: what wrote to the object last comes first. Stock
            # writers record the reverse, so stock cannot load what it saved with two extensions.
            transforms=tuple(one.get_descriptor() for one in self._extensions),
            block_bytes=self._config.checksum_block_bytes,
            inline=b"".join(pieces) if may_inline else None,
        )
        return item, checksummer

    def _write_attachment(
        self, stream: ObjectStream, source: ByteSource, num_bytes: int
    ) -> _Stored:
        """Write an attachment as it is; stream extensions are for what torch reads."""
        start, checksummer = stream.tell(), BlockChecksummer(self._config.checksum_block_bytes)
        kept: list[bytes] | None = [] if self._may_inline(num_bytes) else None
        stream.begin_checked(checksummer)
        with closing(source.pieces()) as pieces:
            for piece in pieces:
                stream.write(piece)
                if stream.tell() - start > num_bytes:
                    break
                if kept is not None:
                    kept.append(bytes(piece))
        stream.end_checked()
        span = ByteRange(start, stream.tell())
        if span.num_bytes != num_bytes:
            raise ConflictError(
                f"{source} had {num_bytes} bytes when it began to be saved, and another size when"
                " it was read. Attach what nobody writes to any more, or its bytes"
            )
        item = StoredItem(
            key=stream.key,
            record=span,
            kind="bytes",
            payload=span,
            block_bytes=self._config.checksum_block_bytes,
            inline=None if kept is None else b"".join(kept),
        )
        return item, checksummer

    def _may_inline(self, num_bytes: int) -> bool:
        total = self._inline_bytes + num_bytes
        if num_bytes > self._config.inline_bytes or total > self._config.inline_rank_bytes:
            return False
        self._inline_bytes = total
        return True


class _KeepOpen(io.RawIOBase):
    """Lets a transform close its output without closing the object it is a part of."""

    def __init__(self, stream: ObjectStream) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._stream.write(data)


def _expected_bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        known = item.bytes_io_data
        return _RECORD_OVERHEAD_BYTES if known is None else known.nbytes
    elements = prod(item.tensor_data.chunk.sizes)
    return _RECORD_OVERHEAD_BYTES + elements * item.tensor_data.properties.dtype.itemsize


def _check_tensor(item: WriteItem, data: object) -> torch.Tensor:
    if not isinstance(data, torch.Tensor):
        raise IncompatibleError(
            f"the planner's resolve_data gave {type(data).__name__} for the tensor"
            f" {item.index.fqn!r}"
        )
    planned = item.tensor_data
    if planned is not None and tuple(data.shape) != tuple(planned.chunk.sizes):
        raise IncompatibleError(
            f"{item.index.fqn!r} was planned as a chunk of shape {tuple(planned.chunk.sizes)} and"
            f" resolved to shape {tuple(data.shape)}"
        )
    tensor = to_plain(data)
    if is_plain(tensor) and is_freed(tensor):
        raise IncompatibleError(
            f"the memory of {item.index.fqn!r} was freed: its storage is empty."
            " With FSDP, save the sharded state dict, not parameters outside forward"
        )
    return tensor


def _record_pieces(tensor: torch.Tensor) -> Iterator[memoryview | bytes]:
    """Yield a plain tensor's record in pieces of bounded size, for a transform."""
    layout = plan_record(tensor.dtype, tuple(tensor.shape))
    yield layout.header
    scratch = torch.empty(_SCRATCH_BYTES, dtype=torch.uint8)
    for start in range(0, layout.payload_bytes, _SCRATCH_BYTES):
        end = min(start + _SCRATCH_BYTES, layout.payload_bytes)
        copy_bytes_out(tensor, start, end, scratch[: end - start])
        yield scratch.numpy().data[: end - start]
    yield layout.trailer


def _refused_names(record: memoryview) -> list[str]:
    """Return what a ``torch.save`` record names that ``torch.load(weights_only=True)`` refuses.

    Nothing is unpickled. Of what is no record of that form nothing is known: an empty list.
    """
    # A name takes two lines of the pickle, and the rest of a small record has one.
    if len(record) <= _SMALL_RECORD_BYTES and bytes(record).count(b"\n") < 2:
        return []
    try:
        data = bytes(read_members(record, "a value")["data.pkl"])
        named = [str(one) for opcode, one, _ in genops(data) if opcode.name == "GLOBAL"]
    except (CheckpointError, ValueError):
        return []
    return refused_globals((module, name) for module, _, name in (n.partition(" ") for n in named))
