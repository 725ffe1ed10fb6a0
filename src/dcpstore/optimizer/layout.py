"""Memory for optimizer state, in the layout that the model has now.

State of its parameter's shape is laid out as the parameter is: a DTensor on the same mesh with
the same placements, a ShardedTensor with the same shards, or a plain tensor. Only what this
rank holds is allocated.

FSDP1 over tensor parallelism with ShardedTensors is special. There a parameter is a
ShardedTensor of ShardedTensors, and the optimizer takes the inner one alone::

    whole tensor    |     TP rank 0      |     TP rank 1      |
    inner                                | DP 0 | DP 1 | DP 2 |     sizes of the TP slice
    read from                            ^ offset of the slice, plus that of the DP shard

State of another shape (a value per row, say) is sharded with its parameter along each dimension
that has the parameter's size there, and replicated along the others.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import empty as empty_dtensor

from dcpstore.torch_private import (
    flatten_sharded_tensors,
    group_of_sharded_tensor,
    make_sharded_tensor,
)

__all__ = ["Target", "has_elements", "is_tensor", "make_target", "sizes_of"]

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """Where a saved tensor goes.

    Attributes:
        loaded: What the planner is given to fill; None if this rank holds no part of it.
        returned: What the optimizer's state dict holds afterwards; shares its memory.
    """

    loaded: Any
    returned: Any


def is_tensor(value: object) -> bool:
    """Tell whether a value of a model's state dict can be a parameter."""
    return isinstance(value, torch.Tensor | ShardedTensor)


def has_elements(target: Any) -> bool:
    """Tell whether this rank holds any element of a tensor."""
    if isinstance(target, ShardedTensor):
        return any(shard.tensor.numel() for shard in target.local_shards())
    local = target.to_local() if isinstance(target, DTensor) else target
    return local is not None and bool(local.numel())


def sizes_of(parameter: Any) -> tuple[int, ...]:
    """Return the shape of a whole parameter."""
    return tuple(parameter.size())


def make_target(
    saved: TensorStorageMetadata, parameter: Any, name: str, device: torch.device = _CPU
) -> Target:
    """Allocate what this rank holds of a state, in its parameter's layout.

    Args:
        saved: The saved state's shape and dtype.
        parameter: As it is in the model's state dict; None for a whole, plain tensor.
        name: Of the state; ``step`` is a plain tensor even where parameters have no dimension.
        device: For a tensor without a parameter.
    """
    sizes, dtype = saved.size, saved.properties.dtype
    if parameter is None:
        return _same(torch.empty(sizes, dtype=dtype, device=device))
    fits = tuple(sizes) == sizes_of(parameter)
    if not sizes and (name == "step" or not fits):
        # Optimizers keep counters on the host, and move them where they want them elsewhere.
        return _same(torch.empty(sizes, dtype=dtype))
    if isinstance(parameter, ShardedTensor):
        if sizes.numel() == 1 and not fits:
            return _same(torch.empty(sizes, dtype=dtype, device=_device_of_shards(parameter)))
        return _sharded(parameter, sizes, dtype)
    if isinstance(parameter, DTensor):
        return _same(_distributed(parameter, sizes, dtype))
    if fits:
        return _same(torch.empty_like(parameter, dtype=dtype, requires_grad=False))
    return _same(torch.empty(sizes, dtype=dtype, device=parameter.device))


def _same(tensor: Any) -> Target:
    return Target(tensor, tensor)


def _distributed(parameter: DTensor, sizes: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    if tuple(sizes) == sizes_of(parameter):
        return _distributed_like(parameter, dtype)
    device = parameter.to_local().device
    if sizes.numel() == 1:
        return torch.empty(sizes, dtype=dtype, device=device)
    placements = [_placement(one, parameter, sizes) for one in parameter.placements]
    made = empty_dtensor(
        sizes, dtype=dtype, device_mesh=parameter.device_mesh, placements=placements
    )
    return made.to(device)  # the parameters of an offloaded model are not where their mesh is


def _distributed_like(parameter: DTensor, dtype: torch.dtype) -> torch.Tensor:
    mesh, local = parameter.device_mesh, parameter.to_local()
    if local.device.type != mesh.device_type:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    # Not by empty_like: DTensor remembers what it made for an equal mesh, with that mesh's
    # groups, which may be gone if the job left them and joined others.
    return DTensor.from_local(
        torch.empty_like(local, dtype=dtype, requires_grad=False),
        mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.size(),
        stride=parameter.stride(),
    )


def _placement(placement: Placement, parameter: DTensor, sizes: Sequence[int]) -> Placement:
    dim = getattr(placement, "dim", None)  # of Shard, and of the private one of FSDP2 over TP
    if dim is None or dim >= len(sizes) or sizes[dim] != parameter.size(dim):
        return Replicate()
    return placement


def _sharded(parameter: ShardedTensor, sizes: torch.Size, dtype: torch.dtype) -> Target:
    inner = _inner(parameter)
    holder = parameter if inner is None else inner
    if tuple(sizes) != sizes_of(parameter):
        return _shards_of(holder, _in_chunks(holder, sizes, dtype))
    made = _shards_of(holder, _metadata_like(holder, dtype))
    if inner is None or made.loaded is None:
        return made
    outer = parameter.local_shards()[0].metadata
    nested = make_sharded_tensor(
        [LocalShard(made.returned, copy.deepcopy(outer))],
        _metadata_like(parameter, dtype),
        group_of_sharded_tensor(parameter),
    )
    # To a planner it looks as the model's own tensors do once it has flattened them.
    return Target(flatten_sharded_tensors({"": nested})[""], made.returned)


def _inner(parameter: ShardedTensor) -> ShardedTensor | None:
    """Return the ShardedTensor that is this rank's shard, if it is one."""
    shards = parameter.local_shards()
    tensor = shards[0].tensor if len(shards) == 1 else None
    return tensor if isinstance(tensor, ShardedTensor) else None


def _metadata_like(parameter: ShardedTensor, dtype: torch.dtype) -> ShardedTensorMetadata:
    metadata = parameter.metadata()
    properties = replace(
        metadata.tensor_properties, dtype=dtype, requires_grad=False, pin_memory=False
    )
    # The shards' own descriptions are shared with the parameter: there is one per rank of the job.
    return replace(
        metadata, shards_metadata=list(metadata.shards_metadata), tensor_properties=properties
    )


def _in_chunks(
    holder: ShardedTensor, sizes: torch.Size, dtype: torch.dtype
) -> ShardedTensorMetadata:
    """Cut another shape into even runs of rows, one for each rank that holds the parameter."""
    metadata = _metadata_like(holder, dtype)
    old = sorted(metadata.shards_metadata, key=lambda shard: tuple(shard.shard_offsets))
    num_rows = -(-sizes[0] // len(old))
    metadata.size = sizes
    metadata.shards_metadata = [
        ShardMetadata([start, *[0] * (len(sizes) - 1)], [rows, *sizes[1:]], shard.placement)
        for shard, start in zip(old, range(0, sizes[0], num_rows), strict=False)
        for rows in [min(num_rows, sizes[0] - start)]
    ]
    return metadata


def _shards_of(holder: ShardedTensor, metadata: ShardedTensorMetadata) -> Target:
    """Allocate this rank's shards of what the metadata describes, on the holder's ranks."""
    rank = torch.distributed.get_rank()  # placements name ranks of the whole job
    device, dtype = _device_of_shards(holder), metadata.tensor_properties.dtype
    shards = [
        LocalShard(torch.empty(shard.shard_sizes, dtype=dtype, device=device), shard)
        for shard in metadata.shards_metadata
        if shard.placement is not None and shard.placement.rank() == rank
    ]
    made = make_sharded_tensor(shards, metadata, group_of_sharded_tensor(holder))
    return Target(made if shards else None, made)


def _device_of_shards(holder: ShardedTensor) -> torch.device:
    for shard in holder.local_shards():
        tensor = shard.tensor
        if isinstance(tensor, ShardedTensor):
            return _device_of_shards(tensor)
        return tensor.device
    return _CPU  # no shard here: nothing will be allocated
