"""What reads a bucket, by name: an input for it out of a random source, and how it is read.

An input is made by changing files that torch, safetensors and dcpstore wrote. Checksums are made
anew, so that what lies behind them is reached. `Parser.run` ends in success or raises.
"""

from __future__ import annotations

import io
import json
import pickle
import random
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import crc32c
import torch
import torch.distributed.checkpoint as dcp

import dcpstore
from campaign.fuzz.mutation import (
    INTEGERS,
    as_json,
    instructions_of,
    mutated_bytes,
    mutated_json,
    mutated_pickle,
)
from dcpstore.cli.main import main as command_line
from dcpstore.convert import torch_save_to_dcp
from dcpstore.format.seal import Facts, make_metadata, read_seal
from dcpstore.format.tensors import load_record
from dcpstore.read.targets import find_tensor
from dcpstore.read.torch_file import open_torch_file
from dcpstore.store import open_store
from dcpstore.write.commit import keys_named_in

__all__ = ["PARSERS", "Parser"]

_METADATA = ".metadata"
_SAFETENSORS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# What exit codes tell; 1 also stands for a difference that ``diff`` found.
_REFUSALS = {1: dcpstore.CorruptError, 3: dcpstore.NotFoundError, 7: dcpstore.IncompatibleError}


class Parser(Protocol):
    """One reader of stored bytes."""

    def seed_input(self, rng: random.Random) -> bytes: ...
    def make(self, rng: random.Random) -> bytes: ...
    def run(self, data: bytes, draws: random.Random | None) -> None: ...


def _state() -> dict[str, Any]:
    return {
        "model": {
            "a.weight": torch.arange(24.0).reshape(4, 6),
            "b": torch.arange(6, dtype=torch.int64),
            "h": torch.ones(3, dtype=torch.bfloat16),
        },
        "step": 7,
        "names": ["x", {"y": 1.5}],
        "empty": torch.empty(0, 3),
    }


class _Folder:
    """A checkpoint of which one file is changed, read by every command in turn."""

    def __init__(self, folder: Path, key: str) -> None:
        self._good, self._bad = folder / "good", folder / "bad"
        self._out = folder / "out"
        self._key = key
        self._good.mkdir(parents=True)
        self._save(self._good)
        shutil.copytree(self._good, self._bad)
        self._bytes = (self._good / key).read_bytes()

    def _save(self, folder: Path) -> None:
        raise NotImplementedError

    def seed_input(self, rng: random.Random) -> bytes:
        del rng
        return self._bytes

    def run(self, data: bytes, draws: random.Random | None) -> None:
        (self._bad / self._key).write_bytes(data)
        step = len(_COMMANDS) if draws is None else draws.randrange(16)
        if self._key != _METADATA and step >= len(_COMMANDS) - 2:
            step = len(_COMMANDS)  # both are for checkpoints
        if step >= len(_COMMANDS):
            self._load()
        elif step == 0 and self._key == _METADATA:
            keys_named_in(open_store(str(self._bad)), memoryview(data), key=_METADATA)
        else:
            shutil.rmtree(self._out, ignore_errors=True)
            self._out.mkdir()
            words = _COMMANDS[step].format(bad=self._bad, good=self._good, out=self._out).split()
            _run_command(words)

    def _load(self) -> None:
        with dcpstore.open_checkpoint(str(self._bad)) as checkpoint:
            for fqn in checkpoint.keys:
                if fqn in checkpoint.tensors:
                    checkpoint.read_tensor(fqn)
                else:
                    checkpoint.read_value(fqn)


def _run_command(words: list[str]) -> None:
    errors = io.StringIO()
    code = command_line(words, stdout=io.StringIO(), stderr=errors)
    if code in _REFUSALS:
        raise _REFUSALS[code](errors.getvalue())
    if code:
        raise RuntimeError(f"{words[0]} ended with {code}: {errors.getvalue()[-250:]}")


_COMMANDS = (
    "ls {bad}",
    "show {bad}",
    "show {bad} --json",
    "verify {bad}",
    "diff {bad} {good}",
    "diff {good} {bad} --json",
    "convert {bad} {out}/model.pt",
    "copy {bad} {out}/dcp",
    "convert {bad} {out}/hf --to safetensors --keys model.*",
)


class _Stock(_Folder):
    """``.metadata`` of torch's own writer."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, _METADATA)
        value = pickle.loads(self._bytes)
        self._forms = [self._bytes, *(pickle.dumps(value, protocol) for protocol in (2, 4))]
        self._programs = [instructions_of(form) for form in self._forms]

    def _save(self, folder: Path) -> None:
        dcp.save(_state(), checkpoint_id=folder, no_dist=True)

    def make(self, rng: random.Random) -> bytes:
        number = rng.randrange(len(self._forms))
        if rng.random() < 0.2:
            return mutated_bytes(self._forms[number], rng)
        return mutated_pickle(self._programs[number], rng)


class _Ours(_Folder):
    """``.metadata`` of ours: seal and manifest, with checksums that are right again."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, _METADATA)
        data = memoryview(self._bytes)
        seal = read_seal(data)
        assert seal is not None
        self._save_id, self._facts = seal.save_id, seal.facts
        self._pickle = bytes(data[: seal.pickle_bytes])
        manifest = bytes(data[seal.manifest_span.start : seal.manifest_span.end])
        self._version, header_bytes = struct.unpack_from("<II", manifest, 8)
        self._header = json.loads(manifest[16 : 16 + header_bytes])
        self._columns: list[bytes] = []
        at = 16 + header_bytes
        for _, _, _, num_bytes in self._header["columns"]:
            self._columns.append(zlib.decompress(manifest[at : at + num_bytes]))
            at += num_bytes

    def _save(self, folder: Path) -> None:
        dcpstore.save(_state(), str(folder))

    def make(self, rng: random.Random) -> bytes:
        if rng.random() < 0.15:
            return mutated_bytes(self._bytes, rng)
        manifest = self._mutated_manifest(rng)
        _, data = make_metadata(
            self._save_id,
            self._pickle,
            manifest,
            embed_manifest_bytes=len(manifest),
            facts=self._facts,
        )
        return data

    def _mutated_manifest(self, rng: random.Random) -> bytes:
        header, columns = self._header, list(self._columns)
        described = [list(one) for one in header["columns"]]
        for _ in range(rng.choice((1, 1, 2, 3))):
            row = rng.randrange(len(columns))
            if rng.random() < 0.75:
                columns[row] = self._mutated_column(columns[row], described[row], rng)
            else:
                header = {**header, **_changed(header, rng)}
        packed = [zlib.compress(column, 1) for column in columns]
        for one, data in zip(described, packed, strict=True):
            one[3] = len(data)
        if "columns" not in header or header["columns"] is self._header["columns"]:
            header = {**header, "columns": described}
        text = as_json(header, rng) if rng.random() < 0.2 else json.dumps(header).encode()
        start = struct.pack("<8sII", b"DCPSTORE", self._version, len(text))
        body = b"".join([start, text, *packed])
        if rng.random() < 0.05:
            body = mutated_bytes(body, rng)
        return body + struct.pack("<I", crc32c.crc32c(body))

    @staticmethod
    def _mutated_column(column: bytes, described: list[Any], rng: random.Random) -> bytes:
        width = max(1, len(column) // max(described[2], 1))
        if width not in (1, 2, 4, 8) or not column or rng.random() < 0.2:
            return mutated_bytes(column, rng)
        found = bytearray(column)
        at = rng.randrange(len(column) // width) * width
        found[at : at + width] = (rng.choice(INTEGERS) % (1 << 8 * width)).to_bytes(width, "little")
        return bytes(found)


class _OursAttached(_Ours):
    """The same with attachments, and facts in the footer."""

    def _save(self, folder: Path) -> None:
        files = {"rng-{rank}.json": b"{}", "large": bytes(9000), "empty": b""}
        facts = Facts(100, "run", {"loss": 0.5, "worst": float("nan")})
        user = {"a": [1, {"b": None}]}
        dcpstore.save(_state(), str(folder), attachments=files, facts=facts, user_metadata=user)

    def make(self, rng: random.Random) -> bytes:
        data = super().make(rng)
        end, magic = struct.unpack("<I8s", data[-12:].rjust(12))
        if magic != b"DCPSSEAL" or rng.random() < 0.6:
            return data
        try:
            fields = json.loads(data[-12 - end : -12])
        except ValueError:
            return data  # changed byte by byte
        fields.pop("seal_crc32c", None)
        fields["facts"] = mutated_json(fields.get("facts", {}), rng)
        fields["seal_crc32c"] = crc32c.crc32c(json.dumps(fields, separators=(",", ":")).encode())
        text = json.dumps(fields).encode()
        return data[: -12 - end] + text + struct.pack("<I8s", len(text), magic)

    def _load(self) -> None:
        super()._load()
        with dcpstore.open_checkpoint(str(self._bad)) as checkpoint:
            for name in checkpoint.attachments:
                checkpoint.read_attachment(name)
            json.dumps([checkpoint.step, dict(checkpoint.metrics), checkpoint.user_metadata])


def _changed(header: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    changed = mutated_json(dict(header), rng)
    return changed if isinstance(changed, dict) else {}


class _Safetensors(_Folder):
    """The header of a safetensors file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, _SAFETENSORS)
        length = int.from_bytes(self._bytes[:8], "little")
        self._header = json.loads(self._bytes[8 : 8 + length])
        self._payload = self._bytes[8 + length :]

    def _save(self, folder: Path) -> None:
        from safetensors.torch import save_file

        save_file(dict(_state()["model"]), folder / _SAFETENSORS)

    def make(self, rng: random.Random) -> bytes:
        if rng.random() < 0.15:
            return mutated_bytes(self._bytes, rng)
        text = as_json(mutated_json(self._header, rng), rng)
        length = len(text) if rng.random() < 0.95 else rng.choice(INTEGERS) % (1 << 64)
        return struct.pack("<Q", length) + text + self._payload


class _Index(_Safetensors):
    """``model.safetensors.index.json`` beside two files."""

    def __init__(self, folder: Path) -> None:
        _Folder.__init__(self, folder, _INDEX)
        self._index = json.loads(self._bytes)

    def _save(self, folder: Path) -> None:
        from safetensors.torch import save_file

        model = _state()["model"]
        names = sorted(model)
        files = {name: f"part-{number}.safetensors" for number, name in enumerate(names)}
        for name, file in files.items():
            save_file({name: model[name]}, folder / file)
        index = {"metadata": {"total_size": 114}, "weight_map": files}
        (folder / _INDEX).write_text(json.dumps(index))

    def make(self, rng: random.Random) -> bytes:
        return as_json(mutated_json(self._index, rng), rng)


class _Saved:
    """What ``torch.save`` wrote, with its pickle or its zip directory changed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._forms = [_saved(value) for value in self._values()]
        self._members = [_members_of(form) for form in self._forms]
        self._programs = [instructions_of(one["archive/data.pkl"]) for one in self._members]

    def _values(self) -> list[Any]:
        base = torch.arange(12.0)
        shared = {"all": base, "rows": base.view(3, 4)[1:], "p": torch.nn.Parameter(base[:2])}
        return [
            _state(),
            shared,
            {1: (1, 2.5, None, b"bytes", {3, 4}), "c": complex(1, 2), "s": torch.Size((2, 3))},
            torch.eye(3).to_sparse(),
        ]

    def seed_input(self, rng: random.Random) -> bytes:
        return rng.choice(self._forms)

    def make(self, rng: random.Random) -> bytes:
        number = rng.randrange(len(self._forms))
        form = self._forms[number]
        match rng.randrange(8):
            case 0:
                return mutated_bytes(form, rng)
            case 1:  # the directory at the end
                at = form.rindex(b"PK\x01\x02", 0, form.index(b"PK\x05\x06"))
                return form[:at] + mutated_bytes(form[at:], rng)
            case 2:
                members = dict(self._members[number])
                name = rng.choice(list(members))
                members[name] = mutated_bytes(members[name], rng)
                deflates = rng.random() < 0.2
                return _zipped(members, zipfile.ZIP_DEFLATED if deflates else zipfile.ZIP_STORED)
        program = mutated_pickle(self._programs[number], rng)
        return _zipped({**self._members[number], "archive/data.pkl": program})


class _TorchFile(_Saved):
    """A file of ``torch.save``, opened by ranges, read, shown, and converted."""

    def run(self, data: bytes, draws: random.Random | None) -> None:
        path = self._folder / "model.pt"
        path.write_bytes(data)
        step = 7 if draws is None else draws.randrange(8)
        if step == 0:
            _run_command(["show", str(path)])
        elif step == 1:
            out = self._folder / "out"
            shutil.rmtree(out, ignore_errors=True)
            torch_save_to_dcp(str(path), str(out))
        else:
            with open_torch_file(path) as file:
                for key in file.storages:
                    file.read_storage(key)


class _Value(_Saved):
    """A value in a checkpoint: a whole record of ``torch.save``, in memory."""

    def _values(self) -> list[Any]:
        return [7, "text", *super()._values()]

    def run(self, data: bytes, draws: random.Random | None) -> None:
        del draws
        try:
            load_record(data, "the value", device="cpu")
        except pickle.UnpicklingError as error:  # which every caller tells as CorruptError
            raise dcpstore.CorruptError(str(error)[:200]) from error


class _Head(_Saved):
    """The head of a record of one tensor."""

    def _values(self) -> list[Any]:
        return [torch.ones(2, 3), torch.nn.Parameter(torch.ones(3)), torch.tensor(1)]

    def run(self, data: bytes, draws: random.Random | None) -> None:
        num_bytes = len(data) if draws is None else draws.choice((64, 512, 1024, len(data)))
        find_tensor(lambda start, end: memoryview(data)[start : min(end, num_bytes)], len(data))


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _members_of(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _zipped(members: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return stream.getvalue()


PARSERS: Mapping[str, Callable[[Path], Parser]] = {
    "stock metadata": _Stock,
    "our metadata": _Ours,
    "our attachments": _OursAttached,
    "safetensors": _Safetensors,
    "index.json": _Index,
    "torch.save file": _TorchFile,
    "value": _Value,
    "record head": _Head,
}
