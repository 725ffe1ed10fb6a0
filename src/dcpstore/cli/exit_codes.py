"""What the process says to a script when it ends."""

from __future__ import annotations

from enum import IntEnum

from dcpstore.errors import (
    AlreadyExistsError,
    CommitUnknownError,
    ConfigError,
    ConflictError,
    CorruptError,
    IncompatibleError,
    NotFoundError,
    RankFailures,
    StoreError,
)

__all__ = ["ExitCode", "exit_code_of"]


class ExitCode(IntEnum):
    """Exit codes, the same for all commands. Documented in ``docs/cli.md``; never renumbered."""

    OK = 0
    FINDING = 1
    USAGE = 2
    NOT_FOUND = 3
    DENIED = 4
    STORE_FAILED = 5
    EXISTS = 6
    INCOMPATIBLE = 7
    UNKNOWN_OUTCOME = 8
    INTERNAL = 70
    INTERRUPTED = 130
    BROKEN_PIPE = 141
    TERMINATED = 143


MEANINGS = {
    ExitCode.OK: "done, and nothing is wrong",
    ExitCode.FINDING: "done, and something is: corrupt bytes, a difference, a failed check",
    ExitCode.USAGE: "the command line, a URL or an option is wrong; nothing was done",
    ExitCode.NOT_FOUND: "there is no such checkpoint, bucket or key",
    ExitCode.DENIED: "the store refused: credentials missing, wrong or insufficient",
    ExitCode.STORE_FAILED: "the store, the network or the local disk failed; try again",
    ExitCode.EXISTS: "the target exists, or somebody changed it meanwhile; it was kept",
    ExitCode.INCOMPATIBLE: "checkpoint and target, or this version of dcpstore, do not fit",
    ExitCode.UNKNOWN_OUTCOME: "the last answer was lost: old or new, whole in either case",
    ExitCode.INTERNAL: "a bug in dcpstore; --debug shows where",
    ExitCode.INTERRUPTED: "ctrl-C",
    ExitCode.BROKEN_PIPE: "the reader of the output went away (| head)",
    ExitCode.TERMINATED: "SIGTERM",
}
"""What each code means, for help and documentation."""

_OF_ERRORS: tuple[tuple[type[BaseException], ExitCode], ...] = (
    (CorruptError, ExitCode.FINDING),
    (ConfigError, ExitCode.USAGE),
    (NotFoundError, ExitCode.NOT_FOUND),
    (StoreError, ExitCode.STORE_FAILED),
    (AlreadyExistsError, ExitCode.EXISTS),
    (ConflictError, ExitCode.EXISTS),
    (IncompatibleError, ExitCode.INCOMPATIBLE),
    (CommitUnknownError, ExitCode.UNKNOWN_OUTCOME),
    (OSError, ExitCode.STORE_FAILED),
    (KeyboardInterrupt, ExitCode.INTERRUPTED),
)


def exit_code_of(error: BaseException) -> ExitCode:
    """Return the code for an error that ended a command."""
    if isinstance(error, RankFailures):
        causes = [exit_code_of(cause) for cause in error.exceptions.values()]
        return causes[0] if causes else ExitCode.STORE_FAILED
    if isinstance(error, StoreError) and error.denied:
        return ExitCode.DENIED
    for kind, code in _OF_ERRORS:
        if isinstance(error, kind):
            return code
    return ExitCode.INTERNAL
