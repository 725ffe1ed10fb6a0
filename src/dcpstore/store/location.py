"""Where a store lies: URLs taken apart, checked, and cleared of secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass

from fsspec.registry import known_implementations, registry

from dcpstore.errors import ConfigError

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
# Secret keys of AWS contain slashes, and a mangled URL has one slash only.
_USERINFO = re.compile(r"(?<=:/)(/?)[^/@:\s]+:[^@\s]*@")
_QUERY = re.compile(r"(https?://[^\s?\"']+)\?([^\s\"')]*)")


@dataclass(frozen=True, slots=True)
class Location:
    """A bucket and a prefix.

    Attributes:
        scheme: ``s3``, ``gs``, ``az``, ``file``, ``memory``, or another that fsspec knows.
        bucket: Bucket or container; empty for ``file`` and for other schemes.
        prefix: Key prefix without slashes at its ends; the absolute path for ``file``.
        url: The root as a user would write it, without secrets.
        account: The storage account where an Azure URL names one.
    """

    scheme: str
    bucket: str
    prefix: str
    url: str
    account: str | None = None


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


def redact(text: str, *, keep: Collection[str] = ()) -> str:
    """Blank out ``user:password@`` and the query strings of web addresses in a text.

    Args:
        text: A URL, or a message with some.
        keep: Parameters of queries to leave, which are no secrets.
    """

    def shortened(match: re.Match[str]) -> str:
        kept = [one for one in match[2].split("&") if one.partition("=")[0] in keep]
        return f"{match[1]}?{'&'.join([*kept, '...'])}"

    return _QUERY.sub(shortened, _USERINFO.sub(r"\1***@", text))


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
