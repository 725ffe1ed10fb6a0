"""The agreement on a step among gloo processes, whose steps are collectives of the trainer's."""

from __future__ import annotations

import os
import signal
import statistics
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_collectives_gloo import run_processes

from dcpstore.manager.agreement import StepAgreement, open_agreement
from dcpstore.ranks import open_seat

Answer = dict[str, Any]


def train(num_steps: int, asks: dict[int, int], *, is_together: bool) -> Answer:
    """Make steps; ranks ask at steps of theirs. What was decided, and how many keys are left."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    before = store.num_keys()
    decided = []
    with open_agreement(None, size - 1) as agreement:
        for step in range(1, num_steps + 1):
            if asks.get(step) == rank:
                agreement.request(f"asked at {step}", is_end=step > 100)
            time.sleep(0.004 if is_together else 0.002 * (1 + rank))
            if is_together:
                dist.all_reduce(torch.ones(1))
            decision = agreement.at(step)
            if decision is not None:
                assert 0 <= time.monotonic() - decision.since_s < 5
                decided.append((decision.step, decision.why, decision.is_end, decision.asked_at))
        dist.barrier()
    dist.barrier()
    return {"decided": decided, "keys": store.num_keys() - before}


def all_ask_together(seen: list[Answer]) -> list[tuple[int, str, bool]]:
    """What was decided, if it was the same on all ranks."""
    told = [one["decided"] for one in seen]
    assert all(one == told[0] for one in told)
    assert [one["keys"] for one in seen] == [0] * len(seen)
    return [one[:3] for one in told[0]]


def test_processes_save_at_the_same_step_whichever_of_them_asks() -> None:
    fn = partial(train, 300, {5: 0, 150: 2}, is_together=True)
    (first, second) = all_ask_together(list(run_processes(3, fn).values()))
    assert first[1:] == ("rank 0: asked at 5", False)
    assert second[1:] == ("rank 2: asked at 150", True)
    assert 5 < first[0] < 150 < second[0]


def test_processes_save_at_the_same_step_while_one_is_far_ahead() -> None:
    fn = partial(train, 350, {5: 2}, is_together=False)
    (only,) = all_ask_together(list(run_processes(3, fn).values()))
    assert only[1:] == ("rank 2: asked at 5", False)


def lose_a_rank() -> tuple[list[tuple[str, bool]], float]:
    """Rank 1 is killed; the others are told, and a step of theirs waits for nobody."""
    rank = dist.get_rank()
    given_up: list[tuple[str, bool]] = []
    seat = open_seat(purpose="agreement")
    agreement = StepAgreement(seat, deadline_s=1.0, on_given_up=lambda *told: given_up.append(told))
    agreement.at(1)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    agreement.request("SIGTERM", is_end=True)
    longest_s, step, ends_s = 0.0, 1, time.monotonic() + 20
    while not given_up and time.monotonic() < ends_s:
        step += 1
        time.sleep(0.01)
        began_s = time.perf_counter()
        assert agreement.at(step) is None
        longest_s = max(longest_s, time.perf_counter() - began_s)
    agreement.close()
    return given_up, longest_s


def test_a_request_is_given_up_when_a_process_was_killed() -> None:
    for given_up, longest_s in run_processes(3, lose_a_rank).values():
        ((why, is_end),) = given_up
        assert is_end
        assert set(why.split("; ")) <= {"rank 0: SIGTERM", "rank 2: SIGTERM"}
        assert longest_s < 1


def measure(num_steps: int) -> tuple[float, float, list[float]]:
    """Seconds of `at` without a request; the longest step of each of 20 requests."""
    rank = dist.get_rank()
    longest: list[float] = []
    with open_agreement() as agreement:
        began_s = time.perf_counter()
        for step in range(num_steps):
            agreement.at(step)
        idle_s = (time.perf_counter() - began_s) / num_steps
        dist.barrier()
        step, began_s = num_steps, time.perf_counter()
        for number in range(20):
            if rank == 0:
                agreement.request(str(number))
            longest_s, decision = 0.0, None
            while decision is None:
                time.sleep(0.001)
                step_began_s = time.perf_counter()
                decision = agreement.at(step)
                longest_s = max(longest_s, time.perf_counter() - step_began_s)
                step += 1
            longest.append(longest_s)
        each_s = (time.perf_counter() - began_s) / 20
        dist.barrier()
    return idle_s, each_s, longest


@pytest.mark.campaign
def test_how_long_steps_take_and_wait() -> None:
    for size in (2, 4):
        seen = run_processes(size, partial(measure, 200_000)).values()
        idle_us = [1e6 * one[0] for one in seen]
        longest_ms = [1e3 * max(each) for each in zip(*(one[2] for one in seen), strict=True)]
        decided_s = [one[1] for one in seen]
        print(
            f"\n{size} ranks: at() without a request {min(idle_us):.2f} to {max(idle_us):.2f} us;"
            f" a request is decided after {max(decided_s):.2f} s; the longest wait of a step on"
            f" any rank is {statistics.median(longest_ms):.1f} ms (median of 20 requests),"
            f" {max(longest_ms):.1f} ms (longest)"
        )
