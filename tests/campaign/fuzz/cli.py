"""The command: so many inputs from a seed, a table by parser, and the shrunk findings."""

from __future__ import annotations

import argparse
import base64
import sys
import time
import zlib
from collections.abc import Iterator, Sequence

from campaign.fuzz.runner import Finding, Results, run

NAMES = (
    "stock metadata",
    "our metadata",
    "our attachments",
    "safetensors",
    "index.json",
    "torch.save file",
    "value",
    "record head",
)
_MAX_SHRUNK, _MAX_SHOWN = 10, 40


def main(arguments: Sequence[str]) -> int:
    """Run the inputs; 1 if there is a finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="of all parsers together")
    parser.add_argument("--seed", type=int, default=None, help="the time, if there is none")
    parser.add_argument("--workers", type=int, default=2, help="child processes")
    parser.add_argument("--parser", choices=NAMES, action="append", help="only this one")
    parser.add_argument("--only", help="the seed of one finding, such as 5:123")
    given = parser.parse_args(arguments)
    seed = int(time.time()) if given.seed is None else given.seed
    names = tuple(given.parser or NAMES)
    results = Results()
    started = time.monotonic()
    jobs = jobs_of(seed, given.inputs, names)
    if given.only:
        jobs = iter([(name, given.only) for name in names])
    run(jobs, results, workers=given.workers, shrinks=_MAX_SHRUNK)
    seconds = time.monotonic() - started
    total = sum(sum(counts.values()) for counts in results.counts.values())
    print(results.table())
    print(
        f"{total:,} inputs from seed {seed} in {seconds:,.0f} s: {total / seconds:,.0f} per second"
    )
    for finding in results.findings[:_MAX_SHOWN]:
        print(describe(finding))
    return 1 if results.findings else 0


def jobs_of(seed: int, inputs: int, names: Sequence[str] = NAMES) -> Iterator[tuple[str, str]]:
    """Yield parser and seed of each input, the parsers in turn."""
    return ((names[number % len(names)], f"{seed}:{number}") for number in range(inputs))


def describe(finding: Finding) -> str:
    """Return what is needed to repeat a finding."""
    data = finding.data
    if len(data) > 400:
        packed = base64.b64encode(zlib.compress(data, 9)).decode()
        text = f"zlib.decompress(base64.b64decode({packed[:4000]!r}))"
    else:
        text = repr(data)
    return (
        f"\n{finding.parser}, --only {finding.seed}: {finding.what}\n    {len(data)} bytes: {text}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
