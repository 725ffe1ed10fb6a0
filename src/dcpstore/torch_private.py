"""The one place that names torch's private symbols, one section per user.

What is private may move between releases: each entry says where it is used and what
happens when it is gone.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence
from dataclasses import make_dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from dcpstore.errors import IncompatibleError

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store as Store
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import ReadItem, SavePlan


# --- format.record ---------------------------------------------------------------


def wait_async_collective(tensor: torch.Tensor) -> torch.Tensor:
    """Return the finished tensor behind an ``AsyncCollectiveTensor``; others unchanged.

    The module is looked up rather than imported: where nobody imported it, there is no
    such tensor. Should the class move, the tensor is saved as an opaque one.
    """
    module = sys.modules.get("torch.distributed._functional_collectives")
    kind = getattr(module, "AsyncCollectiveTensor", None)
    if kind is None or not isinstance(tensor, kind):
        return tensor
    waited: torch.Tensor = tensor.wait()
    return waited


# --- metadata --------------------------------------------------------------------


def make_storage_info(
    relative_path: str, offset: int, length: int, transforms: Sequence[str]
) -> object:
    """Make the value that stock readers look for in ``Metadata.storage_data``.

    Part of the stored format since torch 2.0; without it stock readers could not load.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    info = _StorageInfo(relative_path, offset, length)
    if transforms:  # torch 2.6 has no such field
        info.transform_descriptors = list(transforms)
    return info


def dcp_format_version() -> str | None:
    """Return the version that stock writers put into ``Metadata.version`` (None before 2.7)."""
    from torch.distributed.checkpoint import filesystem

    return getattr(filesystem, "CURRENT_DCP_VERSION", None)


# --- fetch -------------------------------------------------------------------------


def default_extension_registry() -> Any:
    """Return DCP's registry of stream extensions (experimental in torch; not yet in 2.6).

    Raises:
        IncompatibleError: If this torch has none.
    """
    try:
        from torch.distributed.checkpoint._extension import ExtensionRegistry
    except ImportError as error:
        raise IncompatibleError(
            "the checkpoint was saved through a DCP stream extension, such as compression, which"
            " this torch does not have; load it with a newer torch"
        ) from error
    return ExtensionRegistry()


# --- planners ------------------------------------------------------------------------
# Which chunks a tensor has must be torch's own decision. All of these have been where they are
# since torch 2.4.


def flatten_state_dict(state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Flatten nested dicts and lists to dotted keys; return values and paths by key."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict as flatten

    return flatten(state_dict)


def flatten_sharded_tensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Flatten the nested ShardedTensors of FSDP1 over tensor parallelism."""
    from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors

    return _flatten_sharded_tensors(state_dict)


def set_element(state_dict: dict[str, Any], path: Any, value: Any) -> None:
    """Put a value at a path of a nested state dict."""
    from torch.distributed.checkpoint._traverse import set_element as put

    put(state_dict, path, value)


def materialise_meta_tensors(state_dict: dict[str, Any]) -> None:
    """Give meta tensors of a nested state dict memory on the default device, in place.

    The device is that of the default process group; without one, the accelerator if there
    is one, else the CPU (where torch's own helper raises).
    """
    import torch.distributed as dist
    from torch.distributed.checkpoint.planner_helpers import _init_state_dict, _iterate_state_dict

    if dist.is_available() and dist.is_initialized():
        _init_state_dict(state_dict)
        return
    import torch

    has_accelerator = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if has_accelerator else torch.device("cpu")

    def give(value: Any) -> Any:
        return torch.empty_like(value, device=device) if value.is_meta else value

    _iterate_state_dict(state_dict, give, give, give)


def create_read_items(fqn: str, entry: Any, value: Any) -> list[ReadItem]:
    """Return the read items for what this rank holds of a value."""
    from torch.distributed.checkpoint.planner_helpers import _create_read_items

    return _create_read_items(fqn, entry, value)


def is_in_mesh(value: object) -> bool:
    """Tell whether this rank holds a part of a value: False for a DTensor on other ranks."""
    from torch.distributed.tensor import DTensor

    return not isinstance(value, DTensor) or value.device_mesh.get_coordinate() is not None


def narrow(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """Narrow a tensor to a box."""
    from torch.distributed._shard._utils import narrow_tensor_by_index

    return narrow_tensor_by_index(tensor, offsets, lengths)


def dedup_save_plans(plans: list[SavePlan]) -> list[SavePlan]:
    """Keep each replicated item in one plan, the smallest so far."""
    from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans as dedup

    return dedup(plans)


def validate_global_plan(plans: list[SavePlan], metadata: Metadata) -> list[str]:
    """Return what is wrong with a global plan: overlaps, bounds, coverage."""
    from torch.distributed.checkpoint.default_planner import _validate_global_plan

    found: Any = _validate_global_plan(plans, metadata)
    if isinstance(found, bool):  # torch before 2.10 logs the reasons and returns a verdict
        return [] if found else ["torch's log has the reasons"]
    return list(found)


# --- optimizer -----------------------------------------------------------------------
# FSDP1's tensors. Their constructor without communication, and the ranks that hold one,
# have been where they are since torch 1.12.


def group_of_sharded_tensor(tensor: Any) -> ProcessGroup:
    """Return the ranks that hold a ShardedTensor."""
    group: ProcessGroup = tensor._process_group  # noqa: SLF001 - this module's job
    return group


def make_sharded_tensor(shards: list[Any], metadata: Any, group: ProcessGroup) -> Any:
    """Make a ShardedTensor of this rank's shards. No communication: all ranks know the rest.

    Args:
        shards: Of this rank.
        metadata: Of all shards; it is not copied.
        group: The ranks that hold it.
    """
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor

    return ShardedTensor._init_from_local_shards_and_global_metadata(  # noqa: SLF001
        shards, sharded_tensor_metadata=metadata, process_group=group
    )


def sharded_tensor_of(like: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return a ShardedTensor like another one, with other tensors for its local shards.

    No communication. Where the tensors are on the host and those of ``like`` were not, it says
    of all shards that they are there. (That has never run on a device so far.)

    Args:
        like: All ranks' shards, where they lie in the whole.
        tensors: For the local shards of ``like``, in their order.
    """
    from torch.distributed._shard.sharded_tensor.shard import Shard
    from torch.distributed.remote_device import _remote_device

    metadata, shards = like.metadata(), like.local_shards()
    placed = [shard.metadata for shard in shards]
    if any(one.tensor.device != new.device for one, new in zip(shards, tensors, strict=True)):
        on_host = {
            id(one): replace(one, placement=_remote_device(f"rank:{one.placement.rank()}/cpu"))
            for one in metadata.shards_metadata
        }
        properties = replace(metadata.tensor_properties, pin_memory=tensors[0].is_pinned())
        metadata = replace(
            metadata, shards_metadata=list(on_host.values()), tensor_properties=properties
        )
        by_place = {tuple(one.shard_offsets): one for one in on_host.values()}
        placed = [by_place[tuple(one.shard_offsets)] for one in placed]
    made = [Shard(tensor, one) for tensor, one in zip(tensors, placed, strict=True)]
    return make_sharded_tensor(made, metadata, group_of_sharded_tensor(like))


def canonical_names(model: Any, name: str) -> set[str]:
    """Return a parameter's name without what DDP, FSDP1 and torch.compile put into it.

    Several for a flat parameter of FSDP1. Torch's state dict functions name by it; it has
    been where it is since torch 2.2.
    """
    from torch.distributed.checkpoint.state_dict import _get_fqns

    return set(_get_fqns(model, name))


# --- manager -------------------------------------------------------------------------


def async_save_response() -> Any:
    """Return the class of what ``dcp.async_save`` returns; one like it where torch has none."""
    from torch.distributed.checkpoint import state_dict_saver

    found = getattr(state_dict_saver, "AsyncSaveResponse", None)
    if found is not None:
        return found
    fields = ("staging_completion", "upload_completion")  # as in torch 2.8; 2.6 has futures alone
    return make_dataclass("AsyncSaveResponse", fields)


# --- collectives -------------------------------------------------------------------


def process_group_store(group: ProcessGroup) -> Store:
    """Return the store that the ranks of a process group share, in the group's namespace.

    Later releases have a getter of the same content; the registry behind it is in all.

    Raises:
        KeyError: If the group was destroyed.
    """
    from torch.distributed import distributed_c10d

    store: Store = distributed_c10d._world.pg_map[group][1]  # noqa: SLF001 - this module's job
    return store


def private_store_client(store: Store, timeout_s: float) -> Store:
    """Return the same namespace on a connection of its own, so that no lock is shared.

    The store itself where it is no server's client, or where torch cannot clone one (before
    2.8): a caller that never blocks in it then waits at most for those that do.

    Args:
        store: Anything that `process_group_store` returns.
        timeout_s: How long the new client waits for a key that is not there.
    """
    from datetime import timedelta

    from torch._C._distributed_c10d import TCPStore

    if not isinstance(_served_store(store), TCPStore) or not hasattr(store, "clone"):
        return store
    client: Store = store.clone()
    client.set_timeout(timedelta(seconds=timeout_s))
    return client


def prefixed_store(prefix: str, store: Store) -> Store:
    """Return a namespace of a store. Not private, but torch types it as if it were."""
    from torch._C._distributed_c10d import PrefixStore

    return PrefixStore(prefix, store)


def store_endpoint(store: Store) -> str:
    """Name where a store is served, for messages only."""
    served = _served_store(store)
    host, port = getattr(served, "host", None), getattr(served, "port", None)
    return type(served).__name__ if host is None else f"{host}:{port}"


def _served_store(store: Store) -> Store:
    from torch._C._distributed_c10d import PrefixStore

    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def make_backend(kind: str, store: Store, rank: int, size: int, timeout_s: float) -> Any:
    """Connect ranks by a backend that no process group of the trainer knows of.

    It is not registered with c10d: none of its names and counters move, from whichever
    thread this is called. Its ``send`` and ``recv`` are what ``isend`` and ``irecv`` call.

    Args:
        kind: ``"gloo"`` or ``"nccl"``.
        store: A namespace for these ranks and this backend alone.
        rank: This rank.
        size: Number of ranks.
        timeout_s: How long to wait for the others, now and by default.
    """
    from datetime import timedelta

    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_s)
    if kind == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout  # noqa: SLF001 - the constructor takes none
    return dist.ProcessGroupNCCL(store, rank, size, options)


# --- torch_file ----------------------------------------------------------------------
# How torch.load opens the pickle of a file, without reading tensors: its own restricted
# unpickler decides what may be named, so that dcpstore is neither laxer nor stricter. In
# place since torch 1.13; the storages' wrappers since 2.0.


def weights_only_unpickler(data: bytes) -> Any:
    """Return the unpickler of ``torch.load(weights_only=True)``; set its ``persistent_load``."""
    from torch._weights_only_unpickler import Unpickler

    return Unpickler(io.BytesIO(data), encoding="utf-8")


def refused_globals(names: Iterable[tuple[str, str]]) -> list[str]:
    """Return which names in a pickle ``torch.load(weights_only=True)`` refuses.

    Args:
        names: Modules and names as they stand in a pickle of protocol 2, whose modules may have
            the names that they had in Python 2.
    """
    from torch import _weights_only_unpickler

    torchs: Any = _weights_only_unpickler
    allowed = {*torchs._get_allowed_globals(), *torchs._get_user_allowed_globals()}  # noqa: SLF001
    refused = set()
    for module, name in names:
        if (module, name) in torchs.NAME_MAPPING:
            module, name = torchs.NAME_MAPPING[module, name]
        full = f"{torchs.IMPORT_MAPPING.get(module, module)}.{name}"
        if full not in allowed:
            refused.add(full)
    return sorted(refused)


def named_storage_class(name: str) -> Any:
    """Return what stands for a typed storage class in a pickle: something with a ``dtype``.

    Raises:
        KeyError: If torch has no such class.
    """
    from torch.serialization import StorageType

    kind: Any = StorageType
    return kind(name)


def typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> Any:
    """Wrap a storage as torch's functions that rebuild tensors want it."""
    from torch.storage import TypedStorage

    kind: Any = TypedStorage
    return kind(wrap_storage=storage, dtype=dtype, _internal=True)


def meta_storage(num_bytes: int) -> torch.UntypedStorage:
    """Make a storage without memory."""
    import torch

    kind: Any = torch.UntypedStorage
    made: torch.UntypedStorage = kind(num_bytes, device="meta")
    return made


def untyped_storage(storage: Any) -> torch.UntypedStorage:
    """Return the storage that a typed one wraps, without torch's warning about typed ones."""
    held: torch.UntypedStorage = storage._untyped_storage  # noqa: SLF001 - this module's job
    return held


def storage_identity(value: Any) -> int:
    """Return a number that tensors, or storages, share while they share their memory.

    Unlike an address it tells storages without memory apart, too.

    Args:
        value: A strided tensor or a storage, typed or untyped.
    """
    import torch

    if isinstance(value, torch.Tensor):
        value = value.untyped_storage()
    elif isinstance(value, torch.storage.TypedStorage):
        value = untyped_storage(value)
    return int(value._cdata)  # noqa: SLF001


# --- convert -------------------------------------------------------------------------
# The functions that a torch.save file calls to rebuild its tensors. Part of the stored format:
# torch keeps them for the files that are there.


class RebuildFunctions(NamedTuple):
    """What stands in a pickle for a tensor, by kind."""

    tensor: Any
    tensor_with_dtype: Any
    parameter: Any
    parameter_with_state: Any
    sparse: Any
    meta: Any
    from_type: Any


def rebuild_functions() -> RebuildFunctions:
    """Return torch's functions that rebuild tensors."""
    from torch import _tensor, _utils

    return RebuildFunctions(
        tensor=_utils._rebuild_tensor_v2,  # noqa: SLF001 - this module's job
        tensor_with_dtype=_utils._rebuild_tensor_v3,  # noqa: SLF001
        parameter=_utils._rebuild_parameter,  # noqa: SLF001
        parameter_with_state=_utils._rebuild_parameter_with_state,  # noqa: SLF001
        sparse=_utils._rebuild_sparse_tensor,  # noqa: SLF001
        meta=_utils._rebuild_meta_tensor_no_storage,  # noqa: SLF001
        from_type=_tensor._rebuild_from_type_v2,  # noqa: SLF001
    )


def tensor_attributes(tensor: torch.Tensor) -> Any:
    """Return the Python attributes that a tensor was given, as ``torch.save`` keeps them."""
    from torch import _utils

    attributes: Any = _utils._get_obj_state  # noqa: SLF001
    return attributes(tensor)


def tensor_lazy_bits(tensor: torch.Tensor) -> dict[str, bool]:
    """Return the conjugate and negative bits of a tensor where they are set."""
    from torch import _utils

    bits: Any = _utils.get_tensor_metadata
    return dict(bits(tensor))


def set_lazy_bits(tensor: torch.Tensor, *, conj: bool, neg: bool) -> torch.Tensor:
    """Return a view of a tensor that reads and writes its elements conjugated or negated."""
    import torch

    if conj:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if neg else tensor  # noqa: SLF001 - this module's job
