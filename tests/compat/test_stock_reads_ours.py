"""Checkpoints of ours load with stock torch where `dcpstore` is not installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from compat_states import QUIET, assert_same, blank, full_state

from dcpstore import ObjectStoreReader, ObjectStoreWriter, WriteConfig
from dcpstore.format.seal import read_seal
from dcpstore.testing import MotoServer

pytestmark = QUIET

MIB = 1 << 20
SCRIPT = Path(__file__).with_name("load_without_dcpstore.py")
# Parts of 5 MiB and small objects: the tensor of 12 MiB is an object of three parts.
CONFIG = WriteConfig(part_bytes=5 * MIB, object_bytes=64 << 10, inline_bytes=256)
LARGE = 3 * MIB


@pytest.fixture(scope="module")
def saved(moto_server: MotoServer, tmp_path_factory):
    """A checkpoint of ours in a bucket, and its copy in a folder."""
    moto_server.create_bucket("stock-reads-ours")
    url = "s3://stock-reads-ours/run/step-1"
    state = full_state(large_elements=LARGE)
    moto_server.clear_requests()
    writer = ObjectStoreWriter(url, storage_options=moto_server.storage_options(), config=CONFIG)
    dcp.save(state, storage_writer=writer, no_dist=True)
    parts = [one for one in moto_server.requests() if one.operation == "UploadPart"]
    folder = tmp_path_factory.mktemp("copied")
    bucket = fsspec.filesystem("s3", **moto_server.storage_options(), skip_instance_cache=True)
    bucket.get(f"{url}/", f"{folder}/", recursive=True)
    return state, url, folder, len(parts)


@pytest.fixture(scope="module")
def loaded(saved, moto_server: MotoServer, tmp_path_factory) -> dict[str, object]:
    """What stock torch loaded in an interpreter that cannot import `dcpstore`."""
    state, url, folder, _ = saved
    out = tmp_path_factory.mktemp("loaded")
    torch.save(blank(state), out / "template.pt")
    request = {
        "template": str(out / "template.pt"),
        "folder": str(folder),
        "url": url,
        "options": moto_server.storage_options(),
        "out": str(out),
    }
    (out / "request.json").write_text(json.dumps(request))
    ended = subprocess.run(
        [sys.executable, "-I", str(SCRIPT), str(out / "request.json")],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    names = ("file_system", "fsspec", "converted")
    return {name: torch.load(out / f"{name}.pt", weights_only=True) for name in names}


def test_the_checkpoint_has_many_objects_and_one_of_several_parts(saved) -> None:
    _, _, folder, num_parts = saved
    assert len(list(folder.glob("*.distcp"))) >= 4
    assert num_parts >= 3


def test_the_manifest_lies_between_pickle_and_footer(saved) -> None:
    _, _, folder, _ = saved
    seal = read_seal(memoryview((folder / ".metadata").read_bytes()))
    assert seal is not None
    assert seal.manifest_span.num_bytes > 1000
    assert not list(folder.glob(".dcpstore-*"))


def test_stock_torch_loads_every_value_from_files_by_fsspec_and_converted(loaded, saved) -> None:
    for how in ("file_system", "fsspec", "converted"):
        assert_same(loaded[how], saved[0], how)


def test_ours_loads_the_copied_folder(saved) -> None:
    state, _, folder, _ = saved
    target = blank(state)
    dcp.load(target, storage_reader=ObjectStoreReader(folder), no_dist=True)
    assert_same(target, state)


def test_every_record_opens_with_weights_only(saved) -> None:
    """Each tensor lies in the bucket as a whole record that stock torch holds safe."""
    _, _, folder, _ = saved
    metadata = dcp.FileSystemReader(folder).read_metadata()
    entries = metadata.state_dict_metadata
    for index, info in metadata.storage_data.items():
        if not hasattr(entries[index.fqn], "chunks"):
            continue
        with (folder / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            record = file.read(info.length)
        path = folder.parent / "record.pt"
        path.write_bytes(record)
        tensor = torch.load(path, weights_only=True)
        assert tuple(tensor.shape) == tuple(entries[index.fqn].chunks[0].sizes)
