"""Policies of a run: tables of what is due and what stays."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

import dcpstore
from dcpstore import (
    AtSteps,
    Best,
    EverySeconds,
    EverySteps,
    First,
    Latest,
    Moment,
    OnPreemption,
    StepFacts,
)
from dcpstore.errors import ConfigError
from dcpstore.manager.policies import decide, step_of_folder

START = datetime(2026, 1, 1, tzinfo=timezone.utc)
RUN = "0123456789abcdef"


def facts(step: int, minutes: float | None = None, **metrics: float) -> StepFacts:
    saved_at = None if minutes is None else START + timedelta(minutes=minutes)
    return StepFacts(step, f"step-{step}", saved_at, metrics, RUN)


def saved(*steps: int) -> list[StepFacts]:
    return [facts(step, step) for step in steps]


def stays(steps, keep, **options) -> set[int]:
    verdicts = decide(steps, keep, run=RUN, **options)
    return {verdict.step for verdict in verdicts if verdict.stays}


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-100", 100),
        ("step_100", 100),
        ("step100", 100),
        ("step=100", 100),
        ("step-000100", 100),
        ("checkpoint-100", 100),
        ("global_step100", 100),
        ("global_step_100", 100),
        ("epoch=1-step=100", 100),
        ("epoch=1-step=100.ckpt", 100),
        ("epoch=1-step=100-v1.ckpt", 100),
        ("epoch=1-val_loss=0.25-step=100.ckpt", 100),
        ("iter_0000100", 100),
        ("100", 100),
        ("0", 0),
        ("", None),
        ("step", None),
        ("step-", None),
        ("step-100-old", None),
        ("step-100.tmp", None),
        ("step--100", None),
        ("xstep-100", None),
        ("epoch-3", None),
        ("pytorch_model_fsdp_0", None),
        (".dcpstore-run", None),
        ("step-1\u0661", None),
        ("step-" + "9" * 5000, None),
    ],
)
def test_a_folder_is_of_a_step_if_it_is_named_for_one(name: str, step: int | None) -> None:
    assert step_of_folder(name) == step


# --- When to save -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "due"),
    [
        (EverySteps(3), [3, 6, 9]),
        (EverySteps(3, 1), [1, 4, 7]),
        (EverySteps(3, offset=5), [5, 8]),
        (EverySteps(1), list(range(1, 10))),
        (AtSteps(7, 2, 2), [2, 7]),
    ],
)
def test_steps_are_due_by_their_numbers(policy, due: list[int]) -> None:
    assert [step for step in range(10) if policy.is_due(Moment(step))] == due
    assert policy.depends_on_step_alone


@pytest.mark.parametrize(
    ("policy", "moment", "is_due"),
    [
        (EverySeconds(60), Moment(5, seconds=59.9), False),
        (EverySeconds(60), Moment(5, seconds=60.0), True),
        (First(), Moment(1, is_first=True), True),
        (First(), Moment(1), False),
        (OnPreemption(), Moment(7, is_preempted=True), True),
        (OnPreemption(), Moment(7, seconds=1e9), False),
    ],
)
def test_other_saves_are_due_by_what_happened(policy, moment: Moment, is_due: bool) -> None:
    assert policy.is_due(moment) is is_due


def test_only_what_needs_the_step_alone_says_so() -> None:
    assert First().depends_on_step_alone
    assert not EverySeconds(1).depends_on_step_alone
    assert not OnPreemption().depends_on_step_alone


# --- What to keep -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "steps", "left"),
    [
        (Latest(2), [1, 2, 3, 4], {3, 4}),
        (Latest(9), [1, 2], {1, 2}),
        (EverySteps(10), [5, 10, 15, 20, 25], {10, 20, 25}),
        (EverySteps(10, 5), [5, 10, 15, 20, 30], {5, 15, 30}),
        (EverySeconds(600), [1, 5, 11, 20, 21, 30], {1, 11, 21, 30}),
        (AtSteps(2, 8), [1, 2, 3], {2, 3}),
        ([AtSteps(1), Latest(1), EverySteps(2)], [1, 2, 3, 4, 5], {1, 2, 4, 5}),
        ([], [1, 2, 3], {1, 2, 3}),
        (Latest(1), [], set()),
    ],
)
def test_what_stays(keep, steps: list[int], left: set[int]) -> None:
    assert stays(saved(*steps), keep) == left
    assert stays(list(reversed(saved(*steps))), keep) == left


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (Best(2, "loss", "min"), {20, 40, 70}),
        (Best(1, "loss", "min"), {40, 70}),
        (Best(2, "loss", "max"), {10, 30, 70}),
        (Best(9, "loss", "min"), {10, 20, 30, 40, 70}),
        (Best(1, "accuracy", "max"), {60, 70}),
        (Best(1, "unheard_of", "max"), {70}),
    ],
)
def test_the_best_stay_and_a_step_without_a_number_is_none_of_them(keep, left) -> None:
    steps = [
        facts(10, 10, loss=3.0),
        facts(20, 20, loss=0.5),
        facts(30, 30, loss=math.inf),
        facts(40, 40, loss=0.5),
        facts(50, 50, loss=math.nan),
        facts(60, 60, accuracy=-1.0),
        facts(70, 70),
    ]
    assert stays(steps, keep) == left


def test_the_best_are_ranked_and_of_equal_ones_the_later_is_first() -> None:
    steps = [facts(1, loss=2.0), facts(2, loss=1.0), facts(3, loss=1.0), facts(4)]
    assert [one.step for one in Best(1, "loss", "min").ranked(steps)] == [3, 2, 1]
    assert [one.step for one in Best(1, "loss", "max").ranked(steps)] == [1, 3, 2]


def test_two_folders_of_one_step_count_once() -> None:
    twin = replace(facts(4, 4, loss=9.0), folder="checkpoint-4")
    steps = [*(facts(step, step, loss=float(-step)) for step in (2, 3, 4)), twin]
    assert stays(steps, Latest(2)) == {3, 4}
    assert stays(steps, Best(2, "loss", "min")) == {3, 4}
    assert [one.folder for one in decide(steps, Latest(1), run=RUN) if one.stays] == [
        "checkpoint-4",
        "step-4",
    ]


def test_what_is_kept_for_its_time_is_kept_when_it_is_decided_again() -> None:
    keep, left = EverySeconds(600), list[StepFacts]()
    for minute in range(0, 100, 7):
        left.append(facts(minute, minute))
        left = [one for one in left if one.step in stays(left, keep)]
    assert [one.step for one in left] == [0, 14, 28, 42, 56, 70, 84, 98]


def test_a_clock_that_jumps_loses_nothing_that_lies_far_from_the_step_before() -> None:
    steps = [facts(1, 0), facts(2, 5), facts(3, -500), facts(4, -495), facts(5, 600), facts(6)]
    assert stays(steps, EverySeconds(600)) == {1, 3, 5, 6}


# --- What no policy gives up --------------------------------------------------------------


class Nothing:
    def keep(self, steps):
        return {}


def test_the_newest_step_stays_even_if_no_policy_keeps_it() -> None:
    first, second, third = decide(saved(1, 2, 3), Nothing(), run=RUN)
    assert (first.step, first.stays, first.why) == (3, True, "newest")
    assert (second.step, second.stays, second.why) == (2, False, "no policy keeps it")
    assert (third.step, third.stays) == (1, False)


def test_protected_steps_stay_for_their_reason() -> None:
    verdicts = decide(saved(1, 2, 3), Nothing(), protected={1: "pinned", 7: "x"}, run=RUN)
    assert [(one.step, one.why) for one in verdicts if one.stays][1:] == [(1, "pinned")]


def test_a_run_that_went_back_keeps_what_it_saved_last() -> None:
    steps = [*saved(800, 900, 1000), facts(600, 2000)]
    assert stays(steps, Latest(1)) == {600, 1000}


def test_steps_of_others_stay_and_do_not_count_unless_told() -> None:
    steps = [
        *saved(1, 2, 3),
        replace(facts(4, 4), run="ffff"),
        replace(facts(5, 5), run=None),
        replace(facts(6, 6), layout="dcp"),
        replace(facts(7, 7), layout="safetensors"),
    ]
    verdicts = {one.step: one for one in decide(steps, Latest(2), run=RUN)}
    assert {step for step, one in verdicts.items() if not one.stays} == {1}
    assert verdicts[4].why == "of another run, ffff"
    assert verdicts[5].why == "saved for no run"
    assert verdicts[6].why == "newest, not written by dcpstore"
    # Safetensors have no seal, so the newest with one stays beside them; and the run's own.
    assert stays(steps, Nothing(), others=True) == {3, 6, 7}
    assert stays(steps, Latest(3), others=True) == {3, 5, 6, 7}


def test_without_a_run_steps_of_no_run_are_its_own() -> None:
    steps = [replace(one, run=None) for one in saved(1, 2)] + [replace(facts(3, 3), run="ffff")]
    verdicts = decide(steps, Latest(1))
    assert [(one.step, one.stays) for one in verdicts] == [(3, True), (2, True), (1, False)]


def test_all_reasons_are_given() -> None:
    (one, *_) = decide([facts(10, 10, loss=0.25)], [Latest(3), Best(2, "loss", "min")], run=RUN)
    assert one.why == ("newest, among the latest 3, among the best 2 by loss: 0.25")


# --- What cannot be asked for -------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EverySteps(0), "at least 1"),
        (lambda: EverySteps(2.5), "whole number"),
        (lambda: EverySteps(True), "whole number"),
        (lambda: EverySteps(5, -1), "at least 0"),
        (lambda: EverySeconds(0), "above 0"),
        (lambda: EverySeconds(math.nan), "above 0"),
        (lambda: EverySeconds("60"), "number of seconds"),
        (lambda: OnPreemption(deadline_s=-1), "above 0"),
        (lambda: OnPreemption(signals="SIGTERM"), r"signals=\('SIGTERM',\)"),
        (lambda: OnPreemption(signals=("SIGKILL",)), "can hear"),
        (lambda: OnPreemption(signals=("TERM",)), "names such as 'SIGTERM'"),
        (lambda: OnPreemption(signals=()), "needs a notice"),
        (lambda: OnPreemption(notice="spot"), "function"),
        (lambda: OnPreemption(then="stop"), "'exit' or 'continue'"),
        (lambda: AtSteps(), "name them"),
        (lambda: AtSteps([1, 2]), "whole number"),
        (lambda: AtSteps(-1), "at least 0"),
        (lambda: Latest(0), "at least 1"),
        (lambda: Best(0, "loss", "min"), "at least 1"),
        (lambda: Best(1, "", "min"), "name of a metric"),
        (lambda: Best(1, "loss", "lowest"), "'min' if the lowest loss"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(make, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_policies_come_without_torch() -> None:
    code = "import sys, dcpstore; dcpstore.Latest(1); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert dcpstore.Latest(2) == Latest(2)
