"""The benchmark server's objects: S3's verbs over bytes kept in RAM in the pieces they came in."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import unquote
from xml.sax.saxutils import escape

__all__ = ["Answer", "Bucket", "Request", "StoredObject", "refuse"]


@dataclass(frozen=True, slots=True)
class StoredObject:
    """Bytes in the pieces they came in."""

    parts: tuple[memoryview, ...]
    etag: str

    @property
    def size(self) -> int:
        return sum(map(len, self.parts))

    def slices(self, start: int, end: int) -> Iterator[memoryview]:
        for part in self.parts:
            if start < len(part) and end > 0:
                yield part[max(start, 0) : end]
            start, end = start - len(part), end - len(part)


@dataclass(slots=True)
class Request:
    """What came over one connection."""

    method: str
    key: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: memoryview
    target: str = ""

    def first(self, name: str) -> str:
        return self.query.get(name, [""])[0]


@dataclass(slots=True)
class Answer:
    """What goes back; ``length`` is that of the body even where none is sent (HEAD)."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: tuple[memoryview, ...] = ()
    length: int | None = None


def _xml(text: str, status: int = 200) -> Answer:
    body = f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode()
    return Answer(status, {"Content-Type": "application/xml"}, (memoryview(body),))


def refuse(status: int, code: str) -> Answer:
    return _xml(f"<Error><Code>{code}</Code><Message>{code}</Message></Error>", status)


class Bucket:
    """All objects and open uploads. Every bucket name leads here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, StoredObject] = {}
        self._uploads: dict[str, dict[int, tuple[memoryview, str]]] = {}
        self._numbers = itertools.count(1)

    def answer(self, request: Request) -> Answer:
        if request.key:
            return getattr(self, f"_{request.method.lower()}")(request)
        if request.method == "POST" and "delete" in request.query:
            return self._delete_many(request)
        if request.method == "GET" and "location" not in request.query:
            return self._list(request)
        return Answer()  # every bucket is there

    def forget(self, prefix: str) -> None:
        with self._lock:
            for key in [key for key in self._objects if key.startswith(prefix)]:
                del self._objects[key]

    def _mark(self) -> str:
        # Not the MD5: it costs 1.5 CPU s per GiB, and no client here looks at it.
        return f'"{next(self._numbers):032x}"'

    def _get(self, request: Request) -> Answer:
        answer = self._head(request)
        if answer.status >= 300:
            return answer
        start, end = 0, answer.length or 0
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
        found = self._objects[request.key]
        if asked:
            if int(asked[1]) >= end:
                return refuse(416, "InvalidRange")
            size, start = end, int(asked[1])
            end = min(size, int(asked[2]) + 1) if asked[2] else size
            answer.status = 206
            answer.headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        answer.body, answer.length = tuple(found.slices(start, end)), end - start
        return answer

    def _head(self, request: Request) -> Answer:
        found = self._objects.get(request.key)
        if found is None:
            return refuse(404, "NoSuchKey")
        headers = {
            "ETag": found.etag,
            "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        return Answer(200, headers, length=found.size)

    def _put(self, request: Request) -> Answer:
        source = request.headers.get("x-amz-copy-source")
        if "uploadId" in request.query:
            with self._lock:
                etag = self._mark()
                parts = self._uploads[request.first("uploadId")]
                parts[int(request.first("partNumber"))] = (request.body, etag)
            return Answer(headers={"ETag": etag})
        if source:
            copied = self._objects[unquote(source).lstrip("/").partition("/")[2]]
            return self._store(request, copied.parts) or _xml(
                f"<CopyObjectResult><ETag>{escape(copied.etag)}</ETag></CopyObjectResult>"
            )
        refusal = self._store(request, (request.body,))
        return refusal or Answer(headers={"ETag": self._objects[request.key].etag})

    def _store(self, request: Request, parts: tuple[memoryview, ...]) -> Answer | None:
        with self._lock:
            found = self._objects.get(request.key)
            wanted = request.headers.get("if-match")
            if request.headers.get("if-none-match") == "*" and found is not None:
                return refuse(412, "PreconditionFailed")
            if wanted is not None and (found is None or found.etag.strip('"') != wanted.strip('"')):
                return refuse(412, "PreconditionFailed")
            self._objects[request.key] = StoredObject(parts, self._mark())
        return None

    def _post(self, request: Request) -> Answer:
        with self._lock:
            if "uploads" in request.query:
                upload = f"u{next(self._numbers)}"
                self._uploads[upload] = {}
                return _xml(
                    f"<InitiateMultipartUploadResult><Bucket>b</Bucket><Key>{escape(request.key)}"
                    f"</Key><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
                )
            sent = self._uploads.pop(request.first("uploadId"))
        numbers = re.findall(r"<PartNumber>(\d+)</PartNumber>", bytes(request.body).decode())
        refusal = self._store(request, tuple(sent[int(number)][0] for number in numbers))
        etag = self._objects[request.key].etag
        return refusal or _xml(
            f"<CompleteMultipartUploadResult><Bucket>b</Bucket><Key>{escape(request.key)}</Key>"
            f"<ETag>{escape(etag)}</ETag></CompleteMultipartUploadResult>"
        )

    def _delete(self, request: Request) -> Answer:
        with self._lock:
            self._uploads.pop(request.first("uploadId"), None)
            if "uploadId" not in request.query:
                self._objects.pop(request.key, None)
        return Answer(204)

    def _delete_many(self, request: Request) -> Answer:
        keys = re.findall(r"<Key>(.*?)</Key>", bytes(request.body).decode())
        with self._lock:
            for key in keys:
                self._objects.pop(key, None)
        deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        return _xml(f"<DeleteResult>{deleted}</DeleteResult>")

    def _list(self, request: Request) -> Answer:
        prefix, delimiter = request.first("prefix"), request.first("delimiter")
        with self._lock:
            found = {k: v.size for k, v in sorted(self._objects.items()) if k.startswith(prefix)}
        folders = {
            prefix + key[len(prefix) :].partition(delimiter)[0] + delimiter
            for key in found
            if delimiter and delimiter in key[len(prefix) :]
        }
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size><ETag>&quot;x&quot;</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key, size in found.items()
            if not any(key.startswith(folder) for folder in folders)
        ) + "".join(
            f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
            for folder in sorted(folders)
        )
        return _xml(
            f"<ListBucketResult><Name>b</Name><Prefix>{escape(prefix)}</Prefix>"
            f"<KeyCount>{len(found)}</KeyCount><IsTruncated>false</IsTruncated>{rows}"
            "</ListBucketResult>"
        )
