"""The random number generators of a rank, as bytes to seal with a step, without pickle.

``manager.step(n, state, attachments={"rng-{rank}": rng_state()})`` saves them, and
``set_rng_state(manager.read_attachment("rng-{rank}"))`` goes on with the same numbers.
"""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch

from dcpstore.errors import ConfigError, CorruptError, IncompatibleError
from dcpstore.format.values import decode_value, encode_value
from dcpstore.text import listed

logger = logging.getLogger(__name__)

_VERSION = 1
_MAX_BYTES = 1 << 18
"""Ten times what the generators of a process with 128 GPUs take."""

_NUM_WORDS = 624  # of a Mersenne Twister


def rng_state() -> bytes:
    """Return the state of this process's global generators: torch's, numpy's and `random`'s.

    Of torch, those of the CPU and of every CUDA device that the process sees, by number; one that
    has not used CUDA yet does not begin to. The same numbers follow as if nobody had asked. It
    takes 17 KB and a millisecond.

    Raises:
        ConfigError: If numpy's global generator was replaced by one of another kind.
    """
    kind = np.random.get_state(legacy=False)["bit_generator"]
    if kind != "MT19937":
        raise ConfigError(
            f"numpy's global generator was replaced by {kind}: save the state of it yourself, or"
            " leave numpy.random.set_bit_generator alone"
        )
    uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return encode_value(
        {
            "version": _VERSION,
            "random": random.getstate(),
            "numpy": tuple(np.random.get_state()),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if uses_cuda else [],
        }
    )


def set_rng_state(data: bytes) -> None:
    """Set the generators as they were, so that the same numbers follow.

    Damaged bytes change no generator. A CUDA device whose state was not saved keeps its own. A
    saved one that this process does not see is left out, with a warning: a job that restarts
    on other machines cannot draw the same numbers on them.

    Args:
        data: What `rng_state` returned, here or in another process.

    Raises:
        CorruptError: If `rng_state` cannot have returned these bytes.
        IncompatibleError: If a newer dcpstore wrote them.
    """
    if len(data) > _MAX_BYTES:
        raise CorruptError(f"the state of generators has {len(data)} bytes, which is too many")
    state = decode_value(data)
    if not isinstance(state, dict) or type(state.get("version")) is not int:
        raise CorruptError("the bytes are no state of generators")
    if state["version"] != _VERSION:
        raise IncompatibleError(
            f"the state of generators has version {state['version']}; this dcpstore knows"
            f" {_VERSION}. Update dcpstore"
        )
    num_seen = torch.cuda.device_count() if state.get("cuda") else 0
    try:
        _check(state, num_seen)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CorruptError(f"the state of generators is damaged: {error}") from error
    random.setstate(state["random"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for number, one in enumerate(state["cuda"][:num_seen]):
        torch.cuda.set_rng_state(one, number)
    missing = [f"cuda:{number}" for number in range(num_seen, len(state["cuda"]))]
    if missing:
        logger.warning(
            "this process does not see %s, whose random numbers cannot go on", listed(missing)
        )


def _check(state: dict[str, Any], num_seen: int) -> None:
    """Raise unless all states can be set. numpy itself takes a position outside of its keys."""
    if set(state) != {"version", "random", "numpy", "torch", "cuda"}:
        raise ValueError(f"it has {sorted(map(str, state))[:8]}")
    _, _, gauss = state["random"]
    if gauss is not None and type(gauss) is not float:
        raise TypeError(f"a number of random's is a {type(gauss).__name__}")
    random.Random().setstate(state["random"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    if (
        kind != "MT19937"
        or type(keys) is not np.ndarray
        or (keys.dtype, keys.shape) != (np.uint32, (_NUM_WORDS,))
        or type(position) is not int
        or not 0 <= position <= _NUM_WORDS
        or has_gauss not in (0, 1)
        or type(gauss) is not float
    ):
        raise ValueError("numpy's is none of a Mersenne Twister")
    np.random.RandomState().set_state(state["numpy"])
    if type(state["cuda"]) is not list:
        raise TypeError("cuda has no list")
    torch.Generator().set_state(state["torch"])
    for number, one in enumerate(state["cuda"]):
        if type(one) is not torch.Tensor or (one.dtype, one.ndim) != (torch.uint8, 1):
            raise TypeError(f"cuda:{number} has no bytes")
        if number < num_seen:
            torch.Generator(f"cuda:{number}").set_state(one)
