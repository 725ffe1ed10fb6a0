"""Pickle a structure whose tensors are stand-ins, as ``torch.save`` would have the tensors.

A stand-in is a tensor on the meta device whose storage somebody knows (`StorageNames`).
Torch pickles meta tensors without their storages; here they are pickled with them, so that
what comes out is the ``data.pkl`` of the tensors that they stand for.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcpstore.errors import IncompatibleError
from dcpstore.format.dtypes import info_of
from dcpstore.torch_private import (
    rebuild_functions,
    storage_identity,
    tensor_attributes,
    tensor_lazy_bits,
    untyped_storage,
)

__all__ = [
    "PickledStructure",
    "StorageView",
    "StorageViews",
    "is_stand_in",
    "is_wrapper",
    "pickle_structure",
]


@dataclass(frozen=True, slots=True)
class StorageView:
    """How a tensor lies in its storage, in elements."""

    storage_offset: int
    strides: tuple[int, ...]


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

    def view(self, tensor: torch.Tensor) -> StorageView:
        """Return how a stand-in lies in its storage."""
        return StorageView(int(tensor.storage_offset()), tuple(tensor.stride()))


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
        rebuild, view = rebuild_functions(), self._views.view(tensor)
        self.stand_ins.append(tensor)
        arguments: tuple[Any, ...] = (
            _StorageRef(storage_identity(tensor), tensor.dtype),
            view.storage_offset,
            tuple(tensor.size()),
            view.strides,
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
