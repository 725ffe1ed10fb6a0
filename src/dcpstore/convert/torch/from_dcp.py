"""`dcp_to_torch_save`: a DCP checkpoint, of whatever layout, becomes one ``torch.save`` file.

A storage in the file is as long as the tensors that view it need, and where they lie in it is
kept: views stay views, and tied tensors stay tied. Most storages are one tensor, row by row,
and stream through; those that are put together of several tensors, or in another order,
are assembled in memory.

Where `torch_save_to_dcp` made the checkpoint, the structure of its file is restored. Any
other checkpoint says as much as DCP keeps: paths of nested keys, if its planner kept them,
and that keys share a tensor, if they name the same bytes.

1. (coordinator) rebuild the structure with stand-ins; choose, rename and cast its leaves
2. decide what each storage of the file is made of, and pickle the structure: now the file's
   every byte but the tensors' is known
3. write the file front to back: storages stream through in blocks of rows, those ahead being
   read while some are written
4. the upload is completed: the file appears

One object is written front to back by one process: the parts of a multipart upload belong to
the process that began it, in every engine, and the bytes of other ranks would have to travel
to it. So the coordinator converts and the other ranks wait for its result.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from typing_extensions import Unpack

from dcpstore.config import WriteConfig
from dcpstore.convert.dcp.source import Block, plan_blocks, read_blocks
from dcpstore.convert.options import Conversion, ConversionOptions
from dcpstore.convert.output import Outputs, reject_existing
from dcpstore.convert.selection import ConvertResult
from dcpstore.convert.torch.structure import (
    LAYOUT_KEY,
    Layout,
    Leaves,
    PickledStructure,
    StorageViews,
    cast_stand_ins,
    decode_layout,
    is_stand_in,
    pickle_structure,
    read_record,
    rearrange,
    storage_bytes,
    view_of,
)
from dcpstore.errors import ConfigError, CorruptError, IncompatibleError
from dcpstore.format.dtypes import dtype_name, row_major_strides
from dcpstore.format.payload import as_bytes
from dcpstore.format.seal import METADATA_KEY, save_id_of
from dcpstore.format.tensors import load_record
from dcpstore.format.zip import TorchZipWriter, overhead_bytes
from dcpstore.ranks import steps
from dcpstore.read.checkpoint import BoxRead, Checkpoint, open_checkpoint
from dcpstore.read.torch_file import Storages, unpickle
from dcpstore.read.torch_save import flatten
from dcpstore.report import Meter, Phases
from dcpstore.store.folder import Folder, file_location, parse_location
from dcpstore.torch_private import meta_storage, set_element, set_lazy_bits, storage_identity

_ALIGN_BYTES = 16  # the largest element


@dataclass(frozen=True, slots=True)
class Rows:
    """A storage that is one tensor's elements in row-major order.

    Attributes:
        fqn: Its key in the checkpoint.
        dtype: What its elements are converted to.
    """

    fqn: str
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Assembled:
    """A storage into which several tensors are laid, or one in another order.

    Attributes:
        parts: Key of each in the checkpoint, and a stand-in that lies as it does.
        base_bytes: Position of the storage's first byte in the stand-ins' storage.
    """

    parts: Sequence[tuple[str, torch.Tensor]]
    base_bytes: int

    def target(self, stand_in: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Return where a part lies in the storage's memory; what repeats itself, once."""
        out = torch.empty(0, dtype=stand_in.dtype, device="cpu")
        offset = int(stand_in.storage_offset()) - self.base_bytes // stand_in.dtype.itemsize
        steps = zip(stand_in.size(), stand_in.stride(), strict=True)
        sizes = [size if stride else 1 for size, stride in steps]
        out.set_(memory.untyped_storage(), offset, sizes, stand_in.stride())
        return set_lazy_bits(out, conj=stand_in.is_conj(), neg=stand_in.is_neg())


@dataclass(frozen=True, slots=True)
class Member:
    """A storage that a record holds as it is.

    Attributes:
        fqn: Key of the value or opaque tensor whose record it is; None for the layout's archive.
        number: Of the storage in the record.
    """

    fqn: str | None
    number: int


Content: TypeAlias = Rows | Assembled | Member


@dataclass(frozen=True, slots=True)
class _Placed:
    num_bytes: int
    base_bytes: int = 0
    is_compact: bool = False


class PlacedViews(StorageViews):
    """Where stand-ins will lie in the storages of the file.

    Args:
        placed: What becomes of each storage, by identity.
    """

    def __init__(self, placed: Mapping[int, _Placed]) -> None:
        super().__init__({identity: one.num_bytes for identity, one in placed.items()})
        self._placed = placed

    def view(self, tensor: torch.Tensor) -> tuple[int, tuple[int, ...]]:
        """Return a stand-in's offset in its storage and its strides, as they will be."""
        placed = self._placed[storage_identity(tensor)]
        if 0 in tensor.size():
            return 0, tuple(tensor.stride())
        if placed.is_compact:
            return 0, row_major_strides(tuple(tensor.size()))
        item = tensor.dtype.itemsize
        offset = int(tensor.storage_offset()) - placed.base_bytes // item
        low, high = _span(tensor)
        if low < placed.base_bytes or high > placed.base_bytes + placed.num_bytes:
            raise CorruptError("the checkpoint's torch.save structure names elements that it lacks")
        return offset, tuple(tensor.stride())


def plan_contents(
    tensors: Mapping[str, torch.Tensor],
    whole: Mapping[int, Member],
    num_bytes: Mapping[int, int],
) -> tuple[PlacedViews, dict[int, Content]]:
    """Decide how long each storage is and what it is made of. Pure.

    Args:
        tensors: Stand-in of each strided tensor, by key in the checkpoint.
        whole: Storages that a record holds as they are.
        num_bytes: Length of each stand-in's storage, by identity.
    """
    viewed: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for fqn, tensor in tensors.items():
        viewed.setdefault(storage_identity(tensor), []).append((fqn, tensor))
    placed: dict[int, _Placed] = {}
    contents: dict[int, Content] = {}
    for identity, length in num_bytes.items():
        if identity in whole:
            placed[identity], contents[identity] = _Placed(length), whole[identity]
        else:
            views = [one for one in viewed.get(identity, ()) if 0 not in one[1].size()]
            placed[identity], contents[identity] = _plan(views)
    return PlacedViews(placed), contents


def _plan(views: Sequence[tuple[str, torch.Tensor]]) -> tuple[_Placed, Content]:
    if not views:
        return _Placed(0), Assembled((), 0)
    spans = [_span(tensor) for _, tensor in views]
    low, high = min(low for low, _ in spans), max(high for _, high in spans)
    if len({tensor.dtype.itemsize for _, tensor in views}) > 1:
        low = low // _ALIGN_BYTES * _ALIGN_BYTES
    placed = _Placed(high - low, low)
    for (fqn, tensor), span in zip(views, spans, strict=True):
        if span == (low, high) and _is_row_major(tensor):
            return placed, Rows(fqn, tensor.dtype)
    fqn, tensor = views[0]
    has_holes = high - low > prod(tensor.size()) * tensor.dtype.itemsize
    if has_holes and len({view_of(one) for _, one in views}) == 1 and not _is_lazy(tensor):
        num_bytes = prod(tensor.size()) * tensor.dtype.itemsize
        return _Placed(num_bytes, is_compact=True), Rows(fqn, tensor.dtype)
    return placed, Assembled(tuple(views), low)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes of its storage from a tensor's first to its last element."""
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in steps)
    return first * tensor.dtype.itemsize, (last + 1) * tensor.dtype.itemsize


def _is_lazy(tensor: torch.Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


def _is_row_major(tensor: torch.Tensor) -> bool:
    return not _is_lazy(tensor) and tensor.is_contiguous()


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredStructure:
    """What a checkpoint's keys are together.

    Attributes:
        value: The structure.
        leaves: Of it; the keys are the checkpoint's, and those of tensors without elements.
        num_bytes: Length of each stand-in's storage, by identity.
        members: Per key of a value or an opaque tensor, the storages that its record holds.
        extra: The storages that `archive` holds, in its order.
        archive: A ``torch.save`` record; empty if there is none.
        held: The stand-ins' storages, so that no identity is used again.
    """

    value: Any
    leaves: Leaves
    num_bytes: Mapping[int, int]
    members: Mapping[str, Sequence[int]] = field(default_factory=dict)
    extra: Sequence[int] = ()
    archive: bytes = b""
    held: Sequence[torch.UntypedStorage] = ()


def open_stored(checkpoint: Checkpoint, *, weights_only: bool) -> StoredStructure:
    """Rebuild a checkpoint's structure; reads its values, and no strided tensor.

    Args:
        checkpoint: The source.
        weights_only: Allow in its values what ``torch.load(weights_only=True)`` allows; if
            False run whatever they name.

    Raises:
        CorruptError: If a value is damaged or names something that is not allowed.
    """
    index = MetadataIndex(LAYOUT_KEY)
    if index in (checkpoint.metadata.storage_data or {}):
        data = checkpoint.read_item_bytes([index])[LAYOUT_KEY]
        layout = decode_layout(data, checkpoint.url)
        stored = _from_layout(layout, checkpoint.url, weights_only=weights_only)
        if _fits(stored, checkpoint):
            return stored
        logger.warning(
            "%s: its keys are not those of the torch.save file that it was made from; the"
            " structure of that file is not restored",
            checkpoint.url,
        )
    return _from_keys(checkpoint, weights_only=weights_only)


def _from_layout(layout: Layout, what: str, *, weights_only: bool) -> StoredStructure:
    storages = Storages(what)
    value = unpickle(layout.pickled, storages, weights_only=weights_only, what=what)
    numbers = {key: storage_identity(one) for key, one in storages.made.items()}
    try:
        members = {fqn: [numbers[key] for key in keys] for fqn, keys in layout.members.items()}
        extra = [numbers[key] for key in layout.extra]
    except KeyError as error:
        raise CorruptError(f"{what}: the record of its torch.save file is damaged") from error
    return StoredStructure(
        value,
        Leaves(*flatten(value, what)),
        {numbers[key]: one.nbytes() for key, one in storages.made.items()},
        members,
        extra,
        layout.archive,
        tuple(storages.made.values()),
    )


def _fits(stored: StoredStructure, checkpoint: Checkpoint) -> bool:
    """Tell whether the structure's leaves are the keys of the checkpoint."""
    entries = checkpoint.metadata.state_dict_metadata
    views = StorageViews(stored.num_bytes)
    if not entries.keys() <= stored.leaves.values.keys():
        return False
    return all(
        _is_leaf_of(value, entries.get(fqn), views) for fqn, value in stored.leaves.values.items()
    )


def _is_leaf_of(value: Any, entry: Any, views: StorageViews) -> bool:
    """Tell whether a leaf is what the checkpoint has under its key."""
    if value is None and entry is None:  # what was left out of a list
        return True
    if not isinstance(value, torch.Tensor):
        return entry is not None and not isinstance(entry, TensorStorageMetadata)
    if entry is None:  # a tensor without elements is in the structure only
        return not is_stand_in(value, views)
    if not isinstance(entry, TensorStorageMetadata):
        return False
    return bool((entry.size, entry.properties.dtype) == (value.size(), value.dtype))


# --- checkpoints of others --------------------------------------------------------------


def _from_keys(checkpoint: Checkpoint, *, weights_only: bool) -> StoredStructure:
    tensors, storages = _stand_ins(checkpoint)
    values = _read_values(checkpoint, weights_only=weights_only)
    paths = checkpoint.metadata.planner_data
    known = paths if isinstance(paths, Mapping) else {}
    flat: dict[str, Any] = {}
    places: dict[str, tuple[str | int, ...]] = {}
    nested: dict[str, Any] = {}
    for fqn in checkpoint.keys:
        flat[fqn] = tensors[fqn] if fqn in tensors else values[fqn]
        path = known.get(fqn)
        places[fqn] = tuple(path) if isinstance(path, Sequence) and path else (fqn,)
        try:
            set_element(nested, places[fqn], flat[fqn])
        except (AttributeError, IndexError, TypeError, KeyError) as error:
            raise IncompatibleError(
                f"{checkpoint.url}: {fqn!r} lies at {places[fqn]!r:.200} in the nested state dict,"
                " where another key has its value; leave one out with exclude="
            ) from error
    num_bytes = {storage_identity(one): one.nbytes() for one in storages}
    return StoredStructure(nested, Leaves(flat, places), num_bytes, held=storages)


def _stand_ins(
    checkpoint: Checkpoint,
) -> tuple[dict[str, torch.Tensor], list[torch.UntypedStorage]]:
    """Make a stand-in per tensor; keys that name the same stored bytes get one storage."""
    made: dict[Any, torch.UntypedStorage] = {}
    tensors: dict[str, torch.Tensor] = {}
    for fqn, entry in checkpoint.tensors.items():
        if checkpoint.is_opaque(fqn):
            tensors[fqn] = checkpoint.read_opaque(fqn)
            continue
        dtype = entry.properties.dtype
        num_bytes = prod(entry.size) * dtype.itemsize
        storage = made.setdefault(_stored_as(checkpoint, fqn, entry), meta_storage(num_bytes))
        stand_in = torch.empty(0, dtype=dtype, device="meta")
        stand_in.set_(storage, 0, entry.size, row_major_strides(tuple(entry.size)))
        tensors[fqn] = stand_in
    return tensors, list(made.values())


def _stored_as(checkpoint: Checkpoint, fqn: str, entry: TensorStorageMetadata) -> Any:
    """Return what is equal for keys that name the same bytes."""
    if 0 in entry.size or not entry.chunks:
        return fqn
    items = checkpoint.items_of(fqn)
    places = tuple((item.key, item.record, tuple(item.sizes)) for item in items)
    return tuple(entry.size), entry.properties.dtype, places


def _read_values(checkpoint: Checkpoint, *, weights_only: bool) -> dict[str, Any]:
    fqns = [fqn for fqn in checkpoint.keys if fqn not in checkpoint.tensors]
    found = {}
    for fqn, data in checkpoint.read_value_bytes(fqns).items():
        found[fqn] = load_record(
            data,
            f"{checkpoint.url}: the value {fqn!r}",
            allow_pickle=not weights_only,
            device="cpu",
            remedy="pass weights_only=False, leave it out with exclude=, or ",
        )
    return found


def dcp_to_torch_save(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    weights_only: bool = True,
    **options: Unpack[ConversionOptions],
) -> ConvertResult:
    """Turn a DCP checkpoint into one ``torch.save`` file.

    ```python
    dcp_to_torch_save("s3://run/step-100", "gs://hub/model.pt", keys=["model.*"])
    ```

    The file is laid out as torch's own writer does it: ``torch.load`` opens it with
    ``weights_only=True``, and with ``mmap=True``. Tensors are assembled by ranges, in blocks of
    rows; the file is written once, in order, without local disk, and appears when it is whole.
    The coordinator converts, and the ranks of its group wait for it.

    Arguments that are not listed are those of every converter: see `dcpstore.convert`.

    Args:
        source: Folder of a checkpoint: ours, stock DCP's, or of safetensors files.
        target: The file: a URL, or a local path.
        rename: From the checkpoint's key to the file's: a map of keys and of prefixes that end
            with ``.``, or a function. Dots of a new name lead through nested dictionaries.
        weights_only: Allow in the checkpoint's values what ``torch.load(weights_only=True)``
            allows. False runs whatever code they name: only for checkpoints that you trust.
        budget_bytes: Memory for tensors on their way. Values that are not tensors are held
            beside it, and, one at a time, tensors that are not stored row by row in the file:
            transposed ones, and several that share a storage without one that covers it.

    Raises:
        NotFoundError: If there is no checkpoint at ``source``.
        AlreadyExistsError: If ``target`` exists and ``overwrite`` is False.
        CorruptError: If the checkpoint is damaged, or a value names something that is not
            allowed; it was not run.
        IncompatibleError: If it holds what no such file can.
        ConfigError: If the arguments do not fit together or match no key.
        RankFailures: On every rank of several, if any failed.
    """
    conversion = Conversion(source, target, **options)
    folder_url, key = file_location(target)
    _refuse_same(source, target)
    with conversion.join() as group:

        def convert() -> ConvertResult:
            with (
                closing(Folder(folder_url, conversion.target_options, WriteConfig())) as folder,
                open_checkpoint(
                    source,
                    storage_options=conversion.source_options,
                    config=conversion.shares.read_config(),
                ) as opened,
            ):
                job = _ToFile(opened, folder, key, conversion, meter)
                return job.run(weights_only=weights_only)

        with conversion.show_progress(group) as meter:
            return steps.broadcast(group, "convert", convert)


def _refuse_same(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Refuse a target that is the source, or has the name of one of its objects."""
    folder, key = file_location(target)
    inside = parse_location(folder).url == parse_location(source).url
    is_part = key.endswith((METADATA_KEY, ".distcp")) or save_id_of(key) is not None
    if parse_location(target).url == parse_location(source).url or (inside and is_part):
        raise ConfigError(
            f"the target {parse_location(target).url} is the source or a part of it; write to"
            " another place"
        )


@dataclass(slots=True)
class _ToFile:
    """The coordinator's way through a conversion."""

    _checkpoint: Checkpoint
    _folder: Folder
    _key: str
    _conversion: Conversion
    _meter: Meter
    _phases: Phases = field(default_factory=Phases)
    _records: tuple[str | None, Sequence[memoryview]] = (None, ())
    _archive: bytes = b""

    def run(self, *, weights_only: bool) -> ConvertResult:
        selection = self._conversion.selection
        with self._phases.phase("plan"):
            self._checkpoint.require_whole(filter(selection.rules.takes, self._checkpoint.keys))
            stored = open_stored(self._checkpoint, weights_only=weights_only)
            names = selection.names(list(stored.leaves.values))
            tensors, made = cast_stand_ins(
                stored.leaves.values, names, StorageViews(stored.num_bytes), selection
            )
            structure = rearrange(
                stored.value, stored.leaves, names, tensors, selection.rules.takes
            )
            whole = _whole_storages(stored, names)
            lengths = {**stored.num_bytes, **made}
            views, contents = plan_contents(tensors, whole, lengths)
            pickled = pickle_structure(structure, views)
            self._archive = stored.archive
        with self._phases.phase("write"):
            objects = self._write(pickled, views, contents)
        taken = [fqn for fqn in self._checkpoint.keys if fqn in names]
        num_tensors = sum(fqn in self._checkpoint.tensors for fqn in taken)
        return ConvertResult(
            source=self._checkpoint.url,
            target=f"{self._folder.url.rstrip('/')}/{self._key}",
            num_tensors=num_tensors,
            num_values=len(taken) - num_tensors,
            tensor_bytes=sum(prod(one.size()) * one.dtype.itemsize for one in tensors.values()),
            objects=objects,
            cast={
                fqn: (dtype_name(saved.dtype), dtype_name(tensor.dtype))
                for fqn, tensor in tensors.items()
                if (saved := stored.leaves.values[fqn]).dtype != tensor.dtype
            },
            fetched_bytes=self._checkpoint.stats.fetched_bytes,
            seconds=dict(self._phases.seconds),
        )

    # --- writing ---------------------------------------------------------------------------

    def _write(
        self, pickled: PickledStructure, views: StorageViews, contents: Mapping[int, Content]
    ) -> dict[str, int]:
        sizes = {
            key: pickled.held[one].nbytes() if one in pickled.held else views.num_bytes(one)
            for key, one in pickled.storages.items()
        }
        total = sum(sizes.values()) + len(pickled.data) + overhead_bytes(len(sizes))
        self._meter.expect(total)
        store = self._folder.open()
        outputs = Outputs(
            store,
            budget_bytes=self._conversion.shares.output_bytes,
            largest_bytes=total,
            overwrite=self._conversion.overwrite,
            meter=self._meter,
        )
        if not self._conversion.overwrite:
            reject_existing(store, self._key)
        with outputs, outputs.write(self._key) as stream:
            writer = TorchZipWriter(stream)
            writer.write_pickle(pickled.data)
            self._write_storages(writer, pickled, contents, sizes)
            writer.finish()
        return outputs.objects

    def _write_storages(
        self,
        writer: TorchZipWriter,
        pickled: PickledStructure,
        contents: Mapping[int, Content],
        sizes: Mapping[str, int],
    ) -> None:
        """Write all storages in order; neighbours that stream through are read as one stream."""
        rows = [(key, one, contents.get(one)) for key, one in pickled.storages.items()]
        for streams, run in groupby(rows, key=lambda row: isinstance(row[2], Rows)):
            if streams:
                self._stream(writer, [(key, one) for key, _, one in run], sizes)
                continue
            for key, identity, content in run:
                held = pickled.held.get(identity)
                data = self._whole(content, sizes[key]) if held is None else storage_bytes(held)
                with writer.storage(key, sizes[key]):
                    writer.write(data)

    def _stream(
        self,
        writer: TorchZipWriter,
        run: Sequence[tuple[str, Content | None]],
        sizes: Mapping[str, int],
    ) -> None:
        counts: list[int] = []

        def blocks() -> Iterator[Block]:
            for _, content in run:
                assert isinstance(content, Rows)
                planned = plan_blocks(
                    self._checkpoint,
                    content.fqn,
                    content.dtype,
                    self._conversion.shares.block_bytes,
                )
                counts.append(len(planned))
                yield from planned

        with read_blocks(self._checkpoint, blocks(), self._conversion.shares.block_bytes) as coming:
            for number, (key, _) in enumerate(run):
                with writer.storage(key, sizes[key]):
                    first = next(coming)  # its tensor is planned by now
                    _write_block(writer, first[1])
                    for _ in range(counts[number] - 1):
                        _write_block(writer, next(coming)[1])

    def _whole(self, content: Content | None, num_bytes: int) -> memoryview:
        """Return the bytes of a storage that does not stream through."""
        if isinstance(content, Member):
            found = self._record(content.fqn)
            if content.number >= len(found) or found[content.number].nbytes != num_bytes:
                raise CorruptError(
                    f"{self._checkpoint.url}: the record of {content.fqn!r} does not hold the"
                    " tensors that the structure says",
                    fqn=content.fqn,
                )
            return found[content.number]
        assert isinstance(content, Assembled)
        memory = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
        self._checkpoint.read_boxes(
            [
                BoxRead(fqn, (0,) * stand_in.dim(), content.target(stand_in, memory))
                for fqn, stand_in in content.parts
            ]
        )
        return memoryview(memory.numpy())  # type: ignore[arg-type]

    def _record(self, fqn: str | None) -> Sequence[memoryview]:
        """Return the storages of a record; the last one asked for is kept."""
        if self._records[0] != fqn or not self._records[1]:
            data = self._archive
            if fqn is not None:
                stored = self._checkpoint.metadata.storage_data
                (index,) = [one for one in stored if one.fqn == fqn]
                data = self._checkpoint.read_item_bytes([index])[fqn]
            self._records = (fqn, read_record(data, f"{self._checkpoint.url}: {fqn or 'archive'}"))
        return self._records[1]


def _whole_storages(stored: StoredStructure, names: Mapping[str, str]) -> dict[int, Member]:
    """Return the storages that are found whole in a record that takes part."""
    whole = {identity: Member(None, number) for number, identity in enumerate(stored.extra)}
    for fqn, storages in stored.members.items():
        if fqn in names:
            whole.update((one, Member(fqn, number)) for number, one in enumerate(storages))
    return whole


def _write_block(writer: TorchZipWriter, content: object) -> None:
    assert isinstance(content, torch.Tensor)
    writer.write(memoryview(as_bytes(content).numpy()))  # type: ignore[arg-type]
