"""From a URL and fsspec-style options to a store."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

from dcpstore.errors import ConfigError
from dcpstore.store.location import parse_location
from dcpstore.store.options import NotHonoured
from dcpstore.store.retry import RetryingStore, RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dcpstore.store.base import Store
    from dcpstore.store.location import Location
    from dcpstore.store.retry import AdaptiveLimiter


Engine = Literal["auto", "obstore", "fsspec"]
# memory:// must be the same for all objects of a process, and obstore's is not.
_AUTO_OBSTORE = frozenset({"s3", "gs", "az", "file"})
_ALL_OBSTORE = _AUTO_OBSTORE | {"memory"}


def open_store(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    engine: Engine = "auto",
    retry: RetryPolicy | None = None,
    limiter: AdaptiveLimiter | None = None,
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

    Raises:
        ConfigError: If the URL, the engine or an option is wrong.
    """
    location = parse_location(url)
    options = dict(storage_options or {})
    policy = retry or RetryPolicy()
    if engine == "auto":
        inner = _open_either(location, options, policy)
    elif engine == "obstore":
        try:
            inner = _open_obstore(location, options, policy)
        except NotHonoured as error:
            raise ConfigError(f"{error}, so engine='obstore' cannot honour it") from None
    elif engine == "fsspec":
        inner = _open_fsspec(location, options, policy)
    else:
        raise ConfigError(f"engine={engine!r}: write 'auto', 'obstore' or 'fsspec'")
    return RetryingStore(inner, policy, limiter)


def _open_either(location: Location, options: dict[str, Any], policy: RetryPolicy) -> Store:
    if location.scheme not in _AUTO_OBSTORE or _is_json_emulator(location, options):
        return _open_fsspec(location, options, policy)
    try:
        return _open_obstore(location, options, policy)
    except NotHonoured as refusal:
        try:
            return _open_fsspec(location, options, policy)
        except ConfigError as error:
            raise ConfigError(f"{error.message} (obstore: {refusal})") from error


def _is_json_emulator(location: Location, options: dict[str, Any]) -> bool:
    """Google's emulators speak its JSON API, which gcsfs uses and obstore does not."""
    if location.scheme != "gs":
        return False
    return bool(options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST"))


def _open_obstore(location: Location, options: dict[str, Any], policy: RetryPolicy) -> Store:
    from dcpstore.store.obstore_engine import ObstoreStore

    if location.scheme not in _ALL_OBSTORE:
        raise ConfigError(f"obstore does not serve {location.scheme}://: use engine='fsspec'")
    return ObstoreStore(location, options, part_policy=policy)


def _open_fsspec(location: Location, options: dict[str, Any], policy: RetryPolicy) -> Store:
    if location.scheme == "s3":
        from dcpstore.store.s3fs_engine import S3fsStore

        return S3fsStore(location, options, part_policy=policy)
    from dcpstore.store.fsspec_engine import FsspecStore

    return FsspecStore(location, options, part_policy=policy)
