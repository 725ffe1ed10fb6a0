"""The command line of the campaign: runs schedules in worker processes until there are enough.

::

    python -m tests.campaign --wire 10000 --gloo 1000 --verbs 90000 --seed 1 --out campaign.json
    python -m tests.campaign --one 'overwrite dcp x1 s3 | did-lost@A0:seal#0 no-403@A0:readback#0'
    python -m tests.campaign --merge one.json other.json --out both.json

The same seed draws the same schedules on each worker. How many of them are run depends on the
machine; a single one is repeated from its text.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import multiprocessing
import queue
import random
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from campaign.mutants import check_mutants
from campaign.processes import ProcessRanks
from campaign.schedule import GLOO, VERBS, Draws, Fault, Schedule, parse, shrink
from campaign.server import S3Server
from campaign.table import Table
from campaign.verbs import run_verbs
from campaign.wire import Outcome, Wire

KINDS = ("wire", "gloo", "verbs")
LEAST_IN_CELL = 200
_SHARES = {"wire": 0.4, "gloo": 0.65, "verbs": 1.0}
"""By when, of the whole time, each kind is stopped at the latest."""
_NUM_THREADS = 8  # of a worker on the wire: others run while one waits
_BATCH = 16
_MAX_SHRUNK = 3  # of one sort of finding, per worker
_OFTEN = {"apart": 0.2, "many": 0.2, "nolist": 0.2, "force": 0.2, "sweep": 0.2, "bare-etag": 0.1}
_RARE = {"parts": 0.01, "renew": 0.01}
_ON_MODELS = {name: chance for name, chance in _OFTEN.items() if name != "bare-etag"}
TRANSPORTS: dict[str, dict[str, float]] = {
    "wire": {"s3": 5, "s3fs": 1},
    "gloo": dict.fromkeys(GLOO, 1),
    "verbs": dict.fromkeys(VERBS, 1),
}
FLAGS: dict[str, dict[str, float]] = {
    "s3": {**_OFTEN, **_RARE},
    "s3fs": {**_OFTEN, "parts": 0.01},
    "gloo": {**_OFTEN, **_RARE, "sharded": 0.3, "fsdp": 0.1, "async": 0.2, "process": 0.02},
    "sim-s3": _OFTEN,
    "sim-gcs": {name: chance for name, chance in _ON_MODELS.items() if name != "nolist"},
    "sim-azure": {name: chance for name, chance in _ON_MODELS.items() if name != "nolist"},
    "sim-fsspec": {name: chance for name, chance in _OFTEN.items() if name != "nolist"},
    "sim-file": {name: chance for name, chance in _ON_MODELS.items() if name != "nolist"},
}


class AllDraws:
    """Draws the schedules of a kind, from each transport in turn where they weigh the same."""

    def __init__(self, kind: str, seed: object) -> None:
        rng, weights = random.Random(str(seed)), TRANSPORTS[kind]
        if kind == "verbs":
            draws = {name: Draws(rng, {name: 1}, FLAGS) for name in weights}
        else:
            draws = dict.fromkeys(weights, Draws(rng, weights, FLAGS))
        self._draws = draws
        self._turns = itertools.cycle(draws.values())

    def next(self) -> Schedule:
        """Draw one."""
        return next(self._turns).next()

    def note(self, schedule: Schedule, fired: Sequence[Fault]) -> None:
        """Count what happened."""
        self._draws[schedule.transport].note(schedule, fired)


def kind_of(schedule: Schedule) -> str:
    """Return which of `KINDS` runs a schedule."""
    if schedule.transport in VERBS:
        return "verbs"
    return "gloo" if schedule.transport in GLOO else "wire"


Runner = Callable[[Schedule], Any]


@contextmanager
def runner_of(kind: str) -> Iterator[Runner]:
    """Give a function that runs schedules of a kind and returns what they showed."""
    with ExitStack() as stack:
        if kind == "verbs":
            yield run_verbs
            return
        server = stack.enter_context(S3Server())
        if kind == "wire":
            yield Wire(server).run
            return
        ranks = stack.enter_context(ProcessRanks())
        wire = Wire(server, ranks)

        def run(schedule: Schedule) -> Outcome:
            ranks.renew()
            return wire.run(schedule)

        yield run


def be_quiet() -> None:
    """Silence what thousands of failing saves would say."""
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    sys.setswitchinterval(0.001)  # server and clients are threads of one process


# Workers -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Done:
    """What a worker tells of one schedule.

    Attributes:
        schedule: As text.
        fired: The faults that happened, as text.
        finding: The shrunk schedule's text, its problems and its log, if promises were broken.
    """

    schedule: str
    fired: tuple[Fault, ...]
    finding: tuple[str, tuple[str, ...], tuple[str, ...]] | None = None


@dataclass(frozen=True, slots=True)
class _Failed:
    traceback: str


def work(kind: str, seed: str, answers: Any, stop: Any) -> None:
    """Run schedules until told to stop. The body of a worker process."""
    be_quiet()
    parent = multiprocessing.parent_process()
    try:
        with runner_of(kind) as run:
            worker = _Worker(run, answers)
            batches = _batches(draws := AllDraws(kind, seed))
            with ThreadPoolExecutor(_NUM_THREADS if kind == "wire" else 1) as executor:
                while not stop.is_set() and (parent is None or parent.is_alive()):
                    outcomes = list(executor.map(run, next(batches)))
                    for outcome in outcomes:
                        draws.note(outcome.schedule, outcome.fired)
                    worker.tell(outcomes)
    except BaseException:
        answers.put(_Failed(traceback.format_exc()))
        raise


def _batches(draws: AllDraws) -> Iterator[list[Schedule]]:
    """Yield schedules; those with a helper process, which starts slowly, one after another."""
    slow: list[Schedule] = []
    while True:
        drawn = [draws.next() for _ in range(_BATCH)]
        slow += [one for one in drawn if "process" in one.flags]
        yield [one for one in drawn if "process" not in one.flags]
        if len(slow) >= _BATCH:
            yield slow
            slow = []


class _Worker:
    def __init__(self, run: Runner, answers: Any) -> None:
        self._run = run
        self._answers = answers
        self._num_of: Counter[str] = Counter()

    def tell(self, outcomes: Sequence[Any]) -> None:
        self._answers.put(
            [
                Done(
                    str(one.schedule),
                    tuple(one.fired),
                    self._finding(one) if one.problems else None,
                )
                for one in outcomes
            ]
        )

    def _finding(self, outcome: Any) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
        sort = re.sub(r"[0-9a-f]{16}|\d+", "#", " ".join(outcome.problems))[:120]
        self._num_of[sort] += 1
        if self._num_of[sort] <= _MAX_SHRUNK:
            small = shrink(outcome.schedule, lambda one: bool(self._run(one).problems), max_runs=40)
            again = self._run(small)
            outcome = again if again.problems else outcome
        return str(outcome.schedule), tuple(outcome.problems), tuple(outcome.log)


# The whole ---------------------------------------------------------------------------------------


def run_kind(kind: str, wanted: int, args: argparse.Namespace, until: float, table: Table) -> None:
    """Run schedules of a kind until so many distinct ones have fired, or time is over."""
    context = multiprocessing.get_context("spawn")
    answers, stop = context.Queue(), context.Event()
    workers = [
        context.Process(target=work, args=(kind, f"{args.seed} {kind} {number}", answers, stop))
        for number in range(args.workers)
    ]
    for worker in workers:
        worker.start()
    began, shown = time.monotonic(), 0.0
    try:
        while table.num_of(kind) < wanted and time.monotonic() < until:
            _take(answers, table, timeout_s=2.0)
            if args.first and table.findings:
                break
            if not any(worker.is_alive() for worker in workers):
                raise RuntimeError(f"the workers of {kind} have ended")
            if time.monotonic() - shown > 15:
                shown = time.monotonic()
                num, took = table.num_of(kind), shown - began
                _say(
                    f"{kind}: {num:,} of {wanted:,} in {took:.0f} s, {len(table.findings)} findings"
                )
    finally:
        stop.set()
        while any(worker.is_alive() for worker in workers) and time.monotonic() < until + 120:
            _take(answers, table, timeout_s=0.2)
        for worker in workers:
            worker.kill()
            worker.join()
    seconds = time.monotonic() - began
    table.runs.append(
        {
            "kind": kind,
            "seed": args.seed,
            "workers": args.workers,
            "seconds": round(seconds, 1),
            "fired": table.num_of(kind),
            "torch": str(torch.__version__),
        }
    )


def _take(answers: Any, table: Table, *, timeout_s: float) -> None:
    try:
        batch = answers.get(timeout=timeout_s)
    except queue.Empty:
        return
    if isinstance(batch, _Failed):
        raise RuntimeError(f"a worker failed:\n{batch.traceback}")  # noqa: TRY004 - no wrong type
    for done in batch:
        schedule = parse(done.schedule)
        table.add(schedule, done.fired)
        if done.finding is not None:
            small, problems, log = done.finding
            table.add_finding(parse(small), schedule, problems)
            if len(table.findings) <= 40:
                _say("\n".join(["FINDING", small, *(f"  {one}" for one in problems), *log]))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_one(text: str) -> bool:
    """Run one schedule and tell all about it; whether it kept every promise."""
    schedule = parse(text)
    with runner_of(kind_of(schedule)) as run:
        outcome = run(schedule)
    print("\n".join([str(schedule), *outcome.log]))
    print("fired:", *map(str, outcome.fired))
    print("\n".join(outcome.problems) or "every promise was kept")
    return not outcome.problems


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1 if a promise was broken, 2 if there were too few schedules."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    for kind in KINDS:
        parser.add_argument(f"--{kind}", type=int, default=0, help="distinct schedules that fired")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=180.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a JSON file with all that was counted")
    parser.add_argument("--one", action="append", default=[], help="a schedule's text")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], help="files of other runs")
    parser.add_argument("--first", action="store_true", help="stop at the first finding")
    parser.add_argument("--mutants", nargs="*", help="take repairs back; see campaign.mutants")
    args = parser.parse_args(arguments)
    be_quiet()
    if args.mutants is not None:
        return 0 if check_mutants(args.mutants, args.seed, args.workers) else 1
    if args.one:
        are_kept = [run_one(text) for text in args.one]
        return 0 if all(are_kept) else 1
    table = Table.merged(args.merge)
    began = time.monotonic()
    wanted = {kind: getattr(args, kind) for kind in KINDS}
    for kind, number in wanted.items():
        if number and not (args.first and table.findings):
            until = began + 60 * args.minutes * _SHARES[kind]
            run_kind(kind, number, args, until, table)
    return _conclude(table, wanted, args.out)


def _conclude(table: Table, wanted: dict[str, int], out: Path | None) -> int:
    if out is not None:
        out.write_text(table.to_json())
    print(table.markdown())
    for run in table.runs:
        print(f"{run['kind']}: seed {run['seed']}, {run['fired']:,} in {run['seconds']:,.0f} s")
    short = [
        f"{operation} x {kind}: {n}" for operation, kind, n in table.short_cells(LEAST_IN_CELL)
    ]
    if short:
        print(f"{len(short)} cells with fewer than {LEAST_IN_CELL}:", "; ".join(short))
    kinds_of_finding = Counter(
        (one["schedule"], one["problems"][0][:200]) for one in table.findings
    )
    for (schedule, problem), number in kinds_of_finding.most_common(40):
        print(f"FINDING ({number}): {schedule}\n    {problem}")
    if table.findings:
        print(f"{len(table.findings)} findings")
        return 1
    return 2 if any(table.num_of(kind) < number for kind, number in wanted.items()) else 0
