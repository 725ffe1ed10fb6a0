"""Schedules of faults on the wire: those that once lost data, and some hundred random ones.

``make campaign`` runs a hundred thousand; see `campaign.cli`.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from campaign.cli import AllDraws
from campaign.processes import ProcessRanks
from campaign.schedule import parse
from campaign.server import S3Server
from campaign.table import Table
from campaign.wire import Outcome, Wire

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
NUM_RANDOM = 240
_DENIALS = ("403", "ExpiredToken", "RequestTimeTooSkewed")


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    logging.getLogger("dcpstore").setLevel(logging.ERROR)  # what stays behind is told, rightly
    with S3Server() as running:
        yield running
    logging.getLogger("dcpstore").setLevel(logging.NOTSET)


@pytest.fixture(scope="module")
def wire(server: S3Server) -> Wire:
    return Wire(server)


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessRanks]:
    with ProcessRanks() as ranks:
        yield ranks


def assert_kept(outcomes: Sequence[Outcome]) -> None:
    broken = ["\n".join([str(o.schedule), *o.problems, *o.log]) for o in outcomes if o.problems]
    assert not broken, "\n\n".join(broken[:3])


def assert_kept_under_its_faults(outcome: Outcome) -> None:
    assert_kept([outcome])
    assert set(outcome.fired) == set(outcome.schedule.faults), "\n".join(outcome.log)


@pytest.mark.parametrize("denial", _DENIALS)
@pytest.mark.parametrize("lost", ["did-lost", "did-500", "did-503", "late-end", "stall-did"])
@pytest.mark.parametrize("operation", ["overwrite", "first_save"])
def test_a_lost_answer_and_a_refused_look_lose_nothing(
    wire: Wire, operation: str, lost: str, denial: str
) -> None:
    schedule = f"{operation} dcp x1 s3 | {lost}@A0:seal#0 no-{denial}@A0:readback#0"
    assert_kept([wire.run(parse(schedule))])


@pytest.mark.parametrize(
    "faults",
    [
        # The put acts and is answered 503; the repeated put is refused.
        *(f"did-503@A0:seal#0 no-{denial}@A0:seal#1" for denial in _DENIALS),
        # A proxy sends the put twice, so 412; the second form of the ETag is refused.
        *(f"twice@A0:seal#0 no-{denial}@A0:seal#1" for denial in _DENIALS),
        "did-412@A0:seal#0 no-403@A0:seal#1",
        # The put acts, and is refused for certain all the same.
        "did-403@A0:seal#0",
        "did-ExpiredToken@A0:seal#0",
        "no-503@A0:seal#0 did-403@A0:seal#1",
        # The store says once of what exists that it does not.
        "did-lost@A0:seal#0 absent@A0:readback#0",
        "did-503@A0:seal#0 absent@A0:readback#0",
        "did-412@A0:seal#0 absent@A0:readback#0",
        # The put acts only when everybody has given up.
        "late-end@A0:seal#0 no-403@A0:readback#0*3",
        "late-end@A0:seal#0 no-403@A0:seal#1",
        "late-3@A0:seal#0 absent@A0:readback#0",
        # The old metadata were cut short when they were read first, which nobody noticed.
        "cut-answer@A0:any#0 late-3@A0:seal#0",
        "no-503@A0:look#0 cut-answer@A0:any#1 late-3@A0:seal#0",
    ],
)
@pytest.mark.parametrize("entry", ["dcp x1 s3", "dcpstore x2 s3", "dcpstore x1 s3fs"])
def test_a_seal_whose_attempts_contradict_one_another_loses_nothing(
    wire: Wire, entry: str, faults: str
) -> None:
    assert_kept([wire.run(parse(f"overwrite {entry} | {faults}"))])


def test_random_schedules_on_the_wire_break_no_promise(wire: Wire) -> None:
    draws, table = AllDraws("wire", "the ordinary suite"), Table()
    schedules = [draws.next() for _ in range(NUM_RANDOM)]
    with ThreadPoolExecutor(8) as executor:
        outcomes = list(executor.map(wire.run, schedules))
    for outcome in outcomes:
        table.add(outcome.schedule, outcome.fired)
    assert_kept(outcomes)
    assert table.num_fired > 0.6 * NUM_RANDOM


def test_credentials_that_expire_in_mid_save_are_renewed(wire: Wire) -> None:
    outcome = wire.run(parse("overwrite dcpstore x2 s3 +many +renew | no-503@A1:data#0"))
    assert_kept_under_its_faults(outcome)
    assert {line for line in outcome.log if line.startswith("A0: ")} == {"A0: ok "}


@pytest.mark.parametrize(
    "text",
    [
        "overwrite dcpstore x2 gloo +fsdp +sharded | did-lost@A0:seal#0 no-403@A0:readback#0",
        "first_save dcp x4 gloo +sharded | did-503@A0:seal#0 no-ExpiredToken@A0:readback#0",
        "two_savers dcpstore x2 gloo +old meet=2/4 | did-500@B0:seal#0 absent@B0:readback#0",
        "reader dcp x2 gloo +async +old +sharded meet=4/99 | twice@A0:seal#0 no-403@A0:seal#1",
        "prune dcp x3 gloo +old +sweep meet=3/99 | no-500@A2:data#0*3 no-503@P0:delete#0",
        "overwrite dcpstore x2 gloo | killed-did@A0:seal#0",
        "overwrite dcp x2 gloo | killed@A1:data#0",
        "overwrite dcpstore x3 gloo +sharded | killed@A1:data#0",
    ],
)
def test_ranks_that_are_processes_break_no_promise(
    server: S3Server, processes: ProcessRanks, text: str
) -> None:
    processes.renew()
    outcome = Wire(server, processes).run(parse(text))
    assert_kept([outcome])
    assert outcome.fired


@pytest.mark.campaign
@pytest.mark.parametrize("faults", ["no-503@A1:data#0", "did-lost@A0:seal#0 no-403@A0:readback#0"])
def test_an_async_save_in_a_process_breaks_no_promise(
    server: S3Server, processes: ProcessRanks, faults: str
) -> None:
    processes.renew()
    text = f"overwrite dcp x2 gloo +process +sharded | {faults}"
    outcome = Wire(server, processes).run(parse(text))
    assert_kept([outcome])
    assert outcome.fired


def test_the_command_line_repeats_a_schedule_from_its_text() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.campaign", "--one", "overwrite dcp x1 s3 | no-503@A0:seal#0"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "every promise was kept" in done.stdout
    assert "fired: no-503@A0:seal#0" in done.stdout
