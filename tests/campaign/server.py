"""An S3 server on raw sockets, in a thread of this process, that follows schedules of faults.

Preconditions are linearizable: every request is decided on one thread, in one step. It knows what
a checkpoint needs of S3: objects with ranges and preconditions, multipart uploads, listings and
deletes. One server serves any number of schedules at a time, each in a folder of its own of one
bucket. Who sends a request is told by the access key: ``A0`` is rank 0 of saver A.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any
from urllib.parse import parse_qsl, unquote
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

from campaign.schedule import Fault, Schedule, Script

BUCKET = "campaign"
_RENEWAL_S = 0.3  # each answer takes so long where credentials are to be renewed meanwhile
_EXPIRY_S = 1.5 * _RENEWAL_S
_MEET_S = 10.0  # then whoever waits for the other goes on
_CODES = {
    "403": (403, "AccessDenied"),
    "ExpiredToken": (400, "ExpiredToken"),
    "RequestTimeTooSkewed": (403, "RequestTimeTooSkewed"),
    "412": (412, "PreconditionFailed"),
    "409": (409, "ConditionalRequestConflict"),
    "429": (429, "TooManyRequests"),
    "500": (500, "InternalError"),
    "503": (503, "SlowDown"),
}


@dataclass(slots=True)
class Request:
    """What came.

    Attributes:
        method: Of HTTP.
        key: Inside the bucket; empty for the bucket itself.
        query: Its parameters.
        headers: Lower-case names.
        body: All of it.
    """

    method: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def actor(self) -> str:
        """Who sends it: the access key up to a dot."""
        _, _, behind = self.headers.get("authorization", "").partition("Credential=")
        credential = behind or self.query.get("X-Amz-Credential", "")
        return credential.partition("/")[0]

    @property
    def verb(self) -> str:
        """What it asks for, in a schedule's words."""
        query = self.query
        if self.method == "GET" and (not self.key or "uploadId" in query):
            return "list"
        if self.method == "PUT":
            return "part" if "partNumber" in query else "put"
        if self.method == "POST":
            if "delete" in query:
                return "delete"
            return "complete" if "uploadId" in query else "begin"
        if self.method == "DELETE":
            return "abort" if "uploadId" in query else "delete"
        return "head" if self.method == "HEAD" else "get"

    def place(self) -> str:
        """Return the folder that it is about."""
        if self.key:
            return self.key.partition("/")[0]
        if "delete" in self.query:
            return next(iter(_keys_to_delete(self.body)), "").partition("/")[0]
        return self.query.get("prefix", "").partition("/")[0]


@dataclass(slots=True)
class Answer:
    """What goes back."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    def encode(self, *, is_head: bool = False) -> bytes:
        """Return the bytes to send."""
        headers = {"content-length": str(len(self.body)), **self.headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        first = f"HTTP/1.1 {self.status} X\r\ndate: {formatdate(usegmt=True)}\r\n"
        return (first + head + "\r\n").encode() + (b"" if is_head else self.body)


def _refusal(status: int, code: str) -> Answer:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
    return Answer(status, body.encode(), {"content-type": "application/xml"})


def _document(name: str, content: str) -> Answer:
    space = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
    text = f"<?xml version='1.0' encoding='UTF-8'?><{name} {space}>{content}</{name}>"
    return Answer(200, text.encode(), {"content-type": "application/xml"})


@dataclass(frozen=True, slots=True)
class Stored:
    """An object."""

    data: bytes
    etag: str
    modified_s: float


@dataclass(slots=True)
class Upload:
    """A multipart upload under way."""

    key: str
    begun_s: float
    parts: dict[int, Stored] = field(default_factory=dict)


class Place:
    """One schedule's folder of the bucket: its objects, and the faults of requests to it.

    Only the server's thread changes it while a schedule runs.

    Args:
        name: Of the folder.
        schedule: Whose faults are to happen.
        on_death: Called with an actor that a fault kills.
    """

    def __init__(
        self, name: str, schedule: Schedule, on_death: Callable[[str], None] | None = None
    ) -> None:
        self.name = name
        self.script = Script(schedule)
        self.flags = frozenset(schedule.flags)
        self.objects: dict[str, Stored] = {}
        self.uploads: dict[str, Upload] = {}
        self.had_none = False
        self.is_lame = False  # before and after the schedule nothing goes wrong
        self.met = threading.Event()
        self.on_death = on_death or (lambda _actor: None)
        self._meet = schedule.meet
        self._other = schedule.other
        self._num_of_a = 0
        self._num_of_other = 0
        self._is_other_done = self._other is None
        self._waiting: list[Callable[[], None]] = []
        self._late: list[tuple[int, Callable[[], Any]]] = []
        self._first_seen: dict[str, float] = {}
        self._upload_ids = itertools.count(1)

    @property
    def url(self) -> str:
        """Where savers save to."""
        return f"s3://{BUCKET}/{self.name}"

    def contents(self) -> dict[str, bytes]:
        """Return the objects, by key relative to the folder."""
        start = len(self.name) + 1
        return {key[start:]: stored.data for key, stored in list(self.objects.items())}

    def put(self, key: str, data: bytes, modified_s: float | None = None) -> None:
        """Store an object, before anybody else does."""
        self._store(f"{self.name}/{key}", data, modified_s)

    def age_by(self, seconds: float) -> None:
        """Let everything be older."""
        for key, one in list(self.objects.items()):
            self.objects[key] = Stored(one.data, one.etag, one.modified_s - seconds)
        for upload in self.uploads.values():
            upload.begun_s -= seconds
            upload.parts = {
                number: Stored(one.data, one.etag, one.modified_s - seconds)
                for number, one in upload.parts.items()
            }

    def refuses_credentials(self, access_key: str) -> bool:
        """Whether an access key has expired: the first one of a saver does, soon."""
        actor, dot, number = access_key.partition(".")
        if not dot:
            return False
        now = time.monotonic()
        return number == "0" and now - self._first_seen.setdefault(actor, now) > _EXPIRY_S

    # Waiting for one another, late requests --------------------------------------------------

    def must_wait(self, actor: str, go_on: Callable[[], None]) -> bool:
        """Count a request; whether it waits until the other actor has come far enough."""
        if self._meet is None or self.is_lame:
            return False
        at, num_of_other = self._meet
        if actor[:1] == self._other:
            self._num_of_other += 1
            if self._num_of_other > num_of_other:
                self.release()
            return False
        number = self._num_of_a
        self._num_of_a += actor[:1] == "A"
        if actor[:1] != "A" or number != at or self._is_other_done:
            return False
        self.met.set()
        self._waiting.append(go_on)
        return True

    def release(self) -> None:
        """Let whoever waits go on."""
        waiting, self._waiting = self._waiting, []
        for go_on in waiting:
            go_on()

    def end_other(self) -> None:
        """Note that the other actor is done."""
        self._is_other_done = True
        self.release()

    def postpone(self, num_requests: int, act: Callable[[], Any]) -> None:
        """Do something after so many more requests."""
        self._late.append((num_requests, act))

    def do_late(self, *, all_of_them: bool = False) -> None:
        """Do what is due; called before each request."""
        due = [act for left, act in self._late if left <= 1 or all_of_them]
        self._late = [(left - 1, act) for left, act in self._late if left > 1 and not all_of_them]
        for act in due:
            act()

    # The verbs -------------------------------------------------------------------------------

    def perform(self, request: Request, verb: str) -> Answer:
        """Do what is asked, as S3 does."""
        return getattr(self, f"_{verb}")(request)

    def _is_hidden(self, request: Request) -> bool:
        return "nolist" in self.flags and request.actor[:1] != "P"

    def _absent(self, request: Request) -> Answer:
        if self._is_hidden(request):
            return _refusal(403, "AccessDenied")
        return _refusal(404, "NoSuchKey")

    def _store(self, key: str, data: bytes, modified_s: float | None = None) -> Stored:
        etag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
        now = time.time() if modified_s is None else modified_s
        stored = self.objects[key] = Stored(data, etag, now)
        return stored

    def _get(self, request: Request) -> Answer:
        stored = self.objects.get(request.key)
        if stored is None:
            return self._absent(request)
        data, status, headers = stored.data, 200, _marks(stored)
        span = request.headers.get("range", "").removeprefix("bytes=")
        if span:
            first, _, last = span.partition("-")
            start = int(first) if first else max(0, len(data) - int(last))
            end = min(len(data), int(last) + 1 if first and last else len(data))
            if start >= len(data):
                return _refusal(416, "InvalidRange")
            headers["content-range"] = f"bytes {start}-{end - 1}/{len(data)}"
            data, status = data[start:end], 206
        return Answer(status, data, headers)

    _head = _get

    def _refused_condition(self, request: Request) -> Answer | None:
        stored = self.objects.get(request.key)
        if request.headers.get("if-none-match") == "*" and stored is not None:
            return _refusal(412, "PreconditionFailed")
        wanted = request.headers.get("if-match")
        if wanted is None:
            return None
        if stored is None:
            return _refusal(404, "NoSuchKey")
        if "bare-etag" in self.flags:
            is_same = wanted == stored.etag.strip('"')
        else:
            is_same = wanted.strip('"') == stored.etag.strip('"')
        return None if is_same else _refusal(412, "PreconditionFailed")

    def _put(self, request: Request) -> Answer:
        refused = self._refused_condition(request)
        if refused is not None:
            return refused
        return Answer(200, headers=_marks(self._store(request.key, request.body)))

    def _begin(self, request: Request) -> Answer:
        upload_id = f"upload-{next(self._upload_ids)}"
        self.uploads[upload_id] = Upload(request.key, time.time())
        content = f"<Bucket>{BUCKET}</Bucket><Key>{escape(request.key)}</Key>"
        return _document(
            "InitiateMultipartUploadResult", f"{content}<UploadId>{upload_id}</UploadId>"
        )

    def _part(self, request: Request) -> Answer:
        upload = self.uploads.get(request.query["uploadId"])
        if upload is None:
            return _refusal(404, "NoSuchUpload")
        etag = f'"{hashlib.md5(request.body, usedforsecurity=False).hexdigest()}"'
        stored = Stored(request.body, etag, time.time())
        upload.parts[int(request.query["partNumber"])] = stored
        return Answer(200, headers={"etag": stored.etag})

    def _complete(self, request: Request) -> Answer:
        upload = self.uploads.get(request.query["uploadId"])
        if upload is None:
            return _refusal(404, "NoSuchUpload")
        refused = self._refused_condition(request)
        if refused is not None:
            return refused
        wanted = [
            (int(_text_of(one, "PartNumber")), _text_of(one, "ETag").strip('"'))
            for one in ET.fromstring(request.body)
            if one.tag.endswith("Part")
        ]
        parts = [(upload.parts.get(number), etag) for number, etag in wanted]
        if not all(one is not None and one.etag.strip('"') == etag for one, etag in parts):
            return _refusal(400, "InvalidPart")
        del self.uploads[request.query["uploadId"]]
        stored = self._store(request.key, b"".join(one.data for one, _ in parts if one))
        content = f"<Key>{escape(request.key)}</Key><ETag>{escape(stored.etag)}</ETag>"
        return _document("CompleteMultipartUploadResult", f"<Bucket>{BUCKET}</Bucket>{content}")

    def _abort(self, request: Request) -> Answer:
        if self.uploads.pop(request.query["uploadId"], None) is None:
            return _refusal(404, "NoSuchUpload")
        return Answer(204)

    def _delete(self, request: Request) -> Answer:
        if request.method == "DELETE":
            self._drop(request.key)
            return Answer(204)
        keys = list(_keys_to_delete(request.body))
        for key in keys:
            self._drop(key)
        done = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        return _document("DeleteResult", done)

    def _drop(self, key: str) -> None:
        if self.objects.pop(key, None) is not None and key.endswith("/.metadata"):
            self.had_none = True

    def _list(self, request: Request) -> Answer:
        if self._is_hidden(request):
            return _refusal(403, "AccessDenied")
        query = request.query
        if "uploads" in query:
            return self._list_uploads(query.get("prefix", ""))
        if "uploadId" in query:
            return self._list_parts(query["uploadId"])
        prefix, start = query.get("prefix", ""), query.get("continuation-token", "")
        most = int(query.get("max-keys", "1000"))
        # With a delimiter, keys that go on behind one are listed as their common prefix.
        folders: dict[str, str] = {}
        if delimiter := query.get("delimiter", ""):
            for key in self.objects:
                head, cut, _ = key.removeprefix(prefix).partition(delimiter)
                if key.startswith(prefix) and cut:
                    folders[key] = prefix + head + cut
        keys = {folders.get(key, key) for key in self.objects if key.startswith(prefix)}
        names = sorted(key for key in keys if key > start)
        content = "".join(
            _listed(key, self.objects[key])
            if key not in folders.values()
            else f"<CommonPrefixes><Prefix>{escape(key)}</Prefix></CommonPrefixes>"
            for key in names[:most]
        )
        if len(names) > most:
            token = f"<NextContinuationToken>{escape(names[most - 1])}</NextContinuationToken>"
            content += f"<IsTruncated>true</IsTruncated>{token}"
        else:
            content += "<IsTruncated>false</IsTruncated>"
        num = f"<KeyCount>{min(most, len(names))}</KeyCount><MaxKeys>{most}</MaxKeys>"
        return _document(
            "ListBucketResult",
            f"<Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix>{num}{content}",
        )

    def _list_uploads(self, prefix: str) -> Answer:
        content = "<IsTruncated>false</IsTruncated>" + "".join(
            f"<Upload><Key>{escape(one.key)}</Key><UploadId>{name}</UploadId>"
            f"<Initiated>{_iso(one.begun_s)}</Initiated></Upload>"
            for name, one in self.uploads.items()
            if one.key.startswith(prefix)
        )
        return _document("ListMultipartUploadsResult", f"<Bucket>{BUCKET}</Bucket>{content}")

    def _list_parts(self, upload_id: str) -> Answer:
        upload = self.uploads.get(upload_id)
        if upload is None:
            return _refusal(404, "NoSuchUpload")
        content = "<IsTruncated>false</IsTruncated>" + "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(one.etag)}</ETag>"
            f"<Size>{len(one.data)}</Size><LastModified>{_iso(one.modified_s)}</LastModified></Part>"
            for number, one in sorted(upload.parts.items())
        )
        return _document("ListPartsResult", f"<UploadId>{upload_id}</UploadId>{content}")


def _marks(stored: Stored) -> dict[str, str]:
    return {
        "etag": stored.etag,
        "last-modified": formatdate(stored.modified_s, usegmt=True),
        "accept-ranges": "bytes",
        "content-type": "application/octet-stream",
    }


def _iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))


def _listed(key: str, stored: Stored) -> str:
    return (
        f"<Contents><Key>{escape(key)}</Key><LastModified>{_iso(stored.modified_s)}</LastModified>"
        f"<ETag>{escape(stored.etag)}</ETag><Size>{len(stored.data)}</Size>"
        "<StorageClass>STANDARD</StorageClass></Contents>"
    )


def _text_of(one: Any, name: str) -> str:
    return next((child.text or "" for child in one if child.tag.endswith(name)), "")


def _keys_to_delete(body: bytes) -> Iterator[str]:
    for one in ET.fromstring(body):
        if one.tag.endswith("Object"):
            yield _text_of(one, "Key")


# Connections -----------------------------------------------------------------------------------


class _Connection(asyncio.Protocol):
    """One connection: reads requests one after another and answers each as the script says."""

    def __init__(self, server: S3Server) -> None:
        self._server = server
        self._buffer = bytearray()
        self._head: tuple[str, str, dict[str, str], int] | None = None
        self._is_busy = False
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._server.transports.add(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.transports.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._read_on()

    def _read_on(self) -> None:
        while not self._is_busy and not self._transport.is_closing():
            if self._head is None and not self._read_head():
                return
            assert self._head is not None
            method, target, headers, end = self._head
            if headers.get("transfer-encoding") == "chunked":
                raise NotImplementedError("a chunked request")
            num_bytes = int(headers.get("content-length", "0"))
            if len(self._buffer) < end + num_bytes:
                return
            with memoryview(self._buffer) as view:
                body = bytes(view[end : end + num_bytes])
            del self._buffer[: end + num_bytes]
            self._head = None
            self._serve(_request(method, target, headers, body))

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        first, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        if headers.get("expect", "").lower() == "100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._head = method, target, headers, end + 4
        return True

    def _serve(self, request: Request) -> None:
        place = self._server.places.get(request.place())
        if place is None:
            is_bucket = request.method == "HEAD" and not request.key
            self._answer(Answer(200) if is_bucket else _refusal(404, "NoSuchBucket"), request)
            return

        def go_on() -> None:
            self._is_busy = False
            self._decide(place, request)
            self._read_on()

        if place.refuses_credentials(request.actor):
            self._answer(_refusal(*_CODES["ExpiredToken"]), request)
        elif place.must_wait(request.actor, go_on):
            self._is_busy = True
            self._server.loop.call_later(_MEET_S, place.release)
        elif "renew" in place.flags:
            self._is_busy = True
            self._server.loop.call_later(_RENEWAL_S, go_on)
        else:
            self._decide(place, request)

    def _decide(self, place: Place, request: Request) -> None:
        actor, verb = request.actor.partition(".")[0], request.verb
        if place.is_lame:
            self._answer(place.perform(request, verb), request)
            return
        place.do_late()
        fault = place.script.take(actor, verb, request.key.partition("/")[2])
        if fault is None and actor in place.script.dead:
            self._transport.abort()
        elif fault is None:
            self._answer(place.perform(request, verb), request)
        else:
            self._misbehave(fault, place, request, verb)

    def _misbehave(self, fault: Fault, place: Place, request: Request, verb: str) -> None:
        kind, _, what = fault.kind.partition("-")

        def act() -> Answer:
            return place.perform(request, verb)

        if kind == "late":
            when, _, said = what.partition("-")
            place.postpone(1 << 30 if when == "end" else int(when), act)
            if said:
                self._answer(_refusal(*_CODES[said]), request)
            else:
                self._transport.abort()
            return
        answer = act() if fault.acts else None
        if kind == "twice":
            self._answer(act(), request)
        elif kind == "absent":
            self._answer(_refusal(404, "NoSuchKey"), request)
        elif fault.kind == "cut-answer":
            assert answer is not None
            if fault.looks_whole and answer.status == 200 and len(answer.body) > 1:
                self._answer(Answer(200, answer.body[:-40], answer.headers), request)
            else:
                self._cut(answer, request)
        elif fault.kind == "cut-request":
            self._answer(_refusal(400, "IncompleteBody"), request, close=True)
        elif kind == "stall":
            self._is_busy = True
            self._server.loop.call_later(self._server.stall_s, self._transport.abort)
        elif kind == "killed":
            place.on_death(fault.actor)
            self._transport.abort()
        elif what in ("closed", "lost"):
            self._transport.abort()
        else:
            self._answer(_refusal(*_CODES[what]), request)

    def _answer(self, answer: Answer, request: Request, *, close: bool = False) -> None:
        self._transport.write(answer.encode(is_head=request.method == "HEAD"))
        if close:
            self._transport.close()

    def _cut(self, answer: Answer, request: Request) -> None:
        whole = answer.encode(is_head=request.method == "HEAD")
        # Without a body it ends within the status line: some clients take half a head for one.
        num_bytes = len(whole) - len(answer.body) // 2 if len(answer.body) > 1 else 7
        self._transport.write(whole[:num_bytes])
        self._transport.close()


def _request(method: str, target: str, headers: dict[str, str], body: bytes) -> Request:
    path, _, query = target.partition("?")
    _, _, key = unquote(path).lstrip("/").partition("/")
    if headers.get("content-encoding", "").startswith("aws-chunked"):
        body = _unchunked(body)
    return Request(method, key, dict(parse_qsl(query, keep_blank_values=True)), headers, body)


def _unchunked(body: bytes) -> bytes:
    found, at = [], 0
    while True:
        end = body.index(b"\r\n", at)
        num_bytes = int(body[at:end].split(b";")[0], 16)
        if not num_bytes:
            return b"".join(found)
        found.append(body[end + 2 : end + 2 + num_bytes])
        at = end + 4 + num_bytes


class S3Server:
    """Serves any number of schedules' folders. A context manager.

    Args:
        stall_s: Seconds until a connection is closed that a fault stalls, for clients that would
            wait longer.
    """

    def __init__(self, *, stall_s: float = 0.3) -> None:
        self.stall_s = stall_s
        self.places: dict[str, Place] = {}
        self.transports: set[Any] = set()
        self.loop: asyncio.AbstractEventLoop = asyncio.new_event_loop()
        self.port = 0
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="s3-server", daemon=True)
        self._is_up = threading.Event()

    def __enter__(self) -> S3Server:
        self._thread.start()
        self._is_up.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        starting = self.loop.create_server(lambda: _Connection(self), "127.0.0.1", 0)
        server = self.loop.run_until_complete(starting)
        self.port = server.sockets[0].getsockname()[1]
        self._is_up.set()
        self.loop.run_forever()
        server.close()
        for transport in list(self.transports):
            transport.abort()
        self.loop.run_until_complete(asyncio.sleep(0))  # so that the sockets are closed
        self.loop.close()

    @property
    def endpoint_url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def options(self, actor: str) -> dict[str, Any]:
        """Return fsspec's storage options for an actor."""
        return {
            "key": actor,
            "secret": "secret",
            "endpoint_url": self.endpoint_url,
            "client_kwargs": {"region_name": "us-east-1"},
        }

    def open(self, schedule: Schedule, on_death: Callable[[str], None] | None = None) -> Place:
        """Make an empty folder for a schedule."""
        place = Place(f"s{next(self._numbers)}", schedule, on_death)
        self.places[place.name] = place
        return place

    def close(self, place: Place) -> None:
        """Forget a folder."""
        del self.places[place.name]

    def call(self, act: Callable[[], None]) -> None:
        """Do something on the server's thread, and wait for it."""
        done = threading.Event()

        def work() -> None:
            try:
                act()
            finally:
                done.set()

        self.loop.call_soon_threadsafe(work)
        done.wait()
