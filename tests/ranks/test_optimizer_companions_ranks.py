"""An optimizer over a sharded model into a checkpoint and out of it."""

from __future__ import annotations

import pytest
from rank_companions import (
    keep_rows_with_fsdp1,
    look_at_fresh_fsdp1,
    restore_from_a_wrong_key,
    resume_beside_idle_parameters,
    save_just_thawed,
    save_partial_sums,
)


@pytest.mark.parametrize("layout", ["fsdp1", "fsdp2"])
def test_idle_frozen_and_tied_parameters_of_a_sharded_model_resume(
    pool, tmp_path, layout: str
) -> None:
    missing = pool.run(2, resume_beside_idle_parameters, layout, str(tmp_path / "c"))
    assert missing == [("optim.state.idle.weight", "optim.state.idle.bias")] * 2


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_looking_at_a_fresh_optimizer_over_fsdp1_changes_nothing(
    pool, use_orig_params: bool
) -> None:
    pool.run(2, look_at_fresh_fsdp1, use_orig_params)


def test_what_fsdp1_cannot_gather_is_an_error_that_says_what_to_do(pool) -> None:
    for message in pool.run(2, save_just_thawed):
        assert "needs a step first" in message
        assert "later_frozen.weight" in message


def test_state_of_rows_is_refused_where_fsdp1_would_garble_it(pool) -> None:
    for message in pool.run(2, keep_rows_with_fsdp1):
        assert "the state 'sum' of the RowAdagrad has shape (3,)" in message
        assert "use fully_shard" in message


def test_partial_sums_are_refused_since_every_rank_has_others(pool) -> None:
    for message in pool.run(2, save_partial_sums):
        assert "the state 'rows' of the PartialSums is a DTensor of partial sums" in message


def test_all_ranks_raise_what_is_wrong_with_the_key(pool, tmp_path) -> None:
    for message in pool.run(2, restore_from_a_wrong_key, str(tmp_path / "c")):
        assert "no optimizer under 'optim'; it has 'optimizer'" in message
