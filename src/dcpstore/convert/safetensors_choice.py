"""Which tensors of a checkpoint go into safetensors files, which are tied, what is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

import torch

from dcpstore.convert.dcp_blocks import Block, Content, plan_blocks, read_blocks
from dcpstore.convert.safetensors_layout import OutTensor, check_formats
from dcpstore.convert.selection import Selection
from dcpstore.errors import ConfigError, IncompatibleError
from dcpstore.format.dtypes import dtype_name
from dcpstore.reading import Checkpoint

__all__ = ["Choice", "choose_tensors", "compare_tied"]


@dataclass(frozen=True, slots=True)
class Choice:
    """What is to be written.

    Attributes:
        tensors: In the order of the source.
        aliases: Key of the source that is not written, and the key that it equals.
        about: Texts for each file's ``__metadata__``.
        skipped: Key of the source, and why it is left out.
        cast: Key of the source, and the names of its old and its new dtype.
    """

    tensors: tuple[OutTensor, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    cast: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def choose_tensors(
    checkpoint: Checkpoint,
    selection: Selection,
    tied: Mapping[str, str],
    values: Literal["skip", "error"],
) -> Choice:
    """Choose what is written. Pure; the same on all ranks.

    Raises:
        ConfigError: If the selection or ``tied`` does not fit the checkpoint.
        IncompatibleError: If the format cannot hold something of it.
        CorruptError: If the checkpoint does not hold all of a tensor.
    """
    names = selection.names(checkpoint.keys)
    entries = checkpoint.tensors
    others = [fqn for fqn in names if fqn not in entries]
    if others and values == "error":
        raise IncompatibleError(
            f"{len(others)} chosen keys hold values, not tensors, such as {others[0]!r}:"
            " safetensors files cannot hold them. Leave them out with exclude=[...] or"
            " values='skip'"
        )
    tensors = [
        _out_tensor(checkpoint, fqn, names[fqn], selection) for fqn in names if fqn in entries
    ]
    if not tensors:
        raise ConfigError(
            f"nothing to convert: {checkpoint.url} has no tensor among the chosen keys"
        )
    checkpoint.require_whole(one.fqn for one in tensors)
    aliases = _find_aliases(checkpoint, tensors, tied)
    kept = tuple(one for one in tensors if one.fqn not in aliases)
    check_formats(kept)
    skipped = dict.fromkeys(others, "not a tensor")
    skipped.update((fqn, f"equals {other}") for fqn, other in aliases.items())
    return Choice(
        kept,
        aliases,
        {"format": "pt", **{names[fqn]: names[other] for fqn, other in aliases.items()}},
        skipped,
        {
            one.fqn: (dtype_name(saved), dtype_name(one.dtype))
            for one in kept
            if (saved := entries[one.fqn].properties.dtype) != one.dtype
        },
    )


def _out_tensor(checkpoint: Checkpoint, fqn: str, name: str, selection: Selection) -> OutTensor:
    if checkpoint.is_opaque(fqn):
        kind = checkpoint.tensors[fqn].properties
        raise IncompatibleError(
            f"{fqn!r} is a {dtype_name(kind.dtype)} tensor that is more than its elements"
            f" ({kind.layout}): safetensors files cannot hold it. Leave it out with exclude=[...]"
        )
    entry = checkpoint.tensors[fqn]
    return OutTensor(fqn, name, selection.dtype_of(fqn, entry.properties.dtype), tuple(entry.size))


def _find_aliases(
    checkpoint: Checkpoint, tensors: list[OutTensor], tied: Mapping[str, str]
) -> dict[str, str]:
    """Return which keys are not written, and which key each of them equals."""
    by_fqn = {one.fqn: one for one in tensors}
    for alias, kept in tied.items():
        for fqn in (alias, kept):
            if fqn not in by_fqn:
                raise ConfigError(f"tied: {fqn!r} is no tensor among the chosen keys")
        alike = by_fqn[alias].is_like(by_fqn[kept])
        if kept in tied or not alike:
            raise ConfigError(
                f"tied: {alias!r} cannot stand for {kept!r}:"
                + (" that one is tied itself" if kept in tied else " shape or dtype differ")
            )
    aliases = dict(tied)
    first: dict[object, str] = {}
    for tensor in tensors:
        place = _place(checkpoint, tensor)
        if tensor.fqn not in aliases and place is not None:
            other = first.setdefault(place, tensor.fqn)
            if other != tensor.fqn:
                aliases[tensor.fqn] = other
    return aliases


def _place(checkpoint: Checkpoint, tensor: OutTensor) -> object | None:
    """Return what is the same for two keys that share the same stored bytes; None if empty."""
    items = checkpoint.items_of(tensor.fqn)
    if not tensor.num_bytes:
        return None
    return (tensor.dtype, tensor.sizes, tuple((item.key, item.record) for item in items))


def compare_tied(
    checkpoint: Checkpoint,
    aliases: Mapping[str, str],
    dtypes: Mapping[str, torch.dtype],
    block_bytes: int,
) -> None:
    """Read tied tensors and compare them, bit by bit. One rank.

    Args:
        checkpoint: The source.
        aliases: As in `Choice`.
        dtypes: What each kept tensor is converted to.
        block_bytes: Memory for blocks; see `read_blocks`.

    Raises:
        IncompatibleError: Naming the first pair that differs.
    """
    for alias, kept in aliases.items():
        pairs = _pairs(checkpoint, alias, kept, dtypes[kept], block_bytes // 2)
        with read_blocks(checkpoint, pairs, block_bytes) as contents:
            are_tied = all(_next_is_equal(content, contents) for _, content in contents)
        if not are_tied:
            raise IncompatibleError(
                f"{alias!r} and {kept!r} are not tied in {checkpoint.url}: their values differ."
                " Nothing was written"
            )


def _pairs(
    checkpoint: Checkpoint, alias: str, kept: str, dtype: torch.dtype, block_bytes: int
) -> Iterator[Block]:
    one = plan_blocks(checkpoint, alias, dtype, block_bytes)
    other = plan_blocks(checkpoint, kept, dtype, block_bytes)
    if [(b.offsets, b.sizes) for b in one] != [(b.offsets, b.sizes) for b in other]:
        sizes = tuple(checkpoint.tensors[kept].size)
        num_bytes = prod(sizes) * dtype.itemsize
        whole = Block(kept, "box", (0,) * len(sizes), sizes, dtype, num_bytes)
        one, other = [replace(whole, fqn=alias)], [whole]
    for pair in zip(one, other, strict=True):
        yield from pair


def _next_is_equal(content: Content, contents: Iterator[tuple[Block, Content]]) -> bool:
    assert isinstance(content, torch.Tensor)
    one = content.clone()  # its memory is the next's
    _, other = next(contents)
    assert isinstance(other, torch.Tensor)
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
