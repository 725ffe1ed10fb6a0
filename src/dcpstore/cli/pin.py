"""``dcpstore pin``: a step that stays."""

from __future__ import annotations

import argparse

from dcpstore.cli.connection import add_connection_arguments, read_connection
from dcpstore.cli.output import ExitCode, Output
from dcpstore.manager.policies import step_of_folder
from dcpstore.manager.run import Run

DESCRIPTION = """\
Pin a step of a run: neither `dcpstore retain` nor the job that trains deletes it, whatever their
policies say, until it is unpinned. The pin is an object in the run's own folder, so that it holds
for every machine."""

EXAMPLES = """\
dcpstore pin s3://bucket/run 10000
dcpstore ls s3://bucket/run --long           # shows which steps are pinned"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("url", metavar="RUN_URL", help="URL or local folder of a run")
    parser.add_argument("step", metavar="STEP", type=_read_step, help="such as 100 or step-100")
    add_connection_arguments(parser)


def run(args: argparse.Namespace, out: Output) -> ExitCode:
    """Pin; see `dcpstore.manager.run.Run.pin`."""
    return change(args, out, pinned=True)


def change(args: argparse.Namespace, out: Output, *, pinned: bool) -> ExitCode:
    """Pin a step, or leave it to the policies again."""
    connection = read_connection(args, args.url, out)
    with Run(connection.url, connection.storage_options, connection.config) as at:
        if pinned:
            at.pin(args.step)
        else:
            at.unpin(args.step)
    line = f"step {args.step} of {at.url} is {'' if pinned else 'not '}pinned"
    document = {"url": at.url, "step": args.step, "pinned": pinned}
    out.result("dcpstore.pin/1", document, [line])
    return ExitCode.OK


def _read_step(text: str) -> int:
    step = step_of_folder(text)
    if step is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no step: write 100 or step-100")
    return step
