"""A state that covers what a ``torch.save`` file may hold, and what must come back of it."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import torch

from dcpstore.format.dtypes import DTYPES

__all__ = ["assert_same_file", "shared", "torch_state"]


def torch_state() -> dict[Any, Any]:
    """Every dtype, views, ties, containers and Python values."""
    base = torch.randn(10, 12)
    pair = torch.ones(5)
    parameter = torch.nn.Parameter(torch.randn(3))
    parameter.tag, parameter.scales = "kept", torch.arange(4)
    ordered = collections.OrderedDict(w=torch.randn(2, 2), n=None)
    ordered._metadata = {"": {"version": 1}}
    return {
        "dtypes": {name: _pattern(name) for name, row in DTYPES.items() if _is_here(name, row)},
        "views": [base, base.t(), base[2:5, 3:], {"tied": base}],
        "lonely": {
            "column": torch.randn(50, 40)[:, 3:5],
            "permuted": torch.randn(4, 5, 6).permute(2, 0, 1),
            "expanded": torch.randn(1, 3).expand(5, 3),
            "slice": torch.randn(600, 70)[100:],
            "conjugated": torch.randn(3, 4, dtype=torch.complex64).conj(),
            "negated": torch.randn(3, 4, dtype=torch.complex64).conj().imag,
        },
        "parameter": parameter,
        "optimizer": {
            "state": {0: {"step": torch.tensor(1.0)}, 1: {}},
            "param_groups": [{"lr": 0.1}],
        },
        "ordered": ordered,
        "empty": {"dict": {}, "list": [], "tensor": torch.empty(0, 3), "lists": [[], [{"q": 2}]]},
        "halves": [torch.arange(6.0)[:3], pair[1:3]],
        "tuple": (1, "a", None, {"k": (pair, base)}),
        "values": {
            "int": 2**80,
            "float": float("inf"),
            "complex": 1 + 2j,
            "text": "h\N{LATIN SMALL LETTER E WITH ACUTE}",
            "bytes": b"\x00\xff",
            "bytearray": bytearray(b"x"),
            "set": {1, 2},
            "size": torch.Size([1, 2]),
            "dtype": torch.float16,
            "device": torch.device("cpu"),
            "bool": True,
        },
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "meta": torch.empty(3, device="meta"),
        "storage": torch.arange(3.0).untyped_storage(),
        "step": 7,
    }


def _is_here(name: str, row: Any) -> bool:
    return row.is_plain and hasattr(torch, name)


def _pattern(name: str) -> torch.Tensor:
    dtype = getattr(torch, name)
    raw = torch.arange(6 * 4 * dtype.itemsize, dtype=torch.uint8).view(6, -1)
    return (raw % 2 if dtype == torch.bool else raw).view(dtype)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.unsqueeze(-1).view(torch.uint8)


def assert_same_file(found: Any, wanted: Any, at: str = "") -> None:
    """Compare types, flags, attributes and every bit."""
    assert type(found) is type(wanted), at
    if isinstance(wanted, torch.Tensor):
        _assert_same_tensor(found, wanted, at)
    elif isinstance(wanted, Mapping):
        assert list(found) == list(wanted), at
        for key in wanted:
            assert_same_file(found[key], wanted[key], f"{at}.{key}")
        assert_same_file(getattr(found, "__dict__", 0), getattr(wanted, "__dict__", 0), at)
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), at
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_same_file(one, other, f"{at}[{number}]")
    elif isinstance(wanted, torch.UntypedStorage):
        assert found.tolist() == wanted.tolist(), at
    elif not isinstance(wanted, torch.storage.TypedStorage):
        assert found == wanted, at


def _assert_same_tensor(found: torch.Tensor, wanted: torch.Tensor, at: str) -> None:
    for name in ("dtype", "shape", "layout", "device", "requires_grad"):
        assert getattr(found, name) == getattr(wanted, name), (at, name)
    if wanted.layout != torch.strided:
        assert torch.equal(found.to_dense(), wanted.to_dense()), at
    elif not wanted.is_meta:
        assert torch.equal(_bits(found), _bits(wanted)), at
        assert (found.is_conj(), found.is_neg()) == (wanted.is_conj(), wanted.is_neg()), at
        assert_same_file(found.__dict__, wanted.__dict__, at)


def shared(value: Any) -> list[list[str]]:
    """Return the places of tensors that share memory, in groups of two and more."""
    groups: dict[int, list[str]] = {}

    def walk(one: Any, at: str) -> None:
        if isinstance(one, torch.Tensor):
            if one.layout == torch.strided and not one.is_meta and one.numel():
                groups.setdefault(one.untyped_storage().data_ptr(), []).append(at)
            walk(one.__dict__, f"{at}.__dict__")
        elif isinstance(one, Mapping):
            for key, inner in one.items():
                walk(inner, f"{at}.{key}")
        elif isinstance(one, list | tuple):
            for number, inner in enumerate(one):
                walk(inner, f"{at}[{number}]")

    walk(value, "")
    return sorted(group for group in groups.values() if len(group) > 1)
