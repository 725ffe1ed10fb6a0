"""``torch.save`` files in any object store, read by ranges.

```python
with open_torch_file("s3://bucket/model.pt") as file:
    weight = file.value["model"]["weight"]  # a stand-in on the meta device
    rows = file.read_box(weight, offsets=(0, 0), sizes=(8, weight.shape[1]))
```

A stand-in is a tensor on the meta device: dtype, shape, strides, flags and Python type are
those of the saved tensor, tensors that shared a storage share one, and there is no memory.

Only what is asked for is read:

1. `open_torch_file`: HEAD, the zip directory at the end, ``data.pkl``: two to four requests
2. `TorchFile.value`: the saved structure, with meta tensors as stand-ins
3. `TorchFile.place` says where a stand-in's elements lie; `TorchFile.read_storage` and
   `TorchFile.read_box` read them, from any thread
4. `TorchFile.check_unchanged`: whether all that was the same file

::

    file   | data.pkl | byteorder | header data/0 | storage 0 ..... | header data/1 | ...
                                                    [== a tensor ==]
                                                    ^ storage_offset
"""

from __future__ import annotations

import io
import os
import pickle
import zlib
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch

from dcpstore.config import ReadConfig
from dcpstore.errors import ConflictError, CorruptError, IncompatibleError, NotFoundError
from dcpstore.format.dtypes import is_plain_dtype, is_row_major
from dcpstore.format.opcodes import BadPickleError, check_structure
from dcpstore.format.payload import copy_box_in, span_of
from dcpstore.format.zip import Member, contents_offset, read_archive
from dcpstore.store import ObjectInfo, Store, open_store
from dcpstore.store.base import ByteRange
from dcpstore.store.folder import Folder, file_location
from dcpstore.torch_private import (
    meta_storage,
    named_storage_class,
    storage_identity,
    typed_storage,
    weights_only_unpickler,
)

_CONTAINERS = (dict, list, tuple, set)
_MAX_NESTING = 200  # whoever walks through it calls itself a few times per level
_MAX_PARTS = 1 << 16


@dataclass(frozen=True, slots=True)
class PickledStorage:
    """A storage as the pickle names it.

    Attributes:
        key: Its name in the archive; tensors with the same one share memory.
        dtype: Of the tensors that were saved with it; uint8 where it has none.
        num_bytes: Its length.
    """

    key: str
    dtype: torch.dtype
    num_bytes: int


class Storages:
    """Makes the storages that a pickle names, one per key, on the meta device.

    Args:
        what: Name of the file, for messages.
        check: Refuses a storage that the file does not hold.
    """

    def __init__(self, what: str, check: Callable[[PickledStorage], None] = lambda _: None) -> None:
        self._what = what
        self._check = check
        self.pickled: dict[str, PickledStorage] = {}
        self.made: dict[str, torch.UntypedStorage] = {}

    def persistent_load(self, persistent_id: Any) -> Any:
        """Return the storage of a persistent id, as both unpicklers ask for it."""
        match persistent_id:
            case ("storage", kind, str() as key, str(), int() as count) if count >= 0:
                dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
                if isinstance(dtype, torch.dtype):
                    if not is_plain_dtype(dtype):
                        raise IncompatibleError(_no_stand_in(self._what, f"it is of {dtype}"))
                    one = PickledStorage(key, dtype, count * dtype.itemsize)
                    return typed_storage(self._storage(one), dtype)
        kind = type(persistent_id).__name__
        raise CorruptError(f"{self._what} is damaged: it names a storage by a strange {kind}")

    def _storage(self, one: PickledStorage) -> torch.UntypedStorage:
        known = self.pickled.setdefault(one.key, one)
        if known.num_bytes != one.num_bytes:
            raise CorruptError(
                f"{self._what} is damaged: storage {one.key} has {known.num_bytes} bytes and"
                f" {one.num_bytes} bytes"
            )
        if one.key not in self.made:
            self._check(one)
            self.made[one.key] = meta_storage(one.num_bytes)
        return self.made[one.key]

    def check_lengths(self) -> None:
        """Refuse tensors that reach past their storages, which torch then lets grow."""
        for key, made in self.made.items():
            num_bytes = self.pickled[key].num_bytes
            if made.nbytes() != num_bytes:
                raise CorruptError(
                    f"{self._what} is damaged: a tensor reaches past its storage {key} of"
                    f" {num_bytes} bytes"
                )


def unpickle(data: bytes, storages: Storages, *, weights_only: bool, what: str) -> Any:
    """Rebuild what was saved.

    Args:
        data: Contents of ``data.pkl``.
        storages: Makes the storages; afterwards holds those that the pickle named.
        weights_only: Allow what ``torch.load(weights_only=True)`` allows, including
            ``torch.serialization.add_safe_globals``; if False run whatever the bytes name.
        what: Name of the file, for messages.

    Raises:
        CorruptError: If the bytes are no pickle, name something that is not allowed (it was not
            run), or have a tensor that reaches past its storage.
        IncompatibleError: If a tensor has no stand-in: quantized and strided nested ones.
    """
    unpickler: Any = weights_only_unpickler(data) if weights_only else _Unpickler(io.BytesIO(data))
    unpickler.persistent_load = storages.persistent_load
    try:
        if weights_only:
            check_structure(data)
        value = unpickler.load()
        storages.check_lengths()
        if weights_only:
            _check_size(value, _MAX_PARTS + len(data))
    except (CorruptError, IncompatibleError):
        raise
    except BadPickleError as error:
        raise CorruptError(f"the pickle of {what} is damaged: {error}") from error
    except NotImplementedError as error:
        raise IncompatibleError(_no_stand_in(what, _first_line(error))) from error
    except pickle.UnpicklingError as error:
        raise CorruptError(_explain(error, what, weights_only=weights_only)) from error
    except Exception as error:
        text = f"{type(error).__name__}: {_first_line(error)[:200]}"
        raise CorruptError(f"the pickle of {what} cannot be opened: {text}") from error
    return value


def _check_size(value: Any, limit: int) -> None:
    """Refuse a structure that never ends, or not soon, for those who walk through it."""
    if isinstance(value, _CONTAINERS) and _num_parts(value, {}) > limit:
        raise BadPickleError("it shares its parts so often that it would never be read")


def _num_parts(value: Any, known: dict[int, int], holders: tuple[int, ...] = ()) -> int:
    """Count what a structure is made of, what is used in several places as often.

    Args:
        value: The structure.
        known: Number of parts of those containers that were counted, by id.
        holders: Ids of the containers that it lies in.

    Raises:
        BadPickleError: If it contains itself, or is nested too deeply.
    """
    if id(value) in holders:
        raise BadPickleError(f"it has a {type(value).__name__} that contains itself")
    if len(holders) == _MAX_NESTING:
        raise BadPickleError(f"it is nested more than {_MAX_NESTING} times")
    if id(value) not in known:
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        held = [one for one in parts if isinstance(one, _CONTAINERS)]
        inner = (*holders, id(value))
        known[id(value)] = len(parts) + sum(_num_parts(one, known, inner) for one in held)
    return known[id(value)]


def _no_stand_in(what: str, reason: str) -> str:
    return (
        f"{what} holds a tensor that cannot be read by ranges, such as a quantized or a nested one;"
        " load it with torch.load, turn it into plain tensors (dequantize(), unbind()) and save it"
        f" again ({reason})"
    )


def _explain(error: Exception, what: str, *, weights_only: bool) -> str:
    if not weights_only:
        return f"the pickle of {what} is damaged: {_first_line(error)}"
    return (
        f"{what} names more than tensors and plain data; it was not run. If you trust the file,"
        " pass weights_only=False, or name its classes with"
        f" torch.serialization.add_safe_globals. Torch says: {_first_line(error)}"
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(". This could be")[0]


class _Unpickler(pickle.Unpickler):
    """Python's own, with the storage classes that torch only names."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name.endswith("Storage"):
            try:
                return named_storage_class(name)
            except KeyError:
                pass
        if module == "torch.tensor":  # where torch.Tensor was until 1.7
            module = "torch._tensor"
        return super().find_class(module, name)


# A read that starts this close to a storage's first byte takes the header along.
_NEAR_BYTES = 64 << 10
_MAX_NOTE_BYTES = 64


@dataclass(frozen=True, slots=True)
class StoredStorage(PickledStorage):
    """A storage of the file.

    Attributes:
        member: Its place in the archive.
    """

    member: Member


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where the elements of a tensor lie.

    Attributes:
        storage_key: The storage; tensors with the same one share memory.
        dtype: Of its elements.
        sizes: Its shape.
        strides: In elements.
        storage_offset: Its first element in the storage.
        is_conj: Whether the elements are to be conjugated once read.
        is_neg: Whether the elements are to be negated once read.
    """

    storage_key: str
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    storage_offset: int
    is_conj: bool = False
    is_neg: bool = False

    @staticmethod
    def of(tensor: torch.Tensor, storage_key: str) -> TensorPlace:
        """Return where the elements of a stand-in lie."""
        return TensorPlace(
            storage_key,
            tensor.dtype,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    @property
    def is_dense(self) -> bool:
        """Whether its elements are one row-major run of the storage, to be taken as they are."""
        has_lazy_bits = self.is_conj or self.is_neg
        return not has_lazy_bits and is_row_major(self.sizes, self.strides)

    def span(
        self, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None
    ) -> ByteRange:
        """Return the bytes of the storage from a box's first to its last element.

        Args:
            offsets: First element of the box in each dimension; None for the whole tensor.
            sizes: Sizes of the box; None for the whole tensor.
        """
        offsets = (0,) * len(self.sizes) if offsets is None else offsets
        sizes = self.sizes if sizes is None else sizes
        start = self.storage_offset * self.dtype.itemsize
        if 0 in sizes:
            return ByteRange(start, start)
        low, high = span_of(self.strides, offsets, sizes, self.dtype.itemsize)
        return ByteRange(start + low, start + high)


class TorchFile:
    """An open ``torch.save`` file. Reading is thread-safe; concurrency is the caller's.

    Use as a context manager, or call `close`. Made by `open_torch_file`.
    """

    def __init__(self, folder: Folder, key: str, info: ObjectInfo, *, weights_only: bool) -> None:
        self.folder = folder
        self._store: Store = folder.open()
        self._key = key
        self._info = info
        self.url = f"{self._store.url.rstrip('/')}/{key}"
        self._members = read_archive(self.read_at, info.size_bytes, self.url)
        self._starts: dict[str, int] = {}
        data = self._read_pickle()
        storages = Storages(self.url, self._check_storage)
        self.value: Any = unpickle(data, storages, weights_only=weights_only, what=self.url)
        """What was saved; its tensors are on the meta device, and have no memory."""
        self._keys = {storage_identity(made): key for key, made in storages.made.items()}
        self._held = storages  # keeps the identities from being used again

    def __enter__(self) -> TorchFile:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the store. Idempotent."""
        self.folder.close()

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        return self._info.size_bytes

    @cached_property
    def storages(self) -> Mapping[str, StoredStorage]:
        """Every storage that the saved structure uses, by key, in the order of the file."""
        found = {
            key: StoredStorage(key, one.dtype, one.num_bytes, self._member(key))
            for key, one in self._held.pickled.items()
        }
        ordered = sorted(found.values(), key=lambda one: one.member.header_offset)
        return MappingProxyType({one.key: one for one in ordered})

    @property
    def identities(self) -> Mapping[int, str]:
        """Key of each stand-in's storage, by what `torch_private.storage_identity` says of it."""
        return MappingProxyType(self._keys)

    @property
    def info(self) -> ObjectInfo:
        """What the store says of the file that was opened."""
        return self._info

    # --- where things lie ----------------------------------------------------------------

    def storage_key(self, value: torch.Tensor | torch.UntypedStorage) -> str | None:
        """Return the storage behind a stand-in; None for what is none, such as a meta tensor."""
        if isinstance(value, torch.Tensor) and not is_strided(value):
            return None
        return self._keys.get(storage_identity(value))

    def place(self, tensor: torch.Tensor) -> TensorPlace | None:
        """Say where the elements of a stand-in lie. No I/O.

        Returns:
            None if it is no stand-in of a strided tensor: a tensor that was on the meta
            device when it was saved, a sparse one, or a subclass that wraps others.

        Raises:
            CorruptError: If the tensor reaches past its storage.
        """
        key = self.storage_key(tensor)
        if key is None:
            return None
        place = TensorPlace.of(tensor, key)
        if 0 not in place.sizes and place.span().end > self.storages[key].num_bytes:
            raise CorruptError(
                f"{self.url} is damaged: a tensor of shape {place.sizes} reaches past its storage"
                f" {key} of {self.storages[key].num_bytes} bytes"
            )
        return place

    def start_of(self, key: str) -> int:
        """Return where a storage starts in the file; one small read if that is not known yet."""
        if key not in self._starts:
            member = self._member(key)
            header = self.read_at(member.header_offset, member.names_end)
            self._starts[key] = contents_offset(member, header, self.url)
        return self._starts[key]

    @cached_property
    def _laid_out(self) -> list[tuple[int, str]]:
        return sorted((self.laid_out_start(key), key) for key in self.storages)

    # --- bytes -----------------------------------------------------------------------------

    def read_storage(self, key: str, start: int = 0, end: int | None = None) -> memoryview:
        """Read bytes ``[start, end)`` of a storage, in one request nearly always.

        Raises: as `read_laid_out`.
        """
        end = self._member(key).size_bytes if end is None else end
        base = self.laid_out_start(key)
        return self.read_laid_out(base + start, base + end)

    def laid_out_start(self, key: str) -> int:
        """Return where a storage starts in the file as torch's writer lays one out. No I/O."""
        member = self._member(key)
        expected = member.expected_offset
        return member.names_end if expected is None else expected

    def storages_in(self, start: int, end: int) -> list[tuple[int, str]]:
        """Return `laid_out_start` and key of each storage with bytes in a range of the file."""
        after = bisect_left(self._laid_out, (end, ""))
        before = max(bisect_left(self._laid_out, (start, "")) - 1, 0)
        return [
            (at, key)
            for at, key in self._laid_out[before:after]
            if at + self.storages[key].num_bytes > start
        ]

    def read_laid_out(self, start: int, end: int) -> memoryview:
        """Read bytes ``[start, end)`` of the file as if storages were where `laid_out_start` says.

        Where a storage really starts its header tells, which is read along with its first
        bytes. If another tool packed the file otherwise, its bytes are read again. Thread-safe.

        Raises:
            CorruptError: If the file has no such storage where its directory says.
            NotFoundError: If the file was deleted meanwhile.
            StoreError: If the store refuses.
        """
        if start == end:
            return memoryview(b"")
        inside = self.storages_in(start, end)
        headers = [(key, self._member(key)) for _, key in inside if key not in self._starts]
        near = (m.header_offset for _, m in headers if m.header_offset >= start - _NEAR_BYTES)
        begin = min([start, *near])
        data = self.read_at(begin, end)
        for key, member in headers:
            if member.header_offset < begin:
                self.start_of(key)
            else:
                header = data[member.header_offset - begin :]
                self._starts[key] = contents_offset(member, header, self.url)
        data = data[start - begin :]
        moved = [(at, key) for at, key in inside if self._starts[key] != at]
        if moved:
            data = memoryview(bytearray(data))
        for at, key in moved:
            first, last = max(at, start), min(at + self.storages[key].num_bytes, end)
            by = self._starts[key] - at
            data[first - start : last - start] = self.read_at(first + by, last + by)
        return data

    def read_box(
        self,
        tensor: torch.Tensor,
        offsets: Sequence[int] | None = None,
        sizes: Sequence[int] | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Read a box of a tensor into memory of its own, in one request nearly always.

        Reads all bytes from the box's first to its last element: cheap for rows of a tensor
        whose elements are in order. Holds those bytes beside the result while it copies.

        Args:
            tensor: A stand-in of this file.
            offsets: First element of the box in each dimension; None for the whole tensor.
            sizes: Sizes of the box; None for the whole tensor.
            out: Where to put it, shaped as the box; None for a new contiguous CPU tensor.

        Raises:
            IncompatibleError: If it is no stand-in of a strided tensor.
            CorruptError: As `read_storage`.
        """
        place = self.place(tensor)
        if place is None:
            raise IncompatibleError(
                f"{self.url}: a {type(tensor).__name__} of layout {tensor.layout} has no bytes of"
                " its own in the file"
            )
        offsets = (0,) * len(place.sizes) if offsets is None else tuple(offsets)
        sizes = place.sizes if sizes is None else tuple(sizes)
        if out is None:
            out = torch.empty(sizes, dtype=place.dtype, device="cpu")
        span = place.span(offsets, sizes)
        data = self.read_storage(place.storage_key, *span)
        raw = out if not (place.is_conj or place.is_neg) else torch.empty_like(out)
        base = span.start - place.storage_offset * place.dtype.itemsize
        copy_box_in(data, base, place.dtype, place.strides, offsets, sizes, raw)
        if place.is_conj:
            out.copy_(raw.conj())
        elif place.is_neg:
            out.copy_(raw.neg())
        return out

    def has_crc(self, key: str) -> bool:
        """Tell whether the file has a checksum (CRC32) of a whole storage."""
        return self._has_crcs and self._member(key).crc32 != 0

    def check_crc(self, key: str, crc32: int) -> None:
        """Compare the CRC32 of a whole storage with the directory's, where the file has them.

        Raises:
            CorruptError: If they differ.
        """
        member = self._member(key)
        if self.has_crc(key) and member.crc32 != crc32:
            raise CorruptError(
                f"{self.url}: storage {key} is not what was saved (CRC32 {crc32:08x} instead of"
                f" {member.crc32:08x}), bytes [{self.start_of(key)},"
                f" {self.start_of(key) + member.size_bytes})",
                key=self._key,
                start=self.start_of(key),
                end=self.start_of(key) + member.size_bytes,
            )

    def check_unchanged(self) -> None:
        """Look whether the file is still the one that was opened.

        Raises:
            ConflictError: If it was replaced.
            NotFoundError: If it was deleted.
        """
        now = self._store.head(self._key)
        if (now.size_bytes, now.etag) != (self._info.size_bytes, self._info.etag):
            raise ConflictError(
                f"{self.url} was replaced while it was read: what was read may be a mix of two"
                " files. Start again"
            )

    # --- inside ----------------------------------------------------------------------------

    def read_at(self, start: int, end: int) -> memoryview:
        """Read bytes ``[start, end)`` of the file; thread-safe."""
        return self._store.get_range(self._key, start, end)

    def _member(self, key: str) -> Member:
        member = self._members.get(f"data/{key}")
        if member is None:
            raise CorruptError(f"{self.url} is damaged: it names storage {key} and has none")
        return member

    def _read_pickle(self) -> bytes:
        """Read the pickle, and the note of the byte order that mostly follows it."""
        pickle, note = self._members["data.pkl"], self._members.get("byteorder")
        if note is not None and note.size_bytes > _MAX_NOTE_BYTES:
            note = None
        end = pickle.next_offset
        if note is not None and 0 <= note.header_offset - end < 4096:
            end = note.next_offset
        block = self.read_at(pickle.header_offset, end)

        def contents(member: Member) -> bytes:
            held = block[member.header_offset - pickle.header_offset :]
            if member.next_offset > end or member.header_offset < pickle.header_offset:
                held = self.read_at(member.header_offset, member.next_offset)
            start = contents_offset(member, held, self.url) - member.header_offset
            return bytes(held[start : start + member.size_bytes])

        self._check_byteorder(b"" if note is None else contents(note))
        data = contents(pickle)
        crc32 = zlib.crc32(data)
        # A writer may have been told to compute none; then every one is zero.
        self._has_crcs = pickle.crc32 == crc32
        if pickle.crc32 not in (crc32, 0):
            raise CorruptError(
                f"{self.url}: its data.pkl is not what was saved (CRC32 {crc32:08x} instead of"
                f" {pickle.crc32:08x})",
                key=self._key,
                start=pickle.header_offset,
                end=pickle.next_offset,
            )
        return data

    def _check_byteorder(self, order: bytes) -> None:
        # Absent before torch 1.13, whose files torch.load takes for little-endian, too.
        if order not in (b"", b"little"):
            raise IncompatibleError(
                f"{self.url} was written on a {order.decode('ascii', 'replace')}-endian machine;"
                " load it with torch.load and save it again on a little-endian one"
            )

    def _check_storage(self, one: PickledStorage) -> None:
        member = self._member(one.key)
        if member.size_bytes != one.num_bytes:
            raise CorruptError(
                f"{self.url} is damaged: storage {one.key} has {member.size_bytes} bytes instead"
                f" of {one.num_bytes}"
            )


def open_torch_file(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    weights_only: bool = True,
    config: ReadConfig | None = None,
    opener: Callable[..., Store] = open_store,
) -> TorchFile:
    """Open a ``torch.save`` file and its structure; reads no tensor.

    Memory: the zip directory (about 100 bytes per tensor) and the pickle, once each, with what
    the pickle holds besides tensors.

    Args:
        url: The file: a URL, or a local path.
        storage_options: fsspec's options for the URL's protocol.
        weights_only: Allow in the file what ``torch.load(weights_only=True)`` allows, with
            ``torch.serialization.add_safe_globals`` honoured. False runs whatever code the
            file names.
        config: Names the engine and bounds the retries.
        opener: Opens the store.

    Raises:
        NotFoundError: If there is no such file.
        IncompatibleError: If it is no zip file of ``torch.save``; the message says what it is. Or
            if it holds big-endian, quantized, or strided nested tensors.
        CorruptError: If it is damaged, or names something that is not allowed; it was not run.
    """
    parent, key = file_location(url)
    folder = Folder(parent, storage_options, config or ReadConfig(), opener)
    try:
        info = _head(folder, key)
        return TorchFile(folder, key, info, weights_only=weights_only)
    except BaseException:
        folder.close()
        raise


def _head(folder: Folder, key: str) -> ObjectInfo:
    store = folder.open()
    try:
        return store.head(key)
    except NotFoundError as error:
        if any(True for _ in zip(store.list(f"{key}/"), range(1), strict=False)):
            raise IncompatibleError(
                f"{store.url}/{key} is a folder, not a torch.save file; is it a DCP checkpoint?"
            ) from error
        raise


def is_strided(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's elements lie in a storage, and are all that it is made of."""
    is_plain_class = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return tensor.layout == torch.strided and not tensor.is_nested and is_plain_class
