from __future__ import annotations

import json
import pickle
import pickletools
import struct
import warnings
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as stock
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from dcpstore.errors import CorruptError
from dcpstore.format.manifest import DataObject, Entry, ItemId, Manifest, StoredItem, decode, encode
from dcpstore.format.seal import check_relative, get_manifest, make_metadata, read_seal
from dcpstore.format.stock import load_metadata_pickle
from dcpstore.store.base import ByteRange
from dcpstore.write.commit import Sealer
from faults.places import Backend
from faults.states import failing, load, save, state_at


class Calls:
    """Pickles as a call of any callable by its name, run when it is unpickled."""

    def __init__(self, module: str, name: str, *arguments: Any) -> None:
        self.target = f"{module}\n{name}"
        self.arguments = arguments

    def as_pickle(self) -> bytes:
        """Protocol 0 names a global without importing it."""
        pushed = b"".join(pickle.dumps(one, 2)[2:-1] for one in self.arguments)
        return b"c" + self.target.encode() + b"\n(" + pushed + b"tR."

    def as_nested(self) -> bytes:
        """The same with the dotted names of protocol 4, inside of legitimate metadata."""
        module, name = self.target.split("\n")
        pushed = b"".join(pickle.dumps(one, 2)[2:-1] for one in self.arguments)
        call = _text(module) + _text(name) + b"\x93(" + pushed + b"tR"
        outer = _text("torch.distributed.checkpoint.metadata") + _text("StorageMeta")
        return b"\x80\x04" + outer + b"\x93(" + call + b"tR."


def _text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def attacks(canary: Path) -> list[Calls]:
    path = str(canary)
    code = f"open({path!r}, 'w').close()"
    return [
        Calls("os", "system", f"touch {path}"),
        Calls("posix", "system", f"touch {path}"),
        Calls("builtins", "eval", code),
        Calls("builtins", "exec", code),
        Calls("builtins", "open", path, "w"),
        Calls("builtins", "getattr", "x", "__class__"),
        Calls("builtins", "__import__", "os"),
        Calls("functools", "partial", print),
        Calls("functools", "reduce", print, [1, 2]),
        Calls("operator", "attrgetter", "system"),
        Calls("subprocess", "Popen", f"touch {path}"),
        Calls("torch.hub", "load", "some/repo", "model"),
        Calls("torch", "load", path),
        Calls("torch", "save", 1, path),
        Calls("torch", "set_num_threads", 1),
        Calls("torch._utils", "_rebuild_tensor_v2", 1),
        Calls("torch.utils.cpp_extension", "load_inline", "x", code),
        Calls("torch.serialization", "load", path),
        Calls("torch.storage", "_load_from_bytes", b"x"),
        Calls("numpy", "load", path),
        Calls("numpy._core.multiarray", "_reconstruct", 1),
        Calls("numpy.core.multiarray", "scalar", 1),
        Calls("numpy.testing._private.utils", "runstring", code, {}),
        Calls("pathlib", "Path.unlink", path),
        Calls("pathlib", "os.system", f"touch {path}"),
        Calls("collections", "OrderedDict.fromkeys", "x"),
        Calls("torch", "serialization.os.system", f"touch {path}"),
        Calls("torch.distributed.checkpoint.metadata", "pickle.loads", b"."),
        Calls("torch.distributed.checkpoint.filesystem", "os.remove", path),
        Calls("dcpstore.format.stock", "load_metadata_pickle", b"."),
    ]


@pytest.mark.parametrize("form", ["as_pickle", "as_nested"])
@pytest.mark.parametrize("number", range(len(attacks(Path("x")))))
def test_a_pickle_that_names_more_than_data_is_refused_and_runs_nothing(
    tmp_path: Path, number: int, form: str
) -> None:
    canary = tmp_path / "canary"
    attack = attacks(canary)[number]
    data = getattr(attack, form)()
    assert len(list(pickletools.genops(data))) > 3  # a well-formed pickle
    module, name = attack.target.split("\n")
    with pytest.raises(CorruptError) as caught:
        load_metadata_pickle(data, key=".metadata")
    assert f"{module}.{name}" in caught.value.message
    for word in (".metadata", "was not run", "allow_pickle=True"):
        assert word in caught.value.message
    assert caught.value.key == ".metadata"
    assert not canary.exists()


def test_the_attacks_would_work_on_plain_pickle(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for attack in attacks(canary)[:4]:
        load_metadata_pickle(attack.as_pickle(), key=".metadata", allow_pickle=True)
        assert canary.exists()
        canary.unlink()


@pytest.mark.parametrize("value", [np.arange(3), np.float64(1), torch.ones(2), lambda: None, print])
def test_values_that_are_no_metadata_are_refused(value: Any) -> None:
    try:
        data = pickle.dumps(Metadata({}, planner_data=value))
    except (pickle.PicklingError, AttributeError):
        data = b"cbuiltins\nprint\n."
    with pytest.raises(CorruptError):
        load_metadata_pickle(data, key=".metadata")


@pytest.mark.parametrize(
    "data",
    [b"", b"\x80", b"no pickle at all", b"\x80\x04.", b"\x80\x63N.", pickle.dumps("x")[:-1]],
)
def test_bytes_that_are_no_pickle_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError, match="no checkpoint metadata"):
        load_metadata_pickle(data, key="__0.metadata")


def test_a_build_instruction_cannot_reach_beyond_the_object(tmp_path: Path) -> None:
    """BUILD sets attributes of what was made; on our own classes that is data and no more."""
    data = pickle.dumps(Metadata({}))
    assert load_metadata_pickle(data, key="x") == Metadata({})
    persistent = b"Pname\n."
    with pytest.raises(CorruptError):
        load_metadata_pickle(persistent, key="x")
    extension = b"\x80\x02\x82\x01."
    with pytest.raises(CorruptError):
        load_metadata_pickle(extension, key="x")


def stock_metadata(**places: str) -> Metadata:
    size = torch.Size([2, 3])
    chunk = stock.ChunkStorageMetadata(torch.Size([0, 0]), size)
    return Metadata(
        state_dict_metadata={
            **{
                name: stock.TensorStorageMetadata(stock.TensorProperties(dtype), size, [chunk])
                for name, dtype in {
                    "a": torch.float32,
                    "b": torch.bfloat16,
                    "c": torch.complex64,
                    "d": torch.float8_e4m3fn,
                    "e": torch.bool,
                }.items()
            },
            "x": stock.BytesStorageMetadata(),
        },
        planner_data={"a": ("a",), "x": ("model", 0, "x")},
        storage_data={
            stock.MetadataIndex(fqn, torch.Size([0, 0]), 0): _StorageInfo(path, 0, 24)
            for fqn, path in places.items()
        },
        storage_meta=stock.StorageMeta(checkpoint_id="/some/path", save_id="id", modules=["m"]),
    )


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_what_torch_writes_is_opened(protocol: int) -> None:
    metadata = stock_metadata(a="__0_0.distcp", x="__1_0.distcp")
    assert metadata.storage_meta is not None
    metadata.storage_meta.checkpoint_id = Path("/some/path")
    found = load_metadata_pickle(pickle.dumps(metadata, protocol), key=".metadata")
    assert found.state_dict_metadata == metadata.state_dict_metadata
    assert found.planner_data == metadata.planner_data
    assert found.storage_data == metadata.storage_data
    assert PurePosixPath(found.storage_meta.checkpoint_id) == PurePosixPath("/some/path")


def test_a_checkpoint_by_torchs_own_writer_is_opened(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state_at(3), checkpoint_id=tmp_path, no_dist=True)
    data = (tmp_path / ".metadata").read_bytes()
    found = load_metadata_pickle(data, key=".metadata")
    assert "layers.0" in found.state_dict_metadata
    plain = pickle.loads(data)
    assert found.state_dict_metadata == plain.state_dict_metadata
    assert found.storage_data == plain.storage_data


# Through a load ------------------------------------------------------------------------------


def test_a_malicious_metadata_fails_the_load_and_the_opt_out_is_explicit(tmp_path: Path) -> None:
    backend, canary = Backend(), tmp_path / "canary"
    attack = Calls("os", "system", f"touch {canary}").as_nested()
    backend.shared.put(".metadata", attack)
    found = state_at(1)
    error = failing(AssertionError, load, found, backend.reader())  # DCP's own, quoting ours
    assert "os.system" in str(error)
    assert not canary.exists()
    failing(Exception, load, found, backend.reader(allow_pickle=True))
    assert canary.exists()


def test_an_overwrite_of_a_malicious_metadata_runs_nothing(tmp_path: Path) -> None:
    backend, canary = Backend(), tmp_path / "canary"
    attack = Calls("os", "system", f"touch {canary}").as_nested()
    backend.shared.put(".metadata", attack)
    save(state_at(1), backend.writer(overwrite=True))
    assert not canary.exists()


def test_our_own_metadata_is_loaded_without_opening_its_pickle(tmp_path: Path) -> None:
    """Not even a pickle that was changed and sealed again by somebody who knows how."""
    backend, canary = Backend(), tmp_path / "canary"
    save(state_at(1), backend.writer())
    data = backend.shared.get(".metadata").data
    seal = read_seal(data)
    assert seal is not None
    manifest = get_manifest(backend.shared, data, seal)
    backend.shared.delete_many([".metadata"])
    attack = Calls("os", "system", f"touch {canary}").as_pickle()
    Sealer(backend.shared, ".metadata", None).put_sealed(seal.save_id, attack, manifest)
    found = state_at(0)
    load(found, backend.reader(allow_pickle=True))
    assert found["step"] == 1
    assert not canary.exists()


# Paths ------------------------------------------------------------------------------------------

OUTSIDE = [
    "../other/__0_0.distcp",
    "..",
    "a/../../x",
    "/etc/passwd",
    "//host/share",
    "s3://other-bucket/x",
    "file:///etc/passwd",
    "http://169.254.169.254/latest",
    "C:\\x",
    "C:/x",
    "..\\x",
    "a\\..\\..\\x",
    "",
    "simplecache::s3://x/y",
]


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_path_that_leaves_the_checkpoint_is_refused(path: str) -> None:
    with pytest.raises(CorruptError, match="outside the checkpoint's folder"):
        check_relative(path)


@pytest.mark.parametrize(
    "path", ["__0_0.distcp", "sub/__0_0.distcp", "a..b", "a b", "..a/x", "%2e"]
)
def test_a_path_inside_the_checkpoint_is_taken(path: str) -> None:
    assert check_relative(path) == path


@pytest.mark.parametrize("path", OUTSIDE)
def test_stock_metadata_that_leads_outside_is_refused_without_a_request(path: str) -> None:
    backend = Backend()
    backend.shared.put(".metadata", pickle.dumps(stock_metadata(a=path)))
    reader = backend.reader()
    error = failing(AssertionError, load, {"a": torch.zeros(2, 3)}, reader)
    assert "outside the checkpoint's folder" in str(error)
    assert repr(path) in str(error)
    assert reader._folder.open().num_requests == 1


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_manifest_that_leads_outside_is_refused(path: str) -> None:
    place = ByteRange(0, 24)
    item = StoredItem(path, place, "raw", place, "float32", (2, 3))
    manifest = Manifest(
        save_id="a" * 16,
        entries=(Entry("a", "{}", (2, 3)),),
        items={ItemId("a", (0, 0)): item},
        objects=(DataObject(path, 24),),
    )
    with pytest.raises(CorruptError, match="outside the checkpoint's folder"):
        decode(encode(manifest))


@pytest.mark.parametrize(
    ("save_id", "manifest_key"), [("a" * 16, "../x"), ("/../../x", ".dcpstore-/../../x")]
)
def test_a_seal_that_leads_outside_is_refused(save_id: str, manifest_key: str) -> None:
    backend = Backend()
    _, data = make_metadata(save_id, b"a pickle", b"manifest", embed_manifest_bytes=0)
    text = data[len(b"a pickle") : -12]
    named = json.dumps({**json.loads(text), "manifest_key": manifest_key}).encode()
    footer = named + struct.pack("<I8s", len(named), b"DCPSSEAL")
    backend.shared.put(".metadata", b"a pickle" + footer)
    reader = backend.reader()
    error = failing(AssertionError, load, {"a": torch.zeros(2, 3)}, reader)
    assert "footer" in str(error) or "outside the checkpoint's folder" in str(error)
    assert reader._folder.open().num_requests == 2  # the metadata, and once more
