"""From a URL and fsspec-style options to an open store, and the folder of a checkpoint.

URLs are taken apart, checked, and shown without secrets.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal

from fsspec.registry import known_implementations, registry

from dcpstore.config import ReadConfig, WriteConfig
from dcpstore.errors import ConfigError
from dcpstore.store.base import Location, Store
from dcpstore.store.options import NotHonoured, check_connection
from dcpstore.store.retry import AdaptiveLimiter, RetryingStore, RetryPolicy
from dcpstore.text import redact

logger = logging.getLogger(__name__)

_ALIASES = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "azure": "az",
    "abfs": "az",
    "abfss": "az",
    "adl": "az",
    "file": "file",
    "local": "file",
    "memory": "memory",
}
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+)://(.*)$", re.DOTALL)
_MANGLED = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+):/*(.*)$", re.DOTALL)
Engine = Literal["auto", "obstore", "fsspec"]
# memory:// must be the same for all objects of a process, and obstore's is not.
_AUTO_OBSTORE = frozenset({"s3", "gs", "az", "file"})
_ALL_OBSTORE = _AUTO_OBSTORE | {"memory"}


def parse_location(url: str | os.PathLike[str]) -> Location:
    """Take a URL or a local path apart.

    Nothing is unquoted: ``%``, ``#`` and ``?`` in a URL are part of the key.

    Raises:
        ConfigError: If the URL is mangled (``s3:/bucket``), chained, carries
            credentials, names no bucket, or has a scheme nobody serves.
    """
    text = os.fspath(url)
    if not isinstance(text, str):
        raise ConfigError(f"a store URL is text, not {type(text).__name__}")
    if not text.strip():
        raise ConfigError("the store URL is empty: write s3://bucket/prefix or a local path")
    if "::" in text and "://" in text:
        raise ConfigError(f"chained URLs are not supported: {redact(text)!r}")
    match = _SCHEME.match(text)
    if match is None:
        _reject_mangled(text)
        return _local(text)
    scheme, rest = match.group(1).lower(), match.group(2)
    kind = _ALIASES.get(scheme)
    if kind == "file":
        return _local(rest)
    if kind is None:
        return _foreign(scheme, rest)
    return _remote(kind, rest, text)


def file_location(url: str | os.PathLike[str]) -> tuple[str, str]:
    """Split the URL or path of a file into its folder's URL and its key in it.

    Raises:
        ConfigError: If the URL names no file below a bucket or a folder, and as `parse_location`.
    """
    location = parse_location(url)
    folder, _, key = location.prefix.rpartition("/")
    is_foreign = not location.bucket and location.scheme not in ("file", "memory")
    if not key or (is_foreign and not folder):
        raise ConfigError(f"{location.url} names no file: write {location.url.rstrip('/')}/name")
    if location.scheme == "file":
        return f"file://{folder or '/'}", key
    if location.scheme == "memory":
        return f"memory://{folder}", key
    # Where Location.url leaves something out, as the user wrote it.
    is_whole = location.bucket and location.account is None
    text = location.url if is_whole else os.fspath(url)
    return text.rstrip("/")[: -len(key)].rstrip("/"), key


def _reject_mangled(text: str) -> None:
    match = _MANGLED.match(text)
    if match is None:
        return
    scheme, rest = match.group(1).lower(), match.group(2).lstrip("/")
    if scheme not in _ALIASES and scheme not in known_implementations:
        return
    raise ConfigError(
        f"{redact(text)!r} is not a URL: write {redact(f'{scheme}://{rest}')} as a str "
        "(pathlib.Path drops one of the slashes)"
    )


def _local(path: str) -> Location:
    # Not Path.resolve(): a link is part of the name that the user gave.
    full = os.path.abspath(os.path.expanduser(path))  # noqa: PTH100, PTH111
    return Location("file", "", full, f"file://{full}")


def _foreign(scheme: str, rest: str) -> Location:
    if scheme not in known_implementations and scheme not in registry:
        known = ", ".join(f"{name}://" for name in ("s3", "gs", "az", "file", "memory"))
        raise ConfigError(
            f"nothing serves {scheme}:// URLs: write one of {known}, a local path, "
            "or another scheme that fsspec knows"
        )
    prefix = rest.rstrip("/")
    return Location(scheme, "", prefix, redact(f"{scheme}://{prefix}"))


def _remote(kind: str, rest: str, text: str) -> Location:
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    account = None
    if kind == "az" and "@" in bucket:
        bucket, _, host = bucket.partition("@")
        account = host.split(".", 1)[0]
    if "@" in bucket or ":" in bucket:
        raise ConfigError(
            f"{redact(text)!r} carries credentials or a port: give them in storage_options"
        )
    if not bucket:
        if kind == "memory":
            return Location(kind, "", prefix, f"memory://{prefix}")
        raise ConfigError(f"{redact(text)!r} names no bucket: write {kind}://bucket/prefix")
    tail = f"/{prefix}" if prefix else ""
    if kind == "memory":
        return Location(kind, "", bucket + tail, f"memory://{bucket}{tail}")
    return Location(kind, bucket, prefix, f"{kind}://{bucket}{tail}", account)


def open_store(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    engine: Engine = "auto",
    retry: RetryPolicy | None = None,
    limiter: AdaptiveLimiter | None = None,
    sync_local: bool = True,
) -> Store:
    """Open a store rooted at a URL or a local folder. Makes no request.

    Args:
        url: ``s3://bucket/prefix``, ``gs://``, ``az://``, ``file://``, ``memory://``, a
            local path, or another scheme that fsspec knows.
        storage_options: fsspec's options for that scheme. An option that the engine
            cannot honour is an error, never ignored.
        engine: ``"auto"`` takes obstore where it serves the URL and honours every
            option, else fsspec. ``memory://`` is shared by the whole process under
            fsspec (the choice of ``"auto"``) and private to the store under obstore.
        retry: How long to keep trying; ``RetryPolicy(max_attempts=1)`` for once.
        limiter: Shared among stores that the same server throttles.
        sync_local: Flush what is put into a local folder to the medium, so that a power cut
            loses nothing once a put has returned.

    Raises:
        ConfigError: If the URL, the engine or an option is wrong.
    """
    location = parse_location(url)
    options = dict(storage_options or {})
    check_connection(location, options)
    policy = retry or RetryPolicy()
    if engine == "auto":
        inner = _open_either(location, options, policy, sync_local)
    elif engine == "obstore":
        try:
            inner = _open_obstore(location, options, policy, sync_local)
        except NotHonoured as error:
            raise ConfigError(f"{error}, so engine='obstore' cannot honour it") from None
    elif engine == "fsspec":
        inner = _open_fsspec(location, options, policy, sync_local)
    else:
        raise ConfigError(f"engine={engine!r}: write 'auto', 'obstore' or 'fsspec'")
    return RetryingStore(inner, policy, limiter)


def _open_either(
    location: Location, options: dict[str, Any], policy: RetryPolicy, sync_local: bool
) -> Store:
    if location.scheme not in _AUTO_OBSTORE or _is_json_emulator(location, options):
        return _open_fsspec(location, options, policy, sync_local)
    try:
        return _open_obstore(location, options, policy, sync_local)
    except NotHonoured as refusal:
        try:
            store = _open_fsspec(location, options, policy, sync_local)
        except ConfigError as error:
            raise ConfigError(f"{error.message} (obstore: {refusal})") from error
        _say_that_it_is_slower(location.scheme, str(refusal))
        return store


@cache
def _say_that_it_is_slower(scheme: str, why: str) -> None:
    """Log it once per process: every save and every load opens a store."""
    logger.warning("the fsspec engine serves %s://, at several times the cost: %s", scheme, why)


def _is_json_emulator(location: Location, options: dict[str, Any]) -> bool:
    """Google's emulators speak its JSON API, which gcsfs uses and obstore does not."""
    if location.scheme != "gs":
        return False
    return bool(options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST"))


def _open_obstore(
    location: Location, options: dict[str, Any], policy: RetryPolicy, sync_local: bool
) -> Store:
    from dcpstore.store.obstore_engine import ObstoreStore

    if location.scheme not in _ALL_OBSTORE:
        raise ConfigError(f"obstore does not serve {location.scheme}://: use engine='fsspec'")
    return ObstoreStore(location, options, part_policy=policy, sync_local=sync_local)


def _open_fsspec(
    location: Location, options: dict[str, Any], policy: RetryPolicy, sync_local: bool
) -> Store:
    from dcpstore.store.fsspec_engine import open_fsspec

    return open_fsspec(location, options, policy, sync_local=sync_local)


class Folder:
    """A checkpoint's URL and how to reach it. Opens the store on first use.

    Pickles by its settings, so that a spawned process opens its own clients.

    Args:
        url: Folder of the checkpoint.
        storage_options: fsspec's options for its protocol.
        config: Names the engine and bounds the retries.
        opener: Opens a store.

    Raises:
        ConfigError: If the URL or an option cannot be honoured.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None,
        config: WriteConfig | ReadConfig,
        opener: Callable[..., Store] = open_store,
    ) -> None:
        self.url = parse_location(url).url
        self._options = dict(storage_options or {})
        self._config = config
        self._opener = opener
        self._store: Store | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_store": None}

    @property
    def policy(self) -> RetryPolicy:
        """How long to keep trying."""
        config = self._config
        policy = RetryPolicy(
            max_attempts=config.max_attempts,
            total_deadline_s=config.retry_deadline_s,
            timeout_floor_s=config.timeout_s,
        )
        if isinstance(config, WriteConfig):
            return replace(policy, min_bytes_per_s=config.min_bytes_per_s)
        return policy

    def open(self) -> Store:
        """Return the open store."""
        if self._store is None:
            is_synced = getattr(self._config, "sync_local", True)
            self._store = self._opener(
                self.url,
                storage_options=self._options,
                engine=self._config.engine,
                retry=self.policy,
                **({} if is_synced else {"sync_local": False}),
            )
        return self._store

    def below(self, name: str) -> Folder:
        """Return the folder of that name in this one, reached in the same way."""
        url = f"{self.url.rstrip('/')}/{name}"
        return Folder(url, self._options, self._config, self._opener)

    def move(self, url: str | os.PathLike[str]) -> None:
        """Go to another URL with the same options.

        Raises:
            ConfigError: If this folder is a remote one and ``url`` names a local path.
        """
        new, text = parse_location(url).url, os.fspath(url)
        if not self.url.startswith("file://") and "://" not in text:
            raise ConfigError(
                f"checkpoint_id {text!r} is a local path, while the storage was made for"
                f" {self.url}. Write the whole URL, such as {self.url.rstrip('/')}/{text}"
            )
        if new != self.url:
            self.close()
            self.url = new

    def close(self) -> None:
        """Close the store. Idempotent; the next `open` opens it again."""
        store, self._store = self._store, None
        if store is not None:
            store.close()


class InFolder:
    """What DCP asks of a reader or writer about the folder that it works in.

    A subclass sets `_folder` and says by which attributes it is pickled.
    """

    _folder: Folder
    _pickled: Sequence[str] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._pickled}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def _begin(self) -> None:
        """Forget the last save or load."""

    @property
    def checkpoint_id(self) -> str:
        """The URL of the next save or load."""
        return self._folder.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether a URL can be served."""
        try:
            parse_location(checkpoint_id)
        except ConfigError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for another save or load, at another URL if one is given; options stay.

        Raises:
            ConfigError: If ``checkpoint_id`` is no URL although the present one is one.
        """
        if checkpoint_id is not None:
            self._folder.move(checkpoint_id)
        self._begin()
