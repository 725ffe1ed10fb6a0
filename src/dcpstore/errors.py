"""The errors of dcpstore, grouped by what the caller does next.

Every class derives from `CheckpointError` (an `Exception`, unlike torch's
``CheckpointException``) and survives pickling, so that a rank can send its
failure to the others.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from typing import Any

from typing_extensions import Self

from dcpstore.text import listed, printable


class CheckpointError(Exception):
    """Base of all errors that dcpstore raises on purpose.

    Args:
        message: What failed, on which object, and what to do about it. What does not print in
            it is escaped, since names and servers' answers are part of it.
    """

    refused: bool = False
    """Whether every attempt of the request that failed was answered, and each answer said that
    the store did nothing. While it is False (no answer, or a 5xx), the request may have taken
    effect or may still do so."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, keep="\n"))

    @property
    def message(self) -> str:
        """The text the error was made with."""
        return str(self.args[0])

    def saying(self, message: str) -> Self:
        """Return the same error with another message."""
        other = copy.copy(self)
        other.args = (printable(message, keep="\n"),)
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


def _rebuild(
    cls: type[CheckpointError], args: tuple[Any, ...], state: dict[str, Any]
) -> CheckpointError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class NotFoundError(CheckpointError):
    """There is no such object, checkpoint, key or bucket. Check the name."""

    refused = True


class AlreadyExistsError(CheckpointError):
    """The target exists and the caller did not ask to replace it."""

    refused = True


class ConflictError(CheckpointError):
    """Somebody else changed the target meanwhile. Look at what is there, then decide."""

    refused = True


class CommitUnknownError(CheckpointError):
    """Whether the checkpoint was sealed could not be found out; nothing was deleted.

    The put that seals it was sent, and it was not answered, or what is there could not be read.
    The checkpoint is the old one or the new one, whole in either case.
    """


class AbandonedError(CheckpointError):
    """The save was given up before its seal: it was cancelled, or its time was over.

    Nothing was sealed, and what was written is deleted. Save again when there is time.
    """

    refused = True


class CorruptError(CheckpointError):
    """Stored bytes are not the bytes that were saved.

    Args:
        message: What was found and what was expected.
        key: The object, relative to the checkpoint's folder.
        start: First byte of the bad range inside the object.
        end: End (exclusive) of the bad range.
        fqn: The state-dict key the bytes belong to, where known.
    """

    def __init__(
        self,
        message: str,
        *,
        key: str | None = None,
        start: int | None = None,
        end: int | None = None,
        fqn: str | None = None,
    ) -> None:
        super().__init__(message)
        self.key = key
        self.start = start
        self.end = end
        self.fqn = fqn


class IncompatibleError(CheckpointError):
    """Checkpoint and target do not fit: a key, a shape, a dtype or a version."""


class ConfigError(CheckpointError):
    """The call itself is wrong: a URL, an option, a knob or a process that forked."""

    refused = True


class StoreError(CheckpointError):
    """The object store failed or refused.

    Args:
        message: What was asked, what was answered, what to do.
        key: The object concerned, relative to the store's root.
        retryable: Whether the same request may succeed if sent again.
        throttled: Whether the store asked for fewer requests (429, 503).
        retry_after_s: Seconds the store asked to wait, where it said so.
        denied: Whether credentials are missing, wrong or insufficient.
        refused: Whether the store answered every attempt, each time that it did nothing.
        unreachable: Whether no connection came about, as the server's name does not resolve or
            nobody listens there, or it was closed without an answer. No proof that nothing was
            sent: an HTTP client may have sent the request over a connection that broke before it
            tried again.
    """

    def __init__(
        self,
        message: str,
        *,
        key: str | None = None,
        retryable: bool = False,
        throttled: bool = False,
        retry_after_s: float | None = None,
        denied: bool = False,
        refused: bool = False,
        unreachable: bool = False,
    ) -> None:
        super().__init__(message)
        self.key = key
        self.retryable = retryable
        self.throttled = throttled
        self.retry_after_s = retry_after_s
        self.denied = denied
        self.refused = refused
        self.unreachable = unreachable


class RankFailures(CheckpointError):
    """One or more ranks failed; every rank raises this same error.

    Args:
        step: The collective step that failed, such as ``"write"``.
        causes: Cause per failing rank (a rank of the group that ran the step), as text.
        tracebacks: The failing rank's own traceback as text, for ranks that raised rather than
            fell silent.
        pickled: The original exception of each rank where it pickles. Bytes, so that this
            error itself always pickles.
    """

    def __init__(
        self,
        step: str,
        causes: Mapping[int, str],
        *,
        tracebacks: Mapping[int, str] | None = None,
        pickled: Mapping[int, bytes] | None = None,
    ) -> None:
        self.step = step
        self.causes = dict(sorted(causes.items()))
        self.tracebacks = dict(tracebacks or {})
        self._pickled = dict(pickled or {})
        super().__init__(f"step {step!r} failed on {len(self.causes)} rank(s):\n{self._lines()}")

    @property
    def exceptions(self) -> dict[int, BaseException]:
        """The original exceptions, of those ranks whose exception pickles and unpickles here."""
        found: dict[int, BaseException] = {}
        for rank, data in self._pickled.items():
            try:
                error = pickle.loads(data)  # noqa: S301 - sent by a rank of this job
            except Exception:  # noqa: BLE001, S112 - whatever it raises, there is still its text
                continue
            if isinstance(error, BaseException):
                found[rank] = error
        return found

    def _lines(self) -> str:
        """One line per cause; ranks with the same cause share one."""
        ranks_of: dict[str, list[int]] = {}
        for rank, cause in self.causes.items():
            ranks_of.setdefault(cause, []).append(rank)
        lines = [f"  {_name_ranks(ranks)}: {cause}" for cause, ranks in ranks_of.items()]
        if len(lines) > _MAX_LINES:
            lines[_MAX_LINES:] = [f"  and {len(lines) - _MAX_LINES} other causes, see `causes`"]
        return "\n".join(lines)


_MAX_LINES = 64


def _name_ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(list(map(str, ranks)), 16)}"
