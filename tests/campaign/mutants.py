"""Does the campaign find what it is for? Each repair of the commit protocol is taken back in turn.

::

    python -m tests.campaign --mutants            # all of them
    python -m tests.campaign --mutants no-second-look

A mutant is a copy of the source in a temporary folder with one text replaced. One run of modest
size has to find a broken promise in each, and none in the copy that is not changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 3000


@dataclass(frozen=True, slots=True)
class Mutant:
    """One repair, taken back.

    Attributes:
        name: Of what is wrong.
        file: Below ``src/dcpstore``.
        old: Text that occurs there once.
        new: What stands there instead.
        run: How to find it, as arguments of the command line.
    """

    name: str
    file: str
    old: str
    new: str
    run: tuple[str, ...] = ("--wire", "400", "--verbs", "2500")


_VERBS = ("--verbs", "4000")
MUTANTS = (
    Mutant(
        "a-refused-look-reads-as-gone",
        "write/commit.py",
        "now = probe(self._store, self._key, denied_is_absent=False)",
        "now = probe(self._store, self._key, denied_is_absent=True)",
    ),
    Mutant(
        "every-put-counts-as-answered",
        "write/commit.py",
        "        if not error.refused:\n            self._is_unanswered = True",
        "        if False:\n            self._is_unanswered = True",
    ),
    Mutant(
        "a-server-error-did-nothing",
        "store/engine.py",
        "return 400 <= answer.status < 500 and",
        "return 400 <= answer.status and",
    ),
    Mutant(
        "only-the-last-attempt-counts",
        "store/retry.py",
        "is_unanswered = is_unanswered or not error.refused",
        "is_unanswered = not error.refused",
    ),
    Mutant(
        "no-second-look",
        "write/commit.py",
        "again, etag = self._look(data)",
        "again, etag = seen, None",
    ),
    Mutant(
        "a-refusal-is-believed-without-a-look",
        "write/commit.py",
        "            self._note(last, mode)\n",
        "            self._note(last, mode)\n"
        "            if isinstance(last, StoreError) and last.denied:\n"
        "                self.proof = Proof.REFUSED\n"
        "                raise last\n",
    ),
    Mutant(
        "own-metadata-cut-short-is-anothers",
        "write/commit.py",
        "            keys_named_in(self._store, now.data, key=self._key)\n        return now.seal",
        "            pass\n        return now.seal",
    ),
    Mutant(
        "other-bytes-are-another-object",
        "write/commit.py",
        "now.data == found.data or (found.etag is not None and now.etag in (None, found.etag))",
        "now.data == found.data",
    ),
    Mutant(
        "every-store-honours-preconditions",
        "store/base.py",
        '        if mode == "overwrite":\n            return False\n        return self.atomic',
        "        if mode:\n            return True\n        return self.atomic",
        _VERBS,
    ),
    Mutant(
        "any-rank-sweeps-what-may-be-sealed",
        "write/writer.py",
        "if not seal_begun or (leads and not self._is_seal_begun):",
        "if self._keys:",
    ),
    Mutant(
        "a-failed-seal-is-swept-without-proof",
        "write/writer.py",
        "            if sealer.proof is not None:\n"
        "                sweep(store, {*made, *sealer.made}, sealer.proof,",
        "            if made:\n"
        "                sweep(store, {*made, *sealer.made}, Proof.NOT_BEGUN,",
    ),
    Mutant(
        "prune-does-not-look-at-ages",
        "audit/prune.py",
        "    if newest > now_s - rules.older_than_s:",
        "    if newest > now_s + 1e12:",
    ),
    Mutant(
        "nobody-says-that-it-may-be-sealed",
        "saving.py",
        "        if failures.step == _SEAL:\n",
        "        if failures.step == _SEAL:\n            return\n        if failures.step:\n",
        (*_VERBS, "--gloo", "60"),
    ),
)


def check_mutants(names: Sequence[str], seed: int, workers: int) -> bool:
    """Run the campaign on each mutant; whether it found them all, and nothing without them."""
    chosen = [one for one in MUTANTS if not names or one.name in names]
    results = [_check(None, seed, workers)] if not names else []
    for mutant in chosen:
        results.append(_check(mutant, seed, workers))
    print("| taken back | found after |\n| --- | --- |")
    for name, is_right, said in results:
        print(f"| {name} | {said if is_right else 'WRONG: ' + said} |")
    return all(is_right for _, is_right, _ in results)


def _check(mutant: Mutant | None, seed: int, workers: int) -> tuple[str, bool, str]:
    name = mutant.name if mutant else "nothing"
    with tempfile.TemporaryDirectory(prefix="dcpstore-mutant-") as folder:
        source = Path(folder, "src")
        shutil.copytree(
            _ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
        if mutant is not None:
            apply(mutant, source)
        began = time.monotonic()
        size = mutant.run if mutant else ("--wire", "200", "--verbs", "1000")
        found = subprocess.run(
            [
                *(sys.executable, "-m", "tests.campaign", "--first", "--workers", str(workers)),
                *("--seed", str(seed), "--minutes", "8", *size),
            ],
            cwd=_ROOT,
            env={**os.environ, "PYTHONPATH": str(source)},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    seconds = time.monotonic() - began
    print(f"{name}: exit status {found.returncode} after {seconds:.0f} s", file=sys.stderr)
    if found.returncode not in (0, 1):
        return name, False, found.stderr[-500:]
    if mutant is None:
        return name, found.returncode == 0, f"nothing, {seconds:.0f} s"
    lines = [line for line in found.stdout.splitlines() if line.startswith("FINDING")]
    if not lines:  # an exit status of 1 may also be a traceback
        return name, False, f"{seconds:.0f} s, nothing found: {found.stderr[-500:]}"
    return name, True, f"{seconds:.0f} s, `{lines[0].partition(': ')[2]}`"


def apply(mutant: Mutant, source: Path) -> None:
    """Take a repair back in a copy of the source."""
    path = source / "dcpstore" / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: its text occurs {text.count(mutant.old)} times")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
