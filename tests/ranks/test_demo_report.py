"""The demo's verdicts: a demo that cannot fail shows nothing."""

from __future__ import annotations

from dataclasses import replace

from dcpstore.demo.job import JobReport
from dcpstore.demo.report import (
    check_final_state,
    check_losses,
    check_restored_state,
    loss_table,
)

REPORT = JobReport(
    losses=[3.0, 2.0, 1.0],
    checkpoint_digest={"model.w": "a", "step": "1"},
    final_digest={"model.w": "b", "step": "3"},
    state_bytes=8,
    checkpoint_s=0.1,
)


def test_equal_states_pass() -> None:
    assert check_restored_state(REPORT, REPORT, 2).passed
    assert check_final_state(REPORT, REPORT, 2).passed


def test_one_differing_tensor_fails_and_is_named() -> None:
    other = replace(REPORT, checkpoint_digest={"model.w": "x", "step": "1"})
    check = check_restored_state(REPORT, other, 2)
    assert not check.passed
    assert "model.w" in check.claim
    assert "step" not in check.claim.split("differs in")[1]


def test_a_missing_and_an_unexpected_tensor_fail() -> None:
    missing = replace(REPORT, final_digest={"model.w": "b"})
    assert not check_final_state(REPORT, missing, 2).passed
    assert not check_final_state(missing, REPORT, 2).passed


def test_a_job_that_saved_nothing_fails() -> None:
    nothing = replace(REPORT, checkpoint_digest={})
    assert not check_restored_state(nothing, nothing, 2).passed


def test_many_differing_tensors_are_counted_not_listed() -> None:
    many = {f"t{index}": "x" for index in range(9)}
    check = check_final_state(REPORT, replace(REPORT, final_digest=many), 2)
    assert check.claim.endswith("and 8 more")


def test_losses_that_differ_in_the_last_bit_fail_only_where_bits_are_promised() -> None:
    near = [2.0000000000000004, 1.0]
    assert not check_losses([2.0, 1.0], near, 4, exactly=True).passed
    assert check_losses([2.0, 1.0], near, 2, exactly=False).passed
    assert check_losses([2.0, 1.0], [2.0, 1.0], 4, exactly=True).passed


def test_losses_that_differ_visibly_are_missing_or_not_numbers_fail() -> None:
    for resumed in ([2.1, 1.0], [2.0], [], [2.0, float("nan")]):
        assert not check_losses([2.0, 1.0], resumed, 2, exactly=False).passed
    assert not check_losses([], [], 2, exactly=False).passed


def test_resumed_losses_stand_beside_the_steps_they_repeat() -> None:
    lines = loss_table([3.0, 2.0, 1.0], {"on 2": [2.0, 1.0]}, 1).splitlines()
    assert lines[2].strip() == "-- checkpoint before step 1 --"
    assert lines[1].split() == ["0", "3.000000000"]
    assert lines[3].split() == ["1", "2.000000000", "2.000000000"]
