"""What was tried: how many distinct schedules fired a fault, per cell of operation and fault."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from campaign.schedule import FAULT_CELLS, GLOO, OPERATIONS, VERBS, Fault, Schedule

_KINDS_OF_TRANSPORT = {**dict.fromkeys(GLOO, "gloo"), **dict.fromkeys(VERBS, "verbs")}


@dataclass
class Table:
    """Counts distinct schedules whose fault fired.

    Attributes:
        cells: By operation and row of `FAULT_CELLS`.
        transports: By transport.
        entries: By entry and number of ranks.
        findings: What went wrong: the shrunk schedule's text and what happened.
        num_run: Schedules that were run, those included whose fault did not fire.
    """

    cells: Counter[tuple[str, str]] = field(default_factory=Counter)
    transports: Counter[str] = field(default_factory=Counter)
    entries: Counter[str] = field(default_factory=Counter)
    findings: list[dict[str, Any]] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    num_run: int = 0
    _marks: dict[str, str] = field(default_factory=dict)

    def add(self, schedule: Schedule, fired: Iterable[Fault]) -> bool:
        """Count a schedule that was run; whether it was a new one whose fault fired."""
        self.num_run += 1
        kinds = sorted({fault.cell for fault in fired})
        mark = hashlib.sha256(str(schedule).encode()).hexdigest()[:16]
        if not kinds or mark in self._marks:
            return False
        entry = f"{schedule.entry} x{schedule.ranks}"
        self._count(mark, "|".join([schedule.operation, schedule.transport, entry, *kinds]))
        return True

    def add_finding(self, schedule: Schedule, original: Schedule, problems: Iterable[str]) -> None:
        """Keep what went wrong."""
        self.findings.append(
            {"schedule": str(schedule), "drawn": str(original), "problems": list(problems)}
        )

    def _count(self, mark: str, what: str) -> None:
        self._marks[mark] = what
        operation, transport, entry, *kinds = what.split("|")
        self.cells.update((operation, kind) for kind in kinds)
        self.transports[transport] += 1
        self.entries[entry] += 1

    def merge(self, other: Table) -> None:
        """Add what another run counted; a schedule that both ran counts once."""
        for mark, what in other._marks.items():
            if mark not in self._marks:
                self._count(mark, what)
        self.findings += other.findings
        self.runs += other.runs
        self.num_run += other.num_run

    @property
    def num_fired(self) -> int:
        """Distinct schedules whose fault fired."""
        return len(self._marks)

    def num_of(self, kind: str) -> int:
        """Return how many of them were ``wire``, ``gloo`` or ``verbs``."""
        return sum(
            num
            for transport, num in self.transports.items()
            if _KINDS_OF_TRANSPORT.get(transport, "wire") == kind
        )

    def short_cells(self, least: int) -> list[tuple[str, str, int]]:
        """Return the cells with fewer schedules than that."""
        return [
            (operation, kind, self.cells[operation, kind])
            for operation in OPERATIONS
            for kind in FAULT_CELLS
            if self.cells[operation, kind] < least
        ]

    def markdown(self) -> str:
        """Return the table of cells, and the totals."""
        lines = [
            "| fault | " + " | ".join(OPERATIONS) + " |",
            "| --- |" + " ---: |" * len(OPERATIONS),
        ]
        for kind in FAULT_CELLS:
            numbers = [f"{self.cells[operation, kind]:,}" for operation in OPERATIONS]
            lines.append(f"| {kind} | " + " | ".join(numbers) + " |")
        lines += ["", "| over | distinct schedules whose fault fired |", "| --- | ---: |"]
        lines += [f"| {name} | {num:,} |" for name, num in sorted(self.transports.items())]
        lines += [f"| all | {self.num_fired:,} |"]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return everything as JSON, from which `from_json` makes the table again."""
        return json.dumps(
            {
                "num_run": self.num_run,
                "num_fired": self.num_fired,
                "cells": {f"{op} {kind}": num for (op, kind), num in sorted(self.cells.items())},
                "transports": dict(self.transports),
                "entries": dict(self.entries),
                "runs": self.runs,
                "findings": self.findings,
                "marks": self._marks,
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> Table:
        """Read a table."""
        read = json.loads(text)
        table = cls(findings=read["findings"], runs=read["runs"], num_run=read["num_run"])
        for mark, what in read["marks"].items():
            table._count(mark, what)
        return table

    @classmethod
    def merged(cls, paths: Iterable[Path]) -> Table:
        """Read several tables into one."""
        table = cls()
        for path in paths:
            table.merge(cls.from_json(path.read_text()))
        return table
