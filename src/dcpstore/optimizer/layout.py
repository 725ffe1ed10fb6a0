"""What a checkpoint holds of an optimizer, whose state each entry is, and memory to load it into.

DCP stores an optimizer's state dict under flattened keys, and the path that each had::

    optimizer.state.up.weight.exp_avg     ("optimizer", "state", "up.weight", "exp_avg")
    optimizer.param_groups.0.lr           ("optimizer", "param_groups", 0, "lr")

Three forms of it are in use: by parameter names (FSDP's and ``get_optimizer_state_dict``), by
numbers (``Optimizer.state_dict``), and flattened (``flatten_optimizer_state_dict=True``)::

    optimizer.state.0.exp_avg             ("optimizer", "state", "0", "exp_avg")
    optimizer.state.up.weight.exp_avg     ("optimizer", "state.up.weight.exp_avg")

State gets memory in the layout that the model has now. State of its parameter's shape is laid
out as the parameter is: a DTensor on the same mesh with the same placements, a ShardedTensor with
the same shards, or a plain tensor. Only what this rank holds is allocated.

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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import empty as empty_dtensor

from dcpstore import text
from dcpstore.errors import ConfigError, IncompatibleError, NotFoundError
from dcpstore.format.metadata import planner_paths_of
from dcpstore.torch_private import (
    flatten_sharded_tensors,
    group_of_sharded_tensor,
    make_sharded_tensor,
)

Path: TypeAlias = "tuple[str | int, ...]"

_GROUPS, _STATE = "param_groups", "state"
_MOST_NAMED = 10


@dataclass(frozen=True, slots=True)
class Entry:
    """One saved tensor or value of an optimizer.

    Attributes:
        fqn: Its key in the checkpoint.
        path: Where it was in the nested state dict.
        saved: Shape and dtype of a tensor, or that it is a value.
        owner: Parameter whose state it is, as saved; None for what is no state.
        is_in_group: Whether it is part of ``param_groups``.
        group: Number of its group, or the parameter whose hyperparameter it is in the flattened
            form; None for all groups in one value, as torch up to 2.3 saved them.
        inner: Its path in the state of the parameter, or in the group: ``("exp_avg",)``,
            ``("lr",)``.
    """

    fqn: str
    path: Path
    saved: TensorStorageMetadata | BytesStorageMetadata
    owner: str | None = None
    is_in_group: bool = False
    group: int | str | None = None
    inner: Path = ()

    @property
    def name(self) -> str:
        """Name of the state or hyperparameter: ``exp_avg``, ``lr``; empty for what is neither."""
        return str(self.inner[0]) if self.inner else ""

    @property
    def tensor(self) -> TensorStorageMetadata | None:
        """Shape and dtype; None for a value."""
        return self.saved if isinstance(self.saved, TensorStorageMetadata) else None

    @property
    def is_numbered(self) -> bool:
        """Whether the owner may be the number of a parameter."""
        return self.owner is not None and self.owner.isdecimal() and len(self.path) > 2


def listed(names: Iterable[object], num_shown: int = 8) -> str:
    """Quote names and join them for a message, the first few of them."""
    return text.listed(list(map(repr, names)), num_shown)


def other_shapes(problems: Sequence[str]) -> IncompatibleError:
    """Return the error of a model that has other shapes, with a line per problem."""
    return IncompatibleError(
        "the optimizer was saved for a model of other shapes; nothing was loaded:"
        f"{text.indented(problems)}\n"
        "Build the model as it was when it was saved, or begin with a new optimizer"
    )


def paths_of(metadata: Metadata) -> Mapping[str, Path]:
    """Return each key's path in the nested state dict; the key itself where nobody kept it."""
    kept = planner_paths_of(metadata.planner_data) or {}
    return {fqn: tuple(kept.get(fqn) or (fqn,)) for fqn in metadata.state_dict_metadata}


def state_key(key: str, name: str) -> str:
    """Return how the checkpoint's keys of a parameter's state begin, without the last dot."""
    return ".".join(part for part in (key, _STATE, name) if part)


def find_entries(
    metadata: Metadata, optimizer_key: str, parameters: Collection[str]
) -> list[Entry]:
    """Return what is saved of the optimizer under a key.

    Args:
        metadata: Of the checkpoint.
        optimizer_key: Where the optimizer is in the saved state dict: dotted if it is nested, empty
            if it is all that was saved.
        parameters: Names of the model, to tell a flattened parameter from its state.

    Raises:
        NotFoundError: If there is no optimizer; names those that the checkpoint has.
    """
    paths = paths_of(metadata)
    entries = []
    for fqn, path in paths.items():
        rest = _below(fqn, path, optimizer_key)
        if rest is not None:
            entries.append(_entry(metadata, fqn, path, rest, parameters))
    is_one = any(
        entry.is_in_group or entry.owner is not None or entry.fqn == optimizer_key
        for entry in entries
    )
    if not is_one:
        raise NotFoundError(_no_optimizer(optimizer_key, paths, has_entries=bool(entries)))
    return entries


def _below(fqn: str, path: Path, key: str) -> Path | None:
    """Return the part of a path below the optimizer's key; None if it is elsewhere."""
    for num in range(len(path) + 1):
        if ".".join(map(str, path[:num])) == key:
            return path[num:]
    if len(path) == 1 and fqn.startswith(key + "."):
        return (fqn[len(key) + 1 :],)
    return None


def _entry(
    metadata: Metadata, fqn: str, path: Path, rest: Path, parameters: Collection[str]
) -> Entry:
    entry = Entry(fqn, path, metadata.state_dict_metadata[fqn])
    kind, _, flat = str(rest[0]).partition(".") if rest else ("", "", "")
    if len(rest) == 1 and flat and kind in (_STATE, _GROUPS):
        owner, name = _split(flat, parameters)
        if kind == _STATE:
            return replace(entry, owner=owner, inner=(name,))
        group = int(owner) if owner.isdecimal() and owner not in parameters else owner
        return replace(entry, is_in_group=True, group=group, inner=(name,))
    if len(rest) > 2 and rest[0] == _GROUPS:
        return replace(entry, is_in_group=True, group=int(rest[1]), inner=rest[2:])
    if rest and rest[0] == _GROUPS:
        return replace(entry, is_in_group=True)
    if len(rest) > 2 and rest[0] == _STATE:
        return replace(entry, owner=str(rest[1]), inner=rest[2:])
    return entry


def _split(flat: str, parameters: Collection[str]) -> tuple[str, str]:
    """Split ``up.weight.exp_avg`` where the parameter ends; at the last dot if none is known."""
    at = flat.rfind(".")
    while at > 0:
        if flat[:at] in parameters:
            return flat[:at], flat[at + 1 :]
        at = flat.rfind(".", 0, at)
    owner, _, name = flat.rpartition(".")
    return owner, name


def _no_optimizer(key: str, paths: Mapping[str, Path], *, has_entries: bool) -> str:
    present = _optimizers(paths.values())
    if present:
        what = f"has no optimizer under {key!r}; it has {listed(present, _MOST_NAMED)}"
        return f"the checkpoint {what}. Pass that as the key"
    tops = sorted({str(path[0]) for path in paths.values()})
    also = f" ({key!r} is there, but is none)" if has_entries else ""
    return (
        f"the checkpoint has no optimizer{also}; its keys begin with {listed(tops, _MOST_NAMED)}."
        " Save it with the model, such as dcpstore.save({'model': ..., 'optimizer': ...}, url)"
    )


def _optimizers(paths: Iterable[Path]) -> list[str]:
    """Return where there are ``param_groups``, which every optimizer has."""
    found = set()
    for path in paths:
        for at, step in enumerate(path):
            before, mark, _ = f"{step}.".partition(f"{_GROUPS}.")
            if mark and (not before or before.endswith(".")):
                found.add(".".join(map(str, [*path[:at], *([before[:-1]] if before else [])])))
                break
    return sorted(found)


_CPU = torch.device("cpu")
_VALUE = "not loaded yet"  # anything that is no tensor, so that planners plan a value


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """Where a saved tensor goes.

    Attributes:
        loaded: What the planner is given to fill; None if this rank holds no part of it.
        returned: What the optimizer's state dict holds afterwards; shares its memory.
    """

    loaded: Any
    returned: Any


class Targets:
    """What a load fills, and what the optimizer's state dict holds of it afterwards.

    Attributes:
        wanted: What the planner is given to fill, by keys of the checkpoint.
    """

    def __init__(self) -> None:
        self.wanted: dict[str, Any] = {}
        self._made: dict[str, Target] = {}

    def want(self, entry: Entry, target: Target | None) -> None:
        """Have an entry loaded; one that is a value has no target."""
        if target is None:
            self.wanted[entry.fqn] = _VALUE
            return
        self._made[entry.fqn] = target
        if target.loaded is not None:
            self.wanted[entry.fqn] = target.loaded

    def left_out(self, loaded: Iterable[str]) -> set[str]:
        """Return the keys that a planner left out, whose memory has no values.

        One that is not ours plans nothing for a key of which this rank holds no element.
        """
        return {
            fqn
            for fqn in self.wanted.keys() - set(loaded)
            if fqn not in self._made or _has_elements(self._made[fqn].loaded)
        }

    def value(self, entry: Entry) -> Any:
        """Return what was loaded of an entry."""
        target = self._made.get(entry.fqn)
        if target is not None and target.returned is not target.loaded:
            return target.returned
        return self.wanted[entry.fqn]


def is_tensor(value: object) -> bool:
    """Tell whether a value of a model's state dict can be a parameter."""
    return isinstance(value, torch.Tensor | ShardedTensor)


def _has_elements(target: Any) -> bool:
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


# Steps that wrappers put into names: DDP, torch.compile, FSDP1, activation checkpointing.
_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


@dataclass(frozen=True, slots=True, eq=False)
class Owner:
    """A parameter that has saved state.

    Attributes:
        name: In the model's state dict; None if only its number is known.
        tensor: What the model's state dict holds; None likewise, for state wanted whole.
        number: Of the parameter, where the checkpoint numbers them.
    """

    name: str | None
    tensor: Any
    number: int | None = None


class Parameters:
    """The tensors of a model's state dict by name, and by the name that a checkpoint has.

    Args:
        model_state_dict: Flat. What is no tensor is ignored.
        in_order: Names of the optimizer's parameters, for a checkpoint that numbers them.

    Raises:
        ConfigError: If a name of ``in_order`` is none of the model's.
    """

    def __init__(
        self, model_state_dict: Mapping[str, Any], in_order: Sequence[str] | None = None
    ) -> None:
        self.tensors = {name: one for name, one in model_state_dict.items() if is_tensor(one)}
        self._in_order = in_order
        self._by_plain_name: dict[str, str | None] = {}
        for name in self.tensors:
            plain = _plain(name)
            self._by_plain_name[plain] = None if plain in self._by_plain_name else name
        unknown = [name for name in in_order or () if self.find(name) is None]
        if unknown:
            raise ConfigError(
                f"parameter_names has {unknown[0]!r}, which is not in the model's state dict"
            )

    @property
    def common_device(self) -> torch.device:
        """Where all of the model is; the host if that is several places."""
        devices = {one.device for one in self.tensors.values() if isinstance(one, torch.Tensor)}
        return devices.pop() if len(devices) == 1 else torch.device("cpu")

    def find(self, saved: str) -> str | None:
        """Return the model's name for a saved one, which may have a wrapper more or less."""
        if saved in self.tensors:
            return saved
        return self._by_plain_name.get(_plain(saved))

    def match(self, entries: Iterable[Entry]) -> dict[str, Owner]:
        """Return the model's parameter for each owner that it has.

        Raises:
            IncompatibleError: If the model has none of them, or does not know their numbers.
        """
        named = {entry.owner: entry for entry in entries if entry.owner is not None}
        found: dict[str, Owner] = {}
        for owner, entry in named.items():
            name = self.find(owner)
            if name is not None:
                found[owner] = Owner(name, self.tensors[name])
            elif entry.is_numbered:
                found[owner] = self._numbered(int(owner))
        if named and self.tensors and not found:
            raise IncompatibleError(
                "the optimizer was saved for another model: it has state for"
                f" {listed(named, 3)}, and the model's state dict has {listed(self.tensors, 3)}."
                " Nothing was loaded"
            )
        return found

    def _numbered(self, number: int) -> Owner:
        names = self._in_order
        if names is not None:
            if number >= len(names):
                raise IncompatibleError(
                    f"the checkpoint has state for parameter {number}, and parameter_names has"
                    f" {len(names)} names. Nothing was loaded"
                )
            name = str(self.find(names[number]))
            return Owner(name, self.tensors[name], number)
        if any(isinstance(one, DTensor | ShardedTensor) for one in self.tensors.values()):
            raise IncompatibleError(
                "the checkpoint has the state of a plain optimizer.state_dict(), which numbers"
                " parameters, and the model is sharded. Say whose they are, in the optimizer's"
                " order: parameter_names=[name for name, _ in model.named_parameters()]"
            )
        return Owner(None, None, number)

    def without_state(self, owners: Iterable[Owner]) -> list[str]:
        """Return the tensors that could have a state, and for which none is saved.

        None where the checkpoint only numbers them and nobody named them.
        """
        has = {owner.name for owner in owners}
        if None in has:
            return []
        return [
            name
            for name, one in self.tensors.items()
            if name not in has and (one.dtype.is_floating_point or one.dtype.is_complex)
        ]


def _plain(name: str) -> str:
    return ".".join(step for step in name.split(".") if step not in _WRAPPERS)
