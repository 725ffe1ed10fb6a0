"""Uploads that were begun and never finished: what to list and abort besides objects.

A saver that is killed leaves the parts that it sent. They are no objects, `Store.list` does not
show them, and on S3 they cost storage until somebody aborts the upload. No save or load needs
this; clean-up does.

========  ==============================================================================
S3        multipart uploads, by ListMultipartUploads
local     files that an engine writes beside their target and renames in the end
Google    not listed: an unfinished resumable upload expires after a week by itself
Azure     not listed: uncommitted blocks expire after a week by themselves
========  ==============================================================================
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dcpstore.errors import NotFoundError, StoreError
from dcpstore.store.engine import Asked
from dcpstore.store.folder import parse_location
from dcpstore.store.fsspec_clients import from_fsspec
from dcpstore.store.local import TEMPORARY
from dcpstore.store.retry import RetryPolicy, call_with_retries
from dcpstore.store.s3fs_engine import S3fsStore, pages_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dcpstore.store.base import Location


_STAGED = re.compile(r"(.+)#\d+")  # as obstore names a local file that is being written


@dataclass(frozen=True, slots=True)
class OpenUpload:
    """An object that somebody began to put.

    Attributes:
        key: Relative to the root.
        upload_id: The store's name for the upload.
        modified: When its last part came, or it began; None where unknown.
        size_bytes: Of the parts that came; None where the store does not tell.
    """

    key: str
    upload_id: str
    modified: datetime | None
    size_bytes: int | None = None


class OpenUploads(Protocol):
    """The unfinished uploads below one root. Calls block and are thread-safe."""

    def list(self) -> Iterator[OpenUpload]:
        """Yield every unfinished upload to a key below the root.

        Raises:
            NotFoundError: If there is no such bucket.
            StoreError: If the store refuses or fails.
        """

    def abort(self, upload: OpenUpload) -> None:
        """Give an upload up and free its parts; one that is gone is no error.

        Raises:
            StoreError: If the store refuses or fails.
        """

    def close(self) -> None:
        """Release clients and connections. Idempotent."""


def open_uploads_at(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    retry: RetryPolicy | None = None,
) -> OpenUploads | None:
    """Open the unfinished uploads below a URL; None where the store has no such list.

    Args:
        url: As for `open_store`.
        storage_options: As for `open_store`; on S3 this goes through s3fs for any engine.
        retry: How long to keep trying.

    Raises:
        ConfigError: If the URL or an option is wrong.
    """
    location = parse_location(url)
    if location.scheme == "s3":
        return S3Uploads(S3fsStore(location, storage_options), location, retry or RetryPolicy())
    if location.scheme == "file":
        return LocalUploads(location)
    return None


class S3Uploads:
    """Multipart uploads of S3, listed and aborted through s3fs's client.

    Args:
        store: Whose client sends the requests.
        location: The root.
        retry: How long to keep trying.
    """

    def __init__(self, store: S3fsStore, location: Location, retry: RetryPolicy) -> None:
        self._store = store
        self._retry = retry
        self._root = f"{location.prefix}/" if location.prefix else ""

    def list(self) -> Iterator[OpenUpload]:
        """Yield every unfinished upload; follows pages. One more request per upload."""
        asked = Asked("list the open uploads below", "", self._store.url)
        send = partial(self._call, asked, "list_multipart_uploads", Prefix=self._root)
        marks = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        for page in pages_of(send, marks):
            for one in page.get("Uploads", ()):
                yield self._describe(one["Key"], one["UploadId"], one.get("Initiated"))

    def _describe(self, path: str, upload_id: str, begun: datetime | None) -> OpenUpload:
        """Look at the parts: an upload that began long ago may still be under way."""
        key = path.removeprefix(self._root)
        asked = Asked("list the parts of", key, self._store.url)
        size_bytes, modified = 0, begun
        send = partial(self._call, asked, "list_parts", Key=path, UploadId=upload_id)
        try:
            for page in pages_of(send, {"PartNumberMarker": "NextPartNumberMarker"}):
                for part in page.get("Parts", ()):
                    size_bytes += part["Size"]
                    came = part.get("LastModified")
                    modified = max((t for t in (modified, came) if t is not None), default=None)
        except NotFoundError:
            pass  # it ended meanwhile
        except StoreError as error:
            if not error.denied:
                raise
            return OpenUpload(key, upload_id, begun)
        return OpenUpload(key, upload_id, modified, size_bytes)

    def abort(self, upload: OpenUpload) -> None:
        """Abort one upload."""
        asked = Asked("abort the upload of", upload.key, self._store.url)
        path = self._root + upload.key
        with suppress(NotFoundError):  # somebody finished or aborted it meanwhile
            self._call(asked, "abort_multipart_upload", Key=path, UploadId=upload.upload_id)

    def close(self) -> None:
        """Drop the client."""
        self._store.close()

    def _call(self, asked: Asked, operation: str, **more: Any) -> dict[str, Any]:
        return call_with_retries(lambda _: self._store.send(asked, operation, **more), self._retry)


class LocalUploads:
    """Files that an engine was writing when its process died.

    Args:
        location: The root, a folder.
    """

    def __init__(self, location: Location) -> None:
        self._root = Path(location.prefix)
        self._url = location.url

    def list(self) -> Iterator[OpenUpload]:
        """Yield every such file; a missing folder has none."""
        for folder, _, names in os.walk(self._root):
            for name in sorted(names):
                staged = _STAGED.fullmatch(name)
                if staged is None and not name.startswith(TEMPORARY):
                    continue
                path = Path(folder, name)
                target = path.with_name(staged[1]) if staged else path
                key, number = (one.relative_to(self._root).as_posix() for one in (target, path))
                try:
                    found = path.stat()
                except FileNotFoundError:
                    continue  # it was finished meanwhile
                written = datetime.fromtimestamp(found.st_mtime, timezone.utc)
                yield OpenUpload(key, number, written, found.st_size)

    def abort(self, upload: OpenUpload) -> None:
        """Delete the file."""
        try:
            (self._root / upload.upload_id).unlink(missing_ok=True)
        except OSError as error:
            asked = Asked("delete the unfinished file of", upload.key, self._url)
            raise from_fsspec(asked, error) from error

    def close(self) -> None:
        """Nothing is open."""
