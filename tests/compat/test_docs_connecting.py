"""The code of docs/connecting.md runs as it stands, with its servers replaced by emulators."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tls_server import Terminator

PAGE = Path(__file__).parents[2] / "docs" / "connecting.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def run(block: str, names: dict[str, Any]) -> None:
    exec(compile(block, PAGE.name, "exec"), names)


def test_s3_over_tls_and_google(
    s3_server, gcs_server, authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3, google, _ = BLOCKS  # the last one: tests/contract/test_azurite.py
    client = s3_server.create_bucket("connecting")
    names: dict[str, Any] = {}
    with Terminator(authority.server_context(), s3_server.endpoint_url) as server:
        s3 = s3.replace("https://minio.example:9000", server.url)
        s3 = s3.replace("s3://bucket", "s3://connecting")
        run(s3.replace("/etc/ssl/company-ca.pem", authority.file), names)
    assert "run/step-100/.metadata" in client.keys("run/")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_server.endpoint_url)
    run(google.replace("gs://bucket", "gs://contract/connecting"), names)


def test_the_page_names_what_errors_say() -> None:
    source = "".join(
        path.read_text() for path in (PAGE.parents[1] / "src/dcpstore/store").glob("*.py")
    )
    source = re.sub(r'"\s*\n\s*f?"', "", source)
    for said in (
        *("certificate was refused", "cannot be read", "has no certificate in it"),
        *("does not speak TLS", "wants TLS", "is not the URL of a server"),
        *("answered this process before", "could not be resolved", "no credentials"),
        *("credentials have expired", "access is denied", "lies in another region"),
        *("there is no such bucket", "cannot put under such a condition", "means nothing to"),
    ):
        assert said in source
        assert said in PAGE.read_text()
