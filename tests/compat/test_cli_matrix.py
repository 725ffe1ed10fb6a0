"""Every command on every state a bucket can be in: the exit code, and what is left standing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

import dcpstore
from dcpstore.testing import Fault, MotoServer, S3Client

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

BUCKET = "matrix"
LEFTOVER = "run/step-2/__0_0.0123456789abcdef.distcp"
COMMANDS = {
    "ls": ("ls", "{run}"),
    "show": ("show", "{url}"),
    "verify": ("verify", "{url}"),
    "diff": ("diff", "{url}", "{twin}", "--read-all"),
    "convert": ("convert", "{url}", "{new}.pt"),
    "copy": ("copy", "{url}", "{new}"),
    "prune": ("prune", "{run}", "--older-than", "0"),
    "prune --yes": ("prune", "{run}", "--older-than", "0", "--yes"),
    "retain": ("retain", "{run}", "--latest", "1"),
    "doctor": ("doctor", "{run}", "--probe-mib", "10"),
}
FINE = dict.fromkeys(COMMANDS, 0)
NOTHING = dict.fromkeys(("show", "verify", "diff", "convert", "copy"), 3)
DAMAGED = dict.fromkeys(("verify", "diff", "convert", "copy"), 1)
EXPECTED = {
    "ours": FINE,
    "stock": FINE,
    "empty": FINE | NOTHING | {"ls": 3, "retain": 3},
    "truncated": FINE | DAMAGED,
    "corrupted": FINE | DAMAGED,
    "stock truncated": FINE | DAMAGED,
    # Stock records have a CRC32 of the whole, which only `verify` and `diff` compute.
    "stock corrupted": FINE | {"verify": 1, "diff": 1},
    "no delete": FINE | {"prune --yes": 4},  # the doctor warns: saves and loads work
}


def state() -> dict[str, Any]:
    source = torch.Generator().manual_seed(0)
    return {"model": {"w": torch.randn(64, 512, generator=source)}, "step": 7}


@pytest.fixture(scope="session")
def url_of(moto_server: MotoServer) -> Callable[[str], str]:
    """Fill a bucket once with a folder per state."""
    client = moto_server.create_bucket(BUCKET)
    options = moto_server.storage_options()

    def save(url: str, *, is_stock: bool) -> None:
        if is_stock:
            dcp.save(state(), storage_writer=FsspecWriter(url, **options), no_dist=True)
        else:
            dcpstore.save(state(), url, storage_options=options)

    save(f"s3://{BUCKET}/twin", is_stock=False)
    for name in EXPECTED:
        folder = name.replace(" ", "-")
        if name != "empty":
            save(f"s3://{BUCKET}/{folder}/run/step-1", is_stock="stock" in name)
            damage(client, f"{folder}/run/step-1/", name)
            client.put(f"{folder}/{LEFTOVER}", b"left")
    return lambda name: f"s3://{BUCKET}/{name.replace(' ', '-')}/run"


def damage(client: S3Client, prefix: str, name: str) -> None:
    (key,) = [one for one in client.keys(prefix) if one.endswith(".distcp")]
    if "truncated" in name:
        client.truncate(key, 60_000)
    if "corrupted" in name:
        client.flip_bit(key, 60_000)


@pytest.fixture
def no_delete(s3_server: MotoServer) -> Iterator[None]:
    for operation in ("DeleteObject", "DeleteObjects"):
        s3_server.add_fault(Fault(operation, status=403, code="AccessDenied", times=-1))
    yield
    s3_server.heal()


# The doctor looks at no checkpoint.
CASES = [
    (name, command)
    for name, codes in EXPECTED.items()
    for command in codes
    if command != "doctor" or name in ("ours", "empty", "no delete")
]


@pytest.mark.parametrize(("name", "command"), CASES)
def test_a_command_ends_with_the_code_that_scripts_expect(
    cli, s3_server: MotoServer, url_of: Callable[[str], str], request, name: str, command: str
) -> None:
    if name == "no delete":
        request.getfixturevalue("no_delete")
    client, run = s3_server.client(BUCKET), url_of(name)
    target = f"new/{name}-{command}".replace(" ", "-")
    places = {
        "run": run,
        "url": f"{run}/step-1",
        "twin": f"s3://{BUCKET}/twin",
        "new": f"s3://{BUCKET}/{target}",
    }
    before = set(client.keys(f"{name.replace(' ', '-')}/"))
    options = [f"{key}={json.dumps(value)}" for key, value in s3_server.storage_options().items()]
    words = [word.format(**places) for word in COMMANDS[command]]
    code, out, err = cli(*words, *(w for one in options for w in ("--storage-option", one)))
    assert code == EXPECTED[name][command], out + err
    written = client.keys(target)
    is_sealed = any(key.endswith((".metadata", ".pt")) for key in written)
    assert is_sealed == (command in ("convert", "copy") and code == 0), written
    assert not (code and written), "a failed command leaves nothing half-done"
    after = set(client.keys(f"{name.replace(' ', '-')}/"))
    if command != "doctor" or name != "no delete":  # its probes cannot be taken back there
        removed = (
            {key for key in before if key.endswith(LEFTOVER)} if command == "prune --yes" else set()
        )
        assert after == before - (set() if code else removed)
