"""`Checkpoint`: tensors, parts of tensors and values of a checkpoint, by name. No ranks.

What torch code does with a state dict on many ranks is `dcpstore.load`; this is for one
process that wants some of what is there: a notebook, a converter, a check.

1. `open_checkpoint`: one GET of ``.metadata``, and one of a large manifest; any checkpoint
   that `dcpstore.read.discovery` knows
2. `Checkpoint.read_tensors` and its like: ranged GETs of the bytes needed, many in flight,
   verified, copied straight into their targets
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from typing_extensions import Self

from dcpstore.config import ReadConfig
from dcpstore.errors import (
    CheckpointError,
    ConfigError,
    CorruptError,
    IncompatibleError,
    NotFoundError,
)
from dcpstore.format.dtypes import is_plain_dtype
from dcpstore.format.manifest import Manifest, StoredItem
from dcpstore.format.seal import Facts
from dcpstore.format.tensors import decode_opaque
from dcpstore.plan import LoadPlanner
from dcpstore.plan.coverage import find_flaws, refuse_flaws
from dcpstore.plan.overlap import find_overlaps
from dcpstore.plan.values import ValueRecord, open_record
from dcpstore.read.attachments import Fetch, fetches, find_attachment, read_whole
from dcpstore.read.discovery import Discovered, discover
from dcpstore.read.pump import Pump, ReadJob, ReadStats, locate_records
from dcpstore.read.targets import can_be_located
from dcpstore.store import open_store
from dcpstore.store.base import Store
from dcpstore.store.budget import bytes_in_flight
from dcpstore.store.folder import Folder
from dcpstore.torch_private import narrow

Slices: TypeAlias = Any
"""What may stand between brackets: an int, a slice of step 1, ``...``, or a tuple of these."""


@dataclass(frozen=True, slots=True)
class Selected:
    """A box of a tensor.

    Attributes:
        offsets: First element in each dimension.
        sizes: Elements in each dimension of the tensor.
        dropped: Dimensions that an int chose from; the answer has them no more.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dropped: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the answer."""
        return tuple(size for dim, size in enumerate(self.sizes) if dim not in self.dropped)


def resolve_slices(sizes: Sequence[int], slices: Slices) -> Selected:
    """Turn an index into a box, as numpy's basic indexing does.

    Args:
        sizes: Shape of the whole tensor.
        slices: As between brackets; None for everything.

    Raises:
        ConfigError: If a step is not 1, an int is outside the tensor, there are more indices
            than dimensions, or an index is of another kind.
    """
    indices = _expand(() if slices is None else slices, len(sizes))
    extents = [
        _extent(index, size, dim)
        for dim, (size, index) in enumerate(zip(sizes, indices, strict=True))
    ]
    return Selected(
        tuple(start for start, _ in extents),
        tuple(length for _, length in extents),
        tuple(dim for dim, index in enumerate(indices) if not isinstance(index, slice)),
    )


def _expand(slices: Slices, num_dims: int) -> list[Any]:
    """Fill up to one index per dimension."""
    given = list(slices) if isinstance(slices, tuple | list) else [slices]
    places = [at for at, index in enumerate(given) if index is Ellipsis]
    if len(places) > 1:
        raise ConfigError("an index can have a single '...'")
    num_given = len(given) - len(places)
    if num_given > num_dims:
        raise ConfigError(f"{num_given} indices are too many for a tensor of {num_dims} dimensions")
    at = places[0] if places else len(given)
    return [*given[:at], *[slice(None)] * (num_dims - num_given), *given[at + 1 :]]


def _extent(index: Any, size: int, dim: int) -> tuple[int, int]:
    """Return the first element and the number of elements of one dimension."""
    if isinstance(index, slice):
        if index.step not in (None, 1):
            raise ConfigError(
                f"the slice of dimension {dim} has step {index.step}; only step 1 is read from a"
                " store. Read the range and take every n-th element of it"
            )
        start, stop, _ = index.indices(size)
        return start, max(stop - start, 0)
    if isinstance(index, bool) or not hasattr(index, "__index__"):
        raise ConfigError(
            f"dimension {dim} is indexed by a {type(index).__name__}; write an int, a slice"
            " such as slice(0, 10), or ..."
        )
    at = index.__index__()
    if not -size <= at < size:
        raise ConfigError(f"index {at} of dimension {dim} is outside its {size} elements")
    return at % size, 1


_Ints = npt.NDArray[np.int64]


def read_tensor(
    url: str | os.PathLike[str],
    fqn: str,
    slices: Slices = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """Read one tensor of a checkpoint, or a part of it, fetching only the bytes needed.

    ```python
    rows = dcpstore.read_tensor("s3://bucket/run/step-100", "model.embed.weight", slice(0, 8))
    ```

    Works alike on checkpoints of ours, of stock DCP, and on folders of safetensors files.

    Args:
        url: Folder of the checkpoint.
        fqn: The tensor's key.
        slices: What would stand between brackets: ints, slices of step 1, ``...``, negative
            ones too; None for the whole tensor. An int drops its dimension.
        storage_options: fsspec's options for the URL's protocol.

    Returns:
        A tensor of its own memory on the CPU, in the dtype in which it was saved.

    Raises:
        NotFoundError: If there is no checkpoint, or no such key; names similar ones.
        IncompatibleError: If the key holds a value that is not a tensor.
        ConfigError: If the slices do not fit the tensor.
        CorruptError: If stored bytes are not those that were saved.
    """
    with open_checkpoint(url, storage_options=storage_options) as checkpoint:
        return checkpoint.read_tensor(fqn, slices)


def open_checkpoint(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    config: ReadConfig | None = None,
    store_opener: Callable[..., Store] = open_store,
) -> Checkpoint:
    """Open a checkpoint to read from; use it as a context manager.

    Args:
        url: Folder of the checkpoint.
        storage_options: fsspec's options for the URL's protocol.
        config: Sizes, bounds, retries, casts and trust.
        store_opener: Opens the store; tests pass one that injects faults.

    Raises:
        NotFoundError: If there is no checkpoint.
        CorruptError: If there is one that is damaged.
        StoreError: If the store refuses.
    """
    config = config or ReadConfig()
    folder = Folder(url, storage_options, config, store_opener)
    try:
        return Checkpoint(folder, discover(folder.open(), config), config)
    except BaseException:
        folder.close()
        raise


@dataclass(frozen=True, slots=True, eq=False)
class BoxRead:
    """A box of a tensor and where it goes.

    Attributes:
        fqn: The tensor's key.
        offsets: First element in each dimension of the whole tensor.
        target: As large as the box; any strides and device. Its dtype may differ as far as
            ``ReadConfig.casts`` allows.
    """

    fqn: str
    offsets: tuple[int, ...]
    target: torch.Tensor


class Checkpoint:
    """An open checkpoint. One thread at a time; each call fetches with many.

    Args:
        folder: Where it lies; closed with this.
        discovered: What `discover` read there.
        config: Sizes, bounds, casts and trust.

    Raises:
        CorruptError: If the metadata is damaged, or a pickle that names more than data.
    """

    def __init__(self, folder: Folder, discovered: Discovered, config: ReadConfig) -> None:
        self._folder = folder
        self._config = config
        self.discovered = discovered
        """What was read to open it."""
        self._metadata = discovered.open(config)
        self._items: dict[MetadataIndex, StoredItem] = dict(self._metadata.storage_data)
        self._chunks: dict[str, _Chunks] = {}
        self.stats = ReadStats()
        """What all reads together did."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the store. Idempotent."""
        self._folder.close()

    @property
    def url(self) -> str:
        """The folder, without secrets."""
        return self._folder.url

    @property
    def store(self) -> Store:
        """The open store, rooted at the folder."""
        return self._folder.open()

    @property
    def metadata(self) -> Metadata:
        """Torch's metadata, with `StoredItem` as storage data."""
        return self._metadata

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys, of tensors and values, in the order of the metadata."""
        return tuple(self._metadata.state_dict_metadata)

    @cached_property
    def tensors(self) -> Mapping[str, TensorStorageMetadata]:
        """The keys that hold tensors, in the order of the metadata."""
        entries = self._metadata.state_dict_metadata
        return {fqn: e for fqn, e in entries.items() if isinstance(e, TensorStorageMetadata)}

    def items_of(self, fqn: str) -> tuple[StoredItem, ...]:
        """Return where the chunks of a tensor, or the bytes of a value, lie.

        Raises:
            NotFoundError: If there is no such key.
            CorruptError: If the metadata promises a chunk and does not say where it lies.
        """
        entry = self._entry(fqn)
        if not isinstance(entry, TensorStorageMetadata):
            return (self._item(MetadataIndex(fqn)),)
        return tuple(self._item(index) for index in self._chunks_of(fqn).indices)

    # --- tensors -----------------------------------------------------------------------

    def read_tensor(
        self, fqn: str, slices: Slices = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Read a tensor or a part of it; see `dcpstore.read_tensor`.

        Args:
            fqn: The tensor's key.
            slices: What would stand between brackets; None for everything.
            out: Where it goes, of the shape that the slices give; None for new memory.

        Raises:
            IncompatibleError: If ``out`` does not fit; nothing was read.
        """
        entry = self._tensor_entry(fqn)
        chosen = resolve_slices(entry.size, slices)
        if self.is_opaque(fqn):
            return self._whole_opaque(fqn, slices, out)
        if out is None:
            out = _empty(fqn, chosen.shape, entry.properties.dtype)
        elif tuple(out.shape) != chosen.shape:
            raise IncompatibleError(
                f"{fqn!r}: the slices give shape {chosen.shape}, and out has {tuple(out.shape)}"
            )
        target = out
        for dim in chosen.dropped:
            target = target.unsqueeze(dim)
        self.read_boxes([BoxRead(fqn, chosen.offsets, target)])
        return out

    def read_tensors(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Read whole tensors into memory that the caller made, all at the same time.

        Raises:
            IncompatibleError: If the shape or dtype of a target does not fit; nothing was read.
        """
        for fqn, target in targets.items():
            size = tuple(self._tensor_entry(fqn).size)
            if tuple(target.shape) != size:
                raise IncompatibleError(
                    f"{fqn!r} is saved with shape {size}, and the target has {tuple(target.shape)}"
                )
        self.read_boxes(
            [BoxRead(fqn, (0,) * target.dim(), target) for fqn, target in targets.items()]
        )

    def require_whole(self, fqns: Iterable[str]) -> None:
        """Check that tensors are stored whole, before anything of them is read. No I/O.

        Args:
            fqns: Keys; those of values are passed over.

        Raises:
            CorruptError: If chunks leave a part of a tensor out, overlap, or lie outside it.
        """
        refuse_flaws(find_flaws({fqn: self._entry(fqn) for fqn in fqns}), self.url)

    def is_opaque(self, fqn: str) -> bool:
        """Tell whether a tensor is more than its elements: quantized, sparse and the like.

        Such a tensor can only be read as a whole.
        """
        properties = self._tensor_entry(fqn).properties
        return properties.layout != torch.strided or not is_plain_dtype(properties.dtype)

    def read_opaque(self, fqn: str) -> torch.Tensor:
        """Read a tensor that is more than its elements.

        Raises:
            CorruptError: If it is stored in several chunks, or decodes to no tensor.
        """
        indices = [MetadataIndex(fqn, chunk.offsets) for chunk in self._tensor_entry(fqn).chunks]
        if len(indices) != 1:
            raise CorruptError(f"{self.url}: {fqn!r} has {len(indices)} chunks, not one", fqn=fqn)
        try:
            return decode_opaque(self.read_item_bytes(indices)[fqn])
        except CheckpointError:
            raise
        except Exception as error:
            raise CorruptError(f"{self.url}: {fqn!r} is no tensor: {error}", fqn=fqn) from error

    def _whole_opaque(self, fqn: str, slices: Slices, out: torch.Tensor | None) -> torch.Tensor:
        if slices is not None or out is not None:
            raise IncompatibleError(
                f"{fqn!r} is a {self._tensor_entry(fqn).properties.dtype} tensor that is more than"
                " its elements: it can only be read as a whole, into new memory"
            )
        return self.read_opaque(fqn)

    def read_boxes(self, reads: Sequence[BoxRead]) -> None:
        """Read boxes of tensors into their targets, all at the same time.

        Raises:
            IncompatibleError: If the dtype of a target does not fit; nothing was read.
            CorruptError: If stored bytes are wrong, or the checkpoint does not hold every
                element of a box.
        """
        items = [item for number, read in enumerate(reads) for item in self._plan(read, number)]
        receiver = _Receiver([read.target for read in reads])
        self._run(items, receiver)

    def locate(self, fqns: Iterable[str]) -> None:
        """Find out where the elements of others' records start, one small GET per chunk.

        Afterwards a part of such a tensor is read without the rest, however small its
        records are. Does nothing for records of ours, whose manifest tells.
        """
        unknown = {
            index: item
            for fqn in fqns
            for index in self._chunks_of(fqn).indices
            if can_be_located(item := self._item(index))
        }
        if unknown:
            with Pump(self._config.max_requests) as pump:
                store = self._folder.open()
                self._items.update(locate_records(store, unknown, pump, self.stats))

    # --- values ------------------------------------------------------------------------

    def read_value(self, fqn: str, *, allow_pickle: bool = False, target: object = None) -> Any:
        """Read a value that is not a tensor.

        Args:
            fqn: Its key.
            allow_pickle: Open it with plain pickle, which runs code that lies in the bucket.
            target: Holds the users' classes that instances in it may be made of: such instances,
                or the classes themselves.

        Raises:
            NotFoundError: If there is no such key.
            IncompatibleError: If the key holds a tensor, or an instance of a class that is not in
                ``target``.
            CorruptError: If it names code to run and ``allow_pickle`` is False.
        """
        record = self.read_value_records([fqn])[fqn]
        if record.encoded is not None and not allow_pickle:
            record = ValueRecord(record.encoded)
        return open_record(fqn, record, target, allow_pickle=allow_pickle)

    def read_value_bytes(self, fqns: Iterable[str]) -> dict[str, bytes]:
        """Read values as they were saved, pickled by ``torch.save``, without opening them."""
        return self.read_item_bytes(self._value_indices(fqns))

    def read_value_records(self, fqns: Iterable[str]) -> dict[str, ValueRecord]:
        """Read values as they were saved, pickled and encoded, without opening them."""
        indices = self._value_indices(fqns)
        records = {fqn: ValueRecord(one) for fqn, one in self.read_item_bytes(indices).items()}
        both = [one for one in indices if self._item(one).encoded is not None]
        for fqn, encoded in self.read_item_bytes(both, encoded=True).items():
            records[fqn].encoded = encoded
        return records

    def _value_indices(self, fqns: Iterable[str]) -> list[MetadataIndex]:
        indices = []
        for fqn in fqns:
            if isinstance(self._entry(fqn), TensorStorageMetadata):
                raise IncompatibleError(f"{fqn!r} is a tensor: read it with read_tensor")
            indices.append(MetadataIndex(fqn))
        return indices

    def read_item_bytes(
        self, indices: Iterable[MetadataIndex], *, encoded: bool = False
    ) -> dict[str, bytes]:
        """Read items as they were stored, of values, of opaque tensors, or beside the state dict.

        Args:
            indices: Of the items.
            encoded: Read the encodings of values, where there are any.

        Returns:
            The bytes by key, transforms undone: ``torch.save`` records, as a rule.
        """
        none = torch.Size([])
        receiver = _Receiver([], reads_encoded=encoded)
        self._run(
            [ReadItem(LoadItemType.BYTE_IO, one, none, one, none, none) for one in indices],
            receiver,
        )
        return receiver.values

    # --- what was sealed beside the state dict -------------------------------------------

    @cached_property
    def _manifest(self) -> Manifest | None:
        """Decoded once more: few ask for what only it tells."""
        if self.discovered.manifest is None:
            return None
        return self.discovered.decode_manifest(self._config.max_metadata_bytes)

    @property
    def facts(self) -> Facts:
        """Step, run and metrics that were told to the save."""
        seal = self.discovered.seal
        return (seal.facts if seal is not None else None) or Facts()

    @property
    def step(self) -> int | None:
        """Number of completed steps, where it was told to the save."""
        return self.facts.step

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics that were told to the save."""
        return self.facts.metrics

    @property
    def user_metadata(self) -> Mapping[str, Any]:
        """What was given to the save as ``user_metadata``."""
        found: Mapping[str, Any] = {}
        if self._manifest is not None:
            found = self._manifest.info.get("user_metadata", {})
        return found

    @property
    def attached_items(self) -> Mapping[str, StoredItem]:
        """Where attachments lie, by their names."""
        return {} if self._manifest is None else self._manifest.attachments

    @property
    def attachments(self) -> Mapping[str, int]:
        """The files that were sealed with the state dict: names, and sizes in bytes."""
        return {name: item.payload.num_bytes for name, item in self.attached_items.items()}

    def read_attachment(self, name: str) -> bytes:
        """Read a file that was sealed with the state dict; see `dcpstore.read_attachment`."""
        return read_whole(self._fetches(name), self._config)

    def attachment_pieces(self, name: str) -> Generator[memoryview, None, None]:
        """Yield the verified bytes of an attachment, fetched ahead within the byte budget.

        Whoever does not take them all closes the generator, which ends its threads.

        Raises: as `read_attachment`.
        """
        calls = self._fetches(name)
        with Pump(self._config.max_requests, "dcpstore-attachment") as pump:
            yield from pump.in_order(calls, bytes_in_flight(self._config.budget_bytes))

    def _fetches(self, name: str) -> list[Fetch]:
        item = find_attachment(self.attached_items, name, self.url)
        found = list(fetches(self.store, name, item, self._config))
        for num_bytes, _ in found if item.inline is None else ():
            self.stats.count(num_bytes)
        return found

    # --- what lies where ---------------------------------------------------------------

    def _run(self, items: Sequence[ReadItem], receiver: _Receiver) -> None:
        if not items:
            return
        job = ReadJob(self.store, self._config, self._metadata, self._items)
        with job:
            job.run(items, receiver)
        self.stats = _total(self.stats, job.stats)

    def _entry(self, fqn: str) -> Any:
        entries = self._metadata.state_dict_metadata
        if fqn not in entries:
            raise NotFoundError(f"{self.url}: no key {fqn!r}{_similar(fqn, self.keys)}")
        return entries[fqn]

    def _tensor_entry(self, fqn: str) -> TensorStorageMetadata:
        entry = self._entry(fqn)
        if not isinstance(entry, TensorStorageMetadata):
            raise IncompatibleError(
                f"{self.url}: {fqn!r} holds a value, not a tensor: read it with"
                " open_checkpoint(url).read_value(key)"
            )
        return entry

    def _item(self, index: MetadataIndex) -> StoredItem:
        item = self._items.get(index)
        if item is None:
            raise CorruptError(
                f"{self.url}: the metadata promises {index.fqn!r} at offset {index.offset} and"
                " does not say where it lies",
                fqn=index.fqn,
            )
        return item

    def _chunks_of(self, fqn: str) -> _Chunks:
        if fqn not in self._chunks:
            self._chunks[fqn] = _Chunks.of(fqn, self._tensor_entry(fqn))
        return self._chunks[fqn]

    def _plan(self, read: BoxRead, number: int) -> list[ReadItem]:
        """Plan a box: one read item per chunk that has a part in it."""
        chunks = self._chunks_of(read.fqn)
        sizes = tuple(read.target.shape)
        if len(sizes) != chunks.starts.shape[1]:
            raise IncompatibleError(
                f"{read.fqn!r} has {chunks.starts.shape[1]} dimensions, the target {len(sizes)}"
            )
        low = np.maximum(chunks.starts, np.array(read.offsets, np.int64))
        high = np.minimum(chunks.ends, np.array(read.offsets, np.int64) + np.array(sizes, np.int64))
        touched = np.flatnonzero((high > low).all(axis=1))
        found = (high[touched] - low[touched]).prod(axis=1).sum() if len(touched) else 0
        if found != prod(sizes):
            raise CorruptError(
                f"{self.url}: the checkpoint holds {found} of the {prod(sizes)} elements of"
                f" {read.fqn!r} at {read.offsets} of shape {sizes}",
                fqn=read.fqn,
            )
        dest = MetadataIndex(read.fqn, read.offsets, number)
        return [
            ReadItem(
                LoadItemType.TENSOR,
                dest,
                torch.Size((low[at] - read.offsets).tolist()),
                chunks.indices[at],
                torch.Size((low[at] - chunks.starts[at]).tolist()),
                torch.Size((high[at] - low[at]).tolist()),
            )
            for at in touched.tolist()
        ]


@dataclass(frozen=True, slots=True, eq=False)
class _Chunks:
    """The stored chunks of one tensor that hold elements.

    Attributes:
        indices: Of each chunk.
        starts: First element per chunk and dimension.
        ends: Behind the last element.
    """

    indices: tuple[MetadataIndex, ...]
    starts: _Ints
    ends: _Ints

    @staticmethod
    def of(fqn: str, entry: TensorStorageMetadata) -> _Chunks:
        """Take a tensor's chunks out of the metadata, each once.

        Raises:
            CorruptError: If two different chunks overlap.
        """
        by_place = {
            (tuple(chunk.offsets), tuple(chunk.sizes)): MetadataIndex(fqn, chunk.offsets, number)
            for number, chunk in enumerate(entry.chunks)
            if 0 not in chunk.sizes
        }
        shape = (len(by_place), len(entry.size))
        starts = np.array([at for at, _ in by_place], np.int64).reshape(shape)
        ends = starts + np.array([sizes for _, sizes in by_place], np.int64).reshape(shape)
        if len(by_place) > 1 and len(find_overlaps(np.zeros(shape[0], np.int64), starts, ends)):
            raise CorruptError(
                f"the metadata names chunks of {fqn!r} that overlap: which of them holds the value"
                " is not said",
                fqn=fqn,
            )
        return _Chunks(tuple(by_place.values()), starts, ends)


class _Receiver(LoadPlanner):
    """Tells a read job where each item goes, and keeps the bytes of values."""

    def __init__(self, targets: Sequence[torch.Tensor], *, reads_encoded: bool = False) -> None:
        super().__init__()
        self._reads_encoded = reads_encoded
        self._targets = targets
        self.values: dict[str, bytes] = {}

    @property
    def reads_encoded_values(self) -> bool:
        return self._reads_encoded

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        number = read_item.dest_index.index
        assert number is not None
        return narrow(self._targets[number], read_item.dest_offsets, read_item.lengths)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.values[read_item.storage_index.fqn] = value.getvalue()


def _empty(fqn: str, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    try:
        return torch.empty(sizes, dtype=dtype)
    except RuntimeError as error:
        raise IncompatibleError(
            f"{fqn!r} has shape {sizes} and dtype {dtype}, for which there is no memory: read parts"
            f" of it. Torch says: {str(error).partition(chr(10))[0]}"
        ) from error


def _total(one: ReadStats, other: ReadStats) -> ReadStats:
    sums = {
        counter.name: getattr(one, counter.name) + getattr(other, counter.name)
        for counter in fields(ReadStats)
    }
    return replace(ReadStats(**sums), peak_bytes=max(one.peak_bytes, other.peak_bytes))


def _similar(fqn: str, keys: Sequence[str]) -> str:
    import difflib

    close = difflib.get_close_matches(fqn, keys[:10_000], n=3)
    return f"; similar: {', '.join(map(repr, close))}" if close else ""
