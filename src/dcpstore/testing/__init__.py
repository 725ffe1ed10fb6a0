"""Fakes and servers for tests of code that uses object stores.

All fakes are `dcpstore.store.Store`s that wrap another one, so they compose.
"""

from __future__ import annotations

from dcpstore.testing.recording import RecordingStore, StoreRequest
from dcpstore.testing.s3_wire import Fault, LoggedRequest
from dcpstore.testing.servers import MotoServer, S3Client

__all__ = [
    "Fault",
    "LoggedRequest",
    "MotoServer",
    "RecordingStore",
    "S3Client",
    "StoreRequest",
]
