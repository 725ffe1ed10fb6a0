"""Stores in memory that answer as S3, Google, Azure, plain fsspec filesystems and local disks do.

A `World` holds the objects and a clock that no real time moves. Clients send it requests, one at
a time; each may meet a fault of the schedule, below the engine's own logic and below all
retries. Errors are those that `dcpstore.store.engine` makes of such answers.

What a fault's answer is on a store that speaks no HTTP:

====================  ======================================  ==============================
answer                local disk                              fsspec filesystem
====================  ======================================  ==============================
403                   EACCES                                  PermissionError
ExpiredToken          EPERM                                   401
RequestTimeTooSkewed  ESTALE                                  403
412, 409              EEXIST, EBUSY                           412, 409
429, 503              EDQUOT, EAGAIN                          429, 503
500                   EIO                                     500
lost, closed          ETIMEDOUT, as of a network file system  ConnectionResetError
cut-request           ENOSPC, after a part was written        ConnectionResetError
cut-answer            EIO                                     fewer bytes, which look whole
====================  ======================================  ==============================
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any, TypeVar

import fsspec
import obstore.exceptions
from typing_extensions import Buffer

from campaign.schedule import Fault, Schedule, Script
from dcpstore.errors import CheckpointError, ConfigError, NotFoundError, StoreError
from dcpstore.store.base import (
    NO_LIMITS,
    Capabilities,
    Destination,
    Fetched,
    IfMatch,
    ObjectInfo,
    Part,
    PutMode,
    Tail,
    as_bytes_view,
    check_key,
    check_prefix,
    checked_pieces,
    joined,
)
from dcpstore.store.engine import (
    Answer,
    Asked,
    check_condition,
    check_length,
    deletes_failed,
    from_answer,
    with_either_mark,
)
from dcpstore.store.folder import parse_location
from dcpstore.store.fsspec_clients import from_fsspec
from dcpstore.store.fsspec_engine import FsspecStore
from dcpstore.store.obstore_engine import from_obstore
from dcpstore.store.uploads import OpenUpload

T = TypeVar("T")

_BEGIN_S = 1_800_000_000.0
_REQUEST_S = 0.02
_PUT_STALL_S, _GET_STALL_S = 300.0, 60.0
_TURN_WAIT_S = 110.0  # real time: only a defect of this module makes anybody wait so long


class Died(BaseException):
    """The process that sends this request is gone: it sees no answer, and does nothing more."""


@dataclass(frozen=True, slots=True)
class Raw:
    """An object, or a file that is not finished."""

    data: bytes
    mark: str
    modified_s: float

    @property
    def modified(self) -> datetime:
        return datetime.fromtimestamp(self.modified_s, timezone.utc)


class Turns:
    """Lets the requests of two actors meet as a schedule says, and in no other order.

    ::

        A: requests before number a | ..................... | the rest |
        other:                      | its first b requests  | ........ | the rest

    Args:
        meet: The numbers a and b; None: the other begins when A has ended.
        actors: Letters of those that send requests: A, and one other at most.
    """

    def __init__(self, meet: tuple[int, int] | None, actors: Sequence[str]) -> None:
        self._changed = threading.Condition()
        self._other = next((one for one in actors if one != "A"), None)
        self._running = set(actors)
        self._first, self._num_between = meet if meet is not None else (1 << 30, 0)
        self._served = dict.fromkeys(actors, 0)
        self._has_met = False
        self._holder = "A"
        with self._changed:
            self._pass_on()

    @contextmanager
    def of(self, letter: str) -> Iterator[None]:
        """Wait for this actor's turn, and hold it for one request."""
        if letter not in self._running or len(self._running) == 1:
            yield
            return
        with self._changed:
            if not self._changed.wait_for(lambda: self._holder == letter, _TURN_WAIT_S):
                raise RuntimeError(f"{letter} waited for {self._holder} for too long")
            try:
                yield
            finally:
                self._served[letter] += 1
                self._pass_on()

    def end(self, letter: str) -> None:
        """This actor sends no other request."""
        with self._changed:
            self._running.discard(letter)
            self._pass_on()

    def _pass_on(self) -> None:
        if self._other is None:
            return
        if not self._has_met and self._served["A"] >= self._first:
            self._has_met, self._holder = True, self._other
        if self._has_met and self._served[self._other] >= self._num_between:
            self._holder = "A"
        if self._holder not in self._running and self._running:
            (self._holder,) = self._running
        self._changed.notify_all()


class World:
    """Objects, files that are not finished, requests that act late, and the time.

    Args:
        schedule: Whose faults happen and whose actors meet; None for neither.
        actors: Letters of those that send requests.
    """

    def __init__(self, schedule: Schedule | None = None, actors: Sequence[str] = ("A",)) -> None:
        self.objects: dict[str, Raw] = {}
        self.unfinished: dict[str, Raw] = {}
        self.now_s = _BEGIN_S
        self.history: list[str] = []
        """Letters of those who put ``.metadata``, one for each put that acted."""
        self.cuts_silently = False
        """Whether an answer that ends early always looks whole; else every other does."""
        self.was_overtaken = False
        """Whether a put of ``.metadata`` that acted late replaced what somebody else had put."""
        self.dropped_by: dict[str, str] = {}
        """Letters of those who deleted an object last."""
        self.was_without = False
        """Whether ``.metadata`` was ever removed."""
        self.script = Script(schedule or Schedule("first_save"))
        self._turns = Turns(schedule.meet if schedule else None, actors)
        self._lock = threading.RLock()
        self._late: list[tuple[int, Callable[[], object]]] = []
        self._is_late = False
        self._num_served = 0
        self.num_made = 0
        """How many numbers were drawn for marks."""

    def clock(self) -> float:
        """Seconds, by the world's clock."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        with self._lock:
            self.now_s += seconds

    def end(self, letter: str) -> None:
        """Note that an actor has ended."""
        self._turns.end(letter)

    def settle(self) -> None:
        """Do what was asked for and not done yet."""
        with self._lock:
            self._do_late(1 << 30)

    def send(
        self,
        actor: str,
        verb: str,
        key: str,
        act: Callable[[], T],
        refuse: Callable[[str], BaseException],
        cut: Callable[[T], T] | None = None,
    ) -> T:
        """Serve one request.

        Args:
            actor: Who sends it, such as ``A0``.
            verb: As `Script.take` knows it.
            key: Likewise.
            act: Does it, and answers or raises.
            refuse: Makes the error of an answer.
            cut: Makes of an answer one that ends early and looks whole; None if it cannot.
        """
        with self._turns.of(actor[0]), self._lock:
            if actor in self.script.dead:
                raise Died(f"{actor} is dead")
            self.now_s += _REQUEST_S
            fault = self.script.take(actor, verb, key)
            self._num_served += 1
            self._do_late(self._num_served)
            if fault is None:
                return act()
            return self._meet(fault, verb, act, refuse, cut)

    def _meet(
        self,
        fault: Fault,
        verb: str,
        act: Callable[[], T],
        refuse: Callable[[str], BaseException],
        cut: Callable[[T], T] | None,
    ) -> T:
        kind = fault.kind
        if kind == "twice":
            with suppress(CheckpointError, OSError, _HttpError):
                act()
            return act()
        if kind == "cut-answer" and cut is not None and (fault.looks_whole or self.cuts_silently):
            return cut(act())
        if kind.startswith("late-"):
            after, _, said = kind.removeprefix("late-").partition("-")
            self._late.append((1 << 29 if after == "end" else self._num_served + int(after), act))
            raise refuse(said or "lost")
        if fault.acts:
            with suppress(CheckpointError, OSError, _HttpError):  # a refusal is an answer, lost
                act()
        if kind.startswith("killed"):
            raise Died(f"{fault.actor} dies")
        if kind.startswith("stall"):
            self.now_s += _GET_STALL_S if verb in ("get", "head", "list") else _PUT_STALL_S
        word = kind.partition("-")[2] if kind.startswith(("no-", "did-")) else kind
        raise refuse("lost" if word in ("stall", "stall-did", "closed") else word)

    def _do_late(self, number: int) -> None:
        due = [act for at, act in self._late if at <= number]
        self._late = [(at, act) for at, act in self._late if at > number]
        self._is_late = True
        for act in due:
            with suppress(CheckpointError, OSError, _HttpError):
                act()
        self._is_late = False

    def keep(self, key: str, data: bytes, mark: str, *, by: str = "") -> Raw:
        """Let an object be there."""
        raw = self.objects[key] = Raw(data, mark, self.now_s)
        if key == ".metadata":
            self.was_overtaken |= self._is_late and self.history[-1:] not in ([], [by[:1]])
            self.history.append(by[:1])
        return raw

    def drop(self, key: str, *, by: str) -> bool:
        """Let an object be gone; whether it was there."""
        if key not in self.objects:
            return False
        self.dropped_by[key] = by[:1]
        self.was_without |= key == ".metadata"
        del self.objects[key]
        return True

    def next_number(self) -> int:
        """Draw a number that was never drawn."""
        self.num_made += 1
        return self.num_made

    def __reduce__(self) -> tuple[Any, ...]:
        return World, ()  # as memory of a process's own, a copy starts empty


class ModelStore:
    """What obstore's engine makes of a store that has preconditions: S3 as it stands here.

    Args:
        world: Where the objects are.
        actor: Who uses this store.
        is_bare: The store compares ETags without their quotes, and so refuses quoted ones.
        denies_absence: 403 for what is not there, as for whoever may not list.
        is_s3fs: The answers come through s3fs, which tells 409 from 412.
    """

    url = "s3://bucket/run"
    deletes_at_once = True
    may_look_whole = True

    def __init__(
        self,
        world: World | None = None,
        actor: str = "A0",
        *,
        is_bare: bool = False,
        denies_absence: bool = False,
        is_s3fs: bool = False,
    ) -> None:
        self.world = world or World()
        self.actor = actor
        self._is_bare = is_bare
        self._denies_absence = denies_absence
        self._is_s3fs = is_s3fs

    # What one server differs from another in -----------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        """What the engine promises there."""
        return Capabilities(
            atomic_create=True,
            compare_and_swap=True,
            acknowledges_puts=True,
            gathers_parts=not self._is_s3fs,
        )

    def mark_of(self, data: bytes) -> str:
        """Return the mark of a new object."""
        return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'

    def answer(self, asked: Asked, word: str) -> CheckpointError:
        """Return the error of an answer."""
        return from_answer(asked, _http(word, tells_409=self._is_s3fs))

    # The verbs ------------------------------------------------------------------------------

    def get(self, key: str) -> Fetched:
        """Fetch a whole object."""
        asked = Asked("get", check_key(key), self.url)

        def act() -> Fetched:
            raw = self._there(asked, key)
            return Fetched(memoryview(raw.data), raw.mark)

        def cut(fetched: Fetched) -> Fetched:
            return replace(fetched, data=_half(fetched.data))

        return self._send("get", asked, act, cut)

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        """Fetch bytes ``[start, end)``."""
        if end <= start:
            return memoryview(b"")
        asked = Asked(f"get [{start}, {end}) of", check_key(key), self.url)

        def act() -> memoryview:
            raw = self._there(asked, key)
            if start >= len(raw.data):
                raise from_answer(asked, Answer(416, "InvalidRange"))
            return memoryview(raw.data)[start:end]

        return check_length(
            asked, start, end, lambda: self._send("get", asked, act, _half), lambda: self.head(key)
        )

    def get_tail(self, key: str, num_bytes: int) -> Tail:
        """Fetch the last bytes of an object."""
        if num_bytes <= 0:
            raise ConfigError(f"num_bytes={num_bytes}")
        whole = self.get(key)
        return Tail(whole.data[-num_bytes:], len(whole.data), whole.etag)

    def head(self, key: str) -> ObjectInfo:
        """Look an object up without its bytes."""
        asked = Asked("head", check_key(key), self.url)
        return self._send("head", asked, lambda: _info(key, self._there(asked, key)))

    def put(self, key: str, data: Buffer, *, mode: PutMode = "overwrite") -> str | None:
        """Store one object in one atomic request and return its ETag."""
        body = bytes(as_bytes_view(data))
        asked = Asked("put", check_key(key), self.url).under(mode)

        def send(mode: PutMode) -> str:
            return self._send("put", asked, lambda: self._put(asked, key, body, mode).mark)

        return with_either_mark(mode, send)

    def put_parts(
        self, key: str, parts: Iterable[Part], *, part_bytes: int, max_concurrency: int
    ) -> str | None:
        """Store one object from parts."""
        check_key(key)
        whole = bytearray()
        for part in map(joined, checked_pieces(parts, part_bytes, NO_LIMITS)):
            whole += part
        return self.put(key, whole)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below the folder ``prefix``."""
        asked = Asked("list", prefix, self.url)
        objects = self.world.objects

        def act() -> list[ObjectInfo]:
            return [_info(key, objects[key]) for key in sorted(objects) if key.startswith(prefix)]

        yield from self._send("list", asked, act)

    def folders(self, prefix: str = "") -> Sequence[str]:
        """Return the names of the folders right below a folder."""
        rest = (one.key[len(prefix) :] for one in self.list(check_prefix(prefix)))
        return sorted({name.partition("/")[0] for name in rest if "/" in name})

    def delete_many(self, keys: Sequence[str]) -> None:
        """Delete objects; a missing one is no error."""
        step = len(keys) or 1 if self.deletes_at_once else 1
        for first in range(0, len(keys), step):
            batch = keys[first : first + step]
            asked = Asked(f"delete {len(batch)} objects, first", batch[0], self.url)
            try:
                self._send("delete", asked, lambda batch=batch: self._delete(batch))  # type: ignore[misc]
            except NotFoundError:
                if self.deletes_at_once:
                    raise
            except StoreError as error:
                raise deletes_failed(error, len(keys) - first, len(keys)) from error

    def close(self) -> None:
        """Nothing is open."""

    def _send(
        self,
        verb: str,
        asked: Asked,
        act: Callable[[], T],
        cut: Callable[[T], T] | None = None,
    ) -> T:
        def refuse(word: str) -> CheckpointError:
            return self.answer(asked, word)

        cut = cut if self.may_look_whole else None
        return self.world.send(self.actor, verb, asked.key, act, refuse, cut)

    def _there(self, asked: Asked, key: str) -> Raw:
        raw = self.world.objects.get(key)
        if raw is None:
            raise self.answer(asked, "403" if self._denies_absence else "absent")
        return raw

    def _put(self, asked: Asked, key: str, body: bytes, mode: PutMode) -> Raw:
        now = self.world.objects.get(key)
        if mode == "create" and now is not None:
            raise self.answer(asked, "412")
        if isinstance(mode, IfMatch):
            if now is None:
                raise self.answer(asked, "absent")
            if mode.etag != (now.mark.strip('"') if self._is_bare else now.mark):
                raise self.answer(asked, "412")
        return self.world.keep(key, body, self.mark_of(body), by=self.actor)

    def _delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.world.drop(key, by=self.actor)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.actor})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.world, self.actor)


class S3Model(ModelStore):
    """S3: ETags that are hashes of the content; many keys are deleted in one request."""


class GcsModel(ModelStore):
    """Google: generations as marks, never the same again; one delete per key."""

    url = "gs://bucket/run"
    deletes_at_once = False

    def mark_of(self, data: bytes) -> str:
        """Return the generation."""
        return str(1_700_000_000_000_000 + self.world.next_number())


class AzureModel(ModelStore):
    """Azure: ETags that are times; 409 where a create finds something; one delete per key."""

    url = "az://container/run"
    deletes_at_once = False

    def mark_of(self, data: bytes) -> str:
        """Return an ETag as Azure writes it."""
        return f'"0x8DD{self.world.next_number():012X}"'


_ERRNO = {
    "403": errno.EACCES,
    "ExpiredToken": errno.EPERM,
    "RequestTimeTooSkewed": errno.ESTALE,
    "412": errno.EEXIST,
    "409": errno.EBUSY,
    "429": errno.EDQUOT,
    "503": errno.EAGAIN,
    "500": errno.EIO,
    "lost": errno.ETIMEDOUT,
    "cut-request": errno.ENOSPC,
    "cut-answer": errno.EIO,
    "absent": errno.ENOENT,
}


class FileModel(ModelStore):
    """A local folder: a temporary file, then a rename, or a link for a create.

    A put is two requests, of which the first writes the temporary file, and only the second is
    one that a schedule's ``put`` counts. Compare-and-swap is a comparison before them.

    Args:
        is_fsspec: The errors of reads, and the order of a compare-and-swap, are those of the fsspec
            engine; else of obstore.
    """

    url = "file:///run"
    deletes_at_once = False
    may_look_whole = False

    def __init__(
        self, world: World | None = None, actor: str = "A0", *, is_fsspec: bool = False
    ) -> None:
        super().__init__(world, actor)
        self._is_fsspec = is_fsspec

    @property
    def capabilities(self) -> Capabilities:
        """What the engine promises there."""
        return Capabilities(
            atomic_create=True,
            compare_and_swap=False,
            acknowledges_puts=True,
            gathers_parts=not self._is_fsspec,
            fills_memory=not self._is_fsspec,
        )

    def mark_of(self, data: bytes) -> str:
        """Return inode, time and size."""
        return f"{self.world.next_number():x}-{self.world.now_s:.2f}-{len(data):x}"

    def answer(self, asked: Asked, word: str) -> CheckpointError:
        """Return what an engine makes of an error of the operating system."""
        number = _ERRNO[word]
        if self._is_fsspec or asked.verb == "put":  # both engines write by Python's means
            return from_fsspec(asked, OSError(number, os.strerror(number)))
        what = f"{os.strerror(number)} (os error {number})"
        if number == errno.ENOENT:
            return from_obstore(asked, FileNotFoundError(f"{asked.key} not found: {what}"))
        if number == errno.EEXIST:
            said = f"Object at location {asked.key} already exists: {what}"
            return from_obstore(asked, obstore.exceptions.AlreadyExistsError(said))
        said = f"Generic LocalFileSystem error: Unable to access file {asked.key}: {what}"
        return from_obstore(asked, obstore.exceptions.GenericError(said))

    def fill(self, key: str, start: int, destination: Destination) -> None:
        """Fetch a range straight into memory of the caller's."""
        data = self.get_range(key, start, start + destination.num_bytes)
        with destination.writing(lambda: None):
            destination.take(data)

    def get(self, key: str) -> Fetched:
        """Fetch a whole object; fsspec asks for its mark first."""
        mark = self.head(key).etag if self._is_fsspec else None
        fetched = super().get(key)
        return replace(fetched, etag=mark) if self._is_fsspec else fetched

    def put(self, key: str, data: Buffer, *, mode: PutMode = "overwrite") -> str | None:
        """Write a temporary file and publish it."""
        body = bytes(as_bytes_view(data))
        asked = Asked("put", check_key(key), self.url).under(mode)
        if isinstance(mode, IfMatch) and not self._is_fsspec:
            check_condition(asked, mode, lambda: self.head(key))
        temporary = f"{key}#{self.world.next_number()}"
        try:
            self._send("begin", asked, lambda: self._write(temporary, body))
            if isinstance(mode, IfMatch) and self._is_fsspec:
                check_condition(asked, mode, lambda: self.head(key))
            return self._send("put", asked, lambda: self._publish(asked, temporary, key, mode))
        except CheckpointError:
            self.world.unfinished.pop(temporary, None)  # as long as it lives, it cleans up
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_file, (self.world, self.actor, self._is_fsspec)

    def _write(self, temporary: str, body: bytes) -> None:
        self.world.unfinished[temporary] = Raw(body, "", self.world.now_s)

    def _publish(self, asked: Asked, temporary: str, key: str, mode: PutMode) -> str:
        if mode == "create" and key in self.world.objects:
            raise self.answer(asked, "412")
        written = self.world.unfinished.pop(temporary, None)
        if written is None:
            raise self.answer(asked, "absent")
        mark = self.mark_of(written.data)
        return self.world.keep(key, written.data, mark, by=self.actor).mark


def _half(data: memoryview) -> memoryview:
    return data[: len(data) // 2]


def _rebuild_file(world: World, actor: str, is_fsspec: bool) -> FileModel:
    return FileModel(world, actor, is_fsspec=is_fsspec)


def _info(key: str, raw: Raw) -> ObjectInfo:
    return ObjectInfo(key, len(raw.data), raw.mark, raw.modified)


def _http(word: str, *, tells_409: bool) -> Answer:
    """Return what an engine reads of a server's answer, or of none."""
    if word in ("lost", "cut-request", "cut-answer"):
        return Answer(text=f"error sending request: {word}", is_transport=True)
    if word == "409" and not tells_409:
        return Answer(412, "ConditionalRequestConflict")  # obstore has one name for both
    return {
        "403": Answer(403, "AccessDenied"),
        "ExpiredToken": Answer(400, "ExpiredToken"),
        "RequestTimeTooSkewed": Answer(403, "RequestTimeTooSkewed"),
        "412": Answer(412, "PreconditionFailed"),
        "409": Answer(409, "ConditionalRequestConflict"),
        "429": Answer(429, "TooManyRequests"),
        "500": Answer(500, "InternalError"),
        "503": Answer(503, "SlowDown"),
        "absent": Answer(404, "NoSuchKey"),
    }[word]


# A filesystem for the fsspec engine -------------------------------------------------------------


class _HttpError(Exception):
    """As filesystems over HTTP raise it."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the server answered {code}")
        self.code = code


_PYTHON: dict[str, Callable[[], Exception]] = {
    "403": lambda: PermissionError(errno.EACCES, "forbidden"),
    "ExpiredToken": lambda: _HttpError(401),
    "RequestTimeTooSkewed": lambda: _HttpError(403),
    "412": lambda: _HttpError(412),
    "409": lambda: _HttpError(409),
    "429": lambda: _HttpError(429),
    "500": lambda: _HttpError(500),
    "503": lambda: _HttpError(503),
    "absent": lambda: FileNotFoundError("no such object"),
}


class ModelFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """A filesystem without preconditions, for the real `FsspecStore`.

    Args:
        world: Where the objects are.
        actor: Who uses it.
        has_marks: Whether a description tells when an object changed.
    """

    protocol = "simfs"
    root_marker = "run/"

    def __init__(self, world: World, actor: str, *, has_marks: bool = True, **more: Any) -> None:
        super().__init__(**more)
        self._world = world
        self._actor = actor
        self._has_marks = has_marks
        world.cuts_silently = True

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("simfs://")

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Describe an object, or tell that a folder is one."""

        def act() -> dict[str, Any]:
            raw = self._world.objects.get(_key(path))
            if raw is not None:
                return self._describe(path, raw)
            if any(key.startswith(_key(path) + "/") for key in self._world.objects):
                return {"name": path, "size": 0, "type": "directory"}
            raise FileNotFoundError(path)

        return self._send("head", path, act)

    def exists(self, path: str, **_: Any) -> bool:
        """Tell whether something is there; unlike fsspec's own, errors are not taken for no."""
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        """Return bytes of an object, as many as there are."""

        def act() -> bytes:
            if _key(path) not in self._world.objects:
                raise FileNotFoundError(path)
            return self._world.objects[_key(path)].data[start:end]

        return self._send("get", path, act, lambda data: data[: len(data) // 2])

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        """Put an object."""
        mark = "" if not self._has_marks else str(self._world.next_number())
        key, data = _key(path), bytes(value)
        self._send("put", path, lambda: self._world.keep(key, data, mark, by=self._actor))

    def find(self, path: str, *, detail: bool = False, **_: Any) -> Any:
        """List all objects below a folder."""

        def act() -> dict[str, dict[str, Any]]:
            return {
                f"run/{key}": self._describe(f"run/{key}", raw)
                for key, raw in sorted(self._world.objects.items())
                if f"run/{key}".startswith(path.rstrip("/") + "/")
            }

        found = self._send("list", path, act)
        return found if detail else list(found)

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        """List what lies right below a folder, folders among it."""
        below = path.rstrip("/") + "/"
        found: dict[tuple[str, bool], dict[str, Any]] = {}
        for one, info in self.find(path, detail=True).items():
            name, slash, _ = one.removeprefix(below).partition("/")
            folder = {"name": below + name, "size": 0, "type": "directory"}
            found[name, bool(slash)] = folder if slash else info
        return list(found.values()) if detail else [info["name"] for info in found.values()]

    def rm_file(self, path: str) -> None:
        """Delete an object."""

        def act() -> None:
            if not self._world.drop(_key(path), by=self._actor):
                raise FileNotFoundError(path)

        self._send("delete", path, act)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if mode != "wb":
            raise NotImplementedError(mode)
        return _ModelFile(self, path)

    def open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        """Open an object for writing."""
        return self._open(path, mode, **more)

    def _describe(self, path: str, raw: Raw) -> dict[str, Any]:
        told: dict[str, Any] = {"name": path, "size": len(raw.data), "type": "file"}
        if self._has_marks:
            told |= {"etag": raw.mark, "modified": raw.modified}
        return told

    def _send(
        self,
        verb: str,
        path: str,
        act: Callable[[], T],
        cut: Callable[[T], T] | None = None,
    ) -> T:
        def refuse(word: str) -> Exception:
            make = _PYTHON.get(word, lambda: ConnectionResetError(f"{word}: connection reset"))
            return make()

        return self._world.send(self._actor, verb, _key(path), act, refuse, cut)


class _ModelFile:
    """A file object that publishes when told to."""

    def __init__(self, fs: ModelFileSystem, path: str) -> None:
        self._fs, self._path, self._data = fs, path, bytearray()
        self.closed = False

    def write(self, data: Buffer) -> None:
        self._data += as_bytes_view(data)

    def close(self) -> None:
        self.closed = True

    def commit(self) -> None:
        self._fs.pipe_file(self._path, bytes(self._data))

    def discard(self) -> None:
        self._data.clear()


def _key(path: str) -> str:
    return path.removeprefix("run/").rstrip("/")


fsspec.register_implementation("simfs", ModelFileSystem, clobber=True)


def fsspec_model(world: World, actor: str, *, has_marks: bool = True) -> FsspecStore:
    """Open the real fsspec engine over a modelled filesystem."""
    options = {"world": world, "actor": actor, "has_marks": has_marks}
    return FsspecStore(parse_location("simfs://run"), options)


# Which store a schedule's transport means -------------------------------------------------------

URLS = {
    "sim-s3": "s3://bucket/run",
    "sim-gcs": "gs://bucket/run",
    "sim-azure": "az://container/run",
    "sim-fsspec": "simfs://run",
    "sim-file": "file:///run",
}


def open_model(world: World, schedule: Schedule, actor: str) -> Any:
    """Open an actor's store: the engine that sends each request once.

    Half of S3's and of the disks' answers come as through obstore and half as through the
    fsspec engines, by the number of requests that the schedule's faults take.
    """
    through_fsspec = sum(fault.times + fault.number for fault in schedule.faults) % 2 == 1
    is_bare = "bare-etag" in schedule.flags
    if schedule.transport == "sim-s3":
        denies = "nolist" in schedule.flags
        return S3Model(world, actor, is_bare=is_bare, denies_absence=denies, is_s3fs=through_fsspec)
    if schedule.transport == "sim-gcs":
        return GcsModel(world, actor)
    if schedule.transport == "sim-azure":
        return AzureModel(world, actor)
    if schedule.transport == "sim-fsspec":
        return fsspec_model(world, actor, has_marks=not is_bare)
    return FileModel(world, actor, is_fsspec=through_fsspec)


class ModelUploads:
    """The files that somebody began to write, as `OpenUploads` of a local folder."""

    def __init__(self, world: World) -> None:
        self._world = world

    def list(self) -> Iterator[OpenUpload]:
        """Yield each of them."""
        for name, raw in sorted(self._world.unfinished.items()):
            yield OpenUpload(name.rpartition("#")[0], name, raw.modified, len(raw.data))

    def abort(self, upload: OpenUpload) -> None:
        """Delete it."""
        self._world.unfinished.pop(upload.upload_id, None)

    def close(self) -> None:
        """Nothing is open."""
