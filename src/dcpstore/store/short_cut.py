"""Which of obstore's ranges need not pass through memory of obstore's, and how they are got.

Objects of a local folder are files: the kernel copies a range of one straight into its place.
Objects behind an S3 endpoint that speaks plain HTTP are fetched by signed URLs
(`dcpstore.store.http_ranges`). Everything else, and whatever a short cut does not understand,
goes the engine's own way.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import obstore

from dcpstore.store.http_ranges import HttpRanges

if TYPE_CHECKING:
    from dcpstore.store.destination import Destination
    from dcpstore.store.error_map import Asked
    from dcpstore.store.location import Location
    from dcpstore.store.options import ObstoreSettings

__all__ = ["ShortCut", "open_short_cut"]

_SIGNED_FOR = timedelta(minutes=15)
_MOST_DETOURS = 3
# With these, a signed URL and nothing else is a complete request.
_KNOWN_CONFIG = frozenset(
    {"access_key_id", "secret_access_key", "session_token", "endpoint", "aws_endpoint_url_s3"}
    | {"region", "unsigned_payload", "skip_signature"}
    | {"server_side_encryption", "sse_kms_key_id", "sse_bucket_key_enabled"}  # only of puts
)
_KNOWN_CLIENT_OPTIONS = frozenset({"allow_http", "connect_timeout", "read_timeout"})


class ShortCut(Protocol):
    """Gets ranges where obstore need not."""

    def fetch(
        self,
        client: Any,
        path: str,
        asked: Asked,
        start: int,
        destination: Destination,
        timeout_s: float,
    ) -> bool:
        """Receive a range into its destination; False if the engine has to do it instead."""

    def close(self) -> None:
        """Let go of connections."""


def open_short_cut(
    location: Location, settings: ObstoreSettings, pause_s: float
) -> ShortCut | None:
    """Return the short cut for a location; None if there is none.

    Args:
        location: The root.
        settings: Translated options.
        pause_s: How long a server may be silent.
    """
    if location.scheme == "file":
        return _Files()
    if location.scheme == "s3" and _is_plain_http(settings):
        return _SignedUrls(settings.client_options, pause_s)
    return None


class _Files:
    def fetch(
        self,
        client: Any,
        path: str,
        asked: Asked,
        start: int,
        destination: Destination,
        timeout_s: float,
    ) -> bool:
        del client, asked, timeout_s
        try:
            with Path(f"/{path}").open("rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size < start + destination.num_bytes:
                    return False
                file.seek(start)
                with destination.writing(lambda: None) as pieces:
                    return all(_read_exactly(file, piece) for piece in pieces)
        except OSError:
            return False

    def close(self) -> None:
        pass


def _read_exactly(file: FileIO, piece: memoryview) -> bool:
    at = 0
    while at < len(piece):
        count = file.readinto(piece[at:])
        if not count:
            return False
        at += count
    return True


class _SignedUrls:
    def __init__(self, client_options: Mapping[str, Any], pause_s: float) -> None:
        given = {"connect_timeout": "10s", "read_timeout": f"{pause_s}s", **client_options}
        self._ranges = HttpRanges(
            connect_timeout_s=_seconds(given["connect_timeout"]),
            read_timeout_s=_seconds(given["read_timeout"]),
        )
        self._num_detours = 0

    def fetch(
        self,
        client: Any,
        path: str,
        asked: Asked,
        start: int,
        destination: Destination,
        timeout_s: float,
    ) -> bool:
        if self._num_detours >= _MOST_DETOURS:  # a server that refuses signed URLs
            return False
        url = obstore.sign(client, "GET", path, _SIGNED_FOR)
        if self._ranges.fetch(url, asked, start, destination, timeout_s):
            self._num_detours = 0
            return True
        self._num_detours += 1
        return False

    def close(self) -> None:
        self._ranges.close()


def _is_plain_http(settings: ObstoreSettings) -> bool:
    endpoint = urlsplit(str(settings.config.get("endpoint") or ""))
    return (
        endpoint.scheme == "http"
        and _KNOWN_CONFIG.issuperset(settings.config)
        and not settings.config.get("skip_signature")
        and _KNOWN_CLIENT_OPTIONS.issuperset(settings.client_options)
        and (not {"http", "all"} & getproxies().keys() or bool(proxy_bypass(endpoint.netloc)))
    )


def _seconds(duration: str) -> float:
    if duration.endswith("ms"):
        return float(duration.removesuffix("ms")) / 1000
    return float(duration.removesuffix("s"))
