"""``dcpstore unpin``: the end of a pin."""

from __future__ import annotations

import argparse

from dcpstore.cli.output import ExitCode, Output
from dcpstore.cli.pin import add_arguments, change

__all__ = ["DESCRIPTION", "EXAMPLES", "add_arguments", "run"]

DESCRIPTION = """\
Leave a pinned step of a run to the policies again. Deletes nothing but the pin; a step that is
not pinned is no error."""

EXAMPLES = """\
dcpstore unpin s3://bucket/run 10000"""


def run(args: argparse.Namespace, out: Output) -> ExitCode:
    """Unpin; see `dcpstore.manager.run.Run.unpin`."""
    return change(args, out, pinned=False)
