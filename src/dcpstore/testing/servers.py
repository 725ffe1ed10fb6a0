"""Servers for tests and demos, each in a process of its own that ends with the one that started it.

`MotoServer` is an S3 whose requests are logged, slowed down and made to fail by a script. It and
the process that serves (`dcpstore.testing.s3_server`) tell each other of `LoggedRequest`s and
`Fault`s in JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree as ET

from typing_extensions import Self

# moto checks no signature, but hides objects from those who send none at all.
_SIGNED = (
    "AWS4-HMAC-SHA256 Credential=test/20200101/us-east-1/s3/aws4_request, "
    "SignedHeaders=host, Signature=none"
)


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One request as the server saw it.

    Attributes:
        operation: S3's name for it, such as ``GetObject``.
        bucket: Bucket, or empty.
        key: Object key, or empty.
        range: The ``Range`` header as sent; None without one.
        status: HTTP status of the answer.
        num_bytes_in: Length of the request's body.
        num_bytes_out: Length of the answer's body.
        start_s: When it came, on the server's monotonic clock.
        end_s: When its answer was ready.
        num_in_flight: Requests being served when it came, itself included.
        is_conditional: Whether it carried ``If-Match`` or ``If-None-Match``.
    """

    operation: str
    bucket: str
    key: str
    range: str | None
    status: int
    num_bytes_in: int
    num_bytes_out: int
    start_s: float
    end_s: float
    num_in_flight: int
    is_conditional: bool


@dataclass(slots=True)
class Fault:
    """What to do to the next requests of one operation.

    Attributes:
        operation: S3's name for the operation; ``*`` for any.
        kind: ``error`` answers with `status` and `code` and does nothing; ``lost_ack``
            does what was asked and then answers so; ``short`` cuts `num_bytes` off the
            answer's body and ``long`` adds as many, both with a matching length;
            ``flip`` turns one bit of the body; ``drop`` closes the connection halfway
            through the body.
        times: How many requests it takes; -1 for all.
        skip: How many of them to let pass first.
        key: Only requests for this key; empty for any.
        status: HTTP status of ``error`` and ``lost_ack``.
        code: S3's error code.
        retry_after_s: ``Retry-After`` header; None for none.
        num_bytes: For ``short`` and ``long``.
    """

    operation: str = "*"
    kind: str = "error"
    times: int = 1
    skip: int = 0
    key: str = ""
    status: int = 503
    code: str = "SlowDown"
    retry_after_s: float | None = None
    num_bytes: int = 1

    def takes(self, operation: str, key: str) -> bool:
        """Whether this fault applies to a request, counting it if so."""
        if self.times == 0 or self.operation not in ("*", operation):
            return False
        if self.key and self.key != key:
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.times > 0:
            self.times -= 1
        return True


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
        self.endpoint_url = ""
        """Where it listens, as ``http://127.0.0.1:port``."""

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
        self.endpoint_url = f"http://127.0.0.1:{int(line)}"
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

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_until_orphaned(server: object) -> None:
    """Print a WSGI or HTTP server's port, serve, and end when standard input closes."""
    port = server.server_port  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()  # type: ignore[attr-defined]
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)  # connections that are still open need no goodbye


class MotoServer(ServerProcess):
    """An S3 server (moto) in a process of its own on 127.0.0.1.

    It keeps everything in memory, checks no credentials and no checksums, and
    decides conditional puts rightly. Every request is logged; latency and faults can
    be scripted while it runs. Needs ``moto[server,s3]``.

    ```python
    with MotoServer(latency_s=0.02) as server:
        server.create_bucket("run")
        store = open_store("s3://run/a", storage_options=server.storage_options())
    ```

    Args:
        latency_s: Time that every request waits before it is served, concurrently.
    """

    def __init__(self, *, latency_s: float = 0.0) -> None:
        module = "dcpstore.testing.s3_server"
        super().__init__(module, "--latency-s", str(latency_s), needs="moto[server,s3]")

    def storage_options(self) -> dict[str, Any]:
        """fsspec-style options that reach this server."""
        return {
            "key": "test",
            "secret": "test",
            "endpoint_url": self.endpoint_url,
            "client_kwargs": {"region_name": "us-east-1"},
        }

    def create_bucket(self, name: str) -> S3Client:
        """Make a bucket and return a client for it."""
        client = self.client(name)
        client.request("PUT")
        return client

    def client(self, bucket: str) -> S3Client:
        """Return a minimal client of one bucket, independent of all engines."""
        return S3Client(self.endpoint_url, bucket)

    def requests(self) -> list[LoggedRequest]:
        """All requests since the start or the last `clear_requests`, in order of answer."""
        return [LoggedRequest(**entry) for entry in self._control("log")]

    def counts(self) -> Counter[str]:
        """How many requests of each operation were made."""
        return Counter(request.operation for request in self.requests())

    def clear_requests(self) -> None:
        """Forget the requests so far."""
        self._control("clear")

    def add_fault(self, fault: Fault) -> None:
        """Script a fault; earlier ones are tried first."""
        self._control("fault", asdict(fault))

    def heal(self) -> None:
        """Forget all faults."""
        self._control("heal")

    def set_latency(self, latency_s: float) -> None:
        """Let every later request wait so long."""
        self._control("latency", {"latency_s": latency_s})

    def _control(self, what: str, given: dict[str, Any] | None = None) -> Any:
        body = json.dumps(given or {}).encode()
        return json.loads(_send("POST", f"{self.endpoint_url}/_dcpstore/{what}", body))


class GcsServer(ServerProcess):
    """A Google storage emulator (JSON API) in a process of its own on 127.0.0.1.

    It ignores preconditions and takes one request at a time. For gcsfs only: obstore
    speaks Google's XML API. Needs ``gcp-storage-emulator``, and in this process
    ``GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT=false`` before gcsfs is imported: gcsfs would
    ask Google's control plane for the kind of the bucket first, for 60 s.

    Args:
        buckets: Made before it serves; without ``-`` in their names.
    """

    def __init__(self, *buckets: str) -> None:
        super().__init__("dcpstore.testing.gcs_server", *buckets, needs="gcp-storage-emulator")

    def storage_options(self) -> dict[str, Any]:
        """fsspec-style options that reach this server."""
        return {"endpoint_url": self.endpoint_url, "token": "anon", "project": "test"}


class S3Client:
    """A bucket seen with nothing but plain HTTP. For servers that check no signature.

    Args:
        endpoint_url: The server.
        bucket: The bucket.
    """

    def __init__(self, endpoint_url: str, bucket: str) -> None:
        self._base = f"{endpoint_url}/{bucket}"

    def request(self, method: str, key: str = "", query: str = "", body: bytes = b"") -> bytes:
        """Send one request and return the answer's body.

        Raises:
            urllib.error.HTTPError: If the server refuses.
        """
        path = f"/{quote(key, safe='/~')}" if key else ""
        return _send(method, f"{self._base}{path}{f'?{query}' if query else ''}", body)

    def get(self, key: str) -> bytes:
        """Fetch an object."""
        return self.request("GET", key)

    def put(self, key: str, data: bytes) -> None:
        """Store an object."""
        self.request("PUT", key, body=data)

    def delete(self, key: str) -> None:
        """Delete an object."""
        self.request("DELETE", key)

    def exists(self) -> bool:
        """Whether the bucket exists."""
        try:
            self.request("GET", query="list-type=2&max-keys=1")
        except urllib.error.HTTPError as error:
            with error:
                return False
        return True

    def keys(self, prefix: str = "") -> list[str]:
        """All keys below a prefix, sorted."""
        found: list[str] = []
        more = ""
        while True:
            query = f"list-type=2&prefix={quote(prefix, safe='')}{more}"
            tree = ET.fromstring(self.request("GET", query=query))  # noqa: S314 - our own server
            found += [one.text or "" for one in tree.iterfind(".//{*}Contents/{*}Key")]
            token = tree.findtext("{*}NextContinuationToken")
            if not token:
                return sorted(found)
            more = f"&continuation-token={quote(token, safe='')}"

    def open_uploads(self) -> list[str]:
        """Keys of the multipart uploads that were neither completed nor aborted."""
        tree = ET.fromstring(self.request("GET", query="uploads"))  # noqa: S314 - our own server
        return sorted(one.text or "" for one in tree.iterfind(".//{*}Upload/{*}Key"))

    def flip_bit(self, key: str, offset: int, bit: int = 0) -> None:
        """Change one bit of a stored object."""
        data = bytearray(self.get(key))
        data[offset] ^= 1 << bit
        self.put(key, bytes(data))

    def truncate(self, key: str, size_bytes: int) -> None:
        """Cut a stored object off."""
        self.put(key, self.get(key)[:size_bytes])


def _send(method: str, url: str, body: bytes) -> bytes:
    request = urllib.request.Request(url, data=body or None, method=method)  # noqa: S310 - our own server
    request.add_header("Authorization", _SIGNED)
    if body:
        request.add_header("Content-Type", "application/octet-stream")
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - our own server
        return bytes(answer.read())
