"""Azure, by Microsoft's emulator: `npm install -g azurite`, then `pytest -m campaign` on this."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import shutil
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from urllib.parse import quote

import pytest
import torch

import dcpstore
from dcpstore.store import open_store

# Published by Microsoft: every Azurite has this account.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
VERSION = "2021-12-02"

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(shutil.which("azurite-blob") is None, reason="azurite is not installed"),
]


def signed(text: str) -> str:
    found = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    return base64.b64encode(found).decode()


@pytest.fixture(scope="module", params=["http", "https"])
def endpoint(request, tmp_path_factory, authority) -> Iterator[str]:
    """The emulator, with a container ``ckpt``."""
    folder = tmp_path_factory.mktemp("azurite")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["azurite-blob", "--blobPort", str(port), "--location", str(folder)]
    command += ["--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    if request.param == "https":
        leaf = authority.issue()
        leaf.private_key_pem.write_to_path(str(folder / "key.pem"))
        leaf.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
        command += ["--cert", str(folder / "cert.pem"), "--key", str(folder / "key.pem")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"{request.param}://127.0.0.1:{port}/{ACCOUNT}"
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        create_container(url, authority)
        yield url
    finally:
        process.terminate()
        process.wait()


def create_container(url: str, authority) -> None:
    date = formatdate(usegmt=True)
    text = (
        "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{VERSION}\n"
        f"/{ACCOUNT}/{ACCOUNT}/ckpt\nrestype:container"
    )
    request = urllib.request.Request(f"{url}/ckpt?restype=container", method="PUT")
    for name, value in (
        ("x-ms-date", date),
        ("x-ms-version", VERSION),
        ("Authorization", f"SharedKey {ACCOUNT}:{signed(text)}"),
        ("Content-Length", "0"),
    ):
        request.add_header(name, value)
    context = ssl.create_default_context(cafile=authority.file) if url[4] == "s" else None
    urllib.request.urlopen(request, context=context, timeout=30).close()


def account_sas() -> str:
    begins, ends = "2020-01-01T00:00:00Z", "2040-01-01T00:00:00Z"
    fields = [ACCOUNT, "rwdlac", "b", "sco", begins, ends, "", "https,http", VERSION, "", ""]
    sig = quote(signed("\n".join(fields)), safe="")
    dates = f"st={quote(begins)}&se={quote(ends)}"
    return f"sv={VERSION}&ss=b&srt=sco&sp=rwdlac&{dates}&spr=https,http&sig={sig}"


CREDENTIALS = {
    "key": lambda url: {"account_name": ACCOUNT, "account_key": KEY, "endpoint_url": url},
    "sas": lambda url: {"account_name": ACCOUNT, "sas_token": account_sas(), "endpoint_url": url},
    "connection string": lambda url: {
        "connection_string": f"AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={url}"
    },
}


@pytest.mark.parametrize("by", CREDENTIALS)
def test_a_checkpoint_is_saved_loaded_and_replaced(by, endpoint, authority, monkeypatch) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", authority.file)
    options = CREDENTIALS[by](endpoint)
    url = f"az://ckpt/{by.replace(' ', '-')}"
    # Azurite answers 500 to the batch of deletes after an overwrite if a SAS signs it.
    for seed in range(1 if by == "sas" else 2):
        state = {"w": torch.randn(500, 4000, generator=torch.Generator().manual_seed(seed))}
        where = {"storage_options": options, "progress": False}
        dcpstore.save(state, url, overwrite=True, **where)
        found = {"w": torch.zeros(500, 4000)}
        dcpstore.load(found, url, **where)
        assert torch.equal(found["w"], state["w"])
    with pytest.raises(dcpstore.AlreadyExistsError):
        dcpstore.save(state, url, **where)
    store = open_store(url, storage_options=options)
    (data,) = (one for one in store.list() if one.key.endswith(".distcp"))
    assert store.capabilities.fills_memory
    assert len(store.get_range(data.key, 100, 5000)) == 4900
    assert store.inner._clients.ranges._num_detours == 0  # it came over a connection of ours
    tail = store.get_tail(data.key, 100)  # Azure knows no ranges from the end
    assert bytes(tail.data) == store.get_range(data.key, data.size_bytes - 100, data.size_bytes)
    assert (tail.size_bytes, tail.etag) == (data.size_bytes, data.etag)
    folder = url.rpartition("/")[2]
    assert folder in open_store("az://ckpt", storage_options=options).folders()


def test_the_example_of_the_page_runs(endpoint, authority, monkeypatch) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", authority.file)
    page = (Path(__file__).parents[2] / "docs" / "connecting.md").read_text()
    *_, block = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    block = block.replace('"account"', f'"{ACCOUNT}"').replace("az://container", "az://ckpt")
    block = block.replace('"a2V5"', f'"{KEY}", "endpoint_url": "{endpoint}"')
    exec(block, {"dcpstore": dcpstore, "state": {"w": torch.ones(3)}})
