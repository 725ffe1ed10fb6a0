"""Tensors that are more than their elements come back as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dcpstore
from dcpstore import IncompatibleError, ReadConfig

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantiz:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]

DENSE = torch.tensor([[0, 1.0, 0, 0], [2, 0, -3, 0], [0, 0, 0, 0], [0, 0, 0, 7]])
ONES = torch.ones(4, 4)
_INDICES = torch.tensor([[0, 0, 2], [1, 1, 3]])


def coo(values: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(_INDICES, values, (4, 4, *values.shape[1:]))


def quantized(dense: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.quantize_per_tensor(dense, scale, 3, torch.qint8)


def by_channel(dense: torch.Tensor, scale: float) -> torch.Tensor:
    scales, zeros = torch.full((4,), scale), torch.arange(4)
    return torch.quantize_per_channel(dense, scales, zeros, 0, torch.quint8)


# Per name: what is saved, and a target of the same shape that holds other elements.
CASES: dict[str, Any] = {
    "coo": lambda: (coo(torch.ones(3)), coo(torch.zeros(3))),
    "coo, coalesced": lambda: (DENSE.to_sparse(), ONES.to_sparse()),
    "coo, into one without elements": lambda: (DENSE.to_sparse(), (0 * DENSE).to_sparse()),
    "coo, hybrid": lambda: (DENSE.to_sparse(1), ONES.to_sparse(2)),
    "coo, parameter": lambda: (
        torch.nn.Parameter(DENSE.to_sparse()),
        torch.nn.Parameter(ONES.to_sparse()),
    ),
    "csr": lambda: (DENSE.to_sparse_csr(), ONES.to_sparse_csr()),
    "csc": lambda: (DENSE.to_sparse_csc(), ONES.to_sparse_csc()),
    "bsr": lambda: (DENSE.to_sparse_bsr((2, 2)), ONES.to_sparse_bsr((2, 2))),
    "bsc": lambda: (DENSE.to_sparse_bsc((2, 2)), ONES.to_sparse_bsc((2, 2))),
    "quantized": lambda: (quantized(DENSE, 0.1), quantized(ONES, 0.7)),
    "quantized by channel": lambda: (by_channel(DENSE, 0.1), by_channel(ONES, 0.5)),
}


def parts_of(tensor: torch.Tensor) -> list[Any]:
    """Return everything that makes two such tensors the same."""
    tensor = tensor.detach()
    whole = [tensor.layout, tensor.dtype, tensor.shape]
    if tensor.is_quantized:
        is_whole = tensor.qscheme() == torch.per_tensor_affine
        scale = tensor.q_scale() if is_whole else tensor.q_per_channel_scales().tolist()
        return [*whole, scale, tensor.int_repr().tolist()]
    if tensor.layout == torch.sparse_coo:
        inner = [tensor._indices(), tensor._values()]
        return [*whole, tensor.is_coalesced(), *(one.tolist() for one in inner)]
    return [*whole, tensor.to_dense().tolist(), tensor._nnz()]


@pytest.mark.parametrize("inline_bytes", [0, 1 << 20])
@pytest.mark.parametrize("name", CASES)
def test_it_is_loaded_into_the_target_itself(name: str, inline_bytes: int, tmp_path: Path) -> None:
    saved, target = CASES[name]()
    config = dcpstore.WriteConfig(inline_bytes=inline_bytes, inline_rank_bytes=1 << 21)
    dcpstore.save({"x": [saved]}, tmp_path, config=config, progress=False)
    dcpstore.load({"x": [target]}, tmp_path, progress=False)
    assert parts_of(target) == parts_of(saved)


@pytest.mark.parametrize(
    ("saved", "target"),
    [(DENSE.to_sparse(), DENSE), (DENSE, DENSE.to_sparse()), (DENSE.to_sparse(), "csr")],
)
def test_another_layout_is_refused_before_anything_changes(
    saved: Any, target: Any, tmp_path: Path
) -> None:
    dcpstore.save({"x": saved, "y": torch.ones(2)}, tmp_path, progress=False)
    target = DENSE.to_sparse_csr() if isinstance(target, str) else target
    other = torch.zeros(2)
    with pytest.raises(IncompatibleError, match=r"'x': saved as torch.*the target is torch"):
        dcpstore.load({"x": target, "y": other}, tmp_path, progress=False)
    assert other.tolist() == [0, 0]


def test_a_quantized_tensor_is_not_silently_cast(tmp_path: Path) -> None:
    dcpstore.save({"x": quantized(DENSE, 0.1)}, tmp_path, progress=False)
    with pytest.raises(IncompatibleError, match=r"'x': a tensor of layout .* cannot be copied"):
        dcpstore.load(
            {"x": torch.zeros(4, 4)}, tmp_path, config=ReadConfig(casts="any"), progress=False
        )


def test_it_is_stored_whole_however_small_the_items_are_to_be(tmp_path: Path) -> None:
    saved, target = CASES["coo"]()
    planner = dcpstore.SavePlanner(max_item_bytes=8)
    dcpstore.save({"x": saved}, tmp_path, planner=planner, progress=False)
    dcpstore.load({"x": target}, tmp_path, progress=False)
    assert parts_of(target) == parts_of(saved)
