"""The commands, and what the module of each must have.

1. ``dcpstore NAME ...`` imports ``dcpstore.cli.NAME`` and no other command.
2. `Command.add_arguments` adds to the command's parser.
3. `Command.run` calls the library, prints through its `Output`, and returns an exit code.

What is slow to import (torch above all) is imported inside `Command.run`.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Protocol, cast

from dcpstore.cli.exit_codes import ExitCode
from dcpstore.cli.output import Output

__all__ = ["SUMMARIES", "Command", "load_command"]

SUMMARIES = {
    "ls": "list the checkpoints below a URL",
    "show": "show the tensors of a checkpoint and where they lie",
    "verify": "check every object and block of a checkpoint",
    "diff": "compare two checkpoints, by checksum where that tells",
    "prune": "find and delete what interrupted saves left",
    "doctor": "try every request of saves and loads, and say what to fix",
    "convert": "convert between checkpoints, safetensors and files of torch.save",
    "copy": "copy a checkpoint between folders, buckets and providers",
    "demo": "train, save to an emulated bucket, and resume elsewhere",
}
"""One line per command, kept here so that ``--help`` imports none of them."""


class Command(Protocol):
    """The module of a command."""

    DESCRIPTION: str
    """What it does, in whole sentences; the head of its help."""

    EXAMPLES: str
    """Command lines, one per line, each with a comment; the end of its help."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's own arguments; ``--json``, ``--quiet``, ``--debug`` are there."""

    def run(self, args: argparse.Namespace, out: Output) -> ExitCode:
        """Do it. Errors of the library end the command with the code of `exit_code_of`."""


def load_command(name: str) -> Command:
    """Import a command of `SUMMARIES`."""
    return cast("Command", importlib.import_module(f"dcpstore.cli.{name}"))
