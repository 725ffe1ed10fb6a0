"""What a command says and where: its result, its notes, its errors and its exit code.

Standard output carries the result and nothing else: lines for people, or one JSON document
with ``--json``. Everything on the way (notes, warnings, progress, errors) goes to standard
error: as text, or as one JSON object a line with ``--json``. What does not print is escaped, since
names in a bucket are anybody's.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from enum import IntEnum
from typing import Any, TextIO

from dcpstore import errors
from dcpstore.report import Progress, ProgressCallback, progress_bar
from dcpstore.text import age_text, printable, size_text


class ExitCode(IntEnum):
    """Exit codes, the same for all commands. Documented in ``docs/cli.md``; never renumbered.

    Attributes:
        meaning: For help and documentation.
    """

    meaning: str

    def __new__(cls, code: int, meaning: str) -> ExitCode:
        """Make a member of its number and its meaning."""
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member

    OK = 0, "done, and nothing is wrong"
    FINDING = 1, "done, and something is: corrupt bytes, a difference, a failed check"
    USAGE = 2, "the command line, a URL or an option is wrong; nothing was done"
    NOT_FOUND = 3, "there is no such checkpoint, bucket or key"
    DENIED = 4, "the store refused: credentials missing, wrong or insufficient"
    STORE_FAILED = 5, "the store, the network or the local disk failed; try again"
    EXISTS = 6, "the target exists, or another writer changed it meanwhile; it was kept"
    INCOMPATIBLE = 7, "checkpoint and target, or this version of dcpstore, do not fit"
    UNKNOWN_OUTCOME = 8, "the last answer was lost: old or new, whole in either case"
    INTERNAL = 70, "a bug in dcpstore; --debug shows where"
    INTERRUPTED = 130, "ctrl-C"
    BROKEN_PIPE = 141, "the reader of the output went away (| head)"
    TERMINATED = 143, "SIGTERM"


_OF_ERRORS: tuple[tuple[type[BaseException], ExitCode], ...] = (
    (errors.CorruptError, ExitCode.FINDING),
    (errors.ConfigError, ExitCode.USAGE),
    (errors.NotFoundError, ExitCode.NOT_FOUND),
    (errors.StoreError, ExitCode.STORE_FAILED),
    (errors.AlreadyExistsError, ExitCode.EXISTS),
    (errors.ConflictError, ExitCode.EXISTS),
    (errors.IncompatibleError, ExitCode.INCOMPATIBLE),
    (errors.CommitUnknownError, ExitCode.UNKNOWN_OUTCOME),
    (OSError, ExitCode.STORE_FAILED),
    (KeyboardInterrupt, ExitCode.INTERRUPTED),
)


def exit_code_of(error: BaseException) -> ExitCode:
    """Return the code for an error that ended a command."""
    if isinstance(error, errors.RankFailures):
        causes = [exit_code_of(cause) for cause in error.exceptions.values()]
        return causes[0] if causes else ExitCode.STORE_FAILED
    if isinstance(error, errors.StoreError) and error.denied:
        return ExitCode.DENIED
    for kind, code in _OF_ERRORS:
        if isinstance(error, kind):
            return code
    return ExitCode.INTERNAL


def format_age(when: datetime | None, now: datetime) -> str:
    """Return how long ago something was, such as ``3 d``; a dash where unknown."""
    if when is None:
        return "-"
    age_s = (now - when).total_seconds()
    return "now" if age_s < 1 else age_text(age_s)


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Return metrics in one line: ``loss=0.25 accuracy=0.9``; a dash if there are none."""
    return " ".join(f"{name}={value:g}" for name, value in metrics.items()) or "-"


def metrics_document(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """Return metrics for a document: NaN and infinity are no numbers of JSON, but texts."""
    return {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}


def _iso(when: datetime) -> str:
    """Return a time in ISO 8601 and UTC, for documents."""
    return when.astimezone(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")


def table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()
) -> Iterator[str]:
    """Yield the lines of a table with aligned columns.

    Args:
        header: Titles of the columns.
        rows: Their cells.
        right: Columns aligned to the right.
    """
    lines = [list(header), *(list(map(printable, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    to_right = frozenset(right)
    for line in lines:
        cells = (
            cell.rjust(width) if number in to_right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


_SECONDS_BETWEEN_LINES = 10.0
_MIN_SECRET_LENGTH = 4  # a shorter one would blank out half of every message


class Output:
    """The two streams of a command.

    Args:
        stdout: Takes the result.
        stderr: Takes everything else.
        as_json: Write JSON instead of lines for people.
        quiet: Leave out notes and progress; errors and warnings stay.
        clock: Monotonic seconds, for the pace of progress lines.
    """

    def __init__(
        self,
        stdout: TextIO,
        stderr: TextIO,
        *,
        as_json: bool = False,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stdout = stdout
        self.stderr = stderr
        self.as_json = as_json
        self.quiet = quiet
        self._clock = clock
        self._secrets: set[str] = set()

    def hide(self, secrets: Iterable[str]) -> None:
        """Blank these texts out of all that goes to standard error from now on."""
        self._secrets.update(text for text in secrets if len(text) >= _MIN_SECRET_LENGTH)

    def result(self, schema: str, document: Mapping[str, Any], lines: Iterable[str]) -> None:
        """Print the result. Called once per command.

        Args:
            schema: Name and version of the document's form, such as ``"dcpstore.ls/1"``.
            document: What ``--json`` prints: plain JSON values and times, keys in their order.
            lines: What is printed otherwise; not looked at with ``--json``.
        """
        if self.as_json:
            indent = 2 if self.stdout.isatty() else None
            text = json.dumps({"schema": schema, **document}, indent=indent, default=_iso)
            self.stdout.write(text + "\n")
        else:
            for line in lines:
                self.stdout.write(printable(line) + "\n")

    def line(self, text: str) -> None:
        """Print a line of a result that people watch as it comes. Not with ``--json``."""
        self.stdout.write(printable(text, keep="\n") + "\n")
        self.stdout.flush()

    def note(self, text: str) -> None:
        """Tell a person something on the way."""
        if not self.quiet and not self.as_json:
            self._say(text)

    def warning(self, text: str) -> None:
        """Tell what went on with less than was asked for."""
        self._say(json.dumps({"warning": text}) if self.as_json else f"warning: {text}")

    def error(self, error: BaseException, code: ExitCode) -> None:
        """Tell what ended the command, in one line; several for the failures of several ranks."""
        message = _message_of(error, code)
        if not self.as_json:
            self._say(f"dcpstore: {message}")
            return
        fields: dict[str, Any] = {"type": type(error).__name__, "exit_code": int(code)}
        for name in ("key", "start", "end", "fqn", "retryable"):
            value = getattr(error, name, None)
            if value is not None and isinstance(error, errors.CheckpointError):
                fields[name] = value
        self._say(json.dumps({"schema": "dcpstore.error/1", "error": message, **fields}))

    def traceback(self, text: str) -> None:
        """Show a traceback to whoever asked for it."""
        self._say(json.dumps({"traceback": text}) if self.as_json else text.rstrip())

    @contextmanager
    def progress(self, action: str) -> Iterator[ProgressCallback]:
        """Show how far a command is: a bar on a terminal, a line every 10 s elsewhere.

        Yields:
            What to call; the library's functions take it as their ``progress``.
        """
        if self.quiet or self.as_json:
            yield lambda _: None
        elif self.stderr.isatty():
            with progress_bar(action, self.stderr) as show:
                yield show
        else:
            yield self._lines(action)

    def _lines(self, action: str) -> ProgressCallback:
        last_s = self._clock()

        def show(state: Progress) -> None:
            nonlocal last_s
            now_s = self._clock()
            if now_s - last_s < _SECONDS_BETWEEN_LINES:
                return
            last_s = now_s
            total = max(state.total_bytes, state.done_bytes, 1)
            self._say(
                f"{action}: {size_text(state.done_bytes)} of {size_text(total)}"
                f" ({100 * state.done_bytes // total}%)"
            )

        return show

    def _say(self, text: str) -> None:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        self.stderr.write(printable(text, keep="\n") + "\n")
        self.stderr.flush()


def _message_of(error: BaseException, code: ExitCode) -> str:
    if isinstance(error, errors.CheckpointError):
        return error.message
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if code is ExitCode.INTERNAL:
        return f"a bug in dcpstore: {type(error).__name__}: {error} (--debug shows where)"
    return str(error)
