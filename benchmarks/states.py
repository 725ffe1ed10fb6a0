"""State dicts of known content, and what is loaded back from them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass

import torch

__all__ = ["Want", "check", "make_state", "make_targets"]

MIB = 1 << 20
StateDict = dict[str, torch.Tensor]


def _mixed_sizes(total: int) -> list[int]:
    """Sizes of 4 to 64 MiB, cycling, that add up to ``total``."""
    sizes: list[int] = []
    for size in itertools.cycle((4, 64, 8, 32, 16, 4)):
        rest = total - sum(sizes)
        if rest <= 0:
            return sizes
        sizes.append(min(size * MIB, rest))
    raise AssertionError("unreachable")


@dataclass(frozen=True, slots=True)
class Want:
    """What a load asks for.

    Attributes:
        is_one: Load a single tensor, the fourth of 40, and not all.
        shard_dim: Load the shard of rank 3 of 8 along this dimension, and not the whole.
    """

    is_one: bool = False
    shard_dim: int | None = None


def shapes_of(kind: str, num_bytes: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes (float32) of a state."""
    if kind == "mixed":
        sizes = _mixed_sizes(num_bytes)
        return {f"layer{i:03d}.weight": (size // 4096, 1024) for i, size in enumerate(sizes)}
    if kind == "even":
        return {f"layer{i:03d}.weight": (1024, 1024) for i in range(num_bytes // (4 * MIB))}
    if kind == "shuffled":  # saved in another order than that of the names, in which DCP loads
        shapes = list(shapes_of("even", num_bytes).items())
        random.Random(0).shuffle(shapes)
        return dict(shapes)
    if kind == "small":
        return {f"layer{i:03d}.weight": (512, 512) for i in range(num_bytes // MIB)}
    if kind == "rows":
        return {"embedding.weight": (num_bytes // 4096, 1024)}
    if kind == "long_runs":  # a shard of 1/8 of the columns is runs of 2 MiB and a bit
        columns = 8 * (2 * MIB // 4 + 3000)
        return {"wide.weight": (max(1, num_bytes // 4 // columns), columns)}
    if kind == "short_runs":  # runs of 4 KiB
        return {"square.weight": (num_bytes // 32768, 8192)}
    if kind == "scalars":
        return {f"scalar{i:05d}": () for i in range(num_bytes // 4)}
    raise ValueError(kind)


def _fill(number: int, shape: tuple[int, ...]) -> torch.Tensor:
    count = torch.Size(shape).numel()
    start = number * 1_000_003
    values = torch.arange(start, start + count, dtype=torch.int32)
    return values.view(torch.float32).view(shape)


def make_state(kind: str, num_bytes: int) -> StateDict:
    """Return tensors of about ``num_bytes`` in all; every element differs from its neighbours."""
    return {
        name: _fill(number, shape)
        for number, (name, shape) in enumerate(shapes_of(kind, num_bytes).items())
    }


def make_targets(kind: str, num_bytes: int, want: Want) -> StateDict:
    """Return what to load into: memory that was touched before, so that it counts as there."""
    shapes = shapes_of(kind, num_bytes)
    names = list(shapes)
    if want.is_one:
        names = [names[3 * len(names) // 40]]
    if want.shard_dim is None:
        return {name: torch.zeros(shapes[name]) for name in names}
    return {name: _empty_shard(shapes[name], want.shard_dim) for name in names}


def _empty_shard(shape: tuple[int, ...], dim: int) -> torch.Tensor:
    """Return a DTensor over 8 ranks that do not exist, of which this process is number 3."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    mesh = init_device_mesh("cpu", (8,))
    local = list(shape)
    local[dim] //= 8
    return DTensor.from_local(torch.zeros(local), mesh, [Shard(dim)], run_check=False)


def needed_bytes(targets: Mapping[str, torch.Tensor]) -> int:
    """Bytes of the elements that a load asks for."""
    return sum(_local(tensor).nbytes for tensor in targets.values())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def check(targets: StateDict, kind: str, num_bytes: int, want: Want) -> None:
    """Compare what was loaded, bit by bit, with what was saved.

    Raises:
        AssertionError: If anything differs.
    """
    for number, (name, shape) in enumerate(shapes_of(kind, num_bytes).items()):
        if name not in targets:
            continue
        expected, found = _fill(number, shape), _local(targets[name])
        if want.shard_dim is not None:
            expected = expected.chunk(8, want.shard_dim)[3]
        same = torch.equal(found.view(torch.int32), expected.contiguous().view(torch.int32))
        assert same, f"{name} was loaded wrong"
