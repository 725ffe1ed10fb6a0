"""One check of a diagnosis, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Check", "Outcome", "Verdict"]

Outcome: TypeAlias = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a probe concluded.

    Attributes:
        detail: What was seen.
        outcome: What it means for saves and loads.
        advice: What to do about it; empty if nothing.
    """

    detail: str
    outcome: Outcome = "ok"
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """A check that was made, or could not be.

    Attributes:
        name: What was tried.
        needed_for: Which operations need it.
        outcome: ``ok``; ``warning``: saves and loads work, something else does not; ``failed``:
            what needs it will fail or is not safe; ``skipped``: it could not be tried.
        detail: What was seen.
        advice: What to do about it; empty if nothing.
        elapsed_s: Seconds it took.
    """

    name: str
    needed_for: str
    outcome: Outcome
    detail: str = ""
    advice: str = ""
    elapsed_s: float = 0.0

    def lines(self) -> Iterator[str]:
        """Yield the line of a table, and one more for the advice."""
        yield f"{self.outcome:<8} {self.name:<26} {self.needed_for:<18} {self.detail}"
        if self.advice:
            yield f"{'':<8} -> {self.advice}"
