"""What a user is told when an optimizer and what it is loaded for do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import dcpstore
from dcpstore import ConfigError, IncompatibleError, NotFoundError, RankFailures


def stepped(model: nn.Module, kind: type[torch.optim.Optimizer], **more: Any) -> Any:
    optimizer = kind(model.parameters(), lr=0.5, **more)
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    return optimizer


def net(hidden: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(2, hidden), nn.Linear(hidden, 1))


@pytest.fixture
def url(tmp_path) -> str:
    """A checkpoint with two models and their optimizers, one of them nested."""
    generator, judge = net(), net(5)
    adam = stepped(generator, torch.optim.Adam)
    sgd = stepped(judge, torch.optim.SGD, momentum=0.5)
    state = {
        "model": generator.state_dict(),
        "optim": get_optimizer_state_dict(generator, adam),
        "judge": {
            "model": judge.state_dict(),
            "optim": get_optimizer_state_dict(judge, sgd),
        },
    }
    dcpstore.save(state, str(tmp_path / "both"))
    return str(tmp_path / "both")


def load(model: nn.Module, key: str, url: str, **more: Any) -> Any:
    return dcpstore.load_sharded_optimizer_state_dict(model.state_dict(), key, url, **more)


def test_a_wrong_key_is_told_those_that_there_are(url: str) -> None:
    for key in ("optimizer", "opt", "judge.optimizer"):
        with pytest.raises(NotFoundError, match=rf"under '{key}'; it has 'judge.optim', 'optim'"):
            load(net(), key, url)


@pytest.mark.parametrize("key", ["model", "judge"])
def test_a_key_that_is_no_optimizers_is_not_taken_for_one(url: str, key: str) -> None:
    with pytest.raises(NotFoundError, match=r"it has 'judge\.optim', 'optim'"):
        load(net(), key, url)


def test_a_checkpoint_without_an_optimizer_says_what_it_has(tmp_path) -> None:
    dcpstore.save({"model": net().state_dict(), "step": 3}, str(tmp_path))
    with pytest.raises(NotFoundError, match="no optimizer; its keys begin with 'model', 'step'"):
        load(net(), "optim", str(tmp_path))
    with pytest.raises(NotFoundError, match=r"no optimizer \('model' is there, but is none\);"):
        load(net(), "model", str(tmp_path))


def test_no_checkpoint_at_all_is_not_found(tmp_path) -> None:
    with pytest.raises(NotFoundError, match="no checkpoint at"):
        load(net(), "optim", str(tmp_path / "nothing"))


def test_a_model_of_other_shapes_is_refused_by_the_saved_models_shapes(url: str) -> None:
    with pytest.raises(IncompatibleError) as raised:
        load(net(7), "optim", url)
    told = str(raised.value)
    assert "'0.weight' is saved with shape (3, 2), now (7, 2)" in told
    assert "'1.weight' is saved with shape (1, 3), now (1, 7)" in told
    assert "'1.bias'" not in told, "it fits"


def test_parameters_of_another_models_name_do_not_count(url: str) -> None:
    state = load(net(5), "judge.optim", url)
    assert state["judge"]["optim"]["state"]["0.weight"]["momentum_buffer"].shape == (5, 2)


def test_without_the_model_the_shapes_of_known_states_tell(tmp_path) -> None:
    model = net()
    adam = stepped(model, torch.optim.Adam)
    dcpstore.save({"optim": get_optimizer_state_dict(model, adam)}, str(tmp_path))
    with pytest.raises(IncompatibleError, match=r"'optim.state.0.weight.exp_avg\w*' is saved with"):
        load(net(7), "optim", str(tmp_path))


def test_an_optimizer_of_another_kind_is_refused_if_the_callers_is_known(url: str) -> None:
    sgd = torch.optim.SGD(net().parameters(), lr=0.1, momentum=0.5)
    with pytest.raises(IncompatibleError, match=r"another kind than SGD: it lacks .*momentum"):
        load(net(), "optim", url, optimizer=sgd)
    adam = torch.optim.AdamW(net().parameters())
    assert load(net(), "optim", url, optimizer=adam)["optim"]["state"]


def test_an_optimizer_of_another_model_is_refused(url: str) -> None:
    with pytest.raises(
        IncompatibleError, match=r"another model: it has state for '0\.weight'"
    ) as told:
        load(nn.ModuleDict({"head": nn.Linear(2, 2)}), "optim", url)
    assert "has 'head.weight', 'head.bias'" in str(told.value)


def test_names_that_the_model_does_not_have_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="has 'two', which is not in the model's state dict"):
        load(net(), "optim", url, parameter_names=["0.weight", "two"])


def test_options_of_a_reader_belong_to_the_reader(url: str) -> None:
    reader = dcpstore.ObjectStoreReader(url)
    with pytest.raises(ConfigError, match="give them to your storage_reader"):
        load(net(), "optim", reader, storage_options={"anon": True})  # type: ignore[arg-type]


def load_with_wrong_key(url: str) -> str:
    try:
        load(net(), "optimizer", url)
    except RankFailures as error:
        return str(error)
    return "nothing was raised"


def test_every_rank_is_told(pool, url: str) -> None:
    for told in pool.run(2, load_with_wrong_key, url):
        assert "ranks 0, 1: NotFoundError" in told
        assert "it has 'judge.optim', 'optim'" in told
