"""What a command says, and where.

Standard output carries the result and nothing else: lines for people, or one JSON document
with ``--json``. Everything on the way (notes, warnings, progress, errors) goes to standard
error: as text, or as one JSON object a line with ``--json``. What does not print is escaped, since
names in a bucket are anybody's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from dcpstore.cli.exit_codes import ExitCode
from dcpstore.errors import CheckpointError
from dcpstore.progress import Progress, ProgressCallback
from dcpstore.text import printable, size_text

__all__ = ["Output"]

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

    @property
    def is_terminal(self) -> bool:
        """Whether a person looks at the result."""
        return self.stdout.isatty()

    def hide(self, secrets: Iterable[str]) -> None:
        """Blank these texts out of all that goes to standard error from now on."""
        self._secrets.update(text for text in secrets if len(text) >= _MIN_SECRET_LENGTH)

    def result(self, schema: str, document: Mapping[str, Any], lines: Iterable[str]) -> None:
        """Print the result. Called once per command.

        Args:
            schema: Name and version of the document's form, such as ``"dcpstore.ls/1"``.
            document: What ``--json`` prints: plain JSON values, keys in their order.
            lines: What is printed otherwise; not looked at with ``--json``.
        """
        if self.as_json:
            text = json.dumps(
                {"schema": schema, **document}, indent=2 if self.is_terminal else None
            )
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
            if value is not None and isinstance(error, CheckpointError):
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
            with self._bar(action) as show:
                yield show
        else:
            yield self._lines(action)

    @contextmanager
    def _bar(self, action: str) -> Iterator[ProgressCallback]:
        from tqdm import tqdm

        with tqdm(
            desc=action,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            leave=False,
            file=self.stderr,
        ) as bar:

            def show(state: Progress) -> None:
                bar.total = max(state.total_bytes, state.done_bytes)
                bar.update(state.done_bytes - bar.n)

            yield show

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
    if isinstance(error, CheckpointError):
        return error.message
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if code is ExitCode.INTERNAL:
        return f"a bug in dcpstore: {type(error).__name__}: {error} (--debug shows where)"
    return str(error)
