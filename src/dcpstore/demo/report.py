"""What the demo concludes and how it prints it. Pure functions, no I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dcpstore.demo.job import JobReport
from dcpstore.text import names_text

MAX_RELATIVE_DIFFERENCE = 1e-5


@dataclass(frozen=True, slots=True)
class Check:
    """A claim and whether it held."""

    passed: bool
    claim: str

    def __str__(self) -> str:
        return f"{'PASS' if self.passed else 'FAIL'}  {self.claim}"


def check_restored_state(saved: JobReport, resumed: JobReport, num_ranks: int) -> Check:
    """Claim that loading gave the saved state, bit for bit."""
    what = f"state loaded on {num_ranks} rank(s) is the state saved"
    return _check_digests(what, saved.checkpoint_digest, resumed.checkpoint_digest)


def check_final_state(uninterrupted: JobReport, resumed: JobReport, num_ranks: int) -> Check:
    """Claim that the resumed job ended in the state of the uninterrupted one, bit for bit."""
    what = f"state after the last step on {num_ranks} rank(s) is that of the uninterrupted job"
    return _check_digests(what, uninterrupted.final_digest, resumed.final_digest)


def _check_digests(what: str, left: Mapping[str, str], right: Mapping[str, str]) -> Check:
    wrong = sorted(path for path in {*left, *right} if left.get(path) != right.get(path))
    if wrong or not left:
        return Check(passed=False, claim=f"{what}: differs in {names_text(wrong)}")
    return Check(passed=True, claim=f"{what}: {len(left)} values, every bit")


def check_losses(
    expected: Sequence[float], resumed: Sequence[float], num_ranks: int, *, exactly: bool
) -> Check:
    """Claim that the resumed losses repeat the expected ones.

    Args:
        expected: Losses of the uninterrupted job over the resumed steps.
        resumed: Losses of the resumed job.
        num_ranks: Ranks of the resumed job.
        exactly: Whether a difference in the last bits is a failure. On another number
            of ranks gradients are added in another order, so it need not be.
    """
    what = f"losses after resuming on {num_ranks} rank(s)"
    if len(expected) != len(resumed) or not expected:
        return Check(passed=False, claim=f"{what}: {len(resumed)} of {len(expected)} steps")
    if list(expected) == list(resumed):
        return Check(passed=True, claim=f"{what} are those of the uninterrupted job: every bit")
    differences = [abs(a - b) / abs(a) for a, b in zip(expected, resumed, strict=True)]
    difference = math.nan if any(map(math.isnan, differences)) else max(differences)
    return Check(
        passed=not exactly and difference <= MAX_RELATIVE_DIFFERENCE,
        claim=f"{what} differ by at most {difference:.1e} of their value",
    )


def loss_table(
    uninterrupted: Sequence[float], resumed: Mapping[str, Sequence[float]], first_step: int
) -> str:
    """Lay the loss curves side by side.

    Args:
        uninterrupted: Losses from step 0.
        resumed: Losses of the resumed jobs from ``first_step``, by column title.
        first_step: The step at which the checkpoint was taken.
    """
    width = max([len("uninterrupted"), *map(len, resumed)])
    lines = ["  ".join(["step", *(f"{title:>{width}}" for title in ["uninterrupted", *resumed])])]
    for step, loss in enumerate(uninterrupted):
        if step == first_step:
            lines.append(f"  -- checkpoint before step {step} --")
        cells = [f"{loss:.9f}"]
        for losses in resumed.values():
            at = step - first_step
            cells.append(f"{losses[at]:.9f}" if 0 <= at < len(losses) else "")
        lines.append("  ".join([f"{step:>4}", *(f"{cell:>{width}}" for cell in cells)]).rstrip())
    return "\n".join(lines)
