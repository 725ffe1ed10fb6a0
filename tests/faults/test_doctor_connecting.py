"""`dcpstore doctor` names what stands between this machine and a store, and soon."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tls_server import Terminator

REFUSED = "certificate was refused"
CASES = {
    "no authority given": (REFUSED, "correct the certificates"),
    "another authority": (REFUSED, "correct the certificates"),
    "a certificate for another name": ("for another name: write that one", "endpoint_url"),
    "an authority's file that is not there": ("cannot be read", "PEM"),
    "https to a port for http": ("does not speak TLS", "Write http://"),
    "http to a port for https": ("closed without an answer", "check the endpoint, its scheme"),
    "no scheme": ("is not the URL of a server", "write 'https://"),
    "nobody listens": ("connection was refused", "check the endpoint"),
    "an unknown host": ("could not be resolved", "check the endpoint"),
}


@pytest.fixture(params=CASES)
def case(
    request: pytest.FixtureRequest, authority: Any, s3_server: Any, tmp_path: Any
) -> Iterator[tuple[str, str, str | None]]:
    """A name, an endpoint, and a file of certificates."""
    name = request.param
    of = "elsewhere.example" if "name" in name else "127.0.0.1"
    plain, nobody = s3_server.endpoint_url, f"127.0.0.1:{_free_port()}"
    with Terminator(authority.server_context(of), plain) as server:
        endpoints = {
            "https to a port for http": plain.replace("http:", "https:"),
            "http to a port for https": server.url.replace("https:", "http:"),
            "no scheme": nobody,
            "nobody listens": f"https://{nobody}",
            "an unknown host": "https://no-such-host.invalid",
        }
        files = {
            "another authority": lambda: type(authority)(tmp_path).file,
            "a certificate for another name": lambda: authority.file,
            "an authority's file that is not there": lambda: str(tmp_path / "none.pem"),
        }
        yield name, endpoints.get(name, server.url), files.get(name, lambda: None)()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_the_cause_and_the_remedy_are_named_within_seconds(case: Any, cli: Any) -> None:
    name, endpoint, verify = case
    client = json.dumps({"verify": verify} if verify else {})
    options = ("key=a", "secret=b", f"endpoint_url={endpoint}", f"client_kwargs={client}")
    began = time.monotonic()
    given = [word for one in options for word in ("--storage-option", one)]
    code, out, err = cli("doctor", "s3://bucket-of-nobody/x", "--retry-seconds", "1", *given)
    assert time.monotonic() - began < 20, "1 s, and what a loaded machine adds"
    assert code != 0
    said = " ".join((out + err).split())
    for words in CASES[name]:
        assert words in said, said
