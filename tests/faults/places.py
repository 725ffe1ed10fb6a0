"""Folders of the embedded S3, and folders in memory that several stores share."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from dcpstore import ObjectStoreReader, ObjectStoreWriter
from dcpstore.config import ReadConfig, WriteConfig
from dcpstore.format.manifest import Manifest, decode
from dcpstore.format.seal import read_seal, save_id_of
from dcpstore.store import Store, open_store
from dcpstore.testing import FaultyStore, MotoServer, S3Client, StoreFault
from faults.states import PART_BYTES

BUCKET = "faults"
ENGINES = ("obstore", "fsspec")
SMALL = {"part_bytes": PART_BYTES, "budget_bytes": 4 * PART_BYTES, "object_bytes": 8192}
"""Settings under which a small state becomes several objects."""
HERE = {"embed_manifest_bytes": WriteConfig().embed_manifest_bytes}
APART = {"embed_manifest_bytes": 0}
"""Settings under which the manifest lies in ``.metadata``, and in an object of its own."""
_numbers = itertools.count()


def save_ids(names: Iterable[str]) -> set[str]:
    """Whose objects are among these: each rank of each save has an id."""
    return {found for name in names if (found := save_id_of(name)) is not None}


def dont_wait(_seconds: float) -> None:
    """What tests wait between attempts to seal."""


@dataclass
class Place:
    """A folder of the embedded S3, reached by one engine.

    Attributes:
        server: The server.
        name: The folder.
        engine: Which engine the writers and readers use.
        attempts: Tries per request.
    """

    server: MotoServer
    name: str
    engine: str = "obstore"
    attempts: int = 1

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/{self.name}"

    @property
    def client(self) -> S3Client:
        return self.server.client(BUCKET)

    def writer(self, *, overwrite: bool = False, url: str | None = None, **config: Any) -> Any:
        """A writer; ``config`` overrides what a small state needs to become many objects."""
        return ObjectStoreWriter(
            url or self.url,
            storage_options=self.server.storage_options(),
            overwrite=overwrite,
            config=WriteConfig(
                **{"engine": self.engine, "max_attempts": self.attempts, **SMALL, **config}
            ),
            sleep=dont_wait,
        )

    def reader(self, *, url: str | None = None, **config: Any) -> Any:
        """A reader."""
        return ObjectStoreReader(
            url or self.url,
            storage_options=self.server.storage_options(),
            config=ReadConfig(**{"engine": self.engine, "max_attempts": self.attempts, **config}),
        )

    def names(self) -> list[str]:
        """What lies in the folder, relative to it."""
        return [key.removeprefix(f"{self.name}/") for key in self.client.keys(f"{self.name}/")]

    def data_keys(self) -> list[str]:
        """The data objects in the folder."""
        return [key for key in self.names() if key.endswith(".distcp")]

    def content(self) -> dict[str, str]:
        """A digest of every object in the folder."""
        return {key: hashlib.sha256(self.get(key)).hexdigest() for key in self.names()}

    def open_uploads(self) -> list[str]:
        """Multipart uploads into the folder that were neither completed nor aborted."""
        return [key for key in self.client.open_uploads() if key.startswith(f"{self.name}/")]

    def get(self, key: str) -> bytes:
        """One object."""
        return self.client.get(f"{self.name}/{key}")

    def manifest(self) -> Manifest:
        """What the checkpoint's manifest says, wherever it lies."""
        data = memoryview(self.get(".metadata"))
        seal = read_seal(data)
        assert seal is not None
        inside = data[seal.manifest_span.start : seal.manifest_span.end]
        return decode(inside if seal.manifest_key is None else self.get(seal.manifest_key))

    def put_all(self, objects: dict[str, bytes]) -> None:
        """Store objects that some other writer made."""
        for key, data in objects.items():
            self.client.put(f"{self.name}/{key}", data)

    def data_bytes_fetched(self) -> int:
        """Bytes of data objects that the server gave since its log was cleared."""
        return sum(
            request.num_bytes_out
            for request in self.server.requests()
            if request.operation == "GetObject" and request.key.endswith(".distcp")
        )


def new_place(server: MotoServer, engine: str = "obstore", **more: Any) -> Place:
    """An empty folder."""
    client = server.client(BUCKET)
    if not client.exists():
        server.create_bucket(BUCKET)
    server.clear_requests()
    return Place(server, f"place-{next(_numbers)}", engine, **more)


@dataclass
class Backend:
    """One private store in memory, decided in one step as S3 does, for any number of users."""

    shared: Store = field(default_factory=lambda: open_store("memory://backend", engine="obstore"))

    def opener(self, script: Iterable[StoreFault] = ()) -> tuple[Callable[..., Store], FaultyStore]:
        """What to give a writer or reader as ``store_opener``, and the store behind it."""
        store = FaultyStore(self.shared, script)
        return (lambda *_args, **_options: store), store

    def writer(self, script: Iterable[StoreFault] = (), **options: Any) -> Any:
        """A writer whose store follows a script."""
        return self.writer_on(FaultyStore(self.shared, script), **options)

    def writer_on(self, store: Store, *, overwrite: bool = False, **config: Any) -> Any:
        """A writer on a store."""
        return ObjectStoreWriter(
            "memory://backend",
            overwrite=overwrite,
            config=WriteConfig(**{**SMALL, **config}),
            store_opener=lambda *_args, **_options: store,
            sleep=dont_wait,
        )

    def reader(self, script: Iterable[StoreFault] = (), **config: Any) -> Any:
        """A reader whose store follows a script."""
        store = FaultyStore(self.shared, script)
        return ObjectStoreReader(
            "memory://backend",
            config=ReadConfig(**config),
            store_opener=lambda *_args, **_options: store,
        )

    def names(self) -> list[str]:
        """What lies in the folder."""
        return sorted(info.key for info in self.shared.list())

    def content(self) -> dict[str, bytes]:
        """Every object in the folder."""
        return {key: bytes(self.shared.get(key).data) for key in self.names()}
