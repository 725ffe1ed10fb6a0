from __future__ import annotations

import functools
import importlib.util
import io
import os
import signal
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import botocore.loaders
import pytest
import trustme

from dcpstore.cli.main import main as cli_main
from dcpstore.testing import GcsServer, MotoServer

# gcsfs would ask Google's control plane what kind of bucket an emulated one is.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
# Whoever runs the tests in the background made all their processes deaf to ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def moto_server() -> Iterator[MotoServer]:
    """One embedded S3 for the whole run; tests use buckets of their own."""
    # Else each store on s3fs parses a megabyte of botocore's JSON: half the time of such a test.
    create_loader = functools.cache(botocore.loaders.create_loader)
    with pytest.MonkeyPatch.context() as patch, MotoServer() as server:
        patch.setattr("botocore.session.create_loader", create_loader)
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


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[GcsServer]:
    """One Google storage emulator for the whole run, with a bucket ``contract``."""
    if importlib.util.find_spec("gcp_storage_emulator") is None:
        pytest.skip("gcp-storage-emulator is not installed")
    with GcsServer("contract") as server:
        yield server


class Authority:
    """Issues certificates that nobody trusts who is not told to."""

    def __init__(self, folder: Path) -> None:
        self._made = trustme.CA()
        self.file = str(folder / "ca.pem")
        self._made.cert_pem.write_to_path(self.file)

    def issue(self, name: str = "127.0.0.1", **more: Any) -> trustme.LeafCert:
        """Issue a certificate; `more` as `trustme.CA.issue_cert` takes it."""
        return self._made.issue_cert(name, **more)

    def server_context(self, name: str = "127.0.0.1", **more: Any) -> ssl.SSLContext:
        """Return what makes a server's connections secure."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.issue(name, **more).configure_cert(context)
        return context

    @property
    def options(self) -> dict[str, object]:
        """Storage options of S3 that trust it."""
        return {"client_kwargs": {"verify": self.file, "region_name": "us-east-1"}}


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def cli() -> Callable[..., tuple[int, str, str]]:
    """Run a command of ``dcpstore`` in this process: exit code, standard output and error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        code = cli_main([str(one) for one in arguments], stdout=out, stderr=err)
        return code, out.getvalue(), err.getvalue()

    return run
