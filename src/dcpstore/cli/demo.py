"""``dcpstore demo``: the whole of it on one machine."""

from __future__ import annotations

import argparse
from typing import NoReturn

from dcpstore.cli.output import ExitCode, Output
from dcpstore.errors import ConfigError

DESCRIPTION = """\
Start an S3 server on this machine, train a small transformer under FSDP2 on four processes,
save it half way, load it into new jobs on two and on four processes, and compare every bit.
Needs no account, no GPU and no network; leaves nothing behind."""

EXAMPLES = """\
dcpstore demo                               # about a minute on two cores
dcpstore demo --keep-server                 # then look around with `dcpstore ls`
dcpstore demo --save-ranks 2 --load-ranks 1 --steps 6"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the demo."""
    from dcpstore.demo.run import add_arguments as add_demo_arguments

    add_demo_arguments(parser)


def run(args: argparse.Namespace, out: Output) -> ExitCode:
    """Run it; see `dcpstore.demo`."""
    from dcpstore.demo.launch import RanksError
    from dcpstore.demo.run import read_options, run_demo

    say = out.note if out.as_json else out.line
    try:
        checks = run_demo(read_options(args, _refuse), say)
    except RanksError as error:
        say(f"FAIL  {error}")
        return ExitCode.FINDING
    if out.as_json:
        found = [{"claim": check.claim, "passed": check.passed} for check in checks]
        out.result("dcpstore.demo/1", {"checks": found}, ())
    return ExitCode.OK if all(check.passed for check in checks) else ExitCode.FINDING


def _refuse(message: str) -> NoReturn:
    raise ConfigError(message)
