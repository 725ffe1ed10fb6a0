"""Values of the file that are no tensors, as the bytes that planners open."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch

from dcpstore.torch_file import TorchFile

__all__ = ["pickle_value"]

_SCALARS = (bool, int, float, complex, str, bytes, type(None))


def pickle_value(file: TorchFile, value: Any) -> bytes:
    """Return a value as ``torch.save`` writes it; tensors inside are read whole.

    Args:
        file: Where the value comes from.
        value: As the file's structure has it: tensors are stand-ins.

    Raises:
        IncompatibleError: If a tensor inside has no bytes in the file.
        CorruptError: As `TorchFile.read_box`.
    """
    if type(value) not in _SCALARS:
        value = _with_tensors(value, file.read_box)
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _with_tensors(value: Any, read: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy with memory behind every tensor; the value itself if it has none."""
    stand_ins: list[torch.Tensor] = []
    stream = io.BytesIO()
    pickler = _Pickler(stream, stand_ins)
    pickler.dump(value)
    if not stand_ins:
        return value
    stream.seek(0)
    return _Unpickler(stream, [read(one) for one in stand_ins]).load()


class _Pickler(pickle.Pickler):
    """Puts tensors aside."""

    def __init__(self, stream: io.BytesIO, stand_ins: list[torch.Tensor]) -> None:
        super().__init__(stream, protocol=5)
        self._stand_ins = stand_ins
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        number = self._numbers.setdefault(id(value), len(self._stand_ins))
        if number == len(self._stand_ins):
            self._stand_ins.append(value)
        return number


class _Unpickler(pickle.Unpickler):
    """Puts tensors back. What it reads was pickled by this process just now."""

    def __init__(self, stream: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(stream)
        self._tensors = tensors

    def persistent_load(self, number: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._tensors[number]
        return tensor
