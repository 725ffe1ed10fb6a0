"""State dicts of known content, and what is loaded back from them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping

import torch

from benchmarks.want import Place, Want

__all__ = ["check", "make_state", "make_targets", "needed_bytes"]

MIB = 1 << 20
StateDict = dict[str, torch.Tensor]
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def _floats(shapes: Mapping[str, tuple[int, ...]]) -> Shapes:
    return {name: (shape, torch.float32) for name, shape in shapes.items()}


def _mixed_sizes(total: int) -> list[int]:
    """Sizes of 4 to 64 MiB, cycling, that add up to ``total``."""
    sizes: list[int] = []
    for size in itertools.cycle((4, 64, 8, 32, 16, 4)):
        rest = total - sum(sizes)
        if rest <= 0:
            return sizes
        sizes.append(min(size * MIB, rest))
    raise AssertionError("unreachable")


def _model(num_bytes: int) -> Shapes:
    """A transformer in bfloat16 and Adam's state: master weights, two moments, a step each."""
    width = 1024 if num_bytes >= 256 * MIB else 128
    wide = 11 * width // 4
    square = (width, width)
    of_layer = {"wq": square, "wk": square, "wv": square, "wo": square}
    of_layer |= {"w1": (wide, width), "w2": (width, wide), "w3": (wide, width), "norm": (width,)}
    layer_bytes = 14 * sum(torch.Size(shape).numel() for shape in of_layer.values())
    shapes: Shapes = {}
    for layer in range(max(1, num_bytes // layer_bytes)):
        for part, shape in of_layer.items():
            name = f"layers.{layer}.{part}.weight"
            shapes[f"model.{name}"] = (shape, torch.bfloat16)
            for moment in ("master", "exp_avg", "exp_avg_sq"):
                shapes[f"optim.state.{name}.{moment}"] = (shape, torch.float32)
            shapes[f"optim.state.{name}.step"] = ((), torch.float32)
    return shapes


def _experts(num_bytes: int) -> Shapes:
    """Small tensors of 0.25, 4 and 16 KiB, 6.75 KiB each on average."""
    kinds = (((64,), torch.float32), ((64, 32), torch.bfloat16), ((64, 64), torch.float32))
    return {
        f"experts.{i // 3:05d}.w{i % 3}": kinds[i % 3] for i in range(num_bytes // (27 * 1024 // 4))
    }


def shapes_of(kind: str, num_bytes: int) -> Shapes:
    """Names, shapes and dtypes of a state."""
    if kind == "mixed":
        sizes = _mixed_sizes(num_bytes)
        return _floats(
            {f"layer{i:03d}.weight": (size // 4096, 1024) for i, size in enumerate(sizes)}
        )
    if kind == "model":
        return _model(num_bytes)
    if kind == "experts":
        return _experts(num_bytes)
    if kind == "even":
        count = num_bytes // (4 * MIB)
        return _floats({f"layer{i:03d}.weight": (1024, 1024) for i in range(count)})
    if kind == "shuffled":  # saved in another order than that of the names, in which DCP loads
        shapes = list(shapes_of("even", num_bytes).items())
        random.Random(0).shuffle(shapes)
        return dict(shapes)
    if kind == "small":
        return _floats({f"layer{i:03d}.weight": (512, 512) for i in range(num_bytes // MIB)})
    if kind == "one":
        return _floats({"embedding.weight": (num_bytes // 4096, 1024)})
    if kind == "long_runs":  # a shard of 1/8 of the columns is runs of 2 MiB and a bit
        columns = 8 * (2 * MIB // 4 + 3000)
        return _floats({"wide.weight": (max(1, num_bytes // 4 // columns), columns)})
    if kind == "short_runs":  # runs of 4 KiB
        return _floats({"square.weight": (num_bytes // 32768, 8192)})
    if kind == "layers":  # 32 MiB each where there is room
        width = 4096 if num_bytes >= 64 * MIB else 1024
        count = max(1, num_bytes // (8 * width * width // 4))
        return {f"layer{i}.weight": ((width, width), torch.bfloat16) for i in range(count)}
    if kind == "scalars":
        return _floats({f"scalar{i:05d}": () for i in range(num_bytes // 4)})
    raise ValueError(kind)


def _fill(number: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return bits that count up: elements differ from their neighbours, tensors from each other."""
    bits = torch.int16 if dtype.itemsize == 2 else torch.int32
    count = torch.Size(shape).numel()
    start = number * (1_000_003 if dtype.itemsize == 4 else 257)
    values = torch.arange(start, start + count, dtype=torch.int32)
    return values.to(bits).view(dtype).view(shape)


def _filled(kind: str, num_bytes: int) -> Iterator[tuple[str, torch.Tensor]]:
    for number, (name, (shape, dtype)) in enumerate(shapes_of(kind, num_bytes).items()):
        yield name, _fill(number, shape, dtype)


def make_state(kind: str, num_bytes: int, want: Want, place: Place) -> StateDict:
    """Return tensors of about ``num_bytes`` in all, or this rank's shards of them."""
    if want.shard_dim is None or place.num_ranks == 1:
        return dict(_filled(kind, num_bytes))
    return {
        name: _shard(tensor.chunk(place.num_ranks, want.shard_dim)[place.rank], want, place)
        for name, tensor in _filled(kind, num_bytes)
    }


def make_targets(kind: str, num_bytes: int, want: Want, place: Place) -> StateDict:
    """Return what to load into: memory that was touched before, so that it counts as there."""
    shapes = shapes_of(kind, num_bytes)
    names = list(shapes)
    if want.is_one:
        names = [names[3 * len(names) // 40]]
    if want.shard_dim is None:
        return {name: torch.zeros(shapes[name][0], dtype=shapes[name][1]) for name in names}
    targets = {}
    for name in names:
        local = list(shapes[name][0])
        local[want.shard_dim] //= place.parts()[0]
        targets[name] = _shard(torch.zeros(local, dtype=shapes[name][1]), want, place)
    return targets


def _shard(local: torch.Tensor, want: Want, place: Place) -> torch.Tensor:
    """Return the DTensor of which this is this process's part."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    parts, rank = place.parts()
    if not torch.distributed.is_initialized():
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=parts)
    mesh = init_device_mesh("cpu", (parts,))
    assert want.shard_dim is not None
    placements = [Shard(want.shard_dim)]
    return DTensor.from_local(local.contiguous(), mesh, placements, run_check=False)


def needed_bytes(targets: Mapping[str, torch.Tensor]) -> int:
    """Bytes of the elements that a load asks for."""
    return sum(_local(tensor).nbytes for tensor in targets.values())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def check(targets: StateDict, kind: str, num_bytes: int, want: Want, place: Place) -> None:
    """Compare what was loaded, bit by bit, with what was saved.

    Raises:
        AssertionError: If anything differs.
    """
    parts, rank = place.parts()
    for name, whole in _filled(kind, num_bytes):
        if name not in targets:
            continue
        found = _local(targets[name])
        wanted = whole if want.shard_dim is None else whole.chunk(parts, want.shard_dim)[rank]
        bits = torch.int16 if wanted.dtype.itemsize == 2 else torch.int32
        same = torch.equal(found.contiguous().view(bits), wanted.contiguous().view(bits))
        assert same, f"{name} was loaded wrong"
