"""SIGTERM to one rank of a job whose main threads are inside collectives."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist
from test_collectives_gloo import run_processes

from dcpstore.manager.agreement import open_agreement
from dcpstore.manager.preemption import Preemption

NUM_PREEMPTIONS = 6


def be_preempted() -> list[tuple[int, str, bool, bool, float]]:
    """Rank 1 gets SIGTERM while it waits for rank 2 in a collective; what each rank decided."""
    rank = dist.get_rank()
    pids = [torch.tensor(0) for _ in range(3)]
    dist.all_gather(pids, torch.tensor(os.getpid()))
    made = []
    for _ in range(NUM_PREEMPTIONS):
        heard_s: list[float] = []
        with open_agreement() as agreement:

            def tell(why: str, agreement=agreement, heard_s=heard_s) -> None:
                heard_s.append(time.time())
                agreement.request(why, is_end=True)

            with Preemption(tell) as preemption:
                sent = torch.zeros(1, dtype=torch.float64)
                decision, step = None, 0
                while decision is None:
                    step += 1
                    if rank == 2 and step == 3:
                        time.sleep(0.1)  # rank 1 is in the collective, where no handler runs
                        sent[0] = time.time()
                        os.kill(int(pids[1]), signal.SIGTERM)
                        time.sleep(0.4)
                    dist.all_reduce(torch.ones(1))
                    decision = agreement.at(step)
                dist.broadcast(sent, 2)
                late_s = max(heard_s, default=0) - float(sent) if rank == 1 else 0.0
                told = (decision.step, decision.why, decision.is_end)
                made.append((*told, preemption.was_default, late_s))
                dist.barrier()
    return made


def test_spd_677_the_save_on_sigterm_fires_in_six_of_six_preemptions() -> None:
    """There, it fired in none: the handler waited for the end of a collective."""
    by_rank = run_processes(3, be_preempted)
    assert all(len(made) == NUM_PREEMPTIONS for made in by_rank.values())
    for number in range(NUM_PREEMPTIONS):
        told = [by_rank[rank][number] for rank in range(3)]
        assert {one[:3] for one in told} == {(told[0][0], "rank 1: SIGTERM", True)}
        assert [one[3] for one in told] == [False, True, False]
    assert min(one[4] for one in by_rank[1]) < 0.2
