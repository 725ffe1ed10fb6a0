from __future__ import annotations

import functools
import importlib.util
import io
import os
import signal
from collections.abc import Callable, Iterator

import botocore.loaders
import pytest

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


@pytest.fixture(scope="session")
def cli() -> Callable[..., tuple[int, str, str]]:
    """Run a command of ``dcpstore`` in this process: exit code, standard output and error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        code = cli_main([str(one) for one in arguments], stdout=out, stderr=err)
        return code, out.getvalue(), err.getvalue()

    return run
