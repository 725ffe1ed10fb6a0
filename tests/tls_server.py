"""TLS in front of a server of the tests, and TLS that is cut wherever a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

from typing_extensions import Self


class Terminator:
    """Takes TLS off every connection and passes it on to a server. Use as a context manager."""

    def __init__(self, context: ssl.SSLContext, upstream_url: str) -> None:
        self._context = context
        url = urlsplit(upstream_url)
        self._upstream = url.hostname, url.port
        self.num_connections = 0

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        serving = asyncio.start_server(self._pass_on, "127.0.0.1", 0, ssl=self._context)
        self._server = self._run(serving)
        self.url = f"https://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _stop(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.05)  # in which the transports close their sockets

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        back_reader, back_writer = await asyncio.open_connection(*self._upstream)
        try:
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                await asyncio.gather(_copy(reader, back_writer), _copy(back_reader, writer))
        finally:
            for one in (writer, back_writer):
                one.transport.abort()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(1 << 16):
        target.write(data)
        await target.drain()
    target.close()


class Conversation:
    """One connection of a client, whose records a test may cut, damage or withhold."""

    def __init__(self, raw: socket.socket, context: ssl.SSLContext) -> None:
        self.raw = raw
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_side=True)
        self._waiting(self._tls.do_handshake)
        self.flush()

    def _waiting(self, call: Callable[..., Any], *args: Any) -> Any:
        while True:
            try:
                return call(*args)
            except ssl.SSLWantReadError:
                self.flush()
                data = self.raw.recv(1 << 16)
                if not data:
                    raise ConnectionResetError from None
                self._received.write(data)

    def read_request(self) -> tuple[str, int, int]:
        """Return the head of a request, and the range that it wants."""
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += self._waiting(self._tls.read, 1)
        found = re.search(rb"(?i)range: bytes=(\d+)-(\d+)", head)
        assert found is not None
        return head.decode(), int(found[1]), int(found[2]) + 1

    def sealed(self, data: bytes) -> bytes:
        """Return the records of some bytes, instead of sending them."""
        self._tls.write(data)
        return self._to_send.read()

    def send(self, data: bytes) -> None:
        self.raw.sendall(self.sealed(data))

    def flush(self) -> None:
        self.raw.sendall(self._to_send.read())

    def say_goodbye(self) -> None:
        """Send a close_notify."""
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()
        self.flush()

    def reset(self) -> None:
        self.raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.raw.close()
