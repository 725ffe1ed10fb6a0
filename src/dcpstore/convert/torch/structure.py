"""The structure of a ``torch.save`` file: nested, flattened, pickled, and kept in a checkpoint.

While a file is converted, its tensors are stand-ins: on the meta device, with storages that
somebody knows (`StorageViews`). Torch pickles meta tensors without their storages; here they are
pickled with them, so that what comes out is the ``data.pkl`` of the tensors that they stand for.

Flattened keys are DCP's own (``model.layers.0.weight``), so that ``dcp.load`` finds them. DCP has
no place for the rest: that two tensors share a storage, that a key was a number, that a dictionary
was an ``OrderedDict`` or empty. So a checkpoint made by `torch_save_to_dcp` has one more item,
its `Layout`, beside the state dict, where neither ``dcp.load`` nor a list of keys meets it::

    "DCPTORCH"  u32 version  u32 header_bytes  header (JSON)  pickle  archive

The pickle is the ``data.pkl`` that torch would write for the structure, storages by number. The
header says which storages are found in which value's own record; the archive holds those
that are found nowhere else, such as of a tensor that is an attribute of another one.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from dcpstore.convert.selection import Selection
from dcpstore.errors import ConfigError, CorruptError, IncompatibleError
from dcpstore.format.dtypes import info_of
from dcpstore.format.zip import TorchZipWriter, read_members
from dcpstore.text import check_natural, parse_json
from dcpstore.torch_private import (
    meta_storage,
    rebuild_functions,
    storage_identity,
    tensor_attributes,
    tensor_lazy_bits,
    untyped_storage,
)


class StorageViews:
    """Which tensors are stand-ins, and how they will lie in their storages.

    Args:
        num_bytes: Length of each stand-in storage, by identity.
    """

    def __init__(self, num_bytes: Mapping[int, int]) -> None:
        self._num_bytes = num_bytes

    def knows(self, identity: int) -> bool:
        """Tell whether a storage is a stand-in's."""
        return identity in self._num_bytes

    def num_bytes(self, identity: int) -> int:
        """Return the length of a stand-in storage."""
        return self._num_bytes[identity]

    def view(self, tensor: torch.Tensor) -> tuple[int, tuple[int, ...]]:
        """Return a stand-in's offset in its storage and its strides, in elements."""
        return int(tensor.storage_offset()), tuple(tensor.stride())


@dataclass(frozen=True, slots=True)
class PickledStructure:
    """What `pickle_structure` made.

    Attributes:
        data: The pickle.
        storages: Identity of the storage behind each key, in the order of the keys.
        held: Real storages among them, by identity: tensors that were not stand-ins.
        stand_ins: Every strided stand-in, as often as it was met.
        bare: Identities of stand-in storages that were met without a tensor.
    """

    data: bytes
    storages: Mapping[str, int]
    held: Mapping[int, torch.UntypedStorage]
    stand_ins: Sequence[torch.Tensor]
    bare: frozenset[int]


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is of a class that holds other tensors instead of elements."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def is_stand_in(tensor: torch.Tensor, views: StorageViews) -> bool:
    """Tell whether a tensor is a strided one whose storage is known."""
    if not tensor.is_meta or tensor.layout != torch.strided or is_wrapper(tensor):
        return False
    return views.knows(storage_identity(tensor))


def view_of(tensor: torch.Tensor) -> tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Return what two strided stand-ins share if they are the very same elements."""
    return (
        storage_identity(tensor),
        int(tensor.storage_offset()),
        tuple(tensor.size()),
        tuple(tensor.stride()),
        tensor.dtype,
    )


def pickle_structure(value: Any, views: StorageViews) -> PickledStructure:
    """Pickle a structure in protocol 2, which ``torch.load(weights_only=True)`` reads.

    Args:
        value: The structure; tensors in it that are no stand-ins are pickled as they are.
        views: Tells stand-ins, and how they will lie in their storages.

    Raises:
        IncompatibleError: If it holds a tensor of a wrapper subclass, or what no pickle holds.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream, views)
    try:
        pickler.dump(value)
    except IncompatibleError:
        raise
    except Exception as error:
        raise IncompatibleError(f"the structure cannot be pickled: {error}") from error
    return PickledStructure(
        stream.getvalue(),
        {key: one for one, key in pickler.keys.items()},
        pickler.held,
        pickler.stand_ins,
        frozenset(pickler.bare),
    )


@dataclass(frozen=True, slots=True)
class _StorageRef:
    """A storage of a stand-in, as a tensor of some dtype names it."""

    identity: int
    dtype: torch.dtype


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, views: StorageViews) -> None:
        super().__init__(stream, protocol=2)
        self._views = views
        self.keys: dict[int, str] = {}
        self.held: dict[int, torch.UntypedStorage] = {}
        self.stand_ins: list[torch.Tensor] = []
        self.bare: set[int] = set()

    # --- storages --------------------------------------------------------------------

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _StorageRef):
            return self._stand_in_id(obj.identity, obj.dtype)
        if isinstance(obj, torch.storage.TypedStorage):
            return self._storage_id(untyped_storage(obj), obj.dtype)
        if isinstance(obj, torch.UntypedStorage):
            return self._storage_id(obj, None)
        return None

    def _storage_id(self, storage: torch.UntypedStorage, dtype: torch.dtype | None) -> Any:
        identity = storage_identity(storage)
        if self._views.knows(identity):
            self.bare.add(identity)
            return self._stand_in_id(identity, dtype)
        self.held[identity] = storage
        return self._id(identity, storage.nbytes(), dtype)

    def _stand_in_id(self, identity: int, dtype: torch.dtype | None) -> Any:
        return self._id(identity, self._views.num_bytes(identity), dtype)

    def _id(self, identity: int, num_bytes: int, dtype: torch.dtype | None) -> Any:
        key = self.keys.setdefault(identity, str(len(self.keys)))
        row = None if dtype is None else info_of(dtype)
        if row is None or row.storage_class is None:
            return ("storage", torch.UntypedStorage, key, "cpu", num_bytes)
        kind = getattr(torch, row.storage_class)
        return ("storage", kind, key, "cpu", num_bytes // row.item_bytes)

    # --- tensors ---------------------------------------------------------------------

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.is_meta:
            return self._reduce(obj)
        return NotImplemented

    def _reduce(self, tensor: torch.Tensor) -> Any:
        if is_wrapper(tensor):
            raise IncompatibleError(
                f"a tensor of class {type(tensor).__name__} holds other tensors and has no elements"
                " of its own; save what it holds as plain tensors"
            )
        rebuild = rebuild_functions()
        state = tensor_attributes(tensor)
        hooks: OrderedDict[int, Any] = OrderedDict()
        if type(tensor) is torch.nn.Parameter:
            if not state:
                return rebuild.parameter, (tensor.data, tensor.requires_grad, hooks)
            return (
                rebuild.parameter_with_state,
                (tensor.data, tensor.requires_grad, hooks, state),
            )
        function, arguments = self._reduce_elements(tensor)
        if type(tensor) is torch.Tensor and not state:
            return function, arguments
        return rebuild.from_type, (function, type(tensor), arguments, state)

    def _reduce_elements(self, tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        rebuild = rebuild_functions()
        if tensor.layout == torch.sparse_coo:
            parts: tuple[Any, ...] = (tensor._indices(), tensor._values(), tensor.size())  # noqa: SLF001 -- as torch pickles it
            return rebuild.sparse, (tensor.layout, (*parts, tensor.is_coalesced()))
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values(), tensor.size())
            return rebuild.sparse, (tensor.layout, parts)
        if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            parts = (tensor.ccol_indices(), tensor.row_indices(), tensor.values(), tensor.size())
            return rebuild.sparse, (tensor.layout, parts)
        if not self._views.knows(storage_identity(tensor)):
            shape = tuple(tensor.size())
            return rebuild.meta, (tensor.dtype, shape, tensor.stride(), tensor.requires_grad)
        return self._reduce_strided(tensor)

    def _reduce_strided(self, tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        rebuild = rebuild_functions()
        storage_offset, strides = self._views.view(tensor)
        self.stand_ins.append(tensor)
        arguments: tuple[Any, ...] = (
            _StorageRef(storage_identity(tensor), tensor.dtype),
            storage_offset,
            tuple(tensor.size()),
            strides,
            tensor.requires_grad,
            OrderedDict(),
        )
        is_named = info_of(tensor.dtype).storage_class is not None
        if not is_named:
            arguments += (tensor.dtype,)
        lazy_bits = tensor_lazy_bits(tensor)
        if lazy_bits:
            arguments += (lazy_bits,)
        return (rebuild.tensor if is_named else rebuild.tensor_with_dtype), arguments


Path: TypeAlias = "tuple[str | int, ...]"


@dataclass(frozen=True, slots=True)
class Leaves:
    """A structure's leaves by flattened key.

    Attributes:
        values: Tensors and other values.
        paths: Where each lies; dictionary keys as text, positions in lists as numbers.
    """

    values: Mapping[str, Any]
    paths: Mapping[str, Path]


# --- selection ------------------------------------------------------------------------


def rearrange(
    value: Any,
    leaves: Leaves,
    names: Mapping[str, str],
    replaced: Mapping[str, Any],
    takes: Callable[[str], bool],
) -> Any:
    """Return a structure with some of the leaves, some under other names or with other values.

    Containers keep their types and attributes. A leaf with a new name goes where the name says,
    along new dictionaries. What is left out of a list leaves None in its place; containers
    of which nothing is left vanish. The structure itself is not changed.

    Args:
        value: The structure.
        leaves: Of it.
        names: New key of each leaf that stays.
        replaced: New value of some leaves, by old key.
        takes: Whether the key of a container that was empty before takes part.

    Raises:
        ConfigError: If a new name leads through a leaf.
    """
    is_same = all(one is leaves.values[fqn] for fqn, one in replaced.items())
    if is_same and list(names.items()) == [(fqn, fqn) for fqn in leaves.paths]:
        return value
    kept = {
        leaves.paths[fqn]: replaced.get(fqn, leaves.values[fqn])
        for fqn, name in names.items()
        if fqn == name
    }
    copied = _Pruner(set(leaves.paths.values()), kept, takes).prune(value, ())
    copied = _emptied(value) if copied is _GONE else copied
    for fqn, name in names.items():
        if fqn != name:
            path = _renamed_path(leaves.paths[fqn], name)
            _insert(copied, path, replaced.get(fqn, leaves.values[fqn]), name)
    return copied


_GONE: Any = object()


@dataclass(frozen=True, slots=True)
class _Pruner:
    """Copies containers with those leaves that stay."""

    leaf_paths: set[Path]
    kept: Mapping[Path, Any]
    takes: Callable[[str], bool]

    def prune(self, value: Any, path: Path) -> Any:
        if path in self.leaf_paths:
            return self.kept.get(path, _GONE)
        if not value:
            return copy.copy(value) if self.takes(".".join(map(str, path))) else _GONE
        if isinstance(value, Mapping):
            return self._prune_mapping(value, path)
        parts = [self.prune(one, (*path, number)) for number, one in enumerate(value)]
        if all(part is _GONE for part in parts):
            return _GONE
        copied = copy.copy(value)
        copied[:] = [None if part is _GONE else part for part in parts]
        return copied

    def _prune_mapping(self, value: Mapping[Any, Any], path: Path) -> Any:
        parts = {key: self.prune(one, (*path, str(key))) for key, one in value.items()}
        if all(part is _GONE for part in parts.values()):
            return _GONE
        copied = _emptied(value)
        copied.update((key, part) for key, part in parts.items() if part is not _GONE)
        return copied


def _emptied(value: Any) -> Any:
    """Return a dictionary of the same type and attributes with nothing in it."""
    copied = copy.copy(value)
    copied.clear()
    return copied


def _renamed_path(path: Path, name: str) -> Path:
    """Return where a new name lies: as in the old path as far as the two end alike."""
    tail: list[str | int] = []
    left = name
    for step in reversed(path):
        text = str(step)
        if left == text:
            return (text, *tail)
        if not left.endswith(f".{text}"):
            break
        tail.insert(0, text)
        left = left[: -len(text) - 1]
    return (*left.split("."), *tail)


def _insert(root: Any, path: Sequence[str | int], value: Any, name: str) -> None:
    at = root
    for step in path[:-1]:
        if isinstance(at, MutableMapping):
            at = at.setdefault(step, {})
        if not isinstance(at, MutableMapping):
            raise ConfigError(f"rename: {name!r} leads through {step!r}, which is no dictionary")
    if path[-1] in at:
        raise ConfigError(f"rename: {name!r} is there already")
    at[path[-1]] = value


# --- dtypes ---------------------------------------------------------------------------


def cast_stand_ins(
    values: Mapping[str, Any], fqns: Iterable[str], views: StorageViews, selection: Selection
) -> tuple[dict[str, torch.Tensor], dict[int, int]]:
    """Give stand-ins the dtypes that were chosen; those that shared a storage share the new one.

    Args:
        values: Leaves by key.
        fqns: Keys that take part; those of other leaves than stand-ins are passed over.
        views: Tells stand-ins.
        selection: Chooses the dtypes.

    Returns:
        Each stand-in by key, the same one where its dtype stays; and the length of each new
        storage, by identity.
    """
    storages: dict[tuple[int, torch.dtype], torch.UntypedStorage] = {}
    tensors: dict[str, torch.Tensor] = {}
    for fqn in fqns:
        value = values[fqn]
        if not isinstance(value, torch.Tensor) or not is_stand_in(value, views):
            continue
        tensors[fqn] = value
        dtype = selection.dtype_of(fqn, value.dtype)
        if dtype != value.dtype:
            old = storage_identity(value)
            if (old, dtype) not in storages:
                numel = views.num_bytes(old) // value.dtype.itemsize
                storages[old, dtype] = meta_storage(numel * dtype.itemsize)
            tensors[fqn] = _recast(value, dtype, storages[old, dtype])
    return tensors, {storage_identity(one): one.nbytes() for one in storages.values()}


def _recast(
    tensor: torch.Tensor, dtype: torch.dtype, storage: torch.UntypedStorage
) -> torch.Tensor:
    """Return a stand-in of another dtype, of the same class, strides and attributes."""
    made = torch.empty(0, dtype=dtype, device="meta")
    made.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    if type(tensor) is torch.nn.Parameter:
        is_trained = tensor.requires_grad and (dtype.is_floating_point or dtype.is_complex)
        made = torch.nn.Parameter(made, is_trained)
    elif dtype.is_floating_point or dtype.is_complex:
        made.requires_grad_(tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    return made


LAYOUT_KEY = ".dcpstore.torch_save"
"""The item's key; it is not one of the state dict's."""

_MAGIC = b"DCPTORCH"
_VERSION = 1
_PREFIX = struct.Struct("<8sII")


@dataclass(frozen=True, slots=True)
class Layout:
    """A file's structure, as a checkpoint keeps it.

    Attributes:
        pickled: The ``data.pkl`` of the structure.
        members: Per key of a value or an opaque tensor, the structure's storages that its own
            record holds, in the order in which it holds them.
        extra: The storages that the archive holds, likewise.
        archive: A ``torch.save`` record of those; empty if there are none.
    """

    pickled: bytes
    members: Mapping[str, Sequence[str]]
    extra: Sequence[str] = ()
    archive: bytes = b""


def encode_layout(layout: Layout) -> bytes:
    """Turn a layout into bytes."""
    fields = {
        "members": {fqn: list(keys) for fqn, keys in layout.members.items() if keys},
        "extra": list(layout.extra),
        "pickle_bytes": len(layout.pickled),
    }
    header = json.dumps(fields, separators=(",", ":")).encode()
    prefix = _PREFIX.pack(_MAGIC, _VERSION, len(header))
    return b"".join([prefix, header, layout.pickled, layout.archive])


def decode_layout(data: bytes, what: str) -> Layout:
    """Turn bytes into the layout they were made from.

    Raises:
        CorruptError: If they are damaged.
        IncompatibleError: If a newer dcpstore wrote them.
    """
    try:
        magic, version, header_bytes = _PREFIX.unpack_from(data)
        if magic != _MAGIC:
            raise ValueError(f"it starts with {magic!r}")
        if version > _VERSION:
            raise IncompatibleError(
                f"{what}: the record of its torch.save file has version {version}; this dcpstore"
                f" reads version {_VERSION}. Convert with a newer one"
            )
        start = _PREFIX.size + header_bytes
        fields = parse_json(data[_PREFIX.size : start])
        end = start + check_natural(fields["pickle_bytes"])
        if end > len(data):
            raise ValueError(f"its pickle ends at byte {end} of {len(data)}")
        members = {str(fqn): tuple(map(str, keys)) for fqn, keys in fields["members"].items()}
        return Layout(data[start:end], members, tuple(map(str, fields["extra"])), data[end:])
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptError(
            f"{what}: the record of its torch.save file is damaged: {error!r}"
        ) from error


# --- records --------------------------------------------------------------------------


def write_record(pickled: PickledStructure, read: Callable[[int], memoryview]) -> bytes:
    """Return the ``torch.save`` record of a pickled value, with its storages. All in memory.

    Args:
        pickled: The value.
        read: Returns the bytes of a stand-in storage, by identity.
    """
    stream = io.BytesIO()
    writer = TorchZipWriter(stream)
    writer.write_pickle(pickled.data)
    for key, identity in pickled.storages.items():
        held = pickled.held.get(identity)
        data = read(identity) if held is None else storage_bytes(held)
        with writer.storage(key, data.nbytes):
            writer.write(data)
    writer.finish()
    return stream.getvalue()


def storage_bytes(storage: torch.UntypedStorage) -> memoryview:
    """Return the bytes of a real storage."""
    flat = torch.empty(0, dtype=torch.uint8, device="cpu")
    held: Any = storage
    flat.set_(held if storage.device.type == "cpu" else held.cpu())
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def read_record(data: bytes, what: str) -> list[memoryview]:
    """Return the storages that a ``torch.save`` record holds, by number. Runs nothing.

    Raises:
        CorruptError: If it is damaged.
        IncompatibleError: If it is no ``torch.save`` record.
    """
    members = read_members(memoryview(data), what)
    found: list[memoryview] = []
    while (storage := members.get(f"data/{len(found)}")) is not None:
        found.append(storage)
    return found
