"""The processes of a run: servers, and the client that forks the measured ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.job import Job, Site, control
from benchmarks.link import Link
from benchmarks.tls import Terminator
from dcpstore.testing import GcsServer

__all__ = ["Client", "GoogleServer", "Server"]

_ROOT = Path(__file__).parents[1]


class Server(AbstractContextManager["Server"]):
    """`benchmarks.server` in a process of its own, for as long as the context lasts.

    Args:
        bucket: Where checkpoints go.
        key: Of the account; the server's own objects take any.
        secret: Likewise.
        upstream: A real server's endpoint, if objects shall lie there.
        is_secure: Whether its clients come over TLS.
    """

    def __init__(
        self, bucket: str, key: str, secret: str, upstream: str | None, *, is_secure: bool
    ) -> None:
        self._bucket, self._key, self._secret = bucket, key, secret
        self._arguments = ["--upstream", upstream] if upstream else []
        self._is_secure = is_secure
        self._terminator: Terminator | None = None

    def __enter__(self) -> Server:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.server", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_ROOT,
        )
        assert self._process.stdout is not None
        port = int(self._process.stdout.readline())
        url = control_url = f"http://127.0.0.1:{port}"
        if self._is_secure:
            self._terminator = Terminator(port).__enter__()
            url = self._terminator.url
        options = {
            "key": self._key,
            "secret": self._secret,
            "endpoint_url": url,
            "client_kwargs": {"region_name": "us-east-1"},
        }
        self.site = Site(f"s3://{self._bucket}", options, control_url)
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminator is not None:
            self._terminator.__exit__(None, None, None)
        self._process.communicate()

    @property
    def environment(self) -> dict[str, str]:
        """What the environment of its clients has to say."""
        return {} if self._terminator is None else self._terminator.trusting()

    @property
    def forgets(self) -> bool:
        """Whether it drops objects when told; a real server wants them deleted."""
        return not self._arguments

    def set_link(self, link: Link) -> None:
        control(self.site, "link", **asdict(link))

    def forget(self, folder: str) -> None:
        control(self.site, "forget", prefix=folder)


class GoogleServer(AbstractContextManager["GoogleServer"]):
    """The emulator of Google's storage; nothing is delayed nor counted there."""

    forgets = False

    def __enter__(self) -> GoogleServer:
        self._server = GcsServer("bench").__enter__()
        self.site = Site("gs://bench", self._server.storage_options(), None)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.__exit__(None, None, None)

    def set_link(self, link: Link) -> None:
        """Do nothing: it is as near as it is."""

    def forget(self, folder: str) -> None:
        """Do nothing: objects have to be deleted."""


class Client(AbstractContextManager["Client"]):
    """`benchmarks.client`, which forks processes per job, for as long as the context lasts.

    Args:
        environment: Added to this process's own.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def __enter__(self) -> Client:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.client"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_ROOT,
            env={**os.environ, **self._environment},
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(self, job: Job) -> dict[str, Any] | None:
        """Run one job in fresh processes; None if it failed, with a traceback on stderr."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the measuring process died")
        found: dict[str, Any] | None = json.loads(answer)
        return found
