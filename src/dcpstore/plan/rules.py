"""Which keys take part, under which name, and the value behind each in a flattened state dict.

A tensor may be held whole (plain tensors), as shards with their place in the whole
(ShardedTensor), or behind DCP's checkpointable hooks (DTensor, and whoever implements
``__create_chunk_list__`` and ``__get_tensor_shard__``). A save plan may also ask for a part
of what is held, because a planner cut a huge shard into several items.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcpstore.errors import ConfigError, IncompatibleError
from dcpstore.text import listed
from dcpstore.torch_private import narrow

Rename: TypeAlias = Mapping[str, str] | Callable[[str], str]
"""From a key of the state dict to the key in the checkpoint: a map of keys and of prefixes
that end with ``.``, or a function."""

Strictness: TypeAlias = bool | Mapping[str, bool]
"""Whether every key of the state dict must be in the checkpoint: for all keys, or per prefix
(the longest that matches; ``""`` for the rest, True if not given)."""


@dataclass(frozen=True, slots=True)
class KeyRules:
    """Selection and renaming of flattened keys.

    Attributes:
        include: Patterns of keys to take part (``fnmatch``: ``*``, ``?``, ``[...]``); all if empty.
        exclude: Patterns of keys to leave out; stronger than ``include``.
        rename: From the state dict's key to the checkpoint's.
    """

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    rename: Rename | None = None

    def takes(self, fqn: str) -> bool:
        """Tell whether a key takes part."""
        if any(fnmatch.fnmatchcase(fqn, pattern) for pattern in self.exclude):
            return False
        return not self.include or any(fnmatch.fnmatchcase(fqn, p) for p in self.include)

    def stored_name(self, fqn: str) -> str:
        """Return the key under which a key of the state dict is stored."""
        if self.rename is None:
            return fqn
        if not isinstance(self.rename, Mapping):
            return self.rename(fqn)
        if fqn in self.rename:
            return self.rename[fqn]
        prefixes = [p for p in self.rename if p.endswith(".") and fqn.startswith(p)]
        if not prefixes:
            return fqn
        longest = max(prefixes, key=len)
        return self.rename[longest] + fqn[len(longest) :]

    def stored_names(self, fqns: Sequence[str]) -> dict[str, str]:
        """Return the stored name of each key that takes part.

        Raises:
            ConfigError: If two keys would be stored under one name.
        """
        names = {fqn: self.stored_name(fqn) for fqn in fqns if self.takes(fqn)}
        owners: dict[str, str] = {}
        for fqn, name in names.items():
            other = owners.setdefault(name, fqn)
            if other != fqn:
                raise ConfigError(f"rename maps both {other!r} and {fqn!r} to {name!r}")
        return names


def is_strict(strict: Strictness, fqn: str) -> bool:
    """Tell whether a key must be in the checkpoint."""
    if isinstance(strict, bool):
        return strict
    prefixes = [prefix for prefix in strict if fqn.startswith(prefix)]
    return strict[max(prefixes, key=len)] if prefixes else True


def find_object(
    state_dict: Mapping[str, Any], index: MetadataIndex, sizes: Sequence[int] | None = None
) -> Any:
    """Return the value, or the local part of a tensor, that an index means.

    Args:
        state_dict: Flattened.
        index: Key, offset of the chunk for tensors, and perhaps a hint.
        sizes: Shape of the chunk; None for the whole shard that starts at the offset.

    Raises:
        IncompatibleError: If this rank holds no such thing; names what it holds.
    """
    try:
        value = state_dict[index.fqn]
    except KeyError:
        raise IncompatibleError(
            f"the state dict has no key {index.fqn!r}{_similar(index.fqn, state_dict)}"
        ) from None
    if isinstance(value, torch.Tensor | ShardedTensor):
        return _find_tensor(value, index, sizes)
    if index.offset is not None:
        raise IncompatibleError(
            f"{index.fqn!r} is a {type(value).__name__}, so it has no chunk at {index.offset}"
        )
    return value


def _find_tensor(
    tensor: torch.Tensor | ShardedTensor, index: MetadataIndex, sizes: Sequence[int] | None
) -> torch.Tensor:
    """Return the local shard of a tensor that an index means, or the asked part of one.

    The shard that the index's hint names comes first: an empty one may have the same offset.
    """
    held = _shards(tensor)
    if index.offset is None:
        if isinstance(tensor, torch.Tensor) and not hasattr(tensor, "__get_tensor_shard__"):
            return tensor
        if len(held) == 1:
            return _shard(tensor, MetadataIndex(index.fqn, held[0][0], 0), 0)
        raise IncompatibleError(
            f"{index.fqn!r} is sharded and no offset was given; this rank holds {_describe(held)}"
        )
    wanted = tuple(index.offset)
    for number in sorted(range(len(held)), key=lambda number: number != index.index):
        offsets, shape = held[number]
        if offsets == wanted and (sizes is None or tuple(sizes) == shape):
            return _shard(tensor, index, number)
    if sizes is not None:
        for number, (offsets, shape) in enumerate(held):
            if _contains(offsets, shape, wanted, sizes):
                whole = _shard(tensor, MetadataIndex(index.fqn, offsets, number), number)
                starts = [want - first for want, first in zip(wanted, offsets, strict=True)]
                return narrow(whole, starts, sizes)
    raise IncompatibleError(
        f"{index.fqn!r} has no chunk at {wanted}"
        + ("" if sizes is None else f" of shape {tuple(sizes)}")
        + f" on this rank; it holds {_describe(held)}"
    )


def _shards(
    tensor: torch.Tensor | ShardedTensor,
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return offsets and sizes of each chunk that this rank holds."""
    if hasattr(tensor, "__create_chunk_list__"):
        chunks = tensor.__create_chunk_list__()
        return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
    if isinstance(tensor, ShardedTensor):
        shards = [shard.metadata for shard in tensor.local_shards()]
        return [(tuple(md.shard_offsets), tuple(md.shard_sizes)) for md in shards]
    return [((0,) * tensor.dim(), tuple(tensor.shape))]


def _shard(tensor: torch.Tensor | ShardedTensor, index: MetadataIndex, number: int) -> torch.Tensor:
    if hasattr(tensor, "__get_tensor_shard__"):
        shard: torch.Tensor = tensor.__get_tensor_shard__(index)
        return shard
    if isinstance(tensor, ShardedTensor):
        held: torch.Tensor = tensor.local_shards()[number].tensor
        return held
    return tensor


def _contains(
    offsets: Sequence[int], shape: Sequence[int], wanted: Sequence[int], sizes: Sequence[int]
) -> bool:
    return len(shape) == len(sizes) and all(
        o <= w and w + n <= o + s for o, s, w, n in zip(offsets, shape, wanted, sizes, strict=True)
    )


def _describe(held: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> str:
    return listed([f"{shape} at {offsets}" for offsets, shape in held]) or "no chunk of it"


def _similar(fqn: str, state_dict: Mapping[str, Any]) -> str:
    """Name keys that look like a wanted one."""
    import difflib

    close = difflib.get_close_matches(fqn, list(state_dict)[:10_000], n=3)
    return f"; similar: {', '.join(map(repr, close))}" if close else ""
