"""Tensors that are more than a payload and saved as a whole, and the records that hold them."""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from dcpstore.errors import CheckpointError, CorruptError, IncompatibleError
from dcpstore.format.opcodes import check_structure
from dcpstore.format.payload import PLAIN_TYPES, is_plain, to_plain
from dcpstore.format.zip import read_members

if TYPE_CHECKING:
    from typing_extensions import Buffer


_SPARSE = (
    torch.sparse_coo,
    *(torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc),
)


def unsaveable_reason(tensor: torch.Tensor) -> str | None:
    """Tell why a tensor could not be loaded again, and what to do; None if it could.

    Sparse and quantized tensors can. A subclass can if a trial gives it back, or if it plans its
    own items, as DTensor does.
    """
    if hasattr(tensor, "__create_write_items__") or hasattr(tensor, "local_shards"):
        return None
    if is_lazy(tensor) or tensor.device.type == "meta":
        return "a meta tensor, which has no data to save; materialize it"
    tensor = to_plain(tensor)
    kind = type(tensor)
    if tensor.is_nested:
        return "a nested tensor, which DCP has no form for; save its components as a list"
    if kind in PLAIN_TYPES and (is_plain(tensor) or tensor.is_quantized):
        return None
    if kind in PLAIN_TYPES and tensor.layout in _SPARSE:
        return None
    try:
        again = decode_opaque(encode_opaque(tensor))
        if type(again) is kind and again.dtype == tensor.dtype and again.shape == tensor.shape:
            return None
        reason = f"torch gives it back as {type(again).__name__}"
    except (
        *(pickle.PickleError, NotImplementedError, RuntimeError, TypeError, ValueError),
        *(AttributeError, CheckpointError),
    ) as error:
        reason = f"torch does not give it back: {str(error).partition(chr(10))[0]}"
    return (
        f"a tensor of type {kind.__name__}, layout {tensor.layout} and dtype {tensor.dtype}, and"
        f" {reason}. Save the plain tensors it is made of, or name its class with"
        " torch.serialization.add_safe_globals where it is saved and where it is loaded"
    )


def copy_opaque_in(source: torch.Tensor, target: torch.Tensor) -> None:
    """Overwrite a tensor with a decoded one of the same shape, which has more than elements.

    A sparse target takes the indices as well, however many it had.
    """
    with torch.no_grad():
        if target.layout == source.layout == torch.sparse_coo:
            dims = source.sparse_dim(), source.dense_dim()
            if dims != (target.sparse_dim(), target.dense_dim()):
                target.sparse_resize_and_clear_(source.shape, *dims)
        elif target.layout == source.layout != torch.strided:
            target.resize_as_sparse_(source)
        target.copy_(source)


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
        CorruptError: As `load_record`.
    """
    value = load_record(buffer, "a stored tensor", device="cpu")
    if not isinstance(value, torch.Tensor):
        raise IncompatibleError(f"the record holds a {type(value).__name__}, not a tensor")
    return value


def load_record(
    buffer: Buffer,
    what: str,
    *,
    allow_pickle: bool = False,
    device: str | None = None,
    remedy: str = "",
) -> Any:
    """Open a ``torch.save`` record with ``torch.load``.

    Args:
        buffer: The record.
        what: Its name, for messages.
        allow_pickle: Run whatever code it names, and check nothing before.
        device: Where tensors go; None for where they were when they were saved.
        remedy: What the caller may do besides about code that it names; ends with ``or ``.

    Raises:
        CorruptError: If it is damaged, made to cost far more to open than it is long, or names
            something that torch does not hold safe.
        IncompatibleError: If it is another kind of file, or has compressed members.
    """
    data = memoryview(buffer).cast("B")
    stream = io.BytesIO(data)
    if allow_pickle:
        return torch.load(stream, map_location=device, weights_only=False)
    try:
        check_structure(bytes(read_members(data, what)["data.pkl"]))
        return torch.load(stream, map_location=device, weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:
        text = str(error).partition("\n")[0][:200]
        if isinstance(error, pickle.UnpicklingError):
            raise CorruptError(
                f"{what} names more than plain data; it was not run. If you trust the checkpoint,"
                f" {remedy}name its classes with torch.serialization.add_safe_globals. Torch says:"
                f" {text}"
            ) from error
        raise CorruptError(f"{what} cannot be opened: {type(error).__name__}: {text}") from error
