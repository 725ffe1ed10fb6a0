"""Runs inputs in children, replaces those that die, and shrinks what is found."""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_WALL_SECONDS = 120.0  # of an input that waits instead of computing
_MAX_SHRINK_RUNS = 300


class Child:
    """A process of `campaign.fuzz.child`, started anew whenever it has died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def ask(self, parser: str, seed: str, **others: Any) -> dict[str, Any]:
        process = self._started()
        assert process.stdin is not None
        process.stdin.write(json.dumps({"parser": parser, "seed": seed, **others}) + "\n")
        process.stdin.flush()
        answer = self._line(process)
        if answer is not None:
            return answer
        code = process.poll()
        self.close()
        if code is None:
            return {"outcome": "finding", "what": f"no answer for {_WALL_SECONDS:.0f} s"}
        if code == -signal.SIGPROF:
            return {"outcome": "finding", "what": "more than 5 s of CPU"}
        return {"outcome": "finding", "what": f"the process ended with {code}"}

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("child.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            if self._line(self._process) is None:
                raise RuntimeError("a child did not start")
        return self._process

    @staticmethod
    def _line(process: subprocess.Popen[str]) -> dict[str, Any] | None:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], _WALL_SECONDS)
        line = process.stdout.readline() if ready else ""
        if not line:
            if ready:
                process.wait()
            return None
        return dict(json.loads(line))


@dataclass
class Finding:
    """An input that ended as none may.

    Attributes:
        parser: What it was given to.
        seed: What it was made from.
        what: How it ended.
        data: The shortest input found that ends so, too.
    """

    parser: str
    seed: str
    what: str
    data: bytes = b""


@dataclass
class Results:
    """Outcomes by parser, and findings."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, parser: str, outcome: str, finding: Finding | None) -> None:
        with self._lock:
            self.counts.setdefault(parser, Counter())[outcome] += 1
            if finding is not None:
                self.findings.append(finding)

    def table(self) -> str:
        outcomes = ["accepted", "CorruptError", "IncompatibleError", "NotFoundError", "finding"]
        rows = [f"{'parser':<18}{'inputs':>9}" + "".join(f"{one:>19}" for one in outcomes)]
        for parser, counts in sorted(self.counts.items()):
            cells = "".join(f"{counts[one]:>19,}" for one in outcomes)
            rows.append(f"{parser:<18}{sum(counts.values()):>9,}{cells}")
        return "\n".join(rows)


def run(jobs: Iterable[tuple[str, str]], results: Results, *, workers: int, shrinks: int) -> None:
    """Run inputs, named by parser and seed, and shrink the first few that fail."""
    source = _shared(iter(jobs))
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with Child() as child:
                for parser, seed in source:
                    answer = child.ask(parser, seed)
                    finding = None
                    if answer["outcome"] == "finding":
                        finding = Finding(parser, seed, answer["what"])
                        if len(results.findings) < shrinks:
                            finding.data = shrunk(child, finding)
                    results.add(parser, answer["outcome"], finding)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class _shared:
    """An iterator that several threads take from."""

    def __init__(self, inner: Iterator[tuple[str, str]]) -> None:
        self._inner = inner
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return self

    def __next__(self) -> tuple[str, str]:
        with self._lock:
            return next(self._inner)


def data_of(child: Child, parser: str, seed: str) -> bytes:
    """Return the input that a seed stands for, without parsing it."""
    answer = child.ask(parser, seed, wants_made=True)
    return base64.b64decode(answer.get("made", ""))


def shrunk(child: Child, finding: Finding) -> bytes:
    """Cut pieces out of an input for as long as it ends the same way."""
    best = data_of(child, finding.parser, finding.seed)
    kind = finding.what[:24]

    def still_fails(data: bytes) -> bool:
        text = base64.b64encode(data).decode()
        answer = child.ask(finding.parser, finding.seed, data=text)
        return answer["outcome"] == "finding" and answer["what"][:24] == kind

    num_runs, piece = 0, max(1, len(best) // 2)
    while piece and num_runs < _MAX_SHRINK_RUNS:
        at, has_shrunk = 0, False
        while at < len(best) and num_runs < _MAX_SHRINK_RUNS:
            shorter = best[:at] + best[at + piece :]
            num_runs += 1
            if still_fails(shorter):
                best, has_shrunk = shorter, True
            else:
                at += piece
        if not has_shrunk:
            piece //= 2
    return best
