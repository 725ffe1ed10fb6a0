"""Reading the same tensors of two checkpoints side by side, in bounded memory.

Tensors are cut into boxes of rows. As many boxes as fit a quarter of the budget are read of
either side at the same time; another half is for bytes on their way::

    budget   |-- left boxes --|-- right boxes --|---- requests of both sides ----|
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from dcpstore.audit.sameness import different_elements
from dcpstore.config import ReadConfig
from dcpstore.progress import Meter
from dcpstore.reading import BoxRead, Checkpoint

__all__ = ["Mismatch", "compare_tensors", "config_of_side", "tensor_bytes"]

_PARTS_OF_BUDGET = 4


@dataclass(slots=True)
class Mismatch:
    """How two tensors differ.

    Attributes:
        num_elements: How many elements differ.
        first: Index of the first of them in row-major order.
        left: Its value on the left, for people.
        right: On the right.
    """

    num_elements: int
    first: tuple[int, ...]
    left: str
    right: str


@dataclass(frozen=True, slots=True)
class _Box:
    fqn: str
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.sizes) * self.dtype.itemsize


def config_of_side(config: ReadConfig) -> ReadConfig:
    """Return what either checkpoint may take of the budget for bytes on their way."""
    budget_bytes = max(config.budget_bytes // _PARTS_OF_BUDGET, config.request_bytes)
    return replace(config, budget_bytes=budget_bytes, casts="exact")


def compare_tensors(
    left: Checkpoint,
    right: Checkpoint,
    fqns: Iterable[str],
    meter: Meter,
    *,
    budget_bytes: int,
) -> dict[str, Mismatch]:
    """Read tensors of one shape and dtype from both sides and compare every bit.

    Args:
        left: One checkpoint.
        right: The other.
        fqns: Plain tensors that both have.
        meter: Counts the bytes compared, of one side.
        budget_bytes: Memory for everything.

    Returns:
        How they differ, of those that do.
    """
    group_bytes = max(1, budget_bytes // _PARTS_OF_BUDGET)
    found: dict[str, Mismatch] = {}
    for group in _group(_boxes(left, fqns, group_bytes), group_bytes):
        large = {box.fqn for box in group if tensor_bytes(left, box.fqn) > group_bytes}
        for side in (left, right):
            side.locate(large)
        for box, one, other in _read(left, right, group):
            _note(found, box, one, other)
        meter.advance(sum(box.num_bytes for box in group))
    return found


def tensor_bytes(checkpoint: Checkpoint, fqn: str) -> int:
    """Return the bytes of a whole tensor's elements."""
    entry: Any = checkpoint.metadata.state_dict_metadata[fqn]
    num_bytes: int = prod(entry.size) * entry.properties.dtype.itemsize
    return num_bytes


def _boxes(checkpoint: Checkpoint, fqns: Iterable[str], max_bytes: int) -> Iterator[_Box]:
    tensors = checkpoint.tensors
    for fqn in fqns:
        entry = tensors[fqn]
        whole = _Box(fqn, entry.properties.dtype, (0,) * len(entry.size), tuple(entry.size))
        yield from _cut(whole, max_bytes)


def _cut(box: _Box, max_bytes: int) -> Iterator[_Box]:
    """Cut a box along its outermost dimension that is longer than 1, as often as needed."""
    if box.num_bytes == 0:
        return
    dim = next((number for number, size in enumerate(box.sizes) if size > 1), None)
    if box.num_bytes <= max_bytes or dim is None:
        yield box
        return
    size = box.sizes[dim]
    rows = max(1, max_bytes * size // box.num_bytes)
    for start in range(0, size, rows):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim], sizes[dim] = box.offsets[dim] + start, min(rows, size - start)
        yield from _cut(_Box(box.fqn, box.dtype, tuple(offsets), tuple(sizes)), max_bytes)


def _group(boxes: Iterable[_Box], max_bytes: int) -> Iterator[list[_Box]]:
    group: list[_Box] = []
    held_bytes = 0
    for box in boxes:
        if group and held_bytes + box.num_bytes > max_bytes:
            yield group
            group, held_bytes = [], 0
        group.append(box)
        held_bytes += box.num_bytes
    if group:
        yield group


def _read(
    left: Checkpoint, right: Checkpoint, group: Sequence[_Box]
) -> Iterator[tuple[_Box, torch.Tensor, torch.Tensor]]:
    def read(checkpoint: Checkpoint) -> list[torch.Tensor]:
        targets = [torch.empty(box.sizes, dtype=box.dtype) for box in group]
        checkpoint.read_boxes(
            [BoxRead(box.fqn, box.offsets, t) for box, t in zip(group, targets, strict=True)]
        )
        return targets

    with ThreadPoolExecutor(2, "dcpstore-diff") as executor:
        one, other = executor.map(read, (left, right))
    yield from zip(group, one, other, strict=True)


def _note(found: dict[str, Mismatch], box: _Box, left: torch.Tensor, right: torch.Tensor) -> None:
    places = different_elements(left, right)
    if not places.numel():
        return
    if box.fqn in found:
        found[box.fqn].num_elements += places.numel()
        return
    inner = torch.unravel_index(places[0], box.sizes) if box.sizes else ()
    at = tuple(int(step) for step in inner)
    first = tuple(offset + step for offset, step in zip(box.offsets, at, strict=True))
    found[box.fqn] = Mismatch(places.numel(), first, _text(left[at]), _text(right[at]))


def _text(element: torch.Tensor) -> str:
    try:
        return str(element.item())
    except (RuntimeError, NotImplementedError):  # not every dtype has a Python number
        return "0x" + element.reshape(1).view(torch.uint8).numpy()[::-1].tobytes().hex()
