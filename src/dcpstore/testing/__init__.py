"""Fakes and servers for tests of code that uses object stores.

The fakes are `dcpstore.store.Store`s that wrap another one, so they compose:
``RecordingStore(LatencyStore(open_store("memory://x"), latency_s=0.02))``.
`dcpstore.testing.conformance` checks any store of yours.
"""

from __future__ import annotations

from dcpstore.testing.fakes import (
    Crashed,
    FaultyStore,
    LatencyStore,
    RecordingStore,
    StoreFault,
    StoreRequest,
)
from dcpstore.testing.servers import Fault, GcsServer, LoggedRequest, MotoServer, S3Client

__all__ = [
    "Crashed",
    "Fault",
    "FaultyStore",
    "GcsServer",
    "LatencyStore",
    "LoggedRequest",
    "MotoServer",
    "RecordingStore",
    "S3Client",
    "StoreFault",
    "StoreRequest",
]
