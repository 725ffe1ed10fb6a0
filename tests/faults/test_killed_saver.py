"""``kill -9`` of a saving process at random moments, against the S3 emulator."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from faults import processes
from faults.places import Place
from faults.states import load, loaded_step, save, state_at

QUICK, MANY = 4, 20
"""Moments in every run, and in the campaign."""


def saves_until_killed(place: Place, first_step: int, delay_s: float) -> tuple[int, int]:
    """Kill a saver some time after it began; return the steps that last began and ended."""
    ours, theirs = processes.pipe()
    process = processes.start(
        processes.save_for_ever,
        place.server.endpoint_url,
        place.url,
        place.engine,
        first_step,
        theirs,
    )
    theirs.close()
    assert ours.poll(60), "the saver did not start"
    time.sleep(delay_s)
    process.kill()  # SIGKILL: no handler, no clean-up, no goodbye to the server
    process.join(30)
    wait_until_idle(place)
    last = {"began": first_step - 1, "ended": first_step - 1}
    while True:
        try:
            what, step = ours.recv()
        except EOFError:
            break
        assert what != "failed", step
        last[what] = step
    assert process.exitcode == -9
    return last["began"], last["ended"]


def wait_until_idle(place: Place) -> None:
    """Let the server end what the dead process had sent: its last put may yet take effect.

    A later save that had looked before then would rightly lose to it.
    """
    deadline = time.monotonic() + 30
    num_alone = 0
    while num_alone < 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)
        place.server.clear_requests()
        place.client.exists()
        is_alone = [request.num_in_flight for request in place.server.requests()] == [1]
        num_alone = num_alone + 1 if is_alone else 0


@pytest.mark.parametrize(
    ("engine", "num_moments"),
    [
        ("obstore", QUICK),
        pytest.param("obstore", MANY, marks=pytest.mark.campaign),
        pytest.param("fsspec", MANY, marks=pytest.mark.campaign),
    ],
)
@pytest.mark.timeout(600)
def test_a_saver_killed_at_any_moment_leaves_a_whole_checkpoint(
    make_place: Callable[..., Place], engine: str, num_moments: int
) -> None:
    place, like = make_place(engine), state_at(0, is_multipart=True)
    save(state_at(1, is_multipart=True), place.writer())
    began_s = time.monotonic()
    save(state_at(2, is_multipart=True), place.writer(overwrite=True))
    one_save_s = time.monotonic() - began_s
    chance, step = random.Random(f"{engine} {num_moments}"), 2
    outcomes: list[Any] = []
    for _ in range(num_moments):
        delay_s = chance.uniform(0, 3 * one_save_s)
        began, ended = saves_until_killed(place, step + 1, delay_s)
        found = loaded_step(place.reader(), like)
        # What it said was saved is there; what it had begun may be.
        assert ended <= found <= began
        assert began <= ended + 1
        outcomes.append((f"{delay_s:.2f} s", "new" if found > ended else "old", found))
        step = found
    print(f"\n{engine}: a save takes {one_save_s:.2f} s; killed after, found: {outcomes}")

    last = began + 1
    save(state_at(last), place.writer(overwrite=True))
    assert loaded_step(place.reader(), state_at(0)) == last
    assert sum(name.startswith(".metadata") for name in place.names()) == 1


def test_a_saver_killed_in_its_first_save_leaves_no_checkpoint_or_a_whole_one(
    make_place: Callable[..., Place],
) -> None:
    chance, outcomes = random.Random(3), []
    for _ in range(3):
        place = make_place()
        began, ended = saves_until_killed(place, 1, chance.uniform(0, 0.5))
        if ".metadata" in place.names():
            found = loaded_step(place.reader(), state_at(0, is_multipart=True))
            assert max(ended, 1) <= found <= began
        else:
            assert (began, ended) == (1, 0)
            found = 0
            with pytest.raises(BaseException, match="no checkpoint at"):
                load(state_at(0), place.reader())
        outcomes.append(found)
        save(state_at(99), place.writer(overwrite=True))
        assert loaded_step(place.reader(), state_at(0)) == 99
    print(f"\nfound: {outcomes}")
