"""Savers, readers and prune on modelled stores keep their promises under faults at each request."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest
import torch

from campaign.cli import FLAGS
from campaign.schedule import VERBS, Draws, parse, shrink
from campaign.verbs import Result, run_verbs

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")]

SEED, NUM_OF_EACH = 11, 60

# The put acts, or may act yet; then whoever asks whether it did is refused, or told 404 once.
ACTED = ("did-lost", "did-500", "did-503", "did-403", "did-ExpiredToken", "stall-did", "late-end")
BARRED = ("no-403", "no-ExpiredToken", "no-RequestTimeTooSkewed", "absent", "no-500*3")
SAVERS = (
    "first_save dcp x1",
    "overwrite dcpstore x2",
    "two_savers dcp x2",
    "overwrite dcpstore x1",
)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """States are tiny: torch's own threads would only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def promises_broken(text: str) -> list[str]:
    """Run a schedule; return what went wrong, with every request that led there."""
    result = run_verbs(parse(text))
    assert result.fired, f"no fault of {text!r} met a request:\n" + "\n".join(result.log)
    return [*result.problems, *result.log] if result.problems else []


@pytest.mark.parametrize("transport", VERBS)
@pytest.mark.parametrize("acted", ACTED)
def test_a_seal_that_may_have_acted_is_not_taken_back(acted: str, transport: str) -> None:
    for number, barred in enumerate(BARRED, ACTED.index(acted) + VERBS.index(transport)):
        kind, star, times = barred.partition("*")
        faults = f"{acted}@A0:seal#0 {kind}@A0:readback#0{star}{times}"
        assert not promises_broken(f"{SAVERS[number % 4]} {transport} | {faults}")


@pytest.mark.parametrize("transport", VERBS)
def test_a_throttled_seal_that_acted_and_is_then_refused_stays(transport: str) -> None:
    """The attempts within the retries count: 503 acted, and the repeated put gets 403."""
    for saver in SAVERS:
        assert not promises_broken(f"{saver} {transport} | did-503@A0:seal#0 no-403@A0:seal#1")


@pytest.mark.parametrize("flag", ["", "+bare-etag"])
def test_a_seal_sent_twice_whose_second_form_is_refused_stays(flag: str) -> None:
    """A proxy sends the put twice, so 412; the other form of the ETag gets 403."""
    for saver in SAVERS[1:]:
        text = f"{saver} sim-s3 {flag} | twice@A0:seal#0 no-403@A0:seal#1"
        assert not promises_broken(text)


@pytest.mark.parametrize("transport", VERBS)
@pytest.mark.parametrize("killed", ["killed-did@A0:seal#0", "killed@A0:delete#0"])
def test_ranks_whose_coordinator_is_killed_do_not_say_that_nothing_is_sealed(
    killed: str, transport: str
) -> None:
    assert not promises_broken(f"overwrite dcpstore x3 {transport} | {killed}")


@pytest.mark.parametrize("transport", VERBS)
@pytest.mark.parametrize("then", ["no-403*9", "no-412*9", "no-500*9", "no-503*20", "stall*9"])
def test_whoever_gives_up_while_a_put_is_unanswered_deletes_nothing(
    then: str, transport: str
) -> None:
    """The put acts at the very end. Until then all is as it was found, which proves nothing."""
    kind, _, times = then.partition("*")
    for saver in SAVERS:
        text = f"{saver} {transport} | late-end@A0:seal#0 {kind}@A0:seal#1*{times}"
        assert not promises_broken(text)


@pytest.mark.parametrize("transport", VERBS)
@pytest.mark.parametrize("saver", ["overwrite dcp x3", "first_save dcp x2", "overwrite dcp x1"])
def test_ranks_that_sweep_while_a_put_is_unanswered_delete_nothing(
    saver: str, transport: str
) -> None:
    """They see the old checkpoint, or none; neither proves that the put will not act."""
    for late in ("late-end", "late-end-503"):
        text = f"{saver} {transport} +sweep | {late}@A0:seal#0 no-403@A0:seal#1*9"
        assert not promises_broken(text)


@pytest.mark.parametrize("late", ["late-1", "late-3", "late-end"])
@pytest.mark.parametrize("flags", ["+old", "+old +sweep", "+force", "+apart +old"])
def test_a_put_without_precondition_that_acts_behind_another_save_finds_its_objects(
    flags: str, late: str
) -> None:
    """What is there proves nothing where a late put may replace it."""
    num_fired = 0
    for at in range(3, 7):  # one of them lies between A's comparison and its put
        text = f"two_savers dcp x1 sim-fsspec {flags} meet={at}/99 | {late}@A0:seal#0"
        result = run_verbs(parse(text))
        num_fired += bool(result.fired)
        assert not result.problems, [text, *result.problems, *result.log]
    assert num_fired


@pytest.mark.parametrize("transport", VERBS)
@pytest.mark.parametrize("entry", ["dcp x1", "dcpstore x2"])
def test_prune_beside_any_request_of_a_save_takes_nothing_that_it_needs(
    entry: str, transport: str
) -> None:
    """And two days later it takes what an earlier save left; see `judge`'s eighth promise."""
    for at in range(7):
        for num_of_prune in (2, 99):
            text = f"prune {entry} {transport} +old meet={at}/{num_of_prune} |"
            result = run_verbs(parse(text))
            assert not result.problems, [text, *result.problems, *result.log]
            assert {one.outcome for one in result.reports} == {"ok"}, result.reports


@pytest.mark.parametrize("operation", ["first_save", "overwrite"])
@pytest.mark.parametrize("kind", ["no-500", "did-500", "cut-request", "no-403"])
def test_a_disk_that_fails_at_any_request_loses_nothing(kind: str, operation: str) -> None:
    """EIO before and after, ENOSPC and EACCES, once and twice, as both engines tell it."""
    num_fired = 0
    for number in range(8):
        for entry, times in (("dcp x1", 1), ("dcpstore x2", 1), ("dcp x1", 2)):
            text = f"{operation} {entry} sim-file | {kind}@A0:any#{number}*{times}"
            result = run_verbs(parse(text))
            num_fired += bool(result.fired)
            assert not result.problems, [text, *result.problems, *result.log]
    assert num_fired >= 8


@pytest.mark.parametrize("transport", VERBS)
def test_of_two_savers_that_meet_anywhere_no_half_is_left(transport: str) -> None:
    for flags in ("+force", "+old"):
        for at in range(1, 5):
            for num_of_other in (1, 3):
                text = f"two_savers dcp x1 {transport} {flags} meet={at}/{num_of_other} |"
                result = run_verbs(parse(text))
                assert not result.problems, [text, *result.problems, *result.log]


@pytest.mark.parametrize("transport", VERBS)
def test_no_schedule_breaks_a_promise(transport: str) -> None:
    """A share of what ``make campaign`` runs on the models, from a fixed seed."""
    draws = draws_of(transport, SEED)
    num_fired = 0
    for _ in range(NUM_OF_EACH):
        schedule = draws.next()
        result = run_verbs(schedule)
        draws.note(schedule, result.fired)
        num_fired += bool(result.fired)
        if result.problems:
            small = shrink(schedule, lambda one: bool(run_verbs(one).problems), max_runs=20)
            pytest.fail("\n".join([str(small), *promises_broken(str(small)), f"of {schedule}"]))
    assert num_fired > NUM_OF_EACH / 2, "hardly a fault fired"


def test_a_run_repeats_itself() -> None:
    """What failed once fails again: requests, faults and verdict follow from the text alone."""
    num_run = 0
    for transport in VERBS:
        draws = draws_of(transport, SEED)
        for _ in range(12):
            schedule = draws.next()
            if schedule.operation == "prune" or schedule.ranks > 1:
                continue  # threads of one actor send their requests in any order
            num_run += 1
            first, second = run_verbs(schedule), run_verbs(schedule)
            assert requests_in(first) == requests_in(second), schedule
            assert bool(first.problems) == bool(second.problems), schedule
    assert num_run > 12


def draws_of(transport: str, seed: int) -> Draws:
    return Draws(random.Random(seed), {transport: 1.0}, FLAGS)


def requests_in(result: Result) -> list[str]:
    """Return all requests and their faults, without keys: many are deleted in any order."""
    return sorted(re.sub(r"^(\S+ \S+) \S+", r"\1", line) for line in result.log)
