"""Folders of safetensors files whose headers and indices were made to do harm."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dcpstore
from dcpstore.errors import CorruptError
from dcpstore.format.safetensors import header_length, parse_file
from dcpstore.text import check_natural, parse_json

KEY = "model.safetensors"
INDEX = "model.safetensors.index.json"


def tensor(**fields: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **fields}


def sharded(text: str) -> dict[str, Any]:
    return {"__metadata__": {"DCP_SHARDING_INFO": text}, "a": tensor()}


HEADERS: dict[str, tuple[Any, str]] = {
    "a huge dimension beside 0": (
        {"a": tensor(shape=[2**70, 0], data_offsets=[0, 0])},
        "'a': .*no count",
    ),
    "huge dimensions beside 0": (
        {"a": tensor(shape=[2**40, 2**40, 0], data_offsets=[0, 0])},
        "'a': .*no count",
    ),
    "4,000 numbers of 4,200 digits": (
        b'{"a":{"dtype":"F32","shape":[' + b",".join([b"9" * 4200] * 4000) + b"]}}",
        "4200 digits",
    ),
    "65 dimensions": ({"a": tensor(shape=[1] * 65)}, "at most 64"),
    "one name of 20,000 twice": (
        b"{%b}" % b",".join(b'"t%d":{}' % (number % 19_999) for number in range(20_000)),
        "'t0' is there twice",
    ),
    "lists in one list": (b"[" + b"[]," * 3_000_000 + b"[]]", "memory"),
    "lists in lists": (b"[" * 100_000, "nested"),
    "a shape that is no number": (
        b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}',
        "NaN",
    ),
    "infinite offsets": (
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,Infinity]}}',
        "Infinity",
    ),
    "a shape of 1e999": (b'{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}}', "inf"),
    "a shape of floats": ({"a": tensor(shape=[1.0])}, "'a': 1.0 is no count"),
    "a shape of truths": ({"a": tensor(shape=[True])}, "'a': True is no count"),
    "a shape of texts": ({"a": tensor(shape=["1"])}, "'a': '1' is no count"),
    "a shape that is a text": ({"a": tensor(shape="1")}, "'a': a list"),
    "a negative shape": ({"a": tensor(shape=[-1])}, "'a': -1 is no count"),
    "negative offsets": ({"a": tensor(data_offsets=[-4, 0])}, "'a': -4 is no count"),
    "three offsets": ({"a": tensor(data_offsets=[0, 4, 8])}, "'a': .*unpack"),
    "offsets backwards": ({"a": tensor(data_offsets=[4, 0])}, "'a' .*cannot have -4 bytes"),
    "overlapping tensors": ({"a": tensor(), "b": tensor()}, "'b' .*overlaps"),
    "a hole": ({"a": tensor(data_offsets=[4, 8])}, "'a' .*belong to no tensor"),
    "a dtype that is a list": ({"a": tensor(dtype=[])}, "'a': it has the unknown dtype"),
    "a tensor that is a list": ({"a": []}, "'a': .*list"),
    "a tensor without a shape": ({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, "'a': 'shape'"),
    "a header that is a text": (b'"abc"', "str"),
    "metadata that are a list": ({"__metadata__": [1], "a": tensor()}, "__metadata__"),
    "metadata that are numbers": ({"__metadata__": {"x": 1}, "a": tensor()}, "__metadata__"),
    "shards that are a list": (sharded("[]"), "DCP_SHARDING_INFO"),
    "shards that are no JSON": (sharded("{"), "damaged"),
    "a shard that is a list": (sharded('{"a":[]}'), "'a': DCP_SHARDING_INFO"),
    "a shard of two dimensions": (sharded('{"a":{"saved_offsets":[1,2]}}'), "'a': the shard"),
    "a shard beyond all bounds": (
        sharded('{"a":{"saved_offsets":[9223372036854775807]}}'),
        "'a': .*no count",
    ),
    "half a character": (b'{"a\xff":1}', "utf-8"),
    "UTF-16": ('{"a":1}'.encode("utf-16"), "utf-8"),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_hostile_header_is_refused_with_its_file_and_tensor(what: str) -> None:
    header, match = HEADERS[what]
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    with pytest.raises(CorruptError, match=f"(?s)^{KEY}.*{match}") as caught:
        parse_file(data, KEY)
    assert caught.value.key == KEY
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("data", [b"", b"1234567", struct.pack("<Q", 1 << 62), bytes(8)])
def test_a_file_that_starts_like_no_safetensors_file_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptError, match=KEY):
        header_length(data, KEY)


def test_tensors_may_come_in_any_order() -> None:
    header = {"a": tensor(data_offsets=[4, 8]), "b": tensor()}
    assert [one.fqn for one in parse_file(json.dumps(header).encode(), KEY).tensors] == ["a", "b"]


def write(folder: Path, name: str, header: Any = None, data: bytes = b"1234") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header or {"a": tensor()}).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + data)


COMMANDS = (
    ("show", "HERE"),
    ("verify", "HERE"),
    ("ls", "HERE"),
    ("convert", "HERE", "THERE", "--to", "dcp"),
    ("diff", "HERE", "HERE"),
)

INDICES: dict[str, Any] = {
    "no JSON": b"{",
    "nested": b"[" * 100_000,
    "nested maps": b'{"weight_map":' * 50_000,
    "large": b'{"weight_map":[' + b"[]," * 3_000_000 + b"[]]}",
    "a list": [],
    "a number": 1,
    "no map": {},
    "a list for the map": {"weight_map": ["a"]},
    "a number for a file": {"weight_map": {"a": 1}},
    "a list for a file": {"weight_map": {"a": []}},
    "null for a file": {"weight_map": {"a": None}},
    "a file above": {"weight_map": {"a": "../secret.safetensors"}},
    "a file elsewhere": {"weight_map": {"a": "/etc/secret.safetensors"}},
    "a URL": {"weight_map": {"a": "s3://other/secret.safetensors"}},
    "a file with ESC": {"weight_map": {"a": "\x1b[2J.safetensors"}},
    "half a character": {"weight_map": {"a": "\ud800.safetensors"}},
    "a name twice": b'{"weight_map":{"a":"model.safetensors","a":"model.safetensors"}}',
    "a number that is none": b'{"weight_map":{"a":NaN}}',
}


@pytest.mark.parametrize("what", INDICES)
def test_a_hostile_index_is_refused(tmp_path: Path, cli, what: str) -> None:
    index = INDICES[what]
    here = tmp_path / "here"
    here.mkdir()
    (here / INDEX).write_bytes(index if isinstance(index, bytes) else json.dumps(index).encode())
    write(here, KEY)
    with pytest.raises(CorruptError, match=r"index\.json|names the object"):
        dcpstore.load({"a": torch.zeros(1)}, here)
    for command in COMMANDS:
        words = {"HERE": str(here), "THERE": str(tmp_path / "there")}
        code, out, err = cli(*(words.get(word, word) for word in command))
        assert code in (0, 1), (command, err)
        assert "\x1b" not in out + err
        assert (code == 1) == (command[0] != "ls"), (command, out, err)


def test_an_index_that_names_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises((CorruptError, dcpstore.NotFoundError), match=r"gone\.safetensors"):
        dcpstore.load({"a": torch.zeros(1)}, tmp_path)


@pytest.mark.parametrize(
    "what",
    [
        "a huge dimension beside 0",
        "lists in lists",
        "overlapping tensors",
        "a shard that is a list",
    ],
)
def test_every_command_ends_with_an_error_of_its_class(tmp_path: Path, cli, what: str) -> None:
    here = tmp_path / "here"
    here.mkdir()
    write(here, KEY, HEADERS[what][0])
    with pytest.raises(CorruptError):
        dcpstore.load({"a": torch.zeros(1)}, here)
    for command in COMMANDS:
        words = {"HERE": str(here), "THERE": str(tmp_path / "there")}
        code, out, err = cli(*(words.get(word, word) for word in command))
        assert code == (0 if command[0] == "ls" else 1), (command, out, err)


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"{}", None),
        (None, b"123"),
        (b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}', b""),
    ],
)
def test_a_file_that_is_shorter_than_it_says_is_refused(tmp_path: Path, header, data) -> None:
    write(tmp_path, KEY, header, data or b"")
    if data is None:
        (tmp_path / KEY).write_bytes(struct.pack("<Q", 5000) + header)
    with pytest.raises(CorruptError, match="ends at byte"):
        dcpstore.load({"a": torch.zeros(1 if header is None else 9)}, tmp_path)


# --- JSON ---------------------------------------------------------------------------------


def test_json_within_the_limits_is_what_pythons_own_parser_returns() -> None:
    value = {"a": [1, -2, 1.5, None, True, "\ud83d\ude00", "\ud800"], "b": {"c": {}, "d": []}}
    text = json.dumps(value)
    assert parse_json(text) == parse_json(text.encode()) == json.loads(text)
    assert parse_json(f"[{2**64 - 1}, {-(2**63)}]") == [2**64 - 1, -(2**63)]


def test_what_is_no_count_is_refused_in_few_words() -> None:
    for value in (True, 1.0, -1, 1 << 63, None, "1", float("nan"), 10**5000):
        with pytest.raises(ValueError, match="no count") as caught:
            check_natural(value)
        assert len(str(caught.value)) < 100


MEASURED = """
import resource, sys, time
from dcpstore.errors import CorruptError
from dcpstore.format.safetensors import parse_file

before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
data = open(sys.argv[1], "rb").read()
try:
    parse_file(memoryview(data), "key")
except CorruptError:
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(grown >> 10)
"""


@pytest.mark.parametrize("what", ["twice", "lists"])
def test_a_large_hostile_header_takes_little_memory(tmp_path: Path, what: str) -> None:
    entry = b'"t%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    if what == "twice":
        entries = (entry % (number % 399_999) for number in range(400_000))
        data = b"{" + b",".join(entries) + b"}"
    else:
        data = b"[" + b"[]," * 26_000_000 + b"[]]"
    (tmp_path / "header").write_bytes(data)
    ran = subprocess.run(
        [sys.executable, "-c", MEASURED, tmp_path / "header"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert 0 <= int(ran.stdout) < 300  # MiB; 22 and 78 of them are the file, twice each
