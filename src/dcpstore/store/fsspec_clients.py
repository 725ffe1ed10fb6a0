"""fsspec filesystems, made late, uncached, and anew in a forked child; and what they raise."""

from __future__ import annotations

import asyncio
import difflib
import errno
import inspect
import os
import threading
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import fsspec
from fsspec.asyn import sync
from fsspec.exceptions import FSTimeoutError

from dcpstore.errors import CheckpointError, ConfigError
from dcpstore.store.engine import (
    NEVER_BEGAN,
    NO_CREDENTIALS,
    Answer,
    Asked,
    from_answer,
    seconds_in,
    trimmed,
    with_python_reason,
)
from dcpstore.text import redact

if TYPE_CHECKING:
    from dcpstore.store.base import Location


_COMMON = {"use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache"}
# s3fs hands what it does not know to aiobotocore's session.
_SESSION = {"profile"}
_STRICT = {"s3": _SESSION, "gs": set(), "az": set(), "file": set(), "memory": set()}
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}


def check_option_names(location: Location, options: Mapping[str, Any]) -> None:
    """Reject options that the filesystem would swallow without effect.

    Only for the schemes whose classes are known here; any other filesystem is the
    judge of its own options.

    Raises:
        ConfigError: Naming the first unknown option and its nearest known name.
    """
    more = _STRICT.get(location.scheme)
    if more is None:
        return
    known = _known_options(_filesystem_class(location)) | _COMMON | more
    for name, value in options.items():
        if name.endswith("_kwargs") and not isinstance(value, Mapping | None):
            raise ConfigError(
                f"storage option {name!r} is a {type(value).__name__}, not a dictionary"
            )
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"storage option {name!r} means nothing to {location.scheme}:// stores{hint}"
        )


def _known_options(cls: type) -> set[str]:
    names: set[str] = set()
    # `object`'s signature is a text that is parsed, which Python 3.11 now and then fails at when
    # several threads do so at once (SystemError); it has no options anyway.
    for base in set(cls.__mro__) - {fsspec.AbstractFileSystem, object}:
        if "__init__" not in vars(base):
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        names |= {p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    return names - {"self"}


def _filesystem_class(location: Location) -> type:
    try:
        found: type = fsspec.get_filesystem_class(location.scheme)
    except (ImportError, ValueError) as error:
        package = _PACKAGES.get(location.scheme)
        what = f": pip install {package}" if package else f": {redact(str(error))}"
        raise ConfigError(
            f"{location.scheme}:// needs a package that is not installed{what}"
        ) from error
    return found


def sync_within(most_s: float, fs: Any, call: Any, *arguments: Any, **options: Any) -> Any:
    """Run a coroutine function on a filesystem's loop and cancel it when the time is over.

    Raises:
        TimeoutError: If it was.
    """
    return _timed(most_s, partial(sync, fs.loop, call), *arguments, **options)


def run_within(most_s: float, fs: Any, verb: str, *arguments: Any, **options: Any) -> Any:
    """Call a filesystem's verb; with a time-out where it works on an event loop.

    Raises:
        TimeoutError: If the time was over.
    """
    call = getattr(fs, verb)
    if verb not in vars(fs):  # fsspec sets there what it made of a coroutine
        return call(*arguments, **options)
    return _timed(most_s, call, *arguments, **options)


def _timed(most_s: float, call: Any, *arguments: Any, **options: Any) -> Any:
    try:
        return call(*arguments, timeout=most_s, **options)
    except FSTimeoutError as error:
        said = str(error.__cause__ or "") or f"no answer within {most_s:.1f} s"
        raise TimeoutError(said) from None


class FsspecClients:
    """Opens the filesystem of one location on first use in each process. Thread-safe.

    A listings cache would never see another node's checkpoint, and a shared instance
    would bring one with it, so both are off.

    Args:
        location: The root.
        options: The filesystem's own options.
        fixed: Options that this engine sets itself, over the user's.

    Raises:
        ConfigError: If the filesystem's package is missing or an option is unknown.
    """

    def __init__(
        self,
        location: Location,
        options: Mapping[str, Any],
        fixed: Mapping[str, Any] | None = None,
    ) -> None:
        check_option_names(location, options)
        self._location = location
        self._class = _filesystem_class(location)
        self._options = {
            **options,
            **(fixed or {}),
            "use_listings_cache": False,
            "skip_instance_cache": True,
        }
        self._open: dict[int, Any] = {}
        self._locks: dict[int, threading.Lock] = {}

    def get(self) -> Any:
        """Return this process's filesystem; a forked child gets one of its own."""
        pid = os.getpid()
        found = self._open.get(pid)
        if found is not None:
            return found
        # A lock per process: the parent's may have been held when it forked.
        with self._locks.setdefault(pid, threading.Lock()):
            if pid not in self._open:
                self._open[pid] = self._make()
            return self._open[pid]

    def close(self) -> None:
        """Drop the filesystem; a later `get` opens a new one."""
        self._open.pop(os.getpid(), None)

    def _make(self) -> Any:
        try:
            fs = self._class(**self._options)
        except (TypeError, ValueError, KeyError) as error:
            raise ConfigError(f"cannot open {self._location.url}: {redact(str(error))}") from None
        # s3fs repeats requests by itself, without jitter or a shared limit; ours do.
        if hasattr(fs, "retries"):
            fs.retries = 1
        return fs


_TRANSPORT_TYPES = frozenset(
    {"ClientError", "ClientPayloadError", "ClientOSError", "ServerDisconnectedError"}
    | {"ServerTimeoutError", "EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError"}
    | {"ConnectionClosedError", "HTTPClientError", "ResponseStreamingError", "IncompleteRead"}
    | {"ConnectionError", "FSTimeoutError", "ChecksumError", "IncompleteReadError"}
)
_IN_PROCESS = ("file://", "memory://")


def from_fsspec(asked: Asked, error: BaseException) -> CheckpointError:
    """Map an error of an fsspec filesystem: s3fs, gcsfs, a local one, or any other."""
    if isinstance(error, CheckpointError):
        return error
    if isinstance(error, TypeError) and "unexpected keyword" in str(error):
        return ConfigError(f"{asked}: a storage option is not valid: {trimmed(str(error))}")
    answer = _read_response(error) or _read_python_error(error)
    mapped = from_answer(asked, answer)
    if not asked.url.startswith(_IN_PROCESS) and not isinstance(mapped, ConfigError):
        # aiohttp sends a put again by itself when a connection that it had kept is closed. So the
        # answer may be that of a second attempt, and the first one was not answered.
        mapped.refused = False
    return mapped


def _read_response(error: BaseException) -> Answer | None:
    """Read the server's answer that botocore or gcsfs keeps with the error."""
    for one in (error, error.__cause__):
        response = getattr(one, "response", None)
        if isinstance(response, Mapping):
            return _read_botocore(response)
    code = getattr(error, "code", None)
    if isinstance(code, str) and code.isdigit():
        code = int(code)
    if isinstance(code, int) and 100 <= code < 600:
        return Answer(status=code, text=trimmed(str(getattr(error, "message", error))))
    return None


def _read_botocore(response: Mapping[str, Any]) -> Answer:
    meta = response.get("ResponseMetadata", {})
    said = response.get("Error", {})
    code = str(said.get("Code", "")) or None
    status = meta.get("HTTPStatusCode")
    after = meta.get("HTTPHeaders", {}).get("retry-after")
    return Answer(
        status=int(status) if status is not None else None,
        code=None if code is None or code.isdigit() else code,
        text=trimmed(str(said.get("Message", ""))),
        retry_after_s=seconds_in(after),
    )


def _read_python_error(error: BaseException) -> Answer:
    name, text = type(error).__name__, trimmed(str(error) or type(error).__name__)
    if name in NO_CREDENTIALS:
        return Answer(text=text, no_credentials=True)
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return Answer(status=404, text=text)
    if isinstance(error, FileExistsError):
        return Answer(status=412, text=text)
    # gcsfs makes a plain OSError of a 403, whose text is all it keeps.
    if isinstance(error, PermissionError) or text.startswith("Forbidden: "):
        return Answer(status=403, text=text)
    transport = (
        isinstance(error, TimeoutError | ConnectionError | EOFError | asyncio.TimeoutError)
        or any(base.__name__ in _TRANSPORT_TYPES for base in type(error).__mro__)
        or getattr(error, "errno", None) in (errno.EBUSY, errno.EAGAIN, errno.ETIMEDOUT, errno.EIO)
    )
    answer = Answer(
        text=f"{name}: {text}",
        is_transport=transport,
        never_began=getattr(error, "errno", None) in NEVER_BEGAN,
    )
    return with_python_reason(answer, error)
