from __future__ import annotations

import io

import pytest
import torch

from dcpstore.format.dtypes import (
    DTYPES,
    dtype_from_name,
    dtype_name,
    info_of,
    is_plain_dtype,
    item_bytes,
)

ALL = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_every_dtype_of_the_installed_torch_is_known(dtype: torch.dtype) -> None:
    name = dtype_name(dtype)
    assert f"torch.{name}" == str(dtype)
    assert dtype_from_name(name) is dtype
    assert item_bytes(dtype) == item_bytes(name) == dtype.itemsize
    assert info_of(dtype) is DTYPES[name]


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_plain_are_those_that_torch_saves_and_loads_by_their_bytes(dtype: torch.dtype) -> None:
    def round_trips() -> bool:
        if dtype_name(dtype).startswith(("qint", "quint")):
            return False  # the bytes round-trip, their scales do not
        tensor = torch.zeros(2 * dtype.itemsize, dtype=torch.uint8).view(dtype)
        stream = io.BytesIO()
        try:
            torch.save(tensor, stream)
        except KeyError:
            return False
        stream.seek(0)
        return torch.load(stream, weights_only=True).dtype == dtype

    assert is_plain_dtype(dtype) == round_trips()


def test_storage_classes_are_those_of_torch() -> None:
    for row in DTYPES.values():
        if row.storage_class:
            storage = getattr(torch, row.storage_class)
            assert storage.dtype == dtype_from_name(row.name)


def test_unknown_names_are_refused() -> None:
    for call in (dtype_from_name, item_bytes):
        for name in ("float99", "Tensor", "__name__"):
            with pytest.raises(ValueError, match="not a dtype that dcpstore knows"):
                call(name)


def test_a_dtype_of_a_newer_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    dtype_from_name.cache_clear()
    monkeypatch.delattr(torch, "float8_e5m2")
    with pytest.raises(ValueError, match="has no dtype 'float8_e5m2'; a newer torch does"):
        dtype_from_name("float8_e5m2")
    assert item_bytes("float8_e5m2") == 1
