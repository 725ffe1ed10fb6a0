"""An optimizer into a checkpoint and out of it, whatever state it is in."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import dcpstore
from dcpstore import ConfigError, IncompatibleError, NotFoundError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.last = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu())


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, **options)


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(x).pow(2).sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def trained(make: Callable[[nn.Module], torch.optim.Optimizer] = adam) -> tuple[Net, Any]:
    model = net()
    optimizer = make(model)
    train(model, optimizer, steps=range(3))
    return model, optimizer


def save(url: Any, model: nn.Module, *optimizers: torch.optim.Optimizer) -> str:
    state = {"model": model.state_dict(), "optim": dcpstore.optimizer_state(model, optimizers)}
    dcpstore.save(state, url)
    return str(url)


def twin(model: nn.Module, seed: int = 1) -> Any:
    """Return a fresh module of the same parameters, each with memory of its own."""
    other = copy.deepcopy(model)
    other.zero_grad()
    return other


def check_same_state(model: nn.Module, got: Any, want: Any, other: nn.Module | None = None) -> None:
    """Compare two optimizers' state and hyperparameters to the last bit."""
    one = dcpstore.optimizer_state(model, got)
    two = dcpstore.optimizer_state(other or model, want)
    assert one["param_groups"] == two["param_groups"]
    assert one["state"].keys() == two["state"].keys()
    for name, state in two["state"].items():
        assert state.keys() == one["state"][name].keys()
        for key, value in state.items():
            have = one["state"][name][key]
            assert have is not value
            assert torch.equal(torch.as_tensor(have), torch.as_tensor(value)), f"{name} {key}"
            assert getattr(have, "dtype", None) == getattr(value, "dtype", None), f"{name} {key}"


def check_same_training(
    one: tuple[nn.Module, torch.optim.Optimizer], two: tuple[nn.Module, torch.optim.Optimizer]
) -> None:
    """Train both on; the parameters must be the same to the last bit."""
    for model, optimizer in (one, two):
        train(model, optimizer, steps=range(3, 8))
    for (name, got), want in zip(one[0].named_parameters(), two[0].parameters(), strict=True):
        assert torch.equal(got, want), name


# --- a fresh optimizer ---


def everything_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy(
        [
            model.state_dict(),
            [None if param.grad is None else param.grad for param in model.parameters()],
            optimizer.state_dict(),
            torch.get_rng_state(),
        ]
    )


def flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [item for key in value for item in (key, *flat(value[key]))]
    if isinstance(value, list | tuple):
        return [item for one in value for item in flat(one)]
    return [value]


def check_untouched(before: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for was, now in zip(flat(before), flat(everything_of(model, optimizer)), strict=True):
        assert torch.equal(was, now) if isinstance(was, torch.Tensor) else was == now


@pytest.mark.parametrize("has_gradients", [False, True])
def test_looking_at_a_fresh_optimizer_changes_nothing_at_all(has_gradients: bool) -> None:
    model = net()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    calls: list[str] = []
    optimizer.register_step_post_hook(lambda *_: calls.append("step"))
    if has_gradients:
        model(torch.ones(1, 4)).sum().backward()
    before = everything_of(model, optimizer)
    state = dcpstore.optimizer_state(model, optimizer)
    assert state["state"] == {}
    assert state["param_groups"][0]["params"] == [name for name, _ in model.named_parameters()]
    check_untouched(before, model, optimizer)
    assert not calls
    assert scheduler.state_dict()["_step_count"] == 1


@pytest.mark.parametrize("has_gradients", [False, True])
def test_restoring_into_a_fresh_optimizer_changes_nothing_else(
    tmp_path, has_gradients: bool
) -> None:
    model, optimizer = trained()
    url = save(tmp_path / "c", model, optimizer)
    fresh = twin(model)
    into = adam(fresh)
    calls: list[str] = []
    into.register_step_pre_hook(lambda *_: calls.append("step"))
    torch.optim.lr_scheduler.StepLR(into, 5)
    if has_gradients:  # those make torch's own functions lose the state
        fresh(torch.ones(1, 4)).sum().backward()
    before = everything_of(fresh, into)
    result = dcpstore.restore_optimizer(fresh, into, url)
    after = everything_of(fresh, into)
    before[2] = after[2] = None
    for was, now in zip(flat(before), flat(after), strict=True):
        assert torch.equal(was, now) if isinstance(was, torch.Tensor) else was == now
    assert not calls
    assert not result.missing
    assert not result.unexpected
    assert (
        len(result.loaded) == len(result.loaded) and "optim.state.last.bias.step" in result.loaded
    )
    into.param_groups[0].pop("initial_lr")
    check_same_state(fresh, into, optimizer, model)


def test_an_optimizer_that_never_stepped_is_fresh_again_after_a_restore(tmp_path) -> None:
    model = net()
    optimizer = adam(model)
    url = save(tmp_path / "c", model, optimizer)
    fresh = twin(model)
    into = torch.optim.Adam(fresh.parameters(), lr=0.5)
    result = dcpstore.restore_optimizer(fresh, into, url)
    assert not into.state
    assert into.param_groups[0]["lr"] == 0.01
    assert len(result.missing) == 4  # it keeps state, and there was none
    check_same_training((fresh, into), (model, optimizer))


def test_an_optimizer_that_has_state_goes_back_to_what_was_saved(tmp_path) -> None:
    model, optimizer = trained()
    url = save(tmp_path / "c", model, optimizer)
    again = twin(model)
    rolled = adam(again)
    rolled.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = copy.deepcopy(again.state_dict())
    memory = rolled.state[again.last.weight]["exp_avg"].data_ptr()
    train(again, rolled, steps=range(20, 24))
    again.load_state_dict(before)
    dcpstore.restore_optimizer(again, rolled, url)
    assert rolled.state[again.last.weight]["exp_avg"].data_ptr() == memory  # filled in place
    check_same_state(again, rolled, optimizer, model)
    check_same_training((again, rolled), (model, optimizer))


# --- parameters ---


class HalfUsed(Net):
    """Of two layers one is used."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)


def test_a_parameter_that_never_had_a_gradient_has_no_state_after_a_restore(tmp_path) -> None:
    model = HalfUsed()
    optimizer = adam(model)
    train(model, optimizer, steps=range(3))
    url = save(tmp_path / "c", model, optimizer)
    fresh = twin(model)
    into = adam(fresh)
    result = dcpstore.restore_optimizer(fresh, into, url)
    assert result.missing == ("optim.state.last.weight", "optim.state.last.bias")
    assert fresh.last.weight not in into.state
    check_same_state(fresh, into, optimizer, model)
    check_same_training((fresh, into), (model, optimizer))


def test_a_parameter_without_saved_state_loses_the_state_that_it_has(tmp_path) -> None:
    model = HalfUsed()
    optimizer = adam(model)
    train(model, optimizer, steps=range(3))
    url = save(tmp_path / "c", model, optimizer)
    model.last(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    assert model.last.weight in optimizer.state
    dcpstore.restore_optimizer(model, optimizer, url)
    assert model.last.weight not in optimizer.state


def test_the_state_of_a_parameter_that_was_frozen_later_comes_back(tmp_path) -> None:
    model, optimizer = trained()
    model.first.requires_grad_(False)
    url = save(tmp_path / "c", model, optimizer)
    fresh = twin(model)
    into = adam(fresh)
    assert not dcpstore.restore_optimizer(fresh, into, url).unexpected
    check_same_state(fresh, into, optimizer, model)
    for one in (model, fresh):
        one.first.requires_grad_(True)
    check_same_training((fresh, into), (model, optimizer))


def test_a_frozen_parameter_without_state_is_not_reported(tmp_path) -> None:
    model = net()
    model.first.requires_grad_(False)
    optimizer = adam(model)
    train(model, optimizer, steps=range(3))
    url = save(tmp_path / "c", model, optimizer)
    fresh = twin(model)
    into = adam(fresh)
    assert not dcpstore.restore_optimizer(fresh, into, url).missing
    check_same_training((fresh, into), (model, optimizer))


class Tied(nn.Module):
    def __init__(self, names: tuple[str, str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        shared = nn.Parameter(torch.randn(4, 4))
        for name in names:
            layer = nn.Linear(4, 4, bias=False)
            layer.weight = shared
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.decoder(x))


@pytest.mark.parametrize("names", [("encoder", "decoder"), ("decoder", "encoder")])
def test_tied_parameters_are_saved_once_and_found_under_any_of_their_names(
    tmp_path, names: tuple[str, str]
) -> None:
    model = Tied(("encoder", "decoder"))
    optimizer = adam(model)
    train(model, optimizer, steps=range(3))
    url = save(tmp_path / "c", model, optimizer)
    assert len(dcpstore.optimizer_state(model, optimizer)["state"]) == 1
    fresh = Tied(names)
    fresh.load_state_dict(model.state_dict())
    into = adam(fresh)
    result = dcpstore.restore_optimizer(fresh, into, url)
    assert not result.missing
    assert not result.unexpected
    check_same_training((fresh, into), (model, optimizer))


class Renamed(nn.Module):
    def __init__(self, model: Net) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"first": model.first})
        self.head = model.last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body["first"](x).relu())


RENAMES = [
    {"body.": "", "head.": "last."},
    lambda name: name.removeprefix("body.").replace("head.", "last."),
]


@pytest.mark.parametrize("rename", RENAMES)
def test_renamed_parameters_find_their_state_by_a_map(tmp_path, rename: Any) -> None:
    model, optimizer = trained()
    url = save(tmp_path / "c", model, optimizer)
    fresh = Renamed(twin(model))
    into = adam(fresh)
    result = dcpstore.restore_optimizer(fresh, into, url, rename=rename)
    assert not result.missing
    assert not result.unexpected
    check_same_training((fresh, into), (model, optimizer))


def test_renamed_parameters_without_a_map_are_an_error_that_names_both(tmp_path) -> None:
    model, optimizer = trained()
    url = save(tmp_path / "c", model, optimizer)
    fresh = Renamed(twin(model))
    into = adam(fresh)
    with pytest.raises(IncompatibleError, match=r"'head\.weight'.*'last\.weight'.*rename="):
        dcpstore.restore_optimizer(fresh, into, url)
    assert not into.state


def test_two_parameters_renamed_to_one_are_an_error(tmp_path) -> None:
    model, optimizer = trained()
    url = save(tmp_path / "c", model, optimizer)
    with pytest.raises(ConfigError, match="rename maps both"):
        dcpstore.restore_optimizer(model, optimizer, url, rename=lambda _: "last.weight")


class Grown(Net):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.extra(x)


def test_a_new_parameter_is_left_alone_where_the_caller_says_so(tmp_path) -> None:
    model, optimizer = trained()
    url = save(tmp_path / "c", model, optimizer)
    grown = Grown()
    into = adam(grown)
    train(grown, into, steps=range(2))
    kept = copy.deepcopy(into.state[grown.extra.weight])
    with pytest.raises(IncompatibleError, match=r"knows nothing of 'extra\.weight'"):
        dcpstore.restore_optimizer(grown, into, url)
    result = dcpstore.restore_optimizer(grown, into, url, strict={"extra.": False})
    assert result.missing == ("optim.state.extra.weight", "optim.state.extra.bias")
    for name, value in kept.items():
        assert torch.equal(into.state[grown.extra.weight][name], value)
    held, saved = into.state[grown.last.weight], optimizer.state[model.last.weight]
    assert torch.equal(held["exp_avg"], saved["exp_avg"])


def test_saved_state_that_nobody_takes_is_reported(tmp_path) -> None:
    grown = Grown()
    optimizer = adam(grown)
    train(grown, optimizer, steps=range(3))
    url = save(tmp_path / "c", grown, optimizer)
    model = net()
    result = dcpstore.restore_optimizer(model, adam(model), url)
    assert not result.missing
    names = [
        f"extra.{name}.{state}"
        for name in ("bias", "weight")
        for state in ("exp_avg", "exp_avg_sq", "step")
    ]
    assert result.unexpected == tuple(f"optim.state.{name}" for name in names)
    assert "extra" in str(result)


# --- hyperparameters ---


def grouped(model: Net, **options: Any) -> torch.optim.Optimizer:
    groups = [
        {"params": list(model.first.parameters()), "lr": 0.1, "name": "body"},
        {"params": list(model.last.parameters()), "weight_decay": 0.5, "name": "head"},
    ]
    return torch.optim.AdamW(groups, lr=0.01, **options)


def test_every_group_gets_its_hyperparameters_back(tmp_path) -> None:
    model, optimizer = trained(grouped)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.param_groups[0]["betas"] = (0.5, 0.6)
    url = save(tmp_path / "c", model, optimizer)
    fresh = twin(model)
    into = torch.optim.AdamW(
        [{"params": list(fresh.first.parameters())}, {"params": list(fresh.last.parameters())}],
        lr=7.0,
    )
    dcpstore.restore_optimizer(fresh, into, url)
    assert [group["lr"] for group in into.param_groups] == [0.1, 0.01]
    assert [group["initial_lr"] for group in into.param_groups] == [0.1, 0.01]
    assert [group["name"] for group in into.param_groups] == ["body", "head"]
    assert into.param_groups[0]["betas"] == (0.5, 0.6)
    check_same_state(fresh, into, optimizer, model)
    check_same_training((fresh, into), (model, optimizer))


def test_groups_in_another_order_or_cut_finer_still_get_their_own(tmp_path) -> None:
    model, optimizer = trained(grouped)
    url = save(tmp_path / "c", model, optimizer)
    fresh = twin(model)
    groups = [[fresh.last.bias], [fresh.first.bias, fresh.first.weight], [fresh.last.weight], []]
    into = torch.optim.AdamW([{"params": one} for one in groups])
    dcpstore.restore_optimizer(fresh, into, url)
    assert [group.get("name") for group in into.param_groups] == ["head", "body", "head", None]
    check_same_training((fresh, into), (model, optimizer))


def test_a_group_that_joins_what_had_other_hyperparameters_is_an_error(tmp_path) -> None:
    model, optimizer = trained(grouped)
    url = save(tmp_path / "c", model, optimizer)
    fresh = twin(model)
    into = torch.optim.AdamW(fresh.parameters())
    before = everything_of(fresh, into)
    with pytest.raises(
        IncompatibleError, match=r"joins 'first\.weight', saved with \w+=.* and 'last"
    ):
        dcpstore.restore_optimizer(fresh, into, url)
    check_untouched(before, fresh, into)


def test_a_learning_rate_keeps_the_form_that_it_has_here(tmp_path) -> None:
    model, optimizer = trained(lambda model: adam(model, foreach=False))
    url = save(tmp_path / "number", model, optimizer)
    tensor = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5), foreach=False)
    dcpstore.restore_optimizer(model, tensor, url)
    assert isinstance(tensor.param_groups[0]["lr"], torch.Tensor)
    assert tensor.param_groups[0]["lr"] == torch.tensor(0.01)
    url = save(tmp_path / "tensor", model, tensor)
    number = torch.optim.Adam(model.parameters(), lr=0.5, foreach=False)
    dcpstore.restore_optimizer(model, number, url)
    assert number.param_groups[0]["lr"] == pytest.approx(0.01)
    assert isinstance(number.param_groups[0]["lr"], float)


def test_saved_hyperparameters_decide_what_state_there_is(tmp_path) -> None:
    model, optimizer = trained(lambda model: adam(model, amsgrad=True))
    url = save(tmp_path / "c", model, optimizer)
    fresh = twin(model)
    into = adam(fresh)  # without amsgrad
    assert not dcpstore.restore_optimizer(fresh, into, url).missing
    assert into.param_groups[0]["amsgrad"] is True
    check_same_training((fresh, into), (model, optimizer))
    model, optimizer = trained(lambda model: torch.optim.SGD(model.parameters(), lr=0.01))
    url = save(tmp_path / "sgd", model, optimizer)
    fresh = twin(model)
    into = torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9)
    assert not dcpstore.restore_optimizer(fresh, into, url).missing
    check_same_training((fresh, into), (model, optimizer))


# --- several optimizers ---


def two(model: Net) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    return (
        torch.optim.Adam(model.first.parameters(), lr=0.01),
        torch.optim.SGD(model.last.parameters(), lr=0.1, momentum=0.9),
    )


def saved_by_two(path: Path) -> tuple[Net, tuple[torch.optim.Optimizer, ...], Any]:
    """A model whose two optimizers took three steps, and where they are saved."""
    model = net()
    both = two(model)
    train(model, *both, steps=range(3))
    return model, both, save(path, model, *both)


def test_two_optimizers_of_one_model_are_saved_and_restored_together(tmp_path) -> None:
    model, both, url = saved_by_two(tmp_path / "c")
    fresh = twin(model)
    into = two(fresh)
    result = dcpstore.restore_optimizer(fresh, into, url)
    assert not result.missing
    assert not result.unexpected
    for step in range(3, 8):
        train(model, *both, steps=range(step, step + 1))
        train(fresh, *into, steps=range(step, step + 1))
    for got, want in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(got, want)


def test_one_of_two_optimizers_is_restored_alone(tmp_path) -> None:
    model, (_, last), url = saved_by_two(tmp_path / "c")
    fresh = twin(model)
    _, into = two(fresh)
    result = dcpstore.restore_optimizer(fresh, into, url)
    assert all(name.startswith("optim.state.first.") for name in result.unexpected)
    assert len(result.unexpected) == 6
    held = into.state[fresh.last.weight]["momentum_buffer"]
    assert torch.equal(held, last.state[model.last.weight]["momentum_buffer"])


# --- what does not fit ---

KINDS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adam": adam,
    "adamw": lambda model: torch.optim.AdamW(model.parameters()),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters()),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters()),
    "radam": lambda model: torch.optim.RAdam(model.parameters()),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
}


@pytest.mark.parametrize("saved", KINDS)
@pytest.mark.parametrize("loaded", KINDS)
def test_an_optimizer_of_another_kind_is_an_error_and_stays_as_it_is(
    tmp_path, saved: str, loaded: str
) -> None:
    if saved == loaded:
        return
    model, optimizer = trained(KINDS[saved])
    url = save(tmp_path / "c", model, optimizer)
    fresh = twin(model)
    into = KINDS[loaded](fresh)
    before = everything_of(fresh, into)
    with pytest.raises(IncompatibleError, match="of another kind than"):
        dcpstore.restore_optimizer(fresh, into, url)
    check_untouched(before, fresh, into)


def test_a_wrong_key_is_an_error_that_lists_those_there_are(tmp_path) -> None:
    model, optimizer = trained()
    state = {
        "model": model.state_dict(),
        "gan": {"critic": dcpstore.optimizer_state(model, optimizer)},
    }
    dcpstore.save(state, tmp_path / "c")
    for key in ("optim", "model", "gan", "gan.generator"):
        with pytest.raises(NotFoundError, match=r"'gan\.critic'"):
            dcpstore.restore_optimizer(model, adam(model), tmp_path / "c", key=key)
    into = adam(model)
    dcpstore.restore_optimizer(model, into, tmp_path / "c", key="gan.critic")
    check_same_state(model, into, optimizer)


def test_a_checkpoint_that_is_an_optimizer_alone_has_no_key(tmp_path) -> None:
    model, optimizer = trained()
    dcpstore.save(dcpstore.optimizer_state(model, optimizer), tmp_path / "c")
    into = adam(model)
    dcpstore.restore_optimizer(model, into, tmp_path / "c", key="")
    check_same_state(model, into, optimizer)


def test_a_checkpoint_without_an_optimizer_is_an_error(tmp_path) -> None:
    model, optimizer = trained()
    dcpstore.save({"model": model.state_dict()}, tmp_path / "c")
    with pytest.raises(NotFoundError, match=r"no optimizer.*'model'"):
        dcpstore.restore_optimizer(model, optimizer, tmp_path / "c")


def test_a_model_of_other_shapes_is_an_error_before_anything_is_read(tmp_path) -> None:
    model, optimizer = trained()
    url = save(tmp_path / "c", model, optimizer)
    other = net()
    other.last = nn.Linear(6, 3)
    into = adam(other)
    before = everything_of(other, into)
    with pytest.raises(IncompatibleError, match=r"last\.weight.*\(2, 6\).*\(3, 6\)"):
        dcpstore.restore_optimizer(other, into, url)
    check_untouched(before, other, into)


def test_state_that_lacks_a_part_is_an_error_and_not_a_crash_in_the_next_step(tmp_path) -> None:
    model, optimizer = trained()
    state = dcpstore.optimizer_state(model, optimizer)
    for one in state["state"].values():
        one.pop("step")
    dcpstore.save({"optim": state}, tmp_path / "c")
    into = adam(model)
    for one in (into, optimizer):  # a fresh one, and one that has state
        with pytest.raises(IncompatibleError, match=r"no 'step' of 'first\.weight'"):
            dcpstore.restore_optimizer(model, one, tmp_path / "c")
    assert not into.state


def test_a_number_in_the_place_of_a_tensor_is_an_error(tmp_path) -> None:
    model, optimizer = trained()
    state = dcpstore.optimizer_state(model, optimizer)
    state["state"]["last.bias"]["exp_avg"] = torch.tensor(1.0)
    dcpstore.save({"optim": state}, tmp_path / "c")
    with pytest.raises(IncompatibleError, match=r"last\.bias\.exp_avg.*\(\), here it has \(2,\)"):
        dcpstore.restore_optimizer(model, adam(model), tmp_path / "c")


def test_parameters_that_are_not_the_models_are_an_error(tmp_path) -> None:
    model = net()
    with pytest.raises(ConfigError, match="1 parameter"):
        dcpstore.optimizer_state(model, torch.optim.SGD([torch.ones(3, requires_grad=True)]))
    with pytest.raises(ConfigError, match="no optimizer was given"):
        dcpstore.optimizer_state(model, [])


def test_state_of_no_parameter_is_an_error_and_not_lost() -> None:
    model, optimizer = trained()
    optimizer.state["global_step"] = 3
    with pytest.raises(ConfigError, match="'global_step'"):
        dcpstore.optimizer_state(model, optimizer)


# --- checkpoints of others ---


def saved_by_torch(model: nn.Module, optimizer: Any, folder: Any, *, is_flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    state = {"optim": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("is_theirs", [False, True])
def test_what_torch_saved_is_restored_through_either_reader(
    tmp_path, is_flat: bool, is_theirs: bool
) -> None:
    model, optimizer = trained(grouped)
    saved_by_torch(model, optimizer, tmp_path / "c", is_flat=is_flat)
    fresh = twin(model)
    into = torch.optim.AdamW(
        [{"params": list(fresh.first.parameters())}, {"params": list(fresh.last.parameters())}]
    )
    source = dcp.FileSystemReader(tmp_path / "c") if is_theirs else tmp_path / "c"
    result = dcpstore.restore_optimizer(fresh, into, source)
    assert not result.missing
    assert not result.unexpected
    check_same_training((fresh, into), (model, optimizer))


@pytest.mark.filterwarnings("ignore")
def test_groups_in_one_value_as_torch_2_3_saved_them_are_restored(tmp_path) -> None:
    model, optimizer = trained(grouped)
    state = dcpstore.optimizer_state(model, optimizer)
    keys = {
        f"optim.state.{name}.{key}": value
        for name, one in state["state"].items()
        for key, value in one.items()
    }
    dcp.save(
        {**keys, "optim.param_groups": state["param_groups"]},
        storage_writer=dcp.FileSystemWriter(tmp_path / "c"),
        planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
    )
    fresh = twin(model)
    into = torch.optim.AdamW(
        [{"params": list(fresh.first.parameters())}, {"params": list(fresh.last.parameters())}]
    )
    result = dcpstore.restore_optimizer(fresh, into, tmp_path / "c")
    assert not result.missing
    assert not result.unexpected
    check_same_state(fresh, into, optimizer, model)
    check_same_training((fresh, into), (model, optimizer))


def test_wrappers_leave_no_trace_in_the_names(tmp_path) -> None:
    model, optimizer = trained()
    url = save(tmp_path / "c", model, optimizer)
    fresh = twin(model)
    fresh.first = checkpoint_wrapper(fresh.first)
    compiled = torch.compile(fresh, backend="eager")
    into = adam(compiled)
    result = dcpstore.restore_optimizer(compiled, into, url)
    assert not result.missing
    assert not result.unexpected
    check_same_state(compiled, into, optimizer, model)


def test_what_a_plain_state_dict_numbers_is_restored_in_order(tmp_path) -> None:
    model, optimizer = trained()
    dcpstore.save({"optim": optimizer.state_dict()}, tmp_path / "c")
    fresh = twin(model)
    into = adam(fresh)
    dcpstore.restore_optimizer(fresh, into, tmp_path / "c")
    check_same_state(fresh, into, optimizer, model)


def test_the_options_of_the_load_belong_to_a_url(tmp_path) -> None:
    model, optimizer = trained()
    url = save(tmp_path / "c", model, optimizer)
    reader = dcpstore.ObjectStoreReader(url)
    into = adam(model)
    dcpstore.restore_optimizer(model, into, reader)
    check_same_state(model, into, optimizer)
    with pytest.raises(ConfigError, match="belong to the reader"):
        dcpstore.restore_optimizer(model, into, reader, storage_options={})


# --- optimizers of others ---


class Strange(torch.optim.Optimizer):
    """State in float32 whatever its parameter; nested, by numbers; and a random number."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if param.grad is None:
                    continue
                if not state:
                    state["master"] = param.float()
                    state["factors"] = {0: torch.zeros(param.shape[0]), 1: [torch.zeros(2)] * 2}
                    state["seed"] = torch.rand(())
                    state["count"] = 0
                state["count"] += 1
                state["factors"][0] += (
                    param.grad.float().flatten(1).sum(1) if param.dim() > 1 else 1
                )
                state["master"] -= group["lr"] * param.grad.float()
                param.copy_(state["master"])


def test_nested_state_and_state_wider_than_its_parameter_come_back_as_they_were(tmp_path) -> None:
    model = net().bfloat16()
    optimizer = Strange(model.parameters())
    model(torch.ones(1, 4).bfloat16()).sum().backward()
    optimizer.step()
    url = save(tmp_path / "c", model, optimizer)
    fresh = twin(model)
    into = Strange(fresh.parameters())
    before = torch.get_rng_state()
    result = dcpstore.restore_optimizer(fresh, into, url)
    assert torch.equal(torch.get_rng_state(), before)
    assert into.num_steps == 0
    assert not result.missing
    for param, want in zip(fresh.parameters(), model.parameters(), strict=True):
        got, state = into.state[param], optimizer.state[want]
        assert got["master"].dtype == torch.float32
        assert torch.equal(got["master"], state["master"])
        assert torch.equal(got["seed"], state["seed"])
        assert got["count"] == 1
        assert got["factors"].keys() == {0, 1}
        assert torch.equal(got["factors"][0], state["factors"][0])
        assert [one.tolist() for one in got["factors"][1]] == [[0, 0], [0, 0]]


def test_an_optimizer_that_cannot_be_asked_is_restored_by_what_was_saved(tmp_path) -> None:
    def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).pow(2).sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    step_of(model, optimizer)
    url = save(tmp_path / "c", model, optimizer)
    fresh = twin(model)
    into = torch.optim.LBFGS(fresh.parameters(), max_iter=3)
    dcpstore.restore_optimizer(fresh, into, url)
    step_of(model, optimizer)
    step_of(fresh, into)
    for got, want in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(got, want)
