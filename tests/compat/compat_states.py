"""States that cover what a checkpoint may hold, and the comparison to the last bit."""

from __future__ import annotations

import _thread
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcpstore
from dcpstore.read.pump import ReadStats
from dcpstore.report import Progress

__all__ = [
    "DTYPES",
    "QUIET",
    "CtrlC",
    "assert_same",
    "blank",
    "full_state",
    "load",
    "load_by_dcp",
    "pattern",
    "save",
]

QUIET = [
    # DCP says so whenever one process saves or loads alone, as most of these tests do.
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    # Torch says so of every complex32 tensor.
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]

DTYPES = tuple(
    getattr(torch, name)
    for name in (
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "bool",
        "complex64",
        "complex128",
        "complex32",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
)


def pattern(dtype: torch.dtype, sizes: tuple[int, ...], *, seed: int = 0) -> torch.Tensor:
    """Bytes that differ everywhere, as a tensor; bools are 0 or 1."""
    num_elements = torch.Size(sizes).numel()
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(
        0, 256, (num_elements * dtype.itemsize,), dtype=torch.uint8, generator=generator
    )
    if dtype == torch.bool:
        return (raw % 2).bool().view(sizes)
    return raw.view(dtype).view(sizes)


def full_state(*, large_elements: int = 0) -> dict[str, Any]:
    """Every dtype, odd layouts and nested values; a tensor of several parts on request."""
    base = pattern(torch.float32, (30, 40), seed=1)
    state: dict[str, Any] = {
        "dtypes": {
            str(dtype).removeprefix("torch."): pattern(dtype, (5, 7), seed=number)
            for number, dtype in enumerate(DTYPES)
        },
        "scalar": torch.tensor(3.25),
        "scalar_int": torch.tensor(-7),
        "empty": torch.empty(0),
        "empty_rows": torch.empty((3, 0, 2), dtype=torch.bfloat16),
        "odd": {
            "transposed": base.t(),
            "strided": base[::2, 1::3],
            "expanded": pattern(torch.float32, (1, 9), seed=2).expand(6, 9),
            "slice": base[3:5],
            "channels_last": pattern(torch.float32, (2, 3, 4, 5), seed=3).contiguous(
                memory_format=torch.channels_last
            ),
            "parameter": torch.nn.Parameter(pattern(torch.float32, (8, 8), seed=4).nan_to_num()),
        },
        "above_inline": pattern(torch.int16, (300, 300), seed=5),
        "layers": [pattern(torch.float32, (64, 33), seed=10 + number) for number in range(6)],
        "optimizer": {
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0, 1]}],
            "state": {"w": {"step": torch.tensor(12.0), "exp_avg": pattern(torch.float32, (9,))}},
        },
        "step": 100,
        "name": "run",
        "nothing": None,
        "flags": [True, None, {"deep": ("a", 1.5)}],
        "bytes": b"\x00" * 3000,
    }
    if large_elements:
        state["large"] = pattern(torch.float32, (large_elements // 1024, 1024), seed=99)
    return state


def blank(value: Any) -> Any:
    """The same structure with other values: what a loader must overwrite."""
    if isinstance(value, torch.Tensor):
        # Dense strides in the same order: a transposed tensor gets a transposed target.
        strides = torch.empty_like(value.detach()).stride()
        ones = torch.ones(value.numel() * value.dtype.itemsize, dtype=torch.uint8)
        return ones.view(value.dtype).as_strided(value.shape, strides)
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(blank(item) for item in value)
    return "blank"


def assert_same(got: Any, expected: Any, path: str = "state") -> None:
    """Raise unless both hold the same values, tensors to the last bit."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(got, torch.Tensor), f"{path}: {type(got)}"
        assert got.dtype == expected.dtype, f"{path}: {got.dtype}, not {expected.dtype}"
        assert got.shape == expected.shape, f"{path}: {got.shape}, not {expected.shape}"
        assert torch.equal(_bytes(got), _bytes(expected)), f"{path}: other values"
    elif isinstance(expected, dict):
        assert list(got) == list(expected) or set(got) == set(expected), f"{path}: {list(got)}"
        for key, value in expected.items():
            assert_same(got[key], value, f"{path}.{key}")
    elif isinstance(expected, list | tuple):
        assert isinstance(got, list | tuple), f"{path}: {type(got)}"
        assert len(got) == len(expected), f"{path}: {len(got)} items, not {len(expected)}"
        for number, value in enumerate(expected):
            assert_same(got[number], value, f"{path}[{number}]")
    else:
        assert got == expected, f"{path}: {got!r}, not {expected!r}"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return dense.view(-1).view(torch.uint8)


def save(state: dict[str, Any], url: Any, options: Any = None, **more: Any) -> None:
    dcpstore.save(state, url, storage_options=options, progress=False, **more)


def load(state: dict[str, Any], url: Any, options: Any = None) -> dict[str, Any]:
    """Load into a blank copy of a state."""
    target: dict[str, Any] = blank(state)
    dcpstore.load(target, url, storage_options=options, progress=False)
    return target


def load_by_dcp(
    url: Any, template: dict[str, Any], **options: Any
) -> tuple[dict[str, Any], ReadStats]:
    """Load into a blank copy of a state by ``dcp.load``; return what our reader did, too."""
    reader = dcpstore.ObjectStoreReader(url, **options)
    target: dict[str, Any] = blank(template)
    dcp.load(target, storage_reader=reader, no_dist=True)
    assert reader.last_read is not None
    return target, reader.last_read


class CtrlC:
    """A progress callback that presses ctrl-C when the first bytes are through, once."""

    def __init__(self) -> None:
        self._is_pressed = False

    def __call__(self, progress: Progress) -> None:
        if progress.done_bytes > 0 and not self._is_pressed:
            self._is_pressed = True
            _thread.interrupt_main()
