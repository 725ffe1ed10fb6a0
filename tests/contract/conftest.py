from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from dcpstore.store import RetryPolicy, Store, open_store
from dcpstore.testing import FaultyStore, LatencyStore, MotoServer, RecordingStore

ONCE = RetryPolicy(max_attempts=1)
_numbers = itertools.count()

ENGINES = (
    "obstore-s3",
    "s3fs",
    "obstore-local",
    "fsspec-local",
    "obstore-memory",
    "fsspec-memory",
    "obstore-gcs",
    "gcsfs",
)
S3_ENGINES = ("obstore-s3", "s3fs")
WRAPPERS: dict[str, Callable[[Store], Store]] = {
    "recording": RecordingStore,
    "latency": LatencyStore,
    "faulty": FaultyStore,
    "all": lambda inner: RecordingStore(LatencyStore(FaultyStore(inner))),
}


@pytest.fixture(scope="session")
def bucket(moto_server: MotoServer) -> str:
    moto_server.create_bucket("contract")
    return "contract"


@pytest.fixture
def open_engine(request, moto_server, bucket, tmp_path) -> Callable[..., Store]:
    """Open a store of an engine, by default in an empty place."""

    def make(name: str, place: str | None = None, **more) -> Store:
        place = place or f"t{next(_numbers)}"
        engine = "obstore" if name.startswith("obstore") else "fsspec"
        options = more.pop("storage_options", None)
        if name in S3_ENGINES:
            url, options = f"s3://{bucket}/{place}", options or moto_server.storage_options()
        elif name == "obstore-gcs":
            url = f"gs://{bucket}/{place}"
            options = options or {
                "endpoint_url": moto_server.endpoint_url,
                "bearer_token": "none",
            }
        elif name == "gcsfs":
            gcs = request.getfixturevalue("gcs_server")
            url, options = f"gs://contract/{place}", options or gcs.storage_options()
        elif name.endswith("local"):
            url = str(tmp_path / place)
        else:
            url = f"memory://contract/{place}"
        return open_store(url, storage_options=options, engine=engine, **more)

    return make


@pytest.fixture(params=ENGINES)
def store(request, open_engine):
    opened = open_engine(request.param, retry=ONCE)
    yield opened
    opened.close()
