from __future__ import annotations

from collections.abc import Iterator

import pytest

from dcpstore.testing import MotoServer


@pytest.fixture(scope="session")
def moto_server() -> Iterator[MotoServer]:
    """One embedded S3 for the whole run; tests use buckets of their own."""
    with MotoServer() as server:
        yield server


@pytest.fixture
def s3_server(moto_server: MotoServer) -> Iterator[MotoServer]:
    """The embedded S3 with an empty log and no faults."""
    moto_server.heal()
    moto_server.set_latency(0)
    moto_server.clear_requests()
    yield moto_server
    moto_server.heal()
    moto_server.set_latency(0)
