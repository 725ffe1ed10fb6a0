"""States of random number generators as bytes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import dcpstore
from dcpstore import ConfigError, CorruptError, IncompatibleError, rng_state, set_rng_state
from dcpstore.format.values import decode_value, encode_value


def draw() -> list[Any]:
    """Numbers of every kind: some generators keep half of a pair for the next call."""
    return [
        random.random(),
        random.gauss(0, 1),
        random.getrandbits(100),
        *np.random.standard_normal(3),
        np.random.randint(1 << 30),
        *torch.randn(3).tolist(),
        *torch.randn(17).tolist(),
        torch.randint(1 << 30, ()).item(),
    ]


@pytest.fixture(autouse=True)
def kept():
    state = rng_state()
    yield
    set_rng_state(state)


@pytest.mark.parametrize("num_drawn", [0, 1, 200])
def test_the_same_numbers_follow(num_drawn: int) -> None:
    for _ in range(num_drawn):
        draw()
    state = rng_state()
    expected = [draw() for _ in range(300)]
    assert [draw() for _ in range(300)] != expected
    set_rng_state(state)
    assert rng_state() == state
    assert [draw() for _ in range(300)] == expected


def test_asking_for_the_state_changes_no_number() -> None:
    state = rng_state()
    expected = [draw() for _ in range(20)]
    set_rng_state(state)
    asked = []
    for _ in range(20):
        rng_state()
        asked.append(draw())
    assert asked == expected
    assert not torch.cuda.is_initialized() or torch.cuda.is_available()


def test_a_state_is_small_and_holds_no_pickle() -> None:
    assert 15_000 < len(rng_state()) < 20_000
    assert set(decode_value(rng_state())) == {"version", "random", "numpy", "torch", "cuda"}


def damaged() -> dict[str, bytes]:
    state = decode_value(rng_state())
    version, words, gauss = state["random"]
    kind, keys, *rest = state["numpy"]
    changes: dict[str, dict[str, Any]] = {
        "random has a word too few": {"random": (version, words[1:], gauss)},
        "random is at no place": {"random": (version, (*words[:-1], 625), gauss)},
        "random has an object": {"random": (version, words, "1.0")},
        "random has two fields": {"random": (version, words)},
        "random has text": {"random": (version, ("a",) * 625, gauss)},
        "numpy is at no place": {"numpy": (kind, keys, 1 << 40, 0, 0.0)},
        "numpy is before its place": {"numpy": (kind, keys, -1, 0, 0.0)},
        "numpy has words of another size": {"numpy": (kind, keys.astype("u8"), *rest)},
        "numpy has few words": {"numpy": (kind, keys[:10], *rest)},
        "numpy is of another kind": {"numpy": ("PCG64", keys, *rest)},
        "numpy is nothing": {"numpy": None},
        "torch is short": {"torch": state["torch"][:16]},
        "torch is zeros": {"torch": torch.zeros_like(state["torch"])},
        "torch is text": {"torch": "seed"},
        "cuda is no list": {"cuda": {"0": 1}},
        "cuda is no bytes": {"cuda": [1]},
    }
    made = {name: encode_value({**state, **change}) for name, change in changes.items()}
    missing = {name: value for name, value in state.items() if name != "numpy"}
    return {
        **made,
        "one is missing": encode_value(missing),
        "one is too many": encode_value({**state, "more": 1}),
        "no dictionary": encode_value([state]),
        "no version": encode_value({**state, "version": "1"}),
        "nothing": b"",
        "other bytes": b"x" * 1000,
        "cut": rng_state()[:-1],
        "more": rng_state() + b"N",
        "large": rng_state() + bytes(1 << 20),
    }


@pytest.mark.parametrize("name", damaged())
def test_damaged_bytes_change_no_generator(name: str) -> None:
    data = damaged()[name]
    before = rng_state()
    draw()
    after = rng_state()
    with pytest.raises(CorruptError):
        set_rng_state(data)
    assert rng_state() == after != before


def test_a_newer_form_is_refused() -> None:
    state = decode_value(rng_state())
    with pytest.raises(IncompatibleError, match="has version 2; this dcpstore knows 1"):
        set_rng_state(encode_value({**state, "version": 2}))


def test_a_device_that_is_not_there_is_left_out_with_a_warning(caplog) -> None:
    state = decode_value(rng_state())
    devices = [torch.zeros(16, dtype=torch.uint8)] * (torch.cuda.device_count() + 2)
    data = encode_value({**state, "cuda": devices})
    expected = draw()
    set_rng_state(data)
    assert draw() == expected
    first = torch.cuda.device_count()
    assert f"does not see cuda:{first}, cuda:{first + 1}, whose" in caplog.text


def test_another_generator_of_numpys_is_refused() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        with pytest.raises(ConfigError, match="was replaced by PCG64"):
            rng_state()
    finally:
        np.random.set_bit_generator(before)


@pytest.mark.gpu
def test_a_device_draws_the_same_numbers() -> None:
    torch.randn(5, device="cuda")
    state = rng_state()
    expected = torch.randn(1000, device="cuda")
    assert not torch.equal(torch.randn(1000, device="cuda"), expected)
    set_rng_state(state)
    assert torch.equal(torch.randn(1000, device="cuda"), expected)
    with pytest.raises(CorruptError):
        cuda = [torch.zeros(3, dtype=torch.uint8)]
        set_rng_state(encode_value({**decode_value(state), "cuda": cuda}))


def test_the_helpers_are_public() -> None:
    assert {"rng_state", "set_rng_state", "TensorBoardEvents"} <= set(dcpstore.__all__)
