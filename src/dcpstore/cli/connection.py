"""From command line arguments to ``storage_options`` and an open store."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcpstore.cli.output import Output
from dcpstore.config import ReadConfig
from dcpstore.errors import ConfigError

if TYPE_CHECKING:
    from dcpstore.store.base import Store


_TEXTS = frozenset({"key", "secret", "token", "username", "password", "profile", "project"})
_RETRY_S = 180.0


@dataclass(frozen=True, slots=True)
class Connection:
    """How to reach one URL.

    Attributes:
        url: As given.
        storage_options: For the library; never shown.
        retry_s: Most seconds spent on one request with all its tries.
    """

    url: str
    storage_options: Mapping[str, Any] = field(repr=False)
    retry_s: float = _RETRY_S

    @property
    def config(self) -> ReadConfig:
        """The reader's settings that the command line has options for."""
        return ReadConfig(retry_deadline_s=self.retry_s)


def add_key_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the options that choose keys."""
    for option, text in (("--keys", "only these"), ("--exclude", "all but these")):
        parser.add_argument(
            option, action="append", default=[], metavar="GLOB", help=f"{text}; repeatable"
        )


def add_connection_arguments(parser: argparse.ArgumentParser, *sides: str) -> None:
    """Add the options that say how to reach a store.

    Args:
        parser: Of a command.
        sides: For a command with two URLs: ``"source"`` adds options such as
            ``--source-profile`` that hold for that URL alone. The common ones hold for both,
            local folders excepted.
    """
    for side in ("", *sides):
        _add_connection_arguments(parser, side)


def _add_connection_arguments(parser: argparse.ArgumentParser, side: str) -> None:
    dash, only = (f"{side}-", f" (of the {side} alone)") if side else ("", "")
    group = parser.add_argument_group(f"connection{only}")
    group.add_argument(
        f"--{dash}storage-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of fsspec for the URL's scheme; VALUE is JSON or text. @FILE reads a JSON"
        " object from a file, which keeps secrets out of the list of processes. Repeatable",
    )
    group.add_argument(f"--{dash}endpoint-url", metavar="URL", help="of the store's server")
    group.add_argument(f"--{dash}profile", metavar="NAME", help="of the AWS configuration")
    group.add_argument(f"--{dash}anon", action="store_true", help="send no credentials")
    if not side:
        group.add_argument(
            "--retry-seconds",
            type=_positive,
            default=_RETRY_S,
            metavar="S",
            help="most seconds spent on one request with all its tries (%(default)g)",
        )


def read_connection(args: argparse.Namespace, url: str, out: Output, side: str = "") -> Connection:
    """Read what `add_connection_arguments` added, and hide the secrets in it.

    Raises:
        ConfigError: If an option is not ``key=value``, or a file cannot be read.
    """
    is_local_side = bool(side) and _is_local(url)
    options = {} if is_local_side else _options(args, "", url)
    if side:
        options.update(_options(args, f"{side}_", url))
    out.hide(_secrets_in(options))
    return Connection(url, options, args.retry_seconds)


@contextmanager
def open_given_store(connection: Connection) -> Iterator[Store]:
    """Open the store at a URL, and close it in the end."""
    from dcpstore.store import RetryPolicy, open_store

    store = open_store(
        connection.url,
        storage_options=connection.storage_options,
        retry=RetryPolicy(total_deadline_s=connection.retry_s),
    )
    try:
        yield store
    finally:
        store.close()


def _is_local(url: str) -> bool:
    from dcpstore.store.folder import parse_location

    return parse_location(url).scheme == "file"


def _positive(text: str) -> float:
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(text)
    return value


def _options(args: argparse.Namespace, prefix: str, url: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for text in getattr(args, f"{prefix}storage_option"):
        options.update(_from_file(text[1:]) if text.startswith("@") else _from_text(text))
    endpoint, profile = getattr(args, f"{prefix}endpoint_url"), getattr(args, f"{prefix}profile")
    if endpoint is not None:
        options["endpoint_url"] = endpoint
    if profile is not None:
        options["profile"] = profile
    if getattr(args, f"{prefix}anon"):
        is_google = url.lower().startswith(("gs://", "gcs://"))
        options.update({"token": "anon"} if is_google else {"anon": True})
    return options


def _from_text(text: str) -> dict[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        # Not shown: what stands there may be a secret.
        raise ConfigError("--storage-option wants key=value or @file.json; one has no '='")
    if name in _TEXTS and not value.startswith("{"):
        return {name: value}  # an access key may consist of digits
    try:
        return {name: json.loads(value)}
    except ValueError:
        return {name: value}


def _from_file(path: str) -> dict[str, Any]:
    try:
        options = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--storage-option @{path}: {error.strerror}") from error
    except ValueError:
        raise ConfigError(f"--storage-option @{path}: the file holds no JSON") from None
    if not isinstance(options, dict):
        raise ConfigError(f"--storage-option @{path}: the file holds no JSON object")
    return options


def _secrets_in(value: Any, name: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for inner_name, inner in value.items():
            yield from _secrets_in(inner, str(inner_name))
    elif isinstance(value, str) and _is_secret(name):
        yield value


def _is_secret(name: str) -> bool:
    lowered = name.lower()
    if lowered in ("key", "access_key_id", "aws_access_key_id"):
        return True
    words = ("secret", "password", "token", "credential", "_key", "sas", "connection_string")
    return any(word in lowered for word in words)
