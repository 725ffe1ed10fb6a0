"""A Google storage emulator to run as a process of its own: its JSON API, in memory.

``python -m dcpstore.testing.gcs_server BUCKET...`` prints its port and serves until its
standard input closes.
"""

from __future__ import annotations

import sys
from functools import partial
from http.server import HTTPServer
from importlib import import_module
from typing import Any

from dcpstore.testing.servers import serve_until_orphaned


class _QuietServer(HTTPServer):
    request_queue_size = 128  # of 5, connections beyond wait a second for TCP to try again

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keep silent: a client that goes away is part of many tests."""


def _build(buckets: list[str]) -> HTTPServer:
    # The emulator ships no types, and is imported by name so that nobody needs it to type-check.
    create_bucket = import_module("gcp_storage_emulator.handlers.buckets").create_bucket
    handler: Any = import_module("gcp_storage_emulator.server").RequestHandler
    storage = import_module("gcp_storage_emulator.storage").Storage(use_memory_fs=True)

    class QuietHandler(handler):  # type: ignore[misc]
        def log_message(self, *args: Any) -> None:
            """Keep silent."""

    for name in buckets:
        create_bucket(name, storage)
    # One request at a time: the emulator's storage is not made for threads.
    return _QuietServer(("127.0.0.1", 0), partial(QuietHandler, storage))


def main() -> None:
    """Serve until standard input closes."""
    serve_until_orphaned(_build(sys.argv[1:]))


if __name__ == "__main__":
    main()
