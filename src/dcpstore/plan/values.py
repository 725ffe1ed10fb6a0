"""What a save accepts, and how values travel between planners and storage.

A value is stored as a ``torch.save`` record, which every reader of DCP checkpoints knows. One that
``torch.load(weights_only=True)`` would not give back as it was gets an encoding beside it
(`dcpstore.format.values`), which our load planner reads instead.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch

from dcpstore.errors import CorruptError, IncompatibleError
from dcpstore.format.payload import is_plain
from dcpstore.format.tensors import load_record, unsaveable_reason
from dcpstore.format.values import (
    UnsupportedValueError,
    check_value,
    decode_value,
    encode_value,
    is_encoded,
    opens_as_saved,
)
from dcpstore.text import indented

_TENSORS = (torch.Tensor, torch.nn.Parameter)
_SCALARS = frozenset((float, str, bool, type(None)))


class ValueRecord(io.BytesIO):
    """A value's ``torch.save`` bytes, as DCP's contract has it, and its encoding.

    Attributes:
        encoded: The same value without pickle; None where ``torch.load`` needs none.
    """

    encoded: bytes | None = None


def check_all(state_dict: Mapping[str, Any], *, allow_pickle: bool) -> None:
    """Check that everything in a flattened state dict can be loaded again.

    Args:
        state_dict: Tensors and values by key.
        allow_pickle: Whether values may be saved that only plain pickle opens again.

    Raises:
        IncompatibleError: Naming what cannot, its key and type, and what to do.
    """
    problems = []
    for name, value in state_dict.items():
        kind = type(value)
        if kind in _SCALARS or (kind in _TENSORS and is_plain(value)):
            continue
        if isinstance(value, torch.Tensor):
            reason = unsaveable_reason(value)
            if reason is not None:
                problems.append(f"{name!r} is {reason}")
        elif hasattr(value, "__create_write_items__"):
            continue  # it plans its own items, as DCP's protocol allows
        elif not (allow_pickle or opens_as_saved(value)):
            try:
                check_value(value)
            except UnsupportedValueError as error:
                problems.append(_refusal(name, error))
    if problems:
        raise IncompatibleError(
            "the state dict holds what a load could not give back; nothing was written:"
            + indented(problems)
        )


def _refusal(name: str, error: UnsupportedValueError) -> str:
    hint = error.hint or "save what it is made of: numbers, text, lists, dictionaries, tensors"
    return (
        f"{name!r} holds {error}, which only plain pickle could save: {hint}; or leave it out, or"
        " pass SavePlanner(allow_pickle=True) and, to load, LoadPlanner(allow_pickle=True)"
    )


def record_of(name: str, value: Any, *, allow_pickle: bool) -> ValueRecord:
    """Return what is stored of a value.

    Raises:
        IncompatibleError: If only plain pickle could save it and ``allow_pickle`` is False, or if
            not even that can.
    """
    stream = ValueRecord()
    if type(value) not in _SCALARS and not opens_as_saved(value):
        try:
            stream.encoded = encode_value(value)
        except UnsupportedValueError as error:
            if not allow_pickle:
                raise IncompatibleError(_refusal(name, error)) from error
    try:
        torch.save(value, stream)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise IncompatibleError(
            f"{name!r} is a {type(value).__name__} that cannot be pickled: {error}"
        ) from error
    return stream


def open_record(name: str, stream: io.BytesIO, target: object, *, allow_pickle: bool) -> Any:
    """Return the value of a record or of an encoding.

    Args:
        name: Its key in the checkpoint, for messages.
        stream: The bytes.
        target: What it replaces; where classes of instances come from.
        allow_pickle: Open a record with plain pickle, which runs code that lies in the bucket.

    Raises:
        CorruptError: If the bytes are damaged, or name code to run and ``allow_pickle`` is False.
        IncompatibleError: If it is an instance of a class that the target does not hold.
    """
    try:
        with stream.getbuffer() as data:
            if is_encoded(data):
                return decode_value(data, target)
            remedy = "pass allow_pickle=True (LoadPlanner(allow_pickle=True)), or "
            return load_record(data, "its record", allow_pickle=allow_pickle, remedy=remedy)
    except IncompatibleError as error:
        raise IncompatibleError(f"{name!r}: {error.message}") from error
    except CorruptError as error:
        raise CorruptError(f"{name!r}: {error.message}", fqn=name) from error
