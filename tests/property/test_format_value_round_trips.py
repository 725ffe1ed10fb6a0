"""Whatever `dcpstore.save` accepts, the default `dcpstore.load` gives back, equal and of its type.

Nested states at random, through one rank and three, plain files and the embedded S3; and the state
of everything that a training job keeps.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import datetime as dt
import decimal
import fractions
import inspect
import io
import itertools
import pathlib
import random
import struct
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from value_kinds import CLASSES, Color, Frozen, Point, Settings

import dcpstore
from dcpstore import IncompatibleError
from dcpstore.testing import MotoServer
from dcpstore.testing.ranks import run_ranks

_numbers = itertools.count()

# --- an oracle that shares nothing with the code under test ------------------------------------


def seen(value: Any) -> Any:
    """Return everything that can be told of a value, as nested tuples of text and bytes."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        flat = value.detach().to_dense() if value.layout != torch.strided else value.detach()
        data = flat.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return kind, str(value.dtype), tuple(value.shape), str(value.layout), data
    if isinstance(value, np.ndarray | np.generic):
        return (
            kind,
            value.dtype.char,
            value.dtype.str,
            value.dtype.descr,
            value.shape,
            value.tobytes(),
        )
    if isinstance(value, float):
        return kind, struct.pack("<d", value)
    if isinstance(value, complex):
        return kind, struct.pack("<dd", value.real, value.imag)
    if isinstance(value, io.BytesIO):
        return kind, value.getvalue(), value.tell()
    if isinstance(value, Mapping):
        factory = getattr(value, "default_factory", None)
        return kind, factory, [(seen(key), seen(one)) for key, one in value.items()]
    if isinstance(value, set | frozenset):
        return kind, sorted(map(repr, map(seen, value)))
    if isinstance(value, collections.deque):
        return kind, value.maxlen, list(map(seen, value))
    if isinstance(value, list | tuple):
        return kind, list(map(seen, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return kind, [seen(getattr(value, one.name)) for one in dataclasses.fields(value)]
    return kind, repr(value)


# --- what to save ----------------------------------------------------------------------------

text = st.text(max_size=8)
ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**2200), 2**2200),
    st.floats(allow_nan=True),
    st.complex_numbers(),
    text,
    st.text(st.characters(codec="utf-16", categories=["Cs", "Lu"]), max_size=3),
    st.binary(max_size=20),
    st.binary(max_size=9).map(bytearray),
    st.builds(io.BytesIO, st.binary(max_size=9)),
    st.dates(),
    st.times(),
    st.datetimes(timezones=st.none() | st.just(dt.timezone.utc), allow_imaginary=True),
    st.timedeltas(),
    st.decimals(),
    st.fractions(),
    st.uuids(),
    st.builds(range, st.integers(), st.integers(), st.integers(1)),
    st.builds(slice, st.integers() | st.none(), st.integers() | st.none()),
    text.filter(lambda one: "\0" not in one).map(pathlib.PurePosixPath),
    st.sampled_from(Color),
    st.sampled_from([..., torch.float8_e5m2, torch.device("cpu"), torch.Size([2]), torch.strided]),
    hnp.arrays(hnp.array_dtypes() | hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0, min_side=0)),
    hnp.from_dtype(np.dtype("f2")),
    hnp.from_dtype(np.dtype("i8")),
)
HASHABLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text | st.binary(max_size=3),
    lambda inner: st.tuples(inner, inner),
    max_leaves=3,
)


def inside(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return values in containers that DCP keeps whole."""
    few = st.lists(values, max_size=3)
    return st.one_of(
        few,
        few.map(tuple),
        few.map(collections.deque),
        st.sets(HASHABLE, max_size=3),
        st.frozensets(HASHABLE, max_size=3),
        st.tuples(st.dictionaries(HASHABLE, values, max_size=3)),
        st.tuples(st.dictionaries(HASHABLE, st.integers(), max_size=3).map(collections.Counter)),
        st.builds(Point, values, values),
        st.builds(Settings, values, st.none() | st.sampled_from(Color)),
        st.builds(Frozen, values),
    )


TENSORS = st.builds(
    lambda dtype, shape, fill: torch.full(shape, fill).to(dtype),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64]),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 1),
)
KEYS = st.one_of(
    text,
    st.integers(),
    st.booleans(),
    st.none(),
    st.floats(),
    st.binary(max_size=3),
    st.tuples(st.integers(), text),
)
STATES = st.dictionaries(
    KEYS,
    st.recursive(
        st.recursive(ATOMS, inside, max_leaves=5) | TENSORS,
        lambda inner: st.dictionaries(KEYS, inner, max_size=4) | st.lists(inner, max_size=3),
        max_leaves=12,
    ),
    max_size=6,
)


def blank(value: Any) -> Any:
    """Return a target: the same keys and shapes, no values, and the classes that a job has."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, Mapping):
        made = copy.copy(value)
        for key, one in value.items():
            made[key] = blank(one)  # type: ignore[index]
        return made
    if isinstance(value, list) and any(map(holds_leaves, value)):
        return [blank(one) for one in value]
    return CLASSES


def holds_leaves(value: Any) -> bool:
    """Tell whether DCP takes the list apart that such a value is in."""
    if isinstance(value, Mapping | torch.Tensor):
        return True
    return isinstance(value, list) and any(map(holds_leaves, value))


def names_of(value: Any, name: str = "") -> list[str]:
    """Return the names of all leaves, as DCP joins them."""
    if isinstance(value, Mapping):
        return [one for key, inner in value.items() for one in names_of(inner, f"{name}.{key!s}")]
    if isinstance(value, list) and any(map(holds_leaves, value)):
        return [one for n, inner in enumerate(value) for one in names_of(inner, f"{name}.{n}")]
    return [name]


def check(state: Any, url: str, num_ranks: int, **options: Any) -> None:
    """Save and load, and compare every bit; or see that two leaves of one name are refused."""

    def work(group: Any) -> Any:
        ranks = {"process_group": group} if num_ranks > 1 else {}
        mine = copy.deepcopy(state)
        dcpstore.save(mine, url, overwrite=True, progress=False, **ranks, **options)
        loaded = blank(state)
        dcpstore.load(loaded, url, progress=False, **ranks, **options)
        return loaded

    for loaded in run_ranks(num_ranks, work).values():
        assert seen(loaded) == seen(state)


def is_ambiguous(state: Any) -> bool:
    names = names_of(state)
    return len(set(names)) < len(names)


def is_sound(state: Any) -> bool:
    """Tell whether the state is one: no two leaves of one name, something to save."""
    return not is_ambiguous(state) and bool(names_of(state))


QUICK = settings(
    deadline=None,
    max_examples=40,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
        HealthCheck.data_too_large,
    ],
)


@QUICK
@given(STATES)
def test_a_nested_state_comes_back_as_it_was(state: Any) -> None:
    assume(is_sound(state))
    check(state, f"memory://values/{next(_numbers)}", 1)


@settings(QUICK, max_examples=15)
@given(state=STATES)
def test_three_ranks_get_it_back_from_plain_files(
    state: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assume(is_sound(state))
    check(state, str(tmp_path_factory.mktemp("values")), 3)


@pytest.fixture(scope="module")
def bucket(moto_server: MotoServer) -> MotoServer:
    moto_server.create_bucket("values")
    return moto_server


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_it_comes_back_from_s3(num_ranks: int, bucket: MotoServer) -> None:
    @settings(QUICK, max_examples=5)
    @given(STATES)
    def run(state: Any) -> None:
        assume(is_sound(state))
        url = f"s3://values/{next(_numbers)}"
        check(state, url, num_ranks, storage_options=bucket.storage_options())

    run()


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_many_nested_states_come_back(num_ranks: int, tmp_path: pathlib.Path) -> None:
    @settings(QUICK, max_examples=5000)
    @given(STATES)
    def run(state: Any) -> None:
        assume(is_sound(state))
        check(state, str(tmp_path / str(next(_numbers))), num_ranks)

    run()


@QUICK
@given(st.dictionaries(st.integers(0, 3) | st.sampled_from("0123"), st.integers(), min_size=1))
def test_leaves_of_one_name_are_refused_and_all_others_come_back(inner: Any) -> None:
    state = {"x": inner}
    url = f"memory://values/{next(_numbers)}"
    if not is_ambiguous(state):
        check(state, url, 1)
        return
    with pytest.raises(IncompatibleError, match=r"x\[.*x\["):
        dcpstore.save(state, url, progress=False)


# --- what a training job keeps ------------------------------------------------------------------


def classes_of(module: Any, base: type) -> list[type]:
    found = [one for _, one in inspect.getmembers(module, inspect.isclass)]
    return [one for one in found if issubclass(one, base) and one is not base]


OPTIMIZERS = classes_of(torch.optim, torch.optim.Optimizer)
SCHEDULERS = [
    one
    for one in classes_of(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
    if not one.__name__.startswith("_")
]
_LR = torch.optim.lr_scheduler


def optimizer_of(kind: type, steps: int) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    parameters = [
        one for one in model.parameters() if one.ndim == 2 or kind is not torch.optim.Muon
    ]
    optimizer = kind(parameters, lr=0.1)
    for _ in range(steps):
        for one in parameters:
            grad = torch.randn_like(one)
            one.grad = grad.to_sparse() if kind is torch.optim.SparseAdam else grad
        optimizer.step(lambda: torch.tensor(1.0)) if kind is torch.optim.LBFGS else optimizer.step()
    return optimizer


ARGUMENTS: dict[str, Any] = {
    "LambdaLR": lambda o: (o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: (o, lambda epoch: 0.9),
    "StepLR": lambda o: (o, 2),
    "MultiStepLR": lambda o: (o, [2, 3, 3]),
    "ExponentialLR": lambda o: (o, 0.9),
    "CosineAnnealingLR": lambda o: (o, 10),
    "CyclicLR": lambda o: (o, 0.01, 0.1),
    "OneCycleLR": lambda o: (o, 0.1, 20),
    "CosineAnnealingWarmRestarts": lambda o: (o, 5),
    "ChainedScheduler": lambda o: ([_LR.StepLR(o, 2), _LR.MultiStepLR(o, [1, 3])],),
    "SequentialLR": lambda o: (o, [_LR.ConstantLR(o), _LR.MultiStepLR(o, [3, 4])], [2]),
}


def scheduler_of(kind: type, steps: int) -> Any:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    make = ARGUMENTS.get(kind.__name__, lambda o: (o,))
    scheduler = kind(*make(optimizer))
    for number in range(steps):
        optimizer.step()
        wants_loss = kind.__name__ == "ReduceLROnPlateau"
        scheduler.step(float(number)) if wants_loss else scheduler.step()
    return scheduler


def resume(saved: Any, target: Any) -> None:
    """Save a state and load it into another of the same kind; both must be the same."""
    url = f"memory://values/{next(_numbers)}"
    expected = seen(saved)
    dcpstore.save({"state": saved}, url, progress=False)
    state = {"state": target}
    dcpstore.load(state, url, progress=False)
    assert seen(state["state"]) == expected


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda one: one.__name__)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_the_state_of_an_optimizer_resumes(kind: type) -> None:
    saved = optimizer_of(kind, 3).state_dict()
    # What L-BFGS keeps grows with the steps, so only a state of as many has the same keys.
    is_lbfgs = kind is torch.optim.LBFGS
    resume(saved, blank(saved) if is_lbfgs else optimizer_of(kind, 1).state_dict())


@pytest.mark.parametrize("kind", SCHEDULERS, ids=lambda one: one.__name__)
@pytest.mark.filterwarnings("ignore:.*scheduler:UserWarning", "ignore:The epoch:UserWarning")
def test_the_state_of_a_scheduler_resumes(kind: type) -> None:
    resume(scheduler_of(kind, 5).state_dict(), scheduler_of(kind, 0).state_dict())


def test_the_state_of_a_gradient_scaler_resumes() -> None:
    resume(
        torch.amp.GradScaler("cpu", init_scale=8.0).state_dict(),
        torch.amp.GradScaler("cpu").state_dict(),
    )


def test_the_states_of_random_generators_resume() -> None:
    def states(seed: int) -> dict[str, Any]:
        source = random.Random(seed)
        source.gauss(0, 1)
        generators = {
            kind.__name__: np.random.Generator(kind(seed)).bit_generator.state
            for kind in (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64)
        }
        return {
            "torch": torch.Generator().manual_seed(seed).get_state(),
            "numpy": np.random.RandomState(seed).get_state(),
            "generators": generators,
            "random": source.getstate(),
        }

    resume(states(1), states(2))


def test_the_oracle_tells_values_apart() -> None:
    pairs = [
        *((1, True), (1, 1.0), (0.0, -0.0), ((1,), [1]), ({1: 2}, {"1": 2}), (b"", bytearray())),
        *((np.int64(1), np.longlong(1)), (np.zeros(2), np.zeros((2, 1))), (Point(1, 2), (1, 2))),
        (collections.Counter(a=1), {"a": 1}),
        (decimal.Decimal("1.0"), decimal.Decimal("1.00")),
        (dt.datetime(2024, 1, 1), dt.datetime(2024, 1, 1, fold=1)),
        (fractions.Fraction(1), 1),
        (uuid.UUID(int=1), uuid.UUID(int=2)),
    ]
    assert all(seen(one) != seen(other) for one, other in pairs)
    assert seen(float("nan")) == seen(float("nan"))
