"""From the command line to a command, and from its end to an exit code.

Ctrl-C and SIGTERM end a command promptly and cleanly. Python runs a signal's handler in the main
thread, between two of its own instructions. A thread that waits inside a foreign library for an
answer that does not come is not there for minutes:

1. the handler raises in the main thread, which cleans up and ends as after any error
2. if the main thread did not come to that within `GRACE_S`, it waits in such a call: a second
   thread, told of the signal through a pipe, ends the process. A put that is under way then
   publishes its object or does not, as after a crash; it never publishes a part of one
3. a second signal ends the process at once

The module of each command keeps to this:

1. ``dcpstore NAME ...`` imports ``dcpstore.cli.NAME`` and no other command.
2. `Command.add_arguments` adds to the command's parser.
3. `Command.run` calls the library, prints through its `Output`, and returns an exit code.

What is slow to import (torch above all) is imported inside `Command.run`.
"""

from __future__ import annotations

import argparse
import importlib
import io
import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn, Protocol, TextIO, cast

from dcpstore.cli.output import ExitCode, Output, exit_code_of
from dcpstore.errors import ConfigError

GRACE_S = 2.0
"""Longer than any instruction of Python's own takes."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def answer_signals(
    message: str, *, grace_s: float = GRACE_S, end: Callable[[int], object] = os._exit
) -> None:
    """Answer SIGINT and SIGTERM from now on. Call it once, in the main thread.

    SIGINT raises KeyboardInterrupt, SIGTERM raises SystemExit with 143.

    Args:
        message: What to write on standard error if ctrl-C has to end the process.
        grace_s: Seconds that the main thread has to answer.
        end: Ends the process with an exit code, cleaning up nothing.
    """
    was_heard = threading.Event()

    def answer(number: int, _: FrameType | None) -> NoReturn:
        was_heard.set()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    told, tell = os.pipe()
    os.set_blocking(tell, False)
    for number in _SIGNALS:
        signal.signal(number, answer)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)

    def end_unheard(number: int) -> None:
        if number == signal.SIGINT:
            os.write(2, message.encode())
        end(128 + number)

    def watch() -> None:
        number = _next_signal(told)
        if not was_heard.wait(grace_s):
            end_unheard(number)
        end(128 + _next_signal(told))

    threading.Thread(target=watch, name="dcpstore-signals", daemon=True).start()


def _next_signal(told: int) -> int:
    while True:
        for number in os.read(told, 64):
            if number in _SIGNALS:
                return number


SUMMARIES = {
    "ls": "list the checkpoints below a URL",
    "show": "show the tensors of a checkpoint and where they lie",
    "verify": "check every object and block of a checkpoint",
    "diff": "compare two checkpoints, by checksum where that tells",
    "retain": "choose which checkpoints of a run stay, and delete the others",
    "pin": "keep a checkpoint of a run whatever the policies say",
    "unpin": "leave a pinned checkpoint to the policies again",
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


_DESCRIPTION = "Look into, check, convert and move PyTorch distributed checkpoints in any bucket."
_EXAMPLES = """\
dcpstore demo                               # all of it on this machine, no account needed
dcpstore ls s3://bucket/run                 # the checkpoints of a run
dcpstore COMMAND --help                     # more on one command, with examples"""


def entry() -> NoReturn:
    """Run the command that the process was started with."""
    text = io.StringIO()
    interrupt = Output(io.StringIO(), text, as_json="--json" in sys.argv)
    interrupt.error(KeyboardInterrupt(), ExitCode.INTERRUPTED)
    answer_signals(text.getvalue())
    sys.exit(main())


def main(
    arguments: Sequence[str] | None = None,
    *,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    load: Callable[[str], Command] = load_command,
) -> int:
    """Run one command and return its exit code.

    Args:
        arguments: Without the program's name; None for those of the process.
        stdout: Takes the result; None for the process's own.
        stderr: Takes everything else; None for the process's own.
        load: Imports a command by its name.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    out = Output(stdout or sys.stdout, stderr or sys.stderr, as_json="--json" in given)
    is_debugging = "--debug" in given
    handler = _LogHandler(out)
    logging.getLogger("dcpstore").addHandler(handler)
    try:
        code = _run(given, out, load)
        out.stdout.flush()
    except BrokenPipeError:
        _forget(out.stdout)
        code = ExitCode.BROKEN_PIPE
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the edge of the program
        code = exit_code_of(error)
        if is_debugging:
            out.traceback(traceback.format_exc())
        out.error(error, code)
    finally:
        logging.getLogger("dcpstore").removeHandler(handler)
    return int(code)


class _Help(Exception):
    """Help is all that was asked for; its text."""


class _Parser(argparse.ArgumentParser):
    """A parser that leaves the end of the process to `main`."""

    def error(self, message: str) -> NoReturn:
        # What follows a "=" may be the secret of a mistyped --storage-option.
        text = re.sub(r"=\S+", "=...", message)
        raise ConfigError(f"{text}. See {self.prog} --help")

    def print_help(self, file: object = None) -> NoReturn:  # noqa: ARG002 - argparse's own form
        raise _Help(self.format_help())


class _LogHandler(logging.Handler):
    """Shows the library's warnings as the command's own."""

    def __init__(self, out: Output) -> None:
        super().__init__(logging.WARNING)
        self._out = out

    def emit(self, record: logging.LogRecord) -> None:
        self._out.warning(record.getMessage())


def _run(given: Sequence[str], out: Output, load: Callable[[str], Command]) -> ExitCode:
    name = next((word for word in given if not word.startswith("-")), None)
    command = load(name) if name in SUMMARIES else None
    parser = _make_parser(name, command)
    try:
        args = parser.parse_args(given)
    except _Help as text:
        out.stdout.write(str(text))
        return ExitCode.OK
    out.quiet = getattr(args, "quiet", False)
    if args.version:
        from importlib.metadata import version

        out.stdout.write(f"dcpstore {version('dcpstore')}\n")
        return ExitCode.OK
    if command is None:
        out.stderr.write(parser.format_help())
        return ExitCode.USAGE
    return command.run(args, out)


def _make_parser(name: str | None, command: Command | None) -> _Parser:
    parser = _Parser(
        prog="dcpstore",
        description=_DESCRIPTION,
        epilog=_epilog(_EXAMPLES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    _add_common(parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for known, summary in SUMMARIES.items():
        chosen = command if known == name else None
        inner = commands.add_parser(
            known,
            help=summary,
            description=chosen.DESCRIPTION if chosen else None,
            epilog=_epilog(chosen.EXAMPLES) if chosen else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if chosen is not None:
            chosen.add_arguments(inner)
            _add_common(inner)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    """Add what holds before and after the name of a command alike."""
    group = parser.add_argument_group("output")
    options = {
        "--json": "print one JSON document; errors as JSON on standard error",
        "--quiet": "no notes and no progress",
        "--debug": "show the traceback of an error",
    }
    for option, text in options.items():
        # Suppressed, or the default after the command would undo what stands before it.
        group.add_argument(option, action="store_true", default=argparse.SUPPRESS, help=text)


def _epilog(examples: str) -> str:
    lines = "\n".join(f"  {line}" for line in examples.splitlines())
    codes = "\n".join(f"  {int(code):>3}  {code.meaning}" for code in ExitCode)
    return f"examples:\n{lines}\n\nexit codes:\n{codes}"


def _forget(stream: TextIO) -> None:
    """Send to nowhere what Python would still flush into a closed pipe when it ends."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
