"""A server in a process of its own that never outlives the one that started it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self


class ServerProcess:
    """Starts ``python -m module``, which prints its port and ends with its standard input.

    Args:
        module: Calls `serve_until_orphaned`.
        arguments: Its command line.
        needs: What to install where it does not start.
    """

    def __init__(self, module: str, *arguments: str, needs: str) -> None:
        self._command = [sys.executable, "-m", module, *arguments]
        self._needs = needs
        self._process: subprocess.Popen[bytes] | None = None
        self._endpoint_url = ""

    def start(self) -> Self:
        """Start the process and wait until it serves.

        Raises:
            RuntimeError: If it ends instead.
        """
        self._process = subprocess.Popen(  # noqa: S603 - our own module, no shell
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.strip().isdigit():
            self.close()
            raise RuntimeError(f"the server did not start: is {self._needs} installed?")
        self._endpoint_url = f"http://127.0.0.1:{int(line)}"
        return self

    def close(self) -> None:
        """End the process. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def endpoint_url(self) -> str:
        """Where it listens, as ``http://127.0.0.1:port``."""
        return self._endpoint_url


def serve_until_orphaned(server: object) -> None:
    """Print a WSGI or HTTP server's port, serve, and end when standard input closes."""
    port = server.server_port  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()  # type: ignore[attr-defined]
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)  # connections that are still open need no goodbye
