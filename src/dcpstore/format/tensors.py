"""Which tensors are plain bytes, and how the others are saved as a whole."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import torch

from dcpstore.errors import IncompatibleError
from dcpstore.format.dtypes import is_plain_dtype
from dcpstore.torch_private import wait_async_collective

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["decode_opaque", "encode_opaque", "is_freed", "is_plain", "to_plain"]

# `nn.Buffer` is a marked `torch.Tensor`, so it needs no entry.
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether dtype, shape and row-major payload bytes say all that there is to save.

    True for strided tensors and parameters on any device that holds data, with any
    strides, conjugate and negative bits included. False for quantized, sparse, nested and
    meta tensors, for subclasses, and for dtypes without a record; `encode_opaque` saves
    those. Call `to_plain` first: an unfinished collective is not plain.
    """
    return (
        type(tensor) in _PLAIN_TYPES
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
        and not tensor.is_nested
        and is_plain_dtype(tensor.dtype)
    )


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor's storage was resized to nothing, as FSDP frees parameters."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def to_plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's data: waited for, detached, unwrapped from its parameter.

    Shares memory with ``tensor``. Waits for a pending functional collective, as the bytes
    of its result do not exist before.
    """
    return wait_async_collective(tensor).detach()


def _trimmed(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a view of a larger storage, of which torch.save would write every byte."""
    if tensor.layout != torch.strided or tensor.is_nested or type(tensor) is not torch.Tensor:
        return tensor
    held_bytes = tensor.untyped_storage().nbytes()
    return tensor.clone() if held_bytes > tensor.numel() * tensor.element_size() else tensor


def encode_opaque(tensor: torch.Tensor) -> bytes:
    """Return the ``torch.save`` record of a tensor that `is_plain` says no to.

    The tensor is copied to the host first, so that loading needs no device. Peak memory is
    twice its size; such tensors are small.

    Raises:
        IncompatibleError: If the tensor has no data (meta device).
    """
    if tensor.device.type == "meta":
        raise IncompatibleError(
            f"a meta tensor of shape {tuple(tensor.shape)} has no data to save; materialize it"
        )
    data = to_plain(tensor)
    if data.device.type != "cpu":
        data = data.cpu()
    stream = io.BytesIO()
    torch.save(_trimmed(data), stream)
    return stream.getvalue()


def decode_opaque(buffer: Buffer) -> torch.Tensor:
    """Return the tensor of a ``torch.save`` record, on the CPU, owning its memory.

    Raises:
        IncompatibleError: If the record holds something else than a tensor.
        pickle.UnpicklingError: If it names something that torch does not hold safe.
    """
    value = torch.load(io.BytesIO(buffer), map_location="cpu", weights_only=True)
    if not isinstance(value, torch.Tensor):
        raise IncompatibleError(f"the record holds a {type(value).__name__}, not a tensor")
    return value
