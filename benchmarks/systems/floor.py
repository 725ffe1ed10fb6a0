"""The floor of a load: a loop of ``SSL_read`` in C into the targets, and CRC32C; nothing else.

It reads what `bare` saved. Built with the C compiler of this machine and OpenSSL's headers
(Debian: ``gcc``, ``libssl-dev``) when it is first asked for; without these it is left out.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

from benchmarks.systems.bare import save_as_one
from benchmarks.systems.base import StateDict, System

__all__ = ["can_be_built", "floor"]

_SOURCE = Path(__file__).with_suffix(".c")
_FLAGS = ("-O2", "-shared", "-fPIC", "-D_GNU_SOURCE", "-lssl", "-lcrypto")
_RANGE_BYTES = 16 << 20  # as dcpstore's long ones
_BLOCK_BYTES = 256 << 10


def floor(label: str, *, num_connections: int) -> System:
    """Return a system that loads over so many connections at a time, one thread each."""
    return System(
        label=label,
        layout="bare",
        save=partial(save_as_one, checks=False),
        load=partial(_load, num_connections=num_connections),
        is_bare=True,
        is_variant=True,
        is_here=can_be_built,
    )


def can_be_built() -> bool:
    """Tell whether there are a compiler and OpenSSL's headers."""
    try:
        _library()
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


@cache
def _library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        built = f"{folder}/floor.so"
        command = ["cc", str(_SOURCE), "-o", built, *_FLAGS]
        subprocess.run(command, check=True, capture_output=True)
        library = ctypes.CDLL(built)
    library.floor_trust.restype = library.floor_open.restype = ctypes.c_void_p
    library.floor_trust.argtypes = [ctypes.c_char_p]
    library.floor_open.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p]
    library.floor_close.argtypes = [ctypes.c_void_p]
    library.floor_fetch.argtypes = [
        *(ctypes.c_void_p, ctypes.c_char_p),
        *(ctypes.c_void_p, ctypes.c_long),
    ]
    return library


def _load(state: StateDict, url: str, options: dict[str, Any], *, num_connections: int) -> None:
    import google_crc32c

    server = urlsplit(options["endpoint_url"])
    path = f"{server.path}/{url.removeprefix('s3://')}/all"
    library, idle = _library(), SimpleQueue[int]()
    trust = None
    if server.scheme == "https":
        trust = _checked(library.floor_trust(os.environ["AWS_CA_BUNDLE"].encode()))

    def get(at: int, address: int, num_bytes: int) -> None:
        connection = idle.get()
        ranged = f"Range: bytes={at}-{at + num_bytes - 1}"
        request = f"GET {path} HTTP/1.1\r\nHost: {server.netloc}\r\n{ranged}\r\n\r\n"
        failed = library.floor_fetch(connection, request.encode(), address, num_bytes)
        idle.put(connection)
        if failed:
            raise OSError(f"{url}: no range came")
        for start in range(0, num_bytes, _BLOCK_BYTES):
            size = min(_BLOCK_BYTES, num_bytes - start)
            google_crc32c.value((ctypes.c_char * size).from_address(address + start))

    def open_one(_: int) -> None:
        host, port = str(server.hostname).encode(), str(server.port).encode()
        idle.put(_checked(library.floor_open(host, port, trust)))

    with ThreadPoolExecutor(num_connections) as executor:
        list(executor.map(open_one, range(num_connections)))
        for done in [executor.submit(get, *one) for one in _ranges(state)]:
            done.result()
    while not idle.empty():
        library.floor_close(idle.get())


def _ranges(state: StateDict) -> Iterator[tuple[int, int, int]]:
    """Yield ranges of the object, with the address of the memory that they go to."""
    done = 0
    for tensor in state.values():
        for start in range(0, tensor.nbytes, _RANGE_BYTES):
            size = min(_RANGE_BYTES, tensor.nbytes - start)
            yield done + start, tensor.data_ptr() + start, size
        done += tensor.nbytes


def _checked(pointer: int | None) -> int:
    if not pointer:
        raise OSError("the floor has no connection, or no certificate")
    return pointer
