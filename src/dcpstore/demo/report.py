"""What the demo concludes and how it prints it. Pure functions, no I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dcpstore.demo.job import JobReport
from dcpstore.store import ObjectInfo

MAX_RELATIVE_DIFFERENCE = 1e-5
MAX_NAMED_LEAVES = 5


@dataclass(frozen=True, slots=True)
class Check:
    """A claim and whether it held."""

    passed: bool
    claim: str

    def __str__(self) -> str:
        return f"{'PASS' if self.passed else 'FAIL'}  {self.claim}"


def check_restored_state(saved: JobReport, resumed: JobReport, num_ranks: int) -> Check:
    """Claim that loading gave the saved state, bit for bit."""
    wrong = _differing(saved.checkpoint_digest, resumed.checkpoint_digest)
    what = f"state loaded on {num_ranks} rank(s) is the state saved"
    if wrong or not saved.checkpoint_digest:
        return Check(passed=False, claim=f"{what}: differs in {_named(wrong)}")
    return Check(passed=True, claim=f"{what}: {len(saved.checkpoint_digest)} values, every bit")


def check_final_state(uninterrupted: JobReport, resumed: JobReport, num_ranks: int) -> Check:
    """Claim that the resumed job ended in the state of the uninterrupted one, bit for bit."""
    wrong = _differing(uninterrupted.final_digest, resumed.final_digest)
    what = f"state after the last step on {num_ranks} rank(s) is that of the uninterrupted job"
    if wrong:
        return Check(passed=False, claim=f"{what}: differs in {_named(wrong)}")
    return Check(passed=True, claim=f"{what}: every bit")


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


def object_table(objects: Sequence[ObjectInfo]) -> str:
    """List objects by name, with sizes and a total."""
    rows = [(found.key, f"{found.size_bytes:,}") for found in sorted(objects, key=lambda o: o.key)]
    total = sum(found.size_bytes for found in objects)
    rows.append((f"{len(objects)} objects, {format_bytes(total)}", f"{total:,}"))
    width = max(len(key) for key, _ in rows)
    return "\n".join(f"{key:<{width}}  {size:>12}" for key, size in rows)


def format_bytes(num_bytes: int) -> str:
    """Write a size in MB, as object stores bill it."""
    return f"{num_bytes / 1e6:.1f} MB"


def _differing(left: Mapping[str, str], right: Mapping[str, str]) -> list[str]:
    return sorted(path for path in {*left, *right} if left.get(path) != right.get(path))


def _named(paths: Sequence[str]) -> str:
    more = len(paths) - MAX_NAMED_LEAVES
    return ", ".join(paths[:MAX_NAMED_LEAVES]) + (f" and {more} more" if more > 0 else "")
