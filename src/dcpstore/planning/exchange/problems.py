"""What is wrong with the plans of a save, by key, chunk and rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dcpstore.errors import IncompatibleError

__all__ = ["PlanError", "Problem", "ProblemKind", "list_ranks"]

ProblemKind: TypeAlias = Literal["conflict", "bounds", "duplicate", "overlap", "gap"]
MAX_SHOWN = 16
_MAX_RANKS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Problem:
    """One reason why plans do not make a checkpoint.

    Attributes:
        kind: What rule was broken.
        fqn: The key it is about.
        ranks: Ranks that planned it, ascending; the first few of them where they are many.
        text: The whole story, key and ranks included.
    """

    kind: ProblemKind
    fqn: str
    ranks: tuple[int, ...]
    text: str


class PlanError(IncompatibleError):
    """The ranks' plans do not fit together; nothing was written.

    Args:
        problems: The first problems found.
        num_more: How many others there are.
    """

    def __init__(self, problems: Sequence[Problem], num_more: int = 0) -> None:
        self.problems = tuple(problems)
        lines = [f"  {problem.text}" for problem in self.problems]
        if num_more:
            lines.append(f"  ... and {num_more} more")
        super().__init__("the ranks' save plans do not fit together:\n" + "\n".join(lines))


def list_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0, 1, 2 and 13 more"."""
    shown = ", ".join(str(rank) for rank in ranks[:_MAX_RANKS_SHOWN])
    more = len(ranks) - _MAX_RANKS_SHOWN
    rest = f" and {more} more" if more > 0 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{rest}"
